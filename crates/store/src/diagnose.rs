//! Checks the configured servers for `transom check --connect`: all of them, including sentinels and cluster nodes.
//! Counts there, under keys of its own (`PREFIX:{transom-check|…}`), which it deletes.

use std::rc::Rc;
use std::time::Duration;

use tokio::time::timeout;

use super::client::RedisClient;
use super::connect::{Connector, with_timeout};
use super::connection::{Connection, log_excerpt};
use super::scripts::{AcquireReply, CounterRequest, TOKENS_MAX, refunds_of};
use super::sentinel::reply_text;
use transom_config::redis::{Nodes, StoreConfig};
use transom_limiter::rule::KeyFormat;
use transom_limiter::store_key::StoreWindow;
use transom_limiter::window_kind::WindowKind;

/// Limit for the replies of one server.
const REPLY_TIMEOUT: Duration = Duration::from_millis(3000);
const CLOCK_DIFFERENCE_MAX_MS: u64 = 1000;
/// The keys of all rules without a `key_format`.
const KEYS: &str = "~PREFIX:*";

/// The ACL rights that the gateway's user needs, in addition to the keys `~PREFIX:*`.
pub const COMMANDS: &str = "+ping +select +eval +evalsha +time +get +mget +exists +set +del +decrby +hmget +hgetall +hset +hdel +hget +hexists \
                            +zadd +zrem +zscore +zcard +zpopmin +zrangebyscore +pexpireat \
                            +role +info +cluster|slots +cluster|info +asking";

/// The server cannot be used as it is; more than the limit may be admitted some day; for information.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Severity {
    Problem,
    Warning,
    Note,
}
use Severity::{Note, Problem, Warning};

/// A finding about a server, for the operator. The fix is empty if the text says enough.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    pub severity: Severity,
    pub text: String,
    pub fix: String,
}

/// The findings about one server.
#[derive(Debug)]
pub struct ServerReport {
    pub subject: String,
    pub findings: Vec<Finding>,
}

/// A check of what a server reports: severity, condition, text, fix. `{field}` in the texts is the value of that field.
pub type Check = (Severity, fn(&Info) -> bool, &'static str, &'static str);
type Opened = Result<Rc<Connection>, String>;

/// Checks of `INFO`. Every counter has an expiry time, so each policy but `noeviction` evicts counters.
pub const EVICTION: Check = (
    Problem,
    |info| !["", "0"].contains(&info.get("maxmemory")) && info.get("maxmemory_policy") != "noeviction",
    "`maxmemory-policy` is `{maxmemory_policy}`: when its memory is full, it evicts counters of windows that are still \
     open, and their keys get the whole limit again",
    "`CONFIG SET maxmemory-policy noeviction`, and the same in its configuration file; use a separate server for counters",
);
const SERVER: [Check; 4] = [
    (
        Problem,
        |info| ["2.", "3.", "4.", "5.", "6.0.", "6.1."].iter().any(|old| info.get("redis_version").starts_with(old)),
        "version {redis_version} is too old: shared counters need 6.2 or later",
        "install a later version of Redis, or Valkey",
    ),
    (
        Problem,
        |info| info.get("role") == "slave",
        "it is a replica and cannot count; its master is `{master_host}:{master_port}`",
        "name `{master_host}:{master_port}` in `redis`, or the sentinels that know the master",
    ),
    EVICTION,
    (
        Note,
        |info| info.get("aof_enabled") == "0",
        "it does not log each change (`appendonly no`): a crash loses the usage since its last snapshot",
        "set `appendonly yes` if this loss matters",
    ),
];
const OUTSIDE_CLUSTER: Check = (
    Problem,
    |info| info.get("cluster_enabled") == "1",
    "it is a node of a cluster",
    "write its URL in brackets: `redis = [URL]`",
);
const BEHIND_SENTINELS: Check = (
    Note,
    |info| info.get("min_slaves_good_slaves").is_empty(),
    "it keeps counting while it is cut off from its replicas, even after another master was elected, and for seconds \
     after `SENTINEL FAILOVER`: clients can then use their limits twice",
    "set `min-replicas-to-write` to the number of replicas, and `min-replicas-max-lag 10`",
);
/// A check of `CLUSTER INFO`.
const COMPLETE_CLUSTER: Check = (
    Problem,
    |info| info.get("cluster_state") != "ok" || info.get("cluster_slots_ok") != "16384",
    "the cluster is `{cluster_state}`; {cluster_slots_ok} of 16384 slots are served",
    "see `redis-cli --cluster check HOST:PORT`, and repair with `--cluster fix`",
);

