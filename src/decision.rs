//! The decision service: decides for callers outside of the gateway, by rules and keys that they name, on the counters that
//! requests use. Limits of concurrent requests do not apply, because a decision has no end. This module knows no encoding:
//! `admin::decision_json` reads and writes JSON, `ratelimit_service` the messages of Envoy.

use std::rc::Rc;
use std::sync::Arc;

use crate::notify::MarkReader;
use serde_json::{Value, json};
use smallvec::SmallVec;
use transom_config::access::{DenyEntry, EntryId};
use transom_config::key_kind::{CLIENT, ENTRY};
use transom_http::error::ApiError;
use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::concurrency::ConcurrencyUsage;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionInputs;
use transom_limiter::handles::{Handle, IdVec, PlanPosition, RuleId, VariantId};
use transom_limiter::key::{KeyHash, KeyHasher, KeyPart, OnMissing, Seed};
use transom_limiter::rule_set::{CompiledRule, KeyedRequest, NotCounted, RuleSet};
use transom_limiter::verdict::{Outcome, Verdicts, WindowVerdict};
use transom_limiter::window_kind::WindowKind;
use transom_rules::PartPosition;
use transom_rules::access::{AccessControl, Scope};
use transom_rules::client_plans::{CallerIdentity, ClientCheck, ClientPart, ClientPlans, KnownClient};
use transom_rules::key_source::{feed_address, is_usable_key};
use transom_rules::live_clients::LiveClients;
use transom_rules::overrides::{Overrides, RuleTreatment, feed_text};
use transom_rules::rate_limit_key::{KeyDescription, KeyHashers};
use transom_rules::store_key_text::{KeyDigester, KeyTextFormat};
use transom_rules::top_keys::{KeyName, ListedKey, TopKeys};
use transom_runtime::metrics::events::DecisionMetrics;
use transom_store::counter_access::CounterAccess;
use transom_store::decision_queries::{KeyQuery, KeyState, UsageSource};
use transom_store::shared_decision::Unavailable;

/// The key of a descriptor's entry in which Envoy sends the address of the client.
const REMOTE_ADDRESS: &str = "remote_address";

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
    pub lacks_store: bool,
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
    /// Digests secret key parts for the shared store; `None` without one.
    digester: Option<Arc<KeyDigester>>,
    rules: IdVec<RuleId, ServedRule>,
    clients: Option<Arc<LiveClients>>,
    access: Option<Arc<AccessControl>>,
}

#[derive(Debug)]
struct ServedRule {
    hashers: KeyHashers,
    text_format: KeyTextFormat,
    overrides: Option<Arc<Overrides>>,
    /// The parts of the key that name clients.
    client_parts: Vec<ClientPart>,
    /// Set if keys that name no client are not counted.
    client_check: Option<ClientCheck>,
}

/// A rule of a query with its key.
pub struct KeyedRule {
    pub rule: RuleId,
    pub found: Result<KeyedRequest, NotCounted>,
    /// The key in the shared store; `None` if the rule is not shared.
    pub store_key: Option<Rc<str>>,
}

impl KeyedRule {
    /// What distinguishes the counters of a rule's keys; `None` if the key is not counted.
    pub fn identity(&self) -> Option<(RuleId, KeyHash)> {
        Some((self.rule, self.found.ok()?.key))
    }

    /// Whether the rule refuses the key.
    pub fn is_refused(&self) -> bool {
        self.found.is_err_and(NotCounted::refuses)
    }
}

/// The key of one rule: the values of its parts, and the cost, or `None` for the default cost of the rule.
pub struct RuleKeyValues<'a, K> {
    pub rule: RuleId,
    pub key: &'a [K],
    pub cost: Option<u32>,
}

impl DecisionService {
    pub fn new(
        rule_set: &Arc<RuleSet>,
        overrides: &IdVec<RuleId, Option<Arc<Overrides>>>,
        seed: Seed,
        digester: Option<Arc<KeyDigester>>,
    ) -> DecisionService {
        let served = |(rule, compiled): (&CompiledRule, &Option<Arc<Overrides>>)| ServedRule {
            hashers: KeyHashers::new(rule, seed, None),
            text_format: KeyTextFormat::new(&rule.rule, &rule.rule.key, false),
            overrides: compiled.clone(),
            client_parts: Vec::new(),
            client_check: None,
        };
        let rules = rule_set.rules.iter().zip(overrides).map(served).collect();
        DecisionService { rules, rule_set: Arc::clone(rule_set), digester, clients: None, access: None }
    }

