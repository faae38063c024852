//! A rule as configured: the key, the windows, and what happens at the limit. Plain data, compiled by
//! [`crate::rule_set`].

use std::ops::Range;

use crate::handles::{Handle, VariantId};
use crate::ip_prefix::Network;
use crate::key::{KeyPart, OnMissing};
use crate::limit::Limit;
use crate::secret_digest::Digest;
use crate::window::Windows;
use crate::window_kind::WindowKind;

/// A rule as configured.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rule {
    /// The name of the rule.
    pub name: String,
    /// The parts of the key.
    pub key: Vec<KeyPart>,
    /// What happens to a request that lacks a part of the key.
    pub on_missing: OnMissing,
    /// The default windows.
    pub layers: Vec<Limit>,
    /// The most requests of a key in flight at a time; at least 1. `None`: any number.
    pub concurrent: Option<u32>,
    /// Other windows for the clients of a plan.
    pub plans: Vec<Plan>,
    /// Other windows for single keys.
    pub overrides: Vec<Override>,
    /// Other windows for single clients, under texts that identify them. They change while the counters are in use, so neither
    /// the kind nor the name of a counter depends on them.
    pub client_limits: Vec<ClientWindows>,
    /// Requests that the rule does not count.
    pub exemptions: Exemptions,
    /// Tokens that a request takes.
    pub cost: Cost,
    /// What happens at the limit.
    pub on_limit: OnLimit,
    /// Whether a refused request takes the remaining tokens.
    pub count_refused: bool,
    /// After a refusal by a window, the key stays refused for so long, milliseconds.
    pub penalty_ms: Option<u64>,
    /// Whether other gateways share the counters.
    pub sharing: Sharing,
    /// What happens while the store is unreachable.
    pub on_outage: OnOutage,
    /// The names of the counters in the store; `None`: the default names.
    pub key_format: Option<KeyFormat>,
}

/// Stands for the number of the window in a name by a [`KeyFormat`]. No other name contains it.
pub const WINDOW_MARK: char = '\0';

/// The names of a rule's counters as another service writes them, instead of the default names. The rule has plain
/// windows of one period, and a key of one part at most.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeyFormat {
    /// The text before the key. Either this or `after_key` contains [`WINDOW_MARK`].
    pub before_key: String,
    /// The text after the key.
    pub after_key: String,
}

impl KeyFormat {
    /// The name of a key's counters, with [`WINDOW_MARK`] in place of the number of the window.
    pub fn name(&self, key: &str) -> String {
        format!("{}{key}{}", self.before_key, self.after_key)
    }

    /// The text with which all names begin.
    pub fn head(&self) -> &str {
        self.before_key.split(WINDOW_MARK).next().unwrap_or_default()
    }
}

/// The windows of a rule for the clients of a plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    /// The name of the plan.
    pub name: String,
    /// Its windows.
    pub layers: Vec<Limit>,
    /// As in the rule.
    pub concurrent: Option<u32>,
}

/// The windows of a rule for single clients.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientWindows {
    /// The text that identifies the limits, and the windows.
    pub plan: Plan,
    /// When the limits apply, Unix milliseconds: in windows that overlap this time. Others have the next item of
    /// [`Rule::client_limits`]. `None`: always.
    pub during_ms: Option<Range<u64>>,
}

/// The windows of a rule for one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Override {
    /// The values of the key's parts, in order.
    pub key: Vec<KeyValue>,
    /// Its windows.
    pub layers: Vec<Limit>,
    /// As in the rule.
    pub concurrent: Option<u32>,
}

/// Requests that a rule does not count.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Exemptions {
    /// By the client's address.
    pub networks: Vec<Network>,
    /// By the values of the key's parts, in order.
    pub keys: Vec<Vec<KeyValue>>,
}

/// The value of one part of a key, as configured.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum KeyValue {
    /// The value itself.
    Clear(String),
    /// The digest of a secret value.
    Digest(Digest),
}

impl KeyValue {
    /// The digest of the value.
    pub fn digest(&self) -> Digest {
        match self {
            KeyValue::Clear(text) => Digest::of(text.as_bytes()),
            KeyValue::Digest(digest) => *digest,
        }
    }
}

/// Tokens that a request takes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cost {
    /// A fixed number.
    Fixed(u32),
    /// Stated by the request.
    Request {
        /// The name of what states it. The caller reads it; decisions get the cost.
        source: String,
        /// The cost if the request states none.
        default: u32,
        /// The greatest cost; larger values are reduced to it.
        max: u32,
    },
    /// Stated by the response, and charged after it.
    Response {
        /// The name of what states the cost, if the caller needs one to find it.
        source: Option<String>,
        /// Charged before the response, and the whole cost if the response states none.
        reserve: u32,
        /// The greatest cost; larger values are reduced to it.
        max: u32,
    },
}

