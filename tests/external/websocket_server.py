#!/usr/bin/env python3
"""A WebSocket server for the tests, with the common WebSocket library.

    websocket_server.py [--tls CERTIFICATE KEY] [--port PORT]

Listens on PORT, or on a port that the system chooses, and prints `listening on 127.0.0.1:PORT`. The path selects the
behaviour: `/echo` returns every message, `/fragments` every fragment at once, `/close` closes as
requested, `/drop` drops the connection, `/ping` pings the client, `/outcome` returns how another
connection ended, `/forbidden` refuses the handshake. The server is independent of the gateway before it.
"""

import argparse
import asyncio
import http
import json
import ssl
import urllib.parse

from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

# Longer than any test waits.
PATIENCE_S = 60
# How named connections have ended, each a future.
OUTCOMES = {}


def outcome_of(name):
    return OUTCOMES.setdefault(name, asyncio.get_running_loop().create_future())


async def echo(socket, _ask):
    async for message in socket:
        await socket.send(message)


async def fragments(socket, _ask):
    """Returns each fragment at once, as a fragment of one message."""
    try:
        while True:
            await socket.send(socket.recv_streaming())
    except ConnectionClosed:
        pass


async def close(socket, ask):
    await socket.close(int(ask["code"]), ask.get("reason", ""))


async def drop(socket, _ask):
    """Sends one message and drops the connection: no close frame, no end of TLS."""
    await socket.send("going")
    await socket.recv()
    socket.transport.abort()


async def ping(socket, _ask):
    """Pings the client, whose library responds with a pong."""
    await asyncio.wait_for(await socket.ping(b"are you there"), PATIENCE_S)
    await socket.send("the pong came")


async def headers(socket, _ask):
    """Returns the fields of the handshake and the negotiated options."""
    seen = [[name.lower(), value] for name, value in socket.request.headers.raw_items()]
    await socket.send(json.dumps({"fields": seen, "subprotocol": socket.subprotocol}))


async def outcome(socket, ask):
    await socket.send(json.dumps(await asyncio.wait_for(outcome_of(ask["of"]), PATIENCE_S)))


WAYS = {"/echo": echo, "/fragments": fragments, "/close": close, "/drop": drop, "/ping": ping,
        "/headers": headers, "/outcome": outcome}


async def handle(socket):
    target = urllib.parse.urlsplit(socket.request.path)
    ask = dict(urllib.parse.parse_qsl(target.query))
    try:
        await WAYS[target.path](socket, ask)
        await socket.wait_closed()
    except ConnectionClosed:
        pass
    finally:
        if "name" in ask:
            await socket.wait_closed()
            outcome_of(ask["name"]).set_result({"code": socket.close_code, "reason": socket.close_reason})


def agree(_connection, offered):
    """Selects the first known subprotocol of the client, or none."""
    return next((each for each in offered if each in ("chat.v1", "chat.v2")), None)


def answer(connection, request):
    """Refuses a handshake; `None` continues it."""
    path = urllib.parse.urlsplit(request.path).path
    if path == "/forbidden":
        return connection.respond(http.HTTPStatus.FORBIDDEN, "members only\n")
    if path not in WAYS:
        return connection.respond(http.HTTPStatus.NOT_FOUND, "no such way\n")
    return None


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tls", nargs=2, metavar=("CERTIFICATE", "KEY"), help="PEM files; clear text without")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    context = None
    if options.tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*options.tls)
    server = await serve(
        handle, "127.0.0.1", options.port, ssl=context, process_request=answer, max_size=None,
        select_subprotocol=agree, ping_interval=None,
    )
    print(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
