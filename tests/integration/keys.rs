//! Key sources of every kind, and requests without a key part.

use crate::support::client::Client;
use crate::support::gateway::Gateway;
use crate::support::one_rule;
use crate::support::ratelimit_parser::{items, remaining};

/// A gateway with one rule of two requests a minute.
fn two_per_minute(key: &str) -> Gateway {
    Gateway::start(&one_rule(&format!("{key}\nwindows = [\"2/minute\"]")))
}

/// Expects two requests to be admitted and the third to be refused.
#[track_caller]
fn assert_two_admitted(mut request: impl FnMut() -> u16) {
    assert_eq!([request(), request(), request()], [200, 200, 429]);
}

#[test]
fn an_address_is_one_client_however_many_connections_it_opens() {
    let gateway = two_per_minute("key = \"ip\"");
    assert_two_admitted(|| gateway.get("/a").status);
}

#[test]
fn addresses_are_counted_separately() {
    // All addresses of 127/8 belong to this machine.
    let gateway = two_per_minute("key = \"ip\"");
    assert_two_admitted(|| status_from("127.0.0.1", &gateway));
    assert_two_admitted(|| status_from("127.0.0.2", &gateway));
    for key in ["key = \"ip\"\nipv4_prefix = 24", "key = [\"ip-prefix6:56\", \"ip-prefix:24\"]"] {
        let gateway = two_per_minute(key);
        assert_eq!(
            ["127.0.0.1", "127.0.0.9", "127.0.0.200"].map(|address| status_from(address, &gateway)),
            [200, 200, 429]
        );
        assert_two_admitted(|| status_from("127.0.1.1", &gateway));
    }
}

fn status_from(address: &str, gateway: &Gateway) -> u16 {
    Client::connect_from(address, gateway.http).get("/a").status
}

#[test]
fn an_address_cannot_be_forged_by_header_fields() {
    let gateway = two_per_minute("key = \"ip\"");
    let mut n = 0;
    assert_two_admitted(|| {
        n += 1;
        let address = format!("10.0.0.{n}");
        let forwarded = format!("for={address}");
        gateway
            .get_with("/a", &[("X-Forwarded-For", &address), ("X-Real-IP", &address), ("Forwarded", &forwarded)])
            .status
    });
}

#[test]
fn header_keys_compare_exact_values() {
    let gateway = two_per_minute("key = \"header:x-user\"\non_missing_key = \"refuse\"");
    for user in ["bob", "Bob", "bob2", "b%6Fb", "a|b", "\"bob\""] {
        // Field names ignore case, and a value does not include the white space around it.
        assert_two_admitted(|| gateway.get_with("/a", &[("x-USER", &format!("  {user} "))]).status);
    }
}

#[test]
fn on_missing_key_is_applied() {
    let gateway = two_per_minute("key = \"header:x-user\"\non_missing_key = \"refuse\"");
    for fields in [&[][..], &[("X-User", "")]] {
        let response = gateway.get_with("/a", fields).expect(400);
        assert!(response.problem()["detail"].as_str().unwrap().contains("the field `x-user`"));
    }

    let gateway = two_per_minute("key = \"header:x-user\"\non_missing_key = \"skip\"");
    for _ in 0..5 {
        let response = gateway.get("/a").expect(200);
        assert_eq!((response.field("ratelimit"), response.field("ratelimit-policy")), (None, None));
    }
    assert_two_admitted(|| gateway.get_with("/a", &[("X-User", "bob")]).status);

    let gateway = two_per_minute("key = \"header:x-user\"\non_missing_key = \"ip\"");
    assert_two_admitted(|| gateway.get("/a").status);
    // A named client is not counted with unnamed ones, even if the name is an address.
    assert_two_admitted(|| gateway.get_with("/a", &[("X-User", "127.0.0.1")]).status);
}

#[test]
fn a_repeated_key_field_is_refused() {
    let gateway = two_per_minute("key = \"header:x-user\"\non_missing_key = \"skip\"");
    for fields in [[("X-User", "bob"), ("X-User", "eve")], [("X-User", "bob"), ("x-user", "bob")]] {
        gateway.get_with("/a", &fields).expect(400).problem();
    }
}

