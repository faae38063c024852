//! `count_when`: requests that stay charged because of their response; and `penalty`. A login server counts failed logins only.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use http::{HeaderMap, HeaderValue, Response};

use crate::support::client::{Client, HttpResponse, request};
use crate::support::external_scripts::ScriptServer;
use crate::support::external_servers::program;
use crate::support::gateway::Gateway;
use crate::support::gateway_group::{GatewayGroup, LONG_TIMEOUT, query_decision, rule_by_key, shared_config};
use crate::support::http2_client::Http2Client;
use crate::support::http2_upstream::{Http2Upstream, Options};
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::redis::RedisServer;
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, eventually, eventually_eq, one_rule};

const FAILED_LOGINS: &str =
    "key = \"header:x-user\"\non_missing_key = \"refuse\"\nwindows = [\"5/15m\"]\ncount_when = { status = [401] }";

/// Holds the responses of a server while it is closed.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn set_closed(&self, is_closed: bool) {
        *self.0.0.lock().unwrap() = is_closed;
        self.0.1.notify_all();
    }

    fn wait_until_open(&self) {
        drop(self.0.1.wait_while(self.0.0.lock().unwrap(), |is_closed| *is_closed).unwrap());
    }
}

/// A login server: the target is the status of its response.
fn login_server(gate: &Gate) -> Upstream {
    let gate = gate.clone();
    Upstream::responding(move |received| {
        gate.wait_until_open();
        reply(received.target.trim_start_matches('/').parse().unwrap(), &[], b"")
    })
}

fn config(upstream: &str, rule: &str) -> String {
    format!(
        "{upstream}[rules.logins]\n{rule}\n[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"logins\"]\n"
    )
}

fn log_in(gateway: &Gateway, user: &str, status: u16) -> HttpResponse {
    gateway.get_with(&format!("/{status}"), &[("X-User", user)])
}

/// Many concurrent requests, of which `passing` reach the server before any is answered. Returns how many got `status`.
fn at_once(gateway: &Gateway, upstream: &Upstream, gate: &Gate, user: &str, status: u16, passing: usize) -> usize {
    let refused = || gateway.metrics().sum("transom_decisions_total", &[("outcome", "refused")]);
    let (before, received) = (refused(), upstream.received().len());
    gate.set_closed(true);
    thread::scope(|scope| {
        let clients: Vec<_> = (0..30).map(|_| scope.spawn(|| log_in(gateway, user, status).status)).collect();
        eventually_eq(refused, before + 30 - passing as u64);
        eventually_eq(|| upstream.received().len(), received + passing);
        gate.set_closed(false);
        clients.into_iter().map(|client| client.join().unwrap()).filter(|got| *got == status).count()
    })
}

#[test]
fn only_failed_logins_count() {
    let gate = Gate::default();
    let upstream = login_server(&gate);
    let gateway = Gateway::start(&config(&upstream.toml("u"), FAILED_LOGINS));
    for _ in 0..20 {
        assert_eq!(remaining(&log_in(&gateway, "alice", 200).expect(200), "logins"), 5);
    }
    for left in (1..5).rev() {
        assert_eq!(remaining(&log_in(&gateway, "alice", 401).expect(401), "logins"), left);
    }
    // While the one attempt that is left is under way, no other passes. A success refunds it.
    assert_eq!(at_once(&gateway, &upstream, &gate, "alice", 200, 1), 1);
    assert_eq!(remaining(&log_in(&gateway, "alice", 200).expect(200), "logins"), 1);
    assert_eq!(at_once(&gateway, &upstream, &gate, "alice", 401, 1), 1);
    for status in [200, 401] {
        assert_eq!(remaining(&log_in(&gateway, "alice", status).expect(429), "logins"), 0);
    }
    assert_eq!(remaining(&log_in(&gateway, "bob", 200).expect(200), "logins"), 5);
    assert_eq!(gateway.metrics().sum("transom_refunded_total", &[("rule", "logins")]), 23);
    gateway.advance_s(15 * 60);
    assert_eq!(remaining(&log_in(&gateway, "alice", 401).expect(401), "logins"), 4);
}

