//! Paths, cookies and query parameters as keys: equivalent forms of a value share a counter.

use crate::support::gateway::Gateway;
use crate::support::ratelimit_parser::remaining;
use crate::support::{eventually_eq, one_rule};

fn gateway(key: &str, on_missing: &str) -> Gateway {
    Gateway::start(&one_rule(&format!(
        "key = \"{key}\"\non_missing_key = \"{on_missing}\"\nwindows = [\"100/minute\"]"
    )))
}

fn remaining_after(gateway: &Gateway, target: &str, cookies: &[&str]) -> u64 {
    let fields: Vec<(&str, &str)> = cookies.iter().map(|cookie| ("Cookie", *cookie)).collect();
    remaining(&gateway.get_with(target, &fields).expect(200), "r")
}

#[test]
fn equivalent_cookies_share_a_counter() {
    let gateway = gateway("cookie:session", "refuse");
    let forms: [&[&str]; 9] = [
        &["session=abc"],
        &["a=b; session=abc; c=d"],
        &["a=b;session=abc"],
        &["a=b", "session=abc"],
        &["session=\"abc\""],
        &["  session = abc ; x"],
        &["session=%61%62c"],
        &["Session=x; session=abc"],
        &["sessio=session=x; session=abc"],
    ];
    for (n, cookies) in forms.into_iter().enumerate() {
        assert_eq!(remaining_after(&gateway, "/a", cookies), 99 - n as u64, "{cookies:?}");
    }
    for other in ["session=ABC", "session=abcd", "session=abc=", "session=a bc"] {
        assert_eq!(remaining_after(&gateway, "/a", &[other]), 99, "{other}");
    }
}

#[test]
fn equivalent_query_parameters_share_a_counter() {
    let gateway = gateway("query:api key", "refuse");
    let forms = [
        "/a?api+key=a+b",
        "/a?api%20key=a%20b",
        "/a?api+key=%61%20%62",
        "/a?x=1&api+key=a+b&y",
        "/a?%61pi%20ke%79=a+b",
        "/a?&&api+key=a+b&",
        "/b?api+key=a+b",
        "/a?discount=50%&api+key=a+b",
    ];
    for (n, target) in forms.into_iter().enumerate() {
        assert_eq!(remaining_after(&gateway, target, &[]), 99 - n as u64, "{target}");
    }
    for other in ["/a?api+key=a%2Bb", "/a?api+key=A+b", "/a?api+key=a+b+", "/a?api+key=a%2520b", "/a?api+key=%C3%A4"] {
        assert_eq!(remaining_after(&gateway, other, &[]), 99, "{other}");
    }
}

#[test]
fn repeated_or_malformed_values_are_refused() {
    let by_cookie = gateway("cookie:session", "skip");
    for cookies in [
        &[("Cookie", "session=a; session=b")][..],
        &[("Cookie", "session=a; session=a")],
        &[("Cookie", "session=a"), ("cookie", "session=a")],
        &[("Cookie", "session; session=a")],
        &[("Cookie", "session=a; session[]=b")],
        &[("Cookie", "%73ession=a")],
    ] {
        let response = by_cookie.get_with("/a", cookies).expect(400);
        assert_eq!(
            response.problem()["detail"],
            "the request gives the cookie `session` more than once, or in a form that servers read differently"
        );
    }
    let by_query = gateway("query:token", "skip");
    for target in [
        "/a?token=a&token=b",
        "/a?token=a&token=a",
        "/a?token=a&%74oken=a",
        "/a?token&token=a",
        "/a?token=a;b",
        "/a?x=1;token=b&token=a",
        "/a?Token=a",
    ] {
        let response = by_query.get(target).expect(400);
        assert_eq!(
            response.problem()["detail"],
            "the request gives the query parameter `token` more than once, or in a form that servers read differently"
        );
    }
    for target in ["/a?token=%", "/a?token=%zz", "/a?token=a%2", "/a?%zz=b&token=a"] {
        let response = by_query.get(target).expect(400);
        assert_eq!(response.problem()["detail"], "the query contains a `%` without two hex digits");
    }
}

