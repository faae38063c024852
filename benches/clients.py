#!/usr/bin/env python3
"""Measures what a million clients and 100,000 denied networks take: time to start, memory, and CPU time of a request.

    apt-get install -y redis-server
    make release
    python3 benches/clients.py                       # about three minutes
    python3 benches/clients.py --results table.md    # also writes the figures as Markdown

A gateway has its clients in the shared store, or in the clients file. The time runs from the start of the process to the first
request of a client that is admitted. Then each of many clients sends requests, over one connection.
"""

import argparse
import hashlib
import json
import os
import random
import socket
import statistics
import time

import comparison
import machine
from lease_calls import Redis
from machine import BenchmarkError

# Clients that send requests.
ASKING = 10_000
FEW_NETWORKS = 10
# Clients of the clients file, which may have 16 MiB.
LISTED_MAX = 100_000
PATIENCE_S = 300

CONFIG = """
workers = 1
[listen]
http = "{host}:{port}"
{sections}
[upstreams.echo]
builtin = "echo"
[rules.per-client]
key = "client"
on_missing_key = "refuse"
windows = ["1000/day"]
shared = "off"
[rules.per-client.plans.basic]
windows = ["1000000/day", "4000000000/366d"]
[[routes]]
path = "/{{*rest}}"
upstream = "echo"
rules = ["per-client"]
"""
SHARED = """
[counters.shared]
redis = "redis://{host}:{redis}"
[clients]
source = "shared"
file = "{clients}"
api_key = "header:x-api-key"
"""
LISTED = """
[clients]
file = "{clients}"
api_key = "header:x-api-key"
"""
DENIED = """
[access]
file = "{denied}"
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transom", default=comparison.OPTIMIZED, metavar="PATH", help="the gateway (default: built by `make release`)")
    parser.add_argument("--clients", type=int, default=1_000_000, help="default 1,000,000")
    parser.add_argument("--networks", type=int, default=100_000, help="denied networks, default 100,000")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of requests (default 5)")
    parser.add_argument("--results", metavar="FILE", help="also write the figures as Markdown")
    options = parser.parse_args()
    if options.clients < ASKING or not 1 <= options.networks <= 1 << 24 or options.rounds < 1:
        parser.error(f"`--clients` is at least {ASKING}, `--networks` from 1 to {1 << 24}, `--rounds` at least 1")
    comparison.run(measure, options)


def key(number):
    return f"key-of-client-{number}"


def digest(number):
    return "sha256:" + hashlib.sha256(key(number).encode()).hexdigest()


def write_copy(path, count):
    """Writes the copy of shared clients from which a gateway starts, see src/shared_data.rs."""
    with open(path, "w") as file:
        header = {"transom_shared_data": 1, "data": "clients", "epoch": "e", "version": count, "written_ms": 0}
        print(json.dumps(header), file=file)
        for number in range(count):
            client = {"plan": "basic", "api_keys": [digest(number)]}
            print(json.dumps([f"client-{number}", number + 1, json.dumps(client)]), file=file)
        print(json.dumps({"entries": count}), file=file)
    os.chmod(path, 0o600)


def write_list(path, count):
    with open(path, "w") as file:
        for number in range(count):
            print(f'[clients.client-{number}]\nplan = "basic"\napi_keys = ["{digest(number)}"]', file=file)


def write_denied(path, count):
    with open(path, "w") as file:
        for number in range(count):
            print(f'[[deny]]\nnetwork = "11.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"', file=file)


class Gateway:
    def __init__(self, binary, directory, name, sections):
        port = machine.free_port()
        config = os.path.join(directory, f"{name}.toml")
        with open(config, "w") as file:
            file.write(CONFIG.format(host=machine.LOOPBACK, port=port, sections=sections))
        self.name = name
        self._address = (machine.LOOPBACK, port)
        self._connection = None
        start = time.monotonic()
        command, log = [binary, "run", "--config", config], os.path.join(directory, f"{name}.log")
        self.server = machine.Server("transom", command, port, log, os.sched_getaffinity(0))
        while self.status(0) != 200:
            if time.monotonic() - start > PATIENCE_S:
                raise BenchmarkError(f"{name} knows no client after {PATIENCE_S} s:\n{self.server.output()}")
            time.sleep(0.01)
        self.start_s = time.monotonic() - start
        self.memory_mib = self.server.memory_mib()

    def status(self, client):
        self._connection = self._connection or socket.create_connection(self._address, timeout=PATIENCE_S)
        self._connection.sendall(f"GET / HTTP/1.1\r\nhost: a\r\nx-api-key: {key(client)}\r\n\r\n".encode())
        response = b""
        while b"\r\n\r\n" not in response:
            response += self._connection.recv(65536)
        head, _, body = response.partition(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        while len(body) < length:
            body += self._connection.recv(65536)
        return int(head[9:12])

    def cpu_us(self, clients):
        """CPU time of a request, of the clients in turn."""
        before = sum(self.server.cpu_times_s())
        for client in clients:
            if self.status(client) != 200:
                raise BenchmarkError(f"{self.name} refuses client {client}")
        return 1e6 * (sum(self.server.cpu_times_s()) - before) / len(clients)

    def stop(self):
        if self._connection:
            self._connection.close()
        self.server.stop()


def measure(options, directory, report):
    comparison.require(options.transom, [Redis])
    report.facts(machine.description([("redis", Redis.version()), ("gateway", options.transom)]))
    file = lambda name: os.path.join(directory, name)
    write_copy(file("copy"), options.clients)
    write_copy(file("copy-of-few"), ASKING)
    listed_clients = min(options.clients, LISTED_MAX)
    write_list(file("clients.toml"), listed_clients)
    write_denied(file("access.toml"), options.networks)
    write_denied(file("access-of-few.toml"), FEW_NETWORKS)
    store, redis = Redis().start(directory, min(os.sched_getaffinity(0)))
    host = machine.LOOPBACK
    shared = lambda copy, port: SHARED.format(host=host, redis=port, clients=file(copy))
    listed = LISTED.format(clients=file("clients.toml"))
    denied = lambda access: shared("copy-of-few", nowhere) + DENIED.format(denied=file(access))
    # Nothing listens there: this gateway keeps the few clients of its copy.
    nowhere = machine.free_port()
    rows, compared = [], []

    def start(name, sections):
        gateway = Gateway(options.transom, directory, name.replace(" ", "-").replace(",", ""), sections)
        rows.append([name, f"{gateway.start_s:.2f}", f"{gateway.memory_mib:,.0f}"])
        compared.append(gateway)
        return gateway

    def start_only(name, sections):
        start(name, sections)
        compared.pop().stop()

    try:
        few = start(f"{ASKING:,} clients in a copy", shared("copy-of-few", nowhere))
        many = start(f"{options.clients:,} clients in a copy, the store is empty", shared("copy", redis))
        # It refills the store after some seconds, and the next one has no copy.
        deadline = time.monotonic() + PATIENCE_S
        while "were restored from this gateway's copy" not in many.server.output():
            if time.monotonic() > deadline:
                raise BenchmarkError(f"the store is not filled after {PATIENCE_S} s:\n{many.server.output()}")
            time.sleep(0.1)
        start_only(f"{options.clients:,} clients read from the store", shared("no-copy", redis))
        start_only(f"{listed_clients:,} clients in the clients file", listed)
        few_denied = start(f"{ASKING:,} clients, {FEW_NETWORKS} denied networks in the access file", denied("access-of-few.toml"))
        many_denied = start(f"{ASKING:,} clients, {options.networks:,} denied networks in the access file", denied("access.toml"))
        report.section("From the start to the first admitted request, and memory then")
        report.table(["", "s", "MiB"], rows)
        report.section(f"CPU time of a request of {ASKING:,} clients, µs, {options.rounds} rounds")
        few_clients = range(ASKING)
        many_clients = random.Random(1).sample(range(options.clients), ASKING)
        rows = []
        for what, first, second, clients in [
            (f"{options.clients:,} clients beside {ASKING:,}", few, many, many_clients),
            (f"{options.networks:,} denied networks beside {FEW_NETWORKS}", few_denied, many_denied, few_clients),
        ]:
            turns = [(first.cpu_us(few_clients), second.cpu_us(clients)) for _ in range(options.rounds)]
            ratios = [of_second / of_first for of_first, of_second in turns]
            medians = [f"{statistics.median(of):.1f}" for of in zip(*turns)]
            rows.append([what, *medians, *(f"{ratio:.2f}" for ratio in (statistics.median(ratios), min(ratios), max(ratios)))])
        report.table(["", "of the few", "of the many", "ratio, median", "min", "max"], rows)
    finally:
        for gateway in compared:
            gateway.stop()
        store.stop()


if __name__ == "__main__":
    main()
