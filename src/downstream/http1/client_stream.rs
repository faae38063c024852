//! `ClientStream`: the stream of an HTTP/1.1 client, shared by its connection and the body of the current request.
//!
//! The body is read from the socket when it is polled: no channel is between the client and the upstream. The task that polls
//! it is that of the connection or, over HTTP/2, that of the upstream stream. A socket wakes only the task that asked last; so
//! the connection does not read while the body waits.

use std::cell::{Cell, RefCell, RefMut};
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::task::unconstrained;

use crate::http1_stream::{Http1Stream, Outgoing, READ_HEAD_BYTES};
use crate::io_stream::IoStream;
use crate::timer::{Timer, Timers};
use crate::upstream::request_body::{BodyError, BodySource};
use transom_http::error::RequestError;
use transom_http::http1_body::BodyDecoder;
use transom_http::http1_head::{FirstLine, HeadLimits, RequestHead, may_complete_head, parse_request_head};
use transom_usage::memory_budget::{MemoryBudget, MemoryShare};

/// The most bytes of a body that nothing takes, so that the next request on the connection can be served.
const DISCARD_MAX_BYTES: usize = 64 * 1024;

/// How often the socket is asked whether the client has closed the connection behind unread bytes.
const CLOSE_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// While unread bytes fill the buffer of the socket, the end of the connection does not arrive. Therefore bytes are read before
/// they are taken: up to about so many of a connection, of which one read takes up to `READ_AHEAD_BYTES`, and of all connections
/// together.
const READ_AHEAD_MAX_BYTES: usize = 256 * 1024;
const READ_AHEAD_BYTES: usize = 32 * 1024;
static READ_AHEAD_MEMORY: MemoryBudget = MemoryBudget::new(64 << 20);

/// The stream of a client.
pub struct ClientStream {
    state: RefCell<StreamState>,
    timers: Rc<Timers>,
    /// Counts requests, so that the body of an earlier one reads nothing.
    request: Cell<u64>,
}

struct StreamState {
    stream: Http1Stream,
    /// Bytes at the end of those received that were not searched for the end of a head.
    unchecked_bytes: usize,
    /// The rest of the body of the current request.
    body: BodyDecoder,
    /// The request in progress may take the rest of its body.
    is_body_wanted: bool,
    expectation: Expectation,
    /// The task that waits for bytes of the body.
    body_waker: Option<Waker>,
    /// The task of the connection, if the current request has a body.
    connection_waker: Option<Waker>,
    is_read_closed: bool,
    socket_state: SocketState,
}

/// `Expect: 100-continue` of the current request (RFC 9110, section 10.1.1).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expectation {
    /// Not given, or fulfilled.
    Absent,
    /// The client waits for 100 (Continue).
    Waiting,
    /// 100 (Continue) is to be sent, because the body is wanted.
    Wanted,
}

/// What is known of the socket, while a response is made.
enum SocketState {
    NotChecked,
    /// It has unread bytes, behind which the end of the stream cannot be read. The timer runs until the socket is asked for it.
    /// The share is that of bytes that were read before they are taken.
    HasData(Rc<Timer>, Option<Box<MemoryShare>>),
}

/// Why there is no request head.
#[derive(Debug)]
pub enum HeadFailure {
    /// The client has closed the connection.
    Closed,
    Unusable(RequestError),
}

impl ClientStream {
    pub fn new(io: IoStream, timers: &Rc<Timers>) -> Rc<ClientStream> {
        let state = StreamState {
            stream: Http1Stream::new(io),
            unchecked_bytes: 0,
            body: BodyDecoder::Ended,
            is_body_wanted: false,
            expectation: Expectation::Absent,
            body_waker: None,
            connection_waker: None,
            is_read_closed: false,
            socket_state: SocketState::NotChecked,
        };
        Rc::new(ClientStream { state: RefCell::new(state), timers: Rc::clone(timers), request: Cell::new(0) })
    }

