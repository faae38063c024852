#!/usr/bin/env python3
"""Counts the instructions of a request and of a decision, and compares them with the committed counts.

    apt-get install -y nginx-light nghttp2-client valgrind
    cargo build --release -p transom -p transom-decisions
    python3 benches/instructions.py            # half a minute; fails if a count is above the committed one by more than noise
    python3 benches/instructions.py --profile dist   # likewise requests of the build that `make release` makes
    python3 benches/instructions.py --profile dev    # likewise of the build that `make test` tests
    python3 benches/instructions.py --write    # replaces the committed counts of the profile, in benches/instructions.json
    python3 benches/instructions.py --transom OTHER --decisions OTHER    # counts of other builds; fails at no count

Counts depend on the compiler and on the C library's choice of instructions for this processor. With another compiler than that
of the committed counts, the program prints both and does not compare.
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import callgrind
import comparison
import load_generators
import machine
from machine import BenchmarkError

COMMITTED = os.path.join(comparison.ROOT, "benches", "instructions.json")
DECISION_CASES = ["fixed", "fixed-many", "fixed-refused", "sliding", "sliding-refused"]
# No window ends between two runs, except at midnight.
REFUSING = (
    "[rules.refusing]\nkey = \"ip\"\nwindows = [\"2/366d\", \"1/day\"]\n"
    "[[routes]]\npath = \"/refused\"\nupstream = \"bench\"\nrules = [\"refusing\"]\n"
)


@dataclass(frozen=True)
class Profile:
    """How a build is measured. Code that is not optimized takes five to thirty times as many instructions."""

    folder: str
    requests: int
    # Measurements of each request.
    repeated: int
    # 0: decisions are not counted.
    decisions: int
    sliding_decisions: int
    # By how much a count of requests may exceed the committed one.
    requests_tolerance: float
    decisions_tolerance: float = 0.02

    def tolerance(self, name):
        return self.decisions_tolerance if name.startswith("decision") else self.requests_tolerance

    def program(self, name):
        return os.path.join(comparison.ROOT, "target", self.folder, name)


PROFILES = {
    "release": Profile("release", 2_000, 3, 10_000, 10_000, 0.03),
    # `make release` builds the gateway only. Each build has a profile of its own of how the gateway runs.
    "dist": Profile("dist", 2_000, 3, 0, 0, 0.03),
    # Beside the tests of `make test`, gateway and client are interrupted in other places in each run: counts of requests differ by
    # up to 3.4 %.
    "dev": Profile("debug", 200, 1, 10_000, 100, 0.07),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=PROFILES, default="release", help="the build (default: release)")
    parser.add_argument("--transom", metavar="PATH", help="another gateway than that of the profile")
    parser.add_argument("--decisions", metavar="PATH", help="another program of the decisions than that of the profile")
    parser.add_argument("--requests", type=int, help="N, see callgrind.py (default: 2,000; 200 of the profile `dev`)")
    parser.add_argument("--write", action="store_true", help="replace the committed counts")
    options = parser.parse_args()
    if options.write and (options.transom or options.decisions):
        parser.error("--write writes the counts of a profile, and not those of another program")
    comparison.run(measure, options)


def measure(options, directory, report):
    profile = PROFILES[options.profile]
    transom = options.transom or profile.program("transom")
    program = options.decisions or profile.program("decisions")
    comparison.require(transom, [load_generators.H2load, callgrind.Valgrind])
    counts = {}
    # Beside the requests, whose gateway uses one core.
    executor = concurrent.futures.ThreadPoolExecutor(max_workers=1)
    cases = DECISION_CASES if profile.decisions else []
    decisions = [(case, executor.submit(per_decision, program, case, profile)) for case in cases]
    upstream, upstream_port = load_generators.start_upstream(directory, callgrind.CORE)
    with upstream, callgrind.CountedGateway(transom, directory, upstream_port, REFUSING) as gateway:
        for protocol, http in (("HTTP/1.1", "--h1"), ("HTTP/2", "-m1")):
            for name, path, status in (("forwarded", "/api/hello", 2), ("refused", "/refused", 4)):
                # The kernel sometimes runs the client before the gateway waits: the least count is that without such
                # interruptions.
                counts[f"request, {protocol}, {name}"] = gateway.per_request(
                    [path], options.requests or profile.requests, http, status, runs=profile.repeated
                )
    for case, count in decisions:
        counts[f"decision, {case}"] = count.result()
    with open(COMMITTED) as file:
        profiles = json.load(file)
    committed = profiles[options.profile]
    rows, worse = [], []
    for name, count in counts.items():
        before = committed.get(name)
        change = count / before - 1 if before else 0
        rows.append([name, f"{count:,.0f}", f"{before:,.0f}" if before else "none", f"{change:+.2%}"])
        if not before or change > profile.tolerance(name):
            worse.append(name)
    report.table(["instructions of a", "count", "committed", "change"], rows)
    if options.write:
        with open(COMMITTED, "w") as file:
            profiles[options.profile] = {"compiler": compiler()} | {name: round(count) for name, count in counts.items()}
            json.dump(profiles, file, indent=2)
            file.write("\n")
    elif options.transom or options.decisions:
        return
    elif committed["compiler"] != compiler():
        print(f"SKIPPED: the committed counts are those of {committed['compiler']}; this is {compiler()}", file=sys.stderr)
    elif worse:
        raise BenchmarkError(
            f"above the committed counts by more than {profile.requests_tolerance:.0%} (requests) or {profile.decisions_tolerance:.0%} "
            f"(decisions): {'; '.join(worse)}. Find the cause; if the work is worth it, "
            f"write the new counts with `python3 benches/instructions.py --profile {options.profile} --write`, and say why in the commit message"
        )


def compiler():
    return subprocess.run(["rustc", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def per_decision(program, case, profile):
    decisions = profile.sliding_decisions if case.startswith("sliding") else profile.decisions

    def total(count):
        done = subprocess.run([*callgrind.COMMAND, program, case, str(count)], capture_output=True, text=True)
        if done.returncode != 0:
            raise BenchmarkError(f"{program} failed:\n{done.stdout}{done.stderr}")
        return callgrind.collected(done.stderr)

    return (total(2 * decisions) - total(decisions)) / decisions


if __name__ == "__main__":
    main()
