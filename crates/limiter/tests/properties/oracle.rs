//! The reference limiter of these properties: one map, one thread, no eviction.
//!
//! It knows nothing of slots, so it makes no statement about a full table.

use std::collections::HashMap;

/// The request to one counter.
#[derive(Clone, Copy, Debug)]
pub struct LayerRequest {
    /// Identifies the counter.
    pub id: u64,
    /// The length of the windows, which start at multiples of it.
    pub window_ms: u64,
    pub limit: u32,
    pub cost: u32,
}

impl LayerRequest {
    /// The end of the window that contains `now_ms`.
    pub fn end_ms(&self, now_ms: u64) -> u64 {
        (now_ms / self.window_ms + 1) * self.window_ms
    }
}

/// The end of a counter's window, and the tokens used in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowUsage {
    pub end_ms: u64,
    pub used: u64,
}

#[derive(Default)]
pub struct Oracle {
    usages: HashMap<u64, WindowUsage>,
}

impl Oracle {
    /// The usage that a request at `now_ms` finds: that of the current window, or of a later one if the counter was
    /// already charged there.
    pub fn usage(&self, layer_request: &LayerRequest, now_ms: u64) -> WindowUsage {
        let fresh = WindowUsage { end_ms: layer_request.end_ms(now_ms), used: 0 };
        match self.usages.get(&layer_request.id) {
            Some(&usage) if usage.end_ms >= fresh.end_ms => usage,
            _ => fresh,
        }
    }

    /// Charges all counters if the request fits in each, and none otherwise.
    pub fn decide(&mut self, layer_requests: &[LayerRequest], now_ms: u64) -> bool {
        let fits = |layer_request: &LayerRequest| {
            self.usage(layer_request, now_ms).used + u64::from(layer_request.cost) <= u64::from(layer_request.limit)
        };
        let admitted = layer_requests.iter().all(fits);
        if admitted {
            for layer_request in layer_requests.iter().filter(|layer_request| layer_request.cost > 0) {
                let usage = self.usage(layer_request, now_ms);
                self.usages.insert(
                    layer_request.id,
                    WindowUsage { used: usage.used + u64::from(layer_request.cost), ..usage },
                );
            }
        }
        admitted
    }
}
