//! Windows that admit, in each interval of time, at most what a rate with a burst admits.

use crate::gateway::Value;

/// A layer of a rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window {
    pub limit: u64,
    pub period_ms: u64,
    /// `None`: nothing is kept for later windows.
    pub capacity: Option<u64>,
    /// Whether the first request of a key opens the window.
    pub first_request: bool,
}

impl Window {
    pub fn plain(limit: u64, period_ms: u64) -> Window {
        Window { limit, period_ms, capacity: None, first_request: false }
    }

    pub fn value(&self) -> Value {
        let period = period_text(self.period_ms);
        if self.capacity.is_none() && !self.first_request {
            return format!("{}/{period}", self.limit).into();
        }
        let mut settings = vec![("limit".to_owned(), self.limit.into()), ("period".to_owned(), period.into())];
        settings.extend(self.capacity.map(|capacity| ("capacity".to_owned(), capacity.into())));
        settings.extend(self.first_request.then(|| ("start".to_owned(), "first-request".into())));
        Value::Table(settings)
    }
}

/// A period as it is written in a window.
pub fn period_text(ms: u64) -> String {
    match ms {
        1000 => return "second".to_owned(),
        60_000 => return "minute".to_owned(),
        3_600_000 => return "hour".to_owned(),
        86_400_000 => return "day".to_owned(),
        604_800_000 => return "week".to_owned(),
        _ => {}
    }
    duration_text(ms)
}

/// A duration, in the largest unit that divides it.
pub fn duration_text(ms: u64) -> String {
    let units = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)];
    match units.iter().find(|(_, unit)| ms != 0 && ms.is_multiple_of(*unit)) {
        Some((unit, length)) => format!("{}{unit}", ms / length),
        None => format!("{ms}ms"),
    }
}

/// A rate: `requests` in each `period_ms`. Beyond it, `burst` requests are admitted at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rate {
    pub requests: u64,
    pub period_ms: u64,
    pub burst: u64,
}

/// Numbers of tokens in a window that a person would choose.
const ROUND_LIMITS: u64 = 10;
/// The most tokens in a window that are tried.
const LIMIT_MAX: u64 = 1000;
/// The shortest period of a window.
const PERIOD_MIN_MS: u64 = 10;

impl Rate {
    /// The windows of a bucket that refuses what exceeds the burst.
    ///
    /// In each interval of length T the bucket admits 1 + burst + ⌊T · rate⌋. Windows of `limit` tokens admit their capacity and
    /// `limit` at each of at most ⌊T / period⌋ + 1 edges. So with limit / period ≤ rate and a capacity of 1 + burst − limit they
    /// never admit more. A bucket without a burst has no room for this: there, each key opens its windows itself.
    pub fn window(&self) -> Window {
        if self.burst == 0 {
            return Window { first_request: true, ..Window::plain(1, self.interval_ms(1)) };
        }
        let limit = self.limit();
        let capacity = self.burst + 1 - limit;
        Window { capacity: (capacity > limit).then_some(capacity), ..Window::plain(limit, self.interval_ms(limit)) }
    }

    /// The window, and the longest delay in milliseconds, of a bucket that delays what exceeds the first `undelayed` requests of
    /// the burst. The same bound holds for the times at which requests come: those that wait take tokens of later windows. `None`
    /// if there is nothing to delay.
    pub fn delaying_window(&self, undelayed: u64) -> Option<(Window, u64)> {
        let limit = self.limit();
        let capacity = undelayed.min(self.burst).max(limit);
        let windows_ahead = (self.burst + 1).checked_sub(limit + capacity)? / limit;
        let period_ms = self.interval_ms(limit);
        let max_delay_ms = windows_ahead.checked_mul(period_ms).filter(|delay| (1..=86_400_000).contains(delay))?;
        let window = Window { capacity: (capacity > limit).then_some(capacity), ..Window::plain(limit, period_ms) };
        Some((window, max_delay_ms))
    }

    /// The shortest period of a window in which the bucket admits `limit` requests.
    fn interval_ms(&self, limit: u64) -> u64 {
        limit.saturating_mul(self.period_ms).div_ceil(self.requests).max(PERIOD_MIN_MS)
    }

