//! Counters that several gateways share through Redis or Valkey. Each worker has its own connections; leased tokens are
//! in the table that all workers share. This crate knows neither HTTP nor routes.
//!
//! - Servers: `client` (entry point), `connect`, `connection`, `reconnecting`, `cluster`, `sentinel`, `hash_slot`.
//! - Protocol: `scripts` (commands and replies, pure).
//! - Decisions: `shared_decision` (one request), `exact_mode` (what the store decides itself), `token_fetch` and
//!   `lease_sizing` (leases), `decision_queries` (decision API).
//! - Outages: `circuit_breaker`, `unreported_usage`, `reported_usage`, `outage`, `outage_log`.
//! - `known_usage`: what the workers of a gateway know of the usage in the store. `usage_order`: which replies may lower it.
//! - Maps that gateways share: `shared_map` (a map in the store), `map_follower` (the copy of a gateway).
//! - After the response: `settlement`. While a request waits for a later window: `delayed_charges`.
//! - Diagnosis: `diagnose`.
//! - `shared_counters`: the state of one worker, calls with their bookkeeping, periodic tasks.
//! - `test_worker`: a worker and a store for unit tests. `exploration`: several gateways on a `simulated_store`, in every order of
//!   events.

mod circuit_breaker;
pub mod client;
mod cluster;
mod connect;
mod connection;
pub mod counter_access;
pub mod decision_queries;
pub mod delayed_charges;
pub mod diagnose;
mod exact_mode;
#[cfg(test)]
mod exploration;
mod hash_slot;
mod known_usage;
pub mod lease_sizing;
pub mod map_follower;
mod outage;
mod outage_log;
mod reconnecting;
mod reported_usage;
pub mod scripts;
mod sentinel;
pub mod settlement;
pub mod shared_counters;
pub mod shared_decision;
pub mod shared_map;
#[cfg(test)]
mod simulated_store;
#[cfg(test)]
mod test_worker;
mod token_fetch;
mod unreported_usage;
mod usage_order;
