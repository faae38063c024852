//! The decision service: decides for callers outside of the gateway, by rules and keys that they name, on the counters that
//! requests use. Limits of concurrent requests do not apply: a decision has no end. It knows no encoding; `admin::decision_json` reads and writes JSON.

use std::rc::Rc;
use std::sync::Arc;

use crate::http::error::DecisionError;
use crate::http::key_source::{feed_address, part_kind};
use crate::http::overrides::{Overrides, RuleTreatment, feed_text};
use crate::http::rate_limit_key::KeyHashers;
use crate::http::store_key_text::{KeyDigester, KeyTextFormat};
use crate::redis_store::decision_queries::{KeyQuery, KeyState};
use crate::redis_store::shared_counters::SharedCounters;
use crate::redis_store::shared_decision::Unavailable;
use transom_limiter::acquire::Charge;
use transom_limiter::concurrency::ConcurrencyUsage;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::key::{KeyHash, KeyHasher, KeyPart, Seed};
use transom_limiter::rule::Sharing;
use transom_limiter::rule_set::{ChargePlan, CompiledRule, KeyedRequest, LayerRef, RuleSet};
use transom_limiter::table::Table;

/// The operation of a query.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Decides and consumes.
    Limit,
    /// Decides without consuming.
    Check,
    /// Removes the counters of the keys.
    Reset,
    /// Reads the counters.
    Value,
}

/// A query. Its rules are decided together: all admit, or nothing is consumed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DecisionQuery {
    pub operation: Operation,
    /// At least one.
    pub rules: Vec<RuleQuery>,
    /// Whether tokens may be reserved in later windows.
    pub reserve: bool,
}

/// A rule of a query.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleQuery {
    pub rule: String,
    /// The values of the key's parts, in order. A rule with the key `global` needs none.
    pub key: Vec<String>,
    /// `None`: the default cost of the rule.
    pub cost: Option<u32>,
}

/// The result of a query.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DecisionOutcome {
    pub allowed: bool,
    /// The time of the decision, Unix milliseconds.
    pub now_ms: u64,
    /// When it is the caller's turn, or when to retry, Unix milliseconds; `None`: never.
    pub retry_at_ms: Option<u64>,
    /// In the order of the query and of the configuration. Rules that exempt the key have none.
    pub windows: Vec<WindowState>,
    /// Whether all rules exempt the key.
    pub is_exempt: bool,
    /// The requests in flight; only after [`Operation::Value`].
    pub concurrent: Vec<ConcurrencyState>,
}

/// The requests of a key in flight.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConcurrencyState {
    pub rule: String,
    /// The name of the limit.
    pub name: String,
    pub usage: ConcurrencyUsage,
}

/// The usage of one window.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct WindowState {
    pub rule: String,
    /// The name of the layer.
    pub name: String,
    pub used: u64,
    pub limit: u32,
    pub remaining: u64,
    /// Unix milliseconds.
    pub end_ms: u64,
}

/// The counters on which queries are decided.
pub struct CounterAccess<'a> {
    pub table: &'a Table,
    /// Returns Unix milliseconds.
    pub clock: &'a dyn Fn() -> u64,
    /// `None` where counters are not shared between gateways.
    pub shared: Option<&'a Rc<SharedCounters>>,
}

/// All rules, as queries use them.
#[derive(Debug)]
pub struct DecisionService {
    rule_set: Arc<RuleSet>,
    /// Digests secret key parts for the shared store; `None` without one.
    digester: Option<Arc<KeyDigester>>,
    rules: Vec<ServedRule>,
}

#[derive(Debug)]
struct ServedRule {
    hashers: KeyHashers,
    key_text: KeyTextFormat,
    overrides: Option<Arc<Overrides>>,
}

/// A rule of a query with its key.
struct KeyedRule {
    /// Position in the rule set.
    rule: usize,
    /// `None`: the key is exempt.
    keyed_request: Option<KeyedRequest>,
    /// The key in the shared store; `None` if the rule is not shared.
    key_text: Option<Rc<str>>,
}

