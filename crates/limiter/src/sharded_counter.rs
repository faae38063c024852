//! One hot counter divided into shards, so that workers do not contend for one word.
//!
//! Each shard has a part of the limit; the parts add up to the limit. A request is charged in the shard of its own
//! worker. Missing tokens are taken from the other shards before the request is refused, so the sum admitted is exactly
//! the limit.
//!
//! Where tokens roll over or are reserved, each shard is an account of its own, with its part of the limit, of the capacity
//! and of the reserve, so that the shards admit no more than one counter. A shard at its capacity gains nothing when a
//! window begins, even if another shard has used tokens. Requests therefore charge the shard that has most tokens left: then
//! a shard gains nothing only if each of the others lacks at most one request, and all of them together hold less than one
//! counter would by at most one request for each shard.

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

    /// The request for one shard, with its parts of the limit and of the tokens that may be used or owed.
    fn shard_request(self, shard: u32, request: AcquireRequest) -> AcquireRequest {
        debug_assert!(
            matches!(request.kind, WindowKind::Plain | WindowKind::Accumulating),
            "other kinds are not sharded"
        );
        let limit = part_of_shard(u64::from(request.limit), self.shards, shard);
        debug_assert!(limit > 0 || request.kind == WindowKind::Plain, "each shard of an account gains tokens");
        // The tokens of whole windows are divided as those of one, so that the part of a shard is still its part when
        // windows have passed.
        let part = |tokens: u64| {
            let (windows, rest) = (tokens / u64::from(request.limit), tokens % u64::from(request.limit));
            windows * limit + part_of_shard(rest, self.shards, shard)
        };
        let (ceiling, floor) = (part(request.ceiling), part(request.floor));
        AcquireRequest { limit: limit as u32, ceiling, floor, cost: 0, ..request }
    }

    /// The counter of a shard. The first shard uses the whole's own counter.
    fn shard_counter(shard: u32, whole: Counter) -> Counter {
        let bits = u64::from(shard).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let key = Key::new(whole.key.bucket_hash.wrapping_add(bits), whole.key.tag << 10 ^ bits << 10);
        let key = if shard == 0 { whole.key } else { key };
        Counter { key, layer: whole.layer ^ bits }
    }

    /// The usage of all shards together.
    pub fn peek<const W: usize, const PLAIN: bool>(
        self,
        table: &Table<W>,
        whole: Counter,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> ShardedUsage {
        let mut sum = Usage { used: 0, end_ms: request.end_ms };
        let (mut is_over_part, mut fullest, mut fullest_shard) = (false, None, self.first_shard);
        for shard in self.shards_in_order() {
            let shard_request = self.shard_request(shard, request);
            let (usage, _) = table.peek(Sharding::shard_counter(shard, whole), shard_request, time);
            is_over_part |= usage.used > shard_request.ceiling;
            sum.used += usage.used;
            sum.end_ms = sum.end_ms.max(usage.end_ms);
            // The shard that windows fill up first: its next tokens are the first that would be lost.
            let (used, limit) = (u128::from(usage.used), u128::from(shard_request.limit));
            if fullest.is_none_or(|(fewest, of)| used * of < fewest * limit) {
                (fullest, fullest_shard) = (Some((used, limit)), shard);
            }
        }
        ShardedUsage { usage: sum, is_over_part, fullest_shard }
    }

    /// How many windows must begin until `request` fits, if there are no other requests; 0: it fits now. Each shard gains
    /// its own part of each window. The cost must not exceed the ceiling.
    #[cold]
    pub fn windows_until_fit<const W: usize, const PLAIN: bool>(
        self,
        table: &Table<W>,
        whole: Counter,
        request: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> u64 {
        let shards: Vec<(u64, u64)> = (0..self.shards)
            .map(|shard| {
                let shard_request = self.shard_request(shard, request);
                let (usage, _) = table.peek(Sharding::shard_counter(shard, whole), shard_request, time);
                (usage.used, u64::from(shard_request.limit.max(1)))
            })
            .collect();
        let fits_after = |windows: u64| {
            let used = shards.iter().map(|(used, limit)| used.saturating_sub(windows.saturating_mul(*limit)));
            used.fold(u64::from(request.cost), u64::saturating_add) <= request.ceiling
        };
        let (mut least, mut most) = (0, shards.iter().map(|(used, limit)| used.div_ceil(*limit)).max().unwrap_or(0));
        while least < most {
            let middle = least + (most - least) / 2;
            if fits_after(middle) { most = middle } else { least = middle + 1 }
        }
        least
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
                let shard_left = shard_request.ceiling.saturating_sub(usage.used.max(shard_request.floor));
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

/// The usage of all shards of a counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShardedUsage {
    /// Their usage together, and the end of their window.
    pub usage: Usage,
    /// Whether one shard has used more than its part. That happens after the limit was lowered, and where tokens of later
    /// windows were taken: the other shards have that much less to give.
    pub is_over_part: bool,
    /// The shard that needs the fewest windows to gain all its tokens, of equal ones the own shard first. Requests begin with
    /// it, so that all shards need about as many, and none loses tokens while others lack some.
    pub fullest_shard: u32,
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
