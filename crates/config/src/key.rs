//! The key of a rule: its parts, and what happens to a request without one of them.
//!
//! A client may omit some parts. The operator must then choose with `on_missing_key`: a default would let requests
//! bypass the limit, or refuse them without notice. A choice that has no effect is a problem as well.

use super::descriptor::Descriptor;
use super::diagnostics::{Parsed, Report, quoted, quoted_list};
use super::key_kind::{Argument, CLIENT, IP, KINDS, KeyKind, NamedPart, PARAM, Presence, forms};
use super::listen::ClientCerts;
use super::settings::{Choice, Custom, Integer, Shape};
use super::toml_reader::{Item, SpannedStr, Table, nearest};
use super::values::{PREFIX_NOT_STATED, parse_field_name};
use transom_limiter::key::{KeyPart, OnMissing, PartArgument, Prefixes};

/// Prefixes of addresses: the kind of the part, the version of IP, the number of bits of an address, an example.
const PREFIXES: [(&str, &str, u8, &str); 2] =
    [("ip-prefix", "IPv4", 32, "ip-prefix:24"), ("ip-prefix6", "IPv6", 128, "ip-prefix6:56")];

/// What happens to a key that names no client of `[clients]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnUnknownKey {
    /// It is counted like any other.
    Count,
    /// It counts as missing.
    Missing,
    /// The request is refused.
    Refuse,
}

const ON_UNKNOWN_KEY: [(&str, OnUnknownKey); 3] =
    [("count", OnUnknownKey::Count), ("missing", OnUnknownKey::Missing), ("refuse", OnUnknownKey::Refuse)];

settings! {
    /// The key of a rule.
    pub struct KeySettings {
        /// What is counted by. Required, except with a `descriptor`: then its entries without a value are the key.
        key: Vec<KeyPart> = Custom::or_empty(|| Shape::one_or_list("[key part](#keys)"), read_parts);
        /// What to do if a part of the key is absent or empty; required if a part may be absent. `"refuse"`: 400, or 401 for a
        /// part by which [clients](#unknown-keys) are known. `"skip"`: the rule does not apply. A key that is always present, such as `"ip"`: count by this key instead.
        on_missing_key: Option<OnMissing> = Custom::or_empty(
            || Shape::AnyOf(vec![Shape::Words(vec!["refuse", "skip"]), Shape::one_or_list("a key")]),
            |item, report| read_on_missing(item, report).map(Some),
        );
        /// What to do with a key that names no [client](#unknown-keys): its API key or subject is not in the clients file.
        /// `"count"`: it is counted like any other. `"missing"`: as `on_missing_key` says. `"refuse"`: 401. With the part
        /// `"client"`, the default is `"refuse"`, and `"count"` is an error.
        on_unknown_key: OnUnknownKey = Choice(OnUnknownKey::Count, &ON_UNKNOWN_KEY);
        /// IPv4 addresses with this many equal leading bits are one client, as with the part `"ip-prefix:BITS"`.
        ipv4_prefix: u8 = Integer(32, 1..=32);
        /// IPv6 addresses with this many equal leading bits are one client, as with the part `"ip-prefix6:BITS"`.
        ipv6_prefix: u8 = Integer(64, 1..=128);
    }
}

impl KeySettings {
    /// Checks the settings together. Returns the key, which is empty if it is invalid, and what happens without it and to one
    /// that names no client.
    pub fn finish(
        mut self,
        descriptor: Option<&Descriptor>,
        table: &mut Table,
        certs: ClientCerts,
        report: &mut Report,
    ) -> (Vec<KeyPart>, OnMissing, OnUnknownKey) {
        match descriptor {
            Some(descriptor) if table.lacks("key") => self.key = descriptor.key(),
            Some(_) => {}
            None if table.given("descriptor").is_some() => {}
            None => {
                let fix = "write `key = \"ip\"` to count each address, or `key = \"global\"` to count all as one";
                table.require_known("key", fix);
            }
        }
        self.check_prefixes(table, report);
        if let Some(OnMissing::Fallback(parts)) = &mut self.on_missing_key {
            self::set_prefixes(parts, self.ipv4_prefix, self.ipv6_prefix);
        }
        self::set_prefixes(&mut self.key, self.ipv4_prefix, self.ipv6_prefix);
        self.resolve_on_unknown(table, report);
        self.check_fallback(table, certs, report);
        if !self.key.is_empty() {
            self.check_effect(table, certs, report);
        }
        let on_missing = match self.on_missing_key {
            Some(on_missing) => on_missing,
            None if table.lacks("on_missing_key") => OnMissing::Never,
            None => OnMissing::Skip,
        };
        (self.key, on_missing, self.on_unknown_key)
    }

