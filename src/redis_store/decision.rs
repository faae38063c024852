//! The decision about one request by counters that are shared, as far as something has to be fetched or asked for it.
//!
//! First everything is charged that lies in the table, tokens that were fetched among it: all or nothing, and without waiting where
//! enough was fetched. What the store decides itself comes last, in one call, so that it is the only one to be undone if
//! it refuses. Who has waited for as long as a request may wait goes on as rules do in an outage.

use std::mem::take;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::Shared;
use super::exact_mode::Sent;
use super::scripts::Refund;
use crate::metrics::redis::OutageDecision;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::rule::{OnOutage, Sharing};
use transom_limiter::rule_set::{ChargePlan, CountingMode, LayerRef, RuleSet};
use transom_limiter::shared_counting::LocalDecision;

/// So often a request asks in vain, as when others take the tokens that it fetches before it can.
pub(super) const ROUNDS_MAX: u32 = 64;
/// From this round on it gives up as soon as its time is over. Those before may be late because the loop was.
const ROUNDS_FREE: u32 = 4;

/// What the rules of a request say, if nothing has to be waited for.
pub enum Begun {
    Decided(Decision),
    Waits(Box<SharedDecision>),
    /// A rule refuses whatever it can not count.
    Unavailable,
}

/// A request that waits for the store.
pub struct SharedDecision {
    pub(super) shared: Rc<Shared>,
    pub(super) rule_set: Arc<RuleSet>,
    pub(super) context: DecisionContext,
    /// What the keys of the roster's rules are in the store; of those that are shared and apply.
    pub(super) texts: Vec<Option<Rc<str>>>,
    pub(super) progress: DecisionProgress,
    pub(super) next: Option<Next>,
    pub(super) deadline: Instant,
}

/// What was decided after all.
pub struct SharedOutcome {
    pub judgement: Decision,
    /// What it was decided on, as after any decision.
    pub context: DecisionContext,
    /// What gives back what the store has charged, for rules by their position.
    pub gifts: Vec<(usize, Refund)>,
    /// What the keys are in the store, of the rules that are shared.
    pub texts: Vec<Option<Rc<str>>>,
}

/// A rule refuses whatever it can not count.
#[derive(Debug)]
pub struct Unavailable;

/// Something of each rule of a roster; seldom of more than a few.
type Positions = SmallVec<[bool; 8]>;

/// How far a decision has come.
pub(super) struct DecisionProgress {
    /// 0: the enforced rules; then each shadow rule.
    pub(super) group: usize,
    pub(super) judgement: Option<Decision>,
    /// The rules that do without the store, by their position.
    pub(super) beyond: Positions,
    pub(super) gifts: Vec<(usize, Refund)>,
    pub(super) rounds: u32,
    /// Lines that are charged again; then nothing else is.
    again: Option<Vec<LayerRef>>,
    /// The store is asked, also where tokens could be fetched.
    pub(super) asks: bool,
}

/// What a decision waits for.
pub(super) enum Next {
    Done(Decision),
    Unavailable,
    /// Tokens for the counters that lack them; the desk is as it was before from here on.
    Fetch {
        first: usize,
    },
    /// The store is to decide these lines.
    Ask {
        first: usize,
        lines: Vec<LayerRef>,
    },
    /// Places in windows to come, for the rules that are full.
    Place {
        first: usize,
        lines: Vec<LayerRef>,
    },
}

impl DecisionProgress {
    pub(super) fn new(rules: usize) -> DecisionProgress {
        let beyond = SmallVec::from_elem(false, rules);
        DecisionProgress { group: 0, judgement: None, beyond, gifts: Vec::new(), rounds: 0, again: None, asks: false }
    }

    /// Puts down how each rule of the roster is counted in the next step.
    fn settle_stands(&self, rule_set: &RuleSet, charge_plan: &ChargePlan, context: &mut DecisionContext) {
        rule_set.set_counting_modes(charge_plan, |position| self.beyond[position], &mut context.sharing.counting_modes);
        for (stand, rule) in context.sharing.counting_modes.iter_mut().zip(&charge_plan.rules).filter(|_| self.asks) {
            if *stand == CountingMode::Leased && !rule_set.rules[*rule].is_sharded() {
                *stand = CountingMode::Remote;
            }
        }
    }
}