#[test]
fn parallel_attempts_do_not_slip_through() {
    let gate = Gate::default();
    let upstream = login_server(&gate);
    let toml = config(&upstream.toml("u"), "key = \"ip\"\nwindows = [\"5/15m\"]\ncount_when = { status = [401] }");
    for is_http2 in [false, true] {
        let gateway = Gateway::start(&format!("workers = 2\n{toml}"));
        let before = upstream.received().len();
        gate.set_closed(true);
        let statuses: Vec<u16> = thread::scope(|scope| {
            let clients: Vec<_> = match is_http2 {
                true => {
                    (0..4).map(|_| scope.spawn(|| Http2Client::connect(gateway.http).get_many("/401", 50))).collect()
                }
                false => (0..200).map(|_| scope.spawn(|| vec![gateway.get("/401")])).collect(),
            };
            let refused = || gateway.metrics().sum("transom_refused_total", &[("rule", "logins")]);
            eventually_eq(refused, 195);
            eventually_eq(|| upstream.received().len(), before + 5);
            gate.set_closed(false);
            clients.into_iter().flat_map(|client| client.join().unwrap()).map(|response| response.status).collect()
        });
        assert_eq!(statuses.len(), 200);
        assert_eq!(statuses.iter().filter(|status| **status == 401).count(), 5);
        assert_eq!(upstream.received().len(), before + 5);
    }
}

#[test]
fn errors_of_the_gateway_are_compared_too() {
    let upstream = Upstream::refusing_connections();
    for (count_when, left) in [("[401]", [5, 5]), ("[401, \"5xx\"]", [4, 3]), ("[503]", [5, 5]), ("[502]", [4, 3])] {
        let rule = FAILED_LOGINS.replace("[401]", count_when);
        let gateway = Gateway::start(&config(&upstream.toml("u"), &rule));
        for left in left {
            assert_eq!(remaining(&log_in(&gateway, "a", 200).expect(502), "logins"), left, "{count_when}");
        }
    }
}

#[test]
fn an_attempt_without_a_response_stays_charged() {
    let (upstream, reported) = crate::cancellation::silent_upstream();
    let gateway = Gateway::start(&config(&upstream.toml("u"), FAILED_LOGINS));
    for _ in 0..5 {
        let mut client = gateway.client();
        client.send(request("GET", "/200", &[("X-User", "a")], b""));
        assert_eq!(reported.recv(), Ok("requested"));
        drop(client);
        assert_eq!(reported.recv(), Ok("closed"));
    }
    log_in(&gateway, "a", 200).expect(429);
}

/// A client could have the server act on the first part of a body, and then break it off to get its tokens back.
#[test]
fn a_broken_off_body_stays_charged() {
    let upstream = Upstream::with_script(|connection| {
        if connection.read_head().is_some() {
            connection.wait_for_close();
        }
    });
    let gateway = Gateway::start(&config(&upstream.toml("u"), FAILED_LOGINS));
    let head = "POST /200 HTTP/1.1\r\nHost: a\r\nX-User: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n";
    for n in 1..=5 {
        let mut client = gateway.client();
        client.send(head);
        eventually_eq(|| upstream.received().len(), n);
        client.send("no size\r\n");
        assert_eq!(states(&client.read_response().expect(400))[0].0, 5 - n as u64);
    }
    log_in(&gateway, "a", 200).expect(429);
}

