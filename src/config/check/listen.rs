//! `[listen]` and `[admin]`: addresses to listen on, TLS certificates, client authentication, and trusted proxies.
//!
//! Addresses are IP addresses: host names are not resolved, because a name may resolve to another address at the next
//! start. This file binds no socket. Messages never contain the content of a certificate or key file.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rustls_pki_types::CertificateDer;
use toml::de::DeValue;

use super::route_match;
use super::values::{read_named_file, read_network};
use crate::config::certificate::{self, Certificate, CertificateFileError, RevocationList};
use crate::config::diagnostics::{Report, quoted};
use crate::config::listen::{ClientAuth, ForwardedField, Https, Listen, Tls, TlsVersion, TrustedProxies};
use crate::config::settings::section_table;
use crate::config::toml_reader::{Item, SpannedStr, Table};
use crate::config::{Admin, ReadFile};
use transom_limiter::ip_prefix::Network;

const EXAMPLE: &str = "\"127.0.0.1:8080\"";
const HTTPS_EXAMPLE: &str = "\"0.0.0.0:443\"";
const HTTPS_FIX: &str = "write `[listen.https]`, then its `address`, its `certificate` and its `private_key`";
const PROXY_PROTOCOL_EXAMPLE: &str = "[\"10.0.0.0/8\"]";
const PROXIES_EXAMPLE: &str = "[\"10.0.0.0/8\", \"fd00::/8\"]";

/// A socket that the gateway opens when it starts.
struct ListenSocket {
    address: SocketAddr,
    /// Whether `[::]` accepts IPv4 connections too. It does for the admin address, and not for the others.
    accepts_ipv4: bool,
    /// The line of the address in the file; 0 for the default address.
    line: usize,
}

impl ListenSocket {
    /// Whether the kernel refuses to open both sockets. Port 0 selects a free port each time, so it never overlaps.
    fn overlaps(&self, other: &ListenSocket) -> bool {
        let port = self.address.port();
        let is_same = self.address.ip() == other.address.ip();
        port != 0 && port == other.address.port() && (is_same || self.covers(other) || other.covers(self))
    }

    /// Whether this is a wildcard address that includes the other.
    fn covers(&self, other: &ListenSocket) -> bool {
        let is_family = self.address.is_ipv4() == other.address.is_ipv4();
        self.address.ip().is_unspecified() && (is_family || (self.accepts_ipv4 && self.address.is_ipv6()))
    }
}

pub fn read_listen(item: Option<Item>, files: ReadFile, report: &mut Report) -> (Listen, Option<TrustedProxies>) {
    let mut listen = Listen {
        http: vec![SocketAddr::from(([127, 0, 0, 1], 8080))],
        https: Vec::new(),
        admin: None,
        proxy_protocol: Vec::new(),
        max_connections: None,
        max_connections_per_client: None,
    };
    let Some(mut table) = section_table(item, report) else { return (listen, None) };
    let mut sockets: Vec<ListenSocket> = Vec::new();
    let (http, https) = (table.get("http"), table.get("https"));
    if let Some(item) = http {
        listen.http = read_addresses(&item, EXAMPLE, ", or remove `http`: this is the default", &mut sockets, report);
    } else if https.is_some() {
        // With `https` alone, the default address for plain HTTP does not apply.
        listen.http.clear();
    } else {
        sockets.extend(listen.http.iter().map(|address| ListenSocket {
            address: *address,
            accepts_ipv4: false,
            line: 0,
        }));
    }
    if let Some(item) = https {
        listen.https = read_https_listeners(&item, files, &mut sockets, report);
    }
    if let Some(word) = table.get("admin").and_then(|item| item.string("\"127.0.0.1:9900\"", report)) {
        listen.admin = read_address(&word, true, &mut sockets, report);
    }
    if let Some(item) = table.get("proxy_protocol") {
        listen.proxy_protocol = read_proxy_networks(&item, report);
    }
    let max = table.get("max_connections").and_then(|item| item.integer(1..=10_000_000, report));
    listen.max_connections = max.and_then(|max| usize::try_from(max).ok());
    let max = table.get("max_connections_per_client").and_then(|item| item.integer(1..=1_000_000, report));
    listen.max_connections_per_client = max.and_then(|max| u32::try_from(max).ok());
    let proxies = ProxySettings::take_from(&mut table).read(report);
    table.finish(report);
    (listen, proxies)
}

