//! Bodies of responses that the gateway generates: the settings `body` and `content_type` of rules and routes.

use super::diagnostics::{Report, quoted, quoted_list};
use super::settings::Word;
use super::template::{find_format_variable, find_nginx_variable, find_variable};
use super::toml_reader::{SpannedStr, Table};

/// A configured body is sent with every refusal, so it should not be long.
const BODY_MAX_BYTES: usize = 64 * 1024;

/// A body and its media type, which is valid as a field value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Body {
    pub text: String,
    pub content_type: String,
}

pub const BODY: Word<String> = Word { shape: "text, at most 64 KiB", example: "\"slow down\\n\"", read: read_text };
pub const CONTENT_TYPE: Word<String> =
    Word { shape: "media type", example: "\"application/json\"", read: read_content_type };

impl Body {
    /// The body, if there is one. `content_type` is `text/plain; charset=utf-8` by default.
    pub fn new(text: Option<String>, content_type: Option<String>) -> Option<Body> {
        let content_type = content_type.unwrap_or_else(|| "text/plain; charset=utf-8".to_owned());
        text.map(|text| Body { text, content_type })
    }
}

/// The API in whose form refusals state errors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BodyStyle {
    OpenAi,
    Anthropic,
}

pub const BODY_STYLES: [(&str, BodyStyle); 2] = [("openai", BodyStyle::OpenAi), ("anthropic", BodyStyle::Anthropic)];

/// A variable in the body of a refusal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RefusalVariable {
    /// The seconds of `Retry-After`.
    RetryAfter,
    /// The limit of the window.
    Limit,
    /// The window that blocks longest.
    Window,
    /// Its rule.
    Rule,
    RequestId,
}

const REFUSAL_VARIABLES: [(&str, RefusalVariable); 5] = [
    ("{retry_after}", RefusalVariable::RetryAfter),
    ("{limit}", RefusalVariable::Limit),
    ("{window}", RefusalVariable::Window),
    ("{rule}", RefusalVariable::Rule),
    ("{request_id}", RefusalVariable::RequestId),
];

/// Splits the body of a refusal into literals, each with the variable that follows it. Other braces are literal, as JSON needs it.
pub fn split_refusal_variables(text: &str) -> Vec<(&str, Option<RefusalVariable>)> {
    let mut pieces = Vec::new();
    let (mut start, mut at) = (0, 0);
    while let Some(offset) = text[at..].find('{') {
        at += offset;
        let found = REFUSAL_VARIABLES.iter().find(|(name, _)| text[at..].starts_with(name));
        let Some((name, variable)) = found else {
            at += 1;
            continue;
        };
        pieces.push((&text[start..at], Some(*variable)));
        at += name.len();
        start = at;
    }
    pieces.push((&text[start..], None));
    pieces
}

/// What looks like a variable in the body of a refusal and is sent literally, and what to write instead.
pub fn literal_in_refusal(text: &str) -> Option<String> {
    let (written, fix) = match find_nginx_variable(text) {
        Some((written, "request_id")) => (written, String::from("write `{request_id}`")),
        Some((written, _)) => (written, known_variables()),
        None => (
            find_format_variable(text).map(|(written, ..)| written).or_else(|| find_variable(text))?,
            known_variables(),
        ),
    };
    Some(format!("{} in `body` is sent literally: {fix}", quoted(written)))
}

/// What looks like a variable in the body of a route's own response, which has none.
pub fn literal_in_response(text: &str) -> Option<&str> {
    let of_refusals =
        || REFUSAL_VARIABLES.iter().find_map(|(name, _)| text.find(name).map(|at| &text[at..at + name.len()]));
    let of_nginx = find_nginx_variable(text).map(|(written, _)| written);
    let of_formats = || find_format_variable(text).map(|(written, ..)| written);
    of_nginx.or_else(of_formats).or_else(|| find_variable(text)).or_else(of_refusals)
}

fn known_variables() -> String {
    format!("the variables of a body are {}", quoted_list(REFUSAL_VARIABLES.map(|(name, _)| name), "and"))
}

/// Reports a media type without a body. `owner` names the rule or response in messages.
pub fn check_content_type(table: &Table, owner: &str, report: &mut Report) {
    if let (None, Some(item)) = (table.given("body"), table.given("content_type")) {
        let message = format!("`content_type` has no effect: {owner} has no `body`");
        report.problem(item.key_span, message, "add `body`, or remove `content_type`");
    }
}

/// Reports a `body` beside a `body_style`.
pub fn check_body_style(table: &Table, report: &mut Report) {
    if let (Some(_), Some(item)) = (table.given("body_style"), table.given("body")) {
        report.problem(item.key_span, "`body` and `body_style` are both given", "keep one of the two");
    }
}

fn read_text(word: &SpannedStr, report: &mut Report) -> Option<String> {
    if word.text.len() > BODY_MAX_BYTES {
        let message = format!("`body` has `{}` bytes", word.text.len());
        return report.reject(word.span.clone(), message, format!("write at most `{BODY_MAX_BYTES}` bytes"));
    }
    Some(word.text.to_owned())
}

/// Reads a media type (RFC 9110, section 8.3.1). Parameters are only checked to be printable ASCII.
fn read_content_type(word: &SpannedStr, report: &mut Report) -> Option<String> {
    let token = |text: &str| {
        !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
    };
    let (name, parameters) = word.text.split_once(';').unwrap_or((word.text, ""));
    let is_type = name.trim_end().split_once('/').is_some_and(|(kind, sub)| token(kind) && token(sub));
    if !is_type || !parameters.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
        let fix = "write a type such as `\"application/json\"` or `\"text/html; charset=utf-8\"`";
        return report.reject(word.span.clone(), format!("{} is not a media type", quoted(word.text)), fix);
    }
    Some(word.text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_names_in_braces_are_variables() {
        use RefusalVariable::{Limit, RequestId, RetryAfter};
        for (text, pieces) in [
            ("", vec![("", None)]),
            ("{}{a{b}}{", vec![("{}{a{b}}{", None)]),
            ("{ limit }{Limit}{limits}", vec![("{ limit }{Limit}{limits}", None)]),
            ("{limit}", vec![("", Some(Limit)), ("", None)]),
            ("{{limit}}", vec![("{", Some(Limit)), ("}", None)]),
            (
                "{\"wait\": {retry_after}, \"é\": \"{request_id}\"}",
                vec![("{\"wait\": ", Some(RetryAfter)), (", \"é\": \"", Some(RequestId)), ("\"}", None)],
            ),
        ] {
            assert_eq!(split_refusal_variables(text), pieces, "{text}");
        }
    }
}
