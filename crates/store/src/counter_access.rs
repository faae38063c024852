//! The counters of a worker: in the table of this process, or shared with other gateways. Callers do not ask which of the two
//! counts a rule.

use std::rc::Rc;
use std::sync::Arc;

use super::decision_queries::{KeyQuery, KeyState, UsageSource};
use super::scripts::Refund;
use super::shared_counters::{SharedByWorkers, SharedCounters, counter_of_receipt, keyed_layers};
use super::shared_decision::{BeginResult, SharedOutcome, Unavailable};
use transom_limiter::charge_plan::{ChargePlan, LayerRef};
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::deferred_refunds::DeferredRefunds;
use transom_limiter::handles::{ChargePosition, IdVec, PlanPosition};
use transom_limiter::rule_set::KeyedRequest;
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::store_key::StoreKeys;
use transom_limiter::table::{Counter, Table};
use transom_runtime::clock::Clock;

pub struct CounterAccess {
    pub table: Arc<Table>,
    pub clock: Clock,
    deferred_refunds: Arc<DeferredRefunds>,
    /// `None` where counters are not shared between gateways.
    pub shared: Option<Rc<SharedCounters>>,
}

/// What identifies the counters of a request.
#[derive(Clone, Copy)]
pub struct RequestKeys<'a> {
    pub charge_plan: &'a ChargePlan,
    pub keyed_requests: &'a IdVec<PlanPosition, Option<KeyedRequest>>,
    pub store_keys: &'a StoreKeys,
}

impl RequestKeys<'_> {
    fn store_key(&self, position: PlanPosition) -> Option<&Rc<str>> {
        self.store_keys.get(position).and_then(Option::as_ref)
    }
}

impl CounterAccess {
    /// `shared`: of the same worker.
    pub fn new(of_workers: SharedByWorkers, shared: Option<Rc<SharedCounters>>) -> CounterAccess {
        let SharedByWorkers { table, clock, deferred_refunds, .. } = of_workers;
        CounterAccess { table, clock, deferred_refunds, shared }
    }

    /// The shared counters, if the plan has rules that are counted there.
    fn shared_by(&self, charge_plan: &ChargePlan) -> Option<&Rc<SharedCounters>> {
        self.shared.as_ref().filter(|_| charge_plan.is_shared)
    }

    /// The shared counters, if the query has keys that are counted there.
    fn shared_by_keys(&self, query: &KeyQuery<'_>) -> Option<&Rc<SharedCounters>> {
        self.shared.as_ref().filter(|_| query.store_keys.iter().any(Option::is_some))
    }

    /// Decides a request by the keys in `context`. `now_ms`: a time of the clock that is not older than the request. `store_key`
    /// returns the key of a rule in the store.
    #[inline(always)]
    pub fn decide(
        &self,
        charge_plan: &ChargePlan,
        now_ms: u64,
        context: &mut DecisionContext,
        store_key: impl Fn(PlanPosition) -> Option<Rc<str>>,
    ) -> BeginResult {
        match self.shared_by(charge_plan) {
            None => {
                let clock = || self.clock.now().unix_ms;
                let now = DecisionTime::starting_at(now_ms, &clock);
                BeginResult::Decided(charge_plan.decide(&self.table, now, context))
            }
            Some(shared) => shared.begin(charge_plan, context, store_key),
        }
    }

    /// Completes the result of a request that was delayed and is refused after all. `context` is that of the refusing decision; all
    /// charges of the request have been refunded.
    pub fn refuse_delayed(
        &self,
        charge_plan: &ChargePlan,
        context: &mut DecisionContext,
        store_key: impl Fn(PlanPosition) -> Option<Rc<str>>,
    ) {
        let refusing = charge_plan.refusing_layers(context);
        self.refuse_by(charge_plan, context, &refusing, store_key);
    }

    /// Completes the result of a request that found no free slot.
    pub fn refuse(
        &self,
        charge_plan: &ChargePlan,
        context: &mut DecisionContext,
        store_key: impl Fn(PlanPosition) -> Option<Rc<str>>,
    ) {
        self.refuse_by(charge_plan, context, &[], store_key);
    }

    /// `refusing`: the layers that have refused the request.
    fn refuse_by(
        &self,
        charge_plan: &ChargePlan,
        context: &mut DecisionContext,
        refusing: &[LayerRef],
        store_key: impl Fn(PlanPosition) -> Option<Rc<str>>,
    ) {
        let clock = || self.clock.now().unix_ms;
        charge_plan.refuse(&self.table, DecisionTime::read(&clock), context, refusing);
        if let Some(shared) = self.shared_by(charge_plan) {
            shared.charge_refusal(charge_plan, context, refusing, store_key);
        }
    }

    /// Charges layers of a delayed request again whose windows have ended since.
    pub async fn recharge(
        &self,
        charge_plan: &ChargePlan,
        layers: Vec<LayerRef>,
        mut context: DecisionContext,
        store_keys: &StoreKeys,
    ) -> Result<SharedOutcome, Unavailable> {
        match self.shared_by(charge_plan) {
            None => {
                let clock = || self.clock.now().unix_ms;
                let now = DecisionTime::read(&clock);
                let decision = charge_plan.recharge(&layers, &self.table, now, &mut context);
                Ok(SharedOutcome { decision, context, refunds: Vec::new(), store_keys: StoreKeys::new() })
            }
            Some(shared) => shared.recharge(charge_plan, layers, context, store_keys.clone()).decide(charge_plan).await,
        }
    }

    /// Reads the usage of all layers, and the requests in flight, by the keys in `context`.
    pub fn peek(&self, charge_plan: &ChargePlan, context: &mut DecisionContext) -> bool {
        let clock = || self.clock.now().unix_ms;
        let admits = charge_plan.peek(&self.table, DecisionTime::read(&clock), context);
        charge_plan.peek_slots(context);
        admits
    }

