//! `[counters.shared]`: the Redis or Valkey servers that hold shared counters, the login, and the form of keys.
//!
//! This file resolves no names and opens no connections. A password comes from a file, from an environment variable, or
//! from the URL. Messages and `Debug` never show secrets; messages show a URL without its user name and password.

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use rustls::pki_types::ServerName;
use toml::de::DeValue;

use super::certificate::PEM_FILE;
use super::client_tls::{ClientTls, ClientTlsSettings, SystemRoots, check_pair, read_server_name, suggest_ca};
use super::diagnostics::{Parsed, Report, Span, quoted};
use super::host::{parse_authority, parse_socket_path};
use super::settings::{Choice, Custom, Integer, Optional, Required, Restart, Section, Shape, Text, Time, Word};
use super::toml_reader::{Item, SpannedStr, SpannedString, Table};
use super::values::{Secret, strip_line_end};
use transom_limiter::rule::{OnOutage, Sharing};

const EXAMPLE: &str = "\"redis://127.0.0.1:6379\"";
const REDIS_FIX: &str = "write `redis = \"redis://127.0.0.1:6379\"`";
pub const TABLE_FIX: &str = "write `[counters.shared]`, then `redis = \"redis://127.0.0.1:6379\"`";

const MODES: [(&str, Sharing); 2] = [("lease", Sharing::Lease), ("exact", Sharing::Exact)];
pub const RULE_MODES: [(&str, Sharing); 3] = [MODES[0], MODES[1], ("off", Sharing::Local)];
pub const OUTAGES: [(&str, OnOutage); 3] =
    [("local", OnOutage::Local), ("allow", OnOutage::Allow), ("refuse", OnOutage::Refuse)];

const FILE: Text = Text("path of a file", "\"FILE\"");
const VARIABLE: Text = Text("name of an environment variable", "\"VARIABLE\"");
const DEFAULT_PORT: u16 = 6379;
const DATABASE_MAX: u64 = 65_535;
const PREFIX_MAX_BYTES: usize = 64;
/// A shorter key could be found by brute force.
const DIGEST_KEY_MIN_BYTES: usize = 16;

settings! {
    /// Counters that gateways share in Redis or Valkey.
    pub struct SharedSettings checked by check_shared {
        /// `"redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]"`, `rediss://` for TLS, `"redis+unix:///PATH"` or
        /// `"unix:///PATH"` for a Unix socket; in schemes, `valkey` may stand for `redis`. A list names nodes of a Redis Cluster. User,
        /// password and database in the URL are for a single server only. Percent-encode all characters of a password but
        /// letters and digits.
        redis: Servers = Restart(Required(Custom::or_empty(|| Shape::one_or_list("URL"), read_servers), REDIS_FIX));
        /// Name of the master in Sentinel (`sentinel monitor NAME …`). `redis` then lists the sentinels.
        sentinel_master: Option<String> = Restart(Word { shape: "text", example: "\"mymaster\"", read: read_master });
        /// User of the gateway. Without it: the default user.
        username: Option<String> = Restart(Word { shape: "text", example: "\"transom\"", read: read_username });
        /// File with the password; a trailing line end is ignored. There may be only one password: in the URL, in a file, or
        /// in the environment.
        password_file: Option<SpannedString> = Restart(FILE);
        /// Environment variable with the password.
        password_env: Option<SpannedString> = Restart(VARIABLE);
        /// User of the gateway on the sentinels, if they have a login of their own. Without it: the default user.
        sentinel_username: Option<String> =
            Restart(Word { shape: "text", example: "\"transom\"", read: read_sentinel_username });
        /// File with its password. Without it: the gateway logs in to sentinels as to servers, and without a password where a
        /// sentinel has none.
        sentinel_password_file: Option<SpannedString> = Restart(FILE);
        /// Environment variable with this password, instead of the file.
        sentinel_password_env: Option<SpannedString> = Restart(VARIABLE);
        /// Database number. Without it: that of the URL, or 0. A cluster has only 0.
        database: Option<i64> = Restart(Optional(Integer(0, 0..=DATABASE_MAX)));
        /// Prefix of all keys. Gateways with the same prefix count together.
        prefix: String = Restart(Custom {
            default: "transom".to_owned(),
            default_text: Some("\"transom\""),
            shape: || Shape::Text("up to 64 letters, digits and `.~_:-`"),
            read: read_prefix,
        });
        /// How rules count that have no `shared`.
        mode: Sharing = Choice(Sharing::Lease, &MODES);
        /// What rules do during an outage, where they have no `on_outage`. `"local"`: each gateway counts alone. `"allow"`:
        /// requests pass uncounted. `"refuse"`: 503. A leased window that is not sliding refuses while the gateway knows that it
        /// is full, except for requests that may wait.
        on_outage: OnOutage = Choice(OnOutage::Local, &OUTAGES);
        /// How long one request waits for the store, in total.
        timeout: Duration = Restart(Time(Duration::from_millis(50), 1..=10_000));
        /// File with the key of the digests that replace cookies, API keys and other secrets in counter names: at least 16
        /// bytes, the same on all gateways. Without it, the key is derived from `prefix`, and anyone who can read Redis can
        /// find short secrets by trying.
        digest_key_file: Option<SpannedString> = Restart(FILE);
        /// Environment variable with this key, instead of the file.
        digest_key_env: Option<SpannedString> = Restart(VARIABLE);
        /// With `rediss://`: authorities of the servers. Without it: the system's authorities.
        ca: Option<SpannedString> = Restart(PEM_FILE);
        /// With `rediss://`: name that is sent (SNI) and verified on all servers, such as the nodes of a cluster that announces
        /// addresses. Without it: the host of each server.
        server_name: Option<ServerName<'static>> =
            Restart(Word { shape: "name", example: "\"redis.internal\"", read: read_server_name });
        /// With `rediss://`: client certificate of the gateway, with its chain.
        certificate: Option<SpannedString> = Restart(PEM_FILE);
        /// Its private key.
        private_key: Option<SpannedString> = Restart(PEM_FILE);
    }
}

