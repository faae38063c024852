//! References in the strings of a configuration: `${env:NAME}` stands for an environment variable, `${file:PATH}` for the
//! content of a file, `$${` for `${`.
//!
//! The references are replaced before settings are read, so they work in every string, and instead of a number or a
//! boolean. Their values may be secrets: messages show the reference, and no part of its value.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::diagnostics::{Parsed, Report, Span, quoted};
use super::redaction::HiddenString;

/// Replaces the references in all strings of a table.
pub fn resolve(table: &mut DeTable, report: &mut Report) {
    table.iter_mut().for_each(|(_key, value)| resolve_value(value, report));
}

fn resolve_value(value: &mut Spanned<DeValue>, report: &mut Report) {
    let span = value.span();
    match value.get_mut() {
        DeValue::String(text) if text.contains("${") => {
            let resolved = resolve_text(text, &span, report);
            if resolved.is_none() {
                report.ignore_within(span);
            }
            *text = resolved.unwrap_or_default().into();
        }
        DeValue::Array(items) => items.iter_mut().for_each(|item| resolve_value(item, report)),
        DeValue::Table(table) => resolve(table, report),
        _ => {}
    }
}

/// The text with the values of its references; `None` after a problem.
fn resolve_text(text: &str, span: &Span, report: &mut Report) -> Option<String> {
    let mut resolved = String::new();
    let mut values: Vec<(String, String)> = Vec::new();
    let mut literal_bytes = 0;
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        let (before, reference) = rest.split_at(at);
        rest = &reference[2..];
        if let Some(before) = before.strip_suffix('$') {
            resolved += before;
            resolved += "${";
            continue;
        }
        resolved += before;
        let Some((kind, name)) = report.accept(span.clone(), parse(reference))? else {
            resolved += "${";
            continue;
        };
        let value = match kind {
            Kind::Variable => variable(name, span, report),
            Kind::File => file(name, span, report),
        }?;
        rest = &rest[kind.prefix().len() + name.len() + 1..];
        if values.is_empty() {
            literal_bytes = resolved.len();
        }
        resolved += &value;
        values.push((value, format!("${{{}{name}}}", kind.prefix())));
    }
    resolved += rest;
    if !values.is_empty() {
        let mut hidden = HiddenString::new(span.clone(), &resolved, text, literal_bytes);
        values.into_iter().for_each(|(value, reference)| hidden.add_value(&value, reference));
        report.hidden.add(hidden);
    }
    Some(resolved)
}

#[derive(Clone, Copy)]
enum Kind {
    Variable,
    File,
}

impl Kind {
    fn prefix(self) -> &'static str {
        match self {
            Kind::Variable => "env:",
            Kind::File => "file:",
        }
    }
}

/// The kind and the name of the reference that a text begins with; `None` for other uses of `${`.
fn parse(text: &str) -> Parsed<Option<(Kind, &str)>> {
    let inner = &text[2..];
    if let Some(name) = variable_of_a_shell(inner) {
        let written = quoted(&text[..text.find('}').map_or(text.len(), |end| end + 1)]);
        let fix = format!("write `${{env:{name}}}`, or `$${{` for a literal `${{`; there are no default values");
        return Err((format!("{written} is no reference"), fix));
    }
    let Some((word, name)) = inner.split_once(':') else { return Ok(None) };
    if word.is_empty() || !word.bytes().all(|byte| byte.is_ascii_lowercase()) {
        return Ok(None);
    }
    let kind = match word {
        "env" => Kind::Variable,
        "file" => Kind::File,
        _ => {
            let message = format!("{} is no reference", quoted(&format!("${{{word}:")));
            return Err((message, "write `${env:NAME}` or `${file:PATH}`, or `$${` for a literal `${`".to_owned()));
        }
    };
    match name.split_once('}') {
        Some((name, _)) if !name.is_empty() => Ok(Some((kind, name))),
        _ => {
            let message = format!("the reference {} has no name or no `}}`", quoted(&format!("${{{word}:")));
            Err((message, format!("write `${{{word}:{}}}`", if word == "env" { "NAME" } else { "PATH" })))
        }
    }
}

