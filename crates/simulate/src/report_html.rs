//! The report of a simulation as one HTML page without outside resources and scripts, in light and dark. Charts are bars in
//! tables and inline SVG; their texts are HTML, so that they are readable at any width.

use std::fmt::{self, Display, Formatter, Write as _};

use super::report::{Busiest, Report, RuleReport, ScenarioReport, TimelineReport, WindowReport, rfc3339, share};
use super::report_text::{grouped, percent};
use super::statistics::TopKey;

const STYLE: &str = "\
:root{color-scheme:light dark;--back:#fff;--card:#f6f7f9;--text:#1b1f24;--dim:#57616c;--line:#d5dae0;--ok:#2c65b3;--bad:#c43c32}\
@media(prefers-color-scheme:dark){:root{--back:#14171b;--card:#1d2127;--text:#e6e9ed;--dim:#a3adb8;--line:#39414b;--ok:#5b98e8;--bad:#f07a6f}}\
*{box-sizing:border-box}\
body{background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif;margin:0}\
main{max-width:64rem;margin:0 auto;padding:1.5rem 1rem 3rem}\
h1{font-size:1.7rem;margin:0}h2{font-size:1.2rem;margin:0 0 .6rem;overflow-wrap:anywhere}h3{font-size:1rem;margin:1.8rem 0 .4rem}\
p,li{color:var(--dim);margin:.3rem 0;overflow-wrap:anywhere}strong{color:var(--text)}a{color:var(--ok)}code{font-size:.95em}\
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:1rem 1.1rem;margin:1.2rem 0}\
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.7rem;margin:1rem 0}\
.tiles div{background:var(--back);border:1px solid var(--line);border-radius:8px;padding:.5rem .8rem}\
.tiles dt{color:var(--dim);font-size:.85rem}.tiles dd{margin:0;font-size:1.2rem;font-weight:600;overflow-wrap:anywhere}\
.tiles small{display:block;color:var(--dim);font-size:.85rem;font-weight:400}\
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%}\
th,td{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid var(--line);font-variant-numeric:tabular-nums;vertical-align:top}\
th{color:var(--dim);font-weight:600}thead th{font-size:.85rem}td small{color:var(--dim)}td{white-space:nowrap}\
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:0 2rem}.pair td:not(:last-child) .meter{--bad:var(--ok)}\
.meter{display:block;height:.35rem;min-width:4rem;border-radius:3px;background:linear-gradient(var(--bad) 0 0) no-repeat 0/var(--w) 100%,var(--line)}\
svg{display:block;width:100%;height:9rem;border-bottom:1px solid var(--line)}.ok{fill:var(--ok)}.bad{fill:var(--bad)}\
.ends{display:flex;justify-content:space-between;gap:1rem;color:var(--dim);font-size:.85rem}\
.key::before{content:'';display:inline-block;width:.7rem;height:.7rem;border-radius:2px;margin:0 .4rem 0 .8rem;background:var(--ok)}.key.bad::before{background:var(--bad)}\
.chart{table-layout:fixed}.chart th{width:5.5rem;font-weight:400;white-space:nowrap}.chart thead th{width:auto;white-space:normal}.chart thead th:first-child{width:5.5rem}.chart th,.chart td{border:0;padding:.1rem .6rem .1rem 0}\
.plot{position:relative;margin-right:4.5rem;height:1.5rem}\
.plot b{position:absolute;left:0;top:.2rem;height:1.1rem;min-width:2px;width:var(--w);background:var(--ok);border-radius:0 3px 3px 0}.over b{background:var(--bad)}\
.plot span{position:absolute;left:calc(var(--w) + .4rem)}\
.plot i{position:absolute;left:var(--l);top:-.1rem;bottom:-.1rem;border-left:2px dashed var(--bad)}\
.plot em{position:absolute;left:var(--l);transform:translateX(-50%);font-style:normal;font-weight:600;white-space:nowrap;color:var(--bad)}\
.plot.ticks{border-top:1px solid var(--line)}.ticks em{color:var(--dim);font-weight:400;font-size:.85rem}\
.time{display:grid;grid-template-columns:auto 1fr;gap:0 .5rem}.time svg{border-top:1px solid var(--line)}\
.y{display:flex;flex-direction:column;justify-content:space-between;text-align:right;height:9rem;line-height:1;color:var(--dim);font-size:.85rem}\
.hint{border-left:3px solid var(--ok);padding-left:.7rem}";
/// Height of the chart of requests over time.
const HEIGHT: f64 = 100.0;

