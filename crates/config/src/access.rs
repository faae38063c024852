//! `[access]`, and the access file that it names: deny entries. Also the allow lists of routes.

use std::cell::OnceCell;
use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::clients::{Clients, ClientsSource};
use super::diagnostics::{Problem, Report, Span, quoted};
use super::key::{self, parse_part};
use super::key_kind::{JWT, KeyKind, is_secret_part};
use super::named_file::{read_named_file, read_text_alone};
use super::overrides::read_value;
use super::settings::{Choice, Custom, Inline, Required, Section, Shape, Text, Texts, Word, section_table};
use super::toml_reader::{Item, SpannedStr, SpannedString, Table, nearest};
use super::values::{read_digest, read_network};
use super::{Config, DenyId, RouteId};
use transom_limiter::handles::IdVec;
use transom_limiter::ip_prefix::Network;
use transom_limiter::key::KeyPart;
use transom_limiter::rule::KeyValue;
use transom_limiter::secret_digest::Digest;

/// In messages.
const FILE: &str = "the access file";
const DENY_FIX: &str = "write `[[deny]]`, then `network`, `client` or `key` on a line";
const ADD_COMMAND: &str = "transom deny add 203.0.113.0/24";
const KEY_FIX: &str = "write `key = { part = \"header:x-device\", value = \"VALUE\" }`";
const ALLOW: &str = "[\"10.0.0.0/8\", \"client:acme\"]";
/// The prefix of a client in an allow list, and in the text of a deny entry.
pub const CLIENT_PREFIX: &str = "client:";
/// The longest reason, in characters.
const REASON_CHARS: usize = 256;

/// Where the deny entries are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AccessSource {
    /// The access file.
    File,
    /// The store of `[counters.shared]`.
    Shared,
}

settings! {
    /// Who is denied.
    pub struct AccessSettings {
        /// Where the deny entries are. `"shared"`: in the store of `[counters.shared]`, equal on all gateways.
        source: AccessSource =
            Choice(AccessSource::File, &[("file", AccessSource::File), ("shared", AccessSource::Shared)]);
        /// The access file. With `source = "shared"`: the copy from which a gateway starts while the store is away.
        file: Option<SpannedString> =
            Required(Text("path of a file", "\"access.toml\""), "write `file = \"access.toml\"`");
    }
}

settings! {
    /// An entry of the access file: `[[deny]]`, with one of `network`, `client` and `key`.
    pub struct DenySettings {
        /// Network or address of the client.
        network: Option<Network> =
            Word { shape: "network", example: "\"203.0.113.0/24\"", read: read_network };
        /// Name of a [client](#clients).
        client: Option<SpannedString> = Text("name", "\"acme\"");
        /// Value of a [key part](#keys), such as `{ part = "header:x-device", value = "a1b2" }`. Of a secret, such as an API
        /// key, the `value` is its digest: `"sha256:…"`.
        key: DeniedKeySettings = Inline::<DeniedKeySettings>::or(KEY_FIX);
        /// Names of the routes that are denied. Without it: all.
        routes: Vec<SpannedString> = Texts("name", "[\"login\"]");
        /// When the entry ends by itself. Without it: never.
        until: Option<u64> = Custom::or_empty(|| Shape::Text("RFC 3339 time"), |item, report| read_until(item, report).map(Some));
        /// For operators, in logs and in `transom deny list`. Callers do not see it.
        reason: Option<String> = Word { shape: "text", example: "\"scraper\"", read: read_reason };
    }
}

settings! {
    /// The value of a key part.
    pub struct DeniedKeySettings {
        /// As in a rule.
        part: Option<SpannedString> = Required(Text("[key part](#keys)", "\"header:x-device\""), KEY_FIX);
        /// As in overrides.
        value: Option<SpannedString> = Required(Text("text", "\"VALUE\""), KEY_FIX);
    }
}

/// `[access]` and the access file.
#[derive(Clone, PartialEq, Debug)]
pub struct Access {
    pub source: AccessSource,
    pub file: PathBuf,
    /// The entries of the file, in its order. Shared with what is compiled from them.
    pub deny: Arc<IdVec<DenyId, DenyEntry>>,
}

