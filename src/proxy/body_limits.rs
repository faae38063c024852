//! How large the body of a request may be, and how slowly it may come: what all routes say, or its own.

use super::compiled_config::Snapshot;
use super::worker_state::Hall;
use crate::http::error::Fault;
use crate::http::route_actions::Action;
use crate::upstream::upload_limits::{Bounds, Pace};

/// Refuses a body that is known to be too large, before anything is counted, and before it comes.
pub fn admit(snapshot: &Snapshot, action: Option<&Action>, body_bytes: u64) -> Result<(), Fault> {
    match most(snapshot, action) {
        Some(most) if body_bytes > most => Err(Fault::BodyTooLarge(most)),
        _ => Ok(()),
    }
}

/// What a body is held to on its way.
pub fn bounds(hall: &Hall, snapshot: &Snapshot, lane: usize) -> Bounds {
    let limits = &snapshot.config.limits;
    let action = snapshot.action_of(&snapshot.lanes[lane]);
    let rate = action.and_then(|action| action.min_request_rate).unwrap_or(limits.min_request_rate);
    Bounds::new(most(snapshot, action), Pace::new(&hall.timers, rate, limits.rate_grace))
}

fn most(snapshot: &Snapshot, action: Option<&Action>) -> Option<u64> {
    action.and_then(|action| action.max_body).unwrap_or(snapshot.config.limits.max_body)
}
