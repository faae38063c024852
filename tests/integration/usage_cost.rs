//! A cost by the usage that the body of the response states.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use transom_limiter::secret_digest::Digest;

use crate::access_log::wait_for_lines;
use crate::count_when::documented;
use crate::support::client::{Client, request};
use crate::support::external_scripts::ScriptServer;
use crate::support::gateway::Gateway;
use crate::support::http2_client::Http2Client;
use crate::support::process::Process;
use crate::support::ratelimit_parser::remaining;
use crate::support::upstream::{Connection, ReceivedRequest, Upstream, reply};
use crate::support::{TempDir, eventually_eq};

/// 15 tokens of input, 4 of them cached, and 10 of output, 3 of them hidden.
const CHAT: &str = r#"{"model":"of-the-answer","choices":[{"message":{"content":"\u00e9"}}],"usage":{"prompt_tokens":15,
    "completion_tokens":10,"total_tokens":25,"prompt_tokens_details":{"cached_tokens":4},"completion_tokens_details":{"reasoning_tokens":3}}}"#;
/// 25 tokens of input and 15 of output.
const STREAM: &str = "event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":25,\"output_tokens\":1}}}\n\n\
    : ping\n\nevent: message_delta\ndata: {\"usage\":{\"output_tokens\":15}}\n\ndata: [DONE]\n\n";
/// 26 tokens of input and 4 of output, as Ollama states them.
const NDJSON: &str =
    "{\"message\":{\"content\":\"a\"},\"done\":false}\n{\"done\":true,\"prompt_eval_count\":26,\"eval_count\":4}\n";
/// 30 tokens of input and 12 of output, at the end of a stream of Bedrock.
const CONVERSE: &str =
    r#"{"usage":{"inputTokens":30,"outputTokens":12,"totalTokens":42},"metrics":{"latencyMs":1275}}"#;
const EVENTS: [(&str, &str); 2] = [("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked")];

