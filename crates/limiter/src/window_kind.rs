//! How tokens are counted: what a request takes from a counter, what the counter's word then means, and what a refund
//! returns, for each kind of window. No other module of the table distinguishes the kinds.
//!
//! Every function here is pure: it does not read the clock, does not access shared memory, and cannot fail.

use std::ops::RangeInclusive;

use crate::counter::{COUNT_BITS, CounterWord};
use crate::handles::WindowsId;
use crate::window::{END_BITS, END_MAX_MS, Time, Windows};

/// How the windows of a counter depend on each other.
// As wide as its neighbours in `AcquireRequest`, which is copied faster without a gap.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(u32)]
pub enum WindowKind {
    /// Windows are independent: unused tokens expire with their window, and tokens of later windows cannot be taken.
    #[default]
    Plain,
    /// Windows of a fixed grid, where tokens roll over or are taken from later windows.
    Accumulating,
    /// As `Accumulating`, but the first request of a key opens a window and later windows follow it, until the counter is
    /// unused again. All windows have the same length.
    Floating,
    /// A limit on every interval of one period. Only a whole sliding counter has this kind; see `sliding_counter`. Its
    /// parts are `Plain`.
    Sliding,
    /// A lease: the word counts the tokens that can still be spent until its end. After its end nothing can be spent.
    Leased,
}

impl WindowKind {
    /// The kind of a layer with these windows. `accumulates`: whether tokens of one window can be used in another.
    pub fn of(windows: &Windows, accumulates: bool) -> WindowKind {
        match accumulates {
            _ if matches!(windows, Windows::Sliding { .. }) => WindowKind::Sliding,
            _ if windows.are_opened_by_requests() => WindowKind::Floating,
            true => WindowKind::Accumulating,
            false => WindowKind::Plain,
        }
    }

    /// Whether usage may be debt of later windows. Charges of such a counter have an order, each with its position in a
    /// window.
    pub fn carries_debt(self) -> bool {
        match self {
            WindowKind::Accumulating | WindowKind::Floating => true,
            WindowKind::Plain | WindowKind::Sliding | WindowKind::Leased => false,
        }
    }

    /// Whether tokens of a window can matter after its end, so that leased tokens which were not spent are then refunded.
    pub fn outlasts_window(self) -> bool {
        self.carries_debt() || self == WindowKind::Sliding
    }

    /// Whether a request opens the window.
    pub fn is_opened_by_requests(self) -> bool {
        self == WindowKind::Floating
    }
}

/// No ceiling: the greatest one to which a cost can be added without overflow.
pub const CEILING_MAX: u64 = u64::MAX >> 1;

/// The tokens that a request takes from one counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AcquireRequest {
    /// The end of the window that is open at the time of the request, Unix milliseconds. Where requests open windows:
    /// the end of the window that this request would open.
    pub end_ms: u64,
    /// The most tokens that may be used or owed after the request: the capacity, and the tokens that may be taken from
    /// later windows.
    pub ceiling: u64,
    /// The least usage to assume before the request. A request that is admitted in a later window uses up the windows
    /// before; for a request that is admitted now this is 0.
    pub floor: u64,
    /// Tokens granted per window; at least 1.
    pub limit: u32,
    /// Tokens to take; 0: the counter is not changed, and the request is admitted unless the ceiling is exceeded already.
    pub cost: u32,
    /// How the windows of the counter depend on each other.
    pub kind: WindowKind,
    /// The windows of the counter. Plain windows and leases do not need them.
    pub windows: WindowsId,
}

impl AcquireRequest {
    /// A request for `cost` of `limit` tokens in a plain window that ends at `end_ms`.
    pub fn plain(end_ms: u64, limit: u32, cost: u32) -> AcquireRequest {
        AcquireRequest {
            end_ms,
            ceiling: u64::from(limit),
            floor: 0,
            limit,
            cost,
            kind: WindowKind::Plain,
            windows: WindowsId::FIRST,
        }
    }

