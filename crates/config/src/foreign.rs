//! Settings and configuration files of other products, and what is written here instead.
//!
//! This file holds the names that have no setting of the same meaning beside them. Names whose fix contains the value, or depends
//! on other settings, stand where their table is read. The lists are not complete: they have what operators are likely to write.

use super::diagnostics::Span;
use super::toml_reader::Item;

/// Settings that turn on what their table describes, or turn it off.
const SWITCHES: [&str; 5] = ["enabled", "enable", "active", "disabled", "disable"];
const JWT_ALGORITHM: [&str; 3] = ["algorithm", "algorithms", "alg"];

/// The values that a row is for.
enum Values {
    /// Those of [`SWITCHES`] that turn something off.
    Off,
    /// These words, in any case.
    Words(&'static [&'static str]),
}

/// Names of other products (in lower case, with `_` for `-`), the values that the row is for, the setting that is meant, and the
/// fix. A row applies to tables that have this setting; one without a setting applies to all others.
type Row = (&'static [&'static str], Option<Values>, &'static str, &'static str);

/// The first row that applies counts: those for some values come first.
const SETTINGS: [Row; 117] = [
    (
        &SWITCHES,
        Some(Values::Off),
        "on_limit",
        "remove the rule from `rules` of the routes, or write `on_limit = \"shadow\"`",
    ),
    (&SWITCHES, Some(Values::Off), "strip_prefix", "remove the route, or put `#` before each of its lines"),
    (&SWITCHES, Some(Values::Off), "ejection", "remove the upstream, and the routes that name it"),
    (&SWITCHES, Some(Values::Off), "weight", "remove the server from `servers`"),
    (&SWITCHES, Some(Values::Off), "healthy_after", "remove `health`: without it, there are no health checks"),
    (&SWITCHES, Some(Values::Off), "max_time", "write `ejection = false` instead of the table"),
    (&SWITCHES, Some(Values::Off), "budget", "write `retries = false` instead of the table"),
    (&SWITCHES, Some(Values::Off), "top_keys", "remove it: without `admin` in `[listen]`, the admin address is off"),
    (
        &SWITCHES,
        Some(Values::Off),
        "request_buckets",
        "remove it: without `metrics` and `admin` in `[listen]`, metrics are off",
    ),
    (&SWITCHES, Some(Values::Off), "client_ca", "remove the table: without it, its address is not served"),
    (&SWITCHES, Some(Values::Off), "format", "remove `[access_log]`: without it, there is no access log"),
    (&SWITCHES, Some(Values::Off), "sample", "remove `[tracing]`: without it, no spans are exported"),
    (&SWITCHES, Some(Values::Off), "jwks_url", "remove `[jwt]`: without it, no tokens are verified"),
    (&SWITCHES, Some(Values::Off), "api_key", "remove `[clients]`: without it, requests are of no client"),
    (
        &SWITCHES,
        Some(Values::Off),
        "sentinel_master",
        "remove `[counters.shared]`: without it, each gateway counts for itself",
    ),
    (
        &JWT_ALGORITHM,
        Some(Values::Words(&["HS256"])),
        "jwks_url",
        "write `keys = [{ algorithm = \"HS256\", secret_file = \"FILE\" }]`",
    ),
    (
        &JWT_ALGORITHM,
        Some(Values::Words(&["HS384", "HS512"])),
        "jwks_url",
        "write `keys = [{ algorithm = \"HS256\", secret_file = \"FILE\" }]`, and let the issuer sign with HS256",
    ),
    (
        &JWT_ALGORITHM,
        Some(Values::Words(&["ES256"])),
        "jwks_url",
        "write `keys = [{ algorithm = \"ES256\", public_key_file = \"FILE\" }]`",
    ),
    (
        &JWT_ALGORITHM,
        Some(Values::Words(&["ES384", "ES512"])),
        "jwks_url",
        "write `keys = [{ algorithm = \"ES256\", public_key_file = \"FILE\" }]`, and let the issuer sign with ES256",
    ),
    (
        &JWT_ALGORITHM,
        Some(Values::Words(&["EdDSA", "Ed25519"])),
        "jwks_url",
        "write `keys = [{ algorithm = \"EdDSA\", public_key_file = \"FILE\" }]`",
    ),
    (
        &JWT_ALGORITHM,
        Some(Values::Words(&["RS384", "RS512", "PS256", "PS384", "PS512"])),
        "jwks_url",
        "write `keys = [{ algorithm = \"RS256\", public_key_file = \"FILE\" }]`, and let the issuer sign with RS256",
    ),
    (
        &[
            "location",
            "locations",
            "frontend",
            "frontends",
            "router",
            "routers",
            "virtual_hosts",
            "handle",
            "site",
            "acl",
        ],
        None,
        "routes",
        "write `[[routes]]`, then its `path` and its `upstream`",
    ),
    (
        &[
            "proxy_pass",
            "reverse_proxy",
            "backend",
            "backends",
            "cluster",
            "clusters",
            "service",
            "services",
            "server",
            "balancer",
            "static_resources",
        ],
        None,
        "upstreams",
        "write `[upstreams.NAME]`, then its `servers`",
    ),
    (
        &[
            "limit_req",
            "limit_req_zone",
            "limit_conn",
            "limit_conn_zone",
            "stick_table",
            "http_request",
            "rate_limit",
            "rate_limits",
            "ratelimit",
            "limit",
            "limits",
            "middleware",
            "middlewares",
            "plugins",
        ],
        None,
        "rules",
        "write `[rules.NAME]` with `key` and `windows`, and name it in `rules` of the route",
    ),
    (
        &["max_connections", "max_connections_per_client", "trusted_proxies", "proxy_protocol", "backlog"],
        None,
        "listen",
        "write it in `[listen]`",
    ),
    (&["max_body", "request_fields", "min_request_rate"], None, "limits", "write it in `[limits]`"),
    (
        &["http"],
        None,
        "routes",
        "write addresses in `[listen]`, limits in `[rules.NAME]`, servers in `[upstreams.NAME]`, and routes in `[[routes]]`",
    ),
    (
        &["bind", "address", "port", "entrypoints", "entry_points", "listeners"],
        None,
        "listen",
        "write `[listen]`, then `http = \"0.0.0.0:8080\"`",
    ),
    (
        &["ssl", "tls", "certificates", "certs"],
        None,
        "listen",
        "write `[listen.https]`, then its `address`, its `certificate` and its `private_key`",
    ),
    (&["worker_processes", "nbthread", "nbproc", "threads", "concurrency"], None, "workers", "write `workers = 4`"),
    (&["pid", "pidfile"], None, "pid_file", "write `pid_file = \"/run/transom/pid\"`"),
    (&["log", "logs", "log_format", "logging"], None, "access_log", "write `access_log = \"stdout\"`"),
    (
        &["error_log", "log_level", "loglevel"],
        None,
        "",
        "remove it: messages go to standard error; the environment variable `TRANSOM_LOG` sets their level",
    ),
    (&["timeout"], None, "timeouts", "write `timeouts = { request = \"60s\" }`"),
    (
        &["user", "group", "daemon", "chroot"],
        None,
        "pid_file",
        "remove it: what starts the gateway sets this, such as a unit of systemd",
    ),
    (
        &[
            "proxy_pass",
            "grpc_pass",
            "reverse_proxy",
            "backend",
            "default_backend",
            "use_backend",
            "cluster",
            "service",
            "route",
            "target",
            "servers",
        ],
        None,
        "upstream",
        "write `upstream = \"NAME\"`, and `[upstreams.NAME]` with `servers`",
    ),
    (&["location", "uri", "prefix", "match", "path_prefix"], None, "path", "write `path = \"/api/{*rest}\"`"),
    (&["acl"], None, "path", "write `path = \"/api/{*rest}\"`, and `host`, `methods` or `headers` where they matter"),
    (&["server_name", "domains", "domain", "vhost", "hostnames"], None, "host", "write it as `host`"),
    (
        &["query_params", "query_parameters", "query_param", "query_match", "params", "args"],
        None,
        "query",
        "write `query = { version = \"2\" }`, or `query = { version = true }` for any value",
    ),
    (
        &["remote_ip", "remote_address", "source_ip", "source_ips", "source_range", "src"],
        None,
        "networks",
        "write `networks = [\"10.0.0.0/8\"]`, or `allow` to refuse all other requests",
    ),
    (&["plans", "plan", "tiers"], None, "rules", "write `[rules.NAME.plans.PLAN]`, then its `windows`"),
    (&["tiers", "levels"], None, "plans", "write `[rules.NAME.plans.PLAN]`, then its `windows`"),
    (&["prometheus"], None, "listen", "write `metrics = \"127.0.0.1:9100\"` in `[listen]`"),
    (
        &["listen", "address", "port", "path", "enabled"],
        None,
        "request_buckets",
        "remove it, and write `metrics = \"127.0.0.1:9100\"` in `[listen]`; the path is `/metrics`",
    ),
    (
        &["listen", "address", "port", "enabled"],
        None,
        "top_keys",
        "remove it, and write `admin = \"127.0.0.1:9900\"` in `[listen]`",
    ),
    (
        &["otel", "opentelemetry", "otlp", "telemetry", "jaeger", "zipkin"],
        None,
        "tracing",
        "write `[tracing]`, then `endpoint = \"http://127.0.0.1:4317\"`",
    ),
    (
        &["shutdown_timeout", "graceful_timeout", "graceful_shutdown", "graceful", "grace_period"],
        None,
        "timeouts",
        "write `drain = \"30s\"` in `[timeouts]`",
    ),
    (&["timeout", "deadline", "grace_period"], None, "delay", "write `drain = \"30s\"` in `[timeouts]`"),
    (&["body_size"], None, "max_body", "write it as `max_body`, such as `\"10MiB\"`"),
    (&["body"], None, "request_fields", "write it as `max_body`, such as `\"10MiB\"`"),
    (&["body", "content_type"], None, "respond", "write `respond = { status = 200, body = \"TEXT\" }`"),
    (&["code", "status_code"], None, "status", "write it as `status`"),
    (
        &["domain", "descriptors"],
        None,
        "rules",
        "write `[rules.NAME]` with a `descriptor`, as docs/guides/from-envoy-ratelimit.md shows",
    ),
    (&["server_name"], None, "", "write it as `host` in the route"),
    (
        &["proxy_set_header", "header_up", "set_header"],
        None,
        "request_headers",
        "write `request_headers = { set = { x-name = \"value\" } }`",
    ),
    (
        &["add_header", "header_down", "more_set_headers"],
        None,
        "response_headers",
        "write `response_headers = { set = { x-name = \"value\" } }`",
    ),
    (
        &["proxy_redirect", "proxy_cookie_domain", "proxy_cookie_path", "cookie_domain_rewrite", "location_rewrite"],
        None,
        "rewrite_location",
        "write `rewrite_location = true`",
    ),
    (&["return", "static_response"], None, "respond", "write `respond = { status = 404 }`, or `redirect`"),
    (
        &["strip_path", "stripprefix", "strip_uri", "uri_strip_prefix"],
        None,
        "strip_prefix",
        "write `strip_prefix = \"/api\"`",
    ),
    (
        &["retries", "retry", "num_retries", "retry_policy", "proxy_next_upstream"],
        None,
        "strip_prefix",
        "write `retries = { attempts = 2 }` in `[upstreams.NAME]`",
    ),
    (
        &["health", "health_check", "healthcheck"],
        None,
        "strip_prefix",
        "write `health = { path = \"/healthz\" }` in `[upstreams.NAME]`",
    ),
    (
        &["auth", "basic_auth", "basicauth", "auth_basic"],
        None,
        "strip_prefix",
        "remove it: the upstream checks passwords; `[jwt]` verifies tokens, `[clients]` recognizes API keys",
    ),
    (&["cache", "proxy_cache", "caching"], None, "", "remove it: responses are not stored"),
    (&["redir", "redirect_scheme"], None, "redirect", "write `redirect = { to = \"https://{host}{uri}\" }`"),
    (
        &["gzip", "compress", "compression", "encode"],
        None,
        "",
        "remove it: bodies are passed on as they are; compress them in the upstream",
    ),
    (&["cors"], None, "", "write `respond` and `response_headers`, as docs/guides/cors.md shows"),
    (
        &["client_max_body_size", "max_body_size", "max_request_body_bytes"],
        None,
        "max_body",
        "write it as `max_body`, such as `\"10MiB\"`",
    ),
    (&["client_max_body_size"], None, "", "write it as `max_body` in `[limits]`, such as `\"10MiB\"`"),
    (
        &["max_header", "max_header_size", "large_client_header_buffers", "client_header_buffer_size"],
        None,
        "request_head",
        "write it as `request_head`, such as `\"64KiB\"`",
    ),
    (
        &["timeout_connect", "proxy_connect_timeout", "connect_timeout"],
        None,
        "connect",
        "write it as `connect`, such as `\"5s\"`",
    ),
    (
        &["timeout_server", "proxy_read_timeout", "response_timeout"],
        None,
        "response_head",
        "write it as `response_head` and `body`, such as `\"60s\"`",
    ),
    (
        &["client", "header", "headers", "read", "idle", "keepalive", "keep_alive", "http_request"],
        None,
        "tls_handshake",
        "write it as `request_head`, such as `\"30s\"`; it also limits how long an idle connection of a client is kept",
    ),
    (
        &["server", "backend", "upstream", "response"],
        None,
        "response_head",
        "write it as `response_head` and `body`, such as `\"60s\"`",
    ),
    (
        &["timeout_client", "timeout_http_request", "client_header_timeout", "read_timeout", "keepalive_timeout"],
        None,
        "request_head",
        "write it as `request_head`, such as `\"30s\"`",
    ),
    (
        &[
            "proxy_read_timeout",
            "proxy_connect_timeout",
            "proxy_send_timeout",
            "timeout_client",
            "timeout_server",
            "timeout_connect",
        ],
        None,
        "",
        "write `[timeouts]`, then `connect`, `response_head`, `body` or `request_head`",
    ),
    (&["maxconn", "worker_connections", "max_conns"], None, "max_connections", "write `max_connections = 10000`"),
    (
        &["set_real_ip_from", "trusted_ips", "forwarded_headers", "accept_proxy"],
        None,
        "trusted_proxies",
        "write `trusted_proxies = [\"10.0.0.0/8\"]`, or `proxy_protocol` for the PROXY protocol",
    ),
    (
        &["real_ip_header", "real_client_ip_header", "client_ip_headers"],
        None,
        "client_ip",
        "write `client_ip = \"x-real-ip\"` beside `trusted_proxies`; for `X-Forwarded-For`, `trusted_proxies` alone",
    ),
    (
        &["xff_num_trusted_hops", "num_trusted_hops", "num_trusted_proxies", "depth"],
        None,
        "trusted_hops",
        "write `trusted_hops = 1` beside `trusted_proxies`",
    ),
    (
        &["ssl", "tls", "certificate", "ssl_certificate", "ssl_certificate_key", "cert", "crt"],
        None,
        "https",
        "write `[listen.https]`, then its `address`, its `certificate` and its `private_key`",
    ),
    (
        &["cert", "crt", "ssl_certificate", "cert_file", "certfile", "fullchain"],
        None,
        "certificate",
        "write it as `certificate`",
    ),
    (
        &["key", "ssl_certificate_key", "key_file", "keyfile", "privkey"],
        None,
        "private_key",
        "write it as `private_key`",
    ),
    (
        &["acme", "letsencrypt", "auto_https", "email", "cert_resolver", "certresolver"],
        None,
        "certificate",
        "remove it: `certificate` and `private_key` name files, which an ACME client such as certbot renews; renewed files are \
         loaded at once",
    ),
    (
        &["health_check", "healthcheck", "health_checks", "option_httpchk", "check", "active_health"],
        None,
        "health",
        "write `health = { path = \"/healthz\" }`",
    ),
    (
        &["max_fails", "fail_timeout", "outlier_detection", "circuit_breaker", "circuit_breakers", "passive_health"],
        None,
        "ejection",
        "write `ejection = { failures = 5 }`",
    ),
    (
        &["retry", "num_retries", "max_retries", "retry_policy", "proxy_next_upstream", "lb_retries"],
        None,
        "retries",
        "write `retries = { attempts = 2 }`",
    ),
    (&["timeout", "timeouts"], None, "ejection", "write it in `[timeouts]`, or as `timeouts` of the route"),
    (&["weight", "weights"], None, "ejection", "write `servers = [{ url = \"http://127.0.0.1:9001\", weight = 3 }]`"),
    (
        &["sticky", "sticky_session", "session_affinity", "affinity", "cookie"],
        None,
        "balance",
        "write `balance = { hash = [\"cookie:session\"] }`",
    ),
    (&["http2", "h2", "h2c", "grpc"], None, "protocol", "write `protocol = \"http2\"`"),
    (
        &["backup", "backups", "fallback"],
        None,
        "ejection",
        "remove it: all servers get requests, as long as they are healthy",
    ),
    (&["address", "host", "port", "server", "uri"], None, "url", "write `url = \"http://127.0.0.1:9001\"`"),
    (
        &["size", "max_keys", "max_entries", "table_size"],
        None,
        "snapshot_every",
        "write it as `capacity`, such as `1000000`: the number of counters",
    ),
    (
        &["cluster", "nodes", "addresses"],
        None,
        "sentinel_master",
        "write the servers of a cluster as a list: `redis = [\"redis://127.0.0.1:7000\", \"redis://127.0.0.1:7001\"]`",
    ),
    (&["jwks", "jwks_uri", "jwksuri", "jwk_url"], None, "jwks_url", "write it as `jwks_url`"),
    (
        &["secret", "secret_file"],
        None,
        "jwks_url",
        "write `keys = [{ algorithm = \"HS256\", secret_file = \"FILE\" }]`",
    ),
    (
        &["algorithm", "algorithms", "public_key", "public_key_file", "key", "alg"],
        None,
        "jwks_url",
        "write `keys = [{ algorithm = \"RS256\", public_key_file = \"FILE\" }]`",
    ),
    (
        &["keepalive", "pool_max_conn", "max_idle", "pool_size", "keepalive_connections"],
        None,
        "max_idle_connections",
        "write `max_idle_connections = 100`",
    ),
    (
        &["limit_by", "source", "source_criterion", "sourcecriterion", "track", "track_sc0", "zone", "group_by"],
        None,
        "key",
        "write `key = \"ip\"`, or another part of a key",
    ),
    (
        &["token_bucket", "tokenbucket", "leaky_bucket", "max_tokens", "tokens_per_fill", "fill_interval"],
        None,
        "windows",
        "write `windows = [{ limit = 100, period = \"minute\", capacity = 200 }]`: unused tokens roll over, up to `capacity`",
    ),
    (
        &["whitelist", "allowlist", "allow_list", "exclude", "except", "bypass", "skip", "ignore", "exempt"],
        None,
        "exemptions",
        "write it as `exemptions`, such as `exemptions = [\"10.0.0.0/8\"]`",
    ),
    (
        &["action", "behavior"],
        None,
        "on_limit",
        "write `on_limit = \"refuse\"`, which is the default, `\"delay\"` or `\"shadow\"`",
    ),
    (
        &["algorithm", "strategy"],
        None,
        "on_limit",
        "remove it; a window that slides is `windows = [{ limit = 33, period = \"minute\", sliding = true }]`",
    ),
    (&["ban", "ban_time", "block", "block_duration", "lockout"], None, "penalty", "write `penalty = \"10m\"`"),
    (&["queue", "queue_size"], None, "max_waiting", "write `max_waiting = 100`, and `on_limit = \"delay\"`"),
    (
        &["max_wait", "queue_timeout", "wait"],
        None,
        "max_delay",
        "write `max_delay = \"5s\"`, and `on_limit = \"delay\"`",
    ),
    (&["enabled", "disabled", "active"], None, "on_limit", "remove it: a rule is in effect on the routes that name it"),
    (&["weight"], None, "on_limit", "write `cost = 2`"),
    (
        &["weight", "weights"],
        None,
        "strip_prefix",
        "write `servers = [{ url = \"http://127.0.0.1:9001\", weight = 3 }]` in `[upstreams.NAME]`",
    ),
    (
        &["header"],
        None,
        "request-header",
        "write `request-header = \"x-cost\"`, or `response-header` for one of the response",
    ),
    (&["message", "error_message", "error_body", "errorfile"], None, "body_style", "write it as `body`"),
    (
        &["retry_after"],
        None,
        "retry_jitter",
        "remove it: refusals have `Retry-After`; `retry_jitter = \"5s\"` adds a random time to it",
    ),
    (
        &["policy", "redis", "storage", "distributed"],
        None,
        "retry_jitter",
        "write `[counters.shared]`, then `redis = \"redis://127.0.0.1:6379\"`",
    ),
    (&["path", "target", "output", "filename"], None, "file", "write it as `file`"),
    (
        &[
            "limit_conn",
            "in_flight",
            "inflightreq",
            "amount",
            "max_concurrent",
            "concurrency",
            "conn_cur",
            "max_connections",
        ],
        None,
        "concurrent",
        "write `concurrent = 10`",
    ),
    (
        &["deny", "denylist", "blacklist", "block", "blocklist"],
        None,
        "",
        "write it into the file of `[access]`, as docs/guides/block-clients.md shows",
    ),
];

