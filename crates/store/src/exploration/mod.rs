//! Explores the code that shares counters, as it is, in every order of events: calls and replies that are late, lost or never
//! executed, outages, stores that restart without data or as a replica, gateways that die, windows that end.
//!
//! The code of a gateway is a machine without I/O as it stands: `SharedCounters::advance` names the next step, and what waits for the
//! store is compiled to a state machine that moves only when a reply or a time comes. A second machine, written by hand, would repeat it.
//!
//! - `world`: gateways on one store, one event at a time, and the properties that must hold.
//! - `delayed_request`: requests that wait for a later window.
//! - `explore`: all orders of events of a small scenario; and random events in a long run.
//! - `scenarios`: the tests.

mod delayed_request;
mod explore;
mod scenarios;
mod world;
