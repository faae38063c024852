//! `[clients]`, and the clients file that it names.
//!
//! The clients file may contain an API key in plain text by mistake. Problems give the position in that file, and never
//! show a line or a value that could be a secret.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::path::PathBuf;

use toml::de::{DeTable, DeValue};

use super::key;
use super::values::{check_name, nearest_name, read_digest, read_fingerprint, read_network};
use crate::config::diagnostics::{Report, quoted, quoted_list};
use crate::config::listen::ClientCerts;
use crate::config::settings::section_table;
use crate::config::toml_reader::{Item, SpannedStr, Table, nearest, toml_errors};
use crate::config::{Client, Clients};
use transom_limiter::ip_prefix::Network;
use transom_limiter::key::KeyPart;
use transom_limiter::secret_digest::Digest;

const CLIENT_FIX: &str = "write `[clients.NAME]`, then its settings, each on a line";
const ADD_COMMAND: &str = "transom clients add NAME --plan PLAN --generate-key";
const SYNTAX_ERROR: &str = "this is not TOML";
const ALREADY_DEFINED: &str = "this name is already defined";
const SYNTAX_FIX: &str = "a line is `key = value` or `[table]`; texts go in quotes";

/// The plans that the rules define.
pub struct DefinedPlans<'r> {
    pub names: Vec<&'r str>,
    /// False if some plans may be missing here, because part of the file is invalid.
    pub complete: bool,
}

pub fn read_clients(
    item: Option<Item>,
    plans: &DefinedPlans,
    certs: ClientCerts,
    report: &mut Report,
) -> Option<Clients> {
    let mut table = section_table(item, report)?;
    let file = table.require("file", "write `file = \"clients.toml\"`");
    let api_key = table.get("api_key");
    let subject = table.get("subject");
    table.finish(report);
    let api_key = api_key.map(|item| read_key_source(&item, "\"header:x-api-key\"", None, report));
    let subject = subject.map(|item| read_key_source(&item, "\"jwt:sub\"", Some(certs), report));
    let file = file.and_then(|item| item.string("\"clients.toml\"", report))?;
    let path = PathBuf::from(file.text);
    let bytes = match (report.files)(&path) {
        Ok(bytes) => bytes,
        Err(error) => {
            let message = format!("cannot read {}: {error}", quoted(file.text));
            report.problem(file.span, message, format!("name the file, or create it: `{ADD_COMMAND}`"));
            return None;
        }
    };
    let Ok(text) = String::from_utf8(bytes) else {
        report.problem(file.span, format!("{} is not UTF-8 text", quoted(file.text)), "save it as UTF-8");
        return None;
    };
    let mut file_report = Report::for_named_file(&text, &path);
    let mut reader = ClientsFileReader {
        plans,
        has_api_key: api_key.is_some(),
        has_subject: subject.is_some(),
        subjects_are_fingerprints: subject == Some(Some(KeyPart::ClientCert)),
        owners: Owners::default(),
    };
    let list = reader.read_file(&text, &mut file_report);
    report.append(file_report);
    Some(Clients { file: path, api_key: api_key.flatten(), subject: subject.flatten(), list })
}

/// Reads the part of a request that identifies a client. `certs` is `None` if this cannot be the client certificate.
fn read_key_source(item: &Item, example: &str, certs: Option<ClientCerts>, report: &mut Report) -> Option<KeyPart> {
    let word = item.string(example, report)?;
    let part = key::read_part(&word, report)?;
    match part {
        KeyPart::Header(_) | KeyPart::Cookie(_) | KeyPart::Query(_) | KeyPart::Jwt(_) => return Some(part),
        KeyPart::ClientCert if certs == Some(ClientCerts::Never) => {
            let fix = "add `client_ca = \"FILE\"` to `[listen.https]`, with the certificates of the issuers";
            report.missing(word.span, "the gateway does not request client certificates", fix);
            return None;
        }
        KeyPart::ClientCert if certs.is_some() => return Some(part),
        KeyPart::Ip { .. }
        | KeyPart::Param(_)
        | KeyPart::ClientCert
        | KeyPart::Host
        | KeyPart::Method
        | KeyPart::Path
        | KeyPart::Route
        | KeyPart::Global => {}
    }
    let message = format!("`{}` cannot be {}: it does not identify a client", item.key, quoted(word.text));
    report.problem(word.span, message, item.fix_with(example));
    None
}

