//! Edits the access file: adds and removes deny entries, and keeps comments and order. The commands and the admin API edit the file
//! here alone; the gateway reads it again when it has changed.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use toml_edit::{ArrayOfTables, Datetime, DocumentMut, Formatted, InlineTable, Item, Table, Value};

use crate::atomic_file::Draft;
use crate::toml_comments::{text_above, text_after_removal};
use transom_config::Config;
use transom_config::access::{CLIENT_PREFIX, DenyEntry, EntryId, is_secret, read_entries, rfc3339};
use transom_config::diagnostics::Problem;
use transom_config::key::parse_part;
use transom_limiter::secret_digest::Digest;

/// A deny entry as a person writes it.
#[derive(Clone, Debug)]
pub struct NewEntry {
    pub target: WrittenTarget,
    pub routes: Vec<String>,
    /// Unix milliseconds.
    pub until_ms: Option<u64>,
    pub reason: Option<String>,
}

/// Whom a new entry denies.
#[derive(Clone, Debug)]
pub enum WrittenTarget {
    Network(String),
    Client(String),
    Key { part: String, value: String },
}

impl WrittenTarget {
    /// Reads `NETWORK`, `client:NAME` or `PART=VALUE`.
    pub fn parse(text: &str) -> WrittenTarget {
        let owned = str::to_owned;
        match (text.strip_prefix(CLIENT_PREFIX), text.split_once('=')) {
            (Some(name), _) => WrittenTarget::Client(owned(name)),
            (None, Some((part, value))) => WrittenTarget::Key { part: owned(part), value: owned(value) },
            (None, None) => WrittenTarget::Network(owned(text)),
        }
    }
}

/// Why the access file was not changed.
#[derive(Debug)]
pub enum EditError {
    /// The new entry is invalid: messages, each with its fix.
    Invalid(Vec<(String, String)>),
    /// The file as it is cannot be edited.
    BadFile(String),
    /// Another process edits the file, with this draft.
    Busy(PathBuf),
    Io(io::Error),
}

impl fmt::Display for EditError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EditError::Invalid(problems) => {
                let texts: Vec<String> = problems.iter().map(|(message, fix)| format!("{message}: {fix}")).collect();
                f.write_str(&texts.join("; "))
            }
            EditError::BadFile(message) => write!(f, "the access file cannot be edited: {message}"),
            EditError::Busy(draft) => write!(f, "{} is there: another process edits the access file", draft.display()),
            EditError::Io(error) => write!(f, "the access file cannot be written: {error}"),
        }
    }
}

/// What an edit did.
pub struct Added {
    pub entry: DenyEntry,
    /// The entry of the same id that was replaced.
    pub before: Option<DenyEntry>,
    pub is_new_file: bool,
}

/// Checks an entry as the gateway does.
pub fn check(new: &NewEntry, config: &Config) -> Result<DenyEntry, EditError> {
    new.check(config).map(|(entry, _table)| entry)
}

/// Adds an entry, or replaces the end and the reason of the one that denies the same.
pub fn add(file: &Path, new: &NewEntry, config: &Config) -> Result<Added, EditError> {
    let (entry, table) = new.check(config)?;
    let mut edit = Edit::begin(file, config)?;
    let same = edit.position_of(entry.id);
    match same {
        Some(position) => edit.replace(position, &table)?,
        None => edit.push(table)?,
    }
    let before = same.map(|position| edit.entries[position].clone());
    let is_new_file = edit.publish()?;
    Ok(Added { entry, before, is_new_file })
}

/// Removes the entries with these ids, and returns those that there were.
pub fn remove(file: &Path, ids: &[EntryId], config: &Config) -> Result<Vec<DenyEntry>, EditError> {
    let mut edit = Edit::begin(file, config)?;
    let mut removed = Vec::new();
    for position in
        (0..edit.entries.len()).rev().filter(|position| ids.contains(&edit.entries[*position].id)).collect::<Vec<_>>()
    {
        edit.remove(position)?;
        removed.push(edit.entries[position].clone());
    }
    if !removed.is_empty() {
        edit.publish()?;
    }
    removed.reverse();
    Ok(removed)
}

impl NewEntry {
    /// The entry, and its table in the file.
    fn check(&self, config: &Config) -> Result<(DenyEntry, Table), EditError> {
        let table = self.to_table(config)?;
        let mut alone = DocumentMut::new();
        alone.insert("deny", Item::ArrayOfTables(ArrayOfTables::from_iter([table.clone()])));
        let invalid = |problems: Vec<Problem>| {
            EditError::Invalid(problems.into_iter().map(|problem| (problem.message, problem.fix)).collect())
        };
        let entry = read_entries(&alone.to_string(), config).map_err(invalid)?.into_iter().next();
        let entry = entry.ok_or_else(|| EditError::Invalid(Vec::new()))?;
        Ok((entry, table))
    }

