//! The shared counters as one worker sees them: calls to the store with their bookkeeping, and the periodic tasks.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::spawn_local;

use super::circuit_breaker::CircuitBreakers;
use super::client::{RedisClient, StoreError};
use super::connection::{Connection, log_excerpt};
use super::diagnose::{EVICTION, Info};
use super::lease_sizing::{ChargeId, Leases, counter_id};
use super::outage_log::OutageLog;
use super::reconnecting::ServerId;
use super::reported_usage::{KeptRefunds, ReportedUsage};
use super::scripts::{AcquireReply, CounterRequest, LEAD_MAX_MS, Refund, RefundTarget};
use super::sentinel::reply_text;
use super::unreported_usage::{UnreportedCount, UnreportedUsage};
use super::usage_order::UsageOrder;
use transom_config::redis::StoreConfig;
use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::deferred_refunds::DeferredRefunds;
use transom_limiter::handles::{IdVec, LayerId, PlanPosition};
use transom_limiter::rule_set::{CompiledLayer, CompiledRule, KeyedRequest, RuleSet};
use transom_limiter::sharded_counter::ShardReceipt;
use transom_limiter::store_key::{StoreKeys, StoreWindow, counter_name};
use transom_limiter::table::{Counter, Table};
use transom_limiter::window_kind::WindowKind;
use transom_runtime::clock::Clock;
use transom_runtime::metrics::redis::{StoreMetrics, StoreOutcome};

/// Larger differences between the gateway's time and the store's are not corrected.
const CLOCK_DIFFERENCE_MAX_MS: u64 = 5000;
/// Refunds in one call, and refund calls in flight.
const REFUNDS_PER_CALL: usize = 256;
const REFUND_CALLS_MAX: usize = 32;
/// Period of the tasks in [`SharedCounters::run`].
pub const SWEEP_PERIOD: Duration = Duration::from_secs(1);
/// Limit for returning leased tokens when a worker ends.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// What the workers of a gateway share.
#[derive(Clone)]
pub struct SharedByWorkers {
    pub table: Arc<Table>,
    pub clock: Clock,
    pub deferred_refunds: Arc<DeferredRefunds>,
    pub outages: Arc<OutageLog>,
    pub usage_order: Arc<UsageOrder>,
    pub unreported: Arc<UnreportedCount>,
    pub reported: Arc<ReportedUsage>,
    pub kept_refunds: Arc<KeptRefunds>,
}

impl SharedByWorkers {
    pub fn new(table: Arc<Table>, clock: Clock) -> SharedByWorkers {
        SharedByWorkers {
            table,
            clock,
            deferred_refunds: Arc::default(),
            outages: Arc::default(),
            usage_order: Arc::default(),
            unreported: Arc::default(),
            reported: Arc::default(),
            kept_refunds: Arc::default(),
        }
    }
}

/// The shared counters as one worker sees them.
pub struct SharedCounters {
    pub(crate) store: RedisClient,
    pub(super) table: Arc<Table>,
    pub(super) clock: Clock,
    pub(super) timeout: Duration,
    pub(super) prefix: String,
    pub(super) leases: Leases,
    pub(super) breaker: CircuitBreakers,
    pub(super) unreported: UnreportedUsage,
    pub(super) deferred_refunds: Arc<DeferredRefunds>,
    pub(super) outages: Arc<OutageLog>,
    pub(super) usage_order: Arc<UsageOrder>,
    pub(super) reported: Arc<ReportedUsage>,
    pub(super) kept_refunds: Arc<KeptRefunds>,
    pub(super) metrics: StoreMetrics,
    /// The shard of a sharded counter from which this worker fetches first.
    pub(super) own_shard: u32,
    /// When a connection was last opened anew, Unix milliseconds. The server may have lost what was counted before: it
    /// may be another one, or restarted.
    pub(super) reconnected_ms: Cell<u64>,
    /// The generation of the store's connections that was seen last; it changes with every reconnect.
    pub(super) generation: Cell<u64>,
    /// The number of charges in the background that were begun.
    pub(super) charges: Cell<u64>,
    pub(super) last_warning: Cell<Option<Instant>>,
}

