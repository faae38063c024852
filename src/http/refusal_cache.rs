//! What was said to whoever was refused last.
//!
//! A client that is over its limits and does not slow down asks many times in a millisecond, and is told the same each
//! time, to the letter. So what a refusal says is not worked out again as long as all that it depends on is as it was. This
//! file does not know what that is made of: `reply` does.

use bytes::Bytes;
use http::StatusCode;

use super::responses::{self, LocalResponse, RefusalResponse};
use transom_limiter::acquire::Charge;
use transom_limiter::counter::{AcquireRequest, Usage};
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::rule_set::LayerRef;

/// The last refusal by the rules of one book.
#[derive(Debug, Default)]
pub struct RefusalCache {
    route_rules: usize,
    now_ms: u64,
    outcomes: Vec<LayerOutcome>,
    /// `None` before the first.
    refused: Option<RefusalResponse>,
    /// The same as it is sent over HTTP/1.1; empty until it is asked for.
    bytes: Bytes,
}

/// What was found of one layer. Nothing here tells one client from another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct LayerOutcome {
    layer: LayerRef,
    request: AcquireRequest,
    usage: Usage,
    is_full: bool,
}

impl LayerOutcome {
    fn of((charge, line): (&Charge, &LayerRef)) -> LayerOutcome {
        LayerOutcome { layer: *line, request: charge.request, usage: charge.usage, is_full: charge.is_full }
    }
}

impl RefusalCache {
    /// What is answered: as the last time, or else what `work_out` finds. `slate` is the position of the rules that decided
    /// on `desk`.
    pub fn response(
        &mut self,
        slate: usize,
        now_ms: u64,
        context: &DecisionContext,
        work_out: impl FnOnce() -> RefusalResponse,
    ) -> LocalResponse {
        self.refresh(slate, now_ms, context, work_out).0.clone()
    }

    /// As [`RefusalCache::refusal`], as it is sent over HTTP/1.1; and its status.
    pub fn http1_bytes(
        &mut self,
        slate: usize,
        now_ms: u64,
        context: &DecisionContext,
        work_out: impl FnOnce() -> RefusalResponse,
    ) -> (StatusCode, Bytes) {
        let (reply, bytes) = self.refresh(slate, now_ms, context, work_out);
        if bytes.is_empty() {
            *bytes = responses::http1_bytes(reply);
        }
        (reply.status(), bytes.clone())
    }

    fn refresh(
        &mut self,
        slate: usize,
        now_ms: u64,
        context: &DecisionContext,
        work_out: impl FnOnce() -> RefusalResponse,
    ) -> (&LocalResponse, &mut Bytes) {
        let facts = || context.result.charges.iter().zip(&context.result.layers).map(LayerOutcome::of);
        let is_same = (self.route_rules, self.now_ms) == (slate, now_ms) && self.outcomes.iter().copied().eq(facts());
        // Where chance has a part in it, the next is told something else.
        if !is_same || self.refused.as_ref().is_none_or(|refused| refused.is_random) {
            (self.route_rules, self.now_ms) = (slate, now_ms);
            self.outcomes.clear();
            self.outcomes.extend(facts());
            self.bytes = Bytes::new();
            self.refused = None;
        }
        let refused = self.refused.get_or_insert_with(|| {
            let mut refused = work_out();
            // Whoever sends a copy adds a field or two, such as the date.
            refused.response.headers_mut().reserve(4);
            refused
        });
        (&refused.response, &mut self.bytes)
    }
}
