//! What happens when a server cannot be reached and when it is reachable again: the circuit breaker opens, rules continue
//! without the server, the server is probed, gets a report of the usage counted meanwhile, and its breaker closes.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinHandle, spawn_local};

use super::circuit_breaker::FAILURES_MAX;
use super::client::StoreError;
use super::connection::log_excerpt;
use super::lease_sizing::{ChargeId, CounterId, UnansweredTokens, counter_id};
use super::outage_log::WorkerOutage;
use super::reconnecting::ServerId;
use super::scripts::{AcquireReply, CounterRequest, RefundTarget, TOKENS_MAX};
use super::shared_counters::SharedCounters;
use super::unreported_usage::UnreportedCharge;
use transom_limiter::charge_plan::{ChargePlan, LayerRef};
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{ChargePosition, LayerId};
use transom_limiter::rule::OnOutage;
use transom_limiter::rule_set::{CountingMode, KeyedRequest, RuleSet};
use transom_limiter::sharded_counter::part_of_shard;
use transom_limiter::store_key::StoreKeys;
use transom_runtime::metrics::redis::StoreOutcome;

/// How often an unreachable server is probed, and the limit for each probe.
const PROBE_PERIOD: Duration = Duration::from_millis(250);
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);
/// Limit for reporting to a server before its circuit breaker closes. Requests continue meanwhile and could add usage
/// without end.
const REPORT_LIMIT: Duration = Duration::from_secs(1);
/// Counters reported at once.
const REPORTS_AT_ONCE: usize = 256;
/// Minimum time between two warnings of unusable counters.
const WARNING_PERIOD: Duration = Duration::from_secs(10);

impl SharedCounters {
    /// Whether the server of a key is known to be unreachable.
    pub(super) fn is_unreachable(&self, base: &str) -> bool {
        self.breaker.is_any_open() && self.breaker.is_open(self.store.server_of(base))
    }

    /// The server of the counters of a key.
    pub(super) fn server_of_key(&self, store_key: &str) -> ServerId {
        self.store.server_of(&self.key_base(store_key, "", 0))
    }

    /// Whether that server is known to be unreachable.
    pub(super) fn is_key_unreachable(&self, store_key: &str) -> bool {
        self.breaker.is_any_open() && self.breaker.is_open(self.server_of_key(store_key))
    }

    /// Records a failed call.
    pub(super) fn record_error(self: &Rc<Self>, server: ServerId, error: &StoreError) {
        match error {
            StoreError::Key(what) => {
                self.metrics.call_failed(StoreOutcome::Error);
                self.warn_of_counter(what);
            }
            StoreError::Unreachable(why) => {
                self.metrics.call_failed(StoreOutcome::Unreachable);
                self.record_failures(server, 1, why);
            }
        }
    }

    /// Records that a request waited for the whole timeout.
    pub(super) fn record_timeout(self: &Rc<Self>, server: ServerId) {
        self.metrics.call_failed(StoreOutcome::Timeout);
        self.record_failures(server, 1, &format!("{}: no reply in time", self.store.name_of(server)));
    }

    /// Warns of an unusable counter, at most once per `WARNING_PERIOD`.
    fn warn_of_counter(&self, what: &str) {
        let now = self.clock.instant();
        if self.last_warning.get().is_none_or(|last| now.saturating_duration_since(last) >= WARNING_PERIOD) {
            self.last_warning.set(Some(now));
            tracing::warn!("a shared counter cannot be used: {}", log_excerpt(what));
        }
    }

    fn record_failures(self: &Rc<Self>, server: ServerId, times: u32, why: &str) {
        if self.breaker.record_failure(server, times, self.clock.instant(), self.timeout) {
            let outage = self.outages.begin(server, why, self.metrics.outage_decisions());
            self.metrics.server_lost(outage.is_first);
            spawn_local(Rc::clone(self).recover(server, outage));
        }
    }

    /// Probes the store before the first request.
    pub(super) fn probe_at_start(self: &Rc<Self>) {
        let shared = Rc::clone(self);
        spawn_local(async move {
            let why = match shared.probe(None).await {
                Ok(()) => return,
                Err(why) => why,
            };
            shared.record_failures(ServerId::ONLY, FAILURES_MAX, &why);
        });
    }

