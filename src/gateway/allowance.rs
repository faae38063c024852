//! How large the body of a request may be, and how slowly it may come: what all routes say, or its own.

use super::hall::Hall;
use super::snapshot::Snapshot;
use crate::http::action::Action;
use crate::http::fault::Fault;
use crate::http::reply::Dialect;
use crate::upstream::bounds::{Bounds, Pace};

/// Refuses a body that is known to be too large, before anything is counted, and before it comes.
pub fn admit(snapshot: &Snapshot, action: Option<&Action>, body_bytes: u64) -> Result<(), Fault> {
    match most(snapshot, action) {
        Some(most) if body_bytes > most => Err(Fault::BodyTooLarge(most)),
        _ => Ok(()),
    }
}

/// What a body is held to on its way. A stream of gRPC may well have nothing to send for a while, so it need not
/// be fast.
pub fn bounds(hall: &Hall, snapshot: &Snapshot, lane: usize, dialect: Dialect) -> Bounds {
    let limits = &snapshot.config.limits;
    let pace = match dialect {
        Dialect::Grpc => None,
        Dialect::Http => Pace::new(&hall.timers, limits.min_request_rate, limits.rate_grace),
    };
    Bounds::new(most(snapshot, snapshot.action_of(&snapshot.lanes[lane])), pace)
}

fn most(snapshot: &Snapshot, action: Option<&Action>) -> Option<u64> {
    action.and_then(|action| action.max_body).unwrap_or(snapshot.config.limits.max_body)
}
