//! A body that was handed to a stream of HTTP/2, and can be had back.
//!
//! A server that leaves (GOAWAY), or has too much to do (REFUSED_STREAM), says of a request that it has not looked at it.
//! That can be sent elsewhere, whatever its method, if all of its body is still here. So what a stream takes is kept as
//! long as it is little, and no answer has come.

use std::cell::RefCell;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};

use super::request_upload::{Broken, Sending, Upload};

/// How much of a body is kept: a stream's first window (RFC 9113, section 6.9.2), and so all that a server gets which refuses
/// what it has no room for.
const KEPT_MAX_BYTES: usize = 64 * 1024;

/// One of the two who have the body: the stream, or who lent it.
#[derive(Clone)]
pub struct ReplayBody(Rc<RefCell<Option<Box<Sending>>>>);

/// What a stream has taken of a body.
#[derive(Default)]
pub struct ReplayBuffer {
    /// `None` if it was too much.
    taken: Option<Vec<u8>>,
    /// What was taken by another stream before, and is to be sent once more.
    due: Bytes,
    has_ended: bool,
}

impl ReplayBody {
    pub fn of(sending: Box<Sending>) -> ReplayBody {
        let mut sending = sending;
        sending.kept.get_or_insert_default().begin();
        ReplayBody(Rc::new(RefCell::new(Some(sending))))
    }

    /// The body as it was, if nothing of it is lost. The stream is left with nothing.
    pub fn take_back(&self) -> Option<Upload> {
        let mut sending = self.0.take()?;
        sending.kept.as_mut()?.rewind().then_some(Upload::Client(sending))
    }

    /// It will not be asked for any more.
    pub fn settle(&self) {
        if let Some(kept) = self.0.borrow_mut().as_mut().and_then(|sending| sending.kept.as_mut()) {
            kept.taken = None;
        }
    }

    pub fn poll_frame(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        match self.0.borrow_mut().as_mut() {
            Some(sending) => sending.poll_kept(cx),
            None => Poll::Ready(Some(Err("the body is sent elsewhere".into()))),
        }
    }

    pub fn is_end_stream(&self) -> bool {
        self.0.borrow().as_ref().is_some_and(|sending| sending.is_end_stream())
    }

    pub fn size_hint(&self) -> SizeHint {
        self.0.borrow().as_ref().map(|sending| sending.size_hint()).unwrap_or_default()
    }
}

impl ReplayBuffer {
    /// What is taken from now on is kept.
    fn begin(&mut self) {
        self.taken = Some(Vec::new());
    }

    /// Back to the beginning; `false` if that is not here any more.
    fn rewind(&mut self) -> bool {
        let Some(mut taken) = self.taken.take() else { return false };
        taken.extend_from_slice(&self.due);
        self.due = taken.into();
        true
    }

    /// Bytes that come before what the client sends next.
    pub fn due(&self) -> &Bytes {
        &self.due
    }

    /// The end has come, and is not to be asked for again.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Those bytes, which are taken now.
    pub fn take_due(&mut self) -> Option<Bytes> {
        let due = std::mem::take(&mut self.due);
        self.keep(&due);
        (!due.is_empty()).then_some(due)
    }

    /// Sees what the client has sent, and the stream takes.
    pub fn pass(&mut self, frame: Option<&Result<Frame<Bytes>, Broken>>) {
        match frame {
            None => self.has_ended = true,
            Some(Ok(frame)) if frame.is_data() => self.keep(frame.data_ref().unwrap_or(&Bytes::new())),
            // Few have trailers, and who broke off can not be sent again.
            Some(Ok(_) | Err(_)) => self.taken = None,
        }
    }

    fn keep(&mut self, bytes: &[u8]) {
        self.taken = self.taken.take().filter(|taken| taken.len() + bytes.len() <= KEPT_MAX_BYTES).map(|mut taken| {
            taken.extend_from_slice(bytes);
            taken
        });
    }
}
