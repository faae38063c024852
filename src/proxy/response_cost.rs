//! Settles charges that depend on the response: a cost that the response states, in its head or by the usage in its body, and
//! `count_when`.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderName};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::Body as _;
use serde_json::Number;

use super::byte_meter::{ByteMeter, MeteredRule};
use super::charged_request::ChargedRequest;
use super::request_record::RequestRecord;
use super::response::{BodyEnded, BodyObserver, ResponseBody};
use super::worker_state::DecidedBy;
use crate::upstream::forward::ForwardError;
use crate::upstream::request_body::RequestBody;
use transom_config::RouteId;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::handles::PlanPosition;
use transom_limiter::store_key::StoreKeys;
use transom_rules::compiled_config::RouteRules;
use transom_rules::ratelimit_headers::RateLimitFields;
use transom_rules::response_cost::{
    BodyEnd, FinalCost, GRPC_UNKNOWN, ResponseCostId, ResponseCostRule, ResponseEnd, grpc_status,
};
use transom_runtime::metrics::clients::ClientCells;
use transom_store::scripts::Refund;
use transom_store::settlement::RuleCharges;
use transom_usage::content_decoder::is_identity;
use transom_usage::decimal::Decimal;
use transom_usage::passing_model::PassingModel;
use transom_usage::request_body::BodyValues;
use transom_usage::usage::{Kind, RequestedModel, Usage};
use transom_usage::usage_reader::{Missing, Reading, UsageReader};

/// An admitted request whose cost is not known yet. Dropped without a response, as when the client goes away, it keeps its
/// charges.
pub struct PendingCost {
    request: Rc<ChargedRequest>,
    /// The rules that have charged and are not settled.
    unsettled: Vec<PendingCharges>,
    /// What all other rules have charged, if the request may wait for a reachable server.
    other_charges: Vec<(PlanPosition, RuleCharges)>,
    /// `None` before the request is forwarded.
    route: Option<RouteId>,
    /// The model that the request names, if costs depend on it.
    model: ModelSource,
    /// Where the usage of the client is counted, once a response.
    client: Cell<Option<ClientCells>>,
    /// Set once the request is forwarded, if a rule counts bytes.
    meter: Option<Rc<ByteMeter>>,
    forwarding: Forwarding,
}

/// How the model of a request is known.
enum ModelSource {
    Unknown,
    /// The body has a content coding.
    Unread,
    /// Read before the decision.
    Known(Box<BodyValues>),
    /// Read as the body passes. Shared with the body, which outlives the response at times.
    Passing(Rc<RefCell<Option<PassingModel>>>),
}

/// What one rule has charged. The difference to its cost is charged or refunded later.
struct PendingCharges {
    rule: ResponseCostId,
    charges: RuleCharges,
}

/// Whether a server has answered the request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Forwarding {
    Answered,
    /// It has switched protocols.
    Tunnel,
    /// The gateway made the response because no server was reachable, and has refunded all charges.
    Refunded,
    /// The gateway made the response: no server has received the request.
    NotSent,
    /// The gateway made the response, and a server may act on the request.
    MayBeSent,
}

impl PendingCost {
    /// `None` if the charge of no rule depends on the response or on a reachable server. `context` has the result of the
    /// decision.
    pub fn new(
        by: DecidedBy<'_>,
        context: &DecisionContext,
        refunds: &[(PlanPosition, Refund)],
        store_keys: impl FnOnce() -> StoreKeys,
    ) -> Option<Box<PendingCost>> {
        let response_costs = &by.rules().response_costs.rules;
        if response_costs.is_empty() && !by.may_hold {
            return None;
        }
        let mut other_charges = Vec::new();
        if by.may_hold {
            let depends = |position| response_costs.iter().any(|rule| rule.position == position);
            let positions = by.rules().charge_plan.rules().ids();
            let others = positions.filter(|position| !depends(*position) && context.has_charged(*position));
            other_charges.extend(others.map(|position| (position, RuleCharges::of(context, position))));
        }
        // Others have nothing to settle: a shadow rule that would have refused, and a rule that an outage policy left out.
        let charged = response_costs.enumerate().filter(|(_, rule)| context.has_charged(rule.position));
        let charges = |(rule, ResponseCostRule { position, .. }): (ResponseCostId, &ResponseCostRule)| PendingCharges {
            rule,
            charges: RuleCharges::of(context, *position),
        };
        Some(Box::new(PendingCost {
            request: ChargedRequest::new(by, context, refunds, store_keys()),
            unsettled: charged.map(charges).collect(),
            other_charges,
            route: None,
            model: ModelSource::Unknown,
            client: Cell::new(None),
            meter: None,
            forwarding: Forwarding::Answered,
        }))
    }

