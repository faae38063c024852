//! Keys that name no client: `on_unknown_key`, and the client in access log and metrics.

use std::fs;

use serde_json::{Value, json};
use transom_limiter::secret_digest::Digest;

use crate::support::client::HttpResponse;
use crate::support::gateway::Gateway;
use crate::support::gateway_group::{LONG_TIMEOUT, shared_config};
use crate::support::http2_client::Http2Client;
use crate::support::jwt_issuer::Issuer;
use crate::support::process::Process;
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::redis::RedisServer;
use crate::support::{TempDir, eventually, eventually_eq};

const SECTION: &str = "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\n";

/// Rules by API key and by address, on one route.
fn config(on_unknown_key: &str, on_missing_key: &str, per_address: u32) -> String {
    format!(
        "{SECTION}[upstreams.u]\nbuiltin = \"echo\"\n\
         [rules.key]\nkey = \"header:x-api-key\"\non_missing_key = \"{on_missing_key}\"\n\
         on_unknown_key = \"{on_unknown_key}\"\nwindows = [\"10/366d\"]\n\
         [rules.key.plans.gold]\nwindows = [\"100/366d\"]\n\
         [rules.address]\nkey = \"ip\"\nwindows = [\"{per_address}/366d\"]\n\
         [[routes]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"key\", \"address\"]\n"
    )
}

fn client_toml(name: &str, key: &str) -> String {
    format!("[clients.{name}]\nplan = \"gold\"\napi_keys = [\"{}\"]\n", Digest::of(key.as_bytes()))
}

fn get(gateway: &Gateway, key: &str) -> HttpResponse {
    gateway.get_with("/a", &[("X-API-Key", key)])
}

fn live_counters(gateway: &Gateway) -> u64 {
    gateway.metrics().sum("transom_counters", &[("state", "live")])
}

#[test]
fn an_unknown_key_is_refused_with_401_and_charges_the_other_rules() {
    let gateway = Gateway::start_with(&config("refuse", "ip", 5), &client_toml("acme", "abc"));
    let known = get(&gateway, "abc").expect(200);
    assert_eq!((remaining(&known, "key"), remaining(&known, "address")), (99, 4));
    for left in [3, 2] {
        let unknown = get(&gateway, "guess").expect(401);
        assert_eq!(unknown.field("www-authenticate"), Some("Key"));
        let problem = unknown.problem();
        assert_eq!((&problem["status"], &problem["title"]), (&json!(401), &json!("Unauthorized")));
        assert_eq!(problem["detail"], "the API key in the field x-api-key is not known here");
        assert!(!unknown.text().contains("guess"));
        assert_eq!(items(&unknown, "ratelimit").len(), 1, "the rule by key shows nothing");
        assert_eq!(remaining(&unknown, "address"), left);
    }
    let mut http2 = Http2Client::connect(gateway.http);
    let unknown = http2.request_path("GET", "/a", &[("x-api-key", "guess")], b"").expect(401);
    assert_eq!((unknown.field("www-authenticate"), remaining(&unknown, "address")), (Some("Key"), 1));
    http2.request_path("GET", "/a", &[("x-api-key", "abc")], b"").expect(200);
    // The limit by address refuses first, and so neither answer tells whether a key is known.
    for key in ["guess", "abc"] {
        let refused = get(&gateway, key).expect(429);
        assert_eq!(refused.problem()["violated-policies"], json!(["address"]));
    }
    let metrics = gateway.metrics();
    let count = |name, labels: &[_]| metrics.sum(name, labels);
    assert_eq!(count("transom_request_errors_total", &[("error", "key_unknown")]), 3);
    assert_eq!(count("transom_requests_total", &[("route", "all"), ("code", "401")]), 3);
    assert_eq!(count("transom_decisions_total", &[("rule", "key"), ("outcome", "admitted")]), 2);
    assert_eq!(count("transom_decisions_total", &[("rule", "address"), ("outcome", "admitted")]), 5);
    assert_eq!(count("transom_decisions_total", &[("rule", "address"), ("outcome", "refused")]), 2);
}

