//! The socket of an upstream connection, overheard: what goes out, in case it must be said again, and
//! informational answers (1xx) that come in.
//!
//! hyper keeps the request it is given. For the rare second try, the bytes of a head are put aside as
//! it is sent, which costs less than a copy of the request. And hyper reads and skips informational
//! answers. It would tell of them, too, but wants a closure in a map of its own for every request, of
//! which hardly one ever gets such an answer. Here it costs a look at the first bytes of an answer.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use http::Request;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::request_upload::Upload;
use crate::informational::InformationalQueue;
use crate::io_stream::IoStream;

/// Of a head; longer ones are not passed on.
const HEAD_MAX_BYTES: usize = 16 * 1024;
const FIELDS_MAX: usize = 128;
/// Room for the next head that a connection keeps.
const HEAD_KEPT_BYTES: usize = 1024;
/// How an informational answer begins; `?` is any byte.
const START: &[u8] = b"HTTP/1.? 1";

/// What a connection and its socket know together.
#[derive(Debug, Default)]
pub struct TapState {
    /// Whether the next head that is sent is put aside.
    keeps: Cell<bool>,
    sent: RefCell<Vec<u8>>,
    /// Whether something of the answer was passed on.
    told: Cell<bool>,
    /// Who is told of informational answers, until the final answer begins.
    listener: RefCell<Option<Rc<InformationalQueue>>>,
    /// Such an answer as far as it has come.
    head: RefCell<Vec<u8>>,
}

impl TapState {
    /// What comes next is a request, put aside if `keeps`, and the answer to it, for this listener.
    pub fn listen(&self, keeps: bool, listener: Option<Rc<InformationalQueue>>) {
        self.keeps.set(keeps);
        self.told.set(false);
        self.head.borrow_mut().clear();
        self.listener.replace(listener);
    }

    /// The request that was put aside. It had no body. `None` once something of the answer was passed on.
    pub fn request(&self) -> Option<Request<Upload>> {
        if self.told.get() {
            return None;
        }
        let sent = self.sent.borrow();
        let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
        let mut head = httparse::Request::new(&mut fields);
        head.parse(&sent).ok()?;
        let mut request = Request::builder().method(head.method?).uri(head.path?);
        for field in head.headers {
            request = request.header(field.name, field.value);
        }
        request.body(Upload::Empty).ok()
    }

    /// hyper hands over a head as one piece, and again from where it could not be sent.
    fn say(&self, bytes: &[u8]) {
        if self.keeps.take() {
            let mut sent = self.sent.borrow_mut();
            sent.clear();
            sent.shrink_to(HEAD_KEPT_BYTES);
            sent.extend_from_slice(bytes);
        }
    }

    fn hear(&self, bytes: &[u8]) {
        let mut listener = self.listener.borrow_mut();
        let Some(interim) = &*listener else { return };
        let mut head = self.head.borrow_mut();
        if head.is_empty() && !may_be_informational(bytes) {
            *listener = None;
            return;
        }
        head.extend_from_slice(bytes);
        while !head.is_empty() {
            let known = if may_be_informational(&head) { pass_on(&head, interim) } else { None };
            match known {
                Some(0) if head.len() <= HEAD_MAX_BYTES => return,
                Some(end) if end > 0 => {
                    self.told.set(true);
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

/// Whether an answer that begins like this is informational, as far as it can be told.
fn may_be_informational(bytes: &[u8]) -> bool {
    // Empty lines before a head are passed over by hyper as well.
    let start = bytes.iter().skip_while(|byte| matches!(byte, b'\r' | b'\n'));
    start.zip(START).all(|(byte, wanted)| byte == wanted || *wanted == b'?')
}

/// Passes on the first head. Returns its length: 0 if it is not complete, `None` if it is not HTTP.
fn pass_on(bytes: &[u8], interim: &InformationalQueue) -> Option<usize> {
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut head = httparse::Response::new(&mut fields);
    match head.parse(bytes).ok()? {
        httparse::Status::Partial => Some(0),
        httparse::Status::Complete(length) => {
            let fields = head.headers.iter().map(|field| (field.name, field.value));
            interim.push(head.code.unwrap_or(0), head.reason.unwrap_or(""), fields);
            Some(length)
        }
    }
}

#[derive(Debug)]
pub struct TapIo {
    stream: IoStream,
    hearsay: Rc<TapState>,
}

impl TapIo {
    pub fn new(stream: IoStream, hearsay: Rc<TapState>) -> TapIo {
        TapIo { stream, hearsay }
    }

    pub fn into_stream(self) -> IoStream {
        self.stream
    }
}

impl AsyncRead for TapIo {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buffer));
        self.hearsay.hear(&buffer.filled()[before..]);
        Poll::Ready(read)
    }
}

impl AsyncWrite for TapIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.hearsay.say(bytes);
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let Some(head) = slices.first() {
            self.hearsay.say(head);
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
    const TOLD: &str = "HTTP/1.1 103 Early Hints\r\nlink: </a.css>\r\n\r\n";
    const FINAL: &str = "HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 103 Body\r\n\r\n";

    #[test]
    fn a_request_is_put_aside_as_it_is_sent() {
        let hearsay = TapState::default();
        hearsay.listen(true, None);
        hearsay.say(b"DELETE /a?b HTTP/1.1\r\nhost: a\r\nx: 1\r\nx: 2\r\n\r\n");
        hearsay.say(b"the rest of it");
        let request = hearsay.request().unwrap();
        assert_eq!((request.method().as_str(), request.uri().to_string().as_str()), ("DELETE", "/a?b"));
        let fields: Vec<_> = request.headers().iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        assert_eq!(fields, [("host", &b"a"[..]), ("x", b"1"), ("x", b"2")]);
    }

    fn heard(pieces: &[&[u8]]) -> String {
        let (hearsay, interim) = (TapState::default(), Rc::new(InformationalQueue::default()));
        hearsay.listen(false, Some(Rc::clone(&interim)));
        pieces.iter().for_each(|piece| hearsay.hear(piece));
        String::from_utf8(interim.take().unwrap_or_default().to_vec()).unwrap()
    }

    #[test]
    fn heads_are_passed_on_wherever_they_are_cut() {
        let all = format!("HTTP/1.1 100 Continue\r\n\r\n{HINTS}\r\n{HINTS}{FINAL}");
        for cut in 0..all.len() {
            let (one, two) = all.as_bytes().split_at(cut);
            assert_eq!(heard(&[one, two]), TOLD.repeat(2), "{cut}");
        }
        assert_eq!(heard(&all.as_bytes().chunks(1).collect::<Vec<_>>()), TOLD.repeat(2));
    }

    #[test]
    fn the_final_answer_is_the_end_of_it() {
        assert_eq!(heard(&[FINAL.as_bytes(), HINTS.as_bytes()]), "");
        assert_eq!(heard(&[b"HTTP/1.1 1x\r\n\r\n", HINTS.as_bytes()]), "");
        let endless = format!("HTTP/1.1 103 x\r\nx: {}", "x".repeat(HEAD_MAX_BYTES));
        assert_eq!(heard(&[endless.as_bytes(), b"\r\n\r\n", HINTS.as_bytes()]), "");
    }
}
