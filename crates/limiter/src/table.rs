//! The counter table: an array of slots for counters, and one for overflow counters.
//!
//! When both buckets of a new key are full of open windows, the key is counted together with other such keys in an
//! overflow counter of its layer. That is too strict for these keys, never too lax: a key that was counted in an
//! overflow counter gets no counter of its own before that window has ended, so a full table never gives quota back.
//! The table does not read the clock and does not hash.

use std::iter;
use std::num::NonZeroUsize;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use crate::atomics::{AtomicU64, Mutex, Ordering, fence};
use crate::bucket::{FindResult, InsertResult, Key, OpenWindow, SlotArray, WATERMARKS};
use crate::counter::CounterWord;
use crate::memory::{AtomicSlice, LINE_BYTES, Memory};
use crate::window::Time;
use crate::window_kind::{
    AcquireRequest, Acquired, Usage, acquired, extended_to_request, may_have_counted, overflow_usage, queue_position,
    queue_positions, refunded_with_rest, reset, usage,
};

/// Slots per bucket: two cache lines of four words.
pub const BUCKET_SLOTS: usize = 8;
/// The number of overflow counters of a layer, over which its keys are distributed when the table is full.
const OVERFLOW_GROUPS: u64 = 64;
/// Number of locks of local counters; loom creates them again for each interleaving.
const KNOWN_LOCKS: usize = if cfg!(feature = "loom") { 1 } else { 64 };

/// Identifies a counter: its key, and the layer, which selects the overflow counters.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Counter {
    /// The key within its layer.
    pub key: Key,
    /// Uniformly distributed bits, equal for all keys of one layer of one rule.
    pub layer: u64,
}

impl Counter {
    /// The overflow counter for the group of this key in its layer.
    fn overflow_key(self) -> Key {
        let group = self.key.tag % OVERFLOW_GROUPS;
        let bits = self.layer.wrapping_add(group).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        Key::new(bits ^ (bits >> 32), self.layer.rotate_left(32) ^ (group << 58))
    }
}

/// Proof of a charge, for its refund.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Receipt {
    slot: Slot,
    acquired: Acquired,
}

/// A slot of either array, in one word.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Slot(NonZeroUsize);

impl Slot {
    fn new(is_overflow: bool, index: usize) -> Slot {
        Slot(NonZeroUsize::MIN.saturating_add(index << 1 | usize::from(is_overflow)))
    }

    fn index(self) -> usize {
        (self.0.get() - 1) >> 1
    }

    fn is_overflow(self) -> bool {
        (self.0.get() - 1) & 1 == 1
    }
}

impl Receipt {
    /// The end of the charged window, Unix milliseconds.
    pub fn end_ms(self) -> u64 {
        self.acquired.end_ms
    }

    /// The receipt for `tokens` taken from the counter at `slot`, which then had the usage `after`.
    pub fn at(slot: Slot, counter: Counter, after: Usage, tokens: u64) -> Receipt {
        let tag = if slot.is_overflow() { counter.overflow_key().tag } else { counter.key.tag };
        Receipt { slot, acquired: Acquired { tag, end_ms: after.end_ms, used: after.used, tokens } }
    }

    /// The charged slot.
    pub fn slot(self) -> Slot {
        self.slot
    }

    /// The tokens taken.
    pub fn tokens(self) -> u64 {
        self.acquired.tokens
    }

    /// Whether the charge was made in this counter.
    pub fn is_of(self, counter: Counter) -> bool {
        self.acquired.tag == counter.key.tag
    }

    /// The position among all charges: charges of one counter are adjacent, later ones after earlier ones.
    pub fn queue_position(self, is_rest: bool, request: AcquireRequest, time: Time<'_>) -> (Slot, u128) {
        (self.slot, queue_position(self.acquired, is_rest, request, time))
    }

    /// The positions of all charges of the same counter.
    pub fn queue_positions(self) -> RangeInclusive<(Slot, u128)> {
        let (first, last) = queue_positions(self.acquired.tag).into_inner();
        (self.slot, first)..=(self.slot, last)
    }

    /// The receipt of this charge and of `tokens` more that end in the same place.
    pub fn with_more_tokens(self, tokens: u64) -> Receipt {
        Receipt { acquired: Acquired { tokens: self.acquired.tokens + tokens, ..self.acquired }, ..self }
    }

