//! The decision about one request by counters that are shared, as far as something has to be fetched or asked for it.
//!
//! First everything is charged that lies in the table, tokens that were fetched among it: all or nothing, and without waiting where
//! enough was fetched. What the store decides itself comes last, in one call, so that it is the only one to be undone if
//! it refuses. Who has waited for as long as a request may wait goes on as rules do in an outage.

use std::mem::take;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::Shared;
use super::exact_mode::Sent;
use super::scripts::Gift;
use crate::metrics::redis::Without;
use transom_limiter::decision_context::Desk;
use transom_limiter::decision_time::Now;
use transom_limiter::rule::{OnOutage, Sharing};
use transom_limiter::rule_set::{Book, Judgement, Line, Roster};
use transom_limiter::shared_counting::{Stand, Step};

/// So often a request asks in vain, as when others take the tokens that it fetches before it can.
pub(super) const ROUNDS_MAX: u32 = 64;
/// From this round on it gives up as soon as its time is over. Those before may be late because the loop was.
const ROUNDS_FREE: u32 = 4;

/// What the rules of a request say, if nothing has to be waited for.
pub enum Begun {
    Decided(Judgement),
    Waits(Box<Inquiry>),
    /// A rule refuses whatever it can not count.
    Unavailable,
}

/// A request that waits for the store.
pub struct Inquiry {
    pub(super) shared: Rc<Shared>,
    pub(super) book: Arc<Book>,
    pub(super) desk: Desk,
    /// What the keys of the roster's rules are in the store; of those that are shared and apply.
    pub(super) texts: Vec<Option<Rc<str>>>,
    pub(super) progress: Progress,
    pub(super) next: Option<Next>,
    pub(super) deadline: Instant,
}

/// What was decided after all.
pub struct Ruling {
    pub judgement: Judgement,
    /// What it was decided on, as after any decision.
    pub desk: Desk,
    /// What gives back what the store has charged, for rules by their position.
    pub gifts: Vec<(usize, Gift)>,
    /// What the keys are in the store, of the rules that are shared.
    pub texts: Vec<Option<Rc<str>>>,
}

/// A rule refuses whatever it can not count.
#[derive(Debug)]
pub struct Unavailable;

/// Something of each rule of a roster; seldom of more than a few.
type Positions = SmallVec<[bool; 8]>;

/// How far a decision has come.
pub(super) struct Progress {
    /// 0: the enforced rules; then each shadow rule.
    pub(super) group: usize,
    pub(super) judgement: Option<Judgement>,
    /// The rules that do without the store, by their position.
    pub(super) beyond: Positions,
    pub(super) gifts: Vec<(usize, Gift)>,
    pub(super) rounds: u32,
    /// Lines that are charged again; then nothing else is.
    again: Option<Vec<Line>>,
    /// The store is asked, also where tokens could be fetched.
    pub(super) asks: bool,
}

/// What a decision waits for.
pub(super) enum Next {
    Done(Judgement),
    Unavailable,
    /// Tokens for the counters that lack them; the desk is as it was before from here on.
    Fetch {
        first: usize,
    },
    /// The store is to decide these lines.
    Ask {
        first: usize,
        lines: Vec<Line>,
    },
    /// Places in windows to come, for the rules that are full.
    Place {
        first: usize,
        lines: Vec<Line>,
    },
}

impl Progress {
    pub(super) fn new(rules: usize) -> Progress {
        let beyond = SmallVec::from_elem(false, rules);
        Progress { group: 0, judgement: None, beyond, gifts: Vec::new(), rounds: 0, again: None, asks: false }
    }

    /// Puts down how each rule of the roster is counted in the next step.
    fn settle_stands(&self, book: &Book, roster: &Roster, desk: &mut Desk) {
        book.stands(roster, |position| self.beyond[position], &mut desk.stands);
        for (stand, rule) in desk.stands.iter_mut().zip(&roster.rules).filter(|_| self.asks) {
            if *stand == Stand::Leased && !book.entries[*rule].is_split() {
                *stand = Stand::Aside;
            }
        }
    }
}

