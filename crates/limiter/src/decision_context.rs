//! The inputs, the result and the memory of a decision. The next decision of the same rule set reuses them, so that decisions
//! do not allocate.

use crate::acquire::Charge;
use crate::charge_plan::{LayerCharge, LayerRef};
use crate::concurrency::ConcurrencyUsage;
use crate::handles::{ChargePosition, IdVec, PlanPosition, VariantId, WindowsId};
use crate::rule_set::{CompiledLayer, CountingMode, KeyedRequest, NotCounted, RuleSet};
use crate::sharded_counter::ShardReceipt;
use crate::window::Window;

/// The inputs, the result and the reusable memory of one decision.
///
/// The parts differ by who writes them: the caller fills [`inputs`](Self::inputs), a decision writes
/// [`result`](Self::result), and the gateway's shared counting uses [`sharing`](Self::sharing). A context belongs to
/// one rule set, and is reused from request to request so that decisions do not allocate.
#[derive(Clone, Debug, Default)]
pub struct DecisionContext {
    /// The request. Filled in by the caller before each decision.
    pub inputs: DecisionInputs,
    /// The outcome of the last decision.
    pub result: DecisionResult,
    /// State of rules whose counters several gateways share. Empty for local rules.
    pub sharing: SharingState,
    pub(super) scratch: Scratch,
}

/// The request to decide.
#[derive(Clone, Debug, Default)]
pub struct DecisionInputs {
    /// The request under each rule of the charge plan; `None` where the rule does not count it.
    pub keyed_requests: IdVec<PlanPosition, Option<KeyedRequest>>,
    /// Why rules do not count the request. A rule that is missing here skips it.
    pub uncounted: Vec<(PlanPosition, NotCounted)>,
    /// Whether the request may take tokens of later windows, in layers that have a reserve.
    pub reserve: bool,
    /// The shard to charge first where a counter is sharded: the number of the worker.
    pub own_shard: u32,
}

/// The outcome of a decision, layer by layer.
#[derive(Clone, Debug, Default)]
pub struct DecisionResult {
    /// The counters in the order in which they were charged: those of the enforced rules, then those of shadow rules.
    pub charges: IdVec<ChargePosition, LayerCharge>,
    /// The time to which `charges` refer, Unix milliseconds.
    pub decided_ms: u64,
    /// Receipts of charges in sharded and sliding counters, and of charges that state the usage of other gateways too.
    pub shard_receipts: Vec<ShardReceipt>,
    /// The shadow rules that would have refused the request in their windows.
    pub shadowed: Vec<PlanPosition>,
    /// The requests in flight of the rules that limit them. Set by
    /// [`ChargePlan::acquire_slots`](crate::charge_plan::ChargePlan::acquire_slots) and
    /// [`ChargePlan::peek_slots`](crate::charge_plan::ChargePlan::peek_slots) only.
    pub concurrency: Vec<ConcurrencyUsage>,
}

/// State of a decision on rules whose counters several gateways share.
#[derive(Clone, Debug, Default)]
pub struct SharingState {
    /// How each rule of the charge plan is counted.
    pub counting_modes: IdVec<PlanPosition, CountingMode>,
    /// The charges whose leases hold too few tokens, after a decision that lacked tokens.
    pub missing_tokens: Vec<ChargePosition>,
    /// The charges whose leases run low, after a decision that admitted.
    pub low_leases: Vec<ChargePosition>,
    /// Layers that the store has charged already.
    pub prepaid: Vec<LayerRef>,
    /// Layers of rules with leases that the store decides itself: fetched tokens would open their windows, also if another rule
    /// refuses the request.
    pub without_lease: Vec<LayerRef>,
    /// Where the shard receipts of the rules being decided begin.
    pub first_shard_receipt: usize,
}

/// Where the charges of some layers begin, among those of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChargesStart {
    pub charge: ChargePosition,
    /// The number of receipts of shards before.
    pub shard_receipts: usize,
}

