//! A counters file may contain any bits: memory decays, and other processes may write to the file. Requests are still decided,
//! without a panic (tests check arithmetic for overflow) or an endless loop.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use fastrand::Rng;
use transom::persistence::file_header::Header;
use transom_config::Config;
use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::counter::CounterWord;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{RuleId, VariantId};
use transom_limiter::key::{KeyHash, Seed};
use transom_limiter::memory::Memory;
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::table::{Table, Watermarks};
use transom_limiter::window::END_MAX_MS;

use crate::support::TempDir;
use crate::support::gateway::{Gateway, START_S, with_listen};

const CAPACITY: usize = 64;
const NOW_MS: u64 = START_S * 1000;
const YEAR_MS: u64 = 366 * 86_400_000;

/// Rules with every kind of window.
const RULES: [(&str, &str); 13] = [
    ("plain", "windows = [\"3/second\", \"50/minute\"]"),
    (
        "rolling",
        "windows = [{ limit = 5, period = \"2s\", capacity = 20 }, { limit = 9, period = \"day\", capacity = 30 }]",
    ),
    ("calendar", "windows = [{ limit = 5, period = \"day\", timezone = \"UTC\", capacity = 20 }]"),
    ("floating", "windows = [{ limit = 3, period = \"2s\", start = \"first-request\" }]"),
    ("random", "windows = [{ limit = 3, period = \"1m\", start = \"random\" }]"),
    ("sharded", "windows = [{ limit = 30, period = \"minute\", shards = 7 }]"),
    ("sliding", "windows = [{ limit = 3, period = \"2s\", sliding = true }]"),
    ("reserving", "windows = [{ limit = 3, period = \"2s\", reserve = 10 }]"),
    ("response-cost", "windows = [\"100/minute\"]\ncost = { response-header = \"x-cost\", reserve = 10, max = 1000 }"),
    ("strict", "windows = [\"3/second\"]\ncount_refused = true"),
    ("large", "windows = [{ limit = 4294967294, period = \"10ms\", capacity = 4294967295 }]"),
    ("large-floating", "windows = [{ limit = 4294967295, period = \"10ms\", start = \"first-request\" }]"),
    // The last rule delays requests; a test over HTTP would have to wait.
    ("delaying", "windows = [\"3/second\", \"50/minute\"]\non_limit = \"delay\"\nmax_delay = \"3s\"\nmax_waiting = 50"),
];

fn toml() -> String {
    let mut toml = "workers = 1\n[upstreams.u]\nbuiltin = \"echo\"\n".to_owned();
    for (name, rule) in RULES {
        toml.push_str(&format!("[rules.{name}]\nkey = \"header:x-key\"\non_missing_key = \"refuse\"\n{rule}\n"));
        toml.push_str(&format!("[[routes]]\npath = \"/{name}\"\nupstream = \"u\"\nrules = [\"{name}\"]\n"));
    }
    toml
}

fn config() -> Config {
    transom_config::read(&with_listen(&toml())).unwrap_or_else(|problems| panic!("{problems:?}"))
}

/// A number that is likely to expose an overflow.
fn odd_number(rng: &mut Rng) -> u64 {
    let odd = [0, 1, 2, 5, u64::from(u32::MAX), 1 << 32, 1 << 41, u64::MAX >> 1, u64::MAX - 1, u64::MAX];
    if rng.bool() { odd[rng.usize(..odd.len())] } else { rng.u64(..) >> rng.u32(..64) }
}

fn odd_end(rng: &mut Rng) -> u64 {
    let near = NOW_MS + rng.u64(..200_000) - 100_000;
    let odd = [0, 1, NOW_MS - 1, NOW_MS, NOW_MS + 1, near, near, NOW_MS + YEAR_MS, END_MAX_MS - 1, END_MAX_MS];
    if rng.u8(..4) > 0 { odd[rng.usize(..odd.len())] } else { rng.u64(..=END_MAX_MS) }
}

/// Overwrites all slots with any bits, or with a counter or a claim of a key that will be used.
fn corrupt_table(table: &Table, tags: &[u64], rng: &mut Rng) {
    let mut slot = 0;
    loop {
        let word = match rng.u8(..8) {
            0 => CounterWord::from_bits(rng.u128(..)),
            1 => CounterWord::EMPTY,
            _ => CounterWord::new(tags[rng.usize(..tags.len())], odd_end(rng), odd_number(rng) as u32),
        };
        if !table.restore(slot, word) {
            return;
        }
        slot += 1;
    }
}

/// The tags of all counters in a table, including overflow counters.
fn tags(table: &Table) -> Vec<u64> {
    let mut tags: Vec<u64> = table.live_counters(0).map(|(_, word)| word.tag()).collect();
    tags.sort_unstable();
    tags.dedup();
    assert!(tags.len() > CAPACITY);
    tags
}

fn key(number: u64) -> KeyHash {
    let bits = Seed(3, 4).hash(&[&number.to_string()]);
    KeyHash { bucket_hash: bits, tag: bits.rotate_left(32) }
}