    async fn probe(&self, server: Option<ServerId>) -> Result<(), String> {
        let probe = async {
            match server {
                Some(server) => self.store.probe_server(server).await,
                None => self.store.probe().await,
            }
        };
        let began = self.clock.instant();
        match tokio::time::timeout(PROBE_TIMEOUT.max(self.timeout), probe).await {
            Ok(Ok(time_ms)) => {
                self.note_reconnect(began);
                self.clock.follow(time_ms);
                Ok(())
            }
            Ok(Err(error)) => Err(error.into()),
            Err(_elapsed) => Err(format!("{}: no reply", self.store.name_of(server.unwrap_or(ServerId::ONLY)))),
        }
    }

    /// Waits until a server is reachable, reports the usage counted meanwhile, and closes its breaker.
    async fn recover(self: Rc<Self>, server: ServerId, outage: WorkerOutage) {
        loop {
            tokio::time::sleep(PROBE_PERIOD).await;
            if self.probe(Some(server)).await.is_ok() && self.catch_up(server).await {
                break;
            }
        }
        self.breaker.close(server, self.clock.instant());
        self.metrics.server_recovered();
        outage.end(&self.store.name_of(server), self.metrics.outage_decisions());
        // In a cluster, its hash slots may have moved to other servers meanwhile.
        self.report_to_reachable().await;
    }

    /// Sends a server what it could not be sent before: kept refunds, then usage. Refunds go first: a server that has lost its data
    /// gets the usage without them from the next calls. Returns `false` if the server is unreachable, or another worker is sending
    /// refunds to it.
    async fn catch_up(self: &Rc<Self>, server: ServerId) -> bool {
        self.send_kept_refunds(server).await && self.report(server).await
    }

    /// Records charges of this decision that were made locally only.
    pub(super) fn record_unreported(
        &self,
        charge_plan: &ChargePlan,
        context: &DecisionContext,
        first: ChargePosition,
        store_keys: &StoreKeys,
    ) {
        let charges = context.result.charges[first..].iter();
        for LayerRef { position, id } in
            charges.filter(|charge| charge.mode == CountingMode::LocalFallback).map(|charge| charge.layer)
        {
            let store_key = store_keys.get(position).and_then(Option::as_ref);
            let (Some(store_key), Some(keyed_request)) = (store_key, context.inputs.keyed_requests[position]) else {
                continue;
            };
            self.record_unreported_layer(charge_plan.rule_set(), id, keyed_request, store_key);
        }
    }

    /// As [`SharedCounters::record_unreported`], for one layer.
    pub(super) fn record_unreported_layer(
        &self,
        rule_set: &Arc<RuleSet>,
        layer: LayerId,
        keyed_request: KeyedRequest,
        store_key: &Rc<str>,
    ) {
        self.unreported.add(UnreportedCharge {
            rule_set: Arc::clone(rule_set),
            layer,
            keyed_request,
            store_key: Rc::clone(store_key),
        });
    }

    /// Records usage that this worker finds in the local counters: of another process, which ended before it could report it; of
    /// another worker of this process, which reports it too, so that the first report has it; or its own.
    /// `ceiling`: what they leave of the layer's capacity.
    pub(super) fn record_local_usage(
        &self,
        rule_set: &Arc<RuleSet>,
        layer: LayerId,
        keyed_request: KeyedRequest,
        store_key: &Rc<str>,
        ceiling: u64,
    ) {
        let compiled_rule = &rule_set.rules[layer.rule];
        let compiled_layer = compiled_rule.layer(layer);
        let is_used_locally = ceiling < u64::from(compiled_layer.capacity);
        if is_used_locally && compiled_rule.rule.on_outage == OnOutage::Local && !compiled_layer.is_penalty() {
            self.record_unreported_layer(rule_set, layer, keyed_request, store_key);
        }
    }

    /// Sends reachable servers what they could not be sent before: refunds that were kept, also by workers that could not reach them,
    /// and usage that was counted locally, also because a reply was late. A server that hangs is found by a probe first, because
    /// a call without a reply is not repeated.
    pub(super) async fn report_to_reachable(self: &Rc<Self>) {
        for server in self.servers_to_report_to() {
            match self.probe(Some(server)).await {
                Ok(()) => _ = self.catch_up(server).await,
                Err(why) => self.record_error(server, &StoreError::Unreachable(why)),
            }
        }
    }

    /// As [`SharedCounters::report_to_reachable`], without a probe, when there is no later call: a server that hangs may still
    /// execute it.
    pub(super) async fn report_before_exit(self: &Rc<Self>) {
        for server in self.servers_to_report_to() {
            self.catch_up(server).await;
        }
    }

