//! Plays the requests of a log: finds keys and costs, and lets the scenarios decide, which are the configuration and each
//! candidate beside it.

use std::sync::Arc;

use std::ops::Range;

use http::{HeaderMap, HeaderName, StatusCode, header};

use super::field_names::LoggedFields;
use super::json_scanner::Span;
use super::log_files::Batch;
use super::log_line::{HeaderSpan, LogLine, LoggedCost, LoggedDecision};
use super::request_reader::{Buffers, RequestReader, read_headers};
use super::scenario::{Request, Scenario};
use transom_config::Config;
use transom_config::key_kind::{HEADER, KeyKind, Logged, number};
use transom_config::toml_reader::nearest;
use transom_http::error::RequestError;
use transom_limiter::handles::{IdVec, RuleId};
use transom_limiter::key::{KeyPart, Seed};
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Cost, Rule, Sharing};
use transom_limiter::rule_set::RuleSet;
use transom_rules::access::DenyList;
use transom_rules::compiled_config::{CompiledConfig, LiveData, RouteRules};
use transom_rules::key_source::KeySource;
use transom_rules::resolved_request::ResolvedRequest;
use transom_rules::response_cost::{FinalCost, GRPC_UNKNOWN, ResponseCostRule, ResponseEnd};
use transom_rules::responses::CLIENT_CLOSED_REQUEST;
use transom_usage::usage::{Kind, Usage};

/// Equal simulations have equal results.
const SEED: Seed = Seed(0x7472_616e_736f_6d00, 0x7369_6d75_6c61_7465);
/// Keys in the samples of all rules together, and of one rule.
const SAMPLED_KEYS: usize = 1 << 19;
const SAMPLED_KEYS_OF_RULE: usize = 1 << 18;

/// The name of the scenario without other windows.
pub const CONFIGURED: &str = "as configured";

/// Plays requests.
pub struct Replay {
    reader: RequestReader,
    deny_list: Option<Arc<DenyList>>,
    /// The first is the configuration itself.
    pub scenarios: Vec<Scenario>,
    /// By rule.
    pub inputs: IdVec<RuleId, RuleInputs>,
    pub counts: PlayCounts,
    /// Whether a rule limits requests in flight.
    limits_concurrency: bool,
    now_ms: u64,
    buffers: Buffers,
    params: Vec<Range<usize>>,
    response_headers: HeaderMap,
    /// Those of one batch.
    requests: Vec<Request>,
}

/// What was played.
#[derive(Default, Debug)]
pub struct PlayCounts {
    /// Requests that the rules of a route decided, or that have a route without rules.
    pub played: u64,
    pub unrouted: u64,
    /// Requests that the gateway would answer with an error.
    pub rejected: u64,
    /// Requests that deny entries or allow lists deny.
    pub denied: u64,
    /// Requests that no rule could decide, because the log lacks the keys.
    pub without_key: u64,
    /// Requests whose time is before that of a request already decided. They were decided at the later time.
    pub late: u64,
    /// Requests without a host.
    pub without_host: u64,
    /// Requests without a scheme.
    pub without_scheme: u64,
    /// Requests with an `X-Forwarded-For` of a peer that is no trusted proxy.
    pub ignored_forwarded: u64,
    /// Unix milliseconds.
    pub first_ms: u64,
    pub last_ms: u64,
    /// Whether a time has a fraction of a second. Looked at only if a rule limits requests in flight.
    pub has_fractions: bool,
}

/// What a rule needs of a request and logs often lack.
#[derive(Debug)]
pub struct RuleInputs {
    /// Requests of routes with the rule.
    pub requests: u64,
    /// Of these, those with a duration.
    pub with_duration: u64,
    /// Of these, those with a response that states no cost.
    pub without_response_cost: u64,
    /// Of these, those that `count_when` cannot decide, because the log lacks the status of gRPC.
    pub without_grpc_status: u64,
    pub parts: Vec<KeyInput>,
    /// The request field that states the cost.
    pub cost: Option<KeyInput>,
}

