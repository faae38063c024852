//! The rooms of the gateway that decide here: a rule book of two shared rules, and a table with purses and tallies.
//!
//! One table serves all gateways of all states: each step puts into it what a gateway has, and takes it out again, in windows
//! that are later than all that were used before. It knows no store.

use transom_limiter::acquire::{AcquireResult, Charge, acquire_all};
use transom_limiter::counter::AcquireRequest;
use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::key::{KeyHasher, KeyPart, OnMissing, Seed};
use transom_limiter::leased_tokens::DepositResult;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Rule, Sharing};
use transom_limiter::rule_set::{ChargePlan, KeyedRequest, LayerRef, RuleSet};
use transom_limiter::shared_counting::LocalDecision;
use transom_limiter::table::{Counter, Table};
use transom_limiter::window::{Time, Windows};

use crate::state::{COUNTERS, Each, Gateway, NARROW, WIDE, Window};

const PERIOD_MS: u64 = 1000;
const SEED: Seed = Seed(3, 4);

pub struct House {
    rule_set: RuleSet,
    charge_plan: ChargePlan,
    table: Table,
    context: DecisionContext,
    keyed_requests: Each<KeyedRequest>,
    limits: Each<u8>,
    /// When the earlier of the two windows began.
    began_ms: u64,
}

/// What a gateway says by itself.
pub enum Said {
    Paid,
    Refused,
    /// Tokens of these counters have to be fetched.
    Lacks(Each<bool>),
}

impl House {
    pub fn new(limits: Each<u8>, sharing: Each<Sharing>) -> House {
        let rule = |name: &str, key: Vec<KeyPart>, counter: usize| {
            let windows = Windows::Even { period_ms: PERIOD_MS, offset_ms: 0 };
            let tokens = u32::from(limits[counter]);
            let layer = Limit { tokens, windows, period_text: String::new(), capacity: tokens, reserve: 0, shards: 1 };
            Rule { sharing: sharing[counter], ..Rule::new(name, key, OnMissing::Refuse, vec![layer]) }
        };
        let narrow = rule("narrow", vec![KeyPart::Header("client".to_owned())], NARROW);
        let rule_set = RuleSet::new(&[narrow, rule("wide", vec![], WIDE)], SEED, None);
        let charge_plan = rule_set.charge_plan(&COUNTERS);
        let keyed_requests = COUNTERS.map(|counter| {
            let key = KeyHasher::new(SEED, rule_set.rules[counter].hash_prefix).finish();
            KeyedRequest { key, offset: 0, variant: 0, cost: 1 }
        });
        let table = Table::with_capacity(1024).expect("there is memory");
        House {
            rule_set,
            charge_plan,
            table,
            context: DecisionContext::default(),
            keyed_requests,
            limits,
            began_ms: 1_000_000_000,
        }
    }

    fn counter(&self, counter: usize) -> Counter {
        let layer = self.rule_set.rules[counter].variant(0).start;
        self.rule_set
            .layer_of(&self.charge_plan, LayerRef { rule: counter, layer })
            .counter(self.keyed_requests[counter])
    }

    fn now_ms(&self, window: Window) -> u64 {
        self.began_ms + u64::from(window) * PERIOD_MS + PERIOD_MS / 2
    }

    fn end_ms(&self, window: Window) -> u64 {
        self.began_ms + u64::from(window + 1) * PERIOD_MS
    }

    /// Puts what a gateway has into the table.
    fn enter(&mut self, gateway: &Gateway) {
        self.began_ms += 2 * PERIOD_MS;
        for counter in COUNTERS {
            let (window, tokens) = gateway.purse[counter];
            if tokens > 0 {
                self.put(counter, window, tokens);
            }
            if let Some((window, used)) = gateway.tally[counter] {
                self.table.set_known_usage(
                    self.counter(counter),
                    self.end_ms(window),
                    u32::from(used),
                    self.now_ms(window),
                );
            }
        }
    }

    fn put(&self, counter: usize, window: Window, tokens: u8) {
        let end_ms = self.end_ms(window);
        let kept = self.table.deposit(self.counter(counter), end_ms, u32::from(tokens), self.now_ms(window));
        assert_eq!(kept, DepositResult::Stored);
    }

