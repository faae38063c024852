//! Warns of servers that evict counters. An evicting `maxmemory-policy` gives keys their whole limit again, and no answer to
//! a call shows it. Each new connection asks its server once, in the background, with `INFO memory`: users that may not run
//! `CONFIG GET` usually may run `INFO`.

use std::cell::Cell;
use std::rc::Rc;

use tokio::task::spawn_local;

use super::Shared;
use super::circuit_breaker::short;
use super::connection::Connection;
use super::diagnose_rules::{Info, NOEVICTION, eviction};
use super::sentinel::text;

/// What one connection knows of its server.
#[derive(Default)]
pub struct Eviction {
    is_asked: Cell<bool>,
    is_found: Cell<bool>,
}

impl Shared {
    /// Asks on connections that are new, and sets the gauge to the number of those whose servers evict.
    pub(super) fn watch_eviction(&self) {
        let lines = self.store.standing();
        for line in lines.iter().filter(|line| !line.eviction.is_asked.replace(true)) {
            spawn_local(ask(Rc::clone(line)));
        }
        self.meter.evicting(lines.iter().filter(|line| line.eviction.is_found.get()).count() as u64);
    }
}

async fn ask(line: Rc<Connection>) {
    let mut question = redis::cmd("INFO");
    question.arg("memory");
    match line.ask(question).await {
        Ok(said) => {
            if let Some(policy) = Info::new(text(&said).unwrap_or_default()).evicting_policy() {
                line.eviction.is_found.set(true);
                tracing::warn!("{}: {}; write {NOEVICTION}", line.node, eviction(&short(policy)));
            }
        }
        Err(failure) => {
            tracing::info!("the eviction policy of shared counters is unknown: {}", short(&line.blame(&failure)));
        }
    }
}
