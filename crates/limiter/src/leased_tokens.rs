//! Leases: tokens that were fetched from a counter which several gateways share, and wait here to be spent.
//!
//! Beside the ordinary counter of a key lie two words, in the same buckets. The *purse* counts what was fetched and
//! is not spent yet. It is charged as any counter is, with [`Course::Leased`], so that a request on leased counters
//! and others is still decided as one. What is in it is worth something in one window only: a purse whose
//! window has ended is empty, and nothing goes from one window to the next. The *tally* is what the shared counter
//! was last heard to stand at; it grants nothing.
//!
//! Tokens are only ever moved: what was deposited is spent once, or withdrawn once. A purse that can not be kept, because the table is
//! full, is no loss for anyone but its key; it is never put into a spill counter, where others would spend from it.
//! Who fetches, from where, and how much, is not known here.

use crate::bucket::{FindResult, InsertResult, Key, OpenWindow};
use crate::counter::{AcquireRequest, CounterWord, Usage, WindowKind};
use crate::table::{Counter, Table};
use crate::window::END_MAX_MS;

/// What tells a purse from the counter that it lies beside, and a tally from both. Purses outlive the process where
/// counters do, so these never change.
const LEASE_TAG: u64 = 0x27_8DDE_6E5F_D29F;
const KNOWN_USAGE_TAG: u64 = 0x35_BA3F_AE19_967F;

impl Counter {
    /// The purse of this counter, to be charged with [`Ask::leased`].
    pub fn lease(self) -> Counter {
        self.beside(LEASE_TAG)
    }

    /// The tally of this counter.
    fn known_usage_counter(self) -> Counter {
        self.beside(KNOWN_USAGE_TAG)
    }

    fn beside(self, constant: u64) -> Counter {
        let tag = (self.key.tag ^ constant).max(1);
        Counter { key: Key { tag, ..self.key }, ..self }
    }
}

impl AcquireRequest {
    /// The same tokens out of the counter's purse. Whoever asks for more than the ceiling gets no more than
    /// that, and what else is in the purse is given up: it was fetched under another limit.
    pub fn leased(self) -> AcquireRequest {
        // Cut off where a cost beside it still fits a `u64`.
        AcquireRequest { ceiling: self.ceiling.min(u64::MAX >> 1), floor: 0, kind: WindowKind::Leased, ..self }
    }

    /// What a purse has to say that is over, or not there.
    pub(super) fn nothing_leased(&self) -> Usage {
        Usage { used: self.ceiling, end_ms: self.end_ms }
    }
}

impl CounterWord {
    /// The same word with so many tokens more, or as many as it can count.
    pub(super) fn plus(self, tokens: u64) -> CounterWord {
        let count = u64::from(self.count()).saturating_add(tokens);
        CounterWord::new(self.tag(), self.end_ms(), u32::try_from(count).unwrap_or(u32::MAX))
    }
}

/// What became of tokens that were to be kept.
#[must_use = "tokens that are not kept can still be given back to whom they were fetched from"]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DepositResult {
    Stored,
    /// All slots that the purse may lie in are taken by open windows.
    Full,
    /// Their window is over, or the purse is that of a later one.
    Expired,
}

impl<const W: usize> Table<W> {
    /// Puts tokens of the window ending at `end_ms` into the purse of `counter`. What is left of a window before is
    /// worth nothing any more, and gone.
    pub fn deposit(&self, counter: Counter, end_ms: u64, tokens: u32, now_ms: u64) -> DepositResult {
        self.write_window(counter.lease(), end_ms, now_ms, |left| left.saturating_add(tokens))
    }

