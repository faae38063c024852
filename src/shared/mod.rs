//! Counters that gateways share, in Redis or Valkey.
//!
//! `script` says what is asked of the server, and how; `store` has the connections over which it is asked, of one event
//! loop. This room knows nothing of requests and rules: a counter is a name, windows and a limit.

mod cluster;
mod dial;
mod line;
mod link;
mod queue;
pub mod script;
mod sentinel;
mod slot;
pub mod store;