    /// Notes what a delayed request was charged again in the window in which it passes. Refunds in windows that have ended
    /// have no effect.
    pub fn add_recharge(&mut self, rules: &RouteRules, context: &DecisionContext, refunds: &[(PlanPosition, Refund)]) {
        self.request.add_refunds(refunds);
        for PendingCharges { rule, charges } in &mut self.unsettled {
            charges.add(context, rules.response_costs.rules[*rule].position);
        }
        for (position, charges) in &mut self.other_charges {
            charges.add(context, *position);
        }
    }

    /// Notes where usage counts beside its rule, and costs for the access log, if the request is logged.
    pub fn note_record(&self, record: &mut RequestRecord) {
        self.client.set(record.client_cells());
        let rules = &self.request.rules().response_costs.rules;
        let mut stated =
            self.unsettled.iter().map(|charges| &rules[charges.rule]).filter(|rule| rule.states_cost()).peekable();
        if stated.peek().is_some()
            && let Some(log) = record.cost_log()
        {
            self.request.log_costs(log, stated.map(|rule| rule.position));
        }
    }

    /// The request is forwarded. If a cost is that of bytes, they are counted. If costs depend on the model of the request, its body
    /// is read as it passes, unless that was done before.
    pub fn begin_forwarding(
        &mut self,
        route: RouteId,
        request: &mut Request<RequestBody>,
        body_values: Option<Box<BodyValues>>,
    ) {
        self.route = Some(route);
        if self.request.rules().response_costs.counts_bytes {
            self.start_meter(request.body_mut());
        }
        if let Some(values) = body_values {
            self.model = ModelSource::Known(values);
            return;
        }
        if !self.request.rules().response_costs.reads_passing_model || self.is_settled() {
            return;
        }
        // Decoding would cost the gateway more than the client.
        if joined(request.headers(), CONTENT_ENCODING).is_some_and(|coding| !is_identity(&coding)) {
            self.model = ModelSource::Unread;
            return;
        }
        // JSON, whatever the client calls it.
        let model = Rc::new(RefCell::new(Some(PassingModel::default())));
        self.model = ModelSource::Passing(Rc::clone(&model));
        request.body_mut().observe(Box::new(move |bytes| {
            model.borrow_mut().iter_mut().for_each(|model| model.push(bytes));
            Ok(())
        }));
    }

    /// The rules that count bytes pass their charges to a meter. The response may still decide whether they count the request.
    #[inline(never)]
    fn start_meter(&mut self, body: &mut RequestBody) {
        let RouteRules { response_costs, charge_plan, .. } = self.request.rules();
        let mut metered = Vec::new();
        self.unsettled.retain_mut(|PendingCharges { rule, charges }| {
            let rule = &response_costs.rules[*rule];
            let Some(cost) = rule.bytes() else { return true };
            let reserved = (std::mem::take(charges), self.request.reserved(rule.position));
            let is_shadow = charge_plan.rule(rule.position).rule.is_shadow();
            metered.push(MeteredRule::new(rule.position, cost, reserved, rule.is_conditional(), is_shadow));
            rule.is_conditional()
        });
        if !metered.is_empty() {
            let meter = ByteMeter::start(Rc::clone(&self.request), metered);
            meter.observe_request(body);
            self.meter = Some(meter);
        }
    }

    /// The response is an error of the gateway.
    pub fn forwarding_failed(&mut self, error: &ForwardError) {
        self.forwarding = if error.may_be_sent {
            Forwarding::MayBeSent
        } else if error.was_held {
            self.refund_all();
            Forwarding::Refunded
        } else {
            Forwarding::NotSent
        };
    }

