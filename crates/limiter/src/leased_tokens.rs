//! Leases: tokens that were fetched from a counter which several gateways share, to be spent locally.
//!
//! Next to the counter of a key there are two more words in the same buckets. The *lease* holds tokens that were
//! fetched and not spent yet. It is charged like any counter, with [`WindowKind::Leased`], so that a request on leased
//! and other counters is decided at once. A lease is valid in one window: when the window ends, its tokens expire. The
//! *known usage* is the last reported usage of the shared counter; it grants nothing. Of a sliding window, one more word ends when
//! its first tokens come back. Of windows that depend on each other, one more word has the known usage that
//! outlasts its window, and one what of it the ordinary counter contains.
//!
//! Tokens are only moved: a deposited token is spent once, or withdrawn once. A lease that does not fit into a full
//! table costs only its own key; leases never go to overflow counters, where other keys would spend them. Fetching
//! tokens is the caller's task.

use std::sync::PoisonError;

use crate::atomics::MutexGuard;
use crate::bucket::{FindResult, InsertResult, Key, OpenWindow};
use crate::counter::CounterWord;
use crate::table::{Counter, Table};
use crate::window::{END_MAX_MS, Time};
use crate::window_kind::{AcquireRequest, CEILING_MAX, Usage, WindowKind, usage, with_usage};

/// These constants distinguish a lease from its counter, and the other words from both. Leases may outlive the process,
/// so the constants never change.
const LEASE_TAG: u64 = 0x27_8DDE_6E5F_D29F;
const KNOWN_USAGE_TAG: u64 = 0x35_BA3F_AE19_967F;
const FIRST_RETURN_TAG: u64 = 0x1B_64D2_90C7_3E85;
const DEBT_TAG: u64 = 0x0C_59E7_1F36_A24B;
const COUNTED_FROM_TAG: u64 = 0x32_6B04_D8E1_579D;

impl Counter {
    /// The lease of this counter, to be charged with [`AcquireRequest::leased`].
    pub fn lease(self) -> Counter {
        self.with_tag_mask(LEASE_TAG)
    }

    /// The known usage of this counter.
    fn known_usage_counter(self) -> Counter {
        self.with_tag_mask(KNOWN_USAGE_TAG)
    }

    fn with_tag_mask(self, mask: u64) -> Counter {
        let tag = (self.key.tag ^ mask).max(1);
        Counter { key: Key { tag, ..self.key }, ..self }
    }
}

impl AcquireRequest {
    /// The same request, to be charged to the lease of the counter. If the lease holds more tokens than the ceiling,
    /// the excess is dropped: it was fetched under another limit.
    pub fn leased(self) -> AcquireRequest {
        AcquireRequest { ceiling: self.ceiling.min(CEILING_MAX), floor: 0, kind: WindowKind::Leased, ..self }
    }

    /// The usage of a lease that has expired or does not exist.
    pub(super) fn nothing_leased(&self) -> Usage {
        Usage { used: self.ceiling, end_ms: self.end_ms }
    }
}

impl CounterWord {
    /// The count if the word is of the window ending at `end_ms`, otherwise 0.
    fn count_in(self, end_ms: u64) -> u32 {
        if self.end_ms() == end_ms.min(END_MAX_MS) { self.count() } else { 0 }
    }

    /// The same word with `tokens` more, or as many as it can count.
    pub(super) fn with_more_tokens(self, tokens: u64) -> CounterWord {
        let count = u64::from(self.count()).saturating_add(tokens);
        CounterWord::new(self.tag(), self.end_ms(), u32::try_from(count).unwrap_or(u32::MAX))
    }
}

/// The result of a deposit.
#[must_use = "tokens that were not stored should be returned to the store"]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DepositResult {
    /// The tokens can be spent.
    Stored,
    /// All slots of the lease hold open windows.
    Full,
    /// The window of the tokens has ended, or the lease is of a later window.
    Expired,
}

