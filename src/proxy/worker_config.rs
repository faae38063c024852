//! One worker's view of a configuration: its metric cells, server pools, token cache, and the buffers of decisions.
//!
//! A request keeps the view it started with; a reload makes a new one.

use std::cell::{Ref, RefCell, RefMut};
use std::collections::HashMap;
use std::ops::{Deref, Range};
use std::rc::Rc;
use std::sync::Arc;

use http::HeaderValue;
use http::header::DATE;

use crate::access_log::LogSender;
use crate::notify::{MarkReader, Marks};
use crate::proxy::log_throttle::LogThrottle;
use crate::proxy::served_config::ServedConfig;
use crate::spans::{SpanSender, Tracer};
use crate::upstream::forward::Forwarder;
use crate::upstream::pool::{ConnectionPool, ServerPool};
use crate::upstream::server_health::{MonitoredServer, UpstreamHealth};
use transom_config::clients::ClientsSource;
use transom_config::rule::GatewayRule;
use transom_config::upstream::{Server, Target as ConfiguredTarget, TransportSettings, Upstream};
use transom_config::{RouteId, UpstreamId};
use transom_jwt::cache::TokenCache;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::handles::{Handle as _, IdVec, PlanPosition, RuleId};
use transom_limiter::rule::OnLimit;
use transom_limiter::rule_set::{CompiledRule, KeyedRequest};
use transom_limiter::verdict::Verdicts;
use transom_rules::RouteRulesId;
use transom_rules::access::CurrentDenyList;
use transom_rules::client_plans::ClientPlans;
use transom_rules::compiled_config::{CompiledConfig, CompiledRoute, RouteRules};
use transom_rules::live_clients::ClientsReader;
use transom_rules::ratelimit_headers::RateLimitFields;
use transom_rules::resolved_request::ResolvedRequest;
use transom_rules::response_cost::{ResponseCostId, ResponseCostRule};
use transom_rules::responses::{self, RefusalCache, RefusalResponse, RefusedRequest};
use transom_rules::top_keys::{KeyName, TopKeys};
use transom_runtime::clock::Clock;
use transom_runtime::metrics::clients::ClientMetrics;
use transom_runtime::metrics::events::{
    ConcurrencyGauge, DelayGauge, DenialMetrics, DroppedMarks, DroppedSpans, RefundCounter, RouteMetrics,
    UpstreamMetrics, UsageCounters, WindowMetrics,
};
use transom_runtime::metrics::storage::GaugeGuard;
use transom_runtime::metrics::upstream::{ActiveGauge, ConnectionGauge};
use transom_runtime::metrics::{Registry, WorkerId};
use transom_store::counter_access::CounterAccess;
use transom_usage::usage::Kind;
use transom_usage::usage_reader::Missing;

pub struct WorkerConfig {
    pub served: Arc<ServedConfig>,
    clients: Option<ClientsReader>,
    pub route_metrics: IdVec<RouteId, RouteMetrics>,
    pub window_metrics: IdVec<RouteRulesId, WindowMetrics<PlanPosition>>,
    /// `RateLimit-Policy`. A copy per worker, so that workers do not contend for its reference count.
    pub policy_fields: IdVec<RouteRulesId, Option<HeaderValue>>,
    pub top_keys: TopKeys,
    /// With `[notify]`.
    pub marks: Option<MarkReader>,
    pub access_log: Option<LogSender>,
    /// Whether messages at the level of debugging are logged: one for each request.
    pub logs_requests: bool,
    /// Whether requests are noted for the access log or for messages.
    pub notes_requests: bool,
    scratch: RefCell<DecisionBuffers>,
    pub upstreams: Rc<WorkerUpstreams>,
    parts: Rc<WorkerParts>,
}

/// What of the view stays when limits of single clients or servers change.
pub struct WorkerParts {
    /// `None` for rules without a limit of concurrent requests.
    pub concurrency_gauges: IdVec<RuleId, Option<ConcurrencyGauge>>,
    /// `None` for rules that delay no request.
    pub delay_gauges: IdVec<RuleId, Option<DelayGauge>>,
    /// `None` for rules without `count_when`.
    pub refund_counters: IdVec<RuleId, Option<RefundCounter>>,
    /// `None` for routes without a cost by usage.
    pub usage_metrics: IdVec<RouteId, Option<Box<RouteUsageMetrics>>>,
    pub denials: DenialMetrics,
    /// The deny entries that this worker uses; `None` without deny entries and allow lists.
    pub deny_list: RefCell<Option<CurrentDenyList>>,
    /// With `[metrics] clients = true`.
    pub client_metrics: Option<ClientMetrics>,
    /// For requests that match no route.
    pub unrouted_metrics: RouteMetrics,
    /// With `[tracing]`.
    pub tracer: Option<Tracer>,
    /// Dropped with this view, so that no cached token outlives the keys that verified it.
    pub token_cache: TokenCache,
}

