#!/usr/bin/env python3
"""Measures CPU time per request from HTTP/2 to HTTP/1.1, of Transom, nginx and Envoy.

    python3 benches/http2.py                       # about four minutes
    python3 benches/http2.py --rounds 3 --seconds 3 --scenario refusing
    python3 benches/http2.py --results table.md    # also writes the figures as Markdown

Turns, rounds and rules are those of beside.py: one worker and core 0 for each gateway, load and
upstream on core 1, CPU time per request. h2load uses HTTP/2 with prior knowledge, without TLS.
"""

import argparse

import beside
import contenders
import load


def main():
    beside.run(measure, arguments())


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside.common_arguments(parser)
    beside.plain_argument(parser)
    parser.add_argument("--scenario", choices=contenders.HTTP2_SCENARIOS, action="append", help="default: both")
    return beside.checked(parser)


def measure(options, directory, report):
    transom, plain = contenders.Transom(options.transom), contenders.PlainTransom(options.plain)
    gateways = [transom, plain, contenders.NginxHttp2(), contenders.Envoy()]
    generator = load.Http2(directory)
    beside.begin(options, report, gateways, generator)
    upstream, upstream_port = load.start_upstream(directory, options.load_core)
    with upstream:
        for name in options.scenario or contenders.HTTP2_SCENARIOS:
            scenario = contenders.HTTP2_SCENARIOS[name]
            beside.compare(options, directory, report, scenario, gateways, generator, upstream_port)


if __name__ == "__main__":
    main()