impl SharedCounters {
    pub fn new(config: &StoreConfig, of_workers: SharedByWorkers, metrics: StoreMetrics) -> Rc<SharedCounters> {
        let SharedByWorkers {
            table,
            clock,
            deferred_refunds,
            outages,
            usage_order,
            unreported,
            reported,
            kept_refunds,
        } = of_workers;
        Rc::new(SharedCounters {
            store: RedisClient::new(config),
            table,
            clock,
            timeout: config.timeout,
            prefix: config.prefix.clone(),
            leases: Leases::default(),
            breaker: CircuitBreakers::default(),
            unreported: UnreportedUsage::new(unreported),
            deferred_refunds,
            outages,
            usage_order,
            reported,
            kept_refunds,
            metrics,
            own_shard: fastrand::u32(..),
            reconnected_ms: Cell::new(0),
            generation: Cell::new(0),
            charges: Cell::new(0),
            last_warning: Cell::new(None),
        })
    }

    /// Runs until the task is dropped: probes the store before the first request, then periodically returns idle
    /// leases, sends kept refunds, reports usage that the store does not know, and checks servers for eviction.
    pub async fn run(self: Rc<Self>) {
        self.probe_at_start();
        loop {
            tokio::time::sleep(SWEEP_PERIOD).await;
            self.return_idle(false).await;
            self.report_to_reachable().await;
            self.watch_eviction();
        }
    }

    /// Sends kept refunds, reports usage and returns all unused tokens, as far as the store accepts them within `CLOSE_TIMEOUT`.
    pub async fn close(self: &Rc<Self>) {
        let last_calls = async {
            self.report_before_exit().await;
            self.return_idle(true).await;
        };
        if tokio::time::timeout(CLOSE_TIMEOUT, last_calls).await.is_err() {
            tracing::warn!("leased tokens were not returned: shared counters cannot be reached");
        }
    }

    /// The beginning of the keys of one shard of a counter: see `store_key::counter_name`.
    pub(super) fn key_base(&self, store_key: &str, suffix: &str, shard: u32) -> Rc<str> {
        counter_name(&self.prefix, store_key, shard, suffix).into()
    }

    /// One acquire call, with bookkeeping: time, circuit breaker, metrics, reconnects.
    pub(super) async fn acquire(self: &Rc<Self>, requests: &[CounterRequest]) -> Result<AcquireReply, StoreError> {
        self.acquire_charges(requests, &[]).await
    }

    /// As [`SharedCounters::acquire`]. `charges`: those in the background that the call makes.
    pub(super) async fn acquire_charges(
        self: &Rc<Self>,
        requests: &[CounterRequest],
        charges: &[(ChargeId, Counter)],
    ) -> Result<AcquireReply, StoreError> {
        // An event of the exploration: other tasks of the worker may run between the making of a call, where the requests were filled in,
        // and its sending. The simulated client begins behind the comparison of connections below.
        #[cfg(test)]
        super::simulated_store::network::Network::hold_call().await;
        let began = self.clock.instant();
        let now_ms = self.clock.now().unix_ms;
        // The time may have been corrected since the requests were made.
        if requests.iter().any(|request| request.window.begins_after(now_ms + LEAD_MAX_MS)) {
            return Ok(AcquireReply::OtherWindow { time_ms: now_ms });
        }
        // A server behind a new connection may have forgotten usage that the requests relied on.
        let generation = requests.iter().map(|request| request.generation).min().unwrap_or(0);
        if let Some(request) = requests.first()
            && let Err(error) = self.store.ensure_connected(&request.key_base).await
        {
            self.record_error(self.store.server_of(&request.key_base), &error);
            return Err(error);
        }
        if generation != 0 && self.store.generation() != generation {
            self.note_reconnect(began);
            // Local usage is reported first, so that the tokens are not granted again.
            let shared = Rc::clone(self);
            let report: Pin<Box<dyn Future<Output = ()>>> = Box::pin(async move { shared.report_to_reachable().await });
            report.await;
            return Ok(AcquireReply::OtherWindow { time_ms: self.clock.now().unix_ms });
        }
        self.acquire_unchecked(requests, charges).await
    }

