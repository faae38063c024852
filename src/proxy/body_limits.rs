//! How large the body of a request may be, and how slowly it may come: what all routes say, or its own.

use super::compiled_config::CompiledConfig;
use super::worker_state::WorkerState;
use crate::http::error::RequestError;
use crate::http::route_actions::Action;
use crate::upstream::upload_limits::{Bounds, UploadRate};

/// Refuses a body that is known to be too large, before anything is counted, and before it comes.
pub fn check_size(snapshot: &CompiledConfig, action: Option<&Action>, body_bytes: u64) -> Result<(), RequestError> {
    match max_bytes(snapshot, action) {
        Some(most) if body_bytes > most => Err(RequestError::BodyTooLarge(most)),
        _ => Ok(()),
    }
}

/// What a body is held to on its way.
pub fn upload_limits(worker: &WorkerState, snapshot: &CompiledConfig, lane: usize) -> Bounds {
    let limits = &snapshot.config.limits;
    let action = snapshot.actions_of(&snapshot.routes[lane]);
    let rate = action.and_then(|action| action.min_request_rate).unwrap_or(limits.min_request_rate);
    Bounds::new(max_bytes(snapshot, action), UploadRate::new(&worker.timers, rate, limits.rate_grace))
}

fn max_bytes(snapshot: &CompiledConfig, action: Option<&Action>) -> Option<u64> {
    action.and_then(|action| action.max_body).unwrap_or(snapshot.config.limits.max_body)
}
