//! Properties of leases, compared with a map of the deposited and unspent tokens.

use std::collections::HashMap;

use proptest::prelude::*;
use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::counter::CounterWord;
use transom_limiter::leased_tokens::DepositResult;
use transom_limiter::table::{Counter, CounterResult, Receipt, Table};
use transom_limiter::window::Time;
use transom_limiter::window_kind::{AcquireRequest, Acquired, Usage, refunded};

use crate::support::{START_MS, counter, mix};

const WINDOW_MS: u64 = 40;
/// More tokens than any lease holds.
const LIMIT: u32 = 10_000;
/// The ordinary counter that requests also charge.
const ORDINARY: u64 = 99;
const ORDINARY_LIMIT: u32 = 25;

#[derive(Clone, Debug)]
enum Operation {
    /// `ahead` counts windows from the current one.
    Deposit {
        key: u64,
        ahead: i64,
        tokens: u32,
    },
    /// One request that charges the leases of both keys and the ordinary counter.
    Spend {
        keys: [u64; 2],
        cost: u32,
    },
    /// Refunds the last charge that was not refunded yet.
    Refund,
    Withdraw {
        key: u64,
        ahead: i64,
        most: u32,
    },
    SetKnownUsage {
        key: u64,
        ahead: i64,
        used: u32,
    },
}

/// Operations, each with the number of its clock and the time by which this clock moves before.
fn operations() -> impl Strategy<Value = Vec<(usize, i64, Operation)>> {
    let key = || (0..5u64, prop_oneof![6 => Just(0i64), 1 => -1..2i64]);
    let operation = prop_oneof![
        3 => (key(), 0..6u32).prop_map(|((key, ahead), tokens)| Operation::Deposit { key, ahead, tokens }),
        5 => ([0..5u64, 0..5u64], 0..4u32).prop_map(|(keys, cost)| Operation::Spend { keys, cost }),
        2 => Just(Operation::Refund),
        1 => (key(), 0..9u32).prop_map(|((key, ahead), most)| Operation::Withdraw { key, ahead, most }),
        1 => (key(), 0..9u32).prop_map(|((key, ahead), used)| Operation::SetKnownUsage { key, ahead, used }),
    ];
    let moves = prop_oneof![6 => Just(0i64), 3 => 1..20i64, 1 => 20..100i64, 1 => -30..0i64];
    prop::collection::vec((0..3usize, moves, operation), 1..150)
}

/// By key, the end of a window and a number of tokens.
type Entries = HashMap<u64, (u64, u32)>;

#[derive(Default)]
struct Model {
    leases: Entries,
    known_usages: Entries,
    /// By key and end of the window: tokens deposited, and tokens spent or withdrawn and not refunded.
    deposited: HashMap<(u64, u64), u32>,
    spent: HashMap<(u64, u64), u32>,
    /// By the end of the window.
    ordinary: HashMap<u64, u32>,
    /// The charges of each request that can still be refunded.
    receipts: Vec<Vec<(u64, AcquireRequest, Receipt)>>,
}

fn end_ms(now_ms: u64, ahead: i64) -> u64 {
    (now_ms / WINDOW_MS + 1).saturating_add_signed(ahead) * WINDOW_MS
}

fn ordinary(now_ms: u64, cost: u32) -> AcquireRequest {
    AcquireRequest::plain(end_ms(now_ms, 0), ORDINARY_LIMIT, cost)
}

fn leased(now_ms: u64, cost: u32) -> AcquireRequest {
    AcquireRequest::plain(end_ms(now_ms, 0), LIMIT, cost).leased()
}

/// The end of the lease of a key, and the tokens left in it.
fn left<const W: usize>(table: &Table<W>, key: u64, now_ms: u64) -> (u64, u32) {
    let (usage, _) = table.peek(counter(key).lease(), leased(now_ms, 1), Time::plain(now_ms));
    (usage.end_ms, LIMIT - usage.used as u32)
}

impl Model {
    /// The entry of a key, if its window is open.
    fn live(usages: &Entries, key: u64, now_ms: u64) -> Option<(u64, u32)> {
        usages.get(&key).copied().filter(|(end_ms, _)| *end_ms > now_ms)
    }

    fn deposit<const W: usize>(
        &mut self,
        table: &Table<W>,
        key: u64,
        end_ms: u64,
        tokens: u32,
        now_ms: u64,
    ) -> DepositResult {
        let outcome = table.deposit(counter(key), end_ms, tokens, now_ms);
        if outcome == DepositResult::Stored {
            *self.deposited.entry((key, end_ms)).or_default() += tokens;
            let lease = self.leases.entry(key).or_insert((end_ms, 0));
            *lease = (end_ms, if lease.0 == end_ms { lease.1 } else { 0 } + tokens);
        }
        outcome
    }