    /// Whether local rules that do not delay refuse a request: a peek, which charges nothing and takes no slot.
    pub fn refuses(&self, charge_plan: &ChargePlan, context: &mut DecisionContext) -> bool {
        let clock = || self.clock.now().unix_ms;
        let admits = charge_plan.peek(&self.table, DecisionTime::read(&clock), context);
        let decision = charge_plan.decide_peeked(admits, self.clock.now().unix_ms, context);
        matches!(decision, Decision::Refused)
    }

    /// Refunds what the last decision has charged by local rules.
    pub fn refund_decision(&self, charge_plan: &ChargePlan, context: &mut DecisionContext) {
        for charged in context.take_receipts(ChargePosition::FIRST) {
            let until_ms = charged.receipt.end_ms();
            let now_ms = context.result.decided_ms;
            self.deferred_refunds.refund([charged], until_ms, charge_plan.rule_set(), &self.table, now_ms);
        }
    }

    /// Charges what a request cost beyond its first charge, whatever remains.
    pub fn charge_excess(&self, keys: RequestKeys<'_>, position: PlanPosition, keyed_request: KeyedRequest) {
        let (rule_set, rule) = (keys.charge_plan.rule_set(), keys.charge_plan.rules()[position]);
        match (&self.shared, keys.store_key(position)) {
            (Some(shared), Some(store_key)) => shared.overdraw(rule_set, rule, keyed_request, store_key),
            _ => rule_set.charge_excess(rule, keyed_request, &self.table, self.clock.now().unix_ms),
        }
    }

    /// Refunds the last `tokens` of each charge that was made here.
    pub fn refund(&self, keys: RequestKeys<'_>, receipts: Vec<ShardReceipt>, tokens: u32) {
        let (rule_set, now_ms) = (keys.charge_plan.rule_set(), self.clock.now().unix_ms);
        self.track_refunded_leases(keys, &receipts);
        self.refund_receipts(keys, receipts.into_iter().rev(), tokens, |charged| {
            rule_set.refund(&[charged], tokens, &self.table, now_ms);
        });
    }

    /// Refunds whole charges that later ones may depend on: now, or when those are refunded. Charges that are not refunded by
    /// `until_ms` stay; `None`: by the end of their window.
    pub fn refund_in_order(&self, keys: RequestKeys<'_>, receipts: Vec<ShardReceipt>, until_ms: Option<u64>) {
        let (rule_set, now_ms) = (keys.charge_plan.rule_set(), self.clock.now().unix_ms);
        self.track_refunded_leases(keys, &receipts);
        self.refund_receipts(keys, receipts.into_iter(), u32::MAX, |charged| {
            let until_ms = until_ms.unwrap_or(charged.receipt.end_ms());
            self.deferred_refunds.refund([charged], until_ms, rule_set, &self.table, now_ms);
        });
    }

    /// Ensures that leased tokens are returned if they are not spent after the refund of these charges.
    fn track_refunded_leases(&self, keys: RequestKeys<'_>, receipts: &[ShardReceipt]) {
        if let Some(shared) = &self.shared {
            shared.track_refunded_leases(keys.charge_plan, keys.keyed_requests, keys.store_keys, receipts);
        }
    }

    /// Refunds in the store what was reported meanwhile, and the others with `refund_locally`.
    fn refund_receipts(
        &self,
        keys: RequestKeys<'_>,
        receipts: impl Iterator<Item = ShardReceipt>,
        tokens: u32,
        refund_locally: impl FnMut(ShardReceipt),
    ) {
        let Some(shared) = &self.shared else { return receipts.for_each(refund_locally) };
        let RequestKeys { charge_plan, keyed_requests, .. } = keys;
        let counter_of = |charged: &ShardReceipt| {
            counter_of_receipt(charge_plan.rule_set(), keyed_layers(charge_plan, keyed_requests), charged)
        };
        shared.refund_receipts(receipts, tokens, counter_of, refund_locally);
    }

    /// Subtracts refunded tokens from the known usage of counters that the store has charged. `end_ms`: the end of their windows;
    /// `None` for sliding windows.
    pub fn forget_refunded(&self, counters: &[(Counter, Option<u64>)], tokens: u32) {
        if let Some(shared) = &self.shared {
            counters.iter().for_each(|(counter, end_ms)| shared.lower_known_usage(*counter, *end_ms, tokens));
        }
    }

    /// Refunds what the store has charged, in the background.
    pub fn refund_in_store(&self, refunds: Vec<Refund>) {
        if let Some(shared) = self.shared.as_ref().filter(|_| !refunds.is_empty()) {
            shared.refund_later(refunds);
        }
    }

    /// Decides a query. `is_check`: what is charged is refunded at once.
    pub async fn decide_query(
        &self,
        query: &KeyQuery<'_>,
        is_check: bool,
    ) -> Result<(Decision, DecisionContext), Unavailable> {
        match self.shared_by_keys(query) {
            Some(shared) if is_check => shared.check(query).await,
            Some(shared) => shared.limit(query).await,
            None => {
                let mut context = query.local_context();
                query.charge_plan.prefetch(&self.table, &query.inputs.keyed_requests);
                let clock = || self.clock.now().unix_ms;
                let decision = query.charge_plan.decide(&self.table, DecisionTime::read(&clock), &mut context);
                if is_check && !matches!(decision, Decision::Refused) {
                    let receipts: Vec<ShardReceipt> = context.all_receipts().collect();
                    let now_ms = context.result.decided_ms;
                    query.charge_plan.rule_set().refund(&receipts, u32::MAX, &self.table, now_ms);
                }
                Ok((decision, context))
            }
        }
    }

    /// Reads the usage of the keys of a query.
    pub async fn value(&self, query: &KeyQuery<'_>) -> Result<KeyState, Unavailable> {
        match self.shared_by_keys(query) {
            Some(shared) => shared.value(query).await,
            None => Ok(self.local_value(query)),
        }
    }