    /// As [`SharedCounters::acquire_charges`], without checking for a reconnect first.
    pub(super) async fn acquire_unchecked(
        self: &Rc<Self>,
        requests: &[CounterRequest],
        charges: &[(ChargeId, Counter)],
    ) -> Result<AcquireReply, StoreError> {
        let (began, now_ms) = (self.clock.instant(), self.clock.now().unix_ms);
        let server = requests.first().map_or(ServerId::ONLY, |request| self.store.server_of(&request.key_base));
        // No await until the call is made: it has the charges, and those of this worker that are numbered before do not.
        let call = self.usage_order.next_number();
        self.set_sent_after(charges, call - 1);
        let mut reply = self.store.acquire(requests, now_ms).await;
        if let Ok(AcquireReply::Granted { counters, .. } | AcquireReply::Refused { counters, .. }) = &mut reply {
            counters.iter_mut().for_each(|counter| counter.call = call);
        }
        if let Ok(AcquireReply::Refused { .. } | AcquireReply::OtherWindow { .. }) | Err(StoreError::Key(_)) = &reply {
            self.set_sent_after(charges, u64::MAX);
        }
        self.note_reconnect(began);
        match &reply {
            Ok(AcquireReply::Granted { time_ms, .. }) => {
                self.record_reply(server, StoreOutcome::Granted, *time_ms, began)
            }
            Ok(AcquireReply::Refused { time_ms, .. }) => {
                self.record_reply(server, StoreOutcome::Refused, *time_ms, began)
            }
            Ok(AcquireReply::OtherWindow { time_ms }) => {
                self.record_reply(server, StoreOutcome::OtherWindow, *time_ms, began)
            }
            Err(error) => self.record_error(server, error),
        }
        reply
    }

    /// Refunds tokens. Those of servers that cannot be reached are kept. The tokens of a call that fails stay used until their window
    /// ends: the store may have executed it.
    pub(super) async fn refund(self: &Rc<Self>, refunds: Vec<Refund>) {
        self.begin_refunds(&refunds);
        self.send_refunds(refunds).await;
    }

    /// Notes refunds until they have a reply, or none is expected any more. Called before the known usage loses their tokens.
    pub(super) fn begin_refunds(&self, refunds: &[Refund]) {
        for (counter, refund) in refunds_of_counters(refunds) {
            self.usage_order.lock(counter_id(counter)).begin_refund(refund);
        }
    }

    fn end_refunds(&self, refunds: &[Refund]) {
        for (counter, refund) in refunds_of_counters(refunds) {
            self.usage_order.lock(counter_id(counter)).end_refund(refund);
        }
    }

    /// As [`SharedCounters::refund`], of noted refunds.
    pub(super) async fn send_refunds(self: &Rc<Self>, refunds: Vec<Refund>) {
        let mut calls: Vec<Vec<Refund>> = Vec::new();
        for refund in refunds {
            let joins = |call: &&mut Vec<Refund>| {
                let is_near = |first: &Refund| self.store.can_share_a_call(&first.key_base, &refund.key_base);
                call.len() < REFUNDS_PER_CALL && call.first().is_some_and(is_near)
            };
            match calls.last_mut().filter(joins) {
                Some(call) => call.push(refund),
                None => calls.push(vec![refund]),
            }
        }
        while !calls.is_empty() {
            let others = calls.split_off(calls.len().min(REFUND_CALLS_MAX));
            let send = |call| spawn_local(Rc::clone(self).refund_or_keep(call));
            let sent: Vec<_> = std::mem::replace(&mut calls, others).into_iter().map(send).collect();
            for sent in sent {
                let _ = sent.await;
            }
        }
    }

    async fn refund_or_keep(self: Rc<Self>, refunds: Vec<Refund>) {
        let Some(first) = refunds.first() else { return };
        let mut is_reachable = !self.is_unreachable(&first.key_base);
        if is_reachable && let Err(error) = self.store.ensure_connected(&first.key_base).await {
            self.record_error(self.store.server_of(&first.key_base), &error);
            is_reachable = false;
        }
        if !is_reachable {
            return self.end_refunds(&self.kept_refunds.keep(refunds));
        }
        // A failed call has logged its error.
        let _ = self.refund_in_one_call(&refunds).await;
    }

