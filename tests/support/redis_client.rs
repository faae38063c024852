//! A Redis client of one worker, called directly by tests of shared counters.

use std::rc::Rc;
use std::time::Duration;

use tokio::runtime::{Builder, LocalOptions};
use transom_config::redis::{Node, Nodes, StoreConfig};
use transom_limiter::store_key::StoreWindow;
use transom_limiter::window_kind::WindowKind;
use transom_store::client::{RedisClient, StoreError};
use transom_store::scripts::{AcquireReply, CounterReply, CounterRequest};

use super::DEADLINE;
use super::load_checker::now_ms;
use super::redis::RedisServer;

pub fn tcp_node(port: u16) -> Node {
    Node::Tcp { host: "127.0.0.1".to_owned(), port }
}

pub fn single_server(redis: &RedisServer) -> StoreConfig {
    StoreConfig::with_defaults(Nodes::Single(tcp_node(redis.port)))
}

/// Runs a test on a runtime like that of a worker.
pub fn run_on_worker<T>(test: impl Future<Output = T>) -> T {
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default()).unwrap();
    runtime.block_on(async { tokio::time::timeout(3 * DEADLINE, test).await.expect("the test ends") })
}

/// A request for one token of a plain window that is open for another minute.
pub fn plain_request(base: &str, number: u64, limit: u32) -> CounterRequest {
    let end_ms = now_ms() + 60_000;
    let window = StoreWindow { kind: WindowKind::Plain, number, end_ms, next_end_ms: end_ms + 60_000 };
    counter_request(base, window, limit)
}

pub fn grid_request(base: &str, number: u64, limit: u32) -> CounterRequest {
    let request = plain_request(base, number, limit);
    CounterRequest { window: StoreWindow { kind: WindowKind::Accumulating, ..request.window }, ..request }
}

pub fn floating_request(base: &str, period_ms: u64, limit: u32) -> CounterRequest {
    counter_request(base, StoreWindow::floating(period_ms), limit)
}

fn counter_request(base: &str, window: StoreWindow, limit: u32) -> CounterRequest {
    CounterRequest {
        key_base: Rc::from(base),
        window,
        limit,
        ceiling: u64::from(limit),
        need: 1,
        want: 1,
        used_min: 0,
        need_once_refused: 0,
        reserved_after_ms: 0,
        refund_used_max: None,
        counter: None,
        computed_ms: 0,
        generation: 0,
    }
}

/// The replies for each counter of a granted request.
pub fn expect_granted(response: AcquireReply) -> Vec<CounterReply> {
    match response {
        AcquireReply::Granted { counters, .. } => counters,
        other => panic!("{other:?}"),
    }
}

/// The replies for each counter of a refused request.
pub fn expect_refused(response: AcquireReply) -> Vec<CounterReply> {
    match response {
        AcquireReply::Refused { counters, .. } => counters,
        other => panic!("{other:?}"),
    }
}

/// Repeats the call until the store replies, whether granted or refused.
pub async fn acquire_with_retries(store: &RedisClient, requests: &[CounterRequest]) -> AcquireReply {
    let start = std::time::Instant::now();
    loop {
        match store.acquire(requests, 0).await {
            Ok(response) => return response,
            Err(StoreError::Key(why)) => panic!("{why}"),
            Err(StoreError::Unreachable(why)) => assert!(start.elapsed() < DEADLINE, "{why}"),
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// The results of many calls for one token.
#[derive(Default, Debug)]
pub struct CallOutcomes {
    pub granted: u64,
    pub refused: u64,
    /// Calls without a reply: they may have been counted.
    pub unknown: u64,
}

impl CallOutcomes {
    pub fn add(&mut self, result: &Result<AcquireReply, StoreError>) {
        match result {
            Ok(AcquireReply::Granted { .. }) => self.granted += 1,
            Ok(_) => self.refused += 1,
            Err(_) => self.unknown += 1,
        }
    }

    /// Checks the count of the store: no granted call is missing, and no call is counted twice.
    #[track_caller]
    pub fn assert_consistent_with(&self, counted: u64) {
        assert!((self.granted..=self.granted + self.unknown).contains(&counted), "{counted} counted: {self:?}");
    }
}
