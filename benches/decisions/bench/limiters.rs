//! The two compared limiters, each with one call: is a request from this address admitted?
//!
//! Both hash the key in the call. Transom checks all layers before it charges any. Governor has one limiter per layer, called
//! in turn as is usual for several limits; the first stays charged if the second refuses.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use governor::clock::Clock;
use governor::middleware::NoOpMiddleware;
use governor::state::keyed::DashMapStateStore;
use governor::{Quota, RateLimiter};

use transom_config::key_kind::IP;
use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, RuleId, VariantId};
use transom_limiter::key::{KeyHash, KeyHasher, OnMissing, Seed};
use transom_limiter::limit::Limit;
use transom_limiter::rule::Rule;
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::table::Table;
use transom_limiter::window::Windows;

const SEED: Seed = Seed(0x0123_4567_89AB_CDEF, 0xFEDC_BA98_7654_3210);
/// 2023-11-14T22:13:20Z. All decisions of a run are in one window.
pub const NOW_MS: u64 = 1_700_000_000_000;

/// A rule keyed by address, its charge plan, and its table.
pub struct Transom {
    pub charge_plan: ChargePlan,
    /// The hash of the rule, before a key.
    hasher: KeyHasher,
    pub table: Arc<Table>,
}

impl Transom {
    /// `windows` as in the configuration; `capacity` in counters.
    pub fn new(windows: &[&str], capacity: usize) -> Transom {
        Transom::on(windows, Arc::new(Table::with_capacity(capacity).expect("there is memory")))
    }

    /// As `new`, with this table.
    pub fn on(windows: &[&str], table: Arc<Table>) -> Transom {
        Transom::with_layers(windows.iter().map(|text| Limit::parse(text).expect("a window")).collect(), table)
    }

    /// One layer, of a sliding window.
    pub fn sliding(tokens: u32, period_ms: u64, capacity: usize) -> Transom {
        let limit = Limit::parse("1/minute").expect("a window");
        let layer = Limit { tokens, windows: Windows::Sliding { period_ms }, ..limit };
        Transom::with_layers(vec![layer], Arc::new(Table::with_capacity(capacity).expect("there is memory")))
    }

    fn with_layers(layers: Vec<Limit>, table: Arc<Table>) -> Transom {
        let rule = {
            let key = vec![IP.of_prefixes(32, 64)];
            Rule::new("per-client", key, OnMissing::Never, layers)
        };
        let rule_set = Arc::new(RuleSet::new(&[rule], SEED, None));
        let charge_plan = rule_set.charge_plan([RuleId::at(0)]);
        let hasher = KeyHasher::new(SEED, rule_set.rules[RuleId::at(0)].hash_prefix);
        Transom { charge_plan, hasher, table }
    }

    pub fn keyed_request(&self, address: &IpAddr) -> KeyedRequest {
        KeyedRequest { key: self.hash(address), offset: 0, variant: VariantId::DEFAULT, cost: 1 }
    }

    pub fn hash(&self, address: &IpAddr) -> KeyHash {
        let mut hasher = self.hasher.clone();
        match address {
            IpAddr::V4(v4) => hasher.add_part(1, &v4.octets()),
            IpAddr::V6(v6) => hasher.add_part(1, &v6.octets()),
        }
        hasher.finish()
    }

    pub fn admits(&self, address: &IpAddr, now_ms: u64, context: &mut DecisionContext) -> bool {
        self.prepare(address, context);
        self.decide(now_ms, context)
    }

    /// Hashes the key and prefetches its counters, for a decision at a time that is not read yet.
    pub fn prepare(&self, address: &IpAddr, context: &mut DecisionContext) {
        context.inputs.keyed_requests.clear();
        context.inputs.keyed_requests.push(Some(self.keyed_request(address)));
        self.charge_plan.prefetch(&self.table, &context.inputs.keyed_requests);
    }

    /// Decides the request that was prepared.
    pub fn decide(&self, now_ms: u64, context: &mut DecisionContext) -> bool {
        matches!(self.charge_plan.decide(&self.table, DecisionTime::read(&|| now_ms), context), Decision::Admitted)
    }
}

type Limiter<C> = RateLimiter<IpAddr, DashMapStateStore<IpAddr>, C, NoOpMiddleware<<C as Clock>::Instant>>;

/// One limiter per layer, in the store that governor recommends for many threads.
pub struct Governor<C: Clock> {
    layers: Vec<Limiter<C>>,
}

impl<C: Clock + Default> Governor<C> {
    pub fn new() -> Governor<C> {
        // One token per microsecond and address is more than a hot loop uses, so that nothing is refused; the burst of 2^32 - 1
        // tokens would last for the run otherwise.
        let layer = |per_token| {
            let quota = Quota::with_period(per_token).expect("not zero").allow_burst(NonZeroU32::MAX);
            RateLimiter::dashmap_with_clock(quota, C::default())
        };
        Governor { layers: vec![layer(Duration::from_micros(1)), layer(Duration::from_nanos(100))] }
    }

    pub fn admits(&self, address: &IpAddr) -> bool {
        self.layers.iter().all(|layer| layer.check_key(address).is_ok())
    }
}