    /// Polls the head of the next request.
    pub fn poll_head(&self, limits: HeadLimits, cx: &mut Context<'_>) -> Poll<Result<RequestHead, HeadFailure>> {
        let state = &mut *self.state.borrow_mut();
        loop {
            // A head that arrives byte by byte is not parsed each time.
            let unchecked = std::mem::take(&mut state.unchecked_bytes);
            if unchecked > 0 && may_complete_head(&state.stream.received, unchecked, limits.bytes) {
                let parsed = parse_request_head(&mut state.stream.received, limits);
                if let Some(head) = parsed.map_err(HeadFailure::Unusable).transpose() {
                    return Poll::Ready(head);
                }
            }
            // The next read of a long head is as large as what was received of it.
            let capacity = state.stream.received.len().clamp(READ_HEAD_BYTES, limits.bytes.max(READ_HEAD_BYTES));
            match ready!(state.poll_receive(capacity, cx)) {
                Ok(0) | Err(_) => return Poll::Ready(Err(HeadFailure::Closed)),
                Ok(bytes) => state.unchecked_bytes = bytes,
            }
        }
    }

    /// Whether a head has begun, other than with empty lines, and is not complete.
    pub fn is_in_head(&self) -> bool {
        self.state.borrow().stream.received.iter().any(|byte| !matches!(byte, b'\r' | b'\n'))
    }

    /// Calls `read` with the first line of a head that is not complete or cannot be parsed.
    pub fn with_first_line<R>(&self, read: impl FnOnce(Option<FirstLine<'_>>) -> R) -> R {
        read(FirstLine::parse(&self.state.borrow().stream.received))
    }

    /// Begins a request with this body.
    pub fn begin_request(self: &Rc<Self>, body: BodyDecoder, expects_continue: bool) -> BodySource {
        let mut state = self.state.borrow_mut();
        if state.stream.received.is_empty() {
            state.stream.shrink();
        }
        if body.has_ended() {
            return BodySource::Empty;
        }
        (state.body, state.is_body_wanted) = (body, true);
        state.expectation = if expects_continue { Expectation::Waiting } else { Expectation::Absent };
        BodySource::Http1(Box::pin(Http1RequestBody { stream: Rc::downgrade(self), request: self.request.get() }))
    }

    /// Called before the task of the connection polls a request.
    pub fn before_poll(&self, cx: &Context<'_>) {
        let state = &mut *self.state.borrow_mut();
        if state.body.has_ended() {
            return;
        }
        // Set again if this poll polls the body.
        state.body_waker.take_if(|waker| waker.will_wake(cx.waker()));
        if !is_woken_by(state.connection_waker.as_ref(), cx) {
            state.connection_waker = Some(cx.waker().clone());
        }
    }

    /// Whether 100 (Continue) is to be sent. Returns true once.
    pub fn take_continue(&self) -> bool {
        let expectation = &mut self.state.borrow_mut().expectation;
        let is_wanted = *expectation == Expectation::Wanted;
        if is_wanted {
            *expectation = Expectation::Absent;
        }
        is_wanted
    }

    /// Whether another request may follow, as far as is known when the response begins.
    pub fn may_keep_alive(&self) -> bool {
        let state = self.state.borrow();
        let received = state.stream.received.len();
        // Without 100 (Continue), the client sends the body or another request.
        let is_next_unknown = state.expectation != Expectation::Absent && received == 0;
        let is_too_long =
            matches!(state.body, BodyDecoder::Length(left) if left > (received + DISCARD_MAX_BYTES) as u64);
        !is_next_unknown && (state.is_body_wanted || !is_too_long)
    }

    /// Ready when the client has closed the connection; else wakes the task then, behind unread bytes with some delay.
    pub fn poll_closed(&self, cx: &mut Context<'_>) -> Poll<()> {
        let state = &mut *self.state.borrow_mut();
        if state.body_waker.is_some() {
            return Poll::Pending;
        }
        if let SocketState::NotChecked = state.socket_state {
            let Ok(true) = ready!(state.stream.io.poll_has_data(cx)) else {
                state.is_read_closed = true;
                return Poll::Ready(());
            };
            let timer = self.timers.new_timer();
            timer.arm(CLOSE_CHECK_INTERVAL);
            state.socket_state = SocketState::HasData(timer, None);
        }
        if let SocketState::HasData(timer, memory) = &mut state.socket_state
            && timer.poll_expired(cx)
        {
            let memory = memory.get_or_insert_with(|| Box::new(READ_AHEAD_MEMORY.share()));
            if state.stream.io.is_closed_by_peer() || read_ahead(&mut state.stream, memory, cx) {
                return Poll::Ready(());
            }
            timer.arm(CLOSE_CHECK_INTERVAL);
            // Not expired: registers the task.
            let _ = timer.poll_expired(cx);
        }
        Poll::Pending
    }

    /// Ends the current request, and returns whether another one can follow: the rest of its body is short, and was received or
    /// can be received without waiting.
    pub fn end_request(&self) -> bool {
        let state = &mut *self.state.borrow_mut();
        self.request.update(|request| request + 1);
        state.end_body_wait();
        (state.connection_waker, state.expectation) = (None, Expectation::Absent);
        let mut discarded = 0;
        while !state.body.has_ended() && discarded <= DISCARD_MAX_BYTES {
            // Without tokio's budget of a task, which a long response may have used up.
            let receiving = pin!(unconstrained(poll_fn(|cx| state.poll_frame(cx))));
            match receiving.poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(Some(Ok(frame))) => discarded += frame.data_ref().map_or(0, Bytes::len),
                Poll::Ready(None) => {}
                Poll::Ready(Some(Err(_))) | Poll::Pending => return false,
            }
        }
        state.unchecked_bytes = state.stream.received.len();
        state.body.has_ended()
    }

