//! Whether anybody is at the other end of a silent HTTP/2 connection: a PING asks, and must be answered in time.

use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use h2::{Ping, PingPong};

use crate::downstream::http2::monitor::Monitor;
use crate::timer::Timer;

/// How long the answer to a PING may take.
const PONG: Duration = Duration::from_secs(20);

pub struct Pulse {
    pings: PingPong,
    session: Rc<Monitor>,
    /// How long a client may say nothing before it is asked.
    silence: Duration,
    timer: Rc<Timer>,
    /// An answer is due.
    has_asked: bool,
}

impl Pulse {
    pub fn new(pings: PingPong, session: &Rc<Monitor>, silence: Duration, timer: Rc<Timer>) -> Pulse {
        timer.arm(silence);
        Pulse { pings, session: Rc::clone(session), silence, timer, has_asked: false }
    }

    /// Ready once a PING was not answered in time.
    pub fn poll_lost(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.has_asked && self.pings.poll_pong(cx).is_ready() {
                self.has_asked = false;
                self.timer.arm(self.silence);
            }
            if !self.timer.poll_up(cx) {
                return Poll::Pending;
            }
            if self.has_asked {
                // Not asked again.
                self.timer.disarm();
                return Poll::Ready(());
            }
            let left = self.silence.saturating_sub(self.session.silence());
            if left.is_zero() && self.pings.send_ping(Ping::opaque()).is_ok() {
                self.has_asked = true;
                self.timer.arm(PONG);
            } else {
                self.timer.arm(left);
            }
        }
    }
}
