//! The harness of the models: exploring, racing threads, counters, requests. Contains no assertions.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use loom::thread;
use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::atomics::{AtomicU64, Ordering};
use transom_limiter::bucket::Key;
use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::concurrency::ConcurrencyTable;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, RuleId, VariantId, WindowsId};
use transom_limiter::key::{KeyHash, KeyPart, OnMissing, Seed};
use transom_limiter::limit::Limit;
use transom_limiter::rule::Rule;
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::table::{Counter, CounterResult, Receipt, Table};
use transom_limiter::window::{Time, Windows};
use transom_limiter::window_kind::{AcquireRequest, WindowKind};

/// Runs `model` in every interleaving with at most this many preemptions, and returns all outcomes. The environment
/// variable `TRANSOM_MODEL_EXTRA` adds preemptions.
pub fn explore<T: Ord + Send + 'static>(preemptions: usize, model: fn() -> T) -> BTreeSet<T> {
    let extra: usize = match std::env::var("TRANSOM_MODEL_EXTRA") {
        Ok(text) => text.parse().expect("`TRANSOM_MODEL_EXTRA` is a number of preemptions"),
        Err(_) => 0,
    };
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions + extra);
    builder.max_branches = 100_000;
    let outcomes = Arc::new(Mutex::new(BTreeSet::new()));
    let all = outcomes.clone();
    builder.check(move || {
        let outcome = model();
        all.lock().expect("no model panicked").insert(outcome);
    });
    std::mem::take(&mut *outcomes.lock().expect("no model panicked"))
}

/// Runs all jobs at the same time on shared data, and returns their results in order.
///
/// Every job runs on a thread of its own, so that any of them may run first within the bound: loom counts no preemption
/// where one thread ends and another begins.
pub fn race<S: Send + Sync + 'static, T: 'static, const N: usize>(shared: &Arc<S>, jobs: [fn(&S) -> T; N]) -> [T; N] {
    let runners = jobs.map(|job| {
        let shared = shared.clone();
        thread::spawn(move || job(&shared))
    });
    runners.map(|runner| runner.join().expect("no thread panicked"))
}

/// A gateway with a rule of one request in 100 ms, for one key.
pub struct Gateway {
    /// Shared by all threads, and never set back.
    clock: AtomicU64,
    pub table: Table<2>,
    pub charge_plan: ChargePlan,
}

impl Gateway {
    pub fn new(change: impl FnOnce(&mut Rule)) -> Arc<Gateway> {
        let limit = Limit::parse("1/100ms").expect("it is a limit");
        let mut rule = Rule::new("r", vec![KeyPart::GLOBAL], OnMissing::Never, vec![limit]);
        change(&mut rule);
        // A table of one shard, because loom creates its locks again for each interleaving.
        let former = RuleSet { concurrency: Arc::new(ConcurrencyTable::with_capacity(1, 1)), ..RuleSet::default() };
        let rule_set = Arc::new(RuleSet::new(&[rule], Seed(1, 2), Some(&former)));
        let charge_plan = rule_set.charge_plan([RuleId::at(0)]);
        let table = Table::with_buckets(2, 1).expect("there is memory");
        Arc::new(Gateway { clock: AtomicU64::new(0), table, charge_plan })
    }

    pub fn decide(&self, now_ms: u64) -> (Decision, DecisionContext) {
        let mut context = DecisionContext::default();
        let key = KeyHash { bucket_hash: 0, tag: 1 };
        let keyed_request = KeyedRequest { key, offset: 0, variant: VariantId::DEFAULT, cost: 1 };
        context.inputs.keyed_requests.push(Some(keyed_request));
        self.clock.fetch_max(now_ms, Ordering::SeqCst);
        let clock = || self.clock.load(Ordering::SeqCst);
        let decision = self.charge_plan.decide(&self.table, DecisionTime::starting_at(now_ms, &clock), &mut context);
        (decision, context)
    }

    /// Refunds what a decision has charged.
    pub fn refund(&self, context: &DecisionContext, now_ms: u64) {
        let receipts: Vec<_> = context.all_receipts().collect();
        self.charge_plan.rule_set().refund(&receipts, u32::MAX, &self.table, now_ms);
    }
}

/// A counter of layer 1. Keys whose tags are equal modulo 64 share an overflow counter.
pub fn counter(tag: u64) -> Counter {
    counter_at(tag, 0)
}

/// A counter of layer 1 with this bucket hash.
pub fn counter_at(tag: u64, bucket_hash: u64) -> Counter {
    Counter { key: Key { bucket_hash, tag }, layer: (1u64 << 10).rotate_right(32) }
}

/// The result of one request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Outcome {
    /// Charged in the window that ends at this time.
    Acquired(u64),
    Full,
    Late,
}

/// Takes one token of `limit` in the window that ends at `end_ms`, at the time `now_ms`.
pub fn acquire_one<const W: usize>(
    table: &Table<W>,
    counter: Counter,
    limit: u32,
    end_ms: u64,
    now_ms: u64,
) -> Outcome {
    acquire_one_with_receipt(table, counter, limit, end_ms, now_ms).0
}