/// Fixes in the gateway's configuration for errors that have one of these words; the first match applies.
const FIXES: [(&str, &str); 14] = [
    ("NOPERM|ACL failure|can't run", "grant the user the rights: `ACL SETUSER NAME on >PASSWORD KEYS RIGHTS`"),
    (
        "DB index|switch database",
        "write a `database` that it has: its setting `databases` is their number, 16 by default, and they are counted from 0",
    ),
    ("NOAUTH", "write `password_file` or `password_env`, and `username` for an ACL user"),
    ("not accept the user", "check `username` and the password; a user without `on` in its ACL is disabled"),
    ("Parse error", "another service listens there: check the address and the port"),
    ("SENTINEL", "it is not a sentinel: name sentinels in `redis`, or remove `sentinel_master`"),
    ("EVALSHA", "it runs no scripts: if it is a sentinel, add `sentinel_master = \"NAME\"`"),
    ("No such master", "set `sentinel_master` to the name in its `sentinel monitor NAME …`"),
    ("cluster support", "it is not a node of a cluster: write its URL without brackets"),
    ("UnknownIssuer|BadSignature", "name the CA that issued its certificate: `ca = \"FILE\"`"),
    (
        "CaUsedAsEndEntity",
        "its certificate is that of an authority (`CA:TRUE`): issue one for the server, and name the authority in `ca`",
    ),
    ("not valid for name", "write `server_name = \"NAME\"` with a name that its certificate has"),
    ("CertificateRequired|HandshakeFailure", "it requires a client certificate: write `certificate` and `private_key`"),
    ("InvalidContentType|corrupt message", "it does not use TLS at this port: write `redis://`, or its TLS port"),
];

/// As [`FIXES`], for errors that may pass without a change of the configuration.
const REACHABILITY_FIXES: [(&str, &str); 2] = [
    ("refused|No such file|denied", "check that it runs and listens there (`bind`, `port`, `unixsocket`)"),
    ("no reply|imed out|end of|reset|roken", "check the address; for TLS write `rediss://`, else write `redis://`"),
];

/// The fix where a sentinel rejects the login.
const SENTINEL_LOGIN: &str = "write the login of the sentinels: `sentinel_password_file` or `sentinel_password_env`, and \
                              `sentinel_username` for an ACL user";

/// The reply to `INFO` or `CLUSTER INFO`.
pub struct Info<'t>(pub &'t str);

impl<'t> Info<'t> {
    fn get(&self, name: &str) -> &'t str {
        self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map_or("", str::trim)
    }

    pub fn run(&self, &(severity, fails, text, fix): &Check) -> Option<Finding> {
        fails(self).then(|| Finding { severity, text: self.fill(text), fix: self.fill(fix) })
    }

    fn fill(&self, template: &str) -> String {
        let (start, fields) = template.split_once('{').unwrap_or((template, ""));
        let fields = fields.split('{').filter_map(|field| field.split_once('}'));
        fields.fold(start.to_owned(), |text, (name, rest)| text + &log_excerpt(self.get(name)) + rest)
    }
}

