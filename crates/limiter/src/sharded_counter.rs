//! One hot counter divided into shards, so that workers do not contend for one word.
//!
//! Each shard has a part of the limit; the parts add up to the limit. A request is charged in the shard of its own
//! worker. Missing tokens are taken from the other shards before the request is refused, so the sum admitted is exactly
//! the limit. Only plain windows can be sharded.

use crate::bucket::Key;
use crate::table::{Counter, CounterResult, Receipt, Table};
use crate::window::Time;
use crate::window_kind::{AcquireRequest, Usage, WindowKind};

/// The most shards of a counter.
pub const SHARDS_MAX: u32 = 1024;

/// A charge with its receipt. A sharded counter has one for each charged shard, a sliding counter one for the segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShardReceipt {
    /// The charged request.
    pub request: AcquireRequest,
    /// The receipt for a refund.
    pub receipt: Receipt,
    /// The layer of the counter, see [`Counter::layer`].
    pub layer: u64,
}

/// The part of `whole` that one of several shards has. The parts add up to the whole.
pub fn part_of_shard(whole: u64, shards: u32, shard: u32) -> u64 {
    let (shards, shard) = (u64::from(shards), u64::from(shard));
    whole / shards + u64::from(shard < whole % shards)
}

/// How a counter is sharded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sharding {
    /// The number of shards; 1: not sharded.
    pub shards: u32,
    /// The shard that is charged first.
    pub first_shard: u32,
}

impl Sharding {
    /// Not sharded.
    pub const NONE: Sharding = Sharding { shards: 1, first_shard: 0 };

    /// All shards, the first one first.
    fn shards_in_order(self) -> impl Iterator<Item = u32> {
        (0..self.shards).map(move |i| (self.first_shard + i) % self.shards)
    }

    /// The counters of all shards.
    pub fn counters(self, whole: Counter) -> impl Iterator<Item = Counter> {
        (0..self.shards).map(move |shard| Sharding::shard_counter(shard, whole))
    }

    /// The request for one shard, with the limit of its part.
    fn shard_request(self, shard: u32, request: AcquireRequest) -> AcquireRequest {
        debug_assert!(request.kind == WindowKind::Plain, "only plain windows are sharded");
        let ceiling = part_of_shard(u64::from(request.limit), self.shards, shard);
        AcquireRequest { limit: ceiling as u32, ceiling, floor: 0, cost: 0, ..request }
    }

    /// The counter of a shard. The first shard uses the whole's own counter.
    fn shard_counter(shard: u32, whole: Counter) -> Counter {
        let bits = u64::from(shard).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let key = Key::new(whole.key.bucket_hash.wrapping_add(bits), whole.key.tag << 10 ^ bits << 10);
        let key = if shard == 0 { whole.key } else { key };
        Counter { key, layer: whole.layer ^ bits }
    }

    /// The usage of all shards together, the end of their window, and whether one shard has used more than its part.
    /// That happens after the limit was lowered: the other shards have that much less to give.
    pub fn peek<const W: usize, const PLAIN: bool>(
        self,
        table: &Table<W>,
        whole: Counter,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> (Usage, bool) {
        let mut sum = Usage { used: 0, end_ms: request.end_ms };
        let mut is_over_part = false;
        for shard in self.shards_in_order() {
            let shard_request = self.shard_request(shard, request);
            let (usage, _) = table.peek(Sharding::shard_counter(shard, whole), shard_request, time);
            is_over_part |= usage.used > shard_request.ceiling;
            sum.used += usage.used;
            sum.end_ms = sum.end_ms.max(usage.end_ms);
        }
        (sum, is_over_part)
    }

    /// Charges the shards, the own shard first, until the cost is taken. `shard_receipts` receives each charge, even if
    /// they are not enough.
    pub fn acquire<const W: usize, const PLAIN: bool>(
        self,
        table: &Table<W>,
        whole: Counter,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
        shard_receipts: &mut Vec<ShardReceipt>,
    ) -> ShardsResult {
        let mut left = request.cost;
        for shard in self.shards_in_order() {
            let counter = Sharding::shard_counter(shard, whole);
            let mut shard_request = self.shard_request(shard, request);
            loop {
                let (usage, hint) = table.peek(counter, shard_request, time);
                let shard_left = shard_request.ceiling.saturating_sub(usage.used);
                shard_request.cost = left.min(u32::try_from(shard_left).unwrap_or(u32::MAX));
                if shard_request.cost == 0 {
                    break;
                }
                match table.acquire(counter, shard_request, time, hint) {
                    CounterResult::Acquired(receipt, _) => {
                        shard_receipts.push(ShardReceipt { request: shard_request, receipt, layer: whole.layer });
                        left -= shard_request.cost;
                        break;
                    }
                    // Other threads took tokens from this shard meanwhile: peek again.
                    CounterResult::Full(usage) if usage.used < shard_request.ceiling => shard_request.cost = 0,
                    CounterResult::Full(_) => break,
                    CounterResult::Late => return ShardsResult::Late,
                }
            }
            if left == 0 {
                return ShardsResult::Acquired;
            }
        }
        ShardsResult::TooFew
    }
}

/// The result of charging the shards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShardsResult {
    /// The whole cost was taken.
    Acquired,
    /// The shards have too few tokens left.
    TooFew,
    /// The requested window has ended.
    Late,
}
