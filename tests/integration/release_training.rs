//! The load by which releases are optimized is answered as it should be: else they would be optimized for failures.

use std::process::Command;

use crate::support::external_servers::program;
use crate::support::process::BINARY;

#[test]
fn the_training_load_is_answered_correctly() {
    for part in ["h2load", "nginx", "openssl", "redis-server"] {
        program(part);
    }
    // A deadline for a machine that is busy with all other tests.
    let said = Command::new(program("timeout"))
        .args(["300", "python3", "benches/train.py", "--requests", "100", "--transom", BINARY])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .unwrap();
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
}
