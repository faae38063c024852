//! Diagnoses the configured servers, for `transom check --connect`: all of them, including sentinels and cluster
//! nodes, and counts on them.
//!
//! Test counts use keys of their own, `PREFIX:{transom-check|…}`, which expire after a few seconds.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use redis::{Cmd, Value};

use super::cluster::Cluster;
use super::connect::{Connector, with_timeout};
use super::connection::{Connection, ScriptKind};
use super::diagnose_rules::{Finding, Info, Severity, clock_finding, error_finding};
use super::scripts::{
    self, AcquireCall, AcquireReply, CounterRequest, Refund, Scripts, TOKENS_MAX, WindowRef, refunds_of,
};
use super::sentinel::{self, reply_text};
use crate::config::redis::{Node, Nodes, StoreConfig};

/// Limit for one reply.
const REPLY_TIMEOUT: Duration = Duration::from_millis(2000);
/// Length of the test window.
const WINDOW_MS: u64 = 10_000;
const SENTINELS_MIN: usize = 3;

/// The findings about one server, or about all together.
#[derive(Debug)]
pub struct ServerReport {
    /// What the findings are about.
    pub subject: String,
    pub findings: Vec<Finding>,
}

impl ServerReport {
    fn new(of: impl Into<String>, findings: Vec<Finding>) -> ServerReport {
        ServerReport { subject: of.into(), findings }
    }

    pub fn has_problem(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity == Severity::Problem)
    }
}

/// Diagnoses all servers of the configuration; `now_ms` is this machine's time.
pub async fn diagnose(settings: &StoreConfig, now_ms: &dyn Fn() -> u64) -> Vec<ServerReport> {
    let diagnosis = Diagnosis {
        connector: Rc::new(Connector::new(settings)),
        prefix: &settings.prefix,
        uses_tls: settings.tls.is_some(),
        scripts: Scripts::default(),
        now_ms,
    };
    match &settings.nodes {
        Nodes::Single(node) => vec![diagnosis.diagnose_single(node).await],
        Nodes::Sentinel { nodes, master } => diagnosis.diagnose_sentinels(nodes, master).await,
        Nodes::Cluster(seeds) => diagnosis.diagnose_cluster(seeds).await,
    }
}

/// A master's replicas.
#[derive(Clone, Copy)]
struct Replicas {
    count: u64,
    /// Whether the master requires replicas (`min-replicas-to-write`).
    are_required: bool,
}

struct Diagnosis<'s> {
    connector: Rc<Connector>,
    prefix: &'s str,
    uses_tls: bool,
    scripts: Scripts,
    now_ms: &'s dyn Fn() -> u64,
}

