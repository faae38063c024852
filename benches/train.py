#!/usr/bin/env python3
"""Puts an instrumented gateway under typical load, to produce a profile for the compiler.

    make release                                    # builds target/dist/transom with the profile
    python3 benches/train.py --transom PATH --requests 500

The instrumented gateway (`-Cprofile-generate`) writes its profile at exit. It
forwards and refuses, over HTTP/1.1 and HTTP/2, with and without TLS, short and long bodies in both directions, to
upstreams of both protocols, and answers as Envoy's rate limit service; then again with counters in Redis and an access
log. Unexpected responses end the training: a profile of failures would be worse than none.
"""

import argparse
import os
import re
from collections import namedtuple

import comparison
import gateways
import lease_calls
import load_generators
import machine
from machine import BenchmarkError

PER_MINUTE = 33
# A minute may end during the load.
MAX_NOT_REFUSED = 2 * PER_MINUTE
REFUSED = 429
LONG = 200_000
# Divisor of the number of requests with long bodies.
LONG_BODY_DIVISOR = 20
TIME_LIMIT_S = 300
# Nothing is measured, so all processes may use all cores.
CORES = os.sched_getaffinity(0)

# `status` is the first digit of the status of all responses, except for the first ones that are not refused yet.
Load = namedtuple("Load", "path options status divisor", defaults=[(), 2, 1])

CLIENTS = 64
HTTP1, HTTP2 = ("--h1", f"-c{CLIENTS}"), ("-c8", "-m32")
LOADS = [
    Load("/api/items", HTTP1),
    Load("/api/items?page=1", HTTP2),
    Load("/refused/items", HTTP1, status=4),
    Load("/refused/items", HTTP2, status=4),
    # Each request differs from the one before.
    Load("/refused/items?page=1 /refused/items?page=2 /refused/items?page=3", HTTP1, status=4),
    Load("/keys/items", (*HTTP1, "-Hauthorization: Bearer 5f3a", "-Hx-key: one")),
    Load("/http2/items", HTTP1),
    Load("/http2/items", HTTP2),
    Load("/api/upload", (*HTTP1, "-d{body}"), divisor=LONG_BODY_DIVISOR),
    Load("/api/upload", (*HTTP2, "-d{body}"), divisor=LONG_BODY_DIVISOR),
    Load("/api/long", HTTP1, divisor=LONG_BODY_DIVISOR),
    Load("/api/long", HTTP2, divisor=LONG_BODY_DIVISOR),
    Load("/http2/upload", (*HTTP2, "-d{body}"), divisor=LONG_BODY_DIVISOR),
    Load("/http2/long", HTTP2, divisor=LONG_BODY_DIVISOR),
]

CALL_PATH = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
CALL_FIELDS = ("-Hcontent-type: application/grpc", "-Hte: trailers")
# Calls of the rate limit service: admitted, and over the limit.
CALLS = [
    [("key", "one"), ("method", "GET")],
    [("remote_address", "192.0.2.1")],
]

EXTRA_CONFIG = """
[listen.https]
address = "{LOOPBACK}:{https_port}"
certificate = "{certificate}"
private_key = "{key}"

[upstreams.http2]
servers = ["http://{LOOPBACK}:{http2_port}"]
protocol = "http2"

[rules.tight]
key = "ip"
windows = ["{PER_MINUTE}/minute"]
descriptor = {{ domain = "bench", entries = ["remote_address"] }}

[rules.per-key]
key = ["header:x-key", "method"]
on_missing_key = "skip"
windows = ["4000000000/hour", "70000000/minute"]
descriptor = {{ domain = "bench", entries = ["key", "method"] }}

[[routes]]
path = "/refused/{{*rest}}"
upstream = "bench"
rules = ["tight"]

[[routes]]
path = "/keys/{{*rest}}"
upstream = "bench"
rules = ["per-key", "per-client"]

[[routes]]
path = "/http2/{{*rest}}"
upstream = "http2"
rules = ["per-client"]
"""

SHARED_CONFIG = """
[access_log]
file = "{directory}/access.log"

[counters.shared]
redis = "redis://{LOOPBACK}:{redis_port}"
"""


def main():
    comparison.run(train, arguments())


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transom", required=True, metavar="PATH")
    parser.add_argument("--requests", type=int, default=20_000, help="requests per load; a twentieth with long bodies (default 20,000)")
    options = parser.parse_args()
    if options.requests <= MAX_NOT_REFUSED:
        parser.error(f"`--requests` must exceed {MAX_NOT_REFUSED}: that many requests are not refused")
    return options


