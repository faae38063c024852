//! `transom clients`: adds, changes, removes, lists and shows the clients of the clients file.
//!
//! The edit keeps the operator's comments and order, and the result is checked as the gateway checks it before anything
//! is written. Keys are stored as digests only; a generated key is printed once.

mod clients_toml;
pub mod file_edit;
mod show;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Subcommand;
use serde_json::{Value, json};

use self::clients_toml::{ClientsDocument, Identifiers};
use self::file_edit::{EditError, FileEdit};
use super::admin_client::TokenFile;
use super::{
    Exit, Failure, add_copied_clients, exit_of, first_line, print_table, read_config, read_current_config, resolve_path,
};
use crate::admin::client_changes;
use crate::file_watch::FileWatch;
use transom_config::Config;
use transom_config::clients::{Client, Clients, ClientsSource};
use transom_config::diagnostics::{quoted, quoted_list};
use transom_config::toml_reader::nearest;
use transom_limiter::ip_prefix::{Network, NetworkError};
use transom_limiter::secret_digest::Digest;
use transom_rules::client_plans::describe_client;

/// Shorter keys may be guessed; a digest does not protect them.
const SHORT_CHARS: usize = 16;
const KEY_MAX_BYTES: u64 = 4096;

/// Arguments of `transom clients`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
    /// Configuration file
    #[arg(short, long, global = true, value_name = "FILE", default_value = "gateway.toml")]
    config: PathBuf,
}

#[derive(Subcommand)]
enum Action {
    /// Add a client, or add keys, subjects and networks to one, or change its plan
    ///
    /// The API key of a new client is read from standard input, unless other identifiers are given.
    Add(Add),
    /// Remove a client, or only some of its keys, subjects and networks
    Remove(Remove),
    /// List the clients; keys are shown as the beginning of their digests
    List(List),
    /// Show a client, and how much of its limits it has used, as the running gateway knows
    Show(Show),
}

#[derive(clap::Args)]
struct Show {
    name: String,
    /// Print the client as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    token: TokenFile,
}

#[derive(clap::Args)]
struct Add {
    name: String,
    /// A plan that some rule defines
    #[arg(long)]
    plan: Option<String>,
    /// API key; `-` reads it from standard input; or its digest, `sha256:…`. Only the digest is stored
    #[arg(long, conflicts_with = "generate_key")]
    key: Option<String>,
    /// Generate an API key and print it once
    #[arg(long)]
    generate_key: bool,
    /// Network whose requests are the client's
    #[arg(long = "network", value_name = "CIDR")]
    networks: Vec<String>,
    /// JWT subject or similar whose requests are the client's
    #[arg(long = "subject")]
    subjects: Vec<String>,
}

