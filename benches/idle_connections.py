#!/usr/bin/env python3
"""Measures the memory of an idle connection: resident memory of the gateway with and without ten thousand of them.

    python3 benches/idle_connections.py                        # about a minute
    python3 benches/idle_connections.py --connections 2000 --results table.md

Each connection has had one request forwarded and is kept alive. nginx is measured for
comparison. A fifth as many connections are measured over TLS and of HTTP/2. Needs as many descriptors as
connections: `ulimit -Hn`.
"""

import argparse
import os
import socket
import ssl
import struct
import time

import comparison
import gateways
import load_generators
import machine
from machine import BenchmarkError

TARGET_KIB = 8
# Connections before the first measurement: memory allocated once for all is not part of the cost of a connection.
WARM_UP_CONNECTIONS = 100
# The allocator returns memory within some seconds.
SETTLE_S = 3
REQUEST = f"GET {load_generators.PATH} HTTP/1.1\r\nHost: {machine.LOOPBACK}\r\n\r\n".encode()
RESPONSE_END = load_generators.BODY.replace("\\n", "\n").encode()
# Of HTTP/2: kinds of frames, and their flags.
DATA, HEADERS, SETTINGS = 0, 1, 4
ACK, END_STREAM, END_HEADERS = 1, 1, 4
# No connection is closed for being idle while the others connect.
LONG_TIMEOUT = '[timeouts]\nrequest_head = "1h"\n'
# Divisor of the number of connections over TLS and of HTTP/2.
OTHER_KINDS_DIVISOR = 5
# Descriptors that each side needs in addition to those of the connections.
EXTRA_DESCRIPTORS = 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transom", default=comparison.OPTIMIZED, metavar="PATH")
    parser.add_argument("--connections", type=int, default=10_000, help="how many (default 10000)")
    parser.add_argument("--results", metavar="FILE", help="write the figures as markdown")
    comparison.run(measure, parser.parse_args())


