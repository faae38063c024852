//! Limits of single clients, which are compiled into the rules: at the start, in a reload, and whenever clients of the store have got
//! others.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::proxy::served_config::ServedConfig;
use transom_config::Config;
use transom_limiter::key::Seed;
use transom_limiter::rule_set::RuleSet;
use transom_limiter::window::Windows;
use transom_rules::compiled_config::CompiledConfig;
use transom_rules::live_clients::LiveClients;

/// Limits that are not in effect, in the log of one compilation.
const LOGGED_MAX: usize = 10;

/// What is known of the limits of clients from earlier compilations.
#[derive(Clone, Default, Debug)]
pub struct LimitsState {
    /// Rules and windows that no client can have before a restart: the counters that the process has of them are of another kind.
    left_out: Vec<(String, Windows)>,
    /// Why limits are not in effect.
    problems: BTreeSet<String>,
}

impl LimitsState {
    /// Compiles the rules of a configuration, with the limits of these clients, or else those that the configuration has.
    pub fn compile_rules(
        &self,
        config: &mut Config,
        clients: Option<&LiveClients>,
        seed: Seed,
        former: Option<&RuleSet>,
    ) -> (RuleSet, LimitsState) {
        let problems = match clients {
            Some(clients) => config.set_client_limits(clients.current().limited_clients().map(|client| &***client)),
            None => Vec::new(),
        };
        let mut state = LimitsState { left_out: self.left_out.clone(), problems: problems.into_iter().collect() };
        let compile = |config: &mut Config, state: &mut LimitsState| {
            for (rule, limits) in config.leave_out_client_windows(&state.left_out) {
                state.problems.insert(format!(
                    "rule {rule}, limits `{limits}`: the rule counts these windows in another way since a reload, so they are in \
                     effect after a restart only"
                ));
            }
            RuleSet::new(config.limiter_rules(), seed, former)
        };
        let rule_set = compile(config, &mut state);
        let changed = former.map(|former| rule_set.changed_client_windows(former)).unwrap_or_default();
        if changed.is_empty() {
            return (rule_set, state);
        }
        state.left_out.extend(changed);
        (compile(config, &mut state), state)
    }

    /// Logs what is not in effect, and was before.
    pub fn log(&self, former: &LimitsState) {
        for problem in self.problems.difference(&former.problems).take(LOGGED_MAX) {
            tracing::warn!("limits of a client are not in effect: {problem}");
        }
    }
}

/// A configuration with the limits that clients have got.
pub struct CompiledLimits {
    /// The configuration before.
    pub former: Arc<ServedConfig>,
    pub served: Arc<ServedConfig>,
    pub state: LimitsState,
}

impl CompiledLimits {
    pub fn new(former: Arc<ServedConfig>, state: LimitsState, seed: Seed) -> CompiledLimits {
        let CompiledConfig { config, rule_set, clients, .. } = &**former;
        let mut config = config.clone();
        let (rule_set, state) = state.compile_rules(&mut config, clients.as_deref(), seed, Some(rule_set));
        let upstream_health = former.upstream_health.iter().cloned().collect();
        let served = ServedConfig::new(config, seed, rule_set, upstream_health, former.live_data());
        CompiledLimits { former, served, state }
    }
}
