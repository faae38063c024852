//! `transom schema`, and `transom check --json`.
//!
//! Taplo is the TOML language server of most editors. Its command line checks files as it does in an editor.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::support::TempDir;
use crate::support::external_scripts::python;
use crate::support::process::run;

/// Runs the validator; returns its verdict for each file.
fn validate(schema: &Path, files: &[String]) -> Vec<(String, String)> {
    let arguments = [&[schema.display().to_string()][..], files].concat();
    let output = python("validate_schema.py", &arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter_map(|line| line.split_once('\t')).map(|(file, verdict)| (file.into(), verdict.into())).collect()
}

fn toml_files(folder: &str) -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let files = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let mut files: Vec<String> = files.map(|file| file.display().to_string()).collect();
    files.retain(|file| file.ends_with(".toml"));
    files.sort();
    files
}

#[test]
fn the_schema_accepts_good_configurations_and_rejects_structural_mistakes() {
    let scratch = TempDir::new();
    let (code, schema, _) = run(&["schema"]);
    assert_eq!(code, Some(0));
    let schema = scratch.write("schema.json", schema);
    let mut good = toml_files("tests/config/good");
    // A clients file is no configuration.
    good.retain(|file| !fs::read_to_string(file).unwrap().starts_with("[clients."));
    good.push(format!("{}/gateway.toml", env!("CARGO_MANIFEST_DIR")));
    for (file, verdict) in validate(&schema, &good) {
        assert_eq!(verdict, "valid", "{file}");
    }
    let (mut rejected, mut accepted) = (0, Vec::new());
    for (file, verdict) in validate(&schema, &toml_files("tests/config/bad")) {
        let problems = fs::read_to_string(file.replace(".toml", ".txt")).unwrap();
        // Problems of the clients file begin with its name.
        let name = Path::new(&file).file_name().unwrap().to_str().unwrap();
        let is_structural = problems
            .lines()
            .filter(|line| line.starts_with(name))
            .any(|line| line.contains(": unknown key `") || line.contains("`: expected a"));
        match verdict.as_str() {
            "valid" if is_structural => accepted.push(file),
            "valid" | "not TOML" => {}
            _ => rejected += 1,
        }
    }
    assert!(accepted.is_empty() && rejected > 50, "{rejected} rejected; accepted: {accepted:#?}");
}

/// Whether Taplo accepts all of the files, and its messages. Without `schema`, each file names its own.
fn taplo(schema: Option<&Path>, files: &[String]) -> (bool, String) {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/.parts/clients/bin/taplo");
    assert!(program.is_file(), "Taplo is missing; `make parts` installs it");
    let mut command = Command::new(program);
    command.args(["lint", "--no-auto-config", "--colors", "never"]).env("RUST_LOG", "error");
    if let Some(schema) = schema {
        command.arg("--schema").arg(format!("file://{}", schema.display()));
    }
    let output = command.args(files).output().unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// The TOML of fenced blocks and of values in YAML, each as a file. Blocks of clients files, access files and servers files are left
/// out.
fn embedded_toml(scratch: &TempDir) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = ["docs/guides", "docs/reference", "docs/explanation", "deploy/kubernetes"];
    let pages = folders.iter().flat_map(|folder| fs::read_dir(root.join(folder)).unwrap());
    let pages = pages.map(|page| page.unwrap().path()).chain([root.join("README.md")]);
    let mut files = Vec::new();
    for page in pages.collect::<BTreeSet<PathBuf>>() {
        let text = fs::read_to_string(&page).unwrap();
        let is_yaml = page.extension() == Some("yaml".as_ref());
        let (start, indent) = if is_yaml { ("gateway.toml: |", "    ") } else { ("```toml", "") };
        let mut lines = text.lines();
        while lines.by_ref().any(|line| line.trim_start() == start) {
            let is_inside = |line: &&str| match is_yaml {
                true => line.is_empty() || line.starts_with(indent),
                false => !line.trim_start().starts_with("```"),
            };
            let block: Vec<&str> = lines.clone().take_while(is_inside).collect();
            if !["[clients.", "[[deny]]", "servers = ["].iter().any(|table| block.concat().starts_with(table)) {
                let name = format!("{}-{}.toml", page.file_stem().unwrap().to_str().unwrap(), files.len());
                files.push(scratch.write(&name, block.join("\n")).display().to_string());
            }
        }
    }
    files
}

