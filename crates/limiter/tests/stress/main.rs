//! Stress tests with real threads and real atomics: they cover more threads than a model can, and words of 128 bits.
//!
//! Threads share a clock that advances with the requests, and each reads it only now and then, so that late threads are
//! common. Nothing sleeps, and nothing depends on durations.

mod concurrency;
mod leases;
mod reports;
mod sliding;
mod windows;

use std::collections::HashMap;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::bucket::Key;
use transom_limiter::table::{Counter, Table};
use transom_limiter::window::Time;
use transom_limiter::window_kind::AcquireRequest;

const THREADS: u64 = 8;
/// Two layers of three rules each: the length of a window, and its tokens.
const RULES: [(u64, u32); 6] = [(10, 3), (60, 7), (1000, 40), (15, 20), (70, 60), (1000, 500)];

/// Tokens admitted, by counter and end of the window.
type AdmittedTokens = HashMap<(u64, u64), u64>;

/// Distributes 64 bits uniformly (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
fn mix(bits: u64) -> u64 {
    let bits = bits.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let bits = (bits ^ bits >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let bits = (bits ^ bits >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ bits >> 31
}

/// The counter of one client under one rule.
fn counter(rule: u64, client: u64) -> Counter {
    let id = rule * 1000 + client;
    Counter { key: Key::new(mix(id), mix(id ^ (1 << 63))), layer: mix(!rule) }
}

fn end_ms(window_ms: u64, now_ms: u64) -> u64 {
    (now_ms / window_ms + 1) * window_ms
}

/// The requests of all threads.
struct Load<'a, const W: usize> {
    table: &'a Table<W>,
    clock: &'a AtomicU64,
    /// The number of clients. In the second layer, two clients share each counter.
    clients: u64,
    requests: u64,
}

/// Sends the requests of one thread and returns the tokens admitted. A request whose time is too late is decided again
/// at the horizon of the table, as the gateway does.
fn send_requests<const W: usize>(load: &Load<W>, thread: u64) -> AdmittedTokens {
    let (mut admitted_tokens, mut now_ms) = (AdmittedTokens::new(), 1_000_000);
    for nth in 0..load.requests {
        let random = mix(thread << 32 | nth);
        if random.is_multiple_of(5) {
            // The clock advances with the requests, so that a window holds about as many of them on any machine.
            now_ms = load.clock.fetch_add(random >> 8 & 3, Ordering::Relaxed);
        }
        let client = (random >> 16) % load.clients;
        let rules: Vec<u64> = (0..6).filter(|rule| random >> (40 + rule) & 1 == 1 || random >> 50 & 3 == 0).collect();
        let client_of = |rule: u64| if rule < 3 { client } else { client / 2 };
        loop {
            let charge = |&rule: &u64| {
                let (window_ms, limit) = RULES[rule as usize];
                let cost = 1 + (random >> 56 & 1) as u32;
                Charge::new(
                    counter(rule, client_of(rule)),
                    AcquireRequest::plain(end_ms(window_ms, now_ms), limit, cost),
                )
            };
            let mut charges: Vec<Charge> = rules.iter().map(charge).collect();
            match acquire_all(load.table, &mut charges, &mut Vec::new(), Time::plain(now_ms)) {
                AcquireResult::Admitted => {
                    for (&rule, charge) in rules.iter().zip(&charges) {
                        let at = (rule * 1000 + client_of(rule), charge.usage.end_ms);
                        *admitted_tokens.entry(at).or_default() += u64::from(charge.request.cost);
                    }
                }
                AcquireResult::Refused => {}
                AcquireResult::Late => {
                    now_ms = now_ms.max(load.table.horizon_ms());
                    continue;
                }
            }
            break;
        }
    }
    admitted_tokens
}

/// Runs all threads on one table, and checks the tokens admitted against the limits.
fn run_threads<const W: usize>(table: &Table<W>, clients: u64, per_thread: u64) -> AdmittedTokens {
    let clock = AtomicU64::new(1_000_000);
    let load = Load { table, clock: &clock, clients, requests: per_thread };
    let (start, mut all) = (Barrier::new(THREADS as usize), AdmittedTokens::new());
    thread::scope(|scope| {
        let work = |thread| {
            let (load, start) = (&load, &start);
            scope.spawn(move || {
                start.wait();
                send_requests(load, thread)
            })
        };
        for handle in (0..THREADS).map(work).collect::<Vec<_>>() {
            for (at, tokens) in handle.join().expect("no thread panicked") {
                *all.entry(at).or_default() += tokens;
            }
        }
    });
    for (&(id, end_ms), &tokens) in &all {
        let limit = RULES[(id / 1000) as usize].1;
        assert!(tokens <= u64::from(limit), "{tokens} of {limit} tokens of {id} in the window ending at {end_ms}");
    }
    assert!(all.len() > 100, "only {} windows were opened", all.len());
    all
}

/// Every counter whose slot was not reused has counted exactly the admitted tokens, in every layer.
#[test]
fn counts_equal_what_was_admitted() {
    let table = Table::with_capacity(10_000).expect("there is memory");
    let admitted_tokens = run_threads(&table, 12, 100_000);
    let mut last: HashMap<u64, (u64, u64)> = HashMap::new();
    for (&(id, end_ms), &tokens) in &admitted_tokens {
        let latest = last.entry(id).or_default();
        *latest = (*latest).max((end_ms, tokens));
    }
    let mut checked = 0;
    for (id, (end_ms, tokens)) in last {
        let (rule, client) = (id / 1000, id % 1000);
        let (used, _) = table.peek(counter(rule, client), AcquireRequest::plain(end_ms, 1, 1), Time::plain(0));
        // The slot may have been reused after the end of the window.
        if end_ms > table.horizon_ms() {
            assert_eq!((used.used, used.end_ms), (tokens, end_ms), "rule {rule} of client {client}");
            checked += 1;
        }
    }
    assert!(checked >= 6, "the windows of 1000 ms are still open");
    assert_eq!(table.overflow_charges_total(), 0);
}

#[test]
fn never_admits_past_the_limit_in_one_slot() {
    let table = Table::<1>::with_buckets(1, 1).expect("there is memory");
    run_threads(&table, 6, 40_000);
}

#[test]
fn never_admits_past_the_limit_in_a_table_that_is_always_full() {
    let table = Table::<2>::with_buckets(5, 3).expect("there is memory");
    run_threads(&table, 12, 60_000);
    assert!(table.overflow_charges_total() > 0);
}

#[test]
fn never_admits_past_the_limit_in_a_table_that_is_sometimes_full() {
    let table = Table::<4>::with_buckets(12, 6).expect("there is memory");
    run_threads(&table, 12, 60_000);
    assert!(table.overflow_charges_total() > 0);
}

/// The number of requests that one counter admits, of all threads together.
fn admitted<const W: usize>(table: &Table<W>, counter: Counter, limit: u32, per_thread: u32) -> u32 {
    let start = Barrier::new(THREADS as usize);
    thread::scope(|scope| {
        let work = |_| {
            scope.spawn(|| {
                start.wait();
                let (request, time) = (AcquireRequest::plain(1000, limit, 1), Time::plain(500));
                let hit = |_: &u32| {
                    acquire_all(table, &mut [Charge::new(counter, request)], &mut Vec::new(), time)
                        == AcquireResult::Admitted
                };
                (0..per_thread).filter(hit).count() as u32
            })
        };
        let all: Vec<_> = (0..THREADS).map(work).collect();
        all.into_iter().map(|handle| handle.join().expect("no thread panicked")).sum()
    })
}

/// While requests keep arriving, a window grants its whole limit and not one token more.
#[test]
fn a_window_admits_exactly_its_limit() {
    for (limit, rounds) in [(1, 300), (2, 300), (3, 300), (10, 300), (100, 100), (10_000, 5)] {
        for round in 0..rounds {
            let table = Table::with_capacity(64).expect("there is memory");
            assert_eq!(admitted(&table, counter(0, round), limit, limit), limit);
        }
    }
}

/// The same holds for an overflow counter that several keys share.
#[test]
fn an_overflow_counter_admits_exactly_its_limit() {
    for (limit, rounds) in [(1, 200), (2, 200), (10, 100), (1000, 10)] {
        for round in 0..rounds {
            let table = Table::<1>::with_buckets(1, 1).expect("there is memory");
            assert_eq!(admitted(&table, counter(0, 999), 1, 1), 1);
            assert_eq!(admitted(&table, counter(1, round), limit, limit), limit);
            assert_eq!(table.overflow_charges_total(), u64::from(limit));
        }
    }
}

/// Threads insert one key at the same time, again and again, while others take the slots of its ended windows: the
/// tokens of each window are granted once.
#[test]
fn a_key_inserted_by_all_threads_has_one_counter() {
    let table = Table::<1>::with_buckets(2, 1).expect("there is memory");
    let (start, rounds) = (Barrier::new(THREADS as usize), 20_000u64);
    let granted: Vec<AtomicU64> = (0..=rounds).map(|_| AtomicU64::new(0)).collect();
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (table, start, granted) = (&table, &start, &granted);
            scope.spawn(move || {
                start.wait();
                for round in 0..rounds {
                    // Half of the threads use the key. The others keep its two slots being reused.
                    let counter = if thread.is_multiple_of(2) { counter(0, 0) } else { counter(0, thread) };
                    let now_ms = 10 * round + thread;
                    let request = AcquireRequest::plain(end_ms(10, now_ms), 1, 1);
                    let mut charges = [Charge::new(counter, request)];
                    if acquire_all(table, &mut charges, &mut Vec::new(), Time::plain(now_ms)) == AcquireResult::Admitted
                        && thread.is_multiple_of(2)
                    {
                        let window = charges[0].usage.end_ms / 10;
                        assert_eq!(granted[window as usize].fetch_add(1, Ordering::Relaxed), 0);
                    }
                }
            });
        }
    });
}