    /// The receipt of only the last `tokens` of the charge, or of all if there are fewer.
    pub fn last_tokens(self, tokens: u32) -> Receipt {
        Receipt { acquired: Acquired { tokens: self.acquired.tokens.min(u64::from(tokens)), ..self.acquired }, ..self }
    }
}

/// The result of a refund.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RefundResult {
    /// All tokens were refunded.
    All,
    /// The rest can be refunded after the charges behind it.
    AllExcept(Receipt),
    /// Nothing was refunded: the window has ended, or there are charges behind it.
    Nothing,
}

/// The counter that a peek found, and its word.
#[derive(Clone, Copy, Debug)]
pub struct PeekedSlot {
    slot: Slot,
    word: CounterWord,
}

/// The result of charging one counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CounterResult {
    /// Charged, with the usage afterwards.
    Acquired(Receipt, Usage),
    /// The request does not fit.
    Full(Usage),
    /// The requested window has ended. Retry with a time not before [`Table::horizon_ms`].
    Late,
}

/// The state of a table besides its counters, Unix milliseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Watermarks {
    /// The latest end of a window whose slot was reused.
    pub horizon_ms: u64,
    /// The same of overflow counters.
    pub overflow_horizon_ms: u64,
    /// The latest end of a window that has overflow counters.
    pub overflow_end_ms: u64,
}

/// The number of counters in use, and of counters that still fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableStats {
    /// Counters with an open window.
    pub live: usize,
    /// Counters that still fit.
    pub free: usize,
}

/// A table of counters with `W` slots per bucket. Charges and refunds are lock-free; only where a local counter of a shared limit begins
/// at known usage, or is reported, threads may wait for each other.
pub struct Table<const W: usize = BUCKET_SLOTS> {
    pub(super) counters: SlotArray<W>,
    overflow: SlotArray<W>,
    watermarks: AtomicSlice<AtomicU64>,
    overflow_charges_total: AtomicU64,
    overflow_refused_total: AtomicU64,
    /// By `bucket_hash`, see `lock_known_in_counter`.
    pub(super) known_in_counters: [Mutex<()>; KNOWN_LOCKS],
}

impl Table {
    /// The layout of a table of this capacity.
    pub fn layout(capacity: usize) -> TableLayout {
        let counter_buckets = (2 * capacity).div_ceil(BUCKET_SLOTS).max(1);
        TableLayout { counter_buckets, overflow_buckets: (counter_buckets / 64).max(128), bucket_slots: BUCKET_SLOTS }
    }

    /// A table of this capacity in memory of its own, with twice as many slots as counters; `None` if memory cannot be
    /// allocated. If keys with two layers in one bucket use the whole capacity, both buckets of a new key are full in
    /// about 2 of 100,000 cases.
    pub fn with_capacity(capacity: usize) -> Option<Table> {
        let layout = Table::layout(capacity);
        Table::in_memory(layout, &Memory::zeroed(layout.bytes())?, 0)
    }
}

/// The numbers of buckets of a table, which define the layout of its memory: the watermarks of the table and of both
/// arrays, then the counters, then the overflow counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableLayout {
    /// Buckets of counters.
    pub counter_buckets: usize,
    /// Buckets of overflow counters.
    pub overflow_buckets: usize,
    /// Slots per bucket.
    pub bucket_slots: usize,
}

impl TableLayout {
    const WATERMARKS_BYTES: usize = WATERMARKS * size_of::<u64>();
    const WORDS_AT: usize = LINE_BYTES + 2 * TableLayout::WATERMARKS_BYTES;

    fn words_bytes(self, buckets: usize) -> usize {
        buckets.saturating_mul(self.bucket_slots * size_of::<u128>())
    }

    /// The memory that a table takes, in bytes.
    pub fn bytes(self) -> usize {
        TableLayout::WORDS_AT
            .saturating_add(self.words_bytes(self.counter_buckets))
            .saturating_add(self.words_bytes(self.overflow_buckets))
    }
}

