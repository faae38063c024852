//! `[clients]`, and the clients file that it names.
//!
//! The clients file may contain an API key in plain text by mistake, see `named_file`.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;

use serde_json::{Value, json};
use toml::de::DeValue;

use super::client_grants::{ClientGrant, GrantSettings};
use super::client_limits::{ClientLimits, LimitsText, WrittenLimits, limits};
use super::diagnostics::{Report, quoted, quoted_list};
use super::key::{self, OnUnknownKey};
use super::key_kind::{CLIENT_CERT, Identifies, JWT, KeyKind};
use super::listen::ClientCerts;
use super::named_file::read_named_file;
use super::redis::TABLE_FIX;
use super::rule::CheckedRule;
use super::settings::{Choice, Custom, Required, Restart, Section, Shape, Tables, Text, Texts, section_table};
use super::toml_reader::{Item, SpannedStr, SpannedString, Table};
use super::values::{
    Definitions, check_name, definition_fix, is_name, is_pattern, read_digest, read_fingerprint, read_network,
};
use transom_limiter::handles::RuleId;
use transom_limiter::ip_prefix::Network;
use transom_limiter::key::KeyPart;
use transom_limiter::secret_digest::Digest;

const CLIENT_FIX: &str = "write `[clients.NAME]`, then its settings, each on a line";
const ADD_COMMAND: &str = "transom clients add NAME --plan PLAN --generate-key";
const API_KEY: &str = "\"header:x-api-key\"";
const SUBJECT: &str = "\"jwt:sub\"";
const PLAN_CLAIM: &str = "\"jwt:plan\"";

/// Where the clients are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClientsSource {
    File,
    /// The store of shared counters.
    Shared,
}

const SOURCES: [(&str, ClientsSource); 2] = [("file", ClientsSource::File), ("shared", ClientsSource::Shared)];

settings! {
    /// Clients, and the parts of a request that identify them.
    pub struct ClientsSettings {
        /// Where the clients are. `"file"`: in the clients file. `"shared"`: in the store of `[counters.shared]`, equal on all gateways.
        source: ClientsSource = Restart(Choice(ClientsSource::File, &SOURCES));
        /// The clients file. With `"shared"`: the copy from which a gateway starts while the store is away, and which it writes.
        file: Option<SpannedString> =
            Required(Text("path of a file", "\"clients.toml\""), "write `file = \"clients.toml\"`");
        /// Where requests carry the client's API key; of a list, the first that a request has. `"bearer"`: in
        /// `Authorization: Bearer`, [also beside tokens](#api-keys-and-tokens-in-one-field).
        api_key: Vec<KeyPart> = Custom::or_empty(
            || Shape::one_or_list("`\"header:NAME\"`, `\"bearer\"`, `\"cookie:NAME\"`, `\"query:NAME\"`"),
            read_api_key_sources,
        );
        /// Where requests carry the user on whose behalf they are sent. With `"client-cert"`, `subjects` are SHA-256 of
        /// certificates. The gateway verifies only claims and certificates; any client can send a field.
        subject: Option<KeyPart> = Custom::or_empty(
            || Shape::Text("as `api_key`, or `\"jwt:CLAIM\"`, `\"basic-user\"`, `\"client-cert\"`, `\"client-cert:san\"`, `\"client-cert:cn\"`"),
            |item, report| {
                let word = item.string(SUBJECT, report)?;
                read_key_source(item, &word, SUBJECT, true, report).map(Some)
            },
        );
        /// The claim with the plan of a verified token whose subject no client has. If some rule defines the plan, the subject
        /// is known, and rules by `"client"` count it as `subject:VALUE`, apart from the clients.
        plan: Option<KeyPart> = Custom::or_empty(|| Shape::Text("`\"jwt:CLAIM\"`"), read_plan_claim);
    }
}

