//! The vocabulary of the models: keys, threads, and their results. The models make the assertions.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use loom::thread;
use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::bucket::Key;
use transom_limiter::counter::{AcquireRequest, WindowKind};
use transom_limiter::table::{Counter, CounterResult, Receipt, Table};
use transom_limiter::window::{Time, WindowSequence};

/// Runs `model` in every interleaving with at most so many preemptions, and returns all outcomes.
pub fn explore<T: Ord + Send + 'static>(preemptions: usize, model: fn() -> T) -> BTreeSet<T> {
    let extra: usize = match std::env::var("TRANSOM_MODEL_EXTRA") {
        Ok(text) => text.parse().expect("`TRANSOM_MODEL_EXTRA` is a number of preemptions"),
        Err(_) => 0,
    };
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions + extra);
    builder.max_branches = 100_000;
    let outcomes = Arc::new(Mutex::new(BTreeSet::new()));
    let all = outcomes.clone();
    builder.check(move || {
        let outcome = model();
        all.lock().expect("no model panicked").insert(outcome);
    });
    std::mem::take(&mut *outcomes.lock().expect("no model panicked"))
}

/// Runs all jobs at once on what they share, and returns their answers in order.
///
/// None of them runs on this thread: loom's bounded search adds the turns that it would otherwise
/// miss where one thread stops and another starts, so it has to be free to start with any of them.
pub fn race<S: Send + Sync + 'static, T: 'static, const N: usize>(shared: &Arc<S>, jobs: [fn(&S) -> T; N]) -> [T; N] {
    let runners = jobs.map(|job| {
        let shared = shared.clone();
        thread::spawn(move || job(&shared))
    });
    runners.map(|runner| runner.join().expect("no thread panicked"))
}

/// A counter of layer 1. Keys whose tags are equal modulo 64 share a spill counter.
pub fn counter(tag: u64) -> Counter {
    counter_at(tag, 0)
}

/// A counter of layer 1 whose buckets are chosen by `place`.
pub fn counter_at(tag: u64, place: u64) -> Counter {
    Counter { key: Key { bucket_hash: place, tag }, layer: (1u64 << 10).rotate_right(32) }
}

/// What a thread got.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Got {
    /// Admitted, counted in the window ending then.
    Paid(u64),
    Full,
    Late,
}

/// One token out of `limit` for `counter`, in the window ending at `end_ms`, asked at `now_ms`.
pub fn hit<const W: usize>(table: &Table<W>, counter: Counter, limit: u32, end_ms: u64, now_ms: u64) -> Got {
    pay(table, counter, limit, end_ms, now_ms).0
}

/// As [`hit`], with what is needed to give it back.
pub fn pay<const W: usize>(t: &Table<W>, c: Counter, limit: u32, end_ms: u64, now_ms: u64) -> (Got, Option<Receipt>) {
    take(t, c, AcquireRequest::plain(end_ms, limit, 1), now_ms)
}

/// Windows of 100 ms that hang together.
static PACES: [WindowSequence; 1] = [WindowSequence::Even { period_ms: 100 }];

/// The time of a decision on windows of 100 ms.
pub fn time(now_ms: u64) -> Time<'static> {
    Time { now_ms, sequences: &PACES }
}

/// Asks for one token in the window on the grid of 100 ms that is open, out of `limit` in each, of which
/// `capacity` may accumulate.
pub fn rolling(now_ms: u64, limit: u32, capacity: u64) -> AcquireRequest {
    let end_ms = (now_ms / 100 + 1) * 100;
    AcquireRequest { end_ms, ceiling: capacity, floor: 0, limit, cost: 1, kind: WindowKind::Grid(0) }
}

/// Asks for a place in the window that comes `windows` after the one that is open.
pub fn place(now_ms: u64, limit: u32, windows: u64) -> AcquireRequest {
    let granted = windows * u64::from(limit);
    AcquireRequest { floor: granted, ..rolling(now_ms, limit, u64::from(limit) + granted) }
}

/// Asks for one token in a window of 100 ms that the first request opens.
pub fn floating(now_ms: u64, limit: u32) -> AcquireRequest {
    let course = WindowKind::Floating(0);
    AcquireRequest { end_ms: now_ms + 100, ceiling: u64::from(limit), floor: 0, limit, cost: 1, kind: course }
}

/// Charges what is asked, and tells what is needed to give it back.
pub fn take<const W: usize>(t: &Table<W>, c: Counter, ask: AcquireRequest, now_ms: u64) -> (Got, Option<Receipt>) {
    match t.acquire(c, ask, time(now_ms), None) {
        CounterResult::Acquired(paid, used) => (Got::Paid(used.end_ms), Some(paid)),
        CounterResult::Full(_) => (Got::Full, None),
        CounterResult::Late => (Got::Late, None),
    }
}

/// Whether what is asked was granted.
pub fn took<const W: usize>(table: &Table<W>, counter: Counter, ask: AcquireRequest, now_ms: u64) -> bool {
    take(table, counter, ask, now_ms).1.is_some()
}

/// Charges what is asked, and gives it back at a later time.
pub fn take_and_return<const W: usize>(
    table: &Table<W>,
    counter: Counter,
    ask: AcquireRequest,
    now_ms: u64,
    later_ms: u64,
) {
    let (_, paid) = take(table, counter, ask, now_ms);
    if let Some(paid) = paid {
        table.refund(paid, ask, time(later_ms));
    }
}

/// What is used or owed of `counter`, as who asks for it sees it.
pub fn owed<const W: usize>(table: &Table<W>, counter: Counter, ask: AcquireRequest, now_ms: u64) -> u64 {
    table.peek(counter, ask, time(now_ms)).0.used
}

/// What is used of `counter` in the window ending at `end_ms` or the later one that is open, and when that ends.
pub fn used<const W: usize>(table: &Table<W>, counter: Counter, end_ms: u64) -> (u64, u64) {
    let (used, _) = table.peek(counter, AcquireRequest::plain(end_ms, 1, 1), Time::plain(0));
    (used.used, used.end_ms)
}

/// Gives back one token that was charged by [`pay`].
pub fn unpay<const W: usize>(table: &Table<W>, paid: Option<Receipt>) {
    if let Some(paid) = paid {
        table.refund(paid, AcquireRequest::plain(0, 1, 1), Time::plain(0));
    }
}

/// One request of one token on several counters: each with its limit and the end of its window.
pub fn request<const W: usize>(table: &Table<W>, on: &[(Counter, u32, u64)], now_ms: u64) -> AcquireResult {
    let charge =
        |&(counter, limit, end_ms): &(Counter, u32, u64)| Charge::new(counter, AcquireRequest::plain(end_ms, limit, 1));
    acquire_all(table, &mut on.iter().map(charge).collect::<Vec<_>>(), &mut Vec::new(), Time::plain(now_ms))
}

/// How many of `got` were counted in the window ending at `end_ms`.
pub fn paid_in(got: &[Got], end_ms: u64) -> usize {
    got.iter().filter(|&&one| one == Got::Paid(end_ms)).count()
}