impl<const W: usize> Table<W> {
    /// A table in a block of memory, from byte `at` on, which is a multiple of [`LINE_BYTES`]; `None` if it does not
    /// fit. Zeros are an empty table.
    pub fn in_memory(layout: TableLayout, memory: &Arc<Memory>, at: usize) -> Option<Table<W>> {
        let (counters, overflow) = (layout.counter_buckets.max(1), layout.overflow_buckets.max(1));
        let words_at = at.checked_add(TableLayout::WORDS_AT)?;
        let watermarks = |nth: usize| memory.numbers(at + LINE_BYTES + nth * TableLayout::WATERMARKS_BYTES, WATERMARKS);
        let counter_words = memory.words(words_at, counters.checked_mul(W)?)?;
        let overflow_words =
            memory.words(words_at.checked_add(layout.words_bytes(counters))?, overflow.checked_mul(W)?)?;
        Some(Table {
            counters: SlotArray::new(counter_words, watermarks(0)?),
            overflow: SlotArray::new(overflow_words, watermarks(1)?),
            watermarks: memory.numbers(at, 1)?,
            overflow_charges_total: AtomicU64::new(0),
            overflow_refused_total: AtomicU64::new(0),
            known_in_counters: std::array::from_fn(|_| Mutex::new(())),
        })
    }

    /// A table in memory of its own with these numbers of buckets; `None` if memory cannot be allocated.
    pub fn with_buckets(counter_buckets: usize, overflow_buckets: usize) -> Option<Table<W>> {
        let layout = TableLayout {
            counter_buckets: counter_buckets.max(1),
            overflow_buckets: overflow_buckets.max(1),
            bucket_slots: W,
        };
        Table::in_memory(layout, &Memory::zeroed(layout.bytes())?, 0)
    }

    /// The latest end of a window that has overflow counters, Unix milliseconds.
    #[inline(always)]
    fn overflow_end(&self) -> &AtomicU64 {
        &self.watermarks[0]
    }

    /// The watermark of time, Unix milliseconds: windows that ended by then are closed.
    pub fn horizon_ms(&self) -> u64 {
        self.counters.horizon_ms().max(self.overflow.horizon_ms())
    }

    /// The state besides the counters.
    pub fn watermarks(&self) -> Watermarks {
        Watermarks {
            horizon_ms: self.counters.horizon_ms(),
            overflow_horizon_ms: self.overflow.horizon_ms(),
            // Ordering: acquire, as in `may_overflow`.
            overflow_end_ms: self.overflow_end().load(Ordering::Acquire),
        }
    }

