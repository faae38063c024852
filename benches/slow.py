#!/usr/bin/env python3
"""Measures the effect of slow clients on another client: its latency beside two thousand of them, and alone.

    python3 benches/slow.py                        # about three minutes
    python3 benches/slow.py --mode body --connections 500 --seconds 10

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

import beside
import contenders
import idle
import load
import machine
from machine import Trouble

# Permitted increase of the 99th percentile, in milliseconds.
TARGET_MS = 100
# Interval of the measured client's requests on its persistent connection, and every how many it uses a new one.
PAUSE_S = 0.005
NEW_EVERY = 10
# At least a quarter of the slow connections must be open at once; otherwise there is no result.
MIN_SHARE = 4

Mode = collections.namedtuple("Mode", "what path arguments")
MODES = {
    "head": Mode("a head that never ends", load.PATH, ["-H", "-i", "5", "-x", "24"]),
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
    parser.add_argument("--transom", default=beside.OPTIMIZED, metavar="PATH")
    parser.add_argument("--connections", type=int, default=2000, help="slow ones (default 2000)")
    parser.add_argument("--seconds", type=int, default=20, help="of either measurement (default 20)")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: all")
    parser.add_argument("--results", metavar="FILE", help="write the figures as markdown")
    beside.run(measure, parser.parse_args())


def measure(options, directory, report):
    idle.allow_descriptors(options.connections * 2 + 1000)
    transom = contenders.Transom(options.transom)
    beside.require(options.transom, [transom, contenders.Nginx(), SlowHttpTest])
    report.facts(machine.description([(transom.name, transom.version())]))
    cores = os.sched_getaffinity(0)
    upstream, upstream_port = start_upstream(directory, cores)
    rows = []
    with upstream:
        for name in options.mode or MODES:
            server, port = transom.start(directory, upstream_port, contenders.FORWARDING, cores, more=ECHO)
            with server:
                alone = watch(port, options.seconds)
                with SlowHttpTest(MODES[name], port, options, os.path.join(directory, f"slow-{name}")) as slow:
                    beside_slow = watch(port, options.seconds, slow)
                most, memory_mib = slow.most, server.memory_mib()
            if most < options.connections / MIN_SHARE:
                raise Trouble(f"{name}: only {most} slow connections were open; output of slowhttptest:\n{slow.output()}")
            later = percentile(beside_slow.times_ms, 99) - percentile(alone.times_ms, 99)
            is_met = later < TARGET_MS and not beside_slow.failures
            rows.append([
                MODES[name].what, f"{most:,}", *figures(alone), *figures(beside_slow), f"{later:+.1f}",
                str(beside_slow.failures), f"{memory_mib:.0f}", f"< {TARGET_MS}, none failed: {beside.met(is_met)}",
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
        file.write(bytes(16 * beside.MIB))
    config = f"""
        http {{
            access_log off;
            sendfile on;
            keepalive_timeout 1h;
            server {{
                listen {machine.LOOPBACK}:{port} backlog=4096;
                root {prefix}/files;
                location = {load.PATH} {{ default_type application/json; return 200 '{load.BODY}'; }}
            }}
        }}
    """
    command = load.nginx_command(prefix, config, 16_384)
    return machine.Server("the upstream", command, port, os.path.join(prefix, "log"), cores), port


class SlowHttpTest:
    """A running slowhttptest."""

    name, package = "slowhttptest", "slowhttptest"

    def __init__(self, mode, port, options, log):
        count = str(options.connections)
        self.most, self._port, self._log = 0, port, log
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

    def look(self):
        """Returns the number of established connections of the gateway, from the kernel."""
        here = f"{self._port:04X}"
        with open("/proc/net/tcp") as table:
            # The fields: number, local address, remote address, state; 01 is ESTABLISHED.
            now = sum(1 for line in table if line.split()[1].endswith(f":{here}") and line.split()[3] == "01")
        self.most = max(self.most, now)

    def output(self):
        with open(self._log, errors="replace") as file:
            return re.sub(r"\x1b\[[0-9;]*m", "", file.read())[-2000:]


class Seen:
    """Latencies and failures of the measured client."""

    def __init__(self):
        self.times_ms, self.failures = [], 0


def watch(port, seconds, slow=None):
    seen, kept, number = Seen(), None, 0
    end, next_look = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        if slow and time.monotonic() > next_look:
            slow.look()
            next_look = time.monotonic() + 1
        number += 1
        if kept is None or number % NEW_EVERY == 0:
            kept = http.client.HTTPConnection(machine.LOOPBACK, port, timeout=10)
        start = time.monotonic()
        try:
            kept.request("GET", load.PATH)
            response = kept.getresponse()
            response.read()
            is_good = response.status == 200
        except (OSError, http.client.HTTPException):
            is_good, kept = False, None
        seen.times_ms.append((time.monotonic() - start) * 1000)
        seen.failures += not is_good
        time.sleep(PAUSE_S)
    return seen


def figures(seen):
    return [f"{percentile(seen.times_ms, share):.2f}" for share in (50, 99)]


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * share // 100)]


if __name__ == "__main__":
    main()
