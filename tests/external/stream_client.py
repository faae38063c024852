#!/usr/bin/env python3
"""Tests websocket_server.py on streams of HTTP/2 (RFC 8441).

    stream_client.py HOST:PORT [--ca FILE] [--answer STATUS PROTOCOL PATH ...] [--only NAME ...]

Prints `ok NAME` or `FAILED NAME: why` for each check, and fails if one of them failed. With `--answer` it expects this
response to a handshake instead. `h2` writes and reads HTTP/2 frames, `websockets` those of WebSocket.
"""

import argparse
import collections
import json
import os
import socket
import ssl
import sys
import traceback
import urllib.parse
import uuid

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated, DataReceived, RemoteSettingsChanged, ResponseReceived, StreamEnded, StreamReset,
)
from h2.settings import SettingCodes
from websockets.frames import Opcode
from websockets.protocol import CLIENT, Protocol

# A check that hangs fails before the test's own limit.
LIMIT_S = 60
MIB = 1024 * 1024
CANCEL = 8
CHECKS = []


def check(function):
    CHECKS.append((function.__name__, function))
    return function


def same(seen, wanted):
    if seen != wanted:
        raise AssertionError(f"{str(seen)[:200]} instead of {str(wanted)[:200]}")


class Connection:
    """One connection, and the streams on it."""

    def __init__(self, way):
        host, port = way.target.rsplit(":", 1)
        self._scheme = "https" if way.ca else "http"
        self._socket = socket.create_connection((host, int(port)), LIMIT_S)
        if way.ca:
            context = ssl.create_default_context(cafile=way.ca)
            context.set_alpn_protocols(["h2"])
            self._socket = context.wrap_socket(self._socket, server_hostname=way.name)
            same(self._socket.selected_alpn_protocol(), "h2")
        self._h2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        # A stream that is not read must not delay others.
        self._h2.increment_flow_control_window(16 * MIB)
        self._streams = {}
        self.offers = None
        self.left = False
        while self.offers is None:
            self.turn()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def ask(self, path, method="GET", protocol=None, fields=()):
        pseudo = [(":method", method), (":scheme", self._scheme), (":authority", "localhost"), (":path", path)]
        if protocol:
            pseudo.append((":protocol", protocol))
        number = self._h2.get_next_available_stream_id()
        self._h2.send_headers(number, pseudo + list(fields), end_stream=protocol is None)
        self._streams[number] = stream = Stream(self, number)
        self._flush()
        return stream

    def open(self, path, *fields):
        """Returns a WebSocket, once it is open."""
        stream = self.ask(path, "CONNECT", "websocket", [("sec-websocket-version", "13"), *fields])
        same(stream.head()[":status"], "200")
        return Socket(stream)

    def window(self, number):
        return self._h2.local_flow_control_window(number)

    def send(self, number, data):
        """Sends as much as the windows allow now; returns the rest."""
        size = min(len(data), self.window(number))
        for at in range(0, size, self._h2.max_outbound_frame_size):
            self._h2.send_data(number, data[at : min(size, at + self._h2.max_outbound_frame_size)])
        self._flush()
        return data[size:]

    def end(self, stream):
        stream.sent_all = True
        self._h2.end_stream(stream.number)
        self._flush()

    def reset(self, number, code):
        self._h2.reset_stream(number, code)
        self._flush()

    def took(self, number, size):
        self._h2.acknowledge_received_data(size, number)
        self._flush()

    def cut(self):
        """Closes the connection without notice."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._socket.close()

    def turn(self, limit_s=LIMIT_S):
        """Waits for data; returns `False` if none arrives."""
        self._flush()
        self._socket.settimeout(limit_s)
        try:
            data = self._socket.recv(65536)
        except TimeoutError:
            return False
        if not data:
            raise ConnectionError("the connection was closed")
        for event in self._h2.receive_data(data):
            self._see(event)
        self._flush()
        return True

    def _see(self, event):
        if isinstance(event, RemoteSettingsChanged):
            change = event.changed_settings.get(SettingCodes.ENABLE_CONNECT_PROTOCOL)
            self.offers = change is not None and change.new_value == 1
        elif isinstance(event, ConnectionTerminated):
            self.left = True
        stream = self._streams.get(getattr(event, "stream_id", None))
        if stream:
            stream.see(event)

    def _flush(self):
        self._socket.settimeout(LIMIT_S)
        self._socket.sendall(self._h2.data_to_send())


class Stream:
    def __init__(self, connection, number):
        self.connection, self.number = connection, number
        self.fields, self.pieces = None, collections.deque()
        self.ended, self.sent_all, self.code = False, False, None

    def see(self, event):
        if isinstance(event, ResponseReceived):
            self.fields = dict(event.headers)
        elif isinstance(event, DataReceived):
            self.pieces.append((event.data, event.flow_controlled_length))
        elif isinstance(event, StreamEnded):
            self.ended = True
        elif isinstance(event, StreamReset):
            self.code = event.error_code

    def is_over(self):
        return self.ended or self.code is not None

    def head(self):
        while self.fields is None:
            if self.code is not None:
                raise AssertionError(f"the stream was reset with {self.code}")
            if not self.connection.turn():
                raise AssertionError("no answer")
        return self.fields

    def piece(self):
        """Returns the next bytes; empty at the end."""
        while not self.pieces:
            if self.is_over():
                return b""
            if not self.connection.turn():
                raise AssertionError("nothing comes")
        data, size = self.pieces.popleft()
        if not self.is_over() and size:
            self.connection.took(self.number, size)
        return data

    def body(self):
        return b"".join(iter(self.piece, b""))

    def send(self, data):
        while data := self.connection.send(self.number, data):
            if self.is_over() or not self.connection.turn():
                raise AssertionError("the stream does not move")


class Socket:
    """A WebSocket on an accepted stream."""

    def __init__(self, stream):
        self.stream = stream
        self._frames = Protocol(CLIENT, max_size=None)
        self._events = collections.deque()

    def flush(self):
        for data in self._frames.data_to_send():
            if data:
                self.stream.send(data)
            else:
                self.end()

    def end(self):
        self.stream.connection.end(self.stream)

    def text(self, text, fin=True, first=True):
        (self._frames.send_text if first else self._frames.send_continuation)(text.encode(), fin)
        self.flush()

    def binary(self, data):
        self._frames.send_binary(data)
        self.flush()

    def close(self, code, reason=""):
        self._frames.send_close(code, reason)
        self.flush()

    def frame(self):
        """Returns the next frame; `None` at the end."""
        while not self._events:
            data = self.stream.piece()
            if not data:
                return None
            self._frames.receive_data(data)
            self._events.extend(self._frames.events_received())
            if not self.stream.is_over():
                self.flush()
        return self._events.popleft()

    def message(self):
        frame = self.frame()
        data, opcode = frame.data, frame.opcode
        while not frame.fin:
            frame = self.frame()
            data += frame.data
        return bytes(data) if opcode is Opcode.BINARY else bytes(data).decode()

    def finish(self):
        """Reads to the end and returns the contents of the close frame. Then this side ends too."""
        while self.frame():
            pass
        if self.stream.code is None and not self.stream.sent_all:
            self.end()
        return self._frames.close_rcvd and (self._frames.close_rcvd.code, self._frames.close_rcvd.reason)


class Way:
    """The way to the server."""

    def __init__(self, options):
        self.target, self.name, self.ca = options.target, options.name, options.ca

    def connect(self):
        return Connection(self)

    def outcome(self, name):
        """Returns how the server saw a WebSocket end."""
        with self.connect() as connection:
            return json.loads(connection.open(f"/outcome?of={name}").message())


@check
def it_is_offered(way):
    with way.connect() as connection:
        same(connection.offers, True)


@check
def text_and_binary(way):
    with way.connect() as connection:
        web = connection.open("/echo")
        for message in ("", "hello", "grüße, 世界 🎉", "x" * 65_535, "y" * 65_536):
            web.text(message)
            same(web.message(), message)
        for message in (b"", b"\x00\xff" * 1000, os.urandom(100_000)):
            web.binary(message)
            same(web.message(), message)


@check
def fragments_as_they_come(way):
    """Sends each fragment after the previous one came back: a fragment that is held back hangs here."""
    with way.connect() as connection:
        web = connection.open("/fragments")
        web.text("first", fin=False)
        same(bytes(web.frame().data), b"first")
        for turn in range(20):
            web.text(f"then {turn}", fin=False, first=False)
            same(bytes(web.frame().data), b"then %d" % turn)
        web.text("", first=False)


@check
def a_message_of_16_mib(way):
    with way.connect() as connection:
        web, message = connection.open("/echo"), os.urandom(MIB) * 16
        web.binary(message)
        same(web.message() == message, True)


@check
def many_on_one_connection(way):
    with way.connect() as connection:
        webs = [connection.open("/echo") for _ in range(30)]
        for turn in range(3):
            for each, web in enumerate(webs):
                web.text(f"{turn} {each}")
            for each, web in enumerate(webs):
                same(web.message(), f"{turn} {each}")
            same(connection.ask("/nowhere").head()[":status"], "404")


@check
def closed_by_the_server(way):
    with way.connect() as connection:
        for code, reason in ((1000, ""), (1001, "going away"), (4999, "ü" * 60)):
            web = connection.open(f"/close?code={code}&reason={urllib.parse.quote(reason)}")
            same(web.finish(), (code, reason))
            same((web.stream.ended, web.stream.code), (True, None))


@check
def closed_by_the_client(way):
    with way.connect() as connection:
        for code, reason in ((1000, ""), (3000, "of my own")):
            name = uuid.uuid4()
            web = connection.open(f"/echo?name={name}")
            web.text("last words")
            same(web.message(), "last words")
            web.close(code, reason)
            same(web.finish(), (code, reason))
            same(web.stream.ended, True)
            same(way.outcome(name), {"code": code, "reason": reason})


@check
def broken_off_by_the_server(way):
    with way.connect() as connection:
        web = connection.open("/drop")
        same(web.message(), "going")
        web.text("go")
        same((web.finish(), web.stream.is_over()), (None, True))
        # Only this stream fails.
        same(connection.ask("/nowhere").head()[":status"], "404")


@check
def ended_by_the_client(way):
    name = uuid.uuid4()
    with way.connect() as connection:
        web = connection.open(f"/echo?name={name}")
        web.text("going")
        same(web.message(), "going")
        web.end()
        same(way.outcome(name)["code"], 1006)
        same((web.finish(), web.stream.ended), (None, True))


@check
def broken_off_by_the_client(way):
    """The server notices at once, and keeps no dead connection."""
    with way.connect() as connection:
        for code in (CANCEL, 0, 2):
            name = uuid.uuid4()
            web = connection.open(f"/fragments?name={name}")
            web.text("begun", fin=False)
            same(bytes(web.frame().data), b"begun")
            connection.reset(web.stream.number, code)
            same(way.outcome(name)["code"], 1006)
        same(connection.ask("/nowhere").head()[":status"], "404")


@check
def cut_off_by_the_client(way):
    name = uuid.uuid4()
    connection = way.connect()
    web = connection.open(f"/echo?name={name}")
    web.text("going")
    same(web.message(), "going")
    connection.cut()
    same(way.outcome(name)["code"], 1006)


@check
def what_is_agreed_on(way):
    with way.connect() as connection:
        own = ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
        wish = ("sec-websocket-protocol", "chat.v1, other")
        keys = set()
        for _ in range(3):
            web = connection.open("/headers", own, wish, ("origin", "https://page.test"))
            answer, seen = web.stream.fields, json.loads(web.message())
            same((answer["sec-websocket-protocol"], seen["subprotocol"]), ("chat.v1", "chat.v1"))
            same([name for name in ("upgrade", "connection", "sec-websocket-accept") if name in answer], [])
            fields = {name: value for name, value in seen["fields"]}
            same((fields["origin"], fields["sec-websocket-version"]), ("https://page.test", "13"))
            keys.add(fields["sec-websocket-key"])
        # A new key each time, and never the client's, which has no meaning here.
        same((len(keys), own[1] in keys), (3, False))


@check
def refused_by_the_server(way):
    with way.connect() as connection:
        for path, status, body in (("/forbidden", "403", b"members only\n"), ("/nowhere", "404", b"no such way\n")):
            stream = connection.ask(path, "CONNECT", "websocket", [("sec-websocket-version", "13")])
            same((stream.head()[":status"], stream.body()), (status, body))


@check
def other_protocols(way):
    with way.connect() as connection:
        stream = connection.ask("/echo", "CONNECT", "connect-udp")
        same((stream.head()[":status"], stream.head()["content-type"]), ("501", "application/problem+json"))
        web = connection.open("/echo")
        web.text("still here")
        same(web.message(), "still here")


@check
def one_that_reads_nothing(way):
    """Data for it is not collected: at some point it cannot send either. All others continue."""
    with way.connect() as connection:
        slow, quick = connection.open("/echo"), connection.open("/echo")
        message, sent, most = os.urandom(64 * 1024), 0, 48 * MIB
        frames = Protocol(CLIENT, max_size=None)
        while sent < most:
            frames.send_binary(message)
            rest = b"".join(frames.data_to_send())
            while rest := connection.send(slow.stream.number, rest):
                # Small, so that the other gets a turn; data for `slow` is not read.
                if not connection.turn(2):
                    break
            if rest:
                break
            sent += len(message)
        same(sent < most, True)
        quick.text("I am not")
        same(quick.message(), "I am not")
        while rest := connection.send(slow.stream.number, rest):
            slow.frame()
        # Some frames were read meanwhile; the last one is the one that was sent last.
        slow.close(1000)
        same(slow.finish(), (1000, ""))


def answered(way, expected):
    status, protocol, path = expected
    with way.connect() as connection:
        stream = connection.ask(path, "CONNECT", protocol, [("sec-websocket-version", "13")])
        same(stream.head()[":status"], status)
        same(json.loads(stream.body())["status"], int(status))
        # The stream has ended, the connection has not.
        same(connection.left, False)
        same(connection.ask("/", "OPTIONS").head()[":status"].isdigit(), True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--ca", metavar="FILE", help="PEM file of the authority; speaks TLS")
    parser.add_argument("--name", default="localhost", help="what the certificate says (default localhost)")
    parser.add_argument("--answer", nargs=3, metavar=("STATUS", "PROTOCOL", "PATH"), help="a handshake is refused so")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks only")
    options = parser.parse_args()
    way = Way(options)
    checks = [(name, function) for name, function in CHECKS if not options.only or name in options.only]
    if options.answer:
        checks = [("answered", lambda way: answered(way, options.answer))]
    broken = 0
    for name, function in checks:
        broken += not held(name, function, way)
    sys.exit(1 if broken or not checks else 0)


def held(name, function, way):
    try:
        function(way)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)
        lines = [f"{each.name}:{each.lineno}" for each in where if each.filename == __file__]
        print(f"FAILED {name}: {type(error).__name__} {error} ({', '.join(lines)})", flush=True)
        return False
    print(f"ok {name}", flush=True)
    return True


if __name__ == "__main__":
    main()
