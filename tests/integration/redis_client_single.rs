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
use transom_config::redis::{Node, Nodes, StoreConfig};
use transom_config::values::Secret;
use transom_limiter::store_key::StoreWindow;
use transom_limiter::window_kind::WindowKind;
use transom_store::client::{RedisClient, StoreError};
use transom_store::scripts::{AcquireReply, CounterRequest, Refund};

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
        let requests = [plain_request("t:{r|a}:minute", 7, 3), plain_request("t:{r|a}:hour", 2, 2)];
        for used in 1..=2 {
            let replies = expect_granted(store.acquire(&requests, 0).await.unwrap());
            assert_eq!((replies[0].granted, replies[0].used, replies[0].number), (1, used, 7));
            assert_eq!((replies[1].granted, replies[1].used, replies[1].number), (1, used, 2));
        }
        // The second window is full: neither counter changes.
        let replies = expect_refused(store.acquire(&requests, 0).await.unwrap());
        assert_eq!((replies[0].granted, replies[0].used, replies[1].used), (0, 2, 2));
        assert_eq!(redis.keys(), ["t:{r|a}:hour:2", "t:{r|a}:minute:7"]);
        assert_eq!(redis.cli(&["GET", "t:{r|a}:minute:7"]), "2");
        let end_ms = requests[0].window.end_ms;
        assert_eq!(redis.integer(&["PEXPIRETIME", "t:{r|a}:minute:7"]), end_ms as i64);
        assert_eq!(replies[0].end_ms, end_ms);
    });
}

#[test]
fn leases_shrink_until_the_last_token() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let request = CounterRequest { want: 50, ..plain_request("t:{r|a}", 1, 100) };
        let mut slices = Vec::new();
        while let AcquireReply::Granted { counters: replies, .. } =
            store.acquire(std::slice::from_ref(&request), 0).await.unwrap()
        {
            slices.push(replies[0].granted);
        }
        assert_eq!(slices.iter().sum::<u64>(), 100);
        assert_eq!((slices[0], slices[1], slices.last().copied()), (13, 11, Some(1)));
        // A call that needs no token only reads.
        let read_only = CounterRequest { need: 0, want: 0, ..request.clone() };
        assert_eq!(expect_granted(store.acquire(&[read_only], 0).await.unwrap())[0].used, 100);
        let without_ceiling = CounterRequest { ceiling: u64::MAX, ..request };
        assert_eq!(expect_granted(store.acquire(&[without_ceiling], 0).await.unwrap())[0].granted, 50);
    });
}

#[test]
fn the_servers_clock_selects_the_window() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let now_ms = now_ms();
        let ended_window = |base: &str, kind: WindowKind, next_end_ms: u64| CounterRequest {
            window: StoreWindow { kind, number: 7, end_ms: now_ms - 1, next_end_ms },
            ..plain_request(base, 0, 5)
        };
        let (plain, grid) = (WindowKind::Plain, WindowKind::Accumulating);
        let requests =
            [ended_window("t:{a}:1", plain, now_ms + 60_000), ended_window("t:{a}:2", grid, now_ms + 60_000)];
        for replies in expect_granted(store.acquire(&requests, 0).await.unwrap()) {
            assert_eq!((replies.number, replies.end_ms), (8, now_ms + 60_000));
        }
        assert_eq!(redis.keys(), ["t:{a}:1:8", "t:{a}:2:account"]);
        let past = [ended_window("t:{b}:1", plain, now_ms)];
        assert!(matches!(store.acquire(&past, 0).await, Ok(AcquireReply::OtherWindow { .. })));
        let past = [ended_window("t:{b}:1", grid, now_ms)];
        assert!(matches!(store.acquire(&past, 0).await, Ok(AcquireReply::OtherWindow { .. })));
        // A gateway whose clock is slightly ahead has reported the next window to its clients.
        let ahead = CounterRequest {
            window: StoreWindow { kind: plain, number: 1, end_ms: now_ms + 400, next_end_ms: now_ms + 60_400 },
            ..plain_request("t:{c}", 0, 5)
        };
        let replies = expect_granted(store.acquire(std::slice::from_ref(&ahead), now_ms + 500).await.unwrap());
        assert_eq!(replies[0].number, 2);
        assert_eq!(redis.keys(), ["t:{a}:1:8", "t:{a}:2:account", "t:{c}:2"]);
        // A gateway far ahead is corrected, and does not count in a future window.
        let far_ahead = plain_request("t:{d}", 60, 5);
        assert!(matches!(
            store.acquire(std::slice::from_ref(&far_ahead), now_ms + 30_000).await,
            Ok(AcquireReply::OtherWindow { .. })
        ));
        // So is a gateway that has learned the time since it computed the request.
        let far_ahead = CounterRequest { computed_ms: now_ms + 30_000, ..far_ahead };
        assert!(matches!(store.acquire(&[far_ahead], now_ms).await, Ok(AcquireReply::OtherWindow { .. })));
        assert_eq!(redis.keys(), ["t:{a}:1:8", "t:{a}:2:account", "t:{c}:2"]);
    });
}

