//! Follows the service records (SRV, RFC 2782) that upstreams name, in a thread of its own.
//!
//! A record is looked up again when its time to live ends, and after a failure to connect to a server. The servers that it
//! lists stay in use while look-ups fail, and also when the record no longer exists: a broken DNS server takes no working
//! server out of use. The main thread gives changed servers to the workers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{sleep, timeout};

use super::dns_client::{self, Found, LookUpError};
use super::dns_message::{Record, RecordType, ServiceRecord};
use super::server_health::ListedServers;
use transom_config::ServerId;
use transom_config::upstream::{Server, ServiceSource};
use transom_limiter::handles::IdVec;
use transom_runtime::clock::Clock;
use transom_runtime::metrics::Registry;
use transom_runtime::metrics::upstream::ServiceMetrics;

/// The shortest time from one look-up to the next.
const LOOK_UP_PAUSE: Duration = Duration::from_secs(1);
const TTL_MIN: Duration = LOOK_UP_PAUSE;
/// Time from the first failure in a row to the next look-up. It doubles with each failure, up to `resolve`.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Servers of one record that are used; each has series in the metrics.
const SERVERS_MAX: usize = 1000;
/// Messages about one record that may be logged at once, and the time after which one more may be: a record that changes with
/// each look-up does not flood the log.
const MESSAGES_MAX: u32 = 4;
const MESSAGE_INTERVAL: Duration = Duration::from_secs(60);

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
    log: ServiceLog,
}

/// What the log says about a record. Messages that have to wait are logged later if they still apply.
#[derive(Default)]
struct ServiceLog {
    is_failing: bool,
    /// Why servers of the record are not used.
    refused: Option<String>,
    /// Changes of the servers since the last message about them.
    changes: u64,
    /// Of messages, up to `MESSAGES_MAX`.
    spent: u32,
    /// When the last one was restored.
    restored_at: Option<Instant>,
}

impl ServiceLog {
    /// Whether one more message may be logged.
    fn allow(&mut self, now: Instant) -> bool {
        let since = *self.restored_at.get_or_insert(now);
        let restored = now.saturating_duration_since(since).as_secs() / MESSAGE_INTERVAL.as_secs();
        let restored = u32::try_from(restored).unwrap_or(u32::MAX);
        self.spent = self.spent.saturating_sub(restored);
        self.restored_at = Some(if self.spent == 0 { now } else { since + MESSAGE_INTERVAL * restored });
        let is_allowed = self.spent < MESSAGES_MAX;
        self.spent += u32::from(is_allowed);
        is_allowed
    }

    fn failed(&mut self, service: &str, kept: usize, error: &LookUpError, now: Instant) {
        if !self.is_failing && self.allow(now) {
            self.is_failing = true;
            tracing::warn!(
                service,
                kept,
                "the service record cannot be looked up, the last servers stay in use: {error}"
            );
        }
    }

    fn found(&mut self, service: &str, listed: &Listed, now: Instant) {
        if self.is_failing && self.allow(now) {
            self.is_failing = false;
            tracing::info!(service, "the service record is found again");
        }
        if self.changes > 0 && self.allow(now) {
            let (changes, servers) = (std::mem::take(&mut self.changes), listed.servers.len());
            tracing::info!(service, servers, changes, "the servers of the service have changed");
        }
        match &listed.refused {
            None => self.refused = None,
            Some(refused) if self.refused != listed.refused && self.allow(now) => {
                tracing::warn!(service, "{refused}");
                self.refused.clone_from(&listed.refused);
            }
            Some(_) => {}
        }
    }
}

/// What a record lists.
struct Listed {
    servers: IdVec<ServerId, Server>,
    /// Why not all servers are used.
    refused: Option<String>,
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

