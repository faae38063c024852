//! The result of a simulation, as numbers and as JSON.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::log_files::{BadLine, ReadCounts};
use super::replay::{KeyInput, Replay, RuleInputs, candidate_parts};
use super::scenario::{LimitCounts, RuleCounts, Scenario};
use super::statistics::{Minute, TopKey, TopKeys, UsePosition};
use transom_config::key_kind::HOST;
use transom_limiter::handles::{Handle, VariantId};
use transom_limiter::key::OnMissing;
use transom_limiter::rule::{Cost, Rule};
use transom_limiter::rule_set::CompiledRule;
use transom_limiter::window::Windows;

/// Busy keys that are shown.
const TOP: usize = 10;
/// Shares of keys for which a limit is suggested.
const SUGGESTED_SHARES: [f64; 2] = [0.01, 0.001];
/// Points of the curve of what keys ask for.
const CURVE_SHARES: [f64; 8] = [0.5, 0.75, 0.9, 0.95, 0.99, 0.995, 0.999, 1.0];

/// The result of a simulation.
pub struct Report {
    /// The configuration file, and the version of this program.
    pub config: String,
    pub version: &'static str,
    pub logs: Vec<String>,
    /// Unix milliseconds; 0 if no line could be read.
    pub first_ms: u64,
    pub last_ms: u64,
    pub lines: Lines,
    /// What the reader should know: what the log lacks, and what was not simulated.
    pub notes: Vec<String>,
    pub bad_lines: Vec<String>,
    /// The first is the configuration itself.
    pub scenarios: Vec<ScenarioReport>,
}

/// What became of the lines.
pub struct Lines {
    pub total: u64,
    pub decided: u64,
    pub unrouted: u64,
    pub rejected: u64,
    pub denied: u64,
    pub without_key: u64,
    pub bad: u64,
    pub out_of_order: u64,
    pub late: u64,
    /// Of a log of this gateway: decisions as in the log, and others.
    pub same: u64,
    pub different: u64,
}

/// One scenario.
pub struct ScenarioReport {
    pub name: String,
    pub decided: u64,
    pub refused: u64,
    pub rules: Vec<RuleReport>,
}

/// One rule.
pub struct RuleReport {
    pub name: String,
    pub key: String,
    pub requests: u64,
    pub admitted: u64,
    pub refused: u64,
    pub refused_elsewhere: u64,
    pub shadowed: u64,
    pub delayed: u64,
    pub not_counted: u64,
    pub keys: u64,
    pub keys_refused: u64,
    /// One of so many keys was looked at; 1: all.
    pub sampled_one_of: u64,
    pub worst_minute: Minute,
    pub windows: Vec<WindowReport>,
    pub busiest: Busiest,
    pub most_refused: Busiest,
    pub timeline: TimelineReport,
}

/// One window of a rule.
pub struct WindowReport {
    /// As in responses and metrics.
    pub name: String,
    /// The plan, if it is not the default.
    pub plan: Option<String>,
    pub limit: u32,
    /// `None` for the limit of requests in flight.
    pub period: Option<String>,
    /// Requests that found the window full.
    pub refused: u64,
    /// Tokens that a key asks for in a window, or its requests in flight, refused or not, at these shares.
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub max: u64,
    /// The share of windows, or of requests, in which a key asks for more than the limit.
    pub share_above: f64,
    /// Shares of windows, and the tokens that are not exceeded in so many.
    pub curve: Vec<(f64, u64)>,
    /// Shares of keys, and the limit that would have refused no more of them.
    pub suggested: Vec<(f64, u64)>,
}

/// The keys with the most requests.
pub struct Busiest {
    pub keys: Vec<TopKey>,
    /// How much a count may be too low.
    pub error: u64,
}

/// Requests over time.
pub struct TimelineReport {
    pub start_ms: u64,
    pub bucket_ms: u64,
    /// Requests, and those refused.
    pub buckets: Vec<(u64, u64)>,
}

