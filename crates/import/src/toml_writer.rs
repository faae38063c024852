//! Writes the intermediate form as a gateway.toml, as a person would: aligned, with comments, without settings that have their
//! default values.

use std::fmt::Write as _;

use crate::gateway::{Gateway, Named, Part, Route, Section, Value, one_or_list};

/// Longest line of comments and lists.
const COLUMNS: usize = 120;

/// The text of the gateway.toml, and the offsets at which its parts begin. `heading`: the first comment.
pub fn write(gateway: &Gateway, heading: &str) -> (String, Vec<(usize, Part)>) {
    let mut out = String::new();
    write_comment(&mut out, heading);
    let unplaced: Vec<String> = gateway.unplaced_notes().map(ToString::to_string).collect();
    if !unplaced.is_empty() {
        out.push_str("#\n");
        unplaced.iter().for_each(|note| write_comment(&mut out, note));
    }
    write_section(&mut out, "[listen]", &gateway.listen);
    for https in &gateway.https {
        let header = if gateway.https.len() == 1 { "[listen.https]" } else { "[[listen.https]]" };
        write_section(&mut out, header, https);
    }
    for (header, section) in [
        ("[limits]", &gateway.limits),
        ("[timeouts]", &gateway.timeouts),
        ("[clients]", &gateway.clients),
        ("[access]", &gateway.access),
    ] {
        write_section(&mut out, header, section);
    }
    let mut parts = vec![(0, Part::General)];
    for (index, upstream) in gateway.upstreams.iter().enumerate() {
        parts.push((out.len(), Part::Upstream(index)));
        write_named(&mut out, "upstreams", upstream);
    }
    for (index, rule) in gateway.rules.iter().enumerate() {
        parts.push((out.len(), Part::Rule(index)));
        write_named(&mut out, "rules", rule);
    }
    for (index, route) in gateway.routes.iter().enumerate() {
        parts.push((out.len(), Part::Route(index)));
        write_route(&mut out, route);
    }
    (out, parts)
}

fn write_named(out: &mut String, kind: &str, named: &Named) {
    let name = key_text(&named.name);
    write_section(out, &format!("[{kind}.{name}]"), &named.section);
    for (table, section) in &named.tables {
        write_section(out, &format!("[{kind}.{name}.{table}]"), section);
    }
    named.overrides.iter().for_each(|section| write_section(out, &format!("[[{kind}.{name}.overrides]]"), section));
}

fn write_route(out: &mut String, route: &Route) {
    let mut section = Section { comments: route.section.comments.clone(), ..Section::default() };
    if let Some(scheme) = route.scheme {
        section.set("scheme", scheme);
    }
    if !route.hosts.is_empty() {
        section.set("host", one_or_list(route.hosts.clone()));
    }
    section.set("path", route.path.as_str());
    if !route.methods.is_empty() {
        section.set("methods", route.methods.clone());
    }
    for (name, fields) in [("headers", &route.headers), ("query", &route.query)] {
        if !fields.is_empty() {
            section.set(name, Value::Table(fields.clone()));
        }
    }
    if !route.networks.is_empty() {
        section.set("networks", route.networks.clone());
    }
    section.settings.extend(route.section.settings.iter().cloned());
    write_section(out, "[[routes]]", &section);
}

/// Writes nothing for a section without comments and settings.
fn write_section(out: &mut String, header: &str, section: &Section) {
    if section.comments.is_empty() && section.settings.is_empty() {
        return;
    }
    out.push('\n');
    section.comments.iter().for_each(|comment| write_comment(out, comment));
    // A section of comments only, such as a rule that cannot be expressed.
    if section.settings.is_empty() {
        return;
    }
    let _ = writeln!(out, "{header}");
    let width = section.settings.iter().map(|(name, _)| key_text(name).len()).max().unwrap_or(0);
    for (name, value) in &section.settings {
        let _ = writeln!(out, "{:width$} = {}", key_text(name), value_text(value, width + 3));
    }
}

fn write_comment(out: &mut String, text: &str) {
    for paragraph in text.lines() {
        let mut line = String::from("#");
        for word in paragraph.split_whitespace() {
            if line.len() > 1 && line.len() + 1 + word.len() > COLUMNS {
                let _ = writeln!(out, "{line}");
                line = String::from("#  ");
            }
            let _ = write!(line, " {}", word.replace(|c: char| c.is_control(), "?"));
        }
        let _ = writeln!(out, "{line}");
    }
}

/// `indent`: the columns before the value.
fn value_text(value: &Value, indent: usize) -> String {
    match value {
        Value::Text(text) => quoted(text),
        Value::Number(number) => number.to_string(),
        Value::Bool(value) => value.to_string(),
        Value::Table(settings) if settings.is_empty() => "{}".to_owned(),
        Value::Table(settings) => {
            let settings: Vec<String> = settings
                .iter()
                .map(|(name, value)| format!("{} = {}", key_text(name), value_text(value, COLUMNS)))
                .collect();
            format!("{{ {} }}", settings.join(", "))
        }
        Value::List(list) => {
            let items: Vec<String> = list.iter().map(|value| value_text(value, COLUMNS)).collect();
            let line = format!("[{}]", items.join(", "));
            if indent + line.len() <= COLUMNS || indent >= COLUMNS {
                return line;
            }
            format!("[\n{}]", items.iter().map(|item| format!("    {item},\n")).collect::<String>())
        }
    }
}

fn key_text(name: &str) -> String {
    let is_bare = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
    if is_bare { name.to_owned() } else { quoted(name) }
}

/// A basic string, in which `${` does not begin a reference.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.replace("${", "$${").chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            c if c.is_control() => {
                let _ = write!(quoted, "\\u{:04X}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_what_toml_reads() {
        let mut gateway = Gateway::default();
        gateway.listen.set("http", "127.0.0.1:0");
        let text = "a \"quoted\" \\ text\nwith ${variable} \u{7f}\u{1}";
        let mut route = Route { path: "/".to_owned(), ..Route::default() };
        route.section.set("respond", crate::gateway::table([("status", 200.into()), ("body", text.into())]));
        gateway.routes.push(route);
        let config = transom_config::read(&write(&gateway, "heading").0).unwrap();
        assert_eq!(config.routes.len(), 1);
    }
}
