//! Client connections: listening sockets, connection setup, limits, HTTP/1.1 and HTTP/2, and the drain at the end.
//!
//! A connection passes these layers, in this order:
//! 1. `listener` accepts the socket; `connection_limit` counts the connection; `listener_context` has the listener's settings.
//! 2. `connection_setup` reads the PROXY header (`proxy_protocol`), performs the TLS handshake (`tls`), and detects the
//!    protocol (`protocol_detect`). The result is an `IoStream`: TCP or TLS, with bytes read in advance put back.
//! 3. `http1::connection` or `http2::connection` serves requests until the connection ends.
//! 4. Between the socket and hyper is `http1::io` (`Http1Io`): timeouts, repeated refusals, error responses, 1xx
//!    responses and lingering close. `http1::head_tracker` and `http1::chunked` find head and body ends in the same bytes.
//! 5. Between the socket and h2 is `http2::monitor` (`MonitoredIo`): timeouts and frame limits (`flood_guard`), and the
//!    check of header blocks (`header_scanner`, `hpack`, `huffman`).
//! 6. Above hyper and h2, `http1::connection` and `http2::stream` call `proxy::handler::handle` for each request.
//!
//! `drain` ends the connections of a worker.

pub mod connection_limit;
pub mod connection_setup;
pub mod drain;
pub mod http1;
pub mod http2;
pub mod listener;
pub mod listener_context;
pub mod protocol_detect;
pub mod proxy_protocol;
pub mod tls;
