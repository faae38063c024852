//! Limits on the requests of a key in flight at the same time.
//!
//! A request holds a [`Slot`] from its decision until its end. Slots are counted in shards with a lock each, held for a
//! few memory accesses, because a released slot has to go to the request of its key that waits longest.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::{BuildHasherDefault, Hasher};
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::atomics::{AtomicU64, Mutex, MutexGuard, Ordering};
use crate::handles::PlanPosition;
use crate::key::KeyHash;

const SHARDS: usize = 64;
/// With all shards, 262,144 keys with requests in flight; 13 MiB of memory at most.
const KEYS_PER_SHARD: usize = 4096;
/// Counts of a full shard that its further keys share.
const OVERFLOW_GROUPS: usize = 8;

/// The requests in flight of all keys. Memory is bounded: keys that find their shard full share counts, so that they
/// may be refused too early, and never too late.
pub struct ConcurrencyTable {
    shards: Box<[Mutex<Shard>]>,
    keys_per_shard: usize,
    overflows: AtomicU64,
}

/// Keys are hashes already, with a secret seed.
type KeyMap<T> = HashMap<KeyHash, T, BuildHasherDefault<KeyHashHasher>>;

#[derive(Default)]
struct Shard {
    /// Slots in use by key; a key without any has no entry.
    in_use: KeyMap<u32>,
    /// Slots in use that are not counted in `in_use`, by group of keys.
    overflow: [u64; OVERFLOW_GROUPS],
    /// Keys with waiting requests.
    queues: KeyMap<Queue>,
    /// The position of the next waiting request.
    next_position: u64,
}

/// The waiting requests of a key, by order of arrival.
struct Queue {
    /// The limit of the request that arrived last, so that a changed limit takes effect.
    limit: u32,
    waiting: BTreeMap<u64, Option<Waker>>,
}

impl ConcurrencyTable {
    /// An empty table with this many shards, of this many keys each.
    pub fn with_capacity(shards: usize, keys_per_shard: usize) -> ConcurrencyTable {
        let shards = (0..shards.max(1)).map(|_| Mutex::new(Shard::default())).collect();
        ConcurrencyTable { shards, keys_per_shard, overflows: AtomicU64::new(0) }
    }

    /// Takes a slot of a key if fewer than `limit` are in use and no request waits. Returns how many are in use, without
    /// this one.
    pub fn try_acquire(self: &Arc<Self>, key: KeyHash, limit: u32) -> (Option<Slot>, u64) {
        let mut shard = self.shard(key);
        let woken = match shard.queues.get_mut(&key) {
            Some(queue) => {
                queue.limit = limit;
                self.grant(&mut shard, key)
            }
            None => Vec::new(),
        };
        let in_use = shard.in_use(key);
        let is_free = in_use < u64::from(limit) && !shard.queues.contains_key(&key);
        if is_free {
            self.take(&mut shard, key);
        }
        drop(shard);
        woken.into_iter().for_each(Waker::wake);
        (is_free.then(|| Slot { table: Arc::clone(self), key }), in_use)
    }

    /// Joins the queue of a key.
    pub fn queue(self: &Arc<Self>, key: KeyHash, limit: u32) -> QueuedSlot {
        let mut shard = self.shard(key);
        let position = shard.next_position;
        shard.next_position += 1;
        let queue = shard.queues.entry(key).or_insert_with(|| Queue { limit, waiting: BTreeMap::new() });
        queue.limit = limit;
        queue.waiting.insert(position, None);
        // A slot may have become free since the caller tried to take one.
        let woken = self.grant(&mut shard, key);
        drop(shard);
        woken.into_iter().for_each(Waker::wake);
        QueuedSlot { table: Arc::clone(self), key, position: Some(position) }
    }

    /// Slots of a key in use, with those of the keys that share its count.
    pub fn in_use(&self, key: KeyHash) -> u64 {
        self.shard(key).in_use(key)
    }

    /// How often a key found its shard full and shared a count.
    pub fn overflows_total(&self) -> u64 {
        // Ordering: relaxed; a statistic.
        self.overflows.load(Ordering::Relaxed)
    }

