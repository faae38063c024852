//! A map from names to texts that gateways share through the store: its keys there, and the calls that read and change it.
//! `map_follower` keeps a copy of the whole map in each gateway.
//!
//! | key | content |
//! | --- | --- |
//! | `PREFIX:{#map\|MAP}:entries` | a hash: the text of each name |
//! | `PREFIX:{#map\|MAP}:changes` | a sorted set: for each name the version of its last change, also for names removed lately |
//! | `PREFIX:{#map\|MAP}:versions` | a sorted set: the versions of the latest changes, by themselves |
//! | `PREFIX:{#map\|MAP}:removed` | a sorted set: the names removed lately, by the version of their removal, also if they have a text again |
//! | `PREFIX:{#map\|MAP}:state` | a hash: `epoch`, `version` of the last change, `floor`, and during a refill `filler` and `until` |
//!
//! **Versions** grow with each change of the map, and are not less than the microseconds of the store's clock: a master that is
//! promoted without the last changes gives other changes other versions. **The epoch** is a random text that tells one history of
//! a map from another. A gateway whose last version is not among the latest ones loads the whole map: it knows too little, or it
//! knows a change that the store has lost. **The floor** is the version of the last removal that is forgotten.
//!
//! A store that lost its data has no state. The first gateway that notices **refills** the map from its copy, under the old epoch;
//! meanwhile `filler` names it, no gateway reads or changes the map, and another gateway takes over if none has written `until` then.
//! The floor of a refilled map is its version. A gateway that knows a later version refills the map anew, as long as nothing has
//! changed it: at once if its epoch is that of the map, otherwise as if the store had no map. `map_follower` has what happens later.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::time::timeout;

use super::client::{RedisClient, ScriptError};
use super::connection::{CallError, ScriptKind, unexpected_reply};
use super::scripts::{Script, ScriptRef};
use super::sentinel::reply_text;
use transom_config::redis::StoreConfig;

/// Upper bounds of an entry, bytes.
pub const NAME_MAX_BYTES: usize = 1024;
pub const TEXT_MAX_BYTES: usize = 256 * 1024;
/// Upper bounds of a reply and of a call with entries: the server does nothing else meanwhile.
const PAGE_ENTRIES: usize = 1000;
const PAGE_BYTES: usize = 256 * 1024;
/// Changes that a gateway may have missed without loading the whole map, and removals that stay known.
pub const KEPT_MAX: usize = 10_000;
/// How long a refill may pause before another gateway begins it anew.
const FILL_PAUSE_MAX: Duration = Duration::from_secs(10);
/// Limit for the reply to a call.
const REPLY_TIMEOUT: Duration = Duration::from_millis(2000);

static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("shared_map.lua")));

/// What a gateway knows of a map.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Position {
    /// Empty if the gateway knows nothing.
    pub epoch: String,
    /// The version of the last change that it knows.
    pub version: u64,
}

/// One name and its text; no text if the name was removed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MapChange {
    pub name: Arc<str>,
    pub version: u64,
    pub text: Option<Arc<str>>,
}

/// A reply about the changes after a position.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Page {
    /// The store has no such map.
    Empty,
    /// A gateway refills the map, or did not complete it.
    Filling { is_abandoned: bool },
    /// The map is a refill that lacks changes which the gateway knows, and nothing has changed it. Its epoch.
    Behind { epoch: String },
    /// The changes between the position and the present are not known.
    Gone,
    Changes {
        epoch: String,
        /// The version of the map.
        version: u64,
        /// Names that were removed up to this version may be forgotten.
        floor: u64,
        /// In the order of their versions.
        changes: Vec<MapChange>,
        is_last: bool,
    },
}

/// What has to hold for a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Precondition {
    None,
    /// The name has a text.
    Exists,
    Absent,
    /// The last change of the name has this version.
    Version(u64),
    /// The last change of the map has this version, so that whatever was checked against all entries still holds.
    Map(u64),
}

/// How a change ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Changed {
    /// The entry has this version now.
    Changed { version: u64 },
    /// Nothing was changed: the precondition does not hold, or the name to remove has no text. The version that the entry has.
    Refused { current: Option<u64> },
    /// Nothing was changed: the store has lost the map, or a gateway refills it.
    Away,
}

/// A map in the store.
pub struct StoredMap {
    client: RedisClient,
    /// The state, the entries, the changes, the versions, the removed names. Calls name only those that they need: while the slot moves between
    /// nodes, a cluster rejects calls with keys that do not exist.
    keys: [String; 5],
}

impl StoredMap {
    /// Opens no connection yet.
    pub fn new(settings: &StoreConfig, map: &str) -> StoredMap {
        let key = |name| format!("{}:{{#map|{map}}}:{name}", settings.prefix);
        StoredMap {
            client: RedisClient::for_maps(settings),
            keys: ["state", "entries", "changes", "versions", "removed"].map(key),
        }
    }