#[test]
fn a_parameter_of_the_path_is_a_key() {
    let toml = one_rule("key = \"param:id\"\nwindows = [\"2/minute\"]").replace("/{*rest}", "/user/{id}/posts");
    let gateway = Gateway::start(&toml);
    assert_two_admitted(|| gateway.get("/user/7/posts").status);
    assert_two_admitted(|| gateway.get("/user/8/posts?id=7").status);
    // Equivalent paths of the same user.
    for path in ["/user/%37/posts", "//user//7/posts", "/user/x/../7/posts"] {
        gateway.get(path).expect(429);
    }
}

#[test]
fn host_method_path_and_route_are_keys() {
    let gateway = two_per_minute("key = \"host\"");
    assert_two_admitted(|| gateway.get_with("/a", &[("Host", "one.test")]).status);
    gateway.get_with("/a", &[("Host", "ONE.test.:8080")]).expect(429);
    assert_two_admitted(|| gateway.get_with("/a", &[("Host", "two.test")]).status);

    let gateway = two_per_minute("key = \"method\"");
    assert_two_admitted(|| gateway.get("/a").status);
    assert_two_admitted(|| gateway.client().post("/a", "").status);

    let gateway = two_per_minute("key = \"path\"");
    assert_two_admitted(|| gateway.get("/login").status);
    for path in ["//login", "/%6Cogin", "/x/../login", "/./login", "/login?again"] {
        gateway.get(path).expect(429);
    }
    assert_two_admitted(|| gateway.get("/other").status);

    let toml = one_rule("key = \"route\"\nwindows = [\"2/minute\"]")
        + "[[routes]]\nname = \"b\"\npath = \"/b/{*rest}\"\nupstream = \"u\"\nrules = [\"r\"]\n";
    let gateway = Gateway::start(&toml);
    assert_two_admitted(|| gateway.get("/a").status);
    assert_two_admitted(|| gateway.get("/b/x").status);
}

#[test]
fn composite_keys_combine_their_parts() {
    let gateway = two_per_minute("key = [\"header:x-user\", \"path\"]\non_missing_key = \"refuse\"");
    let get = |user: &str, path: &str| gateway.get_with(path, &[("X-User", user)]).status;
    assert_two_admitted(|| get("abc", "/search"));
    assert_two_admitted(|| get("abc", "/feed"));
    assert_two_admitted(|| get("ab", "/search"));
    // Bytes moved from one part to the other make another key.
    assert_two_admitted(|| get("ab/", "/c"));
    assert_two_admitted(|| get("ab", "//c"));
}

#[test]
fn global_counts_all_requests_together() {
    let gateway = two_per_minute("key = \"global\"");
    let mut n = 0;
    assert_two_admitted(|| {
        n += 1;
        gateway.get_with(&format!("/{n}"), &[("X-User", &n.to_string()), ("Host", &format!("h{n}"))]).status
    });
}

#[test]
fn ipv6_clients_are_counted_by_their_network() {
    // Other IPv6 addresses of this machine would need configuration. `rules::rate_limit_key` tests that two addresses of a /64
    // share a key; this test covers that IPv6 clients are served and counted.
    let toml = format!(
        "listen = {{ http = [\"127.0.0.1:0\", \"[::1]:0\"], admin = \"127.0.0.1:0\" }}\n{}",
        one_rule("key = \"ip\"\nwindows = [\"2/minute\"]")
    );
    let gateway = Gateway::start(&toml);
    let six = gateway.http_addresses()[1];
    assert!(six.is_ipv6());
    assert_two_admitted(|| Client::connect(six).get("/a").status);
    assert_two_admitted(|| gateway.get("/a").status);
    let echo = Client::connect(six).get_with("/a", &[("Host", "[::1]:8080")]).expect(429);
    echo.problem();
}