/// Runs a decision and one other operation for one key and one rule.
fn run_operations(rule: RuleId, charge_plan: &ChargePlan, table: &Table, number: u64, rng: &mut Rng) {
    let rule_set = charge_plan.rule_set();
    let cost = [0, 1, 1, 2, 30, u32::MAX][rng.usize(..6)];
    let keyed_request = KeyedRequest { key: key(number), offset: rng.u64(..), variant: VariantId::DEFAULT, cost };
    let mut context = DecisionContext::for_worker(rng.u32(..9));
    context.inputs.keyed_requests = vec![Some(keyed_request)].into();
    context.inputs.reserve = rng.bool();
    let later_ms = NOW_MS + rng.u64(..5000);
    match charge_plan.decide(table, DecisionTime::read(&|| NOW_MS), &mut context) {
        Decision::Admitted => {}
        Decision::Delayed { until_ms, recharge: again, .. } => {
            assert!(until_ms >= NOW_MS);
            charge_plan.recharge(&again, table, DecisionTime::read(&|| until_ms), &mut context);
        }
        Decision::Refused => {
            assert!(charge_plan.retry_at_ms(&context, NOW_MS).is_none_or(|again_ms| again_ms >= NOW_MS))
        }
    }
    let receipts: Vec<_> = context.result.charges.iter().filter_map(|charge| charge.receipt()).collect();
    match rng.u8(..5) {
        0 => rule_set.refund(&receipts, rng.u32(1..4), table, later_ms),
        1 => receipts.iter().for_each(|charged| {
            table.refund_with_rest(charged.receipt, rng.bool(), charged.request, rule_set.time(later_ms));
        }),
        2 => rule_set.charge_excess(rule, keyed_request, table, later_ms),
        3 => rule_set.reset(table, later_ms, &context),
        _ => _ = charge_plan.peek(table, DecisionTime::read(&|| later_ms), &mut context),
    }
}

#[test]
fn any_table_contents_lead_to_a_decision_for_every_window_kind() {
    let config = config();
    let mut rng = Rng::with_seed(1711);
    let rule_set = Arc::new(RuleSet::new(config.limiter_rules(), Seed(1, 2), None));
    let charge_plans = rule_set.rules.ids().map(|rule| (rule, rule_set.charge_plan([rule])));
    let charge_plans: Vec<(RuleId, ChargePlan)> = charge_plans.collect();
    // More keys than slots, so that some share a counter.
    let all = |table: &Table, rng: &mut Rng| {
        for (rule, charge_plan) in &charge_plans {
            (0..24).for_each(|number| run_operations(*rule, charge_plan, table, number, rng));
        }
    };
    let table = Table::with_capacity(CAPACITY).unwrap();
    (0..4).for_each(|_| all(&table, &mut rng));
    let tags = tags(&table);
    for _ in 0..300 {
        let table = Table::with_capacity(CAPACITY).unwrap();
        corrupt_table(&table, &tags, &mut rng);
        // The latest watermarks of a file that is not quarantined.
        let horizon = |rng: &mut Rng| [0, NOW_MS - 1, NOW_MS, NOW_MS + 60_000][rng.usize(..4)];
        let (horizon_ms, overflow_horizon_ms) = (horizon(&mut rng), horizon(&mut rng));
        table.restore_watermarks(Watermarks { horizon_ms, overflow_horizon_ms, overflow_end_ms: odd_number(&mut rng) });
        all(&table, &mut rng);
    }
}

#[test]
fn a_gateway_serves_while_its_counters_file_is_overwritten() {
    let scratch = TempDir::in_memory();
    let path = scratch.path().join("counters");
    let counters = format!("[counters]\ncapacity = {CAPACITY}\nfile = \"{}\"\n", path.display());
    let gateway = Gateway::start(&format!("{}{counters}", toml()));
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let mut page = [0; Header::BYTES];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut page, 0).unwrap();
    let header = Header::decode(&page, file.metadata().unwrap().len()).unwrap_or_else(|why| panic!("{why}"));
    let memory = Memory::mapped(file.as_fd(), header.file_bytes()).unwrap();
    let table: Table = Table::in_memory(header.layout, &memory, Header::TABLE_AT).unwrap();
    let mut client = gateway.client();
    let mut request_all = |keys: u64| {
        for (name, _) in &RULES[..RULES.len() - 1] {
            for key in 0..keys {
                let response = client.get_with(&format!("/{name}"), &[("X-Key", &key.to_string())]);
                assert!([200, 429].contains(&response.status), "{name}: {} {}", response.status, response.text());
            }
        }
    };
    request_all(24);
    let tags = tags(&table);
    let mut rng = Rng::with_seed(1711);
    for _ in 0..10 {
        corrupt_table(&table, &tags, &mut rng);
        request_all(8);
        gateway.advance_s(1);
        gateway.metrics();
    }
    // The file is still recognized as a counters file.
    drop(Arc::clone(&memory));
    assert!(Header::decode(&page, file.metadata().unwrap().len()).is_ok());
}
