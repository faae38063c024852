//! What one event loop keeps between requests: its view of the configuration, its connections, its
//! meters, and the buffers that every decision uses again.

use std::cell::{Cell, RefCell, RefMut};
use std::collections::HashMap;
use std::net::IpAddr;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::DATE;
use http::{HeaderMap, HeaderValue};

use super::compiled_config::{CompiledConfig, CompiledRoute, RouteRules};
use super::log_throttle::LogThrottle;
use super::repeat_refusal::RepeatRefusal;
use super::tunnel_session::TunnelSession;
use crate::access_log::LogSender;
use crate::clock::Clock;
use crate::config::{Server, Target as Configured, TransportSettings, Upstream};
use crate::http::date::Date;
use crate::http::error::RequestError;
use crate::http::headers;
use crate::http::ratelimit_headers::RateLimitFields;
use crate::http::refusal_cache::RefusalCache;
use crate::http::responses::{self, Refused};
use crate::informational::Interim;
use crate::jwt::cache::Checker;
use crate::metrics::events::{RouteMetrics, UpstreamMetrics, WindowMetrics, WorkerMetrics};
use crate::metrics::redis::StoreMetrics;
use crate::metrics::upstream::{ActiveGauge, RetryMetrics};
use crate::metrics::{Registry, WorkerId};
use crate::redis_store::Shared;
use crate::timer::{Timer, Timers};
use crate::upstream::forward::Servers;
use crate::upstream::pool::Pool;
use crate::upstream::request_body::BodyDrain;
use crate::upstream::server_health::UpstreamHealth;
use crate::upstream::server_pool::ServerPool;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::deferred_refunds::DeferredRefunds;
use transom_limiter::rule_set::KeyedRequest;
use transom_limiter::table::Table;

pub struct WorkerState {
    pub table: Arc<Table>,
    pub clock: Clock,
    pub metrics: WorkerMetrics,
    pub timers: Rc<Timers>,
    pub log_throttle: LogThrottle,
    pub deferred_refunds: Arc<DeferredRefunds>,
    /// When several requests end at once: then each looks here instead of at the clock.
    batch_end: Cell<Option<Instant>>,
    /// Where gateways share counters.
    pub shared: Option<Rc<Shared>>,
    worker_id: WorkerId,
    registry: Arc<Registry>,
    /// The Date of answers, and the tick at which it was looked up.
    date: RefCell<(Option<u64>, Date)>,
    config: RefCell<Rc<WorkerConfig>>,
}

/// Where a connection comes from; shared by all requests of it.
#[derive(Debug)]
pub struct ConnectionInfo {
    /// Of the client, or of the proxy that opened the connection.
    pub address: IpAddr,
    /// The address as a field value.
    pub address_field: HeaderValue,
    /// Whether it came by TLS.
    pub is_secure: bool,
    /// The fingerprint of the client's certificate, if it has shown one that was verified: SHA-256, in lower-case hex.
    pub client_cert: Option<Box<str>>,
}

impl ConnectionInfo {
    pub fn new(address: IpAddr, is_secure: bool) -> ConnectionInfo {
        ConnectionInfo { address, address_field: headers::address(address), is_secure, client_cert: None }
    }

    pub fn with_certificate(self, client_cert: Option<Box<str>>) -> ConnectionInfo {
        ConnectionInfo { client_cert, ..self }
    }
}

/// Who is at the other end, for one request at a time.
pub struct Peer {
    pub connection: Rc<ConnectionInfo>,
    /// Limits whatever the connection's task waits for.
    pub timer: Rc<Timer>,
    /// Takes an upstream's informational answers to the client.
    pub informational: Rc<Interim>,
    /// Whether a request waits for its turn: then it is looked whether the client is still there.
    pub is_delayed: Rc<Cell<bool>>,
    /// Where the rest of a request's body is left; `None` where a connection is closed instead.
    pub body_drain: Option<Rc<BodyDrain>>,
    /// How long a body may stand still, for whoever looks after it: what the configuration says, or the route.
    pub body_timeout: Rc<Cell<Duration>>,
    /// The tunnel that the answer opens.
    pub tunnel: RefCell<Option<TunnelSession>>,
    /// Whether the head of the request is that of the one before, to the byte; only whoever has read both can tell.
    pub repeats_previous: Cell<bool>,
    /// The last request, if it was refused and repeated the one before.
    pub repeat_refusal: RefCell<Option<RepeatRefusal>>,
}

