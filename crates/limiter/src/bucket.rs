//! A fixed array of slots in which every key has at most one counter.
//!
//! A key may lie in one of two buckets of `W` slots, so a look-up touches a bounded number of
//! slots however full the region is and whoever chose the keys. Nothing is ever linked to a slot,
//! so nothing has to be reclaimed: a slot whose window has ended is simply taken by the next key.
//! This room neither reads the clock nor hashes: time and hashes are handed in.
//!
//! How a slot changes hands (`K`, `L` are keys; every arrow is one compare-and-swap):
//!
//! | from | to | by |
//! | --- | --- | --- |
//! | empty, or ended counter of `L` | claim of `K` | a thread that found no counter of `K` |
//! | claim of `K` | counter of `K`, nothing used | any thread that saw no other counter of `K` afterwards |
//! | claim of `K` | empty | a thread that did see one, or a veto |
//! | counter of `K` | counter of `K` | a charge, a refund, a later window |
//!
//! Why there is never a second counter of one key: whoever confirms a claim has looked through all
//! the slots of the key after the claim was visible. Of two claims at least one is therefore seen
//! by the other's confirmer (a fence stands between seeing the claim and looking), who removes it
//! or stands back; a removed claim can not be confirmed any more, because the nonce in it makes it
//! a different word from any later claim.

use std::ops::Range;

use crate::atomics::{AtomicU64, AtomicU128, Ordering, fence};
use crate::counter::{CounterWord, TAG_BITS};
use crate::memory::{AtomicSlice, LINE_BYTES};

/// How often a thread tries to seat a key before it gives up and treats the region as full.
/// Every failed try means that another thread moved on in the same two buckets.
const INSERT_TRIES: u32 = 64;

/// Where a counter lives and whose it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Key {
    /// Evenly spread bits that choose the two buckets.
    pub bucket_hash: u64,
    /// [`TAG_BITS`] bits, independent of `place`, not 0, that tell keys of one bucket apart.
    pub tag: u64,
}

impl Key {
    /// A key from 64 bits of `place` and 64 of which the upper [`TAG_BITS`] become the tag.
    pub fn new(place: u64, tag_source: u64) -> Key {
        Key { bucket_hash: place, tag: (tag_source >> (64 - TAG_BITS)).max(1) }
    }
}

/// What a search for a key came upon.
pub enum FindResult {
    /// Its counter, at this index, and the word read there.
    Counter(usize, CounterWord),
    /// No counter, but a claim of somebody who is about to make one.
    Claim(usize, CounterWord),
    Nothing,
}

/// The window for which a counter is made, Unix milliseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenWindow {
    /// Its end.
    pub end_ms: u64,
    /// From when on it must not be opened any more: slots of it may have been given away by then.
    pub closes_ms: u64,
}

/// Where a key got a counter.
pub enum InsertResult {
    At(usize, CounterWord),
    /// All slots are taken by open windows of other keys, or a veto stands against a new counter.
    Full,
    /// The window asked for has ended: slots of that window may have been given away already.
    Late,
}

/// What became of an attempt to confirm a claim.
enum Confirm {
    /// The slots changed, for better or worse: search again.
    Retry,
    Blocked,
    Late,
}

pub struct SlotArray<const W: usize> {
    /// In buckets of `W`; of eight, one is two neighbouring cache lines.
    words: AtomicSlice<AtomicU128>,
    watermarks: AtomicSlice<AtomicU64>,
}

/// Numbers that a region needs beside its slots, where each lies alone in its cache lines.
pub const WATERMARKS: usize = 2 * WATERMARK_STRIDE;
const WATERMARK_STRIDE: usize = LINE_BYTES / size_of::<u64>();

impl<const W: usize> SlotArray<W> {
    /// A region in these words, of which there are whole buckets and at least one, with [`MARKS`] numbers.
    pub fn new(words: AtomicSlice<AtomicU128>, marks: AtomicSlice<AtomicU64>) -> SlotArray<W> {
        const { assert!(W.is_power_of_two(), "slots are told apart by their bits") }
        SlotArray { words, watermarks: marks }
    }

    pub fn slots(&self) -> usize {
        self.words.len()
    }

    #[inline(always)]
    fn buckets(&self) -> &[[AtomicU128; W]] {
        self.words.as_chunks().0
    }

    /// The latest end of a window whose slot was given to another key, Unix milliseconds.
    #[inline(always)]
    fn horizon(&self) -> &AtomicU64 {
        &self.watermarks[0]
    }

    /// Counts claims.
    #[inline(always)]
    fn nonce(&self) -> &AtomicU64 {
        &self.watermarks[WATERMARK_STRIDE]
    }

