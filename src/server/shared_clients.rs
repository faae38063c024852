//! The clients in the store: a thread follows them, and workers get them as live clients.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use tokio::sync::{Notify, oneshot};

use super::error::StartError;
use super::spawn;
use crate::shared_data::{SharedData, SharedDataHandle};
use transom_config::Config;
use transom_config::clients::{Client, Clients, ClientsSource};
use transom_rules::client_plans::ClientPlans;
use transom_rules::compiled_config::CompiledConfig;
use transom_rules::live_clients::LiveClients;
use transom_runtime::clock::Clock;
use transom_runtime::metrics::Registry;
use transom_runtime::metrics::redis::SharedDataMetrics;
use transom_store::map_follower::{Entries, Update};
use transom_store::shared_map::MapChange;

/// The name of the data in the store, in metrics and in messages.
const NAME: &str = "clients";
/// Limits that are not in effect, in the log of one reload.
const LOGGED_MAX: usize = 10;

/// The thread that follows the clients. It ends when this is dropped.
pub struct SharedClients {
    pub data: SharedDataHandle,
    target: Arc<Mutex<Arc<LiveClients>>>,
    /// Of the live clients.
    configured: (Clients, bool),
    limits_changed: Arc<Notify>,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl SharedClients {
    /// Begins with the copy on disk. `None` if the clients are not in the store.
    /// `limits_changed` is notified when clients have limits that the rules do not know.
    pub fn start(
        config: &Config,
        clock: &Clock,
        registry: &Registry,
        limits_changed: &Arc<Notify>,
    ) -> Result<Option<SharedClients>, StartError> {
        let Some((clients, plans)) = clients_in_store(config) else { return Ok(None) };
        let Some(store) = &config.counters.shared else { return Ok(None) };
        let configured = (clients.clone(), plans.counts_clients());
        let target = Arc::new(Mutex::new(LiveClients::new(plans)));
        let (changed, has_changed) = (Arc::clone(&target), Arc::clone(limits_changed));
        let update = move |update: Update<'_>| {
            let live = Arc::clone(&changed.lock().unwrap_or_else(PoisonError::into_inner));
            live.change(|plans| {
                let contested = plans.contested().count();
                match update {
                    Update::All(entries) => load(plans, entries),
                    Update::Changes(changes) => {
                        let read = |change: &MapChange| read(&change.name, change.text.as_deref());
                        plans.change(changes.iter().map(|change| (&*change.name, read(change))));
                    }
                }
                if let (true, Some(names)) = (plans.contested().count() > contested, plans.contested().last()) {
                    tracing::warn!(
                        "clients in the store have a key or a subject in common; the first has it: {names:?}"
                    );
                }
            });
            if live.current().lacks_limit_plans() {
                has_changed.notify_one();
            }
        };
        let metrics = SharedDataMetrics::new(registry, NAME);
        let (follower, data) = SharedData::open(store, (NAME, &clients.file), clock.clone(), metrics, update);
        let (stop, stopped) = oneshot::channel();
        let thread = spawn(NAME.to_owned(), move || follower.run(stopped))?;
        let limits_changed = Arc::clone(limits_changed);
        Ok(Some(SharedClients { data, target, configured, limits_changed, stop, thread }))
    }

    /// Gives the rules of a configuration the limits of single clients.
    pub fn set_limits(&self, config: &mut Config) {
        let plans = self.target().current();
        let problems = config.set_client_limits(plans.limited_clients().map(|client| &***client));
        for problem in problems.iter().take(LOGGED_MAX) {
            tracing::warn!("limits of a client are not in effect: {problem}");
        }
    }

    fn target(&self) -> Arc<LiveClients> {
        Arc::clone(&self.target.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The live clients under a configuration, which has their limits: those that there are, unless it reads them in another way.
    pub fn live(&mut self, config: &Config, now_ms: u64) -> Option<Arc<LiveClients>> {
        let (clients, mut plans) = clients_in_store(config)?;
        let configured = (Clients { limit_texts: Vec::new(), ..clients.clone() }, plans.counts_clients());
        if configured != self.configured || self.target().current().has_unused_limit_plans() {
            // No change gets lost meanwhile: the thread that makes changes waits.
            let copy = self.data.map.lock();
            load(&mut plans, &copy.entries);
            plans.apply_limits(now_ms);
            *self.target.lock().unwrap_or_else(PoisonError::into_inner) = LiveClients::new(plans);
            self.configured = configured;
        }
        let live = self.target();
        live.change(|plans| plans.set_limit_plans(&clients.limit_texts));
        // Changed since the configuration got them.
        if live.current().lacks_limit_plans() {
            self.limits_changed.notify_one();
        }
        Some(live)
    }

    /// Ends the thread, once it has written the last copy.
    pub fn finish(self) {
        drop(self.stop);
        super::join(self.thread);
    }
}

fn clients_in_store(config: &Config) -> Option<(&Clients, ClientPlans)> {
    let clients = config.clients.as_ref().filter(|clients| clients.source == ClientsSource::Shared)?;
    let plans = CompiledConfig::client_plans(config)?;
    let log = |plan: &str| {
        tracing::warn!(plan, "a client in the store or a token has a plan that no rule defines: it is not known")
    };
    // Just made, so it was not set.
    let _ = plans.on_undefined_plan.set(log);
    Some((clients, plans))
}

fn load(plans: &mut ClientPlans, entries: &Entries) {
    *plans = plans.without_clients(entries.len());
    plans.change(entries.iter().map(|(name, entry)| (&**name, read(name, Some(&entry.text)))));
}

/// A client as the store has it. One that this gateway cannot read is logged, and unknown.
fn read(name: &str, text: Option<&str>) -> Option<Client> {
    let client = Client::from_json(name, text?);
    client.inspect_err(|error| tracing::warn!(client = name, "a client in the store is not known: {error}")).ok()
}
