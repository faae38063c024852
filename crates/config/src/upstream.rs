//! `[upstreams.NAME]`: servers, how connections to them are made, and how the servers are chosen, checked and protected.
//!
//! A server is a URL with scheme, host and port, or the path of a Unix socket. A URL has no path: the request
//! determines the path. This file resolves no names and opens no connections.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

use http::uri::PathAndQuery;
use rustls::pki_types::ServerName;
use toml::de::DeValue;

use super::client_tls::{ClientTls, ClientTlsSettings, SystemRoots, suggest_ca};
use super::diagnostics::{Parsed, Report, quoted, quoted_list};
use super::host::{is_name, parse_authority, parse_socket_path};
use super::key;
use super::key_kind::{KINDS, KeyKind};
use super::named_file::read_named_file;
use super::settings::{
    Boolean, Choice, Custom, DAY_MS, Inline, InlineOrFalse, Integer, Kind, Optional, Percent, Required, Section, Shape,
    Text, Time, TimeOrZero, Word,
};
use super::toml_reader::{Item, SpannedStr, SpannedString, Table, nearest};
use super::values::Definitions;
use super::{ServerId, UpstreamId};
use transom_limiter::handles::IdVec;
use transom_limiter::key::KeyPart;

const SECOND: Duration = Duration::from_secs(1);
const COUNT_MAX: u64 = 1_000_000;
const HOLD_MAX_MS: u64 = 3_600_000;
/// The default scheme of servers and its port.
const HTTP: (&str, u16) = ("http", 80);
const SERVERS_EXAMPLE: &str = "[\"http://127.0.0.1:9001\"]";
const SERVER_FIX: &str = "write `{ url = \"http://127.0.0.1:9001\", weight = 3 }`";
/// In messages.
const SERVERS_FILE: &str = "the servers file";
const SERVICE_EXAMPLE: &str = "\"srv://_http._tcp.api.internal\"";
const DNS_SERVER_EXAMPLE: &str = "\"127.0.0.1:8600\"";
const DNS_PORT: u16 = 53;
const NEW_SERVERS_FILE: &str = "echo 'servers = []' > servers.toml";
const HASH_EXAMPLE: &str = "{ hash = \"ip\" }";
const CAUSES: [&str; 3] = ["connect-failure", "reset", "timeout"];

#[derive(Clone, PartialEq, Debug)]
pub struct Upstream {
    pub name: String,
    pub target: Target,
    /// Meaningless for a built-in target.
    pub policy: UpstreamPolicy,
    pub transport: TransportSettings,
}

#[derive(Clone, PartialEq, Debug)]
pub enum Target {
    /// Built in: responds with the request that it received.
    Echo,
    Servers(IdVec<ServerId, Server>),
    /// The servers that a service record lists.
    Service(ServiceSource),
}

/// A service record (SRV, RFC 2782), and how it is looked up.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct ServiceSource {
    pub name: String,
    /// Of the servers.
    pub scheme: Scheme,
    /// Empty: those of the system.
    pub dns_servers: Vec<SocketAddr>,
    /// How long an answer is used at most.
    pub resolve: Duration,
}

impl ServiceSource {
    /// A server that the record lists. `None`: its name is not valid.
    pub fn server(&self, host: &str, port: u16, weight: u32, priority: u16) -> Option<Server> {
        let scheme = if self.scheme == Scheme::Https { "https" } else { "http" };
        let authority = format!("{host}:{port}");
        let (host, port) = parse_authority(&authority, &authority, (scheme, 0)).ok()?;
        Some(Server { url: format!("{scheme}://{authority}"), scheme: self.scheme, host, port, weight, priority })
    }

    /// The name that the certificates of the servers must have: that of the record, without the service and the protocol. The
    /// names that the record lists come from DNS, which may be forged (RFC 9525, section 6.1).
    fn server_name(&self) -> Option<ServerName<'static>> {
        let labels: Vec<&str> = self.name.split('.').skip_while(|label| label.starts_with('_')).collect();
        ServerName::try_from(labels.join(".")).ok()
    }
}

/// One server of an upstream.
#[derive(Clone, PartialEq, Debug)]
pub struct Server {
    /// As configured, such as `http://127.0.0.1:9001`; used as a metrics label.
    pub url: String,
    pub scheme: Scheme,
    /// Host name or address, without brackets; the path of a Unix socket.
    pub host: String,
    /// 0 for a Unix socket.
    pub port: u16,
    /// Share of the requests, relative to the other servers; at least 1.
    pub weight: u32,
    /// The server is used only while no server with a smaller number is available. 0 is the smallest.
    pub priority: u16,
}

