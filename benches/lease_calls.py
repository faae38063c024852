#!/usr/bin/env python3
"""Measures the cost of counting in leases, and the number of calls to Redis.

    apt-get install -y nginx-light wrk redis-server
    make release
    python3 benches/lease_calls.py                       # about two minutes
    python3 benches/lease_calls.py --results table.md    # also writes the figures as Markdown

Turns, rounds and rules are those of peers.py. A gateway with shared counters is compared with the same gateway
counting alone; requests use 10,000 keys in turn, from a header, and none is refused. Redis runs on the
core of the load. Then 1,000 busy keys: commands that Redis counted, including those within scripts, per request.
"""

import argparse
import os
import re

import comparison
import gateways
import load_generators
import machine

KEYS, BUSY_KEYS = 10_000, 1_000
COMMANDS_TARGET = 0.05
FORWARDING = gateways.FORWARDING._replace(
    name="forwarding, 10,000 keys", targets={"alone": 1.15}, key="x-key", fields=("X-Key: client-*",), count=KEYS
)


class Gateway(gateways.Transom):
    """Two layers by a header, counted alone or shared."""

    def __init__(self, binary, name, redis_port=None):
        super().__init__(binary)
        self.name, self._redis_port = name, redis_port

    def start(self, directory, upstream_port, scenario, cores):
        shared = f'[counters.shared]\nredis = "redis://{machine.LOOPBACK}:{self._redis_port}"' if self._redis_port else ""
        return super().start(directory, upstream_port, scenario, cores, more=shared)


class Redis:
    """A redis-server without persistence, for the duration of the benchmark."""

    name, package = "redis-server", "redis-server"

    def start(self, directory, core, port=None):
        port = port or machine.free_port()
        options = ["--port", str(port), "--bind", machine.LOOPBACK, "--save", "", "--dir", directory]
        server = machine.Server(self.name, [self.name, *options], port, os.path.join(directory, "redis.log"), {core})
        return server, port

    @staticmethod
    def version():
        return machine.version_of(["redis-server", "--version"], r"v=(\S+)")


def commands(port):
    """Returns the number of calls of each command so far."""
    output = machine.run_on(os.sched_getaffinity(0), ["redis-cli", "-p", str(port), "INFO", "commandstats"], 10)
    return {name: int(calls) for name, calls in re.findall(r"^cmdstat_(\S+?):calls=(\d+)", output, re.MULTILINE)}


def main():
    comparison.run(measure, arguments())


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comparison.common_arguments(parser)
    return comparison.checked(parser)


def measure(options, directory, report):
    redis = Redis()
    comparison.require(options.transom, [redis])
    server, redis_port = redis.start(directory, options.load_core)
    with server:
        compared = [Gateway(options.transom, "transom", redis_port), Gateway(options.transom, "alone")]
        generator = load_generators.Wrk(directory)
        comparison.begin(options, report, [*compared[:1], redis], generator)
        upstream, upstream_port = load_generators.start_upstream(directory, options.load_core)
        with upstream:
            comparison.compare(options, directory, report, FORWARDING, compared, generator, upstream_port)
            hot_set(options, directory, report, compared[0], upstream_port, redis_port)


def hot_set(options, directory, report, gateway, upstream_port, redis_port):
    """Measures the calls to Redis for busy keys."""
    generator, scenario = load_generators.Wrk(directory), FORWARDING._replace(count=BUSY_KEYS)
    server, port = gateway.start(directory, upstream_port, scenario, {options.server_core})
    with server:
        generator.run(options.load_core, port, comparison.WARM_UP_S, scenario)
        before = commands(redis_port)
        outcome = generator.run(options.load_core, port, options.seconds * options.rounds, scenario)
        after = commands(redis_port)
    calls = {name: count - before.get(name, 0) for name, count in after.items() if name != "info"}
    scripts, everything = calls.get("evalsha", 0) / outcome.responses, sum(calls.values()) / outcome.responses
    report.section(f"Redis commands per request: {BUSY_KEYS:,} busy keys, {outcome.responses / outcome.seconds:,.0f} requests/s")
    target = f"< {COMMANDS_TARGET}: {comparison.met(everything < COMMANDS_TARGET)}"
    report.table(
        ["commands", "per request", "target"],
        [["EVALSHA", f"{scripts:.4f}", ""], ["all, including those within scripts", f"{everything:.4f}", target]],
    )


if __name__ == "__main__":
    main()