    /// Finds the clients that keys name, and checks that keys name one.
    pub fn with_clients(
        mut self,
        clients: Option<&Arc<LiveClients>>,
        checks: IdVec<RuleId, Option<ClientCheck>>,
    ) -> DecisionService {
        self.clients = clients.cloned();
        let clients = self.clients();
        for ((served, compiled), check) in self.rules.iter_mut().zip(&self.rule_set.rules).zip(checks) {
            served.client_parts =
                clients.as_ref().map(|clients| clients.client_parts(&compiled.rule.key)).unwrap_or_default();
            served.client_check = check;
        }
        self
    }

    /// Denies callers.
    pub fn with_access(self, access: Option<&Arc<AccessControl>>) -> DecisionService {
        DecisionService { access: access.cloned(), ..self }
    }

    /// The rules as in [`CompiledRule::limit_names`], for [`DecisionMetrics`].
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
        let rules = self.keyed_rules(&query.rules, decides)?;
        for (i, rule) in rules.iter().enumerate() {
            let identity = rule.identity();
            if identity.is_some() && rules.iter().take(i).any(|other| other.identity() == identity) {
                let name = &self.rule_set.rules[rule.rule].rule.name;
                return Err(ApiError::Malformed(format!("rule `{name}` is named twice with the same key")));
            }
        }
        if matches!(query.operation, Operation::Limit | Operation::Check)
            && let Some(entry) = self.denied_query(&query.rules, counters.clock.now().unix_ms)
        {
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

    /// The entry that denies the caller of a query, as far as its keys tell.
    fn denied_query(&self, queries: &[RuleQuery], now_ms: u64) -> Option<DenyEntry> {
        self.access.as_ref()?;
        let rules = queries.iter().filter_map(|query| {
            let rule = self.rule(&query.rule).ok()?;
            Some(RuleKeyValues { rule, key: query.key.values(), cost: None })
        });
        self.denied(&rules.collect::<Vec<_>>(), self.clients().as_deref(), now_ms)
    }

    /// The entry that denies a caller, as far as keys of rules tell: the address, the client or the value of a part. There is
    /// no route, so entries for some routes do not apply.
    pub fn denied<K: AsRef<str>>(
        &self,
        rules: &[RuleKeyValues<'_, K>],
        clients: Option<&ClientPlans>,
        now_ms: u64,
    ) -> Option<DenyEntry> {
        let deny = self.access.as_ref()?.deny_list();
        let scope = Scope { route: None, now_ms };
        let found = rules.iter().find_map(|values| {
            let parts = self.rule_set.rules[values.rule].rule.key.iter().zip(values.key);
            let of_part = |(part, value): (&KeyPart, &K)| {
                let value = value.as_ref();
                let is_address = part.prefixes().is_some() || (ENTRY.has(part) && part.name() == Some(REMOTE_ADDRESS));
                let address = if is_address { value.parse().ok() } else { None };
                address
                    .and_then(|address| deny.of_address(address, scope))
                    .or_else(|| deny.of_value(part, value.as_bytes(), scope))
            };
            let client = || clients?.client_of(&self.caller(values, clients));
            parts.into_iter().find_map(of_part).or_else(|| deny.of_client(&client()?.name, scope))
        });
        found.cloned()
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
            lacks_store: false,
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
            lacks_store: false,
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
            outcome.lacks_store |= source == UsageSource::StoreAway && query.operation == Operation::Value;
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

        for (verdict, rule) in verdicts.rules().map(|verdict| (verdict, rule(verdict.position))) {
            match verdict.outcome() {
                Outcome::NotCounted(NotCounted::Exempt) => metrics.exempt(rule.rule),
                Outcome::NotCounted(NotCounted::Skipped) => {}
                Outcome::NotCounted(NotCounted::UnknownKey | NotCounted::Failed) => metrics.refused(rule.rule),
                Outcome::Shadowed => metrics.shadowed(rule.rule),
                Outcome::Refused => metrics.refused(rule.rule),
                Outcome::RefusedElsewhere => {}
                Outcome::Delayed | Outcome::Waited => metrics.delayed(rule.rule),
                Outcome::Admitted => metrics.admitted(rule.rule),
            }
        }
        let name = |position| KeyName {
            description: self.describe_key(rule(position).rule, key(position), readable_digester),
            store_key: rule(position).store_key.clone(),
            has_own_windows: has_own_windows(position),
        };
        if top_keys.count_decision(configured.rules(), verdicts) {
            top_keys.name_keys(configured.rules(), verdicts.keyed_requests(), name);
        }
        if let Some(marks) = marks {
            marks.read(configured.rules(), verdicts, |position| Some(name(position)));
        }
        let is_enforced = |position| !configured.shadow_rules().contains(&position);
        let is_counted = |position| is_enforced(position) && has_own_windows(position);
        let full = verdicts.full_windows().map(|window| (window.layer().position, window.counted_name()));
        let counted = full.filter(|(position, _)| is_counted(*position));
        counted.for_each(|(position, name)| metrics.refused_by(rule(position).rule, name));
    }

    /// Finds the rules of a query, and their keys. As a request, a query has one client: where the key of a rule does not name
    /// it, the keys of the other rules do.
    fn keyed_rules(&self, queries: &[RuleQuery], decides: bool) -> Result<IdVec<PlanPosition, KeyedRule>, ApiError> {
        if let [RuleQuery { rule, key: QueryKey::Listed(listed), cost }] = queries {
            return Ok(IdVec::from(vec![self.listed_rule(self.rule(rule)?, listed, *cost)]));
        }
        let rules = queries.iter().map(|query| {
            self.rule(&query.rule).map(|rule| RuleKeyValues { rule, key: query.key.values(), cost: query.cost })
        });
        let rules: Vec<RuleKeyValues<String>> = rules.collect::<Result<_, _>>()?;
        let clients = self.clients();
        self.key_rules(&rules, clients.as_deref(), decides).collect()
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

    /// The keys of rules that are decided together. An error is a key that does not fit its rule. `clients`: all clients, if there
    /// are any; `decides`: the keys are charged or checked, and not only read or reset.
    pub fn key_rules<K: AsRef<str>>(
        &self,
        rules: &[RuleKeyValues<'_, K>],
        clients: Option<&ClientPlans>,
        decides: bool,
    ) -> impl Iterator<Item = Result<KeyedRule, ApiError>> {
        let callers: SmallVec<[CallerIdentity<'_>; 4]> = rules.iter().map(|rule| self.caller(rule, clients)).collect();
        let of_query = callers.iter().copied().fold(CallerIdentity::default(), CallerIdentity::or);
        rules
            .iter()
            .zip(callers)
            .map(move |(rule, caller)| self.keyed_rule(rule, (clients, caller.or(of_query)), decides))
    }

    /// Who the caller is by the key of one rule.
    fn caller<'c, K: AsRef<str>>(
        &self,
        RuleKeyValues { rule, key, .. }: &RuleKeyValues<'_, K>,
        clients: Option<&'c ClientPlans>,
    ) -> CallerIdentity<'c> {
        let is_ip = |(part, _): &(&KeyPart, &K)| part.prefixes().is_some();
        let address = self.rule_set.rules[*rule].rule.key.iter().zip(*key).find(is_ip);
        let address = address.and_then(|(_, value)| value.as_ref().parse().ok());
        let named = self.rules[*rule]
            .client_parts
            .iter()
            .filter_map(|part| Some(clients?.named_by(part, key.get(part.position.index())?.as_ref().as_bytes())));
        named.fold(CallerIdentity { address, ..CallerIdentity::default() }, CallerIdentity::or)
    }

    /// A rule, with the key to charge.
    fn keyed_rule<K: AsRef<str>>(
        &self,
        values: &RuleKeyValues<'_, K>,
        caller: (Option<&ClientPlans>, CallerIdentity<'_>),
        decides: bool,
    ) -> Result<KeyedRule, ApiError> {
        let rule = values.rule;
        let found = self.find_key(values, caller, decides)?;
        let is_shared = self.rule_set.rules[rule].rule.is_shared();
        let store_key = self.digester.as_ref().filter(|_| is_shared).and_then(|digester| {
            let mut text = String::new();
            let written = self.rules[rule].text_format.write_values(values.key, digester, &mut text);
            written.then(|| text.into())
        });
        Ok(KeyedRule { rule, found, store_key })
    }

    /// The rules of a query, each with its key in JSON; secrets as digests.
    pub fn describe_keys(&self, query: &DecisionQuery, digester: &KeyDigester) -> Result<Value, ApiError> {
        let describe = |RuleQuery { rule, key, .. }: &RuleQuery| {
            let parts = match key {
                QueryKey::Listed(listed) => listed.description.parts_json(),
                key => self.describe_key(self.rule(rule)?, key.values(), digester).parts_json(),
            };
            Ok(json!({ "rule": rule, "key": parts }))
        };
        query.rules.iter().map(describe).collect()
    }

    /// The key of a query, as of a request with that key.
    fn describe_key<K: AsRef<str>>(&self, rule: RuleId, key: &[K], digester: &KeyDigester) -> KeyDescription {
        let (format, mut values) = (&self.rules[rule].text_format, key.iter());
        let (mut client, clients) = (None, self.clients());
        let describe = |(position, part): (PartPosition, &KeyPart)| {
            let value = values.next().map_or("", K::as_ref);
            let mut readable = None;
            let mut take = |kind, bytes: &[u8]| readable = Some(format.readable_part(position, kind, bytes, digester));
            match (part.prefixes(), value.parse()) {
                (Some(prefixes), Ok(address)) => feed_address(address, prefixes, &mut take),
                _ => take(part.kind.number, value.as_bytes()),
            }
            client = client.take().or_else(|| format.client_of_part(position, value.as_bytes(), clients.as_deref()));
            (format.part_name(position), readable)
        };
        let parts = format.parts().map(describe).collect();
        KeyDescription {
            is_network_exempt: false,
            is_left_out: false,
            missing: None,
            is_fallback: false,
            parts,
            client,
        }
    }

    /// What the rule does with the key of a query.
    fn find_key<K: AsRef<str>>(
        &self,
        RuleKeyValues { rule, key: values, cost }: &RuleKeyValues<'_, K>,
        (clients, caller): (Option<&ClientPlans>, CallerIdentity<'_>),
        decides: bool,
    ) -> Result<Result<KeyedRequest, NotCounted>, ApiError> {
        let (served, rule) = (&self.rules[*rule], &self.rule_set.rules[*rule].rule);
        // A global rule takes no key, and ignores a given one.
        let parts: &[KeyPart] = if rule.key == [KeyPart::GLOBAL] { &[] } else { &rule.key };
        if parts.len() != values.len() && !parts.is_empty() {
            let names: Vec<String> = parts.iter().map(KeyPart::to_string).collect();
            return Err(ApiError::Malformed(format!("the key of this rule consists of `{}`", names.join("`, `"))));
        }
        let unusable =
            parts.iter().zip(*values).find(|(part, value)| !is_usable_key(part.kind.number, value.as_ref().as_bytes()));
        if let Some((part, _)) = unusable {
            let reason = format!("`{part}` contains bytes other than printable ASCII");
            return Err(ApiError::Malformed(reason));
        }
        let hash = |start: &KeyHasher, digests: bool| -> Result<KeyHash, ApiError> {
            let mut hasher = start.clone();
            let given = if parts.is_empty() { &[][..] } else { values };
            for (part, value) in rule.key.iter().zip(given.iter().map(K::as_ref).chain(std::iter::repeat(""))) {
                feed_text(&mut hasher, part, value, digests).ok_or_else(|| {
                    ApiError::Malformed(String::from("the key is not an IP address, and the rule counts by `ip`"))
                })?;
            }
            Ok(hasher.finish())
        };
        let key = hash(&served.hashers.counter, false)?;
        let offset = match &served.hashers.window_offset {
            Some(start) => hash(start, false)?.bucket_hash,
            None => 0,
        };
        if let (Some(overrides), Some(address)) = (&served.overrides, caller.address)
            && overrides.exempts(address)
        {
            return Ok(Err(NotCounted::Exempt));
        }
        let mut variant = None;
        if let Some(overrides) = served.overrides.as_ref().filter(|overrides| overrides.has_keys()) {
            let known = match &overrides.digest_hasher {
                Some(start) => hash(start, true)?,
                None => key,
            };
            match overrides.treatment_of(known) {
                Some(RuleTreatment::Exempt) => return Ok(Err(NotCounted::Exempt)),
                Some(RuleTreatment::Variant(of_key)) => variant = Some(of_key),
                None => {}
            }
        }
        if let (Some(check), Some(clients), None) = (&served.client_check, clients, variant) {
            let value = |part: &ClientPart| {
                values.get(part.position.index()).map_or(&[][..], |value| value.as_ref().as_bytes())
            };
            // Only the token of a subject without client tells its plan, and so its windows.
            let is_known = |named: CallerIdentity<'_>| named.is_named() && !(decides && named.is_subject);
            if !check.is_known(|part| is_known(clients.named_by(part, value(part)))) {
                return unknown_key(check, &rule.on_missing).map(Err);
            }
        }
        let variant_of_plan = || {
            let plan = clients.and_then(|clients| clients.plan_of(&caller));
            served.overrides.as_ref().map_or(VariantId::DEFAULT, |overrides| overrides.variant_of(plan))
        };
        let variant = variant.unwrap_or_else(variant_of_plan);
        let cost = cost.unwrap_or(rule.cost.default_cost());
        Ok(Ok(KeyedRequest { key, offset, variant, cost }))
    }
}

/// What a rule does with a key that names no client.
fn unknown_key(check: &ClientCheck, on_missing: &OnMissing) -> Result<NotCounted, ApiError> {
    match on_missing {
        OnMissing::Skip if check.is_missing => Ok(NotCounted::Skipped),
        OnMissing::Fallback(parts) if check.is_missing => {
            let names: Vec<String> = parts.iter().map(KeyPart::to_string).collect();
            let names = names.join("`, `");
            Err(ApiError::Malformed(format!(
                "the key names no client: requests with it are counted by `{names}`, which a query cannot give"
            )))
        }
        OnMissing::Never | OnMissing::Refuse | OnMissing::Skip | OnMissing::Fallback(_) => Ok(NotCounted::UnknownKey),
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue};
    use proptest::prelude::*;
    use proptest::sample::{select, subsequence};

    use super::*;
    use http::Method;
    use http::Uri;
    use transom_config::clients::{Client, Clients, ClientsSource};
    use transom_config::key::OnUnknownKey;
    use transom_config::key_kind::{HEADER, IP, METHOD};
    use transom_config::path::PathPattern;
    use transom_config::path::Segment;
    use transom_config::route::Route;
    use transom_http::error::RequestError;
    use transom_jwt::cache::TokenCache;
    use transom_jwt::token::TokenVerifier;
    use transom_limiter::limit::Limit;
    use transom_limiter::rule::{Exemptions, KeyValue, Override, Plan, Rule};
    use transom_limiter::secret_digest::Digest;
    use transom_rules::client_plans::{ClientLookup, ClientSources};
    use transom_rules::key_source::{ConnectionValues, RequestAttributes};
    use transom_rules::overrides::KnownPlans;
    use transom_rules::rate_limit_key::RuleKey;

    const SEED: Seed = Seed(1, 2);
    const ADDRESSES: [&str; 5] = ["10.1.2.3", "10.1.9.9", "::ffff:10.1.2.4", "203.0.113.9", "2001:db8::1"];
    const API_KEYS: [&str; 4] = ["key-of-acme", "key-of-beta", "monitor", "guess"];
    const USERS: [&str; 4] = ["user-of-acme", "user-of-gamma", "monitor", "guess"];

    fn route() -> Route {
        let segments = vec![Segment::Literal("u".to_owned()), Segment::Param("id".to_owned())];
        Route {
            name: "route".to_owned(),
            hosts: vec![],
            methods: vec![],
            headers: vec![],
            query: vec![],
            networks: vec![],
            path: PathPattern { text: "/u/{id}".to_owned(), segments },
            secure: None,
            actions: None,
            upstream: None,
            rules: vec![RuleId::at(0)],
            cost: None,
            websocket: true,
            allow: vec![],
        }
    }

    fn with_request<T>(
        address: &str,
        headers: &HeaderMap,
        tokens: &TokenCache,
        call: impl FnOnce(&RequestAttributes<'_>) -> T,
    ) -> T {
        let id = 3..5;
        call(&RequestAttributes {
            address: address.parse().unwrap(),
            connection: ConnectionValues::default(),
            host: "example.com",
            method: &Method::GET,
            path: "/u/77",
            params: std::slice::from_ref(&id),
            uri: &Uri::from_static("/u/77?token=a%20b"),
            headers,
            route: "route",
            tokens,
            wall_ms: 0,
            body: None,
        })
    }

    fn api_key() -> KeyPart {
        HEADER.of_name("x-api-key")
    }

    fn user() -> KeyPart {
        HEADER.of_name("x-user")
    }

    fn client(name: &str, plan: &str, api_keys: &[&str], subjects: &[&str], networks: &[&str]) -> Client {
        Client {
            name: name.to_owned(),
            plan: plan.to_owned(),
            api_keys: api_keys.iter().map(|key| Digest::of(key.as_bytes())).collect(),
            subjects: subjects.iter().map(|subject| (*subject).to_owned()).collect(),
            networks: networks.iter().map(|network| network.parse().unwrap()).collect(),
            limits: Vec::new(),
            grants: Vec::new(),
        }
    }

    /// `api_key` and `subject`: the parts of a request that `[clients]` reads.
    fn clients(api_key: Option<KeyPart>, subject: Option<KeyPart>) -> ClientPlans {
        let list = vec![
            client("acme", "gold", &["key-of-acme"], &["user-of-acme"], &["10.1.0.0/16"]),
            client("beta", "silver", &["key-of-beta"], &[], &["10.1.2.0/24", "2001:db8::/64"]),
            client("gamma", "silver", &[], &["user-of-gamma"], &[]),
        ];
        let api_key = api_key.into_iter().collect();
        let (source, plan_claim, defined_plans) = (ClientsSource::File, None, Vec::new());
        let (file, limit_texts) = ("clients.toml".into(), Vec::new());
        let clients = Clients { source, file, api_key, subject, plan_claim, defined_plans, list, limit_texts };
        ClientPlans::new(&clients, false)
    }

    fn value(part: &KeyPart, [address, api_key, user]: [&str; 3]) -> String {
        let value = match part.name() {
            None if part.prefixes().is_some() => address,
            None => "GET",
            Some("x-api-key") => api_key,
            Some(_) => user,
        };
        value.to_owned()
    }

    /// A rule, and what it does with unknown keys.
    fn any_rule() -> impl Strategy<Value = (Rule, OnUnknownKey)> {
        let parts = vec![IP.of_prefixes(24, 64), api_key(), user(), METHOD.part()];
        let on_missing = select(vec![OnMissing::Skip, OnMissing::Refuse]);
        let on_unknown = select(vec![OnUnknownKey::Count, OnUnknownKey::Missing, OnUnknownKey::Refuse]);
        let known = (select(ADDRESSES.to_vec()), select(API_KEYS.to_vec()), select(USERS.to_vec()));
        let settings = (subsequence(vec!["gold", "silver"], 0..=2), any::<[bool; 4]>(), known);
        (subsequence(parts, 1..=3).prop_shuffle(), on_missing, on_unknown, settings).prop_map(
            |(key, on_missing, on_unknown, (plans, [overrides, exempts, networks, digests], known))| {
                let windows = || vec![Limit::parse("1/minute").unwrap()];
                let mut rule = Rule::new("r", key.clone(), on_missing, windows());
                let plan = |name: &str| Plan { name: name.to_owned(), layers: windows(), concurrent: None };
                rule.plans = plans.into_iter().map(plan).collect();
                let configured = |values: [&str; 3]| -> Vec<KeyValue> {
                    let clear = |part: &KeyPart| (part.clone(), value(part, values));
                    let of = |(part, text): (KeyPart, String)| match digests && part.prefixes().is_none() {
                        true => KeyValue::Digest(Digest::of(text.as_bytes())),
                        false => KeyValue::Clear(text),
                    };
                    key.iter().map(clear).map(of).collect()
                };
                if overrides {
                    let key = configured(known.into());
                    rule.overrides.push(Override { key, layers: windows(), concurrent: None });
                }
                rule.exemptions = Exemptions {
                    networks: networks.then(|| "203.0.113.0/24".parse().unwrap()).into_iter().collect(),
                    keys: exempts.then(|| configured(["10.1.9.9", "monitor", "monitor"])).into_iter().collect(),
                };
                (rule, on_unknown)
            },
        )
    }

    proptest! {
        /// A request has the fields and the address that the query names, and no others.
        #[test]
        fn a_query_finds_the_keys_plans_and_exemptions_of_a_request(
            rules in proptest::collection::vec(any_rule(), 1..4),
            reads in any::<[bool; 2]>(),
            address in select(ADDRESSES.to_vec()), key in select(API_KEYS.to_vec()), name in select(USERS.to_vec()),
        ) {
            let live = LiveClients::new(clients(reads[0].then(api_key), reads[1].then(user)));
            let clients = live.current();
            let named = |(i, (rule, _)): (usize, &(Rule, OnUnknownKey))| Rule { name: format!("r{i}"), ..rule.clone() };
            let configured: Vec<Rule> = rules.iter().enumerate().map(named).collect();
            let rule_set = Arc::new(RuleSet::new(&configured, SEED, None));
            let sources: &ClientSources = &clients;
            let known = KnownPlans { names: &clients.plans, limits: &[] };
            let overrides = rule_set.rules.iter().map(|rule| RuleKey::compile_overrides(rule, Some(known), SEED));
            let overrides: IdVec<RuleId, _> = overrides.map(|overrides| overrides.map(Arc::new)).collect();
            let check = |(rule, on_unknown): &(Rule, OnUnknownKey)| {
                ClientCheck::new(*on_unknown, &rule.key, Some(sources))
            };
            let checks: IdVec<RuleId, _> = rules.iter().map(check).collect();
            let service = DecisionService::new(&rule_set, &overrides, SEED, None);
            let service = service.with_clients(Some(&live), checks.clone());

            let values = [address, key, name];
            let query = |rule: &Rule| RuleQuery {
                rule: rule.name.clone(),
                key: QueryKey::Values(rule.key.iter().map(|part| value(part, values)).collect()),
                cost: None,
            };
            let queries: Vec<RuleQuery> = configured.iter().map(query).collect();
            let of_query = service.keyed_rules(&queries, true).unwrap();

            let names = |part: &KeyPart| configured.iter().any(|rule| rule.key.contains(part));
            let mut headers = HeaderMap::new();
            for (part, name, value) in [(api_key(), "x-api-key", key), (user(), "x-user", name)] {
                names(&part).then(|| headers.insert(name, HeaderValue::from_static(value)));
            }
            let has_address = names(&IP.of_prefixes(24, 64));
            let address = if has_address { address } else { "198.51.100.1" };
            let tokens = TokenCache::new(TokenVerifier::default(), Vec::new(), KeyHasher::new(SEED, 0));
            let lookup = ClientLookup::new(Some(&clients));
            for (rule, keyed) in rule_set.rules.ids().zip(&of_query) {
                let rule_key = RuleKey::new(&rule_set.rules[rule], &route(), SEED)
                    .with_overrides(overrides[rule].clone())
                    .with_client_check(checks[rule].clone());
                let of_request =
                    with_request(address, &headers, &tokens, |request| rule_key.keyed_request(request, &lookup));
                match of_request {
                    Ok(of_request) => prop_assert_eq!(keyed.found, of_request),
                    Err(failure) => {
                        let is_unknown = matches!(
                            failure.error,
                            RequestError::KeyUnknown(_)
                                | RequestError::KeyMissing { .. }
                                | RequestError::CredentialsMissing(_)
                        );
                        prop_assert!(is_unknown, "{:?}", failure.error);
                        prop_assert_eq!(keyed.found, Err(NotCounted::UnknownKey));
                    }
                }
            }
        }
    }
}
