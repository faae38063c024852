//! `transom clients list`: the clients of the clients file; those of the store, as the running gateway lists them page by page, or as
//! the copy has them if none runs.

use std::path::Path;

use serde_json::{Value, json};

use super::super::admin_client::{RunningGateway, encoded};
use super::super::{Exit, Failure, add_copied_clients, print_table, read_config};
use super::{List, clients_of};
use crate::admin::clients::has_words;
use crate::file_watch::FileWatch;
use transom_config::clients::ClientsSource;
use transom_limiter::secret_digest::Digest;
use transom_rules::client_plans::describe_client;

pub fn list(path: &Path, list: &List) -> Result<(), Failure> {
    let clients = match list.gateway.address.given().is_some() {
        true => {
            let gateway = list.gateway.find(path)?;
            listed_clients(&gateway, list)?.ok_or_else(|| gateway.not_running())?
        }
        false => configured_clients(path, list)?,
    };
    if list.json {
        print_out!("{:#}", json!({ "clients": clients }));
        return Ok(());
    }
    let header = ["NAME", "PLAN", "KEYS", "SUBJECTS", "NETWORKS"].map(str::to_owned);
    print_table(&std::iter::once(header).chain(clients.iter().map(row)).collect::<Vec<_>>());
    Ok(())
}

fn row(client: &Value) -> [String; 5] {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let joined = |member: &str| match client[member].as_array() {
        Some(list) if !list.is_empty() => {
            list.iter().map(text).collect::<Vec<_>>().join(" ").escape_debug().to_string()
        }
        _ => "-".to_owned(),
    };
    [text(&client["name"]), text(&client["plan"]), joined("keys"), joined("subjects"), joined("networks")]
}

/// The clients of a configuration.
fn configured_clients(path: &Path, list: &List) -> Result<Vec<Value>, Failure> {
    let mut config = read_config(path, &mut FileWatch::default())
        .map_err(|invalid| Failure(Exit::BadConfig, invalid.to_string()))?;
    if clients_of(&config, path)?.source == ClientsSource::Shared {
        match list.gateway.find(path) {
            Ok(gateway) => match listed_clients(&gateway, list)? {
                Some(listed) => return Ok(listed),
                None => print_err!("transom: no gateway runs: the clients are those of the copy"),
            },
            Err(Failure(_, text)) => print_err!("{}", text.trim_end()),
        }
        add_copied_clients(&mut config);
    }
    let clients = clients_of(&config, path)?;
    let digest = |digest: &Digest| if list.json { digest.to_string() } else { digest.brief() };
    let search = list.search.as_deref().unwrap_or_default().to_lowercase();
    let words: Vec<&str> = search.split_whitespace().collect();
    let of_plan = clients.list.iter().filter(|client| list.plan.as_ref().is_none_or(|plan| *plan == client.plan));
    let described = of_plan.map(|client| describe_client(clients, client, digest));
    Ok(described.filter(|client| has_words(client, &words)).collect())
}

/// The clients that a gateway lists.
fn listed_clients(gateway: &RunningGateway, list: &List) -> Result<Option<Vec<Value>>, Failure> {
    let filters = [("search", &list.search), ("plan", &list.plan)];
    let filters = filters.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
    let filters: String = filters.map(|(name, value)| format!("&{name}={}", encoded(value))).collect();
    gateway.pages("/v1/clients", "clients", &filters)
}
