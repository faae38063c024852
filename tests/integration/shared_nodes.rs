//! The Redis client with several servers: a cluster whose slots move and whose nodes die, a replaced master, and TLS.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use tokio::task::spawn_local;
use tokio::time::sleep;
use transom::config::client_tls::ClientTls;
use transom::config::redis::{Nodes, StoreConfig};
use transom::redis_store::client::{RedisClient, StoreError};
use transom::redis_store::scripts::{CounterRequest, KeyFormat, Refund};

use crate::support::redis::RedisServer;
use crate::support::redis_client::{
    CallOutcomes, acquire_with_retries, expect_granted, plain_request, run_on_worker, single_server, tcp_node,
};
use crate::support::redis_cluster::RedisCluster;
use crate::support::sentinel::{MASTER, Sentinels};
use crate::support::tls::{Issued, RevokingCa};
use crate::support::{DEADLINE, eventually};

/// A store that knows one node of the cluster at first.
fn store_of(cluster: &RedisCluster) -> RedisClient {
    RedisClient::new(&StoreConfig::with_defaults(Nodes::Cluster(vec![tcp_node(cluster.nodes[0].port)])))
}

/// Several tasks request single tokens of each counter, one call per counter, during an action.
async fn load(store: &RedisClient, bases: &[String], during: impl AsyncFnOnce(&dyn Fn() -> u64)) -> Vec<CallOutcomes> {
    let tallies: Rc<RefCell<Vec<CallOutcomes>>> =
        Rc::new(RefCell::new(bases.iter().map(|_| CallOutcomes::default()).collect()));
    let goes_on = Rc::new(Cell::new(true));
    let tasks: Vec<_> = (0..20 * bases.len())
        .map(|task| {
            let (at, store) = (task % bases.len(), store.clone());
            let want: [CounterRequest; 1] = [plain_request(&bases[at], 1, u32::MAX)];
            let (tallies, goes_on) = (Rc::clone(&tallies), Rc::clone(&goes_on));
            spawn_local(async move {
                while goes_on.get() {
                    let said = store.acquire(&want, 0).await;
                    tallies.borrow_mut()[at].add(&said);
                    sleep(Duration::from_millis(if said.is_ok() { 0 } else { 5 })).await;
                }
            })
        })
        .collect();
    let all = Rc::clone(&tallies);
    during(&move || all.borrow().iter().map(|tally| tally.granted).sum()).await;
    goes_on.set(false);
    for task in tasks {
        task.await.unwrap();
    }
    tallies.take()
}

/// Waits until so many more are granted.
async fn more(count: &dyn Fn() -> u64, by: u64) {
    let start = std::time::Instant::now();
    let target = count() + by;
    while count() < target {
        assert!(start.elapsed() < DEADLINE, "nothing is granted any more");
        sleep(Duration::from_millis(2)).await;
    }
}

#[test]
fn each_counter_is_requested_from_its_slots_node() {
    let cluster = RedisCluster::start();
    let store = store_of(&cluster);
    run_on_worker(async {
        store.probe().await.unwrap();
        assert_eq!(store.generation(), 3, "a connection to every master");
        let bases: Vec<String> = (0..30).map(|n| format!("t:{{r|{n}}}:minute")).collect();
        for base in &bases {
            expect_granted(store.acquire(&[plain_request(base, 1, 9)], 0).await.unwrap());
        }
        let (a, b) = ("t:{r|1}:minute", "t:{r|1}:hour");
        assert!(store.is_one_call(a, b) && !store.is_one_call(a, "t:{r|2}:minute"));
        for took in expect_granted(store.acquire(&[plain_request(a, 1, 9), plain_request(b, 1, 9)], 0).await.unwrap()) {
            assert!(took.granted == 1);
        }
        let gifts: Vec<Refund> = bases
            .iter()
            .map(|base| Refund {
                deletes: false,
                base: Rc::from(base.as_str()),
                kind: KeyFormat::Plain,
                number: 1,
                limit: 9,
                tokens: 1,
                only_if_used: None,
            })
            .collect();
        assert_eq!(store.refund(&gifts).await, Ok(30));
        assert!(cluster.nodes.iter().all(|node| node.keys().len() > 1));
        assert_eq!(store.generation(), 3);
    });
}

#[test]
fn a_slot_migration_loses_and_duplicates_no_count() {
    let cluster = RedisCluster::start();
    let store = store_of(&cluster);
    let bases = ["t:{r|a}:minute".to_owned(), "t:{r|a}:hour".to_owned(), "t:{r|b}:minute".to_owned()];
    let slot = cluster.slot(&bases[0]);
    run_on_worker(async {
        let tallies = load(&store, &bases, async |count| {
            more(count, 500).await;
            for _ in 0..2 {
                let from = cluster.owner(slot);
                let to = (from + 1) % 3;
                cluster.begin_slot_move(slot, from, to);
                more(count, 200).await;
                cluster.migrate_keys(slot, from, to);
                more(count, 200).await;
                cluster.end_slot_move(slot, from, to);
                more(count, 200).await;
            }
        })
        .await;
        for (base, tally) in bases.iter().zip(&tallies) {
            let key = format!("{base}:1");
            assert_eq!((tally.unknown, tally.refused), (0, 0), "{base}: {tally:?}");
            tally.assert_consistent_with(cluster.cli(&key, &["GET", &key]).parse().unwrap());
        }
    });
}