#[derive(clap::Args)]
struct List {
    /// Print the list as JSON, with whole digests
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct Remove {
    name: String,
    /// Remove only this key; `-` reads it from standard input; or the beginning of its digest, `sha256:…`
    #[arg(long)]
    key: Option<String>,
    /// Remove only this network
    #[arg(long = "network", value_name = "CIDR")]
    networks: Vec<String>,
    /// Remove only this subject
    #[arg(long = "subject")]
    subjects: Vec<String>,
}

pub fn clients(arguments: &Arguments) -> Exit {
    let done = match &arguments.action {
        Action::Add(add) => self::add(&arguments.config, add),
        Action::Remove(remove) => self::remove(&arguments.config, remove),
        Action::List(List { json }) => list(&arguments.config, *json),
        Action::Show(show) => show::show(&arguments.config, show),
    };
    exit_of(done)
}

fn list(path: &Path, is_json: bool) -> Result<(), Failure> {
    let mut config = read_config(path, &mut FileWatch::default())
        .map_err(|invalid| Failure(Exit::BadConfig, invalid.to_string()))?;
    add_copied_clients(&mut config);
    if is_json {
        let clients = clients_of(&config, path)?;
        let client = |client: &Client| describe_client(clients, client, Digest::to_string);
        let clients: Vec<Value> = clients.list.iter().map(client).collect();
        print_out!("{:#}", json!({ "clients": clients }));
        return Ok(());
    }
    let header = ["NAME", "PLAN", "KEYS", "SUBJECTS", "NETWORKS"].map(str::to_owned);
    let row = |client: &Client| {
        let joined = |items: Vec<String>| if items.is_empty() { "-".to_owned() } else { items.join(" ") };
        [
            client.name.clone(),
            client.plan.clone(),
            joined(client.api_keys.iter().map(Digest::brief).collect()),
            joined(client.subjects.iter().map(|subject| subject.escape_debug().to_string()).collect()),
            joined(client.networks.iter().map(ToString::to_string).collect()),
        ]
    };
    let rows: Vec<[String; 5]> =
        std::iter::once(header).chain(clients_of(&config, path)?.list.iter().map(row)).collect();
    print_table(&rows);
    Ok(())
}

fn add(path: &Path, add: &Add) -> Result<(), Failure> {
    let config = read_current_config(path)?;
    let clients = clients_to_edit(&config, path)?;
    let known = clients.list.iter().find(|client| client.name == add.name);
    check_plan(&config, add, known)?;
    add.networks.iter().try_for_each(|text| check_network(text))?;
    let has_identifiers = !add.networks.is_empty() || !add.subjects.is_empty();
    let key = match &add.key {
        _ if add.generate_key => Some(generate_key()?),
        Some(key) => Some(read_key(key)?),
        None if has_identifiers => None,
        None if known.is_some() && add.plan.is_some() => None,
        None => Some(read_key("-")?),
    };
    let digest = key.as_deref().map(|key| Digest::parse(key).unwrap_or_else(|| Digest::of(key.as_bytes())));
    let identifiers = Identifiers {
        api_keys: digest.iter().map(Digest::to_string).collect(),
        subjects: add.subjects.clone(),
        networks: add.networks.clone(),
    };
    let is_new = edit(path, clients, |document| document.add(&add.name, add.plan.as_deref(), &identifiers))?;
    let what = if known.is_some() { "changed" } else { "added" };
    print_err!("transom: client {} {what} in {}", quoted(&add.name), resolve_path(path, &clients.file).display());
    if is_new {
        print_err!("transom: the new file is readable by its owner only: give the gateway's user read access");
    }
    match key {
        Some(key) if add.generate_key => {
            print_err!("transom: the key, shown only once:");
            let has_identifiers = writeln!(io::stdout(), "{key}");
            has_identifiers.map_err(|error| {
                let fix = format!("remove it: `transom clients remove {} --key {}`", add.name, brief(&digest));
                Failure(Exit::Failed, format!("transom: the key could not be printed: {error}\n  fix: {fix}\n"))
            })?;
        }
        Some(key) if Digest::parse(&key).is_none() && key.chars().count() < SHORT_CHARS => {
            print_err!("transom: the key is so short that it can be guessed: use `--generate-key`");
        }
        Some(_) | None => {}
    }
    Ok(())
}

fn brief(digest: &Option<Digest>) -> String {
    digest.as_ref().map(Digest::brief).unwrap_or_default()
}

fn check_plan(config: &Config, add: &Add, known: Option<&Client>) -> Result<(), Failure> {
    let plans = || config.rules.iter().flat_map(|rule| &rule.plans).map(|plan| plan.name.as_str());
    let mut names: Vec<&str> = plans().collect();
    names.sort_unstable();
    names.dedup();
    let known_plans = || quoted_list(names.iter().copied(), "and");
    match &add.plan {
        None if known.is_none() => {
            let message = format!("client {} is new and needs a plan", quoted(&add.name));
            let fix = match names.is_empty() {
                true => String::from("define a plan first, such as `[rules.NAME.plans.standard]` with `windows`"),
                false => format!("add `--plan PLAN`; plans: {}", known_plans()),
            };
            Err(Failure::usage(message, fix))
        }
        Some(plan) if !names.contains(&plan.as_str()) => {
            let fix = match nearest(plan, plans()) {
                Some(guess) => format!("did you mean {}?", quoted(guess)),
                None => format!("define it in a rule: `[rules.NAME.plans.{plan}]`; plans: {}", known_plans()),
            };
            Err(Failure::usage(format!("plan {} is not defined by any rule", quoted(plan)), fix))
        }
        Some(_) | None => Ok(()),
    }
}

fn check_network(text: &str) -> Result<(), Failure> {
    match text.parse::<Network>() {
        Ok(_) => Ok(()),
        Err(NetworkError::Syntax) => {
            Err(Failure::usage(format!("{} is not a network", quoted(text)), "write it as `203.0.113.0/24`"))
        }
        Err(NetworkError::HostBits(network)) => {
            let message = format!("{} has bits set after its first `{}`", quoted(text), network.prefix);
            Err(Failure::usage(message, format!("write `{network}`")))
        }
    }
}

fn remove(path: &Path, remove: &Remove) -> Result<(), Failure> {
    let config = read_current_config(path)?;
    let clients = clients_to_edit(&config, path)?;
    let client = find_client(clients, &remove.name)?;
    let key = remove.key.as_deref().map(|key| find_key(client, key)).transpose()?;
    let networks = remove.networks.iter().map(|text| {
        let network = client.networks.iter().find(|known| text.parse().ok() == Some(**known));
        network.map(ToString::to_string).ok_or_else(|| not_found(client, "network", text))
    });
    let subjects = remove.subjects.iter().map(|text| match client.subjects.contains(text) {
        true => Ok(text.clone()),
        false => Err(not_found(client, "subject", text)),
    });
    let identifiers = Identifiers {
        api_keys: key.iter().map(Digest::to_string).collect(),
        subjects: subjects.collect::<Result<_, _>>()?,
        networks: networks.collect::<Result<_, _>>()?,
    };
    if identifiers.is_empty() {
        edit(path, clients, |document| document.remove(&remove.name))?;
        print_err!(
            "transom: client {} removed from {}",
            quoted(&remove.name),
            resolve_path(path, &clients.file).display()
        );
    } else {
        edit(path, clients, |document| document.remove_identifiers(&remove.name, &identifiers))?;
        print_err!(
            "transom: client {} changed in {}",
            quoted(&remove.name),
            resolve_path(path, &clients.file).display()
        );
    }
    Ok(())
}

fn find_client<'c>(clients: &'c Clients, name: &str) -> Result<&'c Client, Failure> {
    clients.list.iter().find(|client| client.name == name).ok_or_else(|| {
        let names = clients.list.iter().map(|client| client.name.as_str());
        let fix = match nearest(name, names) {
            Some(guess) => format!("did you mean {}?", quoted(guess)),
            None => "see `transom clients list`".to_owned(),
        };
        Failure::usage(format!("client {} does not exist", quoted(name)), fix)
    })
}