#[test]
fn foreign_writes_count_and_grant_nothing() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let request = [plain_request("t:{a}", 1, 5)];
        redis.cli(&["INCRBY", "t:{a}:1", "4"]);
        assert_eq!(expect_granted(store.acquire(&request, 0).await.unwrap())[0].used, 5);
        assert!(redis.integer(&["PTTL", "t:{a}:1"]) > 0, "a key without an expiry gets one");
        for (value, used) in
            [("6", 6), ("9007199254740993", 9_007_199_254_740_991), ("9223372036854775807", 9_007_199_254_740_991)]
        {
            redis.cli(&["SET", "t:{a}:1", value]);
            assert_eq!(expect_refused(store.acquire(&request, 0).await.unwrap())[0].used, used, "{value}");
            assert_eq!(redis.cli(&["GET", "t:{a}:1"]), value);
        }
        for value in ["-3", "-9223372036854775808"] {
            redis.cli(&["SET", "t:{a}:1", value]);
            let all = CounterRequest { need: 5, want: 5, ..request[0].clone() };
            assert_eq!(expect_granted(store.acquire(&[all], 0).await.unwrap())[0].used, 5, "{value}");
            assert_eq!(expect_refused(store.acquire(&request, 0).await.unwrap())[0].used, 5);
        }
        for value in ["1.5", "many", "", "nan", "inf"] {
            redis.cli(&["SET", "t:{a}:1", value]);
            let two = [plain_request("t:{a}:good", 1, 5), request[0].clone()];
            let Err(StoreError::Key(why)) = store.acquire(&two, 0).await else { panic!("{value}") };
            assert!(why.contains("`t:{a}:1` holds a value that is not a counter"), "{why}");
            assert_eq!(redis.keys(), ["t:{a}:1"], "a call with an invalid counter writes nothing");
        }
        redis.cli(&["DEL", "t:{a}:1"]);
        redis.cli(&["HSET", "t:{a}:1", "a", "b"]);
        assert!(matches!(store.acquire(&request, 0).await, Err(StoreError::Key(_))));
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
        let refund = |base: &str, kind, number, tokens| Refund {
            deletes: false,
            key_base: Rc::from(base),
            kind,
            number,
            limit: 10,
            tokens,
            used_max: None,
            counter: None,
        };
        let all = |request: CounterRequest| CounterRequest { need: 8, want: 8, ..request };
        store.acquire(&[all(plain_request("t:{a}", 1, 10)), all(grid_request("t:{a}", 1, 10))], 0).await.unwrap();
        assert_eq!(
            store
                .refund(&[refund("t:{a}", WindowKind::Plain, 1, 3), refund("t:{a}", WindowKind::Accumulating, 1, 3)])
                .await,
            Ok(6)
        );
        assert_eq!(redis.cli(&["GET", "t:{a}:1"]), "5");
        assert_eq!(redis.cli(&["HGET", "t:{a}:account", "used"]), "5");
        assert!(redis.integer(&["PTTL", "t:{a}:1"]) > 0);
        // At most the usage is refunded, and only to the same window of an existing counter.
        assert_eq!(store.refund(&[refund("t:{a}", WindowKind::Plain, 1, 9)]).await, Ok(5));
        assert_eq!(
            store
                .refund(&[refund("t:{a}", WindowKind::Plain, 2, 9), refund("t:{b}", WindowKind::Accumulating, 1, 9)])
                .await,
            Ok(0)
        );
        assert_eq!(redis.keys(), ["t:{a}:1", "t:{a}:account"]);
        // Two windows later, only the part beyond the limits of those windows is refunded.
        store
            .acquire(&[CounterRequest { ceiling: 100, need: 40, want: 40, ..grid_request("t:{c}", 1, 10) }], 0)
            .await
            .unwrap();
        store.acquire(&[CounterRequest { ceiling: 100, ..grid_request("t:{c}", 3, 10) }], 0).await.unwrap();
        assert_eq!(redis.cli(&["HGET", "t:{c}:account", "used"]), "21");
        assert_eq!(store.refund(&[refund("t:{c}", WindowKind::Accumulating, 1, 20)]).await, Ok(0));
        assert_eq!(store.refund(&[refund("t:{c}", WindowKind::Accumulating, 1, 25)]).await, Ok(5));
        // Where requests wait: only if none waits behind the charge, and only in its window.
        let of_former = Refund { used_max: Some(100), ..refund("t:{c}", WindowKind::Accumulating, 1, 25) };
        assert_eq!(store.refund(&[of_former]).await, Ok(0));
        let reserved = |used| Refund { used_max: Some(used), ..refund("t:{c}", WindowKind::Accumulating, 3, 6) };
        assert_eq!(store.refund(&[reserved(15)]).await, Ok(0));
        assert_eq!(store.refund(&[reserved(16)]).await, Ok(6));
        let replies = expect_granted(store.acquire(&[all(floating_request("t:{d}", 60_000, 10))], 0).await.unwrap());
        assert_eq!(store.refund(&[refund("t:{d}", WindowKind::Floating, replies[0].number + 1, 8)]).await, Ok(0));
        assert_eq!(store.refund(&[refund("t:{d}", WindowKind::Floating, replies[0].number, 8)]).await, Ok(8));
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
                    let (store, mut requests) = (store.clone(), vec![kind("t:{a}"), plain_request("t:{each}", n, 9)]);
                    requests.extend((n % 5 == 4).then(|| plain_request("t:{bad}", 1, 9)));
                    spawn_local(async move { store.acquire(&requests, 0).await })
                })
                .collect();
            let mut outcomes = CallOutcomes::default();
            for (n, call) in calls.into_iter().enumerate() {
                let result = call.await.unwrap();
                assert_eq!(matches!(result, Err(StoreError::Key(_))), n % 5 == 4, "{result:?}");
                outcomes.add(&result);
            }
            assert_eq!((outcomes.granted, outcomes.refused, outcomes.unknown), (20, 20, 10));
            let used = if key == "t:{a}:1" { redis.cli(&["GET", key]) } else { redis.cli(&["HGET", key, "used"]) };
            assert_eq!(used, "20");
            assert!(redis.call_count("evalsha") - before < 10, "the calls were sent in batches");
        }
    });
}