    /// One call of noted refunds, with bookkeeping.
    async fn refund_in_one_call(self: &Rc<Self>, refunds: &[Refund]) -> Result<(), StoreError> {
        let Some(first) = refunds.first() else { return Ok(()) };
        let began = self.clock.instant();
        let reply = self.store.refund(refunds).await;
        self.end_refunds(refunds);
        match reply {
            Ok(returned) => {
                self.metrics.returned(returned);
                self.metrics.call_completed(StoreOutcome::Refunded, self.clock.instant().duration_since(began));
                Ok(())
            }
            Err(error) => {
                self.record_error(self.store.server_of(&first.key_base), &error);
                Err(error)
            }
        }
    }

    /// Sends the refunds to a server that were kept while it could not be reached, until a call fails; the circuit breaker may still
    /// be open. Returns `false` if the server is unreachable, or another worker is sending refunds to it.
    pub(super) async fn send_kept_refunds(self: &Rc<Self>, server: ServerId) -> bool {
        let server_of = |base: &str| self.store.server_of(base);
        let Some(mut sending) = self.kept_refunds.take(server, server_of) else { return false };
        while let Some(base) = sending.next_key() {
            if let Err(error) = self.store.ensure_connected(&base).await {
                self.record_error(server, &error);
                return false;
            }
            let call = sending.next_call(REFUNDS_PER_CALL, |a, b| self.store.can_share_a_call(a, b));
            if let Err(StoreError::Unreachable(_)) = self.refund_in_one_call(&call).await {
                return false;
            }
        }
        true
    }

    /// Returns idle leases, or all.
    pub(super) async fn return_idle(self: &Rc<Self>, all: bool) {
        let now_ms = self.clock.now().unix_ms;
        let left = |counter| self.table.leased_tokens(counter, now_ms);
        // Tokens that cannot be returned now may still be spent.
        let withdraw = |counter, target: &RefundTarget| {
            if self.is_unreachable(&target.key_base) {
                return None;
            }
            let tokens = self.table.withdraw(counter, target.end_ms, u32::MAX);
            self.begin_refunds(&[target.refund(tokens.into())]);
            self.forget_returned_tokens(counter, target, tokens);
            Some(tokens)
        };
        let idle = self.leases.take_idle(all, self.clock.instant(), left, withdraw);
        self.metrics.outstanding(self.leases.outstanding(left));
        // An ended plain window takes nothing back.
        let (live, ended): (Vec<_>, Vec<_>) =
            idle.into_iter().partition(|(target, _)| target.end_ms > now_ms || target.kind.outlasts_window());
        let refunds = |leases: Vec<(RefundTarget, u32)>| {
            leases.into_iter().map(|(target, tokens)| target.refund(u64::from(tokens))).collect::<Vec<_>>()
        };
        let (live, ended) = (refunds(live), refunds(ended));
        self.metrics.expired(ended.iter().map(|refund| refund.tokens).sum());
        self.end_refunds(&ended);
        self.send_refunds(live).await;
    }

    /// Refunds up to `tokens` of each local charge: in the store, if it was reported since; otherwise with `refund_locally`.
    /// `counter_of` returns the ordinary counter of a charge, if that may have been reported: see [`counter_of_receipt`].
    pub fn refund_receipts(
        self: &Rc<Self>,
        receipts: impl IntoIterator<Item = ShardReceipt>,
        tokens: u32,
        counter_of: impl Fn(&ShardReceipt) -> Option<Counter>,
        mut refund_locally: impl FnMut(ShardReceipt),
    ) {
        let now_ms = self.clock.now().unix_ms;
        let mut refunds = Vec::new();
        for charged in receipts {
            let charge = charged.receipt.last_tokens(tokens);
            let with_receipt = |receipt| ShardReceipt { receipt, ..charged };
            let may_be_reported = charged.request.kind != WindowKind::Leased && charge.end_ms() > now_ms;
            let Some(counter) = Some(&charged).filter(|_| may_be_reported).and_then(&counter_of) else {
                refund_locally(with_receipt(charge));
                continue;
            };
            // Locked until the rest is refunded: no report empties the local counter in between.
            let mut reports = self.reported.lock(counter_id(counter));
            let (more, taken) = reports.take(charge.tokens(), now_ms);
            let rest = charge.tokens().saturating_sub(taken);
            if taken == 0 || rest > 0 {
                refund_locally(with_receipt(charge.last_tokens(u32::try_from(rest).unwrap_or(u32::MAX))));
            }
            drop(reports);
            let refunded = more.iter().map(|refund| refund.tokens).sum();
            let more: Vec<Refund> = more.into_iter().map(|refund| refund.with_key(|key| Rc::from(&**key))).collect();
            self.begin_refunds(&more);
            self.forget_refunded_tokens(counter, refunded);
            refunds.extend(more);
        }
        self.send_later(refunds);
    }

