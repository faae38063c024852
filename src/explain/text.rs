//! An explanation as text for people.

use std::fmt;

use super::route_choice::{ExplainedRoute, Hold};
use super::rule_state::{Renewal, RuleResult, RuleState, Store, Variant, seconds_text};
use super::{Decision, Explanation};
use transom_limiter::rule_set::NotCounted;
use transom_rules::ratelimit_headers::seconds_until;

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, authority, path) = (self.scheme(), &self.authority, &self.path);
        write!(f, "request:  {} {scheme}://{authority}{path} from {}", self.method, self.client_address)?;
        match &self.client {
            Some((name, plan)) => writeln!(f, ", client `{name}` of plan `{plan}`")?,
            None => writeln!(f)?,
        }
        write!(f, "decision: {}", self.decision_name())?;
        let time = self.retry_after_s().map(seconds_text);
        match self.decision {
            Decision::Admitted(None) => {}
            Decision::Admitted(Some(status)) | Decision::Denied(status) | Decision::Error(status) => {
                write!(f, " with {status}")?
            }
            Decision::Delayed(_, status) => {
                write!(
                    f,
                    " {}",
                    time.map_or_else(|| "until another request ends".into(), |time| format!("by {time}"))
                )?;
                status.map_or(Ok(()), |status| write!(f, ", then admitted with {status}"))?;
            }
            Decision::Refused(status, _) => {
                let advice = time.map_or_else(|| "retrying does not help".into(), |time| format!("retry after {time}"));
                write!(f, " with {status}, {advice}")?;
            }
        }
        writeln!(f, "\nreason:   {}", self.reason)?;
        if let Some(routes) = &self.routes {
            if let Some(route) = &routes.chosen {
                let target = route.upstream.as_ref().map_or_else(
                    || String::from("responds itself"),
                    |upstream| format!("forwards to upstream `{upstream}`"),
                );
                writeln!(f, "route:    {}, {target}: {}", title(route), routes.reason)?;
                if let Some(Hold { limit, max, held }) = &route.hold {
                    let limit = limit.as_secs_f64();
                    write!(f, "          while no server is reachable, requests wait for up to {limit}s: ")?;
                    writeln!(f, "{held} of at most {max} do now")?;
                }
            }
            for other in &routes.others {
                writeln!(f, "          not {}: {}", title(other), other.reason)?;
            }
        }
        for rule in &self.rules {
            writeln!(f)?;
            self.write_rule(rule, f)?;
        }
        Ok(())
    }
}

/// The name of a route, and its path unless the name contains it.
fn title(route: &ExplainedRoute) -> String {
    match route.name.contains(&route.path) {
        true => format!("`{}`", route.name),
        false => format!("`{}` ({})", route.name, route.path),
    }
}

impl Explanation {
    fn write_rule(&self, rule: &RuleState, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = match (rule.result, rule.is_shadow) {
            (RuleResult::NotCounted(NotCounted::Exempt | NotCounted::Skipped), _) => "does not count the request",
            (RuleResult::Admits, _) => "admits the request",
            (RuleResult::Delays(_), false) => "delays the request",
            (RuleResult::Delays(_), true) => "would delay the request",
            (RuleResult::Refuses, false) => "refuses the request",
            (RuleResult::Refuses, true) => "would refuse the request",
            (RuleResult::NotCounted(_), false) => "cannot count the request",
            (RuleResult::NotCounted(_), true) => "could not count the request",
        };
        let notes = [(rule.is_shadow, ", never enforced (shadow)"), (rule.is_shared, ", shared by gateways")];
        let notes: String = notes.iter().filter(|(applies, _)| *applies).map(|(_, note)| *note).collect();
        writeln!(f, "rule `{}`{notes}: {verb}: {}", rule.name, rule.reason)?;
        let part = |(part, value): &(String, Option<String>)| match value {
            Some(value) if value.is_empty() => part.clone(),
            Some(value) => format!("{part} = {value}"),
            None => format!("{part} not found"),
        };
        let parts: Vec<String> = rule.key.parts.iter().map(part).collect();
        write!(f, "  key: {}", parts.join(", "))?;
        if let Some(missing) = rule.key.missing.as_ref().filter(|_| rule.key.is_fallback) {
            let why = if missing.is_unknown { "names no client" } else { "is missing" };
            write!(f, ", because `{}` {why}", missing.name)?;
        }
        if let Some((variant, cost)) = &rule.counted {
            match variant {
                Variant::Default => {
                    if let Some((_, plan)) = self.client.as_ref().filter(|_| rule.has_plans) {
                        write!(f, "; windows of the rule, which has no plan `{plan}`")?;
                    }
                }
                Variant::Plan(plan) => write!(f, "; windows of plan `{plan}`")?,
                Variant::Client => write!(f, "; windows of this client alone")?,
                Variant::Override(number, key) => {
                    write!(f, "; windows of override {number}, for `{}`", key.join("`, `"))?;
                }
            }
            write!(f, "; cost {cost}")?;
            if let Some(sources) = &rule.reserve_sources {
                write!(f, ", reserved by `{}`", sources.join("`, `"))?;
            }
        }
        writeln!(f)?;
        self.write_windows(rule, f)?;
        let note = match rule.store {
            _ if rule.windows.is_empty() => return Ok(()),
            Some(Store::Unreachable) => "the shared store cannot be reached: this gateway's own figures",
            Some(Store::Reachable { may_include_leased: true }) => {
                "figures of the shared store; they may include tokens that other gateways have leased and not spent"
            }
            Some(Store::Reachable { may_include_leased: false }) | None => return Ok(()),
        };
        writeln!(f, "  note: {note}")
    }

    /// One line for each window and for the requests in flight, with numbers below one another.
    fn write_windows(&self, rule: &RuleState, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = |largest: u64| largest.max(1).ilog10() as usize + 1;
        let names = rule.windows.iter().map(|window| &window.name).chain(rule.concurrent.iter().map(|(name, _)| name));
        let name_width = names.map(String::len).max().unwrap_or(0);
        let (used_width, left_width) = rule.windows.iter().fold((1, 1), |(used, left), window| {
            (used.max(digits(window.used.max(window.capacity.into()))), left.max(digits(window.remaining)))
        });
        for window in &rule.windows {
            let (name, used, left, limit) = (&window.name, window.used, window.remaining, window.limit);
            let seconds = seconds_text(seconds_until(window.end_ms, self.now_ms));
            if rule.penalty_name.as_ref() == Some(name) {
                writeln!(f, "  {name:<name_width$}  lasts for {seconds}")?;
                continue;
            }
            write!(f, "  {name:<name_width$}  {used:>used_width$} of {:>used_width$} used, ", window.capacity)?;
            write!(f, "{left:>left_width$} left, ")?;
            match Renewal::of(window) {
                Renewal::Ends => write!(f, "resets in {seconds}")?,
                Renewal::Grants => write!(f, "{limit} more in {seconds}")?,
                Renewal::Slides if used == 0 => write!(f, "slides")?,
                Renewal::Slides => write!(f, "first tokens expire in {seconds}")?,
            }
            let mark = match (window.is_full, window.remaining) {
                (false, _) => "",
                (true, 0) => "  FULL",
                (true, _) => "  TOO FEW",
            };
            writeln!(f, "{mark}")?;
        }
        if let Some((name, usage)) = &rule.concurrent {
            let full = if usage.remaining() == 0 { "  FULL" } else { "" };
            writeln!(f, "  {name:<name_width$}  {} of {} in flight{full}", usage.in_use, usage.limit)?;
        }
        Ok(())
    }
}
