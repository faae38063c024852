//! When the store can not be reached: who is not asked any more, how it is noticed that somebody can be asked again, and
//! what was counted on this machine alone meanwhile.
//!
//! Each server has a breaker. It opens after a few calls in a row without an answer; then nobody waits for that server, and
//! it is asked a few times a second, by a call that counts nothing, whether it is back. Before its breaker closes, it is told what was
//! counted without it, as far as that is soon done.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;

use super::Shared;
use super::leases::{Id, id};
use super::script::{Answer, Want};
use super::store::{Server, StoreError};
use crate::count::table::Counter;
use crate::count::word::Ask;
use crate::metrics::shared::Outcome;
use crate::rule::book::{Book, Roster};
use crate::rule::desk::Desk;
use crate::rule::lease::Stand;

/// So many calls in a row without an answer open the breaker.
const FAILURES_MAX: u32 = 3;
/// How often it is tried whether a server is back, and how long it has for its answer.
const PROBE_EVERY: Duration = Duration::from_millis(250);
const PROBE_LIMIT: Duration = Duration::from_millis(500);
/// More than an outage can be expected to bring; what is beyond is not told to the store.
const DEBTS_MAX: usize = 65_536;
/// How many of them are told at a time.
const DEBTS_TOGETHER: usize = 128;
/// For how long a server is told of them before its breaker closes all the same, and it is told of the rest: requests go on
/// meanwhile, and could owe without end.
const REPORT_LIMIT: Duration = Duration::from_secs(1);
/// How often the operator is told of counters that can not be used.
const COMPLAIN_EVERY: Duration = Duration::from_secs(10);
/// How much of what a server says about itself the operator is told.
const TOLD_MAX: usize = 300;
/// A limit that nothing reaches, and a script still counts exactly.
pub const UNLIMITED: u64 = (1 << 53) - 1;

/// The breakers of all servers. Those that are closed are not in it, unless a call has just failed.
#[derive(Default)]
pub struct Breaker {
    failures: RefCell<HashMap<Server, u32, RandomState>>,
    /// Whether any is open.
    open: Cell<usize>,
}

impl Breaker {
    pub fn is_open(&self, server: Server) -> bool {
        self.open.get() > 0 && self.failures.borrow().get(&server).is_some_and(|failures| *failures >= FAILURES_MAX)
    }

    pub fn answered(&self, server: Server) {
        // It opens no doors: that is for whoever has told the server what it missed.
        if !self.is_open(server) {
            self.failures.borrow_mut().remove(&server);
        }
    }

    /// `true` if the breaker opens now.
    fn failed(&self, server: Server, times: u32) -> bool {
        let mut failures = self.failures.borrow_mut();
        let failures = failures.entry(server).or_default();
        let was_open = *failures >= FAILURES_MAX;
        *failures = failures.saturating_add(times);
        let opens = !was_open && *failures >= FAILURES_MAX;
        self.open.set(self.open.get() + usize::from(opens));
        opens
    }

    fn close(&self, server: Server) {
        self.failures.borrow_mut().remove(&server);
        self.open.set(self.open.get().saturating_sub(1));
    }
}

/// What was counted on this machine alone.
#[derive(Default)]
pub struct Debts(RefCell<HashMap<Id, Debt, RandomState>>);

struct Debt {
    counter: Counter,
    /// What finds it in the table.
    ask: Ask,
    /// What tells it to the store.
    want: Want,
    book: Arc<Book>,
}

/// What a server says, for the log: its beginning, in one line.
fn short(why: &str) -> String {
    why.chars().take(TOLD_MAX).map(|char| if char.is_control() { ' ' } else { char }).collect()
}

impl Debts {
    /// Takes out those of counters whose base is of a kind.
    fn taken(&self, is_meant: impl Fn(&str) -> bool) -> Vec<(Id, Debt)> {
        self.0.borrow_mut().extract_if(|_, debt| is_meant(&debt.want.base)).collect()
    }
}

impl Shared {
    /// Whether rules that count at a server do without it.
    pub(super) fn is_beyond(&self, base: &str) -> bool {
        self.breaker.is_open(self.store.server_of(base))
    }

    /// A call has failed.
    pub(super) fn failed(self: &Rc<Self>, server: Server, error: &StoreError) {
        match error {
            StoreError::Key(what) => {
                self.meter.failed(Outcome::Error);
                self.complain(what);
            }
            StoreError::Unreachable(why) => {
                self.meter.failed(Outcome::Unreachable);
                self.lost(server, 1, why);
            }
        }
    }

    /// A request has waited for as long as it may.
    pub(super) fn timed_out(self: &Rc<Self>, server: Server) {
        self.meter.failed(Outcome::Timeout);
        self.lost(server, 1, "it does not answer in time");
    }

    /// Tells the operator what is wrong with a counter, but not at every request.
    fn complain(&self, what: &str) {
        let now = self.clock.instant();
        if self.complained.get().is_none_or(|last| now.saturating_duration_since(last) >= COMPLAIN_EVERY) {
            self.complained.set(Some(now));
            tracing::warn!("a shared counter can not be used: {}", short(what));
        }
    }

