//! `transom schema`, and `transom check --json`.

use std::fs;
use std::path::Path;

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
    assert!(report["problems"][0]["message"].as_str().unwrap().starts_with("cannot read the file"), "{report:#}");
}