/// Many tasks request single tokens during an action; each call is dropped after `call_timeout`.
async fn load(
    store: &RedisClient,
    request: &CounterRequest,
    tasks: usize,
    call_timeout: Duration,
    during: impl AsyncFnOnce(),
) -> CallOutcomes {
    let outcomes = Rc::new(RefCell::new(CallOutcomes::default()));
    let running = Rc::new(std::cell::Cell::new(true));
    let tasks: Vec<_> = (0..tasks)
        .map(|_| {
            let (store, request, outcomes, running) =
                (store.clone(), request.clone(), Rc::clone(&outcomes), Rc::clone(&running));
            spawn_local(async move {
                while running.get() {
                    let result = timeout(call_timeout, store.acquire(std::slice::from_ref(&request), 0)).await;
                    let failed = !matches!(result, Ok(Ok(_)));
                    outcomes.borrow_mut().add(&result.unwrap_or_else(|_| Err(StoreError::Unreachable(String::new()))));
                    sleep(Duration::from_millis(if failed { 5 } else { 0 })).await;
                }
            })
        })
        .collect();
    during().await;
    running.set(false);
    for task in tasks {
        task.await.unwrap();
    }
    outcomes.take()
}

/// Waits until another call is granted.
async fn more_granted(store: &RedisClient, base: &str) {
    expect_granted(acquire_with_retries(store, &[plain_request(base, 1, u32::MAX)]).await);
}

