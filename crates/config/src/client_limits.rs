//! Limits of single clients: windows of their own in some rules, perhaps until a time. They are in the clients file, or in the store,
//! and come and go while the gateway runs; so they cannot change the kind or the name of a counter.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;

use serde_json::{Value, json};
use toml::de::DeValue;

use super::Config;
use super::access::read_until;
use super::calendar::fill_calendars;
use super::client_grants::ClientGrant;
use super::clients::Client;
use super::diagnostics::{Parsed, Problem, Report, Span, quoted};
use super::named_file::read_text_alone;
use super::rule::{GatewayRule, smallest_capacity, unaffordable};
use super::settings::{Custom, Section, Shape};
use super::toml_reader::{Item, Table, nearest};
use super::window::windows;
use transom_limiter::handles::Handle;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Plan, Rule};
use transom_limiter::secret_digest::Digest;
use transom_limiter::window::Windows;
use transom_limiter::window_kind::WindowKind;

/// Windows of a client in a rule. Each is a counter of its requests, and may be a calendar of its own.
const LAYERS_MAX: usize = 16;
const LIMITS_FIX: &str = "write `[clients.NAME.limits.RULE]`, then its `windows`";

settings! {
    /// Limits of a client in a rule, instead of those of its plan.
    pub struct ClientLimitSettings checked by require_windows {
        /// As in the rule. `capacity`, `reserve`, `shards` and `sliding` only where the rule's windows of this period have them.
        windows: Vec<Limit> = windows();
        /// When the limits end, and those of the plan apply again. Without it: never.
        until: Option<u64> = Custom::or_empty(|| Shape::Text("RFC 3339 time"), |item, report| read_until(item, report).map(Some));
    }
}

fn require_windows(_limits: &mut ClientLimitSettings, table: &mut Table, _report: &mut Report) {
    table.require_known("windows", "write `windows = [\"5000/day\"]`");
}

/// The windows of a client in one rule.
#[derive(Clone, PartialEq, Debug)]
pub struct ClientLimits {
    pub rule: String,
    /// As written: a list of texts and objects.
    pub windows: Value,
    pub layers: Vec<Limit>,
    /// The end of the limits, Unix milliseconds.
    pub until_ms: Option<u64>,
    /// Why limits in the store cannot be read, if so: then they have no windows, and no effect.
    pub unreadable: Option<String>,
}

/// Limits in the clients file, with the position of their rule.
#[derive(Clone, PartialEq, Debug)]
pub struct WrittenLimits {
    pub limits: ClientLimits,
    pub span: Span,
}

/// The setting `limits` of a client: tables by rule.
pub fn limits() -> Custom<Vec<WrittenLimits>> {
    Custom::or_empty(
        || Shape::map_of(Shape::Table(ClientLimitSettings::settings())),
        |item, report| {
            let table = item.table("the limits", LIMITS_FIX, report)?;
            let mut limits: Vec<WrittenLimits> =
                table.items().iter().filter_map(|entry| read_limits(entry, report)).collect();
            limits.sort_by(|a, b| a.limits.rule.cmp(&b.limits.rule));
            Some(limits)
        },
    )
}

fn read_limits(entry: &Item, report: &mut Report) -> Option<WrittenLimits> {
    let table = entry.table(format!("the limits in the rule {}", quoted(entry.key)), LIMITS_FIX, report)?;
    let windows = table.given("windows").map_or(Value::Null, |item| to_json(item.value));
    let ClientLimitSettings { windows: layers, until } = ClientLimitSettings::read_all(table, report);
    let limits = ClientLimits { rule: entry.key.to_owned(), windows, layers, until_ms: until, unreadable: None };
    Some(WrittenLimits { limits, span: entry.key_span.clone() })
}

fn to_json(value: &DeValue) -> Value {
    match value {
        DeValue::String(text) => json!(text),
        DeValue::Integer(number) => json!(i64::from_str_radix(number.as_str(), number.radix()).ok()),
        DeValue::Float(number) => json!(number.as_str()),
        DeValue::Boolean(flag) => json!(flag),
        DeValue::Datetime(time) => json!(time.to_string()),
        DeValue::Array(items) => items.iter().map(|item| to_json(item.get_ref())).collect(),
        DeValue::Table(entries) => Value::Object(
            entries.iter().map(|(key, value)| (key.get_ref().to_string(), to_json(value.get_ref()))).collect(),
        ),
    }
}