/// The priority of servers with `backup = true`.
const BACKUP_PRIORITY: u16 = 1;

/// Parses the URL of `what`, which may have a path and a query. `example`: as TOML.
pub fn parse_url(url: &str, what: &str, example: &str) -> Parsed<(Server, PathAndQuery)> {
    let invalid = |problem: &str| (format!("{} {problem}", quoted(url)), format!("write a URL such as `{example}`"));
    let (scheme, name, default_port) = match url.split_once("://") {
        Some(("https", _)) => (Scheme::Https, "https", 443),
        Some(("http", _)) => (Scheme::Http, HTTP.0, HTTP.1),
        _ => return Err(invalid(&format!("is not the URL of {what}"))),
    };
    let rest = &url[name.len() + 3..];
    let (authority, target) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    if let Some((_, host)) = authority.rsplit_once('@') {
        let message = format!("{} has a user name, which is not supported", quoted(url));
        return Err((message, format!("write `\"{name}://{host}{target}\"`")));
    }
    let (host, port) = parse_authority(url, authority, (name, default_port))?;
    if target.contains('#') {
        return Err(invalid("has a fragment"));
    }
    let slash = if target.starts_with('/') { "" } else { "/" };
    let target =
        PathAndQuery::try_from(format!("{slash}{target}")).map_err(|_invalid| invalid("has an invalid path"))?;
    Ok((Server { url: format!("{name}://{authority}"), scheme, host, port, weight: 1, priority: 0 }, target))
}

impl Server {
    /// Whether connections to one can be used for the other.
    pub fn has_same_connections(&self, other: &Server) -> bool {
        *self == Server { weight: self.weight, priority: self.priority, ..other.clone() }
    }

    /// Whether the server is a back-up of others.
    pub fn is_backup(&self) -> bool {
        self.priority > 0
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scheme {
    Http,
    Https,
    Unix,
}

/// How connections to the servers are made and used.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TransportSettings {
    pub protocol: UpstreamProtocol,
    pub host: HostField,
    /// Present if a server has an `https` URL.
    pub tls: Option<ClientTls>,
    /// How long resolved addresses are used before the name is resolved again.
    pub resolve: Duration,
    /// Servers that resolve the names of the servers; empty: the system's resolver.
    pub dns_servers: Vec<SocketAddr>,
    /// Each connection begins with a PROXY header, and serves one request.
    pub proxy_protocol: Option<ProxyVersion>,
}

/// The version of PROXY headers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ProxyVersion {
    V1,
    V2,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum UpstreamProtocol {
    Http1,
    Http2,
    Auto,
}

/// The value of Host or `:authority` in forwarded requests.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum HostField {
    Keep,
    Server,
    /// This text, which is valid as a field value.
    Fixed(String),
}

settings! {
    /// Servers of an upstream and connections to them, as written in the file.
    pub struct ServerSettings {
        /// `"http://HOST[:PORT]"`, `"https://HOST[:PORT]"`, `"unix:/PATH/OF/SOCKET"`. `weight` (default 1): share of the
        /// requests, relative to the other servers. `backup = true`: [only while no other server is
        /// available](#back-up-servers). `"srv://NAME"`, `"srv+https://NAME"`: [those of a service
        /// record](#servers-of-a-service-record). Required, unless `servers_file` or `builtin` is set.
        servers: Option<IdVec<ServerId, Server>> = Optional(Custom::or_empty(
            || Shape::OneOrList(Box::new(Shape::described(
                "URL, `{ url = URL, weight = 1 to 1000, backup = true }`,",
                Shape::AnyOf(vec![Shape::Text("URL"), Shape::Table(ServerTable::settings())]),
            ))),
            |item, report| read_servers(item, report, false),
        ));
        /// [File with `servers`](#servers-in-a-file), which is followed.
        servers_file: Option<SpannedString> = Text("path of a file", "\"servers.toml\"");
        /// `"echo"`: an upstream without servers, which responds with the request that it received.
        builtin: Option<()> = Optional(Choice((), &[("echo", ())]));
        /// `"auto"`: an `https` server chooses (HTTP/2 if it can), others get HTTP/1.1. `"http2"` without TLS uses prior
        /// knowledge; gRPC without TLS needs it.
        protocol: UpstreamProtocol = Choice(
            UpstreamProtocol::Auto,
            &[("auto", UpstreamProtocol::Auto), ("http1", UpstreamProtocol::Http1), ("http2", UpstreamProtocol::Http2)],
        );
        /// Host (or `:authority`) sent to the server. `"keep"`: the client's. `"server"`: the host of the server's URL
        /// (`localhost` for a socket). `X-Forwarded-Host` carries the client's.
        host: HostField = Custom {
            default: HostField::Keep,
            default_text: Some("\"keep\""),
            shape: || Shape::AnyOf(vec![Shape::Words(vec!["keep", "server"]), Shape::Text("a name")]),
            read: read_host_field,
        };
        /// How long resolved addresses of a name are used. An answer with a service record is used for its time to live, but not
        /// longer.
        resolve: Duration = Time(30 * SECOND, 1000..=DAY_MS);
        /// DNS servers that resolve the names of `servers`, in this order. Without it: names by the system's resolver, service
        /// records by the name servers of `/etc/resolv.conf`.
        dns_servers: Vec<SocketAddr> = Custom::or_empty(
            || Shape::one_or_list("`IP` or `IP:PORT`"),
            |item, report| {
                let words = item.strings(DNS_SERVER_EXAMPLE, report)?;
                words
                    .iter()
                    .map(|word| report.accept(word.span.clone(), parse_dns_server(word.text)))
                    .collect::<Option<Vec<_>>>()
            },
        );
        /// [PROXY header](#proxy-headers-to-servers) with the address of the client, as the first bytes of each connection.
        proxy_protocol: Option<ProxyVersion> =
            Optional(Choice(ProxyVersion::V1, &[("v1", ProxyVersion::V1), ("v2", ProxyVersion::V2)]));
        /// [TLS to the servers](#tls-to-upstreams), for `https`.
        tls: Option<ClientTlsSettings> = Optional(Inline::<ClientTlsSettings>::or("write `tls = { ca = \"FILE\" }`"));
    }
}

