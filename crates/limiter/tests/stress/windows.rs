//! Rollover, first-request windows, shards and delays under real threads: of consecutive windows, the first grants at
//! most the capacity, and each later one its limit.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, PlanPosition, VariantId};
use transom_limiter::key::{KeyHasher, KeyPart, OnMissing, PartArgument, PartKind, Seed};
use transom_limiter::limit::Limit;
use transom_limiter::rule::{OnLimit, Rule};
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::table::Table;
use transom_limiter::window::Windows;

use crate::{THREADS, mix};

pub const SEED: Seed = Seed(5, 6);
const CLIENT: KeyPart =
    KeyPart { kind: &PartKind { name: "client", identity: "Client", number: 1 }, argument: PartArgument::None };
pub const START_MS: u64 = 1_000_000;

/// Tokens admitted or to be admitted, by client and end of that window. Refunded tokens are not included.
type AdmittedTokens = HashMap<u64, BTreeMap<u64, i64>>;

struct Load<'a, const W: usize> {
    charge_plan: &'a ChargePlan,
    table: &'a Table<W>,
    clock: &'a AtomicU64,
    clients: u64,
    requests: u64,
}

pub fn rule(layer: Limit, on_limit: OnLimit) -> Rule {
    Rule { on_limit, ..Rule::new("only", vec![CLIENT], OnMissing::Refuse, vec![layer]) }
}

pub fn limit(tokens: u32, capacity: u32, windows: Windows) -> Limit {
    Limit {
        tokens,
        windows,
        period_text: String::new(),
        capacity: (capacity > tokens).then_some(capacity),
        reserve: 0,
        shards: 1,
    }
}

/// Sends the requests of one thread. Every other delayed request is cancelled.
fn send_requests<const W: usize>(load: &Load<W>, thread: u64) -> AdmittedTokens {
    let (mut admitted_tokens, mut context, mut now_ms) =
        (AdmittedTokens::new(), DecisionContext::for_worker(thread as u32), START_MS);
    let compiled = load.charge_plan.rule(PlanPosition::at(0));
    let layer = compiled.rule.layers[0].clone();
    for nth in 0..load.requests {
        let random = mix(thread << 32 | nth);
        if random.is_multiple_of(3) {
            // Less than a minute in all: the largest difference between clocks for which the limiter is exact.
            now_ms = load.clock.fetch_add(random >> 8 & 1, Ordering::Relaxed);
        }
        let (client, cost) = ((random >> 16) % load.clients, 1 + (random >> 56 & 1) as u32);
        let mut hasher = KeyHasher::new(SEED, compiled.hash_prefix);
        hasher.add_part(1, &client.to_le_bytes());
        context.inputs.keyed_requests =
            vec![Some(KeyedRequest { key: hasher.finish(), offset: mix(client), variant: VariantId::DEFAULT, cost })]
                .into();
        // A second read of the clock returns the current time, or that of a clock that stays behind.
        let (is_behind, heard_ms) = (random >> 58 & 1 == 1, now_ms);
        let clock = || if is_behind { heard_ms } else { load.clock.load(Ordering::Relaxed).max(heard_ms) };
        let until_ms =
            match load.charge_plan.decide(load.table, DecisionTime::starting_at(now_ms, &clock), &mut context) {
                Decision::Refused => continue,
                Decision::Admitted => None,
                Decision::Delayed { until_ms, .. } => Some(until_ms),
            };
        if until_ms.is_some() && random >> 57 & 1 == 1 {
            let receipts: Vec<_> = context.all_receipts().collect();
            load.charge_plan.rule_set().refund(
                &receipts,
                u32::MAX,
                load.table,
                load.clock.load(Ordering::Relaxed).max(now_ms),
            );
            continue;
        }
        let windows = admitted_tokens.entry(client).or_default();
        for receipt in context.all_receipts() {
            // Where keys with different windows share a counter, a late thread may be counted in any of its key's
            // windows since.
            let is_random = matches!(layer.windows, Windows::Random { .. });
            if is_random && load.clock.load(Ordering::Relaxed) >= receipt.request.end_ms {
                continue;
            }
            let end_ms = counted_in(&receipt, &layer);
            let passes_in = until_ms.map_or(end_ms, |until_ms| layer.windows.end_at(end_ms, until_ms));
            *windows.entry(passes_in).or_default() += i64::from(receipt.request.cost);
        }
    }
    admitted_tokens
}

/// The end of the key's window in which a charge counts: the requested window, or a later one that another thread
/// opened. Keys that share a counter also share its windows.
fn counted_in(receipt: &ShardReceipt, layer: &Limit) -> u64 {
    let (own_ms, end_ms) = (receipt.request.end_ms, receipt.receipt.end_ms());
    let period_ms = layer.windows.period_ms().expect("these windows have one length");
    let floats = matches!(layer.windows, Windows::FirstRequest { .. });
    if floats { end_ms } else { own_ms + (end_ms - own_ms) / period_ms * period_ms }
}

