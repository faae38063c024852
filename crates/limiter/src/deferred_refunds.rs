//! Charges of requests that waited and went away while other requests waited behind them.
//!
//! Such a charge can be given back once the charges behind it have been. The charges of all workers are kept here in
//! one line per counter, so that a client that leaves touches the end of its own lines and nothing else.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use crate::rule_set::RuleSet;
use crate::sharded_counter::ShardReceipt;
use crate::table::{GivenUp, Slot, Table};

/// How many charges are kept; 16 MiB of memory. Those that do not fit stay charged until their window is over.
const MOST: usize = 65_536;

/// The charges that cannot be given back yet, of all workers.
#[derive(Default)]
pub struct DeferredRefunds(Mutex<Lines>);

/// By counter and place in its line. Two charges never have one place, but for what others wrote into the same memory:
/// then the former is forgotten.
type Lines = BTreeMap<(Slot, u128), Charge>;

#[derive(Clone)]
struct Charge {
    share: ShardReceipt,
    /// Whether only a rest of it is left.
    is_rest: bool,
    /// When its turn would have come, Unix milliseconds.
    until_ms: u64,
    /// The rules by which it was charged.
    rule_set: Arc<RuleSet>,
}

impl DeferredRefunds {
    /// Gives charges back: now, or when those behind them have been given back. They are forgotten at `until_ms`.
    pub fn give_up<const W: usize>(
        &self,
        shares: impl IntoIterator<Item = ShardReceipt>,
        until_ms: u64,
        rule_set: &Arc<RuleSet>,
        table: &Table<W>,
        now_ms: u64,
    ) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for share in shares {
            let charge = Charge { share, is_rest: false, until_ms, rule_set: Arc::clone(rule_set) };
            let positions = share.paid.positions();
            match charge.give_up(table, now_ms) {
                GivenUp::All => {}
                GivenUp::AllBut(_) | GivenUp::Nothing if until_ms <= now_ms || !share.ask.is_in_line() => continue,
                GivenUp::AllBut(paid) => {
                    let rest = Charge { share: ShardReceipt { paid, ..share }, is_rest: true, ..charge };
                    lines.insert(rest.position(now_ms), rest);
                }
                GivenUp::Nothing => drop(lines.insert(charge.position(now_ms), charge)),
            }
            shorten(&mut lines, positions, table, now_ms);
            if lines.len() > MOST {
                // The first in a line: it is over first, and no other charge has to wait for it.
                lines.pop_first();
            }
        }
    }

    /// Gives back what can be by now, and forgets the charges whose time has come. That takes some 30 ms for `MOST`
    /// charges, so one worker does it at a time, and the others do not wait.
    pub fn sweep<const W: usize>(&self, table: &Table<W>, now_ms: u64) {
        let mut lines = match self.0.try_lock() {
            Ok(lines) => lines,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        lines.retain(|_, charge| charge.until_ms > now_ms);
        let mut next = lines.last_key_value().map(|(_, last)| last.share.paid.positions());
        while let Some(positions) = next {
            let first = *positions.start();
            shorten(&mut lines, positions, table, now_ms);
            next = lines.range(..first).next_back().map(|(_, charge)| charge.share.paid.positions());
        }
    }
}

/// Gives back the charges at the end of one line, as far as possible.
fn shorten<const W: usize>(lines: &mut Lines, positions: RangeInclusive<(Slot, u128)>, table: &Table<W>, now_ms: u64) {
    while let Some((position, charge)) = lines.range(positions.clone()).next_back() {
        let (position, given_up) = (*position, charge.give_up(table, now_ms));
        if given_up == GivenUp::Nothing {
            return;
        }
        let charge = lines.remove(&position);
        if let (Some(charge), GivenUp::AllBut(paid)) = (charge, given_up) {
            let rest = Charge { share: ShardReceipt { paid, ..charge.share }, is_rest: true, ..charge };
            lines.insert(rest.position(now_ms), rest);
        }
    }
}

impl Charge {
    fn give_up<const W: usize>(&self, table: &Table<W>, now_ms: u64) -> GivenUp {
        table.give_up(self.share.paid, self.is_rest, self.share.ask, self.rule_set.time(now_ms))
    }

    fn position(&self, now_ms: u64) -> (Slot, u128) {
        self.share.paid.position(self.is_rest, self.share.ask, self.rule_set.time(now_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_does_not_wait_for_another() {
        let (abandoned, table) = (DeferredRefunds::default(), Table::<8>::with_capacity(64).unwrap());
        let other = abandoned.0.lock().unwrap();
        // If it waited, that would be for ever.
        abandoned.sweep(&table, 0);
        drop(other);
    }
}