#[test]
fn an_ended_window_gets_nothing_back() {
    let gate = Gate::default();
    let upstream = login_server(&gate);
    let mut gateway = Gateway::start(&config(&upstream.toml("u"), FAILED_LOGINS));
    gate.set_closed(true);
    let mut slow = gateway.client();
    slow.send(request("GET", "/200", &[("X-User", "a")], b""));
    eventually("the request is under way", || upstream.received().len() == 1);
    gateway.advance_s(15 * 60);
    // Requests keep the configuration with which they were charged.
    gateway.reload_and_wait(&config(&upstream.toml("u"), &FAILED_LOGINS.replace("[401]", "[200]")));
    gate.set_closed(false);
    assert_eq!(remaining(&slow.read_response().expect(200), "logins"), 5);
    assert_eq!(remaining(&log_in(&gateway, "a", 200).expect(200), "logins"), 4);
    assert_eq!(remaining(&log_in(&gateway, "a", 401).expect(401), "logins"), 4);
}

#[test]
fn every_kind_of_window_takes_tokens_back() {
    let gate = Gate::default();
    let upstream = login_server(&gate);
    for windows in [
        "[\"5/15m\", \"20/day\"]",
        "[{ limit = 5, period = \"15m\", start = \"first-request\" }]",
        "[{ limit = 4, period = \"15m\", capacity = 5 }]",
        "[{ limit = 5, period = \"15m\", sliding = true }]",
        "[{ limit = 5, period = \"15m\", shards = 3 }]",
        "[{ limit = 5, period = \"15m\", reserve = 5 }]",
        "[\"5/15m\"]\non_limit = \"delay\"\nmax_delay = \"1s\"",
        "[\"10/15m\"]\ncost = 2",
        "[\"5/15m\"]\ncount_refused = true",
    ] {
        let rule = FAILED_LOGINS.replace("[\"5/15m\"]", windows);
        let gateway = Gateway::start(&config(&upstream.toml("u"), &rule));
        (0..12).for_each(|_| drop(log_in(&gateway, "a", 200).expect(200)));
        // Concurrent ones are refunded in any order.
        assert_eq!(at_once(&gateway, &upstream, &gate, "b", 200, 5), 5, "{windows}");
        for user in ["a", "b"] {
            let passed = (0..8).filter(|_| log_in(&gateway, user, 401).status == 401).count();
            assert_eq!(passed, 5, "{windows}");
        }
    }
}

#[test]
fn a_shadow_rule_reports_failed_logins_only() {
    let gate = Gate::default();
    let upstream = login_server(&gate);
    let gateway = Gateway::start(&config(&upstream.toml("u"), &format!("{FAILED_LOGINS}\non_limit = \"shadow\"")));
    let shadowed = || gateway.metrics().sum("transom_decisions_total", &[("outcome", "shadowed")]);
    (0..20).for_each(|_| drop(log_in(&gateway, "a", 200).expect(200)));
    (0..5).for_each(|_| drop(log_in(&gateway, "a", 401).expect(401)));
    assert_eq!(shadowed(), 0);
    (0..3).for_each(|_| drop(log_in(&gateway, "a", 200).expect(200)));
    assert_eq!(shadowed(), 3);
}

#[test]
fn a_stated_cost_is_charged_if_the_request_counts() {
    let upstream = Upstream::responding(|received| {
        reply(received.target.trim_start_matches('/').parse().unwrap(), &[("X-Cost", "4")], b"")
    });
    let rule =
        FAILED_LOGINS.replace("[\"5/15m\"]", "[\"20/15m\"]\ncost = { response-header = \"x-cost\", reserve = 2 }");
    let gateway = Gateway::start(&config(&upstream.toml("u"), &rule));
    for (status, left) in [(200, 20), (401, 16), (200, 16), (401, 12)] {
        assert_eq!(remaining(&log_in(&gateway, "a", status).expect(status), "logins"), left);
    }
}

