//! A model of counting, written from the documentation alone: docs/reference/configuration.md, docs/explanation/windows.md. The
//! model shares no code with the gateway and must not use its crates: `counting_oracle` compares both.
//!
//! The model keeps plain numbers for each rule, key and layer: tokens by the number of a window or segment, the time at which a
//! first request opened a window, or a value to which each window adds the limit.

use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Milliseconds, for times since 1970.
pub type Ms = u64;

const DAY_MS: Ms = 86_400_000;
/// `Retry-After` of a request for which no slot is left.
const SLOT_RETRY_MS: Ms = 1000;
/// Of the response to a request whose key is missing: the keys are subjects of clients.
pub const BAD_STATUS: u16 = 401;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Period {
    Fixed(Ms),
    /// A calendar month in UTC.
    Month,
}

impl Period {
    /// The fewest windows that are whole seconds together.
    fn stated_windows(self) -> i64 {
        match self {
            Period::Fixed(ms) => (1..).find(|windows| ms * windows % 1000 == 0).map_or(1, u64::cast_signed),
            Period::Month => 1,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    /// Windows begin at this time, and every period before and after.
    Aligned(Ms),
    FirstRequest,
    Sliding,
}

#[derive(Clone, Debug)]
pub struct Layer {
    /// As written in the configuration.
    pub period_text: &'static str,
    pub period: Period,
    pub kind: Kind,
    pub limit: i64,
    pub capacity: Option<i64>,
    pub reserve: i64,
    pub shards: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cost {
    Fixed(i64),
    RequestField { default: i64, max: i64 },
    ResponseField { reserve: i64, max: i64 },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Key {
    Ip,
    Field,
    FieldAndIp,
    Global,
}

/// What happens to a request without the field of the key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MissingKey {
    Refuse,
    Skip,
    Ip,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    Off,
    Lease,
    Exact,
}

#[derive(Clone, Debug)]
pub struct Rule {
    pub name: String,
    pub key: Key,
    pub on_missing_key: MissingKey,
    pub layers: Vec<Layer>,
    /// Windows of single keys.
    pub overrides: Vec<(String, Vec<Layer>)>,
    pub exempt_keys: Vec<String>,
    pub exempt_addresses: Vec<String>,
    /// Windows of the clients on the plan.
    pub plan: Option<Vec<Layer>>,
    /// Requests of a key in flight at a time.
    pub concurrent: Option<i64>,
    pub cost: Cost,
    pub count_refused: bool,
    /// How long a request waits for a later window at most. Rules that delay have neither a penalty nor sliding windows here.
    pub max_delay_ms: Option<Ms>,
    pub is_shadow: bool,
    pub penalty_ms: Option<Ms>,
    /// Statuses of `count_when`.
    pub counted_statuses: Option<Vec<u16>>,
    pub sharing: Sharing,
}

#[derive(Clone, Debug)]
pub struct Route {
    /// Positions of rules.
    pub rules: Vec<usize>,
    /// Replaces fixed costs of rules.
    pub cost: Option<i64>,
}

#[derive(Clone, Debug)]
pub struct Request {
    pub route: usize,
    pub address: String,
    pub field: Option<String>,
    /// Whether the client is on the plan.
    pub is_on_plan: bool,
    pub cost: Option<i64>,
    /// The response of the upstream.
    pub status: u16,
    pub response_cost: Option<i64>,
}

/// What the gateway must answer.
#[derive(Clone, Debug, Default)]
pub struct Decision {
    /// Names of the windows, penalties and limits of requests in flight that refuse the request.
    pub refusing: BTreeSet<String>,
    /// Names of the limits of requests in flight behind the first that refuses: the response does not state them.
    pub unstated: BTreeSet<String>,
    /// A key is missing that the request needs.
    pub is_bad: bool,
    /// Until when the request waits.
    pub delayed_until: Option<Ms>,
}

/// A request that was decided, and whose response is not complete.
#[derive(Clone, Default, Debug)]
pub struct Begun {
    /// The rules that it was charged in, and those that hold a slot for it.
    charged: Vec<usize>,
    slots: Vec<(usize, String)>,
    /// The layers whose windows have ended when it no longer waits, as a rule and a position in its layers.
    to_recharge: Vec<(usize, usize)>,
    is_bad: bool,
}

impl Decision {
    pub fn is_refused(&self) -> bool {
        !self.refusing.is_empty()
    }
}

/// One item of `RateLimit` and of `RateLimit-Policy`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Item {
    pub name: String,
    /// `q`: of the fewest windows that are whole seconds together.
    pub limit: i64,
    pub remaining: i64,
    /// Milliseconds until the window ends, where the documentation states it.
    pub reset_ms: Option<Ms>,
}

/// The usage of one key in one layer.
#[derive(Clone, Default, Debug)]
struct Counter {
    /// Tokens taken, by the number of the window or segment.
    used: BTreeMap<i64, i64>,
    /// When a first request opened the current window.
    opened: Option<Ms>,
    /// Of windows that depend on each other: the window in which the value was computed, and the value.
    value: Option<(i64, i64)>,
}

/// A counter belongs to a rule, a key and a window: layers of plans with the same windows have the same counters.
type CounterKey = (usize, String, &'static str, Kind);

#[derive(Clone, Debug)]
pub struct Model {
    rules: Vec<Rule>,
    routes: Vec<Route>,
    counters: HashMap<CounterKey, Counter>,
    /// Ends of penalties, by rule and key.
    penalties: HashMap<(usize, String), Ms>,
    /// Requests in flight, by rule and key.
    in_flight: HashMap<(usize, String), i64>,
    /// Number of decisions by rule and outcome, as `transom_decisions_total`, and refunds.
    pub outcomes: BTreeMap<(String, &'static str), u64>,
}

/// A rule that applies to a request.
struct Applied<'a> {
    position: usize,
    rule: &'a Rule,
    layers: &'a [Layer],
    key: String,
    /// Tokens taken before the request is forwarded.
    cost: i64,
}

enum Resolution<'a> {
    Applied(Applied<'a>),
    Exempt,
    Skipped,
    Missing(&'a Rule),
}

impl Layer {
    pub fn capacity(&self) -> i64 {
        self.capacity.unwrap_or(self.limit)
    }

    fn period_ms(&self) -> Ms {
        match self.period {
            Period::Fixed(ms) => ms,
            Period::Month => unreachable!("months have different lengths"),
        }
    }
}

impl Rule {
    /// The name of a layer: that of the rule, with the period if the rule has several layers.
    pub fn layer_name(&self, layers: &[Layer], layer: &Layer) -> String {
        if layers.len() == 1 { self.name.clone() } else { format!("{}-{}", self.name, layer.period_text) }
    }

    /// Whether the response decides what a request costs.
    fn is_settled(&self) -> bool {
        self.counted_statuses.is_some() || matches!(self.cost, Cost::ResponseField { .. })
    }

    /// Whether windows of this layer depend on each other.
    fn accumulates(&self, layers: &[Layer], layer: &Layer) -> bool {
        layer.kind != Kind::Sliding
            && (layer.capacity.is_some()
                || self.max_delay_ms.is_some()
                || matches!(self.cost, Cost::ResponseField { .. })
                || layers.iter().any(|layer| layer.reserve > 0))
    }

    fn resolve<'a>(&'a self, position: usize, route: &Route, request: &Request) -> Resolution<'a> {
        if self.exempt_addresses.contains(&request.address) {
            return Resolution::Exempt;
        }
        let (key, is_fallback) = match (self.key, &request.field) {
            (Key::Ip, _) => (request.address.clone(), false),
            (Key::Global, _) => (String::new(), false),
            (Key::Field, Some(field)) => (field.clone(), false),
            (Key::FieldAndIp, Some(field)) => (format!("{field}|{}", request.address), false),
            (Key::Field | Key::FieldAndIp, None) => match self.on_missing_key {
                MissingKey::Refuse => return Resolution::Missing(self),
                MissingKey::Skip => return Resolution::Skipped,
                MissingKey::Ip => (format!("else={}", request.address), true),
            },
        };
        if self.exempt_keys.contains(&key) {
            return Resolution::Exempt;
        }
        let of_key = self.overrides.iter().find(|(overridden, _)| !is_fallback && *overridden == key);
        let layers = match (of_key, &self.plan) {
            (Some((_, layers)), _) => layers,
            (None, Some(layers)) if request.is_on_plan => layers,
            _ => &self.layers,
        };
        let cost = match self.cost {
            Cost::Fixed(cost) => route.cost.unwrap_or(cost),
            Cost::RequestField { default, .. } => request.cost.unwrap_or(default),
            Cost::ResponseField { reserve, .. } => reserve,
        };
        Resolution::Applied(Applied { position, rule: self, layers, key, cost })
    }
}

impl Applied<'_> {
    /// Tokens that must be left. A reserve of 0 needs one that it does not take.
    fn needed(&self) -> i64 {
        if matches!(self.rule.cost, Cost::ResponseField { .. }) { self.cost.max(1) } else { self.cost }
    }

    fn counter_key(&self, layer: &Layer) -> CounterKey {
        // Windows that begin whole periods apart are the same.
        let kind = match (layer.kind, layer.period) {
            (Kind::Aligned(start), Period::Fixed(period_ms)) => Kind::Aligned(start % period_ms),
            (kind, _) => kind,
        };
        (self.position, self.key.clone(), layer.period_text, kind)
    }
}

impl Model {
    pub fn new(rules: Vec<Rule>, routes: Vec<Route>) -> Model {
        let (counters, penalties, in_flight) = Default::default();
        Model { rules, routes, counters, penalties, in_flight, outcomes: BTreeMap::new() }
    }

    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    fn resolutions(&self, request: &Request) -> Vec<Resolution<'_>> {
        let route = &self.routes[request.route];
        route.rules.iter().map(|position| self.rules[*position].resolve(*position, route, request)).collect()
    }

