//! Measures the CPU time of one decision, in nanoseconds: Transom's table compared with the governor crate.
//!
//! `cargo bench -p transom-decisions --features governor` prints six tables: the same two-layer decision by both limiters,
//! Transom's decision under various conditions, a sliding window beside a fixed one, the cost of a memory-mapped table, the time
//! to open a counters file, and the cost of 128-bit counter words. `-- sliding` prints the third alone. No server and no socket
//! is involved; `peers.py` measures whole requests. A plain `main` instead of a benchmark framework, because the compared sides
//! have to take turns within one run.

mod limiters;
mod mapped_table;
mod timing;
mod word_width;

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};

use governor::clock::{FakeRelativeClock, QuantaClock};
use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::window::SEGMENTS_PER_PERIOD;
use transom_runtime::clock::Clock;

use limiters::{Governor, NOW_MS, Transom};
use timing::{Runner, Samples, in_turn, on_threads};

/// The gateway's allocator, for both sides.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const ROUNDS: usize = 7;
const KEYS: usize = 1_000_000;
/// Capacity of a table that gets about half full.
const CAPACITY: usize = 4_000_000;
/// Two layers like `2000/hour` and `33/minute` whose limits are never reached.
const WIDE: [&str; 2] = ["4294967295/hour", "4294967294/minute"];
const SIX: [&str; 6] = [
    "4294967295/hour",
    "4294967294/minute",
    "4294967293/second",
    "4294967292/day",
    "4294967291/week",
    "4294967290/month",
];
const TARGET: f64 = 3.0;

fn main() {
    // `cargo test` runs benchmark targets as well, without `--bench`; then there is nothing to do.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let keys = addresses(KEYS, 10);
    println!("{}", machine());
    if std::env::args().any(|argument| argument == "sliding") {
        return compare_sliding(&keys);
    }
    compare_with_governor(&keys);
    measure_conditions(&keys);
    compare_sliding(&keys);
    mapped_table::compare_with_private_memory(&keys);
    mapped_table::measure_open();
    compare_word_widths();
}

/// Distinct addresses in random order.
fn addresses(count: usize, network: u8) -> Vec<IpAddr> {
    assert!(count < 1 << 24, "an IPv4 /8 network has 2^24 addresses");
    let mut all: Vec<IpAddr> =
        (0..count as u32).map(|i| IpAddr::V4(Ipv4Addr::from(u32::from(network) << 24 | i))).collect();
    let mut state = 88_172_645_463_325_252u64;
    for i in (1..all.len()).rev() {
        // Marsaglia, "Xorshift RNGs", 2003.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        all.swap(i, (state % (i as u64 + 1)) as usize);
    }
    all
}

fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpus = read("/proc/cpuinfo");
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let features = match (cfg!(target_feature = "cmpxchg16b"), cfg!(target_feature = "avx")) {
        (true, true) => "cmpxchg16b and avx known when compiled",
        (true, false) => "cmpxchg16b known when compiled",
        _ => "128-bit instructions detected at run time",
    };
    format!(
        "- processor: {}, {cores} cores\n- kernel: {}\n- build: {features}\n- {ROUNDS} rounds, {KEYS} keys, CPU time \
         per thread and decision; median of all rounds\n",
        model.trim_start_matches([' ', '\t', ':']),
        read("/proc/sys/kernel/osrelease").trim(),
    )
}

/// Times a pass over `keys` on each of `threads` threads, which begin at different keys.
fn pass(threads: usize, keys: &[IpAddr], admits: impl Fn(&IpAddr, &mut DecisionContext) -> bool + Sync) -> f64 {
    on_threads(threads, keys.len(), |thread| {
        let mut context = DecisionContext::default();
        let (late, early) = keys.split_at(keys.len() * thread / threads);
        let admitted = early.iter().chain(late).filter(|key| admits(key, &mut context)).count();
        black_box(admitted);
    })
}

/// The clock is read after the counters were prefetched, as in `Limiter::acquire_with_clock`.
fn admits_by_clock(side: &Transom, clock: &Clock, key: &IpAddr, context: &mut DecisionContext) -> bool {
    side.prepare(key, context);
    side.decide(clock.now().unix_ms, context)
}

