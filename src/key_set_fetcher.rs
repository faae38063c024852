//! Fetches the key set of an issuer at an interval, in a thread of its own, so that no request waits for it.
//!
//! The last good key set stays in use while fetches fail, up to a maximum age. A token with an unknown key causes a fetch
//! before the interval ends, but not sooner than the cooldown after the last one: clients can invent keys. Redirects are not
//! followed, so only the configuration decides which server is asked.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::mem;
use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCEPT, CACHE_CONTROL, HOST, HeaderMap, USER_AGENT};
use http::{HeaderValue, Request};
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::{Notify, oneshot};
use tokio::time::{sleep, timeout};

use crate::upstream::pool::ConnectionPool;
use crate::upstream::request_body::RequestBody;
use transom_config::jwt::KeySetSource;
use transom_config::upstream::{HostField, TransportSettings, UpstreamProtocol};
use transom_jwt::jwks;
use transom_jwt::published_keys::{KeySet, PublishedKeys};
use transom_jwt::verification_key::VerificationKey;
use transom_runtime::clock::Clock;
use transom_runtime::metrics::events::KeySetMetrics;

const USER_AGENT_VALUE: HeaderValue = HeaderValue::from_static("transom");
const ACCEPT_KEYS: HeaderValue = HeaderValue::from_static("application/jwk-set+json, application/json");
/// Limit of the response body: key sets have a few KiB, or some more with certificate chains.
const TEXT_MAX_BYTES: usize = 256 * 1024;
/// Time from the first failure in a row to the next fetch. It doubles with each failure, up to the interval.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Fetches one key set.
pub struct KeySetFetcher {
    source: KeySetSource,
    keys: Arc<PublishedKeys>,
    wake: Arc<Notify>,
    metrics: KeySetMetrics,
    clock: Clock,
    /// Failures since the last success.
    failures: u32,
}

/// A key set, and how long the response may be used according to its `Cache-Control`.
struct Fetched {
    keys: Vec<VerificationKey>,
    text: Vec<u8>,
    max_age: Option<Duration>,
}

/// Why a fetch failed.
enum FetchError {
    /// There is no response, or a wrong one.
    Failed(String),
    /// The response is no usable key set.
    Invalid(String),
}

impl fmt::Display for FetchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FetchError::Failed(why) | FetchError::Invalid(why) => f.write_str(why),
        }
    }
}

impl KeySetFetcher {
    /// `last` is the text of a key set that was fetched from the same URL before, and when, in Unix milliseconds.
    pub fn new(
        source: KeySetSource,
        last: Option<(&[u8], u64)>,
        metrics: KeySetMetrics,
        clock: Clock,
    ) -> (KeySetFetcher, Arc<PublishedKeys>) {
        let wake = Arc::new(Notify::new());
        let notify = Arc::clone(&wake);
        let keys = Arc::new(PublishedKeys::new(move || notify.notify_one()));
        if let Some((text, fetched_at_ms)) = last
            && let Ok(known) = jwks::parse_published(text)
        {
            keys.replace(KeySet { keys: known.into(), text: text.into(), fetched_at_ms });
            keys.set_tried();
        }
        let fetcher = KeySetFetcher { source, keys: Arc::clone(&keys), wake, metrics, clock, failures: 0 };
        (fetcher, keys)
    }

    /// Fetches until the sender of `stop` is dropped.
    pub async fn run(mut self, stop: oneshot::Receiver<()>) {
        let fetch_repeatedly = async {
            loop {
                // Fulfilled by this fetch.
                self.keys.take_wanted_refresh();
                let fetched = fetch(&self.source, &self.clock).await;
                let pause = self.apply(fetched);
                self.keys.set_tried();
                tokio::select! {
                    () = sleep(pause) => {}
                    () = self.wait_until_wanted() => {}
                }
            }
        };
        tokio::select! {
            () = fetch_repeatedly => {}
            _ = stop => {}
        }
    }

    /// Waits until an early fetch is wanted and allowed.
    async fn wait_until_wanted(&self) {
        sleep(self.source.cooldown).await;
        while !self.keys.take_wanted_refresh() {
            self.wake.notified().await;
        }
    }

    /// Applies a result; returns the time to the next fetch.
    fn apply(&mut self, fetched: Result<Fetched, FetchError>) -> Duration {
        let (url, refresh, now_ms) = (self.source.shown(), self.source.refresh, self.clock.wall_ms());
        match fetched {
            Ok(Fetched { keys, text, max_age }) => {
                let count = keys.len();
                if self.keys.replace(KeySet { keys: keys.into(), text: text.into(), fetched_at_ms: now_ms }) {
                    tracing::info!(url, keys = count, "the keys of the key set have changed");
                }
                if mem::take(&mut self.failures) > 0 {
                    tracing::info!(url, "the key set is fetched again");
                }
                self.metrics.fetched(now_ms);
                // Up to a tenth shorter, so that the fetches of many gateways do not coincide.
                pause_after(refresh, self.source.cooldown, max_age).mul_f64(0.9 + fastrand::f64() * 0.1)
            }
            Err(error) => {
                match &error {
                    FetchError::Failed(_) => self.metrics.failed(),
                    FetchError::Invalid(_) => self.metrics.invalid(),
                }
                let kept_for = self.keys.key_set().map(|set| {
                    self.source.keep.saturating_sub(Duration::from_millis(now_ms.saturating_sub(set.fetched_at_ms)))
                });
                // Logged for the first failure in a row.
                if self.failures == 0 {
                    let effect = match kept_for {
                        Some(_) => "the last one stays in use",
                        None => "tokens that need it get 503",
                    };
                    tracing::warn!(url, "the key set cannot be fetched: {error}; {effect}");
                }
                self.failures = self.failures.saturating_add(1);
                let pause = retry_after(self.failures, refresh).mul_f64(0.5 + fastrand::f64() * 0.5);
                match kept_for {
                    Some(Duration::ZERO) => {
                        self.keys.remove();
                        let keep_s = self.source.keep.as_secs();
                        tracing::error!(url, keep_s, "the last key set is too old; tokens that need it get 503");
                        pause
                    }
                    Some(kept_for) => pause.min(kept_for),
                    None => pause,
                }
            }
        }
    }
}

