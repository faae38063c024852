//! Response field changes with `on = "all"`: refusals and errors carry them too, so that browsers show them to pages of other
//! origins. The configuration is that of the guide.

use crate::support::client::HttpResponse;
use crate::support::gateway::Gateway;
use crate::support::http2_client::Http2Client;
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, eventually_eq};

pub const ORIGIN: &str = "https://app.example.com";
const PREFLIGHT: [(&str, &str); 3] =
    [("origin", ORIGIN), ("access-control-request-method", "GET"), ("access-control-request-headers", "x-api-key")];

/// The first configuration of the guide, with three requests a minute and this upstream.
pub fn guide(upstream: &str) -> String {
    let page = include_str!("../../docs/guides/cors.md");
    let block = page.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let (server, windows) = ("servers = \"http://127.0.0.1:9001\"", "[\"100/minute\"]");
    assert!(block.contains(server) && block.contains(windows));
    block.replace(server, upstream).replace(windows, "[\"3/minute\"]")
}

fn server(upstream: &Upstream) -> String {
    upstream.toml("api").lines().last().unwrap().to_owned()
}

#[track_caller]
fn assert_readable(response: &HttpResponse) {
    assert_eq!(response.values("access-control-allow-origin"), [ORIGIN], "{response:?}");
    let exposed = response.values("access-control-expose-headers");
    assert_eq!(exposed, ["RateLimit, RateLimit-Policy, Retry-After"]);
}

fn use_as_a_browser(gateway: &Gateway, mut send: impl FnMut(&str, &[(&str, &str)]) -> HttpResponse) {
    for _ in 0..5 {
        let preflight = send("OPTIONS", &PREFLIGHT).expect(204);
        assert_eq!(preflight.values("access-control-allow-origin"), [ORIGIN]);
        assert_eq!(preflight.field("access-control-allow-headers"), Some("content-type, x-api-key"));
        assert_eq!(preflight.field("ratelimit"), None);
    }
    let no_key = send("GET", &[("origin", ORIGIN)]).expect(400);
    assert_readable(&no_key);
    assert_eq!((no_key.problem()["status"].as_u64(), remaining(&no_key, "per-address") < 600), (Some(400), true));
    let key = [("origin", ORIGIN), ("x-api-key", "k")];
    for left in [2, 1, 0] {
        let response = send("GET", &key).expect(200);
        assert_readable(&response);
        assert_eq!(remaining(&response, "per-key"), left);
    }
    // All in the same millisecond: the later ones are repeated.
    let refused = send("GET", &key).expect(429);
    let mut repeated = refused.fields.clone();
    for _ in 0..3 {
        let mut fields = send("GET", &key).fields;
        let place = |fields: &[(String, String)]| fields.iter().position(|(name, _)| name == "x-request-id").unwrap();
        assert_ne!(fields.swap_remove(place(&fields)), repeated.swap_remove(place(&repeated)), "the request id");
        assert_eq!(fields, repeated);
        repeated.clone_from(&refused.fields);
    }
    assert_readable(&refused);
    assert_eq!(refused.problem()["violated-policies"][0], "per-key");
    assert!(refused.field("retry-after").is_some() && items(&refused, "ratelimit-policy").len() == 2);
    gateway.advance_s(60);
}

#[test]
fn a_page_of_another_origin_can_read_refusals() {
    let upstream = Upstream::responding(|_| reply(200, &[("Access-Control-Allow-Origin", "*")], b"fine"));
    let gateway = Gateway::start(&guide(&server(&upstream)));
    let mut client = gateway.client();
    use_as_a_browser(&gateway, |method, fields| client.request(method, "/api/x", fields, b""));
    let mut client = Http2Client::connect(gateway.http);
    use_as_a_browser(&gateway, |method, fields| client.request_path(method, "/api/x", fields, b""));
    let received = upstream.received();
    assert!(received.len() == 6 && received.iter().all(|received| received.method == "GET"));
    eventually_eq(|| gateway.metrics().sum("transom_requests_total", &[("code", "204")]), 10);
    // Without the field of a preflight request, OPTIONS is an ordinary method.
    let options = gateway.client().request("OPTIONS", "/api/x", &[("x-api-key", "other")], b"").expect(200);
    assert_eq!(remaining(&options, "per-key"), 2);
}

#[test]
fn refusals_and_errors_are_unchanged_by_default() {
    let upstream = Upstream::always(200);
    for on in ["", "on = \"upstream\" #"] {
        let gateway = Gateway::start(&guide(&server(&upstream)).replace("on = \"all\" ", on));
        let key = [("origin", ORIGIN), ("x-api-key", "k")];
        for _ in 0..3 {
            assert_readable(&gateway.get_with("/api/x", &key).expect(200));
        }
        for (fields, status) in [(&key[..], 429), (&key[..1], 400)] {
            let response = gateway.get_with("/api/x", fields).expect(status);
            assert_eq!(response.field("access-control-allow-origin"), None);
        }
    }
}

