//! Damaged and unusable counters files: counting starts from zero with a warning, or the gateway does not start and reports the
//! reason. The gateway never crashes, and never uses the contents of such a file.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use fastrand::Rng;
use transom_runtime::clock::Clock;

use transom::persistence::counters::Counters;
use transom::persistence::file_header::{BootId, Header};
use transom::persistence::open::OpenError;
use transom_limiter::memory::LINE_BYTES;

use crate::support::gateway::with_listen;
use crate::support::load_checker::now_ms;
use crate::support::process::{BINARY, Process, ProcessGroup};
use crate::support::ratelimit_parser::remaining;
use crate::support::{TempDir, eventually, one_rule};

const CAPACITY: usize = 64;
const VERSION_AT: usize = 16;

fn toml(file: &Path, capacity: usize) -> String {
    let rule = one_rule("key = \"ip\"\nwindows = [\"9/366d\"]");
    format!("workers = 1\n{rule}\n[counters]\ncapacity = {capacity}\nfile = \"{}\"\n", file.display())
}

/// The remaining tokens of nine after one more request.
fn remaining_of_nine(process: &Process) -> u64 {
    remaining(&process.get("/a").expect(200), "r")
}

/// A file in which three requests were counted.
fn file_with_three_requests(file: &Path) -> Vec<u8> {
    let process = Process::spawn(&toml(file, CAPACITY));
    assert_eq!([remaining_of_nine(&process), remaining_of_nine(&process), remaining_of_nine(&process)], [8, 7, 6]);
    drop(process);
    fs::read(file).unwrap()
}

fn write_file(file: &Path, bytes: &[u8], mode: u32) {
    fs::write(file, bytes).unwrap();
    fs::set_permissions(file, fs::Permissions::from_mode(mode)).unwrap();
}

fn sibling_path(file: &Path, ending: &str) -> PathBuf {
    PathBuf::from(format!("{}.{ending}", file.display()))
}

fn header_of(bytes: &[u8]) -> Header {
    Header::decode(bytes, bytes.len() as u64).unwrap_or_else(|why| panic!("{why}"))
}

fn with_header(bytes: &[u8], header: &Header) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[..Header::BYTES].copy_from_slice(&header.encode());
    bytes
}

fn with_number(bytes: &[u8], at: usize, number: u64) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
    bytes
}

#[test]
fn an_incompatible_file_is_renamed_with_a_warning() {
    let scratch = TempDir::in_memory();
    let file = scratch.path().join("counters");
    let good = file_with_three_requests(&file);
    write_file(&file, &good, 0o600);
    assert_eq!(remaining_of_nine(&Process::spawn(&toml(&file, CAPACITY))), 5, "the undamaged file is used");
    let header = header_of(&good);
    let other_boot: BootId = [b'0'; 36];
    let far_ms = now_ms() + 3_600_000;
    let (table_at, time_at) = (Header::TABLE_AT, Header::TIME_AT);
    let longer = [&good[..], &[0; 4096]].concat();
    let identities = "the identities of its counters are version 3, and this is version 0";
    let cases: [(&str, Vec<u8>, u32, &str); 15] = [
        ("nothing", Vec::new(), 0o600, "it is damaged"),
        ("zeros", vec![0; good.len()], 0o600, "it is damaged"),
        ("another version", with_number(&good, VERSION_AT, 1), 0o600, "its layout is version 1"),
        ("other identities", with_number(&good, VERSION_AT, 2 | 3 << 32), 0o600, identities),
        ("another boot", with_header(&good, &Header { boot: other_boot, ..header }), 0o600, "before this machine"),
        ("a bit of the seed", with_number(&good, 48, header.seed.0 ^ 1), 0o600, "it is damaged"),
        ("another time", with_number(&good, time_at, now_ms()), 0o600, "it is damaged"),
        ("a horizon in the future", with_number(&good, table_at + LINE_BYTES, far_ms), 0o600, "it is damaged"),
        ("half a header", good[..2000].to_vec(), 0o600, "it is damaged"),
        ("a header alone", good[..Header::BYTES].to_vec(), 0o600, "it is damaged"),
        ("the beginning of a table", good[..Header::TABLE_AT + 99].to_vec(), 0o600, "it is damaged"),
        ("half a table", good[..good.len() - 4096].to_vec(), 0o600, "it is damaged"),
        ("all but a byte", good[..good.len() - 1].to_vec(), 0o600, "it is damaged"),
        ("too long", longer, 0o600, "it is damaged"),
        ("open to all", good.clone(), 0o666, "its mode is 666, so others can write to it"),
    ];
    for (name, bytes, mode, reason) in cases {
        write_file(&file, &bytes, mode);
        let process = Process::spawn(&toml(&file, CAPACITY));
        assert_eq!([remaining_of_nine(&process), remaining_of_nine(&process)], [8, 7], "{name}");
        let stderr = process.wait_for_stderr("counting starts from zero");
        let warnings: Vec<&str> = stderr.lines().filter(|line| line.contains("counting starts from zero")).collect();
        assert!(warnings.len() == 1 && warnings[0].contains(&file.display().to_string()), "{name}: {stderr}");
        assert!(warnings[0].contains(reason) && warnings[0].contains("WARN"), "{name}: {stderr}");
        assert!(fs::read(sibling_path(&file, "old")).unwrap() == bytes, "{name}: the old file was not kept");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o600);
    }
}