    /// A request of no client has no counter under a rule by client.
    fn resolve_on_unknown(&mut self, table: &Table, report: &mut Report) {
        if self.on_unknown_key != OnUnknownKey::Count || !self.key.iter().any(|part| CLIENT.has(part)) {
            return;
        }
        self.on_unknown_key = OnUnknownKey::Refuse;
        if let Some(item) = table.given("on_unknown_key").filter(|item| item.value.as_str() == Some("count")) {
            let message =
                "`on_unknown_key` cannot be `count`: a rule by `client` has no counter for a key of no client";
            let fix = "write `\"refuse\"` or `\"missing\"`, or remove it: `\"refuse\"` is the default here";
            report.problem(item.span, message, fix);
        }
    }

    fn fallback(&self) -> &[KeyPart] {
        match &self.on_missing_key {
            Some(OnMissing::Fallback(parts)) => parts,
            Some(OnMissing::Never | OnMissing::Refuse | OnMissing::Skip) | None => &[],
        }
    }

    /// Reports parts of `on_missing_key` that a request may lack as well.
    fn check_fallback(&self, table: &Table, certs: ClientCerts, report: &mut Report) {
        let words = table.given("on_missing_key").map(|item| item.words()).unwrap_or_default();
        for (word, part) in words.into_iter().zip(self.fallback()) {
            let may_lack = match KeyKind::of(part).presence {
                Presence::All => false,
                Presence::WithCertificate => certs != ClientCerts::Always,
                Presence::InCertificate | Presence::OnRoutes | Presence::Optional => true,
            };
            if may_lack {
                let always = KINDS.into_iter().filter(|kind| kind.presence == Presence::All).filter_map(KeyKind::form);
                let fix = format!("use a part that is always present: {}", quoted_list(always, "or"));
                report.problem(word.span, format!("{} may be missing too", quoted(word.text)), fix);
            }
        }
    }

    /// Reports settings that have no effect, and a missing `on_missing_key`.
    fn check_effect(&self, table: &Table, certs: ClientCerts, report: &mut Report) {
        let key_span = table.given("key").map_or(table.span.clone(), |item| item.span);
        let of_certificate = |part: &&KeyPart| KeyKind::of(part).needs_certificate();
        if let (Some(part), ClientCerts::Never) = (self.key.iter().find(of_certificate), certs) {
            let message = format!("`{part}` is never present: the gateway does not request client certificates");
            let fix = "add `client_ca = \"FILE\"` to `[listen.https]`, with the certificates of the issuers";
            report.missing(key_span.clone(), message, fix);
        }
        let counts_as_missing = self.on_unknown_key == OnUnknownKey::Missing;
        let has_param = self.key.iter().any(|part| PARAM.has(part));
        match (table.given("on_missing_key"), self.key.iter().find(|part| client_may_omit(part, certs))) {
            (None, Some(part)) if table.lacks("on_missing_key") => {
                let message = format!("a request may lack `{part}`, and the rule has no `on_missing_key`");
                let fix =
                    "add `on_missing_key = \"refuse\"`, `\"skip\"`, or a key to count by instead, such as `\"ip\"`";
                report.missing(key_span, message, fix);
            }
            (None, None) if table.lacks("on_missing_key") && counts_as_missing => {
                let message = "`on_unknown_key = \"missing\"` needs `on_missing_key`, which says what happens then";
                let fix =
                    "add `on_missing_key = \"refuse\"`, `\"skip\"`, or a key to count by instead, such as `\"ip\"`";
                report.missing(key_span, message, fix);
            }
            (Some(item), None) if !has_param && !counts_as_missing => {
                let message = "`on_missing_key` has no effect: every part of `key` is always present";
                report.missing(item.key_span, message, "remove it");
            }
            _ => {}
        }
    }