settings! {
    /// An item of `servers` that is a table.
    pub struct ServerTable {
        /// URL of the server.
        url: Option<SpannedString> = Required(Text("URL", "\"http://127.0.0.1:9001\""), SERVER_FIX);
        /// Share of the requests, relative to the other servers.
        weight: u32 = Integer(1, 1..=1000);
        /// Whether the server is used only while no other server is available.
        backup: bool = Boolean(false);
    }
}

pub fn read_upstreams(item: Option<Item>, report: &mut Report) -> Definitions<UpstreamId, Upstream> {
    let mut roots = SystemRoots::default();
    Definitions::read(item, report, |name, table, report| {
        let read = table.map(|table| read_upstream(table, &mut roots, report));
        let (settings, service, tls, policy) = read.unwrap_or_default();
        let ServerSettings { servers, protocol, host, resolve, dns_servers, proxy_protocol, .. } = settings;
        let target = service.map(Target::Service).or(servers.map(Target::Servers));
        Upstream {
            name: name.to_owned(),
            target: target.unwrap_or(Target::Echo),
            policy,
            transport: TransportSettings { protocol, host, tls, resolve, dns_servers, proxy_protocol },
        }
    })
}

fn read_upstream(
    mut table: Table,
    roots: &mut SystemRoots,
    report: &mut Report,
) -> (ServerSettings, Option<ServiceSource>, Option<ClientTls>, UpstreamPolicy) {
    let span = table.span.clone();
    let mut settings = ServerSettings::read(&mut table, report);
    let policy = UpstreamPolicy::read(&mut table, report);
    let given: Vec<Item> = table.items();
    let (servers, file) = (table.given("servers"), table.given("servers_file"));
    let (builtin, tls) = (table.given("builtin"), table.given("tls"));
    if let (Some(item), UpstreamProtocol::Http2) = (table.given("proxy_protocol"), settings.protocol) {
        let message =
            "`proxy_protocol` cannot be used with `protocol = \"http2\"`: a connection would serve one request";
        report.problem(item.key_span, message, "remove one of the two");
    }
    let is_misspelled = !table.finish(report).is_empty();
    let mut client_tls = None;
    let is_file = file.is_some();
    if let (Some(file), Some(_)) = (&file, &servers) {
        let message = "`servers` and `servers_file` are both given";
        report.missing(file.key_span.clone(), message, "remove one of the two");
    } else if let Some(file) = &settings.servers_file {
        let read = |top: &mut Table, report: &mut Report| {
            let item = top.require("servers", "write `servers = []` for a list without servers");
            item.and_then(|item| read_servers(&item, report, true))
        };
        settings.servers =
            read_named_file(file, SERVERS_FILE, NEW_SERVERS_FILE, report, read).and_then(|(_, list)| list);
    }
    let service = servers.as_ref().and_then(service_record);
    let service = service.filter(|_| settings.servers.is_some()).map(|(scheme, name)| ServiceSource {
        name: name.to_owned(),
        scheme,
        dns_servers: settings.dns_servers.clone(),
        resolve: settings.resolve,
    });
    match (builtin, servers.or(file)) {
        (None, None) if is_misspelled => {}
        (None, None) => {
            let fix =
                format!("write `servers = {SERVERS_EXAMPLE}`, or `builtin = \"echo\"` for an upstream without servers");
            report.missing(span, "the upstream has no `servers`", fix);
        }
        (Some(builtin), Some(_)) => {
            let servers = if is_file { "servers_file" } else { "servers" };
            let message = format!("`{servers}` and `builtin` are both given");
            report.missing(builtin.key_span, message, "remove this line to use the servers");
        }
        (Some(_), None) => {
            let keys = [&["protocol", "host", "resolve", "dns_servers", "proxy_protocol", "tls"], UpstreamPolicy::KEYS]
                .concat();
            for item in given.into_iter().filter(|item| keys.contains(&item.key)) {
                let message = format!("`{}` has no effect: the upstream has no `servers`", item.key);
                report.missing(item.key_span, message, "remove it, or write `servers` instead of `builtin`");
            }
        }
        (None, Some(item)) => {
            // Servers that cannot be read may have been meant to use https.
            let is_secure_service = service.as_ref().is_some_and(|service| service.scheme == Scheme::Https);
            let uses_https = |servers: &IdVec<ServerId, Server>| {
                is_secure_service || servers.iter().any(|server| server.scheme == Scheme::Https)
            };
            match (settings.servers.as_ref().map(uses_https), tls) {
                (Some(false), Some(tls)) if !is_file => {
                    let message = "`tls` has no effect: no server uses `https`";
                    let https = if service.is_some() { "srv+https://" } else { "https://" };
                    report.missing(tls.key_span, message, format!("remove it, or write `{https}` in `servers`"));
                }
                (Some(false) | None, None) => {}
                (_, tls) => {
                    let mut own = settings.tls.clone().unwrap_or_default();
                    own.server_name = own.server_name.or_else(|| service.as_ref()?.server_name());
                    client_tls = ClientTls::new(&own, tls.map_or(item.span, |tls| tls.span), roots, report);
                }
            }
        }
    }
    (settings, service, client_tls, policy)
}

