//! A rule counts locally during an outage, while another thread reports its usage to the store: no token is granted
//! twice.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, RuleId, VariantId};
use transom_limiter::key::KeyHasher;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{OnLimit, Rule, Sharing};
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::shared_counting::LocalDecision;
use transom_limiter::table::Table;
use transom_limiter::window::Windows;

use crate::windows::{SEED, START_MS, limit, rule};

const LIMIT: u32 = 12;
const PERIOD_MS: u64 = 3_600_000;
const CLIENTS: u64 = 3;
/// The number of keys, and of requests that each thread sends for each key.
const KEYS: u64 = 100_000;
const REQUESTS_PER_KEY: u32 = 2 * LIMIT;

/// Tokens admitted of each key, by all threads together.
fn admitted(layer: Limit) -> Vec<u32> {
    let rules = [Rule { sharing: Sharing::Lease, ..rule(layer, OnLimit::Refuse) }];
    let rule_set = Arc::new(RuleSet::new(&rules, SEED, None));
    let (charge_plan, table) =
        (rule_set.charge_plan([RuleId::at(0)]), Table::<8>::with_capacity(4 * KEYS as usize).expect("there is memory"));
    let layer = charge_plan.enforced()[0].id;
    let keyed_request = |number: u64| {
        let mut hasher = KeyHasher::new(SEED, 0);
        hasher.add_part(0, &number.to_le_bytes());
        KeyedRequest { key: hasher.finish(), offset: 0, variant: VariantId::DEFAULT, cost: 1 }
    };
    let admitted: Vec<AtomicU32> = (0..KEYS).map(|_| AtomicU32::new(0)).collect();
    let (current, ends, clock) = (AtomicU64::new(0), AtomicBool::new(false), || START_MS);
    let barrier = Barrier::new(CLIENTS as usize);
    let request = |own_shard: u64| {
        let mut context = DecisionContext::for_worker(own_shard as u32);
        for key in 0..KEYS {
            barrier.wait();
            current.store(key, Ordering::Relaxed);
            for _ in 0..REQUESTS_PER_KEY {
                context.clear();
                context.inputs.keyed_requests = vec![Some(keyed_request(key))].into();
                charge_plan.set_counting_modes(|_rule| true, &mut context.sharing.counting_modes);
                let step = charge_plan.decide_locally(
                    charge_plan.enforced(),
                    &table,
                    DecisionTime::read(&clock),
                    &mut context,
                    true,
                );
                if let LocalDecision::Decided(Decision::Admitted) = step {
                    admitted[key as usize].fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    };
    let end_ms = (START_MS / PERIOD_MS + 1) * PERIOD_MS;
    let report = || {
        while !ends.load(Ordering::Relaxed) {
            let keyed_request = keyed_request(current.load(Ordering::Relaxed));
            let counter = rule_set.layer(layer).counter(keyed_request);
            let announce = |tokens: u64| table.add_known_usage(counter, end_ms, tokens as u32, START_MS);
            rule_set.reset_local(layer, keyed_request, &table, DecisionTime::read(&clock), announce);
        }
    };
    thread::scope(|scope| {
        // Two workers report the same counters at the same time.
        (0..2).for_each(|_| drop(scope.spawn(report)));
        let (request, clients) = (&request, 0..CLIENTS);
        let clients: Vec<_> = clients.map(|number| scope.spawn(move || request(number))).collect();
        clients.into_iter().for_each(|client| client.join().expect("no thread panicked"));
        ends.store(true, Ordering::Relaxed);
    });
    admitted.into_iter().map(AtomicU32::into_inner).collect()
}

#[test]
fn reported_usage_is_not_granted_again() {
    let admitted = admitted(limit(LIMIT, LIMIT, Windows::Even { period_ms: PERIOD_MS, offset_ms: 0 }));
    let most = admitted.iter().max().expect("there are keys");
    assert_eq!(*most, LIMIT, "the limit of {LIMIT} is reached, and no key gets more");
}
