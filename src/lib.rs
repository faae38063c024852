//! Transom: a reverse-proxy gateway that holds every client to layered fixed-window limits.
//!
//! A module uses only modules of the rows below, and those to its right in its own row; `tests/layering.rs` checks the order. The
//! library crate `transom-limiter` decides the limits.
//!
//! | layer | modules |
//! | --- | --- |
//! | process | [`cli`], [`server`], [`admin`], [`explain`], [`simulation`] |
//! | requests | [`downstream`], [`ratelimit_service`], [`proxy`], [`decision`], [`spans`], [`access_log`], [`key_set_fetcher`], [`upstream`] |
//! | counters outside of this process | [`redis_store`], [`persistence`] |
//! | basics | [`atomic_file`], [`clock`], [`file_watch`], [`http1_stream`], [`informational`], [`io_stream`], [`metrics`], [`timer`] |
//! | without I/O | [`top_keys`], [`http`], [`config`], [`jwt`] |
//!
//! A request passes `downstream::http1` or `downstream::http2`, then `proxy`, then `upstream`.

#![warn(clippy::too_many_lines)]

pub mod access_log;
pub mod admin;
pub mod atomic_file;
pub mod cli;
pub mod clock;
pub mod config;
pub mod decision;
pub mod downstream;
pub mod explain;
pub mod file_watch;
pub mod http;
pub mod http1_stream;
pub mod informational;
pub mod io_stream;
pub mod jwt;
pub mod key_set_fetcher;
pub mod metrics;
pub mod persistence;
pub mod proxy;
pub mod ratelimit_service;
pub mod redis_store;
pub mod server;
pub mod simulation;
pub mod spans;
pub mod timer;
pub mod top_keys;
pub mod upstream;
