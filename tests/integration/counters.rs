//! Counters in a file: the next process continues counting, also with a changed configuration. Damage to the file and kills
//! are tested elsewhere.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};

use transom::persistence::file_header::Header;
use transom_limiter::key::Seed;
use transom_limiter::table::Table;

use crate::support::gateway::Gateway;
use crate::support::{TempDir, one_rule};

const HOUR_S: u64 = 3600;

/// A counters file for gateways that use it one after the other or at once.
struct CountersFile(TempDir);

impl CountersFile {
    fn new() -> CountersFile {
        CountersFile(TempDir::new())
    }

    fn toml(&self, rule: &str) -> String {
        let file = self.0.path().join("counters");
        format!("[counters]\ncapacity = 64\nfile = \"{}\"\n{}", file.display(), one_rule(rule))
    }

    /// A gateway with a rule for all requests together.
    fn gateway(&self, windows: &str) -> Gateway {
        Gateway::start(&self.toml(&format!("key = \"global\"\nwindows = [{windows}]")))
    }
}

/// Sends requests, stops the gateway, and returns the number of admitted requests.
fn admitted_until_stop(gateway: Gateway, requests: usize) -> usize {
    let total = admitted(&gateway, requests);
    gateway.stop();
    total
}

fn admitted(gateway: &Gateway, requests: usize) -> usize {
    let mut client = gateway.client();
    (0..requests).filter(|_| client.get("/a").status == 200).count()
}

#[test]
fn a_restarted_gateway_continues_counting() {
    let counters = CountersFile::new();
    let mut total = 0;
    for limit in [5, 5, 9] {
        total += admitted_until_stop(counters.gateway(&format!("\"{limit}/hour\"")), 4);
        assert!(total <= limit);
    }
    assert_eq!(total, 9);
}

#[test]
fn two_gateways_on_one_file_share_counters() {
    let counters = CountersFile::new();
    let (one, other) = (counters.gateway("\"5/hour\""), counters.gateway("\"5/hour\""));
    assert_eq!((admitted(&one, 2), admitted(&other, 9), admitted(&one, 1)), (2, 3, 0));
    one.advance_s(HOUR_S);
    // The clock of the other process is still before the start of the new window.
    assert_eq!((admitted(&one, 1), admitted(&other, 9), admitted(&one, 9)), (1, 4, 0));
}

#[test]
fn time_continues_from_the_last_recorded_time() {
    let counters = CountersFile::new();
    let gateway = counters.gateway("\"5/hour\"");
    gateway.advance_s(10 * HOUR_S);
    assert_eq!(admitted(&gateway, 9), 5);
    gateway.stop();
    // The clock of this process starts ten hours earlier.
    let gateway = counters.gateway("\"5/hour\"");
    assert_eq!(admitted(&gateway, 1), 0);
    gateway.advance_s(HOUR_S);
    assert_eq!(admitted(&gateway, 9), 5);
}

#[test]
fn a_sliding_window_survives_a_restart() {
    let counters = CountersFile::new();
    let sliding = "{ limit = 5, period = \"1h\", sliding = true }";
    assert_eq!(admitted_until_stop(counters.gateway(sliding), 9), 5);
    let gateway = counters.gateway(sliding);
    assert_eq!(admitted(&gateway, 9), 0);
    gateway.advance_s(HOUR_S - 1);
    assert_eq!(admitted(&gateway, 9), 0);
    gateway.advance_s(1 + HOUR_S / 8);
    assert_eq!(admitted(&gateway, 9), 5);
}

#[test]
fn a_layer_that_counts_in_another_way_has_other_counters() {
    for (before, used, after) in [
        ("{ limit = 1, period = \"1h\", capacity = 10 }", 10, "\"8/1h\""),
        ("\"8/1h\"", 8, "{ limit = 8, period = \"1h\", reserve = 2 }"),
        ("{ limit = 8, period = \"1h\", shards = 4 }", 8, "{ limit = 8, period = \"1h\", shards = 2 }"),
    ] {
        let counters = CountersFile::new();
        assert_eq!(admitted_until_stop(counters.gateway(before), 20), used, "{before}");
        let other = counters.gateway(after);
        assert_eq!(admitted(&other, 20), 8, "{before}, then {after}");
        // A restart with the former rules continues with its counters, also while both processes count.
        assert_eq!(admitted_until_stop(counters.gateway(before), 9), 0, "{before} again");
    }
}

#[test]
fn counters_of_a_removed_rule_return_with_the_rule() {
    let counters = CountersFile::new();
    assert_eq!(admitted_until_stop(counters.gateway("\"5/hour\""), 9), 5);
    assert_eq!(admitted_until_stop(counters.gateway("\"5/2h\""), 9), 5);
    assert_eq!(admitted_until_stop(Gateway::start(&counters.toml("key = \"ip\"\nwindows = [\"5/hour\"]")), 9), 5);
    assert_eq!(admitted_until_stop(counters.gateway("\"5/hour\""), 9), 0);
}

