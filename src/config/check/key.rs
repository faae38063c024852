//! The key of a rule: its parts, and what happens to a request without one of them.
//!
//! A client may omit some parts. The operator must then choose with `on_missing_key`: a default would let requests
//! bypass the limit, or refuse them without notice. A choice that has no effect is a problem as well.

use super::values::{FIELD_NAME_FIX, parse_field_name};
use crate::config::diagnostics::{Report, quoted};
use crate::config::listen::ClientCerts;
use crate::config::path::is_param_name;
use crate::config::toml_reader::{Item, SpannedStr, nearest};
use transom_limiter::key::{KeyPart, OnMissing};

const KINDS: [&str; 12] = [
    "ip",
    "header:NAME",
    "cookie:NAME",
    "query:NAME",
    "param:NAME",
    "jwt:CLAIM",
    "client-cert",
    "host",
    "method",
    "path",
    "route",
    "global",
];

/// Kinds of parts that take a name: the kind, its description, an example.
const NAMED: [(&str, &str, &str); 5] = [
    ("header", "header field", "header:x-api-key"),
    ("cookie", "cookie", "cookie:session"),
    ("query", "parameter of the query", "query:api_key"),
    ("param", "parameter", "param:id"),
    ("jwt", "claim", "jwt:sub"),
];

const ALWAYS_PRESENT: &str = "`ip`, `host`, `method`, `path`, `route` or `global`";

/// The settings of a rule about its key.
pub struct KeySettings<'d> {
    pub key: Option<Item<'d>>,
    pub on_missing: Option<Item<'d>>,
    pub ipv4_prefix: Option<Item<'d>>,
    pub ipv6_prefix: Option<Item<'d>>,
    /// Whether requests come with a client certificate.
    pub certs: ClientCerts,
}

impl KeySettings<'_> {
    /// Reads the key, and what happens without it. `misspelled` is true if an unknown setting was probably meant to be
    /// `on_missing_key`.
    pub fn read(self, misspelled: bool, report: &mut Report) -> (Vec<KeyPart>, OnMissing) {
        let prefix = |item: &Option<Item>, bits: u8, default: u8, report: &mut Report| {
            let given = item.as_ref().and_then(|item| item.integer(1..=u64::from(bits), report));
            given.and_then(|bits| u8::try_from(bits).ok()).unwrap_or(default)
        };
        let v4_prefix = prefix(&self.ipv4_prefix, 32, 32, report);
        let v6_prefix = prefix(&self.ipv6_prefix, 128, 64, report);
        let ip = KeyPart::Ip { v4_prefix, v6_prefix };
        let key = self.key.as_ref().and_then(|item| read_parts(item, &ip, report));
        let on_missing = self.on_missing.as_ref().map(|item| read_on_missing(item, &ip, self.certs, report));
        let Some(key) = key else {
            // The key is invalid, so the other settings cannot be checked against it.
            return (Vec::new(), OnMissing::Skip);
        };
        self.report_contradictions(&key, &on_missing, misspelled, report);
        let on_missing = match on_missing {
            None if misspelled => OnMissing::Skip,
            None => OnMissing::Never,
            Some(on_missing) => on_missing.unwrap_or(OnMissing::Skip),
        };
        (key, on_missing)
    }

    /// Reports settings that have no effect, and a missing `on_missing_key`.
    fn report_contradictions(
        &self,
        key: &[KeyPart],
        on_missing: &Option<Option<OnMissing>>,
        misspelled: bool,
        report: &mut Report,
    ) {
        if let (Some(item), true, ClientCerts::Never) = (&self.key, key.contains(&KeyPart::ClientCert), self.certs) {
            let message = "`client-cert` is never present: the gateway does not request client certificates";
            let fix = "add `client_ca = \"FILE\"` to `[listen.https]`, with the certificates of the issuers";
            report.missing(item.span.clone(), message, fix);
        }
        let optional = key.iter().find(|part| client_may_omit(part, self.certs));
        let has_param = key.iter().any(|part| matches!(part, KeyPart::Param(_)));
        match (&self.key, &self.on_missing, optional) {
            (Some(item), None, Some(part)) if !misspelled => {
                let message = format!("a request may lack `{part}`, and the rule has no `on_missing_key`");
                let fix =
                    "add `on_missing_key = \"refuse\"`, `\"skip\"`, or a key to count by instead, such as `\"ip\"`";
                report.missing(item.span.clone(), message, fix);
            }
            (_, Some(item), None) if !has_param => {
                let message = "`on_missing_key` has no effect: every part of `key` is always present";
                report.missing(item.key_span.clone(), message, "remove it");
            }
            _ => {}
        }
        let fallback = match on_missing {
            // An invalid `on_missing_key` may be meant to have a part `ip`.
            Some(None) => return,
            Some(Some(OnMissing::Fallback(parts))) => parts.as_slice(),
            Some(Some(OnMissing::Never | OnMissing::Refuse | OnMissing::Skip)) | None => &[],
        };
        if !misspelled && !key.iter().chain(fallback).any(|part| matches!(part, KeyPart::Ip { .. })) {
            for item in [&self.ipv4_prefix, &self.ipv6_prefix].into_iter().flatten() {
                let message = format!("`{}` has no effect: `key` has no part `ip`", item.key);
                report.missing(item.key_span.clone(), message, "remove it, or count by `ip`");
            }
        }
    }
}

