//! Behaviour known from other fixed-window limiters, as timelines: each row is one request or one peek.

use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::key::KeyPart;
use transom_limiter::limit::Limit;
use transom_limiter::rule::Rule;
use transom_limiter::window::Windows;

use crate::oracle::Expected::{self, Admitted, DelayedUntil, Refused};
use crate::support::{Gateway, delay, limit, plain, rule};

const MINUTE_MS: u64 = 60_000;
const HOUR_MS: u64 = 60 * MINUTE_MS;
const DAY_MS: u64 = 24 * HOUR_MS;

fn only(layer: Limit) -> Gateway<8> {
    Gateway::with_large_table(&[rule("only", vec![layer])])
}

/// The tokens left in the only layer, and the end of its window; nothing is charged.
fn remaining(gateway: &mut Gateway<8>, client: u64, now_ms: u64) -> (i64, u64) {
    gateway.context.inputs.keyed_requests = vec![Some(gateway.keyed_request(0, client, 0))].into();
    gateway.charge_plan.peek(&gateway.table, DecisionTime::read(&|| now_ms), &mut gateway.context);
    gateway.remaining()
}

const FIRST_REQUEST: Windows = Windows::FirstRequest { period_ms: 2000 };

/// One request every two seconds, with windows opened by the first request of a key: time, key, admitted.
const ONE_IN_TWO_SECONDS: [(u64, u64, bool); 10] = [
    (0, BOB, true),
    (999, BOB, false),
    (1000, BOB, false),
    (1000, ALICE, true),
    (1001, ALICE, false),
    (2001, ALICE, false),
    (2001, BOB, true),
    (2001, BOB, false),
    (3002, ALICE, true),
    (3003, ALICE, false),
];
const BOB: u64 = 0;
const ALICE: u64 = 2;

#[test]
fn a_window_opens_with_the_first_request() {
    for start_ms in [0, 1, 1_700_000_000_123] {
        let mut gateway = only(limit(1, FIRST_REQUEST));
        for (ms, key, admitted) in ONE_IN_TWO_SECONDS {
            let expected = if admitted { Admitted } else { Refused };
            assert_eq!(gateway.request(key, start_ms + ms), expected, "{key} at {ms}");
        }
    }
}

#[test]
fn a_window_opens_with_the_first_request_and_later_ones_wait() {
    let layer = limit(1, FIRST_REQUEST);
    let mut gateway = Gateway::with_large_table(&[Rule { on_limit: delay(2000), ..rule("only", vec![layer]) }]);
    assert_eq!(gateway.request(BOB, 0), Admitted);
    assert_eq!(gateway.request(BOB, 999), DelayedUntil(2000));
    assert_eq!(gateway.request(BOB, 1000), Refused, "the next free window opens at 4000");
    assert_eq!(gateway.request(ALICE, 1000), Admitted);
    assert_eq!(gateway.request(BOB, 2001), DelayedUntil(4000), "another request has reserved this window");
    assert_eq!(gateway.request(ALICE, 3002), Admitted);
}

#[test]
fn five_per_minute_admit_ten_around_a_boundary() {
    let mut gateway = only(plain(5, MINUTE_MS));
    let start_ms = 28_333_335 * MINUTE_MS;
    assert_eq!(start_ms, 1_700_000_100_000);
    for (second, end_ms) in [(59, start_ms + MINUTE_MS), (61, start_ms + 2 * MINUTE_MS)] {
        let now_ms = start_ms + second * 1000;
        for count in 1..=5 {
            assert_eq!((gateway.request(ALICE, now_ms), gateway.remaining()), (Admitted, (5 - count, end_ms)));
        }
        assert_eq!((gateway.request(ALICE, now_ms), gateway.retry_at_ms(now_ms)), (Refused, Some(end_ms)));
        assert_eq!(gateway.remaining(), (0, end_ms), "no request extends a window");
    }
}

#[test]
fn each_user_and_endpoint_is_counted_separately() {
    let mut gateway = only(plain(5, MINUTE_MS));
    for (endpoint, passes) in [(0, 5), (1, 5), (0, 0)] {
        let admitted = (0..7).filter(|_| gateway.request(endpoint, 59_000) == Admitted).count();
        assert_eq!(admitted, passes);
    }
}

/// 2000 in an hour and 33 in a minute: a refusal by the minute does not use tokens of the hour.
fn hour_and_minute() -> Gateway<8> {
    Gateway::with_large_table(&[rule("layers", vec![plain(2000, HOUR_MS), plain(33, MINUTE_MS)])])
}