def train(options, directory, _report):
    redis = lease_calls.Redis()
    comparison.require(options.transom, [load_generators.H2load, gateways.Nginx, redis, gateways.Openssl])
    body = os.path.join(directory, "body")
    with open(body, "wb") as file:
        file.write(b"x" * LONG)
    upstream, upstream_port, http2_port = start_upstream(directory)
    store, redis_port = redis.start(directory, max(CORES))
    certificate, key = gateways.make_certificate(directory)
    with upstream, store:
        for more in (EXTRA_CONFIG, EXTRA_CONFIG + SHARED_CONFIG):
            https_port, service_port = machine.free_port(), machine.free_port()
            more = more.format(
                LOOPBACK=machine.LOOPBACK, PER_MINUTE=PER_MINUTE, https_port=https_port, http2_port=http2_port,
                redis_port=redis_port, directory=directory, certificate=certificate, key=key,
            )
            gateway = gateways.Transom(options.transom)
            listen = f'ratelimit_service = "{machine.LOOPBACK}:{service_port}"'
            server, port = gateway.start(directory, upstream_port, gateways.FORWARDING, CORES, listen=listen, more=more)
            with server:
                for origin in (f"http://{machine.LOOPBACK}:{port}", f"https://{machine.LOOPBACK}:{https_port}"):
                    for load_case in LOADS:
                        apply_load(load_case, origin, max(CLIENTS, options.requests // load_case.divisor), body)
                for entries in CALLS:
                    call = os.path.join(directory, "call")
                    with open(call, "wb") as file:
                        file.write(rate_limit_call(entries))
                    service = f"http://{machine.LOOPBACK}:{service_port}"
                    apply_load(Load(CALL_PATH, (*HTTP2, *CALL_FIELDS, f"-d{call}")), service, options.requests, body)
                # A minute may have begun since the load.
                probes = (load_generators.probe(port, "/refused/items") for _ in range(MAX_NOT_REFUSED + 1))
                if REFUSED not in probes:
                    raise BenchmarkError("requests that should be refused got other responses")
                server.end(TIME_LIMIT_S)


def start_upstream(directory):
    """Starts an nginx for both protocols, with a short response, a long one, and one after the request's body."""
    port, http2_port = machine.free_port(), machine.free_port()
    prefix = os.path.join(directory, "upstream")
    server = f"""
        default_type application/json;
        location / {{ return 200 '{load_generators.BODY}'; }}
        location ~ /long$ {{ root {directory}; try_files /body =404; }}
        location ~ /upload$ {{ client_body_buffer_size 1m; rewrite .* / break; proxy_pass http://{machine.LOOPBACK}:{port}; }}
    """
    config = f"""
        http {{
            access_log off;
            keepalive_requests 1000000000;
            keepalive_timeout 1h;
            server {{ listen {machine.LOOPBACK}:{port} backlog=1024; {server} }}
            server {{ listen {machine.LOOPBACK}:{http2_port} http2 backlog=1024; {server} }}
        }}
    """
    log = os.path.join(directory, "upstream.log")
    command = load_generators.nginx_command(prefix, config)
    return machine.Server("the upstream", command, port, log, CORES), port, http2_port


def rate_limit_call(entries):
    """A message of gRPC, with its prefix: a request with one descriptor of these entries."""
    field = lambda number, value: bytes([number << 3 | 2, len(value)]) + value
    entries = (field(1, key.encode()) + field(2, value.encode()) for key, value in entries)
    message = field(1, b"bench") + field(2, b"".join(field(1, entry) for entry in entries))
    return b"\0" + len(message).to_bytes(4, "big") + message


def apply_load(load_case, origin, requests, body):
    """Applies one load; fails on unexpected responses."""
    urls = [origin + path for path in load_case.path.split()]
    command = ["h2load", "-t1", f"-n{requests}", *(option.format(body=body) for option in load_case.options), *urls]
    output = machine.run_on(CORES, command, TIME_LIMIT_S)
    found = re.search(r"status codes: (\d+) 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx", output)
    not_refused = MAX_NOT_REFUSED if load_case.status == 4 else 0
    # The groups are 2xx, 3xx, 4xx, 5xx.
    if not found or int(found[load_case.status - 1]) < requests - not_refused:
        raise BenchmarkError(f"{' '.join(command)}\ngot unexpected responses:\n{output}")


if __name__ == "__main__":
    main()
