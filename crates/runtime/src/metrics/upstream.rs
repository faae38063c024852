//! Metrics of upstream servers besides their requests: health, ejections, connections, retries, refusals.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use super::storage::{GaugeGuard, MetricCell};
use super::{Metric, Registry, WorkerId, counter, gauge};

pub static REQUESTS_ACTIVE: Metric =
    gauge("transom_upstream_requests_active", "Requests in flight at upstream servers, until the end of the response.");
pub static CONNECTIONS: Metric =
    gauge("transom_upstream_connections", "Connections to upstream servers, with requests in flight and idle.");
pub static WAITING: Metric =
    gauge("transom_upstream_waiting", "Requests that wait for a connection, because max_connections is reached.");
pub static HELD: Metric =
    gauge("transom_held_requests", "Requests that wait because no server of the upstream is reachable.");
pub static UP: Metric = gauge("transom_upstream_server_up", "Whether active health checks find a server healthy.");
pub static EJECTED: Metric =
    gauge("transom_upstream_server_ejected", "Whether a server is ejected from load balancing.");
pub static EJECTIONS: Metric =
    counter("transom_upstream_ejections_total", "Ejections of servers after consecutive failures.");
pub static CHECKS: Metric = counter("transom_upstream_health_checks_total", "Active health checks.");
pub static RETRIES: Metric =
    counter("transom_upstream_retries_total", "Retries that were made, and those that the retry budget prevented.");
pub static SERVICE_LOOKUPS: Metric =
    counter("transom_upstream_service_lookups_total", "Look-ups of the service records that list servers.");
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
        let cell = |name| registry.cell(name, WorkerId::PROCESS, &labels);
        let checks = |outcome| {
            let labels = [("upstream", upstream), ("server", server), ("outcome", outcome)];
            registry.cell(&CHECKS, WorkerId::PROCESS, &labels)
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

/// Look-ups of one service record.
#[derive(Debug)]
pub struct ServiceMetrics {
    found: Arc<MetricCell>,
    failed: Arc<MetricCell>,
}

impl ServiceMetrics {
    pub fn new(registry: &Registry, service: &str) -> ServiceMetrics {
        let cell =
            |outcome| registry.cell(&SERVICE_LOOKUPS, WorkerId::PROCESS, &[("service", service), ("outcome", outcome)]);
        ServiceMetrics { found: cell("found"), failed: cell("failed") }
    }

    pub fn looked_up(&self, is_found: bool) {
        if is_found { self.found.add(1) } else { self.failed.add(1) }
    }
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

/// Connections from one worker to one server.
#[derive(Debug)]
pub struct ConnectionGauge {
    active: Arc<MetricCell>,
    idle: Arc<MetricCell>,
}

impl ConnectionGauge {
    pub fn new(registry: &Registry, worker: WorkerId, upstream: &str, server: &str) -> Rc<ConnectionGauge> {
        let cell = |state| {
            registry.cell(&CONNECTIONS, worker, &[("upstream", upstream), ("server", server), ("state", state)])
        };
        Rc::new(ConnectionGauge { active: cell("active"), idle: cell("idle") })
    }

    fn cell(&self, is_idle: bool) -> &MetricCell {
        if is_idle { &self.idle } else { &self.active }
    }
}

/// Counts one connection until it is dropped.
#[derive(Debug)]
pub struct CountedConnection {
    /// `None`: connections of health checks are not counted.
    gauge: Option<Rc<ConnectionGauge>>,
    is_idle: Cell<bool>,
}

impl CountedConnection {
    /// A connection that is opened for a request.
    pub fn new(gauge: Option<&Rc<ConnectionGauge>>) -> CountedConnection {
        gauge.iter().for_each(|gauge| gauge.active.add(1));
        CountedConnection { gauge: gauge.cloned(), is_idle: Cell::new(false) }
    }

    pub fn set_idle(&self, is_idle: bool) {
        if let Some(gauge) = &self.gauge
            && self.is_idle.replace(is_idle) != is_idle
        {
            gauge.cell(!is_idle).sub(1);
            gauge.cell(is_idle).add(1);
        }
    }
}

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.gauge.iter().for_each(|gauge| gauge.cell(self.is_idle.get()).sub(1));
    }
}

/// The limit of an upstream that refused a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UpstreamLimit {
    Requests,
    Pending,
    /// No connection became free in time.
    ConnectWait,
    Held,
    /// No server became reachable in time.
    HoldTime,
}

/// Waiting requests, retries and refusals of one upstream in one worker.
#[derive(Debug)]
pub struct RetryMetrics {
    waiting: Arc<MetricCell>,
    held: Arc<MetricCell>,
    retried: Arc<MetricCell>,
    over_budget: Arc<MetricCell>,
    refused: [Arc<MetricCell>; 5],
}

impl RetryMetrics {
    pub fn new(registry: &Registry, worker: WorkerId, upstream: &str) -> RetryMetrics {
        let retries = |outcome| registry.cell(&RETRIES, worker, &[("upstream", upstream), ("outcome", outcome)]);
        let refused = |limit| registry.cell(&REFUSED, worker, &[("upstream", upstream), ("limit", limit)]);
        RetryMetrics {
            waiting: registry.cell(&WAITING, worker, &[("upstream", upstream)]),
            held: registry.cell(&HELD, worker, &[("upstream", upstream)]),
            retried: retries("retried"),
            over_budget: retries("over_budget"),
            refused: ["max_requests", "max_pending", "connect", "max_held", "hold"].map(refused),
        }
    }

    /// Counts a request that waits for a connection until the result is dropped.
    pub fn count_waiting(&self) -> GaugeGuard {
        GaugeGuard::new(&self.waiting)
    }

    /// Counts a request that waits for a reachable server until the result is dropped.
    pub fn count_held(&self) -> GaugeGuard {
        GaugeGuard::new(&self.held)
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
            UpstreamLimit::Held => 3,
            UpstreamLimit::HoldTime => 4,
        };
        self.refused[index].add(1);
    }
}
