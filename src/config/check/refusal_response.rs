//! What a refusal by a rule looks like: status, body and type.

use std::time::Duration;

use super::{DAY_MS, Table, read_duration_ms};
use crate::config::RefusalResponse;
use crate::config::diagnostics::{Report, quoted};
use crate::config::route::Body;
use crate::config::toml_reader::Item;

/// Every refusal carries it, so it should not be long.
const BODY_MAX_BYTES: usize = 64 * 1024;

/// What a rule says about its refusals.
pub struct RefusalSettings<'d> {
    status: Option<Item<'d>>,
    body: Option<Item<'d>>,
    content_type: Option<Item<'d>>,
    retry_jitter: Option<Item<'d>>,
}

impl<'d> RefusalSettings<'d> {
    pub fn take_from(table: &mut Table<'d>) -> RefusalSettings<'d> {
        RefusalSettings {
            status: table.get("status"),
            body: table.get("body"),
            content_type: table.get("content_type"),
            retry_jitter: table.get("retry_jitter"),
        }
    }

    pub fn read(self, report: &mut Report) -> RefusalResponse {
        let status = self.status.and_then(|item| item.integer(400..=599, report));
        let body = read_body(self.body, self.content_type, "the rule", report);
        let jitter_ms =
            self.retry_jitter.and_then(|item| read_duration_ms(&item, 0..=DAY_MS, Duration::from_secs(5), report));
        RefusalResponse {
            status: status.and_then(|status| u16::try_from(status).ok()),
            body,
            retry_jitter_s: jitter_ms.unwrap_or(0).div_ceil(1000),
        }
    }
}

/// A body that the gateway answers with, and its type; `of` is whose it is.
pub fn read_body(body: Option<Item>, kind: Option<Item>, of: &str, report: &mut Report) -> Option<Body> {
    let content_type = kind.as_ref().and_then(|item| read_content_type(item, report));
    if let (None, Some(item)) = (&body, &kind) {
        let message = format!("`content_type` has no effect: {of} has no `body` of its own");
        report.problem(item.key_span.clone(), message, "add `body`, or remove `content_type`");
    }
    let text = body.and_then(|item| self::read_body_text(&item, report))?;
    Some(Body { text, content_type: content_type.unwrap_or_else(|| "text/plain; charset=utf-8".to_owned()) })
}

fn read_body_text(item: &Item, report: &mut Report) -> Option<String> {
    let word = item.string("\"slow down\\n\"", report)?;
    if word.text.len() > BODY_MAX_BYTES {
        let message = format!("`body` has `{}` bytes", word.text.len());
        report.problem(word.span, message, format!("write at most `{BODY_MAX_BYTES}`"));
        return None;
    }
    Some(word.text.to_owned())
}

/// A media type (RFC 9110, section 8.3.1), as far as it has to be one to be a field's value.
fn read_content_type(item: &Item, report: &mut Report) -> Option<String> {
    let word = item.string("\"application/json\"", report)?;
    let token = |text: &str| {
        !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
    };
    let (name, parameters) = word.text.split_once(';').unwrap_or((word.text, ""));
    let sound = name.trim_end().split_once('/').is_some_and(|(kind, sub)| token(kind) && token(sub));
    if !sound || !parameters.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
        let fix = "write such as `\"application/json\"` or `\"text/html; charset=utf-8\"`";
        report.problem(word.span, format!("{} is no media type", quoted(word.text)), fix);
        return None;
    }
    Some(word.text.trim().to_owned())
}
