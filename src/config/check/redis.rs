//! `[counters.shared]`: the Redis servers through which gateways share counters, and the related settings of rules.
//!
//! This file resolves no names and opens no connections. A password comes from a file, from an environment variable, or
//! from the URL. No message contains it: messages show a URL without its user name and password.

use std::time::Duration;

use toml::de::DeValue;

use super::redis_url::{DATABASE_MAX, RedisUrl, parse_redis_url};
use super::upstream_tls;
use super::values::{read_duration_ms, read_named_file, strip_line_end};
use crate::config::client_tls::ClientTls;
use crate::config::diagnostics::{Report, Span, quoted};
use crate::config::redis::{DEFAULT_PREFIX, DEFAULT_TIMEOUT, Node, Nodes, Secret, StoreConfig};
use crate::config::toml_reader::{Item, SpannedStr, Table};
use crate::config::{ReadFile, ReadVariable};
use transom_limiter::rule::{OnOutage, Rule, Sharing};

const EXAMPLE: &str = "\"redis://127.0.0.1:6379\"";
pub const TABLE_FIX: &str = "write `[counters.shared]`, then `redis = \"redis://127.0.0.1:6379\"`";
const SECRET_FIX: &str = "a secret is not written in this file: write `{}_file = \"FILE\"` or `{}_env = \"VARIABLE\"`";

const MODES: [(&str, Sharing); 2] = [("lease", Sharing::Lease), ("exact", Sharing::Exact)];
const RULE_MODES: [(&str, Sharing); 3] = [MODES[0], MODES[1], ("off", Sharing::Local)];
const OUTAGES: [(&str, OnOutage); 3] =
    [("local", OnOutage::Local), ("allow", OnOutage::Allow), ("refuse", OnOutage::Refuse)];

/// Clients do not wait longer than this for a decision.
const TIMEOUT_MAX_MS: u64 = 10_000;
const PREFIX_MAX_BYTES: usize = 64;
/// A shorter key could be found by brute force.
const DIGEST_KEY_MIN_BYTES: usize = 16;

/// How a rule without `shared` and `on_outage` is counted.
#[derive(Clone, Copy)]
pub enum DefaultSharing {
    /// There is no `[counters.shared]`.
    Unshared,
    /// There is a `[counters.shared]`, or a misspelled key that may be one.
    Shared(Sharing, OnOutage),
}

/// Reads `[counters.shared]`. Secrets come from `files` and `variables`.
pub fn read_shared(
    item: &Item,
    files: ReadFile,
    variables: ReadVariable,
    report: &mut Report,
) -> (Option<StoreConfig>, DefaultSharing) {
    let mut default_sharing = DefaultSharing::Shared(Sharing::Lease, OnOutage::Local);
    if matches!(item.value, DeValue::String(_)) {
        // The message does not show the value: it may be a URL with a password.
        report.problem(item.span.clone(), "`shared`: expected a table, found a string", TABLE_FIX);
        return (None, default_sharing);
    }
    let Some(mut table) = item.table("`[counters.shared]`", TABLE_FIX, report) else { return (None, default_sharing) };
    let redis = table.require("redis", format!("write `redis = {EXAMPLE}`"));
    for (key, meant) in [("password", "password_file"), ("digest_key", "digest_key_file")] {
        table.suggest_for(key, meant, SECRET_FIX.replace("{}", key));
    }
    for key in ["url", "host", "servers", "nodes"] {
        table.suggest_for(key, "redis", format!("write `redis = {EXAMPLE}`, or a list for a cluster"));
    }
    table.suggest_for("tls", "redis", "write `rediss://` in `redis`");
    table.suggest_for("shared", "mode", "did you mean `mode`? Here, the setting for all rules has this name");
    let master = table.get("sentinel_master");
    let credentials = CredentialSettings {
        username: table.get("username"),
        file: table.get("password_file"),
        variable: table.get("password_env"),
    };
    let (database, prefix) = (table.get("database"), table.get("prefix"));
    let mode = table.get("mode").and_then(|item| item.choice(&MODES, report)).unwrap_or(Sharing::Lease);
    let on_outage = table.get("on_outage").and_then(|item| item.choice(&OUTAGES, report)).unwrap_or(OnOutage::Local);
    default_sharing = DefaultSharing::Shared(mode, on_outage);
    let timeout =
        table.get("timeout").and_then(|item| read_duration_ms(&item, 1..=TIMEOUT_MAX_MS, DEFAULT_TIMEOUT, report));
    let (key_file, key_variable) = (table.get("digest_key_file"), table.get("digest_key_env"));
    let tls = upstream_tls::TlsSettings {
        ca: table.get("ca"),
        server_name: None,
        certificate: table.get("certificate"),
        private_key: table.get("private_key"),
    };
    let misspelled = table.finish(report);

    let prefix = prefix.and_then(|item| read_prefix(&item, report)).unwrap_or_else(|| DEFAULT_PREFIX.to_owned());
    let timeout = timeout.map_or(DEFAULT_TIMEOUT, Duration::from_millis);
    let secrets = SecretSources { files, variables };
    let digest_key = read_digest_key(key_file.as_ref(), key_variable.as_ref(), &secrets, report);
    let servers = redis.as_ref().and_then(|item| ServerList::read(item, report));
    let nodes = servers.as_ref().and_then(|servers| servers.to_nodes(master.as_ref(), report));
    let database = read_database(database.as_ref(), servers.as_ref(), nodes.as_ref(), report);
    let (username, password) = credentials.read(servers.as_ref(), &misspelled, &secrets, report);
    let tls = read_tls(tls, servers.as_ref(), &misspelled, files, report);
    let shared = nodes.zip(database).map(|(nodes, database)| StoreConfig {
        nodes,
        username,
        password,
        database,
        prefix,
        timeout,
        digest_key,
        tls,
    });
    (shared, default_sharing)
}

