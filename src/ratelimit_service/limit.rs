//! `ShouldRateLimit`: finds the rules that answer to the descriptors of a request, decides them together, and describes the
//! decision: a status for each descriptor, and header fields for the client.

use std::borrow::Cow;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use foldhash::fast::RandomState;
use http::Response;
use http::header::{CONTENT_LENGTH, HeaderMap, HeaderValue, RETRY_AFTER};
use smallvec::SmallVec;

use super::grpc::{GrpcError, decode, encode};
use super::messages::envoy::config::core::v3::HeaderValue as HeaderMessage;
use super::messages::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use super::messages::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use super::messages::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use super::messages::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus, RateLimit};
use super::messages::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use super::messages::envoy::r#type::v3::RateLimitUnit;
use crate::decision::{CountedDecision, DecisionOutputs};
use crate::proxy::response::ResponseBody;
use crate::proxy::served_config::ServedConfig;
use crate::proxy::worker_config::{DecisionBuffers, WorkerConfig};
use crate::proxy::worker_state::WorkerState;
use transom_config::access::EntryId;
use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::handles::{Handle as _, IdVec, PlanPosition, RuleId, VariantId};
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Plan, Rule};
use transom_limiter::rule_set::{KeyedRequest, NotCounted, RuleSet};
use transom_limiter::verdict::{Verdicts, WindowVerdict};
use transom_limiter::window::Windows;
use transom_rules::compiled_config::CompiledConfig;
use transom_rules::ratelimit_headers::RateLimitTemplate;
use transom_rules::resolved_query::{KeyedRule, RuleKeyValues};
use transom_rules::responses::{self, RefusalTemplate, RefusedRequest};
use transom_runtime::metrics::events::{DecisionMetrics, RatelimitServiceMetrics};
use transom_store::decision_queries::KeyQuery;
use transom_store::shared_decision::{BeginResult, SharedOutcome, Unavailable};

/// Rules that answer to the descriptors of one request.
const RULES_MAX: usize = 256;
/// Lists of rules whose charge plans are kept. Requests with further lists compile a plan each time.
const PLANS_MAX: usize = 1024;
const SECOND_MS: u64 = 1000;
const DAY_MS: u64 = 24 * 60 * 60 * SECOND_MS;
/// Units of a window, the longest first.
const UNITS: [(u64, Unit); 6] = [
    (365 * DAY_MS, Unit::Year),
    (7 * DAY_MS, Unit::Week),
    (DAY_MS, Unit::Day),
    (DAY_MS / 24, Unit::Hour),
    (60 * SECOND_MS, Unit::Minute),
    (SECOND_MS, Unit::Second),
];

/// What one worker keeps for calls under one configuration.
pub struct ServiceConfig {
    config: Rc<WorkerConfig>,
    decisions: DecisionMetrics,
    calls: RatelimitServiceMetrics,
    plans: RefCell<HashMap<RuleList, Rc<ServicePlan>, RandomState>>,
}

/// Rules of the configuration, with the limits that descriptors state instead of the rules' windows.
type RuleList = SmallVec<[(RuleId, Option<StatedLimit>); 4]>;

/// A limit that a descriptor states.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct StatedLimit {
    /// At least 1.
    tokens: u32,
    unit: RateLimitUnit,
    multiplier: u32,
}

/// A list of rules that are decided together.
struct ServicePlan {
    /// By the rule set of the configuration, unless a limit is stated.
    charge_plan: ChargePlan,
    template: RateLimitTemplate,
    /// `RateLimit-Policy`, where it is constant.
    policy: Option<HeaderValue>,
    /// Set if a limit is stated.
    stated: Option<StatedPlan>,
}

/// The difference between the rules of a plan and those of the configuration.
struct StatedPlan {
    /// Whether the limit of a rule is stated.
    is_stated: IdVec<PlanPosition, bool>,
    /// The same rules in the rule set of the configuration.
    configured: ChargePlan,
    /// For the rules of the plan's own rule set.
    refusal_templates: IdVec<RuleId, RefusalTemplate>,
}

