//! What each rule decided about a request, for metrics, logs, reports and responses.
//!
//! A [`Verdicts`] borrows the result of a decision. Details are derived when they are read, and cost other requests nothing.

use crate::charge_plan::{ChargePlan, LayerCharge, LayerRef};
use crate::concurrency::{ConcurrencyUsage, SlotState};
use crate::decision::Decision;
use crate::decision_context::DecisionContext;
use crate::handles::{IdVec, LimitNameId, PlanPosition, RuleId};
use crate::rule_set::{CompiledLayer, CompiledRule, KeyedRequest, NotCounted};
use crate::table::Counter;
use crate::window::Windows;
use crate::window_kind::{AcquireRequest, Usage, WindowKind};

/// What one rule decided about a request, without the figures.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The rule does not count the request.
    NotCounted(NotCounted),
    /// The windows of the rule had enough tokens.
    Admitted,
    /// A window of the rule lets the request wait: of several such rules, the first.
    Delayed,
    /// The request has waited for a slot of the rule.
    Waited,
    /// A shadow rule would have refused the request.
    Shadowed,
    /// The rule refused the request: a window is full, or no slot is free.
    Refused,
    /// Other rules refused the request. The windows of this rule had enough tokens.
    RefusedElsewhere,
}

/// What the rules of a charge plan decided about a request.
#[derive(Clone, Copy, Debug)]
pub struct Verdicts<'a> {
    charge_plan: &'a ChargePlan,
    context: &'a DecisionContext,
    decision: &'a Decision,
}

/// What one rule decided about a request.
#[derive(Clone, Copy, Debug)]
pub struct Verdict<'a> {
    /// The position of the rule in the charge plan.
    pub position: PlanPosition,
    all: Verdicts<'a>,
}

/// What a decision found in one window.
#[derive(Clone, Copy, Debug)]
pub struct WindowVerdict<'a> {
    charge: &'a LayerCharge,
    all: Verdicts<'a>,
}

impl ChargePlan {
    /// What the rules decided about a request, with the result of the decision in `context`.
    #[inline]
    pub fn verdicts<'a>(&'a self, context: &'a DecisionContext, decision: &'a Decision) -> Verdicts<'a> {
        Verdicts { charge_plan: self, context, decision }
    }
}

impl<'a> Verdicts<'a> {
    /// The time to which the verdicts refer, Unix milliseconds.
    #[inline]
    pub fn decided_ms(self) -> u64 {
        self.context.result.decided_ms
    }

    /// Whether the request was admitted at once, and no shadow rule would have refused it in its windows.
    pub fn is_mere_admission(self) -> bool {
        matches!(self.decision, Decision::Admitted) && self.shadowed_by_windows().is_empty()
    }

    /// Whether the rules together refused the request.
    #[inline]
    pub fn is_refused(self) -> bool {
        matches!(self.decision, Decision::Refused)
    }

    /// The request under each rule.
    #[inline]
    pub fn keyed_requests(self) -> &'a IdVec<PlanPosition, Option<KeyedRequest>> {
        &self.context.inputs.keyed_requests
    }

    /// The verdict of each rule, in the order of the configuration.
    #[inline]
    pub fn rules(self) -> impl Iterator<Item = Verdict<'a>> {
        self.charge_plan.rules().ids().map(move |position| self.of_rule(position))
    }

    /// The verdict of the rule at a position of the charge plan.
    #[inline]
    pub fn of_rule(self, position: PlanPosition) -> Verdict<'a> {
        Verdict { position, all: self }
    }

    /// The windows that were looked at, in the order of charging.
    #[inline]
    pub fn windows(self) -> impl Iterator<Item = WindowVerdict<'a>> {
        self.context.result.charges.iter().map(move |charge| WindowVerdict { charge, all: self })
    }

    /// The window of a layer, if it was looked at.
    #[inline]
    pub fn window_of(self, layer: LayerRef) -> Option<WindowVerdict<'a>> {
        self.context.charge_of(layer).map(|charge| WindowVerdict { charge, all: self })
    }

    /// Those of the windows that have too few tokens left.
    #[inline]
    pub fn full_windows(self) -> impl Iterator<Item = WindowVerdict<'a>> {
        self.windows().filter(|window| window.is_full())
    }

    /// The slots that were looked at.
    #[inline]
    pub fn slots(self) -> &'a [ConcurrencyUsage] {
        &self.context.result.concurrency
    }

    /// The shadow rules that would have refused the request in their windows.
    #[inline]
    pub fn shadowed_by_windows(self) -> &'a [PlanPosition] {
        &self.context.result.shadowed
    }

    /// When a refused request would be admitted: see [`ChargePlan::retry_at_ms`].
    pub fn retry_at_ms(self, now_ms: u64) -> Option<u64> {
        self.charge_plan.retry_at_ms(self.context, now_ms)
    }
}

