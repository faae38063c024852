//! `[upstreams.NAME]`: the servers of an upstream and how to connect to them, or a built-in upstream.
//!
//! A server is a URL with scheme, host and port, or the path of a Unix socket. A URL has no path: the request
//! determines the path. This file resolves no names and opens no connections.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use super::values::{Definitions, Parsed, is_ipv4_like, is_name, read_duration_ms};
use toml::de::DeValue;

use crate::config::client_tls::{SystemRoots, read_tls};
use crate::config::diagnostics::{Report, quoted};
use crate::config::settings::{DAY_MS, Integer, Kind, Section};
use crate::config::toml_reader::{Item, SpannedStr, Table};
use crate::config::upstream::{
    HostField, Scheme, Server, Target, TransportSettings, Upstream, UpstreamPolicy, UpstreamProtocol,
};

const EXAMPLE: &str = "[\"http://127.0.0.1:9001\"]";
const PROTOCOLS: [(&str, UpstreamProtocol); 3] =
    [("auto", UpstreamProtocol::Auto), ("http1", UpstreamProtocol::Http1), ("http2", UpstreamProtocol::Http2)];
const WEIGHT_MAX: u64 = 1000;
const RESOLVE_DEFAULT: Duration = Duration::from_secs(30);
/// The longest path of a Unix socket on Linux.
const SOCKET_PATH_MAX_BYTES: usize = 107;

pub fn read_upstreams(item: Option<Item>, report: &mut Report) -> Definitions<Upstream> {
    let mut roots = SystemRoots::default();
    Definitions::read(item, report, |name, table, report| {
        let (target, transport, policy) =
            table.map(|table| read_upstream(table, &mut roots, report)).unwrap_or_default();
        let transport = transport.unwrap_or(TransportSettings {
            protocol: UpstreamProtocol::Auto,
            host: HostField::Keep,
            tls: None,
            resolve: RESOLVE_DEFAULT,
        });
        Upstream { name: name.to_owned(), target: target.unwrap_or(Target::Echo), transport, policy }
    })
}

/// The settings about connections, which need `servers`.
struct ServerSettings<'d> {
    protocol: Option<Item<'d>>,
    host: Option<Item<'d>>,
    tls: Option<Item<'d>>,
    resolve: Option<Item<'d>>,
}

fn read_upstream(
    mut table: Table,
    roots: &mut SystemRoots,
    report: &mut Report,
) -> (Option<Target>, Option<TransportSettings>, UpstreamPolicy) {
    let span = table.span.clone();
    let builtin = table.get("builtin");
    let servers = table.get("servers");
    let settings = ServerSettings {
        protocol: table.get("protocol"),
        host: table.get("host"),
        tls: table.get("tls"),
        resolve: table.get("resolve"),
    };
    let policy = match &servers {
        Some(_) if builtin.is_none() => UpstreamPolicy::read(&mut table, report),
        _ => {
            let given: Vec<Item> = UpstreamPolicy::KEYS.iter().filter_map(|key| table.get(key)).collect();
            if builtin.is_some() && servers.is_none() {
                report_without_servers(given, report);
            }
            UpstreamPolicy::default()
        }
    };
    let misspelled = !table.finish(report).is_empty();
    let none = (None, None, UpstreamPolicy::default());
    match (builtin, servers) {
        (None, None) if misspelled => none,
        (None, None) => {
            let fix = format!("write `servers = {EXAMPLE}`, or `builtin = \"echo\"` for an upstream without servers");
            report.missing(span, "the upstream has no `servers`", fix);
            none
        }
        (Some(builtin), Some(_)) => {
            let message = "`servers` and `builtin` are both given";
            report.missing(builtin.key_span, message, "remove this line to use the servers");
            none
        }
        (Some(builtin), None) => {
            let ServerSettings { protocol, host, tls, resolve } = settings;
            report_without_servers([protocol, host, tls, resolve].into_iter().flatten(), report);
            (builtin.choice(&[("echo", ())], report).map(|()| Target::Echo), None, policy)
        }
        (None, Some(item)) => {
            let servers = read_servers(&item, report);
            let transport = read_transport(&settings, servers.as_deref(), &item, roots, report);
            (servers.map(Target::Servers), Some(transport), policy)
        }
    }
}

/// Reports settings that an upstream without servers does not use.
fn report_without_servers<'d>(items: impl IntoIterator<Item = Item<'d>>, report: &mut Report) {
    for item in items {
        let message = format!("`{}` has no effect: the upstream has no `servers`", item.key);
        report.missing(item.key_span, message, "remove it, or write `servers` instead of `builtin`");
    }
}

fn read_servers(item: &Item, report: &mut Report) -> Option<Vec<Server>> {
    let words = read_server_list(item, EXAMPLE, report)?;
    if words.is_empty() {
        report.problem(item.span.clone(), "`servers` is an empty list", item.fix_with(EXAMPLE));
    }
    let mut servers: Vec<Server> = Vec::new();
    for (word, weight) in words {
        let Some(server) = read_server(&word, weight, report) else { continue };
        let is_same = |other: &&Server| other.host == server.host && other.port == server.port;
        if let Some(other) = servers.iter().find(is_same) {
            let message = format!("{} is the same server as {}", quoted(word.text), quoted(&other.url));
            report.problem(word.span, message, "remove one of the two");
        }
        servers.push(server);
    }
    Some(servers)
}

