//! The check for known vulnerabilities in `make check`, with a `cargo` that this test replaces.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::support::TempDir;

/// What `cargo deny` prints without a network.
const UNREACHABLE: &str = "failed to fetch advisory database: could not resolve host";

/// The exit code and the output of `advisories.sh` with these arguments, when `cargo deny fetch` ends with this exit code and
/// message, and `cargo deny check` with this exit code.
fn advisories(arguments: &[&str], (fetch, message): (u8, &str), check: u8) -> (i32, String) {
    let scratch = TempDir::new();
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in\n\"deny --locked fetch db\") echo '{message}' >&2; exit {fetch} ;;\n\
         \"deny --locked --offline check advisories\") exit {check} ;;\n*) echo \"cargo $*\"; exit 9 ;;\nesac\n"
    );
    let cargo = scratch.write("cargo", script);
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", scratch.path().display(), std::env::var("PATH").unwrap());
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/external/advisories.sh");
    let output = Command::new(program).args(arguments).env("PATH", path).output().unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap()).concat();
    (output.status.code().unwrap(), text)
}

#[test]
fn an_advisory_fails_the_check() {
    for arguments in [&[][..], &["--if-available"]] {
        assert_eq!(advisories(arguments, (0, ""), 1).0, 1);
        let (code, text) = advisories(arguments, (0, ""), 0);
        assert_eq!((code, text.as_str()), (0, "Checked: the dependencies have no known vulnerability.\n"));
    }
}

#[test]
fn without_the_database_the_check_is_skipped_and_says_so() {
    let (code, text) = advisories(&["--if-available"], (1, UNREACHABLE), 9);
    assert_eq!(code, 0);
    let skipped =
        "SKIPPED: the check for known vulnerabilities. The advisory database of RustSec cannot be downloaded.";
    assert!(text.contains(skipped) && text.contains(UNREACHABLE), "{text}");
    let (code, text) = advisories(&[], (1, UNREACHABLE), 9);
    assert!(code == 1 && !text.contains("SKIPPED"), "{text}");
    // `timeout` ends a download that hangs.
    assert_eq!(advisories(&["--if-available"], (124, ""), 9).0, 0);
}

#[test]
fn another_error_is_no_missing_database() {
    let (code, text) = advisories(&["--if-available"], (1, "failed to validate configuration file"), 9);
    assert!(code == 1 && text.contains("failed to validate") && !text.contains("SKIPPED"), "{text}");
}
