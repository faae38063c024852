//! Leases under real threads: no more tokens are spent than were deposited.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, RuleId, VariantId};
use transom_limiter::key::{KeyHash, KeyPart, OnMissing, Seed};
use transom_limiter::leased_tokens::DepositResult;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Rule, Sharing};
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::shared_counting::LocalDecision;
use transom_limiter::table::Table;
use transom_limiter::window::Time;
use transom_limiter::window_kind::AcquireRequest;

use super::{THREADS, counter, end_ms, mix};

const WINDOW_MS: u64 = 40;
const LIMIT: u32 = 1_000_000;
const START_MS: u64 = 1_000_000;
/// A rule whose counters are leased. The rule of `ORDINARY` is not; its second number is its limit.
const LEASED: u64 = 0;
const ORDINARY: (u64, u32) = (1, 60);

/// Tokens moved by one thread, by client and end of the window.
#[derive(Default)]
struct Totals {
    deposited: HashMap<(u64, u64), i64>,
    /// Spent or withdrawn, and not refunded.
    spent: HashMap<(u64, u64), i64>,
    ordinary: HashMap<(u64, u64), i64>,
}

struct Load<'a, const W: usize> {
    table: &'a Table<W>,
    clock: &'a AtomicU64,
    clients: u64,
    operations: u64,
}

impl<const W: usize> Load<'_, W> {
    /// A request that charges the leases of two clients and the ordinary counter of the first. One in three is
    /// refunded.
    fn spend(&self, totals: &mut Totals, random: u64, mut now_ms: u64) {
        let (first, second) = (random % self.clients, (random >> 16) % self.clients);
        let cost = 1 + (random >> 32 & 1) as u32;
        let clients = if first == second { vec![first] } else { vec![first, second] };
        loop {
            let end_ms = end_ms(WINDOW_MS, now_ms);
            let lease = |client: &u64| {
                Charge::new(counter(LEASED, *client).lease(), AcquireRequest::plain(end_ms, LIMIT, cost).leased())
            };
            let mut charges: Vec<Charge> = clients.iter().map(lease).collect();
            charges.push(Charge::new(counter(ORDINARY.0, first), AcquireRequest::plain(end_ms, ORDINARY.1, cost)));
            match acquire_all(self.table, &mut charges, &mut Vec::new(), Time::plain(now_ms)) {
                AcquireResult::Late => now_ms = self.table.horizon_ms(),
                AcquireResult::Refused => return,
                AcquireResult::Admitted => {
                    let back_ms = now_ms + (random >> 40 & 63);
                    for (i, charge) in charges.iter().enumerate() {
                        let receipt = charge.receipt().expect("the cost is not 0");
                        let is_refunded = random.is_multiple_of(3)
                            && self.table.refund(receipt.receipt, receipt.request, Time::plain(back_ms));
                        let (sums, client) = match clients.get(i) {
                            Some(client) => (&mut totals.spent, *client),
                            None => (&mut totals.ordinary, first),
                        };
                        let tokens = if is_refunded { 0 } else { i64::from(cost) };
                        *sums.entry((client, charge.usage.end_ms)).or_default() += tokens;
                    }
                    return;
                }
            }
        }
    }

    fn operations(&self, thread: u64) -> Totals {
        let (mut totals, mut now_ms) = (Totals::default(), START_MS);
        for nth in 0..self.operations {
            let random = mix(thread << 32 | nth);
            if random.is_multiple_of(5) {
                now_ms = self.clock.fetch_add(random >> 8 & 3, Ordering::Relaxed);
            }
            let (client, tokens) = ((random >> 20) % self.clients, (random >> 50 & 7) as u32);
            let (counter, end_ms) = (counter(LEASED, client), end_ms(WINDOW_MS, now_ms));
            match random >> 58 & 7 {
                0 | 1 => {
                    if self.table.deposit(counter, end_ms, tokens, now_ms) == DepositResult::Stored {
                        *totals.deposited.entry((client, end_ms)).or_default() += i64::from(tokens);
                    }
                }
                2 => {
                    let tokens = self.table.withdraw(counter, end_ms, tokens);
                    *totals.spent.entry((client, end_ms)).or_default() += i64::from(tokens);
                }
                3 => self.table.set_known_usage(counter, end_ms, tokens, now_ms),
                _ => self.spend(&mut totals, random >> 3, now_ms),
            }
        }
        totals
    }
}

