//! Metrics of upstream servers besides their requests: health, ejections, retries, refusals.

use std::sync::Arc;

use super::storage::MetricCell;
use super::{Metric, Registry, WorkerId, counter, gauge};

pub static REQUESTS_ACTIVE: Metric =
    gauge("transom_upstream_requests_active", "Requests in flight at upstream servers, until the end of the response.");
pub static UP: Metric = gauge("transom_upstream_server_up", "Whether active health checks find a server healthy.");
pub static EJECTED: Metric =
    gauge("transom_upstream_server_ejected", "Whether a server is ejected from load balancing.");
pub static EJECTIONS: Metric =
    counter("transom_upstream_ejections_total", "Ejections of servers after consecutive failures.");
pub static CHECKS: Metric = counter("transom_upstream_health_checks_total", "Active health checks.");
pub static RETRIES: Metric =
    counter("transom_upstream_retries_total", "Retries that were made, and those that the retry budget prevented.");
pub static REFUSED: Metric = counter("transom_upstream_refused_total", "Requests refused by a limit of the upstream.");

/// Health metrics of one server, shared by all workers. Written under a lock or by one thread.
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

/// Requests in flight from one worker to one server.
#[derive(Debug)]
pub struct ActiveGauge(Arc<MetricCell>);

impl ActiveGauge {
    pub fn new(registry: &Registry, worker: WorkerId, upstream: &str, server: &str) -> ActiveGauge {
        ActiveGauge(registry.cell(&REQUESTS_ACTIVE, worker, &[("upstream", upstream), ("server", server)]))
    }

    pub fn started(&self) {
        self.0.add(1);
    }

    pub fn ended(&self) {
        self.0.sub(1);
    }
}

/// The limit of an upstream that refused a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UpstreamLimit {
    Requests,
    Pending,
    /// No connection became free in time.
    ConnectWait,
}

/// Retries and refusals of one upstream in one worker.
#[derive(Debug)]
pub struct RetryMetrics {
    retried: Arc<MetricCell>,
    over_budget: Arc<MetricCell>,
    refused: [Arc<MetricCell>; 3],
}

impl RetryMetrics {
    pub fn new(registry: &Registry, worker: WorkerId, upstream: &str) -> RetryMetrics {
        let retries = |outcome| registry.cell(&RETRIES, worker, &[("upstream", upstream), ("outcome", outcome)]);
        let refused = |limit| registry.cell(&REFUSED, worker, &[("upstream", upstream), ("limit", limit)]);
        RetryMetrics {
            retried: retries("retried"),
            over_budget: retries("over_budget"),
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
