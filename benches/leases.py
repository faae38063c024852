#!/usr/bin/env python3
"""Compares the simulation of leases (simulation.rs) with real gateways.

    apt-get install -y nginx-light redis-server
    make release
    python3 benches/leases.py                       # about three minutes
    cargo bench --bench simulation -- --small       # the simulated figures
    python3 benches/leases.py --results table.md    # also writes the figures as Markdown

One, two and four gateways, with one worker each, count in one Redis. A relay adds 20 ms, so that requests that waited for Redis can
be recognized by their response time. Requests come at random times (Poisson), to any gateway, with keys from a
header, through two windows of 10 s. The gateways' metrics count the calls. Unused tokens are counted for keys whose demand
exceeded the limit in both windows.
"""

import argparse
import asyncio
import collections
import contextlib
import functools
import itertools
import os
import random
import re
import time
import urllib.request

import comparison
import load_generators
import machine
from lease_calls import Redis
from machine import BenchmarkError

GATEWAYS, RATE = (1, 2, 4), 500
PERIOD_S, WINDOWS = 10, 2
WAY_S = 0.020
# No request is sent so near the ends of the two windows that it could count in another window: the gateways learn the time
# from delayed replies.
MARGIN_S = 0.2
Load = collections.namedtuple("Load", "name keys zipf limit")
LOADS = (Load("one counter for all", 1, 0, RATE * 5), Load("1,000 clients (Zipf), 100 in 10 s each", 1_000, 1, 100))
ANSWERS = ("granted", "refused", "other_window", "refunded")


class Relay(asyncio.Protocol):
    """Relays all bytes, delayed by half of the round trip."""

    def __init__(self, loop, other=None, port=None):
        self._loop, self.other, self._port, self._early = loop, other, port, []

    def connection_made(self, transport):
        self.transport = transport
        if self._port:
            self._task = self._loop.create_task(self._connect())

    async def _connect(self):
        _, self.other = await self._loop.create_connection(lambda: Relay(self._loop, self), machine.LOOPBACK, self._port)
        for data in self._early:
            self.data_received(data)

    def data_received(self, data):
        if self.other is None:
            self._early.append(data)
        else:
            self._loop.call_later(WAY_S / 2, self.other.transport.write, data)

    def connection_lost(self, _error):
        if self.other is not None:
            self.other.transport.close()


class Client(asyncio.Protocol):
    """One persistent connection to a gateway; one request at a time."""

    def connection_made(self, transport):
        self.transport, self._got, self.response = transport, b"", None

    def ask(self, loop, key):
        self.response = loop.create_future()
        self.transport.write(f"GET {load_generators.PATH} HTTP/1.1\r\nhost: bench\r\nx-key: {key}\r\n\r\n".encode())
        return self.response

    def data_received(self, data):
        self._got += data
        head, end, body = self._got.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if end and len(body) >= (int(length[1]) if length else 0):
            self._got = b""
            self.response.set_result(int(head[9:12]))

    def connection_lost(self, _error):
        if self.response is not None and not self.response.done():
            self.response.set_exception(BenchmarkError("a gateway has closed a connection"))


def start(options, directory, upstream_port, redis_port, limit):
    """A gateway with its port and the port of its metrics."""
    port, admin = machine.free_port(), machine.free_port()
    path = os.path.join(directory, f"leases-{port}.toml")
    with open(path, "w") as file:
        file.write(
            f'workers = 1\nlisten = {{ http = "{machine.LOOPBACK}:{port}", admin = "{machine.LOOPBACK}:{admin}" }}\n'
            f'[counters.shared]\nredis = "redis://{machine.LOOPBACK}:{redis_port}"\ntimeout = "2s"\n'
            f'[upstreams.bench]\nservers = ["http://{machine.LOOPBACK}:{upstream_port}"]\n'
            f'[rules.keyed]\nkey = "header:x-key"\non_missing_key = "skip"\nwindows = ["{limit}/{PERIOD_S}s"]\n'
            f'[[routes]]\npath = "{load_generators.PATH}"\nupstream = "bench"\nrules = ["keyed"]\n'
        )
    log = os.path.join(directory, f"leases-{port}.log")
    return machine.Server("transom", [options.transom, "run", "--config", path], port, log, {options.server_core}), port, admin


