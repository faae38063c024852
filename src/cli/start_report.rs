//! What `transom run` says once it serves. On a terminal: a line for each fact. Elsewhere: the addresses on standard output, unless
//! that is the access log, and one line of the log with all facts.

use std::io::{self, IsTerminal as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use crate::server::Gateway;
use transom_config::listen_address::ListenAddress;
use transom_config::path::Segment;
use transom_config::route::Route;
use transom_config::{Config, LogTarget};
use transom_limiter::key::{KeyPart, OnMissing};

/// Stands for a path parameter in the example of a request.
const EXAMPLE_SEGMENT: &str = "hello";

/// Reports that a gateway serves the configuration of a file.
pub fn report(gateway: &Gateway, file: &Path) {
    let config = gateway.config();
    let is_stdout_taken = config.access_log.as_ref().is_some_and(|log| log.target == LogTarget::Stdout);
    let is_terminal = if is_stdout_taken { io::stderr().is_terminal() } else { io::stdout().is_terminal() };
    let addresses = addresses(gateway);
    let facts = [about(gateway, file), addresses.clone(), next_steps(gateway)].concat();
    match (is_terminal, is_stdout_taken) {
        (true, true) => facts.iter().for_each(|fact| print_err!("{fact}")),
        (true, false) => facts.iter().for_each(|fact| print_out!("{fact}")),
        (false, true) => {}
        (false, false) => addresses.iter().for_each(|address| print_out!("{address}")),
    }
    if !is_terminal {
        tracing::info!("{}", facts.join("; "));
    }
}

/// Version, configuration, size.
fn about(gateway: &Gateway, file: &Path) -> Vec<String> {
    let config = gateway.config();
    vec![
        format!("transom {}", env!("CARGO_PKG_VERSION")),
        format!("configuration: {}", file.display()),
        format!("{}, {}", counted(config.configured_routes(), "route"), counted(config.rules.len(), "rule")),
        counted(gateway.workers(), "worker"),
    ]
}

fn counted(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

fn addresses(gateway: &Gateway) -> Vec<String> {
    let service = gateway.config().listen.ratelimit_service.as_ref();
    let service_scheme = if service.is_some_and(|service| service.tls().is_some()) { "https" } else { "http" };
    let admin = gateway.admin().map(std::slice::from_ref).unwrap_or_default();
    [
        ("listening on http", gateway.http()),
        ("listening on https", gateway.https()),
        ("admin on http", admin),
        ("metrics on http", gateway.metrics()),
        (&format!("rate limit service on {service_scheme}"), gateway.ratelimit_service()),
        ("forward auth on http", gateway.forward_auth()),
    ]
    .iter()
    .flat_map(|(what, addresses)| addresses.iter().map(move |address| format!("{what}://{address}")))
    .collect()
}

/// The dashboard, and a request to try.
fn next_steps(gateway: &Gateway) -> Vec<String> {
    let admin = gateway.admin().and_then(ListenAddress::tcp);
    let dashboard = admin.map(|admin| format!("dashboard: http://{}/", reachable(admin)));
    dashboard.into_iter().chain(example(gateway.config(), gateway.http(), gateway.https())).collect()
}

/// A `curl` command whose request matches a route, preferably one with rules.
fn example(config: &Config, http: &[ListenAddress], https: &[ListenAddress]) -> Option<String> {
    let is_example = |route: &&Route| !route.rules.is_empty() && route.networks.is_empty();
    let route = config.routes.iter().find(is_example).or(config.routes.iter().next())?;
    let http = http.first().filter(|_| route.secure != Some(true)).map(|address| ("http", address));
    let https = https.first().filter(|_| route.secure != Some(false)).map(|address| ("https", address));
    let (scheme, address) = http.or(https)?;
    let mut command = String::from(if scheme == "https" { "curl -ik" } else { "curl -i" });
    let server = match address {
        ListenAddress::Tcp(address) => reachable(*address).to_string(),
        ListenAddress::Unix(path) => {
            command += &format!(" --unix-socket {}", quoted(&path.display().to_string()));
            String::from("localhost")
        }
    };
    if let Some(method) = route.methods.first().filter(|_| !route.methods.iter().any(|method| method == "GET")) {
        // `-X HEAD` would wait for a body.
        command += &if method == "HEAD" { " --head".to_owned() } else { format!(" -X {}", quoted(method)) };
    }
    let host = route.hosts.first().map(|host| ("host".to_owned(), Some(host.replacen('*', "www", 1))));
    for (name, value) in host.iter().chain(&route.headers).chain(&key_fields(config, route)) {
        command += &format!(" -H {}", quoted(&format!("{name}: {}", value.as_deref().unwrap_or("1"))));
    }
    let target = format!("{}{}", example_path(route), example_query(route));
    Some(format!("try: {command} {}", quoted(&format!("{scheme}://{server}{target}"))))
}

/// The fields in which the rules of a route demand a key, with a stand-in for it.
fn key_fields(config: &Config, route: &Route) -> Vec<(String, Option<String>)> {
    let rules = route.rules.iter().map(|rule| &config.rules[*rule].rule);
    let parts = rules.filter(|rule| rule.on_missing == OnMissing::Refuse).flat_map(|rule| &rule.key);
    let field = |part: &KeyPart| match (part.kind.name, part.name()) {
        ("header", Some(name)) => Some((name.to_owned(), Some(String::from("KEY")))),
        ("bearer", None) => Some((String::from("authorization"), Some(String::from("Bearer KEY")))),
        _ => None,
    };
    let api_key = config.clients.as_ref().and_then(|clients| clients.api_key.first());
    let mut fields: Vec<_> =
        parts.filter_map(|part| field(if part.kind.name == "client" { api_key? } else { part })).collect();
    fields.dedup();
    fields
}

fn example_path(route: &Route) -> String {
    if let [Segment::Rest(_)] = &*route.path.segments {
        return String::from("/");
    }
    let segments = route.path.segments.iter().map(|segment| match segment {
        Segment::Literal(text) => text.clone(),
        Segment::Wildcards(segment) => segment.filled_with(EXAMPLE_SEGMENT),
        Segment::Param(_) | Segment::Rest(_) => EXAMPLE_SEGMENT.to_owned(),
    });
    segments.fold(String::new(), |path, segment| path + "/" + &segment)
}

/// The query parameters that a route requires.
fn example_query(route: &Route) -> String {
    let encoded = |text: &str| {
        let byte = |byte: u8| match byte {
            b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
            _ if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        };
        text.bytes().map(byte).collect::<String>()
    };
    let pair = |(name, value): &(String, Option<String>)| {
        encoded(name) + &value.as_ref().map_or(String::new(), |value| format!("={}", encoded(value)))
    };
    let pairs: Vec<String> = route.query.iter().map(pair).collect();
    if pairs.is_empty() { String::new() } else { format!("?{}", pairs.join("&")) }
}

/// The address by which a program on this machine reaches a listener.
fn reachable(address: SocketAddr) -> SocketAddr {
    let loopback: IpAddr = if address.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
    if address.ip().is_unspecified() { SocketAddr::new(loopback, address.port()) } else { address }
}

/// A word of a shell command, in quotes if it needs them.
fn quoted(word: &str) -> String {
    let is_plain = |sign: char| sign.is_ascii_alphanumeric() || "/:.-_~%@+,".contains(sign);
    if word.chars().all(is_plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transom_config::listen_address::parse_address;

    fn example_of(routes: &str, http: &str) -> Option<String> {
        let toml = format!(
            "[upstreams.a]\nbuiltin = \"echo\"\n[rules.r]\nkey = \"ip\"\nwindows = [\"1/second\"]\n\
             [rules.k]\nkey = [\"header:x-api-key\", \"bearer\"]\non_missing_key = \"refuse\"\nwindows = [\"1/second\"]\n{routes}"
        );
        let http = parse_address(http).unwrap();
        example(&transom_config::read(&toml).unwrap(), &[http], &[])
    }

    #[test]
    fn the_example_matches_the_route() {
        let route = |conditions: &str| format!("[[routes]]\nupstream = \"a\"\n{conditions}\n");
        for (routes, expected) in [
            (route("path = \"/api/{*rest}\""), "try: curl -i http://127.0.0.1:8080/api/hello"),
            (route("path = \"/\""), "try: curl -i http://127.0.0.1:8080/"),
            (route("path = \"/{*rest}\""), "try: curl -i http://127.0.0.1:8080/"),
            (
                route("path = \"/users/{id}/it's\"\nmethods = [\"POST\", \"PUT\"]"),
                r"try: curl -i -X POST 'http://127.0.0.1:8080/users/hello/it'\''s'",
            ),
            (route("path = \"/a\"\nmethods = [\"HEAD\"]"), "try: curl -i --head http://127.0.0.1:8080/a"),
            (
                route("path = \"/a\"\nhost = \"*.example.com\"\nheaders = { x-a = true, x-b = \"c d\" }"),
                "try: curl -i -H 'host: www.example.com' -H 'x-a: 1' -H 'x-b: c d' http://127.0.0.1:8080/a",
            ),
            (route("path = \"/a\"") + &route("path = \"/b\"\nrules = [\"r\"]"), "try: curl -i http://127.0.0.1:8080/b"),
            (
                route("path = \"/a\"\nrules = [\"k\", \"r\"]"),
                "try: curl -i -H 'x-api-key: KEY' -H 'authorization: Bearer KEY' http://127.0.0.1:8080/a",
            ),
        ] {
            assert_eq!(example_of(&routes, "0.0.0.0:8080").as_deref(), Some(expected), "{routes}");
        }
        let of_socket = example_of(&route("path = \"/a\""), "unix:/run/a b.sock");
        assert_eq!(of_socket.as_deref(), Some("try: curl -i --unix-socket '/run/a b.sock' http://localhost/a"));
    }
}
