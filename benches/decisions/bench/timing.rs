//! Times operations so that other work on the machine affects the results little: in turns, per thread, by median.
//!
//! Time is the CPU time of the measuring threads, from `/proc/thread-self/schedstat`, which excludes the time of other
//! processes on the core. Without that file, it is the time of the monotonic clock.

#![allow(
    clippy::disallowed_methods,
    reason = "only `clock` reads the time in the gateway; a benchmark measures time itself"
)]

use std::sync::Barrier;
use std::time::Instant;

/// An operation to time; each call takes one sample and returns nanoseconds per operation.
pub struct Runner<'a> {
    pub name: String,
    sample: Box<dyn FnMut() -> f64 + 'a>,
}

impl<'a> Runner<'a> {
    pub fn new(name: impl Into<String>, sample: impl FnMut() -> f64 + 'a) -> Runner<'a> {
        Runner { name: name.into(), sample: Box::new(sample) }
    }
}

/// The samples of one runner, in the order of the rounds.
pub struct Samples(pub Vec<f64>);

impl Samples {
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let half = sorted.len() / 2;
        if sorted.len() % 2 == 1 { sorted[half] } else { (sorted[half - 1] + sorted[half]) / 2.0 }
    }

    pub fn min(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }

    pub fn max(&self) -> f64 {
        self.0.iter().copied().fold(0.0, f64::max)
    }

    /// The ratio of these samples to those of `other`, for each round.
    pub fn over(&self, other: &Samples) -> Samples {
        Samples(self.0.iter().zip(&other.0).map(|(a, b)| a / b).collect())
    }
}

/// Runs all runners in turns; each round begins with another one. A first round that is not counted warms caches, fills
/// tables and exhausts limits.
pub fn in_turn(rounds: usize, runners: &mut [Runner]) -> Vec<Samples> {
    let mut samples: Vec<Vec<f64>> = runners.iter().map(|_| Vec::new()).collect();
    for round in 0..=rounds {
        for i in 0..runners.len() {
            let i = (i + round) % runners.len();
            let ns = (runners[i].sample)();
            if round > 0 {
                samples[i].push(ns);
            }
        }
    }
    samples.into_iter().map(Samples).collect()
}

/// Runs `body` once on each of `threads` threads, which start together, and returns the mean CPU
/// time in nanoseconds that a thread spent on each of its `operations`.
pub fn on_threads(threads: usize, operations: usize, body: impl Fn(usize) + Sync) -> f64 {
    let start = Barrier::new(threads);
    let timed = |thread: usize| {
        start.wait();
        let watch = Watch::start();
        body(thread);
        watch.elapsed_ns()
    };
    let total_ns: f64 = if threads == 1 {
        timed(0)
    } else {
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|thread| scope.spawn(move || timed(thread))).collect();
            workers.into_iter().map(|worker| worker.join().expect("no panic in a benchmark")).sum()
        })
    };
    total_ns / (threads * operations) as f64
}

/// Measures the CPU time of the thread that started it.
pub struct Watch {
    cpu_ns: Option<u64>,
    wall: Instant,
}

impl Watch {
    pub fn start() -> Watch {
        Watch { cpu_ns: cpu_ns(), wall: Instant::now() }
    }

    /// Wall-clock time since the start, milliseconds.
    pub fn wall_ms(&self) -> f64 {
        self.wall.elapsed().as_secs_f64() * 1000.0
    }

    pub fn elapsed_ns(&self) -> f64 {
        match (self.cpu_ns, cpu_ns()) {
            (Some(before), Some(after)) => (after - before) as f64,
            _ => self.wall.elapsed().as_nanos() as f64,
        }
    }
}

/// CPU time of this thread so far. The kernel updates the number when the thread yields, and otherwise only at the next
/// timer tick.
fn cpu_ns() -> Option<u64> {
    std::thread::yield_now();
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    text.split(' ').next()?.parse().ok()
}