    /// Every word, for a census. Words change while this goes on.
    pub fn words(&self) -> impl Iterator<Item = CounterWord> + '_ {
        self.words_in(0..self.words.len())
    }

    /// The words of these slots, as far as there are such.
    pub fn words_in(&self, slots: Range<usize>) -> impl Iterator<Item = CounterWord> + '_ {
        let end = slots.end.min(self.words.len());
        // Ordering: relaxed; a census orders nothing and is not exact.
        self.words[slots.start.min(end)..end].iter().map(|slot| CounterWord::from_bits(slot.load(Ordering::Relaxed)))
    }

    /// Time that has certainly passed: no counter of a window that ended by then may be opened.
    pub fn horizon_ms(&self) -> u64 {
        // Ordering: acquire pairs with the release in `seat`; see there.
        self.horizon().load(Ordering::Acquire)
    }

    /// Says that time has passed until then.
    pub fn raise_horizon(&self, horizon_ms: u64) {
        // Ordering: acquire and release, see `seat`.
        self.horizon().fetch_max(horizon_ms, Ordering::AcqRel);
    }

    /// Writes a word as it was once read there; `false` if there is no such slot.
    pub fn restore(&self, index: usize, word: CounterWord) -> bool {
        let slot = self.words.get(index);
        // Ordering: release, as in `swap`.
        slot.is_some_and(|slot| {
            slot.store(word.bits(), Ordering::Release);
            true
        })
    }

    /// The two buckets of a key; one and the same where the region has only one.
    fn buckets_of(&self, key: Key) -> [usize; 2] {
        let first = self.first_bucket(key);
        [first, self.second_bucket(key, first)]
    }

    #[inline]
    fn first_bucket(&self, key: Key) -> usize {
        scale_to(key.bucket_hash, self.buckets().len() as u64) as usize
    }

    #[inline]
    fn second_bucket(&self, key: Key, first: usize) -> usize {
        let n = self.buckets().len();
        if n == 1 {
            return first;
        }
        let step = 1 + scale_to(key.bucket_hash.wrapping_mul(0x9E37_79B9_7F4A_7C15), n as u64 - 1) as usize;
        let second = first + step;
        if second >= n { second - n } else { second }
    }

    /// The half of a bucket in which a key's slots are looked at first: all counters of a key agree
    /// on it, so that they tend to share a cache line. Slot `i` comes at turn `i ^ half`.
    #[inline]
    fn slot_mask(key: Key) -> usize {
        if key.bucket_hash & 1 == 1 { W / 2 } else { 0 }
    }

    /// The indices of all slots a key may lie in, in the order in which they are searched.
    fn slots_of(&self, key: Key) -> impl Iterator<Item = usize> {
        let [first, second] = self.buckets_of(key);
        let buckets = if first == second { 1 } else { 2 };
        let slots = move |bucket| (0..W).map(move |i| bucket * W + (i ^ Self::slot_mask(key)));
        [first, second].into_iter().take(buckets).flat_map(slots)
    }

    fn slot(&self, index: usize) -> &AtomicU128 {
        &self.words[index]
    }

    pub fn load(&self, index: usize) -> CounterWord {
        // Ordering: acquire, so that who sees a slot in new hands also sees the horizon that was
        // raised before it was handed over.
        CounterWord::from_bits(self.slot(index).load(Ordering::Acquire))
    }

    /// Swaps the word at `index`, or returns the word that stood in the way.
    pub fn swap(&self, index: usize, from: CounterWord, to: CounterWord) -> Result<(), CounterWord> {
        // Ordering: release publishes the horizon raised before; acquire on success keeps what
        // follows behind it, and on failure serves as a `load`.
        self.slot(index)
            .compare_exchange(from.bits(), to.bits(), Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
            .map_err(CounterWord::from_bits)
    }

    /// The counter of `key`; failing that, the first claim to one.
    // Inlined, because a result of this size goes through memory otherwise, and is read back in
    // other pieces than it was written in: a stall on every decision.
    #[inline(always)]
    pub fn find(&self, key: Key) -> FindResult {
        let mut claim = FindResult::Nothing;
        let mut bucket = self.first_bucket(key);
        for nth in 0..2 {
            for i in 0..W {
                let i = i ^ Self::slot_mask(key);
                // Ordering: as in `load`.
                let word = CounterWord::from_bits(self.buckets()[bucket][i].load(Ordering::Acquire));
                if word.tag() == key.tag {
                    if !word.is_claim() {
                        return FindResult::Counter(bucket * W + i, word);
                    }
                    if matches!(claim, FindResult::Nothing) {
                        claim = FindResult::Claim(bucket * W + i, word);
                    }
                }
            }
            if nth == 0 {
                bucket = self.second_bucket(key, bucket);
            }
        }
        claim
    }

    /// Finds or makes the counter of `key`.
    ///
    /// `vetoed` is asked after the claim is visible to everyone and before it is confirmed.
    pub fn insert(&self, key: Key, window: OpenWindow, now_ms: u64, vetoed: impl Fn() -> bool) -> InsertResult {
        let mut mine = None;
        for _ in 0..INSERT_TRIES {
            match self.find(key) {
                FindResult::Counter(index, word) => {
                    // Another claim of the key was faster: this thread's own would hold a slot for nobody.
                    if let Some((claimed, claim)) = mine.filter(|&(claimed, _)| claimed != index) {
                        self.revoke(claimed, claim);
                    }
                    return InsertResult::At(index, word);
                }
                FindResult::Claim(index, claim) => match self.confirm(key, index, claim, window, &vetoed) {
                    Confirm::Retry => {}
                    Confirm::Blocked => return InsertResult::Full,
                    Confirm::Late => return InsertResult::Late,
                },
                FindResult::Nothing => {
                    let Some((index, old)) = self.free_slot(key, now_ms) else {
                        // The last free slot may just have become this key's own counter.
                        if matches!(self.find(key), FindResult::Nothing) {
                            return InsertResult::Full;
                        }
                        continue;
                    };
                    // Ordering: raised before the slot changes hands, and released by that swap:
                    // a slow thread that no longer finds the counter that was here does find, in
                    // `confirm`, that its window is over.
                    if old.end_ms() > self.horizon_ms() {
                        self.raise_horizon(old.end_ms());
                    }
                    // Ordering: relaxed; the number only has to differ from recent ones.
                    let nonce = self.nonce().fetch_add(1, Ordering::Relaxed) as u32;
                    let claim = CounterWord::claim(key.tag, nonce);
                    // Whoever lost this race looks again; the claim is confirmed in the next turn.
                    mine = self.swap(index, old, claim).is_ok().then_some((index, claim));
                }
            }
        }
        InsertResult::Full
    }

    /// Turns the claim at `index` into a counter with nothing used, unless the key has another
    /// counter or an earlier claim, or the window is over, or it is vetoed.
    fn confirm(
        &self,
        key: Key,
        index: usize,
        claim: CounterWord,
        window: OpenWindow,
        vetoed: &impl Fn() -> bool,
    ) -> Confirm {
        // Ordering: the claim was read (acquire) before, everything below is read after; of two
        // threads that confirm two claims of one key, the one whose fence comes second sees the
        // claim of the other. The same holds between a veto's charge and this look at it.
        fence(Ordering::SeqCst);
        for (order, other) in self.slots_of(key).enumerate() {
            let word = self.load(other);
            if other == index || word.tag() != key.tag {
                continue;
            }
            let mine = self.slots_of(key).position(|place| place == index);
            if !word.is_claim() || Some(order) < mine {
                self.revoke(index, claim);
                return Confirm::Retry;
            }
            if !self.revoke(other, word) {
                return Confirm::Retry;
            }
        }
        // Ordering: read after the slots. If the key had a counter for this window and lost it to
        // another key, the slot it lay in was read in its new hands, and the horizon with it.
        if window.closes_ms <= self.horizon_ms() {
            self.revoke(index, claim);
            return Confirm::Late;
        }
        if vetoed() {
            self.revoke(index, claim);
            return Confirm::Blocked;
        }
        let _ = self.swap(index, claim, CounterWord::new(key.tag, window.end_ms, 0));
        Confirm::Retry
    }

    /// Removes a claim that must not become a counter; `false` if it already changed.
    pub fn revoke(&self, index: usize, claim: CounterWord) -> bool {
        self.swap(index, claim, CounterWord::EMPTY).is_ok()
    }

    /// A slot that no open window occupies: in the first bucket while that is at most half full,
    /// otherwise in the emptier of the two. Claims of others are taken only as a last resort.
    fn free_slot(&self, key: Key, now_ms: u64) -> Option<(usize, CounterWord)> {
        let mut best: Option<(usize, usize, CounterWord)> = None;
        let mut claim = None;
        for bucket in self.buckets_of(key) {
            let mut taken = 0;
            let mut free = None;
            for i in 0..W {
                let index = bucket * W + (i ^ Self::slot_mask(key));
                let word = self.load(index);
                if word.is_live(now_ms) {
                    taken += 1;
                } else if word.is_claim() {
                    taken += 1;
                    claim = claim.or(Some((index, word)));
                } else {
                    free = free.or(Some((index, word)));
                }
            }
            if let Some((index, word)) = free {
                if best.is_none_or(|(least, ..)| taken < least) {
                    best = Some((taken, index, word));
                }
                if taken <= W / 2 {
                    break;
                }
            }
        }
        best.map(|(_, index, word)| (index, word)).or(claim)
    }
}

/// Maps 64 evenly spread bits evenly to `0..n` (Lemire, "Fast Random Integer Generation in an
/// Interval", 2019).
fn scale_to(bits: u64, n: u64) -> u64 {
    ((u128::from(bits) * u128::from(n)) >> 64) as u64
}
