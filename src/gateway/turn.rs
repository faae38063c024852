//! A request that has been charged in a window to come, and waits for that window.
//!
//! Rules that had room were charged when it came. Where their window is over by the time that it
//! passes, they are charged again, and may refuse it after all.

use std::rc::Rc;
use std::time::Duration;

use http::HeaderMap;

use super::hall::{Hall, Scratch, View};
use super::record::Record;
use super::snapshot::Slate;
use crate::count::queue::Place;
use crate::count::shard::Share;
use crate::http::quota::Stamp;
use crate::http::reply::{self, Reply};
use crate::rule::book::{Judgement, Line};
use crate::rule::desk::Asker;

/// The wall clock may be set while a request waits, so it looks again after so long.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The turn of a request. Dropped before it has come, as when the client goes away, it gives back
/// what was charged.
pub struct Turn {
    pub until_ms: u64,
    /// Position of the slate that was decided by.
    pub slate: usize,
    pub askers: Vec<Option<Asker>>,
    /// The layers to be charged again when the turn has come.
    pub again: Vec<Line>,
    /// What was charged; empty once the turn has come.
    pub shares: Vec<Share>,
    pub hall: Rc<Hall>,
    pub view: Rc<View>,
    /// A place in the queue of those who wait.
    pub place: Option<Place>,
}

impl Turn {
    /// Waits until the window is open. Returns what is to be said of the limits then, or the refusal of
    /// a rule that has no room any more.
    pub async fn come(mut self, record: &mut Record) -> Result<Stamp, Reply> {
        let mut now_ms;
        loop {
            now_ms = self.hall.clock.now().unix_ms;
            let left_ms = self.until_ms.saturating_sub(now_ms);
            if left_ms == 0 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(left_ms).min(LOOK_AGAIN)).await;
        }
        if !self.again.is_empty()
            && let Some(refusal) = self.charge_again(now_ms, record)
        {
            return Err(refusal);
        }
        self.shares.clear();
        Ok(self.view.stamp(self.slate, &self.askers, &self.hall.table, now_ms))
    }

    fn charge_again(&self, now_ms: u64, record: &mut Record) -> Option<Reply> {
        let snapshot = &*self.view.snapshot;
        let Slate { roster, sheet, .. } = &snapshot.slates[self.slate];
        let mut scratch = self.view.scratch();
        let Scratch { desk, text, .. } = &mut *scratch;
        desk.askers.clone_from(&self.askers);
        if snapshot.book.charge_again(roster, &self.again, &self.hall.table, now_ms, desk) {
            return None;
        }
        record.decision(self.slate, desk, &Judgement::Refused);
        let stamp = sheet.render(desk, None, now_ms, text);
        let headers = HeaderMap::new();
        Some(reply::refusal(&snapshot.book, roster, desk, &snapshot.forms, now_ms, stamp, text, headers))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if !self.shares.is_empty() {
            let now_ms = self.hall.clock.now().unix_ms;
            self.view.snapshot.book.give_back(&self.shares, u32::MAX, &self.hall.table, now_ms);
        }
    }
}
