//! Four threads share one limiter. However they interleave, exactly the limit is admitted.
//!
//! `cargo run -p transom-limiter --example threads`

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use transom_limiter::Limiter;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limiter =
        Limiter::builder().layer(1000, Duration::from_secs(60)).layer(5000, Duration::from_secs(3600)).build()?;
    let admitted = AtomicU32::new(0);
    // A fixed time, so that all requests fall into one window.
    let now_ms = 1_700_000_000_000;
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    if limiter.acquire("alice", 1, now_ms).is_admitted() {
                        admitted.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let admitted = admitted.into_inner();
    println!("2000 requests, {admitted} admitted");
    assert_eq!(admitted, 1000);
    Ok(())
}
