//! What is counted of an upstream's servers beside their requests: how they are, who keeps away from
//! them, and what is tried again or refused.

use std::sync::Arc;

use super::events::{counter, gauge};
use super::storage::Cell;
use super::{LoopId, Name, Registry};

pub static UNDER_WAY: Name =
    gauge("transom_upstream_requests_active", "Requests at upstream servers, until the end of the answer.");
pub static UP: Name = gauge("transom_upstream_server_up", "Whether a server is healthy by the active checks.");
pub static EJECTED: Name = gauge("transom_upstream_server_ejected", "Whether a server is kept away from.");
pub static EJECTIONS: Name = counter("transom_upstream_ejections_total", "Servers ejected for failing in a row.");
pub static CHECKS: Name = counter("transom_upstream_health_checks_total", "Active health checks.");
pub static RETRIES: Name =
    counter("transom_upstream_retries_total", "Further tries: made, or not made for want of budget.");
pub static REFUSED: Name =
    counter("transom_upstream_refused_total", "Requests refused because the upstream had too many.");

/// What all loops know of one server; told under a lock, or by one thread.
#[derive(Debug)]
pub struct ServerMeter {
    up: Arc<Cell>,
    ejected: Arc<Cell>,
    ejections: Arc<Cell>,
    passed: Arc<Cell>,
    failed: Arc<Cell>,
}

impl ServerMeter {
    pub fn new(registry: &Registry, upstream: &str, server: &str) -> ServerMeter {
        let labels = [("upstream", upstream), ("server", server)];
        let cell = |name| registry.cell(name, LoopId::MAX, &labels);
        let checks = |outcome| {
            let labels = [("upstream", upstream), ("server", server), ("outcome", outcome)];
            registry.cell(&CHECKS, LoopId::MAX, &labels)
        };
        ServerMeter {
            up: cell(&UP),
            ejected: cell(&EJECTED),
            ejections: cell(&EJECTIONS),
            passed: checks("passed"),
            failed: checks("failed"),
        }
    }

    pub fn is_up(&self, up: bool) {
        set(&self.up, up);
    }

    pub fn is_ejected(&self, ejected: bool) {
        if ejected && self.ejected.get() == 0 {
            self.ejections.add(1);
        }
        set(&self.ejected, ejected);
    }

    pub fn checked(&self, passed: bool) {
        if passed { self.passed.add(1) } else { self.failed.add(1) }
    }
}

fn set(gauge: &Cell, value: bool) {
    gauge.sub(gauge.get());
    gauge.add(u64::from(value));
}

/// Requests under way to one server, from one loop.
#[derive(Debug)]
pub struct UnderWay(Arc<Cell>);

impl UnderWay {
    pub fn new(registry: &Registry, owner: LoopId, upstream: &str, server: &str) -> UnderWay {
        UnderWay(registry.cell(&UNDER_WAY, owner, &[("upstream", upstream), ("server", server)]))
    }

    pub fn began(&self) {
        self.0.add(1);
    }

    pub fn ended(&self) {
        self.0.sub(1);
    }
}

/// Why a request was refused for the upstream's sake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    Requests,
    Pending,
    /// It waited for a connection, and none became free in time.
    Waited,
}

/// What one loop tried again, and what it refused.
#[derive(Debug)]
pub struct RetryMeter {
    retried: Arc<Cell>,
    over_budget: Arc<Cell>,
    refused: [Arc<Cell>; 3],
}

impl RetryMeter {
    pub fn new(registry: &Registry, owner: LoopId, upstream: &str) -> RetryMeter {
        let retries = |outcome| registry.cell(&RETRIES, owner, &[("upstream", upstream), ("outcome", outcome)]);
        let refused = |limit| registry.cell(&REFUSED, owner, &[("upstream", upstream), ("limit", limit)]);
        RetryMeter {
            retried: retries("retried"),
            over_budget: retries("budget"),
            refused: ["max_requests", "max_pending", "connect"].map(refused),
        }
    }

    pub fn retried(&self) {
        self.retried.add(1);
    }

    pub fn over_budget(&self) {
        self.over_budget.add(1);
    }

    pub fn refused(&self, limit: Limit) {
        let index = match limit {
            Limit::Requests => 0,
            Limit::Pending => 1,
            Limit::Waited => 2,
        };
        self.refused[index].add(1);
    }
}
