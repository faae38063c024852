//! Properties of leases, compared with a map of the deposited and unspent tokens.

use std::collections::HashMap;

use proptest::prelude::*;
use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::counter::{AcquireRequest, Acquired, CounterWord, Usage, refunded};
use transom_limiter::leased_tokens::DepositResult;
use transom_limiter::table::{Counter, CounterResult, Receipt, Table};
use transom_limiter::window::Time;

use crate::support::{START_MS, counter, mixed};

const WINDOW_MS: u64 = 40;
/// More than any purse holds.
const LIMIT: u32 = 10_000;
/// The ordinary counter that requests are charged on as well.
const ORDINARY: u64 = 99;
const ORDINARY_LIMIT: u32 = 25;

#[derive(Clone, Debug)]
enum Act {
    /// So many windows from the one that is open.
    Deposit {
        key: u64,
        ahead: i64,
        tokens: u32,
    },
    /// One request on the purses of both keys, and on the ordinary counter.
    Spend {
        keys: [u64; 2],
        cost: u32,
    },
    /// The last that was spent and not yet given back.
    GiveBack,
    Withdraw {
        key: u64,
        ahead: i64,
        most: u32,
    },
    Note {
        key: u64,
        ahead: i64,
        used: u32,
    },
}

/// Acts, each with the clock that it is done by and by how much that moves before.
fn acts() -> impl Strategy<Value = Vec<(usize, i64, Act)>> {
    let key = || (0..5u64, prop_oneof![6 => Just(0i64), 1 => -1..2i64]);
    let act = prop_oneof![
        3 => (key(), 0..6u32).prop_map(|((key, ahead), tokens)| Act::Deposit { key, ahead, tokens }),
        5 => ([0..5u64, 0..5u64], 0..4u32).prop_map(|(keys, cost)| Act::Spend { keys, cost }),
        2 => Just(Act::GiveBack),
        1 => (key(), 0..9u32).prop_map(|((key, ahead), most)| Act::Withdraw { key, ahead, most }),
        1 => (key(), 0..9u32).prop_map(|((key, ahead), used)| Act::Note { key, ahead, used }),
    ];
    let moves = prop_oneof![6 => Just(0i64), 3 => 1..20i64, 1 => 20..100i64, 1 => -30..0i64];
    prop::collection::vec((0..3usize, moves, act), 1..150)
}

/// What a key's purse or tally stands at: the end of its window, and a number of tokens.
type Stands = HashMap<u64, (u64, u32)>;

#[derive(Default)]
struct World {
    purses: Stands,
    tallies: Stands,
    /// Deposited per key and end of the window; spent or withdrawn, and not given back.
    deposited: HashMap<(u64, u64), u32>,
    gone: HashMap<(u64, u64), u32>,
    /// By the end of the window.
    ordinary: HashMap<u64, u32>,
    /// What was charged for each request that can still be given back.
    paid: Vec<Vec<(u64, AcquireRequest, Receipt)>>,
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

/// What is left in the purse of a key, and until when.
fn left<const W: usize>(table: &Table<W>, key: u64, now_ms: u64) -> (u64, u32) {
    let (look, _) = table.peek(counter(key).lease(), leased(now_ms, 1), Time::plain(now_ms));
    (look.end_ms, LIMIT - look.used as u32)
}

impl World {
    /// What stands there for a window that is open.
    fn live(stands: &Stands, key: u64, now_ms: u64) -> Option<(u64, u32)> {
        stands.get(&key).copied().filter(|(end_ms, _)| *end_ms > now_ms)
    }

    fn deposit<const W: usize>(
        &mut self,
        table: &Table<W>,
        key: u64,
        end_ms: u64,
        tokens: u32,
        now_ms: u64,
    ) -> DepositResult {
        let answer = table.deposit(counter(key), end_ms, tokens, now_ms);
        if answer == DepositResult::Stored {
            *self.deposited.entry((key, end_ms)).or_default() += tokens;
            let purse = self.purses.entry(key).or_insert((end_ms, 0));
            *purse = (end_ms, if purse.0 == end_ms { purse.1 } else { 0 } + tokens);
        }
        answer
    }

    fn withdraw<const W: usize>(&mut self, table: &Table<W>, key: u64, end_ms: u64, most: u32) -> u32 {
        let tokens = table.withdraw(counter(key), end_ms, most);
        *self.gone.entry((key, end_ms)).or_default() += tokens;
        if let Some(purse) = self.purses.get_mut(&key).filter(|purse| purse.0 == end_ms) {
            purse.1 -= tokens;
        }
        tokens
    }

