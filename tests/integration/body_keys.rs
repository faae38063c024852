//! Keys and conditions by values of the body, which is read before the decision.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::json;

use crate::count_when::documented;
use crate::support::client::{Client, HOST, request};
use crate::support::external_scripts::{ScriptServer, run_checks_of};
use crate::support::gateway::Gateway;
use crate::support::gateway_group::LONG_TIMEOUT;
use crate::support::http2_client::{
    DATA, END_HEADERS, END_STREAM, HEADERS, Http2Client, RawHttp2, STATUS_200, frame, request_block,
};
use crate::support::process::Process;
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::redis::RedisServer;
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, eventually, eventually_eq};

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

/// A server that reads more than JSON does not let a client skip a rule, or reserve less than it asks for.
#[test]
fn no_body_is_json_for_the_server_alone() {
    let upstream = Upstream::responding(|_| reply(200, &[], b""));
    let rules = "[rules.users]\nkey = \"json:/user\"\non_missing_key = \"skip\"\nwindows = [\"2/hour\"]\n\
                 [rules.tokens]\nkey = \"ip\"\nwindows = [\"9000/day\"]\n\
                 cost = { usage = \"auto\", refund_on = [], reserve = { json = \"/max_tokens\", default = 100 } }\n";
    let route = |path: &str, rule: &str| {
        let more = if rule == "tokens" { "set_include_usage = true\n" } else { "" };
        format!("[[routes]]\npath = \"{path}\"\nupstream = \"u\"\nrules = [\"{rule}\"]\n{more}")
    };
    let routes = route("/a", "users") + &route("/v1/completions", "tokens");
    let gateway = Gateway::start(&format!("{}{rules}{routes}", upstream.toml("u")));
    let mut client = gateway.client();
    client.post("/a", r#"{"user":"a"}"#).expect(200);
    client.post("/a", r#"{"user":"a","y":[NaN,-Infinity]}"#).expect(200);
    client.post("/a", r#"{"user":"a","y":Infinity}"#).expect(429);
    let deep = format!("{{\"user\":\"a\",\"y\":{}{}}}", "[".repeat(300), "]".repeat(300));
    let bodies = [
        deep.as_str(),
        "{\"user\":\"a\",\"y\":\"\t\"}",
        "{\"user\":\"a\",\"y\":01}",
        "{\"user\":\"a\",}",
        "{\"user\":\"a\"}/**/",
        "{\"user\":\"a\"}{}",
        "\u{feff}{'user':'a'}",
    ];
    for body in bodies {
        let error = client.post("/a", body).expect(400).text();
        assert!(error.contains("begins as JSON, and is none"), "{error}");
    }
    assert_eq!(upstream.received().len(), 2);
    // Without a user, as the configuration says.
    ["", "user=a", "{}"].iter().for_each(|body| drop(client.post("/a", body).expect(200)));
    let mut used = 0;
    for (tokens, reserved) in [("300", 300), ("\"300\"", 300), ("NaN", 100)] {
        used += reserved;
        let response = client.post("/v1/completions", format!("{{\"max_tokens\":{tokens}}}")).expect(200);
        assert_eq!(remaining(&response, "tokens"), 9000 - used, "{tokens}");
    }
    client.post("/v1/completions", r#"{"max_tokens":1e30}"#).expect(429);
    // What only some servers read cannot be changed with certainty.
    client.post("/v1/completions", r#"{"stream":true,"y":NaN}"#).expect(400);
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

/// A rule by model, and rules that do not depend on the body.
const OTHERS: &str = r#"
[rules.models]
key = ["ip", "json:/model"]
on_missing_key = "ip"
windows = ["99/day"]
[rules.calls]
key = "ip"
windows = ["7/day"]
[rules.reserved]
key = "ip"
windows = ["900/day"]
cost = { usage = "auto", reserve = 100 }
[rules.slots]
key = "ip"
concurrent = 1
[[routes]]
path = "/a"
upstream = "u"
rules = ["models", "calls", "reserved"]
[[routes]]
path = "/slots"
upstream = "u"
rules = ["models", "calls", "slots"]
[[routes]]
path = "/slots-alone"
upstream = "u"
rules = ["calls", "slots"]
"#;

fn decided(gateway: &Gateway, rule: &str) -> u64 {
    gateway.metrics().sum("transom_decisions_total", &[("rule", rule)])
}

/// As where bodies pass unread: otherwise, a client could send such requests without limit.
#[test]
fn bodies_that_cannot_be_read_count_in_rules_that_do_not_depend_on_them() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&format!("body_key_limit = \"1KiB\"\n{}{OTHERS}", upstream.toml("u")));
    let long = format!("{{\"model\":\"{}\"}}", "a".repeat(1100));
    let chunked = format!("{:x}\r\n{long}\r\n0\r\n\r\n", long.len());
    let length = long.len().to_string();
    let repeated = r#"{"model":"a","model":"b"}"#;
    // What is left of `calls`, and the status.
    for (left, fields, body, status) in [
        (6, [("Content-Length", "25")], repeated, 400),
        (5, [("Content-Length", length.as_str())], "", 413),
        (4, [("Transfer-Encoding", "chunked")], &chunked, 413),
        (3, [("Content-Length", "99")], "{", 400),
    ] {
        let mut client = gateway.client();
        client.send(request("POST", "/a", &fields, b"")).send(body);
        if body == "{" {
            client.shutdown_write();
        }
        let response = client.read_response().expect(status);
        let names: Vec<_> = items(&response, "ratelimit").into_iter().map(|item| item.name).collect();
        assert_eq!((remaining(&response, "calls"), remaining(&response, "reserved")), (left, 900), "{status}");
        assert_eq!(names.len(), 2, "{names:?}");
    }
    let coded = gateway.client().request("POST", "/a", &[("Content-Encoding", "compress")], b"{}").expect(415);
    assert_eq!(remaining(&coded, "calls"), 2);
    let mut http2 = Http2Client::connect(gateway.http);
    for left in [1, 0] {
        assert_eq!(remaining(&http2.request_path("POST", "/a", &[], long.as_bytes()).expect(413), "calls"), left);
    }
    http2.request_path("POST", "/a", &[], long.as_bytes()).expect(429);
    gateway.client().request("POST", "/a", &[], repeated.as_bytes()).expect(429);
    assert_eq!((decided(&gateway, "models"), upstream.received().len()), (0, 0));
}

/// A request that a client sends without its body.
fn without_body(path: &str) -> Vec<u8> {
    request("POST", path, &[("Content-Length", "13")], b"")
}

#[test]
fn a_request_without_a_slot_is_refused_before_its_body_is_read() {
    let upstream = Upstream::always(200);
    for count_refused in ["", "count_refused = true\n"] {
        let others = OTHERS.replace("[rules.calls]\n", &format!("[rules.calls]\n{count_refused}"));
        let gateway = Gateway::start(&format!("{}{others}", upstream.toml("u")));
        let mut held = gateway.client();
        held.send(request("POST", "/slots-alone", &[("Content-Length", "2")], b"")).send("a");
        eventually_eq(|| gateway.metrics().sum("transom_concurrent_requests", &[("rule", "slots")]), 1);
        let [refused, alone] = ["/slots", "/slots-alone"].map(|path| {
            let response = gateway.client().send(without_body(path)).read_response().expect(429);
            assert_eq!(response.problem()["violated-policies"], json!(["slots"]));
            (response.text(), remaining(&response, "calls"))
        });
        let counted = u64::from(!count_refused.is_empty());
        assert_eq!((refused.0, refused.1), (alone.0, alone.1 + counted));
        assert_eq!(decided(&gateway, "models"), 0);
        held.send("b").read_response().expect(200);
        eventually_eq(|| gateway.metrics().sum("transom_concurrent_requests", &[("rule", "slots")]), 0);
        let admitted = gateway.client().request("POST", "/slots", &[], br#"{"model":"a"}"#).expect(200);
        assert_eq!(remaining(&admitted, "models"), 98);
    }
}

/// The client sends the body before the refusal, after it, or never.
#[test]
fn connections_after_a_refusal_before_the_body() {
    let upstream = Upstream::always(200);
    let others = OTHERS.replace("[\"7/day\"]", "[\"1/day\"]");
    let gateway =
        Gateway::start(&format!("{}{others}[[routes]]\npath = \"/free\"\nupstream = \"u\"\n", upstream.toml("u")));
    let body = br#"{"model":"a"}"#;
    gateway.client().request("POST", "/a", &[], body).expect(200);
    let mut client = gateway.client();
    client.send([without_body("/a"), body.to_vec(), without_body("/free"), body.to_vec()].concat());
    assert_eq!([(); 2].map(|()| client.read_response().status), [429, 200]);
    client.get("/free").expect(200);
    client.send(without_body("/a")).read_response().expect(429);
    client.expect_closed();
    let mut client = gateway.client();
    // Whether the body or another request follows is not known.
    let expecting = |length| request("POST", "/a", &[("Expect", "100-continue"), ("Content-Length", length)], b"");
    let refused = client.send(expecting("13")).read_response().expect(429);
    assert_eq!((refused.informational.len(), refused.field("connection")), (0, Some("close")));
    client.expect_closed();
    let mut raw = RawHttp2::connect(gateway.http);
    for stream in [1, 5] {
        raw.send(frame(HEADERS, END_HEADERS, stream, &request_block("POST", "/a")));
        let head =
            std::iter::from_fn(|| raw.next_frame()).find(|frame| frame.stream == stream && frame.kind == HEADERS);
        assert_ne!(head.unwrap().payload[0], STATUS_200);
        if stream == 1 {
            raw.send(frame(DATA, END_STREAM, stream, body));
        }
        assert_eq!(raw.get(stream + 2, "/free").read_status(stream + 2), STATUS_200);
    }
    assert_eq!(decided(&gateway, "models"), 1);
    gateway.advance_s(24 * 3600);
    let mut client = gateway.client();
    let too_long = client.send(expecting("9999999")).read_response().expect(413);
    assert_eq!((too_long.informational.len(), remaining(&too_long, "calls")), (0, 0));
    client.expect_closed();
    gateway.advance_s(24 * 3600);
    let mut client = gateway.client();
    assert_eq!(client.send(expecting("13")).read_head().unwrap().status, 100);
    client.send(body).read_response().expect(200);
}

/// Refusals count in penalties, and the store decides shared rules.
#[test]
fn bodies_are_read_before_rules_that_lock_out_or_are_shared_refuse() {
    let (upstream, redis) = (Upstream::always(200), RedisServer::start());
    let body = br#"{"model":"a"}"#;
    let toml = |settings: &str, window: &str, penalty: &str| {
        let windows = format!("windows = [\"{window}\"]\n");
        format!(
            "{settings}{}[rules.calls]\nkey = \"ip\"\n{windows}\
             [rules.models]\nkey = \"json:/model\"\non_missing_key = \"refuse\"\n{windows}{penalty}\n\
             [[routes]]\npath = \"/a\"\nupstream = \"u\"\nrules = [\"calls\", \"models\"]\n",
            upstream.toml("u")
        )
    };
    let check = |connect: &dyn Fn() -> Client| {
        connect().request("POST", "/a", &[], body).expect(200);
        let mut client = connect();
        client.send(request("POST", "/a", &[("Expect", "100-continue"), ("Content-Length", "13")], b""));
        assert_eq!(client.read_head().unwrap().status, 100);
        let refused = client.send(body).read_response().expect(429);
        let violated = refused.problem()["violated-policies"].clone();
        assert!(violated.as_array().unwrap().contains(&json!("models")), "{violated}");
    };
    let gateway = Gateway::start(&toml("", "1/day", "penalty = \"48h\""));
    check(&|| gateway.client());
    gateway.advance_s(24 * 3600);
    let locked_out = gateway.client().request("POST", "/a", &[], body).expect(429);
    assert_eq!(locked_out.problem()["violated-policies"], json!(["models-penalty"]));
    let shared = format!("[counters.shared]\nredis = \"{}\"\nmode = \"exact\"\n{LONG_TIMEOUT}", redis.url());
    let process = Process::spawn(&toml(&shared, "1/366d", ""));
    check(&|| process.client());
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

/// Bodies of one client that never end take no memory that the body of another client needs.
#[test]
fn a_client_leaves_memory_for_the_bodies_of_others() {
    const BODIES: usize = 24;
    const BODY: usize = 12 << 20;
    let toml = "body_key_limit = \"16MiB\"\n[upstreams.u]\nbuiltin = \"echo\"\n\
                [rules.models]\nkey = \"json:/model\"\non_missing_key = \"skip\"\nwindows = [\"5/day\"]\n\
                [[routes]]\npath = \"/\"\nupstream = \"u\"\nrules = [\"models\"]\n";
    let process = Process::spawn(toml);
    let body = vec![b' '; BODY];
    let without_end = request("POST", "/", &[("Content-Length", &(BODY + 1).to_string())], b"");
    let open = |_| {
        let mut client = Client::connect_from("127.0.0.2", process.http);
        client.send(&without_end).send_if_open(&body);
        client
    };
    let clients: Vec<_> = (0..BODIES).map(open).collect();
    eventually("bodies are refused", || {
        process.metrics().sum("transom_request_errors_total", &[("error", "body_memory")]) > 0
    });
    Client::connect_from("127.0.0.3", process.http).request("POST", "/", &[], &body).expect(200);
    drop(clients);
    eventually("the memory is free again", || {
        Client::connect_from("127.0.0.2", process.http).request("POST", "/", &[], &body).status == 200
    });
}