fn chunks(body: &str) -> Vec<u8> {
    let pieces =
        body.as_bytes().chunks(7).map(|piece| [format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat());
    pieces.collect::<Vec<_>>().concat()
}

fn head(status: u16, fields: &[(&str, &str)]) -> Vec<u8> {
    let fields: String = fields.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    format!("HTTP/1.1 {status} x\r\n{fields}\r\n").into_bytes()
}

fn gzip(body: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(body.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

/// A message of the event stream of AWS, with no headers.
fn aws_message(payload: &str) -> Vec<u8> {
    let checksum = |bytes: &[u8]| {
        let mut checksum = flate2::Crc::new();
        checksum.update(bytes);
        checksum.sum().to_be_bytes()
    };
    let prelude = [(16 + payload.len() as u32).to_be_bytes(), [0; 4]].concat();
    let message = [&prelude[..], &checksum(&prelude), payload.as_bytes()].concat();
    [&message[..], &checksum(&message)].concat()
}

/// The answer to a path; with `true`, the connection breaks off behind it.
fn answer(received: &ReceivedRequest) -> (Vec<u8>, bool) {
    let json = [("Content-Type", "application/json")];
    let whole = |bytes| (bytes, false);
    match received.target.as_str() {
        "/chat" => whole(reply(200, &json, CHAT.as_bytes())),
        "/gzip" => whole(reply(200, &[("Content-Encoding", "gzip")], &gzip(CHAT))),
        "/unknown-coding" => whole(reply(200, &[("Content-Encoding", "compress")], CHAT.as_bytes())),
        "/bomb" => whole(reply(200, &[("Content-Encoding", "gzip")], &gzip(&" ".repeat(8 << 20)))),
        "/stream" => whole([head(200, &EVENTS), chunks(STREAM), b"0\r\n\r\n".to_vec()].concat()),
        "/cut" => ([head(200, &EVENTS), chunks(&STREAM[..150])].concat(), true),
        "/broken-coding" => {
            let fields = [("Content-Type", "text/event-stream"), ("Content-Encoding", "gzip")];
            whole(reply(200, &fields, &[&gzip(&STREAM[..150])[..], b"no gzip"].concat()))
        }
        "/gzip-html" => whole(reply(200, &[("Content-Encoding", "gzip")], &gzip(&"<".repeat(401)))),
        "/ndjson" => whole(reply(200, &[("Content-Type", "application/x-ndjson")], NDJSON.as_bytes())),
        "/converse-stream" => {
            let body = [aws_message("{\"delta\":{\"text\":\"a\"}}"), aws_message(CONVERSE)].concat();
            whole(reply(200, &[("Content-Type", "application/vnd.amazon.eventstream")], &body))
        }
        "/none" => whole(reply(200, &json, b"{}")),
        "/html" => whole(reply(200, &[], &[b'<'; 401])),
        "/empty" => whole(head(204, &[])),
        "/500" => whole(reply(500, &json, b"{}")),
        "/billed-500" => whole(reply(500, &json, CHAT.as_bytes())),
        other => panic!("{other}"),
    }
}

fn upstream() -> Upstream {
    Upstream::with_script(|connection: &mut Connection| {
        while let Some(received) = connection.read_request() {
            let (bytes, breaks_off) = answer(&received);
            if !connection.send(bytes) || breaks_off {
                return connection.close();
            }
        }
    })
}

fn config(upstream: &Upstream, rules: &[&str]) -> String {
    let names: Vec<String> = (0..rules.len()).map(|nth| format!("\"r{nth}\"")).collect();
    let rule = |(nth, cost): (usize, &&str)| {
        format!("[rules.r{nth}]\nkey = \"ip\"\nwindows = [\"100000/day\"]\ncost = {cost}\n")
    };
    let rules: String = rules.iter().enumerate().map(rule).collect();
    let route = "[[routes]]\nname = \"all\"\npath = \"/{*rest}\"\nupstream = \"u\"\n";
    format!("{}{rules}{route}rules = [{}]\n", upstream.toml("u"), names.join(", "))
}

/// The tokens that a rule has counted.
fn used(gateway: &Gateway, rule: &str) -> u64 {
    let state = gateway.decision("value", &json!({ "rule": rule, "key": "127.0.0.1" })).expect(200).json();
    state["count"].as_u64().unwrap_or_else(|| panic!("{state}"))
}

#[test]
fn the_body_states_the_cost() {
    let upstream = upstream();
    let rules = [
        "{ usage = \"auto\", reserve = 30 }",
        "{ usage = { json = [\"/usage/total_tokens\"] }, reserve = 30, on_missing_usage = \"estimate\", refund_on = [] }",
        "{ usage = \"auto\", reserve = 30, weights = { input = 1, cached_input = 0.1, output = 4 } }",
    ];
    let gateway = Gateway::start(&config(&upstream, &rules));
    let mut totals = [0; 3];
    let quarter = |bytes: usize| bytes.div_ceil(4) as u64;
    // The cost under each rule.
    for (path, status, costs) in [
        ("/chat", 200, [25, 25, 52]),
        ("/gzip", 200, [25, 25, 52]),
        ("/stream", 200, [40, quarter(STREAM.len()), 85]),
        ("/ndjson", 200, [30, 30, 42]),
        ("/converse-stream", 200, [42, quarter(22 + 32 + CONVERSE.len()), 78]),
        // At least what was charged in advance.
        ("/cut", 200, [30, quarter(150), 30]),
        ("/broken-coding", 200, [30, 30, 30]),
        ("/gzip-html", 200, [30, 101, 30]),
        ("/none", 200, [30, 30, 30]),
        ("/html", 200, [30, 101, 30]),
        ("/empty", 204, [30, 30, 30]),
        ("/unknown-coding", 200, [30, quarter(CHAT.len()), 30]),
        ("/bomb", 200, [30, quarter(gzip(&" ".repeat(8 << 20)).len()), 30]),
        ("/500", 500, [0, 30, 0]),
        ("/billed-500", 500, [25, 25, 52]),
    ] {
        let mut client = gateway.client();
        client.send(request("GET", path, &[], b""));
        let mut response = client.read_head().unwrap();
        assert_eq!(response.status, status, "{path}");
        // The head states what was charged in advance.
        assert_eq!(remaining(&response, "r0"), 100_000 - totals[0] - 30, "{path}");
        if path == "/cut" {
            client.read_to_end();
        } else {
            client.read_body(&mut response, "GET");
        }
        totals = [0, 1, 2].map(|rule| totals[rule] + costs[rule]);
        eventually_eq(|| ["r0", "r1", "r2"].map(|rule| used(&gateway, rule)), totals);
        let (sent, _) = answer(&upstream.received().pop().unwrap());
        match path {
            "/stream" => assert_eq!(response.body, STREAM.as_bytes()),
            "/cut" => {}
            _ => assert!(sent.ends_with(&response.body) && response.body.len() > 1 || path == "/empty", "{path}"),
        }
    }
    let metrics = gateway.metrics();
    let usage = |kind| metrics.sum("transom_usage_total", &[("route", "all"), ("rule", "r0"), ("kind", kind)]);
    assert_eq!(["input", "cached_input", "cache_write", "output", "reasoning"].map(usage), [164, 12, 0, 54, 9]);
    // A response counts once, if any rule lacks its usage: here, the second one also does for the streams and the error.
    let missing = |reason| metrics.sum("transom_usage_missing_total", &[("route", "all"), ("reason", reason)]);
    assert_eq!(["absent", "compressed", "too-large", "not-json", "aborted"].map(missing), [6, 2, 1, 2, 1]);
}

#[test]
fn the_model_of_the_request_chooses_the_weights() {
    let upstream = upstream();
    let weights = "{ \"gpt-5*\" = { input = 3, output = 4 }, \"of-*\" = { input = 1, output = 2 }, default = { input = 9, output = 9 } }";
    let gateway =
        Gateway::start(&config(&upstream, &[&format!("{{ usage = \"auto\", weights = {weights}, reserve = 2000 }}")]));
    let mut client = gateway.client();
    let (chosen, other) = (r#"{"messages":[],"model":"gpt-5\u002dmini"}"#, r#"{"model":"o3"}"#);
    let mut total = 0;
    // The upstream reads no other members for the model.
    let disguised = r#"{"model":"gpt-5","response":{"model":"of-less"},"modelVersion":"of-less"}"#;
    // Without a model in the request, that of the answer counts.
    for (body, cost) in [(chosen, 85), (other, 225), (disguised, 85), ("{}", 35), ("", 35)] {
        client.post("/chat", body).expect(200);
        total += cost;
        eventually_eq(|| used(&gateway, "r0"), total);
    }
    assert!(upstream.received().iter().any(|received| received.body == chosen.as_bytes()));
    // Nor is a request decoded.
    for (coding, body, cost) in [("gzip", gzip(chosen), 35), ("identity", chosen.into(), 85), ("", chosen.into(), 85)] {
        client.request("POST", "/chat", &[("Content-Encoding", coding)], &body).expect(200);
        total += cost;
        eventually_eq(|| used(&gateway, "r0"), total);
    }
    // Servers may read either model: the dearest of all weights count, also if the answer names another model.
    for body in [
        r#"{"model":"of-less","Model":"o3"}"#,
        r#"{"model":"o3","model":"of-less"}"#,
        r#"{"model":"of-less"}{"model":"o3"}"#,
        r#"{"model":"of-less",}"#,
    ] {
        client.post("/chat", body).expect(200);
        total += 225;
        eventually_eq(|| used(&gateway, "r0"), total);
    }
    // A model that only the coded request names.
    client.request("POST", "/stream", &[("Content-Encoding", "gzip")], &gzip(chosen)).expect(200);
    eventually_eq(|| used(&gateway, "r0"), total + 360);

    // A request that reaches no server costs nothing.
    let gateway = Gateway::start(&config(&Upstream::refusing_connections(), &["{ usage = \"auto\", reserve = 30 }"]));
    assert_eq!(remaining(&gateway.get("/chat").expect(502), "r0"), 100_000);
    // Nor does one that the rule does not count.
    let toml = config(&Upstream::refusing_connections(), &["{ usage = \"auto\", reserve = 30, refund_on = [] }"]);
    let gateway = Gateway::start(&toml.replace("cost = ", "count_when = { status = [\"2xx\"] }\ncost = "));
    assert_eq!(remaining(&gateway.get("/chat").expect(502), "r0"), 100_000);
}

/// A request that a server drops is sent again: its usage is charged once, and the reserve of the first attempt is not kept.
#[test]
fn usage_over_retries_is_charged_once() {
    let answer = upstream();
    let dropping = Upstream::with_script(|connection: &mut Connection| _ = connection.read_request());
    let servers = format!("servers = [\"http://{}\", \"http://{}\"]", dropping.address, answer.address);
    let toml = config(&answer, &["{ usage = \"auto\", reserve = 30 }", "{ bytes = \"response\", unit = 1 }"]);
    let toml = toml.replace(&answer.toml("u")["[upstreams.u]\n".len()..], &format!("{servers}\nejection = false\n"));
    let gateway = Gateway::start(&toml);
    let mut bytes = 0;
    for n in 1..=6 {
        bytes += gateway.get("/chat").expect(200).body.len() as u64;
        eventually_eq(|| ["r0", "r1"].map(|rule| used(&gateway, rule)), [n * 25, bytes]);
    }
    assert!(dropping.connections() > 0);
}

/// What a server may have received costs the reserve, also where the gateway makes the response.
#[test]
fn failures_after_forwarding_are_not_refunded() {
    let handshake = [
        ("Connection", "Upgrade"),
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ];
    let switch = |accept: &str| {
        let fields = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Accept", accept)];
        head(101, &fields)
    };
    let upstream = Upstream::with_script(move |connection: &mut Connection| {
        let Some(received) = connection.read_head() else { return };
        let accept = if received.target == "/tunnel" { "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" } else { "other" };
        connection.send(if received.target == "/closed" { Vec::new() } else { switch(accept) });
    });
    let counted = "[rules.by-status]\nkey = \"ip\"\nwindows = [\"9/day\"]\ncount_when = { status = [401] }\n[[routes]]";
    let toml = config(&upstream, &["{ usage = \"auto\", reserve = 30 }"]).replace("[[routes]]", counted);
    let gateway = Gateway::start(&toml.replace("rules = [", "rules = [\"by-status\", "));
    let mut total = 0;
    for (path, status) in [("/wrong", 502), ("/tunnel", 101)] {
        let mut client = gateway.client();
        client.send(request("GET", path, &handshake, b""));
        let response = client.read_head().unwrap();
        assert_eq!(response.status, status, "{path}");
        total += 30;
        eventually_eq(|| used(&gateway, "r0"), total);
    }
    let metrics = gateway.metrics();
    assert_eq!(metrics.sum("transom_usage_missing_total", &[("reason", "absent")]), 1);
    // Rules that read no usage have no series.
    let host = gateway.admin.to_string();
    let text = Client::connect(gateway.admin).get_with("/metrics", &[("Host", &host)]).expect(200).text();
    assert_eq!(text.lines().filter(|line| line.starts_with("transom_usage_total{")).count(), 5, "{text}");

    // The first attempt is sent, and the retry is not.
    let refusing = Upstream::refusing_connections();
    let servers = format!("servers = [\"http://{}\", \"http://{}\"]", upstream.address, refusing.address);
    let toml = config(&upstream, &["{ usage = \"auto\", reserve = 30 }"]);
    let toml = toml.replace(&upstream.toml("u")["[upstreams.u]\n".len()..], &format!("{servers}\nejection = false\n"));
    let gateway = Gateway::start(&toml);
    for n in 1..=4 {
        gateway.get("/closed").expect(502);
        assert_eq!(used(&gateway, "r0"), n * 30);
    }
}

#[test]
fn the_request_or_experience_says_what_is_reserved() {
    let upstream = upstream();
    let table = "{ json = [\"/max_completion_tokens\", \"/max_tokens\"], input = \"bytes/4\", default = 50 }";
    let rules = [
        format!("{{ usage = \"auto\", weights = {{ input = 2, output = 3 }}, max = 1000, reserve = {table} }}"),
        "{ usage = \"auto\", reserve = { learnt = true, default = 70 } }".to_owned(),
    ];
    let toml = config(&upstream, &rules.each_ref().map(String::as_str));
    let mut gateway = Gateway::start(&toml);
    let mut totals = [0, 0];
    let explain = |gateway: &Gateway, body: &str| {
        let question = json!({ "url": "http://a/chat", "method": "POST", "body": body });
        let explained = gateway.decision("explain", &question).expect(200).json();
        [0, 1].map(|rule| (explained["rules"][rule]["cost"].as_u64(), explained["rules"][rule]["reserved_by"].clone()))
    };
    let mut ask = |gateway: &Gateway, path: &str, body: &str, reserves: [u64; 2]| {
        assert_eq!(explain(gateway, body).map(|(cost, _)| cost), reserves.map(Some), "{body}");
        let mut client = gateway.client();
        client.send(request("POST", path, &[], body.as_bytes()));
        let mut response = client.read_head().unwrap();
        let left = ["r0", "r1"].map(|rule| 100_000 - remaining(&response, rule));
        assert_eq!(left, [totals[0] + reserves[0], totals[1] + reserves[1]], "{path} {body}");
        client.read_body(&mut response, "POST");
        // Of 15 tokens of input and 10 of output; or what was reserved.
        let costs = if path == "/chat" { [60, 25] } else { reserves };
        totals = [totals[0] + costs[0], totals[1] + costs[1]];
        eventually_eq(|| ["r0", "r1"].map(|rule| used(gateway, rule)), totals);
    };
    // 2 for each token of input, of which there are a quarter of the bytes, and 3 for one of output.
    ask(&gateway, "/chat", "{\"max_tokens\":10.5}", [2 * 5 + 32, 70]);
    ask(&gateway, "/chat", "{\"max_tokens\":null}", [2 * 5 + 150, 70]);
    // The greater one, whichever the server obeys.
    ask(&gateway, "/chat", "{\"max_completion_tokens\":30,\"max_tokens\":1}", [2 * 11 + 90, 70]);
    ask(&gateway, "/chat", "{\"max_completion_tokens\":1,\"max_tokens\":30}", [2 * 11 + 90, 70]);
    ask(&gateway, "/none", "no JSON", [2 * 2 + 150, 70]);
    ask(&gateway, "/chat", "", [150, 70]);
    ask(&gateway, "/chat", "{\"max_tokens\":9999999999}", [1000, 70]);
    // As often as the request asks for an answer.
    ask(&gateway, "/chat", "{\"max_tokens\":10,\"n\":3}", [2 * 6 + 90, 70]);
    ask(&gateway, "/chat", "{\"max_tokens\":10,\"prompt\":[\"a\",\"b\"]}", [2 * 9 + 60, 70]);
    ask(&gateway, "/chat", "{\"n\":2,\"best_of\":3}", [2 * 5 + 900, 70]);
    ask(&gateway, "/chat", "{\"generationConfig\":{\"candidateCount\":2}}", [2 * 11 + 300, 70]);
    let sources = |body: &str| explain(&gateway, body).map(|(_, sources)| sources);
    assert_eq!(sources("{\"max_tokens\":10.5}"), [json!(["json", "bytes"]), json!(["default"])]);
    assert_eq!(sources("{\"max_tokens\":null}"), [json!(["default", "bytes"]), json!(["default"])]);
    assert_eq!(sources(""), [json!(["default"]), json!(["default"])]);
    assert_eq!(sources("{\"n\":2}"), [json!(["default", "bytes", "times"]), json!(["default"])]);
    assert_eq!(sources("{\"max_tokens\":9999}"), [json!(["json", "bytes", "max"]), json!(["default"])]);
    for _ in 0..20 {
        ask(&gateway, "/chat", "{\"max_tokens\":0,\"model\":\"m\"}", [2 * 7, 70]);
    }
    ask(&gateway, "/chat", "{\"max_tokens\":0,\"model\":\"m\"}", [2 * 7, 25]);
    assert_eq!(explain(&gateway, "{\"model\":\"m\"}")[1], (Some(25), json!(["learnt"])));
    ask(&gateway, "/chat", "{\"max_tokens\":0,\"model\":\"n\"}", [2 * 7, 70]);
    // A reload that changes another rule keeps what was learnt.
    gateway.reload_and_wait(&toml.replace("max = 1000", "max = 900"));
    ask(&gateway, "/chat", "{\"max_tokens\":9999,\"model\":\"m\"}", [900, 25]);
    let mut http2 = Http2Client::connect(gateway.http);
    let response = http2.request_path("POST", "/chat", &[], br#"{"max_tokens":1,"model":"m"}"#).expect(200);
    assert_eq!(["r0", "r1"].map(|rule| 100_000 - remaining(&response, rule)), [totals[0] + 17, totals[1] + 25]);
}

/// Once a response, although two rules read it; unknown clients are not counted.
#[test]
fn usage_is_counted_by_client() {
    let upstream = upstream();
    let rules = ["{ usage = \"auto\" }", "{ usage = \"auto\", weights = { output = 4 } }"];
    let clients = "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\n[metrics]\nclients = true\n";
    let client =
        |name: &str| format!("[clients.{name}]\nplan = \"gold\"\napi_keys = [\"{}\"]\n", Digest::of(name.as_bytes()));
    let plan = "[rules.r0.plans.gold]\nwindows = [\"100000/day\"]\n";
    let toml = format!("{clients}{}{plan}", config(&upstream, &rules));
    let gateway = Gateway::start_with(&toml, &(client("a") + &client("b")));
    for (path, key) in [("/chat", "a"), ("/stream", "a"), ("/none", "a"), ("/chat", "b"), ("/chat", "unknown")] {
        gateway.get_with(path, &[("X-API-Key", key)]).expect(200);
    }
    let usage = |client, kind| {
        let labels = [("client", client), ("plan", "gold"), ("kind", kind)];
        gateway.metrics().sum("transom_client_usage_total", &labels)
    };
    let kinds =
        |client| ["input", "cached_input", "cache_write", "output", "reasoning"].map(|kind| usage(client, kind));
    eventually_eq(|| [kinds("a"), kinds("b")], [[11 + 25, 4, 0, 7 + 15, 3], [11, 4, 0, 7, 3]]);
    assert_eq!(gateway.metrics().sum("transom_client_usage_total", &[]), 65 + 25);
}

/// Streams of OpenAI state their usage only on request.
#[test]
fn include_usage_is_set_and_its_chunk_hidden() {
    let server = ScriptServer::start("model_server.py", &[] as &[&str]);
    let gateway = Gateway::start(&documented("llm-tokens.md", server.address));
    let (mut client, mut http2) = (gateway.client(), Http2Client::connect(gateway.http));
    let body = |options| {
        format!(
            "{{\"model\":\"m\",\"stream\":true{options},\"messages\":[{{\"role\":\"user\",\"content\":\"one\"}}],\"max_tokens\":5}}"
        )
    };
    let fields = [("Authorization", "Bearer a"), ("Content-Type", "application/json"), ("Accept-Encoding", "gzip")];
    let path = "/v1/chat/completions";
    let asked = client.request("POST", path, &fields, body(",\"stream_options\":{\"include_usage\":true}").as_bytes());
    let asked = asked.expect(200).text();
    let unasked = client.request("POST", path, &fields, body("").as_bytes()).expect(200).text();
    let over_http2 = http2.request_path("POST", path, &fields, body("").as_bytes()).expect(200).text();
    let states_usage = [&asked, &unasked, &over_http2].map(|stream| stream.contains("\"total_tokens\""));
    assert_eq!(states_usage, [true, false, false], "{asked}\n{unasked}");
    assert!(unasked == over_http2 && unasked.ends_with("data: [DONE]\n\n"), "{unasked}");
    eventually_eq(|| gateway.metrics().sum("transom_usage_missing_total", &[]), 0);
    let output = || gateway.metrics().sum("transom_usage_total", &[("rule", "tokens"), ("kind", "output")]);
    eventually_eq(output, 15);
}

/// Whatever the client writes, its stream states the usage, or its request is refused.
#[test]
fn no_spelling_of_a_stream_avoids_its_usage() {
    let upstream = Upstream::responding(|_| reply(200, &[], b"{}"));
    let toml = config(&upstream, &["{ usage = \"auto\", reserve = 30 }"]);
    let gateway = Gateway::start(&(toml + "set_include_usage = true\n"));
    let mut client = gateway.client();
    let (path, plain) = ("/v1/chat/completions", r#"{"stream":true}"#);
    let with_options = r#"{"stream_options":{"include_usage":true},"stream":true}"#;
    let utf16: Vec<u8> = plain.encode_utf16().flat_map(u16::to_le_bytes).collect();
    for (path, coding, body) in [
        (path, "identity", plain.as_bytes()),
        (path, "", plain.as_bytes()),
        (path, "gzip", &gzip(plain)),
        (path, "identity", "\u{feff}{\"stream\":true}".as_bytes()),
        (path, "identity", &utf16),
        ("/v1/chat/completions/", "identity", plain.as_bytes()),
        ("/v1/chat/completions;x", "identity", plain.as_bytes()),
    ] {
        client.request("POST", path, &[("Content-Encoding", coding)], body).expect(200);
        let received = upstream.received().pop().unwrap();
        assert_eq!(String::from_utf8_lossy(&received.body), with_options, "{path} {coding}");
        let fields = |name: &str| received.fields.iter().filter(|(known, _)| known == name).count();
        assert_eq!((fields("content-encoding"), fields("content-length")), (0, 1));
    }
    let mut http2 = Http2Client::connect(gateway.http);
    http2.request_path("POST", path, &[], plain.as_bytes()).expect(200);
    assert_eq!(upstream.received().pop().unwrap().body, with_options.as_bytes());
    let before = upstream.received().len();
    for body in [
        r#"{"stream":true,"Stream_Options":null}"#,
        r#"{"stream":true,"stream_options":{"Include_usage":true}}"#,
        r#"{"Stream":true}"#,
    ] {
        let refused = client.post(path, body).expect(400).text();
        assert!(refused.contains("asks for a stream in a form"), "{refused}");
    }
    assert_eq!(upstream.received().len(), before);
    // Others keep their coding.
    let unchanged = gzip(r#"{"stream":false}"#);
    client.request("POST", path, &[("Content-Encoding", "gzip")], &unchanged).expect(200);
    assert_eq!(upstream.received().pop().unwrap().body, unchanged);
}

/// What a key has used, of a gateway whose admin address has no other name.
fn count(gateway: &Gateway, rule: &str, key: &str) -> Value {
    let (query, host) = (json!({ "rule": rule, "key": key }).to_string(), gateway.admin.to_string());
    let fields = [("Host", host.as_str())];
    let state = Client::connect(gateway.admin).request("POST", "/v1/value", &fields, query.as_bytes());
    state.expect(200).json()["count"].clone()
}

/// The answers of each client cost what the server has counted, to the token.
#[test]
fn the_guide_limits_llm_tokens() {
    let server = ScriptServer::start("model_server.py", &[] as &[&str]);
    let gateway = Gateway::start(&documented("llm-tokens.md", server.address));
    let mut client = gateway.client();
    let mut ask = |key: &str, path: &str, body: &str| {
        let fields = [("Authorization", format!("Bearer {key}")), ("Content-Type", "application/json".to_owned())];
        let fields = fields.each_ref().map(|(name, value)| (*name, value.as_str()));
        client.request("POST", path, &fields, body.as_bytes())
    };
    let chat = r#""model":"gpt-5-mini","messages":[{"role":"user","content":"one two three"}],"max_tokens":20"#;
    for (key, path, body) in [
        ("alice", "/v1/chat/completions", format!("{{{chat}}}")),
        (
            "alice",
            "/v1/chat/completions",
            format!("{{{chat},\"stream\":true,\"stream_options\":{{\"include_usage\":true}}}}"),
        ),
        ("bob", "/v1/messages", format!("{{{chat}}}")),
        ("bob", "/v1/messages", format!("{{{chat},\"stream\":true}}")),
        ("bob", "/v1/embeddings", r#"{"model":"other","input":"one two"}"#.to_owned()),
    ] {
        assert!(ask(key, path, &body).expect(200).body.len() > 9, "{path}");
    }
    let used = |rule: &str, key: &str| count(&gateway, rule, key);
    let host = server.address.to_string();
    let counted = Client::connect(server.address).get_with("/used", &[("Host", &host)]).expect(200).json();
    let counted = ["input", "output"].map(|kind| counted[kind].as_u64().unwrap());
    assert_eq!(counted, [14, 80]);
    eventually_eq(|| [used("tokens", "alice"), used("tokens", "bob")], [46, 48].map(Value::from));
    // 1.25 and 10 millionths a token of the first four answers, rounded up each, and 5 of the last.
    eventually_eq(|| used("money", "global"), (4 * (4 + 200) + 2 * 5).into());
}

/// Such as one of OpenAI, without `set_include_usage`.
#[test]
fn a_stream_that_states_no_usage_keeps_its_reserve() {
    let server = ScriptServer::start("model_server.py", &[] as &[&str]);
    let toml = documented("llm-tokens.md", server.address).replace("set_include_usage = true", "");
    let gateway = Gateway::start(&toml);
    let body = r#"{"model":"m","stream":true,"messages":[{"role":"user","content":"one"}],"max_tokens":20}"#;
    let fields = [("Authorization", "Bearer a"), ("Content-Type", "application/json")];
    gateway.client().request("POST", "/v1/chat/completions", &fields, body.as_bytes()).expect(200);
    eventually_eq(|| gateway.metrics().sum("transom_usage_missing_total", &[("reason", "absent")]), 1);
    assert_eq!(count(&gateway, "tokens", "a"), json!(20 + body.len().div_ceil(4)));
}

#[test]
fn a_response_without_usage_is_logged_once_with_what_to_set() {
    let upstream = upstream();
    let process = Process::spawn(&config(&upstream, &["{ usage = \"auto\" }"]));
    for path in ["/none", "/none", "/none", "/html"] {
        process.get(path).expect(200);
    }
    let log = process.wait_for_stderr("reason=\"not-json\"");
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains("a response states no usage")).collect();
    assert_eq!(warnings.len(), 2, "{log}");
    for part in
        ["WARN", "route=\"all\"", "upstream=\"u\"", "rule=\"r0\"", "reason=\"absent\"", "`set_include_usage = true`"]
    {
        assert!(warnings[0].contains(part), "{part}: {log}");
    }
}

/// The fields of the access log that state what a request cost.
#[test]
fn the_access_log_states_costs() {
    let upstream = upstream();
    let directory = TempDir::new();
    let file = directory.path().join("access.log");
    let rules = [
        "{ usage = \"auto\", reserve = 30 }",
        "{ usage = \"auto\", reserve = 20, weights = { input = 1, cached_input = 0.1, output = 4 } }",
        "{ bytes = \"response\", unit = 100, reserve = 1 }",
        "2",
    ];
    let toml = format!("[access_log]\nfile = {file:?}\n{}", config(&upstream, &rules));
    let gateway = Gateway::start(&toml);
    let chat = json!({ "input": 11, "cached_input": 4, "output": 7, "reasoning": 3 });
    let size = |body: &str| body.len().div_ceil(100);
    let cases = [
        ("/chat", json!([25, 52, size(CHAT)]), chat.clone(), json!("of-the-answer")),
        ("/stream", json!([40, 85, size(STREAM)]), json!({ "input": 25, "output": 15 }), Value::Null),
        ("/500", json!([0, 0, 1]), Value::Null, Value::Null),
        // What was seen until then, but at least what was reserved.
        ("/cut", json!([30, 29, 2]), json!({ "input": 25, "output": 1 }), Value::Null),
    ];
    for (path, ..) in &cases {
        let mut client = gateway.client();
        client.send(request("GET", path, &[], b""));
        if *path == "/cut" {
            client.read_to_end();
        } else {
            client.read_response();
        }
    }
    let lines = wait_for_lines(&file, cases.len());
    for (line, (path, costs, usage, model)) in lines.iter().zip(&cases) {
        assert_eq!(line["path"], *path);
        assert_eq!(line["reserved"], json!({ "r0": 30, "r1": 20, "r2": 1 }), "{line}");
        assert_eq!(line["cost"], json!({ "r0": costs[0], "r1": costs[1], "r2": costs[2] }), "{line}");
        assert_eq!((&line["usage"], &line["model"]), (usage, model), "{line}");
        let milliseconds = |name: &str| line[name].as_f64().unwrap_or_else(|| panic!("{line}"));
        assert!(milliseconds("first_byte_ms") <= milliseconds("duration_ms"), "{line}");
    }
}
