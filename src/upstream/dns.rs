//! The addresses of one server, resolved by the system's resolver on a thread of its own, or by DNS servers that the upstream
//! names.
//!
//! A name is resolved again when its addresses are older than their lifetime. New connections use current addresses
//! only, and connections to removed addresses are not reused. If resolution fails, the last known addresses stay valid:
//! a broken resolver does not take a working server out of use.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::lookup_host;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::dns_client::{self, Found, LookUpError};
use super::dns_message::{Record, RecordType};
use transom_runtime::clock::Clock;

/// How long a connection waits for a look-up after a failure. A slow resolver does not delay the use of known addresses, or of
/// another server.
const LOOK_UP_TIMEOUT: Duration = Duration::from_secs(1);

pub struct Resolver {
    host: String,
    port: u16,
    /// The host is an IP address and is not resolved.
    is_literal: bool,
    addresses: RefCell<Vec<SocketAddr>>,
    /// A connection to a known address has failed after it was opened.
    is_suspect: Cell<bool>,
    /// One task at a time resolves the name after a failure.
    turn: Arc<Semaphore>,
    /// Look-ups that have ended.
    look_ups: Cell<u64>,
    /// When the name was last resolved.
    looked_up_at: Cell<Option<Instant>>,
    /// Rotates through the known addresses.
    next_address: Cell<usize>,
    /// Incremented when a known address is removed.
    generation: Cell<u32>,
    /// How long known addresses are valid.
    lifetime: Duration,
    /// Empty: the system's resolver is used.
    dns_servers: Vec<SocketAddr>,
    clock: Clock,
}