impl Report {
    pub fn new(config: String, logs: Vec<String>, read: &ReadCounts, replay: &Replay) -> Report {
        let counts = &replay.counts;
        let bad_line = |line: &BadLine| format!("{}:{}: {}: {}", line.file, line.number, line.reason, line.excerpt);
        Report {
            config,
            version: env!("CARGO_PKG_VERSION"),
            logs,
            first_ms: counts.first_ms,
            last_ms: counts.last_ms,
            lines: Lines {
                total: read.lines,
                decided: counts.played,
                unrouted: counts.unrouted,
                rejected: counts.rejected + read.rejected,
                denied: counts.denied,
                without_key: counts.without_key,
                bad: read.bad,
                out_of_order: read.out_of_order,
                late: counts.late,
                same: replay.scenarios[0].same,
                different: replay.scenarios[0].different,
            },
            notes: notes(read, replay),
            bad_lines: read.bad_lines.iter().map(bad_line).collect(),
            scenarios: replay.scenarios.iter().map(ScenarioReport::new).collect(),
        }
    }

    /// `None` if no line could be read.
    fn time_text(&self, unix_ms: u64) -> Option<String> {
        (self.first_ms > 0).then(|| rfc3339(unix_ms))
    }

    pub fn to_json(&self) -> Value {
        let Lines { total, decided, unrouted, rejected, denied, without_key, bad, out_of_order, late, same, different } =
            self.lines;
        json!({
            "logs": self.logs,
            "first": self.time_text(self.first_ms),
            "last": self.time_text(self.last_ms),
            "lines": {
                "total": total, "decided": decided, "unrouted": unrouted, "rejected": rejected,
                "denied": denied, "without_key": without_key, "bad": bad, "out_of_order": out_of_order, "late": late,
            },
            "as_logged": { "same": same, "different": different },
            "notes": self.notes,
            "bad_lines": self.bad_lines,
            "scenarios": self.scenarios.iter().map(ScenarioReport::to_json).collect::<Vec<_>>(),
        })
    }
}

impl ScenarioReport {
    fn new(scenario: &Scenario) -> ScenarioReport {
        let rules = scenario.rule_set.rules.iter().zip(&scenario.rules);
        ScenarioReport {
            name: scenario.name.clone(),
            decided: scenario.decided,
            refused: scenario.refused,
            rules: rules.map(|(rule, counts)| RuleReport::new(rule, counts)).collect(),
        }
    }

    fn to_json(&self) -> Value {
        json!({
            "name": self.name, "decided": self.decided, "refused": self.refused,
            "rules": self.rules.iter().map(RuleReport::to_json).collect::<Vec<_>>(),
        })
    }
}

impl RuleReport {
    fn new(compiled: &CompiledRule, counts: &RuleCounts) -> RuleReport {
        let rule = &compiled.rule;
        let plan = |variant: VariantId| match (rule.plan_of(variant), rule.override_of(variant)) {
            (Some(plan), _) => Some(format!("plan {}", plan.name)),
            (None, Some((number, _))) => Some(format!("override {number}")),
            (None, None) => (variant != VariantId::DEFAULT).then(|| String::from("limits of a client")),
        };
        let window = |variant: VariantId,
                      position: UsePosition,
                      of: &LimitCounts,
                      name: &str,
                      limit: u32,
                      period: Option<&String>| {
            let asked = &of.asked;
            let maxima = counts.keys.maxima(variant, position);
            WindowReport {
                name: name.to_owned(),
                plan: plan(variant),
                limit,
                period: period.cloned(),
                refused: of.full,
                p50: asked.quantile(0.5),
                p90: asked.quantile(0.9),
                p99: asked.quantile(0.99),
                max: asked.max,
                share_above: asked.share_above(limit.into()),
                curve: CURVE_SHARES.map(|share| (share, asked.quantile(share))).to_vec(),
                suggested: SUGGESTED_SHARES.map(|share| (share, suggested_limit(&maxima, share))).to_vec(),
            }
        };
        let mut windows = Vec::new();
        for ((variant, limits), concurrent) in compiled.variants().zip(rule.concurrent_variants()) {
            let mut count = 0;
            for (position, (layer, limit)) in limits.enumerate() {
                count += 1;
                let of = &counts.layers[layer.position];
                // Plans and overrides that no request has are left out.
                if variant == VariantId::DEFAULT || of.asked.total() > 0 {
                    let name = compiled.layer_name(layer);
                    windows.push(window(
                        variant,
                        UsePosition::at(position),
                        of,
                        name,
                        limit.tokens,
                        Some(&limit.period_text),
                    ));
                }
            }
            let of = &counts.slots[variant];
            if let (Some(limit), Some(name), 1..) = (concurrent, compiled.concurrent_name(), of.asked.total()) {
                windows.push(window(variant, UsePosition::at(count), of, name, limit, None));
            }
        }
        let busiest = |top: &TopKeys| Busiest { keys: top.top(TOP), error: top.error() };
        let timeline = &counts.timeline;
        RuleReport {
            name: rule.name.clone(),
            key: rule.key.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            requests: counts.requests,
            admitted: counts.admitted,
            refused: counts.refused,
            refused_elsewhere: counts.refused_elsewhere,
            shadowed: counts.shadowed,
            delayed: counts.delayed,
            not_counted: counts.not_counted,
            keys: counts.keys.key_count(),
            keys_refused: counts.keys.refused_count(),
            sampled_one_of: counts.keys.one_of(),
            worst_minute: timeline.worst_minute(),
            windows,
            busiest: busiest(&counts.busiest),
            most_refused: busiest(&counts.most_refused),
            timeline: TimelineReport {
                start_ms: timeline.start_ms,
                bucket_ms: timeline.bucket_ms,
                buckets: timeline.buckets.clone(),
            },
        }
    }

