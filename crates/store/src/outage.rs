//! What happens when a server cannot be reached and when it is reachable again: the circuit breaker opens, rules continue
//! without the server, the server is probed, gets a report of the usage counted meanwhile, and its breaker closes.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinHandle, spawn_local};

use super::circuit_breaker::FAILURES_MAX;
use super::client::StoreError;
use super::connection::log_excerpt;
use super::lease_sizing::{ChargeId, CounterId, LeaseRecord, UnansweredTokens, counter_id};
use super::outage_log::WorkerOutage;
use super::reconnecting::ServerId;
use super::scripts::{AcquireReply, CounterReply, CounterRequest, RefundTarget, TOKENS_MAX};
use super::shared_counters::SharedCounters;
use super::unreported_usage::UnreportedCharge;
use transom_limiter::charge_plan::{ChargePlan, LayerRef};
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{ChargePosition, LayerId};
use transom_limiter::rule::OnOutage;
use transom_limiter::rule_set::{CompiledLayer, CountingMode, KeyedRequest, RuleSet};
use transom_limiter::sharded_counter::part_of_shard;
use transom_limiter::store_key::StoreKeys;
use transom_limiter::table::Counter;
use transom_limiter::window::Segments;
use transom_limiter::window_kind::{AcquireRequest, Usage, WindowKind};
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
        servers.extend(self.unreported.servers(|charge| self.server_of(charge)));
        servers.into_iter().filter(|server| !self.breaker.is_open(*server))
    }

    fn server_of(&self, charge: &UnreportedCharge) -> ServerId {
        self.store.server_of(&self.key_base(&charge.store_key, "", 0))
    }

    fn key_base_of(&self, id: CounterId) -> Option<Rc<str>> {
        self.unreported.get(id).map(|charge| self.key_base(&charge.store_key, "", 0))
    }

    /// Some unreported counters of a server; drops those whose windows have ended.
    fn next_to_report(&self, server: ServerId) -> Vec<CounterId> {
        self.unreported.due(REPORTS_AT_ONCE, |charge| self.server_of(charge) == server, |charge| self.has_ended(charge))
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

    /// Records the usage `used` that a reply of the store reports, and returns what is known now.
    ///
    /// The known usage is what replies have reported, and the tokens of unanswered charges of all workers. Workers get replies in
    /// another order than that in which the store executed their calls. A reply lowers what replies have reported only if its call
    /// was sent after the last change: then the store executed the call after everything that is known. An earlier call raises
    /// only. So the known usage is never less than what this process was granted, and yet follows a refund or a reset within one
    /// round trip: the next call is sent after the last change. A grant that leaves the usage as it was, because something
    /// was refunded, is a change as well: the replies to other calls in flight may lack it.
    ///
    /// Whether a reply has the unanswered tokens of another worker is not known. The known usage is then at least the reported one,
    /// and at least what it was before, with these tokens: they do not count twice if the reply has them. Of a report, they do until
    /// it is answered: they are tokens of admitted requests, of which a late grant may not know.
    ///
    /// Around an outage the known usage is not less than before with the `leased` tokens of the reply, because of sharded counters,
    /// whose reports are no unanswered charges.
    pub(super) fn note_store_usage(
        &self,
        rule_set: &RuleSet,
        layer: &CompiledLayer,
        counter: Counter,
        reply: CounterReply,
        used: u64,
        leased: u64,
    ) -> u64 {
        let mut order = self.usage_order.lock(counter_id(counter));
        let (kind, now_ms) = (layer.request.kind, self.clock.now().unix_ms);
        let note = |record: &mut LeaseRecord| record.note_call(reply.call);
        let noted = self.leases.with_existing(counter_id(counter), note).unwrap_or_default();
        let former = order.get();
        order.remove_unanswered(noted.answered);
        let unanswered = order.get().unanswered;
        let known = self.table.known_usage(counter, now_ms);
        let known_end_ms = known.map(|(end_ms, _)| end_ms);
        if noted.is_outdated
            && let Some((_, known)) = known
        {
            return known.into();
        }
        let is_settled = self.breaker.is_settled(self.clock.instant());
        let is_same_window = |(end_ms, _): &(u64, u32)| match kind {
            WindowKind::Sliding => true,
            // A later end was assumed by this gateway.
            kind if kind.is_opened_by_requests() => *end_ms >= reply.end_ms,
            _ => *end_ms == reply.end_ms,
        };
        let before = known.filter(is_same_window).map(|(end_ms, known)| (end_ms, u64::from(known)));
        let least = before.filter(|(end_ms, _)| *end_ms == reply.end_ms && !is_settled);
        let least = least.map_or(0, |(_, known)| known.saturating_add(leased));
        let known_before = before.map_or(0, |(_, known)| known.saturating_sub(former.unanswered.reports));
        let has_charges = |unanswered: UnansweredTokens| before.is_some() && unanswered.charges > 0;
        let reported_before = if has_charges(former.unanswered) { former.reported } else { known_before };
        let is_newest = reply.call > former.changed;
        let reported = if is_newest { used } else { used.max(reported_before) };
        let reported = reported.max(least.saturating_sub(unanswered.reports));
        let least = if has_charges(unanswered) { known_before } else { 0 };
        let with_charges = reported.saturating_add(noted.unanswered.charges).max(least);
        let used = with_charges.saturating_add(unanswered.reports);
        order.change_reported(|_| reported);
        if before.is_none() || reported != reported_before || reply.granted > 0 {
            order.note_change();
        }
        let known = u32::try_from(used).unwrap_or(u32::MAX);
        match kind {
            WindowKind::Sliding => {
                let end_ms = before.map_or(reply.end_ms, |(end_ms, _)| end_ms.max(reply.end_ms));
                self.table.set_known_usage(counter, end_ms, known, now_ms);
            }
            kind if kind.is_opened_by_requests() => {
                // A window that the store has lost keeps its end: the reply states that of a window which would open now.
                let end_ms = match known_end_ms {
                    Some(end_ms) if reply.used == 0 && used > 0 => end_ms.min(reply.end_ms),
                    _ => reply.end_ms,
                };
                self.table.correct_known_usage(counter, end_ms, known, now_ms);
                let known = Usage { used, end_ms };
                self.table.note_debt(counter, known, layer.request, rule_set.time(now_ms));
            }
            _ => {
                self.table.set_known_usage(counter, reply.end_ms, known, now_ms);
                let known = Usage { used, end_ms: reply.end_ms };
                self.table.note_debt(counter, known, layer.request, rule_set.time(now_ms));
            }
        }
        used
    }

    /// Sets the known usage to more than replies have reported.
    pub(super) fn raise_known_usage(&self, counter: Counter, end_ms: u64, used: u32, now_ms: u64) {
        let mut order = self.usage_order.lock(counter_id(counter));
        self.table.set_known_usage(counter, end_ms, used, now_ms);
        order.change_reported(|_| used.into());
        order.note_change();
    }

    /// Subtracts tokens that are refunded from the known usage, if its window ends at `end_ms`. The refund is sent afterwards, so a
    /// reply that lacks it raises the known usage again, and none lowers it twice.
    pub(super) fn lower_known_usage(&self, counter: Counter, end_ms: Option<u64>, tokens: u32) {
        let mut order = self.usage_order.lock(counter_id(counter));
        self.table.subtract_known_usage(counter, end_ms, tokens, self.clock.now().unix_ms);
        order.change_reported(|reported| reported.saturating_sub(tokens.into()));
    }

    /// Adds tokens to the known usage that are used and not reported by the store yet. `end_ms`: the end of their window, as far
    /// as this gateway knows; a window that a request has opened in the store ends as the store has reported.
    pub(super) fn add_known_usage(
        &self,
        rule_set: &RuleSet,
        layer: &CompiledLayer,
        counter: Counter,
        end_ms: u64,
        tokens: u64,
    ) {
        let (kind, now_ms) = (layer.request.kind, self.clock.now().unix_ms);
        if kind == WindowKind::Sliding {
            let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
            // Until a token that is used now has come back.
            let segments = Segments { period_ms: rule_set.windows_of(layer).typical_ms() };
            let expires_ms = segments.expires_ms(segments.number_at(now_ms));
            return self.table.add_sliding_usage(counter, expires_ms, tokens, now_ms);
        }
        let (request, time) = (AcquireRequest { end_ms, ..layer.request }, rule_set.time(now_ms));
        let known = self.table.lasting_usage(counter, request, time);
        let end_ms = known.filter(|_| kind.is_opened_by_requests()).map_or(end_ms, |known| known.end_ms);
        // With what is known from an earlier window.
        let before = self.table.known_usage(counter, now_ms).map_or(0, |(_, used)| used.into());
        let used = known.map_or(0, |known| known.used).saturating_add(tokens);
        let more = u32::try_from(used.saturating_sub(before)).unwrap_or(u32::MAX);
        self.table.add_known_usage(counter, end_ms, more, now_ms);
        self.table.note_debt(counter, Usage { used, end_ms }, layer.request, time);
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
    use tokio::sync::Notify;
    use tokio::time::Instant;

    use super::super::shared_decision::SharedOutcome;
    use super::super::test_worker::{
        ACCOUNT_KEY, Call, HOUR_KEY, HOUR_MS, KEY, MINUTE_KEY, SLIDING_KEY, START_MS, TestWorker, leased, run,
    };
    use super::*;
    use transom_limiter::decision::Decision;
    use transom_limiter::rule::{Rule, Sharing};
    use transom_limiter::window::Windows;

    fn exact(limit: &str) -> Rule {
        Rule { sharing: Sharing::Exact, ..leased(&[limit]) }
    }

    /// A request of another worker whose reply is held back until the result is notified.
    async fn held_request(worker: &TestWorker) -> (Rc<Notify>, JoinHandle<bool>) {
        worker.store.take_calls();
        worker.store.hold();
        let (pending, charge_plan) =
            (worker.pending("a", 1), worker.rule_set.charge_plan(worker.rule_set.rules.ids().take(1)));
        let decision =
            spawn_local(
                async move { matches!(pending.decide(&charge_plan).await.unwrap().decision, Decision::Admitted) },
            );
        worker.store.next_calls().await;
        (worker.store.stop_holding(), decision)
    }

    #[test]
    fn a_late_reply_to_another_worker_does_not_lower_the_known_usage() {
        run(async {
            for rule in [exact("99/hour"), leased(&["99/hour"])] {
                let worker = TestWorker::new(&[rule]).await;
                let other = worker.beside();
                assert_eq!(other.decide("b", 1).await, Some(true));
                other.settled_calls().await;
                let (held, decision) = held_request(&other).await;
                for _ in 0..30 {
                    assert_eq!(worker.decide("a", 1).await, Some(true));
                }
                worker.settled_calls().await;
                let known = worker.known_usage("a");
                assert!(known >= Some(31), "{known:?}");
                held.notify_waiters();
                assert!(decision.await.unwrap());
                assert_eq!(worker.known_usage("a"), known);
            }
        });
    }

    /// Two replies to workers beside the first one, whose calls were sent after the last change, arrive in reverse order.
    #[test]
    fn replies_in_reverse_order_leave_the_usage_that_the_last_call_found() {
        run(async {
            // After a reset, or a refund of one token by another gateway.
            for (used, refunded_to) in [(9, 0), (9, 8), (2, 1)] {
                let worker = TestWorker::new(&[exact("99/hour")]).await;
                let others = [worker.beside(), worker.beside()];
                for other in &others {
                    assert_eq!(other.decide("b", 1).await, Some(true));
                }
                worker.store.set_used(KEY, used - 1);
                assert_eq!(worker.decide("a", 1).await, Some(true));
                worker.store.set_used(KEY, refunded_to);
                let (first_held, first) = held_request(&others[0]).await;
                let (last_held, last) = held_request(&others[1]).await;
                last_held.notify_waiters();
                assert!(last.await.unwrap());
                first_held.notify_waiters();
                assert!(first.await.unwrap());
                assert_eq!(worker.known_usage("a"), Some(refunded_to as u32 + 2));
            }
        });
    }

    /// The store refunds a token, answers one worker's call that only reads, and then grants the token to another worker, whose
    /// reply arrives first.
    #[test]
    fn a_reply_that_lacks_a_late_grant_does_not_hide_it() {
        run(async {
            let worker = TestWorker::new(&[exact("99/hour")]).await;
            assert_eq!(worker.decide("a", 1).await, Some(true));
            let (end_ms, _) = worker.shared.table.known_usage(worker.counter("a", 0), START_MS).unwrap();
            let note = |call, granted, used| {
                let reply = CounterReply { granted, used, end_ms, available_ms: end_ms, number: 500_000, call };
                let layer = worker.rule_set.layer(worker.layer_ref(0, 0).id);
                worker.shared.note_store_usage(&worker.rule_set, layer, worker.counter("a", 0), reply, used, 0)
            };
            let next_number = || worker.shared.usage_order.next_number();
            let [granting, charging] = [next_number(), next_number()];
            note(charging, 1, 5);
            let reading = next_number();
            assert_eq!([note(granting, 1, 5), note(reading, 0, 4)], [5, 5]);
        });
    }

    #[test]
    fn a_reset_lowers_the_known_usage_with_the_next_call() {
        run(async {
            let worker = TestWorker::new(&[exact("99/hour")]).await;
            let other = worker.beside();
            for _ in 0..5 {
                assert_eq!([worker.decide("a", 1).await, other.decide("a", 1).await], [Some(true); 2]);
            }
            worker.store.set_used(KEY, 0);
            assert_eq!(other.decide("a", 1).await, Some(true));
            assert_eq!(worker.known_usage("a"), Some(1));
        });
    }

    #[test]
    fn the_known_usage_has_unanswered_charges_of_all_workers() {
        run(async {
            let worker = TestWorker::new(&[exact("99/hour")]).await;
            let other = worker.beside();
            assert_eq!([worker.decide("a", 1).await, other.decide("a", 1).await], [Some(true); 2]);
            worker.store.take_calls();
            worker.store.hold();
            worker.shared.overdraw(
                &worker.rule_set,
                worker.charge_plan.rules().as_slice()[0],
                worker.request(0, "a", 40),
                &"r|a".into(),
            );
            worker.store.next_calls().await;
            let held = worker.store.stop_holding();
            assert_eq!(worker.known_usage("a"), Some(42));
            assert_eq!(other.decide("a", 1).await, Some(true));
            assert_eq!(worker.known_usage("a"), Some(43), "the charge does not count twice");
            held.notify_waiters();
            worker.settled_calls().await;
            assert_eq!(worker.known_usage("a"), Some(43));
        });
    }

    #[test]
    fn charges_without_a_reply_refuse_nothing_that_the_store_admits() {
        run(async {
            let worker = TestWorker::new(&[exact("50/hour")]).await;
            let other = worker.beside();
            assert_eq!([worker.decide("a", 1).await, other.decide("a", 1).await], [Some(true); 2]);
            worker.store.take_calls();
            worker.store.hold();
            let rule = worker.charge_plan.rules().as_slice()[0];
            worker.shared.overdraw(&worker.rule_set, rule, worker.request(0, "a", 40), &"r|a".into());
            worker.store.next_calls().await;
            let held = worker.store.stop_holding();
            for cost in [1, 1, 6] {
                assert_eq!(other.decide("a", cost).await, Some(true));
            }
            assert_eq!((worker.store.used(KEY), other.decide("a", 1).await), (50, Some(false)));
            held.notify_waiters();
            worker.settled_calls().await;
            assert_eq!(worker.known_usage("a"), Some(50));
        });
    }

    #[test]
    fn a_late_grant_in_exact_mode_admits_nothing_beyond_the_limit() {
        run(async {
            // The requests that are counted locally meanwhile may be reported before the late reply.
            for (limit, is_reported) in [(3, false), (3, true), (4, false), (4, true)] {
                let worker = TestWorker::new(&[exact(&format!("{limit}/hour"))]).await;
                let other = worker.beside();
                assert_eq!(worker.decide("a", 1).await, Some(true));
                let (held, decision) = held_request(&other).await;
                for _ in 0..2 {
                    worker.store.hold();
                    let mut pending = worker.pending("a", 1);
                    pending.deadline = Instant::from_std(worker.clock.instant());
                    let outcome = pending.decide(&worker.charge_plan).await.unwrap();
                    assert!(matches!(outcome.decision, Decision::Admitted), "it is counted locally");
                    worker.store.release();
                }
                worker.settled_calls().await;
                if is_reported {
                    worker.shared.report_to_reachable().await;
                }
                held.notify_waiters();
                let is_admitted = decision.await.unwrap();
                assert_eq!(is_admitted, limit == 4, "three requests are admitted already; {limit}, {is_reported}");
            }
        });
    }

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