/// Settings of the store.
#[derive(Clone, PartialEq, Debug)]
pub struct StoreConfig {
    pub nodes: Nodes,
    pub username: Option<String>,
    pub password: Option<Secret<String>>,
    /// `None`: the same login as on the servers.
    pub sentinel_login: Option<SentinelLogin>,
    /// Always 0 in a cluster.
    pub database: i64,
    /// The beginning of all keys.
    pub prefix: String,
    /// How long a request waits for the store, in total.
    pub timeout: Duration,
    /// The configured key for digests; see [`StoreConfig::digest_key`].
    pub digest_key: Option<Secret<Vec<u8>>>,
    /// Present if the URLs are `rediss://`.
    pub tls: Option<ClientTls>,
    /// How rules are counted that have no `shared`.
    pub mode: Sharing,
    /// What rules without `on_outage` do during an outage.
    pub on_outage: OnOutage,
}

/// How the gateway logs in to sentinels.
#[derive(Clone, PartialEq, Debug)]
pub struct SentinelLogin {
    pub username: Option<String>,
    pub password: Secret<String>,
}

impl StoreConfig {
    /// Settings with only the servers configured.
    pub fn with_defaults(nodes: Nodes) -> StoreConfig {
        SharedSettings::default().with_nodes(nodes)
    }

    /// Stands for settings that cannot be read.
    pub fn placeholder() -> StoreConfig {
        StoreConfig::with_defaults(Nodes::Cluster(Vec::new()))
    }

    /// How a rule without `shared` and `on_outage` is counted.
    pub fn default_sharing(&self) -> (Sharing, OnOutage) {
        (self.mode, self.on_outage)
    }

    /// The key for digests of secret key parts, equal for all gateways that share counters. Without a configured key,
    /// it derives from the prefix.
    pub fn digest_key(&self) -> Cow<'_, [u8]> {
        match &self.digest_key {
            Some(key) => Cow::Borrowed(&key.0),
            None => Cow::Owned(format!("transom digest key {}", self.prefix).into_bytes()),
        }
    }
}

