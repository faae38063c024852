//! What a route asks of a request beside its path: host, method and header fields.
//!
//! All three are brought into the one spelling in which requests are compared: hosts and field names
//! in lower case, methods as they are, since those are case-sensitive (RFC 9110, section 9.1).

use std::net::{Ipv4Addr, Ipv6Addr};

use http::{HeaderValue, Method};
use toml::de::DeValue;

use super::values::{FIELD_NAME_FIX, is_ipv4_like, is_name, parse_field_name};
use crate::config::diagnostics::{Report, quoted};
use crate::config::toml_reader::{Item, SpannedStr};

/// A list of hosts; empty where there is none. `without` tells what holds then.
pub fn read_hosts(item: Option<Item>, without: &str, report: &mut Report) -> Option<Vec<String>> {
    let Some(item) = item else { return Some(Vec::new()) };
    let words = item.strings("\"api.example.com\"", report)?;
    let host = |word: &SpannedStr| match normalize_host(word.text) {
        Ok(host) => Ok(host),
        Err(_) if ["", "*"].contains(&word.text) => {
            Err((format!("{} is no host to match", quoted(word.text)), format!("leave `{}` out: {without}", item.key)))
        }
        Err(fix) => Err((format!("{} is no host to match", quoted(word.text)), fix)),
    };
    read_distinct(&item, &words, without, host, report)
}

/// The methods of a route; empty: any.
pub fn read_methods(item: Option<Item>, report: &mut Report) -> Option<Vec<String>> {
    let Some(item) = item else { return Some(Vec::new()) };
    let words = item.strings("[\"GET\"]", report)?;
    let method = |word: &SpannedStr| {
        let upper = word.text.to_ascii_uppercase();
        let message = || format!("{} is no method", quoted(word.text));
        match Method::from_bytes(word.text.as_bytes()) {
            _ if ["", "*", "ANY", "ALL"].contains(&upper.as_str()) => {
                Err((message(), String::from("leave `methods` out: the route then takes any")))
            }
            Ok(_) if word.text == upper => Ok(upper),
            Ok(_) => Err((message(), format!("write `\"{upper}\"`: methods are in upper case"))),
            Err(_) => Err((message(), String::from("write each method by itself, such as `[\"GET\", \"POST\"]`"))),
        }
    };
    read_distinct(&item, &words, "the route then takes any method", method, report)
}

/// Reads each word; reports what is none, what is there twice, and a list of nothing.
fn read_distinct(
    item: &Item,
    words: &[SpannedStr],
    without: &str,
    read: impl Fn(&SpannedStr) -> Result<String, (String, String)>,
    report: &mut Report,
) -> Option<Vec<String>> {
    if words.is_empty() {
        let fix = format!("leave it out: {without}");
        report.problem(item.span.clone(), format!("`{}` is an empty list", item.key), fix);
        return None;
    }
    let mut found: Vec<String> = Vec::new();
    for word in words {
        match read(word) {
            Ok(value) if found.contains(&value) => {
                report.problem(word.span.clone(), format!("{} is there twice", quoted(word.text)), "remove it");
            }
            Ok(value) => found.push(value),
            Err((message, fix)) => report.problem(word.span.clone(), message, fix),
        }
    }
    (found.len() == words.len()).then_some(found)
}

/// A host in the spelling in which requests are compared, or the fix.
fn normalize_host(text: &str) -> Result<String, String> {
    let lower = text.to_lowercase();
    if let Some((_, rest)) = lower.split_once("://") {
        let bare = rest.split(['/', ':', '?']).next().unwrap_or(rest);
        return Err(format!("write the name alone: {}", quoted(bare)));
    }
    if let Some(ip) = lower.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return ip.parse::<Ipv6Addr>().map(|ip| format!("[{ip}]")).map_err(|_| String::from("write `[::1]` for IPv6"));
    }
    if let Ok(ip) = lower.parse::<Ipv6Addr>() {
        return Err(format!("an IPv6 address has brackets: write `\"[{ip}]\"`"));
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
        String::from("a `*` stands for the first label alone, such as `\"*.example.com\"`")
    } else if lower.starts_with('.') {
        format!("write {}", quoted(&format!("*{lower}")))
    } else if !lower.is_ascii() {
        String::from("write the name as it is sent, in punycode: `xn--…`")
    } else {
        String::from("write a name of letters, digits, `-` and dots, such as `\"api.example.com\"`")
    })
}

/// Fields that the gateway removes from every request, or replaces where the client is no trusted proxy. A client could choose
/// a route by them, and so its rules, and the upstream would not see it.
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

/// The header fields that a route asks for.
pub fn read_headers(item: Option<Item>, report: &mut Report) -> Option<Vec<(String, Option<String>)>> {
    let Some(item) = item else { return Some(Vec::new()) };
    let fix = "write `headers = { \"x-version\" = \"2\" }`, or `true` for any value";
    let table = item.table("`headers`", fix, report)?;
    let before = report.count();
    let mut found: Vec<(String, Option<String>)> = Vec::new();
    for entry in table.items() {
        let Some(name) = parse_field_name(entry.key) else {
            let message = format!("{} is no name of a header field", quoted(entry.key));
            report.problem(entry.key_span, message, FIELD_NAME_FIX);
            continue;
        };
        if found.iter().any(|(other, _)| *other == name) {
            let message = format!("{} is there twice: names of fields are compared in lower case", quoted(entry.key));
            report.problem(entry.key_span, message, "remove one of the two");
            continue;
        }
        if NOT_FORWARDED.contains(&name.as_str()) {
            let message =
                format!("a route cannot ask for {}: the upstream does not get it as the client sent it", quoted(&name));
            let fix = "remove it: choose by another field, or by `hosts` or `scheme`";
            report.problem(entry.key_span, message, fix);
            continue;
        }
        match entry.value {
            DeValue::Boolean(true) => found.push((name, None)),
            DeValue::String(value) if HeaderValue::from_str(value).is_ok() && value.trim() == value => {
                found.push((name, Some(value.to_string())));
            }
            DeValue::String(value) => {
                let message = format!("{} is no value that a header field can have", quoted(value));
                report.problem(entry.span, message, "write it without line ends, and without blanks around it");
            }
            DeValue::Boolean(false) => {
                let fix = "remove it: a route without it takes the requests that others leave";
                report.problem(entry.span, "a route cannot ask for a header field to be absent", fix);
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
    fn hosts_are_names_addresses_or_all_under_a_name() {
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
