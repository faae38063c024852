//! The Redis client and one redis-server: the stored data, and calls while the server does not reply.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};
use transom::config::redis::{Node, Nodes, Secret, StoreConfig};
use transom::redis_store::client::{RedisClient, StoreError};
use transom::redis_store::scripts::{AcquireReply, CounterRequest, KeyFormat, Refund, WindowRef};

use crate::support::DEADLINE;
use crate::support::load_checker::now_ms;
use crate::support::redis::RedisServer;
use crate::support::redis_client::{
    CallOutcomes, acquire_with_retries, expect_granted, expect_refused, floating_request, grid_request, plain_request,
    run_on_worker, single_server, tcp_node,
};

#[test]
fn a_plain_window_is_an_integer_that_expires_with_it() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let wants = [plain_request("t:{r|a}:minute", 7, 3), plain_request("t:{r|a}:hour", 2, 2)];
        for used in 1..=2 {
            let took = expect_granted(store.acquire(&wants, 0).await.unwrap());
            assert_eq!((took[0].granted, took[0].used, took[0].number), (1, used, 7));
            assert_eq!((took[1].granted, took[1].used, took[1].number), (1, used, 2));
        }
        // The second is full: neither is counted.
        let took = expect_refused(store.acquire(&wants, 0).await.unwrap());
        assert_eq!((took[0].granted, took[0].used, took[1].used), (0, 2, 2));
        assert_eq!(redis.keys(), ["t:{r|a}:hour:2", "t:{r|a}:minute:7"]);
        assert_eq!(redis.cli(&["GET", "t:{r|a}:minute:7"]), "2");
        let WindowRef::Plain { end_ms, .. } = wants[0].window else { panic!("is plain") };
        assert_eq!(redis.integer(&["PEXPIRETIME", "t:{r|a}:minute:7"]), end_ms as i64);
        assert_eq!(took[0].end_ms, end_ms);
    });
}

#[test]
fn leases_shrink_until_the_last_token() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let want = CounterRequest { want: 50, ..plain_request("t:{r|a}", 1, 100) };
        let mut slices = Vec::new();
        while let AcquireReply::Granted { counters: took, .. } =
            store.acquire(std::slice::from_ref(&want), 0).await.unwrap()
        {
            slices.push(took[0].granted);
        }
        assert_eq!(slices.iter().sum::<u64>(), 100);
        assert_eq!((slices[0], slices[1], slices.last().copied()), (13, 11, Some(1)));
        // A call that needs nothing only reads.
        let look = CounterRequest { need: 0, want: 0, ..want.clone() };
        assert_eq!(expect_granted(store.acquire(&[look], 0).await.unwrap())[0].used, 100);
        let over = CounterRequest { ceiling: u64::MAX, ..want };
        assert_eq!(expect_granted(store.acquire(&[over], 0).await.unwrap())[0].granted, 50);
    });
}

