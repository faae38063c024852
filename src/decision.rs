//! The decision API without its transport: decides for a rule and a key given in JSON, on the counters that requests use.
//!
//! Does no I/O: callers pass the text of the query and a clock.

use std::cmp::Reverse;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::http::error::DecisionError;
use crate::http::key_source::{feed_address, part_kind};
use crate::http::overrides::{Overrides, RuleTreatment};
use crate::http::rate_limit_key::KeyHashers;
use crate::http::ratelimit_headers::seconds_until;
use crate::http::store_key_text::{KeyDigester, KeyTextFormat};
use transom_limiter::acquire::Charge;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::key::{KeyHash, KeyHasher, KeyPart, Seed};
use transom_limiter::rule_set::{ChargePlan, CompiledRule, KeyedRequest, LayerRef, RuleSet};
use transom_limiter::table::Table;

/// The operation of a query.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Decides and consumes.
    Limit,
    /// Decides without consuming.
    Check,
    /// Removes the key's counters.
    Reset,
    /// Reads the counters.
    Value,
}

/// All rules, each with a separate charge plan.
#[derive(Debug)]
pub struct DecisionService {
    rule_set: Arc<RuleSet>,
    /// Digests secret key parts for the shared store; `None` without one.
    digester: Option<Arc<KeyDigester>>,
    rules: Vec<ServedRule>,
}

#[derive(Debug)]
struct ServedRule {
    charge_plan: ChargePlan,
    starts: KeyHashers,
    key_text: KeyTextFormat,
    overrides: Option<Arc<Overrides>>,
}

/// A parsed query.
struct DecisionRequest {
    rule: usize,
    key: Vec<String>,
    cost: Option<u32>,
    reserve: bool,
}

/// A query for a key that the rule counts.
pub struct DecisionQuery {
    pub keyed_request: KeyedRequest,
    rule: usize,
    key: Vec<String>,
    pub reserve: bool,
}

impl DecisionService {
    /// `overrides` are by rule of the rule set.
    pub fn new(
        rule_set: &Arc<RuleSet>,
        overrides: &[Option<Arc<Overrides>>],
        seed: Seed,
        digester: Option<Arc<KeyDigester>>,
    ) -> DecisionService {
        let served = |(rule, compiled_rule): (usize, &CompiledRule)| ServedRule {
            charge_plan: rule_set.single_rule_plan(rule),
            starts: KeyHashers::new(compiled_rule, seed, None),
            key_text: KeyTextFormat::new(&compiled_rule.rule.name, &compiled_rule.rule.key, false),
            overrides: overrides[rule].clone(),
        };
        DecisionService {
            rules: rule_set.rules.iter().enumerate().map(served).collect(),
            rule_set: Arc::clone(rule_set),
            digester,
        }
    }

    /// Parses a query. `None`: the key is exempt from the rule.
    pub fn parse(&self, text: &[u8]) -> Result<Option<DecisionQuery>, DecisionError> {
        let request = self.read(text)?;
        let keyed_request = self.keyed_request(&request)?;
        Ok(keyed_request.map(|keyed_request| DecisionQuery {
            keyed_request,
            rule: request.rule,
            key: request.key,
            reserve: request.reserve,
        }))
    }

    /// The response for an exempt key.
    pub fn exempt_response() -> Value {
        json!({ "allowed": true, "count": 0, "limit": 0, "remaining": 0, "ttl": 0, "retry_after": 0, "windows": [] })
    }

    /// The rule set, and the charge plan of the query's rule alone.
    pub fn charge_plan(&self, query: &DecisionQuery) -> (&Arc<RuleSet>, &ChargePlan) {
        (&self.rule_set, &self.rules[query.rule].charge_plan)
    }

    /// Runs a query on the local counters, and returns the JSON response.
    pub fn decide_locally(
        &self,
        operation: Operation,
        query: &DecisionQuery,
        table: &Table,
        clock: &dyn Fn() -> u64,
    ) -> Value {
        let now = DecisionTime::read(clock);
        let charge_plan = &self.rules[query.rule].charge_plan;
        let mut context = DecisionContext::default();
        context.inputs.keyed_requests.push(Some(query.keyed_request));
        context.inputs.reserve = query.reserve;
        let (allowed, retry_at_ms) = match operation {
            Operation::Limit => {
                let decision = self.rule_set.decide(charge_plan, table, now, &mut context);
                self.outcome(query, &decision, &context, context.result.decided_ms)
            }
            // The check acquires the tokens, which may reserve them in a later window, and refunds them.
            Operation::Check if query.reserve => match self.rule_set.decide(charge_plan, table, now, &mut context) {
                Decision::Refused => {
                    (false, self.rule_set.retry_at_ms(charge_plan, &context, context.result.decided_ms))
                }
                admitted => {
                    let receipts: Vec<_> = context.all_receipts().collect();
                    self.rule_set.refund(&receipts, u32::MAX, table, context.result.decided_ms);
                    let outcome = self.outcome(query, &admitted, &context, context.result.decided_ms);
                    self.rule_set.peek(charge_plan, table, DecisionTime::read(clock), &mut context);
                    outcome
                }
            },
            Operation::Check | Operation::Value => {
                let fits = self.rule_set.peek(charge_plan, table, now, &mut context);
                (fits, self.rule_set.retry_at_ms(charge_plan, &context, context.result.decided_ms))
            }
            Operation::Reset => {
                self.rule_set.peek(charge_plan, table, now, &mut context);
                self.rule_set.reset(table, context.result.decided_ms, &context);
                let fits = self.rule_set.peek(charge_plan, table, DecisionTime::read(clock), &mut context);
                (fits, Some(context.result.decided_ms))
            }
        };
        self.response(query, &context, allowed, retry_at_ms, context.result.decided_ms)
    }

