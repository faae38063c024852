//! One HTTP/2 stream above hyper: the request on it, the answer, and what is left of the request's body
//! when the answer is over.
//!
//! An answer that waits for nothing, such as a refusal, is given within the task of its connection: when all requests that
//! have come are read, so that their answers leave together. Any other gets a task of its own. A stream on which nothing moves is reset. And a body that nobody wants any more is read on for a moment: a
//! client that is told to stop in the middle of sending may drop the answer with the rest.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, header};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::service::Service;
use hyper::upgrade::OnUpgrade;

use super::session::Session;
use super::strand::{self, Sending, Strand};
use crate::gateway::body::Body;
use crate::gateway::hall::{Hall, Origin, Peer};
use crate::gateway::pass;
use crate::gateway::passing::Passing;
use crate::http::fields;

/// How much of an unwanted body is read, and for how long; then the client's window stays shut, and the
/// stream is reset. Some clients drop an answer that they find together with the reset, so one that gets no time on its
/// processor is given some; what it keeps is one of its own streams.
const UNWANTED_MAX_BYTES: usize = 256 * 1024;
const UNWANTED_MAX: Duration = Duration::from_secs(10);

/// Seats that a connection keeps for streams to come.
const FREE_MAX: usize = 32;

/// What a stream needs while there is a request on it; used again by the next.
struct Seat {
    peer: Rc<Peer>,
    /// The head of the answer is there.
    is_answering: Cell<bool>,
    is_head: Cell<bool>,
    /// What becomes of the stream if a CONNECT is granted.
    upgrade: Cell<Option<OnUpgrade>>,
}

/// All streams of a connection: what hyper calls with every request, and what it gives the answers to.
#[derive(Clone)]
pub struct Streams {
    shared: Rc<Shared>,
    /// The answers have streams of their own kind, so these do not have the answers.
    at_hand: Weak<Queue>,
}

/// Answers that are there, and not sent yet. Dropped with the connection.
pub struct AtHand(Rc<Queue>);

type Queue = RefCell<Vec<Pin<Box<dyn Future<Output = ()>>>>>;

struct Shared {
    hall: Rc<Hall>,
    /// The connection as a whole.
    whole: Peer,
    session: Rc<Session>,
    /// Seats that nobody has.
    free: RefCell<Vec<Rc<Seat>>>,
    /// Of the request that hyper asked last, until it hands over what became of it; and whether it is answered already.
    next: RefCell<Option<(Rc<Seat>, bool)>>,
    /// hyper's part of the tunnel that an answer has just opened.
    sending: Cell<Option<Sending>>,
}

impl Seat {
    /// Whether a piece of the request's body has been taken since this was last asked.
    fn has_moved(&self) -> bool {
        self.peer.unwanted.as_ref().is_some_and(|unwanted| unwanted.has_moved())
    }

    /// The tunnel that the answer has opened, if it has.
    fn strand(&self, sending: Option<Sending>) -> Option<Box<Strand>> {
        let (sending, upgrade, passage) = (sending?, self.upgrade.take()?, self.peer.passage.take()?);
        Some(Box::new(Strand::new(sending, upgrade, passage, &self.peer)))
    }
}

impl Streams {
    pub fn new(hall: Rc<Hall>, origin: Rc<Origin>, session: Rc<Session>) -> (Streams, AtHand) {
        let (free, next) = (RefCell::default(), RefCell::default());
        let whole = Peer::new(origin, hall.timers.timer(), Rc::default(), Rc::default());
        let (shared, at_hand) =
            (Rc::new(Shared { hall, whole, session, free, next, sending: Cell::default() }), Rc::default());
        (Streams { shared, at_hand: Rc::downgrade(&at_hand) }, AtHand(at_hand))
    }
}

impl AtHand {
    /// Hands over the answers that are there; `false` if there are none. hyper would send each by itself if it were given
    /// them one by one, with a system call for each.
    pub fn hand_over(&self) -> bool {
        let mut at_hand = self.0.take();
        let any = !at_hand.is_empty();
        let at_once = &mut Context::from_waker(Waker::noop());
        for mut work in at_hand.drain(..) {
            if work.as_mut().poll(at_once).is_pending() {
                tokio::task::spawn_local(work);
            }
        }
        // Its room is used again.
        self.0.replace(at_hand);
        any
    }
}

impl Shared {
    fn seat(&self) -> Rc<Seat> {
        let free = self.free.borrow_mut().pop();
        free.unwrap_or_else(|| {
            let peer = Peer::of_stream(&self.whole, self.hall.timers.timer());
            Rc::new(Seat {
                peer: Rc::new(peer),
                is_answering: Cell::default(),
                is_head: Cell::default(),
                upgrade: Cell::default(),
            })
        })
    }

    fn give_back(&self, seat: Rc<Seat>) {
        seat.is_answering.set(false);
        if seat.upgrade.take().is_some() {
            // A stream may be reset between the answer that opens a tunnel and the tunnel.
            drop(seat.peer.passage.take());
        }
        // What a task has of memory lasts as long as anybody could wake it.
        seat.peer.timer.hand_over();
        if let Some(unwanted) = &seat.peer.unwanted {
            drop(unwanted.take());
        }
        let mut free = self.free.borrow_mut();
        if free.len() < FREE_MAX {
            free.push(seat);
        }
    }
}

impl Service<Request<Incoming>> for Streams {
    type Response = Response<Staged>;
    type Error = Infallible;
    type Future = Answering;

