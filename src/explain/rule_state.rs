//! One rule of an explanation: the key of the request, the windows that apply, their usage, and what the rule makes of the
//! request.

use std::rc::Rc;

use serde_json::{Value, json};

use crate::decision::WindowState;
use crate::proxy::served_config::ServedConfig;
use transom_http::error::RequestError;
use transom_limiter::concurrency::ConcurrencyUsage;
use transom_limiter::decision::Decision;
use transom_limiter::handles::{IdVec, PlanPosition, RuleId, VariantId};
use transom_limiter::rule::{KeyValue, OnLimit, OnOutage, Sharing};
use transom_limiter::rule_set::{CompiledRule, KeyedRequest, NotCounted};
use transom_limiter::verdict::Outcome;
use transom_limiter::window_kind::WindowKind;
use transom_rules::rate_limit_key::{FoundKey, KeyDescription, KeyFailure};
use transom_rules::ratelimit_headers::seconds_until;
use transom_store::counter_access::CounterAccess;
use transom_store::decision_queries::{KeyQuery, KeyState, UsageSource};
use transom_store::shared_decision::Unavailable;

/// What a rule makes of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RuleResult {
    /// The rule does not count the request. `Failed`: its windows may count it all the same.
    NotCounted(NotCounted),
    Admits,
    /// Until this time; `None`: until a slot is free.
    Delays(Option<u64>),
    Refuses,
}

impl RuleResult {
    /// The key, the cost or the plan of the request is unknown.
    const FAILS: RuleResult = RuleResult::NotCounted(NotCounted::Failed);

    fn of(outcome: Outcome, decision: &Decision) -> RuleResult {
        match (outcome, decision) {
            (Outcome::NotCounted(reason), _) => RuleResult::NotCounted(reason),
            (Outcome::Delayed, Decision::Delayed { until_ms, .. }) => RuleResult::Delays(Some(*until_ms)),
            (Outcome::Delayed | Outcome::Waited, _) => RuleResult::Delays(None),
            (Outcome::Refused | Outcome::RefusedElsewhere | Outcome::Shadowed, _) => RuleResult::Refuses,
            (Outcome::Admitted, _) => RuleResult::Admits,
        }
    }
}

/// Whose windows a rule applies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Variant {
    Default,
    Plan(String),
    /// Those of the client alone.
    Client,
    /// The override at a position in `overrides`, from 1, and its key as configured, with digests shortened.
    Override(u32, Vec<String>),
}

/// Where the figures of a shared rule are from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Store {
    /// The store, whose counts may include tokens that other gateways have leased and not spent.
    Reachable { may_include_leased: bool },
    /// This gateway alone.
    Unreachable,
}

/// What happens at the time that a window states as its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Renewal {
    /// The usage is forgotten.
    Ends,
    /// The limit is granted once more; usage that exceeds it stays.
    Grants,
    /// The first tokens of a sliding window expire.
    Slides,
}

impl Renewal {
    pub fn of(window: &WindowState) -> Renewal {
        match window.kind {
            WindowKind::Sliding => Renewal::Slides,
            WindowKind::Accumulating => Renewal::Grants,
            WindowKind::Plain | WindowKind::Floating | WindowKind::Leased => match window.capacity > window.limit {
                true => Renewal::Grants,
                false => Renewal::Ends,
            },
        }
    }
}

/// A rule under a request.
#[derive(Debug)]
pub struct RuleState {
    pub name: String,
    pub is_shadow: bool,
    pub is_shared: bool,
    /// `None` where the store was not asked.
    pub store: Option<Store>,
    /// Whether the rule, if it refuses, does so before the store is asked.
    pub refuses_without_store: bool,
    /// Whether plans have windows of their own.
    pub has_plans: bool,
    pub key: KeyDescription,
    /// Set if the rule counts the request.
    pub counted: Option<(Variant, u32)>,
    /// What the cost is taken from, if it is a reserve.
    pub reserve_sources: Option<Vec<&'static str>>,
    pub result: RuleResult,
    pub reason: String,
    /// In the order of the configuration.
    pub windows: Vec<WindowState>,
    /// The name of the penalty among the windows.
    pub penalty_name: Option<String>,
    /// The name and the usage of the limit of requests in flight.
    pub concurrent: Option<(String, ConcurrencyUsage)>,
    /// When the rule would admit the request after a refusal, Unix milliseconds; `None`: never.
    pub retry_at_ms: Option<u64>,
}