/// A rule that answers to a descriptor.
struct MatchedRule<'r> {
    rule: RuleId,
    /// Position of the descriptor.
    descriptor: usize,
    key: SmallVec<[Cow<'r, str>; 2]>,
    /// `None`: the cost of the rule. 0: nothing is taken, but a token must be left.
    hits: Option<u32>,
    /// Replaces the windows of the rule.
    limit: Option<StatedLimit>,
}

/// A rule of a request with its key.
struct CalledRule {
    keyed: KeyedRule,
    /// The first of [`Call::matched`] with this key.
    source: usize,
}

/// The rules of a request with their keys, each key once.
struct Call<'r> {
    matched: Vec<MatchedRule<'r>>,
    /// For each of `matched`: the rule that decides it.
    positions: SmallVec<[PlanPosition; 4]>,
    rules: IdVec<PlanPosition, CalledRule>,
    plan: Rc<ServicePlan>,
    /// The deny entry that denies the request.
    denied_by: Option<EntryId>,
}

impl ServiceConfig {
    pub fn new(worker: &WorkerState) -> ServiceConfig {
        let (config, registry) = (worker.config(), &worker.registry);
        let limit_names = config.served.decision_service.limit_names();
        ServiceConfig {
            decisions: DecisionMetrics::new(registry, worker.worker_id, "ratelimit_service", &limit_names),
            calls: RatelimitServiceMetrics::new(registry, worker.worker_id, &GrpcError::CODES),
            plans: RefCell::default(),
            config,
        }
    }

    fn served(&self) -> &ServedConfig {
        &self.config.served
    }

    pub fn metrics(&self) -> &RatelimitServiceMetrics {
        &self.calls
    }

    /// The response to a call that failed.
    pub fn fail(&self, error: GrpcError) -> Response<ResponseBody> {
        self.calls.failed(error.code);
        error.response()
    }

    /// Answers a call.
    pub async fn should_rate_limit(&self, worker: &WorkerState, message: Bytes) -> Result<Bytes, GrpcError> {
        let began = worker.clock.now();
        let request: RateLimitRequest = decode(message)?;
        if request.domain.is_empty() || request.descriptors.is_empty() {
            return Err(GrpcError::invalid_argument("the request needs a domain and a descriptor"));
        }
        let call = self.prepare(worker, self.find_rules(&request)?, began.unix_ms);
        if let Some(entry) = call.denied_by {
            self.config.denials.denied(&entry.to_string());
            return Ok(self.refuse(&request, &call, None));
        }
        let charge_plan = &call.plan.charge_plan;
        let refused = match call.rules.iter().any(|rule| call.matched[rule.source].is_check()) {
            true => self.check(worker, &call).await,
            false => Ok(None),
        };
        let begun = match refused {
            Ok(Some(context)) => {
                let now_ms = worker.clock.now().unix_ms;
                let verdicts = charge_plan.verdicts(&context, &Decision::Refused);
                return Ok(self.respond(&request, &call, verdicts, now_ms, &mut Vec::new()));
            }
            Err(Unavailable) => BeginResult::Unavailable,
            Ok(None) => {
                let mut buffers = self.config.scratch();
                let DecisionBuffers { context, text, .. } = &mut *buffers;
                // The context of the worker belongs to the rule set of the configuration.
                let mut own_context =
                    call.plan.stated.as_ref().map(|_| DecisionContext::for_worker(worker.worker_id.index() as u32));
                let context = own_context.as_mut().unwrap_or(context);
                context.inputs.reserve = false;
                context.inputs.clear();
                call.rules.iter().for_each(|rule| context.inputs.push(rule.keyed.found));
                charge_plan.prefetch(&worker.counters.table, &context.inputs.keyed_requests);
                context.result.concurrency.clear();
                let store_key = |position: PlanPosition| call.rules[position].keyed.store_key.clone();
                let begun = worker.counters.decide(charge_plan, began.unix_ms, context, store_key);
                worker.metrics.decision_took(worker.clock.instant().duration_since(began.instant));
                match begun {
                    BeginResult::Decided(decision) => {
                        let now_ms = context.result.decided_ms;
                        return Ok(self.respond(
                            &request,
                            &call,
                            charge_plan.verdicts(context, &decision),
                            now_ms,
                            text,
                        ));
                    }
                    BeginResult::Pending(_) | BeginResult::Unavailable => begun,
                }
            }
        };
        let outcome = match begun {
            BeginResult::Pending(pending) => pending.decide(charge_plan).await,
            BeginResult::Decided(_) | BeginResult::Unavailable => Err(Unavailable),
        };
        let now_ms = worker.clock.now().unix_ms;
        Ok(match outcome {
            Ok(SharedOutcome { decision, context, .. }) => {
                self.respond(&request, &call, charge_plan.verdicts(&context, &decision), now_ms, &mut Vec::new())
            }
            // An error would let the request pass, unless Envoy has `failure_mode_deny`.
            Err(Unavailable) => {
                self.refuse(&request, &call, header(RETRY_AFTER.as_str(), &HeaderValue::from_static("1")))
            }
        })
    }

