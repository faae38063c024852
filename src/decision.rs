//! The decision service: decides for callers outside of the gateway, by rules and keys that they name, on the counters that
//! requests use. Limits of concurrent requests do not apply, because a decision has no end. This module knows no encoding:
//! `admin::decision_json` reads and writes JSON, `ratelimit_service` the messages of Envoy.

use std::rc::Rc;
use std::sync::Arc;

use crate::notify::MarkReader;
use serde_json::{Value, json};
use transom_config::access::{DenyEntry, EntryId};
use transom_config::key_kind::CLIENT;
use transom_http::error::ApiError;
use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::concurrency::ConcurrencyUsage;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionInputs;
use transom_limiter::handles::{Handle, IdVec, PlanPosition, RuleId};
use transom_limiter::key::{KeyPart, Seed};
use transom_limiter::rule_set::{KeyedRequest, NotCounted, RuleSet};
use transom_limiter::verdict::{Outcome, Verdicts, WindowVerdict};
use transom_limiter::window_kind::WindowKind;
use transom_rules::access::AccessControl;
use transom_rules::client_plans::{ClientPlans, KnownClient};
use transom_rules::compiled_config::CompiledConfig;
use transom_rules::live_clients::LiveClients;
use transom_rules::resolved_query::{KeyedRule, QueriedRules, ResolvedQuery, RuleKeyValues};
use transom_rules::store_key_text::KeyDigester;
use transom_rules::top_keys::{KeyName, ListedKey, TopKeys};
use transom_runtime::metrics::events::DecisionMetrics;
use transom_store::counter_access::CounterAccess;
use transom_store::decision_queries::{KeyQuery, KeyState, UsageSource};
use transom_store::shared_decision::Unavailable;

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
    pub key: QueryKey,
    /// `None`: the default cost of the rule.
    pub cost: Option<u32>,
}

/// The key of a query.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum QueryKey {
    /// The values of the key's parts, in order. A rule with the key `global` needs none.
    Values(Vec<String>),
    /// The client of this name, and the values of the other parts. [`DecisionService::name_clients`] replaces it.
    OfClient(String, Vec<String>),
    /// One of the busiest keys of the only rule; not for [`Operation::Limit`].
    Listed(Arc<ListedKey>),
}

impl QueryKey {
    fn values(&self) -> &[String] {
        match self {
            QueryKey::Values(values) => values,
            QueryKey::OfClient(..) | QueryKey::Listed(_) => &[],
        }
    }
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
    /// Whether the usage of a shared rule is that of this gateway alone, because the store cannot be asked; only after
    /// [`Operation::Value`].
    pub is_store_unreachable: bool,
    /// Whether all rules exempt the key.
    pub is_exempt: bool,
    /// Whether a rule refuses its key, because the key names no client. Nothing makes the query succeed then.
    pub has_unknown_key: bool,
    /// The id of the deny entry that denies the caller.
    pub denied_by: Option<EntryId>,
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
    pub capacity: u32,
    pub remaining: u64,
    /// Unix milliseconds.
    pub end_ms: u64,
    pub kind: WindowKind,
    /// Whether the window has too few tokens left for the query.
    pub is_full: bool,
}

impl WindowState {
    /// The windows of all rules, in the order of the configuration.
    pub fn of(verdicts: Verdicts<'_>) -> Vec<WindowState> {
        // A penalty is reported while it lasts.
        let is_shown = |window: &WindowVerdict<'_>| !window.is_penalty() || window.usage().used > 0;
        let mut windows: Vec<WindowVerdict<'_>> = verdicts.windows().filter(is_shown).collect();
        windows.sort_by_key(|window| window.layer());
        let state = |window: WindowVerdict<'_>| WindowState {
            rule: window.rule().rule.name.clone(),
            name: window.name().to_owned(),
            used: window.usage().used,
            limit: window.limit(),
            capacity: window.capacity(),
            remaining: u64::from(window.capacity()).saturating_sub(window.usage().used),
            end_ms: window.usage().end_ms,
            kind: window.kind(),
            is_full: window.is_full(),
        };
        windows.into_iter().map(state).collect()
    }
}

