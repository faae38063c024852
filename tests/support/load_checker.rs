//! Clients that send requests to several gateways and count admitted requests per key and window, to check gateways that are
//! killed under load. They pause only after a refusal.
//!
//! A response counts in a window only if its request was sent and the response received well within that window, because
//! the clock of the gateway may be slightly ahead of the clock of the client. So the count is never too high, and rarely
//! too low.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, RwLock};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::client::request;
use super::{DEADLINE, seeded_rng};

/// The keys of the requests.
pub const KEYS: u32 = 10_000;
/// Half of the requests are of these, so that their limits bind.
const HOT: u32 = 10;
/// The pause of a client after a refusal: further ones would show nothing.
const PAUSE_AFTER_REFUSAL: Duration = Duration::from_millis(3);
/// The maximum difference between the clocks of gateway and client.
pub const MARGIN_MS: u64 = 50;

/// A layer to check: `limit` requests in each window of `period_ms`, aligned to the Unix epoch.
#[derive(Clone, Copy)]
pub struct Layer {
    pub limit: u64,
    pub period_ms: u64,
}

/// Counts of the responses that clients received.
#[derive(Default)]
pub struct LoadResults {
    pub requests: u64,
    pub admitted: u64,
    /// By key, position of the layer, and number of the window.
    admitted_by_window: HashMap<(u32, usize, u64), u64>,
    /// When the admitted requests of each key were sent, and when their responses were received.
    admitted_at: HashMap<u32, Vec<(u64, u64)>>,
    /// The number of responses in each window, and how many of them were admitted.
    responses_by_window: HashMap<(u32, usize, u64), (u64, u64)>,
}

impl LoadResults {
    fn record_admitted(&mut self, layers: &[Layer], key: u32, sent_ms: u64, received_ms: u64) {
        self.admitted += 1;
        self.admitted_at.entry(key).or_default().push((sent_ms, received_ms));
        for (position, layer) in layers.iter().enumerate() {
            let window = sent_ms.saturating_sub(MARGIN_MS) / layer.period_ms;
            if window == (received_ms + MARGIN_MS) / layer.period_ms {
                *self.admitted_by_window.entry((key, position, window)).or_default() += 1;
            }
        }
    }

    fn record_response(&mut self, layers: &[Layer], key: u32, received_ms: u64, is_admitted: bool) {
        for (position, layer) in layers.iter().enumerate() {
            let responses = self.responses_by_window.entry((key, position, received_ms / layer.period_ms)).or_default();
            *responses = (responses.0 + 1, responses.1 + u64::from(is_admitted));
        }
    }

    /// How often a key was admitted in a window of a layer.
    pub fn admitted_in_window(&self, key: u32, layer: usize, window: u64) -> u64 {
        self.admitted_by_window.get(&(key, layer, window)).copied().unwrap_or(0)
    }

    /// All windows in which a key sent at least twice as many requests as the layer grants: their number, and the share of the
    /// limit that was admitted.
    pub fn utilization(&self, layers: &[Layer], layer: usize) -> (usize, f64) {
        let limit = layers[layer].limit;
        let demanded = self
            .responses_by_window
            .iter()
            .filter(|((_, of, _), (requests, _))| *of == layer && *requests >= 2 * limit);
        let (windows, admitted) =
            demanded.fold((0, 0), |(windows, sum), (_, (_, admitted))| (windows + 1, sum + (*admitted).min(limit)));
        (windows, admitted as f64 / (limit * windows as u64).max(1) as f64)
    }

    /// Fails if a key was admitted more often than `limit` in any interval of `period_ms`, wherever it begins; returns in how
    /// many intervals the limit was reached.
    pub fn assert_sliding_limit(&self, limit: u64, period_ms: u64) -> usize {
        let mut at_limit = 0;
        for (key, admitted) in &self.admitted_at {
            for (begin_ms, _) in admitted {
                let end_ms = begin_ms + period_ms - 2 * MARGIN_MS;
                let inside = |(sent_ms, received_ms): &&(u64, u64)| sent_ms >= begin_ms && *received_ms <= end_ms;
                let count = admitted.iter().filter(inside).count() as u64;
                assert!(count <= limit, "key {key} was admitted {count} times in {period_ms} ms from {begin_ms}");
                at_limit += usize::from(count == limit);
            }
        }
        at_limit
    }

    /// Fails if a key was admitted more often than its limit; returns how many keys and windows reached their limit per layer.
    pub fn assert_limits(&self, layers: &[Layer]) -> Vec<usize> {
        let mut at_limit = vec![0; layers.len()];
        for ((key, layer, window), admitted) in &self.admitted_by_window {
            // A test may check only the first layers.
            let Some(Layer { limit, .. }) = layers.get(*layer) else { continue };
            assert!(admitted <= limit, "key {key} was admitted {admitted} times in window {window} of layer {layer}");
            at_limit[*layer] += usize::from(admitted == limit);
        }
        at_limit
    }
}