/// JSON as a value in TOML, which has no `null`.
pub fn to_toml(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("[{}]", items.iter().map(to_toml).collect::<Vec<_>>().join(", ")),
        Value::Object(fields) => {
            let is_bare =
                |key: &str| !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
            let key = |key: &String| if is_bare(key) { key.clone() } else { json!(key).to_string() };
            let fields: Vec<String> =
                fields.iter().map(|(name, value)| format!("{} = {}", key(name), to_toml(value))).collect();
            format!("{{ {} }}", fields.join(", "))
        }
        other => other.to_string(),
    }
}

/// A time, Unix milliseconds, in the form of RFC 3339.
pub fn time_text(ms: u64) -> String {
    jiff::Timestamp::from_millisecond(ms.cast_signed()).unwrap_or(jiff::Timestamp::MAX).to_string()
}

impl ClientLimits {
    /// Reads `{"windows": […], "until": …}`.
    ///
    /// # Errors
    ///
    /// What is wrong, and the fix.
    pub fn from_json(rule: &str, json: &Value) -> Result<ClientLimits, String> {
        let windows = json.get("windows").filter(|windows| windows.is_array()).ok_or("`windows` is no list")?;
        let until = json.get("until").filter(|until| !until.is_null());
        let mut text = format!("windows = {}\n", to_toml(windows));
        until.into_iter().for_each(|until| text.push_str(&format!("until = {}\n", to_toml(until))));
        let read = |top: &mut Table, report: &mut Report| ClientLimitSettings::read(top, report);
        let read = read_text_alone(&text, Path::new(""), "the limits", read);
        let problem = |Problem { message, fix, .. }: &Problem| format!("{message}: {fix}");
        let read = read.map_err(|problems| problems.iter().map(problem).collect::<Vec<_>>().join("; "))?;
        Ok(ClientLimits {
            rule: rule.to_owned(),
            windows: windows.clone(),
            layers: read.windows,
            until_ms: read.until,
            unreadable: None,
        })
    }

    /// As [`ClientLimits::from_json`]. Limits that cannot be read, such as those that a newer version has written, have no effect.
    pub fn from_store(rule: &str, json: &Value) -> ClientLimits {
        ClientLimits::from_json(rule, json).unwrap_or_else(|reason| ClientLimits {
            rule: rule.to_owned(),
            windows: json!([]),
            layers: Vec::new(),
            until_ms: None,
            unreadable: Some(reason),
        })
    }

    pub fn to_json(&self) -> Value {
        json!({ "windows": self.windows, "until": self.until_text() })
    }

    pub fn until_text(&self) -> Option<String> {
        self.until_ms.map(time_text)
    }

    pub fn has_ended(&self, now_ms: u64) -> bool {
        self.until_ms.is_some_and(|until_ms| until_ms <= now_ms)
    }

    /// The windows, with the calendars that the rule has computed.
    fn layers_in(&self, rule: &Rule) -> Vec<Limit> {
        let calendar = |windows: &Windows| match windows {
            Windows::Calendar(own) => rule.fixed_variants().flatten().find_map(|limit| match &limit.windows {
                Windows::Calendar(known) if known.name == own.name => Some(limit.windows.clone()),
                _ => None,
            }),
            _ => None,
        };
        let mut layers = self.layers.clone();
        layers.iter_mut().for_each(|limit| _ = calendar(&limit.windows).map(|known| limit.windows = known));
        layers
    }

    /// Checks whether the rules can have these windows for a client. An error has a message and a fix.
    pub fn check<'r>(&self, rules: impl Iterator<Item = &'r GatewayRule> + Clone) -> Parsed<()> {
        let Some(rule) = rules.clone().find(|rule| rule.name == self.rule) else {
            let fix = match nearest(&self.rule, rules.map(|rule| rule.name.as_str())) {
                Some(guess) => format!("did you mean {}?", quoted(guess)),
                None => String::from("name a rule that exists"),
            };
            return Err((format!("rule {} does not exist", quoted(&self.rule)), fix));
        };
        let layers = self.layers_in(rule);
        if layers.len() > LAYERS_MAX {
            let message = format!("{} windows: a client can have up to {LAYERS_MAX} in a rule", layers.len());
            return Err((message, String::from("remove windows")));
        }
        if rule.fixed_variants().all(<[Limit]>::is_empty) {
            return Err((format!("rule {} has no windows", quoted(&rule.name)), String::from("name another rule")));
        }
        if let Some(smallest) = smallest_capacity(&layers).filter(|smallest| *smallest < rule.cost.default_cost()) {
            return Err(unaffordable(rule.cost.default_cost(), smallest));
        }
        for limit in &layers {
            let is_fixed = rule.fixed_variants().flatten().any(|known| known.windows == limit.windows);
            let (kind, shards) = rule.counter_kind(limit);
            let setting = match () {
                () if kind == WindowKind::Sliding && !is_fixed => "sliding",
                () if limit.capacity.is_some() && kind != WindowKind::Accumulating => "capacity",
                () if limit.reserve > 0 && !rule.reserves() => "reserve",
                () if limit.shards > shards => "shards",
                () if rule.key_format.is_some() && !is_fixed => "period",
                () if limit.tokens < shards => {
                    let message = format!("`{}` is less than the shards of the rule, `{shards}`", limit.tokens);
                    return Err((message, format!("write at least `{shards}`")));
                }
                () => continue,
            };
            let message = format!("`{setting}` of {} differs from all windows of the rule", quoted(&limit.period_text));
            let fix = "limits of a client cannot change how the rule counts: remove it, or give the rule such windows";
            return Err((message, fix.to_owned()));
        }
        let names: HashSet<String> = layers.iter().map(|layer| rule.layer_name(&layers, layer)).collect();
        let has_name =
            |other: &&GatewayRule| other.name != rule.name && other.layer_names().any(|name| names.contains(&name));
        match rules.clone().find(has_name) {
            Some(other) => {
                let message = format!(
                    "a window would have the same name in responses as one of the rule {}",
                    quoted(&other.name)
                );
                Err((message, String::from("write the same number of windows as the rule has")))
            }
            None => Ok(()),
        }
    }
}