    /// The rules that answer to the descriptors, with the values of their keys.
    fn find_rules<'r>(&self, request: &'r RateLimitRequest) -> Result<Vec<MatchedRule<'r>>, GrpcError> {
        let mut matched = Vec::with_capacity(request.descriptors.len());
        for (position, descriptor) in request.descriptors.iter().enumerate() {
            let entries = descriptor.entries.iter().map(|entry| (entry.key.as_bytes(), &*entry.value));
            let Some(found) = self.served().descriptors.find(&request.domain, entries) else {
                self.calls.unmatched();
                continue;
            };
            if descriptor.is_negative_hits {
                self.calls.ignored();
                continue;
            }
            let key: SmallVec<[Cow<'r, str>; 2]> =
                found.open_entries.iter().map(|entry| value_text(&descriptor.entries[*entry].value)).collect();
            let admits_nothing = descriptor.limit.as_ref().is_some_and(|limit| limit.requests_per_unit == 0);
            let hits = if admits_nothing { Some(u32::MAX) } else { hits(request, descriptor) };
            matched.extend(found.rules.iter().map(|rule| {
                MatchedRule {
                    rule: *rule,
                    descriptor: position,
                    key: key.clone(),
                    hits,
                    limit: descriptor
                        .limit
                        .as_ref()
                        .filter(|_| !admits_nothing)
                        .and_then(|limit| self.stated_limit(*rule, limit)),
                }
            }));
            if matched.len() > RULES_MAX {
                return Err(GrpcError::invalid_argument("more than 256 rules answer to the descriptors"));
            }
        }
        Ok(matched)
    }

    /// Finds the counters of the rules. Hits of descriptors with the same counters are added up.
    fn prepare<'r>(&self, worker: &WorkerState, matched: Vec<MatchedRule<'r>>, now_ms: u64) -> Call<'r> {
        let values: SmallVec<[RuleKeyValues<'_, Cow<'_, str>>; 4]> = matched
            .iter()
            .map(|matched| RuleKeyValues { rule: matched.rule, key: &matched.key, cost: matched.hits })
            .collect();
        let config = worker.config();
        let (clients, decision_service) = (config.clients(), &self.served().decision_service);
        let resolved = decision_service.rules().resolve(&values, clients.as_deref());
        let denied_by = decision_service.denied(&resolved, now_ms).map(|entry| entry.id);
        let mut rules = IdVec::<PlanPosition, CalledRule>::new();
        let mut positions = SmallVec::new();
        for (source, keyed_rule) in resolved.keyed_rules(true).enumerate() {
            // The value comes from a client. An error would let the request pass.
            let refused =
                |_unusable| KeyedRule { rule: matched[source].rule, found: Err(NotCounted::Failed), store_key: None };
            let mut rule = keyed_rule.unwrap_or_else(refused);
            // A stated limit precedes plans and overrides.
            let variant_of = |request: &KeyedRequest| match matched[source].limit {
                Some(_) => VariantId::DEFAULT,
                None => request.variant,
            };
            rule.found = rule.found.map(|request| KeyedRequest { variant: variant_of(&request), ..request });
            let identity = rule.identity();
            let mut same = rules
                .enumerate_mut()
                .filter(|(_, other)| identity.is_some() && other.keyed.identity() == identity)
                .map(|(position, other)| (position, &mut other.keyed));
            match (same.next(), rule.found) {
                (Some((position, KeyedRule { found: Ok(total), .. })), Ok(keyed_request)) => {
                    total.cost = total.cost.saturating_add(keyed_request.cost);
                    positions.push(position);
                }
                _ => {
                    drop(same);
                    positions.push(rules.push(CalledRule { keyed: rule, source }));
                }
            }
        }
        drop(resolved);
        drop(values);
        let plan = self.plan(rules.iter().map(|rule| (rule.keyed.rule, matched[rule.source].limit)).collect());
        Call { matched, positions, rules, plan, denied_by }
    }

    fn plan(&self, rules: RuleList) -> Rc<ServicePlan> {
        if let Some(plan) = self.plans.borrow().get(&rules) {
            return Rc::clone(plan);
        }
        let plan = Rc::new(self.compile_plan(&rules));
        let mut plans = self.plans.borrow_mut();
        if plans.len() < PLANS_MAX {
            plans.insert(rules, Rc::clone(&plan));
        }
        plan
    }

    fn compile_plan(&self, rules: &RuleList) -> ServicePlan {
        let CompiledConfig { rule_set, config, seed, .. } = &**self.served();
        let configured = rule_set.immediate_plan(rules.iter().map(|(rule, _)| *rule), true);
        if rules.iter().all(|(_, limit)| limit.is_none()) {
            let template = RateLimitTemplate::new(&configured, |rule| &config.rules[rule]);
            let policy = template.constant_policy();
            return ServicePlan { charge_plan: configured, template, policy, stated: None };
        }
        // The rules of a rule set of their own.
        let own: IdVec<RuleId, _> = rules.iter().map(|(rule, _)| &config.rules[*rule]).collect();
        let limited = rules.iter().map(|(rule, limit)| match limit.as_ref().and_then(StatedLimit::limit) {
            Some(limit) => with_limit(&config.rules[*rule], limit),
            None => config.rules[*rule].rule.clone(),
        });
        let rule_set = Arc::new(RuleSet::new(&limited.collect::<Vec<Rule>>(), *seed, None));
        let charge_plan = rule_set.immediate_plan(rule_set.rules.ids(), true);
        let template = RateLimitTemplate::new(&charge_plan, |rule| own[rule]);
        let stated = StatedPlan {
            is_stated: rules.iter().map(|(_, limit)| limit.is_some()).collect(),
            configured,
            refusal_templates: own.map(|rule| RefusalTemplate::new(rule)),
        };
        let policy = template.constant_policy();
        ServicePlan { charge_plan, template, policy, stated: Some(stated) }
    }

    /// The limit that a descriptor states, if the rule can have it.
    fn stated_limit(&self, rule: RuleId, limit: &RateLimitOverride) -> Option<StatedLimit> {
        let (tokens, unit, multiplier) = (limit.requests_per_unit, limit.unit(), limit.unit_multiplier.unwrap_or(1));
        let stated = StatedLimit { tokens, unit, multiplier };
        // Names by a `key_format` do not tell windows of different periods apart.
        let is_possible = self.served().config.rules[rule].key_format.is_none() && stated.limit().is_some();
        if !is_possible {
            self.calls.ignored();
        }
        is_possible.then_some(stated)
    }

    /// Checks that the rules without hits have a token left, and that the others admit. Returns the result of a refusal.
    async fn check(&self, worker: &WorkerState, call: &Call<'_>) -> Result<Option<DecisionContext>, Unavailable> {
        let rule_set = call.plan.charge_plan.rule_set();
        let charge_plan = &rule_set.immediate_plan(call.plan.charge_plan.rules().iter().copied(), false);
        let inputs = call.rules.iter().map(|rule| {
            let least = if call.matched[rule.source].is_check() { 1 } else { 0 };
            rule.keyed.found.map(|request| KeyedRequest { cost: request.cost.max(least), ..request })
        });
        let query = KeyQuery {
            charge_plan,
            inputs: inputs.collect(),
            store_keys: call.rules.map(|rule| rule.keyed.store_key.clone()),
        };
        let (decision, context) = worker.counters.decide_query(&query, true).await?;
        Ok(matches!(decision, Decision::Refused).then_some(context))
    }

    /// Counts the decision, and describes it.
    fn respond(
        &self,
        request: &RateLimitRequest,
        call: &Call<'_>,
        verdicts: Verdicts<'_>,
        now_ms: u64,
        text: &mut Vec<u8>,
    ) -> Bytes {
        let Call { matched, rules, plan, .. } = call;
        let decision_service = &self.served().decision_service;
        let CompiledConfig { refusal_templates, readable_digester, .. } = &**self.served();
        let ServicePlan { charge_plan, stated, .. } = &**plan;
        let configured = stated.as_ref().map_or(charge_plan, |stated| &stated.configured);
        let has_own_windows = |position: PlanPosition| stated.as_ref().is_none_or(|stated| !stated.is_stated[position]);
        let (top_keys, marks) = (&self.config.top_keys, self.config.marks.as_ref());
        let outputs = DecisionOutputs { metrics: &self.decisions, top_keys, marks, readable_digester };
        let counted = CountedDecision { configured, verdicts, has_own_windows: &has_own_windows };
        let key = |position: PlanPosition| matched[rules[position].source].key.as_slice();
        decision_service.count(&counted, |position| &rules[position].keyed, key, outputs);
        let fields = plan.template.render(verdicts, plan.policy.as_ref(), now_ms, text);
        let (mut headers, raw_body) = match verdicts.is_refused() {
            true => {
                let headers = HeaderMap::new();
                let templates = stated.as_ref().map_or(refusal_templates, |stated| &stated.refusal_templates);
                let request = RefusedRequest { now_ms, id: None, headers, text };
                let refused = responses::refusal_response(verdicts, templates, fields, request);
                let (head, body) = refused.response.into_parts();
                (head.headers, body)
            }
            false => {
                let mut headers = HeaderMap::new();
                fields.add_to(&mut headers);
                (headers, Bytes::new())
            }
        };
        // Envoy sets the length itself.
        headers.remove(CONTENT_LENGTH);
        let is_over_limit = verdicts.is_refused() || rules.ids().any(|position| call.refuses_key(position));
        self.calls.answered(is_over_limit);
        encode(&RateLimitResponse {
            overall_code: code(is_over_limit),
            statuses: (0..request.descriptors.len()).map(|at| status(call, at, verdicts, now_ms)).collect(),
            response_headers_to_add: headers.iter().filter_map(|(name, value)| header(name.as_str(), value)).collect(),
            raw_body,
        })
    }

    /// Refuses a request that no rule counts: it is denied, or a rule with `on_outage = "refuse"` cannot be counted.
    fn refuse(&self, request: &RateLimitRequest, call: &Call<'_>, field: Option<HeaderMessage>) -> Bytes {
        self.calls.answered(true);
        let is_matched = |at| call.matched.iter().any(|matched| matched.descriptor == at);
        let status = |at| DescriptorStatus { code: code(is_matched(at)), ..DescriptorStatus::default() };
        encode(&RateLimitResponse {
            overall_code: code(true),
            statuses: (0..request.descriptors.len()).map(status).collect(),
            response_headers_to_add: field.into_iter().collect(),
            raw_body: Bytes::new(),
        })
    }
}

