//! Models of decisions that delay requests, in windows that a request opens.

use transom_limiter::decision::Decision;
use transom_limiter::rule::OnLimit;
use transom_limiter::window::Windows;

use crate::support::{Gateway, explore};

/// When a request of a client passes that is decided at this time.
fn passes_at_ms(gateway: &Gateway, now_ms: u64) -> u64 {
    match gateway.decide(now_ms).0 {
        Decision::Admitted => now_ms,
        Decision::Delayed { until_ms, .. } => until_ms,
        Decision::Refused => panic!("every request may wait"),
    }
}

/// A request reserves after a window which a refund ends meanwhile, so that a third request opens a later one.
#[test]
fn a_request_passes_in_the_window_that_it_is_charged_in() {
    let outcomes = explore(3, || {
        let gateway = Gateway::new(|rule| {
            rule.layers[0].windows = Windows::FirstRequest { period_ms: 100 };
            rule.on_limit = OnLimit::Delay { max_delay_ms: 10_000, max_waiting: 9 };
        });
        let (_, first) = gateway.decide(1050);
        let shared = std::sync::Arc::clone(&gateway);
        let second = loom::thread::spawn(move || passes_at_ms(&shared, 1080));
        gateway.refund(&first, 1060);
        let third = passes_at_ms(&gateway, 1070);
        let second = second.join().expect("no thread panicked");
        assert!(second.abs_diff(third) >= 100, "{second} and {third} are in one window");
        (second, third)
    });
    // Before the refund; after it, and before the third request; after both.
    for outcome in [(1150, 1250), (1080, 1180), (1170, 1070)] {
        assert!(outcomes.contains(&outcome), "{outcomes:?}");
    }
}
