//! Simulates the cost of leases, request by request: Redis calls, waiting requests and unused tokens, by the number of
//! gateways and the rate of requests. docs/explanation/lease-model.md states the assumptions.
//!
//! `cargo bench --bench simulation` prints the table; `-- --chart docs/explanation/lease-load.svg` draws it as well, and `-- --small`
//! prints the figures that benches/leases.py measures. The simulation repeats the gateway's algorithm and uses its constants.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt::Write as _;
use std::time::Duration;

use transom_store::lease_sizing;
use transom_store::shared_counters::SWEEP_PERIOD;

const PERIOD_US: u64 = 10_000_000;
const WINDOWS: u64 = 2;
const BRISK_US: u64 = us(lease_sizing::FOURFOLD_BELOW);
const BUSY_US: u64 = us(lease_sizing::TWOFOLD_BELOW);
const SLOW_US: u64 = us(lease_sizing::HALF_ABOVE);
const MEMORY_US: u64 = us(lease_sizing::RECORD_LIFETIME);
const RECHECK_US: u64 = us(lease_sizing::RECHECK_PERIOD.0);
/// Average time until an unused lease is noticed.
const IDLE_US: u64 = us(lease_sizing::IDLE_AFTER) + us(SWEEP_PERIOD) / 2;

/// From a call of Redis to its reply, microseconds; Redis decides at half of that time.
const ROUND_TRIP_US: u64 = 1_000;
/// The delay of benches/leases.py, by which waiting requests are recognized.
const SMALL_ROUND_TRIP_US: u64 = 20_000;

const GATEWAYS: [u64; 7] = [1, 3, 10, 30, 100, 300, 1000];
const RATES: [f64; 4] = [1_000.0, 10_000.0, 100_000.0, 400_000.0];
const SMALL_GATEWAYS: [u64; 3] = [1, 2, 4];
const SMALL_RATE: f64 = 500.0;

const fn us(duration: Duration) -> u64 {
    duration.as_micros() as u64
}

/// The divisor in acquire.lua: of the tokens left beyond the need, this part is granted.
fn part() -> u64 {
    let script = include_str!("../crates/store/src/acquire.lua");
    let divisor = script.split_once("math.floor(spare / ").and_then(|(_, rest)| rest.split_once(')'));
    divisor.and_then(|(part, _)| part.parse().ok()).expect("acquire.lua divides the spare tokens by a number")
}

/// The clients and their limits.
struct Load {
    name: &'static str,
    keys: usize,
    /// Zipf exponent. 0: all keys are equally frequent; 1: key number n is 1/n times as frequent as the first.
    zipf: f64,
    /// The limit of a key in a window, from the rate of all requests.
    limit: fn(f64) -> u64,
}

/// Loads that benches/leases.py can measure too.
const SMALL_LOADS: [Load; 2] = [
    Load { name: "one counter for all", keys: 1, zipf: 0.0, limit: |rate| (rate * 5.0) as u64 },
    Load { name: "1,000 clients (Zipf), 100 in 10 s each", keys: 1_000, zipf: 1.0, limit: |_| 100 },
];

const LOADS: [Load; 2] = [
    // Half of the demand.
    Load { name: "one counter for all", keys: 1, zipf: 0.0, limit: |rate| (rate * 5.0) as u64 },
    Load { name: "10,000 clients (Zipf), 1,000 in 10 s each", keys: 10_000, zipf: 1.0, limit: |_| 1000 },
];

/// The state of one key in one gateway.
#[derive(Default)]
struct Lease {
    window: u64,
    balance: u64,
    fetch_size: u64,
    fetched_us: u64,
    spent_us: u64,
    is_fetching: bool,
    /// The last fetch got no tokens beyond the need.
    is_exhausted: bool,
    /// The window is known to be exhausted until this time.
    full_until_us: Option<u64>,
    waiting: Vec<u64>,
    is_watched: bool,
}

/// A key in Redis, and its demand.
#[derive(Default, Clone)]
struct Counter {
    window: u64,
    used: u64,
    requested: u64,
    admitted: u64,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Decided { id: u64, need: u64, want: u64 },
    Replied { id: u64, window: u64, granted: u64, is_full: bool },
    Idle { id: u64 },
    Returned { id: u64, window: u64, tokens: u64 },
}

