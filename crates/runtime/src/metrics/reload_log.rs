//! The latest reloads of the configuration, with their problems: for the dashboard.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// Reloads that are kept.
const KEPT: usize = 20;
/// Limit for the text of a reload's problems.
const PROBLEM_MAX_BYTES: usize = 4096;

/// The latest reloads.
#[derive(Debug, Default)]
pub struct ReloadLog(Mutex<Reloads>);

#[derive(Debug, Default)]
struct Reloads {
    /// The oldest first.
    kept: VecDeque<Reload>,
    total: u64,
}

/// One reload.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reload {
    /// Unix milliseconds.
    pub at_ms: u64,
    /// Why nothing was applied; `None`: the configuration was applied.
    pub problem: Option<String>,
}

impl ReloadLog {
    pub fn add(&self, at_ms: u64, problem: Option<&str>) {
        let problem = problem.map(|text| {
            let end = (0..=PROBLEM_MAX_BYTES.min(text.len())).rev().find(|end| text.is_char_boundary(*end));
            text[..end.unwrap_or(0)].to_owned()
        });
        let mut reloads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if reloads.kept.len() == KEPT {
            reloads.kept.pop_front();
        }
        reloads.kept.push_back(Reload { at_ms, problem });
        reloads.total += 1;
    }

    /// The number of all reloads so far.
    pub fn total(&self) -> u64 {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).total
    }

    /// The latest reloads, the newest first.
    pub fn latest(&self) -> Vec<Reload> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).kept.iter().rev().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_reloads_are_kept_with_bounded_texts() {
        let log = ReloadLog::default();
        let long = "ä".repeat(PROBLEM_MAX_BYTES);
        for at_ms in 0..30 {
            log.add(at_ms, (at_ms == 29).then_some(long.as_str()));
        }
        let latest = log.latest();
        assert_eq!((latest.len(), log.total()), (KEPT, 30));
        assert_eq!(latest[0].problem.as_ref().map(String::len), Some(PROBLEM_MAX_BYTES));
        assert_eq!((latest[1].at_ms, latest[19].at_ms), (28, 10));
    }
}