/// Reads `[counters.shared]`. Settings with problems are replaced by placeholders.
pub fn read_shared(item: &Item, report: &mut Report) -> Option<Option<StoreConfig>> {
    let table = match item.value {
        // The message does not show the value: it may be a URL with a password.
        DeValue::String(_) => report.reject(item.span.clone(), "`shared`: expected a table, found a string", TABLE_FIX),
        _ => item.table("`[counters.shared]`", TABLE_FIX, report),
    };
    let Some(mut table) = table else { return Some(Some(StoreConfig::placeholder())) };
    let store = SharedSettings::read(&mut table, report).into_store(&table, report);
    table.finish(report);
    Some(Some(store))
}

fn check_shared(settings: &mut SharedSettings, table: &mut Table, report: &mut Report) {
    for key in ["password", "digest_key"] {
        let fix = format!(
            "a secret is not written in this file: write `{key}_file = \"FILE\"` or `{key}_env = \"VARIABLE\"`"
        );
        table.suggest_for(key, if key == "password" { "password_file" } else { "digest_key_file" }, fix);
    }
    for key in ["url", "host", "servers", "nodes"] {
        table.suggest_for(key, "redis", format!("{REDIS_FIX}, or a list for a cluster"));
    }
    let fix = "write `sentinel_password_file = \"FILE\"` or `sentinel_password_env = \"VARIABLE\"`";
    table.suggest_for("sentinel_password", "sentinel_password_file", fix);
    table.suggest_for("sentinel_user", "sentinel_username", "did you mean `sentinel_username`?");
    table.suggest_for("tls", "redis", "write `rediss://` in `redis`");
    suggest_ca(table, "ca", "ca = \"FILE\"");
    table.suggest_for("shared", "mode", "did you mean `mode`? Here, the setting for all rules has this name");
    let fix = "write `key_format` in the rule that shares its counters with another service";
    table.suggest_for("key_format", "prefix", fix);
    let Servers { urls, is_list } = &settings.redis;
    let is_sentinel = table.given("sentinel_master").is_some();
    let role = if is_sentinel { "a sentinel" } else { "a node of a cluster" };
    for (url, span) in urls.iter().filter(|_| is_sentinel || *is_list) {
        let (wrong, fix) = if matches!(url.node, Node::Unix(_)) {
            ("is a Unix socket, which cannot be used to find the other servers", "write its host and port")
        } else if url.username.is_some() || url.password.is_some() {
            let fix = "write `username` and `password_file` or `password_env`, which apply to all servers";
            ("has a user name or password in its URL", fix)
        } else if url.database.is_some() {
            ("has a database in its URL", if is_sentinel { "write `database`" } else { "remove it" })
        } else {
            continue;
        };
        report.problem(span.clone(), format!("`{}`, {role}, {wrong}", url.node), fix);
    }
    let Some((url, _)) = urls.first() else { return };
    if let (Some(item), true, false) = (table.given("database"), *is_list, is_sentinel) {
        let message = "`database` has no effect: a Redis Cluster has only one database";
        let fix = "remove it, or write `redis` without brackets if this is not a cluster";
        report.problem(item.key_span, message, fix);
    }
    for (key, is_in_url, part) in [
        ("username", url.username.is_some(), "a user name"),
        ("password_file", url.password.is_some(), "a password"),
        ("password_env", url.password.is_some(), "a password"),
        ("database", url.database.is_some(), "a database"),
    ] {
        if let (Some(item), true, false) = (table.given(key), is_in_url, *is_list) {
            let message = format!("{part} in the URL and `{key}` are both given");
            report.problem(item.key_span, message, "keep one of the two");
        }
    }
    let has_no_password = url.password.is_none() && table.lacks("password_file") && table.lacks("password_env");
    if has_no_password && (settings.username.is_some() || url.username.is_some()) {
        let span = table.given("username").or(table.given("redis")).map_or(table.span.clone(), |item| item.key_span);
        let fix = "add `password_file = \"FILE\"` or `password_env = \"VARIABLE\"`";
        let fix = match settings.username {
            Some(_) => fix.to_owned(),
            None => {
                format!("write `redis://:PASSWORD@HOST` if this is a password, with `:` before it; otherwise {fix}")
            }
        };
        report.missing(span, "a user name is given without a password", fix);
    }
    let has_sentinel_password = !table.lacks("sentinel_password_file") || !table.lacks("sentinel_password_env");
    if let (Some(item), true, false) = (table.given("sentinel_username"), is_sentinel, has_sentinel_password) {
        let fix = "add `sentinel_password_file = \"FILE\"` or `sentinel_password_env = \"VARIABLE\"`";
        report.missing(item.key_span, "a user name is given without a password", fix);
    }
    let of_sentinels = ["sentinel_username", "sentinel_password_file", "sentinel_password_env"];
    for item in of_sentinels.iter().filter_map(|key| table.given(key)).filter(|_| table.lacks("sentinel_master")) {
        let message = format!("`{}` has no effect without `sentinel_master`", item.key);
        report.missing(item.key_span, message, "add `sentinel_master`, or remove it");
    }
    for item in ["ca", "server_name", "certificate", "private_key"]
        .iter()
        .filter_map(|key| table.given(key))
        .filter(|_| !url.secure)
    {
        let message = format!("`{}` has no effect: no server uses TLS", item.key);
        report.missing(item.key_span, message, "remove it, or write `rediss://` in `redis`");
    }
}