impl Shared {
    /// Decides a request whose askers lie on the desk. `text` tells what the key of a rule is in the store.
    pub fn begin(
        self: &Rc<Self>,
        book: &Arc<Book>,
        roster: &Roster,
        desk: &mut Desk,
        text: impl Fn(usize) -> Option<Rc<str>>,
    ) -> Begun {
        desk.clear();
        let mut progress = Progress::new(roster.rules.len());
        match self.advance(book, roster, desk, &[], &mut progress) {
            Next::Done(judgement) => {
                if let Judgement::Refused = judgement {
                    self.count_refusal(book, roster, desk, &progress, &text);
                    self.recheck(book, roster, desk, text);
                }
                Begun::Decided(judgement)
            }
            Next::Unavailable => Begun::Unavailable,
            next => {
                let is_shared = |position: usize| {
                    book.entries[roster.rules[position]].rule.sharing != Sharing::Own && desk.askers[position].is_some()
                };
                let text = |position| if is_shared(position) { text(position) } else { None };
                Begun::Waits(Box::new(Inquiry {
                    texts: (0..roster.rules.len()).map(text).collect(),
                    shared: Rc::clone(self),
                    book: Arc::clone(book),
                    desk: desk.clone(),
                    progress,
                    next: Some(next),
                    deadline: Instant::from_std(self.clock.instant()) + self.timeout,
                }))
            }
        }
    }

    /// Charges lines of a request again, whose windows are over since it was charged.
    pub fn charge_again(
        self: &Rc<Self>,
        book: &Arc<Book>,
        roster: &Roster,
        again: Vec<Line>,
        mut desk: Desk,
        texts: Vec<Option<Rc<str>>>,
    ) -> Box<Inquiry> {
        desk.clear();
        let progress = Progress { again: Some(again), ..Progress::new(roster.rules.len()) };
        let deadline = Instant::from_std(self.clock.instant()) + self.timeout;
        let (shared, book) = (Rc::clone(self), Arc::clone(book));
        Box::new(Inquiry { shared, book, desk, texts, progress, next: None, deadline })
    }

    /// Goes on with a decision until it is made, or something has to be waited for.
    pub(super) fn advance(
        self: &Rc<Self>,
        book: &Arc<Book>,
        roster: &Roster,
        desk: &mut Desk,
        texts: &[Option<Rc<str>>],
        progress: &mut Progress,
    ) -> Next {
        loop {
            let shadow = progress.group.checked_sub(1).map(|nth| roster.shadows().get(nth).copied());
            let lines = match shadow {
                None => progress.again.clone().unwrap_or_else(|| book.enforced(roster, desk)),
                Some(_) if progress.again.is_some() => {
                    return Next::Done(progress.judgement.take().unwrap_or(Judgement::Refused));
                }
                Some(None) => return Next::Done(progress.judgement.take().unwrap_or(Judgement::Refused)),
                Some(Some(position)) => match desk.askers[position] {
                    Some(asker) => book.of_shadow(roster, position, asker),
                    None => Vec::new(),
                },
            };
            progress.settle_stands(book, roster, desk);
            if shadow.is_none() && self.is_unavailable(book, roster, &lines, desk, progress) {
                self.meter.did_without(Without::Refused);
                return Next::Unavailable;
            }
            let first = desk.charges.len();
            desk.first_share = desk.shares.len();
            let clock = || self.clock.now().unix_ms;
            let step = book.step(roster, &lines, &self.table, Now::by(&clock), desk, shadow.is_none());
            let judgement = match step {
                Step::Lacking => {
                    desk.put_back(lines);
                    return Next::Fetch { first };
                }
                Step::Decided(judgement) => judgement,
            };
            if shadow.is_none() {
                self.count_without(book, roster, desk, progress);
            }
            match (judgement, shadow.flatten()) {
                (Judgement::Refused, Some(position)) => desk.shadowed.push(position),
                (Judgement::Refused, None) if book.may_wait(roster, desk) && desk.stands.contains(&Stand::Leased) => {
                    return Next::Place { first, lines };
                }
                (Judgement::Refused, None) => {
                    desk.put_back(lines);
                    return Next::Done(Judgement::Refused);
                }
                (passes, shadow) => {
                    self.prefetch(book, roster, desk);
                    self.owe(book, roster, desk, first, texts);
                    if shadow.is_none() {
                        progress.judgement = Some(passes);
                    }
                    let asked = self.to_ask(&lines, desk, progress);
                    if !asked.is_empty() {
                        return Next::Ask { first, lines: asked };
                    }
                }
            }
            desk.put_back(lines);
            progress.group += 1;
        }
    }