/// The servers of all upstreams, as one worker uses them.
pub struct WorkerUpstreams {
    pub targets: IdVec<UpstreamId, Target>,
    server_pools: ServerPools,
}

impl Deref for WorkerConfig {
    type Target = WorkerParts;

    fn deref(&self) -> &WorkerParts {
        &self.parts
    }
}

/// Where the records of requests go.
#[derive(Clone, Default)]
pub struct RecordOutputs {
    pub access_log: Option<LogSender>,
    pub spans: Option<SpanSender>,
    pub marks: Option<Arc<Marks>>,
    pub log_throttle: Arc<LogThrottle>,
}

/// The server pools of all upstreams, by upstream name and server URL.
type ServerPools = HashMap<(String, String), (Server, TransportSettings, Rc<ServerPool>)>;

pub enum Target {
    Echo,
    Servers(Rc<Forwarder>),
}

impl Target {
    /// Whether the target can switch to another protocol.
    pub fn supports_upgrade(&self) -> bool {
        match self {
            Target::Echo => false,
            Target::Servers(_) => true,
        }
    }
}

/// Buffers that every decision with this view reuses.
#[derive(Default)]
pub struct DecisionBuffers {
    pub context: DecisionContext,
    pub params: Vec<Range<usize>>,
    pub text: Vec<u8>,
    pub refusal_cache: RefusalCache,
}

/// The metrics of a route with a cost by usage.
pub struct RouteUsageMetrics {
    /// `None` for rules that read none.
    pub rules: IdVec<ResponseCostId, Option<UsageCounters>>,
    pub missing: UsageCounters,
}

impl RouteUsageMetrics {
    /// `None` for routes without such a cost.
    fn of_routes(
        meter: (&Registry, WorkerId),
        served: &ServedConfig,
    ) -> IdVec<RouteId, Option<Box<RouteUsageMetrics>>> {
        served.routes.ids().map(|route| RouteUsageMetrics::new(meter, served, route)).collect()
    }

    fn new(meter: (&Registry, WorkerId), served: &ServedConfig, id: RouteId) -> Option<Box<RouteUsageMetrics>> {
        let RouteRules { charge_plan, response_costs, .. } = served.rules_of(&served.routes[id]);
        response_costs.reading_plan.as_ref()?;
        let name = served.route_name(id);
        let counters = |rule: &ResponseCostRule| {
            let kinds = || Kind::ALL.map(Kind::name);
            let rule_name = &charge_plan.rule(rule.position).rule.name;
            rule.reads_usage().then(|| UsageCounters::of_kinds(meter, name, rule_name, &kinds()))
        };
        let rules = response_costs.rules.map(counters);
        let missing = UsageCounters::of_missing(meter, name, &Missing::ALL.map(Missing::name));
        Some(Box::new(RouteUsageMetrics { rules, missing }))
    }
}

fn window_metrics(
    registry: &Registry,
    worker_id: WorkerId,
    served: &ServedConfig,
) -> IdVec<RouteRulesId, WindowMetrics<PlanPosition>> {
    let of_rules = |route_rules: &RouteRules| {
        let rules = route_rules.charge_plan.compiled_rules();
        let limits: Vec<_> = rules.map(|(_, rule)| (rule.rule.name.as_str(), rule.limit_names().collect())).collect();
        WindowMetrics::new(registry, worker_id, &limits)
    };
    served.route_rules.iter().map(of_rules).collect()
}

fn policy_fields(served: &ServedConfig) -> IdVec<RouteRulesId, Option<HeaderValue>> {
    served.route_rules.iter().map(|rules| rules.rate_limit_template.constant_policy()).collect()
}

impl DecisionBuffers {
    fn of_worker(worker_id: WorkerId) -> RefCell<DecisionBuffers> {
        let context = DecisionContext::for_worker(worker_id.index() as u32);
        RefCell::new(DecisionBuffers { context, ..DecisionBuffers::default() })
    }
}