/// The settings of a rule about shared counters.
pub struct RuleSharingSettings<'d> {
    shared: Option<Item<'d>>,
    on_outage: Option<Item<'d>>,
}

impl<'d> RuleSharingSettings<'d> {
    pub fn take_from(table: &mut Table<'d>) -> RuleSharingSettings<'d> {
        RuleSharingSettings { shared: table.get("shared"), on_outage: table.get("on_outage") }
    }

    /// Sets `sharing` and `on_outage` of the rule. `misspelled` is true if an unknown setting was probably meant to be
    /// `shared`.
    pub fn read(self, rule: &mut Rule, default_sharing: DefaultSharing, misspelled: bool, report: &mut Report) {
        let shared = self.shared.as_ref().map(|item| item.choice(&RULE_MODES, report));
        let on_outage = self.on_outage.as_ref().map(|item| item.choice(&OUTAGES, report));
        let DefaultSharing::Shared(mode, outage) = default_sharing else {
            // `shared = "off"` is what happens without `[counters.shared]`, so it is not a problem.
            let shared_item = self.shared.as_ref().filter(|_| shared != Some(Some(Sharing::Local)));
            for item in shared_item.into_iter().chain(&self.on_outage) {
                let message = format!("`{}` has no effect: there is no `[counters.shared]`", item.key);
                report.missing(item.key_span.clone(), message, format!("remove it, or {TABLE_FIX}"));
            }
            return;
        };
        rule.sharing = shared.flatten().unwrap_or(mode);
        rule.on_outage = on_outage.flatten().unwrap_or(outage);
        if let (Sharing::Local, Some(item), false) = (rule.sharing, &self.on_outage, misspelled) {
            let message = "`on_outage` has no effect: the rule has `shared = \"off\"`";
            report.missing(item.key_span.clone(), message, "remove it, or remove `shared = \"off\"`");
        }
    }
}

/// The servers that `redis` names.
struct ServerList<'d> {
    item: Item<'d>,
    is_list: bool,
    words: Vec<SpannedStr<'d>>,
    urls: Vec<RedisUrl>,
}

