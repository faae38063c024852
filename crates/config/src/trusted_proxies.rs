//! Settings of `[listen]` that say which proxies are trusted, and where they name the client: what the networks in a file are,
//! which fields can have the address of a client, and which settings exclude one another.

use std::path::Path;

use http::HeaderName;

use super::diagnostics::{Report, quoted};
use super::listen::Listen;
use super::toml_reader::{Item, SpannedStr, SpannedString, Table};
use super::values::{read_field_name, read_network};
use transom_http::client_address::AddressRange;
use transom_limiter::ip_prefix::Network;

const FILE: &str = "trusted_proxies_file";

/// Reads a file of networks: one on a line, `#` begins a comment. Only the first problem is reported, because a file of another
/// format has one on every line.
pub fn read_networks_file(word: &SpannedStr, report: &mut Report) -> Option<Vec<Network>> {
    let bytes = SpannedString::new(FILE, word).read_file(report)?;
    let name = quoted(word.text);
    let Ok(text) = String::from_utf8(bytes) else {
        return report.reject(word.span.clone(), format!("{name} is not UTF-8 text"), "save it as UTF-8");
    };
    let mut file_report = Report::for_named_file(&text, Path::new(word.text));
    let (mut networks, mut line_start) = (Vec::new(), 0);
    for line in text.split_inclusive('\n') {
        let written = line.split('#').next().unwrap_or_default();
        let start = line_start + written.len() - written.trim_start().len();
        let written = written.trim();
        line_start += line.len();
        if written.is_empty() {
            continue;
        }
        let word = SpannedStr { text: written, span: start..start + written.len() };
        networks.extend(
            read_network(&word, &mut file_report).filter(|network| check_size(network, &word, &mut file_report)),
        );
        if file_report.count() > 0 {
            report.append(file_report);
            return None;
        }
    }
    if networks.is_empty() {
        let message = format!("{name} contains no network");
        return report.reject(word.span.clone(), message, "write the networks of your proxies into it, one on a line");
    }
    Some(networks)
}

/// Whether a network is one of proxies; otherwise reports it.
fn check_size(network: &Network, word: &SpannedStr, report: &mut Report) -> bool {
    if network.prefix == 0 {
        let message = format!("{} contains every address: any client could forge its address", quoted(word.text));
        report.problem(word.span.clone(), message, "write the networks of your proxies");
    }
    network.prefix > 0
}

/// Reads the name of a field that has the address of the client.
pub fn read_client_field(word: &SpannedStr, report: &mut Report) -> Option<HeaderName> {
    let name = read_field_name(word, report)?;
    let (problem, fix) = match name.as_str() {
        "x-forwarded-for" => {
            ("is a list of addresses", "remove `client_ip`: the gateway reads `X-Forwarded-For` of `trusted_proxies`")
        }
        "forwarded" => ("is a list", "write `forwarded = \"forwarded\"` instead"),
        "cloudfront-viewer-address" => (
            "ends with a port, which cannot be told from the end of an IPv6 address",
            "remove `client_ip`, and set `trusted_hops` to the number of proxies that append to `X-Forwarded-For`, with CloudFront",
        ),
        _ => return HeaderName::from_bytes(name.as_bytes()).ok(),
    };
    report.reject(word.span.clone(), format!("{} {problem}", quoted(word.text)), fix)
}

/// Checks the settings together.
pub fn check(listen: &Listen, table: &Table, report: &mut Report) {
    let mut ranges: Vec<AddressRange> = Vec::new();
    for word in table.given("trusted_proxies").iter().flat_map(Item::words) {
        let Ok(range) = word.text.parse::<AddressRange>() else { continue };
        match &range {
            _ if ranges.contains(&range) => {
                report.problem(word.span, format!("{} is listed twice", quoted(word.text)), "remove it");
            }
            AddressRange::Network(network) => _ = check_size(network, &word, report),
            AddressRange::Unix => {}
        }
        ranges.push(range);
    }
    let has_proxies = !table.lacks("trusted_proxies") || !table.lacks(FILE);
    for item in ["forwarded", "trusted_hops", "client_ip"].iter().filter_map(|key| table.given(key)) {
        // A proxy that asks on `forward_auth` is trusted without being listed.
        let is_used = has_proxies || item.key == "trusted_hops" && !listen.forward_auth.is_empty();
        if !is_used {
            let message = format!("`{}` has no effect without `trusted_proxies`", item.key);
            report.missing(item.key_span, message, format!("add `trusted_proxies`, or remove `{}`", item.key));
        } else if item.key != "client_ip" && table.given("client_ip").is_some() {
            let message = format!("`{}` has no effect with `client_ip`", item.key);
            report.problem(item.key_span, message, "remove one of the two");
        }
    }
}
