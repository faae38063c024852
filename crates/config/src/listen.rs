//! `[listen]` and `[admin]`: addresses, TLS for clients, limits on connections, PROXY protocol and trusted proxies.
//!
//! This file binds no socket. `listen_address` reads one address.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use http::HeaderName;
use rustls_pki_types::CertificateDer;
use toml::de::DeValue;

use super::LogTarget;
use super::acme::{self, Acme};
use super::certificate::{self, Certificate, CertificateFiles, RevocationList};
use super::client_tls::check_pair;
use super::diagnostics::{Report, quoted};
use super::host::read_hosts;
use super::listen_address::{
    EXAMPLE, ListenAddress, ListenSocket, address_shape, is_socket_table, parse_address, read_socket, read_sockets,
    written_addresses,
};
use super::settings::{
    Choice, Custom, Integer, Kind, OFF_FIX, Optional, Required, Restart, Section, Setting, Shape, Tables, Word, Words,
};
use super::toml_reader::{Item, SpannedStr, SpannedString, Table};
use super::trusted_proxies;
use super::values::{Secret, read_network};
use transom_http::client_address::AddressRange;
use transom_http::forwarded::{ForwardedField, HOPS_MAX};
use transom_limiter::ip_prefix::Network;

const DEFAULT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);
const HTTP_OFF_FIX: &str =
    "remove the line: without it, nothing listens for HTTP where `https`, `ratelimit_service` or `forward_auth` is set";
const TOKENS_FIX: &str = "write `[[admin.tokens]]`, then its `name`, its `file` and its `role`";
const HTTPS_FIX: &str = "write `[listen.https]`, then its `address`, its `certificate` and its `private_key`";