    /// When a request of the query would be admitted after a refusal: see [`ChargePlan::retry_at_ms_once_refused`]. `state`: as read by
    /// [`CounterAccess::value`].
    pub async fn retry_at_ms_once_refused(&self, query: &KeyQuery<'_>, state: &mut KeyState) -> Option<u64> {
        let KeyState { context, source, .. } = state;
        let is_from_store = *source == UsageSource::Store;
        if let (Some(shared), true) = (&self.shared, is_from_store) {
            shared.find_return_times(query, context, true).await;
        }
        let table = (!is_from_store).then_some(&*self.table);
        query.charge_plan.retry_at_ms_once_refused(table, context, self.clock.now().unix_ms)
    }

    /// Removes the counters of the keys of a query.
    pub async fn reset(&self, query: &KeyQuery<'_>) -> Result<KeyState, Unavailable> {
        if let Some(shared) = self.shared_by_keys(query) {
            return shared.reset(query).await;
        }
        let KeyState { context, .. } = self.local_value(query);
        query.charge_plan.rule_set().reset(&self.table, context.result.decided_ms, &context);
        Ok(self.local_value(query))
    }

    fn local_value(&self, query: &KeyQuery<'_>) -> KeyState {
        let mut context = query.local_context();
        let clock = || self.clock.now().unix_ms;
        let admits = query.charge_plan.peek(&self.table, DecisionTime::read(&clock), &mut context);
        KeyState { context, admits, source: UsageSource::Table, refuses_without_store: true }
    }

    /// Refunds charges that can be refunded by now.
    pub fn sweep_refunds(&self) {
        self.deferred_refunds.sweep(&self.table, self.clock.now().unix_ms);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fastrand::Rng;
    use tokio::task::JoinHandle;

    use super::super::circuit_breaker::FAILURES_MAX;
    use super::super::reconnecting::ServerId;
    use super::super::settlement::RuleCharges;
    use super::super::test_worker::{
        FIRST_REQUEST_KEY, HOUR_MS, KEY, SLIDING_KEY, START_MS, TestWorker, leased, local, named, run,
    };
    use super::*;
    use transom_limiter::handles::{Handle, RuleId};
    use transom_limiter::limit::Limit;
    use transom_limiter::rule::{Cost, OnOutage, Rule, Sharing};
    use transom_limiter::window::Windows;

    fn counters(worker: &TestWorker) -> CounterAccess {
        let shared = Some(Rc::clone(&worker.shared));
        CounterAccess::new(worker.shared_by_workers.clone(), shared)
    }

    /// A query of key `a`.
    fn query(worker: &TestWorker, cost: u32) -> KeyQuery<'_> {
        KeyQuery {
            charge_plan: &worker.charge_plan,
            inputs: worker.context("a", cost).inputs,
            store_keys: worker.store_keys("a"),
        }
    }

    /// When a request of key `a` would be admitted after a refusal.
    async fn explained_ms(worker: &TestWorker, cost: u32) -> Option<u64> {
        let (counters, query) = (counters(worker), query(worker, cost));
        let mut state = counters.value(&query).await.ok()?;
        counters.retry_at_ms_once_refused(&query, &mut state).await
    }

    /// The usage of key `a` that [`CounterAccess::value`] reads, its end, and where it is from.
    async fn value(worker: &TestWorker) -> (u64, u64, UsageSource) {
        let state = counters(worker).value(&query(worker, 1)).await.expect("the rule can be counted");
        let usage = state.context.result.charges.as_slice()[0].usage;
        (usage.used, usage.end_ms, state.source)
    }

    /// Leased tokens that are not spent are no usage, neither while the store replies nor in an outage.
    #[test]
    fn a_value_says_what_the_next_request_gets() {
        let aligned = Limit::parse("9/hour").unwrap().windows;
        let kinds = [aligned, Windows::Sliding { period_ms: HOUR_MS }, Windows::FirstRequest { period_ms: HOUR_MS }];
        run(async {
            for seed in 0..300 {
                let mut rng = Rng::with_seed(seed);
                let mut rule = Rule { sharing: Sharing::Lease, ..leased(&["9/hour"]) };
                rule.layers[0].windows = rng.choice(&kinds).expect("one").clone();
                rule.layers[0].capacity = rng.bool().then_some(9);
                let worker = TestWorker::new(&[rule]).await;
                let admin = counters(&worker.beside());
                let outage = rng.u32(4..12);
                for step in 0..12 {
                    if step == outage {
                        worker.store.set_refusing(true);
                    }
                    let cost = rng.u32(1..4);
                    let state = admin.value(&query(&worker, cost)).await.unwrap();
                    let (decision, context) = worker.outcome("a", cost).await.unwrap();
                    let is_admitted = matches!(decision, Decision::Admitted);
                    let of = (seed, step, outage, worker.rule_set.rules[RuleId::at(0)].rule.layers.clone());
                    assert_eq!(state.admits, is_admitted, "{of:?}");
                    assert_eq!(
                        state.context.result.charges.iter().all(|charge| !charge.is_full),
                        is_admitted,
                        "{of:?}"
                    );
                    if is_admitted && rng.bool() {
                        let receipts = context.all_receipts().collect();
                        let (keyed_requests, store_keys) = (&context.inputs.keyed_requests, &worker.store_keys("a"));
                        let keys = RequestKeys { charge_plan: &worker.charge_plan, keyed_requests, store_keys };
                        counters(&worker).refund(keys, receipts, 1);
                    }
                    if step < outage {
                        worker.settled_calls().await;
                        if rng.u8(..5) == 0 {
                            worker.shared.return_idle(true).await;
                        }
                    }
                    // Leases grow while they are spent within a second.
                    worker.clock.advance(Duration::from_millis(rng.choice([20, 200_000]).expect("one")));
                }
            }
        });
    }