impl SharedSettings {
    fn into_store(self, table: &Table, report: &mut Report) -> StoreConfig {
        let mut nodes: Vec<Node> = self.redis.urls.iter().map(|(url, _)| url.node.clone()).collect();
        let nodes = match &self.sentinel_master {
            Some(master) => Nodes::Sentinel { nodes, master: master.clone() },
            None if self.redis.is_list || nodes.is_empty() => Nodes::Cluster(nodes),
            None => Nodes::Single(nodes.remove(0)),
        };
        let url = self.redis.urls.first().map(|(url, _)| url);
        let of_url = url.and_then(|url| url.password.clone());
        let password =
            of_url.or_else(|| read_password(self.password_file.as_ref(), self.password_env.as_ref(), report));
        let (file, variable) = (self.sentinel_password_file.as_ref(), self.sentinel_password_env.as_ref());
        let sentinel_login = read_password(file, variable, report)
            .map(|password| SentinelLogin { username: self.sentinel_username.clone(), password });
        let digest_key = read_secret(self.digest_key_file.as_ref(), self.digest_key_env.as_ref(), report);
        if let Some((_, source)) = digest_key.as_ref().filter(|(key, _)| key.len() < DIGEST_KEY_MIN_BYTES) {
            let message = format!("the key in `{}` has less than {DIGEST_KEY_MIN_BYTES} bytes", source.key);
            report.problem(source.span.clone(), message, "create a random key: `openssl rand -hex 32`");
        }
        let digest_key = digest_key.map(|(key, _)| Secret(key));
        let tls = table.given("redis").filter(|_| url.is_some_and(|url| url.secure)).and_then(|item| {
            let (ca, certificate, private_key) = (self.ca.clone(), self.certificate.clone(), self.private_key.clone());
            let server_name = self.server_name.clone();
            let tls = ClientTlsSettings { ca, server_name, certificate, private_key, ..ClientTlsSettings::default() };
            check_pair(table, report);
            ClientTls::new(&tls, item.span, &mut SystemRoots::default(), report)
        });
        let username = self.username.clone().or_else(|| url?.username.clone());
        let database = self.database.or_else(|| url?.database).unwrap_or(0);
        StoreConfig { username, password, sentinel_login, database, digest_key, tls, ..self.with_nodes(nodes) }
    }

    /// The settings that need no further reading.
    fn with_nodes(self, nodes: Nodes) -> StoreConfig {
        StoreConfig {
            nodes,
            username: None,
            password: None,
            sentinel_login: None,
            database: 0,
            prefix: self.prefix,
            timeout: self.timeout,
            digest_key: None,
            tls: None,
            mode: self.mode,
            on_outage: self.on_outage,
        }
    }
}

/// Reads the password that one of two settings names.
fn read_password(
    file: Option<&SpannedString>,
    variable: Option<&SpannedString>,
    report: &mut Report,
) -> Option<Secret<String>> {
    let (bytes, source) = read_secret(file, variable, report)?;
    let Ok(password) = String::from_utf8(bytes) else {
        return report.reject(source.span.clone(), "the password is not UTF-8 text", "choose another password");
    };
    Some(Secret(password))
}

