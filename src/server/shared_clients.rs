//! The clients in the store: a thread follows them, and workers get them as live clients.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use tokio::sync::{Notify, oneshot};

use super::error::StartError;
use super::spawn;
use crate::shared_data::{SharedData, SharedDataHandle};
use transom_config::Config;
use transom_config::client_limits::ClientLimits;
use transom_config::clients::{Client, Clients, ClientsSource};
use transom_rules::client_plans::{ClientPlans, RulesInUse};
use transom_rules::compiled_config::CompiledConfig;
use transom_rules::live_clients::LiveClients;
use transom_runtime::clock::Clock;
use transom_runtime::metrics::Registry;
use transom_runtime::metrics::redis::SharedDataMetrics;
use transom_store::map_follower::{Entries, Update};
use transom_store::shared_map::MapChange;

/// The name of the data in the store, in metrics and in messages.
const NAME: &str = "clients";

/// The thread that follows the clients. It ends when this is dropped.
pub struct SharedClients {
    pub data: SharedDataHandle,
    target: Arc<Mutex<Arc<LiveClients>>>,
    /// Of the live clients.
    configured: (Clients, bool),
    limits_changed: Arc<Notify>,
    rules: Arc<RulesInUse>,
    /// The rules before, which some worker may still use.
    pub former_rules: Option<Arc<RulesInUse>>,
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
                    Update::All(entries) => *plans = load(plans, plans, entries),
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
            if live.current().is_ahead_of_rules() {
                has_changed.notify_one();
            }
        };
        let metrics = SharedDataMetrics::new(registry, NAME);
        let (follower, data) = SharedData::open(store, (NAME, &clients.file), clock.clone(), metrics, update);
        let (stop, stopped) = oneshot::channel();
        let thread = spawn(NAME.to_owned(), move || follower.run(stopped))?;
        let limits_changed = Arc::clone(limits_changed);
        let (rules, former_rules) = (Arc::new(RulesInUse), None);
        Ok(Some(SharedClients { data, target, configured, limits_changed, rules, former_rules, stop, thread }))
    }

    /// The live clients.
    pub fn target(&self) -> Arc<LiveClients> {
        Arc::clone(&self.target.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The live clients under a configuration, which has their limits: those that there are, unless it reads them in another way.
    pub fn live(&mut self, config: &Config, now_ms: u64) -> Option<Arc<LiveClients>> {
        let (clients, plans) = clients_in_store(config)?;
        let configured = (Clients { limit_texts: Vec::new(), ..clients.clone() }, plans.counts_clients());
        if configured != self.configured {
            // No change gets lost meanwhile: the thread that makes changes waits.
            let copy = self.data.map.lock();
            let plans = load(&plans, &self.target().current(), &copy.entries);
            *self.target.lock().unwrap_or_else(PoisonError::into_inner) = LiveClients::new(plans);
            self.configured = configured;
        }
        self.use_rules(config);
        let live = self.target();
        live.change(|plans| plans.apply_limits(now_ms));
        Some(live)
    }

    /// Notes that workers get the rules of a configuration.
    pub fn use_rules(&mut self, config: &Config) {
        let limits = config.clients.as_ref().map_or(&[][..], |clients| &clients.limit_texts);
        let (live, mut rules) = (self.target(), None);
        live.change(|plans| rules = Some(plans.use_rules(limits)));
        self.former_rules = rules.map(|rules| std::mem::replace(&mut self.rules, rules));
        // Changed since the configuration got them.
        if live.current().is_ahead_of_rules() {
            self.limits_changed.notify_one();
        }
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

/// The clients in the store, with these sources.
fn load(sources: &ClientPlans, former: &ClientPlans, entries: &Entries) -> ClientPlans {
    let clients = entries.iter().map(|(name, entry)| (&**name, read(name, Some(&entry.text))));
    sources.load(former, entries.len(), clients)
}

/// A client as the store has it. One that this gateway cannot read is logged, and unknown.
fn read(name: &str, text: Option<&str>) -> Option<Client> {
    let client = Client::from_json(name, text?);
    let client = client
        .inspect_err(|error| tracing::warn!(client = name, "a client in the store is not known: {error}"))
        .ok()?;
    for ClientLimits { rule, unreadable, .. } in &client.limits {
        if let Some(error) = unreadable {
            tracing::warn!(client = name, rule, "limits of a client in the store are not in effect: {error}");
        }
    }
    Some(client)
}