/// The limits of clients with a plan and the same windows of their own in some rules: the plan, then ` RULE=WINDOWS` for each rule.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct LimitsText {
    pub text: String,
    /// The digest of the text.
    pub id: LimitsId,
}

/// Identifies a [`LimitsText`], on every gateway and under every configuration.
pub type LimitsId = Digest;

impl LimitsText {
    fn new(text: String) -> LimitsText {
        LimitsText { id: Digest::of(text.as_bytes()), text }
    }

    /// The plan, whose name has no blank.
    pub fn plan(&self) -> &str {
        self.text.split(' ').next().unwrap_or_default()
    }
}

impl Client {
    /// What distinguishes the limits of the client at a time from those of other clients: its plan, its windows in some rules, and
    /// its grants; `None` if it has those of its plan.
    pub fn limits_text(&self, now_ms: u64) -> Option<LimitsText> {
        let mut current: String =
            self.current_limits(now_ms).map(|limits| format!(" {}={}", limits.rule, limits.windows)).collect();
        current.push_str(&self.grants_text(now_ms));
        (!current.is_empty()).then(|| LimitsText::new(format!("{}{current}", self.plan)))
    }

    /// Whether the client has, or had, limits of its own.
    pub fn has_own_limits(&self) -> bool {
        !self.limits.is_empty() || !self.grants.is_empty()
    }

    /// When its limits change by themselves, Unix milliseconds.
    pub fn limit_ends(&self) -> impl Iterator<Item = u64> {
        let grants = self.grants.iter().map(ClientGrant::kept_until_ms);
        self.limits.iter().filter_map(|limits| limits.until_ms).chain(grants)
    }

    /// The layers of the client in a rule at a time, without grants: those of its own, or those of its plan. `rules`: all.
    ///
    /// # Errors
    ///
    /// Why the rule cannot have its own ones, with a fix.
    pub fn layers_without_grants<'r>(
        &self,
        now_ms: u64,
        rule: &'r GatewayRule,
        rules: impl Iterator<Item = &'r GatewayRule> + Clone,
    ) -> Parsed<Vec<Limit>> {
        match self.current_limits(now_ms).find(|limits| limits.rule == rule.name) {
            Some(own) => own.check(rules).map(|()| own.layers_in(rule)),
            None => Ok(self.layers_of_plan(rule)),
        }
    }

    fn layers_of_plan(&self, rule: &GatewayRule) -> Vec<Limit> {
        rule.fixed_variants().nth(rule.variant_of_plan(&self.plan).index()).unwrap_or_default().to_vec()
    }

    fn current_limits(&self, now_ms: u64) -> impl Iterator<Item = &ClientLimits> {
        self.limits.iter().filter(move |limits| !limits.has_ended(now_ms) && limits.unreadable.is_none())
    }
}

impl Config {
    /// [`Config::set_client_limits`] of the clients that the configuration has.
    pub fn set_limits_of_listed_clients(&mut self) -> Vec<String> {
        let listed = self.clients.iter().flat_map(|clients| &clients.list);
        let limited: Vec<Client> = listed.filter(|client| client.has_own_limits()).cloned().collect();
        self.set_client_limits(limited.iter())
    }

