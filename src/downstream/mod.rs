//! Client connections: listening sockets, connection setup, limits, HTTP/1.1 and HTTP/2, and the drain at the end.
//!
//! A connection passes these layers, in this order:
//! 1. `listener` accepts the socket (`socket_file` is the file of a Unix socket); `connection_limit` counts the connection; `listener_context` has the listener's settings.
//! 2. `connection_setup` reads the PROXY header (`proxy_protocol`), performs the TLS handshake (`tls`), and detects the
//!    protocol (`protocol_detect`). The result is an `IoStream`: TCP, Unix or TLS, with bytes read in advance put back.
//! 3. `http1::connection` or `http2::connection` serves requests until the connection ends.
//! 4. HTTP/1.1: `http1::client_stream` receives heads and bodies, `http1::response_sender` sends responses.
//! 5. Between the socket and h2 is `http2::monitor` (`MonitoredIo`): timeouts and frame limits (`flood_guard`), and the
//!    check of header blocks (`header_scanner`, `hpack`, `huffman`).
//! 6. `http1::connection` and `http2::stream` call `proxy::handler::handle` for each request.
//!
//! `linger` reads a closing connection for a moment. `drain` ends the connections of a worker.

pub mod connection_limit;
pub mod connection_setup;
pub mod drain;
pub mod http1;
pub mod http2;
pub mod linger;
pub mod listener;
pub mod listener_context;
pub mod protocol_detect;
pub mod proxy_protocol;
pub mod socket_file;
pub mod tls;
