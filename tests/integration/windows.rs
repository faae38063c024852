//! Windows of every kind: opened by a first request, at a configured time, at local midnight or at random, with tokens that
//! roll over, or sharded.

use std::collections::BTreeSet;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::client::{Client, HttpResponse};
use crate::support::gateway::{Gateway, START_S};
use crate::support::process::Process;
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::{eventually, one_rule};

const HOUR_S: u64 = 3600;
const MINUTE_S: u64 = 60;

/// A rule that counts users separately, with one window table.
fn per_user(window: &str) -> String {
    one_rule(&format!("key = \"header:x-user\"\non_missing_key = \"refuse\"\nwindows = [{{ {window} }}]"))
}

fn get_as(gateway: &Gateway, user: &str) -> HttpResponse {
    gateway.get_with("/a", &[("X-User", user)])
}

fn reset_s(response: &HttpResponse) -> u64 {
    items(response, "ratelimit")[0].get("t")
}

#[test]
fn a_first_request_opens_a_window_that_does_not_move() {
    let gateway = Gateway::start(&per_user("limit = 1, period = \"2s\", start = \"first-request\""));
    let mut now = 0;
    for (ms, user, status) in [
        (0, "bob", 200),
        (999, "bob", 429),
        (1000, "bob", 429),
        (1000, "alice", 200),
        (1001, "alice", 429),
        (2001, "alice", 429),
        (2001, "bob", 200),
        (2001, "bob", 429),
        (3002, "alice", 200),
        (3003, "alice", 429),
    ] {
        gateway.advance(Duration::from_millis(ms - now));
        now = ms;
        let response = get_as(&gateway, user).expect(status);
        assert_eq!(items(&response, "ratelimit-policy")[0].get("w"), 2, "{ms}");
    }
    // Alice's window was opened at 3002: a client that waits for Retry-After is admitted.
    let refused = get_as(&gateway, "alice").expect(429);
    assert_eq!((refused.field("retry-after"), reset_s(&refused)), (Some("2"), 2));
    gateway.advance(Duration::from_millis(1998));
    get_as(&gateway, "alice").expect(429);
    gateway.advance(Duration::from_millis(1));
    get_as(&gateway, "alice").expect(200);
}

#[test]
fn the_binary_supports_first_request_windows() {
    let process = Process::spawn(&per_user("limit = 1, period = \"2s\", start = \"first-request\""));
    let request_as = |user: &str| process.client().get_with("/a", &[("X-User", user)]);
    let start = Instant::now();
    assert_eq!(reset_s(&request_as("bob").expect(200)), 2);
    eventually("the window has ended", || request_as("bob").status == 200);
    assert!(start.elapsed() >= Duration::from_millis(1990), "{:?}", start.elapsed());
}

/// Between reading the time and counting a request, another request may open the window. By the older time, that window is in
/// the future, but it must not count as debt. In many attempts, the requests meet in this order a few times.
#[test]
fn a_late_request_uses_the_window_another_opened() {
    let window = "limit = 2, period = \"1d\", start = \"first-request\"";
    let process = Process::spawn(&format!("workers = 2\n{}", per_user(window)));
    let long = format!("/{}a", "./".repeat(7000));
    // On several connections each, which the kernel distributes to both workers.
    let connect = || [(); 4].map(|()| process.client());
    let request_as = |clients: &mut [Client; 4], target: &str, user: usize| {
        clients[user / 16 % 4].get_with(target, &[("X-User", &user.to_string())]).expect(200);
    };
    let (both, go) = sync_channel(0);
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut clients = connect();
            while let Ok(user) = go.recv() {
                request_as(&mut clients, &long, user);
            }
        });
        let mut clients = connect();
        for user in 0..640 {
            both.send(user).expect("the other thread runs");
            // A varying number of other requests first, so that this one sometimes arrives during the slow one.
            (0..user % 16).for_each(|other| request_as(&mut clients, "/a", 1000 + user * 16 + other));
            request_as(&mut clients, "/a", user);
        }
        drop(both);
    });
}

/// 2024-01-01T00:00:00Z.
const NEW_YEAR_S: u64 = 1_704_067_200;

