//! Whether a server is fit to count for gateways: what follows from what it says of itself.
//!
//! Pure. What is found here is for an operator who is about to rely on the server: what makes it unusable, what makes
//! limits leak, and what is good to know.

use super::scripts::TOKENS_MAX;

/// The oldest version that has what the scripts need: `SET` with `PXAT`.
const LEAST: Version = Version(6, 2, 0);
/// The first versions in which Lua can not be used to run code on the server: CVE-2025-49844 and its neighbours.
const MENDED_REDIS: [Version; 5] =
    [Version(6, 2, 20), Version(7, 2, 11), Version(7, 4, 6), Version(8, 0, 4), Version(8, 2, 2)];
const MENDED_VALKEY: [Version; 3] = [Version(7, 2, 11), Version(8, 0, 6), Version(8, 1, 4)];
/// A clock that differs by more is wrong.
const CLOCK_MS: u64 = 1000;
/// How full its memory may be, in percent.
const FULL: u64 = 90;

/// What a user has to be allowed, beside the keys, `~PREFIX:*`.
pub const COMMANDS: &str = "+ping +select +eval +evalsha +time +get +mget +exists +set +del +decrby +hmget +hset +pexpireat \
                            +role +info +cluster|slots +cluster|info +asking";

/// How much a finding matters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Weight {
    /// It can not be used as it is.
    Problem,
    /// More than the limit may pass some day.
    Warning,
    /// Good to know.
    Note,
}

/// Something about a server, for an operator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    pub weight: Weight,
    pub text: String,
    /// What to do about it.
    pub fix: String,
}

impl Finding {
    pub fn problem(text: impl Into<String>, fix: impl Into<String>) -> Finding {
        Finding { weight: Weight::Problem, text: text.into(), fix: fix.into() }
    }

    pub fn warning(text: impl Into<String>, fix: impl Into<String>) -> Finding {
        Finding { weight: Weight::Warning, text: text.into(), fix: fix.into() }
    }

    pub fn note(text: impl Into<String>, fix: impl Into<String>) -> Finding {
        Finding { weight: Weight::Note, text: text.into(), fix: fix.into() }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Version(u32, u32, u32);

impl Version {
    fn parse(text: &str) -> Option<Version> {
        let mut numbers = text.split('.').map(|part| part.parse::<u32>().ok());
        Some(Version(numbers.next()??, numbers.next()??, numbers.next().flatten().unwrap_or(0)))
    }

    /// Whether it is as new as the version of its own series in which something was mended, or of a later series.
    fn has(self, mended: &[Version]) -> bool {
        let series = |version: &Version| (version.0, version.1);
        match mended.iter().find(|version| series(version) == series(&self)) {
            Some(first) => self >= *first,
            None => mended.last().is_some_and(|last| self > *last),
        }
    }
}

/// What `INFO` says.
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
        let redis = self.get("redis_version").unwrap_or("of a version that it does not tell");
        match (self.get("valkey_version"), self.get("dragonfly_version")) {
            (Some(version), _) => ("Valkey", version),
            (_, Some(version)) => ("Dragonfly", version.trim_start_matches("df-v")),
            (None, None) => ("Redis", redis),
        }
    }

    /// One line about what it is.
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

    /// What follows from all of it but the role in a larger whole.
    pub fn findings(&self) -> Vec<Finding> {
        let mut found = Vec::new();
        self.version(&mut found);
        if !self.is_master() {
            let master = match (self.get("master_host"), self.get("master_port")) {
                (Some(host), Some(port)) => format!("`{host}:{port}`"),
                _ => "its master".to_owned(),
            };
            let text = format!("it is a replica, and takes no counts; its master is {master}");
            found.push(Finding::problem(
                text,
                format!("name {master} in `redis`, or the sentinels that know the master"),
            ));
        }
        if self.number("loading") == 1 {
            found.push(Finding::problem("it is still reading its data", "wait until it is done"));
        }
        self.memory(&mut found);
        self.persistence(&mut found);
        found
    }