impl StatedLimit {
    /// The limit as configured; `None` for an unknown unit or a period that is not possible. The names of the units are
    /// those that most configurations use, so that the counters of shared rules have the same names.
    fn limit(&self) -> Option<Limit> {
        let unit = match self.unit {
            RateLimitUnit::Unknown => return None,
            RateLimitUnit::Second => ("second", "s", 1),
            RateLimitUnit::Minute => ("minute", "m", 1),
            RateLimitUnit::Hour => ("hour", "h", 1),
            RateLimitUnit::Day => ("day", "d", 1),
            RateLimitUnit::Month => ("month", "d", 30),
            RateLimitUnit::Year => ("365d", "d", 365),
        };
        let period = match (self.multiplier, unit) {
            (1, (name, ..)) => name.to_owned(),
            (multiplier, (_, letter, days)) => format!("{}{letter}", multiplier.checked_mul(days)?),
        };
        Limit::new(self.tokens, &period).ok()
    }
}

/// A rule with another limit. Its own windows stay in a plan that no client has: windows of the same length have the same
/// counters, because the limit is not part of their identity.
fn with_limit(rule: &Rule, limit: Limit) -> Rule {
    let own = Plan { name: String::new(), layers: rule.layers.clone(), concurrent: None };
    let plans = std::iter::once(own).chain(rule.plans.iter().cloned()).collect();
    Rule { layers: vec![limit], plans, ..rule.clone() }
}