    /// The limits of the rule, and those of plans and overrides that requests had.
    pub fn limits_text(&self) -> String {
        let of_one_plan = self.windows.chunk_by(|one, next| one.plan == next.plan);
        let texts = of_one_plan.map(|windows| {
            let limits = windows.iter().map(WindowReport::limit_text).collect::<Vec<_>>().join(", ");
            match &windows[0].plan {
                None => limits,
                Some(plan) => format!("{plan}: {limits}"),
            }
        });
        texts.collect::<Vec<_>>().join("; ")
    }

    /// Requests that the rule refused, or would have refused as a shadow rule.
    pub fn refused_or_shadowed(&self) -> u64 {
        self.refused + self.shadowed
    }

    fn to_json(&self) -> Value {
        let top = |busiest: &Busiest, key: fn(&TopKey) -> Value| json!({ "error": busiest.error, "keys": busiest.keys.iter().map(key).collect::<Vec<_>>() });
        let busiest =
            top(&self.busiest, |key| json!({ "key": key.label, "requests": key.count, "refused": key.refused }));
        let most_refused = top(&self.most_refused, |key| json!({ "key": key.label, "refused": key.refused }));
        let minute = self.worst_minute;
        let minute = (minute.requests > 0).then(
            || json!({ "start": rfc3339(minute.start_ms), "requests": minute.requests, "refused": minute.refused }),
        );
        json!({
            "rule": self.name, "key": self.key, "requests": self.requests, "admitted": self.admitted,
            "refused": self.refused, "refused_by_others": self.refused_elsewhere, "shadowed": self.shadowed,
            "delayed": self.delayed, "not_counted": self.not_counted,
            "keys": { "total": self.keys, "refused": self.keys_refused, "sampled_one_of": self.sampled_one_of },
            "worst_minute": minute,
            "windows": self.windows.iter().map(WindowReport::to_json).collect::<Vec<_>>(),
            "busiest": busiest, "most_refused": most_refused,
            "timeline": {
                "start": rfc3339(self.timeline.start_ms), "bucket_ms": self.timeline.bucket_ms,
                "requests": self.timeline.buckets.iter().map(|bucket| bucket.0).collect::<Vec<_>>(),
                "refused": self.timeline.buckets.iter().map(|bucket| bucket.1).collect::<Vec<_>>(),
            },
        })
    }
}

impl WindowReport {
    /// Whether no request took anything from the window, for example because all clients have a plan.
    pub fn is_unused(&self) -> bool {
        self.max == 0
    }