/// Reads the list `servers`: each item is a URL, or a table with `url` and `weight`.
fn read_server_list<'d>(item: &Item<'d>, example: &str, report: &mut Report) -> Option<Vec<(SpannedStr<'d>, u32)>> {
    let DeValue::Array(_) = item.value else {
        return item.strings(example, report).map(|words| words.into_iter().map(|word| (word, 1)).collect());
    };
    let items = item.list(example, report)?;
    let read = |item: &Item<'d>| match item.value {
        DeValue::Table(_) => {
            let fix = "write `{ url = \"http://127.0.0.1:9001\", weight = 3 }`";
            let mut table = item.table("a server", fix, report)?;
            let url = table.require("url", fix).and_then(|item| item.string("\"http://127.0.0.1:9001\"", report));
            let weight = table.get("weight").and_then(|item| Integer(1, 1..=WEIGHT_MAX).read(&item, report));
            table.finish(report);
            Some((url?, weight.unwrap_or(1)))
        }
        _ => item.string(example, report).map(|word| (word, 1)),
    };
    let servers: Vec<_> = items.iter().filter_map(read).collect();
    (items.is_empty() || !servers.is_empty()).then_some(servers)
}

/// Reads how the gateway connects to the servers.
fn read_transport(
    settings: &ServerSettings,
    servers: Option<&[Server]>,
    item: &Item,
    roots: &mut SystemRoots,
    report: &mut Report,
) -> TransportSettings {
    let choose = |item: &Item, report: &mut Report| item.choice(&PROTOCOLS, report);
    let protocol = settings.protocol.as_ref().and_then(|item| choose(item, report));
    let host = settings.host.as_ref().and_then(|item| read_host_field(item, report));
    let resolve =
        settings.resolve.as_ref().and_then(|item| read_duration_ms(item, 1000..=DAY_MS, RESOLVE_DEFAULT, report));
    let secure = servers.is_none_or(|servers| servers.iter().any(|server| server.scheme == Scheme::Https));
    let tls = match (&settings.tls, secure) {
        (Some(item), false) => {
            let message = "`tls` has no effect: no server uses `https`";
            report.missing(item.key_span.clone(), message, "remove it, or write `https://` in `servers`");
            None
        }
        (None, true) if servers.is_none() => None,
        (given, true) => read_tls(given.as_ref(), item.span.clone(), roots, report),
        (None, false) => None,
    };
    TransportSettings {
        protocol: protocol.unwrap_or(UpstreamProtocol::Auto),
        host: host.unwrap_or(HostField::Keep),
        tls,
        resolve: resolve.map_or(RESOLVE_DEFAULT, Duration::from_millis),
    }
}

fn read_host_field(item: &Item, report: &mut Report) -> Option<HostField> {
    let word = item.string("\"server\"", report)?;
    match word.text {
        "keep" => Some(HostField::Keep),
        "server" => Some(HostField::Server),
        host if parse_authority(host, host, HTTP).is_ok() => Some(HostField::Fixed(host.to_owned())),
        host => {
            let message = format!("`host` cannot be {}", quoted(host));
            let fix = "write `\"keep\"` (the host that the client sent), `\"server\"` (the host of the server), or a host name";
            report.problem(word.span, message, fix);
            None
        }
    }
}

fn read_server(word: &SpannedStr, weight: u32, report: &mut Report) -> Option<Server> {
    match parse_server_url(word.text) {
        Ok((scheme, host, port)) => Some(Server { url: word.text.to_owned(), scheme, host, port, weight }),
        Err((message, fix)) => {
            report.problem(word.span.clone(), message, fix);
            None
        }
    }
}

/// The default scheme and its port.
const HTTP: (&str, u16) = ("http", 80);

/// Parses the URL of a server into scheme, host in lower case, and port.
fn parse_server_url(url: &str) -> Parsed<(Scheme, String, u16)> {
    let is = |what: &str| format!("{} {what}", quoted(url));
    let write = |scheme: &str, rest: &str| format!("write `\"{scheme}://{}\"`", rest.trim());
    if let Some(path) = url.strip_prefix("unix:") {
        return parse_socket_url(url, path);
    }
    let (scheme, rest) = match url.split_once("://") {
        Some(("http", rest)) => (Scheme::Http, rest),
        Some(("https", rest)) => (Scheme::Https, rest),
        Some((scheme, rest)) if ["http", "https"].iter().any(|known| scheme.eq_ignore_ascii_case(known)) => {
            return Err((is("is not a server URL"), write(&scheme.to_ascii_lowercase(), rest)));
        }
        Some(_) => return Err((is("has a scheme that is not supported"), write("http", "HOST:PORT"))),
        None if url.is_empty() => return Err((is("is not a server URL"), write("http", "HOST:PORT"))),
        None => return Err((is("is not a server URL"), write("http", url))),
    };
    let default = if scheme == Scheme::Https { ("https", 443) } else { HTTP };
    parse_authority(url, rest, default).map(|(host, port)| (scheme, host, port))
}