/// Runs all threads and compares the tokens spent with those deposited and those left.
fn no_more_is_spent<const W: usize>(table: &Table<W>, clients: u64) -> i64 {
    let (clock, barrier) = (AtomicU64::new(START_MS), Barrier::new(THREADS as usize));
    let load = Load { table, clock: &clock, clients, operations: 200_000 };
    let all: Vec<Totals> = thread::scope(|scope| {
        let (load, barrier) = (&load, &barrier);
        let start = |thread: u64| {
            scope.spawn(move || {
                barrier.wait();
                load.operations(thread)
            })
        };
        let threads: Vec<_> = (0..THREADS).map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("no thread panicked")).collect()
    });
    let sums = |of: fn(&Totals) -> &HashMap<(u64, u64), i64>| {
        let mut sums: HashMap<(u64, u64), i64> = HashMap::new();
        all.iter().flat_map(of).for_each(|(at, tokens)| *sums.entry(*at).or_default() += tokens);
        sums
    };
    let (deposited, spent) = (sums(|totals| &totals.deposited), sums(|totals| &totals.spent));
    for (at, spent) in &spent {
        let deposited = deposited.get(at).copied().unwrap_or(0);
        assert!(*spent <= deposited, "{spent} tokens of {deposited} at {at:?}");
    }
    assert!(sums(|totals| &totals.ordinary).values().all(|used| *used <= i64::from(ORDINARY.1)));
    let now_ms = clock.load(Ordering::Relaxed);
    for client in 0..clients {
        let request = AcquireRequest::plain(end_ms(WINDOW_MS, now_ms), LIMIT, 1).leased();
        let (usage, _) = table.peek(counter(LEASED, client).lease(), request, Time::plain(now_ms));
        let (left, at) = (i64::from(LIMIT) - usage.used as i64, (client, usage.end_ms));
        let rest = |sums: &HashMap<(u64, u64), i64>| sums.get(&at).copied().unwrap_or(0);
        assert!(left == 0 || left + rest(&spent) == rest(&deposited), "{left} tokens are left at {at:?}");
    }
    spent.values().sum()
}

#[test]
fn no_more_is_spent_than_was_deposited() {
    let table = Table::<8>::with_buckets(64, 8).expect("there is memory");
    assert!(no_more_is_spent(&table, 6) > 10_000, "too few tokens were spent");
}

/// Most leases find no slot. The others lose theirs at the end of the window.
#[test]
fn no_more_is_spent_than_was_deposited_in_a_full_table() {
    let table = Table::<2>::with_buckets(4, 2).expect("there is memory");
    assert!(no_more_is_spent(&table, 12) > 1_000, "too few tokens were spent");
}

/// Tokens that were leased for requests of a greater limit, spent by two threads whose limit is smaller.
#[test]
fn no_more_than_the_own_limit_is_spent_of_a_greater_lease() {
    const ROUNDS: usize = 20_000;
    let layers = vec![Limit::parse("3/minute").expect("a limit")];
    let rule = Rule { sharing: Sharing::Lease, ..Rule::new("r", vec![KeyPart::GLOBAL], OnMissing::Never, layers) };
    let charge_plan = Arc::new(RuleSet::new(&[rule], Seed(1, 2), None)).charge_plan([RuleId::at(0)]);
    let table = Table::<8>::with_capacity(8 * ROUNDS).expect("there is memory");
    let end_ms = end_ms(60_000, START_MS);
    let request = |round: usize| {
        let key = KeyHash { bucket_hash: mix(round as u64), tag: mix(!(round as u64)) >> 10 };
        KeyedRequest { key, offset: 0, variant: VariantId::DEFAULT, cost: 1 }
    };
    for round in 0..ROUNDS {
        let counter = charge_plan.layer(charge_plan.enforced()[0]).counter(request(round));
        // Two of three tokens are used.
        table.set_known_usage(counter, end_ms, 5, START_MS);
        assert_eq!(table.deposit(counter, end_ms, 3, START_MS), DepositResult::Stored);
    }
    let decide = |round: usize, context: &mut DecisionContext| {
        context.clear();
        context.inputs.keyed_requests = vec![Some(request(round))].into();
        charge_plan.set_counting_modes(|_rule| false, &mut context.sharing.counting_modes);
        let layers = charge_plan.enforced_layers_of(context, START_MS);
        let now = DecisionTime::read(&|| START_MS);
        let decided = charge_plan.decide_locally(&layers, &table, now, context, false);
        context.return_layer_buffer(layers);
        matches!(decided, LocalDecision::Decided(Decision::Admitted))
    };
    let admitted: Vec<AtomicU64> = (0..ROUNDS).map(|_| AtomicU64::new(0)).collect();
    // The rounds that each thread has begun: none is ahead of the other.
    let begun = [const { AtomicU64::new(0) }; 2];
    thread::scope(|scope| {
        for thread in 0..2 {
            let (decide, admitted, begun) = (&decide, &admitted, &begun);
            scope.spawn(move || {
                let mut context = DecisionContext::default();
                for (round, admitted) in admitted.iter().enumerate() {
                    begun[thread].store(round as u64, Ordering::Relaxed);
                    while begun[1 - thread].load(Ordering::Relaxed) < round as u64 {
                        thread::yield_now();
                    }
                    for _ in 0..2 {
                        admitted.fetch_add(decide(round, &mut context).into(), Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let most = admitted.iter().map(|admitted| admitted.load(Ordering::Relaxed)).max();
    assert_eq!(most, Some(1), "in one window");
}
