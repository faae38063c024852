//! An HTTP/1.1 connection to an upstream server.
//!
//! hyper divides a connection into a sender of requests and a driver that does the I/O. The driver is not a separate task:
//! the task that waits for the response, or for the next frame of a body, polls it. That saves two task switches a
//! request, and an idle connection costs nothing until it is used again. `GatedWaker` drops the unnecessary wakes that
//! this design would cause.

use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, header};
use http_body::{Body, Frame};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;

use super::connect::ResolvedTarget;
use super::http1_tap::{TapIo, TapState};
use super::request_body::RequestBody;
use super::request_limit::ConnectionPermit;
use crate::informational::InformationalQueue;
use crate::io_stream::IoStream;
use crate::metrics::upstream::CountedConnection;

/// Read-buffer limit, and so the largest response head that is accepted.
const RESPONSE_HEAD_MAX_BYTES: usize = 64 * 1024;

/// The driver of the connection: hyper's future that does the I/O.
#[allow(clippy::large_enum_variant, reason = "nearly all are the large one, and a connection is boxed")]
enum Driver {
    Running(http1::Connection<TokioIo<TapIo>, RequestBody>),
    /// The driver has finished: the connection is closed, or has switched protocols.
    Ended(http1::Parts<TokioIo<TapIo>>),
    Taken,
}

/// A connection with one request at a time.
pub struct Http1Connection {
    sender: SendRequest<RequestBody>,
    driver: Driver,
    tap: Rc<TapState>,
    gated_waker: Arc<GatedWaker>,
    /// The waker that the driver is polled with: `gated_waker`.
    waker: Waker,
    /// Whether the last request had no body, so that its response ended the exchange.
    has_no_body: bool,
    /// The server's address.
    pub target: ResolvedTarget,
    /// When the last response arrived, if that ended the exchange too: saves a clock read when the connection becomes
    /// idle.
    pub idle_since: Option<Instant>,
    /// Its permit among the connections to the server, where these are limited.
    pub permit: Option<ConnectionPermit>,
    pub counted: CountedConnection,
}

/// Why there is no response; with the request, if none of it was sent.
pub type SendError = TrySendError<Request<RequestBody>>;

impl Http1Connection {
    /// Starts HTTP/1.1 on a connected stream.
    pub async fn new(
        stream: IoStream,
        target: ResolvedTarget,
        counted: CountedConnection,
    ) -> hyper::Result<Http1Connection> {
        let tap = Rc::new(TapState::default());
        let io = TokioIo::new(TapIo::new(stream, Rc::clone(&tap)));
        let (sender, driver) = http1::Builder::new().max_buf_size(RESPONSE_HEAD_MAX_BYTES).handshake(io).await?;
        let gated_waker = GatedWaker::new();
        let waker = Waker::from(Arc::clone(&gated_waker));
        Ok(Http1Connection {
            sender,
            driver: Driver::Running(driver),
            tap,
            gated_waker,
            waker,
            has_no_body: true,
            target,
            idle_since: None,
            permit: None,
            counted,
        })
    }

    /// Does the I/O that is possible without waiting; wakes `task` when there is more to do.
    fn drive(&mut self, task: &Waker) {
        if let Driver::Running(driver) = &mut self.driver {
            self.gated_waker.arm(task);
            // The waiting response or body receives the error of the connection.
            if Pin::new(driver).poll(&mut Context::from_waker(&self.waker)).is_ready() {
                self.finish_driver();
            }
        }
    }

    /// Dismantles the driver: only then does hyper return a request that it has not read.
    #[cold]
    fn finish_driver(&mut self) {
        if let Driver::Running(driver) = std::mem::replace(&mut self.driver, Driver::Taken) {
            self.driver = Driver::Ended(driver.into_parts());
        }
    }

    /// Polls the driver until `poll` is ready. `poll` needs no waker: its input comes from the driver.
    fn poll_driven<T>(&mut self, cx: &Context<'_>, mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        self.drive(cx.waker());
        let polled = poll(&mut Context::from_waker(Waker::noop()));
        if polled.is_ready() {
            self.gated_waker.disarm();
        }
        polled
    }

    /// Polls the next frame of the response body.
    pub fn poll_body(&mut self, body: &mut Incoming, cx: &Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        self.gated_waker.disarm();
        let frame = Pin::new(&mut *body).poll_frame(&mut Context::from_waker(Waker::noop()));
        if frame.is_ready() {
            return frame;
        }
        self.idle_since = None;
        self.poll_driven(cx, |cx| Pin::new(&mut *body).poll_frame(cx))
    }

