//! Maps that gateways share: followers of one map, called directly, on real servers.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::sleep;
use transom_config::redis::{Nodes, StoreConfig};
use transom_runtime::clock::Clock;
use transom_store::map_follower::{ChangeError, Entry, MapCopy, MapFollower, MapObserver, SharedMap, Update};
use transom_store::shared_map::{Changed, MapChange, Position, Precondition, StoredMap, entries_of_a_call};

use crate::support::DEADLINE;
use crate::support::redis::RedisServer;
use crate::support::redis_client::{run_on_worker, single_server, tcp_node};
use crate::support::redis_cluster::RedisCluster;
use crate::support::sentinel::{MASTER, Sentinels};

const STATE: &str = "transom:{#map|clients}:state";
const ENTRIES: &str = "transom:{#map|clients}:entries";
const CHANGES: &str = "transom:{#map|clients}:changes";
const VERSIONS: &str = "transom:{#map|clients}:versions";

/// A gateway that follows the map `clients`.
struct Follower {
    map: SharedMap,
    counts: Counts,
    stop: oneshot::Sender<()>,
    running: JoinHandle<()>,
}

/// How often the copy was loaded, and was found to be as the store.
#[derive(Clone, Default)]
struct Counts {
    loaded: Rc<Cell<u32>>,
    synchronized: Rc<Cell<u32>>,
}

impl MapObserver for Counts {
    fn updated(&mut self, update: Update<'_>, _copy: &MapCopy) {
        if matches!(update, Update::All(_)) {
            self.loaded.set(self.loaded.get() + 1);
        }
    }

    fn polled(&mut self, is_synchronized: bool) {
        self.synchronized.set(self.synchronized.get() + u32::from(is_synchronized));
    }
}

impl Follower {
    fn start(settings: &StoreConfig) -> Follower {
        Follower::with_copy(settings, MapCopy::default())
    }

    fn with_copy(settings: &StoreConfig, copy: MapCopy) -> Follower {
        let (follower, map) = MapFollower::new(settings, "clients", copy, Clock::system());
        let (counts, (stop, stopped)) = (Counts::default(), oneshot::channel());
        let mut observer = counts.clone();
        let running = spawn_local(async move { follower.run(&mut observer, stopped).await });
        Follower { map, counts, stop, running }
    }

    async fn end(self) -> MapCopy {
        drop(self.stop);
        self.running.await.unwrap();
        self.map.lock().clone()
    }

    async fn put(&self, name: &str, text: &str) -> u64 {
        match self.map.change(name, Some(text.to_owned()), Precondition::None).await {
            Ok(Changed::Changed { version }) => version,
            other => panic!("{other:?}"),
        }
    }

    /// As [`Follower::put`], as soon as the store replies.
    async fn put_with_retries(&self, name: &str, text: &str) {
        within_deadline("the store can be changed", async || {
            self.map.change(name, Some(text.to_owned()), Precondition::None).await.is_ok()
        })
        .await;
    }

    fn text(&self, name: &str) -> Option<Arc<str>> {
        self.map.get(name).map(|entry| entry.text)
    }

    async fn wait_for(&self, name: &str, text: Option<&str>) {
        within_deadline(&format!("{name} is {text:?}"), async || self.text(name).as_deref() == text).await;
    }

    /// Waits until the copy is as the store is from now on.
    async fn synchronize(&self) {
        let target = self.counts.synchronized.get() + 2;
        within_deadline("the copy is as the store", async || self.counts.synchronized.get() >= target).await;
    }
}

