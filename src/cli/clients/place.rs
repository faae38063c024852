//! Where `transom clients` finds and changes clients: the clients file, or a running gateway, which has those of the store.

use std::path::{Path, PathBuf};

use http::header::{ETAG, IF_MATCH, IF_NONE_MATCH};
use http::{Method, Response};
use serde_json::{Map, Value, json};

use super::super::admin_client::{AskedGateway, Question, RunningGateway, encoded};
use super::super::{Failure, read_current_config};
use super::clients_toml::{ClientsDocument, Identifiers};
use super::file_edit::FileEdit;
use super::{clients_of, unknown_client};
use transom_config::Config;
use transom_config::clients::{Client, ClientsSource};

/// Where the clients are.
pub enum Place<'p> {
    /// In the clients file of this configuration.
    File(&'p Path, Box<Config>),
    /// In the store; or, where the command names a gateway and reads no configuration, wherever this gateway has them.
    Gateway(RunningGateway, Option<Box<Config>>),
}

/// A client as it is before a change.
pub struct Known {
    pub identifiers: Identifiers,
    /// The version that a gateway has.
    tag: Option<String>,
}

/// How a change of a client ended.
pub struct Done {
    /// The file that was changed.
    file: Option<PathBuf>,
    pub is_new_file: bool,
}

impl Done {
    const IN_STORE: Done = Done { file: None, is_new_file: false };

    /// ` in FILE`, or nothing.
    pub fn place(&self, preposition: &str) -> String {
        self.file.as_ref().map(|file| format!(" {preposition} {}", file.display())).unwrap_or_default()
    }
}

