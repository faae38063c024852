#!/usr/bin/env python3
"""Measures CPU time per request from HTTP/2 to HTTP/1.1, of Transom, nginx and Envoy.

    python3 benches/http2.py                       # about four minutes
    python3 benches/http2.py --rounds 3 --seconds 3 --scenario refusing
    python3 benches/http2.py --results table.md    # also writes the figures as Markdown

Turns, rounds and rules are those of http1.py: one worker and core 0 for each gateway, load and
upstream on core 1, CPU time per request. h2load uses HTTP/2 with prior knowledge, without TLS.
"""

import argparse

import gateways
import http1
import load_generators


def main():
    http1.run(measure, arguments())


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    http1.common_arguments(parser)
    http1.plain_argument(parser)
    parser.add_argument("--scenario", choices=gateways.HTTP2_SCENARIOS, action="append", help="default: both")
    return http1.checked(parser)


def measure(options, directory, report):
    transom, plain = gateways.Transom(options.transom), gateways.UnprofiledTransom(options.plain)
    compared = [transom, plain, gateways.NginxHttp2(), gateways.Envoy()]
    generator = load_generators.Http2(directory)
    http1.begin(options, report, compared, generator)
    upstream, upstream_port = load_generators.start_upstream(directory, options.load_core)
    with upstream:
        for name in options.scenario or gateways.HTTP2_SCENARIOS:
            scenario = gateways.HTTP2_SCENARIOS[name]
            http1.compare(options, directory, report, scenario, compared, generator, upstream_port)


if __name__ == "__main__":
    main()
