//! `transom clients`: adds, changes, removes, lists and shows the clients of the clients file, or those of the store, for which it
//! asks the running gateway.
//!
//! The edit keeps the operator's comments and order, and the result is checked as the gateway checks it before anything
//! is written. Keys are stored as digests only; a generated key is printed once.

mod clients_toml;
pub mod file_edit;
mod list;
mod place;
mod show;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Subcommand;
use http::{HeaderName, Method};
use serde_json::{Value, json};

use self::clients_toml::Identifiers;
use self::file_edit::EditError;
use self::place::Place;
use super::admin_client::{AskedGateway, Question};
use super::{Exit, Failure, exit_of, first_line};
use crate::admin::client_changes;
use transom_config::Config;
use transom_config::clients::Clients;
use transom_config::diagnostics::{quoted, quoted_list};
use transom_config::toml_reader::nearest;
use transom_limiter::ip_prefix::{Network, NetworkError};
use transom_limiter::secret_digest::Digest;

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
    /// Add tokens once to the current window of a client; the running gateway does it
    Grant(Grant),
    /// Show a client, and how much of its limits it has used, as the running gateway knows
    Show(Show),
}

#[derive(clap::Args)]
struct Grant {
    name: String,
    /// Rule that counts by client
    #[arg(long)]
    rule: String,
    /// Period of the window, such as `hour`
    #[arg(long, value_name = "PERIOD")]
    window: String,
    /// Tokens that the window has in addition, until it ends
    #[arg(long)]
    tokens: u32,
    /// A grant that was made before with this key is not made again; by default a new one
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    #[command(flatten)]
    gateway: AskedGateway,
}

#[derive(clap::Args)]
struct Show {
    name: String,
    /// Print the client as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    gateway: AskedGateway,
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
    #[command(flatten)]
    gateway: AskedGateway,
}

#[derive(clap::Args)]
struct List {
    /// Only clients that have each of these words in the name, plan, subjects or networks
    #[arg(long, value_name = "WORDS")]
    search: Option<String>,
    /// Only clients of this plan
    #[arg(long)]
    plan: Option<String>,
    /// Print the list as JSON, with whole digests if the clients are in a file
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    gateway: AskedGateway,
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
    #[command(flatten)]
    gateway: AskedGateway,
}

pub fn clients(arguments: &Arguments) -> Exit {
    let done = match &arguments.action {
        Action::Add(add) => self::add(&arguments.config, add),
        Action::Remove(remove) => self::remove(&arguments.config, remove),
        Action::Grant(grant) => self::grant(&arguments.config, grant),
        Action::List(list) => list::list(&arguments.config, list),
        Action::Show(show) => show::show(&arguments.config, show),
    };
    exit_of(done)
}