#[test]
fn the_servers_clock_selects_the_window() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let now_ms = now_ms();
        let over = |base: &str, kind: fn(u64, u64, u64) -> WindowRef, next_ms: u64| CounterRequest {
            window: kind(7, now_ms - 1, next_ms),
            ..plain_request(base, 0, 5)
        };
        let plain_at: fn(u64, u64, u64) -> WindowRef =
            |number, end_ms, next_end_ms| WindowRef::Plain { number, end_ms, next_end_ms };
        let grid_at: fn(u64, u64, u64) -> WindowRef =
            |number, end_ms, next_end_ms| WindowRef::Grid { number, end_ms, next_end_ms };
        let wants = [over("t:{a}:1", plain_at, now_ms + 60_000), over("t:{a}:2", grid_at, now_ms + 60_000)];
        for took in expect_granted(store.acquire(&wants, 0).await.unwrap()) {
            assert_eq!((took.number, took.end_ms), (8, now_ms + 60_000));
        }
        assert_eq!(redis.keys(), ["t:{a}:1:8", "t:{a}:2:account"]);
        let past = [over("t:{b}:1", plain_at, now_ms)];
        assert!(matches!(store.acquire(&past, 0).await, Ok(AcquireReply::OtherWindow { .. })));
        let past = [over("t:{b}:1", grid_at, now_ms)];
        assert!(matches!(store.acquire(&past, 0).await, Ok(AcquireReply::OtherWindow { .. })));
        // A gateway whose clock is slightly ahead has reported the next window to its clients.
        let ahead =
            CounterRequest { window: plain_at(1, now_ms + 400, now_ms + 60_400), ..plain_request("t:{c}", 0, 5) };
        let took = expect_granted(store.acquire(std::slice::from_ref(&ahead), now_ms + 500).await.unwrap());
        assert_eq!(took[0].number, 2);
        assert_eq!(redis.keys(), ["t:{a}:1:8", "t:{a}:2:account", "t:{c}:2"]);
        // A gateway far ahead is corrected, and has counted in no window that has not begun.
        let astray = plain_request("t:{d}", 60, 5);
        assert!(matches!(
            store.acquire(std::slice::from_ref(&astray), now_ms + 30_000).await,
            Ok(AcquireReply::OtherWindow { .. })
        ));
        // So is one that has learned the time since it computed the request.
        let astray = CounterRequest { computed_ms: now_ms + 30_000, ..astray };
        assert!(matches!(store.acquire(&[astray], now_ms).await, Ok(AcquireReply::OtherWindow { .. })));
        assert_eq!(redis.keys(), ["t:{a}:1:8", "t:{a}:2:account", "t:{c}:2"]);
    });
}

#[test]
fn foreign_writes_count_and_grant_nothing() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let want = [plain_request("t:{a}", 1, 5)];
        redis.cli(&["INCRBY", "t:{a}:1", "4"]);
        assert_eq!(expect_granted(store.acquire(&want, 0).await.unwrap())[0].used, 5);
        assert!(redis.integer(&["PTTL", "t:{a}:1"]) > 0, "a key without an end gets one");
        for (value, used) in
            [("6", 6), ("9007199254740993", 9_007_199_254_740_991), ("9223372036854775807", 9_007_199_254_740_991)]
        {
            redis.cli(&["SET", "t:{a}:1", value]);
            assert_eq!(expect_refused(store.acquire(&want, 0).await.unwrap())[0].used, used, "{value}");
            assert_eq!(redis.cli(&["GET", "t:{a}:1"]), value);
        }
        for value in ["-3", "-9223372036854775808"] {
            redis.cli(&["SET", "t:{a}:1", value]);
            let all = CounterRequest { need: 5, want: 5, ..want[0].clone() };
            assert_eq!(expect_granted(store.acquire(&[all], 0).await.unwrap())[0].used, 5, "{value}");
            assert_eq!(expect_refused(store.acquire(&want, 0).await.unwrap())[0].used, 5);
        }
        for value in ["1.5", "many", "", "nan", "inf"] {
            redis.cli(&["SET", "t:{a}:1", value]);
            let two = [plain_request("t:{a}:good", 1, 5), want[0].clone()];
            let Err(StoreError::Key(why)) = store.acquire(&two, 0).await else { panic!("{value}") };
            assert!(why.contains("`t:{a}:1` holds a value that is not a counter"), "{why}");
            assert_eq!(redis.keys(), ["t:{a}:1"], "nothing is written if anything is wrong");
        }
        redis.cli(&["DEL", "t:{a}:1"]);
        redis.cli(&["HSET", "t:{a}:1", "a", "b"]);
        assert!(matches!(store.acquire(&want, 0).await, Err(StoreError::Key(_))));
        redis.cli(&["SET", "t:{b}:account", "1"]);
        assert!(matches!(store.acquire(&[grid_request("t:{b}", 1, 5)], 0).await, Err(StoreError::Key(_))));
        redis.cli(&["HSET", "t:{b}:first-request", "start", "x"]);
        assert!(matches!(store.acquire(&[floating_request("t:{b}", 1000, 5)], 0).await, Err(StoreError::Key(_))));
        assert!(matches!(store.acquire(&[plain_request("t:{c}", 1, 5)], 0).await, Ok(AcquireReply::Granted { .. })));
    });
}

