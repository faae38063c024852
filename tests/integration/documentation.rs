//! Runs the commands of README and docs, and compares their output.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::json;
use transom_config::access::{AccessSettings, DenySettings};
use transom_config::acme::AcmeSettings;
use transom_config::body_condition::BodyCondition;
use transom_config::certificate::CertificateFiles;
use transom_config::client_tls::ClientTlsSettings;
use transom_config::clients::{ClientSettings, ClientsSettings};
use transom_config::count_when::CountWhen;
use transom_config::counters::Counters;
use transom_config::descriptor::Descriptor;
use transom_config::jwt::{JwtKeySettings, JwtSettings};
use transom_config::key::KeySettings;
use transom_config::key_kind::KINDS;
use transom_config::limits::{DrainSettings, Http2, Limits, Timeouts};
use transom_config::listen::{Admin, AdminToken, Https, Listen};
use transom_config::listen_address::SocketTable;
use transom_config::notify::NotifySettings;
use transom_config::overrides::ExceptionSettings;
use transom_config::path::PathSettings;
use transom_config::redis::SharedSettings;
use transom_config::route::{RouteConditions, RouteSettings};
use transom_config::route_actions::ActionSettings;
use transom_config::rule::{CostSettings, RuleSettings};
use transom_config::settings::{Section, reference_rows};
use transom_config::span_export::TracingSettings;
use transom_config::upstream::{Ejection, HealthChecks, Retries, ServerSettings, UpstreamPolicy};
use transom_config::usage_cost::{ReserveSettings, UsagePointers, WeightSettings};
use transom_config::window::WindowSettings;
use transom_config::{AccessLogSettings, General, MetricsSettings};
use transom_http::error::RequestError;
use transom_limiter::secret_digest::Digest;

use crate::support::client::{Client, HOST};
use crate::support::gateway::Gateway;
use crate::support::process::{BINARY, run};
use crate::support::{TempDir, eventually, one_rule, without_digests};

/// Unix seconds at which both an hour and a minute start.
const HOUR_S: u64 = 472_223 * 3600;