    /// Refunds what all rules have charged.
    fn refund_all(&mut self) {
        let request = Rc::clone(&self.request);
        let rules = &request.rules().response_costs.rules;
        if let Some(meter) = &self.meter {
            rules.iter().filter(|rule| rule.bytes().is_some()).for_each(|rule| meter.refund(rule.position));
        }
        let unsettled = std::mem::take(&mut self.unsettled).into_iter();
        let unsettled = unsettled.map(|PendingCharges { rule, charges }| (rules[rule].position, charges));
        for (position, charges) in unsettled.chain(std::mem::take(&mut self.other_charges)) {
            request.settle(position, &charges, 0);
            request.log_cost(position, 0);
        }
    }

    /// The response opens a tunnel. Returns what counts its bytes.
    pub fn tunnel_opened(&mut self) -> Option<Rc<ByteMeter>> {
        self.forwarding = Forwarding::Tunnel;
        self.meter.clone()
    }

    /// Charges or refunds the difference to what was charged. Returns the RateLimit fields as of then, or `None` if nothing
    /// has changed. Rules that count by the body or the trailers are settled at the end of the body.
    pub fn settle(self: Box<Self>, response: &mut Response<ResponseBody>) -> Option<RateLimitFields> {
        let meter = self.meter.clone();
        let fields = self.settle_rest(response);
        // Last, so that the meter sees what is sent.
        meter.iter().for_each(|meter| meter.observe_response(response.body_mut()));
        fields
    }

    fn settle_rest(mut self: Box<Self>, response: &mut Response<ResponseBody>) -> Option<RateLimitFields> {
        let code_at_end = || response.body().is_end_stream().then_some(GRPC_UNKNOWN);
        let grpc_status = grpc_status(response.headers()).or_else(code_at_end);
        let head = ResponseEnd { status: response.status(), headers: response.headers(), grpc_status, body: None };
        let mut is_changed = self.settle_rules(&head) || self.forwarding == Forwarding::Refunded;
        is_changed |= self.meter.as_ref().is_some_and(|meter| meter.charge());
        if self.is_settled() {
            return is_changed.then(|| self.fields());
        }
        let (status, headers) = (response.status(), response.headers().clone());
        let plan = self.request.rules().response_costs.reading_plan.as_ref();
        let field = |name| joined(&headers, name);
        let reader =
            plan.map(|plan| UsageReader::new(plan, field(CONTENT_TYPE).as_deref(), field(CONTENT_ENCODING).as_deref()));
        let mut reading = Box::new(UsageReading { pending_cost: self, status, headers, reader, bytes: 0 });
        let local = response.body().local();
        if local.is_none() && !response.body().is_end_stream() {
            let fields = is_changed.then(|| reading.pending_cost.fields());
            response.body_mut().observe(reading);
            return fields;
        }
        // The whole body is here already, so the fields can state the cost.
        reading.data(&local.unwrap_or_default());
        is_changed |= reading.settle(BodyEnded::Complete(None));
        is_changed.then(|| reading.pending_cost.fields())
    }

    fn is_settled(&self) -> bool {
        self.unsettled.is_empty()
    }

    fn fields(&self) -> RateLimitFields {
        let ChargedRequest { worker, config, rules_id, keyed_requests, .. } = &*self.request;
        config.rate_limit_fields(*rules_id, keyed_requests, &worker.counters)
    }

