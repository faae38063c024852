//! `transom check --connect`: whether the servers through which counters are shared are there, and fit for it.

use std::io;

use tokio::runtime::{Builder, LocalOptions};

use super::Exit;
use crate::clock::Clock;
use crate::config::redis::Shared;
use crate::redis_store::diagnose::{Report, survey};
use crate::redis_store::diagnose_rules::Weight;

/// Asks all servers that the configuration names, and shows what they are.
pub fn connect(shared: Option<&Shared>) -> Exit {
    let Some(shared) = shared else {
        show!("  nothing to connect to: there is no `[counters.shared]`");
        return Exit::Fine;
    };
    let reports = match asked(shared) {
        Ok(reports) => reports,
        Err(error) => {
            tell!("can not ask servers: {error}");
            return Exit::Failed;
        }
    };
    let exit = if reports.iter().any(Report::has_problem) { Exit::Failed } else { Exit::Fine };
    for Report { of, findings } in reports {
        show!("{of}{}", if findings.is_empty() { ": fine" } else { "" });
        for finding in findings {
            let word = match finding.weight {
                Weight::Problem => "problem",
                Weight::Warning => "warning",
                Weight::Note => "note",
            };
            show!("  {word}: {}", finding.text);
            show!("    fix: {}", finding.fix);
        }
    }
    if exit == Exit::Fine {
        show!("counters can be shared there, under keys that begin with `{}:`", shared.prefix);
    }
    exit
}

fn asked(shared: &Shared) -> io::Result<Vec<Report>> {
    let clock = Clock::system();
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default())?;
    Ok(runtime.block_on(survey(shared, &|| clock.now().unix_ms)))
}
