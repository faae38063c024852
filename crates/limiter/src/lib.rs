//! Exact, lock-free rate limiting: layered fixed windows for millions of keys in a table of fixed size.
//!
//! The crate does no I/O and never reads a clock: each call is handed the time.
#![warn(clippy::too_many_lines)]

pub mod acquire;
pub mod atomics;
pub mod bucket;
pub mod burst_bound;
pub mod counter;
pub mod decision;
pub mod decision_context;
pub mod decision_time;
pub mod deferred_refunds;
pub mod delay;
pub mod format_registry;
pub mod ip_prefix;
pub mod key;
pub mod leased_tokens;
pub mod limit;
#[cfg_attr(feature = "loom", path = "memory_loom.rs")]
pub mod memory;
pub mod rule;
pub mod rule_set;
pub mod secret_digest;
pub mod sharded_counter;
pub mod shared_counting;
pub mod store_key;
pub mod table;
pub mod waiter_limit;
pub mod window;
