//! Charge plans: the rules of one route, and the order in which their layers are charged.

use std::sync::Arc;

use crate::acquire::Charge;
use crate::handles::{IdVec, LayerId, PlanPosition, RuleId, VariantId};
use crate::key::KeyPart;
use crate::rule_set::{CompiledLayer, CompiledRule, CountingMode, KeyedRequest, RuleSet};
use crate::table::Table;
use crate::window::Time;
use crate::window_kind::WindowKind;

/// A layer of a rule of a charge plan.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LayerRef {
    /// The rule's position in the charge plan.
    pub position: PlanPosition,
    /// The layer.
    pub id: LayerId,
}

/// One layer's part in a decision: the tokens to take, and the result.
#[derive(Clone, Copy, Debug)]
pub struct LayerCharge {
    /// The layer.
    pub layer: LayerRef,
    /// Where the layer is counted.
    pub mode: CountingMode,
    /// The charge of its counter.
    pub charge: Charge,
}

/// The rules of one route, and the order in which their layers are charged.
#[derive(Debug, Default)]
pub struct ChargePlan {
    rule_set: Arc<RuleSet>,
    /// The rules, in the order of the configuration.
    rules: IdVec<PlanPosition, RuleId>,
    /// The default layers of the enforced rules, in the order of charging.
    enforced: Vec<LayerRef>,
    /// Copies of these layers: a decision finds them here without their rules.
    enforced_layers: Vec<CompiledLayer>,
    shadow_rules: Vec<PlanPosition>,
    /// The rules that limit the requests in flight, in the order in which their slots are taken.
    pub(super) concurrent: Vec<PlanPosition>,
    /// Whether several gateways share counters of any of the rules.
    pub is_shared: bool,
    /// How each rule is counted while the store is reachable.
    pub(super) counting_modes: IdVec<PlanPosition, CountingMode>,
    /// Whether tokens of sliding windows are leased.
    leases_sliding: bool,
    pub(super) may_delay: bool,
    counts_refused: bool,
    has_penalties: bool,
    /// Whether any of the rules has limits of single clients that end with a window.
    pub(super) has_ending_limits: bool,
    /// Whether every layer of every variant is plain and not sharded, and a refusal has no side effects. The compiler
    /// specializes such decisions.
    is_plain: bool,
    /// Where the counters of a request are searched first: each bucket once, for all rules.
    buckets: Vec<KeyBucket>,
}

/// A bucket of a key under one rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct KeyBucket {
    position: PlanPosition,
    /// Added to [`KeyHash::bucket_hash`](crate::key::KeyHash::bucket_hash).
    offset: u64,
}

impl AsMut<Charge> for LayerCharge {
    #[inline(always)]
    fn as_mut(&mut self) -> &mut Charge {
        &mut self.charge
    }
}

impl std::ops::Deref for LayerCharge {
    type Target = Charge;

    #[inline(always)]
    fn deref(&self) -> &Charge {
        &self.charge
    }
}

impl std::ops::DerefMut for LayerCharge {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Charge {
        &mut self.charge
    }
}

impl RuleSet {
    /// The charge plan of a route with these rules.
    pub fn charge_plan(self: &Arc<Self>, rules: impl IntoIterator<Item = RuleId>) -> ChargePlan {
        let rules: IdVec<PlanPosition, RuleId> = rules.into_iter().collect();
        let compiled = || rules.iter().map(|rule| &self.rules[*rule]);
        let leases_sliding = |compiled: &CompiledRule| {
            compiled.counting_mode() == CountingMode::Leased
                && compiled.compiled_layers().any(|layer| layer.request.kind == WindowKind::Sliding)
        };
        let mut plan = ChargePlan {
            rule_set: Arc::clone(self),
            enforced: Vec::new(),
            enforced_layers: Vec::new(),
            shadow_rules: rules.ids().filter(|position| self.rules[rules[*position]].rule.is_shadow()).collect(),
            concurrent: self.concurrent_order(&rules),
            leases_sliding: compiled().any(leases_sliding),
            may_delay: compiled().any(|compiled| compiled.rule.delays()),
            counts_refused: compiled().any(|compiled| compiled.rule.count_refused),
            has_penalties: compiled().any(|compiled| compiled.penalty.is_some()),
            has_ending_limits: compiled()
                .any(|compiled| compiled.rule.client_limits.iter().any(|limits| limits.during_ms.is_some())),
            counting_modes: compiled().map(CompiledRule::counting_mode).collect(),
            is_shared: compiled().any(|compiled| compiled.rule.is_shared()),
            is_plain: false,
            buckets: Vec::new(),
            rules,
        };
        plan.set_enforced(|plan, position| !plan.is_shadow(position));
        let mut layers = plan.rules.iter().flat_map(|rule| self.rules[*rule].compiled_layers());
        plan.is_plain = !plan.counts_refused
            && !plan.is_shared
            && layers.all(|layer| layer.request.kind == WindowKind::Plain && layer.shards == 1);
        for position in plan.rules.ids() {
            for layer_ref in plan.layers_of_rule(position, VariantId::DEFAULT) {
                let bucket = KeyBucket { position, offset: plan.layer(layer_ref).bucket_offset };
                if !plan.buckets.contains(&bucket) {
                    plan.buckets.push(bucket);
                }
            }
        }
        plan
    }

