//! Random configurations and requests against a model of the documentation.
//!
//! Each configuration has a few rules of all kinds. Requests go through real gateways, at times that the test chooses, and every
//! response is compared with `support/counting_model.rs`: status, windows that refuse, `Retry-After`, and what `RateLimit` states.
//! A failure prints the configuration, the requests and the seed. `make counting` compares more configurations.
//!
//! With one gateway alone, some requests are held by the server, and so keep their slots, or wait for a later window.
//!
//! Deliberate mistakes that these tests notice: a refund after the response is dropped; a rule of one gateway does not count
//! refusals after a request to another route; a segment of a sliding window expires one segment too early; a refused request is
//! not charged in the store; a cost beyond the reserve is not charged in the store; a key gets one slot too many; a report after an
//! outage loses its tokens. With more configurations: leased tokens of an ended window pay for a refused request; a request that
//! has waited is not charged in the windows that have begun meanwhile.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fastrand::Rng;

use crate::support::client::{self, Client, HttpResponse};
use crate::support::counting_model::{
    BAD_STATUS, Begun, Cost, Decision, Item, Key, Kind, Layer, MissingKey, Model, Ms, Period, Request, Route, Rule,
    Sharing,
};
use crate::support::gateway::Gateway;
use crate::support::process::Process;
use crate::support::ratelimit_parser::{self, items};
use crate::support::redis::RedisServer;
use crate::support::upstream::{Upstream, reply};
use crate::support::{DEADLINE, eventually, holds_within, seeded_rng};

/// Keys of requests: values of a field, and addresses.
const FIELDS: [&str; 4] = ["k0", "k1", "k2", "k3"];
const ADDRESSES: [&str; 3] = ["198.51.100.1", "198.51.100.2", "203.0.113.3"];
/// The client on the plan.
const ON_PLAN: &str = "k1";
/// Statuses of the upstream.
const STATUSES: [u16; 4] = [200, 401, 404, 500];
/// Greatest number of days that one step of the clock skips.
const LONG_STEP_DAYS: u64 = 70;

const SECOND_MS: Ms = 1000;
const MINUTE_MS: Ms = 60 * SECOND_MS;
const HOUR_MS: Ms = 60 * MINUTE_MS;
const DAY_MS: Ms = 24 * HOUR_MS;

const PERIODS: [(&str, Period); 13] = [
    ("250ms", Period::Fixed(250)),
    ("second", Period::Fixed(SECOND_MS)),
    ("10s", Period::Fixed(10 * SECOND_MS)),
    ("minute", Period::Fixed(MINUTE_MS)),
    ("90s", Period::Fixed(90 * SECOND_MS)),
    ("7m", Period::Fixed(7 * MINUTE_MS)),
    ("15m", Period::Fixed(15 * MINUTE_MS)),
    ("hour", Period::Fixed(HOUR_MS)),
    ("5h", Period::Fixed(5 * HOUR_MS)),
    ("day", Period::Fixed(DAY_MS)),
    ("week", Period::Fixed(7 * DAY_MS)),
    ("20d", Period::Fixed(20 * DAY_MS)),
    ("month", Period::Month),
];

/// With a store, whose clock goes on while requests are under way, windows and segments end between the ticks of the test.
const TICK_MS: Ms = 10 * MINUTE_MS;
const TICK_PERIODS: [(&str, Period); 7] = [
    ("10m", Period::Fixed(TICK_MS)),
    ("20m", Period::Fixed(2 * TICK_MS)),
    ("30m", Period::Fixed(3 * TICK_MS)),
    ("hour", Period::Fixed(6 * TICK_MS)),
    ("80m", Period::Fixed(8 * TICK_MS)),
    ("160m", Period::Fixed(16 * TICK_MS)),
    ("day", Period::Fixed(144 * TICK_MS)),
];

/// What configurations contain.
#[derive(Clone, Copy)]
struct Scope {
    has_store: bool,
    /// Whether windows end.
    has_steps: bool,
    /// Charges that the response decides, counted refusals and penalties: these reach other gateways a little later.
    has_late_charges: bool,
}

struct Configuration {
    rules: Vec<Rule>,
    routes: Vec<Route>,
}

fn pick<T: Copy>(rng: &mut Rng, choices: &[T]) -> T {
    choices[rng.usize(..choices.len())]
}

/// True once in `n` times.
fn one_in(rng: &mut Rng, n: u32) -> bool {
    rng.u32(..n) == 0
}

/// Layers, with periods in ascending order: no layer may have a larger limit than one with longer windows.
fn random_layers(rng: &mut Rng, scope: Scope, smallest: i64, most: usize) -> Vec<Layer> {
    let periods: &[_] = if scope.has_store { &TICK_PERIODS } else { &PERIODS };
    let mut chosen = rng.choose_multiple(periods.iter().enumerate(), most.min(periods.len()));
    chosen.sort_by_key(|(position, _)| *position);
    let mut limit = smallest;
    let mut layers = Vec::new();
    for (_, &(period_text, period)) in chosen {
        let kind = match (rng.u8(..6), period) {
            (0 | 1, Period::Fixed(_)) => Kind::FirstRequest,
            // The segments of a window, too, end at ticks.
            (2 | 3, Period::Fixed(ms)) if !scope.has_store || ms % (8 * TICK_MS) == 0 => Kind::Sliding,
            (4, Period::Fixed(_)) => Kind::Aligned((2_000_000 + rng.u64(..1_000_000)) * TICK_MS),
            _ => Kind::Aligned(0),
        };
        let capacity = (kind != Kind::Sliding && one_in(rng, 4)).then(|| limit + rng.i64(0..=limit));
        layers.push(Layer { period_text, period, kind, limit, capacity, reserve: 0, shards: 1 });
        limit += rng.i64(0..6);
    }
    layers
}

/// Layers of a plan or an override.
fn other_layers(rng: &mut Rng, scope: Scope, smallest: i64) -> Vec<Layer> {
    let number = rng.usize(1..=2);
    let mut layers = random_layers(rng, scope, smallest, number);
    layers.iter_mut().for_each(|layer| layer.capacity = None);
    layers
}

fn random_cost(rng: &mut Rng, scope: Scope, smallest: i64) -> Cost {
    match rng.u8(..if scope.has_late_charges { 9 } else { 7 }) {
        0 | 1 => Cost::Fixed(rng.i64(0..=smallest)),
        2 | 3 => {
            // The greatest may be more than a window ever holds.
            let max = rng.i64(1..=smallest + 4);
            Cost::RequestField { default: rng.i64(0..=max.min(smallest)), max }
        }
        7 | 8 => Cost::ResponseField { reserve: rng.i64(0..=smallest.min(3)), max: 2 * smallest + 3 },
        _ => Cost::Fixed(1),
    }
}

