//! Four gateways on one Redis that are killed and restarted under load: no key exceeds its limit. Without kills, the limit is
//! used up.
//!
//! `make kills-shared` runs these tests for a minute and prints the result.

use std::thread;
use std::time::{Duration, Instant};

use crate::support::gateway_group::{rule_by_key, shared_config};
use crate::support::load_checker::{Layer, Load, LoadResults, now_ms};
use crate::support::process::Process;
use crate::support::redis::{RedisServer, free_port};
use crate::support::{eventually, seeded_rng};

const KEYS: u32 = 200;
const GATEWAYS: usize = 4;
/// Windows of the first two layers end during the run.
const LAYERS: [Layer; 3] = [
    Layer { limit: 4, period_ms: 2000 },
    Layer { limit: 12, period_ms: 10_000 },
    Layer { limit: 60, period_ms: 3_600_000 },
];
const WINDOWS: &str = "[\"4/2s\", \"12/10s\", \"60/hour\"]";

/// The duration; short by default.
fn duration() -> Duration {
    let text = std::env::var("TRANSOM_KILLS_SHARED_S");
    Duration::from_secs(text.map_or(5, |text| text.parse().expect("`TRANSOM_KILLS_SHARED_S` is a number")))
}

/// A configuration with a port that no other process takes while its gateway is down.
fn toml(redis: &RedisServer, settings: &str, windows: &str) -> String {
    let listen =
        format!("listen = {{ http = \"127.0.0.1:{}\", admin = \"127.0.0.1:{}\" }}\n", free_port(), free_port());
    // A request without a timely response is not admitted, and Redis may have counted it.
    let settings = format!("on_outage = \"refuse\"\ntimeout = \"1s\"\n{settings}");
    format!(
        "{listen}workers = 2\n{}",
        shared_config(&format!("\"{}\"", redis.url()), &settings, &rule_by_key(windows, ""))
    )
}

/// Checks that every counter in Redis has at least the number of admitted requests, and at most the limit. Returns the number
/// of counters.
fn assert_counters_agree(redis: &RedisServer, results: &LoadResults) -> usize {
    let keys: Vec<String> = redis.keys().into_iter().filter(|key| key.starts_with("transom:{r|")).collect();
    assert!(!keys.is_empty());
    for key in &keys {
        let parts: Vec<&str> = key.split(['|', '}', ':']).filter(|part| !part.is_empty()).collect();
        let [_, _, client, layer, window] = parts[..] else { panic!("{key}") };
        let layer = ["2s", "10s", "hour"].iter().position(|name| *name == layer).unwrap_or_else(|| panic!("{key}"));
        let admitted = results.admitted_in_window(client.parse().unwrap(), layer, window.parse().unwrap());
        let value = redis.cli(&["GET", key]);
        // The key may have expired since.
        let counted = if value.is_empty() { u64::MAX } else { value.parse().unwrap() };
        let limit = LAYERS[layer].limit;
        assert!(admitted <= counted.min(limit), "{key}: {admitted} admitted, {counted} counted");
        assert!(value.is_empty() || counted <= limit, "{key}: {counted}");
    }
    keys.len()
}

/// Sends requests to gateways that are killed and restarted while `continues` returns `true`. Returns the responses and the
/// number of kills.
fn run_with_kills(
    load: Load,
    layers: &[Layer],
    tomls: &[String],
    continues: impl Fn(&Load, u32) -> bool,
) -> (LoadResults, u32) {
    let mut kills = 0;
    let results = load.run_during(layers, |load| {
        let mut rng = seeded_rng();
        let mut gateways: Vec<Process> = tomls.iter().map(|toml| Process::spawn(toml)).collect();
        load.send_to(&gateways.iter().map(|gateway| gateway.http).collect::<Vec<_>>());
        while continues(load, kills) {
            thread::sleep(Duration::from_micros(rng.u64(..400_000)));
            let which = rng.usize(..GATEWAYS);
            // Dropping the process kills it; then it is started again on its port.
            drop(gateways.remove(which));
            thread::sleep(Duration::from_micros(rng.u64(..100_000)));
            gateways.insert(which, Process::spawn(&tomls[which]));
            kills += 1;
        }
    });
    (results, kills)
}