impl<const W: usize> Table<W> {
    /// Adds tokens of the window ending at `end_ms` to the lease of `counter`. Tokens of an earlier window expire.
    pub fn deposit(&self, counter: Counter, end_ms: u64, tokens: u32, now_ms: u64) -> DepositResult {
        self.write_window(counter.lease(), end_ms, now_ms, |word| word.count_in(end_ms).saturating_add(tokens))
    }

    /// Takes at most `most` tokens out of the lease again, if the lease is still of the window ending at `end_ms`.
    /// Returns their number; they cannot be spent any more.
    pub fn withdraw(&self, counter: Counter, end_ms: u64, max_tokens: u32) -> u32 {
        let key = counter.lease().key;
        while let FindResult::Counter(index, word) = self.counters.find(key) {
            let tokens = word.count().min(max_tokens);
            if tokens == 0 || word.end_ms() != end_ms.min(END_MAX_MS) {
                return 0;
            }
            if self.counters.swap(index, word, CounterWord::new(key.tag, word.end_ms(), word.count() - tokens)).is_ok()
            {
                return tokens;
            }
        }
        0
    }

    /// The unspent tokens in the lease of `counter`.
    pub fn leased_tokens(&self, counter: Counter, now_ms: u64) -> u32 {
        self.find_live(counter.lease(), now_ms).map_or(0, CounterWord::count)
    }

    /// Stores the usage of the shared counter in the window ending at `end_ms`, unless the table is full or the usage
    /// of a later window is known.
    pub fn set_known_usage(&self, counter: Counter, end_ms: u64, used: u32, now_ms: u64) {
        // Known usage grants no tokens, so the result does not matter.
        let _ = self.write_window(counter.known_usage_counter(), end_ms, now_ms, |_word| used);
    }

    /// As [`Table::set_known_usage`], for windows that requests open, whose end only the store knows: replaces a later end, which
    /// this gateway had assumed.
    pub fn correct_known_usage(&self, counter: Counter, end_ms: u64, used: u32, now_ms: u64) {
        let key = counter.known_usage_counter().key;
        while let FindResult::Counter(index, word) = self.counters.find(key) {
            if end_ms <= now_ms || word.end_ms() <= end_ms {
                break;
            }
            if self.counters.swap(index, word, CounterWord::new(key.tag, end_ms, used)).is_ok() {
                return;
            }
        }
        self.set_known_usage(counter, end_ms, used, now_ms);
    }

    /// Adds tokens to the known usage of the shared counter.
    pub fn add_known_usage(&self, counter: Counter, end_ms: u64, tokens: u32, now_ms: u64) {
        let known_usage = counter.known_usage_counter();
        let _ = self.write_window(known_usage, end_ms, now_ms, |word| word.count_in(end_ms).saturating_add(tokens));
    }

    /// As [`Table::add_known_usage`], for a sliding window: what was known before counts on, until `end_ms` at least.
    pub fn add_sliding_usage(&self, counter: Counter, end_ms: u64, tokens: u32, now_ms: u64) {
        let add = |word: CounterWord| if word.is_live(now_ms) { word.count().saturating_add(tokens) } else { tokens };
        let known_usage = counter.known_usage_counter();
        // Another thread may set a later end meanwhile.
        while self.write_window(known_usage, self.known_end_ms(counter, now_ms).max(end_ms), now_ms, add)
            == DepositResult::Expired
            && self.known_usage(counter, now_ms).is_some()
        {}
    }

    /// Subtracts refunded tokens from the known usage of the window ending at `end_ms`; of a sliding window, `None`.
    pub fn subtract_known_usage(&self, counter: Counter, end_ms: Option<u64>, tokens: u32, now_ms: u64) {
        if let Some((known_end_ms, _)) = self.known_usage(counter, now_ms)
            && end_ms.is_none_or(|end_ms| end_ms == known_end_ms)
        {
            let subtract = |word: CounterWord| word.count_in(known_end_ms).saturating_sub(tokens);
            let _ = self.write_window(counter.known_usage_counter(), known_end_ms, now_ms, subtract);
            if let Some(debt) = self.find_live(counter.with_tag_mask(DEBT_TAG), now_ms) {
                let add_left = |word: CounterWord| word.count_in(debt.end_ms()).saturating_add(tokens);
                let _ = self.write_window(counter.with_tag_mask(DEBT_TAG), debt.end_ms(), now_ms, add_left);
            }
        }
    }

