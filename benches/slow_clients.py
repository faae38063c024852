#!/usr/bin/env python3
"""Measures the effect of slow clients on another client: its latency beside two thousand of them, and alone.

    python3 benches/slow_clients.py                        # about three minutes
    python3 benches/slow_clients.py --mode body --connections 500 --seconds 10

slowhttptest keeps connections busy in its modes: a head that never ends, a body in
small pieces, a response that is hardly read. The gateway runs with its default limits. Needs as many
descriptors as connections: `ulimit -Hn`.
"""

import argparse
import collections
import http.client
import os
import re
import subprocess
import time

import comparison
import gateways
import load_generators
import machine
from machine import BenchmarkError

# Permitted increase of the 99th percentile, in milliseconds.
TARGET_MS = 100
# Pause between the measured client's requests. It opens a new connection for every tenth.
PAUSE_S = 0.005
NEW_EVERY = 10
# At least a quarter of the slow connections must be open at once; otherwise there is no result.
MIN_OPEN_FRACTION = 1 / 4

Mode = collections.namedtuple("Mode", "what path arguments")
MODES = {
    "head": Mode("a head that never ends", load_generators.PATH, ["-H", "-i", "5", "-x", "24"]),
    "body": Mode("a body in small pieces", "/upload", ["-B", "-i", "5", "-x", "8", "-s", "1000000"]),
    "read": Mode("a response that is hardly read", "/api/large", ["-X", "-n", "1", "-z", "8", "-w", "64", "-y", "512"]),
}
# Slow bodies go to an upstream that reads them to their end.
ECHO = """
[upstreams.echo]
builtin = "echo"

[[routes]]
path = "/upload"
upstream = "echo"
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transom", default=comparison.OPTIMIZED, metavar="PATH")
    parser.add_argument("--connections", type=int, default=2000, help="slow ones (default 2000)")
    parser.add_argument("--seconds", type=int, default=20, help="of either measurement (default 20)")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: all")
    parser.add_argument("--results", metavar="FILE", help="write the figures as markdown")
    comparison.run(measure, parser.parse_args())


def measure(options, directory, report):
    machine.allow_descriptors(options.connections * 2 + 1000)
    transom = gateways.Transom(options.transom)
    comparison.require(options.transom, [transom, gateways.Nginx(), SlowHttpTest])
    report.facts(machine.description([(transom.name, transom.version())]))
    cores = os.sched_getaffinity(0)
    upstream, upstream_port = start_upstream(directory, cores)
    rows = []
    with upstream:
        for name in options.mode or MODES:
            server, port = transom.start(directory, upstream_port, gateways.FORWARDING, cores, more=ECHO)
            with server:
                alone = measure_client(port, options.seconds)
                with SlowHttpTest(MODES[name], port, options, os.path.join(directory, f"slow-{name}")) as slow:
                    beside_slow = measure_client(port, options.seconds, slow)
                max_open, memory_mib = slow.max_open, server.memory_mib()
            if max_open < options.connections * MIN_OPEN_FRACTION:
                raise BenchmarkError(f"{name}: only {max_open} slow connections were open; output of slowhttptest:\n{slow.output()}")
            p99_increase = percentile(beside_slow.times_ms, 99) - percentile(alone.times_ms, 99)
            is_met = p99_increase < TARGET_MS and not beside_slow.failures
            rows.append([
                MODES[name].what, f"{max_open:,}", *figures(alone), *figures(beside_slow), f"{p99_increase:+.1f}",
                str(beside_slow.failures), f"{memory_mib:.0f}", f"< {TARGET_MS}, none failed: {comparison.met(is_met)}",
            ])
    report.section(f"A client beside {options.connections:,} slow ones: latency in ms")
    report.table(
        ["mode", "slow at once", "p50 alone, ms", "p99", "p50 beside slow clients", "p99", "p99 increase", "failed", "MiB", "target"],
        rows,
    )


def start_upstream(directory, cores):
    """Starts an nginx with a small and a large response."""
    port = machine.free_port()
    prefix = os.path.join(directory, "upstream")
    os.makedirs(os.path.join(prefix, "files", "api"))
    with open(os.path.join(prefix, "files", "api", "large"), "wb") as file:
        file.write(bytes(16 * comparison.MIB))
    config = f"""
        http {{
            access_log off;
            sendfile on;
            keepalive_timeout 1h;
            server {{
                listen {machine.LOOPBACK}:{port} backlog=4096;
                root {prefix}/files;
                location = {load_generators.PATH} {{ default_type application/json; return 200 '{load_generators.BODY}'; }}
            }}
        }}
    """
    command = load_generators.nginx_command(prefix, config, 16_384)
    return machine.Server("the upstream", command, port, os.path.join(prefix, "log"), cores), port


class SlowHttpTest:
    """A running slowhttptest."""

    name, package = "slowhttptest", "slowhttptest"

    def __init__(self, mode, port, options, log):
        count = str(options.connections)
        self.max_open, self._port, self._log = 0, port, log
        command = ["slowhttptest", *mode.arguments, "-c", count, "-r", count, "-l", str(options.seconds + 60)]
        with open(log, "wb") as out:
            self._process = subprocess.Popen(
                [*command, "-p", "30", "-u", f"http://{machine.LOOPBACK}:{port}{mode.path}"],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()

    def record_open_connections(self):
        """Updates `max_open` with the number of established connections of the gateway, from the kernel."""
        here = f"{self._port:04X}"
        with open("/proc/net/tcp") as table:
            # The fields: number, local address, remote address, state; 01 is ESTABLISHED.
            now = sum(1 for line in table if line.split()[1].endswith(f":{here}") and line.split()[3] == "01")
        self.max_open = max(self.max_open, now)

    def output(self):
        with open(self._log, errors="replace") as file:
            return re.sub(r"\x1b\[[0-9;]*m", "", file.read())[-2000:]


class ClientResult:
    """Latencies and failures of the measured client."""

    def __init__(self):
        self.times_ms, self.failures = [], 0


def measure_client(port, seconds, slow=None):
    """Sends requests one after the other for `seconds`, and counts the connections of `slow` every second."""
    result, connection, number = ClientResult(), None, 0
    end, next_record = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        if slow and time.monotonic() > next_record:
            slow.record_open_connections()
            next_record = time.monotonic() + 1
        number += 1
        if connection is None or number % NEW_EVERY == 0:
            connection = http.client.HTTPConnection(machine.LOOPBACK, port, timeout=10)
        start = time.monotonic()
        try:
            connection.request("GET", load_generators.PATH)
            response = connection.getresponse()
            response.read()
            is_good = response.status == 200
        except (OSError, http.client.HTTPException):
            is_good, connection = False, None
        result.times_ms.append((time.monotonic() - start) * 1000)
        result.failures += not is_good
        time.sleep(PAUSE_S)
    return result


def figures(result):
    return [f"{percentile(result.times_ms, share):.2f}" for share in (50, 99)]


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)]


if __name__ == "__main__":
    main()
