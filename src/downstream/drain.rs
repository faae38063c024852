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
enum Step {
    #[default]
    Open,
    Begun,
    Released,
}

/// Whether the loop drains, and who is inside.
#[derive(Debug, Default)]
pub struct Drain {
    step: Cell<Step>,
    next: Cell<u64>,
    /// Everyone inside, and whom to wake at each step; `None` before the first wait.
    inside: RefCell<HashMap<u64, Option<Waker>>>,
    /// Woken when the last one leaves.
    last: RefCell<Option<Waker>>,
}

/// A task that is inside until it drops this.
#[derive(Debug)]
pub struct DrainGuard {
    drain: Rc<Drain>,
    id: u64,
    waits: Cell<bool>,
}

impl Drain {
    pub fn begin(&self) {
        self.reach(Step::Begun);
    }

    /// Lets go of those who only wait for what may come.
    pub fn release(&self) {
        self.reach(Step::Released);
    }

    fn reach(&self, step: Step) {
        self.step.set(step);
        let wakers: Vec<Waker> = self.inside.borrow().values().flatten().cloned().collect();
        wakers.into_iter().for_each(Waker::wake);
    }

    pub fn has_begun(&self) -> bool {
        self.step.get() >= Step::Begun
    }

    pub fn enter(self: &Rc<Self>) -> DrainGuard {
        let id = self.next.get();
        self.next.set(id + 1);
        self.inside.borrow_mut().insert(id, None);
        DrainGuard { drain: Rc::clone(self), id, waits: Cell::new(false) }
    }

    /// Waits until nobody is inside.
    pub async fn ended(&self) {
        poll_fn(|cx| {
            if self.inside.borrow().is_empty() {
                return Poll::Ready(());
            }
            *self.last.borrow_mut() = Some(cx.waker().clone());
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
        self.poll_reached(Step::Begun, cx)
    }

    /// As [`Guest::poll_begun`], for those who wait for what may come.
    pub fn poll_released(&self, cx: &Context<'_>) -> bool {
        self.poll_reached(Step::Released, cx)
    }

    fn poll_reached(&self, step: Step, cx: &Context<'_>) -> bool {
        if self.drain.step.get() >= step {
            return true;
        }
        if !self.waits.replace(true) {
            self.drain.inside.borrow_mut().insert(self.id, Some(cx.waker().clone()));
        }
        false
    }
}

impl Drop for DrainGuard {
    fn drop(&mut self) {
        let mut inside = self.drain.inside.borrow_mut();
        inside.remove(&self.id);
        if inside.is_empty()
            && let Some(last) = self.drain.last.take()
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
        let (a, b) = (drain.enter(), drain.enter());
        let cx = &mut Context::from_waker(Waker::noop());
        assert!(!a.poll_begun(cx) && !b.poll_begun(cx));
        drain.begin();
        assert!(a.poll_begun(cx) && b.poll_begun(cx) && !a.poll_released(cx));
        drain.release();
        assert!(a.poll_released(cx));
        let mut ended = std::pin::pin!(drain.ended());
        assert!(ended.as_mut().poll(cx).is_pending());
        drop(a);
        assert!(ended.as_mut().poll(cx).is_pending());
        drop(b);
        assert!(ended.as_mut().poll(cx).is_ready());
    }
}
