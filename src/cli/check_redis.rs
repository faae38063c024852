//! `transom check --connect`: checks the Redis servers that hold shared counters.

use std::io;

use tokio::runtime::{Builder, LocalOptions};

use super::Exit;
use crate::clock::Clock;
use crate::config::redis::StoreConfig;
use crate::redis_store::diagnose::{ServerReport, Severity, diagnose};

/// Diagnoses all configured servers and prints the findings.
pub fn check_redis(shared: Option<&StoreConfig>) -> Exit {
    let Some(shared) = shared else {
        print_out!("  nothing to connect to: there is no `[counters.shared]`");
        return Exit::Fine;
    };
    let reports = match diagnose_servers(shared) {
        Ok(reports) => reports,
        Err(error) => {
            print_err!("cannot check the servers: {error}");
            return Exit::Failed;
        }
    };
    let is_fine =
        reports.iter().flat_map(|report| &report.findings).all(|finding| finding.severity != Severity::Problem);
    let exit = if is_fine { Exit::Fine } else { Exit::Failed };
    for ServerReport { subject: of, findings } in reports {
        print_out!("{of}{}", if findings.is_empty() { ": fine" } else { "" });
        for finding in findings {
            let word = match finding.severity {
                Severity::Problem => "problem",
                Severity::Warning => "warning",
                Severity::Note => "note",
            };
            print_out!("  {word}: {}", finding.text);
            if !finding.fix.is_empty() {
                print_out!("    fix: {}", finding.fix);
            }
        }
    }
    if exit == Exit::Fine {
        print_out!("counters can be shared there, under keys that begin with `{}:`", shared.prefix);
    }
    exit
}

fn diagnose_servers(shared: &StoreConfig) -> io::Result<Vec<ServerReport>> {
    let clock = Clock::system();
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default())?;
    Ok(runtime.block_on(diagnose(shared, &|| clock.now().unix_ms)))
}
