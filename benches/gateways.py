"""The compared gateways: one small class each, which configures and starts the program.

All do the same work: proxy to HTTP/1.1 with persistent connections on both sides, limits per client
address counted in shared memory, no access log, one worker. Where the programs differ, the configuration
favours the other side: nginx and HAProxy count one window where Transom counts
two, and neither reports the state of the limit to the client or keeps metrics, which Transom does.
"""

import collections
import glob
import os

import load_generators
import machine

# `limits`: whether the limit is so low that every request, but for the first few, is refused.
# `varied`: whether a connection sends different requests in turn. Without `connections` and `path`, those of the generator.
Scenario = collections.namedtuple(
    "Scenario", "name limits status targets varied connections path", defaults=[False, None, None]
)

FORWARDING = Scenario("forwarding", limits=False, status=200, targets={"nginx": 1.0, "haproxy": 0.92})
FORWARDING_1000 = FORWARDING._replace(
    name="forwarding-1000", connections=1_000, targets={"nginx": 0.95, "haproxy": 1.0}
)
# With those to the upstream, just within 20,000 descriptors.
FORWARDING_9000 = FORWARDING._replace(name="forwarding-9000", connections=9_000, targets={"nginx": 0.95})
LARGE_BODIES = FORWARDING._replace(
    name="large-bodies", path=load_generators.LARGE_PATH, targets={"nginx": 0.38, "haproxy": 0.92}
)
REFUSING = Scenario("refusing", limits=True, status=429, targets={"nginx": 0.85})
REFUSING_VARIED = REFUSING._replace(name="refusing-varied", varied=True, targets={"nginx": 0.90})
ALL = (FORWARDING, FORWARDING_1000, FORWARDING_9000, LARGE_BODIES, REFUSING, REFUSING_VARIED)
SCENARIOS = {scenario.name: scenario for scenario in ALL}
HTTP2_FORWARDING = Scenario("forwarding", limits=False, status=200, targets={"nginx": 0.95, "envoy": 0.40})
HTTP2_REFUSING = Scenario("refusing", limits=True, status=429, targets={"nginx": 0.45})
HTTP2_SCENARIOS = {scenario.name: scenario for scenario in (HTTP2_FORWARDING, HTTP2_REFUSING)}


class Nginx:
    """proxy_pass with persistent upstream connections; limit_req with a zone keyed by the client's address."""

    name, package = "nginx", "nginx-light"
    # Refusals are logged below the level of the error log; otherwise nginx alone would write a line per refusal.
    log_of_refusals = "limit_req_log_level info;"
    listen_options, upstream_connections = "", load_generators.CONNECTIONS
    connections = load_generators.MANY

    def start(self, directory, upstream_port, scenario, cores):
        port = machine.free_port()
        prefix = os.path.join(directory, f"nginx-{port}")
        # The tiny rate allows one request a minute; the large one more than any core can serve.
        rate, burst = ("1r/m", "") if scenario.limits else ("1000000r/s", "burst=1000000")
        config = f"""
            http {{
                access_log off;
                keepalive_requests 1000000000;
                keepalive_timeout 1h;
                limit_req_zone $binary_remote_addr zone=per_client:10m rate={rate};
                {self.log_of_refusals.format(prefix=prefix)}
                limit_req_status 429;
                upstream bench {{
                    server {machine.LOOPBACK}:{upstream_port};
                    keepalive {max(self.upstream_connections, scenario.connections or 0)};
                    keepalive_requests 1000000000;
                    keepalive_timeout 1h;
                }}
                server {{
                    listen {machine.LOOPBACK}:{port} {self.listen_options} backlog=1024;
                    location /api/ {{
                        limit_req zone=per_client {burst} nodelay;
                        proxy_pass http://bench;
                        proxy_http_version 1.1;
                        proxy_set_header Connection "";
                        proxy_set_header Host $host;
                        proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
                        proxy_set_header X-Forwarded-Proto $scheme;
                    }}
                }}
            }}
        """
        if scenario.limits:
            # Without a burst there is nothing to delay, and `nodelay` is not accepted.
            config = config.replace("per_client  nodelay;", "per_client;")
        command = load_generators.nginx_command(prefix, config, self.connections)
        return machine.Server(self.name, command, port, os.path.join(prefix, "log"), cores), port

    def version(self):
        return machine.version_of(["nginx", "-v"], r"nginx/(\S+)")


class NginxLogging(Nginx):
    """nginx with its default: a line in the error log for every refusal."""

    name = "nginx, logging"
    log_of_refusals = "error_log {prefix}/refusals error;"


class NginxHttp2(Nginx):
    """HTTP/2 with prior knowledge; as many persistent upstream connections as streams."""

    listen_options, upstream_connections = "http2", load_generators.Http2.CONNECTIONS * load_generators.Http2.STREAMS