#[test]
fn errors_of_the_gateway_are_changed() {
    let (upstream, silent) = (
        Upstream::always(200),
        Upstream::with_script(|connection| {
            while connection.read_request().is_some() {}
            connection.wait_for_close();
        }),
    );
    let scratch = TempDir::new();
    let clients = scratch.write("clients.toml", "");
    let route = |path: &str, settings: &str| {
        format!(
            "[[routes]]\npath = \"{path}\"\n{settings}\nresponse_headers = {{ on = \"all\", set = {{ x-path = \"{{path}}\" }} }}\n"
        )
    };
    let gateway = Gateway::start(
        &[
            upstream.toml("good"),
            silent.toml("silent"),
            Upstream::refusing_connections().toml("closed"),
            format!("[clients]\nfile = {clients:?}\napi_key = \"header:x-api-key\"\n"),
            "[rules.known]\nkey = \"header:x-api-key\"\non_missing_key = \"skip\"\non_unknown_key = \"refuse\"\n\
         windows = [\"9/minute\"]\n"
                .to_owned(),
            "[rules.one]\nkey = \"path\"\nwindows = [\"1/minute\"]\n".to_owned(),
            "[rules.slow]\nkey = \"global\"\nwindows = [\"1/hour\"]\non_limit = \"delay\"\nmax_delay = \"1s\"\n"
                .to_owned(),
            route("/known", "upstream = \"good\"\nrules = [\"known\"]"),
            route("/large", "upstream = \"good\"\nmax_body = 3"),
            route("/closed", "upstream = \"closed\"\nrules = [\"one\"]"),
            route("/silent", "upstream = \"silent\"\ntimeouts = { response_head = \"50ms\" }"),
            route("/no-tunnel", "upstream = \"good\"\nwebsocket = false"),
            route("/tunnel", "upstream = \"good\""),
            route("/delayed", "upstream = \"good\"\nrules = [\"slow\"]"),
            route("/moved", "redirect = { to = \"https://{host}/\" }"),
        ]
        .concat(),
    );
    let large = ["a"; 4].concat();
    let send = |path: &str, fields: &[(&str, &str)], body: &str| {
        let mut http2 = Http2Client::connect(gateway.http);
        let method = if body.is_empty() { "GET" } else { "POST" };
        [
            gateway.client().request(method, path, fields, body.as_bytes()),
            http2.request_path(method, path, fields, body.as_bytes()),
        ]
    };
    gateway.get("/delayed").expect(200);
    for (path, fields, body, statuses) in [
        ("/known", &[("x-api-key", "invented")][..], "", [401, 401]),
        ("/large", &[], large.as_str(), [413, 413]),
        // The second request is refused: the first has used the only token.
        ("/closed", &[], "", [502, 429]),
        ("/silent", &[], "", [504, 504]),
        ("/delayed", &[], "", [429, 429]),
        ("/moved", &[], "", [308, 308]),
    ] {
        let responses = send(path, fields, body);
        assert_eq!([0, 1].map(|i| responses[i].status), statuses, "{path}");
        for response in responses {
            assert_eq!(response.values("x-path"), [path], "{response:?}");
        }
    }
    let mut http2 = Http2Client::connect(gateway.http);
    for (path, status) in [("/no-tunnel", 501), ("/tunnel", 502)] {
        let response = http2.connect_to("websocket", path, &[("sec-websocket-version", "13")]).expect(status);
        assert_eq!(response.values("x-path"), [path]);
    }
    // gRPC clients get the same changes.
    let grpc = http2.request_path("POST", "/closed", &[("content-type", "application/grpc")], b"").expect(200);
    assert_eq!((grpc.field("grpc-status"), grpc.values("x-path")), (Some("8"), vec!["/closed"]));
    // No route matches.
    assert_eq!(gateway.get("/elsewhere").expect(404).field("x-path"), None);
}

#[test]
fn a_repeated_refusal_has_the_changes_of_its_own_route() {
    let upstream = Upstream::always(200);
    let changes = "response_headers = { on = \"all\", set = { x-path = \"{path}\" }, remove = [\"ratelimit\"] }";
    let gateway = Gateway::start(&format!(
        "{}\n[rules.r]\nkey = \"ip\"\nwindows = [\"1/minute\"]\n\
         [[routes]]\npath = \"/all/{{x}}\"\nupstream = \"u\"\nrules = [\"r\"]\n{changes}\n\
         [[routes]]\npath = \"/upstream/{{x}}\"\nupstream = \"u\"\nrules = [\"r\"]\n{}\n\
         [[routes]]\npath = \"/none/{{x}}\"\nupstream = \"u\"\nrules = [\"r\"]\n",
        upstream.toml("u"),
        changes.replace("on = \"all\", ", "")
    ));
    let mut client = gateway.client();
    client.get("/none/a").expect(200);
    for path in ["/all/a", "/upstream/a", "/none/a", "/all/b", "/all/a", "/none/a", "/upstream/b"] {
        let refused = client.get(path).expect(429);
        let expected: &[&str] = if path.starts_with("/all") { &[path] } else { &[] };
        assert_eq!(refused.values("x-path"), expected);
        // The gateway's own fields are not removed.
        assert_eq!(remaining(&refused, "r"), 0);
    }
}
