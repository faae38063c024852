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
use transom_config::client_tls::ClientTls;
use transom_config::redis::{Nodes, StoreConfig};
use transom_limiter::window_kind::WindowKind;
use transom_store::client::{RedisClient, StoreError};
use transom_store::scripts::{CounterRequest, Refund};

use crate::support::redis::RedisServer;
use crate::support::redis_client::{
    CallOutcomes, acquire_with_retries, expect_granted, plain_request, run_on_worker, single_server, tcp_node,
};
use crate::support::redis_cluster::RedisCluster;
use crate::support::sentinel::{MASTER, Sentinels};
use crate::support::test_ca::{Issued, TestCa};
use crate::support::{DEADLINE, eventually};

/// A client that is configured with one node of the cluster.
fn client_of(cluster: &RedisCluster) -> RedisClient {
    RedisClient::new(&StoreConfig::with_defaults(Nodes::Cluster(vec![tcp_node(cluster.nodes[0].port)])))
}

/// Several tasks request single tokens of each counter, one call per counter, during an action.
async fn load(store: &RedisClient, bases: &[String], during: impl AsyncFnOnce(&dyn Fn() -> u64)) -> Vec<CallOutcomes> {
    let outcomes: Rc<RefCell<Vec<CallOutcomes>>> =
        Rc::new(RefCell::new(bases.iter().map(|_| CallOutcomes::default()).collect()));
    let running = Rc::new(Cell::new(true));
    let tasks: Vec<_> = (0..20 * bases.len())
        .map(|task| {
            let (at, store) = (task % bases.len(), store.clone());
            let request: [CounterRequest; 1] = [plain_request(&bases[at], 1, u32::MAX)];
            let (outcomes, running) = (Rc::clone(&outcomes), Rc::clone(&running));
            spawn_local(async move {
                while running.get() {
                    let result = store.acquire(&request, 0).await;
                    outcomes.borrow_mut()[at].add(&result);
                    sleep(Duration::from_millis(if result.is_ok() { 0 } else { 5 })).await;
                }
            })
        })
        .collect();
    let all = Rc::clone(&outcomes);
    during(&move || all.borrow().iter().map(|outcome| outcome.granted).sum()).await;
    running.set(false);
    for task in tasks {
        task.await.unwrap();
    }
    outcomes.take()
}

/// Waits until this number of further calls is granted.
async fn wait_for_granted(count: &dyn Fn() -> u64, by: u64) {
    let start = std::time::Instant::now();
    let target = count() + by;
    while count() < target {
        assert!(start.elapsed() < DEADLINE, "no call is granted");
        sleep(Duration::from_millis(2)).await;
    }
}

#[test]
fn each_counter_is_requested_from_its_slots_node() {
    let cluster = RedisCluster::start();
    let store = client_of(&cluster);
    run_on_worker(async {
        store.probe().await.unwrap();
        assert_eq!(store.generation(), 3, "a connection to every master");
        let bases: Vec<String> = (0..30).map(|n| format!("t:{{r|{n}}}:minute")).collect();
        for base in &bases {
            expect_granted(store.acquire(&[plain_request(base, 1, 9)], 0).await.unwrap());
        }
        let (a, b) = ("t:{r|1}:minute", "t:{r|1}:hour");
        assert!(store.can_share_a_call(a, b) && !store.can_share_a_call(a, "t:{r|2}:minute"));
        for reply in expect_granted(store.acquire(&[plain_request(a, 1, 9), plain_request(b, 1, 9)], 0).await.unwrap())
        {
            assert!(reply.granted == 1);
        }
        let refunds: Vec<Refund> = bases
            .iter()
            .map(|base| Refund {
                deletes: false,
                key_base: Rc::from(base.as_str()),
                kind: WindowKind::Plain,
                number: 1,
                limit: 9,
                tokens: 1,
                used_max: None,
                counter: None,
            })
            .collect();
        assert_eq!(store.refund(&refunds).await, Ok(30));
        assert!(cluster.nodes.iter().all(|node| node.keys().len() > 1));
        assert_eq!(store.generation(), 3);
    });
}

#[test]
fn a_slot_migration_loses_and_duplicates_no_count() {
    let cluster = RedisCluster::start();
    let store = client_of(&cluster);
    let bases = ["t:{r|a}:minute".to_owned(), "t:{r|a}:hour".to_owned(), "t:{r|b}:minute".to_owned()];
    let slot = cluster.slot(&bases[0]);
    run_on_worker(async {
        let outcomes = load(&store, &bases, async |count| {
            wait_for_granted(count, 500).await;
            for _ in 0..2 {
                let from = cluster.owner(slot);
                let to = (from + 1) % 3;
                cluster.begin_slot_move(slot, from, to);
                wait_for_granted(count, 200).await;
                cluster.migrate_keys(slot, from, to);
                wait_for_granted(count, 200).await;
                cluster.end_slot_move(slot, from, to);
                wait_for_granted(count, 200).await;
            }
        })
        .await;
        for (base, outcome) in bases.iter().zip(&outcomes) {
            let key = format!("{base}:1");
            assert_eq!((outcome.unknown, outcome.refused), (0, 0), "{base}: {outcome:?}");
            outcome.assert_consistent_with(cluster.cli(&key, &["GET", &key]).parse().unwrap());
        }
    });
}