settings! {
    /// A client in the clients file.
    pub struct ClientSettings {
        /// Plan of the client, which some rule defines.
        plan: Option<SpannedString> =
            Required(Text("name", "\"PLAN\""), "write `plan = \"PLAN\"`, with a plan that a rule defines");
        /// Digests of API keys: `sha256:` and the SHA-256 in hex. `[]` for a client that gets its first key later.
        api_keys: Vec<SpannedString> = Texts("digest", "[\"sha256:…\"]");
        /// Values of `subject` in requests.
        subjects: Vec<SpannedString> = Texts("text", "[\"user-17\"]");
        /// Networks or addresses of the client.
        networks: Vec<SpannedString> = Texts("network", "[\"203.0.113.0/24\"]");
        /// Windows of this client in single rules, `[clients.NAME.limits.RULE]`, instead of those of its plan: `windows` as in the
        /// rule and, if they end by themselves, `until`, an RFC 3339 time. See [below](#limits-of-one-client).
        limits: Vec<WrittenLimits> = limits();
        /// Tokens added once to a window, which the gateway writes: `POST /v1/clients/NAME/grants`. A grant ends with its window, and
        /// has no effect if the rule or the window is gone.
        grants: Vec<GrantSettings> = Tables::<GrantSettings>::or("the grant", "the gateway writes `grants`: remove the line");
    }
}

/// `[clients]` and the clients file: named clients, their plans, and how requests are assigned to them.
#[derive(Clone, PartialEq, Debug)]
pub struct Clients {
    pub source: ClientsSource,
    /// As configured.
    pub file: PathBuf,
    /// The parts of a request that can hold the API key. The first that a request has decides.
    pub api_key: Vec<KeyPart>,
    /// The part of a request that names the subject on whose behalf it is made.
    pub subject: Option<KeyPart>,
    /// The claim with the plan of a token whose subject no client has.
    pub plan_claim: Option<KeyPart>,
    /// The plans that rules define, sorted, if those of `list` are not all that there may be.
    pub defined_plans: Vec<String>,
    /// Sorted by name. Empty if the clients are in the store.
    pub list: Vec<Client>,
    /// [`Client::limits_text`] of all clients at all times, each once.
    pub limit_texts: Vec<LimitsText>,
}

/// One client: requests with one of its API keys or subjects, or from one of its networks.
#[derive(Clone, PartialEq, Debug)]
pub struct Client {
    pub name: String,
    pub plan: String,
    pub api_keys: Vec<Digest>,
    pub subjects: Vec<String>,
    pub networks: Vec<Network>,
    /// In ascending order of their rules, each once.
    pub limits: Vec<ClientLimits>,
    /// In the order in which they were made.
    pub grants: Vec<ClientGrant>,
}

impl Client {
    /// A client as the store has it: JSON, with the settings of the clients file. Other members are for others. Limits that cannot be
    /// read have no effect, the rest of the client has.
    ///
    /// # Errors
    ///
    /// What is wrong with it, without its values.
    pub fn from_json(name: &str, text: &str) -> Result<Client, String> {
        if !is_name(name) {
            return Err("its name is invalid".to_owned());
        }
        let client: Value = serde_json::from_str(text).map_err(|_syntax| "it is not JSON".to_owned())?;
        let plan = client.get("plan").and_then(Value::as_str).ok_or("`plan` is missing")?.to_owned();
        let texts = |member: &'static str| -> Result<Vec<&str>, String> {
            let wrong = || format!("`{member}` is no list of texts");
            let list = match client.get(member) {
                None => return Ok(Vec::new()),
                Some(list) => list.as_array().ok_or_else(wrong)?,
            };
            list.iter().map(|text| text.as_str().ok_or_else(wrong)).collect()
        };
        let digest = |text: &str| Digest::parse(text).ok_or("a key is no digest");
        let network = |text: &str| text.parse().map_err(|_invalid| "a network is invalid");
        let limits = client.get("limits").and_then(Value::as_object).into_iter().flatten();
        Ok(Client {
            name: name.to_owned(),
            plan,
            api_keys: texts("api_keys")?.into_iter().map(digest).collect::<Result<_, _>>()?,
            subjects: texts("subjects")?.into_iter().map(str::to_owned).collect(),
            networks: texts("networks")?.into_iter().map(network).collect::<Result<_, _>>()?,
            limits: limits.map(|(rule, limits)| ClientLimits::from_store(rule, limits)).collect(),
            grants: ClientGrant::from_store(&client),
        })
    }

    /// What changes keep of a client that [`Client::from_json`] cannot read: its keys and limits. It has no plan, so that it can be
    /// replaced and removed, and not used.
    pub fn readable_part(name: &str, text: &str) -> Client {
        let client: Value = serde_json::from_str(text).unwrap_or_default();
        let keys = client.get("api_keys").and_then(Value::as_array).into_iter().flatten();
        let limits = client.get("limits").and_then(Value::as_object).into_iter().flatten();
        Client {
            name: name.to_owned(),
            plan: String::new(),
            api_keys: keys.filter_map(Value::as_str).filter_map(Digest::parse).collect(),
            subjects: Vec::new(),
            networks: Vec::new(),
            limits: limits.map(|(rule, limits)| ClientLimits::from_store(rule, limits)).collect(),
            grants: ClientGrant::from_store(&client),
        }
    }
}