/// Reads `[admin]`.
pub fn read_admin(item: Option<Item>, report: &mut Report) -> Admin {
    let Some(mut table) = section_table(item, report) else { return Admin { hosts: Vec::new() } };
    let hosts = table.get("hosts");
    table.finish(report);
    Admin {
        hosts: route_match::read_hosts(hosts, "the admin address then accepts IP addresses and `localhost`", report)
            .unwrap_or_default(),
    }
}

fn read_addresses(
    item: &Item,
    example: &str,
    alternative: &str,
    sockets: &mut Vec<ListenSocket>,
    report: &mut Report,
) -> Vec<SocketAddr> {
    match item.strings(example, report) {
        Some(words) if words.is_empty() => {
            let fix = format!("{}{alternative}", item.fix_with(example));
            report.problem(item.span.clone(), format!("`{}` is an empty list", item.key), fix);
            Vec::new()
        }
        words => words.iter().flatten().filter_map(|word| read_address(word, false, sockets, report)).collect(),
    }
}

/// Reads `[listen.https]`, or several `[[listen.https]]` tables, each with its own certificates.
fn read_https_listeners(
    item: &Item,
    files: ReadFile,
    sockets: &mut Vec<ListenSocket>,
    report: &mut Report,
) -> Vec<Https> {
    let DeValue::Array(array) = item.value else {
        return read_https(item, files, sockets, report).into_iter().collect();
    };
    if array.is_empty() {
        report.problem(item.span.clone(), "`https` is an empty list", HTTPS_FIX);
    }
    let items = item.list("[]", report).unwrap_or_default();
    items.iter().filter_map(|item| read_https(item, files, sockets, report)).collect()
}

fn read_https(item: &Item, files: ReadFile, sockets: &mut Vec<ListenSocket>, report: &mut Report) -> Option<Https> {
    let mut table = item.table("`[listen.https]`", HTTPS_FIX, report)?;
    let address = table.require("address", format!("write `address = {HTTPS_EXAMPLE}`"));
    let default = CertificateFiles::take_from(&mut table);
    let others = table.get("certificates");
    let client_ca = table.get("client_ca");
    let auth = ClientAuthSettings { mode: table.get("client_auth"), crls: table.get("client_crl") };
    let versions = [("1.2", TlsVersion::V1_2), ("1.3", TlsVersion::V1_3)];
    let min_version = table.get("min_version").and_then(|item| item.choice(&versions, report));
    let misspelled = table.finish(report);

    let addresses = address.map(|item| read_addresses(&item, HTTPS_EXAMPLE, "", sockets, report)).unwrap_or_default();
    let default = default.read(files, report);
    let mut certificates: Vec<Certificate> = default.into_iter().collect();
    if let Some(item) = others {
        read_further_certificates(&item, files, &mut certificates, report);
    }
    let is_misspelled = misspelled.contains(&"client_ca");
    let client_auth = auth.read(client_ca, is_misspelled, files, report);
    let min_version = min_version.unwrap_or(TlsVersion::V1_2);
    Some(Https { addresses, tls: Tls { certificates, client_auth, min_version } })
}