/// A rule whose requests state their cost.
fn with_request_cost(window: &str) -> String {
    one_rule(&format!("key = \"ip\"\nwindows = [{{ {window} }}]\ncost = {{ request-header = \"x-cost\", max = 1000 }}"))
}

fn spend(client: &mut Client, cost: u64) -> HttpResponse {
    client.get_with("/a", &[("X-Cost", &cost.to_string())])
}

#[test]
fn unused_tokens_roll_over_up_to_the_capacity() {
    let window = "limit = 100, period = \"1h\", capacity = 150, start = 2024-01-01T00:00:00Z";
    let gateway = Gateway::start_at(&with_request_cost(window), NEW_YEAR_S);
    let mut client = gateway.client();
    // A new key has the whole capacity; the table begins with a value of 100.
    let mut now = 0;
    for (minute, cost, value) in
        [(0, 50, 100), (30, 15, 85), (45, 15, 70), (60, 0, 150), (90, 30, 120), (120, 0, 150), (120, 150, 0)]
    {
        gateway.advance_s((minute - now) * 60);
        now = minute;
        assert_eq!(remaining(&spend(&mut client, cost).expect(200), "r"), value, "minute {minute}");
    }
    // The tokens of two windows are available after two hours.
    let refused = spend(&mut client, 150).expect(429);
    assert_eq!((refused.field("retry-after"), remaining(&refused, "r")), (Some("7200"), 0));
    assert_eq!(spend(&mut client, 100).expect(429).field("retry-after"), Some("3600"));
    gateway.advance_s(2 * HOUR_S);
    spend(&mut client, 150).expect(200);
}

#[test]
fn an_idle_key_accumulates_at_most_the_capacity() {
    let gateway = Gateway::start_at(&with_request_cost("limit = 100, period = \"1h\", capacity = 120"), NEW_YEAR_S);
    let mut client = gateway.client();
    for (hours, value) in [(0, 120), (1, 100), (2, 120), (100, 120)] {
        gateway.advance_s(hours * HOUR_S);
        assert_eq!(remaining(&spend(&mut client, 0).expect(200), "r"), value);
        spend(&mut client, value).expect(200);
    }
    let refused = spend(&mut client, 121).expect(429);
    assert_eq!(refused.field("retry-after"), None);
}

#[test]
fn windows_start_at_the_configured_time() {
    // 500 a day from nine in the morning, Pacific standard time.
    for start in ["2024-01-01T17:00:00Z", "\"2024-01-01T09:00:00-08:00\"", "2030-05-05 17:00:00Z"] {
        let window = format!("limit = 500, period = \"day\", start = {start}");
        let gateway = Gateway::start_at(&with_request_cost(&window), NEW_YEAR_S + 40 * 24 * HOUR_S + 17 * HOUR_S - 1);
        let mut client = gateway.client();
        assert_eq!(reset_s(&spend(&mut client, 500).expect(200)), 1, "{start}");
        assert_eq!(spend(&mut client, 1).expect(429).field("retry-after"), Some("1"));
        gateway.advance_s(1);
        assert_eq!(reset_s(&spend(&mut client, 500).expect(200)), 24 * HOUR_S);
    }
}

/// Uses up two tokens in the last second of a window, and checks the length of the next one.
fn assert_next_window(zone: &str, period: &str, unix_s: u64, seconds: u64) {
    let window = format!("limit = 2, period = \"{period}\", timezone = \"{zone}\"");
    let gateway = Gateway::start_at(&one_rule(&format!("key = \"ip\"\nwindows = [{{ {window} }}]")), unix_s - 1);
    let mut client = gateway.client();
    for _ in 0..2 {
        assert_eq!(reset_s(&client.get("/a").expect(200)), 1, "{zone} {period}");
    }
    assert_eq!(client.get("/a").expect(429).field("retry-after"), Some("1"));
    gateway.advance_s(1);
    let response = client.get("/a").expect(200);
    assert_eq!(items(&response, "ratelimit-policy")[0].get("w"), seconds, "{zone} {period}");
    assert_eq!(reset_s(&response), seconds, "{zone} {period}");
    client.get("/a").expect(200);
    gateway.advance_s(seconds - 1);
    client.get("/a").expect(429);
    gateway.advance_s(1);
    client.get("/a").expect(200);
}

