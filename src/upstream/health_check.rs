//! Active health checks: sends a request to every server at an interval, each on a new connection.
//!
//! One thread does this for the whole process, so that a busy worker makes no server look slow. The results go to
//! [`UpstreamHealth`], which all workers read. A server is healthy until its first check, which decides at once; later
//! checks decide by streaks.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCEPT, HOST, USER_AGENT};
use http::{HeaderValue, Request};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::pool::ConnectionPool;
use super::request_body::RequestBody;
use super::server_health::{MonitoredServer, UpstreamHealth};
use transom_config::ServerId;
use transom_config::upstream::{HealthChecks, Server, TransportSettings};
use transom_runtime::clock::Clock;

const USER_AGENT_VALUE: HeaderValue = HeaderValue::from_static("transom-health-check");
const ACCEPT_ANY: HeaderValue = HeaderValue::from_static("*/*");
/// The first checks are spread over this time, or over the interval if that is shorter.
const FIRST_CHECK_SPREAD: Duration = Duration::from_secs(1);

/// The checks of one server. Reloads that do not change how the server is checked keep them.
struct CheckedServer {
    server: Server,
    transport: TransportSettings,
    health: HealthChecks,
    /// Where results go, and the server there.
    reports_to: Rc<RefCell<(Arc<UpstreamHealth>, ServerId)>>,
    task: JoinHandle<()>,
}

impl Drop for CheckedServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Whether any upstream has health checks.
pub fn is_enabled(upstream_health: &[Arc<UpstreamHealth>]) -> bool {
    upstream_health.iter().any(|upstream_health| upstream_health.policy.health.is_some())
}

/// Checks the servers of the latest `upstream_health`, until its sender is dropped.
pub async fn run(mut upstream_health: watch::Receiver<Vec<Arc<UpstreamHealth>>>, clock: Clock) {
    let mut checked: HashMap<(String, String), CheckedServer> = HashMap::new();
    loop {
        let current = upstream_health.borrow_and_update().clone();
        let mut before = std::mem::take(&mut checked);
        for upstream_health in &current {
            let Some(health) = &upstream_health.policy.health else { continue };
            for (id, MonitoredServer { server, .. }) in upstream_health.servers.enumerate() {
                let name = (upstream_health.name.clone(), server.url.clone());
                let reports_to = (Arc::clone(upstream_health), id);
                let is_same = |server_checks: &CheckedServer| {
                    server_checks.server.has_same_connections(server)
                        && server_checks.transport == upstream_health.transport
                        && server_checks.health == *health
                };
                let unchanged = before.remove(&name).filter(is_same);
                let server_checks = match unchanged {
                    Some(server_checks) => {
                        server_checks.reports_to.replace(reports_to);
                        server_checks
                    }
                    None => start_checks(
                        server.clone(),
                        upstream_health.transport.clone(),
                        health.clone(),
                        reports_to,
                        &clock,
                    ),
                };
                checked.insert(name, server_checks);
            }
        }
        drop(before);
        if upstream_health.changed().await.is_err() {
            return;
        }
    }
}

fn start_checks(
    server: Server,
    transport: TransportSettings,
    health: HealthChecks,
    reports_to: (Arc<UpstreamHealth>, ServerId),
    clock: &Clock,
) -> CheckedServer {
    let reports_to = Rc::new(RefCell::new(reports_to));
    let checks =
        check_repeatedly(server.clone(), transport.clone(), health.clone(), Rc::clone(&reports_to), clock.clone());
    CheckedServer { server, transport, health, reports_to, task: tokio::task::spawn_local(checks) }
}

async fn check_repeatedly(
    server: Server,
    transport: TransportSettings,
    health: HealthChecks,
    reports_to: Rc<RefCell<(Arc<UpstreamHealth>, ServerId)>>,
    clock: Clock,
) {
    sleep(health.interval.min(FIRST_CHECK_SPREAD).mul_f64(fastrand::f64())).await;
    // The pool keeps the resolved addresses from check to check, as for requests.
    let pool = ConnectionPool::new(server, &transport, None, clock.clone());
    let mut consecutive = 0;
    loop {
        let result = match timeout(health.timeout, check(&pool, &health)).await {
            Ok(result) => result,
            Err(_elapsed) => Err(String::from("it did not respond in time")),
        };
        // Every check uses a new connection.
        pool.sweep(Duration::ZERO);
        let (upstream_health, server) = reports_to.borrow().clone();
        let is_first = upstream_health.record_check(server, result.is_ok());
        // Results in a row that contradict the current state.
        consecutive = if upstream_health.is_healthy(server) == result.is_ok() { 0 } else { consecutive + 1 };
        let enough = if result.is_ok() { health.healthy_after } else { health.unhealthy_after };
        if consecutive >= enough || (is_first && consecutive > 0) {
            consecutive = 0;
            let why = result.as_ref().err().map_or("", String::as_str);
            upstream_health.set_healthy(server, result.is_ok(), clock.instant(), why);
        }
        if result.is_ok() && upstream_health.is_healthy(server) {
            upstream_health.end_ejection(server, clock.instant(), "it passed a health check");
        }
        sleep(with_jitter(health.interval)).await;
    }
}

/// The interval, up to a tenth longer or shorter, so that the checks of many gateways do not coincide.
fn with_jitter(interval: Duration) -> Duration {
    interval.mul_f64(0.9 + fastrand::f64() * 0.2)
}

async fn check(pool: &ConnectionPool, health: &HealthChecks) -> Result<(), String> {
    let mut connection = pool
        .connect(None, health.timeout, health.timeout, false, false)
        .await
        .map_err(|error| error.operator_message())?;
    let host = match &health.host {
        Some(host) => HeaderValue::from_str(host).map_err(|invalid| invalid.to_string())?,
        None => pool.authority(),
    };
    let request = Request::builder()
        .method(health.method)
        .uri(&health.path)
        .header(HOST, host)
        .header(USER_AGENT, USER_AGENT_VALUE)
        .header(ACCEPT, ACCEPT_ANY)
        .body(RequestBody::Empty)
        .map_err(|invalid| invalid.to_string())?;
    let response = connection.send(Box::new(request), None).await.map_err(|error| {
        pool.mark_suspect();
        error.to_string()
    })?;
    let status = response.status().as_u16();
    match health.status.iter().any(|good| good.contains(&status)) {
        true => Ok(()),
        false => Err(format!("it responded with {status}")),
    }
}