impl Shared {
    /// Decides a request whose askers lie on the desk. `text` tells what the key of a rule is in the store.
    pub fn begin(
        self: &Rc<Self>,
        rule_set: &Arc<RuleSet>,
        charge_plan: &ChargePlan,
        context: &mut DecisionContext,
        text: impl Fn(usize) -> Option<Rc<str>>,
    ) -> Begun {
        context.clear();
        let mut progress = DecisionProgress::new(charge_plan.rules.len());
        match self.advance(rule_set, charge_plan, context, &[], &mut progress) {
            Next::Done(judgement) => {
                if let Decision::Refused = judgement {
                    self.count_refusal(rule_set, charge_plan, context, &progress, &text);
                    self.recheck(rule_set, charge_plan, context, text);
                }
                Begun::Decided(judgement)
            }
            Next::Unavailable => Begun::Unavailable,
            next => {
                let is_shared = |position: usize| {
                    rule_set.rules[charge_plan.rules[position]].rule.sharing != Sharing::Local
                        && context.inputs.keyed_requests[position].is_some()
                };
                let text = |position| if is_shared(position) { text(position) } else { None };
                Begun::Waits(Box::new(SharedDecision {
                    texts: (0..charge_plan.rules.len()).map(text).collect(),
                    shared: Rc::clone(self),
                    rule_set: Arc::clone(rule_set),
                    context: context.clone(),
                    progress,
                    next: Some(next),
                    deadline: Instant::from_std(self.clock.instant()) + self.timeout,
                }))
            }
        }
    }

    /// Charges lines of a request again, whose windows are over since it was charged.
    pub fn charge_again(
        self: &Rc<Self>,
        rule_set: &Arc<RuleSet>,
        charge_plan: &ChargePlan,
        again: Vec<LayerRef>,
        mut context: DecisionContext,
        texts: Vec<Option<Rc<str>>>,
    ) -> Box<SharedDecision> {
        context.clear();
        let progress = DecisionProgress { again: Some(again), ..DecisionProgress::new(charge_plan.rules.len()) };
        let deadline = Instant::from_std(self.clock.instant()) + self.timeout;
        let (shared, rule_set) = (Rc::clone(self), Arc::clone(rule_set));
        Box::new(SharedDecision { shared, rule_set, context, texts, progress, next: None, deadline })
    }

    /// Goes on with a decision until it is made, or something has to be waited for.
    pub(super) fn advance(
        self: &Rc<Self>,
        rule_set: &Arc<RuleSet>,
        charge_plan: &ChargePlan,
        context: &mut DecisionContext,
        texts: &[Option<Rc<str>>],
        progress: &mut DecisionProgress,
    ) -> Next {
        loop {
            let shadow = progress.group.checked_sub(1).map(|nth| charge_plan.shadow_rules().get(nth).copied());
            let lines = match shadow {
                None => progress.again.clone().unwrap_or_else(|| rule_set.enforced_layers(charge_plan, context)),
                Some(_) if progress.again.is_some() => {
                    return Next::Done(progress.judgement.take().unwrap_or(Decision::Refused));
                }
                Some(None) => return Next::Done(progress.judgement.take().unwrap_or(Decision::Refused)),
                Some(Some(position)) => match context.inputs.keyed_requests[position] {
                    Some(keyed_request) => rule_set.shadow_layers(charge_plan, position, keyed_request),
                    None => Vec::new(),
                },
            };
            progress.settle_stands(rule_set, charge_plan, context);
            if shadow.is_none() && self.is_unavailable(rule_set, charge_plan, &lines, context, progress) {
                self.meter.decided_in_outage(OutageDecision::Refused);
                return Next::Unavailable;
            }
            let first = context.result.charges.len();
            context.sharing.first_shard_receipt = context.result.shard_receipts.len();
            let clock = || self.clock.now().unix_ms;
            let step = rule_set.decide_locally(
                charge_plan,
                &lines,
                &self.table,
                DecisionTime::read(&clock),
                context,
                shadow.is_none(),
            );
            let judgement = match step {
                LocalDecision::MissingTokens => {
                    context.return_layer_buffer(lines);
                    return Next::Fetch { first };
                }
                LocalDecision::Decided(judgement) => judgement,
            };
            if shadow.is_none() {
                self.count_without(rule_set, charge_plan, context, progress);
            }
            match (judgement, shadow.flatten()) {
                (Decision::Refused, Some(position)) => context.result.shadowed.push(position),
                (Decision::Refused, None)
                    if rule_set.may_be_delayed(charge_plan, context)
                        && context.sharing.counting_modes.contains(&CountingMode::Leased) =>
                {
                    return Next::Place { first, lines };
                }
                (Decision::Refused, None) => {
                    context.return_layer_buffer(lines);
                    return Next::Done(Decision::Refused);
                }
                (passes, shadow) => {
                    self.prefetch(rule_set, charge_plan, context);
                    self.owe(rule_set, charge_plan, context, first, texts);
                    if shadow.is_none() {
                        progress.judgement = Some(passes);
                    }
                    let asked = self.to_ask(&lines, context, progress);
                    if !asked.is_empty() {
                        return Next::Ask { first, lines: asked };
                    }
                }
            }
            context.return_layer_buffer(lines);
            progress.group += 1;
        }
    }

