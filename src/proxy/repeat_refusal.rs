//! Refuses a repeated request from its counters alone.
//!
//! A client over its limit usually repeats the same request. Its keys and rules follow from the head, the connection and the
//! configuration; while all three are unchanged, a look at the windows suffices. `downstream::http1` compares the heads, and
//! does not parse those that are refused here.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Method, Version, header};

use super::request_record;
use super::worker_config::{DecisionBuffers, WorkerConfig};
use super::worker_state::WorkerState;
use crate::http::headers::SpecialFields;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::rule_set::KeyedRequest;

/// What is needed to decide a refused request again.
pub struct RepeatRefusal {
    config: Rc<WorkerConfig>,
    /// Position in `CompiledConfig::routes`.
    route: usize,
    keyed_requests: Box<[Option<KeyedRequest>]>,
}

impl RepeatRefusal {
    /// For a request that was just refused, with the result in `context`. `None` if the decision depends on more than head,
    /// connection and configuration, or if the request affects the connection.
    pub fn new(
        config: &Rc<WorkerConfig>,
        route: usize,
        context: &DecisionContext,
        parts: &Parts,
        special_fields: SpecialFields,
        body_bytes: u64,
    ) -> Option<RepeatRefusal> {
        let rules = config.compiled.rules_of(&config.compiled.routes[route]);
        let keeps_connection = || {
            let mut options = parts.headers.get_all(header::CONNECTION).iter();
            options.all(|options| options.as_bytes().eq_ignore_ascii_case(b"keep-alive"))
        };
        let special = [SpecialFields::TRANSFER_ENCODING, SpecialFields::EXPECT, SpecialFields::UPGRADE];
        let is_eligible = rules.is_repeatable
            // The access log needs fields of the head.
            && config.access_log.is_none()
            && parts.version == Version::HTTP_11
            && parts.method != Method::HEAD
            && body_bytes == 0
            && !special.into_iter().any(|field| special_fields.has(field))
            && keeps_connection();
        is_eligible.then(|| RepeatRefusal {
            config: Rc::clone(config),
            route,
            keyed_requests: context.inputs.keyed_requests.as_slice().into(),
        })
    }

    /// Returns the HTTP/1.1 response if the request is still refused. `None`: nothing was charged or counted, and the request
    /// is handled as any other.
    pub fn refuse(&self, worker: &WorkerState) -> Option<Bytes> {
        let refused = catch_unwind(AssertUnwindSafe(|| self.try_refuse(worker)));
        // After a panic the request is handled as any other; if that panics too, the response is 500.
        refused.unwrap_or(None)
    }

    fn try_refuse(&self, worker: &WorkerState) -> Option<Bytes> {
        let config = &*self.config;
        if !worker.is_current(&self.config) {
            return None;
        }
        let compiled = &*config.compiled;
        let rules_index = compiled.routes[self.route].rules_index as usize;
        let charge_plan = &compiled.route_rules[rules_index].charge_plan;
        let now = worker.clock.now();
        let mut scratch = config.scratch();
        let DecisionBuffers { context, text, refusal_cache, .. } = &mut *scratch;
        context.inputs.keyed_requests.clear();
        context.inputs.keyed_requests.extend_from_slice(&self.keyed_requests);
        let clock = || worker.clock.now().unix_ms;
        let time = DecisionTime::starting_at(now.unix_ms, &clock);
        if compiled.rule_set.peek(charge_plan, &worker.table, time, context) {
            return None;
        }
        let took = worker.clock.instant().duration_since(now.instant);
        worker.metrics.decision_took(took);
        request_record::record_refusal(config, Some(self.route), rules_index, context);
        let decided_ms = context.result.decided_ms;
        let render = || config.refusal(rules_index, context, decided_ms, worker.date(), text, HeaderMap::new());
        let (status, response) = refusal_cache.http1_bytes(rules_index, decided_ms, context, render);
        config.route_metrics[self.route].request_ended(status.as_u16(), took);
        Some(response)
    }
}
