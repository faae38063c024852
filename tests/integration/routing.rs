//! Routing, rules and the upstream read a request alike: its host, the fields that choose a route, and its path.

use serde_json::json;

use crate::support::TempDir;
use crate::support::client::{Client, HOST};
use crate::support::gateway::{Gateway, with_listen};
use crate::support::process::run;
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::upstream::Upstream;

/// A rule `general` on everything, and a rule `loose` with more tokens on one route.
fn two_routes(upstream: &Upstream, route: &str) -> String {
    format!(
        "{}[rules.general]\nkey = \"ip\"\nwindows = [\"5/day\"]\n[rules.loose]\nkey = \"ip\"\nwindows = [\"1000/day\"]\n\
         [[routes]]\nname = \"general\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"general\"]\n\
         [[routes]]\nname = \"loose\"\n{route}\nupstream = \"u\"\nrules = [\"loose\"]\n",
        upstream.toml("u")
    )
}

#[test]
fn the_authority_of_an_http_1_0_target_becomes_host() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&two_routes(&upstream, "host = \"public.example\"\npath = \"/{*rest}\""));
    for (line, host, rule) in [
        ("GET http://public.example/a HTTP/1.0\r\n\r\n", "public.example", "loose"),
        ("GET http://Public.example:8080/a HTTP/1.0\r\n\r\n", "Public.example:8080", "loose"),
        ("GET http://other.example/a HTTP/1.0\r\n\r\n", "other.example", "general"),
        ("GET http://public.example/a HTTP/1.0\r\nHost: public.example\r\n\r\n", "public.example", "loose"),
    ] {
        let response = gateway.client().send(line).read_response().expect(200);
        assert_eq!(items(&response, "ratelimit")[0].name, rule, "{line}");
        let received = upstream.received().pop().unwrap();
        assert_eq!((received.values("host"), received.values("x-forwarded-host")), (vec![host], vec![host]), "{line}");
        assert_eq!(received.target, "/a");
    }
    let before = upstream.received().len();
    for line in [
        "GET http://user@public.example/a HTTP/1.0\r\n\r\n",
        "GET http://public.example:x/a HTTP/1.0\r\n\r\n",
        "GET http://public.example/a HTTP/1.0\r\nHost: other.example\r\n\r\n",
        // Only HTTP/1.0 may leave Host out (RFC 9112, section 3.2).
        "GET http://public.example/a HTTP/1.1\r\n\r\n",
    ] {
        gateway.client().send(line).read_response().expect(400);
    }
    assert_eq!(upstream.received().len(), before);
    // A target without an authority names no host: the upstream gets the name of its server.
    gateway.client().send("GET /a HTTP/1.0\r\n\r\n").read_response().expect(200);
    assert_eq!(upstream.received().pop().unwrap().values("host"), [upstream.address.to_string()]);
}

#[test]
fn connection_does_not_remove_fields_that_choose_a_route() {
    let upstream = Upstream::always(200);
    let route = "path = \"/{*rest}\"\nheaders = { x-version = \"2\", x-beta = true }";
    let gateway = Gateway::start(&two_routes(&upstream, route));
    let fields = [("X-Version", "2"), ("X-Beta", "1"), ("X-Other", "1"), ("Connection", "x-version, x-beta, x-other")];
    let response = gateway.get_with("/a", &fields).expect(200);
    assert_eq!(items(&response, "ratelimit")[0].name, "loose");
    let received = upstream.only_request();
    assert_eq!((received.values("x-version"), received.values("x-beta")), (vec!["2"], vec!["1"]));
    assert_eq!(received.field("x-other"), None);
}

/// A strict rule on `/login`, and another on everything else.
fn login_route(settings: &str, upstream: &Upstream) -> String {
    format!(
        "{settings}\n{}",
        two_routes(upstream, "path = \"/login\"").replace("\"5/day\"", "\"2000/day\"").replace("1000/day", "9/day")
    )
}

#[test]
fn equivalent_paths_match_the_same_routes_and_rules() {
    let upstream = Upstream::always(200);
    let settings = "path_parameters = \"strip\"\ntrailing_slash = \"ignore\"";
    let gateway = Gateway::start(&login_route(settings, &upstream));
    let equivalent =
        ["/login", "/login/", "/login;x", "/login;a=b;c", "/login%3Bx", "//login/;x", "/login/.", "/;x/login"];
    for (n, target) in equivalent.into_iter().enumerate() {
        assert_eq!(remaining(&gateway.get(target).expect(200), "loose"), 8 - n as u64, "{target}");
        // The original path is forwarded.
        assert_eq!(upstream.received().pop().unwrap().target, target);
    }
    assert_eq!(remaining(&gateway.get("/login/x").expect(200), "general"), 1999);
    // A catch-all also matches an empty rest.
    assert_eq!(remaining(&gateway.get("/").expect(200), "general"), 1998);

    let gateway = Gateway::start(&login_route(&format!("{settings}\nforward_path = \"normalized\""), &upstream));
    for (target, normal) in [("/login/;x?a;b/", "/login?a;b/"), ("/a;x/b/", "/a/b"), ("/;x", "/")] {
        gateway.get(target).expect(200);
        assert_eq!(upstream.received().pop().unwrap().target, normal);
    }
}

