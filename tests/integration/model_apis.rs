//! Rate limit fields and refusals in the forms of the APIs of language models.

use std::time::Duration;

use serde_json::json;

use crate::support::client::{Client, HttpResponse};
use crate::support::external_scripts::{ScriptServer, run_checks_of};
use crate::support::gateway::Gateway;
use crate::support::http2_client::Http2Client;
use crate::support::upstream::{ReceivedRequest, Upstream, reply};
use crate::support::{TempDir, eventually_eq, forward_all, one_rule};

/// 2024-10-04 00:00:00 UTC.
const MIDNIGHT: u64 = 1_728_000_000;
/// Of the account of the gateway at the provider.
const THEIRS: [(&str, &str); 6] = [
    ("x-ratelimit-limit-requests", "10000"),
    ("x-ratelimit-reset-tokens", "1h0m0s"),
    ("x-ratelimit-remaining-project-tokens", "9"),
    ("anthropic-ratelimit-tokens-limit", "10000"),
    ("anthropic-ratelimit-output-tokens-remaining", "1"),
    ("anthropic-priority-input-tokens-limit", "8"),
];
const OPENAI: [&str; 6] = [
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
];

/// 300 tokens of input and 100 of output, as JSON or as a stream.
fn answer(received: &ReceivedRequest) -> Vec<u8> {
    let usage = r#"{"usage":{"prompt_tokens":300,"completion_tokens":100}}"#;
    let (content_type, body) = match received.target.as_str() {
        "/stream" => ("text/event-stream", format!("data: {usage}\n\ndata: [DONE]\n\n")),
        _ => ("application/json", usage.to_owned()),
    };
    let fields: Vec<_> = [("Content-Type", content_type)].into_iter().chain(THEIRS).collect();
    reply(200, &fields, body.as_bytes())
}

/// A gateway whose only route has all of the rules, which begin with `[rules.NAME]`, and count all requests together.
fn gateway(upstream: &Upstream, general: &str, rules: &str) -> Gateway {
    let names: Vec<_> = rules.lines().filter_map(|line| line.strip_prefix("[rules.")?.strip_suffix(']')).collect();
    let rules = rules.replace("windows", "key = \"global\"\nwindows");
    let toml = format!(
        "{general}\n{}\n{rules}\n[[routes]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = {names:?}\n",
        upstream.toml("u")
    );
    Gateway::start_at(&toml, MIDNIGHT)
}

fn values(response: &HttpResponse, names: &[impl AsRef<str>]) -> Vec<String> {
    names.iter().map(|name| response.values(name.as_ref()).join(", ")).collect()
}

#[test]
fn policies_name_the_unit_of_tokens() {
    let upstream = Upstream::responding(answer);
    let rule = |name: &str, cost: &str| format!("[rules.{name}]\nwindows = [\"1000/minute\"]\ncost = {cost}\n");
    let rules = [
        rule("requests", "2"),
        rule("tokens", "{ usage = \"auto\", weights = { cached_input = 0.1 } }"),
        rule("input", "{ usage = \"auto\", weights = { output = 0 } }"),
        rule("output", "{ usage = \"auto\", weights = { input = 0 } }"),
        rule("money", "{ usage = \"auto\", weights = { input = 1.25, output = 10 } }"),
        rule("stated", "{ response-header = \"x-cost\" }"),
    ];
    let response = gateway(&upstream, "", &rules.concat()).get("/a").expect(200);
    let policies = "\"requests\";q=1000;w=60, \"tokens\";q=1000;w=60;qu=\"tokens\", \"input\";q=1000;w=60;qu=\"input-tokens\", \
         \"output\";q=1000;w=60;qu=\"output-tokens\", \"money\";q=1000;w=60;qu=\"weighted-tokens\", \"stated\";q=1000;w=60";
    assert_eq!(response.values("ratelimit-policy"), [policies]);
    // Without the setting, the fields of the upstream pass.
    THEIRS.iter().for_each(|(name, value)| assert_eq!(response.values(name), [*value]));
}

