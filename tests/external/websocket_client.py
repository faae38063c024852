#!/usr/bin/env python3
"""Tests websocket_server.py with the common WebSocket library.

    websocket_client.py HOST:PORT [--ca FILE] [--refused] [--only NAME ...]

Prints `ok NAME` or `FAILED NAME: why` for each check, and fails if one of them failed. With `--refused`
it expects refusals by a rate limit instead. With `--ca` it uses TLS.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import ssl
import sys
import traceback
import urllib.parse
import uuid

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, InvalidStatus

# A check that hangs fails before the timeout of the test. The longest check transfers 128 MiB.
LIMIT_S = 60
MIB = 1024 * 1024
CHECKS = []


def check(function):
    CHECKS.append((function.__name__, function))
    return function


def assert_equal(actual, expected):
    if actual != expected:
        raise AssertionError(f"{str(actual)[:200]} instead of {str(expected)[:200]}")


class Endpoint:
    """The address and TLS settings of the server."""

    def __init__(self, options):
        self._target, self._name = options.target, options.name
        self._context = ssl.create_default_context(cafile=options.ca) if options.ca else None

    def to(self, path, **settings):
        scheme = "wss" if self._context else "ws"
        # An automatic ping would wait behind a large message; the checks of pings send their own.
        timeouts = {"open_timeout": LIMIT_S, "close_timeout": LIMIT_S}
        defaults = {"ping_interval": None, "max_size": None, "proxy": None, **timeouts}
        settings = {**defaults, **settings}
        if self._context:
            settings |= {"ssl": self._context, "server_hostname": self._name}
        return connect(f"{scheme}://{self._target}{path}", **settings)

    async def outcome(self, name):
        """Returns the close code and reason that the server received."""
        async with self.to(f"/outcome?of={name}") as socket:
            return json.loads(await socket.recv())


async def refusal(connecting):
    """Returns the response to a handshake that must be refused."""
    try:
        async with connecting:
            pass
    except InvalidStatus as refused:
        return refused.response
    raise AssertionError("the handshake was accepted")


@check
async def text_and_binary(endpoint):
    async with endpoint.to("/echo") as socket:
        for message in ("", "hello", "grüße, 世界 🎉", b"", b"\x00\xff" * 1000, "x" * 65_535, b"y" * 65_536):
            await socket.send(message)
            assert_equal(await socket.recv(), message)


@check
async def without_compression(endpoint):
    async with endpoint.to("/echo", compression=None) as socket:
        message = os.urandom(100_000)
        await socket.send(message)
        assert_equal(await socket.recv(), message)


@check
async def many_at_once(endpoint):
    """Sends messages without waiting for responses."""
    async with endpoint.to("/echo") as socket:
        sending = asyncio.create_task(send_all(socket, (str(each) for each in range(5000))))
        for each in range(5000):
            assert_equal(await socket.recv(), str(each))
        await sending


async def send_all(socket, messages):
    for message in messages:
        await socket.send(message)


@check
async def fragments_are_forwarded_at_once(endpoint):
    """Sends the second fragment after the first came back: a delayed fragment makes this check hang."""
    async with endpoint.to("/fragments", compression=None) as socket:
        fragments_to_send = asyncio.Queue()

        async def message():
            while (fragment := await fragments_to_send.get()) is not None:
                yield fragment

        sending = asyncio.create_task(socket.send(message()))
        fragments_to_send.put_nowait("first")
        fragments = socket.recv_streaming()
        assert_equal(await anext(fragments), "first")
        for round_number in range(20):
            fragments_to_send.put_nowait(f"then {round_number}")
            assert_equal(await anext(fragments), f"then {round_number}")
        fragments_to_send.put_nowait(None)
        await sending
        assert_equal("".join([piece async for piece in fragments]), "")


@check
async def a_message_of_many_fragments(endpoint):
    async with endpoint.to("/echo") as socket:
        pieces = [b"%d," % each for each in range(3000)]
        await socket.send(iter(pieces))
        assert_equal(await socket.recv(), b"".join(pieces))


@check
async def a_message_of_64_mib(endpoint):
    async with endpoint.to("/echo", compression=None) as socket:
        block = os.urandom(MIB)
        digest = hashlib.sha256(block * 64).digest()
        # Sends and receives at once: the server responds when it has the whole message.
        sending = asyncio.create_task(socket.send(block * 64))
        message = await socket.recv()
        await sending
        assert_equal((len(message), hashlib.sha256(message).digest()), (64 * MIB, digest))


@check
async def pings_of_the_client(endpoint):
    async with endpoint.to("/echo") as socket:
        for data in (b"", b"x" * 125):
            await asyncio.wait_for(await socket.ping(data), LIMIT_S)
        await socket.send("still here")
        assert_equal(await socket.recv(), "still here")


@check
async def pings_of_the_server(endpoint):
    async with endpoint.to("/ping") as socket:
        assert_equal(await socket.recv(), "pong received")


@check
async def closed_by_the_server(endpoint):
    for code, reason in ((1000, ""), (1001, "going away"), (3000, "application code"), (4999, "ü" * 60)):
        async with endpoint.to(f"/close?code={code}&reason={urllib.parse.quote(reason)}") as socket:
            with contextlib.suppress(ConnectionClosed):
                await socket.recv()
            assert_equal((socket.close_code, socket.close_reason), (code, reason))


@check
async def closed_by_the_client(endpoint):
    for code, reason in ((1000, ""), (1001, "going away"), (3000, "application code")):
        name = uuid.uuid4()
        async with endpoint.to(f"/echo?name={name}") as socket:
            await socket.send("last message")
            assert_equal(await socket.recv(), "last message")
            await socket.close(code, reason)
            assert_equal(socket.close_code, code)
        assert_equal(await endpoint.outcome(name), {"code": code, "reason": reason})


@check
async def dropped_by_the_server(endpoint):
    async with endpoint.to("/drop") as socket:
        assert_equal(await socket.recv(), "going")
        await socket.send("go")
        try:
            await socket.recv()
        except ConnectionClosedError as end:
            # A client reports 1006 when no close frame arrived.
            assert_equal((end.rcvd, socket.close_code), (None, 1006))
            return
        raise AssertionError("received another message")


@check
async def dropped_by_the_client(endpoint):
    """The server notices at once that the connection has ended."""
    name = uuid.uuid4()
    async with endpoint.to(f"/echo?name={name}") as socket:
        await socket.send("going")
        assert_equal(await socket.recv(), "going")
        socket.transport.abort()
        assert_equal((await endpoint.outcome(name))["code"], 1006)


@check
async def dropped_within_a_message(endpoint):
    name = uuid.uuid4()
    async with endpoint.to(f"/fragments?name={name}", compression=None) as socket:
        stalled = asyncio.Event()

        async def message():
            yield "started"
            await stalled.wait()

        sending = asyncio.create_task(socket.send(message()))
        assert_equal(await anext(socket.recv_streaming()), "started")
        socket.transport.abort()
        stalled.set()
        assert_equal((await endpoint.outcome(name))["code"], 1006)
        with contextlib.suppress(ConnectionClosed):
            await sending


@check
async def handshake_fields_and_subprotocol(endpoint):
    async with endpoint.to("/headers", subprotocols=["chat.v1", "other"], origin="https://page.test") as socket:
        actual = json.loads(await socket.recv())
        fields = {name: value for name, value in actual["fields"]}
        assert_equal((actual["subprotocol"], socket.subprotocol), ("chat.v1", "chat.v1"))
        assert_equal(fields["origin"], "https://page.test")
        assert_equal((fields["upgrade"].lower(), fields["sec-websocket-version"]), ("websocket", "13"))
        assert_equal("upgrade" in fields["connection"].lower(), True)


@check
async def refused_by_the_server(endpoint):
    for path, status, body in (("/forbidden", 403, b"members only\n"), ("/nowhere", 404, b"no such path\n")):
        refused = await refusal(endpoint.to(path))
        assert_equal((refused.status_code, refused.body), (status, body))


@check
async def two_hundred_sockets(endpoint):
    async with contextlib.AsyncExitStack() as stack:
        sockets = [await stack.enter_async_context(endpoint.to("/echo")) for _ in range(200)]
        for round_number in range(3):
            for each, socket in enumerate(sockets):
                await socket.send(f"{round_number} {each}")
            for each, socket in enumerate(sockets):
                assert_equal(await socket.recv(), f"{round_number} {each}")


async def refused(endpoint):
    response = await refusal(endpoint.to("/echo"))
    assert_equal((response.status_code, response.headers["content-type"]), (429, "application/problem+json"))
    assert_equal(json.loads(response.body)["status"], 429)


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--ca", metavar="FILE", help="PEM file of the authority; enables TLS")
    parser.add_argument("--name", default="localhost", help="the name in the certificate (default localhost)")
    parser.add_argument("--refused", action="store_true", help="expect refusals by a rate limit")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these checks")
    options = parser.parse_args()
    endpoint = Endpoint(options)
    checks = CHECKS
    if options.refused:
        checks = [("refused", refused)]
    elif options.only:
        checks = [(name, function) for name, function in CHECKS if name in options.only]
    failed = 0
    for name, function in checks:
        failed += not await run_check(name, function, endpoint)
    sys.exit(1 if failed or not checks else 0)


async def run_check(name, function, endpoint):
    try:
        await asyncio.wait_for(function(endpoint), LIMIT_S)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)
        lines = [f"{each.name}:{each.lineno}" for each in where if each.filename == __file__]
        print(f"FAILED {name}: {type(error).__name__} {error} ({', '.join(lines)})", flush=True)
        return False
    print(f"ok {name}", flush=True)
    return True


if __name__ == "__main__":
    asyncio.run(main())
