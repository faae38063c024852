//! How much of a request's body may come, and how little of it in a while.
//!
//! The rate is looked at only while the upstream would take more and the client has not sent it: whoever
//! sends to an upstream that is slow is not slow itself. A while begins with the first wait for the client.
//! Nothing is armed, and no time is looked at, for a body that is always there when it is asked for.

use std::fmt;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::http::error::RequestError;
use crate::timer::{Timer, Timers};

/// The bounds of one body.
#[derive(Debug)]
pub struct Bounds {
    /// Bytes of the whole; `None`: any number.
    most: Option<u64>,
    pace: Option<UploadRate>,
    came: u64,
}

/// How fast a body has to come.
#[derive(Debug)]
pub struct UploadRate {
    timers: Rc<Timers>,
    /// Bytes in a while.
    least: u64,
    a_while: Duration,
    /// Armed at the first wait.
    timer: Option<Rc<Timer>>,
    /// What had come when this while began.
    before: u64,
}

/// How a body broke its bounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Breach {
    TooLarge(u64),
    TooSlow,
}

impl Bounds {
    pub fn new(most: Option<u64>, pace: Option<UploadRate>) -> Bounds {
        Bounds { most, pace, came: 0 }
    }

    /// Looks at what came, `Pending` if nothing did, which is when the task is woken if that lasts.
    pub fn look(&mut self, came: Poll<usize>, cx: &Context<'_>) -> Option<Breach> {
        match (came, &mut self.pace) {
            (Poll::Ready(bytes), _) => {
                self.came += bytes as u64;
                self.most.filter(|most| self.came > *most).map(Breach::TooLarge)
            }
            (Poll::Pending, Some(pace)) => pace.is_slow(self.came, cx).then_some(Breach::TooSlow),
            (Poll::Pending, None) => None,
        }
    }
}

impl UploadRate {
    /// At least `rate` bytes a second, over `a_while`.
    pub fn new(timers: &Rc<Timers>, rate: u64, a_while: Duration) -> Option<UploadRate> {
        let least = u128::from(rate) * a_while.as_millis() / 1000;
        let least = u64::try_from(least).unwrap_or(u64::MAX);
        (least > 0).then(|| UploadRate { timers: Rc::clone(timers), least, a_while, timer: None, before: 0 })
    }

    fn is_slow(&mut self, came: u64, cx: &Context<'_>) -> bool {
        if let Some(timer) = &self.timer {
            if !timer.poll_expired(cx) {
                return false;
            }
            if came - self.before < self.least {
                return true;
            }
        }
        let timer = self.timer.get_or_insert_with(|| self.timers.new_timer());
        timer.arm(self.a_while);
        self.before = came;
        timer.poll_expired(cx)
    }
}

impl From<Breach> for RequestError {
    fn from(breach: Breach) -> RequestError {
        match breach {
            Breach::TooLarge(most) => RequestError::BodyTooLarge(most),
            Breach::TooSlow => RequestError::BodyTooSlow,
        }
    }
}

/// For whoever sends the body on.
impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        RequestError::from(*self).fmt(f)
    }
}

impl std::error::Error for Breach {}