fn compare_with_governor(keys: &[IpAddr]) {
    println!("### Two layers, compared with governor\n");
    println!(
        "| decision | transom, time as argument | transom, own clock | governor, fixed clock | governor, own clock \
         | ratio without clocks | ratio with clocks: min | median | max | target |"
    );
    println!("| --- | --: | --: | --: | --: | --: | --: | --: | --: | --- |");
    let busy = vec![keys[0]; KEYS];
    let (given, own_clock) = (Transom::new(&WIDE, CAPACITY), Transom::new(&WIDE, CAPACITY));
    // The gateway's own clock: it reads the monotonic clock, and the wall clock once in a millisecond.
    let clock = Clock::system();
    let (fixed_clock, governor_clock) = (Governor::<FakeRelativeClock>::new(), Governor::<QuantaClock>::new());
    for (name, threads, keys) in [
        ("a million keys, 1 thread", 1, keys),
        ("a million keys, 2 threads", 2, keys),
        ("one busy key, 1 thread", 1, &busy[..]),
        ("one busy key, 2 threads", 2, &busy[..]),
    ] {
        print_comparison(
            name,
            &mut [
                Runner::new("", || pass(threads, keys, |key, context| given.admits(key, NOW_MS, context))),
                Runner::new("", || {
                    pass(threads, keys, |key, context| admits_by_clock(&own_clock, &clock, key, context))
                }),
                Runner::new("", || pass(threads, keys, |key, _| fixed_clock.admits(key))),
                Runner::new("", || pass(threads, keys, |key, _| governor_clock.admits(key))),
            ],
        );
    }
    // Every sample needs empty tables; the time does not include creating and dropping them.
    print_comparison(
        "new keys, 1 thread",
        &mut [
            Runner::new("", || {
                let fresh = Transom::new(&WIDE, CAPACITY);
                pass(1, keys, |key, context| fresh.admits(key, NOW_MS, context))
            }),
            Runner::new("", || {
                let fresh = Transom::new(&WIDE, CAPACITY);
                pass(1, keys, |key, context| admits_by_clock(&fresh, &clock, key, context))
            }),
            Runner::new("", || {
                let fresh = Governor::<FakeRelativeClock>::new();
                pass(1, keys, |key, _| fresh.admits(key))
            }),
            Runner::new("", || {
                let fresh = Governor::<QuantaClock>::new();
                pass(1, keys, |key, _| fresh.admits(key))
            }),
        ],
    );
    println!();
}

/// `runners` in the order of the columns: transom, then governor, each without and with its clock.
fn print_comparison(name: &str, runners: &mut [Runner; 4]) {
    let samples = in_turn(ROUNDS, runners);
    let [given, own_clock, fixed_clock, governor_clock] = samples.as_slice() else {
        unreachable!("as many samples as runners")
    };
    let ratio = governor_clock.over(own_clock);
    println!(
        "| {name} | {:.0} | {:.0} | {:.0} | {:.0} | {:.1} | {:.1} | {:.1} | {:.1} | ≥ {TARGET}: {} |",
        given.median(),
        own_clock.median(),
        fixed_clock.median(),
        governor_clock.median(),
        fixed_clock.over(given).median(),
        ratio.min(),
        ratio.median(),
        ratio.max(),
        if ratio.median() >= TARGET { "met" } else { "missed" },
    );
}

fn measure_conditions(keys: &[IpAddr]) {
    println!("### Transom alone, 1 thread, time as argument\n");
    let [one, two, six] = [&WIDE[..1], &WIDE, &SIX].map(|windows| Transom::new(windows, windows.len() * KEYS * 2));
    let refusing = Transom::new(&["2/hour", "1/minute"], CAPACITY);
    let nearly_full = nearly_full_table(keys);
    let busy = vec![keys[0]; KEYS];
    let new_keys = addresses(KEYS / 50, 11);
    let mut runners = vec![
        Runner::new("hashing the key only", || {
            on_threads(1, KEYS, |_| keys.iter().for_each(|key| _ = black_box(two.hash(key))))
        }),
        Runner::new("counting in two layers only, busy key", || counting(&two, &keys[0])),
    ];
    for (name, side) in [("1 layer", &one), ("2 layers", &two), ("6 layers", &six), ("refused, 2 layers", &refusing)] {
        for (which, keys) in [("a million keys", keys), ("busy key", &busy)] {
            let sample = move || pass(1, keys, |key, context| side.admits(key, NOW_MS, context));
            runners.push(Runner::new(format!("{name}, {which}"), sample));
        }
    }
    runners.push(Runner::new("2 layers, table 95 % full, its keys", || {
        pass(1, &keys[..KEYS * 95 / 100], |key, context| nearly_full.admits(key, NOW_MS, context))
    }));
    runners.push(Runner::new("2 layers, table 95 % full, new keys until 97 %", || {
        let nearly_full = nearly_full_table(keys);
        pass(1, &new_keys, |key, context| nearly_full.admits(key, NOW_MS, context))
    }));
    let samples = in_turn(ROUNDS, &mut runners);
    print_alone(&runners, &samples);
}