#[test]
fn a_changed_capacity_starts_empty_unless_the_file_is_in_use() {
    let scratch = TempDir::in_memory();
    let file = scratch.path().join("counters");
    file_with_three_requests(&file);
    let first = Process::spawn(&toml(&file, 2 * CAPACITY));
    first.wait_for_stderr("for another `counters.capacity`");
    assert_eq!(remaining_of_nine(&first), 8);
    let second = Process::spawn(&toml(&file, CAPACITY));
    second.wait_for_stderr("for another capacity, which is kept");
    assert_eq!([remaining_of_nine(&second), remaining_of_nine(&first), remaining_of_nine(&second)], [7, 6, 5]);
}

/// Starts the gateway, which must fail, and returns the one line with the reason.
fn start_error(scratch: &TempDir, file: &Path, capacity: usize) -> String {
    let config = scratch.write("refused.toml", with_listen(&toml(file, capacity)));
    let log = scratch.path().join("refused.log");
    let mut command = Command::new(BINARY);
    command.arg("--config").arg(config).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = ProcessGroup::spawn(command.stderr(fs::File::create(&log).unwrap()));
    let mut status = None;
    eventually("the process ends", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    let stderr = fs::read_to_string(log).unwrap();
    assert_eq!(status.unwrap().code(), Some(1), "{stderr}");
    assert!(stderr.lines().count() == 1 && stderr.contains(&file.display().to_string()), "{stderr}");
    stderr
}

#[test]
fn a_path_that_is_not_a_file_is_refused_by_name() {
    let scratch = TempDir::in_memory();
    let at = |name: &str| scratch.path().join(name);
    fs::create_dir(at("folder")).unwrap();
    symlink(at("target"), at("link")).unwrap();
    assert!(Command::new("mkfifo").arg(at("pipe")).status().unwrap().success());
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    scratch.write("text", "");
    // A running executable cannot be opened for writing, and nothing can be created under `/proc`.
    let program = at("program");
    fs::copy("/bin/sleep", &program).unwrap();
    let mut running = ProcessGroup::spawn(Command::new(&program).arg("600"));
    for (file, reason) in [
        (at("folder"), "it is a directory: use the path of a file"),
        (at("link"), "it is a symbolic link"),
        (at("pipe"), "it is a device, a pipe or a socket: use the path of a regular file"),
        (at("socket"), "it is a device, a pipe or a socket: use the path of a regular file"),
        (at("nowhere/counters"), "No such file or directory"),
        (at("text/counters"), "Not a directory"),
        (program.clone(), "Text file busy"),
        (PathBuf::from("/proc/counters"), "No such file or directory"),
    ] {
        let stderr = start_error(&scratch, &file, CAPACITY);
        assert!(stderr.contains(reason), "{}: {stderr}", file.display());
    }
    running.kill().unwrap();
    running.wait().unwrap();
    assert!(!at("target").exists() && fs::read(at("text")).unwrap().is_empty());
}

#[test]
fn a_file_of_another_user_is_refused() {
    let scratch = TempDir::in_memory();
    let file = scratch.path().join("counters");
    file_with_three_requests(&file);
    // Only root can change the owner; other users cannot open a file of root.
    let own = fs::metadata(&file).map(|meta| std::os::unix::fs::MetadataExt::uid(&meta)).unwrap();
    if own == 0 {
        std::os::unix::fs::chown(&file, Some(65_534), None).unwrap();
        let stderr = start_error(&scratch, &file, CAPACITY);
        assert!(stderr.contains("it belongs to user 65534, and this process runs as user 0"), "{stderr}");
    } else {
        fs::set_permissions(&file, fs::Permissions::from_mode(0o400)).unwrap();
        assert!(start_error(&scratch, &file, CAPACITY).contains("Permission denied"));
    }
}

#[test]
fn a_file_in_use_by_another_version_is_refused_with_the_fix() {
    let scratch = TempDir::in_memory();
    let file = scratch.path().join("counters");
    let bytes = with_number(&file_with_three_requests(&file), VERSION_AT, 1);
    write_file(&file, &bytes, 0o600);
    let user = fs::File::open(&file).unwrap();
    user.lock_shared().unwrap();
    let stderr = start_error(&scratch, &file, CAPACITY);
    assert!(stderr.contains("in use by another process, and its layout is version 1"), "{stderr}");
    assert!(stderr.contains("stop that process first"), "{stderr}");
    assert!(fs::read(&file).unwrap() == bytes && !sibling_path(&file, "old").exists());
    drop(user);
    assert_eq!(remaining_of_nine(&Process::spawn(&toml(&file, CAPACITY))), 8);
}

#[test]
fn a_full_file_system_fails_the_start() {
    let scratch = TempDir::in_memory();
    let small = scratch.path().join("small");
    fs::create_dir(&small).unwrap();
    let config = scratch.write("full.toml", with_listen(&toml(&small.join("counters"), 1_000_000)));
    // A file system of one MiB in a mount namespace of this process.
    let script = "mount -t tmpfs -o size=1m tmpfs \"$0\" || exit 99
        \"$@\"; code=$?; ls -A \"$0\" | grep -v lock; exit $code";
    let mut mounted = Command::new("unshare");
    mounted.args(["--map-root-user", "--mount", "sh", "-c", script]).arg(&small);
    let output = mounted.args([BINARY, "--config"]).arg(&config).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("not enough space for") && stderr.contains("No space left"), "{stderr}");
    assert!(stderr.contains("enlarge the file system, or lower `counters.capacity`"), "{stderr}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "", "only the lock file is left");
    // A limit on the size of files is another error.
    let file = scratch.path().join("counters");
    let config = scratch.write("limited.toml", with_listen(&toml(&file, 1_000_000)));
    let script = "trap '' XFSZ; ulimit -f 2000; exec \"$@\"";
    let output = Command::new("sh").args(["-c", script, "sh", BINARY, "--config"]).arg(&config).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(&file.display().to_string()) && stderr.contains("File too large"), "{stderr}");
    // No leftover could be mistaken for a counters file or fill the file system.
    assert!(!file.exists() && !sibling_path(&file, "new").exists());
}

