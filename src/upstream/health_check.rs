//! Active health checks: a request to every server now and then, on a connection of its own.
//!
//! There is one prober for the whole process, on a thread of its own, so that a busy loop makes no
//! server look slow. What it finds out goes to the fleets, which all loops read. A server is healthy
//! until it has been checked; the first check decides at once, later ones by streaks.

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

use super::pool::Pool;
use super::request_upload::Upload;
use super::server_health::UpstreamHealth;
use crate::clock::Clock;
use crate::config::upstream_policy::Health;
use crate::config::{Server, TransportSettings};

const AGENT: HeaderValue = HeaderValue::from_static("transom-health-check");
const ANYTHING: HeaderValue = HeaderValue::from_static("*/*");
/// The first checks are spread over so much, or the interval if that is less.
const SPREAD: Duration = Duration::from_secs(1);

/// The checks of one server. They go on over reloads that do not change how it is checked.
struct CheckedServer {
    server: Server,
    way: TransportSettings,
    health: Health,
    /// Who is told, and which of its servers it is.
    told: Rc<RefCell<(Arc<UpstreamHealth>, usize)>>,
    task: JoinHandle<()>,
}

impl Drop for CheckedServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Whether there is anything to check.
pub fn is_wanted(upstream_health: &[Arc<UpstreamHealth>]) -> bool {
    upstream_health.iter().any(|upstream_health| upstream_health.policy.health.is_some())
}

/// Checks the servers of the fleets that were told last, until nobody tells any more.
pub async fn run(mut upstream_health: watch::Receiver<Vec<Arc<UpstreamHealth>>>, clock: Clock) {
    let mut watched: HashMap<(String, String), CheckedServer> = HashMap::new();
    loop {
        let current = upstream_health.borrow_and_update().clone();
        let mut before = std::mem::take(&mut watched);
        for upstream_health in &current {
            let Some(health) = &upstream_health.policy.health else { continue };
            for (position, server) in upstream_health.servers.iter().enumerate() {
                let name = (upstream_health.name.clone(), server.url.clone());
                let told = (Arc::clone(upstream_health), position);
                let is_same = |known: &CheckedServer| {
                    known.server.is_reached_as(server) && known.way == upstream_health.way && known.health == *health
                };
                let same = before.remove(&name).filter(is_same);
                let known = match same {
                    Some(known) => {
                        known.told.replace(told);
                        known
                    }
                    None => watch(server.clone(), upstream_health.way.clone(), health.clone(), told, &clock),
                };
                watched.insert(name, known);
            }
        }
        drop(before);
        if upstream_health.changed().await.is_err() {
            return;
        }
    }
}

fn watch(
    server: Server,
    way: TransportSettings,
    health: Health,
    told: (Arc<UpstreamHealth>, usize),
    clock: &Clock,
) -> CheckedServer {
    let told = Rc::new(RefCell::new(told));
    let checks = checks(server.clone(), way.clone(), health.clone(), Rc::clone(&told), clock.clone());
    CheckedServer { server, way, health, told, task: tokio::task::spawn_local(checks) }
}

async fn checks(
    server: Server,
    way: TransportSettings,
    health: Health,
    told: Rc<RefCell<(Arc<UpstreamHealth>, usize)>>,
    clock: Clock,
) {
    sleep(health.interval.min(SPREAD).mul_f64(fastrand::f64())).await;
    // What is known of the server's name lasts from check to check, as it does for requests.
    let pool = Pool::new(server, &way, clock.clone());
    let mut streak = 0;
    loop {
        let result = match timeout(health.timeout, check(&pool, &health)).await {
            Ok(result) => result,
            Err(_elapsed) => Err(String::from("it did not answer in time")),
        };
        // Every check has a connection of its own.
        pool.sweep(Duration::ZERO);
        let (upstream_health, position) = told.borrow().clone();
        let is_first = upstream_health.checked(position, result.is_ok());
        // How often in a row it was not as it is taken to be.
        streak = if upstream_health.is_up(position) == result.is_ok() { 0 } else { streak + 1 };
        let enough = if result.is_ok() { health.healthy_after } else { health.unhealthy_after };
        if streak >= enough || (is_first && streak > 0) {
            streak = 0;
            let why = result.as_ref().err().map_or("", String::as_str);
            upstream_health.set_up(position, result.is_ok(), clock.instant(), why);
        }
        if result.is_ok() && upstream_health.is_up(position) {
            upstream_health.end_ejection(position, clock.instant(), "it passed a health check");
        }
        sleep(pause(health.interval)).await;
    }
}

/// The interval, give or take a tenth, so that checks of many gateways do not fall together.
fn pause(interval: Duration) -> Duration {
    interval.mul_f64(0.9 + fastrand::f64() * 0.2)
}

async fn check(pool: &Pool, health: &Health) -> Result<(), String> {
    let mut connection =
        pool.connect(health.timeout, health.timeout, false, false).await.map_err(|fault| fault.for_operator())?;
    let host = match &health.host {
        Some(host) => HeaderValue::from_str(host).map_err(|invalid| invalid.to_string())?,
        None => pool.authority(),
    };
    let request = Request::builder()
        .method(health.method.as_str())
        .uri(&health.path)
        .header(HOST, host)
        .header(USER_AGENT, AGENT)
        .header(ACCEPT, ANYTHING)
        .body(Upload::Empty)
        .map_err(|invalid| invalid.to_string())?;
    let answer = connection.send(Box::new(request), false, None).await.map_err(|error| error.error().to_string())?;
    let status = answer.status().as_u16();
    match health.statuses.iter().any(|good| good.contains(&status)) {
        true => Ok(()),
        false => Err(format!("it answered with {status}")),
    }
}
