//! The cost of a request: set by the request, the response, or the route; and refusals that are counted.

use crate::support::client::{Client, HttpResponse};
use crate::support::gateway::Gateway;
use crate::support::one_rule;
use crate::support::process::Process;
use crate::support::ratelimit_parser::remaining;
use crate::support::upstream::{Upstream, reply};

fn get_with_cost(client: &mut Client, cost: &str) -> HttpResponse {
    client.get_with("/a", &[("X-Cost", cost)])
}

#[test]
fn a_request_field_sets_the_cost() {
    let rule =
        "key = \"ip\"\nwindows = [\"100/minute\"]\ncost = { request-header = \"x-cost\", default = 2, max = 50 }";
    let gateway = Gateway::start(&one_rule(rule));
    let mut client = gateway.client();
    for (cost, left) in [("0", 100), ("1", 99), ("50", 49), ("007", 42), ("0", 42)] {
        assert_eq!(remaining(&get_with_cost(&mut client, cost).expect(200), "r"), left, "{cost}");
    }
    assert_eq!(remaining(&client.get("/a").expect(200), "r"), 40, "the default");
    assert_eq!(remaining(&get_with_cost(&mut client, "41").expect(429), "r"), 40);
    assert_eq!(remaining(&get_with_cost(&mut client, "40").expect(200), "r"), 0);
    // Without tokens, a request of cost 0 is admitted.
    get_with_cost(&mut client, "0").expect(200);
    client.get("/a").expect(429);
}

#[test]
fn a_malformed_cost_is_refused_and_consumes_nothing() {
    let rule = "key = \"ip\"\nwindows = [\"100/minute\"]\ncost = { request-header = \"x-cost\", max = 50 }";
    let gateway = Gateway::start(&one_rule(rule));
    for cost in
        ["", "-1", "+1", "1.5", "1e1", "0x10", "one", "1 2", "1,2", "51", "4294967296", "99999999999999999999", "²"]
    {
        let problem = get_with_cost(&mut gateway.client(), cost).expect(400).problem();
        assert_eq!(problem["detail"], "`x-cost` is not one whole number from 0 to 50", "{cost:?}");
    }
    gateway.get_with("/a", &[("X-Cost", "1"), ("X-Cost", "1")]).expect(400);
    assert_eq!(remaining(&get_with_cost(&mut gateway.client(), "0").expect(200), "r"), 100);
}

#[test]
fn the_cost_is_at_most_the_smallest_capacity_by_default() {
    let rule = "key = \"ip\"\nwindows = [\"100/hour\", { limit = 20, period = \"minute\", capacity = 30 }]\n\
                cost = { request-header = \"x-cost\" }";
    let gateway = Gateway::start(&one_rule(rule));
    get_with_cost(&mut gateway.client(), "31").expect(400);
    get_with_cost(&mut gateway.client(), "30").expect(200);
}

#[test]
fn an_override_does_not_change_the_maximum_cost_of_other_keys() {
    let rule = "key = \"header:x-user\"\non_missing_key = \"refuse\"\nwindows = [\"20/minute\"]\n\
                cost = { request-header = \"x-cost\" }\n\
                overrides = [{ key = \"eve\", windows = [\"2/minute\"] }, { key = \"bob\", windows = [\"50/minute\"] }]";
    let gateway = Gateway::start(&one_rule(rule));
    let get_as = |user: &str, cost: &str| gateway.get_with("/a", &[("X-User", user), ("X-Cost", cost)]);
    get_as("alice", "20").expect(200);
    get_as("bob", "50").expect(200);
    // For this key, the cost exceeds every window.
    assert_eq!(get_as("eve", "20").expect(429).field("retry-after"), None);
    get_as("eve", "51").expect(400);
    get_as("eve", "2").expect(200);
}

/// An upstream whose response states the number in the request's path as the cost, if there is one.
fn upstream_with_cost() -> Upstream {
    Upstream::responding(|received| match received.target.trim_start_matches('/') {
        "no-cost" => reply(200, &[], b""),
        "twice" => reply(200, &[("X-Cost", "5"), ("X-Cost", "5")], b""),
        cost => reply(200, &[("X-Cost", cost)], b""),
    })
}

fn response_cost_config(upstream: &Upstream, rule: &str) -> String {
    format!(
        "{}[rules.r]\nkey = \"ip\"\n{rule}\n[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n",
        upstream.toml("u")
    )
}