    /// Notes the known usage of a counter whose windows depend on each other, if more than the limit of one window is used: it counts
    /// in later windows too, in which [`Table::known_usage`] has ended. `request`: of the layer. The caller changes the known usage of
    /// the counter in no other thread meanwhile.
    // The word ends with the last window of which tokens are used, and counts those that are left of it. So refunds add to it,
    // whatever the limit.
    pub fn note_debt(&self, counter: Counter, known: Usage, request: AcquireRequest, time: Time<'_>) {
        if !request.kind.carries_debt() || known.end_ms < self.known_end_ms(counter, time.now_ms) {
            return;
        }
        let debt = counter.with_tag_mask(DEBT_TAG);
        let last = with_usage(debt.key.tag, known, request, time);
        let left = request.limit.saturating_sub(last.count());
        self.write_lasting(debt, last.end_ms(), left, time.now_ms, known.used > request.limit.into());
    }

    /// The known usage of a counter, which of windows that depend on each other outlasts its window. `request`: in the current window.
    pub fn lasting_usage(&self, counter: Counter, request: AcquireRequest, time: Time<'_>) -> Option<Usage> {
        if let Some((end_ms, used)) = self.known_usage(counter, time.now_ms) {
            return Some(Usage { used: used.into(), end_ms });
        }
        let word = self.find_lasting(counter.with_tag_mask(DEBT_TAG), request, time)?;
        let granted = usage(CounterWord::new(word.tag(), word.end_ms(), request.limit), request, time);
        let used = granted.used.saturating_sub(word.count().into());
        (used > 0).then_some(Usage { used, ..granted })
    }

    /// The known usage that a local counter contains, whose windows depend on each other: see [`Table::count_from`].
    pub(super) fn known_in_counter(&self, counter: Counter, request: AcquireRequest, time: Time<'_>) -> u64 {
        self.base_word(counter, request, time).map_or(0, |word| usage(word, request, time).used)
    }

    /// Makes a local counter whose windows depend on each other begin at the known usage, unless it has counted requests: the usage
    /// that becomes known then is not joined with its own. `request`: in the current window, with the ceiling of all gateways.
    // The base is the known usage that the counter contains. Each word is replaced only if it still is what was read, because another
    // process may share the table, which the lock does not stop.
    pub(super) fn count_from(&self, counter: Counter, known: Usage, request: AcquireRequest, time: Time<'_>) {
        let counted_from = counter.with_tag_mask(COUNTED_FROM_TAG);
        let used_in = |word: CounterWord| usage(word, request, time).used;
        let may_begin = |counted: u64, base: u64| {
            let is_same = counted == base && (base == known.used || known.used >= request.ceiling);
            counted <= base && !is_same
        };
        let used = |counter| self.find_live(counter, time.now_ms).map_or(0, used_in);
        if !may_begin(used(counter), used(counted_from)) {
            return;
        }
        let empty = AcquireRequest { end_ms: known.end_ms, ceiling: CEILING_MAX, floor: 0, cost: 0, ..request };
        if self.find_live(counter, time.now_ms).is_none() && self.acquire_own(counter, empty, time, None).is_none()
            || !self.open_word(counted_from, known.end_ms, time.now_ms)
        {
            // The table is full.
            return;
        }
        let _lock = self.lock_known_in_counter(counter);
        let Some((base_at, base_word)) = self.find_live_at(counted_from, time.now_ms) else { return };
        let base = used_in(base_word);
        let known_word =
            |counter: Counter, end_ms| with_usage(counter.key.tag, Usage { used: known.used, end_ms }, request, time);
        // Never more than the known usage in the counter, so that no charge is taken for a part of it.
        let least = if known.used < base { known_word(counted_from, known.end_ms) } else { base_word };
        if self.counters.swap(base_at, base_word, least).is_err() {
            return;
        }
        let begun = self.find_live_at(counter, time.now_ms).and_then(|(at, word)| {
            let next = known_word(counter, usage(word, request, time).end_ms);
            let begins = may_begin(used_in(word), base) && self.counters.swap(at, word, next).is_ok();
            begins.then_some((at, word, next))
        });
        let next_base = if begun.is_some() { known_word(counted_from, known.end_ms) } else { base_word };
        if self.counters.swap(base_at, least, next_base).is_err()
            && let Some((at, word, next)) = begun
        {
            // Another process has reported the counter, or the window has ended. If the counter was charged meanwhile, it counts too much.
            let _ = self.counters.swap(at, next, word);
        }
    }