#[test]
fn a_refusal_by_another_rule_charges_no_rule() {
    let toml = config("refuse", "ip", 1).replace("\"address\"]", "\"address\", \"all\"]")
        + "[rules.all]\nkey = \"global\"\nwindows = [\"9/366d\"]\n";
    let gateway = Gateway::start_with(&toml, &client_toml("acme", "abc"));
    assert_eq!(remaining(&get(&gateway, "guess").expect(401), "all"), 8);
    assert_eq!(remaining(&get(&gateway, "guess").expect(429), "all"), 8);
}

#[test]
fn a_missing_key_is_not_an_unknown_one() {
    let gateway = Gateway::start_with(&config("refuse", "ip", 100), &client_toml("acme", "abc"));
    assert_eq!(remaining(&gateway.get("/a").expect(200), "key"), 9, "counted by address");
    let gateway = Gateway::start_with(&config("refuse", "refuse", 100), &client_toml("acme", "abc"));
    let missing = gateway.get("/a").expect(401);
    assert_eq!(missing.field("www-authenticate"), Some("Key"));
    assert_eq!(missing.problem()["detail"], "this API needs an API key in the field x-api-key");
    get(&gateway, "guess").expect(401);
    let count = |error| gateway.metrics().sum("transom_request_errors_total", &[("error", error)]);
    assert_eq!((count("credentials_missing"), count("key_unknown"), count("key_missing")), (1, 1, 0));
}

#[test]
fn an_unknown_key_can_count_as_missing() {
    let clients = client_toml("acme", "abc");
    let gateway = Gateway::start_with(&config("missing", "ip", 100), &clients);
    for (left, key) in [(9, Some("one")), (8, Some("two")), (7, None)] {
        let response = key.map_or_else(|| gateway.get("/a"), |key| get(&gateway, key)).expect(200);
        assert_eq!(remaining(&response, "key"), left);
    }
    assert_eq!(remaining(&get(&gateway, "abc").expect(200), "key"), 99);

    let gateway = Gateway::start_with(&config("missing", "skip", 100), &clients);
    for _ in 0..12 {
        assert_eq!(items(&get(&gateway, "one").expect(200), "ratelimit").len(), 1);
    }
    let gateway = Gateway::start_with(&config("missing", "refuse", 100), &clients);
    let refused = get(&gateway, "one").expect(401);
    assert_eq!((refused.field("www-authenticate"), remaining(&refused, "address")), (Some("Key"), 99));
}

#[test]
fn every_key_is_counted_by_default() {
    let gateway = Gateway::start_with(&config("count", "ip", 100), &client_toml("acme", "abc"));
    for key in ["one", "two"] {
        assert_eq!(remaining(&get(&gateway, key).expect(200), "key"), 9);
    }
}

/// `rules::rate_limit_key` tests 100,000 keys without sockets.
#[test]
fn invented_keys_get_no_quota_and_no_counter() {
    const KEYS: u32 = 2000;
    let clients = client_toml("acme", "abc");
    for (on_unknown_key, on_missing_key, status, live) in [
        ("refuse", "ip", 401, 1),
        ("missing", "refuse", 401, 1),
        ("missing", "skip", 200, 1),
        ("missing", "ip", 429, 2),
    ] {
        let gateway = Gateway::start_with(&config(on_unknown_key, on_missing_key, KEYS), &clients);
        let mut connection = gateway.client();
        let mut admitted = 0;
        for n in 0..KEYS {
            let response = connection.get_with("/a", &[("X-API-Key", &format!("invented-{n}"))]);
            if n < 10 && on_missing_key == "ip" && on_unknown_key == "missing" {
                assert_eq!(response.status, 200, "the first ten are counted by address");
            } else {
                assert_eq!(response.status, status, "{on_unknown_key}, {on_missing_key}, {n}");
            }
            admitted += u32::from(response.status == 200);
        }
        let expected = if status == 200 {
            KEYS
        } else if status == 429 {
            10
        } else {
            0
        };
        assert_eq!(admitted, expected);
        assert_eq!(live_counters(&gateway), live, "{on_unknown_key}, {on_missing_key}");
    }
}

#[test]
fn configured_keys_are_known_without_a_client() {
    let more = "exemptions = [\"key:monitor\"]\noverrides = [{ key = \"alice\", windows = [\"3/366d\"] }]\n";
    for digests in [false, true] {
        let more = match digests {
            true => more.replace("key:monitor", &format!("key:{}", Digest::of(b"monitor"))),
            false => more.to_owned(),
        };
        let toml = config("refuse", "ip", 100)
            .replace("windows = [\"10/366d\"]\n", &format!("windows = [\"10/366d\"]\n{more}"));
        let gateway = Gateway::start_with(&toml, "");
        assert_eq!(items(&get(&gateway, "monitor").expect(200), "ratelimit").len(), 1);
        assert_eq!(remaining(&get(&gateway, "alice").expect(200), "key"), 2);
        get(&gateway, "eve").expect(401);
    }
}

