//! I/O wrapper around the socket of an HTTP/1.1 upstream connection. Captures the request head as it is written, for a
//! retry, and parses informational (1xx) responses as they are read.
//!
//! hyper consumes the request it sends. Capturing the bytes of the head costs less than a copy of the request. hyper
//! reads and skips 1xx responses; its callback for them needs a closure in an extension map for every request, although
//! few requests get any. Here the cost is a comparison of the first bytes of a response.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use http::Request;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::request_body::RequestBody;
use crate::informational::InformationalQueue;
use crate::io_stream::IoStream;

/// Of a 1xx head; longer ones are not forwarded.
const HEAD_MAX_BYTES: usize = 16 * 1024;
const FIELDS_MAX: usize = 128;
/// Capacity that the capture buffer keeps between requests.
const CAPTURE_RETAINED_BYTES: usize = 1024;
/// Beginning of an informational response; `?` is any byte.
const INFORMATIONAL_PREFIX: &[u8] = b"HTTP/1.? 1";

/// State shared by a connection and its I/O wrapper.
#[derive(Debug, Default)]
pub struct TapState {
    /// Whether the next head that is written is captured.
    captures_next: Cell<bool>,
    captured: RefCell<Vec<u8>>,
    /// Whether a 1xx response was forwarded for this request.
    has_forwarded: Cell<bool>,
    /// Receives 1xx responses, until the final response begins.
    informational: RefCell<Option<Rc<InformationalQueue>>>,
    /// Bytes of a 1xx head that is not complete.
    partial_head: RefCell<Vec<u8>>,
}

impl TapState {
    /// Starts an exchange: `captures_head` captures the request head, `informational` receives 1xx responses.
    pub fn begin_exchange(&self, captures_head: bool, listener: Option<Rc<InformationalQueue>>) {
        self.captures_next.set(captures_head);
        self.has_forwarded.set(false);
        self.partial_head.borrow_mut().clear();
        self.informational.replace(listener);
    }

    /// The captured request, which had no body. `None` once a 1xx response was forwarded.
    pub fn replay_request(&self) -> Option<Request<RequestBody>> {
        if self.has_forwarded.get() {
            return None;
        }
        let sent = self.captured.borrow();
        let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
        let mut head = httparse::Request::new(&mut fields);
        head.parse(&sent).ok()?;
        let mut request = Request::builder().method(head.method?).uri(head.path?);
        for field in head.headers {
            request = request.header(field.name, field.value);
        }
        request.body(RequestBody::Empty).ok()
    }

    /// hyper writes a head in one piece, and the unsent rest of a head again.
    fn on_write(&self, bytes: &[u8]) {
        if self.captures_next.take() {
            let mut sent = self.captured.borrow_mut();
            sent.clear();
            sent.shrink_to(CAPTURE_RETAINED_BYTES);
            sent.extend_from_slice(bytes);
        }
    }

    fn on_read(&self, bytes: &[u8]) {
        let mut listener = self.informational.borrow_mut();
        let Some(informational) = &*listener else { return };
        let mut head = self.partial_head.borrow_mut();
        if head.is_empty() && !may_be_informational(bytes) {
            *listener = None;
            return;
        }
        head.extend_from_slice(bytes);
        while !head.is_empty() {
            let known = if may_be_informational(&head) { forward_first_head(&head, informational) } else { None };
            match known {
                Some(0) if head.len() <= HEAD_MAX_BYTES => return,
                Some(end) if end > 0 => {
                    self.has_forwarded.set(true);
                    drop(head.drain(..end));
                }
                Some(_) | None => {
                    *listener = None;
                    head.clear();
                    return;
                }
            }
        }
    }
}

/// Whether a response that begins with these bytes can be informational.
fn may_be_informational(bytes: &[u8]) -> bool {
    // hyper, too, skips empty lines before a head.
    let start = bytes.iter().skip_while(|byte| matches!(byte, b'\r' | b'\n'));
    start.zip(INFORMATIONAL_PREFIX).all(|(byte, wanted)| byte == wanted || *wanted == b'?')
}