def measure(options, directory, report):
    machine.allow_descriptors(options.connections + EXTRA_DESCRIPTORS)
    transom, nginx = gateways.Transom(options.transom), gateways.Nginx()
    comparison.require(options.transom, [transom, nginx, gateways.Openssl])
    versions = [(each.name, each.version()) for each in (transom, nginx)]
    report.facts(machine.description(versions))
    cores = os.sched_getaffinity(0)
    upstream, upstream_port = load_generators.start_upstream(directory, max(cores))
    rows = []
    with upstream:
        # By default a descriptor is reserved for the upstream connection of every client; here requests come one by one.
        connection_limit = f"max_connections = {options.connections + WARM_UP_CONNECTIONS}"
        for gateway, more in ((transom, {"listen": connection_limit, "more": LONG_TIMEOUT}), (nginx, {})):
            server, port = gateway.start(directory, upstream_port, gateways.FORWARDING, cores, **more)
            with server:
                before, after = idle(server, port, options.connections)
            kib = (after - before) * 1024 / options.connections
            target = ""
            if gateway is transom:
                target = f"< {TARGET_KIB} KiB: {comparison.met(kib < TARGET_KIB)}"
            rows.append([gateway.name, f"{before:.1f}", f"{after:.1f}", f"{kib:.2f}", target])
        others = measure_others(transom, directory, upstream_port, cores, options.connections // OTHER_KINDS_DIVISOR)
    report.section(f"Memory: {options.connections:,} idle connections of HTTP/1.1, on all cores")
    report.table(["gateway", "MiB before", "MiB after", "KiB each", "target"], rows)
    report.section(f"Memory: {options.connections // OTHER_KINDS_DIVISOR:,} idle connections of other kinds")
    report.table(["transom", "MiB before", "MiB after", "KiB each"], others)


def measure_others(transom, directory, upstream_port, cores, count):
    certificate, key = gateways.make_certificate(directory)
    rows = []
    for name, kind in (("HTTP/1.1 over TLS", TlsConnection), ("HTTP/2", Http2Connection), ("HTTP/2 over TLS", Http2TlsConnection)):
        https_port = machine.free_port()
        https = f"""
[listen.https]
address = "{machine.LOOPBACK}:{https_port}"
certificate = "{certificate}"
private_key = "{key}"

[http2]
idle = "1h"
"""
        server, port = transom.start(directory, upstream_port, gateways.FORWARDING, cores, more=LONG_TIMEOUT + https)
        with server:
            before, after = idle(server, https_port if issubclass(kind, TlsConnection) else port, count, kind)
        rows.append([name, f"{before:.1f}", f"{after:.1f}", f"{(after - before) * 1024 / count:.2f}"])
    return rows


def idle(server, port, count, kind=None):
    """Returns the resident MiB with a few connections, and with `count` more."""
    kind = kind or Connection
    connections = [kind(port) for _ in range(WARM_UP_CONNECTIONS)]
    time.sleep(SETTLE_S)
    before = server.memory_mib()
    connections += [kind(port) for _ in range(count)]
    time.sleep(SETTLE_S)
    after = server.memory_mib()
    # Each connection must still respond.
    for connection in connections:
        connection.send_request()
    for connection in connections:
        connection.socket.close()
    return before, after


class Connection:
    """HTTP/1.1 without TLS, after its first request."""

    def __init__(self, port):
        self.socket = self.start_protocol(socket.create_connection((machine.LOOPBACK, port), timeout=10))
        self.send_request()

    def start_protocol(self, connection):
        return connection

    def send_request(self):
        """Sends one request and reads its whole response, which ends like the upstream's body."""
        self.socket.sendall(REQUEST)
        response = b""
        while not response.endswith(RESPONSE_END):
            response += self.receive()
        if not response.startswith(b"HTTP/1.1 200 "):
            raise BenchmarkError(f"unexpected response {response[:200]!r}")

    def receive(self):
        piece = self.socket.recv(65536)
        if not piece:
            raise BenchmarkError("a connection was closed")
        return piece


class TlsConnection(Connection):
    """Over TLS; the server certificate is not verified."""

    def start_protocol(self, connection):
        return tls_context(self.alpn_protocol()).wrap_socket(connection)

    def alpn_protocol(self):
        return "http/1.1"


class Http2Connection(Connection):
    """The part of HTTP/2 that a request needs (RFC 9113)."""

    def start_protocol(self, connection):
        self.number, self.rest = -1, b""
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0))
        return connection

    def send_request(self):
        self.number += 2
        authority, path = machine.LOOPBACK.encode(), load_generators.PATH.encode()
        # HPACK: GET and http are in the static table, and so are the names :path and :authority.
        head = b"\x82\x86\x04" + bytes([len(path)]) + path + b"\x01" + bytes([len(authority)]) + authority
        self.socket.sendall(frame(HEADERS, END_STREAM | END_HEADERS, self.number, head))
        while True:
            kind, flags, stream, body = self.next_frame()
            if kind == SETTINGS and not flags & ACK:
                self.socket.sendall(frame(SETTINGS, ACK, 0))
            if stream != self.number or kind not in (HEADERS, DATA):
                continue
            # 0x88 is `:status: 200`.
            if kind == HEADERS and body[:1] != b"\x88":
                raise BenchmarkError(f"unexpected response {body!r}")
            if flags & END_STREAM:
                return

    def next_frame(self):
        while len(self.rest) < 9 or len(self.rest) < 9 + int.from_bytes(self.rest[:3], "big"):
            self.rest += self.receive()
        end = 9 + int.from_bytes(self.rest[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", self.rest[3:9])
        body, self.rest = self.rest[9:end], self.rest[end:]
        return kind, flags, stream, body


class Http2TlsConnection(Http2Connection, TlsConnection):
    def start_protocol(self, connection):
        return Http2Connection.start_protocol(self, TlsConnection.start_protocol(self, connection))

    def alpn_protocol(self):
        return "h2"


def frame(kind, flags, stream, body=b""):
    return len(body).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + body


def tls_context(protocol):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([protocol])
    return context


if __name__ == "__main__":
    main()
