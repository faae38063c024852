//! What happens when a server cannot be reached and when it is reachable again: the circuit breaker opens, rules continue
//! without the server, the server is probed, gets a report of the usage counted meanwhile, and its breaker closes.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinHandle, spawn_local};

use super::StoreKeys;
use super::circuit_breaker::FAILURES_MAX;
use super::client::StoreError;
use super::connection::log_excerpt;
use super::lease_sizing::{CounterId, counter_id};
use super::outage_log::WorkerOutage;
use super::reconnecting::ServerId;
use super::scripts::{AcquireReply, CounterReply, CounterRequest, TOKENS_MAX};
use super::shared_counters::SharedCounters;
use super::unreported_usage::UnreportedCharge;
use crate::metrics::redis::StoreOutcome;
use transom_limiter::charge_plan::{ChargePlan, LayerRef};
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::LayerId;
use transom_limiter::rule_set::{CountingMode, KeyedRequest, RuleSet};
use transom_limiter::sharded_counter::part_of_shard;
use transom_limiter::store_key::StoreWindow;
use transom_limiter::table::Counter;
use transom_limiter::window_kind::WindowKind;

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
            if self.probe(Some(server)).await.is_ok() && self.report(server).await {
                break;
            }
        }
        self.breaker.close(server, self.clock.instant());
        self.metrics.server_recovered();
        outage.end(&self.store.name_of(server), self.metrics.outage_decisions());
        // In a cluster, its hash slots may have moved to other servers meanwhile.
        self.report_to_reachable().await;
        self.send_kept_refunds().await;
    }

    /// Sends the refunds that could not be sent during the outage.
    async fn send_kept_refunds(self: &Rc<Self>) {
        self.refund(self.unreported.take_refunds()).await;
    }

    /// Records charges of this decision that were made locally only.
    pub(super) fn record_unreported(
        &self,
        charge_plan: &ChargePlan,
        context: &DecisionContext,
        first: usize,
        key_texts: &StoreKeys,
    ) {
        let charges = context.result.charges.iter().skip(first);
        for LayerRef { position, id } in
            charges.filter(|charge| charge.mode == CountingMode::LocalFallback).map(|charge| charge.layer)
        {
            let key_text = key_texts.get(position).and_then(Option::as_ref);
            let (Some(key_text), Some(keyed_request)) = (key_text, context.inputs.keyed_requests[position]) else {
                continue;
            };
            self.record_unreported_layer(charge_plan.rule_set(), id, keyed_request, key_text);
        }
    }

    /// As [`SharedCounters::record_unreported`], for one layer.
    pub(super) fn record_unreported_layer(
        &self,
        rule_set: &Arc<RuleSet>,
        layer: LayerId,
        keyed_request: KeyedRequest,
        key_text: &Rc<str>,
    ) {
        self.unreported.add(UnreportedCharge {
            rule_set: Arc::clone(rule_set),
            layer,
            keyed_request,
            key_text: Rc::clone(key_text),
        });
    }

    /// Reports usage to reachable servers: usage that was counted locally while one of their replies was late. A server that
    /// hangs is found by a probe first, because a report without a reply is not repeated.
    pub(super) async fn report_to_reachable(self: &Rc<Self>) {
        for server in self.servers_to_report_to() {
            match self.probe(Some(server)).await {
                Ok(()) => _ = self.report(server).await,
                Err(why) => self.record_error(server, &StoreError::Unreachable(why)),
            }
        }
    }

    /// As [`SharedCounters::report_to_reachable`], without a probe, when there is no later report: a server that hangs may still
    /// execute it.
    pub(super) async fn report_before_exit(self: &Rc<Self>) {
        for server in self.servers_to_report_to() {
            self.report(server).await;
        }
    }

    /// The servers of unreported usage, except for those that are known to be unreachable.
    fn servers_to_report_to(&self) -> impl Iterator<Item = ServerId> {
        let servers = self.unreported.servers(|charge| self.server_of(charge));
        servers.into_iter().filter(|server| !self.breaker.is_open(*server))
    }

    fn server_of(&self, charge: &UnreportedCharge) -> ServerId {
        self.store.server_of(&self.key_base(&charge.key_text, "", 0))
    }

    fn key_base_of(&self, id: CounterId) -> Option<Rc<str>> {
        self.unreported.get(id).map(|charge| self.key_base(&charge.key_text, "", 0))
    }

    /// Some unreported counters of a server; drops those whose windows have ended.
    fn next_to_report(&self, server: ServerId) -> Vec<CounterId> {
        let has_ended = |charge: &UnreportedCharge| {
            self.used_locally(&charge.rule_set, charge.layer, charge.keyed_request).used == 0
        };
        self.unreported.due(REPORTS_AT_ONCE, |charge| self.server_of(charge) == server, has_ended)
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

    /// Records the usage `used` that a reply of the store reports, and returns what is known now: with unanswered charges that the
    /// reply does not have, and around an outage, when workers learn at different times what others counted locally, not less
    /// than before with the `leased` tokens of the reply. A reply to an earlier call than the last one is outdated.
    pub(super) fn note_store_usage(
        &self,
        counter: Counter,
        kind: WindowKind,
        reply: CounterReply,
        used: u64,
        leased: u64,
        now_ms: u64,
    ) -> u64 {
        let end_ms = reply.end_ms;
        let (is_outdated, unanswered) =
            self.leases.with_existing(counter_id(counter), |record| record.note_call(reply.call)).unwrap_or_default();
        if is_outdated && let Some((_, known)) = self.table.known_usage(counter, now_ms) {
            return known.into();
        }
        let is_settled = self.breaker.is_settled(self.clock.instant());
        let before = self.table.known_usage(counter, now_ms).filter(|(end, _)| *end == end_ms && !is_settled);
        let least = before.map_or(0, |(_, before)| u64::from(before).saturating_add(leased));
        let used = used.saturating_add(unanswered).max(least);
        let known = u32::try_from(used).unwrap_or(u32::MAX);
        match kind.is_opened_by_requests() {
            true => self.table.correct_known_usage(counter, end_ms, known, now_ms),
            false => self.table.set_known_usage(counter, end_ms, known, now_ms),
        }
        used
    }

    /// Adds tokens to the known usage that are used and not reported by the store yet. `end_ms`: the end of their window, as far
    /// as this gateway knows; a window that a request has opened in the store ends as the store has reported.
    pub(super) fn add_known_usage(&self, counter: Counter, window: StoreWindow, end_ms: u64, tokens: u64, now_ms: u64) {
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        match window.kind {
            // Until a token that is used now has come back.
            WindowKind::Sliding => {
                let segments = window.segments();
                let expires_ms = segments.expires_ms(segments.number_at(now_ms));
                self.table.add_sliding_usage(counter, expires_ms, tokens, now_ms);
            }
            kind => {
                let known = self.table.known_usage(counter, now_ms).filter(|_| kind.is_opened_by_requests());
                let end_ms = known.map_or(end_ms, |(end_ms, _)| end_ms);
                self.table.add_known_usage(counter, end_ms, tokens, now_ms);
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
            let base = self.key_base(&charge.key_text, compiled_rule.suffix(layer), shard);
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

    /// Reports one counter to a server and to its other shards; returns `false` if the server is unreachable.
    async fn report_counter(self: &Rc<Self>, id: CounterId, server: ServerId) -> bool {
        let Some(charge) = self.unreported.get(id) else { return true };
        let UnreportedCharge { rule_set, layer, keyed_request, key_text } = &charge;
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
        let local = self.used_locally(rule_set, layer, keyed_request);
        let now_ms = self.clock.now().unix_ms;
        if local.used == 0 {
            return true;
        }
        // The report includes known usage, in case the server has forgotten it and this call recreates the counter.
        let known = self.counter_request(rule_set, layer, keyed_request, key_text, now_ms);
        let CounterRequest { used_min, window, .. } = known;
        let counter = charge.counter();
        // The local counter is emptied before the report, because usage must not be reported twice: whether a report
        // arrived is not always known, and other workers report the same counter. Those workers may still count locally
        // for a while; the tokens are therefore first added to the usage known to be used elsewhere. They are added,
        // not set, because several workers may report one counter at once.
        let add_known = |tokens: u64| self.add_known_usage(counter, window, local.end_ms, tokens, now_ms);
        let tokens = rule_set.reset_local(
            layer,
            keyed_request,
            &self.table,
            DecisionTime::read(&|| self.clock.now().unix_ms),
            add_known,
        );
        if tokens == 0 {
            return true;
        }
        // The tokens are part of the known usage, and not of replies to calls that were sent before.
        let unanswered = (shards == 1).then(|| self.new_charge());
        if let Some(id) = unanswered {
            self.add_unanswered(id, counter, tokens);
        }
        let mut all_delivered = true;
        let parts = reachable.len() as u32;
        for (base, shard) in reachable.into_iter().zip(0..) {
            let part = part_of_shard(tokens, parts, shard);
            if part == 0 {
                break;
            }
            let base_request = self.counter_request(rule_set, layer, keyed_request, key_text, now_ms);
            let owner = self.store.server_of(&base);
            let request = CounterRequest {
                key_base: base,
                need: part,
                ceiling: TOKENS_MAX,
                used_min: if shards == 1 { used_min } else { 0 },
                ..base_request
            };
            if let Some(id) = unanswered {
                self.send_charge(id, counter);
            }
            let reply = self.acquire_unchecked(std::slice::from_ref(&request)).await;
            // Without a reply, the tokens stay part of the known usage: the store may have them.
            if let Some(id) = unanswered {
                self.end_charge(id, counter, true);
            }
            match reply {
                Ok(AcquireReply::Granted { counters: replies, .. }) => {
                    self.metrics.reported(part);
                    if let (Some(reply), 1) = (replies.first(), shards) {
                        self.note_used_tokens(rule_set.layer(layer), counter, &request, *reply);
                    }
                }
                // The window has ended, or the key holds another type.
                Ok(AcquireReply::Refused { .. } | AcquireReply::OtherWindow { .. }) | Err(StoreError::Key(_)) => {}
                // Other servers have their own breakers.
                Err(StoreError::Unreachable(_)) => all_delivered &= owner != server,
            }
        }
        all_delivered
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::super::test_worker::{TestWorker, leased, run};
    use transom_limiter::decision::Decision;

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
