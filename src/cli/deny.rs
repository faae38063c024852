//! `transom deny`: adds, lists and removes the deny entries of the access file.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use serde_json::{Value, json};

use super::{Exit, Failure, exit_of, first_line, print_table, read_config, read_current_config};
use crate::access_file::{self, Added, EditError, NewEntry, WrittenTarget};
use crate::file_watch::FileWatch;
use transom_config::Config;
use transom_config::access::{Access, DenyEntry, EntryId, rfc3339};
use transom_limiter::window::duration_ms;
use transom_runtime::clock::Clock;

const VALUE_MAX_BYTES: u64 = 4096;

/// Arguments of `transom deny`.
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
    /// Deny a network, a client or the value of a key part: its requests get 403
    ///
    /// Prints the id of the entry. An entry for the same, on the same routes, gets the new end and reason.
    Add(Add),
    /// List the deny entries
    List(List),
    /// Remove entries by their ids
    Remove(Remove),
}

#[derive(clap::Args)]
struct Add {
    /// Network or address; `client:NAME`; or the value of a key part, such as `header:x-device=VALUE`. Of secrets, only the digest
    /// is stored; the value `-` is read from standard input
    #[arg(value_name = "NETWORK|client:NAME|PART=VALUE")]
    target: String,
    /// How long the entry lasts, such as `30m`, `1h` or `7d`; without it: until it is removed
    #[arg(long = "for", value_name = "DURATION", value_parser = parse_duration)]
    lasts_ms: Option<u64>,
    /// Name of a route that is denied; without it: all
    #[arg(long = "route", value_name = "NAME")]
    routes: Vec<String>,
    /// For operators, in logs and lists. Callers do not see it
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

#[derive(clap::Args)]
struct List {
    /// Print the list as JSON
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct Remove {
    /// Ids of entries, as `transom deny list` shows them
    #[arg(value_name = "ID", required_unless_present = "ended")]
    ids: Vec<String>,
    /// Remove all entries that have ended
    #[arg(long, conflicts_with = "ids")]
    ended: bool,
}

fn parse_duration(text: &str) -> Result<u64, String> {
    duration_ms(text).filter(|ms| *ms > 0).ok_or_else(|| String::from("write a duration such as `30m`, `1h` or `7d`"))
}

pub fn deny(arguments: &Arguments) -> Exit {
    exit_of(match &arguments.action {
        Action::Add(add) => self::add(&arguments.config, add),
        Action::List(List { json }) => list(&arguments.config, *json),
        Action::Remove(remove) => self::remove(&arguments.config, remove),
    })
}

fn access_of<'c>(config: &'c Config, path: &Path) -> Result<&'c Access, Failure> {
    config.access.as_ref().ok_or_else(|| {
        let message = format!("{} has no access file", path.display());
        Failure::usage(message, "write `[access]`, then `file = \"access.toml\"`")
    })
}

fn add(path: &Path, Add { target, lasts_ms, routes, reason }: &Add) -> Result<(), Failure> {
    let config = read_current_config(path)?;
    let access = access_of(&config, path)?;
    let target = match WrittenTarget::parse(target) {
        WrittenTarget::Key { part, value } if value == "-" => {
            let value = first_line("value", VALUE_MAX_BYTES)?;
            WrittenTarget::Key { part, value }
        }
        target => target,
    };
    let until_ms = lasts_ms.map(|lasts_ms| Clock::system().wall_ms().saturating_add(lasts_ms).next_multiple_of(1000));
    let new = NewEntry { target, routes: routes.clone(), until_ms, reason: reason.clone() };
    let Added { entry, before, is_new_file } = access_file::add(&access.file, &new, &config).map_err(failure)?;
    let what = if before.is_some() { "changed" } else { "denied" };
    let until = entry.until_ms.map(|until_ms| format!(" until {}", rfc3339(until_ms))).unwrap_or_default();
    print_err!("transom: {what}: {}{until}, in {}", entry.target, access.file.display());
    if is_new_file {
        print_err!("transom: the new file is readable by its owner only: give the gateway's user read access");
    }
    print_out!("{}", entry.id);
    Ok(())
}

fn list(path: &Path, is_json: bool) -> Result<(), Failure> {
    let config = read_config(path, &mut FileWatch::default())
        .map_err(|invalid| Failure(Exit::BadConfig, invalid.to_string()))?;
    let (access, now_ms) = (access_of(&config, path)?, Clock::system().wall_ms());
    if is_json {
        let entries: Vec<Value> = access.deny.iter().map(|entry| entry.to_json(&config, now_ms)).collect();
        print_out!("{:#}", json!({ "deny": entries }));
        return Ok(());
    }
    let header = ["ID", "DENIED", "ROUTES", "UNTIL", "REASON"].map(str::to_owned);
    let row = |entry: &DenyEntry| {
        let routes = match entry.route_names(&config).join(" ") {
            all if all.is_empty() => String::from("-"),
            routes => routes,
        };
        let until = match entry.until_ms {
            None => String::from("-"),
            Some(until_ms) if entry.has_ended(now_ms) => format!("{} (ended)", rfc3339(until_ms)),
            Some(until_ms) => rfc3339(until_ms),
        };
        let reason = entry.reason.clone().unwrap_or_else(|| String::from("-"));
        [entry.id.to_string(), entry.target.to_string(), routes, until, reason]
    };
    print_table(&std::iter::once(header).chain(access.deny.iter().map(row)).collect::<Vec<_>>());
    Ok(())
}

fn remove(path: &Path, Remove { ids, ended }: &Remove) -> Result<(), Failure> {
    let config = read_current_config(path)?;
    let access = access_of(&config, path)?;
    let now_ms = Clock::system().wall_ms();
    let ids: Vec<EntryId> = match ended {
        true => access.deny.iter().filter(|entry| entry.has_ended(now_ms)).map(|entry| entry.id).collect(),
        false => ids.iter().map(|text| find(access, text)).collect::<Result<_, _>>()?,
    };
    let removed = access_file::remove(&access.file, &ids, &config).map_err(failure)?;
    for entry in &removed {
        print_err!("transom: no longer denied: {}", entry.target);
    }
    if *ended && removed.is_empty() {
        print_err!("transom: no entry has ended");
    }
    Ok(())
}

fn find(access: &Access, text: &str) -> Result<EntryId, Failure> {
    let id = text.parse().ok().filter(|id| access.deny.iter().any(|entry| entry.id == *id));
    id.ok_or_else(|| {
        Failure::usage(format!("no deny entry has the id `{}`", text.escape_debug()), "see `transom deny list`")
    })
}

fn failure(error: EditError) -> Failure {
    match error {
        EditError::Invalid(problems) => {
            let texts = problems.into_iter().map(|(message, fix)| format!("transom: {message}\n  fix: {fix}\n"));
            Failure(Exit::BadConfig, texts.collect())
        }
        EditError::BadFile(_) => Failure::usage(error, "see `transom check`"),
        EditError::Busy(_) => {
            let fix = "try again; if there is no other process, remove it";
            Failure(Exit::Failed, format!("transom: {error}\n  fix: {fix}\n"))
        }
        EditError::Io(_) => Failure(Exit::Failed, format!("transom: {error}\n")),
    }
}