impl RuleState {
    /// `found`: the key of the request.
    pub fn new(
        rule: &CompiledRule,
        key: KeyDescription,
        found: &FoundKey,
        reserve_sources: impl FnOnce(VariantId) -> Option<Vec<&'static str>>,
    ) -> RuleState {
        let (result, reason, keyed_request) = match found {
            Ok(Ok(keyed_request)) => (RuleResult::Admits, String::new(), Some(*keyed_request)),
            Ok(Err(reason)) => (RuleResult::NotCounted(*reason), reason_not_counted(&key), None),
            Err(KeyFailure { error, keyed_request }) => (RuleResult::FAILS, error_text(error), *keyed_request),
        };
        RuleState {
            name: rule.rule.name.clone(),
            is_shadow: rule.rule.is_shadow(),
            is_shared: rule.rule.is_shared(),
            store: None,
            refuses_without_store: false,
            has_plans: !rule.rule.plans.is_empty(),
            reserve_sources: keyed_request.and_then(|keyed_request| reserve_sources(keyed_request.variant)),
            counted: keyed_request.map(|keyed_request| (Variant::of(rule, keyed_request.variant), keyed_request.cost)),
            key,
            result,
            reason,
            windows: Vec::new(),
            penalty_name: rule.rule.penalty_name(),
            concurrent: None,
            retry_at_ms: Some(0),
        }
    }

    /// The rule does not decide about the request.
    pub fn leave_out(&mut self, reason: &str) {
        (self.result, self.reason) = (RuleResult::NotCounted(NotCounted::Skipped), String::from(reason));
        (self.counted, self.reserve_sources, self.concurrent, self.retry_at_ms) = (None, None, None, Some(0));
        self.windows.clear();
    }

    /// Reads the usage of the key, and decides by it.
    pub async fn read_counters(
        &mut self,
        served: &ServedConfig,
        rule: RuleId,
        keyed_request: KeyedRequest,
        store_key: Option<Rc<str>>,
        counters: &CounterAccess,
    ) -> Result<(), RequestError> {
        let rule_set = &served.rule_set;
        // In a plan of a query, a shadow rule decides as others do.
        let charge_plan =
            if self.is_shadow { rule_set.query_plan([rule], false) } else { rule_set.charge_plan([rule]) };
        let query = KeyQuery {
            charge_plan: &charge_plan,
            inputs: [Ok(keyed_request)].into_iter().collect(),
            store_keys: IdVec::from([store_key]),
        };
        let state = counters.value(&query).await;
        let may_include_leased = rule_set.rules[rule].rule.sharing == Sharing::Lease;
        self.store = match &state {
            Ok(KeyState { source: UsageSource::Table, .. }) => None,
            Ok(KeyState { source: UsageSource::Store, .. }) => Some(Store::Reachable { may_include_leased }),
            Ok(KeyState { source: UsageSource::StoreAway, .. }) | Err(Unavailable) => Some(Store::Unreachable),
        };
        let mut state = match state {
            Ok(state) => state,
            Err(Unavailable) if self.is_shadow || rule_set.rules[rule].rule.on_outage == OnOutage::Allow => {
                if self.result != RuleResult::FAILS {
                    self.reason = String::from("the shared store cannot be reached, and the rule allows that");
                }
                return Ok(());
            }
            Err(Unavailable) => {
                self.result = RuleResult::FAILS;
                self.reason = String::from("the shared store cannot be reached, and the rule refuses then");
                return Err(RequestError::StoreUnavailable);
            }
        };
        let now_ms = counters.clock.now().unix_ms;
        self.refuses_without_store = state.refuses_without_store;
        let KeyState { context, admits, .. } = &mut state;
        let decision = charge_plan.decide_peeked(*admits, now_ms, context);
        let verdict = charge_plan.verdicts(context, &decision).of_rule(PlanPosition::FIRST);
        let compiled_rule = verdict.rule();
        let usage = verdict.slots().copied();
        self.concurrent = usage.and_then(|usage| Some((compiled_rule.concurrent_name()?.to_owned(), usage)));
        self.windows = WindowState::of(charge_plan.verdicts(context, &decision));
        // A rule that could not read its key or plan keeps its error, unless its windows refuse.
        let is_failed = self.result == RuleResult::FAILS;
        let result = RuleResult::of(verdict.outcome(), &decision);
        if !is_failed || result == RuleResult::Refuses {
            self.result = result;
            self.reason = self.reason_of_result(compiled_rule, now_ms);
        }
        self.retry_at_ms = counters.retry_at_ms_once_refused(&query, &mut state).await;
        Ok(())
    }

