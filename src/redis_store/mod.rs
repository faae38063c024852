//! Counters that several gateways share, in Redis or Valkey.
//!
//! `script` is what a server is asked to do, `store` who is asked, over connections (`dial`, `line`, `link`; `queue` puts calls
//! together, `ration` is how much may be answered) to one server, to the master that `sentinel`s know, or to the nodes of a
//! `cluster` by the `slot` of a key. `leases` keeps which tokens were fetched and how many to fetch next, `flight` fetches
//! them, `errand` works out what for, `outage` is about when nobody can be asked and what was counted meanwhile. `inquiry` is
//! the decision about one request, as far as it has to wait for an answer, `supply` how it comes to what it lacks, `place`
//! what the store decides for it itself, `consult` decisions for those who ask without a request. `survey` asks servers what
//! they are before they are relied upon, and `health` says what follows from it. `eviction` warns of servers that evict
//! counters while the gateway runs.
//!
//! Each event loop has all of this for itself; what was fetched lies in the table that they have in common. This
//! room does not know HTTP, nor what a route is.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock::Clock;
use crate::config::redis::Shared as Settings;
use crate::metrics::redis::StoreMetrics;
use circuit_breaker::{Breaker, UnreportedUsage};
use client::RedisClient;
use lease_sizing::Leases;
use transom_limiter::deferred_refunds::DeferredRefunds;
use transom_limiter::store_key::counter_name;
use transom_limiter::table::Table;

pub mod admin_queries;
mod batch;
mod circuit_breaker;
pub mod client;
mod cluster;
mod connect;
mod connection;
pub mod decision;
pub mod diagnose;
pub mod diagnose_rules;
mod eviction;
mod exact_mode;
mod fetch_request;
mod hash_slot;
pub mod lease_sizing;
mod read_limit;
mod reconnecting;
pub mod scripts;
mod sentinel;
mod token_fetch;
mod token_wait;

/// How often leases that lie idle are looked for.
pub const SWEEP: Duration = Duration::from_secs(1);
/// How long it may take at the end to return all that was fetched.
const FAREWELL: Duration = Duration::from_secs(2);

/// What one event loop knows of the counters that are shared.
pub struct Shared {
    pub(crate) store: RedisClient,
    table: Arc<Table>,
    clock: Clock,
    timeout: Duration,
    prefix: String,
    leases: Leases,
    breaker: Breaker,
    debts: UnreportedUsage,
    abandoned: Arc<DeferredRefunds>,
    meter: StoreMetrics,
    /// Which shard of a split counter this loop asks first.
    own_shard: u32,
    /// As of which time, Unix milliseconds, the store may not know what was counted before: it is another server, or
    /// the connection is new.
    doubtful_ms: Cell<u64>,
    generation: Cell<u64>,
    complained: Cell<Option<Instant>>,
}

impl Shared {
    pub fn new(
        settings: &Settings,
        table: Arc<Table>,
        clock: Clock,
        abandoned: Arc<DeferredRefunds>,
        meter: StoreMetrics,
    ) -> Rc<Shared> {
        Rc::new(Shared {
            store: RedisClient::new(settings),
            table,
            clock,
            timeout: settings.timeout,
            prefix: settings.prefix.clone(),
            leases: Leases::default(),
            breaker: Breaker::default(),
            debts: UnreportedUsage::default(),
            abandoned,
            meter,
            own_shard: fastrand::u32(..),
            doubtful_ms: Cell::new(0),
            generation: Cell::new(0),
            complained: Cell::new(None),
        })
    }

    /// Does what is to be done now and then, until the task is dropped: reaches out before the first request asks, returns
    /// leases that lie idle, tells what was counted without the store, and looks after servers that evict.
    pub async fn run(self: Rc<Self>) {
        self.reach_out();
        loop {
            tokio::time::sleep(SWEEP).await;
            self.return_idle(false).await;
            self.report_arrears().await;
            self.watch_eviction();
        }
    }

    /// Returns all that was fetched and not spent, as far as the store takes it soon.
    pub async fn close(self: &Rc<Self>) {
        let farewell = async {
            self.report_arrears().await;
            self.return_idle(true).await;
        };
        if tokio::time::timeout(FAREWELL, farewell).await.is_err() {
            tracing::warn!("tokens that were leased are not returned: shared counters can not be reached");
        }
    }

    /// The counter in the store for a key, in one of its shards.
    fn base(&self, text: &str, suffix: &str, shard: u32) -> Rc<str> {
        counter_name(&self.prefix, text, shard, suffix).into()
    }
}
