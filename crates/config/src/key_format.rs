//! `key_format` of a rule: the names of its counters in the shared store, as another service writes them.
//!
//! Within a rule, every key and window has a name of its own: the character between key and window, on the side of the
//! window, is not a digit.
//! Two rules never have the same name, because their names begin differently.

use super::diagnostics::{Parsed, Report, Span, quoted};
use super::redis::{Nodes, StoreConfig};
use super::rule::stated_by;
use super::settings::Word;
use super::template::split_variables;
use super::toml_reader::{SpannedStr, Table};
use transom_limiter::key::{KeyPart, OnMissing};
use transom_limiter::rule::{KeyFormat, Rule, WINDOW_MARK};
use transom_limiter::window::Windows;

pub const KEY_FORMAT: Word<KeyFormat> = Word {
    shape: "text with `{key}` and `{window}`",
    example: "\"service:{key}:{window}\"",
    read: |word: &SpannedStr, report: &mut Report| report.accept(word.span.clone(), parse(word.text)),
};
const MAX_BYTES: usize = 128;

enum Variable {
    Key,
    Window,
}

fn parse(text: &str) -> Parsed<KeyFormat> {
    if text.len() > MAX_BYTES || !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        let message = format!("{} cannot be a format of names", quoted(text));
        return Err((message, format!("write at most {MAX_BYTES} visible ASCII characters")));
    }
    let variable = |name: &str| match name {
        "key" => Ok(Variable::Key),
        "window" => Ok(Variable::Window),
        _ => {
            let message = format!("{} is not a variable", quoted(&format!("{{{name}}}")));
            Err((message, "the variables are `{key}` and `{window}`; write all other text literally".to_owned()))
        }
    };
    let pieces = split_variables(text, "{key}", variable)?;
    let (beside_window, before_key, after_key) = match pieces.as_slice() {
        [(head, Some(Variable::Key)), (middle, Some(Variable::Window)), (tail, None)] => {
            (middle.chars().last(), head.clone(), format!("{middle}{WINDOW_MARK}{tail}"))
        }
        [(head, Some(Variable::Window)), (middle, Some(Variable::Key)), (tail, None)] => {
            (middle.chars().next(), format!("{head}{WINDOW_MARK}{middle}"), tail.clone())
        }
        _ => {
            let message = format!("{} must have `{{key}}` and `{{window}}`, each once", quoted(text));
            return Err((message, "write, for example, `service:{key}:{window}`".to_owned()));
        }
    };
    if beside_window.is_none_or(|c| c.is_ascii_digit()) {
        let message = format!("{} could give two keys the same name, in different windows", quoted(text));
        let fix = "separate `{key}` and `{window}` by a character that is no digit, such as `{key}:{window}`";
        return Err((message, fix.to_owned()));
    }
    Ok(KeyFormat { before_key, after_key })
}

/// Checks the format of a rule against its other settings.
pub fn check_key_format(rule: &Rule, table: &Table, report: &mut Report) {
    let Some(item) = table.given("key_format") else { return };
    let limits = || rule.variants().flatten();
    let has_windows = |wanted: fn(&Windows) -> bool| limits().any(|limit| wanted(&limit.windows));
    let other = match () {
        () if rule.key.len() > 1 => "a key of several parts",
        () if matches!(rule.on_missing, OnMissing::Fallback(_)) => "another key in `on_missing_key`",
        () if rule.penalty_ms.is_some() => "`penalty`",
        () if rule.delays() => "`on_limit = \"delay\"`",
        () if rule.has_response_cost() => stated_by(rule),
        () if limits().any(|limit| limit.capacity.is_some()) => "`capacity`",
        () if rule.reserves() => "`reserve`",
        () if limits().any(|limit| limit.shards > 1) => "`shards`",
        () if has_windows(|windows| matches!(windows, Windows::Random { .. })) => "`start = \"random\"`",
        () if has_windows(|windows| matches!(windows, Windows::FirstRequest { .. })) => "`start = \"first-request\"`",
        () if rule.has_sliding_windows() => "`sliding`",
        () => "",
    };
    if !other.is_empty() {
        let message = format!("`key_format` cannot be combined with {other}");
        report.problem(item.key_span, message, "remove one of the two");
    } else if limits().any(|limit| limits().next().is_some_and(|first| first.windows != limit.windows)) {
        let message = "`key_format` cannot be combined with windows of several periods";
        report.problem(item.key_span, message, "write a rule for each period, with a `key_format` of its own");
    }
}