#[derive(Default)]
struct Sums {
    requests: u64,
    calls: u64,
    waited: u64,
    /// For keys and windows whose demand exceeded the limit: the limits, and their unused part.
    limit: u64,
    missing: u64,
}

struct Simulation<'l> {
    load: &'l Load,
    limit: u64,
    part: u64,
    half_round_trip_us: u64,
    counters: Vec<Counter>,
    leases: HashMap<u64, Lease>,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    sums: Sums,
}

/// SplitMix64 with a fixed seed: every run is the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// In [0, 1).
    fn share(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

impl Lease {
    fn enter(&mut self, window: u64) {
        if self.window != window {
            *self = Lease {
                window,
                fetch_size: self.fetch_size,
                fetched_us: self.fetched_us,
                is_fetching: self.is_fetching,
                waiting: std::mem::take(&mut self.waiting),
                is_watched: self.is_watched,
                ..Lease::default()
            };
        }
    }

    fn is_low(&self) -> bool {
        !self.is_fetching
            && !self.is_exhausted
            && self.full_until_us.is_none()
            && self.fetch_size > 1
            && self.balance <= self.fetch_size / 2
    }
}

impl Simulation<'_> {
    fn run(load: &Load, gateways: u64, rate: f64, round_trip_us: u64) -> Sums {
        let cumulative = (1..=load.keys).scan(0.0, |sum, n| {
            *sum += (n as f64).powf(-load.zipf);
            Some(*sum)
        });
        let cumulative: Vec<f64> = cumulative.collect();
        let whole = cumulative[load.keys - 1];
        let counters = vec![Counter::default(); load.keys];
        let (leases, events, sums) = (HashMap::new(), BinaryHeap::new(), Sums::default());
        let (limit, part, half_round_trip_us) = ((load.limit)(rate).max(1), part(), round_trip_us / 2);
        let mut simulation = Simulation { load, limit, part, half_round_trip_us, counters, leases, events, sums };
        let (mut random, mut now) = (Random(1), 0.0);
        loop {
            now -= (1.0 - random.share()).ln() * 1e6 / rate;
            while simulation.events.peek().is_some_and(|Reverse((at, _))| *at <= now as u64) {
                if let Some(Reverse((at, event))) = simulation.events.pop() {
                    simulation.handle(at, event);
                }
            }
            if now as u64 >= WINDOWS * PERIOD_US {
                break;
            }
            let drawn = random.share() * whole;
            let key = cumulative.partition_point(|sum| *sum <= drawn).min(load.keys - 1);
            simulation.request(now as u64, random.next() % gateways * load.keys as u64 + key as u64);
        }
        for key in 0..load.keys {
            simulation.enter(key, u64::MAX);
        }
        simulation.sums
    }

    /// The counter of a key, in its window.
    fn enter(&mut self, key: usize, window: u64) -> &mut Counter {
        let counter = &mut self.counters[key];
        if counter.window != window {
            if counter.requested > self.limit {
                self.sums.limit += self.limit;
                self.sums.missing += self.limit - counter.admitted;
            }
            *counter = Counter { window, ..Counter::default() };
        }
        counter
    }

    fn request(&mut self, now: u64, id: u64) {
        let (key, window) = ((id % self.load.keys as u64) as usize, now / PERIOD_US);
        self.sums.requests += 1;
        self.enter(key, window).requested += 1;
        let lease = self.leases.entry(id).or_default();
        lease.enter(window);
        if lease.balance > 0 {
            lease.balance -= 1;
            lease.spent_us = now;
            self.counters[key].admitted += 1;
            if lease.is_low() {
                self.fetch(now, id, 0);
            }
        } else if let Some(until) = lease.full_until_us {
            if now >= until && !lease.is_fetching {
                lease.full_until_us = Some(now + RECHECK_US);
                self.fetch(now, id, 0);
            }
        } else {
            lease.waiting.push(now);
            self.sums.waited += 1;
            if !lease.is_fetching {
                self.fetch(now, id, 1);
            }
        }
    }

    fn fetch(&mut self, now: u64, id: u64, need: u64) {
        let lease = self.leases.entry(id).or_default();
        let next = match now - lease.fetched_us {
            lasted if lease.fetch_size == 0 || lasted > MEMORY_US => 0,
            lasted if lasted < BRISK_US => lease.fetch_size * 4,
            lasted if lasted < BUSY_US => lease.fetch_size * 2,
            lasted if lasted > SLOW_US => lease.fetch_size / 2,
            _ => lease.fetch_size,
        };
        lease.fetch_size = next.max(lease.waiting.len() as u64).max(1);
        (lease.fetched_us, lease.is_fetching) = (now, true);
        self.sums.calls += 1;
        self.events.push(Reverse((now + self.half_round_trip_us, Event::Decided { id, need, want: lease.fetch_size })));
    }

    fn handle(&mut self, now: u64, event: Event) {
        let (window, keys, limit, part) = (now / PERIOD_US, self.load.keys as u64, self.limit, self.part);
        match event {
            Event::Decided { id, need, want } => {
                let counter = self.enter((id % keys) as usize, window);
                let spare = limit - counter.used;
                let granted = if spare < need { 0 } else { need + (want - need).min((spare - need) / part) };
                counter.used += granted;
                let is_full = counter.used >= limit;
                self.events
                    .push(Reverse((now + self.half_round_trip_us, Event::Replied { id, window, granted, is_full })));
            }
            Event::Replied { id, window: of, granted, is_full } => self.record_reply(now, id, of, granted, is_full),
            Event::Idle { id } => {
                let lease = self.leases.entry(id).or_default();
                lease.is_watched = false;
                let idle_us = lease.spent_us.max(lease.fetched_us) + IDLE_US;
                if now < idle_us || lease.is_fetching {
                    lease.is_watched = true;
                    self.events.push(Reverse((idle_us.max(now + us(SWEEP_PERIOD)), Event::Idle { id })));
                    return;
                }
                lease.fetch_size /= 2;
                if lease.window != window || lease.balance == 0 {
                    return;
                }
                let tokens = std::mem::take(&mut lease.balance);
                self.sums.calls += 1;
                self.events.push(Reverse((now + self.half_round_trip_us, Event::Returned { id, window, tokens })));
            }
            Event::Returned { id, window: of, tokens } if of == window => {
                self.enter((id % keys) as usize, window).used -= tokens;
            }
            Event::Returned { .. } => {}
        }
    }

    fn record_reply(&mut self, now: u64, id: u64, of: u64, granted: u64, is_full: bool) {
        let (key, window) = ((id % self.load.keys as u64) as usize, now / PERIOD_US);
        self.enter(key, window);
        let lease = self.leases.entry(id).or_default();
        lease.enter(window);
        lease.is_fetching = false;
        if of == window {
            lease.balance += granted;
            lease.is_exhausted = granted == 0;
            lease.full_until_us = is_full.then_some(now + RECHECK_US);
            lease.fetch_size = if granted > 0 { granted } else { lease.fetch_size };
        }
        if lease.balance > 0 && !lease.is_watched {
            (lease.is_watched, lease.spent_us) = (true, now);
            self.events.push(Reverse((now + IDLE_US, Event::Idle { id })));
        }
        let served = (lease.waiting.len() as u64).min(lease.balance);
        lease.balance -= served;
        lease.waiting.drain(..served as usize);
        if lease.full_until_us.is_some() {
            lease.waiting.clear();
        }
        let (has_waiting, is_low) = (!lease.waiting.is_empty(), lease.is_low());
        self.counters[key].admitted += served;
        if has_waiting || is_low {
            self.fetch(now, id, u64::from(has_waiting));
        }
    }
}

