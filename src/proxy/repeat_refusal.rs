//! A request that was refused, and is asked again as it was.
//!
//! A client over its limits hardly ever changes what it asks. Who asks, on which route and by which rules, follows from the
//! head of a request, from its connection and from the configuration. Where all three are what they were, it is enough to
//! look whether the windows are still full. This file does not compare heads: `listen` does, and has none of those parsed
//! that are refused here.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Method, Version, header};

use super::request_record;
use super::worker_state::{Peer, Scratch, WorkerConfig, WorkerState};
use crate::http::headers::SpecialFields;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::rule_set::KeyedRequest;

/// Of such a request, all that its decision needs.
pub struct RepeatRefusal {
    config: Rc<WorkerConfig>,
    route: usize,
    keyed_requests: Box<[Option<KeyedRequest>]>,
}

impl RepeatRefusal {
    /// That of a request which was just refused on `desk`; `None` where it is not the same as the one before, where more
    /// than its head, its connection and the configuration decides, or where its answer changes what becomes of the connection.
    pub fn new(
        view: &Rc<WorkerConfig>,
        peer: &Peer,
        lane: usize,
        context: &DecisionContext,
        parts: &Parts,
        marks: SpecialFields,
        body_bytes: u64,
    ) -> Option<RepeatRefusal> {
        let slate = view.compiled.rules_of(&view.compiled.routes[lane]);
        let is_kept = || {
            let mut options = parts.headers.get_all(header::CONNECTION).iter();
            options.all(|options| options.as_bytes().eq_ignore_ascii_case(b"keep-alive"))
        };
        let is_usual = peer.repeats_previous.get()
            && slate.is_repeatable
            // Of every request a line is to be written, with what its head says.
            && view.access_log.is_none()
            && parts.version == Version::HTTP_11
            && parts.method != Method::HEAD
            && body_bytes == 0
            && ![SpecialFields::TRANSFER_ENCODING, SpecialFields::EXPECT, SpecialFields::UPGRADE].into_iter().any(|mark| marks.has(mark))
            && is_kept();
        is_usual.then(|| RepeatRefusal {
            config: Rc::clone(view),
            route: lane,
            keyed_requests: context.inputs.keyed_requests.as_slice().into(),
        })
    }

    /// Refuses the request, if it is to be refused now: its answer, as it is sent over HTTP/1.1. `None`: nothing was charged or counted,
    /// and the request can be taken as any other.
    pub fn refuse(&self, worker: &WorkerState) -> Option<Bytes> {
        let refused = catch_unwind(AssertUnwindSafe(|| self.try_refuse(worker)));
        // Whatever it was, it is met with once more on the way of any other request, and answered there.
        refused.unwrap_or(None)
    }

    fn try_refuse(&self, worker: &WorkerState) -> Option<Bytes> {
        let view = &*self.config;
        if !worker.is_current(&self.config) {
            return None;
        }
        let snapshot = &*view.compiled;
        let position = snapshot.routes[self.route].rules_index as usize;
        let slate = &snapshot.route_rules[position];
        let now = worker.clock.now();
        let mut scratch = view.scratch();
        let Scratch { context, text, refusal_cache: last, .. } = &mut *scratch;
        context.inputs.keyed_requests.clear();
        context.inputs.keyed_requests.extend_from_slice(&self.keyed_requests);
        let clock = || worker.clock.now().unix_ms;
        if snapshot.rule_set.peek(
            &slate.charge_plan,
            &worker.table,
            DecisionTime::starting_at(now.unix_ms, &clock),
            context,
        ) {
            return None;
        }
        let took = worker.clock.instant().duration_since(now.instant);
        worker.metrics.decision_took(took);
        request_record::record_refusal(view, Some(self.route), position, context);
        let work_out =
            || view.refusal(position, context, context.result.decided_ms, worker.date(), text, HeaderMap::new());
        let (status, answer) = last.written(position, context.result.decided_ms, context, work_out);
        view.route_metrics[self.route].request_ended(status.as_u16(), took);
        Some(answer)
    }
}
