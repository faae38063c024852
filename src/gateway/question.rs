//! A request whose rules have to ask the store of shared counters before they decide.

use std::rc::Rc;

use http::HeaderMap;

use super::hall::{Hall, Peer, View};
use super::record::Record;
use super::settlement::Settlement;
use super::turn::{Placed, Turn};
use crate::http::fault::Fault;
use crate::http::quota::Stamp;
use crate::http::reply::{self, Reply};
use crate::rule::book::Judgement;
use crate::shared::inquiry::{Inquiry, Ruling, Unavailable};

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

impl Question {
    pub fn new(inquiry: Box<Inquiry>, slate: usize) -> Box<Question> {
        Box::new(Question { inquiry, slate })
    }

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
        let ruling = self.inquiry.decide(&snapshot.book, &slate.roster).await;
        let ruling = ruling.map_err(|Unavailable| Denial::Fault(Fault::Uncounted))?;
        let now_ms = hall.clock.now().unix_ms;
        record.decision(self.slate, &ruling.desk, &ruling.judgement);
        let policy = view.policies[self.slate].as_ref();
        let mut text = Vec::new();
        let stamp = slate.sheet.render(&ruling.desk, policy, now_ms, &mut text);
        if let Judgement::Refused = ruling.judgement {
            let (book, forms) = (&snapshot.book, &snapshot.forms);
            let (roster, headers) = (&slate.roster, HeaderMap::new());
            let refused = reply::refusal(book, roster, &ruling.desk, forms, now_ms, stamp, &mut text, headers);
            return Err(Denial::Refused(refused.reply));
        }
        let Ruling { judgement, desk, gifts, texts } = ruling;
        let settlement = Settlement::of(slate, self.slate, &desk, &gifts, || texts.clone());
        let turn = Turn::of(judgement, hall, view, peer, self.slate, &desk, Placed { gifts, texts });
        Ok(Permit { stamp: stamp.only_once(), turn, settlement })
    }
}
