//! How the windows of a layer follow one another: what counts from one window to the next need.
//!
//! Plain windows never look at it. Where tokens roll over, or are taken from windows to come, a
//! counter has to know how many windows lie between two moments, and when the one after next ends.

use std::sync::Arc;

use crate::counter::END_MAX_MS;

/// The lengths of consecutive windows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WindowSequence {
    /// All of them last equally long; at least a millisecond.
    Even { period_ms: u64 },
    /// They end at these moments, Unix milliseconds, ascending: calendar windows.
    Listed(Arc<[u64]>),
}

impl WindowSequence {
    /// How many windows lie between the end of one and the end of a later one; 0 if it is no later.
    pub fn windows_between(&self, end_ms: u64, later_ms: u64) -> u64 {
        match self {
            WindowSequence::Even { period_ms } => later_ms.saturating_sub(end_ms).div_ceil(*period_ms),
            WindowSequence::Listed(ends) => {
                let position = |ms: u64| ends.partition_point(|end| *end < ms) as u64;
                position(later_ms).saturating_sub(position(end_ms))
            }
        }
    }

    /// The end of the window that comes `windows` after the one that ends at `end_ms`; at most
    /// [`END_MAX_MS`].
    pub fn end_after(&self, end_ms: u64, windows: u64) -> u64 {
        match self {
            WindowSequence::Even { period_ms } => {
                end_ms.saturating_add(windows.saturating_mul(*period_ms)).min(END_MAX_MS)
            }
            WindowSequence::Listed(ends) => {
                let position = ends.partition_point(|end| *end < end_ms) as u64 + windows;
                usize::try_from(position).ok().and_then(|i| ends.get(i)).map_or(END_MAX_MS, |end| *end)
            }
        }
    }

    /// The end of the window that is open at a moment, if one ends at `end_ms`; that one itself
    /// where the moment lies before.
    pub fn end_at(&self, end_ms: u64, now_ms: u64) -> u64 {
        if now_ms < end_ms {
            return end_ms;
        }
        match self {
            WindowSequence::Even { period_ms } => end_ms + ((now_ms - end_ms) / period_ms + 1) * period_ms,
            WindowSequence::Listed(ends) => {
                let next = ends.partition_point(|end| *end <= now_ms);
                ends.get(next).map_or(END_MAX_MS, |end| *end)
            }
        }
    }
}

/// The time of a decision, and the paces that its [`crate::count::word::Course`]s name.
///
/// `PLAIN`: all counters of the decision are plain, whatever their courses say. It is known when the
/// code is compiled, so the commonest of decisions does not even ask.
#[derive(Clone, Copy, Debug)]
pub struct Time<'a, const PLAIN: bool = false> {
    /// Unix milliseconds.
    pub now_ms: u64,
    pub sequences: &'a [WindowSequence],
}

impl Time<'static> {
    /// For plain windows, which need no pace.
    pub fn plain(now_ms: u64) -> Time<'static> {
        Time { now_ms, sequences: &[] }
    }
}

impl Time<'static, true> {
    /// For a decision on plain counters only.
    pub fn all_plain(now_ms: u64) -> Time<'static, true> {
        Time { now_ms, sequences: &[] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_windows_are_counted_and_found() {
        let sequence = WindowSequence::Even { period_ms: 100 };
        assert_eq!(
            (
                sequence.windows_between(100, 100),
                sequence.windows_between(100, 300),
                sequence.windows_between(300, 100)
            ),
            (0, 2, 0)
        );
        assert_eq!((sequence.end_after(100, 0), sequence.end_after(100, 3)), (100, 400));
        assert_eq!(sequence.end_after(100, u64::MAX), END_MAX_MS);
    }

    #[test]
    fn listed_windows_are_counted_and_found() {
        let sequence = WindowSequence::Listed([31, 59, 90, 120].into());
        assert_eq!(
            (sequence.windows_between(31, 90), sequence.windows_between(59, 59), sequence.windows_between(90, 31)),
            (2, 0, 0)
        );
        assert_eq!(
            (sequence.end_after(31, 2), sequence.end_after(59, 0), sequence.end_after(59, 9)),
            (90, 59, END_MAX_MS)
        );
    }
}
