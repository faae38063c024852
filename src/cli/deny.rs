//! `transom deny`: adds, lists and removes the deny entries of the access file, or those of the store, for which it asks the running
//! gateway.

use std::path::{Path, PathBuf};

use clap::Subcommand;
use http::Method;
use serde_json::{Value, json};

use super::admin_client::{AskedGateway, Question, RunningGateway};
use super::{Exit, Failure, exit_of, first_line, print_table, read_current_config};
use crate::access_file::{self, Added, EditError, NewEntry, WrittenTarget};
use transom_config::Config;
use transom_config::access::{Access, AccessSource, CLIENT_PREFIX, EntryId, UNTIL_MAX_MS, end_after, rfc3339};
use transom_limiter::secret_digest::Digest;
use transom_limiter::store_key::percent_encode;
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

/// Where the entries are.
enum Place {
    /// In the file of this configuration.
    File(Box<Config>),
    /// In the store, or with `--admin` wherever this gateway has them.
    Gateway(RunningGateway),
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
    #[command(flatten)]
    gateway: AskedGateway,
}

#[derive(clap::Args)]
struct List {
    /// Print the list as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    gateway: AskedGateway,
}

#[derive(clap::Args)]
struct Remove {
    /// Ids of entries, as `transom deny list` shows them
    #[arg(value_name = "ID", required_unless_present = "ended")]
    ids: Vec<String>,
    /// Remove all entries that have ended
    #[arg(long, conflicts_with = "ids")]
    ended: bool,
    #[command(flatten)]
    gateway: AskedGateway,
}

fn parse_duration(text: &str) -> Result<u64, String> {
    duration_ms(text).filter(|ms| *ms > 0).ok_or_else(|| String::from("write a duration such as `30m`, `1h` or `7d`"))
}

pub fn deny(Arguments { action, config }: &Arguments) -> Exit {
    let gateway = match action {
        Action::Add(Add { gateway, .. })
        | Action::List(List { gateway, .. })
        | Action::Remove(Remove { gateway, .. }) => gateway,
    };
    exit_of(find_place(config, gateway).and_then(|place| match action {
        Action::Add(add) => self::add(&place, add),
        Action::List(List { json, .. }) => list(&place, *json),
        Action::Remove(remove) => self::remove(&place, remove),
    }))
}

fn find_place(path: &Path, gateway: &AskedGateway) -> Result<Place, Failure> {
    if gateway.address.given().is_none() {
        let config = read_current_config(path, None)?;
        if access_of(&config, path)?.source == AccessSource::File {
            return Ok(Place::File(Box::new(config)));
        }
    }
    gateway.find(path).map(Place::Gateway)
}

fn access_of<'c>(config: &'c Config, path: &Path) -> Result<&'c Access, Failure> {
    config.access.as_ref().ok_or_else(|| {
        let message = format!("{} has no access file", path.display());
        Failure::usage(message, "write `[access]`, then `file = \"access.toml\"`")
    })
}

fn add(place: &Place, Add { target, lasts_ms, routes, reason, .. }: &Add) -> Result<(), Failure> {
    let target = match WrittenTarget::parse(target) {
        WrittenTarget::Key { part, value } if value == "-" => {
            let value = first_line("value", VALUE_MAX_BYTES)?;
            WrittenTarget::Key { part, value }
        }
        target => target,
    };
    let until_ms = match *lasts_ms {
        Some(lasts_ms) => {
            let too_long = || {
                let message = format!("the time is too long: {} is the latest end", rfc3339(UNTIL_MAX_MS));
                Failure::usage(message, "leave `--for` out: the entry then never ends")
            };
            Some(end_after(lasts_ms, Clock::system().wall_ms()).ok_or_else(too_long)?)
        }
        None => None,
    };
    let new = NewEntry { target, routes: routes.clone(), until_ms, reason: reason.clone() };
    let config = match place {
        Place::File(config) => config,
        Place::Gateway(gateway) => {
            let new = Question { method: Method::POST, body: new.to_json(), ..Question::get("/v1/deny") };
            print_out!("{}", gateway.ask(new)?.body()["id"].as_str().unwrap_or_default());
            return Ok(());
        }
    };
    let file = file_of(config);
    let Added { entry, before, is_new_file } = access_file::add(&file, &new, config).map_err(failure)?;
    let what = if before.is_some() { "changed" } else { "denied" };
    let until = entry.until_ms.map(|until_ms| format!(" until {}", rfc3339(until_ms))).unwrap_or_default();
    print_err!("transom: {what}: {}{until}, in {}", entry.target, file.display());
    if is_new_file {
        print_err!("transom: the new file is readable by its owner only: give the gateway's user read access");
    }
    print_out!("{}", entry.id);
    Ok(())
}