    fn update(&self, source: &ServiceSource, found: Result<Found, LookUpError>, now: Instant) {
        let mut states = self.lock();
        let Some(state) = states.get_mut(source) else { return };
        let is_first = !std::mem::replace(&mut state.was_looked_up, true);
        match found {
            Ok(found) => {
                let listed = servers_of(source, found.records);
                let has_changed = state.servers != listed.servers;
                state.log.changes += u64::from(has_changed && !is_first);
                state.log.found(&source.name, &listed, now);
                if has_changed {
                    state.servers = listed.servers;
                    self.changed.notify_one();
                }
            }
            Err(error) => state.log.failed(&source.name, state.servers.len(), &error, now),
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
pub async fn run(
    mut sources: watch::Receiver<Vec<ServiceSource>>,
    known: Arc<KnownServices>,
    registry: Arc<Registry>,
    clock: Clock,
) {
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
                let following = follow(source, Arc::clone(&known), look_up, metrics, clock.clone());
                entry.insert(Follower(spawn_local(following)));
            }
        }
        if sources.changed().await.is_err() {
            return;
        }
    }
}

async fn follow(
    source: ServiceSource,
    known: Arc<KnownServices>,
    look_up: Arc<Notify>,
    metrics: ServiceMetrics,
    clock: Clock,
) {
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
        known.update(&source, found, clock.instant());
        sleep(LOOK_UP_PAUSE).await;
        // After that, a request for a look-up ends the pause.
        let _ = timeout(pause.saturating_sub(LOOK_UP_PAUSE), look_up.notified()).await;
    }
}

