//! `transom clients show`: asks the running gateway about a client; if none runs, shows what the clients file has.

use std::fmt::Write as _;
use std::path::Path;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use serde_json::Value;

use super::super::admin_client::{self, RunningGateway};
use super::super::{Exit, add_copied_clients, read_config};
use super::{Failure, Show, clients_of, find_client};
use crate::explain::rule_state::seconds_text;
use crate::file_watch::FileWatch;
use transom_config::clients::ClientsSource;
use transom_limiter::secret_digest::Digest;
use transom_rules::client_plans::describe_client;

pub fn show(path: &Path, Show { name, json, token }: &Show) -> Result<(), Failure> {
    let failed = |reason: String| Failure(Exit::Failed, format!("transom: {reason}\n"));
    let mut config = read_config(path, &mut FileWatch::default())
        .map_err(|invalid| Failure(Exit::BadConfig, invalid.to_string()))?;
    add_copied_clients(&mut config);
    let clients = clients_of(&config, path)?;
    let known = match (find_client(clients, name), clients.source) {
        (Err(unknown), ClientsSource::File) => return Err(unknown),
        // The gateway may know a client that its copy lacks.
        (known, _) => known,
    };
    let token = token.read(Some(&config)).map_err(failed)?;
    let answer = match admin_client::admin_address(&config) {
        Some(address) => ask_gateway(&RunningGateway { address, token }, name).map_err(failed)?,
        None => None,
    };
    let is_live = answer.is_some();
    let client = match answer {
        Some(client) => client,
        None => describe_client(clients, known?, Digest::brief),
    };
    if *json {
        print_out!("{client:#}");
    } else {
        print_out!("{}", text(&client).trim_end());
        if !is_live {
            print_err!("transom: no gateway runs that could tell the usage");
        }
    }
    Ok(())
}

/// The client as the running gateway knows it; `None` if none listens.
fn ask_gateway(gateway: &RunningGateway, name: &str) -> Result<Option<Value>, String> {
    let failed = |reason: String| format!("the gateway at http://{} cannot show the client: {reason}", gateway.address);
    let request = Request::get(format!("/v1/clients/{name}")).body(Full::new(Bytes::new()));
    let request = request.map_err(|error| failed(error.to_string()))?;
    let body = gateway.send_and_wait(request).map_err(failed)?;
    body.map(|body| serde_json::from_str(&body).map_err(|error| failed(error.to_string()))).transpose()
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
    for rule in list(&client["rules"]) {
        let key = list(&rule["key"]).iter().map(word).collect::<Vec<_>>().join(", ");
        let note = match (rule["exempt"] == true, &rule["windows"]) {
            (true, _) => ": exempt",
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
