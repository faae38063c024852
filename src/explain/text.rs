//! An explanation as text for people.

use std::fmt;

use super::rule_state::{RuleState, Variant};
use super::{Decision, Explanation};
use crate::http::ratelimit_headers::seconds_until;

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, host, path) = (self.scheme(), &self.host, &self.path);
        write!(f, "request:  {} {scheme}://{host}{path} from {}", self.method, self.client_address)?;
        match &self.client {
            Some((name, plan)) => writeln!(f, ", client `{name}` of plan `{plan}`")?,
            None => writeln!(f)?,
        }
        write!(f, "decision: {}", self.decision_name())?;
        if let Some(status) = self.status() {
            write!(f, " with {status}")?;
        }
        match (self.decision, self.retry_after_s()) {
            (Decision::Refused(..), Some(seconds)) => write!(f, ", retry after {seconds} s")?,
            (Decision::Refused(..), None) => write!(f, ", retrying does not help")?,
            (Decision::Delayed(_), Some(seconds)) => write!(f, " by {seconds} s")?,
            (Decision::Admitted(_) | Decision::Delayed(_) | Decision::Error(_), _) => {}
        }
        writeln!(f, "\nreason:   {}", self.reason)?;
        if let Some(routes) = &self.routes {
            if let Some(route) = &routes.chosen {
                let target = route.upstream.as_ref().map_or_else(
                    || String::from("responds itself"),
                    |upstream| format!("forwards to upstream `{upstream}`"),
                );
                writeln!(f, "route:    `{}`, path {}, {target}: {}", route.name, route.path, routes.reason)?;
            }
            for other in &routes.others {
                writeln!(f, "          not `{}`, path {}: {}", other.name, other.path, other.reason)?;
            }
        }
        for rule in &self.rules {
            writeln!(f)?;
            self.write_rule(rule, f)?;
        }
        if !self.is_live {
            writeln!(f, "\nnote:     no running gateway was found: all windows are shown empty")?;
        }
        Ok(())
    }
}

impl Explanation {
    fn write_rule(&self, rule: &RuleState, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let notes = [(rule.is_shadow, " (shadow: never enforced)"), (rule.is_shared, " (shared)")];
        let notes: String = notes.iter().filter(|(applies, _)| *applies).map(|(_, note)| *note).collect();
        writeln!(f, "rule `{}`{notes}: {}: {}", rule.name, rule.result_name(), rule.reason)?;
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
                Variant::Default => {}
                Variant::Plan(plan) => write!(f, "; windows of plan `{plan}`")?,
                Variant::Override => write!(f, "; windows of an override")?,
            }
            write!(f, "; cost {cost}")?;
        }
        writeln!(f)?;
        for window in &rule.windows {
            let (used, limit, left) = (window.used, window.limit, window.remaining);
            let reset_s = seconds_until(window.end_ms, self.now_ms);
            let full = if window.is_full { "  FULL" } else { "" };
            writeln!(f, "  {:<24} {used} of {limit} used, {left} left, resets in {reset_s} s{full}", window.name)?;
        }
        if let Some((name, usage)) = &rule.concurrent {
            let full = if usage.remaining() == 0 { "  FULL" } else { "" };
            writeln!(f, "  {name:<24} {} of {} in flight{full}", usage.in_use, usage.limit)?;
        }
        Ok(())
    }
}
