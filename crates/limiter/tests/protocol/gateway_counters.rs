//! The local counters of the gateways: a rule set of two shared rules, and a table with leases and known usage.
//!
//! One table serves all gateways in all states. Each step loads the state of a gateway into the table and saves it
//! afterwards, in windows later than all windows used before. This file does not know the store.

use std::sync::Arc;

use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::charge_plan::ChargePlan;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::handles::{Handle, PlanPosition, RuleId, VariantId};
use transom_limiter::key::{KeyHasher, KeyPart, OnMissing, PartArgument, PartKind, Seed};
use transom_limiter::leased_tokens::DepositResult;
use transom_limiter::limit::Limit;
use transom_limiter::rule::Rule;
use transom_limiter::rule_set::{KeyedRequest, RuleSet};
use transom_limiter::shared_counting::LocalDecision;
use transom_limiter::table::{Counter, Table};
use transom_limiter::window::{SEGMENTS_PER_PERIOD, Time, Windows};
use transom_limiter::window_kind::AcquireRequest;

use crate::scenario::Scenario;
use crate::state::{COUNTERS, Each, Gateway, NARROW, WIDE, Window};

const PERIOD_MS: u64 = 1000;
const SEED: Seed = Seed(3, 4);
const CLIENT: KeyPart =
    KeyPart { kind: &PartKind { name: "client", identity: "Client", number: 1 }, argument: PartArgument::None };

pub struct LocalCounters {
    charge_plan: ChargePlan,
    table: Table,
    context: DecisionContext,
    keyed_requests: Each<KeyedRequest>,
    limits: Each<u8>,
    is_sliding: bool,
    /// The start of the earlier of the two windows, Unix milliseconds.
    start_ms: u64,
}

/// A decision made without the store.
pub enum LocalOutcome {
    Charged,
    Refused,
    /// Tokens of these counters must be fetched.
    MissingTokens(Each<bool>),
}

impl LocalCounters {
    pub fn new(scenario: &Scenario) -> LocalCounters {
        let Scenario { limits, sharing, is_sliding, .. } = *scenario;
        let rule = |name: &str, key: Vec<KeyPart>, counter: usize| {
            let windows = match is_sliding {
                true => Windows::Sliding { period_ms: SEGMENTS_PER_PERIOD * PERIOD_MS },
                false => Windows::Even { period_ms: PERIOD_MS, offset_ms: 0 },
            };
            let tokens = u32::from(limits[counter]);
            let layer = Limit { tokens, windows, period_text: String::new(), capacity: None, reserve: 0, shards: 1 };
            Rule { sharing: sharing[counter], ..Rule::new(name, key, OnMissing::Refuse, vec![layer]) }
        };
        let narrow = rule("narrow", vec![CLIENT], NARROW);
        let rule_set = Arc::new(RuleSet::new(&[narrow, rule("wide", vec![], WIDE)], SEED, None));
        let charge_plan = rule_set.charge_plan(rule_set.rules.ids());
        let keyed_requests = COUNTERS.map(|counter| {
            let key = KeyHasher::new(SEED, rule_set.rules[RuleId::at(counter)].hash_prefix).finish();
            KeyedRequest { key, offset: 0, variant: VariantId::DEFAULT, cost: 1 }
        });
        let table = Table::with_capacity(1024).expect("there is memory");
        LocalCounters {
            charge_plan,
            table,
            context: DecisionContext::default(),
            keyed_requests,
            limits,
            is_sliding,
            start_ms: 1_000_000_000,
        }
    }

    fn counter(&self, counter: usize) -> Counter {
        let mut layers = self.charge_plan.layers_of_rule(PlanPosition::at(counter), VariantId::DEFAULT);
        let layer = layers.next().expect("each rule has a layer");
        self.charge_plan.layer(layer).counter(self.keyed_requests[counter])
    }

    fn now_ms(&self, window: Window) -> u64 {
        self.start_ms + u64::from(window) * PERIOD_MS + PERIOD_MS / 2
    }

    fn end_ms(&self, window: Window) -> u64 {
        self.start_ms + u64::from(window + 1) * PERIOD_MS
    }

    /// The time until which the known usage of a window counts.
    fn known_until_ms(&self, window: Window) -> u64 {
        self.end_ms(window) + if self.is_sliding { SEGMENTS_PER_PERIOD * PERIOD_MS } else { 0 }
    }

    /// Writes the state of a gateway into the table.
    fn load(&mut self, gateway: &Gateway) {
        self.start_ms += (2 + SEGMENTS_PER_PERIOD) * PERIOD_MS;
        for counter in COUNTERS {
            let (window, tokens) = gateway.lease[counter];
            if tokens > 0 {
                self.put_lease(counter, window, tokens);
            }
            if let Some((window, used)) = gateway.known_usage[counter] {
                self.table.set_known_usage(
                    self.counter(counter),
                    self.known_until_ms(window),
                    u32::from(used),
                    self.now_ms(window),
                );
            }
        }
    }