fn random_rule(rng: &mut Rng, scope: Scope, number: usize) -> Rule {
    let key = pick(rng, &[Key::Ip, Key::Field, Key::Field, Key::FieldAndIp, Key::Global]);
    let (smallest, most_layers) = (rng.i64(1..6), rng.usize(1..=3));
    let mut layers = random_layers(rng, scope, smallest, most_layers);
    let cost = random_cost(rng, scope, smallest);
    let is_fixed_cost = matches!(cost, Cost::Fixed(_));
    let is_response_cost = matches!(cost, Cost::ResponseField { .. });
    let count_refused = scope.has_late_charges && one_in(rng, 4);
    if is_fixed_cost && one_in(rng, 6) {
        for layer in
            layers.iter_mut().filter(|layer| matches!(layer.kind, Kind::Aligned(_)) && layer.capacity.is_none())
        {
            layer.shards = rng.u32(1..=3).min(layer.limit as u32);
        }
    } else if !layers.iter().any(|layer| layer.kind == Kind::Sliding) && one_in(rng, 6) {
        // No request reserves tokens, but the windows depend on each other.
        layers[0].reserve = 2;
    }
    let is_plain = layers.iter().all(|layer| layer.capacity.is_none() && layer.shards == 1 && layer.reserve == 0);
    let of_key = |rng: &mut Rng| pick(rng, &FIELDS).to_owned();
    let exempt_keys: Vec<_> = (key == Key::Field && one_in(rng, 5)).then(|| of_key(rng)).into_iter().collect();
    let mut overrides = Vec::new();
    if key == Key::Field && one_in(rng, 3) {
        overrides.push((of_key(rng), other_layers(rng, scope, smallest)));
        overrides.retain(|(key, _)| !exempt_keys.contains(key));
    }
    // Other limits of the same windows, which share counters, where each window is counted alone; or other windows.
    let mut plan = (is_plain && !is_response_cost && one_in(rng, 3)).then(|| match one_in(rng, 2) {
        true => vec![Layer { limit: smallest + rng.i64(0..9), ..layers[rng.usize(..layers.len())].clone() }],
        false => other_layers(rng, scope, smallest),
    });
    // What a client on the plan uses beyond the limit of others is owed in windows by first request, which is not documented.
    for layer in plan.iter_mut().flatten().filter(|layer| layer.kind == Kind::FirstRequest) {
        layer.kind = Kind::Aligned(0);
    }
    let penalties_ms = match scope.has_store {
        true => [TICK_MS, 3 * TICK_MS, 20 * TICK_MS],
        false => [SECOND_MS, 10 * MINUTE_MS, 3 * DAY_MS],
    };
    let counted_statuses = [&[401][..], &[200, 404], &[400, 401, 500]];
    Rule {
        name: format!("r{number}"),
        key,
        on_missing_key: pick(rng, &[MissingKey::Refuse, MissingKey::Skip, MissingKey::Ip]),
        layers,
        overrides,
        exempt_keys,
        exempt_addresses: one_in(rng, 8).then(|| pick(rng, &ADDRESSES).to_owned()).into_iter().collect(),
        plan,
        concurrent: one_in(rng, 5).then(|| rng.i64(1..=3)),
        cost,
        count_refused,
        max_delay_ms: None,
        is_shadow: one_in(rng, 8),
        // A cost of 0, or one that no window ever holds, is not documented for penalties.
        penalty_ms: (is_fixed_cost && scope.has_late_charges && one_in(rng, 4)).then(|| pick(rng, &penalties_ms)),
        counted_statuses: (scope.has_late_charges && one_in(rng, 4)).then(|| pick(rng, &counted_statuses).to_vec()),
        sharing: if scope.has_store {
            pick(rng, &[Sharing::Off, Sharing::Lease, Sharing::Exact])
        } else {
            Sharing::Off
        },
    }
}

/// Leaves out what is not exact with a store:
/// - Shards: what is left is known only in part.
/// - Windows by first request, where a response gives all tokens back: they stay open in the store, but not in a gateway.
/// - Refused requests that cost more than a window ever holds: with leases they take nothing of a new window.
/// - Refused requests that count in a sliding window: the gateway then states the end of all of its tokens as `Retry-After`.
/// - Refused requests that count in a window by first request: one token too many may count in the next window.
/// - Leased tokens of windows that depend on each other, and of segments: at the end they are returned a little later.
fn leave_out_inexact(rule: &mut Rule, has_steps: bool) {
    let is_sliding = |layers: &Vec<Layer>| layers.iter().any(|layer| layer.kind == Kind::Sliding);
    let has_sliding =
        rule.overrides.iter().map(|(_, layers)| layers).chain(&rule.plan).any(is_sliding) || is_sliding(&rule.layers);
    if has_steps && rule.sharing == Sharing::Lease && (has_sliding || is_dependent(rule)) {
        rule.sharing = Sharing::Exact;
    }
    let has_first_request = rule.layers.iter().any(|layer| layer.kind == Kind::FirstRequest);
    if (has_sliding || has_first_request) && rule.sharing != Sharing::Off {
        rule.count_refused = false;
    }
    let is_settled = rule.counted_statuses.is_some() || matches!(rule.cost, Cost::ResponseField { .. });
    let count_refused = rule.count_refused;
    if let Cost::RequestField { default, max } = &mut rule.cost
        && count_refused
    {
        *max = rule.layers[0].limit;
        *default = (*default).min(*max);
    }
    for layer in all_layers(rule) {
        layer.shards = 1;
        if layer.kind == Kind::FirstRequest && is_settled {
            layer.kind = Kind::Aligned(0);
        }
    }
}

/// The layers of a rule, and those of its overrides and plan.
fn all_layers(rule: &mut Rule) -> impl Iterator<Item = &mut Layer> {
    let other_layers = rule.overrides.iter_mut().map(|(_, layers)| layers).chain(&mut rule.plan);
    other_layers.chain([&mut rule.layers]).flatten()
}

/// Whether the windows of a rule depend on each other.
fn is_dependent(rule: &Rule) -> bool {
    matches!(rule.cost, Cost::ResponseField { .. })
        || rule.layers.iter().any(|layer| layer.capacity.is_some() || layer.reserve > 0)
}

impl Configuration {
    fn random(rng: &mut Rng, scope: Scope) -> Configuration {
        let number = rng.usize(1..=4);
        let mut rules: Vec<Rule> = (0..number).map(|number| random_rule(rng, scope, number)).collect();
        if scope.has_store {
            rules.iter_mut().for_each(|rule| leave_out_inexact(rule, scope.has_steps));
        }
        let mut routes = vec![Route { rules: (0..number).collect(), cost: None }];
        // A second route with a part of the rules, and perhaps another cost.
        let part: Vec<usize> = (0..number).filter(|_| rng.bool()).collect();
        if !part.is_empty() {
            let of_part = part.iter().map(|position| &rules[*position]);
            let fixed = of_part.filter(|rule| matches!(rule.cost, Cost::Fixed(_))).map(|rule| rule.layers[0].limit);
            let cost = fixed.min().filter(|_| one_in(rng, 2));
            let cost = cost.map(|smallest| rng.i64(i64::from(scope.has_store)..=smallest));
            routes.push(Route { rules: part, cost });
        }
        Configuration { rules, routes }
    }

