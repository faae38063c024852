#!/usr/bin/env python3
"""What it costs that gateways count together in leases, and how often Redis is asked.

    apt-get install -y nginx-light wrk redis-server
    make release
    python3 benches/shared.py                       # about two minutes
    python3 benches/shared.py --results table.md    # the same figures as markdown

As beside.py, whose turns, rounds and rules these are. The gateway that shares its counters stands beside the same one
that counts alone; 10,000 keys, told apart by a header, are asked with in turn, and nothing is refused. Redis runs on the
core of the load. Then a hot set of 1,000 keys: the commands that Redis counted, those within scripts included, by request.
"""

import argparse
import os
import re

import beside
import contenders
import load
import machine

KEYS, HOT_KEYS = 10_000, 1_000
COMMANDS_TARGET = 0.05
FORWARDING = contenders.Scenario("forwarding, 10,000 keys", limits=False, status=200, targets={"alone": 1.15})


class KeyedWrk(load.Wrk):
    """wrk that names one key after the other in a header, in requests that are made beforehand."""

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


class Gateway(contenders.Transom):
    """Two layers by a header, counted alone or shared."""

    def __init__(self, binary, name, redis_port=None):
        super().__init__(binary)
        self.name, self._redis_port = name, redis_port

    def start(self, directory, upstream_port, scenario, cores):
        shared = f'[counters.shared]\nredis = "redis://{machine.LOOPBACK}:{self._redis_port}"' if self._redis_port else ""
        # The route of all scenarios stays, but this one is more specific.
        rule = '[rules.keyed]\nkey = "header:x-key"\non_missing_key = "skip"\n' \
            'windows = ["4000000000/hour", "70000000/minute"]\n'
        route = '[[routes]]\npath = "/api/hello"\nupstream = "bench"\nrules = ["keyed"]\n'
        return super().start(directory, upstream_port, scenario, cores, more=f"{shared}\n{rule}\n{route}")


class Redis:
    """A redis-server that keeps nothing, for as long as it is measured."""

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
    """How often each command was called so far."""
    said = machine.run_on(os.sched_getaffinity(0), ["redis-cli", "-p", str(port), "INFO", "commandstats"], 10)
    return {name: int(calls) for name, calls in re.findall(r"^cmdstat_(\S+?):calls=(\d+)", said, re.MULTILINE)}


def main():
    beside.run(measure, arguments())


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside.common_arguments(parser)
    return beside.checked(parser)


def measure(options, directory, report):
    redis = Redis()
    beside.require(options.transom, [redis])
    server, redis_port = redis.start(directory, options.load_core)
    with server:
        gateways = [Gateway(options.transom, "transom", redis_port), Gateway(options.transom, "alone")]
        generator = KeyedWrk(directory, KEYS)
        beside.begin(options, report, [*gateways[:1], redis], generator)
        upstream, upstream_port = load.start_upstream(directory, options.load_core)
        with upstream:
            beside.compare(options, directory, report, FORWARDING, gateways, generator, upstream_port)
            hot_set(options, directory, report, gateways[0], upstream_port, redis_port)


def hot_set(options, directory, report, gateway, upstream_port, redis_port):
    """How often Redis is asked for keys that are all busy."""
    generator = KeyedWrk(directory, HOT_KEYS)
    server, port = gateway.start(directory, upstream_port, FORWARDING, {options.server_core})
    with server:
        generator.run(options.load_core, port, beside.WARM_UP_S)
        before = commands(redis_port)
        outcome = generator.run(options.load_core, port, options.seconds * options.rounds)
        after = commands(redis_port)
    calls = {name: count - before.get(name, 0) for name, count in after.items() if name != "info"}
    scripts, everything = calls.get("evalsha", 0) / outcome.answers, sum(calls.values()) / outcome.answers
    report.section(f"Redis commands per request: a hot set of {HOT_KEYS:,} keys, {outcome.answers / outcome.seconds:,.0f} requests/s")
    target = f"< {COMMANDS_TARGET}: {beside.met(everything < COMMANDS_TARGET)}"
    report.table(
        ["commands", "per request", "target"],
        [["EVALSHA", f"{scripts:.4f}", ""], ["all, those within scripts included", f"{everything:.4f}", target]],
    )


if __name__ == "__main__":
    main()
