//! Charging several counters for one request: all of them, or none.
//!
//! First all counters are looked at; if one of them is full, the request is refused and no counter
//! was touched. Then they are charged from the narrowest to the widest. Only if another thread took
//! the last tokens in between, what was charged is given back, in the window it was charged in: a
//! doomed charge exists for the nanoseconds of a lost race, and can make another request of that
//! moment be refused, but can never let one too many pass.

use super::pace::Time;
use super::shard::{Share, Split, Taking};
use super::sync::{Ordering, fence};
use super::table::{Charged, Counter, Paid, Table};
use super::word::{Ask, Course, Use};

/// One counter of a request: what is asked of it, and what it answered.
#[derive(Clone, Copy, Debug)]
pub struct Charge {
    pub counter: Counter,
    pub ask: Ask,
    pub split: Split,
    /// After [`decide`]: what is used, this request included if it was admitted.
    pub usage: Use,
    /// After [`decide`] refused: whether this counter had no room.
    pub full: bool,
    /// After [`look`]: whether a shard is used beyond its part, so that the parts alone do not keep the limit.
    beyond: bool,
    hint: Option<usize>,
    paid: Option<Paid>,
}

impl Charge {
    pub fn new(counter: Counter, ask: Ask) -> Charge {
        let usage = Use::default();
        Charge { counter, ask, split: Split::WHOLE, usage, full: false, beyond: false, hint: None, paid: None }
    }

    /// Whether it is a request that opens the window.
    pub fn is_floating(&self) -> bool {
        matches!(self.ask.course, Course::Floating(_))
    }

    /// What was charged here, if the counter is not split.
    pub fn share(&self) -> Option<Share> {
        self.paid.map(|paid| Share { ask: self.ask, paid })
    }
}

/// What became of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    Admitted,
    Refused,
    /// The windows asked for are over: nothing was charged. Decide again, with windows for a time
    /// not before [`Table::horizon_ms`].
    Late,
}

/// Decides one request on all its counters, which stand in the order in which they are charged.
/// `shares` is added to where a counter is split.
pub fn decide<const W: usize>(
    table: &Table<W>,
    charges: &mut [Charge],
    shares: &mut Vec<Share>,
    time: Time<'_>,
) -> Verdict {
    if look(table, charges, time) { take(table, charges, shares, time) } else { Verdict::Refused }
}

/// Fills in what is used of each counter; `true` if all have room. Nothing is charged.
#[inline]
pub fn look<const W: usize>(table: &Table<W>, charges: &mut [Charge], time: Time<'_>) -> bool {
    let mut room = true;
    for charge in charges {
        if charge.split.shards > 1 {
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
#[inline]
pub fn take<const W: usize>(
    table: &Table<W>,
    charges: &mut [Charge],
    shares: &mut Vec<Share>,
    time: Time<'_>,
) -> Verdict {
    let first = shares.len();
    for i in 0..charges.len() {
        let charge = &mut charges[i];
        if charge.ask.cost == 0 {
            continue;
        }
        let answer = if charge.split.shards > 1 {
            take_shares(table, charge, shares, time)
        } else {
            table.charge(charge.counter, charge.ask, time, charge.hint)
        };
        let verdict = match answer {
            Charged::Paid(paid, usage) => {
                charge.usage = usage;
                charge.paid = (charge.split.shards == 1).then_some(paid);
                continue;
            }
            Charged::Full(usage) => {
                charge.usage = usage;
                charge.full = true;
                Verdict::Refused
            }
            Charged::Late => Verdict::Late,
        };
        give_back(table, &mut charges[..i], time);
        shares.drain(first..).for_each(|share| table.refund(share.paid, share.ask, time));
        return verdict;
    }
    Verdict::Admitted
}

/// Charges a split counter. What it answers with as paid is only the last share of it.
#[cold]
fn take_shares<const W: usize>(table: &Table<W>, charge: &Charge, shares: &mut Vec<Share>, time: Time<'_>) -> Charged {
    let Charge { ask, split, counter, usage, .. } = *charge;
    match (split.charge(table, counter, ask, time, shares), shares.last()) {
        (Taking::Enough, Some(share)) => {
            if charge.beyond {
                // Ordering: the charge stands before, the look after, for every thread that takes what
                // is left; so of two that take the same at least one sees both, and steps back.
                fence(Ordering::SeqCst);
                let (after, _) = split.look(table, counter, ask, time);
                if after.used > ask.ceiling {
                    return Charged::Full(Use { used: after.used.saturating_sub(u64::from(ask.cost)), ..after });
                }
            }
            Charged::Paid(share.paid, Use { used: usage.used + u64::from(ask.cost), ..usage })
        }
        (Taking::Late, _) => Charged::Late,
        (Taking::Enough | Taking::TooLittle, _) => Charged::Full(split.look(table, counter, ask, time).0),
    }
}

fn give_back<const W: usize>(table: &Table<W>, charges: &mut [Charge], time: Time<'_>) {
    for charge in charges.iter_mut().rev() {
        if let Some(paid) = charge.paid.take() {
            table.refund(paid, charge.ask, time);
        }
        // Looked at again only for the answer; a split counter's shares are given back by the caller.
        charge.usage.used = charge.usage.used.saturating_sub(u64::from(charge.ask.cost));
    }
}
