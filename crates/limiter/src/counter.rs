//! A counter as one 128-bit word. `window_kind` computes what the word means.
//!
//! One word holds the whole state of a counter, so one compare-and-swap changes all of it. A count never belongs to one
//! window and its end to another, and a killed process never leaves a half-written counter.
//!
//! | bits | field | meaning |
//! | --- | --- | --- |
//! | 127..74 | `tag` (54) | identifies the key of the counter; 0: an empty slot |
//! | 73..32 | `end_ms` (42) | end of the counted window, Unix milliseconds (until the year 2109); 0: a claim |
//! | 31..0 | `count` (32) | tokens used in that window; in a claim, a nonce |
//!
//! The word stores the end of the window, not its number. So a counter can be recognized as expired without knowing its
//! rule.

use crate::window::{END_BITS, END_MAX_MS};

pub(super) const COUNT_BITS: u32 = 32;
/// Bits of a tag: the bits of the word that the end of the window and the count leave.
pub const TAG_BITS: u32 = 128 - COUNT_BITS - END_BITS;

/// The state of one counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CounterWord(u128);

impl CounterWord {
    /// A slot that was never used.
    pub const EMPTY: CounterWord = CounterWord(0);

    /// A counter of `tag` with `count` tokens used in the window that ends at `end_ms`. `tag` must fit [`TAG_BITS`] and
    /// not be 0; `end_ms` must fit [`END_MAX_MS`].
    pub fn new(tag: u64, end_ms: u64, count: u32) -> CounterWord {
        debug_assert!(tag != 0 && tag >> TAG_BITS == 0 && end_ms <= END_MAX_MS);
        CounterWord(u128::from(tag) << (COUNT_BITS + END_BITS) | u128::from(end_ms) << COUNT_BITS | u128::from(count))
    }

    /// A claim: a slot reserved for `tag` in which nothing can be counted yet. The nonce makes two claims of one key in
    /// one slot different words, so that a late confirmation cannot confirm the wrong claim.
    pub fn claim(tag: u64, nonce: u32) -> CounterWord {
        CounterWord::new(tag, 0, nonce)
    }

    /// The word with these bits.
    pub fn from_bits(bits: u128) -> CounterWord {
        CounterWord(bits)
    }

    /// The bits of the word.
    pub fn bits(self) -> u128 {
        self.0
    }

    /// The tag of the key; 0 in an empty slot.
    pub fn tag(self) -> u64 {
        (self.0 >> (COUNT_BITS + END_BITS)) as u64
    }

    /// The end of the counted window, Unix milliseconds; 0 in a claim.
    pub fn end_ms(self) -> u64 {
        (self.0 >> COUNT_BITS) as u64 & END_MAX_MS
    }

    /// Tokens used in the window; in a claim, the nonce.
    pub fn count(self) -> u32 {
        self.0 as u32
    }

    /// Whether the word reserves a slot and counts nothing yet.
    pub fn is_claim(self) -> bool {
        self.tag() != 0 && self.end_ms() == 0
    }

    /// Whether the counted window is still open, so that the slot must not be reused for another key.
    pub fn is_live(self, now_ms: u64) -> bool {
        self.end_ms() > now_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_keep_their_extreme_values() {
        for tag in [1, (1 << TAG_BITS) - 1] {
            for end_ms in [0, 1, END_MAX_MS] {
                for count in [0, 1, u32::MAX] {
                    let word = CounterWord::new(tag, end_ms, count);
                    assert_eq!((word.tag(), word.end_ms(), word.count()), (tag, end_ms, count));
                }
            }
        }
    }
}
