//! The body of a request on its way to an upstream: nothing is collected, every piece moves when the
//! upstream takes it.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::bounds::{Bounds, Breach};
use super::inbound::Inbound;
use crate::http::fault::Fault;
use crate::http::fields;

/// How far the upload of a request's body has come, for the one who waits for the answer.
#[derive(Debug, Default)]
pub struct Progress {
    /// A piece was taken since this was last asked.
    pub moved: Cell<bool>,
    /// The upstream would take more, but the client has not sent it.
    pub starved: Cell<bool>,
    /// The client broke off, or its chunks are malformed.
    pub failed: Cell<bool>,
    /// It is more, or slower, than it may be.
    pub breach: Cell<Option<Breach>>,
}

impl Progress {
    /// What went wrong on the client's side.
    pub fn fault(&self) -> Option<Fault> {
        self.breach.get().map(Fault::from).or(self.failed.get().then_some(Fault::Body))
    }
}

/// Why a body ended before its end.
pub type Broken = Box<dyn std::error::Error + Send + Sync>;

/// The body of a request to the upstream. Most have none, and all are handed on many times with their heads, which
/// costs by the byte; so what there is of one lies elsewhere.
pub enum Upload {
    Empty,
    /// Nothing either: the request asks for another protocol.
    Upgrade,
    Client(Box<Sending>),
}

/// A body that a client sends.
pub struct Sending {
    body: Inbound,
    progress: Rc<Progress>,
    bounds: Bounds,
}

impl Upload {
    /// What is left of a body to send, within bounds if that is anything.
    pub fn new(body: Inbound, bounds: impl FnOnce() -> Bounds) -> Upload {
        if body.is_end_stream() {
            return Upload::Empty;
        }
        Upload::Client(Box::new(Sending { body, progress: Rc::default(), bounds: bounds() }))
    }

    /// How far it has come; `None` where there is nothing to send.
    pub fn progress(&self) -> Option<Rc<Progress>> {
        match self {
            Upload::Empty | Upload::Upgrade => None,
            Upload::Client(sending) => Some(Rc::clone(&sending.progress)),
        }
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let Upload::Client(sending) = self.get_mut() else { return Poll::Ready(None) };
        let Sending { body, progress, bounds } = &mut **sending;
        let mut frame = Pin::new(body).poll_frame(cx);
        progress.starved.set(frame.is_pending());
        match &mut frame {
            Poll::Ready(Some(Ok(frame))) if frame.is_trailers() => {
                progress.moved.set(true);
                // Over HTTP/1.1 only those are sent that were announced; over HTTP/2 all.
                frame.trailers_mut().into_iter().for_each(fields::forward_trailers);
            }
            Poll::Ready(Some(Ok(_))) => progress.moved.set(true),
            Poll::Ready(Some(Err(_))) => progress.failed.set(true),
            Poll::Ready(None) | Poll::Pending => {}
        }
        let came = match &frame {
            Poll::Ready(Some(Ok(frame))) => Some(Poll::Ready(frame.data_ref().map_or(0, Bytes::len))),
            Poll::Pending => Some(Poll::Pending),
            Poll::Ready(None | Some(Err(_))) => None,
        };
        if let Some(came) = came
            && let Some(breach) = bounds.look(came, cx)
        {
            progress.breach.set(Some(breach));
            return Poll::Ready(Some(Err(breach.into())));
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Upload::Empty | Upload::Upgrade => true,
            Upload::Client(sending) => sending.body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Upload::Empty | Upload::Upgrade => SizeHint::with_exact(0),
            Upload::Client(sending) => sending.body.size_hint(),
        }
    }
}