    /// Takes at most so many tokens out of the purse again, if it is still that of the window ending at `end_ms`;
    /// the answer is how many. They can not be spent any more.
    pub fn withdraw(&self, counter: Counter, end_ms: u64, most: u32) -> u32 {
        let key = counter.lease().key;
        while let FindResult::Counter(index, word) = self.counters.find(key) {
            let tokens = word.count().min(most);
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

    /// What is left in the purse of `counter`.
    pub fn leased_tokens(&self, counter: Counter, now_ms: u64) -> u32 {
        self.find_live(counter.lease(), now_ms).map_or(0, CounterWord::count)
    }

    /// Remembers what the shared counter stands at in the window ending at `end_ms`, if there is room for it and
    /// nothing is known of a later window.
    pub fn set_known_usage(&self, counter: Counter, end_ms: u64, used: u32, now_ms: u64) {
        // Nobody's tokens depend on it.
        let _ = self.write_window(counter.known_usage_counter(), end_ms, now_ms, |_before| used);
    }

    /// Adds tokens to what the shared counter of a window is known to stand at.
    pub fn add_known_usage(&self, counter: Counter, end_ms: u64, tokens: u32, now_ms: u64) {
        let _ =
            self.write_window(counter.known_usage_counter(), end_ms, now_ms, |before| before.saturating_add(tokens));
    }

    /// The end of the shared counter's window, and what it was last heard to stand at.
    pub fn known_usage(&self, counter: Counter, now_ms: u64) -> Option<(u64, u32)> {
        self.find_live(counter.known_usage_counter(), now_ms).map(|word| (word.end_ms(), word.count()))
    }

    fn find_live(&self, counter: Counter, now_ms: u64) -> Option<CounterWord> {
        match self.counters.find(counter.key) {
            FindResult::Counter(_, word) if word.is_live(now_ms) => Some(word),
            FindResult::Counter(..) | FindResult::Claim(..) | FindResult::Nothing => None,
        }
    }

    /// Writes the word of a window, with a count that follows from what it counted of that window before.
    fn write_window(&self, counter: Counter, end_ms: u64, now_ms: u64, count: impl Fn(u32) -> u32) -> DepositResult {
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
            // It may become another key's, if its window was over.
            while word.tag() == key.tag && !word.is_claim() {
                if word.end_ms() > end_ms {
                    return DepositResult::Expired;
                }
                let before = if word.end_ms() == end_ms { word.count() } else { 0 };
                let next = CounterWord::new(key.tag, end_ms, count(before));
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
    use crate::window::Time;

    const COUNTER: Counter = Counter { key: Key { bucket_hash: 3, tag: 7 }, layer: 0 };

    fn table() -> Table {
        Table::with_capacity(16).unwrap()
    }

    fn spend(table: &Table, request: AcquireRequest) -> CounterResult {
        table.acquire(COUNTER.lease(), request, Time::plain(50), None)
    }

    #[test]
    fn counter_purse_and_tally_are_three() {
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
    fn what_is_in_a_purse_beyond_the_ceiling_is_given_up() {
        let table = table();
        assert_eq!(table.deposit(COUNTER, 100, 80, 50), DepositResult::Stored);
        assert!(matches!(spend(&table, AcquireRequest::plain(100, 10, 11).leased()), CounterResult::Full(_)));
        assert_eq!(table.leased_tokens(COUNTER, 50), 80);
        assert!(matches!(spend(&table, AcquireRequest::plain(100, 10, 4).leased()), CounterResult::Acquired(..)));
        assert_eq!(table.leased_tokens(COUNTER, 50), 6);
    }

    #[test]
    fn numbers_end_where_words_end() {
        let table = table();
        assert_eq!(table.deposit(COUNTER, u64::MAX, u32::MAX, 50), DepositResult::Stored);
        assert_eq!(table.deposit(COUNTER, END_MAX_MS, 5, 50), DepositResult::Stored);
        assert_eq!((table.leased_tokens(COUNTER, 50), table.leased_tokens(COUNTER, END_MAX_MS)), (u32::MAX, 0));
        // As it is where what a request costs is only known afterwards.
        let request = AcquireRequest { ceiling: u64::MAX, ..AcquireRequest::plain(100, 10, u32::MAX) }.leased();
        assert!(matches!(spend(&table, request), CounterResult::Acquired(..)));
        assert!(matches!(spend(&table, AcquireRequest { cost: 1, ..request }), CounterResult::Full(_)));
        assert_eq!(table.withdraw(COUNTER, u64::MAX, 1), 0);
    }

    #[test]
    fn a_purse_that_is_forgotten_is_empty() {
        let table = table();
        assert_eq!(table.deposit(COUNTER, 100, 8, 50), DepositResult::Stored);
        table.reset(COUNTER.lease(), AcquireRequest::plain(100, 10, 0).leased(), Time::plain(50));
        assert_eq!(table.leased_tokens(COUNTER, 50), 0);
        assert_eq!(table.deposit(COUNTER, 100, 3, 50), DepositResult::Stored);
        assert_eq!(table.leased_tokens(COUNTER, 50), 3);
    }

    #[test]
    fn a_charge_of_nothing_makes_no_purse_and_moves_none() {
        let table = table();
        let request = AcquireRequest::plain(200, 10, 0).leased();
        assert!(matches!(spend(&table, request), CounterResult::Full(_)));
        assert_eq!((table.stats(50).live, table.deposit(COUNTER, 100, 2, 50)), (0, DepositResult::Stored));
        assert!(matches!(spend(&table, request), CounterResult::Acquired(..)));
        assert!(matches!(table.acquire(COUNTER.lease(), request, Time::plain(150), None), CounterResult::Full(_)));
        assert_eq!(table.deposit(COUNTER, 180, 2, 150), DepositResult::Stored);
    }
}