#[test]
fn a_file_that_is_not_a_counters_file_is_not_touched() {
    let scratch = TempDir::in_memory();
    let file = scratch.path().join("letters");
    write_file(&file, b"Dear reader,\n", 0o600);
    let stderr = start_error(&scratch, &file, CAPACITY);
    assert!(stderr.contains("is not a counters file: set `counters.file`"), "{stderr}");
    assert!(fs::read(&file).unwrap() == b"Dear reader,\n" && !sibling_path(&file, "old").exists());
}

#[test]
fn leftovers_of_a_killed_start_are_harmless() {
    let scratch = TempDir::in_memory();
    let file = scratch.path().join("counters");
    fs::write(sibling_path(&file, "new"), "half").unwrap();
    fs::write(sibling_path(&file, "lock"), "").unwrap();
    assert_eq!(remaining_of_nine(&Process::spawn(&toml(&file, CAPACITY))), 8);
    assert!(!sibling_path(&file, "new").exists());
}

/// A sparse file, such as a copy, is allocated at start and not at the first write.
#[test]
fn a_sparse_file_is_allocated_at_start() {
    use std::os::unix::fs::MetadataExt;
    let scratch = TempDir::in_memory();
    let file = scratch.path().join("counters");
    let header = header_of(&file_with_three_requests(&file));
    let whole = fs::metadata(&file).unwrap().blocks();
    fs::remove_file(&file).unwrap();
    write_file(&file, &header.encode(), 0o600);
    fs::File::options().write(true).open(&file).unwrap().set_len(header.file_bytes() as u64).unwrap();
    assert!(fs::metadata(&file).unwrap().blocks() < whole);
    assert_eq!(remaining_of_nine(&Process::spawn(&toml(&file, CAPACITY))), 8);
    assert!(!sibling_path(&file, "old").exists());
    assert!(fs::metadata(&file).unwrap().blocks() >= whole);
}