    /// As in `POST /v1/deny`.
    pub fn to_json(&self) -> serde_json::Value {
        let mut shown = serde_json::json!({
            "routes": self.routes, "until": self.until_ms.map(rfc3339), "reason": self.reason,
        });
        match &self.target {
            WrittenTarget::Network(network) => shown["network"] = network.as_str().into(),
            WrittenTarget::Client(client) => shown["client"] = client.as_str().into(),
            WrittenTarget::Key { part, value } => shown["key"] = serde_json::json!({ "part": part, "value": value }),
        }
        shown
    }

    /// As in the file. Of a secret value, the file has the digest.
    fn to_table(&self, config: &Config) -> Result<Table, EditError> {
        let mut table = Table::new();
        match &self.target {
            WrittenTarget::Network(network) => drop(table.insert("network", toml_edit::value(network))),
            WrittenTarget::Client(client) => drop(table.insert("client", toml_edit::value(client))),
            WrittenTarget::Key { part, value } => {
                let parsed = parse_part(part).map_err(|problem| EditError::Invalid(vec![problem]))?;
                let is_clear = is_secret(&parsed, config.clients.as_ref()) && !value.starts_with(Digest::PREFIX);
                let value = if is_clear { Digest::of(value.as_bytes()).to_string() } else { value.clone() };
                let mut key = InlineTable::new();
                key.insert("part", part.into());
                key.insert("value", value.into());
                table.insert("key", toml_edit::value(key));
            }
        }
        match self.routes.as_slice() {
            [] => {}
            routes => drop(table.insert("routes", toml_edit::value(toml_edit::Array::from_iter(routes)))),
        }
        if let Some(until_ms) = self.until_ms {
            table.insert("until", time(until_ms));
        }
        if let Some(reason) = &self.reason {
            table.insert("reason", toml_edit::value(reason));
        }
        Ok(table)
    }
}

fn time(unix_ms: u64) -> Item {
    // Times of other forms than TOML's are valid as texts.
    match rfc3339(unix_ms).parse::<Datetime>() {
        Ok(time) => Item::Value(Value::Datetime(Formatted::new(time))),
        Err(_) => toml_edit::value(rfc3339(unix_ms)),
    }
}

/// An edit in progress.
struct Edit {
    draft: Draft,
    document: DocumentMut,
    is_new: bool,
    /// The entries of the file before the edit, in its order.
    entries: Vec<DenyEntry>,
}

