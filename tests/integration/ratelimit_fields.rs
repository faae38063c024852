//! The RateLimit fields of responses.

use crate::support::gateway::Gateway;
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::upstream::{Upstream, reply};
use crate::support::{eventually_eq, forward_all, one_rule};

const LEGACY: [&str; 3] = ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"];

#[test]
fn legacy_fields_describe_the_layer_nearest_its_limit() {
    let toml = one_rule("key = \"ip\"\nwindows = [\"5/hour\", \"3/minute\"]\nheaders = \"legacy\"");
    let gateway = Gateway::start(&toml);
    let legacy_fields = |status: u16| {
        let response = gateway.get("/a").expect(status);
        assert_eq!((response.field("ratelimit"), response.field("ratelimit-policy")), (None, None));
        LEGACY.map(|name| response.field(name).unwrap().parse::<u64>().unwrap())
    };
    assert_eq!(legacy_fields(200), [3, 2, 60]);
    assert_eq!(legacy_fields(200), [3, 1, 60]);
    assert_eq!(legacy_fields(200), [3, 0, 60]);
    gateway.advance_s(20);
    assert_eq!(legacy_fields(429), [3, 0, 40]);
    gateway.advance_s(40);
    // Now one token remains of the hour, and two of the minute.
    assert_eq!(legacy_fields(200), [5, 1, 2640]);
    assert_eq!(legacy_fields(200), [5, 0, 2640]);
}

#[test]
fn policies_of_periods_that_are_not_whole_seconds_state_several_windows() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"2/100ms\", \"3/1500ms\", \"40/minute\"]"));
    let response = gateway.get("/a").expect(200);
    let policies = items(&response, "ratelimit-policy");
    let stated: Vec<_> = policies.iter().map(|item| (item.get("q"), item.get("w"))).collect();
    assert_eq!(stated, [(20, 1), (6, 3), (40, 60)]);
    // What remains of the current window.
    let left: Vec<_> = items(&response, "ratelimit").iter().map(|item| item.get("r")).collect();
    assert_eq!(left, [1, 2, 39]);
}

#[test]
fn both_and_off_select_the_fields() {
    let rule = |headers: &str| one_rule(&format!("key = \"ip\"\nwindows = [\"1/minute\"]\nheaders = \"{headers}\""));
    let gateway = Gateway::start(&rule("both"));
    for status in [200, 429] {
        let response = gateway.get("/a").expect(status);
        assert_eq!(items(&response, "ratelimit")[0].get("r"), 0);
        assert_eq!(LEGACY.map(|name| response.field(name).unwrap()), ["1", "0", "60"]);
    }
    let gateway = Gateway::start(&rule("off"));
    for status in [200, 429] {
        let response = gateway.get("/a").expect(status);
        assert!(response.fields.iter().all(|(name, _)| !name.contains("ratelimit")), "{:?}", response.fields);
        assert_eq!(response.field("retry-after").is_some(), status == 429);
    }
    // The setting for all rules, and a rule with its own.
    let toml = format!("headers = \"off\"\n{}", one_rule("key = \"ip\"\nwindows = [\"1/minute\"]"));
    assert_eq!(Gateway::start(&toml).get("/a").expect(200).field("ratelimit"), None);
    let toml = format!("headers = \"off\"\n{}", rule("ietf"));
    assert!(Gateway::start(&toml).get("/a").expect(200).field("ratelimit").is_some());
}

#[test]
fn ratelimit_fields_of_the_upstream_are_kept_and_joined() {
    let upstream = Upstream::responding(|_| {
        let fields = [
            ("RateLimit-Policy", "\"theirs\";q=10;w=1"),
            ("RateLimit", "\"theirs\";r=9;t=1"),
            ("RateLimit", "\"more\";r=8;t=2"),
            ("Retry-After", "7"),
            ("X-RateLimit-Limit", "10"),
        ];
        reply(200, &fields, b"")
    });
    let rule = "[rules.r]\nkey = \"ip\"\nwindows = [\"5/minute\"]\n";
    let toml = forward_all(&upstream).replace("[[routes]]", &format!("{rule}[[routes]]")) + "rules = [\"r\"]\n";
    let gateway = Gateway::start(&toml);
    let response = gateway.get("/a").expect(200);
    let names = |field| items(&response, field).into_iter().map(|item| item.name).collect::<Vec<_>>();
    assert_eq!(names("ratelimit-policy"), ["theirs", "r"]);
    assert_eq!(names("ratelimit"), ["theirs", "more", "r"]);
    assert_eq!(remaining(&response, "r"), 4);
    assert_eq!(remaining(&response, "theirs"), 9);
    assert_eq!((response.field("retry-after"), response.field("x-ratelimit-limit")), (Some("7"), Some("10")));
}

