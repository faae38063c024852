//! Shards whose tokens roll over or are reserved, compared with one account: they never admit what it would refuse, and hold
//! less than it by at most one request for each shard.

use proptest::prelude::*;
use transom_limiter::acquire::{AcquireResult, Charge, acquire_peeked, peek_all};
use transom_limiter::bucket::Key;
use transom_limiter::limit::Limit;
use transom_limiter::sharded_counter::Sharding;
use transom_limiter::table::{Counter, Table};
use transom_limiter::window::Time;
use transom_limiter::window_kind::AcquireRequest;

use crate::oracle::Expected::{Admitted, DelayedUntil, Refused};
use crate::support::{Gateway, START_MS, plain, rule};

const PERIOD_MS: u64 = 100;
const CLIENT: u64 = 7;
const MAX_COST: u32 = 4;

/// The account that the shards replace.
struct Account {
    limit: Limit,
    left: i64,
    window: u64,
}

impl Account {
    fn new(limit: Limit) -> Account {
        Account { left: i64::from(limit.capacity()), window: START_MS / PERIOD_MS, limit }
    }

    /// The tokens left at this time; negative: owed to later windows.
    fn left_at(&mut self, now_ms: u64) -> i64 {
        let windows = now_ms / PERIOD_MS - self.window;
        let granted = windows as i64 * i64::from(self.limit.tokens);
        self.left = (self.left + granted).min(i64::from(self.limit.capacity()));
        self.window += windows;
        self.left
    }
}

fn settings() -> impl Strategy<Value = Limit> {
    (2..40_u32, prop_oneof![Just(0), 1..60_u32], prop_oneof![Just(0), 1..20_u32], 2..6_u32).prop_map(
        |(tokens, more, reserve, shards)| Limit {
            capacity: Some(tokens + more),
            reserve,
            shards: shards.min(tokens),
            ..plain(tokens, PERIOD_MS)
        },
    )
}

/// A request: the time since the one before, its cost, the worker, whether it may be reserved, and whether it is repeated at
/// the time that its refusal states.
type Step = (u64, u32, u32, bool, bool);

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let advance = prop_oneof![6 => Just(0_u64), 2 => 0..60_u64, 1 => 60..500_u64];
    prop::collection::vec((advance, 1..=MAX_COST, 0..6_u32, any::<bool>(), any::<bool>()), 1..300)
}

/// Plays requests, and compares each decision with the account.
fn compare(limit: &Limit, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut gateway = Gateway::with_large_table(&[rule("only", vec![limit.clone()])]);
    let mut account = Account::new(limit.clone());
    let may_lack = i64::from(limit.shards * MAX_COST);
    let mut now_ms = START_MS;
    for (advance_ms, cost, own_shard, reserve, repeats) in steps.iter().copied() {
        now_ms += advance_ms;
        (gateway.context.inputs.own_shard, gateway.context.inputs.reserve) = (own_shard, reserve);
        let left = account.left_at(now_ms);
        let taken = i64::from(cost);
        let decision = gateway.request_tokens(CLIENT, cost, now_ms);
        let remaining = i64::from(limit.capacity()) - gateway.context.result.charges.as_slice()[0].usage.used as i64;
        match decision {
            Admitted => {
                prop_assert!(left >= taken, "{cost} of {left}");
                account.left -= taken;
            }
            DelayedUntil(until_ms) => {
                let windows = until_ms / PERIOD_MS - now_ms / PERIOD_MS;
                let granted = windows as i64 * i64::from(limit.tokens);
                prop_assert!(reserve && until_ms % PERIOD_MS == 0);
                prop_assert!(left + granted >= taken, "{cost} of {left} and {granted}");
                prop_assert!(left - taken >= -i64::from(limit.reserve));
                account.left -= taken;
            }
            Refused => {
                prop_assert!(left - may_lack < taken, "{cost} of {left} is refused");
            }
        }
        prop_assert!((account.left - may_lack..=account.left).contains(&remaining), "{remaining}, {}", account.left);
        if decision != Refused || !repeats {
            continue;
        }
        gateway.context.inputs.reserve = false;
        let Some(retry_at_ms) = gateway.retry_at_ms(now_ms) else {
            prop_assert!(cost > limit.capacity());
            continue;
        };
        if retry_at_ms > now_ms + 1 {
            prop_assert_eq!(gateway.request_tokens(CLIENT, cost, retry_at_ms - 1), Refused);
        }
        prop_assert_eq!(gateway.request_tokens(CLIENT, cost, retry_at_ms), Admitted);
        prop_assert!(account.left_at(retry_at_ms) >= taken);
        account.left -= taken;
        now_ms = retry_at_ms;
    }
    Ok(())
}

/// A shard at its capacity gains nothing: only the other one's tokens of the next windows are waited for.
#[test]
fn the_time_to_retry_counts_what_each_shard_gains() {
    let mut gateway =
        Gateway::with_large_table(&[rule("r", vec![Limit { shards: 2, capacity: Some(6), ..plain(3, 100) }])]);
    // The first shard has four of six tokens, and gains two in each window.
    assert_eq!((gateway.request_tokens(0, 4, 50), gateway.request_tokens(0, 5, 50)), (Admitted, Refused));
    assert_eq!(gateway.retry_at_ms(50), Some(200));
    assert_eq!((gateway.request_tokens(0, 5, 199), gateway.request_tokens(0, 5, 200)), (Refused, Admitted));
}

