//! `transom simulate`: its decisions beside those of a gateway, its output, and its memory.

use std::fs;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bzip2::write::BzEncoder;
use flate2::Compression;
use flate2::write::GzEncoder;
use lzma_rust2::{XzOptions, XzWriter};
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use serde_json::Value;
use transom_limiter::secret_digest::Digest;

use crate::support::access_logs::{LogForm, LogShape, write_log};
use crate::support::client::{Client, HOST, request};
use crate::support::external_servers::{CHROMIUM, node, program};
use crate::support::gateway::{Gateway, with_listen};
use crate::support::process::BINARY;
use crate::support::upstream::{Connection, Upstream, reply};
use crate::support::{TempDir, eventually, one_rule, seeded_rng};

/// A directory with a configuration.
struct Directory(TempDir);

impl Directory {
    fn new(toml: &str) -> Directory {
        let directory = Directory(TempDir::new());
        directory.write("gateway.toml", with_listen(toml));
        directory
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        self.0.write(name, text)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(BINARY);
        command.arg("simulate").args(arguments).current_dir(self.0.path()).stdin(Stdio::null());
        command
    }

    /// Exit code, standard output, standard error.
    fn run(&self, arguments: &[&str]) -> (i32, String, String) {
        let output = self.command(arguments).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }

    #[track_caller]
    fn json(&self, arguments: &[&str]) -> Value {
        let (code, out, err) = self.run(&[&["--json"], arguments].concat());
        assert_eq!(code, 0, "{err}");
        serde_json::from_str(&out).unwrap()
    }
}

/// A line of the combined format, so many seconds after 20:00.
fn combined(client: &str, second: u64, request: &str) -> String {
    let (minute, second) = (second / 60, second % 60);
    format!(
        "{client} - - [10/Oct/2023:20:{minute:02}:{second:02} +0000] \"{request} HTTP/1.1\" 200 12 \"-\" \"curl\"\n"
    )
}

const TWO_A_MINUTE: &str = "key = \"ip\"\nwindows = [\"2/minute\", \"100/hour\"]";

#[test]
fn a_log_is_played_at_its_own_times() {
    let directory = Directory::new(&one_rule(TWO_A_MINUTE));
    let mut log = String::new();
    for (client, second) in
        [("203.0.113.1", 0), ("203.0.113.1", 1), ("203.0.113.1", 59), ("203.0.113.1", 60), ("203.0.113.2", 61)]
    {
        log += &combined(client, second, "GET /a");
    }
    directory.write("access.log", &log);
    let result = directory.json(&["access.log"]);
    assert_eq!(result["lines"]["decided"], 5);
    assert_eq!((&result["first"], &result["last"]), (&"2023-10-10T20:00:00Z".into(), &"2023-10-10T20:01:01Z".into()));
    let rule = &result["scenarios"][0]["rules"][0];
    assert_eq!((&rule["admitted"], &rule["refused"]), (&4.into(), &1.into()));
    assert_eq!((&rule["keys"]["total"], &rule["keys"]["refused"]), (&2.into(), &1.into()));
    let worst = &rule["worst_minute"];
    assert_eq!((&worst["start"], &worst["refused"]), (&"2023-10-10T20:00:00Z".into(), &1.into()));
    let minute = &rule["windows"][0];
    assert_eq!((&minute["name"], &minute["limit"], &minute["refused"]), (&"r-minute".into(), &2.into(), &1.into()));
    // Three windows with requests: of 3, 1 and 1.
    assert_eq!((&minute["asked"]["p50"], &minute["asked"]["max"]), (&1.into(), &3.into()));
    assert_eq!(minute["suggested"][0]["limit"], 3);
    assert_eq!(rule["busiest"]["keys"][0]["key"], "203.0.113.1");
    assert_eq!(rule["busiest"]["keys"][0]["requests"], 4);
    let (code, text, err) = directory.run(&["access.log"]);
    assert_eq!((code, err.as_str()), (0, ""));
    for line in
        ["rule r (key ip)", "  refused             1 (20 %)", "window r-minute: 2/minute, refused 1", "203.0.113.1"]
    {
        assert!(text.contains(line), "{line}: {text}");
    }
}

