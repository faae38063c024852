//! Host names and addresses in settings: hosts to match, and the servers of URLs.

use std::net::{Ipv4Addr, Ipv6Addr};

use super::diagnostics::{Parsed, Report, quoted};
use super::toml_reader::{Item, SpannedStr};

const SERVICE_FIX: &str =
    "write the hosts and ports that the record lists; only `servers` of an upstream can be `\"srv://NAME\"`";
/// The longest path of a Unix socket on Linux.
const SOCKET_PATH_MAX_BYTES: usize = 107;

/// Reads a list of hosts to match, in lower case. `without` says, for a fix, what applies without the setting.
pub fn read_hosts(item: &Item, without: &str, report: &mut Report) -> Option<Vec<String>> {
    let host = |word: &SpannedStr| {
        normalize_host(word.text).map_err(|fix| {
            let is_any = word.text.is_empty() || word.text == "*";
            let fix = if is_any { format!("remove `{}`: {without}", item.key) } else { fix };
            (format!("{} is not a host to match", quoted(word.text)), fix)
        })
    };
    read_distinct(item, "\"api.example.com\"", without, host, report)
}

/// Reads each string of a list with `read`. Reports invalid values, duplicates, and an empty list.
pub fn read_distinct(
    item: &Item,
    example: &str,
    without: &str,
    read: impl Fn(&SpannedStr) -> Parsed<String>,
    report: &mut Report,
) -> Option<Vec<String>> {
    let words = item.strings(example, report)?;
    if words.is_empty() {
        let fix = format!("remove it: {without}");
        return report.reject(item.span.clone(), format!("`{}` is an empty list", item.key), fix);
    }
    let mut found: Vec<String> = Vec::new();
    for word in words {
        let Some(value) = report.accept(word.span.clone(), read(&word)) else { continue };
        if found.contains(&value) {
            report.problem(word.span, format!("{} is listed twice", quoted(word.text)), "remove it");
        }
        found.push(value);
    }
    Some(found)
}

/// The host in lower case, or the fix of a problem.
fn normalize_host(text: &str) -> Result<String, String> {
    let lower = text.to_lowercase();
    if let Some(ip) = lower.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return ip.parse::<Ipv6Addr>().map(|ip| format!("[{ip}]")).map_err(|_| String::from("write `[::1]` for IPv6"));
    }
    let name = lower.strip_prefix("*.").unwrap_or(&lower);
    let is_valid = if is_ipv4_like(name) { lower.parse::<Ipv4Addr>().is_ok() } else { is_name(name) };
    if is_valid {
        return Ok(lower);
    }
    Err(if let Some((_, rest)) = lower.split_once("://") {
        format!("write the host name alone: {}", quoted(rest.split(['/', ':', '?']).next().unwrap_or(rest)))
    } else if let Ok(ip) = lower.parse::<Ipv6Addr>() {
        format!("put an IPv6 address in brackets: write `\"[{ip}]\"`")
    } else if let Some((bare, _)) = lower.rsplit_once(':') {
        format!("write {}: hosts are compared without their port", quoted(bare))
    } else if let Some((bare, _)) = lower.split_once('/') {
        format!("write {}, and the rest in `path`", quoted(bare))
    } else if lower.contains(['^', '~', '$', '(', '|', '\\', '!']) || lower.contains(".+") {
        String::from(
            "write names: regular expressions are not supported; `\"*.example.com\"` matches all names below one",
        )
    } else if let Some(bare) = lower.strip_suffix('.') {
        format!("write {}, without the last dot", quoted(bare))
    } else if name.contains('*') {
        String::from("a `*` can only be the first label, such as `\"*.example.com\"`")
    } else if lower.starts_with('.') {
        format!("write {}", quoted(&format!("*{lower}")))
    } else if !lower.is_ascii() {
        String::from("write the name in punycode, as clients send it: `xn--…`")
    } else {
        String::from("write a name of letters, digits, `-` and dots, such as `\"api.example.com\"`")
    })
}

/// Whether a text is a DNS name. Underscores are allowed, as container networks use them.
pub fn is_name(text: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len()) && label.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
    };
    text.len() <= 253 && text.split('.').all(label)
}

/// Whether a text is the name of a service record, such as `_http._tcp.example.com` (RFC 2782).
fn is_service_name(text: &str) -> bool {
    let mut labels = text.split('.');
    labels.next().is_some_and(|label| label.starts_with('_'))
        && labels.next().is_some_and(|label| ["_tcp", "_udp"].contains(&label.to_ascii_lowercase().as_str()))
}

/// Whether a text can only be meant as an IPv4 address: its last label is a number (RFC 3986,
/// section 3.2.2, and the WHATWG's URL standard, "ends in a number").
fn is_ipv4_like(text: &str) -> bool {
    text.rsplit('.').next().is_some_and(|last| !last.is_empty() && last.bytes().all(|b| b.is_ascii_digit()))
}

/// Checks the absolute path of a Unix socket that follows the scheme of a URL.
pub fn parse_socket_path<'u>(url: &str, path: &'u str, scheme: &str) -> Parsed<&'u str> {
    let message = |what: &str| format!("{} {what}", quoted(url));
    if !path.starts_with('/') || path.starts_with("//") {
        let fix = match path.starts_with('/') {
            true => format!("write `\"{scheme}/{}\"`", path.trim_start_matches('/')),
            false => {
                format!("write the whole path, such as `\"{scheme}/run/{}\"`", path.rsplit('/').next().unwrap_or(path))
            }
        };
        return Err((message("does not have the absolute path of a socket"), fix));
    }
    if path.len() > SOCKET_PATH_MAX_BYTES || path.contains(char::is_control) {
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
        let invalid = || (is("has an invalid IPv6 address in brackets"), write(&format!("[::1]:{port}")));
        return ip.parse::<Ipv6Addr>().map(|ip| (ip.to_string(), port)).map_err(|_| invalid());
    }
    let (message, fix) = match host {
        "" => ("has no host", write(&format!("127.0.0.1:{port}"))),
        _ if host.contains(':') => ("has an IPv6 address without brackets", write(&format!("[{host}]:{port}"))),
        _ if is_ipv4_like(host) && host.parse::<Ipv4Addr>().is_err() => {
            let fix = format!("write four numbers from `0` to `255`, such as `\"{scheme}://127.0.0.1:9001\"`");
            ("has an invalid IPv4 address", fix)
        }
        _ if is_service_name(host) => ("names a service record (SRV)", SERVICE_FIX.to_owned()),
        _ if is_ipv4_like(host) || is_name(host) => return Ok((host.to_ascii_lowercase(), port)),
        _ => ("has an invalid host name", "write a name of letters, digits, `-` and dots, or an IP address".to_owned()),
    };
    Err((is(message), fix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_addresses_or_wildcards() {
        for (text, expected) in [
            ("API.example.com", "api.example.com"),
            ("*.example.com", "*.example.com"),
            ("10.0.0.1", "10.0.0.1"),
            ("[::1]", "[::1]"),
            ("localhost", "localhost"),
        ] {
            assert_eq!(normalize_host(text).as_deref(), Ok(expected));
        }
        for text in " * a:80 http://a/b ::1 a.*.b *a.com a..b a. .a 1.2.3 *.1.2 é.com a/b".split(' ') {
            assert!(normalize_host(text).is_err(), "{text}");
        }
    }
}
