//! The identity of a counter: usage stays when other settings of its rule change, and equivalent paths share a counter.

use crate::support::gateway::Gateway;
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::{eventually, one_rule};

#[test]
fn adding_removing_and_moving_layers_returns_no_quota() {
    let toml =
        |windows: &str| one_rule(&format!("key = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = {windows}"));
    let mut gateway = Gateway::start(&toml("[\"5/day\"]"));
    let mut client = gateway.client();
    let bob = [("X-User", "bob")];
    for _ in 0..5 {
        client.get_with("/a", &bob).expect(200);
    }
    for (windows, layers) in [
        ("[\"5/second\", \"5/minute\", \"5/hour\", \"5/day\", \"9000/month\"]", 5),
        ("[\"5/day\", \"5/hour\"]", 2),
        ("[\"5/day\"]", 1),
    ] {
        gateway.reload(&toml(windows));
        eventually("the new layers apply", || items(&client.get_with("/a", &bob), "ratelimit").len() == layers);
        let refused = client.get_with("/a", &bob).expect(429);
        assert_eq!(remaining(&refused, if layers == 1 { "r" } else { "r-day" }), 0);
    }
}

#[test]
fn on_missing_key_is_not_part_of_a_counters_identity() {
    let toml = |missing: &str| {
        one_rule(&format!("key = \"header:x-user\"\non_missing_key = {missing}\nwindows = [\"2/day\"]"))
    };
    let mut gateway = Gateway::start(&toml("\"skip\""));
    let mut client = gateway.client();
    let bob = [("X-User", "bob")];
    client.get_with("/a", &bob).expect(200);
    client.get_with("/a", &bob).expect(200);
    for (missing, status) in [("\"refuse\"", 400), ("\"ip\"", 200)] {
        gateway.reload(&toml(missing));
        eventually("the new rule applies", || client.get("/a").status == status && status != 429);
        client.get_with("/a", &bob).expect(429);
    }
}

#[test]
fn a_shadow_rule_refuses_no_request_for_a_missing_key() {
    for missing in ["refuse", "skip"] {
        let rule = format!(
            "key = \"header:x-user\"\non_missing_key = \"{missing}\"\non_limit = \"shadow\"\nwindows = [\"1/day\"]"
        );
        let gateway = Gateway::start(&one_rule(&rule));
        gateway.get("/a").expect(200);
        gateway.get_with("/a", &[("X-User", "a"), ("X-User", "b")]).expect(200);
    }
}

#[test]
fn equivalent_paths_share_a_counter() {
    let gateway = Gateway::start(&one_rule("key = \"path\"\nwindows = [\"1/day\"]"));
    for (path, equivalents) in [
        ("/login", &["//login", "/%6Cogin", "/x/../login", "/./login"][..]),
        ("/users/@me", &["/users/%40me", "/users//%40%6d%65"]),
        ("/a:b;c,d", &["/a%3ab%3Bc%2cd"]),
        ("/caf%C3%A9", &["/caf%c3%a9", "/x/../caf%C3%a9"]),
    ] {
        gateway.get(path).expect(200);
        for equivalent in equivalents {
            gateway.get(equivalent).expect(429);
        }
    }
    // Servers differ in which segment `..` removes.
    gateway.get("/login//../login").expect(400);
}