    /// The charge plan for decisions that cannot wait, by these rules. `consumes`: refused requests consume tokens where the
    /// rules say so.
    pub fn immediate_plan(self: &Arc<Self>, rules: impl IntoIterator<Item = RuleId>, consumes: bool) -> ChargePlan {
        let mut plan = self.charge_plan(rules);
        plan.counts_refused &= consumes;
        plan.has_penalties &= consumes;
        plan.may_delay = false;
        plan
    }

    /// As [`RuleSet::immediate_plan`], with shadow rules enforced.
    pub fn query_plan(self: &Arc<Self>, rules: impl IntoIterator<Item = RuleId>, consumes: bool) -> ChargePlan {
        let mut plan = self.immediate_plan(rules, consumes);
        plan.shadow_rules.clear();
        plan.set_enforced(|_plan, _position| true);
        plan
    }

    /// The rules that limit the requests in flight. Rules for all clients together come last, so that the waiting requests of
    /// one client hold no slots that others need. Of the rest, rules that refuse come first, so that no request waits and is
    /// then refused. All requests wait in this order, so that no two wait for each other.
    fn concurrent_order(&self, rules: &IdVec<PlanPosition, RuleId>) -> Vec<PlanPosition> {
        let compiled = |position: &PlanPosition| &self.rules[rules[*position]];
        let mut positions: Vec<PlanPosition> = rules.ids().collect();
        positions.retain(|position| compiled(position).concurrent_name().is_some());
        positions.sort_by_key(|position| {
            let rule = &compiled(position).rule;
            (rule.is_shadow(), rule.key.contains(&KeyPart::GLOBAL), rule.delays(), rules[*position])
        });
        positions
    }
}

impl ChargePlan {
    /// The compiled rules of which the plan selects some.
    #[inline]
    pub fn rule_set(&self) -> &Arc<RuleSet> {
        &self.rule_set
    }

    /// The rules, in the order of the configuration.
    #[inline]
    pub fn rules(&self) -> &IdVec<PlanPosition, RuleId> {
        &self.rules
    }

    /// The compiled rule at a position.
    #[inline]
    pub fn rule(&self, position: PlanPosition) -> &CompiledRule {
        &self.rule_set.rules[self.rules[position]]
    }

    /// The compiled rules with their positions, in the order of the configuration.
    pub fn compiled_rules(&self) -> impl Iterator<Item = (PlanPosition, &CompiledRule)> {
        self.rules.enumerate().map(|(position, rule)| (position, &self.rule_set.rules[*rule]))
    }

    /// The rule of a layer.
    #[inline]
    pub fn rule_of(&self, layer_ref: LayerRef) -> &CompiledRule {
        &self.rule_set.rules[layer_ref.id.rule]
    }

    /// The compiled layer.
    #[inline]
    pub fn layer(&self, layer_ref: LayerRef) -> &CompiledLayer {
        self.rule_set.layer(layer_ref.id)
    }

