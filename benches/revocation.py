#!/usr/bin/env python3
"""Measures after how long a gateway refuses a key that was revoked through another one, and a device that was denied there.

    apt-get install -y redis-server
    make release
    python3 benches/revocation.py                       # about three minutes
    python3 benches/revocation.py --results table.md    # also writes the figures as Markdown

Two gateways have their clients and deny entries in one Redis server. The time runs from the response of the gateway that makes the
change to the first refusal of the other one, which is asked all the time. A random pause precedes each change, so that changes come
at any point between two polls of the store. Then the store is stopped, and comes back empty: what holds meanwhile?
"""

import argparse
import http.client
import json
import os
import random
import statistics
import time

import comparison
import machine
from lease_calls import Redis
from machine import BenchmarkError

TARGET_S = 1.0
PAUSE_MAX_S = 0.3
# Limit for each change to arrive, and for the store to be known as away or back.
PATIENCE_S = 30

CONFIG = """
[listen]
http = "{host}:{port}"
admin = "{host}:{admin}"
[counters.shared]
redis = "redis://{host}:{redis}"
[clients]
source = "shared"
file = "{directory}/clients.copy"
api_key = "header:x-api-key"
[access]
source = "shared"
file = "{directory}/deny.copy"
[upstreams.echo]
builtin = "echo"
[rules.per-client]
key = "client"
on_missing_key = "refuse"
windows = ["4000000000/hour"]
shared = "off"
[rules.per-client.plans.basic]
windows = ["4000000000/hour"]
[[routes]]
path = "/{{*rest}}"
upstream = "echo"
rules = ["per-client"]
"""


class Gateway:
    """A gateway with a folder of its own. Requests use connections that are kept."""

    def __init__(self, binary, directory, redis_port):
        os.mkdir(directory)
        self._binary, self._directory, self._redis_port = binary, directory, redis_port
        self.start()

    def start(self):
        port, admin = machine.free_port(), machine.free_port()
        config = os.path.join(self._directory, "gateway.toml")
        with open(config, "w") as file:
            file.write(CONFIG.format(
                host=machine.LOOPBACK, port=port, admin=admin, redis=self._redis_port, directory=self._directory
            ))
        command = [self._binary, "run", "--config", config]
        log = os.path.join(self._directory, "log")
        self.server = machine.Server("transom", command, port, log, os.sched_getaffinity(0))
        self._requests, self._admin = (
            http.client.HTTPConnection(machine.LOOPBACK, of, timeout=PATIENCE_S) for of in (port, admin)
        )

    def restart(self):
        self.server.end(PATIENCE_S)
        self.start()

    def status(self, **fields):
        fields = {name.replace("_", "-"): value for name, value in fields.items()}
        self._requests.request("GET", "/", headers=fields)
        response = self._requests.getresponse()
        response.read()
        return response.status

    def call(self, method, target, body=None):
        """Sends a request to the API; returns the status and the JSON of the response."""
        self._admin.request(method, target, body=json.dumps(body) if body else None)
        response = self._admin.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else None

    def change(self, method, target, body=None):
        status, answer = self.call(method, target, body)
        if status >= 300:
            raise BenchmarkError(f"{method} {target}: {status} {answer}")
        return answer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transom", default=comparison.OPTIMIZED, metavar="PATH", help="the gateway (default: built by `make release`)")
    parser.add_argument("--trials", type=int, default=200, help="changes of each kind (default 200)")
    parser.add_argument("--results", metavar="FILE", help="also write the figures as Markdown")
    options = parser.parse_args()
    if not 2 <= options.trials <= 10_000:
        parser.error("`--trials` is a number from 2 to 10,000")
    comparison.run(measure, options)