impl WorkerUpstreams {
    /// Takes over the unchanged upstreams of `previous`, and of others the pools whose server and transport settings are
    /// unchanged.
    #[allow(clippy::mutable_key_type, reason = "of the TLS settings only the digest is compared")]
    fn new(
        (worker_id, registry): (WorkerId, &Arc<Registry>),
        clock: &Clock,
        served: &ServedConfig,
        previous: Option<&WorkerUpstreams>,
    ) -> WorkerUpstreams {
        let mut server_pools = ServerPools::new();
        let former = previous.iter().flat_map(|previous| &previous.targets).filter_map(|target| match target {
            Target::Echo => None,
            Target::Servers(forwarder) => Some((forwarder.upstream_health().name.as_str(), forwarder)),
        });
        let former: HashMap<&str, &Rc<Forwarder>> = former.collect();
        let total_servers = served.upstream_health.iter().map(|upstream_health| upstream_health.servers.len()).sum();
        let mut target = |(upstream, upstream_health): (&Upstream, &Arc<UpstreamHealth>)| {
            if upstream.target == ConfiguredTarget::Echo {
                return Target::Echo;
            }
            let mut server_pool = |MonitoredServer { server, .. }: &MonitoredServer| {
                let name = (upstream.name.clone(), server.url.clone());
                let is_same = |(previous, transport, _): &&(Server, TransportSettings, _)| {
                    previous.has_same_connections(server) && *transport == upstream.transport
                };
                let same = previous.and_then(|previous| previous.server_pools.get(&name)).filter(is_same);
                let server_pool = same.map_or_else(
                    || {
                        let active = ActiveGauge::new(registry, worker_id, &upstream.name, &server.url);
                        let open = ConnectionGauge::new(registry, worker_id, &upstream.name, &server.url);
                        let pool = ConnectionPool::new(server.clone(), &upstream.transport, Some(open), clock.clone());
                        ServerPool::new(pool, active)
                    },
                    |(.., server_pool)| Rc::clone(server_pool),
                );
                server_pool.set_limits(&upstream.policy, worker_id, upstream_health.workers, total_servers);
                server_pools.insert(name, (server.clone(), upstream.transport.clone(), Rc::clone(&server_pool)));
                server_pool
            };
            let servers = &upstream_health.servers;
            let pools = servers.iter().map(&mut server_pool).collect();
            let former = former.get(&*upstream.name).copied();
            if let Some(unchanged) = former.filter(|former| Arc::ptr_eq(former.upstream_health(), upstream_health)) {
                return Target::Servers(Rc::clone(unchanged));
            }
            let urls: Vec<&str> = servers.iter().map(|monitored| monitored.server.url.as_str()).collect();
            let metrics = UpstreamMetrics::new(registry, worker_id, &upstream.name, &urls);
            let (upstream_health, former) = (Arc::clone(upstream_health), former.map(|former| &**former));
            Target::Servers(Forwarder::new(upstream_health, pools, metrics, clock.clone(), former))
        };
        let targets = served.config.upstreams.iter().zip(&served.upstream_health).map(&mut target).collect();
        WorkerUpstreams { targets, server_pools }
    }

    /// Closes the idle connections to servers that `next` does not use. Requests in flight end under this view.
    pub fn retire_servers(&self, next: &WorkerUpstreams) {
        for (name, (.., server_pool)) in &self.server_pools {
            if !next.server_pools.get(name).is_some_and(|(.., kept)| Rc::ptr_eq(kept, server_pool)) {
                server_pool.pool.retire();
            }
        }
    }
}

