//! The upstream that is built in: it answers with what it received, so that a first run needs
//! nothing else, and a configuration can be tried out before there is anything behind it.

use std::pin::Pin;

use http::request::Parts;
use http_body::Body;
use serde_json::{Map, Value, json};

use super::exchange::Outgoing;
use crate::http::fault::Fault;
use crate::http::reply::{self, Reply};

/// Answers with the request's method, path, query, fields, and the length of its body, which is
/// read to its end but not kept.
pub async fn answer(parts: &Parts, body: Outgoing) -> Result<Reply, Fault> {
    let body_bytes = match body {
        Outgoing::Empty => 0,
        Outgoing::Streaming(body) => length(body).await?,
    };
    let mut fields: Map<String, Value> = Map::new();
    for name in parts.headers.keys() {
        let values = parts.headers.get_all(name).iter().map(|value| String::from_utf8_lossy(value.as_bytes()));
        fields.insert(name.to_string(), Value::String(values.collect::<Vec<_>>().join(", ")));
    }
    let echo = json!({
        "method": parts.method.as_str(),
        "path": parts.uri.path(),
        "query": parts.uri.query(),
        "fields": fields,
        "body_bytes": body_bytes,
    });
    Ok(reply::json(format!("{echo:#}\n")))
}

async fn length(mut body: hyper::body::Incoming) -> Result<u64, Fault> {
    let mut length = 0;
    while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        if let Some(data) = frame.map_err(|_broken| Fault::Body)?.data_ref() {
            length += data.len() as u64;
        }
    }
    Ok(length)
}
