//! One connection to an upstream server.
//!
//! hyper gives a connection as two halves: a sender of requests, and a driver that moves the bytes.
//! The driver is not a task of its own: whoever waits for an answer, or for the next piece of a
//! body, drives it in passing. That saves two task switches a request, and an idle connection costs
//! nothing until it is looked at again.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use http::{Request, Response};
use http_body::Body;
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::upload::Upload;
use crate::wire::Wire;

/// Read-buffer limit, and so the largest answer head that is accepted.
const HEAD_MAX_BYTES: usize = 64 * 1024;

pub struct Connection {
    sender: SendRequest<Upload>,
    /// `None` once the connection is closed.
    driver: Option<http1::Connection<TokioIo<Wire>, Upload>>,
    /// Whether the last request had no body, so that its answer was the end of it.
    plain: bool,
    /// When it was last given back to the pool.
    pub idle_since: Instant,
}

/// What a request met with when no answer came; with the request, if none of it was sent.
pub type SendError = TrySendError<Request<Upload>>;

impl Connection {
    /// Makes a connection of a connected socket. `idle_since` is only the time to start with.
    pub async fn new(stream: TcpStream, idle_since: Instant) -> hyper::Result<Connection> {
        let (sender, driver) =
            http1::Builder::new().max_buf_size(HEAD_MAX_BYTES).handshake(TokioIo::new(Wire(stream))).await?;
        Ok(Connection { sender, driver: Some(driver), plain: true, idle_since })
    }

    /// Moves bytes as far as they go without waiting; wakes `cx` when there is more to do.
    pub fn drive(&mut self, cx: &mut Context<'_>) {
        if let Some(driver) = &mut self.driver {
            // How a connection ended is told to whoever waits for an answer or a body.
            if let Poll::Ready(_ended) = Pin::new(driver).poll(cx) {
                self.driver = None;
            }
        }
    }

    /// Whether a request can be sent right now. Notices a connection that the server has closed.
    pub fn is_ready(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        self.driver.is_some() && self.sender.is_ready()
    }

    /// Whether nothing of the last exchange is left to do, once its answer has ended.
    pub fn is_done(&mut self) -> bool {
        self.plain || self.is_ready()
    }

    /// Sends a request and waits for the head of its answer.
    #[allow(clippy::result_large_err, reason = "the request comes back by value, to be sent elsewhere")]
    pub async fn send(&mut self, request: Request<Upload>) -> Result<Response<Incoming>, SendError> {
        self.plain = request.body().is_end_stream();
        let mut answer = std::pin::pin!(self.sender.try_send_request(request));
        let driver = &mut self.driver;
        poll_fn(|cx| {
            if let Some(connection) = driver
                && let Poll::Ready(_ended) = Pin::new(connection).poll(cx)
            {
                *driver = None;
            }
            answer.as_mut().poll(cx)
        })
        .await
    }
}