/// Joined with a dictionary, the list could not be read.
#[test]
fn ratelimit_fields_of_older_drafts_are_replaced() {
    let upstream = Upstream::responding(|_| {
        let fields = [
            ("RateLimit-Policy", "100;w=60"),
            ("RateLimit", "limit=100, remaining=3, reset=5"),
            ("RateLimit-Limit", "100"),
        ];
        reply(200, &fields, b"")
    });
    let rule = "[rules.r]\nkey = \"ip\"\nwindows = [\"5/minute\"]\n";
    let toml = forward_all(&upstream).replace("[[routes]]", &format!("{rule}[[routes]]")) + "rules = [\"r\"]\n";
    let response = Gateway::start(&toml).get("/a").expect(200);
    assert_eq!(response.values("ratelimit"), ["\"r\";r=4;t=60"]);
    assert_eq!(response.values("ratelimit-policy"), ["100;w=60, \"r\";q=5;w=60"]);
    assert_eq!(response.field("ratelimit-limit"), Some("100"));
}

#[test]
fn every_response_to_a_charged_request_has_the_fields() {
    // The request was charged, so the client gets the fields, also with an error.
    let upstream = Upstream::refusing_connections();
    let rule = "[rules.r]\nkey = \"ip\"\nwindows = [\"5/minute\"]\n";
    let toml = forward_all(&upstream).replace("[[routes]]", &format!("{rule}[[routes]]")) + "rules = [\"r\"]\n";
    let gateway = Gateway::start(&toml);
    for left in [4, 3] {
        let response = gateway.get("/a").expect(502);
        response.problem();
        assert_eq!(remaining(&response, "r"), left);
    }
}

