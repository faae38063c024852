//! The way to the upstream servers: connections, and the exchange of one request for one answer.
//!
//! Every event loop has its own connections. `names` knows the addresses of a server, `dial` opens a stream to it.
//! `connection` is one HTTP/1.1 connection, `relay` wakes whoever waits for it, `herald` overhears it; `multiplex` is
//! one HTTP/2 connection (which `greeting` tells of), and `carrier` either of the two. `pool` keeps those of one server,
//! `place` counts what is under way there. `fleet` is what all loops know of an upstream's servers, of each a
//! `standing`, `prober` asks them how they are, `balance` chooses one by the arithmetic of `pick`. `exchange` sends a
//! request and decides when to try again, `budget` how often, and `circuit` counts what is under way in all loops.
//! `upload` and `download` are what passes through, `inbound` the body of a request before it does, `loan` one that can
//! be had back, `bounds` what it is held to, `tunnel` what passes when protocols were switched, `far_end` the upstream's
//! end of that, `echo` the upstream that is built in.

pub mod balance;
pub mod bounds;
pub mod budget;
pub mod carrier;
pub mod circuit;
pub mod connection;
pub mod dial;
pub mod download;
pub mod echo;
pub mod exchange;
pub mod far_end;
pub mod fleet;
pub mod greeting;
pub mod herald;
pub mod inbound;
pub mod loan;
pub mod multiplex;
pub mod names;
pub mod pick;
pub mod place;
pub mod pool;
pub mod prober;
pub mod relay;
pub mod standing;
pub mod tunnel;
pub mod upload;