    pub fn outgoing(&self) -> RefMut<'_, Outgoing> {
        RefMut::map(self.state.borrow_mut(), |state| &mut state.stream.outgoing)
    }

    /// Sends all bytes that wait.
    pub fn poll_send(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.state.borrow_mut().stream.poll_send(cx)
    }

    /// Sends an error response without waiting, if the client can read it. The socket of a connection without a response in
    /// progress has room for it.
    pub fn try_send(&self, response: &[u8]) {
        let state = &mut *self.state.borrow_mut();
        if !state.is_read_closed {
            state.stream.io.try_send(response);
        }
    }

    /// Makes the end of the connection a reset.
    pub fn reset_on_close(&self) {
        self.state.borrow().stream.io.reset_on_close();
    }

    /// The stream, the bytes received behind the last request, and whether the client has closed its side.
    pub fn into_parts(self) -> (IoStream, Bytes, bool) {
        let mut state = self.state.into_inner();
        state.end_body_wait();
        (state.stream.io, state.stream.received, state.is_read_closed)
    }
}

impl StreamState {
    /// Wakes the task that waits for bytes of the body; it finds that the request has ended.
    fn end_body_wait(&mut self) {
        if let Some(waker) = self.body_waker.take() {
            waker.wake();
        }
    }

    fn poll_receive(&mut self, capacity: usize, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let received = ready!(self.stream.poll_receive(capacity, cx));
        self.socket_state = SocketState::NotChecked;
        self.is_read_closed |= matches!(received, Ok(0) | Err(_));
        Poll::Ready(received)
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        loop {
            match self.body.decode(&mut self.stream.received) {
                Ok(None) if !self.body.has_ended() => {}
                Ok(frame) => {
                    if self.body.has_ended() {
                        self.stream.shrink();
                    }
                    return Poll::Ready(frame.map(Ok));
                }
                Err(malformed) => return Poll::Ready(Some(Err(malformed.as_str().into()))),
            }
            match ready!(self.poll_receive(Http1Stream::capacity_for(self.body.expected_bytes()), cx)) {
                Ok(0) => return Poll::Ready(Some(Err("the client closed the connection".into()))),
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(error.into()))),
            }
        }
    }
}

/// Receives what the socket has, within limits. Returns whether the stream has ended.
fn read_ahead(stream: &mut Http1Stream, memory: &mut MemoryShare, cx: &mut Context<'_>) -> bool {
    while stream.received.len() < READ_AHEAD_MAX_BYTES && memory.grow_to(stream.received.len() + READ_AHEAD_BYTES) {
        match stream.poll_receive(READ_AHEAD_BYTES, cx) {
            Poll::Ready(Ok(1..)) => {}
            Poll::Ready(Ok(0) | Err(_)) => return true,
            Poll::Pending => break,
        }
    }
    false
}