fn open(file: &Path) -> Result<Counters, OpenError> {
    let every = Duration::from_secs(5);
    let config = transom_config::counters::Counters {
        capacity: CAPACITY,
        file: Some(file.to_owned()),
        snapshot: None,
        snapshot_every: every,
        shared: None,
    };
    let mut opened = Counters::open(&config, None, &Clock::system());
    // A process started by another test inherits open descriptors until it calls exec.
    while matches!(opened, Err(OpenError::InUse { .. })) {
        opened = Counters::open(&config, None, &Clock::system());
    }
    opened
}

/// Whether the counters of the file were opened, and no new ones created.
fn opens_with_seed(file: &Path, seed: (u64, u64)) -> bool {
    let counters = open(file).unwrap();
    (counters.seed.0, counters.seed.1) == seed
}

#[test]
fn every_changed_bit_of_the_header_is_detected() {
    let scratch = TempDir::in_memory();
    let file = scratch.path().join("counters");
    let seed = open(&file).map(|counters| (counters.seed.0, counters.seed.1)).unwrap();
    let mut bytes = fs::read(&file).unwrap();
    let mut is_opened_with_bit_changed = |bit: usize| {
        bytes[bit / 8] ^= 1 << (bit % 8);
        fs::write(&file, &bytes).unwrap();
        bytes[bit / 8] ^= 1 << (bit % 8);
        opens_with_seed(&file, seed)
    };
    for bit in 0..8 * Header::BYTES {
        assert!(!is_opened_with_bit_changed(bit), "bit {bit} of the header");
    }
    let time_bits = 8 * Header::TIME_AT..8 * (Header::TIME_AT + 16);
    for bit in time_bits.clone() {
        assert!(!is_opened_with_bit_changed(bit), "bit {bit}, of the time");
    }
    // The rest of the page after the time is not used, so its contents do not matter.
    for bit in (time_bits.end..8 * Header::TABLE_AT).step_by(4099) {
        assert!(is_opened_with_bit_changed(bit), "bit {bit}");
    }
}

#[test]
fn a_damaged_or_truncated_table_is_opened() {
    let scratch = TempDir::in_memory();
    let file = scratch.path().join("counters");
    let seed = open(&file).map(|counters| (counters.seed.0, counters.seed.1)).unwrap();
    let good = fs::read(&file).unwrap();
    let mut rng = Rng::with_seed(1711);
    let mut opened = 0;
    for round in 0..1000 {
        let mut bytes = good.clone();
        for _ in 0..1 << rng.u32(..12) {
            let bit = rng.usize(8 * Header::TABLE_AT..8 * bytes.len());
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let cut = round % 4 == 0;
        if cut {
            bytes.truncate(rng.usize(..bytes.len()));
        }
        fs::write(&file, &bytes).unwrap();
        let opens_with_seed = opens_with_seed(&file, seed);
        assert!(!(cut && opens_with_seed), "{} bytes", bytes.len());
        opened += u32::from(opens_with_seed);
    }
    assert!(opened > 0);
}