/// The load: addresses of the gateways, keys, and the results so far.
pub struct Load {
    /// The keys of the requests, and the number of keys that get half of the requests.
    keys: (u32, u32),
    /// Whether gateways may respond 503 because counters are unavailable.
    may_fail: bool,
    addresses: RwLock<Vec<SocketAddr>>,
    stopped: AtomicBool,
    results: Mutex<LoadResults>,
}

impl Default for Load {
    fn default() -> Load {
        Load {
            keys: (KEYS, HOT),
            may_fail: false,
            addresses: RwLock::default(),
            stopped: AtomicBool::default(),
            results: Mutex::default(),
        }
    }
}

impl Load {
    /// A load of `keys` equally frequent keys, for gateways that may respond 503.
    pub fn for_keys(keys: u32) -> Load {
        Load { keys: (keys, keys), may_fail: true, ..Load::default() }
    }

    /// From now on requests go to these gateways. If there are none, clients keep their connections: after a gateway was
    /// killed, another process may get its port.
    pub fn send_to(&self, addresses: &[SocketAddr]) {
        *self.addresses.write().unwrap() = addresses.to_vec();
    }

    /// Whether some key has reached its limit in each layer.
    pub fn has_reached_limits(&self, layers: &[Layer]) -> bool {
        self.results.lock().unwrap().assert_limits(layers).iter().all(|at_limit| *at_limit > 0)
    }

    /// Whether some key has sent twice as many requests in a window as the first layer grants.
    pub fn has_demand(&self, layers: &[Layer]) -> bool {
        self.results.lock().unwrap().utilization(layers, 0).0 > 0
    }

    /// Four clients send requests while `during` runs; returns their responses.
    pub fn run_during(self, layers: &[Layer], during: impl FnOnce(&Load)) -> LoadResults {
        thread::scope(|scope| {
            let load = &self;
            (0..4).for_each(|number| drop(scope.spawn(move || load.client(number, layers))));
            // Ends the clients also if `during` panics.
            let _stop = StopOnDrop(load);
            during(load);
        });
        self.results.into_inner().unwrap()
    }

    fn client(&self, number: usize, layers: &[Layer]) {
        let mut rng = seeded_rng();
        let mut connection: Option<(SocketAddr, TcpStream)> = None;
        while !self.stopped.load(Ordering::Relaxed) {
            let address = {
                let addresses = self.addresses.read().unwrap();
                (!addresses.is_empty()).then(|| addresses[number % addresses.len()])
            };
            connection = connection.filter(|(to, _)| address.is_none_or(|address| address == *to));
            if connection.is_none() {
                connection = address.and_then(|address| Some((address, connect(address).ok()?)));
            }
            let Some((_, stream)) = &mut connection else {
                // No gateway accepts connections at the moment.
                thread::sleep(Duration::from_millis(1));
                continue;
            };
            let key = if rng.bool() { rng.u32(..self.keys.1) } else { rng.u32(..self.keys.0) };
            let sent_ms = now_ms();
            let response = send_request(stream, key);
            let received_ms = now_ms();
            match response {
                Ok(status) => {
                    let mut results = self.results.lock().unwrap();
                    results.requests += 1;
                    match status {
                        200 => results.record_admitted(layers, key, sent_ms, received_ms),
                        429 => {}
                        503 if self.may_fail => continue,
                        status => panic!("{status}"),
                    }
                    results.record_response(layers, key, received_ms, status == 200);
                    drop(results);
                    if status == 429 {
                        thread::sleep(PAUSE_AFTER_REFUSAL);
                    }
                }
                Err(_killed) => connection = None,
            }
        }
    }
}

struct StopOnDrop<'l>(&'l Load);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stopped.store(true, Ordering::Relaxed);
    }
}

pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    Ok(stream)
}

/// One request, and the status of its response; an error if the peer ends in between, as a killed process does.
fn send_request(stream: &mut TcpStream, key: u32) -> io::Result<u16> {
    stream.write_all(&request("GET", "/a", &[("X-Key", &key.to_string())], b""))?;
    let (mut head, mut piece) = (Vec::new(), [0; 4096]);
    loop {
        let n = stream.read(&mut piece)?;
        if n == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        head.extend_from_slice(&piece[..n]);
        let Some(end) = head.windows(4).position(|four| four == b"\r\n\r\n") else { continue };
        let text = String::from_utf8_lossy(&head[..end]).to_ascii_lowercase();
        let length = text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
        let whole = end + 4 + length.unwrap_or(0);
        if head.len() >= whole {
            assert_eq!(head.len(), whole, "bytes after the response: {text}");
            return Ok(text[9..12].parse().unwrap());
        }
    }
}