impl Peer {
    pub fn new(origin: Rc<ConnectionInfo>, timer: Rc<Timer>, interim: Rc<Interim>, waits: Rc<Cell<bool>>) -> Peer {
        Peer {
            connection: origin,
            timer,
            informational: interim,
            is_delayed: waits,
            body_drain: None,
            body_timeout: Rc::default(),
            tunnel: RefCell::default(),
            repeats_previous: Cell::default(),
            repeat_refusal: RefCell::default(),
        }
    }

    /// For one stream of many on a connection. Nobody looks for waits there: h2 sees by itself that a stream is reset.
    pub fn for_stream(whole: &Peer, timer: Rc<Timer>) -> Peer {
        let (origin, waits) = (Rc::clone(&whole.connection), Rc::clone(&whole.is_delayed));
        Peer { body_drain: Some(Rc::default()), ..Peer::new(origin, timer, Rc::default(), waits) }
    }
}

/// The configuration as one loop sees it. A request keeps the view it started with.
pub struct WorkerConfig {
    pub compiled: Arc<CompiledConfig>,
    /// One for each lane.
    pub route_metrics: Vec<RouteMetrics>,
    /// One for each slate.
    pub window_metrics: Vec<WindowMetrics>,
    /// `RateLimit-Policy` of each slate; this loop's own copy, so that loops do not share its count
    /// of references.
    pub policy_fields: Vec<Option<HeaderValue>>,
    /// For requests that no route took.
    pub unrouted_metrics: RouteMetrics,
    /// One for each upstream.
    pub targets: Vec<Target>,
    pub access_log: Option<LogSender>,
    /// Forgotten with the view, so that no token outlives the keys it was verified with.
    pub token_cache: Checker,
    server_pools: ServerPools,
    scratch: RefCell<Scratch>,
}

/// The servers of all upstreams, by the name of the upstream and their URL.
type ServerPools = HashMap<(String, String), (Server, TransportSettings, Rc<ServerPool>)>;

#[allow(clippy::large_enum_variant, reason = "there is one for each upstream, and a request goes through it")]
pub enum Target {
    Echo,
    Servers(Servers),
}

impl Target {
    /// Whether it can change over to another protocol.
    pub fn supports_upgrade(&self) -> bool {
        match self {
            Target::Echo => false,
            Target::Servers(_) => true,
        }
    }
}

/// Buffers used again by every decision with this view.
#[derive(Default)]
pub struct Scratch {
    pub context: DecisionContext,
    pub params: Vec<Range<usize>>,
    pub text: Vec<u8>,
    pub refusal_cache: RefusalCache,
}

impl WorkerState {
    pub fn new(
        owner: WorkerId,
        table: Arc<Table>,
        clock: Clock,
        abandoned: Arc<DeferredRefunds>,
        registry: Arc<Registry>,
        snapshot: Arc<CompiledConfig>,
        access: Option<LogSender>,
    ) -> WorkerState {
        let settings = snapshot.config.counters.shared.as_ref();
        let shared = settings.map(|settings| {
            let meter = StoreMetrics::new(&registry, owner);
            Shared::new(settings, Arc::clone(&table), clock.clone(), Arc::clone(&abandoned), meter)
        });
        let view = WorkerConfig::new(owner, &registry, &clock, snapshot, access, &ServerPools::new());
        WorkerState {
            shared,
            metrics: WorkerMetrics::new(&registry, owner, &RequestError::KINDS),
            timers: Rc::default(),
            log_throttle: LogThrottle::default(),
            deferred_refunds: abandoned,
            date: RefCell::default(),
            batch_end: Cell::default(),
            config: RefCell::new(Rc::new(view)),
            table,
            clock,
            worker_id: owner,
            registry,
        }
    }

