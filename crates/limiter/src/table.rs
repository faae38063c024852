//! The table: one region for counters, one for what does not fit.
//!
//! When both buckets of a new key are full of open windows, the key is counted together with other
//! such keys in a spill counter of its layer. That is too strict for them, never too lax: a key
//! that was counted in a spill counter gets no counter of its own before that window is over, so a
//! full table never hands quota back. This room neither reads the clock nor hashes.

use std::iter;
use std::num::NonZeroUsize;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use crate::atomics::{AtomicU64, Ordering, fence};
use crate::bucket::{FindResult, InsertResult, Key, OpenWindow, SlotArray, WATERMARKS};
use crate::counter::{
    AcquireRequest, Acquired, CounterWord, Usage, WindowKind, acquired, capped, extended_to_request, overflow_usage,
    queue_position, queue_positions, refunded_with_rest, reset, usage,
};
use crate::memory::{AtomicSlice, LINE_BYTES, Memory};
use crate::window::{END_MAX_MS, Time};

/// Slots per bucket: two cache lines of four words.
pub const BUCKET_SLOTS: usize = 8;
/// Into how many spill counters the keys of one layer fall when the table is full.
const OVERFLOW_GROUPS: u64 = 64;

/// Which counter: its key, and the layer it belongs to, which names its spill counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counter {
    pub key: Key,
    /// Evenly spread bits, equal for all keys of one layer of one rule.
    pub layer: u64,
}

impl Counter {
    /// The spill counter for this key's group of its layer.
    fn overflow_key(self) -> Key {
        let group = self.key.tag % OVERFLOW_GROUPS;
        let bits = self.layer.wrapping_add(group).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        Key::new(bits ^ (bits >> 32), self.layer.rotate_left(32) ^ (group << 58))
    }
}

/// Where a charge went, so that it can be taken back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Receipt {
    slot: Slot,
    acquired: Acquired,
}

/// A slot of either region, in one word.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Slot(NonZeroUsize);

impl Slot {
    fn new(spilled: bool, index: usize) -> Slot {
        Slot(NonZeroUsize::MIN.saturating_add(index << 1 | usize::from(spilled)))
    }

    fn index(self) -> usize {
        (self.0.get() - 1) >> 1
    }

    fn is_overflow(self) -> bool {
        (self.0.get() - 1) & 1 == 1
    }
}

impl Receipt {
    /// End of the window in which it was charged, Unix milliseconds.
    pub fn end_ms(self) -> u64 {
        self.acquired.end_ms
    }

    /// What was taken from a counter at `slot`, which then had the given use.
    pub fn at(slot: Slot, counter: Counter, after: Usage, tokens: u64) -> Receipt {
        let tag = if slot.is_overflow() { counter.overflow_key().tag } else { counter.key.tag };
        Receipt { slot, acquired: Acquired { tag, end_ms: after.end_ms, used: after.used, tokens } }
    }

    pub fn slot(self) -> Slot {
        self.slot
    }

    pub fn tokens(self) -> u64 {
        self.acquired.tokens
    }

    /// Where it stands among all charges: those of one counter are neighbours, later ones behind earlier ones.
    pub fn queue_position(self, is_rest: bool, request: AcquireRequest, time: Time<'_>) -> (Slot, u128) {
        (self.slot, queue_position(self.acquired, is_rest, request, time))
    }

    /// The positions of all charges of the same counter.
    pub fn queue_positions(self) -> RangeInclusive<(Slot, u128)> {
        let (first, last) = queue_positions(self.acquired.tag).into_inner();
        (self.slot, first)..=(self.slot, last)
    }

    /// The last `tokens` of it, or all.
    pub fn last_tokens(self, tokens: u32) -> Receipt {
        Receipt { acquired: Acquired { tokens: self.acquired.tokens.min(u64::from(tokens)), ..self.acquired }, ..self }
    }
}

/// What came of giving a charge back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RefundResult {
    All,
    /// The rest can be given back after the charges behind it.
    AllExcept(Receipt),
    /// The window is over, or there are charges behind it.
    Nothing,
}

