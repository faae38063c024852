//! The thread that exports spans, in batches.

use std::error::Error;
use std::io;
use std::mem;
use std::thread;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry_otlp::tonic_types::transport::{Certificate, ClientTlsConfig};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SpanExporter as _;
use tokio::runtime::Builder;
use tokio::sync::mpsc::{Receiver, channel};

use super::otlp_span::{Scope, push_spans};
use super::{SpanSender, TracedRequest};
use crate::access_log::WriterThread;
use transom_config::span_export::SpanReceiver;
use transom_runtime::metrics::events::SpanMetrics;

/// Capacity of the queue, in requests.
const QUEUE_REQUESTS: usize = 4096;
/// A batch of this many spans is exported at once.
const BATCH_SPANS: usize = 512;
/// How long a smaller batch waits for more spans.
const BATCH_DELAY: Duration = Duration::from_secs(1);
/// Limit for the export of one batch, with retries.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);

impl SpanSender {
    /// Starts an exporter. It connects with the first batch.
    pub fn start(receiver: SpanReceiver, metrics: SpanMetrics) -> io::Result<(SpanSender, WriterThread)> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let exporter = {
            let _in_runtime = runtime.enter();
            build(&receiver).map_err(io::Error::other)?
        };
        let (spans, queue) = channel(QUEUE_REQUESTS);
        let run = move || {
            runtime.block_on(export_all(&exporter, queue, &receiver.endpoint, &metrics));
            // A pending name lookup is not waited for.
            runtime.shutdown_background();
        };
        let thread = thread::Builder::new().name("spans".to_owned()).spawn(run)?;
        Ok((SpanSender(spans), WriterThread(thread)))
    }
}

fn build(receiver: &SpanReceiver) -> Result<SpanExporter, Box<dyn Error + Send + Sync>> {
    let mut builder =
        SpanExporter::builder().with_tonic().with_endpoint(&receiver.endpoint).with_timeout(EXPORT_TIMEOUT);
    if receiver.is_https() {
        let tls = ClientTlsConfig::new();
        builder = builder.with_tls_config(match &receiver.authorities {
            Some(pem) => tls.ca_certificate(Certificate::from_pem(pem)),
            None => tls.with_enabled_roots(),
        });
    }
    let mut exporter = builder.build()?;
    // Adds the attributes of `OTEL_RESOURCE_ATTRIBUTES`.
    let resource = Resource::builder()
        .with_service_name(receiver.service_name.clone())
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
    exporter.set_resource(&resource.build());
    Ok(exporter)
}

/// Exports the spans of the queue until all senders are dropped.
async fn export_all(
    exporter: &SpanExporter,
    mut queue: Receiver<TracedRequest>,
    endpoint: &str,
    metrics: &SpanMetrics,
) {
    let scope = Scope::new();
    let mut failing = false;
    while let Some(first) = queue.recv().await {
        let mut batch = Vec::new();
        push_spans(first, &scope, &mut batch);
        let fill = async {
            while batch.len() < BATCH_SPANS
                && let Some(request) = queue.recv().await
            {
                push_spans(request, &scope, &mut batch);
            }
        };
        // Ends early when the batch is full or all senders are dropped.
        let _ = tokio::time::timeout(BATCH_DELAY, fill).await;
        let spans = batch.len();
        match exporter.export(batch).await {
            Ok(()) => {
                metrics.exported(spans);
                if mem::take(&mut failing) {
                    tracing::info!(endpoint, "spans are exported again");
                }
            }
            Err(error) => {
                metrics.failed(spans);
                // Logged once per outage, not per batch.
                if !mem::replace(&mut failing, true) {
                    tracing::warn!(endpoint, %error, "spans cannot be exported");
                }
            }
        }
    }
}
