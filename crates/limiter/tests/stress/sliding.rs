//! Sliding windows under real threads: in no interval of a period are more tokens admitted than the limit.
//!
//! The requests that all threads had admitted are merged into one log, and every interval of the log is checked. `make sliding`
//! runs more schedules.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, RuleId, VariantId};
use transom_limiter::key::KeyHasher;
use transom_limiter::rule::OnLimit;
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::table::Table;
use transom_limiter::window::{PERIOD_MIN_MS, Segments, Windows};

use crate::windows::{SEED, START_MS, limit, rule};
use crate::{THREADS, mix};

/// What the threads send.
#[derive(Clone, Copy, Debug)]
struct Schedule {
    seed: u64,
    threads: u64,
    /// Requests of each thread.
    requests: u64,
    clients: u64,
    limit: u32,
    period_ms: u64,
    /// A request takes 1 to `cost_max` tokens.
    cost_max: u64,
    /// One of eight requests advances the clock by 1 to `advance_max_ms`.
    advance_max_ms: u64,
}

const LONG: Schedule = Schedule {
    seed: 0,
    threads: THREADS,
    requests: 40_000,
    clients: 1,
    limit: 6,
    period_ms: 40,
    cost_max: 2,
    advance_max_ms: 1,
};

impl Schedule {
    /// A short random schedule. A period holds from a few requests up to all of them.
    fn random(seed: u64) -> Schedule {
        let choose = |nth: u64, from: u64, to: u64| from + mix(mix(seed) ^ nth) % (to - from + 1);
        let period_ms = match choose(1, 0, 3) {
            0 => PERIOD_MIN_MS,
            1 => choose(2, PERIOD_MIN_MS, 100),
            _ => choose(2, PERIOD_MIN_MS, 2000),
        };
        Schedule {
            seed,
            threads: 4,
            requests: 400,
            clients: choose(3, 1, 5),
            limit: choose(4, 1, 20) as u32,
            period_ms,
            cost_max: choose(5, 1, 4),
            advance_max_ms: choose(6, 1, (period_ms / 4).max(2)),
        }
    }
}

/// A request that was admitted: the client, the time of the decision, the tokens.
type Admitted = (u64, u64, u64);

/// Sends the requests of one thread. Some are refunded, and some are late.
fn send_requests<const W: usize>(
    schedule: Schedule,
    table: &Table<W>,
    rule_set: &Arc<RuleSet>,
    clock: &AtomicU64,
    thread: u64,
) -> Vec<Admitted> {
    let (charge_plan, segments) = (rule_set.charge_plan([RuleId::at(0)]), Segments { period_ms: schedule.period_ms });
    let (mut context, mut admitted, mut now_ms) = (DecisionContext::for_worker(thread as u32), Vec::new(), START_MS);
    for nth in 0..schedule.requests {
        let random = mix(mix(schedule.seed) ^ (thread << 32 | nth));
        if !random.is_multiple_of(5) {
            let advances = random >> 8 & 7 == 0;
            let advance_ms = if advances { 1 + (random >> 24 & 0xFFFF) % schedule.advance_max_ms } else { 0 };
            now_ms = clock.fetch_add(advance_ms, Ordering::Relaxed);
        }
        // A short schedule would otherwise end before another thread runs.
        if random >> 60 == 0 {
            thread::yield_now();
        }
        let (client, cost) =
            ((random >> 16) % schedule.clients, 1 + ((random >> 48 & 0xFF) % schedule.cost_max) as u32);
        let mut hasher = KeyHasher::new(SEED, rule_set.rules[RuleId::at(0)].hash_prefix);
        hasher.add_part(1, &client.to_le_bytes());
        context.inputs.keyed_requests =
            vec![Some(KeyedRequest { key: hasher.finish(), offset: 0, variant: VariantId::DEFAULT, cost })].into();
        let read_ms = || now_ms;
        let decision = charge_plan.decide(table, DecisionTime::starting_at(now_ms, &read_ms), &mut context);
        if let Decision::Refused = decision {
            continue;
        }
        let receipts: Vec<_> = context.all_receipts().collect();
        if random >> 57 & 7 == 0 {
            rule_set.refund(&receipts, u32::MAX, table, now_ms);
            continue;
        }
        // A late thread decides at the time of the latest segment in use, which other threads have seen.
        let segment = segments.expiring_at(receipts[0].request.end_ms);
        admitted.push((client, now_ms.max(segments.start_ms(segment)), u64::from(cost)));
    }
    admitted
}