#[test]
fn one_rule_on_two_routes_counts_once_and_two_rules_count_apart() {
    let toml = "[upstreams.u]
        builtin = \"echo\"
        [rules.shared]
        key = \"ip\"
        windows = [\"4/minute\"]
        [rules.own]
        key = \"ip\"
        windows = [\"4/minute\"]
        [[routes]]
        path = \"/a/{*rest}\"
        upstream = \"u\"
        rules = [\"shared\"]
        [[routes]]
        path = \"/b/{*rest}\"
        upstream = \"u\"
        rules = [\"shared\", \"own\"]
        ";
    let gateway = Gateway::start(toml);
    for left in [3, 2] {
        assert_eq!(remaining(&gateway.get("/a/x").expect(200), "shared"), left);
    }
    let both = gateway.get("/b/x").expect(200);
    assert_eq!((remaining(&both, "shared"), remaining(&both, "own")), (1, 3));
    gateway.get("/a/x").expect(200);
    let refused = gateway.get("/b/x").expect(429);
    assert_eq!((remaining(&refused, "shared"), remaining(&refused, "own")), (0, 3));
}

#[test]
fn a_cost_may_be_zero_or_above_one() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\ncost = 3\nwindows = [\"10/minute\"]"));
    for left in [7, 4, 1] {
        assert_eq!(remaining(&gateway.get("/a").expect(200), "r"), left);
    }
    // One token remains, which is not enough for a request.
    assert_eq!(remaining(&gateway.get("/a").expect(429), "r"), 1);

    let gateway = Gateway::start(&one_rule("key = \"ip\"\ncost = 0\nwindows = [\"1/minute\"]"));
    for _ in 0..5 {
        assert_eq!(remaining(&gateway.get("/a").expect(200), "r"), 1);
    }

    let largest = u32::MAX;
    let gateway =
        Gateway::start(&one_rule(&format!("key = \"ip\"\ncost = {largest}\nwindows = [\"{largest}/minute\"]")));
    assert_eq!(remaining(&gateway.get("/a").expect(200), "r"), 0);
    let refused = gateway.get("/a").expect(429);
    assert_eq!(items(&refused, "ratelimit-policy")[0].get("q"), u64::from(largest));
}

#[test]
fn windows_of_all_lengths_end_at_their_boundaries() {
    // 2023-11-14T22:15:00Z, a Tuesday; weeks begin on Thursdays, as the epoch did.
    for (period, left_s, window_s) in [
        ("second", 1, 1),
        ("minute", 60, 60),
        ("7s", 6, 7),
        ("5m", 300, 300),
        ("hour", 45 * 60, 3600),
        ("day", 105 * 60, 86_400),
        ("week", 24 * 3600 + 105 * 60, 604_800),
        ("month", 16 * 86_400 + 105 * 60, 30 * 86_400),
    ] {
        let gateway = Gateway::start(&one_rule(&format!("key = \"ip\"\nwindows = [\"1/{period}\"]")));
        let response = gateway.get("/a").expect(200);
        assert_eq!(items(&response, "ratelimit")[0].get("t"), left_s, "{period}");
        assert_eq!(items(&response, "ratelimit-policy")[0].get("w"), window_s, "{period}");
        gateway.advance_s(left_s - 1);
        assert_eq!(gateway.get("/a").expect(429).field("retry-after"), Some("1"), "{period}");
        gateway.advance_s(1);
        gateway.get("/a").expect(200);
    }
}

/// `YWxpY2U6eA==` is `alice:x`, `Ym9iOng=` is `bob:x`.
#[test]
fn the_user_of_basic_authentication_is_a_key() {
    let gateway = two_per_minute("key = \"basic-user\"\non_missing_key = \"refuse\"");
    let status = |credentials: &str| gateway.get_with("/a", &[("Authorization", credentials)]).status;
    let mut passwords = ["Basic YWxpY2U6eA==", "basic YWxpY2U6eQ==", "Basic YWxpY2U6eg"].into_iter();
    assert_two_admitted(|| status(passwords.next().unwrap()));
    assert_two_admitted(|| status("Basic Ym9iOng="));
    for malformed in ["Basic YWxpY2U=", "Basic", "Bearer YWxpY2U6eA=="] {
        assert_eq!(status(malformed), 400, "{malformed}");
    }
    gateway.get("/a").expect(400);
    // Many servers skip the characters that are not Base64, and read `alice`.
    let gateway = two_per_minute("key = \"basic-user\"\non_missing_key = \"skip\"");
    gateway.get("/a").expect(200);
    for ambiguous in ["Basic YWxp!Y2U6eA==", "Basic YWxp Y2U6eA==", "Basic YWxpY2U6eA===", "Basic YWxp-Y2U6eA=="] {
        let response = gateway.get_with("/a", &[("Authorization", ambiguous)]).expect(400);
        assert_eq!(response.problem()["detail"], "the credentials in `authorization` are not Base64", "{ambiguous}");
    }
}
