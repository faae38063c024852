//! A fixed array of slots in which every key has at most one counter.
//!
//! A key may be in one of two buckets of `W` slots, so a look-up reads a bounded number of slots, however full the
//! array is and whichever keys clients choose. Slots contain no pointers, so there is nothing to reclaim: the next key
//! takes a slot whose window has ended. Time and hashes are arguments.
//!
//! How a slot changes (`K`, `L` are keys; every change is one compare-and-swap):
//!
//! | from | to | by |
//! | --- | --- | --- |
//! | empty, or ended counter of `L` | claim of `K` | a thread that found no counter of `K` |
//! | claim of `K` | counter of `K`, nothing used | a thread that then saw no other counter of `K` |
//! | claim of `K` | empty | a thread that saw another counter of `K`, or for which new counters are blocked |
//! | counter of `K` | counter of `K` | a charge, a refund, a later window |
//!
//! Why a key never has two counters: a thread that confirms a claim has searched all slots of the key after the claim
//! became visible. Of two claims, at least one is therefore seen by the thread that confirms the other (a fence
//! separates reading the claim from the search). That thread removes the claim or gives up its own. A removed claim
//! cannot be confirmed, because its nonce makes it a different word from every later claim.

use std::ops::Range;

use crate::atomics::{AtomicU64, AtomicU128, Ordering, fence};
use crate::counter::{CounterWord, TAG_BITS};
use crate::memory::{AtomicSlice, LINE_BYTES};

/// How often a thread tries to insert a key before it treats the array as full. Every failed try means that another
/// thread made progress in the same two buckets.
const INSERT_TRIES: u32 = 64;

/// A hashed key: the buckets in which its counter is, and the tag that distinguishes it there.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Key {
    /// Uniformly distributed bits that select the two buckets.
    pub bucket_hash: u64,
    /// [`TAG_BITS`] bits, independent of `bucket_hash`, not 0, that distinguish the keys of a bucket.
    pub tag: u64,
}

impl Key {
    /// A key from two hashes of 64 bits: one selects the buckets, and the upper [`TAG_BITS`] bits of the other become
    /// the tag.
    pub fn new(bucket_hash: u64, tag_source: u64) -> Key {
        Key { bucket_hash, tag: (tag_source >> (64 - TAG_BITS)).max(1) }
    }
}

/// The result of a search for a key.
pub enum FindResult {
    /// The counter of the key: its index, and the word read there.
    Counter(usize, CounterWord),
    /// No counter, but a claim of a thread that is about to create one: its index, and the word.
    Claim(usize, CounterWord),
    /// Neither a counter nor a claim.
    Nothing,
}

/// The window for which a counter is created.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpenWindow {
    /// The end of the window, Unix milliseconds.
    pub end_ms: u64,
    /// The time from which the window must not be opened, because its slots may have been reused, Unix milliseconds.
    pub closes_ms: u64,
}

/// The result of an insertion.
pub enum InsertResult {
    /// The counter of the key: its index, and its word.
    At(usize, CounterWord),
    /// All slots hold open windows of other keys, or new counters of the key are blocked.
    Full,
    /// The requested window has ended: its slots may have been reused.
    Late,
}

/// The result of an attempt to confirm a claim.
enum Confirm {
    /// The slots changed: search again.
    Retry,
    Blocked,
    Late,
}

/// An array of buckets with `W` slots each. `W` is a power of two.
pub struct SlotArray<const W: usize> {
    /// Buckets of `W` words. A bucket of eight is two adjacent cache lines.
    words: AtomicSlice<AtomicU128>,
    watermarks: AtomicSlice<AtomicU64>,
}

/// Numbers that an array needs in addition to its slots, each in its own cache lines.
pub const WATERMARKS: usize = 2 * WATERMARK_STRIDE;
const WATERMARK_STRIDE: usize = LINE_BYTES / size_of::<u64>();

impl<const W: usize> SlotArray<W> {
    /// An array in these words, which are one or more whole buckets, with [`WATERMARKS`] numbers.
    pub fn new(words: AtomicSlice<AtomicU128>, watermarks: AtomicSlice<AtomicU64>) -> SlotArray<W> {
        const { assert!(W.is_power_of_two(), "slots of a bucket are selected by bits") }
        SlotArray { words, watermarks }
    }

    /// The number of slots.
    pub fn slots(&self) -> usize {
        self.words.len()
    }

