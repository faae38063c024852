//! `count_when`: the responses whose requests a rule counts.

use std::ops::RangeInclusive;

use http::StatusCode;
use toml::de::DeValue;

use super::diagnostics::{Report, quoted};
use super::settings::{Custom, Shape};
use super::toml_reader::{Item, Table};

const STATUS_EXAMPLE: &str = "[401, \"5xx\"]";
const GRPC_EXAMPLE: &str = "[\"UNAUTHENTICATED\"]";

/// The names of the gRPC status codes, by code.
const GRPC_CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

settings! {
    /// The responses whose requests a rule counts.
    pub struct CountWhen checked by check_count_when {
        /// Statuses of the response: numbers, and classes such as `"5xx"`.
        status: Vec<RangeInclusive<u16>> = Custom::or_empty(
            || Shape::list_of(vec![Shape::Integer(100..=599), Shape::Text("`\"4xx\"`")]),
            read_statuses,
        );
        /// Codes in `grpc-status`: numbers, and names such as `"UNAUTHENTICATED"`. A response that ends without `grpc-status`
        /// has code 2, `"UNKNOWN"`.
        grpc_status: Vec<u8> = Custom::or_empty(
            || Shape::list_of(vec![Shape::Integer(0..=16), Shape::Words(GRPC_CODES.to_vec())]),
            read_grpc_codes,
        );
    }
}

impl CountWhen {
    /// Whether a request with this response counts. `grpc_status`: the code of a gRPC response, if known yet; `None`: only
    /// the code decides, at the end of the response.
    pub fn counts(&self, status: StatusCode, grpc_status: Option<u8>) -> Option<bool> {
        match &self.grpc_status {
            _ if self.status.iter().any(|range| range.contains(&status.as_u16())) => Some(true),
            codes if codes.is_empty() => Some(false),
            codes => grpc_status.map(|code| codes.contains(&code)),
        }
    }
}

fn check_count_when(_: &mut CountWhen, table: &Table, report: &mut Report) {
    if table.lacks("status") && table.lacks("grpc_status") {
        let message = "`count_when` has neither `status` nor `grpc_status`";
        report.problem(table.span.clone(), message, "write, for example, `count_when = { status = [401] }`");
    }
}

pub fn read_statuses(item: &Item, report: &mut Report) -> Option<Vec<RangeInclusive<u16>>> {
    read_list(item, STATUS_EXAMPLE, report, |item, report| {
        let DeValue::String(text) = item.value else {
            let status = u16::try_from(item.integer(100..=599, report)?).ok()?;
            return Some(status..=status);
        };
        match text.as_bytes() {
            [class @ b'1'..=b'5', b'x' | b'X', b'x' | b'X'] => {
                let first = u16::from(class - b'0') * 100;
                Some(first..=first + 99)
            }
            _ => {
                let fix = match text.parse::<u16>() {
                    Ok(status) => format!("write `{status}`, without quotes"),
                    Err(_) => "write a status such as `401`, or a class such as `\"5xx\"`".to_owned(),
                };
                report.reject(item.span.clone(), format!("{} is not a class of statuses", quoted(text)), fix)
            }
        }
    })
}

fn read_grpc_codes(item: &Item, report: &mut Report) -> Option<Vec<u8>> {
    let codes: Vec<(&str, u8)> = GRPC_CODES.into_iter().zip(0..).collect();
    read_list(item, GRPC_EXAMPLE, report, |item, report| match item.value {
        DeValue::String(_) => item.choice(&codes, report),
        _ => u8::try_from(item.integer(0..=16, report)?).ok(),
    })
}

/// A list that is not empty. Invalid items are reported and left out.
fn read_list<T>(
    item: &Item,
    example: &str,
    report: &mut Report,
    read: impl Fn(&Item, &mut Report) -> Option<T>,
) -> Option<Vec<T>> {
    let items = item.list(example, report)?;
    if items.is_empty() {
        let fix = item.fix_with(example);
        return report.reject(item.span.clone(), format!("`{}` is empty", item.key), fix);
    }
    Some(items.iter().filter_map(|item| read(item, report)).collect())
}
