//! The commands `run`, `check`, `upgrade` and `clients`, and how they read configuration files.

/// Prints a line to standard output; write errors are ignored.
macro_rules! print_out {
    ($($text:tt)*) => {{
        let _ = std::io::Write::write_fmt(&mut std::io::stdout(), format_args!("{}\n", format_args!($($text)*)));
    }};
}

/// Prints a line to standard error; write errors are ignored.
macro_rules! print_err {
    ($($text:tt)*) => {{
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("{}\n", format_args!($($text)*)));
    }};
}

pub mod check;
mod check_redis;
pub mod clients;
mod pid_file;
pub mod run;
pub mod systemd;
pub mod upgrade;

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::config::diagnostics::{self, ReadFile};
use crate::config::{self, Config};
use crate::file_watch::FileWatch;

/// The result of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    Fine,
    /// Could not start, or failed.
    Failed,
    /// Bad usage or a bad configuration.
    BadConfig,
}

/// Largest file that a configuration may name.
const FILE_MAX_BYTES: u64 = 16 * 1024 * 1024;

/// Reads a configuration and the files it names, and watches them. Returns the rendered diagnostics if there are
/// problems.
pub fn read_config(path: &Path, watch: &mut FileWatch) -> Result<Config, String> {
    let watch = RefCell::new(watch);
    read_config_with(path, &|path| {
        watch.borrow_mut().watch(path);
        read_file(path)
    })
}

/// Reads a configuration through `files`.
fn read_config_with(path: &Path, files: ReadFile) -> Result<Config, String> {
    let name = path.display().to_string();
    let bytes = files(path).map_err(|error| {
        format!("{name}:1:1: cannot read the file: {error}\n  fix: name a file with `--config FILE`\n")
    })?;
    let text = match std::str::from_utf8(&bytes) {
        Ok(text) => text,
        Err(error) => return Err(not_utf8(&name, &bytes, error.valid_up_to())),
    };
    let variables = |name: &str| std::env::var_os(name).map(|value| value.into_encoded_bytes());
    let config = config::read_with_files_and_variables(text, &|file| files(&resolve_path(path, file)), &variables);
    config.map_err(|problems| diagnostics::render(&problems, &name, text))
}

/// Resolves a path in a configuration relative to the configuration file.
fn resolve_path(config: &Path, file: &Path) -> PathBuf {
    config.parent().unwrap_or(Path::new("")).join(file)
}

fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // Reading a pipe could block forever.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    File::open(path)?.take(FILE_MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_MAX_BYTES {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it has more than 16 MiB"));
    }
    Ok(bytes)
}

fn not_utf8(name: &str, bytes: &[u8], at: usize) -> String {
    let before = &bytes[..at];
    let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
    let start = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
    let column = String::from_utf8_lossy(&before[start..]).chars().count() + 1;
    format!("{name}:{line}:{column}: the file is not UTF-8 text\n  fix: save it as UTF-8\n")
}