fn file_of(config: &Config) -> PathBuf {
    config.access.as_ref().map(|access| access.file.clone()).unwrap_or_default()
}

/// The entries, as the admin API lists them.
fn entries(place: &Place) -> Result<Vec<Value>, Failure> {
    match place {
        Place::File(config) => {
            let (entries, now_ms) =
                (config.access.iter().flat_map(|access| access.deny.iter()), Clock::system().wall_ms());
            Ok(entries.map(|entry| entry.to_json(config, now_ms)).collect())
        }
        Place::Gateway(gateway) => gateway.pages("/v1/deny", "deny", "")?.ok_or_else(|| gateway.not_running()),
    }
}

fn list(place: &Place, is_json: bool) -> Result<(), Failure> {
    let entries = entries(place)?;
    if is_json {
        print_out!("{:#}", json!({ "deny": entries }));
        return Ok(());
    }
    let header = ["ID", "DENIED", "ROUTES", "UNTIL", "REASON"].map(str::to_owned);
    print_table(&std::iter::once(header).chain(entries.iter().map(row)).collect::<Vec<_>>());
    Ok(())
}

/// The row of an entry.
fn row(entry: &Value) -> [String; 5] {
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let denied = match (&entry["network"], &entry["client"], &entry["key"]) {
        (Value::String(network), ..) => network.clone(),
        (_, Value::String(client), _) => format!("{CLIENT_PREFIX}{client}"),
        (.., Value::Null) => String::from("-"),
        (.., key) => {
            let value = text(&key["value"]);
            let value = Digest::parse(&value).map_or(value.escape_debug().to_string(), |digest| digest.brief());
            format!("{}={value}", text(&key["part"]))
        }
    };
    let routes: Vec<&str> = entry["routes"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let routes = if routes.is_empty() { String::from("-") } else { routes.join(" ") };
    let ended = match (&entry["ended"], &entry["without_effect"]) {
        (Value::Bool(true), _) => " (ended)",
        (_, Value::String(_)) => " (without effect)",
        _ => "",
    };
    [text(&entry["id"]), denied, routes, text(&entry["until"]) + ended, text(&entry["reason"])]
}

fn remove(place: &Place, Remove { ids, ended, .. }: &Remove) -> Result<(), Failure> {
    let listed = entries(place)?;
    let id = |entry: &Value| entry["id"].as_str().map(str::to_owned);
    let unknown = |text: &String| {
        Failure::usage(format!("no deny entry has the id `{}`", text.escape_debug()), "see `transom deny list`")
    };
    let find = |text: &String| {
        // In any form of the number; the store may have entries of others under any name.
        let number: Option<EntryId> = text.parse().ok();
        let mut ids = listed.iter().filter_map(id);
        ids.find(|id| id == text || (number.is_some() && id.parse().ok() == number)).ok_or_else(|| unknown(text))
    };
    let ids: Vec<String> = match ended {
        true => listed.iter().filter(|entry| entry["ended"] == true).filter_map(id).collect(),
        false => ids.iter().map(find).collect::<Result<_, _>>()?,
    };
    match place {
        Place::File(config) => {
            let ids: Vec<EntryId> = ids.iter().filter_map(|id| id.parse().ok()).collect();
            let removed = access_file::remove(&file_of(config), &ids, config).map_err(failure)?;
            removed.iter().for_each(|entry| print_err!("transom: no longer denied: {}", entry.target));
        }
        Place::Gateway(gateway) => {
            for id in &ids {
                let mut target = String::from("/v1/deny/");
                percent_encode(id.as_bytes(), &mut target);
                let removed = gateway.ask(Question { method: Method::DELETE, ..Question::get(&target) })?;
                print_err!("transom: no longer denied: {}", row(removed.body())[1]);
            }
        }
    }
    if *ended && ids.is_empty() {
        print_err!("transom: no entry has ended");
    }
    Ok(())
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
