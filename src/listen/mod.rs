//! Accepting clients: sockets, connections, and their orderly end.
//!
//! `socket` opens listeners and accepts, `arrival` finds out who came, `serve` runs one connection, `guard` stands between hyper
//! and a client's socket, `head` keeps what only the bytes of a head tell, `drain` ends the connections of a loop.

pub mod arrival;
pub mod drain;
pub mod guard;
pub mod head;
pub mod serve;
pub mod socket;