#[test]
fn only_refunded_tokens_can_be_acquired_again() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let gift = |base: &str, kind, number, tokens| Refund {
            deletes: false,
            base: Rc::from(base),
            kind,
            number,
            limit: 10,
            tokens,
            only_if_used: None,
        };
        let all = |want: CounterRequest| CounterRequest { need: 8, want: 8, ..want };
        store.acquire(&[all(plain_request("t:{a}", 1, 10)), all(grid_request("t:{a}", 1, 10))], 0).await.unwrap();
        assert_eq!(
            store.refund(&[gift("t:{a}", KeyFormat::Plain, 1, 3), gift("t:{a}", KeyFormat::Grid, 1, 3)]).await,
            Ok(6)
        );
        assert_eq!(redis.cli(&["GET", "t:{a}:1"]), "5");
        assert_eq!(redis.cli(&["HGET", "t:{a}:account", "used"]), "5");
        assert!(redis.integer(&["PTTL", "t:{a}:1"]) > 0);
        // No more than is used, no other window, and nothing that is not there.
        assert_eq!(store.refund(&[gift("t:{a}", KeyFormat::Plain, 1, 9)]).await, Ok(5));
        assert_eq!(
            store.refund(&[gift("t:{a}", KeyFormat::Plain, 2, 9), gift("t:{b}", KeyFormat::Grid, 1, 9)]).await,
            Ok(0)
        );
        assert_eq!(redis.keys(), ["t:{a}:1", "t:{a}:account"]);
        // Two windows later, the rest of a refund is the part that could not have been forgiven.
        store
            .acquire(&[CounterRequest { ceiling: 100, need: 40, want: 40, ..grid_request("t:{c}", 1, 10) }], 0)
            .await
            .unwrap();
        store.acquire(&[CounterRequest { ceiling: 100, ..grid_request("t:{c}", 3, 10) }], 0).await.unwrap();
        assert_eq!(redis.cli(&["HGET", "t:{c}:account", "used"]), "21");
        assert_eq!(store.refund(&[gift("t:{c}", KeyFormat::Grid, 1, 20)]).await, Ok(0));
        assert_eq!(store.refund(&[gift("t:{c}", KeyFormat::Grid, 1, 25)]).await, Ok(5));
        // Reserved tokens: only if no later charge exists.
        let promised = |used| Refund { only_if_used: Some(used), ..gift("t:{c}", KeyFormat::Grid, 3, 6) };
        assert_eq!(store.refund(&[promised(17)]).await, Ok(0));
        assert_eq!(store.refund(&[promised(16)]).await, Ok(6));
        let took = expect_granted(store.acquire(&[all(floating_request("t:{d}", 60_000, 10))], 0).await.unwrap());
        assert_eq!(store.refund(&[gift("t:{d}", KeyFormat::Floating, took[0].number + 1, 8)]).await, Ok(0));
        assert_eq!(store.refund(&[gift("t:{d}", KeyFormat::Floating, took[0].number, 8)]).await, Ok(8));
    });
}

#[test]
fn batched_calls_are_decided_one_by_one() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    redis.cli(&["SET", "t:{bad}:1", "many"]);
    run_on_worker(async {
        store.probe().await.unwrap();
        let kinds: [fn(&str) -> CounterRequest; 3] = [
            |base| plain_request(base, 1, 20),
            |base| grid_request(base, 1, 20),
            |base| floating_request(base, 60_000, 20),
        ];
        for (kind, key) in kinds.into_iter().zip(["t:{a}:1", "t:{a}:account", "t:{a}:first-request"]) {
            let before = redis.call_count("evalsha");
            let calls: Vec<_> = (0..50)
                .map(|n| {
                    let (store, mut wants) = (store.clone(), vec![kind("t:{a}"), plain_request("t:{each}", n, 9)]);
                    wants.extend((n % 5 == 4).then(|| plain_request("t:{bad}", 1, 9)));
                    spawn_local(async move { store.acquire(&wants, 0).await })
                })
                .collect();
            let mut tally = CallOutcomes::default();
            for (n, call) in calls.into_iter().enumerate() {
                let said = call.await.unwrap();
                assert_eq!(matches!(said, Err(StoreError::Key(_))), n % 5 == 4, "{said:?}");
                tally.add(&said);
            }
            assert_eq!((tally.granted, tally.refused, tally.unknown), (20, 20, 10));
            let used = if key == "t:{a}:1" { redis.cli(&["GET", key]) } else { redis.cli(&["HGET", key, "used"]) };
            assert_eq!(used, "20");
            assert!(redis.call_count("evalsha") - before < 10, "they were sent together");
        }
    });
}

