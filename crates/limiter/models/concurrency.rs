//! Models of requests under way: they take and release slots, wait for them, and leave the queue.

use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use transom_limiter::atomics::{AtomicU64, Ordering};
use transom_limiter::concurrency::{ConcurrencyTable, QueuedSlot, Slot};
use transom_limiter::key::KeyHash;

use crate::support::{explore, race};

const KEY: KeyHash = KeyHash { bucket_hash: 1, tag: 1 };

/// Requests of one key, of which one may be under way.
struct Requests {
    table: Arc<ConcurrencyTable>,
    under_way: AtomicU64,
    held: Mutex<Option<Slot>>,
    queued: [Mutex<Option<QueuedSlot>>; 2],
    woken: Arc<WakeCount>,
}

struct WakeCount(AtomicU64);

impl Wake for WakeCount {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Requests {
    fn new(keys: usize) -> Arc<Requests> {
        Arc::new(Requests {
            table: Arc::new(ConcurrencyTable::with_capacity(1, keys)),
            under_way: AtomicU64::new(0),
            held: Mutex::default(),
            queued: Default::default(),
            woken: Arc::new(WakeCount(AtomicU64::new(0))),
        })
    }

    /// A slot is held, and two requests wait.
    fn with_queue() -> Arc<Requests> {
        let requests = Requests::new(1);
        *requests.held.lock().unwrap() = requests.table.try_acquire(KEY, 1).0;
        for queued in &requests.queued {
            *queued.lock().unwrap() = Some(requests.table.queue(KEY, 1));
        }
        requests
    }

    fn poll(&self, nth: usize) -> Option<Slot> {
        let waker = Waker::from(Arc::clone(&self.woken));
        let mut queued = self.queued[nth].lock().unwrap();
        match Pin::new(queued.as_mut()?).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(slot) => Some(slot),
            Poll::Pending => None,
        }
    }

    fn leave(&self, nth: usize) {
        // Dropped without the lock, which loom does not know.
        let queued = self.queued[nth].lock().unwrap().take();
        drop(queued);
    }

    fn release(&self) {
        let held = self.held.lock().unwrap().take();
        drop(held);
    }
}

/// Takes the only slot, with a key of its own or in the count that keys share.
fn one_is_under_way(keys: usize) {
    let requests = Requests::new(keys);
    let job: fn(&Requests) -> bool = |requests| {
        let Some(slot) = requests.table.try_acquire(KEY, 1).0 else { return false };
        assert_eq!(requests.under_way.fetch_add(1, Ordering::SeqCst), 0, "two are under way");
        requests.under_way.fetch_sub(1, Ordering::SeqCst);
        drop(slot);
        true
    };
    let admitted = race(&requests, [job; 3]);
    assert!(admitted.contains(&true));
    assert_eq!(requests.table.in_use(KEY), 0);
}

#[test]
fn requests_under_way_never_exceed_the_limit() {
    explore(3, || one_is_under_way(1));
    explore(3, || one_is_under_way(0));
}

/// The slot is released while the first in the queue leaves: the second one gets the slot.
#[test]
fn a_released_slot_is_never_lost() {
    let outcomes = explore(3, || {
        let requests = Requests::with_queue();
        let job: [fn(&Requests) -> bool; 3] = [
            |requests| {
                requests.release();
                false
            },
            |requests| {
                requests.leave(0);
                false
            },
            |requests| requests.table.try_acquire(KEY, 1).0.is_some(),
        ];
        assert_eq!(race(&requests, job), [false; 3], "a new request overtakes no waiting one");
        let slot = requests.poll(1);
        assert!(slot.is_some());
        drop(slot);
        assert_eq!(requests.table.in_use(KEY), 0);
    });
    assert_eq!(outcomes.len(), 1);
}

/// The slot is released while the first in the queue is polled: it has the slot, or is woken.
#[test]
fn a_waiting_request_is_woken() {
    let outcomes = explore(3, || {
        let requests = Requests::with_queue();
        let job: [fn(&Requests) -> bool; 2] = [
            |requests| {
                requests.release();
                false
            },
            |requests| {
                let slot = requests.poll(0);
                let has_slot = slot.is_some();
                *requests.held.lock().unwrap() = slot;
                has_slot
            },
        ];
        let [_, at_once] = race(&requests, job);
        assert!(at_once || requests.woken.0.load(Ordering::SeqCst) == 1);
        assert!(at_once || requests.poll(0).is_some());
        at_once
    });
    assert_eq!(outcomes.len(), 2, "{outcomes:?}");
}