    /// Reads changes after a position. `since`: the version at which the gateway began to learn what it knows.
    pub async fn read(&self, position: &Position, since: u64) -> Result<Page, ScriptError> {
        let reply = self.run(4, |cmd| {
            cmd.arg("read").arg(position.version).arg(since).arg(PAGE_ENTRIES).arg(PAGE_BYTES);
            cmd.arg(&position.epoch);
        });
        let reply = reply.await?;
        parse_page(&reply).ok_or_else(|| malformed(&reply))
    }

    /// Sets the text of a name, or removes the name. `new_epoch`: for a map that the store does not have; without it, such a map
    /// is not changed.
    pub async fn change(
        &self,
        name: &str,
        text: Option<&str>,
        precondition: Precondition,
        new_epoch: Option<&str>,
    ) -> Result<Changed, ScriptError> {
        let expected = match precondition {
            Precondition::None => "any".to_owned(),
            Precondition::Exists => "exists".to_owned(),
            Precondition::Absent => String::new(),
            Precondition::Version(version) => version.to_string(),
            Precondition::Map(version) => format!("map{version}"),
        };
        let keys = if text.is_some() { 4 } else { 5 };
        let reply = self.run(keys, |cmd| {
            cmd.arg("change").arg(new_epoch.unwrap_or_default()).arg(name).arg(&expected).arg(KEPT_MAX).arg(text);
        });
        let reply = reply.await?;
        parse_changed(&reply).ok_or_else(|| malformed(&reply))
    }

    /// Writes a whole map into a store that has none. `by`: identifies this refill. `None`: the store has the map, or another
    /// gateway refills it. `next_entries` returns the entries after a name, at most as many as fit in a call.
    pub async fn fill(
        &self,
        by: &str,
        position: &Position,
        next_entries: impl Fn(Option<&str>) -> Vec<MapChange>,
    ) -> Result<Option<()>, ScriptError> {
        if !self.fill_step(by, "begin", |cmd| _ = cmd.arg(&position.epoch).arg(position.version)).await? {
            return Ok(None);
        }
        let mut last: Option<Arc<str>> = None;
        loop {
            let entries = next_entries(last.as_deref());
            let Some(end) = entries.last() else { break };
            last = Some(Arc::clone(&end.name));
            let add = |cmd: &mut Cmd| {
                for MapChange { name, version, text } in &entries {
                    cmd.arg(&**name).arg(*version).arg(text.as_deref());
                }
            };
            if !self.fill_step(by, "entries", add).await? {
                return Ok(None);
            }
        }
        Ok(self.fill_step(by, "end", |_cmd| ()).await?.then_some(()))
    }

    async fn fill_step(&self, by: &str, step: &str, arguments: impl Fn(&mut Cmd)) -> Result<bool, ScriptError> {
        let reply = self.run(5, |cmd| {
            cmd.arg("fill").arg(by).arg(FILL_PAUSE_MAX.as_millis() as u64).arg(step);
            arguments(cmd);
        });
        let reply = reply.await?;
        let changed = parse_changed(&reply).ok_or_else(|| malformed(&reply))?;
        Ok(matches!(changed, Changed::Changed { .. }))
    }

    /// Runs the script with the first `keys` keys.
    async fn run(&self, keys: usize, arguments: impl Fn(&mut Cmd)) -> Result<Value, ScriptError> {
        let command = |by: ScriptRef| {
            let mut cmd = SCRIPT.command(by, &self.keys[..keys]);
            arguments(&mut cmd);
            cmd
        };
        let call = self.client.run_script(&self.keys[0], ScriptKind::Map, &command);
        let no_reply = || ScriptError { why: format!("no reply within {REPLY_TIMEOUT:?}"), may_have_run: true };
        timeout(REPLY_TIMEOUT, call).await.unwrap_or_else(|_elapsed| Err(no_reply()))
    }
}

/// The first of these entries that fit in one call.
pub fn entries_of_a_call<'e>(entries: impl Iterator<Item = (&'e Arc<str>, u64, &'e Arc<str>)>) -> Vec<MapChange> {
    let mut bytes = 0;
    let fits = |(name, _, text): &(&Arc<str>, u64, &Arc<str>)| {
        let is_first = bytes == 0;
        bytes += name.len() + text.len();
        is_first || bytes <= PAGE_BYTES
    };
    let entries = entries.take(PAGE_ENTRIES).take_while(fits);
    let change = |(name, version, text)| MapChange { name: Arc::clone(name), version, text: Some(Arc::clone(text)) };
    entries.map(change).collect()
}

fn malformed(reply: &Value) -> ScriptError {
    let why = match unexpected_reply(reply) {
        CallError::Lost(why) => why,
        CallError::Rejected(_) => String::new(),
    };
    ScriptError { why, may_have_run: true }
}