    /// The time from which the window of this request has certainly ended, so that no counter may be opened for it,
    /// Unix milliseconds.
    #[inline]
    pub fn closes_ms<const PLAIN: bool>(&self, time: Time<'_, PLAIN>) -> u64 {
        match self.kind_in(time) {
            WindowKind::Plain | WindowKind::Accumulating | WindowKind::Sliding | WindowKind::Leased => self.end_ms,
            WindowKind::Floating => time.now_ms + 1,
        }
    }

    /// The window kind. If `PLAIN`, the compiler knows that it is [`WindowKind::Plain`].
    #[inline]
    fn kind_in<const PLAIN: bool>(&self, _time: Time<'_, PLAIN>) -> WindowKind {
        debug_assert!(!PLAIN || self.kind == WindowKind::Plain);
        if PLAIN { WindowKind::Plain } else { self.kind }
    }

    /// Whether the request spends a lease, which only a deposit creates.
    #[inline]
    pub fn is_leased<const PLAIN: bool>(&self, time: Time<'_, PLAIN>) -> bool {
        self.kind_in(time) == WindowKind::Leased
    }

    /// The latest end that the word of an overflow counter can get. Debt may keep a counter open for long.
    pub fn last_end_ms(&self) -> u64 {
        if self.kind == WindowKind::Plain { self.end_ms } else { END_MAX_MS }
    }

    /// The windows of the counter.
    pub(super) fn windows_in<'w, const PLAIN: bool>(&self, time: Time<'w, PLAIN>) -> &'w Windows {
        time.windows(self.windows)
    }

    /// The usage to assume before the request.
    #[inline]
    fn used_before<const PLAIN: bool>(&self, used: u64) -> u64 {
        if PLAIN { used } else { used.max(self.floor) }
    }
}

/// The usage of a counter and the end of its current window.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Tokens used or owed.
    pub used: u64,
    /// The end of the current window, Unix milliseconds.
    pub end_ms: u64,
}

impl Usage {
    /// Whether `request` still fits.
    #[inline]
    pub fn admits(self, request: AcquireRequest) -> bool {
        self.used.max(request.floor) + u64::from(request.cost) <= request.ceiling
    }
}

/// The usage of the window of `request`.
///
/// A plain word of a later window than the requested one was written by a thread whose clock is ahead: the request
/// counts in that later window. Resetting the word to the earlier window would grant the later window twice.
#[inline]
pub fn usage<const PLAIN: bool>(word: CounterWord, request: AcquireRequest, time: Time<'_, PLAIN>) -> Usage {
    if request.kind_in(time) != WindowKind::Plain {
        return accumulated_usage(word, request, time);
    }
    if word.end_ms() >= request.end_ms {
        Usage { used: u64::from(word.count()), end_ms: word.end_ms() }
    } else {
        Usage { used: 0, end_ms: request.end_ms }
    }
}

/// The tokens that this many windows grant. The product can be any number if the tokens were owed under another limit;
/// it is capped so that a cost can be added without overflow.
pub fn tokens_granted(windows: u64, limit: u32) -> u64 {
    windows.saturating_mul(u64::from(limit)).min(CEILING_MAX)
}

/// As [`usage`], where windows depend on each other: if the word ends some windows from now, the grants of those
/// windows are owed, and the count in addition.
#[inline(never)]
fn accumulated_usage<const PLAIN: bool>(word: CounterWord, request: AcquireRequest, time: Time<'_, PLAIN>) -> Usage {
    let fresh = Usage { used: 0, end_ms: request.end_ms };
    let owed = |windows: u64| u64::from(word.count()) + tokens_granted(windows, request.limit);
    match request.kind {
        WindowKind::Plain | WindowKind::Sliding => fresh,
        WindowKind::Accumulating if word.end_ms() < request.end_ms => fresh,
        WindowKind::Accumulating => {
            let windows = request.windows_in(time).windows_between(request.end_ms, word.end_ms());
            Usage { used: owed(windows), end_ms: request.end_ms }
        }
        WindowKind::Floating if word.end_ms() <= time.now_ms => fresh,
        WindowKind::Floating => {
            // Calendar windows are never opened by requests.
            let Some(period_ms) = request.windows_in(time).period_ms() else { return fresh };
            let windows = (word.end_ms() - time.now_ms).div_ceil(period_ms) - 1;
            // A window without usage is not open: the next request opens a new one.
            match owed(windows) {
                0 => fresh,
                used => Usage { used, end_ms: word.end_ms() - windows * period_ms },
            }
        }
        WindowKind::Leased if word.is_live(time.now_ms) => {
            Usage { used: request.ceiling.saturating_sub(u64::from(word.count())), end_ms: word.end_ms() }
        }
        WindowKind::Leased => request.nothing_leased(),
    }
}

