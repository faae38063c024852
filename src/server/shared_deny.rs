//! The deny entries that gateways share through the store: a thread follows them, and compiles them for the current configuration.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use tokio::sync::oneshot;

use super::error::StartError;
use crate::proxy::served_config::ServedConfig;
use crate::shared_data::SharedData;
use transom_config::Config;
use transom_config::access::{AccessSource, SharedEntry};
use transom_config::redis::StoreConfig;
use transom_rules::access::DenyList;
use transom_runtime::clock::Clock;
use transom_runtime::metrics::Registry;
use transom_runtime::metrics::redis::SharedDataMetrics;
use transom_store::map_follower::{SharedMap, Update};

/// In the store, in messages and in metrics.
const NAME: &str = "deny";

/// The thread that follows the entries. It ends when this is dropped.
pub struct SharedDeny {
    place: (StoreConfig, PathBuf),
    entries: Arc<Mutex<SharedEntries>>,
    pub map: SharedMap,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

/// The entries, and the configuration for which they are compiled.
#[derive(Default)]
struct SharedEntries {
    by_id: BTreeMap<Arc<str>, SharedEntry>,
    served: Option<Arc<ServedConfig>>,
}

impl SharedDeny {
    /// Where a configuration has its entries; `None` if it shares none.
    fn place(config: &Config) -> Option<(StoreConfig, PathBuf)> {
        let access = config.access.as_ref().filter(|access| access.source == AccessSource::Shared)?;
        Some((config.counters.shared.clone()?, access.file.clone()))
    }

    /// Whether the thread follows the entries of a configuration.
    pub fn is_of(&self, config: &Config) -> bool {
        SharedDeny::place(config).is_some_and(|place| place == self.place)
    }

    /// Reads the copy of the entries of a configuration, if it shares some, and starts to follow them.
    pub fn start(config: &Config, registry: &Arc<Registry>, clock: &Clock) -> Result<Option<SharedDeny>, StartError> {
        let Some(place) = SharedDeny::place(config) else { return Ok(None) };
        let entries = Arc::<Mutex<SharedEntries>>::default();
        let (stop, stopped) = oneshot::channel();
        let (opened, result) = mpsc::sync_channel(1);
        let ((store, file), updated) = (place.clone(), Arc::clone(&entries));
        let (registry, clock) = (Arc::clone(registry), clock.clone());
        let run = move || async move {
            let update =
                move |update: Update<'_>| updated.lock().unwrap_or_else(PoisonError::into_inner).update(update);
            let metrics = SharedDataMetrics::new(&registry, NAME);
            let (data, handle) = SharedData::open(&store, (NAME, file.as_path()), clock, metrics, update);
            // The starting thread waits below.
            let _ = opened.send(handle);
            data.run(stopped).await;
        };
        let thread = super::spawn(NAME.to_owned(), run)?;
        let ended = |_gone| StartError::Thread(io::Error::other("the thread ended at once"));
        let handle = result.recv().map_err(ended)?;
        if !handle.is_known() {
            tracing::warn!("there is no copy of the shared deny entries: no request is denied until the store is read");
        }
        Ok(Some(SharedDeny { place, entries, map: handle.map, stop, thread }))
    }

    /// Compiles the entries for a configuration from now on.
    pub fn serve(&self, served: &Arc<ServedConfig>) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        entries.served = Some(Arc::clone(served));
        entries.compile();
    }

    /// As [`SharedDeny::serve`], for a configuration with the same deny and allow lists.
    pub fn serve_unchanged(&self, served: &Arc<ServedConfig>) {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).served = Some(Arc::clone(served));
    }

    /// Ends the thread, which writes the last copy.
    pub fn stop(self) -> JoinHandle<()> {
        drop(self.stop);
        self.thread
    }
}

impl SharedEntries {
    fn update(&mut self, update: Update<'_>) {
        match update {
            Update::All(all) => {
                self.by_id.clear();
                all.iter().for_each(|(id, entry)| self.set(id, &entry.text));
            }
            Update::Changes(changes) => {
                for change in changes {
                    match &change.text {
                        Some(text) => self.set(&change.name, text),
                        None => drop(self.by_id.remove(&change.name)),
                    }
                }
            }
        }
        self.compile();
    }

    fn set(&mut self, id: &Arc<str>, text: &str) {
        match SharedEntry::parse(text) {
            Some(entry) => drop(self.by_id.insert(Arc::clone(id), entry)),
            None => {
                tracing::error!("the shared deny entry `{}` cannot be read, and has no effect here", id.escape_debug());
                self.by_id.remove(id);
            }
        }
    }

    fn compile(&self) {
        let Some(served) = &self.served else { return };
        let Some(access) = &served.access else { return };
        let resolved = self.by_id.values().filter_map(|entry| entry.resolve(&served.config));
        access.replace(DenyList::new(Arc::new(resolved.collect()), &served.config.routes));
    }
}
