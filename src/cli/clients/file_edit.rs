//! An edit of the clients file: the file is read, changed, checked with the whole configuration, and replaced. Commands and requests
//! to the admin address share it.

use std::io;
use std::path::{Path, PathBuf};

use super::super::{InvalidConfig, list_folder, read_config_with, read_file, resolve_path};
use super::clients_toml::ClientsDocument;
use crate::admin::client_store::{Changed, Edit};
use crate::atomic_file::Draft;
use crate::server::Applied;
use crate::server::error::ReloadError;
use transom_config::Config;
use transom_config::clients::{Client, Clients};
use transom_config::diagnostics::Problem;
use transom_http::error::ApiError;

/// An edit in progress. No other can begin before it ends.
pub struct FileEdit<'p> {
    /// Of the configuration.
    config_path: &'p Path,
    pub file: PathBuf,
    draft: Draft,
    /// Whether there is no file yet.
    pub is_new: bool,
    pub document: ClientsDocument,
}

/// Why an edit failed.
pub enum EditError {
    /// Another process edits the file, or has left this draft.
    Busy(PathBuf),
    Io(PathBuf, io::Error),
    /// The file is not TOML.
    Syntax(PathBuf, String),
    Invalid(InvalidConfig),
}

impl<'p> FileEdit<'p> {
    pub fn begin(config_path: &'p Path, clients: &Clients) -> Result<FileEdit<'p>, EditError> {
        let file = resolve_path(config_path, &clients.file);
        let draft = Draft::begin(&file).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => EditError::Busy(Draft::path_of(&file)),
            _ => EditError::Io(file.clone(), error),
        })?;
        let text = draft.current_text().map_err(|error| EditError::Io(file.clone(), error))?;
        let document = ClientsDocument::read(text.as_deref().unwrap_or_default());
        let document = document.map_err(|error| EditError::Syntax(file.clone(), error.to_string()))?;
        Ok(FileEdit { config_path, file, draft, is_new: text.is_none(), document })
    }

    /// The configuration with the file as it is in this edit. `new_client` may be named before it exists.
    pub fn check(&self, new_client: Option<&str>) -> Result<Config, EditError> {
        let text = self.document.to_string().into_bytes();
        let files = |other: &Path| if other == self.file { Ok(text.clone()) } else { read_file(other) };
        read_config_with(self.config_path, &files, &list_folder, new_client).map_err(EditError::Invalid)
    }

    /// Replaces the file.
    pub fn publish(self) -> Result<(), EditError> {
        self.draft.publish(&self.document.to_string()).map_err(|error| EditError::Io(self.file, error))
    }
}

/// Changes a client as a request asks. `apply` applies a configuration; the new one is in use when the file is replaced.
pub fn change_client(
    (config_path, clients): (&Path, &Clients),
    name: &str,
    edit: &mut Edit,
    apply: &mut dyn FnMut(Config) -> Result<Applied, ReloadError>,
) -> Result<(Changed, Applied), ApiError> {
    let mut file = FileEdit::begin(config_path, clients).map_err(to_api_error)?;
    // Checked as it is now: other files may have changed since they were read.
    let current = file.check(Some(name)).map_err(|_invalid| {
        ApiError::Conflict(String::from("the configuration files have problems at the moment: see `transom check`"))
    })?;
    let before = find(&current, name);
    let after = edit(before.as_ref())?;
    file.document.replace(name, before.as_ref(), after.as_ref());
    let config = file.check(None).map_err(to_api_error)?;
    let changed = Changed { before, after: find(&config, name) };
    let refused = |error: ReloadError| ApiError::Conflict(format!("the configuration cannot be applied: {error}"));
    let applied = apply(config).map_err(refused)?;
    if let Err(error) = file.publish() {
        // What is in use must be what the files say.
        if let Err(error) = apply(current) {
            tracing::error!("the former clients cannot be applied: {error}");
        }
        return Err(to_api_error(error));
    }
    Ok((changed, applied))
}

fn find(config: &Config, name: &str) -> Option<Client> {
    config.clients.iter().flat_map(|clients| &clients.list).find(|client| client.name == name).cloned()
}

fn to_api_error(error: EditError) -> ApiError {
    match error {
        EditError::Busy(_) => ApiError::Unavailable(String::from("another process edits the clients file: try again")),
        EditError::Io(file, error) => {
            tracing::error!("the clients file `{}` cannot be changed: {error}", file.display());
            ApiError::Unavailable(format!("the clients file cannot be changed: {error}"))
        }
        EditError::Syntax(..) => ApiError::Conflict(String::from("the clients file is not TOML at the moment")),
        EditError::Invalid(invalid) => {
            let problem = |problem: &Problem| format!("{}: {}", problem.message, problem.fix);
            let problems: Vec<String> = invalid.problems.iter().map(problem).collect();
            ApiError::Rejected(format!("the configuration would be invalid: {}", problems.join("; ")))
        }
    }
}
