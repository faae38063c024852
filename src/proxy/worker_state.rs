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
use super::repeat_refusal::Again;
use super::tunnel_session::TunnelSession;
use crate::access_log::Sink;
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
use crate::metrics::events::{LoopMeter, RouteMeter, UpstreamMeter, WindowMeter};
use crate::metrics::redis::SharedMeter;
use crate::metrics::upstream::{RetryMeter, UnderWay};
use crate::metrics::{LoopId, Registry};
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
    pub meter: LoopMeter,
    pub timers: Rc<Timers>,
    pub complaints: LogThrottle,
    pub abandoned: Arc<DeferredRefunds>,
    /// When several requests end at once: then each looks here instead of at the clock.
    end: Cell<Option<Instant>>,
    /// Where gateways share counters.
    pub shared: Option<Rc<Shared>>,
    owner: LoopId,
    registry: Arc<Registry>,
    /// The Date of answers, and the tick at which it was looked up.
    date: RefCell<(Option<u64>, Date)>,
    view: RefCell<Rc<WorkerConfig>>,
}

/// Where a connection comes from; shared by all requests of it.
#[derive(Debug)]
pub struct ConnectionInfo {
    /// Of the client, or of the proxy that opened the connection.
    pub address: IpAddr,
    /// The address as a field value.
    pub text: HeaderValue,
    /// Whether it came by TLS.
    pub is_secure: bool,
    /// The fingerprint of the client's certificate, if it has shown one that was verified: SHA-256, in lower-case hex.
    pub client_cert: Option<Box<str>>,
}

impl ConnectionInfo {
    pub fn new(address: IpAddr, is_secure: bool) -> ConnectionInfo {
        ConnectionInfo { address, text: headers::address(address), is_secure, client_cert: None }
    }

    pub fn with_certificate(self, client_cert: Option<Box<str>>) -> ConnectionInfo {
        ConnectionInfo { client_cert, ..self }
    }
}

/// Who is at the other end, for one request at a time.
pub struct Peer {
    pub origin: Rc<ConnectionInfo>,
    /// Limits whatever the connection's task waits for.
    pub timer: Rc<Timer>,
    /// Takes an upstream's informational answers to the client.
    pub interim: Rc<Interim>,
    /// Whether a request waits for its turn: then it is looked whether the client is still there.
    pub waits: Rc<Cell<bool>>,
    /// Where the rest of a request's body is left; `None` where a connection is closed instead.
    pub unwanted: Option<Rc<BodyDrain>>,
    /// How long a body may stand still, for whoever looks after it: what the configuration says, or the route.
    pub body_limit: Rc<Cell<Duration>>,
    /// The tunnel that the answer opens.
    pub passage: RefCell<Option<TunnelSession>>,
    /// Whether the head of the request is that of the one before, to the byte; only whoever has read both can tell.
    pub repeats: Cell<bool>,
    /// The last request, if it was refused and repeated the one before.
    pub again: RefCell<Option<Again>>,
}

impl Peer {
    pub fn new(origin: Rc<ConnectionInfo>, timer: Rc<Timer>, interim: Rc<Interim>, waits: Rc<Cell<bool>>) -> Peer {
        Peer {
            origin,
            timer,
            interim,
            waits,
            unwanted: None,
            body_limit: Rc::default(),
            passage: RefCell::default(),
            repeats: Cell::default(),
            again: RefCell::default(),
        }
    }

    /// For one stream of many on a connection. Nobody looks for waits there: h2 sees by itself that a stream is reset.
    pub fn of_stream(whole: &Peer, timer: Rc<Timer>) -> Peer {
        let (origin, waits) = (Rc::clone(&whole.origin), Rc::clone(&whole.waits));
        Peer { unwanted: Some(Rc::default()), ..Peer::new(origin, timer, Rc::default(), waits) }
    }
}

/// The configuration as one loop sees it. A request keeps the view it started with.
pub struct WorkerConfig {
    pub snapshot: Arc<CompiledConfig>,
    /// One for each lane.
    pub meters: Vec<RouteMeter>,
    /// One for each slate.
    pub windows: Vec<WindowMeter>,
    /// `RateLimit-Policy` of each slate; this loop's own copy, so that loops do not share its count
    /// of references.
    pub policies: Vec<Option<HeaderValue>>,
    /// For requests that no route took.
    pub unrouted: RouteMeter,
    /// One for each upstream.
    pub targets: Vec<Target>,
    pub access: Option<Sink>,
    /// Forgotten with the view, so that no token outlives the keys it was verified with.
    pub tokens: Checker,
    places: Places,
    scratch: RefCell<Scratch>,
}

/// The servers of all upstreams, by the name of the upstream and their URL.
type Places = HashMap<(String, String), (Server, TransportSettings, Rc<ServerPool>)>;

#[allow(clippy::large_enum_variant, reason = "there is one for each upstream, and a request goes through it")]
pub enum Target {
    Echo,
    Servers(Servers),
}

impl Target {
    /// Whether it can change over to another protocol.
    pub fn takes_upgrades(&self) -> bool {
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
    pub last: RefusalCache,
}

impl WorkerState {
    pub fn new(
        owner: LoopId,
        table: Arc<Table>,
        clock: Clock,
        abandoned: Arc<DeferredRefunds>,
        registry: Arc<Registry>,
        snapshot: Arc<CompiledConfig>,
        access: Option<Sink>,
    ) -> WorkerState {
        let settings = snapshot.config.counters.shared.as_ref();
        let shared = settings.map(|settings| {
            let meter = SharedMeter::new(&registry, owner);
            Shared::new(settings, Arc::clone(&table), clock.clone(), Arc::clone(&abandoned), meter)
        });
        let view = WorkerConfig::new(owner, &registry, &clock, snapshot, access, &Places::new());
        WorkerState {
            shared,
            meter: LoopMeter::new(&registry, owner, &RequestError::KINDS),
            timers: Rc::default(),
            complaints: LogThrottle::default(),
            abandoned,
            date: RefCell::default(),
            end: Cell::default(),
            view: RefCell::new(Rc::new(view)),
            table,
            clock,
            owner,
            registry,
        }
    }

