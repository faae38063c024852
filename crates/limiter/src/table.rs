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
use crate::bucket::{Found, InsertResult, Key, MARKS, OpenWindow, Region};
use crate::counter::{
    AcquireRequest, CounterWord, END_MAX_MS, Taken, Usage, WindowKind, amended, charged, forgotten, given_up,
    held_open, position, positions, usage, usage_of_many,
};
use crate::memory::{Cells, LINE_BYTES, Memory};
use crate::window_sequence::Time;

/// Slots per bucket: two cache lines of four words.
pub const BUCKET_SLOTS: usize = 8;
/// Into how many spill counters the keys of one layer fall when the table is full.
const SPILL_GROUPS: u64 = 64;

/// Which counter: its key, and the layer it belongs to, which names its spill counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counter {
    pub key: Key,
    /// Evenly spread bits, equal for all keys of one layer of one rule.
    pub layer: u64,
}

impl Counter {
    /// The spill counter for this key's group of its layer.
    fn spill(self) -> Key {
        let group = self.key.tag % SPILL_GROUPS;
        let bits = self.layer.wrapping_add(group).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        Key::new(bits ^ (bits >> 32), self.layer.rotate_left(32) ^ (group << 58))
    }
}

/// Where a charge went, so that it can be taken back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Receipt {
    slot: Slot,
    taken: Taken,
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

    fn is_spilled(self) -> bool {
        (self.0.get() - 1) & 1 == 1
    }
}

impl Receipt {
    /// End of the window in which it was charged, Unix milliseconds.
    pub fn end_ms(self) -> u64 {
        self.taken.end_ms
    }

    /// What was taken from a counter at `slot`, which then had the given use.
    pub fn at(slot: Slot, counter: Counter, after: Usage, tokens: u64) -> Receipt {
        let tag = if slot.is_spilled() { counter.spill().tag } else { counter.key.tag };
        Receipt { slot, taken: Taken { tag, end_ms: after.end_ms, used: after.used, tokens } }
    }

    pub fn slot(self) -> Slot {
        self.slot
    }

    pub fn tokens(self) -> u64 {
        self.taken.tokens
    }

    /// Where it stands among all charges: those of one counter are neighbours, later ones behind earlier ones.
    pub fn position(self, is_rest: bool, ask: AcquireRequest, time: Time<'_>) -> (Slot, u128) {
        (self.slot, position(self.taken, is_rest, ask, time))
    }

    /// The positions of all charges of the same counter.
    pub fn positions(self) -> RangeInclusive<(Slot, u128)> {
        let (first, last) = positions(self.taken.tag).into_inner();
        (self.slot, first)..=(self.slot, last)
    }

    /// The last `tokens` of it, or all.
    pub fn last(self, tokens: u32) -> Receipt {
        Receipt { taken: Taken { tokens: self.taken.tokens.min(u64::from(tokens)), ..self.taken }, ..self }
    }
}

/// What came of giving a charge back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GivenUp {
    All,
    /// The rest can be given back after the charges behind it.
    AllBut(Receipt),
    /// The window is over, or there are charges behind it.
    Nothing,
}

/// What a look found: a counter, and what it was.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    index: usize,
    word: CounterWord,
}

/// The answer to one charge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Charged {
    Paid(Receipt, Usage),
    Full(Usage),
    /// The window asked for is over; ask again with a time not before [`Table::horizon_ms`].
    Late,
}

/// What a table knows beside its counters, Unix milliseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Watermarks {
    /// The latest end of a window whose counter's slot was given away; of the spill counters, too.
    pub horizon_ms: u64,
    pub spill_horizon_ms: u64,
    /// The latest end of a window that has spill counters.
    pub spill_end_ms: u64,
}

/// How many counters there are, and for how many more there is room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TableStats {
    pub live: usize,
    pub free: usize,
}

pub struct Table<const W: usize = BUCKET_SLOTS> {
    pub(super) own: Region<W>,
    spill: Region<W>,
    marks: Cells<AtomicU64>,
    spilled_total: AtomicU64,
    spill_refused_total: AtomicU64,
}

