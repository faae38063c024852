//! Bounds on the tokens that layers admit in any interval.
//!
//! Fixed windows admit up to two windows' worth of tokens around the moment at which one ends and the next begins. The
//! bound, and layers that can never refuse, follow from the windows alone. All results are tokens. Used by checks of
//! the configuration, not by decisions.

use crate::limit::Limit;
use crate::window::{END_MAX_MS, Windows};

/// The most tokens that all layers together admit in any interval of `span_ms` milliseconds; `None` if there is no
/// bound. `keeps_opening_charge`: the charge that opened a window is never refunded.
pub fn max_within(layers: &[Limit], span_ms: u64, keeps_opening_charge: bool) -> Option<u64> {
    layers.iter().filter_map(|limit| max_of_layer(limit, span_ms, keeps_opening_charge)).min()
}

fn max_of_layer(limit: &Limit, span_ms: u64, keeps_opening_charge: bool) -> Option<u64> {
    let (shortest_ms, _) = limit.windows.lengths_ms()?;
    let max_tokens = tokens_granted_in(limit, windows_touched(&limit.windows, span_ms, shortest_ms));
    // Where requests open windows, the first of several windows was opened before the interval begins, unless the
    // interval is a whole number of windows and one millisecond.
    let opened_before = limit.windows.are_opened_by_requests()
        && keeps_opening_charge
        && !span_ms.saturating_sub(1).is_multiple_of(shortest_ms);
    Some(max_tokens - u64::from(opened_before))
}

/// The most tokens that one layer admits in any one window of another.
pub fn max_in_window(limit: &Limit, outer: &Limit) -> Option<u64> {
    windows_in_window(&limit.windows, &outer.windows).map(|windows| tokens_granted_in(limit, windows))
}

/// Whether a layer never refuses a request that the other layer admits: in each window of the layer, the other one
/// admits at most the layer's limit.
pub fn never_binds(limit: &Limit, other: &Limit) -> bool {
    max_in_window(other, limit).is_some_and(|max_tokens| max_tokens <= u64::from(limit.tokens))
}

/// The tokens that a layer grants in consecutive windows after a long idle time.
fn tokens_granted_in(limit: &Limit, windows: u64) -> u64 {
    let after_first = windows.saturating_sub(1).saturating_mul(u64::from(limit.tokens));
    after_first.saturating_add(u64::from(limit.capacity()))
}

/// The most windows of at least `shortest_ms` that an interval can overlap; of sliding windows, those that it consists of.
fn windows_touched(windows: &Windows, span_ms: u64, shortest_ms: u64) -> u64 {
    match windows {
        Windows::Sliding { period_ms } => span_ms.div_ceil(*period_ms),
        _ => span_ms.saturating_sub(1).div_ceil(shortest_ms) + 1,
    }
}

