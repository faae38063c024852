//! HTTP semantics without I/O: no file here waits or touches a socket.
//!
//! Request: `request_validation`, `path_normalize`, `router`, `forwarded`, `request_id`,
//! `trace_context`, `websocket_handshake`, `headers`.
//! Keys: `request_values`, `key_source`, `rate_limit_key`, `store_key_text`, `client_plans`, `overrides`.
//! Response: `error`, `responses` (the file with the status codes), `ratelimit_headers`, `route_actions`.

use transom_limiter::handles;

pub mod client_plans;
pub mod error;
pub mod forward_auth;
pub mod forwarded;
pub mod headers;
pub mod http1_body;
pub mod http1_head;
pub mod key_source;
pub mod overrides;
pub mod path_normalize;
pub mod rate_limit_key;
pub mod ratelimit_headers;
pub mod request_id;
pub mod request_validation;
pub mod request_values;
pub mod response_cost;
pub mod responses;
pub mod route_actions;
pub mod router;
pub mod store_key_text;
pub mod trace_context;
pub mod websocket_handshake;

handles! {
    /// A list of rules of a configuration; routes with equal lists share one.
    RouteRulesId,
}
