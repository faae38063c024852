#!/usr/bin/env python3
"""What a request costs that comes over HTTP/2 and goes to an HTTP/1.1 upstream, beside nginx and Envoy.

    python3 benches/http2.py                       # about four minutes
    python3 benches/http2.py --rounds 3 --seconds 3 --scenario refusing
    python3 benches/http2.py --results table.md    # the same figures as markdown

As beside.py, whose turns, rounds and rules these are: one worker and core 0 for each gateway, load and
upstream on core 1, CPU time per request. h2load speaks HTTP/2 with prior knowledge, in the clear.
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