/// Sends requests evenly over one minute, and returns how many are admitted.
fn minute(gateway: &mut Gateway<8>, minute: u64, attempts: u64) -> u64 {
    let at = |i: u64| minute * MINUTE_MS + i * MINUTE_MS / attempts;
    (0..attempts).filter(|i| gateway.request(BOB, at(*i)) == Admitted).count() as u64
}

#[test]
fn refusals_by_the_minute_do_not_use_the_hour() {
    let mut gateway = hour_and_minute();
    let admitted: u64 = (0..60).map(|i| minute(&mut gateway, i, 50)).sum();
    assert_eq!(admitted, 33 * 60);
    let hour = gateway.context.result.charges.iter().find(|charge| charge.request.limit == 2000);
    assert_eq!(hour.map(|charge| charge.usage.used), Some(1980));
}

#[test]
fn a_used_up_hour_refuses_although_the_minute_has_room() {
    let mut gateway = Gateway::with_large_table(&[rule("layers", vec![plain(70, HOUR_MS), plain(33, MINUTE_MS)])]);
    let admitted: Vec<u64> = [0, 1, 2, 3, 59, 60].map(|i| minute(&mut gateway, i, 50)).into();
    assert_eq!(admitted, [33, 33, 4, 0, 0, 33]);
}

#[test]
fn unused_tokens_roll_over_up_to_the_capacity() {
    let mut gateway = only(Limit { capacity: Some(150), ..plain(100, HOUR_MS) });
    // A new key has 150 tokens, so 100 are left at 0:00.
    assert_eq!(gateway.request_tokens(BOB, 50, 0), Admitted);
    for (minute, consumed, left) in
        [(0, 0, 100), (30, 15, 85), (45, 15, 70), (60, 0, 150), (90, 30, 120), (120, 0, 150)]
    {
        let now_ms = minute * MINUTE_MS;
        assert_eq!(gateway.request_tokens(BOB, consumed, now_ms), Admitted);
        assert_eq!(remaining(&mut gateway, BOB, now_ms).0, left, "at minute {minute}");
    }
}

#[test]
fn a_new_key_equals_one_idle_for_long() {
    for capacity in [100, 120, 150] {
        let mut gateway = only(Limit { capacity: Some(capacity), ..plain(100, HOUR_MS) });
        assert_eq!(gateway.request_tokens(BOB, capacity, 0), Admitted);
        assert_eq!(remaining(&mut gateway, BOB, 0).0, 0);
        assert_eq!(remaining(&mut gateway, BOB, HOUR_MS).0, 100);
        for hours in [2, 3, 1000] {
            assert_eq!(remaining(&mut gateway, BOB, hours * HOUR_MS).0, i64::from(capacity));
        }
        assert_eq!(remaining(&mut gateway, ALICE, HOUR_MS), (i64::from(capacity), 2 * HOUR_MS));
    }
}

/// Days with an offset, which is the Unix time of the start of one of them.
#[test]
fn days_start_at_their_offset() {
    // 2024-01-01T00:00:00Z, and 17:00:00Z: nine in the morning, Pacific standard time.
    for offset_ms in [1_704_067_200_000, 1_704_128_400_000] {
        let mut gateway = only(limit(1, Windows::Even { period_ms: DAY_MS, offset_ms }));
        let change_ms = offset_ms + 400 * DAY_MS;
        assert_eq!((gateway.request(BOB, change_ms - 1), gateway.remaining().1), (Admitted, change_ms));
        assert_eq!((gateway.request(BOB, change_ms), gateway.remaining().1), (Admitted, change_ms + DAY_MS));
        assert_eq!(gateway.request(BOB, change_ms + DAY_MS - 1), Refused);
    }
}

#[test]
fn random_windows_do_not_all_change_at_once() {
    let mut gateway = only(limit(1, Windows::Random { period_ms: DAY_MS }));
    let mut ends: Vec<u64> = (0..100).map(|client| remaining(&mut gateway, client, 7 * DAY_MS).1).collect();
    assert!(ends.iter().all(|end_ms| (1..=DAY_MS).contains(&(end_ms - 7 * DAY_MS))));
    ends.sort_unstable();
    ends.dedup();
    assert!(ends.len() > 95, "windows of 100 clients have only {} different ends", ends.len());
    // Gateways with the same seed have the same windows.
    let mut other = only(limit(1, Windows::Random { period_ms: DAY_MS }));
    assert_eq!(remaining(&mut gateway, BOB, 0), remaining(&mut other, BOB, 0));
}

