//! When the store can not be reached: who is not asked any more, how it is noticed that somebody can be asked again, and
//! what was counted on this machine alone meanwhile.
//!
//! Each server has a breaker. It opens after a few calls in a row without an answer; then nobody waits for that server, and
//! it is asked a few times a second, by a call that counts nothing, whether it is back. Before its breaker closes, it is told what was
//! counted without it.

use std::cell::{Cell, RefCell};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;
use tokio::task::{JoinHandle, spawn_local};

use super::Shared;
use super::client::StoreError;
use super::lease_sizing::{Id, id};
use super::reconnecting::Server;
use super::scripts::{Answer, CounterRequest, Refund};
use crate::metrics::redis::StoreOutcome;
use transom_limiter::decision_context::DecisionContext;
use transom_limiter::decision_time::DecisionTime;
use transom_limiter::rule_set::{ChargePlan, CountingMode, KeyedRequest, RuleSet};
use transom_limiter::sharded_counter::part_of_shard;
use transom_limiter::table::Counter;

/// So many failures in a row open the breaker, each at least as long after the one before as a request waits.
const FAILURES_MAX: u32 = 3;
/// How often it is tried whether a server is back, and how long it has for its answer.
const PROBE_EVERY: Duration = Duration::from_millis(250);
const PROBE_LIMIT: Duration = Duration::from_millis(500);
/// More than an outage can be expected to bring; what is beyond is not told to the store.
const DEBTS_MAX: usize = 65_536;
/// For how long a server is told what came while it was told before, until its breaker closes all the same: requests go on
/// meanwhile, and could owe without end.
const REPORT_LIMIT: Duration = Duration::from_secs(1);
/// So many counters are reported at once.
const REPORTS: usize = 256;
/// How often the operator is told of counters that can not be used.
const COMPLAIN_EVERY: Duration = Duration::from_secs(10);
/// How much of what a server says about itself the operator is told.
const TOLD_MAX: usize = 300;
/// For so long after an outage other loops may still be in it.
const AFTERMATH: Duration = Duration::from_secs(2);
/// A limit that nothing reaches, and a script still counts exactly.
pub const UNLIMITED: u64 = (1 << 53) - 1;

/// The breakers of all servers. Those that are closed are not in it, unless a call has just failed.
#[derive(Default)]
pub struct Breaker {
    troubles: RefCell<HashMap<Server, Trouble, RandomState>>,
    /// How many are open.
    open: Cell<usize>,
    /// When the last one closed.
    closed: Cell<Option<Instant>>,
}

/// What is known of a server that does not answer.
struct Trouble {
    /// How often in a row calls have failed. Those that fail in one moment are one: they were hit by the same.
    failures: u32,
    last: Instant,
}

impl Breaker {
    /// Whether any is.
    pub fn is_any_open(&self) -> bool {
        self.open.get() > 0
    }

    pub fn is_open(&self, server: Server) -> bool {
        self.is_any_open()
            && self.troubles.borrow().get(&server).is_some_and(|trouble| trouble.failures >= FAILURES_MAX)
    }

    pub fn answered(&self, server: Server) {
        // It opens no doors: that is for whoever has told the server what it missed.
        if !self.is_open(server) {
            self.troubles.borrow_mut().remove(&server);
        }
    }

    /// `true` if the breaker opens now. What comes within `moment` of the last failure that was counted is not counted.
    fn failed(&self, server: Server, times: u32, now: Instant, moment: Duration) -> bool {
        let mut troubles = self.troubles.borrow_mut();
        let trouble = match troubles.entry(server) {
            Entry::Vacant(place) => place.insert(Trouble { failures: 0, last: now }),
            Entry::Occupied(known) => match known.into_mut() {
                trouble if times == 1 && now.saturating_duration_since(trouble.last) < moment => return false,
                trouble => trouble,
            },
        };
        let was_open = trouble.failures >= FAILURES_MAX;
        trouble.failures = trouble.failures.saturating_add(times);
        trouble.last = now;
        let opens = !was_open && trouble.failures >= FAILURES_MAX;
        self.open.set(self.open.get() + usize::from(opens));
        opens
    }

    /// Whether the last outage is over for everyone on this machine.
    fn is_calm(&self, now: Instant) -> bool {
        let is_long_ago = |closed: Instant| now.saturating_duration_since(closed) >= AFTERMATH;
        self.open.get() == 0 && self.closed.get().is_none_or(is_long_ago)
    }

