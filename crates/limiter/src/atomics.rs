//! The only access to atomic operations, and to locks that models check, in this crate.
//!
//! With the feature `loom` the same names stand for the atomics of the model checker, so that the models in
//! `models` check the code that runs in production.

#[cfg(not(feature = "loom"))]
pub use portable_atomic::AtomicU128;
#[cfg(not(feature = "loom"))]
pub use std::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(feature = "loom"))]
pub use std::sync::{Mutex, MutexGuard};

#[cfg(feature = "loom")]
#[path = "atomics_loom.rs"]
mod loom_atomics;
#[cfg(feature = "loom")]
pub use loom_atomics::{AtomicU64, AtomicU128, Mutex, MutexGuard, Ordering, fence};
