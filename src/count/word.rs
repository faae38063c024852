//! A counter as one machine word, and the only arithmetic ever done on it.
//!
//! Everything here is a pure function of its arguments: this file never reads the clock, never
//! touches memory that is shared, and cannot fail. One word of 128 bits holds the whole state of
//! one counter, so one compare-and-swap changes all of it: there is no moment at which a count
//! belongs to one window and its expiry to another, and nothing a kill could leave half-written.
//!
//! | bits | field | meaning |
//! | --- | --- | --- |
//! | 127..74 | `tag` (54) | whose counter it is; 0: nobody's |
//! | 73..32 | `end_ms` (42) | end of the window counted, Unix milliseconds (until the year 2109); 0: a claim |
//! | 31..0 | `count` (32) | tokens used in that window; in a claim, a nonce |
//!
//! The end of the window is stored rather than its number, so that anyone can tell whether a
//! counter is over without knowing the rule it belongs to.

const COUNT_BITS: u32 = 32;
const END_BITS: u32 = 42;
/// Bits of a tag: what is left of the word beside the window's end and the count.
pub const TAG_BITS: u32 = 128 - COUNT_BITS - END_BITS;
/// The last millisecond that a word can name: 2109-05-15T07:35:11.103Z.
pub const END_MAX_MS: u64 = (1 << END_BITS) - 1;

/// The state of one counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Word(u128);

impl Word {
    /// A slot that nobody ever used.
    pub const EMPTY: Word = Word(0);

    /// `tag` must fit [`TAG_BITS`] and not be 0; `end_ms` must fit [`END_MAX_MS`].
    pub fn new(tag: u64, end_ms: u64, count: u32) -> Word {
        debug_assert!(tag != 0 && tag >> TAG_BITS == 0 && end_ms <= END_MAX_MS);
        Word(u128::from(tag) << (COUNT_BITS + END_BITS) | u128::from(end_ms) << COUNT_BITS | u128::from(count))
    }

    /// A reservation of a slot for `tag` that nothing may be counted in yet. The nonce makes two
    /// claims of one key in one slot different words, so that a late confirmation cannot hit the
    /// wrong one.
    pub fn claim(tag: u64, nonce: u32) -> Word {
        Word::new(tag, 0, nonce)
    }

    pub fn from_bits(bits: u128) -> Word {
        Word(bits)
    }

    pub fn bits(self) -> u128 {
        self.0
    }

    pub fn tag(self) -> u64 {
        (self.0 >> (COUNT_BITS + END_BITS)) as u64
    }

    pub fn end_ms(self) -> u64 {
        (self.0 >> COUNT_BITS) as u64 & END_MAX_MS
    }

    pub fn count(self) -> u32 {
        self.0 as u32
    }

    pub fn is_claim(self) -> bool {
        self.tag() != 0 && self.end_ms() == 0
    }

    /// Whether the window counted is still open, so that the slot may not be given to another key.
    pub fn is_live(self, now_ms: u64) -> bool {
        self.end_ms() > now_ms
    }
}

/// What a request asks of one counter: `cost` tokens out of `limit`, in the window ending at `end_ms`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ask {
    /// End of the window that is open at the time of the request, Unix milliseconds.
    pub end_ms: u64,
    /// Tokens granted per window.
    pub limit: u32,
    /// Tokens asked for; 0 asks nothing and is always admitted where the limit is not passed.
    pub cost: u32,
}

/// What a counter has to say: how much is used, and in the window ending when.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Use {
    pub used: u32,
    pub end_ms: u64,
}

impl Use {
    /// Whether `ask` still fits beside what is used.
    pub fn admits(self, ask: Ask) -> bool {
        u64::from(self.used) + u64::from(ask.cost) <= u64::from(ask.limit)
    }
}

/// What is used in the window that `ask` falls into.
///
/// A word of a later window than the one asked for belongs to a thread whose clock is ahead: the
/// request counts in that later window. Rolling the word back would hand out the later window twice.
pub fn usage(word: Word, ask: Ask) -> Use {
    if word.end_ms() >= ask.end_ms {
        Use { used: word.count(), end_ms: word.end_ms() }
    } else {
        Use { used: 0, end_ms: ask.end_ms }
    }
}

/// The word after `ask` was charged, or `None` if it does not fit. Words only ever roll forward.
pub fn charged(word: Word, ask: Ask) -> Option<Word> {
    let now = usage(word, ask);
    now.admits(ask).then(|| Word::new(word.tag(), now.end_ms, now.used + ask.cost))
}

/// The word after `cost` was given back to the window ending at `end_ms`, or `None` if the word
/// has moved on to another window, where nothing was taken.
pub fn refunded(word: Word, tag: u64, end_ms: u64, cost: u32) -> Option<Word> {
    (word.tag() == tag && word.end_ms() == end_ms).then(|| Word::new(tag, end_ms, word.count().saturating_sub(cost)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_come_back_at_their_extremes() {
        for tag in [1, (1 << TAG_BITS) - 1] {
            for end_ms in [0, 1, END_MAX_MS] {
                for count in [0, 1, u32::MAX] {
                    let word = Word::new(tag, end_ms, count);
                    assert_eq!((word.tag(), word.end_ms(), word.count()), (tag, end_ms, count));
                }
            }
        }
    }

    #[test]
    fn the_largest_limit_is_used_to_the_last_token() {
        let ask = Ask { end_ms: 60_000, limit: u32::MAX, cost: u32::MAX };
        let full = charged(Word::new(1, 60_000, 0), ask).expect("fits exactly");
        assert_eq!(full.count(), u32::MAX);
        assert_eq!(charged(full, Ask { cost: 1, ..ask }), None);
        assert!(charged(full, Ask { cost: 0, ..ask }).is_some());
    }

    #[test]
    fn a_new_window_starts_at_nothing_used() {
        let ask = Ask { end_ms: 120_000, limit: 5, cost: 1 };
        assert_eq!(charged(Word::new(1, 60_000, 5), ask), Some(Word::new(1, 120_000, 1)));
    }

    #[test]
    fn a_late_thread_counts_in_the_later_window() {
        let late = Ask { end_ms: 60_000, limit: 5, cost: 1 };
        assert_eq!(charged(Word::new(1, 120_000, 4), late), Some(Word::new(1, 120_000, 5)));
        assert_eq!(charged(Word::new(1, 120_000, 5), late), None);
    }

    #[test]
    fn a_refund_never_crosses_a_window() {
        let word = Word::new(1, 120_000, 3);
        assert_eq!(refunded(word, 1, 60_000, 1), None);
        assert_eq!(refunded(word, 2, 120_000, 1), None);
        assert_eq!(refunded(word, 1, 120_000, 1), Some(Word::new(1, 120_000, 2)));
    }

    #[test]
    fn a_limit_lowered_under_what_is_used_admits_nothing() {
        let ask = Ask { end_ms: 60_000, limit: 3, cost: 1 };
        assert_eq!(charged(Word::new(1, 60_000, 80), ask), None);
        assert_eq!(charged(Word::new(1, 60_000, 80), Ask { cost: 0, ..ask }), None);
    }
}
