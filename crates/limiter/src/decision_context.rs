//! What one decision reads and writes; kept and used again by the next of the same book, so that none
//! allocates.

use crate::acquire::Charge;
use crate::key::KeyHash;
use crate::rule_set::{ChargePlan, LayerRef, RuleSet};
use crate::sharded_counter::ShardReceipt;
use crate::shared_counting::CountingMode;
use crate::window::Window;

/// Who asks, under one rule, and for how much.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyedRequest {
    pub key: KeyHash,
    /// Where the key's windows start if they start at random, as a share of the period in units of 2^-64.
    pub offset: u64,
    /// Which of the rule's variants applies; 0: the windows of everyone.
    pub variant: usize,
    pub cost: u32,
}

#[derive(Clone, Debug, Default)]
pub struct DecisionContext {
    /// Per rule of the roster, who asks; `None` where the rule does not apply. Filled by the caller.
    pub keyed_requests: Vec<Option<KeyedRequest>>,
    /// Whether tokens may be taken from windows to come, where a layer has some in reserve.
    pub reserve: bool,
    /// The shard that is asked first, where a counter is split: the event loop's number.
    pub own_shard: u32,
    /// The counters asked, and their answers, in the order in which they were charged: first those
    /// of enforced rules, then those of shadow rules.
    pub charges: Vec<Charge>,
    /// Which layer each of `charges` belongs to.
    pub lines: Vec<LayerRef>,
    /// The time of what `charges` say, Unix milliseconds.
    pub decided_ms: u64,
    /// What was charged of counters that are split.
    pub shares: Vec<ShardReceipt>,
    /// Where in `shares` those begin that belong to the rules which are decided on just now.
    pub first_share: usize,
    /// Positions of the shadow rules that would have refused the request.
    pub shadowed: Vec<usize>,
    /// How each rule of the roster is counted, where several gateways share counters.
    pub stands: Vec<CountingMode>,
    /// Positions in `charges` for which too few tokens were fetched, after a step that lacked some.
    pub lacking: Vec<usize>,
    /// Positions in `charges` whose fetched tokens have become few, after a step that admitted.
    pub low: Vec<usize>,
    /// Layers that are paid for already.
    pub in_hand: Vec<LayerRef>,
    /// The window last found on each timeline: most requests fall into the same.
    windows: Vec<Window>,
    /// The lines of a request whose windows are not everyone's.
    pub(super) own_lines: Vec<LayerRef>,
}

impl DecisionContext {
    /// A desk for one of several event loops; each asks another shard first.
    pub fn of_loop(own_shard: u32) -> DecisionContext {
        DecisionContext { own_shard, ..DecisionContext::default() }
    }

    pub fn clear(&mut self) {
        self.decided_ms = 0;
        self.shadowed.clear();
        self.charges.clear();
        self.lines.clear();
        self.shares.clear();
        self.low.clear();
        self.in_hand.clear();
    }

    /// Whether a counter behind `first` has no room because of what may be owed there.
    #[cold]
    pub(super) fn meets_debts(&self, first: usize) -> bool {
        self.charges[first..].iter().any(|charge| charge.full && charge.may_owe())
    }

    /// Whether all who ask have the windows of everyone.
    pub(super) fn are_usual(&self) -> bool {
        self.keyed_requests.iter().flatten().all(|keyed_request| keyed_request.variant == 0)
    }

    /// The answer of one layer, or `None` if it does not apply to the request.
    pub fn answer(&self, line: LayerRef) -> Option<&Charge> {
        self.lines.iter().position(|other| *other == line).map(|i| &self.charges[i])
    }

    /// What was charged for the request in the layers of one rule, so that it can be taken back.
    pub fn shares_of(&self, position: usize) -> impl Iterator<Item = ShardReceipt> + '_ {
        let of_rule = self.charges.iter().zip(&self.lines).filter(move |(_, line)| line.rule == position);
        of_rule.filter_map(|(charge, _)| charge.share())
    }

    /// All that was charged for the request, so that it can be taken back.
    pub fn all_shares(&self) -> impl Iterator<Item = ShardReceipt> + '_ {
        self.charges.iter().filter_map(Charge::share).chain(self.shares.iter().copied())
    }

    /// Puts down what the request asks of each of `lines`, from place `first` on.
    #[inline]
    pub(super) fn put_down(
        &mut self,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        lines: &[LayerRef],
        now_ms: u64,
        first: usize,
    ) {
        self.charges.truncate(first);
        self.lines.truncate(first);
        for line in lines {
            if let Some(keyed_request) = self.keyed_requests[line.rule] {
                let charge = self.charge(rule_set, charge_plan, *line, keyed_request, now_ms);
                self.charges.push(charge);
                self.lines.push(*line);
            }
        }
    }

    /// What a request asks of one layer in the window that is open.
    #[inline(always)]
    pub(super) fn charge(
        &mut self,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        line: LayerRef,
        keyed_request: KeyedRequest,
        now_ms: u64,
    ) -> Charge {
        let layer = rule_set.layer_of(charge_plan, line);
        let end_ms = match rule_set.timelines[layer.timeline].are_shared() {
            true => self.window_end_ms(rule_set, layer.timeline, now_ms),
            false => rule_set.timelines[layer.timeline].window_at(now_ms, keyed_request.offset).end_ms,
        };
        layer.charge(keyed_request, end_ms, self.own_shard)
    }

    /// The end of the window that is open on a timeline which is the same for all keys.
    #[inline]
    fn window_end_ms(&mut self, rule_set: &RuleSet, timeline: usize, now_ms: u64) -> u64 {
        match self.windows.get(timeline) {
            Some(window) if window.contains(now_ms) => window.end_ms,
            _ => self.find_window(rule_set, timeline, now_ms),
        }
    }

    #[inline(never)]
    fn find_window(&mut self, rule_set: &RuleSet, timeline: usize, now_ms: u64) -> u64 {
        if self.windows.len() < rule_set.timelines.len() {
            self.windows.resize(rule_set.timelines.len(), Window::default());
        }
        self.windows[timeline] = rule_set.timelines[timeline].window_at(now_ms, 0);
        self.windows[timeline].end_ms
    }
}
