//! The life of one request, from its head to the end of its response.
//!
//! `handler` validates, routes, decides and forwards. `body_reading` reads a body that rules depend on. `admission` decides by the rules and waits for a slot, `held_slots`
//! releases the slots, `delayed_request` waits for a later window, `response_cost` settles charges that depend on the
//! response, `byte_meter` those of bytes that pass; `charged_request` is what both need. `response` turns results into responses, and `request_record` counts and logs each request once. `websocket`
//! ends a handshake and runs the tunnel.
//!
//! State: `served_config` is the configuration prepared at load, `worker_config` one worker's view of it,
//! `worker_state` what a worker keeps between requests, `peer` what requests know of their connection.

mod admission;
pub mod body_reading;
mod byte_meter;
mod charged_request;
mod delayed_request;
pub mod handler;
mod held_slots;
pub mod include_usage;
pub mod log_throttle;
pub mod peer;
pub mod request_record;
pub mod response;
mod response_cost;
pub mod served_config;
pub mod websocket;
pub mod worker_config;
pub mod worker_state;
