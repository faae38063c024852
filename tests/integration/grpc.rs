//! Responses of the gateway to gRPC clients: trailers-only responses with a gRPC status.

use crate::support::client::HttpResponse;
use crate::support::gateway::Gateway;
use crate::support::http2_client::Http2Client;
use crate::support::ratelimit_parser::remaining;
use crate::support::upstream::{Connection, Upstream};
use crate::support::{forward_all, one_rule};

const GRPC: [(&str, &str); 2] = [("content-type", "application/grpc"), ("te", "trailers")];

fn call(client: &mut Http2Client) -> HttpResponse {
    client.request_path("POST", "/pkg.Service/Method", &GRPC, &[0, 0, 0, 0, 1, 7])
}

/// Fails unless the response is a gRPC response with this status; returns its message.
#[track_caller]
fn grpc_message(response: &HttpResponse, code: &str) -> String {
    assert_eq!(response.status, 200, "{response:?}");
    assert_eq!(response.field("content-type"), Some("application/grpc"));
    assert_eq!(response.values("grpc-status"), [code], "{response:?}");
    assert!(response.body.is_empty() && response.trailers.is_empty() && response.field("content-length").is_none());
    response.field("grpc-message").unwrap().to_owned()
}

#[test]
fn a_refusal_has_status_resource_exhausted() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"1/hour\"]"));
    let mut client = Http2Client::connect(gateway.http);
    call(&mut client).expect(200);
    let refused = call(&mut client);
    assert!(grpc_message(&refused, "8").contains("quota has been exceeded"));
    assert_eq!(remaining(&refused, "r"), 0);
    assert!(refused.field("retry-after").is_some());
    // A content type with a suffix or parameter is gRPC; grpc-web is not.
    for (content_type, is_grpc) in [
        ("application/grpc+proto", true),
        ("application/grpc; a=b", true),
        ("application/grpc-web", false),
        ("application/json", false),
    ] {
        let response = client.request_path("POST", "/a", &[("content-type", content_type)], b"x");
        if is_grpc {
            grpc_message(&response, "8");
        } else {
            response.expect(429).problem();
        }
    }
    // A request over HTTP/1.1 is not gRPC.
    gateway.get_with("/a", &GRPC).expect(429).problem();
}

#[test]
fn a_cost_above_the_limit_is_reported() {
    let gateway = Gateway::start(&one_rule(
        "key = \"ip\"\nwindows = [\"1/hour\"]\ncost = { request-header = \"x-cost\", default = 1, max = 5 }",
    ));
    let fields = [GRPC[0], GRPC[1], ("x-cost", "2")];
    let refused = Http2Client::connect(gateway.http).request_path("POST", "/a", &fields, b"x");
    assert!(grpc_message(&refused, "8").contains("never"));
    assert_eq!(refused.field("retry-after"), None);
}

#[test]
fn an_error_has_the_corresponding_grpc_status() {
    let gateway = Gateway::start(&forward_all(&Upstream::refusing_connections()));
    assert_eq!(
        grpc_message(&call(&mut Http2Client::connect(gateway.http)), "14"),
        "no upstream server could be reached"
    );
    let closing = Upstream::with_script(|connection: &mut Connection| drop(connection.read_head()));
    let gateway = Gateway::start(&forward_all(&closing));
    grpc_message(&call(&mut Http2Client::connect(gateway.http)), "14");
    let silent = Upstream::with_script(|connection: &mut Connection| while !connection.wait_for_close() {});
    let gateway = Gateway::start(&format!("{}[timeouts]\nresponse_head = \"200ms\"\n", forward_all(&silent)));
    grpc_message(&call(&mut Http2Client::connect(gateway.http)), "4");
    let toml = one_rule("key = \"header:x-user\"\non_missing_key = \"refuse\"\nwindows = [\"9/hour\"]");
    let gateway = Gateway::start(&toml.replace("/{*rest}", "/pkg.Service/Method"));
    let mut client = Http2Client::connect(gateway.http);
    assert_eq!(grpc_message(&call(&mut client), "13"), "the request lacks the field `x-user`");
    grpc_message(&client.request_path("POST", "/elsewhere", &GRPC, b"x"), "12");
    let toml = one_rule(
        "key = \"header:x-user\"\non_missing_key = \"skip\"\non_unknown_key = \"refuse\"\nwindows = [\"9/hour\"]",
    );
    let gateway =
        Gateway::start_with(&format!("[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-user\"\n{toml}"), "");
    let fields = [GRPC[0], GRPC[1], ("x-user", "mallory")];
    let unknown = Http2Client::connect(gateway.http).request_path("POST", "/a", &fields, b"x");
    grpc_message(&unknown, "16");
    assert_eq!(unknown.field("www-authenticate"), Some("Key"));
}

#[test]
fn a_response_of_the_upstream_is_forwarded_unchanged() {
    let upstream = Upstream::with_script(|connection: &mut Connection| {
        while let Some(received) = connection.read_request() {
            assert_eq!(received.field("te"), Some("trailers"));
            connection.send("HTTP/1.1 200 OK\r\nContent-Type: application/grpc\r\nTransfer-Encoding: chunked\r\n");
            connection.send("Trailer: grpc-status, grpc-message\r\n\r\n5\r\n\0\0\0\0\0\r\n0\r\n");
            connection.send("grpc-status: 5\r\ngrpc-message: not%20here\r\n\r\n");
        }
    });
    let gateway = Gateway::start(&forward_all(&upstream));
    let response = call(&mut Http2Client::connect(gateway.http)).expect(200);
    assert_eq!(response.body, [0; 5]);
    let trailers = [("grpc-status", "5"), ("grpc-message", "not%20here")];
    assert_eq!(response.trailers, trailers.map(|(name, value)| (name.to_owned(), value.to_owned())));
}