/// The scheme of the servers and the name, if a URL is that of a service record.
fn split_service(url: &str) -> Option<(Scheme, &str)> {
    let plain = url.strip_prefix("srv://").map(|name| (Scheme::Http, name));
    plain.or_else(|| url.strip_prefix("srv+https://").map(|name| (Scheme::Https, name)))
}

/// The service record that `servers` consists of.
fn service_record<'d>(item: &Item<'d>) -> Option<(Scheme, &'d str)> {
    match item.one_or_all().as_slice() {
        [Item { value: DeValue::String(url), .. }] => split_service(url),
        _ => None,
    }
}

/// Parses an address with a port; without one, the port is 53.
pub fn parse_dns_server(text: &str) -> Parsed<SocketAddr> {
    let with_port = || text.parse().ok().filter(|server: &SocketAddr| server.port() != 0);
    text.parse::<IpAddr>().ok().map(|ip| (ip, DNS_PORT).into()).or_else(with_port).ok_or_else(|| {
        (format!("{} is not the address of a DNS server", quoted(text)), format!("write `{DNS_SERVER_EXAMPLE}`"))
    })
}

/// Reads servers: each is a URL, or a table with `url`. Only a list that changes `may_be_empty`.
fn read_servers(item: &Item, report: &mut Report, may_be_empty: bool) -> Option<IdVec<ServerId, Server>> {
    let items = item.one_or_all();
    if items.is_empty() && !may_be_empty {
        report.problem(item.span.clone(), "`servers` is an empty list", item.fix_with(SERVERS_EXAMPLE));
    }
    let mut servers: IdVec<ServerId, Server> = IdVec::new();
    let mut urls: HashMap<(String, u16), String> = HashMap::new();
    if let (Some((_, name)), false) = (service_record(item), may_be_empty) {
        if !is_name(name.strip_suffix('.').unwrap_or(name)) {
            let message = format!("{} is not the name of a service record (SRV)", quoted(name));
            return report.reject(item.span.clone(), message, format!("write `servers = {SERVICE_EXAMPLE}`"));
        }
        return Some(servers);
    }
    for item in items {
        let server = match item.value {
            DeValue::Table(_) => {
                item.table("a server", SERVER_FIX, report).map(|table| ServerTable::read_all(table, report))
            }
            _ => Text("URL", SERVERS_EXAMPLE).read(&item, report).map(|url| ServerTable {
                url,
                weight: 1,
                backup: false,
            }),
        };
        let Some(ServerTable { url: Some(url), weight, backup }) = server else { continue };
        let Some((scheme, host, port)) = report.accept(url.span.clone(), parse_server_url(&url.text)) else { continue };
        if let Some(other) = urls.insert((host.clone(), port), url.text.clone()) {
            let message = format!("{} is the same server as {}", quoted(&url.text), quoted(&other));
            report.problem(url.span, message, "remove one of the two");
        }
        let priority = if backup { BACKUP_PRIORITY } else { 0 };
        servers.push(Server { url: url.text, scheme, host, port, weight, priority });
    }
    if !may_be_empty && !servers.is_empty() && servers.iter().all(Server::is_backup) {
        let message = "all servers have `backup = true`";
        report.problem(item.span.clone(), message, "remove it from the servers that are used first");
    }
    (may_be_empty || !servers.is_empty()).then_some(servers)
}