    fn close(&self, server: Server, now: Instant) {
        self.closed.set(Some(now));
        self.troubles.borrow_mut().remove(&server);
        self.open.set(self.open.get().saturating_sub(1));
    }
}

/// What the store does not know as long as it can not be reached.
#[derive(Default)]
pub struct UnreportedUsage {
    /// Whose counts on this machine alone.
    counted: RefCell<HashMap<Id, Debt, RandomState>>,
    /// Those of them that are being told.
    underway: RefCell<HashSet<Id, RandomState>>,
    /// What is to be given back there.
    gifts: RefCell<Vec<Refund>>,
}

/// A counter that was charged on this machine alone.
#[derive(Clone)]
struct Debt {
    rule_set: Arc<RuleSet>,
    /// Position in the book.
    rule: usize,
    layer: usize,
    keyed_request: KeyedRequest,
    /// What the key is in the store.
    text: Rc<str>,
}

impl Debt {
    fn counter(&self) -> Counter {
        self.rule_set.rules[self.rule].layer(self.layer).counter(self.keyed_request)
    }
}

impl UnreportedUsage {
    fn add(&self, debt: Debt) {
        let mut debts = self.counted.borrow_mut();
        let is_full = debts.len() >= DEBTS_MAX;
        if let Entry::Vacant(place) = debts.entry(id(debt.counter()))
            && !is_full
        {
            place.insert(debt);
        }
    }

    /// Remembers to give back what can not be given back now, if that is not too much.
    pub fn keep(&self, gifts: Vec<Refund>) {
        let mut kept = self.gifts.borrow_mut();
        let room = DEBTS_MAX.saturating_sub(kept.len());
        kept.extend(gifts.into_iter().take(room));
    }
}

/// What a server says, for the log: its beginning, in one line.
pub(super) fn short(why: &str) -> String {
    why.chars().take(TOLD_MAX).map(|char| if char.is_control() { ' ' } else { char }).collect()
}

impl Shared {
    /// Whether rules that count at a server do without it.
    pub(super) fn is_beyond(&self, base: &str) -> bool {
        self.breaker.is_any_open() && self.breaker.is_open(self.store.server_of(base))
    }

    /// A call has failed.
    pub(super) fn failed(self: &Rc<Self>, server: Server, error: &StoreError) {
        match error {
            StoreError::Key(what) => {
                self.meter.call_failed(StoreOutcome::Error);
                self.complain(what);
            }
            StoreError::Unreachable(why) => {
                self.meter.call_failed(StoreOutcome::Unreachable);
                self.lost(server, 1, why);
            }
        }
    }

    /// A request has waited for as long as it may.
    pub(super) fn timed_out(self: &Rc<Self>, server: Server) {
        self.meter.call_failed(StoreOutcome::Timeout);
        self.lost(server, 1, &format!("{}: it does not answer in time", self.store.name_of(server)));
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
        if self.breaker.failed(server, times, self.clock.instant(), self.timeout) {
            tracing::warn!("shared counters can not be reached, rules do without: {}", short(why));
            self.meter.server_lost();
            spawn_local(Rc::clone(self).recover(server));
        }
    }