    /// Lets all requests that end in `ending` end at one time.
    pub fn end_together(&self, ending: impl FnOnce()) {
        /// Whether or not one of them panics, time goes on for those after them.
        struct Together<'a>(&'a Cell<Option<Instant>>);
        impl Drop for Together<'_> {
            fn drop(&mut self) {
                self.0.set(None);
            }
        }
        self.end.set(Some(self.clock.instant()));
        let together = Together(&self.end);
        ending();
        drop(together);
    }

    /// When a request ends that ends now.
    pub fn end(&self) -> Instant {
        self.end.get().unwrap_or_else(|| self.clock.instant())
    }

    pub fn view(&self) -> Rc<WorkerConfig> {
        Rc::clone(&self.view.borrow())
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
    pub fn has_view(&self, view: &Rc<WorkerConfig>) -> bool {
        Rc::ptr_eq(&self.view.borrow(), view)
    }

    /// Takes over a configuration. Connections to servers that are still named are kept.
    pub fn adopt(&self, snapshot: Arc<CompiledConfig>, access: Option<Sink>) {
        let view = WorkerConfig::new(self.owner, &self.registry, &self.clock, snapshot, access, &self.view().places);
        *self.view.borrow_mut() = Rc::new(view);
    }

    /// Closes upstream connections that have been idle for too long, and gives back what requests that went away left
    /// charged.
    pub fn sweep(&self) {
        self.abandoned.sweep(&self.table, self.clock.now().unix_ms);
        let view = self.view();
        let limit = view.snapshot.config.timeouts.upstream_idle;
        view.places.values().for_each(|(.., place)| place.pool.sweep(limit));
    }
}

impl WorkerConfig {
    #[allow(clippy::mutable_key_type, reason = "of a way's TLS only the digest is compared")]
    fn new(
        owner: LoopId,
        registry: &Arc<Registry>,
        clock: &Clock,
        snapshot: Arc<CompiledConfig>,
        access: Option<Sink>,
        known: &Places,
    ) -> WorkerConfig {
        let rules = |slate: &RouteRules| {
            slate.charge_plan.rules.iter().map(|rule| &snapshot.rule_set.rules[*rule]).collect::<Vec<_>>()
        };
        let meter = |(lane, ready): (usize, &CompiledRoute)| {
            let names: Vec<&str> =
                rules(snapshot.slate_of(ready)).iter().map(|entry| entry.rule.name.as_str()).collect();
            RouteMeter::new(registry, owner, snapshot.name_of(lane), &names)
        };
        let windows = |slate: &RouteRules| {
            let layers: Vec<_> =
                rules(slate).iter().map(|entry| (entry.rule.name.as_str(), entry.layer_names())).collect();
            WindowMeter::new(registry, owner, &layers)
        };
        let mut places = Places::new();
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
                            let meter = UnderWay::new(registry, owner, &upstream.name, &server.url);
                            ServerPool::new(Pool::new(server.clone(), &upstream.way, clock.clone()), meter)
                        },
                        |(.., place)| Rc::clone(place),
                    );
                    place.limit(&upstream.policy.circuit, owner, upstream_health.loops, servers_in_all);
                    places.insert(name, (server.clone(), upstream.way.clone(), Rc::clone(&place)));
                    place
                };
                let urls: Vec<&str> = servers.iter().map(|server| server.url.as_str()).collect();
                let meter = UpstreamMeter::new(registry, owner, &upstream.name, &urls);
                let retries = RetryMeter::new(registry, owner, &upstream.name);
                let places = servers.iter().map(&mut place).collect();
                Target::Servers(Servers::new(Arc::clone(upstream_health), places, meter, retries, clock.clone()))
            }
        };
        let context = DecisionContext::for_worker(owner as u32);
        WorkerConfig {
            meters: snapshot.lanes.iter().enumerate().map(meter).collect(),
            windows: snapshot.slates.iter().map(windows).collect(),
            policies: snapshot.slates.iter().map(|slate| slate.sheet.policy()).collect(),
            unrouted: RouteMeter::new(registry, owner, "", &[]),
            targets: snapshot.config.upstreams.iter().zip(&snapshot.upstream_health).map(&mut target).collect(),
            access,
            tokens: snapshot.checker(),
            places,
            snapshot,
            scratch: RefCell::new(Scratch { context, ..Scratch::default() }),
        }
    }

    /// What is to be said of the limits now, to somebody who was charged before.
    pub fn stamp(
        &self,
        slate: usize,
        keyed_requests: &[Option<KeyedRequest>],
        table: &Table,
        now: DecisionTime<'_>,
    ) -> RateLimitFields {
        let RouteRules { charge_plan, sheet, .. } = &self.snapshot.slates[slate];
        let mut scratch = self.scratch();
        let Scratch { context, text, .. } = &mut *scratch;
        context.inputs.keyed_requests.clear();
        context.inputs.keyed_requests.extend_from_slice(keyed_requests);
        self.snapshot.rule_set.peek(charge_plan, table, now, context);
        sheet.render(context, self.policies[slate].as_ref(), context.result.decided_ms, text)
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
        let CompiledConfig { rule_set, forms, slates, .. } = &*self.snapshot;
        let RouteRules { charge_plan, sheet, .. } = &slates[slate];
        let stamp = sheet.render(context, self.policies[slate].as_ref(), now_ms, text);
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