/// A deny entry: requests that get 403.
#[derive(Clone, PartialEq, Debug)]
pub struct DenyEntry {
    pub id: EntryId,
    pub target: DenyTarget,
    /// Empty: all.
    pub routes: Box<[RouteId]>,
    /// The end of the entry, Unix milliseconds.
    pub until_ms: Option<u64>,
    pub reason: Option<String>,
}

/// A deny entry of the store, whatever the routes and clients of this gateway.
#[derive(Clone, PartialEq, Debug)]
pub struct SharedEntry {
    target: DenyTarget,
    /// Names.
    routes: Vec<String>,
    until_ms: Option<u64>,
    reason: Option<String>,
}

impl SharedEntry {
    /// Reads the text of an entry: the JSON of [`DenyEntry::to_json`]. `None` if it has another form.
    pub fn parse(text: &str) -> Option<SharedEntry> {
        let entry: Value = serde_json::from_str(text).ok()?;
        let string = |value: &Value| value.as_str().map(str::to_owned);
        let key = |key: &Value| {
            let (part, value) = (parse_part(key["part"].as_str()?).ok()?, string(&key["value"])?);
            Some((part, Digest::parse(&value).map_or(KeyValue::Clear(value), KeyValue::Digest)))
        };
        let target = match (&entry["network"], &entry["client"], &entry["key"]) {
            (Value::String(network), _, _) => DenyTarget::Network(network.parse().ok()?),
            (_, Value::String(client), _) => DenyTarget::Client(client.clone()),
            (_, _, denied) => DenyTarget::Key(Box::new(key(denied)?)),
        };
        let until_ms = match &entry["until"] {
            Value::Null => None,
            until => Some(parse_time(until.as_str()?).ok()?),
        };
        let routes = entry["routes"].as_array()?.iter().map(string).collect::<Option<_>>()?;
        Some(SharedEntry { target, routes, until_ms, reason: string(&entry["reason"]) })
    }

    pub fn has_ended(&self, now_ms: u64) -> bool {
        self.until_ms.is_some_and(|until_ms| until_ms <= now_ms)
    }

    /// Whether the entry denies a client.
    pub fn is_of_client(&self, name: &str) -> bool {
        matches!(&self.target, DenyTarget::Client(client) if client == name)
    }

    /// As [`DenyEntry::to_json`], with all its routes. `id`: its name in the store.
    pub fn to_json(&self, id: &str, now_ms: u64) -> Value {
        let mut shown = json!({
            "id": id, "routes": self.routes, "until": self.until_ms.map(rfc3339), "reason": self.reason,
            "ended": self.has_ended(now_ms),
        });
        self.target.show_in(&mut shown);
        shown
    }

    /// Why the entry has no effect on a gateway.
    ///
    /// # Errors
    ///
    /// The reason. `has_client`: whether the gateway knows a client.
    pub fn check_effect(&self, config: &Config, has_client: impl Fn(&str) -> bool) -> Result<(), String> {
        match &self.target {
            DenyTarget::Client(name) if !has_client(name) => Err(format!("this gateway has no client `{name}`")),
            _ if self.resolve(config).is_none() => {
                Err(format!("this gateway has none of its routes: `{}`", self.routes.join("`, `")))
            }
            _ => Ok(()),
        }
    }

    /// The entry as it applies on this gateway; `None` if it has none of its routes.
    pub fn resolve(&self, config: &Config) -> Option<DenyEntry> {
        let known = |name: &String| config.routes.position(|route| route.name == *name);
        let routes: Box<[RouteId]> = self.routes.iter().filter_map(known).collect();
        (self.routes.is_empty() || !routes.is_empty()).then(|| DenyEntry {
            id: EntryId::new(&self.target, self.routes.iter().map(String::as_str)),
            target: self.target.clone(),
            routes,
            until_ms: self.until_ms,
            reason: self.reason.clone(),
        })
    }
}

/// Whom an entry denies. The text is as in `transom deny add`.
#[derive(Clone, PartialEq, Debug)]
pub enum DenyTarget {
    Network(Network),
    Client(String),
    Key(Box<(KeyPart, KeyValue)>),
}

/// Identifies an entry by whom it denies and on which routes, in all files and on all gateways.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct EntryId(u64);

