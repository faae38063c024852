//! The body of a request on its way to an upstream: nothing is collected, every piece moves when the
//! upstream takes it.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use super::replay_body::{ReplayBody, ReplayBuffer};
use super::request_body::Inbound;
use super::upload_limits::{Bounds, Breach};
use crate::http::error::RequestError;
use crate::http::headers;

/// How far the upload of a request's body has come, for the one who waits for the answer.
#[derive(Debug, Default)]
pub struct UploadProgress {
    /// A piece was taken since this was last asked.
    pub moved: Cell<bool>,
    /// The upstream would take more, but the client has not sent it.
    pub starved: Cell<bool>,
    /// The client broke off, or its chunks are malformed.
    pub failed: Cell<bool>,
    /// It is more, or slower, than it may be.
    pub breach: Cell<Option<Breach>>,
}

impl UploadProgress {
    /// What went wrong on the client's side.
    pub fn fault(&self) -> Option<RequestError> {
        self.breach.get().map(RequestError::from).or(self.failed.get().then_some(RequestError::Body))
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
    /// The same, and it can be had back.
    Lent(ReplayBody),
}

/// A body that a client sends.
pub struct Sending {
    body: Inbound,
    progress: Rc<UploadProgress>,
    bounds: Bounds,
    /// What was taken of it, once it has been lent.
    pub kept: Option<Box<ReplayBuffer>>,
}

impl Upload {
    /// What is left of a body to send, within bounds if that is anything.
    pub fn new(body: Inbound, bounds: impl FnOnce() -> Bounds) -> Upload {
        if body.is_end_stream() {
            return Upload::Empty;
        }
        Upload::Client(Box::new(Sending { body, progress: Rc::default(), bounds: bounds(), kept: None }))
    }

    /// How far it has come; `None` where there is nothing to send.
    pub fn progress(&self) -> Option<Rc<UploadProgress>> {
        match self {
            Upload::Empty | Upload::Upgrade | Upload::Lent(_) => None,
            Upload::Client(sending) => Some(Rc::clone(&sending.progress)),
        }
    }

    /// The body for a stream that may not be looked at, and who can have it back then.
    pub fn lend(self) -> (Upload, Option<ReplayBody>) {
        let loan = match self {
            Upload::Empty | Upload::Upgrade => return (self, None),
            Upload::Client(sending) => ReplayBody::of(sending),
            Upload::Lent(loan) => loan,
        };
        (Upload::Lent(loan.clone()), Some(loan))
    }
}

impl Sending {
    /// The next piece, as the client sends it.
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let Sending { body, progress, bounds, .. } = self;
        let mut frame = Pin::new(body).poll_frame(cx);
        progress.starved.set(frame.is_pending());
        match &mut frame {
            Poll::Ready(Some(Ok(frame))) if frame.is_trailers() => {
                progress.moved.set(true);
                // Over HTTP/1.1 only those are sent that were announced; over HTTP/2 all.
                frame.trailers_mut().into_iter().for_each(headers::forward_trailers);
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

    /// The same where it may have been lent: first what a stream has taken in vain.
    pub fn poll_kept(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let Some(mut kept) = self.kept.take() else { return self.poll_frame(cx) };
        let frame = if let Some(due) = kept.take_due() {
            Poll::Ready(Some(Ok(Frame::data(due))))
        } else if kept.has_ended() {
            Poll::Ready(None)
        } else {
            let frame = self.poll_frame(cx);
            if let Poll::Ready(frame) = &frame {
                kept.pass(frame.as_ref());
            }
            frame
        };
        self.kept = Some(kept);
        frame
    }

    pub fn is_end_stream(&self) -> bool {
        self.kept.as_ref().is_none_or(|kept| kept.due().is_empty()) && self.body.is_end_stream()
    }

    pub fn size_hint(&self) -> SizeHint {
        let mut hint = self.body.size_hint();
        let due = self.kept.as_ref().map_or(0, |kept| kept.due().len() as u64);
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper + due);
        }
        hint.set_lower(hint.lower() + due);
        hint
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        match self.get_mut() {
            Upload::Empty | Upload::Upgrade => Poll::Ready(None),
            Upload::Client(sending) => sending.poll_kept(cx),
            Upload::Lent(loan) => loan.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Upload::Empty | Upload::Upgrade => true,
            Upload::Client(sending) => sending.is_end_stream(),
            Upload::Lent(loan) => loan.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Upload::Empty | Upload::Upgrade => SizeHint::with_exact(0),
            Upload::Client(sending) => sending.size_hint(),
            Upload::Lent(loan) => loan.size_hint(),
        }
    }
}