    /// Why a window admits fewer requests than the rate; `None` unless its period is the shortest one.
    pub fn slower(&self, window: &Window) -> Option<String> {
        let is_slower = window.period_ms == PERIOD_MIN_MS && self.loss(window.limit) > self.requests;
        is_slower.then(|| {
            let rate = 1000 / PERIOD_MIN_MS * window.limit;
            format!("periods are at least 10 ms: {rate} requests a second are admitted")
        })
    }

    /// By how much a window of `limit` requests is slower than the bucket: 0 if they are equally fast.
    fn loss(&self, limit: u64) -> u64 {
        let of_window = self.interval_ms(limit).saturating_mul(self.requests);
        of_window.saturating_sub(limit.saturating_mul(self.period_ms))
    }

    /// Tokens of a window: one if possible. Periods are whole milliseconds, so that other rates need several.
    fn limit(&self) -> u64 {
        let largest = self.burst.div_ceil(2).clamp(1, LIMIT_MAX);
        let is_exact = |limit: &u64| self.loss(*limit) == 0;
        (1..=largest.min(ROUND_LIMITS))
            .find(is_exact)
            .or_else(|| (1..=largest).find(|limit| self.loss(*limit) / limit * 100 <= self.period_ms))
            .or_else(|| (1..=largest).min_by_key(|limit| self.loss(*limit) / limit))
            .unwrap_or(1)
    }
}

/// A table of `windows` with one layer.
pub fn windows(window: Window) -> Value {
    Value::List(vec![window.value()])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(requests: u64, period_ms: u64, burst: u64) -> String {
        let window = Rate { requests, period_ms, burst }.window();
        let start = if window.first_request { " first-request" } else { "" };
        format!("{}/{}ms up to {}{start}", window.limit, window.period_ms, window.capacity.unwrap_or(window.limit))
    }

    #[test]
    fn rates_are_round() {
        assert_eq!(written(10, 1000, 20), "1/100ms up to 20");
        assert_eq!(written(30, 1000, 20), "3/100ms up to 18");
        assert_eq!(written(30, 60_000, 5), "1/2000ms up to 5");
        assert_eq!(written(116, 1_000_000, 5), "1/8621ms up to 5");
        assert_eq!(written(900, 1000, 5), "3/10ms up to 3");
        assert_eq!(written(200, 1000, 20), "2/10ms up to 19");
        assert_eq!(written(500, 1000, 0), "1/10ms up to 1 first-request");
        assert_eq!(written(900, 1000, 20), "9/10ms up to 12");
        assert_eq!(written(5, 1000, 1), "1/200ms up to 1");
        assert_eq!(written(5, 1000, 0), "1/200ms up to 1 first-request");
        assert_eq!(written(100, 60_000, 50), "1/600ms up to 50");
    }

    /// The most that the windows admit in an interval, against the bucket.
    #[test]
    fn windows_never_admit_more_than_the_bucket() {
        let rates = (1..60).flat_map(|n| [1, 2, 5, 20, 100].map(|burst| (n * 7, 1000, burst)));
        for (requests, period_ms, burst) in rates.chain([(116, 1_000_000, 9), (5000, 1000, 1), (250, 1000, 3)]) {
            let rate = Rate { requests, period_ms, burst };
            let window = rate.window();
            assert!(window.period_ms >= PERIOD_MIN_MS, "{rate:?}: {window:?}");
            for edges in 1..50 {
                let interval_ms = (edges - 1) * window.period_ms;
                let ours = window.capacity.unwrap_or(window.limit) + edges * window.limit;
                let theirs = 1 + burst + interval_ms * requests / period_ms;
                assert!(ours <= theirs, "{rate:?}: {window:?}: {ours} > {theirs} in {interval_ms} ms");
                if let Some((window, delay_ms)) = rate.delaying_window(2) {
                    let interval_ms = (edges - 1) * window.period_ms;
                    let ahead = delay_ms / window.period_ms * window.limit;
                    let ours = window.capacity.unwrap_or(window.limit) + edges * window.limit + ahead;
                    let theirs = 1 + burst + interval_ms * requests / period_ms;
                    assert!(ours <= theirs, "{rate:?}: {window:?} ahead {ahead}");
                }
            }
        }
    }
}