#[test]
fn calendar_windows_follow_their_time_zone() {
    const DAY_S: u64 = 24 * HOUR_S;
    for (zone, period, unix_s, seconds) in [
        // In Paris, Sunday, 30 March 2025 has 23 hours, and Sunday, 26 October 25.
        ("Europe/Paris", "day", 1_743_289_200, 23 * HOUR_S),
        ("Europe/Paris", "day", 1_761_429_600, 25 * HOUR_S),
        // In Beirut, 31 March 2024 begins at 01:00.
        ("Asia/Beirut", "day", 1_711_836_000, 23 * HOUR_S),
        // Monday, 3 March 2025 in New York; daylight saving time begins on Sunday.
        ("America/New_York", "week", 1_740_978_000, 7 * DAY_S - HOUR_S),
        ("America/New_York", "month", 1_740_805_200, 31 * DAY_S - HOUR_S),
        // Weeks begin on Monday if a zone is configured.
        ("UTC", "week", 1_740_960_000, 7 * DAY_S),
    ] {
        assert_next_window(zone, period, unix_s, seconds);
    }
}

#[test]
fn a_week_without_a_time_zone_begins_on_thursday() {
    let gateway = Gateway::start_at(&one_rule("key = \"ip\"\nwindows = [\"5/week\"]"), NEW_YEAR_S);
    // New year's day of 2024 was a Monday.
    assert_eq!(reset_s(&gateway.get("/a").expect(200)), 3 * 24 * HOUR_S);
}

#[test]
fn random_starts_are_spread_and_equal_on_all_gateways() {
    let toml = per_user("limit = 5, period = \"hour\", start = \"random\"");
    let gateways = [Gateway::start(&toml), Gateway::start(&toml)];
    let users: Vec<String> = (0..64).map(|n| format!("user{n}")).collect();
    let ends =
        |gateway: &Gateway| users.iter().map(|user| reset_s(&get_as(gateway, user).expect(200))).collect::<Vec<_>>();
    let (one, other) = (ends(&gateways[0]), ends(&gateways[1]));
    assert_eq!(one, other);
    assert!(one.iter().collect::<BTreeSet<_>>().len() > 50, "{one:?}");
    for quarter in 0..4 {
        let within = one.iter().filter(|end| (quarter * 900..(quarter + 1) * 900).contains(*end)).count();
        assert!((4..=30).contains(&within), "{within} of 64 in a quarter of an hour");
    }
    // The window has the full length, and ends at the reported time.
    (0..4).for_each(|_| drop(get_as(&gateways[0], "user0").expect(200)));
    get_as(&gateways[0], "user0").expect(429);
    gateways[0].advance_s(one[0] - 1);
    get_as(&gateways[0], "user0").expect(429);
    gateways[0].advance_s(1);
    assert!(reset_s(&get_as(&gateways[0], "user0").expect(200)) >= HOUR_S - 1);
}

fn sharded(limit: u32, shards: u32, cost: u32) -> String {
    let rule = format!(
        "key = \"global\"\ncost = {cost}\nwindows = [{{ limit = {limit}, period = \"hour\", shards = {shards} }}]"
    );
    format!("workers = 4\n{}", one_rule(&rule))
}