/// A figure by gateways, one line for each rate.
type Lines = Vec<Vec<f64>>;

/// A panel of the chart: both axes in powers of ten.
fn panel(svg: &mut String, left: f64, title: &str, (low, high): (i32, i32), lines: &Lines) {
    let (width, height, top) = (230.0, 180.0, 40.0);
    let x = |gateways: u64| left + width * (gateways as f64).log10() / 3.0;
    let y = |value: f64| {
        top + height * (1.0 - (value.log10().max(f64::from(low)) - f64::from(low)) / f64::from(high - low))
    };
    let _ = writeln!(svg, "<text x=\"{left}\" y=\"24\" font-weight=\"bold\">{title}</text>");
    for power in low..=high {
        let at = y(10f64.powi(power));
        let label = if power == low { "0".to_owned() } else { format!("{}", 10f64.powi(power)) };
        let _ = writeln!(
            svg,
            "<path d=\"M{left} {at:.1}h{width}\" stroke=\"#ddd\"/><text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            left - 5.0,
            at + 4.0
        );
    }
    for gateways in [1, 10, 100, 1000] {
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{gateways}</text>",
            x(gateways),
            top + height + 16.0
        );
    }
    for ((line, rate), color) in lines.iter().zip(RATES).zip(["#7aa6c2", "#3d7ea6", "#d98032", "#b3261e"]) {
        let points: Vec<String> =
            line.iter().zip(GATEWAYS).map(|(value, gateways)| format!("{:.1},{:.1}", x(gateways), y(*value))).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"><title>{rate} requests/s</title></polyline>",
            points.join(" ")
        );
    }
}