impl Values {
    /// `name`: the key of the item, with underscores.
    fn apply_to(&self, item: &Item, name: &str) -> bool {
        match self {
            Values::Off => item.switch() == Some(name.starts_with("dis")),
            Values::Words(words) => {
                let is_one = |text: &str| words.iter().any(|word| word.eq_ignore_ascii_case(text));
                item.words().iter().any(|word| is_one(word.text))
            }
        }
    }
}

/// The setting that a key of another product stands for in a table with the settings `known`, and the fix.
pub fn setting(item: &Item, known: &[&'static str]) -> Option<(&'static str, &'static str)> {
    let name = item.key.to_ascii_lowercase().replace(['-', ' '], "_");
    let is_for = |names: &[&str], meant: &str| names.contains(&&*name) && (meant.is_empty() || known.contains(&meant));
    let has_value = |values: &Option<Values>| values.as_ref().is_none_or(|values| values.apply_to(item, &name));
    let applies = |(names, values, meant, _): &&Row| is_for(names, meant) && has_value(values);
    let (_, _, meant, fix) = SETTINGS.iter().find(applies)?;
    Some((meant, fix))
}

/// A configuration file of another product: its name, the guide for its users, and beginnings of its lines. A text with
/// `least` of these beginnings is such a file.
struct OtherFormat {
    product: &'static str,
    guide: &'static str,
    least: usize,
    lines: &'static [&'static str],
}

