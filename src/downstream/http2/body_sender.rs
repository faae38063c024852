//! The body of an answer on its way to a stream of HTTP/2: a piece is asked for when the one before is with h2, which takes it when the
//! client's window opens.

use std::error::Error;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use h2::{Reason, SendStream};
use http_body::Body as _;

use crate::downstream::http2::flood_guard;
use crate::http::headers;
use crate::proxy::peer::Peer;
use crate::proxy::response::ResponseBody;

/// A body, and where it goes.
pub struct BodySender {
    body: ResponseBody,
    stream: SendStream<Bytes>,
    /// A piece that waits for the window, and whether it is the last.
    pending: Option<(Bytes, bool)>,
}

impl BodySender {
    pub fn new(body: ResponseBody, sending: SendStream<Bytes>) -> BodySender {
        BodySender { body, stream: sending, pending: None }
    }

    /// Ready when all has been sent, or nothing more can be. While it moves, the timer of `peer` is put off.
    pub fn poll(&mut self, peer: &Peer, cx: &mut Context<'_>) -> Poll<()> {
        match self.poll_send(peer, cx) {
            // A client that resets the stream is to be heard, whatever is waited for.
            Poll::Pending => self.stream.poll_reset(cx).map(drop),
            Poll::Ready(_) => Poll::Ready(()),
        }
    }

    /// An error: the stream is gone.
    fn poll_send(&mut self, peer: &Peer, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        loop {
            if let Some((piece, is_last)) = &self.pending {
                let is_last = *is_last;
                // An empty one, with which many servers end their streams, needs no window, and is never given any.
                while !piece.is_empty() && self.stream.capacity() == 0 {
                    match ready!(self.stream.poll_capacity(cx)) {
                        Some(capacity) => capacity?,
                        None => return Poll::Ready(Ok(())),
                    };
                }
                let piece = self.pending.take().map(|(piece, _)| piece).unwrap_or_default();
                self.stream.send_data(piece, is_last)?;
                if is_last {
                    return Poll::Ready(Ok(()));
                }
            }
            let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
            peer.timer.arm(peer.body_timeout.get());
            let frame = match frame {
                None => return Poll::Ready(self.stream.send_data(Bytes::new(), true)),
                Some(Ok(frame)) => frame,
                Some(Err(error)) => {
                    self.stream.send_reset(reset_reason(&error));
                    return Poll::Ready(Ok(()));
                }
            };
            match frame.into_data() {
                Ok(piece) if piece.is_empty() && !self.body.is_end_stream() => {}
                Ok(piece) => {
                    let is_last = self.body.is_end_stream();
                    // No more than there is something for: it is taken from the other streams. h2 asks for the rest.
                    self.stream.reserve_capacity(usize::from(!piece.is_empty()));
                    self.pending = Some((piece, is_last));
                }
                Err(frame) => {
                    let Ok(mut trailers) = frame.into_trailers() else { continue };
                    headers::forward_response_trailers(&mut trailers);
                    self.stream.reserve_capacity(0);
                    return Poll::Ready(self.stream.send_trailers(trailers));
                }
            }
        }
    }
}

/// What the client is told of a body that broke off: as the upstream's stream did, if it was one. That the one who asked was wrong
/// is about the gateway; the client was not.
fn reset_reason(error: &(dyn Error + 'static)) -> Reason {
    let mut error = Some(error);
    while let Some(what) = error {
        if let Some(reason) = what.downcast_ref::<h2::Error>().and_then(h2::Error::reason) {
            return if flood_guard::blames_client(reason.into()) { Reason::INTERNAL_ERROR } else { reason };
        }
        error = what.source();
    }
    Reason::INTERNAL_ERROR
}
