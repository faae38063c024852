//! Routing, rules and the upstream read a request alike.

use crate::world::gateway::Gateway;
use crate::world::quota::items;
use crate::world::upstream::Upstream;

/// One rule `general` on everything, and another, with more tokens, on one route.
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
    let upstream = Upstream::replying(200);
    let gateway = Gateway::start(&two_routes(&upstream, "host = \"public.example\"\npath = \"/{*rest}\""));
    for (line, host, rule) in [
        ("GET http://public.example/a HTTP/1.0\r\n\r\n", "public.example", "loose"),
        ("GET http://Public.example:8080/a HTTP/1.0\r\n\r\n", "Public.example:8080", "loose"),
        ("GET http://other.example/a HTTP/1.0\r\n\r\n", "other.example", "general"),
        ("GET http://public.example/a HTTP/1.0\r\nHost: public.example\r\n\r\n", "public.example", "loose"),
    ] {
        let answer = gateway.client().send(line).answer().expect(200);
        assert_eq!(items(&answer, "ratelimit")[0].name, rule, "{line}");
        let received = upstream.received().pop().unwrap();
        assert_eq!((received.all("host"), received.all("x-forwarded-host")), (vec![host], vec![host]), "{line}");
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
        gateway.client().send(line).answer().expect(400);
    }
    assert_eq!(upstream.received().len(), before);
    // A target without an authority names no host: the upstream gets the name of its server.
    gateway.client().send("GET /a HTTP/1.0\r\n\r\n").answer().expect(200);
    assert_eq!(upstream.received().pop().unwrap().all("host"), [upstream.address.to_string()]);
}
