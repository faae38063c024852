//! The way to the upstream servers: connections, and the exchange of one request for one answer.
//!
//! Every event loop has its own connections; nothing here is shared between loops. `names` knows the addresses
//! of a server, `dial` opens a stream to it. `connection` is one HTTP/1.1 connection, `relay` wakes whoever waits
//! for it, `herald` overhears it; `multiplex` is one HTTP/2 connection (which `greeting` tells of), and `carrier` either of the two. `pool` keeps
//! those of one server, `exchange` sends a request and decides when to try again, `upload` and `download` are what
//! passes through, `tunnel` what passes when protocols were switched, `echo` the upstream that is built in.

pub mod carrier;
pub mod connection;
pub mod dial;
pub mod download;
pub mod echo;
pub mod exchange;
pub mod greeting;
pub mod herald;
pub mod multiplex;
pub mod names;
pub mod pool;
pub mod relay;
pub mod tunnel;
pub mod upload;