    /// The time of a decision by this plan.
    #[inline]
    pub fn time(&self, now_ms: u64) -> Time<'_> {
        self.rule_set.time(now_ms)
    }

    /// The default layers of the enforced rules, in the order of charging.
    pub fn enforced(&self) -> &[LayerRef] {
        &self.enforced
    }

    /// As [`ChargePlan::enforced`], with the compiled layers.
    pub(super) fn enforced_layers(&self) -> impl Iterator<Item = (LayerRef, &CompiledLayer)> + Clone {
        self.enforced.iter().copied().zip(&self.enforced_layers)
    }

    /// These layers, with the compiled ones.
    pub(super) fn compiled_layers<'a>(
        &'a self,
        layers: &'a [LayerRef],
    ) -> impl Iterator<Item = (LayerRef, &'a CompiledLayer)> + Clone {
        layers.iter().map(|layer_ref| (*layer_ref, self.layer(*layer_ref)))
    }

    /// The layer that counts penalties of the rule at a position.
    pub fn penalty(&self, position: PlanPosition) -> Option<LayerRef> {
        self.rule(position).penalty.map(|id| LayerRef { position, id })
    }

    /// The layers of one variant of a rule, and that of its penalties.
    pub fn layers_of_rule(&self, position: PlanPosition, variant: VariantId) -> impl Iterator<Item = LayerRef> + use<> {
        self.rule(position).charged_layers(variant).map(move |id| LayerRef { position, id })
    }

    /// Sets the layers that are charged by default.
    fn set_enforced(&mut self, is_enforced: impl Fn(&ChargePlan, PlanPosition) -> bool) {
        let positions = self.rules.ids().filter(|position| is_enforced(self, *position));
        let layers = positions.flat_map(|position| self.layers_of_rule(position, VariantId::DEFAULT));
        let mut layers: Vec<LayerRef> = layers.collect();
        self.sort_layers(&mut layers);
        self.enforced_layers = layers.iter().map(|layer_ref| self.layer(*layer_ref).clone()).collect();
        self.enforced = layers;
    }

    /// Sorts layers in the order of charging. Counters that are likelier to be full come first: those of one client
    /// before those of all clients, and small limits before large ones. So a charge that must be refunded is in a
    /// counter that few requests share.
    pub(super) fn sort_layers(&self, layers: &mut [LayerRef]) {
        layers.sort_by_key(|layer_ref| self.layer(*layer_ref).rank);
    }

    /// Prefetches the buckets in which a request's counters are searched first: see [`Table::prefetch`]. To be called as soon as
    /// the keys are known; for several requests, before the first of them is decided. Expects that the windows of a plan or an
    /// override are about as long as the default ones: the counters of others may be elsewhere. `keyed_requests`: the request
    /// under each rule of the plan.
    #[inline]
    pub fn prefetch<const W: usize>(
        &self,
        table: &Table<W>,
        keyed_requests: &IdVec<PlanPosition, Option<KeyedRequest>>,
    ) {
        self.prefetch_each(table, |position| keyed_requests.get(position).copied().flatten());
    }

    /// As [`ChargePlan::prefetch`], with a function that returns the request under each rule.
    #[inline]
    pub(super) fn prefetch_each<const W: usize>(
        &self,
        table: &Table<W>,
        keyed_request: impl Fn(PlanPosition) -> Option<KeyedRequest>,
    ) {
        for bucket in &self.buckets {
            if let Some(keyed_request) = keyed_request(bucket.position) {
                table.prefetch(keyed_request.key.bucket_hash.wrapping_add(bucket.offset));
            }
        }
    }

    /// Whether tokens of sliding windows are leased for any of the rules.
    pub fn leases_sliding(&self) -> bool {
        self.leases_sliding
    }

    /// Whether any of the rules counts refused requests.
    pub fn counts_refused(&self) -> bool {
        self.counts_refused
    }

    /// Whether a refusal by any of the rules starts a penalty.
    pub fn has_penalties(&self) -> bool {
        self.has_penalties
    }

    /// Whether a decision reads plain counters only, and a refusal neither changes a counter nor waits.
    pub fn is_plain(&self) -> bool {
        self.is_plain
    }

    /// Whether any of the rules limits the requests in flight.
    pub fn limits_concurrency(&self) -> bool {
        !self.concurrent.is_empty()
    }

    /// The shadow rules.
    pub fn shadow_rules(&self) -> &[PlanPosition] {
        &self.shadow_rules
    }

    /// Whether the rule at this position is a shadow rule.
    pub fn is_shadow(&self, position: PlanPosition) -> bool {
        self.rule(position).rule.is_shadow()
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;
    use crate::key::{KeyHash, OnMissing, Seed};
    use crate::limit::Limit;
    use crate::rule::Rule;

    #[test]
    fn the_buckets_of_a_plan_are_those_of_its_charges_each_once() {
        let layers = ["9/second", "99/minute", "999/hour", "9999/day"].map(|text| Limit::parse(text).unwrap()).to_vec();
        let rule = |name: &str| Rule::new(name, vec![KeyPart::GLOBAL], OnMissing::Never, layers.clone());
        let rule_set = Arc::new(RuleSet::new(&[rule("a"), rule("b")], Seed(1, 2), None));
        let charge_plan = rule_set.charge_plan(rule_set.rules.ids().rev());
        let key = KeyHash { bucket_hash: u64::MAX - 5, tag: 7 };
        let keyed_request = KeyedRequest { key, offset: 0, variant: VariantId::DEFAULT, cost: 1 };
        for position in charge_plan.rules().ids() {
            let layers = charge_plan.layers_of_rule(position, VariantId::DEFAULT);
            let mut charged: Vec<u64> = layers
                .map(|layer| charge_plan.layer(layer).new_charge(keyed_request, 0, 0))
                .map(|charge| charge.counter.key.bucket_hash)
                .collect();
            charged.dedup();
            let buckets = charge_plan.buckets.iter().filter(|bucket| bucket.position == position);
            let prefetched: Vec<u64> = buckets.map(|bucket| key.bucket_hash.wrapping_add(bucket.offset)).collect();
            assert_eq!((prefetched.len(), prefetched), (3, charged));
        }
        // Also with keys that are missing.
        charge_plan.prefetch(&Table::with_capacity(1).unwrap(), &[Some(keyed_request), None].into());
        charge_plan.prefetch(&Table::with_capacity(1).unwrap(), &IdVec::new());
    }
}