    /// Settles the rules whose cost is known; `true` if a counter may have changed.
    fn settle_rules(&mut self, response: &ResponseEnd<'_>) -> bool {
        let request = Rc::clone(&self.request);
        let response_costs = &request.rules().response_costs;
        let (mut is_changed, mut missing) = (false, None);
        let mut unsettled = std::mem::take(&mut self.unsettled);
        unsettled.retain(|PendingCharges { rule: id, charges }| {
            let rule = &response_costs.rules[*id];
            let final_cost = self.final_cost(rule, response);
            let cost = match final_cost {
                FinalCost::KnownAtEnd => return true,
                FinalCost::AsCharged => None,
                FinalCost::Stated(cost) => Some(cost),
                FinalCost::NotCounted => {
                    self.record_refund(rule);
                    Some(0)
                }
            };
            if let Some(meter) = self.meter.as_ref().filter(|_| rule.bytes().is_some()) {
                is_changed |= cost.is_some();
                match cost {
                    None => meter.count(rule.position),
                    Some(_) => meter.refund(rule.position),
                }
                return false;
            }
            let body = response.body.filter(|_| matches!(self.forwarding, Forwarding::Answered | Forwarding::Tunnel));
            match body.and_then(|body| rule.usage(body.reading)) {
                Some(Ok(usage)) => {
                    self.record_usage(*id, &usage);
                    if let (FinalCost::Stated(cost), Some(body)) = (final_cost, body) {
                        rule.learn(body, cost);
                    }
                    let undecoded = body.and_then(|body| body.reading.undecoded());
                    missing = missing.or(undecoded.map(|reason| (rule, reason)));
                }
                // Errors of a server state no usage.
                Some(Err(reason)) if !rule.refunds(response.status) => missing = missing.or(Some((rule, reason))),
                _ => {}
            }
            is_changed |= cost.is_some();
            if let Some(cost) = cost {
                request.settle(rule.position, charges, cost);
                request.log_cost(rule.position, cost.into());
            }
            false
        });
        self.unsettled = unsettled;
        missing.into_iter().for_each(|(rule, reason)| self.record_missing(rule, reason));
        is_changed
    }

    fn final_cost(&self, rule: &ResponseCostRule, response: &ResponseEnd<'_>) -> FinalCost {
        match (rule.final_cost(response, self.request.reserved(rule.position)), self.forwarding) {
            (FinalCost::NotCounted, _) => FinalCost::NotCounted,
            (_, Forwarding::NotSent) if rule.refunds_unsent() => FinalCost::Stated(0),
            // The server may act on the request; its own status is not known.
            (_, Forwarding::NotSent | Forwarding::MayBeSent | Forwarding::Refunded) => FinalCost::AsCharged,
            (final_cost, Forwarding::Answered | Forwarding::Tunnel) => final_cost,
        }
    }

    /// Counts a request that a rule does not count.
    fn record_refund(&self, rule: &ResponseCostRule) {
        let rule = self.request.rules().charge_plan.rules()[rule.position];
        if let Some(counter) = &self.request.config.refund_counters[rule] {
            counter.refunded();
        }
    }

    /// Counts and logs the usage that a body has stated. Other rules may read other members: the log has those of the first.
    fn record_usage(&self, rule: ResponseCostId, usage: &Usage) {
        if let Some(mut log) = self.request.log().filter(|log| log.usage.is_empty()) {
            let used = Kind::ALL.into_iter().filter(|kind| usage[*kind] > Decimal::ZERO);
            log.usage.extend(used.map(|kind| (kind.name(), number(usage[kind]))));
        }
        let tokens = Kind::ALL.map(|kind| usage[kind].rounded_up().min(u32::MAX.into()));
        if let Some(metrics) = self.route.and_then(|route| self.request.config.usage_metrics[route].as_ref()) {
            metrics.rules[rule].iter().for_each(|kinds| kinds.add(tokens));
        }
        self.client.take().iter().for_each(|client| client.used(tokens));
    }