    fn applied(&self, request: &Request) -> Vec<Applied<'_>> {
        let applied = |resolution| match resolution {
            Resolution::Applied(applied) => Some(applied),
            _ => None,
        };
        self.resolutions(request).into_iter().filter_map(applied).collect()
    }

    fn counter(&self, applied: &Applied, layer: &Layer) -> Option<&Counter> {
        self.counters.get(&applied.counter_key(layer))
    }

    /// Tokens that are left; below zero if more was used than granted.
    fn left(&self, applied: &Applied, layer: &Layer, now: Ms) -> i64 {
        let Some(counter) = self.counter(applied, layer) else { return layer.capacity() };
        counter.left(layer, applied.rule.accumulates(applied.layers, layer), now)
    }

    /// Windows of the rule that cannot admit the request.
    fn full_layers<'a>(&self, applied: &'a Applied, now: Ms) -> Vec<&'a Layer> {
        let is_full = |layer: &&Layer| applied.needed() > 0 && self.left(applied, layer, now) < applied.needed();
        applied.layers.iter().filter(is_full).collect()
    }

    fn penalty_end(&self, applied: &Applied, now: Ms) -> Option<Ms> {
        self.penalties.get(&(applied.position, applied.key.clone())).copied().filter(|end| *end > now)
    }

    /// Slots of the rule that are left for this key.
    fn slots_left(&self, applied: &Applied) -> Option<i64> {
        let in_flight = self.in_flight.get(&(applied.position, applied.key.clone())).copied().unwrap_or(0);
        applied.rule.concurrent.map(|concurrent| concurrent - in_flight)
    }

    /// Names of the windows, the penalty and the slots by which one rule refuses. A full window starts a penalty, which then refuses
    /// too.
    fn refusing(&self, applied: &Applied, now: Ms) -> Vec<String> {
        let full = self.full_layers(applied, now);
        let mut names: Vec<String> = full.iter().map(|layer| applied.rule.layer_name(applied.layers, layer)).collect();
        if self.penalty_end(applied, now).is_some() || (applied.rule.penalty_ms.is_some() && !full.is_empty()) {
            names.push(format!("{}-penalty", applied.rule.name));
        }
        names
    }

    /// The rules that limit requests in flight, in the order in which a request takes slots, up to the first that has none left; and
    /// the rest.
    fn slots<'a>(&self, applied: &'a [Applied<'a>]) -> (Vec<&'a Applied<'a>>, Vec<&'a Applied<'a>>) {
        let mut limiting: Vec<_> = applied.iter().filter(|applied| applied.rule.concurrent.is_some()).collect();
        limiting.retain(|applied| !applied.rule.is_shadow);
        limiting.sort_by_key(|applied| (applied.rule.key == Key::Global, applied.position));
        let first_full = limiting.iter().position(|applied| self.slots_left(applied) == Some(0));
        let rest = limiting.split_off(first_full.map_or(limiting.len(), |first| first + 1));
        (limiting, rest)
    }

    /// Until when a request that a rule would refuse waits for it; `None`: it is refused.
    fn delayed_until(&self, applied: &Applied, now: Ms) -> Option<Ms> {
        let max_delay_ms = applied.rule.max_delay_ms?;
        let full = self.full_layers(applied, now).into_iter();
        // A cost above a limit never fits.
        let waits_ms: Vec<Ms> = full.map(|layer| self.wait_ms(applied, layer, now)).collect::<Option<_>>()?;
        let longest_ms = waits_ms.into_iter().max().expect("a full layer");
        (longest_ms <= max_delay_ms).then_some(now + longest_ms)
    }

    pub fn decide(&self, request: &Request, now: Ms) -> Decision {
        // A shadow rule refuses nothing.
        let is_bad = |resolution: &Resolution| matches!(resolution, Resolution::Missing(rule) if !rule.is_shadow);
        let is_bad = self.resolutions(request).iter().any(is_bad);
        let applied = self.applied(request);
        let enforced = applied.iter().filter(|applied| !applied.rule.is_shadow);
        let full: Vec<_> = enforced.filter(|applied| !self.refusing(applied, now).is_empty()).collect();
        let mut refusing: BTreeSet<String> = full.iter().flat_map(|applied| self.refusing(applied, now)).collect();
        let (slots, other_slots) = self.slots(&applied);
        let name = |applied: &&Applied| format!("{}-concurrent", applied.rule.name);
        let unstated = other_slots.iter().map(name).collect();
        if let Some(last) = slots.last().filter(|last| self.slots_left(last) == Some(0)) {
            refusing.insert(name(last));
            return Decision { refusing, unstated, is_bad, delayed_until: None };
        }
        let delays: Option<Vec<Ms>> = full.iter().map(|applied| self.delayed_until(applied, now)).collect();
        if let Some(delays) = delays {
            return Decision { is_bad, delayed_until: delays.into_iter().max(), ..Decision::default() };
        }
        Decision { refusing, unstated, is_bad, delayed_until: None }
    }

    /// Counts a request that was admitted or refused, with its response.
    pub fn record(&mut self, request: &Request, now: Ms, is_admitted: bool) -> Begun {
        let begun = self.begin(request, now, is_admitted);
        self.settle(request, &begun, now);
        begun
    }

    /// Counts a request that was decided, without its response.
    pub fn begin(&mut self, request: &Request, now: Ms, is_admitted: bool) -> Begun {
        let mut next = self.clone();
        let Decision { is_bad, delayed_until, .. } = self.decide(request, now);
        let mut begun = Begun { is_bad, ..Begun::default() };
        for resolution in self.resolutions(request) {
            if let Resolution::Missing(rule) = resolution
                && rule.is_shadow
            {
                next.count_outcome(rule, "shadowed");
            }
        }
        let all = self.applied(request);
        let (slots, _) = self.slots(&all);
        for applied in &all {
            let rule = applied.rule;
            let is_full = !self.full_layers(applied, now).is_empty();
            let has_no_slot = self.slots_left(applied) == Some(0);
            let takes_slot = |slot: &&Applied| slot.position == applied.position;
            let is_refusing = !self.refusing(applied, now).is_empty()
                || has_no_slot && (rule.is_shadow || slots.iter().any(takes_slot));
            // A shadow rule does not decide a request that other rules refuse.
            if rule.is_shadow && !is_admitted {
                continue;
            }
            let is_delaying = is_refusing && rule.max_delay_ms.is_some() && is_admitted;
            let outcome = match (is_refusing, is_admitted) {
                (true, _) if is_delaying => Some("delayed"),
                (true, _) if rule.is_shadow => Some("shadowed"),
                (true, _) => Some("refused"),
                (false, is_admitted) => is_admitted.then_some("admitted"),
            };
            if let Some(outcome) = outcome {
                next.count_outcome(rule, outcome);
            }
            // A shadow rule does not look at its windows for a request without a slot.
            let is_examined = !(rule.is_shadow && has_no_slot);
            if is_full
                && is_examined
                && self.penalty_end(applied, now).is_none()
                && let Some(penalty_ms) = rule.penalty_ms
            {
                next.penalties.insert((applied.position, applied.key.clone()), now + penalty_ms);
            }
            if !is_admitted || (is_refusing && !is_delaying) {
                if rule.count_refused && is_examined {
                    next.count_refusal(applied, now);
                }
                continue;
            }
            if rule.concurrent.is_some() {
                let slot = (applied.position, applied.key.clone());
                *next.in_flight.entry(slot.clone()).or_default() += 1;
                begun.slots.push(slot);
            }
            begun.charged.push(applied.position);
            // All layers of a rule that delays are charged in the window in which the rule admits the request.
            let charged_at = if is_delaying { self.delayed_until(applied, now).expect("a delay") } else { now };
            for (number, layer) in applied.layers.iter().enumerate() {
                if is_delaying {
                    next.take(applied, layer, now, 0, true);
                    next.take_at(applied, layer, charged_at, applied.cost);
                } else {
                    next.take(applied, layer, now, applied.cost, applied.cost > 0);
                }
                if let Some(until) = delayed_until
                    && next.window_end_ms(applied, layer, charged_at) <= until
                    && applied.cost > 0
                {
                    begun.to_recharge.push((applied.position, number));
                }
            }
        }
        *self = next;
        begun
    }

    /// Charges a request that has waited in windows that have begun meanwhile, in all or in none. If one of them is full, the request is
    /// refused, and gets back what it was charged in the current windows.
    pub fn pass(&mut self, request: &Request, begun: &Begun, now: Ms) -> Decision {
        let (mut charged, mut refunded, mut is_refused) = (self.clone(), self.clone(), false);
        for applied in &self.applied(request) {
            for (number, layer) in applied.layers.iter().enumerate() {
                if begun.to_recharge.contains(&(applied.position, number)) {
                    is_refused |= self.left(applied, layer, now) < applied.needed();
                    charged.take(applied, layer, now, applied.cost, applied.cost > 0);
                } else if !self.is_reserved_after(applied, layer, now) {
                    refunded.take_at(applied, layer, now, -applied.cost);
                }
            }
        }
        if !is_refused {
            *self = charged;
            return Decision { is_bad: begun.is_bad, ..Decision::default() };
        }
        *self = refunded;
        let mut refusing = BTreeSet::new();
        for applied in &self.clone().applied(request) {
            let names = self.refusing(applied, now);
            if !names.is_empty() {
                self.count_outcome(applied.rule, "refused");
            }
            refusing.extend(names);
        }
        Decision { refusing, is_bad: begun.is_bad, ..Decision::default() }
    }

    /// Whether a request waits for a later window: what was charged before it is not refunded.
    fn is_reserved_after(&self, applied: &Applied, layer: &Layer, now: Ms) -> bool {
        let Some(counter) = self.counter(applied, layer) else { return false };
        counter.value.is_some_and(|(last, _)| last > counter.number(layer, now))
    }

    /// Takes what is left, up to the cost.
    fn count_refusal(&mut self, applied: &Applied, now: Ms) {
        for layer in applied.layers {
            let taken = applied.cost.min(self.left(applied, layer, now)).max(0);
            self.take(applied, layer, now, taken, false);
        }
    }

    /// Charges or refunds what the response decides. Returns whether it decides something: the fields state the windows as of then.
    pub fn settle(&mut self, request: &Request, begun: &Begun, now: Ms) -> bool {
        let (mut next, mut is_decided) = (self.clone(), false);
        for applied in self.applied(request).iter().filter(|applied| begun.charged.contains(&applied.position)) {
            let rule = applied.rule;
            // The response of the gateway to a bad request states no cost.
            let status = if begun.is_bad { BAD_STATUS } else { request.status };
            let is_counted = rule.counted_statuses.as_ref().is_none_or(|counted| counted.contains(&status));
            let stated = match (rule.cost, request.response_cost) {
                (Cost::ResponseField { max, .. }, Some(cost)) if !begun.is_bad => Some(cost.min(max)),
                _ => None,
            };
            let settled = if is_counted { stated.unwrap_or(applied.cost) } else { 0 };
            if !is_counted {
                next.count_outcome(rule, "refunded");
            }
            is_decided |= !is_counted || stated.is_some();
            for layer in applied.layers {
                next.take(applied, layer, now, settled - applied.cost, settled > applied.cost);
            }
        }
        *self = next;
        is_decided
    }

    /// The last byte of the response has been sent.
    pub fn release(&mut self, begun: &Begun) {
        for slot in &begun.slots {
            *self.in_flight.get_mut(slot).expect("a slot") -= 1;
        }
    }

    /// What another gateway does not know: the counters of rules that each gateway counts alone.
    pub fn forget_local_counters(&mut self) {
        let rules = &self.rules;
        self.counters.retain(|(position, ..), _| rules[*position].sharing != Sharing::Off);
        self.penalties.retain(|(position, _), _| rules[*position].sharing != Sharing::Off);
    }

    fn count_outcome(&mut self, rule: &Rule, outcome: &'static str) {
        *self.outcomes.entry((rule.name.clone(), outcome)).or_default() += 1;
    }

    /// Takes tokens, or gives them back if negative. `opens`: whether this opens a window by first request.
    fn take(&mut self, applied: &Applied, layer: &Layer, now: Ms, tokens: i64, opens: bool) {
        let accumulates = applied.rule.accumulates(applied.layers, layer);
        let counter = self.counters.entry(applied.counter_key(layer)).or_default();
        if layer.kind == Kind::FirstRequest && counter.opened_at(layer, accumulates, now).is_none() {
            if !opens {
                return;
            }
            *counter = Counter { opened: Some(now), ..Counter::default() };
        }
        self.take_at(applied, layer, now, tokens);
    }

    /// Takes tokens in the window of this time, which is open.
    fn take_at(&mut self, applied: &Applied, layer: &Layer, at: Ms, tokens: i64) {
        let counter = self.counters.entry(applied.counter_key(layer)).or_default();
        let number = counter.number(layer, at);
        if applied.rule.accumulates(applied.layers, layer) {
            // What remains of earlier windows is given up.
            let number = number.max(counter.value.map_or(number, |(last, _)| last));
            let value = counter.accumulated(layer, number);
            counter.value = Some((number, (value - tokens).min(layer.capacity())));
        } else {
            *counter.used.entry(number).or_default() += tokens;
        }
    }

    /// The end of the window or segment in which a request was charged.
    fn window_end_ms(&self, applied: &Applied, layer: &Layer, at: Ms) -> Ms {
        let counter = self.counter(applied, layer).expect("a charged counter");
        counter.begin_ms(layer, counter.number(layer, at) + 1)
    }

    /// Time until a full layer has enough tokens; `None`: never.
    fn wait_ms(&self, applied: &Applied, layer: &Layer, now: Ms) -> Option<Ms> {
        if applied.needed() > layer.capacity() {
            return None;
        }
        let accumulates = applied.rule.accumulates(applied.layers, layer);
        let counter = self.counter(applied, layer).expect("an unused window is not full");
        Some(counter.wait_ms(layer, accumulates, now, applied.needed()))
    }

    /// Seconds until the request would be admitted, rounded up and at least 1. `None`: never.
    pub fn retry_after_ms(&self, request: &Request, now: Ms) -> Option<Ms> {
        let mut longest = 0;
        for applied in self.applied(request).iter().filter(|applied| !applied.rule.is_shadow) {
            if let Some(end) = self.penalty_end(applied, now) {
                longest = longest.max(end - now);
            }
            for layer in self.full_layers(applied, now) {
                longest = longest.max(self.wait_ms(applied, layer, now)?);
            }
        }
        let applied = self.applied(request);
        let has_no_slot = self.slots(&applied).0.iter().any(|applied| self.slots_left(applied) == Some(0));
        Some(if has_no_slot { longest.max(SLOT_RETRY_MS) } else { longest })
    }

    /// Whether the response decides what the request costs.
    pub fn is_settled(&self, request: &Request) -> bool {
        self.applied(request).iter().any(|applied| applied.rule.is_settled())
    }

    /// Whether a refund may be lost because later requests have taken tokens of windows that depend on that of the request.
    pub fn may_lose_refund(&self, request: &Request) -> bool {
        let may_lose = |applied: &Applied| {
            let mut layers = applied.layers.iter();
            applied.rule.is_settled() && layers.any(|layer| applied.rule.accumulates(applied.layers, layer))
        };
        self.applied(request).iter().any(may_lose)
    }

    /// Whether the request takes no token of some rule.
    pub fn takes_nothing(&self, request: &Request) -> bool {
        self.applied(request).iter().any(|applied| applied.cost == 0)
    }

    /// The windows that may refuse the request in an outage although tokens are left: where too few are leased for it in a window, the
    /// request takes none of those that are leased in others. `leased`: of each rule, in all its windows together.
    pub fn may_exceed_lease(&self, request: &Request, leased: &[i64], now: Ms) -> BTreeSet<String> {
        let takes_several = |applied: &&Applied| applied.cost > 0 && (applied.cost > 1 || applied.layers.len() > 1);
        let mut names = BTreeSet::new();
        for applied in self.applied(request).iter().filter(takes_several) {
            let may_refuse =
                |layer: &&Layer| self.left(applied, layer, now) - leased[applied.position] < applied.needed();
            if applied.rule.sharing == Sharing::Lease {
                let layers = applied.layers.iter().filter(may_refuse);
                names.extend(layers.map(|layer| applied.rule.layer_name(applied.layers, layer)));
            }
        }
        names
    }

    /// The tokens that are used of each rule, of all keys and in all windows that are open. The rules have no plans and no overrides.
    pub fn used_of_rules(&self, now: Ms) -> Vec<i64> {
        let mut used = vec![0; self.rules.len()];
        for (key, counter) in &self.counters {
            let (rule, layer) = (&self.rules[key.0], self.layer_of(key));
            used[key.0] += layer.capacity() - counter.left(layer, rule.accumulates(&rule.layers, layer), now);
        }
        used
    }

    fn layer_of(&self, (position, _, period_text, kind): &CounterKey) -> &Layer {
        let rule = &self.rules[*position];
        let plans = rule.overrides.iter().map(|(_, layers)| layers).chain(&rule.plan);
        let mut layers = plans.chain([&rule.layers]).flatten();
        let is_kind =
            |layer: &Layer| matches!((layer.kind, kind), (Kind::Aligned(_), Kind::Aligned(_))) || layer.kind == *kind;
        layers.find(|layer| layer.period_text == *period_text && is_kind(layer)).unwrap()
    }

    pub fn has_penalties(&self, request: &Request) -> bool {
        self.applied(request).iter().any(|applied| applied.rule.penalty_ms.is_some())
    }

    pub fn has_sliding_layers(&self, request: &Request) -> bool {
        self.applied(request).iter().flat_map(|applied| applied.layers).any(|layer| layer.kind == Kind::Sliding)
    }

    /// The items of `RateLimit` after a request.
    pub fn items(&self, request: &Request, now: Ms) -> Vec<Item> {
        let mut items = Vec::new();
        for applied in self.applied(request).iter().filter(|applied| !applied.rule.is_shadow) {
            let penalty_end = self.penalty_end(applied, now);
            if let (Some(limit), Some(remaining)) = (applied.rule.concurrent, self.slots_left(applied)) {
                let name = format!("{}-concurrent", applied.rule.name);
                items.push(Item { name, limit, remaining, reset_ms: None });
            }
            for layer in applied.layers {
                let left = self.left(applied, layer, now).max(0);
                let accumulates = applied.rule.accumulates(applied.layers, layer);
                let reset_ms =
                    self.counter(applied, layer).and_then(|counter| counter.reset_ms(layer, accumulates, now));
                items.push(Item {
                    name: applied.rule.layer_name(applied.layers, layer),
                    limit: layer.limit * layer.period.stated_windows(),
                    remaining: if penalty_end.is_some() { 0 } else { left },
                    reset_ms: match penalty_end {
                        // The end of the window instead, if it is used up for longer.
                        Some(_) if left == 0 => None,
                        Some(end) => Some(end - now),
                        None => reset_ms,
                    },
                });
            }
        }
        items
    }

    /// Times after `now` at which windows, segments or penalties end.
    pub fn ends(&self, now: Ms) -> Vec<Ms> {
        let mut ends: Vec<Ms> = self.penalties.values().copied().collect();
        for (key, counter) in &self.counters {
            let layer = self.layer_of(key);
            let number = counter.number(layer, now);
            let further = if layer.kind == Kind::Sliding { 10 } else { 3 };
            ends.extend((1..further).map(|ahead| counter.begin_ms(layer, number + ahead)));
        }
        ends.retain(|end| *end > now);
        ends.sort_unstable();
        ends
    }
}