/// Reads `[[listen.https.certificates]]`. Each is selected by its DNS names (SNI), which no other certificate of the
/// same key type may have.
fn read_further_certificates(item: &Item, files: ReadFile, certificates: &mut Vec<Certificate>, report: &mut Report) {
    let fix = "write `[[listen.https.certificates]]`, then its `certificate` and its `private_key`";
    let DeValue::Array(_) = item.value else {
        item.wrong_type::<()>("a list of tables", fix, report);
        return;
    };
    for entry in item.list("[]", report).unwrap_or_default() {
        let Some(mut table) = entry.table("the certificate", fix, report) else { continue };
        let pair = CertificateFiles::take_from(&mut table);
        table.finish(report);
        let span = pair.certificate.as_ref().map_or(entry.span.clone(), |item| item.span.clone());
        let Some(certificate) = pair.read(files, report) else { continue };
        let file = quoted(&certificate.file);
        let is_for = |other: &Certificate, name: &String| {
            other.dns_names.contains(name) && other.algorithm() == certificate.algorithm()
        };
        let duplicate = certificate
            .dns_names
            .iter()
            .find_map(|name| Some((name, certificates.iter().find(|other| is_for(other, name))?)));
        if certificate.dns_names.is_empty() {
            let message = format!("{file} can never be selected: it contains no DNS name");
            report.problem(
                span,
                message,
                "have it issued with DNS names (subjectAltName), or make it the default `certificate`",
            );
        } else if let Some((name, other)) = duplicate {
            let message = format!("{file} and {} are both for {}", quoted(&other.file), quoted(name));
            report.problem(
                span,
                message,
                "keep one of the two; two certificates for a name must have different key types, RSA and ECDSA",
            );
        }
        certificates.push(certificate);
    }
}

/// The settings for client certificates, apart from `client_ca`.
struct ClientAuthSettings<'d> {
    mode: Option<Item<'d>>,
    crls: Option<Item<'d>>,
}

impl ClientAuthSettings<'_> {
    fn read(self, ca: Option<Item>, is_misspelled: bool, files: ReadFile, report: &mut Report) -> Option<ClientAuth> {
        let modes = [("required", true), ("optional", false)];
        let required = self.mode.as_ref().and_then(|item| item.choice(&modes, report)).unwrap_or(true);
        let revoked = self.crls.as_ref().map(|item| read_revocation_lists(item, files, report)).unwrap_or_default();
        if let Some(ca) = ca {
            let authorities = read_authorities(&ca, files, report).unwrap_or_default();
            return Some(ClientAuth { authorities, required, revocation_lists: revoked });
        }
        for item in [self.mode, self.crls].into_iter().flatten().filter(|_| !is_misspelled) {
            let message = format!("`{}` has no effect without `client_ca`", item.key);
            let fix = "add `client_ca = \"FILE\"` with the certificates of the issuers, or remove it";
            report.missing(item.key_span, message, fix);
        }
        None
    }
}

fn read_proxy_networks(item: &Item, report: &mut Report) -> Vec<Network> {
    let words = item.strings(PROXY_PROTOCOL_EXAMPLE, report);
    if words.as_ref().is_some_and(Vec::is_empty) {
        let fix = format!("{}, or remove it: no PROXY header is then accepted", item.fix_with(PROXY_PROTOCOL_EXAMPLE));
        report.problem(item.span.clone(), "`proxy_protocol` is an empty list", fix);
    }
    words.iter().flatten().filter_map(|word| read_network(word, report)).collect()
}

fn read_address(
    word: &SpannedStr,
    accepts_ipv4: bool,
    sockets: &mut Vec<ListenSocket>,
    report: &mut Report,
) -> Option<SocketAddr> {
    let Ok(address) = word.text.parse::<SocketAddr>() else {
        report.problem(
            word.span.clone(),
            format!("{} is not an address to listen on", quoted(word.text)),
            address_fix(word.text),
        );
        return None;
    };
    if let IpAddr::V6(ip) = address.ip()
        && let Some(mapped) = ip.to_ipv4_mapped()
    {
        let message = format!("{} is an IPv4 address in IPv6 notation", quoted(word.text));
        report.problem(word.span.clone(), message, format!("write `\"{mapped}:{}\"`", address.port()));
        return None;
    }
    let socket = ListenSocket { address, accepts_ipv4, line: report.line(word.span.start) };
    if let Some(other) = sockets.iter().find(|other| socket.overlaps(other)) {
        let (text, other_text) = (quoted(word.text), quoted(&other.address.to_string()));
        let position = match other.line {
            0 => ": `http` uses it by default".to_owned(),
            line => format!(", on line {line}"),
        };
        let message = match other.address.ip() == address.ip() {
            true => format!("{text} is already in use{position}"),
            false if socket.covers(other) => format!("{text} includes {other_text}, which is already in use{position}"),
            false => format!("{text} is already in use by {other_text}{position}"),
        };
        report.problem(word.span.clone(), message, "remove it, or give it another port");
    }
    sockets.push(socket);
    Some(address)
}

