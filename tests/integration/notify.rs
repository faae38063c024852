//! Notifications about keys near their limits: one event for each key, rule, window and mark, signed and repeated.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use serde_json::{Value, json};
use transom_limiter::secret_digest::Digest;

use crate::support::client::{Client, HttpResponse};
use crate::support::external_servers::nginx_with;
use crate::support::gateway::Gateway;
use crate::support::gateway_group::{GatewayGroup, LONG_TIMEOUT, rule_by_key, shared_config};
use crate::support::jwt_issuer::hmac_sha256;
use crate::support::process::Process;
use crate::support::redis::RedisServer;
use crate::support::test_ca::ServerFiles;
use crate::support::upstream::{ReceivedRequest, Upstream, reply};
use crate::support::{TempDir, eventually, eventually_eq, one_rule};

const SECRET: &str = "a secret of the receiver";

/// A rule by header, with these windows.
fn by_key(windows: &str, more: &str) -> String {
    one_rule(&format!("key = \"header:x-key\"\non_missing_key = \"skip\"\nwindows = {windows}\n{more}"))
}

/// `[notify]` with a receiver.
fn notify(receiver: &Upstream, more: &str) -> String {
    format!("[notify]\nat = [\"80%\", \"100%\"]\nurl = \"http://{}/hook?from=gateway\"\n{more}\n", receiver.address)
}

fn send(client: &mut Client, key: &str) -> HttpResponse {
    client.get_with("/a", &[("X-Key", key)])
}

/// Sends requests of a key on one connection.
fn send_all(gateway: &Gateway, key: &str, times: usize) {
    let mut client = gateway.client();
    (0..times).for_each(|_| _ = send(&mut client, key));
}

fn event(received: &ReceivedRequest) -> Value {
    serde_json::from_slice(&received.body).unwrap()
}

/// Rule, window, key and mark of each event that a receiver got, with the number of these events.
fn events(receiver: &Upstream) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    // A request without a body has not arrived yet.
    for received in receiver.received().into_iter().filter(|received| !received.body.is_empty()) {
        let event = event(&received);
        let text = ["rule", "window", "key", "mark"].map(|field| event[field].as_str().unwrap_or_default().to_owned());
        *counts.entry(text.join(" ")).or_default() += 1;
    }
    counts
}

fn once(events: &[&str]) -> BTreeMap<String, usize> {
    events.iter().map(|event| ((*event).to_owned(), 1)).collect()
}

fn outcomes(gateway: &Gateway) -> [u64; 4] {
    let metrics = gateway.metrics();
    ["logged", "delivered", "failed", "dropped"]
        .map(|outcome| metrics.sum("transom_notify_total", &[("outcome", outcome)]))
}

/// Waits for these events, each delivered once, and no others.
fn expect_events(gateway: &Gateway, receiver: &Upstream, expected: &[&str]) {
    eventually_eq(|| events(receiver), once(expected));
    let total = receiver.received().len();
    // An outcome is counted once the response to the event has arrived.
    eventually_eq(|| outcomes(gateway)[1..].to_vec(), vec![total as u64, 0, 0]);
}

#[test]
fn each_mark_is_sent_once_over_all_workers_signed_and_repeated() {
    let scratch = TempDir::new();
    let secret = scratch.write("secret", format!("{SECRET}\n"));
    let failures = AtomicUsize::new(0);
    // The receiver fails at first: it answers with an error, then not at all.
    let receiver = Upstream::with_script(move |connection| {
        while connection.read_request().is_some() {
            match failures.fetch_add(1, Ordering::SeqCst) {
                0 => drop(connection.reply(503, &[], b"later")),
                1 => return connection.close(),
                _ => drop(connection.reply(204, &[], b"")),
            }
        }
    });
    let settings = notify(&receiver, &format!("secret_file = \"{}\"", secret.display()));
    let gateway = Gateway::start(&format!("workers = 2\n{settings}{}", by_key("[\"60/hour\", \"50/minute\"]", "")));
    thread::scope(|scope| {
        for key in ["a", "b"].repeat(4) {
            scope.spawn({
                let gateway = &gateway;
                move || send_all(gateway, key, 30)
            });
        }
    });
    // The last mark of the hour is not reached: the minute refuses.
    let expected: Vec<String> = ["a", "b"]
        .iter()
        .flat_map(|key| {
            ["r-hour KEY 80%", "r-minute KEY 80%", "r-minute KEY 100%"].map(|event| event.replace("KEY", key))
        })
        .map(|event| format!("r {event}"))
        .collect();
    let delivered = |number: usize| outcomes(&gateway) == [0, number as u64, 0, 0];
    eventually("all events are delivered", || delivered(expected.len()));
    let received = receiver.received();
    assert_eq!(received.len(), expected.len() + 2, "two requests failed");
    let first: Vec<_> = received[..3].iter().map(|request| request.body.clone()).collect();
    assert!(first.iter().all(|body| *body == first[0]), "the same event is repeated");
    for request in &received {
        let signature: String =
            hmac_sha256(SECRET.as_bytes(), &request.body).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(request.field("x-transom-signature"), Some(signature.as_str()));
        assert_eq!((request.method.as_str(), request.target.as_str()), ("POST", "/hook?from=gateway"));
        assert_eq!(request.field("content-type"), Some("application/json"));
        assert_eq!(request.field("x-transom-event"), event(request)["id"].as_str());
    }
    let delivered_events = received[2..].iter().map(|request| {
        let event = event(request);
        ["rule", "window", "key", "mark"].map(|field| event[field].as_str().unwrap().to_owned()).join(" ")
    });
    let mut delivered_events: Vec<_> = delivered_events.collect();
    delivered_events.sort();
    let mut expected = expected;
    expected.sort();
    assert_eq!(delivered_events, expected);
    let of_minute = received.iter().map(event).find(|event| event["window"] == "r-minute" && event["mark"] == "100%");
    let mut of_minute = of_minute.unwrap();
    let id = of_minute.as_object_mut().unwrap().remove("id").unwrap();
    assert_eq!(id.as_str().unwrap().len(), 16);
    let key = of_minute["key"].clone();
    assert_eq!(
        of_minute,
        json!({
            "event": "quota_mark", "time": "2023-11-14T22:15:00Z", "rule": "r", "window": "r-minute", "key": key,
            "client": null, "plan": null, "mark": "100%", "used": 50, "limit": 50, "window_end": "2023-11-14T22:16:00Z",
        })
    );
}

