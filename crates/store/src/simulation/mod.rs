//! Explores the code that shares counters, as it is, in every order of events: calls and replies that are late, lost or never
//! executed, outages, stores that restart without data or as a replica, gateways that die, windows that end.
//!
//! - `world`: gateways on one store, one event at a time, and the properties that must hold.
//! - `explore`: all orders of events of a small scenario; and random events in a long run.
//! - `scenarios`: the tests.

mod explore;
mod scenarios;
mod world;
