//! A counter whose limit holds in every interval of one period, wherever the interval begins.
//!
//! Time is divided into [`Segments`] of an eighth of the period. A plain counter counts the tokens of each segment, until
//! the last of them is one period old. A request is charged in the current segment, and admitted if the nine segments
//! that still count hold at most the limit. So a token counts for up to an eighth of a period too long, never too short.
//! The counter of a segment is used again nine segments later.
//!
//! Threads that charge different segments change different words. So each charge is followed by another sum: of two
//! threads that take the same tokens at least one sees both charges, and withdraws its own. A thread that finds a later
//! segment in use counts in that one, because the later thread no longer sees the oldest segment.

use std::array;

use crate::atomics::{Ordering, fence};
use crate::bucket::Key;
use crate::sharded_counter::ShardReceipt;
use crate::table::{Counter, CounterResult, Table};
use crate::window::{SEGMENTS_PER_PERIOD, Segments, Time};
use crate::window_kind::{AcquireRequest, Usage, WindowKind, usage};

/// Segments that count at one time: those of one period, and the current one.
const OPEN_SEGMENTS: u64 = SEGMENTS_PER_PERIOD + 1;
/// Segments whose counters are in the same two buckets, and so in few cache lines. All of them would overfill a bucket. In models,
/// which have two segments, they do not.
const SEGMENTS_PER_BUCKET: usize = if OPEN_SEGMENTS < 3 { OPEN_SEGMENTS as usize } else { 3 };
const _: () = assert!(OPEN_SEGMENTS.is_multiple_of(SEGMENTS_PER_BUCKET as u64), "each bucket has as many segments");
/// How often a charge is tried again after other threads changed the counter.
const TRIES: u32 = 64;

/// A sliding counter, and the request for tokens of it.
#[derive(Clone, Copy)]
pub struct SlidingCounter {
    whole: Counter,
    /// Its end is that of the current segment.
    request: AcquireRequest,
    segments: Segments,
}

/// The tokens used in all segments that count.
struct Sum {
    /// The latest segment in use, or the current one.
    latest: u64,
    used: u64,
    /// Tokens by segment, the oldest first, ending with `latest`.
    by_segment: [u64; OPEN_SEGMENTS as usize],
}

impl SlidingCounter {
    /// The counter for a request with the windows of a sliding layer.
    pub fn new<const PLAIN: bool>(whole: Counter, request: AcquireRequest, time: Time<'_, PLAIN>) -> SlidingCounter {
        debug_assert!(request.kind == WindowKind::Sliding, "other counters are one word");
        SlidingCounter { whole, request, segments: Segments { period_ms: request.windows_in(time).typical_ms() } }
    }

    /// The usage, and the end of the segment in which the request counts. The end of the usage is the time at which the
    /// request fits; if it fits now, the time at which the next token expires.
    pub fn peek<const W: usize, const PLAIN: bool>(self, table: &Table<W>, time: Time<'_, PLAIN>) -> (Usage, u64) {
        let sum = self.sum(table, self.current(), time);
        (self.usage(&sum, u64::from(self.request.cost)), self.segments.end_ms(sum.latest))
    }

    /// Charges the request after a peek found that it fits. The receipt is also added to `shard_receipts`.
    pub fn acquire<const W: usize, const PLAIN: bool>(
        self,
        table: &Table<W>,
        time: Time<'_, PLAIN>,
        shard_receipts: &mut Vec<ShardReceipt>,
    ) -> CounterResult {
        let mut current = self.current();
        for _ in 0..TRIES {
            let request = self.segment_request(current, self.request.cost);
            let receipt = match table.acquire(self.segment_counter(current), request, time, None) {
                CounterResult::Acquired(receipt, _) => receipt,
                // The overflow counter of a full table.
                CounterResult::Full(_) => return CounterResult::Full(self.peek(table, time).0),
                CounterResult::Late => return CounterResult::Late,
            };
            // Ordering: the charge comes before, the sum after, for every thread.
            fence(Ordering::SeqCst);
            let sum = self.sum(table, current, time);
            // Ordering: read after the counters: if the slot of one of them was reused, the horizon is late.
            let is_late = table.horizon_ms() >= self.segments.end_ms(current);
            if !is_late && sum.latest == current && sum.used.max(self.request.floor) <= self.request.ceiling {
                shard_receipts.push(ShardReceipt { request, receipt, layer: self.whole.layer });
                return CounterResult::Acquired(receipt, self.usage(&sum, 0));
            }
            table.refund(receipt, request, time);
            if is_late {
                return CounterResult::Late;
            }
            // Ordering: the refund comes before, the sum after: the last thread to withdraw finds the tokens of the others.
            fence(Ordering::SeqCst);
            let sum = self.sum(table, sum.latest, time);
            if sum.used.max(self.request.floor) + u64::from(self.request.cost) > self.request.ceiling {
                return CounterResult::Full(self.usage(&sum, u64::from(self.request.cost)));
            }
            current = sum.latest;
        }
        CounterResult::Full(self.peek(table, time).0)
    }

