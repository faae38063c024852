//! How fast `transom simulate` plays access logs, and how much memory it takes: a log of a day for each format, on one core.
//!
//! `cargo bench --bench access_logs -- --write FOLDER` writes the logs and their configuration, for the command itself.
//!
//! Target: a million lines a second, and 200 MB for five million lines.

#![allow(clippy::disallowed_methods, reason = "measures real time")]

#[path = "../tests/support/access_logs.rs"]
mod access_logs;

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::Instant;

use access_logs::{LogForm, LogShape, write_log};
use indicatif::ProgressBar;

use transom_simulate::log_files::LogFiles;
use transom_simulate::log_format::LogFormat;
use transom_simulate::replay::Replay;

const LINES: u64 = 5_000_000;
const FORMS: [LogForm; 2] = [LogForm::Combined, LogForm::Transom];
const CONFIGURATION: &str = r#"
[listen]
http = "127.0.0.1:8080"

[upstreams.u]
builtin = "echo"

[rules.per-client]
key     = "ip"
windows = ["2000/hour", "33/minute"]

[[routes]]
name     = "all"
path     = "/{*rest}"
upstream = "u"
rules    = ["per-client"]
"#;

fn main() {
    let mut arguments = std::env::args().skip_while(|argument| argument != "--write").skip(1);
    if let Some(folder) = arguments.next() {
        return write_logs(Path::new(&folder));
    }
    // The allocator of this program differs from that of the gateway; the memory of both is bounded by the same structures.
    let folder = std::env::temp_dir().join(format!("transom-access-logs-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    for form in FORMS {
        let file = write_log_of(form, &folder);
        let seconds = play(&file);
        println!(
            "{form:?}: {LINES} lines in {seconds:.2} s, {:.2} million a second (target: 1), peak memory so far {}",
            LINES as f64 / seconds / 1e6,
            peak_memory()
        );
    }
    let _ = fs::remove_dir_all(&folder);
}

/// Writes a log of each format, and a configuration to play them against.
fn write_logs(folder: &Path) {
    fs::create_dir_all(folder).unwrap();
    for form in FORMS {
        println!("{}", write_log_of(form, folder).display());
    }
    fs::write(folder.join("gateway.toml"), CONFIGURATION.trim_start()).unwrap();
}

fn write_log_of(form: LogForm, folder: &Path) -> PathBuf {
    let file = folder.join(format!("{form:?}.log").to_lowercase());
    let shape = LogShape { form, lines: LINES, clients: 200_000, seed: 1 };
    let mut out = BufWriter::new(File::create(&file).unwrap());
    write_log(&mut out, shape).unwrap();
    out.flush().unwrap();
    file
}

/// Plays a log; returns the seconds that it took.
fn play(file: &Path) -> f64 {
    let started = Instant::now();
    let mut replay = Replay::new(transom_config::read(CONFIGURATION).unwrap(), &[]).unwrap();
    let format = LogFormat::parse("auto", replay.fields().clone()).unwrap();
    let mut files = LogFiles::open(&[file.to_owned()], format, ProgressBar::hidden()).unwrap();
    files.for_each(|batch| replay.play(batch)).unwrap();
    replay.finish();
    assert_eq!(replay.counts.played, LINES);
    started.elapsed().as_secs_f64()
}

fn peak_memory() -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.unwrap_or_default().trim().to_owned()
}