    /// Whether a rule that refuses what it can not count would have to.
    fn is_unavailable(&self, book: &Book, roster: &Roster, lines: &[Line], desk: &Desk, progress: &Progress) -> bool {
        lines.iter().filter(|line| progress.beyond[line.rule]).any(|line| {
            let rule = &book.entries[roster.rules[line.rule]].rule;
            rule.on_outage == OnOutage::Refuse && rule.sharing != Sharing::Own && desk.askers[line.rule].is_some()
        })
    }

    /// Counts what rules do that do without the store.
    fn count_without(&self, book: &Book, roster: &Roster, desk: &Desk, progress: &Progress) {
        for (position, rule) in roster.rules.iter().enumerate().filter(|(position, _)| progress.beyond[*position]) {
            let rule = &book.entries[*rule].rule;
            if rule.sharing != Sharing::Own && desk.askers[position].is_some() {
                match rule.on_outage {
                    OnOutage::Local => self.meter.did_without(Without::Local),
                    OnOutage::Allow => self.meter.did_without(Without::Allowed),
                    OnOutage::Refuse => {}
                }
            }
        }
    }

    /// The lines that the store decides itself.
    fn to_ask(&self, lines: &[Line], desk: &Desk, progress: &Progress) -> Vec<Line> {
        let is_asked = |line: &&Line| {
            let is_aside = desk.stands[line.rule] == Stand::Aside;
            is_aside && !progress.beyond[line.rule] && desk.askers[line.rule].is_some()
        };
        lines.iter().filter(is_asked).copied().collect()
    }
}

impl Inquiry {
    /// Waits for what it takes, and decides.
    pub async fn decide(mut self: Box<Self>, roster: &Roster) -> Result<Ruling, Unavailable> {
        let (shared, book) = (Rc::clone(&self.shared), &Arc::clone(&self.book));
        loop {
            let next = match self.next.take() {
                Some(next) => next,
                None => {
                    let Inquiry { desk, texts, progress, .. } = &mut *self;
                    shared.advance(book, roster, desk, texts, progress)
                }
            };
            match next {
                Next::Done(judgement) => {
                    if let Judgement::Refused = judgement {
                        shared.count_refusal(book, roster, &self.desk, &self.progress, |rule| self.text(rule));
                        shared.recheck(book, roster, &self.desk, |rule| self.text(rule));
                        shared.give_later(self.progress.gifts.drain(..).map(|(_, gift)| gift).collect());
                    }
                    let Inquiry { desk, texts, progress, .. } = &mut *self;
                    let (desk, texts, gifts) = (take(desk), take(texts), take(&mut progress.gifts));
                    return Ok(Ruling { judgement, desk, gifts, texts });
                }
                // What was charged is given back as the inquiry goes.
                Next::Unavailable => return Err(Unavailable),
                Next::Fetch { first } => self.next = self.fetch(book, roster, first).await,
                Next::Ask { first, lines } => {
                    if let Some(refused) = self.ask(book, roster, first, &lines).await {
                        self.next = refused;
                    }
                }
                Next::Place { first, lines } => self.next = Some(self.place(book, roster, first, &lines).await),
            }
        }
    }

    /// Refuses what lies on the desk behind `first`, of which nothing is charged any more. `None`: it was only tried out.
    pub(super) fn refuse(&mut self, book: &Book, roster: &Roster, first: usize) -> Option<Next> {
        let shadow = self.progress.group.checked_sub(1).and_then(|nth| roster.shadows().get(nth).copied());
        if let Some(position) = shadow {
            self.desk.shadowed.push(position);
            self.progress.group += 1;
            return None;
        }
        if !book.may_wait(roster, &self.desk) {
            return Some(Next::Done(Judgement::Refused));
        }
        let lines = self.progress.again.clone().unwrap_or_else(|| book.enforced(roster, &mut self.desk));
        self.desk.decided_ms = self.shared.clock.now().unix_ms;
        Some(Next::Place { first, lines })
    }

