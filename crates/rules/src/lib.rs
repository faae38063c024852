//! From a request to the counters that it uses: the compiled configuration, with the router, the keys of rules, clients and
//! their plans, and the actions of routes; and the responses that state limits.
//!
//! The gateway uses this crate for every request, and simulations use it for the lines of access logs. Nothing here does I/O, waits or
//! reads a clock, and the limiter decides.
//!
//! `compiled_config` is the entry point, `resolved_request` finds the route and the keys of a request, and `resolved_query` the
//! keys that callers name. Routes: `router`,
//! `route_actions`, `public_location`, `descriptors`. Deny and allow lists: `access`. Keys: `key_source`, `rate_limit_key`, `store_key_text`, `client_plans` (with
//! `sharded_table`, `live_clients`), `overrides`,
//! `top_keys`. Responses: `responses` (with status codes), `ratelimit_headers`, `response_cost`.

use transom_limiter::handles;

pub mod access;
pub mod acme_challenges;
pub mod client_plans;
pub mod compiled_config;
pub mod descriptors;
pub mod key_source;
pub mod live_clients;
pub mod overrides;
pub mod public_location;
pub mod rate_limit_key;
pub mod ratelimit_headers;
pub mod resolved_query;
pub mod resolved_request;
pub mod response_cost;
pub mod responses;
pub mod route_actions;
pub mod router;
pub mod sharded_table;
pub mod store_key_text;
pub mod top_keys;

handles! {
    /// A list of rules of a configuration; routes with equal lists share one.
    RouteRulesId,
    /// A plan that has a client.
    PlanId,
    /// A part of a key.
    PartPosition,
}