    /// With a rule that delays for a short time, because waits take as long. What responses decide, and what refusals count after a
    /// wait, is left out.
    fn let_requests_wait(&mut self, rng: &mut Rng) {
        for rule in &mut self.rules {
            (rule.counted_statuses, rule.penalty_ms, rule.count_refused, rule.is_shadow) = (None, None, false, false);
            if matches!(rule.cost, Cost::ResponseField { .. }) {
                rule.cost = Cost::Fixed(1);
            }
        }
        for layer in self.rules.iter_mut().flat_map(all_layers) {
            // A refund after the wait may be lost in windows that depend on each other; in sliding ones, the request counts twice.
            (layer.reserve, layer.capacity) = (0, None);
            layer.kind = if layer.kind == Kind::Sliding { Kind::Aligned(0) } else { layer.kind };
        }
        for cost in self.routes.iter_mut().filter_map(|route| route.cost.as_mut()) {
            *cost = (*cost).min(1);
        }
        let position = rng.usize(..self.rules.len());
        let rule = &mut self.rules[position];
        (rule.concurrent, rule.plan) = (None, None);
        rule.max_delay_ms = Some(pick(rng, &[100, 250]));
        (rule.layers[0].period_text, rule.layers[0].period) = PERIODS[0];
        all_layers(rule).for_each(|layer| layer.shards = 1);
    }

    /// With so many rules of as many layers, at most.
    fn leave_layers(&mut self, most: usize) {
        self.rules.truncate(most);
        for route in &mut self.routes {
            route.rules.retain(|position| *position < most);
            let has_fixed_cost = |position: &usize| matches!(self.rules[*position].cost, Cost::Fixed(_));
            route.cost = route.cost.filter(|_| route.rules.iter().any(has_fixed_cost));
        }
        self.routes.truncate(most);
        self.routes.retain(|route| !route.rules.is_empty());
        for rule in &mut self.rules {
            rule.layers.truncate(most);
            rule.overrides.clear();
            rule.plan = None;
        }
    }

    /// The configuration file, with these settings of the store, if there is one.
    fn toml(&self, upstream: &Upstream, store: &str) -> String {
        let mut toml = format!(
            "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\ntrusted_proxies = \"127.0.0.0/8\"\n\
             [clients]\nfile = \"clients.toml\"\nsubject = \"header:x-key\"\n{store}{}",
            upstream.toml("u")
        );
        for rule in &self.rules {
            toml += &rule_toml(rule, !store.is_empty());
        }
        // The plan has to exist.
        toml +=
            "[rules.unused]\nkey = \"ip\"\nwindows = [\"9/day\"]\n[rules.unused.plans.gold]\nwindows = [\"9/day\"]\n";
        for (number, route) in self.routes.iter().enumerate() {
            let names: Vec<&str> = route.rules.iter().map(|position| self.rules[*position].name.as_str()).collect();
            let cost = route.cost.map_or_else(String::new, |cost| format!("cost = {cost}\n"));
            write!(toml, "[[routes]]\npath = \"/{number}\"\nupstream = \"u\"\nrules = {names:?}\n{cost}").unwrap();
        }
        toml
    }

    fn random_request(&self, rng: &mut Rng) -> Request {
        let field = (!one_in(rng, 12)).then(|| pick(rng, &FIELDS[..]));
        let max = |route: usize| {
            let of_rules = self.routes[route].rules.iter().map(|position| match self.rules[*position].cost {
                Cost::RequestField { max, .. } => max,
                _ => i64::MAX,
            });
            of_rules.min().unwrap()
        };
        let route = rng.usize(..self.routes.len());
        let mut of_route = self.routes[route].rules.iter().map(|position| &self.rules[*position]);
        let least = i64::from(of_route.any(|rule| rule.sharing == Sharing::Lease));
        Request {
            route,
            address: pick(rng, &ADDRESSES).to_owned(),
            field: field.map(str::to_owned),
            is_on_plan: field == Some(ON_PLAN),
            cost: (max(route) < i64::MAX && !one_in(rng, 4)).then(|| rng.i64(least..=max(route))),
            status: pick(rng, &STATUSES),
            response_cost: (!one_in(rng, 4)).then(|| rng.i64(0..9)),
        }
    }
}

fn layers_toml(layers: &[Layer]) -> String {
    let layer = |layer: &Layer| {
        let mut text = format!("{{ limit = {}, period = \"{}\"", layer.limit, layer.period_text);
        match layer.kind {
            Kind::Aligned(0) => {}
            Kind::Aligned(start) => write!(text, ", start = {start}").unwrap(),
            Kind::FirstRequest => text += ", start = \"first-request\"",
            Kind::Sliding => text += ", sliding = true",
        }
        if let Some(capacity) = layer.capacity {
            write!(text, ", capacity = {capacity}").unwrap();
        }
        for (name, value, default) in [("reserve", layer.reserve, 0), ("shards", i64::from(layer.shards), 1)] {
            if value != default {
                write!(text, ", {name} = {value}").unwrap();
            }
        }
        text + " }"
    };
    format!("windows = [{}]\n", layers.iter().map(layer).collect::<Vec<_>>().join(", "))
}

fn rule_toml(rule: &Rule, has_store: bool) -> String {
    let key = match rule.key {
        Key::Ip => "\"ip\"",
        Key::Field => "\"header:x-key\"",
        Key::FieldAndIp => "[\"header:x-key\", \"ip\"]",
        Key::Global => "\"global\"",
    };
    let mut toml = format!("[rules.{}]\nkey = {key}\n{}", rule.name, layers_toml(&rule.layers));
    if matches!(rule.key, Key::Field | Key::FieldAndIp) {
        let on_missing_key = match rule.on_missing_key {
            MissingKey::Refuse => "refuse",
            MissingKey::Skip => "skip",
            MissingKey::Ip => "ip",
        };
        writeln!(toml, "on_missing_key = \"{on_missing_key}\"").unwrap();
    }
    let cost = match rule.cost {
        Cost::Fixed(cost) => cost.to_string(),
        Cost::RequestField { default, max } => {
            format!("{{ request-header = \"x-cost\", default = {default}, max = {max} }}")
        }
        Cost::ResponseField { reserve, max } => {
            format!("{{ response-header = \"x-used\", reserve = {reserve}, max = {max} }}")
        }
    };
    writeln!(toml, "cost = {cost}").unwrap();
    if rule.count_refused {
        toml += "count_refused = true\n";
    }
    if let Some(concurrent) = rule.concurrent {
        writeln!(toml, "concurrent = {concurrent}").unwrap();
    }
    if rule.is_shadow {
        toml += "on_limit = \"shadow\"\n";
    }
    if let Some(max_delay_ms) = rule.max_delay_ms {
        writeln!(toml, "on_limit = \"delay\"\nmax_delay = \"{max_delay_ms}ms\"").unwrap();
    }
    if let Some(penalty_ms) = rule.penalty_ms {
        writeln!(toml, "penalty = \"{}s\"", penalty_ms / SECOND_MS).unwrap();
    }
    if let Some(statuses) = &rule.counted_statuses {
        writeln!(toml, "count_when = {{ status = {statuses:?} }}").unwrap();
    }
    let keys = rule.exempt_keys.iter().map(|key| format!("key:{key}"));
    let exemptions: Vec<String> = keys.chain(rule.exempt_addresses.iter().cloned()).collect();
    if !exemptions.is_empty() {
        writeln!(toml, "exemptions = {exemptions:?}").unwrap();
    }
    if has_store {
        let sharing = match rule.sharing {
            Sharing::Off => "off",
            Sharing::Lease => "lease",
            Sharing::Exact => "exact",
        };
        writeln!(toml, "shared = \"{sharing}\"").unwrap();
    }
    if let Some(layers) = &rule.plan {
        write!(toml, "[rules.{}.plans.gold]\n{}", rule.name, layers_toml(layers)).unwrap();
    }
    for (key, layers) in &rule.overrides {
        write!(toml, "[[rules.{}.overrides]]\nkey = \"{key}\"\n{}", rule.name, layers_toml(layers)).unwrap();
    }
    toml
}