    fn call(&self, mut request: Request<Incoming>) -> Answering {
        let Shared { hall, next, .. } = &*self.shared;
        let seat = self.shared.seat();
        if request.method() == Method::CONNECT {
            seat.upgrade.set(strand::asked(&mut request));
        }
        seat.is_head.set(request.method() == Method::HEAD);
        // Chunks are unknown here, and so is a length beside them.
        let passing = Passing::begin(|| pass(hall, &seat.peer, request, |_marks| None));
        next.replace(Some((Rc::clone(&seat), passing.is_answered())));
        Answering { passing, seat }
    }
}

impl<F: Future<Output = ()> + Unpin + 'static> Executor<F> for Streams {
    fn execute(&self, future: F) {
        let Some((seat, is_answered)) = self.shared.next.take() else {
            // No request, so the other thing that hyper has to do: whoever is polling it will look here.
            self.shared.sending.set(Some(Box::pin(future)));
            return;
        };
        self.shared.session.attend();
        let shared = Rc::clone(&self.shared);
        let work = Work { future: Some(future), strand: None, seat, shared, unwanted: None, read: 0 };
        match self.at_hand.upgrade().filter(|_| is_answered) {
            Some(at_hand) => at_hand.borrow_mut().push(Box::pin(work)),
            None => drop(tokio::task::spawn_local(work)),
        }
    }
}

/// All that is to be done for a stream. Dropped, it resets a stream that is not at its end.
struct Work<F> {
    /// hyper's part; `None` once the answer has been handed over.
    future: Option<F>,
    /// The tunnel that was opened.
    strand: Option<Box<Strand>>,
    seat: Rc<Seat>,
    shared: Rc<Shared>,
    /// The rest of the request's body.
    unwanted: Option<Incoming>,
    read: usize,
}

impl<F: Future<Output = ()> + Unpin> Future for Work<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        if let Some(strand) = &mut this.strand {
            return strand.poll(cx);
        }
        let timer = &this.seat.peer.timer;
        if let Some(future) = &mut this.future {
            if Pin::new(future).poll(cx).is_pending() {
                if !this.seat.is_answering.get() || !timer.poll_up(cx) {
                    return Poll::Pending;
                }
                if !this.seat.has_moved() {
                    return Poll::Ready(());
                }
                timer.arm(this.seat.peer.body_limit.get());
                let _ = timer.poll_up(cx);
                return Poll::Pending;
            }
            this.future = None;
            this.strand = this.seat.strand(this.shared.sending.take());
            if let Some(strand) = &mut this.strand {
                this.shared.session.tunnel_opened();
                return strand.poll(cx);
            }
            this.unwanted = this.seat.peer.unwanted.as_ref().and_then(|unwanted| unwanted.take());
            timer.arm(UNWANTED_MAX);
        }
        this.poll_unwanted(cx)
    }
}

impl<F> Work<F> {
    fn poll_unwanted(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(body) = &mut self.unwanted else { return Poll::Ready(()) };
        while self.read < UNWANTED_MAX_BYTES {
            match Pin::new(&mut *body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => self.read += frame.data_ref().map_or(0, Bytes::len),
                Poll::Ready(Some(Err(_)) | None) => return Poll::Ready(()),
                Poll::Pending => break,
            }
        }
        if self.seat.peer.timer.poll_up(cx) { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl<F> Drop for Work<F> {
    fn drop(&mut self) {
        // What belongs to the request first: it gives up its seat.
        self.future = None;
        self.unwanted = None;
        if self.strand.take().is_some() {
            self.shared.session.tunnel_ended();
        }
        self.shared.give_back(Rc::clone(&self.seat));
        self.shared.session.leave();
    }
}

/// An answer that is there, or under way.
pub struct Answering {
    passing: Passing,
    seat: Rc<Seat>,
}

impl Future for Answering {
    type Output = Result<Response<Staged>, Infallible>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        let mut answer = ready!(this.passing.poll_answer(cx));
        let seat = Rc::clone(&this.seat);
        seat.is_answering.set(true);
        seat.peer.timer.arm(seat.peer.body_limit.get());
        if seat.is_head.get() {
            leave_out_body(&mut answer);
        }
        Poll::Ready(Ok(answer.map(|body| Staged { body, seat })))
    }
}

/// Makes an answer one to HEAD: of HTTP/2, hyper would send the body all the same.
fn leave_out_body(answer: &mut Response<Body>) {
    if answer.body().is_end_stream() {
        return;
    }
    if let (Some(length), false) =
        (answer.body().size_hint().exact(), answer.headers().contains_key(header::CONTENT_LENGTH))
    {
        answer.headers_mut().insert(header::CONTENT_LENGTH, length.into());
    }
    answer.body_mut().omit();
}

/// The body of an answer, which may take as long as it likes while it moves.
pub struct Staged {
    body: Body,
    seat: Rc<Seat>,
}

impl HttpBody for Staged {
    type Data = Bytes;
    type Error = <Body as HttpBody>::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = self.get_mut();
        let mut frame = Pin::new(&mut this.body).poll_frame(cx);
        if let Poll::Ready(frame) = &mut frame {
            this.seat.peer.timer.arm(this.seat.peer.body_limit.get());
            if let Some(Ok(frame)) = frame
                && let Some(trailers) = frame.trailers_mut()
            {
                // hyper sees to that for the head only.
                fields::forward_response(trailers);
            }
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
