//! The commands `run`, `check`, `schema`, `upgrade` and `clients`, and how they read configuration files.

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
pub mod clients;
mod pid_file;
pub mod run;
pub mod systemd;
pub mod upgrade;

use std::cell::RefCell;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::config::diagnostics::{self, Problem, ReadFile};
use crate::config::{self, Config, schema};
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

/// A configuration that cannot be used.
#[derive(Debug)]
pub struct InvalidConfig {
    name: String,
    text: String,
    problems: Vec<Problem>,
}

impl InvalidConfig {
    /// A file that cannot be read as text.
    fn unreadable(name: String, line: usize, column: usize, message: String, fix: &str) -> InvalidConfig {
        let problem = Problem { file: None, span: 0..0, line, column, message, fix: fix.to_owned() };
        InvalidConfig { name, text: String::new(), problems: vec![problem] }
    }

    /// The problems, as `transom check --json` prints them.
    fn to_json(&self) -> Value {
        let problem = |problem: &Problem| {
            let file =
                problem.file.as_ref().map(|file| resolve_path(Path::new(&self.name), file).display().to_string());
            json!({
                "file": file.as_ref().unwrap_or(&self.name), "line": problem.line, "column": problem.column,
                "message": problem.message, "fix": problem.fix,
            })
        };
        json!({ "file": self.name, "valid": false, "problems": self.problems.iter().map(problem).collect::<Vec<_>>() })
    }
}

impl fmt::Display for InvalidConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&diagnostics::render(&self.problems, &self.name, &self.text))
    }
}

/// Reads a configuration and the files it names, and watches them.
pub fn read_config(path: &Path, watch: &mut FileWatch) -> Result<Config, InvalidConfig> {
    let watch = RefCell::new(watch);
    read_config_with(path, &|path| {
        watch.borrow_mut().watch(path);
        read_file(path)
    })
}

/// Reads a configuration through `files`.
fn read_config_with(path: &Path, files: ReadFile) -> Result<Config, InvalidConfig> {
    let name = path.display().to_string();
    let bytes = match files(path) {
        Ok(bytes) => bytes,
        Err(error) => {
            let message = format!("cannot read the file: {error}");
            return Err(InvalidConfig::unreadable(name, 1, 1, message, "name a file with `--config FILE`"));
        }
    };
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
            let start = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
            let column = String::from_utf8_lossy(&before[start..]).chars().count() + 1;
            let message = "the file is not UTF-8 text".to_owned();
            return Err(InvalidConfig::unreadable(name, line, column, message, "save it as UTF-8"));
        }
    };
    let variables = |name: &str| std::env::var_os(name).map(|value| value.into_encoded_bytes());
    let config = config::read_with_files_and_variables(&text, &|file| files(&resolve_path(path, file)), &variables);
    config.map_err(|problems| InvalidConfig { name, text, problems })
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

/// `transom schema`: prints the JSON schema of the configuration file.
pub fn print_schema() -> Exit {
    print_out!("{:#}", schema::schema());
    Exit::Fine
}