    /// Lets all requests that end in `ending` end at one time.
    pub fn share_end_time(&self, ending: impl FnOnce()) {
        /// Whether or not one of them panics, time goes on for those after them.
        struct Together<'a>(&'a Cell<Option<Instant>>);
        impl Drop for Together<'_> {
            fn drop(&mut self) {
                self.0.set(None);
            }
        }
        self.batch_end.set(Some(self.clock.instant()));
        let together = Together(&self.batch_end);
        ending();
        drop(together);
    }

    /// When a request ends that ends now.
    pub fn end_time(&self) -> Instant {
        self.batch_end.get().unwrap_or_else(|| self.clock.instant())
    }

    pub fn config(&self) -> Rc<WorkerConfig> {
        Rc::clone(&self.config.borrow())
    }

    /// The Date of answers. The wall clock is looked at ten times a second: what tells seconds need not be asked more often.
    pub fn date(&self) -> HeaderValue {
        let (looked_up, date) = &mut *self.date.borrow_mut();
        let tick = Some(self.timers.tick());
        if std::mem::replace(looked_up, tick) != tick {
            date.look_up(self.clock.wall_ms());
        }
        date.value()
    }

    /// Whether this is the view that requests get now.
    pub fn is_current(&self, view: &Rc<WorkerConfig>) -> bool {
        Rc::ptr_eq(&self.config.borrow(), view)
    }

    /// Takes over a configuration. Connections to servers that are still named are kept.
    pub fn apply_config(&self, snapshot: Arc<CompiledConfig>, access: Option<LogSender>) {
        let view = WorkerConfig::new(
            self.worker_id,
            &self.registry,
            &self.clock,
            snapshot,
            access,
            &self.config().server_pools,
        );
        *self.config.borrow_mut() = Rc::new(view);
    }

    /// Closes upstream connections that have been idle for too long, and gives back what requests that went away left
    /// charged.
    pub fn sweep(&self) {
        self.deferred_refunds.sweep(&self.table, self.clock.now().unix_ms);
        let view = self.config();
        let limit = view.compiled.config.timeouts.upstream_idle;
        view.server_pools.values().for_each(|(.., place)| place.pool.sweep(limit));
    }
}

