//! A request on its way to its answer. One that panics gets an answer as well, and the process goes on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};

use http::Response;

use super::response_body::{Content, ResponseBody};
use crate::http::error::RequestError;
use crate::http::responses;

/// What needs no upstream is answered at once, without a future.
pub enum ResponseFuture {
    /// `None` once it was taken, and where there is none because of a panic.
    Done(Option<Response<ResponseBody>>),
    /// What follows is an answer, or what else there is to wait for.
    Forward(Pin<Box<dyn Future<Output = ResponseFuture>>>),
}

impl ResponseFuture {
    /// Lets a request begin.
    pub fn start(pass: impl FnOnce() -> ResponseFuture) -> ResponseFuture {
        let passing = catch_unwind(AssertUnwindSafe(pass));
        passing.unwrap_or_else(|_panic| ResponseFuture::Done(Some(panic_response())))
    }

    /// The answer, if there is nothing to wait for.
    pub fn take_ready(&mut self) -> Option<Response<ResponseBody>> {
        match self {
            ResponseFuture::Done(answer) => Some(answer.take().unwrap_or_else(panic_response)),
            ResponseFuture::Forward(_) => None,
        }
    }

    pub fn poll_response(&mut self, cx: &mut Context<'_>) -> Poll<Response<ResponseBody>> {
        loop {
            *self = match self {
                ResponseFuture::Done(answer) => return Poll::Ready(answer.take().unwrap_or_else(panic_response)),
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
fn panic_response() -> Response<ResponseBody> {
    responses::fault(&RequestError::Panic).map(|body| ResponseBody::unrecorded(Content::from(body)))
}