impl WorkerConfig {
    /// Takes over the pools of `previous` whose server and transport settings are unchanged.
    pub fn new(
        worker_id: WorkerId,
        registry: &Arc<Registry>,
        clock: &Clock,
        served: Arc<ServedConfig>,
        outputs: RecordOutputs,
        previous: Option<&WorkerConfig>,
    ) -> WorkerConfig {
        let route_metrics = |(id, route): (RouteId, &CompiledRoute)| {
            let rules = served.rules_of(route).charge_plan.compiled_rules();
            let names: Vec<&str> = rules.map(|(_, rule)| rule.rule.name.as_str()).collect();
            RouteMetrics::new(registry, worker_id, served.route_name(id), &names)
        };
        let concurrency_gauge = |rule: &CompiledRule| {
            rule.concurrent_name().map(|_| ConcurrencyGauge::new(registry, worker_id, &rule.rule.name))
        };
        let delay_gauge = |rule: &CompiledRule| {
            let may_delay = matches!(rule.rule.on_limit, OnLimit::Delay { .. });
            may_delay.then(|| DelayGauge::new(registry, worker_id, &rule.rule.name))
        };
        let refund_counter =
            |rule: &GatewayRule| rule.count_when.as_ref().map(|_| RefundCounter::new(registry, worker_id, &rule.name));
        let counted_clients = served.clients.as_ref().filter(|_| served.config.metrics.clients);
        let client_metrics = counted_clients.map(|clients| {
            let metrics = ClientMetrics::new(registry, worker_id);
            // Those that the configuration names have series from the start.
            if served.config.clients.as_ref().is_some_and(|clients| clients.source == ClientsSource::File) {
                clients
                    .current()
                    .iter()
                    .for_each(|client| _ = metrics.cells(client.number, &client.name, &client.plan));
            }
            metrics
        });
        let deny_list = served.access.as_ref().map(|access| access.current());
        let is_entry = |id: &str| deny_list.as_ref().is_some_and(|deny| deny.list().has_entry(id));
        let denials = DenialMetrics::new(registry, worker_id, previous.map(|previous| &previous.denials), is_entry);
        let upstreams =
            WorkerUpstreams::new((worker_id, registry), clock, &served, previous.map(|previous| &*previous.upstreams));
        let previous_keys = previous.map(|previous| &previous.top_keys);
        let top_keys = TopKeys::new(&served.counted_rules(), clock.now().unix_ms, previous_keys);
        let config = &served.config;
        let logs_requests = tracing::enabled!(tracing::Level::DEBUG);
        let parts = WorkerParts {
            concurrency_gauges: served.rule_set.rules.iter().map(concurrency_gauge).collect(),
            delay_gauges: served.rule_set.rules.iter().map(delay_gauge).collect(),
            refund_counters: config.rules.map(refund_counter),
            usage_metrics: RouteUsageMetrics::of_routes((registry, worker_id), &served),
            client_metrics,
            denials,
            deny_list: RefCell::new(deny_list),
            unrouted_metrics: RouteMetrics::new(registry, worker_id, "", &[]),
            tracer: Tracer::new(config.tracing.as_ref(), outputs.spans, || DroppedSpans::new(registry, worker_id)),
            token_cache: served.token_checker(),
        };
        WorkerConfig {
            route_metrics: served.routes.enumerate().map(route_metrics).collect(),
            window_metrics: window_metrics(registry, worker_id, &served),
            policy_fields: policy_fields(&served),
            top_keys,
            marks: outputs.marks.map(|marks| MarkReader::new(&marks, DroppedMarks::new(registry, worker_id))),
            logs_requests,
            notes_requests: logs_requests || outputs.access_log.is_some(),
            access_log: outputs.access_log,
            clients: served.clients.as_ref().map(ClientsReader::new),
            served,
            scratch: DecisionBuffers::of_worker(worker_id),
            upstreams: Rc::new(upstreams),
            parts: Rc::new(parts),
        }
    }

    /// This view with other limits of single clients or other servers, which cost a worker little: they may change often, and
    /// requests wait meanwhile.
    pub fn with_limits(
        &self,
        worker_id: WorkerId,
        registry: &Arc<Registry>,
        clock: &Clock,
        served: Arc<ServedConfig>,
        marks: Option<&Arc<Marks>>,
    ) -> WorkerConfig {
        let mut servers = served.upstream_health.iter().zip(&self.served.upstream_health);
        let has_same_servers = servers.all(|(now, before)| Arc::ptr_eq(now, before));
        let upstreams = match has_same_servers {
            true => Rc::clone(&self.upstreams),
            false => Rc::new(WorkerUpstreams::new((worker_id, registry), clock, &served, Some(&self.upstreams))),
        };
        let are_counted_alike = served.rule_set.has_limit_names_of(&self.served.rule_set);
        WorkerConfig {
            route_metrics: self.route_metrics.clone(),
            window_metrics: match are_counted_alike {
                true => self.window_metrics.clone(),
                false => window_metrics(registry, worker_id, &served),
            },
            policy_fields: policy_fields(&served),
            top_keys: TopKeys::new(&served.counted_rules(), clock.now().unix_ms, Some(&self.top_keys)),
            marks: marks.map(|marks| MarkReader::new(marks, DroppedMarks::new(registry, worker_id))),
            logs_requests: self.logs_requests,
            notes_requests: self.notes_requests,
            access_log: self.access_log.clone(),
            clients: served.clients.as_ref().map(ClientsReader::new),
            served,
            scratch: DecisionBuffers::of_worker(worker_id),
            upstreams,
            parts: Rc::clone(&self.parts),
        }
    }

