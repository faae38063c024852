//! The life of one event loop: it waits until the gateway opens, serves, takes over configurations, and drains.

use std::net::TcpListener as StdListener;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::access_log::LogSender;
use crate::downstream::drain::Drain;
use crate::downstream::listener;
use crate::downstream::listener_context::{Listener, ListenerConfig, ListenerContext};
use crate::proxy::compiled_config::CompiledConfig;

/// How often idle upstream connections are looked through.
const SWEEP: Duration = Duration::from_secs(5);

/// What an event loop is told.
pub enum Order {
    /// From now on connections are accepted.
    Open,
    Adopt(Arc<CompiledConfig>, Arc<ListenerConfig>, Option<LogSender>),
    Drain(DrainTimes),
    /// The drain should not wait any longer for those who do not ask for anything.
    Release,
}

/// How long a drain takes.
#[derive(Clone, Copy, Debug)]
pub struct DrainTimes {
    /// Until connections are closed on which nothing is asked.
    pub patience: Duration,
    /// Until what is left is broken off.
    pub limit: Duration,
}

/// Runs the loop to its end. It ends early, without having accepted anything, where the gateway does not open.
pub async fn run(
    listener_context: Rc<ListenerContext>,
    listeners: Vec<(StdListener, Rc<Listener>)>,
    mut inbox: UnboundedReceiver<Order>,
) {
    let Some(Order::Open) = inbox.recv().await else { return };
    let worker = Rc::clone(&listener_context.worker);
    for (socket, listener) in listeners {
        match TcpListener::from_std(socket) {
            Ok(socket) => drop(tokio::task::spawn_local(listener::accept_connections(socket, listener))),
            Err(error) => tracing::error!(%error, "a listener can not be used"),
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
    let ticker = tokio::task::spawn_local({
        let worker = Rc::clone(&worker);
        async move { worker.timers.run().await }
    });
    let sharer = worker.shared.as_ref().map(|shared| tokio::task::spawn_local(Rc::clone(shared).run()));
    let mut patience = None;
    while let Some(order) = inbox.recv().await {
        match order {
            Order::Open => {}
            // It can come before the drain has begun.
            Order::Release => patience = Some(Duration::ZERO),
            Order::Adopt(snapshot, terms, access) => {
                worker.apply_config(snapshot, access);
                listener_context.apply(terms);
            }
            Order::Drain(pace) => {
                let drained = drained(&listener_context.drain, patience.unwrap_or(pace.patience), &mut inbox);
                if tokio::time::timeout(pace.limit, drained).await.is_err() {
                    tracing::warn!("requests that did not finish in time were broken off");
                }
                break;
            }
        }
    }
    ticker.abort();
    if let (Some(sharer), Some(shared)) = (sharer, &worker.shared) {
        sharer.abort();
        shared.close().await;
    }
    sweeper.abort();
}

/// Waits until nobody is inside any more.
async fn drained(drain: &Drain, patience: Duration, inbox: &mut UnboundedReceiver<Order>) {
    drain.begin();
    tokio::select! {
        () = drain.wait_until_empty() => return,
        () = tokio::time::sleep(patience) => {}
        _ = inbox.recv() => {}
    }
    drain.close_idle();
    drain.wait_until_empty().await;
}
