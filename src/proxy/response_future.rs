//! A request on its way to its answer. One that panics gets an answer as well, and the process goes on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};

use http::Response;

use super::response_body::{Body, Content};
use crate::http::error::RequestError;
use crate::http::responses;

/// What needs no upstream is answered at once, without a future.
pub enum ResponseFuture {
    /// `None` once it was taken, and where there is none because of a panic.
    Done(Option<Response<Body>>),
    /// What follows is an answer, or what else there is to wait for.
    Forward(Pin<Box<dyn Future<Output = ResponseFuture>>>),
}

impl ResponseFuture {
    /// Lets a request begin.
    pub fn begin(pass: impl FnOnce() -> ResponseFuture) -> ResponseFuture {
        let passing = catch_unwind(AssertUnwindSafe(pass));
        passing.unwrap_or_else(|_panic| ResponseFuture::Done(Some(after_panic())))
    }

    /// The answer, if there is nothing to wait for.
    pub fn at_once(&mut self) -> Option<Response<Body>> {
        match self {
            ResponseFuture::Done(answer) => Some(answer.take().unwrap_or_else(after_panic)),
            ResponseFuture::Forward(_) => None,
        }
    }

    pub fn poll_answer(&mut self, cx: &mut Context<'_>) -> Poll<Response<Body>> {
        loop {
            *self = match self {
                ResponseFuture::Done(answer) => return Poll::Ready(answer.take().unwrap_or_else(after_panic)),
                ResponseFuture::Forward(next) => match catch_unwind(AssertUnwindSafe(|| next.as_mut().poll(cx))) {
                    Ok(Poll::Ready(next)) => next,
                    Ok(Poll::Pending) => return Poll::Pending,
                    Err(_panic) => ResponseFuture::Done(None),
                },
            };
        }
    }
}

/// The panic itself has been reported by the panic hook.
fn after_panic() -> Response<Body> {
    responses::fault(&RequestError::Panic).map(|body| Body::unrecorded(Content::from(body)))
}