    /// Whether servers lack usage that this worker has counted without them, in windows that are open, or refunds.
    pub fn has_unreported(&self) -> bool {
        self.unreported.has_some(|charge| self.has_ended(charge)) || !self.kept_refunds.is_empty()
    }

    /// Waits until servers have what they lack: [`SharedCounters::run`] reports it.
    pub async fn wait_until_reported(&self) {
        while self.has_unreported() {
            tokio::time::sleep(PROBE_PERIOD).await;
        }
    }

    /// The servers of unreported usage and kept refunds, except for those that are known to be unreachable.
    fn servers_to_report_to(&self) -> impl Iterator<Item = ServerId> {
        let mut servers = self.kept_refunds.servers(|base| self.store.server_of(base));
        servers.extend(self.unreported.servers(|charge| self.server_of_key(&charge.store_key)));
        servers.into_iter().filter(|server| !self.breaker.is_open(*server))
    }

    fn key_base_of(&self, id: CounterId) -> Option<Rc<str>> {
        self.unreported.get(id).map(|charge| self.key_base(&charge.store_key, "", 0))
    }

    /// Some unreported counters of a server; drops those whose windows have ended.
    fn next_to_report(&self, server: ServerId) -> Vec<CounterId> {
        let is_of_server = |charge: &UnreportedCharge| self.server_of_key(&charge.store_key) == server;
        self.unreported.due(REPORTS_AT_ONCE, is_of_server, |charge| self.has_ended(charge))
    }

    /// Whether the window has ended, or another worker has reported its usage.
    fn has_ended(&self, charge: &UnreportedCharge) -> bool {
        self.used_locally(&charge.rule_set, charge.layer, charge.keyed_request).used == 0
    }

    /// Reports to a server what was counted without it; returns `false` if the server is unreachable again.
    async fn report(self: &Rc<Self>, server: ServerId) -> bool {
        let until = self.clock.instant() + REPORT_LIMIT;
        loop {
            let due = self.next_to_report(server);
            let Some(base) = due.first().and_then(|id| self.key_base_of(*id)) else { return true };
            if self.clock.instant() >= until {
                return true;
            }
            // One call finds out whether the server is reachable; the reports then go out together.
            if let Err(error) = self.store.ensure_connected(&base).await {
                self.record_error(self.store.server_of(&base), &error);
                return false;
            }
            let reports: Vec<JoinHandle<bool>> =
                due.into_iter().filter_map(|id| Rc::clone(self).start_report(id, server)).collect();
            let mut all_delivered = true;
            for report in reports {
                all_delivered &= report.await.unwrap_or(false);
            }
            if !all_delivered {
                return false;
            }
        }
    }

    /// Starts a report, unless one of this counter is running: many calls may detect a reconnect at once.
    fn start_report(self: Rc<Self>, id: CounterId, server: ServerId) -> Option<JoinHandle<bool>> {
        let is_first = self.unreported.begin_report(id);
        is_first.then(|| {
            spawn_local(async move {
                let all_delivered = self.report_counter(id, server).await;
                self.unreported.end_report(id);
                all_delivered
            })
        })
    }

    /// The key bases of reachable shards: shards on other unreachable servers are left out, and the remaining shards
    /// take over their part. Empty if `server` itself is unreachable.
    async fn reachable_shards(self: &Rc<Self>, charge: &UnreportedCharge, server: ServerId) -> Vec<Rc<str>> {
        let (compiled_rule, layer) = (&charge.rule_set.rules[charge.layer.rule], charge.layer);
        let (mut reachable, mut unreachable) = (Vec::new(), Vec::new());
        for shard in 0..compiled_rule.layer(layer).shards {
            let base = self.key_base(&charge.store_key, compiled_rule.suffix(layer), shard);
            let owner = self.store.server_of(&base);
            if owner != server && (self.breaker.is_open(owner) || unreachable.contains(&owner)) {
                continue;
            }
            match self.store.ensure_connected(&base).await {
                Ok(()) => reachable.push(base),
                Err(error) => {
                    let owner = self.store.server_of(&base);
                    self.record_error(owner, &error);
                    if owner == server {
                        return Vec::new();
                    }
                    unreachable.push(owner);
                }
            }
        }
        reachable
    }