fn document(name: &str) -> String {
    fs::read_to_string(format!("{}/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// Names of README, of the index of `docs`, and of all pages in its folders.
fn documents() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut names = vec!["README.md".to_owned(), "docs/README.md".to_owned()];
    for folder in ["guides", "reference", "explanation"] {
        for page in fs::read_dir(root.join("docs").join(folder)).unwrap() {
            names.push(page.unwrap().path().strip_prefix(root).unwrap().to_str().unwrap().to_owned());
        }
    }
    names.retain(|name| Path::new(name).extension() == Some("md".as_ref()));
    names.sort();
    names
}

/// A gateway with the shipped configuration, `left_s` seconds before the end of an hour.
fn shipped(left_s: u64) -> Gateway {
    let text =
        document("gateway.toml").replace("127.0.0.1:8080", "127.0.0.1:0").replace("127.0.0.1:9900", "127.0.0.1:0");
    Gateway::start_at(&text, HOUR_S + 3600 - left_s)
}

/// The output of a documented command, run against a gateway.
fn printed(command: &str, gateway: &Gateway) -> String {
    let command = command.replace("127.0.0.1:8080", &gateway.http_addresses()[0].to_string());
    let command = command.replace("127.0.0.1:9900", &gateway.admin.to_string());
    let output = Command::new("bash").args(["-c", &command]).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A text without whitespace.
fn flat(text: &str) -> String {
    text.split_whitespace().collect()
}

#[test]
fn the_documented_console_output_is_true() {
    let pages: Vec<String> = documents().iter().map(|name| document(name)).collect();
    // At the number of seconds before the end of the hour that the first response states.
    let gateway = shipped(1711);
    let mut commands = 0;
    for block in pages.iter().flat_map(|page| page.split("```console\n").skip(1)) {
        let block = block.split("```").next().unwrap();
        let mut shown = "";
        let mut rest = block;
        while let Some(command) = rest.strip_prefix("$ ") {
            let (command, behind) = command.split_once('\n').unwrap();
            let end = if behind.starts_with("$ ") { 0 } else { behind.find("\n$ ").map_or(behind.len(), |at| at + 1) };
            (shown, rest) = behind.split_at(end);
            let printed = flat(&printed(command, &gateway));
            let mut at = 0;
            // In this order; lines may be left out.
            for line in shown.lines().filter(|line| *line != "...").map(flat) {
                let found = printed[at..].find(&line);
                at += found.unwrap_or_else(|| panic!("`{command}` printed {printed}, and not {line}")) + line.len();
            }
            commands += 1;
        }
        assert!(rest.is_empty() && !shown.is_empty(), "{block}");
    }
    assert_eq!(commands, 3);
}

#[test]
fn the_documented_decision_api_responses_are_true() {
    let page = document("docs/guides/decision-api.md");
    let gateway = shipped(2137);
    let command = page.lines().find(|line| line.starts_with("    curl -s http://127.0.0.1:9900/v1/limit")).unwrap();
    let (_, shown) = page.split_once("\n    {\"allowed\"").unwrap();
    let (shown, _) = shown.split_once("\n\n").unwrap();
    // Dots stand for the other windows.
    let shown = format!("{{\"allowed\"{}", shown.replace(", …", ""));
    let mut shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    let mut printed: serde_json::Value = serde_json::from_str(&printed(command.trim(), &gateway)).unwrap();
    assert_eq!(shown["windows"][0], printed["windows"][0]);
    for response in [&mut shown, &mut printed] {
        response["windows"].take();
    }
    assert_eq!(shown, printed);
}

/// Unix seconds of 2026-10-09T14:00:00Z.
const AFTERNOON_S: u64 = 1_791_554_400;

/// A configuration with 1000 clients of plan `gold`, of which acme has the key `key-of-acme`.
fn clients_of_the_guide() -> String {
    let names = (1..999).map(|number| format!("c{number}")).chain(["acme", "hooli"].map(str::to_owned));
    let client = |name: String| {
        let digest = Digest::of(format!("key-of-{name}").as_bytes());
        format!("[clients.{name}]\nplan = \"gold\"\napi_keys = [\"{digest}\"]\n")
    };
    names.map(client).collect()
}

/// The access log of a day with a limit of 33 requests a minute: most clients ask for less than 30, acme for up to 48 in the
/// afternoon, and hooli for 280 during three quarters of an hour.
fn log_of_the_guide() -> String {
    let mut random = fastrand::Rng::with_seed(1);
    let mut requests = Vec::new();
    let mut add = |random: &mut fastrand::Rng, minute: u64, count: u32, name: &str, path: &str| {
        let times = (0..count).map(|_| minute * 60_000 + random.u64(..60_000));
        requests.extend(times.map(|time_ms| (time_ms, name.to_owned(), path.to_owned())));
    };
    for number in 1..999 {
        for _ in 0..random.u32(1..4) {
            let (minute, count) = (random.u64(..1440), if number % 20 == 0 { 29 } else { random.u32(1..10) });
            add(&mut random, minute, count, &format!("c{number}"), "/v1/items/3");
        }
    }
    (840..960).for_each(|minute| add(&mut random, minute, 8 + (minute as u32 * 17) % 41, "acme", "/v1/search"));
    (700..745).for_each(|minute| add(&mut random, minute, 300, "hooli", "/v1/items/7"));
    requests.sort();
    let mut used = BTreeMap::new();
    let line = |(time_ms, name, path): (u64, String, String)| {
        let used = used.entry((name.clone(), time_ms / 60_000)).or_insert(0);
        let is_admitted = *used < 33;
        *used += u32::from(is_admitted);
        let (hours, minutes, seconds) = (time_ms / 3_600_000, time_ms / 60_000 % 60, time_ms / 1000 % 60);
        let (status, verdict) = if is_admitted { (200, "admitted") } else { (429, "refused") };
        let full = json!([{"rule": "per-client", "window": "per-client-minute", "key": name, "plan": "gold"}]);
        let mut line = json!({
            "time": format!("2026-10-09T{hours:02}:{minutes:02}:{seconds:02}.{:03}Z", time_ms % 1000),
            "method": "GET", "host": "api.example.com", "path": path, "client": "192.0.2.7", "client_name": name,
            "plan": "gold", "status": status, "duration_ms": 1.25, "rules": {"per-client": verdict},
        });
        if !is_admitted {
            line["refused_by"] = full;
        }
        format!("{line}\n")
    };
    requests.into_iter().map(line).collect()
}

/// Does what `docs/guides/refusals.md` says, from the complaint to the limit, and compares every output. A line of dots stands for
/// lines that are left out.
#[test]
fn the_walk_from_a_complaint_to_a_limit_is_true() {
    let page = document("docs/guides/refusals.md");
    let walk = page.split("\n## ").nth(1).unwrap();
    let (scratch, clients) = (TempDir::new(), clients_of_the_guide());
    let toml = walk.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    let on =
        |toml: &str, http: &str, admin: &str| toml.replace("127.0.0.1:8080", http).replace("127.0.0.1:9900", admin);
    let live_log = scratch.path().join("live.log");
    let live_toml = on(toml, "127.0.0.1:0", "127.0.0.1:0").replace("access.log", live_log.to_str().unwrap());
    let mut gateway = Gateway::start_with_at(&live_toml, &clients, AFTERNOON_S + 31 * 60);
    let admin = gateway.admin.to_string();
    scratch.write("gateway.toml", on(toml, "127.0.0.1:8080", &admin));
    scratch.write("clients.toml", &clients);
    scratch.write("access.log", log_of_the_guide());
    let fields = [("X-API-Key", "key-of-acme")];
    (0..33).for_each(|_| drop(gateway.get_with("/v1/search", &fields).expect(200)));
    (0..33).for_each(|_| drop(gateway.get_with("/v1/items/7", &[("X-API-Key", "key-of-hooli")]).expect(200)));
    gateway.advance_s(29);
    (0..43).for_each(|_| drop(gateway.get_with("/v1/search", &fields).expect(429)));
    (0..1207).for_each(|_| drop(gateway.get_with("/v1/items/7", &[("X-API-Key", "key-of-hooli")]).expect(429)));
    let (mut commands, mut outputs) = (String::new(), 0);
    let mut lines = walk.lines();
    while let Some(line) = lines.next() {
        if let Some(command) = line.strip_prefix("       ") {
            commands += &format!("{}\n", command.replace("transom ", &format!("{BINARY} ")));
        } else if line == "   ```text" {
            let shown: Vec<&str> = lines.by_ref().take_while(|line| *line != "   ```").collect();
            let output = Command::new("bash").args(["-ec", &commands]).current_dir(scratch.path()).output().unwrap();
            assert!(output.status.success(), "{commands}: {}", String::from_utf8_lossy(&output.stderr));
            let text = without_digests(&String::from_utf8(output.stdout).unwrap());
            let printed = flat(&text);
            let mut at = 0;
            for line in shown.iter().filter(|line| line.trim() != "...").map(|line| flat(line)) {
                let found = printed[at..].find(&line);
                at += found.unwrap_or_else(|| panic!("`{commands}` printed\n{text}\nand not {line}")) + line.len();
            }
            if !shown.iter().any(|line| line.trim() == "...") {
                assert_eq!(at, printed.len(), "`{commands}` printed\n{text}");
            }
            commands.clear();
            outputs += 1;
            // The gateway of this process reads no file.
            let edited = fs::read_to_string(scratch.path().join("gateway.toml")).unwrap();
            if edited.contains("48/minute") {
                gateway.reload_with(&live_toml.replace("33/minute", "48/minute"), &clients);
                let check = r#"{"rule": "per-client", "client": "acme"}"#;
                let host = [("Host", "127.0.0.1")];
                let ask = || Client::connect(gateway.admin).request("POST", "/v1/check", &host, check.as_bytes());
                let is_allowed = || ask().json()["allowed"] == true;
                eventually("the request is admitted", is_allowed);
            }
        }
    }
    assert_eq!(outputs, 7);
}

#[test]
fn the_documented_fields_of_explanations_are_complete() {
    let gateway = shipped(1711);
    let question = r#"{"url": "http://127.0.0.1:8080/api/search"}"#;
    let host = [("Host", &*gateway.admin.to_string())];
    let explanation = Client::connect(gateway.admin).request("POST", "/v1/explain", &host, question.as_bytes());
    let json = explanation.expect(200).json();
    let fields = |heading: &str| -> BTreeSet<String> {
        let page = document("docs/guides/decision-api.md");
        let table = page.split(heading).nth(1).unwrap().split("\n\n").next().unwrap().to_owned();
        let names = table.lines().filter_map(|row| row.strip_prefix("| `")?.split(" |").next().map(str::to_owned));
        names.flat_map(|names| names.replace('`', "").split(", ").map(str::to_owned).collect::<Vec<_>>()).collect()
    };
    let names = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(names(&json), fields("JSON otherwise:\n\n"));
    assert_eq!(names(&json["rules"][0]), fields("| field of a rule"));
}

#[test]
fn the_readme_quotes_check_of_the_shipped_file() {
    let shipped = format!("{}/gateway.toml", env!("CARGO_MANIFEST_DIR"));
    let (_, out, _) = run(&["check", "--config", &shipped]);
    let readme = document("README.md");
    let quoted: Vec<&str> = readme.lines().filter_map(|line| line.strip_prefix("    per-client: ")).collect();
    assert_eq!(quoted.len(), 2);
    for line in quoted {
        assert!(out.contains(&format!("per-client: {line}\n")), "{line}: {out}");
    }
}

#[test]
fn every_documented_command_line_is_accepted() {
    let mut count = 0;
    for name in documents() {
        // Code is indented by four blanks or more, text in a list by fewer.
        let text = document(&name);
        let code = text.lines().filter(|line| line.starts_with("    ")).map(str::trim_start);
        for line in code.filter_map(|line| line.strip_prefix("transom ")) {
            let command = [" #", " >", " |"].iter().fold(line, |line, end| line.split(end).next().unwrap());
            let arguments: Vec<&str> = command.split_whitespace().chain(["--help"]).collect();
            // The arguments before `--help` are parsed first.
            let (code, _, err) = run(&arguments);
            assert_eq!(code, Some(0), "{name}: transom {line}: {err}");
            count += 1;
        }
    }
    assert!(count >= 9, "only {count} command lines were found");
}

/// The anchors that GitHub makes of the headings of a page.
fn anchors(text: &str) -> Vec<String> {
    let headings = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let anchor = |heading: &str| {
        let kept = heading.chars().filter(|sign| sign.is_alphanumeric() || [' ', '-', '_'].contains(sign));
        kept.collect::<String>().to_lowercase().replace(' ', "-")
    };
    headings.map(anchor).collect()
}

/// Fails unless each link of these pages leads to a file, and to a heading of it. Returns the number of links.
fn check_links(root: &Path, pages: impl Iterator<Item = String>) -> usize {
    let mut count = 0;
    for name in pages {
        let text = fs::read_to_string(root.join(&name)).unwrap();
        for link in text.split("](").skip(1) {
            let link = link.split(')').next().unwrap();
            if link.contains("://") {
                continue;
            }
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match path {
                "" => root.join(&name),
                path => root.join(&name).parent().unwrap().join(path),
            };
            assert!(target.exists(), "{name}: {link}");
            if !anchor.is_empty() {
                let found = anchors(&fs::read_to_string(&target).unwrap());
                assert!(found.iter().any(|found| found == anchor), "{name}: {link}: {found:?}");
            }
            count += 1;
        }
    }
    count
}

#[test]
fn every_link_of_the_documentation_leads_somewhere() {
    let others =
        ["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benches/README.md"].map(str::to_owned);
    let count = check_links(Path::new(env!("CARGO_MANIFEST_DIR")), documents().into_iter().chain(others));
    assert!(count >= 100, "only {count} links were found");
}

/// The Markdown files of a folder and of those below it, as paths from `root`.
fn pages_below(root: &Path, folder: &Path) -> Vec<String> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths
        .flat_map(|path| match path.is_dir() {
            true => pages_below(root, &path),
            false => vec![path.strip_prefix(root).unwrap().to_str().unwrap().to_owned()],
        })
        .filter(|name| name.ends_with(".md"))
        .collect()
}

#[test]
fn every_link_of_packaged_documentation_leads_to_a_packaged_file() {
    let stage = TempDir::new();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/package/documentation.sh");
    assert!(Command::new(script).arg(stage.path()).status().unwrap().success());
    let pages = pages_below(stage.path(), stage.path());
    for name in documents() {
        assert!(pages.contains(&name), "{name} is not packaged");
    }
    let count = check_links(stage.path(), pages.into_iter());
    assert!(count >= 100, "only {count} links were found");
    // What the packages contain of it.
    assert!(document("deploy/package/build.sh").contains("documentation.sh \"$stage/doc\""));
    let manifest: toml_edit::DocumentMut = document("Cargo.toml").parse().unwrap();
    let assets = manifest["package"]["metadata"]["deb"]["assets"].as_array().unwrap();
    let asset: toml_edit::Value =
        "[\"target/package-stage/doc/**/*\", \"usr/share/doc/transom/\", \"644\"]".parse().unwrap();
    assert!(assets.iter().any(|listed| listed.to_string().trim() == asset.to_string()));
}

#[test]
fn the_index_lists_every_page() {
    let index = document("docs/README.md");
    for name in documents().iter().filter_map(|name| name.strip_prefix("docs/")) {
        assert!(name == "README.md" || index.contains(&format!("]({name})")), "docs/README.md lacks {name}");
    }
}

#[test]
fn every_request_error_is_in_the_reference() {
    let page = document("docs/reference/errors.md");
    let shown: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    for kind in RequestError::kind_names() {
        assert!(shown.contains(&kind), "{kind}");
    }
    assert_eq!(shown.len(), RequestError::kind_names().len());
}

/// The names of metrics in a text, each after one of the given quotes.
fn metric_names(text: &str, quote: &str) -> BTreeSet<String> {
    let start = format!("{quote}transom_");
    let parts = text.split(start.as_str()).skip(1);
    parts.map(|part| part.chars().take_while(|sign| sign.is_alphanumeric() || *sign == '_').collect()).collect()
}

#[test]
fn every_metric_is_in_the_reference() {
    let mut names = BTreeSet::new();
    for file in fs::read_dir(format!("{}/crates/runtime/src/metrics", env!("CARGO_MANIFEST_DIR"))).unwrap() {
        names.extend(metric_names(&fs::read_to_string(file.unwrap().path()).unwrap(), "\""));
    }
    assert!(names.len() >= 38, "only {} metrics were found", names.len());
    assert_eq!(metric_names(&document("docs/reference/metrics.md"), "`"), names);
}

/// The first heading is the version of the package; versions before it are released, the newest first.
#[test]
fn the_change_log_is_by_version() {
    let text = document("CHANGELOG.md");
    let headings: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    let versions: Vec<(Vec<u32>, &str)> = headings
        .iter()
        .map(|heading| {
            let (version, state) = heading.strip_suffix(')').and_then(|heading| heading.split_once(" (")).unwrap();
            (version.split('.').map(|number| number.parse().unwrap()).collect(), state)
        })
        .collect();
    assert!(headings[0].starts_with(concat!(env!("CARGO_PKG_VERSION"), " (")), "{headings:?}");
    assert!(versions.is_sorted_by(|newer, older| newer.0 > older.0), "{headings:?}");
    for (position, (version, state)) in versions.iter().enumerate() {
        let is_date = jiff::civil::Date::strptime("%Y-%m-%d", state).is_ok();
        assert!(version.len() == 3 && (is_date || position == 0 && *state == "not released yet"), "{headings:?}");
    }
    let manifest = document("Cargo.toml");
    let members: Vec<&str> =
        manifest.lines().filter(|line| line.starts_with("transom-") && line.contains("path = ")).collect();
    let version = concat!(" = { version = \"", env!("CARGO_PKG_VERSION"), "\", ");
    assert!(members.len() >= 8 && members.iter().all(|line| line.contains(version)), "{members:?}");
}

/// A merge can repeat a part of a section, or cut an entry.
#[test]
fn the_change_log_repeats_no_entry_and_ends_each() {
    let text = document("CHANGELOG.md");
    for version in text.split("\n## ").skip(1) {
        let (mut section, mut seen) = ("", BTreeSet::new());
        for block in version.replace("\n- ", "\n\0- ").replace("\n#", "\n\0#").split('\0').skip(1) {
            let block = block.trim_end();
            if block.starts_with("### ") {
                section = ["### Added", "### Changed", "### Fixed"].into_iter().find(|name| *name == block).unwrap();
            }
            let place = if block.starts_with("#### ") { section } else { "" };
            assert!(seen.insert(format!("{place}{block}")), "twice: {block}");
            assert!(block.starts_with('#') || block.ends_with('.'), "not a sentence: {block}");
        }
    }
}

/// The OpenAPI document comes from the table of endpoints.
#[test]
fn the_reference_of_the_admin_api_lists_its_endpoints() {
    let gateway =
        Gateway::start(&format!("[admin]\nhosts = [\"{HOST}\"]\n{}", one_rule("key = \"ip\"\nwindows = [\"1/day\"]")));
    let described = Client::connect(gateway.admin).get("/v1/openapi.json").expect(200).json();
    let mut rows = Vec::new();
    for (path, operations) in described["paths"].as_object().unwrap() {
        for (verb, operation) in operations.as_object().unwrap() {
            let role = operation["description"].as_str().and_then(|text| text.split('`').nth(1));
            let (role, summary) = (role.map_or_else(String::new, |role| format!("`{role}`")), &operation["summary"]);
            rows.push(format!("| `{} {path}` | {role} | {} |", verb.to_uppercase(), summary.as_str().unwrap()));
        }
    }
    let page = "docs/reference/admin-api.md";
    let mut lines: Vec<String> = document(page).lines().map(str::to_owned).collect();
    let start = lines.iter().position(|line| line == "| request | role | purpose |").unwrap() + 2;
    let end = start + lines[start..].iter().take_while(|line| line.starts_with('|')).count();
    lines.splice(start..end, rows);
    compare_or_write(page, &(lines.join("\n") + "\n"));
}

/// `make docs` sets the variable `TRANSOM_WRITE_DOCS`, and writes the rows instead of comparing them.
#[test]
fn the_configuration_reference_equals_the_declarations_of_settings_and_key_parts() {
    let page = "docs/reference/configuration.md";
    let text = document(page);
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    for (heading, settings) in [
        ("## Top level", [General::settings(), PathSettings::settings()].concat()),
        ("## `[listen]`", Listen::settings()),
        ("### Unix sockets", SocketTable::settings()),
        ("## `[listen.https]`", [CertificateFiles::settings(), Https::settings()].concat()),
        ("### ACME", AcmeSettings::settings()),
        ("## `[admin]`", Admin::settings()),
        ("### Tokens", AdminToken::settings()),
        ("## `[limits]`", Limits::settings()),
        ("## `[timeouts]`", Timeouts::settings()),
        ("## `[drain]`", DrainSettings::settings()),
        ("## `[http2]`", Http2::settings()),
        ("## `[counters]`", Counters::settings()),
        ("## `[counters.shared]`", SharedSettings::settings()),
        ("## `[access_log]`", AccessLogSettings::settings()),
        ("## `[metrics]`", MetricsSettings::settings()),
        ("## `[tracing]`", TracingSettings::settings()),
        ("## `[notify]`", NotifySettings::settings()),
        ("## `[upstreams.NAME]`", [ServerSettings::settings(), UpstreamPolicy::settings()].concat()),
        ("### TLS to upstreams", ClientTlsSettings::settings()),
        ("### Health checks", HealthChecks::settings()),
        ("### Ejection", Ejection::settings()),
        ("### Retries", Retries::settings()),
        (
            "## `[rules.NAME]`",
            [KeySettings::settings(), RuleSettings::settings(), ExceptionSettings::settings()].concat(),
        ),
        ("### Windows", WindowSettings::settings()),
        ("### Cost", CostSettings::settings()),
        ("### Usage", [UsagePointers::settings(), WeightSettings::settings()].concat()),
        ("### Reserve", ReserveSettings::settings()),
        ("### Descriptors", Descriptor::settings()),
        ("### Counted responses", CountWhen::settings()),
        ("### Values of the body", BodyCondition::settings()),
        ("## `[clients]`", ClientsSettings::settings()),
        ("### Clients file", ClientSettings::settings()),
        ("## `[access]`", [AccessSettings::settings(), DenySettings::settings()].concat()),
        ("## `[jwt]`", [JwtSettings::settings(), JwtKeySettings::settings()].concat()),
        ("## `[[routes]]`", [RouteConditions::settings(), RouteSettings::settings()].concat()),
        ("### Actions", ActionSettings::settings()),
    ] {
        let start = lines.iter().position(|line| line == heading).unwrap_or_else(|| panic!("no heading `{heading}`"));
        let end = lines[start + 1..].iter().position(|line| line.starts_with('#')).map(|length| start + 1 + length);
        let mut end = end.unwrap();
        let mut at = start;
        for row in reference_rows(&settings) {
            let key = &row[..row.find(" | ").unwrap() + 3];
            if let Some(found) = lines[start..end].iter().position(|line| line.starts_with(key)) {
                at = start + found;
                lines[at] = row;
            } else {
                // A new setting follows the one that is declared before it.
                assert!(at > start, "`{heading}` has no row {key}");
                at += 1;
                end += 1;
                lines.insert(at, row);
            }
        }
    }
    let start = lines.iter().position(|line| line == "| part | value |").unwrap() + 2;
    let rows = lines[start..].iter().take_while(|line| line.starts_with('|')).count();
    let forms = KINDS.into_iter().flat_map(|kind| kind.forms);
    lines.splice(start..start + rows, forms.map(|(form, value)| format!("| `\"{form}\"` | {value} |")));
    compare_or_write(page, &(lines.join("\n") + "\n"));
}

/// Compares a page with what it should be; writes it, if `make docs` runs the test.
fn compare_or_write(page: &str, generated: &str) {
    if std::env::var_os("TRANSOM_WRITE_DOCS").is_some() {
        fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join(page), generated).unwrap();
        return;
    }
    let text = document(page);
    let differ: Vec<_> = text.lines().zip(generated.lines()).filter(|(written, new)| written != new).collect();
    assert!(text == generated, "run `make docs`: {differ:#?}");
}