    fn withdraw<const W: usize>(&mut self, table: &Table<W>, key: u64, end_ms: u64, most: u32) -> u32 {
        let tokens = table.withdraw(counter(key), end_ms, most);
        *self.spent.entry((key, end_ms)).or_default() += tokens;
        if let Some(lease) = self.leases.get_mut(&key).filter(|lease| lease.0 == end_ms) {
            lease.1 -= tokens;
        }
        tokens
    }

    /// Decides one request; if its time is too late, again at the horizon of the table.
    fn spend<const W: usize>(&mut self, table: &Table<W>, keys: &[u64], cost: u32, mut now_ms: u64) -> AcquireResult {
        loop {
            let mut charges: Vec<Charge> =
                keys.iter().map(|key| Charge::new(counter(*key).lease(), leased(now_ms, cost))).collect();
            charges.push(Charge::new(counter(ORDINARY), ordinary(now_ms, cost)));
            let result = acquire_all(table, &mut charges, &mut Vec::new(), Time::plain(now_ms));
            match result {
                AcquireResult::Late => now_ms = table.horizon_ms(),
                AcquireResult::Refused => return result,
                AcquireResult::Admitted => {
                    let shard_receipts = charges.iter().filter_map(|charge| charge.receipt());
                    let keys = keys.iter().copied().chain([ORDINARY]);
                    let receipts: Vec<_> = keys
                        .zip(shard_receipts)
                        .map(|(key, shard_receipt)| (key, shard_receipt.request, shard_receipt.receipt))
                        .collect();
                    for &(key, _, receipt) in receipts.iter().filter(|(key, ..)| *key != ORDINARY) {
                        *self.spent.entry((key, receipt.end_ms())).or_default() += cost;
                        let lease = self.leases.get_mut(&key).expect("spent tokens were deposited");
                        assert_eq!((lease.0, lease.1 >= cost), (receipt.end_ms(), true), "out of {key}");
                        lease.1 -= cost;
                    }
                    for &(_, _, receipt) in receipts.iter().filter(|(key, ..)| *key == ORDINARY) {
                        *self.ordinary.entry(receipt.end_ms()).or_default() += cost;
                    }
                    self.receipts.push(receipts);
                    return result;
                }
            }
        }
    }

    fn refund<const W: usize>(&mut self, table: &Table<W>, now_ms: u64) {
        for (key, request, receipt) in self.receipts.pop().unwrap_or_default() {
            let tokens = receipt.tokens() as u32;
            if !table.refund(receipt, request, Time::plain(now_ms)) {
                continue;
            }
            if key == ORDINARY {
                *self.ordinary.entry(receipt.end_ms()).or_default() -= tokens;
                continue;
            }
            *self.spent.entry((key, receipt.end_ms())).or_default() -= tokens;
            let lease = self.leases.get_mut(&key).expect("refunded tokens were deposited");
            assert_eq!(lease.0, receipt.end_ms(), "a refund never reaches a later lease");
            lease.1 += tokens;
        }
    }
}

/// The usage reported for a lease that does not exist.
fn nothing_leased(request: AcquireRequest) -> Usage {
    Usage { used: request.ceiling, end_ms: request.end_ms }
}

/// The keys of a request without duplicates.
fn distinct(keys: [u64; 2]) -> Vec<u64> {
    if keys[0] == keys[1] { vec![keys[0]] } else { keys.to_vec() }
}