#[test]
fn the_next_window_and_other_limits_have_events_of_their_own() {
    let receiver = Upstream::always(200);
    let clients = format!(
        "[clients.acme]\nplan = \"gold\"\napi_keys = [\"{}\", \"{}\"]\n",
        Digest::of(b"key-1"),
        Digest::of(b"key-2")
    );
    let rules = "[upstreams.u]\nbuiltin = \"echo\"\n\
         [rules.r]\nkey = \"client\"\non_missing_key = \"ip\"\nwindows = [\"5/minute\"]\n\
         [rules.r.plans.gold]\nwindows = [\"10/minute\"]\n\
         [rules.other]\nkey = \"ip\"\nwindows = [\"1000/minute\"]\n\
         [[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\nrules = [\"r\", \"other\"]\n";
    let section = "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-key\"\n";
    let toml = format!("{}{section}{rules}", notify(&receiver, "rules = [\"r\"]"));
    let gateway = Gateway::start_with(&toml, &clients);
    // The keys of a client share its counter, and its name is the key.
    for key in ["key-1", "key-2"] {
        send_all(&gateway, key, 4);
    }
    expect_events(&gateway, &receiver, &["r r acme 80%"]);
    let first = event(&receiver.received()[0]);
    assert_eq!((&first["client"], &first["plan"]), (&json!("acme"), &json!("gold")));
    assert_eq!((&first["used"], &first["limit"]), (&json!(8), &json!(10)));
    // Who is no client is counted by address, with other windows.
    gateway.get("/a").expect(200);
    gateway.get("/a").expect(200);
    gateway.get("/a").expect(200);
    gateway.get("/a").expect(200);
    expect_events(&gateway, &receiver, &["r r acme 80%", "r r 127.0.0.1 80%"]);
    gateway.advance_s(60);
    send_all(&gateway, "key-1", 12);
    eventually_eq(
        || events(&receiver),
        BTreeMap::from([
            ("r r acme 80%".to_owned(), 2),
            ("r r acme 100%".to_owned(), 1),
            ("r r 127.0.0.1 80%".to_owned(), 1),
        ]),
    );
}

#[test]
fn the_decision_api_reaches_marks_too_and_a_reload_repeats_none() {
    let (receiver, other) = (Upstream::always(200), Upstream::always(200));
    let rule = by_key("[{ limit = 10, period = \"minute\", sliding = true }]", "");
    let mut gateway = Gateway::start(&format!("{}{rule}", notify(&receiver, "")));
    let query = json!({ "rule": "r", "key": "a", "cost": 9 });
    assert_eq!(gateway.decision("check", &query).expect(200).json()["allowed"], true);
    assert_eq!(gateway.decision("limit", &query).expect(200).json()["allowed"], true);
    expect_events(&gateway, &receiver, &["r r a 80%"]);
    assert_eq!(event(&receiver.received()[0])["window_end"], Value::Null, "a sliding window has no end");
    gateway.reload_and_wait(&format!("{}{rule}", notify(&other, "")));
    send_all(&gateway, "a", 3);
    eventually_eq(|| events(&other), once(&["r r a 100%"]));
    assert_eq!(events(&receiver), once(&["r r a 80%"]));
    // Without a receiver, events are only counted and logged.
    gateway.reload_and_wait(&format!("[notify]\nat = \"50%\"\n{rule}"));
    send_all(&gateway, "b", 4);
    assert_eq!(outcomes(&gateway)[0], 0);
    send_all(&gateway, "b", 3);
    eventually_eq(|| outcomes(&gateway), [1, 2, 0, 0]);
}

