//! Who is counted: the parts of a rule's key, and what happens to a request that lacks one.
//!
//! A part that may be absent without a word about it would be a hole in the limit, or a wall that
//! nobody put there; so the operator has to choose, and is told where a choice has no effect.

use super::path::is_param_name;
use super::values::{FIELD_NAME_FIX, parse_field_name};
use crate::config::diagnostics::{Report, quoted};
use crate::config::listen::ClientCerts;
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

/// Parts that have a name, each with an example.
const NAMED: [(&str, &str, &str); 5] = [
    ("header", "header field", "header:x-api-key"),
    ("cookie", "cookie", "cookie:session"),
    ("query", "parameter of the query", "query:api_key"),
    ("param", "parameter", "param:id"),
    ("jwt", "claim", "jwt:sub"),
];

const ALWAYS_PRESENT: &str = "`ip`, `host`, `method`, `path`, `route` or `global`";

/// What a rule says about its key.
pub struct KeySettings<'d> {
    pub key: Option<Item<'d>>,
    pub on_missing: Option<Item<'d>>,
    pub ipv4_prefix: Option<Item<'d>>,
    pub ipv6_prefix: Option<Item<'d>>,
    /// Whether requests come with a certificate.
    pub certs: ClientCerts,
}

impl KeySettings<'_> {
    /// The key, and what to do without it. `misspelled`: there is a setting that was probably meant
    /// to be `on_missing_key`.
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
            // Whatever was said about a key that cannot be read may be right.
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

    /// Reports what is said in vain, and what is not said and should be.
    fn report_contradictions(
        &self,
        key: &[KeyPart],
        on_missing: &Option<Option<OnMissing>>,
        misspelled: bool,
        report: &mut Report,
    ) {
        if let (Some(item), true, ClientCerts::Never) = (&self.key, key.contains(&KeyPart::ClientCert), self.certs) {
            let message = "no request has a `client-cert`: clients are not asked for certificates";
            let fix = "name who issues them, in `[listen.https]`: `client_ca = \"FILE\"`";
            report.missing(item.span.clone(), message, fix);
        }
        let uncertain = key.iter().find(|part| client_may_omit(part, self.certs));
        let depends = key.iter().any(|part| matches!(part, KeyPart::Param(_)));
        match (&self.key, &self.on_missing, uncertain) {
            (Some(item), None, Some(part)) if !misspelled => {
                let message =
                    format!("a request may come without `{part}`, and the rule does not say what happens then");
                let fix =
                    "add `on_missing_key = \"refuse\"`, `\"skip\"`, or a key to count by instead, such as `\"ip\"`";
                report.missing(item.span.clone(), message, fix);
            }
            (_, Some(item), None) if !depends => {
                let message = "`on_missing_key` has no effect: every part of `key` is always there";
                report.missing(item.key_span.clone(), message, "remove it");
            }
            _ => {}
        }
        let fallback = match on_missing {
            // It cannot be read, so it may be a key with an address.
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

/// Whether it is up to the client that a part is there.
fn client_may_omit(part: &KeyPart, certs: ClientCerts) -> bool {
    match part {
        // Where there are none, that is the problem.
        KeyPart::ClientCert => certs == ClientCerts::Sometimes,
        KeyPart::Header(_) | KeyPart::Cookie(_) | KeyPart::Query(_) | KeyPart::Jwt(_) => true,
        // That is up to the route.
        KeyPart::Param(_) => false,
        KeyPart::Ip { .. } | KeyPart::Host | KeyPart::Method | KeyPart::Path | KeyPart::Route | KeyPart::Global => {
            false
        }
    }
}

/// The parts of a key; `ip` is what the part of that name stands for.
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
                report.problem(word.span.clone(), format!("{} is there twice", quoted(word.text)), "remove it");
            }
            Ok(part) => parts.push(part),
            Err((message, fix)) => report.problem(word.span.clone(), message, fix),
        }
    }
    if parts.len() > 1 && parts.contains(&KeyPart::Global) {
        let global = words.iter().find(|word| word.text == "global").unwrap_or(&words[0]);
        let message = "`global` stands alone: it counts all requests as one";
        report.problem(global.span.clone(), message, "remove it, or all other parts");
        return None;
    }
    (parts.len() == words.len()).then_some(parts)
}

/// A part without what rules say about addresses, for settings that are no rule's.
pub fn read_part(word: &SpannedStr, report: &mut Report) -> Option<KeyPart> {
    parse_part(word.text, &KeyPart::Ip { v4_prefix: 32, v6_prefix: 128 })
        .map_err(|(message, fix)| report.problem(word.span.clone(), message, fix))
        .ok()
}

/// One part, or message and fix.
fn parse_part(text: &str, ip: &KeyPart) -> Result<KeyPart, (String, String)> {
    let no_part = || format!("{} is no part of a key", quoted(text));
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

/// A part that has a name; `None` if there is no such kind.
fn parse_named_part(kind: &str, name: &str, text: &str) -> Option<Result<KeyPart, (String, String)>> {
    let no_part = || format!("{} is no part of a key", quoted(text));
    let (_, what, example) = NAMED.iter().find(|(known, ..)| *known == kind)?;
    let none = |fix: &str| Err((format!("{} names no {what}", quoted(text)), fix.to_owned()));
    let such_as = format!("write such as `\"{example}\"`");
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
        // White space would not be seen, and is not what was meant.
        _ if name.is_empty() || name.contains(char::is_control) => none(&such_as),
        _ if name != name.trim() => Err((no_part(), format!("write `\"{kind}:{}\"`", name.trim()))),
        "cookie" if name.bytes().all(is_token_byte) => Ok(KeyPart::Cookie(name.to_owned())),
        "cookie" => none("write its name as it stands before `=`, letters, digits, `_`, `-` and the like"),
        "query" if !name.contains(['%', '&', '=']) => Ok(KeyPart::Query(name.to_owned())),
        "query" => none("write its name alone, as it is when decoded, such as `\"query:filter[user]\"`"),
        _ => Ok(KeyPart::Jwt(name.to_owned())),
    })
}

/// A token of RFC 9110, section 5.6.2, which is what RFC 6265 wants for the name of a cookie.
fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// `None` if it cannot be read.
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
    let mut certain = true;
    for (word, part) in words.iter().zip(&parts) {
        let uncertified = *part == KeyPart::ClientCert && certs != ClientCerts::Always;
        if uncertified || client_may_omit(part, certs) || matches!(part, KeyPart::Param(_)) {
            let message = format!("{} may be missing as well", quoted(word.text));
            let fix = format!("fall back to what is always there: {ALWAYS_PRESENT}");
            report.problem(word.span.clone(), message, fix);
            certain = false;
        }
    }
    certain.then_some(OnMissing::Fallback(parts))
}