#[test]
fn the_status_of_a_grpc_response_decides() {
    // The path names the code, and where it is stated.
    let upstream = Http2Upstream::with_script(Options::default(), |mut stream| async move {
        let uri = stream.head.uri.clone();
        let (place, code) = uri.rsplit_once('/').unwrap();
        let code = HeaderValue::from_str(code).unwrap();
        let mut head = Response::new(());
        head.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
        if place.ends_with("head") {
            head.headers_mut().insert("grpc-status", code.clone());
        }
        let mut body = stream.send_head(head);
        if place.ends_with("trailers") {
            let _ = body.send_data("answer".into(), false);
            let _ = body.send_trailers(HeaderMap::from_iter([(http::HeaderName::from_static("grpc-status"), code)]));
        } else {
            let _ = body.send_data("".into(), true);
        }
    });
    let rule = "key = \"ip\"\nwindows = [\"100/15m\"]\ncount_when = { grpc_status = [\"UNAUTHENTICATED\", 2] }";
    let gateway = Gateway::start(&config(&upstream.toml("u"), rule));
    let mut client = Http2Client::connect(gateway.http);
    let grpc = [("content-type", "application/grpc"), ("te", "trailers")];
    let mut call = |path: &str| client.request_path("POST", path, &grpc, b"x").expect(200);
    let mut left = 100;
    for (path, counts) in [
        ("/head/0", false),
        ("/trailers/0", false),
        ("/head/16", true),
        ("/trailers/16", true),
        ("/trailers/7", false),
        ("/nowhere/0", true),
        ("/trailers/x", true),
    ] {
        call(path);
        left -= u64::from(counts);
        // The next response states what is left; its own token comes back.
        assert_eq!(remaining(&call("/head/0"), "logins"), left, "{path}");
    }
}

#[test]
fn gateways_share_failed_logins() {
    let redis = RedisServer::start();
    let gate = Gate::default();
    let upstream = login_server(&gate);
    let rule = FAILED_LOGINS.replace("15m", "30d");
    let sliding = rule.replace("\"5/30d\"", "{ limit = 5, period = \"30d\", sliding = true }");
    for (mode, rule) in [("exact", &rule), ("lease", &rule), ("exact", &sliding), ("lease", &sliding)] {
        redis.cli(&["FLUSHALL"]);
        let shared = format!("redis = \"{}\"\nmode = \"{mode}\"\n{LONG_TIMEOUT}", redis.url());
        let toml = format!("[counters.shared]\n{shared}\n{}", config(&upstream.toml("u"), rule));
        let group = GatewayGroup::start(2, &toml);
        let mut clients: Vec<_> = group.0.iter().map(|process| process.client()).collect();
        let mut send = |nth: usize, user: &str, status: u16| {
            clients[nth].get_with(&format!("/{status}"), &[("X-User", user)]).status
        };
        // A refund reaches the store shortly after the response. Refused attempts cost nothing.
        let mut send_until_answered = |nth: usize, user: &str, status: u16| {
            eventually("the tokens of logins that succeeded come back", || send(nth, user, status) == status);
        };
        for status in [401, 401, 401, 401, 200, 200, 200, 401] {
            send_until_answered(0, "b", status);
        }
        (0..40).for_each(|nth| send_until_answered(nth % 2, "a", 200));
        (0..5).for_each(|nth| send_until_answered(nth % 2, "a", 401));
        assert_eq!([send(0, "b", 401), send(0, "a", 200), send(1, "a", 200)], [429; 3], "{mode}");
    }
}

