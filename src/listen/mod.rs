//! Accepting clients: sockets, connections, and their orderly end.
//!
//! `socket` opens listeners and accepts, `capacity` counts who is in, `lobby` is what the listeners of a loop go by;
//! `arrival` finds out who came, by a `proxy_header` or by `tls`; `serve` runs one connection, `guard` stands between
//! hyper and a client's socket, `drain` ends the connections of a loop.

pub mod arrival;
pub mod capacity;
pub mod drain;
pub mod guard;
pub mod lobby;
pub mod proxy_header;
pub mod serve;
pub mod socket;
pub mod tls;