#[test]
fn a_response_field_sets_the_cost() {
    let upstream = upstream_with_cost();
    let toml = response_cost_config(
        &upstream,
        "windows = [\"100/minute\", \"1000/hour\"]\ncost = { response-header = \"x-cost\", reserve = 5, max = 40 }",
    );
    let gateway = Gateway::start(&toml);
    let mut client = gateway.client();
    // A lower cost is refunded; a higher cost is charged.
    for (path, left) in [
        ("/1", 99),
        ("/5", 94),
        ("/0", 94),
        ("/20", 74),
        // Without a valid cost, the charged cost stays.
        ("/no-cost", 69),
        ("/twice", 64),
        ("/-1", 59),
        ("/many", 54),
        // A response cannot cost more than the maximum.
        ("/41", 14),
        ("/99999999999999999999", 0),
    ] {
        let response = client.get(path).expect(200);
        assert_eq!(remaining(&response, "r-minute"), left, "{path}");
        let used = if path.len() > 9 { 126 } else { 100 - left };
        assert_eq!(remaining(&response, "r-hour"), 1000 - used, "{path}");
    }
}

#[test]
fn a_response_cost_beyond_the_limit_is_owed_by_the_next_windows() {
    let upstream = upstream_with_cost();
    let toml = response_cost_config(
        &upstream,
        "windows = [\"10/minute\"]\ncost = { response-header = \"x-cost\", reserve = 1, max = 1000 }",
    );
    let gateway = Gateway::start(&toml);
    let mut client = gateway.client();
    assert_eq!(remaining(&client.get("/25").expect(200), "r"), 0);
    // 25 tokens use up this minute, the next one, and half of the one after.
    let refused = client.get("/1").expect(429);
    assert_eq!(refused.field("retry-after"), Some("120"));
    gateway.advance_s(60);
    assert_eq!(client.get("/1").expect(429).field("retry-after"), Some("60"));
    gateway.advance_s(60);
    assert_eq!(remaining(&client.get("/1").expect(200), "r"), 4);
    assert_eq!(remaining(&client.get("/4").expect(200), "r"), 0);
    client.get("/0").expect(429);
    gateway.advance_s(60);
    assert_eq!(remaining(&client.get("/0").expect(200), "r"), 10);
}

#[test]
fn an_ended_window_gets_no_refund() {
    use std::sync::{Arc, Barrier};
    let (arrived, released) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let upstream = Upstream::responding({
        let (arrived, released) = (Arc::clone(&arrived), Arc::clone(&released));
        move |received| {
            if received.target == "/slow" {
                arrived.wait();
                released.wait();
            }
            reply(200, &[("X-Cost", "2")], b"")
        }
    });
    let toml = response_cost_config(
        &upstream,
        "windows = [\"10/minute\"]\ncost = { response-header = \"x-cost\", reserve = 8, max = 10 }",
    );
    let gateway = Gateway::start(&toml);
    let mut slow = gateway.client();
    slow.send(crate::support::client::request("GET", "/slow", &[], b""));
    arrived.wait();
    gateway.advance_s(60);
    assert_eq!(remaining(&gateway.get("/quick").expect(200), "r"), 8);
    released.wait();
    assert_eq!(remaining(&slow.read_response().expect(200), "r"), 8);
}

#[test]
fn a_route_can_set_the_cost() {
    let toml = "[upstreams.u]\nbuiltin = \"echo\"\n[rules.r]\nkey = \"ip\"\nwindows = [\"20/minute\"]\n\
        [rules.by-field]\nkey = \"ip\"\nwindows = [\"30/minute\"]\ncost = { request-header = \"x-cost\", default = 3 }\n\
        [[routes]]\npath = \"/expensive\"\nupstream = \"u\"\nrules = [\"r\", \"by-field\"]\ncost = 5\n\
        [[routes]]\npath = \"/free\"\nupstream = \"u\"\nrules = [\"r\", \"by-field\"]\ncost = 0\n\
        [[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\nrules = [\"r\", \"by-field\"]\n";
    let gateway = Gateway::start(toml);
    let mut client = gateway.client();
    for (path, left, by_field) in [("/expensive", 15, 27), ("/else", 14, 24), ("/free", 14, 21), ("/expensive", 9, 18)]
    {
        let response = client.get(path).expect(200);
        assert_eq!((remaining(&response, "r"), remaining(&response, "by-field")), (left, by_field), "{path}");
    }
}

#[test]
fn count_refused_charges_the_other_layers() {
    for (counted, left) in [(true, 0), (false, 7)] {
        let rule = format!("key = \"ip\"\nwindows = [\"3/minute\", \"10/hour\"]\ncount_refused = {counted}");
        let gateway = Gateway::start(&one_rule(&rule));
        let mut client = gateway.client();
        (0..3).for_each(|_| drop(client.get("/a").expect(200)));
        (0..9).for_each(|_| drop(client.get("/a").expect(429)));
        assert_eq!(remaining(&client.get("/a").expect(429), "r-hour"), left);
        gateway.advance_s(60);
        assert_eq!(client.get("/a").status, if counted { 429 } else { 200 });
    }
}