/// The configuration of a guide, with another address for the gateway and its server.
pub fn documented(page: &str, upstream: SocketAddr) -> String {
    let text = std::fs::read_to_string(format!("{}/docs/guides/{page}", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let (_, snippet) = text.split_once("```toml\n").unwrap();
    let toml = snippet.split("```").next().unwrap();
    let toml = toml.replace("127.0.0.1:8080", "127.0.0.1:0").replace("127.0.0.1:9900", "127.0.0.1:0");
    toml.replace("127.0.0.1:9001", &upstream.to_string())
}

#[test]
fn the_guide_locks_out_guessed_passwords() {
    let gate = Gate::default();
    let hold = gate.clone();
    let upstream = Upstream::responding(move |received| {
        hold.wait_until_open();
        let is_right = received.target.ends_with("password=right");
        reply(if is_right { 200 } else { 401 }, &[], b"")
    });
    let gateway = Gateway::start(&documented("login-protection.md", upstream.address));
    let log_in = |user: &str, password: &str| gateway.get(&format!("/login?user={user}&password={password}"));
    (0..20).for_each(|_| drop(log_in("alice", "right").expect(200)));
    gate.set_closed(true);
    let before = upstream.received().len();
    thread::scope(|scope| {
        let clients: Vec<_> = (0..200).map(|_| scope.spawn(|| log_in("alice", "wrong").status)).collect();
        let refused = || gateway.metrics().sum("transom_decisions_total", &[("outcome", "refused")]);
        eventually_eq(refused, 195);
        eventually_eq(|| upstream.received().len(), before + 5);
        gate.set_closed(false);
        let statuses: Vec<u16> = clients.into_iter().map(|client| client.join().unwrap()).collect();
        assert_eq!(statuses.iter().filter(|status| **status == 401).count(), 5);
    });
    // Locked out for an hour from the first refusal, though the window ends earlier and requests go on.
    for elapsed_s in (0..3600).step_by(600) {
        let refused = log_in("alice", "right").expect(429);
        assert_eq!(refused.field("retry-after"), Some((3600 - elapsed_s).to_string().as_str()));
        assert_eq!(states(&refused)[0], (0, 3600 - elapsed_s));
        assert!(refused.text().contains("failed-logins-penalty"), "{}", refused.text());
        gateway.advance_s(600);
    }
    log_in("alice", "right").expect(200);
    log_in("bob", "right").expect(200);
    assert!(gateway.metrics().sum("transom_refused_total", &[("window", "failed-logins-penalty")]) > 6);
    assert_eq!(upstream.received().len(), before + 7);
    // Other spellings of the name have tokens of their own, but not of their own address.
    let spellings = (0..200).map(|n| log_in(&format!("alice{}", "%20".repeat(n)), "wrong").status);
    assert_eq!(spellings.filter(|status| *status == 401).count(), 50);
}

/// Fetches a URL with curl, in which `[1-N]` stands for N requests, all at the same time. Returns the status and
/// `Retry-After` of each.
fn curl_in_parallel(url: &str) -> Vec<(u16, String)> {
    let mut command = Command::new(program("curl"));
    command.args(["--silent", "--show-error", "--max-time", "60", "--noproxy", "*"]);
    command.args(["--parallel", "--parallel-immediate", "--parallel-max", "200", "--output", "/dev/null"]);
    command.args(["--write-out", "%{http_code} %header{retry-after}\\n", url]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    let response = |line: &str| {
        let (status, retry_after) = line.split_once(' ').unwrap();
        (status.parse().unwrap(), retry_after.to_owned())
    };
    lines.lines().map(response).collect()
}

#[test]
fn curl_guesses_five_passwords_at_a_login_server() {
    let server = ScriptServer::start("login_server.py", &["alice=sesame", "bob=swordfish"]);
    let gateway = Gateway::start(&documented("login-protection.md", server.address));
    let log_in = |user: &str, password: &str| {
        curl_in_parallel(&format!("http://{}/login?user={user}&password={password}", gateway.http))
    };
    // Logins of one user that the server has received.
    let received = |user: &str| {
        let host = server.address.to_string();
        let counts = Client::connect(server.address).get_with("/received", &[("Host", &host)]).expect(200).json();
        counts[user].as_u64().unwrap_or(0)
    };
    let guesses = log_in("alice", "guess[1-200]");
    assert_eq!(guesses.len(), 200);
    let (denied, refused): (Vec<_>, Vec<_>) = guesses.into_iter().partition(|(status, _)| *status == 401);
    assert_eq!((denied.len(), received("alice")), (5, 5));
    assert_eq!(refused, vec![(429, "3600".to_owned()); 195]);
    gateway.advance_s(1200);
    assert_eq!(log_in("alice", "sesame"), [(429, "2400".to_owned())]);
    assert_eq!(received("alice"), 5);

    // Logins that succeed leave all tokens of their user and address.
    for _ in 0..20 {
        assert_eq!(log_in("bob", "swordfish"), [(200, String::new())]);
    }
    let guesses = log_in("bob", "guess[1-200]");
    assert_eq!(guesses.iter().filter(|(status, _)| *status == 401).count(), 5);
    assert_eq!(received("bob"), 25);
    gateway.advance_s(2399);
    assert_eq!(log_in("alice", "sesame"), [(429, "1".to_owned())]);
    gateway.advance_s(1);
    assert_eq!(log_in("alice", "sesame"), [(200, String::new())]);
}

/// The remaining tokens and seconds of each layer in `RateLimit`.
fn states(response: &HttpResponse) -> Vec<(u64, u64)> {
    items(response, "ratelimit").iter().map(|item| (item.get("r"), item.get("t"))).collect()
}

#[test]
fn rate_limit_fields_state_the_end_of_a_penalty() {
    let rule = |windows: &str, penalty: &str| {
        one_rule(&format!("key = \"ip\"\nwindows = {windows}\npenalty = \"{penalty}\"\nheaders = \"both\""))
    };
    // The start is fifteen minutes into an hour.
    let gateway = Gateway::start(&rule("[\"2/minute\", \"5/hour\"]", "10m"));
    let policies = |response: &HttpResponse| {
        items(response, "ratelimit-policy").iter().map(|item| (item.get("q"), item.get("w"))).collect::<Vec<_>>()
    };
    assert_eq!(states(&gateway.get("/").expect(200)), [(1, 60), (4, 2700)]);
    assert_eq!(states(&gateway.get("/").expect(200)), [(0, 60), (3, 2700)]);
    for left_s in (60..=600).rev().step_by(60) {
        let refused = gateway.get("/").expect(429);
        assert_eq!((states(&refused), policies(&refused)), (vec![(0, left_s); 2], vec![(2, 60), (5, 3600)]));
        let text = left_s.to_string();
        assert_eq!(refused.field("retry-after"), Some(text.as_str()));
        assert_eq!(refused.problem()["retry-after"], left_s);
        let legacy = ["x-ratelimit-remaining", "x-ratelimit-reset"].map(|name| refused.field(name).unwrap());
        assert_eq!(legacy, ["0", &text]);
        gateway.advance_s(60);
    }
    assert_eq!(states(&gateway.get("/").expect(200)), [(1, 60), (2, 2100)]);

    // The window ends later than the penalty.
    let gateway = Gateway::start(&rule("[\"1/day\"]", "1m"));
    gateway.get("/").expect(200);
    let refused = gateway.get("/").expect(429);
    let day_s = states(&refused)[0].1;
    assert!(day_s > 60);
    assert_eq!((states(&refused), refused.problem()["retry-after"].clone()), (vec![(0, day_s)], day_s.into()));
    assert_eq!(refused.field("retry-after"), Some(day_s.to_string().as_str()));
}

/// The last request before the lock-out is answered after it began.
#[test]
fn responses_to_earlier_requests_state_a_penalty_that_has_begun() {
    let gate = Gate::default();
    let upstream = login_server(&gate);
    let gateway = Gateway::start(&config(&upstream.toml("u"), &format!("{FAILED_LOGINS}\npenalty = \"1h\"")));
    gate.set_closed(true);
    thread::scope(|scope| {
        let clients: Vec<_> = (0..5).map(|_| scope.spawn(|| log_in(&gateway, "a", 200))).collect();
        eventually_eq(|| upstream.received().len(), 5);
        log_in(&gateway, "a", 200).expect(429);
        gate.set_closed(false);
        for client in clients {
            assert_eq!(states(&client.join().unwrap().expect(200)), [(0, 3600)]);
        }
    });
    assert_eq!(states(&log_in(&gateway, "a", 200).expect(429)), [(0, 3600)]);
}

/// Responds to a WebSocket handshake with 101, and to other requests with 401.
#[test]
fn a_websocket_counts_by_the_status_of_its_handshake() {
    const HANDSHAKE: [(&str, &str); 5] = [
        ("Connection", "Upgrade"),
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ("X-User", "a"),
    ];
    let upstream = Upstream::with_script(|connection| {
        while let Some(head) = connection.read_head() {
            if head.field("upgrade").is_none() || head.target == "/denied" {
                connection.reply(401, &[], b"");
                continue;
            }
            connection.send(
                "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
                 Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n",
            );
            while !connection.wait_for_close() {}
        }
    });
    for (status, opened, denied) in [("401", 5, 4), ("101", 4, 5), ("\"4xx\", 101", 4, 4)] {
        let rule = FAILED_LOGINS.replace("401", status);
        for is_denied in [false, true] {
            let gateway = Gateway::start(&config(&upstream.toml("u"), &rule));
            let mut client = gateway.client();
            client.send(request("GET", if is_denied { "/denied" } else { "/chat" }, &HANDSHAKE, b""));
            let head = client.read_head().unwrap();
            assert_eq!(head.status, if is_denied { 401 } else { 101 });
            assert_eq!(remaining(&head, "logins"), if is_denied { denied } else { opened }, "{status}");
            // The open tunnel holds no token that came back.
            drop(client);
            let left = remaining(&log_in(&gateway, "a", 401).expect(401), "logins");
            let next = u64::from(status != "101");
            assert_eq!(left, if is_denied { denied } else { opened } - next, "{status}");
        }
    }
}

/// Of several attempts, the last response decides, and the request is charged once.
#[test]
fn a_retried_request_counts_once_by_its_last_response() {
    let failing = Upstream::responding(|_| reply(503, &[], b""));
    let closing = Upstream::with_script(|connection| drop(connection.read_head()));
    let last =
        Upstream::responding(|received| reply(received.target.trim_start_matches('/').parse().unwrap(), &[], b""));
    for first in [&failing, &closing] {
        let upstreams = format!(
            "[upstreams.u]\nservers = [\"http://{}\", \"http://{}\"]\nbalance = \"round-robin\"\nejection = false\n\
             retries = {{ on = [\"reset\", 503], budget_min = 1000 }}\n",
            first.address, last.address
        );
        let rule = FAILED_LOGINS.replace("[401]", "[401, 503, 502]");
        let gateway = Gateway::start(&config(&upstreams, &rule));
        let attempts = || gateway.metrics().sum("transom_upstream_retries_total", &[("outcome", "retried")]);
        (0..6).for_each(|_| assert_eq!(remaining(&log_in(&gateway, "a", 200).expect(200), "logins"), 5));
        for left in (0..5).rev() {
            assert_eq!(remaining(&log_in(&gateway, "a", 401).expect(401), "logins"), left);
        }
        log_in(&gateway, "a", 200).expect(429);
        assert!(attempts() >= 5, "{}", attempts());
        assert_eq!(gateway.metrics().sum("transom_refunded_total", &[]), 6);
    }
}

#[test]
fn a_penalty_survives_a_restart() {
    let scratch = TempDir::in_memory();
    let file = scratch.path().join("counters");
    let rule = one_rule("key = \"ip\"\nwindows = [\"1/minute\"]\npenalty = \"1h\"");
    let toml = format!("[counters]\ncapacity = 64\nfile = \"{}\"\n{rule}", file.display());
    let start_s = 1_700_000_040;
    let gateway = Gateway::start_at(&toml, start_s);
    gateway.get("/").expect(200);
    gateway.get("/").expect(429);
    gateway.stop();
    let gateway = Gateway::start_at(&toml, start_s + 1800);
    assert_eq!(gateway.get("/").expect(429).field("retry-after"), Some("1800"));
    gateway.advance_s(1800);
    gateway.get("/").expect(200);
}

#[test]
fn the_decision_api_reports_penalties_and_resets_them() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"1/minute\"]\npenalty = \"1h\""));
    let query = |verb: &str| {
        let body = "{\"rule\": \"r\", \"key\": \"127.0.0.1\"}";
        Client::connect(gateway.admin).post(&format!("/v1/{verb}"), body).expect(200).json()
    };
    assert_eq!(query("limit")["allowed"], true);
    // A check starts no penalty.
    let checked = query("check");
    assert_eq!((&checked["allowed"], checked["windows"].as_array().unwrap().len()), (&false.into(), 1));
    let limited = query("limit");
    assert_eq!((&limited["allowed"], &limited["retry_after"]), (&false.into(), &3600.into()));
    assert_eq!(limited["windows"][1]["name"], "r-penalty");
    gateway.advance_s(60);
    assert_eq!(query("value")["retry_after"], 3540);
    gateway.get("/").expect(429);
    assert_eq!(query("reset")["allowed"], true);
    gateway.get("/").expect(200);
}