/// Many tasks request single tokens until stopped; each call times out after `patience`.
async fn load(
    store: &RedisClient,
    want: &CounterRequest,
    tasks: usize,
    patience: Duration,
    during: impl AsyncFnOnce(),
) -> CallOutcomes {
    let tally = Rc::new(RefCell::new(CallOutcomes::default()));
    let goes_on = Rc::new(std::cell::Cell::new(true));
    let tasks: Vec<_> = (0..tasks)
        .map(|_| {
            let (store, want, tally, goes_on) = (store.clone(), want.clone(), Rc::clone(&tally), Rc::clone(&goes_on));
            spawn_local(async move {
                while goes_on.get() {
                    let said = timeout(patience, store.acquire(std::slice::from_ref(&want), 0)).await;
                    let failed = !matches!(said, Ok(Ok(_)));
                    tally.borrow_mut().add(&said.unwrap_or_else(|_| Err(StoreError::Unreachable(String::new()))));
                    sleep(Duration::from_millis(if failed { 5 } else { 0 })).await;
                }
            })
        })
        .collect();
    during().await;
    goes_on.set(false);
    for task in tasks {
        task.await.unwrap();
    }
    tally.take()
}

/// Waits until more calls were granted than now.
async fn more_granted(store: &RedisClient, base: &str) {
    expect_granted(acquire_with_retries(store, &[plain_request(base, 1, u32::MAX)]).await);
}

#[test]
fn a_flushed_script_is_loaded_once() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let want = plain_request("t:{a}", 1, u32::MAX);
        let tally = load(&store, &want, 300, DEADLINE, async || {
            for _ in 0..5 {
                more_granted(&store, "t:{b}").await;
                redis.cli(&["SCRIPT", "FLUSH"]);
            }
            more_granted(&store, "t:{b}").await;
        });
        let tally = tally.await;
        assert_eq!((tally.unknown, tally.refused), (0, 0), "{tally:?}");
        assert!(tally.granted > 300);
        tally.assert_consistent_with(redis.integer(&["GET", "t:{a}:1"]) as u64);
        assert!(redis.call_count("eval") <= 12, "{} times in full", redis.call_count("eval"));
        assert_eq!(store.generation(), 1);
    });
}

#[test]
fn calls_to_a_hanging_server_time_out_and_it_is_found_again() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let want = plain_request("t:{a}", 1, u32::MAX);
        let tally = load(&store, &want, 50, DEADLINE, async || {
            more_granted(&store, "t:{b}").await;
            redis.suspend();
            let start = Instant::now();
            assert!(matches!(store.acquire(&[plain_request("t:{b}", 1, 9)], 0).await, Err(StoreError::Unreachable(_))));
            assert!(start.elapsed() < DEADLINE);
            assert!(store.probe().await.is_err());
            redis.resume();
            more_granted(&store, "t:{b}").await;
            assert!(store.probe().await.unwrap() > 0);
        });
        let tally = tally.await;
        assert!(tally.unknown > 0 && tally.granted > 0, "{tally:?}");
        tally.assert_consistent_with(redis.integer(&["GET", "t:{a}:1"]) as u64);
        assert!(store.generation() > 1);
    });
}

