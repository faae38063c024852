//! The main loop of a worker: waits until the gateway accepts, serves, applies reloads, and drains.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use socket2::Socket;
use tokio::sync::mpsc::UnboundedReceiver;

use super::PendingReload;
use crate::downstream::drain::Drain;
use crate::downstream::listener::{self, Acceptor};
use crate::downstream::listener_context::{Listener, ListenerConfig, ListenerContext};
use crate::notify::Marks;
use crate::proxy::served_config::ServedConfig;
use crate::proxy::worker_config::RecordOutputs;
use crate::proxy::worker_state::TopKeysQuery;
use transom_store::shared_counters::SharedCounters;

/// Period of the cleanup of idle upstream connections.
const SWEEP: Duration = Duration::from_secs(5);

/// A command to a worker.
pub enum WorkerCommand {
    /// Accept connections.
    Accept,
    Reload {
        served: Arc<ServedConfig>,
        listener_config: Arc<ListenerConfig>,
        outputs: RecordOutputs,
        /// Dropped once the configuration is applied.
        pending: Arc<PendingReload>,
    },
    /// Apply the configuration with other limits of single clients, or other servers.
    ApplyLimits {
        served: Arc<ServedConfig>,
        marks: Option<Arc<Marks>>,
        /// As of a reload.
        pending: Arc<PendingReload>,
    },
    Drain(DrainTimes),
    /// Close idle connections without further delay.
    CloseIdle,
}

/// The time limits of a drain.
#[derive(Clone, Copy, Debug)]
pub struct DrainTimes {
    /// Until idle connections are closed.
    pub idle: Duration,
    /// Until all connections are closed.
    pub limit: Duration,
    /// Until what shared counters do not know yet is given up, once all connections are closed.
    pub report: Duration,
}

/// Runs a worker. Returns at once, without accepting, if the gateway is dropped before it accepts.
pub async fn run(
    listener_context: Rc<ListenerContext>,
    listeners: Vec<(Socket, Rc<Listener>)>,
    mut commands: UnboundedReceiver<WorkerCommand>,
    mut top_keys_queries: UnboundedReceiver<TopKeysQuery>,
) {
    let Some(WorkerCommand::Accept) = commands.recv().await else { return };
    let worker = Rc::clone(&listener_context.worker);
    for (socket, listener) in listeners {
        match Acceptor::new(socket) {
            Ok(socket) => drop(tokio::task::spawn_local(listener::accept_connections(socket, listener))),
            Err(error) => tracing::error!(%error, "a listener cannot be used"),
        }
    }
    let sweeper = tokio::task::spawn_local({
        let worker = Rc::clone(&worker);
        async move {
            loop {
                tokio::time::sleep(SWEEP).await;
                worker.sweep();
            }
        }
    });
    let answers = tokio::task::spawn_local({
        let worker = Rc::clone(&worker);
        async move {
            while let Some(query) = top_keys_queries.recv().await {
                worker.answer_top_keys(query).await;
            }
        }
    });
    let ticker = tokio::task::spawn_local({
        let worker = Rc::clone(&worker);
        async move { worker.timers.run().await }
    });
    let shared_task = worker.counters.shared.as_ref().map(|shared| tokio::task::spawn_local(Rc::clone(shared).run()));
    let mut idle = None;
    while let Some(command) = commands.recv().await {
        match command {
            WorkerCommand::Accept => {}
            // The command may arrive before the drain.
            WorkerCommand::CloseIdle => idle = Some(Duration::ZERO),
            WorkerCommand::Reload { served, listener_config, outputs, pending } => {
                worker.apply_config(served, outputs);
                listener_context.apply(listener_config);
                drop(pending);
            }
            WorkerCommand::ApplyLimits { served, marks, pending } => {
                worker.apply_limits(served, marks.as_ref());
                drop(pending);
            }
            WorkerCommand::Drain(times) => {
                let drained = drain_connections(&listener_context.drain, idle.unwrap_or(times.idle), &mut commands);
                if tokio::time::timeout(times.limit, drained).await.is_err() {
                    tracing::warn!("requests that did not finish in time were aborted");
                }
                if let Some(shared) = &worker.counters.shared {
                    report_usage(shared, times.report, &mut commands).await;
                }
                break;
            }
        }
    }
    ticker.abort();
    if let (Some(shared_task), Some(shared)) = (shared_task, &worker.counters.shared) {
        shared_task.abort();
        shared.close().await;
    }
    sweeper.abort();
    answers.abort();
}

/// Waits until shared counters have what was counted without them, or the next command.
async fn report_usage(shared: &SharedCounters, limit: Duration, commands: &mut UnboundedReceiver<WorkerCommand>) {
    if limit.is_zero() || !shared.has_unreported() {
        return;
    }
    tracing::info!("waits up to {limit:?} for shared counters, to report what was counted without them");
    tokio::select! {
        () = shared.wait_until_reported() => {}
        () = tokio::time::sleep(limit) => {}
        _ = commands.recv() => {}
    }
}

/// Waits until all connections have ended.
async fn drain_connections(drain: &Drain, idle: Duration, commands: &mut UnboundedReceiver<WorkerCommand>) {
    drain.begin();
    tokio::select! {
        () = drain.wait_until_empty() => return,
        () = tokio::time::sleep(idle) => {}
        _ = commands.recv() => {}
    }
    drain.close_idle();
    drain.wait_until_empty().await;
}
