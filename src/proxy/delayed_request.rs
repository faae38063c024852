//! A request that has been charged in a window to come, and waits for that window.
//!
//! Rules that had room were charged when it came. Where their window is over by the time that it
//! passes, they are charged again, and may refuse it after all.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;

use super::admission::Denial;
use super::request_record::Record;
use super::response_cost::Settlement;
use super::worker_state::{Hall, Peer, View};
use crate::http::error::Fault;
use crate::http::ratelimit_headers::Stamp;
use crate::http::responses;
use crate::redis_store::decision::Unavailable;
use crate::redis_store::scripts::Gift;
use transom_limiter::decision_context::{Asker, Desk};
use transom_limiter::decision_time::Now;
use transom_limiter::rule_set::{Judgement, Line};
use transom_limiter::sharded_counter::Share;
use transom_limiter::waiter_limit::Place;

/// The wall clock may be set while a request waits, so it looks again after so long.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// What the store of shared counters has charged for a request, and what finds it there.
#[derive(Default)]
pub struct Placed {
    pub gifts: Vec<(usize, Gift)>,
    pub texts: Vec<Option<Rc<str>>>,
}

/// The turn of a request. Dropped before it has come, as when the client goes away, it gives back
/// what was charged.
pub struct Turn {
    until_ms: u64,
    /// Position of the slate that was decided by.
    slate: usize,
    askers: Vec<Option<Asker>>,
    /// The layers to be charged again when the turn has come.
    again: Vec<Line>,
    /// What was charged; empty once the turn has come.
    shares: Vec<Share>,
    placed: Placed,
    hall: Rc<Hall>,
    view: Rc<View>,
    /// A place in the queue of those who wait.
    _place: Option<Place>,
    /// The latest time at which the request may pass.
    latest_ms: u64,
    /// Tells the guard of the client's socket that this request waits.
    waits: Rc<Cell<bool>>,
}

impl Turn {
    /// The turn of a request that was delayed; `desk` is what was decided on.
    pub fn of(
        judgement: Judgement,
        hall: &Rc<Hall>,
        view: &Rc<View>,
        peer: &Peer,
        slate: usize,
        desk: &Desk,
        placed: Placed,
    ) -> Option<Box<Turn>> {
        let Judgement::Delayed { until_ms, wait, again } = judgement else { return None };
        let (snapshot, now_ms) = (&view.snapshot, hall.clock.now().unix_ms);
        Some(Box::new(Turn {
            until_ms,
            slate,
            askers: desk.askers.clone(),
            again,
            shares: desk.all_shares().collect(),
            placed,
            hall: Rc::clone(hall),
            view: Rc::clone(view),
            _place: wait.map(|wait| wait.place),
            latest_ms: now_ms + snapshot.book.most_delay_ms(&snapshot.slates[slate].roster),
            waits: Rc::clone(&peer.waits),
        }))
    }

    /// Waits until the windows are open. Returns what is to be said of the limits then, or the refusal of
    /// a rule that has no room any more and does not let the request wait for longer.
    pub async fn come(
        mut self,
        record: &mut Record,
        settlement: &mut Option<Box<Settlement>>,
    ) -> Result<Stamp, Denial> {
        loop {
            self.until_open().await;
            if self.again.is_empty() {
                self.shares.clear();
                self.placed.gifts.clear();
                let clock = || self.hall.clock.now().unix_ms;
                return Ok(self.view.stamp(self.slate, &self.askers, &self.hall.table, Now::by(&clock)));
            }
            self.charge_again(record, settlement).await?;
        }
    }

    async fn until_open(&self) {
        self.waits.set(true);
        loop {
            let now_ms = self.hall.clock.now().unix_ms;
            let left_ms = self.until_ms.saturating_sub(now_ms);
            if left_ms == 0 {
                self.waits.set(false);
                return;
            }
            tokio::time::sleep(Duration::from_millis(left_ms).min(LOOK_AGAIN)).await;
        }
    }

    /// Charges the layers that are in another window now. Whoever finds one full that lets it wait waits
    /// again, but not beyond the time at which it would have been refused when it came.
    async fn charge_again(
        &mut self,
        record: &mut Record,
        settlement: &mut Option<Box<Settlement>>,
    ) -> Result<(), Denial> {
        let snapshot = Arc::clone(&self.view.snapshot);
        let (book, slate) = (&snapshot.book, &snapshot.slates[self.slate]);
        let mut desk = self.view.scratch().desk.clone();
        desk.askers.clone_from(&self.askers);
        let again = std::mem::take(&mut self.again);
        let clock = || self.hall.clock.now().unix_ms;
        let (judgement, gifts) = match self.hall.shared.as_ref().filter(|_| slate.roster.is_shared) {
            None => {
                let now = Now::by(&clock);
                (book.charge_again(&slate.roster, &again, &self.hall.table, now, &mut desk), Vec::new())
            }
            Some(shared) => {
                let inquiry = shared.charge_again(book, &slate.roster, again, desk, self.placed.texts.clone());
                let ruling = inquiry.decide(&slate.roster).await;
                let ruling = ruling.map_err(|Unavailable| Denial::Fault(Fault::Uncounted))?;
                desk = ruling.desk;
                (ruling.judgement, ruling.gifts)
            }
        };
        let now = Now::by(&clock);
        let now_ms = now.unix_ms;
        match judgement {
            Judgement::Admitted => {}
            Judgement::Delayed { until_ms, again, .. } if until_ms <= self.latest_ms => {
                (self.until_ms, self.again) = (until_ms, again);
            }
            Judgement::Delayed { .. } | Judgement::Refused => {
                self.shares.extend(desk.all_shares());
                book.give_back(&self.shares, u32::MAX, &self.hall.table, now_ms);
                self.shares.clear();
                self.placed.gifts.extend(gifts);
                // The answer tells of all layers, as they are now.
                book.look(&slate.roster, &self.hall.table, now, &mut desk);
                record.decision(self.slate, &desk, &Judgement::Refused);
                let mut text = Vec::new();
                let stamp = slate.sheet.render(&desk, None, desk.decided_ms, &mut text);
                let (roster, forms) = (&slate.roster, &snapshot.forms);
                let headers = HeaderMap::new();
                let refused =
                    responses::refusal(book, roster, &desk, forms, desk.decided_ms, stamp, &mut text, headers);
                return Err(Denial::Refused(refused.reply));
            }
        }
        self.shares.retain(|share| share.paid.end_ms() > now_ms);
        self.shares.extend(desk.all_shares());
        if let Some(settlement) = settlement {
            settlement.charged_again(slate, &desk, &gifts, now_ms);
        }
        self.placed.gifts.extend(gifts);
        Ok(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.waits.set(false);
        if !self.shares.is_empty() {
            let (hall, book) = (&self.hall, &self.view.snapshot.book);
            let now_ms = hall.clock.now().unix_ms;
            hall.abandoned.give_up(self.shares.drain(..), self.until_ms, book, &hall.table, now_ms);
        }
        if let Some(shared) = self.hall.shared.as_ref().filter(|_| !self.placed.gifts.is_empty()) {
            shared.give_later(self.placed.gifts.drain(..).map(|(_, gift)| gift).collect());
        }
    }
}