    fn lost(self: &Rc<Self>, server: Server, times: u32, why: &str) {
        if self.breaker.failed(server, times) {
            tracing::warn!("shared counters can not be reached, rules do without: {}", short(why));
            self.meter.lost();
            tokio::task::spawn_local(Rc::clone(self).recover(server));
        }
    }

    /// Tries whether the store is there, before the first request asks.
    pub(super) fn reach_out(self: &Rc<Self>) {
        let shared = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let why = match shared.probe(None).await {
                Ok(()) => return,
                Err(why) => why,
            };
            shared.lost(Server::ONLY, FAILURES_MAX, &why);
        });
    }

    async fn probe(&self, server: Option<Server>) -> Result<(), String> {
        let probe = async {
            match server {
                Some(server) => self.store.probe_server(server).await,
                None => self.store.probe().await,
            }
        };
        match tokio::time::timeout(PROBE_LIMIT, probe).await {
            Ok(Ok(time_ms)) => {
                self.clock.follow(time_ms);
                Ok(())
            }
            Ok(Err(StoreError::Unreachable(why) | StoreError::Key(why))) => Err(why),
            Err(_elapsed) => Err(String::from("it does not answer")),
        }
    }

    /// Waits until a server is back, and tells it what was counted without it.
    async fn recover(self: Rc<Self>, server: Server) {
        loop {
            tokio::time::sleep(PROBE_EVERY).await;
            if self.probe(Some(server)).await.is_ok() && self.report(server).await {
                break;
            }
        }
        self.breaker.close(server);
        self.meter.found();
        tracing::info!("shared counters are reached again");
        self.report_strays().await;
    }

    /// Remembers what was just counted on this machine alone; the desk has been decided on by `book`.
    pub(super) fn owe(&self, book: &Arc<Book>, roster: &Roster, desk: &Desk, first: usize, texts: &[Option<Rc<str>>]) {
        for (charge, line) in desk.charges.iter().zip(&desk.lines).skip(first) {
            if desk.stands.get(line.rule) != Some(&Stand::Alone) {
                continue;
            }
            let text = texts.get(line.rule).and_then(Option::as_ref);
            let (Some(text), Some(asker)) = (text, desk.askers[line.rule]) else { continue };
            let mut debts = self.debts.0.borrow_mut();
            let is_full = debts.len() >= DEBTS_MAX;
            let place = debts.entry(id(charge.counter));
            let is_known = match &place {
                Entry::Occupied(known) => known.get().ask.end_ms == charge.ask.end_ms,
                Entry::Vacant(_) => is_full,
            };
            if !is_known {
                // Of a window that is over nothing is told, so it is the latest that counts.
                let want = self.want(book, roster, *line, asker, text, self.clock.now().unix_ms);
                place.insert_entry(Debt { counter: charge.counter, ask: charge.ask, want, book: Arc::clone(book) });
            }
        }
    }

    /// Tells a server what was counted without it; `false` if it is away again.
    async fn report(self: &Rc<Self>, server: Server) -> bool {
        let until = self.clock.instant() + REPORT_LIMIT;
        while self.clock.instant() < until {
            let debts = self.debts.taken(|base| self.store.server_of(base) == server);
            if debts.is_empty() {
                break;
            }
            if !self.tell(debts, Some(until)).await {
                return false;
            }
        }
        true
    }

    /// Tells servers that are there what was counted without them: by single requests that did not get an answer in time,
    /// or before they were back.
    pub(super) async fn report_strays(self: &Rc<Self>) {
        if !self.debts.0.borrow().is_empty() {
            let debts = self.debts.taken(|base| !self.is_beyond(base));
            self.tell(debts, None).await;
        }
    }

    /// Tells of debts, many at a time, until then; `false` if a server is away. The others are owed as before.
    async fn tell(self: &Rc<Self>, mut debts: Vec<(Id, Debt)>, until: Option<Instant>) -> bool {
        let mut arrived = true;
        while !debts.is_empty() && arrived && until.is_none_or(|until| self.clock.instant() < until) {
            let rest = debts.split_off(debts.len().min(DEBTS_TOGETHER));
            let tell = |(_, debt)| tokio::task::spawn_local(Rc::clone(self).tell_one(debt));
            let told: Vec<_> = std::mem::replace(&mut debts, rest).into_iter().map(tell).collect();
            for told in told {
                arrived &= told.await.unwrap_or(false);
            }
        }
        let mut owed = self.debts.0.borrow_mut();
        debts.into_iter().for_each(|(id, debt)| _ = owed.entry(id).or_insert(debt));
        arrived
    }

    async fn tell_one(self: Rc<Self>, debt: Debt) -> bool {
        let Debt { counter, ask, want, book } = debt;
        let time = book.time(self.clock.now().unix_ms);
        let used = self.table.look(counter, ask, time).0.used;
        if used == 0 {
            return true;
        }
        // Before it is told, for it must not be told twice: whether it arrived is not always known.
        self.table.forget(counter, ask, time);
        let want = Want { need: used, want: used, ceiling: UNLIMITED, least: 0, ..want };
        match self.take(std::slice::from_ref(&want)).await {
            Ok(Answer::Granted { .. }) => self.meter.reported(used),
            // Its window is over there.
            Ok(Answer::Refused { .. } | Answer::OtherWindow { .. }) | Err(StoreError::Key(_)) => {}
            Err(StoreError::Unreachable(_)) => return false,
        }
        true
    }
}
