//! The addresses of one server: what its name stands for, and how long that is believed.
//!
//! A name is looked up again when what is known of it is too old. Whoever answers no more under a name is
//! not connected to, and connections to it are used no more. If nobody can say what a name stands for, what
//! was known last holds: a broken resolver takes no working server away. The system's resolver is asked, on
//! a thread of its own.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use tokio::net::lookup_host;

use crate::clock::Clock;

pub struct Names {
    host: String,
    port: u16,
    /// The host is an address, which nobody need be asked for.
    fixed: bool,
    known: RefCell<Vec<SocketAddr>>,
    /// None of them could be connected to.
    doubted: Cell<bool>,
    /// When the name was last asked for.
    asked: Cell<Option<Instant>>,
    /// Whose turn it is, among those known.
    next: Cell<usize>,
    /// Goes up when an address is known no more.
    era: Cell<u32>,
    /// How long what is known is believed.
    every: Duration,
    clock: Clock,
}

impl Names {
    pub fn new(host: &str, port: u16, every: Duration, clock: Clock) -> Rc<Names> {
        let address = host.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, port));
        Rc::new(Names {
            host: host.to_owned(),
            port,
            fixed: address.is_some(),
            known: RefCell::new(address.into_iter().collect()),
            doubted: Cell::new(false),
            asked: Cell::new(None),
            next: Cell::new(0),
            era: Cell::new(0),
            every,
            clock,
        })
    }

    /// All addresses, the one whose turn it is first. What is too old is used once more, while the name is asked
    /// for: nobody waits for a resolver who need not.
    pub async fn in_turn(self: &Rc<Self>) -> io::Result<Vec<SocketAddr>> {
        if self.known.borrow().is_empty() || self.doubted.take() {
            self.look_up().await?;
        } else if self.is_due() {
            self.refresh();
        }
        let mut addresses = self.known.borrow().clone();
        let turn = self.next.get();
        self.next.set(turn.wrapping_add(1));
        let count = addresses.len().max(1);
        addresses.rotate_left(turn % count);
        Ok(addresses)
    }

    /// Whether what is known is too old.
    pub fn is_due(&self) -> bool {
        let recent = |asked: Instant| self.clock.instant().duration_since(asked) < self.every;
        !self.fixed && !self.asked.get().is_some_and(recent)
    }

    /// What is known led nowhere: the name is asked for before the next try.
    pub fn doubt(&self) {
        self.doubted.set(!self.fixed);
    }

    /// Asks what the name stands for, beside whatever goes on.
    pub fn refresh(self: &Rc<Self>) {
        let names = Rc::clone(self);
        tokio::task::spawn_local(async move {
            // What was known holds, if nobody can say more.
            let _ = names.look_up().await;
        });
    }

    async fn look_up(&self) -> io::Result<()> {
        // At once, so that one asks and not everyone who comes meanwhile.
        self.asked.set(Some(self.clock.instant()));
        self.learn(lookup_host((self.host.as_str(), self.port)).await.map(Iterator::collect))
    }

    fn learn(&self, answer: io::Result<Vec<SocketAddr>>) -> io::Result<()> {
        let mut known = self.known.borrow_mut();
        match answer {
            Ok(addresses) if !addresses.is_empty() => {
                if known.iter().any(|address| !addresses.contains(address)) {
                    self.era.set(self.era.get().wrapping_add(1));
                }
                *known = addresses;
                Ok(())
            }
            answer if known.is_empty() => {
                let why = answer.err().map_or_else(|| String::from("it has no address"), |error| error.to_string());
                Err(io::Error::other(format!("`{}` can not be resolved: {why}", self.host)))
            }
            _ => Ok(()),
        }
    }

    /// Changes when an address is known no more.
    pub fn era(&self) -> u32 {
        self.era.get()
    }

    pub fn has(&self, address: &SocketAddr) -> bool {
        self.known.borrow().contains(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn names() -> Rc<Names> {
        Names::new("api.internal", 80, Duration::from_secs(30), Clock::manual(0))
    }

    #[test]
    fn an_address_that_leaves_a_name_begins_another_era() {
        let names = names();
        let (a, b, c) = (address("10.0.0.1:80"), address("10.0.0.2:80"), address("10.0.0.3:80"));
        names.learn(Ok(vec![a, b])).unwrap();
        names.learn(Ok(vec![b, a, c])).unwrap();
        assert_eq!(names.era(), 0, "one came, and none went");
        names.learn(Ok(vec![c])).unwrap();
        assert!(names.era() == 1 && names.has(&c) && !names.has(&a));
    }

    #[test]
    fn a_resolver_that_fails_takes_nothing_away() {
        let names = names();
        let why = names.learn(Err(io::Error::other("no server"))).unwrap_err().to_string();
        assert_eq!(why, "`api.internal` can not be resolved: no server");
        assert!(names.learn(Ok(Vec::new())).is_err());
        let a = address("10.0.0.1:80");
        names.learn(Ok(vec![a])).unwrap();
        names.learn(Err(io::Error::other("no server"))).unwrap();
        names.learn(Ok(Vec::new())).unwrap();
        assert!(names.has(&a) && names.era() == 0);
    }

    #[test]
    fn an_address_is_never_asked_for() {
        let names = Names::new("::1", 80, Duration::from_secs(30), Clock::manual(0));
        assert!(!names.is_due() && names.has(&address("[::1]:80")));
        names.doubt();
        assert!(!names.is_due() && !names.doubted.get());
    }
}
