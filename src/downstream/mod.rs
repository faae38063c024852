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

pub mod connection_limit;
pub mod connection_setup;
pub mod drain;
pub mod http1;
pub mod http2;
pub mod listener;
pub mod listener_context;
pub mod listeners;
pub mod protocol_detect;
pub mod proxy_protocol;
pub mod tls;
