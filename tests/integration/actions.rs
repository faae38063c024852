//! Route actions: changes to requests and responses, redirects and fixed responses.

use std::time::Duration;

use crate::support::client::HOST;
use crate::support::gateway::Gateway;
use crate::support::http2_client::{RST_STREAM, RawHttp2};
use crate::support::ratelimit_parser::remaining;
use crate::support::upstream::{Connection, Upstream, reply};
use crate::support::{eventually_eq, within};

fn route(upstream: &Upstream, settings: &str) -> String {
    format!("{}\n[[routes]]\nupstream = \"u\"\n{settings}", upstream.toml("u"))
}

/// The target that the upstream receives.
fn forwarded_target(settings: &str, requested: &str) -> String {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&route(&upstream, settings));
    gateway.get(requested).expect(200);
    upstream.only_request().target
}

#[test]
fn path_prefixes_are_stripped_and_replaced() {
    for (settings, requested, forwarded) in [
        ("path = \"/api/{*rest}\"\nstrip_prefix = \"/api\"", "/api/a/b?c=d", "/a/b?c=d"),
        ("path = \"/api/{*rest}\"\nstrip_prefix = \"/api/\"", "/api/", "/"),
        ("path = \"/api\"\nstrip_prefix = \"/api\"", "/api?x", "/?x"),
        ("path = \"/api/v1/{id}\"\nstrip_prefix = \"/api\"", "/api/v1/7", "/v1/7"),
        // An equivalent path is stripped as well.
        ("path = \"/api/{*rest}\"\nstrip_prefix = \"/api\"", "//x/../%61pi/./a%2Db", "/a-b"),
        ("path = \"/api/{*rest}\"\nstrip_prefix = \"/api\"", "/api/%3Fa%20b%C3%A9", "/%3Fa%20b%C3%A9"),
        ("path = \"/a/{*r}\"\nreplace_prefix = { from = \"/a\", to = \"/v2/b\" }", "/a/x?y", "/v2/b/x?y"),
        ("path = \"/a/{*r}\"\nreplace_prefix = { from = \"/a\", to = \"/\" }", "/a/x", "/x"),
        ("path = \"/{*r}\"\nreplace_prefix = { from = \"/\", to = \"/all\" }", "/x/y", "/all/x/y"),
        ("path = \"/u/{id}/{*r}\"\nrewrite = \"/v2/{id}/of/{*r}\"", "/u/7/a/b?c", "/v2/7/of/a/b?c"),
        ("path = \"/u/{id}/{*r}\"\nrewrite = \"/v2/{id}/of/{*r}\"", "/u/%37%20/", "/v2/7%20/of/"),
        ("path = \"/old/{*r}\"\nrewrite = \"/new\"", "/old/a", "/new"),
        ("path = \"/{a}/{b}\"\nrewrite = \"/{b}/{a}\"", "/1/2", "/2/1"),
    ] {
        assert_eq!(forwarded_target(settings, requested), forwarded, "{settings} {requested}");
    }
}

#[test]
fn rules_see_the_request_before_route_actions() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&format!(
        "[rules.r]\nkey = [\"path\", \"header:x-user\"]\non_missing_key = \"refuse\"\nwindows = [\"10/day\"]\n{}",
        route(
            &upstream,
            "path = \"/{id}\"\nrewrite = \"/same\"\nrules = [\"r\"]\n\
             request_headers = { remove = [\"x-user\"], set = { x-id = \"{param.id}\" } }"
        )
    ));
    let left = |path: &str, user: &str| remaining(&gateway.get_with(path, &[("X-User", user)]).expect(200), "r");
    assert_eq!([left("/1", "a"), left("/%31", "a"), left("/2", "a"), left("/1", "b")], [9, 8, 9, 9]);
    let received = upstream.received();
    assert!(received.iter().all(|received| received.target == "/same" && received.field("x-user").is_none()));
    assert_eq!(received[2].values("x-id"), ["2"]);
}

