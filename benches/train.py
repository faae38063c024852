#!/usr/bin/env python3
"""Puts an instrumented gateway under typical load, to produce a profile for the compiler.

    make release                                    # builds target/dist/transom with the profile
    python3 benches/train.py --transom PATH --requests 500

The instrumented gateway (`-Cprofile-generate`) writes its profile at exit. It
forwards and refuses, over HTTP/1.1 and HTTP/2, with and without TLS, short and long bodies in both directions, to
upstreams of both protocols; then again with counters in Redis and an access log. Unexpected responses
end the training: a profile of failures would be worse than none.
"""

import argparse
import os
import re
from collections import namedtuple

import beside
import contenders
import idle
import load
import machine
import shared
from machine import Trouble

PER_MINUTE = 33
# A minute may end during the load.
NOT_REFUSED = 2 * PER_MINUTE
REFUSED = 429
LONG = 200_000
# Fewer requests, because their bodies are long.
FEWER = 20
TIME_LIMIT_S = 300
# Nothing is measured, so all processes may use all cores.
CORES = os.sched_getaffinity(0)

# `status` is the first digit of the status of all responses, except for the first ones that are not refused yet.
Load = namedtuple("Load", "path options status fewer", defaults=[(), 2, 1])

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
    Load("/api/upload", (*HTTP1, "-d{body}"), fewer=FEWER),
    Load("/api/upload", (*HTTP2, "-d{body}"), fewer=FEWER),
    Load("/api/long", HTTP1, fewer=FEWER),
    Load("/api/long", HTTP2, fewer=FEWER),
    Load("/http2/upload", (*HTTP2, "-d{body}"), fewer=FEWER),
    Load("/http2/long", HTTP2, fewer=FEWER),
]

MORE = """
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

[rules.per-key]
key = ["header:x-key", "method"]
on_missing_key = "skip"
windows = ["4000000000/hour", "70000000/minute"]

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

SHARED = """
[access_log]
file = "{directory}/access.log"

[counters.shared]
redis = "redis://{LOOPBACK}:{redis_port}"
"""


def main():
    beside.run(train, arguments())


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transom", required=True, metavar="PATH")
    parser.add_argument("--requests", type=int, default=20_000, help="of a kind; fewer with long bodies (default 20,000)")
    options = parser.parse_args()
    if options.requests <= NOT_REFUSED:
        parser.error(f"`--requests` is more than {NOT_REFUSED}: so many are not refused")
    return options


def train(options, directory, _report):
    redis = shared.Redis()
    beside.require(options.transom, [load.H2load, contenders.Nginx, redis, idle.Openssl])
    body = os.path.join(directory, "body")
    with open(body, "wb") as file:
        file.write(b"x" * LONG)
    upstream, upstream_port, http2_port = start_upstream(directory)
    store, redis_port = redis.start(directory, max(CORES))
    certificate, key = idle.make_certificate(directory)
    with upstream, store:
        for more in (MORE, MORE + SHARED):
            https_port = machine.free_port()
            more = more.format(
                LOOPBACK=machine.LOOPBACK, PER_MINUTE=PER_MINUTE, https_port=https_port, http2_port=http2_port,
                redis_port=redis_port, directory=directory, certificate=certificate, key=key,
            )
            gateway = contenders.Transom(options.transom)
            server, port = gateway.start(directory, upstream_port, contenders.FORWARDING, CORES, more=more)
            with server:
                for origin in (f"http://{machine.LOOPBACK}:{port}", f"https://{machine.LOOPBACK}:{https_port}"):
                    for one in LOADS:
                        put(one, origin, max(CLIENTS, options.requests // one.fewer), body)
                if load.probe(port, "/refused/items") != REFUSED:
                    raise Trouble("a request that should be refused got another response")
                server.end(TIME_LIMIT_S)


def start_upstream(directory):
    """Starts an nginx for both protocols, with a short response, a long one, and one after the request's body."""
    port, http2_port = machine.free_port(), machine.free_port()
    prefix = os.path.join(directory, "upstream")
    server = f"""
        default_type application/json;
        location / {{ return 200 '{load.BODY}'; }}
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
    command = load.nginx_command(prefix, config)
    return machine.Server("the upstream", command, port, log, CORES), port, http2_port


def put(one, origin, requests, body):
    """Applies one load; fails on unexpected responses."""
    urls = [origin + path for path in one.path.split()]
    command = ["h2load", "-t1", f"-n{requests}", *(option.format(body=body) for option in one.options), *urls]
    output = machine.run_on(CORES, command, TIME_LIMIT_S)
    found = re.search(r"status codes: (\d+) 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx", output)
    spared = NOT_REFUSED if one.status == 4 else 0
    # The groups are 2xx, 3xx, 4xx, 5xx.
    if not found or int(found[one.status - 1]) < requests - spared:
        raise Trouble(f"{' '.join(command)}\ngot unexpected responses:\n{output}")


if __name__ == "__main__":
    main()
