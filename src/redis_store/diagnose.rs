//! Asks servers what they are, and really counts there, before gateways rely on them.
//!
//! Every server of the configuration is asked: sentinels for the master, nodes of a cluster for their slots. What is
//! counted lies under keys of its own, `PREFIX:{transom-check|…}`, which end by themselves a few seconds later.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use redis::{Cmd, Value};

use super::cluster::Cluster;
use super::connect::{Dial, in_time};
use super::connection::{Connection, Which};
use super::diagnose_rules::{Finding, Info, Weight, clock, refusal};
use super::scripts::{self, AcquireCall, Answer, At, CounterRequest, Refund, Scripts, TOKENS_MAX, gifts};
use super::sentinel::{self, text};
use crate::config::redis::{Node, Nodes, Shared};

/// Until one answer is given up.
const PATIENCE: Duration = Duration::from_millis(2000);
/// How long the window lasts that is counted in.
const WINDOW_MS: u64 = 10_000;
const SENTINELS_LEAST: usize = 3;

/// What was found out about one server, or about all of them together.
#[derive(Debug)]
pub struct Report {
    /// Whom it is about.
    pub of: String,
    pub findings: Vec<Finding>,
}

impl Report {
    fn of(of: impl Into<String>, findings: Vec<Finding>) -> Report {
        Report { of: of.into(), findings }
    }

    pub fn has_problem(&self) -> bool {
        self.findings.iter().any(|finding| finding.weight == Weight::Problem)
    }
}

/// Asks all servers of the configuration; `now_ms` is this machine's time.
pub async fn survey(settings: &Shared, now_ms: &dyn Fn() -> u64) -> Vec<Report> {
    let survey = Survey {
        dial: Rc::new(Dial::new(settings)),
        prefix: &settings.prefix,
        by_tls: settings.tls.is_some(),
        scripts: Scripts::default(),
        now_ms,
    };
    match &settings.nodes {
        Nodes::Single(node) => vec![survey.single(node).await],
        Nodes::Sentinel { nodes, master } => survey.sentinels(nodes, master).await,
        Nodes::Cluster(seeds) => survey.cluster(seeds).await,
    }
}

/// What a master says of those that follow it.
#[derive(Clone, Copy)]
struct Replicas {
    of: u64,
    /// Whether it only takes counts while some are there.
    are_needed: bool,
}

struct Survey<'s> {
    dial: Rc<Dial>,
    prefix: &'s str,
    by_tls: bool,
    scripts: Scripts,
    now_ms: &'s dyn Fn() -> u64,
}

