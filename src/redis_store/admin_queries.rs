//! Decisions for those who ask without a request. They are few, and want to know what all gateways together have counted: so
//! the store is asked each time, and nothing is fetched for later.

use std::mem::take;
use std::rc::Rc;
use std::sync::Arc;

use tokio::time::Instant;

use super::Shared;
use super::decision::{Inquiry, Progress, Ruling, Unavailable};
use super::exact_mode::Sent;
use super::scripts::{Answer, Gift, TOKENS_MAX, Want};
use transom_limiter::decision_context::{Asker, Desk};
use transom_limiter::decision_time::Now;
use transom_limiter::rule_set::{Book, Judgement, Line, Roster};
use transom_limiter::shared_counting::Stand;

/// A question about one key under one rule, which is the only one of its roster.
pub struct Subject<'a> {
    pub book: &'a Arc<Book>,
    pub roster: &'a Roster,
    pub asker: Asker,
    /// Whether tokens may be taken from windows to come.
    pub reserve: bool,
    /// What the key is in the store.
    pub text: Rc<str>,
}

/// What is used.
pub struct Standing {
    pub desk: Desk,
    /// Whether what the question costs would be admitted.
    pub room: bool,
}

impl Shared {
    fn inquire(self: &Rc<Self>, subject: &Subject<'_>) -> Box<Inquiry> {
        let mut desk = Desk::of_loop(self.own_shard);
        desk.reserve = subject.reserve;
        desk.askers.push(Some(subject.asker));
        let mut progress = Progress::new(1);
        progress.asks = true;
        let deadline = Instant::from_std(self.clock.instant()) + self.timeout;
        let texts = vec![Some(Rc::clone(&subject.text))];
        let (shared, book) = (Rc::clone(self), Arc::clone(subject.book));
        Box::new(Inquiry { shared, book, desk, texts, progress, next: None, deadline })
    }

    /// Decides and consumes.
    pub async fn limit(self: &Rc<Self>, subject: &Subject<'_>) -> Result<Ruling, Unavailable> {
        self.inquire(subject).decide(subject.roster).await
    }

    /// Decides whether there is room, also in windows to come, and when; nothing is consumed by it.
    pub async fn check(self: &Rc<Self>, subject: &Subject<'_>) -> Result<(Judgement, Standing), Unavailable> {
        let Ruling { judgement, desk, gifts, .. } = self.limit(subject).await?;
        if let Judgement::Refused = judgement {
            return Ok((judgement, Standing { desk, room: false }));
        }
        let shares: Vec<_> = desk.all_shares().collect();
        subject.book.give_back(&shares, u32::MAX, &self.table, self.clock.now().unix_ms);
        self.give(gifts.into_iter().map(|(_, gift)| gift).collect()).await;
        let standing = self.value(subject).await?;
        Ok((judgement, standing))
    }

    /// Reads only.
    pub async fn value(self: &Rc<Self>, subject: &Subject<'_>) -> Result<Standing, Unavailable> {
        let (mut inquiry, _) = self.read(subject).await;
        if inquiry.progress.beyond.contains(&true) {
            let Subject { book, roster, .. } = subject;
            let desk = &mut inquiry.desk;
            let clock = || self.clock.now().unix_ms;
            book.look(roster, &self.table, Now::by(&clock), desk);
            // What is known of the others, and beside it what was counted here.
            let lines = desk.lines.clone();
            book.stands(roster, |_beyond| true, &mut desk.stands);
            if desk.stands.contains(&Stand::Aside) {
                return Err(Unavailable);
            }
            let room = book.look_alone(roster, &lines, &self.table, Now::by(&clock), desk);
            return Ok(Standing { desk: take(&mut inquiry.desk), room });
        }
        let room = inquiry.desk.charges.iter().all(|charge| charge.usage.admits(charge.ask));
        Ok(Standing { desk: take(&mut inquiry.desk), room })
    }