/// Whether a client can send a request without this part.
fn client_may_omit(part: &KeyPart, certs: ClientCerts) -> bool {
    match part {
        // `ClientCerts::Never` is reported as a problem of its own.
        KeyPart::ClientCert => certs == ClientCerts::Sometimes,
        KeyPart::Header(_) | KeyPart::Cookie(_) | KeyPart::Query(_) | KeyPart::Jwt(_) => true,
        // The route decides: see `check_params` in `routes`.
        KeyPart::Param(_) => false,
        KeyPart::Ip { .. } | KeyPart::Host | KeyPart::Method | KeyPart::Path | KeyPart::Route | KeyPart::Global => {
            false
        }
    }
}

/// Reads the parts of a key. `ip` is the part that the text `ip` stands for, with the prefixes of the rule.
pub fn read_parts(item: &Item, ip: &KeyPart, report: &mut Report) -> Option<Vec<KeyPart>> {
    let words = item.strings("\"ip\"", report)?;
    if words.is_empty() {
        report.problem(item.span.clone(), "the key has no parts", "write `key = \"global\"` to count all as one");
        return None;
    }
    let mut parts: Vec<KeyPart> = Vec::new();
    for word in &words {
        match parse_part(word.text, ip) {
            Ok(part) if parts.contains(&part) => {
                report.problem(word.span.clone(), format!("{} is listed twice", quoted(word.text)), "remove it");
            }
            Ok(part) => parts.push(part),
            Err((message, fix)) => report.problem(word.span.clone(), message, fix),
        }
    }
    if parts.len() > 1 && parts.contains(&KeyPart::Global) {
        let global = words.iter().find(|word| word.text == "global").unwrap_or(&words[0]);
        let message = "`global` cannot be combined with other parts: it counts all requests as one";
        report.problem(global.span.clone(), message, "remove it, or remove all other parts");
        return None;
    }
    (parts.len() == words.len()).then_some(parts)
}

/// Reads one part outside of a rule, where an address is not cut to a prefix.
pub fn read_part(word: &SpannedStr, report: &mut Report) -> Option<KeyPart> {
    parse_part(word.text, &KeyPart::Ip { v4_prefix: 32, v6_prefix: 128 })
        .map_err(|(message, fix)| report.problem(word.span.clone(), message, fix))
        .ok()
}

/// Parses one part.
fn parse_part(text: &str, ip: &KeyPart) -> Result<KeyPart, (String, String)> {
    let no_part = || format!("{} is not a key part", quoted(text));
    if let Some((kind, name)) = text.split_once(':')
        && let Some(part) = parse_named_part(kind, name, text)
    {
        return part;
    }
    match text {
        "ip" => Ok(ip.clone()),
        "host" => Ok(KeyPart::Host),
        "method" => Ok(KeyPart::Method),
        "path" => Ok(KeyPart::Path),
        "route" => Ok(KeyPart::Route),
        "global" => Ok(KeyPart::Global),
        "client-cert" => Ok(KeyPart::ClientCert),
        _ => {
            if let Some((_, what, example)) = NAMED.iter().find(|(kind, ..)| *kind == text) {
                return Err((no_part(), format!("name the {what}, such as `\"{example}\"`")));
            }
            let fix = match nearest(text, KINDS.into_iter().filter(|kind| !kind.contains(':'))) {
                Some(guess) => format!("did you mean `\"{guess}\"`?"),
                None => format!("write {}", crate::config::diagnostics::quoted_list(KINDS, "or")),
            };
            Err((no_part(), fix))
        }
    }
}

