//! One client connection that speaks HTTP/1.1: hyper's loop of requests and answers, its limits, and its end.

use std::convert::Infallible;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::TokioIo;

use super::drain::Guest;
use super::guard::{Guard, Stage};
use crate::gateway::body::{Body, Content};
use crate::gateway::hall::{Hall, Origin, Peer};
use crate::gateway::{Passing, pass, record};
use crate::http::fault::Fault;
use crate::http::reply;
use crate::wire::Wire;

/// Read-buffer limit, and so the largest request head that is accepted.
const HEAD_MAX_BYTES: usize = 64 * 1024;

/// Serves a connection until it ends. Told to drain, it finishes what is under way and closes.
pub async fn serve(wire: Wire, origin: Rc<Origin>, hall: Rc<Hall>, guest: Guest) {
    let address = origin.address;
    let timeouts = hall.view().snapshot.config.timeouts.clone();
    let stage = Stage::new(hall.timers.timer(), timeouts.request_head, timeouts.body);
    let peer = Rc::new(Peer::new(origin, hall.timers.timer(), Rc::clone(stage.interim()), Rc::clone(stage.waits())));
    let door = Door { hall: Rc::clone(&hall), stage: Rc::clone(&stage), peer };
    let connection = http1::Builder::new()
        .header_read_timeout(None)
        // The guard looks for clients that go away.
        .half_close(true)
        .max_buf_size(HEAD_MAX_BYTES)
        .serve_connection(TokioIo::new(Guard::new(wire, Rc::clone(&stage))), door);
    let mut connection = std::pin::pin!(connection);
    let mut told = false;
    let ended = poll_fn(|cx| {
        let mut poll = connection.as_mut().poll(cx);
        // Polled first: a request that has already come is answered before hyper is told to close.
        if poll.is_pending() && !told && guest.poll_begun(cx) {
            told = true;
            connection.as_mut().graceful_shutdown();
            poll = connection.as_mut().poll(cx);
        }
        if poll.is_pending() && stage.poll_late(cx) { Poll::Ready(Ok(())) } else { poll }
    });
    if let Err(error) = ended.await {
        if error.is_parse() {
            stage.head_is_malformed();
        }
        tracing::debug!(%address, %error, "a client connection broke off");
    }
    if let Some(fault) = stage.refused() {
        record::refused_head(&hall, address, &fault);
    }
}

/// What hyper calls with every request of a connection.
struct Door {
    hall: Rc<Hall>,
    stage: Rc<Stage>,
    peer: Rc<Peer>,
}

impl Service<Request<Incoming>> for Door {
    type Response = Response<Staged>;
    type Error = Infallible;
    type Future = Answering;

    fn call(&self, request: Request<Incoming>) -> Answering {
        self.stage.begin();
        let doubtful = || self.stage.gives_length_beside_chunks();
        let passing = catch_unwind(AssertUnwindSafe(|| pass(&self.hall, &self.peer, request, doubtful)));
        Answering {
            passing: passing.unwrap_or_else(|_panic| Passing::Done(Some(after_panic()))),
            stage: Rc::clone(&self.stage),
        }
    }
}

/// An answer that is there, or under way. A panic ends the request, not the process.
struct Answering {
    passing: Passing,
    stage: Rc<Stage>,
}

impl Future for Answering {
    type Output = Result<Response<Staged>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let answer = match &mut this.passing {
            Passing::Done(answer) => answer.take(),
            Passing::Forward(answer) => match catch_unwind(AssertUnwindSafe(|| answer.as_mut().poll(cx))) {
                Ok(Poll::Ready(answer)) => Some(answer),
                Ok(Poll::Pending) => return Poll::Pending,
                Err(_panic) => None,
            },
        };
        let stage = Rc::clone(&this.stage);
        stage.moved();
        Poll::Ready(Ok(answer.unwrap_or_else(after_panic).map(|body| Staged { body, stage })))
    }
}

/// The panic itself has been reported by the panic hook.
pub fn after_panic() -> Response<Body> {
    reply::fault(&Fault::Panic).map(|body| Body::unrecorded(Content::from(body)))
}

/// A body that tells the guard of the socket when it has been handed over.
struct Staged {
    body: Body,
    stage: Rc<Stage>,
}

impl HttpBody for Staged {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        let frame = Pin::new(&mut this.body).poll_frame(cx);
        if frame.is_ready() {
            this.stage.moved();
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.stage.end();
    }
}