    /// Tries whether the store is there, before the first request asks.
    pub(super) fn reach_out(self: &Rc<Self>) {
        let shared = Rc::clone(self);
        spawn_local(async move {
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
        let began = self.clock.instant();
        match tokio::time::timeout(PROBE_LIMIT.max(self.timeout), probe).await {
            Ok(Ok(time_ms)) => {
                self.met(began);
                self.clock.follow(time_ms);
                Ok(())
            }
            Ok(Err(StoreError::Unreachable(why) | StoreError::Key(why))) => Err(why),
            Err(_elapsed) => Err(format!("{}: it does not answer", self.store.name_of(server.unwrap_or(Server::ONLY)))),
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
        self.breaker.close(server, self.clock.instant());
        self.meter.server_recovered();
        tracing::info!("shared counters are reached again: {}", self.store.name_of(server));
        // Others may have its slots by now.
        self.report_arrears().await;
        self.give_kept().await;
    }

    /// Gives back what could not be given back before, as far as it can be now.
    async fn give_kept(self: &Rc<Self>) {
        let gifts = self.debts.gifts.take();
        self.give(gifts).await;
    }

    /// Remembers what was just counted on this machine alone; the desk has been decided on by `book`.
    pub(super) fn owe(
        &self,
        rule_set: &Arc<RuleSet>,
        charge_plan: &ChargePlan,
        context: &DecisionContext,
        first: usize,
        texts: &[Option<Rc<str>>],
    ) {
        for line in context
            .result
            .layers
            .iter()
            .skip(first)
            .filter(|line| context.sharing.counting_modes.get(line.rule) == Some(&CountingMode::LocalFallback))
        {
            let text = texts.get(line.rule).and_then(Option::as_ref);
            let (Some(text), Some(keyed_request)) = (text, context.inputs.keyed_requests[line.rule]) else { continue };
            self.owe_by(rule_set, charge_plan.rules[line.rule], line.layer, keyed_request, text);
        }
    }

    /// As [`Shared::owe`], for a layer of the rule at a position in the book.
    pub(super) fn owe_by(
        &self,
        rule_set: &Arc<RuleSet>,
        rule: usize,
        layer: usize,
        keyed_request: KeyedRequest,
        text: &Rc<str>,
    ) {
        self.debts.add(Debt { rule_set: Arc::clone(rule_set), rule, layer, keyed_request, text: Rc::clone(text) });
    }

    /// Tells servers that can be reached what was counted while an answer of theirs did not come in time.
    pub(super) async fn report_arrears(self: &Rc<Self>) {
        let servers: HashSet<Server> = self.debts.counted.borrow().values().map(|debt| self.server_of(debt)).collect();
        for server in servers.into_iter().filter(|server| !self.breaker.is_open(*server)) {
            self.report(server).await;
        }
    }

    fn server_of(&self, debt: &Debt) -> Server {
        self.store.server_of(&self.base(&debt.text, "", 0))
    }

    fn base_of(&self, id: Id) -> Option<Rc<str>> {
        self.debts.counted.borrow().get(&id).map(|debt| self.base(&debt.text, "", 0))
    }

    /// Some of the debts at a server that nobody tells yet; forgets those of windows that are over.
    fn some_at(&self, server: Server) -> Vec<Id> {
        let (mut debts, underway) = (self.debts.counted.borrow_mut(), self.debts.underway.borrow());
        let (mut some, mut over) = (Vec::new(), Vec::new());
        for (id, debt) in debts.iter().filter(|(id, debt)| !underway.contains(id) && self.server_of(debt) == server) {
            let is_over = self.used_here(&debt.rule_set, debt.rule, debt.layer, debt.keyed_request).used == 0;
            if is_over { &mut over } else { &mut some }.push(*id);
            if some.len() == REPORTS {
                break;
            }
        }
        for id in over {
            debts.remove(&id);
        }
        some
    }

    /// Tells a server what was counted without it; `false` if it is away again.
    async fn report(self: &Rc<Self>, server: Server) -> bool {
        let until = self.clock.instant() + REPORT_LIMIT;
        loop {
            let some = self.some_at(server);
            let Some(base) = some.first().and_then(|id| self.base_of(*id)) else { return true };
            if self.clock.instant() >= until {
                return true;
            }
            // One finds out for all whether anybody is there; then they go out together.
            if let Err(error) = self.store.ready(&base).await {
                self.failed(self.store.server_of(&base), &error);
                return false;
            }
            let told: Vec<JoinHandle<bool>> =
                some.into_iter().filter_map(|id| Rc::clone(self).begin_to_tell(id, server)).collect();
            let mut arrives = true;
            for told in told {
                arrives &= told.await.unwrap_or(false);
            }
            if !arrives {
                return false;
            }
        }
    }

    /// Remembers what the store says is used of a counter. Around an outage loops learn at different moments what others counted
    /// alone: an answer that sounds like less is then one from before.
    pub(super) fn hear(&self, counter: Counter, end_ms: u64, used: u64, now_ms: u64) {
        let is_calm = self.breaker.is_calm(self.clock.instant());
        let before = self.table.known_usage(counter, now_ms).filter(|(end, _)| *end == end_ms && !is_calm);
        let used = used.max(before.map_or(0, |(_, used)| u64::from(used)));
        self.table.set_known_usage(counter, end_ms, u32::try_from(used).unwrap_or(u32::MAX), now_ms);
    }

    /// Many calls can meet a server anew at the same moment, and all want the same to be told.
    fn begin_to_tell(self: Rc<Self>, id: Id, server: Server) -> Option<JoinHandle<bool>> {
        let is_first = self.debts.underway.borrow_mut().insert(id);
        is_first.then(|| {
            spawn_local(async move {
                let arrives = self.tell(id, server).await;
                self.debts.underway.borrow_mut().remove(&id);
                arrives
            })
        })
    }

    /// The counters of a debt that can be told: without those of shards whose server is away, whose part the others take.
    /// Empty if the server that is being told is away itself.
    async fn shards_there(self: &Rc<Self>, debt: &Debt, server: Server) -> Vec<Rc<str>> {
        let (entry, layer) = (&debt.rule_set.rules[debt.rule], debt.layer);
        let (mut there, mut away) = (Vec::new(), Vec::new());
        for shard in 0..entry.layer(layer).store_shards {
            let base = self.base(&debt.text, entry.suffix(layer), shard);
            let at = self.store.server_of(&base);
            if at != server && (self.breaker.is_open(at) || away.contains(&at)) {
                continue;
            }
            match self.store.ready(&base).await {
                Ok(()) => there.push(base),
                Err(error) => {
                    let at = self.store.server_of(&base);
                    self.failed(at, &error);
                    if at == server {
                        return Vec::new();
                    }
                    away.push(at);
                }
            }
        }
        there
    }

    /// Tells what was counted of one key, at a server and wherever else it has shards; `false` if that server is away.
    async fn tell(self: &Rc<Self>, id: Id, server: Server) -> bool {
        let Some(debt) = self.debts.counted.borrow().get(&id).cloned() else { return true };
        let Debt { rule_set, rule, layer, keyed_request, text } = &debt;
        let (rule, layer, keyed_request) = (*rule, *layer, *keyed_request);
        let shards = rule_set.rules[rule].layer(layer).store_shards;
        let began = self.clock.instant();
        // It stays a debt until somebody is there.
        let there = self.shards_there(&debt, server).await;
        if there.is_empty() {
            return false;
        }
        // A server that is met anew may have forgotten more than this, and what is told is worked out by that.
        self.met(began);
        // From here on nothing waits until it is forgotten: what is counted meanwhile is a debt of its own.
        self.debts.counted.borrow_mut().remove(&id);
        let here = self.used_here(rule_set, rule, layer, keyed_request);
        let now_ms = self.clock.now().unix_ms;
        if here.used == 0 {
            return true;
        }
        // What was known before is told as well, if it may have been forgotten there: this call makes the counter anew.
        let least = self.want_of(rule_set, rule, layer, keyed_request, text, now_ms).least;
        let counter = debt.counter();
        // The counter is emptied before the report, for it must not be reported twice: whether a report arrived is not always
        // known, and other loops report it too. These may count without the store for a while yet: to them the tokens are
        // used elsewhere, and that is announced before the counter is empty. The tokens are added to what is known, because
        // several loops may report one counter at once.
        let announce = |tokens: u64| {
            self.table.add_known_usage(counter, here.end_ms, u32::try_from(tokens).unwrap_or(u32::MAX), now_ms);
        };
        let tokens = rule_set.reset_local(
            rule,
            layer,
            keyed_request,
            &self.table,
            DecisionTime::read(&|| self.clock.now().unix_ms),
            announce,
        );
        if tokens == 0 {
            return true;
        }
        let mut arrives = true;
        let parts = there.len() as u32;
        for (base, shard) in there.into_iter().zip(0..) {
            let part = part_of_shard(tokens, parts, shard);
            if part == 0 {
                break;
            }
            let blank = self.want_of(rule_set, rule, layer, keyed_request, text, now_ms);
            let at = self.store.server_of(&base);
            let want = CounterRequest {
                base,
                need: part,
                want: part,
                ceiling: UNLIMITED,
                least: if shards == 1 { least } else { 0 },
                ..blank
            };
            match self.take_as_known(std::slice::from_ref(&want)).await {
                Ok(Answer::Granted { took, .. }) => {
                    self.meter.reported(part);
                    if let (Some(took), 1) = (took.first(), shards) {
                        self.hear(counter, took.end_ms, took.used, now_ms);
                    }
                }
                // Its window is over, or nothing can be counted under its key.
                Ok(Answer::Refused { .. } | Answer::OtherWindow { .. }) | Err(StoreError::Key(_)) => {}
                // Another server has a breaker of its own.
                Err(StoreError::Unreachable(_)) => arrives &= at != server,
            }
        }
        arrives
    }
}