#[test]
fn a_dropped_client_leaves_no_tasks() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let want = plain_request("t:{a}", 1, u32::MAX);
        let tally = load(&store, &want, 200, Duration::from_millis(20), async || {
            for _ in 0..3 {
                more_granted(&store, "t:{b}").await;
                redis.cli(&["CLIENT", "PAUSE", "200", "ALL"]);
                sleep(Duration::from_millis(300)).await;
            }
            more_granted(&store, "t:{b}").await;
        });
        let tally = tally.await;
        assert!(tally.unknown > 0 && tally.granted > 0, "{tally:?}");
        // Calls sent before the cancellation are counted, and nothing else.
        expect_granted(store.acquire(&[plain_request("t:{a}", 2, 1)], 0).await.unwrap());
        tally.assert_consistent_with(redis.integer(&["GET", "t:{a}:1"]) as u64);
        assert_eq!(store.generation(), 1, "the connection is still the first");
    });
}

#[test]
fn a_dead_connection_is_detected_at_once() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let want = [plain_request("t:{a}", 1, 9)];
        expect_granted(store.acquire(&want, 0).await.unwrap());
        redis.suspend();
        // Everybody goes away long before the connection is given up.
        let start = Instant::now();
        while store.generation() == 1 {
            drop(timeout(Duration::from_millis(10), store.acquire(&want, 0)).await);
            if start.elapsed() > Duration::from_secs(2) {
                redis.resume();
            }
            assert!(start.elapsed() < DEADLINE);
        }
    });
}

#[test]
fn a_restarted_server_is_found_again() {
    let mut redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let want = [plain_request("t:{a}", 1, 9)];
        expect_granted(store.acquire(&want, 0).await.unwrap());
        let before = store.generation();
        redis.kill();
        for _ in 0..20 {
            assert!(matches!(store.acquire(&want, 0).await, Err(StoreError::Unreachable(_))));
        }
        assert!(store.probe().await.is_err());
        redis.restart();
        assert!(store.probe().await.is_ok());
        assert_eq!(expect_granted(store.acquire(&want, 0).await.unwrap())[0].used, 1);
        assert!(store.generation() > before);
    });
}

#[test]
fn cut_connections_under_load_duplicate_no_count() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let want = plain_request("t:{a}", 1, u32::MAX);
        let tally = load(&store, &want, 100, DEADLINE, async || {
            for _ in 0..20 {
                more_granted(&store, "t:{b}").await;
                redis.cli(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
            }
            more_granted(&store, "t:{b}").await;
        });
        let tally = tally.await;
        assert!(tally.granted > 0, "{tally:?}");
        tally.assert_consistent_with(redis.integer(&["GET", "t:{a}:1"]) as u64);
    });
}

/// A proxy to the server that drops the next reply and its connection on demand.
fn lossy_way(redis: &RedisServer) -> (u16, Arc<AtomicBool>) {
    let (listener, server) = (TcpListener::bind("127.0.0.1:0").unwrap(), redis.port);
    let (port, loses) = (listener.local_addr().unwrap().port(), Arc::new(AtomicBool::new(false)));
    let told = Arc::clone(&loses);
    thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut server) = (client.unwrap(), TcpStream::connect(("127.0.0.1", server)).unwrap());
            let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            thread::spawn(move || std::io::copy(&mut from, &mut to));
            let told = Arc::clone(&told);
            thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(length @ 1..) = server.read(&mut bytes) {
                    if told.swap(false, Ordering::SeqCst) || client.write_all(&bytes[..length]).is_err() {
                        break;
                    }
                }
                let _ = (client.shutdown(Shutdown::Both), server.shutdown(Shutdown::Both));
            });
        }
    });
    (port, loses)
}

#[test]
fn a_call_with_a_lost_reply_is_not_resent() {
    let redis = RedisServer::start();
    let (port, loses) = lossy_way(&redis);
    let store = RedisClient::new(&StoreConfig::with_defaults(Nodes::Single(tcp_node(port))));
    run_on_worker(async {
        store.probe().await.unwrap();
        for counted in 1..=3 {
            let before = redis.integer(&["GET", "t:{a}:1"]);
            loses.store(true, Ordering::SeqCst);
            let said = store.acquire(&[plain_request("t:{a}", 1, 99)], 0).await;
            assert!(matches!(said, Err(StoreError::Unreachable(_))), "{said:?}");
            assert_eq!(redis.integer(&["GET", "t:{a}:1"]), before + 1, "it was counted, and once");
            expect_granted(store.acquire(&[plain_request("t:{a}", 1, 99)], 0).await.unwrap());
            assert_eq!(store.generation(), counted + 1);
        }
    });
}