/// What a look found: a counter, and what it was.
#[derive(Clone, Copy, Debug)]
pub struct PeekedSlot {
    index: usize,
    word: CounterWord,
}

/// The answer to one charge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CounterResult {
    Acquired(Receipt, Usage),
    Full(Usage),
    /// The window asked for is over; ask again with a time not before [`Table::horizon_ms`].
    Late,
}

/// What a table knows beside its counters, Unix milliseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Watermarks {
    /// The latest end of a window whose counter's slot was given away; of the spill counters, too.
    pub horizon_ms: u64,
    pub overflow_horizon_ms: u64,
    /// The latest end of a window that has spill counters.
    pub overflow_end_ms: u64,
}

/// How many counters there are, and for how many more there is room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableStats {
    pub live: usize,
    pub free: usize,
}

pub struct Table<const W: usize = BUCKET_SLOTS> {
    pub(super) counters: SlotArray<W>,
    overflow: SlotArray<W>,
    watermarks: AtomicSlice<AtomicU64>,
    overflow_charges_total: AtomicU64,
    overflow_refused_total: AtomicU64,
}

impl Table {
    /// What a table of this capacity takes.
    pub fn layout(capacity: usize) -> TableLayout {
        let own = (2 * capacity).div_ceil(BUCKET_SLOTS).max(1);
        TableLayout { counter_buckets: own, overflow_buckets: (own / 64).max(128), bucket_slots: BUCKET_SLOTS }
    }

    /// A table of this capacity on the heap, if there is room for it: twice as many slots as
    /// counters. Used to capacity by keys with two layers each, which share a bucket, it then finds
    /// both buckets of a key full about twice in 100,000 times.
    pub fn with_capacity(capacity: usize) -> Option<Table> {
        let plan = Table::layout(capacity);
        Table::in_memory(plan, &Memory::heap(plan.bytes())?, 0)
    }
}

/// How many buckets a table has, and so how its memory is laid out: the marks of the table and of both
/// regions, then the counters, then the spill counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableLayout {
    pub counter_buckets: usize,
    pub overflow_buckets: usize,
    /// Of a bucket.
    pub bucket_slots: usize,
}

impl TableLayout {
    const WATERMARKS_BYTES: usize = WATERMARKS * size_of::<u64>();
    const WORDS_AT: usize = LINE_BYTES + 2 * TableLayout::WATERMARKS_BYTES;

    fn words_bytes(self, buckets: usize) -> usize {
        buckets.saturating_mul(self.bucket_slots * size_of::<u128>())
    }

    pub fn bytes(self) -> usize {
        TableLayout::WORDS_AT
            .saturating_add(self.words_bytes(self.counter_buckets))
            .saturating_add(self.words_bytes(self.overflow_buckets))
    }
}

impl<const W: usize> Table<W> {
    /// A table laid out in a block of memory from byte `at` on, a multiple of [`LINE_BYTES`]; `None` if it does
    /// not fit there. Zeros are an empty table.
    pub fn in_memory(plan: TableLayout, memory: &Arc<Memory>, at: usize) -> Option<Table<W>> {
        let (own, spill) = (plan.counter_buckets.max(1), plan.overflow_buckets.max(1));
        let words_at = at.checked_add(TableLayout::WORDS_AT)?;
        let marks = |nth: usize| memory.numbers(at + LINE_BYTES + nth * TableLayout::WATERMARKS_BYTES, WATERMARKS);
        let own_words = memory.words(words_at, own.checked_mul(W)?)?;
        let spill_words = memory.words(words_at.checked_add(plan.words_bytes(own))?, spill.checked_mul(W)?)?;
        Some(Table {
            counters: SlotArray::new(own_words, marks(0)?),
            overflow: SlotArray::new(spill_words, marks(1)?),
            watermarks: memory.numbers(at, 1)?,
            overflow_charges_total: AtomicU64::new(0),
            overflow_refused_total: AtomicU64::new(0),
        })
    }