/// As [`usage`], for a counter that several keys share. The windows of the keys may end at different times, so usage
/// counts until the last of those windows has ended.
pub fn overflow_usage<const PLAIN: bool>(word: CounterWord, request: AcquireRequest, time: Time<'_, PLAIN>) -> Usage {
    match request.kind_in(time) {
        WindowKind::Plain | WindowKind::Accumulating if word.end_ms() < request.end_ms && word.is_live(time.now_ms) => {
            Usage { used: u64::from(word.count()), end_ms: request.end_ms }
        }
        WindowKind::Plain
        | WindowKind::Accumulating
        | WindowKind::Floating
        | WindowKind::Sliding
        | WindowKind::Leased => usage(word, request, time),
    }
}

/// Whether an overflow counter with this word may have counted the key of `request`, in its window or a later one. A
/// counter that has moved to a later window says nothing about the window before, whatever its count.
pub fn may_have_counted<const PLAIN: bool>(word: CounterWord, request: AcquireRequest, time: Time<'_, PLAIN>) -> bool {
    match request.kind_in(time) {
        WindowKind::Plain | WindowKind::Accumulating | WindowKind::Sliding => {
            word.end_ms() > request.end_ms || (word.end_ms() == request.end_ms && word.count() > 0)
        }
        WindowKind::Floating | WindowKind::Leased => word.is_live(time.now_ms),
    }
}

/// The usage of an overflow counter on which `request` is charged. It differs from [`overflow_usage`] where requests
/// open windows: each charge keeps the window open for as long as the window of its own key lasts. A window opened by
/// another key, or a refunded charge, would end too early.
pub fn extended_to_request<const PLAIN: bool>(before: Usage, request: AcquireRequest, time: Time<'_, PLAIN>) -> Usage {
    match request.kind_in(time) {
        WindowKind::Plain | WindowKind::Accumulating | WindowKind::Sliding | WindowKind::Leased => before,
        WindowKind::Floating => Usage { end_ms: before.end_ms.max(request.end_ms), ..before },
    }
}

/// The word after `request` was charged on top of the usage `before`, and its usage; `None` if the request does not
/// fit. Plain words only move to later windows.
#[inline]
pub fn acquired<const PLAIN: bool>(
    tag: u64,
    before: Usage,
    request: AcquireRequest,
    time: Time<'_, PLAIN>,
) -> Option<(CounterWord, Usage)> {
    let used = request.used_before::<PLAIN>(before.used) + u64::from(request.cost);
    let after = Usage { used, end_ms: before.end_ms };
    (used <= request.ceiling).then(|| (with_usage(tag, after, request, time), after))
}

/// The word of a counter with this usage: it ends with the last window of which tokens are used or owed, and counts the
/// tokens of that window.
#[inline]
pub(super) fn with_usage<const PLAIN: bool>(
    tag: u64,
    Usage { used, end_ms }: Usage,
    request: AcquireRequest,
    time: Time<'_, PLAIN>,
) -> CounterWord {
    match request.kind_in(time) {
        // The usage is at most the ceiling, and the ceiling of a plain counter is its limit.
        WindowKind::Plain | WindowKind::Sliding => CounterWord::new(tag, end_ms, used as u32),
        // At most the tokens that the lease held.
        WindowKind::Leased => CounterWord::new(tag, end_ms, request.ceiling.saturating_sub(used) as u32),
        WindowKind::Accumulating | WindowKind::Floating => {
            let limit = u64::from(request.limit);
            let all = request.windows_in(time);
            // A debt beyond the last time that a word can hold is cut off.
            let windows =
                (used.saturating_sub(1) / limit).min(all.windows_between(end_ms, END_MAX_MS).saturating_sub(1));
            let count = (used - windows * limit).min(limit);
            CounterWord::new(tag, all.end_after(end_ms, windows), count as u32)
        }
    }
}

