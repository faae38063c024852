//! Leases under real threads: the admitted tokens are the leased ones.

use std::collections::HashMap;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::counter::AcquireRequest;
use transom_limiter::leased_tokens::DepositResult;
use transom_limiter::table::Table;
use transom_limiter::window::Time;

use super::{THREADS, counter, end_ms, mixed};

const WINDOW_MS: u64 = 40;
const LIMIT: u32 = 1_000_000;
const START_MS: u64 = 1_000_000;
/// The rule whose counters are leased, and one whose counters are not.
const LEASED: u64 = 0;
const ORDINARY: (u64, u32) = (1, 60);

/// What one thread did, per client and end of the window.
#[derive(Default)]
struct Done {
    deposited: HashMap<(u64, u64), i64>,
    /// Spent or withdrawn, and not given back.
    gone: HashMap<(u64, u64), i64>,
    ordinary: HashMap<(u64, u64), i64>,
}

struct Scene<'a, const W: usize> {
    table: &'a Table<W>,
    clock: &'a AtomicU64,
    clients: u64,
    turns: u64,
}

impl<const W: usize> Scene<'_, W> {
    /// A request of two clients' leases and of the first one's ordinary counter; sometimes it is given back.
    fn spend(&self, done: &mut Done, dice: u64, mut now_ms: u64) {
        let (first, second) = (dice % self.clients, (dice >> 16) % self.clients);
        let cost = 1 + (dice >> 32 & 1) as u32;
        let clients = if first == second { vec![first] } else { vec![first, second] };
        loop {
            let end_ms = end_ms(WINDOW_MS, now_ms);
            let purse = |client: &u64| {
                Charge::new(counter(LEASED, *client).lease(), AcquireRequest::plain(end_ms, LIMIT, cost).leased())
            };
            let mut charges: Vec<Charge> = clients.iter().map(purse).collect();
            charges.push(Charge::new(counter(ORDINARY.0, first), AcquireRequest::plain(end_ms, ORDINARY.1, cost)));
            match acquire_all(self.table, &mut charges, &mut Vec::new(), Time::plain(now_ms)) {
                AcquireResult::Late => now_ms = self.table.horizon_ms(),
                AcquireResult::Refused => return,
                AcquireResult::Admitted => {
                    let back_ms = now_ms + (dice >> 40 & 63);
                    for (i, charge) in charges.iter().enumerate() {
                        let share = charge.receipt().expect("it costs something");
                        let back = dice.is_multiple_of(3)
                            && self.table.refund(share.receipt, share.request, Time::plain(back_ms));
                        let (sums, client) = match clients.get(i) {
                            Some(client) => (&mut done.gone, *client),
                            None => (&mut done.ordinary, first),
                        };
                        let tokens = if back { 0 } else { i64::from(cost) };
                        *sums.entry((client, charge.usage.end_ms)).or_default() += tokens;
                    }
                    return;
                }
            }
        }
    }

    fn turns(&self, thread: u64) -> Done {
        let (mut done, mut now_ms) = (Done::default(), START_MS);
        for turn in 0..self.turns {
            let dice = mixed(thread << 32 | turn);
            if dice.is_multiple_of(5) {
                now_ms = self.clock.fetch_add(dice >> 8 & 3, Ordering::Relaxed);
            }
            let (client, tokens) = ((dice >> 20) % self.clients, (dice >> 50 & 7) as u32);
            let (counter, end_ms) = (counter(LEASED, client), end_ms(WINDOW_MS, now_ms));
            match dice >> 58 & 7 {
                0 | 1 => {
                    if self.table.deposit(counter, end_ms, tokens, now_ms) == DepositResult::Stored {
                        *done.deposited.entry((client, end_ms)).or_default() += i64::from(tokens);
                    }
                }
                2 => {
                    let tokens = self.table.withdraw(counter, end_ms, tokens);
                    *done.gone.entry((client, end_ms)).or_default() += i64::from(tokens);
                }
                3 => self.table.set_known_usage(counter, end_ms, tokens, now_ms),
                _ => self.spend(&mut done, dice >> 3, now_ms),
            }
        }
        done
    }
}

/// Adds up what all threads did, and compares it with what was deposited and with what is left.
fn no_more_is_spent<const W: usize>(table: &Table<W>, clients: u64) -> i64 {
    let (clock, barrier) = (AtomicU64::new(START_MS), Barrier::new(THREADS as usize));
    let scene = Scene { table, clock: &clock, clients, turns: 200_000 };
    let all: Vec<Done> = thread::scope(|scope| {
        let (scene, barrier) = (&scene, &barrier);
        let start = |thread: u64| {
            scope.spawn(move || {
                barrier.wait();
                scene.turns(thread)
            })
        };
        let threads: Vec<_> = (0..THREADS).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("no thread panicked")).collect()
    });
    let sums = |of: fn(&Done) -> &HashMap<(u64, u64), i64>| {
        let mut sums: HashMap<(u64, u64), i64> = HashMap::new();
        all.iter().flat_map(of).for_each(|(at, tokens)| *sums.entry(*at).or_default() += tokens);
        sums
    };
    let (deposited, gone) = (sums(|done| &done.deposited), sums(|done| &done.gone));
    for (at, gone) in &gone {
        let deposited = deposited.get(at).copied().unwrap_or(0);
        assert!(*gone <= deposited, "{gone} tokens of {deposited} at {at:?}");
    }
    assert!(sums(|done| &done.ordinary).values().all(|used| *used <= i64::from(ORDINARY.1)));
    let now_ms = clock.load(Ordering::Relaxed);
    for client in 0..clients {
        let ask = AcquireRequest::plain(end_ms(WINDOW_MS, now_ms), LIMIT, 1).leased();
        let (look, _) = table.peek(counter(LEASED, client).lease(), ask, Time::plain(now_ms));
        let (left, at) = (i64::from(LIMIT) - look.used as i64, (client, look.end_ms));
        let rest = |sums: &HashMap<(u64, u64), i64>| sums.get(&at).copied().unwrap_or(0);
        assert!(left == 0 || left + rest(&gone) == rest(&deposited), "{left} tokens are left at {at:?}");
    }
    gone.values().sum()
}

#[test]
fn no_more_is_spent_than_was_deposited() {
    let table = Table::<8>::with_buckets(64, 8).expect("there is memory");
    assert!(no_more_is_spent(&table, 6) > 10_000, "hardly anything was spent");
}

/// Most purses do not find a slot, and those that do lose it to others at the window's end.
#[test]
fn no_more_is_spent_than_was_deposited_in_a_full_table() {
    let table = Table::<2>::with_buckets(4, 2).expect("there is memory");
    assert!(no_more_is_spent(&table, 12) > 1_000, "hardly anything was spent");
}