def measure(options, directory, report):
    comparison.require(options.transom, [Redis])
    report.facts(machine.description([("redis", Redis.version()), ("gateway", options.transom)]))
    core = min(os.sched_getaffinity(0))
    store, redis_port = Redis().start(directory, core)
    gateways, stores = [], [store]
    try:
        for name in ("a", "b"):
            gateways.append(Gateway(options.transom, os.path.join(directory, name), redis_port))
        a, b = gateways
        a.change("PUT", "/v1/clients/acme", {"plan": "basic"})
        report.section(f"From the response of one gateway to the refusal of another: {options.trials} changes, ms")
        kinds = [("revoked key", revoke), ("deny entry", deny)]
        delays = {name: sorted(trial(a, b, number) for number in range(options.trials)) for name, trial in kinds}
        report.table(["change", "p50", "p99", "max", "target"], [row(name, delays[name]) for name in delays])
        report.section("While the store is stopped, and when it is back without its data")
        restart = lambda: stores.append(Redis().start(directory, core, redis_port)[0])
        report.table(["", "seen"], outage(a, b, store, restart))
    finally:
        for server in [*(gateway.server for gateway in gateways), *stores]:
            server.stop()


def row(name, delays):
    p99 = statistics.quantiles(delays, n=100, method="inclusive")[98]
    figures = [f"{1000 * seconds:.0f}" for seconds in (statistics.median(delays), p99, delays[-1])]
    return [name, *figures, f"p99 < {1000 * TARGET_S:.0f}: {comparison.met(p99 < TARGET_S)}"]


def until(what, holds):
    """Returns after how long a condition holds."""
    start = time.monotonic()
    while not holds():
        if time.monotonic() - start > PATIENCE_S:
            raise BenchmarkError(f"not within {PATIENCE_S} s: {what}")
    return time.monotonic() - start


def issue(a, b):
    """Returns the id and the text of a new key that both gateways know."""
    issued = a.change("POST", "/v1/clients/acme/keys")
    until("a new key is known", lambda: b.status(x_api_key=issued["key"]) == 200)
    time.sleep(random.uniform(0, PAUSE_MAX_S))
    return issued["id"], issued["key"]


def revoke(a, b, _number):
    name, key = issue(a, b)
    a.change("DELETE", f"/v1/clients/acme/keys/{name}")
    return until("a revoked key is refused", lambda: b.status(x_api_key=key) == 401)


def deny(a, b, number):
    time.sleep(random.uniform(0, PAUSE_MAX_S))
    device = f"device-{number}"
    a.change("POST", "/v1/deny", {"key": {"part": "header:x-device", "value": device}})
    return until("a device is denied", lambda: b.status(x_device=device) == 403)


def outage(a, b, store, restart_store):
    """Stops the store, and starts it without its data. Returns what was seen."""
    _, kept = issue(a, b)
    name, revoked = issue(a, b)
    a.change("DELETE", f"/v1/clients/acme/keys/{name}")
    # Before the other gateway can know it.
    store.stop()
    unknown = b.status(x_api_key=revoked) == 200
    statuses = lambda of: f"{of.status(x_api_key=kept)}, {of.status(x_api_key=revoked)}, {of.status(x_device='device-0')}"
    rows = [
        ["a key, a key revoked just before, a denied device; at the gateway that revoked it", statuses(a)],
        ["at the other one" + (", which had not read the change" if unknown else ""), statuses(b)],
    ]
    start = time.monotonic()
    status, _ = a.call("POST", "/v1/clients/acme/keys")
    rows.append(["a change", f"{status} after {1000 * (time.monotonic() - start):.0f} ms"])
    a.restart()
    rows.append(["at the gateway that revoked the key, started anew from its copy", statuses(a)])
    restart_store()
    back = until("the store is changed again", lambda: a.call("POST", "/v1/clients/acme/keys")[0] == 201)
    rows.append(["the store is back without data: a change is possible after", f"{1000 * back:.0f} ms"])
    refused = until("the revoked key is refused everywhere", lambda: b.status(x_api_key=revoked) == 401)
    rows.append(["the revoked key is refused by both from then on, after", f"{1000 * refused:.0f} ms"])
    rows.append(["then, at the other one", statuses(b)])
    return rows


if __name__ == "__main__":
    main()