#[test]
fn a_reservation_is_charged_to_later_windows() {
    let mut gateway = only(Limit { reserve: 200, ..plain(1000, MINUTE_MS) });
    assert_eq!(gateway.request_tokens(BOB, 1000, 0), Admitted);
    assert_eq!(gateway.request(BOB, 0), Refused, "the request may not reserve");
    gateway.context.inputs.reserve = true;
    assert_eq!((gateway.request_tokens(BOB, 150, 1), gateway.remaining().0), (DelayedUntil(MINUTE_MS), -150));
    assert_eq!(gateway.request_tokens(BOB, 51, 2), Refused);
    assert_eq!((gateway.request_tokens(BOB, 50, 3), gateway.remaining().0), (DelayedUntil(MINUTE_MS), -200));
    assert_eq!(gateway.request(BOB, 4), Refused);
    gateway.context.inputs.reserve = false;
    // The next window grants that many fewer tokens.
    assert_eq!(remaining(&mut gateway, BOB, MINUTE_MS).0, 800);
    assert_eq!(
        (gateway.request_tokens(BOB, 801, MINUTE_MS), gateway.request_tokens(BOB, 800, MINUTE_MS)),
        (Refused, Admitted)
    );
}

#[test]
fn a_reservation_reports_the_window_that_covers_it() {
    let mut gateway = only(Limit { reserve: 10, ..plain(3, MINUTE_MS) });
    gateway.context.inputs.reserve = true;
    assert_eq!(gateway.request_tokens(BOB, 3, 0), Admitted);
    // time + period * ceil(-remaining / limit)
    for (remaining_after, window) in
        [(-1, 1), (-2, 1), (-3, 1), (-4, 2), (-5, 2), (-6, 2), (-7, 3), (-8, 3), (-9, 3), (-10, 4)]
    {
        assert_eq!(
            (gateway.request(BOB, 7), gateway.remaining().0),
            (DelayedUntil(window * MINUTE_MS), remaining_after)
        );
    }
    assert_eq!(gateway.request(BOB, 7), Refused);
}

/// A reservation in the last minute of the hour is charged to the next minute and to the next hour.
#[test]
fn a_reservation_is_charged_to_later_windows_of_every_layer() {
    for shards in [1, 2] {
        let layers = vec![Limit { reserve: 1, ..plain(1, MINUTE_MS) }, Limit { shards, ..plain(2, HOUR_MS) }];
        let mut gateway = Gateway::with_large_table(&[rule("layers", layers)]);
        let last_ms = HOUR_MS - 1;
        gateway.context.inputs.reserve = true;
        assert_eq!([gateway.request(BOB, last_ms), gateway.request(BOB, last_ms)], [Admitted, DelayedUntil(HOUR_MS)]);
        gateway.context.inputs.reserve = false;
        let admitted = (1..60).filter(|i| gateway.request(BOB, HOUR_MS + i * MINUTE_MS) == Admitted).count();
        assert_eq!(admitted, 1, "the other of the hour's two tokens was reserved");
    }
}

#[test]
fn ten_shards_grant_as_much_as_one_counter() {
    for (tokens, shards) in [(1000, 10), (1003, 10), (7, 10), (10, 3), (1, 4)] {
        let mut gateway = only(Limit { shards, ..plain(tokens, MINUTE_MS) });
        let admitted = (0..2 * tokens).filter(|i| {
            gateway.context.inputs.own_shard = i % 7;
            gateway.request(BOB, 5) == Admitted
        });
        assert_eq!(admitted.count() as u32, tokens);
        assert_eq!((gateway.remaining(), gateway.retry_at_ms(5)), ((0, MINUTE_MS), Some(MINUTE_MS)));
    }
    assert_eq!(DecisionContext::for_worker(3).inputs.own_shard, 3);
}

#[test]
fn a_global_counter_is_shared_by_all_keys() {
    let mut gateway = Gateway::with_large_table(&[Rule {
        key: vec![KeyPart::GLOBAL],
        ..rule("sign-ups", vec![plain(100, HOUR_MS)])
    }]);
    let all: Vec<Expected> = (0..100).map(|client| gateway.request(client, client)).collect();
    assert!(all.iter().all(|one| *one == Admitted));
    assert_eq!((gateway.request(100, 100), gateway.retry_at_ms(100)), (Refused, Some(HOUR_MS)));
}

#[test]
fn a_peek_consumes_nothing() {
    let mut gateway = only(Limit { capacity: Some(7), ..plain(5, MINUTE_MS) });
    for _ in 0..10 {
        assert_eq!(remaining(&mut gateway, BOB, 3), (7, MINUTE_MS));
    }
    assert_eq!(gateway.table.stats(3).live, 0);
}