/// The most windows of one kind that a window of another kind can overlap.
fn windows_in_window(inner: &Windows, outer: &Windows) -> Option<u64> {
    let (_, longest_ms) = outer.lengths_ms()?;
    let (shortest_ms, _) = inner.lengths_ms()?;
    let at_any_offset = windows_touched(inner, longest_ms, shortest_ms);
    match (inner, outer) {
        (Windows::Even { period_ms: p, offset_ms: o }, Windows::Even { period_ms: q, offset_ms: r }) => {
            // Relative to the inner grid, outer windows start at every multiple of the greatest common divisor of both
            // periods, plus a fixed shift. The latest such position in an inner window overlaps most.
            let step = gcd(*p, *q);
            let shift = (r + step - o % step) % step;
            Some((p - step + shift + q - 1) / p + 1)
        }
        (Windows::Sliding { .. }, _) | (_, Windows::Sliding { .. }) => Some(at_any_offset),
        (_, Windows::Calendar(calendar)) if inner.are_shared() => {
            let overlapping = |two: &[u64]| inner.windows_between(inner.window_at(two[0], 0).end_ms, two[1]) + 1;
            // Windows that a counter cannot hold have no end.
            calendar.ends.windows(2).take_while(|two| two[1] <= END_MAX_MS).map(overlapping).max()
        }
        (Windows::Calendar(calendar), Windows::Even { .. }) => {
            // Every end within a window, except at its start, adds one.
            let starts = calendar.ends.iter().map(|end| (outer.window_at(*end, 0).start_ms, *end));
            let inside = starts.filter(|(start, end)| start != end).map(|(start, _)| start);
            let (mut max_run, mut run, mut last) = (0, 0, None);
            for start in inside {
                run = if last.replace(start) == Some(start) { run + 1 } else { 1 };
                max_run = max_run.max(run);
            }
            Some(max_run + 1)
        }
        _ => Some(at_any_offset),
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::Calendar;

    fn limit(tokens: u32, capacity: u32, windows: Windows) -> Limit {
        Limit { tokens, windows, period_text: String::new(), capacity: Some(capacity), reserve: 0, shards: 1 }
    }

    fn even(tokens: u32, period_ms: u64, offset_ms: u64) -> Limit {
        limit(tokens, tokens, Windows::Even { period_ms, offset_ms })
    }

    fn floating(tokens: u32, period_ms: u64) -> Limit {
        limit(tokens, tokens, Windows::FirstRequest { period_ms })
    }

    /// A layer in a naive model: the tokens left, and the end of the window.
    #[derive(Clone)]
    struct Counter<'l> {
        limit: &'l Limit,
        left: u32,
        end_ms: u64,
    }

    impl<'l> Counter<'l> {
        fn new(limit: &'l Limit) -> Counter<'l> {
            Counter { limit, left: limit.capacity(), end_ms: 0 }
        }

        /// The tokens left at a time.
        fn at(&mut self, now_ms: u64) -> u32 {
            if let Windows::FirstRequest { .. } = self.limit.windows {
                if now_ms >= self.end_ms {
                    self.left = self.limit.capacity();
                }
                return self.left;
            }
            while now_ms >= self.end_ms {
                self.end_ms = self.limit.windows.window_at(self.end_ms, 0).end_ms;
                self.left = (self.left + self.limit.tokens).min(self.limit.capacity());
            }
            self.left
        }

        fn take(&mut self, now_ms: u64, tokens: u32) {
            if let Windows::FirstRequest { period_ms } = self.limit.windows
                && tokens > 0
                && now_ms >= self.end_ms
            {
                self.end_ms = now_ms + period_ms;
            }
            self.left -= tokens;
        }
    }

    /// The most tokens within `[from, until)`, by trying every sequence from `now` on.
    fn best(counters: &[Counter], now: u64, from: u64, until: u64) -> u64 {
        if now == until {
            return 0;
        }
        let mut counters = counters.to_vec();
        let other_left = counters.iter_mut().map(|counter| counter.at(now)).min().unwrap_or(0);
        let tries = (0..=other_left).map(|tokens| {
            let mut after = counters.clone();
            after.iter_mut().for_each(|counter| counter.take(now, tokens));
            u64::from(if now >= from { tokens } else { 0 }) + best(&after, now + 1, from, until)
        });
        tries.max().unwrap_or(0)
    }

    /// The same over all intervals of a length, after an idle time.
    fn worst(layers: &[Limit], span_ms: u64, lead_ms: u64) -> u64 {
        let counters: Vec<Counter> = layers.iter().map(Counter::new).collect();
        (0..=lead_ms).map(|from| best(&counters, 0, from, from + span_ms)).max().unwrap_or(0)
    }

    #[test]
    fn the_bound_of_one_layer_is_reached() {
        for span_ms in 1..=7 {
            for (limit, lead_ms) in [
                (even(2, 3, 0), 3),
                (even(1, 2, 1), 2),
                (limit(1, 2, Windows::Even { period_ms: 3, offset_ms: 0 }), 3),
                (floating(2, 3), 3),
                (floating(1, 2), 2),
                (
                    limit(
                        2,
                        2,
                        Windows::Calendar(Calendar { name: String::new(), ends: (1..40).map(|n| n * 3).collect() }),
                    ),
                    3,
                ),
            ] {
                let layers = [limit];
                assert_eq!(
                    max_within(&layers, span_ms, true),
                    Some(worst(&layers, span_ms, lead_ms)),
                    "{span_ms}: {layers:?}"
                );
            }
        }
    }

    #[test]
    fn several_layers_admit_no_more_than_the_bound() {
        for layers in [
            [even(2, 2, 0), even(3, 4, 0)],
            [even(1, 2, 0), even(2, 3, 1)],
            [even(2, 4, 0), floating(1, 2)],
            [limit(1, 3, Windows::Even { period_ms: 2, offset_ms: 0 }), even(2, 4, 0)],
        ] {
            for span_ms in 1..=6 {
                let (most, worst) = (max_within(&layers, span_ms, true).unwrap(), worst(&layers, span_ms, 4));
                assert!(worst <= most, "{worst} in {span_ms} ms: {layers:?}");
                // Around a moment at which windows of both layers end, the bound is exact.
                if span_ms == 2
                    && layers.iter().all(|limit| matches!(limit.windows, Windows::Even { offset_ms: 0, .. }))
                {
                    assert_eq!(worst, most, "{layers:?}");
                }
            }
        }
    }

    #[test]
    fn windows_in_a_window_are_counted() {
        let sizes = || [4, 6, 9].into_iter().flat_map(|period_ms| (0..10).map(move |offset_ms| (period_ms, offset_ms)));
        for ((p, o), (q, r)) in sizes().flat_map(|inner| sizes().map(move |outer| (inner, outer))) {
            let (inner, outer) = (even(1, p, o), even(1, q, r));
            let starts = (1000..1000 + p * q).filter(|ms| outer.windows.window_at(*ms, 0).start_ms == *ms);
            let end_ms = |ms| inner.windows.window_at(ms, 0).end_ms;
            let most = starts.map(|start| (end_ms(start + q - 1) - end_ms(start)) / p + 1).max();
            assert_eq!(windows_in_window(&inner.windows, &outer.windows), most, "{p} {o} {q} {r}");
        }
        const DAY_MS: u64 = 86_400_000;
        let month = limit(1, 1, Windows::Calendar(Calendar::utc_months()));
        for (windows, expected) in [
            (Windows::Even { period_ms: DAY_MS, offset_ms: 0 }, 31),
            (Windows::Sliding { period_ms: DAY_MS }, 31),
            (Windows::Random { period_ms: DAY_MS }, 32),
        ] {
            assert_eq!(max_in_window(&limit(1, 1, windows), &month), Some(expected));
        }
        assert_eq!(max_in_window(&month, &even(1, 365 * DAY_MS, 0)), Some(13));
        let sliding = [limit(5, 5, Windows::Sliding { period_ms: 1000 })];
        assert_eq!(
            [1000, 1001, 2000].map(|span_ms| max_within(&sliding, span_ms, true)),
            [Some(5), Some(10), Some(10)]
        );
    }

    #[test]
    fn the_shipped_limits_admit_what_the_documentation_says() {
        let layers = [Limit::parse("2000/hour").unwrap(), Limit::parse("33/minute").unwrap()];
        assert_eq!(max_within(&layers, 2000, true), Some(66));
        assert_eq!(max_within(&layers, 60_000, true), Some(66));
        assert_eq!(max_within(&layers, 3_600_000, true), Some(2013));
        assert_eq!(max_in_window(&layers[1], &layers[0]), Some(1980));
        assert!(never_binds(&layers[0], &layers[1]) && !never_binds(&layers[1], &layers[0]));
    }

    /// Whether a layer refuses a request that the other one admits, for any sequence of requests.
    fn binds(limit: &Limit, other: &Limit, horizon_ms: u64) -> bool {
        fn search(own: &Counter, other: &Counter, now: u64, until: u64) -> bool {
            let (mut own, mut other) = (own.clone(), other.clone());
            let (left, other_left) = (own.at(now), other.at(now));
            left < other_left
                || now < until
                    && (0..=other_left).any(|tokens| {
                        let (mut own, mut other) = (own.clone(), other.clone());
                        own.take(now, tokens);
                        other.take(now, tokens);
                        search(&own, &other, now + 1, until)
                    })
        }
        search(&Counter::new(limit), &Counter::new(other), 0, horizon_ms)
    }

    #[test]
    fn a_layer_that_never_binds_never_refuses() {
        let list = |ends: &[u64]| Windows::Calendar(Calendar { name: format!("{ends:?}"), ends: ends.into() });
        let uneven = list(&[2, 5, 7, 10, 12, 15, 17, 20, 30]);
        let all = |tokens: u32| {
            [
                even(tokens, 2, 0),
                even(tokens, 3, 0),
                even(tokens, 4, 0),
                even(tokens, 4, 1),
                floating(tokens, 3),
                limit(tokens, tokens, uneven.clone()),
                limit(tokens, tokens + 1, Windows::Even { period_ms: 3, offset_ms: 0 }),
            ]
        };
        let mut idle = 0;
        for limit in [all(1), all(2), all(3), all(4)].iter().flatten() {
            for other in [all(1), all(2)].iter().flatten().filter(|other| other.windows != limit.windows) {
                let binds = binds(limit, other, 9);
                if never_binds(limit, other) {
                    idle += 1;
                    assert!(!binds, "{limit:?} beside {other:?}");
                } else if let (Windows::Even { .. }, Windows::Even { .. }) = (&limit.windows, &other.windows)
                    && limit.capacity() == limit.tokens
                    && other.capacity() == other.tokens
                {
                    // For grids the condition is also necessary.
                    assert!(binds, "{limit:?} beside {other:?}");
                }
            }
        }
        assert!(idle > 40, "{idle}");
    }
}