    fn reason_of_result(&self, rule: &CompiledRule, now_ms: u64) -> String {
        let cost = self.counted.as_ref().map_or(0, |(_, cost)| *cost);
        let of_window = |window: &WindowState| {
            let name = &window.name;
            if self.penalty_name.as_ref() == Some(name) {
                let left = seconds_text(seconds_until(window.end_ms, now_ms));
                return format!("the penalty after an earlier refusal lasts for {left} more");
            }
            if cost > window.capacity {
                return format!("window `{name}` never holds the {cost} tokens that the request takes");
            }
            let (used, capacity, renewal) = (window.used, window.capacity, renewal(window, now_ms));
            match window.remaining {
                0 => format!("window `{name}` is full: {used} of {capacity} tokens used; {renewal}"),
                left => format!(
                    "window `{name}` has {left} of {capacity} tokens left, and the request takes {cost}; {renewal}"
                ),
            }
        };
        let full = self.windows.iter().filter(|window| window.is_full).map(of_window);
        let without_slot =
            self.concurrent.iter().filter(|(_, usage)| usage.remaining() == 0).map(|(name, usage)| {
                format!("`{name}` is full: {} of {} requests in flight", usage.in_use, usage.limit)
            });
        let full: Vec<String> = full.chain(without_slot).collect();
        let waiting = match rule.rule.on_limit {
            OnLimit::Delay { .. } if self.result == RuleResult::Refuses && rule.waiters.is_full() => {
                "; as many requests wait as `max_waiting` allows"
            }
            OnLimit::Delay { max_delay_ms, .. } if self.result == RuleResult::Refuses => {
                return format!("{}; waiting would take longer than `max_delay`, {max_delay_ms} ms", full.join("; "));
            }
            _ => "",
        };
        match full.is_empty() {
            true => String::from("there is room"),
            false => format!("{}{waiting}", full.join("; ")),
        }
    }

