//! Transom: a reverse-proxy gateway that holds every client to layered fixed-window limits.
//!
//! This crate is the process: listeners, workers, upstreams, the admin address and the commands. What needs none of them is in crates
//! of its own, and Cargo enforces their order: `transom-simulate`, `transom-store`, `transom-rules`, `transom-config`, `transom-http`,
//! `transom-jwt`, `transom-usage`, `transom-runtime`, and `transom-limiter`, which decides the limits.
//!
//! A module uses only modules of the rows below, and those to its right in its own row; `tests/layering.rs` checks the order.
//!
//! | layer | modules |
//! | --- | --- |
//! | process | [`cli`], [`server`], [`admin`], [`explain`] |
//! | requests | [`downstream`], [`ratelimit_service`], [`proxy`], [`decision`], [`spans`], [`access_log`], [`key_set_fetcher`], [`notify`], [`upstream`] |
//! | files | [`access_file`], [`acme`], [`persistence`], [`shared_data`] |
//! | basics | [`atomic_file`], [`file_watch`], [`http1_stream`], [`informational`], [`io_stream`], [`timer`], [`toml_comments`] |
//!
//! A request passes `downstream::http1` or `downstream::http2`, then `proxy`, then `upstream`.

pub mod access_file;
pub mod access_log;
pub mod acme;
pub mod admin;
pub mod atomic_file;
pub mod cli;
pub mod decision;
pub mod downstream;
pub mod explain;
pub mod file_watch;
pub mod http1_stream;
pub mod informational;
pub mod io_stream;
pub mod key_set_fetcher;
pub mod notify;
pub mod persistence;
pub mod proxy;
pub mod ratelimit_service;
pub mod server;
pub mod shared_data;
pub mod spans;
pub mod timer;
pub mod toml_comments;
pub mod upstream;
