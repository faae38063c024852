//! Accepting clients: sockets, connections, and their orderly end.
//!
//! `doors` are the listeners of all loops, `socket` opens one and accepts, `capacity` counts who is in, `lobby` is what
//! the listeners of a loop go by; `arrival` finds out who came, by a `proxy_header` or by `tls`, and what is spoken;
//! `serve` runs one connection, `guard` stands between hyper and a client's socket, `stage` is what both sides of hyper
//! know, `head` keeps what only the bytes of a head tell, and `chunks` finds where a body before it ends; `drain` ends
//! the connections of a loop.
//!
//! HTTP/2: `preface` tells it from HTTP/1.1, `http2` runs one connection, `stream` one request on it, `outflow` sends
//! the answer's body, `strand` is a tunnel on one; `pulse` asks whether anybody is there, `session` stands between h2
//! and the socket, `frames` reads what passes there, `conduct` judges it, `http2_input` replaces what h2 would end the connection
//! for, with `hpack` and `huffman`.

pub mod arrival;
pub mod capacity;
mod chunks;
pub mod conduct;
pub mod doors;
pub mod drain;
pub mod frames;
pub mod guard;
pub mod head;
mod hpack;
pub mod http2;
mod http2_input;
mod huffman;
pub mod lobby;
mod outflow;
pub mod preface;
pub mod proxy_header;
mod pulse;
pub mod serve;
pub mod session;
pub mod socket;
pub mod stage;
mod strand;
pub mod stream;
pub mod tls;