/// What counts the decisions on queries.
#[derive(Clone, Copy)]
pub struct DecisionOutputs<'a> {
    pub metrics: &'a DecisionMetrics,
    pub top_keys: &'a TopKeys,
    /// With `[notify]`.
    pub marks: Option<&'a MarkReader>,
    /// Digests secret parts of the keys that `top_keys` names.
    pub readable_digester: &'a KeyDigester,
}

/// A decision to be counted.
#[derive(Clone, Copy)]
pub struct CountedDecision<'a> {
    /// The rules of the configuration.
    pub configured: &'a ChargePlan,
    /// Of the rules that decided, at the same positions: some may have had other windows than configured.
    pub verdicts: Verdicts<'a>,
    /// Whether the rule at a position was decided by its own windows.
    pub has_own_windows: &'a dyn Fn(PlanPosition) -> bool,
}

/// All rules, as queries use them.
#[derive(Debug)]
pub struct DecisionService {
    rule_set: Arc<RuleSet>,
    rules: QueriedRules,
    clients: Option<Arc<LiveClients>>,
    access: Option<Arc<AccessControl>>,
}

impl DecisionService {
    pub fn new(compiled: &CompiledConfig, seed: Seed) -> DecisionService {
        let CompiledConfig { rule_set, overrides, digester, clients, client_checks, access, .. } = compiled;
        let known = clients.as_ref().map(|clients| clients.current());
        let rules = QueriedRules::new(rule_set, overrides, seed, digester.clone());
        DecisionService {
            rules: rules.with_clients(known.as_deref(), client_checks.clone()),
            rule_set: Arc::clone(rule_set),
            clients: clients.clone(),
            access: access.clone(),
        }
    }

    /// The rules as in [`limit_names`](transom_limiter::rule_set::CompiledRule::limit_names), for [`DecisionMetrics`].
    pub fn limit_names(&self) -> Vec<(&str, Vec<&str>)> {
        self.rule_set.rules.iter().map(|rule| (rule.rule.name.as_str(), rule.limit_names().collect())).collect()
    }

    /// Runs a query. As for requests, a key that names no client does not hinder the other rules: they decide and charge, so
    /// that guesses are limited.
    ///
    /// # Errors
    ///
    /// An unknown rule, a key that does not fit its rule, a rule that is named twice with one key, or a store that cannot be
    /// reached. Nothing is consumed then. A reset of several rules may have removed the counters of the first ones.
    pub async fn decide(
        &self,
        query: &DecisionQuery,
        counters: &CounterAccess,
        outputs: DecisionOutputs<'_>,
    ) -> Result<DecisionOutcome, ApiError> {
        let decides = matches!(query.operation, Operation::Limit | Operation::Check);
        let (clients, values) = (self.clients(), self.key_values(&query.rules)?);
        let resolved = self.rules.resolve(&values, clients.as_deref());
        let rules: IdVec<PlanPosition, KeyedRule> = match query.rules.as_slice() {
            [RuleQuery { rule, key: QueryKey::Listed(listed), cost }] => {
                IdVec::from(vec![self.listed_rule(self.rule(rule)?, listed, *cost)])
            }
            _ => resolved.keyed_rules(decides).collect::<Result<_, _>>()?,
        };
        for (i, rule) in rules.iter().enumerate() {
            let identity = rule.identity();
            if identity.is_some() && rules.iter().take(i).any(|other| other.identity() == identity) {
                let name = &self.rule_set.rules[rule.rule].rule.name;
                return Err(ApiError::Malformed(format!("rule `{name}` is named twice with the same key")));
            }
        }
        if decides && let Some(entry) = self.denied(&resolved, counters.clock.now().unix_ms) {
            let outcome = self.read(&rules, query, counters).await?;
            let (id, retry_at_ms) = (entry.id, entry.until_ms);
            return Ok(DecisionOutcome { allowed: false, retry_at_ms, denied_by: Some(id), ..outcome });
        }
        let outcome = self.run(&rules, query, counters, outputs).await?;
        Ok(match rules.iter().any(KeyedRule::is_refused) {
            true => DecisionOutcome {
                allowed: false,
                retry_at_ms: None,
                is_exempt: false,
                has_unknown_key: true,
                ..outcome
            },
            false => outcome,
        })
    }