    /// Moves the tokens of a local counter to the known usage. Returns them, and the charge by which they are reported, if the counter
    /// has no shards; `None`: there are none.
    fn empty_local_counter(self: &Rc<Self>, charge: &UnreportedCharge) -> Option<(u64, Option<ChargeId>)> {
        let UnreportedCharge { rule_set, layer, keyed_request, .. } = charge;
        let (counter, now_ms) = (charge.counter(), self.clock.now().unix_ms);
        let local = self.used_locally(rule_set, *layer, *keyed_request);
        // The local counter is emptied before the report, because usage must not be reported twice: whether a report
        // arrived is not always known, and other workers report the same counter. Those workers may still count locally
        // for a while; the tokens are therefore first added to the usage known to be used elsewhere. They are added,
        // not set, because several workers may report one counter at once.
        let layer_of_key = rule_set.layer(*layer);
        let add_known = |tokens: u64| self.add_known_usage(rule_set, layer_of_key, counter, local.end_ms, tokens);
        let mut order = self.usage_order.lock(counter_id(counter));
        let mut reported = self.reported.lock(counter_id(counter));
        let clock = || self.clock.now().unix_ms;
        let now = DecisionTime::read(&clock);
        let tokens = rule_set.reset_local(*layer, *keyed_request, &self.table, now, add_known);
        if tokens == 0 {
            return None;
        }
        reported.send(tokens, now_ms);
        // Refunds that wait for later charges here are refunds of reported tokens now. Reservations are not refunded in the store: those
        // behind them would move.
        let deferred = self.deferred_refunds.take(counter, now_ms);
        let rule = &rule_set.rules[layer.rule].rule;
        let may_refund = !rule.delays() && !rule.reserves();
        let (refunds, _) = reported.take(if may_refund { deferred } else { 0 }, now_ms);
        drop(reported);
        // The tokens are part of the known usage, and not of replies to calls that were sent before.
        let unanswered = (rule_set.layer(*layer).shards == 1).then(|| self.new_charge());
        match unanswered {
            Some(charge_id) => {
                let tokens = UnansweredTokens { reports: tokens, charges: 0 };
                self.add_unanswered(&mut order, charge_id, counter, tokens);
            }
            None => order.note_change(),
        }
        drop(order);
        let refunded = refunds.iter().map(|refund| refund.tokens).sum();
        self.refund_later(refunds.into_iter().map(|refund| refund.with_key(|key| Rc::from(&**key))).collect());
        self.forget_refunded_tokens(counter, refunded);
        Some((tokens, unanswered))
    }