fn assert_limits_despite_kills(mode: &str) {
    let redis = RedisServer::start();
    let tomls: Vec<String> = (0..GATEWAYS).map(|_| toml(&redis, &format!("mode = \"{mode}\""), WINDOWS)).collect();
    let end = Instant::now() + duration();
    let (results, kills) = run_with_kills(Load::for_keys(KEYS), &LAYERS, &tomls, |load, kills| {
        Instant::now() < end || (!load.has_reached_limits(&LAYERS[..2]) && kills < 1000)
    });
    let at_limit = results.assert_limits(&LAYERS);
    let counters = assert_counters_agree(&redis, &results);
    println!(
        "{mode}: {kills} kills, {} requests answered, {} admitted, {at_limit:?} keys and windows at the limit of each layer; \
         {counters} counters in Redis agree; {} calls",
        results.requests,
        results.admitted,
        redis.call_count("evalsha"),
    );
    assert!(at_limit[0] > 0 && at_limit[1] > 0, "no limit was ever reached in {kills} kills");
}

/// As [`assert_limits_despite_kills`], for a limit on every interval of two seconds.
fn assert_sliding_limit_despite_kills(mode: &str) {
    const LIMIT: u64 = 6;
    let redis = RedisServer::start();
    let windows = format!("[{{ limit = {LIMIT}, period = \"2s\", sliding = true }}]");
    let toml = || toml(&redis, &format!("mode = \"{mode}\""), &windows);
    let tomls: Vec<String> = (0..GATEWAYS).map(|_| toml()).collect();
    let end = Instant::now() + duration();
    let (results, kills) = run_with_kills(Load::for_keys(20), &[], &tomls, |_load, _kills| Instant::now() < end);
    let at_limit = results.assert_sliding_limit(LIMIT, 2000);
    println!(
        "{mode}, sliding: {kills} kills, {} requests answered, {} admitted, {at_limit} intervals at the limit",
        results.requests, results.admitted
    );
    assert!(at_limit > 0, "the limit was never reached in {kills} kills");
}

#[test]
fn killed_gateways_grant_no_more_than_a_sliding_limit() {
    ["lease", "exact"].into_iter().for_each(assert_sliding_limit_despite_kills);
}

#[test]
fn killed_gateways_grant_no_more_than_the_limit_with_leases() {
    assert_limits_despite_kills("lease");
}

#[test]
fn killed_gateways_grant_no_more_than_the_limit_in_exact_mode() {
    assert_limits_despite_kills("exact");
}

#[test]
fn demand_above_the_limit_uses_it_up() {
    let redis = RedisServer::start();
    let layers = [Layer { limit: 30, period_ms: 5000 }];
    let gateways: Vec<Process> =
        (0..GATEWAYS).map(|_| Process::spawn(&toml(&redis, "mode = \"lease\"", "[\"30/5s\"]"))).collect();
    // So few keys that a slow machine sends twice the demand, too.
    let results = Load::for_keys(5).run_during(&layers, |load| {
        // From the beginning of a window to the end of a later one.
        while now_ms() % layers[0].period_ms > 100 {
            thread::sleep(Duration::from_millis(10));
        }
        let first = now_ms() / layers[0].period_ms;
        load.send_to(&gateways.iter().map(|gateway| gateway.http).collect::<Vec<_>>());
        let mut end = first + 2.max(duration().as_millis() as u64 / layers[0].period_ms);
        let wait_for_window = |number: u64| {
            while now_ms() / layers[0].period_ms < number {
                thread::sleep(Duration::from_millis(10));
            }
        };
        wait_for_window(end);
        // A slow machine may need more windows.
        eventually("a key has sent twice the limit in a window", || {
            load.has_demand(&layers) || {
                end += 1;
                wait_for_window(end);
                false
            }
        });
    });
    results.assert_limits(&layers);
    let (windows, share) = results.utilization(&layers, 0);
    println!("{windows} keys and windows with twice the demand: {:.2} % of the limit admitted", share * 100.0);
    assert!(windows > 0 && share >= 0.99, "{windows} windows, {share}");
}
