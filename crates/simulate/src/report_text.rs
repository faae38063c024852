//! The report of a simulation as text for a terminal.

use std::fmt::{self, Display, Formatter, Write as _};

use super::report::{Busiest, Report, RuleReport, ScenarioReport, WindowReport, rfc3339, share};
use super::statistics::TopKey;

/// Columns of the bar that shows a limit among what keys ask for.
const BAR_COLUMNS: usize = 50;
/// Columns of a comparison, which a terminal shows without breaking lines.
const COMPARISON_COLUMNS: usize = 100;
/// The end of the name of a row with limits.
const LIMITS: &str = ": limits";
/// Busy keys that are shown.
const SHOWN_KEYS: usize = 5;

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let lines = &self.lines;
        write!(f, "{}: {} lines", self.logs.join(", "), grouped(lines.total))?;
        // Without a line that can be read, there is no time.
        if self.first_ms > 0 {
            write!(f, ", {} to {}", rfc3339(self.first_ms), rfc3339(self.last_ms))?;
        }
        writeln!(f)?;
        write!(f, "  decided {}", grouped(lines.decided))?;
        for (count, what) in [
            (lines.unrouted, "without a route"),
            (lines.rejected, "answered before any rule decides"),
            (lines.denied, "denied"),
            (lines.without_key, "without the keys of the rules"),
            (lines.bad, "bad"),
            (lines.out_of_order, "out of order"),
        ] {
            if count > 0 {
                write!(f, " · {} {what}", grouped(count))?;
            }
        }
        writeln!(f)?;
        if lines.same + lines.different > 0 {
            writeln!(f, "  as logged: {} of {} decisions", grouped(lines.same), grouped(lines.same + lines.different))?;
        }
        for note in &self.notes {
            writeln!(f, "  note: {note}")?;
        }
        for bad in &self.bad_lines {
            writeln!(f, "  bad line {bad}")?;
        }
        for rule in self.scenarios.iter().take(1).flat_map(|scenario| &scenario.rules) {
            write!(f, "\n{rule}")?;
        }
        if self.scenarios.len() > 1 {
            write_comparison(f, &self.scenarios)?;
        }
        Ok(())
    }
}

impl Display for RuleReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "rule {} (key {})", self.name, self.key)?;
        if self.requests == 0 {
            return writeln!(f, "  applied to no request");
        }
        let mut row = |name: &str, value: String| writeln!(f, "  {name:<20}{value}");
        row("requests", grouped(self.requests))?;
        row("admitted", with_share(self.admitted, self.requests))?;
        row("refused", with_share(self.refused, self.requests))?;
        for (name, count) in [
            ("would be refused", self.shadowed),
            ("delayed", self.delayed),
            ("refused by others", self.refused_elsewhere),
            ("not counted", self.not_counted),
        ] {
            if count > 0 {
                row(name, with_share(count, self.requests + if name == "not counted" { self.not_counted } else { 0 }))?;
            }
        }
        let sample = match self.sampled_one_of {
            1 => String::new(),
            one_of => format!(", estimated from one key in {one_of}"),
        };
        row("keys", format!("{}{sample}", grouped(self.keys)))?;
        row("keys ever refused", with_share(self.keys_refused, self.keys))?;
        let minute = self.worst_minute;
        row(
            "worst minute",
            format!(
                "{}: {} of {} requests refused",
                rfc3339(minute.start_ms),
                grouped(minute.refused),
                grouped(minute.requests)
            ),
        )?;
        self.windows.iter().try_for_each(|window| write_window(f, window))?;
        write_keys(f, "busiest keys", &self.busiest, |key| {
            format!("{:>12} requests, {} refused", grouped(key.count), grouped(key.refused))
        })?;
        write_keys(f, "most refused keys", &self.most_refused, |key| format!("{:>12} refused", grouped(key.refused)))
    }
}

fn write_window(f: &mut Formatter<'_>, window: &WindowReport) -> fmt::Result {
    if window.is_unused() {
        return writeln!(f, "  window {}, applies to no request of the log", window.title());
    }
    writeln!(f, "  window {}, refused {}", window.title(), grouped(window.refused))?;
    writeln!(
        f,
        "    a key asks for: p50 {}, p90 {}, p99 {}, max {}; more than the limit in {} of its {}",
        grouped(window.p50),
        grouped(window.p90),
        grouped(window.p99),
        grouped(window.max),
        percent(window.share_above),
        window.counted_by()
    )?;
    writeln!(f, "    {}", bar(window))?;
    let suggested: Vec<String> = window
        .suggested
        .iter()
        .map(|(share, limit)| format!("{} with {}", percent(1.0 - share), grouped(*limit)))
        .collect();
    writeln!(f, "    keys that a limit would never refuse: {}", suggested.join(", "))
}

/// A scale from 1 to the maximum with the quantiles (`5`, `9`, `+`, `m`) and the limit (`|`), logarithmic.
fn bar(window: &WindowReport) -> String {
    let limit = u64::from(window.limit);
    let end = window.max.max(limit).max(2) as f64;
    let column = |value: u64| ((value.max(1) as f64).ln() / end.ln() * (BAR_COLUMNS - 1) as f64).round() as usize;
    let mut bar = vec!['·'; BAR_COLUMNS];
    let marks = [(window.p50, '5'), (window.p90, '9'), (window.p99, '+'), (window.max, 'm'), (limit, '|')];
    for (value, mark) in marks {
        bar[column(value).min(BAR_COLUMNS - 1)] = mark;
    }
    let bar: String = bar.into_iter().collect();
    format!("1 {bar} {}   5 p50, 9 p90, + p99, m max, | limit", grouped(window.max.max(limit)))
}