#[test]
fn gateways_share_penalties() {
    let redis = RedisServer::start();
    for mode in ["exact", "lease"] {
        let settings = format!("mode = \"{mode}\"\nprefix = \"{mode}\"\n{LONG_TIMEOUT}");
        let rule = rule_by_key("[\"2/30d\"]", "penalty = \"8000h\"");
        let group = GatewayGroup::start(2, &shared_config(&format!("\"{}\"", redis.url()), &settings, &rule));
        let get = |nth: usize, key: &str| group.0[nth].client().get_with("/a", &[("X-Key", key)]);
        let retry_after_s = |response: HttpResponse| response.field("retry-after").unwrap().parse::<u64>().unwrap();
        (0..2).for_each(|_| drop(get(0, "a").expect(200)));
        let first = retry_after_s(get(0, "a").expect(429));
        assert!((28_799_990..=28_800_000).contains(&first), "{first}");
        // Once the store knows it, the other gateway refuses because of the penalty.
        eventually("the store has the penalty", || redis.keys().iter().any(|key| key.contains(":penalty")));
        let other = retry_after_s(get(1, "a").expect(429));
        assert!((first - 60..=first).contains(&other), "{mode}: {other}");
        get(1, "b").expect(200);
        // A reset ends it everywhere.
        query_decision(&group.0[0], "reset", &serde_json::json!({"rule": "r", "key": "a"}));
        get(0, "a").expect(200);
    }
}