/// Memory that decisions reuse.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    /// The window found last, for each of [`RuleSet::windows`]: most requests fall into the same one. An empty interval where
    /// keys have windows of their own.
    pub windows: IdVec<WindowsId, Window>,
    /// The layers of a request that does not have the default windows.
    pub layer_buffer: Vec<LayerRef>,
}

impl DecisionInputs {
    /// Removes the request.
    #[inline]
    pub fn clear(&mut self) {
        self.keyed_requests.clear();
        self.uncounted.clear();
    }

    /// Adds the request under the next rule of the charge plan.
    #[inline]
    pub fn push(&mut self, found: Result<KeyedRequest, NotCounted>) {
        match found {
            Ok(keyed_request) => {
                self.keyed_requests.push(Some(keyed_request));
            }
            Err(reason) => self.uncounted.push((self.keyed_requests.push(None), reason)),
        }
    }

    /// Replaces the request by one that was decided before. Why rules did not count it is not kept.
    pub fn repeat(&mut self, keyed_requests: &IdVec<PlanPosition, Option<KeyedRequest>>) {
        self.clear();
        self.keyed_requests.extend_from(keyed_requests);
    }

    /// Why the rule at a position does not count the request.
    #[cold]
    pub(super) fn not_counted(&self, position: PlanPosition) -> NotCounted {
        let of_rule = self.uncounted.iter().find(|(uncounted, _)| *uncounted == position);
        of_rule.map_or(NotCounted::Skipped, |(_, reason)| *reason)
    }
}

impl FromIterator<Result<KeyedRequest, NotCounted>> for DecisionInputs {
    fn from_iter<T: IntoIterator<Item = Result<KeyedRequest, NotCounted>>>(found: T) -> DecisionInputs {
        let mut inputs = DecisionInputs::default();
        found.into_iter().for_each(|found| inputs.push(found));
        inputs
    }
}

impl SharingState {
    /// How a layer is counted; `None` where no rule is shared.
    #[inline]
    pub fn counting_mode(&self, layer_ref: LayerRef) -> Option<CountingMode> {
        match *self.counting_modes.get(layer_ref.position)? {
            CountingMode::Leased if self.without_lease.contains(&layer_ref) => Some(CountingMode::Remote),
            mode => Some(mode),
        }
    }
}

impl DecisionContext {
    /// A context for one of several workers. Each worker charges another shard first.
    pub fn for_worker(own_shard: u32) -> DecisionContext {
        DecisionContext {
            inputs: DecisionInputs { own_shard, ..DecisionInputs::default() },
            ..DecisionContext::default()
        }
    }

    /// Forgets everything that belongs to one rule set or request, so that a decision of another rule set can follow.
    pub(super) fn reset_rule_set(&mut self) {
        self.inputs.clear();
        self.inputs.reserve = false;
        self.sharing.counting_modes.clear();
        self.scratch.windows.clear();
    }

    /// Removes the result of the last decision.
    pub fn clear(&mut self) {
        self.result.decided_ms = 0;
        self.result.shadowed.clear();
        self.result.charges.clear();
        self.result.shard_receipts.clear();
        self.sharing.low_leases.clear();
        self.sharing.prepaid.clear();
        self.sharing.without_lease.clear();
    }

    /// Where the next charges begin.
    #[inline]
    pub(super) fn next_charges(&self) -> ChargesStart {
        ChargesStart { charge: self.result.charges.next_id(), shard_receipts: self.result.shard_receipts.len() }
    }

    /// Whether a counter from `first` on is full because of tokens that may be owed.
    #[cold]
    pub(super) fn is_full_by_debt(&self, first: ChargePosition) -> bool {
        self.result.charges[first..].iter().any(|charge| charge.is_full && charge.request.kind.carries_debt())
    }

    /// Whether the request has the default windows under all rules.
    pub(super) fn use_default_windows(&self) -> bool {
        self.inputs.keyed_requests.iter().flatten().all(|keyed_request| keyed_request.variant == VariantId::DEFAULT)
    }