    /// The next tokens of a sliding window come back a period after the first ones were used. Leases end before.
    #[test]
    fn leases_of_sliding_windows_state_when_tokens_come_back() {
        run(async {
            let mut stated = Vec::new();
            for sharing in [Sharing::Local, Sharing::Exact, Sharing::Lease] {
                let mut rule = Rule { sharing, ..leased(&["20/minute"]) };
                rule.layers[0].windows = Windows::Sliding { period_ms: 60_000 };
                let worker = TestWorker::new(&[rule]).await;
                let workers = [worker.beside(), worker];
                let mut usages = Vec::new();
                for worker in (0..60).map(|i| &workers[i % 2]) {
                    let (decision, context) = worker.outcome("a", 1).await.unwrap();
                    let usage = context.result.charges.as_slice()[0].usage;
                    usages.push((matches!(decision, Decision::Admitted), usage.used, usage.end_ms));
                    worker.settled_calls().await;
                    worker.clock.advance(Duration::from_millis(2500));
                }
                stated.push(usages);
            }
            assert_eq!(stated[1], stated[0]);
            assert_eq!(stated[2], stated[0]);
        });
    }

    /// Without the store, the gateway has assumed a later end of the window.
    #[test]
    fn the_first_value_after_an_outage_is_that_of_the_store() {
        run(async {
            for sharing in [Sharing::Exact, Sharing::Lease] {
                let mut rule = Rule { sharing, ..leased(&["9/hour"]) };
                rule.layers[0].windows = Windows::FirstRequest { period_ms: HOUR_MS };
                let worker = TestWorker::new(&[rule]).await;
                // By another gateway.
                worker.store.set_used(FIRST_REQUEST_KEY, 4);
                worker.clock.advance(Duration::from_secs(600));
                worker.store.set_refusing(true);
                assert_eq!(worker.decide("a", 3).await, Some(true));
                assert_eq!(value(&worker).await, (3, START_MS + HOUR_MS + 600_000, UsageSource::StoreAway));
                worker.store.set_refusing(false);
                worker.clock.advance(Duration::from_secs(60));
                worker.shared.report_to_reachable().await;
                for used in [7, 9] {
                    assert_eq!(value(&worker).await, (used, START_MS + HOUR_MS, UsageSource::Store));
                    assert_eq!(worker.decide("a", 2).await, Some(used == 7));
                    worker.settled_calls().await;
                }
                worker.clock.advance(Duration::from_millis(HOUR_MS - 660_000));
                assert_eq!(value(&worker).await.0, 0);
            }
        });
    }

    /// Requests of an outage count in the window that is open in the store, and not beyond its end.
    #[test]
    fn an_outage_goes_on_with_the_open_window() {
        run(async {
            for sharing in [Sharing::Exact, Sharing::Lease] {
                let mut rule = Rule { sharing, ..leased(&["10/hour"]) };
                rule.layers[0].windows = Windows::FirstRequest { period_ms: HOUR_MS };
                let worker = TestWorker::new(&[rule]).await;
                assert_eq!(worker.decide("a", 5).await, Some(true));
                worker.settled_calls().await;
                worker.shared.return_idle(true).await;
                worker.store.set_refusing(true);
                // The last window begins behind the end of the first.
                for (then_ms, admitted) in [(HOUR_MS / 2, 5), (HOUR_MS / 2 + 1000, 10), (HOUR_MS / 2, 0)] {
                    worker.clock.advance(Duration::from_millis(then_ms));
                    let mut count = 0;
                    for _ in 0..12 {
                        count += u32::from(worker.decide("a", 1).await == Some(true));
                    }
                    assert_eq!(count, admitted, "{sharing:?}");
                }
            }
        });
    }

    /// What was used before an outage counts in windows that begin in it, where tokens roll over or are owed.
    #[test]
    fn a_gateway_alone_decides_in_an_outage_as_before() {
        let aligned = Limit::parse("3/hour").unwrap().windows;
        let kinds = [aligned, Windows::FirstRequest { period_ms: HOUR_MS }];
        run(async {
            for seed in 0..200 {
                let mut rng = Rng::with_seed(seed);
                let sharing = rng.choice([Sharing::Exact, Sharing::Lease]).expect("one");
                let mut rule = Rule { sharing, ..leased(&["3/hour"]) };
                rule.layers[0].windows = rng.choice(&kinds).expect("one").clone();
                rule.layers[0].capacity = rng.bool().then_some(8);
                let is_opened = rule.layers[0].windows.are_opened_by_requests();
                let reserve = rng.bool().then(|| rng.u32(..3));
                match reserve {
                    Some(reserve) => rule.cost = Cost::Response { source: None, reserve, max: 20 },
                    None => rule.count_refused = rng.bool(),
                }
                let local = Rule { sharing: Sharing::Local, ..rule.clone() };
                let of = (seed, rule.clone());
                let workers = [TestWorker::new(&[rule]).await, TestWorker::new(&[local]).await];
                let shared = &workers[0].shared;
                let (outage, mut is_up) = (rng.u32(2..7), true);
                for step in 0..16 {
                    if step == outage || step == outage + 6 {
                        // The window of a first request in an outage begins in the store with the report.
                        if step > outage && is_opened {
                            break;
                        }
                        is_up = !is_up;
                        workers[0].store.set_refusing(!is_up);
                        let now = workers[0].clock.instant();
                        match is_up {
                            false => {
                                _ = shared.breaker.record_failure(ServerId::ONLY, FAILURES_MAX, now, Duration::ZERO)
                            }
                            true => shared.breaker.close(ServerId::ONLY, now),
                        }
                        if is_up {
                            shared.report_to_reachable().await;
                            workers[0].settled_calls().await;
                        }
                    }
                    let (first_cost, cost) = (reserve.unwrap_or(rng.u32(1..4)), rng.u32(..8));
                    let then_ms = rng.choice([20, 20, 1_000_000, HOUR_MS]).expect("one");
                    let mut stated = Vec::new();
                    for worker in &workers {
                        let (decision, context, refunds) = match worker.begin("a", first_cost) {
                            (BeginResult::Pending(pending), _) => {
                                let outcome = pending.decide(&worker.charge_plan).await.unwrap();
                                (outcome.decision, outcome.context, outcome.refunds)
                            }
                            (BeginResult::Decided(decision), context) => (decision, context, Vec::new()),
                            (BeginResult::Unavailable, _) => panic!("unavailable"),
                        };
                        let (is_refused, now_ms) = (matches!(decision, Decision::Refused), worker.clock.now().unix_ms);
                        let retry_ms = worker.charge_plan.retry_at_ms(&context, now_ms).filter(|_| is_refused);
                        stated.push((is_refused, context.result.charges.as_slice()[0].usage.used, retry_ms));
                        if reserve.is_some() && !is_refused {
                            let (keyed_requests, store_keys) =
                                (&context.inputs.keyed_requests, &worker.store_keys("a"));
                            let keys = RequestKeys { charge_plan: &worker.charge_plan, keyed_requests, store_keys };
                            let charged = RuleCharges::of(&context, PlanPosition::FIRST);
                            let is_shared = worker.charge_plan.is_shared;
                            let shared = is_shared.then(|| Rc::clone(&worker.shared));
                            let counters = CounterAccess::new(worker.shared_by_workers.clone(), shared);
                            counters.settle(keys, PlanPosition::FIRST, &charged, &refunds, cost);
                        }
                        if is_up {
                            worker.settled_calls().await;
                            worker.shared.return_idle(true).await;
                            worker.settled_calls().await;
                        }
                        worker.clock.advance(Duration::from_millis(then_ms));
                    }
                    assert_eq!(stated[0], stated[1], "step {step}, outage at {outage}: {of:#?}");
                }
            }
        });
    }