impl<'a> Verdict<'a> {
    /// The rule.
    #[inline]
    pub fn rule(self) -> &'a CompiledRule {
        self.all.charge_plan.rule(self.position)
    }

    /// The rule's handle.
    #[inline]
    pub fn rule_id(self) -> RuleId {
        self.all.charge_plan.rules()[self.position]
    }

    /// The request under the rule; `None` if the rule does not count it.
    #[inline]
    pub fn keyed_request(self) -> Option<KeyedRequest> {
        self.all.keyed_requests()[self.position]
    }

    /// The windows of the rule, in the order of charging.
    #[inline]
    pub fn windows(self) -> impl Iterator<Item = WindowVerdict<'a>> {
        self.all.windows().filter(move |window| window.layer().position == self.position)
    }

    /// The slots of the rule.
    #[inline]
    pub fn slots(self) -> Option<&'a ConcurrencyUsage> {
        self.all.slots().iter().find(|usage| usage.position == self.position)
    }

    #[inline]
    fn has_slot_state(self, state: SlotState) -> bool {
        self.all.slots().iter().any(|usage| usage.position == self.position && usage.state == state)
    }

    /// What the rule decided.
    #[inline]
    pub fn outcome(self) -> Outcome {
        let Verdicts { charge_plan, context, decision } = self.all;
        if context.result.shadowed.contains(&self.position) || self.has_slot_state(SlotState::Shadowed) {
            return Outcome::Shadowed;
        }
        if self.keyed_request().is_none() {
            return Outcome::NotCounted(context.inputs.not_counted(self.position));
        }
        let mut charges = context.charges_of_rule(self.position);
        match decision {
            Decision::Refused if charges.any(|charge| charge.is_full) || self.has_slot_state(SlotState::Full) => {
                Outcome::Refused
            }
            Decision::Refused => Outcome::RefusedElsewhere,
            _ if self.has_slot_state(SlotState::Waited) => Outcome::Waited,
            Decision::Delayed { waiter: Some(waiter), .. } if waiter.position == self.position => Outcome::Delayed,
            // A full window that was read without a charge, or a window whose later tokens were charged.
            Decision::Delayed { waiter: None, .. }
                if charges.any(|charge| charge.is_full || charge_plan.takes_later_tokens(charge)) =>
            {
                Outcome::Delayed
            }
            Decision::Delayed { .. } | Decision::Admitted => Outcome::Admitted,
        }
    }
}

impl<'a> WindowVerdict<'a> {
    /// The layer of the window.
    #[inline]
    pub fn layer(self) -> LayerRef {
        self.charge.layer
    }