#[test]
fn a_killed_node_affects_only_its_slots() {
    let mut cluster = RedisCluster::start();
    let store = client_of(&cluster);
    run_on_worker(async {
        let bases: Vec<String> = (0..30).map(|n| format!("t:{{r|{n}}}")).collect();
        for base in &bases {
            expect_granted(store.acquire(&[plain_request(base, 1, 9)], 0).await.unwrap());
        }
        let lost: Vec<bool> = bases.iter().map(|base| cluster.owner(cluster.slot(base)) == 0).collect();
        assert!(lost.contains(&true) && lost.contains(&false));
        cluster.nodes[0].kill();
        // The configured node is the killed one.
        for (base, lost) in bases.iter().zip(&lost) {
            let result = store.acquire(&[plain_request(base, 1, 9)], 0).await;
            assert_eq!(matches!(result, Err(StoreError::Unreachable(_))), *lost, "{result:?}");
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
        let outcomes = load(&store, &bases, async |count| {
            wait_for_granted(count, 100).await;
            assert_eq!(master.integer(&["EXISTS", "t:{r|a}:1"]), 1);
            // The data of the replica remains.
            master.kill();
            sentinels.wait_for_failover(&replica);
            wait_for_granted(count, 100).await;
            store.probe().await.unwrap();
        })
        .await;
        // Writes that the old master had not replicated are lost; the rest works as before.
        let counted = replica.integer(&["GET", "t:{r|a}:1"]) as u64;
        assert!(counted <= outcomes[0].granted + outcomes[0].unknown, "{counted}: {outcomes:?}");
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
        master: "unknown".to_owned(),
    }));
    let store = RedisClient::new(&StoreConfig::with_defaults(Nodes::Sentinel { nodes, master: MASTER.to_owned() }));
    run_on_worker(async {
        let Err(StoreError::Unreachable(why)) = unknown.probe().await else { panic!("an unknown master was found") };
        assert!(why.ends_with("does not know a master called `unknown`"), "{why}");
        expect_granted(store.acquire(&[plain_request("t:{a}", 1, 9)], 0).await.unwrap());
        // The master hangs until another one is promoted, and does not know about the promotion when it continues.
        master.suspend();
        sentinels.wait_for_failover(&replica);
        master.resume();
        while replica.integer(&["EXISTS", "t:{b}:1"]) == 0 {
            drop(store.acquire(&[plain_request("t:{b}", 1, u32::MAX)], 0).await);
            sleep(Duration::from_millis(5)).await;
        }
    });
}

/// Settings for a server with TLS.
fn with_tls(redis: &RedisServer, authority: &TestCa, identity: Option<&Issued>) -> StoreConfig {
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
    let client = ClientTls::with_digest(client, None, [0; 32]);
    StoreConfig { tls: Some(client), ..single_server(redis) }
}

#[test]
fn a_tls_server_is_used_if_its_certificate_verifies() {
    let (authority, other) = (TestCa::new(), TestCa::new());
    let redis = RedisServer::with_tls(&authority, "tls-auth-clients yes\nrequirepass sesame");
    let issued = authority.issue(&["gateway"]);
    let with_password = |mut settings: StoreConfig| {
        settings.password = Some(transom_config::values::Secret("sesame".to_owned()));
        RedisClient::new(&settings)
    };
    run_on_worker(async {
        let store = with_password(with_tls(&redis, &authority, Some(&issued)));
        store.probe().await.unwrap();
        expect_granted(store.acquire(&[plain_request("t:{a}", 1, 9)], 0).await.unwrap());
        let unknown = with_password(with_tls(&redis, &other, Some(&issued)));
        let Err(StoreError::Unreachable(why)) = unknown.probe().await else {
            panic!("an untrusted certificate was accepted")
        };
        assert!(why.contains("TLS: invalid peer certificate"), "{why}");
        assert!(with_password(with_tls(&redis, &authority, None)).probe().await.is_err());
        let plain = with_password(single_server(&redis));
        assert!(plain.probe().await.is_err());
    });
    eventually("all connections are closed", || redis.cli(&["CLIENT", "LIST"]).lines().count() == 1);
}