    fn shard(&self, key: KeyHash) -> MutexGuard<'_, Shard> {
        let shard = &self.shards[key.tag as usize % self.shards.len()];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, shard: &mut Shard, key: KeyHash) {
        if let Some(count) = shard.in_use.get_mut(&key) {
            *count += 1;
        } else if shard.in_use.len() < self.keys_per_shard {
            shard.in_use.insert(key, 1);
        } else {
            shard.overflow[overflow_group(key)] += 1;
            // Ordering: relaxed; a statistic.
            self.overflows.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn release(&self, key: KeyHash) {
        let mut shard = self.shard(key);
        let mut woken = Vec::new();
        match shard.in_use.get_mut(&key) {
            Some(count) if *count > 1 => *count -= 1,
            Some(_last) => _ = shard.in_use.remove(&key),
            None => {
                let group = overflow_group(key);
                shard.overflow[group] = shard.overflow[group].saturating_sub(1);
                // The count of other keys has fallen as well.
                let others: Vec<KeyHash> =
                    shard.queues.keys().copied().filter(|other| overflow_group(*other) == group).collect();
                others.into_iter().for_each(|other| woken.extend(self.grant(&mut shard, other)));
            }
        }
        if !shard.queues.is_empty() {
            woken.extend(self.grant(&mut shard, key));
        }
        drop(shard);
        woken.into_iter().for_each(Waker::wake);
    }

    /// Gives free slots of a key to its waiting requests, first come first served. The caller wakes them after the lock is
    /// released.
    fn grant(&self, shard: &mut Shard, key: KeyHash) -> Vec<Waker> {
        let mut woken = Vec::new();
        loop {
            let in_use = shard.in_use(key);
            let Some(queue) = shard.queues.get_mut(&key) else { break };
            if in_use >= u64::from(queue.limit) {
                break;
            }
            let first = queue.waiting.pop_first();
            if queue.waiting.is_empty() {
                shard.queues.remove(&key);
            }
            if let Some((_, waker)) = first {
                woken.extend(waker);
                self.take(shard, key);
            }
        }
        woken
    }
}

impl Default for ConcurrencyTable {
    fn default() -> ConcurrencyTable {
        ConcurrencyTable::with_capacity(SHARDS, KEYS_PER_SHARD)
    }
}

impl fmt::Debug for ConcurrencyTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConcurrencyTable").finish_non_exhaustive()
    }
}

impl Shard {
    /// Never too low: the overflow count of the key's group is included, whichever keys it counts.
    fn in_use(&self, key: KeyHash) -> u64 {
        u64::from(self.in_use.get(&key).copied().unwrap_or(0)) + self.overflow[overflow_group(key)]
    }
}

/// Other bits of the tag than those that select the shard.
fn overflow_group(key: KeyHash) -> usize {
    (key.tag >> 32) as usize % OVERFLOW_GROUPS
}

/// Passes on the bits of a [`KeyHash`].
#[derive(Default)]
struct KeyHashHasher(u64);

impl Hasher for KeyHashHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = self.0.rotate_left(32) ^ word;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// A request in flight. Dropped when the request ends, however it ends.
#[must_use]
pub struct Slot {
    table: Arc<ConcurrencyTable>,
    key: KeyHash,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.table.release(self.key);
    }
}

/// A request that waits for a slot. Dropped before it is ready, it leaves the queue.
#[must_use]
pub struct QueuedSlot {
    table: Arc<ConcurrencyTable>,
    key: KeyHash,
    /// The position in the queue; `None` once the slot was handed over.
    position: Option<u64>,
}

impl Future for QueuedSlot {
    type Output = Slot;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Slot> {
        let Some(position) = self.position else { return Poll::Pending };
        let mut shard = self.table.shard(self.key);
        let waiting = shard.queues.get_mut(&self.key).and_then(|queue| queue.waiting.get_mut(&position));
        if let Some(waker) = waiting {
            // Dropped without the lock, because that may run other code.
            let former = match waker {
                Some(known) if known.will_wake(cx.waker()) => None,
                _ => waker.replace(cx.waker().clone()),
            };
            drop(shard);
            drop(former);
            return Poll::Pending;
        }
        drop(shard);
        // The request is no longer in the queue: a slot was taken for it.
        self.position = None;
        Poll::Ready(Slot { table: Arc::clone(&self.table), key: self.key })
    }
}

impl Drop for QueuedSlot {
    fn drop(&mut self) {
        let Some(position) = self.position else { return };
        let mut shard = self.table.shard(self.key);
        let queue = shard.queues.get_mut(&self.key);
        let left = queue.and_then(|queue| {
            let left = queue.waiting.remove(&position);
            left.map(|waker| (waker, queue.waiting.is_empty()))
        });
        if let Some((_, true)) = left {
            shard.queues.remove(&self.key);
        }
        drop(shard);
        if left.is_none() {
            // A slot was taken for the request.
            self.table.release(self.key);
        }
    }
}

/// The requests in flight of a key, as a decision found them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConcurrencyUsage {
    /// The position of the rule in the charge plan.
    pub position: PlanPosition,
    /// The most requests in flight.
    pub limit: u32,
    /// Requests in flight, with this one if it holds a slot.
    pub in_use: u64,
    /// What the rule decided.
    pub state: SlotState,
}

/// The decision of a rule on a request, as far as the requests in flight are concerned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotState {
    /// A slot was free.
    Free,
    /// The request has waited for its slot, or would wait.
    Waited,
    /// No slot is free.
    Full,
    /// No slot is free, and the rule is a shadow rule.
    Shadowed,
}