/// Reads the clients file.
struct ClientsFileReader<'r> {
    plans: &'r DefinedPlans<'r>,
    /// Whether `[clients]` has `api_key`, and `subject`.
    has_api_key: bool,
    has_subject: bool,
    /// Whether subjects are fingerprints of client certificates.
    subjects_are_fingerprints: bool,
    owners: Owners,
}

/// The keys, subjects and networks read so far, with the names of their clients.
#[derive(Default)]
struct Owners {
    keys: HashMap<Digest, String>,
    subjects: HashMap<String, String>,
    networks: HashMap<Network, String>,
}

impl ClientsFileReader<'_> {
    fn read_file(&mut self, text: &str, report: &mut Report) -> Vec<Client> {
        let mut syntax_report = Report::new(text);
        let valid_text = toml_errors::skip_syntax_errors(text, &mut syntax_report);
        report.has_syntax_errors = syntax_report.has_syntax_errors;
        for problem in syntax_report.into_problems() {
            // Most syntax errors quote the file, so their text is replaced.
            let (message, fix) = match problem.message.as_str() {
                message if message.contains("is already defined") => (ALREADY_DEFINED.to_owned(), problem.fix),
                message if message.contains('`') => (SYNTAX_ERROR.to_owned(), SYNTAX_FIX.to_owned()),
                _ => (problem.message, problem.fix),
            };
            report.problem(problem.span, message, fix);
        }
        let (document, _) = DeTable::parse_recoverable(&valid_text);
        let mut top = Table::new(document.get_ref(), 0..0, "the clients file");
        let clients = top.get("clients");
        top.finish(report);
        let Some(clients) = clients else { return Vec::new() };
        let Some(table) = clients.table("`[clients]`", CLIENT_FIX, report) else { return Vec::new() };
        table.items().iter().filter_map(|entry| self.read_client(entry, report)).collect()
    }

    fn read_client(&mut self, entry: &Item, report: &mut Report) -> Option<Client> {
        check_name(entry, report);
        let mut table = entry.table(format!("`[clients.{}]`", entry.key), CLIENT_FIX, report)?;
        let plan = table.require("plan", "write `plan = \"PLAN\"`, with a plan that a rule defines");
        let api_keys = table.get("api_keys");
        let subjects = table.get("subjects");
        let networks = table.get("networks");
        let has_identity = [&api_keys, &subjects, &networks].iter().any(|item| item.as_ref().is_some_and(has_items));
        let misspelled = table.finish(report);
        if !has_identity && misspelled.is_empty() {
            let message = format!(
                "{} has no `api_keys`, `subjects` or `networks`, so no request belongs to it",
                quoted(entry.key)
            );
            let fix = "add `api_keys`, `subjects` or `networks`, or remove the client";
            report.missing(entry.key_span.clone(), message, fix);
        }
        let plan = plan.and_then(|item| item.string("\"PLAN\"", report));
        let api_keys = api_keys.map(|item| self.read_api_keys(&item, entry.key, report)).unwrap_or_default();
        let subjects = subjects.map(|item| self.read_subjects(&item, entry.key, report)).unwrap_or_default();
        let networks = networks.map(|item| self.read_networks(&item, entry.key, report)).unwrap_or_default();
        let plan = plan?;
        self.check_plan(&plan, report);
        Some(Client { name: entry.key.to_owned(), plan: plan.text.to_owned(), api_keys, subjects, networks })
    }

    fn check_plan(&self, plan: &SpannedStr, report: &mut Report) {
        if !self.plans.complete || self.plans.names.contains(&plan.text) {
            return;
        }
        let names = self.plans.names.iter().copied();
        let fix = match nearest(plan.text, names.clone()) {
            Some(guess) => format!("did you mean {}?", quoted(guess)),
            None if self.plans.names.is_empty() => {
                format!("define it: `[rules.NAME.plans.{}]`", nearest_name(plan.text))
            }
            None => format!(
                "define it: `[rules.NAME.plans.{}]`; defined are {}",
                nearest_name(plan.text),
                quoted_list(names, "and")
            ),
        };
        report.problem(plan.span.clone(), format!("plan {} is not defined by any rule", quoted(plan.text)), fix);
    }

    fn read_api_keys(&mut self, item: &Item, client: &str, report: &mut Report) -> Vec<Digest> {
        let mut digests = Vec::new();
        for word in item.strings("[\"sha256:…\"]", report).unwrap_or_default() {
            if !word.text.starts_with(Digest::PREFIX) {
                let fix = format!(
                    "replace the key: others may have read it. Remove it here, then `transom clients add {client} --generate-key`; \
                     or keep it: `transom clients add {client} --key -` reads it and stores its digest"
                );
                report.problem(word.span, "this is an API key in plain text", fix);
                continue;
            }
            let Some(digest) = read_digest(&word, report) else { continue };
            assign_owner(&mut self.owners.keys, digest, client, "key", &word, report);
            digests.push(digest);
        }
        report_without_setting(item, self.has_api_key, "api_key", "\"header:x-api-key\"", report);
        digests
    }

    fn read_subjects(&mut self, item: &Item, client: &str, report: &mut Report) -> Vec<String> {
        let mut subjects = Vec::new();
        for word in item.strings("[\"user-17\"]", report).unwrap_or_default() {
            if word.text.is_empty() {
                report.problem(word.span, "a subject is empty", "write the subject, or remove it");
                continue;
            }
            let subject = match self.subjects_are_fingerprints {
                true => match read_fingerprint(&word, report) {
                    Some(fingerprint) => fingerprint,
                    None => continue,
                },
                false => word.text.to_owned(),
            };
            assign_owner(&mut self.owners.subjects, subject.clone(), client, "subject", &word, report);
            subjects.push(subject);
        }
        report_without_setting(item, self.has_subject, "subject", "\"jwt:sub\"", report);
        subjects
    }

    fn read_networks(&mut self, item: &Item, client: &str, report: &mut Report) -> Vec<Network> {
        let mut networks = Vec::new();
        for word in item.strings("[\"203.0.113.0/24\"]", report).unwrap_or_default() {
            let Some(network) = read_network(&word, report) else { continue };
            assign_owner(&mut self.owners.networks, network, client, "network", &word, report);
            networks.push(network);
        }
        networks
    }
}