def calls(admins):
    """Returns how many replies of Redis the gateways have received so far."""
    count = 0
    for admin in admins:
        with urllib.request.urlopen(f"http://{machine.LOOPBACK}:{admin}/metrics", timeout=5) as page:
            output = page.read().decode()
        for outcome, number in re.findall(r'^transom_shared_requests_total\{.*outcome="(\w+)".*\} (\d+)', output, re.MULTILINE):
            count += int(number) if outcome in ANSWERS else 0
    return count


async def play(scenario, ports, admins):
    """Applies load for two windows, and returns the same figures as the simulation."""
    loop, chance = asyncio.get_running_loop(), random.Random(1)
    weights = list(itertools.accumulate((n + 1) ** -scenario.zipf for n in range(scenario.keys)))
    idle = {port: [] for port in ports}
    asked, admitted, took, tasks = collections.Counter(), collections.Counter(), [], set()

    async def one(port, key):
        client = idle[port].pop() if idle[port] else None
        if client is None:
            _, client = await loop.create_connection(Client, machine.LOOPBACK, port)
        began = loop.time()
        window = int(began + offset) // PERIOD_S
        status = await client.ask(loop, key)
        took.append(loop.time() - began)
        idle[port].append(client)
        if status not in (200, 429):
            raise BenchmarkError(f"a gateway responded with {status}")
        asked[key, window] += 1
        admitted[key] += status == 200

    # Connections are opened in advance, and Redis is called once, so that the gateways know its time.
    for port in ports:
        opened = [await loop.create_connection(Client, machine.LOOPBACK, port) for _ in range(64)]
        idle[port] = [client for _, client in opened]
    await asyncio.gather(*(client.ask(loop, "unused") for clients in idle.values() for client in clients[:2]))
    start_s = (int(time.time() + MARGIN_S) // PERIOD_S + 1) * PERIOD_S
    before = calls(admins)
    offset, at_s = time.time() - loop.time(), start_s + MARGIN_S
    while True:
        at_s += chance.expovariate(RATE)
        if at_s >= start_s + WINDOWS * PERIOD_S - MARGIN_S:
            break
        await asyncio.sleep(max(0, at_s - offset - loop.time()))
        key = chance.choices(range(scenario.keys), cum_weights=weights)[0]
        task = loop.create_task(one(chance.choice(ports), key))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    number = calls(admins) - before
    windows = range(start_s // PERIOD_S, start_s // PERIOD_S + WINDOWS)
    full = [key for key in range(scenario.keys) if all(asked[key, window] > scenario.limit for window in windows)]
    most = scenario.limit * WINDOWS
    if max(admitted.values()) > most:
        # The gateways then count alone.
        raise BenchmarkError(f"a key got {max(admitted.values())} of {most}: the relay stood still; the machine has too much to do")
    missing = sum(most - admitted[key] for key in full) / max(1, most * len(full))
    waited = sum(seconds >= WAY_S for seconds in took) / len(took)
    return number / len(took), waited, missing


def measure(options, directory, report):
    redis = Redis()
    comparison.require(options.transom, [redis])
    server, redis_port = redis.start(directory, options.load_core)
    upstream, upstream_port = load_generators.start_upstream(directory, options.load_core)
    with server, upstream:
        asyncio.run(play_all(options, directory, report, upstream_port, redis_port))


async def play_all(options, directory, report, upstream_port, redis_port):
    loop = asyncio.get_running_loop()
    relay = await loop.create_server(lambda: Relay(loop, port=redis_port), machine.LOOPBACK, 0)
    relay_port = relay.sockets[0].getsockname()[1]
    for scenario in LOADS:
        rows = []
        for count in GATEWAYS:
            machine.run_on({options.load_core}, ["redis-cli", "-p", str(redis_port), "FLUSHALL"], 10)
            with contextlib.ExitStack() as stack:
                gateways = []
                for _ in range(count):
                    # In addition to the relay.
                    begin = functools.partial(start, options, directory, upstream_port, relay_port, scenario.limit)
                    gateways.append(await loop.run_in_executor(None, begin))
                    stack.enter_context(gateways[-1][0])
                figures = await play(scenario, [port for _, port, _ in gateways], [admin for _, _, admin in gateways])
                await loop.run_in_executor(None, stack.close)
            number, waited, missing = figures
            rows.append([str(RATE), str(count), f"{number:.4f}", f"{waited:.2%}", f"{missing:.3%}"])
        report.section(scenario.name)
        report.table(["requests/s", "gateways", "calls per request", "waited", "unused, of the limit"], rows)
    relay.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comparison.common_arguments(parser)
    comparison.run(measure, comparison.checked(parser))


if __name__ == "__main__":
    main()