impl Counter {
    /// The number of the window, or of the segment of a sliding window.
    fn number(&self, layer: &Layer, now: Ms) -> i64 {
        let now = now as i64;
        match (layer.kind, layer.period) {
            (Kind::Sliding, _) => now * 8 / layer.period_ms() as i64,
            (Kind::FirstRequest, _) => {
                (now - self.opened.unwrap_or_default() as i64).div_euclid(layer.period_ms() as i64)
            }
            (Kind::Aligned(_), Period::Month) => month_number(now as Ms),
            (Kind::Aligned(start), Period::Fixed(period_ms)) => {
                (now - (start % period_ms) as i64).div_euclid(period_ms as i64)
            }
        }
    }

    /// When a window or segment begins.
    fn begin_ms(&self, layer: &Layer, number: i64) -> Ms {
        match (layer.kind, layer.period) {
            (Kind::Sliding, _) => (number as u64 * layer.period_ms()).div_ceil(8),
            (Kind::FirstRequest, _) => self.opened.unwrap_or_default() + number as u64 * layer.period_ms(),
            (Kind::Aligned(_), Period::Month) => month_begin_ms(number),
            (Kind::Aligned(start), Period::Fixed(period_ms)) => start % period_ms + number as u64 * period_ms,
        }
    }

    /// When the current window was opened by a first request; `None`: the next request opens one. A window is open while a token
    /// of it is used; windows that depend on each other follow one another as long.
    fn opened_at(&self, layer: &Layer, accumulates: bool, now: Ms) -> Option<Ms> {
        let (opened, number) = (self.opened?, self.number(layer, now));
        let is_open = match accumulates {
            true => self.accumulated(layer, number) < layer.capacity(),
            false => self.used.get(&number).is_some_and(|used| *used > 0),
        };
        is_open.then_some(opened)
    }

