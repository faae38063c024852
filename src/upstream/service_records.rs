//! Follows the service records (SRV, RFC 2782) that upstreams name, in a thread of its own.
//!
//! A record is looked up again when its time to live ends, and after a failure to connect to a server. The servers that it
//! lists stay in use while look-ups fail, and also when the record no longer exists: a broken DNS server takes no working
//! server out of use. The main thread gives changed servers to the workers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{sleep, timeout};

use super::dns_client::{self, Found, LookUpError};
use super::dns_message::{Record, RecordType, ServiceRecord};
use super::server_health::ListedServers;
use transom_config::ServerId;
use transom_config::upstream::{Server, ServiceSource};
use transom_limiter::handles::IdVec;
use transom_runtime::metrics::Registry;
use transom_runtime::metrics::upstream::ServiceMetrics;

/// The shortest time from one look-up to the next.
const LOOK_UP_PAUSE: Duration = Duration::from_secs(1);
const TTL_MIN: Duration = LOOK_UP_PAUSE;
/// Time from the first failure in a row to the next look-up. It doubles with each failure, up to `resolve`.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Servers of one record that are used; each has series in the metrics.
const SERVERS_MAX: usize = 1000;

/// The servers that service records list, for the main thread.
#[derive(Default)]
pub struct KnownServices {
    states: Mutex<HashMap<ServiceSource, ServiceState>>,
    /// Notified after each look-up.
    looked_up: Condvar,
    /// Notified when servers have changed.
    pub changed: Arc<Notify>,
}

#[derive(Default)]
struct ServiceState {
    servers: IdVec<ServerId, Server>,
    /// Requests a look-up before the time to live ends.
    look_up: Arc<Notify>,
    was_looked_up: bool,
    is_failing: bool,
}

impl KnownServices {
    fn lock(&self) -> MutexGuard<'_, HashMap<ServiceSource, ServiceState>> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn servers(&self, source: &ServiceSource) -> ListedServers {
        let servers = |state: &ServiceState| ListedServers {
            servers: state.servers.clone(),
            look_up: Some(Arc::clone(&state.look_up)),
        };
        self.lock().get(source).map(servers).unwrap_or_default()
    }

    /// Waits until these records were looked up, for a limited time.
    pub fn wait_until_looked_up(&self, sources: &[ServiceSource], limit: Duration) {
        let is_waiting = |states: &mut HashMap<ServiceSource, ServiceState>| {
            let was_looked_up = |source| states.get(source).is_some_and(|state: &ServiceState| state.was_looked_up);
            !sources.iter().all(was_looked_up)
        };
        // A record that is still not known is logged when its look-up fails.
        drop(self.looked_up.wait_timeout_while(self.lock(), limit, is_waiting));
    }

    fn update(&self, source: &ServiceSource, found: Result<Found, LookUpError>) {
        let mut states = self.lock();
        let Some(state) = states.get_mut(source) else { return };
        let is_first = !std::mem::replace(&mut state.was_looked_up, true);
        let service = &*source.name;
        match found {
            Ok(found) => {
                if std::mem::replace(&mut state.is_failing, false) {
                    tracing::info!(service, "the service record is found again");
                }
                let servers = servers_of(source, found.records);
                if state.servers != servers {
                    if !is_first {
                        tracing::info!(service, servers = servers.len(), "the servers of the service have changed");
                    }
                    state.servers = servers;
                    self.changed.notify_one();
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut state.is_failing, true) {
                    let kept = state.servers.len();
                    tracing::warn!(
                        service,
                        kept,
                        "the service record cannot be looked up, the last servers stay in use: {error}"
                    );
                }
            }
        }
        drop(states);
        self.looked_up.notify_all();
    }
}

/// The task that follows a record.
struct Follower(JoinHandle<()>);