impl<'d> ServerList<'d> {
    /// Returns `None` after reporting a problem.
    fn read(item: &Item<'d>, report: &mut Report) -> Option<ServerList<'d>> {
        let is_list = matches!(item.value, DeValue::Array(_));
        let words = item.strings(EXAMPLE, report)?;
        if words.is_empty() {
            report.problem(item.span.clone(), "`redis` is an empty list", item.fix_with(EXAMPLE));
        }
        let before = report.count();
        let mut urls: Vec<RedisUrl> = Vec::new();
        for word in &words {
            match parse_redis_url(word.text) {
                Ok(url) if urls.iter().any(|other| other.node == url.node) => {
                    let message = format!("`{}` is listed twice", url.node);
                    report.problem(word.span.clone(), message, "remove one of the two");
                }
                Ok(url) => urls.push(url),
                Err((message, fix)) => report.problem(word.span.clone(), message, fix),
            }
        }
        let first = urls.first()?;
        if report.count() > before {
            return None;
        }
        if let Some(other) = urls.iter().position(|other| other.secure != first.secure) {
            let message = "some of these servers use TLS, and some do not";
            report.problem(words[other].span.clone(), message, "write `rediss://` for all of them, or for none");
            return None;
        }
        Some(ServerList { item: item.clone(), is_list, words, urls })
    }

    fn to_nodes(&self, master: Option<&Item>, report: &mut Report) -> Option<Nodes> {
        let nodes: Vec<Node> = self.urls.iter().map(|url| url.node.clone()).collect();
        if master.is_some() || self.is_list {
            for (url, word) in self.urls.iter().zip(&self.words) {
                let one = if master.is_some() { "a sentinel" } else { "a node of a cluster" };
                let (wrong, fix) = if matches!(url.node, Node::Unix(_)) {
                    ("is a Unix socket, which cannot be used to find the other servers", "write its host and port")
                } else if url.username.is_some() || url.password.is_some() {
                    let fix = "write `username` and `password_file` or `password_env`, which apply to all servers";
                    ("has a user name or password in its URL", fix)
                } else if url.database.is_some() {
                    ("has a database in its URL", if master.is_some() { "write `database`" } else { "remove it" })
                } else {
                    continue;
                };
                report.problem(word.span.clone(), format!("`{}`, {one}, {wrong}", url.node), fix);
                return None;
            }
        }
        if let Some(item) = master {
            let master = item.string("\"mymaster\"", report)?;
            let is_name = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
            if master.text.is_empty() || !master.text.chars().all(is_name) {
                let message = format!("{} is not a valid Sentinel master name", quoted(master.text));
                report.problem(
                    master.span,
                    message,
                    "write the name from `sentinel monitor NAME …`: letters, digits, `.-_`",
                );
                return None;
            }
            return Some(Nodes::Sentinel { nodes, master: master.text.to_owned() });
        }
        if self.is_list {
            return Some(Nodes::Cluster(nodes));
        }
        nodes.into_iter().next().map(Nodes::Single)
    }
}

fn read_database(
    item: Option<&Item>,
    servers: Option<&ServerList>,
    nodes: Option<&Nodes>,
    report: &mut Report,
) -> Option<i64> {
    let given = match item {
        Some(item) => Some(item.integer(0..=DATABASE_MAX, report)?),
        None => None,
    };
    let url_database = servers.and_then(|servers| servers.urls.first()?.database);
    match (item, given, url_database, nodes) {
        (Some(item), _, _, Some(Nodes::Cluster(_))) => {
            let message = "`database` has no effect: a Redis Cluster has only one database";
            let fix = "remove it, or write `redis` without brackets if this is not a cluster";
            report.problem(item.key_span.clone(), message, fix);
            None
        }
        (Some(item), _, Some(_), _) => {
            let message = "`database` and a database in the URL are both given";
            report.problem(item.key_span.clone(), message, "keep one of the two");
            None
        }
        (_, given, url_database, _) => i64::try_from(given.or(url_database).unwrap_or(0)).ok(),
    }
}

/// The sources of secrets.
struct SecretSources<'f> {
    files: ReadFile<'f>,
    variables: ReadVariable<'f>,
}

impl SecretSources<'_> {
    /// Reads a secret from a file or from an environment variable, without the line end that editors add.
    fn read_secret(&self, item: &Item, report: &mut Report) -> Option<Vec<u8>> {
        let is_file = item.key.ends_with("_file");
        let word = item.string(if is_file { "\"FILE\"" } else { "\"VARIABLE\"" }, report)?;
        let (bytes, what) = if is_file {
            (read_named_file(&word, self.files, report)?, quoted(word.text))
        } else {
            let Some(value) = (self.variables)(word.text) else {
                let message = format!("the environment variable {} is not set", quoted(word.text));
                let fix = "set it in the environment of the gateway, or name a file instead";
                report.problem(word.span, message, fix);
                return None;
            };
            (value, format!("the environment variable {}", quoted(word.text)))
        };
        let secret = strip_line_end(&bytes).to_vec();
        if secret.is_empty() {
            report.problem(word.span, format!("{what} is empty"), "write the secret there");
            return None;
        }
        Some(secret)
    }
}

/// Reports two settings that exclude each other.
fn report_both_given(first: &str, second: &Item, report: &mut Report) {
    let message = format!("{first} and `{}` are both given", second.key);
    report.problem(second.key_span.clone(), message, "keep one of the two");
}

/// The settings with which the gateway authenticates.
struct CredentialSettings<'d> {
    username: Option<Item<'d>>,
    file: Option<Item<'d>>,
    variable: Option<Item<'d>>,
}

