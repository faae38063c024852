//! What a server's own statements and errors mean for counting on it: problems, risks, notes, each with a fix. Pure.

use super::scripts::TOKENS_MAX;

/// The oldest version with the features that the scripts need: `SET` with `PXAT`.
const VERSION_MIN: Version = Version(6, 2, 0);
/// The first versions without the Lua vulnerabilities of October 2025 (CVE-2025-49844 and related).
const FIXED_REDIS: [Version; 5] =
    [Version(6, 2, 20), Version(7, 2, 11), Version(7, 4, 6), Version(8, 0, 4), Version(8, 2, 2)];
const FIXED_VALKEY: [Version; 3] = [Version(7, 2, 11), Version(8, 0, 6), Version(8, 1, 4)];
/// Largest acceptable clock difference.
const CLOCK_DIFFERENCE_MAX_MS: u64 = 1000;
/// Used memory from which on a warning is given, percent.
const MEMORY_FULL_PERCENT: u64 = 90;

/// The ACL rights that the gateway's user needs, in addition to the keys `~PREFIX:*`.
pub const COMMANDS: &str = "+ping +select +eval +evalsha +time +get +mget +exists +set +del +decrby +hmget +hset +pexpireat \
                            +role +info +cluster|slots +cluster|info +asking";

/// How serious a finding is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Severity {
    /// The server cannot be used as it is.
    Problem,
    /// More than the limit may be admitted some day.
    Warning,
    /// For information.
    Note,
}

/// A finding about a server, for the operator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    pub severity: Severity,
    pub text: String,
    /// The fix for an evicting `maxmemory-policy`.
    pub fix: String,
}

impl Finding {
    pub fn problem(text: impl Into<String>, fix: impl Into<String>) -> Finding {
        Finding { severity: Severity::Problem, text: text.into(), fix: fix.into() }
    }

    pub fn warning(text: impl Into<String>, fix: impl Into<String>) -> Finding {
        Finding { severity: Severity::Warning, text: text.into(), fix: fix.into() }
    }

    pub fn note(text: impl Into<String>, fix: impl Into<String>) -> Finding {
        Finding { severity: Severity::Note, text: text.into(), fix: fix.into() }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Version(u32, u32, u32);

impl Version {
    fn parse(text: &str) -> Option<Version> {
        let mut numbers = text.split('.').map(|part| part.parse::<u32>().ok());
        Some(Version(numbers.next()??, numbers.next()??, numbers.next().flatten().unwrap_or(0)))
    }

    /// Whether this version has a fix: `fixed` lists the first fixed version of each series.
    fn includes_fix(self, fixed: &[Version]) -> bool {
        let series = |version: &Version| (version.0, version.1);
        match fixed.iter().find(|version| series(version) == series(&self)) {
            Some(first) => self >= *first,
            None => fixed.last().is_some_and(|last| self > *last),
        }
    }
}

/// The reply to `INFO`.
pub struct Info<'t>(&'t str);

impl<'t> Info<'t> {
    pub fn new(text: &'t str) -> Info<'t> {
        Info(text)
    }

    pub fn get(&self, name: &str) -> Option<&'t str> {
        self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    }

    pub fn number(&self, name: &str) -> u64 {
        self.get(name).and_then(|value| value.parse().ok()).unwrap_or(0)
    }

    pub fn is_master(&self) -> bool {
        self.get("role") == Some("master")
    }

    pub fn in_cluster(&self) -> bool {
        self.number("cluster_enabled") == 1
    }

    fn kind(&self) -> (&'static str, &'t str) {
        let redis = self.get("redis_version").unwrap_or("of unknown version");
        match (self.get("valkey_version"), self.get("dragonfly_version")) {
            (Some(version), _) => ("Valkey", version),
            (_, Some(version)) => ("Dragonfly", version.trim_start_matches("df-v")),
            (None, None) => ("Redis", redis),
        }
    }

    /// Product, version and role, in one line.
    pub fn title(&self) -> String {
        let (kind, version) = self.kind();
        let role = match (self.is_master(), self.number("connected_slaves")) {
            (false, _) => "replica".to_owned(),
            (true, 0) => "master without replicas".to_owned(),
            (true, 1) => "master with 1 replica".to_owned(),
            (true, replicas) => format!("master with {replicas} replicas"),
        };
        format!("{kind} {version}, {role}")
    }

