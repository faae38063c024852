//! The rule book: what a window is, what a rule says, may this pass.
//!
//! `window` divides time, `limit` is so much per window, `key` is who is counted, `terms` a rule as
//! configured; `book` puts them together and asks the counting room, on a `desk`; `wait` is about
//! what is not decided by this window alone, `bound` about what layers let through at most. The room is pure: it knows neither HTTP nor files nor
//! the clock, and its only dependency beside the standard library is the keyed hash.

pub mod book;
pub mod bound;
pub mod desk;
pub mod key;
pub mod limit;
pub mod terms;
pub mod wait;
pub mod window;
