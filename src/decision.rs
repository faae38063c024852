//! Decisions for those who ask without a request: may this key pass this rule, and what has it used?
//!
//! The question and the answer are JSON; the counters are those of the requests. This file knows no
//! socket: it is handed the text of a question and a clock.

use std::cmp::Reverse;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::http::error::DecisionError;
use crate::http::key_source::{address, kind};
use crate::http::overrides::{Overrides, RuleTreatment};
use crate::http::rate_limit_key::Starts;
use crate::http::ratelimit_headers::seconds_until;
use crate::http::store_key_text::{Digester, Spelling};
use transom_limiter::acquire::Charge;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::key::{KeyHash, KeyHasher, KeyPart, Seed};
use transom_limiter::rule_set::{ChargePlan, CompiledRule, KeyedRequest, LayerRef, RuleSet};
use transom_limiter::table::Table;

/// What is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Decide and consume.
    Limit,
    /// Decide only.
    Check,
    /// Forget the key.
    Reset,
    /// Read only.
    Value,
}

/// All rules, each for itself, for those who ask by name and key.
#[derive(Debug)]
pub struct DecisionService {
    rule_set: Arc<RuleSet>,
    /// Spells what is secret, where gateways share counters.
    digester: Option<Arc<Digester>>,
    rules: Vec<ServedRule>,
}

#[derive(Debug)]
struct ServedRule {
    charge_plan: ChargePlan,
    starts: Starts,
    key_text: Spelling,
    overrides: Option<Arc<Overrides>>,
}

/// A question, read.
struct DecisionRequest {
    rule: usize,
    key: Vec<String>,
    cost: Option<u32>,
    reserve: bool,
}

/// A question about a key that the rule counts.
pub struct DecisionQuery {
    pub keyed_request: KeyedRequest,
    rule: usize,
    key: Vec<String>,
    pub reserve: bool,
}

impl DecisionService {
    /// `exceptions` has one place for each rule of the book.
    pub fn new(
        rule_set: &Arc<RuleSet>,
        exceptions: &[Option<Arc<Overrides>>],
        seed: Seed,
        digester: Option<Arc<Digester>>,
    ) -> DecisionService {
        let ready = |(rule, entry): (usize, &CompiledRule)| ServedRule {
            charge_plan: rule_set.single_rule_plan(rule),
            starts: Starts::new(entry, seed, None),
            key_text: Spelling::new(&entry.rule.name, &entry.rule.key, false),
            overrides: exceptions[rule].clone(),
        };
        DecisionService {
            rules: rule_set.rules.iter().enumerate().map(ready).collect(),
            rule_set: Arc::clone(rule_set),
            digester,
        }
    }

    /// Reads a question. `None`: the rule does not count that key, and everything is allowed.
    pub fn parse(&self, text: &[u8]) -> Result<Option<DecisionQuery>, DecisionError> {
        let question = self.read(text)?;
        let keyed_request = self.keyed_request(&question)?;
        Ok(keyed_request.map(|keyed_request| DecisionQuery {
            keyed_request,
            rule: question.rule,
            key: question.key,
            reserve: question.reserve,
        }))
    }

    /// What is said of a key that the rule does not count.
    pub fn exempt_response() -> Value {
        json!({ "allowed": true, "count": 0, "limit": 0, "remaining": 0, "ttl": 0, "retry_after": 0, "windows": [] })
    }

    /// The rule of a question alone.
    pub fn charge_plan(&self, heard: &DecisionQuery) -> (&Arc<RuleSet>, &ChargePlan) {
        (&self.rule_set, &self.rules[heard.rule].charge_plan)
    }

    /// Answers a question in JSON, by the counters of this machine.
    pub fn decide_locally(
        &self,
        verb: Operation,
        heard: &DecisionQuery,
        table: &Table,
        clock: &dyn Fn() -> u64,
    ) -> Value {
        let now = DecisionTime::read(clock);
        let charge_plan = &self.rules[heard.rule].charge_plan;
        let mut context = DecisionContext::default();
        context.inputs.keyed_requests.push(Some(heard.keyed_request));
        context.inputs.reserve = heard.reserve;
        let (allowed, again_ms) = match verb {
            Operation::Limit => {
                let judgement = self.rule_set.decide(charge_plan, table, now, &mut context);
                self.outcome(heard, &judgement, &context, context.result.decided_ms)
            }
            // Whether there is a place in a window to come is found out by taking it.
            Operation::Check if heard.reserve => match self.rule_set.decide(charge_plan, table, now, &mut context) {
                Decision::Refused => {
                    (false, self.rule_set.retry_at_ms(charge_plan, &context, context.result.decided_ms))
                }
                taken => {
                    let shares: Vec<_> = context.all_receipts().collect();
                    self.rule_set.refund(&shares, u32::MAX, table, context.result.decided_ms);
                    let outcome = self.outcome(heard, &taken, &context, context.result.decided_ms);
                    self.rule_set.peek(charge_plan, table, DecisionTime::read(clock), &mut context);
                    outcome
                }
            },
            Operation::Check | Operation::Value => {
                let room = self.rule_set.peek(charge_plan, table, now, &mut context);
                (room, self.rule_set.retry_at_ms(charge_plan, &context, context.result.decided_ms))
            }
            Operation::Reset => {
                self.rule_set.peek(charge_plan, table, now, &mut context);
                self.rule_set.reset(table, context.result.decided_ms, &context);
                let room = self.rule_set.peek(charge_plan, table, DecisionTime::read(clock), &mut context);
                (room, Some(context.result.decided_ms))
            }
        };
        self.response(heard, &context, allowed, again_ms, context.result.decided_ms)
    }