/// Diagnoses all servers of the configuration, and the right to the names of counters of rules with a `key_format`;
/// `now_ms` is this machine's time.
pub async fn diagnose(
    settings: &StoreConfig,
    formats: &[(&str, &KeyFormat)],
    now_ms: &dyn Fn() -> u64,
) -> Vec<ServerReport> {
    let connector = Connector::new(settings);
    let mut diagnosis = Diagnosis { settings, client: RedisClient::new(settings), now_ms, reports: Vec::new() };
    let mut checks = SERVER.to_vec();
    match &settings.nodes {
        Nodes::Single(_) => checks.push(OUTSIDE_CLUSTER),
        Nodes::Sentinel { nodes, master } => {
            checks.extend([OUTSIDE_CLUSTER, BEHIND_SENTINELS]);
            for node in nodes {
                let opened = connector.open_sentinel(node).await;
                diagnosis.examine("sentinel", opened, &["SENTINEL", "CKQUORUM", master], &[], None).await;
            }
        }
        Nodes::Cluster(seeds) => {
            for node in seeds {
                let opened = connector.open(node).await;
                diagnosis.examine("node", opened, &["CLUSTER", "INFO"], &[COMPLETE_CLUSTER], None).await;
            }
        }
    }
    let has_problem = |report: &ServerReport| report.findings.iter().any(|finding| finding.severity == Problem);
    // Then it is known already why the masters are not found.
    let is_explained = !diagnosis.reports.is_empty() && diagnosis.reports.iter().all(has_problem);
    // Sentinels that reject the login may name a master all the same. Masters of a cluster fail for reasons of their own.
    let has_sentinels = matches!(settings.nodes, Nodes::Sentinel { .. });
    match diagnosis.client.masters(&format!("{}:{{transom-check|", settings.prefix)).await {
        Ok(masters) => {
            for (link, base) in masters {
                match link.get().await {
                    Err(_) if is_explained && has_sentinels => {}
                    opened => diagnosis.examine("server", opened, &["INFO"], &checks, Some(base)).await,
                }
            }
        }
        Err(_) if is_explained => {}
        Err(why) => diagnosis.examine("cluster", Err(why), &[], &[], None).await,
    }
    if !diagnosis.reports.iter().any(has_problem) {
        for (rule, format) in formats {
            diagnosis.examine_names(rule, format).await;
        }
    }
    diagnosis.reports
}

struct Diagnosis<'s> {
    settings: &'s StoreConfig,
    client: RedisClient,
    now_ms: &'s dyn Fn() -> u64,
    reports: Vec<ServerReport>,
}

