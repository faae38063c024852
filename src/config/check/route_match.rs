//! The conditions of a route other than its path: hosts, methods and header fields.
//!
//! Hosts and field names are converted to lower case, as requests are compared. Methods are case-sensitive (RFC 9110,
//! section 9.1).

use std::net::{Ipv4Addr, Ipv6Addr};

use http::{HeaderValue, Method};
use toml::de::DeValue;

use super::values::{FIELD_NAME_FIX, is_ipv4_like, is_name, parse_field_name};
use crate::config::diagnostics::{Report, quoted};
use crate::config::toml_reader::{Item, SpannedStr};

/// Reads a list of hosts; empty without the setting. `without` says, for a fix, what applies without the setting.
pub fn read_hosts(item: Option<Item>, without: &str, report: &mut Report) -> Option<Vec<String>> {
    let Some(item) = item else { return Some(Vec::new()) };
    let words = item.strings("\"api.example.com\"", report)?;
    let host = |word: &SpannedStr| match normalize_host(word.text) {
        Ok(host) => Ok(host),
        Err(_) if ["", "*"].contains(&word.text) => {
            Err((format!("{} is not a host to match", quoted(word.text)), format!("remove `{}`: {without}", item.key)))
        }
        Err(fix) => Err((format!("{} is not a host to match", quoted(word.text)), fix)),
    };
    read_distinct(&item, &words, without, host, report)
}

/// Reads the methods of a route; empty for any method.
pub fn read_methods(item: Option<Item>, report: &mut Report) -> Option<Vec<String>> {
    let Some(item) = item else { return Some(Vec::new()) };
    let words = item.strings("[\"GET\"]", report)?;
    let method = |word: &SpannedStr| {
        let upper = word.text.to_ascii_uppercase();
        let message = || format!("{} is not a method", quoted(word.text));
        match Method::from_bytes(word.text.as_bytes()) {
            _ if ["", "*", "ANY", "ALL"].contains(&upper.as_str()) => {
                Err((message(), String::from("remove `methods`: the route then matches any method")))
            }
            Ok(_) if word.text == upper => Ok(upper),
            Ok(_) => Err((message(), format!("write `\"{upper}\"`: methods are in upper case"))),
            Err(_) => {
                Err((message(), String::from("write each method as its own string, such as `[\"GET\", \"POST\"]`")))
            }
        }
    };
    read_distinct(&item, &words, "the route then matches any method", method, report)
}

/// Reads each value with `read`. Reports invalid values, duplicates, and an empty list.
fn read_distinct(
    item: &Item,
    words: &[SpannedStr],
    without: &str,
    read: impl Fn(&SpannedStr) -> Result<String, (String, String)>,
    report: &mut Report,
) -> Option<Vec<String>> {
    if words.is_empty() {
        let fix = format!("remove it: {without}");
        report.problem(item.span.clone(), format!("`{}` is an empty list", item.key), fix);
        return None;
    }
    let mut found: Vec<String> = Vec::new();
    for word in words {
        match read(word) {
            Ok(value) if found.contains(&value) => {
                report.problem(word.span.clone(), format!("{} is listed twice", quoted(word.text)), "remove it");
            }
            Ok(value) => found.push(value),
            Err((message, fix)) => report.problem(word.span.clone(), message, fix),
        }
    }
    (found.len() == words.len()).then_some(found)
}

