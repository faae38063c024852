//! Keeps a copy of a map of the store in the gateway: loads it, asks for changes a few times a second, and refills a store that
//! lost its data. Changes that this gateway makes go the same way, so that they are in effect here when they are confirmed.
//!
//! While the store cannot be reached, the copy stays as it is, and nothing can be changed.
//!
//! A store may lack changes that it has confirmed: it lost its data and another gateway refilled it, or a replica was promoted. The
//! gateway that misses its last change there loads the map, and makes the changes of the same history that the map lacks again, as
//! long as nothing later has changed the same name. So of each name the last version that a gateway knows holds.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep, timeout};

use super::client::ScriptError;
use super::connection::log_excerpt;
use super::shared_map::{
    Changed, KEPT_MAX, MapChange, NAME_MAX_BYTES, Page, Position, Precondition, StoredMap, TEXT_MAX_BYTES,
    entries_of_a_call,
};
use transom_config::redis::StoreConfig;
use transom_runtime::clock::Clock;

/// How often the store is asked for changes.
const POLL_PERIOD: Duration = Duration::from_millis(250);
/// How long a gateway that has only a copy of an earlier process waits for one that knows more, before it refills an empty store.
const FILL_DELAY: Duration = Duration::from_secs(5);
/// How long a gateway that knows nothing waits for one that can refill an empty store, before it begins a new map.
const NEW_MAP_DELAY: Duration = Duration::from_secs(1);
/// How long the store is asked whether it has a change to which it did not reply.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(2);
/// Changes that wait while one is made.
const QUEUED_MAX: usize = 256;

/// The text of a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Entry {
    pub version: u64,
    pub text: Arc<str>,
}

pub type Entries = BTreeMap<Arc<str>, Entry>;

/// All entries of a map as of a position.
#[derive(Clone, Default, Debug)]
pub struct MapCopy {
    pub position: Position,
    pub entries: Entries,
    /// The version of the removal of names that were removed lately.
    pub removed: BTreeMap<Arc<str>, u64>,
}

