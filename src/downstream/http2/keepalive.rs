//! Whether anybody is at the other end of a silent HTTP/2 connection: a PING asks, and must be answered in time.

use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use h2::{Ping, PingPong};

use crate::downstream::http2::monitor::Monitor;
use crate::timer::Timer;

/// How long the answer to a PING may take.
const PONG_TIMEOUT: Duration = Duration::from_secs(20);

pub struct Keepalive {
    pings: PingPong,
    monitor: Rc<Monitor>,
    /// How long a client may say nothing before it is asked.
    interval: Duration,
    timer: Rc<Timer>,
    /// An answer is due.
    is_awaiting_pong: bool,
}

impl Keepalive {
    pub fn new(pings: PingPong, session: &Rc<Monitor>, silence: Duration, timer: Rc<Timer>) -> Keepalive {
        timer.arm(silence);
        Keepalive { pings, monitor: Rc::clone(session), interval: silence, timer, is_awaiting_pong: false }
    }

    /// Ready once a PING was not answered in time.
    pub fn poll_peer_lost(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.is_awaiting_pong && self.pings.poll_pong(cx).is_ready() {
                self.is_awaiting_pong = false;
                self.timer.arm(self.interval);
            }
            if !self.timer.poll_expired(cx) {
                return Poll::Pending;
            }
            if self.is_awaiting_pong {
                // Not asked again.
                self.timer.disarm();
                return Poll::Ready(());
            }
            let left = self.interval.saturating_sub(self.monitor.silence());
            if left.is_zero() && self.pings.send_ping(Ping::opaque()).is_ok() {
                self.is_awaiting_pong = true;
                self.timer.arm(PONG_TIMEOUT);
            } else {
                self.timer.arm(left);
            }
        }
    }
}