#[test]
fn compressed_logs_and_standard_input_are_read() {
    let directory = Directory::new(&one_rule(TWO_A_MINUTE));
    let lines: Vec<String> = (0..50).map(|second| combined("203.0.113.1", second, "GET /a")).collect();
    let (first, second) = (lines[..20].concat(), lines[20..].concat());
    let gzip = |text: &str| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    let zstd = |text: &str| compress_to_vec(text.as_bytes(), CompressionLevel::Fastest);
    directory.write("plain.log", lines.concat());
    // Compressed files may consist of several parts.
    directory.write("log.gz", [gzip(&first), gzip(&second)].concat());
    directory.write("log.zst", [zstd(&first), zstd(&second)].concat());
    let bzip2 = |text: &str| {
        let mut encoder = BzEncoder::new(Vec::new(), bzip2::Compression::fast());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    directory.write("log.bz2", [bzip2(&first), bzip2(&second)].concat());
    let xz = |text: &str| {
        let mut encoder = XzWriter::new(Vec::new(), XzOptions::with_preset(0)).unwrap();
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    directory.write("log.xz", [xz(&first), xz(&second)].concat());
    // A name says nothing.
    directory.write("log.gz.1", bzip2(&lines.concat()));
    // In the wrong order, as a shell lists rotated files.
    directory.write("a.log", &second);
    directory.write("a.log.1.gz", gzip(&first));
    let expected = directory.json(&["plain.log"]);
    assert_eq!(expected["scenarios"][0]["refused"], 48);
    for logs in [&["log.gz"][..], &["log.zst"], &["log.bz2"], &["log.xz"], &["log.gz.1"], &["a.log", "a.log.1.gz"]] {
        let result = directory.json(logs);
        assert_eq!((&result["scenarios"], &result["lines"]), (&expected["scenarios"], &expected["lines"]), "{logs:?}");
    }
    let mut child = directory.command(&["--json", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&gzip(&lines.concat())).unwrap();
    let output = child.wait_with_output().unwrap();
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(result["scenarios"], expected["scenarios"]);
}

#[test]
fn a_file_that_is_cut_off_or_damaged_is_an_error() {
    let directory = Directory::new(&one_rule(TWO_A_MINUTE));
    let text: String = (0..50).map(|second| combined("203.0.113.1", second, "GET /a")).collect();
    let mut encoder = BzEncoder::new(Vec::new(), bzip2::Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    let bzip2 = encoder.finish().unwrap();
    let mut encoder = XzWriter::new(Vec::new(), XzOptions::with_preset(0)).unwrap();
    encoder.write_all(text.as_bytes()).unwrap();
    for compressed in [bzip2, encoder.finish().unwrap()] {
        let mut damaged = compressed.clone();
        damaged[compressed.len() / 2] ^= 0x55;
        for bytes in [&compressed[..compressed.len() - 9], &damaged] {
            directory.write("log", bytes);
            let (code, _, err) = directory.run(&["log"]);
            assert!(code == 1 && err.contains("cannot read `log`"), "{code} {err}");
            assert!(!err.contains("fill whole buffer"), "{err}");
        }
    }
}

#[test]
fn lines_are_sorted_and_bad_lines_are_shown() {
    let directory = Directory::new(&one_rule(TWO_A_MINUTE));
    let mut log: Vec<String> = (0..40).rev().map(|second| combined("203.0.113.1", second * 60, "GET /a")).collect();
    log.extend((0..12).map(|number| format!("nonsense{number}\n")));
    log.push(combined("203.0.113.1", 5, "\\x16\\x03"));
    log.push("\n".to_owned());
    directory.write("access.log", log.concat());
    let result = directory.json(&["access.log"]);
    let lines = &result["lines"];
    let counts =
        ["total", "decided", "bad", "rejected", "out_of_order", "late"].map(|name| lines[name].as_u64().unwrap());
    assert_eq!(counts, [53, 40, 12, 1, 39, 0]);
    // In order of time no minute has more than one request.
    assert_eq!(result["scenarios"][0]["refused"], 0);
    let bad = result["bad_lines"].as_array().unwrap();
    assert_eq!(bad.len(), 10);
    assert_eq!(bad[0], "access.log:41: it is in no known format: nonsense0");
}

#[test]
fn candidates_are_compared() {
    let directory = Directory::new(&one_rule(TWO_A_MINUTE));
    let log: String = (0..60).map(|second| combined("203.0.113.1", second, "GET /a")).collect();
    directory.write("access.log", &log);
    let result = directory.json(&["--try", "r=10/minute", "--try", "r = 50/minute, 20/hour", "access.log"]);
    let refused: Vec<_> = result["scenarios"].as_array().unwrap().iter().map(|one| one["refused"].clone()).collect();
    assert_eq!(refused, [58, 50, 40]);
    let (_, text, _) = directory.run(&["--try", "r=10/minute", "access.log"]);
    assert!(text.contains("compared") && text.contains("as configured") && text.contains("50 (83.3 %)"), "{text}");
    for (candidate, message) in [
        ("q=10/minute", "unknown rule `q`"),
        ("r:gold=10/minute", "unknown plan of rule `r`: `gold`"),
        ("r", "`--try r` is not `RULE=WINDOW,WINDOW`"),
        ("r=10", "`10` is not a limit: write it as `LIMIT/PERIOD`"),
        ("r=10/minute,20/60s", "two limits with the same windows"),
    ] {
        let (code, _, err) = directory.run(&["--try", candidate, "access.log"]);
        assert!(code == 2 && err.contains(message), "{candidate}: {code} {err}");
    }
}

#[test]
fn wrong_usage_and_unreadable_logs_have_their_exit_codes() {
    let directory = Directory::new(&one_rule(TWO_A_MINUTE));
    directory.write("access.log", combined("203.0.113.1", 0, "GET /a"));
    directory.write("empty.log", "");
    directory.write("bad.toml", "[rules]\nr = 1\n");
    for (arguments, code, message) in [
        (&[][..], 2, "<LOG>"),
        (&["--format", "xml", "access.log"], 2, "`xml` is no format"),
        (&["--config", "bad.toml", "access.log"], 2, "bad.toml:2:"),
        (&["missing.log"], 1, "cannot read `missing.log`"),
        (&["empty.log"], 1, "no line of the logs was decided"),
    ] {
        let (found, _, err) = directory.run(arguments);
        assert!(found == code && err.contains(message), "{arguments:?}: {found} {err}");
    }
}

#[test]
fn what_a_log_lacks_is_said() {
    let rules = "[upstreams.u]\nbuiltin = \"echo\"\n\
                 [rules.per-key]\nkey = \"header:x-api-key\"\non_missing_key = \"refuse\"\nwindows = [\"1/hour\"]\n\
                 [rules.per-client]\nkey = \"ip\"\nwindows = [\"3/hour\"]\n\
                 [rules.per-host]\nkey = \"host\"\nwindows = [\"9/hour\"]\n\
                 [[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\n\
                 rules = [\"per-key\", \"per-client\", \"per-host\"]\n";
    let directory = Directory::new(rules);
    let line = |key: &str| {
        format!("{{\"ts\":1700000000,\"ip\":\"203.0.113.1\",\"method\":\"GET\",\"uri\":\"/\",\"k\":\"{key}\"}}\n")
    };
    directory.write("access.log", (0..5).map(|number| line(&format!("key{}", number / 2))).collect::<String>());
    let result = directory.json(&["access.log"]);
    let note = "rule `per-key`: 0 of 5 lines have `header:x-api-key`; the rule decided nothing for the others";
    let host_note = "rule `per-host`: 0 of 5 lines have `host`; the others count as of one host";
    assert_eq!(result["notes"], serde_json::json!([note, host_note]));
    assert_eq!(result["scenarios"][0]["refused"], 2);
    let rules = result["scenarios"][0]["rules"].as_array().unwrap();
    let per_host = rules.iter().find(|rule| rule["rule"] == "per-host").unwrap();
    assert_eq!(per_host["busiest"]["keys"][0]["key"], "\"\"");
    let result = directory.json(&["--format", "json:header:x-api-key=k", "access.log"]);
    assert_eq!(result["notes"], serde_json::json!([host_note]));
    assert_eq!(result["scenarios"][0]["rules"][0]["refused"], 2);
    let key = result["scenarios"][0]["rules"][0]["busiest"]["keys"][0]["key"].as_str().unwrap();
    assert!(key.starts_with("hmac-") && key.len() == 13, "{key}");
}

/// One rule for each kind of window.
const ALL_KINDS: &str = r#"
listen = { http = "127.0.0.1:0", admin = "127.0.0.1:0", trusted_proxies = ["127.0.0.1"] }

[upstreams.u]
builtin = "echo"

[rules.plain]
key     = "ip"
windows = ["3/minute", "20/hour"]
[rules.first-request]
key     = ["ip", "path"]
windows = [{ limit = 2, period = "90s", start = "first-request" }]
[rules.random]
key     = "ip"
windows = [{ limit = 3, period = "minute", start = "random" }]
[rules.day]
key     = "global"
windows = [{ limit = 40, period = "day", timezone = "America/New_York" }]
[rules.day-from-nine]
key     = "route"
windows = [{ limit = 40, period = "day", start = "09:00", timezone = "Australia/Lord_Howe" }]
[rules.week]
key     = "method"
windows = [{ limit = 50, period = "week", timezone = "Europe/Berlin" }]
[rules.month]
key     = "host"
windows = [{ limit = 60, period = "month", timezone = "Asia/Kolkata" }, "9/minute"]
[rules.from-a-time]
key     = "ip"
windows = [{ limit = 2, period = "7m", start = "2023-11-14T22:13:27.500+01:00" }]
[rules.rollover]
key     = "ip"
windows = [{ limit = 1, period = "minute", capacity = 3 }]
[rules.sliding]
key     = "param:name"
windows = [{ limit = 4, period = "minute", sliding = true }]
[rules.sharded]
key     = "route"
windows = [{ limit = 4, period = "minute", shards = 4 }]
[rules.costly]
key       = "ip"
windows   = [{ limit = 3, period = "minute", capacity = 8 }]
cost      = { request-header = "x-cost", default = 1 }
overrides = [{ key = "10.0.0.1", windows = ["8/minute", "20/hour"] }]
[rules.penalized]
key     = "ip"
windows = ["2/minute"]
penalty = "3m"
[rules.counting-refusals]
key           = "ip"
windows       = ["3/minute"]
count_refused = true
[rules.failures]
key        = "ip"
windows    = ["2/minute"]
count_when = { status = [404] }
[rules.shadow]
key      = "ip"
windows  = ["2/minute"]
on_limit = "shadow"
[rules.small]
key        = "ip"
windows    = ["7/5m"]
exemptions = ["10.0.0.8/31"]

[[routes]]
path     = "/plain/{name}"
upstream = "u"
rules    = ["plain", "small"]
[[routes]]
path     = "/first/{name}"
upstream = "u"
rules    = ["first-request", "sharded"]
[[routes]]
path     = "/random/{name}"
upstream = "u"
rules    = ["random", "shadow"]
[[routes]]
path     = "/days/{name}"
upstream = "u"
rules    = ["day", "day-from-nine"]
[[routes]]
path     = "/weeks/{name}"
upstream = "u"
rules    = ["week"]
[[routes]]
path     = "/months/{name}"
upstream = "u"
rules    = ["month"]
[[routes]]
path     = "/times/{name}"
upstream = "u"
rules    = ["from-a-time"]
[[routes]]
path     = "/costs/{name}"
upstream = "u"
rules    = ["costly"]
[[routes]]
path     = "/rollover/{name}"
upstream = "u"
rules    = ["rollover"]
[[routes]]
path     = "/sliding/{name}"
upstream = "u"
rules    = ["sliding"]
[[routes]]
path     = "/penalized/{name}"
upstream = "u"
rules    = ["penalized", "counting-refusals"]
[[routes]]
path    = "/failures/{name}"
respond = { status = 404 }
rules   = ["failures"]
[[routes]]
path     = "/successes/{name}"
upstream = "u"
rules    = ["failures"]
"#;

#[test]
fn simulated_decisions_are_those_of_the_gateway() {
    let mut random = seeded_rng();
    let directory = Directory::new(ALL_KINDS);
    let log = directory.0.path().join("access.log");
    let gateway = Gateway::start(&format!("{ALL_KINDS}[access_log]\nfile = \"{}\"\n", log.display()));
    let mut client = gateway.client();
    let mut refused = 0;
    let requests = std::env::var("TRANSOM_REPLAYED_REQUESTS").map_or(6000, |text| text.parse().unwrap());
    let routes = [
        "plain",
        "first",
        "random",
        "rollover",
        "sliding",
        "penalized",
        "failures",
        "successes",
        "days",
        "weeks",
        "months",
        "times",
        "costs",
        "none",
    ];
    let mut costs = Vec::new();
    for number in 0..requests {
        let address = format!("10.0.0.{}", (random.f64() * random.f64() * 12.0) as u32);
        let route = routes[random.usize(..routes.len())];
        let path = ["/x", "//x", "/%79", "/./x"][random.usize(..4)];
        costs.push((random.bool() && route == "costs").then(|| random.u32(1..8)));
        let cost = costs[number].map(|cost| cost.to_string());
        let fields = [("X-Forwarded-For", address.as_str()), ("X-Cost", cost.as_deref().unwrap_or_default())];
        let fields = if cost.is_some() { &fields[..] } else { &fields[..1] };
        let response = client.get_with(&format!("/{route}{path}"), fields);
        refused += u64::from(response.status == 429);
        gateway.advance(Duration::from_millis(random.u64(..1500)));
        if random.u16(..1000) == 0 {
            gateway.advance(Duration::from_secs(random.u64(..20_000)));
        }
        // Over weeks and months; with 100,000 requests over most of a year.
        if number % 1500 == 1499 {
            gateway.advance(Duration::from_secs(random.u64(..9 * 86_400)));
        }
    }
    eventually("all lines are logged", || fs::read_to_string(&log).unwrap_or_default().lines().count() >= requests);
    assert!(refused > 200, "{refused}");
    // The log of the gateway lacks the costs of the requests. They are added to its lines, as another proxy logs them.
    let text = fs::read_to_string(&log).unwrap();
    let with_cost = |(line, cost): (&str, &Option<u32>)| match cost {
        Some(cost) => format!("{{\"sent_cost\":\"{cost}\",{}\n", &line[1..]),
        None => format!("{line}\n"),
    };
    directory.write("access.log", text.lines().zip(&costs).map(with_cost).collect::<String>());
    let format = ["--format", "json:header:x-cost=sent_cost", "access.log"];
    let result = directory.json(&format);
    let lines = &result["lines"];
    assert_eq!(lines["decided"].as_u64().unwrap() + lines["unrouted"].as_u64().unwrap(), requests as u64, "{lines}");
    assert_eq!(result["as_logged"]["different"], 0, "{:#}", result["as_logged"]);
    assert_eq!(result["as_logged"]["same"], lines["decided"]);
    assert_eq!(result["scenarios"][0]["refused"], refused);
    for rule in result["scenarios"][0]["rules"].as_array().unwrap() {
        let refusals = rule["refused"].as_u64().unwrap() + rule["shadowed"].as_u64().unwrap();
        assert!(refusals > 0 && rule["admitted"].as_u64() > Some(0), "{}: {refusals}", rule["rule"]);
    }
    // With other limits the decisions differ.
    let other = directory.json(&[&["--try", "plain=1/minute,20/hour"][..], &format].concat());
    assert!(other["scenarios"][1]["refused"].as_u64() > other["scenarios"][0]["refused"].as_u64());
}

/// A line of a log with durations, which starts so many milliseconds after midnight.
fn timed(client: &str, start_ms: u64, duration_ms: u64) -> String {
    let (second, ms) = (start_ms / 1000, start_ms % 1000);
    format!(
        "{{\"time\":\"2023-10-10T00:{:02}:{:02}.{ms:03}Z\",\"client\":\"{client}\",\"method\":\"GET\",\"path\":\"/a\",\
         \"route\":\"all\",\"duration_ms\":{duration_ms}.0}}\n",
        second / 60,
        second % 60
    )
}

#[test]
fn requests_in_flight_are_found_by_their_durations() {
    let directory = Directory::new(&one_rule("key = \"ip\"\nconcurrent = 2\nwindows = [\"100/hour\"]"));
    // Two at a time, a third, one after the end of the first, one of another client, and a short one in the same millisecond.
    let log = [
        timed("203.0.113.1", 1001, 500),
        timed("203.0.113.1", 1200, 1000),
        timed("203.0.113.1", 1300, 50),
        timed("203.0.113.1", 1501, 100),
        timed("203.0.113.2", 1502, 0),
        timed("203.0.113.1", 1601, 0),
    ];
    directory.write("access.log", log.concat());
    let result = directory.json(&["--try", "r=concurrent:1", "--try", "r=concurrent:3,2/hour", "access.log"]);
    let refused: Vec<_> = result["scenarios"].as_array().unwrap().iter().map(|one| one["refused"].clone()).collect();
    assert_eq!(refused, [1, 2, 3]);
    assert_eq!(result["notes"], Value::Array(Vec::new()));
    let limit = &result["scenarios"][0]["rules"][0]["windows"][1];
    assert_eq!((&limit["name"], &limit["limit"], &limit["period"]), (&"r-concurrent".into(), &2.into(), &Value::Null));
    assert_eq!((&limit["refused"], &limit["asked"]["max"]), (&1.into(), &3.into()));
    assert_eq!(limit["suggested"][0]["limit"], 3);
    let (_, text, _) = directory.run(&["access.log"]);
    assert!(text.contains("window r-concurrent: 2 at a time, refused 1"), "{text}");
    // What a log without durations cannot show is said.
    directory.write("combined.log", combined("203.0.113.1", 0, "GET /a"));
    let result = directory.json(&["combined.log"]);
    assert_eq!(result["notes"][0], "rule `r`: `concurrent` was not simulated, because the log has no durations");
    let (code, _, err) = directory.run(&["--try", "r=concurrent:0", "access.log"]);
    assert!(code == 2 && err.contains("`concurrent:0` is not `concurrent:N`"), "{code} {err}");
}

#[test]
fn a_request_waits_for_a_slot_as_long_as_its_rule_allows() {
    let rule = "key = \"ip\"\nconcurrent = 1\non_limit = \"delay\"\nmax_delay = \"1s\"\nmax_waiting = 2";
    let directory = Directory::new(&one_rule(rule));
    // The second waits 900 ms and then takes 500 ms; the third gives up after 1 s; the fourth gets the slot after the second.
    let log = [
        timed("203.0.113.1", 1001, 1000),
        timed("203.0.113.1", 1101, 500),
        timed("203.0.113.1", 1301, 100),
        timed("203.0.113.1", 2401, 100),
        timed("203.0.113.1", 9001, 100),
    ];
    directory.write("access.log", log.concat());
    let rule = &directory.json(&["access.log"])["scenarios"][0]["rules"][0];
    let counts = ["requests", "admitted", "delayed", "refused"].map(|name| rule[name].as_u64().unwrap());
    assert_eq!(counts, [5, 2, 2, 1]);
}

#[test]
fn simulated_requests_in_flight_are_those_of_the_gateway() {
    const RULES: &str = r#"
workers = 2
listen = { http = "127.0.0.1:0", admin = "127.0.0.1:0", trusted_proxies = ["127.0.0.1"] }
[upstreams.u]
builtin = "echo"
[rules.per-client]
key        = "ip"
concurrent = 2
windows    = ["8/minute"]
[rules.shadow]
key        = "ip"
concurrent = 1
on_limit   = "shadow"
[rules.all]
key        = "global"
concurrent = 4
[[routes]]
path     = "/{*rest}"
upstream = "u"
rules    = ["per-client", "shadow", "all"]
"#;
    let mut random = seeded_rng();
    let directory = Directory::new(RULES);
    let log = directory.0.path().join("access.log");
    let gateway = Gateway::start(&format!("{RULES}[access_log]\nfile = \"{}\"\n", log.display()));
    let lines = || fs::read_to_string(&log).unwrap_or_default().lines().count();
    let in_flight = || gateway.metrics().sum("transom_concurrent_requests", &[("rule", "all")]);
    let (mut open, mut durations, mut now_ms) = (Vec::new(), Vec::new(), 0);
    while durations.len() < 200 || !open.is_empty() {
        let step_ms = random.u64(1..2000);
        gateway.advance(Duration::from_millis(step_ms));
        now_ms += step_ms;
        let ends = !open.is_empty() && (durations.len() == 200 || random.u8(..8) < open.len() as u8);
        if ends {
            let (mut client, number): (Client, usize) = open.swap_remove(random.usize(..open.len()));
            client.send("bc");
            client.read_response_to("POST").expect(200);
            durations[number] = now_ms - durations[number];
            eventually("the request has ended", || in_flight() == open.len() as u64);
            continue;
        }
        let (mut client, number) = (gateway.client(), durations.len());
        client.send(format!(
            "POST /{number} HTTP/1.1\r\nHost: {HOST}\r\nX-Forwarded-For: 10.0.0.{}\r\nContent-Length: 3\r\n\r\na",
            random.u8(..5)
        ));
        durations.push(now_ms);
        eventually("the request is decided", || {
            in_flight() > open.len() as u64 || lines() > durations.len() - open.len() - 1
        });
        match in_flight() > open.len() as u64 {
            true => open.push((client, number)),
            false => durations[number] = 0,
        }
    }
    eventually("all lines are logged", || lines() == durations.len());
    // The clock of the test moves, but time does not: durations are those of the test.
    let timed = fs::read_to_string(&log)
        .unwrap()
        .lines()
        .map(|line| {
            let mut line: Value = serde_json::from_str(line).unwrap();
            let number: usize = line["path"].as_str().unwrap()[1..].parse().unwrap();
            line["duration_ms"] = durations[number].into();
            format!("{line}\n")
        })
        .collect::<String>();
    directory.write("timed.log", timed);
    let result = directory.json(&["timed.log"]);
    assert_eq!(result["as_logged"], serde_json::json!({ "same": 200, "different": 0 }));
    for rule in result["scenarios"][0]["rules"].as_array().unwrap() {
        let refusals = rule["refused"].as_u64().unwrap() + rule["shadowed"].as_u64().unwrap();
        assert!(refusals > 0, "{}", rule["rule"]);
    }
    assert!(directory.json(&["access.log"])["as_logged"]["different"].as_u64() > Some(0), "durations do not matter");
}

#[test]
fn simulated_costs_are_those_of_the_gateway() {
    let upstream = Upstream::responding(|request| {
        let cost = request.target.split('/').nth(1).unwrap();
        let fields = [("X-Cost", cost)];
        reply(200, if cost == "none" { &[] } else { &fields }, b"")
    });
    let rules = format!(
        "listen = {{ http = \"127.0.0.1:0\", admin = \"127.0.0.1:0\", trusted_proxies = [\"127.0.0.1\"] }}\n{}\
         [rules.r]\nkey = \"ip\"\nwindows = [\"60/minute\", \"500/hour\"]\n\
         cost = {{ response-header = \"x-cost\", reserve = 5, max = 40 }}\n\
         [rules.weighted]\nkey = \"ip\"\nwindows = [\"12/minute\"]\n\
         cost = {{ request-header = \"x-weight\", default = 2, max = 9 }}\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\", \"weighted\"]\n",
        upstream.toml("u")
    );
    let mut random = seeded_rng();
    let directory = Directory::new(&rules);
    let log = directory.0.path().join("access.log");
    let gateway = Gateway::start(&format!("{rules}[access_log]\nfile = \"{}\"\n", log.display()));
    for _ in 0..500 {
        let address = format!("10.0.0.{}", random.u8(..3));
        let weight = ["1", "3", "20", ""][random.usize(..4)];
        let path = format!("/{}/{weight}", ["0", "1", "4", "9", "35", "50", "none"][random.usize(..7)]);
        let fields = [("X-Forwarded-For", address.as_str()), ("X-Weight", weight)];
        // The weight of 20 is too high: the response is 400, and the connection is closed.
        gateway.client().get_with(&path, &fields[..if weight.is_empty() { 1 } else { 2 }]);
        gateway.advance(Duration::from_millis(random.u64(..5000)));
    }
    eventually("all lines are logged", || fs::read_to_string(&log).unwrap_or_default().lines().count() >= 500);
    let with_costs = fs::read_to_string(&log)
        .unwrap()
        .lines()
        .map(|line| {
            let mut line: Value = serde_json::from_str(line).unwrap();
            let path = line["path"].as_str().unwrap().to_owned();
            let (cost, weight) = path[1..].split_once('/').unwrap();
            line["http_x_weight"] = weight.into();
            if line["status"] == 200 {
                line["cost"] = cost.into();
            }
            format!("{line}\n")
        })
        .collect::<String>();
    directory.write("costs.log", with_costs);
    let result = directory.json(&["--format", "json:response:x-cost=cost", "costs.log"]);
    assert_eq!(result["as_logged"], serde_json::json!({ "same": 500, "different": 0 }));
    let refused = result["scenarios"][0]["refused"].as_u64().unwrap();
    assert!((50..450).contains(&refused), "{refused}");
    for rule in result["scenarios"][0]["rules"].as_array().unwrap() {
        assert!(rule["refused"].as_u64() > Some(0), "{}", rule["rule"]);
    }
    let notes = serde_json::json!([
        format!("rule `r`: {} of 500 lines have no response field `x-cost` and cost 5", 500 - refused),
        "rule `weighted`: 0 of 500 lines have `header:x-weight`; the others cost 2",
    ]);
    assert_eq!(directory.json(&["access.log"])["notes"], notes);
}

/// Costs by usage, by weights and by bytes, with what was reserved, are those of the log.
#[test]
fn simulated_usage_is_that_of_the_gateway() {
    let upstream = Upstream::with_script(|connection: &mut Connection| {
        let usage =
            |input: &str| format!(r#"{{"usage":{{"prompt_tokens":{input},"completion_tokens":7}},"model":"m"}}"#);
        while let Some(request) = connection.read_request() {
            let whole = match request.target.as_str() {
                "/none" => reply(200, &[], b"{}"),
                "/failed" => reply(500, &[], b"no"),
                target => reply(200, &[], usage(target.trim_start_matches(['/', 'c'])).as_bytes()),
            };
            let sent = whole.len() - if request.target.contains('c') { 5 } else { 0 };
            if !connection.send(&whole[..sent]) || sent < whole.len() {
                return connection.close();
            }
        }
    });
    let rules = format!(
        "listen = {{ http = \"127.0.0.1:0\", admin = \"127.0.0.1:0\", trusted_proxies = [\"127.0.0.1\"] }}\n{}\
         [rules.tokens]\nkey = \"ip\"\nwindows = [\"250/minute\"]\n\
         cost = {{ usage = \"auto\", reserve = {{ json = \"/max_tokens\", default = 12 }} }}\n\
         [rules.money]\nkey = \"ip\"\nwindows = [\"4000/hour\"]\n\
         cost = {{ usage = \"auto\", weights = {{ big = {{ input = 2.5 }}, default = {{ output = 0.1 }} }} }}\n\
         [rules.bytes]\nkey = \"ip\"\nwindows = [\"1KiB/minute\"]\ncost = {{ bytes = \"both\", unit = 64 }}\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"tokens\", \"money\", \"bytes\"]\n",
        upstream.toml("u")
    );
    let mut random = seeded_rng();
    let directory = Directory::new(&rules);
    let log = directory.0.path().join("access.log");
    let gateway = Gateway::start(&format!("{rules}[access_log]\nfile = \"{}\"\n", log.display()));
    for logged in 1..=400 {
        let address = ["10.0.0.1", "10.0.0.2"][random.usize(..2)];
        let fields = [("X-Forwarded-For", address), ("Connection", "close")];
        // Responses to paths with `c` break off after they have stated usage.
        let path = ["/none", "/failed", "/0", "/3", "/40", "/70", "/c0", "/c40"][random.usize(..8)];
        // Lines of refused requests do not have the reserve, so that it is the default in all.
        let body = format!("{{\"model\":\"{}\",\"max_tokens\":12}}", ["big", "small"][random.usize(..2)]);
        gateway.client().send(request("POST", path, &fields, body.as_bytes())).read_to_end();
        // The cost has been charged once the line is written.
        eventually("the line is written", || fs::read_to_string(&log).unwrap_or_default().lines().count() == logged);
        gateway.advance(Duration::from_millis(random.u64(..5000)));
    }
    let result = directory.json(&["access.log"]);
    assert_eq!(result["as_logged"], serde_json::json!({ "same": 400, "different": 0 }));
    for rule in result["scenarios"][0]["rules"].as_array().unwrap() {
        assert!(rule["refused"].as_u64() > Some(0), "{rule}");
    }
    // Each row: what four requests have cost, without usage in the log: 250 tokens are reserved, or were charged, once.
    for (cost, refused) in
        [(r#""reserved":{"tokens":250}"#, 3), (r#""cost":{"tokens":250}"#, 3), (r#""cost":{"r":250}"#, 0)]
    {
        let line = r#"{"time":"2026-01-01T00:00:00Z","client":"10.0.0.1","method":"POST","path":"/a","route":"r","status":200,"#;
        directory.write("costs.log", format!("{line}{cost}}}\n").repeat(4));
        assert_eq!(directory.json(&["costs.log"])["scenarios"][0]["refused"], refused, "{cost}");
    }
}

/// A response that breaks off costs at least the reserve. Usage in the log is that of the first rule that reads it.
#[test]
fn logged_usage_is_the_cost_where_a_rule_was_charged_it() {
    let directory = Directory::new("");
    for [first, other] in [["tokens", "units"], ["units", "tokens"]] {
        directory.write(
            "gateway.toml",
            with_listen(&format!(
                "[upstreams.u]\nbuiltin = \"echo\"\n\
                 [rules.tokens]\nkey = \"ip\"\nwindows = [\"25/minute\"]\ncost = {{ usage = \"auto\", reserve = 10 }}\n\
                 [rules.units]\nkey = \"ip\"\nwindows = [\"25/minute\"]\n\
                 cost = {{ usage = {{ json = [\"/units\"] }}, reserve = 10 }}\n\
                 [[routes]]\npath = \"/a\"\nupstream = \"u\"\nrules = [\"{first}\", \"{other}\"]\n"
            )),
        );
        // What each of four requests stated and cost, and how many are refused.
        for (usage, cost_of_first, cost_of_other, refused) in
            [(3, 3, 1, 0), (3, 10, 1, 2), (24, 24, 1, 3), (3, 3, 10, 2), (3, 3, 24, 3)]
        {
            let line = format!(
                r#"{{"time":"2026-01-01T00:00:00Z","client":"10.0.0.1","method":"GET","path":"/a","route":"r","status":200,
                "usage":{{"input":{usage}}},"reserved":{{"{first}":10,"{other}":10}},
                "cost":{{"{first}":{cost_of_first},"{other}":{cost_of_other}}}}}"#
            );
            directory.write("costs.log", format!("{}\n", line.replace('\n', "")).repeat(4));
            let found = &directory.json(&["costs.log"])["scenarios"][0]["refused"];
            assert_eq!(*found, refused, "{first}: {usage}, {cost_of_first}, {cost_of_other}");
        }
    }
}

#[test]
fn simulated_delays_are_those_of_the_gateway() {
    // Windows of fractions of a second, because waiting requests sleep for real.
    const RULES: &str = r#"
listen = { http = "127.0.0.1:0", admin = "127.0.0.1:0", trusted_proxies = ["127.0.0.1"] }
[upstreams.u]
builtin = "echo"
[rules.waiting]
key       = "ip"
windows   = ["2/200ms"]
on_limit  = "delay"
max_delay = "500ms"
[rules.reserving]
key       = "ip"
windows   = [{ limit = 1, period = "100ms", capacity = 3, reserve = 2 }]
on_limit  = "delay"
max_delay = "1s"
[[routes]]
path     = "/waiting"
upstream = "u"
rules    = ["waiting"]
[[routes]]
path     = "/reserving"
upstream = "u"
rules    = ["reserving"]
"#;
    let mut random = seeded_rng();
    let directory = Directory::new(RULES);
    let log = directory.0.path().join("access.log");
    let gateway = Gateway::start(&format!("{RULES}[access_log]\nfile = \"{}\"\n", log.display()));
    let mut waiting = Vec::new();
    for number in 1..=300 {
        let mut client = gateway.client();
        client.send(format!(
            "GET /{} HTTP/1.1\r\nHost: {HOST}\r\nX-Forwarded-For: 10.0.0.{}\r\n\r\n",
            ["waiting", "reserving"][random.usize(..2)],
            random.u8(..2)
        ));
        eventually("the request is decided", || gateway.metrics().sum("transom_decisions_total", &[]) == number);
        waiting.push(client);
        gateway.advance(Duration::from_millis(random.u64(1..36)));
    }
    gateway.advance(Duration::from_secs(10));
    waiting.iter_mut().for_each(|client| drop(client.read_response()));
    eventually("all lines are logged", || fs::read_to_string(&log).unwrap_or_default().lines().count() == 300);
    let result = directory.json(&["access.log"]);
    assert_eq!(result["as_logged"], serde_json::json!({ "same": 300, "different": 0 }));
    for rule in result["scenarios"][0]["rules"].as_array().unwrap() {
        let counts = ["admitted", "delayed", "refused"].map(|name| rule[name].as_u64().unwrap());
        assert!(counts.iter().all(|count| *count > 0), "{}: {counts:?}", rule["rule"]);
    }
}

#[test]
fn a_delayed_request_may_be_refused_when_its_window_opens() {
    let directory = Directory::new(
        "[upstreams.u]\nbuiltin = \"echo\"\n\
         [rules.slow]\nkey = \"ip\"\nwindows = [\"1/15s\"]\non_limit = \"delay\"\nmax_delay = \"15s\"\n\
         [rules.all]\nkey = \"global\"\nwindows = [\"2/5s\"]\n\
         [[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\nrules = [\"slow\", \"all\"]\n",
    );
    // The second request of each client waits for second 15, where `all` has room for two of the three.
    let log = [(1, 0), (1, 1), (2, 5), (2, 6), (3, 10), (3, 11)];
    let log = log.map(|(client, second)| combined(&format!("203.0.113.{client}"), second, "GET /a"));
    directory.write("access.log", log.concat());
    let result = &directory.json(&["access.log"])["scenarios"][0];
    let counts = |rule: usize| {
        ["requests", "admitted", "delayed", "refused"].map(|name| result["rules"][rule][name].as_u64().unwrap())
    };
    assert_eq!((&result["refused"], counts(0), counts(1)), (&1.into(), [6, 3, 3, 0], [6, 5, 0, 1]));
}

#[test]
fn requests_without_a_response_stay_charged() {
    let counted = "key = \"ip\"\nwindows = [\"2/minute\"]\ncount_when = { status = [401], grpc_status = [16] }";
    let directory = Directory::new(&one_rule(counted));
    let line =
        |fields: &str| timed("203.0.113.1", 1001, 1).replace("\"duration_ms\"", &format!("{fields},\"duration_ms\""));
    // 499: the client left; 200: no gRPC, so the code is UNKNOWN.
    for (fields, refused) in [
        ("\"status\":401", 3),
        ("\"status\":499", 3),
        ("\"status\":200", 0),
        ("\"status\":200,\"grpc_status\":\"16\"", 3),
        ("\"status\":200,\"grpc_status\":\"0\"", 0),
    ] {
        directory.write("access.log", line(fields).repeat(5));
        let result = directory.json(&["access.log"]);
        assert_eq!(result["scenarios"][0]["refused"], refused, "{fields}");
        assert_eq!(result["notes"], Value::Array(Vec::new()), "{fields}");
    }
    // Another proxy does not say whether there was a code.
    directory.write("access.log", line("\"status\":200").replace("\"route\":\"all\",", "").repeat(5));
    let result = directory.json(&["access.log"]);
    assert_eq!(result["scenarios"][0]["refused"], 3);
    assert_eq!(result["notes"][0], "rule `r`: 5 of 5 lines have no `grpc_status` and are counted");
}

#[test]
fn suggested_limits_refuse_the_share_of_keys_that_they_promise() {
    let windows = [
        "\"33/minute\"",
        "{ limit = 33, period = \"minute\", start = \"first-request\" }",
        "{ limit = 33, period = \"minute\", start = \"random\" }",
        "{ limit = 33, period = \"minute\", sliding = true }",
    ];
    let mut log = Vec::new();
    let shape = LogShape { form: LogForm::Transom, lines: 30_000, clients: 2000, seed: 11 };
    write_log(&mut log, shape).unwrap();
    for window in windows {
        let directory = Directory::new(&one_rule(&format!("key = \"ip\"\nwindows = [{window}]")));
        directory.write("access.log", &log);
        let result = directory.json(&["access.log"]);
        let suggested = result["scenarios"][0]["rules"][0]["windows"][0]["suggested"].as_array().unwrap();
        let suggested: Vec<(f64, u64)> = suggested
            .iter()
            .map(|one| (one["share_of_keys"].as_f64().unwrap(), one["limit"].as_u64().unwrap()))
            .collect();
        assert_eq!(suggested.iter().map(|(share, _)| *share).collect::<Vec<_>>(), [0.01, 0.001], "{window}");
        // Each limit keeps its promise, and the next lower one does not.
        let candidates = suggested.iter().flat_map(|(_, limit)| [*limit, limit - 1]);
        let options: Vec<String> = candidates.flat_map(|limit| ["--try".into(), format!("r={limit}/minute")]).collect();
        let options: Vec<&str> = options.iter().map(String::as_str).chain(["access.log"]).collect();
        let result = directory.json(&options);
        for (position, (share, limit)) in suggested.into_iter().enumerate() {
            let rule = |scenario: usize| &result["scenarios"][2 * position + scenario]["rules"][0];
            let refused = |scenario: usize| {
                let keys = &rule(scenario)["keys"];
                assert_eq!(keys["sampled_one_of"], 1);
                keys["refused"].as_f64().unwrap() / keys["total"].as_f64().unwrap()
            };
            let shares = [refused(1), refused(2)];
            assert!(shares[0] <= share && share < shares[1], "{window}: {limit} for {share}: {shares:?}");
            // Other windows, such as `first-request`, are kept.
            assert_eq!(rule(1)["windows"][0]["limit"], limit);
        }
    }
}

#[test]
fn times_of_different_zones_are_compared() {
    let directory = Directory::new(&one_rule("key = \"ip\"\nwindows = [\"3/minute\"]"));
    let in_utc = combined("203.0.113.1", 30, "GET /a");
    let in_zone = |time: &str| in_utc.replace("10/Oct/2023:20:00:30 +0000", time);
    let json =
        |time: &str| format!("{{\"time\":\"{time}\",\"client\":\"203.0.113.1\",\"method\":\"GET\",\"path\":\"/a\"}}\n");
    let log = [
        in_utc.clone(),
        in_zone("10/Oct/2023:13:00:31 -0700"),
        in_zone("11/Oct/2023:01:30:32 +0530"),
        json("2023-10-10T22:00:33+02:00"),
        json("2023-10-10T20:00:34"),
    ];
    directory.write("access.log", log.concat());
    let result = directory.json(&["access.log"]);
    assert_eq!((&result["first"], &result["last"]), (&"2023-10-10T20:00:30Z".into(), &"2023-10-10T20:00:34Z".into()));
    assert_eq!((&result["lines"]["decided"], &result["lines"]["out_of_order"]), (&5.into(), &0.into()));
    assert_eq!(result["scenarios"][0]["refused"], 2);
    assert_eq!(result["notes"][0], "1 times have no time zone: they were taken for UTC");
}

#[test]
fn clients_are_known_by_the_names_in_a_log_of_the_gateway() {
    let rules = "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\n[upstreams.u]\nbuiltin = \"echo\"\n\
                 [rules.r]\nkey = \"header:x-api-key\"\non_missing_key = \"ip\"\nwindows = [\"2/minute\"]\n\
                 [rules.r.plans.gold]\nwindows = [\"4/minute\"]\n\
                 [[routes]]\nname = \"all\"\npath = \"/{*rest}\"\nupstream = \"u\"\nrules = [\"r\"]\n";
    let directory = Directory::new(rules);
    let key = Digest::of(b"a secret");
    directory.write("clients.toml", format!("[clients.acme]\nplan = \"gold\"\napi_keys = [\"{key}\"]\n"));
    let line =
        |client_name: &str| timed("203.0.113.1", 1001, 1).replace("\"client\"", &format!("{client_name}\"client\""));
    let log = [line("\"client_name\":\"acme\",\"plan\":\"gold\",").repeat(6), line("").repeat(3)];
    directory.write("access.log", log.concat());
    let result = directory.json(&["access.log"]);
    let rule = &result["scenarios"][0]["rules"][0];
    assert_eq!(rule["refused"], 3, "{rule:#}");
    assert_eq!(rule["busiest"]["keys"][0]["key"], "acme");
    assert_eq!((&rule["windows"][1]["plan"], &rule["windows"][1]["refused"]), (&"plan gold".into(), &2.into()));
    let note = "rule `r`: 6 of 9 lines have `header:x-api-key`; the others were counted by `ip`";
    assert_eq!(result["notes"], serde_json::json!([note]));
    // A candidate for limits that no request has: of the default plan if all clients have another, or the other way around.
    for (lines, candidate, expected) in [
        (0, "r=9/minute", "all clients have a plan or an override; write `r:PLAN=WINDOW,WINDOW`"),
        (1, "r:gold=9/minute", "no request is of a client with plan `gold`"),
    ] {
        directory.write("access.log", &log[lines]);
        let result = directory.json(&["--try", candidate, "access.log"]);
        let notes = result["notes"].as_array().unwrap();
        let expected = format!("`--try {candidate}` changes nothing: {expected}");
        assert!(notes.contains(&expected.as_str().into()), "{notes:?}");
        let other = directory.json(&["--try", if lines == 0 { "r:gold=9/minute" } else { "r=9/minute" }, "access.log"]);
        assert!(!other["notes"].to_string().contains("--try"), "{other:#}");
    }
}

#[test]
fn limits_of_a_client_apply_at_the_time_of_the_line() {
    let directory = Directory::new(
        "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\n[upstreams.u]\nbuiltin = \"echo\"\n\
         [rules.r]\nkey = \"client\"\non_missing_key = \"refuse\"\nwindows = [\"9/minute\"]\n\
         plans.gold.windows = [\"3/minute\"]\n\
         [[routes]]\nname = \"all\"\npath = \"/{*rest}\"\nupstream = \"u\"\nrules = [\"r\"]\n",
    );
    let until = "until = 2023-10-10T00:02:00Z";
    directory.write(
        "clients.toml",
        format!(
            "[clients.granted]\nplan = \"gold\"\nnetworks = [\"203.0.113.1\"]\n\
             grants = [{{ rule = \"r\", window = \"minute\", tokens = 2, {until}, idempotency_key = \"{}\" }}]\n\
             [clients.limited]\nplan = \"gold\"\nnetworks = [\"203.0.113.2\"]\n\
             limits.r = {{ windows = [\"1/minute\"], {until} }}\n",
            Digest::of(b"a ticket")
        ),
    );
    // Seven requests in each of three minutes.
    let admitted = |address: &str| {
        let log: Vec<String> =
            (0..3).flat_map(|minute| (0..7).map(move |n| timed(address, minute * 60_000 + n, 1))).collect();
        directory.write("access.log", log.concat());
        let rule = directory.json(&["access.log"])["scenarios"][0]["rules"][0].take();
        let window = |window: &Value| {
            format!("{}: {}, refused {}", window["plan"].as_str().unwrap(), window["limit"], window["refused"])
        };
        // The first is that of clients without a plan.
        let windows: Vec<String> = rule["windows"].as_array().unwrap()[1..].iter().map(window).collect();
        (rule["admitted"].as_u64().unwrap(), windows.join("; "))
    };
    let granted = "limits of a client: 5, refused 2; limits of a client: 3, refused 8";
    assert_eq!(admitted("203.0.113.1"), (3 + 5 + 3, granted.to_owned()));
    let limited = "plan gold: 3, refused 4; limits of a client: 1, refused 12";
    assert_eq!(admitted("203.0.113.2"), (1 + 1 + 3, limited.to_owned()));
}

#[test]
fn both_forms_of_the_log_of_a_gateway_show_its_clients() {
    for form in ["json", "combined"] {
        let directory = TempDir::new();
        let (log, clients) = (directory.path().join("access.log"), directory.path().join("clients.toml"));
        let key = Digest::of(b"a secret");
        fs::write(&clients, format!("[clients.acme-inc]\nplan = \"gold\"\napi_keys = [\"{key}\"]\n")).unwrap();
        let rules = format!(
            "[clients]\nfile = {clients:?}\napi_key = \"header:x-api-key\"\n[upstreams.u]\nbuiltin = \"echo\"\n\
             [rules.r]\nkey = \"header:x-api-key\"\non_missing_key = \"ip\"\nwindows = [\"2/minute\"]\n\
             [rules.r.plans.gold]\nwindows = [\"4/minute\"]\n\
             [[routes]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n"
        );
        let gateway = Gateway::start(&format!("{rules}[access_log]\nfile = {log:?}\nformat = \"{form}\"\n"));
        let mut client = gateway.client();
        for number in 0..10 {
            let fields = [("X-Api-Key", "a secret")];
            let response = client.get_with("/a", &fields[..if number < 7 { 1 } else { 0 }]);
            assert_eq!(response.status == 429, matches!(number, 4..7 | 9), "{number}");
        }
        eventually("all lines are logged", || fs::read_to_string(&log).unwrap_or_default().lines().count() == 10);
        let directory = Directory(directory);
        directory.write("gateway.toml", with_listen(&rules));
        let result = directory.json(&["access.log"]);
        let rule = &result["scenarios"][0]["rules"][0];
        assert_eq!((&rule["requests"], &rule["refused"]), (&10.into(), &4.into()), "{form}");
        assert_eq!(rule["most_refused"]["keys"][0], serde_json::json!({ "key": "acme-inc", "refused": 3 }), "{form}");
        let same = if form == "json" { 10 } else { 0 };
        assert_eq!(result["as_logged"], serde_json::json!({ "same": same, "different": 0 }));
    }
}

#[test]
fn both_formats_of_a_day_give_the_same_decisions() {
    let directory = Directory::new(&one_rule("key = \"ip\"\nwindows = [\"5/minute\", \"500/hour\"]"));
    let mut results = Vec::new();
    for form in [LogForm::Combined, LogForm::Transom] {
        let mut log = Vec::new();
        write_log(&mut log, LogShape { form, lines: 20_000, clients: 500, seed: 7 }).unwrap();
        let name = format!("{form:?}.log");
        directory.write(&name, log);
        results.push(directory.json(&[&name]));
    }
    let counts = |result: &Value| {
        let rule = &result["scenarios"][0]["rules"][0];
        ["requests", "refused", "keys", "windows", "busiest"].map(|name| rule[name].clone())
    };
    assert_eq!(counts(&results[0]), counts(&results[1]));
    assert!(results[0]["scenarios"][0]["refused"].as_u64().unwrap() > 100);
}

/// The largest memory that a running process has taken, in KiB.
fn peak_memory_kib(child: &Child) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn memory_is_bounded_for_any_number_of_keys() {
    let directory = Directory::new(&one_rule("key = \"path\"\nwindows = [\"33/minute\"]"));
    let mut child = directory.command(&["--json", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut output = child.stdout.take().unwrap();
    // More keys than are sampled; each opens a counter, which lasts for a minute.
    let keys = 300_000_u64;
    for first in (0..keys).step_by(1000) {
        let lines: String =
            (first..first + 1000).map(|key| combined("203.0.113.1", key / 100, &format!("GET /{key}"))).collect();
        stdin.write_all(lines.as_bytes()).unwrap();
    }
    let peak_kib = peak_memory_kib(&child);
    drop(stdin);
    let mut text = String::new();
    output.read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success());
    let result: Value = serde_json::from_str(&text).unwrap();
    let rule = &result["scenarios"][0]["rules"][0];
    assert_eq!((&result["lines"]["decided"], &rule["keys"]["sampled_one_of"]), (&keys.into(), &2.into()));
    let estimated = rule["keys"]["total"].as_u64().unwrap();
    assert!(estimated.abs_diff(keys) < keys / 20, "{estimated}");
    assert!(peak_kib < 256 << 10, "{peak_kib} KiB");
}

#[test]
fn the_html_report_is_one_page_and_escapes_what_clients_send() {
    let directory = Directory::new(&one_rule("key = \"query:q\"\non_missing_key = \"skip\"\nwindows = [\"2/minute\"]"));
    let request = "GET /?q=%3Cscript%3Ealert(1)%3C%2Fscript%3E";
    let mut log: String = (0..50).map(|second| combined("203.0.113.1", second, request)).collect();
    log += &combined("203.0.113.1", 50, "GET /");
    directory.write("access.log", format!("<b>bad</b>\n{log}"));
    let (code, _, err) = directory.run(&["--html", "report.html", "--try", "r=5/minute", "access.log"]);
    assert_eq!((code, err.as_str()), (0, ""));
    let page = fs::read_to_string(directory.0.path().join("report.html")).unwrap();
    for part in [
        "<h2>Rule r</h2>",
        "<rect",
        "class=\"bad\"",
        "limit 2",
        "48 <small>96 %",
        "45 <small>90 %",
        "&lt;script&gt;",
        "&lt;b&gt;bad",
        "Configuration <code>gateway.toml</code>, played by transom ",
        "logarithmic scale",
        "<em style=\"--l:0.0%\">0</em>",
        "<span>1</span><span></span><span>0</span>",
        "<li>rule <code>",
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    // Names in notes are marked, and no text has raw backticks.
    for part in ["<script", "<b>bad", "src=", "href=\"h", "url(", "`"] {
        assert!(!page.contains(part), "{part}: {page}");
    }
    let (code, _, err) = directory.run(&["--html", "missing/report.html", "access.log"]);
    assert!(code == 1 && err.contains("cannot write `missing/report.html`"), "{code} {err}");
}

#[test]
fn a_comparison_fits_a_terminal() {
    let directory = Directory::new(&one_rule(TWO_A_MINUTE));
    let log: String = (0..50).map(|second| combined("203.0.113.1", second, "GET /a")).collect();
    directory.write("access.log", log);
    let candidates: Vec<String> =
        (3..12).map(|limit| format!("r={limit}/minute,{limit}00/hour,{limit}000/day")).collect();
    let tries: Vec<&str> = candidates.iter().flat_map(|text| ["--try", text.as_str()]).collect();
    for number in [2, 4, tries.len()] {
        let (code, out, err) = directory.run(&[&tries[..number], &["access.log"]].concat());
        assert_eq!((code, err.as_str()), (0, ""));
        let (_, comparison) = out.split_once("\n\n").unwrap().1.split_once("\n\n").unwrap();
        assert!(comparison.lines().all(|line| line.chars().count() <= 100), "{comparison}");
        let refused: Vec<&str> = comparison.lines().filter(|line| line.starts_with("r: refused ")).collect();
        let cells: usize = refused.iter().map(|line| line.matches('%').count()).sum();
        assert_eq!(cells, 1 + number / 2, "{comparison}");
        let tried = candidates[..number / 2].iter().all(|candidate| comparison.contains(candidate.as_str()));
        assert!(tried, "{comparison}");
    }
}

/// nginx's format `main` ends with `X-Forwarded-For`, and ingress-nginx has it in brackets.
#[test]
fn forwarded_addresses_of_trusted_proxies_are_the_clients() {
    let with_proxies = |proxies: &str| {
        let listen = format!("listen = {{ http = \"127.0.0.1:0\", trusted_proxies = {proxies} }}\n");
        Directory::new(&format!("{listen}{}", one_rule(TWO_A_MINUTE)))
    };
    let line = |second: u64| combined("10.0.0.1", second, "GET /a").trim_end().to_owned();
    let main = (0..4).map(|n| format!("{} \"198.51.100.9, 203.0.113.{n}\"\n", line(n))).collect::<String>();
    let ingress =
        main.replace("10.0.0.1 - -", "10.0.0.1 - [198.51.100.9, 203.0.113.1, 10.0.0.1] - -").replace("203.0.113.0", "");
    for (log, keys) in [(&main, 4), (&ingress, 1)] {
        let directory = with_proxies("\"10.0.0.0/8\"");
        directory.write("access.log", log);
        let result = directory.json(&["access.log"]);
        assert_eq!(result["scenarios"][0]["rules"][0]["keys"]["total"], keys, "{result}");
        assert_eq!(result["notes"], serde_json::json!([]));
        let directory = with_proxies("\"192.0.2.1\"");
        directory.write("access.log", log);
        let result = directory.json(&["access.log"]);
        assert_eq!(result["scenarios"][0]["rules"][0]["keys"]["total"], 1);
        let note = "4 lines have an `X-Forwarded-For` of a peer that is not in `listen.trusted_proxies`: the peer counts as the client";
        assert_eq!(result["notes"], serde_json::json!([note]));
    }
}

/// Caddy logs all fields of a request. Where it has found the client itself, the list needs no trusted proxy.
#[test]
fn forwarded_addresses_in_logs_of_caddy_are_read() {
    let line = |n: u64, remote: &str, client: &str| {
        format!(
            "{{\"ts\":{},\"request\":{{\"remote_ip\":\"{remote}\",\"client_ip\":\"{client}\",\"method\":\"GET\",\"host\":\"h\",\
             \"uri\":\"/a\",\"headers\":{{\"X-Forwarded-For\":[\"6.6.6.{n}, 203.0.113.{n}\"]}}}},\"duration\":0,\"status\":200}}\n",
            1_696_968_000 + n
        )
    };
    let played = |remote: &str, client: &str| {
        let listen = "listen = { http = \"127.0.0.1:0\", trusted_proxies = \"10.0.0.0/8\" }\n";
        let directory = Directory::new(&format!("{listen}{}", one_rule(TWO_A_MINUTE)));
        directory.write("access.log", (0..4).map(|n| line(n, remote, client)).collect::<String>());
        let result = directory.json(&["access.log"]);
        let notes = result["notes"].as_array().unwrap().len();
        (result["scenarios"][0]["rules"][0]["keys"]["total"].as_u64().unwrap(), notes)
    };
    assert_eq!(played("10.0.0.1", "10.0.0.1"), (4, 0));
    assert_eq!(played("10.0.0.1", "198.51.100.9"), (1, 0));
    assert_eq!(played("198.51.100.9", "198.51.100.9"), (1, 1));
}

/// A balancer that ends TLS logs whole URLs. Other logs do not say the scheme.
#[test]
fn the_scheme_of_a_target_decides_about_routes_by_scheme() {
    let redirect = "[[routes]]\nscheme = \"http\"\npath = \"/{*rest}\"\nredirect = { to = \"https://{host}{uri}\" }\n";
    let directory = Directory::new(&format!("{}{redirect}", one_rule(TWO_A_MINUTE)));
    let alb = |second: u64, url: &str| {
        format!(
            "h2 2023-10-10T20:00:{second:02}.000000Z app/lb/50 203.0.113.1:41000 10.1.0.1:80 0 0 0 200 200 34 366 \
             \"GET {url} HTTP/2.0\" \"-\" - - arn \"Root=1\" \"-\" \"-\" 0 2023-10-10T20:00:{second:02}.000000Z \"forward\"\n"
        )
    };
    let counts = |log: String| {
        directory.write("access.log", log);
        let result = directory.json(&["access.log"]);
        (result["scenarios"][0]["rules"][0]["requests"].as_u64().unwrap(), result["notes"].clone())
    };
    let secure: String = (0..4).map(|second| alb(second, "https://www.example.com:443/a")).collect();
    assert_eq!(counts(secure.clone()), (4, serde_json::json!([])));
    assert_eq!(counts(secure + &alb(5, "http://www.example.com:80/a")), (4, serde_json::json!([])));
    let note = "2 of 2 lines have no scheme: for routes with `scheme`, it was taken for http";
    let log = combined("203.0.113.1", 0, "GET /a") + &combined("203.0.113.1", 1, "GET /a");
    assert_eq!(counts(log), (0, serde_json::json!([note])));
}

/// The address that the gateway takes: at a place of the list, or in a field of its own.
#[test]
fn trusted_hops_and_client_ip_apply_to_logs() {
    let keys = |settings: &str, lines: &str| {
        let listen = format!("listen = {{ http = \"127.0.0.1:0\", trusted_proxies = \"10.0.0.0/8\", {settings} }}\n");
        let directory = Directory::new(&format!("{listen}{}", one_rule(TWO_A_MINUTE)));
        directory.write("access.log", lines);
        directory.json(&["access.log"])["scenarios"][0]["rules"][0]["keys"]["total"].as_u64().unwrap()
    };
    let line = |second: u64| combined("10.0.0.1", second, "GET /a").trim_end().to_owned();
    let main =
        (0..4).map(|n| format!("{} \"198.51.100.9, 203.0.113.{n}, 192.0.2.{n}\"\n", line(n))).collect::<String>();
    assert_eq!((keys("trusted_hops = 1", &main), keys("trusted_hops = 3", &main)), (4, 1));
    // The lists are too short: the peer.
    assert_eq!(keys("trusted_hops = 4", &main), 1);
    let json = |peer: &str, n: u64, more: &str| {
        format!(
            "{{\"time\":\"2024-01-01T12:00:0{n}Z\",\"remote_addr\":\"{peer}\",\"request\":\"GET /a HTTP/1.1\",\
             \"status\":200,\"http_x_forwarded_for\":\"6.6.6.6\"{more}}}\n"
        )
    };
    let logged = |peer: &str| {
        (0..4).map(|n| json(peer, n, &format!(",\"http_true_client_ip\":\"192.0.2.{n}\""))).collect::<String>()
    };
    assert_eq!(keys("client_ip = \"true-client-ip\"", &logged("10.0.0.1")), 4);
    assert_eq!(keys("client_ip = \"true-client-ip\"", &logged("9.9.9.9")), 1);
    // Malformed: the peer. Not logged: the list.
    let unlike = json("10.0.0.1", 0, ",\"http_true_client_ip\":\"192.0.2.7, 192.0.2.8\"") + &json("10.0.0.1", 1, "");
    assert_eq!(keys("client_ip = \"true-client-ip\"", &(unlike + &json("10.0.0.1", 2, ""))), 2);
}

#[test]
fn a_log_whose_times_cannot_be_read_has_no_time() {
    let directory = Directory::new(&one_rule(TWO_A_MINUTE));
    directory.write(
        "access.log",
        "{\"time\":\"20240101120000\",\"client\":\"::1\",\"method\":\"GET\",\"path\":\"/\"}\n".repeat(3),
    );
    let (code, out, err) = directory.run(&["--html", "report.html", "access.log"]);
    assert_eq!((code, err.as_str()), (1, "transom: no line of the logs was decided by a rule\n"));
    assert!(out.starts_with("access.log: 3 lines\n") && out.contains("it has no time"), "{out}");
    let page = fs::read_to_string(directory.0.path().join("report.html")).unwrap();
    assert!(!out.contains("1970") && !page.contains("1970"), "{out}{page}");
    let (_, json, _) = directory.run(&["--json", "access.log"]);
    let result: Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&result["first"], &result["last"]), (&Value::Null, &Value::Null));
}

#[test]
fn the_html_report_is_readable_in_a_browser() {
    let directory = Directory::new(ALL_KINDS);
    let mut log = Vec::new();
    write_log(&mut log, LogShape { form: LogForm::Combined, lines: 20_000, clients: 500, seed: 7 }).unwrap();
    let log = String::from_utf8(log).unwrap().replace("/api/items", "/plain").replace("/api/search", "/random/x");
    directory.write("access.log", format!("nonsense\n{log}"));
    let (code, _, err) = directory.run(&["--html", "report.html", "--try", "plain=10/minute,99/hour", "access.log"]);
    assert_eq!(code, 0, "{err}");
    let mut browser = node("report.cjs");
    let output = browser.arg(program(CHROMIUM)).arg(directory.0.path().join("report.html")).output().unwrap();
    assert!(output.status.success(), "the browser failed:\n{}", String::from_utf8_lossy(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let nothing =
        serde_json::json!({ "findings": [], "errors": [], "overflow": { "light": 0, "dark": 0, "phone": 0 } });
    assert_eq!(found, nothing);
}

/// Makes the picture of docs/guides/choose-limits.md: with `TRANSOM_SCREENSHOTS`, the folder to write it to, of a day of many
/// requests.
#[test]
fn report_screenshots_can_be_made() {
    let directory = Directory::new("");
    directory.write("gateway.toml", fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("gateway.toml")).unwrap());
    let folder = std::env::var_os("TRANSOM_SCREENSHOTS").map(PathBuf::from);
    let (lines, clients) = if folder.is_some() { (200_000, 20_000) } else { (2_000, 200) };
    let mut log = Vec::new();
    write_log(&mut log, LogShape { form: LogForm::Combined, lines, clients, seed: 7 }).unwrap();
    let log = String::from_utf8(log).unwrap().replace("/login", "/api/login").replace("/static", "/api/static");
    directory.write("access.log", log);
    let candidates = ["--try", "per-client=60/minute", "--try", "per-client=160/minute,3000/hour"];
    let (code, _, err) = directory.run(&[&candidates, &["--html", "report.html", "access.log"][..]].concat());
    assert_eq!(code, 0, "{err}");
    let mut browser = node("report.cjs");
    browser.arg(program(CHROMIUM)).arg(directory.0.path().join("report.html")).arg(directory.0.path());
    assert!(browser.stdout(Stdio::null()).status().unwrap().success());
    let made = fs::read(directory.0.path().join("light.png")).unwrap();
    assert!(made.starts_with(b"\x89PNG"));
    if let Some(folder) = folder {
        fs::write(folder.join("simulate-report.png"), made).unwrap();
    }
}

#[test]
fn the_shipped_configuration_can_be_simulated() {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("gateway.toml");
    let directory = Directory::new("");
    let log: String = (0..60).map(|second| combined("203.0.113.1", second, "GET /api/hello")).collect();
    directory.write("access.log", log);
    let (code, text, err) = directory.run(&["--config", shipped.to_str().unwrap(), "access.log"]);
    assert_eq!(code, 0, "{err}");
    assert!(text.contains("window per-client-minute: 33/minute, refused 27"), "{text}");
}
