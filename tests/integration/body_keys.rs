//! Keys and conditions by values of the body, which is read before the decision.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::json;

use crate::count_when::documented;
use crate::support::client::{Client, HOST, request};
use crate::support::external_scripts::{ScriptServer, run_checks_of};
use crate::support::gateway::Gateway;
use crate::support::http2_client::Http2Client;
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, eventually_eq};

const TOML: &str = r#"
[rules.models]
key = ["ip", "json:/model"]
on_missing_key = "ip"
windows = ["9/day"]
[rules.large]
key = "global"
windows = ["99/day"]
when = { json = "/model", in = ["gpt-5*"] }
[[routes]]
path = "/long"
upstream = "u"
rules = ["models"]
body_key_limit = "1MiB"
[[routes]]
path = "/{*rest}"
upstream = "u"
rules = ["models", "large"]
"#;

#[test]
fn values_of_the_body_are_keys_and_conditions() {
    let upstream = Upstream::responding(|_| reply(200, &[], b""));
    let gateway = Gateway::start(&format!("body_key_limit = \"1KiB\"\n{}{TOML}", upstream.toml("u")));
    let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
    gzip.write_all(br#"{"model":"gpt-5"}"#).unwrap();
    let (gzip, chunked) = (gzip.finish().unwrap(), &b"9\r\n{\"model\":\r\n8\r\n\"gpt-5\"}\r\n0\r\n\r\n"[..]);
    let spaces = format!("{{{}\"model\":\"gpt-5\"}}", " ".repeat(1100));
    let (plain, coded) = ([].as_slice(), [("Content-Encoding", "gzip")].as_slice());
    // What remains of the rule by model, and of the one for large models, or the status.
    for (path, fields, body, expected) in [
        ("/a", plain, &br#"{"model":"gpt-5"}"#[..], Ok((8, Some(98)))),
        ("/a", plain, br#"{"x":[{"model":"o3"}],"mod\u0065l" : "gpt\u002d5"}"#, Ok((7, Some(97)))),
        ("/a", coded, &gzip, Ok((6, Some(96)))),
        ("/a", &[("Transfer-Encoding", "chunked")], chunked, Ok((5, Some(95)))),
        ("/a", plain, br#"{"model":"o3"}"#, Ok((8, None))),
        ("/a", plain, br#"{"other":"o3"}"#, Ok((8, None))),
        ("/a", plain, b"no JSON", Ok((7, Some(94)))),
        ("/a", plain, br#"[{"model":"gpt-5"}]"#, Ok((6, Some(93)))),
        ("/a", plain, b"", Ok((5, Some(92)))),
        ("/a", plain, br#"{"model":"a","model":"gpt-5"}"#, Err(400)),
        ("/a", plain, br#"{"model":-1}"#, Err(400)),
        ("/a", plain, spaces.as_bytes(), Err(413)),
        ("/a", &[("Content-Encoding", "compress")], b"{}", Err(415)),
        ("/long", plain, spaces.as_bytes(), Ok((4, None))),
    ] {
        let before = upstream.received().len();
        let sent = if fields == [("Transfer-Encoding", "chunked")] {
            let mut client = gateway.client();
            client.send([&request("POST", path, fields, b"")[..], body].concat()).read_response()
        } else {
            gateway.client().request("POST", path, fields, body)
        };
        let shown = String::from_utf8_lossy(body);
        match expected {
            Ok((models, large)) => {
                let response = sent.expect(200);
                assert_eq!(remaining(&response, "models"), models, "{shown}");
                let is_large = items(&response, "ratelimit").iter().any(|item| item.name == "large");
                let remains = is_large.then(|| remaining(&response, "large"));
                assert_eq!(remains, large, "{shown}");
                let received = upstream.received().pop().unwrap();
                let forwarded = if body == chunked { &br#"{"model":"gpt-5"}"#[..] } else { body };
                assert_eq!(received.body, forwarded, "{shown}");
            }
            Err(status) => {
                assert_eq!((sent.status, upstream.received().len()), (status, before), "{shown}");
            }
        }
    }
    // A body that ends early counts nowhere; an unreadable model counted as a large one.
    let mut client = gateway.client();
    client.send(&request("POST", "/a", &[("Content-Length", "99")], b"{")[..]).shutdown_write();
    client.read_to_end();
    let mut http2 = Http2Client::connect(gateway.http);
    let response = http2.request_path("POST", "/a", &[], br#"{"model":"gpt-5"}"#).expect(200);
    assert_eq!((remaining(&response, "models"), remaining(&response, "large")), (3, 90));
    assert_eq!(upstream.received().pop().unwrap().body, br#"{"model":"gpt-5"}"#);
    http2.request_path("POST", "/a", &[], spaces.as_bytes()).expect(413);
    http2.request_path("POST", "/a", &[], br#"{"model":1,"Model":1}"#).expect(400);
}

/// Rules that need no body refuse a request before its body is read, and count as they do on a route where no body is read.
#[test]
fn what_is_refused_anyway_is_refused_before_its_body_is_read() {
    let upstream = Upstream::always(200);
    let others = "[rules.models]\nkey = [\"ip\", \"json:/model\"]\non_missing_key = \"refuse\"\nwindows = [\"9/day\"]\n\
                  [rules.shadow]\nkey = \"ip\"\nwindows = [\"1/day\"]\non_limit = \"shadow\"\n\
                  [rules.slots]\nkey = \"ip\"\nconcurrent = 2\n\
                  [rules.tokens]\nkey = \"bearer\"\non_missing_key = \"refuse\"\nwindows = [\"9/day\"]\n";
    let route =
        |path: &str, rules: &str| format!("[[routes]]\npath = \"{path}\"\nupstream = \"u\"\nrules = [{rules}]\n");
    let body = br#"{"model":"a"}"#;
    for calls in ["", "count_refused = true", "penalty = \"1h\""] {
        let toml = |rules: &str| {
            let calls = format!("[rules.calls]\nkey = \"ip\"\nwindows = [\"2/day\"]\n{calls}\n");
            format!("{}{calls}{others}{}", upstream.toml("u"), route("/a", rules))
        };
        let states = ["", ", \"models\""].map(|more| {
            let rules = &format!("\"calls\", \"shadow\", \"slots\", \"tokens\"{more}");
            let gateway = Gateway::start(&toml(rules));
            let token = [("Authorization", "Bearer t")];
            (0..2).for_each(|_| drop(gateway.client().request("POST", "/a", &token, body).expect(200)));
            let mut states = Vec::new();
            for _ in 0..2 {
                let mut client = gateway.client();
                // The body never arrives, and the token is missing.
                let head = String::from_utf8(request("POST", "/a", &[("Content-Length", "13")], b"")).unwrap();
                let refused = client.send(head.as_bytes()).read_response().expect(429);
                let own = items(&refused, "ratelimit").into_iter().filter(|item| item.name != "models");
                let fields: Vec<_> = own.map(|item| format!("{item:?}")).collect();
                let value =
                    gateway.decision("value", &json!({ "rule": "calls", "key": "127.0.0.1" })).expect(200).json();
                let metrics = ["calls", "shadow", "slots", "tokens", "models"].map(|rule| {
                    ["refused", "shadowed"].map(|outcome| {
                        gateway.metrics().sum("transom_decisions_total", &[("rule", rule), ("outcome", outcome)])
                    })
                });
                states.push(format!("{fields:?} {:?} {value} {metrics:?}", refused.field("retry-after")));
            }
            let counted = gateway.decision("value", &json!({ "rule": "models", "key": ["127.0.0.1", "a"] }));
            (states, counted.expect(200).json()["count"].as_u64())
        });
        let [(without, _), (with, counted)] = states;
        assert_eq!((with, counted), (without, Some(2)), "{calls}");
    }
    // The refused request counts in the rule that depends on its body.
    let toml = "[rules.calls]\nkey = \"ip\"\nwindows = [\"2/day\"]\n\
                [rules.models]\nkey = \"json:/model\"\non_missing_key = \"refuse\"\nwindows = [\"9/day\"]\ncount_refused = true\n";
    let gateway = Gateway::start(&format!("{}{toml}{}", upstream.toml("u"), route("/a", "\"calls\", \"models\"")));
    (0..2).for_each(|_| drop(gateway.client().request("POST", "/a", &[], body).expect(200)));
    let refused = gateway.client().request("POST", "/a", &[], body).expect(429);
    assert_eq!((remaining(&refused, "calls"), remaining(&refused, "models")), (0, 6));
}

#[test]
fn the_guide_limits_mcp_tools() {
    let upstream = Upstream::responding(|_| reply(200, &[], b"{}"));
    let gateway = Gateway::start(&documented("mcp-tools.md", upstream.address));
    let mut client = gateway.client();
    let mut send = |body: &str| client.request("POST", "/mcp", &[("Authorization", "Bearer a")], body.as_bytes());
    let call = |tool: &str| format!(r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"{tool}"}}}}"#);
    let left = remaining(&send(&call("search")).expect(200), "tools");
    let response = send(&call("render_video")).expect(200);
    assert_eq!((left, remaining(&response, "tools"), remaining(&response, "render-video")), (59, 59, 99));
    let other = send(r#"{"jsonrpc":"2.0","id":2,"method":"tools/list"}"#).expect(200);
    assert_eq!(remaining(&other, "callers"), 597);
    (1..60).for_each(|_| drop(send(&call("search")).expect(200)));
    assert!(send(&call("search")).expect(429).text().contains("\"tools\""));
    send(&format!("[{}]", call("search"))).expect(400);
}

/// A client and a server of the SDK of MCP: the gateway has counted the calls of each tool that the server has executed.
#[test]
fn mcp_clients_are_limited_by_tool() {
    let server = ScriptServer::start_of("sdks", "mcp_server.py");
    let toml = documented("mcp-tools.md", server.address).replace("[\"60/minute\"]", "[\"3/day\"]");
    let gateway = Gateway::start(&format!("admin.hosts = [\"{HOST}\"]\n{toml}"));
    let folder = TempDir::new();
    run_checks_of("sdks", folder.path(), "mcp_client.py", &[gateway.http.to_string()]);
    let calls = || Client::connect(server.address).get_with("/calls", &[("Host", "127.0.0.1")]).expect(200).json();
    eventually_eq(|| calls()["cancelled"].as_u64(), Some(2));
    let checks = ["results_and_progress_pass", "each_tool_has_a_limit", "a_call_is_cancelled_in_the_middle"];
    for tool in ["search", "count", "wait"] {
        let counted =
            ["auto", "legacy"].iter().flat_map(|mode| checks.map(|check| format!("{mode}-{check}"))).map(|token| {
                let key = json!([token, tool]);
                let state = gateway.decision("value", &json!({ "rule": "tools", "key": key })).expect(200).json();
                state["count"].as_u64().unwrap()
            });
        assert_eq!(Some(counted.sum()), calls()[tool].as_u64(), "{tool}");
    }
}