impl Table {
    /// What a table of this capacity takes.
    pub fn plan(capacity: usize) -> Plan {
        let own = (2 * capacity).div_ceil(BUCKET_SLOTS).max(1);
        Plan { own, spill: (own / 64).max(128), slots: BUCKET_SLOTS }
    }

    /// A table of this capacity on the heap, if there is room for it: twice as many slots as
    /// counters. Used to capacity by keys with two layers each, which share a bucket, it then finds
    /// both buckets of a key full about twice in 100,000 times.
    pub fn with_capacity(capacity: usize) -> Option<Table> {
        let plan = Table::plan(capacity);
        Table::within(plan, &Memory::heap(plan.bytes())?, 0)
    }
}

/// How many buckets a table has, and so how its memory is laid out: the marks of the table and of both
/// regions, then the counters, then the spill counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Plan {
    pub own: usize,
    pub spill: usize,
    /// Of a bucket.
    pub slots: usize,
}

impl Plan {
    const MARKS_BYTES: usize = MARKS * size_of::<u64>();
    const WORDS_AT: usize = LINE_BYTES + 2 * Plan::MARKS_BYTES;

    fn words_bytes(self, buckets: usize) -> usize {
        buckets.saturating_mul(self.slots * size_of::<u128>())
    }

    pub fn bytes(self) -> usize {
        Plan::WORDS_AT.saturating_add(self.words_bytes(self.own)).saturating_add(self.words_bytes(self.spill))
    }
}

impl<const W: usize> Table<W> {
    /// A table laid out in a block of memory from byte `at` on, a multiple of [`LINE_BYTES`]; `None` if it does
    /// not fit there. Zeros are an empty table.
    pub fn within(plan: Plan, memory: &Arc<Memory>, at: usize) -> Option<Table<W>> {
        let (own, spill) = (plan.own.max(1), plan.spill.max(1));
        let words_at = at.checked_add(Plan::WORDS_AT)?;
        let marks = |nth: usize| memory.numbers(at + LINE_BYTES + nth * Plan::MARKS_BYTES, MARKS);
        let own_words = memory.words(words_at, own.checked_mul(W)?)?;
        let spill_words = memory.words(words_at.checked_add(plan.words_bytes(own))?, spill.checked_mul(W)?)?;
        Some(Table {
            own: Region::new(own_words, marks(0)?),
            spill: Region::new(spill_words, marks(1)?),
            marks: memory.numbers(at, 1)?,
            spilled_total: AtomicU64::new(0),
            spill_refused_total: AtomicU64::new(0),
        })
    }

    /// A table of so many buckets on the heap.
    pub fn with_buckets(own: usize, spill: usize) -> Option<Table<W>> {
        let plan = Plan { own: own.max(1), spill: spill.max(1), slots: W };
        Table::within(plan, &Memory::heap(plan.bytes())?, 0)
    }

    /// The latest end of a window that has spill counters, Unix milliseconds.
    #[inline(always)]
    fn spill_end(&self) -> &AtomicU64 {
        &self.marks[0]
    }

    /// Time that has certainly passed, Unix milliseconds: windows that end by then are closed.
    pub fn horizon_ms(&self) -> u64 {
        self.own.horizon_ms().max(self.spill.horizon_ms())
    }

    /// What stands beside the counters.
    pub fn marks(&self) -> Watermarks {
        Watermarks {
            horizon_ms: self.own.horizon_ms(),
            spill_horizon_ms: self.spill.horizon_ms(),
            // Ordering: acquire, as in `spills`.
            spill_end_ms: self.spill_end().load(Ordering::Acquire),
        }
    }

