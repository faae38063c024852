//! The slots that a request holds in rules which limit the requests in flight.

use transom_limiter::concurrency::Slot;
use transom_limiter::handles::PlanPosition;
use transom_runtime::metrics::events::ConcurrencyGauge;

/// Released when dropped.
#[derive(Default)]
pub struct HeldSlots(Vec<HeldSlot>);

struct HeldSlot {
    position: PlanPosition,
    gauge: ConcurrencyGauge,
    _slot: Slot,
}

impl HeldSlots {
    pub fn add(&mut self, position: PlanPosition, slot: Slot, gauge: ConcurrencyGauge) {
        gauge.acquired();
        self.0.push(HeldSlot { position, gauge, _slot: slot });
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Releases the slots of some rules.
    pub fn release(&mut self, rules: &[PlanPosition]) {
        self.0.retain(|held| !rules.contains(&held.position));
    }

    pub fn release_all(&mut self) {
        self.0.clear();
    }
}

impl Drop for HeldSlot {
    fn drop(&mut self) {
        // Before the slot is released: then the metric never exceeds the limit.
        self.gauge.released();
    }
}