/// As [`acquire_one`], with the receipt for a refund.
pub fn acquire_one_with_receipt<const W: usize>(
    t: &Table<W>,
    c: Counter,
    limit: u32,
    end_ms: u64,
    now_ms: u64,
) -> (Outcome, Option<Receipt>) {
    acquire(t, c, AcquireRequest::plain(end_ms, limit, 1), now_ms)
}

/// Windows of 100 ms that depend on each other.
static WINDOWS: [Windows; 1] = [Windows::Even { period_ms: 100, offset_ms: 0 }];

/// The time of a decision on windows of 100 ms.
pub fn time(now_ms: u64) -> Time<'static> {
    Time::new(now_ms, &WINDOWS)
}

/// A request for one token in the current window of a 100 ms grid, with this limit per window and this capacity.
pub fn rolling(now_ms: u64, limit: u32, capacity: u64) -> AcquireRequest {
    let end_ms = (now_ms / 100 + 1) * 100;
    AcquireRequest {
        end_ms,
        ceiling: capacity,
        floor: 0,
        limit,
        cost: 1,
        kind: WindowKind::Accumulating,
        windows: WindowsId::FIRST,
    }
}

/// A request for one token of the window that comes `windows` after the current one.
pub fn reservation(now_ms: u64, limit: u32, windows: u64) -> AcquireRequest {
    let granted = windows * u64::from(limit);
    AcquireRequest { floor: granted, ..rolling(now_ms, limit, u64::from(limit) + granted) }
}

/// A request for one token in a window of 100 ms that the first request opens.
pub fn floating(now_ms: u64, limit: u32) -> AcquireRequest {
    let (end_ms, ceiling) = (now_ms + 100, u64::from(limit));
    AcquireRequest { end_ms, ceiling, floor: 0, limit, cost: 1, kind: WindowKind::Floating, windows: WindowsId::FIRST }
}

/// Charges a request, and returns the receipt for a refund.
pub fn acquire<const W: usize>(
    t: &Table<W>,
    c: Counter,
    request: AcquireRequest,
    now_ms: u64,
) -> (Outcome, Option<Receipt>) {
    match t.acquire(c, request, time(now_ms), None) {
        CounterResult::Acquired(receipt, used) => (Outcome::Acquired(used.end_ms), Some(receipt)),
        CounterResult::Full(_) => (Outcome::Full, None),
        CounterResult::Late => (Outcome::Late, None),
    }
}

/// Whether the charge succeeds.
pub fn acquires<const W: usize>(table: &Table<W>, counter: Counter, request: AcquireRequest, now_ms: u64) -> bool {
    acquire(table, counter, request, now_ms).1.is_some()
}

/// Charges a request, and refunds it at a later time.
pub fn acquire_then_refund<const W: usize>(
    table: &Table<W>,
    counter: Counter,
    request: AcquireRequest,
    now_ms: u64,
    later_ms: u64,
) {
    let (_, receipt) = acquire(table, counter, request, now_ms);
    if let Some(receipt) = receipt {
        table.refund(receipt, request, time(later_ms));
    }
}

/// Tokens of `counter` that are used or owed, as `request` sees them.
pub fn usage_of<const W: usize>(table: &Table<W>, counter: Counter, request: AcquireRequest, now_ms: u64) -> u64 {
    table.peek(counter, request, time(now_ms)).0.used
}

/// Tokens used in the window that ends at `end_ms`, or in the later one that is open, and the end of that window.
pub fn used<const W: usize>(table: &Table<W>, counter: Counter, end_ms: u64) -> (u64, u64) {
    let (used, _) = table.peek(counter, AcquireRequest::plain(end_ms, 1, 1), Time::plain(0));
    (used.used, used.end_ms)
}

/// Refunds one token that [`acquire_one_with_receipt`] charged.
pub fn refund_one<const W: usize>(table: &Table<W>, receipt: Option<Receipt>) {
    if let Some(receipt) = receipt {
        table.refund(receipt, AcquireRequest::plain(0, 1, 1), Time::plain(0));
    }
}

/// One request for one token of several counters, each with its limit and the end of its window.
pub fn acquire_from_all<const W: usize>(table: &Table<W>, on: &[(Counter, u32, u64)], now_ms: u64) -> AcquireResult {
    let charge =
        |&(counter, limit, end_ms): &(Counter, u32, u64)| Charge::new(counter, AcquireRequest::plain(end_ms, limit, 1));
    acquire_all(table, &mut on.iter().map(charge).collect::<Vec<_>>(), &mut Vec::new(), Time::plain(now_ms))
}

/// The number of requests that were charged in the window that ends at `end_ms`.
pub fn acquired_in(results: &[Outcome], end_ms: u64) -> usize {
    results.iter().filter(|&&one| one == Outcome::Acquired(end_ms)).count()
}