fn is_woken_by(waker: Option<&Waker>, cx: &Context<'_>) -> bool {
    waker.is_some_and(|waker| waker.will_wake(cx.waker()))
}

/// The body of a request.
struct Http1RequestBody {
    stream: Weak<ClientStream>,
    /// The number of the request.
    request: u64,
}

impl Http1RequestBody {
    /// The stream, while the request is in progress.
    fn stream(&self) -> Option<Rc<ClientStream>> {
        self.stream.upgrade().filter(|stream| stream.request.get() == self.request)
    }
}

impl Body for Http1RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Some(stream) = self.stream() else { return Poll::Ready(Some(Err("the response has ended".into()))) };
        let state = &mut *stream.state.borrow_mut();
        let polled = state.poll_frame(cx);
        if polled.is_pending() {
            state.body_waker = Some(cx.waker().clone());
            if state.expectation == Expectation::Waiting {
                state.expectation = Expectation::Wanted;
                state.connection_waker.iter().for_each(Waker::wake_by_ref);
            }
        } else {
            (state.body_waker, state.expectation) = (None, Expectation::Absent);
            if !is_woken_by(state.connection_waker.as_ref(), cx) {
                // The connection watches the socket now.
                state.connection_waker.iter().for_each(Waker::wake_by_ref);
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.stream().is_some_and(|stream| stream.state.borrow().body.has_ended())
    }

    fn size_hint(&self) -> SizeHint {
        self.stream().map_or_else(SizeHint::default, |stream| stream.state.borrow().body.size_hint())
    }
}

impl Drop for Http1RequestBody {
    fn drop(&mut self) {
        let Some(stream) = self.stream() else { return };
        let state = &mut *stream.state.borrow_mut();
        state.is_body_wanted = false;
        if state.body_waker.take().is_some() {
            // The connection watches the socket now.
            state.connection_waker.iter().for_each(Waker::wake_by_ref);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::task::Wake;

    use tokio::io::AsyncWriteExt;
    use tokio::net::UnixStream;

    use super::*;

    const LIMITS: HeadLimits = HeadLimits { fields: 10, bytes: 1000 };
    const POST: &str = "POST / HTTP/1.1\r\nHost: a\r\n";

    /// Counts how often a task is woken.
    #[derive(Default)]
    struct Task(Mutex<u32>);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            *self.0.lock().unwrap() += 1;
        }
    }

    impl Task {
        fn take_wakes(&self) -> u32 {
            std::mem::take(&mut *self.0.lock().unwrap())
        }
    }

    /// A connection, its client, and its task.
    struct Connection {
        stream: Rc<ClientStream>,
        client: UnixStream,
        task: Arc<Task>,
    }

    impl Connection {
        fn new() -> Connection {
            let (io, client) = UnixStream::pair().unwrap();
            Connection { stream: ClientStream::new(IoStream::unix(io), &Rc::default()), client, task: Arc::default() }
        }

        async fn receive_head(&mut self, bytes: &str) -> RequestHead {
            self.client.write_all(bytes.as_bytes()).await.unwrap();
            poll_fn(|cx| self.stream.poll_head(LIMITS, cx)).await.unwrap()
        }

        /// Receives a head, and begins its request.
        async fn begin(&mut self, bytes: &str) -> Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>> {
            let head = self.receive_head(bytes).await;
            let BodySource::Http1(body) = self.stream.begin_request(head.body, head.expects_continue) else {
                panic!("no body")
            };
            self.stream.before_poll(&Context::from_waker(&Waker::from(Arc::clone(&self.task))));
            body
        }
    }

    /// Polls a body in a task of an upstream connection.
    fn poll_in(task: &Arc<Task>, body: &mut Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>) -> Poll<Option<bool>> {
        let waker = Waker::from(Arc::clone(task));
        body.as_mut().poll_frame(&mut Context::from_waker(&waker)).map(|frame| frame.map(|frame| frame.is_ok()))
    }