/// The name of a variable as a shell or Compose has it: `${NAME}` or `${NAME:-default}`. Variables of nginx and of scripts are in
/// lower case.
fn variable_of_a_shell(inner: &str) -> Option<&str> {
    let end = inner.find(|c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'))?;
    let (name, rest) = inner.split_at(end);
    let is_end = [":-", "-", ":?", "}"].iter().any(|next| rest.starts_with(next));
    (is_end && name.starts_with(|c: char| c.is_ascii_uppercase() || c == '_')).then_some(name)
}

fn variable(name: &str, span: &Span, report: &mut Report) -> Option<String> {
    let what = format!("the environment variable {}", quoted(name));
    let fix = "set it in the environment of the gateway";
    let Some(bytes) = (report.inputs.variables)(name) else {
        return report.reject(span.clone(), format!("{what} is not set"), fix);
    };
    text_of(bytes, &what, span, report)
}

/// The content of a file without its last line end.
fn file(name: &str, span: &Span, report: &mut Report) -> Option<String> {
    let bytes = report.read_file(name, span)?;
    let mut text = text_of(bytes, &format!("the file {}", quoted(name)), span, report)?;
    text.truncate(text.trim_end_matches(['\r', '\n']).len());
    Some(text)
}

fn text_of(bytes: Vec<u8>, what: &str, span: &Span, report: &mut Report) -> Option<String> {
    let text = String::from_utf8(bytes).ok();
    if text.is_none() {
        report.problem(span.clone(), format!("{what} is not UTF-8 text"), "write text there");
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::super::diagnostics::{Inputs, Problem};
    use super::super::{lint, read_with_inputs};
    use super::*;
    use crate::Config;
    use transom_limiter::handles::{Handle, RuleId};

    fn read(lines: &str) -> Result<Config, Vec<(String, String)>> {
        let text = format!("{lines}\n[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/\"\nupstream = \"u\"\n");
        let files = |path: &std::path::Path| match path.to_str() {
            Some("port") => Ok(b"8081\r\n".to_vec()),
            Some("binary") => Ok(vec![0xff]),
            Some("two") => Ok(b"canary-one\ncanary two, \"canary\"\n".to_vec()),
            Some("short") => Ok(b"x\ty\n".to_vec()),
            Some("ab") => Ok(b"ab\n".to_vec()),
            _ => Err(ErrorKind::NotFound.into()),
        };
        let variables = |name: &str| match name {
            "HOST" => Some(b"127.0.0.1".to_vec()),
            "WORKERS" => Some(b"1_0".to_vec()),
            "SECRET" => Some(b"hunter2hunter2".to_vec()),
            "ON" => Some(b"true".to_vec()),
            "FIELD" => Some(b"X-Canary".to_vec()),
            "LIMIT" => Some(b"13/minute".to_vec()),
            "NETWORK" => Some(b"1.2.3.4/8".to_vec()),
            _ => None,
        };
        let inputs = Inputs { files: &files, variables: &variables, ..Inputs::NONE };
        let texts = |problem: Problem| (problem.message, problem.fix);
        read_with_inputs(&text, inputs).map_err(|problems| problems.into_iter().map(texts).collect())
    }

    #[test]
    fn references_are_replaced_in_every_string() {
        let config = read("workers = \"${env:WORKERS}\"\n[listen]\nhttp = [\"${env:HOST}:${file:port}\"]\n").unwrap();
        assert_eq!(config.general.workers, Some(10));
        assert_eq!(config.listen.http[0].address.to_string(), "127.0.0.1:8081");
        let rule = "[rules.r]\nkey = \"ip\"\nwindows = [\"2/minute\"]\ncount_refused = \"${env:ON}\"";
        assert!(read(rule).unwrap().rules[RuleId::at(0)].count_refused);
    }

    #[test]
    fn other_uses_of_the_sign_are_literal() {
        let mut report = Report::new("");
        for (text, expected) in [
            ("$", "$"),
            ("${", "${"),
            ("${name}", "${name}"),
            ("$${env:X}", "${env:X}"),
            ("a$${", "a${"),
            ("${A:b}", "${A:b}"),
            ("${ x: 1 }", "${ x: 1 }"),
        ] {
            assert_eq!(resolve_text(text, &(0..0), &mut report).as_deref(), Some(expected), "{text}");
        }
        assert_eq!(report.count(), 0);
    }

    /// Each string setting with a file of two lines, in the place of a whole value and of a part of it.
    #[test]
    fn no_part_of_a_value_is_in_a_message() {
        let rule = |setting: &str| format!("[rules.r]\nkey = \"ip\"\nwindows = [\"2/minute\"]\n{setting}");
        let route = |setting: &str| format!("[[routes]]\nupstream = \"u\"\npath = \"/a\"\n{setting}");
        let upstream = |setting: &str| format!("[upstreams.v]\n{setting}");
        let mut texts = Vec::new();
        for value in ["${file:two}", "http://${file:two}", "/${file:two}", "127.0.0.1:${file:two}", "${file:short}"] {
            for setting in ["workers", "headers", "forward_path", "pid_file", "access_log", "include", "trailing_slash"]
            {
                texts.push(format!("{setting} = '{value}'"));
            }
            for setting in
                ["http", "admin", "metrics", "forward_auth", "trusted_proxies", "forwarded", "proxy_protocol"]
            {
                texts.push(format!("[listen]\n{setting} = '{value}'"));
            }
            for setting in ["certificate", "private_key", "address", "client_ca", "client_crl", "min_version"] {
                texts.push(format!("[listen.https]\n{setting} = '{value}'"));
            }
            for setting in
                ["redis", "sentinel_master", "username", "password_file", "password_env", "prefix", "timeout"]
            {
                texts.push(format!("[counters.shared]\n{setting} = '{value}'"));
            }
            for setting in ["keys", "jwks_url", "issuer", "leeway"] {
                texts.push(format!("[jwt]\n{setting} = '{value}'"));
            }
            for setting in ["file", "api_key", "subject"] {
                texts.push(format!("[clients]\n{setting} = '{value}'"));
            }
            for setting in ["servers", "balance", "protocol", "host", "hash_key"] {
                texts.push(upstream(&format!("{setting} = '{value}'")));
            }
            for setting in ["exemptions", "count_when", "on_limit", "penalty", "content_type", "on_missing_key", "cost"]
            {
                texts.push(rule(&format!("{setting} = '{value}'")));
            }
            texts.push(rule(&format!("exemptions = ['{value}']")));
            texts.push(format!("[rules.r]\nkey = '{value}'\nwindows = ['{value}']"));
            texts.push(format!("[[routes]]\nupstream = '{value}'\npath = '{value}'"));
            for setting in ["host", "methods", "scheme", "name", "rules", "cost", "strip_prefix", "rewrite", "redirect"]
            {
                texts.push(route(&format!("{setting} = '{value}'")));
            }
            texts.push(route(&format!("headers = {{ x-a = '{value}' }}")));
            texts.push(route(&format!("request_headers = {{ set = {{ x-a = '{value}' }} }}")));
        }
        for text in texts {
            let shown = match read(&text) {
                Ok(config) => format!("{:?}", lint::messages(&config)),
                Err(problems) => format!("{problems:?}"),
            };
            for part in ["canary", "x\\\\ty", "x\\ty"] {
                assert!(!shown.to_lowercase().contains(part), "{text}\n{shown}");
            }
        }
    }

    #[test]
    fn messages_about_a_valid_file_show_references() {
        let text = "[listen]\nadmin = \"0.0.0.0:${file:port}\"\n[rules.r]\nkey = \"header:${env:FIELD}\"\n\
                    on_missing_key = \"skip\"\nwindows = [\"${env:LIMIT}\"]\n\
                    [[routes]]\npath = \"/${env:SECRET}\"\nupstream = \"u\"\nrules = [\"r\"]\n";
        let shown = lint::messages(&read(text).unwrap());
        let shown: Vec<&str> = shown.iter().map(|message| message.text.as_str()).collect();
        for part in [
            "r: ${env:LIMIT}: at most 26 requests",
            "counts by `header:${env:FIELD}`",
            "add a rule by `ip` to the route `/${env:SECRET}`",
            "the route `/${env:SECRET}` matches `/${env:SECRET}` only, and `/${env:SECRET}/x` gets 404",
            "`admin` listens on `0.0.0.0:${file:port}`",
        ] {
            assert!(shown.iter().any(|text| text.contains(part)), "{part}\n{shown:#?}");
        }
    }

    #[test]
    fn a_fix_can_be_written_and_shows_no_part_of_a_value() {
        const NONE: &str = "correct the value of";
        let route = |setting: &str| format!("[[routes]]\npath = \"/a\"\nupstream = \"u\"\n{setting}");
        for (text, message, fix) in [
            (
                "[upstreams.v]\nservers = \"http://127.0.0.1:1/${env:SECRET}\"",
                "`http://127.0.0.1:1/${env:SECRET}` has a path",
                "write `\"http://127.0.0.1:1\"`: the path",
            ),
            (
                "[counters.shared]\nredis = \"${env:HOST}\"",
                "`${env:HOST}` is not a server URL",
                "write `\"redis://${env:HOST}\"`",
            ),
            (&route("rules = \"${env:SECRET}\""), "rule `${env:SECRET}` is not defined", NONE),
            ("[listen]\ntrusted_proxies = \"${env:NETWORK}\"", "`${env:NETWORK}` has bits set", NONE),
            ("[rules.r]\nkey = \"ip\"\nwindows = [\"${file:ab}\"]", "`${file:ab}` is not a limit", "write it as"),
            ("headers = \"${env:SECRET}\"", "`headers` cannot be `${env:SECRET}`", "write `ietf`, `legacy`"),
            (
                "workers = \"${env:SECRET}\"",
                "`workers`: expected an integer",
                "write a whole number from `1` to `1024`",
            ),
        ] {
            let problems = read(text).unwrap_err();
            assert_eq!(problems.len(), 1, "{text}: {problems:?}");
            assert!(problems[0].0.starts_with(message) && problems[0].1.starts_with(fix), "{text}: {problems:?}");
        }
    }

    #[test]
    fn a_value_does_not_change_messages_about_other_settings() {
        let other = "pid_file = \"${env:HOST}:8080\"\n[counters.shared]\nredis = \"127.0.0.9\"";
        let problems = read(other).unwrap_err();
        let [(message, fix)] = problems.as_slice() else { panic!("{problems:?}") };
        assert_eq!(message, "`127.0.0.9` is not a server URL");
        assert_eq!(fix, "write `\"redis://127.0.0.9\"`");
    }

    #[test]
    fn problems_name_the_reference_and_never_its_value() {
        for (line, message, fix) in [
            ("pid_file = \"${env:MISSING}\"", "the environment variable `MISSING` is not set", "set it"),
            ("pid_file = \"${file:missing}\"", "cannot read `missing`: entity not found", "name a file"),
            ("pid_file = \"${file:binary}\"", "the file `binary` is not UTF-8 text", "write text"),
            ("pid_file = \"${evn:X}\"", "`${evn:` is no reference", "write `${env:NAME}`"),
            ("pid_file = \"${env:X\"", "the reference `${env:` has no name or no `}`", "write `${env:NAME}`"),
            ("pid_file = \"${file:}\"", "the reference `${file:` has no name or no `}`", "write `${file:PATH}`"),
            ("pid_file = \"${PID_FILE}\"", "`${PID_FILE}` is no reference", "write `${env:PID_FILE}`, or"),
            ("workers = \"${WORKERS:-4}\"", "`${WORKERS:-4}` is no reference", "write `${env:WORKERS}`, or"),
            ("headers = \"${env:SECRET}\"", "`headers` cannot be `${env:SECRET}`", "write"),
            (
                "workers = \"${env:SECRET}\"",
                "`workers`: expected an integer, found a string `\"${env:SECRET}\"`",
                "write",
            ),
            ("workers = \"${file:port}\"", "`workers` cannot be `\"${file:port}\"`", "write a whole number"),
        ] {
            let problems = read(line).unwrap_err();
            assert_eq!(problems.len(), 1, "{line}: {problems:?}");
            assert!(problems[0].0.starts_with(message) && problems[0].1.starts_with(fix), "{line}: {problems:?}");
            assert!(!format!("{problems:?}").contains("hunter"), "{problems:?}");
        }
    }
}