/// The clients file: the client whose field has this value is on the plan.
fn clients_file() -> String {
    format!("[clients.c]\nplan = \"gold\"\nsubjects = [\"{ON_PLAN}\"]\n")
}

/// Responds with the status and the cost that the request states, and to a request with a number once the test releases it.
struct Server {
    upstream: Upstream,
    held: Arc<(Mutex<Held>, Condvar)>,
}

/// The requests that the server has received and not responded to, and the number of the next.
#[derive(Default)]
struct Held {
    numbers: BTreeSet<u64>,
    next: u64,
}

impl Server {
    fn start() -> Server {
        let held: Arc<(Mutex<Held>, Condvar)> = Arc::default();
        let upstream = Upstream::responding({
            let held = Arc::clone(&held);
            move |received| {
                if let Some(number) = received.field("x-hold") {
                    let number = number.parse().unwrap();
                    let mut state = held.0.lock().unwrap();
                    state.numbers.insert(number);
                    held.1.notify_all();
                    let is_held = |state: &mut Held| state.numbers.contains(&number);
                    drop(held.1.wait_timeout_while(state, DEADLINE, is_held).unwrap());
                }
                let status = received.field("x-status").unwrap().parse().unwrap();
                match received.field("x-respond") {
                    Some(cost) => reply(status, &[("X-Used", cost)], b""),
                    None => reply(status, &[], b""),
                }
            }
        });
        Server { upstream, held }
    }

    /// Sends a request, and returns its number when the server has received it; `None`: it was not forwarded.
    fn hold(&self, client: &mut Client, request: &Request) -> Option<u64> {
        let mut state = self.held.0.lock().unwrap();
        let number = state.next;
        state.next += 1;
        client.send(bytes_of(request, Some(number)));
        let is_missing = |state: &mut Held| !state.numbers.contains(&number);
        let (_state, timeout) = self.held.1.wait_timeout_while(state, DEADLINE, is_missing).unwrap();
        (!timeout.timed_out()).then_some(number)
    }

    fn release(&self, number: u64) {
        self.held.0.lock().unwrap().numbers.remove(&number);
        self.held.1.notify_all();
    }
}

fn bytes_of(request: &Request, hold: Option<u64>) -> Vec<u8> {
    let (status, cost) = (request.status.to_string(), request.cost.map(|cost| cost.to_string()));
    let response_cost = request.response_cost.map(|cost| cost.to_string());
    let hold = hold.map(|number| number.to_string());
    let mut fields = vec![("X-Forwarded-For", request.address.as_str()), ("X-Status", &status)];
    fields.extend(request.field.as_deref().map(|field| ("X-Key", field)));
    fields.extend(cost.as_deref().map(|cost| ("X-Cost", cost)));
    fields.extend(response_cost.as_deref().map(|cost| ("X-Respond", cost)));
    fields.extend(hold.as_deref().map(|number| ("X-Hold", number)));
    client::request("GET", &format!("/{}", request.route), &fields, b"")
}

fn send(client: &mut Client, request: &Request) -> HttpResponse {
    client.send(bytes_of(request, None)).read_response()
}

/// What happened in one configuration, for the message of a failure.
struct History {
    seed: u64,
    lines: Vec<String>,
}

impl History {
    fn new(seed: u64, toml: &str) -> History {
        History { seed, lines: vec![toml.to_owned()] }
    }

    fn add(&mut self, line: String) {
        self.lines.push(line);
    }

    #[track_caller]
    fn fail(&self, what: &str) -> ! {
        let number = self.lines.len() - 1;
        panic!(
            "{}\n{what}, with the last of {number} lines; repeat it with TRANSOM_SEED={} TRANSOM_CONFIGURATIONS=1",
            self.lines.join("\n"),
            self.seed
        );
    }
}

fn rounded_up_s(ms: Ms) -> u64 {
    ms.div_ceil(SECOND_MS)
}

/// Whether seconds in a response are those of the model, give or take the time that requests took.
fn is_about(got_s: u64, expected_ms: Ms, slack_s: u64) -> bool {
    got_s.abs_diff(rounded_up_s(expected_ms)) <= slack_s
}

/// How exactly a response states the model's numbers.
#[derive(Clone, Copy)]
enum Precision {
    /// In all numbers.
    Exact,
    /// Requests take up to so many seconds. A gateway refuses by what it knows without asking the store for the rest: windows may
    /// then be missing, and `Retry-After` too early.
    Store { slack_s: u64 },
    /// As `Store`, with outages. Windows by first request may end when the store has learned of them, after the outage.
    Outages { slack_s: u64, may_be_unknown: bool },
}

/// Compares a response with the decision of the model before the request, and the model's state after it.
fn check(
    response: &HttpResponse,
    request: &Request,
    decision: &Decision,
    after: &Model,
    now: Ms,
    precision: Precision,
) -> Result<(), String> {
    let (is_exact, slack_s) = match precision {
        Precision::Exact => (true, 0),
        Precision::Store { slack_s } => (!decision.is_refused(), slack_s),
        // What is left is stated as far as the worker knows, until what others have counted is reported.
        Precision::Outages { slack_s, may_be_unknown } => (!decision.is_refused() && !may_be_unknown, slack_s),
    };
    let expected_status = match decision {
        decision if decision.is_refused() => 429,
        decision if decision.is_bad => BAD_STATUS,
        _ => request.status,
    };
    if response.status != expected_status {
        return Err(format!("expected status {expected_status}, {decision:?}"));
    }
    let (policies, states) = (items(response, "ratelimit-policy"), items(response, "ratelimit"));
    let mut expected = after.items(request, now);
    expected.retain(|item| !decision.unstated.contains(&item.name));
    if !is_exact {
        expected.retain(|item| states.iter().any(|state| state.name == item.name));
    }
    // Policies that are the same for all clients are stated all the same.
    let may_have_policies = expected.len()..=expected.len() + decision.unstated.len();
    if states.len() != expected.len() || (is_exact && !may_have_policies.contains(&policies.len())) {
        return Err(format!("expected {expected:?}"));
    }
    for item in expected {
        let find = |items: &[ratelimit_parser::Item]| items.iter().find(|known| known.name == item.name).cloned();
        let (Some(policy), Some(state)) = (find(&policies), find(&states)) else {
            return Err(format!("expected {item:?}"));
        };
        let is_reset = item.reset_ms.is_none_or(|reset_ms| is_about(state.get("t"), reset_ms, slack_s));
        let is_remaining = state.get("r") == item.remaining as u64;
        if policy.get("q") != item.limit as u64 || (is_exact && !(is_remaining && is_reset)) {
            return Err(format!("expected {item:?}"));
        }
    }
    if !decision.is_refused() {
        let is_refused = response.field("retry-after").is_some();
        return if is_refused { Err("expected no Retry-After".to_owned()) } else { Ok(()) };
    }
    let violated = violated_policies(response);
    if violated.is_empty() || !violated.is_subset(&decision.refusing) || (is_exact && violated != decision.refusing) {
        return Err(format!("expected refusals by {:?}", decision.refusing));
    }
    let retry_after_s: Option<u64> = response.field("retry-after").map(|text| text.parse().unwrap());
    let expected_ms = after.retry_after_ms(request, now).map(|ms| ms.max(1));
    let is_expected = match (retry_after_s, expected_ms) {
        (Some(got_s), Some(expected_ms)) if is_exact => is_about(got_s, expected_ms, slack_s),
        // Of sliding windows, a gateway may know only when the last token expires; with outages, also of others. A gateway that knows
        // of a full window, and not of the penalty that another has started, states one that begins now.
        (Some(got_s), Some(expected_ms)) => {
            let is_later = after.has_sliding_layers(request)
                || after.has_penalties(request)
                || matches!(precision, Precision::Outages { .. });
            is_later || got_s <= rounded_up_s(expected_ms) + slack_s
        }
        (None, None) => true,
        (got_s, _) => got_s.is_some() && !is_exact,
    };
    if !is_expected {
        return Err(format!("expected Retry-After after {expected_ms:?} ms"));
    }
    Ok(())
}