/// Parses a part of the form `KIND:NAME`; `None` if the kind is unknown.
fn parse_named_part(kind: &str, name: &str, text: &str) -> Option<Result<KeyPart, (String, String)>> {
    let no_part = || format!("{} is not a key part", quoted(text));
    let (_, what, example) = NAMED.iter().find(|(known, ..)| *known == kind)?;
    let none = |fix: &str| Err((format!("{} names no {what}", quoted(text)), fix.to_owned()));
    let such_as = format!("write, for example, `\"{example}\"`");
    Some(match kind {
        "header" => match (parse_field_name(name), parse_field_name(name.trim())) {
            (Some(name), _) => Ok(KeyPart::Header(name)),
            (None, Some(name)) => Err((no_part(), format!("write `\"header:{name}\"`"))),
            (None, None) => none(if name.is_empty() { &such_as } else { FIELD_NAME_FIX }),
        },
        "param" if is_param_name(name) => Ok(KeyPart::Param(name.to_owned())),
        "param" => {
            let bare = name.trim_matches(['{', '}', '*', ' ']).replace('-', "_");
            let bare = if is_param_name(&bare) { bare } else { String::from("id") };
            Err((format!("{} names no parameter of a path", quoted(text)), format!("write `\"param:{bare}\"`")))
        }
        // White space around the name is invisible, and hardly intended.
        _ if name.is_empty() || name.contains(char::is_control) => none(&such_as),
        _ if name != name.trim() => Err((no_part(), format!("write `\"{kind}:{}\"`", name.trim()))),
        "cookie" if name.bytes().all(is_token_byte) => Ok(KeyPart::Cookie(name.to_owned())),
        "cookie" => {
            none("write the name of the cookie, the part before `=`: letters, digits, `_`, `-` and similar characters")
        }
        "query" if !name.contains(['%', '&', '=']) => Ok(KeyPart::Query(name.to_owned())),
        "query" => none("write the decoded name alone, such as `\"query:filter[user]\"`"),
        _ => Ok(KeyPart::Jwt(name.to_owned())),
    })
}

/// Whether a byte can be in a token (RFC 9110, section 5.6.2), the form of cookie names in RFC 6265.
fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Reads `on_missing_key`; `None` after reporting a problem.
fn read_on_missing(item: &Item, ip: &KeyPart, certs: ClientCerts, report: &mut Report) -> Option<OnMissing> {
    let words = item.strings("\"refuse\"", report)?;
    if let [SpannedStr { text, span }] = words.as_slice() {
        match *text {
            "refuse" => return Some(OnMissing::Refuse),
            "skip" => return Some(OnMissing::Skip),
            _ => {}
        }
        if !text.contains(':') && parse_part(text, ip).is_err() {
            let fix = match nearest(text, ["refuse", "skip"]) {
                Some(guess) => format!("did you mean `\"{guess}\"`?"),
                None => String::from("write `\"refuse\"`, `\"skip\"`, or a key to count by instead, such as `\"ip\"`"),
            };
            report.problem(span.clone(), format!("`on_missing_key` cannot be {}", quoted(text)), fix);
            return None;
        }
    }
    let parts = read_parts(item, ip, report)?;
    let mut always_present = true;
    for (word, part) in words.iter().zip(&parts) {
        let lacks_cert = *part == KeyPart::ClientCert && certs != ClientCerts::Always;
        if lacks_cert || client_may_omit(part, certs) || matches!(part, KeyPart::Param(_)) {
            let message = format!("{} may be missing too", quoted(word.text));
            let fix = format!("use a part that is always present: {ALWAYS_PRESENT}");
            report.problem(word.span.clone(), message, fix);
            always_present = false;
        }
    }
    always_present.then_some(OnMissing::Fallback(parts))
}