fn not_found(client: &Client, what: &str, text: &str) -> Failure {
    let message = format!("{} is not a {what} of client {}", quoted(text), quoted(&client.name));
    Failure::usage(message, "see `transom clients list`")
}

/// Finds a client's key, by the key or by the beginning of its digest.
fn find_key(client: &Client, text: &str) -> Result<Digest, Failure> {
    let text = if text == "-" { read_key(text)? } else { text.to_owned() };
    let matches_text = |digest: &&Digest| match text.starts_with(Digest::PREFIX) {
        true => digest.to_string().starts_with(text.trim_end_matches('…')),
        false => **digest == Digest::of(text.as_bytes()),
    };
    let mut matching = client.api_keys.iter().filter(matches_text);
    match (matching.next(), matching.next()) {
        (Some(digest), None) => Ok(*digest),
        (None, _) => {
            let message = format!("this is not a key of client {}", quoted(&client.name));
            Err(Failure::usage(message, "see `transom clients list` for the beginnings of its digests"))
        }
        (Some(_), Some(_)) => {
            let message = format!("several keys of client {} begin like this", quoted(&client.name));
            Err(Failure::usage(message, "write more of the digest"))
        }
    }
}

/// Reads and checks an API key or a digest; `-`: the first line of standard input.
fn read_key(text: &str) -> Result<String, Failure> {
    let key = if text == "-" { first_line("API key", KEY_MAX_BYTES)? } else { text.to_owned() };
    if key.is_empty() {
        return Err(Failure::usage(
            "the API key is missing",
            "write it to standard input, or add `--generate-key`, `--network CIDR` or `--subject SUBJECT`",
        ));
    }
    if key.trim() != key || key.chars().any(char::is_control) || key.len() as u64 > KEY_MAX_BYTES {
        let message = "the API key is invalid: it has blanks around it, is too long, or has control characters";
        return Err(Failure::usage(message, "write the key alone"));
    }
    if key.starts_with(Digest::PREFIX) && Digest::parse(&key).is_none() {
        let fix = "write 64 hex digits after `sha256:`, or the key itself";
        return Err(Failure::usage("the digest is incomplete", fix));
    }
    Ok(key)
}

fn generate_key() -> Result<String, Failure> {
    let failure = |error| Failure(Exit::Failed, format!("transom: the system provides no random numbers: {error}\n"));
    client_changes::generate_key().map_err(failure)
}

fn clients_of<'c>(config: &'c Config, path: &Path) -> Result<&'c Clients, Failure> {
    config.clients.as_ref().ok_or_else(|| {
        let message = format!("{} has no clients file", path.display());
        Failure::usage(message, "write `[clients]`, then `file = \"clients.toml\"`")
    })
}

/// The clients, which are in a file.
fn clients_to_edit<'c>(config: &'c Config, path: &Path) -> Result<&'c Clients, Failure> {
    let clients = clients_of(config, path)?;
    match clients.source {
        ClientsSource::File => Ok(clients),
        ClientsSource::Shared => {
            let fix = "change them through the admin address of a gateway";
            Err(Failure::usage("the clients are in the store, and not in a file", fix))
        }
    }
}

/// Edits the clients file; returns whether it is new.
fn edit(path: &Path, clients: &Clients, change: impl FnOnce(&mut ClientsDocument)) -> Result<bool, Failure> {
    let mut edit = FileEdit::begin(path, clients)?;
    change(&mut edit.document);
    edit.check()?;
    let is_new = edit.is_new;
    edit.publish()?;
    Ok(is_new)
}

impl From<EditError> for Failure {
    fn from(error: EditError) -> Failure {
        match error {
            EditError::Busy(draft) => {
                let message = format!("transom: {} is there: another process edits the clients", draft.display());
                let fix = "try again; if there is no other process, remove it";
                Failure(Exit::Failed, format!("{message}\n  fix: {fix}\n"))
            }
            EditError::Io(file, error) => Failure::io(&file, &error),
            EditError::Syntax(file, error) => {
                Failure::usage(format!("{} cannot be edited: {error}", file.display()), "see `transom check`")
            }
            EditError::Invalid(invalid) => {
                let message = "transom: nothing was written; the result would be invalid:";
                Failure(Exit::BadConfig, format!("{message}\n{invalid}"))
            }
        }
    }
}
