#!/usr/bin/env python3
"""Measures how the cost of a request grows with workers, routes, keys, connections and layers.

    python3 benches/scale.py                       # about fifteen minutes
    python3 benches/scale.py --rounds 1 --seconds 1 --pair layers
    python3 benches/scale.py --results table.md    # also writes the figures as Markdown

Turns and ratios are those of comparison.py; the same gateway serves one scenario and then the other. Two workers run on two
cores, one of which they share with the load, so their throughput says nothing: compared are the CPU time of a request and,
counted by callgrind, its instructions.
"""

import argparse
import statistics
import sys

import callgrind
import comparison
import gateways
import load_generators
import machine

# What grows; two scenarios, each with the number of workers; whether instructions are counted. Callgrind needs requests without
# keys, and has no caches, which a million keys and 9,000 connections miss.
PAIRS = {
    "workers": ("1, 2", (gateways.FORWARDING, 1), (gateways.FORWARDING, 2), True),
    "routes": ("10, 10,000, all asked for", (gateways.ROUTES_10, 1), (gateways.ROUTES_10000, 1), True),
    "layers": ("1, 6", (gateways.LAYERS_1, 1), (gateways.LAYERS_6, 1), True),
    "keys": ("1, 1,000,000", (gateways.KEYS_1, 1), (gateways.KEYS_1M, 1), False),
    "connections": ("64, 9,000", (gateways.FORWARDING, 1), (gateways.FORWARDING_9000, 1), False),
}
# Enough that the kernel gives some to each worker.
COUNTED_CONNECTIONS = 8


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    comparison.common_arguments(parser)
    parser.add_argument("--pair", choices=PAIRS, action="append", help="default: all")
    parser.add_argument("--requests", type=int, default=2_000, help="requests that are counted, see callgrind.py (default 2,000)")
    comparison.run(measure, comparison.checked(parser))


def measure(options, directory, report):
    transom, wrk = gateways.Transom(options.transom), load_generators.Wrk(directory)
    comparison.begin(options, report, [transom, load_generators.H2load, callgrind.Valgrind], wrk)
    machine.allow_descriptors(2 * gateways.FORWARDING_9000.connections + comparison.EXTRA_DESCRIPTORS)
    upstream, upstream_port = load_generators.start_upstream(directory, options.load_core)
    rows = []

    def cores(workers):
        return {options.server_core, options.load_core} if workers == 2 else {options.server_core}

    def cpu_us(scenario, workers):
        server, port = transom.start(directory, upstream_port, scenario, cores(workers))
        with server:
            return comparison.take_turn(server, port, scenario, wrk, options).cpu_us

    def instructions(scenario, workers):
        path = scenario.path or load_generators.PATH
        paths = [path.replace("*", str(number)) for number in range(scenario.count)]
        with callgrind.CountedGateway(
            options.transom, directory, upstream_port, scenario=scenario, cores=cores(workers)
        ) as gateway:
            return gateway.per_request(paths, options.requests, connections=COUNTED_CONNECTIONS)

    with upstream:
        for name in options.pair or PAIRS:
            numbers, *pair, is_counted = PAIRS[name]
            figures = {"CPU time, µs": cpu_us} | ({"instructions": instructions} if is_counted else {})
            for figure, measured in figures.items():
                rounds = []
                for number in range(options.rounds):
                    # The other order in every second round.
                    turns = {which: measured(*pair[which]) for which in ((0, 1) if number % 2 == 0 else (1, 0))}
                    rounds.append((turns[0], turns[1]))
                    print(f"  {name}, round {number + 1}: {turns[1] / turns[0]:.2f}", file=sys.stderr, flush=True)
                few, many = (statistics.median(each) for each in zip(*rounds))
                ratios = sorted(many / few for few, many in rounds)
                middle = statistics.median(ratios)
                rows.append([
                    name, numbers, figure, f"{few:,.1f}", f"{many:,.1f}", f"{ratios[0]:.2f}", f"{middle:.2f}", f"{ratios[-1]:.2f}"
                ])
    report.table(["what grows", "from, to", "of a request", "few", "many", "ratio, min", "median", "max"], rows)


if __name__ == "__main__":
    main()
