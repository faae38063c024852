//! Sends the same request to a server directly and through the gateway, and compares the two responses.
//!
//! The comparison covers the status, the bytes of the body, the trailers, and all fields with their values and the order
//! of fields of one name. It leaves out `Date`, the connection-specific fields (`Connection`, `Keep-Alive`,
//! `Transfer-Encoding`, but not `Content-Length`), and the fields that the gateway adds, `RateLimit` and
//! `RateLimit-Policy`, whose presence is asserted.

use std::net::SocketAddr;

use serde_json::Value;

use super::client::{Client, HOST, HttpResponse, request};

const NOT_COMPARED: [&str; 7] =
    ["x-request-id", "date", "connection", "keep-alive", "transfer-encoding", "ratelimit", "ratelimit-policy"];

/// The addresses of a server and of a gateway in front of it.
pub struct DirectComparison {
    pub direct: SocketAddr,
    pub gateway: SocketAddr,
}

impl DirectComparison {
    /// Compares the responses to a request; returns the gateway's.
    pub fn assert_same_response(
        &self,
        method: &str,
        target: &str,
        fields: &[(&str, &str)],
        body: &[u8],
    ) -> HttpResponse {
        self.assert_same_for_bytes(method, target, &request(method, target, fields, body))
    }

    /// Compares the responses to a request given as bytes.
    pub fn assert_same_for_bytes(&self, method: &str, target: &str, bytes: &[u8]) -> HttpResponse {
        let (direct, through) = self.send_to_both(method, bytes);
        assert_same(&format!("{method} {target}"), &direct, &through);
        through
    }

    /// For servers that respond with the received fields as JSON: through the gateway the JSON has `X-Forwarded-Host` in
    /// addition, and a different length.
    pub fn assert_same_echo(&self, method: &str, target: &str, fields: &[(&str, &str)], body: &[u8]) {
        self.assert_same_echo_for_bytes(method, target, &request(method, target, fields, body));
    }

    pub fn assert_same_echo_for_bytes(&self, method: &str, target: &str, bytes: &[u8]) {
        let (mut direct, mut through) = self.send_to_both(method, bytes);
        let mut json = through.json();
        let added = json["headers"].as_object_mut().unwrap().remove("X-Forwarded-Host");
        assert_eq!(added, Some(Value::from(HOST)), "{method} {target}");
        assert_eq!(json, direct.json(), "{method} {target}");
        for response in [&mut direct, &mut through] {
            assert_eq!(response.field("content-length"), Some(response.body.len().to_string().as_str()));
            response.fields.retain(|(name, _)| name != "content-length");
            response.body.clear();
        }
        assert_same(&format!("{method} {target}"), &direct, &through);
    }

    pub fn send_to_both(&self, method: &str, bytes: &[u8]) -> (HttpResponse, HttpResponse) {
        let response = |address| Client::connect(address).send(bytes).read_response_to(method);
        let (direct, through) = (response(self.direct), response(self.gateway));
        assert!(through.field("ratelimit").is_some() && through.field("ratelimit-policy").is_some(), "{through:?}");
        (direct, through)
    }
}

fn assert_same(what: &str, direct: &HttpResponse, through: &HttpResponse) {
    assert_eq!(direct.status, through.status, "{what}");
    let mut fields = [direct, through].map(|response| {
        let compared = response.fields.iter().filter(|(name, _)| !NOT_COMPARED.contains(&name.as_str()));
        compared.cloned().collect::<Vec<_>>()
    });
    // A stable sort keeps the order of fields of one name.
    fields.iter_mut().for_each(|fields| fields.sort_by(|a, b| a.0.cmp(&b.0)));
    assert_eq!(fields[0], fields[1], "{what}");
    assert_eq!(direct.trailers, through.trailers, "{what}");
    assert_eq!(direct.body.len(), through.body.len(), "{what}");
    assert!(direct.body == through.body, "{what}: the bodies differ");
}