#[test]
fn every_part_that_names_a_client_must_be_known() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let toml = config("refuse", "ip", 1000)
        .replace("key = \"header:x-api-key\"\non", "key = [\"header:x-api-key\", \"jwt:sub\", \"path\"]\non")
        .replace(SECTION, &format!("{}{SECTION}subject = \"jwt:sub\"\n", issuer.keys(&scratch)));
    let clients = format!("{}subjects = [\"user-17\"]\n", client_toml("acme", "abc"));
    let gateway = Gateway::start_with(&toml, &clients);
    let request = |path: &str, key: &str, sub: &str| {
        let token = format!("Bearer {}", issuer.token("HS256", &json!({ "sub": sub })));
        gateway.get_with(path, &[("X-API-Key", key), ("Authorization", &token)])
    };
    assert_eq!(remaining(&request("/a", "abc", "user-17").expect(200), "key"), 99);
    assert_eq!(remaining(&request("/b", "abc", "user-17").expect(200), "key"), 99, "any path");
    assert_eq!(request("/a", "abd", "user-17").expect(401).field("www-authenticate"), Some("Key"));
    let unknown = request("/a", "abc", "user-18").expect(401);
    assert_eq!(unknown.field("www-authenticate"), Some("Bearer error=\"invalid_token\""));
    assert_eq!(remaining(&gateway.get_with("/a", &[("X-API-Key", "abd")]).expect(200), "key"), 9, "a part is missing");
}

/// `YWxpY2U6eA==` is `alice:x`, `Ym9iOng=` is `bob:x`.
#[test]
fn the_challenge_names_the_scheme_of_the_key() {
    let toml = config("refuse", "ip", 1000)
        .replace("key = \"header:x-api-key\"\non", "key = \"basic-user\"\non")
        .replace(SECTION, &format!("{SECTION}subject = \"basic-user\"\n"));
    let gateway = Gateway::start_with(&toml, "[clients.a]\nplan = \"gold\"\nsubjects = [\"alice\"]\n");
    gateway.get_with("/a", &[("Authorization", "Basic YWxpY2U6eA==")]).expect(200);
    let unknown = gateway.get_with("/a", &[("Authorization", "Basic Ym9iOng=")]).expect(401);
    assert_eq!(unknown.field("www-authenticate"), Some("Basic realm=\"gateway\""));
}

#[test]
fn a_shadow_rule_refuses_no_unknown_key() {
    let toml = config("refuse", "ip", 100).replace("on_unknown_key", "on_limit = \"shadow\"\non_unknown_key");
    let gateway = Gateway::start_with(&toml, &client_toml("acme", "abc"));
    get(&gateway, "guess").expect(200);
    eventually_eq(|| gateway.metrics().sum("transom_decisions_total", &[("rule", "key"), ("outcome", "shadowed")]), 1);
}

#[test]
fn a_refused_key_holds_no_slot() {
    let toml = config("refuse", "ip", 100).replace("key = \"ip\"\n", "key = \"ip\"\nconcurrent = 1\n");
    let gateway = Gateway::start_with(&toml, &client_toml("acme", "abc"));
    for _ in 0..5 {
        get(&gateway, "guess").expect(401);
        get(&gateway, "abc").expect(200);
    }
    eventually_eq(|| gateway.metrics().sum("transom_concurrent_requests", &[]), 0);
}

#[test]
fn a_reload_of_the_clients_file_makes_keys_known_and_unknown() {
    let toml = config("refuse", "ip", 1_000_000);
    let mut gateway = Gateway::start_with(&toml, &client_toml("acme", "abc"));
    get(&gateway, "abc").expect(200);
    get(&gateway, "def").expect(401);
    gateway.reload_with(&toml, &client_toml("beta", "def"));
    eventually("the clients are replaced", || get(&gateway, "def").status == 200);
    eventually("the clients are replaced", || get(&gateway, "abc").status == 401);
    // The counter of a client that is known again has kept its usage.
    gateway.reload_with(&toml, &client_toml("acme", "abc"));
    eventually("the clients are replaced", || get(&gateway, "abc").status == 200);
    assert!(remaining(&get(&gateway, "abc").expect(200), "key") <= 97);
}