impl<'p> Place<'p> {
    /// `new_client`: the client that may be added.
    pub fn find(path: &'p Path, asked: &AskedGateway, new_client: Option<&str>) -> Result<Place<'p>, Failure> {
        if asked.address.given().is_some() {
            return Ok(Place::Gateway(asked.find(path)?, None));
        }
        let config = Box::new(read_current_config(path, new_client)?);
        match clients_of(&config, path)?.source {
            ClientsSource::File => Ok(Place::File(path, config)),
            ClientsSource::Shared => Ok(Place::Gateway(asked.find(path)?, Some(config))),
        }
    }

    pub fn config(&self) -> Option<&Config> {
        match self {
            Place::File(_, config) => Some(config),
            Place::Gateway(_, config) => config.as_deref(),
        }
    }

    /// The client of a name; `None` if there is none.
    pub fn client(&self, name: &str) -> Result<Option<Known>, Failure> {
        let gateway = match self {
            Place::File(_, config) => {
                let known = |client| Known { identifiers: Identifiers::of(Some(client)), tag: None };
                return Ok(clients_in(config).find(|client| client.name == name).map(known));
            }
            Place::Gateway(gateway, _) => gateway,
        };
        let Some(shown) = shown_client(gateway, name)? else { return Ok(None) };
        let texts = |member: &str| -> Vec<String> {
            let list = shown.body()[member].as_array().into_iter().flatten();
            list.filter_map(Value::as_str).map(str::to_owned).collect()
        };
        let identifiers =
            Identifiers { api_keys: texts("keys"), subjects: texts("subjects"), networks: texts("networks") };
        let tag = shown.headers().get(ETAG).and_then(|tag| tag.to_str().ok());
        Ok(Some(Known { identifiers, tag: tag.map(str::to_owned) }))
    }

    /// As [`Place::client`], for one that must be there.
    pub fn existing_client(&self, name: &str) -> Result<Known, Failure> {
        let names = self.config().into_iter().flat_map(clients_in).map(|client| client.name.as_str());
        self.client(name)?.ok_or_else(|| unknown_client(name, names))
    }

    /// Adds a client, or changes the plan of the known one, and adds identifiers.
    pub fn add(
        &self,
        name: &str,
        known: Option<&Known>,
        plan: Option<&str>,
        new: &Identifiers,
    ) -> Result<Done, Failure> {
        let gateway = match self {
            Place::File(path, config) => return edit_file(path, config, |file| file.add(name, plan, new)),
            Place::Gateway(gateway, _) => gateway,
        };
        let mut settings = Map::new();
        plan.iter().for_each(|plan| drop(settings.insert("plan".to_owned(), json!(plan))));
        for (member, list, known) in [
            ("subjects", &new.subjects, known.map(|known| &known.identifiers.subjects)),
            ("networks", &new.networks, known.map(|known| &known.identifiers.networks)),
        ] {
            let known = known.into_iter().flatten();
            let added = list.iter().filter(|one| !known.clone().any(|known| known == *one));
            if !list.is_empty() {
                settings.insert(member.to_owned(), known.clone().chain(added).cloned().collect());
            }
        }
        let is_new = known.is_none();
        if is_new || !settings.is_empty() {
            change_settings(gateway, name, known, settings)?;
        }
        for digest in &new.api_keys {
            let (target, body) = (format!("{}/keys", target(name)), json!({ "id": digest }));
            let added = gateway.ask(Question { method: Method::POST, body, ..Question::get(&target) });
            if let (Err(_), true) = (&added, is_new) {
                // All or nothing; the first failure is reported.
                let _ = gateway.ask(Question { method: Method::DELETE, ..Question::get(&self::target(name)) });
            }
            added?;
        }
        Ok(Done::IN_STORE)
    }

    /// Removes a client, or only some of its identifiers.
    pub fn remove(&self, name: &str, known: &Known, removed: &Identifiers) -> Result<Done, Failure> {
        let gateway = match self {
            Place::File(path, config) => {
                return edit_file(path, config, |file| match removed.is_empty() {
                    true => file.remove(name),
                    false => file.remove_identifiers(name, removed),
                });
            }
            Place::Gateway(gateway, _) => gateway,
        };
        let mut settings = Map::new();
        let rest = known.identifiers.without(removed);
        for (member, is_changed, rest) in [
            ("subjects", !removed.subjects.is_empty(), rest.subjects),
            ("networks", !removed.networks.is_empty(), rest.networks),
        ] {
            if is_changed {
                settings.insert(member.to_owned(), json!(rest));
            }
        }
        if !settings.is_empty() {
            change_settings(gateway, name, Some(known), settings)?;
        }
        let keys = removed.api_keys.iter().map(|key| format!("{}/keys/{}", target(name), key.trim_end_matches('…')));
        let all = removed.is_empty().then(|| target(name));
        for target in keys.chain(all) {
            gateway.ask(Question { method: Method::DELETE, ..Question::get(&target) })?;
        }
        Ok(Done::IN_STORE)
    }
}

fn clients_in(config: &Config) -> impl Iterator<Item = &Client> {
    config.clients.iter().flat_map(|clients| &clients.list)
}

fn edit_file(path: &Path, config: &Config, change: impl FnOnce(&mut ClientsDocument)) -> Result<Done, Failure> {
    let mut edit = FileEdit::begin(path, clients_of(config, path)?)?;
    change(&mut edit.document);
    edit.check(None)?;
    let done = Done { file: Some(edit.file.clone()), is_new_file: edit.is_new };
    edit.publish()?;
    Ok(done)
}

/// The client as a gateway shows it; `None` if the gateway knows none of this name.
pub fn shown_client(gateway: &RunningGateway, name: &str) -> Result<Option<Response<Value>>, Failure> {
    let response = gateway.respond_to(Question::get(&target(name)))?.ok_or_else(|| gateway.not_running())?;
    if response.status().as_u16() == 404 {
        return Ok(None);
    }
    gateway.success(response).map(Some)
}

/// The path of a client in the admin API.
pub fn target(name: &str) -> String {
    format!("/v1/clients/{}", encoded(name))
}

/// Adds a client, or changes the known version of one.
fn change_settings(
    gateway: &RunningGateway,
    name: &str,
    known: Option<&Known>,
    settings: Map<String, Value>,
) -> Result<(), Failure> {
    let (method, field) = match known {
        None => (Method::PUT, Some((IF_NONE_MATCH, "*"))),
        Some(known) => (Method::PATCH, known.tag.as_deref().map(|tag| (IF_MATCH, tag))),
    };
    let body = Value::Object(settings);
    gateway.ask(Question { method, target: &target(name), field, body }).map(drop)
}