settings! {
    /// Addresses, limits on connections, and proxies in front of the gateway.
    pub struct Listen checked by check_listen {
        /// Addresses for HTTP without TLS. The default applies unless `https`, `ratelimit_service` or `forward_auth` is set.
        /// Port 0 chooses a free port.
        /// Addresses of one port must not overlap, as `0.0.0.0:80` and `127.0.0.1:80` do. [Unix sockets](#unix-sockets) have a path.
        http: Vec<ListenSocket> = Restart(Custom {
            default: vec![ListenAddress::Tcp(DEFAULT).into()],
            default_text: Some(EXAMPLE),
            shape: address_shapes,
            read: |item, report| match item.is_off() {
                false => read_sockets(item, EXAMPLE, ", or remove `http`: this is the default", report),
                true => report.reject(item.span.clone(), "`http` cannot be turned off", HTTP_OFF_FIX),
            },
        });
        /// Addresses for TLS, see [`[listen.https]`](#listenhttps).
        https: Vec<Https> = Custom::or_empty(
            || Shape::OneOrList(Box::new(Shape::Table(https_settings()))),
            read_https_listeners,
        );
        /// Addresses of the [rate limit service](../guides/envoy.md) that Envoy asks: gRPC over HTTP/2 without TLS. With
        /// TLS: a table as `[listen.https]`. A change of the addresses needs a restart.
        ratelimit_service: Option<RatelimitService> = Custom::or_empty(
            || Shape::AnyOf(vec![
                address_shapes(),
                Shape::Table(https_settings()),
            ]),
            |item, report| read_ratelimit_service(item, report).map(Some),
        );
        /// Addresses on which [nginx](../guides/nginx.md), [Caddy](../guides/caddy.md) and [Traefik](../guides/traefik.md) ask
        /// about requests that they forward themselves. The request is taken from `X-Forwarded-Method`, `-Uri`, `-Host`,
        /// `-Proto` and `-For`, which are trusted, so let only these proxies connect. Without `X-Forwarded-For`, the
        /// client is the proxy. The request is matched to the routes, and gets 200 instead of being forwarded. A `respond` that
        /// is no success and a `redirect` are sent as they are.
        forward_auth: Vec<ListenSocket> = Restart(Custom::or_empty(address_shapes, |item, report| {
            read_sockets(item, "\"127.0.0.1:8082\"", ", or remove `forward_auth`", report)
        }));
        /// Address of the [dashboard](../guides/dashboard.md), `/metrics`, `/upstreams`, `/healthz`, `/readyz`, `/v1/top` and the
        /// [decision API](../guides/decision-api.md).
        admin: Option<ListenSocket> = Restart(Custom::or_empty(address_shape, |item, report| {
            read_socket(item, "\"127.0.0.1:9900\"", report).map(Some)
        }));
        /// Addresses that serve only `/metrics`, `/healthz` and `/readyz`: who can connect can read the metrics, and can neither
        /// change counters nor see keys. See [Monitor with Prometheus](../guides/monitoring.md).
        metrics: Vec<ListenSocket> = Restart(Custom::or_empty(address_shapes, |item, report| {
            read_sockets(item, "\"127.0.0.1:9901\"", ", or remove `metrics`", report)
        }));
        /// Balancers whose connections must begin with a PROXY header (version 1 or 2), see [Trusted
        /// proxies](#trusted-proxies). `"unix:"` stands for the callers of Unix sockets.
        proxy_protocol: Vec<AddressRange> = Words {
            shape: "network or `\"unix:\"`",
            example: "[\"10.0.0.0/8\"]",
            or: ", or remove it: no PROXY header is then accepted",
            read: read_range,
        };
        /// Connections that may wait in the kernel to be accepted, on each socket. A worker has one per address of TCP. The kernel
        /// reduces it to `net.core.somaxconn`.
        backlog: i32 = Integer(4096, 1..=65_535);
        /// Client connections on all addresses together. Without it: half of the process's file descriptors minus 128, at
        /// most 65536. A further connection is closed at once; without TLS it first gets a 503. The default reserves one
        /// file descriptor per client for its upstream connection, and 128 for files and listeners.
        max_connections: Option<usize> = Optional(Integer(0, 1..=10_000_000));
        /// Connections of one IPv4 address or one IPv6 /64 network. Without it: no limit. With `proxy_protocol`, the
        /// address of the PROXY header counts. Clients behind a balancer that sends no PROXY headers share one limit.
        max_connections_per_client: Option<u32> = Optional(Integer(0, 1..=1_000_000));
        /// Proxies whose `X-Forwarded-For` (or `Forwarded`) is trusted, see [Trusted proxies](#trusted-proxies). `"unix:"`
        /// stands for the callers of Unix sockets. Without it, the client is the peer of the connection.
        trusted_proxies: Vec<AddressRange> = Words {
            shape: "network or `\"unix:\"`",
            example: "[\"10.0.0.0/8\", \"fd00::/8\"]",
            or: ", or remove it: no proxy is then trusted",
            read: read_range,
        };
        /// Files with further trusted networks, as providers publish them: one network or address on a line, `#` begins a comment.
        /// A change is applied like a change of the configuration. A file without networks is rejected.
        trusted_proxies_file: Vec<Vec<Network>> = Words {
            shape: "path of a file",
            example: "\"cloudflare.txt\"",
            or: ", or remove it: the networks of `trusted_proxies` are then trusted alone",
            read: trusted_proxies::read_networks_file,
        };
        /// The place of the client in the field, counted from the end, whatever the addresses behind it: `2` for `client` in
        /// `X-Forwarded-For: forged, client, balancer`. The peer must be a trusted proxy. If the list is shorter, or has no
        /// address at this place, the client is the peer. Without it: the first address from the end that is no trusted proxy.
        trusted_hops: Option<usize> = Optional(Integer(0, 1..=HOPS_MAX as u64));
        /// A field in which trusted proxies name the client instead, such as `cf-connecting-ip`, `true-client-ip` or `x-real-ip`.
        /// If it does not have exactly one address, the client is the peer. The field is passed on only if it named the client.
        client_ip: Option<HeaderName> = Word {
            shape: "field name",
            example: "\"cf-connecting-ip\"",
            read: trusted_proxies::read_client_field,
        };
        /// The field that trusted proxies set. The gateway neither reads nor passes on the other field.
        forwarded: ForwardedField = Choice(
            ForwardedField::XForwardedFor,
            &[("x-forwarded-for", ForwardedField::XForwardedFor), ("forwarded", ForwardedField::Forwarded)],
        );
    }
}

/// The listener of Envoy's rate limit service.
#[derive(Clone, PartialEq, Debug)]
pub enum RatelimitService {
    Cleartext(Vec<ListenSocket>),
    Tls(Box<Https>),
}

impl RatelimitService {
    pub fn addresses(&self) -> &[ListenSocket] {
        match self {
            RatelimitService::Cleartext(addresses) => addresses,
            RatelimitService::Tls(https) => &https.address,
        }
    }