/// The windows that refuse a request, as the response names them.
fn violated_policies(response: &HttpResponse) -> BTreeSet<String> {
    let problem = response.problem();
    let names = problem["violated-policies"].as_array().unwrap().iter();
    names.map(|name| name.as_str().unwrap().to_owned()).collect()
}

/// Whether a response admits what the model refuses, or states more tokens than it.
fn is_laxer(response: &HttpResponse, decision: &Decision, expected: &[Item]) -> bool {
    let remaining = |name: &str| expected.iter().find(|item| item.name == name).map_or(0, |item| item.remaining as u64);
    let states_more = || items(response, "ratelimit").iter().any(|state| state.get("r") > remaining(&state.name));
    response.status != 429 && (decision.is_refused() || states_more())
}

fn describe(now: Ms, request: &Request, response: &HttpResponse) -> String {
    let field = |name: &str| response.field(name).unwrap_or("-").to_owned();
    format!(
        "{now} /{} {} {} cost {:?} respond {} {:?}: {} {} retry {} {}",
        request.route,
        request.address,
        request.field.as_deref().unwrap_or("-"),
        request.cost,
        request.status,
        request.response_cost,
        response.status,
        field("ratelimit"),
        field("retry-after"),
        if response.status == 429 { response.text() } else { String::new() }
    )
}

/// The number of configurations; few by default.
fn configurations(default: u64) -> u64 {
    std::env::var("TRANSOM_CONFIGURATIONS").map_or(default, |text| text.parse().expect("a number"))
}

/// A time to go to: often this moment, the end of a window or just before it, and sometimes much later.
fn later(rng: &mut Rng, model: &Model, now: Ms) -> Ms {
    match rng.u8(..10) {
        0..=4 => now,
        5 => now + rng.u64(1..2 * MINUTE_MS),
        6..=8 => {
            let ends = model.ends(now);
            let end = if ends.is_empty() { now } else { ends[rng.usize(..ends.len().min(12))] };
            (end + rng.u64(..3)).saturating_sub(1).max(now)
        }
        _ => {
            let most = pick(rng, &[HOUR_MS, DAY_MS, LONG_STEP_DAYS * DAY_MS]);
            now + rng.u64(..most)
        }
    }
}

/// A request that has no response yet.
struct Open {
    client: Client,
    request: Request,
    begun: Begun,
    stage: Stage,
}

enum Stage {
    /// By the decision of a rule that delays.
    WaitsUntil(Ms),
    /// By the server, under this number. The response states the windows as they were when the request was decided, unless the response
    /// decides what the request costs.
    HeldBy { number: u64, decided: Box<Model>, then: Ms },
}

/// One gateway that counts alone, with a clock that only the test moves, and the requests that are under way.
struct Alone<'a> {
    server: &'a Server,
    gateway: Gateway,
    model: Model,
    history: History,
    now: Ms,
    open: Vec<Open>,
    waited: usize,
}

impl Alone<'_> {
    /// Advances the clock. Requests that wait pass when their windows open; no response decides a charge of an ended window.
    fn go_to(&mut self, then: Ms) {
        let until = |open: &Open| if let Stage::WaitsUntil(until) = open.stage { until } else { Ms::MAX };
        while let Some(position) = (0..self.open.len()).min_by_key(|position| until(&self.open[*position]))
            && until(&self.open[position]) <= then
        {
            self.advance(until(&self.open[position]));
            self.finish(position);
        }
        if then > self.now {
            let is_held = |open: &Open, model: &Model| {
                matches!(open.stage, Stage::HeldBy { .. }) && model.is_settled(&open.request)
            };
            while let Some(position) = self.open.iter().position(|open| is_held(open, &self.model)) {
                self.finish(position);
            }
        }
        self.advance(then);
    }

    fn advance(&mut self, then: Ms) {
        self.gateway.advance(Duration::from_millis(then - self.now));
        self.now = then;
    }

    /// The response to a request that was under way.
    fn finish(&mut self, position: usize) {
        let Open { mut client, request, begun, stage } = self.open.remove(position);
        let decision = match stage {
            Stage::WaitsUntil(_) => self.model.pass(&request, &begun, self.now),
            Stage::HeldBy { number, .. } => {
                self.server.release(number);
                Decision::default()
            }
        };
        let response = client.read_response();
        self.history.add(format!("later: {}", describe(self.now, &request, &response)));
        let is_decided = !decision.is_refused() && self.model.settle(&request, &begun, self.now);
        let (after, then) = match &stage {
            Stage::HeldBy { decided, then, .. } if !is_decided => (decided.as_ref(), *then),
            _ => (&self.model, self.now),
        };
        self.check(&response, &request, &decision, after, then);
        self.model.release(&begun);
    }

    fn check(&self, response: &HttpResponse, request: &Request, decision: &Decision, after: &Model, then: Ms) {
        if let Err(difference) = check(response, request, decision, after, then, Precision::Exact) {
            self.history.fail(&difference);
        }
    }

    fn number_of(&self, outcome: &str) -> u64 {
        self.gateway.metrics().sum("transom_decisions_total", &[("outcome", outcome)])
    }

    /// Sends a request that has to wait, unless another waits until the same time: rules could then charge them in either order.
    fn send_waiting(&mut self, request: Request, until: Ms) {
        const MOST: usize = 3;
        let waits = |open: &Open| matches!(open.stage, Stage::WaitsUntil(other) if other == until);
        if self.waited == MOST || self.open.iter().any(waits) {
            return;
        }
        self.waited += 1;
        let (before, mut client) = (self.number_of("delayed"), self.gateway.client());
        client.send(bytes_of(&request, None));
        self.history.add(format!("{} {request:?} waits until {until}", self.now));
        if !holds_within(DEADLINE, || self.number_of("delayed") > before) {
            self.history.fail("expected the request to wait");
        }
        let begun = self.model.begin(&request, self.now, true);
        self.open.push(Open { client, request, begun, stage: Stage::WaitsUntil(until) });
    }

    /// Sends a request to which the server responds later.
    fn hold(&mut self, request: Request) {
        let mut client = self.gateway.client();
        self.history.add(format!("{} {request:?} is held", self.now));
        let Some(number) = self.server.hold(&mut client, &request) else {
            self.history.add(describe(self.now, &request, &client.read_response()));
            self.history.fail("expected a request at the server");
        };
        let begun = self.model.begin(&request, self.now, true);
        let stage = Stage::HeldBy { number, decided: Box::new(self.model.clone()), then: self.now };
        self.open.push(Open { client, request, begun, stage });
    }
}