    /// The rule that refuses is counted here, so that the store is not asked.
    #[test]
    fn a_refusal_in_an_outage_counts_in_shared_rules() {
        let aligned = Limit::parse("20/hour").unwrap().windows;
        let sliding = Windows::Sliding { period_ms: HOUR_MS };
        let first_request = Windows::FirstRequest { period_ms: HOUR_MS };
        let cases = [(aligned, KEY), (sliding, SLIDING_KEY), (first_request, FIRST_REQUEST_KEY)];
        run(async {
            for sharing in [Sharing::Exact, Sharing::Lease] {
                for (windows, key) in &cases {
                    let mut counting = Rule { sharing, count_refused: true, ..leased(&["20/hour"]) };
                    counting.layers[0].windows = windows.clone();
                    let worker = TestWorker::new(&[counting, named("other", local("3/hour"))]).await;
                    assert_eq!(worker.decide("a", 3).await, Some(true));
                    worker.settled_calls().await;
                    // With leased tokens, which are spent first.
                    let counted = worker.store.used(key);
                    worker.store.set_refusing(true);
                    let now = worker.clock.instant();
                    worker.shared.breaker.record_failure(ServerId::ONLY, FAILURES_MAX, now, Duration::ZERO);
                    for used in [6, 9, 12, 15, 18, 20, 20] {
                        let (decision, context) = worker.outcome("a", 3).await.unwrap();
                        assert!(matches!(decision, Decision::Refused));
                        let of_rule = context.charges_of_rule(PlanPosition::FIRST);
                        let stated: Vec<u64> = of_rule.map(|charge| charge.usage.used).collect();
                        assert_eq!(stated, [used], "{sharing:?} {key}");
                        let layer = worker.layer_ref(0, 0).id;
                        let local = worker.shared.used_locally(&worker.rule_set, layer, worker.request(0, "a", 1));
                        assert_eq!(local.used, used - counted, "{sharing:?} {key}");
                    }
                    // Another worker does not know of the outage yet.
                    let (_, context) = worker.beside().outcome("a", 3).await.unwrap();
                    let stated = context.charges_of_rule(PlanPosition::FIRST).map(|charge| charge.usage.used);
                    assert_eq!(stated.collect::<Vec<_>>(), [20], "{sharing:?} {key}");
                    worker.store.set_refusing(false);
                    worker.shared.breaker.close(ServerId::ONLY, worker.clock.instant());
                    worker.shared.report_to_reachable().await;
                    assert_eq!(worker.store.used(key), 20, "{sharing:?} {key}");
                }
            }
        });
    }

