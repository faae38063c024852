//! Windows and a wall clock that is stepped: the real binary under libfaketime.
//!
//! The wall clock is faked; the monotonic clock is the machine's. Each reading of the clock reads the offset between the two
//! from a file, so that the test can step the clock while the gateway runs.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::support::client::Client;
use crate::support::eventually;
use crate::support::external_servers::faketime;
use crate::support::one_rule;
use crate::support::process::{BINARY, Process};
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::{TempDir, within};

struct FakedGateway {
    process: Process,
    file: PathBuf,
    /// Milliseconds that the faked clock is ahead of the real one.
    offset_ms: i64,
}

/// Stops threads when dropped, also if the test fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl FakedGateway {
    /// Starts the gateway with a wall clock at this Unix time.
    fn start(toml: &str, unix_ms: i64) -> FakedGateway {
        let scratch = TempDir::new();
        let file = scratch.path().join("offset");
        let offset_ms = unix_ms - real_ms();
        fs::write(&file, offset_text(offset_ms)).unwrap();
        let mut command = Command::new(BINARY);
        command.env("LD_PRELOAD", faketime()).env("FAKETIME_TIMESTAMP_FILE", &file);
        command.env("FAKETIME_NO_CACHE", "1").env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        let process = Process::spawn_command(command, toml, scratch);
        // If the loader does not find the library, it only prints a warning.
        assert!(!process.stderr().contains("preload"), "{}", process.stderr());
        FakedGateway { process, file, offset_ms }
    }

    fn step_s(&mut self, seconds: i64) {
        self.offset_ms += seconds * 1000;
        let new = self.file.with_extension("new");
        fs::write(&new, offset_text(self.offset_ms)).unwrap();
        fs::rename(&new, &self.file).unwrap();
        // The gateway sees a step with its next millisecond.
        thread::sleep(Duration::from_millis(2));
    }

    /// Four clients send requests while the clock is stepped, with at least `between` requests between two steps. Returns the
    /// number of admitted requests.
    fn admitted_under_load(&mut self, steps_s: &[i64], between: u64) -> u64 {
        let (sent, admitted, stop) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        let address = self.process.http;
        let send_requests = || {
            let mut client = Client::connect(address);
            while !stop.load(Ordering::Relaxed) {
                admitted.fetch_add(u64::from(client.get("/a").status == 200), Ordering::Relaxed);
                sent.fetch_add(1, Ordering::Relaxed);
            }
        };
        thread::scope(|scope| {
            (0..4).for_each(|_| drop(scope.spawn(send_requests)));
            let _stop = StopOnDrop(&stop);
            let wait_for_requests = || {
                let enough = sent.load(Ordering::Relaxed) + between;
                eventually("more requests are answered", || sent.load(Ordering::Relaxed) >= enough);
            };
            for step_s in steps_s {
                wait_for_requests();
                self.step_s(*step_s);
            }
            wait_for_requests();
        });
        admitted.into_inner()
    }

    /// The status of a request, and the seconds until the window ends.
    fn get(&self) -> (u16, u64) {
        let response = self.process.get("/a");
        (response.status, items(&response, "ratelimit")[0].get("t"))
    }

    /// Steps the clock to about this number of seconds before the end of the window. The window is used up, so reading its end
    /// uses no token.
    fn step_to_window_end(&mut self, seconds: i64) {
        let (status, t) = self.get();
        assert_eq!(status, 429);
        self.step_s(t as i64 - seconds);
    }

    fn use_up(&self, limit: u64) {
        for left in (0..limit).rev() {
            assert_eq!(remaining(&self.process.get("/a").expect(200), "r"), left);
        }
        self.process.get("/a").expect(429);
    }
}

fn real_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as i64
}

fn offset_text(ms: i64) -> String {
    format!("{}{}.{:03}\n", if ms < 0 { '-' } else { '+' }, ms.abs() / 1000, ms.abs() % 1000)
}

/// 2023-11-14T22:15:00Z.
const MINUTE_MS: i64 = 1_700_000_100_000;

fn per_minute() -> String {
    one_rule("key = \"ip\"\nwindows = [\"3/minute\"]")
}

#[test]
fn a_window_ends_by_the_wall_clock() {
    let mut gateway = FakedGateway::start(&per_minute(), MINUTE_MS + 1000);
    gateway.use_up(3);
    gateway.step_to_window_end(5);
    let start = Instant::now();
    within(Duration::from_secs(5), || eventually("the next minute begins", || gateway.get().0 == 200));
    let took = start.elapsed();
    assert!(took > Duration::from_millis(2500), "{took:?}");
    let (_, t) = gateway.get();
    assert!(t > 40, "{t}");
}

#[test]
fn a_forward_step_opens_the_next_window_at_once() {
    let mut gateway = FakedGateway::start(&per_minute(), MINUTE_MS + 1000);
    for _ in 0..5 {
        gateway.use_up(3);
        gateway.step_s(60);
    }
    gateway.step_s(365 * 86_400);
    gateway.use_up(3);
}

