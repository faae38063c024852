//! A request that was refused, and is asked again as it was.
//!
//! A client over its limits hardly ever changes what it asks. Who asks, on which route and by which rules, follows from the
//! head of a request, from its connection and from the configuration. Where all three are what they were, it is enough to
//! look whether the windows are still full. This file does not compare heads: `listen` does, and has none of those parsed
//! that are refused here.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Method, Version, header};

use super::request_record;
use super::worker_state::{Hall, Peer, Scratch, View};
use crate::http::headers::Marks;
use transom_limiter::decision_context::{Asker, Desk};
use transom_limiter::decision_time::Now;

/// Of such a request, all that its decision needs.
pub struct Again {
    view: Rc<View>,
    lane: usize,
    askers: Box<[Option<Asker>]>,
}

impl Again {
    /// That of a request which was just refused on `desk`; `None` where it is not the same as the one before, where more
    /// than its head, its connection and the configuration decides, or where its answer changes what becomes of the connection.
    pub fn of(
        view: &Rc<View>,
        peer: &Peer,
        lane: usize,
        desk: &Desk,
        parts: &Parts,
        marks: Marks,
        body_bytes: u64,
    ) -> Option<Again> {
        let slate = view.snapshot.slate_of(&view.snapshot.lanes[lane]);
        let is_kept = || {
            let mut options = parts.headers.get_all(header::CONNECTION).iter();
            options.all(|options| options.as_bytes().eq_ignore_ascii_case(b"keep-alive"))
        };
        let is_usual = peer.repeats.get()
            && slate.is_repeatable
            // Of every request a line is to be written, with what its head says.
            && view.access.is_none()
            && parts.version == Version::HTTP_11
            && parts.method != Method::HEAD
            && body_bytes == 0
            && ![Marks::TRANSFER_ENCODING, Marks::EXPECT, Marks::UPGRADE].into_iter().any(|mark| marks.has(mark))
            && is_kept();
        is_usual.then(|| Again { view: Rc::clone(view), lane, askers: desk.askers.as_slice().into() })
    }

    /// Refuses the request, if it is to be refused now: its answer, as it is sent over HTTP/1.1. `None`: nothing was charged or counted,
    /// and the request can be taken as any other.
    pub fn refuse(&self, hall: &Hall) -> Option<Bytes> {
        let refused = catch_unwind(AssertUnwindSafe(|| self.refused(hall)));
        // Whatever it was, it is met with once more on the way of any other request, and answered there.
        refused.unwrap_or(None)
    }

    fn refused(&self, hall: &Hall) -> Option<Bytes> {
        let view = &*self.view;
        if !hall.has_view(&self.view) {
            return None;
        }
        let snapshot = &*view.snapshot;
        let position = snapshot.lanes[self.lane].slate as usize;
        let slate = &snapshot.slates[position];
        let now = hall.clock.now();
        let mut scratch = view.scratch();
        let Scratch { desk, text, last, .. } = &mut *scratch;
        desk.askers.clear();
        desk.askers.extend_from_slice(&self.askers);
        let clock = || hall.clock.now().unix_ms;
        if snapshot.book.look(&slate.roster, &hall.table, Now::since(now.unix_ms, &clock), desk) {
            return None;
        }
        let took = hall.clock.instant().duration_since(now.instant);
        hall.meter.decided(took);
        request_record::refused(view, Some(self.lane), position, desk);
        let work_out = || view.refusal(position, desk, desk.decided_ms, hall.date(), text, HeaderMap::new());
        let (status, answer) = last.written(position, desk.decided_ms, desk, work_out);
        view.meters[self.lane].answered(status.as_u16(), took);
        Some(answer)
    }
}