impl DecisionService {
    /// `overrides` are by rule of the rule set.
    pub fn new(
        rule_set: &Arc<RuleSet>,
        overrides: &[Option<Arc<Overrides>>],
        seed: Seed,
        digester: Option<Arc<KeyDigester>>,
    ) -> DecisionService {
        let served = |(rule, compiled): (&CompiledRule, &Option<Arc<Overrides>>)| ServedRule {
            hashers: KeyHashers::new(rule, seed, None),
            key_text: KeyTextFormat::new(&rule.rule.name, &rule.rule.key, false),
            overrides: compiled.clone(),
        };
        let rules = rule_set.rules.iter().zip(overrides).map(served).collect();
        DecisionService { rules, rule_set: Arc::clone(rule_set), digester }
    }

    /// How often the requests in flight of a key shared a count with those of others, because there were too many keys.
    pub fn concurrency_overflows(&self) -> u64 {
        self.rule_set.concurrency.overflows_total()
    }

    /// Runs a query.
    ///
    /// # Errors
    ///
    /// An unknown rule, a key that does not fit its rule, a rule that is named twice with one key, or a store that cannot be
    /// reached. Nothing is consumed then. A reset of several rules may have removed the counters of the first ones.
    pub async fn decide(
        &self,
        query: &DecisionQuery,
        counters: CounterAccess<'_>,
    ) -> Result<DecisionOutcome, DecisionError> {
        let rules = query.rules.iter().map(|rule| self.keyed_rule(rule, counters.shared.is_some()));
        let rules: Vec<KeyedRule> = rules.collect::<Result<_, DecisionError>>()?;
        let identity = |rule: &KeyedRule| Some((rule.rule, rule.keyed_request?.key));
        for (i, rule) in rules.iter().enumerate() {
            if identity(rule).is_some() && rules[..i].iter().any(|other| identity(other) == identity(rule)) {
                let name = &self.rule_set.rules[rule.rule].rule.name;
                return Err(DecisionError::Malformed(format!("rule `{name}` is named twice with the same key")));
            }
        }
        match query.operation {
            Operation::Limit => self.acquire(&rules, query, &counters).await,
            // The check acquires the tokens, which may reserve them in a later window, and refunds them.
            Operation::Check if query.reserve => {
                let acquired = self.acquire(&rules, query, &counters).await?;
                match acquired.allowed {
                    true => {
                        Ok(DecisionOutcome { windows: self.read(&rules, query, &counters).await?.windows, ..acquired })
                    }
                    false => Ok(acquired),
                }
            }
            Operation::Check | Operation::Value | Operation::Reset => self.read(&rules, query, &counters).await,
        }
    }

    /// Decides all rules together and charges them. A check is refunded.
    async fn acquire(
        &self,
        rules: &[KeyedRule],
        query: &DecisionQuery,
        counters: &CounterAccess<'_>,
    ) -> Result<DecisionOutcome, DecisionError> {
        let is_check = query.operation == Operation::Check;
        let charge_plan = self.rule_set.query_plan(&rules.iter().map(|rule| rule.rule).collect::<Vec<_>>(), !is_check);
        let keyed_requests = || rules.iter().map(|rule| rule.keyed_request);
        let (decision, context) = match counters.shared.filter(|_| rules.iter().any(|rule| rule.key_text.is_some())) {
            Some(shared) => {
                let query = KeyQuery {
                    rule_set: &self.rule_set,
                    charge_plan: &charge_plan,
                    keyed_requests: keyed_requests().collect(),
                    reserve: query.reserve,
                    key_texts: rules.iter().map(|rule| rule.key_text.clone()).collect(),
                };
                let decided = if is_check { shared.check(&query).await } else { shared.limit(&query).await };
                decided.map_err(|Unavailable| DecisionError::StoreUnavailable)?
            }
            None => {
                let mut context = DecisionContext::default();
                context.inputs.keyed_requests.extend(keyed_requests());
                context.inputs.reserve = query.reserve;
                let now = DecisionTime::read(counters.clock);
                let decision = self.rule_set.decide(&charge_plan, counters.table, now, &mut context);
                if is_check && !matches!(decision, Decision::Refused) {
                    let receipts: Vec<_> = context.all_receipts().collect();
                    self.rule_set.refund(&receipts, u32::MAX, counters.table, context.result.decided_ms);
                }
                (decision, context)
            }
        };
        let now_ms = (counters.clock)();
        let (allowed, retry_at_ms) = match decision {
            Decision::Admitted => (true, Some(now_ms)),
            Decision::Delayed { until_ms, .. } => (true, Some(until_ms)),
            Decision::Refused => (false, self.rule_set.retry_at_ms(&charge_plan, &context, now_ms)),
        };
        let windows = self.windows(&charge_plan, &context);
        let is_exempt = keyed_requests().all(|keyed_request| keyed_request.is_none());
        Ok(DecisionOutcome { allowed, now_ms, retry_at_ms, windows, is_exempt, concurrent: Vec::new() })
    }

