//! What the listeners of a loop go by, and what all connections of the gateway count against. A reload
//! changes it for the connections that come after.

use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

use rustls::{Error, ServerConfig};

use super::connection_limit::ConnectionLimit;
use super::drain::Drain;
use super::tls;
use crate::config::listen::Listen;
use crate::metrics::events::ListenerMetrics;
use crate::proxy::worker_state::WorkerState;
use transom_limiter::ip_prefix::Networks;

/// What a configuration says of connections, made ready; shared by all loops.
#[derive(Debug)]
pub struct ListenerConfig {
    /// One for each of `listen.https`.
    tls: Vec<Arc<ServerConfig>>,
    /// Whose connections begin with a PROXY header.
    proxies: Networks<()>,
}

/// The listeners of one loop have this in common.
pub struct ListenerContext {
    pub worker: Rc<WorkerState>,
    pub drain: Rc<Drain>,
    pub connection_limit: Arc<ConnectionLimit>,
    config: RefCell<Arc<ListenerConfig>>,
}

/// One address, as one loop listens on it.
pub struct Listener {
    pub listener_context: Rc<ListenerContext>,
    pub meter: ListenerMetrics,
    /// Position in `listen.https`; `None`: it speaks HTTP in the clear.
    https_index: Option<usize>,
}

impl ListenerConfig {
    /// `former` is what held before. What did not change is kept, so that sessions can be resumed.
    pub fn new(listen: &Listen, former: Option<(&Listen, &ListenerConfig)>) -> Result<Arc<ListenerConfig>, Error> {
        let mut all = Vec::new();
        for (position, https) in listen.https.iter().enumerate() {
            let same = former.and_then(|(listen, terms)| {
                let before = listen.https.get(position).filter(|before| before.tls == https.tls);
                before.and(terms.tls.get(position))
            });
            all.push(match same {
                Some(same) => Arc::clone(same),
                None => tls::server_config(&https.tls)?,
            });
        }
        let proxies = Networks::new(listen.proxy_protocol.iter().map(|network| (*network, ())));
        Ok(Arc::new(ListenerConfig { tls: all, proxies }))
    }
}

impl ListenerContext {
    pub fn new(worker: Rc<WorkerState>, capacity: Arc<ConnectionLimit>, terms: Arc<ListenerConfig>) -> ListenerContext {
        ListenerContext { worker, drain: Rc::default(), connection_limit: capacity, config: RefCell::new(terms) }
    }

    pub fn apply(&self, terms: Arc<ListenerConfig>) {
        *self.config.borrow_mut() = terms;
    }

    /// Whether connections from an address begin with a PROXY header.
    pub fn expects_proxy_header(&self, peer: IpAddr) -> bool {
        self.config.borrow().proxies.of(peer).is_some()
    }
}

impl Listener {
    pub fn new(listener_context: Rc<ListenerContext>, meter: ListenerMetrics, https: Option<usize>) -> Listener {
        Listener { listener_context, meter, https_index: https }
    }

    pub fn is_tls(&self) -> bool {
        self.https_index.is_some()
    }

    /// How TLS is spoken here, if it is.
    pub fn tls_config(&self) -> Option<Arc<ServerConfig>> {
        self.https_index.and_then(|position| self.listener_context.config.borrow().tls.get(position).cloned())
    }
}