    /// Reports a prefix for addresses that no part leaves open.
    fn check_prefixes(&self, table: &Table, report: &mut Report) {
        // An invalid key may be meant to have a part `ip`.
        let is_known = self.on_missing_key.is_some() || table.lacks("on_missing_key");
        if self.key.is_empty() || !is_known {
            return;
        }
        let prefixes = self.key.iter().chain(self.fallback()).filter_map(KeyPart::prefixes);
        let prefixes: Vec<[u8; 2]> = prefixes.map(|Prefixes { v4, v6 }| [v4, v6]).collect();
        for (version, setting) in ["ipv4_prefix", "ipv6_prefix"].into_iter().enumerate() {
            let Some(item) = table.given(setting) else { continue };
            let reason = match prefixes.is_empty() {
                true => "`key` has no part `ip`",
                false if prefixes.iter().all(|stated| stated[version] != PREFIX_NOT_STATED) => {
                    "`key` states the prefix"
                }
                false => continue,
            };
            let message = format!("`{setting}` has no effect: {reason}");
            report.missing(item.key_span, message, "remove it, or count by `ip`");
        }
    }
}

/// Sets the prefixes of addresses that the parts of a key do not state.
fn set_prefixes(parts: &mut [KeyPart], ipv4_prefix: u8, ipv6_prefix: u8) {
    for part in parts {
        if let PartArgument::Prefixes(Prefixes { v4, v6 }) = &mut part.argument {
            let or = |stated: u8, other: u8| if stated == PREFIX_NOT_STATED { other } else { stated };
            (*v4, *v6) = (or(*v4, ipv4_prefix), or(*v6, ipv6_prefix));
        }
    }
}

/// Adds the prefix for one version of IP to a part that states only the other one: both are one part of the key.
fn join_prefixes(parts: &mut [KeyPart], part: &KeyPart) -> bool {
    let Some(added) = part.prefixes() else { return false };
    parts.iter_mut().any(|known| {
        let PartArgument::Prefixes(Prefixes { v4, v6 }) = &mut known.argument else { return false };
        let states_one = |one: u8, other: u8| (one == PREFIX_NOT_STATED) != (other == PREFIX_NOT_STATED);
        let complements = states_one(*v4, added.v4) && states_one(*v6, added.v6);
        if complements {
            (*v4, *v6) = ((*v4).max(added.v4), (*v6).max(added.v6));
        }
        complements
    })
}

/// Whether a client can send a request without this part.
fn client_may_omit(part: &KeyPart, certs: ClientCerts) -> bool {
    match KeyKind::of(part).presence {
        // `ClientCerts::Never` is reported as a problem of its own.
        Presence::WithCertificate => certs == ClientCerts::Sometimes,
        Presence::InCertificate => certs != ClientCerts::Never,
        Presence::Optional => true,
        // `config::route` checks that the path of the route has the parameter, unless `on_missing_key` is set.
        Presence::All | Presence::OnRoutes => false,
    }
}

/// Reads the parts of a key. Addresses whose prefix no part states count as they are.
pub fn read_whole_parts(item: &Item, report: &mut Report) -> Option<Vec<KeyPart>> {
    let mut parts = read_parts(item, report)?;
    set_prefixes(&mut parts, 32, 128);
    Some(parts)
}

/// Reads the parts of a key. Prefixes of addresses may be [`PREFIX_NOT_STATED`].
fn read_parts(item: &Item, report: &mut Report) -> Option<Vec<KeyPart>> {
    let words = item.strings("\"ip\"", report)?;
    if words.is_empty() {
        return report.reject(
            item.span.clone(),
            "the key has no parts",
            "write `key = \"global\"` to count all as one",
        );
    }
    let mut parts: Vec<KeyPart> = Vec::new();
    let mut is_valid = true;
    for word in &words {
        let is_address = |part: &KeyPart| part.prefixes().is_some();
        let problem = match parse_part(word.text) {
            Ok(part) if join_prefixes(&mut parts, &part) => continue,
            Ok(part) if parts.contains(&part) => {
                (format!("{} is listed twice", quoted(word.text)), "remove it".to_owned())
            }
            Ok(part) if is_address(&part) && parts.iter().any(is_address) => {
                (format!("{} is the address again", quoted(word.text)), "keep one part of the address".to_owned())
            }
            Ok(part) => {
                parts.push(part);
                continue;
            }
            Err(problem) => problem,
        };
        is_valid = false;
        report.problem(word.span.clone(), problem.0, problem.1);
    }
    if parts.len() > 1 && parts.contains(&KeyPart::GLOBAL) {
        let global = words.iter().find(|word| word.text == "global").unwrap_or(&words[0]);
        let message = "`global` cannot be combined with other parts: it counts all requests as one";
        return report.reject(global.span.clone(), message, "remove it, or remove all other parts");
    }
    is_valid.then_some(parts)
}