    /// The charge of one layer; `None` if the layer does not apply to the request.
    pub fn charge_of(&self, layer_ref: LayerRef) -> Option<&LayerCharge> {
        self.result.charges.iter().find(|charge| charge.layer == layer_ref)
    }

    /// The charges in the layers of one rule.
    pub fn charges_of_rule(&self, position: PlanPosition) -> impl Iterator<Item = &LayerCharge> {
        self.result.charges.iter().filter(move |charge| charge.layer.position == position)
    }

    /// Whether the rule at this position has charged an admitted request: a shadow rule that would have refused the request has
    /// not, nor has a rule that was not examined.
    pub fn has_charged(&self, position: PlanPosition) -> bool {
        let is_prepaid = || self.sharing.prepaid.iter().any(|layer_ref| layer_ref.position == position);
        !self.result.shadowed.contains(&position) && (self.charges_of_rule(position).next().is_some() || is_prepaid())
    }

    /// The receipts of all charges in the layers of one rule.
    pub fn receipts_of_rule(&self, position: PlanPosition) -> impl Iterator<Item = ShardReceipt> + '_ {
        self.charges_of_rule(position).flat_map(|charge| self.receipts_of(charge))
    }

    /// The receipts of a charge: none if the store was charged.
    pub fn receipts_of(&self, charge: &Charge) -> impl Iterator<Item = ShardReceipt> + '_ {
        let layer = charge.counter.layer;
        let parts = self.result.shard_receipts.iter().filter(move |part| part.layer == layer);
        charge.receipt().into_iter().chain(parts.copied())
    }

    /// The receipts of all charges of the request.
    pub fn all_receipts(&self) -> impl Iterator<Item = ShardReceipt> + '_ {
        let whole = self.result.charges.iter().filter_map(|charge| charge.receipt());
        whole.chain(self.result.shard_receipts.iter().copied())
    }

    /// Adds the charges of the request in `layers`. `peek` is called with each of them.
    #[inline(always)]
    pub(super) fn add_charges<'a>(
        &mut self,
        rule_set: &RuleSet,
        layers: impl Iterator<Item = (LayerRef, &'a CompiledLayer)>,
        now_ms: u64,
        mut peek: impl FnMut(&mut Charge),
    ) {
        for (layer_ref, layer) in layers {
            if let Some(keyed_request) = self.inputs.keyed_requests[layer_ref.position] {
                let charge = self.new_charge(rule_set, layer, keyed_request, now_ms);
                self.result.charges.push(LayerCharge { layer: layer_ref, mode: CountingMode::Local, charge });
                // After the push: a search for the counter calls functions, and would keep the charge on the stack.
                if let Some(charge) = self.result.charges.last_mut() {
                    peek(charge);
                }
            }
        }
    }

    /// The charge of the request in one layer, in the current window.
    #[inline(always)]
    pub(super) fn new_charge(
        &mut self,
        rule_set: &RuleSet,
        layer: &CompiledLayer,
        keyed_request: KeyedRequest,
        now_ms: u64,
    ) -> Charge {
        let end_ms = self.window_end_ms(rule_set, layer.request.windows, now_ms, keyed_request.offset);
        layer.new_charge(keyed_request, end_ms, self.inputs.own_shard)
    }

    /// The end of the key's current window.
    #[inline]
    fn window_end_ms(&mut self, rule_set: &RuleSet, windows: WindowsId, now_ms: u64, offset: u64) -> u64 {
        match self.scratch.windows.get(windows) {
            Some(window) if window.contains(now_ms) => window.end_ms,
            _ => self.find_window(rule_set, windows, now_ms, offset),
        }
    }

    #[inline(never)]
    fn find_window(&mut self, rule_set: &RuleSet, windows: WindowsId, now_ms: u64, offset: u64) -> u64 {
        let known = &rule_set.windows[windows];
        let window = known.window_at(now_ms, offset);
        if known.are_shared() {
            self.scratch.windows.resize(rule_set.windows.len(), Window::default());
            self.scratch.windows[windows] = window;
        }
        window.end_ms
    }
}