/// Reads the secret that one of two settings names, a file or an environment variable, without the line end that
/// editors add. Returns also the setting.
pub(super) fn read_secret<'s>(
    file: Option<&'s SpannedString>,
    variable: Option<&'s SpannedString>,
    report: &mut Report,
) -> Option<(Vec<u8>, &'s SpannedString)> {
    let (source, bytes, what) = match (file, variable) {
        (Some(file), Some(variable)) => {
            let message = format!("`{}` and `{}` are both given", file.key, variable.key);
            return report.reject(variable.key_span.clone(), message, "keep one of the two");
        }
        (Some(file), None) => (file, file.read_file(report)?, quoted(&file.text)),
        (None, variable) => {
            let variable = variable?;
            let what = format!("the environment variable {}", quoted(&variable.text));
            let Some(value) = (report.inputs.variables)(&variable.text) else {
                let fix = "set it in the environment of the gateway, or name a file instead";
                return report.reject(variable.span.clone(), format!("{what} is not set"), fix);
            };
            (variable, value, what)
        }
    };
    let secret = strip_line_end(&bytes).to_vec();
    if secret.is_empty() {
        report.problem(source.span.clone(), format!("{what} is empty"), "write the secret there");
    }
    (!secret.is_empty()).then_some((secret, source))
}

fn read_master(word: &SpannedStr, report: &mut Report) -> Option<String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    if word.text.is_empty() || !word.text.chars().all(is_name) {
        let message = format!("{} is not a valid Sentinel master name", quoted(word.text));
        let fix = "write the name from `sentinel monitor NAME …`: letters, digits, `.-_`";
        return report.reject(word.span.clone(), message, fix);
    }
    Some(word.text.to_owned())
}

fn read_username(word: &SpannedStr, report: &mut Report) -> Option<String> {
    read_user("username", word, report)
}

fn read_sentinel_username(word: &SpannedStr, report: &mut Report) -> Option<String> {
    read_user("sentinel_username", word, report)
}

fn read_user(key: &str, word: &SpannedStr, report: &mut Report) -> Option<String> {
    if word.text.is_empty() {
        let fix = "write the user name, or remove the setting";
        return report.reject(word.span.clone(), format!("`{key}` is empty"), fix);
    }
    Some(word.text.to_owned())
}

fn read_prefix(item: &Item, report: &mut Report) -> Option<String> {
    let word = item.string("\"transom\"", report)?;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || ".~_:-".contains(c);
    if !word.text.is_empty() && word.text.len() <= PREFIX_MAX_BYTES && word.text.chars().all(is_plain) {
        return Some(word.text.to_owned());
    }
    let message = format!("{} cannot be the prefix of keys", quoted(word.text));
    report.reject(word.span, message, format!("write at most {PREFIX_MAX_BYTES} letters, digits and `.~_:-`"))
}

/// How a rule without `shared` and `on_outage` is counted; `None`: there is no `[counters.shared]`.
pub type DefaultSharing = Option<(Sharing, OnOutage)>;

/// The servers that `redis` names.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Servers {
    /// Each with its position.
    urls: Vec<(RedisUrl, Span)>,
    is_list: bool,
}

fn read_servers(item: &Item, report: &mut Report) -> Option<Servers> {
    let before = report.count();
    let words = item.strings(EXAMPLE, report)?;
    if words.is_empty() {
        report.problem(item.span.clone(), "`redis` is an empty list", item.fix_with(EXAMPLE));
    }
    let mut urls: Vec<(RedisUrl, Span)> = Vec::new();
    for SpannedStr { text, span } in words {
        let Some(url) = report.accept(span.clone(), parse_redis_url(text)) else { continue };
        if urls.iter().any(|(other, _)| other.node == url.node) {
            report.problem(span, format!("`{}` is listed twice", url.node), "remove one of the two");
        } else if urls.first().is_some_and(|(first, _)| first.secure != url.secure) {
            let message = "some of these servers use TLS, and some do not";
            report.problem(span, message, "write `rediss://` for all of them, or for none");
        } else {
            urls.push((url, span));
        }
    }
    let is_list = matches!(item.value, DeValue::Array(_));
    (report.count() == before).then_some(Servers { urls, is_list })
}