impl Call<'_> {
    /// Whether a rule that is no shadow rule refuses its key.
    fn refuses_key(&self, position: PlanPosition) -> bool {
        self.rules[position].keyed.is_refused() && !self.plan.charge_plan.is_shadow(position)
    }
}

impl MatchedRule<'_> {
    fn is_check(&self) -> bool {
        self.hits == Some(0)
    }
}

/// The hits of a descriptor; `None`: neither it nor the request states them.
fn hits(request: &RateLimitRequest, descriptor: &RateLimitDescriptor) -> Option<u32> {
    match descriptor.hits_addend {
        Some(hits) => Some(u32::try_from(hits).unwrap_or(u32::MAX)),
        None => Some(request.hits_addend).filter(|hits| *hits > 0),
    }
}

/// The text of a value. Bytes that are not UTF-8 are escaped, so that a client cannot get past its limit by sending them.
fn value_text(value: &[u8]) -> Cow<'_, str> {
    match str::from_utf8(value) {
        Ok(text) => Cow::Borrowed(text),
        Err(_) => Cow::Owned(value.escape_ascii().to_string()),
    }
}

/// The largest unit that divides the windows, and how many of it they last.
fn unit(windows: &Windows) -> (Unit, u32) {
    match windows.period_ms() {
        None => (Unit::Month, 1),
        Some(period_ms) => {
            let unit = UNITS.into_iter().find(|(unit_ms, _)| period_ms.is_multiple_of(*unit_ms));
            unit.map_or((Unit::Unknown, 1), |(unit_ms, unit)| (unit, (period_ms / unit_ms) as u32))
        }
    }
}