    /// All counters whose window is open, each with its place. They change while this goes on.
    pub fn open(&self, now_ms: u64) -> impl Iterator<Item = (usize, CounterWord)> + '_ {
        self.own.words().chain(self.spill.words()).enumerate().filter(move |(_, word)| word.is_live(now_ms))
    }

    /// Puts back what `marks` told, before anything is charged.
    pub fn restore_marks(&self, marks: Watermarks) {
        self.own.raise_horizon(marks.horizon_ms);
        self.spill.raise_horizon(marks.spill_horizon_ms);
        // Ordering: whoever charges was started later.
        self.spill_end().fetch_max(marks.spill_end_ms, Ordering::AcqRel);
    }

    /// Puts back a counter that `open` told of a table of the same plan, before anything is charged; `false` if
    /// there is no such place.
    pub fn restore(&self, place: usize, word: CounterWord) -> bool {
        match place.checked_sub(self.own.slots()) {
            None => self.own.restore(place, word),
            Some(place) => self.spill.restore(place, word),
        }
    }

    /// Charges that went to a spill counter since the start.
    pub fn spilled_total(&self) -> u64 {
        // Ordering: relaxed; a statistic.
        self.spilled_total.load(Ordering::Relaxed)
    }

    /// Counts the slots with an open window; takes a pass over the table.
    pub fn census(&self, now_ms: u64) -> TableStats {
        self.census_of(iter::once(0..usize::MAX), now_ms)
    }

    /// Counts the slots with an open window in the parts of the table's memory that were `written`: ranges of bytes from
    /// its start on. Slots in other parts are free.
    pub fn census_of(&self, written: impl Iterator<Item = Range<usize>>, now_ms: u64) -> TableStats {
        let slot = |byte: usize| byte.saturating_sub(Plan::WORDS_AT) / size_of::<u128>();
        let words = written.flat_map(|bytes| self.own.words_in(slot(bytes.start)..slot(bytes.end)));
        let live = words.filter(|word| word.is_live(now_ms)).count();
        // Half of the slots are there to be found free.
        TableStats { live, free: (self.own.slots() / 2).saturating_sub(live) }
    }

    /// What is used of a counter, and nothing else: no slot is taken.
    #[inline]
    pub fn look<const PLAIN: bool>(
        &self,
        counter: Counter,
        ask: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> (Usage, Option<Seen>) {
        if let Found::Counter(index, word) = self.own.find(counter.key) {
            return (usage(word, ask, time), Some(Seen { index, word }));
        }
        if ask.course_in(time) == WindowKind::Leased {
            return (ask.nothing_left(), None);
        }
        if self.spills(ask, time)
            && let Found::Counter(_, word) = self.spill.find(counter.spill())
        {
            let usage = usage_of_many(word, ask, time);
            if !usage.admits(ask) {
                self.count_spill_refusal();
            }
            return (usage, None);
        }
        (Usage { used: 0, end_ms: ask.end_ms }, None)
    }

    /// Refusals by a spill counter, or for want of one, since the start.
    pub fn spill_refused_total(&self) -> u64 {
        // Ordering: relaxed; a statistic.
        self.spill_refused_total.load(Ordering::Relaxed)
    }

    fn count_spill_refusal(&self) {
        // Ordering: relaxed; a statistic.
        self.spill_refused_total.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether any spill counter may be open in the window of `ask`.
    fn spills<const PLAIN: bool>(&self, ask: AcquireRequest, time: Time<'_, PLAIN>) -> bool {
        // Ordering: acquire; between a charge that spills and a claim, the fences in `pay_spill`
        // and `Region::confirm` decide.
        self.spill_end().load(Ordering::Acquire) >= ask.closes_ms(time)
    }

    /// Charges the counter that [`Table::look`] has `seen`, if it is still as it was then; `before` is
    /// the use that was told of it, and has room.
    // Apart from `charge`, so that the commonest of charges keeps what it knows in registers.
    #[inline(always)]
    pub fn charge_seen<const PLAIN: bool>(
        &self,
        seen: Seen,
        before: Usage,
        ask: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> Option<(Slot, Usage)> {
        let (next, after) = charged(seen.word.tag(), before, ask, time)?;
        self.own.swap(seen.index, seen.word, next).ok().map(|()| (Slot::new(false, seen.index), after))
    }

    /// Charges `ask` to a counter, or says that it does not fit. `hint` is what
    /// [`Table::look`] found, and may be stale.
    pub fn charge<const PLAIN: bool>(
        &self,
        counter: Counter,
        ask: AcquireRequest,
        time: Time<'_, PLAIN>,
        hint: Option<Seen>,
    ) -> Charged {
        if ask.course_in(time) == WindowKind::Leased {
            return self.spend(counter, ask, time);
        }
        if let Some(Seen { index, word }) = hint
            && let Some(answer) = self.pay(&self.own, index, word, counter.key, ask, time)
        {
            return answer;
        }
        let window = OpenWindow { end_ms: ask.end_ms, closes_ms: ask.closes_ms(time) };
        loop {
            match self.own.seat(counter.key, window, time.now_ms, || self.spill_is_used(counter, ask, time)) {
                InsertResult::At(index, word) => {
                    if let Some(answer) = self.pay(&self.own, index, word, counter.key, ask, time) {
                        return answer;
                    }
                }
                InsertResult::Late => return Charged::Late,
                InsertResult::Full => {
                    if let Some(answer) = self.pay_spill(counter, ask, window, time) {
                        return answer;
                    }
                }
            }
        }
    }

    /// Charges a purse, if there is one: what nobody fetched is not there to be spent.
    fn spend<const PLAIN: bool>(&self, counter: Counter, ask: AcquireRequest, time: Time<'_, PLAIN>) -> Charged {
        loop {
            match self.own.find(counter.key) {
                Found::Counter(index, word) if word.is_live(time.now_ms) => {
                    if let Some(answer) = self.pay(&self.own, index, word, counter.key, ask, time) {
                        return answer;
                    }
                }
                Found::Counter(..) | Found::Claim(..) | Found::Nothing => return Charged::Full(ask.nothing_left()),
            }
        }
    }

    /// The compare-and-swap loop around [`charged`]; `None` if the slot is no longer the key's.
    fn pay<const PLAIN: bool>(
        &self,
        region: &Region<W>,
        index: usize,
        mut word: CounterWord,
        key: Key,
        ask: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> Option<Charged> {
        let spilled = std::ptr::eq(region, &self.spill);
        while word.tag() == key.tag && !word.is_claim() {
            let before = if spilled { usage_of_many(word, ask, time) } else { usage(word, ask, time) };
            let from = if spilled { held_open(before, ask, time) } else { before };
            let Some((next, after)) = charged(word.tag(), from, ask, time) else {
                return Some(Charged::Full(before));
            };
            match region.swap(index, word, next) {
                Ok(()) => {
                    let tokens = after.used - before.used;
                    let taken = Taken { tag: key.tag, end_ms: after.end_ms, used: after.used, tokens };
                    return Some(Charged::Paid(Receipt { slot: Slot::new(spilled, index), taken }, after));
                }
                Err(changed) => word = changed,
            }
        }
        None
    }

    /// Whether the key may have been counted in its spill counter, in the window of `ask` or a later one.
    fn spill_is_used<const PLAIN: bool>(&self, counter: Counter, ask: AcquireRequest, time: Time<'_, PLAIN>) -> bool {
        self.spills(ask, time)
            && match self.spill.find(counter.spill()) {
                // A counter that rolled on says nothing about the window before, whatever it stands at.
                Found::Counter(_, word) => match ask.course_in(time) {
                    WindowKind::Plain | WindowKind::Grid(_) => {
                        word.end_ms() > ask.end_ms || (word.end_ms() == ask.end_ms && word.count() > 0)
                    }
                    WindowKind::Floating(_) | WindowKind::Leased => word.is_live(time.now_ms),
                },
                // Nor does one that is gone. Ordering: read after the slots, as in `Region::confirm`.
                Found::Claim(..) | Found::Nothing => ask.closes_ms(time) <= self.spill.horizon_ms(),
            }
    }

    /// Charges the spill counter; `None` if the key got a counter of its own in between.
    fn pay_spill<const PLAIN: bool>(
        &self,
        counter: Counter,
        ask: AcquireRequest,
        window: OpenWindow,
        time: Time<'_, PLAIN>,
    ) -> Option<Charged> {
        // Ordering: raised before the charge, so that who sees the charge looks for it. What is
        // owed may keep a counter open for long.
        let end_ms = if ask.course == WindowKind::Plain { ask.end_ms } else { END_MAX_MS };
        self.spill_end().fetch_max(end_ms, Ordering::AcqRel);
        let key = counter.spill();
        let answer = loop {
            match self.spill.seat(key, window, time.now_ms, || false) {
                InsertResult::At(index, word) => {
                    if let Some(answer) = self.pay(&self.spill, index, word, key, ask, time) {
                        break answer;
                    }
                }
                InsertResult::Late => return Some(Charged::Late),
                InsertResult::Full => break Charged::Full(Usage { used: ask.ceiling, end_ms: ask.end_ms }),
            }
        };
        let Charged::Paid(paid, _) = answer else {
            self.count_spill_refusal();
            return Some(answer);
        };
        // Ordering: the charge stands before, the look-up after; whoever confirms a claim of this
        // key has the same two the other way round, so one of the two sees the other.
        fence(Ordering::SeqCst);
        loop {
            match self.own.find(counter.key) {
                Found::Nothing => break,
                Found::Claim(index, claim) if self.own.revoke(index, claim) => {}
                Found::Claim(..) => {}
                Found::Counter(..) => {
                    self.refund(paid, ask, time);
                    return None;
                }
            }
        }
        // Ordering: read after the slots, as in `Region::confirm`: if the key had a counter for the window
        // asked for and lost it to another key, its slot was read in its new hands, and the horizon with it.
        if window.closes_ms <= self.own.horizon_ms() {
            self.refund(paid, ask, time);
            return Some(Charged::Late);
        }
        // Ordering: relaxed; a statistic.
        self.spilled_total.fetch_add(1, Ordering::Relaxed);
        Some(answer)
    }

    /// Lowers what a counter of its own has used and owes to `most`; `false` if it is no more than that.
    pub fn amend(&self, counter: Counter, ask: AcquireRequest, most: u64, time: Time<'_>) -> bool {
        while let Found::Counter(index, word) = self.own.find(counter.key) {
            let Some(less) = amended(word, ask, most, time) else { return false };
            if self.own.swap(index, word, less).is_ok() {
                return true;
            }
        }
        false
    }

    /// Forgets what a counter of its own has used and owes; returns what it was, [`Word::EMPTY`] if there is
    /// none. A spill counter is not one key's to forget.
    pub fn forget(&self, counter: Counter, ask: AcquireRequest, time: Time<'_>) -> CounterWord {
        self.forget_after(counter, ask, time, |_word| ())
    }

    /// As [`Table::forget`]. `announce` is told what is about to be forgotten: the last word it is told is the one that was
    /// forgotten, so that no thread sees the counter empty before the announcement.
    pub fn forget_after(
        &self,
        counter: Counter,
        ask: AcquireRequest,
        time: Time<'_>,
        mut announce: impl FnMut(CounterWord),
    ) -> CounterWord {
        while let Found::Counter(index, word) = self.own.find(counter.key) {
            let unused = forgotten(word, ask, time);
            if word != unused {
                announce(word);
            }
            if word == unused || self.own.swap(index, word, unused).is_ok() {
                return word;
            }
        }
        CounterWord::EMPTY
    }

    /// Takes a charge back, in the window in which it was made and in no other. `ask` is what was
    /// asked; the time may have gone on since.
    /// `false` if nothing could be given back.
    pub fn refund<const PLAIN: bool>(&self, paid: Receipt, ask: AcquireRequest, time: Time<'_, PLAIN>) -> bool {
        self.give_up(paid, false, ask, time) != GivenUp::Nothing
    }

    /// As [`Table::refund`], for a charge or the rest of one. Tells what is left of it.
    pub fn give_up<const PLAIN: bool>(
        &self,
        paid: Receipt,
        is_rest: bool,
        ask: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> GivenUp {
        let region = if paid.slot.is_spilled() { &self.spill } else { &self.own };
        let mut word = region.load(paid.slot.index());
        while let Some((less, rest)) = given_up(word, paid.taken, is_rest, ask, time) {
            match region.swap(paid.slot.index(), word, less) {
                Ok(()) => return rest.map_or(GivenUp::All, |taken| GivenUp::AllBut(Receipt { taken, ..paid })),
                Err(changed) => word = changed,
            }
        }
        GivenUp::Nothing
    }
}