const FORMATS: [OtherFormat; 6] = [
    OtherFormat {
        product: "nginx",
        guide: "from-nginx",
        least: 2,
        lines: &[
            "server {",
            "http {",
            "events {",
            "upstream ",
            "location ",
            "listen ",
            "server_name ",
            "proxy_pass ",
            "limit_req ",
            "limit_req_zone ",
            "limit_conn_zone ",
            "worker_processes ",
        ],
    },
    OtherFormat {
        product: "HAProxy",
        guide: "from-haproxy",
        least: 2,
        lines: &[
            "global",
            "defaults",
            "frontend ",
            "backend ",
            "bind ",
            "mode http",
            "stick-table ",
            "http-request ",
            "default_backend ",
            "use_backend ",
            "timeout client ",
            "timeout server ",
            "timeout connect ",
        ],
    },
    OtherFormat {
        product: "Caddy",
        guide: "reverse-proxy",
        least: 1,
        lines: &["reverse_proxy ", "handle_path ", "rate_limit {", "file_server", "forward_auth "],
    },
    OtherFormat {
        product: "Envoy",
        guide: "from-envoy-ratelimit",
        least: 1,
        lines: &["static_resources:", "dynamic_resources:", "descriptors:", "- rate_limit:", "rate_limit:"],
    },
    OtherFormat {
        product: "Traefik",
        guide: "from-traefik",
        least: 1,
        lines: &["entryPoints:", "middlewares:", "routers:", "loadBalancer:", "[entryPoints"],
    },
    OtherFormat { product: "Kong", guide: "from-kong", least: 1, lines: &["_format_version:", "plugins:"] },
];

