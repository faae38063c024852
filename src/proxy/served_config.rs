//! A compiled configuration as this process serves it: with the health of its upstream servers, and with the decision service.
//!
//! It is immutable and shared by all workers. A reload makes a new one; requests in flight keep theirs.

use std::ops::Deref;
use std::sync::Arc;

use crate::decision::DecisionService;
use crate::upstream::server_health::UpstreamHealth;
use transom_config::{Config, UpstreamId};
use transom_limiter::handles::IdVec;
use transom_limiter::key::Seed;
use transom_limiter::rule_set::RuleSet;
use transom_rules::compiled_config::{CompiledConfig, LiveData};

#[derive(Debug)]
pub struct ServedConfig {
    compiled: Arc<CompiledConfig>,
    /// The health of each upstream's servers, shared by all workers.
    pub upstream_health: IdVec<UpstreamId, Arc<UpstreamHealth>>,
    /// Serves the decision API.
    pub decision_service: Arc<DecisionService>,
}

impl ServedConfig {
    /// `rule_set` is compiled from the rules of `config`.
    pub fn new(
        config: Config,
        seed: Seed,
        rule_set: RuleSet,
        upstream_health: Vec<Arc<UpstreamHealth>>,
        live: LiveData,
    ) -> Arc<ServedConfig> {
        let compiled = CompiledConfig::new(config, seed, rule_set, live);
        let log =
            |plan: &str| tracing::warn!(plan, "a token names a plan that no rule defines: its subject is not known");
        compiled.clients.iter().for_each(|clients| _ = clients.current().on_undefined_plan.set(log));
        let decision_service = DecisionService::new(&compiled, seed);
        Arc::new(ServedConfig {
            compiled: Arc::new(compiled),
            upstream_health: upstream_health.into(),
            decision_service: Arc::new(decision_service),
        })
    }

    /// The same configuration with other servers.
    pub fn with_upstream_health(&self, upstream_health: Vec<Arc<UpstreamHealth>>) -> Arc<ServedConfig> {
        let (compiled, decision_service) = (Arc::clone(&self.compiled), Arc::clone(&self.decision_service));
        Arc::new(ServedConfig { compiled, upstream_health: upstream_health.into(), decision_service })
    }
}

impl Deref for ServedConfig {
    type Target = CompiledConfig;

    fn deref(&self) -> &CompiledConfig {
        &self.compiled
    }
}