/// A value that rules take from requests.
#[derive(Debug)]
pub struct KeyInput {
    pub name: String,
    /// Requests that have the value.
    pub present: u64,
    /// `None`: the client.
    source: Option<KeySource>,
}

/// The rules of a configuration as one gateway counts them.
fn local_rules(config: &mut Config) {
    config.counters.shared = None;
    for rule in config.rules.iter_mut().map(|rule| &mut rule.rule) {
        (rule.sharing, rule.key_format) = (Sharing::Local, None);
    }
}

/// The rules with other windows for one of them, by a text `RULE=WINDOW,WINDOW`, or `RULE:PLAN=WINDOW,WINDOW` for those of a
/// plan. `concurrent:N` instead of a window sets the limit of requests in flight.
///
/// # Errors
///
/// A message for the user.
fn with_windows(rules: &[Rule], text: &str) -> Result<Vec<Rule>, String> {
    let malformed = || format!("`--try {text}` is not `RULE=WINDOW,WINDOW`, such as `per-client=50/minute,3000/hour`");
    let (name, plan, windows) = candidate_parts(text).ok_or_else(malformed)?;
    let mut rules = rules.to_vec();
    let names: Vec<&str> = rules.iter().map(|rule| rule.name.as_str()).collect();
    let position = position_of("rule", name, &names)?;
    let rule = &mut rules[position];
    let (layers, concurrent_limit) = match plan {
        None => (&mut rule.layers, &mut rule.concurrent),
        Some(plan) => {
            let names: Vec<&str> = rule.plans.iter().map(|plan| plan.name.as_str()).collect();
            let position = position_of(&format!("plan of rule `{name}`:"), plan, &names)?;
            let plan = &mut rule.plans[position];
            (&mut plan.layers, &mut plan.concurrent)
        }
    };
    let (concurrent, windows): (Vec<&str>, Vec<&str>) =
        windows.split(',').map(str::trim).partition(|text| text.starts_with("concurrent:"));
    if let [text] = *concurrent {
        let limit = text.strip_prefix("concurrent:").and_then(|limit| limit.parse().ok()).filter(|limit| *limit > 0);
        *concurrent_limit =
            Some(limit.ok_or_else(|| format!("`{text}` is not `concurrent:N`, such as `concurrent:10`"))?);
    }
    let mut new_layers: Vec<Limit> = Vec::new();
    for window in windows {
        let new = Limit::parse(window).map_err(|error| format!("`{window}` is not a limit: {error}"))?;
        // A known layer keeps its other settings, such as `sliding`.
        let known = layers.iter().find(|layer| layer.period_text == new.period_text);
        let limit = match known {
            Some(known) => Limit { tokens: new.tokens, ..known.clone() },
            None => new,
        };
        if new_layers.iter().any(|other| other.windows == limit.windows) {
            return Err(format!("`--try {text}` has two limits with the same windows"));
        }
        new_layers.push(limit);
    }
    if !new_layers.is_empty() {
        *layers = new_layers;
    }
    Ok(rules)
}

/// The rule, the plan and the windows of a text `RULE=WINDOW,WINDOW` or `RULE:PLAN=WINDOW,WINDOW`.
pub fn candidate_parts(text: &str) -> Option<(&str, Option<&str>, &str)> {
    let (name, windows) = text.split_once('=')?;
    let (name, plan) = name.split_once(':').map_or((name, None), |(name, plan)| (name, Some(plan.trim())));
    Some((name.trim(), plan, windows))
}

/// The position of a name among those that are known, or a message for the user.
fn position_of(kind: &str, name: &str, known: &[&str]) -> Result<usize, String> {
    known.iter().position(|known| *known == name).ok_or_else(|| {
        let meant = nearest(name, known.iter().copied()).map(|name| format!("did you mean `{name}`?"));
        let known = || format!("those of the configuration: `{}`", known.join("`, `"));
        format!("unknown {kind} `{name}`; {}", meant.unwrap_or_else(known))
    })
}

