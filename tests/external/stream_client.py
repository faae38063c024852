#!/usr/bin/env python3
"""Tests websocket_server.py over HTTP/2 streams (RFC 8441).

    stream_client.py HOST:PORT [--ca FILE] [--only NAME ...]

Prints `ok NAME` or `FAILED NAME: why` for each check, and fails if one of them failed. `h2` writes and reads
HTTP/2 frames, `websockets` WebSocket frames.
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

# A check that hangs fails before the timeout of the test.
LIMIT_S = 60
MIB = 1024 * 1024
CANCEL = 8
CHECKS = []


def check(function):
    CHECKS.append((function.__name__, function))
    return function


def assert_equal(actual, expected):
    if actual != expected:
        raise AssertionError(f"{str(actual)[:200]} instead of {str(expected)[:200]}")


class Connection:
    """One connection, and the streams on it."""

    def __init__(self, endpoint):
        host, port = endpoint.target.rsplit(":", 1)
        self._scheme = "https" if endpoint.ca else "http"
        self._socket = socket.create_connection((host, int(port)), LIMIT_S)
        if endpoint.ca:
            context = ssl.create_default_context(cafile=endpoint.ca)
            context.set_alpn_protocols(["h2"])
            self._socket = context.wrap_socket(self._socket, server_hostname=endpoint.name)
            assert_equal(self._socket.selected_alpn_protocol(), "h2")
        self._h2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        # A stream that is not read must not delay the others.
        self._h2.increment_flow_control_window(16 * MIB)
        self._streams = {}
        self.offers_connect = None
        self.is_terminated = False
        while self.offers_connect is None:
            self.receive()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._socket.close()

    def request(self, path, method="GET", protocol=None, fields=()):
        pseudo = [(":method", method), (":scheme", self._scheme), (":authority", "localhost"), (":path", path)]
        if protocol:
            pseudo.append((":protocol", protocol))
        number = self._h2.get_next_available_stream_id()
        self._h2.send_headers(number, pseudo + list(fields), end_stream=protocol is None)
        self._streams[number] = stream = Stream(self, number)
        self._flush()
        return stream

    def open(self, path, *fields):
        """Opens a WebSocket."""
        stream = self.request(path, "CONNECT", "websocket", [("sec-websocket-version", "13"), *fields])
        assert_equal(stream.head()[":status"], "200")
        return Socket(stream)

    def window(self, number):
        return self._h2.local_flow_control_window(number)

    def send(self, number, data):
        """Sends as much as the windows allow; returns the rest."""
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

    def acknowledge(self, number, size):
        self._h2.acknowledge_received_data(size, number)
        self._flush()

    def reset_connection(self):
        """Closes the connection without notice."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._socket.close()

    def receive(self, limit_s=LIMIT_S):
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
            self._handle_event(event)
        self._flush()
        return True

    def _handle_event(self, event):
        if isinstance(event, RemoteSettingsChanged):
            change = event.changed_settings.get(SettingCodes.ENABLE_CONNECT_PROTOCOL)
            self.offers_connect = change is not None and change.new_value == 1
        elif isinstance(event, ConnectionTerminated):
            self.is_terminated = True
        stream = self._streams.get(getattr(event, "stream_id", None))
        if stream:
            stream.handle_event(event)

    def _flush(self):
        self._socket.settimeout(LIMIT_S)
        self._socket.sendall(self._h2.data_to_send())


class Stream:
    def __init__(self, connection, number):
        self.connection, self.number = connection, number
        self.fields, self.pieces = None, collections.deque()
        self.ended, self.sent_all, self.code = False, False, None

    def handle_event(self, event):
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
            if not self.connection.receive():
                raise AssertionError("no response")
        return self.fields

    def read_data(self):
        """Returns the next bytes; empty at the end."""
        while not self.pieces:
            if self.is_over():
                return b""
            if not self.connection.receive():
                raise AssertionError("no data")
        data, size = self.pieces.popleft()
        if not self.is_over() and size:
            self.connection.acknowledge(self.number, size)
        return data

    def body(self):
        return b"".join(iter(self.read_data, b""))

    def send(self, data):
        while data := self.connection.send(self.number, data):
            if self.is_over() or not self.connection.receive():
                raise AssertionError("the stream is stalled")


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
            data = self.stream.read_data()
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
        """Reads to the end, ends this side as well, and returns the contents of the close frame."""
        while self.frame():
            pass
        if self.stream.code is None and not self.stream.sent_all:
            self.end()
        return self._frames.close_rcvd and (self._frames.close_rcvd.code, self._frames.close_rcvd.reason)


