//! One server of an upstream, as one event loop uses it: its connections, what is under way there, and
//! who waits for a connection where their number is limited.
//!
//! A limit of the whole process is divided between the loops, so none has to ask another; each has
//! room for one at least. Whoever waits is served in the order of coming, with a connection that
//! became free, or with the room of one that was closed.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};

use tokio::sync::oneshot;

use super::connection::UpstreamConnection;
use super::pool::Pool;
use crate::config::upstream_policy::Circuit;
use crate::io_stream::descriptor_limit;
use crate::metrics::upstream::ActiveGauge;

/// Idle connections to all servers together take one of so many descriptors at most.
const IDLE_SHARE: u64 = 4;

pub struct ServerPool {
    pub pool: Rc<Pool>,
    under_way: Cell<u32>,
    meter: ActiveGauge,
    /// Connections that this loop may have; `None`: as many as it takes.
    most: Cell<Option<u32>>,
    /// Those that stand or are being made, where they are limited.
    connections: Cell<u32>,
    waiting: RefCell<VecDeque<Waiting>>,
}

/// What somebody who waited is given.
pub enum Offer {
    Carrier(UpstreamConnection),
    Room(ConnectionPermit),
}

/// Somebody who waits.
struct Waiting {
    offer: oneshot::Sender<Offer>,
    /// Whether a place on a shared connection will do.
    shares: bool,
}

/// Room for one connection, for as long as that lasts. The place has the connections, so these do not have it.
pub struct ConnectionPermit(Weak<ServerPool>);

/// One request at a server, to the end of its answer.
pub struct ActiveRequest(Rc<ServerPool>);

impl ServerPool {
    pub fn new(pool: Rc<Pool>, meter: ActiveGauge) -> Rc<ServerPool> {
        Rc::new(ServerPool {
            pool,
            under_way: Cell::new(0),
            meter,
            most: Cell::new(None),
            connections: Cell::new(0),
            waiting: RefCell::default(),
        })
    }

    /// Takes over this loop's part of the limits, of so many loops. There are `servers` in all upstreams together.
    pub fn limit(&self, circuit: &Circuit, owner: usize, loops: usize, servers: usize) {
        self.most.set(circuit.max_connections.map(|max| part(max, owner, loops)));
        // Idle connections to one server leave descriptors for clients and for connections to others.
        let spare = descriptor_limit() / IDLE_SHARE / servers.max(1) as u64;
        let idle = circuit.max_idle_connections.min(u32::try_from(spare).unwrap_or(u32::MAX));
        self.pool.idle_max.set(part(idle, owner, loops) as usize);
    }

    pub fn under_way(&self) -> u32 {
        self.under_way.get()
    }

    pub fn visit(self: &Rc<ServerPool>) -> ActiveRequest {
        self.under_way.set(self.under_way.get() + 1);
        self.meter.started();
        ActiveRequest(Rc::clone(self))
    }

    /// Room for one more connection; `Err` if there is none, and `None` where nobody counts.
    pub fn room(self: &Rc<ServerPool>) -> Result<Option<ConnectionPermit>, Full> {
        match self.most.get() {
            None => Ok(None),
            Some(most) if self.connections.get() < most => Ok(Some(self.slot())),
            Some(_) => Err(Full),
        }
    }

    fn slot(self: &Rc<ServerPool>) -> ConnectionPermit {
        self.connections.set(self.connections.get() + 1);
        ConnectionPermit(Rc::downgrade(self))
    }

    /// Takes a place in the queue; `shares`: also for a place on a shared connection.
    pub fn queue(&self, shares: bool) -> oneshot::Receiver<Offer> {
        let (offer, offered) = oneshot::channel();
        let mut waiting = self.waiting.borrow_mut();
        waiting.retain(|waiting| !waiting.offer.is_closed());
        waiting.push_back(Waiting { offer, shares });
        offered
    }

    /// Lets all who wait onto a shared connection that has just been made, and that they need not wait for.
    pub fn invite(&self) {
        let first = || self.waiting.borrow().iter().position(|waiting| waiting.shares);
        while let Some(first) = first() {
            let Some(carrier) = self.pool.share(1) else { return };
            let next = self.waiting.borrow_mut().remove(first);
            // Whoever has gone needs none.
            drop(next.map(|next| next.offer.send(Offer::Carrier(carrier))));
        }
    }

    /// Gives a connection to whoever waits, or back to the pool.
    pub fn put(&self, carrier: UpstreamConnection) {
        // Of a shared connection the stream has ended, and that is all.
        let UpstreamConnection::Alone(mut connection) = carrier else { return };
        if self.most.get().is_none() || self.waiting.borrow().is_empty() || !connection.is_ready() {
            return self.pool.put(connection);
        }
        loop {
            let Some(next) = self.waiting.borrow_mut().pop_front() else { return self.pool.put(connection) };
            match next.offer.send(Offer::Carrier(UpstreamConnection::Alone(connection))) {
                Ok(()) => return,
                // That one has gone.
                Err(Offer::Carrier(UpstreamConnection::Alone(back))) => connection = back,
                Err(_) => return,
            }
        }
    }
}

/// There is no room.
pub struct Full;

impl ActiveRequest {
    pub fn place(&self) -> &ServerPool {
        &self.0
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.0.under_way.set(self.0.under_way.get() - 1);
        self.0.meter.ended();
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let Some(place) = self.0.upgrade() else { return };
        place.connections.set(place.connections.get() - 1);
        // Under a limit that was lowered meanwhile there may be no room yet.
        if place.most.get().is_some_and(|most| place.connections.get() >= most) {
            return;
        }
        let next = place.waiting.borrow_mut().pop_front();
        if let Some(next) = next {
            // If that one has gone, the slot comes back here and goes to the next.
            drop(next.offer.send(Offer::Room(place.slot())));
        }
    }
}

/// One loop's part of a number; all parts together are the number, or one each if that is more. Of 0 it is 0.
fn part(max: u32, owner: usize, loops: usize) -> u32 {
    let (each, rest) = (max as usize / loops.max(1), max as usize % loops.max(1));
    u32::try_from(each + usize::from(owner < rest)).unwrap_or(u32::MAX).max(max.min(1))
}

#[cfg(test)]
mod tests {
    use super::part;

    #[test]
    fn parts_add_up() {
        let sum = |max, loops| (0..loops).map(|owner| part(max, owner, loops)).sum::<u32>();
        for (max, loops) in [(1, 1), (4, 4), (10, 4), (7, 2), (1_000_000, 7)] {
            assert_eq!(sum(max, loops), max);
        }
        assert_eq!((sum(2, 8), sum(0, 8)), (8, 0));
    }
}
