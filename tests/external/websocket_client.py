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

# A check that hangs fails before the test's own limit. The longest check transfers 128 MiB.
LIMIT_S = 60
MIB = 1024 * 1024
CHECKS = []


def check(function):
    CHECKS.append((function.__name__, function))
    return function


def same(seen, wanted):
    if seen != wanted:
        raise AssertionError(f"{str(seen)[:200]} instead of {str(wanted)[:200]}")


class Way:
    """The way to the server."""

    def __init__(self, options):
        self._target, self._name = options.target, options.name
        self._context = ssl.create_default_context(cafile=options.ca) if options.ca else None

    def to(self, path, **settings):
        scheme = "wss" if self._context else "ws"
        # A ping would wait behind a large message; the checks of pings send their own.
        usual = {"ping_interval": None, "max_size": None, "open_timeout": LIMIT_S, "close_timeout": LIMIT_S, "proxy": None}
        settings = {**usual, **settings}
        if self._context:
            settings |= {"ssl": self._context, "server_hostname": self._name}
        return connect(f"{scheme}://{self._target}{path}", **settings)

    async def outcome(self, name):
        """Returns how the server saw a connection end."""
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
async def text_and_binary(way):
    async with way.to("/echo") as socket:
        for message in ("", "hello", "grüße, 世界 🎉", b"", b"\x00\xff" * 1000, "x" * 65_535, b"y" * 65_536):
            await socket.send(message)
            same(await socket.recv(), message)


@check
async def without_compression(way):
    async with way.to("/echo", compression=None) as socket:
        message = os.urandom(100_000)
        await socket.send(message)
        same(await socket.recv(), message)


@check
async def many_at_once(way):
    """Sends messages without waiting for responses."""
    async with way.to("/echo") as socket:
        sending = asyncio.create_task(send_all(socket, (str(each) for each in range(5000))))
        for each in range(5000):
            same(await socket.recv(), str(each))
        await sending


async def send_all(socket, messages):
    for message in messages:
        await socket.send(message)


@check
async def fragments_as_they_come(way):
    """Sends the second fragment after the first came back: a fragment that is held back hangs here."""
    async with way.to("/fragments", compression=None) as socket:
        words = asyncio.Queue()

        async def message():
            while (word := await words.get()) is not None:
                yield word

        sending = asyncio.create_task(socket.send(message()))
        words.put_nowait("first")
        coming = socket.recv_streaming()
        same(await anext(coming), "first")
        for turn in range(20):
            words.put_nowait(f"then {turn}")
            same(await anext(coming), f"then {turn}")
        words.put_nowait(None)
        await sending
        same("".join([piece async for piece in coming]), "")


@check
async def a_message_of_many_fragments(way):
    async with way.to("/echo") as socket:
        pieces = [b"%d," % each for each in range(3000)]
        await socket.send(iter(pieces))
        same(await socket.recv(), b"".join(pieces))


@check
async def a_message_of_64_mib(way):
    async with way.to("/echo", compression=None) as socket:
        block = os.urandom(MIB)
        digest = hashlib.sha256(block * 64).digest()
        # Sends and receives at once: the server responds when it has the whole message.
        sending = asyncio.create_task(socket.send(block * 64))
        message = await socket.recv()
        await sending
        same((len(message), hashlib.sha256(message).digest()), (64 * MIB, digest))


@check
async def pings_of_the_client(way):
    async with way.to("/echo") as socket:
        for data in (b"", b"x" * 125):
            await asyncio.wait_for(await socket.ping(data), LIMIT_S)
        await socket.send("still here")
        same(await socket.recv(), "still here")


@check
async def pings_of_the_server(way):
    async with way.to("/ping") as socket:
        same(await socket.recv(), "the pong came")


@check
async def closed_by_the_server(way):
    for code, reason in ((1000, ""), (1001, "going away"), (3000, "of my own"), (4999, "ü" * 60)):
        async with way.to(f"/close?code={code}&reason={urllib.parse.quote(reason)}") as socket:
            with contextlib.suppress(ConnectionClosed):
                await socket.recv()
            same((socket.close_code, socket.close_reason), (code, reason))