proptest! {
    #![proptest_config(crate::config())]

    /// With one clock and free slots, the table equals the map exactly.
    #[test]
    fn a_lease_holds_the_deposited_and_unspent_tokens(operations in operations()) {
        let table = Table::<8>::with_buckets(32, 8).expect("there is memory");
        let (mut model, mut now_ms) = (Model::default(), START_MS);
        for (_, shift_ms, operation) in operations {
            now_ms += shift_ms.max(0) as u64;
            let lease = |model: &Model, key| Model::live(&model.leases, key, now_ms);
            match operation {
                Operation::Deposit { key, ahead, tokens } => {
                    let end_ms = end_ms(now_ms, ahead);
                    let is_expired = end_ms <= now_ms || lease(&model, key).is_some_and(|lease| lease.0 > end_ms);
                    let expected = if is_expired { DepositResult::Expired } else { DepositResult::Stored };
                    prop_assert_eq!(model.deposit(&table, key, end_ms, tokens, now_ms), expected);
                }
                Operation::Spend { keys, cost } => {
                    let keys = distinct(keys);
                    let left = |key: &u64| lease(&model, *key).map_or(0, |lease| lease.1);
                    let used = model.ordinary.get(&end_ms(now_ms, 0)).copied().unwrap_or(0);
                    let fits = keys.iter().all(|key| left(key) >= cost) && used + cost <= ORDINARY_LIMIT;
                    let expected = if fits { AcquireResult::Admitted } else { AcquireResult::Refused };
                    prop_assert_eq!(model.spend(&table, &keys, cost, now_ms), expected);
                }
                Operation::Refund => model.refund(&table, now_ms),
                Operation::Withdraw { key, ahead, most } => {
                    let end_ms = end_ms(now_ms, ahead);
                    let of_window = model.leases.get(&key).filter(|lease| lease.0 == end_ms);
                    let expected = of_window.map_or(0, |lease| lease.1).min(most);
                    let is_over = end_ms <= now_ms;
                    let tokens = model.withdraw(&table, key, end_ms, most);
                    // The slot of an expired lease may have been reused for another key.
                    prop_assert!(tokens == expected || is_over && tokens == 0, "{} instead of {}", tokens, expected);
                }
                Operation::SetKnownUsage { key, ahead, used } => {
                    let end_ms = end_ms(now_ms, ahead);
                    table.set_known_usage(counter(key), end_ms, used, now_ms);
                    let known = Model::live(&model.known_usages, key, now_ms).map_or(0, |known_usage| known_usage.0);
                    if end_ms > now_ms && end_ms >= known {
                        model.known_usages.insert(key, (end_ms, used));
                    }
                }
            }
            for key in 0..5 {
                prop_assert_eq!(table.leased_tokens(counter(key), now_ms), lease(&model, key).map_or(0, |lease| lease.1));
                prop_assert_eq!(table.known_usage(counter(key), now_ms), Model::live(&model.known_usages, key, now_ms));
            }
            let used = model.ordinary.get(&end_ms(now_ms, 0)).copied().unwrap_or(0);
            let (usage, _) = table.peek(counter(ORDINARY), ordinary(now_ms, 1), Time::plain(now_ms));
            prop_assert_eq!(usage.used, u64::from(used));
        }
        prop_assert_eq!(table.overflow_charges_total(), 0);
    }

    /// With differing clocks and a table that is mostly full: no more tokens of a window are spent than were deposited.
    /// While the lease exists, it holds all the others.
    #[test]
    fn no_more_is_spent_than_was_deposited(operations in operations(), buckets in 1..5usize) {
        let table = Table::<2>::with_buckets(buckets, 1).expect("there is memory");
        let (mut model, mut clocks) = (Model::default(), [START_MS; 3]);
        for (clock, shift_ms, operation) in operations {
            clocks[clock] = clocks[clock].saturating_add_signed(shift_ms);
            let now_ms = clocks[clock];
            match operation {
                Operation::Deposit { key, ahead, tokens } => {
                    let _ = model.deposit(&table, key, end_ms(now_ms, ahead), tokens, now_ms);
                }
                Operation::Spend { keys, cost } => {
                    model.spend(&table, &distinct(keys), cost, now_ms);
                }
                Operation::Refund => model.refund(&table, now_ms),
                Operation::Withdraw { key, ahead, most } => {
                    model.withdraw(&table, key, end_ms(now_ms, ahead), most);
                }
                Operation::SetKnownUsage { key, ahead, used } => table.set_known_usage(counter(key), end_ms(now_ms, ahead), used, now_ms),
            }
            for key in 0..5 {
                let (end_ms, left) = left(&table, key, now_ms);
                let of = |sums: &HashMap<(u64, u64), u32>| sums.get(&(key, end_ms)).copied().unwrap_or(0);
                prop_assert!(left == 0 || left + of(&model.spent) == of(&model.deposited));
            }
            prop_assert!(model.spent.iter().all(|(at, spent)| *spent <= model.deposited.get(at).copied().unwrap_or(0)));
            prop_assert!(model.ordinary.values().all(|used| *used <= ORDINARY_LIMIT));
        }
    }

    #[test]
    fn what_is_withdrawn_cannot_be_spent(deposited in 0..9u32, most in 0..12u32, cost in 1..4u32) {
        let table = Table::<8>::with_buckets(8, 1).expect("there is memory");
        let mut model = Model::default();
        prop_assert_eq!(model.deposit(&table, 1, START_MS + 50, deposited, START_MS), DepositResult::Stored);
        let withdrawn = model.withdraw(&table, 1, START_MS + 50, most);
        prop_assert_eq!(withdrawn, deposited.min(most));
        let request = leased(START_MS, cost);
        let spend = || table.acquire(counter(1).lease(), request, Time::plain(START_MS), None);
        let spent = std::iter::repeat_with(spend).take_while(|outcome| matches!(outcome, CounterResult::Acquired(..))).count();
        prop_assert_eq!(spent as u32, (deposited - withdrawn) / cost);
        prop_assert_eq!(table.leased_tokens(counter(1), START_MS), (deposited - withdrawn) % cost);
    }

    #[test]
    fn a_refund_never_reaches_a_later_lease(
        tag in 1..4u64, end_ms in 1..4u64, count in 0..9u32, taken_tag in 1..4u64, taken_end_ms in 1..4u64, cost in 0..9u32,
    ) {
        let taken = Acquired { tag: taken_tag, end_ms: taken_end_ms, used: 20, tokens: cost.into() };
        let request = AcquireRequest::plain(taken_end_ms, 20, cost).leased();
        match refunded(CounterWord::new(tag, end_ms, count), taken, request, Time::plain(0)) {
            Some(more) => {
                prop_assert_eq!((taken_tag, taken_end_ms), (tag, end_ms));
                prop_assert_eq!(more, CounterWord::new(tag, end_ms, count + cost));
            }
            None => prop_assert_ne!((taken_tag, taken_end_ms), (tag, end_ms)),
        }
    }

    /// A lease is stored only in a free slot and displaces no counter. Until its end no other key takes its slot, even
    /// if the lease is empty.
    #[test]
    fn a_full_table_keeps_no_lease(keys in prop::collection::vec((0..30u64, any::<bool>()), 1..40), buckets in 1..4usize) {
        let table = Table::<2>::with_buckets(buckets, 1).expect("there is memory");
        let (mut deposited, mut counted) = (HashMap::<u64, u32>::new(), HashMap::<u64, u64>::new());
        for (id, is_lease) in keys {
            let live = table.stats(START_MS).live;
            if is_lease {
                match table.deposit(counter(id), START_MS + 50, 2, START_MS) {
                    DepositResult::Stored => {
                        let left = deposited.entry(id).or_default();
                        *left += 2;
                        prop_assert!(table.stats(START_MS).live == live + usize::from(*left == 2));
                        let spent = table.acquire(counter(id).lease(), leased(START_MS, 2), Time::plain(START_MS), None);
                        prop_assert!(matches!(spent, CounterResult::Acquired(..)));
                        prop_assert!(table.deposit(counter(id), START_MS + 50, 2, START_MS) == DepositResult::Stored);
                    }
                    DepositResult::Full => {
                        prop_assert!(!deposited.contains_key(&id) && table.stats(START_MS).live == live);
                        let request = leased(START_MS, 1);
                        let none = CounterResult::Full(nothing_leased(request));
                        prop_assert_eq!(table.acquire(counter(id).lease(), request, Time::plain(START_MS), None), none);
                        prop_assert_eq!(table.peek(counter(id).lease(), request, Time::plain(START_MS)).0, nothing_leased(request));
                        prop_assert_eq!(table.withdraw(counter(id), START_MS + 50, 9), 0);
                    }
                    DepositResult::Expired => prop_assert!(false, "no window ended"),
                }
            } else {
                let overflowed = table.overflow_charges_total();
                let result = table.acquire(counter(id), AcquireRequest::plain(START_MS + 50, LIMIT, 1), Time::plain(START_MS), None);
                if matches!(result, CounterResult::Acquired(..)) && table.overflow_charges_total() == overflowed {
                    *counted.entry(id).or_default() += 1;
                }
            }
            for (id, left) in &deposited {
                prop_assert_eq!(table.leased_tokens(counter(*id), START_MS), *left);
            }
            for (id, used) in &counted {
                let request = AcquireRequest::plain(START_MS + 50, LIMIT, 1);
                prop_assert_eq!(table.peek(counter(*id), request, Time::plain(START_MS)).0.used, *used);
            }
        }
    }

    /// A counter, its lease and its known usage are three separate words, whatever the tag is.
    #[test]
    fn a_lease_is_never_the_counter(id in any::<u64>(), deposited in 1..9u32, known in 1..9u32) {
        let table = Table::<8>::with_buckets(4, 1).expect("there is memory");
        let counter: Counter = counter(mix(id));
        let (request, time) = (AcquireRequest::plain(START_MS + 50, 9, 4), Time::plain(START_MS));
        prop_assert!(matches!(table.acquire(counter, request, time, None), CounterResult::Acquired(..)));
        prop_assert_eq!(table.deposit(counter, START_MS + 50, deposited, START_MS), DepositResult::Stored);
        table.set_known_usage(counter, START_MS + 50, known, START_MS);
        prop_assert_eq!(table.leased_tokens(counter, START_MS), deposited);
        prop_assert_eq!(table.known_usage(counter, START_MS), Some((START_MS + 50, known)));
        prop_assert_eq!((table.peek(counter, request, time).0.used, table.stats(START_MS).live), (4, 3));
    }
}