/// Parses the URL of a server into scheme, host in lower case, and port.
fn parse_server_url(url: &str) -> Parsed<(Scheme, String, u16)> {
    if let Some(path) = url.strip_prefix("unix:") {
        return parse_socket_path(url, path, "unix:").map(|path| (Scheme::Unix, path.to_owned(), 0));
    }
    let invalid = |what: &str, scheme: &str, rest: &str| {
        Err((format!("{} {what}", quoted(url)), format!("write `\"{scheme}://{}\"`", rest.trim())))
    };
    match url.split_once("://") {
        Some(("http", rest)) => parse_authority(url, rest, HTTP).map(|(host, port)| (Scheme::Http, host, port)),
        Some(("https", rest)) => {
            parse_authority(url, rest, ("https", 443)).map(|(host, port)| (Scheme::Https, host, port))
        }
        Some((scheme, rest)) => match scheme.to_ascii_lowercase().as_str() {
            scheme @ ("http" | "https") => invalid("is not a server URL", scheme, rest),
            "srv" | "srv+https" => {
                let fix = format!("a service record is the only server: write `servers = {SERVICE_EXAMPLE}`");
                Err((format!("{} is one of several servers", quoted(url)), fix))
            }
            "http+srv" | "dns+srv" | "dnssrv" => invalid("has a scheme that is not supported", "srv", rest),
            scheme @ ("grpc" | "h2c" | "grpcs" | "h2") => {
                let http = if scheme.ends_with('c') { "http" } else { "https" };
                let fix = format!("write `\"{http}://{rest}\"`, and `protocol = \"http2\"`");
                Err((format!("{} has a scheme that is not supported", quoted(url)), fix))
            }
            _ => invalid("has a scheme that is not supported", "http", "HOST:PORT"),
        },
        None => invalid("is not a server URL", "http", if url.is_empty() { "HOST:PORT" } else { url }),
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
            report.reject(word.span, message, fix)
        }
    }
}

settings! {
    /// Load balancing, health and limits of an upstream's servers. Limits count in the whole process.
    pub struct UpstreamPolicy checked by check_policy {
        /// `"least-requests"`: of two random servers, the one with fewer requests in flight relative to its weight.
        /// `"round-robin"`: in turn, by weight; the requests to a server with a high weight are spread evenly. `{ hash =
        /// "cookie:session" }`: [by hash](#load-balancing-by-hash).
        balance: LoadBalancing = Custom {
            default: LoadBalancing::LeastRequests,
            default_text: Some("\"least-requests\""),
            shape: || Shape::AnyOf(vec![
                Shape::Words(vec!["least-requests", "round-robin"]),
                Shape::described("`{ hash = … }`", Shape::map_of(Shape::one_or_list("part of a key"))),
            ]),
            read: read_balance,
        };
        /// [Active health checks](#health-checks).
        health: Option<HealthChecks> = Optional(Inline::<HealthChecks>::or("write `health = { path = \"/healthz\" }`"));
        /// [Ejection of failing servers](#ejection).
        ejection: Option<Ejection> =
            InlineOrFalse(Inline::<Ejection>::or("write `ejection = { failures = 5 }`, or `ejection = false`"));
        /// [Retries](#retries).
        retries: Option<Retries> =
            InlineOrFalse(Inline::<Retries>::or("write `retries = { attempts = 2 }`, or `retries = false`"));
        /// Time over which the weight of a server grows from a tenth to the full weight after it was unhealthy or ejected, or
        /// was added to other servers.
        slow_start: Duration = TimeOrZero(30 * SECOND);
        /// Requests in flight to the upstream, until the end of their responses, in the whole process. Further requests get
        /// 503 at once.
        max_requests: Option<u32> = Optional(Integer(0, 1..=COUNT_MAX));
        /// Connections to each server, divided between the workers. Each worker may open at least one, so use a multiple of
        /// `workers`. HTTP/2: requests wait when all streams that the server allows on these connections are in use.
        max_connections: Option<u32> = Optional(Integer(0, 1..=COUNT_MAX));
        /// Idle HTTP/1.1 connections kept to each server, see below.
        max_idle_connections: u32 = Integer(10_000, 0..=COUNT_MAX);
        /// Requests that wait for a connection because of `max_connections`, in the whole process. A further request gets
        /// 503 at once, and a request that has waited for `timeouts.connect` gets 503.
        max_pending: u32 = Integer(1024, 0..=COUNT_MAX);
        /// How long a request [waits while no server is reachable](#requests-that-wait-for-a-server), instead of failing at once.
        hold: Option<Duration> = Optional(Time(5 * SECOND, 1..=HOLD_MAX_MS));
        /// Requests that wait because of `hold`, in the whole process. A further request gets 503 at once.
        max_held: u32 = Integer(1000, 1..=COUNT_MAX);
    }
}