    /// What the key of a rule is in the store; `None` if it is not shared or does not apply.
    pub(super) fn text(&self, rule: usize) -> Option<Rc<str>> {
        self.texts.get(rule).cloned().flatten()
    }

    /// Begins another round of asking the store about rules; `true` if it is not asked, because there were too many, or
    /// because it is known that it does not answer for some of them, which do without.
    pub(super) fn gives_up_on(&mut self, rules: &[usize]) -> bool {
        self.progress.rounds += 1;
        if self.progress.rounds > ROUNDS_MAX || self.is_late() {
            self.do_without(rules);
            return true;
        }
        self.go_beyond(rules)
    }

    /// Whether it has asked for long enough.
    pub(super) fn is_late(&self) -> bool {
        self.progress.rounds > ROUNDS_FREE && Instant::from_std(self.shared.clock.instant()) >= self.deadline
    }

    /// Lets rules do without the store if it is known that their server can not be asked; `true` if there are some.
    pub(super) fn go_beyond(&mut self, rules: &[usize]) -> bool {
        if !self.shared.breaker.is_any_open() {
            return false;
        }
        let mut goes = false;
        for rule in rules {
            let Some(text) = self.text(*rule) else { continue };
            if self.shared.is_beyond(&self.shared.base(&text, "", 0)) {
                self.progress.beyond[*rule] = true;
                goes = true;
            }
        }
        goes
    }

    pub(super) fn do_without(&mut self, rules: &[usize]) {
        rules.iter().for_each(|rule| self.progress.beyond[*rule] = true);
    }

    /// The rules that wait for one server go on without it; `began` is when they began to.
    pub(super) fn lose_patience(&mut self, rules: &[usize], began: Instant) {
        self.do_without(rules);
        // A server that has answered until just now is not away.
        if Instant::from_std(self.shared.clock.instant()) < began + self.shared.timeout / 2 {
            return;
        }
        if let Some(text) = rules.first().and_then(|rule| self.text(*rule)) {
            let server = self.shared.store.server_of(&self.shared.base(&text, "", 0));
            self.shared.timed_out(server);
        }
    }

    /// Lets the store decide lines, after all others were charged. `Some`: what was charged is given back, and the decision goes on
    /// with that, or from the beginning.
    async fn ask(&mut self, book: &Arc<Book>, roster: &Roster, first: usize, lines: &[Line]) -> Option<Option<Next>> {
        let now_ms = self.shared.clock.now().unix_ms;
        let behind = book.lay_aside(roster, lines, &self.shared.table, now_ms, &mut self.desk);
        let refuses = match self.send(book, roster, behind).await {
            Sent::Granted(gifts) => {
                self.progress.gifts.extend(gifts);
                if self.progress.group == 0 {
                    self.charge_again_what_ends(behind, |_line| true);
                }
                self.progress.group += 1;
                return None;
            }
            Sent::Refused => true,
            Sent::OtherWindow | Sent::Failed => false,
        };
        let shared = Rc::clone(&self.shared);
        shared.undo(book, &mut self.desk, first, Vec::new());
        if !refuses {
            self.desk.rewind(first);
            return Some(None);
        }
        self.desk.take_off_costs(first, behind);
        Some(self.refuse(book, roster, first))
    }
}

impl Drop for Inquiry {
    /// Who goes away before it is decided has charged nothing.
    fn drop(&mut self) {
        let gifts = self.progress.gifts.drain(..).map(|(_, gift)| gift).collect();
        self.shared.undo(&self.book, &mut self.desk, 0, gifts);
    }
}

/// Waits until then, and no longer than it takes to see what has arrived by then.
pub(super) async fn within<T>(deadline: Instant, future: impl Future<Output = T>) -> Option<T> {
    let mut future = std::pin::pin!(future);
    tokio::select! {
        biased;
        done = &mut future => return Some(done),
        () = tokio::time::sleep_until(deadline) => {}
    }
    // The loop itself may have been late: what lies in the socket is read before it is said that nothing came.
    for _ in 0..4 {
        tokio::time::sleep(Duration::ZERO).await;
        let arrived = std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await;
        if let Poll::Ready(done) = arrived {
            return Some(done);
        }
    }
    None
}
