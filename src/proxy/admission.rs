//! A request whose rules have to ask the store of shared counters before they decide.

use std::rc::Rc;

use http::HeaderMap;

use super::compiled_config::{Slate, Snapshot};
use super::delayed_request::{Placed, Turn};
use super::request_record::Record;
use super::response_cost::Settlement;
use super::worker_state::{Hall, Peer, View};
use crate::http::error::Fault;
use crate::http::rate_limit_key::Caller;
use crate::http::ratelimit_headers::Stamp;
use crate::http::responses::Reply;
use crate::redis_store::decision::{Begun, Inquiry, Ruling, Unavailable};
use transom_limiter::decision_context::Desk;
use transom_limiter::decision_time::Now;
use transom_limiter::rule_set::Judgement;

/// What is asked, and by whose rules.
pub struct Question {
    inquiry: Box<Inquiry>,
    /// Position of the slate.
    slate: usize,
}

/// What lets a request pass.
#[derive(Default)]
pub struct Permit {
    pub stamp: Stamp,
    pub turn: Option<Box<Turn>>,
    pub settlement: Option<Box<Settlement>>,
}

/// Why a request does not pass.
pub enum Denial {
    Refused(Reply),
    Fault(Fault),
}

impl Permit {
    /// That of a request that was let through without a question; the desk is what was decided on.
    #[allow(clippy::too_many_arguments, reason = "all of them are what the request takes along")]
    pub fn of(
        judgement: Judgement,
        stamp: Stamp,
        hall: &Rc<Hall>,
        view: &Rc<View>,
        peer: &Peer,
        slate: usize,
        desk: &Desk,
        texts: impl FnOnce() -> Vec<Option<Rc<str>>>,
    ) -> Permit {
        Permit {
            stamp: stamp.only_once(),
            turn: Turn::of(judgement, hall, view, peer, slate, desk, Placed::default()),
            settlement: Settlement::of(&view.snapshot.slates[slate], slate, desk, &[], texts),
        }
    }
}

/// What the rules say, if they can say it now.
pub enum Judged {
    Now(Judgement),
    Later(Box<Question>),
}

/// Lets the rules of a slate decide a request whose askers lie on the desk.
#[inline(always)]
pub fn judge(
    hall: &Hall,
    snapshot: &Snapshot,
    slate: usize,
    caller: &Caller<'_>,
    desk: &mut Desk,
    now_ms: u64,
) -> Result<Judged, Fault> {
    let Slate { roster, .. } = &snapshot.slates[slate];
    let Some(shared) = hall.shared.as_ref().filter(|_| roster.is_shared) else {
        let clock = || hall.clock.now().unix_ms;
        let now = Now::since(now_ms, &clock);
        return Ok(Judged::Now(snapshot.book.judge(roster, &hall.table, now, desk)));
    };
    let text = |position| snapshot.text_of(&snapshot.slates[slate], position, caller);
    match shared.begin(&snapshot.book, roster, desk, text) {
        Begun::Decided(judgement) => Ok(Judged::Now(judgement)),
        Begun::Waits(inquiry) => Ok(Judged::Later(Box::new(Question { inquiry, slate }))),
        Begun::Unavailable => Err(Fault::Uncounted),
    }
}

impl Question {
    /// Waits for the store, and decides.
    pub async fn answer(
        self: Box<Self>,
        hall: &Rc<Hall>,
        view: &Rc<View>,
        peer: &Peer,
        record: &mut Record,
    ) -> Result<Permit, Denial> {
        let snapshot = &*view.snapshot;
        let slate = &snapshot.slates[self.slate];
        let ruling = self.inquiry.decide(&slate.roster).await;
        let ruling = ruling.map_err(|Unavailable| Denial::Fault(Fault::Uncounted))?;
        let now_ms = hall.clock.now().unix_ms;
        record.decision(self.slate, &ruling.desk, &ruling.judgement);
        let mut text = Vec::new();
        if let Judgement::Refused = ruling.judgement {
            let refused = view.refusal(self.slate, &ruling.desk, now_ms, hall.date(), &mut text, HeaderMap::new());
            return Err(Denial::Refused(refused.reply));
        }
        let stamp = slate.sheet.render(&ruling.desk, view.policies[self.slate].as_ref(), now_ms, &mut text);
        let Ruling { judgement, desk, gifts, texts } = ruling;
        let settlement = Settlement::of(slate, self.slate, &desk, &gifts, || texts.clone());
        let turn = Turn::of(judgement, hall, view, peer, self.slate, &desk, Placed { gifts, texts });
        Ok(Permit { stamp: stamp.only_once(), turn, settlement })
    }
}