fn add(path: &Path, add: &Add) -> Result<(), Failure> {
    let place = Place::find(path, &add.gateway, Some(&add.name))?;
    let known = place.client(&add.name)?;
    check_plan(place.config(), add, known.is_none())?;
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
    let done = place.add(&add.name, known.as_ref(), add.plan.as_deref(), &identifiers)?;
    let what = if known.is_some() { "changed" } else { "added" };
    print_err!("transom: client {} {what}{}", quoted(&add.name), done.place("in"));
    if done.is_new_file {
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

fn grant(path: &Path, grant: &Grant) -> Result<(), Failure> {
    let key = grant.idempotency_key.clone().map_or_else(generate_key, Ok)?;
    let (target, field) =
        (format!("{}/grants", place::target(&grant.name)), HeaderName::from_static("idempotency-key"));
    let body = json!({ "rule": grant.rule, "window": grant.window, "tokens": grant.tokens });
    let question = Question { method: Method::POST, target: &target, field: Some((field, &key)), body };
    let granted = grant.gateway.find(path)?.ask(question)?;
    let is_it = |made: &&Value| made["rule"] == grant.rule && made["tokens"] == grant.tokens;
    let until = granted.body()["grants"].as_array().into_iter().flatten().rfind(is_it);
    let until = until.and_then(|made| made["until"].as_str()).unwrap_or("the window ends");
    print_err!("transom: client {} has {} more until {until}", quoted(&grant.name), grant.tokens);
    Ok(())
}

fn brief(digest: &Option<Digest>) -> String {
    digest.as_ref().map(Digest::brief).unwrap_or_default()
}

/// Without a configuration, the gateway checks the name of the plan.
fn check_plan(config: Option<&Config>, add: &Add, is_new: bool) -> Result<(), Failure> {
    let rules = || config.into_iter().flat_map(|config| config.rules.iter());
    let plans = || rules().flat_map(|rule| &rule.plans).map(|plan| plan.name.as_str());
    let mut names: Vec<&str> = plans().collect();
    names.sort_unstable();
    names.dedup();
    let known_plans = || quoted_list(names.iter().copied(), "and");
    match &add.plan {
        None if is_new => {
            let message = format!("client {} is new and needs a plan", quoted(&add.name));
            let fix = match names.is_empty() {
                true if config.is_none() => String::from("add `--plan PLAN`"),
                true => String::from("define a plan first, such as `[rules.NAME.plans.standard]` with `windows`"),
                false => format!("add `--plan PLAN`; plans: {}", known_plans()),
            };
            Err(Failure::usage(message, fix))
        }
        Some(plan) if config.is_some() && !names.contains(&plan.as_str()) => {
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
    let place = Place::find(path, &remove.gateway, None)?;
    let known = place.existing_client(&remove.name)?;
    let Identifiers { api_keys, subjects, networks } = &known.identifiers;
    let find = |what: &str, list: &[String], text: &str, is_it: &dyn Fn(&String) -> bool| {
        let message = || format!("{} is not a {what} of client {}", quoted(text), quoted(&remove.name));
        let found = list.iter().find(|known| is_it(known)).cloned();
        found.ok_or_else(|| Failure::usage(message(), "see `transom clients list`"))
    };
    let network = |text: &String| {
        let network = text.parse::<Network>().ok();
        find("network", networks, text, &|known| network.is_some() && known.parse().ok() == network)
    };
    // Of secret subjects, a gateway shows the beginnings of their digests.
    let subject = |text: &String| {
        find("subject", subjects, text, &|known| known == text || *known == Digest::of(text.as_bytes()).brief())
    };
    let key = remove.key.as_deref().map(|key| find_key(&remove.name, api_keys, key)).transpose()?;
    let identifiers = Identifiers {
        api_keys: key.into_iter().collect(),
        subjects: remove.subjects.iter().map(subject).collect::<Result<_, _>>()?,
        networks: remove.networks.iter().map(network).collect::<Result<_, _>>()?,
    };
    let done = place.remove(&remove.name, &known, &identifiers)?;
    let (what, preposition) = if identifiers.is_empty() { ("removed", "from") } else { ("changed", "in") };
    print_err!("transom: client {} {what}{}", quoted(&remove.name), done.place(preposition));
    Ok(())
}

fn unknown_client<'n>(name: &str, names: impl Iterator<Item = &'n str>) -> Failure {
    let fix = match nearest(name, names) {
        Some(guess) => format!("did you mean {}?", quoted(guess)),
        None => "see `transom clients list`".to_owned(),
    };
    Failure::usage(format!("client {} does not exist", quoted(name)), fix)
}

/// Finds a client's key, by the key or by the beginning of its digest. `digests` may be beginnings, too.
fn find_key(client: &str, digests: &[String], text: &str) -> Result<String, Failure> {
    let text = if text == "-" { read_key(text)? } else { text.to_owned() };
    let wanted = match text.starts_with(Digest::PREFIX) {
        true => text.trim_end_matches('…').to_owned(),
        false => Digest::of(text.as_bytes()).to_string(),
    };
    let is_wanted = |known: &&String| {
        let known = known.trim_end_matches('…');
        known.starts_with(&wanted) || wanted.starts_with(known)
    };
    let mut matching = digests.iter().filter(is_wanted);
    match (matching.next(), matching.next()) {
        (Some(known), None) => {
            Ok(if known.ends_with('…') && Digest::parse(&wanted).is_some() { wanted } else { known.clone() })
        }
        (None, _) => {
            let message = format!("this is not a key of client {}", quoted(client));
            Err(Failure::usage(message, "see `transom clients list` for the beginnings of its digests"))
        }
        (Some(_), Some(_)) => {
            let message = format!("several keys of client {} begin like this", quoted(client));
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
