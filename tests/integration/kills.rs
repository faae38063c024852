//! Counters in a file outlive the process: after any number of kills, no key exceeds its limit.
//!
//! `make kills` runs these tests with a thousand kills and prints the result.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use transom::persistence::file_header::Header;
use transom_limiter::counter::CounterWord;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, RuleId, VariantId};
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::table::Table;
use transom_rules::rate_limit_key::KeyHashers;

use crate::support::gateway::with_listen;
use crate::support::load_checker::{KEYS, Layer, Load, LoadResults, now_ms};
use crate::support::process::{BINARY, Process};
use crate::support::{TempDir, one_rule, seeded_rng};

/// Periods without a small common multiple, so that windows of both layers end during the run.
const LAYERS: [Layer; 2] = [Layer { limit: 3, period_ms: 2000 }, Layer { limit: 6, period_ms: 7000 }];
const CAPACITY: usize = 100_000;
/// The number of the key part `header`.
const HEADER_PART: u8 = 3;

fn toml(file: &Path) -> String {
    let rule = "key = \"header:x-key\"\non_missing_key = \"refuse\"\nwindows = [\"3/2s\", \"6/7s\"]";
    toml_with(file, rule)
}

fn toml_with(file: &Path, rule: &str) -> String {
    format!("workers = 2\n{}\n[counters]\ncapacity = {CAPACITY}\nfile = \"{}\"\n", one_rule(rule), file.display())
}

/// The number of kills; few by default.
fn kill_count(default: usize) -> usize {
    std::env::var("TRANSOM_KILLS").map_or(default, |text| text.parse().expect("`TRANSOM_KILLS` is a number"))
}

/// Whether to kill once more: at least `least` times, and until some key has reached its limit in each layer, because otherwise
/// the test would prove nothing.
fn continues(load: &Load, kills: &mut usize, least: usize) -> bool {
    *kills += 1;
    *kills <= least || (*kills <= 50 * least && !load.has_reached_limits(&LAYERS))
}

/// Starts the gateway and kills it while it starts.
fn kill_early(config: &Path, after: Duration) {
    let mut command = Command::new(BINARY);
    command.arg("--config").arg(config).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    thread::sleep(after);
    child.kill().unwrap();
    child.wait().unwrap();
}

fn start(toml: &str, starts: &mut Vec<Duration>) -> Process {
    let before = Instant::now();
    let process = Process::spawn_command(Command::new(BINARY), toml, TempDir::in_memory());
    starts.push(before.elapsed());
    process
}

fn report(what: &str, kills: usize, results: &LoadResults, at_limit: &[usize], starts: &mut [Duration]) {
    starts.sort();
    let ms = |duration: Duration| duration.as_secs_f64() * 1000.0;
    println!(
        "{what}: {kills} kills, {} requests answered, {} admitted; {at_limit:?} keys and windows at the limit of each layer; \
         {} starts, each {:.0} ms in the median, {:.0} ms at most",
        results.requests,
        results.admitted,
        starts.len(),
        ms(starts[starts.len() / 2]),
        ms(starts[starts.len() - 1]),
    );
}

#[test]
fn no_key_exceeds_its_limit_when_the_gateway_is_killed() {
    let scratch = TempDir::in_memory();
    let file = scratch.path().join("counters");
    let toml = toml(&file);
    let config = scratch.write("gateway.toml", with_listen(&toml));
    let (mut kills, mut starts) = (0, Vec::new());
    let results = Load::default().run_during(&LAYERS, |load| {
        let mut rng = seeded_rng();
        while continues(load, &mut kills, kill_count(25)) {
            if rng.u8(..5) == 0 {
                kill_early(&config, Duration::from_micros(rng.u64(..60_000)));
            } else {
                let process = start(&toml, &mut starts);
                load.send_to(&[process.http]);
                thread::sleep(Duration::from_micros(rng.u64(..200_000)));
                load.send_to(&[]);
                // Dropping the process kills it.
                drop(process);
            }
        }
    });
    let at_limit = results.assert_limits(&LAYERS);
    assert!(at_limit.iter().all(|at_limit| *at_limit > 0), "no limit was ever reached in {kills} kills");
    let records = every_record_is_possible(&file, &toml);
    report("killed", kills - 1, &results, &at_limit, &mut starts);
    println!("{records} records in the file, all possible");
}

#[test]
fn two_gateways_on_one_file_share_counters_despite_kills() {
    let scratch = TempDir::in_memory();
    let file = scratch.path().join("counters");
    let toml = toml(&file);
    let (mut kills, mut starts) = (0, Vec::new());
    let results = kill_in_turns(Load::default(), &LAYERS, &toml, &mut starts, |load| {
        continues(load, &mut kills, kill_count(50) / 5)
    });
    let at_limit = results.assert_limits(&LAYERS);
    assert!(at_limit.iter().all(|at_limit| *at_limit > 0), "no limit was ever reached in {kills} kills");
    every_record_is_possible(&file, &toml);
    report("two at once", kills - 1, &results, &at_limit, &mut starts);
}