/// Reads one part.
pub fn read_part(word: &SpannedStr, report: &mut Report) -> Option<KeyPart> {
    report.accept(word.span.clone(), parse_part(word.text))
}

/// The names that other products have for parts.
const FOREIGN_PARTS: [(&str, &[&str]); 5] = [
    (
        "ip",
        &[
            "remote_addr",
            "binary_remote_addr",
            "client_ip",
            "remote_ip",
            "source_ip",
            "address",
            "remote_address",
            "remote_host",
            "http.request.remote.host",
            "src",
            "source",
        ],
    ),
    ("host", &["server_name", "http_host", "http.request.host", "hostname"]),
    ("path", &["uri", "request_uri", "document_uri", "http.request.uri.path", "url"]),
    ("method", &["request_method", "http.request.method"]),
    ("basic-user", &["remote_user", "auth_user", "http.auth.user.id"]),
];
/// How they begin where a name follows.
const FOREIGN_KINDS: [(&str, &[&str]); 4] = [
    ("header", &["http_", "http.request.header.", "req.hdr(", "hdr(", "header ", "header."]),
    ("cookie", &["cookie_", "http.request.cookie.", "req.cook(", "cookie ", "cookie."]),
    ("query", &["arg_", "http.request.uri.query.", "url_param(", "query ", "query."]),
    ("jwt", &["jwt_claim_", "jwt ", "jwt.", "claim:", "claims."]),
];
/// Fields with the address of a client, which `trusted_proxies` evaluates.
const ADDRESS_FIELDS: [&str; 2] = ["x-forwarded-for", "x-real-ip"];

/// The fix for variables of nginx, fetches of HAProxy and placeholders of Caddy, and for several parts in one text.
fn foreign_fix(text: &str) -> Option<String> {
    let bare = text.trim_start_matches(['$', '{', '%', '[']).trim_end_matches(['}', ']']);
    if is_address_field(bare) {
        return Some(
            "write `\"ip\"`: with `trusted_proxies`, it is the address that they name in `X-Forwarded-For`".to_owned(),
        );
    }
    if let Some(bits) = bare.strip_prefix("ip/").filter(|bits| parse_part(&format!("ip-prefix:{bits}")).is_ok()) {
        return Some(format!("did you mean `\"ip-prefix:{bits}\"`?"));
    }
    // These stand between several variables, although names of fields may contain them.
    let is_one = !bare.contains(['$', '+', '|']);
    if let Some(part) = foreign_part(bare).filter(|_| is_one) {
        return Some(format!("did you mean `\"{part}\"`?"));
    }
    let words = text.split(['$', '{', '}', '%', '[', ']', ',', '+', '|', ' ']).filter(|word| !word.is_empty());
    let words: Vec<&str> = words.collect();
    if words.len() < 2 {
        return None;
    }
    let known = |word: &str| match word {
        _ if parse_part(word).is_ok() => Some(word.to_owned()),
        _ if is_address_field(word) => Some("ip".to_owned()),
        _ => foreign_part(word),
    };
    let mut parts: Vec<String> = words.into_iter().map(known).collect::<Option<_>>()?;
    parts.dedup();
    Some(format!("write a list: `[\"{}\"]`", parts.join("\", \"")))
}

/// The part that a word of another product means.
fn foreign_part(word: &str) -> Option<String> {
    let lower = word.to_ascii_lowercase();
    if let Some((part, _)) = FOREIGN_PARTS.iter().find(|(_, names)| names.contains(&lower.as_str())) {
        return Some((*part).to_owned());
    }
    let (kind, name) = foreign_name(word)?;
    let part = format!("{kind}:{name}");
    parse_part(&part).is_ok().then_some(part)
}

/// The kind and the name of the part that a word of another product means.
fn foreign_name(word: &str) -> Option<(&'static str, String)> {
    let lower = word.to_ascii_lowercase();
    let (kind, begin) = FOREIGN_KINDS.iter().find_map(|(kind, begins)| {
        begins.iter().find(|begin| lower.starts_with(*begin)).map(|begin| (*kind, *begin))
    })?;
    let name = word[begin.len()..].trim_end_matches(')').trim();
    let name = if begin == "http_" { lower[begin.len()..].replace('_', "-") } else { name.to_owned() };
    Some((kind, name))
}