    /// Ensures that leased tokens are returned if they are not spent after the refund of these charges: the lease may have been
    /// returned meanwhile, without them.
    pub fn track_refunded_leases(
        &self,
        charge_plan: &ChargePlan,
        keyed_requests: &IdVec<PlanPosition, Option<KeyedRequest>>,
        store_keys: &StoreKeys,
        receipts: &[ShardReceipt],
    ) {
        let now = self.clock.instant();
        for (position, compiled_rule) in charge_plan.compiled_rules() {
            let store_key = store_keys.get(position).and_then(Option::as_ref);
            let (Some(keyed_request), Some(store_key)) = (&keyed_requests[position], store_key) else { continue };
            for id in compiled_rule.variant(keyed_request.variant) {
                let layer = compiled_rule.layer(id);
                let (counter, kind) = (layer.counter(*keyed_request), layer.request.kind);
                let is_lease = |receipt: &&ShardReceipt| {
                    receipt.layer == counter.layer && receipt.request.kind == WindowKind::Leased
                };
                // A request that was charged again has its latest lease last.
                let Some(lease) = receipts.iter().rev().find(is_lease) else { continue };
                let end_ms = lease.receipt.end_ms();
                let windows = charge_plan.rule_set().windows_of(layer);
                let window = StoreWindow::at(kind, windows, end_ms.saturating_sub(1), keyed_request.offset);
                self.leases.with_or_insert(counter, self.own_shard, now, |record| {
                    let shard = record.shard % layer.shards;
                    record.refund_target.get_or_insert_with(|| RefundTarget {
                        key_base: self.key_base(store_key, compiled_rule.suffix(id), shard),
                        kind,
                        number: window.number_of_lease(end_ms),
                        limit: layer.request.limit,
                        used_max: refund_used_max(compiled_rule, layer),
                        counter: Some(counter),
                        end_ms,
                    });
                });
            }
        }
    }

    /// Whether the gateway's time agrees with the store's.
    pub(super) fn agrees_on_time(&self, time_ms: u64) -> bool {
        self.clock.now().unix_ms.abs_diff(time_ms) < CLOCK_DIFFERENCE_MAX_MS
    }

    /// Sets `reconnected_ms` if a connection was opened anew since `began`.
    pub(super) fn note_reconnect(&self, began: Instant) {
        let generation = self.store.generation();
        if generation != self.generation.get() {
            let is_first = self.generation.replace(generation) == 0;
            if is_first {
                return;
            }
            let elapsed = self.clock.instant().duration_since(began);
            self.reconnected_ms.set(self.clock.now().unix_ms.saturating_sub(elapsed.as_millis() as u64));
        }
    }

    fn record_reply(&self, server: ServerId, outcome: StoreOutcome, time_ms: u64, began: Instant) {
        self.clock.follow(time_ms);
        self.breaker.record_success(server);
        self.metrics.call_completed(outcome, self.clock.instant().duration_since(began));
    }

    /// Checks each new connection once, in the background, with `INFO memory`: users without the right to `CONFIG GET`
    /// usually may run `INFO`. Sets the gauge to the number of connections whose servers evict.
    pub(super) fn watch_eviction(&self) {
        let connections = self.store.connections();
        for connection in connections.iter().filter(|connection| !connection.eviction.is_checked.replace(true)) {
            spawn_local(check_eviction(Rc::clone(connection)));
        }
        self.metrics
            .evicting(connections.iter().filter(|connection| connection.eviction.is_evicting.get()).count() as u64);
    }
}

/// The ordinary counter that a charge of one of these layers was made in, if other gateways share it.
pub fn counter_of_receipt(
    rule_set: &RuleSet,
    mut layers: impl Iterator<Item = (LayerId, KeyedRequest)>,
    receipt: &ShardReceipt,
) -> Option<Counter> {
    layers.find_map(|(layer, keyed_request)| {
        let compiled_rule = &rule_set.rules[layer.rule];
        let counter = compiled_rule.layer(layer).counter(keyed_request);
        (counter.layer == receipt.layer && compiled_rule.rule.is_shared()).then_some(counter)
    })
}

