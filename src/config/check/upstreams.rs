//! Who answers: an upstream is a list of servers, or the gateway itself.
//!
//! A server is a URL of scheme, host and port, and nothing else: which path goes there is the
//! request's business. This file resolves no names and connects to nothing.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::host::{is_ipv4_like, is_name};
use super::{Section, balance};
use crate::config::balance::Policy;
use crate::config::document::{Item, Table, Word};
use crate::config::problem::{Report, shown};
use crate::config::{Server, Target, Upstream};

const EXAMPLE: &str = "[\"http://127.0.0.1:9001\"]";

pub fn upstreams(item: Option<Item>, report: &mut Report) -> Section<Upstream> {
    Section::read(item, report, |name, table, report| {
        let read = table.and_then(|table| target(table, report));
        let (target, policy) = read.unwrap_or((Target::Echo, Policy::default()));
        Upstream { name: name.to_owned(), target, policy }
    })
}

fn target(mut table: Table, report: &mut Report) -> Option<(Target, Policy)> {
    let span = table.span.clone();
    let builtin = table.get("builtin");
    let servers = table.get("servers");
    let settings = balance::Settings::of(&mut table);
    let misspelt = !table.finish(&[], report).is_empty();
    match (builtin, servers) {
        (None, None) if misspelt => None,
        (None, None) => {
            let fix = format!("write `servers = {EXAMPLE}`, or `builtin = \"echo\"` for an upstream that needs none");
            report.unless_broken(span, "the upstream has no `servers`", fix);
            None
        }
        (Some(builtin), Some(_)) => {
            let message = "an upstream has `servers` or is `builtin`, not both";
            report.unless_broken(builtin.key_span, message, "remove this line to use the servers");
            None
        }
        (Some(builtin), None) => {
            settings.in_vain(report);
            builtin.choice(&[("echo", ())], report).map(|()| (Target::Echo, Policy::default()))
        }
        (None, Some(item)) => {
            let policy = settings.read(report);
            let words = balance::servers(&item, EXAMPLE, report)?;
            if words.is_empty() {
                report.problem(item.span.clone(), "`servers` is an empty list", item.write(EXAMPLE));
            }
            let mut servers: Vec<Server> = Vec::new();
            for (word, weight) in words {
                let Some(server) = server(&word, weight, report) else { continue };
                let same = |other: &&Server| other.host == server.host && other.port == server.port;
                if let Some(other) = servers.iter().find(same) {
                    let message = format!("{} is the same server as {}", shown(word.text), shown(&other.url));
                    report.problem(word.span, message, "remove one of the two");
                }
                servers.push(server);
            }
            Some((Target::Servers(servers), policy))
        }
    }
}

fn server(word: &Word, weight: u32, report: &mut Report) -> Option<Server> {
    match parse(word.text) {
        Ok((host, port)) => Some(Server { url: word.text.to_owned(), host, port, weight }),
        Err((message, fix)) => {
            report.problem(word.span.clone(), message, fix);
            None
        }
    }
}

/// Host, in lower case, and port of a server's URL; or message and fix.
fn parse(url: &str) -> Result<(String, u16), (String, String)> {
    let is = |what: &str| format!("{} {what}", shown(url));
    let write = |rest: &str| format!("write `\"http://{}\"`", rest.trim());
    let authority = match url.split_once("://") {
        Some(("http", rest)) => rest,
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => {
            return Err((is("is no URL of a server"), write(rest)));
        }
        Some(("https", rest)) => {
            let rest = rest.split('/').next().unwrap_or(rest);
            let fix = format!("{}, or put a proxy that speaks TLS beside the gateway", write(rest));
            return Err((is("cannot be reached: TLS to upstreams is not supported"), fix));
        }
        Some(_) => return Err((is("has a scheme that is not supported"), write("HOST:PORT"))),
        None if url.is_empty() || url.starts_with("unix:") => {
            return Err((is("is no URL of a server"), write("HOST:PORT")));
        }
        None => return Err((is("is no URL of a server"), write(url))),
    };
    if let Some((_, rest)) = authority.rsplit_once('@') {
        return Err((is("has a user name, which is not supported"), write(rest)));
    }
    if let Some(end) = authority.find(['/', '?', '#']) {
        let fix = format!("{}: the path of the request goes there as it is", write(&authority[..end]));
        return Err((is("has a path, and a server cannot have one"), fix));
    }
    if let Ok(ip) = authority.parse::<Ipv6Addr>() {
        return Err((is("has an IPv6 address without brackets"), write(&format!("[{ip}]"))));
    }
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (authority, None),
    };
    let port = match port.map(|port| (port, port.parse::<u16>())) {
        None => 80,
        Some((digits, Ok(port))) if port > 0 && digits.bytes().all(|b| b.is_ascii_digit()) => port,
        Some((port, _)) => {
            let fix = "write a port from `1` to `65535`, or none for `80`";
            return Err((is(&format!("has {} for a port", shown(port))), fix.to_owned()));
        }
    };
    if let Some(ip) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return match ip.parse::<Ipv6Addr>() {
            Ok(ip) => Ok((ip.to_string(), port)),
            Err(_) => Err((is("has no IPv6 address between the brackets"), write(&format!("[::1]:{port}")))),
        };
    }
    let numbers = is_ipv4_like(host);
    match host {
        _ if host.parse::<Ipv6Addr>().is_ok() || host.contains(':') => {
            Err((is("has an IPv6 address without brackets"), write(&format!("[{host}]:{port}"))))
        }
        _ if numbers && host.parse::<Ipv4Addr>().is_err() => {
            let fix = "write four numbers from `0` to `255`, such as `\"http://127.0.0.1:9001\"`";
            Err((is("has no valid IPv4 address"), fix.to_owned()))
        }
        _ if numbers || is_name(host) => Ok((host.to_ascii_lowercase(), port)),
        "" => Err((is("names no host"), write(&format!("127.0.0.1:{port}")))),
        _ => {
            let fix = "write a name of letters, digits, `-` and dots, or an IP address";
            Err((is("has a host that is no name"), fix.to_owned()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_read_as_written() {
        for (url, host, port) in [
            ("http://127.0.0.1:9001", "127.0.0.1", 9001),
            ("http://API.example.com", "api.example.com", 80),
            ("http://[::1]:8080", "::1", 8080),
            ("http://[fd00:0::1]", "fd00::1", 80),
            ("http://my_service:80", "my_service", 80),
        ] {
            assert_eq!(parse(url), Ok((host.to_owned(), port)), "{url}");
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
            "https://h",
            "ftp://h",
            "h:1",
            "HTTP://h",
            "unix:/run/x.sock",
        ] {
            assert!(parse(url).is_err(), "{url}");
        }
    }
}