#[test]
fn shards_together_admit_exactly_the_limit() {
    for (limit, shards, cost) in [(1000, 10, 1), (1000, 7, 3), (5, 4, 1)] {
        let gateway = Gateway::start(&sharded(limit, shards, cost));
        let address = gateway.http;
        let admitted: u32 = thread::scope(|scope| {
            let request_as = move || {
                let mut client = Client::connect(address);
                (0..200).map(|_| u32::from(client.get("/a").status == 200)).sum::<u32>()
            };
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(request_as)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(admitted, limit / cost, "{limit} in {shards}");
        assert_eq!(gateway.get("/a").expect(429).field("retry-after").map(str::is_empty), Some(false));
        assert_eq!(START_S % HOUR_S, 900, "the hour does not end during the test");
    }
}

#[test]
fn one_worker_alone_can_use_all_shards() {
    let gateway = Gateway::start(&sharded(25, 10, 1));
    let mut client = gateway.client();
    for left in (0..25).rev() {
        assert_eq!(remaining(&client.get("/a").expect(200), "r"), left);
    }
    client.get("/a").expect(429);
    gateway.advance_s(HOUR_S);
    assert_eq!(remaining(&client.get("/a").expect(200), "r"), 24);
}

#[test]
fn a_lowered_limit_applies_to_the_usage_of_all_shards() {
    // A rule with cost 0 shows by its limit which configuration is applied.
    let toml = |limit: u32| {
        format!(
            "{}[rules.probe]\nkey = \"global\"\ncost = 0\nwindows = [\"{limit}/hour\"]\n\
             [[routes]]\npath = \"/probe\"\nupstream = \"u\"\nrules = [\"probe\"]\n",
            sharded(limit, 10, 1).replace("workers = 4", "workers = 1")
        )
    };
    let mut gateway = Gateway::start(&toml(1000));
    let mut client = gateway.client();
    (0..300).for_each(|_| drop(client.get("/a").expect(200)));
    for (limit, left) in [(200, 0), (320, 20), (330, 10)] {
        gateway.reload(&toml(limit));
        eventually("the new limit applies", || {
            items(&client.get("/probe"), "ratelimit-policy")[0].get("q") == u64::from(limit)
        });
        (0..left).for_each(|_| drop(client.get("/a").expect(200)));
        client.get("/a").expect(429);
    }
}

/// Five requests at second 59 of a minute also count in the next one.
#[test]
fn a_sliding_window_refuses_a_second_burst() {
    let minute_s = START_S - START_S % MINUTE_S;
    let gateway = Gateway::start_at(&per_user("limit = 5, period = \"60s\", sliding = true"), minute_s + 59);
    for left in (0..5).rev() {
        let response = get_as(&gateway, "bob").expect(200);
        let policy = items(&response, "ratelimit-policy")[0].clone();
        assert_eq!((policy.get("q"), policy.get("w"), remaining(&response, "r")), (5, 60, left));
    }
    gateway.advance_s(2);
    let refused = get_as(&gateway, "bob").expect(429);
    let retry_s: u64 = refused.field("retry-after").unwrap().parse().unwrap();
    assert_eq!(reset_s(&refused), retry_s);
    assert!((58..=66).contains(&retry_s), "{retry_s}");
    get_as(&gateway, "alice").expect(200);
    gateway.advance_s(retry_s - 1);
    get_as(&gateway, "bob").expect(429);
    gateway.advance_s(1);
    get_as(&gateway, "bob").expect(200);
}

/// Workers charge the same segments at the same time.
#[test]
fn a_sliding_window_admits_exactly_the_limit_to_many_connections() {
    let rule = one_rule("key = \"global\"\nwindows = [{ limit = 200, period = \"1h\", sliding = true }]");
    let gateway = Gateway::start(&format!("workers = 4\n{rule}"));
    let admitted: usize = thread::scope(|scope| {
        let send = || {
            let mut client = gateway.client();
            (0..100).filter(|_| client.get("/a").status == 200).count()
        };
        let clients: Vec<_> = (0..8).map(|_| scope.spawn(send)).collect();
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    });
    assert_eq!(admitted, 200);
}

/// On 2025-03-09, clocks in Los Angeles change from PST to PDT: that day has 23 hours.
#[test]
fn a_day_can_begin_at_a_time_of_day_in_a_zone() {
    const EIGHTH_OF_MARCH_9_PST_S: u64 = 1_741_453_200;
    let window = "limit = 2, period = \"day\", timezone = \"America/Los_Angeles\", start = \"09:00\"";
    let gateway = Gateway::start_at(&per_user(window), EIGHTH_OF_MARCH_9_PST_S - 1);
    assert_eq!(reset_s(&get_as(&gateway, "bob").expect(200)), 1);
    gateway.advance_s(1);
    let response = get_as(&gateway, "bob").expect(200);
    assert_eq!((reset_s(&response), remaining(&response, "r")), (23 * HOUR_S, 1));
    gateway.advance_s(23 * HOUR_S);
    assert_eq!(reset_s(&get_as(&gateway, "bob").expect(200)), 24 * HOUR_S);
}