    /// All findings, apart from those about the role in a cluster or sentinel setup.
    pub fn findings(&self) -> Vec<Finding> {
        let mut found = Vec::new();
        self.version(&mut found);
        if !self.is_master() {
            let master = match (self.get("master_host"), self.get("master_port")) {
                (Some(host), Some(port)) => format!("`{host}:{port}`"),
                _ => "its master".to_owned(),
            };
            let text = format!("it is a replica and cannot count; its master is {master}");
            found.push(Finding::problem(
                text,
                format!("name {master} in `redis`, or the sentinels that know the master"),
            ));
        }
        if self.number("loading") == 1 {
            found.push(Finding::problem("it is still loading its data", "wait until loading has finished"));
        }
        self.memory(&mut found);
        self.persistence(&mut found);
        found
    }

    fn version(&self, found: &mut Vec<Finding>) {
        let (kind, text) = self.kind();
        let speaks = self.get("redis_version").and_then(Version::parse);
        if speaks.is_some_and(|version| version < VERSION_MIN) {
            let message = format!("{kind} {text} is too old: shared counters need 6.2 or later");
            found.push(Finding::problem(message, "install a later version of Redis, or Valkey"));
            return;
        }
        let fixed: &[Version] = match kind {
            "Valkey" => &FIXED_VALKEY,
            "Redis" => &FIXED_REDIS,
            _ => return,
        };
        if Version::parse(text).is_some_and(|version| !version.includes_fix(fixed)) {
            let message = format!(
                "{kind} {text}: users who may run scripts can run any code on that machine (CVE-2025-49844), unless \
                 it is a package with the fix"
            );
            let first: Vec<String> = fixed.iter().map(|Version(a, b, c)| format!("{a}.{b}.{c}")).collect();
            let fix = format!("upgrade to {}; until then, do not let other users run scripts", first.join(", "));
            found.push(Finding::warning(message, fix));
        }
    }

    /// The `maxmemory-policy`, if by it the server evicts counters of open windows when its memory is full. Every
    /// counter has an expiry time, so each policy but `noeviction` evicts counters.
    pub fn evicting_policy(&self) -> Option<&'t str> {
        let policy = self.get("maxmemory_policy").filter(|policy| *policy != "noeviction")?;
        (self.number("maxmemory") > 0).then_some(policy)
    }

    fn memory(&self, found: &mut Vec<Finding>) {
        if let Some(policy) = self.evicting_policy() {
            found.push(Finding::problem(eviction_text(policy), EVICTION_FIX));
        }
        let (used, most) = (self.number("used_memory"), self.number("maxmemory"));
        if most == 0 {
            return;
        }
        if used.min(TOKENS_MAX).saturating_mul(100) / most >= MEMORY_FULL_PERCENT {
            let text = format!("{used} of {most} bytes of its memory are used; when it is full, it stops counting");
            found.push(Finding::warning(text, "raise `maxmemory`"));
        }
    }

    fn persistence(&self, found: &mut Vec<Finding>) {
        if self.get("rdb_last_bgsave_status") == Some("err") {
            let text =
                "its last snapshot failed; it may refuse to count until one succeeds (`stop-writes-on-bgsave-error`)";
            let fix =
                "make sure that its disk has free space and is writable, then run `BGSAVE`; its log has the reason";
            found.push(Finding::warning(text, fix));
        }
        if self.get("aof_enabled") == Some("0") {
            let text = "it does not log each change (`appendonly no`): a crash loses the usage since its last snapshot";
            found.push(Finding::note(text, "set `appendonly yes` if this loss matters"));
        }
    }
}

/// The effect of an evicting `maxmemory-policy`.
pub fn eviction_text(policy: &str) -> String {
    format!(
        "`maxmemory-policy` is `{policy}`: when its memory is full, it evicts counters of windows that are still open, and \
         their keys get the whole limit again"
    )
}

/// The fix for an evicting `maxmemory-policy`.
pub const EVICTION_FIX: &str = "`CONFIG SET maxmemory-policy noeviction`, and the same in its configuration file; use a \
                              separate server for counters";

/// The finding about a server's clock that was read between two times of this machine.
pub fn clock_finding(server_ms: u64, before_ms: u64, after_ms: u64) -> Option<Finding> {
    let (ahead, behind) = (server_ms.saturating_sub(after_ms), before_ms.saturating_sub(server_ms));
    let off = ahead.max(behind);
    if off <= CLOCK_DIFFERENCE_MAX_MS {
        return None;
    }
    let side = if ahead > behind { "ahead of" } else { "behind" };
    let text = format!(
        "its clock is {}.{:03} s {side} this machine's; windows follow the server's clock",
        off / 1000,
        off % 1000
    );
    Some(Finding::warning(text, "synchronize both clocks (NTP)"))
}

