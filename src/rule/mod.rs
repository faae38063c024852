//! The rule book: what a window is, what a rule says, may this pass.
//!
//! `window` divides time, `limit` is so much per window, `key` is who is counted, `terms` a rule as configured, with
//! `network` and `digest` for those it names; `book` puts them together and asks the counting room, on a `desk`, at a time
//! that is `now`; `look` asks and charges nothing. `ways` is how layers write their counters, `lease` about counters that
//! gateways share, `share` what those are called, `wait` about what is not decided by this window alone, `abandoned` the
//! charges of requests that went away before their turn, `bound` about what layers let through at most. The room is pure: it knows
//! neither HTTP nor files nor the clock, and all it takes beside the standard library are two hashes.

pub mod abandoned;
pub mod book;
pub mod bound;
pub mod desk;
pub mod digest;
pub mod key;
pub mod lease;
pub mod limit;
pub mod look;
pub mod network;
pub mod now;
pub mod share;
pub mod terms;
pub mod wait;
pub mod ways;
pub mod window;