impl EntryId {
    /// The first 48 bits of the SHA-256 of a text: the target, with the digest of a value, then a line break and the name of
    /// each route, in ascending order. The form must not change, because operators keep ids.
    pub fn new<'n>(target: &DenyTarget, routes: impl IntoIterator<Item = &'n str>) -> EntryId {
        let mut text = match target {
            DenyTarget::Key(key) => format!("{}={}", key.0, key.1.digest()),
            DenyTarget::Network(_) | DenyTarget::Client(_) => target.to_string(),
        };
        let mut routes: Vec<&str> = routes.into_iter().collect();
        routes.sort_unstable();
        routes.iter().for_each(|route| text.extend(["\n", route]));
        let digest = Sha256::digest(text.as_bytes());
        EntryId(digest.iter().take(6).fold(0, |id, byte| id << 8 | u64::from(*byte)))
    }
}

impl FromStr for EntryId {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<EntryId, Self::Err> {
        u64::from_str_radix(text, 16).map(EntryId)
    }
}

impl fmt::Display for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:012x}", self.0)
    }
}

impl fmt::Display for DenyTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DenyTarget::Network(network) => network.fmt(f),
            DenyTarget::Client(name) => write!(f, "{CLIENT_PREFIX}{name}"),
            DenyTarget::Key(key) => match &key.1 {
                KeyValue::Clear(value) => write!(f, "{}={}", key.0, value.escape_debug()),
                KeyValue::Digest(digest) => write!(f, "{}={}", key.0, digest.brief()),
            },
        }
    }
}

impl DenyEntry {
    pub fn has_ended(&self, now_ms: u64) -> bool {
        self.until_ms.is_some_and(|until_ms| until_ms <= now_ms)
    }

    /// The names of its routes.
    pub fn route_names<'c>(&self, config: &'c Config) -> Vec<&'c str> {
        self.routes.iter().map(|route| config.routes[*route].name.as_str()).collect()
    }

    /// As `transom deny list --json` and the admin API show it.
    pub fn to_json(&self, config: &Config, now_ms: u64) -> Value {
        let mut shown = json!({
            "id": self.id.to_string(), "routes": self.route_names(config), "until": self.until_ms.map(rfc3339),
            "reason": self.reason, "ended": self.has_ended(now_ms),
        });
        self.target.show_in(&mut shown);
        shown
    }
}

impl DenyTarget {
    /// Adds the target to the JSON of an entry.
    fn show_in(&self, shown: &mut Value) {
        match self {
            DenyTarget::Network(network) => shown["network"] = json!(network.to_string()),
            DenyTarget::Client(name) => shown["client"] = json!(name),
            DenyTarget::Key(key) => {
                let value = match &key.1 {
                    KeyValue::Clear(text) => text.clone(),
                    KeyValue::Digest(digest) => digest.to_string(),
                };
                shown["key"] = json!({ "part": key.0.to_string(), "value": value });
            }
        }
    }
}

/// An entry of the allow list of a route.
#[derive(Clone, PartialEq, Debug)]
pub enum Allowed {
    Network(Network),
    Client(SpannedString),
}

/// The clients whose names can be checked.
pub struct KnownClients<'c> {
    pub clients: Option<&'c Clients>,
    /// False if some clients may be missing here, because part of the configuration is invalid.
    pub complete: bool,
    names: OnceCell<HashSet<&'c str>>,
}

impl<'c> KnownClients<'c> {
    pub fn new(clients: Option<&'c Clients>, complete: bool) -> KnownClients<'c> {
        // Those in the store are not known here.
        let complete = complete && clients.is_none_or(|clients| clients.source == ClientsSource::File);
        KnownClients { clients, complete, names: OnceCell::new() }
    }

    /// Reports a name that no client has.
    pub fn check(&self, name: &str, span: &Span, report: &mut Report) {
        let names = || self.clients.iter().flat_map(|clients| &clients.list).map(|client| client.name.as_str());
        if !self.complete
            || report.inputs.new_client == Some(name)
            || self.names.get_or_init(|| names().collect()).contains(name)
        {
            return;
        }
        let (message, fix) = match (self.clients, nearest(name, names())) {
            (None, _) => {
                let fix = "write `[clients]`, then `file = \"clients.toml\"` and `api_key = \"header:x-api-key\"`";
                (format!("there is no client {}: there is no `[clients]`", quoted(name)), String::from(fix))
            }
            (_, Some(guess)) => (no_client(name), format!("did you mean {}?", quoted(guess))),
            (_, None) => (no_client(name), String::from("see `transom clients list`, or remove it")),
        };
        report.missing(span.clone(), message, fix);
    }
}

fn no_client(name: &str) -> String {
    format!("there is no client {}", quoted(name))
}

/// Settings outside of `[access]` that deny entries depend on.
pub struct AccessContext<'c> {
    pub clients: &'c KnownClients<'c>,
    pub route_names: Vec<&'c str>,
    /// False if some routes may be missing.
    pub routes_complete: bool,
    pub has_jwt: bool,
    /// Whether there is a store for `source = "shared"`.
    pub has_store: bool,
}

