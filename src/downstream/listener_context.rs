//! What the listeners of a worker share: TLS configurations, peers that send a PROXY header, the connection limit and
//! the drain. A reload replaces the configuration for connections accepted afterwards.

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

/// The compiled configuration of listeners; shared by all workers.
#[derive(Debug)]
pub struct ListenerConfig {
    /// One per entry of `listen.https`.
    tls: Vec<Arc<ServerConfig>>,
    /// Networks whose connections begin with a PROXY header (`listen.proxy_protocol`).
    proxies: Networks<()>,
}

/// Shared by the listeners of one worker.
pub struct ListenerContext {
    pub worker: Rc<WorkerState>,
    pub drain: Rc<Drain>,
    pub connection_limit: Arc<ConnectionLimit>,
    config: RefCell<Arc<ListenerConfig>>,
}

/// A listening address of one worker.
pub struct Listener {
    pub listener_context: Rc<ListenerContext>,
    pub metrics: ListenerMetrics,
    /// Index in `listen.https`; `None`: HTTP without TLS.
    https_index: Option<usize>,
}

impl ListenerConfig {
    /// Compiles `listen`. TLS configurations that are equal in `previous` are reused, so that clients can resume their
    /// sessions.
    pub fn new(listen: &Listen, previous: Option<(&Listen, &ListenerConfig)>) -> Result<Arc<ListenerConfig>, Error> {
        let mut servers = Vec::new();
        for (index, https) in listen.https.iter().enumerate() {
            let unchanged = previous.and_then(|(listen, config)| {
                let before = listen.https.get(index).filter(|before| *before == https);
                before.and(config.tls.get(index))
            });
            servers.push(match unchanged {
                Some(unchanged) => Arc::clone(unchanged),
                None => tls::server_config(https)?,
            });
        }
        let proxies = Networks::new(listen.proxy_protocol.iter().map(|network| (*network, ())));
        Ok(Arc::new(ListenerConfig { tls: servers, proxies }))
    }
}

impl ListenerContext {
    pub fn new(
        worker: Rc<WorkerState>,
        connection_limit: Arc<ConnectionLimit>,
        config: Arc<ListenerConfig>,
    ) -> ListenerContext {
        ListenerContext { worker, drain: Rc::default(), connection_limit, config: RefCell::new(config) }
    }

    /// Replaces the configuration. Open connections keep theirs.
    pub fn apply(&self, config: Arc<ListenerConfig>) {
        *self.config.borrow_mut() = config;
    }

    /// Whether connections from `peer` begin with a PROXY header.
    pub fn expects_proxy_header(&self, peer: IpAddr) -> bool {
        self.config.borrow().proxies.most_specific(peer).is_some()
    }
}

impl Listener {
    pub fn new(listener_context: Rc<ListenerContext>, meter: ListenerMetrics, https: Option<usize>) -> Listener {
        Listener { listener_context, metrics: meter, https_index: https }
    }

    pub fn is_tls(&self) -> bool {
        self.https_index.is_some()
    }

    /// The TLS configuration that connections accepted now use; `None`: HTTP without TLS.
    pub fn tls_config(&self) -> Option<Arc<ServerConfig>> {
        self.https_index.and_then(|index| self.listener_context.config.borrow().tls.get(index).cloned())
    }
}
