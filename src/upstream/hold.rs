//! Requests that wait while no server of an upstream is reachable, in one worker.
//!
//! They are served in order of arrival. A request that has a [`Turn`] tries to connect; while no server is reachable, only
//! one has it, and pauses between attempts that fail. An attempt that takes long, such as at a server that drops packets,
//! goes on while the next servers are tried. Each connection that succeeds lets one more request connect at the same time,
//! as in the slow start of TCP, so that a server that is back is not flooded. While the queue is in use, every new request
//! of the upstream joins it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

/// The pause after an attempt that failed.
pub const ATTEMPT_PAUSE: Duration = Duration::from_millis(50);

/// How long a server may not answer an attempt before the next server is tried beside it.
pub const NEXT_SERVER_DELAY: Duration = Duration::from_millis(250);

pub struct HoldQueue {
    /// By arrival.
    waiting: RefCell<BTreeMap<Ticket, oneshot::Sender<Turn>>>,
    next_ticket: Cell<Ticket>,
    turns: Cell<usize>,
    turns_max: Cell<usize>,
    /// No attempt begins before.
    paused_until: Cell<Option<Instant>>,
    last_failure: RefCell<String>,
}

/// Orders requests by arrival.
pub type Ticket = u64;

/// The right to connect. Its drop passes it on.
pub struct Turn(Rc<HoldQueue>);

/// A place in the queue; its drop leaves it.
struct Place<'q> {
    queue: &'q HoldQueue,
    ticket: Ticket,
}

impl Default for HoldQueue {
    fn default() -> HoldQueue {
        HoldQueue {
            waiting: RefCell::default(),
            next_ticket: Cell::new(0),
            turns: Cell::new(0),
            turns_max: Cell::new(1),
            paused_until: Cell::new(None),
            last_failure: RefCell::default(),
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.queue.waiting.borrow_mut().remove(&self.ticket);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.turns.set(self.0.turns.get() - 1);
        self.0.give_turns();
    }
}

impl HoldQueue {
    /// Whether a request waits.
    pub fn is_in_use(&self) -> bool {
        self.turns.get() > 0 || !self.waiting.borrow().is_empty()
    }

    pub fn new_ticket(&self) -> Ticket {
        self.next_ticket.replace(self.next_ticket.get() + 1)
    }

    /// Waits until the request may connect.
    pub async fn turn(self: &Rc<HoldQueue>, ticket: Ticket) -> Turn {
        loop {
            let (give, given) = oneshot::channel();
            self.waiting.borrow_mut().insert(ticket, give);
            let _place = Place { queue: self, ticket };
            self.give_turns();
            // A sender leaves the queue only with a turn.
            if let Ok(turn) = given.await {
                return turn;
            }
        }
    }

    fn give_turns(self: &Rc<HoldQueue>) {
        while self.turns.get() < self.turns_max.get() {
            let first = self.waiting.borrow_mut().pop_first();
            let Some((_, give)) = first else { return };
            self.turns.set(self.turns.get() + 1);
            // The turn of a request that has left is dropped, and goes to the next.
            drop(give.send(Turn(Rc::clone(self))));
        }
    }

    /// How long the next attempt has to wait.
    pub fn pause(&self, now: Instant) -> Duration {
        self.paused_until.get().map_or(Duration::ZERO, |until| until.saturating_duration_since(now))
    }

    pub fn connect_failed(&self, failure: String, now: Instant) {
        self.turns_max.set(1);
        self.paused_until.set(Some(now + ATTEMPT_PAUSE));
        self.last_failure.replace(failure);
    }

    pub fn connected(&self) {
        self.turns_max.set(self.turns_max.get() + 1);
        self.paused_until.set(None);
    }

    pub fn last_failure(&self) -> String {
        self.last_failure.borrow().clone()
    }

    /// Whether the request with this ticket, whose attempt has failed, makes the next one: no other does, and none is older.
    pub fn keeps_turn(&self, ticket: Ticket) -> bool {
        self.turns.get() <= self.turns_max.get()
            && self.waiting.borrow().first_key_value().is_none_or(|(first, _)| ticket < *first)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;
    use transom_runtime::clock::Clock;

    fn poll<T>(waiting: std::pin::Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match waiting.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(turn) => Some(turn),
            Poll::Pending => None,
        }
    }

    #[test]
    fn requests_connect_in_order_and_more_with_each_connection() {
        let queue = Rc::new(HoldQueue::default());
        assert!(!queue.is_in_use());
        let tickets: Vec<Ticket> = (0..5).map(|_| queue.new_ticket()).collect();
        let (mut second, mut first) = (pin!(queue.turn(tickets[1])), pin!(queue.turn(tickets[0])));
        // The queue was empty.
        let turn = poll(second.as_mut()).unwrap();
        assert!(poll(first.as_mut()).is_none() && queue.is_in_use());
        // An older request waits, and makes the next attempt.
        assert!(!queue.keeps_turn(tickets[1]));
        drop(turn);
        let turn = poll(first.as_mut()).unwrap();
        assert!(queue.keeps_turn(tickets[0]));
        let mut rest: Vec<_> = tickets[2..].iter().map(|ticket| Box::pin(queue.turn(*ticket))).collect();
        assert!(rest.iter_mut().all(|waiting| poll(waiting.as_mut()).is_none()));
        // Two may connect now. One that has left is skipped.
        queue.connected();
        drop(rest.remove(0));
        drop(turn);
        let turns: Vec<Turn> = rest.iter_mut().filter_map(|waiting| poll(waiting.as_mut())).collect();
        assert_eq!(turns.len(), 2);
        // After a failure, one.
        let now = Clock::manual(0).instant();
        queue.connect_failed(String::from("refused"), now);
        assert_eq!((queue.pause(now), queue.last_failure().as_str()), (ATTEMPT_PAUSE, "refused"));
        assert!(!queue.keeps_turn(tickets[3]));
        drop(turns);
        drop(rest);
        assert!(!queue.is_in_use());
    }

    #[test]
    fn a_turn_of_a_request_that_leaves_is_passed_on() {
        let queue = Rc::new(HoldQueue::default());
        let tickets = (queue.new_ticket(), queue.new_ticket(), queue.new_ticket());
        let turn = poll(pin!(queue.turn(tickets.0)).as_mut());
        let mut second = Box::pin(queue.turn(tickets.1));
        let mut third = pin!(queue.turn(tickets.2));
        assert!(poll(second.as_mut()).is_none() && poll(third.as_mut()).is_none());
        // The second has the turn, and leaves before it takes it.
        drop(turn);
        drop(second);
        assert!(poll(third.as_mut()).is_some());
        assert!(!queue.is_in_use());
    }
}
