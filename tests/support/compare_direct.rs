//! Sends the same request to a server directly and through the gateway, and compares the two responses.
//!
//! The comparison covers the status, the bytes of the body, the trailers, and all fields with their values and the order
//! of fields of one name. It leaves out `Date`, the connection-specific fields (`Connection`, `Keep-Alive`,
//! `Transfer-Encoding`, but not `Content-Length`), and the fields that the gateway adds, `RateLimit` and
//! `RateLimit-Policy`, whose presence is asserted.

use std::net::SocketAddr;

use serde_json::Value;

use super::client::{Answer, Client, HOST, request};

const NOT_COMPARED: [&str; 6] =
    ["date", "connection", "keep-alive", "transfer-encoding", "ratelimit", "ratelimit-policy"];

/// Two ways to one server.
pub struct Twin {
    pub direct: SocketAddr,
    pub gateway: SocketAddr,
}

impl Twin {
    /// Compares the responses to a request; returns the gateway's.
    pub fn same(&self, method: &str, target: &str, fields: &[(&str, &str)], body: &[u8]) -> Answer {
        self.same_bytes(method, target, &request(method, target, fields, body))
    }

    /// Compares the responses to a request that is written out.
    pub fn same_bytes(&self, method: &str, target: &str, bytes: &[u8]) -> Answer {
        let (direct, through) = self.both(method, bytes);
        assert_same(&format!("{method} {target}"), &direct, &through);
        through
    }

    /// For servers that say in JSON which fields they received: there, `X-Forwarded-Host` is one
    /// more, and the length differs by it.
    pub fn same_echo(&self, method: &str, target: &str, fields: &[(&str, &str)], body: &[u8]) {
        self.same_echo_bytes(method, target, &request(method, target, fields, body));
    }

    pub fn same_echo_bytes(&self, method: &str, target: &str, bytes: &[u8]) {
        let (mut direct, mut through) = self.both(method, bytes);
        let mut json = through.json();
        let added = json["headers"].as_object_mut().unwrap().remove("X-Forwarded-Host");
        assert_eq!(added, Some(Value::from(HOST)), "{method} {target}");
        assert_eq!(json, direct.json(), "{method} {target}");
        for answer in [&mut direct, &mut through] {
            assert_eq!(answer.field("content-length"), Some(answer.body.len().to_string().as_str()));
            answer.fields.retain(|(name, _)| name != "content-length");
            answer.body.clear();
        }
        assert_same(&format!("{method} {target}"), &direct, &through);
    }

    pub fn both(&self, method: &str, bytes: &[u8]) -> (Answer, Answer) {
        let answer = |address| Client::connect(address).send(bytes).answer_to(method);
        let (direct, through) = (answer(self.direct), answer(self.gateway));
        assert!(through.field("ratelimit").is_some() && through.field("ratelimit-policy").is_some(), "{through:?}");
        (direct, through)
    }
}

fn assert_same(what: &str, direct: &Answer, through: &Answer) {
    assert_eq!(direct.status, through.status, "{what}");
    let mut fields = [direct, through].map(|answer| {
        let compared = answer.fields.iter().filter(|(name, _)| !NOT_COMPARED.contains(&name.as_str()));
        compared.cloned().collect::<Vec<_>>()
    });
    // Stable, so that fields of one name stay in their order.
    fields.iter_mut().for_each(|fields| fields.sort_by(|a, b| a.0.cmp(&b.0)));
    assert_eq!(fields[0], fields[1], "{what}");
    assert_eq!(direct.trailers, through.trailers, "{what}");
    assert_eq!(direct.body.len(), through.body.len(), "{what}");
    assert!(direct.body == through.body, "{what}: the bodies differ");
}