impl Diagnosis<'_> {
    /// Checks the reply of a server to a command, and, if it has the counters with key base `base`, counts there.
    async fn examine(&mut self, role: &str, opened: Opened, command: &[&str], checks: &[Check], base: Option<String>) {
        let (mut subject, mut findings) = (role.to_owned(), Vec::new());
        let examined: Result<(), String> = async {
            let connection = opened?;
            let node = &connection.node;
            subject = format!("{role} {node}");
            let query = redis::Cmd::new().arg(command).to_owned();
            let reply = async { connection.call(query).await.map_err(|failure| connection.describe(&failure)) };
            match with_timeout(node, REPLY_TIMEOUT, reply).await {
                // Counting needs neither this command nor a quorum. An administrator may have renamed the command.
                Err(why) if command == ["INFO"] && (why.contains("NOPERM") || why.contains("unknown command")) => {
                    findings.push(unchecked(&why));
                }
                Err(why) if why.contains("NOPERM") || why.contains("NOQUORUM") => {
                    findings.push(Finding { severity: Warning, ..self.error(&why, KEYS) });
                }
                reply => {
                    let reply = reply?;
                    let info = Info(reply_text(&reply).unwrap_or_default());
                    if !info.get("role").is_empty() {
                        subject += &info.fill(": {role}, replicas: {connected_slaves}, Redis version: {redis_version}");
                    }
                    findings.extend(checks.iter().filter_map(|check| info.run(check)));
                }
            }
            if let (Some(base), true) = (base, findings.iter().all(|finding| finding.severity > Problem)) {
                findings.extend(with_timeout(node, REPLY_TIMEOUT, self.count(base.clone(), base)).await?);
            }
            Ok(())
        }
        .await;
        findings.extend(examined.err().map(|why| match self.error(&why, KEYS) {
            error if role == "sentinel" && is_login_error(&why) => Finding { fix: SENTINEL_LOGIN.to_owned(), ..error },
            error => error,
        }));
        findings.sort_by_key(|finding| finding.severity);
        self.reports.push(ServerReport { subject, findings });
    }

    /// Counts by a name of a rule with a `key_format`.
    async fn examine_names(&mut self, rule: &str, format: &KeyFormat) {
        let probe = format!("{}:{{transom-check|0}}", self.settings.prefix);
        let counted = timeout(REPLY_TIMEOUT, self.count(probe, format.name("transom-check"))).await;
        let counted = counted.unwrap_or_else(|_elapsed| Err(format!("no reply within {REPLY_TIMEOUT:?}")));
        let keys = format!("~PREFIX:* ~{}*", format.head());
        let findings = counted.err().map(|why| self.error(&why, &keys)).into_iter().collect();
        self.reports.push(ServerReport { subject: format!("names of the rule `{rule}`"), findings });
    }

    /// Acquires and refunds tokens, by every command of the scripts. Returns the finding about the server's clock.
    /// `probe` is the key base by which the clock is read.
    async fn count(&self, probe: String, base: String) -> Result<Option<Finding>, String> {
        let before_ms = (self.now_ms)();
        let server_ms = self.client.probe_one(probe).await?;
        let after_ms = (self.now_ms)();
        let (key_base, limit, ceiling, need, want) = (base.into(), 1000, TOKENS_MAX, 1, 1);
        // The number of a window that no other check has used.
        let (number, end_ms, next_end_ms) = (server_ms, server_ms + 10_000, server_ms + 20_000);
        let window = StoreWindow { kind: WindowKind::Plain, number, end_ms, next_end_ms };
        let (used_min, need_once_refused, reserved_after_ms, refund_used_max, computed_ms) = (0, 0, 0, None, 0);
        let requests = [CounterRequest {
            key_base,
            window,
            limit,
            ceiling,
            need,
            want,
            used_min,
            need_once_refused,
            reserved_after_ms,
            refund_used_max,
            counter: None,
            computed_ms,
            generation: 0,
        }];
        let acquired = self.client.acquire(&requests, server_ms).await?;
        let AcquireReply::Granted { counters, .. } = acquired else {
            return Err(format!("unexpected reply to a script: {acquired:?}"));
        };
        let mut refunds = refunds_of(&requests, &counters);
        // The script takes a counter that it may not read for one that has expired.
        if self.client.refund(&refunds).await? != 1 {
            return Err("NOPERM: tokens cannot be refunded, which needs GET".to_owned());
        }
        refunds.iter_mut().for_each(|refund| refund.deletes = true);
        self.client.refund(&refunds).await?;
        Ok(clock_finding(server_ms, before_ms, after_ms))
    }

    /// A problem with its fix. `keys` are the keys that the user must have the right to.
    fn error(&self, why: &str, keys: &str) -> Finding {
        let known = FIXES.iter().chain(&REACHABILITY_FIXES).find(|(words, _)| has_word(why, words));
        let fix = known.map_or("", |(_, fix)| fix).replace("KEYS", keys).replace("RIGHTS", COMMANDS);
        let fix = fix.replace("PREFIX", &self.settings.prefix);
        Finding { severity: Problem, text: log_excerpt(why), fix }
    }
}

/// What to change in the configuration for this error, if that is certain and needs no details; else empty. `why` begins with
/// "sentinel" for the error of one.
pub fn settings_fix(why: &str) -> &'static str {
    if why.starts_with("sentinel ") && is_login_error(why) {
        return SENTINEL_LOGIN;
    }
    let known = FIXES.iter().find(|(words, _)| has_word(why, words));
    known.filter(|(_, fix)| !fix.contains("KEYS")).map_or("", |(_, fix)| fix)
}

fn is_login_error(why: &str) -> bool {
    has_word(why, "NOAUTH|not accept the user")
}

/// Whether a text has one of the words, which are separated by `|`.
fn has_word(text: &str, words: &str) -> bool {
    words.split('|').any(|word| text.contains(word))
}