    /// The rules, as queries use them.
    pub fn rules(&self) -> &QueriedRules {
        &self.rules
    }

    /// The entry that denies the caller of a query.
    pub fn denied<K: AsRef<str>>(&self, query: &ResolvedQuery<'_, K>, now_ms: u64) -> Option<DenyEntry> {
        query.denied(&self.access.as_ref()?.deny_list(), now_ms)
    }

    /// Runs a query on the rules that count its keys.
    async fn run(
        &self,
        rules: &IdVec<PlanPosition, KeyedRule>,
        query: &DecisionQuery,
        counters: &CounterAccess,
        outputs: DecisionOutputs<'_>,
    ) -> Result<DecisionOutcome, ApiError> {
        match query.operation {
            Operation::Limit => self.acquire(rules, query, counters, outputs).await,
            // The check acquires the tokens, which may reserve them in a later window, and refunds them.
            Operation::Check if query.reserve => {
                let acquired = self.acquire(rules, query, counters, outputs).await?;
                match acquired.allowed {
                    true => {
                        Ok(DecisionOutcome { windows: self.read(rules, query, counters).await?.windows, ..acquired })
                    }
                    false => Ok(acquired),
                }
            }
            Operation::Check | Operation::Value | Operation::Reset => self.read(rules, query, counters).await,
        }
    }

    /// Decides all rules together and charges them. A check is refunded.
    async fn acquire(
        &self,
        rules: &IdVec<PlanPosition, KeyedRule>,
        query: &DecisionQuery,
        counters: &CounterAccess,
        outputs: DecisionOutputs<'_>,
    ) -> Result<DecisionOutcome, ApiError> {
        let is_check = query.operation == Operation::Check;
        let charge_plan = self.rule_set.query_plan(rules.iter().map(|rule| rule.rule), !is_check);
        let inputs = rules.iter().map(|rule| rule.found).collect();
        let key_query = KeyQuery {
            charge_plan: &charge_plan,
            inputs: DecisionInputs { reserve: query.reserve, ..inputs },
            store_keys: rules.map(|rule| rule.store_key.clone()),
        };
        let decided = counters.decide_query(&key_query, is_check).await;
        let (decision, context) = decided.map_err(|Unavailable| ApiError::StoreUnavailable)?;
        let now_ms = counters.clock.now().unix_ms;
        let (allowed, retry_at_ms) = match &decision {
            Decision::Admitted => (true, Some(now_ms)),
            Decision::Delayed { until_ms, .. } => (true, Some(*until_ms)),
            Decision::Refused => (false, charge_plan.retry_at_ms(&context, now_ms)),
        };
        let verdicts = charge_plan.verdicts(&context, &decision);
        if !is_check {
            let key = |position: PlanPosition| query.rules[position.index()].key.values();
            let has_own_windows = |_rule: PlanPosition| true;
            let counted = CountedDecision { configured: &charge_plan, verdicts, has_own_windows: &has_own_windows };
            self.count(&counted, |position| &rules[position], key, outputs);
        }
        let is_exempt = rules.iter().all(|rule| rule.found.is_err());
        Ok(DecisionOutcome {
            allowed,
            now_ms,
            retry_at_ms,
            windows: WindowState::of(verdicts),
            is_store_unreachable: false,
            is_exempt,
            has_unknown_key: false,
            denied_by: None,
            concurrent: Vec::new(),
        })
    }

