//! The scripts of shared counters on a real server, action by action beside counters in memory that are plainly right.

use std::collections::HashMap;
use std::rc::Rc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use redis::Commands;
use transom::redis_store::client::RedisClient;
use transom::redis_store::scripts::{AcquireReply, CounterReply, CounterRequest, KeyFormat, Refund, WindowRef};

use crate::support::redis::RedisServer;
use crate::support::redis_client::{floating_request, grid_request, plain_request, run_on_worker, single_server};

const BASES: [&str; 4] = ["t:{plain}:minute", "t:{plain}:hour", "t:{grid}", "t:{floats}"];
const KINDS: [KeyFormat; 4] = [KeyFormat::Plain, KeyFormat::Plain, KeyFormat::Grid, KeyFormat::Floating];
const LIMITS: [u32; 4] = [10, 25, 7, 5];
const PERIOD_MS: u64 = 10_000;

/// One thing that happens.
#[derive(Clone, Debug)]
enum Action {
    /// For each named counter: need, want, least, and the usage allowed beyond the limit.
    Take(Vec<(usize, u64, u64, u64, u64)>),
    /// Refunds some of the tokens of an earlier action; only if no later charge exists.
    Give { taken: usize, tokens: u64, only: bool },
    /// So many windows pass; as much of a window that floats, in milliseconds.
    Pass { windows: u64, ms: u64 },
    /// A foreign write to a plain counter.
    Write { counter: usize, value: i64 },
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let least = prop_oneof![5 => Just(0u64), 1 => 0..20u64];
    let ask = (0..4usize, 0..6u64, 0..12u64, least, prop_oneof![2 => Just(0u64), 1 => 0..30u64]);
    let asks = proptest::collection::btree_map(0..4usize, ask, 1..5);
    let take =
        asks.prop_map(|asks| Action::Take(asks.into_iter().map(|(at, (_, n, w, l, c))| (at, n, w, l, c)).collect()));
    let give =
        (0..8usize, 0..12u64, any::<bool>()).prop_map(|(taken, tokens, only)| Action::Give { taken, tokens, only });
    let pass = (0..4u64, 0..25_000u64).prop_map(|(windows, ms)| Action::Pass { windows, ms });
    let write = (0..2usize, -5..40i64).prop_map(|(counter, value)| Action::Write { counter, value });
    let action = prop_oneof![8 => take, 3 => give, 3 => pass, 1 => write];
    proptest::collection::vec(action, 1..40)
}

/// A counter as it is meant to be.
#[derive(Clone, Copy, Default, Debug)]
struct Counter {
    used: u64,
    /// The window that `used` is about; of one that floats, its start.
    mark: u64,
    exists: bool,
}

struct Oracle {
    window: u64,
    counters: HashMap<(usize, u64), Counter>,
}

impl Oracle {
    /// Which counter is open: of plain ones each window has its own.
    fn place(&self, at: usize) -> (usize, u64) {
        (at, if KINDS[at] == KeyFormat::Plain { self.window } else { 0 })
    }

    /// The usage now, window by window.
    fn now(&self, at: usize, time_ms: u64) -> Counter {
        let mut counter = self.counters.get(&self.place(at)).copied().unwrap_or_default();
        match KINDS[at] {
            KeyFormat::Plain => counter.mark = self.window,
            KeyFormat::Grid => {
                while counter.exists && counter.mark < self.window {
                    counter.used = counter.used.saturating_sub(u64::from(LIMITS[at]));
                    counter.mark += 1;
                }
                counter.mark = self.window;
            }
            KeyFormat::Floating => {
                while counter.exists && counter.mark + PERIOD_MS <= time_ms {
                    counter.used = counter.used.saturating_sub(u64::from(LIMITS[at]));
                    counter.mark += PERIOD_MS;
                }
                if counter.used == 0 {
                    counter.mark = time_ms;
                }
            }
        }
        counter
    }

    fn take(&mut self, wants: &[(usize, CounterRequest)], time_ms: u64) -> (bool, Vec<CounterReply>) {
        let now: Vec<Counter> = wants.iter().map(|(at, _)| self.now(*at, time_ms)).collect();
        let passes =
            now.iter().zip(wants).all(|(now, (_, want))| now.used.max(want.used_min) + want.need <= want.ceiling);
        let mut took = Vec::new();
        for (now, (at, want)) in now.into_iter().zip(wants) {
            let mut counter = now;
            let mut granted = 0;
            if passes {
                let room = want.ceiling - now.used.max(want.used_min);
                granted = want.need + (want.want.max(want.need) - want.need).min((room - want.need) / 8);
            }
            if granted > 0 {
                counter = Counter { used: now.used.max(want.used_min) + granted, mark: now.mark, exists: true };
                self.counters.insert(self.place(*at), counter);
            }
            took.push(CounterReply { granted, used: counter.used, end_ms: 0, number: counter.mark });
        }
        (passes, took)
    }

