//! A rule as configured: who is counted, how much in which windows, and what happens at the limit.
//!
//! Plain data. What it means for a counter is worked out in `book`.

use crate::ip_prefix::Network;
use crate::key::{KeyPart, OnMissing};
use crate::limit::Limit;
use crate::secret_digest::Digest;

/// A rule as configured.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rule {
    pub name: String,
    pub key: Vec<KeyPart>,
    pub on_missing: OnMissing,
    pub layers: Vec<Limit>,
    /// Other windows for the clients of a plan.
    pub plans: Vec<Plan>,
    /// Other windows for single keys.
    pub overrides: Vec<Override>,
    /// Whom the rule does not count.
    pub exemptions: Exemptions,
    pub cost: Cost,
    pub on_limit: OnLimit,
    /// Whether a refused request consumes what is left.
    pub count_refused: bool,
    pub sharing: Sharing,
    pub on_outage: OnOutage,
}

/// The windows that a rule has for the clients of a plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    pub name: String,
    pub layers: Vec<Limit>,
}

/// The windows that a rule has for one key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Override {
    /// The values of the key's parts, in their order.
    pub key: Vec<KeyValue>,
    pub layers: Vec<Limit>,
}

/// Whom a rule does not count.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Exemptions {
    /// By the client's address.
    pub networks: Vec<Network>,
    /// Values of the key's parts, in their order.
    pub keys: Vec<Vec<KeyValue>>,
}

/// The value of one part of a key, as configured.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum KeyValue {
    Clear(String),
    /// Of a value that is a secret.
    Digest(Digest),
}

impl KeyValue {
    pub fn digest(&self) -> Digest {
        match self {
            KeyValue::Clear(text) => Digest::of(text.as_bytes()),
            KeyValue::Digest(digest) => *digest,
        }
    }
}

/// Tokens that one request consumes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cost {
    Fixed(u32),
    /// What a request field says, up to `max`; `default` where there is none.
    Request {
        header: String,
        default: u32,
        max: u32,
    },
    /// What a field of the answer says, up to `max`; `reserve` is charged beforehand, and is all
    /// that is charged where the answer has no such field.
    Response {
        header: String,
        reserve: u32,
        max: u32,
    },
}

/// What happens to a request that finds a layer full.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnLimit {
    Refuse,
    /// It waits for the next window, in which it takes its place now, but not longer than this; so
    /// many may wait at a time.
    Delay {
        max_delay_ms: u64,
        max_waiting: u32,
    },
    /// Decide and report, but never enforce.
    Shadow,
}

/// Whether other gateways count together with this one, where a store for that is configured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// This gateway counts for itself.
    Local,
    /// Tokens are fetched in slices and spent without asking.
    Lease,
    /// Each request is counted in the store before it passes.
    Exact,
}

/// What a shared rule does while the store can not be asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnOutage {
    /// This gateway counts for itself meanwhile.
    Local,
    /// Requests pass uncounted.
    Allow,
    /// Requests are refused.
    Refuse,
}

impl Rule {
    /// A rule that says no more than it has to: every request costs one token, and is refused at the limit.
    pub fn new(name: &str, key: Vec<KeyPart>, on_missing: OnMissing, layers: Vec<Limit>) -> Rule {
        Rule {
            name: name.to_owned(),
            key,
            on_missing,
            layers,
            plans: Vec::new(),
            overrides: Vec::new(),
            exemptions: Exemptions::default(),
            cost: Cost::Fixed(1),
            on_limit: OnLimit::Refuse,
            count_refused: false,
            sharing: Sharing::Local,
            on_outage: OnOutage::Local,
        }
    }

    /// The name of a layer in answers and metrics: the rule's own where it has only one.
    pub fn layer_name(&self, layers: &[Limit], layer: usize) -> String {
        match layers {
            [_] => self.name.clone(),
            layers => format!("{}-{}", self.name, layers[layer].period_text),
        }
    }

    /// The layers of everyone, then those of each plan, then those of each override.
    pub fn variants(&self) -> impl Iterator<Item = &[Limit]> {
        let plans = self.plans.iter().map(|plan| plan.layers.as_slice());
        let overrides = self.overrides.iter().map(|other| other.layers.as_slice());
        std::iter::once(self.layers.as_slice()).chain(plans).chain(overrides)
    }

    /// Of how many layers its counters can be.
    pub fn max_layers(&self) -> usize {
        self.variants().map(<[Limit]>::len).sum()
    }

    pub fn delays(&self) -> bool {
        matches!(self.on_limit, OnLimit::Delay { .. })
    }

    /// Whether tokens of windows to come may be taken in any layer.
    pub fn reserves(&self) -> bool {
        self.variants().flatten().any(|limit| limit.reserve > 0)
    }

    pub fn is_shadow(&self) -> bool {
        self.on_limit == OnLimit::Shadow
    }
}

impl Cost {
    /// What is charged before the answer, where no request says otherwise.
    pub fn default_cost(&self) -> u32 {
        match self {
            Cost::Fixed(cost) => *cost,
            Cost::Request { default, .. } => *default,
            Cost::Response { reserve, .. } => *reserve,
        }
    }
}