class Endpoint:
    """The address and TLS settings of the server."""

    def __init__(self, options):
        self.target, self.name, self.ca = options.target, options.name, options.ca

    def connect(self):
        return Connection(self)

    def outcome(self, name):
        """Returns the close code and reason that the server received."""
        with self.connect() as connection:
            return json.loads(connection.open(f"/outcome?of={name}").message())


@check
def extended_connect_is_offered(endpoint):
    with endpoint.connect() as connection:
        assert_equal(connection.offers_connect, True)


@check
def text_and_binary(endpoint):
    with endpoint.connect() as connection:
        web_socket = connection.open("/echo")
        for message in ("", "hello", "grüße, 世界 🎉", "x" * 65_535, "y" * 65_536):
            web_socket.text(message)
            assert_equal(web_socket.message(), message)
        for message in (b"", b"\x00\xff" * 1000, os.urandom(100_000)):
            web_socket.binary(message)
            assert_equal(web_socket.message(), message)


@check
def fragments_are_forwarded_at_once(endpoint):
    """Sends each fragment after the previous one came back: a delayed fragment makes this check hang."""
    with endpoint.connect() as connection:
        web_socket = connection.open("/fragments")
        web_socket.text("first", fin=False)
        assert_equal(bytes(web_socket.frame().data), b"first")
        for turn in range(20):
            web_socket.text(f"then {turn}", fin=False, first=False)
            assert_equal(bytes(web_socket.frame().data), b"then %d" % turn)
        web_socket.text("", first=False)


@check
def a_message_of_16_mib(endpoint):
    with endpoint.connect() as connection:
        web_socket, message = connection.open("/echo"), os.urandom(MIB) * 16
        web_socket.binary(message)
        assert_equal(web_socket.message() == message, True)


@check
def many_on_one_connection(endpoint):
    with endpoint.connect() as connection:
        sockets = [connection.open("/echo") for _ in range(30)]
        for turn in range(3):
            for each, web_socket in enumerate(sockets):
                web_socket.text(f"{turn} {each}")
            for each, web_socket in enumerate(sockets):
                assert_equal(web_socket.message(), f"{turn} {each}")
            assert_equal(connection.request("/nowhere").head()[":status"], "404")


@check
def closed_by_the_server(endpoint):
    with endpoint.connect() as connection:
        for code, reason in ((1000, ""), (1001, "going away"), (4999, "ü" * 60)):
            web_socket = connection.open(f"/close?code={code}&reason={urllib.parse.quote(reason)}")
            assert_equal(web_socket.finish(), (code, reason))
            assert_equal((web_socket.stream.ended, web_socket.stream.code), (True, None))


@check
def closed_by_the_client(endpoint):
    with endpoint.connect() as connection:
        for code, reason in ((1000, ""), (3000, "application code")):
            name = uuid.uuid4()
            web_socket = connection.open(f"/echo?name={name}")
            web_socket.text("last message")
            assert_equal(web_socket.message(), "last message")
            web_socket.close(code, reason)
            assert_equal(web_socket.finish(), (code, reason))
            assert_equal(web_socket.stream.ended, True)
            assert_equal(endpoint.outcome(name), {"code": code, "reason": reason})


@check
def dropped_by_the_server(endpoint):
    with endpoint.connect() as connection:
        web_socket = connection.open("/drop")
        assert_equal(web_socket.message(), "going")
        web_socket.text("go")
        assert_equal((web_socket.finish(), web_socket.stream.is_over()), (None, True))
        # Only this stream fails.
        assert_equal(connection.request("/nowhere").head()[":status"], "404")


@check
def ended_by_the_client(endpoint):
    name = uuid.uuid4()
    with endpoint.connect() as connection:
        web_socket = connection.open(f"/echo?name={name}")
        web_socket.text("going")
        assert_equal(web_socket.message(), "going")
        web_socket.end()
        assert_equal(endpoint.outcome(name)["code"], 1006)
        assert_equal((web_socket.finish(), web_socket.stream.ended), (None, True))


