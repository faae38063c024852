//! Coarse timers of one event loop: how long something may stand still.
//!
//! Every request arms and disarms several, and hardly one ever fires; so setting one is a store, and
//! all are looked through ten times a second. A timer never fires early, and at most two ticks late.
//! One timer belongs to one task, and is armed for one purpose at a time.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::task::{Context, Waker};
use std::time::Duration;

const TICK: Duration = Duration::from_millis(100);
/// The tick at which a disarmed timer fires.
const NEVER: u64 = u64::MAX;

/// All timers of a loop.
#[derive(Debug, Default)]
pub struct Timers {
    tick: Cell<u64>,
    all: RefCell<Vec<Weak<Timer>>>,
}

/// One timer.
#[derive(Debug)]
pub struct Timer {
    timers: Rc<Timers>,
    due: Cell<u64>,
    /// The task to wake, kept from the first time it asks.
    waker: RefCell<Option<Waker>>,
}

impl Timers {
    /// A timer for the task that will ask it; disarmed.
    pub fn new_timer(self: &Rc<Self>) -> Rc<Timer> {
        let timer = Rc::new(Timer { timers: Rc::clone(self), due: Cell::new(NEVER), waker: RefCell::default() });
        self.all.borrow_mut().push(Rc::downgrade(&timer));
        timer
    }

    /// How many tenths of a second have passed.
    pub fn tick(&self) -> u64 {
        self.tick.get()
    }

    /// Lets time pass, as long as it is polled.
    pub async fn run(&self) {
        let mut ticks = tokio::time::interval(TICK);
        // After a pause, such as a suspended machine, nothing should fire that had no time to run.
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
    /// Arms the timer for so long from now, whatever it was armed for before.
    pub fn arm(&self, limit: Duration) {
        let ticks = whole_ms(limit).div_ceil(whole_ms(TICK));
        // The tick that is under way is not a whole one.
        self.due.set(self.timers.tick.get() + ticks + 1);
    }

    /// Lets the time that is under way, or has just passed, last so much longer.
    pub fn extend(&self, more: Duration) {
        self.due.set(self.due.get().saturating_add(whole_ms(more).div_ceil(whole_ms(TICK))));
    }

    pub fn disarm(&self) {
        self.due.set(NEVER);
    }

    /// Disarms the timer, and forgets the task that it belonged to: another will ask it next.
    pub fn detach(&self) {
        self.disarm();
        self.waker.take();
    }

    /// Whether the time is up; if not, the task is woken when it is.
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

/// Milliseconds without the detour over 128 bits.
const fn whole_ms(duration: Duration) -> u64 {
    duration.as_secs() * 1000 + duration.subsec_millis() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_fires_after_its_time_and_not_before() {
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
        timer.extend(Duration::from_millis(100));
        assert!(!timer.poll_expired(cx));
        timers.advance_tick();
        assert!(timer.poll_expired(cx));
        timer.disarm();
        assert!(!timer.poll_expired(cx));
    }

    #[test]
    fn timers_that_are_gone_are_forgotten() {
        let timers = Rc::new(Timers::default());
        drop(timers.new_timer());
        timers.advance_tick();
        assert!(timers.all.borrow().is_empty());
    }
}