    /// Reads the usage of each rule; removes it before, if the query is a reset.
    async fn read(
        &self,
        rules: &[KeyedRule],
        query: &DecisionQuery,
        counters: &CounterAccess<'_>,
    ) -> Result<DecisionOutcome, DecisionError> {
        let now_ms = (counters.clock)();
        let mut outcome = DecisionOutcome {
            allowed: true,
            now_ms,
            retry_at_ms: Some(now_ms),
            windows: Vec::new(),
            is_exempt: rules.iter().all(|rule| rule.keyed_request.is_none()),
            concurrent: Vec::new(),
        };
        for rule in rules {
            let Some(keyed_request) = rule.keyed_request else { continue };
            let charge_plan = self.rule_set.query_plan(&[rule.rule], false);
            let KeyState { mut context, admits } = match (counters.shared, &rule.key_text) {
                (Some(shared), Some(key_text)) => {
                    let key_query = KeyQuery {
                        rule_set: &self.rule_set,
                        charge_plan: &charge_plan,
                        keyed_requests: vec![Some(keyed_request)],
                        reserve: query.reserve,
                        key_texts: vec![Some(Rc::clone(key_text))],
                    };
                    let state = match query.operation {
                        Operation::Reset => shared.reset(&key_query).await,
                        Operation::Limit | Operation::Check | Operation::Value => shared.value(&key_query).await,
                    };
                    state.map_err(|Unavailable| DecisionError::StoreUnavailable)?
                }
                _ => {
                    let mut context = DecisionContext::default();
                    context.inputs.keyed_requests.push(Some(keyed_request));
                    let mut peek = || {
                        let now = DecisionTime::read(counters.clock);
                        self.rule_set.peek(&charge_plan, counters.table, now, &mut context)
                    };
                    let mut admits = peek();
                    if query.operation == Operation::Reset {
                        self.rule_set.reset(counters.table, context.result.decided_ms, &context);
                        let now = DecisionTime::read(counters.clock);
                        admits = self.rule_set.peek(&charge_plan, counters.table, now, &mut context);
                    }
                    KeyState { context, admits }
                }
            };
            outcome.allowed &= admits;
            outcome.now_ms = outcome.now_ms.max((counters.clock)());
            let retry_at_ms = match query.operation {
                Operation::Reset => Some(outcome.now_ms),
                _ => self.rule_set.retry_at_ms(&charge_plan, &context, outcome.now_ms),
            };
            outcome.retry_at_ms = outcome.retry_at_ms.zip(retry_at_ms).map(|(one, other)| one.max(other));
            outcome.windows.extend(self.windows(&charge_plan, &context));
            if query.operation == Operation::Value {
                self.rule_set.peek_slots(&charge_plan, &mut context);
                outcome.concurrent.extend(context.result.concurrency.iter().filter_map(|usage| {
                    let compiled_rule = &self.rule_set.rules[rule.rule];
                    let name = compiled_rule.concurrent_name()?.to_owned();
                    Some(ConcurrencyState { rule: compiled_rule.rule.name.clone(), name, usage: *usage })
                }));
            }
        }
        Ok(outcome)
    }

