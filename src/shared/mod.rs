//! Counters that gateways share, in Redis or Valkey.
//!
//! `script` says what is asked of the server, and how; `store` has the connections over which it is asked, of one event
//! loop. `survey` asks servers what they are before they are relied upon, and `health` says what follows from it. This room knows nothing of requests and rules: a counter is a name, windows and a limit.

mod cluster;
mod dial;
pub mod health;
mod line;
mod link;
pub mod script;
mod sentinel;
mod slot;
pub mod store;
pub mod survey;
