//! Limits warnings about failing requests to one per cause and second, so that a dead upstream does not flood the log.

use std::cell::RefCell;
use std::collections::HashMap;
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(1);
/// Causes that are tracked; when there are more, all are forgotten.
const CAUSES_MAX: usize = 256;

/// By cause: when it was last logged, and how often it was suppressed since.
#[derive(Debug, Default)]
pub struct LogThrottle(RefCell<HashMap<String, (Instant, u64)>>);

impl LogThrottle {
    /// `Some` if the cause may be logged now, with the number of times it was suppressed before.
    pub fn allow(&self, cause: &str, now: Instant) -> Option<u64> {
        let mut causes = self.0.borrow_mut();
        if let Some((logged_at, suppressed)) = causes.get_mut(cause) {
            if now.duration_since(*logged_at) < INTERVAL {
                *suppressed += 1;
                return None;
            }
            *logged_at = now;
            return Some(std::mem::take(suppressed));
        }
        if causes.len() >= CAUSES_MAX {
            causes.clear();
        }
        causes.insert(cause.to_owned(), (now, 0));
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;

    #[test]
    fn a_cause_is_logged_once_a_second_with_the_number_suppressed() {
        let throttle = LogThrottle::default();
        let start = Clock::manual(0).instant();
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(throttle.allow("a", at(0)), Some(0));
        assert_eq!(throttle.allow("a", at(10)), None);
        assert_eq!(throttle.allow("b", at(10)), Some(0));
        assert_eq!(throttle.allow("a", at(999)), None);
        assert_eq!(throttle.allow("a", at(1000)), Some(2));
        assert_eq!(throttle.allow("a", at(2000)), Some(0));
    }
}