/// The lease of a key is idle, and returned, while its only request waits for the response.
#[test]
fn gateways_share_a_token_refunded_after_a_slow_response() {
    let redis = RedisServer::start();
    let gate = Gate::default();
    let hold = gate.clone();
    let upstream = Upstream::responding(move |received| {
        if received.target == "/201" {
            hold.wait_until_open();
        }
        reply(200, &[], b"")
    });
    let shared = format!("redis = \"{}\"\n{LONG_TIMEOUT}", redis.url());
    for start in ["", ", start = \"first-request\"", ", capacity = 1, reserve = 1"] {
        redis.cli(&["FLUSHALL"]);
        let windows = format!("{{ limit = 1, period = \"30d\"{start} }}");
        let rule = FAILED_LOGINS.replace("\"5/15m\"", &windows);
        let toml = format!("workers = 1\n[counters.shared]\n{shared}\n{}", config(&upstream.toml("u"), &rule));
        let group = GatewayGroup::start(2, &toml);
        let before = upstream.received().len();
        let log_in =
            |nth: usize, user: &str, path: &str| group.0[nth].client().get_with(path, &[("X-User", user)]).status;
        gate.set_closed(true);
        thread::scope(|scope| {
            let slow = scope.spawn(|| log_in(0, "slow", "/201"));
            eventually_eq(|| upstream.received().len(), before + 1);
            // A lease that was taken later has been returned.
            assert_eq!(log_in(0, "fast", "/200"), 200);
            eventually("an idle lease is returned", || log_in(1, "fast", "/200") == 200);
            gate.set_closed(false);
            assert_eq!(slow.join().unwrap(), 200);
        });
        eventually("the refunded token is returned", || log_in(1, "slow", "/200") == 200);
    }
}