/// Requests begin with the shard that is used up first, of equal ones with their own.
#[test]
fn the_fullest_shard_and_one_over_its_part_are_found() {
    let counter = Counter { key: Key::new(1, 1 << 20), layer: 7 };
    let request = AcquireRequest::plain(100, 10, 0);
    // The shards have 4, 3 and 3 tokens.
    for (used, fullest) in [([0, 0, 0], 2), ([1, 3, 1], 0), ([3, 3, 3], 0)] {
        let table = Table::<8>::with_capacity(64).expect("there is memory");
        for (first_shard, cost) in used.into_iter().enumerate() {
            let sharding = Sharding { shards: 3, first_shard: first_shard as u32 };
            let request = AcquireRequest { cost, ..request };
            sharding.acquire(&table, counter, request, Time::plain(50), &mut Vec::new());
        }
        let peek = |limit| {
            let request = AcquireRequest::plain(100, limit, 0);
            Sharding { shards: 3, first_shard: 2 }.peek(&table, counter, request, Time::plain(50))
        };
        assert_eq!(
            (peek(10).usage.used, peek(10).fullest_shard),
            (used.iter().sum::<u32>().into(), fullest),
            "{used:?}"
        );
        // Of six tokens, each shard has two.
        assert_eq!(
            [9, 8, 6].map(|limit| peek(limit).is_over_part),
            [false, used == [3, 3, 3], used != [0, 0, 0]],
            "{used:?}"
        );
    }
}

proptest! {
    #![proptest_config(crate::config())]

    #[test]
    fn shards_admit_what_one_account_would_but_for_one_request_each(limit in settings(), steps in steps()) {
        compare(&limit, &steps)?;
    }
}

/// Shards that gain one and two tokens in each window. If requests began with the one that holds the most tokens, they would
/// fill up at different times, and lack nine tokens.
#[test]
fn shards_with_unequal_parts_fill_up_together() -> Result<(), TestCaseError> {
    let limit = Limit { capacity: Some(57), shards: 2, ..plain(3, PERIOD_MS) };
    let requests = [
        (0, 2),
        (19, 1),
        (0, 3),
        (34, 2),
        (81, 1),
        (0, 3),
        (0, 1),
        (0, 1),
        (253, 4),
        (255, 2),
        (0, 2),
        (0, 1),
        (0, 4),
        (258, 1),
    ];
    compare(&limit, &requests.map(|(advance_ms, cost)| (advance_ms, cost, 0, false, false)))
}

#[test]
fn shards_accumulate_and_lend_as_one_account() {
    let limit = Limit { capacity: Some(30), reserve: 5, shards: 4, ..plain(10, PERIOD_MS) };
    let mut gateway = Gateway::with_large_table(&[rule("only", vec![limit])]);
    let mut admitted = |now_ms: u64, reserve: bool| {
        gateway.context.inputs.reserve = reserve;
        let decisions = (0..100).map(|i| {
            gateway.context.inputs.own_shard = i % 4;
            gateway.request(CLIENT, now_ms)
        });
        decisions.fold((0, 0), |(now, later), decision| match decision {
            Admitted => (now + 1, later),
            DelayedUntil(until_ms) => {
                assert_eq!(until_ms, now_ms / PERIOD_MS * PERIOD_MS + PERIOD_MS);
                (now, later + 1)
            }
            Refused => (now, later),
        })
    };
    let start_ms = START_MS / PERIOD_MS * PERIOD_MS;
    assert_eq!(admitted(start_ms, true), (30, 5));
    assert_eq!(admitted(start_ms + PERIOD_MS, false), (5, 0), "five tokens were reserved");
    assert_eq!(admitted(start_ms + 3 * PERIOD_MS, false), (20, 0));
    assert_eq!(admitted(start_ms + 9 * PERIOD_MS, false), (30, 0));
}

/// The limit was lowered, so that one shard has used more than its part. Two requests have found the same last token.
#[test]
fn a_request_that_loses_the_last_token_reports_the_usage_without_its_cost() {
    let table = Table::<8>::with_buckets(1, 1).expect("there is memory");
    let whole = Counter { key: Key { bucket_hash: 0, tag: 1 }, layer: 0 };
    let (time, sharding) = (Time::plain(50), Sharding { shards: 2, first_shard: 0 });
    let peeked = |limit, cost| {
        let mut charge = Charge::new(whole, AcquireRequest::plain(100, limit, cost));
        charge.sharding = sharding;
        assert!(peek_all(&table, std::slice::from_mut(&mut charge), time));
        charge
    };
    let acquire = |mut charge: Charge| {
        let result = acquire_peeked(&table, std::slice::from_mut(&mut charge), &mut Vec::new(), time);
        (result, charge.usage.used)
    };
    assert_eq!(acquire(peeked(8, 3)), (AcquireResult::Admitted, 3));
    let (first, second) = (peeked(4, 1), peeked(4, 1));
    assert_eq!([acquire(first), acquire(second)], [(AcquireResult::Admitted, 4), (AcquireResult::Refused, 4)]);
    assert_eq!(sharding.peek(&table, whole, AcquireRequest::plain(100, 4, 0), time).usage.used, 4);
}