impl Replay {
    /// `candidates` are texts `RULE=WINDOW,WINDOW` or `RULE:PLAN=WINDOW,WINDOW`.
    ///
    /// # Errors
    ///
    /// A message for the user.
    pub fn new(mut config: Config, candidates: &[String]) -> Result<Replay, String> {
        local_rules(&mut config);
        let rules: Vec<Rule> = config.limiter_rules().cloned().collect();
        let rule_set = RuleSet::new(&rules, SEED, None);
        let compiled = Arc::new(CompiledConfig::new(config, SEED, rule_set, LiveData::default()));
        let sampled = SAMPLED_KEYS / (rules.len() * (1 + candidates.len())).max(1);
        // Just below a power of two, so that the memory of the map does not double for the last keys.
        let sampled = sampled.min(SAMPLED_KEYS_OF_RULE).next_power_of_two() / 8 * 7;
        let mut scenarios = vec![Scenario::new(CONFIGURED, &rules, &compiled, SEED, sampled)?];
        for candidate in candidates {
            let rules = with_windows(&rules, candidate)?;
            scenarios.push(Scenario::new(candidate, &rules, &compiled, SEED, sampled)?);
        }
        Ok(Replay {
            deny_list: compiled.access.as_ref().map(|access| access.deny_list()),
            reader: RequestReader::new(compiled)?,
            inputs: rules.iter().map(RuleInputs::new).collect(),
            limits_concurrency: scenarios.iter().any(Scenario::limits_concurrency),
            scenarios,
            counts: PlayCounts::default(),
            now_ms: 0,
            buffers: Buffers::default(),
            params: Vec::new(),
            response_headers: HeaderMap::new(),
            requests: Vec::new(),
        })
    }

    pub fn config(&self) -> &Config {
        &self.reader.compiled.config
    }