/// The layers in which requests with these keys count.
pub fn keyed_layers<'a>(
    charge_plan: &'a ChargePlan,
    keyed_requests: &'a IdVec<PlanPosition, Option<KeyedRequest>>,
) -> impl Iterator<Item = (LayerId, KeyedRequest)> + 'a {
    charge_plan.compiled_rules().flat_map(|(position, compiled_rule)| {
        let layers = |keyed_request: KeyedRequest| {
            compiled_rule.variant(keyed_request.variant).map(move |layer| (layer, keyed_request))
        };
        keyed_requests[position].map(layers).into_iter().flatten()
    })
}

/// Refunds of tokens, with the counters whose known usage may have them.
fn refunds_of_counters(refunds: &[Refund]) -> impl Iterator<Item = (Counter, &Refund)> {
    refunds.iter().filter(|refund| !refund.deletes).filter_map(|refund| Some((refund.counter?, refund)))
}

/// Warns if the server of a connection evicts counters.
async fn check_eviction(connection: Rc<Connection>) {
    let mut command = redis::cmd("INFO");
    command.arg("memory");
    match connection.call(command).await {
        Ok(reply) => {
            if let Some(eviction) = Info(reply_text(&reply).unwrap_or_default()).run(&EVICTION) {
                connection.eviction.is_evicting.set(true);
                tracing::warn!("{}: {}; write {}", connection.node, eviction.text, eviction.fix);
            }
        }
        Err(failure) => {
            tracing::info!(
                "the eviction policy of shared counters is unknown: {}",
                log_excerpt(&connection.describe(&failure))
            );
        }
    }
}

/// The usage up to which tokens of a layer are refunded in the store. A request that waits has used up the windows before its own,
/// so with no more than the tokens of one window used, none waits.
pub(super) fn refund_used_max(rule: &CompiledRule, layer: &CompiledLayer) -> Option<u64> {
    rule.rule.delays().then_some(layer.request.limit.into())
}

#[cfg(test)]
mod tests {
    use super::super::test_worker::{
        Call, HOUR_KEY, HOUR_MS, KEY, MINUTE_KEY, START_MS, TestWorker, acquire, leased, local, named, run, shard_key,
        sharded,
    };
    use super::*;
    use transom_limiter::decision::Decision;
    use transom_limiter::rule::{Rule, Sharing};

