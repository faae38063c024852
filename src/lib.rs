//! Transom: a reverse-proxy gateway that holds every client to layered fixed-window limits.
//!
//! The map. A room may use what stands below it, never what stands above; `tests/tidy.rs` holds it
//! to that.
//!
//! | floor | rooms |
//! | --- | --- |
//! | top: touches the world | [`cli`], [`reload`], [`run`], [`listen`], [`gateway`], [`upstream`], [`admin`], [`access`], [`counters`], [`shared`], [`metrics`], [`timer`], [`wire`], [`interim`], [`clock`] |
//! | first: HTTP's words and the file's, no I/O, no waiting | [`http`], [`config`], [`token`] |
//! | ground: pure, no clock | [`rule`], [`count`] |
//!
//! The way of a request: `listen::serve` → `gateway` → `upstream` → out. Everything else is a call
//! that returns a value.

#![warn(clippy::too_many_lines)]

pub mod access;
pub mod admin;
pub mod cli;
pub mod clock;
pub mod config;
pub mod count;
pub mod counters;
pub mod gateway;
pub mod http;
pub mod interim;
pub mod listen;
pub mod metrics;
pub mod reload;
pub mod rule;
pub mod run;
pub mod shared;
pub mod timer;
pub mod token;
pub mod upstream;
pub mod wire;