    /// No other worker makes the local counter begin at known usage or reports it while the result exists: each takes two words. Charges
    /// do not need this lock. It is one of this process; the table may be of several.
    pub(super) fn lock_known_in_counter(&self, counter: Counter) -> MutexGuard<'_, ()> {
        let nth = counter.key.bucket_hash as usize % self.known_in_counters.len();
        self.known_in_counters[nth].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The word that [`Table::known_in_counter`] reads.
    pub(super) fn base_word(&self, counter: Counter, request: AcquireRequest, time: Time<'_>) -> Option<CounterWord> {
        self.find_lasting(counter.with_tag_mask(COUNTED_FROM_TAG), request, time)
    }

    /// The local counter that contained this known usage is empty.
    pub(super) fn forget_known_in_counter(&self, counter: Counter, base: CounterWord, end_ms: u64) {
        let counted_from = counter.with_tag_mask(COUNTED_FROM_TAG);
        if let FindResult::Counter(index, word) = self.counters.find(counted_from.key)
            && word == base
        {
            // If another process has changed it, it belongs to a counter that has begun again.
            let _ = self.counters.swap(index, word, CounterWord::new(word.tag(), end_ms.min(END_MAX_MS), 0));
        }
    }

    /// Creates a word with the count 0, unless it is live; `false` if there is no slot.
    fn open_word(&self, counter: Counter, end_ms: u64, now_ms: u64) -> bool {
        let end_ms = end_ms.min(END_MAX_MS);
        let window = OpenWindow { end_ms, closes_ms: end_ms };
        match self.counters.insert(counter.key, window, now_ms, || false) {
            InsertResult::At(_, word) if word.is_live(now_ms) => true,
            InsertResult::At(index, word) => {
                self.counters.swap(index, word, CounterWord::new(counter.key.tag, end_ms, 0)).is_ok()
            }
            InsertResult::Full | InsertResult::Late => false,
        }
    }

    /// Sets the word of a usage that outlasts its window, also to an earlier end; only an existing one, unless `creates`.
    fn write_lasting(&self, counter: Counter, end_ms: u64, count: u32, now_ms: u64, creates: bool) {
        let word = CounterWord::new(counter.key.tag, end_ms, count);
        while let FindResult::Counter(index, former) = self.counters.find(counter.key) {
            if !former.is_live(now_ms) || !word.is_live(now_ms) {
                break;
            }
            if self.counters.swap(index, former, word).is_ok() {
                return;
            }
        }
        if creates {
            let _ = self.write_window(counter, end_ms, now_ms, |_word| count);
        }
    }

    fn find_lasting(&self, counter: Counter, request: AcquireRequest, time: Time<'_>) -> Option<CounterWord> {
        if request.kind.carries_debt() { self.find_live(counter, time.now_ms) } else { None }
    }

    /// The end of the shared counter's window (Unix milliseconds) and its last known usage; `None` if that window has
    /// ended.
    pub fn known_usage(&self, counter: Counter, now_ms: u64) -> Option<(u64, u32)> {
        self.find_live(counter.known_usage_counter(), now_ms).map(|word| (word.end_ms(), word.count()))
    }

    /// Notes when the first tokens of a sliding window come back. No earlier token follows.
    pub fn note_first_return(&self, counter: Counter, returns_ms: u64, now_ms: u64) {
        let _ = self.write_window(counter.with_tag_mask(FIRST_RETURN_TAG), returns_ms, now_ms, |_word| 1);
    }

