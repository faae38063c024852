//! Models of a rule that counts locally during an outage, while another thread reports its usage to the store.

use std::sync::Arc;

use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::concurrency::ConcurrencyTable;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, RuleId, VariantId};
use transom_limiter::key::{KeyHash, KeyPart, OnMissing, Seed};
use transom_limiter::limit::Limit;
use transom_limiter::memory::Memory;
use transom_limiter::rule::{Rule, Sharing};
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::shared_counting::LocalDecision;
use transom_limiter::table::{Counter, CounterResult, Table, TableLayout};
use transom_limiter::window_kind::AcquireRequest;

use crate::support::{explore, race};

const KEYED_REQUEST: KeyedRequest =
    KeyedRequest { key: KeyHash { bucket_hash: 0, tag: 1 }, offset: 0, variant: VariantId::DEFAULT, cost: 1 };
const NOW_MS: u64 = 1050;

/// A shared limit in 100 ms, for one key.
struct Gateway {
    table: Table<4>,
    charge_plan: ChargePlan,
}

impl Gateway {
    /// One request.
    fn new() -> Arc<Gateway> {
        Gateway::with_limit(Limit::parse("1/100ms").expect("it is a limit"))
    }

    /// Four requests, and as many that roll over: windows depend on each other.
    fn accumulating() -> Arc<Gateway> {
        Gateway::with_limit(Gateway::accumulating_limit())
    }

    fn accumulating_limit() -> Limit {
        Limit { capacity: Some(8), ..Limit::parse("4/100ms").expect("it is a limit") }
    }

    fn with_limit(limit: Limit) -> Arc<Gateway> {
        Arc::new(Gateway::with_table(limit, Table::with_buckets(1, 1).expect("there is memory")))
    }

    fn with_table(limit: Limit, table: Table<4>) -> Gateway {
        let mut rule = Rule::new("r", vec![KeyPart::GLOBAL], OnMissing::Never, vec![limit]);
        rule.sharing = Sharing::Lease;
        // A table of one shard, because loom creates its locks again for each interleaving.
        let former = RuleSet { concurrency: Arc::new(ConcurrencyTable::with_capacity(1, 1)), ..RuleSet::default() };
        let rule_set = Arc::new(RuleSet::new(&[rule], Seed(1, 2), Some(&former)));
        let charge_plan = rule_set.charge_plan([RuleId::at(0)]);
        Gateway { table, charge_plan }
    }

    fn counter(&self) -> Counter {
        self.charge_plan.layer(self.charge_plan.enforced()[0]).counter(KEYED_REQUEST)
    }

    /// Sets the known usage.
    fn know(&self, used: u32) {
        self.table.set_known_usage(self.counter(), 1100, used, NOW_MS);
    }

    /// Whether a request is admitted while the store is unreachable.
    fn admits(&self) -> bool {
        let mut context = DecisionContext::default();
        context.inputs.keyed_requests.push(Some(KEYED_REQUEST));
        self.charge_plan.set_counting_modes(|_rule| true, &mut context.sharing.counting_modes);
        let clock = || NOW_MS;
        let decision = self.charge_plan.decide_locally(
            self.charge_plan.enforced(),
            &self.table,
            DecisionTime::read(&clock),
            &mut context,
            true,
        );
        matches!(decision, LocalDecision::Decided(Decision::Admitted))
    }

    /// Whether a charge is made that was prepared before usage became known.
    fn charges(&self) -> bool {
        let layer = self.charge_plan.layer(self.charge_plan.enforced()[0]).request;
        let request = AcquireRequest { end_ms: 1100, cost: 1, ..layer };
        let time = self.charge_plan.rule_set().time(NOW_MS);
        matches!(self.table.acquire(self.counter(), request, time, None), CounterResult::Acquired(..))
    }

    /// Moves the usage of the local counter to the known usage of the shared one; returns the tokens.
    fn report(&self) -> u64 {
        let layer = self.charge_plan.enforced()[0];
        let announce = |tokens: u64| self.table.add_known_usage(self.counter(), 1100, tokens as u32, NOW_MS);
        let clock = || NOW_MS;
        self.charge_plan.rule_set().reset_local(
            layer.id,
            KEYED_REQUEST,
            &self.table,
            DecisionTime::read(&clock),
            announce,
        )
    }
}

/// A request has read the known usage, and finds the local counter reset.
#[test]
fn reported_usage_is_not_granted_again() {
    let outcomes = explore(2, || {
        let gateway = Gateway::new();
        assert!(gateway.admits());
        let [admitted, reported] = race(&gateway, [|gateway| u64::from(gateway.admits()), Gateway::report]);
        assert_eq!((admitted, gateway.admits()), (0, false), "the only token is used");
        assert_eq!(gateway.report(), 0, "a refused request leaves no token in the local counter");
        reported
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [1]);
}

/// Two workers count the first requests of a key after a report at once: both fit beside what is known to be used.
#[test]
fn known_usage_counts_once() {
    explore(1, || {
        let gateway = Gateway::accumulating();
        gateway.know(5);
        // The words exist from now on: interleavings of their insertion are those of other models.
        assert_eq!((gateway.admits(), gateway.report()), (true, 1));
        assert_eq!(race(&gateway, [Gateway::admits; 2]), [true; 2]);
        assert!(!gateway.admits(), "the limit is used up");
        assert_eq!(gateway.report(), 2);
    });
}

/// A charge that was prepared before usage became known is made while the local counter begins at that usage.
#[test]
fn known_usage_replaces_no_charge() {
    explore(1, || {
        let gateway = Gateway::accumulating();
        gateway.know(6);
        assert_eq!(race(&gateway, [Gateway::charges, Gateway::admits]), [true; 2]);
        assert!(!gateway.admits(), "the limit is used up");
        assert_eq!(gateway.report(), 2);
    });
}

/// A request is counted while another worker reports, in a counter that contains known usage.
#[test]
fn reported_usage_counts_once() {
    let outcomes = explore(1, || {
        let gateway = Gateway::accumulating();
        gateway.know(6);
        assert!(gateway.admits());
        let [admitted, reported] = race(&gateway, [|gateway| u64::from(gateway.admits()), Gateway::report]);
        assert_eq!((admitted, gateway.admits()), (1, false), "the limit is used up");
        assert_eq!(reported + gateway.report(), 2);
        reported
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [1, 2]);
}

/// Two processes share the table, but no lock: one makes the local counter begin at the known usage, while the other reports it and
/// counts a request.
#[test]
fn no_charge_is_lost_between_processes() {
    explore(1, || {
        let layout = TableLayout { counter_buckets: 1, overflow_buckets: 1, bucket_slots: 4 };
        let memory = Memory::zeroed(layout.bytes()).expect("there is memory");
        let processes = Arc::new([(); 2].map(|()| {
            let table = Table::in_memory(layout, &memory, 0).expect("it fits");
            Gateway::with_table(Gateway::accumulating_limit(), table)
        }));
        let [first, second] = &*processes;
        first.know(5);
        assert!(first.admits());
        let [reported, admitted] = race(
            &processes,
            [
                |[first, _]: &[Gateway; 2]| {
                    let reported = first.report();
                    assert!(first.charges());
                    reported
                },
                |[_, second]: &[Gateway; 2]| u64::from(second.admits()),
            ],
        );
        assert!(reported + second.report() >= 2 + admitted, "each charge is reported");
    });
}
