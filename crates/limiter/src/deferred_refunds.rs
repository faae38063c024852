//! Refunds of delayed requests that were cancelled while later requests waited behind them.
//!
//! Such a charge can be refunded only after the charges behind it. The charges of all workers are kept here in order,
//! per counter, so that a cancelled request touches only the end of its own counters' order.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use crate::rule_set::RuleSet;
use crate::sharded_counter::ShardReceipt;
use crate::table::{Counter, RefundResult, Slot, Table};

/// The most charges kept; 16 MiB of memory. Further ones stay charged until their window ends.
const MAX_PENDING: usize = 65_536;

/// Charges of all workers that cannot be refunded yet.
#[derive(Default)]
pub struct DeferredRefunds(Mutex<PendingRefunds>);

/// By slot and position in the order of the counter's charges. A charge gets the position of an earlier one if tokens between them
/// were refunded and charged again: both are then refunded as one.
type PendingRefunds = BTreeMap<(Slot, u128), PendingRefund>;

#[derive(Clone)]
struct PendingRefund {
    shard_receipt: ShardReceipt,
    /// Whether only the rest of the charge is left.
    is_rest: bool,
    /// When the request would have been admitted, Unix milliseconds.
    until_ms: u64,
    /// The rules by which it was charged.
    rule_set: Arc<RuleSet>,
}

impl DeferredRefunds {
    /// Refunds charges: now, or after the charges behind them. Charges that are not refunded by `until_ms` are dropped.
    pub fn refund<const W: usize>(
        &self,
        shard_receipts: impl IntoIterator<Item = ShardReceipt>,
        until_ms: u64,
        rule_set: &Arc<RuleSet>,
        table: &Table<W>,
        now_ms: u64,
    ) {
        let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for shard_receipt in shard_receipts {
            let refund = PendingRefund { shard_receipt, is_rest: false, until_ms, rule_set: Arc::clone(rule_set) };
            let positions = shard_receipt.receipt.queue_positions();
            match refund.try_refund(table, now_ms) {
                RefundResult::All => {}
                RefundResult::AllExcept(_) | RefundResult::Nothing
                    if until_ms <= now_ms || !shard_receipt.request.kind.carries_debt() =>
                {
                    continue;
                }
                RefundResult::AllExcept(receipt) => {
                    let shard_receipt = ShardReceipt { receipt, ..shard_receipt };
                    insert(&mut pending, PendingRefund { shard_receipt, is_rest: true, ..refund }, now_ms);
                }
                RefundResult::Nothing => insert(&mut pending, refund, now_ms),
            }
            refund_tail(&mut pending, positions, table, now_ms);
            if pending.len() > MAX_PENDING {
                // The first charge of a counter: its window ends first, and no other charge of the counter waits for
                // it.
                pending.pop_first();
            }
        }
    }

    /// Takes the charges of a counter that is emptied, because its tokens move elsewhere: returns how many tokens are to be refunded
    /// there.
    pub fn take(&self, counter: Counter, now_ms: u64) -> u64 {
        let mut pending = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_of_counter = |_: &(Slot, u128), charge: &mut PendingRefund| {
            let ShardReceipt { layer, receipt, .. } = charge.shard_receipt;
            layer == counter.layer && receipt.is_of(counter)
        };
        let taken = pending.extract_if(.., is_of_counter).filter(|(_, charge)| charge.until_ms > now_ms);
        taken.map(|(_, charge)| charge.shard_receipt.receipt.tokens()).sum()
    }

    /// Refunds the charges that can be refunded by now, and drops those whose time has come. This takes about 30 ms for
    /// `MAX_PENDING` charges. If another worker is sweeping, returns at once.
    pub fn sweep<const W: usize>(&self, table: &Table<W>, now_ms: u64) {
        let mut pending = match self.0.try_lock() {
            Ok(pending) => pending,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        pending.retain(|_, charge| charge.until_ms > now_ms);
        let mut next = pending.last_key_value().map(|(_, last)| last.shard_receipt.receipt.queue_positions());
        while let Some(positions) = next {
            let first = *positions.start();
            refund_tail(&mut pending, positions, table, now_ms);
            next = pending.range(..first).next_back().map(|(_, charge)| charge.shard_receipt.receipt.queue_positions());
        }
    }
}

/// Adds a charge, with the tokens of one in the same position.
fn insert(pending: &mut PendingRefunds, mut charge: PendingRefund, now_ms: u64) {
    let position = charge.queue_position(now_ms);
    if let Some(other) = pending.get(&position) {
        let ShardReceipt { receipt, .. } = &mut charge.shard_receipt;
        *receipt = receipt.with_more_tokens(other.shard_receipt.receipt.tokens());
        charge.until_ms = charge.until_ms.max(other.until_ms);
    }
    pending.insert(position, charge);
}

/// Refunds the last charges of one counter, as far as possible.
fn refund_tail<const W: usize>(
    pending: &mut PendingRefunds,
    positions: RangeInclusive<(Slot, u128)>,
    table: &Table<W>,
    now_ms: u64,
) {
    while let Some((position, charge)) = pending.range(positions.clone()).next_back() {
        let (position, result) = (*position, charge.try_refund(table, now_ms));
        if result == RefundResult::Nothing {
            return;
        }
        let charge = pending.remove(&position);
        if let (Some(charge), RefundResult::AllExcept(receipt)) = (charge, result) {
            let shard_receipt = ShardReceipt { receipt, ..charge.shard_receipt };
            insert(pending, PendingRefund { shard_receipt, is_rest: true, ..charge }, now_ms);
        }
    }
}

impl PendingRefund {
    fn try_refund<const W: usize>(&self, table: &Table<W>, now_ms: u64) -> RefundResult {
        table.refund_with_rest(
            self.shard_receipt.receipt,
            self.is_rest,
            self.shard_receipt.request,
            self.rule_set.time(now_ms),
        )
    }

    fn queue_position(&self, now_ms: u64) -> (Slot, u128) {
        self.shard_receipt.receipt.queue_position(self.is_rest, self.shard_receipt.request, self.rule_set.time(now_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_does_not_wait_for_another() {
        let (refunds, table) = (DeferredRefunds::default(), Table::<8>::with_capacity(64).unwrap());
        let other = refunds.0.lock().unwrap();
        // If it waited, the test would never end.
        refunds.sweep(&table, 0);
        drop(other);
    }
}