#[test]
fn field_values_outside_of_printable_ascii_are_refused_as_keys() {
    for (key, name) in [("header:x-user", "X-User"), ("cookie:id", "Cookie")] {
        let rule = format!(
            "[upstreams.u]\nbuiltin = \"echo\"\n[rules.r]\nkey = \"{key}\"\non_missing_key = \"skip\"\n\
             windows = [\"5/366d\"]\n[rules.address]\nkey = \"ip\"\nwindows = [\"90/366d\"]\n\
             [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\", \"address\"]\n"
        );
        let gateway = Gateway::start(&rule);
        let value = |text: &str| if name == "Cookie" { format!("id={text}") } else { text.to_owned() };
        let mut refused = 0;
        for bad in ["caf\u{e9}", "bob\u{200b}", "b\tob"] {
            let response = gateway.get_with("/a", &[(name, &value(bad))]).expect(400);
            refused += 1;
            assert!(response.problem()["detail"].as_str().unwrap().contains(key), "{}", response.text());
            assert_eq!(remaining(&response, "address"), 90 - refused, "other rules are charged");
        }
        if name == "Cookie" {
            gateway.get_with("/a", &[(name, "id=b%00b")]).expect(400);
            refused += 1;
        }
        gateway.get_with("/a", &[(name, &value("b o~b!"))]).expect(200);
        assert_eq!(gateway.metrics().sum("transom_request_errors_total", &[("error", "key_malformed")]), refused);
    }
}

#[test]
fn a_fallback_of_unknown_keys_is_shared_between_gateways() {
    let redis = RedisServer::start();
    let start = |on_unknown_key: &str| {
        let rules = format!(
            "[rules.r]\nkey = \"header:x-api-key\"\non_missing_key = \"ip\"\non_unknown_key = \"{on_unknown_key}\"\n\
             windows = [\"10/30d\"]\n[rules.r.plans.gold]\nwindows = [\"100/30d\"]\n"
        );
        let store = format!("mode = \"exact\"\n{LONG_TIMEOUT}");
        let toml = format!("{SECTION}{}", shared_config(&format!("\"{}\"", redis.url()), &store, &rules));
        Process::spawn_with(&toml, &client_toml("acme", "abc"))
    };
    let keys = || redis.keys().into_iter().filter(|key| !key.contains("{#")).collect::<Vec<_>>();
    let get = |gateway: &Process, key: &str| gateway.client().get_with("/a", &[("X-API-Key", key)]);
    let refusing = start("refuse");
    (0..3).for_each(|n| drop(get(&refusing, &format!("invented-{n}")).expect(401)));
    assert!(keys().is_empty(), "{:?}", keys());
    let gateways = [start("missing"), start("missing")];
    for n in 0..10 {
        get(&gateways[n % 2], &format!("invented-{n}")).expect(200);
    }
    (0..2).for_each(|n| drop(get(&gateways[n], "invented").expect(429)));
    let [key] = &keys()[..] else { panic!("{:?}", keys()) };
    assert!(key.starts_with("transom:{r|else=ip|127.0.0.1}:"), "{key}");
    get(&gateways[0], "abc").expect(200);
    assert_eq!(keys().len(), 2);
}

