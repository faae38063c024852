#!/usr/bin/env python3
"""Measures the cost of counting in leases, and the number of calls to Redis.

    apt-get install -y nginx-light wrk redis-server
    make release
    python3 benches/lease_calls.py                       # about two minutes
    python3 benches/lease_calls.py --results table.md    # also writes the figures as Markdown

Turns, rounds and rules are those of http1.py. A gateway with shared counters is compared with the same gateway
counting alone; requests use 10,000 keys in turn, from a header, and none is refused. Redis runs on the
core of the load. Then 1,000 busy keys: commands that Redis counted, including those within scripts, per request.
"""

import argparse
import os
import re

import gateways
import http1
import load_generators
import machine

KEYS, BUSY_KEYS = 10_000, 1_000
COMMANDS_TARGET = 0.05
FORWARDING = gateways.Scenario("forwarding, 10,000 keys", limits=False, status=200, targets={"alone": 1.15})


class KeyedWrk(load_generators.Wrk):
    """wrk with one key after the other in a header, in requests created in advance."""

    REQUESTS = """
        local requests, next_one = {{}}, 0
        init = function()
            for key = 1, {keys} do
                requests[key] = wrk.format("GET", nil, {{["X-Key"] = "client-" .. key}})
            end
        end
        request = function()
            next_one = next_one % {keys} + 1
            return requests[next_one]
        end
    """

    def __init__(self, directory, keys):
        super().__init__(directory)
        self._script = os.path.join(directory, f"keys-{keys}.lua")
        with open(self._script, "w") as file:
            file.write(self.REQUESTS.format(keys=keys) + self.SCRIPT)


class Gateway(gateways.Transom):
    """Two layers by a header, counted alone or shared."""

    def __init__(self, binary, name, redis_port=None):
        super().__init__(binary)
        self.name, self._redis_port = name, redis_port

    def start(self, directory, upstream_port, scenario, cores):
        shared = f'[counters.shared]\nredis = "redis://{machine.LOOPBACK}:{self._redis_port}"' if self._redis_port else ""
        # More specific than the route of all scenarios.
        rule = '[rules.keyed]\nkey = "header:x-key"\non_missing_key = "skip"\n' \
            'windows = ["4000000000/hour", "70000000/minute"]\n'
        route = '[[routes]]\npath = "/api/hello"\nupstream = "bench"\nrules = ["keyed"]\n'
        return super().start(directory, upstream_port, scenario, cores, more=f"{shared}\n{rule}\n{route}")


class Redis:
    """A redis-server without persistence, for the duration of the benchmark."""

    name, package = "redis-server", "redis-server"

    def start(self, directory, core):
        port = machine.free_port()
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
    http1.run(measure, arguments())


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    http1.common_arguments(parser)
    return http1.checked(parser)


def measure(options, directory, report):
    redis = Redis()
    http1.require(options.transom, [redis])
    server, redis_port = redis.start(directory, options.load_core)
    with server:
        compared = [Gateway(options.transom, "transom", redis_port), Gateway(options.transom, "alone")]
        generator = KeyedWrk(directory, KEYS)
        http1.begin(options, report, [*compared[:1], redis], generator)
        upstream, upstream_port = load_generators.start_upstream(directory, options.load_core)
        with upstream:
            http1.compare(options, directory, report, FORWARDING, compared, generator, upstream_port)
            hot_set(options, directory, report, compared[0], upstream_port, redis_port)


def hot_set(options, directory, report, gateway, upstream_port, redis_port):
    """Measures the calls to Redis for busy keys."""
    generator = KeyedWrk(directory, BUSY_KEYS)
    server, port = gateway.start(directory, upstream_port, FORWARDING, {options.server_core})
    with server:
        generator.run(options.load_core, port, http1.WARM_UP_S)
        before = commands(redis_port)
        outcome = generator.run(options.load_core, port, options.seconds * options.rounds)
        after = commands(redis_port)
    calls = {name: count - before.get(name, 0) for name, count in after.items() if name != "info"}
    scripts, everything = calls.get("evalsha", 0) / outcome.responses, sum(calls.values()) / outcome.responses
    report.section(f"Redis commands per request: {BUSY_KEYS:,} busy keys, {outcome.responses / outcome.seconds:,.0f} requests/s")
    target = f"< {COMMANDS_TARGET}: {http1.met(everything < COMMANDS_TARGET)}"
    report.table(
        ["commands", "per request", "target"],
        [["EVALSHA", f"{scripts:.4f}", ""], ["all, including those within scripts", f"{everything:.4f}", target]],
    )


if __name__ == "__main__":
    main()
