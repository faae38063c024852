#!/usr/bin/env python3
"""A WebSocket server for the tests, with the common WebSocket library.

    websocket_server.py [--tls CERTIFICATE KEY] [--port PORT]

Listens on PORT, or on a port that the system chooses, and prints `listening on 127.0.0.1:PORT`. The path selects the
behaviour: `/echo` returns every message, `/fragments` every fragment at once, `/close` closes as
requested, `/drop` drops the connection, `/ping` pings the client, `/outcome` returns how another
connection ended, `/forbidden` refuses the handshake. The server does not depend on the gateway.
"""

import argparse
import asyncio
import http
import json
import ssl
import urllib.parse

from websockets.asyncio.server import serve
from websockets.exceptions import ConnectionClosed

# Longer than the timeout of any test.
TIMEOUT_S = 60
# The close codes of named connections, each a future.
OUTCOMES = {}


def outcome_of(name):
    return OUTCOMES.setdefault(name, asyncio.get_running_loop().create_future())


async def echo(socket, _query):
    async for message in socket:
        await socket.send(message)


async def fragments(socket, _query):
    """Returns each fragment at once, as a fragment of one message."""
    try:
        while True:
            await socket.send(socket.recv_streaming())
    except ConnectionClosed:
        pass


async def close(socket, query):
    await socket.close(int(query["code"]), query.get("reason", ""))


async def drop(socket, _query):
    """Sends one message and drops the connection, without a close frame and without `close_notify` of TLS."""
    await socket.send("going")
    await socket.recv()
    socket.transport.abort()


async def ping(socket, _query):
    """Pings the client, whose library responds with a pong."""
    await asyncio.wait_for(await socket.ping(b"are you there"), TIMEOUT_S)
    await socket.send("pong received")


async def headers(socket, _query):
    """Returns the fields of the handshake and the negotiated options."""
    fields = [[name.lower(), value] for name, value in socket.request.headers.raw_items()]
    await socket.send(json.dumps({"fields": fields, "subprotocol": socket.subprotocol}))


async def outcome(socket, query):
    await socket.send(json.dumps(await asyncio.wait_for(outcome_of(query["of"]), TIMEOUT_S)))


HANDLERS = {"/echo": echo, "/fragments": fragments, "/close": close, "/drop": drop, "/ping": ping,
        "/headers": headers, "/outcome": outcome}


async def handle(socket):
    target = urllib.parse.urlsplit(socket.request.path)
    query = dict(urllib.parse.parse_qsl(target.query))
    try:
        await HANDLERS[target.path](socket, query)
        await socket.wait_closed()
    except ConnectionClosed:
        pass
    finally:
        if "name" in query:
            await socket.wait_closed()
            outcome_of(query["name"]).set_result({"code": socket.close_code, "reason": socket.close_reason})


def select_subprotocol(_connection, offered):
    """Selects the first known subprotocol of the client, or none."""
    return next((name for name in offered if name in ("chat.v1", "chat.v2")), None)


def refuse_handshake(connection, request):
    """Returns the response that refuses a handshake; `None` accepts the handshake."""
    path = urllib.parse.urlsplit(request.path).path
    if path == "/forbidden":
        return connection.respond(http.HTTPStatus.FORBIDDEN, "members only\n")
    if path not in HANDLERS:
        return connection.respond(http.HTTPStatus.NOT_FOUND, "no such path\n")
    return None


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tls", nargs=2, metavar=("CERTIFICATE", "KEY"), help="PEM files; default: cleartext")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    context = None
    if options.tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*options.tls)
    server = await serve(
        handle, "127.0.0.1", options.port, ssl=context, process_request=refuse_handshake, max_size=None,
        select_subprotocol=select_subprotocol, ping_interval=None,
    )
    print(f"listening on 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