    /// Gives the rules the windows that these clients have of their own, now or later, instead of those of other clients. What
    /// cannot be used is left out, and described.
    pub fn set_client_limits<'c>(&mut self, clients: impl Iterator<Item = &'c Client>) -> Vec<String> {
        self.rules.iter_mut().for_each(|rule| rule.rule.client_limits.clear());
        let (mut known, mut texts, mut added, mut problems) = (HashSet::new(), Vec::new(), Vec::new(), Vec::new());
        for client in clients {
            for now_ms in std::iter::once(0).chain(client.limit_ends()) {
                let Some(text) = client.limits_text(now_ms).filter(|text| !known.contains(text)) else { continue };
                let of_limits = client.current_limits(now_ms).map(|limits| &limits.rule);
                let rules: BTreeSet<&String> =
                    of_limits.chain(client.kept_grants(now_ms).map(|grant| &grant.rule)).collect();
                for name in rules {
                    // Another gateway may have the rule.
                    let Some(id) = self.rules.position(|rule| rule.name == *name) else { continue };
                    let rule = &self.rules[id];
                    let layers = client.layers_without_grants(now_ms, rule, self.rules.iter());
                    let layers = layers.unwrap_or_else(|(message, _fix)| {
                        problems.push(format!("client {}, rule {name}: {message}", client.name));
                        client.layers_of_plan(rule)
                    });
                    let concurrent = rule.concurrent_of(rule.variant_of_plan(&client.plan));
                    let base = Plan { name: text.text.clone(), layers, concurrent };
                    added.extend(client.with_grants(now_ms, rule, base, &mut problems).map(|limits| (id, limits)));
                }
                known.insert(text.clone());
                texts.push(text);
            }
        }
        added.into_iter().for_each(|(rule, limits)| self.rules[rule].rule.client_limits.push(limits));
        fill_calendars(self.rules.iter_mut().map(|rule| &mut rule.rule));
        self.clients.iter_mut().for_each(|clients| clients.limit_texts.clone_from(&texts));
        problems
    }

    /// Why limits of a client are not in effect, if so.
    pub fn why_without_effect(&self, client: &Client, limits: &ClientLimits, now_ms: u64) -> Option<String> {
        if let Some(reason) = &limits.unreadable {
            return Some(format!("this gateway cannot read them: {reason}"));
        }
        if limits.has_ended(now_ms) {
            return Some(String::from("they have ended"));
        }
        if let Err((message, _fix)) = limits.check(self.rules.iter()) {
            return Some(message);
        }
        let text = client.limits_text(now_ms)?;
        let mut of_rule = self.rules.iter().filter(|rule| rule.name == limits.rule);
        if of_rule.any(|rule| rule.client_limits.iter().any(|known| known.plan.name == text.text)) {
            return None;
        }
        Some(String::from(match self.clients.iter().any(|clients| clients.limit_texts.contains(&text)) {
            true => "the rule counts these windows in another way since a reload: they are in effect after a restart",
            false => "this gateway does not use them yet",
        }))
    }

    /// Takes windows of these rules from clients. Returns the limits that had them: the rule, and the text.
    pub fn leave_out_client_windows(&mut self, windows: &[(String, Windows)]) -> Vec<(String, String)> {
        let mut left_out = Vec::new();
        for (name, windows) in windows {
            let Some(rule) = self.rules.iter_mut().find(|rule| rule.name == *name) else { continue };
            rule.rule.client_limits.retain(|limits| {
                let Plan { name: text, layers, .. } = &limits.plan;
                let has_windows = layers.iter().any(|limit| limit.windows == *windows);
                // Those that follow others have no text.
                left_out.extend((has_windows && !text.is_empty()).then(|| (name.clone(), text.clone())));
                !has_windows
            });
        }
        left_out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_can_have_a_bounded_number_of_windows() {
        let toml = "[upstreams.u]\nbuiltin = \"echo\"\n[rules.r]\nkey = \"ip\"\nwindows = [\"9/hour\"]\n\
                    [[routes]]\npath = \"/\"\nupstream = \"u\"\nrules = [\"r\"]\n";
        let config = crate::read(toml).unwrap();
        let check = |windows: usize| {
            let windows: Vec<String> = (1..=windows).map(|n| format!("{n}/{n}m")).collect();
            let limits = ClientLimits::from_json("r", &json!({ "windows": windows })).unwrap();
            limits.check(config.rules.iter()).map_err(|(message, _fix)| message)
        };
        assert_eq!(check(LAYERS_MAX), Ok(()));
        assert_eq!(check(LAYERS_MAX + 1), Err(String::from("17 windows: a client can have up to 16 in a rule")));
    }
}