#[test]
fn a_flushed_script_is_loaded_once() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let request = plain_request("t:{a}", 1, u32::MAX);
        let outcomes = load(&store, &request, 300, DEADLINE, async || {
            for _ in 0..5 {
                more_granted(&store, "t:{b}").await;
                redis.cli(&["SCRIPT", "FLUSH"]);
            }
            more_granted(&store, "t:{b}").await;
        });
        let outcomes = outcomes.await;
        assert_eq!((outcomes.unknown, outcomes.refused), (0, 0), "{outcomes:?}");
        assert!(outcomes.granted > 300);
        outcomes.assert_consistent_with(redis.integer(&["GET", "t:{a}:1"]) as u64);
        assert!(redis.call_count("eval") <= 12, "the script was sent {} times", redis.call_count("eval"));
        assert_eq!(store.generation(), 1);
    });
}

#[test]
fn calls_to_a_hanging_server_time_out_and_it_is_found_again() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let request = plain_request("t:{a}", 1, u32::MAX);
        let outcomes = load(&store, &request, 50, DEADLINE, async || {
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
        let outcomes = outcomes.await;
        assert!(outcomes.unknown > 0 && outcomes.granted > 0, "{outcomes:?}");
        outcomes.assert_consistent_with(redis.integer(&["GET", "t:{a}:1"]) as u64);
        assert!(store.generation() > 1);
    });
}

#[test]
fn a_dropped_client_leaves_no_tasks() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let request = plain_request("t:{a}", 1, u32::MAX);
        let outcomes = load(&store, &request, 200, Duration::from_millis(20), async || {
            for _ in 0..3 {
                more_granted(&store, "t:{b}").await;
                redis.cli(&["CLIENT", "PAUSE", "200", "ALL"]);
                sleep(Duration::from_millis(300)).await;
            }
            more_granted(&store, "t:{b}").await;
        });
        let outcomes = outcomes.await;
        assert!(outcomes.unknown > 0 && outcomes.granted > 0, "{outcomes:?}");
        // Calls sent before the cancellation are counted, and nothing else.
        expect_granted(store.acquire(&[plain_request("t:{a}", 2, 1)], 0).await.unwrap());
        outcomes.assert_consistent_with(redis.integer(&["GET", "t:{a}:1"]) as u64);
        assert_eq!(store.generation(), 1, "the connection is still the first");
    });
}

#[test]
fn a_dead_connection_is_detected_at_once() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let request = [plain_request("t:{a}", 1, 9)];
        expect_granted(store.acquire(&request, 0).await.unwrap());
        redis.suspend();
        // All calls are dropped long before the connection times out.
        let start = Instant::now();
        while store.generation() == 1 {
            drop(timeout(Duration::from_millis(10), store.acquire(&request, 0)).await);
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
        let request = [plain_request("t:{a}", 1, 9)];
        expect_granted(store.acquire(&request, 0).await.unwrap());
        let before = store.generation();
        redis.kill();
        for _ in 0..20 {
            assert!(matches!(store.acquire(&request, 0).await, Err(StoreError::Unreachable(_))));
        }
        assert!(store.probe().await.is_err());
        redis.restart();
        assert!(store.probe().await.is_ok());
        assert_eq!(expect_granted(store.acquire(&request, 0).await.unwrap())[0].used, 1);
        assert!(store.generation() > before);
    });
}