fn check_policy(_policy: &mut UpstreamPolicy, table: &mut Table, report: &mut Report) {
    for key in ["ip_hash", "hash", "hash_key"] {
        table.suggest_for(key, "balance", "write `balance = { hash = \"ip\" }`");
    }
    table.suggest_for("least_conn", "balance", "write `balance = \"least-requests\"`");
    for key in ["strategy", "policy", "lb_policy", "algorithm", "load_balancing", "lb"] {
        let given = table.given(key).and_then(|item| foreign_balancing(item.value));
        let fix = match given {
            Some(value) => format!("write `balance = {value}`"),
            None => "write `balance = \"least-requests\"`, or `balance = \"round-robin\"`".to_owned(),
        };
        table.suggest_for(key, "balance", fix);
    }
    suggest_ca(table, "tls", "tls = { ca = \"FILE\" }");
    for (key, needed) in [("max_pending", "max_connections"), ("max_held", "hold")] {
        if let (Some(item), None) = (table.given(key), table.given(needed)) {
            let message = format!("`{key}` has no effect without `{needed}`");
            report.missing(item.key_span, message, format!("add `{needed}`, or remove it"));
        }
    }
}

#[derive(Clone, PartialEq, Debug)]
pub enum LoadBalancing {
    /// Of two random servers, the one with fewer requests in flight.
    LeastRequests,
    RoundRobin,
    /// The same server for the same values of these parts of the request, while the server is available.
    Hash(Vec<KeyPart>),
}

/// Names of other products, and what is written here instead. Lists, in which messages put no other value.
const FOREIGN_BALANCING: [(&[&str], &str); 4] = [
    (&["ip_hash", "ip-hash", "source", "source_ip"], "{ hash = [\"ip\"] }"),
    (&["uri", "uri_hash"], "{ hash = [\"path\"] }"),
    (&["least_conn", "leastconn", "least-conn", "least_request", "random", "p2c"], "\"least-requests\""),
    (&["roundrobin", "round_robin", "static-rr", "weighted"], "\"round-robin\""),
];