/// Runs the threads, and checks every interval of their merged log. Returns the number of admitted requests, and the most
/// tokens of a client in one interval.
fn never_over<const W: usize>(schedule: Schedule, table: &Table<W>) -> (usize, u64) {
    let (tokens, period_ms) = (schedule.limit, schedule.period_ms);
    let layer = limit(tokens, tokens, Windows::Sliding { period_ms });
    let rule_set = Arc::new(RuleSet::new(&[rule(layer, OnLimit::Refuse)], SEED, None));
    let (clock, start) = (AtomicU64::new(START_MS), Barrier::new(schedule.threads as usize));
    let mut admitted: Vec<Admitted> = Vec::new();
    thread::scope(|scope| {
        let (rule_set, clock, start) = (&rule_set, &clock, &start);
        let work = |thread| {
            scope.spawn(move || {
                start.wait();
                send_requests(schedule, table, rule_set, clock, thread)
            })
        };
        for handle in (0..schedule.threads).map(work).collect::<Vec<_>>() {
            admitted.extend(handle.join().expect("no thread panicked"));
        }
    });
    admitted.sort_unstable();
    let (mut first, mut used, mut most) = (0, 0, 0);
    for (i, (client, now_ms, cost)) in admitted.iter().enumerate() {
        used += cost;
        while admitted[first].0 != *client || admitted[first].1 + period_ms <= *now_ms {
            used -= admitted[first].2;
            first += 1;
        }
        assert!(
            used <= u64::from(tokens),
            "{used} tokens of client {client} within a period: {:?}; {schedule:?}",
            &admitted[first..=i]
        );
        most = most.max(used);
    }
    (admitted.len(), most)
}

#[test]
fn no_interval_of_a_period_exceeds_the_limit() {
    let large = || Table::<8>::with_capacity(256).expect("there is memory");
    // Most counters do not find a slot.
    let full = Table::<1>::with_buckets(5, 64).expect("there is memory");
    for (admitted, _) in [
        never_over(LONG, &large()),
        never_over(Schedule { clients: 3, ..LONG }, &large()),
        never_over(Schedule { clients: 5, ..LONG }, &full),
    ] {
        assert!(admitted > 1000, "only {admitted} requests were admitted");
    }
}

/// `TRANSOM_SCHEDULES` is the number of schedules, and `TRANSOM_SEED` the seed of the first.
#[test]
fn no_interval_of_a_random_schedule_exceeds_the_limit() {
    let number = |name: &str, default: u64| {
        std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("`{name}` is a number")))
    };
    let schedules = number("TRANSOM_SCHEDULES", 200);
    let first_seed = number("TRANSOM_SEED", RandomState::new().hash_one(()));
    println!("TRANSOM_SEED={first_seed}");
    let (mut admitted, mut full) = (0, 0);
    for nth in 0..schedules {
        let seed = first_seed.wrapping_add(nth);
        let schedule = Schedule::random(seed);
        let buckets = 1 + (mix(!seed) >> 8) as usize % 12;
        let memory = "there is memory";
        let (more, most) = match mix(!seed) % 4 {
            0 => never_over(schedule, &Table::<1>::with_buckets(buckets, 64).expect(memory)),
            1 => never_over(schedule, &Table::<4>::with_buckets(buckets, 3).expect(memory)),
            _ => never_over(schedule, &Table::<8>::with_capacity(256).expect(memory)),
        };
        admitted += more;
        full += u64::from(most == u64::from(schedule.limit));
    }
    println!("{schedules} schedules of 4 threads, {admitted} requests admitted, the limit reached in {full} schedules");
    assert!(full * 2 > schedules, "only {full} of {schedules} schedules reached the limit");
}
