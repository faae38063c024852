#!/usr/bin/env python3
"""Measures CPU time per decision: Envoy's rate limit service beside the JSON API and a refused request.

    apt-get install -y nginx-light nghttp2-client curl
    cargo build --release
    python3 benches/ratelimit_service.py                         # about three minutes
    python3 benches/ratelimit_service.py --results table.md      # also writes the figures as Markdown

Turns, rounds and cores are those of peers.py: the gateway has one worker and a core to itself, the load another core. Every
decision is about one key and two windows. The gateway's metrics must agree with what is measured: that all decisions were
made, and that all were admitted or, but for the first, refused.
"""

import argparse
import http.client
import json
import os
import re
import statistics

import comparison
import gateways
import load_generators
import machine
from gateways import FORWARDING, REFUSING, Scenario
from train import CALL_FIELDS, CALL_PATH, MAX_NOT_REFUSED, rate_limit_call

ADDRESS = "192.0.2.1"
# `overall_code` of a RateLimitResponse.
OK, OVER_LIMIT = 1, 2


class Calls(load_generators.Http2):
    """h2load with calls of the rate limit service about one descriptor."""

    path = CALL_PATH

    def __init__(self, directory):
        super().__init__(directory)
        self._body = os.path.join(directory, "call")
        with open(self._body, "wb") as file:
            file.write(rate_limit_call([("remote_address", ADDRESS)]))
        self.options = (*load_generators.Http2.options, *CALL_FIELDS, f"-d{self._body}")

    def probe(self, port, _):
        """Returns the code of one call."""
        answer = self._body + ".answer"
        command = ["curl", "-sS", "--http2-prior-knowledge", "--max-time", "5", "--noproxy", "*", "-o", answer]
        fields = (field.replace("-H", "", 1) for field in CALL_FIELDS)
        command += [part for field in fields for part in ("-H", field)]
        url = f"http://{machine.LOOPBACK}:{port}{self.path}"
        machine.run_on(os.sched_getaffinity(0), [*command, "--data-binary", f"@{self._body}", url], 10)
        with open(answer, "rb") as file:
            # The prefix of the message, and its first field, `overall_code`.
            content = file.read()
        return content[6] if content[5:6] == b"\x08" else None


class Posts(load_generators.H2load):
    """h2load with requests to the JSON API."""

    path = "/v1/limit"

    def __init__(self, directory):
        super().__init__(directory)
        self._question = json.dumps({"rule": "called", "key": ADDRESS})
        body = os.path.join(directory, "question")
        with open(body, "w") as file:
            file.write(self._question)
        self.options = (*load_generators.H2load.options, f"-d{body}")

    def probe(self, port, _):
        """Returns whether one request is allowed."""
        connection = http.client.HTTPConnection(machine.LOOPBACK, port, timeout=5)
        connection.request("POST", self.path, self._question)
        allowed = json.loads(connection.getresponse().read())["allowed"]
        connection.close()
        return allowed


class Way(gateways.Transom):
    """A gateway that is asked in one way."""

    def __init__(self, binary, name, generator, limits, turn):
        """`limits`: the scenario that sets the limits. `turn`: that of the responses."""
        super().__init__(binary)
        self.name, self.generator, self.turn, self._limits = name, generator, turn, limits

    def start(self, directory, upstream_port, cores):
        service_port = machine.free_port()
        listen = f'ratelimit_service = "{machine.LOOPBACK}:{service_port}"'
        rule = f'[rules.called]\nkey = "ip"\nwindows = [{self.windows(self._limits)}]\n' \
            'descriptor = { domain = "bench", entries = ["remote_address"] }\n'
        server, port = super().start(directory, upstream_port, self._limits, cores, listen=listen, more=rule)
        ports = {Calls: service_port, Posts: self.admin_port}
        return server, ports.get(type(self.generator), port)

    def check(self, turn, options):
        """Compares the gateway's metrics with what was measured."""
        connection = http.client.HTTPConnection(machine.LOOPBACK, self.admin_port, timeout=5)
        connection.request("GET", "/metrics")
        metrics = connection.getresponse().read().decode()
        connection.close()
        counts = {"admitted": 0, "refused": 0}
        for outcome, count in re.findall(r'^transom_decisions_total\{.*outcome="(admitted|refused)".*\} (\d+)', metrics, re.MULTILINE):
            counts[outcome] += int(count)
        expected, other = ("refused", "admitted") if self._limits.limits else ("admitted", "refused")
        # Before the limit is reached.
        most = MAX_NOT_REFUSED if self._limits.limits else 0
        if counts[expected] < comparison.PURITY * turn.rate * options.seconds or counts[other] > most:
            raise machine.BenchmarkError(f"{self.name}: the gateway counted {counts}, and {turn.rate:.0f} responses a second were received")


def main():
    comparison.run(measure, arguments())


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comparison.common_arguments(parser)
    parser.set_defaults(transom=comparison.PLAIN)
    return comparison.checked(parser)


def measure(options, directory, report):
    calls, posts, requests = Calls(directory), Posts(directory), load_generators.Http2(directory)
    respond = lambda status: Scenario("decisions", False, status)
    refused = gateways.HTTP2_REFUSING._replace(name="decisions", path=f"{load_generators.PATH}?*", count=7)
    transom = options.transom
    compared = [
        Way(transom, "rate limit service, within the limit", calls, FORWARDING, respond(OK)),
        Way(transom, "rate limit service, over the limit", calls, REFUSING, respond(OVER_LIMIT)),
        Way(transom, "JSON API, within the limit", posts, FORWARDING, respond(True)),
        Way(transom, "JSON API, over the limit", posts, REFUSING, respond(False)),
        Way(transom, "refused request over HTTP/2", requests, REFUSING, refused),
    ]
    comparison.require_all(options, [load_generators.H2load, gateways.Nginx])
    versions = [("transom", compared[0].version()), ("h2load", calls.version())]
    report.machine(machine.description(versions), options, calls)
    upstream, upstream_port = load_generators.start_upstream(directory, options.load_core)
    with upstream:
        decide(options, directory, report, compared, upstream_port)


def decide(options, directory, report, compared, upstream_port):
    """All rounds, and the tables."""
    rounds = []
    for number in range(options.rounds):
        rounds.append({})
        for way in comparison.in_turn(compared, number):
            server, port = way.start(directory, upstream_port, {options.server_core})
            with server:
                turn = comparison.take_turn(server, port, way.turn, way.generator, options)
                way.check(turn, options)
            rounds[-1][way.name] = turn
        report.round(compared[0].turn, number, rounds[-1])
    names = [way.name for way in compared]
    median = lambda name, field: statistics.median(getattr(turns[name], field) for turns in rounds)
    report.section("Decisions: CPU time each")
    report.table(
        ["asked by", "median µs", "decisions/s", "core used", "core lost to others, worst"],
        [
            [
                name, f"{median(name, 'cpu_us'):.2f}", f"{median(name, 'rate'):,.0f}", f"{median(name, 'busy'):.0%}",
                f"{max(turns[name].others for turns in rounds):.0%}",
            ]
            for name in names
        ],
    )
    rows = []
    for name in names[2:]:
        # Refusals are compared with refusals.
        base = names[0] if "within" in name else names[1]
        ratios = sorted(turns[name].cpu_us / turns[base].cpu_us for turns in rounds)
        rows.append([f"{name} / rate limit service", f"{ratios[0]:.2f}", f"{statistics.median(ratios):.2f}", f"{ratios[-1]:.2f}"])
    report.table(["ratio, round by round", "min", "median", "max"], rows)


if __name__ == "__main__":
    main()