    /// The gateway finds out after the refusal that the store does not answer, or that its connection is new.
    #[test]
    fn a_refusal_counts_although_its_call_fails() {
        run(async {
            for (sharing, is_reachable_again) in
                [Sharing::Exact, Sharing::Lease].map(|sharing| [(sharing, false), (sharing, true)]).concat()
            {
                let counting = Rule { sharing, count_refused: true, ..leased(&["6/hour"]) };
                let worker = TestWorker::new(&[counting, named("other", local("1/hour"))]).await;
                assert_eq!(worker.decide("a", 1).await, Some(true));
                worker.settled_calls().await;
                worker.store.set_refusing(true);
                if is_reachable_again {
                    assert!(worker.shared.store.probe().await.is_err());
                    worker.store.set_refusing(false);
                }
                assert_eq!(worker.decide("a", 2).await, Some(false));
                let has_ended = async || {
                    while worker.calls("unreachable") == 0 && worker.store.used(KEY) == 1 {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                };
                tokio::time::timeout(Duration::from_secs(60), has_ended()).await.unwrap();
                worker.store.set_refusing(false);
                worker.shared.report_to_reachable().await;
                assert_eq!(worker.store.used(KEY), 3, "{sharing:?} {is_reachable_again}");
            }
        });
    }

    /// The gateway finds out in the next window that the store does not answer.
    #[test]
    fn a_refusal_takes_nothing_of_a_later_window() {
        run(async {
            for sharing in [Sharing::Exact, Sharing::Lease] {
                let counting = Rule { sharing, count_refused: true, ..leased(&["6/hour"]) };
                let worker = TestWorker::new(&[counting, named("other", local("1/day"))]).await;
                assert_eq!(worker.decide("a", 1).await, Some(true));
                worker.settled_calls().await;
                worker.store.set_refusing(true);
                assert_eq!(worker.decide("a", 2).await, Some(false));
                worker.clock.advance(Duration::from_millis(HOUR_MS));
                let has_failed = async || {
                    while worker.calls("unreachable") == 0 {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                };
                tokio::time::timeout(Duration::from_secs(60), has_failed()).await.unwrap();
                let (layer, request) = (worker.layer_ref(0, 0).id, worker.request(0, "a", 1));
                assert_eq!(worker.shared.used_locally(&worker.rule_set, layer, request).used, 0, "{sharing:?}");
            }
        });
    }

    /// The reply to a question states the end of a window that would open now.
    #[test]
    fn a_question_does_not_extend_a_window_that_the_store_has_lost() {
        run(async {
            for sharing in [Sharing::Exact, Sharing::Lease] {
                let mut rule = Rule { sharing, ..leased(&["5/hour"]) };
                rule.layers[0].windows = Windows::FirstRequest { period_ms: HOUR_MS };
                let worker = TestWorker::new(&[rule]).await;
                assert_eq!(worker.decide("a", 5).await, Some(true));
                worker.settled_calls().await;
                worker.store.set_refusing(true);
                assert!(worker.shared.store.probe().await.is_err());
                worker.store.set_used(FIRST_REQUEST_KEY, 0);
                worker.store.set_refusing(false);
                assert!(worker.shared.store.probe().await.is_ok());
                worker.shared.note_reconnect(worker.clock.instant());
                for _ in 0..2 {
                    worker.clock.advance(Duration::from_secs(600));
                    assert_eq!(value(&worker).await, (5, START_MS + HOUR_MS, UsageSource::Store), "{sharing:?}");
                    assert_eq!(worker.decide("a", 1).await, Some(false), "{sharing:?}");
                }
            }
        });
    }

    /// A reply to one worker lacks the refund that another one has sent.
    #[test]
    fn a_refund_after_a_new_connection_is_not_counted_again() {
        run(async {
            let worker = TestWorker::new(&[Rule { sharing: Sharing::Exact, ..leased(&["9/hour"]) }]).await;
            let workers = [worker.beside(), worker];
            for worker in &workers {
                assert_eq!(worker.decide("b", 1).await, Some(true));
            }
            assert_eq!(workers[0].decide("a", 1).await, Some(true));
            workers[0].store.set_refusing(true);
            for worker in &workers {
                assert!(worker.shared.store.probe().await.is_err());
            }
            workers[0].store.set_refusing(false);
            let mut refunds = Vec::new();
            for worker in &workers {
                let pending = worker.pending("a", 1).decide(&worker.charge_plan).await.unwrap();
                let end_ms = pending.context.result.charges.as_slice()[0].usage.end_ms;
                counters(worker).forget_refunded(&[(worker.counter("a", 0), Some(end_ms))], 1);
                refunds.push(pending.refunds.into_iter().map(|(_, refund)| refund).collect());
            }
            for (worker, refunds) in workers.iter().zip(refunds) {
                worker.shared.refund(refunds).await;
            }
            assert_eq!(workers[0].store.used(KEY), 1);
            for used in [2, 3] {
                assert_eq!(workers[used % 2].decide("a", 1).await, Some(true));
                assert_eq!(workers[0].store.used(KEY), used as u64);
            }
        });
    }

    /// The store has refused the penalty of the second gateway: it lasts since the first one.
    #[test]
    fn a_penalty_ends_as_another_gateway_has_started_it() {
        run(async {
            let penalty = Rule { penalty_ms: Some(2 * HOUR_MS), ..leased(&["2/day"]) };
            let worker = TestWorker::new(&[penalty, named("other", local("2/day"))]).await;
            let other = worker.other_gateway();
            for (worker, is_admitted) in [(&worker, true), (&other, true), (&worker, false)] {
                assert_eq!(worker.decide("a", 1).await, Some(is_admitted));
                worker.settled_calls().await;
            }
            worker.clock.advance(Duration::from_millis(HOUR_MS));
            for _ in 0..2 {
                let (decision, context) = other.outcome("a", 2).await.unwrap();
                assert!(matches!(decision, Decision::Refused));
                let penalties =
                    context.result.charges.iter().filter(|charge| charge.layer.position == PlanPosition::FIRST);
                let ends: Vec<u64> =
                    penalties.filter(|charge| charge.request.cost == 0).map(|charge| charge.usage.end_ms).collect();
                assert_eq!(ends, [START_MS + 2 * HOUR_MS]);
                other.settled_calls().await;
            }
        });
    }

    #[test]
    fn a_request_of_cost_0_states_what_is_known() {
        run(async {
            let worker = TestWorker::new(&[leased(&["6/hour"])]).await;
            for (cost, used) in [(0, 0), (2, 2), (0, 2)] {
                let (decision, context) = worker.outcome("a", cost).await.unwrap();
                assert!(matches!(decision, Decision::Admitted));
                worker.settled_calls().await;
                let stated: Vec<u64> =
                    context.charges_of_rule(PlanPosition::FIRST).map(|charge| charge.usage.used).collect();
                assert_eq!(stated, [used], "cost {cost}");
            }
        });
    }

    #[test]
    fn a_charge_by_a_new_connection_counts_once() {
        run(async {
            let worker = TestWorker::new(&[leased(&["90/hour"])]).await;
            assert_eq!(worker.decide("a", 1).await, Some(true));
            worker.settled_calls().await;
            worker.store.set_refusing(true);
            assert!(worker.shared.store.probe().await.is_err());
            worker.store.set_refusing(false);
            worker.shared.overdraw(&worker.rule_set, RuleId::at(0), worker.request(0, "a", 2), &"r|a".into());
            worker.settled_calls().await;
            assert_eq!(worker.store.used(KEY), 3);
        });
    }

    /// The rule with the penalty is not asked once a lease refuses.
    #[test]
    fn a_refusal_by_a_lease_starts_the_penalty_of_another_full_rule() {
        run(async {
            let penalty = Rule { penalty_ms: Some(2 * HOUR_MS), ..leased(&["3/hour"]) };
            let worker = TestWorker::new(&[leased(&["3/hour"]), named("login", penalty)]).await;
            assert_eq!(worker.decide("a", 3).await, Some(true));
            worker.settled_calls().await;
            assert_eq!(worker.decide("a", 1).await, Some(false));
            worker.settled_calls().await;
            assert_eq!(worker.store.used(KEY), 3);
            // Both windows are open, and the penalty lasts.
            worker.clock.advance(Duration::from_millis(HOUR_MS));
            for _ in 0..2 {
                assert_eq!(worker.decide("a", 1).await, Some(false));
                worker.settled_calls().await;
            }
            assert_eq!(
                worker.store.used("transom:{r|a}:500001"),
                u64::from(worker.leased_tokens("a", 0)),
                "none is spent"
            );
            worker.clock.advance(Duration::from_millis(HOUR_MS));
            assert_eq!(worker.decide("a", 1).await, Some(true));
        });
    }

    /// The store is asked about a sliding window, of which only it knows whether tokens have come back.
    #[test]
    fn a_refusal_by_another_rule_states_the_penalty_that_it_starts() {
        run(async {
            for (elapsed_ms, is_full) in [(HOUR_MS, true), (2 * HOUR_MS, false)] {
                let mut penalty = Rule { penalty_ms: Some(5 * HOUR_MS), ..leased(&["2/hour"]) };
                penalty.layers[0].windows = Windows::Sliding { period_ms: 2 * HOUR_MS };
                let worker = TestWorker::new(&[penalty, named("other", local("2/24h"))]).await;
                assert_eq!(worker.decide("a", 1).await, Some(true));
                worker.clock.advance(Duration::from_millis(elapsed_ms));
                // With the first token, the usage is known for longer than the token counts.
                worker.clock.advance(Duration::from_millis(HOUR_MS / 4));
                assert_eq!(worker.decide("a", 1).await, Some(true));
                for _ in 0..2 {
                    let (decision, context) = worker.outcome("a", 1).await.unwrap();
                    assert!(matches!(decision, Decision::Refused));
                    let verdicts = worker.charge_plan.verdicts(&context, &decision);
                    let of_rule = verdicts.of_rule(PlanPosition::FIRST);
                    let full: Vec<bool> = of_rule.windows().map(|window| window.is_full()).collect();
                    assert_eq!(full, [is_full; 2]);
                    let now_ms = worker.clock.now().unix_ms;
                    let of_penalty =
                        context.result.charges.iter().filter(|charge| charge.layer.position == PlanPosition::FIRST);
                    let retry_ms = of_penalty
                        .map(|charge| worker.rule_set.available_at_ms(charge, charge.layer.id, now_ms).unwrap());
                    assert_eq!(retry_ms.max(), Some(now_ms + if is_full { 5 * HOUR_MS } else { 0 }));
                    worker.settled_calls().await;
                }
            }
        });
    }

    /// A request of two tokens that another rule refuses: whether its sliding window, which has one token left, is full is asked of the
    /// store, which holds the reply back.
    async fn checked_refusal() -> (TestWorker, JoinHandle<bool>) {
        let mut rule = Rule { penalty_ms: Some(5 * HOUR_MS), count_refused: true, ..leased(&["3/hour"]) };
        rule.layers[0].windows = Windows::Sliding { period_ms: HOUR_MS };
        let mut worker = TestWorker::new(&[rule, named("other", local("2/24h"))]).await;
        let timeout = Duration::from_millis(400);
        Rc::get_mut(&mut worker.shared).expect("no task is running").timeout = timeout;
        assert_eq!(worker.decide("a", 2).await, Some(true));
        worker.settled_calls().await;
        worker.store.hold();
        let mut pending = worker.pending("a", 2);
        // A server that was silent for half of the timeout has failed.
        pending.deadline = tokio::time::Instant::from_std(worker.clock.instant()) + timeout * 3 / 4;
        let charge_plan = worker.rule_set.charge_plan(worker.rule_set.rules.ids());
        let decision = tokio::task::spawn_local(async move {
            matches!(pending.decide(&charge_plan).await.unwrap().decision, Decision::Refused)
        });
        worker.store.next_calls().await;
        (worker, decision)
    }

    #[test]
    fn a_refusal_counts_whose_client_leaves_while_a_window_is_checked() {
        run(async {
            let (worker, decision) = checked_refusal().await;
            decision.abort();
            worker.store.release();
            worker.settled_calls().await;
            assert_eq!(worker.store.used(SLIDING_KEY), 3);
        });
    }

    #[test]
    fn a_store_that_does_not_answer_a_check_is_recorded() {
        run(async {
            let (worker, decision) = checked_refusal().await;
            assert!(decision.await.unwrap());
            assert_eq!(worker.calls("timeout"), 1);
            worker.store.release();
            worker.settled_calls().await;
            assert_eq!(worker.store.used(SLIDING_KEY), 3);
        });
    }

    /// The cost of the response is neither charged nor refunded.
    #[test]
    fn a_rule_that_an_outage_skips_has_not_charged() {
        run(async {
            for (on_outage, has_charged) in [(OnOutage::Allow, false), (OnOutage::Local, true)] {
                let rule = |sharing| Rule { on_outage, sharing, ..leased(&["9/hour"]) };
                let worker = TestWorker::new(&[rule(Sharing::Lease), named("exact", rule(Sharing::Exact))]).await;
                worker.store.set_refusing(true);
                let BeginResult::Pending(pending) = worker.begin("a", 2).0 else { panic!("the store is asked") };
                let SharedOutcome { context, refunds, .. } = pending.decide(&worker.charge_plan).await.unwrap();
                let charged = [0, 1].map(|position| context.has_charged(PlanPosition::at(position)));
                assert_eq!((charged, refunds.len()), ([has_charged; 2], 0));
                assert_eq!(context.all_receipts().count(), if has_charged { 2 } else { 0 });
            }
        });
    }

    /// A token that came too late for the table counts, and its rule is settled.
    #[test]
    fn a_rule_whose_token_did_not_fit_has_charged() {
        run(async {
            let worker = TestWorker::new(&[leased(&["9/hour"]), named("other", leased(&["9/hour"]))]).await;
            let mut context = worker.context("a", 1);
            context.sharing.prepaid.push(worker.layer_ref(1, 0));
            assert_eq!([0, 1].map(|position| context.has_charged(PlanPosition::at(position))), [false, true]);
        });
    }

    /// Tokens of a sliding window come back before its known usage ends.
    #[test]
    fn a_refusal_for_a_slot_calls_no_sliding_window_full_whose_tokens_came_back() {
        run(async {
            let mut rule = Rule { sharing: Sharing::Exact, penalty_ms: Some(HOUR_MS), ..leased(&["3/minute"]) };
            rule.layers[0].windows = Windows::Sliding { period_ms: 60_000 };
            let worker = TestWorker::new(&[rule]).await;
            for (cost, then_ms) in [(2, 59_000), (1, 16_000)] {
                assert_eq!(worker.decide("a", cost).await, Some(true));
                worker.settled_calls().await;
                worker.clock.advance(Duration::from_millis(then_ms));
            }
            let (mut context, keys) = (worker.context("a", 1), worker.store_keys("a"));
            counters(&worker).refuse(&worker.charge_plan, &mut context, |position| keys[position].clone());
            worker.settled_calls().await;
            assert!(context.result.charges.iter().all(|charge| !charge.is_full), "{:?}", context.result.charges);
            assert_eq!(worker.decide("a", 1).await, Some(true));
        });
    }

    #[test]
    fn a_request_that_costs_nothing_takes_no_lease() {
        run(async {
            let sliding = |mut rule: Rule| {
                rule.layers[0].windows = Windows::Sliding { period_ms: HOUR_MS };
                rule
            };
            let penalty = |rule| Rule { penalty_ms: Some(HOUR_MS), ..rule };
            let counts_refused = |rule| Rule { count_refused: true, ..rule };
            for change in [|rule| rule, sliding, penalty, counts_refused] as [fn(Rule) -> Rule; 4] {
                for sharing in [Sharing::Lease, Sharing::Exact] {
                    let worker = TestWorker::new(&[change(Rule { sharing, ..leased(&["3/hour"]) })]).await;
                    // Nothing is known; then all is used, and more.
                    assert_eq!((worker.decide("a", 0).await, worker.leased_tokens("a", 0)), (Some(true), 0));
                    assert_eq!(worker.decide("a", 3).await, Some(true));
                    worker.settled_calls().await;
                    let used =
                        || ["transom:{r|a}:500000", SLIDING_KEY].map(|key| worker.store.used(key)).iter().sum::<u64>();
                    assert_eq!((worker.decide("a", 0).await, used()), (Some(true), 3));
                    let keyed_request = worker.request(0, "a", 4);
                    worker.shared.overdraw(&worker.rule_set, RuleId::at(0), keyed_request, &"r|a".into());
                    worker.settled_calls().await;
                    for _ in 0..2 {
                        assert_eq!((worker.decide("a", 0).await, used()), (Some(true), 7));
                        worker.settled_calls().await;
                    }
                    assert_eq!(worker.decide("a", 1).await, Some(false));
                }
            }
        });
    }

    /// What a refusal takes of a sliding window comes back last. A request may be refused again by rules that were not asked.
    #[test]
    fn a_refused_request_is_admitted_at_the_time_that_it_is_told() {
        let minute = |sharing, count_refused| {
            let mut rule = Rule { sharing, count_refused, ..leased(&["10/minute"]) };
            rule.layers[0].windows = Windows::Sliding { period_ms: 60_000 };
            rule
        };
        run(async {
            for seed in 0..500 {
                let mut rng = Rng::with_seed(seed);
                let mut any =
                    || (rng.choice([Sharing::Exact, Sharing::Lease, Sharing::Local]).expect("one"), rng.bool());
                let ((sharing, count_refused), others) = (any(), any());
                let mut rules = vec![minute(sharing, count_refused)];
                if let Some(limit) = rng.choice([None, None, Some("12/hour"), Some("7/10s")]).expect("one") {
                    let (sharing, count_refused) = others;
                    rules.push(named("other", Rule { sharing, count_refused, ..leased(&[limit]) }));
                }
                let local = rules.iter().map(|rule| Rule { sharing: Sharing::Local, ..rule.clone() });
                let (worker, local) =
                    (TestWorker::new(&rules).await, TestWorker::new(&local.collect::<Vec<_>>()).await);
                let advance = |ms| [&worker, &local].map(|worker| worker.clock.advance(Duration::from_millis(ms)));
                advance(rng.u64(..60_000));
                let mut is_exact = rules.len() == 1 && sharing == Sharing::Exact;
                for _ in 0..8 {
                    let cost = rng.u32(1..8);
                    let explained_ms = if is_exact { explained_ms(&worker, cost).await } else { None };
                    worker.settled_calls().await;
                    let (decision, context) = worker.outcome("a", cost).await.unwrap();
                    let (_, local_context) = local.outcome("a", cost).await.unwrap();
                    let now_ms = worker.clock.now().unix_ms;
                    let retry_ms = worker.charge_plan.retry_at_ms(&context, now_ms).expect("it fits");
                    let is_refused = matches!(decision, Decision::Refused);
                    // A refusal that is known takes nothing.
                    is_exact &= !worker.settled_calls().await.is_empty();
                    if is_exact && is_refused {
                        let local_ms = local.charge_plan.retry_at_ms(&local_context, now_ms);
                        assert_eq!((Some(retry_ms), explained_ms), (local_ms, local_ms), "seed {seed}, {cost} tokens");
                    }
                    if is_refused && rng.bool() {
                        worker.shared.return_idle(true).await;
                        advance(retry_ms - now_ms);
                        local.outcome("a", cost).await.unwrap();
                        let (_, again) = worker.outcome("a", cost).await.unwrap();
                        let mut full = again.result.charges.iter().filter(|charge| charge.is_full);
                        let is_early = full.any(|charge| context.charge_of(charge.layer).is_some());
                        assert!(!is_early, "seed {seed}, {cost} tokens: {rules:#?}");
                        worker.settled_calls().await;
                    }
                    advance(rng.u64(..20_000));
                }
            }
        });
    }
}