    /// Resets the usage in all segments, and returns it. Before the counter of a segment becomes empty, `announce` is called
    /// with its tokens, as far as they are not announced yet.
    pub fn reset<const W: usize>(self, table: &Table<W>, time: Time<'_>, mut announce: impl FnMut(u64)) -> u64 {
        let reset_segment = |segment| {
            let (request, mut announced) = (self.segment_request(segment, 0), 0);
            let word = table.reset_announced(self.segment_counter(segment), request, time, |word| {
                let used = usage(word, request, time).used;
                announce(used.saturating_sub(announced));
                announced = used.max(announced);
            });
            usage(word, request, time).used
        };
        self.open_segments(self.current()).map(reset_segment).sum()
    }

    fn current(self) -> u64 {
        self.segments.number_at(self.request.end_ms.saturating_sub(1))
    }

    /// The segments that count while `latest` is current.
    fn open_segments(self, latest: u64) -> impl Iterator<Item = u64> {
        latest.saturating_sub(OPEN_SEGMENTS - 1)..=latest
    }

    fn segment_counter(self, segment: u64) -> Counter {
        self.counter_at(segment % OPEN_SEGMENTS)
    }

    /// The counter of the segments with this remainder of [`OPEN_SEGMENTS`].
    #[inline(always)]
    fn counter_at(self, position: u64) -> Counter {
        let bits = (position + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let bucket_bits = (position / SEGMENTS_PER_BUCKET as u64).wrapping_mul(0xD1B5_4A32_D192_ED03);
        let bucket_hash = self.whole.key.bucket_hash.wrapping_add(bucket_bits);
        Counter { key: Key::new(bucket_hash, (self.whole.key.tag ^ bits) << 10), layer: self.whole.layer ^ bits }
    }

    /// A request for tokens of one segment. The limit holds for all of them together.
    fn segment_request(self, segment: u64, cost: u32) -> AcquireRequest {
        AcquireRequest {
            end_ms: self.segments.expires_ms(segment),
            ceiling: u64::from(u32::MAX),
            floor: 0,
            cost,
            kind: WindowKind::Plain,
            ..self.request
        }
    }

    /// The tokens used while `latest` or a later segment is current.
    fn sum<const W: usize, const PLAIN: bool>(self, table: &Table<W>, latest: u64, time: Time<'_, PLAIN>) -> Sum {
        let mut sum = Sum { latest, used: 0, by_segment: [0; OPEN_SEGMENTS as usize] };
        let oldest = latest.saturating_sub(OPEN_SEGMENTS - 1);
        // Ordering: read before the searches. Of two threads that charge, the sum of the one whose fence comes second sees the charge
        // of the other, also in an overflow counter.
        let may_overflow = table.may_overflow_from(self.segments.expires_ms(oldest));
        for first in (0..OPEN_SEGMENTS).step_by(SEGMENTS_PER_BUCKET) {
            let keys: [_; SEGMENTS_PER_BUCKET] = array::from_fn(|nth| self.counter_at(first + nth as u64).key);
            for (position, word) in (first..).zip(&table.counters.find_each(keys)) {
                if word.is_none() && !may_overflow {
                    continue;
                }
                let segment = oldest + (position + OPEN_SEGMENTS - oldest % OPEN_SEGMENTS) % OPEN_SEGMENTS;
                if segment > latest {
                    // Before the first segments of 1970 there are none.
                    continue;
                }
                let request = self.segment_request(segment, 0);
                let usage = match *word {
                    Some(word) => usage(word, request, time),
                    None => table.usage_without_counter(self.counter_at(position), request, time),
                };
                if usage.end_ms > request.end_ms {
                    return self.sum(table, self.segments.expiring_at(usage.end_ms).max(latest + 1), time);
                }
                sum.used += usage.used;
                sum.by_segment[(segment + OPEN_SEGMENTS - 1 - latest) as usize] = usage.used;
            }
        }
        sum
    }

    /// The usage of a sum, for a request that takes `cost` more tokens.
    fn usage(self, sum: &Sum, cost: u64) -> Usage {
        let excess = (sum.used + cost).saturating_sub(self.request.ceiling).max(1);
        let mut expired = 0;
        let frees_enough = |tokens: &u64| {
            expired += tokens;
            expired >= excess
        };
        let position = sum.by_segment.iter().position(frees_enough).unwrap_or(OPEN_SEGMENTS as usize - 1);
        let segment = (sum.latest + position as u64).saturating_sub(OPEN_SEGMENTS - 1);
        Usage { used: sum.used, end_ms: self.segments.expires_ms(segment) }
    }
}