class Envoy:
    """HTTP/2 with prior knowledge. No limit when forwarding; one bucket for all clients when refusing."""

    # A Python package from PyPI.
    name, package = "envoy", None
    INSTALL_DIR = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests/.parts/envoy")

    def __init__(self):
        found = glob.glob(os.path.join(self.INSTALL_DIR, "lib/python*/site-packages/envoy/_bin/envoy"))
        if not found:
            raise machine.BenchmarkError("Envoy is missing; install it with:\n    make tests/.parts/envoy/installed")
        self._binary = found[0]

    def start(self, directory, upstream_port, scenario, cores):
        port = machine.free_port()
        prefix = os.path.join(directory, f"envoy-{port}")
        os.makedirs(prefix)
        path = os.path.join(prefix, "envoy.yaml")
        with open(path, "w") as file:
            file.write(self._config(port, upstream_port, scenario))
        command = [self._binary, "--config-path", path, "--concurrency", "1", "--disable-hot-restart", "-l", "error"]
        return machine.Server(self.name, command, port, os.path.join(prefix, "log"), cores), port

    @staticmethod
    def _config(port, upstream_port, scenario):
        limit = """
          - name: envoy.filters.http.local_ratelimit
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit
              stat_prefix: limit
              token_bucket: { max_tokens: 1, tokens_per_fill: 1, fill_interval: 60s }
              filter_enabled: { default_value: { numerator: 100, denominator: HUNDRED } }
              filter_enforced: { default_value: { numerator: 100, denominator: HUNDRED } }"""
        return f"""
static_resources:
  listeners:
  - address: {{ socket_address: {{ address: {machine.LOOPBACK}, port_value: {port} }} }}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: front
          codec_type: HTTP2
          use_remote_address: true
          generate_request_id: false
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {{ prefix: /api/ }}
                route: {{ cluster: bench }}
          http_filters:{limit if scenario.limits else ""}
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
              suppress_envoy_headers: true
  clusters:
  - name: bench
    type: STATIC
    load_assignment:
      cluster_name: bench
      endpoints:
      - lb_endpoints:
        - endpoint: {{ address: {{ socket_address: {{ address: {machine.LOOPBACK}, port_value: {upstream_port} }} }} }}
"""

    def version(self):
        return machine.version_of([self._binary, "--version"], r"version: [0-9a-f]+/([0-9.]+)/")


class Haproxy:
    """A stick table of request rates per source address; idle upstream connections are reused."""

    name, package = "haproxy", "haproxy"

    def start(self, directory, upstream_port, scenario, cores):
        port = machine.free_port()
        prefix = os.path.join(directory, f"haproxy-{port}")
        os.makedirs(prefix)
        path = os.path.join(prefix, "haproxy.cfg")
        # Denied requests count as well, so the rate stays above the small limit.
        limit = 33 if scenario.limits else 4_000_000_000
        # HAProxy closes idle connections to servers when it has more than a quarter of the descriptors that this number allows.
        # The largest number needs nearly all of 20,000 descriptors, and is too small for 9,000 connections.
        maxconn = min(4 * (scenario.connections or load_generators.CONNECTIONS) + 1_000, 9_500)
        with open(path, "w") as file:
            file.write(
                f"""
global
    nbthread 1
    maxconn {maxconn}
defaults
    mode http
    timeout connect 5s
    timeout client 1h
    timeout server 1h
    timeout http-keep-alive 1h
    http-reuse always
    option forwardfor
frontend front
    bind {machine.LOOPBACK}:{port} backlog 1024
    stick-table type ip size 1m expire 1h store http_req_rate(60s)
    http-request track-sc0 src
    http-request deny deny_status 429 if {{ sc_http_req_rate(0) gt {limit} }}
    http-request set-header X-Forwarded-Proto http
    default_backend bench
backend bench
    server upstream {machine.LOOPBACK}:{upstream_port}
"""
            )
        command = ["haproxy", "-db", "-q", "-f", path]
        return machine.Server(self.name, command, port, os.path.join(prefix, "log"), cores), port

    def version(self):
        return machine.version_of(["haproxy", "-v"], r"version (\S+)")


class Transom:
    """Two layers per client address, RateLimit fields and metrics on, as in the shipped configuration."""

    name, package = "transom", None

    def __init__(self, binary, wrapper=()):
        """`wrapper` is a command that runs the gateway, such as valgrind."""
        self._binary, self._wrapper = binary, wrapper
        # The admin address of the latest start.
        self.admin_port = None

    @staticmethod
    def windows(scenario):
        # A layer that can never refuse is an error, so the large minute is more than a sixtieth of the hour.
        return '"2000/hour", "33/minute"' if scenario.limits else '"4000000000/hour", "70000000/minute"'

    def start(self, directory, upstream_port, scenario, cores, capacity=1_000_000, listen="", more=""):
        """Appends `listen` to the section `[listen]`, and `more` to the configuration."""
        port, self.admin_port = machine.free_port(), machine.free_port()
        prefix = os.path.join(directory, f"transom-{port}")
        os.makedirs(prefix)
        path = os.path.join(prefix, "gateway.toml")
        with open(path, "w") as file:
            file.write(
                f"""
[listen]
http = "{machine.LOOPBACK}:{port}"
admin = "{machine.LOOPBACK}:{self.admin_port}"
{listen}

[counters]
capacity = {capacity}

[upstreams.bench]
servers = ["http://{machine.LOOPBACK}:{upstream_port}"]

[rules.per-client]
key = "ip"
windows = [{self.windows(scenario)}]

[[routes]]
path = "/api/{{*rest}}"
upstream = "bench"
rules = ["per-client"]
{more}
"""
            )
        # The number of workers follows the cores that the process may run on.
        command = [*self._wrapper, self._binary, "run", "--config", path]
        return machine.Server(self.name, command, port, os.path.join(prefix, "log"), cores), port

    def version(self):
        return machine.version_of([self._binary, "--version"], r"transom (\S+)")


class UnprofiledTransom(Transom):
    """Built without a profile."""

    name = "transom, plain"
