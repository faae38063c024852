//! Responses of the gateway to gRPC clients: trailers-only responses with a gRPC status.

use crate::support::client::Answer;
use crate::support::gateway::Gateway;
use crate::support::http2_client::Calm;
use crate::support::ratelimit_parser::remaining;
use crate::support::upstream::{Talk, Upstream};
use crate::support::{one_rule, pass_all};

const GRPC: [(&str, &str); 2] = [("content-type", "application/grpc"), ("te", "trailers")];

fn call(client: &mut Calm) -> Answer {
    client.ask("POST", "/pkg.Service/Method", &GRPC, &[0, 0, 0, 0, 1, 7])
}

/// Fails unless the response is a gRPC response with this status; returns its message.
#[track_caller]
fn status(answer: &Answer, code: &str) -> String {
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.field("content-type"), Some("application/grpc"));
    assert_eq!(answer.all("grpc-status"), [code], "{answer:?}");
    assert!(answer.body.is_empty() && answer.trailers.is_empty() && answer.field("content-length").is_none());
    answer.field("grpc-message").unwrap().to_owned()
}

#[test]
fn a_refusal_has_status_resource_exhausted() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"1/hour\"]"));
    let mut client = Calm::connect(gateway.http);
    call(&mut client).expect(200);
    let refused = call(&mut client);
    assert!(status(&refused, "8").contains("quota has been exceeded"));
    assert_eq!(remaining(&refused, "r"), 0);
    assert!(refused.field("retry-after").is_some());
    // With a suffix or a parameter it is gRPC still; grpc-web is something else.
    for (content_type, is_grpc) in [
        ("application/grpc+proto", true),
        ("application/grpc; a=b", true),
        ("application/grpc-web", false),
        ("application/json", false),
    ] {
        let answer = client.ask("POST", "/a", &[("content-type", content_type)], b"x");
        if is_grpc {
            status(&answer, "8");
        } else {
            answer.expect(429).problem();
        }
    }
    // HTTP/1.1 does not carry it.
    gateway.get_with("/a", &GRPC).expect(429).problem();
}

#[test]
fn a_cost_above_the_limit_is_reported() {
    let gateway = Gateway::start(&one_rule(
        "key = \"ip\"\nwindows = [\"1/hour\"]\ncost = { request-header = \"x-cost\", default = 1, max = 5 }",
    ));
    let fields = [GRPC[0], GRPC[1], ("x-cost", "2")];
    let refused = Calm::connect(gateway.http).ask("POST", "/a", &fields, b"x");
    assert!(status(&refused, "8").contains("never"));
    assert_eq!(refused.field("retry-after"), None);
}

#[test]
fn an_error_has_the_corresponding_grpc_status() {
    let gateway = Gateway::start(&pass_all(&Upstream::refusing()));
    assert_eq!(status(&call(&mut Calm::connect(gateway.http)), "14"), "no upstream server could be reached");
    let gone = Upstream::with(|talk: &mut Talk| drop(talk.head()));
    let gateway = Gateway::start(&pass_all(&gone));
    status(&call(&mut Calm::connect(gateway.http)), "14");
    let silent = Upstream::with(|talk: &mut Talk| while !talk.closed() {});
    let gateway = Gateway::start(&format!("{}[timeouts]\nresponse_head = \"200ms\"\n", pass_all(&silent)));
    status(&call(&mut Calm::connect(gateway.http)), "4");
    let toml = one_rule("key = \"header:x-user\"\non_missing_key = \"refuse\"\nwindows = [\"9/hour\"]");
    let gateway = Gateway::start(&toml.replace("/{*rest}", "/pkg.Service/Method"));
    let mut client = Calm::connect(gateway.http);
    assert_eq!(status(&call(&mut client), "13"), "the request lacks `header:x-user`");
    status(&client.ask("POST", "/elsewhere", &GRPC, b"x"), "12");
}

#[test]
fn a_response_of_the_upstream_is_forwarded_unchanged() {
    let upstream = Upstream::with(|talk: &mut Talk| {
        while let Some(received) = talk.request() {
            assert_eq!(received.field("te"), Some("trailers"));
            talk.send("HTTP/1.1 200 OK\r\nContent-Type: application/grpc\r\nTransfer-Encoding: chunked\r\n");
            talk.send("Trailer: grpc-status, grpc-message\r\n\r\n5\r\n\0\0\0\0\0\r\n0\r\n");
            talk.send("grpc-status: 5\r\ngrpc-message: not%20here\r\n\r\n");
        }
    });
    let gateway = Gateway::start(&pass_all(&upstream));
    let answer = call(&mut Calm::connect(gateway.http)).expect(200);
    assert_eq!(answer.body, [0; 5]);
    let trailers = [("grpc-status", "5"), ("grpc-message", "not%20here")];
    assert_eq!(answer.trailers, trailers.map(|(name, value)| (name.to_owned(), value.to_owned())));
}
