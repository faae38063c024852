//! Compares the scripts of shared counters on a real server with a simple model in memory, action by action.

use std::collections::HashMap;
use std::rc::Rc;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use redis::Commands;
use transom_limiter::window_kind::WindowKind;
use transom_store::client::RedisClient;
use transom_store::scripts::{AcquireReply, CounterReply, CounterRequest, Refund};

use crate::support::redis::RedisServer;
use crate::support::redis_client::{floating_request, grid_request, plain_request, run_on_worker, single_server};

const BASES: [&str; 4] = ["t:{plain}:minute", "t:{plain}:hour", "t:{grid}", "t:{floats}"];
const KINDS: [WindowKind; 4] = [WindowKind::Plain, WindowKind::Plain, WindowKind::Accumulating, WindowKind::Floating];
const LIMITS: [u32; 4] = [10, 25, 7, 5];
const PERIOD_MS: u64 = 10_000;

/// One step of a test case.
#[derive(Clone, Debug)]
enum Action {
    /// For each counter: position, need, want, minimum usage, and the usage allowed beyond the limit.
    Acquire(Vec<(usize, u64, u64, u64, u64)>),
    /// Refunds some of the tokens of an earlier action; only if no later charge exists.
    GiveBack { taken: usize, tokens: u64, only: bool },
    /// Advances the time by a number of windows, and by milliseconds for a floating window.
    Pass { windows: u64, ms: u64 },
    /// A foreign write to a plain counter.
    Write { counter: usize, value: i64 },
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let used_min = prop_oneof![5 => Just(0u64), 1 => 0..20u64];
    let window_request = (0..4usize, 0..6u64, 0..12u64, used_min, prop_oneof![2 => Just(0u64), 1 => 0..30u64]);
    let requested = proptest::collection::btree_map(0..4usize, window_request, 1..5);
    let acquire = requested.prop_map(|requested| {
        Action::Acquire(requested.into_iter().map(|(at, (_, n, w, l, c))| (at, n, w, l, c)).collect())
    });
    let refund =
        (0..8usize, 0..12u64, any::<bool>()).prop_map(|(taken, tokens, only)| Action::GiveBack { taken, tokens, only });
    let pass = (0..4u64, 0..25_000u64).prop_map(|(windows, ms)| Action::Pass { windows, ms });
    let write = (0..2usize, -5..40i64).prop_map(|(counter, value)| Action::Write { counter, value });
    let action = prop_oneof![8 => acquire, 3 => refund, 3 => pass, 1 => write];
    proptest::collection::vec(action, 1..40)
}

/// A counter of the model.
#[derive(Clone, Copy, Default, Debug)]
struct Counter {
    used: u64,
    /// The window of `used`; for a floating window, its start.
    mark: u64,
    exists: bool,
}

struct Model {
    window: u64,
    counters: HashMap<(usize, u64), Counter>,
}

impl Model {
    /// The key of the open counter: a plain window has a counter for each window.
    fn counter_key(&self, at: usize) -> (usize, u64) {
        (at, if KINDS[at] == WindowKind::Plain { self.window } else { 0 })
    }