/// The page.
pub struct HtmlReport<'a>(pub &'a Report);

/// A text from a log or a configuration.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|sign| match sign {
            '&' => f.write_str("&amp;"),
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '"' => f.write_str("&quot;"),
            '\'' => f.write_str("&#39;"),
            sign => f.write_char(sign),
        })
    }
}

/// A text of this program, in which backticks enclose names.
struct Marked<'a>(&'a str);

impl Display for Marked<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let parts: Vec<&str> = self.0.split('`').collect();
        if parts.len().is_multiple_of(2) {
            return Escaped(self.0).fmt(f);
        }
        parts.iter().enumerate().try_for_each(|(number, part)| match number % 2 {
            0 => Escaped(part).fmt(f),
            _ => write!(f, "<code>{}</code>", Escaped(part)),
        })
    }
}

impl Display for HtmlReport<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let report = self.0;
        let configured = &report.scenarios[0];
        write!(
            f,
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
             <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
             <title>Simulated limits</title><style>{STYLE}</style></head>\n<body><main><h1>Simulated limits</h1>\n\
             <p>Configuration <code>{}</code>, played by transom {}</p>\n<p>{}",
            Escaped(&report.config),
            report.version,
            Escaped(&report.logs.join(", ")),
        )?;
        if report.first_ms > 0 {
            write!(f, ", {} to {}", minute_text(report.first_ms), minute_text(report.last_ms))?;
        }
        f.write_str("</p>\n")?;
        let lines = &report.lines;
        let mut tiles = vec![
            ("lines", grouped(lines.total), String::new()),
            ("decided", grouped(lines.decided), String::new()),
            tile_of_share("refused as configured", configured.refused, configured.decided),
        ];
        if lines.same + lines.different > 0 {
            tiles.push(tile_of_share("decided as logged", lines.same, lines.same + lines.different));
        }
        for (name, count) in [
            ("denied", lines.denied),
            ("without a route", lines.unrouted),
            ("without the keys", lines.without_key),
            ("bad lines", lines.bad),
        ] {
            if count > 0 {
                tiles.push(tile_of_share(name, count, lines.total));
            }
        }
        write_tiles(f, &tiles)?;
        write_list(f, "Notes", report.notes.iter().map(|note| Marked(note)))?;
        write_comparisons(f, report)?;
        if configured.rules.len() > 1 {
            write_overview(f, &configured.rules)?;
        }
        for (number, rule) in configured.rules.iter().enumerate() {
            write_rule(f, number, rule)?;
        }
        let bad_lines = report.bad_lines.iter().map(|line| Escaped(line));
        write_list(f, &format!("Bad lines ({})", grouped(lines.bad)), bad_lines)?;
        f.write_str("</main></body></html>\n")
    }
}

