//! Of any bytes in place of a counters file, its body, or a snapshot: they are read without a panic, what is not whole
//! is not used at all, and requests are decided whatever stands in the table.

use std::cell::RefCell;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use transom::clock::Clock;
use transom::config::{self, Config};
use transom::persistence::counters::Counters;
use transom::persistence::file_header::Header;
use transom::persistence::open::OpenError;
use transom::persistence::snapshot;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::format_registry::CounterFormats;
use transom_limiter::key::{KeyHash, Seed};
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::table::Table;

const NOW_MS: u64 = 1_700_000_100_000;
const CAPACITY: usize = 64;
const SNAPSHOT_HEAD_BYTES: usize = 112;

/// Every course that a counter can take.
const RULES: &str = "listen = { http = \"127.0.0.1:0\" }\n[upstreams.u]\nbuiltin = \"echo\"\n\
    [rules.r]\nkey = \"global\"\nwindows = [\n\
    { limit = 3, period = \"2s\", start = \"first-request\" },\n\
    { limit = 12, period = \"minute\", shards = 3 },\n\
    { limit = 15, period = \"hour\", reserve = 9 },\n\
    { limit = 20, period = \"day\", timezone = \"UTC\", capacity = 40 },\n]\n\
    [[routes]]\npath = \"/\"\nupstream = \"u\"\nrules = [\"r\"]\n";

/// A folder of its own, and what good files begin with.
struct Bench {
    folder: PathBuf,
    header: Header,
    config: Config,
}

thread_local! {
    static BENCH: RefCell<Option<Bench>> = const { RefCell::new(None) };
}

pub fn holds(bytes: &[u8]) {
    // As a header, whatever length the file claims to have.
    let claimed = bytes.first_chunk().map_or(0, |claimed| u64::from_le_bytes(*claimed));
    for length in [claimed, bytes.len() as u64] {
        if let Ok(header) = Header::decode(bytes, length) {
            assert_eq!(header.file_bytes() as u64, length);
        }
    }
    BENCH.with_borrow_mut(|bench| {
        let bench = bench.get_or_insert_with(Bench::new);
        bench.opens(bytes);
        bench.decides(bytes);
        bench.restores(bytes);
    });
}

impl Bench {
    fn new() -> Bench {
        let shared = Path::new("/dev/shm");
        let folder = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
        let thread = format!("{:?}", std::thread::current().id());
        let number: String = thread.chars().filter(char::is_ascii_digit).collect();
        let folder = folder.join(format!("transom-fuzz-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).expect("there is room");
        let config = config::read(RULES).expect("the rules are good");
        let file = folder.join("first");
        drop(open(Some(&file), None).expect("there is room"));
        let bytes = fs::read(&file).expect("it was made");
        let header = Header::decode(&bytes, bytes.len() as u64).unwrap_or_else(|why| panic!("{why}"));
        Bench { folder, header, config }
    }

    /// As a whole file: unless it is one by chance, counting begins anew.
    fn opens(&self, bytes: &[u8]) {
        let file = self.folder.join("whole");
        put(&file, bytes);
        match open(Some(&file), None) {
            Ok(counters) => assert_eq!(counters.table.live_counters(0).count(), 0),
            Err(error) => assert!(matches!(error, OpenError::Foreign { .. }), "{error}"),
        }
    }

    /// As what stands behind a good header and a good time, again and again until the file is full.
    fn decides(&self, bytes: &[u8]) {
        let path = self.folder.join("body");
        let mut whole = self.header.encode().to_vec();
        whole.resize(self.header.file_bytes(), 0);
        if !bytes.is_empty() {
            let body = whole[Header::FORMATS_AT..].iter_mut();
            body.zip(bytes.iter().cycle()).for_each(|(to, byte)| *to = *byte);
        }
        put(&path, &whole);
        let counters = open(Some(&path), None).expect("it is used or set aside");
        let mut rule_set = RuleSet::new(&self.config.rules, counters.seed, None);
        // There may be no room for more layers.
        let _ = counters.formats.join(&rule_set.counter_formats());
        rule_set.adopt_formats(&counters.formats.formats());
        let charge_plan = rule_set.charge_plan(&[0]);
        let mut context = DecisionContext::default();
        for cost in [0, 1, 2, u32::MAX] {
            for number in 0..3 {
                let bits = Seed(1, 2).hash(&[&number.to_string()]);
                let key = KeyHash { bucket_hash: bits, tag: bits.rotate_left(32) };
                context.inputs.keyed_requests = vec![Some(KeyedRequest { key, offset: bits, variant: 0, cost })];
                context.inputs.reserve = number == 1;
                rule_set.decide(&charge_plan, &counters.table, DecisionTime::read(&|| NOW_MS), &mut context);
            }
        }
        counters.table.stats(NOW_MS);
    }

    /// As a snapshot, and as what stands behind the head of a good one: it is whole, or nothing of it is used.
    fn restores(&self, bytes: &[u8]) {
        let path = self.folder.join("snapshot");
        let plan = Table::layout(CAPACITY);
        put(&path, bytes);
        snapshot::load(&path, plan);
        let before = open(None, None).expect("there is memory");
        let written = snapshot::write(&before, &path, &Clock::manual(NOW_MS), Duration::ZERO);
        assert!(written.is_ok(), "{written:?}");
        let good = fs::read(&path).expect("it was written");
        let file = File::options().write(true).open(&path).expect("it was written");
        file.write_all_at(bytes, SNAPSHOT_HEAD_BYTES as u64).expect("there is room");
        let is_same = fs::read(&path).expect("it is there") == good;
        assert_eq!(snapshot::load(&path, plan).is_some(), is_same);
        let after = open(None, Some(&path)).expect("there is memory");
        assert!(after.table.live_counters(0).count() == 0 && after.formats.formats() == CounterFormats::default());
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // What stays behind is no failure of what was tested.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn put(path: &Path, bytes: &[u8]) {
    // A new one each time: who used the former may not have let go of it yet.
    let _ = fs::remove_file(path);
    fs::write(path, bytes).expect("there is room");
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("it was made");
}

fn open(file: Option<&Path>, snapshot: Option<&Path>) -> Result<Counters, OpenError> {
    let config = config::Counters {
        shared: None,
        capacity: CAPACITY,
        file: file.map(Path::to_owned),
        snapshot: snapshot.map(Path::to_owned),
        snapshot_every: Duration::from_secs(5),
    };
    Counters::open(&config, None, 4, &Clock::manual(NOW_MS)).map(|(counters, _)| counters)
}
