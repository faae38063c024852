//! The rule book: what a window is, what a rule says, may this pass.
//!
//! `window` divides time, `limit` is so much per window, `key` is who is counted, `book` puts them
//! together and asks the counting room. The room is pure: it knows neither HTTP nor files nor the
//! clock, and its only dependency beside the standard library is the keyed hash.

pub mod book;
pub mod key;
pub mod limit;
pub mod window;