#[test]
fn path_parameters_and_trailing_slashes_are_kept_unless_configured() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&login_route("", &upstream));
    for target in ["/login/", "/login;x"] {
        assert_eq!(items(&gateway.get(target).expect(200), "ratelimit")[0].name, "general", "{target}");
    }
    let gateway = Gateway::start(&login_route("path_parameters = \"refuse\"", &upstream));
    for target in ["/login;x", "/login%3bx", "/a;/b"] {
        assert_eq!(gateway.get(target).expect(400).problem()["detail"], "the path contains a semicolon");
    }
    // A query is no path.
    assert_eq!(remaining(&gateway.get("/login?a;b").expect(200), "loose"), 8);
}

#[test]
fn check_warns_of_equivalent_paths_that_escape_their_rules() {
    let upstream = Upstream::always(200);
    let scratch = TempDir::new();
    let check = |settings: &str| {
        let file = scratch.write("gateway.toml", with_listen(&login_route(settings, &upstream)));
        let (code, out, err) = run(&["check", "--config", file.to_str().unwrap()]);
        assert_eq!((code, err.as_str()), (Some(0), ""));
        out.lines().filter(|line| line.contains("other rules")).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(
        check(""),
        [
            "  note: other rules apply to `/login/` than to `/login`: if the upstream treats both as the same path, set \
             `trailing_slash = \"ignore\"`",
            "  note: other rules apply to `/login;x` than to `/login`: if the upstream treats both as the same path, set \
             `path_parameters` to `\"strip\"` or `\"refuse\"`",
        ]
    );
    assert_eq!(check("path_parameters = \"strip\"\ntrailing_slash = \"ignore\""), [""; 0]);
}

#[test]
fn a_repeated_route_field_is_refused() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&two_routes(&upstream, "path = \"/v/{*rest}\"\nheaders = { x-version = \"2\" }"));
    for fields in [
        &[("X-Version", "2"), ("X-Version", "3")][..],
        &[("X-Version", "3"), ("X-Version", "2")],
        &[("X-Version", "2"), ("X-Version", "2")],
        &[("X-Version", "1"), ("X-Version", "3")],
    ] {
        let response = gateway.get_with("/v/a", fields).expect(400);
        assert_eq!(response.problem()["detail"], "the request gives `x-version` more than once");
        assert_eq!(response.field("connection"), Some("close"));
    }
    assert_eq!(upstream.received().len(), 0);
    // If no route compares its value, it is a field like any other.
    let response = gateway.get_with("/a", &[("X-Version", "2"), ("X-Version", "3")]).expect(200);
    assert_eq!(remaining(&response, "general"), 4);
    assert_eq!(remaining(&gateway.get_with("/v/a", &[("X-Version", "2")]).expect(200), "loose"), 999);
    assert_eq!(remaining(&gateway.get_with("/v/a", &[("X-Version", "2, 3")]).expect(200), "general"), 3);
}

/// The precedence and the values of parts of segments are tested in `router.rs` of the rules.
#[test]
fn parts_of_segments_are_parameters() {
    let upstream = Upstream::always(200);
    let gateway = Gateway::start(&format!(
        "{}[rules.by-name]\nkey = \"param:name\"\nwindows = [\"9/day\"]\n\
         [[routes]]\npath = \"/files/{{name}}.{{ext}}\"\nupstream = \"u\"\nrules = [\"by-name\"]\n\
         rewrite = \"/{{ext}}/{{name}}\"\nrequest_headers = {{ set = {{ x-file = \"{{param.name}} {{param.ext}}\" }} }}\n\
         [[routes]]\npath = \"/static/*.css\"\nupstream = \"u\"\n\
         [[routes]]\npath = \"/old-{{id}}.html\"\nredirect = {{ to = \"/new/{{param.id}}\" }}\n",
        upstream.toml("u")
    ));
    for (path, left, forwarded, field) in [
        ("/files/a.tar.gz?q=1", 8, "/gz/a.tar?q=1", "a.tar gz"),
        // An equivalent path has the same key.
        ("//files/%61.t%61r.x", 7, "/x/a.tar", "a.tar x"),
        ("/files/%20.%C3%A9", 8, "/%C3%A9/%20", "%20 %C3%A9"),
    ] {
        assert_eq!(remaining(&gateway.get(path).expect(200), "by-name"), left, "{path}");
        let received = upstream.received().pop().unwrap();
        assert_eq!((received.target.as_str(), received.field("x-file")), (forwarded, Some(field)), "{path}");
    }
    let requests = upstream.received().len();
    for path in ["/files/...x", "/files/a..."] {
        let problem = gateway.get(path).expect(400).problem();
        assert_eq!(problem["detail"], "the rewritten path contains a dot segment", "{path}");
    }
    assert_eq!(upstream.received().len(), requests);
    gateway.get("/static/a.css").expect(200);
    assert_eq!(upstream.received().pop().unwrap().target, "/static/a.css");
    gateway.get("/static/a.js").expect(404);
    assert_eq!(gateway.get("/old-7.html").expect(308).field("location"), Some("/new/7"));
}

