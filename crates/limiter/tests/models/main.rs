//! Models of the counting room: every interleaving of two or three threads over a table of one to
//! four slots, up to a number of preemptions that each model names.
//!
//! `region` proves that a key has one counter, `table` what a charge, a refund and a full table
//! promise, `spill` what a key that did not fit keeps to, `charge` what a request on several counters
//! promises. `rolling` adds windows that hang together, `floating` those that a request opens, `places`
//! requests that wait, `shards` counters that are split, `leases` tokens that were fetched to be spent here,
//! `ledger` how counters are written. Every model also names outcomes that must have occurred, so that none proves nothing.

mod acquire;
mod bucket;
mod first_request;
mod format_registry;
mod leases;
mod overflow;
mod rolling_over;
mod shards;
mod support;
mod table;
mod waiters;