    fn version(&self, found: &mut Vec<Finding>) {
        let (kind, text) = self.kind();
        let speaks = self.get("redis_version").and_then(Version::parse);
        if speaks.is_some_and(|version| version < LEAST) {
            let message = format!("{kind} {text} is too old: counters take 6.2 or later");
            found.push(Finding::problem(message, "install a later version of Redis, or Valkey"));
            return;
        }
        let mended: &[Version] = match kind {
            "Valkey" => &MENDED_VALKEY,
            "Redis" => &MENDED_REDIS,
            _ => return,
        };
        if Version::parse(text).is_some_and(|version| !version.has(mended)) {
            let message = format!(
                "{kind} {text}: whoever may run scripts there can run any code on that machine (CVE-2025-49844), unless \
                 it is a package in which that was mended"
            );
            let first: Vec<String> = mended.iter().map(|Version(a, b, c)| format!("{a}.{b}.{c}")).collect();
            let fix = format!("it was mended in {}; let nobody else use scripts until then", first.join(", "));
            found.push(Finding::warning(message, fix));
        }
    }

    /// The `maxmemory-policy`, if the server evicts counters of open windows by it once its memory is full. Every counter
    /// has an expiry time, so each policy but `noeviction` does.
    pub fn evicting_policy(&self) -> Option<&'t str> {
        let policy = self.get("maxmemory_policy").filter(|policy| *policy != "noeviction")?;
        (self.number("maxmemory") > 0).then_some(policy)
    }

    fn memory(&self, found: &mut Vec<Finding>) {
        if let Some(policy) = self.evicting_policy() {
            found.push(Finding::problem(eviction(policy), NOEVICTION));
        }
        let (used, most) = (self.number("used_memory"), self.number("maxmemory"));
        if most == 0 {
            return;
        }
        if used.min(TOKENS_MAX).saturating_mul(100) / most >= FULL {
            let text = format!("{used} of {most} bytes of its memory are used; when it is full, it counts no more");
            found.push(Finding::warning(text, "raise `maxmemory`"));
        }
    }

    fn persistence(&self, found: &mut Vec<Finding>) {
        if self.get("rdb_last_bgsave_status") == Some("err") {
            let text =
                "its last snapshot failed; it may refuse to count until one succeeds (`stop-writes-on-bgsave-error`)";
            let fix = "see that its disk has room and may be written, then `BGSAVE`; why it failed stands in its log";
            found.push(Finding::warning(text, fix));
        }
        if self.get("aof_enabled") == Some("0") {
            let text = "it does not write down each change (`appendonly no`): after a crash it knows what its last snapshot \
                        says, if any, and windows that were open then begin anew";
            found.push(Finding::note(text, "`appendonly yes`, where that matters"));
        }
    }
}

/// What an evicting `maxmemory-policy` does to limits.
pub fn eviction(policy: &str) -> String {
    format!(
        "`maxmemory-policy` is `{policy}`: when its memory is full, it evicts counters of windows that are still open, and \
         their keys get the whole limit again"
    )
}

/// What to do about it.
pub const NOEVICTION: &str = "`CONFIG SET maxmemory-policy noeviction`, and the same in its configuration file; counters \
                              deserve a server of their own";

/// What a clock means that was read between two times of the gateway's.
pub fn clock(server_ms: u64, before_ms: u64, after_ms: u64) -> Option<Finding> {
    let (ahead, behind) = (server_ms.saturating_sub(after_ms), before_ms.saturating_sub(server_ms));
    let off = ahead.max(behind);
    if off <= CLOCK_MS {
        return None;
    }
    let side = if ahead > behind { "ahead of" } else { "behind" };
    let text = format!(
        "its clock is {}.{:03} s {side} this machine's; windows begin and end by the server's",
        off / 1000,
        off % 1000
    );
    Some(Finding::warning(text, "let both follow a time server (NTP)"))
}

