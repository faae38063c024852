//! What HTTP's words mean, without I/O: nothing in this room waits or touches a socket.
//!
//! `gate` decides whether this is one clear request, `path` which endpoint its path names, `route`
//! which route that is, `caller` who is asking, by the parts that `part` finds and `key_text` spells, of which `cookie`, `query` and
//! `bearer` read what may be spelt in several ways, with the help of `escapes`; `affinity` which requests belong to one
//! server; `clients` whether that is somebody who is known, `exceptions` whom a rule treats otherwise than everyone, `fields` what
//! is added and taken away in passing, `forwarded` who asks behind proxies, `action` what a route changes,
//! `quota` how the limits are told to the client, `repeat` what was said of them last, `fault` what can go wrong and on whose side, and
//! `reply` is every answer that the gateway makes itself: the only place with status codes.

pub mod bearer;
pub mod client_plans;
pub mod cookie;
pub mod date;
pub mod error;
pub mod forwarded;
pub mod hash_key;
pub mod headers;
pub mod key_source;
pub mod overrides;
pub mod path_normalize;
pub mod percent_decode;
pub mod query;
pub mod rate_limit_key;
pub mod ratelimit_headers;
pub mod refusal_cache;
pub mod request_validation;
pub mod responses;
pub mod route_actions;
pub mod router;
pub mod store_key_text;
pub mod websocket_handshake;