impl WorkerConfig {
    #[allow(clippy::mutable_key_type, reason = "of a way's TLS only the digest is compared")]
    fn new(
        owner: WorkerId,
        registry: &Arc<Registry>,
        clock: &Clock,
        snapshot: Arc<CompiledConfig>,
        access: Option<LogSender>,
        known: &ServerPools,
    ) -> WorkerConfig {
        let rules = |slate: &RouteRules| {
            slate.charge_plan.rules.iter().map(|rule| &snapshot.rule_set.rules[*rule]).collect::<Vec<_>>()
        };
        let meter = |(lane, ready): (usize, &CompiledRoute)| {
            let names: Vec<&str> =
                rules(snapshot.rules_of(ready)).iter().map(|entry| entry.rule.name.as_str()).collect();
            RouteMetrics::new(registry, owner, snapshot.route_name(lane), &names)
        };
        let windows = |slate: &RouteRules| {
            let layers: Vec<_> =
                rules(slate).iter().map(|entry| (entry.rule.name.as_str(), entry.layer_names())).collect();
            WindowMetrics::new(registry, owner, &layers)
        };
        let mut places = ServerPools::new();
        let servers_of = |upstream: &Upstream| match &upstream.target {
            Configured::Echo => 0,
            Configured::Servers(servers) => servers.len(),
        };
        let servers_in_all = snapshot.config.upstreams.iter().map(servers_of).sum();
        let mut target = |(upstream, upstream_health): (&Upstream, &Arc<UpstreamHealth>)| match &upstream.target {
            Configured::Echo => Target::Echo,
            Configured::Servers(servers) => {
                let mut place = |server: &Server| {
                    let name = (upstream.name.clone(), server.url.clone());
                    let is_same = |(known, way, _): &&(Server, TransportSettings, _)| {
                        known.is_reached_as(server) && *way == upstream.way
                    };
                    let same = known.get(&name).filter(is_same);
                    let place = same.map_or_else(
                        || {
                            let meter = ActiveGauge::new(registry, owner, &upstream.name, &server.url);
                            ServerPool::new(Pool::new(server.clone(), &upstream.way, clock.clone()), meter)
                        },
                        |(.., place)| Rc::clone(place),
                    );
                    place.limit(&upstream.policy.circuit, owner, upstream_health.loops, servers_in_all);
                    places.insert(name, (server.clone(), upstream.way.clone(), Rc::clone(&place)));
                    place
                };
                let urls: Vec<&str> = servers.iter().map(|server| server.url.as_str()).collect();
                let meter = UpstreamMetrics::new(registry, owner, &upstream.name, &urls);
                let retries = RetryMetrics::new(registry, owner, &upstream.name);
                let places = servers.iter().map(&mut place).collect();
                Target::Servers(Servers::new(Arc::clone(upstream_health), places, meter, retries, clock.clone()))
            }
        };
        let context = DecisionContext::for_worker(owner as u32);
        WorkerConfig {
            route_metrics: snapshot.routes.iter().enumerate().map(meter).collect(),
            window_metrics: snapshot.route_rules.iter().map(windows).collect(),
            policy_fields: snapshot.route_rules.iter().map(|slate| slate.rate_limit_template.policy()).collect(),
            unrouted_metrics: RouteMetrics::new(registry, owner, "", &[]),
            targets: snapshot.config.upstreams.iter().zip(&snapshot.upstream_health).map(&mut target).collect(),
            access_log: access,
            token_cache: snapshot.token_checker(),
            server_pools: places,
            compiled: snapshot,
            scratch: RefCell::new(Scratch { context, ..Scratch::default() }),
        }
    }

    /// What is to be said of the limits now, to somebody who was charged before.
    pub fn rate_limit_fields(
        &self,
        slate: usize,
        keyed_requests: &[Option<KeyedRequest>],
        table: &Table,
        now: DecisionTime<'_>,
    ) -> RateLimitFields {
        let RouteRules { charge_plan, rate_limit_template: sheet, .. } = &self.compiled.route_rules[slate];
        let mut scratch = self.scratch();
        let Scratch { context, text, .. } = &mut *scratch;
        context.inputs.keyed_requests.clear();
        context.inputs.keyed_requests.extend_from_slice(keyed_requests);
        self.compiled.rule_set.peek(charge_plan, table, now, context);
        sheet.render(context, self.policy_fields[slate].as_ref(), context.result.decided_ms, text)
    }

    /// The answer to a request that the rules of a slate have refused on `desk`; `text` and `headers` are memory to use again.
    pub fn refusal(
        &self,
        slate: usize,
        context: &DecisionContext,
        now_ms: u64,
        date: HeaderValue,
        text: &mut Vec<u8>,
        headers: HeaderMap,
    ) -> Refused {
        let CompiledConfig { rule_set, refusal_templates: forms, route_rules: slates, .. } = &*self.compiled;
        let RouteRules { charge_plan, rate_limit_template: sheet, .. } = &slates[slate];
        let stamp = sheet.render(context, self.policy_fields[slate].as_ref(), now_ms, text);
        let mut refused = responses::refusal(rule_set, charge_plan, context, forms, now_ms, stamp, text, headers);
        // At once: copies of it are sent.
        refused.reply.headers_mut().insert(DATE, date);
        refused
    }

    /// The buffers; to be given back before anything is waited for.
    pub fn scratch(&self) -> RefMut<'_, Scratch> {
        self.scratch.borrow_mut()
    }
}