/// Headers that only a configuration of this gateway has. It may have a line of another product nevertheless.
const OWN_HEADERS: [&str; 4] = ["[listen]", "[rules.", "[upstreams.", "[[routes]]"];

/// Recognizes the configuration file of another product: where its first known line is, the message and the fix.
pub fn configuration(text: &str) -> Option<(Span, String, String)> {
    if text.lines().any(|line| OWN_HEADERS.iter().any(|header| line.trim_start().starts_with(header))) {
        return None;
    }
    // A value of TOML may begin like a directive, as in `upstream = "demo"`.
    let is_directive = |line: &str| {
        let (_, rest) = line.split_once([' ', ':']).unwrap_or((line, ""));
        !line.starts_with('#') && !rest.trim_start().starts_with('=')
    };
    let lines = || text.lines().map(str::trim).filter(|line| is_directive(line));
    let is_known = |line: &str, known: &str| match known.ends_with(|c: char| c.is_ascii_alphabetic()) {
        true => line == known,
        false => line.starts_with(known),
    };
    let is_of = |format: &&OtherFormat| {
        let found = format.lines.iter().filter(|known| lines().any(|line| is_known(line, known)));
        found.count() >= format.least
    };
    let OtherFormat { product, guide, lines: known, .. } = FORMATS.iter().find(is_of)?;
    let first = lines().find(|line| known.iter().any(|known| is_known(line, known)))?;
    let start = first.as_ptr() as usize - text.as_ptr() as usize;
    let fix = format!("write it in TOML, as docs/guides/{guide}.md shows");
    Some((
        start..start + first.len(),
        format!("this is a configuration of {product}, which this gateway cannot read"),
        fix,
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;
    use toml::de::DeTable;

    use super::*;
    use crate::schema::schema;
    use crate::toml_reader::Table;

    /// The keys of all tables of a JSON schema.
    fn keys(schema: &Value, found: &mut BTreeSet<String>) {
        if let Some(properties) = schema["properties"].as_object() {
            found.extend(properties.keys().cloned());
        }
        match schema {
            Value::Object(members) => members.values().for_each(|member| keys(member, found)),
            Value::Array(items) => items.iter().for_each(|item| keys(item, found)),
            _ => {}
        }
    }

    #[test]
    fn every_row_names_a_setting() {
        let mut known = BTreeSet::new();
        keys(&schema(), &mut known);
        for (names, _, meant, fix) in SETTINGS {
            assert!(meant.is_empty() || known.contains(meant), "{meant}: {fix}");
            for name in names {
                assert_eq!(*name, name.to_ascii_lowercase().replace(['-', ' '], "_"));
            }
        }
    }

    #[test]
    fn a_row_applies_where_its_setting_is() {
        let fix = |name: &str, known: &[&'static str]| {
            let text = format!("{name} = 1");
            let entries = DeTable::parse(&text).unwrap();
            let table = Table::new(entries.get_ref(), entries.span(), "a table");
            setting(&table.given(name).unwrap(), known).map(|(meant, _)| meant)
        };
        assert_eq!(fix("backend", &["upstream", "path"]), Some("upstream"));
        assert_eq!(fix("backend", &["upstreams", "routes"]), Some("upstreams"));
        assert_eq!(fix("Limit-Req-Zone", &["rules"]), Some("rules"));
        assert_eq!(fix("server_name", &["host"]), Some("host"));
        assert_eq!(fix("server_name", &["routes"]), Some(""));
        assert_eq!(fix("backend", &["key"]), None);
        assert_eq!(fix("unheard", &["key"]), None);
    }

    #[test]
    fn configurations_of_other_products_are_recognised() {
        for (text, product) in [
            ("events {}\nhttp {\n  server {\n    listen 80;\n  }\n}\n", "nginx"),
            (
                "limit_req_zone $a zone=b:10m rate=1r/s;\nserver { listen 80;\n location / { proxy_pass http://a; } }",
                "nginx",
            ),
            ("upstream api {\n  server 127.0.0.1:9001;\n}\nserver {\n}", "nginx"),
            ("global\n    maxconn 100\ndefaults\n    mode http\n", "HAProxy"),
            ("frontend web\n  bind :80\n  http-request deny if { sc_http_req_rate(0) gt 10 }\n", "HAProxy"),
            ("example.com {\n\treverse_proxy localhost:9001\n}\n", "Caddy"),
            ("static_resources:\n  listeners: []\n", "Envoy"),
            ("domain: api\ndescriptors:\n  - key: remote_address\n", "Envoy"),
            ("entryPoints:\n  web:\n    address: :80\n", "Traefik"),
            ("http:\n  middlewares:\n    a:\n", "Traefik"),
            ("_format_version: \"3.0\"\n", "Kong"),
        ] {
            let (span, message, _) = configuration(text).unwrap_or_else(|| panic!("{text}"));
            assert!(message.contains(product), "{text}: {message}");
            assert!(text.get(span).is_some_and(|line| !line.is_empty()));
        }
        for text in [
            "",
            "upstream = \"demo\"\nlisten = \":80\"\n",
            "[upstreams.demo]\nservers = [\n",
            "listen:\n  http: 127.0.0.1:8080\nrules:\n  a:\n    key: ip\n",
            "# server {\n# location /\nlisten {\n",
            "backend = \"a\"\nbind = \":80\"\nglobal = 1\n",
            "[[routes]]\npath = \"/\"\nserver {\nlocation / {\n",
        ] {
            assert_eq!(configuration(text), None, "{text}");
        }
    }
}
