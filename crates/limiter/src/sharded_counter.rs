//! One hot counter split in several, so that the loops of a gateway do not wait for one word.
//!
//! Each shard has a part of the limit; the parts add up to it. A request is charged in the shard of
//! its own loop, and what that lacks is borrowed from the others before it is refused: the sum
//! admitted is the limit, not more and not less. Shards are for plain windows only.

use crate::bucket::Key;
use crate::counter::{AcquireRequest, Usage, WindowKind};
use crate::table::{Charged, Counter, Receipt, Table};
use crate::window_sequence::Time;

/// Into how many shards a counter may be split.
pub const SHARDS_MAX: u32 = 1024;

/// A charge that was made in one shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShardReceipt {
    pub ask: AcquireRequest,
    pub paid: Receipt,
}

/// What one of several shards has of a whole; the parts add up to it.
pub fn part(whole: u64, shards: u32, shard: u32) -> u64 {
    let (shards, shard) = (u64::from(shards), u64::from(shard));
    whole / shards + u64::from(shard < whole % shards)
}

/// How a counter is split.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Split {
    pub shards: u32,
    /// The shard that is asked first.
    pub own: u32,
}

impl Split {
    /// Not split at all.
    pub const WHOLE: Split = Split { shards: 1, own: 0 };

    /// All shards, the own one first.
    fn order(self) -> impl Iterator<Item = u32> {
        (0..self.shards).map(move |i| (self.own + i) % self.shards)
    }

    /// All counters, where the whole is `whole`.
    pub fn counters(self, whole: Counter) -> impl Iterator<Item = Counter> {
        (0..self.shards).map(move |shard| Split::counter(shard, whole))
    }

    /// What a shard grants of what is asked of all.
    fn part(self, shard: u32, ask: AcquireRequest) -> AcquireRequest {
        debug_assert!(ask.course != WindowKind::Leased, "a purse is not split");
        let ceiling = part(u64::from(ask.limit), self.shards, shard);
        AcquireRequest { limit: ceiling as u32, ceiling, floor: 0, course: WindowKind::Plain, cost: 0, ..ask }
    }

    /// The counter of a shard; that of the first is the whole's own.
    fn counter(shard: u32, whole: Counter) -> Counter {
        let bits = u64::from(shard).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let key = Key::new(whole.key.place.wrapping_add(bits), whole.key.tag << 10 ^ bits << 10);
        let key = if shard == 0 { whole.key } else { key };
        Counter { key, layer: whole.layer ^ bits }
    }

    /// What is used of all shards together, and when their window ends; and whether one is used beyond
    /// its part, as it may be where the limit was lowered: the others have that much less to give.
    pub fn look<const W: usize, const PLAIN: bool>(
        self,
        table: &Table<W>,
        whole: Counter,
        ask: AcquireRequest,
        time: Time<'_, PLAIN>,
    ) -> (Usage, bool) {
        let mut sum = Usage { used: 0, end_ms: ask.end_ms };
        let mut beyond = false;
        for shard in self.order() {
            let part = self.part(shard, ask);
            let (usage, _) = table.look(Split::counter(shard, whole), part, time);
            beyond |= usage.used > part.ceiling;
            sum.used += usage.used;
            sum.end_ms = sum.end_ms.max(usage.end_ms);
        }
        (sum, beyond)
    }

    /// Charges the shards, the own one first, until all of the cost is taken; `shares` receives what
    /// was charged where, even if it is not enough.
    pub fn charge<const W: usize, const PLAIN: bool>(
        self,
        table: &Table<W>,
        whole: Counter,
        ask: AcquireRequest,
        time: Time<'_, PLAIN>,
        shares: &mut Vec<ShardReceipt>,
    ) -> Taking {
        let mut left = ask.cost;
        for shard in self.order() {
            let counter = Split::counter(shard, whole);
            let mut part = self.part(shard, ask);
            loop {
                let (usage, hint) = table.look(counter, part, time);
                let room = part.ceiling.saturating_sub(usage.used);
                part.cost = left.min(u32::try_from(room).unwrap_or(u32::MAX));
                if part.cost == 0 {
                    break;
                }
                match table.charge(counter, part, time, hint) {
                    Charged::Paid(paid, _) => {
                        shares.push(ShardReceipt { ask: part, paid });
                        left -= part.cost;
                        break;
                    }
                    // Others took from this shard in between: what do they leave?
                    Charged::Full(usage) if usage.used < part.ceiling => part.cost = 0,
                    Charged::Full(_) => break,
                    Charged::Late => return Taking::Late,
                }
            }
            if left == 0 {
                return Taking::Enough;
            }
        }
        Taking::TooLittle
    }
}

/// What came of charging the shards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taking {
    Enough,
    TooLittle,
    /// The window asked for is over.
    Late,
}
