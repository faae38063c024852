//! The two sides of the comparison, each reduced to one call: may this address pass?
//!
//! Both hash the key in the call. Transom looks at all layers before it charges any; governor has one
//! limiter per layer and asks them one after the other, which is how it is used for several limits,
//! and which charges the first even if the second then refuses.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use governor::clock::Clock;
use governor::middleware::NoOpMiddleware;
use governor::state::keyed::DashMapStateStore;
use governor::{Quota, RateLimiter};

use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::key::{KeyHash, KeyHasher, KeyPart, OnMissing, Seed};
use transom_limiter::limit::Limit;
use transom_limiter::rule::Rule;
use transom_limiter::rule_set::{ChargePlan, KeyedRequest, RuleSet};
use transom_limiter::table::Table;

const SEED: Seed = Seed(0x0123_4567_89AB_CDEF, 0xFEDC_BA98_7654_3210);
/// 2023-11-14T22:13:20Z; any moment does, as long as all decisions of a run fall into one window.
pub const NOW_MS: u64 = 1_700_000_000_000;

/// One rule per address, its table, and what a route with that rule needs to decide.
pub struct Transom {
    pub rule_set: RuleSet,
    pub charge_plan: ChargePlan,
    pub table: Arc<Table>,
}

impl Transom {
    /// `windows` as in the configuration; `capacity` in counters.
    pub fn new(windows: &[&str], capacity: usize) -> Transom {
        Transom::on(windows, Arc::new(Table::with_capacity(capacity).expect("there is memory")))
    }

    /// As `new`, counting in this table.
    pub fn on(windows: &[&str], table: Arc<Table>) -> Transom {
        let rule = {
            let key = vec![KeyPart::Ip { v4_prefix: 32, v6_prefix: 64 }];
            let layers = windows.iter().map(|text| Limit::parse(text).expect("a window")).collect();
            Rule::new("per-client", key, OnMissing::Never, layers)
        };
        let rule_set = RuleSet::new(&[rule], SEED, None);
        let charge_plan = rule_set.charge_plan(&[0]);
        Transom { rule_set, charge_plan, table }
    }

    pub fn keyed_request(&self, address: &IpAddr) -> KeyedRequest {
        KeyedRequest { key: self.hash(address), offset: 0, variant: 0, cost: 1 }
    }

    pub fn hash(&self, address: &IpAddr) -> KeyHash {
        let mut hasher = KeyHasher::new(SEED, self.rule_set.rules[0].hash_prefix);
        match address {
            IpAddr::V4(v4) => hasher.add_part(1, &v4.octets()),
            IpAddr::V6(v6) => hasher.add_part(1, &v6.octets()),
        }
        hasher.finish()
    }

    pub fn admits(&self, address: &IpAddr, now_ms: u64, context: &mut DecisionContext) -> bool {
        context.inputs.keyed_requests.clear();
        context.inputs.keyed_requests.push(Some(self.keyed_request(address)));
        matches!(
            self.rule_set.decide(&self.charge_plan, &self.table, DecisionTime::read(&|| now_ms), context),
            Decision::Admitted
        )
    }
}

type Limiter<C> = RateLimiter<IpAddr, DashMapStateStore<IpAddr>, C, NoOpMiddleware<<C as Clock>::Instant>>;

/// One limiter per layer, in the store that governor recommends for many threads.
pub struct Governor<C: Clock> {
    layers: Vec<Limiter<C>>,
}

impl<C: Clock + Default> Governor<C> {
    pub fn new() -> Governor<C> {
        // One per microsecond and address is more than a hot loop asks for, so nothing is refused;
        // should it be, the burst of four thousand million lasts for the run.
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
