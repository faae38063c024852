//! The way to the upstream servers: connections, and the exchange of one request for one answer.
//!
//! Every event loop has its own connections. `connection` is one HTTP/1.1 connection, `relay` wakes
//! whoever waits for it, `herald` overhears it, `pool` keeps the idle ones of one server, `place` counts what is under
//! way there. `fleet` is what all loops know of an upstream's servers, `prober` asks them how they are,
//! `balance` chooses one by the arithmetic of `pick`. `exchange` sends a request and decides when to try again,
//! `budget` how often,
//! and `circuit` counts what is under way in all loops. `upload` and `download` are what passes through, `echo` the upstream that is built in.

pub mod balance;
pub mod budget;
pub mod circuit;
pub mod connection;
pub mod download;
pub mod echo;
pub mod exchange;
pub mod fleet;
pub mod herald;
pub mod pick;
pub mod place;
pub mod pool;
pub mod prober;
pub mod relay;
pub mod upload;