#[test]
fn the_decision_api_treats_unknown_keys_as_requests() {
    let clients = client_toml("acme", "abc");
    let body = |key: &str| json!({"rule": "key", "key": key});
    let gateway = Gateway::start_with(&config("refuse", "ip", 5), &clients);
    assert_eq!(gateway.decision("limit", &body("abc")).expect(200).json()["count"], 1);
    for operation in ["limit", "check", "value", "reset"] {
        let refused = gateway.decision(operation, &body("guess")).expect(200).json();
        assert_eq!((&refused["allowed"], &refused["unknown_key"]), (&json!(false), &json!(true)), "{operation}");
        assert_eq!((&refused["retry_after"], &refused["windows"]), (&Value::Null, &json!([])), "{operation}");
        assert_eq!(refused.get("exempt"), None);
    }
    // Another rule is charged for the guess, and may refuse it.
    let both = json!({"rules": [body("guess"), {"rule": "address", "key": "127.0.0.1"}]});
    for count in [1, 2, 3, 4, 5, 5] {
        let refused = gateway.decision("limit", &both).expect(200).json();
        assert_eq!((&refused["allowed"], &refused["windows"][0]["count"]), (&json!(false), &json!(count)));
    }
    get(&gateway, "abc").expect(429);
    assert_eq!(gateway.decision("value", &body("abc")).expect(200).json()["count"], 1);

    let gateway = Gateway::start_with(&config("missing", "skip", 5), &clients);
    let skipped = gateway.decision("limit", &body("guess")).expect(200).json();
    assert_eq!((&skipped["allowed"], &skipped["windows"]), (&json!(true), &json!([])));
    let gateway = Gateway::start_with(&config("missing", "refuse", 5), &clients);
    assert_eq!(gateway.decision("limit", &body("guess")).expect(200).json()["unknown_key"], true);
    let gateway = Gateway::start_with(&config("missing", "ip", 5), &clients);
    assert!(
        gateway.decision("limit", &body("guess")).expect(400).problem()["detail"].as_str().unwrap().contains("`ip`")
    );
    let gateway = Gateway::start_with(&config("count", "ip", 5), &clients);
    assert_eq!(gateway.decision("limit", &body("guess")).expect(200).json()["count"], 1);
    gateway.decision("limit", &body("caf\u{e9}")).expect(400);
    assert_eq!(live_counters(&gateway), 1);
}

#[test]
fn access_log_and_metrics_name_the_client() {
    let scratch = TempDir::new();
    let file = scratch.path().join("access.log");
    let toml = format!(
        "{}[metrics]\nclients = true\n[access_log]\nfile = \"{}\"\n",
        config("refuse", "ip", 4).replace("100/366d", "2/366d"),
        file.display()
    );
    let gateway = Gateway::start_with(&toml, &(client_toml("acme", "abc") + &client_toml("beta", "def")));
    for (key, status) in [("abc", 200), ("abc", 200), ("abc", 429), ("guess", 401)] {
        get(&gateway, key).expect(status);
    }
    gateway.get("/a").expect(200);
    let text = || fs::read_to_string(&file).unwrap_or_default();
    eventually("all are logged", || text().lines().count() == 5);
    let lines: Vec<Value> = text().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let column = |name: &str| lines.iter().map(|line| line[name].clone()).collect::<Vec<_>>();
    assert_eq!(column("client_name"), [json!("acme"), json!("acme"), json!("acme"), Value::Null, Value::Null]);
    assert_eq!(column("plan"), [json!("gold"), json!("gold"), json!("gold"), Value::Null, Value::Null]);
    assert_eq!(column("status"), [200, 200, 429, 401, 200]);
    assert!(lines[3]["error"].as_str().unwrap().contains("x-api-key"), "{}", lines[3]);
    assert!(!text().contains("guess") && !text().contains("abc"));
    let metrics = gateway.metrics();
    let count = |client, outcome| {
        metrics.sum("transom_client_requests_total", &[("client", client), ("plan", "gold"), ("outcome", outcome)])
    };
    assert_eq!((count("acme", "admitted"), count("acme", "refused")), (2, 1));
    assert_eq!((count("beta", "admitted"), count("beta", "refused")), (0, 0));
    assert_eq!(metrics.sum("transom_client_requests_total", &[]), 3, "unknown clients have no series");
}

#[test]
fn clients_are_counted_only_if_asked_for_and_after_a_reload() {
    let (toml, clients) = (config("refuse", "ip", 1_000_000), client_toml("acme", "abc"));
    let mut gateway = Gateway::start_with(&toml, &clients);
    get(&gateway, "abc").expect(200);
    let families = |gateway: &Gateway| gateway.metrics().families().contains("transom_client_requests_total");
    assert!(!families(&gateway));
    gateway.reload_with(&format!("{toml}[metrics]\nclients = true\n"), &clients);
    eventually("the client is counted", || {
        get(&gateway, "abc");
        gateway.metrics().sum("transom_client_requests_total", &[("client", "acme")]) > 0
    });
    gateway.reload_with(&toml, &clients);
    eventually("the series are removed", || {
        get(&gateway, "abc");
        !families(&gateway)
    });
}