impl CredentialSettings<'_> {
    fn read(
        &self,
        servers: Option<&ServerList>,
        misspelled: &[&str],
        secrets: &SecretSources,
        report: &mut Report,
    ) -> (Option<String>, Option<Secret<String>>) {
        let first_url = servers.filter(|servers| !servers.is_list).and_then(|servers| servers.urls.first());
        let (url_name, url_password) =
            first_url.map_or((None, None), |url| (url.username.clone(), url.password.clone()));
        let name = match (&self.username, url_name) {
            (Some(item), Some(_)) => {
                report_both_given("a user name in the URL", item, report);
                return (None, None);
            }
            (Some(item), None) => {
                let word = item.string("\"transom\"", report);
                if let Some(SpannedStr { span, .. }) = word.as_ref().filter(|word| word.text.is_empty()) {
                    report.problem(span.clone(), "`username` is empty", "write the user name, or remove the setting");
                }
                word.map(|word| word.text.to_owned())
            }
            (None, name) => name,
        };
        let sources = [&self.file, &self.variable].into_iter().flatten().collect::<Vec<_>>();
        let password = match (url_password, sources.as_slice()) {
            (Some(_), [item, ..]) => {
                report_both_given("a password in the URL", item, report);
                return (None, None);
            }
            (None, [first, second, ..]) => {
                report_both_given(&format!("`{}`", first.key), second, report);
                return (None, None);
            }
            (None, [item]) => {
                let Some(bytes) = secrets.read_secret(item, report) else { return (None, None) };
                let Ok(password) = String::from_utf8(bytes) else {
                    report.problem(item.span.clone(), "the password is not UTF-8 text", "choose another password");
                    return (None, None);
                };
                Some(password)
            }
            (Some(password), []) => Some(password),
            (None, []) => None,
        };
        let is_misspelled = misspelled.iter().any(|key| key.starts_with("password"));
        let lacks_password = name.is_some() && password.is_none() && !is_misspelled;
        if let (true, Some(servers)) = (lacks_password, servers) {
            let span = self.username.as_ref().map_or(servers.item.span.clone(), |item| item.key_span.clone());
            report.missing(
                span,
                "a user name is given without a password",
                "add `password_file = \"FILE\"` or `password_env = \"VARIABLE\"`",
            );
        }
        (name, password.map(Secret))
    }
}

/// Reads the key of the digests that replace secret key parts in the store.
fn read_digest_key(
    file: Option<&Item>,
    variable: Option<&Item>,
    secrets: &SecretSources,
    report: &mut Report,
) -> Option<Secret<Vec<u8>>> {
    let item = match (file, variable) {
        (Some(_), Some(variable)) => {
            report_both_given("`digest_key_file`", variable, report);
            return None;
        }
        (None, None) => return None,
        (Some(item), None) | (None, Some(item)) => item,
    };
    let key = secrets.read_secret(item, report)?;
    if key.len() < DIGEST_KEY_MIN_BYTES {
        let message = format!("the key in `{}` has less than {DIGEST_KEY_MIN_BYTES} bytes", item.key);
        report.problem(item.span.clone(), message, "create a random key: `openssl rand -hex 32`");
        return None;
    }
    Some(Secret(key))
}

fn read_prefix(item: &Item, report: &mut Report) -> Option<String> {
    let word = item.string(&format!("\"{DEFAULT_PREFIX}\""), report)?;
    let is_plain = |c: char| c.is_ascii_alphanumeric() || ".~_:-".contains(c);
    if !word.text.is_empty() && word.text.len() <= PREFIX_MAX_BYTES && word.text.chars().all(is_plain) {
        return Some(word.text.to_owned());
    }
    let message = format!("{} cannot be the prefix of keys", quoted(word.text));
    let fix = format!("write at most {PREFIX_MAX_BYTES} letters, digits and `.~_:-`");
    report.problem(word.span, message, fix);
    None
}

fn read_tls(
    settings: upstream_tls::TlsSettings,
    servers: Option<&ServerList>,
    misspelled: &[&str],
    files: ReadFile,
    report: &mut Report,
) -> Option<ClientTls> {
    let servers = servers?;
    let items = [&settings.ca, &settings.certificate, &settings.private_key];
    if !servers.urls.iter().any(|url| url.secure) {
        for item in items.into_iter().flatten() {
            let message = format!("`{}` has no effect: no server uses TLS", item.key);
            report.missing(item.key_span.clone(), message, "remove it, or write `rediss://` in `redis`");
        }
        return None;
    }
    let mut roots = upstream_tls::SystemRoots::default();
    let span: Span = servers.item.span.clone();
    settings.read(span, misspelled, files, &mut roots, report)
}
