//! What the listeners of a loop go by, and what all connections of the gateway count against. A reload
//! changes it for the connections that come after.

use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use rustls::{Error, ServerConfig};

use super::connection_limit::Capacity;
use super::drain::Drain;
use super::tls;
use crate::config::listen::Listen;
use crate::metrics::events::ListenerMeter;
use crate::proxy::worker_state::Hall;
use transom_limiter::ip_prefix::Networks;

/// What a configuration says of connections, made ready; shared by all loops.
#[derive(Debug)]
pub struct Terms {
    /// One for each of `listen.https`.
    tls: Vec<Arc<ServerConfig>>,
    /// Whose connections begin with a PROXY header.
    proxies: Networks<()>,
}

/// The listeners of one loop have this in common.
pub struct Lobby {
    pub hall: Rc<Hall>,
    pub drain: Rc<Drain>,
    pub capacity: Arc<Capacity>,
    terms: RefCell<Arc<Terms>>,
}

/// One address, as one loop listens on it.
pub struct Listener {
    pub lobby: Rc<Lobby>,
    pub meter: ListenerMeter,
    /// Position in `listen.https`; `None`: it speaks HTTP in the clear.
    https: Option<usize>,
}

impl Terms {
    /// `former` is what held before. What did not change is kept, so that sessions can be resumed.
    pub fn new(listen: &Listen, former: Option<(&Listen, &Terms)>) -> Result<Arc<Terms>, Error> {
        let mut all = Vec::new();
        for (position, https) in listen.https.iter().enumerate() {
            let same = former.and_then(|(listen, terms)| {
                let before = listen.https.get(position).filter(|before| before.tls == https.tls);
                before.and(terms.tls.get(position))
            });
            all.push(match same {
                Some(same) => Arc::clone(same),
                None => tls::server(&https.tls)?,
            });
        }
        let proxies = Networks::new(listen.proxy_protocol.iter().map(|network| (*network, ())));
        Ok(Arc::new(Terms { tls: all, proxies }))
    }
}

impl Lobby {
    pub fn new(hall: Rc<Hall>, capacity: Arc<Capacity>, terms: Arc<Terms>) -> Lobby {
        Lobby { hall, drain: Rc::default(), capacity, terms: RefCell::new(terms) }
    }

    pub fn adopt(&self, terms: Arc<Terms>) {
        *self.terms.borrow_mut() = terms;
    }

    /// Whether connections from an address begin with a PROXY header.
    pub fn is_proxy(&self, peer: IpAddr) -> bool {
        self.terms.borrow().proxies.of(peer).is_some()
    }
}

impl Listener {
    pub fn new(lobby: Rc<Lobby>, meter: ListenerMeter, https: Option<usize>) -> Listener {
        Listener { lobby, meter, https }
    }

    pub fn is_secure(&self) -> bool {
        self.https.is_some()
    }

    /// How TLS is spoken here, if it is.
    pub fn tls(&self) -> Option<Arc<ServerConfig>> {
        self.https.and_then(|position| self.lobby.terms.borrow().tls.get(position).cloned())
    }
}
