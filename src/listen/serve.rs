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
use tokio::io::AsyncWrite;

use super::drain::Guest;
use super::guard::{Guard, Stage};
use crate::gateway::body::{Body, Content};
use crate::gateway::hall::{Hall, Origin, Peer};
use crate::gateway::{Passing, pass, record};
use crate::http::fault::Fault;
use crate::http::fields::Marks;
use crate::http::reply;
use crate::wire::Wire;

/// Fields that hyper has room for without an allocation for each head.
const USUAL_FIELDS: usize = 100;

/// Serves a connection until it ends. Told to drain, it finishes what is under way and closes.
pub async fn serve(wire: Wire, origin: Rc<Origin>, hall: Rc<Hall>, guest: Guest) {
    let address = origin.address;
    let (timeouts, limits) = {
        let config = &hall.view().snapshot.config;
        (config.timeouts.clone(), config.limits.clone())
    };
    let stage = Stage::new(hall.timers.timer(), timeouts.request_head, timeouts.body, limits.min_response_rate);
    let mut peer = Peer::new(origin, hall.timers.timer(), Rc::clone(stage.interim()), Rc::clone(stage.waits()));
    peer.body_limit = Rc::clone(stage.body_limit());
    let peer = Rc::new(peer);
    let door = Door { hall: Rc::clone(&hall), stage: Rc::clone(&stage), peer: Rc::clone(&peer) };
    let mut builder = http1::Builder::new();
    if limits.request_fields != USUAL_FIELDS {
        builder.max_headers(limits.request_fields);
    }
    let mut connection = builder
        .header_read_timeout(None)
        // The guard looks for clients that go away.
        .half_close(true)
        // Of the read buffer, and so of a head.
        .max_buf_size(limits.request_head)
        .serve_connection(TokioIo::new(Guard::new(wire, Rc::clone(&stage))), door);
    let (mut told, mut late) = (false, false);
    let ended = poll_fn(|cx| {
        let mut poll = Pin::new(&mut connection).poll(cx).map_ok(|()| true);
        // Polled first: a request that has already come is answered before hyper is told to close.
        if poll.is_pending() && !told && guest.poll_begun(cx) {
            told = true;
            Pin::new(&mut connection).graceful_shutdown();
            poll = Pin::new(&mut connection).poll(cx).map_ok(|()| true);
        }
        late = poll.is_pending() && stage.poll_late(cx);
        if late { Poll::Ready(Ok(false)) } else { poll }
    });
    match ended.await {
        Ok(true) => {
            let parts = connection.into_parts();
            leave(parts.io.into_inner(), parts.read_buf, &peer).await;
        }
        Ok(false) if stage.stalled() == Some(Fault::Stalled) => connection.into_parts().io.into_inner().abandon(),
        Ok(false) => drop(connection),
        Err(error) => {
            if error.is_parse() {
                stage.head_is_malformed();
            }
            tracing::debug!(%address, %error, "a client connection broke off");
        }
    }
    if let Some(fault) = stage.stalled().filter(|_| late) {
        hall.meter.fault(fault.kind());
    }
    if let Some(fault) = stage.refused() {
        record::refused_head(&hall, address, &fault);
    }
}

/// What comes after the last answer: the tunnel that it opened, or the end.
async fn leave(mut guard: Guard, early: Bytes, peer: &Peer) {
    let passage = peer.passage.take();
    match passage {
        Some(passage) => {
            guard.step_aside();
            passage.open(guard, early, &peer.timer).await;
        }
        None => {
            // hyper does so itself, unless the client had offered to change to another protocol.
            let _ = poll_fn(|cx| Pin::new(&mut guard).poll_shutdown(cx)).await;
        }
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
        self.stage.begin(request.body().size_hint().exact());
        // What only the bytes of the head tell.
        let doubts = |marks: Marks| self.stage.doubt(marks.has(Marks::TRANSFER_ENCODING));
        let passing = catch_unwind(AssertUnwindSafe(|| pass(&self.hall, &self.peer, request, doubts)));
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
    type Error = <Body as HttpBody>::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        let frame = Pin::new(&mut this.body).poll_frame(cx);
        match frame {
            Poll::Ready(_) => this.stage.moved(),
            Poll::Pending => this.stage.awaits_piece(),
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
