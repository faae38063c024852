//! `transom clients`: adds, changes, removes and lists those who are known by name.
//!
//! The file is the operator's: what is edited is its text, comments and order stay, and what would come
//! out is checked as the gateway checks it before anything is written. A key in clear is written
//! nowhere; one that is made here is shown once.

mod clients_toml;

use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};

use clap::Subcommand;

use self::clients_toml::{Belongings, ClientsDocument};
use super::{Exit, located, read, read_by, read_file};
use crate::atomic_file::Draft;
use crate::config::Config;
use crate::config::clients::{Client, Clients};
use crate::config::diagnostics::{listed, shown};
use crate::config::toml_reader::nearest;
use crate::file_watch::Watch;
use transom_limiter::ip_prefix::{Network, NetworkError};
use transom_limiter::secret_digest::Digest;

/// A key of fewer characters is likely to be guessed, and then its digest protects nothing.
const SHORT_CHARS: usize = 16;
const KEY_MAX_BYTES: u64 = 4096;
/// 192 bits.
const GENERATED_BYTES: usize = 24;

/// What `transom clients` is told.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    order: Order,
    /// The configuration
    #[arg(long, global = true, value_name = "FILE", default_value = "gateway.toml")]
    config: PathBuf,
}

#[derive(Subcommand)]
enum Order {
    /// Add a client; or give one another plan, or a key, a subject, a network more
    ///
    /// The API key of a new client is read from standard input, unless it is told what else it is known by.
    Add(Add),
    /// Remove a client, or only some of its keys, subjects and networks
    Remove(Remove),
    /// List the clients; of keys, only the beginning of their digests
    List,
}

#[derive(clap::Args)]
struct Add {
    name: String,
    /// A plan that some rule defines
    #[arg(long)]
    plan: Option<String>,
    /// Its API key, `-` to read it from standard input, or its digest, `sha256:…`; only the digest is stored
    #[arg(long, conflicts_with = "generate_key")]
    key: Option<String>,
    /// Make an API key, and print it, once
    #[arg(long)]
    generate_key: bool,
    /// Requests from this network are the client's
    #[arg(long = "network", value_name = "CIDR")]
    networks: Vec<String>,
    /// Requests on behalf of this subject are the client's
    #[arg(long = "subject")]
    subjects: Vec<String>,
}

#[derive(clap::Args)]
struct Remove {
    name: String,
    /// Only this key: itself, `-` to read it from standard input, or how its digest begins, `sha256:…`
    #[arg(long)]
    key: Option<String>,
    /// Only this network
    #[arg(long = "network", value_name = "CIDR")]
    networks: Vec<String>,
    /// Only this subject
    #[arg(long = "subject")]
    subjects: Vec<String>,
}

/// Why an order could not be carried out: how the command ends, and what the operator is told.
struct Failure(Exit, String);

impl Failure {
    fn usage(message: impl std::fmt::Display, fix: impl std::fmt::Display) -> Failure {
        Failure(Exit::BadConfig, format!("transom: {message}\n  fix: {fix}\n"))
    }

    fn io(path: &Path, error: &io::Error) -> Failure {
        Failure(Exit::Failed, format!("transom: can not write {}: {error}\n", path.display()))
    }
}

pub fn clients(arguments: &Arguments) -> Exit {
    let done = match &arguments.order {
        Order::Add(add) => self::add(&arguments.config, add),
        Order::Remove(remove) => self::remove(&arguments.config, remove),
        Order::List => list(&arguments.config),
    };
    match done {
        Ok(()) => Exit::Fine,
        Err(Failure(exit, text)) => {
            tell!("{}", text.trim_end());
            exit
        }
    }
}