#[test]
fn a_backward_step_reopens_no_ended_window() {
    let mut gateway = FakedGateway::start(&per_minute(), MINUTE_MS + 1000);
    gateway.use_up(3);
    gateway.step_s(60);
    gateway.use_up(3);
    gateway.step_to_window_end(15);
    let start = Instant::now();
    let (_, before) = gateway.get();
    gateway.step_s(-3600);
    // The gateway reopens neither an earlier minute nor the current one.
    let (status, after) = gateway.get();
    assert_eq!(status, 429);
    // The remaining time shows no step.
    assert!(after <= before && before - after <= start.elapsed().as_secs() + 1, "{before} s, then {after} s");
    gateway.step_s(-60);
    assert_eq!(gateway.get().0, 429);
    // The minute ends at its original end, and not an hour later.
    eventually("the minute ends", || gateway.get().0 == 200);
    gateway.process.get("/a").expect(200);
    gateway.process.get("/a").expect(200);
    gateway.process.get("/a").expect(429);
}

#[test]
fn after_a_wrong_forward_step_no_client_waits_longer_than_a_period() {
    let mut gateway = FakedGateway::start(&one_rule("key = \"ip\"\nwindows = [\"3/20s\"]"), MINUTE_MS);
    gateway.use_up(3);
    // A step to the next day, whose window is used up, and back.
    gateway.step_s(86_400);
    gateway.use_up(3);
    gateway.step_s(-86_400);
    let (_, t) = gateway.get();
    assert!(t <= 20, "{t}");
    eventually("the next window opens", || gateway.get().0 == 200);
}

#[test]
fn small_clock_steps_admit_no_more_than_the_elapsed_windows() {
    // Each window, and the tokens that may have accumulated before.
    for (window, accumulated) in [
        ("\"3/2s\"", 0),
        ("{ limit = 3, period = \"2s\", start = \"first-request\" }", 0),
        ("{ limit = 3, period = \"2s\", start = \"random\" }", 0),
        ("{ limit = 3, period = \"2s\", capacity = 5 }", 2),
    ] {
        steps_admit_no_more(window, 3, accumulated);
    }
}

fn steps_admit_no_more(window: &str, limit: u64, accumulated: u64) {
    let mut gateway = FakedGateway::start(&one_rule(&format!("key = \"ip\"\nwindows = [{window}]")), MINUTE_MS);
    let start = Instant::now();
    let (mut admitted, mut ahead_s) = (0, 0_i64);
    let mut furthest_s = 0;
    for round in 0_i64..300 {
        let step = [2, -3, 1, -1, 3, -2, 0, 0][(round % 8) as usize];
        gateway.step_s(step);
        ahead_s += step;
        furthest_s = furthest_s.max(ahead_s);
        admitted += u64::from(gateway.get().0 == 200);
    }
    // The gateway's time never goes back: it advances by the elapsed time and the largest step.
    let windows = (start.elapsed().as_millis() as u64 + furthest_s as u64 * 1000) / 2000 + 2;
    assert!(admitted <= limit * windows + accumulated, "{window}: {admitted} in {windows} windows");
    // No client is refused for longer than a period.
    within(Duration::from_secs(2), || eventually("a window opens", || gateway.get().0 == 200));
}

/// Steps of hours, at most an hour ahead of the start: past midnight in Berlin, but not further.
const HOURS_S: [i64; 7] = [3600, -7200, 7200, -3600, -3600, 3600, 3600];

#[test]
fn clock_steps_of_hours_under_load_admit_what_the_windows_grant() {
    for (window, granted) in [
        ("{ limit = 30, period = \"day\", timezone = \"Europe/Berlin\" }", 60),
        ("{ limit = 30, period = \"day\", timezone = \"Europe/Berlin\", capacity = 45 }", 75),
        ("{ limit = 30, period = \"day\" }", 30),
        ("{ limit = 30, period = \"day\", shards = 4 }", 30),
        ("{ limit = 30, period = \"2h\", start = \"first-request\" }", 30),
        ("{ limit = 30, period = \"month\", timezone = \"Europe/Berlin\" }", 30),
    ] {
        let mut gateway = FakedGateway::start(&one_rule(&format!("key = \"global\"\nwindows = [{window}]")), MINUTE_MS);
        assert_eq!(gateway.admitted_under_load(&HOURS_S, 60), granted, "{window}");
    }
}

#[test]
fn a_delayed_request_passes_in_its_window_despite_clock_steps() {
    let rule = "key = \"ip\"\nwindows = [\"20/2s\"]\non_limit = \"delay\"\nmax_delay = \"2s\"";
    let mut gateway = FakedGateway::start(&one_rule(rule), MINUTE_MS);
    let start = Instant::now();
    let admitted = gateway.admitted_under_load(&[1, -1, 2, -3, 1, 1, -2, 2], 10);
    // These steps lead at most two seconds ahead.
    let windows = (start.elapsed().as_millis() as u64 + 2000) / 2000 + 2;
    assert!(admitted <= 20 * windows, "{admitted} in {windows} windows");
    assert!(admitted >= 60, "{admitted}");
}