#[test]
fn a_killed_node_affects_only_its_slots() {
    let mut cluster = RedisCluster::start();
    let store = store_of(&cluster);
    run_on_worker(async {
        let bases: Vec<String> = (0..30).map(|n| format!("t:{{r|{n}}}")).collect();
        for base in &bases {
            expect_granted(store.acquire(&[plain_request(base, 1, 9)], 0).await.unwrap());
        }
        let lost: Vec<bool> = bases.iter().map(|base| cluster.owner(cluster.slot(base)) == 0).collect();
        assert!(lost.contains(&true) && lost.contains(&false));
        cluster.nodes[0].kill();
        // The node that was configured is the one that is gone.
        for (base, lost) in bases.iter().zip(&lost) {
            let said = store.acquire(&[plain_request(base, 1, 9)], 0).await;
            assert_eq!(matches!(said, Err(StoreError::Unreachable(_))), *lost, "{said:?}");
        }
        assert!(store.probe().await.is_err());
        cluster.nodes[0].restart();
        for base in &bases {
            expect_granted(acquire_with_retries(&store, &[plain_request(base, 1, 9)]).await);
        }
        cluster.wait_until_complete();
        store.probe().await.unwrap();
    });
}

#[test]
fn sentinels_name_the_promoted_master() {
    let mut master = RedisServer::start();
    let replica = RedisServer::replica_of(&master, "");
    let sentinels = Sentinels::start(&master);
    let nodes = sentinels.ports().into_iter().map(tcp_node).collect();
    let store = RedisClient::new(&StoreConfig::with_defaults(Nodes::Sentinel { nodes, master: MASTER.to_owned() }));
    let bases = ["t:{r|a}".to_owned()];
    run_on_worker(async {
        let tallies = load(&store, &bases, async |count| {
            more(count, 100).await;
            assert_eq!(master.integer(&["EXISTS", "t:{r|a}:1"]), 1);
            // The data of the replica remains.
            master.kill();
            sentinels.wait_for_failover(&replica);
            more(count, 100).await;
            store.probe().await.unwrap();
        })
        .await;
        // Writes that the old master had not replicated are lost; the rest works as before.
        let counted = replica.integer(&["GET", "t:{r|a}:1"]) as u64;
        assert!(counted <= tallies[0].granted + tallies[0].unknown, "{counted}: {tallies:?}");
        assert!(counted >= 100);
        assert_eq!(store.generation(), 2);
    });
}

#[test]
fn a_replaced_master_is_abandoned_even_if_it_responds() {
    let master = RedisServer::start();
    let replica = RedisServer::replica_of(&master, "");
    let sentinels = Sentinels::start(&master);
    let nodes: Vec<_> = sentinels.ports().into_iter().map(tcp_node).collect();
    let unknown = RedisClient::new(&StoreConfig::with_defaults(Nodes::Sentinel {
        nodes: nodes.clone(),
        master: "nobody".to_owned(),
    }));
    let store = RedisClient::new(&StoreConfig::with_defaults(Nodes::Sentinel { nodes, master: MASTER.to_owned() }));
    run_on_worker(async {
        let Err(StoreError::Unreachable(why)) = unknown.probe().await else { panic!("there is none") };
        assert!(why.ends_with("does not know a master called `nobody`"), "{why}");
        expect_granted(store.acquire(&[plain_request("t:{a}", 1, 9)], 0).await.unwrap());
        // It hangs until another master is promoted, and does not know of it when it continues.
        master.suspend();
        sentinels.wait_for_failover(&replica);
        master.resume();
        while replica.integer(&["EXISTS", "t:{b}:1"]) == 0 {
            drop(store.acquire(&[plain_request("t:{b}", 1, u32::MAX)], 0).await);
            sleep(Duration::from_millis(5)).await;
        }
    });
}

/// Settings for a server that speaks TLS.
fn secured(redis: &RedisServer, authority: &RevokingCa, identity: Option<&Issued>) -> StoreConfig {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem.as_bytes()).unwrap()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let client = match identity {
        Some(issued) => {
            let chain = vec![CertificateDer::from_pem_slice(issued.pem.as_bytes()).unwrap()];
            let key = PrivateKeyDer::from_pem_slice(issued.key_pem.as_bytes()).unwrap();
            builder.with_client_auth_cert(chain, key).unwrap()
        }
        None => builder.with_no_client_auth(),
    };
    let client = ClientTls::new(client, None, [0; 32]);
    StoreConfig { tls: Some(client), ..single_server(redis) }
}

#[test]
fn a_tls_server_is_used_if_its_certificate_verifies() {
    let (authority, stranger) = (RevokingCa::new(), RevokingCa::new());
    let redis = RedisServer::with_tls(&authority, "tls-auth-clients yes\nrequirepass sesame");
    let issued = authority.issue(&["gateway"]);
    let with_password = |mut settings: StoreConfig| {
        settings.password = Some(transom::config::redis::Secret("sesame".to_owned()));
        RedisClient::new(&settings)
    };
    run_on_worker(async {
        let store = with_password(secured(&redis, &authority, Some(&issued)));
        store.probe().await.unwrap();
        expect_granted(store.acquire(&[plain_request("t:{a}", 1, 9)], 0).await.unwrap());
        let unknown = with_password(secured(&redis, &stranger, Some(&issued)));
        let Err(StoreError::Unreachable(why)) = unknown.probe().await else { panic!("it is a stranger's") };
        assert!(why.contains("TLS: invalid peer certificate"), "{why}");
        assert!(with_password(secured(&redis, &authority, None)).probe().await.is_err());
        let clear = with_password(single_server(&redis));
        assert!(clear.probe().await.is_err());
    });
    eventually("nobody is connected any more", || redis.cli(&["CLIENT", "LIST"]).lines().count() == 1);
}
