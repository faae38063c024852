//! The training load for the optimization of releases is answered correctly. Otherwise releases would be optimized for
//! failures.

use std::process::Command;

use crate::support::external_servers::program;
use crate::support::process::BINARY;

#[test]
fn the_training_load_is_answered_correctly() {
    for name in ["h2load", "nginx", "openssl", "redis-server"] {
        program(name);
    }
    // A long deadline, because other tests run at the same time.
    let output = Command::new(program("timeout"))
        .args(["300", "python3", "benches/train.py", "--requests", "100", "--transom", BINARY])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
