//! The attempts of one request to get a response, for the access log and for the spans of a traced request.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderMap, StatusCode};

use super::server_health::UpstreamHealth;
use transom_config::ServerId;
use transom_http::trace_context::{SpanContext, TRACEPARENT, TRACESTATE, TraceParent, new_span_id};
use transom_runtime::clock::Clock;
use transom_runtime::metrics::events::UpstreamOutcome;

#[derive(Debug)]
pub struct AttemptLog {
    pub attempts: Cell<u32>,
    /// The server of the last attempt; `None` before the first.
    pub last_server: Cell<Option<ServerId>>,
    /// The servers since the request waited: they may differ from those with which it began.
    pub servers: RefCell<Option<Arc<UpstreamHealth>>>,
    /// How long the request waited for a reachable server.
    pub held: Cell<Duration>,
    trace: Option<Trace>,
}

#[derive(Debug)]
struct Trace {
    id: u128,
    /// Whether the trace begins with this request.
    is_new: bool,
    attempts: RefCell<Vec<TracedAttempt>>,
}

/// One attempt of a traced request.
#[derive(Clone, Debug)]
pub struct TracedAttempt {
    pub span_id: u64,
    pub server: ServerId,
    /// As in [`AttemptLog::servers`].
    pub servers: Option<Arc<UpstreamHealth>>,
    pub began: Instant,
    /// The head of the response has arrived, or the attempt has failed.
    pub ended: Option<Instant>,
    pub status: Option<StatusCode>,
    /// `None` while the attempt runs, and for a connection that ended before it was used.
    pub outcome: Option<UpstreamOutcome>,
}

impl AttemptLog {
    /// `span`: the span of the request, if it is traced.
    pub fn new(span: Option<&SpanContext>) -> AttemptLog {
        let trace = span.map(|span| Trace {
            id: span.trace_id,
            is_new: span.parent_id.is_none(),
            attempts: RefCell::default(),
        });
        AttemptLog {
            attempts: Cell::default(),
            last_server: Cell::default(),
            servers: RefCell::default(),
            held: Cell::default(),
            trace,
        }
    }

    /// The next attempts use these servers.
    pub fn use_servers(&self, servers: &Arc<UpstreamHealth>) {
        self.servers.replace(Some(Arc::clone(servers)));
    }

    /// An attempt begins, with these fields. In a trace, `traceparent` names the attempt.
    pub fn attempt_began(&self, server: ServerId, fields: &mut HeaderMap, clock: &Clock) {
        self.attempts.update(|attempts| attempts + 1);
        self.last_server.set(Some(server));
        let Some(trace) = &self.trace else { return };
        let span_id = new_span_id();
        fields.insert(TRACEPARENT, TraceParent { trace_id: trace.id, span_id, is_sampled: true }.to_value());
        if trace.is_new {
            // Of another trace, whose `traceparent` is missing or invalid.
            fields.remove(TRACESTATE);
        }
        let began = clock.instant();
        let servers = self.servers.borrow().clone();
        let attempt = TracedAttempt { span_id, server, servers, began, ended: None, status: None, outcome: None };
        trace.attempts.borrow_mut().push(attempt);
    }

    /// The head of the response to the latest attempt has arrived.
    pub fn responded(&self, status: StatusCode) {
        self.change_last(|attempt| attempt.status = Some(status));
    }

    /// The latest attempt has ended.
    pub fn attempt_ended(&self, outcome: Option<UpstreamOutcome>, clock: &Clock) {
        self.change_last(|attempt| (attempt.ended, attempt.outcome) = (Some(clock.instant()), outcome));
    }

    fn change_last(&self, change: impl FnOnce(&mut TracedAttempt)) {
        if let Some(trace) = &self.trace {
            trace.attempts.borrow_mut().last_mut().map(change);
        }
    }

    /// The attempts of a traced request.
    pub fn traced(&self) -> Vec<TracedAttempt> {
        self.trace.as_ref().map_or_else(Vec::new, |trace| trace.attempts.borrow().clone())
    }
}