    /// The scheme of requests whose line has none.
    pub fn assumed_scheme(&self) -> &'static str {
        if self.reader.is_secure { "https" } else { "http" }
    }

    /// The fields that routes and rules read.
    pub fn fields(&self) -> &LoggedFields {
        &self.reader.fields
    }

    /// Decides requests in all scenarios.
    pub fn play(&mut self, batch: &Batch<'_>) {
        // Reads the text of all lines before the first is decided, so that the processor waits for the memory of all at once.
        let texts = batch.ids().map(|line| batch.get(line)).map(|(line, text, _)| line.target.of(text).first());
        std::hint::black_box(texts.flatten().fold(0, |sum: u8, byte| sum.wrapping_add(*byte)));
        let mut found = 0;
        for id in batch.ids() {
            let (line, text, headers) = batch.get(id);
            self.counts.late += u64::from(line.time_ms < self.now_ms);
            self.now_ms = self.now_ms.max(line.time_ms);
            if self.counts.first_ms == 0 {
                self.counts.first_ms = self.now_ms;
            }
            if self.read(found, line, text, headers) {
                self.requests[found].line = id;
                found += 1;
            }
        }
        self.counts.last_ms = self.now_ms;
        self.counts.played += found as u64;
        for scenario in &mut self.scenarios {
            scenario.prefetch(&self.requests[..found]);
            for request in &self.requests[..found] {
                scenario.decide(request, &|position| self.reader.label(batch.get(request.line), position));
            }
        }
    }

    /// Reads a request into the position of the batch; `false` if no rule decides it.
    fn read(&mut self, position: usize, line: &LogLine, text: &[u8], headers: &[HeaderSpan]) -> bool {
        let Replay { reader, deny_list, inputs, counts, buffers, params, response_headers, requests, now_ms, .. } =
            self;
        reader.end_limits(*now_ms);
        reader.note_client(line, text);
        let Ok(logged) = reader.read(line, text, headers, buffers) else {
            counts.rejected += 1;
            return false;
        };
        let resolved = match logged.resolve(reader, params, *now_ms) {
            Ok(resolved) => resolved,
            Err(RequestError::NoRoute) => {
                counts.without_host += u64::from(logged.host.is_empty());
                counts.without_scheme += u64::from(!logged.has_scheme);
                counts.unrouted += 1;
                return false;
            }
            Err(_) => {
                counts.rejected += 1;
                return false;
            }
        };
        let denial = match (&reader.compiled.access, deny_list) {
            (Some(access), Some(deny)) => resolved.denial(access, deny, *now_ms),
            _ => Ok(None),
        };
        match denial {
            Ok(None) => {}
            Ok(Some(_)) => {
                counts.denied += 1;
                return false;
            }
            Err(_) => {
                counts.rejected += 1;
                return false;
            }
        }
        counts.without_host += u64::from(logged.host.is_empty());
        counts.without_scheme += u64::from(!logged.has_scheme);
        counts.ignored_forwarded += u64::from(logged.ignores_forwarded);
        let (rules_id, rules) = (resolved.route.rules, resolved.rules);
        if requests.len() == position {
            requests.push(Request::new(rules_id));
        }
        let request = &mut requests[position];
        let error = resolved.find_keys(&mut request.inputs, |_position, _found| ());
        request.costs.clear();
        if !rules.response_costs.rules.is_empty() {
            read_headers(response_headers, headers, text, &reader.fields.response, reader.fields.request.len());
            response_costs(rules, line, text, response_headers, request);
        }
        for (position, rule) in rules.charge_plan.rules().enumerate() {
            inputs[*rule].count(&resolved, line, request.final_cost(position));
        }
        if error.is_some() && request.inputs.keyed_requests.iter().all(Option::is_none) {
            counts.without_key += 1;
            return false;
        }
        request.now_ms = *now_ms;
        request.rules_id = rules_id;
        request.logged = line.decision;
        if self.limits_concurrency {
            let end_ms = line.time_ms + u64::from(line.duration_ms.unwrap_or(0));
            request.left_ms = end_ms.saturating_sub(*now_ms);
            counts.has_fractions |= !line.time_ms.is_multiple_of(1000) && !end_ms.is_multiple_of(1000);
        }
        true
    }

    /// Ends all requests and windows. To be called after the last request.
    pub fn finish(&mut self) {
        self.scenarios.iter_mut().for_each(Scenario::finish);
    }
}

impl RuleInputs {
    fn new(rule: &Rule) -> RuleInputs {
        let field = |name: &HeaderName| KeySource::Header(name.clone());
        let input = |part: &KeyPart| {
            let source = match KeyKind::of(part).logged {
                Logged::Authorization => field(&header::AUTHORIZATION),
                Logged::Field | Logged::Cookie | Logged::Query | Logged::Host | Logged::Never => {
                    KeySource::new(part, &[])
                }
                Logged::Client => return Some(KeyInput { name: part.to_string(), present: 0, source: None }),
                Logged::Always => return None,
            };
            Some(KeyInput { name: part.to_string(), present: 0, source: Some(source) })
        };
        let cost = match &rule.cost {
            Cost::Request { source: field, .. } => Some(HEADER.of_name(field)),
            Cost::Fixed(_) | Cost::Response { .. } => None,
        };
        RuleInputs {
            requests: 0,
            with_duration: 0,
            without_response_cost: 0,
            without_grpc_status: 0,
            parts: rule.key.iter().filter_map(input).collect(),
            cost: cost.as_ref().and_then(input),
        }
    }