/// Rules that count something else than requests or tokens have no fields, although less of them remains.
const RULES: &str = "[rules.requests]
windows = [\"100/hour\", \"3/minute\"]
[rules.tokens]
windows = [\"1000/minute\", \"1500/day\"]
cost = { usage = \"auto\", reserve = 100 }
[rules.money]
windows = [\"90/day\"]
cost = { usage = \"auto\", reserve = 0, weights = { input = 0.01, output = 0.02 } }
[rules.stated]
windows = [\"80/day\"]
cost = { response-header = \"x-cost\" }
[rules.shadow]
windows = [\"1/day\"]
on_limit = \"shadow\"
";

#[test]
fn openai_fields_state_the_nearest_limits() {
    let upstream = Upstream::responding(answer);
    let gateway = gateway(&upstream, "headers = \"openai\"", RULES);
    let (mut client, mut http2) = (gateway.client(), Http2Client::connect(gateway.http));
    let first = client.get("/a").expect(200);
    assert_eq!(values(&first, &OPENAI), ["3", "2", "1m0s", "1000", "900", "1m0s"]);
    assert_eq!((first.field("ratelimit"), first.field("ratelimit-policy")), (None, None));
    assert_eq!(first.values("x-ratelimit-remaining-project-tokens"), ["9"]);
    gateway.advance(Duration::from_millis(250));
    // The first has cost 400.
    let streamed = client.get("/stream").expect(200);
    assert_eq!(values(&streamed, &OPENAI), ["3", "1", "59.75s", "1000", "500", "59.75s"]);
    gateway.advance_s(60);
    // Fewer tokens remain of the day than of the minute.
    let over_http2 = http2.request_path("GET", "/stream", &[], b"").expect(200);
    assert_eq!(values(&over_http2, &OPENAI), ["3", "2", "59.75s", "1500", "600", "23h58m59.75s"]);
    client.get("/a").expect(200);
    let refused = client.get("/a").expect(429);
    assert_eq!(values(&refused, &OPENAI), ["3", "1", "59.75s", "1500", "0", "23h58m59.75s"]);
    assert_eq!(refused.field("retry-after"), Some("86340"));
    let refused = http2.request_path("GET", "/a", &[], b"").expect(429);
    assert_eq!(values(&refused, &OPENAI), ["3", "1", "59.75s", "1500", "0", "23h58m59.75s"]);
}

#[test]
fn anthropic_fields_state_the_nearest_limits() {
    let upstream = Upstream::responding(answer);
    let rules = "[rules.requests]
        windows = [\"5/minute\"]
        [rules.input]
        windows = [\"1000/minute\"]
        cost = { usage = \"auto\", reserve = 10, weights = { output = 0 } }
        [rules.output]
        windows = [\"250/hour\"]
        cost = { usage = \"auto\", reserve = 20, weights = { input = 0 } }
        ";
    let gateway = gateway(&upstream, "headers = \"anthropic\"", &rules.replace("        ", ""));
    let names = |unit: &str| ["limit", "remaining", "reset"].map(|what| format!("anthropic-ratelimit-{unit}-{what}"));
    let state = |response: &HttpResponse| {
        ["requests", "tokens", "input-tokens", "output-tokens"].map(|unit| values(response, &names(unit)).join(" "))
    };
    let mut client = gateway.client();
    let first = client.get("/stream").expect(200);
    let expected = [
        "5 4 2024-10-04T00:01:00Z",
        "250 230 2024-10-04T01:00:00Z",
        "1000 990 2024-10-04T00:01:00Z",
        "250 230 2024-10-04T01:00:00Z",
    ];
    assert_eq!(state(&first), expected);
    assert_eq!(first.values("anthropic-priority-input-tokens-limit"), ["8"]);
    assert_eq!(first.values("x-ratelimit-limit-requests"), ["10000"]);
    client.get("/a").expect(200);
    let mut http2 = Http2Client::connect(gateway.http);
    let third = http2.request_path("GET", "/stream", &[], b"").expect(200);
    let expected = [
        "5 2 2024-10-04T00:01:00Z",
        "250 30 2024-10-04T01:00:00Z",
        "1000 390 2024-10-04T00:01:00Z",
        "250 30 2024-10-04T01:00:00Z",
    ];
    assert_eq!(state(&third), expected);
    gateway.advance(Duration::from_millis(60_001));
    let refused = client.get("/a").expect(429);
    let expected = [
        "5 5 2024-10-04T00:02:00Z",
        "250 0 2024-10-04T01:00:00Z",
        "1000 1000 2024-10-04T00:02:00Z",
        "250 0 2024-10-04T01:00:00Z",
    ];
    assert_eq!(state(&refused), expected);
}

#[test]
fn fields_of_the_upstream_are_replaced_by_those_of_the_same_name() {
    let upstream = Upstream::responding(answer);
    let rule = "[rules.requests]\nwindows = [\"5/minute\"]\nheaders = \"openai\"\n";
    let response = gateway(&upstream, "headers = \"off\"", rule).get("/a").expect(200);
    let expected = ["5", "4", "1m0s", "", "", "1h0m0s"];
    assert_eq!(values(&response, &OPENAI), expected);
}

#[test]
fn refusals_are_errors_of_the_api() {
    for (style, kind, cost) in [
        ("openai", "requests", "cost = { request-header = \"x-cost\", max = 9 }"),
        ("openai", "tokens", "cost = { usage = \"auto\", reserve = 2 }"),
        ("anthropic", "", "cost = { request-header = \"x-cost\", default = 2, max = 9 }"),
    ] {
        let error = |message: &str| match style {
            "openai" => {
                json!({"error": {"message": message, "type": kind, "param": null, "code": "rate_limit_exceeded"}})
            }
            _ => json!({"type": "error", "error": {"type": "rate_limit_error", "message": message}}),
        };
        let rule = format!("key = \"ip\"\nwindows = [\"2/minute\"]\nbody_style = \"{style}\"\n{cost}");
        let gateway = Gateway::start_at(&one_rule(&rule), MIDNIGHT);
        let mut client = gateway.client();
        assert_eq!(client.get_with("/a", &[("x-cost", "2")]).expect(200).field("retry-after-ms"), None);
        gateway.advance(Duration::from_millis(250));
        let refused = client.get("/a").expect(429);
        assert_eq!(refused.field("content-type"), Some("application/json"));
        assert_eq!((refused.field("retry-after-ms"), refused.field("retry-after")), (Some("59750"), Some("60")));
        assert_eq!(refused.field("x-should-retry"), None);
        assert_eq!(refused.json(), error("Rate limit r reached: limit 2. Please try again in 60s."));
        assert_eq!(refused.field("ratelimit"), Some("\"r\";r=0;t=60"));
        // A millisecond earlier the request is refused; then it is admitted.
        gateway.advance(Duration::from_millis(59_749));
        assert_eq!(client.get("/a").expect(429).field("retry-after-ms"), Some("1"));
        gateway.advance(Duration::from_millis(1));
        client.get("/a").expect(200);
        if kind != "tokens" {
            let never = client.get_with("/a", &[("x-cost", "3")]).expect(429);
            assert_eq!((never.field("retry-after-ms"), never.field("retry-after")), (None, None));
            assert_eq!(never.field("x-should-retry"), Some("false"));
            assert_eq!(never.json(), error("Request too large for rate limit r: limit 2. Waiting does not help."));
        }
    }
}

#[test]
fn a_refusal_without_a_slot_asks_to_wait_for_a_second() {
    let upstream = Upstream::with_script(|connection| {
        connection.read_request();
        connection.wait_for_close();
    });
    let rule = "[rules.r]\nkey = \"ip\"\nconcurrent = 1\nbody_style = \"anthropic\"\n[[routes]]";
    let gateway = Gateway::start(&(forward_all(&upstream).replace("[[routes]]", rule) + "rules = [\"r\"]"));
    let mut waiting = gateway.client();
    waiting.send(b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    eventually_eq(|| gateway.metrics().sum("transom_concurrent_requests", &[]), 1);
    let refused = gateway.get("/a").expect(429);
    assert_eq!((refused.field("retry-after-ms"), refused.field("retry-after")), (Some("1000"), Some("1")));
}

#[test]
fn retry_after_ms_is_spread_by_jitter() {
    let rule = "key = \"ip\"\nwindows = [\"1/minute\"]\nretry_jitter = \"3s\"\nbody_style = \"openai\"";
    let gateway = Gateway::start_at(&one_rule(rule), MIDNIGHT);
    gateway.advance(Duration::from_millis(20_001));
    let mut client = gateway.client();
    client.get("/a").expect(200);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..50 {
        let refused = client.get("/a").expect(429);
        let number = |name: &str| refused.field(name).unwrap().parse::<u64>().unwrap();
        let (ms, seconds) = (number("retry-after-ms"), number("retry-after"));
        assert!(
            (39_999..=42_999).contains(&ms) && ms <= seconds * 1000 && ms + 1001 > seconds * 1000,
            "{ms} {seconds}"
        );
        seen.insert(ms);
    }
    assert!(seen.len() > 5, "{seen:?}");
}

/// The SDKs read the fields, raise their errors for refusals, and wait as long as the gateway says. What the server says that it used is
/// what they were charged, to the token; a stream that the client left costs what was reserved for it.
#[test]
fn sdks_understand_fields_and_refusals() {
    let server = ScriptServer::start("model_server.py", &[] as &[&str]);
    let rules = |name: &str, style: &str, key: &str, limit: &str, path: &str| {
        let cost = format!("cost = {{ usage = \"auto\", reserve = {{ json = \"{limit}\", default = 10 }} }}");
        let fields = if name == style { format!("headers = \"{name}\"") } else { String::new() };
        format!(
            "[rules.{name}-requests]\nkey = \"{key}\"\non_missing_key = \"refuse\"\nwindows = [\"3/minute\"]\n\
             cost = {{ request-header = \"x-cost\", max = 9 }}\nbody_style = \"{style}\"\n\
             [rules.{name}-tokens]\nkey = \"{key}\"\non_missing_key = \"refuse\"\nwindows = [\"100/minute\"]\n\
             {cost}\nbody_style = \"{style}\"\n{fields}\n\
             [rules.{name}-total]\nkey = \"global\"\nwindows = [\"1000000/day\"]\n{cost}\n\
             [[routes]]\npath = \"{path}\"\nupstream = \"model\"\n\
             rules = [\"{name}-requests\", \"{name}-tokens\", \"{name}-total\"]\n"
        )
    };
    let apis = [
        rules("openai", "openai", "bearer", "/max_tokens", "/v1/chat/{*rest}"),
        rules("anthropic", "anthropic", "bearer", "/max_tokens", "/v1/messages"),
        rules("google", "openai", "header:x-goog-api-key", "/generationConfig/maxOutputTokens", "/v1/models/{*rest}"),
    ];
    let toml = format!("[upstreams.model]\nservers = [\"http://{}\"]\n{}", server.address, apis.concat());
    let gateway = Gateway::start_at(&toml, MIDNIGHT);
    gateway.advance(Duration::from_millis(58_500));
    let folder = TempDir::new();
    // `make litellm` runs the checks with LiteLLM, which is too large to be installed for each test run.
    let part = if std::env::var_os("TRANSOM_LITELLM").is_some() { "litellm" } else { "sdks" };
    let arguments = [gateway.http.to_string(), gateway.admin.to_string(), part.to_owned()];
    run_checks_of(part, folder.path(), "model_sdks.py", &arguments);
    let says = || {
        let used = Client::connect(server.address).get_with("/used", &[("Host", "a")]).expect(200).json();
        ["input", "output", "aborted"].map(|what| used[what].as_u64().unwrap())
    };
    // Each SDK leaves a stream.
    eventually_eq(|| says()[2], if part == "sdks" { 3 } else { 1 });
    let [input, output, left] = says();
    let charged = |api| {
        let total = gateway.decision("value", &json!({ "rule": format!("{api}-total"), "key": [] })).expect(200).json();
        total["count"].as_u64().unwrap_or_else(|| panic!("{total}"))
    };
    eventually_eq(|| ["openai", "anthropic", "google"].map(charged).iter().sum::<u64>(), input + output + left * 20);
}
