//! Logs a cause of failures when it begins, and not again for each request while it lasts, so that a dead upstream or a scanner of
//! ports does not flood the log.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use transom_runtime::clock::Clock;

/// A cause that did not occur for so long has ended.
const END: Duration = Duration::from_secs(60);
/// A cause that lasts is logged again after this time.
const REMINDER: Duration = Duration::from_secs(600);
/// Causes that are tracked; when there are more, all are forgotten.
const CAUSES_MAX: usize = 256;
/// Pause after a failed `accept`. When the process has no free descriptor, a connection must be closed first.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// By cause. Workers share it: the lock is taken by failures only.
#[derive(Debug, Default)]
pub struct LogThrottle(Mutex<HashMap<String, Cause>>);

#[derive(Debug)]
struct Cause {
    logged_at: Instant,
    seen_at: Instant,
    /// How often it occurred since it was logged.
    suppressed: u64,
}

impl LogThrottle {
    /// `Some` if the cause may be logged now, with the number of times it was suppressed before.
    pub fn allow(&self, cause: &str, now: Instant) -> Option<u64> {
        let mut causes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Cause { logged_at, seen_at, suppressed }) = causes.get_mut(cause) {
            let lasts = now.duration_since(*seen_at) < END;
            *seen_at = now;
            if lasts && now.duration_since(*logged_at) < REMINDER {
                *suppressed += 1;
                return None;
            }
            *logged_at = now;
            return Some(std::mem::take(suppressed));
        }
        if causes.len() >= CAUSES_MAX {
            causes.clear();
        }
        causes.insert(cause.to_owned(), Cause { logged_at: now, seen_at: now, suppressed: 0 });
        Some(0)
    }
}

/// Logs an error of `accept`, and waits until the next attempt; neither if the error concerns only one connection.
pub async fn handle_accept_error(error: io::Error, message: &'static str, log_throttle: &LogThrottle, clock: &Clock) {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted) {
        return;
    }
    match log_throttle.allow(message, clock.instant()) {
        Some(suppressed) => tracing::warn!(%error, suppressed, "{message}"),
        None => tracing::debug!(%error, "{message}"),
    }
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_logged_when_it_begins_and_seldom_while_it_lasts() {
        let throttle = LogThrottle::default();
        let start = Clock::manual(0).instant();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(throttle.allow("a", at(0)), Some(0));
        assert_eq!(throttle.allow("b", at(1)), Some(0));
        let logged: Vec<u64> = (1..=1200).filter(|second| throttle.allow("a", at(*second)).is_some()).collect();
        assert_eq!(logged, [600, 1200]);
        assert_eq!(throttle.allow("a", at(1259)), None);
        assert_eq!(throttle.allow("a", at(1319)), Some(1), "it had ended");
        assert_eq!(throttle.allow("a", at(1320)), None);
    }
}