/// One gateway that counts alone: every response is exactly that of the model.
#[test]
fn a_gateway_alone_decides_as_documented() {
    const REQUESTS: usize = 150;
    let scope = Scope { has_store: false, has_steps: true, has_late_charges: true };
    let (first, server) = (seeded_rng().get_seed(), Server::start());
    for seed in (0..configurations(50)).map(|number| first.wrapping_add(number)) {
        let mut rng = Rng::with_seed(seed);
        let mut configuration = Configuration::random(&mut rng, scope);
        if one_in(&mut rng, 8) {
            configuration.let_requests_wait(&mut rng);
        }
        let toml = configuration.toml(&server.upstream, "");
        let history = History::new(seed, &toml);
        let mut now = 1_700_000_000_000 + rng.u64(..300 * DAY_MS);
        now -= now % SECOND_MS;
        let gateway = Gateway::start_with_at(&toml, &clients_file(), now / SECOND_MS);
        let mut client = gateway.client();
        let model = Model::new(configuration.rules.clone(), configuration.routes.clone());
        let mut alone = Alone { server: &server, gateway, model, history, now, open: Vec::new(), waited: 0 };
        for _ in 0..REQUESTS {
            let held = |open: &Open| matches!(open.stage, Stage::HeldBy { .. });
            if one_in(&mut rng, 4)
                && let Some(position) = alone.open.iter().position(held)
            {
                alone.finish(position);
            }
            let then = later(&mut rng, &alone.model, alone.now);
            alone.go_to(then);
            let (request, now) = (configuration.random_request(&mut rng), alone.now);
            let decision = alone.model.decide(&request, now);
            let is_answered = decision.is_bad || decision.is_refused();
            if let Some(until) = decision.delayed_until {
                alone.send_waiting(request, until);
            } else if !is_answered
                && alone.open.len() < 4
                && one_in(&mut rng, 8)
                && !alone.model.may_lose_refund(&request)
            {
                alone.hold(request);
            } else {
                let response = send(&mut client, &request);
                alone.history.add(describe(now, &request, &response));
                let begun = alone.model.record(&request, now, !decision.is_refused());
                alone.check(&response, &request, &decision, &alone.model, now);
                alone.model.release(&begun);
            }
        }
        alone.go_to(alone.now + MINUTE_MS);
        while !alone.open.is_empty() {
            alone.finish(0);
        }
        let Alone { gateway, model, history, .. } = alone;
        let metrics = gateway.metrics();
        for ((rule, outcome), expected) in &model.outcomes {
            let got = match *outcome {
                "refunded" => metrics.sum("transom_refunded_total", &[("rule", rule)]),
                outcome => metrics.sum("transom_decisions_total", &[("rule", rule), ("outcome", outcome)]),
            };
            if got != *expected {
                history.fail(&format!("rule {rule}: {got} requests {outcome}, expected {:?}", model.outcomes));
            }
        }
    }
}

/// A store whose clock the test steps from tick to tick. Windows and segments end at ticks, and a second more with each step, so
/// that no request is under way when one ends.
struct SteppedStore {
    redis: RedisServer,
    lead_ms: Ms,
}

impl SteppedStore {
    fn start() -> SteppedStore {
        let mut store = SteppedStore { redis: RedisServer::with_stepped_clock(""), lead_ms: 0 };
        store.step_to_tick();
        store
    }

    fn now(&self) -> Ms {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as Ms + self.lead_ms
    }

    fn step_by(&mut self, ms: Ms) {
        self.lead_ms += ms;
        self.redis.set_clock_offset(Duration::from_millis(self.lead_ms));
    }

    /// To a minute after the beginning of a tick.
    fn step_to_tick(&mut self) {
        self.step_by(TICK_MS - self.now() % TICK_MS + MINUTE_MS);
    }

    fn step_ticks(&mut self, ticks: u64) {
        self.step_by(ticks * TICK_MS + SECOND_MS);
    }

    /// The settings of the store, with names of counters of their own for each configuration.
    fn toml(&self, seed: u64, settings: &str) -> String {
        format!("[counters.shared]\nredis = \"{}\"\nprefix = \"c{seed}\"\n{settings}\n", self.redis.url())
    }

    /// The tokens that the store counts as used of each rule.
    fn used_of_rules(&self, seed: u64, rules: &[Rule]) -> Vec<i64> {
        let script = "local used = 0
            for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
              if redis.call('TYPE', key).ok == 'string' then
                used = used + redis.call('GET', key)
              else
                local fields = redis.call('HGETALL', key)
                for i = 1, #fields, 2 do
                  if fields[i] ~= 'window' and fields[i] ~= 'start' then used = used + fields[i + 1] end
                end
              end
            end
            return used";
        let keys_of = |rule: &Rule| format!("c{seed}:{{{}*", rule.name);
        rules.iter().map(|rule| self.redis.integer(&["EVAL", script, "0", &keys_of(rule)])).collect()
    }
}

/// A rule that asks the store for each request, and so tells the gateway the time of the store. Its tokens come back, so that the
/// store has the script for refunds.
const PROBE: &str = "[rules.probe]\nkey = \"global\"\nwindows = [\"1000000/10m\"]\nshared = \"exact\"\non_outage = \"refuse\"\n\
                     count_when = { status = [500] }\n\
                     [[routes]]\npath = \"/probe\"\nrespond = { status = 200 }\nrules = [\"probe\"]\n";

/// Gateways on one store, each with a connection of the test.
struct Gateways {
    processes: Vec<Process>,
    clients: Vec<Client>,
}

impl Gateways {
    fn start(number: usize, toml: &str) -> Gateways {
        Gateways::with_workers(number, 1, toml)
    }

    fn with_workers(number: usize, workers: usize, toml: &str) -> Gateways {
        let toml = format!("workers = {workers}\n{toml}{PROBE}");
        let processes: Vec<Process> = (0..number).map(|_| Process::spawn_with(&toml, &clients_file())).collect();
        let clients = processes.iter().map(Process::client).collect();
        Gateways { processes, clients }
    }

    /// Ends the gateways, which return what they have leased.
    fn end(mut self) {
        self.clients.clear();
        for process in &mut self.processes {
            process.signal("TERM");
            process.wait();
        }
    }