    /// Forgets what was counted: in the store, and here. What other gateways have fetched before is theirs to spend.
    pub async fn reset(self: &Rc<Self>, subject: &Subject<'_>) -> Result<Standing, Unavailable> {
        let Subject { book, roster, asker, .. } = subject;
        let (inquiry, found) = self.read(subject).await;
        // What is forgotten here alone comes back with the store.
        if inquiry.progress.beyond.contains(&true) {
            return Err(Unavailable);
        }
        let mut gifts = found;
        gifts.iter_mut().for_each(|gift| gift.forgets = true);
        self.give(gifts).await;
        let now_ms = self.clock.now().unix_ms;
        book.forget(&self.table, now_ms, &inquiry.desk);
        for line in &inquiry.desk.lines {
            let counter = book.layer_of(roster, *line).counter(*asker);
            if let Some((end_ms, _)) = self.table.tally(counter, now_ms) {
                self.table.withdraw(counter, end_ms, u32::MAX);
                self.table.note(counter, end_ms, 0, now_ms);
            }
        }
        self.value(subject).await
    }

    /// Adds what is used of all shards but the first to what is known of split counters, and leaves out what is fetched here and not
    /// spent.
    async fn add_shards(self: &Rc<Self>, subject: &Subject<'_>, inquiry: &mut Inquiry, gifts: &mut Vec<Gift>) {
        let Subject { book, roster, asker, text, .. } = subject;
        let now_ms = self.clock.now().unix_ms;
        for (charge, line) in inquiry.desk.charges.iter_mut().zip(&inquiry.desk.lines) {
            let layer = book.layer_of(roster, *line);
            let suffix = book.entries[roster.rules[line.rule]].suffix(line.layer);
            if layer.shards_elsewhere == 1 || inquiry.progress.beyond.contains(&true) {
                continue;
            }
            for shard in 1..layer.shards_elsewhere {
                let blank = self.want(book, roster, *line, *asker, text, now_ms);
                let want = Want { base: self.base(text, suffix, shard), least: 0, ..blank };
                match self.take(std::slice::from_ref(&want)).await {
                    Ok(Answer::Granted { took, .. }) => {
                        let used = took.iter().fold(0, |sum: u64, took| sum.saturating_add(took.used));
                        charge.usage.used = charge.usage.used.saturating_add(used);
                        gifts.extend(took.iter().map(|took| want.origin(*took).gift(TOKENS_MAX)));
                    }
                    Ok(Answer::Refused { .. } | Answer::OtherWindow { .. }) | Err(_) => {
                        inquiry.progress.beyond.fill(true)
                    }
                }
            }
            let fetched = u64::from(self.table.purse(layer.counter(*asker), now_ms));
            charge.usage.used = charge.usage.used.saturating_sub(fetched);
        }
    }

    /// Asks what is used of each layer, and what would give all of it back.
    async fn read(self: &Rc<Self>, subject: &Subject<'_>) -> (Box<Inquiry>, Vec<Gift>) {
        let Subject { book, roster, asker, .. } = subject;
        let mut inquiry = self.inquire(subject);
        let lines: Vec<Line> = book.enforced(roster, &mut inquiry.desk);
        book.lay_aside(roster, &lines, &self.table, self.clock.now().unix_ms, &mut inquiry.desk);
        let cost = asker.cost;
        inquiry.desk.charges.iter_mut().for_each(|charge| charge.ask.cost = 0);
        let mut gifts: Vec<Gift> = match inquiry.send(book, roster, 0).await {
            Sent::Granted(gifts) => gifts.into_iter().map(|(_, gift)| Gift { tokens: TOKENS_MAX, ..gift }).collect(),
            Sent::Refused | Sent::OtherWindow | Sent::Failed => {
                inquiry.progress.beyond.fill(true);
                Vec::new()
            }
        };
        inquiry.desk.charges.iter_mut().for_each(|charge| charge.ask.cost = cost);
        self.add_shards(subject, &mut inquiry, &mut gifts).await;
        (inquiry, gifts)
    }
}