    /// The name, with the plan if it is not the default.
    pub fn title(&self) -> String {
        let plan = self.plan.as_ref().map(|plan| format!(" ({plan})")).unwrap_or_default();
        format!("{}{plan}: {}", self.name, self.limit_text())
    }

    /// The limit as in a configuration.
    pub fn limit_text(&self) -> String {
        match &self.period {
            Some(period) => format!("{}/{period}", self.limit),
            None => format!("{} at a time", self.limit),
        }
    }

    /// What a share above the limit is a share of.
    pub fn counted_by(&self) -> &'static str {
        if self.period.is_some() { "windows" } else { "requests" }
    }

    fn to_json(&self) -> Value {
        let suggested = self.suggested.iter();
        json!({
            "name": self.name, "plan": self.plan, "limit": self.limit, "period": self.period, "refused": self.refused,
            "asked": { "p50": self.p50, "p90": self.p90, "p99": self.p99, "max": self.max, "share_above": self.share_above },
            "suggested": suggested.map(|(share, limit)| json!({ "share_of_keys": share, "limit": limit })).collect::<Vec<_>>(),
        })
    }
}

/// The smallest limit that no more than this share of keys ask for more than. `maxima` are descending.
fn suggested_limit(maxima: &[u32], share: f64) -> u64 {
    let refused = (maxima.len() as f64 * share) as usize;
    maxima.get(refused).copied().unwrap_or_default().max(1).into()
}

pub fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

pub fn rfc3339(unix_ms: u64) -> String {
    let time = i64::try_from(unix_ms).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
    time.map(|time| format!("{time:.0}")).unwrap_or_default()
}

/// What the log lacks, and what was not simulated.
fn notes(read: &ReadCounts, replay: &Replay) -> Vec<String> {
    let (counts, config) = (&replay.counts, replay.config());
    let mut notes = Vec::new();
    for (rule, inputs) in config.rules.iter().zip(&replay.inputs) {
        notes.extend(missing_inputs(rule, inputs));
        let name = &rule.name;
        if rule.concurrent_name().is_some() && inputs.requests > 0 {
            notes.extend(
                match inputs.with_duration {
                    0 => Some("`concurrent` was not simulated, because the log has no durations".to_owned()),
                    with if with < inputs.requests => {
                        Some(format!("{with} of {} lines have a duration; the others hold no slot", inputs.requests))
                    }
                    _ if !counts.has_fractions => {
                        Some("requests in flight are an estimate, because times are whole seconds: log milliseconds, in nginx by `$msec`".to_owned())
                    }
                    _ => None,
                }
                .map(|note| format!("rule `{name}`: {note}")),
            );
        }
        if let Cost::Response { source, reserve, .. } = &rule.cost
            && inputs.without_response_cost > 0
        {
            let stated = match source {
                Some(name) => format!("response field `{name}`"),
                None if rule.bytes.is_some() => "sizes that are read".to_owned(),
                None => "usage".to_owned(),
            };
            notes.push(format!(
                "rule `{name}`: {} of {} lines have no {stated} and cost {reserve}",
                inputs.without_response_cost, inputs.requests
            ));
        }
        if inputs.without_grpc_status > 0 {
            notes.push(format!(
                "rule `{name}`: {} of {} lines have no `grpc_status` and are counted",
                inputs.without_grpc_status, inputs.requests
            ));
        }
        let sliding = rule.layers.iter().any(|limit| matches!(limit.windows, Windows::Sliding { .. }));
        if sliding {
            notes.push(format!("rule `{name}`: usage of a sliding window is the most in any interval of its period"));
        }
    }
    if counts.without_host > 0 && config.routes.iter().any(|route| !route.hosts.is_empty()) {
        notes.push(format!(
            "{} of {} lines name no host: they match no route with `host`",
            counts.without_host, read.lines
        ));
    }
    if counts.without_scheme > 0 && config.routes.iter().any(|route| route.secure.is_some()) {
        notes.push(format!(
            "{} of {} lines have no scheme: for routes with `scheme`, it was taken for {}",
            counts.without_scheme,
            read.lines,
            replay.assumed_scheme()
        ));
    }
    if config.routes.iter().any(|route| !route.headers.is_empty()) {
        notes.push("routes with `headers` match only lines that have these request fields".to_owned());
    }
    if counts.ignored_forwarded > 0 {
        notes.push(format!(
            "{} lines have an `X-Forwarded-For` of a peer that is not in `listen.trusted_proxies`: the peer counts as the client",
            counts.ignored_forwarded
        ));
    }
    if read.without_zone > 0 {
        notes.push(format!("{} times have no time zone: they were taken for UTC", read.without_zone));
    }
    if counts.late > 0 {
        notes.push(format!(
            "{} lines are too far out of order: they were decided at the time of the line before",
            counts.late
        ));
    }
    notes.extend(replay.scenarios.iter().skip(1).filter_map(unused_candidate));
    for scenario in &replay.scenarios {
        let overflow = scenario.table.overflow_charges_total();
        if overflow > 0 {
            notes.push(format!(
                "{}: the counter table was full for {overflow} charges: raise `counters.capacity` (now {})",
                scenario.name, config.counters.capacity
            ));
        }
    }
    notes
}

