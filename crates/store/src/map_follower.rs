//! Keeps a copy of a map of the store in the gateway: loads it, asks for changes a few times a second, and refills a store that
//! lost its data. Changes that this gateway makes go the same way, so that they are in effect here when they are confirmed.
//!
//! While the store cannot be reached, the copy stays as it is, and nothing can be changed.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;

use super::client::StoreError;
use super::connection::log_excerpt;
use super::shared_map::{
    Changed, MapChange, NAME_MAX_BYTES, Page, Position, Precondition, StoredMap, TEXT_MAX_BYTES, entries_of_a_call,
};
use transom_config::redis::StoreConfig;
use transom_runtime::clock::Clock;

/// How often the store is asked for changes.
const POLL_PERIOD: Duration = Duration::from_millis(250);
/// How long a gateway that has only a copy of an earlier process waits for one that knows more, before it refills an empty store.
const FILL_DELAY: Duration = Duration::from_secs(5);
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
    requests: mpsc::Sender<ChangeRequest>,
}

struct ChangeRequest {
    name: String,
    text: Option<String>,
    precondition: Precondition,
    reply: oneshot::Sender<Result<Changed, String>>,
}

impl SharedMap {
    /// The copy. Not to be locked for long: changes wait for it.
    pub fn lock(&self) -> MutexGuard<'_, MapCopy> {
        self.copy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn get(&self, name: &str) -> Option<Entry> {
        self.lock().entries.get(name).cloned()
    }

    /// Sets the text of a name, or removes the name. When this returns, the change is in effect on this gateway, and on others
    /// within a second. An error says why the store cannot be changed; whether it was changed is then unknown.
    pub async fn change(
        &self,
        name: &str,
        text: Option<String>,
        precondition: Precondition,
    ) -> Result<Changed, String> {
        if name.is_empty()
            || name.len() > NAME_MAX_BYTES
            || text.as_ref().is_some_and(|text| text.len() > TEXT_MAX_BYTES)
        {
            return Err(format!(
                "an entry has a name of up to {NAME_MAX_BYTES} and a text of up to {TEXT_MAX_BYTES} bytes"
            ));
        }
        let ended = || "the gateway ends".to_owned();
        let (reply, changed) = oneshot::channel();
        let request = ChangeRequest { name: name.to_owned(), text, precondition, reply };
        self.requests.send(request).await.map_err(|_closed| ended())?;
        changed.await.unwrap_or_else(|_closed| Err(ended()))
    }
}

/// Follows one map. Runs in a thread of its own.
pub struct MapFollower {
    settings: StoreConfig,
    name: String,
    copy: Arc<Mutex<MapCopy>>,
    requests: mpsc::Receiver<ChangeRequest>,
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
                    Some(request) = requests.recv() => following.change(request, observer).await,
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
                Page::Empty | Page::Filling { is_abandoned: true } if !position.epoch.is_empty() => {
                    let since = *self.empty_since.get_or_insert_with(|| self.clock.instant());
                    if !self.has_synchronized && self.clock.instant().duration_since(since) < FILL_DELAY {
                        return Err(format!("the store has lost the shared {}", self.name));
                    }
                    self.fill().await?;
                    continue;
                }
                Page::Filling { .. } => return Err(format!("a gateway refills the shared {}", self.name)),
                Page::Empty | Page::Gone | Page::Changes { .. } => {}
            }
            self.empty_since = None;
            if self.progress.apply(page, |update, copy| observer.updated(update, copy)) {
                self.has_synchronized = !is_empty;
                return Ok(());
            }
        }
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

    async fn change(&mut self, request: ChangeRequest, observer: &mut impl MapObserver) {
        let changed = self.change_store(&request, observer).await;
        // A dropped caller needs no reply.
        drop(request.reply.send(changed));
    }

    async fn change_store(
        &mut self,
        request: &ChangeRequest,
        observer: &mut impl MapObserver,
    ) -> Result<Changed, String> {
        // Also so that a store without the map is refilled before it is changed.
        self.synchronize(observer).await?;
        let is_new = lock(&self.progress.copy).position.epoch.is_empty();
        let (new_epoch, ChangeRequest { name, text, precondition, .. }) = (is_new.then(new_id), request);
        let changed =
            self.store.change(name, text.as_deref(), *precondition, new_epoch.as_deref()).await.map_err(why)?;
        match changed {
            Changed::Away => Err(format!("the store has lost the shared {}", self.name)),
            changed => {
                // A failure is not the caller's: the store is changed, and the next poll reads it.
                let _ = self.synchronize(observer).await;
                Ok(changed)
            }
        }
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

    /// Applies a reply about the changes after [`Progress::position`]. Returns whether it was the last.
    fn apply(&mut self, page: Page, updated: impl FnOnce(Update<'_>, &MapCopy)) -> bool {
        let (epoch, version, changes, is_last) = match page {
            Page::Changes { epoch, version, changes, is_last } => (epoch, version, changes, is_last),
            Page::Gone => {
                self.loading = Some((MapCopy::default(), 0));
                return false;
            }
            Page::Empty | Page::Filling { .. } => return true,
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
            return false;
        }
        for change in &changes {
            target.apply(change);
        }
        if is_last && target.position.version < version {
            // The last change was a removal, before the map was loaded.
            (target.position.version, target.position.last) = (version, String::new());
        }
        match self.loading.take_if(|_| is_last) {
            Some((loaded, _)) => {
                *copy = loaded;
                updated(Update::All(&copy.entries), &copy);
            }
            None if self.loading.is_none() && !changes.is_empty() => updated(Update::Changes(&changes), &copy),
            None => {}
        }
        is_last
    }
}

impl MapCopy {
    fn apply(&mut self, MapChange { name, version, text }: &MapChange) {
        match text {
            Some(text) => {
                _ = self.entries.insert(Arc::clone(name), Entry { version: *version, text: Arc::clone(text) })
            }
            None => _ = self.entries.remove(name),
        }
        self.position.version = *version;
        (**name).clone_into(&mut self.position.last);
    }
}

fn lock(copy: &Mutex<MapCopy>) -> MutexGuard<'_, MapCopy> {
    // A panic leaves whole entries.
    copy.lock().unwrap_or_else(PoisonError::into_inner)
}

fn new_id() -> String {
    format!("{:032x}", fastrand::u128(..))
}

fn why(error: StoreError) -> String {
    error.into()
}
