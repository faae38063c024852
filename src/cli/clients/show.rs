//! `transom clients show`: asks the running gateway about a client; if none runs, shows what the clients file has.

use std::fmt::Write as _;
use std::path::Path;

use serde_json::Value;

use super::super::admin_client::{self, Question};
use super::super::{Exit, add_copied_clients, read_config};
use super::place::target;
use super::{Failure, Show, clients_of, unknown_client};
use crate::explain::rule_state::seconds_text;
use crate::file_watch::FileWatch;
use transom_config::client_limits::to_toml;
use transom_config::clients::{Client, ClientsSource};
use transom_limiter::secret_digest::Digest;
use transom_rules::client_plans::describe_client;

pub fn show(path: &Path, show: &Show) -> Result<(), Failure> {
    if show.gateway.address.given().is_some() {
        let gateway = show.gateway.find(path)?;
        print(show, gateway.ask(Question::get(&target(&show.name)))?.body());
        return Ok(());
    }
    let mut config = read_config(path, &mut FileWatch::default())
        .map_err(|invalid| Failure(Exit::BadConfig, invalid.to_string()))?;
    add_copied_clients(&mut config);
    let clients = clients_of(&config, path)?;
    let known = clients.list.iter().find(|client| client.name == show.name);
    let unknown = || unknown_client(&show.name, clients.list.iter().map(|client| client.name.as_str()));
    // A gateway may know a client of the store that its copy lacks.
    if known.is_none() && clients.source == ClientsSource::File {
        return Err(unknown());
    }
    if admin_client::admin_address(&config).is_some() {
        let gateway = show.gateway.find(path)?;
        if let Some(response) = gateway.respond_to(Question::get(&target(&show.name)))? {
            print(show, gateway.success(response)?.body());
            return Ok(());
        }
    }
    let described = |client: &Client| describe_client(clients, client, Digest::brief);
    print(show, &known.map(described).ok_or_else(unknown)?);
    if !show.json {
        print_err!("transom: no gateway runs that could tell the usage");
    }
    Ok(())
}

fn print(show: &Show, client: &Value) {
    if show.json {
        print_out!("{client:#}");
    } else {
        print_out!("{}", text(client).trim_end());
    }
}

/// Windows as configured, for people.
fn windows_text(windows: &Value) -> String {
    let window = |window: &Value| window.as_str().map_or_else(|| to_toml(window), str::to_owned);
    windows.as_array().into_iter().flatten().map(window).collect::<Vec<_>>().join(", ")
}

/// The client for people.
fn text(client: &Value) -> String {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let joined = |value: &Value| match list(value).iter().map(word).collect::<Vec<_>>().join(" ") {
        words if words.is_empty() => String::from("-"),
        words => words.escape_debug().to_string(),
    };
    let mut text = format!("client:   {}\nplan:     {}\n", word(&client["name"]), word(&client["plan"]));
    for key in ["keys", "subjects", "networks"] {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{:<9} {}", format!("{key}:"), joined(&client[key]));
    }
    for (rule, limits) in client["limits"].as_object().into_iter().flatten() {
        let until = limits["until"].as_str().map_or(String::new(), |until| format!(", until {until}"));
        let without = limits["without_effect"].as_str().map_or(String::new(), |why| format!(" (not in effect: {why})"));
        let _ = writeln!(text, "limits:   {} in rule `{rule}`{until}{without}", windows_text(&limits["windows"]));
    }
    for grant in list(&client["grants"]) {
        let (window, rule, until) = (word(&grant["window"]), word(&grant["rule"]), word(&grant["until"]));
        let _ = writeln!(text, "granted:  {} per {window} in rule `{rule}`, until {until}", grant["tokens"]);
    }
    for rule in list(&client["rules"]) {
        let key = list(&rule["key"]).iter().map(word).collect::<Vec<_>>().join(", ");
        let note = match (rule["exempt"] == true, &rule["windows"]) {
            (true, _) => ": exempt",
            (false, Value::Null) if rule["store"] == "unreachable" => {
                ": the store cannot be reached, the usage is not known"
            }
            (false, _) if rule["store"] == "unreachable" => {
                ": the store cannot be reached, the usage is that of this gateway"
            }
            (false, Value::Null) => ": a counter for each value of the other parts",
            (false, _) => "",
        };
        let _ = writeln!(text, "\nrule `{}`, key {key}{note}", word(&rule["rule"]));
        let windows = list(&rule["windows"]);
        let width = windows.iter().map(|window| word(&window["name"]).len()).max().unwrap_or(0);
        for window in windows {
            let resets = seconds_text(window["ttl"].as_u64().unwrap_or(0));
            let (name, count, limit, left) =
                (word(&window["name"]), &window["count"], &window["limit"], &window["remaining"]);
            let _ = writeln!(text, "  {name:<width$}  {count} of {limit} used, {left} left, ends in {resets}");
        }
        for slots in list(&rule["concurrent"]) {
            let _ = writeln!(text, "  {}  {} of {} in flight", word(&slots["name"]), slots["count"], slots["limit"]);
        }
    }
    let refused = list(&client["refused"]);
    if !refused.is_empty() {
        text.push('\n');
    }
    for refusals in refused {
        let (count, rule, since) = (&refusals["count"], word(&refusals["rule"]), word(&refusals["since"]));
        let refused = if refusals["shadow"] == true { "would have been refused by shadow" } else { "refused by" };
        let _ = writeln!(text, "{refused} rule `{rule}` since {since}: {count}");
    }
    text
}