/// What happens to a request that does not fit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnLimit {
    /// It is refused.
    Refuse,
    /// It waits for a later window, and is charged in that window at once.
    Delay {
        /// The longest wait, milliseconds.
        max_delay_ms: u64,
        /// The most requests that wait at a time.
        max_waiting: u32,
    },
    /// It is counted and reported as refused, but not refused.
    Shadow,
}

/// Whether other gateways share the counters, if a store is configured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// This gateway counts alone.
    Local,
    /// Tokens are leased from the store in advance and spent locally.
    Lease,
    /// The store decides each request.
    Exact,
}

/// What a shared rule does while the store is unreachable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnOutage {
    /// This gateway counts alone meanwhile.
    Local,
    /// Requests are admitted uncounted.
    Allow,
    /// Requests are refused.
    Refuse,
}

impl Rule {
    /// A rule with defaults: every request costs one token, and is refused at the limit.
    pub fn new(name: &str, key: Vec<KeyPart>, on_missing: OnMissing, layers: Vec<Limit>) -> Rule {
        Rule {
            name: name.to_owned(),
            key,
            on_missing,
            layers,
            concurrent: None,
            plans: Vec::new(),
            overrides: Vec::new(),
            client_limits: Vec::new(),
            exemptions: Exemptions::default(),
            cost: Cost::Fixed(1),
            on_limit: OnLimit::Refuse,
            count_refused: false,
            penalty_ms: None,
            sharing: Sharing::Local,
            on_outage: OnOutage::Local,
            key_format: None,
        }
    }

    /// The name of one of several layers in responses and metrics: the rule's name, and the period unless it is the only one.
    pub fn layer_name(&self, layers: &[Limit], layer: &Limit) -> String {
        match layers {
            [_] => self.name.clone(),
            _ => format!("{}-{}", self.name, layer.period_text),
        }
    }

    /// The name in metrics of all windows that only single clients have.
    pub fn client_limits_name(&self) -> String {
        format!("{}-client-limits", self.name)
    }

    /// The plan of a variant; `None` for the default and for an override.
    pub fn plan_of(&self, variant: VariantId) -> Option<&Plan> {
        self.plans.get(variant.index().checked_sub(1)?)
    }

    /// The override of a variant, and its number in the configuration, from 1 on; `None` for the default and for a plan.
    pub fn override_of(&self, variant: VariantId) -> Option<(u32, &Override)> {
        let position = variant.index().checked_sub(1 + self.plans.len())?;
        Some((position as u32 + 1, self.overrides.get(position)?))
    }

    /// The limits of single clients, with their variants.
    pub fn client_variants(&self) -> impl Iterator<Item = (VariantId, &Plan)> {
        let first = self.first_client_variant();
        let limits = self.client_limits.iter().enumerate();
        limits.map(move |(position, limits)| (VariantId::at(first + position), &limits.plan))
    }

    fn first_client_variant(&self) -> usize {
        1 + self.plans.len() + self.overrides.len()
    }

    /// When the limits of a variant apply, if not always, and the variant that applies otherwise.
    pub fn time_of(&self, variant: VariantId) -> Option<(&Range<u64>, VariantId)> {
        let limits = self.client_limits.get(variant.index().checked_sub(self.first_client_variant())?)?;
        Some((limits.during_ms.as_ref()?, VariantId::at(variant.index() + 1)))
    }

    /// The variant for the clients of a plan; the default if the rule has none.
    pub fn variant_of_plan(&self, plan: &str) -> VariantId {
        let position = self.plans.iter().position(|known| known.name == plan);
        position.map_or(VariantId::DEFAULT, |position| VariantId::at(1 + position))
    }

    /// The overrides with their variants.
    pub fn override_variants(&self) -> impl Iterator<Item = (VariantId, &Override)> {
        let first = 1 + self.plans.len();
        self.overrides.iter().enumerate().map(move |(position, known)| (VariantId::at(first + position), known))
    }

    /// The default layers, then those of each plan, then those of each override, then those of single clients.
    pub fn variants(&self) -> impl Iterator<Item = &[Limit]> {
        self.fixed_variants().chain(self.client_limits.iter().map(|limits| limits.plan.layers.as_slice()))
    }

    /// [`Rule::variants`] without those of single clients.
    pub fn fixed_variants(&self) -> impl Iterator<Item = &[Limit]> {
        let plans = self.plans.iter().map(|plan| plan.layers.as_slice());
        let overrides = self.overrides.iter().map(|other| other.layers.as_slice());
        std::iter::once(self.layers.as_slice()).chain(plans).chain(overrides)
    }

