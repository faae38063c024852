//! Measures the cost of a memory-mapped table: per decision, and when a file is opened.
//!
//! The file is in `/dev/shm`, as the documentation recommends, or in the temporary folder. Decisions are timed in turns on a
//! table of the library, in private memory with huge pages, one in a file, and one in a memfd, as the gateway has them.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use transom_runtime::clock::Clock;

use transom::persistence::counters::Counters;

use crate::limiters::{NOW_MS, Transom};
use crate::timing::{Runner, Samples, Watch, in_turn};
use crate::{CAPACITY, KEYS, ROUNDS, WIDE, pass};

/// More rounds than elsewhere, because the expected difference is small.
const TURNS: usize = 3 * ROUNDS;
const MOST_PERCENT: f64 = 3.0;
const START_CAPACITY: usize = 10_000_000;
const START_MS: f64 = 200.0;

/// The path of a counters file, which is removed with its lock file when dropped.
struct TemporaryFile(PathBuf);

impl TemporaryFile {
    fn new() -> TemporaryFile {
        let shared = Path::new("/dev/shm");
        let folder = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
        TemporaryFile(folder.join(format!("transom-bench-{}", std::process::id())))
    }

    fn open(&self, capacity: usize) -> Counters {
        open(Some(self.0.clone()), capacity)
    }

    fn remove(&self) {
        // The file may not exist.
        let _ = fs::remove_file(&self.0);
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        self.remove();
        let mut lock = self.0.clone().into_os_string();
        lock.push(".lock");
        let _ = fs::remove_file(lock);
    }
}

fn open(file: Option<PathBuf>, capacity: usize) -> Counters {
    let config = transom_config::counters::Counters {
        capacity,
        file,
        snapshot: None,
        snapshot_every: Duration::from_secs(5),
        shared: None,
    };
    Counters::open(&config, None, &Clock::manual(NOW_MS)).expect("the counters can be created")
}

pub fn compare_with_private_memory(keys: &[IpAddr]) {
    println!("### Two layers, table in private memory and mapped, time as argument\n");
    println!("| decision | private | file | memfd | file / private | memfd / private | target |");
    println!("| --- | --: | --: | --: | --: | --: | --- |");
    let file = TemporaryFile::new();
    let (file, memfd) = (file.open(CAPACITY), open(None, CAPACITY));
    let sides = [
        Transom::new(&WIDE, CAPACITY),
        Transom::on(&WIDE, file.table.clone()),
        Transom::on(&WIDE, memfd.table.clone()),
    ];
    let busy = vec![keys[0]; KEYS];
    for (name, threads, keys) in [
        ("a million keys, 1 thread", 1, keys),
        ("a million keys, 2 threads", 2, keys),
        ("one busy key, 1 thread", 1, &busy[..]),
        ("one busy key, 2 threads", 2, &busy[..]),
    ] {
        let runner = |side| {
            Runner::new("", move || pass(threads, keys, |key, context| Transom::admits(side, key, NOW_MS, context)))
        };
        let samples = in_turn(TURNS, &mut sides.each_ref().map(runner));
        let [private, file, memfd] = samples.as_slice() else { unreachable!("as many samples as runners") };
        let percent = |samples: &Samples| (samples.over(private).median() - 1.0) * 100.0;
        let met = if percent(file).max(percent(memfd)) <= MOST_PERCENT { "met" } else { "missed" };
        println!(
            "| {name} | {:.1} | {:.1} | {:.1} | {:+.1} % | {:+.1} % | ≤ {MOST_PERCENT} %: {met} |",
            private.median(),
            file.median(),
            memfd.median(),
            percent(file),
            percent(memfd),
        );
    }
    println!();
}

/// Measures how long a start waits for the counters to be opened.
pub fn measure_open() {
    println!("### Opening {START_CAPACITY} counters, milliseconds\n");
    println!("| counters | min | median | max | target |\n| --- | --: | --: | --: | --- |");
    let file = TemporaryFile::new();
    let timed = |file: Option<PathBuf>| {
        let watch = Watch::start();
        let counters = open(file, START_CAPACITY);
        let ms = watch.wall_ms();
        drop(counters);
        ms
    };
    let fresh = Runner::new("a new file", || {
        file.remove();
        timed(Some(file.0.clone()))
    });
    let existing = Runner::new("an existing file", || {
        drop(file.open(START_CAPACITY));
        timed(Some(file.0.clone()))
    });
    let memfd = Runner::new("memfd memory", || timed(None));
    let mut runners = [fresh, existing, memfd];
    let samples = in_turn(ROUNDS, &mut runners);
    for (runner, samples) in runners.iter().zip(&samples) {
        let met = if samples.median() <= START_MS { "met" } else { "missed" };
        let (min, median, max) = (samples.min(), samples.median(), samples.max());
        println!("| {} | {min:.2} | {median:.2} | {max:.2} | ≤ {START_MS} ms: {met} |", runner.name);
    }
    println!();
}