    fn give(&mut self, at: usize, taken: CounterReply, tokens: u64, only: bool) -> u64 {
        let place = (at, if KINDS[at] == KeyFormat::Plain { taken.number } else { 0 });
        let Some(counter) = self.counters.get_mut(&place) else { return 0 };
        let limit = u64::from(LIMITS[at]);
        let back = match KINDS[at] {
            _ if only && (counter.used != taken.used || counter.mark != taken.number) => 0,
            KeyFormat::Grid => tokens.saturating_sub(limit * (counter.mark - taken.number)),
            KeyFormat::Floating if counter.mark != taken.number => 0,
            KeyFormat::Plain | KeyFormat::Floating => tokens,
        };
        let back = back.min(counter.used);
        counter.used -= back;
        back
    }
}

fn want(oracle: &Oracle, (at, need, want, least, more): (usize, u64, u64, u64, u64)) -> CounterRequest {
    let made = match KINDS[at] {
        KeyFormat::Plain => plain_request(BASES[at], oracle.window, LIMITS[at]),
        KeyFormat::Grid => grid_request(BASES[at], oracle.window, LIMITS[at]),
        KeyFormat::Floating => floating_request(BASES[at], PERIOD_MS, LIMITS[at]),
    };
    CounterRequest { ceiling: made.ceiling + more, need, want, used_min: least, ..made }
}

async fn play(store: &RedisClient, server: &mut redis::Connection, actions: Vec<Action>) {
    let () = redis::cmd("FLUSHALL").query(server).unwrap();
    let mut oracle = Oracle { window: 100, counters: HashMap::new() };
    let mut taken: Vec<(usize, CounterReply)> = Vec::new();
    for action in actions {
        match action {
            Action::Take(asks) => {
                let wants: Vec<(usize, CounterRequest)> =
                    asks.into_iter().map(|ask| (ask.0, want(&oracle, ask))).collect();
                let asked: Vec<CounterRequest> = wants.iter().map(|(_, want)| want.clone()).collect();
                let (passes, time_ms, mut took) = match store.acquire(&asked, 0).await.unwrap() {
                    AcquireReply::Granted { time_ms, counters: took } => (true, time_ms, took),
                    AcquireReply::Refused { time_ms, counters: took } => (false, time_ms, took),
                    AcquireReply::OtherWindow { .. } => panic!("the windows are open"),
                };
                for (took, (_, want)) in took.iter_mut().zip(&wants) {
                    match want.window {
                        WindowRef::Plain { end_ms, .. } | WindowRef::Grid { end_ms, .. } => {
                            assert_eq!(took.end_ms, end_ms)
                        }
                        WindowRef::Floating { period_ms } => assert_eq!(took.end_ms, took.number + period_ms),
                    }
                    took.end_ms = 0;
                }
                assert_eq!((passes, took.clone()), oracle.take(&wants, time_ms));
                taken.extend(wants.iter().map(|(at, _)| *at).zip(took).filter(|(_, took)| took.granted > 0));
            }
            Action::Give { taken: back, tokens, only } => {
                let Some(&(at, took)) = taken.iter().rev().nth(back) else { continue };
                let tokens = tokens.min(took.granted);
                let (kind, base, limit) = (KINDS[at], Rc::from(BASES[at]), LIMITS[at]);
                let only_if_used = only.then_some(took.used);
                let gift = Refund { base, kind, number: took.number, limit, tokens, only_if_used, deletes: false };
                assert_eq!(store.refund(&[gift]).await.unwrap(), oracle.give(at, took, tokens, only));
            }
            Action::Pass { windows, ms } => {
                oracle.window += windows;
                let key = format!("{}:first-request", BASES[3]);
                if let Some(counter) = oracle.counters.get_mut(&(3, 0)) {
                    // Instead of waiting, its window began that much earlier.
                    counter.mark -= ms;
                    let start: i64 = server.hincr(&key, "start", -(ms as i64)).unwrap();
                    assert_eq!(start as u64, counter.mark);
                    for (at, took) in &mut taken {
                        took.number -= if *at == 3 { ms } else { 0 };
                    }
                }
            }
            Action::Write { counter, value } => {
                let () = server.set(format!("{}:{}", BASES[counter], oracle.window), value).unwrap();
                let written = Counter { used: value.max(0) as u64, mark: oracle.window, exists: true };
                let place = oracle.place(counter);
                oracle.counters.insert(place, written);
            }
        }
    }
    let keys: Vec<String> = server.keys("*").unwrap();
    for key in keys {
        let left_ms: i64 = server.pttl(&key).unwrap();
        let is_written_by_others = key.contains("plain");
        // -2: it has ended since it was listed.
        assert!(left_ms != -1 || is_written_by_others, "{key} has no end");
    }
}

#[test]
fn the_scripts_agree_with_counters_in_memory() {
    let server = RedisServer::start();
    let client = redis::Client::open(("127.0.0.1", server.port)).unwrap();
    let mut connection = client.get_connection().unwrap();
    let mut runner = TestRunner::new(Config { cases: 300, failure_persistence: None, ..Config::default() });
    let connection = std::cell::RefCell::new(&mut connection);
    let played = runner.run(&actions(), |actions| {
        // A connection belongs to the event loop that opened it.
        let store = RedisClient::new(&single_server(&server));
        run_on_worker(play(&store, &mut connection.borrow_mut(), actions));
        Ok(())
    });
    played.unwrap_or_else(|failed| panic!("{failed}"));
}