/// The URL of a server: `redis://[user[:password]@]host[:port][/database]`, `rediss://` for TLS, `redis+unix:///path` or
/// `unix:///path` for a Unix socket.
#[derive(Clone, PartialEq, Debug)]
struct RedisUrl {
    /// Whether the connection uses TLS.
    secure: bool,
    node: Node,
    username: Option<String>,
    password: Option<Secret<String>>,
    database: Option<i64>,
}

impl RedisUrl {
    fn to(node: Node) -> RedisUrl {
        RedisUrl { secure: false, node, username: None, password: None, database: None }
    }
}

/// Messages never contain the user name and the password.
fn parse_redis_url(url: &str) -> Parsed<RedisUrl> {
    let Some((scheme, rest)) = url.split_once("://") else { return Err(missing_scheme(url)) };
    let secure = match scheme {
        "redis" | "valkey" => false,
        "rediss" | "valkeys" => true,
        "redis+unix" | "valkey+unix" | "unix" => {
            if rest.contains('@') && !rest.starts_with('/') {
                let fix = "write `redis+unix:///PATH`, and the settings `username` and `password_file`";
                return Err(("the URL of a socket has a user name or password".to_owned(), fix.to_owned()));
            }
            let path = parse_socket_path(url, rest, &format!("{scheme}://"))?;
            let node = Node::Unix(path.into());
            return Ok(RedisUrl::to(node));
        }
        scheme => {
            let message = format!("{} is not the scheme of a Redis server", quoted(scheme));
            let fix = "write `redis://HOST:PORT`, `rediss://HOST:PORT` for TLS, or `redis+unix:///PATH`";
            return Err((message, fix.to_owned()));
        }
    };
    let (login, rest) = rest.rsplit_once('@').unwrap_or(("", rest));
    let (username, password) = login.split_once(':').unwrap_or((login, ""));
    let (username, password) = (parse_login(username)?, parse_login(password)?.map(Secret));
    let bare = format!("{scheme}://{rest}");
    if let Some(end) = rest.find(['?', '#']) {
        let message = format!("the URL of {} has parameters after `{}`", quoted(&rest[..end]), &rest[end..=end]);
        return Err((message, "remove them; use the settings of `[counters.shared]` instead".to_owned()));
    }
    let (host, path) = rest.split_once('/').map_or((rest, ""), |(host, path)| (host, path));
    let database = match path {
        "" => None,
        path => {
            let Some(number) = path.parse::<u16>().ok().filter(|_| !path.starts_with('+')) else {
                let message = format!("{} has the invalid database number {}", quoted(&bare), quoted(path));
                return Err((message, format!("write a number from `0` to `{DATABASE_MAX}`, or none")));
            };
            Some(i64::from(number))
        }
    };
    let (host, port) = parse_authority(&bare, host, (scheme, DEFAULT_PORT))?;
    Ok(RedisUrl { secure, node: Node::Tcp { host, port }, username, password, database })
}

fn missing_scheme(url: &str) -> (String, String) {
    let fix = match url.strip_prefix("unix:") {
        Some(path) if path.starts_with('/') => format!("write `\"unix://{path}\"`"),
        _ if url.is_empty() || url.contains('@') => "write `\"redis://HOST:PORT\"`".to_owned(),
        _ => format!("write `\"redis://{}\"`", url.trim()),
    };
    let shown = if url.contains('@') { "this".to_owned() } else { quoted(url) };
    (format!("{shown} is not a server URL"), fix)
}

/// Decodes a user name or password. An empty one is none.
fn parse_login(text: &str) -> Parsed<Option<String>> {
    let message = "the user name or password in the URL has characters that must be percent-encoded";
    let fix = "write these characters as `%` and two hex digits (`%40` for `@`, `%2F` for `/`, `%25` for `%`), or use \
               `password_file`";
    let decoded = percent_decode(text).ok_or_else(|| (message.to_owned(), fix.to_owned()))?;
    Ok(Some(decoded).filter(|text| !text.is_empty()))
}

