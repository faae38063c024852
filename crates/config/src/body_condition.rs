//! `when`: the requests that a rule counts, by a member of their body.

use super::diagnostics::{Report, quoted};
use super::settings::{MIB, Required, Size, Word, Words};
use super::toml_reader::{SpannedStr, Table};
use transom_usage::json_pointer::{JsonPointer, PointerError};
use transom_usage::usage::NamePattern;

settings! {
    /// The requests that a rule counts.
    pub struct BodyCondition checked by check_values {
        /// JSON Pointer to a member of the body.
        json: Option<JsonPointer> = Required(
            Word { shape: "JSON Pointer", example: "\"/model\"", read: read_pointer },
            "write `json = \"/model\"`: the member that decides",
        );
        /// Its values, with `*` at the end for all that begin so.
        values as "in": Vec<NamePattern> =
            Words { shape: "text", example: "[\"gpt-5*\"]", or: "", read: read_pattern };
    }
}

/// `body_key_limit` of the top level and of routes.
pub const BODY_KEY_LIMIT: Size<usize> = Size(MIB as usize, "\"1MiB\"", 1..=64 * MIB);

fn check_values(_: &mut BodyCondition, table: &Table, report: &mut Report) {
    if table.lacks("in") {
        let fix = "write `in = [\"gpt-5*\"]`: the values of requests that the rule counts";
        report.problem(table.span.clone(), "`when` has no `in`", fix);
    }
}

pub fn read_pointer(text: &SpannedStr, report: &mut Report) -> Option<JsonPointer> {
    let parsed = JsonPointer::parse(text.text);
    parsed
        .map_err(|error| {
            let fix = match error {
                PointerError::NoSlash => format!("write `\"/{}\"`", text.text),
                _ => String::from("write a JSON Pointer such as `\"/usage/total_tokens\"`"),
            };
            report.problem(text.span.clone(), format!("{} is not a JSON Pointer: {error}", quoted(text.text)), fix);
        })
        .ok()
}

/// A name, or the beginning of names with `*` at the end.
pub fn read_pattern(text: &SpannedStr, report: &mut Report) -> Option<NamePattern> {
    let pattern = NamePattern::parse(text.text);
    if pattern.is_none() {
        let fix = "write a name, or the beginning of names with `*` at the end";
        report.problem(text.span.clone(), format!("{} is not a pattern of names", quoted(text.text)), fix);
    }
    pattern
}