impl ConcurrencyUsage {
    /// Slots that are free.
    pub fn remaining(&self) -> u64 {
        u64::from(self.limit).saturating_sub(self.in_use)
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    fn key(number: u64) -> KeyHash {
        KeyHash { bucket_hash: number, tag: number << 32 }
    }

    /// Polls once, with a waker that does nothing.
    fn poll(queued: &mut QueuedSlot) -> Option<Slot> {
        match Pin::new(queued).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(slot) => Some(slot),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_key_has_no_more_slots_than_its_limit() {
        let table = Arc::new(ConcurrencyTable::default());
        let mut slots: Vec<Slot> = (0..3).filter_map(|_| table.try_acquire(key(1), 3).0).collect();
        assert_eq!(slots.len(), 3);
        assert!(table.try_acquire(key(1), 3).0.is_none());
        assert!(table.try_acquire(key(2), 1).0.is_some(), "another key has its own slots");
        assert!(table.try_acquire(key(1), 4).0.is_some(), "a changed limit applies to the slots in use");
        slots.pop();
        assert!(table.try_acquire(key(1), 3).0.is_some());
        drop(slots);
        assert_eq!(table.in_use(key(1)), 0);
        assert!(table.shard(key(1)).in_use.is_empty(), "nothing is kept of keys without requests");
        assert_eq!(table.overflows_total(), 0);
    }

    #[test]
    fn a_released_slot_goes_to_the_request_that_waits_longest() {
        let table = Arc::new(ConcurrencyTable::default());
        let held = table.try_acquire(key(1), 1).0;
        let mut queue: Vec<QueuedSlot> = (0..4).map(|_| table.queue(key(1), 1)).collect();
        assert!(queue.iter_mut().all(|queued| poll(queued).is_none()));
        drop(queue.remove(0));
        drop(held);
        assert!(table.try_acquire(key(1), 1).0.is_none(), "a new request does not overtake those that wait");
        assert!(poll(&mut queue[1]).is_none() && poll(&mut queue[2]).is_none());
        let first = poll(&mut queue[0]);
        assert!(first.is_some());
        drop(first);
        // The second has its slot already, and leaves without having noticed.
        drop(queue.remove(1));
        assert!(poll(&mut queue[1]).is_some());
        drop(queue);
        assert_eq!(table.in_use(key(1)), 0);
        assert!(table.shard(key(1)).queues.is_empty());
    }

    /// The task that polled last is woken.
    #[test]
    fn a_waiting_request_may_move_to_another_task() {
        struct Woken(std::sync::Mutex<bool>);
        impl std::task::Wake for Woken {
            fn wake(self: Arc<Self>) {
                *self.0.lock().unwrap() = true;
            }
        }
        let table = Arc::new(ConcurrencyTable::default());
        let held = table.try_acquire(key(1), 1).0;
        let mut queued = table.queue(key(1), 1);
        assert!(poll(&mut queued).is_none());
        let woken = Arc::new(Woken(std::sync::Mutex::new(false)));
        let waker = Waker::from(Arc::clone(&woken));
        assert!(Pin::new(&mut queued).poll(&mut Context::from_waker(&waker)).is_pending());
        drop(held);
        assert!(*woken.0.lock().unwrap());
    }

    #[test]
    fn a_greater_limit_lets_waiting_requests_pass() {
        let table = Arc::new(ConcurrencyTable::default());
        let _held = table.try_acquire(key(1), 1).0;
        let mut queue: Vec<QueuedSlot> = (0..3).map(|_| table.queue(key(1), 1)).collect();
        assert!(table.try_acquire(key(1), 3).0.is_none());
        let passed: Vec<bool> = queue.iter_mut().map(|queued| poll(queued).is_some()).collect();
        // The slots of the first two were dropped at once, so the third has one as well.
        assert_eq!(passed, [true, true, true]);
    }

    #[test]
    fn keys_without_a_count_of_their_own_share_one() {
        let table = Arc::new(ConcurrencyTable::with_capacity(1, 2));
        // Keys of one overflow group.
        let key = |number: u64| key(number * OVERFLOW_GROUPS as u64);
        let own: Vec<Slot> = [1, 2].into_iter().filter_map(|number| table.try_acquire(key(number), 2).0).collect();
        let shared = table.try_acquire(key(3), 2).0;
        assert_eq!((own.len(), shared.is_some(), table.overflows_total()), (2, true, 1));
        let elsewhere = table.try_acquire(super::tests::key(1), 1).0;
        assert!(elsewhere.is_some(), "a key of another group does not share it");
        let other = table.try_acquire(key(4), 2).0;
        assert!(other.is_some() && table.try_acquire(key(3), 2).0.is_none(), "two keys share a limit of 2");
        // A key in the shared count gets no fresh count when there is room again.
        drop(own);
        assert!(table.try_acquire(key(3), 2).0.is_none());
        let mut queued = table.queue(key(3), 2);
        assert!(poll(&mut queued).is_none());
        drop(other);
        assert!(poll(&mut queued).is_some(), "the end of another key's request makes room");
        drop((shared, queued, elsewhere));
        assert!((1..=4).all(|number| table.in_use(key(number)) == 0));
    }
}