/// Fixes for errors, by words in the error text; the first match applies. `PREFIX` and `RIGHTS` are replaced.
const FIXES: [(&[&str], &str); 25] = [
    (
        &["NOPERM", "ACL failure", "can't run this command", "No permissions", "cannot be refunded"],
        "grant the user the rights: `ACL SETUSER NAME on >PASSWORD ~PREFIX:* RIGHTS`",
    ),
    (&["NOAUTH"], "it requires a password: write `password_file` or `password_env`, and `username` for an ACL user"),
    (
        &["user and password", "WRONGPASS"],
        "check that `username` exists there (`ACL LIST`) and that the password is correct",
    ),
    (&["UnknownIssuer", "BadSignature"], "name the CA that issued its certificate: `ca = \"FILE\"`"),
    (&["NotValidForName", "not valid for name"], "write a name in `redis` that its certificate is for"),
    (&["NotValidYet", "Expired"], "its certificate is not valid now: renew it, and check the time of this machine"),
    (
        &["CertificateRequired", "HandshakeFailure", "certificate required"],
        "it requires a client certificate: write `certificate` and `private_key`",
    ),
    (&["DB index", "invalid DB"], "write a `database` that it has (`databases` in its configuration)"),
    (&["OOM"], "its memory is full: raise `maxmemory`"),
    (&["READONLY"], "it is a replica: name its master"),
    (&["MASTERDOWN"], "it is a replica that has lost its master: name the master"),
    (&["NOREPLICAS"], "it has fewer replicas than `min-replicas-to-write`: start them"),
    (
        &["MISCONF"],
        "it cannot save its data and accepts no changes: make sure that its disk has free space and is writable, then run \
         `BGSAVE`",
    ),
    (&["DENIED"], "it is in protected mode: set a password there, and `bind` an address that gateways can reach"),
    (&["CLUSTERDOWN"], "the cluster is down: see `CLUSTER INFO` and `CLUSTER NODES`"),
    (&["LOADING"], "wait until it has loaded its data"),
    (&["BUSY"], "another script does not end: run `SCRIPT KILL`"),
    (&["max number of clients"], "it has too many clients: raise `maxclients`"),
    (
        &["unknown command"],
        "counters need scripts: allow this command if the configuration of the server (`rename-command`) or a proxy \
         disables it",
    ),
    (&["refused"], "check that it runs at this port and that its `bind` has an address that this machine can reach"),
    (&["BADVALUE", "WRONGTYPE"], "other data is stored under keys that begin with `PREFIX:`; choose another `prefix`"),
    (&["lookup", "no address"], "check the name: this machine cannot resolve it, see `getent hosts NAME`"),
    (&["No such file"], "check that it runs, with `unixsocket` set to this path"),
    (
        &["Permission denied"],
        "let the gateway's user write to the socket: set `unixsocketperm 770`, and add the user to the group of the socket",
    ),
    (
        &["end of file", "reset by peer", "roken"],
        "it closed the connection: if it uses TLS at this port, write `rediss://`",
    ),
];
/// Checked first for connections over TLS.
const NO_TLS: (&[&str], &str) = (
    &["InvalidContentType", "corrupt message", "no reply"],
    "check that it uses TLS at this port; if not, write `redis://`, or its TLS port (`tls-port`)",
);
const NO_REPLY: (&[&str], &str) = (
    &["no reply", "timed out", "nreachable", "No route"],
    "check the address and firewalls; if it uses TLS at this port, write `rediss://`",
);
/// The fix for unknown errors.
const DEFAULT_FIX: &str =
    "try `redis-cli -u URL PING` by hand on this machine, and check that the server is Redis or Valkey";