    /// One request; what comes too late is decided again at the table's own time.
    fn spend<const W: usize>(&mut self, table: &Table<W>, keys: &[u64], cost: u32, mut now_ms: u64) -> AcquireResult {
        loop {
            let mut charges: Vec<Charge> =
                keys.iter().map(|key| Charge::new(counter(*key).lease(), leased(now_ms, cost))).collect();
            charges.push(Charge::new(counter(ORDINARY), ordinary(now_ms, cost)));
            let verdict = acquire_all(table, &mut charges, &mut Vec::new(), Time::plain(now_ms));
            match verdict {
                AcquireResult::Late => now_ms = table.horizon_ms(),
                AcquireResult::Refused => return verdict,
                AcquireResult::Admitted => {
                    let shares = charges.iter().filter_map(|charge| charge.receipt());
                    let keys = keys.iter().copied().chain([ORDINARY]);
                    let paid: Vec<_> =
                        keys.zip(shares).map(|(key, share)| (key, share.request, share.receipt)).collect();
                    for &(key, _, paid) in paid.iter().filter(|(key, ..)| *key != ORDINARY) {
                        *self.gone.entry((key, paid.end_ms())).or_default() += cost;
                        let purse = self.purses.get_mut(&key).expect("what is spent was deposited");
                        assert_eq!((purse.0, purse.1 >= cost), (paid.end_ms(), true), "out of {key}");
                        purse.1 -= cost;
                    }
                    for &(_, _, paid) in paid.iter().filter(|(key, ..)| *key == ORDINARY) {
                        *self.ordinary.entry(paid.end_ms()).or_default() += cost;
                    }
                    self.paid.push(paid);
                    return verdict;
                }
            }
        }
    }