#[test]
fn a_reload_cannot_change_the_counters_file() {
    let counters = CountersFile::new();
    let mut gateway = counters.gateway("\"5/hour\"");
    assert_eq!(admitted(&gateway, 3), 3);
    gateway.reload_and_wait(&counters.toml("key = \"global\"\nwindows = [\"5/hour\", \"50/day\"]"));
    assert_eq!(admitted(&gateway, 9), 2);
}

/// The positions and words of counters that this version writes with a fixed seed.
const EXPECTED_WORDS: [(usize, u128); 16] = [
    (16, 0x320e6c916ec2998bd010218000000001),
    (32, 0xc22585ed657a7d8bd010218000000001),
    (40, 0x1b9237e454f21d8bd010218000000001),
    (44, 0x89947570dcce958bd053450000000001),
    (45, 0xebcb4b6e3640258bd047100000000001),
    (46, 0x005a8c45d312e98bd047100000000001),
    (47, 0x94d0c823f3d6a18bd010218000000001),
    (68, 0x99bfb9156357818bd010218000000001),
    (69, 0x5878d3130523c58bd010218000000001),
    (76, 0xae56585d5e6d358bd010218000000001),
    (80, 0xd7d0057bf312518bd010218000000001),
    (84, 0xd25467cb93a44d8bd010218000000001),
    (88, 0x3d687dc1204d918bcfe6044000000001),
    (112, 0x927fc0c8e2acbd8bd010218000000001),
    (120, 0x56d5bb4c86cc358bd010218000000001),
    (124, 0xedb0e1caa14d158bd010218000000001),
];

/// If this fails, counters of the previous version are no longer found: the layout then needs another version in
/// `persistence::file_header` and `persistence::snapshot`, so that no version misreads the counters of another.
#[test]
fn the_next_version_finds_the_counters_of_this_one() {
    let scratch = TempDir::new();
    let path = scratch.path().join("counters");
    let boot = fs::read("/proc/sys/kernel/random/boot_id").unwrap()[..36].try_into().unwrap();
    let header = Header { layout: Table::layout(64), seed: Seed(1, 2), boot };
    let file = File::create_new(&path).unwrap();
    file.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
    file.set_len(header.file_bytes() as u64).unwrap();
    file.write_all_at(&header.encode(), 0).unwrap();
    let keys = [
        "\"ip\"",
        "\"host\"",
        "\"method\"",
        "\"path\"",
        "\"route\"",
        "\"global\"",
        "\"header:x-a\"",
        "\"cookie:a\"",
        "\"query:a\"",
        "\"param:rest\"",
        "[\"ip\", \"header:x-a\"]",
    ];
    let mut toml = format!("workers = 1\n[counters]\ncapacity = 64\nfile = \"{}\"\n", path.display());
    toml += "[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\n";
    let names: Vec<String> = (0..keys.len()).map(|index| format!("\"r{index}\"")).collect();
    toml += &format!("rules = [{}, \"times\"]\n", names.join(", "));
    for (index, key) in keys.iter().enumerate() {
        toml += &format!("[rules.r{index}]\nkey = {key}\nwindows = [\"5/hour\"]\n");
        if key.contains(':') && !key.contains("param") {
            toml += "on_missing_key = \"refuse\"\n";
        }
    }
    toml += "[rules.times]\nkey = \"global\"\nwindows = [\"5/minute\", \
             { limit = 8, period = \"2h\", start = \"first-request\" }, { limit = 9, period = \"3h\", capacity = 20 }, \
             { limit = 10, period = \"4h\", shards = 2 }, { limit = 50, period = \"day\", timezone = \"Europe/Berlin\" }]\n";
    let gateway = Gateway::start_at(&toml, 1_700_000_000);
    let request = "GET /x?a=three HTTP/1.1\r\nHost: api.example\r\nX-A: one\r\nCookie: a=two\r\n\r\n";
    gateway.client().send(request).read_response().expect(200);
    gateway.stop();
    let bytes = fs::read(&path).unwrap();
    let at = Header::TABLE_AT + Table::layout(64).bytes() - 16 * (64 * 2 + 128 * 8);
    let words = bytes[at..].chunks_exact(16).map(|word| u128::from_ne_bytes(word.try_into().unwrap()));
    let found: Vec<_> = words.enumerate().filter(|(_, word)| *word != 0).collect();
    assert_eq!(found, EXPECTED_WORDS, "{found:#x?}");
}
