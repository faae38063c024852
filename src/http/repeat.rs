//! What was said to whoever was refused last.
//!
//! A client that is over its limits and does not slow down asks many times in a millisecond, and is told the same each
//! time, to the letter. So what a refusal says is not worked out again as long as all that it depends on is as it was. This
//! file does not know what that is made of: `reply` does.

use super::reply::{Refused, Reply};
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
    /// `None` before the first, and where chance has a part in it.
    reply: Option<Reply>,
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
    /// What is answered: as the last time, or else what `work_out` finds. `slate` is the position of the rules that decided
    /// on `desk`.
    pub fn refusal(&mut self, slate: usize, now_ms: u64, desk: &Desk, work_out: impl FnOnce() -> Refused) -> Reply {
        let facts = || desk.charges.iter().zip(&desk.lines).map(Fact::of);
        if let Some(reply) = &self.reply
            && (self.slate, self.now_ms) == (slate, now_ms)
            && self.facts.iter().copied().eq(facts())
        {
            return reply.clone();
        }
        let Refused { mut reply, is_random } = work_out();
        // Whoever sends a copy adds a field or two, such as the date.
        reply.headers_mut().reserve(4);
        (self.slate, self.now_ms) = (slate, now_ms);
        self.facts.clear();
        self.facts.extend(facts());
        self.reply = (!is_random).then(|| reply.clone());
        reply
    }
}