#[test]
fn taplo_accepts_every_configuration_of_the_project() {
    let scratch = TempDir::new();
    let schema = scratch.write("schema.json", run(&["schema"]).1);
    let mut files = [toml_files("tests/config/good"), toml_files("deploy/package")].concat();
    files.retain(|file| !fs::read_to_string(file).unwrap().starts_with("[clients."));
    let (shipped, embedded) = (files.len(), embedded_toml(&scratch));
    files.extend(embedded);
    assert!(shipped > 25 && files.len() >= shipped + 70, "{shipped}, {}", files.len());
    files.push(format!("{}/gateway.toml", env!("CARGO_MANIFEST_DIR")));
    let (accepted, messages) = taplo(Some(&schema), &files);
    assert!(accepted, "{messages}");
}

#[test]
fn taplo_rejects_what_a_validator_of_json_schema_rejects() {
    let scratch = TempDir::new();
    let schema = scratch.write("schema.json", run(&["schema"]).1);
    let verdicts = validate(&schema, &toml_files("tests/config/bad"));
    assert!(verdicts.len() > 100, "{}", verdicts.len());
    let files: Vec<String> = verdicts.iter().map(|(file, _)| file.clone()).collect();
    let (_, messages) = taplo(Some(&schema), &files);
    for (file, verdict) in verdicts {
        // The line about the last file can be lost when Taplo exits; the places of its mistakes are not.
        let is_rejected = messages.contains(&format!("─ {file}:"));
        assert_eq!(is_rejected, verdict != "valid", "{file}: {verdict}: {messages}");
    }
}

#[test]
fn a_configuration_can_name_its_schema() {
    let scratch = TempDir::new();
    scratch.write("gateway.schema.json", run(&["schema"]).1);
    let text = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/gateway.toml")).unwrap();
    assert!(text.starts_with("#:schema ./gateway.schema.json\n"));
    for (text, is_good) in [(text.clone(), true), (text.replace("windows", "window"), false)] {
        let file = scratch.write("gateway.toml", text).display().to_string();
        let (accepted, messages) = taplo(None, &[file]);
        assert_eq!(accepted, is_good, "{messages}");
    }
}

#[test]
fn check_prints_json() {
    let scratch = TempDir::new();
    let check = |toml: &str| {
        let file = scratch.write("gateway.toml", toml);
        let (code, out, err) = run(&["check", "--json", "--config", file.to_str().unwrap()]);
        assert_eq!(err, "");
        (code, serde_json::from_str::<Value>(&out).unwrap())
    };
    let valid = "[upstreams.u]\nbuiltin = \"echo\"\n[rules.r]\nkey = \"ip\"\nwindows = [\"5/minute\"]\n\
                 [[routes]]\npath = \"/a\"\nupstream = \"u\"\nrules = [\"r\"]\n";
    let (code, report) = check(valid);
    assert_eq!((code, &report["valid"], &report["routes"]), (Some(0), &json!(true), &json!(1)));
    let bound = json!({
        "kind": "bound", "text": "r: 5/minute: at most 10 requests in 2 seconds around the end of a minute",
    });
    assert!(report["messages"].as_array().unwrap().contains(&bound), "{report:#}");
    let (code, report) = check(&valid.replace("windows", "window"));
    assert_eq!((code, &report["valid"]), (Some(2), &json!(false)));
    let problem = &report["problems"][0];
    assert_eq!((&problem["line"], &problem["column"], &problem["file"]), (&json!(5), &json!(1), &report["file"]));
    assert_eq!(problem["message"], "unknown key `window` in `[rules.r]`");
    assert_eq!(problem["fix"], "did you mean `windows`?");
    let missing = scratch.write("gateway.toml", "").with_file_name("absent.toml");
    let (code, out, _) = run(&["check", "--json", "--config", missing.to_str().unwrap()]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(code, Some(2));
    let problem = &report["problems"][0];
    assert!(problem["message"].as_str().unwrap().starts_with("there is no file `"), "{report:#}");
    assert_eq!((&problem["line"], &problem["column"]), (&Value::Null, &Value::Null));
}
