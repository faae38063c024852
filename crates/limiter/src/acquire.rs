//! Charging several counters for one request: all of them, or none.
//!
//! First all counters are looked at; if one of them is full, the request is refused and no counter
//! was touched. Then they are charged from the narrowest to the widest. Only if another thread took
//! the last tokens in between, what was charged is given back, in the window it was charged in: a
//! doomed charge exists for the nanoseconds of a lost race, and can make another request of that
//! moment be refused, but can never let one too many pass.

use crate::atomics::{Ordering, fence};
use crate::counter::{AcquireRequest, Usage, WindowKind};
use crate::sharded_counter::{ShardReceipt, Split, Taking};
use crate::table::{Charged, Counter, Receipt, Seen, Slot, Table};
use crate::window_sequence::Time;

/// One counter of a request: what is asked of it, and what it answered.
#[derive(Clone, Copy, Debug)]
pub struct Charge {
    pub counter: Counter,
    pub ask: AcquireRequest,
    pub split: Split,
    /// After [`decide`]: what is used, this request included if it was admitted.
    pub usage: Usage,
    /// After [`decide`] refused: whether this counter had no room.
    pub full: bool,
    /// After [`look`]: whether a shard is used beyond its part, so that the parts alone do not keep the limit.
    beyond: bool,
    hint: Option<Seen>,
    /// Where it was charged, if it was, and by how much that raised what is used. Small, because it
    /// is written for every counter of every request and read for hardly any.
    slot: Option<Slot>,
    tokens: u64,
}

impl Charge {
    pub fn new(counter: Counter, ask: AcquireRequest) -> Charge {
        Charge {
            counter,
            ask,
            split: Split::WHOLE,
            usage: Usage::default(),
            full: false,
            beyond: false,
            hint: None,
            slot: None,
            tokens: 0,
        }
    }

    /// Whether it is a request that opens the window.
    pub fn is_floating(&self) -> bool {
        matches!(self.ask.course, WindowKind::Floating(_))
    }

    /// Whether what is used there may be owed by windows to come.
    pub fn may_owe(&self) -> bool {
        matches!(self.ask.course, WindowKind::Grid(_) | WindowKind::Floating(_))
    }

    /// As [`Charge::share`], for whoever is about to give it back: from then on it counts as not charged.
    pub fn take_share(&mut self) -> Option<ShardReceipt> {
        let share = self.share();
        self.slot = None;
        share
    }

    /// What was charged here, if the counter is not split.
    pub fn share(&self) -> Option<ShardReceipt> {
        self.slot
            .map(|slot| ShardReceipt { ask: self.ask, paid: Receipt::at(slot, self.counter, self.usage, self.tokens) })
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
pub fn decide<const W: usize, const PLAIN: bool>(
    table: &Table<W>,
    charges: &mut [Charge],
    shares: &mut Vec<ShardReceipt>,
    time: Time<'_, PLAIN>,
) -> AcquireResult {
    if look(table, charges, time) { take(table, charges, shares, time) } else { AcquireResult::Refused }
}

/// Fills in what is used of each counter; `true` if all have room. Nothing is charged.
#[inline(always)]
pub fn look<const W: usize, const PLAIN: bool>(
    table: &Table<W>,
    charges: &mut [Charge],
    time: Time<'_, PLAIN>,
) -> bool {
    let mut room = true;
    for charge in charges {
        if !PLAIN && charge.split.shards > 1 {
            (charge.usage, charge.beyond) = charge.split.look(table, charge.counter, charge.ask, time);
        } else {
            (charge.usage, charge.hint) = table.look(charge.counter, charge.ask, time);
        }
        charge.full = !charge.usage.admits(charge.ask);
        room &= !charge.full;
    }
    room
}

/// Charges all counters that [`look`] has seen, or none.
#[inline(always)]
pub fn take<const W: usize, const PLAIN: bool>(
    table: &Table<W>,
    charges: &mut [Charge],
    shares: &mut Vec<ShardReceipt>,
    time: Time<'_, PLAIN>,
) -> AcquireResult {
    let first = shares.len();
    for i in 0..charges.len() {
        let charge = &mut charges[i];
        if charge.ask.cost == 0 {
            continue;
        }
        if let Some(seen) = charge.hint
            && let Some((slot, after)) = table.charge_seen(seen, charge.usage, charge.ask, time)
        {
            charge.tokens = after.used - charge.usage.used;
            charge.usage.used = after.used;
            charge.usage.end_ms = after.end_ms;
            charge.slot = Some(slot);
            continue;
        }
        let answer = if !PLAIN && charge.split.shards > 1 {
            take_shares(table, charge, shares, time)
        } else {
            table.charge(charge.counter, charge.ask, time, charge.hint)
        };
        let verdict = match answer {
            Charged::Paid(paid, usage) => {
                charge.usage = usage;
                charge.slot = (PLAIN || charge.split.shards == 1).then_some(paid.slot());
                charge.tokens = paid.tokens();
                continue;
            }
            Charged::Full(usage) => {
                charge.usage = usage;
                charge.full = true;
                AcquireResult::Refused
            }
            Charged::Late => AcquireResult::Late,
        };
        give_back(table, &mut charges[..i], time);
        for share in shares.drain(first..) {
            table.refund(share.paid, share.ask, time);
        }
        return verdict;
    }
    AcquireResult::Admitted
}

/// Charges a split counter. What it answers with as paid is only the last share of it.
#[cold]
fn take_shares<const W: usize, const PLAIN: bool>(
    table: &Table<W>,
    charge: &Charge,
    shares: &mut Vec<ShardReceipt>,
    time: Time<'_, PLAIN>,
) -> Charged {
    let Charge { ask, split, counter, usage, .. } = *charge;
    match (split.charge(table, counter, ask, time, shares), shares.last()) {
        (Taking::Enough, Some(share)) => {
            if charge.beyond {
                // Ordering: the charge stands before, the look after, for every thread that takes what
                // is left; so of two that take the same at least one sees both, and steps back.
                fence(Ordering::SeqCst);
                let (after, _) = split.look(table, counter, ask, time);
                if after.used > ask.ceiling {
                    return Charged::Full(Usage { used: after.used.saturating_sub(u64::from(ask.cost)), ..after });
                }
            }
            Charged::Paid(share.paid, Usage { used: usage.used + u64::from(ask.cost), ..usage })
        }
        (Taking::Late, _) => Charged::Late,
        (Taking::Enough | Taking::TooLittle, _) => Charged::Full(split.look(table, counter, ask, time).0),
    }
}

#[cold]
fn give_back<const W: usize, const PLAIN: bool>(table: &Table<W>, charges: &mut [Charge], time: Time<'_, PLAIN>) {
    for charge in charges.iter_mut().rev() {
        if let Some(share) = charge.share() {
            table.refund(share.paid, share.ask, time);
            charge.slot = None;
        }
        // Looked at again only for the answer; a split counter's shares are given back by the caller.
        charge.usage.used = charge.usage.used.saturating_sub(u64::from(charge.ask.cost));
    }
}
