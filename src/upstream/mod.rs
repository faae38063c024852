//! The way to the upstream servers: connections, and the exchange of one request for one answer.
//!
//! Every event loop has its own connections; nothing here is shared between loops. `connection` is
//! one HTTP/1.1 connection, `relay` wakes whoever waits for it, `herald` overhears it, `pool` keeps the idle ones of one
//! server, `exchange` sends a request and decides when to try again, `upload` and `download` are what
//! passes through, `inbound` the body of a request before it does, `echo` the upstream that is built in.

pub mod connection;
pub mod download;
pub mod echo;
pub mod exchange;
pub mod herald;
pub mod inbound;
pub mod pool;
pub mod relay;
pub mod upload;
