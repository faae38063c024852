//! The store in memory, on which `transom-store` explores gateways, replies as Redis does with the scripts.

use std::time::Duration;

use fastrand::Rng;
use redis::{ConnectionLike, Value};

use crate::support::redis::RedisServer;
use crate::support::seeded_rng;

#[path = "../../crates/store/src/simulated_store/counters.rs"]
mod counters;

use counters::Store;

const ACQUIRE: &str = include_str!("../../crates/store/src/acquire.lua");
const REFUND: &str = include_str!("../../crates/store/src/refund.lua");
const PERIOD_MS: u64 = 2000;

/// Both stores, and the time of the last reply.
struct Stores {
    redis: RedisServer,
    connection: redis::Connection,
    simulated: Store,
    now_ms: u64,
    lead_ms: u64,
}

impl Stores {
    fn start() -> Stores {
        let redis = RedisServer::with_stepped_clock("");
        let client = redis::Client::open(format!("unix://{}", redis.socket().display())).unwrap();
        let connection = client.get_connection().unwrap();
        let mut stores = Stores { redis, connection, simulated: Store::default(), now_ms: 0, lead_ms: 0 };
        stores.now_ms = stores.time_ms();
        stores
    }

    fn time_ms(&mut self) -> u64 {
        let time: (u64, u64) = redis::cmd("TIME").query(&mut self.connection).unwrap();
        time.0 * 1000 + time.1 / 1000
    }

    fn run(&mut self, script: &str, keys: &[String], arguments: &[String]) -> Value {
        let mut command = redis::cmd("EVAL");
        command.arg(script).arg(keys.len()).arg(keys).arg(arguments);
        self.connection.req_command(&command).unwrap()
    }

    fn step(&mut self, ms: u64) {
        self.lead_ms += ms;
        self.redis.set_clock_offset(Duration::from_millis(self.lead_ms));
        self.now_ms = self.time_ms();
    }

    /// Some calls in one run of the script.
    fn acquire(&mut self, rng: &mut Rng) {
        let (mut keys, mut arguments) = (Vec::new(), Vec::new());
        for _ in 0..rng.usize(1..4) {
            let gateway_ms = self.now_ms + 1500 - rng.u64(..3000);
            let mut kinds = ["e", "p", "s", "f", "g"];
            rng.shuffle(&mut kinds);
            let count = rng.usize(1..3);
            arguments.extend([gateway_ms.to_string(), count.to_string()]);
            for kind in &kinds[..count] {
                let number = (self.now_ms / PERIOD_MS) - 1 + rng.u64(..3);
                let limit = 5;
                let need = rng.u64(..4);
                let (want, least) = (need + pick(rng, &[0, 0, 3, 30]), pick(rng, &[0, 0, 0, 2, 6]));
                let ceiling = pick(rng, &[limit, limit, 3, 50]);
                let end_ms = (number + 1) * PERIOD_MS;
                let reserved_after_ms = pick(rng, &[0, 0, end_ms, self.now_ms + PERIOD_MS / 2]);
                let need_once_refused = pick(rng, &[0, 0, 1, 2, 4]);
                let (key, numbers) = match *kind {
                    "e" => (format!("e:{number}"), vec![ceiling, need, end_ms]),
                    "p" => (format!("p:{number}"), vec![ceiling, need, end_ms, want, least]),
                    "s" => ("s".to_owned(), vec![ceiling, need, PERIOD_MS, want, least, need_once_refused]),
                    "f" => ("f".to_owned(), vec![ceiling, need, PERIOD_MS, want, least, limit, reserved_after_ms]),
                    _ => {
                        let next_end_ms = end_ms + PERIOD_MS;
                        let numbers =
                            [ceiling, need, end_ms, want, least, limit, reserved_after_ms, number, next_end_ms];
                        ("g".to_owned(), numbers.to_vec())
                    }
                };
                keys.push(key);
                arguments.push((*kind).to_owned());
                arguments.extend(numbers.iter().map(u64::to_string));
            }
        }
        let Value::Array(reply) = self.run(ACQUIRE, &keys, &arguments) else { panic!("an array") };
        let reply: Vec<i64> = reply.iter().map(integer).collect();
        self.now_ms = reply[0] as u64;
        let simulated = self.simulated.acquire(&keys, &arguments, self.now_ms);
        assert_eq!(simulated, reply, "{keys:?} {arguments:?}");
    }

    fn refund(&mut self, rng: &mut Rng) {
        let (mut keys, mut arguments) = (Vec::new(), Vec::new());
        let mut kinds = ["p", "s", "f", "g"];
        rng.shuffle(&mut kinds);
        for kind in &kinds[..rng.usize(1..3)] {
            let number = (self.now_ms / PERIOD_MS) - 1 + rng.u64(..3);
            let (key, mark) = match *kind {
                "p" => (format!("p:{number}"), number),
                "s" => ("s".to_owned(), self.now_ms * 8 / PERIOD_MS - rng.u64(..9)),
                "f" => ("f".to_owned(), self.redis.integer(&["HGET", "f", "start"]).unsigned_abs()),
                kind => (kind.to_owned(), number),
            };
            keys.push(key);
            let only = pick(rng, &["", "", "", "1", "3", "all"]);
            let fields = [mark, 5, rng.u64(..4)].map(|number| number.to_string());
            arguments.push((*kind).to_owned());
            arguments.extend(fields);
            arguments.push(only.to_owned());
        }
        // The time of the script too: a counter may have ended.
        let script = format!(
            "local time = redis.call('TIME') local function run() {REFUND} end return {{run(), time[1], time[2]}}"
        );
        let Value::Array(reply) = self.run(&script, &keys, &arguments) else { panic!("an array") };
        let [reply, seconds, micros] = [0, 1, 2].map(|nth| integer(&reply[nth]));
        self.now_ms = (seconds * 1000 + micros / 1000) as u64;
        assert_eq!(self.simulated.refund(&keys, &arguments, self.now_ms).0, reply, "{keys:?} {arguments:?}");
    }
}

fn pick<T: Copy>(rng: &mut Rng, values: &[T]) -> T {
    values[rng.usize(..values.len())]
}

fn integer(value: &Value) -> i64 {
    match value {
        Value::Int(number) => *number,
        Value::BulkString(digits) => std::str::from_utf8(digits).unwrap().parse().unwrap(),
        other => panic!("a number, not {other:?}"),
    }
}

#[test]
fn the_store_in_memory_replies_as_redis() {
    let (mut rng, mut stores) = (seeded_rng(), Stores::start());
    for _ in 0..3000 {
        match rng.u32(..10) {
            0 => stores.step(pick(&mut rng, &[1, 100, 250, 700, PERIOD_MS, 3 * PERIOD_MS])),
            1 | 2 => stores.refund(&mut rng),
            _ => stores.acquire(&mut rng),
        }
    }
    let is_used = |key| stores.simulated.tokens_beyond(&Store::default(), key) > 0;
    assert!(stores.simulated.keys().any(is_used));
}