/// The fix for a text that is not an address: the most likely intended address.
fn address_fix(text: &str) -> String {
    let text = text.trim();
    let bare = text.split_once("://").map_or(text, |(_, rest)| rest);
    let bare = bare.split('/').next().unwrap_or(bare);
    let (host, port) = bare.rsplit_once(':').unwrap_or(("", bare));
    // `::1:8080` parses as an IPv6 address, but most likely a port was intended.
    if let (Ok(ip), 2.., Ok(port)) = (host.parse::<Ipv6Addr>(), port.len(), port.parse::<u16>()) {
        return format!("put an IPv6 address in brackets: write `\"[{ip}]:{port}\"`");
    }
    if let Ok(ip) = bare.trim_matches(['[', ']']).parse::<IpAddr>() {
        return format!("add a port: write `\"{}\"`", SocketAddr::new(ip, 8080));
    }
    if port.is_empty() || !port.bytes().all(|b| b.is_ascii_digit()) {
        return format!("write an IP address and a port, such as `{EXAMPLE}`");
    }
    let Ok(port) = port.parse::<u16>() else {
        return String::from("a port is at most `65535`");
    };
    match host {
        "" | "*" => format!("write `\"0.0.0.0:{port}\"` for all addresses, or `\"127.0.0.1:{port}\"` for this machine"),
        "localhost" => format!("write `\"127.0.0.1:{port}\"`; names are not resolved"),
        _ => match host.trim_matches(['[', ']']).parse::<Ipv6Addr>() {
            Ok(ip) => format!("write `\"[{ip}]:{port}\"`"),
            Err(_) => match host.parse::<Ipv4Addr>() {
                Ok(ip) => format!("write `\"{ip}:{port}\"`"),
                Err(_) => {
                    format!("write the IP address of a network interface, such as `\"0.0.0.0:{port}\"` for all of them")
                }
            },
        },
    }
}

/// The settings of `[listen]` about proxies in front of the gateway.
struct ProxySettings<'d> {
    trusted: Option<Item<'d>>,
    forwarded: Option<Item<'d>>,
}

impl<'d> ProxySettings<'d> {
    fn take_from(table: &mut Table<'d>) -> ProxySettings<'d> {
        ProxySettings { trusted: table.get("trusted_proxies"), forwarded: table.get("forwarded") }
    }

    fn read(self, report: &mut Report) -> Option<TrustedProxies> {
        let fields = [("x-forwarded-for", ForwardedField::XForwardedFor), ("forwarded", ForwardedField::Forwarded)];
        let field = self.forwarded.as_ref().and_then(|item| item.choice(&fields, report));
        let Some(item) = self.trusted else {
            if let Some(item) = self.forwarded {
                let message = "`forwarded` has no effect without `trusted_proxies`";
                report.missing(item.key_span, message, "add `trusted_proxies`, or remove `forwarded`");
            }
            return None;
        };
        let words = item.strings(PROXIES_EXAMPLE, report)?;
        if words.is_empty() {
            report.problem(item.span, "`trusted_proxies` is an empty list", "remove it: no proxy is then trusted");
            return None;
        }
        let mut networks = Vec::new();
        for word in words {
            let Some(network) = read_network(&word, report) else { continue };
            if networks.contains(&network) {
                report.problem(word.span, format!("{} is listed twice", quoted(word.text)), "remove it");
            } else if network.prefix == 0 {
                let message =
                    format!("{} contains every address: any client could forge its address", quoted(word.text));
                report.problem(word.span, message, "write the networks of your proxies");
            }
            networks.push(network);
        }
        Some(TrustedProxies { networks, field: field.unwrap_or(ForwardedField::XForwardedFor) })
    }
}

/// The settings that name the files of one certificate.
struct CertificateFiles<'d> {
    certificate: Option<Item<'d>>,
    private_key: Option<Item<'d>>,
}

