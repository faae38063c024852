//! Zones of `limit_req` and `limit_conn` as rules. A zone is one rule, because it counts in all locations together.

use std::collections::BTreeMap;

use super::keys::{IPV6_NETWORKS, KeyPlan, Variables};
use super::syntax::{Directive, Fate};
use super::{Importer, Scope, heading};
use crate::gateway::{Named, Section, Value, one_or_list, table_name, unused_name};
use crate::rate::{Rate, duration_text, windows};
use crate::source::Effect;

/// A zone, and the rule that it becomes.
struct Zone<'d> {
    directive: &'d Directive,
    key: Result<KeyPlan, String>,
    /// The key of what a zone counts that counts only some requests.
    counted: Option<KeyPlan>,
    rate: Option<(u64, u64)>,
}

/// A zone as a location uses it.
struct Use<'d> {
    directive: &'d Directive,
    status: Option<&'d Directive>,
    is_dry_run: bool,
}

/// All zones.
#[derive(Default)]
pub struct Limits<'d> {
    zones: BTreeMap<(&'static str, String), Zone<'d>>,
    /// By the name of the rule.
    uses: BTreeMap<String, ((&'static str, String), Vec<Use<'d>>)>,
}

/// A rule on a route.
#[derive(Clone, Debug)]
pub struct RuleUse {
    pub name: String,
    /// If not empty, the rule counts only these.
    pub methods: Vec<String>,
}

impl<'d> Limits<'d> {
    pub fn new(http: &Scope<'d>) -> Limits<'d> {
        let of = |name: &str| http.levels[0].iter().copied().filter(|directive| directive.name == name).collect();
        let variables = Variables { maps: of("map"), geos: of("geo") };
        let mut zones = BTreeMap::new();
        for (kind, name) in [("limit_req", "limit_req_zone"), ("limit_conn", "limit_conn_zone")] {
            let directives: Vec<&'d Directive> = of(name);
            for directive in directives {
                let Some(zone) = directive.option("zone").and_then(|zone| zone.split(':').next()) else { continue };
                let key = variables.key(directive.argument());
                let rate = directive.option("rate").and_then(rate);
                let counted = if key.is_err() { variables.counted_key(directive.argument()) } else { None };
                zones.entry((kind, zone.to_owned())).or_insert(Zone { directive, key, counted, rate });
            }
        }
        Limits { zones, uses: BTreeMap::new() }
    }

    /// A zone beside that of a `limit_req`, which counts all requests by the key of the latter, with a limit that is no larger.
    fn stricter_zone(&self, scope: &Scope<'d>, directive: &Directive) -> Option<&'d str> {
        let zone = |directive: &Directive| self.zones.get(&("limit_req", directive.option("zone")?.to_owned()));
        let burst =
            |directive: &Directive| directive.option("burst").and_then(|burst| burst.parse().ok()).unwrap_or(0_u64);
        let own = zone(directive)?;
        let counted = own.counted.as_ref()?;
        let is_stricter = |other: &&&'d Directive| {
            let Some(Zone { key: Ok(key), rate: Some(rate), .. }) = zone(other) else { return false };
            let is_of_all = key.exemptions.is_empty() && key.methods.is_empty() && key.per_server == counted.per_server;
            let has_key = key.parts == counted.parts && key.on_missing == counted.on_missing;
            is_of_all && has_key && own.rate.is_some_and(|own| *rate <= own) && burst(other) <= burst(directive)
        };
        scope.all(&["limit_req"]).iter().find(is_stricter).and_then(|other| other.option("zone"))
    }
}

/// Requests per 1000 seconds, which nginx rounds down, and 1,000,000 ms.
fn rate(text: &str) -> Option<(u64, u64)> {
    let (number, scale) = match text.split_once("r/") {
        Some((number, "s")) => (number, 1),
        Some((number, "m")) => (number, 60),
        _ => return None,
    };
    let rate = number.parse::<u64>().ok()?.checked_mul(1000)? / scale;
    (1..1_000_000_000).contains(&rate).then_some((rate, 1_000_000))
}

impl<'d> Importer<'d> {
    /// The rules of a location. What cannot be a rule is noted at the section of its route.
    pub(super) fn rules_of(&mut self, scope: &Scope<'d>, server: &str, section: &mut Section) -> Vec<RuleUse> {
        let mut rules = Vec::new();
        for kind in ["limit_req", "limit_conn"] {
            for directive in scope.all(&[kind]) {
                let zone_name = if kind == "limit_req" { directive.option("zone") } else { Some(directive.argument()) };
                let id = (kind, zone_name.unwrap_or_default().to_owned());
                let Some(zone) = self.limits.zones.get(&id) else {
                    self.note_at(section, Effect::NotEnforced, directive, "the zone is not defined");
                    continue;
                };
                let (zone_directive, key) = (zone.directive, zone.key.clone());
                let has_rate = kind == "limit_conn" || zone.rate.is_some();
                let key = match key {
                    Ok(key) if has_rate => key,
                    Ok(_) => {
                        self.note_at(section, Effect::NotEnforced, directive, "the rate of its zone cannot be read");
                        continue;
                    }
                    Err(why) => {
                        zone_directive.mark(Fate::LeftOut);
                        match self.limits.stricter_zone(scope, directive) {
                            Some(zone) => {
                                let why =
                                    format!("{why}; here, the zone `{zone}` counts the same with a stricter limit");
                                self.note_at(section, Effect::LeftOut, directive, &why);
                            }
                            None => self.note_at(section, Effect::NotEnforced, directive, &why),
                        }
                        continue;
                    }
                };
                directive.mark(Fate::Translated);
                zone_directive.mark(Fate::Translated);
                let setting = |name: &str| scope.one(&format!("{kind}_{name}"));
                let dry_run = setting("dry_run");
                dry_run.iter().for_each(|dry_run| dry_run.mark(Fate::Translated));
                let status = setting("status");
                status.iter().for_each(|status| status.mark(Fate::Translated));
                let is_dry_run = dry_run.is_some_and(|dry_run| dry_run.argument() == "on");
                let mut name = self.rule_name(&id, if key.per_server { server } else { "" });
                while self.limits.uses.get(&name).is_some_and(|(other, _)| *other != id) {
                    name.push_str("-2");
                }
                let uses = &mut self.limits.uses.entry(name.clone()).or_insert_with(|| (id, Vec::new())).1;
                if !uses.iter().any(|known| std::ptr::eq(known.directive, directive)) {
                    uses.push(Use { directive, status, is_dry_run });
                }
                if rules.iter().all(|rule: &RuleUse| rule.name != name) {
                    rules.push(RuleUse { name, methods: key.methods });
                }
            }
        }
        rules
    }

    /// The name of the zone; with a server, also its name.
    fn rule_name(&self, id: &(&'static str, String), server: &str) -> String {
        let is_ambiguous = self.limits.zones.keys().any(|(kind, zone)| *zone == id.1 && *kind != id.0);
        let kind = if is_ambiguous && id.0 == "limit_conn" { "-concurrent" } else { "" };
        let server = if server.is_empty() { String::new() } else { format!("-{server}") };
        table_name(&format!("{}{kind}{server}", id.1))
    }

    /// Makes the rules that routes use.
    pub(super) fn add_rules(&mut self) {
        let uses = std::mem::take(&mut self.limits.uses);
        for (name, (id, uses)) in uses {
            let Some(zone) = self.limits.zones.remove(&id) else { continue };
            let rule = self.rule(&name, &zone, &uses);
            self.limits.zones.insert(id, zone);
            let name = unused_name(&rule.name, &self.gateway.rules);
            self.gateway.rules.push(Named { name, ..rule });
        }
    }

    fn rule(&mut self, name: &str, zone: &Zone<'d>, uses: &[Use<'d>]) -> Named {
        let mut section = Section::default();
        let Ok(key) = &zone.key else { return Named::default() };
        section.comment(heading(&format!("Zone {} of nginx", zone.directive.option("zone").unwrap_or_default()), {
            &zone.directive.position
        }));
        for why in &key.stricter {
            match why.as_str() {
                IPV6_NETWORKS => self.note_once(Effect::Stricter, zone.directive, why),
                why => self.note_at(&mut section, Effect::Stricter, zone.directive, why),
            }
        }
        let global = vec!["global".to_owned()];
        section.set("key", one_or_list(if key.parts.is_empty() { global } else { key.parts.clone() }));
        match &key.on_missing {
            None => {}
            Some(skip) if skip.is_empty() => section.set("on_missing_key", "skip"),
            Some(parts) => section.set("on_missing_key", one_or_list(parts.clone())),
        }
        match zone.rate {
            Some(rate) => self.set_rate(&mut section, rate, uses),
            None => self.set_concurrent(&mut section, uses),
        }
        if !key.exemptions.is_empty() {
            section.set("exemptions", key.exemptions.clone());
        }
        if uses.iter().all(|one| one.is_dry_run) {
            section.settings.retain(|(name, _)| name != "max_delay");
            section.set("on_limit", "shadow");
        } else if let Some(dry) = uses.iter().find(|one| one.is_dry_run) {
            self.note_at(
                &mut section,
                Effect::Stricter,
                dry.directive,
                "the dry run is enforced, as elsewhere in the zone",
            );
        }
        let statuses: Vec<&str> = uses.iter().filter_map(|one| Some(one.status?.argument())).collect();
        if let Some(status) =
            statuses.first().and_then(|status| status.parse::<u64>().ok()).filter(|status| *status != 429)
        {
            section.set("status", status);
        }
        if let Some(without) = uses.iter().find(|one| one.status.is_none()) {
            let why = "refusals have status 429; `status = 503` is the default of nginx";
            self.note_once(Effect::Differs, without.directive, why);
        }
        Named { name: name.to_owned(), section, ..Named::default() }
    }

    /// Several bursts for one zone become the smallest one.
    fn set_rate(&mut self, section: &mut Section, (requests, period_ms): (u64, u64), uses: &[Use<'d>]) {
        let number = |one: &Use, option: &str| one.directive.option(option).and_then(|value| value.parse::<u64>().ok());
        let burst = |one: &Use| number(one, "burst").unwrap_or(0).min(1_000_000);
        let undelayed = |one: &Use| match one.directive.has("nodelay") {
            true => u64::MAX,
            false => number(one, "delay").unwrap_or(0),
        };
        let Some(smallest) = uses.iter().min_by_key(|one| burst(one)) else { return };
        if let Some(larger) = uses.iter().find(|one| burst(one) > burst(smallest)) {
            let why = "the rule has the smallest burst of the zone, because its locations share the counters: for its own, write a rule for \
                       this location alone";
            self.note_at(section, Effect::Stricter, larger.directive, why);
        }
        let rate = Rate { requests, period_ms, burst: burst(smallest) };
        // Without a burst there is nothing to delay.
        let is_mixed = uses.iter().any(|one| burst(one) > 0 && undelayed(one) != undelayed(smallest)) && rate.burst > 0;
        if is_mixed {
            let why = "requests beyond the rate are not delayed, because other locations of the zone do so differently";
            self.note_at(section, Effect::Differs, smallest.directive, why);
        }
        let delaying = if is_mixed { None } else { rate.delaying_window(undelayed(smallest)) };
        if let Some((window, max_delay_ms)) = delaying.filter(|_| undelayed(smallest) < rate.burst) {
            if let Some(why) = rate.slower(&window) {
                self.note_at(section, Effect::Stricter, smallest.directive, &why);
            }
            section.set("windows", windows(window));
            section.set("on_limit", "delay");
            section.set("max_delay", duration_text(max_delay_ms));
            return;
        }
        if !is_mixed && undelayed(smallest) < rate.burst {
            self.note_at(section, Effect::Stricter, smallest.directive, "requests are refused instead of delayed");
        }
        let window = rate.window();
        if let Some(why) = rate.slower(&window) {
            self.note_at(section, Effect::Stricter, smallest.directive, &why);
        }
        section.set("windows", windows(window));
        if rate.burst > 0 {
            section.comment(format!(
                "nginx admits {} requests at once, and one each {}. In any interval, this window admits at most as many.",
                rate.burst + 1,
                duration_text(period_ms.div_ceil(requests)),
            ));
        }
    }

    fn set_concurrent(&mut self, section: &mut Section, uses: &[Use<'d>]) {
        let limit = |one: &Use| one.directive.arguments.get(1).and_then(|limit| limit.parse::<u64>().ok()).unwrap_or(1);
        let Some(smallest) = uses.iter().min_by_key(|one| limit(one)) else { return };
        if let Some(larger) = uses.iter().find(|one| limit(one) > limit(smallest)) {
            let why = "the rule has the smallest limit of the zone, because its locations share the counters: for its own, write a rule for \
                       this location alone";
            self.note_at(section, Effect::Stricter, larger.directive, why);
        }
        section.set("concurrent", Value::Number(limit(smallest).max(1)));
    }
}