@check
def reset_by_the_client(endpoint):
    """The server notices at once that the connection has ended."""
    with endpoint.connect() as connection:
        for code in (CANCEL, 0, 2):
            name = uuid.uuid4()
            web_socket = connection.open(f"/fragments?name={name}")
            web_socket.text("started", fin=False)
            assert_equal(bytes(web_socket.frame().data), b"started")
            connection.reset(web_socket.stream.number, code)
            assert_equal(endpoint.outcome(name)["code"], 1006)
        assert_equal(connection.request("/nowhere").head()[":status"], "404")


@check
def disconnected_by_the_client(endpoint):
    name = uuid.uuid4()
    connection = endpoint.connect()
    web_socket = connection.open(f"/echo?name={name}")
    web_socket.text("going")
    assert_equal(web_socket.message(), "going")
    connection.reset_connection()
    assert_equal(endpoint.outcome(name)["code"], 1006)


@check
def handshake_fields_and_subprotocol(endpoint):
    with endpoint.connect() as connection:
        client_key = ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
        subprotocols = ("sec-websocket-protocol", "chat.v1, other")
        keys = set()
        for _ in range(3):
            web_socket = connection.open("/headers", client_key, subprotocols, ("origin", "https://page.test"))
            response, actual = web_socket.stream.fields, json.loads(web_socket.message())
            assert_equal((response["sec-websocket-protocol"], actual["subprotocol"]), ("chat.v1", "chat.v1"))
            assert_equal([name for name in ("upgrade", "connection", "sec-websocket-accept") if name in response], [])
            fields = {name: value for name, value in actual["fields"]}
            assert_equal((fields["origin"], fields["sec-websocket-version"]), ("https://page.test", "13"))
            keys.add(fields["sec-websocket-key"])
        # The gateway sends a new key each time, and never the one of the client, which has no meaning over HTTP/2.
        assert_equal((len(keys), client_key[1] in keys), (3, False))


@check
def refused_by_the_server(endpoint):
    with endpoint.connect() as connection:
        for path, status, body in (("/forbidden", "403", b"members only\n"), ("/nowhere", "404", b"no such path\n")):
            stream = connection.request(path, "CONNECT", "websocket", [("sec-websocket-version", "13")])
            assert_equal((stream.head()[":status"], stream.body()), (status, body))


@check
def other_protocols(endpoint):
    with endpoint.connect() as connection:
        stream = connection.request("/echo", "CONNECT", "connect-udp")
        assert_equal((stream.head()[":status"], stream.head()["content-type"]), ("501", "application/problem+json"))
        web_socket = connection.open("/echo")
        web_socket.text("still here")
        assert_equal(web_socket.message(), "still here")


@check
def a_stream_that_reads_nothing(endpoint):
    """The gateway buffers a bounded amount of data: at some point, the stream cannot send. Other streams continue."""
    with endpoint.connect() as connection:
        slow, quick = connection.open("/echo"), connection.open("/echo")
        message, sent, most = os.urandom(64 * 1024), 0, 48 * MIB
        frames = Protocol(CLIENT, max_size=None)
        while sent < most:
            frames.send_binary(message)
            rest = b"".join(frames.data_to_send())
            while rest := connection.send(slow.stream.number, rest):
                # A short timeout, because data for `slow` is not read.
                if not connection.receive(2):
                    break
            if rest:
                break
            sent += len(message)
        assert_equal(sent < most, True)
        quick.text("quick")
        assert_equal(quick.message(), "quick")
        while rest := connection.send(slow.stream.number, rest):
            slow.frame()
        # Some frames were read above; the last frame is the last one sent.
        slow.close(1000)
        assert_equal(slow.finish(), (1000, ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--ca", metavar="FILE", help="PEM file of the authority; enables TLS")
    parser.add_argument("--name", default="localhost", help="the name in the certificate (default localhost)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these checks")
    options = parser.parse_args()
    endpoint = Endpoint(options)
    checks = [(name, function) for name, function in CHECKS if not options.only or name in options.only]
    failed = 0
    for name, function in checks:
        failed += not run_check(name, function, endpoint)
    sys.exit(1 if failed or not checks else 0)


def run_check(name, function, endpoint):
    try:
        function(endpoint)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)
        lines = [f"{each.name}:{each.lineno}" for each in where if each.filename == __file__]
        print(f"FAILED {name}: {type(error).__name__} {error} ({', '.join(lines)})", flush=True)
        return False
    print(f"ok {name}", flush=True)
    return True


if __name__ == "__main__":
    main()