fn has_items(item: &Item) -> bool {
    !matches!(item.value, DeValue::Array(array) if array.is_empty())
}

/// Records the client that a key, subject or network belongs to. Reports one that a client already has.
fn assign_owner<K: Hash + Eq>(
    owners: &mut HashMap<K, String>,
    value: K,
    client: &str,
    kind: &str,
    word: &SpannedStr,
    report: &mut Report,
) {
    let owner = match owners.entry(value) {
        Entry::Occupied(owner) => owner,
        Entry::Vacant(entry) => {
            entry.insert(client.to_owned());
            return;
        }
    };
    let (message, fix) = match owner.get() {
        owner if owner == client => (format!("this {kind} is listed twice"), "remove it"),
        owner => (format!("this {kind} already belongs to {}", quoted(owner)), "remove it from one of the two clients"),
    };
    report.problem(word.span.clone(), message, fix);
}

/// Reports a list that has no effect because `[clients]` lacks the setting that reads its values from requests.
fn report_without_setting(item: &Item, has_setting: bool, setting: &str, example: &str, report: &mut Report) {
    if !has_setting {
        let message = format!("`{}` has no effect: `[clients]` in the configuration has no `{setting}`", item.key);
        let fix = format!("add, for example, `{setting} = {example}` there");
        report.problem(item.key_span.clone(), message, fix);
    }
}
