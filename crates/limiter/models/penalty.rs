//! Models of penalties: a request that begins after a refusal has returned is refused until the penalty ends. Requests that are
//! decided at the same time as that refusal may be admitted, within the limit.

use std::sync::Arc;

use transom_limiter::atomics::{AtomicU64, Ordering};
use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::concurrency::ConcurrencyTable;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, RuleId, VariantId};
use transom_limiter::key::{KeyHash, KeyPart, OnMissing, Seed};
use transom_limiter::limit::Limit;
use transom_limiter::rule::Rule;
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::table::Table;

use crate::support::{explore, race};

const KEY: KeyHash = KeyHash { bucket_hash: 0, tag: 1 };
const PENALTY_MS: u64 = 200;

/// One request in 100 ms, and a penalty.
struct Gateway {
    /// Shared by all threads, and never set back.
    clock: AtomicU64,
    table: Table<2>,
    charge_plan: ChargePlan,
}

/// The result of a request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Outcome {
    Admitted,
    /// Until this time.
    Refused(Option<u64>),
}

use Outcome::{Admitted, Refused};

impl Gateway {
    fn new() -> Arc<Gateway> {
        let mut rule = Rule::new(
            "r",
            vec![KeyPart::GLOBAL],
            OnMissing::Never,
            vec![Limit::parse("1/100ms").expect("it is a limit")],
        );
        rule.penalty_ms = Some(PENALTY_MS);
        // A table of one shard, because loom creates its locks again for each interleaving.
        let former = RuleSet { concurrency: Arc::new(ConcurrencyTable::with_capacity(1, 1)), ..RuleSet::default() };
        let rule_set = Arc::new(RuleSet::new(&[rule], Seed(1, 2), Some(&former)));
        let charge_plan = rule_set.charge_plan([RuleId::at(0)]);
        let table = Table::with_buckets(2, 1).expect("there is memory");
        Arc::new(Gateway { clock: AtomicU64::new(0), table, charge_plan })
    }

    fn decide(&self, now_ms: u64) -> (Outcome, Vec<ShardReceipt>) {
        let mut context = DecisionContext::default();
        context.inputs.keyed_requests.push(Some(KeyedRequest {
            key: KEY,
            offset: 0,
            variant: VariantId::DEFAULT,
            cost: 1,
        }));
        self.clock.fetch_max(now_ms, Ordering::SeqCst);
        let clock = || self.clock.load(Ordering::SeqCst);
        let now = DecisionTime::starting_at(now_ms, &clock);
        let decision = self.charge_plan.decide(&self.table, now, &mut context);
        let outcome = match decision {
            Decision::Admitted | Decision::Delayed { .. } => Admitted,
            Decision::Refused => Refused(self.charge_plan.retry_at_ms(&context, now_ms)),
        };
        (outcome, context.all_receipts().collect())
    }

    fn outcome(&self, now_ms: u64) -> Outcome {
        self.decide(now_ms).0
    }
}

/// One thread is refused and tries again in the next window, while another request arrives in that window.
#[test]
fn a_client_that_was_refused_is_locked_out() {
    let outcomes = explore(2, || {
        let gateway = Gateway::new();
        assert_eq!(gateway.outcome(1050), Admitted);
        let [again, other] = race(
            &gateway,
            [
                |gateway| {
                    assert_ne!(gateway.outcome(1060), Admitted, "the window is full");
                    gateway.outcome(1150)
                },
                |gateway| gateway.outcome(1150),
            ],
        );
        assert_eq!(again, Refused(Some(1260)));
        assert_eq!(gateway.outcome(1259), Refused(Some(1260)));
        assert_eq!(gateway.outcome(1260), Admitted);
        other
    });
    // Before the refusal, or after it.
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [Admitted, Refused(Some(1260))]);
}

/// Two threads are refused at once; each client tries again as soon as it has its own refusal.
#[test]
fn concurrent_refusals_lock_out_both_clients() {
    explore(2, || {
        let gateway = Gateway::new();
        assert_eq!(gateway.outcome(1050), Admitted);
        let again = race(
            &gateway,
            [
                |gateway| {
                    assert_ne!(gateway.outcome(1060), Admitted);
                    gateway.outcome(1150)
                },
                |gateway| {
                    assert_ne!(gateway.outcome(1070), Admitted);
                    gateway.outcome(1150)
                },
            ],
        );
        assert_eq!(again[0], again[1]);
        assert!([Refused(Some(1260)), Refused(Some(1270))].contains(&again[0]), "{again:?}");
    });
}

/// A failed login is refused while a successful one is refunded: the refund does not end the penalty.
#[test]
fn a_refund_ends_no_penalty() {
    let outcomes = explore(2, || {
        let gateway = Gateway::new();
        let (table, rule_set) = (&gateway.table, gateway.charge_plan.rule_set());
        let (first, receipts) = gateway.decide(1050);
        assert_eq!(first, Admitted);
        let shared = Arc::clone(&gateway);
        let runner = loom::thread::spawn(move || [shared.outcome(1060), shared.outcome(1061)]);
        rule_set.refund(&receipts, u32::MAX, table, 1060);
        let [one, other] = runner.join().expect("no thread panicked");
        assert!(one == Admitted || other != Admitted, "{one:?} {other:?}");
        assert!(!(one == Admitted && other == Admitted), "one token came back");
        let until_ms = if one == Admitted { 1261 } else { 1260 };
        assert_eq!(gateway.outcome(1100), Refused(Some(until_ms)));
        (one, other)
    });
    assert_eq!(
        outcomes.into_iter().collect::<Vec<_>>(),
        [(Admitted, Refused(Some(1261))), (Refused(Some(1260)), Refused(Some(1260)))]
    );
}

/// Two threads with different times are refused at once: one of them starts the penalty, and both report its end.
#[test]
fn concurrent_refusals_start_one_penalty() {
    let outcomes = explore(2, || {
        let gateway = Gateway::new();
        assert_eq!(gateway.outcome(1050), Admitted);
        let results = race(&gateway, [|gateway| gateway.outcome(1060), |gateway| gateway.outcome(1070)]);
        assert_eq!(results[0], results[1]);
        assert_eq!(gateway.outcome(1100), results[0]);
        results[0]
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [Refused(Some(1260)), Refused(Some(1270))]);
}