#[test]
fn an_absent_or_empty_value_is_a_missing_key() {
    for target in ["/a", "/a?", "/a?token", "/a?token=", "/a?a=token"] {
        let response = gateway("query:token", "refuse").get(target).expect(400);
        assert_eq!(response.problem()["detail"], "the request lacks the query parameter `token`");
        assert_eq!(gateway("query:token", "skip").get(target).expect(200).field("ratelimit"), None, "{target}");
    }
    for cookies in [&[][..], &[("Cookie", "")], &[("Cookie", "session=")], &[("Cookie", "Session=a; a=session")]] {
        let response = gateway("cookie:session", "refuse").get_with("/a", cookies).expect(400);
        assert_eq!(response.problem()["detail"], "the request lacks the cookie `session`");
        let by_address = gateway("cookie:session", "ip");
        assert_eq!(
            [remaining_after(&by_address, "/a", &[]), remaining_after(&by_address, "/a", &["session=127.0.0.1"])],
            [99, 99]
        );
        assert_eq!(remaining(&by_address.get_with("/a", cookies).expect(200), "r"), 98);
    }
}

#[test]
fn connection_cannot_remove_counted_fields() {
    let gateway = gateway("cookie:session", "refuse");
    let fields = [("Connection", "cookie, authorization"), ("Cookie", "session=a"), ("Authorization", "Basic x")];
    let echo = gateway.get_with("/a", &fields).expect(200).text();
    assert!(echo.contains("session=a") && echo.contains("Basic x"), "{echo}");
}

/// A path in a random equivalent form, with escapes, empty segments and dot segments.
fn equivalent_path(path: &str, rng: &mut fastrand::Rng) -> String {
    let mut out = String::new();
    for segment in path[1..].split('/') {
        let between = ["/", "//", "/./", "/%2e/", "/x/../", "/x/%2E%2e/", "/.//", "/x//../", "/x/..;/"];
        // Servers disagree about the last two.
        out.push_str(between[rng.usize(..between.len())]);
        for byte in segment.bytes() {
            match rng.u8(..4) {
                0 => out.push_str(&format!("%{byte:02x}")),
                1 => out.push_str(&format!("%{byte:02X}")),
                _ => out.push(char::from(byte)),
            }
        }
    }
    out
}

#[test]
fn no_equivalent_path_escapes_its_rule() {
    let route = |name: &str, path: &str| {
        format!("[[routes]]\nname = \"{name}\"\npath = \"{path}\"\nupstream = \"u\"\nrules = [\"r\"]\n")
    };
    let gateway = Gateway::start(&format!(
        "[upstreams.u]\nbuiltin = \"echo\"\n[rules.r]\nkey = [\"route\", \"path\", \"param:id\"]\non_missing_key = [\"route\", \"path\"]\n\
         windows = [\"100000/day\"]\n{}{}{}",
        route("login", "/login"),
        route("user", "/users/{id}"),
        route("rest", "/{*rest}")
    ));
    let mut rng = fastrand::Rng::with_seed(1711);
    let mut client = gateway.client();
    for (path, name) in [("/login", "login"), ("/users/me@home", "user"), ("/users/me/files", "rest")] {
        let (mut counted, mut refused) = (0, 0);
        for _ in 0..400 {
            let equivalent = equivalent_path(path, &mut rng);
            let response = client.get(&equivalent);
            if response.status == 400 {
                refused += 1;
                client = gateway.client();
                continue;
            }
            counted += 1;
            assert_eq!(remaining(&response.expect(200), "r"), 100_000 - counted, "{equivalent}");
        }
        assert!(counted > 100 && refused > 10, "{counted} {refused}");
        eventually_eq(|| gateway.metrics().sum("transom_requests_total", &[("route", name), ("code", "200")]), counted);
    }
}