/// Decodes percent-encoding. `None` if a reserved character is not encoded, or the result is not UTF-8.
fn percent_decode(text: &str) -> Option<String> {
    if text.contains(['@', '/', '?', '#', '[', ']', ' ']) {
        return None;
    }
    let mut pieces = text.split('%');
    let mut bytes = pieces.next()?.as_bytes().to_vec();
    for piece in pieces {
        let digits = piece.get(..2).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(&piece.as_bytes()[2..]);
    }
    String::from_utf8(bytes).ok()
}

/// The topology of the servers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Nodes {
    Single(Node),
    /// Some nodes of a cluster; they name the others.
    Cluster(Vec<Node>),
    /// Sentinels, which know the server that is the master of this name.
    Sentinel {
        nodes: Vec<Node>,
        master: String,
    },
}

impl Nodes {
    /// All configured nodes or sentinels.
    pub fn all(&self) -> &[Node] {
        match self {
            Nodes::Single(node) => std::slice::from_ref(node),
            Nodes::Cluster(nodes) | Nodes::Sentinel { nodes, .. } => nodes,
        }
    }
}

/// For logs and messages.
impl fmt::Display for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listed = || self.all().iter().map(Node::to_string).collect::<Vec<_>>().join(", ");
        match self {
            Nodes::Single(node) => node.fmt(f),
            Nodes::Cluster(_) => write!(f, "the cluster of {}", listed()),
            Nodes::Sentinel { master, .. } => write!(f, "the master `{master}` of the sentinels {}", listed()),
        }
    }
}

/// One server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Node {
    Tcp {
        /// Host name or address, without brackets.
        host: String,
        port: u16,
    },
    Unix(PathBuf),
}

/// As in a URL; an IPv6 address is in brackets.
impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Node::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Node::Tcp { host, port } => write!(f, "{host}:{port}"),
            Node::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(host: &str, port: u16) -> RedisUrl {
        RedisUrl::to(Node::Tcp { host: host.to_owned(), port })
    }

    #[test]
    fn urls_are_read_as_written() {
        let some = |text: &str| Some(text.to_owned());
        for (url, expected) in [
            ("redis://127.0.0.1", tcp("127.0.0.1", 6379)),
            ("redis://Cache.internal:7000/", tcp("cache.internal", 7000)),
            ("valkey://[::1]:7000/3", RedisUrl { database: Some(3), ..tcp("::1", 7000) }),
            ("rediss://cache", RedisUrl { secure: true, ..tcp("cache", 6379) }),
            ("redis://:p%40ss%2f@cache", RedisUrl { password: some("p@ss/").map(Secret), ..tcp("cache", 6379) }),
            (
                "redis://me:a:b@cache",
                RedisUrl { username: some("me"), password: some("a:b").map(Secret), ..tcp("cache", 6379) },
            ),
            ("unix:///run/r@1.sock", RedisUrl { node: Node::Unix("/run/r@1.sock".into()), ..tcp("", 0) }),
            ("redis+unix:///run/r.sock", RedisUrl { node: Node::Unix("/run/r.sock".into()), ..tcp("", 0) }),
        ] {
            assert_eq!(parse_redis_url(url), Ok(expected), "{url}");
        }
    }

    #[test]
    fn invalid_urls_are_rejected_without_repeating_the_password() {
        for url in [
            "",
            "127.0.0.1:6379",
            "http://127.0.0.1",
            "hunter2@cache:6379",
            "redis://",
            "redis://:hunter2@",
            "redis://:hunter2@cache:0",
            "redis://:hunter2@cache:66666/0",
            "redis://:hunter2@cache/x",
            "redis://:hunter2@cache/-1",
            "redis://:hunter2@cache?db=1",
            "redis://:hunter2@::1",
            "redis://:hunter2/@cache",
            "redis://:hunter2@@cache",
            "redis://:hunter2%@cache",
            "redis://:hunter2%ff@cache",
            "REDIS://:hunter2@cache",
            "redis+unix://:hunter2@/run/r.sock",
            "unix://run/r.sock",
            "unix:/run/r.sock",
        ] {
            let (message, fix) = parse_redis_url(url).expect_err(url);
            assert!(!message.contains("hunter2") && !fix.contains("hunter2"), "{url}: {message}: {fix}");
        }
    }
}