    #[inline(always)]
    fn buckets(&self) -> &[[AtomicU128; W]] {
        self.words.as_chunks().0
    }

    /// The latest end of a window whose slot was reused for another key, Unix milliseconds.
    #[inline(always)]
    fn horizon(&self) -> &AtomicU64 {
        &self.watermarks[0]
    }

    /// The number of claims so far.
    #[inline(always)]
    fn nonce(&self) -> &AtomicU64 {
        &self.watermarks[WATERMARK_STRIDE]
    }

    /// Every word. Words may change during the iteration.
    pub fn words(&self) -> impl Iterator<Item = CounterWord> + '_ {
        self.words_in(0..self.words.len())
    }

    /// The words of these slots; slots out of bounds are skipped.
    pub fn words_in(&self, slots: Range<usize>) -> impl Iterator<Item = CounterWord> + '_ {
        let end = slots.end.min(self.words.len());
        // Ordering: relaxed; statistics need no order and are not exact.
        self.words[slots.start.min(end)..end].iter().map(|slot| CounterWord::from_bits(slot.load(Ordering::Relaxed)))
    }

    /// The watermark of time: counters of windows that ended by then must not be opened.
    pub fn horizon_ms(&self) -> u64 {
        // Ordering: acquire pairs with the release in `insert`; see there.
        self.horizon().load(Ordering::Acquire)
    }

    /// Raises the watermark of time.
    pub fn raise_horizon(&self, horizon_ms: u64) {
        // Ordering: acquire and release, see `insert`.
        self.horizon().fetch_max(horizon_ms, Ordering::AcqRel);
    }

    /// Writes a word that was read at this index before; `false` if the index is out of bounds.
    pub fn restore(&self, index: usize, word: CounterWord) -> bool {
        let slot = self.words.get(index);
        // Ordering: release, as in `swap`.
        slot.is_some_and(|slot| {
            slot.store(word.bits(), Ordering::Release);
            true
        })
    }

    /// The two buckets of a key; the same bucket twice if the array has only one.
    fn buckets_of(&self, key: Key) -> [usize; 2] {
        let first = self.first_bucket(key);
        [first, self.second_bucket(key, first)]
    }

    #[inline]
    fn first_bucket(&self, key: Key) -> usize {
        self.first_bucket_of(key.bucket_hash)
    }

    #[inline(always)]
    fn first_bucket_of(&self, bucket_hash: u64) -> usize {
        scale_to(bucket_hash, self.buckets().len() as u64) as usize
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

    /// Selects the half of a bucket that is searched first. All counters of a key use the same half, so that they tend
    /// to share a cache line. Slot `i` is visited in step `i ^ slot_mask`.
    #[inline]
    fn slot_mask(key: Key) -> usize {
        Self::slot_mask_of(key.bucket_hash)
    }

    #[inline(always)]
    fn slot_mask_of(bucket_hash: u64) -> usize {
        if bucket_hash & 1 == 1 { W / 2 } else { 0 }
    }

    /// The indices of all slots of a key, in the order of the search.
    fn slots_of(&self, key: Key) -> impl Iterator<Item = usize> {
        let [first, second] = self.buckets_of(key);
        let buckets = if first == second { 1 } else { 2 };
        let slots = move |bucket| (0..W).map(move |i| bucket * W + (i ^ Self::slot_mask(key)));
        [first, second].into_iter().take(buckets).flat_map(slots)
    }

    /// Prefetches the half of a bucket in which the search for a key with these bits begins.
    #[inline(always)]
    pub fn prefetch(&self, bucket_hash: u64) {
        self.words.prefetch(self.first_bucket_of(bucket_hash) * W + Self::slot_mask_of(bucket_hash));
    }

    fn slot(&self, index: usize) -> &AtomicU128 {
        &self.words[index]
    }

    /// The word at `index`.
    pub fn load(&self, index: usize) -> CounterWord {
        // Ordering: acquire, so that a thread that sees a reused slot also sees the horizon that was raised before the
        // reuse.
        CounterWord::from_bits(self.slot(index).load(Ordering::Acquire))
    }

    /// Replaces the word at `index`.
    ///
    /// # Errors
    ///
    /// The word that is there instead of `from`.
    pub fn swap(&self, index: usize, from: CounterWord, to: CounterWord) -> Result<(), CounterWord> {
        // Ordering: release publishes the horizon raised before; acquire on success keeps later operations behind the
        // swap, and on failure acts as a `load`.
        self.slot(index)
            .compare_exchange(from.bits(), to.bits(), Ordering::AcqRel, Ordering::Acquire)
            .map(drop)
            .map_err(CounterWord::from_bits)
    }

    /// The counter of `key`, or else the first claim of one.
    // Inlined: a result of this size would be returned through memory and read back in other pieces than it was written
    // in, which stalls every decision.
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

    /// The counters of keys that are in the same two buckets, found in one search.
    #[inline(always)]
    pub fn find_each<const N: usize>(&self, keys: [Key; N]) -> [Option<CounterWord>; N] {
        debug_assert!(keys.iter().all(|key| key.bucket_hash == keys[0].bucket_hash));
        let mut found = [None; N];
        for bucket in self.buckets_of(keys[0]) {
            for slot in &self.buckets()[bucket] {
                // Ordering: as in `load`.
                let word = CounterWord::from_bits(slot.load(Ordering::Acquire));
                if word == CounterWord::EMPTY {
                    continue;
                }
                for (found, key) in found.iter_mut().zip(keys) {
                    if word.tag() == key.tag && !word.is_claim() {
                        *found = Some(word);
                    }
                }
            }
            // A key that is found has no other counter. The second bucket is in other cache lines.
            if found.iter().all(Option::is_some) {
                break;
            }
        }
        found
    }

    /// Finds or creates the counter of `key`.
    ///
    /// `is_blocked` is called after the claim is visible to all threads and before the claim is confirmed.
    pub fn insert(&self, key: Key, window: OpenWindow, now_ms: u64, is_blocked: impl Fn() -> bool) -> InsertResult {
        let mut mine = None;
        for _ in 0..INSERT_TRIES {
            match self.find(key) {
                FindResult::Counter(index, word) => {
                    // Another claim of the key was faster: this thread's own claim would occupy a slot without use.
                    if let Some((claimed, claim)) = mine.filter(|&(claimed, _)| claimed != index) {
                        self.revoke(claimed, claim);
                    }
                    return InsertResult::At(index, word);
                }
                FindResult::Claim(index, claim) => match self.confirm(key, index, claim, window, &is_blocked) {
                    Confirm::Retry => {}
                    Confirm::Blocked => return InsertResult::Full,
                    Confirm::Late => return InsertResult::Late,
                },
                FindResult::Nothing => {
                    let Some((index, old)) = self.free_slot(key, now_ms) else {
                        // The last free slot may just have become the counter of this key.
                        if matches!(self.find(key), FindResult::Nothing) {
                            return InsertResult::Full;
                        }
                        continue;
                    };
                    // Ordering: raised before the slot is reused, and released by that swap: a slow thread that no
                    // longer finds the counter that was here finds, in `confirm`, that its window has ended.
                    if old.end_ms() > self.horizon_ms() {
                        self.raise_horizon(old.end_ms());
                    }
                    // Ordering: relaxed; the number only has to differ from recent ones.
                    let nonce = self.nonce().fetch_add(1, Ordering::Relaxed) as u32;
                    let claim = CounterWord::claim(key.tag, nonce);
                    // If this thread lost the race, it searches again; the claim is confirmed in the next iteration.
                    mine = self.swap(index, old, claim).is_ok().then_some((index, claim));
                }
            }
        }
        InsertResult::Full
    }

    /// Turns the claim at `index` into a counter with nothing used, unless the key has another counter or an earlier
    /// claim, the window has ended, or new counters are blocked.
    fn confirm(
        &self,
        key: Key,
        index: usize,
        claim: CounterWord,
        window: OpenWindow,
        is_blocked: &impl Fn() -> bool,
    ) -> Confirm {
        // Ordering: the claim was read (acquire) before, and everything below is read after. Of two threads that
        // confirm two claims of one key, the one whose fence comes second sees the claim of the other. The same holds
        // between the charge that blocks new counters and the check for it below.
        fence(Ordering::SeqCst);
        let mut is_behind = false;
        for other in self.slots_of(key) {
            if other == index {
                is_behind = true;
                continue;
            }
            let word = self.load(other);
            if word.tag() != key.tag {
                continue;
            }
            // Of two claims, the first in the order of the search stays: so one of two threads makes progress.
            if !word.is_claim() || !is_behind {
                self.revoke(index, claim);
                return Confirm::Retry;
            }
            if !self.revoke(other, word) {
                return Confirm::Retry;
            }
        }
        // Ordering: read after the slots. If the key had a counter for this window and its slot was reused, the slot
        // was read in its new state, and the horizon with it.
        if window.closes_ms <= self.horizon_ms() {
            self.revoke(index, claim);
            return Confirm::Late;
        }
        if is_blocked() {
            self.revoke(index, claim);
            return Confirm::Blocked;
        }
        let _ = self.swap(index, claim, CounterWord::new(key.tag, window.end_ms, 0));
        Confirm::Retry
    }

    /// Removes a claim that must not become a counter; `false` if the claim has changed.
    pub fn revoke(&self, index: usize, claim: CounterWord) -> bool {
        self.swap(index, claim, CounterWord::EMPTY).is_ok()
    }

    /// A slot without an open window: in the first bucket while that is at most half full, otherwise in the emptier one
    /// of the two. Claims of other keys are taken only as a last resort.
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

/// Maps 64 uniformly distributed bits uniformly to `0..n` (Lemire, "Fast Random Integer Generation in an Interval",
/// 2019).
fn scale_to(bits: u64, n: u64) -> u64 {
    ((u128::from(bits) * u128::from(n)) >> 64) as u64
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use crate::memory::Memory;

    #[test]
    fn of_two_claims_the_first_becomes_the_counter() {
        let memory = Memory::zeroed(1024).unwrap();
        let slots = SlotArray::<1>::new(memory.words(0, 2).unwrap(), memory.numbers(512, WATERMARKS).unwrap());
        let key = Key { bucket_hash: 0, tag: 7 };
        (0..2).for_each(|index| assert!(slots.restore(index, CounterWord::claim(key.tag, index as u32))));
        let window = OpenWindow { end_ms: 100, closes_ms: 100 };
        let counter = CounterWord::new(key.tag, 100, 0);
        assert!(matches!(slots.insert(key, window, 50, || false), InsertResult::At(0, word) if word == counter));
        assert_eq!(slots.words().collect::<Vec<_>>(), [counter, CounterWord::EMPTY]);
    }

    /// The counters of three keys, each in any of the slots of both buckets, beside other counters and a claim.
    #[test]
    fn one_search_finds_what_a_search_for_each_key_finds() {
        let memory = Memory::zeroed(1024).unwrap();
        let keys = [7, 8, 9].map(|tag| Key { bucket_hash: 1, tag });
        for slot in 0..16 {
            let slots = SlotArray::<4>::new(memory.words(0, 16).unwrap(), memory.numbers(512, WATERMARKS).unwrap());
            for index in 0..16 {
                let word = match (index + slot) % 16 {
                    0 => CounterWord::new(7, 100, 1),
                    5 => CounterWord::new(8, 100, 2),
                    6 => CounterWord::claim(9, 1),
                    10 => CounterWord::new(9, 100, 3),
                    other => CounterWord::new(100 + other as u64, 100, 4),
                };
                assert!(slots.restore(index, word));
            }
            let each = keys.map(|key| match slots.find(key) {
                FindResult::Counter(_, word) => Some(word),
                FindResult::Claim(..) | FindResult::Nothing => None,
            });
            assert_eq!(slots.find_each(keys), each, "{slot}");
        }
    }

    /// A claim is confirmed only if no slot of the key that is searched before has another.
    #[test]
    fn claims_are_confirmed_in_the_order_of_the_search() {
        let memory = Memory::zeroed(1024).unwrap();
        let slots = SlotArray::<4>::new(memory.words(0, 16).unwrap(), memory.numbers(512, WATERMARKS).unwrap());
        for bucket in 0..4 {
            for half in 0..2 {
                let key = Key { bucket_hash: bucket << 62 | half, tag: 7 };
                (0..16).for_each(|index| _ = slots.restore(index, CounterWord::claim(key.tag, 1)));
                let mut searched = Vec::new();
                while let FindResult::Claim(index, claim) = slots.find(key) {
                    searched.push(index);
                    slots.swap(index, claim, CounterWord::EMPTY).unwrap();
                }
                assert_eq!(slots.slots_of(key).collect::<Vec<_>>(), searched);
                let first = bucket as usize * 4;
                assert_eq!(searched[..4].iter().max(), Some(&(first + 3)));
                assert_eq!(searched.len(), 8);
            }
        }
    }
}