    /// Whether a decision allows the query; and when it is the caller's turn, or when to retry.
    pub fn outcome(
        &self,
        query: &DecisionQuery,
        decision: &Decision,
        context: &DecisionContext,
        now_ms: u64,
    ) -> (bool, Option<u64>) {
        match decision {
            Decision::Admitted => (true, Some(now_ms)),
            Decision::Delayed { until_ms, .. } => (true, Some(*until_ms)),
            Decision::Refused => (false, self.retry_at_ms(query, context, now_ms)),
        }
    }

    /// When a refused query can succeed, Unix time in milliseconds; `None`: never. `context` has its result.
    pub fn retry_at_ms(&self, query: &DecisionQuery, context: &DecisionContext, now_ms: u64) -> Option<u64> {
        self.rule_set.retry_at_ms(&self.rules[query.rule].charge_plan, context, now_ms)
    }

    /// The JSON response. `retry_at_ms`: when it is the caller's turn, or when to retry.
    pub fn response(
        &self,
        query: &DecisionQuery,
        context: &DecisionContext,
        allowed: bool,
        retry_at_ms: Option<u64>,
        now_ms: u64,
    ) -> Value {
        response_json(&self.rule_set.rules[query.rule], context, allowed, retry_at_ms, now_ms)
    }

    fn read(&self, text: &[u8]) -> Result<DecisionRequest, DecisionError> {
        let malformed = |reason: &str| DecisionError::Malformed(reason.to_owned());
        let request: Map<String, Value> =
            serde_json::from_slice(text).map_err(|_| malformed("the query is not a JSON object"))?;
        let known = ["rule", "key", "cost", "reserve"];
        if let Some(other) = request.keys().find(|name| !known.contains(&name.as_str())) {
            let other: String = other.chars().take(64).collect();
            return Err(DecisionError::Malformed(format!("`{other}` is not one of `rule`, `key`, `cost`, `reserve`")));
        }
        let Some(Value::String(name)) = request.get("rule") else { return Err(malformed("`rule` is not a string")) };
        let rule = self.rule_set.rules.iter().position(|compiled_rule| compiled_rule.rule.name == *name);
        let rule = rule.ok_or_else(|| DecisionError::UnknownRule(name.chars().take(64).collect()))?;
        let text = |value: &Value| match value {
            Value::String(text) if !text.is_empty() => Some(text.clone()),
            _ => None,
        };
        let key = match request.get("key") {
            None | Some(Value::Null) => Some(Vec::new()),
            Some(Value::Array(parts)) => parts.iter().map(text).collect(),
            Some(value) => text(value).map(|text| vec![text]),
        };
        let key =
            key.ok_or_else(|| malformed("`key` is neither a non-empty string nor a list of non-empty strings"))?;
        let cost = match request.get("cost") {
            None | Some(Value::Null) => None,
            Some(cost) => {
                let cost = cost.as_u64().and_then(|cost| u32::try_from(cost).ok());
                Some(cost.ok_or_else(|| malformed("`cost` is not a whole number from 0 to 4294967295"))?)
            }
        };
        let reserve = match request.get("reserve") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(reserve)) => *reserve,
            Some(_) => return Err(malformed("`reserve` is neither `true` nor `false`")),
        };
        Ok(DecisionRequest { rule, key, cost, reserve })
    }

    /// The query's key in the shared store; `None` if the rule is not shared.
    pub fn store_key(&self, query: &DecisionQuery) -> Option<String> {
        let is_shared = self.rules[query.rule].charge_plan.is_shared;
        let digester = self.digester.as_ref().filter(|_| is_shared)?;
        let mut text = String::new();
        self.write_store_key(query.rule, &query.key, digester, &mut text).then_some(text)
    }

    /// Appends a key's text in the shared store, equal to the text for requests with that key. Returns `false`, and appends
    /// nothing, if `key` does not fit the rule.
    pub(super) fn write_store_key(
        &self,
        rule: usize,
        key: &[String],
        digester: &KeyDigester,
        out: &mut String,
    ) -> bool {
        let (Some(served), Some(compiled_rule)) = (self.rules.get(rule), self.rule_set.rules.get(rule)) else {
            return false;
        };
        let start = out.len();
        served.key_text.write_prefix(out);
        for (position, part) in compiled_rule.rule.key.iter().enumerate() {
            let value = match (part, key.get(position)) {
                (_, Some(value)) => value.as_str(),
                (KeyPart::Global, None) => "",
                (_, None) => {
                    out.truncate(start);
                    return false;
                }
            };
            let mut take = |kind: u8, bytes: &[u8]| served.key_text.write_part(position, kind, bytes, digester, out);
            match (part, value.parse()) {
                (KeyPart::Ip { v4_prefix, v6_prefix }, Ok(parsed)) => {
                    feed_address(parsed, *v4_prefix, *v6_prefix, &mut take);
                }
                (KeyPart::Ip { .. }, Err(_)) => {
                    out.truncate(start);
                    return false;
                }
                _ => take(part_kind(part), value.as_bytes()),
            }
        }
        true
    }

    /// The key to charge; `None` if it is exempt.
    fn keyed_request(&self, request: &DecisionRequest) -> Result<Option<KeyedRequest>, DecisionError> {
        let (served, rule) = (&self.rules[request.rule], &self.rule_set.rules[request.rule].rule);
        // A global rule takes no key, and ignores a given one.
        let parts: &[KeyPart] = if rule.key == [KeyPart::Global] { &[] } else { &rule.key };
        if parts.len() != request.key.len() && !parts.is_empty() {
            let names: Vec<String> = parts.iter().map(KeyPart::to_string).collect();
            return Err(DecisionError::Malformed(format!("the key of this rule consists of `{}`", names.join("`, `"))));
        }
        let hash = |start: &KeyHasher, digests: bool| -> Result<KeyHash, DecisionError> {
            let mut hasher = start.clone();
            let given = if parts.is_empty() { &[][..] } else { &request.key };
            for (part, value) in rule.key.iter().zip(given.iter().chain(std::iter::repeat(&String::new()))) {
                crate::http::overrides::feed_text(&mut hasher, part, value, digests).ok_or_else(|| {
                    DecisionError::Malformed(String::from("the key is not an IP address, and the rule counts by `ip`"))
                })?;
            }
            Ok(hasher.finish())
        };
        let key = hash(&served.starts.counter, false)?;
        let offset = match &served.starts.window_offset {
            Some(start) => hash(start, false)?.bucket_hash,
            None => 0,
        };
        let mut variant = 0;
        if let Some(overrides) = served.overrides.as_ref().filter(|overrides| overrides.has_keys()) {
            let known = match &overrides.digest_hasher {
                Some(start) => hash(start, true)?,
                None => key,
            };
            match overrides.treatment_of(known) {
                Some(RuleTreatment::Exempt) => return Ok(None),
                Some(RuleTreatment::Variant(of_key)) => variant = of_key,
                None => {}
            }
        }
        Ok(Some(KeyedRequest { key, offset, variant, cost: request.cost.unwrap_or(rule.cost.default_cost()) }))
    }
}

