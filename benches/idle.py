#!/usr/bin/env python3
"""What an idle connection costs: resident memory of the gateway with ten thousand of them and without.

    python3 benches/idle.py                        # about half a minute
    python3 benches/idle.py --connections 2000 --results table.md

Each connection has made one request, which was forwarded, and is kept alive. nginx stands beside for
comparison. Needs as many descriptors as connections: `ulimit -Hn`.
"""

import argparse
import os
import resource
import socket
import time

import beside
import contenders
import load
import machine
from machine import Trouble

TARGET_KIB = 8
# Connections before the first look: what is made once for all of them is not an idle connection's cost.
FIRST = 100
# What an allocator gives back, it gives back within some seconds.
SETTLE_S = 3
REQUEST = f"GET {load.PATH} HTTP/1.1\r\nHost: {machine.LOOPBACK}\r\n\r\n".encode()
# Nobody is to be cut for being idle while the others connect.
PATIENT = '[timeouts]\nrequest_head = "1h"\n'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transom", default=os.path.join(beside.ROOT, "target/release/transom"), metavar="PATH")
    parser.add_argument("--connections", type=int, default=10_000, help="how many (default 10000)")
    parser.add_argument("--results", metavar="FILE", help="write the figures as markdown")
    beside.run(measure, parser.parse_args())


def measure(options, directory, report):
    allow_descriptors(options.connections + 1000)
    transom, nginx = contenders.Transom(options.transom), contenders.NginxWide()
    beside.require(options.transom, [transom, nginx])
    versions = [(each.name, each.version()) for each in (transom, nginx)]
    report.facts(machine.description(versions))
    cores = os.sched_getaffinity(0)
    upstream, upstream_port = load.start_upstream(directory, max(cores))
    rows = []
    with upstream:
        for gateway, more in ((transom, {"more": PATIENT}), (nginx, {})):
            server, port = gateway.start(directory, upstream_port, contenders.FORWARDING, cores, **more)
            with server:
                before, after = idle(server, port, options.connections)
            kib = (after - before) * 1024 / options.connections
            target = ""
            if gateway is transom:
                target = f"< {TARGET_KIB} KiB: {beside.met(kib < TARGET_KIB)}"
            rows.append([gateway.name, f"{before:.1f}", f"{after:.1f}", f"{kib:.2f}", target])
    report.section(f"Memory: {options.connections:,} idle connections of HTTP/1.1, on all cores")
    report.table(["gateway", "MiB before", "MiB with them", "KiB each", "target"], rows)


def idle(server, port, count):
    """Resident MiB with a few connections, and with `count` more."""
    kept = [connect(port) for _ in range(FIRST)]
    time.sleep(SETTLE_S)
    before = server.memory_mib()
    kept += [connect(port) for _ in range(count)]
    time.sleep(SETTLE_S)
    after = server.memory_mib()
    # That they are still there: an answer on every hundredth.
    for connection in kept[::100]:
        ask(connection)
    for connection in kept:
        connection.close()
    return before, after


def connect(port):
    connection = socket.create_connection((machine.LOOPBACK, port), timeout=10)
    ask(connection)
    return connection


def ask(connection):
    """One request and its whole answer, which ends as the upstream's body does."""
    connection.sendall(REQUEST)
    end, answer = load.BODY.replace("\\n", "\n").encode(), b""
    while not answer.endswith(end):
        piece = connection.recv(65536)
        if not piece:
            raise Trouble(f"a connection was closed after {answer[:200]!r}")
        answer += piece
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise Trouble(f"answered {answer[:200]!r}")


def allow_descriptors(count):
    """For this process and those that it starts."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count:
        raise Trouble(f"{count} descriptors are needed and {hard} allowed; raise the limit with:\n    ulimit -Hn {count}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
