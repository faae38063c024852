#!/usr/bin/env python3
"""Measures CPU time of the gateway for a decision and for a response of its own, over TCP and over a Unix socket.

    cargo build --release
    python3 benches/unix_sockets.py                         # half a minute
    python3 benches/unix_sockets.py --results table.md      # also writes the figures as Markdown

Two gateways with one worker differ in their sockets only, and take turns. 16 connections from the other core send a request each,
and the next one when all have their response. Each request is about one key and one window, and is admitted.
"""

import argparse
import json
import os
import socket
import statistics

import comparison
import machine

CONFIG = """\
workers = 1
[listen]
http = {http}
admin = "{admin}"
[rules.r]
key = "header:x-key"
on_missing_key = "refuse"
windows = ["1000000000/hour"]
[[routes]]
path = "/{{*rest}}"
respond = {{ status = 204 }}
rules = ["r"]
"""
BODY = '{"rule":"r","key":"k"}'
# Each with the socket that it is sent to.
REQUESTS = {
    "decision of `POST /v1/limit`": (
        f"POST /v1/limit HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n\r\n{BODY}", "admin",
    ),
    "response of a route with `respond`": ("GET /a HTTP/1.1\r\nHost: localhost\r\nX-Key: k\r\n\r\n", "http"),
}
GATEWAY_CORE, LOAD_CORE = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
CONNECTIONS = 16
# Requests of new connections that are not measured.
WARM_UP = 400


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comparison.plain_argument(parser)
    parser.add_argument("--requests", type=int, default=20_000, help="requests in a turn (default 20,000)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (default 7)")
    parser.add_argument("--results", metavar="FILE", help="also write the figures as Markdown")
    comparison.run(measure, parser.parse_args())


def measure(options, directory, report):
    comparison.require(options.plain, [])
    gateways = [Gateway(options.plain, directory, family) for family in ("TCP", "Unix socket")]
    os.sched_setaffinity(0, {LOAD_CORE})
    rows = []
    with gateways[0].server, gateways[1].server:
        for name, (request, socket_of) in REQUESTS.items():
            rounds = [
                [per_request(gateway.server, gateway.addresses[socket_of], request, options.requests) for gateway in gateways]
                for _ in range(options.rounds)
            ]
            medians = [statistics.median(times) for times in zip(*rounds)]
            ratio = statistics.median(unix / tcp for tcp, unix in rounds)
            rows.append([name, *(f"{median:.2f}" for median in medians), f"{ratio:.2f}"])
    report.table(["µs of CPU time of a", "TCP", "Unix socket", "ratio, median of rounds"], rows)


class Gateway:
    """A gateway whose sockets are of one family."""

    def __init__(self, binary, directory, family):
        # `Server` waits until this port accepts connections.
        port = machine.free_port()
        self.addresses = {"http": port, "admin": machine.free_port()}
        if family != "TCP":
            self.addresses = {use: os.path.join(directory, f"{use}.sock") for use in self.addresses}
        texts = {use: f"{machine.LOOPBACK}:{at}" if isinstance(at, int) else f"unix:{at}" for use, at in self.addresses.items()}
        listen = sorted({texts["http"], f"{machine.LOOPBACK}:{port}"})
        config = os.path.join(directory, f"{port}.toml")
        with open(config, "w") as file:
            file.write(CONFIG.format(http=json.dumps(listen), admin=texts["admin"]))
        self.server = machine.Server("transom", [binary, "run", "--config", config], port, f"{config}.log", {GATEWAY_CORE})


def per_request(server, address, request, count):
    """Returns the CPU time of the gateway per request, in microseconds."""
    connections = [connect(address) for _ in range(CONNECTIONS)]
    send(connections, request, WARM_UP)
    before = sum(server.threads_cpu_s().values())
    sent = send(connections, request, count)
    used = sum(server.threads_cpu_s().values()) - before
    for connection in connections:
        connection.close()
    return used / sent * 1e6


def connect(address):
    if isinstance(address, int):
        return socket.create_connection((machine.LOOPBACK, address))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return connection


def send(connections, request, count):
    """Sends at least `count` requests, and returns how many."""
    sent = 0
    while sent < count:
        for connection in connections:
            connection.sendall(request.encode())
        for connection in connections:
            if not connection.recv(1 << 16).startswith(b"HTTP/1.1 20"):
                raise machine.BenchmarkError("a request was not admitted")
        sent += len(connections)
    return sent


if __name__ == "__main__":
    main()