/// The response. Its top level repeats the layer nearest its limit.
fn response_json(
    compiled_rule: &CompiledRule,
    context: &DecisionContext,
    allowed: bool,
    retry_at_ms: Option<u64>,
    now_ms: u64,
) -> Value {
    let seconds = |ms: u64| seconds_until(ms, now_ms);
    // In the order of the configuration; charges have another order.
    let mut layers: Vec<_> = context.result.charges.iter().zip(&context.result.layers).collect();
    layers.sort_by_key(|(_, layer_ref)| layer_ref.layer);
    let remaining = |charge: &Charge, layer_ref: &LayerRef| {
        u64::from(compiled_rule.layer(layer_ref.layer).capacity).saturating_sub(charge.usage.used)
    };
    let window = |(charge, layer_ref): &(&Charge, &LayerRef)| {
        let mut window = Map::new();
        window.insert("count".to_owned(), json!(charge.usage.used));
        window.insert("limit".to_owned(), json!(charge.request.limit));
        window.insert("remaining".to_owned(), json!(remaining(charge, layer_ref)));
        window.insert("ttl".to_owned(), json!(seconds(charge.usage.end_ms)));
        window
    };
    let nearness =
        |(charge, layer_ref): &&(&Charge, &LayerRef)| (remaining(charge, layer_ref), Reverse(charge.usage.end_ms));
    let mut response = layers.iter().min_by_key(nearness).map(window).unwrap_or_default();
    response.insert("allowed".to_owned(), json!(allowed));
    // Absent where the cost exceeds the capacity, so that the query can never succeed.
    let retry_after =
        retry_at_ms.map(|retry_at_ms| if allowed { seconds(retry_at_ms) } else { seconds(retry_at_ms).max(1) });
    response.insert("retry_after".to_owned(), json!(retry_after));
    let named = |layer: &(&Charge, &LayerRef)| {
        let mut window = window(layer);
        window.insert("name".to_owned(), json!(compiled_rule.layer_name(layer.1.layer)));
        Value::Object(window)
    };
    response.insert("windows".to_owned(), layers.iter().map(named).collect());
    Value::Object(response)
}
