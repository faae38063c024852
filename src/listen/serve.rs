//! One client connection: hyper's loop of requests and answers, its limits, and its end.

use std::cell::Cell;
use std::convert::Infallible;
use std::future::poll_fn;
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;

use super::drain::Guest;
use super::guard::{Guard, Stage};
use crate::gateway::body::{Body, Content};
use crate::gateway::hall::Hall;
use crate::gateway::pass;
use crate::http::fault::Fault;
use crate::http::reply;

/// Read-buffer limit, and so the largest request head that is accepted.
const HEAD_MAX_BYTES: usize = 64 * 1024;

/// Serves a connection until it ends. Told to drain, it finishes what is under way and closes.
pub async fn serve(stream: TcpStream, peer: IpAddr, hall: Rc<Hall>, guest: Guest) {
    hall.meter.connected();
    let stage = Rc::new(Stage::default());
    let service = {
        let (hall, stage) = (Rc::clone(&hall), Rc::clone(&stage));
        service_fn(move |request| answer(Rc::clone(&hall), Rc::clone(&stage), peer, request))
    };
    let request_head = hall.view().snapshot.config.timeouts.request_head;
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(request_head)
        .max_buf_size(HEAD_MAX_BYTES)
        .serve_connection(TokioIo::new(Guard::new(stream, Rc::clone(&stage))), service);
    let mut connection = std::pin::pin!(connection);
    let told = Cell::new(false);
    let ended = poll_fn(|cx| {
        if !told.get() && guest.poll_begun(cx) {
            told.set(true);
            connection.as_mut().graceful_shutdown();
        }
        connection.as_mut().poll(cx)
    })
    .await;
    if let Err(error) = ended {
        if error.is_timeout() {
            stage.head_is_late();
        }
        tracing::debug!(%peer, %error, "a client connection broke off");
    }
    hall.meter.disconnected();
}

/// Answers one request, whatever happens: a panic ends the request, not the process.
async fn answer(
    hall: Rc<Hall>,
    stage: Rc<Stage>,
    peer: IpAddr,
    request: Request<Incoming>,
) -> Result<Response<Staged>, Infallible> {
    stage.begin();
    let mut answering = std::pin::pin!(pass(hall, peer, request));
    let answer = poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| answering.as_mut().poll(cx))) {
        Ok(Poll::Pending) => Poll::Pending,
        Ok(Poll::Ready(answer)) => Poll::Ready(Some(answer)),
        Err(_panic) => Poll::Ready(None),
    });
    let answer = answer.await.unwrap_or_else(|| {
        // The panic itself has been reported by the panic hook.
        reply::fault(&Fault::Panic).map(|body| Body::unrecorded(Content::from(body)))
    });
    Ok(answer.map(|body| Staged { body, stage }))
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
        Pin::new(&mut self.get_mut().body).poll_frame(cx)
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