/// Forwards the first head. Returns its length: 0 if the head is incomplete, `None` if it is not HTTP.
fn forward_first_head(bytes: &[u8], informational: &InformationalQueue) -> Option<usize> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut head = httparse::Response::new(&mut fields);
    match head.parse(bytes).ok()? {
        httparse::Status::Partial => Some(0),
        httparse::Status::Complete(length) => {
            let fields = head.headers.iter().map(|field| (field.name, field.value));
            informational.push(head.code.unwrap_or(0), head.reason.unwrap_or(""), fields);
            Some(length)
        }
    }
}

#[derive(Debug)]
pub struct TapIo {
    stream: IoStream,
    state: Rc<TapState>,
}

impl TapIo {
    pub fn new(stream: IoStream, state: Rc<TapState>) -> TapIo {
        TapIo { stream, state }
    }

    pub fn into_stream(self) -> IoStream {
        self.stream
    }
}

impl AsyncRead for TapIo {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buffer));
        self.state.on_read(&buffer.filled()[before..]);
        Poll::Ready(read)
    }
}

impl AsyncWrite for TapIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.state.on_write(bytes);
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let Some(head) = slices.first() {
            self.state.on_write(head);
        }
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HINTS: &str = "HTTP/1.1 103 Early Hints\r\nLink: </a.css>\r\nConnection: x\r\n\r\n";
    const FORWARDED: &str = "HTTP/1.1 103 Early Hints\r\nlink: </a.css>\r\n\r\n";
    const FINAL: &str = "HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 103 Body\r\n\r\n";

    #[test]
    fn a_request_is_captured_as_it_is_sent() {
        let state = TapState::default();
        state.begin_exchange(true, None);
        state.on_write(b"DELETE /a?b HTTP/1.1\r\nhost: a\r\nx: 1\r\nx: 2\r\n\r\n");
        state.on_write(b"the rest of it");
        let request = state.replay_request().unwrap();
        assert_eq!((request.method().as_str(), request.uri().to_string().as_str()), ("DELETE", "/a?b"));
        let fields: Vec<_> = request.headers().iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        assert_eq!(fields, [("host", &b"a"[..]), ("x", b"1"), ("x", b"2")]);
    }

    fn forwarded(pieces: &[&[u8]]) -> String {
        let (state, informational) = (TapState::default(), Rc::new(InformationalQueue::default()));
        state.begin_exchange(false, Some(Rc::clone(&informational)));
        pieces.iter().for_each(|piece| state.on_read(piece));
        String::from_utf8(informational.take().unwrap_or_default().to_vec()).unwrap()
    }

    #[test]
    fn informational_heads_are_forwarded_however_they_are_split() {
        let all = format!("HTTP/1.1 100 Continue\r\n\r\n{HINTS}\r\n{HINTS}{FINAL}");
        for cut in 0..all.len() {
            let (one, two) = all.as_bytes().split_at(cut);
            assert_eq!(forwarded(&[one, two]), FORWARDED.repeat(2), "{cut}");
        }
        assert_eq!(forwarded(&all.as_bytes().chunks(1).collect::<Vec<_>>()), FORWARDED.repeat(2));
    }

    #[test]
    fn nothing_is_forwarded_after_the_final_response_begins() {
        assert_eq!(forwarded(&[FINAL.as_bytes(), HINTS.as_bytes()]), "");
        assert_eq!(forwarded(&[b"HTTP/1.1 1x\r\n\r\n", HINTS.as_bytes()]), "");
        let endless = format!("HTTP/1.1 103 x\r\nx: {}", "x".repeat(HEAD_MAX_BYTES));
        assert_eq!(forwarded(&[endless.as_bytes(), b"\r\n\r\n", HINTS.as_bytes()]), "");
    }
}
