//! The end of an event loop: everyone inside is told, and the last one out is waited for.
//!
//! They are told in two steps. When the drain begins nobody new is let in, and every answer says that its connection
//! ends; a connection on which nothing is asked stays, because a request may already be on its way to it. Once it
//! is released as well, it need not wait for one any more.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// How far it has come.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
enum DrainPhase {
    #[default]
    Open,
    Draining,
    ClosingIdle,
}

/// Whether the loop drains, and who is inside.
#[derive(Debug, Default)]
pub struct Drain {
    phase: Cell<DrainPhase>,
    next_id: Cell<u64>,
    /// Everyone inside, and whom to wake at each step; `None` before the first wait.
    tasks: RefCell<HashMap<u64, Option<Waker>>>,
    /// Woken when the last one leaves.
    empty_waker: RefCell<Option<Waker>>,
}

/// A task that is inside until it drops this.
#[derive(Debug)]
pub struct DrainGuard {
    drain: Rc<Drain>,
    id: u64,
    has_waker: Cell<bool>,
}

impl Drain {
    pub fn begin(&self) {
        self.advance_to(DrainPhase::Draining);
    }

    /// Lets go of those who only wait for what may come.
    pub fn close_idle(&self) {
        self.advance_to(DrainPhase::ClosingIdle);
    }

    fn advance_to(&self, step: DrainPhase) {
        self.phase.set(step);
        let wakers: Vec<Waker> = self.tasks.borrow().values().flatten().cloned().collect();
        wakers.into_iter().for_each(Waker::wake);
    }

    pub fn has_begun(&self) -> bool {
        self.phase.get() >= DrainPhase::Draining
    }

    pub fn register(self: &Rc<Self>) -> DrainGuard {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        self.tasks.borrow_mut().insert(id, None);
        DrainGuard { drain: Rc::clone(self), id, has_waker: Cell::new(false) }
    }

    /// Waits until nobody is inside.
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

    /// Whether the drain has begun; if not, the task is woken when it does. Always to be asked from
    /// the same task: its waker is kept from the first time on, so that asking costs nothing.
    pub fn poll_begun(&self, cx: &Context<'_>) -> bool {
        self.poll_reached(DrainPhase::Draining, cx)
    }

    /// As [`Guest::poll_begun`], for those who wait for what may come.
    pub fn poll_closing_idle(&self, cx: &Context<'_>) -> bool {
        self.poll_reached(DrainPhase::ClosingIdle, cx)
    }

    fn poll_reached(&self, step: DrainPhase, cx: &Context<'_>) -> bool {
        if self.drain.phase.get() >= step {
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
        let mut inside = self.drain.tasks.borrow_mut();
        inside.remove(&self.id);
        if inside.is_empty()
            && let Some(last) = self.drain.empty_waker.take()
        {
            last.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Waker;

    #[test]
    fn everyone_is_told_and_the_last_one_is_waited_for() {
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
