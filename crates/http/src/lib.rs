//! HTTP as values and bytes: heads and bodies of HTTP/1.1, validation of requests, normalization of paths, forwarded clients, header
//! fields that a gateway adds or removes, and the errors of single requests.
//!
//! The gateway uses this crate for clients and upstreams, and the configuration and the rules use it to read what requests contain.
//! Nothing here does I/O, waits, reads a clock, or knows the configuration. The limiter provides networks of addresses.
//!
//! Messages: `http1_head`, `http1_body`. Requests: `request_validation`, `path_normalize`, `percent_encoding`, `request_values`,
//! `client_address`, `forwarded`, `forward_auth`, `request_id`, `trace_context`, `websocket_handshake`, `headers`. Errors: `error`.

pub mod client_address;
pub mod error;
pub mod forward_auth;
pub mod forwarded;
pub mod headers;
pub mod http1_body;
pub mod http1_head;
pub mod path_normalize;
pub mod percent_encoding;
pub mod request_id;
pub mod request_validation;
pub mod request_values;
pub mod trace_context;
pub mod websocket_handshake;
