//! Spans of traced requests, which a thread of its own exports over OTLP.
//!
//! A worker sends what the access log would say of a request over a bounded queue and never waits for the receiver: when the
//! queue is full, the spans of the request are dropped and counted.

use std::time::{Duration, SystemTime};

use http::HeaderMap;
use tokio::sync::mpsc::Sender;

use crate::access_log::entry::LogEntry;
use transom_config::span_export::Tracing;
use transom_http::trace_context::SpanContext;
use transom_runtime::metrics::events::DroppedSpans;

#[cfg(feature = "otlp")]
mod exporter;
#[cfg(feature = "otlp")]
mod otlp_span;

/// Chooses the requests of one worker that are traced, and sends their spans.
#[derive(Debug)]
pub struct Tracer {
    /// Share of the requests, from 0 to 1.
    sample: f64,
    spans: SpanSender,
    dropped: DroppedSpans,
}

/// A worker's end of the queue. The exporter ends when the last sender is dropped.
#[derive(Clone, Debug)]
pub struct SpanSender(Sender<TracedRequest>);

/// A traced request that has ended.
#[derive(Debug)]
pub struct TracedRequest {
    pub span: SpanContext,
    /// By the wall clock.
    pub started: SystemTime,
    pub entry: LogEntry,
    /// The path of the route, with its parameters.
    pub http_route: Option<String>,
    /// Of the client's request.
    pub scheme: &'static str,
    pub attempts: Vec<UpstreamAttempt>,
}

/// One attempt to get a response.
#[derive(Debug)]
pub struct UpstreamAttempt {
    pub span_id: u64,
    /// Since the start of the request.
    pub began: Duration,
    /// Until the head of the response, or the failure.
    pub took: Duration,
    /// As configured.
    pub server: String,
    /// Host name or address, or the path of a Unix socket.
    pub address: String,
    pub port: Option<u16>,
    pub status: Option<u16>,
    /// Why there is no status.
    pub error: Option<&'static str>,
}

impl Tracer {
    /// `None` without `[tracing]`.
    pub fn new(
        settings: Option<&Tracing>,
        spans: Option<SpanSender>,
        dropped: impl FnOnce() -> DroppedSpans,
    ) -> Option<Tracer> {
        let (settings, spans) = settings.zip(spans)?;
        Some(Tracer { sample: settings.sample, spans, dropped: dropped() })
    }

    /// The span of a request; `None` if the request is not traced.
    pub fn begin_span(&self, headers: &HeaderMap, is_trusted: bool) -> Option<SpanContext> {
        SpanContext::begin(headers, is_trusted, self.sample)
    }

    /// Queues the spans of a request.
    pub fn send(&self, request: TracedRequest) {
        let spans = 1 + request.attempts.len();
        if self.spans.0.try_send(request).is_err() {
            self.dropped.add(spans);
        }
    }
}

/// Without the feature, the configuration cannot have `[tracing]`.
#[cfg(not(feature = "otlp"))]
impl SpanSender {
    pub fn start(
        _receiver: transom_config::span_export::SpanReceiver,
        _metrics: transom_runtime::metrics::events::SpanMetrics,
    ) -> std::io::Result<(SpanSender, crate::access_log::WriterThread)> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}