fn foreign_balancing(value: &DeValue<'_>) -> Option<&'static str> {
    let name = value.as_str()?;
    FOREIGN_BALANCING.iter().find(|(names, _)| names.contains(&name)).map(|(_, value)| *value)
}

fn read_balance(item: &Item, report: &mut Report) -> Option<LoadBalancing> {
    if let (DeValue::String(text), Some(value)) = (item.value, foreign_balancing(item.value)) {
        return report.reject(item.span.clone(), format!("`balance` cannot be {}", quoted(text)), item.fix_with(value));
    }
    let DeValue::Table(_) = item.value else {
        let words = [("least-requests", Some(true)), ("round-robin", Some(false)), ("hash", None)];
        let Some(is_least) = item.choice(&words, report)? else {
            let message = "`balance = \"hash\"` does not say what is hashed";
            return report.reject(item.span.clone(), message, item.fix_with(HASH_EXAMPLE));
        };
        return Some(if is_least { LoadBalancing::LeastRequests } else { LoadBalancing::RoundRobin });
    };
    let mut table = item.table("`balance`", &item.fix_with(HASH_EXAMPLE), report)?;
    let parts = table.require("hash", item.fix_with(HASH_EXAMPLE));
    let parts = parts.and_then(|item| read_hash_parts(&item, report));
    table.finish(report);
    parts.map(LoadBalancing::Hash)
}

/// Reads the key parts to hash. Only parts that exist on every route are allowed.
fn read_hash_parts(item: &Item, report: &mut Report) -> Option<Vec<KeyPart>> {
    let parts = key::read_whole_parts(item, report)?;
    for part in &parts {
        let Some(why) = KeyKind::of(part).not_hashed else { continue };
        let hashed = KINDS.into_iter().filter(|kind| kind.not_hashed.is_none()).filter_map(KeyKind::form);
        let fix = format!("hash {}", quoted_list(hashed, "or"));
        return report.reject(item.span.clone(), why, fix);
    }
    Some(parts)
}

settings! {
    /// Active health checks.
    pub struct HealthChecks {
        /// Target of the check.
        path: String = Required(
            Custom::or_empty(|| Shape::Text("path, with an optional query"), read_health_path),
            "write `path = \"/healthz\"`, or `path = \"/\"`",
        );
        /// Method.
        method: &'static str = Choice("GET", &[("GET", "GET"), ("HEAD", "HEAD"), ("OPTIONS", "OPTIONS")]);
        /// Host field. Without it: the server's address.
        host: Option<String> = Word { shape: "name", example: "\"api.example.com\"", read: read_health_host };
        /// Time from the end of a check to the next, ±10 %.
        interval: Duration = Time(10 * SECOND, 10..=DAY_MS);
        /// Time for a whole check, including its connection.
        timeout: Duration = Time(5 * SECOND, 10..=DAY_MS);
        /// Healthy responses.
        status: Vec<RangeInclusive<u16>> = Custom {
            default: vec![200..=299],
            default_text: Some("\"200-299\""),
            shape: || Shape::described("status code, range such as `\"200-299\"`, or list", Shape::OneOrList(Box::new(Shape::AnyOf(vec![
                    Shape::Integer(100..=599),
                    Shape::Text("range"),
                ])))),
            read: |item, report| Some(read_status_ranges(item, report)),
        };
        /// Failed checks in a row that make a server unhealthy.
        unhealthy_after: u32 = Integer(3, 1..=1000);
        /// Passed checks in a row that make it healthy again.
        healthy_after: u32 = Integer(2, 1..=1000);
    }
}

fn read_health_path(item: &Item, report: &mut Report) -> Option<String> {
    let word = item.string("\"/healthz\"", report)?;
    let is_valid = |byte: u8| byte.is_ascii_graphic() && !b"#\"<>\\^`{|}".contains(&byte);
    if !word.text.starts_with('/') || !word.text.bytes().all(is_valid) {
        let message = format!("{} is not a valid request path", quoted(word.text));
        let fix = "write a path such as `\"/healthz\"`, with other characters as `%XX`";
        return report.reject(word.span, message, fix);
    }
    Some(word.text.to_owned())
}

fn read_health_host(word: &SpannedStr, report: &mut Report) -> Option<String> {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte);
    if word.text.is_empty() || !word.text.bytes().all(is_valid) {
        let message = format!("{} is not a valid Host field", quoted(word.text));
        return report.reject(word.span.clone(), message, "write a host such as `\"api.example.com\"`");
    }
    Some(word.text.to_owned())
}

/// Reads status codes and ranges of status codes.
fn read_status_ranges(item: &Item, report: &mut Report) -> Vec<RangeInclusive<u16>> {
    let items = item.one_or_all();
    if items.is_empty() {
        report.problem(item.span.clone(), "`status` is an empty list", item.fix_with("\"200-299\""));
    }
    let read = |item: &Item| {
        if let DeValue::Integer(_) = item.value {
            let status = item.integer(100..=599, report).and_then(|status| u16::try_from(status).ok())?;
            return Some(status..=status);
        }
        let word = item.string("\"200-299\"", report)?;
        let (from, to) = word.text.split_once('-').unwrap_or((word.text, word.text));
        let status = |text: &str| text.trim().parse().ok().filter(|status| (100..=599).contains(status));
        let range = status(from).zip(status(to)).filter(|(from, to)| from <= to);
        if range.is_none() {
            let message = format!("{} is not a range of status codes", quoted(word.text));
            report.problem(word.span, message, "write a range such as `\"200-299\"`, or a status such as `204`");
        }
        range.map(|(from, to)| from..=to)
    };
    items.iter().filter_map(read).collect()
}

settings! {
    /// Passive health checks: ejection of servers that fail requests.
    pub struct Ejection checked by check_ejection {
        /// Failures in a row, over all workers, that eject a server.
        failures: u32 = Integer(5, 1..=1000);
        /// Responses that count as failures.
        statuses: Vec<u16> = Custom::or_empty(|| Shape::List(Box::new(Shape::Integer(400..=599))), |item, report| {
            let items = item.list("[502, 503, 504]", report)?;
            Some(items.iter().filter_map(|item| read_error_status(item, report)).collect::<Vec<_>>())
        });
        /// Length of the first ejection; it doubles with each further ejection.
        time: Duration = Time(10 * SECOND, 1..=DAY_MS);
        /// Longest ejection; at least `time`. A server without an ejection for this long starts again with `time`.
        max_time: Duration = Time(300 * SECOND, 1..=DAY_MS);
        /// Share of the servers that may be ejected at a time. One server may always be ejected, unless it is the only one.
        max_ejected: u8 = Percent(50);
    }
}