#[test]
fn a_refused_request_opens_no_window() {
    let rule = "key = \"ip\"\ncount_refused = true\n\
                windows = [\"1/minute\", { limit = 3, period = \"10s\", start = \"first-request\" }]";
    let gateway = Gateway::start(&one_rule(rule));
    let mut client = gateway.client();
    let floating = |response: &HttpResponse| {
        let items = crate::support::ratelimit_parser::items(response, "ratelimit");
        (items[1].get("r"), items[1].get("t"))
    };
    assert_eq!(floating(&client.get("/a").expect(200)), (2, 10));
    gateway.advance_s(4);
    // The window is open, so this counts; the minute refuses.
    assert_eq!(floating(&client.get("/a").expect(429)), (1, 6));
    gateway.advance_s(8);
    assert_eq!(floating(&client.get("/a").expect(429)), (3, 10));
    gateway.advance_s(5);
    assert_eq!(floating(&client.get("/a").expect(429)), (3, 10));
    gateway.advance_s(43);
    assert_eq!(floating(&client.get("/a").expect(200)), (2, 10));
}

/// The tokens of the only client that rule `r` has counted.
fn used(gateway: &Gateway) -> u64 {
    let query = serde_json::json!({ "rule": "r", "key": "127.0.0.1" });
    let state = Client::connect(gateway.admin).post("/v1/value", query.to_string()).expect(200).json();
    state["count"].as_u64().unwrap_or_else(|| panic!("{state}"))
}

#[test]
fn a_shadow_rule_settles_only_what_it_has_charged() {
    let upstream = upstream_with_cost();
    let gateway = Gateway::start(&response_cost_config(
        &upstream,
        "on_limit = \"shadow\"\nwindows = [\"10/minute\"]\n\
         cost = { response-header = \"x-cost\", reserve = 1, max = 1000 }",
    ));
    let mut client = gateway.client();
    client.get("/82").expect(200);
    assert_eq!(used(&gateway), 82);
    client.get("/210").expect(200);
    assert_eq!(used(&gateway), 82, "an enforced rule would have refused the request");
    let upstream = Upstream::responding(|received| {
        reply(received.target.trim_start_matches('/').parse().unwrap_or(200), &[], b"")
    });
    let gateway = Gateway::start(&response_cost_config(
        &upstream,
        "on_limit = \"shadow\"\nwindows = [\"2/minute\"]\ncount_when = { status = [401] }",
    ));
    let mut client = gateway.client();
    for _ in 0..3 {
        client.get("/401").expect(401);
    }
    client.get("/200").expect(200);
    assert_eq!(used(&gateway), 2, "nothing was charged, so nothing is refunded");
}

#[test]
fn a_cost_of_0_is_admitted_whatever_is_used() {
    let toml = |limit: u32| {
        format!(
            "[upstreams.u]\nbuiltin = \"echo\"\n[rules.r]\nkey = \"ip\"\nwindows = [\"{limit}/30d\"]\npenalty = \"1h\"\n\
             cost = {{ request-header = \"x-cost\", max = 9 }}\n\
             [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n"
        )
    };
    let process = Process::spawn(&toml(9));
    let get = |cost: &str| process.client().get_with("/", &[("X-Cost", cost)]);
    assert_eq!(remaining(&get("8").expect(200), "r"), 1);
    process.write_config(&toml(5));
    process.signal("HUP");
    process.wait_for_applied_reloads(1);
    // More is used than the limit, and no lock-out starts.
    assert_eq!([get("0").status, get("0").status], [200, 200]);
    // A lock-out refuses requests of any cost.
    assert_eq!([get("1").status, get("0").status], [429, 429]);
}

#[test]
fn a_reserve_of_0_needs_one_token_left() {
    let upstream = upstream_with_cost();
    let rule = "windows = [\"10/minute\"]\ncost = { response-header = \"x-cost\", reserve = 0, max = 1000 }";
    let gateway = Gateway::start(&response_cost_config(&upstream, rule));
    let mut client = gateway.client();
    assert_eq!([5, 4, 0].map(|cost| remaining(&client.get(&format!("/{cost}")).expect(200), "r")), [5, 1, 1]);
    assert_eq!(remaining(&client.get("/1").expect(200), "r"), 0);
    assert_eq!(client.get("/0").expect(429).field("retry-after"), Some("60"));
}
