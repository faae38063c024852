//! Charges several counters for one request: all of them, or none.
//!
//! All counters are peeked at first: if one of them is full, the request is refused and no counter is touched. Then the
//! counters are charged, those most likely to be full first. Only if another thread took the last tokens meanwhile, the
//! charges made so far are refunded, in the windows in which they were made. Such a charge exists for the nanoseconds
//! of a lost race. It can cause another request to be refused, but can never admit one too many.

use crate::atomics::{Ordering, fence};
use crate::sharded_counter::{ShardReceipt, Sharding, ShardsResult};
use crate::sliding_counter::SlidingCounter;
use crate::table::{Counter, CounterResult, PeekedSlot, Receipt, Slot, Table};
use crate::window::Time;
use crate::window_kind::{AcquireRequest, Usage, WindowKind};

/// One counter of a request: the tokens to take, and the result.
#[derive(Clone, Copy, Debug)]
pub struct Charge {
    /// The counter to charge.
    pub counter: Counter,
    /// The tokens to take.
    pub request: AcquireRequest,
    /// How the counter is sharded.
    pub sharding: Sharding,
    /// After [`acquire_all`]: the usage, including this request if it was admitted.
    pub usage: Usage,
    /// After [`acquire_all`] refused: whether this counter had too few tokens left.
    pub is_full: bool,
    /// After [`peek_all`]: whether a shard has used more than its part, so that the parts alone do not enforce the
    /// limit.
    is_shard_over_part: bool,
    /// After [`peek_all`] found a sharded counter full whose windows depend on each other: how many windows must begin
    /// until the request fits, at most `u32::MAX`. Not wider, so that it fits beside the flags.
    pub windows_until_fit: u32,
    hint: Option<PeekedSlot>,
    /// The charged slot, and the increase of the usage. Small, because both are written for every counter of every
    /// request and rarely read.
    slot: Option<Slot>,
    tokens: u64,
}

impl AsMut<Charge> for Charge {
    fn as_mut(&mut self) -> &mut Charge {
        self
    }
}

impl Charge {
    /// A charge that was not made yet, of a counter without shards.
    pub fn new(counter: Counter, request: AcquireRequest) -> Charge {
        Charge {
            counter,
            request,
            sharding: Sharding::NONE,
            usage: Usage::default(),
            is_full: false,
            is_shard_over_part: false,
            windows_until_fit: 0,
            hint: None,
            slot: None,
            tokens: 0,
        }
    }

    /// Whether a reservation, made when the open window ended at `end_ms`, was charged after a later one: a refund may have ended that
    /// window, and another request may have opened the later one.
    pub fn reserves_later_than(&self, end_ms: u64) -> bool {
        self.request.kind.is_opened_by_requests() && self.usage.end_ms > end_ms
    }

    /// As [`Charge::receipt`]. The caller refunds or keeps it; the charge then has none.
    pub fn take_receipt(&mut self) -> Option<ShardReceipt> {
        let receipt = self.receipt();
        self.slot = None;
        receipt
    }

    /// Whether the charge is in several words of the table: its receipts are with those of shards.
    #[inline(always)]
    fn is_split(&self) -> bool {
        self.sharding.shards > 1 || self.request.kind == WindowKind::Sliding
    }

    /// The receipt of this charge, if it was made and the counter is neither sharded nor sliding. `usage` must be that of the charged
    /// counter alone.
    pub fn receipt(&self) -> Option<ShardReceipt> {
        self.slot.map(|slot| ShardReceipt {
            request: self.request,
            receipt: Receipt::at(slot, self.counter, self.usage, self.tokens),
            layer: self.counter.layer,
        })
    }
}

/// The result of charging all counters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AcquireResult {
    /// All counters were charged.
    Admitted,
    /// No counter was charged: at least one is full.
    Refused,
    /// The requested windows have ended, and nothing was charged. Decide again, with windows for a time not before
    /// [`Table::horizon_ms`].
    Late,
}

/// Decides one request on all its counters, in the order in which they are to be charged. Receipts of sharded and sliding
/// counters are added to `shard_receipts`.
#[inline(always)]
pub fn acquire_all<const W: usize, const PLAIN: bool>(
    table: &Table<W>,
    charges: &mut [impl AsMut<Charge>],
    shard_receipts: &mut Vec<ShardReceipt>,
    time: Time<'_, PLAIN>,
) -> AcquireResult {
    if peek_all(table, charges, time) {
        acquire_peeked(table, charges, shard_receipts, time)
    } else {
        AcquireResult::Refused
    }
}

/// Fills in the usage of each counter; `true` if the request fits in all. Nothing is charged.
#[inline(always)]
pub fn peek_all<const W: usize, const PLAIN: bool>(
    table: &Table<W>,
    charges: &mut [impl AsMut<Charge>],
    time: Time<'_, PLAIN>,
) -> bool {
    charges.iter_mut().fold(true, |all_fit, charge| all_fit & peek_charge(table, charge.as_mut(), time))
}