    #[tokio::test]
    async fn the_connection_and_the_task_that_polls_the_body_wake_each_other() {
        let mut connection = Connection::new();
        let upstream: Arc<Task> = Arc::default();
        let mut body = connection.begin(&format!("{POST}Content-Length: 9\r\n\r\nabc")).await;
        assert_eq!(poll_in(&upstream, &mut body), Poll::Ready(Some(true)));
        assert_eq!(connection.task.take_wakes(), 1);
        // While the body waits, the connection does not watch the socket.
        assert!(poll_in(&upstream, &mut body).is_pending());
        let cx = &mut Context::from_waker(Waker::noop());
        assert!(connection.stream.poll_closed(cx).is_pending());
        // The body is dropped: the connection watches again.
        drop(body);
        assert_eq!((connection.task.take_wakes(), upstream.take_wakes()), (1, 0));
    }

    #[tokio::test]
    async fn a_waiting_body_fails_when_its_request_or_connection_ends() {
        for ends_connection in [false, true] {
            let mut connection = Connection::new();
            let upstream: Arc<Task> = Arc::default();
            let mut body = connection.begin(&format!("{POST}Content-Length: 9\r\n\r\n")).await;
            assert!(poll_in(&upstream, &mut body).is_pending() && !body.is_end_stream());
            if ends_connection {
                drop(Rc::into_inner(connection.stream).unwrap().into_parts());
            } else {
                assert!(!connection.stream.end_request());
            }
            assert_eq!(upstream.take_wakes(), 1);
            assert_eq!(poll_in(&upstream, &mut body), Poll::Ready(Some(false)));
            assert!(!body.is_end_stream());
        }
    }

    #[tokio::test]
    async fn the_body_of_an_earlier_request_reads_nothing() {
        let mut connection = Connection::new();
        let mut first = connection.begin(&format!("{POST}Content-Length: 3\r\n\r\nabc")).await;
        assert!(connection.stream.end_request());
        let _second = connection.begin(&format!("{POST}Content-Length: 3\r\n\r\ndef")).await;
        assert_eq!(poll_in(&Arc::default(), &mut first), Poll::Ready(Some(false)));
    }

    #[tokio::test]
    async fn the_body_is_asked_for_when_it_is_wanted() {
        let mut connection = Connection::new();
        let expecting = format!("{POST}Content-Length: 3\r\nExpect: 100-continue\r\n\r\n");
        let mut body = connection.begin(&expecting).await;
        assert!(!connection.stream.take_continue() && !connection.stream.may_keep_alive());
        assert!(poll_in(&Arc::default(), &mut body).is_pending());
        assert_eq!(connection.task.take_wakes(), 1);
        assert!(connection.stream.take_continue() && !connection.stream.take_continue());
        connection.client.write_all(b"abc").await.unwrap();
        poll_fn(|cx| connection.stream.state.borrow().stream.io.poll_readable(cx)).await;
        drop(body);
        assert!(connection.stream.may_keep_alive() && connection.stream.end_request());
        // The client sends the body without waiting, and nothing takes it.
        drop(connection.begin(&format!("{expecting}abc")).await);
        assert!(connection.stream.may_keep_alive() && connection.stream.end_request());
        connection.receive_head("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert!(connection.stream.may_keep_alive() && !connection.stream.take_continue());
    }

    #[tokio::test]
    async fn a_connection_that_waits_holds_little_memory() {
        let mut connection = Connection::new();
        let body = "x".repeat(100_000);
        let mut wanted = connection.begin(&format!("{POST}Content-Length: {}\r\n\r\n", body.len())).await;
        let client = &mut connection.client;
        let sending = async { client.write_all(format!("{body}GET /").as_bytes()).await.unwrap() };
        let receiving = async { while poll_fn(|cx| wanted.as_mut().poll_frame(cx)).await.is_some() {} };
        tokio::join!(sending, receiving);
        assert!(connection.stream.end_request());
        let received = std::mem::take(&mut connection.stream.state.borrow_mut().stream.received);
        assert!(b"GET /".starts_with(&received));
        let capacity = bytes::BytesMut::from(received).capacity();
        assert!(capacity < 100, "{capacity}");
    }
}
