//! Limits of single clients that apply to one window.

use std::ops::Range;

use proptest::collection::vec;
use proptest::prelude::*;
use transom_limiter::decision::Decision;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::limit::Limit;
use transom_limiter::rule::{ClientWindows, Plan, Rule};
use transom_limiter::window::Windows;

use crate::oracle::Expected::{Admitted, Refused};
use crate::support::{Gateway, START_MS, limit, outcome, plain, rule};

/// The limits of one client, each with the time at which it applies, after [`START_MS`].
fn with_limits(rule: Rule, limits: Vec<(Vec<Limit>, Option<Range<u64>>)>) -> Rule {
    let plan = |layers| Plan { name: String::new(), layers, concurrent: None };
    let after_start = |during: Range<u64>| START_MS + during.start..START_MS + during.end;
    let limits = limits
        .into_iter()
        .map(|(layers, during)| ClientWindows { plan: plan(layers), during_ms: during.map(after_start) });
    Rule { client_limits: limits.collect(), ..rule }
}

impl Gateway<8> {
    /// Decides a request with limits of its own in the first rule.
    fn decide_limited(&mut self, cost: u32, now: DecisionTime<'_>) -> Decision {
        let rules = 0..self.charge_plan.rules().len();
        let mut requests: Vec<_> = rules.map(|rule| Some(self.keyed_request(rule, 0, cost))).collect();
        let limited = self.rule_set().rules.iter().next().and_then(|rule| rule.rule.client_variants().next());
        requests[0].iter_mut().zip(limited).for_each(|(request, (variant, _))| request.variant = variant);
        self.context.inputs.keyed_requests = requests.into_iter().collect();
        self.charge_plan.decide(&self.table, now, &mut self.context)
    }
}

proptest! {
    #![proptest_config(crate::config())]

    /// Threads may be late: a request counts in the latest window in use, under the limit of that window, unless the thread is in a
    /// window before that of raised limits.
    #[test]
    fn other_windows_than_that_of_raised_limits_have_the_limit_that_follows(
        steps in vec((0..30u64, prop_oneof![3 => Just(0u64), 1 => 0..150u64], 1..4u32), 1..150),
    ) {
        let layers = |short, long| vec![plain(short, 100), plain(long, 1000)];
        let during = [Some(100..200), Some(0..1000), None];
        let limits = [layers(7, 30), layers(3, 30), layers(3, 20)].into_iter().zip(during).collect();
        let limited = with_limits(rule("r", layers(3, 20)), limits);
        let mut gateway = Gateway::with_large_table(&[limited, rule("other", vec![plain(1000, 1000)])]);
        let (mut time_ms, mut latest, mut used) = (0, [0; 3], [0; 3]);
        for (pause_ms, late_ms, cost) in steps {
            time_ms += pause_ms;
            let now_ms = u64::saturating_sub(time_ms, late_ms);
            let windows = [100, 1000, 1000].map(|period_ms| now_ms / period_ms);
            let mut after = used;
            let mut fits = true;
            for layer in 0..3 {
                let window = windows[layer].max(latest[layer]);
                let before = if window == latest[layer] { used[layer] } else { 0 };
                after[layer] = before + cost;
                let is_raised = [window == 1 && now_ms >= 100, window == 0, true][layer];
                let limit = if is_raised { [7, 30, 1000][layer] } else { [3, 20, 1000][layer] };
                fits &= after[layer] <= limit;
            }
            let decision = gateway.decide_limited(cost, DecisionTime::read(&|| START_MS + now_ms));
            prop_assert_eq!(outcome(&decision), if fits { Admitted } else { Refused }, "at {}", now_ms);
            if fits {
                used = after;
                (0..3).for_each(|layer| latest[layer] = windows[layer].max(latest[layer]));
            }
        }
    }
}

/// As the end of a window that a request has opened, only that of one key is known.
#[test]
fn a_window_opened_by_a_request_ends_raised_limits() {
    let windows = |tokens| vec![limit(tokens, Windows::FirstRequest { period_ms: 100 })];
    let limits = vec![(windows(7), Some(30..130)), (windows(3), None)];
    let mut gateway = Gateway::with_large_table(&[with_limits(rule("r", windows(3)), limits)]);
    let mut admitted = |now_ms: u64, requests: usize| {
        let mut decide = || gateway.decide_limited(1, DecisionTime::read(&|| START_MS + now_ms));
        (0..requests).filter(|_| !matches!(decide(), Decision::Refused)).count()
    };
    assert_eq!(admitted(30, 9), 7);
    assert_eq!(admitted(129, 9), 0);
    // Another thread has opened the next window, before a late one uses it.
    assert_eq!(admitted(140, 1), 1);
    assert_eq!((admitted(125, 9), admitted(145, 9)), (0, 2));
}

/// The last segment of a sliding window that a request is counted in begins nowhere.
#[test]
fn a_sliding_window_does_not_end_limits_that_are_raised_in_another() {
    let windows = |tokens| vec![plain(tokens, 1000), limit(100, Windows::Sliding { period_ms: 100 })];
    let limits = vec![(windows(7), Some(0..1000)), (windows(3), None)];
    let mut gateway = Gateway::with_large_table(&[with_limits(rule("r", windows(3)), limits)]);
    let mut admitted = |now_ms: u64| {
        let mut decide = || gateway.decide_limited(1, DecisionTime::read(&|| START_MS + now_ms));
        (0..9).filter(|_| !matches!(decide(), Decision::Refused)).count()
    };
    assert_eq!((admitted(999), admitted(1000)), (7, 3));
}

/// The windows of a delayed request are charged again when they have ended: then under the limits that follow.
#[test]
fn a_request_that_is_charged_again_has_the_limits_of_its_window() {
    let limits = vec![(vec![plain(7, 100)], Some(0..100)), (vec![plain(3, 100)], None)];
    let mut gateway = Gateway::with_large_table(&[with_limits(rule("r", vec![plain(3, 100)]), limits)]);
    let decide = |gateway: &mut Gateway<8>, now_ms| gateway.decide_limited(1, DecisionTime::read(&|| now_ms));
    assert!(matches!(decide(&mut gateway, START_MS), Decision::Admitted));
    let layers: Vec<_> = gateway.context.result.charges.iter().map(|charge| charge.layer).collect();
    let Gateway { charge_plan, table, context } = &mut gateway;
    let mut recharge = || charge_plan.recharge(&layers, table, DecisionTime::read(&|| START_MS + 100), context);
    let admitted = (0..9).filter(|_| !matches!(recharge(), Decision::Refused)).count();
    assert_eq!((admitted, context.result.charges.as_slice()[0].request.limit), (3, 3));
}