    /// The last request, to be sent again, if it was sent with `captures_head` and nothing of a response was passed on.
    pub fn replay_request(&self) -> Option<Request<RequestBody>> {
        self.tap.replay_request()
    }

    /// Whether a request can be sent now. Notices a connection that the server has closed.
    pub fn is_ready(&mut self) -> bool {
        self.drive(Waker::noop());
        matches!(self.driver, Driver::Running(_)) && self.sender.is_ready()
    }

    /// Whether the request is sent in full, once its response has ended.
    pub fn is_request_sent(&mut self) -> bool {
        self.has_no_body || self.is_ready()
    }

    /// Sends a request and waits for the head of the response; 1xx responses before it go to `informational`. With
    /// `captures_head`, the request head is captured, so that the request can be sent again. If the server has closed the connection, the error
    /// returns the request: hyper checks that before it writes.
    #[allow(clippy::result_large_err, reason = "the request comes back by value, to be sent elsewhere")]
    pub async fn send(
        &mut self,
        mut request: Box<Request<RequestBody>>,
        captures_head: bool,
        informational: Option<Rc<InformationalQueue>>,
    ) -> Result<Response<Incoming>, SendError> {
        self.tap.begin_exchange(captures_head, informational);
        self.has_no_body = request.body().is_end_stream();
        if !self.has_no_body && request.body().size_hint().exact().is_none() {
            // Without this field hyper sends a GET or HEAD without its body.
            request.headers_mut().insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
        if !self.sender.is_ready() {
            self.drive(Waker::noop());
        }
        self.gated_waker.disarm();
        let mut response = std::pin::pin!(self.sender.try_send_request(*request));
        poll_fn(|cx| self.poll_driven(cx, |cx| response.as_mut().poll(cx))).await
    }

    /// The byte stream, and the bytes read after the head of the last response, if that switched protocols; the connection
    /// counts for as long as the third part is held.
    pub async fn into_stream(mut self) -> Option<(IoStream, Bytes, CountedConnection)> {
        // The request had no body, so hyper only has to notice the switch.
        poll_fn(|cx| {
            self.drive(cx.waker());
            if let Driver::Running(_) = self.driver { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        match self.driver {
            Driver::Ended(parts) => Some((parts.io.into_inner().into_stream(), parts.read_buf, self.counted)),
            Driver::Running(_) | Driver::Taken => None,
        }
    }
}

/// Wakes the task that waits for a connection, and only while it waits.
///
/// A task that drives its own connection would be woken by its own actions there (the request it sends, the response it
/// takes) and by those of earlier tasks. Every such wake would poll hyper once more without effect. There is one `GatedWaker`
/// for each connection. A task and its connection belong to one worker; nevertheless wakers must be `Send` and `Sync`.
#[derive(Debug)]
struct GatedWaker {
    is_armed: AtomicBool,
    task: Mutex<Waker>,
}

impl GatedWaker {
    fn new() -> Arc<GatedWaker> {
        Arc::new(GatedWaker { is_armed: AtomicBool::new(false), task: Mutex::new(Waker::noop().clone()) })
    }

    /// Wakes go to this task, until the first wake.
    fn arm(&self, task: &Waker) {
        self.task.lock().unwrap_or_else(PoisonError::into_inner).clone_from(task);
        // Ordering: the mutex orders the accesses to `task`; a thread that reads `true` takes the mutex before it reads
        // `task`.
        self.is_armed.store(true, Ordering::Release);
    }

    /// Drops wakes until `arm` is called again.
    fn disarm(&self) {
        self.is_armed.store(false, Ordering::Release);
    }
}

impl Wake for GatedWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.is_armed.load(Ordering::Acquire) {
            self.is_armed.store(false, Ordering::Release);
            self.task.lock().unwrap_or_else(PoisonError::into_inner).wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_task_is_woken_once_and_only_while_it_waits() {
        let (wakes, gate) = (Arc::new(Woken::default()), GatedWaker::new());
        let (task, waker) = (Waker::from(Arc::clone(&wakes)), Waker::from(Arc::clone(&gate)));
        let count = || wakes.0.load(Ordering::Relaxed);
        waker.wake_by_ref();
        assert_eq!(count(), 0);
        gate.arm(&task);
        waker.wake_by_ref();
        waker.wake_by_ref();
        assert_eq!(count(), 1);
        gate.arm(&task);
        gate.disarm();
        waker.wake();
        assert_eq!(count(), 1);
    }
}