/// What to do about an error of a server, or of the way there, by words in it: the first that fits. `PREFIX` and `RIGHTS`
/// stand for what the gateway's are.
const REMEDIES: [(&[&str], &str); 25] = [
    (
        &["NOPERM", "ACL failure", "can't run this command", "No permissions", "given back"],
        "give the user what it takes: `ACL SETUSER NAME on >PASSWORD ~PREFIX:* RIGHTS`",
    ),
    (&["NOAUTH"], "it asks for a password: write `password_file` or `password_env`, and `username` if it is a user's"),
    (
        &["user and password", "WRONGPASS"],
        "see that `username` is a user there (`ACL LIST`) and that the password is his",
    ),
    (&["UnknownIssuer", "BadSignature"], "name the authority that issued its certificate: `ca = \"FILE\"`"),
    (&["NotValidForName", "not valid for name"], "write a name in `redis` that its certificate is for"),
    (
        &["NotValidYet", "Expired"],
        "its certificate is not valid now: renew it, and see that this machine's time is right",
    ),
    (
        &["CertificateRequired", "HandshakeFailure", "certificate required"],
        "it wants to see a certificate of the gateway's: write `certificate` and `private_key`",
    ),
    (&["DB index", "invalid DB"], "write a `database` that it has (`databases` in its configuration)"),
    (&["OOM"], "its memory is full: raise `maxmemory`"),
    (&["READONLY"], "it is a replica: name its master"),
    (&["MASTERDOWN"], "it is a replica that has lost its master: name the master"),
    (&["NOREPLICAS"], "it has fewer replicas than `min-replicas-to-write`: see to them"),
    (
        &["MISCONF"],
        "it can not save its data, and takes no changes meanwhile: see that its disk has room and may be written, then \
         `BGSAVE`",
    ),
    (&["DENIED"], "it is in protected mode: set a password there, and `bind` the addresses that gateways come from"),
    (&["CLUSTERDOWN"], "the cluster does not serve: see `CLUSTER INFO` and `CLUSTER NODES`"),
    (&["LOADING"], "wait until it has read its data"),
    (&["BUSY"], "a script of somebody else's does not end there: `SCRIPT KILL`"),
    (&["max number of clients"], "it has too many clients: raise `maxclients`"),
    (
        &["unknown command"],
        "counters take scripts: if its configuration takes this command away (`rename-command`), or a proxy is in between, \
         let it have it",
    ),
    (&["refused"], "is it running, at this port, and does it `bind` an address that can be reached from here?"),
    (
        &["BADVALUE", "WRONGTYPE"],
        "something else is kept under keys that begin with `PREFIX:`; choose another `prefix`",
    ),
    (&["lookup", "no address"], "is the name right? This machine does not know it: see `getent hosts NAME`"),
    (&["No such file"], "is it running, with `unixsocket` at this path?"),
    (&["Permission denied"], "let the gateway's user write to the socket: `unixsocketperm 770`, and be in its group"),
    (
        &["end of file", "reset by peer", "roken"],
        "it ended the connection: if it speaks TLS at this port, write `rediss://`",
    ),
];
/// Where it is reached by TLS, this comes before all others.
const NO_TLS: (&[&str], &str) = (
    &["InvalidContentType", "corrupt message", "no answer"],
    "does it speak TLS at this port? If not, write `redis://`, or the port at which it does (`tls-port`)",
);
const SILENT: (&[&str], &str) = (
    &["no answer", "timed out", "nreachable", "No route"],
    "is the address right, and is a firewall in between? If it speaks TLS at this port, write `rediss://`",
);
/// Where nothing else is known.
const BY_HAND: &str =
    "try the same by hand, from this machine: `redis-cli -u URL PING`; is it Redis or Valkey that answers?";

