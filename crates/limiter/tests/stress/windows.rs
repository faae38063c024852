//! Windows that roll over, float, are split or waited for, under real threads: of any windows in a row the
//! first grants its capacity at most, and every other one its limit.
//!
//! Threads share a clock that moves on with the requests, and each reads it only now and then, so that late
//! ones are the rule. Nothing sleeps, nothing depends on how long anything takes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::key::{KeyHasher, KeyPart, OnMissing, Seed};
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Cost, Exemptions, OnLimit, OnOutage, Rule, Sharing};
use transom_limiter::rule_set::{ChargePlan, KeyedRequest, RuleSet};
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::table::Table;
use transom_limiter::window::Windows;

use crate::{THREADS, mixed};

pub const SEED: Seed = Seed(5, 6);
pub const START_MS: u64 = 1_000_000;

/// What passes, by client and end of the window in which it does; given back is struck out.
type Ledger = HashMap<u64, BTreeMap<u64, i64>>;

struct Scene<'a, const W: usize> {
    rule_set: &'a RuleSet,
    charge_plan: &'a ChargePlan,
    table: &'a Table<W>,
    clock: &'a AtomicU64,
    clients: u64,
    requests: u64,
}

pub fn rule(layer: Limit, on_limit: OnLimit) -> Rule {
    Rule {
        name: "only".to_owned(),
        key: vec![KeyPart::Header("client".to_owned())],
        on_missing: OnMissing::Refuse,
        layers: vec![layer],
        plans: Vec::new(),
        overrides: Vec::new(),
        cost: Cost::Fixed(1),
        on_limit,
        count_refused: false,
        exemptions: Exemptions::default(),
        sharing: Sharing::Local,
        on_outage: OnOutage::Local,
    }
}

pub fn limit(tokens: u32, capacity: u32, windows: Windows) -> Limit {
    Limit { tokens, windows, period_text: String::new(), capacity, reserve: 0, shards: 1 }
}

/// The requests of one thread. Of those that wait, every other one gives up.
fn requests<const W: usize>(scene: &Scene<W>, thread: u64) -> Ledger {
    let (mut ledger, mut context, mut now_ms) = (Ledger::new(), DecisionContext::for_worker(thread as u32), START_MS);
    let layer = scene.rule_set.rules[0].rule.layers[0].clone();
    for turn in 0..scene.requests {
        let dice = mixed(thread << 32 | turn);
        if dice.is_multiple_of(3) {
            now_ms = scene.clock.fetch_add(dice >> 8 & 3, Ordering::Relaxed);
        }
        let (client, cost) = ((dice >> 16) % scene.clients, 1 + (dice >> 56 & 1) as u32);
        let mut hasher = KeyHasher::new(SEED, scene.rule_set.rules[0].hash_prefix);
        hasher.add_part(1, &client.to_le_bytes());
        context.inputs.keyed_requests =
            vec![Some(KeyedRequest { key: hasher.finish(), offset: mixed(client), variant: 0, cost })];
        // Who asks for the time again hears what it is, or of a clock that stays behind.
        let (is_behind, heard_ms) = (dice >> 58 & 1 == 1, now_ms);
        let clock = || if is_behind { heard_ms } else { scene.clock.load(Ordering::Relaxed).max(heard_ms) };
        let until_ms = match scene.rule_set.decide(
            scene.charge_plan,
            scene.table,
            DecisionTime::starting_at(now_ms, &clock),
            &mut context,
        ) {
            Decision::Refused => continue,
            Decision::Admitted => None,
            Decision::Delayed { until_ms, .. } => Some(until_ms),
        };
        if until_ms.is_some() && dice >> 57 & 1 == 1 {
            let shares: Vec<_> = context.all_receipts().collect();
            scene.rule_set.refund(&shares, u32::MAX, scene.table, scene.clock.load(Ordering::Relaxed).max(now_ms));
            continue;
        }
        let account = ledger.entry(client).or_default();
        for share in context.all_receipts() {
            // Where keys with windows of their own share a counter, a thread that is late may be counted in
            // any of its own windows since.
            let is_random = matches!(layer.windows, Windows::Random { .. });
            if is_random && scene.clock.load(Ordering::Relaxed) >= share.request.end_ms {
                continue;
            }
            let end_ms = counted_in(&share, &layer);
            let passes_in = until_ms.map_or(end_ms, |until_ms| layer.windows.sequence().end_at(end_ms, until_ms));
            *account.entry(passes_in).or_default() += i64::from(share.request.cost);
        }
    }
    ledger
}

/// End of the key's window in which a charge counts: the one asked for, or that of others' later times. Keys
/// that share a counter share its windows as well.
fn counted_in(share: &ShardReceipt, layer: &Limit) -> u64 {
    let (own_ms, end_ms) = (share.request.end_ms, share.receipt.end_ms());
    let period_ms = layer.windows.period_ms().expect("all of these are even");
    let floats = matches!(layer.windows, Windows::FirstRequest { .. });
    if floats { end_ms } else { own_ms + (end_ms - own_ms) / period_ms * period_ms }
}

/// Runs all threads, and holds what passed against the bound. Returns how many tokens that were.
fn never_over<const W: usize>(table: Table<W>, layer: Limit, on_limit: OnLimit, clients: u64) -> i64 {
    let all: &[usize] = &[0];
    let rule_set = RuleSet::new(&[rule(layer.clone(), on_limit)], SEED, None);
    let (charge_plan, clock, start) =
        (rule_set.charge_plan(all), AtomicU64::new(START_MS), Barrier::new(THREADS as usize));
    let scene = Scene {
        rule_set: &rule_set,
        charge_plan: &charge_plan,
        table: &table,
        clock: &clock,
        clients,
        requests: 40_000,
    };
    let mut ledger = Ledger::new();
    thread::scope(|scope| {
        let work = |thread| {
            let (scene, start) = (&scene, &start);
            scope.spawn(move || {
                start.wait();
                requests(scene, thread)
            })
        };
        for handle in (0..THREADS).map(work).collect::<Vec<_>>() {
            for (client, windows) in handle.join().expect("no thread panicked") {
                let account = ledger.entry(client).or_default();
                windows.into_iter().for_each(|(end_ms, tokens)| *account.entry(end_ms).or_default() += tokens);
            }
        }
    });
    let windows: usize = ledger.values().map(BTreeMap::len).sum();
    assert!(windows > 1000, "only {windows} windows were opened");
    ledger.values().for_each(|account| within_the_bound(account, &layer));
    ledger.values().flat_map(BTreeMap::values).sum()
}

/// Of any windows in a row: the capacity, and the limit for each but the first.
fn within_the_bound(account: &BTreeMap<u64, i64>, layer: &Limit) {
    let period_ms = layer.windows.period_ms().expect("all of these are even");
    // What may still be taken when a window opens, had all windows before been asked for as much as they were.
    let mut level: Option<(u64, i64)> = None;
    for (end_ms, tokens) in account {
        let capacity = i64::from(layer.capacity);
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
    let split = Limit { shards: 4, ..limit(10, 10, even()) };
    never_over(Table::with_capacity(64).expect("there is memory"), split, OnLimit::Refuse, 2);
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
