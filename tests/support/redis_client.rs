//! A Redis client of one worker, called directly by tests of shared counters.

use std::rc::Rc;
use std::time::Duration;

use tokio::runtime::{Builder, LocalOptions};
use transom::config::redis::{Node, Nodes, StoreConfig};
use transom::redis_store::client::{RedisClient, StoreError};
use transom::redis_store::scripts::{AcquireReply, CounterReply, CounterRequest, WindowRef};

use super::DEADLINE;
use super::load_checker::now_ms;
use super::redis::RedisServer;

pub fn tcp_node(port: u16) -> Node {
    Node::Tcp { host: "127.0.0.1".to_owned(), port }
}

pub fn single_server(redis: &RedisServer) -> StoreConfig {
    StoreConfig::with_defaults(Nodes::Single(tcp_node(redis.port)))
}

/// Runs a test on an event loop like that of a worker.
pub fn run_on_worker<T>(test: impl Future<Output = T>) -> T {
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default()).unwrap();
    runtime.block_on(async { tokio::time::timeout(3 * DEADLINE, test).await.expect("the test ends") })
}

/// One token, or none, of a plain window that is open for a minute more.
pub fn plain_request(base: &str, number: u64, limit: u32) -> CounterRequest {
    let end_ms = now_ms() + 60_000;
    let at = WindowRef::Plain { number, end_ms, next_end_ms: end_ms + 60_000 };
    counter_request(base, at, limit)
}

pub fn grid_request(base: &str, number: u64, limit: u32) -> CounterRequest {
    let end_ms = now_ms() + 60_000;
    counter_request(base, WindowRef::Grid { number, end_ms, next_end_ms: end_ms + 60_000 }, limit)
}

pub fn floating_request(base: &str, period_ms: u64, limit: u32) -> CounterRequest {
    counter_request(base, WindowRef::Floating { period_ms }, limit)
}

fn counter_request(base: &str, at: WindowRef, limit: u32) -> CounterRequest {
    CounterRequest {
        base: Rc::from(base),
        window: at,
        limit,
        ceiling: u64::from(limit),
        need: 1,
        want: 1,
        used_min: 0,
        computed_ms: 0,
    }
}

/// How it went for each counter: granted or refused.
pub fn expect_granted(response: AcquireReply) -> Vec<CounterReply> {
    match response {
        AcquireReply::Granted { counters: took, .. } => took,
        other => panic!("{other:?}"),
    }
}

pub fn expect_refused(response: AcquireReply) -> Vec<CounterReply> {
    match response {
        AcquireReply::Refused { counters: took, .. } => took,
        other => panic!("{other:?}"),
    }
}

/// Repeats the call until there is a reply of any kind.
pub async fn acquire_with_retries(store: &RedisClient, wants: &[CounterRequest]) -> AcquireReply {
    let start = std::time::Instant::now();
    loop {
        match store.acquire(wants, 0).await {
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
    /// Whether they were counted is not known.
    pub unknown: u64,
}

impl CallOutcomes {
    pub fn add(&mut self, said: &Result<AcquireReply, StoreError>) {
        match said {
            Ok(AcquireReply::Granted { .. }) => self.granted += 1,
            Ok(_) => self.refused += 1,
            Err(_) => self.unknown += 1,
        }
    }

    /// Nothing was counted twice, and nothing was forgotten.
    #[track_caller]
    pub fn assert_consistent_with(&self, counted: u64) {
        assert!((self.granted..=self.granted + self.unknown).contains(&counted), "{counted} counted: {self:?}");
    }
}