    fn count(&mut self, resolved: &ResolvedRequest<'_>, line: &LogLine, final_cost: Option<FinalCost>) {
        self.requests += 1;
        self.with_duration += u64::from(line.duration_ms.is_some());
        self.without_response_cost += u64::from(final_cost == Some(FinalCost::AsCharged));
        self.without_grpc_status += u64::from(final_cost == Some(FinalCost::KnownAtEnd));
        for input in self.parts.iter_mut().chain(&mut self.cost) {
            let attributes = &resolved.attributes;
            let mut is_empty_host = false;
            let found = match &input.source {
                Some(source) => source.feed(attributes, &mut |kind, value| {
                    is_empty_host = kind == number::HOST && value.is_empty();
                }),
                None => resolved.clients.feed_client(attributes, &mut |_kind, _value| ()),
            };
            input.present += u64::from(found.is_ok() && !is_empty_host);
        }
    }
}

/// What the response of a line says about the cost under each rule of `response_costs`; and what was reserved by the body.
fn response_costs(rules: &RouteRules, line: &LogLine, text: &[u8], fields: &HeaderMap, request: &mut Request) {
    // The log does not know what a refused request would have been answered with.
    if line.decision == Some(LoggedDecision::Refused) {
        return;
    }
    let logged = &line.cost;
    let usage = (logged.usage.len > 0).then(|| {
        let mut usage = Usage::default();
        for kind in Kind::ALL {
            usage[kind] = LoggedCost::member(logged.usage, kind.name(), text).unwrap_or_default();
        }
        usage
    });
    let tokens = |object: Span, rule: &str| {
        let tokens = LoggedCost::member(object, rule, text)?;
        Some(u32::try_from(tokens.rounded_up()).unwrap_or(u32::MAX))
    };
    // Without a response, nothing is refunded.
    let status = line.status.filter(|status| *status != CLIENT_CLOSED_REQUEST);
    let status: Option<StatusCode> = status.and_then(|status| status.try_into().ok());
    // This gateway logs each status of gRPC that there is.
    let grpc_status = line.grpc_status.or(line.decision.map(|_| GRPC_UNKNOWN));
    // The log has the usage that the first rule has read.
    let logged_source = rules.response_costs.rules.iter().find_map(ResponseCostRule::usage_source);
    for rule in &rules.response_costs.rules {
        let position = rule.position;
        let name = &rules.charge_plan.rule(position).rule.name;
        if let Some(reserved) = tokens(logged.reserved, name)
            && let Some(keyed_request) = &mut request.inputs.keyed_requests[position]
        {
            *keyed_request = rules.rule_keys[position].with_reserved(*keyed_request, reserved);
        }
        let stated = match (rule.bytes(), logged.bytes_received, logged.bytes_sent) {
            (Some(bytes), Some(received), Some(sent)) => {
                Some(u32::try_from(bytes.tokens(received, sent)).unwrap_or(u32::MAX))
            }
            (Some(_), ..) => None,
            (None, ..) => {
                let charged = tokens(logged.cost, name).filter(|_| rule.reads_usage());
                let reserved = tokens(logged.reserved, name);
                // A response that breaks off may state less than the reserve, which stays charged then.
                let is_partial = |cost: &u32| charged == reserved && charged > Some(*cost);
                usage
                    .filter(|_| rule.usage_source() == logged_source)
                    .and_then(|usage| rule.cost_of_usage(&usage, logged.model(text)))
                    .filter(|cost| !is_partial(cost))
                    .or(charged)
            }
        };
        let Some(status) = status else {
            if let Some(stated) = stated {
                request.costs.push((position, FinalCost::Stated(stated)));
            }
            continue;
        };
        // Logs do not have the body.
        let response = ResponseEnd { status, headers: fields, grpc_status, body: None };
        let cost = match (rule.final_cost(&response, 0), stated) {
            (FinalCost::KnownAtEnd | FinalCost::AsCharged, Some(stated)) if rule.states_cost() => {
                FinalCost::Stated(stated)
            }
            (FinalCost::KnownAtEnd, None) if rule.reads_usage() && rule.refunds(status) => FinalCost::Stated(0),
            (FinalCost::KnownAtEnd, None) if rule.reads_usage() => FinalCost::AsCharged,
            (cost, _) => cost,
        };
        request.costs.push((position, cost));
    }
}