    /// Steps the clock, once what the gateways have sent to the store is counted: it was sent before the next tick.
    fn step(&mut self, store: &mut SteppedStore, rng: &mut Rng) {
        self.follow(store);
        store.step_ticks(pick(rng, &[1, 1, 2, 3, 7, 16, 150]));
        self.follow(store);
    }

    /// Waits until all gateways have the time of the store.
    fn follow(&mut self, store: &SteppedStore) {
        for client in &mut self.clients {
            eventually("the gateway follows the store's clock", || {
                let response = client.get("/probe");
                let left_ms = TICK_MS - store.now() % TICK_MS;
                response.status == 200 && is_about(items(&response, "ratelimit")[0].get("t"), left_ms, 2)
            });
        }
    }
}

/// One gateway with a store: rules that are counted in different places decide exactly as without one.
#[test]
fn a_gateway_with_a_store_decides_as_documented() {
    const REQUESTS: usize = 120;
    let (first, server, mut store) = (seeded_rng().get_seed(), Server::start(), SteppedStore::start());
    for seed in (0..configurations(12)).map(|number| first.wrapping_add(number)) {
        let mut rng = Rng::with_seed(seed);
        let scope = Scope { has_store: true, has_steps: rng.bool(), has_late_charges: true };
        let configuration = Configuration::random(&mut rng, scope);
        store.step_to_tick();
        let toml = configuration.toml(&server.upstream, &store.toml(seed, "timeout = \"10s\""));
        let mut history = History::new(seed, &toml);
        let mut gateways = Gateways::start(1, &toml);
        gateways.follow(&store);
        let mut model = Model::new(configuration.rules.clone(), configuration.routes.clone());
        for _ in 0..REQUESTS {
            if scope.has_steps && one_in(&mut rng, 4) {
                gateways.step(&mut store, &mut rng);
            }
            let request = configuration.random_request(&mut rng);
            let now = store.now();
            let decision = model.decide(&request, now);
            let response = send(&mut gateways.clients[0], &request);
            let took_s = rounded_up_s(store.now() - now);
            history.add(describe(now, &request, &response));
            let begun = model.record(&request, now, !decision.is_refused());
            let precision = Precision::Store { slack_s: 1 + took_s };
            if let Err(difference) = check(&response, &request, &decision, &model, now, precision) {
                history.fail(&difference);
            }
            model.release(&begun);
        }
    }
}

/// Suspends the store, and waits until the gateway has noticed the outage.
fn begin_outage(store: &SteppedStore, gateways: &mut Gateways) {
    store.redis.suspend();
    eventually("the outage is noticed", || {
        gateways.clients[0].get("/probe").status == 503
            && gateways.processes[0].metrics().sum("transom_shared_servers_unreachable", &[]) > 0
    });
}

/// Ends an outage, and waits until the gateway counts in the store again.
fn end_outage(store: &SteppedStore, gateways: &mut Gateways) {
    store.redis.resume();
    eventually("the gateway reaches the store", || {
        gateways.processes[0].metrics().sum("transom_shared_servers_unreachable", &[]) == 0
    });
    gateways.follow(store);
}

/// The model of a gateway whose store goes away. The call of a request that did not wait for its reply is executed when the store
/// returns. Its tokens are refunded unless the reply is lost with its connection; until then, replies to other calls report them.
struct OverOutages {
    model: Model,
    /// Counts late charges twice.
    most: Model,
    history: History,
    is_away: bool,
    /// Unspent tokens that the gateway has leased of each rule, at most.
    leased: Vec<i64>,
    /// Whether the gateway knows only what the store counts.
    is_successor: bool,
}

impl OverOutages {
    const TIMEOUT_MS: Ms = 100;

    fn begin_outage(&mut self, store: &SteppedStore, gateways: &mut Gateways, clients: &mut [Client]) {
        // Each worker has sent what the last requests have caused.
        for client in clients {
            client.get("/probe").expect(200);
        }
        let stored = store.used_of_rules(self.history.seed, self.model.rules());
        self.leased = stored.iter().zip(self.model.used_of_rules(store.now())).map(|(all, used)| all - used).collect();
        self.history.add(format!("the store goes away, leased: {:?}", self.leased));
        begin_outage(store, gateways);
        self.is_away = true;
    }

    fn end_outage(&mut self, store: &SteppedStore, gateways: &mut Gateways) {
        end_outage(store, gateways);
        self.history.add("the store is back".to_owned());
        self.is_away = false;
    }

    /// Whether a response refuses the request in the windows that may do so although tokens are left.
    fn is_refused_too_early(&self, response: &HttpResponse, request: &Request, decision: &Decision, now: Ms) -> bool {
        if !self.is_away || response.status != 429 {
            return false;
        }
        let refusing = violated_policies(response);
        let too_early = self.model.may_exceed_lease(request, &self.leased, now);
        !refusing.is_subset(&decision.refusing) && refusing.is_subset(&(&decision.refusing | &too_early))
    }

    /// Sends a request and compares the response. Returns `false` if it differs by late charges: what the gateway counts from then on
    /// depends on them.
    #[track_caller]
    fn send(&mut self, client: &mut Client, request: &Request, store: &SteppedStore) -> bool {
        let now = store.now();
        let decision = self.model.decide(request, now);
        let response = send(client, request);
        let took_ms = store.now() - now;
        self.history.add(describe(now, request, &response));
        if self.is_refused_too_early(&response, request, &decision, now) {
            return true;
        }
        let had_late_charges = self.has_late_charges(request, now);
        let begun = self.model.record(request, now, !decision.is_refused());
        if self.is_away && took_ms >= OverOutages::TIMEOUT_MS {
            let late = self.most.record(request, now, !decision.is_refused());
            self.most.release(&late);
        }
        let begun_in_most = self.most.record(request, now, !decision.is_refused());
        // The store is not asked for nothing.
        let may_be_unknown = self.is_away || (self.is_successor && self.model.takes_nothing(request));
        let precision = Precision::Outages { slack_s: 10 + rounded_up_s(took_ms), may_be_unknown };
        if let Err(difference) = check(&response, request, &decision, &self.model, now, precision) {
            // Late charges leave less, never more.
            let leaves_less = had_late_charges || self.has_late_charges(request, now);
            if !leaves_less || is_laxer(&response, &decision, &self.model.items(request, now)) {
                self.history.fail(&difference);
            }
            return false;
        }
        self.model.release(&begun);
        self.most.release(&begun_in_most);
        true
    }

    fn has_late_charges(&self, request: &Request, now: Ms) -> bool {
        self.model.items(request, now) != self.most.items(request, now)
    }
}

