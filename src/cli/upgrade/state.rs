//! The upgrade of a running gateway, as it goes through it: at most one at a time, and what its operator is told.

use std::future::pending;
use std::process;

use crate::cli::upgrade::child::{Program, Successor};
use crate::cli::upgrade::protocol::HandoverSet;
use crate::cli::upgrade::{Word, say};
use crate::metrics::events::UpgradeMetrics;
use crate::server::Gateway;

/// The first process of a container, whose end is the end of all.
const INIT: u32 = 1;

pub struct Succession {
    program: Program,
    successor: Option<Successor>,
    meter: UpgradeMetrics,
}

impl Succession {
    pub fn new(program: Program, gateway: &Gateway) -> Succession {
        Succession { program, successor: None, meter: UpgradeMetrics::new(&gateway.registry) }
    }

    /// This process has itself taken the place of another.
    pub fn begun_with(&self) {
        self.meter.taken_over();
    }

    /// Starts a process to take the place of this one.
    pub fn begin(&mut self, gateway: &Gateway) {
        if let Some(successor) = &self.successor {
            tracing::warn!("told to upgrade while an upgrade is under way, to process {}: ignored", successor.pid);
            return;
        }
        if process::id() == INIT {
            self.fail("this is process 1, with which its container ends: start another container, and stop this one");
            return;
        }
        let limit = gateway.config().timeouts.upgrade;
        let started = HandoverSet::new(gateway.sockets(), gateway.counters())
            .and_then(|estate| self.program.start(estate, limit));
        match started {
            Ok(successor) => {
                tracing::info!("an upgrade begins: process {} is started", successor.pid);
                self.successor = Some(successor);
            }
            Err(error) => self.fail(&error.to_string()),
        }
    }

    pub fn is_under_way(&self) -> bool {
        self.successor.is_some()
    }

    /// Waits for what becomes of an upgrade: the process that serves in the place of this one, or `None`. Nothing is lost if
    /// this is dropped in between.
    pub async fn outcome(&mut self) -> Option<u32> {
        let Some(successor) = &mut self.successor else { return pending().await };
        let outcome = successor.serves().await;
        let pid = self.successor.take()?.pid;
        outcome.map_err(|why| self.fail(&why)).ok().map(|()| pid)
    }

    /// Ends what is under way, because the gateway stops; unless another process serves already, which is told.
    pub async fn end(&mut self) -> Option<u32> {
        let successor = self.successor.take()?;
        let pid = successor.pid;
        if successor.end().await {
            return Some(pid);
        }
        tracing::info!("the upgrade is broken off");
        decline("it was told to stop");
        None
    }

    fn fail(&self, why: &str) {
        self.meter.failed();
        tracing::error!("the upgrade failed, and this process goes on: {why}");
        say(&Word::Failed(why));
    }
}

/// Tells whoever wants an upgrade of this process that there is none.
pub fn decline(why: &str) {
    say(&Word::Failed(why));
}

/// Tells whoever wanted the upgrade that another process serves.
pub fn report(pid: u32) {
    say(&Word::TakenOver(pid));
}