#[test]
fn a_shadow_rule_decides_and_reports_but_never_enforces() {
    let toml = "[upstreams.u]
        builtin = \"echo\"
        [rules.strict]
        key = \"ip\"
        on_limit = \"shadow\"
        windows = [\"3/minute\"]
        [rules.real]
        key = \"ip\"
        windows = [\"5/minute\"]
        [[routes]]
        name = \"all\"
        path = \"/{*rest}\"
        upstream = \"u\"
        rules = [\"strict\", \"real\"]
        ";
    let gateway = Gateway::start(toml);
    for n in 1..=8 {
        let response = gateway.get("/a").expect(if n <= 5 { 200 } else { 429 });
        let names: Vec<_> = items(&response, "ratelimit").into_iter().map(|item| item.name).collect();
        assert_eq!(names, ["real"]);
        if n > 5 {
            assert_eq!(response.problem()["violated-policies"], serde_json::json!(["real"]));
        }
    }
    let page = gateway.metrics();
    let decisions =
        |rule, outcome| page.sum("transom_decisions_total", &[("route", "all"), ("rule", rule), ("outcome", outcome)]);
    // Requests that the enforced rule refuses are not counted by the shadow rule.
    assert_eq!(
        [decisions("strict", "admitted"), decisions("strict", "shadowed"), decisions("strict", "refused")],
        [3, 2, 0]
    );
    assert_eq!([decisions("real", "admitted"), decisions("real", "shadowed"), decisions("real", "refused")], [5, 0, 3]);
    // The next window starts a new count.
    gateway.advance_s(60);
    gateway.get("/a").expect(200);
    let page = gateway.metrics();
    assert_eq!(page.sum("transom_decisions_total", &[("rule", "strict"), ("outcome", "admitted")]), 4);
}

#[test]
fn a_refusal_by_two_rules_names_both_and_the_later_retry() {
    let toml = "[upstreams.u]
        builtin = \"echo\"
        [rules.a]
        key = \"ip\"
        windows = [\"2/minute\"]
        [rules.b]
        key = \"global\"
        windows = [\"2/hour\"]
        [[routes]]
        path = \"/{*rest}\"
        upstream = \"u\"
        rules = [\"a\", \"b\"]
        ";
    let gateway = Gateway::start(toml);
    gateway.get("/x").expect(200);
    gateway.get("/x").expect(200);
    let refused = gateway.get("/x").expect(429);
    assert_eq!(refused.problem()["violated-policies"], serde_json::json!(["a", "b"]));
    assert_eq!(refused.field("retry-after"), Some("2700"));
    gateway.advance_s(60);
    assert_eq!(gateway.get("/x").expect(429).problem()["violated-policies"], serde_json::json!(["b"]));
}

#[test]
fn a_head_request_is_refused_without_a_body() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"1/minute\"]"));
    let mut client = gateway.client();
    client.request("HEAD", "/a", &[], b"").expect(200);
    let refused = client.request("HEAD", "/a", &[], b"").expect(429);
    assert_eq!(refused.field("content-type"), Some("application/problem+json"));
    // No byte of a body is left on the connection.
    client.request("GET", "/a", &[], b"").expect(429).problem();
}

#[test]
fn an_unmatched_request_is_404_and_not_counted() {
    let gateway =
        Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"1/minute\"]").replace("/{*rest}", "/api/{*rest}"));
    let mut client = gateway.client();
    for _ in 0..3 {
        let response = client.get("/elsewhere").expect(404);
        response.problem();
        assert_eq!(response.field("ratelimit"), None);
    }
    client.get("/api/a").expect(200);
    eventually_eq(|| gateway.metrics().sum("transom_requests_total", &[("route", ""), ("code", "404")]), 3);
}

#[test]
fn the_most_specific_route_wins_in_any_order() {
    let routes = [
        ("all", "path = \"/{*rest}\""),
        ("user", "path = \"/users/{id}\""),
        ("me", "path = \"/users/me\""),
        ("post-me", "path = \"/users/me\"\nmethods = [\"POST\"]"),
        ("beta-me", "path = \"/users/me\"\nheaders = { x-beta = \"1\" }"),
        ("host", "path = \"/{*rest}\"\nhost = \"api.example.com\""),
        ("wild", "path = \"/{*rest}\"\nhost = \"*.example.com\""),
    ];
    for reversed in [false, true] {
        let mut text: Vec<String> = routes
            .iter()
            .map(|(name, what)| format!("[[routes]]\nname = \"{name}\"\n{what}\nupstream = \"u\"\nrules = [\"r\"]\n"))
            .collect();
        if reversed {
            text.reverse();
        }
        let toml = format!(
            "[upstreams.u]\nbuiltin = \"echo\"\n[rules.r]\nkey = \"route\"\nwindows = [\"1000/hour\"]\n{}",
            text.concat()
        );
        let gateway = Gateway::start(&toml);
        let requests = [
            ("GET", "/users/me", &[][..], "me"),
            ("GET", "/users/%6de", &[], "me"),
            ("GET", "/users/7", &[], "user"),
            ("GET", "/users/7/x", &[], "all"),
            ("POST", "/users/me", &[], "post-me"),
            ("GET", "/users/me", &[("X-Beta", "1")], "beta-me"),
            ("GET", "/users/me", &[("X-Beta", "2")], "me"),
            ("GET", "/users/me", &[("Host", "API.example.com:80")], "host"),
            ("GET", "/users/me", &[("Host", "x.y.example.com")], "wild"),
        ];
        for (method, target, fields, route) in requests {
            let before = gateway.metrics().sum("transom_requests_total", &[("route", route)]);
            gateway.client().request(method, target, fields, b"").expect(200);
            let count = || gateway.metrics().sum("transom_requests_total", &[("route", route)]);
            crate::support::eventually(&format!("{target} {fields:?} is counted on {route}"), || count() == before + 1);
        }
    }
}
