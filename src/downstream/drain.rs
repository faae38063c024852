//! The drain of a worker: notifies all tasks of connections, and waits for the last of them to end.
//!
//! The drain has two steps. When it begins, the worker accepts no more connections, and every response says that its
//! connection ends; an idle connection stays open, because a request may already be on its way. In the second step idle
//! connections are closed as well.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Progress of the drain.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
enum DrainPhase {
    #[default]
    Open,
    Draining,
    ClosingIdle,
}

/// The drain of one worker, and the tasks that it waits for.
#[derive(Debug, Default)]
pub struct Drain {
    phase: Cell<DrainPhase>,
    next_id: Cell<u64>,
    /// Registered tasks, and their wakers; `None` until a task polls for the first time.
    tasks: RefCell<HashMap<u64, Option<Waker>>>,
    /// Woken when the last task ends.
    empty_waker: RefCell<Option<Waker>>,
}

/// Registration of a task. The drain waits until it is dropped.
#[derive(Debug)]
pub struct DrainGuard {
    drain: Rc<Drain>,
    id: u64,
    has_waker: Cell<bool>,
}

impl Drain {
    /// Begins the drain: no more connections, and responses announce the end of theirs.
    pub fn begin(&self) {
        self.advance_to(DrainPhase::Draining);
    }

    /// Closes connections that wait for a request.
    pub fn close_idle(&self) {
        self.advance_to(DrainPhase::ClosingIdle);
    }

    fn advance_to(&self, phase: DrainPhase) {
        self.phase.set(phase);
        let wakers: Vec<Waker> = self.tasks.borrow().values().flatten().cloned().collect();
        wakers.into_iter().for_each(Waker::wake);
    }

    pub fn has_begun(&self) -> bool {
        self.phase.get() >= DrainPhase::Draining
    }

    /// Whether connections that wait for a request are closed.
    pub fn is_closing_idle(&self) -> bool {
        self.phase.get() == DrainPhase::ClosingIdle
    }

    pub fn register(self: &Rc<Self>) -> DrainGuard {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        self.tasks.borrow_mut().insert(id, None);
        DrainGuard { drain: Rc::clone(self), id, has_waker: Cell::new(false) }
    }

    /// Waits until no task is registered.
    pub async fn wait_until_empty(&self) {
        poll_fn(|cx| {
            if self.tasks.borrow().is_empty() {
                return Poll::Ready(());
            }
            *self.empty_waker.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

impl DrainGuard {
    pub fn drain(&self) -> &Rc<Drain> {
        &self.drain
    }

    /// Whether the drain has begun; if not, the task is woken when it does. Must always be called from the same task: the
    /// waker of the first call remains registered, so that later calls are cheap.
    pub fn poll_begun(&self, cx: &Context<'_>) -> bool {
        self.poll_reached(DrainPhase::Draining, cx)
    }

    /// As [`DrainGuard::poll_begun`], for the second step: idle connections close.
    pub fn poll_closing_idle(&self, cx: &Context<'_>) -> bool {
        self.poll_reached(DrainPhase::ClosingIdle, cx)
    }

    fn poll_reached(&self, phase: DrainPhase, cx: &Context<'_>) -> bool {
        if self.drain.phase.get() >= phase {
            return true;
        }
        if !self.has_waker.replace(true) {
            self.drain.tasks.borrow_mut().insert(self.id, Some(cx.waker().clone()));
        }
        false
    }
}

impl Drop for DrainGuard {
    fn drop(&mut self) {
        let mut tasks = self.drain.tasks.borrow_mut();
        tasks.remove(&self.id);
        if tasks.is_empty()
            && let Some(waker) = self.drain.empty_waker.take()
        {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Waker;

    #[test]
    fn every_task_is_notified_and_the_last_one_is_waited_for() {
        let drain = Rc::new(Drain::default());
        let (a, b) = (drain.register(), drain.register());
        let cx = &mut Context::from_waker(Waker::noop());
        assert!(!a.poll_begun(cx) && !b.poll_begun(cx));
        drain.begin();
        assert!(a.poll_begun(cx) && b.poll_begun(cx) && !a.poll_closing_idle(cx));
        drain.close_idle();
        assert!(a.poll_closing_idle(cx));
        let mut ended = std::pin::pin!(drain.wait_until_empty());
        assert!(ended.as_mut().poll(cx).is_pending());
        drop(a);
        assert!(ended.as_mut().poll(cx).is_pending());
        drop(b);
        assert!(ended.as_mut().poll(cx).is_ready());
    }
}
