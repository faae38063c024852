//! Coarse timers of one worker, for timeouts.
//!
//! Every request arms and disarms several timers, and they rarely expire. So arming is one store, and all timers are
//! checked ten times a second. A timer never expires early, and at most two ticks (200 ms) late. A timer belongs to one
//! task, and is armed for one purpose at a time.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::task::{Context, Waker};
use std::time::Duration;

const TICK: Duration = Duration::from_millis(100);
/// `due` of a disarmed timer.
const NEVER: u64 = u64::MAX;

/// All timers of a worker.
#[derive(Debug, Default)]
pub struct Timers {
    tick: Cell<u64>,
    all: RefCell<Vec<Weak<Timer>>>,
}

/// A timer of one task.
#[derive(Debug)]
pub struct Timer {
    timers: Rc<Timers>,
    /// The tick at which the timer expires.
    due: Cell<u64>,
    /// The task that polled last.
    waker: RefCell<Option<Waker>>,
}

impl Timers {
    /// Creates a disarmed timer for the task that polls it first.
    pub fn new_timer(self: &Rc<Self>) -> Rc<Timer> {
        let timer = Rc::new(Timer { timers: Rc::clone(self), due: Cell::new(NEVER), waker: RefCell::default() });
        self.all.borrow_mut().push(Rc::downgrade(&timer));
        timer
    }

    /// Ticks (tenths of a second) since the start.
    pub fn tick(&self) -> u64 {
        self.tick.get()
    }

    /// Advances the timers for as long as it is polled.
    pub async fn run(&self) {
        let mut ticks = tokio::time::interval(TICK);
        // After a pause, such as a suspended machine, tasks get time to run before their timers expire.
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.advance_tick();
        }
    }

    fn advance_tick(&self) {
        let tick = self.tick.get() + 1;
        self.tick.set(tick);
        let mut due = Vec::new();
        self.all.borrow_mut().retain(|timer| {
            let timer = timer.upgrade();
            if let Some(timer) = timer.as_ref().filter(|timer| timer.due.get() <= tick) {
                due.extend(timer.waker.borrow().clone());
            }
            timer.is_some()
        });
        due.into_iter().for_each(Waker::wake);
    }
}

impl Timer {
    /// Arms the timer to expire after `limit`, and replaces an earlier time.
    pub fn arm(&self, limit: Duration) {
        let ticks = whole_ms(limit).div_ceil(whole_ms(TICK));
        // One more, because the current tick has partly passed.
        self.due.set(self.timers.tick.get() + ticks + 1);
    }

    pub fn disarm(&self) {
        self.due.set(NEVER);
    }

    /// Disarms the timer and forgets its task, so that another task can use it.
    pub fn detach(&self) {
        self.disarm();
        self.waker.take();
    }

    /// Whether the timer has expired; if not, the task is woken when it does.
    pub fn poll_expired(&self, cx: &Context<'_>) -> bool {
        if self.due.get() <= self.timers.tick.get() {
            return true;
        }
        let mut waker = self.waker.borrow_mut();
        if waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
            *waker = Some(cx.waker().clone());
        }
        false
    }
}

/// Whole milliseconds, without the 128-bit arithmetic of `as_millis`.
const fn whole_ms(duration: Duration) -> u64 {
    duration.as_secs() * 1000 + duration.subsec_millis() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_expires_after_its_time_and_not_before() {
        let timers = Rc::new(Timers::default());
        let timer = timers.new_timer();
        let cx = &Context::from_waker(Waker::noop());
        assert!(!timer.poll_expired(cx));
        timer.arm(Duration::from_millis(250));
        for _ in 0..3 {
            timers.advance_tick();
            assert!(!timer.poll_expired(cx));
        }
        timers.advance_tick();
        assert!(timer.poll_expired(cx));
        timer.disarm();
        assert!(!timer.poll_expired(cx));
    }

    #[test]
    fn dropped_timers_are_removed() {
        let timers = Rc::new(Timers::default());
        drop(timers.new_timer());
        timers.advance_tick();
        assert!(timers.all.borrow().is_empty());
    }
}