impl Edit {
    fn begin(file: &Path, config: &Config) -> Result<Edit, EditError> {
        let draft = Draft::begin(file).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => EditError::Busy(Draft::path_of(file)),
            _ => EditError::Io(error),
        })?;
        let text = draft.current_text().map_err(EditError::Io)?;
        let is_new = text.is_none();
        let text = text.unwrap_or_default();
        let entries = read_entries(&text, config).map_err(|problems| {
            let first = problems.first().map(|problem| format!("line {}: {}", problem.line, problem.message));
            EditError::BadFile(first.unwrap_or_default())
        })?;
        let document =
            text.parse::<DocumentMut>().map_err(|_syntax| EditError::BadFile(String::from("it is not TOML")))?;
        Ok(Edit { draft, document, is_new, entries: entries.into_iter().collect() })
    }

    fn position_of(&self, id: EntryId) -> Option<usize> {
        self.entries.iter().position(|entry| entry.id == id)
    }

    fn tables(&mut self) -> Result<&mut ArrayOfTables, EditError> {
        let item = self.document.entry("deny").or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new()));
        let inline = || EditError::BadFile(String::from("write each entry as a table, `[[deny]]`"));
        item.as_array_of_tables_mut().ok_or_else(inline)
    }

    fn push(&mut self, mut table: Table) -> Result<(), EditError> {
        // Comments in a file without entries go above the first one.
        let comments = match self.document.is_empty() {
            true => {
                let comments = self.document.trailing().as_str().unwrap_or_default().to_owned();
                self.document.set_trailing("");
                comments
            }
            false => String::new(),
        };
        let gap = if self.document.is_empty() && comments.is_empty() { "" } else { "\n" };
        table.decor_mut().set_prefix(format!("{comments}{gap}"));
        self.tables()?.push(table);
        Ok(())
    }

    fn replace(&mut self, position: usize, new: &Table) -> Result<(), EditError> {
        let Some(table) = self.tables()?.get_mut(position) else { return Ok(()) };
        for key in ["until", "reason"] {
            match (new.get(key).and_then(Item::as_value), table.get_mut(key).and_then(Item::as_value_mut)) {
                (Some(new), Some(old)) => {
                    let decor = old.decor().clone();
                    *old = new.clone();
                    *old.decor_mut() = decor;
                }
                (Some(new), None) => drop(table.insert(key, Item::Value(new.clone()))),
                (None, _) => drop(table.remove(key)),
            }
        }
        Ok(())
    }

    fn remove(&mut self, position: usize) -> Result<(), EditError> {
        let tables = self.tables()?;
        let Some(removed) = tables.get(position).map(text_above) else { return Ok(()) };
        tables.remove(position);
        match tables.get_mut(position) {
            Some(next) => {
                let below = text_after_removal(&removed, &text_above(next), false);
                next.decor_mut().set_prefix(below);
            }
            None => {
                let end = self.document.trailing().as_str().unwrap_or_default().to_owned();
                self.document.set_trailing(text_after_removal(&removed, &end, true));
            }
        }
        Ok(())
    }

    /// Writes the file. Returns whether it is new.
    fn publish(self) -> Result<bool, EditError> {
        self.draft.publish(&self.document.to_string()).map_err(EditError::Io)?;
        Ok(self.is_new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str =
        "[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\nname = \"login\"\npath = \"/\"\nupstream = \"u\"\n";
    const FILE: &str = "\
# Who is denied.

# since May
[[deny]]
network = \"203.0.113.0/24\" # a scraper
until   = 2030-01-31T18:00:00Z # or earlier

# Devices.

[[deny]]
key = { part = \"header:x-device\", value = \"a1\" }
# the end
";

    fn entry(target: &str, until_ms: Option<u64>, reason: Option<&str>) -> NewEntry {
        let reason = reason.map(str::to_owned);
        NewEntry { target: WrittenTarget::parse(target), routes: Vec::new(), until_ms, reason }
    }

    /// The text of a file after an edit.
    #[track_caller]
    fn edited(text: &str, edit: impl FnOnce(&Path, &Config)) -> String {
        let config = transom_config::read(CONFIG).unwrap();
        let id = fastrand::u64(..);
        let path = std::env::temp_dir().join(format!("transom-access-{}-{id}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        edit(&path, &config);
        let after = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        after
    }

    #[test]
    fn a_new_entry_is_added_at_the_end() {
        let add_one = |path: &Path, config: &Config| {
            let new = NewEntry {
                routes: vec![String::from("login")],
                ..entry("192.0.2.7", Some(1_893_456_000_000), Some("x"))
            };
            assert!(add(path, &new, config).unwrap().before.is_none());
        };
        let new =
            "[[deny]]\nnetwork = \"192.0.2.7\"\nroutes = [\"login\"]\nuntil = 2030-01-01T00:00:00Z\nreason = \"x\"\n";
        assert_eq!(edited("", add_one), new);
        assert_eq!(edited("# Who is denied.\n", add_one), format!("# Who is denied.\n\n{new}"));
        assert_eq!(edited(FILE, add_one), FILE.replace("# the end\n", &format!("\n{new}# the end\n")));
    }

    #[test]
    fn an_entry_for_the_same_is_replaced() {
        let replace = |path: &Path, config: &Config| {
            let added = add(path, &entry("203.0.113.0/24", None, Some("again")), config).unwrap();
            assert_eq!(added.before.unwrap().id, added.entry.id);
        };
        let expected = FILE.replace("until   = 2030-01-31T18:00:00Z # or earlier\n", "reason = \"again\"\n");
        assert_eq!(edited(FILE, replace), expected);
        let later = |path: &Path, config: &Config| {
            drop(add(path, &entry("203.0.113.0/24", Some(1_893_456_000_000), None), config).unwrap());
        };
        assert_eq!(edited(FILE, later), FILE.replace("2030-01-31T18:00:00Z", "2030-01-01T00:00:00Z"));
    }

    #[test]
    fn an_entry_is_removed_with_its_own_comment_only() {
        let remove_one = |target: &'static str| {
            move |path: &Path, config: &Config| {
                let text = std::fs::read_to_string(path).unwrap();
                let entries = read_entries(&text, config).unwrap();
                let id = entries.iter().find(|entry| entry.target.to_string() == target).unwrap().id;
                assert_eq!(remove(path, &[id], config).unwrap().len(), 1);
                assert!(remove(path, &[id], config).unwrap().is_empty());
            }
        };
        let without_network = edited(FILE, remove_one("203.0.113.0/24"));
        assert_eq!(without_network, format!("# Who is denied.\n{}", &FILE[FILE.find("\n# Devices").unwrap()..]));
        let without_device = edited(FILE, remove_one("header:x-device=a1"));
        assert_eq!(
            without_device,
            format!("{}\n# Devices.\n\n# the end\n", &FILE[..FILE.find("\n# Devices").unwrap()])
        );
    }

    #[test]
    fn secrets_are_written_as_digests_and_bad_entries_and_files_change_nothing() {
        let secret =
            edited("", |path, config| drop(add(path, &entry("cookie:session=hunter2", None, None), config).unwrap()));
        assert!(secret.contains(&Digest::of(b"hunter2").to_string()) && !secret.contains("hunter2"), "{secret}");
        for target in ["203.0.113.7/24", "client:acme", "ip=192.0.2.1", "nothing=1", "header:x-device="] {
            let unchanged = edited(FILE, |path, config| {
                assert!(
                    matches!(add(path, &entry(target, None, None), config), Err(EditError::Invalid(_))),
                    "{target}"
                );
            });
            assert_eq!(unchanged, FILE);
        }
        for bad in ["[[deny]]\n", "deny = [{ network = \"192.0.2.1\" }]\n", "[["] {
            let unchanged = edited(bad, |path, config| {
                let added = add(path, &entry("192.0.2.7", None, None), config);
                assert!(matches!(added, Err(EditError::BadFile(_))), "{bad}");
            });
            assert_eq!(unchanged, bad);
        }
    }
}