#[test]
fn cut_connections_under_load_duplicate_no_count() {
    let redis = RedisServer::start();
    let store = RedisClient::new(&single_server(&redis));
    run_on_worker(async {
        let request = plain_request("t:{a}", 1, u32::MAX);
        let outcomes = load(&store, &request, 100, DEADLINE, async || {
            for _ in 0..20 {
                more_granted(&store, "t:{b}").await;
                redis.cli(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
            }
            more_granted(&store, "t:{b}").await;
        });
        let outcomes = outcomes.await;
        assert!(outcomes.granted > 0, "{outcomes:?}");
        outcomes.assert_consistent_with(redis.integer(&["GET", "t:{a}:1"]) as u64);
    });
}

/// A proxy to the server that drops the next reply and its connection on demand.
fn lossy_proxy(redis: &RedisServer) -> (u16, Arc<AtomicBool>) {
    let (listener, server) = (TcpListener::bind("127.0.0.1:0").unwrap(), redis.port);
    let (port, drop_next_reply) = (listener.local_addr().unwrap().port(), Arc::new(AtomicBool::new(false)));
    let drop_reply = Arc::clone(&drop_next_reply);
    thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut server) = (client.unwrap(), TcpStream::connect(("127.0.0.1", server)).unwrap());
            let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            thread::spawn(move || std::io::copy(&mut from, &mut to));
            let drop_reply = Arc::clone(&drop_reply);
            thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(length @ 1..) = server.read(&mut bytes) {
                    if drop_reply.swap(false, Ordering::SeqCst) || client.write_all(&bytes[..length]).is_err() {
                        break;
                    }
                }
                let _ = (client.shutdown(Shutdown::Both), server.shutdown(Shutdown::Both));
            });
        }
    });
    (port, drop_next_reply)
}

#[test]
fn a_call_with_a_lost_reply_is_not_resent() {
    let redis = RedisServer::start();
    let (port, drop_next_reply) = lossy_proxy(&redis);
    let store = RedisClient::new(&StoreConfig::with_defaults(Nodes::Single(tcp_node(port))));
    run_on_worker(async {
        store.probe().await.unwrap();
        for counted in 1..=3 {
            let before = redis.integer(&["GET", "t:{a}:1"]);
            drop_next_reply.store(true, Ordering::SeqCst);
            let result = store.acquire(&[plain_request("t:{a}", 1, 99)], 0).await;
            assert!(matches!(result, Err(StoreError::Unreachable(_))), "{result:?}");
            assert_eq!(redis.integer(&["GET", "t:{a}:1"]), before + 1, "counted exactly once");
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
         user gateway on >hunter2-hunter2 ~transom:* -@all +ping +select +eval +evalsha +time +mget +exists +set +get +decrby +hmget +hset +pexpireat",
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
            [(None, "sesame", 0), (Some("gateway"), "hunter2-hunter2", 0), (Some("gateway"), "hunter2-hunter2", 3)]
        {
            let store = as_user(name, Some(password), database);
            store.probe().await.unwrap();
            let used = expect_granted(store.acquire(&[plain_request("transom:{a}", 1, 9)], 0).await.unwrap())[0].used;
            assert_eq!(used, if database == 0 && name.is_some() { 2 } else { 1 });
        }
        let unreachable = async |store: RedisClient| match store.acquire(&[plain_request("other:{a}", 1, 9)], 0).await {
            Err(StoreError::Unreachable(why)) => why,
            result => panic!("{result:?}"),
        };
        let wrong = unreachable(as_user(Some("gateway"), Some("wrong-wrong"), 0)).await;
        assert!(
            wrong.ends_with("the server does not accept the user and password") && !wrong.contains("wrong-"),
            "{wrong}"
        );
        let none = unreachable(as_user(None, None, 0)).await;
        assert!(none.contains("NOAUTH"), "{none}");
        // A key without a right to it does not fail the calls that are sent together with it.
        let store = as_user(Some("gateway"), Some("hunter2-hunter2"), 0);
        store.probe().await.unwrap();
        for counted in 1..=3 {
            let bases = ["transom:{b}", "other:{a}", "transom:{c}"];
            let [b, elsewhere, c] = bases.map(|base| {
                let store = store.clone();
                tokio::task::spawn_local(async move { store.acquire(&[plain_request(base, 1, 9)], 0).await })
            });
            for permitted in [b, c] {
                assert_eq!(expect_granted(permitted.await.unwrap().unwrap())[0].used, counted);
            }
            let Err(StoreError::Key(why)) = elsewhere.await.unwrap() else { panic!("the key is forbidden") };
            assert!(why.contains("NOPERM") && why.ends_with("`other:{a}`"), "{why}");
        }
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
        let Err(StoreError::Unreachable(why)) = nowhere.probe().await else { panic!("the socket does not exist") };
        assert!(why.contains("no.sock: No such file"), "{why}");
    });
}