impl Survey<'_> {
    async fn single(&self, node: &Node) -> Report {
        match self.dial.open(node).await {
            Ok(line) => self.examine(&line, None).await.0,
            Err(why) => Report::of(node.to_string(), vec![self.refusal(&why)]),
        }
    }

    async fn sentinels(&self, nodes: &[Node], master: &str) -> Vec<Report> {
        let mut reports = Vec::new();
        for node in nodes {
            let findings = match self.dial.open_sentinel(node).await {
                Ok(line) => self.sentinel(&line, master).await,
                Err(why) => vec![self.refusal(&why)],
            };
            reports.push(Report::of(format!("sentinel {node}"), findings));
        }
        if reports.iter().all(Report::has_problem) {
            return reports;
        }
        if nodes.len() < SENTINELS_LEAST {
            let text = format!("{} of the sentinels can be asked", nodes.len());
            let fix = "name all of them in `redis`, and have three at least: with fewer, none can replace a master";
            reports.push(Report::of("sentinels", vec![Finding::note(text, fix)]));
        }
        let sentinels = sentinel::Sentinels::new(nodes.to_vec(), master.to_owned());
        match sentinels.open_master(&self.dial).await {
            Ok(line) => {
                let (mut report, replicas) = self.examine(&line, None).await;
                if replicas.is_some_and(|replicas| replicas.of == 0) {
                    let text = "it has no replica: nobody can take its place";
                    report.findings.push(Finding::warning(text, "add one: `REPLICAOF HOST PORT` there"));
                }
                if replicas.is_some_and(|replicas| replicas.of > 0 && !replicas.are_needed) {
                    let text = "cut off from its replicas it goes on counting, for as long as gateways reach it, although \
                                another has taken its place, and so it does for seconds after `SENTINEL FAILOVER`: limits \
                                may be used twice then";
                    let fix = "`min-replicas-to-write` with the number of replicas, and `min-replicas-max-lag 10`, in its \
                               configuration";
                    report.findings.push(Finding::note(text, fix));
                }
                report.of = format!("master {}", report.of);
                reports.push(report);
            }
            Err(why) => reports.push(Report::of(format!("master `{master}`"), vec![self.refusal(&why)])),
        }
        reports
    }

    /// What a sentinel knows of the master.
    async fn sentinel(&self, line: &Connection, master: &str) -> Vec<Finding> {
        let said = match self.ask(line, redis::cmd("SENTINEL").arg("master").arg(master)).await {
            Ok(said) => pairs(&said),
            Err(why) if why.contains("No such master") => {
                let fix = "write the name of its `sentinel monitor NAME …` as `sentinel_master`";
                return vec![Finding::problem(format!("it knows no master called `{master}`"), fix)];
            }
            Err(why) if why.contains("unknown command") => {
                let fix = "name sentinels in `redis`, which listen at port 26379, or remove `sentinel_master`";
                return vec![Finding::problem("it is no sentinel", fix)];
            }
            Err(why) => return vec![self.refusal(&why)],
        };
        let number = |name: &str| -> u64 {
            let found = said.iter().find(|(key, _)| key == name);
            found.and_then(|(_, value)| value.parse().ok()).unwrap_or(0)
        };
        let flags = said.iter().find(|(key, _)| key == "flags").map_or("", |(_, value)| value.as_str());
        let mut found = Vec::new();
        if flags.contains("down") {
            let fix = "see to the master, or wait until a replica has taken its place";
            found.push(Finding::problem(format!("it says that the master is down (`{flags}`)"), fix));
        }
        if number("quorum") > number("num-other-sentinels") + 1 {
            let text = "it knows fewer sentinels than have to agree on a new master";
            found.push(Finding::warning(text, "see to the other sentinels, or lower the quorum of `sentinel monitor`"));
        }
        found
    }

    async fn cluster(&self, seeds: &[Node]) -> Vec<Report> {
        let mut reports = Vec::new();
        for node in seeds {
            let findings = match self.dial.open(node).await {
                Ok(line) => self.seed(&line).await,
                Err(why) => vec![self.refusal(&why)],
            };
            if !findings.is_empty() {
                reports.push(Report::of(node.to_string(), findings));
            }
        }
        if reports.len() == seeds.len() && reports.iter().all(Report::has_problem) {
            return reports;
        }
        let cluster = Cluster::new(seeds.to_vec(), Rc::clone(&self.dial), Rc::new(Cell::new(0)));
        if let Err(why) = cluster.refresh().await {
            reports.push(Report::of("cluster", vec![self.refusal(&why)]));
            return reports;
        }
        for (link, base) in cluster.masters(&format!("{}:{{transom-check|", self.prefix)) {
            match link.line().await {
                Ok(line) => reports.push(self.examine(&line, Some(base)).await.0),
                Err(why) => reports.push(Report::of("a master", vec![self.refusal(&why)])),
            }
        }
        reports
    }

    /// What a node of a cluster knows of the whole.
    async fn seed(&self, line: &Connection) -> Vec<Finding> {
        let said = match self.ask(line, redis::cmd("CLUSTER").arg("INFO")).await {
            Ok(said) => said,
            Err(why) if why.contains("cluster support disabled") => {
                let fix = "write it without brackets: `redis = \"redis://HOST:PORT\"`";
                return vec![Finding::problem("it is no node of a cluster", fix)];
            }
            Err(why) if may_not(&why) => return Vec::new(),
            Err(why) => return vec![self.refusal(&why)],
        };
        let info = Info::new(text(&said).unwrap_or_default());
        let (state, slots) = (info.get("cluster_state").unwrap_or("unknown"), info.number("cluster_slots_ok"));
        if state == "ok" && slots == u64::from(super::hash_slot::SLOTS) {
            return Vec::new();
        }
        let text = format!("it says that the cluster is `{state}`, and that {slots} of 16384 slots are served");
        vec![Finding::problem(text, "see `redis-cli --cluster check HOST:PORT`, and mend with `--cluster fix`")]
    }

    /// All about one server, and its replicas, if it is a master and tells. `base` is what lies in one of its slots, if it
    /// is to be a node of a cluster.
    async fn examine(&self, line: &Rc<Connection>, base: Option<String>) -> (Report, Option<Replicas>) {
        let mut title = "it does not tell what it is".to_owned();
        let mut findings = Vec::new();
        let mut replicas = None;
        match self.ask(line, &mut redis::cmd("INFO")).await {
            Ok(said) => {
                let info = Info::new(text(&said).unwrap_or_default());
                title = info.title();
                findings = info.findings();
                let are_needed = info.get("min_slaves_good_slaves").is_some();
                replicas = info.is_master().then(|| Replicas { of: info.number("connected_slaves"), are_needed });
                if info.in_cluster() && base.is_none() {
                    let fix = format!("write it in brackets: `redis = [\"redis://{}\"]`", line.node);
                    findings.push(Finding::problem("it is a node of a cluster", fix));
                    return (Report::of(format!("{}: {title}", line.node), findings), replicas);
                }
            }
            Err(why) if may_not(&why) => {
                let text = "it does not let the gateway see its version, role and memory";
                findings.push(Finding::note(text, "allow the user `+info`"));
            }
            Err(why) => findings.push(self.refusal(&why)),
        }
        let base = base.unwrap_or_else(|| format!("{}:{{transom-check|}}", self.prefix));
        match self.time(line).await {
            Ok((server_ms, finding)) => {
                findings.extend(finding);
                if let Err(why) = self.count(line, &base, server_ms).await {
                    // A replica was told of already.
                    if !why.contains("READONLY") || !title.ends_with("replica") {
                        findings.push(self.refusal(&why));
                    }
                }
            }
            Err(why) => findings.push(self.refusal(&why)),
        }
        findings.sort_by_key(|finding| finding.weight);
        findings.dedup();
        (Report::of(format!("{}: {title}", line.node), findings), replicas)
    }

    /// The time there, and what is wrong with it.
    async fn time(&self, line: &Connection) -> Result<(u64, Option<Finding>), String> {
        let before_ms = (self.now_ms)();
        let said = self.ask(line, &mut redis::cmd("TIME")).await?;
        let after_ms = (self.now_ms)();
        let strange = || format!("TIME was answered with {said:?}");
        let Value::Array(parts) = &said else { return Err(strange()) };
        let parts: Vec<u64> = parts.iter().filter_map(|part| text(part)?.parse().ok()).collect();
        let [seconds, micros] = parts.as_slice() else { return Err(strange()) };
        let server_ms = seconds * 1000 + micros / 1000;
        Ok((server_ms, clock(server_ms, before_ms, after_ms)))
    }

    /// Takes a token of a counter of each kind, and gives it back.
    async fn count(&self, line: &Rc<Connection>, base: &str, server_ms: u64) -> Result<(), String> {
        // A window of its own, so that nobody has counted in it yet.
        let number = server_ms;
        let end_ms = server_ms + WINDOW_MS;
        let next_end_ms = end_ms + WINDOW_MS;
        let (limit, ceiling) = (1000, TOKENS_MAX);
        let want =
            |at| CounterRequest { base: base.into(), at, limit, ceiling, need: 1, want: 1, least: 0, asked_ms: 0 };
        let wants = [
            want(At::Plain { number, end_ms, next_end_ms }),
            want(At::Grid { number, end_ms, next_end_ms }),
            want(At::Floating { period_ms: WINDOW_MS }),
        ];
        let asks = [AcquireCall { wants: wants.into(), floor_ms: 0, at_ms: server_ms }];
        let take = |by| scripts::take(&self.scripts.take, by, asks.iter());
        let said = self.run(line, Which::Take, &take).await?;
        let decisions = scripts::taken(&said, asks.iter()).unwrap_or_default();
        let took = match decisions.into_iter().next() {
            Some(Ok(Answer::Granted { took, .. })) => took,
            _ => return Err(format!("a script was answered with {said:?}")),
        };
        let gifts = gifts(&asks[0].wants, &took);
        let give = |by| scripts::give(&self.scripts.give, by, &gifts);
        let given = scripts::given(&self.run(line, Which::Give, &give).await?);
        if given != Some(took.iter().map(|took| took.granted).sum()) {
            // The script is told of what it may not do, and goes on.
            return Err("what was taken can not be given back".to_owned());
        }
        // As whoever resets a key does; and nothing stays behind.
        let all: Vec<Refund> = gifts.iter().map(|gift| Refund { forgets: true, ..gift.clone() }).collect();
        let forget = |by| scripts::give(&self.scripts.give, by, &all);
        self.run(line, Which::Give, &forget).await.map(|_nothing| ())
    }

    /// What an error means. Whom it is about is said already.
    fn refusal(&self, why: &str) -> Finding {
        let mut finding = refusal(why, self.prefix, self.by_tls);
        if let Some((node, what)) = finding.text.split_once(": ")
            && !node.contains(' ')
            && node.contains([':', '/'])
        {
            finding.text = what.to_owned();
        }
        finding
    }

    async fn ask(&self, line: &Connection, question: &mut Cmd) -> Result<Value, String> {
        let said = async { line.ask(question.clone()).await.map_err(|failure| line.blame(&failure)) };
        in_time(&line.node, PATIENCE, said).await
    }

    async fn run(&self, line: &Connection, which: Which, call: &dyn Fn(scripts::By) -> Cmd) -> Result<Value, String> {
        let said = async { line.run(which, false, call).await.map_err(|failure| line.blame(&failure)) };
        in_time(&line.node, PATIENCE, said).await
    }
}

/// Whether a user has not the right to ask that.
fn may_not(why: &str) -> bool {
    why.contains("NOPERM")
}

/// Names and values that stand one behind the other.
fn pairs(said: &Value) -> Vec<(String, String)> {
    let Value::Array(said) = said else { return Vec::new() };
    let pair = |pair: &[Value]| match pair {
        [name, value] => Some((text(name)?.to_owned(), text(value)?.to_owned())),
        _ => None,
    };
    said.chunks_exact(2).filter_map(pair).collect()
}