/// What has changed in the copy.
pub enum Update<'u> {
    /// The whole map was loaded.
    All(&'u Entries),
    Changes(&'u [MapChange]),
}

/// What a follower tells the gateway.
pub trait MapObserver {
    /// The copy has changed. It is locked meanwhile.
    fn updated(&mut self, update: Update<'_>, copy: &MapCopy);
    /// The store was asked, a few times a second. Whether the copy is as the store was at this moment.
    fn polled(&mut self, is_synchronized: bool);
}

/// A map that gateways share, as the other threads of the gateway use it.
#[derive(Clone)]
pub struct SharedMap {
    copy: Arc<Mutex<MapCopy>>,
    requests: mpsc::Sender<Request>,
}

enum Request {
    Change(Change, oneshot::Sender<Result<Changed, ChangeError>>),
    /// To read until the copy is as the map in the store.
    Synchronize(oneshot::Sender<Result<(), String>>),
}

/// A name with its new text, or without one to remove it.
struct Change {
    name: String,
    text: Option<String>,
    precondition: Precondition,
}

/// Why a change is not known to be made. The text is for the operator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ChangeError {
    NotMade(String),
    /// There was no reply, and the change may have been made, or be made in a moment.
    Unconfirmed(String),
}

impl SharedMap {
    /// The copy. Not to be locked for long: changes wait for it.
    pub fn lock(&self) -> MutexGuard<'_, MapCopy> {
        self.copy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn get(&self, name: &str) -> Option<Entry> {
        self.lock().entries.get(name).cloned()
    }

    /// Reads what others have changed.
    ///
    /// # Errors
    ///
    /// Why the store cannot be read.
    pub async fn synchronize(&self) -> Result<(), String> {
        let ended = || "the gateway ends".to_owned();
        let (reply, synchronized) = oneshot::channel();
        self.requests.send(Request::Synchronize(reply)).await.map_err(|_closed| ended())?;
        synchronized.await.unwrap_or_else(|_closed| Err(ended()))
    }

    /// Sets the text of a name, or removes the name. When this returns, the change is in effect on this gateway, and on others
    /// within a second.
    pub async fn change(
        &self,
        name: &str,
        text: Option<String>,
        precondition: Precondition,
    ) -> Result<Changed, ChangeError> {
        if name.is_empty()
            || name.len() > NAME_MAX_BYTES
            || text.as_ref().is_some_and(|text| text.len() > TEXT_MAX_BYTES)
        {
            return Err(ChangeError::NotMade(format!(
                "an entry has a name of up to {NAME_MAX_BYTES} and a text of up to {TEXT_MAX_BYTES} bytes"
            )));
        }
        let ended = || "the gateway ends".to_owned();
        let (reply, changed) = oneshot::channel();
        let request = Request::Change(Change { name: name.to_owned(), text, precondition }, reply);
        self.requests.send(request).await.map_err(|_closed| ChangeError::NotMade(ended()))?;
        changed.await.unwrap_or_else(|_closed| Err(ChangeError::Unconfirmed(ended())))
    }
}

/// Follows one map. Runs in a thread of its own.
pub struct MapFollower {
    settings: StoreConfig,
    name: String,
    copy: Arc<Mutex<MapCopy>>,
    requests: mpsc::Receiver<Request>,
    clock: Clock,
}

impl MapFollower {
    /// `copy`: of an earlier process, or empty.
    pub fn new(settings: &StoreConfig, name: &str, copy: MapCopy, clock: Clock) -> (MapFollower, SharedMap) {
        let copy = Arc::new(Mutex::new(copy));
        let (sender, requests) = mpsc::channel(QUEUED_MAX);
        let map = SharedMap { copy: Arc::clone(&copy), requests: sender };
        let (settings, name) = (settings.clone(), name.to_owned());
        (MapFollower { settings, name, copy, requests, clock }, map)
    }

    /// Follows the map until the sender of `stop` is dropped. Must be called within a local runtime.
    pub async fn run(self, observer: &mut impl MapObserver, stop: oneshot::Receiver<()>) {
        let MapFollower { settings, name, copy, mut requests, clock } = self;
        let store = StoredMap::new(&settings, &name);
        let progress = Progress { copy, loading: None };
        let mut following =
            Following { name, store, progress, clock, has_synchronized: false, empty_since: None, outage: None };
        let follow = async {
            loop {
                let synchronized = following.synchronize(observer).await;
                observer.polled(synchronized.is_ok());
                following.log_outage(synchronized.err());
                tokio::select! {
                    Some(request) = requests.recv() => following.serve(request, observer).await,
                    () = sleep(POLL_PERIOD) => {}
                }
            }
        };
        tokio::select! {
            () = follow => {}
            _ = stop => {}
        }
    }
}

/// A follower that runs.
struct Following {
    name: String,
    store: StoredMap,
    progress: Progress,
    clock: Clock,
    /// Whether this process has read the map in the store since it knows the map.
    has_synchronized: bool,
    /// Since when the store is known to have no such map.
    empty_since: Option<Instant>,
    /// Why the store cannot be used, as was logged.
    outage: Option<String>,
}

impl Following {
    /// Reads until the copy is as the map in the store.
    async fn synchronize(&mut self, observer: &mut impl MapObserver) -> Result<(), String> {
        loop {
            let (position, since) = self.progress.position();
            let page = self.store.read(&position, since).await.map_err(why)?;
            let is_empty = page == Page::Empty;
            match page {
                Page::Behind { epoch } if epoch == position.epoch => {
                    self.fill().await?;
                    continue;
                }
                Page::Empty | Page::Filling { is_abandoned: true } | Page::Behind { .. }
                    if !position.epoch.is_empty() =>
                {
                    if !self.has_synchronized && self.empty_for() < FILL_DELAY {
                        return Err(format!("the store has lost the shared {}", self.name));
                    }
                    self.fill().await?;
                    continue;
                }
                Page::Filling { .. } => return Err(format!("a gateway refills the shared {}", self.name)),
                Page::Empty | Page::Behind { .. } => _ = self.empty_for(),
                Page::Gone | Page::Changes { .. } => self.empty_since = None,
            }
            match self.progress.apply(page, |update, copy| observer.updated(update, copy)) {
                Applied::More => {}
                Applied::Lacking(changes) => self.change_again(changes).await?,
                Applied::All => {
                    self.has_synchronized = !is_empty;
                    return Ok(());
                }
            }
        }
    }

    /// How long the store is known to have no such map. It is not counted before the first call.
    fn empty_for(&mut self) -> Duration {
        let now = self.clock.instant();
        now.duration_since(*self.empty_since.get_or_insert(now))
    }

    /// Makes changes that the store had confirmed, and lacks. One that is refused came too late: there is a later one.
    async fn change_again(&self, changes: Vec<Change>) -> Result<(), String> {
        tracing::warn!(
            changes = changes.len(),
            "the store lacked changes of the shared {}; this gateway makes them again",
            self.name
        );
        for Change { name, text, precondition } in changes {
            self.store.change(&name, text.as_deref(), precondition, None).await.map_err(why)?;
        }
        Ok(())
    }

    /// Writes the copy into the store that has lost the map.
    async fn fill(&mut self) -> Result<(), String> {
        self.progress.loading = None;
        let copy = Arc::clone(&self.progress.copy);
        let position = lock(&copy).position.clone();
        let next_entries = |after: Option<&str>| {
            let copy = lock(&copy);
            let after = after.map_or(Bound::Unbounded, Bound::Excluded);
            let entries = copy.entries.range::<str, _>((after, Bound::Unbounded));
            entries_of_a_call(entries.map(|(name, entry)| (name, entry.version, &entry.text)))
        };
        if self.store.fill(&new_id(), &position, next_entries).await.map_err(why)?.is_some() {
            let entries = lock(&copy).entries.len();
            tracing::warn!(
                entries,
                "the store had lost the shared {}; they were restored from this gateway's copy",
                self.name
            );
        }
        Ok(())
    }

    async fn serve(&mut self, request: Request, observer: &mut impl MapObserver) {
        // A dropped caller needs no reply.
        match request {
            Request::Change(change, reply) => drop(reply.send(self.change(&change, observer).await)),
            Request::Synchronize(reply) => drop(reply.send(self.synchronize(observer).await)),
        }
    }

    async fn change(&mut self, change: &Change, observer: &mut impl MapObserver) -> Result<Changed, ChangeError> {
        // Also so that a store without the map is refilled before it is changed.
        self.synchronize(observer).await.map_err(ChangeError::NotMade)?;
        if self.is_unknown() {
            // Others may know the map.
            sleep(NEW_MAP_DELAY.saturating_sub(self.empty_for())).await;
            self.synchronize(observer).await.map_err(ChangeError::NotMade)?;
        }
        let before = lock(&self.progress.copy).entries.get(&*change.name).map(|entry| entry.version);
        let (new_epoch, Change { name, text, precondition }) = (self.is_unknown().then(new_id), change);
        match self.store.change(name, text.as_deref(), *precondition, new_epoch.as_deref()).await {
            Ok(Changed::Away) => Err(ChangeError::NotMade(format!("the store has lost the shared {}", self.name))),
            Ok(changed) => {
                // A failure is not the caller's: the store is changed, and the next poll reads it.
                let _ = self.synchronize(observer).await;
                Ok(changed)
            }
            Err(ScriptError { why, may_have_run: false }) => Err(ChangeError::NotMade(why)),
            Err(ScriptError { why, may_have_run: true }) => {
                let found = timeout(CONFIRM_TIMEOUT, self.find(change, before, observer)).await;
                found.map_err(|_elapsed| ChangeError::Unconfirmed(why))
            }
        }
    }

    /// Waits until the store has a change. `before`: the former version of the entry.
    async fn find(&mut self, change: &Change, before: Option<u64>, observer: &mut impl MapObserver) -> Changed {
        loop {
            if self.synchronize(observer).await.is_ok() {
                let copy = lock(&self.progress.copy);
                let entry = copy.entries.get(&*change.name).filter(|entry| Some(entry.version) != before);
                match (&change.text, entry) {
                    (Some(text), Some(entry)) if *entry.text == **text => {
                        return Changed::Changed { version: entry.version };
                    }
                    (None, None) if !copy.entries.contains_key(&*change.name) && before.is_some() => {
                        return Changed::Changed { version: copy.position.version };
                    }
                    _ => {}
                }
            }
            sleep(POLL_PERIOD).await;
        }
    }

    /// Whether neither the gateway nor the store has the map.
    fn is_unknown(&self) -> bool {
        lock(&self.progress.copy).position.epoch.is_empty()
    }

    fn log_outage(&mut self, outage: Option<String>) {
        let name = &self.name;
        match (&self.outage, &outage) {
            (None, Some(why)) => {
                let entries = lock(&self.progress.copy).entries.len();
                tracing::warn!(
                    entries,
                    "the shared {name} cannot be followed, the last known ones stay in effect: {}",
                    log_excerpt(why)
                );
            }
            (Some(_), None) => tracing::info!("the shared {name} are followed again"),
            (Some(_), Some(_)) | (None, None) => {}
        }
        self.outage = outage;
    }
}

/// What the gateway knows of the map, and how replies change it.
struct Progress {
    copy: Arc<Mutex<MapCopy>>,
    /// The map while it is loaded, and its version when that began. The copy stays as it is until then.
    loading: Option<(MapCopy, u64)>,
}

impl Progress {
    /// The position after which changes are wanted, and the version at which the gateway began to learn what it knows.
    fn position(&self) -> (Position, u64) {
        match &self.loading {
            Some((loading, since)) => (loading.position.clone(), *since),
            None => {
                let position = lock(&self.copy).position.clone();
                let since = position.version;
                (position, since)
            }
        }
    }

    /// Applies a reply about the changes after [`Progress::position`].
    fn apply(&mut self, page: Page, updated: impl FnOnce(Update<'_>, &MapCopy)) -> Applied {
        let (epoch, version, floor, changes, is_last) = match page {
            Page::Changes { epoch, version, floor, changes, is_last } => (epoch, version, floor, changes, is_last),
            Page::Gone => {
                self.loading = Some((MapCopy::default(), 0));
                return Applied::More;
            }
            Page::Empty | Page::Filling { .. } | Page::Behind { .. } => return Applied::All,
        };
        let mut copy = lock(&self.copy);
        if self.loading.is_none() && copy.position.epoch.is_empty() {
            self.loading = Some((MapCopy::default(), 0));
        }
        let target = match &mut self.loading {
            Some((loading, since)) => {
                if loading.position.epoch.is_empty() {
                    loading.position.epoch.clone_from(&epoch);
                    *since = version;
                }
                loading
            }
            None => &mut copy,
        };
        if target.position.epoch != epoch {
            self.loading = Some((MapCopy::default(), 0));
            return Applied::More;
        }
        for change in &changes {
            target.apply(change);
        }
        if is_last && target.position.version < version {
            // The last change was a removal, before the map was refilled.
            target.position.version = version;
        }
        if let (Some((loading, _)), true) = (&self.loading, is_last) {
            let lacking = copy.changes_lacking_in(loading, floor);
            if !lacking.is_empty() {
                return Applied::Lacking(lacking);
            }
        }
        match self.loading.take_if(|_| is_last) {
            Some((loaded, _)) => {
                if copy.position.epoch != loaded.position.epoch && !copy.entries.is_empty() {
                    let (before, entries) = (copy.entries.len(), loaded.entries.len());
                    tracing::warn!(
                        before,
                        entries,
                        "the store has another history of the shared data, which is in effect now"
                    );
                }
                *copy = loaded;
                updated(Update::All(&copy.entries), &copy);
            }
            None if self.loading.is_none() && !changes.is_empty() => updated(Update::Changes(&changes), &copy),
            None => {}
        }
        if is_last { Applied::All } else { Applied::More }
    }
}

/// What follows a reply.
enum Applied {
    /// The gateway has to ask on.
    More,
    /// The gateway knows the map, which lacks these changes.
    Lacking(Vec<Change>),
    /// The copy is as the map.
    All,
}

impl MapCopy {
    fn apply(&mut self, MapChange { name, version, text }: &MapChange) {
        match text {
            Some(text) => {
                self.entries.insert(Arc::clone(name), Entry { version: *version, text: Arc::clone(text) });
                self.removed.remove(name);
            }
            None => {
                self.entries.remove(name);
                self.removed.insert(Arc::clone(name), *version);
                self.forget_removals();
            }
        }
        self.position.version = *version;
    }

    /// Keeps the latest removals, when there are twice as many as the store keeps.
    fn forget_removals(&mut self) {
        if self.removed.len() >= 2 * KEPT_MAX {
            let mut versions: Vec<u64> = self.removed.values().copied().collect();
            let (_, oldest_kept, _) = versions.select_nth_unstable(KEPT_MAX);
            self.removed.retain(|_, version| *version >= *oldest_kept);
        }
    }

    /// The changes of this copy that the map, as it was loaded, lacks. `floor`: the version up to which it may have forgotten
    /// removals, and so up to which a name that it lacks may have been removed.
    fn changes_lacking_in(&self, loaded: &MapCopy, floor: u64) -> Vec<Change> {
        if self.position.epoch != loaded.position.epoch {
            return Vec::new();
        }
        let change = |name: &Arc<str>, text: Option<&Arc<str>>| {
            let precondition =
                loaded.entries.get(name).map_or(Precondition::Absent, |e| Precondition::Version(e.version));
            Change { name: (**name).to_owned(), text: text.map(|text| (**text).to_owned()), precondition }
        };
        let later = self.entries.iter().filter(|(name, entry)| {
            let known = loaded.entries.get(*name).map(|entry| &entry.version).or_else(|| loaded.removed.get(*name));
            entry.version > floor && known.is_none_or(|known| *known < entry.version)
        });
        let removed = self
            .removed
            .iter()
            .filter(|(name, removed)| loaded.entries.get(*name).is_some_and(|entry| entry.version < **removed));
        let removed = removed.map(|(name, _)| change(name, None));
        later.map(|(name, entry)| change(name, Some(&entry.text))).chain(removed).collect()
    }
}

fn lock(copy: &Mutex<MapCopy>) -> MutexGuard<'_, MapCopy> {
    // A panic leaves whole entries.
    copy.lock().unwrap_or_else(PoisonError::into_inner)
}

fn new_id() -> String {
    format!("{:032x}", fastrand::u128(..))
}

fn why(error: ScriptError) -> String {
    error.why
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A copy with entries, `text@version`, and removals.
    fn copy(epoch: &str, entries: &[(&str, u64)], removed: &[(&str, u64)]) -> MapCopy {
        let mut copy = MapCopy::default();
        copy.position.epoch = epoch.to_owned();
        for (name, version) in entries {
            copy.apply(&MapChange { name: (*name).into(), version: *version, text: Some("t".into()) });
        }
        for (name, version) in removed {
            copy.apply(&MapChange { name: (*name).into(), version: *version, text: None });
        }
        copy
    }

    #[test]
    fn changes_that_the_map_lacks_are_those_that_nothing_later_has_overtaken() {
        let own = copy(
            "e",
            &[("old", 3), ("same", 12), ("newer", 15), ("older", 11), ("lost", 14), ("removed", 13)],
            &[("gone", 16), ("again", 17), ("both", 18)],
        );
        let loaded = copy(
            "e",
            &[("same", 12), ("newer", 12), ("older", 20), ("gone", 9), ("again", 21)],
            &[("removed", 19), ("both", 8)],
        );
        let lacking = own.changes_lacking_in(&loaded, 10);
        let lacking: Vec<_> = lacking.iter().map(|c| (&*c.name, c.text.is_some(), c.precondition)).collect();
        // `old` may have been removed before the removals that the store knows.
        let expected = [
            ("lost", true, Precondition::Absent),
            ("newer", true, Precondition::Version(12)),
            ("gone", false, Precondition::Version(9)),
        ];
        assert_eq!(lacking, expected);
        assert!(own.changes_lacking_in(&copy("other", &[], &[]), 0).is_empty());
    }

    #[test]
    fn the_latest_removals_are_known() {
        let names: Vec<String> = (0..2 * KEPT_MAX).map(|n| format!("c{n}")).collect();
        let removed: Vec<(&str, u64)> = names.iter().map(String::as_str).zip(1..).collect();
        let copy = copy("e", &[], &removed);
        assert_eq!((copy.removed.len(), copy.removed.get("c9999")), (KEPT_MAX, None));
        assert!(copy.removed.contains_key("c10000") && copy.removed.contains_key("c19999"));
    }
}
