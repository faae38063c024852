//! Sliding windows under real threads: in no interval of a period are more tokens admitted than the limit.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::key::KeyHasher;
use transom_limiter::rule::OnLimit;
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::table::Table;
use transom_limiter::window::{Segments, Windows};

use crate::windows::{SEED, START_MS, limit, rule};
use crate::{THREADS, mix};

const PERIOD_MS: u64 = 40;
const LIMIT: u32 = 6;

/// A request that was admitted: the client, the time of the decision, the tokens.
type Admitted = (u64, u64, u64);

/// Sends the requests of one thread. Some are refunded, and some are late.
fn send_requests<const W: usize>(
    table: &Table<W>,
    rule_set: &RuleSet,
    clock: &AtomicU64,
    clients: u64,
    thread: u64,
) -> Vec<Admitted> {
    let (charge_plan, segments) = (rule_set.charge_plan(&[0]), Segments { period_ms: PERIOD_MS });
    let (mut context, mut admitted, mut now_ms) = (DecisionContext::for_worker(thread as u32), Vec::new(), START_MS);
    for nth in 0..40_000u64 {
        let random = mix(thread << 32 | nth);
        if !random.is_multiple_of(5) {
            now_ms = clock.fetch_add(u64::from(random >> 8 & 7 == 0), Ordering::Relaxed);
        }
        let (client, cost) = ((random >> 16) % clients, 1 + (random >> 56 & 1) as u32);
        let mut hasher = KeyHasher::new(SEED, rule_set.rules[0].hash_prefix);
        hasher.add_part(1, &client.to_le_bytes());
        context.inputs.keyed_requests = vec![Some(KeyedRequest { key: hasher.finish(), offset: 0, variant: 0, cost })];
        let read_ms = || now_ms;
        let decision = rule_set.decide(&charge_plan, table, DecisionTime::starting_at(now_ms, &read_ms), &mut context);
        if let Decision::Refused = decision {
            continue;
        }
        let receipts: Vec<_> = context.all_receipts().collect();
        if random >> 57 & 7 == 0 {
            rule_set.refund(&receipts, u32::MAX, table, now_ms);
            continue;
        }
        // A late thread decides at the time of the latest segment in use, which other threads have seen.
        let segment = segments.expiring_at(receipts[0].request.end_ms);
        admitted.push((client, now_ms.max(segments.start_ms(segment)), u64::from(cost)));
    }
    admitted
}

fn never_over<const W: usize>(table: &Table<W>, clients: u64) {
    let layer = limit(LIMIT, LIMIT, Windows::Sliding { period_ms: PERIOD_MS });
    let rule_set = RuleSet::new(&[rule(layer, OnLimit::Refuse)], SEED, None);
    let (clock, start) = (AtomicU64::new(START_MS), Barrier::new(THREADS as usize));
    let mut admitted: Vec<Admitted> = Vec::new();
    thread::scope(|scope| {
        let (rule_set, clock, start) = (&rule_set, &clock, &start);
        let work = |thread| {
            scope.spawn(move || {
                start.wait();
                send_requests(table, rule_set, clock, clients, thread)
            })
        };
        for handle in (0..THREADS).map(work).collect::<Vec<_>>() {
            admitted.extend(handle.join().expect("no thread panicked"));
        }
    });
    admitted.sort_unstable();
    assert!(admitted.len() > 1000, "only {} requests were admitted", admitted.len());
    let (mut first, mut used) = (0, 0);
    for (i, (client, now_ms, cost)) in admitted.iter().enumerate() {
        used += cost;
        while admitted[first].0 != *client || admitted[first].1 + PERIOD_MS <= *now_ms {
            used -= admitted[first].2;
            first += 1;
        }
        assert!(
            used <= u64::from(LIMIT),
            "{used} tokens of client {client} within a period: {:?}",
            &admitted[first..=i]
        );
    }
}

#[test]
fn no_interval_of_a_period_exceeds_the_limit() {
    never_over(&Table::with_capacity(256).expect("there is memory"), 1);
    never_over(&Table::with_capacity(256).expect("there is memory"), 3);
    // Most counters do not find a slot.
    never_over(&Table::<1>::with_buckets(5, 64).expect("there is memory"), 5);
}
