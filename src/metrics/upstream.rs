//! What is counted of an upstream's servers beside their requests: how they are, who keeps away from
//! them, and what is tried again or refused.

use std::sync::Arc;

use super::events::{counter, gauge};
use super::storage::MetricCell;
use super::{Metric, Registry, WorkerId};

pub static REQUESTS_ACTIVE: Metric =
    gauge("transom_upstream_requests_active", "Requests at upstream servers, until the end of the answer.");
pub static UP: Metric = gauge("transom_upstream_server_up", "Whether a server is healthy by the active checks.");
pub static EJECTED: Metric = gauge("transom_upstream_server_ejected", "Whether a server is kept away from.");
pub static EJECTIONS: Metric = counter("transom_upstream_ejections_total", "Servers ejected for failing in a row.");
pub static CHECKS: Metric = counter("transom_upstream_health_checks_total", "Active health checks.");
pub static RETRIES: Metric =
    counter("transom_upstream_retries_total", "Further tries: made, or not made for want of budget.");
pub static REFUSED: Metric =
    counter("transom_upstream_refused_total", "Requests refused because the upstream had too many.");

/// What all loops know of one server; told under a lock, or by one thread.
#[derive(Debug)]
pub struct ServerMetrics {
    up: Arc<MetricCell>,
    ejected: Arc<MetricCell>,
    ejections: Arc<MetricCell>,
    passed: Arc<MetricCell>,
    failed: Arc<MetricCell>,
}

impl ServerMetrics {
    pub fn new(registry: &Registry, upstream: &str, server: &str) -> ServerMetrics {
        let labels = [("upstream", upstream), ("server", server)];
        let cell = |name| registry.cell(name, WorkerId::MAX, &labels);
        let checks = |outcome| {
            let labels = [("upstream", upstream), ("server", server), ("outcome", outcome)];
            registry.cell(&CHECKS, WorkerId::MAX, &labels)
        };
        ServerMetrics {
            up: cell(&UP),
            ejected: cell(&EJECTED),
            ejections: cell(&EJECTIONS),
            passed: checks("passed"),
            failed: checks("failed"),
        }
    }

    pub fn set_up(&self, up: bool) {
        set(&self.up, up);
    }

    pub fn set_ejected(&self, ejected: bool) {
        if ejected && self.ejected.get() == 0 {
            self.ejections.add(1);
        }
        set(&self.ejected, ejected);
    }

    pub fn checked(&self, passed: bool) {
        if passed { self.passed.add(1) } else { self.failed.add(1) }
    }
}

fn set(gauge: &MetricCell, value: bool) {
    gauge.sub(gauge.get());
    gauge.add(u64::from(value));
}

/// Requests under way to one server, from one loop.
#[derive(Debug)]
pub struct ActiveGauge(Arc<MetricCell>);

impl ActiveGauge {
    pub fn new(registry: &Registry, owner: WorkerId, upstream: &str, server: &str) -> ActiveGauge {
        ActiveGauge(registry.cell(&REQUESTS_ACTIVE, owner, &[("upstream", upstream), ("server", server)]))
    }

    pub fn started(&self) {
        self.0.add(1);
    }

    pub fn ended(&self) {
        self.0.sub(1);
    }
}

/// Why a request was refused for the upstream's sake.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UpstreamLimit {
    Requests,
    Pending,
    /// It waited for a connection, and none became free in time.
    ConnectWait,
}

/// What one loop tried again, and what it refused.
#[derive(Debug)]
pub struct RetryMetrics {
    retried: Arc<MetricCell>,
    over_budget: Arc<MetricCell>,
    refused: [Arc<MetricCell>; 3],
}

impl RetryMetrics {
    pub fn new(registry: &Registry, owner: WorkerId, upstream: &str) -> RetryMetrics {
        let retries = |outcome| registry.cell(&RETRIES, owner, &[("upstream", upstream), ("outcome", outcome)]);
        let refused = |limit| registry.cell(&REFUSED, owner, &[("upstream", upstream), ("limit", limit)]);
        RetryMetrics {
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

    pub fn refused(&self, limit: UpstreamLimit) {
        let index = match limit {
            UpstreamLimit::Requests => 0,
            UpstreamLimit::Pending => 1,
            UpstreamLimit::ConnectWait => 2,
        };
        self.refused[index].add(1);
    }
}