/// The host in lower case, or the fix of a problem.
fn normalize_host(text: &str) -> Result<String, String> {
    let lower = text.to_lowercase();
    if let Some((_, rest)) = lower.split_once("://") {
        let bare = rest.split(['/', ':', '?']).next().unwrap_or(rest);
        return Err(format!("write the host name alone: {}", quoted(bare)));
    }
    if let Some(ip) = lower.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return ip.parse::<Ipv6Addr>().map(|ip| format!("[{ip}]")).map_err(|_| String::from("write `[::1]` for IPv6"));
    }
    if let Ok(ip) = lower.parse::<Ipv6Addr>() {
        return Err(format!("put an IPv6 address in brackets: write `\"[{ip}]\"`"));
    }
    if let Some((bare, _)) = lower.rsplit_once(':') {
        return Err(format!("write {}: hosts are compared without their port", quoted(bare)));
    }
    if let Some((bare, _)) = lower.split_once('/') {
        return Err(format!("write {}, and the rest in `path`", quoted(bare)));
    }
    if let Some(bare) = lower.strip_suffix('.') {
        return Err(format!("write {}, without the last dot", quoted(bare)));
    }
    let name = lower.strip_prefix("*.").unwrap_or(&lower);
    let valid = if is_ipv4_like(&lower) { lower.parse::<Ipv4Addr>().is_ok() } else { is_name(name) };
    if valid && !(is_ipv4_like(name) && name != lower) {
        return Ok(lower);
    }
    Err(if name.contains('*') {
        String::from("a `*` can only be the first label, such as `\"*.example.com\"`")
    } else if lower.starts_with('.') {
        format!("write {}", quoted(&format!("*{lower}")))
    } else if !lower.is_ascii() {
        String::from("write the name in punycode, as clients send it: `xn--…`")
    } else {
        String::from("write a name of letters, digits, `-` and dots, such as `\"api.example.com\"`")
    })
}

/// Fields that the gateway removes from every request, or replaces if the client is not a trusted proxy. With such a
/// field, a client could choose a route and its rules, and the upstream would not see the field.
const NOT_FORWARDED: [&str; 13] = [
    "connection",
    "expect",
    "forwarded",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
];

/// Reads the header fields that a request must have: each a value, or `None` for any value.
pub fn read_headers(item: Option<Item>, report: &mut Report) -> Option<Vec<(String, Option<String>)>> {
    let Some(item) = item else { return Some(Vec::new()) };
    let fix = "write `headers = { \"x-version\" = \"2\" }`, or `true` for any value";
    let table = item.table("`headers`", fix, report)?;
    let before = report.count();
    let mut found: Vec<(String, Option<String>)> = Vec::new();
    for entry in table.items() {
        let Some(name) = parse_field_name(entry.key) else {
            let message = format!("{} is not a header field name", quoted(entry.key));
            report.problem(entry.key_span, message, FIELD_NAME_FIX);
            continue;
        };
        if found.iter().any(|(other, _)| *other == name) {
            let message = format!("{} is listed twice: field names are not case-sensitive", quoted(entry.key));
            report.problem(entry.key_span, message, "remove one of the two");
            continue;
        }
        if NOT_FORWARDED.contains(&name.as_str()) {
            let message = format!(
                "a route cannot match {}: the gateway does not forward this field as the client sent it",
                quoted(&name)
            );
            let fix = "remove it, and match another field, `host` or `scheme`";
            report.problem(entry.key_span, message, fix);
            continue;
        }
        match entry.value {
            DeValue::Boolean(true) => found.push((name, None)),
            DeValue::String(value) if HeaderValue::from_str(value).is_ok() && value.trim() == value => {
                found.push((name, Some(value.to_string())));
            }
            DeValue::String(value) => {
                let message = format!("{} is not a valid header field value", quoted(value));
                report.problem(entry.span, message, "write it without line breaks, and without spaces around it");
            }
            DeValue::Boolean(false) => {
                let fix = "remove it: a route without this header matches the requests that more specific routes do not match";
                report.problem(entry.span, "a route cannot require a header field to be absent", fix);
            }
            _ => {
                let fix = "write the value in quotes, or `true` for any value";
                let _: Option<()> = entry.wrong_type("a string or `true`", fix, report);
            }
        }
    }
    (report.count() == before).then_some(found)
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
        for text in [
            "",
            "*",
            "a:80",
            "http://a/b",
            "::1",
            "a.*.b",
            "*a.com",
            "a..b",
            "a.",
            ".a",
            "1.2.3",
            "*.1.2",
            "é.com",
            "a/b",
        ] {
            assert!(normalize_host(text).is_err(), "{text}");
        }
    }
}
