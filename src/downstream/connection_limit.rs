//! How many connections there may be: in all, and of one client.
//!
//! Loops share the counts, for a limit that each had a part of would refuse somebody while others have
//! room. They are touched when a connection is accepted and when it ends, never by a request.

use std::collections::HashMap;
use std::collections::hash_map::{Entry, RandomState};
use std::hash::BuildHasher;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::listen::Listen;
use crate::io_stream::descriptor_limit;
use transom_limiter::ip_prefix::Network;

/// How many connections there may be if nobody says so and there are descriptors for them.
const DEFAULT_MAX: u64 = 65_536;
/// Descriptors for what is no connection of a client: files, listeners, the admin address.
const RESERVED_DESCRIPTORS: u64 = 128;
/// An IPv6 client commands a network of so many bits.
const V6_PREFIX: u8 = 64;
/// Clients are counted in so many maps, so that loops seldom wait for each other.
const SHARDS: usize = 16;
/// Stands for no limit.
const UNLIMITED: u32 = u32::MAX;

#[derive(Debug)]
pub struct ConnectionLimit {
    open: AtomicUsize,
    max: AtomicUsize,
    max_per_client: AtomicU32,
    /// Where nobody can choose addresses that fall together.
    hasher: RandomState,
    clients: [Mutex<HashMap<Network, u32>>; SHARDS],
}

/// The place of one connection, until this is dropped.
#[derive(Debug)]
pub struct ConnectionSlot {
    limit: Arc<ConnectionLimit>,
    client: Option<Network>,
}

impl ConnectionLimit {
    pub fn new(listen: &Listen) -> Arc<ConnectionLimit> {
        let capacity = ConnectionLimit {
            open: AtomicUsize::new(0),
            max: AtomicUsize::new(0),
            max_per_client: AtomicU32::new(UNLIMITED),
            hasher: RandomState::new(),
            clients: Default::default(),
        };
        capacity.apply(listen);
        Arc::new(capacity)
    }

    /// Takes over other limits. Connections that are there stay.
    pub fn apply(&self, listen: &Listen) {
        // Each client may need a second descriptor, for its upstream connection.
        let fitting = (descriptor_limit().saturating_sub(RESERVED_DESCRIPTORS) / 2).clamp(1, DEFAULT_MAX);
        let max = listen.max_connections.unwrap_or(usize::try_from(fitting).unwrap_or(usize::MAX));
        if max as u64 > descriptor_limit() {
            tracing::warn!(
                "`listen.max_connections` is {max}, and the process may open {} files: raise LimitNOFILE, or `ulimit -n`",
                descriptor_limit()
            );
        }
        // Ordering: relaxed, here and below; each number means something by itself.
        self.max.store(max, Ordering::Relaxed);
        self.max_per_client.store(listen.max_connections_per_client.unwrap_or(UNLIMITED), Ordering::Relaxed);
    }

    /// A place, if there is one.
    pub fn acquire(self: &Arc<Self>) -> Option<ConnectionSlot> {
        let before = self.open.fetch_add(1, Ordering::Relaxed);
        // From here on the place is given back when it is dropped.
        let place = ConnectionSlot { limit: Arc::clone(self), client: None };
        (before < self.max.load(Ordering::Relaxed)).then_some(place)
    }

    fn shard(&self, client: &Network) -> &Mutex<HashMap<Network, u32>> {
        &self.clients[self.hasher.hash_one(client) as usize % SHARDS]
    }
}

impl ConnectionSlot {
    /// Counts the place among those of a client. `false`: it has as many as it may.
    pub fn acquire_for_client(&mut self, address: IpAddr) -> bool {
        let max = self.limit.max_per_client.load(Ordering::Relaxed);
        if max == UNLIMITED {
            return true;
        }
        let address = address.to_canonical();
        let client = Network::of(address, if address.is_ipv4() { 32 } else { V6_PREFIX });
        let mut counts = self.limit.shard(&client).lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(client).or_default();
        // One that is not there yet is let in: no limit is zero.
        if *count >= max {
            return false;
        }
        *count += 1;
        self.client = Some(client);
        true
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.limit.open.fetch_sub(1, Ordering::Relaxed);
        let Some(client) = self.client else { return };
        let mut counts = self.limit.shard(&client).lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut count) = counts.entry(client) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// Lets the process have as many descriptors as it is allowed to ask for.
pub fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
    {
        tracing::warn!(%error, "the limit of open files can not be raised");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::read;

    fn capacity(listen: &str) -> Arc<ConnectionLimit> {
        let text = format!(
            "[listen]\n{listen}\n[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/\"\nupstream = \"u\"\n"
        );
        ConnectionLimit::new(&read(&text).unwrap().listen)
    }

    #[test]
    fn a_place_that_is_given_back_can_be_taken_again() {
        let capacity = capacity("max_connections = 2");
        let first = capacity.acquire().unwrap();
        let _second = capacity.acquire().unwrap();
        assert!(capacity.acquire().is_none() && capacity.acquire().is_none());
        drop(first);
        let _third = capacity.acquire().unwrap();
        assert!(capacity.acquire().is_none());
    }

    #[test]
    fn clients_are_counted_by_address_or_network() {
        let capacity = capacity("max_connections_per_client = 1");
        let mut places = Vec::new();
        let mut enter = |address: &str| {
            let mut place = capacity.acquire().unwrap();
            let free = place.acquire_for_client(address.parse().unwrap());
            places.push(place);
            free
        };
        assert!(enter("192.0.2.1") && enter("192.0.2.2") && !enter("192.0.2.1") && !enter("::ffff:192.0.2.1"));
        assert!(enter("2001:db8::1") && !enter("2001:db8::2") && enter("2001:db8:0:1::1"));
        drop(places);
        assert!(capacity.clients.iter().all(|counts| counts.lock().unwrap().is_empty()));
        assert_eq!(capacity.open.load(Ordering::Relaxed), 0);
    }
}