    /// When the first tokens of a sliding window come back, as far as is known.
    pub(super) fn first_return_ms(&self, counter: Counter, now_ms: u64) -> Option<u64> {
        self.find_live(counter.with_tag_mask(FIRST_RETURN_TAG), now_ms).map(CounterWord::end_ms)
    }

    fn known_end_ms(&self, counter: Counter, now_ms: u64) -> u64 {
        self.known_usage(counter, now_ms).map_or(0, |(end_ms, _)| end_ms)
    }

    fn find_live(&self, counter: Counter, now_ms: u64) -> Option<CounterWord> {
        self.find_live_at(counter, now_ms).map(|(_, word)| word)
    }

    /// As [`Table::find_live`], with the index of the word.
    fn find_live_at(&self, counter: Counter, now_ms: u64) -> Option<(usize, CounterWord)> {
        match self.counters.find(counter.key) {
            FindResult::Counter(index, word) if word.is_live(now_ms) => Some((index, word)),
            FindResult::Counter(..) | FindResult::Claim(..) | FindResult::Nothing => None,
        }
    }

    /// Writes the word of a window, with a count computed from the word before, which is not of a later window.
    fn write_window(
        &self,
        counter: Counter,
        end_ms: u64,
        now_ms: u64,
        count: impl Fn(CounterWord) -> u32,
    ) -> DepositResult {
        let (key, end_ms) = (counter.key, end_ms.min(END_MAX_MS));
        if end_ms <= now_ms {
            return DepositResult::Expired;
        }
        let window = OpenWindow { end_ms, closes_ms: end_ms };
        loop {
            let (index, mut word) = match self.counters.insert(key, window, now_ms, || false) {
                InsertResult::At(index, word) => (index, word),
                InsertResult::Full => return DepositResult::Full,
                InsertResult::Late => return DepositResult::Expired,
            };
            // If its window had ended, the slot may be reused for another key.
            while word.tag() == key.tag && !word.is_claim() {
                if word.end_ms() > end_ms {
                    return DepositResult::Expired;
                }
                let next = CounterWord::new(key.tag, end_ms, count(word));
                if next == word {
                    return DepositResult::Stored;
                }
                match self.counters.swap(index, word, next) {
                    Ok(()) => return DepositResult::Stored,
                    Err(changed) => word = changed,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::CounterResult;

    const COUNTER: Counter = Counter { key: Key { bucket_hash: 3, tag: 7 }, layer: 0 };

    fn table() -> Table {
        Table::with_capacity(16).unwrap()
    }

    fn spend(table: &Table, request: AcquireRequest) -> CounterResult {
        table.acquire(COUNTER.lease(), request, Time::plain(50), None)
    }

    #[test]
    fn a_counter_its_lease_and_its_known_usage_have_different_tags() {
        for tag in [1, LEASE_TAG, KNOWN_USAGE_TAG, LEASE_TAG ^ KNOWN_USAGE_TAG, (1 << 54) - 1] {
            let counter = Counter { key: Key { tag, ..COUNTER.key }, ..COUNTER };
            let (lease, known_usage) = (counter.lease(), counter.known_usage_counter());
            assert!(lease.key.tag != tag && known_usage.key.tag != tag && lease != known_usage);
            assert!(
                lease.key.tag != 0
                    && lease.key.tag >> 54 == 0
                    && known_usage.key.tag != 0
                    && known_usage.key.tag >> 54 == 0
            );
            assert_eq!(
                (lease.key.bucket_hash, known_usage.key.bucket_hash),
                (counter.key.bucket_hash, counter.key.bucket_hash)
            );
        }
    }

    #[test]
    fn leased_tokens_beyond_the_ceiling_are_dropped() {
        let table = table();
        assert_eq!(table.deposit(COUNTER, 100, 80, 50), DepositResult::Stored);
        assert!(matches!(spend(&table, AcquireRequest::plain(100, 10, 11).leased()), CounterResult::Full(_)));
        assert_eq!(table.leased_tokens(COUNTER, 50), 80);
        assert!(matches!(spend(&table, AcquireRequest::plain(100, 10, 4).leased()), CounterResult::Acquired(..)));
        assert_eq!(table.leased_tokens(COUNTER, 50), 6);
    }

    #[test]
    fn token_counts_saturate_at_the_width_of_a_word() {
        let table = table();
        assert_eq!(table.deposit(COUNTER, u64::MAX, u32::MAX, 50), DepositResult::Stored);
        assert_eq!(table.deposit(COUNTER, END_MAX_MS, 5, 50), DepositResult::Stored);
        assert_eq!((table.leased_tokens(COUNTER, 50), table.leased_tokens(COUNTER, END_MAX_MS)), (u32::MAX, 0));
        // As for rules whose cost is known only after the response.
        let request = AcquireRequest { ceiling: u64::MAX, ..AcquireRequest::plain(100, 10, u32::MAX) }.leased();
        assert!(matches!(spend(&table, request), CounterResult::Acquired(..)));
        assert!(matches!(spend(&table, request), CounterResult::Full(_)));
        assert_eq!(AcquireRequest { floor: 1, ..request }.leased(), request);
        assert_eq!(table.withdraw(COUNTER, u64::MAX, 1), 0);
    }

    #[test]
    fn known_usage_changes_in_its_window_only() {
        let table = table();
        let known = || table.known_usage(COUNTER, 50);
        table.add_known_usage(COUNTER, 100, 3, 50);
        table.add_known_usage(COUNTER, 100, 4, 50);
        table.subtract_known_usage(COUNTER, Some(200), 1, 50);
        assert_eq!(known(), Some((100, 7)));
        table.subtract_known_usage(COUNTER, Some(100), 2, 50);
        table.subtract_known_usage(COUNTER, None, 1, 50);
        assert_eq!(known(), Some((100, 4)));
        table.add_known_usage(COUNTER, 200, 1, 50);
        table.add_known_usage(COUNTER, 100, 9, 50);
        assert_eq!((known(), table.known_usage(COUNTER, 200)), (Some((200, 1)), None));
    }

    #[test]
    fn known_usage_of_a_sliding_window_counts_on() {
        let table = table();
        for (end_ms, tokens, now_ms, known) in [
            (40, 9, 50, None),
            (100, 3, 50, Some((100, 3))),
            (90, 4, 50, Some((100, 7))),
            (150, 1, 50, Some((150, 8))),
            (200, 2, 150, Some((200, 2))),
        ] {
            table.add_sliding_usage(COUNTER, end_ms, tokens, now_ms);
            assert_eq!(table.known_usage(COUNTER, now_ms), known);
        }
    }

    #[test]
    fn a_reset_lease_is_empty() {
        let table = table();
        assert_eq!(table.deposit(COUNTER, 100, 8, 50), DepositResult::Stored);
        table.reset(COUNTER.lease(), AcquireRequest::plain(100, 10, 0).leased(), Time::plain(50));
        assert_eq!(table.leased_tokens(COUNTER, 50), 0);
        assert_eq!(table.deposit(COUNTER, 100, 3, 50), DepositResult::Stored);
        assert_eq!(table.leased_tokens(COUNTER, 50), 3);
    }

    #[test]
    fn a_charge_of_nothing_neither_creates_nor_moves_a_lease() {
        let table = table();
        let request = AcquireRequest::plain(200, 10, 0).leased();
        assert!(matches!(spend(&table, request), CounterResult::Full(_)));
        assert_eq!((table.stats(50).live, table.deposit(COUNTER, 100, 2, 50)), (0, DepositResult::Stored));
        assert!(matches!(spend(&table, request), CounterResult::Acquired(..)));
        assert!(matches!(table.acquire(COUNTER.lease(), request, Time::plain(150), None), CounterResult::Full(_)));
        assert_eq!(table.deposit(COUNTER, 180, 2, 150), DepositResult::Stored);
    }
}