    pub fn tls(&self) -> Option<&Https> {
        match self {
            RatelimitService::Cleartext(_) => None,
            RatelimitService::Tls(https) => Some(&**https),
        }
    }
}

settings! {
    /// Settings of the admin address.
    pub struct Admin checked by check_admin {
        /// Names that are accepted in `Host` on the admin address and on those of `metrics`, for scrapers that use a name.
        /// `*.` at the beginning stands for any labels. IP addresses and `localhost` are always accepted. Other names get 421, so
        /// that a web page cannot reach the admin address through its own name (DNS rebinding).
        hosts: Vec<String> = Custom::or_empty(|| Shape::one_or_list("name"), |item, report| {
            read_hosts(item, "the admin address then accepts IP addresses and `localhost`", report)
        });
        /// File with a token that has every right. With it or `tokens`, each request but `GET` and `HEAD` needs the field
        /// `Authorization: Bearer TOKEN`, and gets 401 without it. Spaces and line ends around the token are ignored. `transom
        /// explain`, `top` and `clients show` send the token. Without tokens, anyone who can connect to the admin address can use
        /// up and reset every limit.
        token as "token_file": Option<Secret<String>> =
            Word { shape: "file", example: "\"admin.token\"", read: |word, report| read_token("token_file", word, report) };
        /// Named tokens, each with a [role](admin-api.md#tokens-and-roles). With them, `GET` of `/v1/` needs a token
        /// too. `/metrics`, `/healthz`, `/readyz`, `/upstreams` and the page of the dashboard need none.
        tokens: Vec<AdminToken> = Tables::<AdminToken>::or("the token", TOKENS_FIX);
        /// Where changes are recorded, [a JSON line each](admin-api.md#audit-log): a path, which starts at the working
        /// directory of the process, or `"stdout"`. The gateway does not start, and changes are
        /// refused, if the path cannot be opened.
        audit_log: Option<LogTarget> = Custom::or_empty(|| Shape::Text("path, `\"stdout\"`"), |item, report| {
            let word = item.string("\"stdout\"", report)?;
            let fix = "write `audit_log = \"stdout\"`, or the path of a file";
            LogTarget::read(item, word.text, fix, report).map(Some)
        });
        /// How finely [`/v1/top`](../guides/decision-api.md#busiest-keys) counts the busiest keys of each rule: a count is at
        /// most one in `top_keys` of the rule's requests too high. Each worker follows up to twice as many keys, once by
        /// refused and once by admitted requests. `0`: keys are not counted.
        top_keys: usize = Integer(250, 0..=10_000);
    }
}

settings! {
    /// A named token of the admin address.
    pub struct AdminToken {
        /// Name of the token, in the audit log.
        name: Option<String> =
            Required(Word { shape: "name", example: "\"support\"", read: read_token_name }, "write `name = \"support\"`");
        /// File with the token.
        token as "file": Option<Secret<String>> = Required(
            Word { shape: "file", example: "\"support.token\"", read: |word, report| read_token("file", word, report) },
            "write `file = \"support.token\"`",
        );
        /// What requests with the token may do. Each role includes the ones before.
        role: Role = Required(
            Choice(Role::Read, &[("read", Role::Read), ("operate", Role::Operate), ("clients", Role::Clients)]),
            "write `role = \"read\"`, `\"operate\"` or `\"clients\"`",
        );
    }
}

/// What requests with a token of the admin address may do. Each role includes the ones before.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Role {
    /// Read, and ask what a request would get.
    Read,
    /// Also charge and reset counters, deny requests, and grant tokens.
    Operate,
    /// Also change clients.
    Clients,
}

impl Role {
    /// As configured.
    pub fn name(self) -> &'static str {
        match self {
            Role::Read => "read",
            Role::Operate => "operate",
            Role::Clients => "clients",
        }
    }
}

/// A token that the admin address accepts.
#[derive(Clone, Copy, Debug)]
pub struct KnownToken<'a> {
    pub name: &'a str,
    pub secret: &'a Secret<String>,
    pub role: Role,
}

impl Admin {
    /// The name of the token of `token_file`.
    const UNNAMED: &'static str = "token_file";

    /// All tokens.
    pub fn known_tokens(&self) -> impl Iterator<Item = KnownToken<'_>> {
        let unnamed = self.token.iter().map(|secret| KnownToken { name: Admin::UNNAMED, secret, role: Role::Clients });
        let named = self.tokens.iter().filter_map(|token| {
            let AdminToken { name, token, role } = token;
            Some(KnownToken { name: name.as_ref()?, secret: token.as_ref()?, role: *role })
        });
        unnamed.chain(named)
    }
}

