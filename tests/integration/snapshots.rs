//! Snapshots: counters are saved, and restored when their memory is gone.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use transom::clock::Clock;
use transom::config;
use transom::metrics::Registry;
use transom::metrics::events::SnapshotMetrics;
use transom::persistence::background::BackgroundWriter;
use transom::persistence::counters::Counters;
use transom::persistence::file_header::Header;
use transom::persistence::snapshot::{self, Written};
use transom_limiter::counter::CounterWord;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::format_registry::CounterFormats;
use transom_limiter::key::KeyHash;
use transom_limiter::rule_set::{ChargePlan, KeyedRequest, RuleSet};
use transom_limiter::table::{Table, Watermarks};

use crate::support::gateway::{START_S, with_listen};
use crate::support::process::{BINARY, Process, run};
use crate::support::ratelimit_parser::remaining;
use crate::support::{Scratch, eventually, one_rule, seeded_rng};

const NOW_MS: u64 = START_S * 1000;
const HEAD_BYTES: u64 = 112;
const WAY_BYTES: u64 = 48;
const COUNTER_BYTES: u64 = 24;
const CHECKSUM_BYTES: u64 = 32;

/// A plain rule, and one whose tokens roll over.
const TWO: &str = "[upstreams.u]\nbuiltin = \"echo\"
    [rules.plain]\nkey = \"ip\"\nwindows = [\"9/366d\"]
    [rules.saving]\nkey = \"ip\"\nwindows = [{ limit = 5, period = \"366d\", capacity = 8 }]
    [rules.ahead]\nkey = \"ip\"\nwindows = [{ limit = 7, period = \"366d\", reserve = 5 }]
    [[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\nrules = [\"plain\", \"saving\", \"ahead\"]\n";

struct Place {
    scratch: Scratch,
}

impl Place {
    fn new() -> Place {
        Place { scratch: Scratch::in_memory() }
    }

    fn file(&self) -> PathBuf {
        self.scratch.path().join("counters")
    }

    fn snapshot(&self) -> PathBuf {
        self.scratch.path().join("snapshot")
    }

    fn toml(&self, capacity: usize) -> String {
        let (file, snapshot) = (self.file(), self.snapshot());
        format!(
            "workers = 1\n{TWO}[counters]\ncapacity = {capacity}\nfile = \"{}\"\nsnapshot = \"{}\"\nsnapshot_every = \"1s\"\n",
            file.display(),
            snapshot.display()
        )
    }
}

/// The remaining tokens in each of the three rules after one more request.
fn left(process: &Process) -> [u64; 3] {
    let response = process.get("/a").expect(200);
    ["plain", "saving", "ahead"].map(|rule| remaining(&response, rule))
}

/// Ends a gateway as an operator does, which writes the last snapshot.
fn end(mut process: Process) {
    process.signal("TERM");
    assert!(process.wait().success());
}

fn in_memory(capacity: usize, snapshot: Option<&Path>, clock: &Clock) -> Counters {
    Counters::open(&settings(capacity, snapshot), None, 1, clock).unwrap().0
}

fn settings(capacity: usize, snapshot: Option<&Path>) -> config::Counters {
    let every = Duration::from_secs(5);
    config::Counters {
        capacity,
        file: None,
        snapshot: snapshot.map(Path::to_owned),
        snapshot_every: every,
        shared: None,
    }
}

fn write(counters: &Counters, place: &Place, clock: &Clock) -> Written {
    snapshot::write(counters, &place.snapshot(), clock, Duration::ZERO).unwrap()
}

/// The contents of a table: the words by position.
fn words(counters: &Counters) -> BTreeMap<usize, u128> {
    counters.table.live_counters(0).map(|(place, word)| (place, word.bits())).collect()
}

#[test]
fn a_snapshot_replaces_a_missing_or_stale_file() {
    let place = Place::new();
    let first = Process::spawn(&place.toml(64));
    assert_eq!([left(&first), left(&first)], [[8, 7, 6], [7, 6, 5]]);
    end(first);
    assert_eq!(fs::metadata(place.snapshot()).unwrap().permissions().mode() & 0o7777, 0o600);
    fs::remove_file(place.file()).unwrap();
    let second = Process::spawn(&place.toml(64));
    assert_eq!(left(&second), [6, 5, 4]);
    second.wait_for_stderr("restored the counters from the snapshot");
    end(second);
    let mut bytes = fs::read(place.file()).unwrap();
    let header = Header::decode(&bytes, bytes.len() as u64).unwrap_or_else(|why| panic!("{why}"));
    bytes[..Header::BYTES].copy_from_slice(&Header { boot: [b'0'; 36], ..header }.encode());
    fs::write(place.file(), bytes).unwrap();
    let third = Process::spawn(&place.toml(64));
    assert_eq!(left(&third), [5, 4, 3]);
    third.wait_for_stderr("before this machine was last started");
}

#[test]
fn the_file_precedes_the_snapshot() {
    let place = Place::new();
    let first = Process::spawn(&place.toml(64));
    left(&first);
    end(first);
    let old = fs::read(place.snapshot()).unwrap();
    let second = Process::spawn(&place.toml(64));
    assert_eq!(left(&second), [7, 6, 5]);
    end(second);
    fs::write(place.snapshot(), old).unwrap();
    assert_eq!(left(&Process::spawn(&place.toml(64))), [6, 5, 4]);
}

#[test]
fn a_snapshot_for_another_capacity_is_ignored_with_a_warning() {
    let place = Place::new();
    let first = Process::spawn(&place.toml(64));
    left(&first);
    end(first);
    fs::remove_file(place.file()).unwrap();
    let second = Process::spawn(&place.toml(128));
    assert_eq!(left(&second), [8, 7, 6]);
    let said = second.wait_for_stderr("another `counters.capacity`");
    assert!(said.contains(&place.snapshot().display().to_string()), "{said}");
}

/// A rule set of several window kinds, and counters that were charged.
struct Counted {
    rule_set: RuleSet,
    charge_plans: Vec<ChargePlan>,
    counters: Counters,
}

impl Counted {
    fn new(counters: Counters) -> Counted {
        let rules = config::read(&with_listen(TWO)).unwrap().rules;
        let mut rule_set = RuleSet::new(&rules, counters.seed, None);
        counters.formats.join(&rule_set.counter_formats()).unwrap();
        rule_set.adopt_formats(&counters.formats.formats());
        let charge_plans = (0..rules.len()).map(|rule| rule_set.charge_plan(&[rule])).collect();
        Counted { rule_set, charge_plans, counters }
    }

    /// Whether one more token is there for a key under a rule; from windows to come if need be.
    fn takes(&self, rule: usize, key: u64, now_ms: u64) -> bool {
        let key = KeyHash { bucket_hash: key << 40, tag: key << 50 | 1 << 20 };
        let mut context = DecisionContext::default();
        context.inputs.reserve = true;
        context.inputs.keyed_requests = vec![Some(KeyedRequest { key, offset: 0, variant: 0, cost: 1 })];
        let judgement = self.rule_set.decide(
            &self.charge_plans[rule],
            &self.counters.table,
            DecisionTime::read(&|| now_ms),
            &mut context,
        );
        !matches!(judgement, Decision::Refused)
    }
}

#[test]
fn rolling_windows_and_watermarks_are_restored() {
    let (place, clock) = (Place::new(), Clock::manual(NOW_MS));
    let before = Counted::new(in_memory(64, None, &clock));
    for rule in 0..3 {
        assert!((0..6).all(|_| before.takes(rule, 1, NOW_MS) || rule == 1), "rule {rule}");
    }
    let marks = Watermarks { horizon_ms: NOW_MS - 5, overflow_horizon_ms: NOW_MS - 7, overflow_end_ms: NOW_MS + 9 };
    before.counters.table.restore_watermarks(marks);
    let written = write(&before.counters, &place, &clock);
    assert_eq!(written, Written::Counters(3));
    // A clock that is behind goes on from the time of the snapshot.
    let behind = Clock::manual(NOW_MS - 3_600_000);
    let after = Counted::new(in_memory(64, Some(&place.snapshot()), &behind));
    assert_eq!(behind.now().unix_ms, NOW_MS);
    assert_eq!(after.counters.table.watermarks(), marks);
    assert_eq!(after.counters.formats.formats(), before.counters.formats.formats());
    assert_eq!(words(&after.counters), words(&before.counters));
    let last = |counted: &Counted, rule| (0..20).take_while(|_| counted.takes(rule, 1, NOW_MS)).count();
    for rule in 0..3 {
        assert_eq!(last(&after, rule), last(&before, rule), "rule {rule}");
    }
}

#[test]
fn only_open_windows_are_written_and_restored() {
    let (place, clock) = (Place::new(), Clock::manual(NOW_MS));
    let counters = in_memory(10_000, None, &clock);
    let size = || {
        write(&counters, &place, &clock);
        fs::metadata(place.snapshot()).unwrap().len()
    };
    assert_eq!(size(), HEAD_BYTES + CHECKSUM_BYTES);
    for key in 0..1000 {
        counters.table.restore(key, CounterWord::new(1 + key as u64, NOW_MS + 1000 * (1 + key as u64 % 2), 1));
    }
    assert_eq!(size(), HEAD_BYTES + 1000 * COUNTER_BYTES + CHECKSUM_BYTES);
    clock.advance(Duration::from_secs(1));
    assert_eq!(size(), HEAD_BYTES + 500 * COUNTER_BYTES + CHECKSUM_BYTES);
    clock.advance(Duration::from_secs(1));
    assert!(words(&in_memory(10_000, Some(&place.snapshot()), &clock)).is_empty());
    let rolling = Counted::new(counters);
    write(&rolling.counters, &place, &clock);
    assert_eq!(fs::metadata(place.snapshot()).unwrap().len(), HEAD_BYTES + 2 * WAY_BYTES + CHECKSUM_BYTES);
}

#[test]
fn a_damaged_snapshot_is_ignored_as_a_whole() {
    let (place, clock) = (Place::new(), Clock::manual(NOW_MS));
    let before = Counted::new(in_memory(64, None, &clock));
    (0..3).for_each(|rule| (0..9).for_each(|key| _ = before.takes(rule, key, NOW_MS)));
    write(&before.counters, &place, &clock);
    let good = fs::read(place.snapshot()).unwrap();
    let restored = |bytes: &[u8]| {
        fs::write(place.snapshot(), bytes).unwrap();
        let clock = Clock::manual(NOW_MS - 1000);
        let counters = in_memory(64, Some(&place.snapshot()), &clock);
        let is_whole = words(&counters) == words(&before.counters);
        let ledger = counters.formats.formats();
        let is_fresh = words(&counters).is_empty() && ledger == CounterFormats::default();
        let time_ms = clock.now().unix_ms;
        assert!(
            is_whole || (is_fresh && counters.table.watermarks() == Watermarks::default() && time_ms == NOW_MS - 1000)
        );
        is_whole
    };
    assert!(restored(&good));
    for bit in 0..8 * good.len() {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(!restored(&bytes), "bit {bit}");
    }
    for length in 0..good.len() {
        assert!(!restored(&good[..length]), "{length} bytes");
    }
    assert!(!restored(&[&good[..], &[0]].concat()));
}

#[test]
fn a_snapshot_from_the_future_is_ignored() {
    let (place, clock) = (Place::new(), Clock::manual(NOW_MS));
    let restored = |horizon_ms, spill_horizon_ms| {
        let counters = in_memory(64, None, &clock);
        counters.table.restore_watermarks(Watermarks {
            horizon_ms,
            overflow_horizon_ms: spill_horizon_ms,
            overflow_end_ms: 0,
        });
        assert_eq!(write(&counters, &place, &clock), Written::Counters(0));
        snapshot::load(&place.snapshot(), Table::layout(64)).is_some()
    };
    // Processes do not read the clock at the same moment.
    let most_ms = NOW_MS + 60_000;
    assert!(restored(most_ms, most_ms));
    assert!(!restored(most_ms + 1, 0) && !restored(0, most_ms + 1));
}

/// The number of kills; few by default.
fn times(few: usize) -> usize {
    std::env::var("TRANSOM_KILLS").map_or(few, |text| text.parse::<usize>().expect("it is a number") / 10)
}

/// Counters in every second slot, whose windows last a day.
fn many(capacity: usize, clock: &Clock) -> Counters {
    let counters = in_memory(capacity, None, clock);
    let end_ms = clock.now().unix_ms + 86_400_000;
    (0..capacity).for_each(|key| _ = counters.table.restore(2 * key, CounterWord::new(1 + key as u64, end_ms, 1)));
    counters
}

#[test]
fn a_kill_while_restoring_leaves_no_partial_file() {
    let place = Place::new();
    let (capacity, clock) = (100_000, Clock::system());
    write(&many(capacity, &clock), &place, &clock);
    let config = place.scratch.write("gateway.toml", with_listen(&place.toml(capacity)));
    let mut rng = seeded_rng();
    let new = place.scratch.path().join("counters.new");
    // The requested number of times, and until a kill came before the file was in its place.
    let (mut kills, mut within) = (0, 0);
    while kills < times(10) || within == 0 {
        kills += 1;
        assert!(kills <= 50 * times(10), "no kill came before the file was in its place");
        let mut command = Command::new(BINARY);
        command.arg("--config").arg(&config).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        eventually("a file is made", || new.exists() || place.file().exists());
        thread::sleep(Duration::from_micros(rng.u64(..50_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        within += u64::from(new.exists());
        let process = Process::spawn(&place.toml(capacity));
        drop(process);
        let bytes = fs::read(place.file()).unwrap();
        let header = Header::decode(&bytes, bytes.len() as u64).unwrap_or_else(|why| panic!("{why}"));
        let words = bytes[header.table_at()..].as_chunks::<16>().0;
        let counters =
            words.iter().filter(|word| CounterWord::from_bits(u128::from_le_bytes(**word)).count() == 1).count();
        assert_eq!(counters, capacity);
        fs::remove_file(place.file()).unwrap();
    }
}

#[test]
fn a_kill_while_writing_keeps_the_former_snapshot() {
    let place = Place::new();
    let (capacity, clock) = (100_000, Clock::system());
    let now_ms = clock.now().unix_ms;
    write(&many(capacity, &clock), &place, &clock);
    let mut rng = seeded_rng();
    // The requested number of times, and until a kill came while a snapshot was being written.
    let (mut kills, mut within, mut latest_ms) = (0, 0, now_ms);
    while kills < times(4) || within == 0 {
        kills += 1;
        assert!(kills <= 50 * times(4), "no kill came while a snapshot was being written");
        let process = Process::spawn(&place.toml(capacity));
        // Written every second; at any moment of that.
        let new = place.scratch.path().join("snapshot.new");
        eventually("a snapshot is being written", || new.exists());
        thread::sleep(Duration::from_micros(rng.u64(..200_000)));
        drop(process);
        within += u64::from(new.exists());
        let saved = snapshot::load(&place.snapshot(), Table::layout(capacity)).expect("there is always a whole one");
        assert!(saved.time_ms >= latest_ms);
        latest_ms = saved.time_ms;
        let restored = in_memory(capacity, Some(&place.snapshot()), &clock);
        assert_eq!(restored.table.live_counters(now_ms).count(), capacity);
        // A complete file is overwritten; a file that was not renamed yet belongs to no process.
        let _ = fs::remove_file(&new);
    }
}

fn told(process: &Process, outcome: &str) -> u64 {
    process.metrics().sum("transom_counters_snapshots_total", &[("outcome", outcome)])
}

#[test]
fn a_failed_write_is_reported_once_and_retried() {
    let place = Place::new();
    let obstacle = place.scratch.path().join("snapshot.new");
    let process = Process::spawn(&place.toml(64));
    eventually("it is written", || told(&process, "written") >= 1);
    eventually("nobody writes", || fs::create_dir(&obstacle).is_ok());
    eventually("it fails more than once", || told(&process, "failed") >= 2);
    assert_eq!(left(&process), [8, 7, 6]);
    let said = process.wait_for_stderr("cannot be written");
    assert_eq!(said.lines().filter(|line| line.contains("cannot be written")).count(), 1);
    let written = told(&process, "written");
    fs::remove_dir(&obstacle).unwrap();
    eventually("it is written again", || told(&process, "written") > written);
    assert!(place.snapshot().exists());
}

#[test]
fn an_unwritable_or_foreign_path_is_refused_at_start() {
    for (name, says) in [
        ("letters", "it is not a snapshot of counters"),
        ("folder", "it is not a regular file"),
        ("no/where", "No such file"),
    ] {
        let scratch = Scratch::new();
        let at = scratch.path().join(name);
        scratch.write("letters", "Dear reader,\n");
        fs::create_dir(scratch.path().join("folder")).unwrap();
        let toml = format!(
            "[counters]\nsnapshot = \"{}\"\n{}",
            at.display(),
            one_rule("key = \"ip\"\nwindows = [\"8/hour\"]")
        );
        let config = scratch.write("gateway.toml", with_listen(&toml)).display().to_string();
        let (code, _, said) = run(&["--config", &config]);
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains(says) && said.contains(&at.display().to_string()), "{said}");
        assert_eq!(fs::read(scratch.path().join("letters")).unwrap(), b"Dear reader,\n");
    }
}

/// A limit on file size simulates a full file system.
#[test]
fn a_full_file_system_keeps_the_former_snapshot() {
    let place = Place::new();
    let (capacity, clock) = (100_000, Clock::system());
    let counters = in_memory(capacity, None, &clock);
    let end_ms = clock.now().unix_ms + 86_400_000;
    // In every slot, twice as many as the table is for: only then is a snapshot larger than the table.
    (0..2 * capacity).for_each(|key| assert!(counters.table.restore(key, CounterWord::new(1 + key as u64, end_ms, 1))));
    write(&counters, &place, &clock);
    let former = fs::read(place.snapshot()).unwrap();
    let table = Table::layout(capacity).bytes();
    let limit = (table + former.len()) / 2 / 512;
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' XFSZ; ulimit -f $0; exec \"$@\"", &limit.to_string(), BINARY]);
    let toml = place.toml(capacity).replace(&format!("file = \"{}\"\n", place.file().display()), "");
    let process = Process::spawn_command(command, &toml, Scratch::new());
    eventually("it fails", || told(&process, "failed") >= 1);
    process.get("/a").expect(200);
    process.wait_for_stderr("cannot be written: File too large");
    drop(process);
    assert!(fs::read(place.snapshot()).unwrap() == former);
}

#[test]
fn two_gateways_can_write_one_snapshot() {
    let place = Place::new();
    let both = [Process::spawn(&place.toml(64)), Process::spawn(&place.toml(64))];
    assert_eq!([left(&both[0]), left(&both[1])], [[8, 7, 6], [7, 6, 5]]);
    let written = || both.iter().map(|process| told(process, "written")).sum::<u64>();
    eventually("snapshots are written", || written() >= 3);
    both.iter().for_each(|process| assert_eq!(told(process, "failed"), 0));
    let [first, second] = both;
    end(first);
    end(second);
    fs::remove_file(place.file()).unwrap();
    assert_eq!(left(&Process::spawn(&place.toml(64))), [6, 5, 4]);
}

/// Holds the lock that a process holds while it writes a snapshot.
fn writer(place: &Place) -> fs::File {
    let new = place.scratch.path().join("snapshot.new");
    let mut held = None;
    eventually("nobody else writes", || {
        let file = fs::File::options().write(true).create(true).truncate(false).open(&new).unwrap();
        let is_there = file.try_lock().is_ok()
            && fs::metadata(&new).is_ok_and(|meta| meta.ino() == file.metadata().unwrap().ino());
        held = is_there.then_some(file);
        is_there
    });
    held.unwrap()
}

#[test]
fn the_last_snapshot_waits_for_one_that_is_being_written() {
    let place = Place::new();
    let (mut process, held) = (Process::spawn(&place.toml(64)), writer(&place));
    assert_eq!(left(&process), [8, 7, 6]);
    process.signal("TERM");
    let admin = process.admin;
    eventually("it has drained", || TcpStream::connect(admin).is_err());
    // The elapsed time is the subject of the test: without a wait, the process would end now.
    thread::sleep(Duration::from_millis(300));
    assert!(process.is_running());
    drop(held);
    assert!(process.wait().success());
    fs::remove_file(place.file()).unwrap();
    assert_eq!(left(&Process::spawn(&place.toml(64))), [7, 6, 5]);
}

#[test]
fn only_a_graceful_exit_writes_a_last_snapshot() {
    let (place, clock) = (Place::new(), Clock::manual(NOW_MS));
    let config = settings(64, Some(&place.snapshot()));
    let counters = Arc::new(Counters::open(&config, None, 1, &clock).unwrap().0);
    let start = || {
        let meter = SnapshotMetrics::new(&Arc::new(Registry::default()));
        BackgroundWriter::start(Arc::clone(&counters), clock.clone(), &config, meter).unwrap()
    };
    // A start that fails lets go of it.
    drop(start());
    eventually("the thread ends", || Arc::strong_count(&counters) == 1);
    assert_eq!(fs::read_dir(place.scratch.path()).unwrap().count(), 0);
    start().finish();
    assert!(place.snapshot().exists());
}