/// The time after a success: a shorter `max-age` applies, but not below the cooldown.
fn pause_after(refresh: Duration, cooldown: Duration, max_age: Option<Duration>) -> Duration {
    max_age.map_or(refresh, |max_age| max_age.max(cooldown).min(refresh))
}

/// The time after a number of failures in a row.
fn retry_after(failures: u32, refresh: Duration) -> Duration {
    RETRY_AFTER.saturating_mul(1 << (failures - 1).min(16)).min(refresh)
}

/// Fetches a key set once; returns the number of its keys, or why it cannot be used.
pub fn check(source: &KeySetSource) -> io::Result<Result<usize, String>> {
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default())?;
    let fetched = runtime.block_on(fetch(source, &Clock::system()));
    // A pending name lookup is not waited for.
    runtime.shutdown_background();
    Ok(fetched.map(|fetched| fetched.keys.len()).map_err(|error| error.to_string()))
}

async fn fetch(source: &KeySetSource, clock: &Clock) -> Result<Fetched, FetchError> {
    match timeout(source.timeout, request(source, clock)).await {
        Ok(fetched) => fetched,
        Err(_elapsed) => Err(FetchError::Failed(String::from("the server did not respond in time"))),
    }
}

async fn request(source: &KeySetSource, clock: &Clock) -> Result<Fetched, FetchError> {
    let transport = TransportSettings {
        protocol: UpstreamProtocol::Http1,
        host: HostField::Server,
        tls: source.tls.clone(),
        resolve: source.timeout,
        dns_servers: Vec::new(),
        proxy_protocol: None,
    };
    // A new pool for each fetch, so that the name is resolved again.
    let pool = ConnectionPool::new(source.server.clone(), &transport, None, clock.clone());
    let connected = pool.connect(None, source.timeout, source.timeout, true, false).await;
    let mut connection = connected.map_err(|error| FetchError::Failed(error.operator_message()))?;
    let request = Request::builder()
        .uri(source.target.clone())
        .header(HOST, pool.authority())
        .header(USER_AGENT, USER_AGENT_VALUE)
        .header(ACCEPT, ACCEPT_KEYS)
        .body(RequestBody::Empty)
        .map_err(|invalid| FetchError::Failed(invalid.to_string()))?;
    let sent = connection.send(Box::new(request), None).await;
    let response = sent.map_err(|error| FetchError::Failed(format!("no response: {error}")))?;
    match response.status().as_u16() {
        200 => {}
        status @ 300..400 => {
            return Err(FetchError::Failed(format!(
                "the server responded with {status}, and redirects are not followed"
            )));
        }
        status => return Err(FetchError::Failed(format!("the server responded with {status}"))),
    }
    let max_age = max_age(response.headers());
    let mut text = Vec::new();
    while let Some(frame) = poll_fn(|cx| connection.poll_body(cx)).await {
        let frame = frame.map_err(|error| FetchError::Failed(format!("the response is incomplete: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        if text.len() + data.len() > TEXT_MAX_BYTES {
            return Err(FetchError::Invalid(format!("it has more than {} KiB", TEXT_MAX_BYTES / 1024)));
        }
        text.extend_from_slice(&data);
    }
    let keys = jwks::parse_published(&text).map_err(|error| FetchError::Invalid(error.to_string()))?;
    Ok(Fetched { keys, text, max_age })
}

/// The `max-age` of a response (RFC 9111, section 5.2.2.1).
fn max_age(headers: &HeaderMap) -> Option<Duration> {
    let fields = headers.get_all(CACHE_CONTROL).iter().filter_map(|value| value.to_str().ok());
    let mut directives = fields.flat_map(|value| value.split(',')).filter_map(|directive| directive.split_once('='));
    let (_, seconds) = directives.find(|(name, _)| name.trim().eq_ignore_ascii_case("max-age"))?;
    seconds.trim().trim_matches('"').parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_shorter_max_age_applies_within_bounds() {
        for (max_age, pause) in [(None, 300), (Some(60), 60), (Some(0), 30), (Some(u64::MAX), 300)] {
            assert_eq!(pause_after(seconds(300), seconds(30), max_age.map(seconds)), seconds(pause));
        }
        // The interval is never exceeded, even if the cooldown is longer.
        assert_eq!(pause_after(seconds(10), seconds(30), Some(seconds(1))), seconds(10));
    }

    #[test]
    fn max_age_is_read_from_cache_control() {
        for (value, found) in [
            ("public, max-age=60", Some(60)),
            ("Max-Age=\"7\", no-cache", Some(7)),
            ("s-maxage=60", None),
            ("max-age", None),
            ("max-age=-1", None),
            ("max-age=99999999999999999999999", None),
        ] {
            let headers = HeaderMap::from_iter([(CACHE_CONTROL, HeaderValue::from_static(value))]);
            assert_eq!(max_age(&headers), found.map(seconds), "{value}");
        }
    }

    #[test]
    fn retries_back_off_up_to_the_interval() {
        let pauses: Vec<u64> = (1..=10).map(|failures| retry_after(failures, seconds(300)).as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]);
        assert_eq!(retry_after(u32::MAX, seconds(300)), seconds(300));
    }
}