pub fn read_access(item: Option<Item>, context: &AccessContext, report: &mut Report) -> Option<Access> {
    let mut table = section_table(item, report)?;
    let AccessSettings { source, file } = AccessSettings::read(&mut table, report);
    let source_item = table.given("source");
    table.finish(report);
    let file = file?;
    if source == AccessSource::Shared {
        if let (Some(item), false) = (source_item, context.has_store) {
            let fix = "write `[counters.shared]`, then `redis = \"redis://127.0.0.1:6379\"`, or use `\"file\"`";
            report.missing(item.span, "`shared` needs a store, and there is no `[counters.shared]`", fix);
        }
        return Some(Access { source, file: PathBuf::from(&file.text), deny: Arc::default() });
    }
    let read = |top: &mut Table, report: &mut Report| context.read_file(top, report);
    let (file, deny) = read_named_file(&file, FILE, ADD_COMMAND, report, read)?;
    Some(Access { source, file, deny: Arc::new(deny) })
}

/// Reads the text of an access file, or returns its problems.
pub fn read_entries(text: &str, config: &Config) -> Result<IdVec<DenyId, DenyEntry>, Vec<Problem>> {
    let clients = KnownClients::new(config.clients.as_ref(), true);
    let context = AccessContext {
        clients: &clients,
        route_names: config.routes.iter().map(|route| route.name.as_str()).collect(),
        routes_complete: true,
        has_jwt: config.jwt.is_some(),
        has_store: config.counters.shared.is_some(),
    };
    let path = config.access.as_ref().map(|access| access.file.as_path());
    read_text_alone(text, path.unwrap_or(Path::new(FILE)), FILE, |top, report| context.read_file(top, report))
}