    /// Reads the usage of each rule; removes it before, if the query is a reset.
    async fn read(
        &self,
        rules: &IdVec<PlanPosition, KeyedRule>,
        query: &DecisionQuery,
        counters: &CounterAccess,
    ) -> Result<DecisionOutcome, ApiError> {
        let now_ms = counters.clock.now().unix_ms;
        let mut outcome = DecisionOutcome {
            allowed: true,
            now_ms,
            retry_at_ms: Some(now_ms),
            windows: Vec::new(),
            is_store_unreachable: false,
            is_exempt: rules.iter().all(|rule| rule.found.is_err()),
            has_unknown_key: false,
            denied_by: None,
            concurrent: Vec::new(),
        };
        for rule in rules {
            if rule.found.is_err() {
                continue;
            }
            let charge_plan = self.rule_set.query_plan([rule.rule], false);
            let key_query = KeyQuery {
                charge_plan: &charge_plan,
                inputs: DecisionInputs { reserve: query.reserve, ..[rule.found].into_iter().collect() },
                store_keys: IdVec::from([rule.store_key.clone()]),
            };
            let state = match query.operation {
                Operation::Reset => counters.reset(&key_query).await,
                Operation::Limit | Operation::Check | Operation::Value => counters.value(&key_query).await,
            };
            let KeyState { mut context, admits, source, .. } =
                state.map_err(|Unavailable| ApiError::StoreUnavailable)?;
            outcome.allowed &= admits;
            outcome.is_store_unreachable |= source == UsageSource::StoreAway && query.operation == Operation::Value;
            outcome.now_ms = outcome.now_ms.max(counters.clock.now().unix_ms);
            let retry_at_ms = match query.operation {
                Operation::Reset => Some(outcome.now_ms),
                _ => charge_plan.retry_at_ms(&context, outcome.now_ms),
            };
            outcome.retry_at_ms = outcome.retry_at_ms.zip(retry_at_ms).map(|(one, other)| one.max(other));
            let decision = charge_plan.decide_peeked(admits, outcome.now_ms, &mut context);
            let verdicts = charge_plan.verdicts(&context, &decision);
            outcome.windows.extend(WindowState::of(verdicts));
            if query.operation == Operation::Value {
                outcome.concurrent.extend(verdicts.slots().iter().filter_map(|usage| {
                    let compiled_rule = &self.rule_set.rules[rule.rule];
                    let name = compiled_rule.concurrent_name()?.to_owned();
                    Some(ConcurrencyState { rule: compiled_rule.rule.name.clone(), name, usage: *usage })
                }));
            }
        }
        Ok(outcome)
    }

    /// Counts a decision for each rule, as the decision on a request of a route. `rule` returns the rule at a position, with its
    /// key, and `key` the values of that key.
    pub fn count<'k, K: AsRef<str> + 'k>(
        &self,
        counted: &CountedDecision<'_>,
        rule: impl Fn(PlanPosition) -> &'k KeyedRule,
        key: impl Fn(PlanPosition) -> &'k [K],
        outputs: DecisionOutputs<'_>,
    ) {
        let CountedDecision { configured, verdicts, has_own_windows } = *counted;
        let DecisionOutputs { metrics, top_keys, marks, readable_digester } = outputs;
        let is_enforced = |position: PlanPosition| !configured.shadow_rules().contains(&position);

        for (verdict, rule) in verdicts.rules().map(|verdict| (verdict, rule(verdict.position))) {
            match verdict.outcome() {
                Outcome::NotCounted(NotCounted::Exempt) => metrics.exempt(rule.rule),
                Outcome::NotCounted(NotCounted::Skipped) => {}
                Outcome::NotCounted(NotCounted::UnknownKey | NotCounted::Failed) => {
                    match is_enforced(verdict.position) {
                        true => metrics.refused(rule.rule),
                        false => metrics.shadowed(rule.rule),
                    }
                }
                Outcome::Shadowed => metrics.shadowed(rule.rule),
                Outcome::Refused => metrics.refused(rule.rule),
                Outcome::RefusedElsewhere => {}
                Outcome::Delayed | Outcome::Waited => metrics.delayed(rule.rule),
                Outcome::Admitted => metrics.admitted(rule.rule),
            }
        }
        let describe = |position| {
            let clients = self.clients();
            self.rules.describe_key(rule(position).rule, key(position), clients.as_deref(), readable_digester)
        };
        let name = |position| KeyName {
            description: describe(position),
            store_key: rule(position).store_key.clone(),
            has_own_windows: has_own_windows(position),
        };
        if top_keys.count_decision(configured.rules(), verdicts) {
            top_keys.name_keys(configured.rules(), verdicts.keyed_requests(), name);
        }
        if let Some(marks) = marks {
            marks.read(configured.rules(), verdicts, |position| Some(name(position)));
        }
        let is_counted = |position| is_enforced(position) && has_own_windows(position);
        let full = verdicts.full_windows().map(|window| (window.layer().position, window.counted_name()));
        let counted = full.filter(|(position, _)| is_counted(*position));
        counted.for_each(|(position, name)| metrics.refused_by(rule(position).rule, name));
    }