@check
async def closed_by_the_client(way):
    for code, reason in ((1000, ""), (1001, "going away"), (3000, "of my own")):
        name = uuid.uuid4()
        async with way.to(f"/echo?name={name}") as socket:
            await socket.send("last words")
            same(await socket.recv(), "last words")
            await socket.close(code, reason)
            same(socket.close_code, code)
        same(await way.outcome(name), {"code": code, "reason": reason})


@check
async def broken_off_by_the_server(way):
    async with way.to("/drop") as socket:
        same(await socket.recv(), "going")
        await socket.send("go")
        try:
            await socket.recv()
        except ConnectionClosedError as end:
            # A client reports 1006 when no close frame arrived.
            same((end.rcvd, socket.close_code), (None, 1006))
            return
        raise AssertionError("one more message")


@check
async def broken_off_by_the_client(way):
    """The server notices at once, and keeps no dead connection."""
    name = uuid.uuid4()
    async with way.to(f"/echo?name={name}") as socket:
        await socket.send("going")
        same(await socket.recv(), "going")
        socket.transport.abort()
        same((await way.outcome(name))["code"], 1006)


@check
async def broken_off_within_a_message(way):
    name = uuid.uuid4()
    async with way.to(f"/fragments?name={name}", compression=None) as socket:
        stalled = asyncio.Event()

        async def message():
            yield "begun"
            await stalled.wait()

        sending = asyncio.create_task(socket.send(message()))
        same(await anext(socket.recv_streaming()), "begun")
        socket.transport.abort()
        stalled.set()
        same((await way.outcome(name))["code"], 1006)
        with contextlib.suppress(ConnectionClosed):
            await sending


@check
async def what_is_agreed_on(way):
    async with way.to("/headers", subprotocols=["chat.v1", "other"], origin="https://page.test") as socket:
        seen = json.loads(await socket.recv())
        fields = {name: value for name, value in seen["fields"]}
        same((seen["subprotocol"], socket.subprotocol), ("chat.v1", "chat.v1"))
        same(fields["origin"], "https://page.test")
        same((fields["upgrade"].lower(), fields["sec-websocket-version"]), ("websocket", "13"))
        same("upgrade" in fields["connection"].lower(), True)


@check
async def refused_by_the_server(way):
    for path, status, body in (("/forbidden", 403, b"members only\n"), ("/nowhere", 404, b"no such way\n")):
        refused = await refusal(way.to(path))
        same((refused.status_code, refused.body), (status, body))


@check
async def two_hundred_sockets(way):
    async with contextlib.AsyncExitStack() as stack:
        sockets = [await stack.enter_async_context(way.to("/echo")) for _ in range(200)]
        for turn in range(3):
            for each, socket in enumerate(sockets):
                await socket.send(f"{turn} {each}")
            for each, socket in enumerate(sockets):
                same(await socket.recv(), f"{turn} {each}")


async def refused(way):
    answer = await refusal(way.to("/echo"))
    same((answer.status_code, answer.headers["content-type"]), (429, "application/problem+json"))
    same(json.loads(answer.body)["status"], 429)


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--ca", metavar="FILE", help="PEM file of the authority; speaks TLS")
    parser.add_argument("--name", default="localhost", help="what the certificate says (default localhost)")
    parser.add_argument("--refused", action="store_true", help="a rate limit is used up")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks only")
    options = parser.parse_args()
    way = Way(options)
    checks = CHECKS
    if options.refused:
        checks = [("refused", refused)]
    elif options.only:
        checks = [(name, function) for name, function in CHECKS if name in options.only]
    broken = 0
    for name, function in checks:
        broken += not await held(name, function, way)
    sys.exit(1 if broken or not checks else 0)


async def held(name, function, way):
    try:
        await asyncio.wait_for(function(way), LIMIT_S)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)
        lines = [f"{each.name}:{each.lineno}" for each in where if each.filename == __file__]
        print(f"FAILED {name}: {type(error).__name__} {error} ({', '.join(lines)})", flush=True)
        return False
    print(f"ok {name}", flush=True)
    return True


if __name__ == "__main__":
    asyncio.run(main())