impl AccessContext<'_> {
    fn read_file(&self, top: &mut Table, report: &mut Report) -> IdVec<DenyId, DenyEntry> {
        let Some(item) = top.get("deny") else { return IdVec::new() };
        let Some(items) = item.list("[]", report) else { return IdVec::new() };
        items.iter().filter_map(|item| self.read_entry(item.table("`[[deny]]`", DENY_FIX, report)?, report)).collect()
    }

    fn read_entry(&self, mut table: Table, report: &mut Report) -> Option<DenyEntry> {
        let before = report.count();
        let DenySettings { network, client, key, routes, until, reason } = DenySettings::read(&mut table, report);
        let (is_given, span) = (|key: &&str| !table.lacks(key), table.span.clone());
        let given: Vec<&str> = ["network", "client", "key"].into_iter().filter(is_given).collect();
        let has_key = given.contains(&"key");
        let is_one = given.len() == 1;
        table.finish(report);
        if !is_one {
            let message = "a deny entry has one of `network`, `client` and `key`";
            report.missing(
                span,
                message,
                "write one of the three; each network, client or value is an entry of its own",
            );
        }
        let target = match (network, client) {
            (Some(network), _) => Some(DenyTarget::Network(network)),
            (None, Some(client)) => {
                self.clients.check(&client.text, &client.span, report);
                Some(DenyTarget::Client(client.text))
            }
            (None, None) if has_key => self.read_key(key, report).map(|key| DenyTarget::Key(Box::new(key))),
            (None, None) => None,
        };
        let known = routes.iter().filter_map(|route| self.find_route(route, report)).collect();
        let target = target.filter(|_| report.count() == before)?;
        let id = EntryId::new(&target, routes.iter().map(|route| route.text.as_str()));
        Some(DenyEntry { id, target, routes: known, until_ms: until, reason })
    }

    fn read_key(
        &self,
        DeniedKeySettings { part, value }: DeniedKeySettings,
        report: &mut Report,
    ) -> Option<(KeyPart, KeyValue)> {
        let (word, value) = part.zip(value)?;
        let part = key::read_part(&word.as_str(), report)?;
        if let Some(fix) = KeyKind::of(&part).not_denied {
            return report.reject(word.span, format!("a deny entry cannot have the part {}", quoted(&word.text)), fix);
        }
        if JWT.has(&part) && !self.has_jwt {
            let message =
                format!("{} needs verified tokens, and there is no `[jwt]` with their keys", quoted(&word.text));
            return report.reject(word.span, message, "write `[jwt]` with `keys` in the configuration");
        }
        if !is_secret(&part, self.clients.clients) {
            return Some((part.clone(), read_value(&part, &value.as_str(), report)?));
        }
        if !value.text.starts_with(Digest::PREFIX) {
            let fix =
                "write its digest, `sha256:` and 64 hex digits, as `transom deny add` does: others may have read it";
            return report.reject(value.span, "this is a secret in plain text", fix);
        }
        Some((part, KeyValue::Digest(read_digest(&value.as_str(), report)?)))
    }

    fn find_route(&self, name: &SpannedString, report: &mut Report) -> Option<RouteId> {
        use transom_limiter::handles::Handle as _;
        let found = self.route_names.iter().position(|known| *known == name.text);
        if found.is_none() && self.routes_complete {
            let fix = match nearest(&name.text, self.route_names.iter().copied()) {
                Some(guess) => format!("did you mean {}?", quoted(guess)),
                None => String::from("write the `name` of a route, or its path if it has no `name`"),
            };
            report.missing(name.span.clone(), format!("there is no route {}", quoted(&name.text)), fix);
        }
        found.map(RouteId::at)
    }
}

/// Whether files have only digests of the values of a part.
pub fn is_secret(part: &KeyPart, clients: Option<&Clients>) -> bool {
    is_secret_part(part) || clients.is_some_and(|clients| clients.api_key.contains(part))
}

/// Reads a time in RFC 3339 format, Unix milliseconds.
pub fn read_until(item: &Item, report: &mut Report) -> Option<u64> {
    let text = match item.value {
        toml::de::DeValue::Datetime(time) => time.to_string(),
        _ => item.string("\"2030-01-31T18:00:00Z\"", report)?.text.to_owned(),
    };
    match parse_time(&text) {
        Ok(until_ms) => Some(until_ms),
        Err((message, fix)) => report.reject(item.span.clone(), message, fix),
    }
}

/// The latest end of an entry.
pub const UNTIL_MAX_MS: u64 = 253_402_207_200_000;

/// Unix milliseconds of a time of RFC 3339; 0 for the past before 1970, which has ended as well.
pub fn parse_time(text: &str) -> super::diagnostics::Parsed<u64> {
    let parse = |text: &str| text.parse::<jiff::Timestamp>();
    let plain = text.trim();
    let fix = match parse(text) {
        Ok(time) => return Ok(u64::try_from(time.as_millisecond()).unwrap_or(0).min(UNTIL_MAX_MS)),
        // A year is four digits.
        Err(_)
            if !text.starts_with('-')
                && jiff::fmt::temporal::Pieces::parse(text).is_ok_and(|pieces| pieces.offset().is_some()) =>
        {
            let fix = String::from("leave it out: without it, an entry never ends");
            return Err((format!("{} is after {}, the latest end", quoted(text), rfc3339(UNTIL_MAX_MS)), fix));
        }
        Err(_) if parse(&format!("{plain}Z")).is_ok() => {
            format!("add the offset from UTC, such as `{plain}Z` or `{plain}+01:00`")
        }
        Err(_) => String::from("write a time in RFC 3339 format, such as `\"2030-01-31T18:00:00Z\"`"),
    };
    Err((format!("{} is not a time", quoted(text)), fix))
}

