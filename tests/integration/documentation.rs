//! Runs the commands of README and docs, and compares their output.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use transom::config::certificate::CertificateFiles;
use transom::config::client_tls::ClientTlsSettings;
use transom::config::clients::{ClientSettings, ClientsSettings};
use transom::config::count_when::CountWhen;
use transom::config::counters::Counters;
use transom::config::descriptor::Descriptor;
use transom::config::jwt::{JwtKeySettings, JwtSettings};
use transom::config::key::KeySettings;
use transom::config::limits::{DrainSettings, Http2, Limits, Timeouts};
use transom::config::listen::{Admin, Https, Listen};
use transom::config::overrides::ExceptionSettings;
use transom::config::path::PathReading;
use transom::config::redis::SharedSettings;
use transom::config::route::{RouteConditions, RouteSettings};
use transom::config::route_actions::ActionSettings;
use transom::config::rule::{CostSettings, RuleSettings};
use transom::config::settings::{Section, reference_rows};
use transom::config::span_export::TracingSettings;
use transom::config::upstream::{Ejection, HealthChecks, Retries, ServerSettings, UpstreamPolicy};
use transom::config::window::WindowSettings;
use transom::config::{AccessLogSettings, General, MetricsSettings};
use transom::http::error::RequestError;

use crate::support::client::Client;
use crate::support::gateway::Gateway;
use crate::support::process::run;

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

#[test]
fn the_documented_explanation_is_true() {
    let page = document("docs/guides/refusals.md");
    let shown = page.split("   ```text\n").nth(1).unwrap().split("   ```").next().unwrap();
    let shown: Vec<&str> = shown.lines().map(|line| line.strip_prefix("   ").unwrap_or(line)).collect();
    let gateway = shipped(1711);
    (0..33).for_each(|_| drop(gateway.get("/api/search").expect(200)));
    let question = r#"{"url": "http://127.0.0.1:8080/api/search"}"#;
    let explain = |accept: &str| {
        let fields = [("Host", &*gateway.admin.to_string()), ("Accept", accept)];
        Client::connect(gateway.admin).request("POST", "/v1/explain", &fields, question.as_bytes()).expect(200)
    };
    assert_eq!(explain("text/plain").text().lines().collect::<Vec<_>>(), shown);
    let json = explain("*/*").json();
    let fields = |heading: &str| -> BTreeSet<String> {
        let page = document("docs/guides/decision-api.md");
        let table = page.split(heading).nth(1).unwrap().split("\n\n").next().unwrap().to_owned();
        let names = table.lines().filter_map(|row| row.strip_prefix("| `")?.split(" |").next().map(str::to_owned));
        names.flat_map(|names| names.replace('`', "").split(", ").map(str::to_owned).collect::<Vec<_>>()).collect()
    };
    let names = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(names(&json), fields("JSON otherwise:\n\n"));
    assert_eq!(names(&json["rules"][0]), fields("| field of a rule"));
    gateway.get("/api/search").expect(429);
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

#[test]
fn every_link_of_the_documentation_leads_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut count = 0;
    let others =
        ["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benches/README.md"].map(str::to_owned);
    for name in documents().into_iter().chain(others) {
        let text = document(&name);
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
    assert!(count >= 100, "only {count} links were found");
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
    for kind in RequestError::KINDS {
        assert!(shown.contains(&kind), "{kind}");
    }
    assert_eq!(shown.len(), RequestError::KINDS.len());
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
    for file in fs::read_dir(format!("{}/src/metrics", env!("CARGO_MANIFEST_DIR"))).unwrap() {
        names.extend(metric_names(&fs::read_to_string(file.unwrap().path()).unwrap(), "\""));
    }
    assert!(names.len() >= 38, "only {} metrics were found", names.len());
    assert_eq!(metric_names(&document("docs/reference/metrics.md"), "`"), names);
}

/// `make docs` sets the variable `TRANSOM_WRITE_DOCS`, and writes the rows instead of comparing them.
#[test]
fn the_configuration_reference_equals_the_declarations_of_settings() {
    let page = "docs/reference/configuration.md";
    let text = document(page);
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    for (heading, settings) in [
        ("## Top level", [General::settings(), PathReading::settings()].concat()),
        ("## `[listen]`", Listen::settings()),
        ("## `[listen.https]`", [CertificateFiles::settings(), Https::settings()].concat()),
        ("## `[admin]`", Admin::settings()),
        ("## `[limits]`", Limits::settings()),
        ("## `[timeouts]`", Timeouts::settings()),
        ("## `[drain]`", DrainSettings::settings()),
        ("## `[http2]`", Http2::settings()),
        ("## `[counters]`", Counters::settings()),
        ("## `[counters.shared]`", SharedSettings::settings()),
        ("## `[access_log]`", AccessLogSettings::settings()),
        ("## `[metrics]`", MetricsSettings::settings()),
        ("## `[tracing]`", TracingSettings::settings()),
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
        ("### Descriptors", Descriptor::settings()),
        ("### Counted responses", CountWhen::settings()),
        ("## `[clients]`", [ClientsSettings::settings(), ClientSettings::settings()].concat()),
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
    let generated = lines.join("\n") + "\n";
    if std::env::var_os("TRANSOM_WRITE_DOCS").is_some() {
        fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join(page), generated).unwrap();
    } else {
        let differ: Vec<_> = text.lines().zip(generated.lines()).filter(|(written, new)| written != new).collect();
        assert!(text == generated, "run `make docs`: {differ:#?}");
    }
}
