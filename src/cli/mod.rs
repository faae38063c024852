//! The commands: `run` and `check`.

pub mod check;
pub mod run;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use crate::config::{self, Config, problem};

/// What a command ends with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    Fine,
    /// Could not start, or failed.
    Failed,
    /// Bad usage or a bad configuration.
    BadConfig,
}

/// No file that a configuration names is larger; what is, is another.
const FILE_MAX_BYTES: u64 = 1024 * 1024;

/// Reads a configuration file; what is wrong with it comes as text for the operator.
pub fn read(path: &Path) -> Result<Config, String> {
    let name = path.display().to_string();
    let bytes = fs::read(path).map_err(|error| {
        format!("{name}:1:1: can not read the file: {error}\n  fix: name a file with `--config FILE`\n")
    })?;
    let text = match std::str::from_utf8(&bytes) {
        Ok(text) => text,
        Err(error) => return Err(not_utf8(&name, &bytes, error.valid_up_to())),
    };
    // Wherever the gateway is started from, the same files are meant.
    let folder = path.parent().unwrap_or(Path::new(""));
    let config = config::read_with(text, &|file| read_file(&folder.join(file)));
    config.map_err(|problems| problem::render(&problems, &name, text))
}

fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(FILE_MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_MAX_BYTES {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "it has more than 1 MiB"));
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