#[test]
fn a_restart_with_kept_counters_repeats_no_mark() {
    let (receiver, scratch) = (Upstream::always(200), TempDir::in_memory());
    let counters = format!("[counters]\nfile = \"{}\"\n", scratch.path().join("counters").display());
    let toml = format!("{}{counters}{}", notify(&receiver, ""), by_key("[\"10/day\"]", ""));
    let gateway = Gateway::start(&toml);
    send_all(&gateway, "a", 9);
    send_all(&gateway, "b", 7);
    expect_events(&gateway, &receiver, &["r r a 80%"]);
    gateway.stop();
    let gateway = Gateway::start(&toml);
    send_all(&gateway, "a", 3);
    send_all(&gateway, "b", 3);
    // The marks that are reached now are sent, those that were reached before are not.
    eventually_eq(|| events(&receiver), once(&["r r a 80%", "r r a 100%", "r r b 80%", "r r b 100%"]));
    eventually_eq(|| outcomes(&gateway), [0, 3, 0, 0]);
}

#[test]
fn a_rejected_event_is_not_repeated() {
    let receiver =
        Upstream::responding(|request| reply(if event(request)["key"] == "a" { 410 } else { 200 }, &[], b""));
    let gateway = Gateway::start(&format!("{}{}", notify(&receiver, ""), by_key("[\"10/minute\"]", "")));
    send_all(&gateway, "a", 8);
    send_all(&gateway, "b", 8);
    eventually_eq(|| outcomes(&gateway), [0, 1, 1, 0]);
    assert_eq!(events(&receiver), once(&["r r a 80%", "r r b 80%"]));
    assert_eq!(receiver.received()[0].field("x-transom-signature"), None);
}

#[test]
fn gateways_that_share_counters_send_each_mark_once() {
    let (receiver, redis) = (Upstream::always(200), RedisServer::start());
    for (mode, limit) in [("exact", 40), ("lease", 400)] {
        let rule = rule_by_key(&format!("[\"{limit}/366d\"]"), &format!("shared = \"{mode}\""));
        let toml = shared_config(&format!("\"{}\"", redis.url()), LONG_TIMEOUT, &rule);
        let Some((shared, rest)) = toml.split_once("\n[upstreams") else { panic!("{toml}") };
        let toml = format!("{shared}\n{}\n[upstreams{rest}", notify(&receiver, ""));
        let group = GatewayGroup::start(2, &toml);
        let key = format!("key-{limit}");
        assert_eq!(group.count_admitted(&key, limit), limit);
        let sum = |outcome: &str| {
            group
                .0
                .iter()
                .map(|gateway| gateway.metrics().sum("transom_notify_total", &[("outcome", outcome)]))
                .sum::<u64>()
        };
        eventually("both marks are delivered", || sum("delivered") == 2);
        let marks = [format!("r r {key} 80%"), format!("r r {key} 100%")];
        let of_key =
            || events(&receiver).into_iter().filter(|(event, _)| event.contains(&key)).collect::<BTreeMap<_, _>>();
        assert_eq!(of_key(), once(&[&marks[0], &marks[1]]));
        assert_eq!(sum("failed") + sum("dropped"), 0);
    }
}

#[test]
fn a_receiver_is_verified_and_each_event_is_a_message() {
    let (files, other) = (ServerFiles::new(), ServerFiles::new());
    let certificate = format!(
        "ssl_certificate {}; ssl_certificate_key {}; location = /hook {{ return 204; }}",
        files.certificate.display(),
        files.private_key.display(),
    );
    let server = nginx_with("ssl", &certificate, |_| {});
    let section = |files: &ServerFiles| {
        let url = format!("https://localhost:{}/hook", server.address.port());
        format!("[notify]\nat = [\"100%\"]\nurl = \"{url}\"\nca = \"{}\"\n", files.ca.display())
    };
    let gateway = Process::spawn(&format!("{}{}", section(&files), by_key("[\"2/366d\"]", "")));
    (0..3).for_each(|_| _ = gateway.client().get_with("/a", &[("X-Key", "a")]));
    let log = gateway.wait_for_stderr("quota_mark");
    for part in ["rule=\"r\"", "window=\"r\"", "key=\"a\"", "mark=\"100%\"", "used=2", "limit=2"] {
        assert!(log.contains(part), "{part}: {log}");
    }
    eventually("the event is delivered", || {
        gateway.metrics().sum("transom_notify_total", &[("outcome", "delivered")]) == 1
    });
    let gateway = Process::spawn(&format!("{}{}", section(&other), by_key("[\"2/366d\"]", "")));
    (0..3).for_each(|_| _ = gateway.client().get_with("/a", &[("X-Key", "a")]));
    let log = gateway.wait_for_stderr("notifications cannot be sent");
    assert!(log.contains("UnknownIssuer"), "{log}");
}