/// Runs all threads, and checks the admitted tokens against the bound. Returns their number.
fn never_over<const W: usize>(table: Table<W>, layer: Limit, on_limit: OnLimit, clients: u64) -> i64 {
    let rule_set = Arc::new(RuleSet::new(&[rule(layer.clone(), on_limit)], SEED, None));
    let (charge_plan, clock, start) =
        (rule_set.charge_plan(rule_set.rules.ids()), AtomicU64::new(START_MS), Barrier::new(THREADS as usize));
    let load = Load { charge_plan: &charge_plan, table: &table, clock: &clock, clients, requests: 40_000 };
    let mut admitted_tokens = AdmittedTokens::new();
    thread::scope(|scope| {
        let work = |thread| {
            let (load, start) = (&load, &start);
            scope.spawn(move || {
                start.wait();
                send_requests(load, thread)
            })
        };
        for handle in (0..THREADS).map(work).collect::<Vec<_>>() {
            for (client, tokens_by_end) in handle.join().expect("no thread panicked") {
                let windows = admitted_tokens.entry(client).or_default();
                tokens_by_end.into_iter().for_each(|(end_ms, tokens)| *windows.entry(end_ms).or_default() += tokens);
            }
        }
    });
    let windows: usize = admitted_tokens.values().map(BTreeMap::len).sum();
    assert!(windows > 1000, "only {windows} windows were opened");
    admitted_tokens.values().for_each(|windows| within_the_bound(windows, &layer));
    admitted_tokens.values().flat_map(BTreeMap::values).sum()
}

/// Of consecutive windows, the first grants the capacity, and each later one its limit.
fn within_the_bound(windows: &BTreeMap<u64, i64>, layer: &Limit) {
    let period_ms = layer.windows.period_ms().expect("these windows have one length");
    // The end of the last window, and the tokens left in it.
    let mut level: Option<(u64, i64)> = None;
    for (end_ms, tokens) in windows {
        let capacity = i64::from(layer.capacity());
        let before = level.map_or(capacity, |(last_ms, left)| {
            let windows = ((end_ms - last_ms) / period_ms) as i64;
            capacity.min(left + windows * i64::from(layer.tokens))
        });
        let left = before - tokens;
        assert!(left >= 0, "{tokens} of {before} tokens passed in the window ending at {end_ms}");
        level = Some((*end_ms, left));
    }
}

fn even() -> Windows {
    Windows::Even { period_ms: 20, offset_ms: 3 }
}

fn waits() -> OnLimit {
    OnLimit::Delay { max_delay_ms: 70, max_waiting: 1_000_000 }
}

#[test]
fn never_over_the_capacity_with_rollover() {
    never_over(Table::with_capacity(64).expect("there is memory"), limit(3, 11, even()), OnLimit::Refuse, 3);
    never_over(Table::<1>::with_buckets(2, 1).expect("there is memory"), limit(3, 11, even()), OnLimit::Refuse, 5);
}

#[test]
fn never_over_with_first_request_windows() {
    let floating = Windows::FirstRequest { period_ms: 20 };
    never_over(Table::with_capacity(64).expect("there is memory"), limit(3, 3, floating.clone()), OnLimit::Refuse, 3);
    never_over(Table::with_capacity(64).expect("there is memory"), limit(3, 8, floating.clone()), OnLimit::Refuse, 3);
    never_over(Table::<1>::with_buckets(2, 1).expect("there is memory"), limit(3, 3, floating), OnLimit::Refuse, 5);
}

#[test]
fn never_over_with_shards() {
    let sharded = Limit { shards: 4, ..limit(10, 10, even()) };
    never_over(Table::with_capacity(64).expect("there is memory"), sharded, OnLimit::Refuse, 2);
    let rolling = Limit { shards: 4, ..limit(10, 25, even()) };
    never_over(Table::with_capacity(64).expect("there is memory"), rolling, OnLimit::Refuse, 2);
}

#[test]
fn never_over_with_abandoned_waits() {
    never_over(Table::with_capacity(64).expect("there is memory"), limit(3, 3, even()), waits(), 3);
    never_over(Table::with_capacity(64).expect("there is memory"), limit(3, 8, even()), waits(), 3);
    never_over(Table::<1>::with_buckets(2, 1).expect("there is memory"), limit(3, 3, even()), waits(), 5);
    never_over(
        Table::with_capacity(64).expect("there is memory"),
        limit(3, 3, Windows::FirstRequest { period_ms: 20 }),
        waits(),
        3,
    );
}

#[test]
fn never_over_with_separate_windows_per_key() {
    let random = Windows::Random { period_ms: 20 };
    never_over(Table::with_capacity(64).expect("there is memory"), limit(3, 3, random.clone()), OnLimit::Refuse, 5);
    never_over(
        Table::<1>::with_buckets(2, 4).expect("there is memory"),
        limit(3, 3, random.clone()),
        OnLimit::Refuse,
        40,
    );
    never_over(Table::<1>::with_buckets(2, 4).expect("there is memory"), limit(3, 7, random), OnLimit::Refuse, 40);
}