/// One gateway whose store goes away and returns: with `on_outage = "local"` each window admits its limit, not more and not less, but
/// for late charges. Its successor knows only what the store counts, and decides as it would have.
#[test]
fn a_gateway_decides_as_documented_over_outages() {
    const REQUESTS: usize = 120;
    const REQUESTS_OF_SUCCESSOR: usize = 30;
    let (first, server, mut store) = (seeded_rng().get_seed(), Server::start(), SteppedStore::start());
    for seed in (0..configurations(4)).map(|number| first.wrapping_add(number)) {
        let mut rng = Rng::with_seed(seed);
        let scope = Scope { has_store: true, has_steps: false, has_late_charges: false };
        let mut configuration = Configuration::random(&mut rng, scope);
        configuration.leave_layers(if seed.is_multiple_of(2) { 1 } else { 2 });
        store.step_to_tick();
        let settings = format!("timeout = \"{}ms\"", OverOutages::TIMEOUT_MS);
        let toml = configuration.toml(&server.upstream, &store.toml(seed, &settings));
        let mut gateways = Gateways::with_workers(1, 2, &toml);
        let mut clients: Vec<Client> = (0..4).map(|_| gateways.processes[0].client()).collect();
        gateways.follow(&store);
        let model = Model::new(configuration.rules.clone(), configuration.routes.clone());
        let (most, history) = (model.clone(), History::new(seed, &toml));
        let mut outages = OverOutages { model, most, history, is_away: false, leased: Vec::new(), is_successor: false };
        let is_same = (0..REQUESTS).all(|_| {
            if one_in(&mut rng, 10) {
                match outages.is_away {
                    false => outages.begin_outage(&store, &mut gateways, &mut clients),
                    true => outages.end_outage(&store, &mut gateways),
                }
            }
            let request = configuration.random_request(&mut rng);
            outages.send(&mut clients[rng.usize(..4)], &request, &store)
        });
        if outages.is_away {
            outages.end_outage(&store, &mut gateways);
        }
        if !is_same {
            continue;
        }
        outages.history.add("a successor".to_owned());
        outages.is_successor = true;
        drop(clients);
        gateways.end();
        let mut successor = Gateways::start(1, &toml);
        successor.follow(&store);
        outages.model.forget_local_counters();
        outages.most.forget_local_counters();
        (0..REQUESTS_OF_SUCCESSOR).all(|_| {
            let request = configuration.random_request(&mut rng);
            outages.send(&mut successor.clients[0], &request, &store)
        });
    }
}

/// Several gateways that ask the store for each request decide as one gateway.
#[test]
fn gateways_in_exact_mode_decide_together_as_documented() {
    const REQUESTS: usize = 120;
    let scope = Scope { has_store: true, has_steps: true, has_late_charges: true };
    let (first, server, mut store) = (seeded_rng().get_seed(), Server::start(), SteppedStore::start());
    for seed in (0..configurations(6)).map(|number| first.wrapping_add(number)) {
        let mut rng = Rng::with_seed(seed);
        let mut configuration = Configuration::random(&mut rng, scope);
        let number = configuration.rules.len();
        for rule in &mut configuration.rules {
            rule.sharing = Sharing::Exact;
            leave_out_inexact(rule, true);
            if number > 1 {
                // Where another rule refuses first, a gateway may not know that others have filled the window.
                rule.penalty_ms = None;
            }
        }
        store.step_to_tick();
        let toml = configuration.toml(&server.upstream, &store.toml(seed, "timeout = \"10s\""));
        let mut history = History::new(seed, &toml);
        let mut gateways = Gateways::start(rng.usize(2..=3), &toml);
        gateways.follow(&store);
        let mut model = Model::new(configuration.rules.clone(), configuration.routes.clone());
        for _ in 0..REQUESTS {
            if one_in(&mut rng, 4) {
                gateways.step(&mut store, &mut rng);
            }
            let request = configuration.random_request(&mut rng);
            let now = store.now();
            let decision = model.decide(&request, now);
            let gateway = rng.usize(..gateways.clients.len());
            let response = send(&mut gateways.clients[gateway], &request);
            let took_s = rounded_up_s(store.now() - now);
            history.add(format!("gateway {gateway}: {}", describe(now, &request, &response)));
            let begun = model.record(&request, now, !decision.is_refused());
            // What the gateway has charged or refunded since is in the store before its next decision.
            gateways.clients[gateway].get("/probe").expect(200);
            let precision = Precision::Store { slack_s: 1 + took_s };
            if let Err(difference) = check(&response, &request, &decision, &model, now, precision) {
                history.fail(&difference);
            }
            model.release(&begun);
        }
    }
}

/// Several gateways with leases never admit more than the limit, and in the end all of it.
#[test]
fn gateways_with_leases_admit_all_of_the_limit_and_no_more() {
    const REQUESTS: usize = 120;
    let scope = Scope { has_store: true, has_steps: true, has_late_charges: false };
    let (first, server, mut store) = (seeded_rng().get_seed(), Server::start(), SteppedStore::start());
    for seed in (0..configurations(4)).map(|number| first.wrapping_add(number)) {
        let mut rng = Rng::with_seed(seed);
        let mut configuration = Configuration::random(&mut rng, scope);
        for rule in &mut configuration.rules {
            rule.sharing = pick(&mut rng, &[Sharing::Lease, Sharing::Lease, Sharing::Exact]);
            // Tokens that a gateway fetched for a client on the plan are also spent by others, whose limit is lower.
            rule.plan = None;
        }
        configuration.rules.iter_mut().for_each(|rule| leave_out_inexact(rule, false));
        // Tokens that stay leased when a window ends are lost, where windows depend on each other.
        let may_lose = configuration.rules.iter().any(|rule| rule.sharing == Sharing::Lease && is_dependent(rule));
        store.step_to_tick();
        let toml = configuration.toml(&server.upstream, &store.toml(seed, "timeout = \"10s\""));
        let mut history = History::new(seed, &toml);
        let mut gateways = Gateways::start(rng.usize(2..=3), &toml);
        gateways.follow(&store);
        let mut model = Model::new(configuration.rules.clone(), configuration.routes.clone());
        let mut send_to = |gateways: &mut Gateways, model: &mut Model, now: Ms, gateway: usize, request: &Request| {
            let decision = model.decide(request, now);
            let response = send(&mut gateways.clients[gateway], request);
            history.add(format!("gateway {gateway}: {}", describe(now, request, &response)));
            let is_admitted = response.status != 429;
            if is_admitted && decision.is_refused() {
                history.fail(&format!("admitted beyond the limit: {decision:?}"));
            }
            let begun = model.record(request, now, is_admitted);
            model.release(&begun);
            is_admitted
        };
        for _ in 0..REQUESTS {
            if one_in(&mut rng, 8) {
                gateways.step(&mut store, &mut rng);
            }
            let request = configuration.random_request(&mut rng);
            let gateway = rng.usize(..gateways.clients.len());
            send_to(&mut gateways, &mut model, store.now(), gateway, &request);
        }
        // What is left can be used, through any of the gateways, once the others have returned their leases.
        let (request, start, mut is_late) = (configuration.random_request(&mut rng), Instant::now(), false);
        for number in 0.. {
            let (now, gateway) = (store.now(), number % gateways.clients.len());
            // A request to which no rule applies is never refused.
            if model.decide(&request, now).is_refused() || number > 10_000 || model.items(&request, now).is_empty() {
                break;
            }
            if !send_to(&mut gateways, &mut model, now, gateway, &request) {
                is_late = start.elapsed() > DEADLINE;
                if is_late || may_lose {
                    break;
                }
                thread::sleep(Duration::from_millis(20));
            }
        }
        if is_late {
            history.fail("not all of the limit is used");
        }
    }
}