    /// Whether a question is allowed that was judged so, and when: it is its turn, or it may be asked again.
    pub fn outcome(
        &self,
        heard: &DecisionQuery,
        judgement: &Decision,
        context: &DecisionContext,
        now_ms: u64,
    ) -> (bool, Option<u64>) {
        match judgement {
            Decision::Admitted => (true, Some(now_ms)),
            Decision::Delayed { until_ms, .. } => (true, Some(*until_ms)),
            Decision::Refused => (false, self.retry_at_ms(heard, context, now_ms)),
        }
    }

    /// When a question may be asked again that finds what lies on the desk.
    pub fn retry_at_ms(&self, heard: &DecisionQuery, context: &DecisionContext, now_ms: u64) -> Option<u64> {
        self.rule_set.retry_at_ms(&self.rules[heard.rule].charge_plan, context, now_ms)
    }

    /// The answer in JSON.
    pub fn response(
        &self,
        heard: &DecisionQuery,
        context: &DecisionContext,
        allowed: bool,
        again_ms: Option<u64>,
        now_ms: u64,
    ) -> Value {
        response_json(&self.rule_set.rules[heard.rule], context, allowed, again_ms, now_ms)
    }

    fn read(&self, text: &[u8]) -> Result<DecisionRequest, DecisionError> {
        let malformed = |why: &str| DecisionError::Malformed(why.to_owned());
        let question: Map<String, Value> =
            serde_json::from_slice(text).map_err(|_| malformed("the question is not a JSON object"))?;
        let known = ["rule", "key", "cost", "reserve"];
        if let Some(other) = question.keys().find(|name| !known.contains(&name.as_str())) {
            let other: String = other.chars().take(64).collect();
            return Err(DecisionError::Malformed(format!("`{other}` is not one of `rule`, `key`, `cost`, `reserve`")));
        }
        let Some(Value::String(name)) = question.get("rule") else { return Err(malformed("`rule` is not a text")) };
        let rule = self.rule_set.rules.iter().position(|entry| entry.rule.name == *name);
        let rule = rule.ok_or_else(|| DecisionError::UnknownRule(name.chars().take(64).collect()))?;
        let text = |value: &Value| match value {
            Value::String(text) if !text.is_empty() => Some(text.clone()),
            _ => None,
        };
        let key = match question.get("key") {
            None | Some(Value::Null) => Some(Vec::new()),
            Some(Value::Array(parts)) => parts.iter().map(text).collect(),
            Some(value) => text(value).map(|text| vec![text]),
        };
        let key = key.ok_or_else(|| malformed("`key` is neither a text nor a list of texts, none of them empty"))?;
        let cost = match question.get("cost") {
            None | Some(Value::Null) => None,
            Some(cost) => {
                let cost = cost.as_u64().and_then(|cost| u32::try_from(cost).ok());
                Some(cost.ok_or_else(|| malformed("`cost` is not a whole number from 0 to 4294967295"))?)
            }
        };
        let reserve = match question.get("reserve") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(reserve)) => *reserve,
            Some(_) => return Err(malformed("`reserve` is neither `true` nor `false`")),
        };
        Ok(DecisionRequest { rule, key, cost, reserve })
    }

    /// What a question's key is in the store; `None` if the rule is not shared.
    pub fn store_key(&self, heard: &DecisionQuery) -> Option<String> {
        let is_shared = self.rules[heard.rule].charge_plan.is_shared;
        let digester = self.digester.as_ref().filter(|_| is_shared)?;
        let mut text = String::new();
        self.write_store_key(heard.rule, &heard.key, digester, &mut text).then_some(text)
    }

    /// Adds the text of a key under a rule, as [`crate::http::caller::Identity::text`] does for requests that have it. Returns
    /// whether it is one; if not, nothing is added.
    pub(super) fn write_store_key(&self, rule: usize, key: &[String], digester: &Digester, out: &mut String) -> bool {
        let (Some(ready), Some(entry)) = (self.rules.get(rule), self.rule_set.rules.get(rule)) else { return false };
        let start = out.len();
        ready.key_text.begin(out);
        for (position, part) in entry.rule.key.iter().enumerate() {
            let value = match (part, key.get(position)) {
                (_, Some(value)) => value.as_str(),
                (KeyPart::Global, None) => "",
                (_, None) => {
                    out.truncate(start);
                    return false;
                }
            };
            let mut take = |kind: u8, bytes: &[u8]| ready.key_text.part(position, kind, bytes, digester, out);
            match (part, value.parse()) {
                (KeyPart::Ip { v4_prefix, v6_prefix }, Ok(parsed)) => {
                    address(parsed, *v4_prefix, *v6_prefix, &mut take);
                }
                (KeyPart::Ip { .. }, Err(_)) => {
                    out.truncate(start);
                    return false;
                }
                _ => take(kind(part), value.as_bytes()),
            }
        }
        true
    }

    /// Who asks; `None` if the rule does not count that key.
    fn keyed_request(&self, question: &DecisionRequest) -> Result<Option<KeyedRequest>, DecisionError> {
        let (ready, rule) = (&self.rules[question.rule], &self.rule_set.rules[question.rule].rule);
        // One counter for all has no key, or any.
        let parts: &[KeyPart] = if rule.key == [KeyPart::Global] { &[] } else { &rule.key };
        if parts.len() != question.key.len() && !parts.is_empty() {
            let names: Vec<String> = parts.iter().map(KeyPart::to_string).collect();
            return Err(DecisionError::Malformed(format!(
                "the key of this rule has the parts `{}`",
                names.join("`, `")
            )));
        }
        let hash = |start: &KeyHasher, digests: bool| -> Result<KeyHash, DecisionError> {
            let mut hasher = start.clone();
            let given = if parts.is_empty() { &[][..] } else { &question.key };
            for (part, value) in rule.key.iter().zip(given.iter().chain(std::iter::repeat(&String::new()))) {
                crate::http::overrides::feed_text(&mut hasher, part, value, digests).ok_or_else(|| {
                    DecisionError::Malformed(String::from("the key is no address where the rule counts by `ip`"))
                })?;
            }
            Ok(hasher.finish())
        };
        let key = hash(&ready.starts.own, false)?;
        let offset = match &ready.starts.everywhere {
            Some(start) => hash(start, false)?.bucket_hash,
            None => 0,
        };
        let mut variant = 0;
        if let Some(exceptions) = ready.overrides.as_ref().filter(|exceptions| exceptions.has_keys()) {
            let known = match &exceptions.by_digest {
                Some(start) => hash(start, true)?,
                None => key,
            };
            match exceptions.of_key(known) {
                Some(RuleTreatment::Exempt) => return Ok(None),
                Some(RuleTreatment::Variant(of_key)) => variant = of_key,
                None => {}
            }
        }
        Ok(Some(KeyedRequest { key, offset, variant, cost: question.cost.unwrap_or(rule.cost.default_cost()) }))
    }
}

