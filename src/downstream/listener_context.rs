//! What the listeners of a worker share: TLS configurations, peers that send a PROXY header, the connection limit and
//! the drain. A reload replaces the configuration for connections accepted afterwards.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use rustls::{Error, ServerConfig};
use tokio::sync::watch;

use super::connection_limit::ConnectionLimit;
use super::drain::Drain;
use super::tls;
use crate::acme::live_certificate::LiveCertificate;
use crate::proxy::worker_state::WorkerState;
use crate::ratelimit_service::RatelimitService;
use transom_config::listen::Listen;
use transom_http::client_address::{AddressSet, ClientAddress};
use transom_limiter::handles;
use transom_limiter::handles::IdVec;
use transom_runtime::metrics::events::ListenerMetrics;

handles! {
    /// An entry of [`Listen::tls_listeners`].
    TlsId,
}

/// The compiled configuration of listeners; shared by all workers.
#[derive(Debug)]
pub struct ListenerConfig {
    /// One per entry of [`Listen::tls_listeners`].
    tls: IdVec<TlsId, Arc<ServerConfig>>,
    /// Where connections begin with a PROXY header (`listen.proxy_protocol`).
    proxies: AddressSet,
}

/// Shared by the listeners of one worker.
pub struct ListenerContext {
    pub worker: Rc<WorkerState>,
    pub drain: Rc<Drain>,
    pub connection_limit: Arc<ConnectionLimit>,
    /// `None` without a listener for it.
    ratelimit_service: Option<Rc<RatelimitService>>,
    config: RefCell<Arc<ListenerConfig>>,
}

/// A listening address of one worker.
pub struct Listener {
    pub listener_context: Rc<ListenerContext>,
    pub metrics: ListenerMetrics,
    /// `None`: without TLS.
    tls: Option<TlsId>,
    protocol: ListenerProtocol,
}

/// What a listener serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ListenerProtocol {
    /// Requests that are forwarded.
    Http,
    /// Calls of Envoy, over HTTP/2.
    RatelimitService,
    /// Authorization requests of proxies, over HTTP/1.
    ForwardAuth,
}

impl ListenerConfig {
    /// Compiles `listen`. TLS configurations that are equal in `previous` are reused, so that clients can resume their
    /// sessions. `ordered`: the certificates that authorities issue, one per entry of [`Listen::tls_listeners`].
    pub fn new(
        listen: &Listen,
        ordered: &[Option<Arc<LiveCertificate>>],
        previous: Option<(&Listen, &ListenerConfig)>,
    ) -> Result<Arc<ListenerConfig>, Error> {
        let mut servers = IdVec::new();
        for (https, ordered) in listen.tls_listeners().zip(ordered) {
            let unchanged = previous.and_then(|(listen, config)| {
                let mut before = listen.tls_listeners().zip(&config.tls).skip(servers.len());
                before.next().filter(|(before, _)| *before == https).map(|(_, config)| config)
            });
            servers.push(match unchanged {
                Some(unchanged) => Arc::clone(unchanged),
                None => tls::server_config(https, ordered.clone())?,
            });
        }
        Ok(Arc::new(ListenerConfig { tls: servers, proxies: AddressSet::new(&listen.proxy_protocol) }))
    }
}

impl ListenerContext {
    pub fn new(
        worker: Rc<WorkerState>,
        connection_limit: Arc<ConnectionLimit>,
        config: Arc<ListenerConfig>,
        ready: watch::Receiver<bool>,
    ) -> ListenerContext {
        let is_served = worker.config().served.config.listen.ratelimit_service.is_some();
        let ratelimit_service = is_served.then(|| Rc::new(RatelimitService::new(&worker, ready)));
        let config = RefCell::new(config);
        ListenerContext { worker, drain: Rc::default(), connection_limit, ratelimit_service, config }
    }

    /// Replaces the configuration, once the worker has applied its own. Open connections keep theirs.
    pub fn apply(&self, config: Arc<ListenerConfig>) {
        *self.config.borrow_mut() = config;
        self.ratelimit_service.iter().for_each(|service| service.apply_config(&self.worker));
    }

    /// Whether connections from `peer` begin with a PROXY header.
    pub fn expects_proxy_header(&self, peer: ClientAddress) -> bool {
        self.config.borrow().proxies.contains(peer)
    }
}

impl Listener {
    /// `tls`: `None` without TLS.
    pub fn new(
        listener_context: Rc<ListenerContext>,
        meter: ListenerMetrics,
        tls: Option<TlsId>,
        protocol: ListenerProtocol,
    ) -> Listener {
        Listener { listener_context, metrics: meter, tls, protocol }
    }

    pub fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// The rate limit service, if the listener serves it.
    pub fn ratelimit_service(&self) -> Option<&Rc<RatelimitService>> {
        let service = self.listener_context.ratelimit_service.as_ref();
        service.filter(|_| self.protocol == ListenerProtocol::RatelimitService)
    }

    /// Whether proxies ask here about requests that they forward themselves.
    pub fn is_forward_auth(&self) -> bool {
        self.protocol == ListenerProtocol::ForwardAuth
    }

    /// The TLS configuration that connections accepted now use; `None`: HTTP without TLS.
    pub fn tls_config(&self) -> Option<Arc<ServerConfig>> {
        self.tls.and_then(|tls| self.listener_context.config.borrow().tls.get(tls).cloned())
    }
}
