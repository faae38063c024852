//! The audit log: a JSON line for each change that a request to the admin address makes: when, who, what, and the state before
//! and after.
//!
//! The file is opened before a change is made, and for each change, so that it can be rotated at any time. A change that could
//! not be recorded is not made. Where it cannot be opened at the start, the gateway does not start.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use serde_json::{Value, json};

use super::authorization::Caller;
use transom_config::LogTarget;
use transom_config::listen::Admin;
use transom_http::error::ApiError;
use transom_runtime::clock::Clock;

/// The state after a change of which is not known whether it was made.
pub const UNKNOWN: &str = "unknown";

/// Where the line of one change goes.
pub struct AuditEntry {
    output: Output,
    at_ms: u64,
    who: Option<String>,
}

/// Opens the file of a configuration, to find out whether that is possible.
pub fn check(settings: &Admin) -> io::Result<()> {
    match &settings.audit_log {
        Some(LogTarget::File(path)) => {
            let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
            open(path).map(drop).map_err(named)
        }
        Some(LogTarget::Stdout) | None => Ok(()),
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).open(path)
}

enum Output {
    /// The log is off.
    Nowhere,
    Stdout,
    File(File),
}

impl AuditEntry {
    /// Begins the entry of a change that is about to be made.
    pub fn begin(target: Option<&LogTarget>, caller: &Caller, clock: &Clock) -> Result<AuditEntry, ApiError> {
        let output = match target {
            None => Output::Nowhere,
            Some(LogTarget::Stdout) => Output::Stdout,
            Some(LogTarget::File(path)) => {
                let failed = |error: io::Error| {
                    tracing::error!(
                        "the audit log `{}` cannot be opened, a change is refused: {error}",
                        path.display()
                    );
                    ApiError::AuditLogUnavailable
                };
                Output::File(open(path).map_err(failed)?)
            }
        };
        Ok(AuditEntry { output, at_ms: clock.wall_ms(), who: caller.token.clone() })
    }

    /// Whether the entry is written anywhere.
    pub fn is_kept(&self) -> bool {
        !matches!(self.output, Output::Nowhere)
    }

    /// Records the change. `what`: the operation, with what it names.
    pub fn write(self, what: &Value, before: &Value, after: &Value) {
        let time = jiff::Timestamp::from_millisecond(self.at_ms as i64).map(|time| format!("{time:.3}")).ok();
        let line = json!({ "time": time, "who": self.who, "what": what, "before": before, "after": after });
        // One call for the whole line, so that lines of several processes do not mix.
        let line = format!("{line}\n");
        let written = match self.output {
            Output::Nowhere => Ok(()),
            Output::Stdout => io::stdout().lock().write_all(line.as_bytes()),
            Output::File(mut file) => file.write_all(line.as_bytes()),
        };
        if let Err(error) = written {
            tracing::error!(%error, "the audit log cannot be written: {}", line.trim_end());
        }
    }
}
