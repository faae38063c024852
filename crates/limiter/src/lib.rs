//! Exact, lock-free rate limiting: layered fixed windows for millions of keys in a table of fixed size.
//!
//! A [`Limiter`] decides whether a key may take another token. A key is any value that can be hashed, such as an IP
//! address or a user name. A limiter has one or more *layers*, such as "33 in a minute" and "2000 in an hour": each key
//! may take that many tokens in every window of a layer. A request is admitted if all layers have tokens left, and is
//! then charged in all of them. A refused request is charged in none.
//!
//! The crate does no I/O and never reads a clock: the caller passes the time. Only the middleware of feature `tower` has a
//! clock, which can be replaced.
//!
//! # Example
//!
//! ```
//! use std::time::{Duration, SystemTime, UNIX_EPOCH};
//! use transom_limiter::{Limiter, LimiterDecision};
//!
//! let limiter = Limiter::builder()
//!     .layer(33, Duration::from_secs(60))
//!     .layer(2000, Duration::from_secs(3600))
//!     .capacity(10_000)
//!     .build()?;
//!
//! let now_ms = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis() as u64;
//! match limiter.acquire("203.0.113.7", 1, now_ms) {
//!     LimiterDecision::Admitted(admission) => {
//!         println!("{} left in this minute", admission.layers()[0].remaining);
//!         // The request failed for a reason that is not the client's: return the token.
//!         limiter.refund(admission, now_ms);
//!     }
//!     LimiterDecision::Refused(refusal) => println!("retry after {:?}", refusal.retry_after()),
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Windows, layers and counters
//!
//! A *window* is an interval of time in which a limit holds: window number floor(unix time / period). A *layer* is a
//! limit together with its windows. A *counter* is the usage of one key in the current window of one layer: one
//! 128-bit word with the tag of the key, the end of the window and the tokens used. A counter is changed by
//! compare-and-swap only, so a charge never falls between two windows.
//!
//! Fixed windows admit at most twice the limit in an interval as long as a window, around the moment at which one
//! window ends and the next begins. A second layer with a shorter period bounds such bursts; [`burst_bound`] computes
//! the bound.
//!
//! # Guarantees
//!
//! Each guarantee is checked by a [loom](https://docs.rs/loom) model or a property test of the same name:
//!
//! - `never_admits_past_the_limit`: no interleaving of threads admits more than a window allows.
//! - `no_hit_is_lost_at_rollover`: a charge at the end of a window counts in that window or in the next.
//! - `a_late_thread_never_rewinds`: a thread whose time is behind never reopens a window that has ended.
//! - `the_refused_leave_no_mark`: a refused request consumes nothing, in any layer.
//! - `a_refund_never_crosses_a_window`: tokens return to the window in which they were taken, or expire.
//! - `two_keys_never_share_a_count`: while the table has free slots. Keys are compared by 54 bits of a keyed hash
//!   and by their buckets.
//! - `a_full_table_answers_as_documented`: a full table never gives a key its quota back. New keys share overflow
//!   counters, which is too strict for them, never too lax.
//!
//! # Memory
//!
//! The table is allocated once, with 32 bytes for each counter of its capacity, and never grows. Slots of windows that
//! have ended are reused. There is no background task and nothing to sweep. A decision allocates nothing; [`Limiter`]
//! keeps a buffer for each thread, which grows in the first decisions of the thread.
//!
//! # Limits
//!
//! Limits and costs are from 1 (costs from 0) to 2^32 - 1. Periods are from 10 ms to 366 days. Times are Unix
//! milliseconds until the year 2109.
//!
//! # Beyond `Limiter`
//!
//! [`Limiter`] is enough for most programs. The Transom gateway uses the modules below it, which offer more:
//!
//! - [`rule`] and [`rule_set`]: several rules with their own keys, plans for groups of clients, and overrides for single
//!   keys, all charged in one decision ([`decision`]).
//! - [`window`] and [`limit`]: calendar windows in a time zone, windows with a random offset for each key, windows opened
//!   by the first request of a key, tokens that roll over, and reserves.
//! - [`delay`]: requests that wait for a later window instead of being refused.
//! - [`concurrency`]: limits on the requests of a key in flight at the same time.
//! - [`sharded_counter`]: a counter divided among threads, for a key that all requests share.
//! - [`leased_tokens`] and [`shared_counting`]: limits that several processes share through a store, spent locally.
//! - [`table`] and [`memory`]: the counter table itself, in memory of its own or in a mapped file that outlives the process.
//!
//! # Features
//!
//! - `tower`: the module `tower`, a middleware for axum, hyper and other services of tower.
//! - `loom`: replaces atomics by those of loom, for the crate's own models. Not for other use.
#![deny(missing_docs)]

pub mod acquire;
pub mod atomics;
pub mod bucket;
pub mod burst_bound;
pub mod charge_plan;
pub mod concurrency;
pub mod counter;
pub mod decision;
pub mod decision_context;
pub mod decision_time;
pub mod deferred_refunds;
pub mod delay;
pub mod ending_limits;
pub mod handles;
pub mod identity;
pub mod ip_prefix;
pub mod key;
pub mod leased_tokens;
pub mod limit;
pub mod limiter;
#[cfg_attr(feature = "loom", path = "memory_loom.rs")]
pub mod memory;
pub mod penalty;
pub mod rule;
pub mod rule_set;
pub mod secret_digest;
pub mod sharded_counter;
pub mod shared_counting;
pub mod sliding_counter;
pub mod slot_decision;
pub mod store_key;
pub mod table;
#[cfg(feature = "tower")]
pub mod tower;
pub mod verdict;
pub mod waiter_limit;
pub mod window;
pub mod window_kind;

pub use limiter::{Admission, BuildError, LayerState, Limiter, LimiterBuilder, LimiterDecision, Refusal};

/// The examples of the README and of the guide are tests.
#[cfg(all(doctest, feature = "tower"))]
mod documents {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/guides/rust.md")]
    struct Guide;
}