fn check_admin(admin: &mut Admin, table: &mut Table, report: &mut Report) {
    let fix = "write the token to a file, then `token_file = \"admin.token\"`";
    table.suggest_for("token", "token_file", fix.to_owned());
    let names: Vec<_> = table.given("tokens").iter().flat_map(Item::tables).map(|token| token.given("name")).collect();
    for (position, token) in admin.tokens.iter().enumerate() {
        let Some(Some(item)) = names.get(position) else { continue };
        let others = || admin.tokens[..position].iter();
        let is_same_secret = |other: Option<&Secret<String>>| {
            token.token.as_ref().zip(other).is_some_and(|(token, other)| token.0 == other.0)
        };
        if token.name.is_some() && others().any(|other| other.name == token.name) {
            report.problem(item.span.clone(), "two tokens have this name", "give each token a name of its own");
        } else if is_same_secret(admin.token.as_ref()) || others().any(|other| is_same_secret(other.token.as_ref())) {
            let message = "this token is also that of another file, so its name and role are not clear";
            report.problem(item.span.clone(), message, "create a random token: `openssl rand -hex 32`");
        }
    }
}

fn read_token_name(word: &SpannedStr, report: &mut Report) -> Option<String> {
    let is_name = |name: &str| {
        !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || ['-', '_', '.'].contains(&c))
    };
    match word.text {
        Admin::UNNAMED => {
            report.reject(word.span.clone(), "this is the name of the token of `token_file`", "write another name")
        }
        name if is_name(name) => Some(name.to_owned()),
        name => {
            let message = format!("{} is not a name of letters, digits, `-`, `_` and `.`", quoted(name));
            report.reject(word.span.clone(), message, "write a name, such as `\"support\"`")
        }
    }
}

/// Reads the file with a token of the admin address.
fn read_token(setting: &str, word: &SpannedStr, report: &mut Report) -> Option<Secret<String>> {
    let file = SpannedString::new(setting, word);
    let content = file.read_file(report)?;
    let token = content.trim_ascii();
    let problem = if token.is_empty() {
        "contains no token"
    } else if !token.iter().all(u8::is_ascii_graphic) {
        "contains a token that no header field can carry: printable ASCII without spaces is possible"
    } else {
        return Some(Secret(String::from_utf8_lossy(token).into_owned()));
    };
    let fix = "create a random token: `openssl rand -hex 32`";
    report.reject(word.span.clone(), format!("{} {problem}", quoted(word.text)), fix)
}