/// Reports formats by which counters of two rules could have the same name, and formats that a cluster cannot use. `rules`
/// have the position of their format, if it is given.
pub fn check_key_formats<'r>(
    rules: impl Iterator<Item = (&'r Rule, Option<&'r Span>)>,
    store: Option<&StoreConfig>,
    report: &mut Report,
) {
    let Some(store) = store else { return };
    let default_head = format!("{}:{{", store.prefix);
    let mut formatted: Vec<(&Rule, &KeyFormat)> = Vec::new();
    for (rule, span) in rules {
        let Some(span) = span else { continue };
        let Some(format) = rule.key_format.as_ref().filter(|_| rule.is_shared()) else { continue };
        if matches!(store.nodes, Nodes::Cluster(_)) {
            check_hash_tag(rule, format, span, report);
        }
        // Every default name has a brace. Keys have none.
        if format.name("").contains('{') && may_be_equal(format.head(), &default_head) {
            let message = "these names could equal those of rules without `key_format`";
            report.problem(span.clone(), message, format!("begin them with other text than `{default_head}`"));
        }
        if let Some((other, _)) = formatted.iter().find(|(_, other)| may_be_equal(other.head(), format.head())) {
            let (name, other) = (quoted(&rule.name), quoted(&other.name));
            let message = format!("counters of the rules {other} and {name} could have the same name");
            let fix =
                "begin their names differently: the text before `{key}` of one must not begin with that of the other";
            report.problem(span.clone(), message, fix);
        }
        formatted.push((rule, format));
    }
}

/// Whether two names that begin with these texts may be equal.
fn may_be_equal(a: &str, b: &str) -> bool {
    a.starts_with(b) || b.starts_with(a)
}

/// In a cluster, the slot of a counter must not depend on its window, which the store's clock decides.
fn check_hash_tag(rule: &Rule, format: &KeyFormat, span: &Span, report: &mut Report) {
    let name = format.name(if rule.key == [KeyPart::GLOBAL] { "" } else { "k" });
    let tag = name.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map_or("", |(tag, _)| tag);
    if tag.is_empty() || tag.contains(WINDOW_MARK) {
        let message = "in a Redis Cluster, names need a hash tag that does not contain `{window}`";
        let fix = "write, for example, `service:{{{key}}}:{window}`, where `{{` and `}}` stand for braces";
        report.problem(span.clone(), message, fix);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;
    use transom_limiter::store_key::encode_formatted_key;

    use super::*;

    #[test]
    fn formats_are_split_at_the_key() {
        for (text, before, after) in [
            ("rlaas:rate_limit:{key}:{window}", "rlaas:rate_limit:", ":\0"),
            ("{window}/a/{key}.x", "\0/a/", ".x"),
            ("s:{{{key}}}:{window}", "s:{", "}:\0"),
            ("1{key}9x{window}9", "1", "9x\09"),
        ] {
            let expected = KeyFormat { before_key: before.to_owned(), after_key: after.to_owned() };
            assert_eq!(parse(text), Ok(expected), "{text}");
        }
    }

    proptest! {
        /// Keys and numbers of a small alphabet collide often, if names do not separate them.
        #[test]
        fn every_key_and_window_has_its_own_name(
            literals in proptest::array::uniform3("[a1:{}]{0,3}"), window_first: bool,
            counters in
                proptest::collection::vec(("[17B%{:]{1,4}", prop_oneof![0..3_u64, 10..13_u64, 110..113_u64]), 2..60),
        ) {
            let [head, middle, tail] = literals.map(|text| text.replace('{', "{{").replace('}', "}}"));
            let (first, second) = if window_first { ("{window}", "{key}") } else { ("{key}", "{window}") };
            let Ok(format) = parse(&format!("{head}{first}{middle}{second}{tail}")) else { return Ok(()) };
            let mut names: HashMap<String, &(String, u64)> = HashMap::new();
            for counter in &counters {
                let mut key = String::new();
                encode_formatted_key(counter.0.as_bytes(), &mut key);
                let name = format.name(&key).replace(WINDOW_MARK, &counter.1.to_string());
                prop_assert_eq!(*names.entry(name).or_insert(counter), counter);
            }
        }
    }
}