    /// Counts the keys of a decided request.
    #[inline]
    pub fn count_keys(&self, resolved: &ResolvedRequest<'_>, verdicts: Verdicts<'_>) {
        if self.top_keys.count_decision(resolved.rules.charge_plan.rules(), verdicts) {
            self.name_keys(resolved, verdicts.keyed_requests());
        }
        if let Some(marks) = &self.marks {
            let name = |position| Some(self.key_name(resolved, position));
            marks.read(resolved.rules.charge_plan.rules(), verdicts, name);
        }
    }

    /// The names of the keys of a request that waits for its decision, if `marks` may need them.
    pub fn names_for_marks(&self, resolved: &ResolvedRequest<'_>) -> IdVec<PlanPosition, KeyName> {
        let name = |position| self.key_name(resolved, position);
        self.marks.iter().flat_map(|_| resolved.rules.rule_keys.ids().map(name)).collect()
    }

    fn key_name(&self, resolved: &ResolvedRequest<'_>, position: PlanPosition) -> KeyName {
        KeyName {
            description: resolved.describe_key(position, &self.served.readable_digester),
            store_key: resolved.store_key(position),
            has_own_windows: true,
        }
    }

    /// Names the keys of a request that `top_keys` needs names of.
    #[cold]
    pub fn name_keys(
        &self,
        resolved: &ResolvedRequest<'_>,
        keyed_requests: &IdVec<PlanPosition, Option<KeyedRequest>>,
    ) {
        let name = |position| self.key_name(resolved, position);
        self.top_keys.name_keys(resolved.rules.charge_plan.rules(), keyed_requests, name);
    }

    /// All clients as of now, if there are any. The borrow must end before the next await.
    #[inline]
    pub fn clients(&self) -> Option<Ref<'_, ClientPlans>> {
        self.clients.as_ref().map(ClientsReader::current)
    }

    /// Whether metrics name the client of a request.
    pub fn reports_clients(&self) -> bool {
        self.client_metrics.is_some()
    }

    /// Counts a request that waits because of a rule of the rule set, until the result is dropped.
    pub fn count_delayed(&self, rule: RuleId) -> Option<GaugeGuard> {
        self.delay_gauges[rule].as_ref().map(DelayGauge::count)
    }

    /// The RateLimit fields as of now, for a request that was charged earlier.
    pub fn rate_limit_fields(
        &self,
        rules_id: RouteRulesId,
        keyed_requests: &IdVec<PlanPosition, Option<KeyedRequest>>,
        counters: &CounterAccess,
    ) -> RateLimitFields {
        let RouteRules { charge_plan, rate_limit_template, .. } = &self.served.route_rules[rules_id];
        let mut scratch = self.scratch();
        let DecisionBuffers { context, text, .. } = &mut *scratch;
        context.inputs.repeat(keyed_requests);
        counters.peek(charge_plan, context);
        let policy = self.policy_fields[rules_id].as_ref();
        let verdicts = charge_plan.verdicts(context, &Decision::Admitted);
        rate_limit_template.render(verdicts, policy, verdicts.decided_ms(), text)
    }

    /// The response to a request that the rules refused.
    pub fn refusal(
        &self,
        rules_id: RouteRulesId,
        verdicts: Verdicts<'_>,
        date: HeaderValue,
        request: RefusedRequest<'_>,
    ) -> RefusalResponse {
        let CompiledConfig { refusal_templates, route_rules, .. } = &**self.served;
        let policy = self.policy_fields[rules_id].as_ref();
        let fields = route_rules[rules_id].rate_limit_template.render(verdicts, policy, request.now_ms, request.text);
        let mut refused = responses::refusal_response(verdicts, refusal_templates, fields, request);
        // Set here, because the refusal cache sends copies of the response.
        refused.response.headers_mut().insert(DATE, date);
        refused
    }

    /// The buffers. The borrow must end before the next await.
    pub fn scratch(&self) -> RefMut<'_, DecisionBuffers> {
        self.scratch.borrow_mut()
    }

    /// Closes upstream connections that have been idle for longer than `timeouts.upstream_idle`.
    pub fn close_idle_connections(&self) {
        let limit = self.served.config.timeouts.upstream_idle;
        self.upstreams.server_pools.values().for_each(|(.., server_pool)| server_pool.pool.sweep(limit));
    }
}