fn parse_socket_url(url: &str, path: &str) -> Parsed<(Scheme, String, u16)> {
    parse_socket_path(url, path, "unix:").map(|path| (Scheme::Unix, path.to_owned(), 0))
}

/// Checks the absolute path of a Unix socket that follows the scheme of a URL.
pub fn parse_socket_path<'u>(url: &str, path: &'u str, scheme: &str) -> Parsed<&'u str> {
    let message = |what: &str| format!("{} {what}", quoted(url));
    if !path.starts_with('/') || path.starts_with("//") {
        let fix = format!("write `\"{scheme}/{}\"`", path.trim_start_matches('/'));
        return Err((message("does not have the absolute path of a socket"), fix));
    }
    if path.len() > SOCKET_PATH_MAX_BYTES || path.contains('\0') {
        let fix = format!("name a socket whose path has at most {SOCKET_PATH_MAX_BYTES} bytes");
        return Err((message("is not a valid socket path"), fix));
    }
    Ok(path)
}

/// Parses the part of a URL after the scheme into host, in lower case, and port. `scheme` has its name and default
/// port.
pub fn parse_authority(url: &str, authority: &str, (scheme, default_port): (&str, u16)) -> Parsed<(String, u16)> {
    let is = |what: &str| format!("{} {what}", quoted(url));
    let write = |rest: &str| format!("write `\"{scheme}://{}\"`", rest.trim());
    if let Some((_, rest)) = authority.rsplit_once('@') {
        return Err((is("has a user name, which is not supported"), write(rest)));
    }
    if let Some(end) = authority.find(['/', '?', '#']) {
        let fix = format!("{}: the path of the request is sent to the server", write(&authority[..end]));
        return Err((is("has a path, which is not supported"), fix));
    }
    if let Ok(ip) = authority.parse::<Ipv6Addr>() {
        return Err((is("has an IPv6 address without brackets"), write(&format!("[{ip}]"))));
    }
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (authority, None),
    };
    let port = match port.map(|port| (port, port.parse::<u16>())) {
        None => default_port,
        Some((digits, Ok(port))) if port > 0 && digits.bytes().all(|b| b.is_ascii_digit()) => port,
        Some((port, _)) => {
            let fix = format!("write a port from `1` to `65535`, or remove it for `{default_port}`");
            return Err((is(&format!("has the invalid port {}", quoted(port))), fix));
        }
    };
    if let Some(ip) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return match ip.parse::<Ipv6Addr>() {
            Ok(ip) => Ok((ip.to_string(), port)),
            Err(_) => Err((is("has an invalid IPv6 address in brackets"), write(&format!("[::1]:{port}")))),
        };
    }
    let numbers = is_ipv4_like(host);
    match host {
        _ if host.parse::<Ipv6Addr>().is_ok() || host.contains(':') => {
            Err((is("has an IPv6 address without brackets"), write(&format!("[{host}]:{port}"))))
        }
        _ if numbers && host.parse::<Ipv4Addr>().is_err() => {
            let fix = format!("write four numbers from `0` to `255`, such as `\"{scheme}://127.0.0.1:9001\"`");
            Err((is("has an invalid IPv4 address"), fix))
        }
        _ if numbers || is_name(host) => Ok((host.to_ascii_lowercase(), port)),
        "" => Err((is("has no host"), write(&format!("127.0.0.1:{port}")))),
        _ => {
            let fix = "write a name of letters, digits, `-` and dots, or an IP address";
            Err((is("has an invalid host name"), fix.to_owned()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_read_as_written() {
        for (url, scheme, host, port) in [
            ("http://127.0.0.1:9001", Scheme::Http, "127.0.0.1", 9001),
            ("http://API.example.com", Scheme::Http, "api.example.com", 80),
            ("https://API.example.com", Scheme::Https, "api.example.com", 443),
            ("http://[::1]:8080", Scheme::Http, "::1", 8080),
            ("https://[fd00:0::1]:80", Scheme::Https, "fd00::1", 80),
            ("http://my_service:80", Scheme::Http, "my_service", 80),
            ("unix:/run/Api.sock", Scheme::Unix, "/run/Api.sock", 0),
        ] {
            assert_eq!(parse_server_url(url), Ok((scheme, host.to_owned(), port)), "{url}");
        }
        for url in [
            "",
            "http://",
            "http://:80",
            "http://a:0",
            "http://a:",
            "http://a:+1",
            "http://a:65536",
            "http://::1",
            "http://::1:80",
            "http://[::1",
            "http://[x]:1",
            "http://a b",
            "http://é",
            "http://a..b",
            "http://10.0.0.256",
            "http://u@h",
            "http://h/",
            "https://h/",
            "https://",
            "ftp://h",
            "h:1",
            "HTTP://h",
            "unix:",
            "unix:run/x.sock",
            "unix:///run/x.sock",
        ] {
            assert!(parse_server_url(url).is_err(), "{url}");
        }
    }
}
