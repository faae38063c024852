//! Models of penalties: a request that begins after a refusal has returned is refused until the penalty ends. Requests that are
//! decided at the same time as that refusal may be admitted, within the limit.

use std::sync::Arc;

use transom_limiter::decision::Decision;
use transom_limiter::decision_context::DecisionContext;

use crate::support::{Gateway, explore, race};

const PENALTY_MS: u64 = 200;

/// The result of a request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Outcome {
    Admitted,
    /// Until this time.
    Refused(Option<u64>),
}

use Outcome::{Admitted, Refused};

/// A gateway whose rule has a penalty.
fn gateway() -> Arc<Gateway> {
    Gateway::new(|rule| rule.penalty_ms = Some(PENALTY_MS))
}

fn decide(gateway: &Gateway, now_ms: u64) -> (Outcome, DecisionContext) {
    let (decision, context) = gateway.decide(now_ms);
    let outcome = match decision {
        Decision::Admitted | Decision::Delayed { .. } => Admitted,
        Decision::Refused => Refused(gateway.charge_plan.retry_at_ms(&context, now_ms)),
    };
    (outcome, context)
}

fn outcome(gateway: &Gateway, now_ms: u64) -> Outcome {
    decide(gateway, now_ms).0
}

/// One thread is refused and tries again in the next window, while another request arrives in that window.
#[test]
fn a_client_that_was_refused_is_locked_out() {
    let outcomes = explore(2, || {
        let gateway = gateway();
        assert_eq!(outcome(&gateway, 1050), Admitted);
        let [again, other] = race(
            &gateway,
            [
                |gateway| {
                    assert_ne!(outcome(gateway, 1060), Admitted, "the window is full");
                    outcome(gateway, 1150)
                },
                |gateway| outcome(gateway, 1150),
            ],
        );
        assert_eq!(again, Refused(Some(1260)));
        assert_eq!(outcome(&gateway, 1259), Refused(Some(1260)));
        assert_eq!(outcome(&gateway, 1260), Admitted);
        other
    });
    // Before the refusal, or after it.
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [Admitted, Refused(Some(1260))]);
}

/// Two threads are refused at once; each client tries again as soon as it has its own refusal.
#[test]
fn concurrent_refusals_lock_out_both_clients() {
    explore(2, || {
        let gateway = gateway();
        assert_eq!(outcome(&gateway, 1050), Admitted);
        let again = race(
            &gateway,
            [
                |gateway| {
                    assert_ne!(outcome(gateway, 1060), Admitted);
                    outcome(gateway, 1150)
                },
                |gateway| {
                    assert_ne!(outcome(gateway, 1070), Admitted);
                    outcome(gateway, 1150)
                },
            ],
        );
        assert_eq!(again[0], again[1]);
        assert!([Refused(Some(1260)), Refused(Some(1270))].contains(&again[0]), "{again:?}");
    });
}

/// A failed login is refused while a successful one is refunded: the refund does not end the penalty.
#[test]
fn a_refund_ends_no_penalty() {
    let outcomes = explore(2, || {
        let gateway = gateway();
        let (first, context) = decide(&gateway, 1050);
        assert_eq!(first, Admitted);
        let shared = Arc::clone(&gateway);
        let runner = loom::thread::spawn(move || [outcome(&shared, 1060), outcome(&shared, 1061)]);
        gateway.refund(&context, 1060);
        let [one, other] = runner.join().expect("no thread panicked");
        assert!(one == Admitted || other != Admitted, "{one:?} {other:?}");
        assert!(!(one == Admitted && other == Admitted), "one token came back");
        let until_ms = if one == Admitted { 1261 } else { 1260 };
        assert_eq!(outcome(&gateway, 1100), Refused(Some(until_ms)));
        (one, other)
    });
    assert_eq!(
        outcomes.into_iter().collect::<Vec<_>>(),
        [(Admitted, Refused(Some(1261))), (Refused(Some(1260)), Refused(Some(1260)))]
    );
}

/// Two threads with different times are refused at once: one of them starts the penalty, and both report its end.
#[test]
fn concurrent_refusals_start_one_penalty() {
    let outcomes = explore(2, || {
        let gateway = gateway();
        assert_eq!(outcome(&gateway, 1050), Admitted);
        let results = race(&gateway, [|gateway| outcome(gateway, 1060), |gateway| outcome(gateway, 1070)]);
        assert_eq!(results[0], results[1]);
        assert_eq!(outcome(&gateway, 1100), results[0]);
        results[0]
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [Refused(Some(1260)), Refused(Some(1270))]);
}