/// The status of one descriptor: of the window that is full for the longest time, or has the fewest tokens left.
fn status(call: &Call<'_>, descriptor: usize, verdicts: Verdicts<'_>, now_ms: u64) -> DescriptorStatus {
    let answers = |position: PlanPosition| {
        let mut matched = call.matched.iter().zip(&call.positions);
        matched.any(|(matched, of)| matched.descriptor == descriptor && *of == position)
    };
    let is_refused_key = call.rules.ids().any(|position| call.refuses_key(position) && answers(position));
    let is_answer = |window: &WindowVerdict<'_>| answers(window.layer().position) && !window.rule().rule.is_shadow();
    let windows = verdicts.windows().filter(is_answer).filter(|window| !window.is_penalty()).map(|window| {
        let usage = window.stated_usage();
        let is_full = window.is_full() || window.penalty().is_some_and(WindowVerdict::is_full);
        let remaining = u64::from(window.capacity()).saturating_sub(usage.used);
        (!is_full, remaining, Reverse(usage.end_ms), window)
    });
    let Some((is_open, remaining, Reverse(end_ms), window)) =
        windows.min_by_key(|(is_open, remaining, end_ms, _)| (*is_open, *remaining, *end_ms))
    else {
        return DescriptorStatus { code: code(is_refused_key), ..DescriptorStatus::default() };
    };
    let (unit, multiplier) = unit(window.windows());
    let left_ms = end_ms.saturating_sub(now_ms);
    DescriptorStatus {
        code: code(is_refused_key || !is_open),
        current_limit: Some(RateLimit {
            requests_per_unit: window.limit(),
            unit: unit.into(),
            name: window.name().to_owned(),
            unit_multiplier: (multiplier != 1).then_some(multiplier),
        }),
        limit_remaining: u32::try_from(remaining).unwrap_or(u32::MAX),
        duration_until_reset: Some(prost_types::Duration {
            seconds: (left_ms / SECOND_MS).cast_signed(),
            nanos: (left_ms % SECOND_MS) as i32 * 1_000_000,
        }),
    }
}

fn code(is_over_limit: bool) -> i32 {
    if is_over_limit { Code::OverLimit.into() } else { Code::Ok.into() }
}

/// All fields of the gateway are ASCII.
fn header(name: &str, value: &HeaderValue) -> Option<HeaderMessage> {
    Some(HeaderMessage { key: name.to_owned(), value: value.to_str().ok()?.to_owned(), raw_value: Bytes::new() })
}
