//! A store for tests, in memory.
//!
//! - `counters`: what the scripts do.
//! - `network`: connections that move only by events.

pub mod counters;
pub mod network;
