#!/usr/bin/env python3
"""Measures what an open dashboard costs the gateway: CPU time at a constant rate of requests.

    apt-get install -y nginx-light nghttp2-client
    make release
    python3 benches/dashboard.py                       # about five minutes
    python3 benches/dashboard.py --results table.md    # also writes the figures as Markdown

One gateway with one worker forwards 5,000 requests a second. Turns with an open stream of events,
as the dashboard holds one, and turns without it follow one another; ratios are formed within a round. CPU time is that
of all threads of the gateway; that of its thread `admin`, which makes the events, is shown besides, because other work
of the machine disturbs it less. The program also measures the time between events.
"""

import argparse
import http.client
import json
import re
import statistics
import threading
import time
from collections import namedtuple

import comparison
import gateways
import load_generators
import machine
from machine import BenchmarkError

RATE, CONNECTIONS = 5_000, 50
ROUTES = 20
CPU_TARGET, PAUSE_TARGET_S = 0.02, 1.5
# The rate of a turn may differ by so much from the wanted one.
RATE_TOLERANCE = 0.03

Turn = namedtuple("Turn", "cpu_s admin_s rate pauses")


class Stream(threading.Thread):
    """Holds a stream of events open, and notes when each event with the state arrives."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection(machine.LOOPBACK, port, timeout=10)
        self._connection.request("GET", "/v1/events")
        self._response = self._connection.getresponse()
        if self._response.status != 200:
            raise BenchmarkError(f"no stream of events: {self._response.status}")
        self.times, self.bytes = [], 0
        self._is_closed = False

    def run(self):
        # An event has a line `event:` first unless it is the state.
        name = None
        try:
            for line in self._response:
                self.bytes += len(line)
                if line.startswith(b"event: "):
                    name = line
                elif line.startswith(b"data: ") and name is None:
                    json.loads(line[len(b"data: "):])
                    self.times.append(time.monotonic())
                elif line == b"\n":
                    name = None
        except (OSError, ValueError, http.client.HTTPException):
            if not self._is_closed:
                raise

    def close(self):
        self._is_closed = True
        self._connection.sock.shutdown(2)
        self.join(10)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comparison.common_arguments(parser)
    parser.set_defaults(rounds=20, seconds=6)
    comparison.run(measure, comparison.checked(parser))


def configuration():
    """More routes and rules, so that the events have as much to say as those of a real gateway."""
    rules = "".join(f'[rules.rule-{n}]\nkey = "ip"\nwindows = ["4000000000/hour", "70000000/minute"]\n' for n in range(ROUTES))
    routes = "".join(
        f'[[routes]]\npath = "/api/part-{n}/{{name}}"\nupstream = "bench"\nrules = ["rule-{n}"]\n' for n in range(ROUTES)
    )
    return rules + routes


def measure(options, directory, report):
    generator = load_generators.H2load(directory)
    comparison.require_all(options, [generator])
    transom = gateways.Transom(options.transom)
    versions = [("transom", transom.version()), ("h2load", generator.version())]
    report.facts([
        *machine.description(versions),
        ("load", f"{RATE:,} requests a second over {ROUTES} routes, {options.rounds} rounds of two turns of {options.seconds} s"),
    ])
    upstream, upstream_port = load_generators.start_upstream(directory, options.load_core)
    with upstream:
        server, port = transom.start(
            directory, upstream_port, gateways.FORWARDING, {options.server_core}, more=configuration()
        )
        with server:
            take_turn(server, port, None, options)
            rounds = []
            for number in range(options.rounds):
                turns = {}
                for is_open in (False, True) if number % 2 == 0 else (True, False):
                    turns[is_open] = take_turn(server, port, transom.admin_port if is_open else None, options)
                rounds.append(turns)
                print(f"  round {number + 1}: {turns[True].cpu_s / turns[False].cpu_s:.4f}", flush=True)
    print_results(report, rounds)


def take_turn(server, port, admin_port, options):
    stream = Stream(admin_port) if admin_port else None
    if stream:
        stream.start()
    before = server.threads_cpu_s()
    rate = run_load(port, options)
    times = server.threads_cpu_s()
    times.subtract(before)
    cpu_s, admin_s = sum(times.values()), times["admin"]
    if not stream:
        return Turn(cpu_s, admin_s, rate, [])
    stream.close()
    pauses = [later - earlier for earlier, later in zip(stream.times, stream.times[1:])]
    if len(pauses) < options.seconds - 2:
        raise BenchmarkError(f"only {len(pauses) + 1} events in {options.seconds} s")
    return Turn(cpu_s, admin_s, rate, pauses)


def run_load(port, options):
    """Returns the requests per second."""
    requests = RATE * options.seconds
    urls = [f"http://{machine.LOOPBACK}:{port}/api/part-{n}/hello" for n in range(ROUTES)]
    command = ["h2load", "--h1", "-t1", f"-c{CONNECTIONS}", f"--rps={RATE // CONNECTIONS}", f"-n{requests}", *urls]
    output = machine.run_on({options.load_core}, command, options.seconds + 60)
    done = re.search(r"finished in ([0-9.]+)(m?s), ", output)
    codes = re.search(r"status codes: (\d+) 2xx", output)
    if not done or not codes or int(codes[1]) != requests:
        raise BenchmarkError(f"not all requests were forwarded:\n{output}")
    rate = requests / (float(done[1]) / (1000 if done[2] == "ms" else 1))
    if abs(rate / RATE - 1) > RATE_TOLERANCE:
        raise BenchmarkError(f"{rate:,.0f} requests a second instead of {RATE:,}; the machine is too busy")
    return rate


def print_results(report, rounds):
    report.section(f"Dashboard: CPU time at {RATE:,} requests a second")
    rows = []
    for name, is_open in (("without", False), ("with an open dashboard", True)):
        turns = [turns[is_open] for turns in rounds]
        cpu_s, rate = (statistics.median(getattr(turn, field) for turn in turns) for field in ("cpu_s", "rate"))
        admin_s = statistics.median(turn.admin_s for turn in turns)
        rows.append([name, f"{cpu_s:.3f}", f"{admin_s:.4f}", f"{rate:,.0f}"])
    report.table(["gateway", "median CPU s in a turn", "of the thread admin", "requests/s"], rows)
    ratios = sorted(turns[True].cpu_s / turns[False].cpu_s - 1 for turns in rounds)
    middle = statistics.median(ratios)
    shares = sorted((turns[True].admin_s - turns[False].admin_s) / turns[False].cpu_s for turns in rounds)
    pauses = [pause for turns in rounds for pause in turns[True].pauses]
    report.table(
        ["", "min", "median", "max", "target"],
        [
            ["CPU time, increase round by round", f"{ratios[0]:+.1%}", f"{middle:+.1%}", f"{ratios[-1]:+.1%}",
             f"median < {CPU_TARGET:.0%}: {comparison.met(middle < CPU_TARGET)}"],
            ["the part of the thread admin", f"{shares[0]:+.2%}", f"{statistics.median(shares):+.2%}", f"{shares[-1]:+.2%}", ""],
            ["seconds between events", f"{min(pauses):.2f}", f"{statistics.median(pauses):.2f}", f"{max(pauses):.2f}",
             f"max < {PAUSE_TARGET_S}: {comparison.met(max(pauses) < PAUSE_TARGET_S)}"],
        ],
    )


if __name__ == "__main__":
    main()
