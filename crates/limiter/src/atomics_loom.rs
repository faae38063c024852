//! The door to atomics as the models see it: loom's, under the names of the room's own `sync.rs`.
//!
//! Loom has no atomic of 128 bits, so a word is packed into 64 without loss: tags are numbered as they
//! come. A model therefore has to use small times; one that does not is stopped by an assertion, never
//! rounded.

use std::sync::Mutex;

pub use loom::sync::atomic::{AtomicU64, Ordering, fence};

/// The tags that were ever seen. A tag's position says nothing about it, so that it does not matter in
/// which order they came.
static TAGS: Mutex<Vec<u64>> = Mutex::new(Vec::new());

const END: u64 = (1 << 16) - 1;

/// A word of 128 bits in 64: number of the tag 16, end 16, count 32.
pub struct AtomicU128(AtomicU64);

impl AtomicU128 {
    pub fn new(word: u128) -> AtomicU128 {
        AtomicU128(AtomicU64::new(squeeze(word)))
    }

    pub fn load(&self, order: Ordering) -> u128 {
        stretch(self.0.load(order))
    }

    pub fn store(&self, word: u128, order: Ordering) {
        self.0.store(squeeze(word), order);
    }

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

/// Nobody's tag, 0, is number 0.
fn number_of(tag: u64) -> u64 {
    if tag == 0 {
        return 0;
    }
    let mut tags = TAGS.lock().expect("nobody panics while it is held");
    let known = tags.iter().position(|other| *other == tag);
    let position = known.unwrap_or_else(|| {
        tags.push(tag);
        tags.len() - 1
    });
    position as u64 + 1
}

fn tag_of(number: u64) -> u64 {
    let tags = TAGS.lock().expect("nobody panics while it is held");
    usize::try_from(number).ok().and_then(|number| number.checked_sub(1)).map_or(0, |position| tags[position])
}