/// The word of the same counter with nothing used or owed; of a lease, with nothing left to spend.
pub fn reset(word: CounterWord, request: AcquireRequest, time: Time<'_>) -> CounterWord {
    let now = usage(word, request, time);
    let used = if request.kind == WindowKind::Leased { request.ceiling } else { 0 };
    with_usage(word.tag(), Usage { used, ..now }, request, time)
}

/// Tokens that were taken from a counter, with what a refund needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Acquired {
    /// The tag of the charged counter.
    pub tag: u64,
    /// The end of the window in which they were taken, Unix milliseconds.
    pub end_ms: u64,
    /// Tokens used or owed afterwards.
    pub used: u64,
    /// Tokens taken.
    pub tokens: u64,
}

/// The word after the refund of `taken`; `None` if the counter belongs to another key, or the window of the charge has
/// ended.
///
/// Where windows depend on each other, later requests may already have been promised tokens of certain windows. They
/// must not move to an earlier window, because their own window would then be granted twice. Unless the charge is the
/// last one, only its tokens of the last window are refunded.
pub fn refunded<const PLAIN: bool>(
    word: CounterWord,
    taken: Acquired,
    request: AcquireRequest,
    time: Time<'_, PLAIN>,
) -> Option<CounterWord> {
    refunded_with_rest(word, taken, false, request, time).map(|(word, _)| word)
}

/// As [`refunded`]. The second value is the rest, which can be refunded only after the charges behind it.
///
/// The charge that moved the word into its last window always has a rest, even without tokens. Once that window is
/// empty, the word may return to the window before it, and only this charge knows the usage there. `is_rest`: `taken`
/// is such a rest.
pub fn refunded_with_rest<const PLAIN: bool>(
    word: CounterWord,
    taken: Acquired,
    is_rest: bool,
    request: AcquireRequest,
    time: Time<'_, PLAIN>,
) -> Option<(CounterWord, Option<Acquired>)> {
    if word.tag() != taken.tag || word.is_claim() {
        return None;
    }
    let less = |tokens: u64| {
        CounterWord::new(word.tag(), word.end_ms(), u64::from(word.count()).saturating_sub(tokens) as u32)
    };
    let all = match request.kind_in(time) {
        WindowKind::Plain | WindowKind::Sliding => {
            return (word.end_ms() == taken.end_ms).then(|| (less(taken.tokens), None));
        }
        WindowKind::Leased => {
            return (word.end_ms() == taken.end_ms).then(|| (word.with_more_tokens(taken.tokens), None));
        }
        WindowKind::Accumulating | WindowKind::Floating => request.windows_in(time),
    };
    if !word.is_live(time.now_ms) {
        return None;
    }
    let at = |used: u64| with_usage(word.tag(), Usage { used, end_ms: taken.end_ms }, request, time);
    let windows = all.windows_between(taken.end_ms, word.end_ms());
    // Windows that were opened anew are not on the grid of the charge.
    let aligned = all.end_after(taken.end_ms, windows) == word.end_ms();
    let before_last = tokens_granted(windows, request.limit);
    let is_empty_behind = is_rest && word.count() == 0 && aligned && before_last == taken.used;
    if word == at(taken.used) || is_empty_behind {
        return Some((at(taken.used.saturating_sub(taken.tokens)), None));
    }
    let of_last = taken.used.saturating_sub(before_last).min(taken.tokens);
    let rest = Acquired { used: taken.used - of_last, tokens: taken.tokens - of_last, ..taken };
    (aligned && of_last > 0).then(|| (less(of_last), (windows > 0 && rest.used == before_last).then_some(rest)))
}

