//! Charges the bytes of bodies and tunnels while they pass, for rules whose cost they are.
//!
//! The body of the request, that of the response and a tunnel count in the meter of their request. A task of the meter charges what
//! has been added twice a second, and the end of each body does. The rest is charged when the last holder drops the meter: so
//! whatever ends a request, what has passed is charged, once.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::task::{Poll, Waker};
use std::time::Duration;

use tokio::task::AbortHandle;

use transom_config::byte_cost::{ByteCost, OnExceeded};
use transom_limiter::decision::Decision;
use transom_limiter::handles::PlanPosition;
use transom_limiter::rule_set::KeyedRequest;
use transom_store::settlement::RuleCharges;

use super::charged_request::ChargedRequest;
use super::response::{BodyEnded, BodyObserver, ResponseBody};
use crate::upstream::request_body::{RequestBody, UploadViolation};
use crate::upstream::tunnel::ByteCounts;

/// How often what has passed is charged.
const CHARGE_INTERVAL: Duration = Duration::from_millis(500);

pub struct ByteMeter {
    request: Rc<ChargedRequest>,
    rules: RefCell<Vec<MeteredRule>>,
    pub counts: ByteCounts,
    cut: Cut,
    /// The task that charges.
    charging: AbortHandle,
}

/// A rule that has charged its reserve.
pub struct MeteredRule {
    position: PlanPosition,
    cost: ByteCost,
    /// What was charged in advance.
    reserved: RuleCharges,
    /// Tokens.
    charged: u64,
    state: State,
    /// Whether it breaks off transfers that exceed it.
    cuts: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Charges what passes.
    Charging,
    /// The response decides whether the request costs anything.
    Waiting,
    /// Nothing is charged any more.
    Settled,
}

/// Which directions are broken off.
#[derive(Default)]
struct Cut {
    request: Cell<bool>,
    response: Cell<bool>,
    /// Of a tunnel.
    waker: RefCell<Option<Waker>>,
}

impl MeteredRule {
    /// `charged`: in advance. `is_conditional`: whether it charges nothing else before the response.
    pub fn new(
        position: PlanPosition,
        cost: ByteCost,
        (reserved, charged): (RuleCharges, u32),
        is_conditional: bool,
        is_shadow: bool,
    ) -> MeteredRule {
        let state = if is_conditional { State::Waiting } else { State::Charging };
        let cuts = cost.on_exceeded == OnExceeded::Cut && !is_shadow;
        MeteredRule { position, cost, reserved, charged: charged.into(), state, cuts }
    }
}

impl ByteMeter {
    pub fn start(request: Rc<ChargedRequest>, rules: Vec<MeteredRule>) -> Rc<ByteMeter> {
        Rc::new_cyclic(|meter| {
            let charging = tokio::task::spawn_local(charge_repeatedly(Weak::clone(meter))).abort_handle();
            let (counts, cut) = (ByteCounts::default(), Cut::default());
            ByteMeter { request, rules: RefCell::new(rules), counts, cut, charging }
        })
    }

    /// Counts the body of the request as it passes.
    pub fn observe_request(self: &Rc<Self>, body: &mut RequestBody) {
        if self.rules.borrow().iter().any(|rule| rule.cost.counted.has_request()) {
            let meter = Rc::clone(self);
            body.observe(Box::new(move |bytes| {
                if meter.cut.request.get() {
                    return Err(UploadViolation::LimitExceeded);
                }
                meter.counts.to_upstream.update(|before| before + bytes.len() as u64);
                Ok(())
            }));
        }
    }

    /// Counts the body of the response as it passes.
    pub fn observe_response(self: &Rc<Self>, body: &mut ResponseBody) {
        if self.rules.borrow().iter().any(|rule| rule.cost.counted.has_response()) {
            body.observe_sent(|inner| Box::new(MeteredResponse { meter: Rc::clone(self), inner }));
        }
    }

    /// The response decides that the request counts under a rule that was waiting for it.
    pub fn count(&self, position: PlanPosition) {
        let mut rules = self.rules.borrow_mut();
        let waiting = rules.iter_mut().filter(|rule| rule.position == position && rule.state == State::Waiting);
        waiting.for_each(|rule| rule.state = State::Charging);
    }

    /// The response decides that the request costs nothing under a rule. Refunds the reserve.
    pub fn refund(&self, position: PlanPosition) {
        for rule in self.rules.borrow_mut().iter_mut().filter(|rule| rule.position == position) {
            rule.state = State::Settled;
            self.request.settle(position, &rule.reserved, 0);
            self.request.log_cost(position, 0);
        }
    }

