//! A request fetches the tokens that its counters lack: all in one call, or it waits for one that is under way.
//!
//! What is brought lies in the table afterwards, where whoever comes first takes it. Where the table has no place, the
//! request is handed what it needs, and is told here if the store refuses: the table would not remember it.

use std::rc::Rc;
use std::sync::Arc;

use tokio::time::Instant;

use super::flight::{Flight, Unkept};
use super::inquiry::{Inquiry, Next, ROUNDS_MAX, within};
use super::leases::id;
use crate::rule::book::{Book, Roster};

impl Inquiry {
    /// Fetches tokens for the counters that lack some. `Some`: the decision goes on with that; nothing is charged of what lies
    /// behind `first`.
    pub(super) async fn fetch(&mut self, book: &Arc<Book>, roster: &Roster, first: usize) -> Option<Next> {
        let lacking = std::mem::take(&mut self.desk.lacking);
        self.progress.rounds += 1;
        let mut rules: Vec<usize> = lacking.iter().map(|i| self.desk.lines[*i].rule).collect();
        rules.dedup();
        if self.go_beyond(&rules) {
            self.desk.rewind(first);
            return None;
        }
        // The store answers: others have taken what there was.
        if self.progress.rounds > ROUNDS_MAX {
            return self.refuse(book, roster, first);
        }
        if self.is_late() {
            rules.iter().for_each(|rule| self.progress.beyond[*rule] = true);
            self.desk.rewind(first);
            return None;
        }
        let (flight, is_own) = self.set_out(book, roster, &lacking);
        let began = Instant::from_std(self.shared.clock.instant());
        match within(self.deadline, flight.landing()).await {
            Some(true) => {
                self.take_in_hand(book, roster, &lacking, &flight);
                if is_own && self.is_refused(book, roster, &lacking, &flight) {
                    return self.refuse(book, roster, first);
                }
            }
            Some(false) => rules.iter().for_each(|rule| self.progress.beyond[*rule] = true),
            None => self.lose_patience(&rules, began),
        }
        self.desk.rewind(first);
        None
    }

    /// The call that fetches what is lacking, and whether it is this request's own: if one is under way already, that is
    /// waited for.
    fn set_out(&self, book: &Book, roster: &Roster, lacking: &[usize]) -> (Rc<Flight>, bool) {
        let shared = &self.shared;
        let now = shared.clock.instant();
        let (mut errands, mut under_way) = (Vec::new(), None);
        for i in lacking {
            let (charge, line) = (&self.desk.charges[*i], self.desk.lines[*i]);
            let (Some(asker), Some(text)) = (self.desk.askers[line.rule], self.text(line.rule)) else { continue };
            let cost = u64::from(charge.ask.cost);
            let need = cost.saturating_sub(charge.ask.ceiling.saturating_sub(charge.usage.used));
            let counter = book.layer_of(roster, line).counter(asker);
            let slice = shared.leases.with(counter, shared.own_shard, now, |record| {
                record.text = Some(Rc::clone(&text));
                match &record.flight {
                    Some(flight) => {
                        record.waiting += need;
                        under_way = Some(Rc::clone(flight));
                        need
                    }
                    None => record.slice(need, now),
                }
            });
            errands.push(shared.errand(book, roster, line, asker, text, need, slice.unwrap_or(need)));
        }
        match under_way {
            Some(flight) => (flight, false),
            None => (shared.launch(errands), true),
        }
    }

    /// Takes tokens that found no place in the table, as many as this request needs.
    fn take_in_hand(&mut self, book: &Book, roster: &Roster, lacking: &[usize], flight: &Flight) {
        let mut unkept = flight.unkept.borrow_mut();
        for i in lacking {
            let line = self.desk.lines[*i];
            let Some(asker) = self.desk.askers[line.rule] else { continue };
            let (id, cost) = (id(book.layer_of(roster, line).counter(asker)), u64::from(asker.cost));
            let found = unkept.iter_mut().find(|unkept| unkept.id == id && unkept.tokens >= cost);
            if let Some(Unkept { tokens, origin, .. }) = found
                && !self.desk.in_hand.contains(&line)
            {
                *tokens -= cost;
                self.desk.in_hand.push(line);
                self.progress.gifts.push((line.rule, origin.gift(cost)));
            }
        }
    }

    /// Whether the store has refused what was lacking, and the table has no place to remember it. Then the desk says so.
    fn is_refused(&mut self, book: &Book, roster: &Roster, lacking: &[usize], flight: &Flight) -> bool {
        let (refused, now_ms) = (flight.refused.borrow(), self.shared.clock.now().unix_ms);
        let mut is_refused = false;
        for i in lacking {
            let line = self.desk.lines[*i];
            let Some(asker) = self.desk.askers[line.rule] else { continue };
            let counter = book.layer_of(roster, line).counter(asker);
            let took = refused.iter().find(|(id_, _)| *id_ == id(counter)).map(|(_, took)| took);
            let charge = &mut self.desk.charges[*i];
            charge.full = took.is_some();
            if let Some(took) = took.filter(|_| self.shared.table.tally(counter, now_ms).is_none()) {
                (charge.usage.used, charge.usage.end_ms) = (took.used, took.end_ms);
                is_refused = true;
            }
        }
        is_refused
    }
}
