//! The counting room: fixed-window counters in a lock-free table of fixed size.
//!
//! `word` is the arithmetic of one counter, `pace` how its windows follow one another, `memory` where counters
//! lie, `region` an array of counters with one per key, `table` adds what happens when it is full, `charge` decides a
//! request on several counters at once, `shard` splits a hot one, `lease` keeps tokens that were fetched from a counter
//! that gateways share, `queue` counts who waits, `ledger` keeps how each layer's counters are written. The room is
//! pure but for its atomics, which come through `sync` alone: it does not know the time, HTTP, rules or
//! configuration, and a decision allocates nothing but for shards.
//!
//! What it promises, each checked by a bounded model under `tests/model` and a property of the same name:
//! `never_admits_past_the_limit`, `no_hit_is_lost_at_rollover`, `a_late_thread_never_rewinds`,
//! `the_refused_leave_no_mark`, `a_refund_never_crosses_a_window`, `two_keys_never_share_a_count`,
//! `a_full_table_answers_as_documented`; and of purses `no_more_is_spent_than_was_deposited`,
//! `what_is_withdrawn_cannot_be_spent`, `a_refund_never_reaches_a_later_purse`, `a_full_table_keeps_no_purse`.

pub mod charge;
pub mod lease;
pub mod ledger;
pub mod memory;
pub mod pace;
pub mod queue;
pub mod region;
pub mod shard;
pub mod sync;
pub mod table;
pub mod word;