    /// Whether a rule that refuses what it can not count would have to.
    fn is_unavailable(
        &self,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        lines: &[LayerRef],
        context: &DecisionContext,
        progress: &DecisionProgress,
    ) -> bool {
        lines.iter().filter(|line| progress.beyond[line.rule]).any(|line| {
            let rule = &rule_set.rules[charge_plan.rules[line.rule]].rule;
            rule.on_outage == OnOutage::Refuse
                && rule.sharing != Sharing::Local
                && context.inputs.keyed_requests[line.rule].is_some()
        })
    }

    /// Counts what rules do that do without the store.
    fn count_without(
        &self,
        rule_set: &RuleSet,
        charge_plan: &ChargePlan,
        context: &DecisionContext,
        progress: &DecisionProgress,
    ) {
        for (position, rule) in charge_plan.rules.iter().enumerate().filter(|(position, _)| progress.beyond[*position])
        {
            let rule = &rule_set.rules[*rule].rule;
            if rule.sharing != Sharing::Local && context.inputs.keyed_requests[position].is_some() {
                match rule.on_outage {
                    OnOutage::Local => self.meter.decided_in_outage(OutageDecision::Local),
                    OnOutage::Allow => self.meter.decided_in_outage(OutageDecision::Allowed),
                    OnOutage::Refuse => {}
                }
            }
        }
    }

    /// The lines that the store decides itself.
    fn to_ask(&self, lines: &[LayerRef], context: &DecisionContext, progress: &DecisionProgress) -> Vec<LayerRef> {
        let is_asked = |line: &&LayerRef| {
            let is_aside = context.sharing.counting_modes[line.rule] == CountingMode::Remote;
            is_aside && !progress.beyond[line.rule] && context.inputs.keyed_requests[line.rule].is_some()
        };
        lines.iter().filter(is_asked).copied().collect()
    }
}

impl SharedDecision {
    /// Waits for what it takes, and decides.
    pub async fn decide(mut self: Box<Self>, charge_plan: &ChargePlan) -> Result<SharedOutcome, Unavailable> {
        let (shared, rule_set) = (Rc::clone(&self.shared), &Arc::clone(&self.rule_set));
        loop {
            let next = match self.next.take() {
                Some(next) => next,
                None => {
                    let SharedDecision { context, texts, progress, .. } = &mut *self;
                    shared.advance(rule_set, charge_plan, context, texts, progress)
                }
            };
            match next {
                Next::Done(judgement) => {
                    if let Decision::Refused = judgement {
                        shared.count_refusal(rule_set, charge_plan, &self.context, &self.progress, |rule| {
                            self.text(rule)
                        });
                        shared.recheck(rule_set, charge_plan, &self.context, |rule| self.text(rule));
                        shared.give_later(self.progress.gifts.drain(..).map(|(_, gift)| gift).collect());
                    }
                    let SharedDecision { context, texts, progress, .. } = &mut *self;
                    let (context, texts, gifts) = (take(context), take(texts), take(&mut progress.gifts));
                    return Ok(SharedOutcome { judgement, context, gifts, texts });
                }
                // What was charged is given back as the inquiry goes.
                Next::Unavailable => return Err(Unavailable),
                Next::Fetch { first } => self.next = self.fetch(rule_set, charge_plan, first).await,
                Next::Ask { first, lines } => {
                    if let Some(refused) = self.ask(rule_set, charge_plan, first, &lines).await {
                        self.next = refused;
                    }
                }
                Next::Place { first, lines } => {
                    self.next = Some(self.place(rule_set, charge_plan, first, &lines).await)
                }
            }
        }
    }

    /// Refuses what lies on the desk behind `first`, of which nothing is charged any more. `None`: it was only tried out.
    pub(super) fn refuse(&mut self, rule_set: &RuleSet, charge_plan: &ChargePlan, first: usize) -> Option<Next> {
        let shadow = self.progress.group.checked_sub(1).and_then(|nth| charge_plan.shadow_rules().get(nth).copied());
        if let Some(position) = shadow {
            self.context.result.shadowed.push(position);
            self.progress.group += 1;
            return None;
        }
        if !rule_set.may_be_delayed(charge_plan, &self.context) {
            return Some(Next::Done(Decision::Refused));
        }
        let lines =
            self.progress.again.clone().unwrap_or_else(|| rule_set.enforced_layers(charge_plan, &mut self.context));
        self.context.result.decided_ms = self.shared.clock.now().unix_ms;
        Some(Next::Place { first, lines })
    }