settings! {
    /// Addresses for HTTP over TLS, and their certificates. The default certificate has settings of its own,
    /// `CertificateFiles`.
    pub struct Https checked by check_https {
        /// Addresses for TLS; HTTP/2 and HTTP/1.1 by ALPN.
        address: Vec<ListenSocket> = Restart(Required(
            Custom::or_empty(address_shapes, |item, report| read_sockets(item, "\"0.0.0.0:443\"", "", report)),
            "write `address = \"0.0.0.0:443\"`",
        ));
        /// Further certificates, each with `certificate` and `private_key`. They are chosen by the client's server name
        /// (SNI) among the DNS names in subjectAltName: exact names first, then `*.` in place of one label. An RSA and an
        /// ECDSA certificate may have the same name: the first one that the client's algorithms permit is used.
        certificates: Vec<Certificate> = Custom::or_empty(
            || Shape::List(Box::new(Shape::Table(CertificateFiles::settings()))),
            read_certificates,
        );
        /// Authorities that issue client certificates. Without it: clients are not asked for a certificate.
        client_ca: Option<Vec<CertificateDer<'static>>> = Word {
            shape: "PEM file",
            example: "\"FILE\"",
            read: |word, report| {
                let read = certificate::read_authorities(&SpannedString::new("client_ca", word), report);
                Some(read.unwrap_or_default())
            },
        };
        /// With `client_ca`. `"required"`: connections without a certificate are rejected. `"optional"`: they are accepted.
        /// A certificate that cannot be verified is always rejected.
        client_auth: ClientAuth = Choice(
            ClientAuth::Required,
            &[("required", ClientAuth::Required), ("optional", ClientAuth::Optional)],
        );
        /// Certificate revocation lists, one or more in each file. Without it: no revocation check. Revoked certificates
        /// are rejected. Every certificate up to those of `client_ca` then needs a valid list of its issuer, as with nginx
        /// and HAProxy; a client without such a list is rejected.
        client_crl: Vec<Vec<RevocationList>> = Words {
            shape: "PEM file",
            example: "\"FILE\"",
            or: ", or remove it: no certificate is then treated as revoked",
            read: |word, report| RevocationList::read(&SpannedString::new("client_crl", word), report),
        };
        /// Lowest TLS version.
        min_version: TlsVersion = Choice(TlsVersion::V1_2, &[("1.2", TlsVersion::V1_2), ("1.3", TlsVersion::V1_3)]);
        /// Order a [certificate over ACME](#acme), and renew it. `certificate` is then optional; the ordered certificate is used for its names.
        acme: Option<Acme> = acme::kind();
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClientAuth {
    Required,
    Optional,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TlsVersion {
    V1_2,
    V1_3,
}

/// Whether requests have a verified client certificate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClientCerts {
    Never,
    Sometimes,
    Always,
}

impl Listen {
    /// The first setting with other addresses, or with the same in another order.
    pub fn changed_address(&self, other: &Listen) -> Option<&'static str> {
        let addresses =
            |sockets: &[ListenSocket]| sockets.iter().map(|socket| socket.address.clone()).collect::<Vec<_>>();
        let settings = |listen: &Listen| {
            let https = listen.https.iter().map(|https| addresses(&https.address)).collect();
            let service = listen.ratelimit_service.iter().map(|service| addresses(service.addresses())).collect();
            let one = |sockets: &[ListenSocket]| vec![addresses(sockets)];
            [
                ("listen.http", one(&listen.http)),
                ("listen.https.address", https),
                ("listen.admin", one(listen.admin.as_slice())),
                ("listen.metrics", one(&listen.metrics)),
                ("listen.ratelimit_service", service),
                ("listen.forward_auth", one(&listen.forward_auth)),
            ]
        };
        let changed = settings(self).into_iter().zip(settings(other)).find(|(setting, other)| setting != other);
        changed.map(|((name, _), _)| name)
    }

    /// The sockets of all addresses.
    pub fn sockets(&self) -> impl Iterator<Item = &ListenSocket> {
        let https = self.https.iter().flat_map(|https| &https.address);
        let service = self.ratelimit_service.iter().flat_map(RatelimitService::addresses);
        let others = self.forward_auth.iter().chain(&self.admin).chain(&self.metrics);
        self.http.iter().chain(https).chain(service).chain(others)
    }

    /// All listeners with TLS: those of `https`, then that of the rate limit service.
    pub fn tls_listeners(&self) -> impl Iterator<Item = &Https> {
        self.https.iter().chain(self.ratelimit_service.as_ref().and_then(RatelimitService::tls))
    }

    pub fn client_certs(&self) -> ClientCerts {
        let is_required = |https: &Https| https.client_ca.is_some() && https.client_auth == ClientAuth::Required;
        if !self.https.iter().any(|https| https.client_ca.is_some()) {
            ClientCerts::Never
        } else if self.http.is_empty() && self.forward_auth.is_empty() && self.https.iter().all(is_required) {
            ClientCerts::Always
        } else {
            ClientCerts::Sometimes
        }
    }
}

/// Whether the default address for plain HTTP applies, or `http` is given.
fn uses_default_address(table: &Table) -> bool {
    table.given("http").is_some()
        || ["https", "ratelimit_service", "forward_auth"].iter().all(|key| table.given(key).is_none())
}

/// The fix for an address of HTTP that is not written in `http`.
fn http_fix(item: &Item, report: &Report) -> String {
    let text = match item.value {
        DeValue::Integer(_) => format!(":{}", report.source(item.span.clone())),
        DeValue::String(text) => text.to_string(),
        _ => String::from("0.0.0.0:8080"),
    };
    match parse_address(&text).map_err(|(_, fix)| fix) {
        Ok(address) => format!("write `http = \"{address}\"`"),
        Err(fix) if fix.contains("write `\"") => fix.replace("`\"", "`http = \""),
        Err(_) => format!("write `http = {EXAMPLE}`"),
    }
}

