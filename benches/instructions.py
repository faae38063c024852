#!/usr/bin/env python3
"""Counts the instructions of a request and of a decision, and compares them with the committed counts.

    apt-get install -y nginx-light nghttp2-client valgrind
    cargo build --release -p transom -p transom-decisions
    python3 benches/instructions.py            # half a minute; fails if a count exceeds the committed one by more than 2 %
    python3 benches/instructions.py --write    # replaces the committed counts, in benches/instructions.json
    python3 benches/instructions.py --transom OTHER --decisions OTHER    # counts of other builds; never fails

The committed counts are those of the profile `release`. Counts depend on the compiler and on the C library's choice of
instructions for this processor. With another compiler than that of the committed counts, the program prints both and does not
compare.
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys

import callgrind
import comparison
import load_generators
import machine
from machine import BenchmarkError

COMMITTED = os.path.join(comparison.ROOT, "benches", "instructions.json")
TOLERANCE = 0.02
DECISIONS_PROGRAM = os.path.join(os.path.dirname(comparison.PLAIN), "decisions")
# Measurements of a refused request.
REPEATED = 3
DECISIONS = 10_000
DECISION_CASES = ["fixed", "fixed-many", "fixed-refused", "sliding", "sliding-refused"]
# No window ends between two runs, except at midnight.
REFUSING = (
    "[rules.refusing]\nkey = \"ip\"\nwindows = [\"2/366d\", \"1/day\"]\n"
    "[[routes]]\npath = \"/refused\"\nupstream = \"bench\"\nrules = [\"refusing\"]\n"
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transom", default=comparison.PLAIN, metavar="PATH", help="the gateway (default: target/release/transom)")
    parser.add_argument("--decisions", metavar="PATH", default=DECISIONS_PROGRAM,
                        help="the program of the decisions (default: target/release/decisions)")
    parser.add_argument("--requests", type=int, default=2_000, help="N, see callgrind.py (default 2,000)")
    parser.add_argument("--write", action="store_true", help="replace the committed counts")
    options = parser.parse_args()
    comparison.run(measure, options)


def measure(options, directory, report):
    comparison.require(options.transom, [load_generators.H2load, callgrind.Valgrind])
    counts = {}
    # Beside the requests, whose gateway uses one core.
    executor = concurrent.futures.ThreadPoolExecutor(max_workers=1)
    decisions = [(case, executor.submit(per_decision, options.decisions, case)) for case in DECISION_CASES]
    upstream, upstream_port = load_generators.start_upstream(directory, callgrind.CORE)
    with upstream:
        for protocol, http in (("HTTP/1.1", "--h1"), ("HTTP/2", "-m1")):
            for name, path, status in (("forwarded", "/api/hello", 2), ("refused", "/refused", 4)):
                # A refusal is so fast that the kernel sometimes runs the client before the gateway waits: the least count is
                # that without such interruptions.
                counts[f"request, {protocol}, {name}"] = callgrind.per_request(
                    options.transom, directory, upstream_port, [path], options.requests, REFUSING, http, status,
                    runs=1 if status == 2 else REPEATED,
                )
    for case, count in decisions:
        counts[f"decision, {case}"] = count.result()
    with open(COMMITTED) as file:
        committed = json.load(file)
    rows, worse = [], []
    for name, count in counts.items():
        before = committed["instructions"].get(name)
        change = count / before - 1 if before else 0
        rows.append([name, f"{count:,.0f}", f"{before:,.0f}" if before else "none", f"{change:+.2%}"])
        if not before or change > TOLERANCE:
            worse.append(name)
    report.table(["instructions of a", "count", "committed", "change"], rows)
    if options.write:
        with open(COMMITTED, "w") as file:
            counts = {name: round(count) for name, count in counts.items()}
            json.dump({"compiler": compiler(), "profile": "release", "instructions": counts}, file, indent=2)
            file.write("\n")
    elif options.transom != comparison.PLAIN:
        return
    elif committed["compiler"] != compiler():
        print(f"SKIPPED: the committed counts are those of {committed['compiler']}; this is {compiler()}", file=sys.stderr)
    elif worse:
        raise BenchmarkError(
            f"more than {TOLERANCE:.0%} above the committed count: {'; '.join(worse)}. Find the cause; if the work is worth it, "
            "write the new counts with `python3 benches/instructions.py --write`, and say why in the commit message"
        )


def compiler():
    return subprocess.run(["rustc", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def per_decision(program, case):
    def total(count):
        done = subprocess.run([*callgrind.COMMAND, program, case, str(count)], capture_output=True, text=True)
        if done.returncode != 0:
            raise BenchmarkError(f"{program} failed:\n{done.stdout}{done.stderr}")
        return callgrind.collected(done.stderr)

    return (total(2 * DECISIONS) - total(DECISIONS)) / DECISIONS


if __name__ == "__main__":
    main()