#[test]
fn a_server_that_cannot_serve_is_unreachable() {
    let redis = RedisServer::start();
    let replica = RedisServer::replica_of(&redis, "");
    let full = RedisServer::with_config("maxmemory 1\nmaxmemory-policy noeviction");
    for (server, word) in [(&replica, "READONLY"), (&full, "OOM")] {
        let store = RedisClient::new(&single_server(server));
        run_on_worker(async {
            let Err(StoreError::Unreachable(why)) = store.acquire(&[plain_request("t:{a}", 1, 9)], 0).await else {
                panic!("{word}")
            };
            assert!(why.contains(word) && why.starts_with(&format!("127.0.0.1:{}: ", server.port)), "{why}");
            let Err(StoreError::Unreachable(why)) = store.probe().await else { panic!("{word}") };
            assert!(why.contains(word), "{why}");
        });
    }
    full.cli(&["CONFIG", "SET", "maxmemory", "0"]);
    run_on_worker(async {
        expect_granted(
            RedisClient::new(&single_server(&full)).acquire(&[plain_request("t:{a}", 1, 9)], 0).await.unwrap(),
        )
    });
}

#[test]
fn acl_users_limit_the_gateway() {
    let redis = RedisServer::with_config(
        "requirepass sesame\n\
         user gate on >hunter2-hunter2 ~transom:* -@all +ping +select +eval +evalsha +time +mget +exists +set +get +decrby +hmget +hset +pexpireat",
    );
    let as_user = |name: Option<&str>, password: Option<&str>, database| {
        let mut settings = single_server(&redis);
        settings.username = name.map(str::to_owned);
        settings.password = password.map(|password| Secret(password.to_owned()));
        settings.database = database;
        RedisClient::new(&settings)
    };
    run_on_worker(async {
        for (name, password, database) in
            [(None, "sesame", 0), (Some("gate"), "hunter2-hunter2", 0), (Some("gate"), "hunter2-hunter2", 3)]
        {
            let store = as_user(name, Some(password), database);
            store.probe().await.unwrap();
            let used = expect_granted(store.acquire(&[plain_request("transom:{a}", 1, 9)], 0).await.unwrap())[0].used;
            assert_eq!(used, if database == 0 && name.is_some() { 2 } else { 1 });
        }
        let unreachable = async |store: RedisClient| match store.acquire(&[plain_request("other:{a}", 1, 9)], 0).await {
            Err(StoreError::Unreachable(why)) => why,
            said => panic!("{said:?}"),
        };
        let wrong = unreachable(as_user(Some("gate"), Some("wrong-wrong"), 0)).await;
        assert!(
            wrong.ends_with("the server does not accept the user and password") && !wrong.contains("wrong-"),
            "{wrong}"
        );
        let none = unreachable(as_user(None, None, 0)).await;
        assert!(none.contains("NOAUTH"), "{none}");
        let elsewhere = unreachable(as_user(Some("gate"), Some("hunter2-hunter2"), 0)).await;
        assert!(elsewhere.contains("NOPERM"), "{elsewhere}");
    });
}

#[test]
fn a_unix_socket_works() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&StoreConfig::with_defaults(Nodes::Single(Node::Unix(redis.socket()))));
    run_on_worker(async {
        expect_granted(store.acquire(&[plain_request("t:{a}", 1, 9)], 0).await.unwrap());
        let nowhere =
            RedisClient::new(&StoreConfig::with_defaults(Nodes::Single(Node::Unix(redis.directory().join("no.sock")))));
        let Err(StoreError::Unreachable(why)) = nowhere.probe().await else { panic!("there is nobody") };
        assert!(why.contains("no.sock: No such file"), "{why}");
    });
}
