#!/usr/bin/env python3
"""Measures what counting the busiest keys adds to a forwarded request, in instructions.

    apt-get install -y nginx-light nghttp2-client valgrind
    make release
    python3 benches/top_keys.py                       # about ten minutes
    python3 benches/top_keys.py --results table.md    # also writes the figures as Markdown

A gateway with the default `top_keys` is compared with one that has `top_keys = 0`, in rounds. See `callgrind.py` for the
count.
"""

import argparse
import collections
import random
import statistics

import callgrind
import comparison
import gateways
import load_generators
import machine

KEYS = 10_000
TARGET = 0.01
# `paths`: the path of each request of a connection; the rule counts by path.
Load = collections.namedtuple("Load", "name paths")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transom", default=comparison.OPTIMIZED, metavar="PATH", help="the gateway (default: built by `make release`)")
    parser.add_argument("--requests", type=int, default=3_000, help="N (default 3,000)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each setting (default 3)")
    parser.add_argument("--results", metavar="FILE", help="also write the figures as Markdown")
    options = parser.parse_args()
    if options.requests < 1000 or options.rounds < 1:
        parser.error("`--requests` is at least 1000, `--rounds` at least 1")
    comparison.run(measure, options)


def loads():
    rng = random.Random(1)
    weights = [1 / rank for rank in range(1, KEYS + 1)]
    skewed = rng.choices(range(KEYS), weights, k=2 * KEYS)
    return [
        Load("one key", ["/api/hello"]),
        Load(f"{KEYS:,} keys, Zipf", [f"/api/{key}" for key in skewed]),
        Load(f"{KEYS:,} keys in turn", [f"/api/{key}" for key in range(KEYS)]),
    ]


def measure(options, directory, report):
    comparison.require(options.transom, [load_generators.H2load, callgrind.Valgrind])
    versions = [("transom", gateways.Transom(options.transom).version()), ("valgrind", callgrind.Valgrind.version())]
    report.facts(machine.description(versions))
    report.section(f"Busiest keys: instructions per forwarded request, N = {options.requests:,}")
    upstream, upstream_port = load_generators.start_upstream(directory, callgrind.CORE)
    rows = []
    with upstream:
        for load in loads():
            rounds = [
                [
                    instructions_per_request(options, directory, upstream_port, load, setting)
                    for setting in ("top_keys = 0", "")
                ]
                for _ in range(options.rounds)
            ]
            off, on = (statistics.median(each) for each in zip(*rounds))
            shares = sorted(on / off - 1 for off, on in rounds)
            middle = statistics.median(shares)
            rows.append([
                load.name, f"{off:,.0f}", f"{on:,.0f}", f"{shares[0]:+.2%}", f"{middle:+.2%}", f"{shares[-1]:+.2%}",
                f"< {TARGET:.0%}: {comparison.met(middle < TARGET)}",
            ])
    report.table(["requests", "top_keys = 0", "default", "increase, min", "median", "max", "target"], rows)


def instructions_per_request(options, directory, upstream_port, load, setting):
    rule = (
        f"[admin]\n{setting}\n[rules.per-path]\nkey = \"path\"\nwindows = [\"4000000000/hour\", \"70000000/minute\"]\n"
        "[[routes]]\npath = \"/api/{name}\"\nupstream = \"bench\"\nrules = [\"per-path\"]\n"
    )
    with callgrind.CountedGateway(options.transom, directory, upstream_port, rule) as gateway:
        return gateway.per_request(load.paths, options.requests)


if __name__ == "__main__":
    main()
