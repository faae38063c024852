//! The upgrade of a running gateway, seen from the old process: at most one at a time, and its outcome.

use std::future::pending;
use std::process;

use crate::cli::upgrade::child::{Program, Successor};
use crate::cli::upgrade::protocol::HandoverSet;
use crate::cli::upgrade::{UpgradeOutcome, send_outcome};
use crate::server::Gateway;
use transom_runtime::metrics::events::UpgradeMetrics;

/// PID of the first process of a container, which ends with it.
const INIT: u32 = 1;

pub struct Upgrade {
    program: Program,
    successor: Option<Successor>,
    metrics: UpgradeMetrics,
}

impl Upgrade {
    pub fn new(program: Program, gateway: &Gateway) -> Upgrade {
        Upgrade { program, successor: None, metrics: UpgradeMetrics::new(&gateway.registry) }
    }

    /// Counts that this process replaced another one.
    pub fn record_takeover(&self) {
        self.metrics.taken_over();
    }

    /// Starts an upgrade.
    pub fn start(&mut self, gateway: &Gateway) {
        if let Some(successor) = &self.successor {
            tracing::warn!("upgrade ignored: one is in progress, to process {}", successor.pid);
            return;
        }
        if process::id() == INIT {
            self.fail("this is process 1, whose end ends its container: start another container and stop this one");
            return;
        }
        let limit = gateway.config().timeouts.upgrade;
        let started = HandoverSet::new(gateway.sockets(), gateway.counters(), gateway.key_set(), &gateway.history())
            .and_then(|handover| self.program.start(handover, limit));
        match started {
            Ok(successor) => {
                tracing::info!("upgrade: started process {}", successor.pid);
                self.successor = Some(successor);
            }
            Err(error) => self.fail(&error.to_string()),
        }
    }

    pub fn is_running(&self) -> bool {
        self.successor.is_some()
    }

    /// Waits for the outcome of an upgrade: the PID of the new process that serves, or `None`. Cancel-safe.
    pub async fn outcome(&mut self) -> Option<u32> {
        let Some(successor) = &mut self.successor else { return pending().await };
        let outcome = successor.wait_until_serving().await;
        let pid = self.successor.take()?.pid;
        outcome.map_err(|why| self.fail(&why)).ok().map(|()| pid)
    }

    /// Cancels a running upgrade, because the gateway stops; unless the new process serves already, whose PID is
    /// returned.
    pub async fn cancel(&mut self) -> Option<u32> {
        let successor = self.successor.take()?;
        let pid = successor.pid;
        if successor.cancel().await {
            return Some(pid);
        }
        tracing::info!("the upgrade was cancelled");
        report_failure("it was stopped");
        None
    }

    fn fail(&self, why: &str) {
        self.metrics.failed();
        tracing::error!("the upgrade failed, this process keeps serving: {why}");
        send_outcome(&UpgradeOutcome::Failed(why));
    }
}

/// Reports to waiting commands that the upgrade failed.
pub fn report_failure(why: &str) {
    send_outcome(&UpgradeOutcome::Failed(why));
}

/// Reports to waiting commands that another process serves.
pub fn report_success(pid: u32) {
    send_outcome(&UpgradeOutcome::TakenOver(pid));
}
