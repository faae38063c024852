//! Wakes the task that waits for a connection, and nobody while none does.
//!
//! A task that drives its connection itself would otherwise be woken by what it does there: by the
//! request it hands over, by the answer it takes, and by those of the tasks that had the connection
//! before. Every such wake is another round of hyper's for nothing. So hyper is given a relay, which
//! passes on what happens while the task sleeps.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};

/// One for each connection. A task and its connection are of one loop; wakers may be shared between
/// threads all the same.
#[derive(Debug)]
pub struct Relay {
    waits: AtomicBool,
    task: Mutex<Waker>,
}

impl Relay {
    pub fn new() -> Arc<Relay> {
        Arc::new(Relay { waits: AtomicBool::new(false), task: Mutex::new(Waker::noop().clone()) })
    }

    /// Wakes are for this task from now on, until one has come.
    pub fn pass_on_to(&self, task: &Waker) {
        self.task.lock().unwrap_or_else(PoisonError::into_inner).clone_from(task);
        // Ordering: the lock's; whoever sees that someone waits takes the lock to learn who.
        self.waits.store(true, Ordering::Release);
    }

    /// Nobody waits.
    pub fn rest(&self) {
        self.waits.store(false, Ordering::Release);
    }
}

impl Wake for Relay {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.waits.load(Ordering::Acquire) {
            self.waits.store(false, Ordering::Release);
            self.task.lock().unwrap_or_else(PoisonError::into_inner).wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_task_is_woken_once_and_only_while_it_waits() {
        let (woken, relay) = (Arc::new(Woken::default()), Relay::new());
        let (task, waker) = (Waker::from(Arc::clone(&woken)), Waker::from(Arc::clone(&relay)));
        let count = || woken.0.load(Ordering::Relaxed);
        waker.wake_by_ref();
        assert_eq!(count(), 0);
        relay.pass_on_to(&task);
        waker.wake_by_ref();
        waker.wake_by_ref();
        assert_eq!(count(), 1);
        relay.pass_on_to(&task);
        relay.rest();
        waker.wake();
        assert_eq!(count(), 1);
    }
}