    /// The value in a window: each window since the last change has added the limit, up to the capacity.
    fn accumulated(&self, layer: &Layer, number: i64) -> i64 {
        match self.value {
            None => layer.capacity(),
            Some((last, value)) => (value + layer.limit * (number - last)).min(layer.capacity()),
        }
    }

    fn left(&self, layer: &Layer, accumulates: bool, now: Ms) -> i64 {
        let number = self.number(layer, now);
        if layer.kind == Kind::FirstRequest && self.opened_at(layer, accumulates, now).is_none() {
            return layer.capacity();
        }
        if accumulates {
            return self.accumulated(layer, number);
        }
        // A token counts until the last of its segment is one period old.
        let oldest = if layer.kind == Kind::Sliding { number - 8 } else { number };
        layer.limit - self.used.range(oldest..=number).map(|(_, used)| used).sum::<i64>()
    }

    /// Time until so many tokens are left.
    fn wait_ms(&self, layer: &Layer, accumulates: bool, now: Ms, needed: i64) -> Ms {
        let number = self.number(layer, now);
        let mut ends = (1..).map(|ahead| self.begin_ms(layer, number + ahead));
        ends.find(|end| self.left(layer, accumulates, *end) >= needed).unwrap() - now
    }

    fn reset_ms(&self, layer: &Layer, accumulates: bool, now: Ms) -> Option<Ms> {
        let is_closed = layer.kind == Kind::FirstRequest && self.opened_at(layer, accumulates, now).is_none();
        if layer.kind == Kind::Sliding || is_closed || self.left(layer, accumulates, now) < 0 {
            return None;
        }
        Some(self.begin_ms(layer, self.number(layer, now) + 1) - now)
    }
}

/// Months since January 1970, by counting days.
fn month_number(now: Ms) -> i64 {
    let number = (now / DAY_MS / 28) as i64;
    (0..=number).rev().find(|number| month_begin_ms(*number) <= now).unwrap()
}

fn month_begin_ms(number: i64) -> Ms {
    let is_leap = |year: i64| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let (years, months) = (1970..1970 + number / 12, number % 12);
    let year = years.end;
    let of_years: i64 = years.map(|year| if is_leap(year) { 366 } else { 365 }).sum();
    let lengths = [31, if is_leap(year) { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let of_months: i64 = lengths[..months as usize].iter().sum();
    (of_years + of_months) as Ms * DAY_MS
}