fn heading(load: &Load) {
    println!("\n{}\n", load.name);
    println!("| requests/s | gateways | Redis calls/s | calls per request | waited | unused, of the limit |");
    println!("| ---------: | -------: | ------------: | ----------------: | -----: | -----------------------: |");
}

/// A line of the table: calls per request, and percentages of waiting requests and of unused tokens.
fn row(load: &Load, gateways: u64, rate: f64, round_trip_us: u64) -> [f64; 3] {
    let sums = Simulation::run(load, gateways, rate, round_trip_us);
    let requests = sums.requests as f64;
    let (calls, waited) = (sums.calls as f64 / requests, 100.0 * sums.waited as f64 / requests);
    let missing = 100.0 * sums.missing as f64 / sums.limit.max(1) as f64;
    println!("| {rate} | {gateways} | {:.0} | {calls:.4} | {waited:.2} % | {missing:.3} % |", calls * rate);
    [calls, waited, missing]
}

fn main() {
    if std::env::args().any(|argument| argument == "--small") {
        for load in &SMALL_LOADS {
            heading(load);
            SMALL_GATEWAYS.iter().for_each(|gateways| _ = row(load, *gateways, SMALL_RATE, SMALL_ROUND_TRIP_US));
        }
        return;
    }
    let chart = std::env::args().skip_while(|argument| argument != "--chart").nth(1);
    let mut svg = String::new();
    for (nth, load) in LOADS.iter().enumerate() {
        heading(load);
        let mut figures: [Lines; 3] = Default::default();
        for rate in RATES {
            let mut lines: [Vec<f64>; 3] = Default::default();
            for gateways in GATEWAYS {
                let figures = row(load, gateways, rate, ROUND_TRIP_US);
                lines.iter_mut().zip(figures).for_each(|(line, value)| line.push(value));
            }
            figures.iter_mut().zip(lines).for_each(|(figure, line)| figure.push(line));
        }
        let _ = writeln!(
            svg,
            "<g transform=\"translate(0 {})\"><text x=\"10\" y=\"0\">{}</text>",
            30 + nth * 270,
            load.name
        );
        panel(&mut svg, 50.0, "Redis calls per request", (-5, 0), &figures[0]);
        panel(&mut svg, 340.0, "% of requests that waited", (-3, 2), &figures[1]);
        panel(&mut svg, 630.0, "% of the limit that stayed unused", (-3, 2), &figures[2]);
        svg.push_str("</g>\n");
    }
    if let Some(path) = chart {
        let head = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 890 590\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"890\" height=\"590\" fill=\"#fff\"/>\n";
        let foot = "<text x=\"10\" y=\"580\">By the number of gateways; requests per second: <tspan fill=\"#7aa6c2\">1,000</tspan>, <tspan fill=\"#3d7ea6\">10,000</tspan>, <tspan fill=\"#d98032\">100,000</tspan>, <tspan fill=\"#b3261e\">400,000</tspan></text>\n</svg>\n";
        if let Err(error) = std::fs::write(&path, format!("{head}{svg}{foot}")) {
            eprintln!("{path}: {error}");
        }
    }
}
