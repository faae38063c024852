//! For any bytes as a counters file, its body, or a snapshot: reading them does not panic, an invalid file or snapshot is not
//! used at all, and requests are decided with any contents of the table.

use std::cell::RefCell;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use transom::persistence::counters::Counters;
use transom::persistence::file_header::Header;
use transom::persistence::open::OpenError;
use transom::persistence::snapshot;
use transom_config::Config;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, RuleId, VariantId};
use transom_limiter::key::{KeyHash, Seed};
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::table::Table;
use transom_runtime::clock::Clock;

const NOW_MS: u64 = 1_700_000_100_000;
const CAPACITY: usize = 64;
const SNAPSHOT_HEAD_BYTES: usize = 104;

/// Every kind of window.
const RULES: &str = "listen = { http = \"127.0.0.1:0\" }\n[upstreams.u]\nbuiltin = \"echo\"\n\
    [rules.r]\nkey = \"global\"\nwindows = [\n\
    { limit = 3, period = \"2s\", start = \"first-request\" },\n\
    { limit = 12, period = \"minute\", shards = 3 },\n\
    { limit = 15, period = \"hour\", reserve = 9 },\n\
    { limit = 20, period = \"day\", timezone = \"UTC\", capacity = 40 },\n]\n\
    [[routes]]\npath = \"/\"\nupstream = \"u\"\nrules = [\"r\"]\n";

/// A temporary folder, and the header of valid files.
struct Fixture {
    folder: PathBuf,
    header: Header,
    config: Config,
}

thread_local! {
    static FIXTURE: RefCell<Option<Fixture>> = const { RefCell::new(None) };
}

pub fn holds(bytes: &[u8]) {
    // As a header of a file of any length.
    let announced = bytes.first_chunk().map_or(0, |announced| u64::from_le_bytes(*announced));
    for length in [announced, bytes.len() as u64] {
        if let Ok(header) = Header::decode(bytes, length) {
            assert_eq!(header.file_bytes() as u64, length);
        }
    }
    FIXTURE.with_borrow_mut(|fixture| {
        let fixture = fixture.get_or_insert_with(Fixture::new);
        fixture.check_file(bytes);
        fixture.check_body(bytes);
        fixture.check_snapshot(bytes);
    });
}

impl Fixture {
    fn new() -> Fixture {
        let shared = Path::new("/dev/shm");
        let folder = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
        let thread = format!("{:?}", std::thread::current().id());
        let number: String = thread.chars().filter(char::is_ascii_digit).collect();
        let folder = folder.join(format!("transom-fuzz-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).expect("the folder can be created");
        let config = transom_config::read(RULES).expect("the rules are valid");
        let file = folder.join("first");
        drop(open(Some(&file), None).expect("the file can be created"));
        let bytes = fs::read(&file).expect("the file was created");
        let header = Header::decode(&bytes, bytes.len() as u64).unwrap_or_else(|why| panic!("{why}"));
        Fixture { folder, header, config }
    }

    /// Opens the bytes as a counters file: the counters are empty, or the file belongs to another program.
    fn check_file(&self, bytes: &[u8]) {
        let file = self.folder.join("whole");
        put(&file, bytes);
        match open(Some(&file), None) {
            Ok(counters) => assert_eq!(counters.table.live_counters(0).count(), 0),
            Err(error) => assert!(matches!(error, OpenError::Foreign { .. }), "{error}"),
        }
    }

    /// Decides with the bytes, repeated to the end of the file, as the body of a counters file with a valid header.
    fn check_body(&self, bytes: &[u8]) {
        let path = self.folder.join("body");
        let mut whole = self.header.encode().to_vec();
        whole.resize(self.header.file_bytes(), 0);
        if !bytes.is_empty() {
            let body = whole[Header::TABLE_AT..].iter_mut();
            body.zip(bytes.iter().cycle()).for_each(|(to, byte)| *to = *byte);
        }
        put(&path, &whole);
        let counters = open(Some(&path), None).expect("the file is used or quarantined");
        let rule_set = Arc::new(RuleSet::new(self.config.limiter_rules(), counters.seed, None));
        let charge_plan = rule_set.charge_plan([RuleId::at(0)]);
        let mut context = DecisionContext::default();
        for cost in [0, 1, 2, u32::MAX] {
            for number in 0..3 {
                let bits = Seed(1, 2).hash(&[&number.to_string()]);
                let key = KeyHash { bucket_hash: bits, tag: bits.rotate_left(32) };
                context.inputs.keyed_requests =
                    vec![Some(KeyedRequest { key, offset: bits, variant: VariantId::DEFAULT, cost })].into();
                context.inputs.reserve = number == 1;
                charge_plan.decide(&counters.table, DecisionTime::read(&|| NOW_MS), &mut context);
            }
        }
        counters.table.stats(NOW_MS);
    }

    /// Loads the bytes as a snapshot, and as the body of a valid snapshot: an invalid snapshot is not used at all.
    fn check_snapshot(&self, bytes: &[u8]) {
        let path = self.folder.join("snapshot");
        let plan = Table::layout(CAPACITY);
        put(&path, bytes);
        snapshot::load(&path, plan);
        let before = open(None, None).expect("there is memory");
        let written = snapshot::write(&before, &path, &Clock::manual(NOW_MS), Duration::ZERO);
        assert!(written.is_ok(), "{written:?}");
        let valid = fs::read(&path).expect("the snapshot was written");
        let file = File::options().write(true).open(&path).expect("the snapshot was written");
        file.write_all_at(bytes, SNAPSHOT_HEAD_BYTES as u64).expect("the file can be written");
        let is_same = fs::read(&path).expect("the snapshot exists") == valid;
        assert_eq!(snapshot::load(&path, plan).is_some(), is_same);
        let after = open(None, Some(&path)).expect("there is memory");
        assert_eq!(after.table.live_counters(0).count(), 0);
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        // A folder that cannot be removed is not a failure of the property.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn put(path: &Path, bytes: &[u8]) {
    // A new file each time, because the previous one may still be mapped.
    let _ = fs::remove_file(path);
    fs::write(path, bytes).expect("the file can be written");
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("the file was created");
}

fn open(file: Option<&Path>, snapshot: Option<&Path>) -> Result<Counters, OpenError> {
    let config = transom_config::counters::Counters {
        shared: None,
        capacity: CAPACITY,
        file: file.map(Path::to_owned),
        snapshot: snapshot.map(Path::to_owned),
        snapshot_every: Duration::from_secs(5),
    };
    Counters::open(&config, None, &Clock::manual(NOW_MS))
}