impl Client {
    /// As [`Client::from_json`] reads it. It has all members that this version knows, also empty ones: other members of a stored
    /// client are kept when it changes.
    pub fn to_json(&self) -> Value {
        let digests: Vec<String> = self.api_keys.iter().map(Digest::to_string).collect();
        let networks: Vec<String> = self.networks.iter().map(Network::to_string).collect();
        let limits = self.limits_json().unwrap_or_else(|| json!({}));
        json!({
            "plan": self.plan, "api_keys": digests, "subjects": self.subjects, "networks": networks, "limits": limits,
            "grants": self.grants.iter().map(ClientGrant::to_json).collect::<Vec<_>>(),
        })
    }

    /// The limits by rule; `None` if there are none.
    pub fn limits_json(&self) -> Option<Value> {
        let limits = self.limits.iter().map(|limits| (limits.rule.clone(), limits.to_json())).collect();
        (!self.limits.is_empty()).then_some(Value::Object(limits))
    }

    /// What two clients have in common, although it should belong to one.
    pub fn shares_with(&self, other: &Client) -> Option<&'static str> {
        match () {
            () if self.api_keys.iter().any(|key| other.api_keys.contains(key)) => Some("key"),
            () if self.subjects.iter().any(|subject| other.subjects.contains(subject)) => Some("subject"),
            () if self.networks.iter().any(|network| other.networks.contains(network)) => Some("network"),
            () => None,
        }
    }

    /// Why this cannot be a client in the store.
    ///
    /// # Errors
    ///
    /// What is wrong with it, without its values.
    pub fn check(&self, clients: &Clients) -> Result<(), String> {
        let plans = || quoted_list(clients.defined_plans.iter().map(String::as_str), "and");
        match self {
            _ if !is_name(&self.name) => {
                Err("a name has at most 64 letters, digits, `_`, `-` and `.`, and is neither `.` nor `..`".to_owned())
            }
            _ if !clients.defined_plans.contains(&self.plan) => {
                Err(format!("plan {} is not defined by any rule; plans: {}", quoted(&self.plan), plans()))
            }
            _ if self.subjects.iter().any(String::is_empty) => Err("a subject is empty".to_owned()),
            _ if self.subjects.iter().any(|subject| is_pattern(subject)) => {
                Err("a subject is a pattern, and subjects are compared as a whole".to_owned())
            }
            _ => Ok(()),
        }
    }
}

impl Clients {
    /// The parts of a request that name a client.
    pub fn sources(&self) -> impl Iterator<Item = &KeyPart> {
        self.api_key.iter().chain(&self.subject)
    }

    /// Whether the key of a rule has a part that names a client.
    pub fn read_part_of(&self, key: &[KeyPart]) -> bool {
        self.sources().any(|source| key.contains(source))
    }
}

/// A setting that a reload cannot apply, if one has changed.
pub fn changed_setting(clients: Option<&Clients>, former: Option<&Clients>) -> Option<&'static str> {
    let source = |clients: Option<&Clients>| clients.map_or(ClientsSource::File, |clients| clients.source);
    let copy = |clients: Option<&Clients>| {
        clients.filter(|clients| clients.source == ClientsSource::Shared).map(|clients| clients.file.clone())
    };
    match source(clients) != source(former) {
        true => Some("clients.source"),
        false => (copy(clients) != copy(former)).then_some("clients.file"),
    }
}

/// The plans that the rules define.
pub struct DefinedPlans<'r> {
    pub names: Vec<&'r str>,
    /// False if some plans may be missing here, because part of the file is invalid.
    pub complete: bool,
    pub rules: &'r Definitions<RuleId, CheckedRule>,
}

