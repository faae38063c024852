//! Snapshots: counters are saved, and restored when the counters file is missing.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use transom_runtime::clock::Clock;

use transom::persistence::background::BackgroundWriter;
use transom::persistence::counters::Counters;
use transom::persistence::file_header::Header;
use transom::persistence::snapshot::{self, Written};
use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::counter::CounterWord;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::VariantId;
use transom_limiter::key::KeyHash;
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::table::{Table, Watermarks};
use transom_runtime::metrics::Registry;
use transom_runtime::metrics::events::SnapshotMetrics;

use crate::support::gateway::{START_S, with_listen};
use crate::support::process::{BINARY, Process, run};
use crate::support::ratelimit_parser::remaining;
use crate::support::{TempDir, eventually, one_rule, seeded_rng};

const NOW_MS: u64 = START_S * 1000;
const HEAD_BYTES: u64 = 104;
const COUNTER_BYTES: u64 = 24;
const CHECKSUM_BYTES: u64 = 32;

/// A plain rule, one whose tokens roll over, and one that reserves tokens.
const RULES: &str = "[upstreams.u]\nbuiltin = \"echo\"
    [rules.plain]\nkey = \"ip\"\nwindows = [\"9/366d\"]
    [rules.rolling]\nkey = \"ip\"\nwindows = [{ limit = 5, period = \"366d\", capacity = 8 }]
    [rules.reserving]\nkey = \"ip\"\nwindows = [{ limit = 7, period = \"366d\", reserve = 5 }]
    [[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\nrules = [\"plain\", \"rolling\", \"reserving\"]\n";

struct Files {
    scratch: TempDir,
}

impl Files {
    fn new() -> Files {
        Files { scratch: TempDir::in_memory() }
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
            "workers = 1\n{RULES}[counters]\ncapacity = {capacity}\nfile = \"{}\"\nsnapshot = \"{}\"\nsnapshot_every = \"1s\"\n",
            file.display(),
            snapshot.display()
        )
    }
}

/// The remaining tokens in each of the three rules after one more request.
fn remaining_of_rules(process: &Process) -> [u64; 3] {
    let response = process.get("/a").expect(200);
    ["plain", "rolling", "reserving"].map(|rule| remaining(&response, rule))
}

/// Stops a gateway gracefully, which writes the last snapshot.
fn stop_gracefully(mut process: Process) {
    process.signal("TERM");
    assert!(process.wait().success());
}

fn in_memory(capacity: usize, snapshot: Option<&Path>, clock: &Clock) -> Counters {
    Counters::open(&settings(capacity, snapshot), None, clock).unwrap()
}

fn settings(capacity: usize, snapshot: Option<&Path>) -> transom_config::counters::Counters {
    let every = Duration::from_secs(5);
    transom_config::counters::Counters {
        capacity,
        file: None,
        snapshot: snapshot.map(Path::to_owned),
        snapshot_every: every,
        shared: None,
    }
}

fn write(counters: &Counters, files: &Files, clock: &Clock) -> Written {
    snapshot::write(counters, &files.snapshot(), clock, Duration::ZERO).unwrap()
}

/// The contents of a table: the words by position.
fn words(counters: &Counters) -> BTreeMap<usize, u128> {
    counters.table.live_counters(0).map(|(files, word)| (files, word.bits())).collect()
}

#[test]
fn a_snapshot_replaces_a_missing_or_stale_file() {
    let files = Files::new();
    let first = Process::spawn(&files.toml(64));
    assert_eq!([remaining_of_rules(&first), remaining_of_rules(&first)], [[8, 7, 6], [7, 6, 5]]);
    stop_gracefully(first);
    assert_eq!(fs::metadata(files.snapshot()).unwrap().permissions().mode() & 0o7777, 0o600);
    fs::remove_file(files.file()).unwrap();
    let second = Process::spawn(&files.toml(64));
    assert_eq!(remaining_of_rules(&second), [6, 5, 4]);
    second.wait_for_stderr("restored the counters from the snapshot");
    stop_gracefully(second);
    let mut bytes = fs::read(files.file()).unwrap();
    let header = Header::decode(&bytes, bytes.len() as u64).unwrap_or_else(|why| panic!("{why}"));
    bytes[..Header::BYTES].copy_from_slice(&Header { boot: [b'0'; 36], ..header }.encode());
    fs::write(files.file(), bytes).unwrap();
    let third = Process::spawn(&files.toml(64));
    assert_eq!(remaining_of_rules(&third), [5, 4, 3]);
    third.wait_for_stderr("before this machine was last started");
}

#[test]
fn the_file_precedes_the_snapshot() {
    let files = Files::new();
    let first = Process::spawn(&files.toml(64));
    remaining_of_rules(&first);
    stop_gracefully(first);
    let old = fs::read(files.snapshot()).unwrap();
    let second = Process::spawn(&files.toml(64));
    assert_eq!(remaining_of_rules(&second), [7, 6, 5]);
    stop_gracefully(second);
    fs::write(files.snapshot(), old).unwrap();
    assert_eq!(remaining_of_rules(&Process::spawn(&files.toml(64))), [6, 5, 4]);
}

#[test]
fn a_snapshot_for_another_capacity_is_ignored_with_a_warning() {
    let files = Files::new();
    let first = Process::spawn(&files.toml(64));
    remaining_of_rules(&first);
    stop_gracefully(first);
    fs::remove_file(files.file()).unwrap();
    let second = Process::spawn(&files.toml(128));
    assert_eq!(remaining_of_rules(&second), [8, 7, 6]);
    let stderr = second.wait_for_stderr("another `counters.capacity`");
    assert!(stderr.contains(&files.snapshot().display().to_string()), "{stderr}");
}

/// A rule set of several window kinds, and counters that were charged.
struct ChargedCounters {
    charge_plans: Vec<ChargePlan>,
    counters: Counters,
}

impl ChargedCounters {
    fn new(counters: Counters) -> ChargedCounters {
        let config = transom_config::read(&with_listen(RULES)).unwrap();
        let rule_set = Arc::new(RuleSet::new(config.limiter_rules(), counters.seed, None));
        let charge_plans = rule_set.rules.ids().map(|rule| rule_set.charge_plan([rule])).collect();
        ChargedCounters { charge_plans, counters }
    }

    /// Whether a key gets one more token under a rule, reserved from a later window if necessary.
    fn takes_token(&self, rule: usize, key: u64, now_ms: u64) -> bool {
        let key = KeyHash { bucket_hash: key << 40, tag: key << 50 | 1 << 20 };
        let mut context = DecisionContext::default();
        context.inputs.reserve = true;
        context.inputs.keyed_requests =
            vec![Some(KeyedRequest { key, offset: 0, variant: VariantId::DEFAULT, cost: 1 })].into();
        let plan = &self.charge_plans[rule];
        let decision = plan.decide(&self.counters.table, DecisionTime::read(&|| now_ms), &mut context);
        !matches!(decision, Decision::Refused)
    }
}

#[test]
fn rolling_windows_and_watermarks_are_restored() {
    let (files, clock) = (Files::new(), Clock::manual(NOW_MS));
    let before = ChargedCounters::new(in_memory(64, None, &clock));
    for rule in 0..3 {
        assert!((0..6).all(|_| before.takes_token(rule, 1, NOW_MS) || rule == 1), "rule {rule}");
    }
    let marks = Watermarks { horizon_ms: NOW_MS - 5, overflow_horizon_ms: NOW_MS - 7, overflow_end_ms: NOW_MS + 9 };
    before.counters.table.restore_watermarks(marks);
    let written = write(&before.counters, &files, &clock);
    assert_eq!(written, Written::Counters(3));
    // A clock that is behind continues from the time of the snapshot.
    let behind = Clock::manual(NOW_MS - 3_600_000);
    let after = ChargedCounters::new(in_memory(64, Some(&files.snapshot()), &behind));
    assert_eq!(behind.now().unix_ms, NOW_MS);
    assert_eq!(after.counters.table.watermarks(), marks);
    assert_eq!(words(&after.counters), words(&before.counters));
    let last = |counted: &ChargedCounters, rule| (0..20).take_while(|_| counted.takes_token(rule, 1, NOW_MS)).count();
    for rule in 0..3 {
        assert_eq!(last(&after, rule), last(&before, rule), "rule {rule}");
    }
}

#[test]
fn only_open_windows_are_written_and_restored() {
    let (files, clock) = (Files::new(), Clock::manual(NOW_MS));
    let counters = in_memory(10_000, None, &clock);
    let size = || {
        write(&counters, &files, &clock);
        fs::metadata(files.snapshot()).unwrap().len()
    };
    assert_eq!(size(), HEAD_BYTES + CHECKSUM_BYTES);
    for key in 0..1000 {
        counters.table.restore(key, CounterWord::new(1 + key as u64, NOW_MS + 1000 * (1 + key as u64 % 2), 1));
    }
    assert_eq!(size(), HEAD_BYTES + 1000 * COUNTER_BYTES + CHECKSUM_BYTES);
    clock.advance(Duration::from_secs(1));
    assert_eq!(size(), HEAD_BYTES + 500 * COUNTER_BYTES + CHECKSUM_BYTES);
    clock.advance(Duration::from_secs(1));
    assert!(words(&in_memory(10_000, Some(&files.snapshot()), &clock)).is_empty());
}

#[test]
fn a_damaged_snapshot_is_ignored_as_a_whole() {
    let (files, clock) = (Files::new(), Clock::manual(NOW_MS));
    let before = ChargedCounters::new(in_memory(64, None, &clock));
    (0..3).for_each(|rule| (0..9).for_each(|key| _ = before.takes_token(rule, key, NOW_MS)));
    write(&before.counters, &files, &clock);
    let good = fs::read(files.snapshot()).unwrap();
    let restored = |bytes: &[u8]| {
        fs::write(files.snapshot(), bytes).unwrap();
        let clock = Clock::manual(NOW_MS - 1000);
        let counters = in_memory(64, Some(&files.snapshot()), &clock);
        let is_whole = words(&counters) == words(&before.counters);
        let is_fresh = words(&counters).is_empty();
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
    let (files, clock) = (Files::new(), Clock::manual(NOW_MS));
    let restored = |horizon_ms, overflow_horizon_ms| {
        let counters = in_memory(64, None, &clock);
        counters.table.restore_watermarks(Watermarks { horizon_ms, overflow_horizon_ms, overflow_end_ms: 0 });
        assert_eq!(write(&counters, &files, &clock), Written::Counters(0));
        snapshot::load(&files.snapshot(), Table::layout(64)).is_some()
    };
    // The clocks of two processes may differ slightly.
    let most_ms = NOW_MS + 60_000;
    assert!(restored(most_ms, most_ms));
    assert!(!restored(most_ms + 1, 0) && !restored(0, most_ms + 1));
}

/// The number of kills; few by default.
fn kill_count(default: usize) -> usize {
    std::env::var("TRANSOM_KILLS").map_or(default, |text| text.parse::<usize>().expect("it is a number") / 10)
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
    let files = Files::new();
    let (capacity, clock) = (100_000, Clock::system());
    write(&many(capacity, &clock), &files, &clock);
    let config = files.scratch.write("gateway.toml", with_listen(&files.toml(capacity)));
    let mut rng = seeded_rng();
    let new = files.scratch.path().join("counters.new");
    // At least the requested number of kills, and until one came before the file was renamed.
    let (mut kills, mut within) = (0, 0);
    while kills < kill_count(10) || within == 0 {
        kills += 1;
        assert!(kills <= 50 * kill_count(10), "no kill came before the file was renamed");
        let mut command = Command::new(BINARY);
        command.arg("--config").arg(&config).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        eventually("a file is created", || new.exists() || files.file().exists());
        thread::sleep(Duration::from_micros(rng.u64(..50_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        within += u64::from(new.exists());
        let process = Process::spawn(&files.toml(capacity));
        drop(process);
        let bytes = fs::read(files.file()).unwrap();
        let words = bytes[Header::TABLE_AT..].as_chunks::<16>().0;
        let counters =
            words.iter().filter(|word| CounterWord::from_bits(u128::from_le_bytes(**word)).count() == 1).count();
        assert_eq!(counters, capacity);
        fs::remove_file(files.file()).unwrap();
    }
}

#[test]
fn a_kill_while_writing_keeps_the_former_snapshot() {
    let files = Files::new();
    let (capacity, clock) = (100_000, Clock::system());
    let now_ms = clock.now().unix_ms;
    write(&many(capacity, &clock), &files, &clock);
    let mut rng = seeded_rng();
    // At least the requested number of kills, and until one came while a snapshot was being written.
    let (mut kills, mut within, mut latest_ms) = (0, 0, now_ms);
    while kills < kill_count(4) || within == 0 {
        kills += 1;
        assert!(kills <= 50 * kill_count(4), "no kill came while a snapshot was being written");
        let process = Process::spawn(&files.toml(capacity));
        // The kill comes at a random time during or after the write.
        let new = files.scratch.path().join("snapshot.new");
        eventually("a snapshot is being written", || new.exists());
        thread::sleep(Duration::from_micros(rng.u64(..100_000)));
        drop(process);
        within += u64::from(new.exists());
        let saved =
            snapshot::load(&files.snapshot(), Table::layout(capacity)).expect("a complete snapshot always exists");
        assert!(saved.time_ms >= latest_ms);
        latest_ms = saved.time_ms;
        let restored = in_memory(capacity, Some(&files.snapshot()), &clock);
        assert_eq!(restored.table.live_counters(now_ms).count(), capacity);
        // A complete file is overwritten; a file that was not renamed yet belongs to no process.
        let _ = fs::remove_file(&new);
    }
}

fn snapshot_count(process: &Process, outcome: &str) -> u64 {
    process.metrics().sum("transom_counters_snapshots_total", &[("outcome", outcome)])
}

#[test]
fn a_failed_write_is_reported_once_and_retried() {
    let files = Files::new();
    let obstacle = files.scratch.path().join("snapshot.new");
    let process = Process::spawn(&files.toml(64));
    eventually("a snapshot is written", || snapshot_count(&process, "written") >= 1);
    eventually("no snapshot is being written", || fs::create_dir(&obstacle).is_ok());
    eventually("several writes fail", || snapshot_count(&process, "failed") >= 2);
    assert_eq!(remaining_of_rules(&process), [8, 7, 6]);
    let stderr = process.wait_for_stderr("cannot be written");
    assert_eq!(stderr.lines().filter(|line| line.contains("cannot be written")).count(), 1);
    let written = snapshot_count(&process, "written");
    fs::remove_dir(&obstacle).unwrap();
    eventually("another snapshot is written", || snapshot_count(&process, "written") > written);
    assert!(files.snapshot().exists());
}

#[test]
fn an_unwritable_or_foreign_path_is_refused_at_start() {
    for (name, reason) in [
        ("letters", "it is not a snapshot of counters"),
        ("folder", "it is not a regular file"),
        ("no/where", "No such file"),
    ] {
        let scratch = TempDir::new();
        let at = scratch.path().join(name);
        scratch.write("letters", "Dear reader,\n");
        fs::create_dir(scratch.path().join("folder")).unwrap();
        let toml = format!(
            "[counters]\nsnapshot = \"{}\"\n{}",
            at.display(),
            one_rule("key = \"ip\"\nwindows = [\"8/hour\"]")
        );
        let config = scratch.write("gateway.toml", with_listen(&toml)).display().to_string();
        let (code, _, stderr) = run(&["--config", &config]);
        assert_eq!(code, Some(1), "{stderr}");
        assert!(stderr.contains(reason) && stderr.contains(&at.display().to_string()), "{stderr}");
        assert_eq!(fs::read(scratch.path().join("letters")).unwrap(), b"Dear reader,\n");
    }
}

/// A limit on file size simulates a full file system.
#[test]
fn a_full_file_system_keeps_the_former_snapshot() {
    let files = Files::new();
    let (capacity, clock) = (100_000, Clock::system());
    let counters = in_memory(capacity, None, &clock);
    let end_ms = clock.now().unix_ms + 86_400_000;
    // Counters in every slot, twice the capacity: only then is the snapshot larger than the table.
    (0..2 * capacity).for_each(|key| assert!(counters.table.restore(key, CounterWord::new(1 + key as u64, end_ms, 1))));
    write(&counters, &files, &clock);
    let former = fs::read(files.snapshot()).unwrap();
    let table = Table::layout(capacity).bytes();
    let limit = (table + former.len()) / 2 / 512;
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' XFSZ; ulimit -f $0; exec \"$@\"", &limit.to_string(), BINARY]);
    let toml = files.toml(capacity).replace(&format!("file = \"{}\"\n", files.file().display()), "");
    let process = Process::spawn_command(command, &toml, TempDir::new());
    eventually("a write fails", || snapshot_count(&process, "failed") >= 1);
    process.get("/a").expect(200);
    process.wait_for_stderr("cannot be written: File too large");
    drop(process);
    assert!(fs::read(files.snapshot()).unwrap() == former);
}

#[test]
fn two_gateways_can_write_one_snapshot() {
    let files = Files::new();
    let both = [Process::spawn(&files.toml(64)), Process::spawn(&files.toml(64))];
    assert_eq!([remaining_of_rules(&both[0]), remaining_of_rules(&both[1])], [[8, 7, 6], [7, 6, 5]]);
    let written = || both.iter().map(|process| snapshot_count(process, "written")).sum::<u64>();
    eventually("snapshots are written", || written() >= 3);
    both.iter().for_each(|process| assert_eq!(snapshot_count(process, "failed"), 0));
    let [first, second] = both;
    stop_gracefully(first);
    stop_gracefully(second);
    fs::remove_file(files.file()).unwrap();
    assert_eq!(remaining_of_rules(&Process::spawn(&files.toml(64))), [6, 5, 4]);
}

/// Takes the lock that a process holds while it writes a snapshot.
fn lock_for_writing(files: &Files) -> fs::File {
    let new = files.scratch.path().join("snapshot.new");
    let mut held = None;
    eventually("no process writes a snapshot", || {
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
    let files = Files::new();
    let (mut process, held) = (Process::spawn(&files.toml(64)), lock_for_writing(&files));
    assert_eq!(remaining_of_rules(&process), [8, 7, 6]);
    process.signal("TERM");
    let admin = process.admin;
    eventually("the gateway has drained", || TcpStream::connect(admin).is_err());
    // The elapsed time is the subject of the test: without a wait, the process would end now.
    thread::sleep(Duration::from_millis(300));
    assert!(process.is_running());
    drop(held);
    assert!(process.wait().success());
    fs::remove_file(files.file()).unwrap();
    assert_eq!(remaining_of_rules(&Process::spawn(&files.toml(64))), [7, 6, 5]);
}

#[test]
fn only_a_graceful_exit_writes_a_last_snapshot() {
    let (files, clock) = (Files::new(), Clock::manual(NOW_MS));
    let config = settings(64, Some(&files.snapshot()));
    let counters = Arc::new(Counters::open(&config, None, &clock).unwrap());
    let start = || {
        let meter = SnapshotMetrics::new(&Arc::new(Registry::default()));
        BackgroundWriter::start(Arc::clone(&counters), clock.clone(), &config, meter).unwrap()
    };
    // A failed start releases the counters.
    drop(start());
    eventually("the thread ends", || Arc::strong_count(&counters) == 1);
    assert_eq!(fs::read_dir(files.scratch.path()).unwrap().count(), 0);
    start().finish();
    assert!(files.snapshot().exists());
}
