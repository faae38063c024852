//! What was said to whoever was refused last.
//!
//! A client that is over its limits and does not slow down asks many times in a millisecond, and is told the same each
//! time, to the letter. So what a refusal says is not worked out again as long as all that it depends on is as it was. This
//! file does not know what that is made of: `reply` does.

use super::reply::Wording;
use crate::count::charge::Charge;
use crate::count::word::{Ask, Use};
use crate::rule::book::Line;
use crate::rule::desk::Desk;

/// The last refusal by the rules of one book.
#[derive(Debug, Default)]
pub struct Last {
    slate: usize,
    now_ms: u64,
    facts: Vec<Fact>,
    /// `None` before the first.
    wording: Option<Wording>,
}

/// What was found of one layer. Nothing here tells one client from another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Fact {
    line: Line,
    ask: Ask,
    usage: Use,
    full: bool,
}

impl Fact {
    fn of((charge, line): (&Charge, &Line)) -> Fact {
        Fact { line: *line, ask: charge.ask, usage: charge.usage, full: charge.full }
    }
}

impl Last {
    /// What a refusal says: what the last one did, or else what `work_out` finds. `slate` is the position of the rules
    /// that decided on `desk`.
    pub fn wording(&mut self, slate: usize, now_ms: u64, desk: &Desk, work_out: impl FnOnce() -> Wording) -> &Wording {
        let facts = || desk.charges.iter().zip(&desk.lines).map(Fact::of);
        let is_same = (self.slate, self.now_ms) == (slate, now_ms) && self.facts.iter().copied().eq(facts());
        if !is_same || self.wording.as_ref().is_some_and(|wording| wording.is_random) {
            (self.slate, self.now_ms) = (slate, now_ms);
            self.facts.clear();
            self.facts.extend(facts());
            self.wording = None;
        }
        self.wording.get_or_insert_with(work_out)
    }
}
