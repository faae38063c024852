//! Usage that this worker counted locally while the store was unreachable. `outage` reports it.
//!
//! Each worker reports what it has counted itself. The local counters are those of all workers, so all of them state this usage.

use std::cell::RefCell;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use foldhash::fast::FixedState;

use super::lease_sizing::{CounterId, counter_id};
use transom_limiter::handles::LayerId;
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::table::Counter;

/// Maximum number of counters that wait for a report. Further usage is never reported.
const UNREPORTED_MAX: usize = 65_536;

/// How many counters wait for a report of any worker of the process.
#[derive(Default)]
pub struct UnreportedCount(AtomicUsize);

/// What the store does not know because it could not be reached.
pub struct UnreportedUsage {
    of_workers: Arc<UnreportedCount>,
    /// Counters that were charged locally only.
    charges: RefCell<HashMap<CounterId, UnreportedCharge, FixedState>>,
    /// Those that are being reported.
    reporting: RefCell<HashSet<CounterId, FixedState>>,
}

/// A counter that was charged locally only, or is if the store cannot be asked.
#[derive(Clone)]
pub struct UnreportedCharge {
    pub rule_set: Arc<RuleSet>,
    pub layer: LayerId,
    pub keyed_request: KeyedRequest,
    /// The key in the store.
    pub store_key: Rc<str>,
}

impl UnreportedCharge {
    pub fn counter(&self) -> Counter {
        self.rule_set.layer(self.layer).counter(self.keyed_request)
    }
}

impl UnreportedUsage {
    pub fn new(of_workers: Arc<UnreportedCount>) -> UnreportedUsage {
        UnreportedUsage { of_workers, charges: RefCell::default(), reporting: RefCell::default() }
    }

    // Ordering: the count says only whether to look at the local counters, which have their own order. A worker that misses a
    // change states the usage of a moment ago.
    pub fn has_any_worker_some(&self) -> bool {
        self.of_workers.0.load(Ordering::Relaxed) > 0
    }

    pub fn add(&self, charge: UnreportedCharge) {
        let mut charges = self.charges.borrow_mut();
        let is_full = charges.len() >= UNREPORTED_MAX;
        if let Entry::Vacant(entry) = charges.entry(counter_id(charge.counter()))
            && !is_full
        {
            entry.insert(charge);
            self.of_workers.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn get(&self, id: CounterId) -> Option<UnreportedCharge> {
        self.charges.borrow().get(&id).cloned()
    }

    pub fn remove(&self, id: CounterId) {
        let removed = self.charges.borrow_mut().remove(&id);
        self.of_workers.0.fetch_sub(usize::from(removed.is_some()), Ordering::Relaxed);
    }

    /// The distinct values of `server_of` over all charges.
    pub fn servers<S: Eq + Hash>(&self, server_of: impl FnMut(&UnreportedCharge) -> S) -> HashSet<S> {
        self.charges.borrow().values().map(server_of).collect()
    }

    /// The first `max` counters that match, that are not being reported, and whose window is open. Drops some of those
    /// whose windows have ended.
    pub fn due(
        &self,
        max: usize,
        matches: impl Fn(&UnreportedCharge) -> bool,
        has_ended: impl Fn(&UnreportedCharge) -> bool,
    ) -> Vec<CounterId> {
        let (mut charges, reporting) = (self.charges.borrow_mut(), self.reporting.borrow());
        let (mut due, before) = (Vec::new(), charges.len());
        charges.retain(|id, charge| {
            if due.len() == max || reporting.contains(id) || !matches(charge) {
                return true;
            }
            let ended = has_ended(charge);
            if !ended {
                due.push(*id);
            }
            !ended
        });
        self.of_workers.0.fetch_sub(before - charges.len(), Ordering::Relaxed);
        due
    }

    /// Whether any counter waits for a report or is being reported. Drops those whose windows have ended.
    pub fn has_some(&self, has_ended: impl Fn(&UnreportedCharge) -> bool) -> bool {
        !self.due(1, |_charge| true, has_ended).is_empty() || !self.reporting.borrow().is_empty()
    }

    /// Marks a counter as being reported; `false` if it was marked already.
    pub fn begin_report(&self, id: CounterId) -> bool {
        self.reporting.borrow_mut().insert(id)
    }

    pub fn end_report(&self, id: CounterId) {
        self.reporting.borrow_mut().remove(&id);
    }
}

impl Drop for UnreportedUsage {
    fn drop(&mut self) {
        self.of_workers.0.fetch_sub(self.charges.get_mut().len(), Ordering::Relaxed);
    }
}