    /// What the key of a rule is in the store; `None` if it is not shared or does not apply.
    pub(super) fn text(&self, rule: usize) -> Option<Rc<str>> {
        self.texts.get(rule).cloned().flatten()
    }

    /// Begins another round of asking the store about rules; `true` if it is not asked, because there were too many, or
    /// because it is known that it does not answer for some of them, which do without.
    pub(super) fn gives_up_on(&mut self, rules: &[usize]) -> bool {
        self.progress.rounds += 1;
        if self.progress.rounds > ROUNDS_MAX || self.is_late() {
            self.do_without(rules);
            return true;
        }
        self.go_beyond(rules)
    }

    /// Whether it has asked for long enough.
    pub(super) fn is_late(&self) -> bool {
        self.progress.rounds > ROUNDS_FREE && Instant::from_std(self.shared.clock.instant()) >= self.deadline
    }

    /// Lets rules do without the store if it is known that their server can not be asked; `true` if there are some.
    pub(super) fn go_beyond(&mut self, rules: &[usize]) -> bool {
        if !self.shared.breaker.is_any_open() {
            return false;
        }
        let mut goes = false;
        for rule in rules {
            let Some(text) = self.text(*rule) else { continue };
            if self.shared.is_beyond(&self.shared.base(&text, "", 0)) {
                self.progress.beyond[*rule] = true;
                goes = true;
            }
        }
        goes
    }

    pub(super) fn do_without(&mut self, rules: &[usize]) {
        rules.iter().for_each(|rule| self.progress.beyond[*rule] = true);
    }

    /// The rules that wait for one server go on without it; `began` is when they began to.
    pub(super) fn lose_patience(&mut self, rules: &[usize], began: Instant) {
        self.do_without(rules);
        // A server that has answered until just now is not away.
        if Instant::from_std(self.shared.clock.instant()) < began + self.shared.timeout / 2 {
            return;
        }
        if let Some(text) = rules.first().and_then(|rule| self.text(*rule)) {
            let server = self.shared.store.server_of(&self.shared.base(&text, "", 0));
            self.shared.timed_out(server);
        }
    }

    /// Lets the store decide lines, after all others were charged. `Some`: what was charged is given back, and the decision goes on
    /// with that, or from the beginning.
    async fn ask(
        &mut self,
        rule_set: &Arc<RuleSet>,
        charge_plan: &ChargePlan,
        first: usize,
        lines: &[LayerRef],
    ) -> Option<Option<Next>> {
        let now_ms = self.shared.clock.now().unix_ms;
        let behind = rule_set.add_prepared_charges(charge_plan, lines, &self.shared.table, now_ms, &mut self.context);
        let refuses = match self.send(rule_set, charge_plan, behind).await {
            Sent::Granted(gifts) => {
                self.progress.gifts.extend(gifts);
                if self.progress.group == 0 {
                    self.charge_again_what_ends(behind, |_line| true);
                }
                self.progress.group += 1;
                return None;
            }
            Sent::Refused => true,
            Sent::OtherWindow | Sent::Failed => false,
        };
        let shared = Rc::clone(&self.shared);
        shared.undo(rule_set, &mut self.context, first, Vec::new());
        if !refuses {
            self.context.truncate(first);
            return Some(None);
        }
        self.context.subtract_costs(first, behind);
        Some(self.refuse(rule_set, charge_plan, first))
    }
}

impl Drop for SharedDecision {
    /// Who goes away before it is decided has charged nothing.
    fn drop(&mut self) {
        let gifts = self.progress.gifts.drain(..).map(|(_, gift)| gift).collect();
        self.shared.undo(&self.rule_set, &mut self.context, 0, gifts);
    }
}

/// Waits until then, and no longer than it takes to see what has arrived by then.
pub(super) async fn within<T>(deadline: Instant, future: impl Future<Output = T>) -> Option<T> {
    let mut future = std::pin::pin!(future);
    tokio::select! {
        biased;
        done = &mut future => return Some(done),
        () = tokio::time::sleep_until(deadline) => {}
    }
    // The loop itself may have been late: what lies in the socket is read before it is said that nothing came.
    for _ in 0..4 {
        tokio::time::sleep(Duration::ZERO).await;
        let arrived = std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await;
        if let Poll::Ready(done) = arrived {
            return Some(done);
        }
    }
    None
}