    /// Whether a limit holds in every interval of its period.
    pub fn has_sliding_windows(&self) -> bool {
        self.variants().flatten().any(|limit| matches!(limit.windows, Windows::Sliding { .. }))
    }

    /// The limits of requests in flight, in the order of [`Rule::variants`].
    pub fn concurrent_variants(&self) -> impl Iterator<Item = Option<u32>> {
        let plans = self.plans.iter().map(|plan| plan.concurrent);
        let overrides = self.overrides.iter().map(|other| other.concurrent);
        let of_clients = self.client_limits.iter().map(|limits| limits.plan.concurrent);
        std::iter::once(self.concurrent).chain(plans).chain(overrides).chain(of_clients)
    }

    /// The limit of requests in flight of a variant.
    pub fn concurrent_of(&self, variant: VariantId) -> Option<u32> {
        self.concurrent_variants().nth(variant.index()).flatten()
    }

    /// The name of the limit of requests in flight in responses and metrics; `None` if no variant has one.
    pub fn concurrent_name(&self) -> Option<String> {
        self.concurrent_variants().flatten().next()?;
        Some(match self.variants().all(<[Limit]>::is_empty) {
            true => self.name.clone(),
            false => format!("{}-concurrent", self.name),
        })
    }

    /// The name of the penalty in responses and metrics.
    pub fn penalty_name(&self) -> Option<String> {
        self.penalty_ms.map(|_| format!("{}-penalty", self.name))
    }

    /// Whether the rule delays requests.
    pub fn delays(&self) -> bool {
        matches!(self.on_limit, OnLimit::Delay { .. })
    }

    /// Whether tokens of later windows may be taken in any layer.
    pub fn reserves(&self) -> bool {
        self.fixed_variants().flatten().any(|limit| limit.reserve > 0)
    }

    /// The kind of the counters of one of the rule's layers, and the number of shards of each, at least 1. Layers of variants with
    /// the same windows share counters, and have the same kind and number: that of the fixed variants.
    pub fn counter_kind(&self, limit: &Limit) -> (WindowKind, u32) {
        let sharing = || self.fixed_variants().flatten().filter(|other| other.windows == limit.windows);
        let kind = WindowKind::of(&limit.windows, self.has_dependent_windows(limit));
        let shards = sharing().map(|other| other.shards).max().unwrap_or(1).max(1);
        let shards = match kind {
            WindowKind::Plain => shards,
            // At most as many shards as tokens, so that each shard gains tokens in each window. Not sharded: counters of the
            // store, whose scripts keep one account for a key; rules that refund a part of a charge; and rules whose refusals
            // take the remaining tokens.
            WindowKind::Accumulating
                if self.sharing == Sharing::Local
                    && !(self.delays() || self.has_response_cost() || self.count_refused) =>
            {
                sharing().map(|other| other.tokens).min().map_or(1, |tokens| shards.min(tokens))
            }
            WindowKind::Accumulating | WindowKind::Floating | WindowKind::Sliding | WindowKind::Leased => 1,
        };
        (kind, shards)
    }

    /// Whether tokens of one window of a layer can be used in another.
    pub fn has_dependent_windows(&self, limit: &Limit) -> bool {
        let rolls_over = |other: &Limit| other.windows == limit.windows && other.capacity.is_some();
        // Delayed requests and reservations take tokens of later windows, and so does the cost that a response states.
        self.has_response_cost() || self.delays() || self.reserves() || self.fixed_variants().flatten().any(rolls_over)
    }

    /// Whether the response states the cost of a request.
    pub fn has_response_cost(&self) -> bool {
        matches!(self.cost, Cost::Response { .. })
    }

    /// Whether a request takes nothing until its response states the cost.
    pub fn reserves_nothing(&self) -> bool {
        matches!(self.cost, Cost::Response { reserve: 0, .. })
    }

    /// Whether gateways share the counters, if there is a store.
    #[inline]
    pub fn is_shared(&self) -> bool {
        self.sharing != Sharing::Local
    }

    /// Whether the rule is a shadow rule.
    pub fn is_shadow(&self) -> bool {
        self.on_limit == OnLimit::Shadow
    }
}

impl Cost {
    /// Tokens charged before the response, unless the request states a cost.
    pub fn default_cost(&self) -> u32 {
        match self {
            Cost::Fixed(cost) => *cost,
            Cost::Request { default, .. } => *default,
            Cost::Response { reserve, .. } => *reserve,
        }
    }
}