    /// A table of so many buckets on the heap.
    pub fn with_buckets(own: usize, spill: usize) -> Option<Table<W>> {
        let plan = TableLayout { counter_buckets: own.max(1), overflow_buckets: spill.max(1), bucket_slots: W };
        Table::in_memory(plan, &Memory::heap(plan.bytes())?, 0)
    }

    /// The latest end of a window that has spill counters, Unix milliseconds.
    #[inline(always)]
    fn overflow_end(&self) -> &AtomicU64 {
        &self.watermarks[0]
    }

    /// Time that has certainly passed, Unix milliseconds: windows that end by then are closed.
    pub fn horizon_ms(&self) -> u64 {
        self.counters.horizon_ms().max(self.overflow.horizon_ms())
    }

    /// What stands beside the counters.
    pub fn watermarks(&self) -> Watermarks {
        Watermarks {
            horizon_ms: self.counters.horizon_ms(),
            overflow_horizon_ms: self.overflow.horizon_ms(),
            // Ordering: acquire, as in `spills`.
            overflow_end_ms: self.overflow_end().load(Ordering::Acquire),
        }
    }

    /// All counters whose window is open, each with its place. They change while this goes on.
    pub fn live_counters(&self, now_ms: u64) -> impl Iterator<Item = (usize, CounterWord)> + '_ {
        self.counters.words().chain(self.overflow.words()).enumerate().filter(move |(_, word)| word.is_live(now_ms))
    }

    /// Puts back what `marks` told, before anything is charged.
    pub fn restore_watermarks(&self, marks: Watermarks) {
        self.counters.raise_horizon(marks.horizon_ms);
        self.overflow.raise_horizon(marks.overflow_horizon_ms);
        // Ordering: whoever charges was started later.
        self.overflow_end().fetch_max(marks.overflow_end_ms, Ordering::AcqRel);
    }

    /// Puts back a counter that `open` told of a table of the same plan, before anything is charged; `false` if
    /// there is no such place.
    pub fn restore(&self, place: usize, word: CounterWord) -> bool {
        match place.checked_sub(self.counters.slots()) {
            None => self.counters.restore(place, word),
            Some(place) => self.overflow.restore(place, word),
        }
    }

    /// Charges that went to a spill counter since the start.
    pub fn overflow_charges_total(&self) -> u64 {
        // Ordering: relaxed; a statistic.
        self.overflow_charges_total.load(Ordering::Relaxed)
    }

    /// Counts the slots with an open window; takes a pass over the table.
    pub fn stats(&self, now_ms: u64) -> TableStats {
        self.stats_of(iter::once(0..usize::MAX), now_ms)
    }

    /// Counts the slots with an open window in the parts of the table's memory that were `written`: ranges of bytes from
    /// its start on. Slots in other parts are free.
    pub fn stats_of(&self, written: impl Iterator<Item = Range<usize>>, now_ms: u64) -> TableStats {
        let slot = |byte: usize| byte.saturating_sub(TableLayout::WORDS_AT) / size_of::<u128>();
        let words = written.flat_map(|bytes| self.counters.words_in(slot(bytes.start)..slot(bytes.end)));
        let live = words.filter(|word| word.is_live(now_ms)).count();
        // Half of the slots are there to be found free.
        TableStats { live, free: (self.counters.slots() / 2).saturating_sub(live) }
    }

    /// What is used of a counter, and nothing else: no slot is taken.
    #[inline]
    pub fn peek<const PLAIN: bool>(
        &self,
        counter: Counter,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> (Usage, Option<PeekedSlot>) {
        if let FindResult::Counter(index, word) = self.counters.find(counter.key) {
            return (usage(word, request, time), Some(PeekedSlot { index, word }));
        }
        if request.kind_in(time) == WindowKind::Leased {
            return (request.nothing_leased(), None);
        }
        if self.may_overflow(request, time)
            && let FindResult::Counter(_, word) = self.overflow.find(counter.overflow_key())
        {
            let usage = overflow_usage(word, request, time);
            if !usage.admits(request) {
                self.count_overflow_refusal();
            }
            return (usage, None);
        }
        (Usage { used: 0, end_ms: request.end_ms }, None)
    }

    /// Refusals by a spill counter, or for want of one, since the start.
    pub fn overflow_refused_total(&self) -> u64 {
        // Ordering: relaxed; a statistic.
        self.overflow_refused_total.load(Ordering::Relaxed)
    }

    fn count_overflow_refusal(&self) {
        // Ordering: relaxed; a statistic.
        self.overflow_refused_total.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether any spill counter may be open in the window of `ask`.
    fn may_overflow<const PLAIN: bool>(&self, request: AcquireRequest, time: Time<'_, PLAIN>) -> bool {
        // Ordering: acquire; between a charge that spills and a claim, the fences in `pay_spill`
        // and `Region::confirm` decide.
        self.overflow_end().load(Ordering::Acquire) >= request.closes_ms(time)
    }

    /// Charges the counter that [`Table::look`] has `seen`, if it is still as it was then; `before` is
    /// the use that was told of it, and has room.
    // Apart from `charge`, so that the commonest of charges keeps what it knows in registers.
    #[inline(always)]
    pub fn acquire_unchanged<const PLAIN: bool>(
        &self,
        seen: PeekedSlot,
        before: Usage,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> Option<(Slot, Usage)> {
        let (next, after) = acquired(seen.word.tag(), before, request, time)?;
        self.counters.swap(seen.index, seen.word, next).ok().map(|()| (Slot::new(false, seen.index), after))
    }

    /// Charges `ask` to a counter, or says that it does not fit. `hint` is what
    /// [`Table::look`] found, and may be stale.
    pub fn acquire<const PLAIN: bool>(
        &self,
        counter: Counter,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
        hint: Option<PeekedSlot>,
    ) -> CounterResult {
        if request.kind_in(time) == WindowKind::Leased {
            return self.acquire_leased(counter, request, time);
        }
        if let Some(PeekedSlot { index, word }) = hint
            && let Some(outcome) = self.acquire_in(&self.counters, index, word, counter.key, request, time)
        {
            return outcome;
        }
        let window = OpenWindow { end_ms: request.end_ms, closes_ms: request.closes_ms(time) };
        loop {
            match self.counters.insert(counter.key, window, time.now_ms, || self.is_in_overflow(counter, request, time))
            {
                InsertResult::At(index, word) => {
                    if let Some(outcome) = self.acquire_in(&self.counters, index, word, counter.key, request, time) {
                        return outcome;
                    }
                }
                InsertResult::Late => return CounterResult::Late,
                InsertResult::Full => {
                    if let Some(outcome) = self.acquire_overflow(counter, request, window, time) {
                        return outcome;
                    }
                }
            }
        }
    }

    /// Charges a purse, if there is one: what nobody fetched is not there to be spent.
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

    /// The compare-and-swap loop around [`charged`]; `None` if the slot is no longer the key's.
    fn acquire_in<const PLAIN: bool>(
        &self,
        slots: &SlotArray<W>,
        index: usize,
        mut word: CounterWord,
        key: Key,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> Option<CounterResult> {
        let spilled = std::ptr::eq(slots, &self.overflow);
        while word.tag() == key.tag && !word.is_claim() {
            let before = if spilled { overflow_usage(word, request, time) } else { usage(word, request, time) };
            let from = if spilled { extended_to_request(before, request, time) } else { before };
            let Some((next, after)) = acquired(word.tag(), from, request, time) else {
                return Some(CounterResult::Full(before));
            };
            match slots.swap(index, word, next) {
                Ok(()) => {
                    let tokens = after.used - before.used;
                    let taken = Acquired { tag: key.tag, end_ms: after.end_ms, used: after.used, tokens };
                    return Some(CounterResult::Acquired(
                        Receipt { slot: Slot::new(spilled, index), acquired: taken },
                        after,
                    ));
                }
                Err(changed) => word = changed,
            }
        }
        None
    }

    /// Whether the key may have been counted in its spill counter, in the window of `ask` or a later one.
    fn is_in_overflow<const PLAIN: bool>(
        &self,
        counter: Counter,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> bool {
        self.may_overflow(request, time)
            && match self.overflow.find(counter.overflow_key()) {
                // A counter that rolled on says nothing about the window before, whatever it stands at.
                FindResult::Counter(_, word) => match request.kind_in(time) {
                    WindowKind::Plain | WindowKind::Grid(_) => {
                        word.end_ms() > request.end_ms || (word.end_ms() == request.end_ms && word.count() > 0)
                    }
                    WindowKind::Floating(_) | WindowKind::Leased => word.is_live(time.now_ms),
                },
                // Nor does one that is gone. Ordering: read after the slots, as in `Region::confirm`.
                FindResult::Claim(..) | FindResult::Nothing => request.closes_ms(time) <= self.overflow.horizon_ms(),
            }
    }

    /// Charges the spill counter; `None` if the key got a counter of its own in between.
    fn acquire_overflow<const PLAIN: bool>(
        &self,
        counter: Counter,
        request: AcquireRequest,
        window: OpenWindow,
        time: Time<'_, PLAIN>,
    ) -> Option<CounterResult> {
        // Ordering: raised before the charge, so that who sees the charge looks for it. What is
        // owed may keep a counter open for long.
        let end_ms = if request.kind == WindowKind::Plain { request.end_ms } else { END_MAX_MS };
        self.overflow_end().fetch_max(end_ms, Ordering::AcqRel);
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
        // Ordering: the charge stands before, the look-up after; whoever confirms a claim of this
        // key has the same two the other way round, so one of the two sees the other.
        fence(Ordering::SeqCst);
        loop {
            match self.counters.find(counter.key) {
                FindResult::Nothing => break,
                FindResult::Claim(index, claim) if self.counters.revoke(index, claim) => {}
                FindResult::Claim(..) => {}
                FindResult::Counter(..) => {
                    self.refund(receipt, request, time);
                    return None;
                }
            }
        }
        // Ordering: read after the slots, as in `Region::confirm`: if the key had a counter for the window
        // asked for and lost it to another key, its slot was read in its new hands, and the horizon with it.
        if window.closes_ms <= self.counters.horizon_ms() {
            self.refund(receipt, request, time);
            return Some(CounterResult::Late);
        }
        // Ordering: relaxed; a statistic.
        self.overflow_charges_total.fetch_add(1, Ordering::Relaxed);
        Some(outcome)
    }

    /// Lowers what a counter of its own has used and owes to `most`; `false` if it is no more than that.
    pub fn cap_usage(&self, counter: Counter, request: AcquireRequest, most: u64, time: Time<'_>) -> bool {
        while let FindResult::Counter(index, word) = self.counters.find(counter.key) {
            let Some(less) = capped(word, request, most, time) else { return false };
            if self.counters.swap(index, word, less).is_ok() {
                return true;
            }
        }
        false
    }

    /// Forgets what a counter of its own has used and owes; returns what it was, [`Word::EMPTY`] if there is
    /// none. A spill counter is not one key's to forget.
    pub fn reset(&self, counter: Counter, request: AcquireRequest, time: Time<'_>) -> CounterWord {
        self.reset_announced(counter, request, time, |_word| ())
    }

    /// As [`Table::forget`]. `announce` is told what is about to be forgotten: the last word it is told is the one that was
    /// forgotten, so that no thread sees the counter empty before the announcement.
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

    /// Takes a charge back, in the window in which it was made and in no other. `ask` is what was
    /// asked; the time may have gone on since.
    /// `false` if nothing could be given back.
    pub fn refund<const PLAIN: bool>(&self, receipt: Receipt, request: AcquireRequest, time: Time<'_, PLAIN>) -> bool {
        self.refund_with_rest(receipt, false, request, time) != RefundResult::Nothing
    }

    /// As [`Table::refund`], for a charge or the rest of one. Tells what is left of it.
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