pub fn read_clients(
    item: Option<Item>,
    plans: &DefinedPlans,
    certs: ClientCerts,
    has_store: bool,
    report: &mut Report,
) -> Option<Clients> {
    let mut table = section_table(item, report)?;
    let ClientsSettings { source, file, api_key, subject, plan } = ClientsSettings::read(&mut table, report);
    let is_shared = source == ClientsSource::Shared;
    if let (true, false, Some(item)) = (is_shared, has_store, table.given("source")) {
        let message = "there is no store for the clients: `[counters.shared]` is missing";
        report.missing(item.span, message, TABLE_FIX);
    }
    let (api_key_item, subject_item) = (table.given("api_key"), table.given("subject"));
    let is_claim = subject.as_ref().is_some_and(|part| JWT.has(part));
    if let (Some(item), false, true) = (table.given("plan"), is_claim, subject.is_some() || table.lacks("subject")) {
        let message = "`plan` has no effect: `subject` is no claim of a token";
        report.missing(item.key_span, message, "add `subject = \"jwt:sub\"`, or remove it");
    }
    for item in table.items() {
        if let DeValue::Table(_) = item.value {
            let fix = "write `[clients.NAME]` into the file that `file` names, such as `clients.toml`";
            table.suggest_for(item.key, "file", fix);
        }
    }
    table.finish(report);
    let needs_cert = subject.as_ref().is_some_and(|part| KeyKind::of(part).needs_certificate());
    if let (true, ClientCerts::Never, Some(item)) = (needs_cert, certs, &subject_item) {
        let fix = "add `client_ca = \"FILE\"` to `[listen.https]`, with the certificates of the issuers";
        report.missing(item.span.clone(), "the gateway does not request client certificates", fix);
    }
    let file = file?;
    let defined_plans = match is_shared || plan.is_some() {
        true => plans.names.iter().copied().collect::<BTreeSet<_>>().into_iter().map(str::to_owned).collect(),
        false => Vec::new(),
    };
    if is_shared {
        let (file, list) = (PathBuf::from(&file.text), Vec::new());
        return Some(Clients {
            source,
            file,
            api_key,
            subject,
            plan_claim: plan,
            defined_plans,
            list,
            limit_texts: Vec::new(),
        });
    }
    let mut reader = ClientsFileReader {
        plans,
        has_api_key: api_key_item.is_some(),
        has_subject: subject_item.is_some(),
        subjects_are_fingerprints: certs != ClientCerts::Never
            && subject.as_ref().is_some_and(|part| CLIENT_CERT.has(part)),
        owners: HashMap::new(),
    };
    let read = |top: &mut Table, report: &mut Report| reader.read_file(top, report);
    let (file, list) = read_named_file(&file, "the clients file", ADD_COMMAND, report, read)?;
    Some(Clients { source, file, api_key, subject, plan_claim: plan, defined_plans, list, limit_texts: Vec::new() })
}

/// Reports rules by client without clients.
pub fn report_missing_clients(
    rules: &Definitions<RuleId, CheckedRule>,
    clients: Option<&Clients>,
    report: &mut Report,
) {
    let by_client = rules.entries.iter().map(|entry| &entry.value).find(|checked| checked.rule.counts_clients());
    if let (None, Some(CheckedRule { key_span: Some(span), .. })) = (clients, by_client) {
        let fix = "write `[clients]`, then `file = \"clients.toml\"` and `api_key = \"header:x-api-key\"`";
        report.missing(span.clone(), "`client` needs clients, and there is no `[clients]`", fix);
    }
}

/// Reports settings that have no effect because no part of a key names a client.
pub fn report_unused_on_unknown_key(
    rules: &Definitions<RuleId, CheckedRule>,
    clients: Option<&Clients>,
    report: &mut Report,
) {
    for CheckedRule { rule, on_unknown_key_span, .. } in rules.entries.iter().map(|entry| &entry.value) {
        let reads_key = clients.is_some_and(|clients| clients.read_part_of(&rule.key));
        let has_effect = rule.key.is_empty() || rule.counts_clients() || reads_key;
        let Some(span) = on_unknown_key_span else { continue };
        if has_effect || rule.on_unknown_key == OnUnknownKey::Count {
            continue;
        }
        let names = |parts: Vec<String>| quoted_list(parts.iter().map(String::as_str), "and");
        let sources: Vec<String> =
            clients.iter().flat_map(|clients| clients.sources()).map(KeyPart::to_string).collect();
        let (reason, fix) = match clients {
            None => {
                (String::from("there is no `[clients]`"), "add `[clients]`, with `file` and `api_key`, or remove it")
            }
            Some(_) if sources.is_empty() => (
                String::from("`[clients]` has neither `api_key` nor `subject`"),
                "add `api_key` or `subject` there, with a part of `key`, or remove it",
            ),
            Some(_) => {
                let parts = names(rule.key.iter().map(KeyPart::to_string).collect());
                (
                    format!("`[clients]` reads {}, and the rule counts by {parts}", names(sources)),
                    "write the same part in both, or remove it",
                )
            }
        };
        report.missing(span.clone(), format!("`on_unknown_key` has no effect: {reason}"), fix);
    }
}

