//! Charging several counters for one request: all of them, or none.
//!
//! First all counters are looked at; if one of them is full, the request is refused and no counter
//! was touched. Then they are charged from the narrowest to the widest. Only if another thread took
//! the last tokens in between, what was charged is given back, in the window it was charged in: a
//! doomed charge exists for the nanoseconds of a lost race, and can make another request of that
//! moment be refused, but can never let one too many pass.

use super::table::{Charged, Counter, Paid, Table};
use super::word::{Ask, Use};

/// One counter of a request: what is asked of it, and what it answered.
#[derive(Clone, Copy, Debug)]
pub struct Charge {
    pub counter: Counter,
    pub ask: Ask,
    /// After [`decide`]: what is used, this request included if it was admitted.
    pub usage: Use,
    /// After [`decide`] refused: whether this counter had no room.
    pub full: bool,
    hint: Option<usize>,
    paid: Option<Paid>,
}

impl Charge {
    pub fn new(counter: Counter, ask: Ask) -> Charge {
        Charge { counter, ask, usage: Use::default(), full: false, hint: None, paid: None }
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
pub fn decide<const W: usize>(table: &Table<W>, charges: &mut [Charge], now_ms: u64) -> Verdict {
    if look(table, charges) { take(table, charges, now_ms) } else { Verdict::Refused }
}

/// Fills in what is used of each counter; `true` if all have room. Nothing is charged.
pub fn look<const W: usize>(table: &Table<W>, charges: &mut [Charge]) -> bool {
    let mut room = true;
    for charge in charges {
        (charge.usage, charge.hint) = table.look(charge.counter, charge.ask);
        charge.full = !charge.usage.admits(charge.ask);
        room &= !charge.full;
    }
    room
}

fn take<const W: usize>(table: &Table<W>, charges: &mut [Charge], now_ms: u64) -> Verdict {
    for i in 0..charges.len() {
        let charge = &mut charges[i];
        if charge.ask.cost == 0 {
            continue;
        }
        match table.charge(charge.counter, charge.ask, now_ms, charge.hint) {
            Charged::Paid(paid, usage) => {
                charge.usage = usage;
                charge.paid = Some(paid);
            }
            Charged::Full(usage) => {
                charge.usage = usage;
                charge.full = true;
                give_back(table, &mut charges[..i]);
                return Verdict::Refused;
            }
            Charged::Late => {
                give_back(table, &mut charges[..i]);
                return Verdict::Late;
            }
        }
    }
    Verdict::Admitted
}

fn give_back<const W: usize>(table: &Table<W>, charges: &mut [Charge]) {
    for charge in charges.iter_mut().rev() {
        if let Some(paid) = charge.paid.take() {
            table.refund(paid);
            charge.usage.used = charge.usage.used.saturating_sub(charge.ask.cost);
        }
    }
}