/// Whether a word is or names a field of [`ADDRESS_FIELDS`]. Clients can forge it.
fn is_address_field(word: &str) -> bool {
    let name = match foreign_name(word) {
        Some(("header", name)) => name,
        Some(_) => return false,
        None => word.to_owned(),
    };
    ADDRESS_FIELDS.contains(&name.to_ascii_lowercase().as_str())
}

/// Parses one part. Prefixes of addresses may be [`PREFIX_NOT_STATED`].
pub fn parse_part(text: &str) -> Parsed<KeyPart> {
    let no_part = || format!("{} is not a key part", quoted(text));
    if let Some(kind) = KeyKind::named(text).filter(|kind| matches!(kind.argument, Argument::None)) {
        return Ok(kind.part());
    }
    if let Some((kind, name)) = text.split_once(':')
        && let Some(part) = parse_named_part(kind, name, text)
    {
        return part;
    }
    match KeyKind::named(text).map(|kind| (kind, &kind.argument)) {
        Some((kind, Argument::Unwritten)) => return Ok(kind.part()),
        Some((kind, Argument::Prefixes)) => return Ok(kind.of_prefixes(PREFIX_NOT_STATED, PREFIX_NOT_STATED)),
        Some((_, Argument::Name(form))) => {
            return Err((no_part(), format!("name the {}, such as `\"{}\"`", form.what, form.example)));
        }
        Some((_, Argument::None)) | None => {}
    }
    if let Some((.., example)) = PREFIXES.iter().find(|(kind, ..)| *kind == text) {
        return Err((no_part(), format!("add the number of bits, such as `\"{example}\"`")));
    }
    if let Some(fix) = foreign_fix(text) {
        return Err((no_part(), fix));
    }
    let fix = match nearest(text, forms().filter(|form| !form.contains(':'))) {
        None if text.contains('-') && parse_field_name(text).is_some() => format!("did you mean `\"header:{text}\"`?"),
        Some(guess) => format!("did you mean `\"{guess}\"`?"),
        None => format!("write {}", quoted_list(forms(), "or")),
    };
    Err((no_part(), fix))
}

/// Parses a part of the form `KIND:NAME`; `None` if the kind is unknown.
fn parse_named_part(kind: &str, name: &str, text: &str) -> Option<Parsed<KeyPart>> {
    if let Some((kind, version, bits, _)) = PREFIXES.iter().find(|(known, ..)| *known == kind) {
        let prefix = name.parse().ok().filter(|prefix| (1..=*bits).contains(prefix));
        return Some(match (prefix, *kind) {
            (Some(v4), "ip-prefix") => Ok(IP.of_prefixes(v4, PREFIX_NOT_STATED)),
            (Some(v6), _) => Ok(IP.of_prefixes(PREFIX_NOT_STATED, v6)),
            (None, _) => Err((
                format!("{} is no prefix of an {version} address", quoted(text)),
                format!("write a number of bits from 1 to {bits}, such as `\"{kind}:{}\"`", bits / 4 * 3),
            )),
        });
    }
    let kind = KeyKind::named(kind)?;
    let Argument::Name(form) = &kind.argument else { return None };
    let name = (form.parse)(&NamedPart { text, kind: kind.part.name, name, form });
    Some(name.map(|name| kind.of_name(&name)))
}

fn read_on_missing(item: &Item, report: &mut Report) -> Option<OnMissing> {
    let words = item.strings("\"refuse\"", report)?;
    if let [SpannedStr { text, span }] = words.as_slice() {
        match *text {
            "refuse" => return Some(OnMissing::Refuse),
            "skip" => return Some(OnMissing::Skip),
            _ => {}
        }
        if !text.contains(':') && parse_part(text).is_err() {
            let fix = match nearest(text, ["refuse", "skip"]) {
                Some(guess) => format!("did you mean `\"{guess}\"`?"),
                None => String::from("write `\"refuse\"`, `\"skip\"`, or a key to count by instead, such as `\"ip\"`"),
            };
            return report.reject(span.clone(), format!("`on_missing_key` cannot be {}", quoted(text)), fix);
        }
    }
    read_parts(item, report).map(OnMissing::Fallback)
}