async fn within_deadline(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let start = std::time::Instant::now();
    while !holds().await {
        assert!(start.elapsed() < DEADLINE, "not within {DEADLINE:?}: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// A copy with entries as of a version that the store has not.
fn copy_of(epoch: &str, names: &[&str]) -> MapCopy {
    let mut copy = MapCopy::default();
    for (n, name) in names.iter().enumerate() {
        let entry = Entry { version: 10 + n as u64, text: "copied".into() };
        copy.position = Position { epoch: epoch.to_owned(), version: entry.version };
        copy.entries.insert((*name).into(), entry);
    }
    copy
}

#[test]
fn a_change_is_in_effect_where_it_was_made_and_soon_elsewhere() {
    let redis = RedisServer::start();
    run_on_worker(async {
        let (a, b) = (Follower::start(&single_server(&redis)), Follower::start(&single_server(&redis)));
        let first = a.put("acme", "{\"plan\":\"basic\"}").await;
        assert_eq!(a.map.get("acme"), Some(Entry { version: first, text: "{\"plan\":\"basic\"}".into() }));
        b.wait_for("acme", Some("{\"plan\":\"basic\"}")).await;
        let second = b.put("acme", "{\"plan\":\"pro\"}").await;
        assert!(second > first);
        b.put("initech", "{}").await;
        a.wait_for("initech", Some("{}")).await;
        assert_eq!(a.text("acme").as_deref(), Some("{\"plan\":\"pro\"}"));
        let removed = a.map.change("acme", None, Precondition::None).await;
        assert!(matches!(removed, Ok(Changed::Changed { .. })));
        b.wait_for("acme", None).await;
        let again = a.map.change("acme", None, Precondition::None).await;
        assert_eq!(again, Ok(Changed::Refused { current: None }));
        // One load of the empty map, which the first change created; the rest are changes.
        assert_eq!((a.counts.loaded.get(), b.counts.loaded.get()), (1, 1));
        assert_eq!(redis.cli(&["HLEN", ENTRIES]), "1");
    });
}

#[test]
fn of_two_changes_of_the_same_version_one_is_made() {
    let redis = RedisServer::start();
    run_on_worker(async {
        let (a, b) = (Follower::start(&single_server(&redis)), Follower::start(&single_server(&redis)));
        let mut version = a.put("acme", "0").await;
        b.wait_for("acme", Some("0")).await;
        for round in 1..=20 {
            let change = |of: &Follower, text: String| {
                let map = of.map.clone();
                async move { map.change("acme", Some(text), Precondition::Version(version)).await.unwrap() }
            };
            let both = tokio::join!(change(&a, format!("a{round}")), change(&b, format!("b{round}")));
            let (made, text, current) = match both {
                (Changed::Changed { version }, Changed::Refused { current }) => (version, format!("a{round}"), current),
                (Changed::Refused { current }, Changed::Changed { version }) => (version, format!("b{round}"), current),
                both => panic!("{both:?}"),
            };
            assert_eq!(current, Some(made));
            a.wait_for("acme", Some(&text)).await;
            b.wait_for("acme", Some(&text)).await;
            version = made;
        }
        let absent = a.map.change("acme", Some("x".into()), Precondition::Absent).await;
        assert_eq!(absent, Ok(Changed::Refused { current: Some(version) }));
        let existing = a.map.change("other", Some("x".into()), Precondition::Exists).await;
        assert_eq!(existing, Ok(Changed::Refused { current: None }));
    });
}

#[test]
fn the_copy_outlasts_the_store_and_refills_it() {
    let mut redis = RedisServer::start();
    run_on_worker(async {
        let (a, b) = (Follower::start(&single_server(&redis)), Follower::start(&single_server(&redis)));
        a.put("acme", "1").await;
        a.put("gone", "1").await;
        a.map.change("gone", None, Precondition::None).await.unwrap();
        b.wait_for("acme", Some("1")).await;
        b.wait_for("gone", None).await;
        redis.kill();
        assert!(a.map.change("acme", None, Precondition::None).await.is_err());
        assert_eq!((a.text("acme").as_deref(), b.text("acme").as_deref()), (Some("1"), Some("1")));
        // The server keeps nothing on disk.
        redis.restart();
        a.put_with_retries("initech", "2").await;
        b.wait_for("initech", Some("2")).await;
        assert_eq!((a.text("acme").as_deref(), b.text("acme").as_deref()), (Some("1"), Some("1")));
        assert_eq!(redis.cli(&["HLEN", ENTRIES]), "2");
        let epoch = redis.cli(&["HGET", STATE, "epoch"]);
        assert_eq!(redis.cli(&["FLUSHALL"]), "OK");
        within_deadline("the map is back", async || redis.cli(&["HLEN", ENTRIES]) == "2").await;
        a.put_with_retries("acme", "3").await;
        b.wait_for("acme", Some("3")).await;
        assert_eq!(redis.cli(&["HGET", STATE, "epoch"]), epoch);
        assert_eq!(b.text("initech").as_deref(), Some("2"));
    });
}

#[test]
fn a_copy_of_an_earlier_process_is_used_until_the_store_is_read() {
    let mut redis = RedisServer::start();
    run_on_worker(async {
        let settings = single_server(&redis);
        let first = Follower::start(&settings);
        first.put("acme", "1").await;
        let copy = first.end().await;
        let other = Follower::start(&settings);
        other.put("initech", "2").await;
        other.map.change("acme", None, Precondition::None).await.unwrap();
        let restarted = Follower::with_copy(&settings, copy.clone());
        assert_eq!(restarted.text("acme").as_deref(), Some("1"));
        restarted.wait_for("initech", Some("2")).await;
        assert_eq!((restarted.text("acme"), restarted.counts.loaded.get()), (None, 0));
        // An old copy does not overrule a gateway that knew more.
        drop(restarted);
        let stale = Follower::with_copy(&settings, copy.clone());
        redis.cli(&["FLUSHALL"]);
        stale.wait_for("initech", Some("2")).await;
        assert_eq!(stale.text("acme"), None);
        // Without one, it is all that is left.
        stale.end().await;
        other.end().await;
        redis.restart();
        let alone = Follower::with_copy(&settings, copy);
        within_deadline("the map is back", async || redis.cli(&["HLEN", ENTRIES]) == "1").await;
        alone.put_with_retries("acme", "3").await;
    });
}

#[test]
fn a_refill_that_was_not_completed_is_begun_anew() {
    let redis = RedisServer::start();
    run_on_worker(async {
        let settings = single_server(&redis);
        redis.cli(&["HSET", STATE, "epoch", "e", "version", "9", "floor", "9", "filler", "other", "until", "1"]);
        redis.cli(&["HSET", ENTRIES, "rest", "1"]);
        let unaware = Follower::start(&settings);
        let refused = unaware.map.change("acme", Some("1".to_owned()), Precondition::None).await;
        assert!(matches!(refused, Err(ChangeError::NotMade(why)) if why.contains("refills")));
        let follower = Follower::with_copy(&settings, copy_of("e", &["acme", "initech"]));
        unaware.wait_for("initech", Some("copied")).await;
        follower.synchronize().await;
        assert_eq!((unaware.text("acme").as_deref(), unaware.text("rest")), (Some("copied"), None));
        assert_eq!(redis.cli(&["HEXISTS", STATE, "filler"]), "0");
    });
}

#[test]
fn a_gateway_that_lacks_changes_loads_the_whole_map() {
    let redis = RedisServer::start();
    run_on_worker(async {
        let settings = single_server(&redis);
        let a = Follower::start(&settings);
        for name in ["acme", "initech", "hooli"] {
            a.put(name, "1").await;
        }
        let copy = a.map.lock().clone();
        // A removal that the store has forgotten.
        a.map.change("acme", None, Precondition::None).await.unwrap();
        // Less than the version of the map: there was another change since.
        redis.cli(&["HSET", STATE, "floor", &copy.position.version.to_string()]);
        redis.cli(&["ZREM", CHANGES, "acme"]);
        redis.cli(&["ZREMRANGEBYRANK", VERSIONS, "0", "-2"]);
        let b = Follower::with_copy(&settings, copy);
        b.wait_for("acme", None).await;
        assert_eq!(b.counts.loaded.get(), 1);
        // The master that was promoted lacks the last change, with and without another one since: it is made again.
        for (other, text) in [(None, "1"), (Some("other"), "2")] {
            let before = redis.cli(&["HGET", STATE, "version"]);
            a.put("lost", text).await;
            b.wait_for("lost", Some(text)).await;
            redis.cli(&["EVAL", REVERT, "4", STATE, ENTRIES, CHANGES, VERSIONS, "lost", &before]);
            if let Some(other) = other {
                let c = Follower::start(&settings);
                c.put(other, "1").await;
                b.wait_for(other, Some("1")).await;
            }
            within_deadline("the change is back", async || redis.cli(&["HGET", ENTRIES, "lost"]) == text).await;
            a.synchronize().await;
            b.synchronize().await;
            assert_eq!((a.text("lost").as_deref(), b.text("lost").as_deref()), (Some(text), Some(text)));
        }
        // Another map takes the place of this one.
        redis.cli(&["HDEL", ENTRIES, "hooli"]);
        redis.cli(&["ZREM", CHANGES, "hooli"]);
        redis.cli(&["HSET", STATE, "epoch", "other", "floor", "0"]);
        a.wait_for("hooli", None).await;
        b.wait_for("hooli", None).await;
        assert_eq!(a.text("initech").as_deref(), Some("1"));
    });
}

/// Removes all trace of the last change.
const REVERT: &str = "redis.call('HSET', KEYS[1], 'version', ARGV[2]) redis.call('HDEL', KEYS[2], ARGV[1]) \
                      redis.call('ZREMRANGEBYRANK', KEYS[4], -1, -1) return redis.call('ZREM', KEYS[3], ARGV[1])";

/// Writes a copy into a store that has just lost the map, before the gateways notice.
async fn refill_with(redis: &RedisServer, settings: &StoreConfig, copy: &MapCopy) {
    let stored = StoredMap::new(settings, "clients");
    let next_entries = |after: Option<&str>| {
        let entries = copy.entries.iter().skip_while(|(name, _)| after.is_some_and(|after| &***name <= after));
        entries_of_a_call(entries.map(|(name, entry)| (name, entry.version, &entry.text)))
    };
    within_deadline("the copy is written first", async || {
        redis.cli(&["FLUSHALL"]);
        stored.fill("other", &copy.position, next_entries).await == Ok(Some(()))
    })
    .await;
}

#[test]
fn a_refill_by_a_gateway_that_knows_less_undoes_no_change() {
    let redis = RedisServer::start();
    run_on_worker(async {
        let settings = single_server(&redis);
        let a = Follower::start(&settings);
        for name in ["acme", "removed", "both"] {
            a.put(name, "valid").await;
        }
        let before = a.map.lock().clone();
        a.put("acme", "revoked").await;
        a.map.change("removed", None, Precondition::None).await.unwrap();
        a.put("both", "1").await;
        let holds = |follower: &Follower| {
            (follower.text("acme").as_deref(), follower.text("removed")) == (Some("revoked"), None)
        };
        refill_with(&redis, &settings, &before).await;
        let unaware = Follower::start(&settings);
        within_deadline("the store has the revocation again", async || {
            assert!(holds(&a), "the gateway that knows of the revocation never forgets it");
            redis.cli(&["HGET", ENTRIES, "acme"]) == "revoked" && holds(&unaware)
        })
        .await;
        unaware.wait_for("both", Some("1")).await;

        // The same, and the refilled map was changed before a gateway that knows more reads it.
        refill_with(&redis, &settings, &before).await;
        let stored = StoredMap::new(&settings, "clients");
        for name in ["both", "later"] {
            stored.change(name, Some("2"), Precondition::None, None).await.unwrap();
        }
        within_deadline("the store has both histories", async || {
            assert!(holds(&a), "the gateway that knows of the revocation never forgets it");
            redis.cli(&["HGET", ENTRIES, "acme"]) == "revoked" && holds(&unaware)
        })
        .await;
        for follower in [&a, &unaware] {
            follower.wait_for("later", Some("2")).await;
            follower.wait_for("both", Some("2")).await;
        }
        assert_eq!(redis.cli(&["HLEN", ENTRIES]), "3");
    });
}

#[test]
fn of_two_histories_the_later_one_holds_unless_the_other_is_in_use() {
    let redis = RedisServer::start();
    run_on_worker(async {
        let settings = single_server(&redis);
        let a = Follower::start(&settings);
        a.put("acme", "1").await;
        let mut other = copy_of("other", &["initech"]);
        refill_with(&redis, &settings, &other).await;
        within_deadline("the later history is back", async || redis.cli(&["HKEYS", ENTRIES]) == "acme").await;
        assert_eq!(a.text("acme").as_deref(), Some("1"));
        // A later history.
        other.position.version = a.map.lock().position.version + 1;
        refill_with(&redis, &settings, &other).await;
        a.wait_for("initech", Some("copied")).await;
        assert_eq!(a.text("acme"), None);
        // A gateway that has only a copy of a later history waits, as it does where the store has no map.
        a.end().await;
        let earlier = copy_of("earlier", &["acme"]);
        refill_with(&redis, &settings, &earlier).await;
        let copied = Follower::with_copy(&settings, other.clone());
        let refused = copied.map.change("acme", Some("1".to_owned()), Precondition::None).await;
        assert!(matches!(&refused, Err(ChangeError::NotMade(why)) if why.contains("has lost")), "{refused:?}");
        assert_eq!(
            (redis.cli(&["HGET", STATE, "epoch"]), redis.cli(&["HKEYS", ENTRIES])),
            ("earlier".into(), "acme".into())
        );
        let a = Follower::start(&settings);
        a.put("acme", "2").await;
        copied.wait_for("acme", Some("2")).await;
        assert_eq!(copied.text("initech"), None);
        copied.end().await;
        // Of a map that is in use, an earlier history stays.
        let third = copy_of("third", &["hooli"]);
        let stored = StoredMap::new(&settings, "clients");
        refill_with(&redis, &settings, &third).await;
        stored.change("hooli", Some("2"), Precondition::None, None).await.unwrap();
        a.wait_for("hooli", Some("2")).await;
        assert_eq!(a.text("initech"), None);
    });
}

#[test]
fn a_gateway_that_knows_nothing_leaves_an_empty_store_to_others_first() {
    let redis = RedisServer::start();
    run_on_worker(async {
        let settings = single_server(&redis);
        let a = Follower::start(&settings);
        a.put("acme", "1").await;
        for round in 0..3 {
            redis.cli(&["FLUSHALL"]);
            let unaware = Follower::start(&settings);
            unaware.put("initech", &round.to_string()).await;
            a.wait_for("initech", Some(&round.to_string())).await;
            assert_eq!((a.text("acme").as_deref(), unaware.text("acme").as_deref()), (Some("1"), Some("1")));
        }
    });
}

#[test]
fn a_large_map_is_read_and_refilled_in_pages() {
    let redis = RedisServer::start();
    let text = |n: usize| format!("{{\"plan\":\"basic\",\"keys\":[\"{n:064x}\"]}}");
    let mut copy = MapCopy::default();
    for n in 0..100_000 {
        let name: Arc<str> = format!("client-{n:06}").into();
        copy.entries.insert(name, Entry { version: 1 + n as u64, text: text(n).into() });
    }
    copy.position = Position { epoch: "e".into(), version: 100_000 };
    run_on_worker(async {
        let settings = single_server(&redis);
        let next_entries = |after: Option<&str>| -> Vec<MapChange> {
            let entries = copy.entries.iter().skip_while(|(name, _)| after.is_some_and(|after| &***name <= after));
            entries_of_a_call(entries.map(|(name, entry)| (name, entry.version, &entry.text)))
        };
        let filled = StoredMap::new(&settings, "clients").fill("me", &copy.position, next_entries).await;
        assert_eq!(filled, Ok(Some(())));
        assert!(redis.call_count("evalsha") > 100, "in calls of 1000 entries");
        let before = redis.call_count("evalsha");
        let a = Follower::start(&settings);
        within_deadline("the map is loaded", async || a.counts.loaded.get() == 1).await;
        assert!(redis.call_count("evalsha") > before + 100, "in replies of 1000 entries");
        assert!(a.map.lock().entries == copy.entries);
        a.map.change("client-050000", None, Precondition::None).await.unwrap();
        a.put("client-000001", "new").await;
        // A gateway that starts while another one changes entries that it has read already.
        let b = Follower::start(&settings);
        for n in 0..200 {
            a.put(&format!("client-{n:06}"), "newer").await;
        }
        b.wait_for("client-000199", Some("newer")).await;
        assert!(a.map.lock().entries == b.map.lock().entries);
        assert_eq!(a.map.lock().entries.len(), 99_999);
    });
}

#[test]
fn a_promoted_replica_is_followed() {
    let mut master = RedisServer::start();
    let replica = RedisServer::replica_of(&master, "");
    let sentinels = Sentinels::start(&master);
    let nodes = sentinels.ports().into_iter().map(tcp_node).collect();
    let settings = StoreConfig::with_defaults(Nodes::Sentinel { nodes, master: MASTER.to_owned() });
    run_on_worker(async {
        let (a, b) = (Follower::start(&settings), Follower::start(&settings));
        a.put("acme", "1").await;
        b.wait_for("acme", Some("1")).await;
        within_deadline("the replica has the entry", async || replica.cli(&["HGET", ENTRIES, "acme"]) == "1").await;
        master.kill();
        sentinels.wait_for_failover(&replica);
        a.put_with_retries("initech", "2").await;
        b.wait_for("initech", Some("2")).await;
        assert_eq!((b.text("acme").as_deref(), replica.cli(&["HLEN", ENTRIES])), (Some("1"), "2".to_owned()));
    });
}

#[test]
fn a_map_has_one_slot_of_a_cluster_which_may_move() {
    let cluster = RedisCluster::start();
    let settings = StoreConfig::with_defaults(Nodes::Cluster(vec![tcp_node(cluster.nodes[0].port)]));
    let slot = cluster.slot(STATE);
    assert_eq!((cluster.slot(ENTRIES), cluster.slot(CHANGES)), (slot, slot));
    run_on_worker(async {
        let (a, b) = (Follower::start(&settings), Follower::start(&settings));
        a.put("acme", "1").await;
        let from = cluster.owner(slot);
        let to = (from + 1) % 3;
        cluster.begin_slot_move(slot, from, to);
        cluster.migrate_keys(slot, from, to);
        a.put_with_retries("initech", "2").await;
        b.wait_for("initech", Some("2")).await;
        cluster.end_slot_move(slot, from, to);
        a.put_with_retries("hooli", "3").await;
        b.wait_for("hooli", Some("3")).await;
        assert_eq!(b.text("acme").as_deref(), Some("1"));
    });
}
