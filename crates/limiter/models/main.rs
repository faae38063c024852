//! Loom models of the limiter: every interleaving of two or three threads over a table of one to four slots, up to the number
//! of preemptions that each model names.
//!
//! `bucket`: a key has one counter. `table`: acquire, refund and a full table. `overflow`: keys without a slot. `acquire`:
//! requests on several counters. `rolling_over`: windows with rollover. `first_request`: windows that a request opens.
//! `waiters`: reservations. `delays`: decisions that reserve. `concurrency`: requests in flight. `shards`: sharded counters. `sliding`: sliding windows.
//! `penalty`: lock-outs. `leases`: leased tokens. `reports`: usage that is reported to a store.
//! Every model also names outcomes that must occur, so that no model passes without testing anything.

mod acquire;
mod bucket;
mod concurrency;
mod delays;
mod first_request;
mod leases;
mod overflow;
mod penalty;
mod reports;
mod rolling_over;
mod shards;
mod sliding;
mod support;
mod table;
mod waiters;