impl Drop for Follower {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Follows the records of the latest `sources`, until their sender is dropped.
pub async fn run(mut sources: watch::Receiver<Vec<ServiceSource>>, known: Arc<KnownServices>, registry: Arc<Registry>) {
    let mut followers: HashMap<ServiceSource, Follower> = HashMap::new();
    loop {
        let current = sources.borrow_and_update().clone();
        followers.retain(|source, _| current.contains(source));
        known.lock().retain(|source, _| current.contains(source));
        for source in current {
            if let Entry::Vacant(entry) = followers.entry(source) {
                let source = entry.key().clone();
                let look_up = Arc::clone(&known.lock().entry(source.clone()).or_default().look_up);
                let metrics = ServiceMetrics::new(&registry, &source.name);
                entry.insert(Follower(spawn_local(follow(source, Arc::clone(&known), look_up, metrics))));
            }
        }
        if sources.changed().await.is_err() {
            return;
        }
    }
}

async fn follow(source: ServiceSource, known: Arc<KnownServices>, look_up: Arc<Notify>, metrics: ServiceMetrics) {
    let longest = source.resolve.max(TTL_MIN);
    let mut retry_after = RETRY_AFTER;
    loop {
        let found = dns_client::look_up(&source.dns_servers, &source.name, RecordType::Srv).await;
        metrics.looked_up(found.is_ok());
        let pause = match &found {
            Ok(found) => {
                retry_after = RETRY_AFTER;
                found.ttl.clamp(TTL_MIN, longest)
            }
            Err(_) => {
                let longer = (retry_after * 2).min(longest);
                std::mem::replace(&mut retry_after, longer)
            }
        };
        known.update(&source, found);
        sleep(LOOK_UP_PAUSE).await;
        // After that, a request for a look-up ends the pause.
        let _ = timeout(pause.saturating_sub(LOOK_UP_PAUSE), look_up.notified()).await;
    }
}

/// The servers that records list, in an order that does not depend on that of the records. The smallest priority becomes 0.
fn servers_of(source: &ServiceSource, records: Vec<Record>) -> IdVec<ServerId, Server> {
    let service = |record| match record {
        // Without a target, the service is not available.
        Record::Service(record) if !record.target.is_empty() => Some(record),
        Record::Service(_) | Record::Address(_) => None,
    };
    let mut records: Vec<ServiceRecord> = records.into_iter().filter_map(service).collect();
    records.sort_by(|a, b| (&a.target, a.port, a.priority).cmp(&(&b.target, b.port, b.priority)));
    records.dedup_by(|a, b| (&a.target, a.port) == (&b.target, b.port));
    if records.len() > SERVERS_MAX {
        tracing::warn!(service = source.name, "the service record lists more than {SERVERS_MAX} servers");
    }
    let mut priorities: Vec<u16> = records.iter().map(|record| record.priority).collect();
    priorities.sort_unstable();
    priorities.dedup();
    let rank = |priority: u16| priorities.iter().position(|known| *known == priority).unwrap_or(0) as u16;
    let server = |record: &ServiceRecord| {
        let ServiceRecord { priority, weight, port, target } = record;
        // Weight 0 means that a server should hardly be chosen beside others.
        let server = source.server(target, *port, u32::from(*weight).max(1), rank(*priority));
        if server.is_none() {
            tracing::warn!(
                service = source.name,
                "the service record lists a server that is not valid: `{target}:{port}`"
            );
        }
        server
    };
    records.iter().take(SERVERS_MAX).filter_map(server).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use transom_config::upstream::Scheme;

    fn source() -> ServiceSource {
        let (name, dns_servers) = ("_http._tcp.api.test".to_owned(), Vec::new());
        ServiceSource { name, scheme: Scheme::Http, dns_servers, resolve: Duration::from_secs(30) }
    }

    fn found(targets: &[(&str, u16)]) -> Result<Found, LookUpError> {
        let record = |(target, port): &(&str, u16)| {
            Record::Service(ServiceRecord { priority: 0, weight: 0, port: *port, target: (*target).to_owned() })
        };
        Ok(Found { records: targets.iter().map(record).collect(), ttl: TTL_MIN })
    }

    #[test]
    fn servers_stay_while_look_ups_fail() {
        let (source, known) = (source(), KnownServices::default());
        known.lock().entry(source.clone()).or_default();
        let urls = || known.servers(&source).servers.iter().map(|server| server.url.clone()).collect::<Vec<_>>();
        known.update(&source, Err(LookUpError::NotFound));
        assert!(urls().is_empty());
        known.update(&source, found(&[("b.test", 80), ("a.test", 81), ("b.test", 80), ("", 0), ("a..b", 1)]));
        assert_eq!(urls(), ["http://a.test:81", "http://b.test:80"]);
        known.update(&source, Err(LookUpError::NotFound));
        assert_eq!(urls().len(), 2);
        // A record without a target says that there is no server.
        known.update(&source, found(&[("", 0)]));
        assert!(urls().is_empty());
        known.wait_until_looked_up(&[source], Duration::ZERO);
    }
}