fn parse_page(reply: &Value) -> Option<Page> {
    let Value::Array(reply) = reply else { return None };
    let (status, rest) = reply.split_first()?;
    let status = reply_text(status)?;
    match (status, rest) {
        ("empty", []) => Some(Page::Empty),
        ("filling" | "abandoned", []) => Some(Page::Filling { is_abandoned: status == "abandoned" }),
        ("behind", [epoch]) => Some(Page::Behind { epoch: reply_text(epoch)?.to_owned() }),
        ("gone", _) => Some(Page::Gone),
        ("changes", [epoch, version, Value::Int(is_last), floor, changes @ ..]) if changes.len() % 3 == 0 => {
            let changes = changes.as_chunks::<3>().0.iter().map(parse_change).collect::<Option<_>>()?;
            let (epoch, version, floor) =
                (reply_text(epoch)?.to_owned(), parse_version(version)?, parse_version(floor)?);
            Some(Page::Changes { epoch, version, floor, changes, is_last: *is_last == 1 })
        }
        _ => None,
    }
}

fn parse_change([name, version, text]: &[Value; 3]) -> Option<MapChange> {
    let text = match text {
        Value::Nil => None,
        text => Some(entry_text(text)?),
    };
    Some(MapChange { name: entry_text(name)?, version: parse_version(version)?, text })
}

/// A name or a text. What is not UTF-8 is replaced: it makes one entry unusable, not the map.
fn entry_text(reply: &Value) -> Option<Arc<str>> {
    match reply {
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(bytes).into()),
        other => reply_text(other).map(Arc::from),
    }
}

fn parse_changed(reply: &Value) -> Option<Changed> {
    let Value::Array(reply) = reply else { return None };
    let (status, rest) = reply.split_first()?;
    match (reply_text(status)?, rest) {
        ("away", []) => Some(Changed::Away),
        ("changed", [version]) => Some(Changed::Changed { version: parse_version(version)? }),
        ("refused", [current]) => Some(Changed::Refused { current: parse_version(current) }),
        _ => None,
    }
}

fn parse_version(reply: &Value) -> Option<u64> {
    reply_text(reply)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    #[test]
    fn replies_are_parsed() {
        let page = |items: &[Value]| parse_page(&Value::Array(items.to_vec()));
        assert_eq!(page(&[text("empty")]), Some(Page::Empty));
        assert_eq!(page(&[text("behind"), text("e")]), Some(Page::Behind { epoch: "e".into() }));
        assert_eq!(page(&[text("abandoned")]), Some(Page::Filling { is_abandoned: true }));
        assert_eq!(page(&[text("gone"), text("e"), text("9"), Value::Int(1)]), Some(Page::Gone));
        let head = [text("changes"), text("e"), text("1796000000000000"), Value::Int(0), text("5")];
        let foreign = [text("a"), text("7"), Value::BulkString(b"\xff".to_vec())];
        assert!(matches!(page(&[&head[..], &foreign].concat()), Some(Page::Changes { .. })));
        let entries = [text("a"), text("7"), text("{}"), text("b"), text("8"), Value::Nil];
        let changes = vec![
            MapChange { name: "a".into(), version: 7, text: Some("{}".into()) },
            MapChange { name: "b".into(), version: 8, text: None },
        ];
        let (epoch, version) = ("e".into(), 1_796_000_000_000_000);
        let expected = Page::Changes { epoch, version, floor: 5, changes, is_last: false };
        assert_eq!(page(&[&head[..], &entries].concat()), Some(expected));
        for malformed in [&[][..], &head[..4], &[&head[..], &entries[..2]].concat(), &[text("other")]] {
            assert_eq!(page(malformed), None, "{malformed:?}");
        }
        let changed = |items: &[Value]| parse_changed(&Value::Array(items.to_vec()));
        assert_eq!(changed(&[text("refused"), text("")]), Some(Changed::Refused { current: None }));
        assert_eq!(changed(&[text("changed"), text("5")]), Some(Changed::Changed { version: 5 }));
        assert_eq!(changed(&[text("changed")]), None);
    }

    #[test]
    fn a_call_has_a_bounded_number_of_entries() {
        let entry = |name: &str, bytes: usize| (Arc::<str>::from(name), Arc::<str>::from("x".repeat(bytes)));
        let count = |entries: &[(Arc<str>, Arc<str>)]| {
            entries_of_a_call(entries.iter().map(|(name, text)| (name, 1, text))).len()
        };
        assert_eq!(count(&vec![entry("a", 10); PAGE_ENTRIES + 5]), PAGE_ENTRIES);
        assert_eq!(count(&[entry("a", TEXT_MAX_BYTES), entry("b", 1)]), 1);
        assert_eq!(count(&[entry("a", PAGE_BYTES / 2), entry("b", PAGE_BYTES), entry("c", 1)]), 1);
    }
}