    /// Counts a response without the usage that a rule reads, and logs the reason when it begins. Clients that go away are none.
    #[cold]
    fn record_missing(&self, rule: &ResponseCostRule, missing: Missing) {
        let ChargedRequest { worker, config, .. } = &*self.request;
        let served = &config.served;
        let Some(route) = self.route else { return };
        if let Some(metrics) = &config.usage_metrics[route] {
            metrics.missing.add(Missing::ALL.map(|reason| (reason == missing).into()));
        }
        let fix = match missing {
            Missing::Aborted => return,
            _ if self.forwarding == Forwarding::Tunnel => {
                "a tunnel states none: set `websocket = false` on the route, or use the rule on other routes only"
            }
            Missing::Absent => {
                "the server has to state it; OpenAI streams do if requests have `stream_options.include_usage` (`set_include_usage = true` on the route adds it), other members are \
                 read with `usage = { json = [POINTER] }`"
            }
            Missing::Compressed => "its Content-Encoding cannot be decoded: remove Accept-Encoding from requests",
            Missing::TooLarge => {
                "its Content-Encoding expands too much, or too many are decoded: remove Accept-Encoding from requests"
            }
            Missing::NotJson => "it is no JSON: use the rule on other routes only, or a cost from a response header",
        };
        let (name, upstream) = (served.route_name(route), served.routes[route].upstream);
        let upstream = upstream.map_or("", |upstream| &served.config.upstreams[upstream].name);
        let rule = self.request.rule_name(rule.position);
        let (cause, reason) = (format!("usage {} {name}", missing.name()), missing.name());
        if let Some(suppressed) = worker.log_throttle.allow(&cause, worker.clock.instant()) {
            tracing::warn!(route = name, upstream, rule, reason, suppressed, "a response states no usage: {fix}");
        }
    }
}

/// A number of the access log, with its digits after the decimal point.
fn number(decimal: Decimal) -> Number {
    let whole = decimal.rounded_up();
    let fraction = || decimal.to_string().parse().ok().and_then(Number::from_f64);
    if decimal == Decimal::from(whole) { whole.into() } else { fraction().unwrap_or_else(|| whole.into()) }
}

/// The lines of a field as one. Several codings in several lines are none that is decoded.
pub fn joined(headers: &HeaderMap, name: HeaderName) -> Option<Vec<u8>> {
    let lines: Vec<&[u8]> = headers.get_all(name).iter().map(|value| value.as_bytes()).collect();
    (!lines.is_empty()).then(|| lines.join(&b", "[..]))
}

/// Reads the body of a response until the rules can be settled.
struct UsageReading {
    pending_cost: Box<PendingCost>,
    status: StatusCode,
    headers: HeaderMap,
    /// `None`: no rule reads usage, and the trailers decide.
    reader: Option<UsageReader>,
    bytes: u64,
}

impl UsageReading {
    /// `true` if a counter may have changed.
    fn settle(&mut self, end: BodyEnded<'_>) -> bool {
        let (trailers, is_aborted) = match end {
            BodyEnded::Complete(trailers) => (Some(trailers), false),
            BodyEnded::Aborted => (None, true),
        };
        // Without its trailers, `count_when` counts a response as if it matched.
        let in_trailers = |trailers: Option<&HeaderMap>| trailers.and_then(grpc_status).unwrap_or(GRPC_UNKNOWN);
        let grpc_status = grpc_status(&self.headers).or_else(|| trailers.map(in_trailers));
        let reading = self.reader.take().map(|reader| reader.finish(is_aborted));
        let source = std::mem::replace(&mut self.pending_cost.model, ModelSource::Unknown);
        let passed = match &source {
            ModelSource::Passing(model) => model.borrow_mut().take().map(PassingModel::finish),
            _ => None,
        };
        let model = match &source {
            ModelSource::Unread => RequestedModel::Unread,
            ModelSource::Known(values) => values.model(),
            ModelSource::Unknown | ModelSource::Passing(_) => {
                passed.as_ref().map_or(RequestedModel::Unknown, PassingModel::model)
            }
        };
        if let Some(mut log) = self.pending_cost.request.log() {
            log.model = model.or(reading.as_ref().and_then(Reading::model)).name().map(str::to_owned);
        }
        let body = reading.as_ref().map(|reading| BodyEnd { reading, model, bytes: self.bytes, is_aborted });
        let response = ResponseEnd { status: self.status, headers: &self.headers, grpc_status, body: body.as_ref() };
        self.pending_cost.settle_rules(&response)
    }
}

impl BodyObserver for UsageReading {
    fn data(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        self.reader.iter_mut().for_each(|reader| reader.push(bytes));
    }

    fn end(mut self: Box<Self>, end: BodyEnded<'_>) {
        self.settle(end);
    }
}
