//! The atomics of loom, under the names of `atomics.rs`.
//!
//! Loom has no 128-bit atomic, so a word is packed into 64 bits without loss: tags are numbered in the order of their
//! first use. Models must therefore use small times; an assertion rejects others.

pub use loom::sync::atomic::{AtomicU64, Ordering, fence};
pub use loom::sync::{Mutex, MutexGuard};

/// All tags used so far. The number of a tag has no meaning, so the order does not matter.
static TAGS: std::sync::Mutex<Vec<u64>> = std::sync::Mutex::new(Vec::new());

const END: u64 = (1 << 16) - 1;

/// A 128-bit word in 64 bits: number of the tag 16, end 16, count 32.
pub struct AtomicU128(AtomicU64);

impl AtomicU128 {
    /// An atomic with this value.
    pub fn new(word: u128) -> AtomicU128 {
        AtomicU128(AtomicU64::new(squeeze(word)))
    }

    /// As in `portable_atomic`.
    pub fn load(&self, order: Ordering) -> u128 {
        stretch(self.0.load(order))
    }

    /// As in `portable_atomic`.
    pub fn store(&self, word: u128, order: Ordering) {
        self.0.store(squeeze(word), order);
    }

    /// As in `portable_atomic`.
    pub fn compare_exchange(&self, from: u128, to: u128, success: Ordering, failure: Ordering) -> Result<u128, u128> {
        self.0.compare_exchange(squeeze(from), squeeze(to), success, failure).map(stretch).map_err(stretch)
    }
}

fn squeeze(word: u128) -> u64 {
    let (tag, end, count) = ((word >> 74) as u64, (word >> 32) as u64 & ((1 << 42) - 1), word as u32);
    let small = number_of(tag) << 48 | (end & END) << 32 | u64::from(count);
    assert_eq!(stretch(small), word, "a model must use times under 65536 ms");
    small
}

fn stretch(small: u64) -> u128 {
    let (tag, end) = (tag_of(small >> 48), small >> 32 & END);
    u128::from(tag) << 74 | u128::from(end) << 32 | u128::from(small as u32)
}

/// The empty tag, 0, is number 0.
fn number_of(tag: u64) -> u64 {
    if tag == 0 {
        return 0;
    }
    let mut tags = TAGS.lock().expect("no thread panics while it holds the lock");
    let known = tags.iter().position(|other| *other == tag);
    let position = known.unwrap_or_else(|| {
        tags.push(tag);
        tags.len() - 1
    });
    position as u64 + 1
}

fn tag_of(number: u64) -> u64 {
    let tags = TAGS.lock().expect("no thread panics while it holds the lock");
    usize::try_from(number).ok().and_then(|number| number.checked_sub(1)).map_or(0, |position| tags[position])
}