fn list(path: &Path) -> Result<(), Failure> {
    let config = read(path, &mut Watch::default()).map_err(|problems| Failure(Exit::BadConfig, problems))?;
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
    let rows: Vec<[String; 5]> = std::iter::once(header).chain(known(&config, path)?.list.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths = [0, 1, 2, 3, 4].map(width);
    for row in &rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        show!("{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
    Ok(())
}

fn add(path: &Path, add: &Add) -> Result<(), Failure> {
    let config = current(path)?;
    let clients = known(&config, path)?;
    let known = clients.list.iter().find(|client| client.name == add.name);
    check_plan(&config, add, known)?;
    add.networks.iter().try_for_each(|text| check_network(text))?;
    let told = !add.networks.is_empty() || !add.subjects.is_empty();
    let key = match &add.key {
        _ if add.generate_key => Some(generated()?),
        Some(key) => Some(given(key)?),
        None if told => None,
        None if known.is_some() && add.plan.is_some() => None,
        None => Some(given("-")?),
    };
    let digest = key.as_deref().map(|key| Digest::parse(key).unwrap_or_else(|| Digest::of(key.as_bytes())));
    let belongings = Belongings {
        api_keys: digest.iter().map(Digest::to_string).collect(),
        subjects: add.subjects.clone(),
        networks: add.networks.clone(),
    };
    let is_new = edit(path, clients, |pages| pages.add(&add.name, add.plan.as_deref(), &belongings))?;
    let what = if known.is_some() { "changed" } else { "added" };
    tell!("transom: client {} {what} in {}", shown(&add.name), located(path, &clients.file).display());
    if is_new {
        tell!("transom: only its owner can read the new file: let the gateway's user read it as well");
    }
    match key {
        Some(key) if add.generate_key => {
            tell!("transom: this is its key; it is not stored, and shown only now:");
            let told = writeln!(io::stdout(), "{key}");
            told.map_err(|error| {
                let fix = format!("take it away: `transom clients remove {} --key {}`", add.name, brief(&digest));
                Failure(Exit::Failed, format!("transom: the key could not be printed: {error}\n  fix: {fix}\n"))
            })?;
        }
        Some(key) if Digest::parse(&key).is_none() && key.chars().count() < SHORT_CHARS => {
            tell!("transom: the key is so short that it can be guessed: `--generate-key` makes a better one");
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
    let there_is = || listed(names.iter().copied(), "and");
    match &add.plan {
        None if known.is_none() => {
            let message = format!("client {} is not known yet, so it needs a plan", shown(&add.name));
            Err(Failure::usage(message, format!("add `--plan PLAN`; there is {}", there_is())))
        }
        Some(plan) if !names.contains(&plan.as_str()) => {
            let fix = match nearest(plan, plans()) {
                Some(guess) => format!("did you mean {}?", shown(guess)),
                None => format!("define it in a rule: `[rules.NAME.plans.{plan}]`; there is {}", there_is()),
            };
            Err(Failure::usage(format!("plan {} is not defined by any rule", shown(plan)), fix))
        }
        Some(_) | None => Ok(()),
    }
}

fn check_network(text: &str) -> Result<(), Failure> {
    match text.parse::<Network>() {
        Ok(_) => Ok(()),
        Err(NetworkError::Syntax) => {
            Err(Failure::usage(format!("{} is no network", shown(text)), "write such as `203.0.113.0/24`"))
        }
        Err(NetworkError::HostBits(network)) => {
            let message = format!("{} goes on behind its first `{}` bits", shown(text), network.prefix);
            Err(Failure::usage(message, format!("write `{network}`")))
        }
    }
}

fn remove(path: &Path, remove: &Remove) -> Result<(), Failure> {
    let config = current(path)?;
    let clients = known(&config, path)?;
    let Some(client) = clients.list.iter().find(|client| client.name == remove.name) else {
        let names = clients.list.iter().map(|client| client.name.as_str());
        let fix = match nearest(&remove.name, names) {
            Some(guess) => format!("did you mean {}?", shown(guess)),
            None => "`transom clients list` shows who is known".to_owned(),
        };
        return Err(Failure::usage(format!("there is no client {}", shown(&remove.name)), fix));
    };
    let key = remove.key.as_deref().map(|key| its_key(client, key)).transpose()?;
    let networks = remove.networks.iter().map(|text| {
        let network = client.networks.iter().find(|known| text.parse().ok() == Some(**known));
        network.map(ToString::to_string).ok_or_else(|| not_its(client, "network", text))
    });
    let subjects = remove.subjects.iter().map(|text| match client.subjects.contains(text) {
        true => Ok(text.clone()),
        false => Err(not_its(client, "subject", text)),
    });
    let belongings = Belongings {
        api_keys: key.iter().map(Digest::to_string).collect(),
        subjects: subjects.collect::<Result<_, _>>()?,
        networks: networks.collect::<Result<_, _>>()?,
    };
    if belongings.is_empty() {
        edit(path, clients, |pages| pages.remove(&remove.name))?;
        tell!("transom: client {} removed from {}", shown(&remove.name), located(path, &clients.file).display());
    } else {
        edit(path, clients, |pages| pages.take_away(&remove.name, &belongings))?;
        tell!("transom: client {} changed in {}", shown(&remove.name), located(path, &clients.file).display());
    }
    Ok(())
}

fn not_its(client: &Client, what: &str, text: &str) -> Failure {
    let message = format!("{} is no {what} of client {}", shown(text), shown(&client.name));
    Failure::usage(message, "`transom clients list` shows what is")
}

/// The one key of a client that is meant, by itself or by the beginning of its digest.
fn its_key(client: &Client, text: &str) -> Result<Digest, Failure> {
    let text = if text == "-" { given(text)? } else { text.to_owned() };
    let is_meant = |digest: &&Digest| match text.starts_with(Digest::PREFIX) {
        true => digest.to_string().starts_with(text.trim_end_matches('…')),
        false => **digest == Digest::of(text.as_bytes()),
    };
    let mut meant = client.api_keys.iter().filter(is_meant);
    match (meant.next(), meant.next()) {
        (Some(digest), None) => Ok(*digest),
        (None, _) => {
            let message = format!("this is no key of client {}", shown(&client.name));
            Err(Failure::usage(message, "`transom clients list` shows how the digests of its keys begin"))
        }
        (Some(_), Some(_)) => {
            let message = format!("several keys of client {} begin so", shown(&client.name));
            Err(Failure::usage(message, "give more of the digest"))
        }
    }
}

/// An API key or a digest as it was given; `-`: the first line of standard input.
fn given(text: &str) -> Result<String, Failure> {
    let key = if text == "-" { first_line()? } else { text.to_owned() };
    if key.is_empty() {
        return Err(Failure::usage(
            "there is no API key",
            "give it on standard input, or add `--generate-key`, `--network CIDR` or `--subject SUBJECT`",
        ));
    }
    if key.trim() != key || key.chars().any(char::is_control) || key.len() as u64 > KEY_MAX_BYTES {
        let message =
            "no request can have this API key: it has blanks around it, is too long, or has control characters";
        return Err(Failure::usage(message, "give the key alone"));
    }
    if key.starts_with(Digest::PREFIX) && Digest::parse(&key).is_none() {
        let fix = "give 64 hex digits behind `sha256:`, or the key itself";
        return Err(Failure::usage("this is no whole digest", fix));
    }
    Ok(key)
}

fn first_line() -> Result<String, Failure> {
    let stdin = io::stdin().lock();
    if stdin.is_terminal() {
        eprint!("API key: ");
    }
    let mut line = String::new();
    let read = io::Read::take(stdin, KEY_MAX_BYTES + 2).read_line(&mut line);
    read.map_err(|error| Failure::usage(format!("can not read the API key: {error}"), "give it as a line of text"))?;
    Ok(line.trim_end_matches(['\r', '\n']).to_owned())
}

fn generated() -> Result<String, Failure> {
    let mut bytes = [0; GENERATED_BYTES];
    let failure = |error| Failure(Exit::Failed, format!("transom: the system gives no random numbers: {error}\n"));
    getrandom::fill(&mut bytes).map_err(failure)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// The configuration as it is; a clients file that is not there yet has no clients.
fn current(path: &Path) -> Result<Config, Failure> {
    let read = read_by(path, &|file| match read_file(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && file != path => Ok(Vec::new()),
        read => read,
    });
    read.map_err(|problems| Failure(Exit::BadConfig, problems))
}

fn known<'c>(config: &'c Config, path: &Path) -> Result<&'c Clients, Failure> {
    config.clients.as_ref().ok_or_else(|| {
        let message = format!("{} names no clients file", path.display());
        Failure::usage(message, "write `[clients]`, then `file = \"clients.toml\"`")
    })
}

/// Edits the clients file; returns whether it is new.
fn edit(path: &Path, clients: &Clients, change: impl FnOnce(&mut ClientsDocument)) -> Result<bool, Failure> {
    let file = located(path, &clients.file);
    let draft = Draft::begin(&file).map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            let draft = Draft::path_of(&file);
            let message = format!("transom: {} is there: somebody else edits the clients", draft.display());
            Failure(Exit::Failed, format!("{message}\n  fix: try again; if nobody does, remove it\n"))
        }
        _ => Failure::io(&file, &error),
    })?;
    let before = draft.current_text().map_err(|error| Failure::io(&file, &error))?;
    let mut pages = ClientsDocument::read(before.as_deref().unwrap_or_default()).map_err(|error| {
        Failure::usage(format!("{} can not be edited: {error}", file.display()), "`transom check` says more")
    })?;
    change(&mut pages);
    let after = pages.to_string();
    let checked = read_by(path, &|other| if other == file { Ok(after.clone().into_bytes()) } else { read_file(other) });
    checked.map_err(|problems| {
        let message = "transom: nothing was written; the file would be wrong then:";
        Failure(Exit::BadConfig, format!("{message}\n{problems}"))
    })?;
    draft.publish(&after).map_err(|error| Failure::io(&file, &error))?;
    Ok(before.is_none())
}
