//! The one door to atomics for the counting room.
//!
//! It exists so that a model checker can stand behind the same three names: the models under
//! `tests/model` mount this folder with another `sync.rs`, whose atomics are loom's. It does not
//! know what a counter is.

pub use portable_atomic::AtomicU128;
pub use std::sync::atomic::{AtomicU64, Ordering, fence};