#[test]
fn a_sliding_limit_holds_despite_kills() {
    const LIMIT: u64 = 6;
    let scratch = TempDir::in_memory();
    let rule = format!(
        "key = \"header:x-key\"\non_missing_key = \"refuse\"\n\
         windows = [{{ limit = {LIMIT}, period = \"2s\", sliding = true }}]"
    );
    let toml = toml_with(&scratch.path().join("counters"), &rule);
    let (mut kills, mut starts) = (0, Vec::new());
    let begin = Instant::now();
    let results = kill_in_turns(Load::for_keys(20), &[], &toml, &mut starts, |_load| {
        kills += 1;
        // At least two periods.
        kills <= kill_count(50) / 5 || begin.elapsed() < Duration::from_secs(4)
    });
    let at_limit = results.assert_sliding_limit(LIMIT, 2000);
    assert!(at_limit > 0, "no limit was ever reached in {kills} kills");
    report("two at once, sliding", kills - 1, &results, &[at_limit], &mut starts);
}

/// Sends requests to two gateways, one of which is killed after the other once its replacement serves, while `continues`
/// returns `true`.
fn kill_in_turns(
    load: Load,
    layers: &[Layer],
    toml: &str,
    starts: &mut Vec<Duration>,
    mut continues: impl FnMut(&Load) -> bool,
) -> LoadResults {
    load.run_during(layers, |load| {
        let mut rng = seeded_rng();
        let mut both = [start(toml, starts), start(toml, starts)];
        load.send_to(&both.each_ref().map(|process| process.http));
        while continues(load) {
            thread::sleep(Duration::from_micros(rng.u64(..300_000)));
            // A gateway is killed once its replacement serves.
            let next = start(toml, starts);
            load.send_to(&[]);
            both[rng.usize(..2)] = next;
            load.send_to(&both.each_ref().map(|process| process.http));
        }
    })
}

/// Checks the records of a counters file: each is empty, or a claim or a counter of a key that was used, with an end and a
/// count that are valid for its layer. Returns the number of records that are not empty.
fn every_record_is_possible(file: &Path, toml: &str) -> usize {
    assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o7777, 0o600);
    let bytes = fs::read(file).unwrap();
    let Ok(header) = Header::decode(&bytes, bytes.len() as u64) else { panic!("the header is damaged") };
    assert_eq!(header.layout, Table::layout(CAPACITY));
    let tags = tags(&header, toml);
    let words_at = Header::TABLE_AT + header.layout.bytes()
        - (header.layout.counter_buckets + header.layout.overflow_buckets) * header.layout.bucket_slots * 16;
    let words = bytes[words_at..Header::TABLE_AT + header.layout.bytes()].as_chunks::<16>().0;
    let used = words.iter().map(|word| u128::from_le_bytes(*word)).filter(|bits| *bits != 0);
    let latest_ms = now_ms() + LAYERS[1].period_ms;
    used.inspect(|bits| {
        let word = CounterWord::from_bits(*bits);
        let layer = tags.binary_search_by_key(&word.tag(), |(tag, _)| *tag);
        let layer = layer.unwrap_or_else(|_| panic!("{word:?} belongs to no key"));
        let Layer { limit, period_ms } = LAYERS[tags[layer].1];
        let possible =
            word.end_ms().is_multiple_of(period_ms) && word.end_ms() <= latest_ms && u64::from(word.count()) <= limit;
        assert!(word.is_claim() || possible, "{word:?} is in no window of {period_ms} ms, or more than {limit}");
    })
    .count()
}

/// The tags of all counters that clients can have used, each with the position of its layer.
fn tags(header: &Header, toml: &str) -> Vec<(u64, usize)> {
    let config = transom_config::read(&with_listen(toml)).unwrap();
    let rule_set = Arc::new(RuleSet::new(config.limiter_rules(), header.seed, None));
    let (charge_plan, table) = (rule_set.charge_plan([RuleId::at(0)]), Table::with_capacity(64).unwrap());
    let mut context = DecisionContext::default();
    let start = KeyHashers::new(&rule_set.rules[RuleId::at(0)], header.seed, None);
    let mut tags = Vec::new();
    for key in 0..KEYS {
        let mut hasher = start.counter.clone();
        hasher.add_part(HEADER_PART, key.to_string().as_bytes());
        context.inputs.keyed_requests =
            vec![Some(KeyedRequest { key: hasher.finish(), offset: 0, variant: VariantId::DEFAULT, cost: 1 })].into();
        charge_plan.peek(&table, DecisionTime::read(&now_ms), &mut context);
        tags.extend(
            context.result.charges.iter().map(|charge| (charge.counter.key.tag, charge.layer.id.position.index())),
        );
    }
    tags.sort_unstable();
    tags
}