    fn give_back<const W: usize>(&mut self, table: &Table<W>, now_ms: u64) {
        for (key, ask, paid) in self.paid.pop().unwrap_or_default() {
            let tokens = paid.tokens() as u32;
            if !table.refund(paid, ask, Time::plain(now_ms)) {
                continue;
            }
            if key == ORDINARY {
                *self.ordinary.entry(paid.end_ms()).or_default() -= tokens;
                continue;
            }
            *self.gone.entry((key, paid.end_ms())).or_default() -= tokens;
            let purse = self.purses.get_mut(&key).expect("was deposited");
            assert_eq!(purse.0, paid.end_ms(), "a refund never reaches a later purse");
            purse.1 += tokens;
        }
    }
}

/// What is said of a purse that is not there.
fn full(ask: AcquireRequest) -> Usage {
    Usage { used: ask.ceiling, end_ms: ask.end_ms }
}

/// The keys of a request, once each.
fn distinct(keys: [u64; 2]) -> Vec<u64> {
    if keys[0] == keys[1] { vec![keys[0]] } else { keys.to_vec() }
}

proptest! {
    #![proptest_config(crate::config())]

    /// By one clock, in a table with room: exactly the map.
    #[test]
    fn a_lease_holds_the_deposited_and_unspent_tokens(acts in acts()) {
        let table = Table::<8>::with_buckets(32, 8).expect("there is memory");
        let (mut world, mut now_ms) = (World::default(), START_MS);
        for (_, moves_ms, act) in acts {
            now_ms += moves_ms.max(0) as u64;
            let purse = |world: &World, key| World::live(&world.purses, key, now_ms);
            match act {
                Act::Deposit { key, ahead, tokens } => {
                    let end_ms = end_ms(now_ms, ahead);
                    let over = end_ms <= now_ms || purse(&world, key).is_some_and(|purse| purse.0 > end_ms);
                    let expected = if over { DepositResult::Expired } else { DepositResult::Stored };
                    prop_assert_eq!(world.deposit(&table, key, end_ms, tokens, now_ms), expected);
                }
                Act::Spend { keys, cost } => {
                    let keys = distinct(keys);
                    let left = |key: &u64| purse(&world, *key).map_or(0, |purse| purse.1);
                    let used = world.ordinary.get(&end_ms(now_ms, 0)).copied().unwrap_or(0);
                    let room = keys.iter().all(|key| left(key) >= cost) && used + cost <= ORDINARY_LIMIT;
                    let expected = if room { AcquireResult::Admitted } else { AcquireResult::Refused };
                    prop_assert_eq!(world.spend(&table, &keys, cost, now_ms), expected);
                }
                Act::GiveBack => world.give_back(&table, now_ms),
                Act::Withdraw { key, ahead, most } => {
                    let end_ms = end_ms(now_ms, ahead);
                    let of_window = world.purses.get(&key).filter(|purse| purse.0 == end_ms);
                    let expected = of_window.map_or(0, |purse| purse.1).min(most);
                    let gone = end_ms <= now_ms;
                    let tokens = world.withdraw(&table, key, end_ms, most);
                    // A purse that is over may be another key's slot by now.
                    prop_assert!(tokens == expected || gone && tokens == 0, "{} instead of {}", tokens, expected);
                }
                Act::Note { key, ahead, used } => {
                    let end_ms = end_ms(now_ms, ahead);
                    table.set_known_usage(counter(key), end_ms, used, now_ms);
                    let known = World::live(&world.tallies, key, now_ms).map_or(0, |tally| tally.0);
                    if end_ms > now_ms && end_ms >= known {
                        world.tallies.insert(key, (end_ms, used));
                    }
                }
            }
            for key in 0..5 {
                prop_assert_eq!(table.leased_tokens(counter(key), now_ms), purse(&world, key).map_or(0, |purse| purse.1));
                prop_assert_eq!(table.known_usage(counter(key), now_ms), World::live(&world.tallies, key, now_ms));
            }
            let used = world.ordinary.get(&end_ms(now_ms, 0)).copied().unwrap_or(0);
            let (look, _) = table.peek(counter(ORDINARY), ordinary(now_ms, 1), Time::plain(now_ms));
            prop_assert_eq!(look.used, u64::from(used));
        }
        prop_assert_eq!(table.overflow_charges_total(), 0);
    }

    /// By clocks that are apart, in a table that is mostly full: of each window no more than was deposited for it,
    /// and as long as there is a purse, all of the rest is in it.
    #[test]
    fn no_more_is_spent_than_was_deposited(acts in acts(), buckets in 1..5usize) {
        let table = Table::<2>::with_buckets(buckets, 1).expect("there is memory");
        let (mut world, mut clocks) = (World::default(), [START_MS; 3]);
        for (clock, moves_ms, act) in acts {
            clocks[clock] = clocks[clock].saturating_add_signed(moves_ms);
            let now_ms = clocks[clock];
            match act {
                Act::Deposit { key, ahead, tokens } => {
                    let _ = world.deposit(&table, key, end_ms(now_ms, ahead), tokens, now_ms);
                }
                Act::Spend { keys, cost } => {
                    world.spend(&table, &distinct(keys), cost, now_ms);
                }
                Act::GiveBack => world.give_back(&table, now_ms),
                Act::Withdraw { key, ahead, most } => {
                    world.withdraw(&table, key, end_ms(now_ms, ahead), most);
                }
                Act::Note { key, ahead, used } => table.set_known_usage(counter(key), end_ms(now_ms, ahead), used, now_ms),
            }
            for key in 0..5 {
                let (end_ms, left) = left(&table, key, now_ms);
                let of = |sums: &HashMap<(u64, u64), u32>| sums.get(&(key, end_ms)).copied().unwrap_or(0);
                prop_assert!(left == 0 || left + of(&world.gone) == of(&world.deposited));
            }
            prop_assert!(world.gone.iter().all(|(at, gone)| *gone <= world.deposited.get(at).copied().unwrap_or(0)));
            prop_assert!(world.ordinary.values().all(|used| *used <= ORDINARY_LIMIT));
        }
    }

    #[test]
    fn what_is_withdrawn_cannot_be_spent(deposited in 0..9u32, most in 0..12u32, cost in 1..4u32) {
        let table = Table::<8>::with_buckets(8, 1).expect("there is memory");
        let mut world = World::default();
        prop_assert_eq!(world.deposit(&table, 1, START_MS + 50, deposited, START_MS), DepositResult::Stored);
        let withdrawn = world.withdraw(&table, 1, START_MS + 50, most);
        prop_assert_eq!(withdrawn, deposited.min(most));
        let ask = leased(START_MS, cost);
        let spend = || table.acquire(counter(1).lease(), ask, Time::plain(START_MS), None);
        let spent = std::iter::repeat_with(spend).take_while(|answer| matches!(answer, CounterResult::Acquired(..))).count();
        prop_assert_eq!(spent as u32, (deposited - withdrawn) / cost);
        prop_assert_eq!(table.leased_tokens(counter(1), START_MS), (deposited - withdrawn) % cost);
    }

    #[test]
    fn a_refund_never_reaches_a_later_lease(
        tag in 1..4u64, end_ms in 1..4u64, count in 0..9u32, paid_tag in 1..4u64, paid_end_ms in 1..4u64, cost in 0..9u32,
    ) {
        let taken = Acquired { tag: paid_tag, end_ms: paid_end_ms, used: 20, tokens: cost.into() };
        let ask = AcquireRequest::plain(paid_end_ms, 20, cost).leased();
        match refunded(CounterWord::new(tag, end_ms, count), taken, ask, Time::plain(0)) {
            Some(more) => {
                prop_assert_eq!((paid_tag, paid_end_ms), (tag, end_ms));
                prop_assert_eq!(more, CounterWord::new(tag, end_ms, count + cost));
            }
            None => prop_assert_ne!((paid_tag, paid_end_ms), (tag, end_ms)),
        }
    }

    /// A purse is kept where a slot is free and nowhere else; nobody's slot is taken for one, and a purse gives way
    /// to nobody before its end, even when it is empty.
    #[test]
    fn a_full_table_keeps_no_lease(keys in prop::collection::vec((0..30u64, any::<bool>()), 1..40), buckets in 1..4usize) {
        let table = Table::<2>::with_buckets(buckets, 1).expect("there is memory");
        let (mut kept, mut seated) = (HashMap::<u64, u32>::new(), HashMap::<u64, u64>::new());
        for (id, is_purse) in keys {
            let live = table.stats(START_MS).live;
            if is_purse {
                match table.deposit(counter(id), START_MS + 50, 2, START_MS) {
                    DepositResult::Stored => {
                        let left = kept.entry(id).or_default();
                        *left += 2;
                        prop_assert!(table.stats(START_MS).live == live + usize::from(*left == 2));
                        let spent = table.acquire(counter(id).lease(), leased(START_MS, 2), Time::plain(START_MS), None);
                        prop_assert!(matches!(spent, CounterResult::Acquired(..)));
                        prop_assert!(table.deposit(counter(id), START_MS + 50, 2, START_MS) == DepositResult::Stored);
                    }
                    DepositResult::Full => {
                        prop_assert!(!kept.contains_key(&id) && table.stats(START_MS).live == live);
                        let ask = leased(START_MS, 1);
                        let none = CounterResult::Full(full(ask));
                        prop_assert_eq!(table.acquire(counter(id).lease(), ask, Time::plain(START_MS), None), none);
                        prop_assert_eq!(table.peek(counter(id).lease(), ask, Time::plain(START_MS)).0, full(ask));
                        prop_assert_eq!(table.withdraw(counter(id), START_MS + 50, 9), 0);
                    }
                    DepositResult::Expired => prop_assert!(false, "no window ended"),
                }
            } else {
                let spilled = table.overflow_charges_total();
                let hit = table.acquire(counter(id), AcquireRequest::plain(START_MS + 50, LIMIT, 1), Time::plain(START_MS), None);
                if matches!(hit, CounterResult::Acquired(..)) && table.overflow_charges_total() == spilled {
                    *seated.entry(id).or_default() += 1;
                }
            }
            for (id, left) in &kept {
                prop_assert_eq!(table.leased_tokens(counter(*id), START_MS), *left);
            }
            for (id, used) in &seated {
                let ask = AcquireRequest::plain(START_MS + 50, LIMIT, 1);
                prop_assert_eq!(table.peek(counter(*id), ask, Time::plain(START_MS)).0.used, *used);
            }
        }
    }

    /// A counter, its purse and its tally are three, whatever its tag is.
    #[test]
    fn a_lease_is_never_the_counter(id in any::<u64>(), deposited in 1..9u32, noted in 1..9u32) {
        let table = Table::<8>::with_buckets(4, 1).expect("there is memory");
        let counter: Counter = counter(mixed(id));
        let (ask, time) = (AcquireRequest::plain(START_MS + 50, 9, 4), Time::plain(START_MS));
        prop_assert!(matches!(table.acquire(counter, ask, time, None), CounterResult::Acquired(..)));
        prop_assert_eq!(table.deposit(counter, START_MS + 50, deposited, START_MS), DepositResult::Stored);
        table.set_known_usage(counter, START_MS + 50, noted, START_MS);
        prop_assert_eq!(table.leased_tokens(counter, START_MS), deposited);
        prop_assert_eq!(table.known_usage(counter, START_MS), Some((START_MS + 50, noted)));
        prop_assert_eq!((table.peek(counter, ask, time).0.used, table.stats(START_MS).live), (4, 3));
    }
}