/// The finding for an error of a server or of its connection.
pub fn error_finding(message: &str, prefix: &str, by_tls: bool) -> Finding {
    let first = Some(&NO_TLS).filter(|_| by_tls);
    let mut known = first.into_iter().chain(&FIXES).chain([&NO_REPLY]);
    let fix =
        known.find(|(words, _)| words.iter().any(|word| message.contains(word))).map_or(DEFAULT_FIX, |(_, fix)| fix);
    Finding::problem(message, fix.replace("PREFIX", prefix).replace("RIGHTS", COMMANDS))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(info: &str) -> Vec<Severity> {
        Info::new(info).findings().into_iter().map(|finding| finding.severity).collect()
    }

    const GOOD: &str = "# Server\r\nredis_version:8.2.3\r\nrole:master\r\nconnected_slaves:1\r\nmaxmemory:0\r\n\
                        maxmemory_policy:allkeys-lru\r\naof_enabled:1\r\n";

    #[test]
    fn the_suggested_rights_cover_the_commands_of_the_scripts() {
        let scripts = [include_str!("acquire.lua"), include_str!("refund.lua")].concat();
        let calls: Vec<&str> = scripts.split("call('").skip(1).filter_map(|rest| rest.split('\'').next()).collect();
        assert!(calls.len() > 5);
        for call in calls {
            let right = format!("+{}", call.to_lowercase());
            assert!(COMMANDS.split(' ').any(|known| known == right), "{right}");
        }
    }

    #[test]
    fn a_good_server_has_no_findings() {
        assert_eq!(weights(GOOD), []);
        assert_eq!(Info::new(GOOD).title(), "Redis 8.2.3, master with 1 replica");
        let valkey = GOOD.replace("8.2.3", "7.2.4\r\nvalkey_version:8.1.4");
        assert_eq!(
            (weights(&valkey), Info::new(&valkey).title().as_str()),
            (vec![], "Valkey 8.1.4, master with 1 replica")
        );
    }

    #[test]
    fn versions_are_compared_within_their_series() {
        for (version, weights_) in [
            ("6.0.20", vec![Severity::Problem]),
            ("6.2.19", vec![Severity::Warning]),
            ("6.2.20", vec![]),
            ("7.0.15", vec![Severity::Warning]),
            ("7.2.11", vec![]),
            ("8.1.0", vec![Severity::Warning]),
            ("8.2.1", vec![Severity::Warning]),
            ("8.4.0", vec![]),
            ("10.0.0", vec![]),
            ("unstable", vec![]),
        ] {
            assert_eq!(weights(&GOOD.replace("8.2.3", version)), weights_, "{version}");
        }
    }

    #[test]
    fn eviction_is_a_problem_if_memory_is_limited() {
        for (policy, found) in [
            ("noeviction", vec![]),
            ("volatile-ttl", vec![Severity::Problem]),
            ("allkeys-lru", vec![Severity::Problem]),
            ("volatile-lru", vec![Severity::Problem]),
        ] {
            let info = GOOD.replace("maxmemory:0", "maxmemory:1000").replace("allkeys-lru", policy);
            assert_eq!(weights(&info), found, "{policy}");
        }
        let full =
            GOOD.replace("maxmemory:0", "used_memory:900\r\nmaxmemory:1000").replace("allkeys-lru", "noeviction");
        assert_eq!(weights(&full), [Severity::Warning]);
    }

    #[test]
    fn the_finding_for_a_replica_names_its_master() {
        let info = GOOD.replace("role:master", "role:slave\r\nmaster_host:10.0.0.1\r\nmaster_port:6379");
        let found = Info::new(&info).findings();
        assert_eq!((found.len(), found[0].severity), (1, Severity::Problem));
        assert!(found[0].text.contains("`10.0.0.1:6379`") && Info::new(&info).title().ends_with("replica"));
    }

    #[test]
    fn every_error_has_a_fix() {
        for (message, fix) in [
            ("failed to lookup address information: Name or service not known", "getent hosts"),
            ("No such file or directory (os error 2)", "`unixsocket`"),
            ("Permission denied (os error 13)", "unixsocketperm"),
            ("No route to host (os error 113)", "check the address"),
            ("no reply within 1s", "firewall"),
            ("LOADING Redis is loading the dataset in memory", "wait"),
            ("ERR max number of clients reached", "maxclients"),
            ("ERR unknown command 'EVALSHA', with args beginning with: ", "rename-command"),
            ("MISCONF Redis is configured to save RDB snapshots", "BGSAVE"),
            ("WRONGTYPE Operation against a key", "begin with `edge:`"),
            ("NOPERM this user has no permissions", "~edge:* +ping"),
            ("an unknown error", "by hand"),
        ] {
            assert!(
                error_finding(message, "edge", false).fix.contains(fix),
                "{message}: {}",
                error_finding(message, "edge", false).fix
            );
        }
        assert!(error_finding("no reply within 1s", "edge", true).fix.contains("tls-port"));
    }

    #[test]
    fn the_clock_difference_excludes_the_round_trip() {
        assert_eq!(clock_finding(10_000, 9_000, 9_500), None);
        assert_eq!(clock_finding(8_000, 9_000, 9_500), None);
        assert!(clock_finding(10_501, 9_000, 9_500).unwrap().text.contains("1.001 s ahead of"));
        assert!(clock_finding(5_750, 9_000, 9_500).unwrap().text.contains("3.250 s behind"));
    }
}