fn write_keys(
    f: &mut Formatter<'_>,
    title: &str,
    busiest: &Busiest,
    counts: impl Fn(&TopKey) -> String,
) -> fmt::Result {
    if busiest.keys.is_empty() {
        return Ok(());
    }
    let error = match busiest.error {
        0 => String::new(),
        error => format!(" (counts are too low by at most {})", grouped(error)),
    };
    writeln!(f, "  {title}{error}")?;
    for key in busiest.keys.iter().take(SHOWN_KEYS) {
        writeln!(f, "    {:<40} {}", key.label, counts(key))?;
    }
    Ok(())
}

/// A table with a column for each scenario, of the rules whose decisions differ.
fn write_comparison(f: &mut Formatter<'_>, scenarios: &[ScenarioReport]) -> fmt::Result {
    let mut rows = vec![scenarios.iter().map(|scenario| scenario.name.clone()).collect::<Vec<_>>()];
    let mut names = vec!["compared".to_owned()];
    let mut row = |name: String, cell: &dyn Fn(&ScenarioReport) -> String| {
        names.push(name);
        rows.push(scenarios.iter().map(cell).collect());
    };
    row("refused".to_owned(), &|scenario| with_share(scenario.refused, scenario.decided));
    for position in 0..scenarios[0].rules.len() {
        let rule = |scenario: &ScenarioReport, cell: &dyn Fn(&RuleReport) -> String| {
            scenario.rules.get(position).map(cell).unwrap_or_default()
        };
        let name = scenarios[0].rules[position].name.clone();
        row(format!("{name}{LIMITS}"), &|scenario| rule(scenario, &RuleReport::limits_text));
        row(format!("{name}: refused"), &|scenario| {
            rule(scenario, &|rule| with_share(rule.refused_or_shadowed(), rule.requests))
        });
        row(format!("{name}: keys ever refused"), &|scenario| {
            rule(scenario, &|rule| with_share(rule.keys_refused, rule.keys))
        });
        row(format!("{name}: worst minute"), &|scenario| {
            rule(scenario, &|rule| format!("{} refused", grouped(rule.worst_minute.refused)))
        });
    }
    let width = |cells: &mut dyn Iterator<Item = &String>| cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
    let name_width = width(&mut names.iter());
    let widths_of = |rows: &[Vec<String>]| -> Vec<usize> {
        (0..scenarios.len()).map(|column| width(&mut rows.iter().map(|row| &row[column]))).collect()
    };
    let is_wide = |rows: &[Vec<String>]| {
        name_width + widths_of(rows).iter().map(|width| width + 2).sum::<usize>() > COMPARISON_COLUMNS
    };
    writeln!(f)?;
    if is_wide(&rows) {
        // Limits are the widest cells. Those of a candidate are its name.
        let is_limits = |name: &str| name.ends_with(LIMITS);
        for (name, cells) in names.iter().zip(&rows).filter(|(name, _)| is_limits(name)) {
            writeln!(f, "{}, {name} {}", scenarios[0].name, cells[0])?;
        }
        for (number, scenario) in scenarios.iter().enumerate().skip(1) {
            rows[0][number] = format!("try {number}");
            writeln!(f, "try {number}: {}", scenario.name)?;
        }
        writeln!(f)?;
        (names, rows) = names.into_iter().zip(rows).filter(|(name, _)| !is_limits(name)).unzip();
    }
    let name_width = width(&mut names.iter());
    let widths = widths_of(&rows);
    let mut columns = 0..0;
    while columns.end < scenarios.len() {
        columns = columns.end..columns.end + 1;
        let fits = |end: usize| {
            let cells: usize = widths[columns.start..end].iter().map(|width| width + 2).sum();
            name_width + cells <= COMPARISON_COLUMNS
        };
        while columns.end < scenarios.len() && fits(columns.end + 1) {
            columns.end += 1;
        }
        if columns.start > 0 {
            writeln!(f)?;
        }
        for (name, cells) in names.iter().zip(&rows) {
            let mut line = format!("{name:<name_width$}");
            for column in columns.clone() {
                let (cell, width) = (&cells[column], widths[column]);
                write!(line, "  {cell:<width$}")?;
            }
            writeln!(f, "{}", line.trim_end())?;
        }
    }
    Ok(())
}

/// A number with thousands separated.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A share as a percentage with two digits.
pub fn percent(share: f64) -> String {
    match share * 100.0 {
        0.0 => "0 %".to_owned(),
        percent if percent < 0.01 => "< 0.01 %".to_owned(),
        percent if percent < 10.0 => format!("{percent:.2} %").replace(".00 %", " %"),
        percent => format!("{percent:.1} %").replace(".0 %", " %"),
    }
}

/// A number with its share of a whole.
pub fn with_share(part: u64, whole: u64) -> String {
    format!("{} ({})", grouped(part), percent(share(part, whole)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_for_people() {
        assert_eq!((grouped(0), grouped(999), grouped(1_234_567)), ("0".into(), "999".into(), "1,234,567".into()));
        for (share, text) in
            [(0.0, "0 %"), (0.00001, "< 0.01 %"), (0.001, "0.10 %"), (0.01, "1 %"), (0.25, "25 %"), (1.0, "100 %")]
        {
            assert_eq!(percent(share), text);
        }
    }
}
