//! What all threads of a gateway share: the clock and the metrics.
//!
//! The gateway and the shared store use this crate. `clock` is the only module that reads time, and `metrics` has the cells in which
//! workers count, and the text format of a scrape. Neither knows the configuration, and no decision depends on a metric.

pub mod clock;
pub mod metrics;