fn read_plan_claim(item: &Item, report: &mut Report) -> Option<Option<KeyPart>> {
    let word = item.string(PLAN_CLAIM, report)?;
    let part = key::read_part(&word, report)?;
    if !JWT.has(&part) {
        let message = format!("`plan` cannot be {}: only a verified token can name a plan", quoted(word.text));
        return report.reject(word.span, message, item.fix_with(PLAN_CLAIM));
    }
    Some(Some(part))
}

fn read_api_key_sources(item: &Item, report: &mut Report) -> Option<Vec<KeyPart>> {
    let words = item.strings(API_KEY, report)?;
    let mut parts: Vec<KeyPart> = Vec::new();
    for word in &words {
        let part = read_key_source(item, word, API_KEY, false, report)?;
        if parts.contains(&part) {
            return report.reject(word.span.clone(), format!("{} is listed twice", quoted(word.text)), "remove it");
        }
        parts.push(part);
    }
    Some(parts)
}

/// Reads the part of a request that identifies a client. `is_subject`: it may be the client certificate.
fn read_key_source(
    item: &Item,
    word: &SpannedStr,
    example: &str,
    is_subject: bool,
    report: &mut Report,
) -> Option<KeyPart> {
    let part = key::read_part(word, report)?;
    match KeyKind::of(&part).identifies {
        Identifies::ApiKeyOrSubject(_) => return Some(part),
        Identifies::Subject(_) if is_subject => return Some(part),
        Identifies::Subject(_) | Identifies::Nothing => {}
    }
    let message = format!("`{}` cannot be {}: it does not identify a client", item.key, quoted(word.text));
    report.reject(word.span.clone(), message, item.fix_with(example))
}

/// Reads the clients file.
struct ClientsFileReader<'r> {
    plans: &'r DefinedPlans<'r>,
    /// Whether `[clients]` has `api_key`, and `subject`.
    has_api_key: bool,
    has_subject: bool,
    /// Whether subjects are fingerprints of client certificates.
    subjects_are_fingerprints: bool,
    /// The keys, subjects and networks read so far, each after the word for its kind, with the names of their clients.
    owners: HashMap<(&'static str, String), String>,
}