/// With `encoded_slash = "keep"`, `%2F` is a part of its segment like any other character.
#[test]
fn a_kept_encoded_slash_is_a_part_of_its_segment() {
    let upstream = Upstream::always(200);
    let routes = "[[routes]]\npath = \"/static/*.css\"\nupstream = \"u\"\n\
                  [[routes]]\npath = \"/f/{name}.txt\"\nupstream = \"u\"\nrewrite = \"/{name}\"\n";
    let gateway = Gateway::start(&format!("encoded_slash = \"keep\"\n{}{routes}", upstream.toml("u")));
    for (path, forwarded) in
        [("/static/a%2fb.css", "/static/a%2fb.css"), ("/static/%2F.css", "/static/%2F.css"), ("/f/a%2fb.txt", "/a%2Fb")]
    {
        gateway.get(path).expect(200);
        assert_eq!(upstream.received().pop().unwrap().target, forwarded, "{path}");
    }
    for path in ["/static/a/b.css", "/static%2Fa.css", "/f%2Fa.txt"] {
        gateway.get(path).expect(404);
    }
    let strict = Gateway::start(&format!("{}{routes}", upstream.toml("u")));
    strict.get("/static/a%2Fb.css").expect(400);
}

#[test]
fn routes_match_by_query_and_network() {
    let upstream = Upstream::always(200);
    let route = |name: &str, conditions: &str| {
        format!(
            "[[routes]]\nname = \"{name}\"\npath = \"/x\"\n{conditions}\nupstream = \"u\"\n\
             response_headers = {{ set = {{ x-route = \"{{route}}\" }} }}\n"
        )
    };
    let config = [
        upstream.toml("u"),
        route("plain", ""),
        route("debug", "query = { debug = true }"),
        route("version", "query = { v = \"2 b\" }"),
        route("office", "networks = [\"198.51.100.0/24\", \"2001:db8::/32\"]"),
        route("desk", "networks = \"198.51.100.7\"\nquery = { debug = \"1\" }"),
    ]
    .concat();
    let gateway = Gateway::start(&format!(
        "listen = {{ http = \"127.0.0.1:0\", admin = \"127.0.0.1:0\", trusted_proxies = [\"127.0.0.1\"] }}\n\
         admin = {{ hosts = [\"{HOST}\"] }}\n{config}"
    ));
    for (target, client, expected) in [
        ("/x", "192.0.2.1", "plain"),
        ("/x?debug", "192.0.2.1", "debug"),
        ("//%78?a=b&debug=&debug=2", "192.0.2.1", "debug"),
        ("/x?v=2+b", "192.0.2.1", "version"),
        ("/x?%76=2%20b", "192.0.2.1", "version"),
        ("/x?v=2", "192.0.2.1", "plain"),
        ("/x", "198.51.100.9", "office"),
        ("/x?v=2+b", "2001:db8::1", "office"),
        ("/x?debug=1", "198.51.100.7", "desk"),
        ("/x?debug=2", "198.51.100.7", "office"),
    ] {
        let response = gateway.get_with(target, &[("X-Forwarded-For", client)]).expect(200);
        assert_eq!(response.field("x-route"), Some(expected), "{target} {client}");
        // `explain` finds the same route.
        let question = json!({ "method": "GET", "url": format!("http://{HOST}{target}"), "client": client });
        let explained = Client::connect(gateway.admin).post("/v1/explain", question.to_string()).expect(200).json();
        assert_eq!(explained["route"]["name"], expected, "{explained}");
    }
    let response = gateway.get_with("/x?v=2&v=2+b", &[("X-Forwarded-For", "192.0.2.1")]).expect(400);
    let detail = "the request gives the query parameter `v` more than once, or not clearly";
    assert_eq!(response.problem()["detail"], detail);
}