#[test]
fn header_fields_are_set_added_and_removed() {
    let upstream = Upstream::responding(|_| {
        reply(200, &[("Server", "secret/1"), ("X-Powered-By", "x"), ("Vary", "Accept"), ("X-Old", "1")], b"fine")
    });
    let settings = "name = \"the api\"
path = \"/api/{id}/{*rest}\"
[routes.request_headers]
set = { x-client = \"{client_ip}\", X-Where = \"{scheme}://{host}{uri}\", x-route = \"{route}\", x-braces = \"{{id}}\" }
add = { x-tag = \"{method} {path} {query} {param.id} {param.rest}\" }
remove = [\"cookie\", \"X-Forwarded-Host\"]
[routes.response_headers]
set = { x-old = \"2\", strict-transport-security = \"max-age=63072000\", x-requested = \"{param.id}\" }
add = { vary = \"Origin\" }
remove = [\"server\", \"x-powered-by\"]
";
    let gateway = Gateway::start(&route(&upstream, settings));
    let fields = [("Cookie", "a=b"), ("X-Tag", "own"), ("X-Client", "6.6.6.6"), ("X-Client", "7.7.7.7")];
    let response = gateway.get_with("/api//7/a%20b?c=d&e", &fields).expect(200);
    let received = upstream.only_request();
    assert_eq!(received.values("x-client"), ["127.0.0.1"]);
    assert_eq!(received.values("x-where"), [format!("http://{HOST}/api/7/a%20b?c=d&e")]);
    assert_eq!((received.values("x-route"), received.values("x-braces")), (vec!["the api"], vec!["{id}"]));
    assert_eq!(received.values("x-tag"), ["own", "GET /api/7/a%20b c=d&e 7 a%20b"]);
    assert!(received.field("cookie").is_none() && received.field("x-forwarded-host").is_none());
    // Without a path action, the original path is forwarded.
    assert_eq!(received.target, "/api//7/a%20b?c=d&e");
    assert_eq!((response.values("x-old"), response.values("x-requested")), (vec!["2"], vec!["7"]));
    assert_eq!(response.values("vary"), ["Accept", "Origin"]);
    assert_eq!(response.field("strict-transport-security"), Some("max-age=63072000"));
    assert!(response.field("server").is_none() && response.field("x-powered-by").is_none());
}

#[test]
fn redirects_are_answered_and_counted() {
    let gateway = Gateway::start(
        "[rules.r]\nkey = \"ip\"\nwindows = [\"4/day\"]
[[routes]]
path = \"/old/{id}/{*rest}\"
rules = [\"r\"]
redirect = { to = \"https://{host}/new/{param.id}?from={path}\" }
response_headers = { set = { x-why = \"moved\" } }
[[routes]]
path = \"/{*rest}\"
rules = [\"r\"]
redirect = { to = \"https://www.example.com{uri}\", status = 301 }
",
    );
    let mut client = gateway.client();
    let response = client.get("//old/7/x").expect(308);
    assert_eq!(response.field("location"), Some(format!("https://{HOST}/new/7?from=/old/7/x").as_str()));
    assert_eq!((response.field("x-why"), response.field("content-length")), (Some("moved"), Some("0")));
    assert_eq!(remaining(&response, "r"), 3);
    let response = client.get("//evil.example/%2e./a?b=c").expect(301);
    assert_eq!(response.field("location"), Some("https://www.example.com/a?b=c"));
    client.request("POST", "/x", &[], b"body").expect(301);
    // Without Host, there is no host for the redirect.
    let mut old = gateway.client();
    old.send("GET /old/7/ HTTP/1.0\r\n\r\n").read_response().expect(400).problem();
    client.get("/x").expect(301);
    client.get("/x").expect(429);
}

/// A redirect within a site that does not use the default port.
#[test]
fn the_authority_of_a_redirect_has_the_port_of_the_request() {
    let gateway = Gateway::start(
        "[[routes]]\npath = \"/old/{*rest}\"\nredirect = { to = \"{scheme}://{authority}/new/{param.rest}\" }\n",
    );
    for (host, authority) in [
        ("Shop.test.:8080", "shop.test:8080"),
        ("shop.test", "shop.test"),
        ("shop.test:", "shop.test"),
        ("[::1]:81", "[::1]:81"),
    ] {
        let mut client = gateway.client();
        client.send(format!("GET /old/a HTTP/1.1\r\nHost: {host}\r\n\r\n"));
        let response = client.read_response().expect(308);
        assert_eq!(response.field("location"), Some(format!("http://{authority}/new/a").as_str()));
    }
}

/// The query of the request stays, and there is no `?` without one.
#[test]
fn the_query_of_a_redirect_may_be_missing() {
    let gateway = Gateway::start(
        "[[routes]]\npath = \"/old/{*rest}\"\nredirect = { to = \"{scheme}://{authority}/new/{param.rest}?{query}\" }\n",
    );
    for (target, location) in [("/old/a?b=c", "/new/a?b=c"), ("/old/a", "/new/a"), ("/old/a?", "/new/a")] {
        let response = gateway.client().get(target).expect(308);
        assert_eq!(response.field("location"), Some(format!("http://{HOST}{location}").as_str()));
    }
}

#[test]
fn fixed_responses_need_no_upstream() {
    let gateway = Gateway::start(
        "[[routes]]\npath = \"/robots.txt\"\nrespond = { body = \"User-agent: *\\nDisallow: /\\n\" }
[[routes]]\npath = \"/none\"\nrespond = { status = 204 }
[[routes]]\npath = \"/gone\"\nrespond = { status = 410, body = \"{}\", content_type = \"application/json\" }
",
    );
    let mut client = gateway.client();
    let response = client.get("/robots.txt").expect(200);
    assert_eq!(response.text(), "User-agent: *\nDisallow: /\n");
    assert_eq!(response.field("content-type"), Some("text/plain; charset=utf-8"));
    let head = client.request("HEAD", "/robots.txt", &[], b"").expect(200);
    assert_eq!(head.field("content-length"), Some("26"));
    let none = client.get("/none").expect(204);
    assert_eq!((none.field("content-length"), none.field("content-type")), (None, None));
    let gone = client.get("/gone").expect(410);
    assert_eq!((gone.text().as_str(), gone.field("content-type")), ("{}", Some("application/json")));
    client.get("/other").expect(404);
    eventually_eq(|| gateway.metrics().sum("transom_requests_total", &[("route", "/gone"), ("code", "410")]), 1);
}

#[test]
fn plain_http_requests_are_redirected_to_https() {
    let upstream = Upstream::always(200);
    let toml = format!(
        "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\ntrusted_proxies = \"127.0.0.1\"\n{}
[[routes]]
scheme = \"http\"
path = \"/{{*rest}}\"
redirect = {{ to = \"https://{{host}}{{uri}}\" }}
[[routes]]
scheme = \"http\"
path = \"/.well-known/acme-challenge/{{token}}\"
upstream = \"u\"
[[routes]]
host = \"{HOST}\"
path = \"/api/{{id}}\"
upstream = \"u\"
",
        upstream.toml("u")
    );
    let gateway = Gateway::start(&toml);
    let location = gateway.get("/api/7?x=y").expect(308);
    assert_eq!(location.field("location"), Some(format!("https://{HOST}/api/7?x=y").as_str()));
    gateway.get("/.well-known/acme-challenge/t").expect(200);
    // A trusted proxy received the request over https.
    gateway.get_with("/api/7", &[("X-Forwarded-Proto", "https")]).expect(200);
    gateway.get_with("/other", &[("X-Forwarded-Proto", "https")]).expect(404);
    // An untrusted client cannot set the field.
    let untrusted = Gateway::start(&toml.replace("trusted_proxies = \"127.0.0.1\"", ""));
    untrusted.get_with("/api/7", &[("X-Forwarded-Proto", "https")]).expect(308);
}

#[test]
fn a_route_has_its_own_response_timeout() {
    const WAIT: Duration = Duration::from_millis(200);
    let silent = Upstream::with_script(|connection: &mut Connection| {
        connection.read_head();
        connection.wait_for_close();
    });
    let gateway = Gateway::start(&route(&silent, "path = \"/a\"\ntimeouts = { response_head = \"200ms\" }"));
    within(WAIT, || gateway.get("/a").expect(504).problem());

    let stalling = Upstream::with_script(|connection: &mut Connection| {
        connection.read_head();
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc");
        connection.wait_for_close();
    });
    let gateway = Gateway::start(&route(&stalling, "path = \"/a\"\ntimeouts = { body = \"200ms\" }"));
    let mut client = gateway.client();
    client.send("GET /a HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(client.read_head().unwrap().status, 200);
    assert_eq!(within(WAIT, || client.read_to_end()), b"abc");
    // An HTTP/2 stream is reset.
    let mut raw = RawHttp2::connect(gateway.http);
    raw.get(1, "/a");
    within(WAIT, || raw.read_until(RST_STREAM));
}

/// Each row of the table in the documentation.
#[test]
fn locations_are_rewritten_as_documented() {
    let upstream = Upstream::responding(|received| {
        let (name, value) = received.field("x-reply").and_then(|field| field.split_once(": ")).unwrap();
        reply(302, &[(name, value)], b"")
    });
    let document = include_str!("../../docs/reference/configuration.md");
    let section = document.split("### Locations").nth(1).unwrap().split("\n### ").next().unwrap();
    let local = |text: &str| {
        text.replace("app.internal:8080", &upstream.address.to_string())
            .replace("app.internal", &upstream.address.ip().to_string())
    };
    let config = section.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let gateway = Gateway::start(&format!(
        "listen = {{ http = \"127.0.0.1:0\", admin = \"127.0.0.1:0\", trusted_proxies = [\"127.0.0.1\"] }}\n{}",
        local(config)
    ));
    let rows: Vec<Vec<&str>> =
        section.lines().filter(|line| line.starts_with("| `")).map(|line| line.split('`').collect()).collect();
    assert!(rows.len() >= 10);
    for row in rows {
        let (sent, (name, expected)) = (local(row[1]), row[3].split_once(": ").unwrap());
        let head = format!(
            "GET /shop/cart HTTP/1.1\r\nHost: public.example\r\nX-Forwarded-Proto: https\r\nX-Reply: {sent}\r\n\r\n"
        );
        let response = gateway.client().send(&head).read_response().expect(302);
        assert_eq!(response.field(&name.to_ascii_lowercase()), Some(expected), "{sent}");
    }
}
