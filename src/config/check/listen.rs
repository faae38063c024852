//! Where the gateway listens: addresses of this machine, each an IP address and a port.
//!
//! Names are not resolved: what a name stands for may change between two starts, and a listener
//! on an address that nobody meant is worse than none. This file binds nothing.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::{proxies, section};
use crate::config::document::{Item, Later, Word};
use crate::config::problem::{Report, shown};
use crate::config::{Listen, Proxies};

const LATER: [Later; 1] = [("https", "remove it; put a server that speaks TLS in front of the gateway")];

const EXAMPLE: &str = "\"127.0.0.1:8080\"";

pub fn listen(item: Option<Item>, report: &mut Report) -> (Listen, Option<Proxies>) {
    let mut listen = Listen { http: vec![SocketAddr::from(([127, 0, 0, 1], 8080))], admin: None };
    let Some(mut table) = section(item, report) else { return (listen, None) };
    // Addresses taken so far, and the line of each.
    let mut taken: Vec<(SocketAddr, usize)> = Vec::new();
    if let Some(item) = table.get("http") {
        listen.http = match item.texts(EXAMPLE, report) {
            Some(words) if words.is_empty() => {
                let fix = format!("{}, or leave `http` out: this is the default", item.write(EXAMPLE));
                report.problem(item.span, "`http` is an empty list", fix);
                Vec::new()
            }
            words => words.iter().flatten().filter_map(|word| address(word, &mut taken, report)).collect(),
        };
    } else {
        taken.extend(listen.http.iter().map(|address| (*address, 0)));
    }
    if let Some(word) = table.get("admin").and_then(|item| item.text("\"127.0.0.1:9900\"", report)) {
        listen.admin = address(&word, &mut taken, report);
    }
    let proxies = proxies::Settings::of(&mut table).read(report);
    table.finish(&LATER, report);
    (listen, proxies)
}

fn address(word: &Word, taken: &mut Vec<(SocketAddr, usize)>, report: &mut Report) -> Option<SocketAddr> {
    let Ok(address) = word.text.parse::<SocketAddr>() else {
        report.problem(word.span.clone(), format!("{} is no address to listen on", shown(word.text)), fix(word.text));
        return None;
    };
    // Port 0 is a different one each time.
    if let Some((_, line)) = taken.iter().find(|(other, _)| *other == address && address.port() != 0) {
        let message = match line {
            0 => format!("{} is taken already: `http` listens on it by default", shown(word.text)),
            line => format!("{} is taken already, on line {line}", shown(word.text)),
        };
        report.problem(word.span.clone(), message, "remove it, or give it another port");
    }
    taken.push((address, report.line(word.span.start)));
    Some(address)
}

/// The address that was meant.
fn fix(text: &str) -> String {
    let text = text.trim();
    let bare = text.split_once("://").map_or(text, |(_, rest)| rest);
    let bare = bare.split('/').next().unwrap_or(bare);
    let (host, port) = bare.rsplit_once(':').unwrap_or(("", bare));
    // `::1:8080` is an address as well, but hardly the one that was meant.
    if let (Ok(ip), 2.., Ok(port)) = (host.parse::<Ipv6Addr>(), port.len(), port.parse::<u16>()) {
        return format!("an IPv6 address has brackets: write `\"[{ip}]:{port}\"`");
    }
    if let Ok(ip) = bare.trim_matches(['[', ']']).parse::<IpAddr>() {
        return format!("an address has a port: write `\"{}\"`", SocketAddr::new(ip, 8080));
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
