//! What is known of one server, over all loops: numbers that `fleet` reads and changes.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use crate::metrics::upstream::ServerMetrics;

/// What is known of one server.
#[derive(Debug)]
pub struct ServerState {
    /// By the active checks; true until they say otherwise.
    pub up: AtomicBool,
    /// Whether there was an active check.
    pub checked: AtomicBool,
    /// Of requests, in a row.
    pub failures: AtomicU32,
    /// Until when it is ejected, in milliseconds since the origin; then one request tries it.
    /// 0: it is not.
    pub out_until_ms: AtomicU64,
    /// Since when it is back, as long as that matters; 0 otherwise.
    pub back_ms: AtomicU64,
    /// How often in a row it was ejected.
    pub ejections: AtomicU32,
    pub meter: ServerMetrics,
}

impl ServerState {
    /// Of a server that nothing is known of yet.
    pub fn new(meter: ServerMetrics) -> ServerState {
        meter.set_up(true);
        ServerState {
            up: AtomicBool::new(true),
            checked: AtomicBool::new(false),
            failures: AtomicU32::new(0),
            out_until_ms: AtomicU64::new(0),
            back_ms: AtomicU64::new(0),
            ejections: AtomicU32::new(0),
            meter,
        }
    }
}

impl Drop for ServerState {
    /// A server that is no longer named is neither up nor ejected.
    fn drop(&mut self) {
        self.meter.set_up(false);
        self.meter.set_ejected(false);
    }
}