    /// The rule of the window.
    #[inline]
    pub fn rule(self) -> &'a CompiledRule {
        self.all.charge_plan.rule_of(self.charge.layer)
    }

    /// The compiled layer.
    #[inline]
    pub fn compiled_layer(self) -> &'a CompiledLayer {
        self.all.charge_plan.layer(self.charge.layer)
    }

    /// The windows of the layer.
    pub fn windows(self) -> &'a Windows {
        self.all.charge_plan.rule_set().windows_of(self.compiled_layer())
    }

    /// The name of the window in responses and metrics.
    #[inline]
    pub fn name(self) -> &'a str {
        self.rule().layer_name(self.charge.layer.id)
    }

    /// The name by which refusals of the window are counted: see [`CompiledRule::limit_names`].
    pub fn counted_name(self) -> LimitNameId {
        self.rule().counted_name(self.charge.layer.id)
    }

    /// Whether the window has too few tokens left for the request.
    #[inline]
    pub fn is_full(self) -> bool {
        self.charge.is_full
    }

    /// Whether the window is a penalty.
    #[inline]
    pub fn is_penalty(self) -> bool {
        self.compiled_layer().is_penalty()
    }

    /// Tokens granted per window.
    #[inline]
    pub fn limit(self) -> u32 {
        self.charge.request.limit
    }

    /// Tokens that may accumulate.
    #[inline]
    pub fn capacity(self) -> u32 {
        self.compiled_layer().capacity
    }

    /// Tokens used, and when the window ends.
    #[inline]
    pub fn usage(self) -> Usage {
        self.charge.usage
    }

    /// The counter of the key in the layer.
    #[inline]
    pub fn counter(self) -> Counter {
        self.charge.counter
    }

    /// Tokens that the request has taken from the window, as far as is known; 0 if it was refused.
    #[inline]
    pub fn taken(self) -> u64 {
        if self.all.is_refused() { 0 } else { u64::from(self.charge.request.cost) }
    }

    /// How the windows of the counter depend on each other.
    #[inline]
    pub fn kind(self) -> WindowKind {
        self.charge.request.kind
    }

    /// The window that counts penalties of the same rule.
    pub fn penalty(self) -> Option<WindowVerdict<'a>> {
        self.all.window_of(self.all.charge_plan.penalty(self.charge.layer.position)?)
    }

    /// What the counter of the key was asked for.
    #[inline]
    pub fn request(self) -> AcquireRequest {
        self.charge.request
    }

    /// Whether tokens of later windows are taken.
    pub fn takes_later_tokens(self) -> bool {
        self.all.charge_plan.takes_later_tokens(self.charge)
    }

    /// The usage in responses: see [`DecisionContext::stated_usage`].
    #[inline]
    pub fn stated_usage(self) -> Usage {
        let penalty = self.all.charge_plan.penalty(self.charge.layer.position);
        self.all.context.stated_usage(self.charge, penalty, u64::from(self.capacity()))
    }

    /// When the window admits the request, if the key makes no other requests; `None` if never.
    #[inline]
    pub fn available_at_ms(self, now_ms: u64) -> Option<u64> {
        self.all.charge_plan.rule_set().available_at_ms(self.charge, self.charge.layer.id, now_ms)
    }
}

impl ChargePlan {
    /// Whether a charge takes tokens of later windows.
    pub fn takes_later_tokens(&self, charge: &LayerCharge) -> bool {
        charge.usage.used > u64::from(self.layer(charge.layer).capacity)
    }

    /// The layers that refuse a delayed request after all: those that are full, or would delay it for longer.
    pub fn refusing_layers(&self, context: &DecisionContext) -> Vec<LayerRef> {
        let refuses = |charge: &&LayerCharge| charge.is_full || self.takes_later_tokens(charge);
        context.result.charges.iter().filter(refuses).map(|charge| charge.layer).collect()
    }
}

impl DecisionContext {
    /// States that these layers have refused the request, although refunds may have given back their tokens.
    pub fn set_full(&mut self, layers: &[LayerRef]) {
        let charges = self.result.charges.iter_mut().filter(|charge| layers.contains(&charge.layer));
        charges.for_each(|charge| charge.is_full = true);
    }

    /// The usage of a layer that clients are told. `penalty` is the layer that counts penalties of the same rule: while one lasts,
    /// all tokens are used, until it ends. `capacity`: of the layer.
    #[inline]
    pub fn stated_usage(&self, charge: &LayerCharge, penalty: Option<LayerRef>, capacity: u64) -> Usage {
        let Some(penalty) = penalty.and_then(|penalty| self.charge_of(penalty)) else { return charge.usage };
        if !penalty.is_full && penalty.usage.used == 0 {
            return charge.usage;
        }
        let window_end_ms = if charge.usage.used >= capacity { charge.usage.end_ms } else { 0 };
        Usage { used: capacity.max(charge.usage.used), end_ms: window_end_ms.max(penalty.usage.end_ms) }
    }
}