    /// The result in words.
    pub fn result_name(&self) -> &'static str {
        match self.result {
            RuleResult::Admits => "admits",
            RuleResult::Delays(_) if self.is_shadow => "would delay",
            RuleResult::Delays(_) => "delays",
            RuleResult::Refuses if self.is_shadow => "would refuse",
            RuleResult::Refuses => "refuses",
            RuleResult::NotCounted(reason) if reason.refuses() && !self.is_shadow => "error",
            RuleResult::NotCounted(_) => "not counted",
        }
    }

    pub fn to_json(&self, now_ms: u64) -> Value {
        let window = |window: &WindowState| {
            json!({
                "name": window.name, "count": window.used, "limit": window.limit, "remaining": window.remaining,
                "ttl": seconds_until(window.end_ms, now_ms), "full": window.is_full,
            })
        };
        let concurrent = self.concurrent.as_ref().map(|(name, usage)| {
            json!({
                "name": name, "count": usage.in_use, "limit": usage.limit, "remaining": usage.remaining(),
            })
        });
        let (windows_of, plan, override_of) = match self.counted.as_ref().map(|(variant, _)| variant) {
            None => (Value::Null, Value::Null, Value::Null),
            Some(Variant::Default) => (json!("rule"), Value::Null, Value::Null),
            Some(Variant::Plan(plan)) => (json!("plan"), json!(plan), Value::Null),
            Some(Variant::Client) => (json!("client"), Value::Null, Value::Null),
            Some(Variant::Override(number, key)) => {
                (json!("override"), Value::Null, json!({ "number": number, "key": key }))
            }
        };
        json!({
            "rule": self.name, "result": self.result_name(), "reason": self.reason,
            "key": self.key.parts_json(), "fallback": self.key.is_fallback,
            "windows_of": windows_of, "plan": plan, "override": override_of,
            "cost": self.counted.as_ref().map(|(_, cost)| cost), "reserved_by": self.reserve_sources,
            "shadow": self.is_shadow, "shared": self.is_shared,
            "store": self.store.map(|store| if store == Store::Unreachable { "unreachable" } else { "reachable" }),
            "may_include_leased": self.store == Some(Store::Reachable { may_include_leased: true }),
            "windows": self.windows.iter().map(window).collect::<Vec<_>>(), "concurrent": concurrent,
        })
    }
}

impl Variant {
    fn of(rule: &CompiledRule, variant: VariantId) -> Variant {
        let value = |value: &KeyValue| match value {
            KeyValue::Clear(text) => text.clone(),
            KeyValue::Digest(digest) => digest.brief(),
        };
        match (rule.rule.plan_of(variant), rule.rule.override_of(variant)) {
            (Some(plan), _) => Variant::Plan(plan.name.clone()),
            (None, Some((number, other))) => Variant::Override(number, other.key.iter().map(value).collect()),
            (None, None) if variant != VariantId::DEFAULT => Variant::Client,
            (None, None) => Variant::Default,
        }
    }
}

/// An error in words for the operator, who may know whether a key names a client.
pub fn error_text(error: &RequestError) -> String {
    match error {
        RequestError::KeyUnknown(no_client) => format!("the value of `{}` names no client", no_client.part),
        RequestError::CredentialsMissing(no_client) => format!("the request lacks `{}`", no_client.part),
        error => error.to_string(),
    }
}

/// When a window has room again, in words.
fn renewal(window: &WindowState, now_ms: u64) -> String {
    let seconds = seconds_text(seconds_until(window.end_ms, now_ms));
    match Renewal::of(window) {
        Renewal::Ends => format!("it ends in {seconds}"),
        Renewal::Grants => format!("it gets {} more in {seconds}", window.limit),
        Renewal::Slides => format!("its first tokens expire in {seconds}"),
    }
}

/// A time for people: the seconds of `Retry-After`, and what they are in a larger unit.
pub fn seconds_text(seconds: u64) -> String {
    let rounded = |unit: u64| (seconds + unit / 2) / unit;
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{seconds} s ({} min)", rounded(60)),
        7200..172_800 => format!("{seconds} s ({} h)", rounded(3600)),
        _ => format!("{seconds} s ({} d)", rounded(86400)),
    }
}

/// Why a rule does not count a request that it could.
fn reason_not_counted(key: &KeyDescription) -> String {
    match &key.missing {
        _ if key.is_network_exempt => String::from("the address of the client is in an exempt network"),
        _ if key.is_left_out => String::from("the body of the request does not meet `when`"),
        Some(missing) if missing.is_unknown => {
            format!("the value of `{}` names no client, and `on_missing_key` is \"skip\"", missing.name)
        }
        Some(missing) if !key.is_fallback => {
            format!("the request lacks `{}`, and `on_missing_key` is \"skip\"", missing.name)
        }
        Some(_) | None => String::from("the key is exempt"),
    }
}