    /// The counter at the current time.
    fn now(&self, at: usize, time_ms: u64) -> Counter {
        let mut counter = self.counters.get(&self.counter_key(at)).copied().unwrap_or_default();
        match KINDS[at] {
            WindowKind::Plain | WindowKind::Sliding => counter.mark = self.window,
            WindowKind::Accumulating => {
                while counter.exists && counter.mark < self.window {
                    counter.used = counter.used.saturating_sub(u64::from(LIMITS[at]));
                    counter.mark += 1;
                }
                counter.mark = self.window;
            }
            WindowKind::Floating | WindowKind::Leased => {
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

    fn acquire(&mut self, requests: &[(usize, CounterRequest)], time_ms: u64) -> (bool, Vec<CounterReply>) {
        let now: Vec<Counter> = requests.iter().map(|(at, _)| self.now(*at, time_ms)).collect();
        let is_granted =
            now.iter().zip(requests).all(|(now, (_, want))| now.used.max(want.used_min) + want.need <= want.ceiling);
        let mut replies = Vec::new();
        for (now, (at, want)) in now.into_iter().zip(requests) {
            let mut counter = now;
            let mut granted = 0;
            if is_granted {
                let available = want.ceiling - now.used.max(want.used_min);
                granted = want.need + (want.want.max(want.need) - want.need).min((available - want.need) / 8);
            }
            if granted > 0 {
                counter = Counter { used: now.used.max(want.used_min) + granted, mark: now.mark, exists: true };
                self.counters.insert(self.counter_key(*at), counter);
            }
            replies.push(CounterReply {
                granted,
                used: counter.used,
                end_ms: 0,
                available_ms: 0,
                number: counter.mark,
                call: 0,
            });
        }
        (is_granted, replies)
    }

    fn refund(&mut self, at: usize, taken: CounterReply, tokens: u64, only: bool) -> u64 {
        let counter_key = (at, if KINDS[at] == WindowKind::Plain { taken.number } else { 0 });
        let Some(counter) = self.counters.get_mut(&counter_key) else { return 0 };
        let limit = u64::from(LIMITS[at]);
        let back = match KINDS[at] {
            _ if only && (counter.used > taken.used || counter.mark != taken.number) => 0,
            WindowKind::Accumulating => tokens.saturating_sub(limit * (counter.mark - taken.number)),
            WindowKind::Floating if counter.mark != taken.number => 0,
            WindowKind::Plain | WindowKind::Floating | WindowKind::Sliding | WindowKind::Leased => tokens,
        };
        let back = back.min(counter.used);
        counter.used -= back;
        back
    }
}

fn counter_request(model: &Model, (at, need, want, used_min, more): (usize, u64, u64, u64, u64)) -> CounterRequest {
    let request = match KINDS[at] {
        WindowKind::Plain | WindowKind::Sliding => plain_request(BASES[at], model.window, LIMITS[at]),
        WindowKind::Accumulating => grid_request(BASES[at], model.window, LIMITS[at]),
        WindowKind::Floating | WindowKind::Leased => floating_request(BASES[at], PERIOD_MS, LIMITS[at]),
    };
    CounterRequest { ceiling: request.ceiling + more, need, want, used_min, ..request }
}

async fn run_actions(store: &RedisClient, server: &mut redis::Connection, actions: Vec<Action>) {
    let () = redis::cmd("FLUSHALL").query(server).unwrap();
    let mut model = Model { window: 100, counters: HashMap::new() };
    let mut taken: Vec<(usize, CounterReply)> = Vec::new();
    for action in actions {
        match action {
            Action::Acquire(requested) => {
                let requests: Vec<(usize, CounterRequest)> =
                    requested.into_iter().map(|each| (each.0, counter_request(&model, each))).collect();
                let calls: Vec<CounterRequest> = requests.iter().map(|(_, want)| want.clone()).collect();
                let (is_granted, time_ms, mut replies) = match store.acquire(&calls, 0).await.unwrap() {
                    AcquireReply::Granted { time_ms, counters: replies } => (true, time_ms, replies),
                    AcquireReply::Refused { time_ms, counters: replies } => (false, time_ms, replies),
                    AcquireReply::OtherWindow { .. } => panic!("the windows are open"),
                };
                for (replies, (_, want)) in replies.iter_mut().zip(&requests) {
                    let start_ms = if want.window.kind == WindowKind::Floating { replies.number } else { 0 };
                    assert_eq!(replies.end_ms, start_ms + want.window.end_ms);
                    (replies.end_ms, replies.available_ms) = (0, 0);
                }
                assert_eq!((is_granted, replies.clone()), model.acquire(&requests, time_ms));
                taken
                    .extend(requests.iter().map(|(at, _)| *at).zip(replies).filter(|(_, replies)| replies.granted > 0));
            }
            Action::GiveBack { taken: back, tokens, only } => {
                let Some(&(at, replies)) = taken.iter().rev().nth(back) else { continue };
                let tokens = tokens.min(replies.granted);
                let (kind, base, limit) = (KINDS[at], Rc::from(BASES[at]), LIMITS[at]);
                let used_max = only.then_some(replies.used);
                let refund = Refund {
                    key_base: base,
                    kind,
                    number: replies.number,
                    limit,
                    tokens,
                    used_max,
                    counter: None,
                    deletes: false,
                };
                assert_eq!(store.refund(&[refund]).await.unwrap(), model.refund(at, replies, tokens, only));
            }
            Action::Pass { windows, ms } => {
                model.window += windows;
                let key = format!("{}:first-request", BASES[3]);
                if let Some(counter) = model.counters.get_mut(&(3, 0)) {
                    // Instead of waiting, the start of the window is moved back.
                    counter.mark -= ms;
                    let start: i64 = server.hincr(&key, "start", -(ms as i64)).unwrap();
                    assert_eq!(start as u64, counter.mark);
                    for (at, replies) in &mut taken {
                        replies.number -= if *at == 3 { ms } else { 0 };
                    }
                }
            }
            Action::Write { counter, value } => {
                let () = server.set(format!("{}:{}", BASES[counter], model.window), value).unwrap();
                let written = Counter { used: value.max(0) as u64, mark: model.window, exists: true };
                let counter_key = model.counter_key(counter);
                model.counters.insert(counter_key, written);
            }
        }
    }
    let keys: Vec<String> = server.keys("*").unwrap();
    for key in keys {
        let left_ms: i64 = server.pttl(&key).unwrap();
        let is_written_by_others = key.contains("plain");
        // -2: the key has expired since it was listed.
        assert!(left_ms != -1 || is_written_by_others, "{key} has no expiry");
    }
}

#[test]
fn the_scripts_agree_with_counters_in_memory() {
    let server = RedisServer::start();
    let client = redis::Client::open(("127.0.0.1", server.port)).unwrap();
    let mut connection = client.get_connection().unwrap();
    let mut runner = TestRunner::new(Config { cases: 300, failure_persistence: None, ..Config::default() });
    let connection = std::cell::RefCell::new(&mut connection);
    let result = runner.run(&actions(), |actions| {
        // A connection belongs to the runtime that opened it.
        let store = RedisClient::new(&single_server(&server));
        run_on_worker(run_actions(&store, &mut connection.borrow_mut(), actions));
        Ok(())
    });
    result.unwrap_or_else(|failed| panic!("{failed}"));
}
