//! The ground floor of Transom. The counting room is mounted twice: `count` on the machine's atomics
//! for properties and stress, `modelled` on loom's for models that try every interleaving. `rule` is the
//! rule book, on the former.
//!
//! It is a package of its own so that nothing but the rooms themselves, their atomics and the two provers
//! is compiled; a room that named the gateway, a clock or a socket would not build here. Run all of
//! it with `cargo test --release`. `TRANSOM_MODEL_EXTRA=1` lets every model preempt once more than
//! it does by default, which takes many times as long; that is what `make model` is for.
#![allow(clippy::duplicate_mod, reason = "mounting the same files on two kinds of atomics is the point")]
#![allow(clippy::collapsible_if, reason = "the style of the room's own files is judged where they live")]

#[path = "../../../src/count/mod.rs"]
pub mod count;
// The room's own tests run on real atomics; loom's exist only within a model.
#[cfg(not(test))]
pub mod modelled;
#[path = "../../../src/rule/mod.rs"]
pub mod rule;