impl Resolver {
    pub fn new(host: &str, port: u16, lifetime: Duration, dns_servers: Vec<SocketAddr>, clock: Clock) -> Rc<Resolver> {
        let address = host.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, port));
        Rc::new(Resolver {
            host: host.to_owned(),
            port,
            is_literal: address.is_some(),
            addresses: RefCell::new(address.into_iter().collect()),
            is_suspect: Cell::new(false),
            turn: Arc::new(Semaphore::new(1)),
            look_ups: Cell::new(0),
            looked_up_at: Cell::new(None),
            next_address: Cell::new(0),
            generation: Cell::new(0),
            lifetime,
            dns_servers,
            clock,
        })
    }

    /// All addresses, rotated by one with each call. Expired addresses are used once more while the name is resolved,
    /// so that only the first connection waits for the resolver.
    pub async fn rotated_addresses(self: &Rc<Self>) -> io::Result<Vec<SocketAddr>> {
        if self.addresses.borrow().is_empty() {
            self.look_up().await?;
        } else if self.is_suspect.take() {
            self.resolve_again().await;
        } else if self.is_stale() {
            self.refresh();
        }
        let mut addresses = self.addresses.borrow().clone();
        let turn = self.next_address.get();
        self.next_address.set(turn.wrapping_add(1));
        let count = addresses.len().max(1);
        addresses.rotate_left(turn % count);
        Ok(addresses)
    }

    /// Whether the known addresses have expired.
    pub fn is_stale(&self) -> bool {
        let recent = |looked_up_at: Instant| self.clock.instant().duration_since(looked_up_at) < self.lifetime;
        !self.is_literal && !self.looked_up_at.get().is_some_and(recent)
    }

    /// Resolves the name again after these addresses have failed, unless another task has just done so, and returns the addresses
    /// that are new.
    pub async fn new_addresses(self: &Rc<Self>, failed: &[SocketAddr]) -> Vec<SocketAddr> {
        if self.is_literal {
            return Vec::new();
        }
        self.resolve_again().await;
        self.addresses.borrow().iter().filter(|address| !failed.contains(address)).copied().collect()
    }

    /// Resolves the name, unless another task has just done so. A look-up that takes longer than the wait goes on, and its result is
    /// used later. On an error, the known addresses stay valid.
    async fn resolve_again(self: &Rc<Self>) {
        let look_ups = self.look_ups.get();
        let looking_up = async {
            let Ok(turn) = Arc::clone(&self.turn).acquire_owned().await else { return };
            if self.look_ups.get() == look_ups {
                let resolver = Rc::clone(self);
                let task = tokio::task::spawn_local(async move {
                    let _turn = turn;
                    resolver.look_up().await
                });
                let _ = task.await;
            }
        };
        let _ = timeout(LOOK_UP_TIMEOUT, looking_up).await;
    }

    /// A connection has failed after it was opened, and its address may be that of another server now: resolves the name before the
    /// next connection.
    pub fn mark_suspect(&self) {
        self.is_suspect.set(!self.is_literal);
    }

    /// Resolves the name in the background.
    pub fn refresh(self: &Rc<Self>) {
        let resolver = Rc::clone(self);
        tokio::task::spawn_local(async move {
            // On an error, the known addresses stay valid.
            let _ = resolver.look_up().await;
        });
    }

    async fn look_up(&self) -> io::Result<()> {
        // Set first, so that concurrent requests do not resolve the name too.
        self.looked_up_at.set(Some(self.clock.instant()));
        let found = match self.dns_servers.as_slice() {
            [] => lookup_host((self.host.as_str(), self.port)).await.map(Iterator::collect),
            // Boxed, because few upstreams need this.
            servers => Box::pin(self.ask(servers)).await,
        };
        self.look_ups.update(|look_ups| look_ups + 1);
        self.update(found)
    }

    /// The addresses of both families, from DNS servers.
    async fn ask(&self, servers: &[SocketAddr]) -> io::Result<Vec<SocketAddr>> {
        let ask = |record_type| dns_client::look_up(servers, &self.host, record_type);
        let (a, aaaa) = tokio::join!(ask(RecordType::A), ask(RecordType::Aaaa));
        self.of_both_families(a, aaaa)
    }

    /// A failure of one look-up keeps the known addresses of its family.
    fn of_both_families(
        &self,
        a: Result<Found, LookUpError>,
        aaaa: Result<Found, LookUpError>,
    ) -> io::Result<Vec<SocketAddr>> {
        let address = |record| match record {
            Record::Address(ip) => Some(SocketAddr::new(ip, self.port)),
            Record::Service(_) => None,
        };
        let known = self.addresses.borrow();
        let addresses = |found, is_ipv4: bool| -> Vec<SocketAddr> {
            match found {
                Ok(Found { records, .. }) => records.into_iter().filter_map(address).collect(),
                Err(LookUpError::Failed(_)) => {
                    known.iter().filter(|known| known.is_ipv4() == is_ipv4).copied().collect()
                }
                Err(LookUpError::NotFound | LookUpError::InvalidName) => Vec::new(),
            }
        };
        match (a, aaaa) {
            (Err(error), Err(_)) => Err(io::Error::other(error.to_string())),
            (a, aaaa) => Ok([addresses(a, true), addresses(aaaa, false)].concat()),
        }
    }

    fn update(&self, result: io::Result<Vec<SocketAddr>>) -> io::Result<()> {
        let mut known = self.addresses.borrow_mut();
        match result {
            Ok(addresses) if !addresses.is_empty() => {
                if known.iter().any(|address| !addresses.contains(address)) {
                    self.generation.set(self.generation.get().wrapping_add(1));
                }
                *known = addresses;
                Ok(())
            }
            result if known.is_empty() => {
                let why = result.err().map_or_else(|| String::from("it has no address"), |error| error.to_string());
                Err(io::Error::other(format!("`{}` cannot be resolved: {why}", self.host)))
            }
            _ => Ok(()),
        }
    }

    /// Changes when a known address is removed.
    pub fn generation(&self) -> u32 {
        self.generation.get()
    }

    pub fn contains(&self, address: &SocketAddr) -> bool {
        self.addresses.borrow().contains(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn resolver() -> Rc<Resolver> {
        Resolver::new("api.internal", 80, Duration::from_secs(30), Vec::new(), Clock::manual(0))
    }

    #[test]
    fn an_address_removed_from_a_name_raises_the_generation() {
        let resolver = resolver();
        let (a, b, c) = (address("10.0.0.1:80"), address("10.0.0.2:80"), address("10.0.0.3:80"));
        resolver.update(Ok(vec![a, b])).unwrap();
        resolver.update(Ok(vec![b, a, c])).unwrap();
        assert_eq!(resolver.generation(), 0, "one came, and none went");
        resolver.update(Ok(vec![c])).unwrap();
        assert!(resolver.generation() == 1 && resolver.contains(&c) && !resolver.contains(&a));
    }

    #[test]
    fn a_failed_lookup_keeps_the_known_addresses() {
        let resolver = resolver();
        let why = resolver.update(Err(io::Error::other("no server"))).unwrap_err().to_string();
        assert_eq!(why, "`api.internal` cannot be resolved: no server");
        assert!(resolver.update(Ok(Vec::new())).is_err());
        let a = address("10.0.0.1:80");
        resolver.update(Ok(vec![a])).unwrap();
        resolver.update(Err(io::Error::other("no server"))).unwrap();
        resolver.update(Ok(Vec::new())).unwrap();
        assert!(resolver.contains(&a) && resolver.generation() == 0);
    }

    #[test]
    fn a_failed_lookup_of_one_family_keeps_its_known_addresses() {
        let resolver = resolver();
        let (old, new, other) = (address("10.0.0.1:80"), address("10.0.0.2:80"), address("[fd00::1]:80"));
        resolver.update(Ok(vec![old, other])).unwrap();
        let found = || Ok(Found { records: vec![Record::Address(new.ip())], ttl: Duration::ZERO });
        let failed = || Err(LookUpError::Failed(String::from("no server")));
        assert_eq!(resolver.of_both_families(found(), failed()).unwrap(), [new, other]);
        assert_eq!(resolver.of_both_families(found(), Err(LookUpError::NotFound)).unwrap(), [new]);
        assert!(resolver.of_both_families(failed(), failed()).is_err());
    }

    #[test]
    fn a_literal_address_is_never_looked_up() {
        let resolver = Resolver::new("::1", 80, Duration::from_secs(30), Vec::new(), Clock::manual(0));
        assert!(!resolver.is_stale() && resolver.contains(&address("[::1]:80")));
        resolver.mark_suspect();
        assert!(!resolver.is_stale() && !resolver.is_suspect.get());
    }
}