/// Reads `[listen]`. A single address is reported with the setting that takes it.
pub fn read_listen(item: Option<Item>, report: &mut Report) -> Listen {
    match &item {
        Some(address) if matches!(address.value, DeValue::String(_) | DeValue::Integer(_)) && !address.is_off() => {
            let fix = format!("write `[listen]`, then {}", http_fix(address, report).replacen("write ", "", 1));
            let _: Option<()> = address.wrong_type("a table", &fix, report);
            Listen::default()
        }
        _ => Listen::read_section(item, report),
    }
}

fn check_listen(listen: &mut Listen, table: &mut Table, report: &mut Report) {
    for key in ["address", "addresses", "bind", "listen", "port", "ports", "host"] {
        if let Some(item) = table.given(key) {
            table.suggest_for(key, "http", http_fix(&item, report));
        }
    }
    if !uses_default_address(table) {
        listen.http.clear();
    }
    check_overlaps(table, report);
    trusted_proxies::check(listen, table, report);
}

impl Listen {
    /// The addresses of trusted proxies, also those in files.
    pub fn trusted_networks(&self) -> impl Iterator<Item = AddressRange> {
        let in_files = self.trusted_proxies_file.iter().flatten().copied().map(AddressRange::Network);
        self.trusted_proxies.iter().copied().chain(in_files)
    }
}

fn read_range(word: &SpannedStr, report: &mut Report) -> Option<AddressRange> {
    match word.text.parse::<AddressRange>() {
        Ok(range) => Some(range),
        Err(_) if word.text.starts_with("unix") => {
            let message = format!("{} is not a network", quoted(word.text));
            report.reject(word.span.clone(), message, "write `\"unix:\"`, which stands for all Unix sockets")
        }
        // Reports what is wrong.
        Err(_) => read_network(word, report).map(AddressRange::Network),
    }
}

/// An address that the file uses.
struct UsedAddress {
    address: ListenAddress,
    /// Whether `[::]` accepts IPv4 connections too. It does for `admin` and `metrics`, and not for the others.
    accepts_ipv4: bool,
    /// Where the file has the address, for messages.
    position: Option<usize>,
}

impl UsedAddress {
    /// Whether the kernel refuses to open both sockets. Port 0 selects a free port each time, so it never overlaps.
    fn overlaps(&self, other: &UsedAddress) -> bool {
        match (self.address.tcp(), other.address.tcp()) {
            (Some(own), Some(others)) => {
                let is_same = own.ip() == others.ip();
                own.port() != 0 && own.port() == others.port() && (is_same || self.covers(other) || other.covers(self))
            }
            _ => self.address == other.address,
        }
    }

    /// Whether this is a wildcard address that includes the other.
    fn covers(&self, other: &UsedAddress) -> bool {
        let (Some(own), Some(others)) = (self.address.tcp(), other.address.tcp()) else { return false };
        let is_family = own.is_ipv4() == others.is_ipv4();
        own.ip().is_unspecified() && (is_family || (self.accepts_ipv4 && own.is_ipv6()))
    }
}

/// Reports addresses that cannot be used at the same time.
fn check_overlaps(table: &Table, report: &mut Report) {
    let mut used: Vec<UsedAddress> = Vec::new();
    if table.given("http").is_none() && uses_default_address(table) {
        used.push(UsedAddress { address: ListenAddress::Tcp(DEFAULT), accepts_ipv4: false, position: None });
    }
    let items = ["http", "https", "ratelimit_service", "forward_auth", "admin", "metrics"]
        .into_iter()
        .filter_map(|key| table.given(key));
    let written = items.flat_map(|item| written_addresses(&item).into_iter().map(move |written| (item.key, written)));
    for (key, (address, word)) in written {
        let position = Some(word.span.start);
        let socket = UsedAddress { address, accepts_ipv4: ["admin", "metrics"].contains(&key), position };
        if let Some(other) = used.iter().find(|other| socket.overlaps(other)) {
            let (text, other_text) = (quoted(word.text), quoted(&other.address.to_string()));
            let ip = |socket: &UsedAddress| socket.address.tcp().map(|address| address.ip());
            let message = match ip(other) == ip(&socket) {
                true => format!("{text} is already in use"),
                false if socket.covers(other) => format!("{text} includes {other_text}, which is already in use"),
                false => format!("{text} is already in use by {other_text}"),
            };
            let place = other.position.map_or(": `http` uses it by default".to_owned(), |other| {
                format!(", on line {}", report.line_seen_from(other, word.span.start))
            });
            let fix = match socket.address {
                ListenAddress::Tcp(_) => "remove it, or give it another port",
                ListenAddress::Unix(_) => "remove it, or give it another path",
            };
            report.problem(word.span, message + &place, fix);
        }
        used.push(socket);
    }
}