    /// All counters with an open window, each with its index. Counters may change during the iteration.
    pub fn live_counters(&self, now_ms: u64) -> impl Iterator<Item = (usize, CounterWord)> + '_ {
        self.counters.words().chain(self.overflow.words()).enumerate().filter(move |(_, word)| word.is_live(now_ms))
    }

    /// Restores the state that [`Table::watermarks`] returned. To be called before any charge.
    pub fn restore_watermarks(&self, watermarks: Watermarks) {
        self.counters.raise_horizon(watermarks.horizon_ms);
        self.overflow.raise_horizon(watermarks.overflow_horizon_ms);
        // Ordering: threads that charge are started later.
        self.overflow_end().fetch_max(watermarks.overflow_end_ms, Ordering::AcqRel);
    }

    /// Restores a counter that [`Table::live_counters`] returned for a table of the same layout; `false` if the index
    /// is out of bounds. To be called before any charge.
    pub fn restore(&self, index: usize, word: CounterWord) -> bool {
        match index.checked_sub(self.counters.slots()) {
            None => self.counters.restore(index, word),
            Some(index) => self.overflow.restore(index, word),
        }
    }

    /// Charges to overflow counters since the start.
    pub fn overflow_charges_total(&self) -> u64 {
        // Ordering: relaxed; a statistic.
        self.overflow_charges_total.load(Ordering::Relaxed)
    }

    /// Counts the open windows, in one pass over the table.
    pub fn stats(&self, now_ms: u64) -> TableStats {
        self.stats_of(iter::once(0..usize::MAX), now_ms)
    }

    /// Counts the open windows in the `written` parts of the table's memory: ranges of bytes from its start. Slots in
    /// other parts are free.
    pub fn stats_of(&self, written: impl Iterator<Item = Range<usize>>, now_ms: u64) -> TableStats {
        let slot = |byte: usize| byte.saturating_sub(TableLayout::WORDS_AT) / size_of::<u128>();
        let words = written.flat_map(|bytes| self.counters.words_in(slot(bytes.start)..slot(bytes.end)));
        let live = words.filter(|word| word.is_live(now_ms)).count();
        // Half of the slots are spare, so that keys find a free one.
        TableStats { live, free: (self.counters.slots() / 2).saturating_sub(live) }
    }

    /// Starts to bring the bucket of a key into the cache, and returns without waiting for it. `bucket_hash` is
    /// [`Key::bucket_hash`] of a counter. No counter is read or changed.
    ///
    /// A counter of a large table is rarely in the cache: a decision waits for main memory, longer than the rest of it takes.
    /// Whatever is done between this call and the decision, such as reading the clock, is done meanwhile.
    #[inline(always)]
    pub fn prefetch(&self, bucket_hash: u64) {
        self.counters.prefetch(bucket_hash);
    }

    /// The usage of a counter. Nothing is charged, and no slot is taken.
    #[inline(always)]
    pub fn peek<const PLAIN: bool>(
        &self,
        counter: Counter,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> (Usage, Option<PeekedSlot>) {
        if let FindResult::Counter(index, word) = self.counters.find(counter.key) {
            return (usage(word, request, time), Some(PeekedSlot { slot: Slot::new(false, index), word }));
        }
        (self.usage_without_counter(counter, request, time), None)
    }

    /// The usage of a key that has no counter of its own.
    #[inline(always)]
    pub(super) fn usage_without_counter<const PLAIN: bool>(
        &self,
        counter: Counter,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> Usage {
        if request.is_leased(time) {
            return request.nothing_leased();
        }
        if self.may_overflow(request, time)
            && let FindResult::Counter(_, word) = self.overflow.find(counter.overflow_key())
        {
            let usage = overflow_usage(word, request, time);
            if !usage.admits(request) {
                self.count_overflow_refusal();
            }
            return usage;
        }
        Usage { used: 0, end_ms: request.end_ms }
    }

    /// Refusals by overflow counters since the start, including those for lack of a free overflow counter.
    pub fn overflow_refused_total(&self) -> u64 {
        // Ordering: relaxed; a statistic.
        self.overflow_refused_total.load(Ordering::Relaxed)
    }

    pub(super) fn count_overflow_refusal(&self) {
        // Ordering: relaxed; a statistic.
        self.overflow_refused_total.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether an overflow counter may be open in the window of `request`.
    fn may_overflow<const PLAIN: bool>(&self, request: AcquireRequest, time: Time<'_, PLAIN>) -> bool {
        self.may_overflow_from(request.closes_ms(time))
    }

    /// Whether an overflow counter may be open in a window that closes at `closes_ms` or later.
    #[inline(always)]
    pub fn may_overflow_from(&self, closes_ms: u64) -> bool {
        // Ordering: acquire; between a charge to an overflow counter and a claim, the fences in `acquire_overflow` and
        // `SlotArray::confirm` decide.
        self.overflow_end().load(Ordering::Acquire) >= closes_ms
    }

    /// Charges the counter that [`Table::peek`] found, if it has not changed since; `before` is the usage that the peek
    /// returned, and leaves enough tokens.
    // Separate from `acquire`, so that the most common charge keeps its state in registers.
    #[inline(always)]
    pub fn acquire_unchanged<const PLAIN: bool>(
        &self,
        seen: PeekedSlot,
        before: Usage,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> Option<(Slot, Usage)> {
        let (next, after) = acquired(seen.word.tag(), before, request, time)?;
        self.counters.swap(seen.slot.index(), seen.word, next).ok().map(|()| (seen.slot, after))
    }

    /// Charges `request` to a counter, or reports that it does not fit. `hint` is the result of [`Table::peek`], and
    /// may be stale.
    // Separate, because a counter that has not changed since the peek is charged by `acquire_unchanged`.
    #[inline(never)]
    pub fn acquire<const PLAIN: bool>(
        &self,
        counter: Counter,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
        hint: Option<PeekedSlot>,
    ) -> CounterResult {
        if request.is_leased(time) {
            return self.acquire_leased(counter, request, time);
        }
        loop {
            if let Some(outcome) = self.acquire_own(counter, request, time, hint) {
                return outcome;
            }
            let window = OpenWindow { end_ms: request.end_ms, closes_ms: request.closes_ms(time) };
            if let Some(outcome) = self.acquire_overflow(counter, request, window, time) {
                return outcome;
            }
        }
    }

    /// As [`Table::acquire`], but charges no overflow counter, which the key would share with others; `None` if the key has no
    /// counter of its own, and there is no free slot.
    pub fn acquire_own<const PLAIN: bool>(
        &self,
        counter: Counter,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
        hint: Option<PeekedSlot>,
    ) -> Option<CounterResult> {
        if let Some(PeekedSlot { slot, word }) = hint
            && let Some(outcome) = self.acquire_in(&self.counters, slot.index(), word, counter.key, request, time)
        {
            return Some(outcome);
        }
        let window = OpenWindow { end_ms: request.end_ms, closes_ms: request.closes_ms(time) };
        loop {
            match self.counters.insert(counter.key, window, time.now_ms, || self.is_in_overflow(counter, request, time))
            {
                InsertResult::At(index, word) => {
                    if let Some(outcome) = self.acquire_in(&self.counters, index, word, counter.key, request, time) {
                        return Some(outcome);
                    }
                }
                InsertResult::Late => return Some(CounterResult::Late),
                InsertResult::Full => return None,
            }
        }
    }

    /// Charges a lease, if there is one: without a lease there is nothing to spend.
    fn acquire_leased<const PLAIN: bool>(
        &self,
        counter: Counter,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> CounterResult {
        loop {
            match self.counters.find(counter.key) {
                FindResult::Counter(index, word) if word.is_live(time.now_ms) => {
                    if let Some(outcome) = self.acquire_in(&self.counters, index, word, counter.key, request, time) {
                        return outcome;
                    }
                }
                FindResult::Counter(..) | FindResult::Claim(..) | FindResult::Nothing => {
                    return CounterResult::Full(request.nothing_leased());
                }
            }
        }
    }

    /// The compare-and-swap loop around [`acquired`]; `None` if the slot no longer belongs to the key.
    fn acquire_in<const PLAIN: bool>(
        &self,
        slots: &SlotArray<W>,
        index: usize,
        mut word: CounterWord,
        key: Key,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> Option<CounterResult> {
        let is_overflow = std::ptr::eq(slots, &self.overflow);
        while word.tag() == key.tag && !word.is_claim() {
            let before = if is_overflow { overflow_usage(word, request, time) } else { usage(word, request, time) };
            let from = if is_overflow { extended_to_request(before, request, time) } else { before };
            let Some((next, after)) = acquired(word.tag(), from, request, time) else {
                return Some(CounterResult::Full(before));
            };
            match slots.swap(index, word, next) {
                Ok(()) => {
                    let tokens = after.used - before.used;
                    let taken = Acquired { tag: key.tag, end_ms: after.end_ms, used: after.used, tokens };
                    return Some(CounterResult::Acquired(
                        Receipt { slot: Slot::new(is_overflow, index), acquired: taken },
                        after,
                    ));
                }
                Err(changed) => word = changed,
            }
        }
        None
    }

    /// Whether the key may have been counted in its overflow counter, in the window of `request` or a later one.
    fn is_in_overflow<const PLAIN: bool>(
        &self,
        counter: Counter,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> bool {
        self.may_overflow(request, time)
            && match self.overflow.find(counter.overflow_key()) {
                FindResult::Counter(_, word) => may_have_counted(word, request, time),
                // A removed counter says nothing either. Ordering: read after the slots, as in `SlotArray::confirm`.
                FindResult::Claim(..) | FindResult::Nothing => request.closes_ms(time) <= self.overflow.horizon_ms(),
            }
    }

    /// Charges the overflow counter; `None` if the key got a counter of its own meanwhile.
    fn acquire_overflow<const PLAIN: bool>(
        &self,
        counter: Counter,
        request: AcquireRequest,
        window: OpenWindow,
        time: Time<'_, PLAIN>,
    ) -> Option<CounterResult> {
        // Ordering: raised before the charge, so that threads which see the charge search for it.
        self.overflow_end().fetch_max(request.last_end_ms(), Ordering::AcqRel);
        let key = counter.overflow_key();
        let outcome = loop {
            match self.overflow.insert(key, window, time.now_ms, || false) {
                InsertResult::At(index, word) => {
                    if let Some(outcome) = self.acquire_in(&self.overflow, index, word, key, request, time) {
                        break outcome;
                    }
                }
                InsertResult::Late => return Some(CounterResult::Late),
                InsertResult::Full => {
                    break CounterResult::Full(Usage { used: request.ceiling, end_ms: request.end_ms });
                }
            }
        };
        let CounterResult::Acquired(receipt, _) = outcome else {
            self.count_overflow_refusal();
            return Some(outcome);
        };
        // Ordering: the charge comes before, the search after; a thread that confirms a claim of this key does both in
        // the other order, so one of the two sees the other.
        fence(Ordering::SeqCst);
        loop {
            match self.counters.find(counter.key) {
                FindResult::Nothing => break,
                FindResult::Claim(index, claim) => {
                    self.counters.revoke(index, claim);
                }
                FindResult::Counter(..) => {
                    self.refund(receipt, request, time);
                    return None;
                }
            }
        }
        // Ordering: read after the slots, as in `SlotArray::confirm`: if the key had a counter for the requested window
        // and its slot was reused, the slot was read in its new state, and the horizon with it.
        if window.closes_ms <= self.counters.horizon_ms() {
            self.refund(receipt, request, time);
            return Some(CounterResult::Late);
        }
        // Ordering: relaxed; a statistic.
        self.overflow_charges_total.fetch_add(1, Ordering::Relaxed);
        Some(outcome)
    }

    /// Resets the usage and debt of a key's own counter; returns its word before, or [`CounterWord::EMPTY`] if there is
    /// none. Overflow counters belong to several keys and are not reset.
    pub fn reset(&self, counter: Counter, request: AcquireRequest, time: Time<'_>) -> CounterWord {
        self.reset_announced(counter, request, time, |_word| ())
    }

    /// As [`Table::reset`]. `announce` is called with each word that is about to be reset; the last one is the word
    /// that was reset. So no thread sees the counter empty before the announcement.
    pub fn reset_announced(
        &self,
        counter: Counter,
        request: AcquireRequest,
        time: Time<'_>,
        mut announce: impl FnMut(CounterWord),
    ) -> CounterWord {
        while let FindResult::Counter(index, word) = self.counters.find(counter.key) {
            let unused = reset(word, request, time);
            if word != unused {
                announce(word);
            }
            if word == unused || self.counters.swap(index, word, unused).is_ok() {
                return word;
            }
        }
        CounterWord::EMPTY
    }

    /// Refunds a charge in the window in which it was made, and in no other. `request` is the charged request; time may
    /// have passed since. Returns `false` if nothing was refunded.
    pub fn refund<const PLAIN: bool>(&self, receipt: Receipt, request: AcquireRequest, time: Time<'_, PLAIN>) -> bool {
        self.refund_with_rest(receipt, false, request, time) != RefundResult::Nothing
    }

    /// As [`Table::refund`], for a charge or the rest of one. Returns what is left of it.
    pub fn refund_with_rest<const PLAIN: bool>(
        &self,
        receipt: Receipt,
        is_rest: bool,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> RefundResult {
        let slots = if receipt.slot.is_overflow() { &self.overflow } else { &self.counters };
        let mut word = slots.load(receipt.slot.index());
        while let Some((less, rest)) = refunded_with_rest(word, receipt.acquired, is_rest, request, time) {
            match slots.swap(receipt.slot.index(), word, less) {
                Ok(()) => {
                    return rest.map_or(RefundResult::All, |taken| {
                        RefundResult::AllExcept(Receipt { acquired: taken, ..receipt })
                    });
                }
                Err(changed) => word = changed,
            }
        }
        RefundResult::Nothing
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    fn counter(tag: u64) -> Counter {
        Counter { key: Key { bucket_hash: 0, tag }, layer: 0x0123_4567_89AB_CDEF }
    }

    /// A table of one slot, which another key occupies until 60.
    fn full_table() -> Table<1> {
        let table = Table::with_buckets(1, 1).unwrap();
        assert!(acquires(&table, counter(9), 60, 50));
        table
    }

    /// Takes one of two tokens.
    fn acquires(table: &Table<1>, counter: Counter, end_ms: u64, now_ms: u64) -> bool {
        let outcome = table.acquire(counter, AcquireRequest::plain(end_ms, 2, 1), Time::plain(now_ms), None);
        matches!(outcome, CounterResult::Acquired(..))
    }

    fn used(table: &Table<1>, counter: Counter, end_ms: u64, now_ms: u64) -> u64 {
        table.peek(counter, AcquireRequest::plain(end_ms, 2, 1), Time::plain(now_ms)).0.used
    }

    /// Counters that outlive the process are found by these numbers.
    #[test]
    fn overflow_counters_stay_where_they_are() {
        let key = Key { bucket_hash: 0x3DD3_A03B_E082_CBCD, tag: 0x0021_6AF3_7BC0_48D1 };
        assert_eq!([3, 64 + 3].map(|tag| counter(tag).overflow_key()), [key; 2]);
    }

    #[test]
    fn refusals_by_overflow_counters_are_counted() {
        let table = full_table();
        let refused = || table.overflow_refused_total();
        assert!(acquires(&table, counter(1), 60, 50));
        assert_eq!((used(&table, counter(1), 60, 50), refused()), (1, 0));
        assert!(acquires(&table, counter(65), 60, 50));
        assert_eq!((used(&table, counter(1), 60, 50), refused()), (2, 1));
        assert!(!acquires(&table, counter(1), 60, 50));
        assert_eq!((refused(), table.overflow_charges_total()), (2, 2));
        // No overflow counter is free.
        assert!(!acquires(&table, counter(2), 60, 50));
        assert_eq!(refused(), 3);
    }

    /// The overflow counter of an earlier window has not counted the key, which finds a slot.
    #[test]
    fn usage_of_an_earlier_overflow_counter_does_not_count() {
        let table = full_table();
        assert!(acquires(&table, counter(1), 100, 50) && acquires(&table, counter(1), 100, 50));
        assert_eq!([100, 200].map(|end_ms| used(&table, counter(65), end_ms, 70)), [2, 0]);
        assert!(acquires(&table, counter(65), 200, 70));
        assert_eq!(table.overflow_charges_total(), 2);
    }

    #[test]
    fn watermarks_are_restored_each_in_its_place() {
        let watermarks = Watermarks { horizon_ms: 5, overflow_horizon_ms: 9, overflow_end_ms: 7 };
        let table = full_table();
        table.restore_watermarks(watermarks);
        assert_eq!((table.watermarks(), table.horizon_ms()), (watermarks, 9));
    }

    #[test]
    fn a_prefetch_changes_nothing_for_any_hash() {
        fn check<const W: usize>(table: &Table<W>) {
            let state =
                || (table.live_counters(0).collect::<Vec<_>>(), table.watermarks(), table.overflow_charges_total());
            let before = state();
            let spread = (0..1000u64).map(|n| n.wrapping_mul(0x9E37_79B9_7F4A_7C15));
            for bucket_hash in spread.chain([1, 1 << 63, u64::MAX - 1, u64::MAX]) {
                table.prefetch(bucket_hash);
            }
            assert_eq!(state(), before);
        }
        check(&full_table());
        check(&Table::<1>::with_buckets(1, 1).unwrap());
        check(&Table::<8>::with_buckets(3, 1).unwrap());
        let table = Table::with_capacity(1000).unwrap();
        for tag in 1..100 {
            let key = Key { bucket_hash: tag << 56, tag };
            let request = AcquireRequest::plain(60, 2, 1);
            let acquired = table.acquire(Counter { key, layer: 1 }, request, Time::plain(50), None);
            assert!(matches!(acquired, CounterResult::Acquired(..)));
        }
        check(&table);
    }

    #[test]
    fn overflow_counters_are_a_64th_of_a_large_table() {
        let buckets = |capacity| (Table::layout(capacity).counter_buckets, Table::layout(capacity).overflow_buckets);
        assert_eq!([0, 4000, 1 << 20].map(buckets), [(1, 128), (1000, 128), (1 << 18, 1 << 12)]);
    }
}
