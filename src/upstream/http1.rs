//! One connection to an upstream server.
//!
//! hyper gives a connection as two halves: a sender of requests, and a driver that moves the bytes.
//! The driver is not a task of its own: whoever waits for an answer, or for the next piece of a
//! body, drives it in passing. That saves two task switches a request, and an idle connection costs
//! nothing until it is looked at again.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, header};
use http_body::{Body, Frame};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;

use super::connection::ResolvedTarget;
use super::gated_waker::Relay;
use super::http1_tap::{TapIo, TapState};
use super::request_upload::Upload;
use super::server_pool::ConnectionPermit;
use crate::informational::InformationalQueue;
use crate::io_stream::IoStream;

/// Read-buffer limit, and so the largest answer head that is accepted.
const HEAD_MAX_BYTES: usize = 64 * 1024;

/// What moves the bytes.
#[allow(clippy::large_enum_variant, reason = "nearly all are the large one, and a connection is boxed")]
enum Driver {
    At(http1::Connection<TokioIo<TapIo>, Upload>),
    /// It has nothing more to do: the connection is closed, or speaks another protocol.
    Ended(http1::Parts<TokioIo<TapIo>>),
    Gone,
}

pub struct Connection {
    sender: SendRequest<Upload>,
    driver: Driver,
    hearsay: Rc<TapState>,
    relay: Arc<Relay>,
    /// Of the relay; what the driver is given to wake.
    waker: Waker,
    /// Whether the last request had no body, so that its answer was the end of it.
    plain: bool,
    /// Where it leads.
    pub bearing: ResolvedTarget,
    /// When the last answer came, if it was the end of the exchange as well; so that the clock need
    /// not be read again when the connection becomes idle.
    pub idle_since: Option<Instant>,
    /// Its room among the connections to its server, where these are limited.
    pub slot: Option<ConnectionPermit>,
}

/// What a request met with when no answer came; with the request, if none of it was sent.
pub type SendError = TrySendError<Request<Upload>>;

impl Connection {
    /// Makes a connection of a connected stream.
    pub async fn new(stream: IoStream, bearing: ResolvedTarget) -> hyper::Result<Connection> {
        let hearsay = Rc::new(TapState::default());
        let io = TokioIo::new(TapIo::new(stream, Rc::clone(&hearsay)));
        let (sender, driver) = http1::Builder::new().max_buf_size(HEAD_MAX_BYTES).handshake(io).await?;
        let relay = Relay::new();
        let waker = Waker::from(Arc::clone(&relay));
        Ok(Connection {
            sender,
            driver: Driver::At(driver),
            hearsay,
            relay,
            waker,
            plain: true,
            bearing,
            idle_since: None,
            slot: None,
        })
    }

    /// Moves bytes as far as they go without waiting; wakes `task` when there is more to do.
    fn drive(&mut self, task: &Waker) {
        if let Driver::At(driver) = &mut self.driver {
            self.relay.pass_on_to(task);
            // How a connection ended is told to whoever waits for an answer or a body.
            if Pin::new(driver).poll(&mut Context::from_waker(&self.waker)).is_ready() {
                self.end();
            }
        }
    }

    /// Takes the driver apart: only then does a request come back that it has not looked at.
    #[cold]
    fn end(&mut self) {
        if let Driver::At(driver) = std::mem::replace(&mut self.driver, Driver::Gone) {
            self.driver = Driver::Ended(driver.into_parts());
        }
    }

    /// Drives the connection until it has something for the task. `poll` is woken by nobody: what it
    /// asks for comes by way of the driver.
    fn poll_driven<T>(&mut self, cx: &Context<'_>, mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        self.drive(cx.waker());
        let polled = poll(&mut Context::from_waker(Waker::noop()));
        if polled.is_ready() {
            self.relay.rest();
        }
        polled
    }

    /// The next piece of the body of an answer.
    pub fn poll_body(&mut self, body: &mut Incoming, cx: &Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        self.relay.rest();
        let frame = Pin::new(&mut *body).poll_frame(&mut Context::from_waker(Waker::noop()));
        if frame.is_ready() {
            return frame;
        }
        self.idle_since = None;
        self.poll_driven(cx, |cx| Pin::new(&mut *body).poll_frame(cx))
    }

    /// The last request once more, if it was sent with `keeps` and nothing of an answer was passed on.
    pub fn sent(&self) -> Option<Request<Upload>> {
        self.hearsay.request()
    }

    /// Whether a request can be sent right now. Notices a connection that the server has closed.
    pub fn is_ready(&mut self) -> bool {
        self.drive(Waker::noop());
        matches!(self.driver, Driver::At(_)) && self.sender.is_ready()
    }

    /// Whether nothing of the last exchange is left to do, once its answer has ended.
    pub fn is_done(&mut self) -> bool {
        self.plain || self.is_ready()
    }

    /// Sends a request and waits for the head of its answer; informational answers before it go to
    /// `interim`. If `keeps`, what was sent can be had once more. A connection that the server has
    /// closed gives the request back: hyper looks for that before it writes.
    #[allow(clippy::result_large_err, reason = "the request comes back by value, to be sent elsewhere")]
    pub async fn send(
        &mut self,
        mut request: Box<Request<Upload>>,
        keeps: bool,
        interim: Option<Rc<InformationalQueue>>,
    ) -> Result<Response<Incoming>, SendError> {
        self.hearsay.listen(keeps, interim);
        self.plain = request.body().is_end_stream();
        if !self.plain && request.body().size_hint().exact().is_none() {
            // Without this field hyper sends a GET or HEAD without its body.
            request.headers_mut().insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        if !self.sender.is_ready() {
            self.drive(Waker::noop());
        }
        self.relay.rest();
        let mut answer = std::pin::pin!(self.sender.try_send_request(*request));
        poll_fn(|cx| self.poll_driven(cx, |cx| answer.as_mut().poll(cx))).await
    }

    /// The stream, and what came behind the head of the last answer, if that switched protocols.
    pub async fn into_stream(mut self) -> Option<(IoStream, Bytes)> {
        // The request had no body, so hyper has nothing left to do but to find that out.
        poll_fn(|cx| {
            self.drive(cx.waker());
            if let Driver::At(_) = self.driver { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        match self.driver {
            Driver::Ended(parts) => Some((parts.io.into_inner().into_stream(), parts.read_buf)),
            Driver::At(_) | Driver::Gone => None,
        }
    }
}