    /// The windows of a decision, by rule of the charge plan.
    fn windows(&self, charge_plan: &ChargePlan, context: &DecisionContext) -> Vec<WindowState> {
        // Charges have another order.
        let mut layers: Vec<_> = context.result.charges.iter().zip(&context.result.layers).collect();
        layers.sort_by_key(|(_, layer_ref)| (layer_ref.rule, layer_ref.layer));
        let window = |(charge, layer_ref): (&Charge, &LayerRef)| {
            let compiled_rule = &self.rule_set.rules[charge_plan.rules[layer_ref.rule]];
            let capacity = u64::from(compiled_rule.layer(layer_ref.layer).capacity);
            WindowState {
                rule: compiled_rule.rule.name.clone(),
                name: compiled_rule.layer_name(layer_ref.layer).to_owned(),
                used: charge.usage.used,
                limit: charge.request.limit,
                remaining: capacity.saturating_sub(charge.usage.used),
                end_ms: charge.usage.end_ms,
            }
        };
        // A penalty is reported while it lasts.
        let is_shown = |(charge, layer_ref): &(&Charge, &LayerRef)| {
            !self.rule_set.layer_of(charge_plan, **layer_ref).is_penalty() || charge.usage.used > 0
        };
        layers.into_iter().filter(is_shown).map(window).collect()
    }

    /// Finds the rule of a query, and the key to charge.
    fn keyed_rule(&self, query: &RuleQuery, uses_store: bool) -> Result<KeyedRule, DecisionError> {
        let rule = self.rule_set.rules.iter().position(|compiled_rule| compiled_rule.rule.name == query.rule);
        let rule = rule.ok_or_else(|| DecisionError::UnknownRule(query.rule.chars().take(64).collect()))?;
        let keyed_request = self.keyed_request(rule, query)?;
        let is_shared = uses_store && self.rule_set.rules[rule].rule.sharing != Sharing::Local;
        let key_text = self.digester.as_ref().filter(|_| is_shared).and_then(|digester| {
            let mut text = String::new();
            self.write_store_key(rule, &query.key, digester, &mut text).then(|| text.into())
        });
        Ok(KeyedRule { rule, keyed_request, key_text })
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
    fn keyed_request(&self, rule: usize, query: &RuleQuery) -> Result<Option<KeyedRequest>, DecisionError> {
        let (served, rule) = (&self.rules[rule], &self.rule_set.rules[rule].rule);
        // A global rule takes no key, and ignores a given one.
        let parts: &[KeyPart] = if rule.key == [KeyPart::Global] { &[] } else { &rule.key };
        if parts.len() != query.key.len() && !parts.is_empty() {
            let names: Vec<String> = parts.iter().map(KeyPart::to_string).collect();
            return Err(DecisionError::Malformed(format!("the key of this rule consists of `{}`", names.join("`, `"))));
        }
        let hash = |start: &KeyHasher, digests: bool| -> Result<KeyHash, DecisionError> {
            let mut hasher = start.clone();
            let given = if parts.is_empty() { &[][..] } else { &query.key };
            for (part, value) in rule.key.iter().zip(given.iter().chain(std::iter::repeat(&String::new()))) {
                feed_text(&mut hasher, part, value, digests).ok_or_else(|| {
                    DecisionError::Malformed(String::from("the key is not an IP address, and the rule counts by `ip`"))
                })?;
            }
            Ok(hasher.finish())
        };
        let key = hash(&served.hashers.counter, false)?;
        let offset = match &served.hashers.window_offset {
            Some(start) => hash(start, false)?.bucket_hash,
            None => 0,
        };
        let is_ip = |(part, _): &(&KeyPart, &String)| matches!(part, KeyPart::Ip { .. });
        let address = parts.iter().zip(&query.key).find(is_ip).and_then(|(_, value)| value.parse().ok());
        if let (Some(overrides), Some(address)) = (&served.overrides, address)
            && overrides.exempts(address)
        {
            return Ok(None);
        }
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
        Ok(Some(KeyedRequest { key, offset, variant, cost: query.cost.unwrap_or(rule.cost.default_cost()) }))
    }
}