fn check_ejection(ejection: &mut Ejection, table: &Table, report: &mut Report) {
    match table.given("max_time") {
        Some(item) if ejection.max_time < ejection.time => {
            report.problem(item.span, "`max_time` is shorter than `time`", "write a longer time, or remove it");
        }
        _ => ejection.max_time = ejection.max_time.max(ejection.time),
    }
}

/// Reads an error status code, from 400 to 599.
fn read_error_status(item: &Item, report: &mut Report) -> Option<u16> {
    item.integer(400..=599, report).and_then(|status| u16::try_from(status).ok())
}

settings! {
    /// Repeated attempts to forward a request, where a repetition is safe.
    pub struct Retries {
        /// Tries after the first. Without it: one for each other server, at most 2; with `hold`, 2.
        attempts: Option<u32> = Optional(Integer(2, 0..=10));
        /// `"connect-failure"`; `"reset"`: the connection ended before a response; `"timeout"`: of `try_timeout`; status
        /// codes 400 to 599. A request that may have had an effect is retried only after `"connect-failure"`, or if nothing
        /// was sent.
        on: RetryCauses = Custom {
            default: RetryCauses { connect_failure: true, reset: true, timeout: true, statuses: Vec::new() },
            default_text: Some("[\"connect-failure\", \"reset\", \"timeout\"]"),
            shape: || Shape::OneOrList(Box::new(Shape::AnyOf(vec![
                Shape::Words(CAUSES.to_vec()),
                Shape::Integer(400..=599),
                Shape::Text("a status code in quotes"),
            ]))),
            read: |item, report| Some(read_retry_causes(item, report)),
        };
        /// Time for each try of a repeatable request, until the response head. Without it, a server that hangs holds a
        /// request for `timeouts.response_head`, and the request then fails.
        try_timeout: Option<Duration> = Optional(Time(2 * SECOND, 1..=DAY_MS));
        /// Retries, relative to the requests of the last ten seconds.
        budget: u32 = Percent(20);
        /// Retries per second allowed in addition to `budget`, in the whole process; divided between the workers.
        budget_min: u32 = Integer(10, 0..=COUNT_MAX);
    }
}

/// The conditions of a retry.
#[derive(Clone, PartialEq, Debug)]
pub struct RetryCauses {
    pub connect_failure: bool,
    pub reset: bool,
    /// After `try_timeout`.
    pub timeout: bool,
    pub statuses: Vec<u16>,
}

/// Reads the conditions of a retry: names, and status codes with or without quotes.
fn read_retry_causes(item: &Item, report: &mut Report) -> RetryCauses {
    let example = "[\"connect-failure\", \"reset\", 503]";
    let mut causes = RetryCauses { connect_failure: false, reset: false, timeout: false, statuses: Vec::new() };
    for item in item.one_or_all() {
        if let DeValue::Integer(_) = item.value {
            causes.statuses.extend(read_error_status(&item, report));
            continue;
        }
        let Some(word) = item.string(example, report) else { continue };
        match word.text {
            "connect-failure" => causes.connect_failure = true,
            "reset" => causes.reset = true,
            "timeout" => causes.timeout = true,
            text => match (text.parse(), nearest(text, CAUSES)) {
                (Ok(status @ 400..=599), _) => causes.statuses.push(status),
                (_, guess) => {
                    let fix = "write `connect-failure`, `reset`, `timeout`, or a status code such as `503`";
                    let fix = guess.map_or(fix.to_owned(), |guess| format!("did you mean `\"{guess}\"`?"));
                    report.problem(word.span, format!("{} is not a retry condition", quoted(text)), fix);
                }
            },
        }
    }
    causes
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
        let hosts = "http:// http://:80 http://::1 http://::1:80 http://[::1 http://[x]:1 http://é http://a..b http://10.0.0.256";
        let others =
            "http://a:0 http://a: http://a:+1 http://a:65536 http://u@h http://h/ https://h/ https:// ftp://h h:1";
        let schemes = "HTTP://h unix: unix:run/x.sock unix:///run/x.sock";
        for url in [hosts, others, schemes].iter().flat_map(|urls| urls.split(' ')).chain(["", "http://a b"]) {
            assert!(parse_server_url(url).is_err(), "{url}");
        }
    }
}