/// Name, value, and a line below.
type Tile = (&'static str, String, String);

fn tile_of_share(name: &'static str, part: u64, whole: u64) -> Tile {
    (name, percent(share(part, whole)), format!("{} of {}", grouped(part), grouped(whole)))
}

fn write_tiles(f: &mut Formatter<'_>, tiles: &[Tile]) -> fmt::Result {
    f.write_str("<dl class=\"tiles\">")?;
    for (name, value, more) in tiles {
        write!(f, "<div><dt>{name}</dt><dd>{value}<small>{more}</small></dd></div>")?;
    }
    f.write_str("</dl>\n")
}

fn write_list<I: Display>(f: &mut Formatter<'_>, title: &str, items: impl ExactSizeIterator<Item = I>) -> fmt::Result {
    if items.len() == 0 {
        return Ok(());
    }
    write!(f, "<section><h2>{}</h2>\n<ul>", Escaped(title))?;
    for item in items {
        write!(f, "<li>{item}</li>")?;
    }
    f.write_str("</ul></section>\n")
}

/// The columns of a table. The first is the heading of the rows.
fn open_table(f: &mut Formatter<'_>, label: &str, columns: &[&str]) -> fmt::Result {
    write!(
        f,
        "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{}\"><table><thead><tr>",
        Escaped(label)
    )?;
    columns.iter().try_for_each(|column| write!(f, "<th scope=\"col\">{column}</th>"))?;
    f.write_str("</tr></thead><tbody>\n")
}

/// A cell with a number, its share of a whole, and a bar for the share, which is full at `most`.
fn write_share(f: &mut Formatter<'_>, part: u64, whole: u64, most: f64) -> fmt::Result {
    let share = share(part, whole);
    let width = if most > 0.0 { share / most * 100.0 } else { 0.0 };
    let part = grouped(part);
    write!(
        f,
        "<td>{part} <small>{}</small><span class=\"meter\" style=\"--w:{width:.1}%\"></span></td>",
        percent(share)
    )
}

const END_OF_TABLE: &str = "</tbody></table></div>\n";

/// For each rule that has candidates: the candidates beside the configuration.
fn write_comparisons(f: &mut Formatter<'_>, report: &Report) -> fmt::Result {
    let Some((configured, candidates)) = report.scenarios.split_first() else { return Ok(()) };
    for (position, rule) in configured.rules.iter().enumerate() {
        // `RULE=…` or `RULE:PLAN=…`
        let of_rule = |name: &str| name.split([':', '=']).next().is_some_and(|tried| tried.trim() == rule.name);
        let tried: Vec<_> = candidates.iter().filter(|candidate| of_rule(&candidate.name)).collect();
        if tried.is_empty() {
            continue;
        }
        writeln!(f, "<section><h2>Candidates for {}</h2>", Escaped(&rule.name))?;
        let columns = ["limits", "requests refused", "keys ever refused", "refused by any rule", "worst minute"];
        open_table(f, &format!("candidates for {}", rule.name), &columns)?;
        let scenarios: Vec<_> = std::iter::once(configured).chain(tried).collect();
        let shares = [
            (|_, rule| (rule.refused_or_shadowed(), rule.requests)) as fn(&ScenarioReport, &RuleReport) -> (u64, u64),
            |_, rule| (rule.keys_refused, rule.keys),
            |scenario, _| (scenario.refused, scenario.decided),
        ];
        for scenario in &scenarios {
            let rule = &scenario.rules[position];
            let note = if std::ptr::eq(*scenario, configured) { "<br>as configured" } else { "" };
            write!(f, "<tr><th scope=\"row\"><code>{}</code>{note}</th>", Escaped(&rule.limits_text()))?;
            for of_scenario in shares {
                let of = |scenario: &ScenarioReport| of_scenario(scenario, &scenario.rules[position]);
                let most = scenarios.iter().map(|scenario| of(scenario)).map(|(part, whole)| share(part, whole));
                let (part, whole) = of(scenario);
                write_share(f, part, whole, most.fold(0.0, f64::max))?;
            }
            writeln!(f, "<td>{}</td></tr>", grouped(rule.worst_minute.refused))?;
        }
        writeln!(f, "{END_OF_TABLE}</section>")?;
    }
    Ok(())
}

fn write_overview(f: &mut Formatter<'_>, rules: &[RuleReport]) -> fmt::Result {
    f.write_str("<section><h2>Rules</h2>\n")?;
    open_table(f, "rules", &["rule", "limits", "requests", "refused", "keys ever refused"])?;
    for (number, rule) in rules.iter().enumerate() {
        write!(
            f,
            "<tr><th scope=\"row\"><a href=\"#rule-{number}\">{}</a></th><td><code>{}</code></td><td>{}</td>",
            Escaped(&rule.name),
            Escaped(&rule.limits_text()),
            grouped(rule.requests)
        )?;
        write_share(f, rule.refused_or_shadowed(), rule.requests, 1.0)?;
        write_share(f, rule.keys_refused, rule.keys, 1.0)?;
        f.write_str("</tr>\n")?;
    }
    writeln!(f, "{END_OF_TABLE}</section>")
}

fn write_rule(f: &mut Formatter<'_>, number: usize, rule: &RuleReport) -> fmt::Result {
    write!(
        f,
        "<section id=\"rule-{number}\"><h2>Rule {}</h2>\n<p>Key: <code>{}</code></p>\n",
        Escaped(&rule.name),
        Escaped(&rule.key)
    )?;
    if rule.requests == 0 {
        return f.write_str("<p>The rule applied to no request.</p></section>\n");
    }
    let sample = match rule.sampled_one_of {
        1 => String::new(),
        one_of => format!("estimated from one key in {one_of}"),
    };
    let mut tiles = vec![
        ("requests", grouped(rule.requests), String::new()),
        tile_of_share("refused", rule.refused, rule.requests),
        ("keys", grouped(rule.keys), sample),
        tile_of_share("keys ever refused", rule.keys_refused, rule.keys),
    ];
    for (name, count) in
        [("would be refused", rule.shadowed), ("delayed", rule.delayed), ("refused by others", rule.refused_elsewhere)]
    {
        if count > 0 {
            tiles.push(tile_of_share(name, count, rule.requests));
        }
    }
    let minute = rule.worst_minute;
    let worst = format!("of {} refused, {}", grouped(minute.requests), minute_text(minute.start_ms));
    tiles.push(("worst minute", grouped(minute.refused), worst));
    write_tiles(f, &tiles)?;
    write_timeline(f, &rule.timeline)?;
    rule.windows.iter().try_for_each(|window| write_window(f, window))?;
    f.write_str("<div class=\"pair\">")?;
    let (requests, refused) = (rule.requests, rule.refused_or_shadowed());
    write_keys(f, "Busiest keys", &rule.busiest, ["requests", "of these refused"], |key| {
        [(key.count, requests), (key.refused, key.count)]
    })?;
    write_keys(f, "Most refused keys", &rule.most_refused, ["share of all refusals"], |key| [(key.refused, refused)])?;
    f.write_str("</div></section>\n")
}

/// `2023-11-14 02:20 UTC`.
fn minute_text(unix_ms: u64) -> String {
    format!("{} UTC", rfc3339(unix_ms).get(..16).unwrap_or_default().replace('T', " "))
}

/// A bar for each bucket of time.
fn write_timeline(f: &mut Formatter<'_>, timeline: &TimelineReport) -> fmt::Result {
    let most = timeline.buckets.iter().map(|bucket| bucket.0).max().unwrap_or(0).max(1);
    let refused: u64 = timeline.buckets.iter().map(|bucket| bucket.1).sum();
    let seconds = timeline.bucket_ms / 1000;
    write!(
        f,
        "<h3>Requests over time</h3>\n<p class=\"ends\"><span>requests in {seconds} s</span>\
         <span><span class=\"key\">all</span><span class=\"key bad\">refused</span></span></p>\
         <div class=\"time\"><div class=\"y\"><span>{}</span><span>{}</span><span>0</span></div>\
         <svg viewBox=\"0 0 {} {HEIGHT}\" preserveAspectRatio=\"none\" role=\"img\" \
         aria-label=\"requests over time, at most {most} in {seconds} s, {refused} refused\">",
        grouped(most),
        half_of(most),
        timeline.buckets.len().max(1)
    )?;
    for (position, (requests, refused)) in timeline.buckets.iter().enumerate() {
        for (class, count) in [("ok", requests), ("bad", refused)] {
            let height = *count as f64 / most as f64 * HEIGHT;
            if *count > 0 {
                write!(
                    f,
                    "<rect class=\"{class}\" x=\"{position}\" y=\"{:.1}\" width=\".9\" height=\"{height:.1}\"/>",
                    HEIGHT - height
                )?;
            }
        }
    }
    let end_ms = timeline.start_ms + timeline.bucket_ms * timeline.buckets.len() as u64;
    writeln!(
        f,
        "</svg></div><p class=\"ends\"><span>{}</span><span>{}</span></p>",
        minute_text(timeline.start_ms),
        minute_text(end_ms)
    )
}

/// The label in the middle of an axis; an odd number has none.
fn half_of(most: u64) -> String {
    if most.is_multiple_of(2) { grouped(most / 2) } else { String::new() }
}

/// What keys ask for, as bars of logarithmic length, with the limit as a line.
fn write_window(f: &mut Formatter<'_>, window: &WindowReport) -> fmt::Result {
    if window.is_unused() {
        return writeln!(f, "<h3>{}</h3><p>It applies to no request of the log.</p>", Escaped(&window.title()));
    }
    let (unit, limit) = (window.counted_by(), u64::from(window.limit));
    writeln!(
        f,
        "<h3>{}</h3><p>Refused {}. In {} of its {unit}, a key asks for more than the limit.</p>",
        Escaped(&window.title()),
        grouped(window.refused),
        percent(window.share_above)
    )?;
    let end = (window.max.max(limit) as f64 + 1.0).ln();
    let place = |value: u64| (value as f64 + 1.0).ln() / end * 100.0;
    write!(
        f,
        "<table class=\"chart\"><thead><tr><th scope=\"col\">{unit}</th><th scope=\"col\">a key asks for at most \
         (logarithmic scale)<div class=\"plot\" style=\"--l:{:.1}%\"><em>limit {}</em></div></th></tr></thead><tbody>",
        place(limit),
        grouped(limit)
    )?;
    for (share, value) in &window.curve {
        let class = if *value > limit { "plot over" } else { "plot" };
        write!(
            f,
            "<tr><th scope=\"row\">{}</th><td><div class=\"{class}\" style=\"--w:{:.1}%;--l:{:.1}%\"><b></b><i></i><span>{}</span></div></td></tr>",
            percent(*share),
            place(*value),
            place(limit),
            grouped(*value)
        )?;
    }
    f.write_str("</tbody><tfoot><tr><th></th><td><div class=\"plot ticks\">")?;
    // 0, and the powers of ten.
    let most = window.max.max(limit);
    let powers = std::iter::successors(Some(1_u64), |power| power.checked_mul(10)).take_while(|power| *power <= most);
    for tick in std::iter::once(0).chain(powers) {
        write!(f, "<em style=\"--l:{:.1}%\">{}</em>", place(tick), grouped(tick))?;
    }
    f.write_str("</div></td></tr></tfoot></table>\n<p class=\"hint\">")?;
    for (share, limit) in &window.suggested {
        write!(
            f,
            "A limit of <strong>{}</strong> lets {} of the keys through. ",
            grouped(*limit),
            percent(1.0 - share)
        )?;
    }
    f.write_str("</p>\n")
}

/// `shares`: for each column, a number and what it is a share of.
fn write_keys<const COLUMNS: usize>(
    f: &mut Formatter<'_>,
    title: &str,
    busiest: &Busiest,
    columns: [&str; COLUMNS],
    shares: impl Fn(&TopKey) -> [(u64, u64); COLUMNS],
) -> fmt::Result {
    if busiest.keys.is_empty() {
        return Ok(());
    }
    writeln!(f, "<div><h3>{title}</h3>")?;
    open_table(f, title, &[&["key"], columns.as_slice()].concat())?;
    for key in &busiest.keys {
        write!(f, "<tr><th scope=\"row\">{}</th>", Escaped(&key.label))?;
        shares(key).into_iter().try_for_each(|(part, whole)| write_share(f, part, whole, 1.0))?;
        f.write_str("</tr>\n")?;
    }
    f.write_str(END_OF_TABLE)?;
    if busiest.error > 0 {
        write!(f, "<p>Counts are too low by at most {}.</p>", grouped(busiest.error))?;
    }
    f.write_str("</div>\n")
}
