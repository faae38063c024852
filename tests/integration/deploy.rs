//! The files in `deploy/`: those for Prometheus and Grafana, checked by promtool and against the metrics of the gateway; the
//! systemd unit, the manifests for Kubernetes, and the contents of packages, which `make package-test` installs and runs.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use transom_limiter::handles::Handle as _;
use transom_limiter::secret_digest::Digest;
use transom_runtime::metrics::exposition::{Format, render};
use transom_runtime::metrics::{Metric, Registry, WorkerId, counter};

use crate::support::client::Client;
use crate::support::external_scripts::run_checks;
use crate::support::external_servers::program;
use crate::support::gateway::Gateway;
use crate::support::jwt_issuer::Issuer;
use crate::support::process::{BINARY, Process, run};
use crate::support::redis::{RedisServer, free_port};
use crate::support::test_ca::TestCa;
use crate::support::tls::listen;
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, eventually_eq, one_rule};

fn read(file: &str) -> String {
    fs::read_to_string(format!("{}/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// Runs promtool in the folder of the files; fails if it finds a problem.
fn promtool(arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new("promtool");
    command.args(arguments).current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/deploy"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("promtool of the Debian package `prometheus` is installed");
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{arguments:?}\n{}{}", text(&output.stdout), text(&output.stderr));
    output
}

/// The names of the gateway's metrics in a text, without the suffixes of histograms.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let name = |part: &str| {
        let rest: String = part.chars().take_while(|sign| sign.is_ascii_alphanumeric() || *sign == '_').collect();
        format!("transom_{}", rest.trim_end_matches("_bucket").trim_end_matches("_sum").trim_end_matches("_count"))
    };
    text.split("transom_").skip(1).map(name).collect()
}

/// Fails unless recording.yml records every series that a text names as recorded.
fn assert_recorded(text: &str) {
    let recorded = read("deploy/recording.yml");
    let is_name = |sign: &char| sign.is_ascii_alphanumeric() || [':', '_'].contains(sign);
    for part in text.split("transom:").skip(1) {
        let name: String = part.chars().take_while(is_name).collect();
        assert!(recorded.contains(&format!("- record: transom:{name}\n")), "transom:{name}");
    }
}

fn assert_documented(text: &str) {
    let reference = metrics_in(&read("docs/reference/metrics.md"));
    let unknown: Vec<String> = metrics_in(text).difference(&reference).cloned().collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

#[test]
fn prometheus_accepts_its_files() {
    promtool(&["check", "config", "prometheus.yml"], "");
    promtool(&["check", "rules", "recording.yml", "alerts.yml"], "");
    [read("deploy/alerts.yml"), read("deploy/recording.yml")].iter().for_each(|text| assert_documented(text));
    assert_recorded(&read("deploy/alerts.yml"));
}

/// Every alert fires in a unit test, has a severity, and names the section of the guide that says what to do.
#[test]
fn every_alert_is_tested_and_explained() {
    promtool(&["test", "rules", "alerts_test.yml"], "");
    let (alerts, tests, guide) =
        (read("deploy/alerts.yml"), read("deploy/alerts_test.yml"), read("docs/guides/alerts.md"));
    let names: Vec<&str> = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(names.len() >= 12, "{names:?}");
    for (name, alert) in names.iter().zip(alerts.split("- alert: ").skip(1)) {
        let runbook = format!("runbook_url: docs/guides/alerts.md#{}", name.to_lowercase());
        assert!(alert.contains(&runbook) && guide.contains(&format!("## {name}\n")), "{name}");
        assert!(
            ["critical", "warning"].iter().any(|severity| alert.contains(&format!("severity: {severity}"))),
            "{name}"
        );
        assert!(alert.contains("\n        for: "), "{name}");
        let test = tests.split("  - interval:").find(|test| test.contains(&format!("alertname: {name}\n")));
        assert!(test.is_some_and(|test| test.contains("exp_alerts")), "{name}");
    }
    // Every recorded series is tested, by itself or through an alert.
    let recording = read("deploy/recording.yml");
    let recorded: Vec<&str> = recording.lines().filter_map(|line| line.trim().strip_prefix("- record: ")).collect();
    assert!(recorded.len() >= 5, "{recorded:?}");
    for name in recorded {
        assert!(tests.contains(&format!("expr: {name}\n")), "{name}");
    }
}

/// The command of the guide makes an address of every `runbook_url`.
#[test]
fn runbook_links_can_be_made_absolute() {
    let guide = read("docs/guides/alerts.md");
    let command = guide.lines().find(|line| line.starts_with("    sed ")).unwrap().trim();
    let scratch = TempDir::new();
    let file = scratch.write("alerts.yml", read("deploy/alerts.yml"));
    let status = Command::new("sh").args(["-c", command]).current_dir(scratch.path()).status().unwrap();
    assert!(status.success());
    let alerts = fs::read_to_string(file).unwrap();
    let links: Vec<&str> = alerts.lines().filter_map(|line| line.trim().strip_prefix("runbook_url: ")).collect();
    assert!(links.len() >= 12, "{links:?}");
    assert!(links.iter().all(|link| link.starts_with("https://") && link.contains("/docs/guides/")), "{links:?}");
}

/// Grafana itself is not in Debian: its own types read the dashboard, and Prometheus reads every query.
#[test]
fn grafana_knows_every_field_of_the_dashboard() {
    run_checks("validate_dashboard.py", &[concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/grafana.json")]);
}

#[test]
fn the_dashboard_queries_metrics_that_exist() {
    let text = read("deploy/grafana.json");
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let mut ids = BTreeSet::new();
    let mut rules = String::from("groups:\n  - name: dashboard\n    rules:\n");
    // A rule chooses the status of its refusals.
    assert!(!text.contains("429"));
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{panel}");
        for target in panel["targets"].as_array().into_iter().flatten() {
            let query = target["expr"].as_str().unwrap().replace("$__rate_interval", "5m").replace("$instance", ".*");
            rules += &format!(
                "      - record: query:{}{}\n        expr: |\n          {query}\n",
                panel["id"],
                target["refId"].as_str().unwrap()
            );
        }
    }
    assert!(ids.len() >= 20);
    let scratch = TempDir::new();
    let file = scratch.write("rules.yml", rules);
    promtool(&["check", "rules", file.to_str().unwrap()], "");
    assert_documented(&text.replace("\"transom_", "\" transom_"));
    assert_recorded(&text);
}

/// A request that exceeds two windows of a rule is one refusal.
#[test]
fn the_dashboard_counts_a_refusal_once() {
    let dashboard: Value = serde_json::from_str(&read("deploy/grafana.json")).unwrap();
    let panel = dashboard["panels"].as_array().unwrap().iter().find(|panel| panel["title"] == "Refusals").unwrap();
    let query = panel["targets"][0]["expr"].as_str().unwrap();
    let (metric, labels) = selected(query);
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"2/minute\", \"2/hour\"]"));
    for status in [200, 200, 429] {
        gateway.get("/a").expect(status);
    }
    assert_eq!(gateway.metrics().sum(metric, &labels), 1, "{query}");
}

/// The metric in a query, and the values of `outcome` that the query selects.
fn selected(query: &str) -> (&str, Vec<(&str, &str)>) {
    let metric = query.split(['(', '{']).find(|word| word.starts_with("transom_")).unwrap();
    let outcome = query.split_once("outcome=\"").map(|(_, rest)| ("outcome", rest.split('"').next().unwrap()));
    (metric, outcome.into_iter().collect())
}

#[test]
fn the_dashboard_shows_requests_and_refusals_by_client() {
    let dashboard: Value = serde_json::from_str(&read("deploy/grafana.json")).unwrap();
    let rule = one_rule("key = \"header:x-key\"\non_missing_key = \"skip\"\nwindows = [\"2/minute\"]");
    let clients = "[clients]\nfile = \"clients.toml\"\nsubject = \"header:x-key\"\n[metrics]\nclients = true\n";
    let toml = format!("{clients}{rule}[rules.r.plans.gold]\nwindows = [\"2/minute\"]\n");
    let gateway = Gateway::start_with(&toml, "[clients.acme]\nplan = \"gold\"\nsubjects = [\"a\"]\n");
    for status in [200, 200, 429] {
        gateway.get_with("/a", &[("X-Key", "a")]).expect(status);
    }
    for (title, count) in [("Requests by client", 3), ("Refusals by client", 1)] {
        let panel = dashboard["panels"].as_array().unwrap().iter().find(|panel| panel["title"] == title).unwrap();
        let target = &panel["targets"][0];
        let query = target["expr"].as_str().unwrap();
        assert!(query.contains("by (client)") && target["legendFormat"] == "{{client}}", "{target}");
        let (metric, mut labels) = selected(query);
        labels.push(("client", "acme"));
        eventually_eq(|| gateway.metrics().sum(metric, &labels), count);
    }
}

#[test]
fn prometheus_accepts_the_metrics() {
    let named = "[[routes]]\nname = 'a \\\\\"name\" \\n'\npath = \"/b\"\nrespond = { status = 204 }\n";
    let gateway = Gateway::start(&(one_rule("key = \"ip\"\nwindows = [\"2/minute\"]") + named));
    (0..3).for_each(|_| drop(gateway.get("/a")));
    let metrics = Client::connect(gateway.admin).get("/metrics").expect(200);
    let text = String::from_utf8(metrics.body).unwrap();
    let output = promtool(&["check", "metrics"], &text);
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    // Of a name that needs escapes.
    drop(gateway.get("/b"));
    run_checks("parse_metrics.py", &[format!("http://{}/metrics", gateway.admin)]);
}

/// Label values of up to four signs, among them those that need escapes and those that end a label.
fn label_values() -> impl Iterator<Item = String> {
    const SIGNS: [char; 7] = ['\\', '"', '\n', 'n', '}', ',', '\u{e9}'];
    (0..=4).flat_map(|length| {
        (0..SIGNS.len().pow(length))
            .map(move |number| (0..length).map(|place| SIGNS[number / SIGNS.len().pow(place) % SIGNS.len()]).collect())
    })
}

static SEEN: Metric = counter("seen_total", "Values of a label.");

/// Prometheus stores what it reads, and prints it with the same escapes.
#[test]
fn prometheus_reads_back_all_labels() {
    let (registry, scratch) = (Registry::default(), TempDir::new());
    let values: Vec<String> = label_values().collect();
    values.iter().for_each(|value| registry.cell(&SEEN, WorkerId::at(0), &[("value", value)]).add(3));
    let page = |format| render(&registry, &[&SEEN], &[], format);
    let text = page(Format::Prometheus);
    promtool(&["check", "metrics"], &text);
    let open_metrics = page(Format::OpenMetrics);
    run_checks(
        "parse_labels.py",
        &[
            scratch.write("labels.json", serde_json::to_vec(&values).unwrap()).display().to_string(),
            scratch.write("text", &text).display().to_string(),
            scratch.write("openmetrics", &open_metrics).display().to_string(),
        ],
    );
    // promtool stores samples with times only.
    let timed = open_metrics
        .lines()
        .map(|line| if line.starts_with('#') { format!("{line}\n") } else { format!("{line} 1\n") });
    let file = scratch.write("timed", timed.collect::<String>()).display().to_string();
    let store = scratch.path().join("store");
    fs::create_dir_all(store.join("wal")).unwrap();
    let store = store.to_str().unwrap();
    promtool(&["tsdb", "create-blocks-from", "openmetrics", &file, store], "");
    let dump = String::from_utf8(promtool(&["tsdb", "dump", store], "").stdout).unwrap();
    let expected = |value: &String| {
        let escaped = value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n");
        // A label without a value is none.
        let label = if value.is_empty() { String::new() } else { format!(", value=\"{escaped}\"") };
        format!("{{__name__=\"seen_total\"{label}}} 3 1000")
    };
    let (read, expected): (BTreeSet<String>, BTreeSet<String>) =
        (dump.lines().map(str::to_owned).collect(), values.iter().map(expected).collect());
    assert_eq!(read.symmetric_difference(&expected).collect::<Vec<_>>(), Vec::<&String>::new());
}

/// A gateway that uses nearly every part has all documented metrics, and promtool accepts them.
#[test]
fn prometheus_accepts_the_metrics_of_every_part() {
    let (redis, issuer, authority, scratch) = (RedisServer::start(), Issuer::new(), TestCa::new(), TempDir::new());
    let list = scratch.write("list.pem", authority.revoke(&[], 4000));
    let client_authority = scratch.write("authority.pem", &authority.pem);
    let tls = listen(
        &scratch,
        &authority.issue(&["a.test"]),
        &format!(
            "client_ca = {client_authority:?}\nclient_crl = {list:?}\nclient_auth = \"optional\"\n\
             acme = {{ domains = [\"b.test\"], directory = \"http://127.0.0.1:1/dir\", storage = {:?} }}",
            scratch.path().join("acme")
        ),
    );
    let key_set = issuer.jwks().to_string();
    let keys = Upstream::responding(move |_| reply(200, &[], key_set.as_bytes()));
    let upstream = Upstream::responding(|_| reply(200, &[], br#"{"usage":{"prompt_tokens":1}}"#));
    let receiver = free_port();
    let (log, snapshot) = (scratch.path().join("access.log"), scratch.path().join("snapshot"));
    let tls = tls.replace("[listen]\n", "[listen]\nratelimit_service = \"127.0.0.1:0\"\n");
    let denied = scratch.write("access.toml", "[[deny]]\nkey = { part = \"header:x-device\", value = \"d\" }\n");
    let process = Process::spawn_with(
        &format!(
            "{tls}[access]\nfile = {denied:?}\n[notify]\nat = \"80%\"\n[metrics]\nclients = true\n[access_log]\nfile = {log:?}\n\
             [counters.shared]\nredis = \"redis://127.0.0.1:{}\"\ntimeout = \"10s\"\n\
             [tracing]\nendpoint = \"http://127.0.0.1:{receiver}\"\nsample = 1\n\
             [clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\n{}\
             jwks_url = \"http://{}/keys\"\n\
             [upstreams.u]\nservers = [\"http://{}\"]\nmax_connections = 8\nmax_pending = 8\n\
             health = {{ path = \"/health\" }}\n\
             [upstreams.s]\nservers = \"srv://api.test\"\ndns_servers = \"127.0.0.1:{receiver}\"\n\
             [rules.shared]\nkey = \"header:x-api-key\"\non_missing_key = \"ip\"\nwindows = [\"9/hour\", \"5/minute\"]\n\
             [rules.shared.plans.gold]\nwindows = [\"90/hour\"]\n\
             [rules.local]\nkey = \"jwt:sub\"\non_missing_key = \"ip\"\nwindows = [\"3/hour\"]\nshared = \"off\"\n\
             descriptor = {{ domain = \"api\", entries = [\"user\"] }}\n\
             on_limit = \"delay\"\nmax_delay = \"1s\"\n\
             [rules.flight]\nkey = \"ip\"\nconcurrent = 9\nshared = \"off\"\n\
             [rules.failures]\nkey = \"ip\"\nwindows = [\"9/hour\"]\nshared = \"off\"\npenalty = \"1h\"\n\
             count_when = {{ status = [401] }}\n\
             [rules.tokens]\nkey = \"ip\"\nwindows = [\"99/hour\"]\nshared = \"off\"\ncost = {{ usage = \"auto\" }}\n\
             [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n\
             rules = [\"shared\", \"local\", \"flight\", \"failures\", \"tokens\"]\n",
            redis.port,
            issuer.keys(&scratch),
            keys.address,
            upstream.address
        ),
        &format!("[clients.acme]\nplan = \"gold\"\napi_keys = [\"{}\"]\n", Digest::of(b"a key")),
    );
    let mut client = process.client();
    client.get_with("/b", &[("X-Api-Key", "a key")]).expect(200);
    let statuses: Vec<u16> = (0..7).map(|_| client.get("/a").status).collect();
    assert!(statuses.contains(&200) && statuses.contains(&429), "{statuses:?}");
    client.get_with("/b", &[("X-Device", "d")]).expect(403);
    // Shared counters have no snapshot.
    let saving = Process::spawn(&format!(
        "{}[counters]\nsnapshot = {snapshot:?}\nsnapshot_every = \"1s\"\n",
        one_rule("key = \"ip\"\nwindows = [\"9/hour\"]\ncost = { usage = \"auto\" }")
    ));
    let sharing = Process::spawn(&format!(
        "[counters.shared]\nredis = \"redis://127.0.0.1:{}\"\n\
         [clients]\nsource = \"shared\"\nfile = \"clients.copy\"\napi_key = \"header:x-api-key\"\n{}",
        redis.port,
        one_rule("key = \"client\"\non_missing_key = \"refuse\"\nwindows = [\"9/hour\"]")
    ));
    let page_of = |process: &Process| String::from_utf8(process.admin_get("/metrics").expect(200).body).unwrap();
    let page = || page_of(&process) + &page_of(&saving) + &page_of(&sharing);
    let missing = || {
        let present = metrics_in(&page());
        metrics_in(&read("docs/reference/metrics.md")).difference(&present).cloned().collect::<Vec<_>>()
    };
    eventually_eq(missing, Vec::new());
    for process in [&process, &saving, &sharing] {
        let output = promtool(&["check", "metrics"], &page_of(process));
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn the_systemd_unit_is_hardened() {
    let output = Command::new(program("systemd-analyze"))
        // Tenths: exposure 2.0.
        .args(["security", "--offline=true", "--threshold=20", "--no-pager", "deploy/transom.service"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn the_configurations_of_packages_are_valid() {
    for name in ["gateway.toml", "image.toml"] {
        let file = format!("{}/deploy/package/{name}", env!("CARGO_MANIFEST_DIR"));
        let (code, stdout, stderr) = run(&["check", "--config", &file]);
        assert_eq!(code, Some(0), "{name}: {stdout}{stderr}");
    }
}

/// What the Debian package takes from the source exists; the other files are written by `build.sh`.
#[test]
fn the_debian_package_lists_files_that_exist() {
    let manifest: toml_edit::DocumentMut = read("Cargo.toml").parse().unwrap();
    let script = read("deploy/package/build.sh");
    let assets = manifest["package"]["metadata"]["deb"]["assets"].as_array().unwrap();
    let part =
        |asset: &toml_edit::Value, n: usize| asset.as_array().unwrap().get(n).unwrap().as_str().unwrap().to_owned();
    for asset in assets {
        let source = part(asset, 0);
        let (folder, name) = source.rsplit_once('/').unwrap_or((".", &source));
        if folder == "target/package-stage" {
            let name = name.trim_end_matches(".gz");
            assert!(script.contains(&format!("\"$stage/{name}\"")), "{source}");
        } else if !source.contains('*') {
            assert!(Path::new(env!("CARGO_MANIFEST_DIR")).join(&source).is_file(), "{source}");
        }
    }
    let unit = read("deploy/transom.service");
    for path in ["/usr/bin/transom", "/etc/transom/gateway.toml"] {
        assert!(
            unit.contains(path) && assets.iter().any(|asset| part(asset, 1) == path.trim_start_matches('/')),
            "{path}"
        );
    }
}

/// Against the schemas of the API, how they refer to one another, and their configurations.
#[test]
fn the_kubernetes_manifests_are_valid() {
    run_checks("validate_manifests.py", &[BINARY, concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/kubernetes")]);
}