/// The finding about a server that does not execute `INFO`.
fn unchecked(why: &str) -> Finding {
    Finding {
        severity: Warning,
        text: format!("its version, role and eviction policy are not checked: {}", log_excerpt(why)),
        fix: "allow `INFO` (`+info`, and no `rename-command INFO`), or see that `maxmemory-policy` is `noeviction`"
            .to_owned(),
    }
}

/// The finding about a server's clock that was read between two times of this machine.
fn clock_finding(server_ms: u64, before_ms: u64, after_ms: u64) -> Option<Finding> {
    let (ahead_ms, behind_ms) = (server_ms.saturating_sub(after_ms), before_ms.saturating_sub(server_ms));
    let (side, off_ms) = if ahead_ms > 0 { ("ahead of", ahead_ms) } else { ("behind", behind_ms) };
    let seconds = off_ms as f64 / 1e3;
    (off_ms > CLOCK_DIFFERENCE_MAX_MS).then(|| Finding {
        severity: Warning,
        text: format!("its clock is {seconds:.3} s {side} this machine's; windows follow the server's clock"),
        fix: "synchronize both clocks (NTP)".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "# Server\r\nredis_version:8.2.3\r\nrole:master\r\nconnected_slaves:1\r\nmaxmemory:0\r\n\
                        maxmemory_policy:allkeys-lru\r\naof_enabled:1\r\n";

    fn findings(info: &str) -> Vec<Finding> {
        SERVER.iter().filter_map(|check| Info(info).run(check)).collect()
    }

    #[test]
    fn the_suggested_rights_cover_the_commands_of_the_scripts() {
        let scripts =
            [include_str!("acquire.lua"), include_str!("refund.lua"), include_str!("shared_map.lua")].concat();
        let calls: Vec<&str> = scripts.split("call('").skip(1).filter_map(|rest| rest.split('\'').next()).collect();
        assert!(calls.len() > 5);
        for call in calls {
            let right = format!("+{}", call.to_lowercase());
            assert!(COMMANDS.split(' ').any(|known| known == right), "{right}");
        }
    }

    #[test]
    fn a_good_server_has_no_findings() {
        assert_eq!(findings(GOOD), []);
    }

    #[test]
    fn old_versions_are_a_problem() {
        for (version, problems) in [("5.0.14", 1), ("6.0.20", 1), ("6.2.0", 0), ("10.0.0", 0), ("unstable", 0)] {
            let found = findings(&GOOD.replace("8.2.3", version));
            assert_eq!(found.iter().filter(|finding| finding.severity == Problem).count(), problems, "{version}");
        }
    }

    #[test]
    fn a_policy_that_evicts_is_a_problem_if_memory_is_limited() {
        for (policy, found) in [("noeviction", 0), ("volatile-ttl", 1), ("allkeys-lru", 1), ("volatile-lru", 1)] {
            let info = GOOD.replace("maxmemory:0", "maxmemory:1000").replace("allkeys-lru", policy);
            assert_eq!(findings(&info).len(), found, "{policy}");
            assert_eq!(Info(&info).run(&EVICTION).is_some(), found == 1);
        }
    }

    #[test]
    fn the_texts_of_a_finding_contain_what_the_server_reports() {
        let info = GOOD.replace("role:master", "role:slave\r\nmaster_host:10.0.0.1\r\nmaster_port:6379");
        let found = findings(&info);
        assert_eq!((found.len(), found[0].severity), (1, Problem));
        assert!(found[0].text.ends_with("its master is `10.0.0.1:6379`"), "{}", found[0].text);
        assert!(found[0].fix.starts_with("name `10.0.0.1:6379` in"), "{}", found[0].fix);
    }

    #[test]
    fn the_clock_difference_excludes_the_round_trip() {
        assert_eq!(clock_finding(10_000, 9_000, 9_500), None);
        assert_eq!(clock_finding(8_000, 9_000, 9_500), None);
        assert!(clock_finding(10_501, 9_000, 9_500).unwrap().text.contains("1.001 s ahead of"));
        assert!(clock_finding(5_750, 9_000, 9_500).unwrap().text.contains("3.250 s behind"));
    }
}