/// As [`peek_all`], for one counter.
#[inline(always)]
pub fn peek_charge<const W: usize, const PLAIN: bool>(
    table: &Table<W>,
    charge: &mut Charge,
    time: Time<'_, PLAIN>,
) -> bool {
    if !PLAIN && charge.request.kind == WindowKind::Sliding {
        (charge.usage, charge.request.end_ms) =
            SlidingCounter::new(charge.counter, charge.request, time).peek(table, time);
    } else if !PLAIN && charge.sharding.shards > 1 {
        let shards = charge.sharding.peek(table, charge.counter, charge.request, time);
        (charge.usage, charge.is_shard_over_part) = (shards.usage, shards.is_over_part);
        if charge.request.kind.carries_debt() {
            charge.sharding.first_shard = shards.fullest_shard;
        }
    } else {
        (charge.usage, charge.hint) = table.peek(charge.counter, charge.request, time);
    }
    charge.is_full = !charge.usage.admits(charge.request);
    if !PLAIN && charge.is_full && charge.sharding.shards > 1 && charge.request.kind.carries_debt() {
        let windows = charge.sharding.windows_until_fit(table, charge.counter, charge.request, time);
        charge.windows_until_fit = u32::try_from(windows).unwrap_or(u32::MAX);
    }
    !charge.is_full
}

/// Charges all counters after [`peek_all`], or none.
#[inline(always)]
pub fn acquire_peeked<const W: usize, const PLAIN: bool>(
    table: &Table<W>,
    charges: &mut [impl AsMut<Charge>],
    shard_receipts: &mut Vec<ShardReceipt>,
    time: Time<'_, PLAIN>,
) -> AcquireResult {
    let first = shard_receipts.len();
    for i in 0..charges.len() {
        let charge = charges[i].as_mut();
        if charge.request.cost == 0 {
            continue;
        }
        if let Some(seen) = charge.hint
            && let Some((slot, after)) = table.acquire_unchanged(seen, charge.usage, charge.request, time)
        {
            charge.tokens = after.used - charge.usage.used;
            charge.usage.used = after.used;
            charge.usage.end_ms = after.end_ms;
            charge.slot = Some(slot);
            continue;
        }
        let outcome = if !PLAIN && charge.request.kind == WindowKind::Sliding {
            SlidingCounter::new(charge.counter, charge.request, time).acquire(table, time, shard_receipts)
        } else if !PLAIN && charge.sharding.shards > 1 {
            acquire_shards(table, charge, shard_receipts, time)
        } else {
            table.acquire(charge.counter, charge.request, time, charge.hint)
        };
        let outcome = match outcome {
            CounterResult::Acquired(receipt, usage) => {
                charge.usage = usage;
                charge.slot = (PLAIN || !charge.is_split()).then_some(receipt.slot());
                charge.tokens = receipt.tokens();
                continue;
            }
            CounterResult::Full(usage) => {
                charge.usage = usage;
                charge.is_full = true;
                AcquireResult::Refused
            }
            CounterResult::Late => AcquireResult::Late,
        };
        refund_all(table, &mut charges[..i], time);
        for receipt in shard_receipts.drain(first..) {
            table.refund(receipt.receipt, receipt.request, time);
        }
        return outcome;
    }
    AcquireResult::Admitted
}

/// Charges a sharded counter. The receipt in the result is only that of the last shard.
#[cold]
fn acquire_shards<const W: usize, const PLAIN: bool>(
    table: &Table<W>,
    charge: &Charge,
    shard_receipts: &mut Vec<ShardReceipt>,
    time: Time<'_, PLAIN>,
) -> CounterResult {
    let Charge { request, sharding: split, counter, usage, .. } = *charge;
    match (split.acquire(table, counter, request, time, shard_receipts), shard_receipts.last()) {
        (ShardsResult::Acquired, Some(receipt)) => {
            if charge.is_shard_over_part {
                // Ordering: the charge comes before, the peek after, for every thread that takes the remaining tokens;
                // so of two threads that take the same tokens at least one sees both charges, and withdraws.
                fence(Ordering::SeqCst);
                let after = split.peek(table, counter, request, time).usage;
                if after.used > request.ceiling {
                    return CounterResult::Full(Usage {
                        used: after.used.saturating_sub(u64::from(request.cost)),
                        ..after
                    });
                }
            }
            CounterResult::Acquired(receipt.receipt, Usage { used: usage.used + u64::from(request.cost), ..usage })
        }
        (ShardsResult::Late, _) => CounterResult::Late,
        (ShardsResult::Acquired | ShardsResult::TooFew, _) => {
            CounterResult::Full(split.peek(table, counter, request, time).usage)
        }
    }
}

#[cold]
fn refund_all<const W: usize, const PLAIN: bool>(
    table: &Table<W>,
    charges: &mut [impl AsMut<Charge>],
    time: Time<'_, PLAIN>,
) {
    for charge in charges.iter_mut().rev().map(AsMut::as_mut) {
        if let Some(receipt) = charge.receipt() {
            table.refund(receipt.receipt, receipt.request, time);
            charge.slot = None;
        }
        // Only the reported usage; the caller refunds the parts of sharded and sliding counters.
        charge.usage.used = charge.usage.used.saturating_sub(u64::from(charge.request.cost));
    }
}