    /// Finds the rules of a query.
    fn key_values<'q>(&self, queries: &'q [RuleQuery]) -> Result<Vec<RuleKeyValues<'q, String>>, ApiError> {
        let values = queries.iter().map(|query| {
            self.rule(&query.rule).map(|rule| RuleKeyValues { rule, key: query.key.values(), cost: query.cost })
        });
        values.collect()
    }

    /// Replaces clients by the keys that name them.
    ///
    /// # Errors
    ///
    /// An unknown rule or client, or a rule that does not count by client.
    pub fn name_clients(&self, query: &mut DecisionQuery) -> Result<(), ApiError> {
        for RuleQuery { rule, key, .. } in &mut query.rules {
            let QueryKey::OfClient(client, others) = key else { continue };
            let parts = &self.rule_set.rules[self.rule(rule)?].rule.key;
            let Some(position) = parts.iter().position(|part| CLIENT.has(part)) else {
                let reason = "the key of this rule has no part `client`: give the `key` instead of the `client`";
                return Err(ApiError::Malformed(reason.to_owned()));
            };
            self.client_named(client)?;
            if others.len() + 1 != parts.len() {
                let names = parts.iter().filter(|part| !CLIENT.has(part)).map(KeyPart::to_string).collect::<Vec<_>>();
                let reason = match names.is_empty() {
                    true => String::from("the key of this rule is the client alone: remove `key`"),
                    false => format!("beside the client, the key of this rule consists of `{}`", names.join("`, `")),
                };
                return Err(ApiError::Malformed(reason));
            }
            let mut values = std::mem::take(others);
            values.insert(position, std::mem::take(client));
            *key = QueryKey::Values(values);
        }
        Ok(())
    }

    /// All clients. Takes a lock.
    pub fn clients(&self) -> Option<Arc<ClientPlans>> {
        self.clients.as_ref().map(|clients| clients.current())
    }

    /// The client with this name.
    pub fn client_named(&self, name: &str) -> Result<Arc<KnownClient>, ApiError> {
        let client = self.clients().and_then(|clients| clients.named(name).cloned());
        client.ok_or_else(|| ApiError::UnknownClient(name.chars().take(64).collect()))
    }

    /// The rule with this name.
    pub fn rule(&self, name: &str) -> Result<RuleId, ApiError> {
        let rule = self.rule_set.rules.position(|compiled| compiled.rule.name == name);
        rule.ok_or_else(|| ApiError::UnknownRule(name.chars().take(64).collect()))
    }

    /// A rule with one of its busiest keys.
    fn listed_rule(&self, rule: RuleId, listed: &ListedKey, cost: Option<u32>) -> KeyedRule {
        let cost = cost.unwrap_or(self.rule_set.rules[rule].rule.cost.default_cost());
        KeyedRule {
            rule,
            found: listed.keyed_request.map(|request| KeyedRequest { cost, ..request }).ok_or(NotCounted::Skipped),
            store_key: listed.store_key.as_deref().map(Rc::from),
        }
    }

    /// The rules of a query, each with its key in JSON; secrets as digests.
    pub fn describe_keys(&self, query: &DecisionQuery, digester: &KeyDigester) -> Result<Value, ApiError> {
        let describe = |RuleQuery { rule, key, .. }: &RuleQuery| {
            let parts = match key {
                QueryKey::Listed(listed) => listed.description.parts_json(),
                key => {
                    let (rule, clients) = (self.rule(rule)?, self.clients());
                    self.rules.describe_key(rule, key.values(), clients.as_deref(), digester).parts_json()
                }
            };
            Ok(json!({ "rule": rule, "key": parts }))
        };
        query.rules.iter().map(describe).collect()
    }
}