    #[test]
    fn a_window_that_the_store_cannot_know_yet_is_not_asked_for() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            let acquire_at = async |begins_ms: u64| {
                let end_ms = begins_ms + 8000;
                let window = StoreWindow { kind: WindowKind::Plain, number: 1, end_ms, next_end_ms: end_ms + 8000 };
                let request = CounterRequest {
                    key_base: "k".into(),
                    window,
                    limit: 9,
                    ceiling: 9,
                    need: 1,
                    want: 1,
                    used_min: 0,
                    need_once_refused: 0,
                    reserved_after_ms: 0,
                    refund_used_max: None,
                    counter: None,
                    computed_ms: 0,
                    generation: 0,
                };
                worker.shared.acquire(&[request]).await.unwrap()
            };
            // An eighth of the length, because of calendar windows, and the lead of a clock.
            let latest_ms = START_MS + LEAD_MAX_MS + 1000;
            assert!(matches!(acquire_at(latest_ms).await, AcquireReply::Granted { time_ms: START_MS, .. }));
            assert_eq!(acquire_at(latest_ms + 1).await, AcquireReply::OtherWindow { time_ms: START_MS });
            assert_eq!(worker.settled_calls().await, [acquire("k:1", [1, 1, 0])]);
            assert_eq!(["granted", "refused", "other_window"].map(|outcome| worker.calls(outcome)), [1, 0, 0]);
        });
    }

    #[test]
    fn refunds_go_out_in_calls_of_limited_size() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            for (refunds, calls) in [(1, vec![1]), (256, vec![256]), (257, vec![256, 1]), (33 * 256, vec![256; 33])] {
                worker.store.set_used("k:1", 10_000);
                let refund = Refund {
                    key_base: "k".into(),
                    kind: WindowKind::Plain,
                    number: 1,
                    limit: 9,
                    tokens: 1,
                    used_max: None,
                    counter: None,
                    deletes: false,
                };
                worker.shared.refund(vec![refund; refunds]).await;
                let sizes = worker.store.take_calls().into_iter().map(|call| match call {
                    Call::Refund(refunds) => refunds.len(),
                    call => panic!("{call:?}"),
                });
                assert_eq!(sizes.collect::<Vec<_>>(), calls);
                assert_eq!(worker.store.used("k:1"), 10_000 - refunds as u64);
            }
            assert_eq!(
                (worker.tokens("returned"), worker.calls("refunded")),
                (1 + 256 + 257 + 33 * 256, 1 + 1 + 2 + 33)
            );
        });
    }

    fn target() -> RefundTarget {
        let kind = WindowKind::Plain;
        RefundTarget {
            key_base: "k".into(),
            kind,
            number: 1,
            limit: 9,
            used_max: None,
            counter: None,
            end_ms: u64::MAX,
        }
    }

    #[test]
    fn kept_refunds_that_were_not_sent_stay_kept() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            worker.store.set_used("k:1", 10_000);
            let target = target();
            let _ = worker.shared.kept_refunds.keep(vec![target.refund(1); 3 * REFUNDS_PER_CALL]);
            worker.settled_calls().await;
            let sizes = || {
                let size = |call| match call {
                    Call::Refund(refunds) => refunds.len(),
                    call => panic!("{call:?}"),
                };
                worker.store.take_calls().into_iter().map(size).collect::<Vec<_>>()
            };
            // The outcome of a call without a reply is unknown, so that it is not repeated.
            worker.store.set_down(true);
            assert!(!worker.shared.send_kept_refunds(ServerId::ONLY).await);
            assert_eq!(sizes(), [REFUNDS_PER_CALL]);
            worker.store.set_down(false);
            // A call that is cancelled is not repeated either.
            worker.store.hold();
            let cancelled = tokio::time::timeout(Duration::from_millis(50), async {
                worker.shared.send_kept_refunds(ServerId::ONLY).await
            });
            assert!(cancelled.await.is_err());
            worker.store.release();
            assert_eq!(sizes(), [REFUNDS_PER_CALL]);
            assert!(worker.shared.send_kept_refunds(ServerId::ONLY).await);
            assert_eq!(sizes(), [REFUNDS_PER_CALL]);
            assert_eq!(worker.store.used("k:1"), 10_000 - 3 * REFUNDS_PER_CALL as u64);
        });
    }

    /// The gateway does not know yet that the server is unreachable.
    #[test]
    fn refunds_that_cannot_be_sent_are_kept() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            worker.store.set_used("k:1", 10);
            let target = target();
            worker.store.set_refusing(true);
            assert!(worker.shared.store.probe().await.is_err());
            worker.shared.refund(vec![target.refund(3)]).await;
            worker.store.set_refusing(false);
            assert_eq!(worker.store.used("k:1"), 10);
            worker.shared.report_to_reachable().await;
            assert_eq!(worker.store.used("k:1"), 7);
        });
    }

    #[test]
    fn refunds_without_an_outage_do_not_wait_for_reports() {
        run(async {
            let rules =
                [leased(&["100/hour"]), named("exact", Rule { sharing: Sharing::Exact, ..leased(&["9/hour"]) })];
            let worker = TestWorker::new(&rules).await;
            let (decision, context) = worker.outcome("a", 1).await.unwrap();
            assert!(matches!(decision, Decision::Admitted));
            // If it waited, the test would never end.
            let _reports = worker.shared.reported.lock(counter_id(worker.counter("a", 0)));
            let layers = || keyed_layers(&worker.charge_plan, &context.inputs.keyed_requests);
            let counter_of = |charged: &ShardReceipt| counter_of_receipt(&worker.rule_set, layers(), charged);
            let mut refunded = 0;
            worker.shared.refund_receipts(context.all_receipts(), u32::MAX, counter_of, |_| refunded += 1);
            assert_eq!(refunded, 1);
        });
    }

    #[test]
    fn tokens_of_an_ended_window_are_not_returned() {
        run(async {
            let worker = TestWorker::new(&[leased(&["1000/hour"])]).await;
            for (elapsed_ms, is_returned) in [(HOUR_MS - 1, true), (HOUR_MS, false)] {
                assert_eq!(worker.decide("a", 3).await, Some(true));
                worker.settled_calls().await;
                let left = u64::from(worker.leased_tokens("a", 0));
                assert!(left > 0);
                let before = (worker.tokens("returned"), worker.tokens("expired"));
                worker.clock.advance(Duration::from_millis(elapsed_ms));
                worker.shared.return_idle(true).await;
                let after = (worker.tokens("returned") - before.0, worker.tokens("expired") - before.1);
                assert_eq!(after, if is_returned { (left, 0) } else { (0, left) });
                assert_eq!(worker.settled_calls().await.len(), usize::from(is_returned));
                // The next lease begins with its window.
                worker.clock.advance(Duration::from_millis(u64::from(is_returned)));
            }
        });
    }

    #[test]
    fn returned_tokens_are_not_known_to_be_used() {
        run(async {
            let worker = TestWorker::new(&[leased(&["1000/hour"])]).await;
            assert_eq!(worker.decide("a", 3).await, Some(true));
            worker.settled_calls().await;
            let known = || worker.shared.table.known_usage(worker.counter("a", 0), START_MS).map(|(_, used)| used);
            assert_eq!(known(), Some(3 + worker.leased_tokens("a", 0)));
            worker.shared.return_idle(true).await;
            assert_eq!((known(), worker.store.used(KEY)), (Some(3), 3));
        });
    }

    #[test]
    fn a_token_that_is_refunded_to_a_returned_lease_is_returned_too() {
        run(async {
            let shard = shard_key(3);
            let cases: [(Vec<Rule>, Option<u32>, Vec<&str>); 3] = [
                (vec![local("9/hour"), leased(&["100/minute", "100/hour"])], None, vec![MINUTE_KEY, HOUR_KEY]),
                (vec![leased(&["100/hour"]), local("9/hour")], None, vec![KEY]),
                (vec![sharded("400/hour")], Some(3), vec![&shard]),
            ];
            for (rules, shard, keys) in cases {
                let worker = TestWorker::new(&rules).await;
                let TestWorker { shared, rule_set, charge_plan, .. } = &worker;
                if let Some(shard) = shard {
                    shared.leases.with_or_insert(worker.counter("a", 0), shard, shared.clock.instant(), |_record| ());
                }
                let (decision, context) = worker.outcome("a", 1).await.unwrap();
                assert!(matches!(decision, Decision::Admitted));
                shared.return_idle(true).await;
                worker.settled_calls().await;
                // Each shared layer has its token back, and no record of where to return it.
                let receipts: Vec<_> = context.all_receipts().collect();
                rule_set.refund(&receipts, u32::MAX, &shared.table, START_MS);
                let requests = &context.inputs.keyed_requests;
                let before: Vec<u64> = keys.iter().map(|key| worker.store.used(key)).collect();
                shared.track_refunded_leases(charge_plan, requests, &worker.store_keys("a"), &receipts);
                shared.return_idle(true).await;
                let after: Vec<u64> = keys.iter().map(|key| worker.store.used(key)).collect();
                assert_eq!(after, before.iter().map(|used| used - 1).collect::<Vec<_>>(), "{keys:?}");
            }
        });
    }

    #[test]
    fn clocks_that_differ_by_less_than_five_seconds_agree() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            let agrees = |lead_ms: i64| worker.shared.agrees_on_time(START_MS.saturating_add_signed(lead_ms));
            assert_eq!([-5000, -4999, 0, 4999, 5000].map(agrees), [false, true, true, true, false]);
        });
    }

    #[test]
    fn each_connection_is_checked_for_eviction_once() {
        run(async {
            let worker = TestWorker::new(&[leased(&["100/hour"])]).await;
            let evicting = || worker.metric(&transom_runtime::metrics::redis::EVICTING, None);
            worker.store.set_info("maxmemory:100\r\nmaxmemory_policy:allkeys-lru");
            worker.decide("a", 1).await;
            worker.settled_calls().await;
            for checks in [1, 0] {
                worker.shared.watch_eviction();
                let calls = worker.settled_calls().await;
                assert_eq!(calls.iter().filter(|call| **call == Call::Info).count(), checks);
                worker.shared.watch_eviction();
                assert_eq!(evicting(), 1);
            }
        });
    }
}