/// What an error of a server, or of the way there, means; `by_tls`: it is reached so.
pub fn refusal(said: &str, prefix: &str, by_tls: bool) -> Finding {
    let first = Some(&NO_TLS).filter(|_| by_tls);
    let mut known = first.into_iter().chain(&REMEDIES).chain([&SILENT]);
    let fix = known.find(|(words, _)| words.iter().any(|word| said.contains(word))).map_or(BY_HAND, |(_, fix)| fix);
    Finding::problem(said, fix.replace("PREFIX", prefix).replace("RIGHTS", COMMANDS))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(info: &str) -> Vec<Weight> {
        Info::new(info).findings().into_iter().map(|finding| finding.weight).collect()
    }

    const GOOD: &str = "# Server\r\nredis_version:8.2.3\r\nrole:master\r\nconnected_slaves:1\r\nmaxmemory:0\r\n\
                        maxmemory_policy:allkeys-lru\r\naof_enabled:1\r\n";

    #[test]
    fn the_rights_that_are_advised_are_those_that_scripts_take() {
        let texts = [include_str!("acquire.lua"), include_str!("refund.lua")].concat();
        let calls: Vec<&str> = texts.split("call('").skip(1).filter_map(|rest| rest.split('\'').next()).collect();
        assert!(calls.len() > 5);
        for call in calls {
            let right = format!("+{}", call.to_lowercase());
            assert!(COMMANDS.split(' ').any(|known| known == right), "{right}");
        }
    }

    #[test]
    fn a_good_server_is_left_alone() {
        assert_eq!(weights(GOOD), []);
        assert_eq!(Info::new(GOOD).title(), "Redis 8.2.3, master with 1 replica");
        let valkey = GOOD.replace("8.2.3", "7.2.4\r\nvalkey_version:8.1.4");
        assert_eq!(
            (weights(&valkey), Info::new(&valkey).title().as_str()),
            (vec![], "Valkey 8.1.4, master with 1 replica")
        );
    }

    #[test]
    fn versions_are_weighed_within_their_series() {
        for (version, weights_) in [
            ("6.0.20", vec![Weight::Problem]),
            ("6.2.19", vec![Weight::Warning]),
            ("6.2.20", vec![]),
            ("7.0.15", vec![Weight::Warning]),
            ("7.2.11", vec![]),
            ("8.1.0", vec![Weight::Warning]),
            ("8.2.1", vec![Weight::Warning]),
            ("8.4.0", vec![]),
            ("10.0.0", vec![]),
            ("unstable", vec![]),
        ] {
            assert_eq!(weights(&GOOD.replace("8.2.3", version)), weights_, "{version}");
        }
    }

    #[test]
    fn eviction_matters_where_memory_is_bounded() {
        for (policy, found) in [
            ("noeviction", vec![]),
            ("volatile-ttl", vec![Weight::Problem]),
            ("allkeys-lru", vec![Weight::Problem]),
            ("volatile-lru", vec![Weight::Problem]),
        ] {
            let info = GOOD.replace("maxmemory:0", "maxmemory:1000").replace("allkeys-lru", policy);
            assert_eq!(weights(&info), found, "{policy}");
        }
        let full =
            GOOD.replace("maxmemory:0", "used_memory:900\r\nmaxmemory:1000").replace("allkeys-lru", "noeviction");
        assert_eq!(weights(&full), [Weight::Warning]);
    }

    #[test]
    fn a_replica_names_its_master() {
        let info = GOOD.replace("role:master", "role:slave\r\nmaster_host:10.0.0.1\r\nmaster_port:6379");
        let found = Info::new(&info).findings();
        assert_eq!((found.len(), found[0].weight), (1, Weight::Problem));
        assert!(found[0].text.contains("`10.0.0.1:6379`") && Info::new(&info).title().ends_with("replica"));
    }

    #[test]
    fn whatever_goes_wrong_there_is_something_to_do() {
        for (said, fix) in [
            ("failed to lookup address information: Name or service not known", "getent hosts"),
            ("No such file or directory (os error 2)", "`unixsocket`"),
            ("Permission denied (os error 13)", "unixsocketperm"),
            ("No route to host (os error 113)", "is the address right"),
            ("no answer within 1s", "firewall"),
            ("LOADING Redis is loading the dataset in memory", "wait"),
            ("ERR max number of clients reached", "maxclients"),
            ("ERR unknown command 'EVALSHA', with args beginning with: ", "rename-command"),
            ("MISCONF Redis is configured to save RDB snapshots", "BGSAVE"),
            ("WRONGTYPE Operation against a key", "begin with `edge:`"),
            ("NOPERM this user has no permissions", "~edge:* +ping"),
            ("it speaks in riddles", "by hand"),
        ] {
            assert!(refusal(said, "edge", false).fix.contains(fix), "{said}: {}", refusal(said, "edge", false).fix);
        }
        assert!(refusal("no answer within 1s", "edge", true).fix.contains("tls-port"));
    }

    #[test]
    fn a_clock_is_measured_beyond_the_time_that_asking_took() {
        assert_eq!(clock(10_000, 9_000, 9_500), None);
        assert_eq!(clock(8_000, 9_000, 9_500), None);
        assert!(clock(10_501, 9_000, 9_500).unwrap().text.contains("1.001 s ahead of"));
        assert!(clock(5_750, 9_000, 9_500).unwrap().text.contains("3.250 s behind"));
    }
}