fn address_shapes() -> Shape {
    Shape::OneOrList(Box::new(address_shape()))
}

/// The settings of a listener with TLS: its certificate is not required if one is ordered.
fn https_settings() -> Vec<Setting> {
    let files = CertificateFiles::settings().into_iter().map(|file| Setting { is_required: false, ..file });
    files.chain(Https::settings()).collect()
}

/// Reads `[listen.https]`, or several `[[listen.https]]` tables, each with its own certificates.
fn read_https_listeners(item: &Item, report: &mut Report) -> Option<Vec<Https>> {
    let items = item.one_or_all();
    if items.is_empty() {
        report.problem(item.span.clone(), "`https` is an empty list", HTTPS_FIX);
    }
    Some(items.iter().filter_map(|item| read_https(item, "`[listen.https]`", HTTPS_FIX, report)).collect())
}

/// Reads the addresses of the rate limit service, or a table with TLS.
fn read_ratelimit_service(item: &Item, report: &mut Report) -> Option<RatelimitService> {
    match item.value {
        DeValue::Table(_) if !item.tables().iter().any(is_socket_table) => {
            let fix = "write `[listen.ratelimit_service]`, then its `address`, its `certificate` and its `private_key`";
            read_https(item, "`[listen.ratelimit_service]`", fix, report)
                .map(|https| RatelimitService::Tls(Box::new(https)))
        }
        _ => {
            let or = ", or remove `ratelimit_service`";
            read_sockets(item, "\"127.0.0.1:8081\"", or, report).map(RatelimitService::Cleartext)
        }
    }
}

fn read_https(item: &Item, title: &str, fix: &str, report: &mut Report) -> Option<Https> {
    let mut table = item.table(title, if item.is_off() { OFF_FIX } else { fix }, report)?;
    let default = CertificateFiles::read(&mut table, report).certificate(report);
    if table.given("acme").is_some() {
        ["certificate", "private_key"].iter().for_each(|key| table.not_missing(key));
        check_pair(&table, report);
    }
    let mut https = Https::read(&mut table, report);
    table.finish(report);
    for (position, certificate) in https.certificates.iter().enumerate() {
        let others = default.iter().chain(&https.certificates[..position]);
        check_selectable(certificate, others, report);
    }
    https.certificates.splice(..0, default);
    Some(https)
}

fn read_certificates(item: &Item, report: &mut Report) -> Option<Vec<Certificate>> {
    let fix = "write `[[listen.https.certificates]]`, then its `certificate` and its `private_key`";
    let files = Tables::<CertificateFiles>::or("the certificate", fix).read(item, report)?;
    Some(files.iter().filter_map(|files| files.certificate(report)).collect())
}

/// Reports a certificate that is never used: each but the default is selected by its DNS names (SNI), which no other
/// certificate of the same key type may have.
fn check_selectable<'c>(certificate: &Certificate, others: impl Iterator<Item = &'c Certificate>, report: &mut Report) {
    let file = quoted(&certificate.file);
    let names = &certificate.dns_names;
    let mut others = others.filter(|other| other.algorithm() == certificate.algorithm());
    let shared_name = |other: &Certificate| {
        let name = names.iter().find(|name| other.dns_names.contains(name))?;
        Some((quoted(&other.file), quoted(name)))
    };
    if names.is_empty() {
        let message = format!("{file} can never be selected: it contains no DNS name");
        let fix = "have it issued with DNS names (subjectAltName), or make it the default `certificate`";
        report.problem(certificate.span.clone(), message, fix);
    } else if let Some((other, name)) = others.find_map(shared_name) {
        let message = format!("{file} and {other} are both for {name}");
        let fix = "keep one of the two; two certificates for a name must have different key types, RSA and ECDSA";
        report.problem(certificate.span.clone(), message, fix);
    }
}

fn check_https(_https: &mut Https, table: &Table, report: &mut Report) {
    for item in ["client_auth", "client_crl"].iter().filter_map(|key| table.given(key)) {
        if table.lacks("client_ca") {
            let message = format!("`{}` has no effect without `client_ca`", item.key);
            let fix = "add `client_ca = \"FILE\"` with the certificates of the issuers, or remove it";
            report.missing(item.key_span, message, fix);
        }
    }
}