/// The position of a charge in the order of the charges of its counter: later charges have greater numbers. The rest of
/// a charge comes between the windows.
pub fn queue_position(taken: Acquired, is_rest: bool, request: AcquireRequest, time: Time<'_>) -> u128 {
    let used = Usage { used: taken.used, end_ms: taken.end_ms };
    with_usage(taken.tag, used, request, time).bits() + u128::from(is_rest)
}

/// All positions in the order of one counter.
pub fn queue_positions(tag: u64) -> RangeInclusive<u128> {
    let lowest = u128::from(tag) << (COUNT_BITS + END_BITS);
    lowest..=(lowest | ((1 << (COUNT_BITS + END_BITS)) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_dependent_windows_matter_after_their_end() {
        use WindowKind::{Accumulating, Floating, Leased, Plain, Sliding};
        let outlasting = [Plain, Accumulating, Floating, Sliding, Leased].map(WindowKind::outlasts_window);
        assert_eq!(outlasting, [false, true, true, true, false]);
    }

    #[test]
    fn an_overflow_counter_of_an_earlier_window_has_not_counted_the_key() {
        let request = AcquireRequest::plain(200, 5, 1);
        let has_counted = |(end_ms, count)| may_have_counted(CounterWord::new(1, end_ms, count), request, time(150));
        assert_eq!([(100, 5), (200, 0), (200, 1), (300, 0)].map(has_counted), [false, false, true, true]);
    }

    /// A key that shares the counter has opened its window earlier.
    #[test]
    fn an_overflow_counter_stays_open_for_the_latest_window() {
        let before = Usage { used: 1, end_ms: 150 };
        let end_ms = |kind| extended_to_request(before, AcquireRequest { kind, ..rolling(200, 1) }, time(100)).end_ms;
        assert_eq!([WindowKind::Floating, WindowKind::Accumulating].map(end_ms), [200, 150]);
    }

    fn charge(word: CounterWord, request: AcquireRequest, time: Time<'_>) -> Option<CounterWord> {
        acquired(word.tag(), usage(word, request, time), request, time).map(|(word, _)| word)
    }

    fn charge_plain(word: CounterWord, request: AcquireRequest) -> Option<CounterWord> {
        charge(word, request, Time::plain(0))
    }

    #[test]
    fn the_largest_limit_is_used_to_the_last_token() {
        let request = AcquireRequest::plain(60_000, u32::MAX, u32::MAX);
        let full = charge_plain(CounterWord::new(1, 60_000, 0), request).expect("fits exactly");
        assert_eq!(full.count(), u32::MAX);
        assert_eq!(charge_plain(full, AcquireRequest { cost: 1, ..request }), None);
        assert!(charge_plain(full, AcquireRequest { cost: 0, ..request }).is_some());
    }

    #[test]
    fn a_new_window_starts_unused() {
        assert_eq!(
            charge_plain(CounterWord::new(1, 60_000, 5), AcquireRequest::plain(120_000, 5, 1)),
            Some(CounterWord::new(1, 120_000, 1))
        );
    }

    #[test]
    fn a_late_thread_counts_in_the_later_window() {
        let late = AcquireRequest::plain(60_000, 5, 1);
        assert_eq!(charge_plain(CounterWord::new(1, 120_000, 4), late), Some(CounterWord::new(1, 120_000, 5)));
        assert_eq!(charge_plain(CounterWord::new(1, 120_000, 5), late), None);
    }

    #[test]
    fn a_refund_never_crosses_a_window() {
        let (word, request) = (CounterWord::new(1, 120_000, 3), AcquireRequest::plain(120_000, 5, 1));
        let refund =
            |tag, end_ms| refunded(word, Acquired { tag, end_ms, used: 3, tokens: 1 }, request, Time::plain(0));
        assert_eq!(refund(1, 60_000), None);
        assert_eq!(refund(2, 120_000), None);
        assert_eq!(refund(1, 120_000), Some(CounterWord::new(1, 120_000, 2)));
    }

    #[test]
    fn a_limit_lowered_under_what_is_used_admits_nothing() {
        let request = AcquireRequest::plain(60_000, 3, 1);
        assert_eq!(charge_plain(CounterWord::new(1, 60_000, 80), request), None);
        assert_eq!(charge_plain(CounterWord::new(1, 60_000, 80), AcquireRequest { cost: 0, ..request }), None);
    }

    const WINDOWS: [Windows; 1] = [Windows::Even { period_ms: 100, offset_ms: 0 }];

    /// 100 tokens in each window of 100 ms, of which 150 may accumulate.
    fn rolling(end_ms: u64, cost: u32) -> AcquireRequest {
        AcquireRequest {
            end_ms,
            ceiling: 150,
            floor: 0,
            limit: 100,
            cost,
            kind: WindowKind::Accumulating,
            windows: WindowsId::FIRST,
        }
    }

    fn time(now_ms: u64) -> Time<'static> {
        Time::new(now_ms, &WINDOWS)
    }

    #[test]
    fn debt_is_paid_window_by_window() {
        let word =
            charge(CounterWord::new(1, 100, 0), rolling(100, 150), time(50)).expect("a fresh key holds the capacity");
        assert_eq!(word, CounterWord::new(1, 200, 50));
        for (end_ms, used) in [(100, 150), (200, 50), (300, 0)] {
            assert_eq!(usage(word, rolling(end_ms, 1), time(end_ms - 1)), Usage { used, end_ms });
        }
        assert_eq!(charge(word, rolling(100, 1), time(50)), None);
        assert_eq!(charge(word, rolling(200, 100), time(150)), Some(CounterWord::new(1, 300, 50)));
    }

    /// A charge, and what its refund needs.
    fn taken(word: CounterWord, request: AcquireRequest, time: Time<'_>) -> (CounterWord, Acquired) {
        let before = usage(word, request, time);
        let (word, after) = acquired(1, before, request, time).expect("fits");
        (word, Acquired { tag: 1, end_ms: after.end_ms, used: after.used, tokens: after.used - before.used })
    }

    #[test]
    fn a_refund_changes_open_and_later_windows_only() {
        let request = AcquireRequest { ceiling: 350, ..rolling(100, 120) };
        let first =
            charge(CounterWord::new(1, 100, 0), AcquireRequest { cost: 100, ..request }, time(50)).expect("fits");
        let (word, taken) = taken(first, request, time(50));
        assert_eq!((word, taken.used), (CounterWord::new(1, 300, 20), 220));
        // No request came after it: the counter is as before.
        for now_ms in [60, 160, 260] {
            assert_eq!(refunded(word, taken, request, time(now_ms)), Some(first));
        }
        // A later request holds a position, which must stay in its window.
        assert_eq!(
            refunded(CounterWord::new(1, 300, 30), taken, request, time(60)),
            Some(CounterWord::new(1, 300, 10))
        );
        assert_eq!(refunded(CounterWord::new(1, 400, 30), taken, request, time(60)), None);
        assert_eq!(refunded(word, taken, request, time(300)), None);
        // Windows that were opened anew are on another grid.
        assert_eq!(refunded(CounterWord::new(1, 290, 30), taken, request, time(60)), None);
    }

    #[test]
    fn a_refund_never_moves_another_charge_to_an_earlier_window() {
        // Two positions in the next two windows; the first is refunded, and the second does not move.
        let request_after = |granted| AcquireRequest { ceiling: 100 + granted, floor: granted, ..rolling(100, 100) };
        let full = charge(CounterWord::new(1, 100, 0), request_after(0), time(50)).expect("fits");
        let (word, first) = taken(full, request_after(100), time(50));
        let (word, second) = taken(word, request_after(200), time(50));
        assert_eq!(word, CounterWord::new(1, 300, 100));
        assert_eq!(refunded(word, first, request_after(100), time(60)), None);
        let word = refunded(word, second, request_after(200), time(60)).expect("is the last");
        assert_eq!(usage(word, request_after(0), time(60)), Usage { used: 200, end_ms: 100 });
        // Tokens that a charge forfeits are available again after its refund, if no request came after it.
        let (word, lifted) =
            taken(CounterWord::new(1, 100, 60), AcquireRequest { cost: 10, ..request_after(100) }, time(50));
        assert_eq!((word, lifted.tokens), (CounterWord::new(1, 200, 10), 50));
        assert_eq!(refunded(word, lifted, request_after(100), time(60)), Some(CounterWord::new(1, 100, 60)));
    }

    #[test]
    fn all_charges_refunded_in_any_order_leave_the_counter_as_it_was() {
        let permutations: [[usize; 4]; 6] =
            [[0, 1, 2, 3], [3, 2, 1, 0], [2, 3, 0, 1], [2, 0, 3, 1], [1, 2, 3, 0], [1, 3, 0, 2]];
        for order in permutations {
            // 60 of 100 are used; four charges of 50 follow in two windows, the first of which forfeits the 40 left.
            let start = CounterWord::new(1, 100, 60);
            let (mut word, mut charges) = (start, Vec::new());
            for granted in [100, 100, 200, 200] {
                let request = AcquireRequest { ceiling: 100 + granted, floor: granted, ..rolling(100, 50) };
                let (next, taken) = taken(word, request, time(50));
                word = next;
                charges.push((taken, false, request));
            }
            assert_eq!(word, CounterWord::new(1, 300, 100));
            let mut left = Vec::new();
            for nth in order {
                left.push(charges[nth]);
                loop {
                    left.sort_by_key(|(taken, is_rest, request)| queue_position(*taken, *is_rest, *request, time(60)));
                    let Some((taken, is_rest, request)) = left.last().copied() else { break };
                    let Some((next, rest)) = refunded_with_rest(word, taken, is_rest, request, time(60)) else { break };
                    left.pop();
                    left.extend(rest.map(|rest| (rest, true, request)));
                    word = next;
                }
            }
            assert_eq!((word, left.len()), (start, 0), "{order:?}");
        }
    }

    #[test]
    fn a_late_refund_never_rewinds() {
        let (word, early) = taken(CounterWord::new(1, 100, 50), rolling(100, 30), time(50));
        assert_eq!(word, CounterWord::new(1, 100, 80));
        let later = charge(word, rolling(200, 10), time(100)).expect("a new window");
        assert_eq!(later, CounterWord::new(1, 200, 10));
        assert_eq!(refunded(later, early, rolling(100, 30), time(99)), None);
    }

    #[test]
    fn a_floating_window_starts_at_its_first_request() {
        let request = |now_ms: u64| AcquireRequest {
            end_ms: now_ms + 100,
            ceiling: 1,
            floor: 0,
            limit: 1,
            cost: 1,
            kind: WindowKind::Floating,
            windows: WindowsId::FIRST,
        };
        let word = charge(CounterWord::new(1, 130, 0), request(30), time(30)).expect("opens a window");
        assert_eq!(word, CounterWord::new(1, 130, 1));
        assert_eq!(charge(word, request(129), time(129)), None);
        assert_eq!(charge(word, request(131), time(131)), Some(CounterWord::new(1, 231, 1)));
        // After the refund the window is closed: the next request opens a new one.
        let taken = Acquired { tag: 1, end_ms: 130, used: 1, tokens: 1 };
        let empty = refunded(word, taken, request(30), time(40)).expect("is open");
        assert_eq!(charge(empty, request(40), time(40)), Some(CounterWord::new(1, 140, 1)));
    }

    #[test]
    fn debt_is_capped_at_the_last_time_of_a_word() {
        let request = AcquireRequest { ceiling: u64::MAX, limit: 1, ..rolling(100, u32::MAX) };
        let mut word = CounterWord::new(1, 100, 0);
        for _ in 0..200 {
            word = charge(word, request, time(50)).expect("a debt has no ceiling");
        }
        assert!(word.end_ms() <= END_MAX_MS);
    }
}