impl Diagnosis<'_> {
    async fn diagnose_single(&self, node: &Node) -> ServerReport {
        match self.connector.open(node).await {
            Ok(connection) => self.diagnose_server(&connection, None).await.0,
            Err(why) => ServerReport::new(node.to_string(), vec![self.error_finding(&why)]),
        }
    }

    async fn diagnose_sentinels(&self, nodes: &[Node], master: &str) -> Vec<ServerReport> {
        let mut reports = Vec::new();
        for node in nodes {
            let findings = match self.connector.open_sentinel(node).await {
                Ok(connection) => self.diagnose_sentinel(&connection, master).await,
                Err(why) => vec![self.error_finding(&why)],
            };
            reports.push(ServerReport::new(format!("sentinel {node}"), findings));
        }
        if reports.iter().all(ServerReport::has_problem) {
            return reports;
        }
        if nodes.len() < SENTINELS_MIN {
            let text = format!("only {} sentinels are configured", nodes.len());
            let fix = "name all sentinels in `redis`, and run at least three: fewer cannot replace a master safely";
            reports.push(ServerReport::new("sentinels", vec![Finding::note(text, fix)]));
        }
        let sentinels = sentinel::Sentinels::new(nodes.to_vec(), master.to_owned());
        match sentinels.open_master(&self.connector).await {
            Ok(connection) => {
                let (mut report, replicas) = self.diagnose_server(&connection, None).await;
                if replicas.is_some_and(|replicas| replicas.count == 0) {
                    let text = "it has no replica that could replace it";
                    report.findings.push(Finding::warning(text, "add one: `REPLICAOF HOST PORT` there"));
                }
                if replicas.is_some_and(|replicas| replicas.count > 0 && !replicas.are_required) {
                    let text = "it keeps counting while it is cut off from its replicas, even after another master was elected, \
                                and for seconds after `SENTINEL FAILOVER`: clients can then use their limits twice";
                    let fix = "set `min-replicas-to-write` to the number of replicas, and `min-replicas-max-lag 10`";
                    report.findings.push(Finding::note(text, fix));
                }
                report.subject = format!("master {}", report.subject);
                reports.push(report);
            }
            Err(why) => reports.push(ServerReport::new(format!("master `{master}`"), vec![self.error_finding(&why)])),
        }
        reports
    }

    /// What a sentinel knows of the master.
    async fn diagnose_sentinel(&self, connection: &Connection, master: &str) -> Vec<Finding> {
        let reply = match self.call(connection, redis::cmd("SENTINEL").arg("master").arg(master)).await {
            Ok(reply) => pairs(&reply),
            Err(why) if why.contains("No such master") => {
                let fix = "set `sentinel_master` to the name in its `sentinel monitor NAME …`";
                return vec![Finding::problem(format!("it does not know a master called `{master}`"), fix)];
            }
            Err(why) if why.contains("unknown command") => {
                let fix = "name sentinels in `redis`, which listen at port 26379, or remove `sentinel_master`";
                return vec![Finding::problem("it is not a sentinel", fix)];
            }
            Err(why) => return vec![self.error_finding(&why)],
        };
        let number = |name: &str| -> u64 {
            let found = reply.iter().find(|(key, _)| key == name);
            found.and_then(|(_, value)| value.parse().ok()).unwrap_or(0)
        };
        let flags = reply.iter().find(|(key, _)| key == "flags").map_or("", |(_, value)| value.as_str());
        let mut found = Vec::new();
        if flags.contains("down") {
            let fix = "repair the master, or wait until a replica has replaced it";
            found.push(Finding::problem(format!("it reports that the master is down (`{flags}`)"), fix));
        }
        if number("quorum") > number("num-other-sentinels") + 1 {
            let text = "it knows fewer sentinels than the quorum for a new master";
            found.push(Finding::warning(text, "start the other sentinels, or lower the quorum of `sentinel monitor`"));
        }
        found
    }

    async fn diagnose_cluster(&self, seeds: &[Node]) -> Vec<ServerReport> {
        let mut reports = Vec::new();
        for node in seeds {
            let findings = match self.connector.open(node).await {
                Ok(connection) => self.diagnose_seed(&connection).await,
                Err(why) => vec![self.error_finding(&why)],
            };
            if !findings.is_empty() {
                reports.push(ServerReport::new(node.to_string(), findings));
            }
        }
        if reports.len() == seeds.len() && reports.iter().all(ServerReport::has_problem) {
            return reports;
        }
        let cluster = Cluster::new(seeds.to_vec(), Rc::clone(&self.connector), Rc::new(Cell::new(0)));
        if let Err(why) = cluster.refresh().await {
            reports.push(ServerReport::new("cluster", vec![self.error_finding(&why)]));
            return reports;
        }
        for (link, base) in cluster.masters(&format!("{}:{{transom-check|", self.prefix)) {
            match link.get().await {
                Ok(connection) => reports.push(self.diagnose_server(&connection, Some(base)).await.0),
                Err(why) => reports.push(ServerReport::new("a master", vec![self.error_finding(&why)])),
            }
        }
        reports
    }

    /// The state of the cluster as one node sees it.
    async fn diagnose_seed(&self, connection: &Connection) -> Vec<Finding> {
        let reply = match self.call(connection, redis::cmd("CLUSTER").arg("INFO")).await {
            Ok(reply) => reply,
            Err(why) if why.contains("cluster support disabled") => {
                let fix = "write it without brackets: `redis = \"redis://HOST:PORT\"`";
                return vec![Finding::problem("it is not a node of a cluster", fix)];
            }
            Err(why) if is_not_permitted(&why) => return Vec::new(),
            Err(why) => return vec![self.error_finding(&why)],
        };
        let info = Info::new(reply_text(&reply).unwrap_or_default());
        let (state, slots) = (info.get("cluster_state").unwrap_or("unknown"), info.number("cluster_slots_ok"));
        if state == "ok" && slots == u64::from(super::hash_slot::SLOTS) {
            return Vec::new();
        }
        let text = format!("the cluster is `{state}`; {slots} of 16384 slots are served");
        vec![Finding::problem(text, "see `redis-cli --cluster check HOST:PORT`, and repair with `--cluster fix`")]
    }

    /// Diagnoses one server; also returns its replicas, if it is a master and its `INFO` can be read. `base` is a key
    /// base in one of its slots, if the server should be a cluster node.
    async fn diagnose_server(
        &self,
        connection: &Rc<Connection>,
        base: Option<String>,
    ) -> (ServerReport, Option<Replicas>) {
        let mut title = "version and role unknown".to_owned();
        let mut findings = Vec::new();
        let mut replicas = None;
        match self.call(connection, &mut redis::cmd("INFO")).await {
            Ok(reply) => {
                let info = Info::new(reply_text(&reply).unwrap_or_default());
                title = info.title();
                findings = info.findings();
                let are_needed = info.get("min_slaves_good_slaves").is_some();
                replicas = info
                    .is_master()
                    .then(|| Replicas { count: info.number("connected_slaves"), are_required: are_needed });
                if info.in_cluster() && base.is_none() {
                    let fix = format!("write it in brackets: `redis = [\"redis://{}\"]`", connection.node);
                    findings.push(Finding::problem("it is a node of a cluster", fix));
                    return (ServerReport::new(format!("{}: {title}", connection.node), findings), replicas);
                }
            }
            Err(why) if is_not_permitted(&why) => {
                let text = "its version, role and memory are unknown: the user may not run INFO";
                findings.push(Finding::note(text, "allow the user `+info`"));
            }
            Err(why) => findings.push(self.error_finding(&why)),
        }
        let base = base.unwrap_or_else(|| format!("{}:{{transom-check|}}", self.prefix));
        match self.measure_time(connection).await {
            Ok((server_ms, finding)) => {
                findings.extend(finding);
                if let Err(why) = self.try_counting(connection, &base, server_ms).await {
                    // Being a replica is a finding already.
                    if !why.contains("READONLY") || !title.ends_with("replica") {
                        findings.push(self.error_finding(&why));
                    }
                }
            }
            Err(why) => findings.push(self.error_finding(&why)),
        }
        findings.sort_by_key(|finding| finding.severity);
        findings.dedup();
        (ServerReport::new(format!("{}: {title}", connection.node), findings), replicas)
    }

    /// The server's time, and the finding if it is wrong.
    async fn measure_time(&self, connection: &Connection) -> Result<(u64, Option<Finding>), String> {
        let before_ms = (self.now_ms)();
        let reply = self.call(connection, &mut redis::cmd("TIME")).await?;
        let after_ms = (self.now_ms)();
        let unexpected = || format!("unexpected reply to TIME: {reply:?}");
        let Value::Array(parts) = &reply else { return Err(unexpected()) };
        let parts: Vec<u64> = parts.iter().filter_map(|part| reply_text(part)?.parse().ok()).collect();
        let [seconds, micros] = parts.as_slice() else { return Err(unexpected()) };
        let server_ms = seconds * 1000 + micros / 1000;
        Ok((server_ms, clock_finding(server_ms, before_ms, after_ms)))
    }

    /// Acquires a token of each kind of counter and refunds it.
    async fn try_counting(&self, connection: &Rc<Connection>, base: &str, server_ms: u64) -> Result<(), String> {
        // A window that no other check has used.
        let number = server_ms;
        let end_ms = server_ms + WINDOW_MS;
        let next_end_ms = end_ms + WINDOW_MS;
        let (limit, ceiling) = (1000, TOKENS_MAX);
        let want = |at| CounterRequest {
            key_base: base.into(),
            window: at,
            limit,
            ceiling,
            need: 1,
            want: 1,
            used_min: 0,
            computed_ms: 0,
        };
        let requests = [
            want(WindowRef::Plain { number, end_ms, next_end_ms }),
            want(WindowRef::Accumulating { number, end_ms, next_end_ms }),
            want(WindowRef::Floating { period_ms: WINDOW_MS }),
        ];
        let calls = [AcquireCall { requests: requests.into(), gateway_ms: 0, window_ms: server_ms }];
        let acquire = |by| scripts::acquire_command(&self.scripts.acquire, by, calls.iter());
        let reply = self.run(connection, ScriptKind::Acquire, &acquire).await?;
        let decisions = scripts::parse_acquire_reply(&reply, calls.iter()).unwrap_or_default();
        let replies = match decisions.into_iter().next() {
            Some(Ok(AcquireReply::Granted { counters: replies, .. })) => replies,
            _ => return Err(format!("unexpected reply to a script: {reply:?}")),
        };
        let refunds = refunds_of(&calls[0].requests, &replies);
        let refund = |by| scripts::refund_command(&self.scripts.refund, by, &refunds);
        let refunded = scripts::parse_refund_reply(&self.run(connection, ScriptKind::Refund, &refund).await?);
        if refunded != Some(replies.iter().map(|replies| replies.granted).sum()) {
            // `pcall` in the script hides the missing right.
            return Err("tokens cannot be refunded".to_owned());
        }
        // Deletes the test counters, as a reset does.
        let all: Vec<Refund> = refunds.iter().map(|refund| Refund { deletes: true, ..refund.clone() }).collect();
        let delete = |by| scripts::refund_command(&self.scripts.refund, by, &all);
        self.run(connection, ScriptKind::Refund, &delete).await.map(|_nothing| ())
    }

    /// The finding for an error, without the server's name, which the report already has.
    fn error_finding(&self, why: &str) -> Finding {
        let mut finding = error_finding(why, self.prefix, self.uses_tls);
        if let Some((node, what)) = finding.text.split_once(": ")
            && !node.contains(' ')
            && node.contains([':', '/'])
        {
            finding.text = what.to_owned();
        }
        finding
    }

    async fn call(&self, connection: &Connection, command: &mut Cmd) -> Result<Value, String> {
        let reply = async { connection.call(command.clone()).await.map_err(|failure| connection.describe(&failure)) };
        with_timeout(&connection.node, REPLY_TIMEOUT, reply).await
    }

    async fn run(
        &self,
        connection: &Connection,
        which: ScriptKind,
        call: &dyn Fn(scripts::ScriptRef) -> Cmd,
    ) -> Result<Value, String> {
        let reply =
            async { connection.run_script(which, false, call).await.map_err(|failure| connection.describe(&failure)) };
        with_timeout(&connection.node, REPLY_TIMEOUT, reply).await
    }
}

/// Whether the user lacks the right to a command.
fn is_not_permitted(why: &str) -> bool {
    why.contains("NOPERM")
}

/// Parses alternating names and values.
fn pairs(reply: &Value) -> Vec<(String, String)> {
    let Value::Array(reply) = reply else { return Vec::new() };
    let pair = |pair: &[Value]| match pair {
        [name, value] => Some((reply_text(name)?.to_owned(), reply_text(value)?.to_owned())),
        _ => None,
    };
    reply.chunks_exact(2).filter_map(pair).collect()
}
