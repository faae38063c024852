//! What the operator is told of failing requests: every cause once a second at most, with the number
//! of times it was not said. A gateway before a dead upstream would write nothing else otherwise.

use std::cell::RefCell;
use std::collections::HashMap;
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(1);
/// Causes that are told apart; beyond, all are forgotten and begun again.
const CAUSES_MAX: usize = 256;

/// When each cause was last told, and how often it was not since.
#[derive(Debug, Default)]
pub struct LogThrottle(RefCell<HashMap<String, (Instant, u64)>>);

impl LogThrottle {
    /// Whether a cause may be told now; if so, how often it was not told before.
    pub fn allow(&self, cause: &str, now: Instant) -> Option<u64> {
        let mut causes = self.0.borrow_mut();
        if let Some((said, unsaid)) = causes.get_mut(cause) {
            if now.duration_since(*said) < INTERVAL {
                *unsaid += 1;
                return None;
            }
            *said = now;
            return Some(std::mem::take(unsaid));
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
        let complaints = LogThrottle::default();
        let start = Clock::manual(0).instant();
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(complaints.allow("a", at(0)), Some(0));
        assert_eq!(complaints.allow("a", at(10)), None);
        assert_eq!(complaints.allow("b", at(10)), Some(0));
        assert_eq!(complaints.allow("a", at(999)), None);
        assert_eq!(complaints.allow("a", at(1000)), Some(2));
        assert_eq!(complaints.allow("a", at(2000)), Some(0));
    }
}