/// The answer: at its top stands the layer nearest its limit.
fn response_json(
    entry: &CompiledRule,
    context: &DecisionContext,
    allowed: bool,
    again_ms: Option<u64>,
    now_ms: u64,
) -> Value {
    let seconds = |ms: u64| seconds_until(ms, now_ms);
    // In the order of the configuration, not in that of the charges.
    let mut asked: Vec<_> = context.result.charges.iter().zip(&context.result.layers).collect();
    asked.sort_by_key(|(_, line)| line.layer);
    let remaining = |charge: &Charge, line: &LayerRef| {
        u64::from(entry.layer(line.layer).capacity).saturating_sub(charge.usage.used)
    };
    let window = |(charge, line): &(&Charge, &LayerRef)| {
        let mut window = Map::new();
        window.insert("count".to_owned(), json!(charge.usage.used));
        window.insert("limit".to_owned(), json!(charge.request.limit));
        window.insert("remaining".to_owned(), json!(remaining(charge, line)));
        window.insert("ttl".to_owned(), json!(seconds(charge.usage.end_ms)));
        window
    };
    let nearness = |(charge, line): &&(&Charge, &LayerRef)| (remaining(charge, line), Reverse(charge.usage.end_ms));
    let mut answer = asked.iter().min_by_key(nearness).map(window).unwrap_or_default();
    answer.insert("allowed".to_owned(), json!(allowed));
    // What costs more than there ever is will never be allowed.
    let retry_after = again_ms.map(|again_ms| if allowed { seconds(again_ms) } else { seconds(again_ms).max(1) });
    answer.insert("retry_after".to_owned(), json!(retry_after));
    let named = |asked: &(&Charge, &LayerRef)| {
        let mut window = window(asked);
        window.insert("name".to_owned(), json!(entry.layer_name(asked.1.layer)));
        Value::Object(window)
    };
    answer.insert("windows".to_owned(), asked.iter().map(named).collect());
    Value::Object(answer)
}
