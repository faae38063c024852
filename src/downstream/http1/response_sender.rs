//! Sends the body of a response on an HTTP/1.1 connection, and limits the time for which it makes no progress.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::HeaderMap;
use http_body::Body as _;

use crate::downstream::http1::client_stream::ClientStream;
use crate::http1_stream::WrongLength;
use crate::proxy::peer::Peer;
use crate::proxy::response::ResponseBody;
use crate::timer::Timer;
use transom_http::error::RequestError;
use transom_http::http1_head::Framing;

/// A response of which the head waits to be sent.
pub struct ResponseSender {
    rest: Rest,
    framing: Framing,
    /// The fields of the head that announce trailers, if there are any and the client takes trailers.
    announced_trailers: Option<Box<HeaderMap>>,
    /// Bytes of a response per second that a slow client must read, on average over each `body_timeout`.
    min_bytes_per_second: u64,
    /// Bytes of them that the client must still read before the timeout restarts; 0 while the client keeps up.
    bytes_due: u64,
    /// The next piece of the body is not there yet, so a client that has read all bytes keeps up.
    awaits_body: bool,
    /// Bytes wait to be sent, because the client does not read.
    is_blocked: bool,
}

/// What follows the bytes that wait to be sent.
enum Rest {
    Body(ResponseBody),
    /// Nothing. The body was dropped at its end: the request is recorded before the client has the whole response.
    Nothing,
    /// The end of the connection, because the body has failed.
    Failure,
}

/// Why a response is not sent whole.
pub enum SendFailure {
    /// The client has closed the connection, or the upstream has failed.
    Broken,
    /// It has made no progress for too long.
    TimedOut(RequestError),
}

impl ResponseSender {
    pub fn new(
        body: ResponseBody,
        framing: Framing,
        announced_trailers: Option<Box<HeaderMap>>,
        min_bytes_per_second: u64,
    ) -> ResponseSender {
        let rest = if framing == Framing::NoBody { Rest::Nothing } else { Rest::Body(body) };
        ResponseSender {
            rest,
            framing,
            announced_trailers,
            min_bytes_per_second,
            bytes_due: 0,
            awaits_body: false,
            is_blocked: false,
        }
    }

    /// Whether the end of the connection ends the body.
    pub fn ends_by_close(&self) -> bool {
        self.framing == Framing::UntilClose
    }

    /// Ready when the response was sent. `timer` runs for the timeout of bodies; progress restarts it.
    pub fn poll(
        &mut self,
        stream: &ClientStream,
        peer: &Peer,
        timer: &Timer,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), SendFailure>> {
        let sent = self.poll_send(stream, peer, timer, cx);
        if sent.is_pending() && timer.poll_expired(cx) {
            return Poll::Ready(Err(SendFailure::TimedOut(self.timeout_error())));
        }
        sent
    }

    fn poll_send(
        &mut self,
        stream: &ClientStream,
        peer: &Peer,
        timer: &Timer,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), SendFailure>> {
        stream.before_poll(cx);
        loop {
            self.take_frames(stream, peer, timer, cx);
            let waiting = stream.outgoing().len();
            let sent = stream.poll_send(cx);
            self.record_sent(waiting - stream.outgoing().len(), sent.is_pending(), peer, timer);
            ready!(sent).map_err(|_closed| SendFailure::Broken)?;
            match self.rest {
                Rest::Nothing => return Poll::Ready(Ok(())),
                Rest::Failure => return Poll::Ready(Err(SendFailure::Broken)),
                Rest::Body(_) if self.awaits_body => {
                    self.record_caught_up(peer, timer);
                    return stream.poll_closed(cx).map(|()| Err(SendFailure::Broken));
                }
                Rest::Body(_) => {}
            }
        }
    }

    /// Takes frames of the body until enough bytes wait to be sent, or the next frame is not there yet.
    fn take_frames(&mut self, stream: &ClientStream, peer: &Peer, timer: &Timer, cx: &mut Context<'_>) {
        while let Rest::Body(body) = &mut self.rest {
            if !stream.outgoing().has_room() {
                // The body was not polled, so nothing wakes the task for it.
                self.awaits_body = false;
                return;
            }
            let polled = Pin::new(body).poll_frame(cx);
            self.awaits_body = polled.is_pending();
            let Poll::Ready(frame) = polled else { return };
            if self.bytes_due == 0 {
                timer.arm(peer.body_timeout.get());
            }
            let is_end_stream = matches!(&self.rest, Rest::Body(body) if body.is_end_stream());
            let announced = self.announced_trailers.as_deref();
            let queued = frame
                .transpose()
                .map(|frame| stream.outgoing().push_frame(frame, is_end_stream, &mut self.framing, announced));
            // Not while `outgoing` is borrowed: dropping the body may drop that of the request.
            match queued {
                Ok(Ok(false)) => {}
                Ok(Ok(true)) => self.rest = Rest::Nothing,
                Ok(Err(WrongLength)) | Err(_) => self.rest = Rest::Failure,
            }
        }
    }

    /// Bytes were sent. A response may take any time, if the client reads the minimum rate in each `body_timeout`.
    fn record_sent(&mut self, bytes: usize, is_blocked: bool, peer: &Peer, timer: &Timer) {
        self.is_blocked = is_blocked;
        if bytes > 0 {
            self.bytes_due = self.bytes_due.saturating_sub(bytes as u64);
            if self.bytes_due == 0 {
                timer.arm(peer.body_timeout.get());
            }
        }
        if is_blocked && self.bytes_due == 0 {
            let limit_ms = u64::try_from(peer.body_timeout.get().as_millis()).unwrap_or(u64::MAX);
            self.bytes_due = self.min_bytes_per_second.saturating_mul(limit_ms) / 1000;
        }
    }

    /// All available bytes were sent, and more follow later.
    fn record_caught_up(&mut self, peer: &Peer, timer: &Timer) {
        if std::mem::take(&mut self.bytes_due) > 0 {
            timer.arm(peer.body_timeout.get());
        }
    }

    fn timeout_error(&self) -> RequestError {
        // While bytes wait to be sent, the client is too slow, whatever the upstream does.
        if self.awaits_body && !self.is_blocked { RequestError::ResponseTimeout } else { RequestError::Stalled }
    }
}
