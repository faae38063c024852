//! Charging several counters for one request: all of them, or none.
//!
//! First all counters are looked at; if one of them is full, the request is refused and no counter
//! was touched. Then they are charged from the narrowest to the widest. Only if another thread took
//! the last tokens in between, what was charged is given back, in the window it was charged in: a
//! doomed charge exists for the nanoseconds of a lost race, and can make another request of that
//! moment be refused, but can never let one too many pass.

use crate::atomics::{Ordering, fence};
use crate::counter::{AcquireRequest, Usage, WindowKind};
use crate::sharded_counter::{ShardReceipt, Sharding, ShardsResult};
use crate::table::{Counter, CounterResult, PeekedSlot, Receipt, Slot, Table};
use crate::window::Time;

/// One counter of a request: what is asked of it, and what it answered.
#[derive(Clone, Copy, Debug)]
pub struct Charge {
    pub counter: Counter,
    pub request: AcquireRequest,
    pub sharding: Sharding,
    /// After [`decide`]: what is used, this request included if it was admitted.
    pub usage: Usage,
    /// After [`decide`] refused: whether this counter had no room.
    pub is_full: bool,
    /// After [`look`]: whether a shard is used beyond its part, so that the parts alone do not keep the limit.
    is_shard_over_part: bool,
    hint: Option<PeekedSlot>,
    /// Where it was charged, if it was, and by how much that raised what is used. Small, because it
    /// is written for every counter of every request and read for hardly any.
    slot: Option<Slot>,
    tokens: u64,
}

impl Charge {
    pub fn new(counter: Counter, request: AcquireRequest) -> Charge {
        Charge {
            counter,
            request,
            sharding: Sharding::NONE,
            usage: Usage::default(),
            is_full: false,
            is_shard_over_part: false,
            hint: None,
            slot: None,
            tokens: 0,
        }
    }

    /// Whether it is a request that opens the window.
    pub fn is_floating(&self) -> bool {
        matches!(self.request.kind, WindowKind::Floating(_))
    }

    /// Whether what is used there may be owed by windows to come.
    pub fn may_carry_debt(&self) -> bool {
        matches!(self.request.kind, WindowKind::Grid(_) | WindowKind::Floating(_))
    }

    /// As [`Charge::share`], for whoever is about to give it back: from then on it counts as not charged.
    pub fn take_receipt(&mut self) -> Option<ShardReceipt> {
        let receipt = self.receipt();
        self.slot = None;
        receipt
    }

    /// What was charged here, if the counter is not split.
    pub fn receipt(&self) -> Option<ShardReceipt> {
        self.slot.map(|slot| ShardReceipt {
            request: self.request,
            receipt: Receipt::at(slot, self.counter, self.usage, self.tokens),
        })
    }
}

/// What became of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AcquireResult {
    Admitted,
    Refused,
    /// The windows asked for are over: nothing was charged. Decide again, with windows for a time
    /// not before [`Table::horizon_ms`].
    Late,
}

/// Decides one request on all its counters, which stand in the order in which they are charged.
/// `shares` is added to where a counter is split.
#[inline(always)]
pub fn acquire_all<const W: usize, const PLAIN: bool>(
    table: &Table<W>,
    charges: &mut [Charge],
    shard_receipts: &mut Vec<ShardReceipt>,
    time: Time<'_, PLAIN>,
) -> AcquireResult {
    if peek_all(table, charges, time) {
        acquire_peeked(table, charges, shard_receipts, time)
    } else {
        AcquireResult::Refused
    }
}

/// Fills in what is used of each counter; `true` if all have room. Nothing is charged.
#[inline(always)]
pub fn peek_all<const W: usize, const PLAIN: bool>(
    table: &Table<W>,
    charges: &mut [Charge],
    time: Time<'_, PLAIN>,
) -> bool {
    let mut room = true;
    for charge in charges {
        if !PLAIN && charge.sharding.shards > 1 {
            (charge.usage, charge.is_shard_over_part) =
                charge.sharding.peek(table, charge.counter, charge.request, time);
        } else {
            (charge.usage, charge.hint) = table.peek(charge.counter, charge.request, time);
        }
        charge.is_full = !charge.usage.admits(charge.request);
        room &= !charge.is_full;
    }
    room
}

/// Charges all counters that [`look`] has seen, or none.
#[inline(always)]
pub fn acquire_peeked<const W: usize, const PLAIN: bool>(
    table: &Table<W>,
    charges: &mut [Charge],
    shard_receipts: &mut Vec<ShardReceipt>,
    time: Time<'_, PLAIN>,
) -> AcquireResult {
    let first = shard_receipts.len();
    for i in 0..charges.len() {
        let charge = &mut charges[i];
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
        let outcome = if !PLAIN && charge.sharding.shards > 1 {
            acquire_shards(table, charge, shard_receipts, time)
        } else {
            table.acquire(charge.counter, charge.request, time, charge.hint)
        };
        let outcome = match outcome {
            CounterResult::Acquired(receipt, usage) => {
                charge.usage = usage;
                charge.slot = (PLAIN || charge.sharding.shards == 1).then_some(receipt.slot());
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

/// Charges a split counter. What it answers with as paid is only the last share of it.
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
                // Ordering: the charge stands before, the look after, for every thread that takes what
                // is left; so of two that take the same at least one sees both, and steps back.
                fence(Ordering::SeqCst);
                let (after, _) = split.peek(table, counter, request, time);
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
            CounterResult::Full(split.peek(table, counter, request, time).0)
        }
    }
}

#[cold]
fn refund_all<const W: usize, const PLAIN: bool>(table: &Table<W>, charges: &mut [Charge], time: Time<'_, PLAIN>) {
    for charge in charges.iter_mut().rev() {
        if let Some(receipt) = charge.receipt() {
            table.refund(receipt.receipt, receipt.request, time);
            charge.slot = None;
        }
        // Looked at again only for the answer; a split counter's shares are given back by the caller.
        charge.usage.used = charge.usage.used.saturating_sub(u64::from(charge.request.cost));
    }
}
