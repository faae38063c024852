//! A request that has been charged in a window to come, and waits for that window.

use std::rc::Rc;
use std::time::Duration;

use super::hall::{Hall, View};
use crate::count::queue::Place;
use crate::count::shard::Share;
use crate::http::quota::Stamp;
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
    /// What was charged; empty once the turn has come.
    pub shares: Vec<Share>,
    pub hall: Rc<Hall>,
    pub view: Rc<View>,
    /// A place in the queue of those who wait.
    pub place: Option<Place>,
}

impl Turn {
    /// Waits until the window is open. Returns what is to be said of the limits then.
    pub async fn come(mut self) -> Stamp {
        let mut now_ms;
        loop {
            now_ms = self.hall.clock.now().unix_ms;
            let left_ms = self.until_ms.saturating_sub(now_ms);
            if left_ms == 0 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(left_ms).min(LOOK_AGAIN)).await;
        }
        self.shares.clear();
        self.view.stamp(self.slate, &self.askers, &self.hall.table, now_ms)
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