/// Says if no request had the limits that a candidate changes, because clients have other plans.
fn unused_candidate(scenario: &Scenario) -> Option<String> {
    let (name, plan, _windows) = candidate_parts(&scenario.name)?;
    let id = scenario.rule_set.rules.position(|compiled| compiled.rule.name == name)?;
    let (compiled, counts) = (&scenario.rule_set.rules[id], &scenario.rules[id]);
    let variant = plan.map_or(VariantId::DEFAULT, |plan| compiled.rule.variant_of_plan(plan));
    let is_unused = counts.requests > 0 && counts.by_variant[variant] == 0;
    is_unused.then(|| match plan {
        Some(plan) => {
            format!("`--try {}` changes nothing: no request is of a client with plan `{plan}`", scenario.name)
        }
        None => format!(
            "`--try {}` changes nothing: all clients have a plan or an override; write `{name}:PLAN=WINDOW,WINDOW`",
            scenario.name
        ),
    })
}

/// Says how many lines lack a part of the rule's key or the cost, and what that means.
fn missing_inputs(rule: &Rule, inputs: &RuleInputs) -> Vec<String> {
    let effect = match &rule.on_missing {
        OnMissing::Never | OnMissing::Refuse => "the rule decided nothing for the others".to_owned(),
        OnMissing::Skip => "the rule was skipped for the others".to_owned(),
        OnMissing::Fallback(parts) => {
            let names: Vec<String> = parts.iter().map(|part| format!("`{part}`")).collect();
            format!("the others were counted by {}", names.join(", "))
        }
    };
    let lacking = inputs.parts.iter().filter(|part| part.present < inputs.requests);
    let note = |part: &KeyInput| {
        let effect = if part.name == HOST.part.name { "the others count as of one host" } else { &effect };
        format!("rule `{}`: {} of {} lines have `{}`; {effect}", rule.name, part.present, inputs.requests, part.name)
    };
    let cost = inputs.cost.iter().filter(|cost| cost.present < inputs.requests);
    let cost_note = |cost: &KeyInput| match &rule.cost {
        Cost::Request { default, .. } => Some(format!(
            "rule `{}`: {} of {} lines have `{}`; the others cost {default}",
            rule.name, cost.present, inputs.requests, cost.name
        )),
        Cost::Fixed(_) | Cost::Response { .. } => None,
    };
    lacking.map(note).chain(cost.filter_map(cost_note)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::Histogram;

    #[test]
    fn the_suggested_limit_refuses_no_more_than_the_share() {
        let maxima: Vec<u32> = (1..=1000).rev().collect();
        assert_eq!((suggested_limit(&maxima, 0.01), suggested_limit(&maxima, 0.001)), (990, 999));
        assert_eq!((suggested_limit(&[7, 3], 0.01), suggested_limit(&[], 0.01)), (7, 1));
        let mut asked = Histogram::default();
        (1..=100).for_each(|value| asked.add(value, 1));
        assert!((asked.share_above(90) - 0.1).abs() < 1e-9);
    }
}
