//! Limits on open connections: in total, and per client.
//!
//! Workers share the counts: with a share of the limit each, one worker would refuse clients while others have free slots.
//! The counts are touched when a connection is accepted and when it ends, never by a request.

use std::collections::HashMap;
use std::collections::hash_map::{Entry, RandomState};
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::io_stream::descriptor_limit;
use transom_config::listen::Listen;
use transom_http::client_address::ClientAddress;

/// The default of `max_connections`, if the process may open enough descriptors.
const DEFAULT_MAX: u64 = 65_536;
/// Descriptors reserved for files, listeners and the admin address.
const RESERVED_DESCRIPTORS: u64 = 128;
/// Clients are counted in several maps, so that workers rarely wait for each other.
const SHARDS: usize = 16;
/// Value of `max_per_client` for no limit.
const UNLIMITED: u32 = u32::MAX;

#[derive(Debug)]
pub struct ConnectionLimit {
    open: AtomicUsize,
    max: AtomicUsize,
    max_per_client: AtomicU32,
    /// Randomly seeded, so that clients cannot choose addresses that share a map.
    hasher: RandomState,
    clients: [Mutex<HashMap<ClientAddress, u32>>; SHARDS],
}

/// One counted connection. Dropping the slot frees it.
#[derive(Debug)]
pub struct ConnectionSlot {
    limit: Arc<ConnectionLimit>,
    client: Option<ClientAddress>,
}

impl ConnectionLimit {
    pub fn new(listen: &Listen) -> Arc<ConnectionLimit> {
        let limit = ConnectionLimit {
            open: AtomicUsize::new(0),
            max: AtomicUsize::new(0),
            max_per_client: AtomicU32::new(UNLIMITED),
            hasher: RandomState::new(),
            clients: Default::default(),
        };
        limit.apply(listen);
        Arc::new(limit)
    }

    /// Applies the limits of a configuration. Open connections stay open.
    pub fn apply(&self, listen: &Listen) {
        // Each client may need a second descriptor, for its upstream connection.
        let default = (descriptor_limit().saturating_sub(RESERVED_DESCRIPTORS) / 2).clamp(1, DEFAULT_MAX);
        let max = listen.max_connections.unwrap_or(usize::try_from(default).unwrap_or(usize::MAX));
        if max as u64 > descriptor_limit() {
            tracing::warn!(
                "`listen.max_connections` is {max}, but the process may open only {} files; raise LimitNOFILE or `ulimit -n`",
                descriptor_limit()
            );
        }
        // Ordering: relaxed, here and below; each number is used independently of other memory.
        self.max.store(max, Ordering::Relaxed);
        self.max_per_client.store(listen.max_connections_per_client.unwrap_or(UNLIMITED), Ordering::Relaxed);
    }

    /// Counts a connection. `None`: the limit is reached.
    pub fn acquire(self: &Arc<Self>) -> Option<ConnectionSlot> {
        let before = self.open.fetch_add(1, Ordering::Relaxed);
        // Dropping the slot takes the connection off the count again.
        let slot = ConnectionSlot { limit: Arc::clone(self), client: None };
        (before < self.max.load(Ordering::Relaxed)).then_some(slot)
    }

    fn shard(&self, client: &ClientAddress) -> &Mutex<HashMap<ClientAddress, u32>> {
        &self.clients[self.hasher.hash_one(client) as usize % SHARDS]
    }
}

impl ConnectionSlot {
    /// Counts the slot for its client, which is a network of IPv6. `false`: the client has as many connections as it may.
    pub fn acquire_for_client(&mut self, address: ClientAddress) -> bool {
        let max = self.limit.max_per_client.load(Ordering::Relaxed);
        if max == UNLIMITED {
            return true;
        }
        let client = address.client_network();
        let mut counts = self.limit.shard(&client).lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(client).or_default();
        // A client without an entry is always below the limit: no limit is zero.
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

/// Raises the soft limit of open files to the hard limit.
pub fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
    {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use transom_config::read;

    fn limit(listen: &str) -> Arc<ConnectionLimit> {
        let text = format!(
            "[listen]\n{listen}\n[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/\"\nupstream = \"u\"\n"
        );
        ConnectionLimit::new(&read(&text).unwrap().listen)
    }

    #[test]
    fn a_freed_slot_can_be_acquired_again() {
        let limit = limit("max_connections = 2");
        let first = limit.acquire().unwrap();
        let _second = limit.acquire().unwrap();
        assert!(limit.acquire().is_none() && limit.acquire().is_none());
        drop(first);
        let _third = limit.acquire().unwrap();
        assert!(limit.acquire().is_none());
    }

    #[test]
    fn clients_are_counted_by_address_or_network() {
        let limit = limit("max_connections_per_client = 1");
        let mut slots = Vec::new();
        let mut enter = |address: &str| {
            let mut slot = limit.acquire().unwrap();
            let free = slot.acquire_for_client(address.parse().unwrap());
            slots.push(slot);
            free
        };
        assert!(enter("192.0.2.1") && enter("192.0.2.2") && !enter("192.0.2.1") && !enter("::ffff:192.0.2.1"));
        assert!(enter("unix:") && !enter("unix:"));
        assert!(enter("2001:db8::1") && !enter("2001:db8::2") && enter("2001:db8:0:1::1"));
        drop(slots);
        assert!(limit.clients.iter().all(|counts| counts.lock().unwrap().is_empty()));
        assert_eq!(limit.open.load(Ordering::Relaxed), 0);
    }
}