/// The servers that records list, in an order that does not depend on that of the records. The smallest priority becomes 0.
fn servers_of(source: &ServiceSource, records: Vec<Record>) -> Listed {
    let service = |record| match record {
        // Without a target, the service is not available.
        Record::Service(record) if !record.target.is_root() => Some(record),
        Record::Service(_) | Record::Address(_) => None,
    };
    let mut records: Vec<ServiceRecord> = records.into_iter().filter_map(service).collect();
    records.sort_by(|a, b| (&a.target, a.port, a.priority).cmp(&(&b.target, b.port, b.priority)));
    records.dedup_by(|a, b| (&a.target, a.port) == (&b.target, b.port));
    let mut refused = (records.len() > SERVERS_MAX)
        .then(|| format!("the service record lists more than {SERVERS_MAX} servers, the others are not used"));
    let mut priorities: Vec<u16> = records.iter().map(|record| record.priority).collect();
    priorities.sort_unstable();
    priorities.dedup();
    let rank = |priority: u16| priorities.iter().position(|known| *known == priority).unwrap_or(0) as u16;
    let mut servers = IdVec::default();
    for ServiceRecord { priority, weight, port, target } in records.iter().take(SERVERS_MAX) {
        // Weight 0 means that a server should hardly be chosen beside others.
        let server = |host: String| source.server(&host, *port, u32::from(*weight).max(1), rank(*priority));
        match target.to_host().and_then(server) {
            Some(server) => {
                servers.push(server);
            }
            None => {
                let invalid = || format!("the service record lists a server that is not valid: `{target}:{port}`");
                refused.get_or_insert_with(invalid);
            }
        }
    }
    Listed { servers, refused }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::upstream::dns_message::Name;
    use transom_config::upstream::Scheme;

    fn start() -> Instant {
        Clock::manual(0).instant()
    }

    fn source() -> ServiceSource {
        let (name, dns_servers) = ("_http._tcp.api.test".to_owned(), Vec::new());
        ServiceSource { name, scheme: Scheme::Http, dns_servers, resolve: Duration::from_secs(30) }
    }

    fn found(targets: &[(&str, u16)]) -> Result<Found, LookUpError> {
        let record = |(target, port): &(&str, u16)| {
            Record::Service(ServiceRecord { priority: 0, weight: 0, port: *port, target: Name::of(target) })
        };
        Ok(Found { records: targets.iter().map(record).collect(), ttl: TTL_MIN })
    }

    #[test]
    fn servers_stay_while_look_ups_fail() {
        let (source, known) = (source(), KnownServices::default());
        known.lock().entry(source.clone()).or_default();
        let urls = || known.servers(&source).servers.iter().map(|server| server.url.clone()).collect::<Vec<_>>();
        let update = |found| known.update(&source, found, start());
        update(Err(LookUpError::NotFound));
        assert!(urls().is_empty());
        update(found(&[("b.test", 80), ("a.test", 81), ("b.test", 80), ("", 0), ("127.0.0", 1)]));
        assert_eq!(urls(), ["http://a.test:81", "http://b.test:80"]);
        update(Err(LookUpError::NotFound));
        assert_eq!(urls().len(), 2);
        // A record without a target says that there is no server.
        update(found(&[("", 0)]));
        assert!(urls().is_empty());
        known.wait_until_looked_up(&[source], Duration::ZERO);
    }

    #[test]
    fn names_that_are_not_those_of_hosts_are_refused_and_escaped() {
        let refused = |target: &str| {
            let listed = servers_of(&source(), found(&[("a.test", 80), (target, 80)]).unwrap().records);
            let urls: Vec<_> = listed.servers.iter().map(|server| server.url.as_str()).collect();
            assert_eq!(urls, ["http://a.test:80"], "{target:?}");
            listed.refused.unwrap()
        };
        let named = |name| format!("the service record lists a server that is not valid: `{name}:80`");
        for (target, name) in [
            ("x y.test", r"x\032y.test"),
            ("x/y", "x/y"),
            ("x@y", "x@y"),
            ("x:1", "x:1"),
            ("x\r\nhost: y", r"x\013\010host:\032y"),
            ("x\u{1b}[31m", r"x\027[31m"),
            ("x`y", r"x\`y"),
            ("\u{e4}.test", r"\195\164.test"),
            ("127.0.0", "127.0.0"),
            ("_http._tcp.a.test", "_http._tcp.a.test"),
        ] {
            assert_eq!(refused(target), named(name));
        }
    }

    /// Servers that are not valid appear and disappear. Only messages count.
    #[test]
    fn servers_that_are_valid_again_are_no_message() {
        let (mut log, start) = (ServiceLog::default(), start());
        for targets in [[("x/y", 80)], [("a.test", 80)], [("x/y", 80)], [("a.test", 80)]] {
            log.found("", &servers_of(&source(), found(&targets).unwrap().records), start);
        }
        assert_eq!((log.refused, log.spent), (None, 2));
    }

    /// What a record that changes with each look-up writes to the log in an hour.
    #[test]
    fn a_record_that_changes_again_and_again_does_not_flood_the_log() {
        let (mut log, start) = (ServiceLog::default(), start());
        let at = |second| start + Duration::from_secs(second);
        let allowed: Vec<u64> = (0..600).filter(|second| log.allow(at(*second))).collect();
        assert_eq!(allowed, [0, 1, 2, 3, 60, 120, 180, 240, 300, 360, 420, 480, 540]);
        // The first ones after a quiet time are logged at once.
        let allowed: Vec<u64> = (1200..1230).filter(|second| log.allow(at(*second))).collect();
        assert_eq!(allowed, [1200, 1201, 1202, 1203]);

        let (source, known) = (source(), KnownServices::default());
        known.lock().entry(source.clone()).or_default();
        let is_failing = || known.lock()[&source].log.is_failing;
        let mut messages = 0;
        for second in 0..601 {
            let was_failing = is_failing();
            let found = if second % 2 == 0 { Err(LookUpError::NotFound) } else { found(&[("a.test", 80)]) };
            known.update(&source, found, at(second));
            messages += u32::from(is_failing() != was_failing);
        }
        // Four at once, then one in each minute; in the last second the state is the one that was logged last.
        assert_eq!(messages, MESSAGES_MAX + 9);
        // The last state is logged, if only later.
        (601..720).for_each(|second| known.update(&source, Err(LookUpError::NotFound), at(second)));
        assert!(is_failing());
    }
}