impl ClientsFileReader<'_> {
    fn read_file(&mut self, top: &mut Table, report: &mut Report) -> Vec<Client> {
        let Some(clients) = top.get("clients") else { return Vec::new() };
        let Some(table) = clients.table("`[clients]`", CLIENT_FIX, report) else { return Vec::new() };
        let mut list: Vec<Client> = table.items().iter().filter_map(|entry| self.read_client(entry, report)).collect();
        // Few files are in another order.
        list.sort_by(|one, other| one.name.cmp(&other.name));
        list
    }

    fn read_client(&mut self, entry: &Item, report: &mut Report) -> Option<Client> {
        check_name(entry, report);
        let mut table = entry.table(format!("`[clients.{}]`", entry.key), CLIENT_FIX, report)?;
        let settings = ClientSettings::read(&mut table, report);
        // An empty list says that the client gets keys later.
        if ["api_keys", "subjects", "networks"].into_iter().all(|key| table.lacks(key)) {
            let message = format!(
                "{} has no `api_keys`, `subjects` or `networks`, so no request belongs to it",
                quoted(entry.key)
            );
            let fix =
                "add `api_keys`, `subjects` or `networks`, or `api_keys = []` until it has a key, or remove the client";
            report.missing(entry.key_span.clone(), message, fix);
        }
        for (key, setting, example, is_given) in
            [("api_keys", "api_key", API_KEY, self.has_api_key), ("subjects", "subject", SUBJECT, self.has_subject)]
        {
            if let (Some(item), false) = (table.given(key), is_given) {
                let message = format!("`{key}` has no effect: `[clients]` in the configuration has no `{setting}`");
                let fix = format!("add, for example, `{setting} = {example}` there");
                report.problem(item.key_span, message, fix);
            }
        }
        table.finish(report);
        let name = entry.key;
        let api_keys = settings.api_keys.iter().filter_map(|text| self.read_api_key(text, name, report)).collect();
        let subjects = settings.subjects.iter().filter_map(|text| self.read_subject(text, name, report)).collect();
        let networks = settings.networks.iter().filter_map(|text| self.read_network(text, name, report)).collect();
        let limits = settings.limits.into_iter().filter_map(|limits| self.check_limits(limits, report)).collect();
        let grants = settings.grants.into_iter().filter_map(ClientGrant::from_settings).collect();
        let plan = settings.plan?;
        if self.plans.complete && !self.plans.names.contains(&plan.text.as_str()) {
            let fix = definition_fix(&plan.text, "rules.NAME.plans", &self.plans.names);
            report.problem(plan.span, format!("plan {} is not defined by any rule", quoted(&plan.text)), fix);
        }
        Some(Client { name: name.to_owned(), plan: plan.text, api_keys, subjects, networks, limits, grants })
    }

    fn check_limits(&self, limits: WrittenLimits, report: &mut Report) -> Option<ClientLimits> {
        let WrittenLimits { limits, span } = limits;
        let rules = self.plans.rules.entries.iter().map(|entry| &entry.value.rule);
        // An invalid rule or list of windows is reported already.
        let is_invalid = rules.clone().any(|rule| rule.name == limits.rule && rule.key.is_empty());
        if self.plans.complete && !is_invalid && !limits.layers.is_empty() {
            report.accept(span, limits.check(rules))?;
        }
        Some(limits)
    }

    fn read_api_key(&mut self, text: &SpannedString, client: &str, report: &mut Report) -> Option<Digest> {
        if !text.text.starts_with(Digest::PREFIX) {
            let fix = format!(
                "replace the key: others may have read it. Remove it here, then `transom clients add {client} --generate-key`; \
                 or keep it: `transom clients add {client} --key -` reads it and stores its digest"
            );
            return report.reject(text.span.clone(), "this is an API key in plain text", fix);
        }
        let digest = read_digest(&text.as_str(), report)?;
        self.assign_owner("key", digest.to_string(), client, text, report);
        Some(digest)
    }

    fn read_subject(&mut self, text: &SpannedString, client: &str, report: &mut Report) -> Option<String> {
        if text.text.is_empty() {
            return report.reject(text.span.clone(), "a subject is empty", "write the subject, or remove it");
        }
        if is_pattern(&text.text) {
            let message = "a subject is a pattern, and subjects are compared as a whole";
            return report.reject(text.span.clone(), message, "write each subject");
        }
        let subject = match self.subjects_are_fingerprints {
            true => read_fingerprint(&text.as_str(), report)?,
            false => text.text.clone(),
        };
        self.assign_owner("subject", subject.clone(), client, text, report);
        Some(subject)
    }

    fn read_network(&mut self, text: &SpannedString, client: &str, report: &mut Report) -> Option<Network> {
        let network = read_network(&text.as_str(), report)?;
        self.assign_owner("network", network.to_string(), client, text, report);
        Some(network)
    }

    /// Records the client that a key, subject or network belongs to. Reports one that a client already has.
    fn assign_owner(
        &mut self,
        kind: &'static str,
        value: String,
        client: &str,
        text: &SpannedString,
        report: &mut Report,
    ) {
        let owner = match self.owners.entry((kind, value)) {
            Entry::Occupied(owner) => owner,
            Entry::Vacant(entry) => {
                entry.insert(client.to_owned());
                return;
            }
        };
        let (message, fix) = match owner.get() {
            owner if owner == client => (format!("this {kind} is listed twice"), "remove it"),
            owner => (
                format!("this {kind} belongs to {} and to {}", quoted(owner), quoted(client)),
                "remove it from one of the two",
            ),
        };
        report.problem(text.span.clone(), message, fix);
    }
}