impl<'d> CertificateFiles<'d> {
    /// Both files are required.
    fn take_from(table: &mut Table<'d>) -> CertificateFiles<'d> {
        CertificateFiles {
            certificate: table.require("certificate", "write `certificate = \"FILE\"`: PEM, with the full chain"),
            private_key: table.require("private_key", "write `private_key = \"FILE\"`: PEM"),
        }
    }

    fn read(self, files: ReadFile, report: &mut Report) -> Option<Certificate> {
        let chain = self.certificate.and_then(|item| read_file(&item, files, report));
        let key = self.private_key.and_then(|item| read_file(&item, files, report));
        let ((chain_word, chain), (key_word, key)) = (chain?, key?);
        Certificate::read(chain_word.text, &chain, &key)
            .map_err(|error| {
                let is_key_error = matches!(
                    error,
                    CertificateFileError::NoKey
                        | CertificateFileError::EncryptedKey
                        | CertificateFileError::UnusableKey
                        | CertificateFileError::KeyMismatch
                );
                report_certificate_error(&error, if is_key_error { &key_word } else { &chain_word }, report);
            })
            .ok()
    }
}

/// Reads the certificates of the authorities that issue client certificates.
fn read_authorities(item: &Item, files: ReadFile, report: &mut Report) -> Option<Vec<CertificateDer<'static>>> {
    let (word, text) = read_file(item, files, report)?;
    certificate::read_authorities(&text).map_err(|error| report_certificate_error(&error, &word, report)).ok()
}

/// Reads the certificate revocation lists of one file or several.
fn read_revocation_lists(item: &Item, files: ReadFile, report: &mut Report) -> Vec<RevocationList> {
    let words = item.strings("\"FILE\"", report);
    if words.as_ref().is_some_and(Vec::is_empty) {
        let fix = format!("{}, or remove it: no certificate is then treated as revoked", item.fix_with("\"FILE\""));
        report.problem(item.span.clone(), format!("`{}` is an empty list", item.key), fix);
    }
    let mut lists = Vec::new();
    for word in words.into_iter().flatten() {
        let Some(text) = read_contents(item, &word, files, report) else { continue };
        match RevocationList::read(word.text, &text) {
            Ok(read) => lists.extend(read),
            Err(error) => {
                let (message, fix) = error.explain(&quoted(word.text));
                report.problem(word.span, message, fix);
            }
        }
    }
    lists
}

fn report_certificate_error(error: &CertificateFileError, word: &SpannedStr, report: &mut Report) {
    let (message, fix) = error.explain(&quoted(word.text));
    report.problem(word.span.clone(), message, fix);
}

fn read_file<'d>(item: &Item<'d>, files: ReadFile, report: &mut Report) -> Option<(SpannedStr<'d>, Vec<u8>)> {
    let word = item.string("\"FILE\"", report)?;
    let bytes = read_contents(item, &word, files, report)?;
    Some((word, bytes))
}

/// Reads a file that `word`, a value of the item, names.
fn read_contents(item: &Item, word: &SpannedStr, files: ReadFile, report: &mut Report) -> Option<Vec<u8>> {
    if word.text.is_empty() {
        report.problem(word.span.clone(), format!("`{}` is empty", item.key), item.fix_with("\"FILE\""));
        return None;
    }
    if word.text.trim_start().starts_with("-----BEGIN ") {
        let message = format!("`{}` takes the name of a file, not its content", item.key);
        report.problem(word.span.clone(), message, "save the content in a file, and write the name of the file");
        return None;
    }
    read_named_file(word, files, report)
}
