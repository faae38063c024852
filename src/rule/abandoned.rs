//! Places of those who went away while others had places behind them. They can be given back once
//! these have gone as well.

use std::cell::RefCell;
use std::sync::Arc;

use super::book::Book;
use crate::count::shard::Share;
use crate::count::table::Table;

/// The abandoned places of one event loop, in the order in which they were abandoned.
#[derive(Default)]
pub struct Abandoned(RefCell<Vec<Forsaken>>);

struct Forsaken {
    share: Share,
    /// When its turn would have come.
    until_ms: u64,
    /// The book by which it was charged.
    book: Arc<Book>,
}

impl Abandoned {
    pub fn add(&self, shares: impl IntoIterator<Item = Share>, until_ms: u64, book: &Arc<Book>) {
        let forsaken = shares.into_iter().map(|share| Forsaken { share, until_ms, book: Arc::clone(book) });
        self.0.borrow_mut().extend(forsaken);
    }

    /// Tries to give them all back, the latest first, for that is the one behind which nobody is left.
    /// Those whose time has come are forgotten.
    pub fn give_up<const W: usize>(&self, table: &Table<W>, now_ms: u64) {
        let mut places = self.0.borrow_mut();
        for i in (0..places.len()).rev() {
            let Forsaken { share, until_ms, book } = &places[i];
            if *until_ms <= now_ms || book.give_up(*share, table, now_ms) {
                places.remove(i);
            }
        }
    }
}