/// The end of an entry that lasts so long from now, in whole seconds; `None` if it is after [`UNTIL_MAX_MS`].
pub fn end_after(lasts_ms: u64, now_ms: u64) -> Option<u64> {
    let ends_ms = now_ms.checked_add(lasts_ms)?.checked_next_multiple_of(1000)?;
    (ends_ms <= UNTIL_MAX_MS).then_some(ends_ms)
}

fn read_reason(word: &SpannedStr, report: &mut Report) -> Option<String> {
    check_reason(word.text).map_err(|(message, fix)| report.problem(word.span.clone(), message, fix)).ok()
}

/// A reason as it is written in the file.
pub fn check_reason(text: &str) -> super::diagnostics::Parsed<String> {
    match text.chars().count() > REASON_CHARS || text.contains(char::is_control) {
        true => {
            let fix = format!("write at most {REASON_CHARS} characters on one line");
            Err((String::from("the reason is too long, or has control characters"), fix))
        }
        false => Ok(text.to_owned()),
    }
}

/// A time in Unix milliseconds as [`DenyEntry::until_ms`] is written, in whole seconds.
pub fn rfc3339(unix_ms: u64) -> String {
    let time = jiff::Timestamp::from_second((unix_ms / 1000).cast_signed());
    time.map_or_else(|_| jiff::Timestamp::MAX.to_string(), |time| time.to_string())
}

/// The allow list of a route.
pub fn allow_list() -> Custom<Vec<Allowed>> {
    Custom::or_empty(|| Shape::one_or_list("network, `client:NAME`"), read_allow)
}

fn read_allow(item: &Item, report: &mut Report) -> Option<Vec<Allowed>> {
    let words = item.strings(ALLOW, report)?;
    if words.is_empty() {
        let fix = "remove it to allow all requests, or write `respond = { status = 403 }` to refuse all";
        return report.reject(item.span.clone(), "`allow` is empty: no request would be allowed", fix);
    }
    let read = |word: &SpannedStr| match word.text.strip_prefix(CLIENT_PREFIX) {
        Some(name) => {
            let name = SpannedStr { text: name, span: word.span.clone() };
            Some(Allowed::Client(SpannedString::new(item.key, &name)))
        }
        None if ["all", "any", "*"].contains(&word.text) => {
            let fix = "remove `allow` to allow all requests";
            report.reject(word.span.clone(), format!("{} is not a network", quoted(word.text)), fix)
        }
        // Not the name of a host, which a dot tells.
        None if !word.text.contains(['/', '.', ':']) && word.text != "localhost" => {
            let fix = format!("write `\"{CLIENT_PREFIX}{}\"`, if this is the name of a client", word.text);
            report.reject(word.span.clone(), format!("{} is not a network", quoted(word.text)), fix)
        }
        None => read_network(word, report).map(Allowed::Network),
    };
    let allowed: Vec<Option<Allowed>> = words.iter().map(read).collect();
    allowed.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key_kind::HEADER;

    /// Ids are kept by operators, and are equal on all gateways.
    #[test]
    fn ids_do_not_change() {
        let key = |value| DenyTarget::Key(Box::new((HEADER.of_name("x-device"), value)));
        let network = || DenyTarget::Network("203.0.113.0/24".parse().unwrap());
        for (target, routes, text) in [
            (network(), vec![], "203.0.113.0/24"),
            (network(), vec!["login", "api"], "203.0.113.0/24\napi\nlogin"),
            (DenyTarget::Client(String::from("acme")), vec![], "client:acme"),
            (
                key(KeyValue::Clear(String::from("a1"))),
                vec![],
                "header:x-device=sha256:f55ff16f66f43360266b95db6f8fec01d76031054306ae4a4b380598f6cfd114",
            ),
            (
                key(KeyValue::Digest(Digest::of(b"a1"))),
                vec![],
                "header:x-device=sha256:f55ff16f66f43360266b95db6f8fec01d76031054306ae4a4b380598f6cfd114",
            ),
        ] {
            let expected = Digest::of(text.as_bytes()).to_string();
            let id = EntryId::new(&target, routes).to_string();
            assert_eq!(id, expected[Digest::PREFIX.len()..][..12], "{text}");
        }
        assert_eq!(EntryId::new(&network(), []).to_string(), "94c6699ed4d8");
    }
}