    fn put_lease(&self, counter: usize, window: Window, tokens: u8) {
        let end_ms = self.end_ms(window);
        let result = self.table.deposit(self.counter(counter), end_ms, u32::from(tokens), self.now_ms(window));
        assert_eq!(result, DepositResult::Stored);
    }

    /// Reads the state of a gateway from the table.
    fn save(&self, gateway: &mut Gateway) {
        for counter in COUNTERS {
            let left = |window| self.table.leased_tokens(self.counter(counter), self.now_ms(window)) as u8;
            gateway.lease[counter] = match (left(0), left(1)) {
                (0, 0) => (0, 0),
                (left, 0) => (0, left),
                (_, left) => (1, left),
            };
            let known_usage = self.table.known_usage(self.counter(counter), self.now_ms(0));
            gateway.known_usage[counter] =
                known_usage.map(|(end_ms, used)| (Window::from(end_ms == self.known_until_ms(1)), used as u8));
        }
    }

    /// Decides a request, for the first time or again.
    pub fn decide(&mut self, gateway: &mut Gateway, counters: Each<bool>, in_hand: Each<bool>) -> LocalOutcome {
        self.load(gateway);
        let now_ms = self.now_ms(gateway.window);
        let LocalCounters { charge_plan, table, context, keyed_requests, .. } = self;
        context.clear();
        context.inputs.keyed_requests.clear();
        context
            .inputs
            .keyed_requests
            .extend(COUNTERS.map(|counter| counters[counter].then_some(keyed_requests[counter])));
        let layers = charge_plan.enforced_layers_of(context);
        context.sharing.prepaid.extend(layers.iter().filter(|layer_ref| in_hand[layer_ref.position.index()]));
        charge_plan.set_counting_modes(|_beyond| false, &mut context.sharing.counting_modes);
        let outcome = match charge_plan.decide_locally(&layers, table, DecisionTime::read(&|| now_ms), context, true) {
            LocalDecision::Decided(Decision::Admitted) => LocalOutcome::Charged,
            LocalDecision::Decided(Decision::Refused | Decision::Delayed { .. }) => LocalOutcome::Refused,
            LocalDecision::MissingTokens => {
                let missing = |counter| {
                    context
                        .sharing
                        .missing_tokens
                        .iter()
                        .any(|i| context.result.charges[*i].layer.position.index() == counter)
                };
                LocalOutcome::MissingTokens(COUNTERS.map(missing))
            }
        };
        self.save(gateway);
        outcome
    }

    /// Deposits fetched tokens; `false` if they cannot be stored.
    pub fn deposit(&mut self, gateway: &mut Gateway, counter: usize, window: Window, tokens: u8) -> bool {
        self.load(gateway);
        let (end_ms, now_ms) = (self.end_ms(window), self.now_ms(gateway.window));
        let result = self.table.deposit(self.counter(counter), end_ms, u32::from(tokens), now_ms);
        self.save(gateway);
        result == DepositResult::Stored
    }

    /// Withdraws the remaining tokens of a window.
    pub fn withdraw(&mut self, gateway: &mut Gateway, counter: usize, window: Window) -> u8 {
        self.load(gateway);
        let tokens = self.table.withdraw(self.counter(counter), self.end_ms(window), u32::MAX);
        self.save(gateway);
        tokens as u8
    }

    /// Stores the usage of a counter; `false` if the usage of a later window is known.
    pub fn set_known_usage(&mut self, gateway: &mut Gateway, counter: usize, window: Window, used: u8) -> bool {
        self.load(gateway);
        let (end_ms, now_ms) = (self.known_until_ms(window), self.now_ms(gateway.window));
        self.table.set_known_usage(self.counter(counter), end_ms, u32::from(used), now_ms);
        self.save(gateway);
        gateway.known_usage[counter] == Some((window, used))
    }

    /// Refunds a token that was spent from the lease of a window; `false` if the window has ended. The token is charged
    /// again first, because a refund needs a receipt.
    pub fn refund(&mut self, gateway: &mut Gateway, counter: usize, window: Window) -> bool {
        let (of, left) = gateway.lease[counter];
        let before = Gateway { lease: [(0, 0); 2], ..gateway.clone() };
        self.load(&before);
        self.put_lease(counter, window, if of == window { left + 1 } else { 1 });
        let other = 1 - counter;
        if gateway.lease[other].1 > 0 {
            self.put_lease(other, gateway.lease[other].0, gateway.lease[other].1);
        }
        let request = AcquireRequest::plain(self.end_ms(window), u32::from(self.limits[counter]), 1).leased();
        let mut charges = [Charge::new(self.counter(counter).lease(), request)];
        let time = Time::plain(self.now_ms(window));
        assert_eq!(acquire_all(&self.table, &mut charges, &mut Vec::new(), time), AcquireResult::Admitted);
        if of != window && left > 0 {
            self.put_lease(counter, of, left);
        }
        let receipt = charges[0].receipt().expect("the charge was admitted");
        let is_refunded = self.table.refund(receipt.receipt, receipt.request, Time::plain(self.now_ms(gateway.window)));
        self.save(gateway);
        is_refunded
    }
}