    /// Takes out what a gateway has by now.
    fn leave(&self, gateway: &mut Gateway) {
        for counter in COUNTERS {
            let left = |window| self.table.leased_tokens(self.counter(counter), self.now_ms(window)) as u8;
            gateway.purse[counter] = match (left(0), left(1)) {
                (0, 0) => (0, 0),
                (left, 0) => (0, left),
                (_, left) => (1, left),
            };
            let tally = self.table.known_usage(self.counter(counter), self.now_ms(0));
            gateway.tally[counter] = tally.map(|(end_ms, used)| (Window::from(end_ms == self.end_ms(1)), used as u8));
        }
    }

    /// A request comes, or comes again.
    pub fn decide(&mut self, gateway: &mut Gateway, kind: Each<bool>, hand: Each<bool>) -> Said {
        self.enter(gateway);
        let now_ms = self.now_ms(gateway.window);
        let House { rule_set, charge_plan, table, context, keyed_requests, .. } = self;
        context.clear();
        context.inputs.keyed_requests.clear();
        context.inputs.keyed_requests.extend(COUNTERS.map(|counter| kind[counter].then_some(keyed_requests[counter])));
        let lines = rule_set.enforced_layers(charge_plan, context);
        context.sharing.prepaid.extend(lines.iter().filter(|line| hand[line.rule]));
        rule_set.set_counting_modes(charge_plan, |_beyond| false, &mut context.sharing.counting_modes);
        let said =
            match rule_set.decide_locally(charge_plan, &lines, table, DecisionTime::read(&|| now_ms), context, true) {
                LocalDecision::Decided(Decision::Admitted) => Said::Paid,
                LocalDecision::Decided(Decision::Refused | Decision::Delayed { .. }) => Said::Refused,
                LocalDecision::MissingTokens => {
                    let lacks = |counter| {
                        context.sharing.missing_tokens.iter().any(|i| context.result.layers[*i].rule == counter)
                    };
                    Said::Lacks(COUNTERS.map(lacks))
                }
            };
        self.leave(gateway);
        said
    }

    /// Puts fetched tokens by; `false` if there is no place for them any more.
    pub fn deposit(&mut self, gateway: &mut Gateway, counter: usize, window: Window, tokens: u8) -> bool {
        self.enter(gateway);
        let (end_ms, now_ms) = (self.end_ms(window), self.now_ms(gateway.window));
        let kept = self.table.deposit(self.counter(counter), end_ms, u32::from(tokens), now_ms);
        self.leave(gateway);
        kept == DepositResult::Stored
    }

    /// Takes out what is left of a window.
    pub fn withdraw(&mut self, gateway: &mut Gateway, counter: usize, window: Window) -> u8 {
        self.enter(gateway);
        let tokens = self.table.withdraw(self.counter(counter), self.end_ms(window), u32::MAX);
        self.leave(gateway);
        tokens as u8
    }

    /// Remembers what a counter stands at; `false` if more recent is known.
    pub fn note(&mut self, gateway: &mut Gateway, counter: usize, window: Window, used: u8) -> bool {
        self.enter(gateway);
        let (end_ms, now_ms) = (self.end_ms(window), self.now_ms(gateway.window));
        self.table.set_known_usage(self.counter(counter), end_ms, u32::from(used), now_ms);
        self.leave(gateway);
        gateway.tally[counter] == Some((window, used))
    }

    /// Takes a token back that was paid from the purse of a window: charges it once more, so that there is something to
    /// take back, however long ago it was. `false` if its window is over.
    pub fn refund(&mut self, gateway: &mut Gateway, counter: usize, window: Window) -> bool {
        let (of, left) = gateway.purse[counter];
        let before = Gateway { purse: [(0, 0); 2], ..gateway.clone() };
        self.enter(&before);
        self.put(counter, window, if of == window { left + 1 } else { 1 });
        let other = 1 - counter;
        if gateway.purse[other].1 > 0 {
            self.put(other, gateway.purse[other].0, gateway.purse[other].1);
        }
        let ask = AcquireRequest::plain(self.end_ms(window), u32::from(self.limits[counter]), 1).leased();
        let mut charges = [Charge::new(self.counter(counter).lease(), ask)];
        let time = Time::plain(self.now_ms(window));
        assert_eq!(acquire_all(&self.table, &mut charges, &mut Vec::new(), time), AcquireResult::Admitted);
        if of != window && left > 0 {
            self.put(counter, of, left);
        }
        let share = charges[0].receipt().expect("it was charged");
        let back = self.table.refund(share.receipt, share.request, Time::plain(self.now_ms(gateway.window)));
        self.leave(gateway);
        back
    }
}