    /// Charges what has passed since the last call; `true` if that was anything.
    pub fn charge(&self) -> bool {
        let mut is_changed = false;
        for rule in self.rules.borrow_mut().iter_mut().filter(|rule| rule.state == State::Charging) {
            if self.charge_rule(rule) {
                is_changed = true;
                if rule.cuts && self.is_exceeded(rule.position) {
                    self.cut(rule);
                }
            }
        }
        is_changed
    }

    fn tokens(&self, rule: &MeteredRule) -> u64 {
        rule.cost.tokens(self.counts.to_upstream.get(), self.counts.to_client.get())
    }

    fn charge_rule(&self, rule: &mut MeteredRule) -> bool {
        let ChargedRequest { worker, keyed_requests, .. } = &*self.request;
        let Some(keyed_request) = keyed_requests[rule.position] else { return false };
        let tokens = self.tokens(rule);
        self.request.log_cost(rule.position, tokens);
        let is_changed = tokens > rule.charged;
        while tokens > rule.charged {
            let cost = u32::try_from(tokens - rule.charged).unwrap_or(u32::MAX);
            let keyed_request = KeyedRequest { cost, ..keyed_request };
            worker.counters.charge_excess(self.request.keys(), rule.position, keyed_request);
            rule.charged += u64::from(cost);
        }
        is_changed
    }

    /// Whether more was used than a window has.
    fn is_exceeded(&self, position: PlanPosition) -> bool {
        let ChargedRequest { worker, config, keyed_requests, .. } = &*self.request;
        let charge_plan = &self.request.rules().charge_plan;
        let mut scratch = config.scratch();
        let context = &mut scratch.context;
        context.inputs.repeat(keyed_requests);
        worker.counters.peek(charge_plan, context);
        let verdict = charge_plan.verdicts(context, &Decision::Admitted).of_rule(position);
        verdict.windows().any(|window| !window.is_penalty() && window.takes_later_tokens())
    }

    fn cut(&self, rule: &MeteredRule) {
        self.cut.request.set(self.cut.request.get() || rule.cost.counted.has_request());
        self.cut.response.set(self.cut.response.get() || rule.cost.counted.has_response());
        self.request.log_cut(rule.position);
        self.cut.waker.take().into_iter().for_each(Waker::wake);
    }

    /// Waits until a rule breaks off the tunnel, in either direction.
    pub async fn cut_off(&self) {
        poll_fn(|cx| {
            if self.cut.request.get() || self.cut.response.get() {
                return Poll::Ready(());
            }
            self.cut.waker.replace(Some(cx.waker().clone()));
            Poll::Pending
        })
        .await;
    }
}

async fn charge_repeatedly(meter: Weak<ByteMeter>) {
    loop {
        tokio::time::sleep(CHARGE_INTERVAL).await;
        let Some(meter) = meter.upgrade() else { return };
        meter.charge();
    }
}

impl Drop for ByteMeter {
    /// Charges the rest, and refunds what was reserved beyond it. Without a response, a request counts.
    fn drop(&mut self) {
        self.charging.abort();
        let mut rules = self.rules.take();
        for rule in rules.iter_mut().filter(|rule| rule.state != State::Settled) {
            self.charge_rule(rule);
            if let Ok(tokens) = u32::try_from(self.tokens(rule)) {
                let is_refund = u64::from(tokens) < rule.charged;
                if is_refund {
                    self.request.settle(rule.position, &rule.reserved, tokens);
                }
            }
        }
    }
}

/// Follows the body of a response, with the observer that follows it too.
struct MeteredResponse {
    meter: Rc<ByteMeter>,
    inner: Option<Box<dyn BodyObserver>>,
}

impl BodyObserver for MeteredResponse {
    fn is_cut(&self) -> bool {
        self.meter.cut.response.get()
    }

    fn data(&mut self, bytes: &[u8]) {
        self.meter.counts.to_client.update(|before| before + bytes.len() as u64);
        self.inner.iter_mut().for_each(|inner| inner.data(bytes));
    }

    fn end(self: Box<Self>, end: BodyEnded<'_>) {
        // First the trailers may decide whether the request counts.
        self.inner.into_iter().for_each(|inner| inner.end(end));
        self.meter.charge();
    }
}