/// One layer, in a fixed and in a sliding window. `all segments`: the key has used tokens in each segment that still counts, which
/// are nine counters; `one segment`: in the current one only.
fn compare_sliding(keys: &[IpAddr]) {
    println!("### One layer, fixed and sliding, 1 thread, time as argument\n");
    const PERIOD_MS: u64 = 60_000;
    let busy = vec![keys[0]; KEYS];
    let admitting = || Transom::sliding(u32::MAX, PERIOD_MS, 3 * CAPACITY);
    let used = |side: Transom, keys: &[IpAddr]| {
        for segment in (1..=SEGMENTS_PER_PERIOD).rev() {
            let then_ms = NOW_MS - segment * PERIOD_MS / SEGMENTS_PER_PERIOD;
            pass(1, keys, |key, context| side.admits(key, then_ms, context));
        }
        side
    };
    let (fixed, one, all) = (Transom::new(&WIDE[1..], 3 * CAPACITY), admitting(), used(admitting(), keys));
    let fixed_refusing = Transom::new(&["1/minute"], 3 * CAPACITY);
    let refusing = used(Transom::sliding(9, PERIOD_MS, 3 * CAPACITY), keys);
    let mut runners = Vec::new();
    for (name, side) in [
        ("fixed", &fixed),
        ("sliding, one segment", &one),
        ("sliding, all segments", &all),
        ("fixed, refused", &fixed_refusing),
        ("sliding, all segments, refused", &refusing),
    ] {
        for (which, keys) in [("a million keys", keys), ("busy key", &busy)] {
            let sample = move || pass(1, keys, |key, context| side.admits(key, NOW_MS, context));
            runners.push(Runner::new(format!("{name}, {which}"), sample));
        }
    }
    let samples = in_turn(ROUNDS, &mut runners);
    print_alone(&runners, &samples);
}

/// A table that the first 95 % of these keys fill to 95 % of its capacity, with two layers each.
fn nearly_full_table(keys: &[IpAddr]) -> Transom {
    let side = Transom::new(&WIDE, KEYS * 2);
    pass(1, &keys[..KEYS * 95 / 100], |key, context| side.admits(key, NOW_MS, context));
    side
}

/// Times the table operations alone, without hashing and window arithmetic.
fn counting(side: &Transom, key: &IpAddr) -> f64 {
    let mut context = DecisionContext::default();
    assert!(side.admits(key, NOW_MS, &mut context), "the limits are never reached");
    let prepared: Vec<Charge> =
        context.result.charges.iter().map(|charge| Charge::new(charge.counter, charge.request)).collect();
    on_threads(1, KEYS, |_| {
        let mut charges = prepared.clone();
        for _ in 0..KEYS {
            charges.copy_from_slice(&prepared);
            assert!(
                acquire_all(&*side.table, black_box(&mut charges), &mut Vec::new(), side.charge_plan.time(NOW_MS))
                    == AcquireResult::Admitted
            );
        }
    })
}

fn print_alone(runners: &[Runner], samples: &[Samples]) {
    println!("| decision | min | median | max |\n| --- | --: | --: | --: |");
    for (runner, samples) in runners.iter().zip(samples) {
        println!("| {} | {:.0} | {:.0} | {:.0} |", runner.name, samples.min(), samples.median(), samples.max());
    }
    println!();
}

fn compare_word_widths() {
    println!("### Width of a counter word, nanoseconds per operation\n");
    println!("| operation | 128 bits | 64 bits | ratio |\n| --- | --: | --: | --: |");
    let mut runners = word_width::runners();
    let samples = in_turn(ROUNDS, &mut runners);
    for (runners, samples) in runners.chunks(2).zip(samples.chunks(2)) {
        let [wide, narrow] = samples else { unreachable!("runners come in pairs") };
        let ratio = wide.over(narrow).median();
        println!("| {} | {:.1} | {:.1} | {ratio:.2} |", runners[0].name, wide.median(), narrow.median());
    }
    println!();
}