    /// Reports one counter to a server and to its other shards; returns `false` if the server is unreachable.
    async fn report_counter(self: &Rc<Self>, id: CounterId, server: ServerId) -> bool {
        let Some(charge) = self.unreported.get(id) else { return true };
        let UnreportedCharge { rule_set, layer, keyed_request, store_key } = &charge;
        let (layer, keyed_request) = (*layer, *keyed_request);
        let shards = rule_set.layer(layer).shards;
        let began = self.clock.instant();
        // The charge stays unreported until a server is reachable.
        let reachable = self.reachable_shards(&charge, server).await;
        if reachable.is_empty() {
            return false;
        }
        // After a reconnect, the server may have forgotten more than this charge, which the report has to include.
        self.note_reconnect(began);
        // No await until the counter is emptied: a charge made meanwhile is reported separately.
        self.unreported.remove(id);
        let (counter, now_ms) = (charge.counter(), self.clock.now().unix_ms);
        // The report includes known usage, in case the server has forgotten it and this call recreates the counter.
        let used_min = self.counter_request(rule_set, layer, keyed_request, store_key, now_ms).used_min;
        let Some((tokens, unanswered)) = self.empty_local_counter(&charge) else { return true };
        let mut all_delivered = true;
        let parts = reachable.len() as u32;
        for (base, shard) in reachable.into_iter().zip(0..) {
            let part = part_of_shard(tokens, parts, shard);
            if part == 0 {
                break;
            }
            let base_request = self.counter_request(rule_set, layer, keyed_request, store_key, now_ms);
            let owner = self.store.server_of(&base);
            let request = CounterRequest {
                key_base: base,
                need: part,
                ceiling: TOKENS_MAX,
                used_min: if shards == 1 { used_min } else { 0 },
                ..base_request
            };
            let charges = unanswered.map(|charge_id| (charge_id, counter));
            let reply = self.acquire_unchecked(std::slice::from_ref(&request), charges.as_slice()).await;
            let mut early = None;
            match reply {
                Ok(AcquireReply::Granted { counters: replies, .. }) => {
                    self.metrics.reported(part);
                    if let Some(reply) = replies.first() {
                        let target = request.refund_target(*reply);
                        let target = RefundTarget { end_ms: reply.end_ms, ..target };
                        early = Some(target.refund(self.reported.end(id, &target, part, now_ms)));
                    }
                    if let (Some(reply), 1) = (replies.first(), shards) {
                        self.note_used_tokens(rule_set, rule_set.layer(layer), counter, &request, *reply);
                    }
                }
                // The window has ended, or the key holds another type.
                Ok(AcquireReply::Refused { .. } | AcquireReply::OtherWindow { .. }) | Err(StoreError::Key(_)) => {}
                // Other servers have their own breakers.
                Err(StoreError::Unreachable(_)) => all_delivered &= owner != server,
            }
            // Without a reply, the tokens stay part of the known usage: the store may have them.
            if let Some(charge_id) = unanswered {
                self.end_charge(charge_id, counter, true);
            }
            match early {
                Some(refund) if refund.tokens > 0 => {
                    let tokens = refund.tokens;
                    self.refund_later(vec![refund]);
                    self.forget_refunded_tokens(counter, tokens);
                }
                Some(_) => {}
                None => self.reported.fail(counter_id(counter), part),
            }
        }
        all_delivered
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::super::shared_decision::SharedOutcome;
    use super::super::test_worker::{
        ACCOUNT_KEY, Call, HOUR_KEY, HOUR_MS, KEY, MINUTE_KEY, SLIDING_KEY, START_MS, TestWorker, exact, leased, run,
    };
    use super::*;
    use transom_limiter::decision::Decision;
    use transom_limiter::rule::{Rule, Sharing};
    use transom_limiter::window::Windows;
    use transom_limiter::window_kind::WindowKind;

    /// A decision that counts one token locally and has not ended.
    async fn counted_locally(worker: &TestWorker) -> SharedOutcome {
        worker.store.hold();
        let mut pending = worker.pending("a", 1);
        pending.deadline = Instant::from_std(worker.clock.instant());
        let outcome = pending.decide(&worker.charge_plan).await.unwrap();
        assert!(matches!(outcome.decision, Decision::Admitted));
        worker.store.release();
        worker.settled_calls().await;
        outcome
    }

    #[test]
    fn a_charge_that_is_undone_after_its_report_is_refunded_in_the_store() {
        run(async {
            let worker = TestWorker::new(&[exact("9/hour")]).await;
            assert_eq!(worker.decide("a", 1).await, Some(true));
            for _ in 0..2 {
                let mut outcome = counted_locally(&worker).await;
                worker.shared.report_to_reachable().await;
                let used = worker.store.used(KEY);
                worker.shared.undo(&worker.rule_set, &mut outcome.context, ChargePosition::FIRST, Vec::new());
                worker.settled_calls().await;
                assert_eq!(worker.store.used(KEY), used - 1);
            }
            // Without a report, it is refunded locally.
            let mut outcome = counted_locally(&worker).await;
            let used = worker.store.used(KEY);
            worker.shared.undo(&worker.rule_set, &mut outcome.context, ChargePosition::FIRST, Vec::new());
            worker.shared.report_to_reachable().await;
            worker.settled_calls().await;
            assert_eq!(worker.store.used(KEY), used);
        });
    }

    #[test]
    fn reported_charges_of_a_request_are_refunded_in_one_call() {
        run(async {
            let worker = TestWorker::new(&[Rule { sharing: Sharing::Exact, ..leased(&["9/minute", "9/hour"]) }]).await;
            assert_eq!(worker.decide("b", 1).await, Some(true));
            let mut outcome = counted_locally(&worker).await;
            worker.shared.report_to_reachable().await;
            worker.settled_calls().await;
            worker.shared.undo(&worker.rule_set, &mut outcome.context, ChargePosition::FIRST, Vec::new());
            let refunds = vec![(HOUR_KEY.to_owned(), 1), (MINUTE_KEY.to_owned(), 1)];
            assert_eq!(worker.settled_calls().await, [Call::Refund(refunds)]);
        });
    }

    /// The known usage of a sliding window refuses nothing, because its tokens come back: the store is asked.
    #[test]
    fn a_call_that_overtakes_a_report_admits_nothing_beyond_the_limit() {
        run(async {
            let mut rule = exact("2/hour");
            rule.layers[0].windows = Windows::Sliding { period_ms: HOUR_MS };
            let worker = TestWorker::new(&[rule]).await;
            let other = worker.beside();
            assert_eq!([worker.decide("b", 1).await, other.decide("c", 1).await], [Some(true); 2]);
            for _ in 0..2 {
                counted_locally(&worker).await;
            }
            worker.store.hold();
            let shared = Rc::clone(&worker.shared);
            let report = spawn_local(async move { shared.report_before_exit().await });
            worker.store.next_calls().await;
            let held = worker.store.stop_holding();
            // As if the store had not executed the report yet.
            worker.store.set_used(SLIDING_KEY, 0);
            assert_eq!(other.decide("a", 1).await, Some(false));
            held.notify_waiters();
            report.await.unwrap();
        });
    }

    /// A refund waits for the charge behind it when both are reported.
    #[test]
    fn a_deferred_refund_is_sent_after_a_report() {
        run(async {
            let mut rule = exact("1/hour");
            rule.layers[0].capacity = Some(4);
            let worker = TestWorker::new(&[rule]).await;
            assert_eq!(worker.decide("b", 1).await, Some(true));
            let mut outcomes = [counted_locally(&worker).await, counted_locally(&worker).await];
            worker.shared.undo(&worker.rule_set, &mut outcomes[0].context, ChargePosition::FIRST, Vec::new());
            worker.shared.report_to_reachable().await;
            worker.settled_calls().await;
            assert_eq!(worker.store.used(ACCOUNT_KEY), 1);
            assert_eq!(worker.shared.deferred_refunds.take(worker.counter("a", 0), START_MS), 0);
        });
    }

    #[test]
    fn kept_refunds_are_sent_to_reachable_servers_before_reports() {
        run(async {
            let worker = TestWorker::new(&[exact("9/hour")]).await;
            assert_eq!(worker.decide("a", 3).await, Some(true));
            let keep = || {
                let target = RefundTarget {
                    key_base: "transom:{r|a}".into(),
                    kind: WindowKind::Plain,
                    number: 500_000,
                    limit: 9,
                    used_max: None,
                    counter: None,
                    end_ms: u64::MAX,
                };
                let _ = worker.shared.kept_refunds.keep(vec![target.refund(1)]);
            };
            // Whether each call about the key is a refund.
            let calls = async || {
                let is_refund = |call| match call {
                    Call::Refund(_) => Some(true),
                    Call::Acquire(keys) => (keys[0].0 == KEY).then_some(false),
                    Call::Info => None,
                };
                worker.settled_calls().await.into_iter().filter_map(is_refund).collect::<Vec<_>>()
            };
            worker.store.take_calls();
            keep();
            worker.shared.report_to_reachable().await;
            assert_eq!(calls().await, [true]);
            keep();
            counted_locally(&worker).await;
            worker.store.take_calls();
            worker.shared.close().await;
            assert_eq!(calls().await, [true, false]);
            // Another worker is sending refunds: the report waits.
            counted_locally(&worker).await;
            worker.store.take_calls();
            keep();
            let sending = worker.shared.kept_refunds.take(ServerId::ONLY, |_base| ServerId::ONLY);
            worker.shared.report_to_reachable().await;
            assert!(calls().await.is_empty());
            drop(sending);
            worker.shared.report_to_reachable().await;
            assert_eq!(calls().await, [true, false]);
        });
    }

    /// The server hangs; its circuit breaker is not open yet.
    #[test]
    fn usage_is_reported_once_the_server_replies() {
        run(async {
            let worker = TestWorker::new(&[leased(&["9/hour"])]).await;
            assert_eq!(worker.decide("b", 1).await, Some(true));
            worker.store.hold();
            let mut pending = worker.pending("a", 1);
            pending.deadline = Instant::from_std(worker.clock.instant());
            let outcome = pending.decide(&worker.charge_plan).await.unwrap();
            assert!(matches!(outcome.decision, Decision::Admitted));
            worker.shared.report_to_reachable().await;
            assert_eq!((worker.decided_in_outage("local"), worker.tokens("reported")), (1, 0));
            worker.store.release();
            worker.shared.report_to_reachable().await;
            assert_eq!(worker.tokens("reported"), 1);
        });
    }
}
