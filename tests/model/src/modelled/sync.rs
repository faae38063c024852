//! The door to atomics as the models see it: loom's, under the names of the room's own `sync.rs`.
//!
//! Loom has no atomic of 128 bits, so a word is packed into 64 without loss. A model therefore has
//! to use small tags and small times; one that does not is stopped by an assertion, never rounded.

pub use loom::sync::atomic::{AtomicU64, Ordering, fence};

/// Bits of the group that a spill counter's tag carries on top, and where they lie in a tag.
const GROUP_SHIFT: u32 = 48;
/// Bits that are left for the rest of the tag, and for the end of a window.
const TAG_LOW: u64 = (1 << 10) - 1;
const END: u64 = (1 << 16) - 1;

/// A word of 128 bits in 64: group 6, tag 10, end 16, count 32.
pub struct AtomicU128(AtomicU64);

impl AtomicU128 {
    pub fn new(word: u128) -> AtomicU128 {
        AtomicU128(AtomicU64::new(squeeze(word)))
    }

    pub fn load(&self, order: Ordering) -> u128 {
        stretch(self.0.load(order))
    }

    pub fn compare_exchange(&self, from: u128, to: u128, success: Ordering, failure: Ordering) -> Result<u128, u128> {
        self.0.compare_exchange(squeeze(from), squeeze(to), success, failure).map(stretch).map_err(stretch)
    }
}

fn squeeze(word: u128) -> u64 {
    let (tag, end, count) = ((word >> 74) as u64, (word >> 32) as u64 & ((1 << 42) - 1), word as u32);
    let small = (tag >> GROUP_SHIFT) << 58 | (tag & TAG_LOW) << 48 | (end & END) << 32 | u64::from(count);
    assert_eq!(stretch(small), word, "a model must use tags under 1024 and times under 65536 ms");
    small
}

fn stretch(small: u64) -> u128 {
    let (group, tag, end) = (small >> 58, small >> 48 & TAG_LOW, small >> 32 & END);
    u128::from(group << GROUP_SHIFT | tag) << 74 | u128::from(end) << 32 | u128::from(small as u32)
}
