//! Fetching tokens: of all counters of a request that lack some in as few calls as their servers allow, and in one call at
//! a time for each counter. Calls go out together, and none waits for another: a server that does not answer keeps nobody
//! from what others have.
//!
//! A call goes on when nobody waits for it any more: what it brings is deposited in the table, where the next request finds
//! it. A call whose fate is unknown is never made again.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::time::Instant;

use tokio::sync::Notify;

use super::Shared;
use super::client::StoreError;
use super::lease_sizing::{Id, id};
use super::reconnecting::Server;
use super::scripts::{Answer, CounterReply, CounterRequest, Kind, Refund, RefundTarget};
use crate::metrics::redis::StoreOutcome;
use transom_limiter::leased_tokens::DepositResult;
use transom_limiter::sharded_counter::part_of_shard;
use transom_limiter::table::Counter;

/// Fetches tokens for one counter.
pub struct TokenFetch {
    /// The layer's ordinary counter.
    pub counter: Counter,
    /// What the key is in the store, and what comes behind it.
    pub text: Rc<str>,
    pub suffix: Rc<str>,
    pub shards: u32,
    /// Which connections stood when `want` was worked out.
    pub generation: u64,
    pub want: CounterRequest,
}

/// A call that is under way. Whoever waits for it looks afterwards at what is in the table.
pub struct InFlightFetch {
    /// The counters that it is about.
    ids: Vec<Id>,
    landed: Cell<Option<bool>>,
    notify: Notify,
    /// What was fetched and found no place in the table: for those who wait.
    pub unkept: RefCell<Vec<Unkept>>,
    /// The counters that had not what was needed, and what is used of each.
    pub refused: RefCell<Vec<(Id, CounterReply)>>,
}

/// Tokens that found no place in the table.
pub struct Unkept {
    /// Of which counter.
    pub id: Id,
    pub tokens: u64,
    pub origin: RefundTarget,
}

impl InFlightFetch {
    fn about(ids: Vec<Id>) -> InFlightFetch {
        let (unkept, refused) = (RefCell::default(), RefCell::default());
        InFlightFetch { ids, landed: Cell::new(None), notify: Notify::new(), unkept, refused }
    }

    pub fn is_about(&self, id: Id) -> bool {
        self.ids.contains(&id)
    }

    /// Waits for its end; `true` if the store has answered.
    pub async fn landing(&self) -> bool {
        loop {
            let notified = self.notify.notified();
            if let Some(answered) = self.landed.get() {
                return answered;
            }
            notified.await;
        }
    }

    fn land(&self, answered: bool) {
        self.landed.set(Some(answered));
        self.notify.notify_waiters();
    }
}

impl Shared {
    /// Sets out, in a flight for each call. All errands are known to their records until they are done.
    pub(super) fn launch(self: &Rc<Self>, errands: Vec<TokenFetch>) -> Vec<Rc<InFlightFetch>> {
        let mut calls: Vec<Vec<TokenFetch>> = Vec::new();
        for errand in errands {
            // A split counter is asked for by itself, shard by shard.
            let joins = |call: &&mut Vec<TokenFetch>| {
                let is_near = |first: &TokenFetch| self.store.is_one_call(&first.want.base, &errand.want.base);
                errand.shards == 1 && call.first().is_some_and(|first| first.shards == 1 && is_near(first))
            };
            match calls.iter_mut().find(joins) {
                Some(call) => call.push(errand),
                None => calls.push(vec![errand]),
            }
        }
        calls.into_iter().map(|call| self.launch_one(call)).collect()
    }

    fn launch_one(self: &Rc<Self>, call: Vec<TokenFetch>) -> Rc<InFlightFetch> {
        let flight = Rc::new(InFlightFetch::about(call.iter().map(|errand| id(errand.counter)).collect()));
        for id in &flight.ids {
            self.leases.known(*id, |record| record.flight = Some(Rc::clone(&flight)));
        }
        let (shared, under_way) = (Rc::clone(self), Rc::clone(&flight));
        tokio::task::spawn_local(async move {
            let answered = shared.fly(&call, &under_way).await;
            under_way.ids.iter().for_each(|id| _ = shared.leases.known(*id, |record| record.flight = None));
            under_way.land(answered);
            // Those who wait are woken now, and take what they need; nobody has a use for the rest.
            tokio::task::yield_now().await;
            let rest = under_way.unkept.take();
            let rest = rest.iter().filter(|unkept| unkept.tokens > 0);
            shared.give(rest.map(|unkept| unkept.origin.gift(unkept.tokens)).collect()).await;
        });
        flight
    }

    async fn fly(self: &Rc<Self>, call: &[TokenFetch], flight: &InFlightFetch) -> bool {
        if let [errand] = call
            && errand.shards > 1
        {
            return self.fly_to_shards(errand, flight).await;
        }
        let wants: Vec<CounterRequest> = call.iter().map(|errand| errand.want.clone()).collect();
        match self.take(&wants).await {
            Ok(Answer::Granted { took, .. } | Answer::Refused { took, .. }) => {
                call.iter().zip(took).for_each(|(errand, took)| self.put_by(errand, &errand.want, took, flight));
                true
            }
            Ok(Answer::OtherWindow { time_ms }) => self.follows(time_ms),
            Err(_reported) => false,
        }
    }

    /// Asks one shard after the other, from the one that had tokens the last time on, until there are enough.
    async fn fly_to_shards(self: &Rc<Self>, errand: &TokenFetch, flight: &InFlightFetch) -> bool {
        let (shards, whole) = (errand.shards, u64::from(errand.want.limit));
        let first = self.leases.known(id(errand.counter), |record| record.shard).unwrap_or(self.own_shard) % shards;
        let (mut missing, mut used_most) = (errand.want.need.max(1), 0);
        for i in 0..shards {
            let shard = (first + i) % shards;
            let part = part_of_shard(whole, shards, shard);
            let base = self.base(&errand.text, &errand.suffix, shard);
            // What a shard lacks, the next may have.
            let (limit, mut need) = (part as u32, missing.min(part));
            let took = loop {
                let want = CounterRequest {
                    base: Rc::clone(&base),
                    limit,
                    ceiling: part,
                    need,
                    least: 0,
                    ..errand.want.clone()
                };
                match self.take(std::slice::from_ref(&want)).await {
                    Ok(Answer::Granted { took, .. }) => break took,
                    // What is left of it is less than that.
                    Ok(Answer::Refused { took, .. }) => match took.first() {
                        Some(seen) if seen.used < part && part - seen.used < need => need = part - seen.used,
                        _ => break took,
                    },
                    Ok(Answer::OtherWindow { time_ms }) => return self.follows(time_ms),
                    Err(_reported) => return false,
                }
            };
            let want = CounterRequest { base, limit, ceiling: part, need, ..errand.want.clone() };
            let Some(took) = took.first().copied() else { return false };
            // What all of them have used is only known when all were asked; until then it is not told that nothing is left.
            used_most =
                took.used.saturating_mul(u64::from(shards)).clamp(used_most, whole.saturating_sub(1).max(used_most));
            self.leases.known(id(errand.counter), |record| record.shard = shard);
            self.put_by(errand, &want, CounterReply { used: used_most, ..took }, flight);
            missing = missing.saturating_sub(took.granted);
            if missing == 0 {
                return true;
            }
            if i + 1 == shards {
                self.table.set_known_usage(errand.counter, took.end_ms, errand.want.limit, self.clock.now().unix_ms);
                let all = CounterReply { used: whole, ..took };
                flight.refused.borrow_mut().push((id(errand.counter), all));
            }
        }
        true
    }

    /// Deposits what was handed out.
    fn put_by(self: &Rc<Self>, errand: &TokenFetch, want: &CounterRequest, took: CounterReply, flight: &InFlightFetch) {
        let (now_ms, id) = (self.clock.now().unix_ms, id(errand.counter));
        // Where nothing was taken, the store says what it knows.
        let known = self.known(errand.counter, took.end_ms, want.least, errand.generation);
        let has_forgotten = took.used < known;
        let used = took.used.max(known);
        self.hear(errand.counter, took.end_ms, used, now_ms);
        if want.need > 0 && took.granted == 0 && errand.shards == 1 {
            flight.refused.borrow_mut().push((id, CounterReply { used, ..took }));
        }
        let origin = want.origin(took);
        let former = self.leases.known(id, |record| {
            if !has_forgotten {
                record.generation = self.generation.get();
            }
            record.landed(took.granted, took.end_ms, want.need > 0);
            record.origin.replace(origin.clone())
        });
        if let Some(former) = former.flatten().filter(|former| former.end_ms < took.end_ms) {
            self.put_away(errand.counter, &former);
        }
        let Ok(tokens) = u32::try_from(took.granted) else { return };
        if tokens == 0 {
            return;
        }
        self.meter.fetched(took.granted);
        match self.table.deposit(errand.counter, took.end_ms, tokens, now_ms) {
            DepositResult::Stored => {}
            DepositResult::Full | DepositResult::Expired => {
                flight.unkept.borrow_mut().push(Unkept { id, tokens: took.granted, origin });
            }
        }
    }

    /// Takes away what is left of a window that has ended: it is worth nothing any more, unless what a window leaves
    /// belongs to the next.
    fn put_away(self: &Rc<Self>, counter: Counter, former: &RefundTarget) {
        let left = self.table.withdraw(counter, former.end_ms, u32::MAX);
        match former.kind {
            Kind::Plain => self.meter.expired(u64::from(left)),
            Kind::Grid | Kind::Floating if left > 0 => self.give_later(vec![former.gift(u64::from(left))]),
            Kind::Grid | Kind::Floating => {}
        }
    }

    /// One call, with what is learnt from it about the store and the time.
    pub(super) async fn take(self: &Rc<Self>, wants: &[CounterRequest]) -> Result<Answer, StoreError> {
        let began = self.clock.instant();
        let now_ms = self.clock.now().unix_ms;
        // The time may have been corrected since it was worked out what to ask for.
        if wants.iter().any(|want| want.at.is_ahead_of(now_ms)) {
            return Ok(Answer::OtherWindow { time_ms: now_ms });
        }
        // A server that is met anew may have forgotten what it was told, and what is asked here was worked out without that.
        let generation = self.generation.get();
        if let Some(want) = wants.first()
            && let Err(error) = self.store.ready(&want.base).await
        {
            self.failed(self.store.server_of(&want.base), &error);
            return Err(error);
        }
        if generation != 0 && self.store.generation() != generation {
            self.met(began);
            // What was counted without it is told first, so that it is not handed out again.
            let shared = Rc::clone(self);
            let arrears: Pin<Box<dyn Future<Output = ()>>> = Box::pin(async move { shared.report_arrears().await });
            arrears.await;
            return Ok(Answer::OtherWindow { time_ms: self.clock.now().unix_ms });
        }
        self.take_as_known(wants).await
    }

    /// As [`Shared::take`], by what is known now, of whichever server it meets.
    pub(super) async fn take_as_known(self: &Rc<Self>, wants: &[CounterRequest]) -> Result<Answer, StoreError> {
        let (began, now_ms) = (self.clock.instant(), self.clock.now().unix_ms);
        let server = wants.first().map_or(Server::ONLY, |want| self.store.server_of(&want.base));
        let answer = self.store.take(wants, now_ms).await;
        self.met(began);
        match &answer {
            Ok(Answer::Granted { time_ms, .. }) => self.answered(server, StoreOutcome::Granted, *time_ms, began),
            Ok(Answer::Refused { time_ms, .. }) => self.answered(server, StoreOutcome::Refused, *time_ms, began),
            Ok(Answer::OtherWindow { time_ms }) => self.answered(server, StoreOutcome::OtherWindow, *time_ms, began),
            Err(error) => self.failed(server, error),
        }
        answer
    }

    /// Gives tokens back, as far as the store can be reached; what can not be given back is lost until its window ends.
    pub(super) async fn give(self: &Rc<Self>, gifts: Vec<Refund>) {
        let mut calls: Vec<Vec<Refund>> = Vec::new();
        for gift in gifts {
            let joins = |call: &&mut Vec<Refund>| {
                let is_near = |first: &Refund| self.store.is_one_call(&first.base, &gift.base);
                call.len() < GIFTS_MAX && call.first().is_some_and(is_near)
            };
            match calls.last_mut().filter(joins) {
                Some(call) => call.push(gift),
                None => calls.push(vec![gift]),
            }
        }
        while calls.len() > 1 {
            let others = calls.split_off(calls.len().min(GIVES_TOGETHER));
            let give = |call| tokio::task::spawn_local(Rc::clone(self).give_one_call(call));
            let given: Vec<_> = std::mem::replace(&mut calls, others).into_iter().map(give).collect();
            for given in given {
                // One that failed has said so.
                drop(given.await);
            }
        }
        if let Some(call) = calls.pop() {
            Rc::clone(self).give_one_call(call).await;
        }
    }

    async fn give_one_call(self: Rc<Self>, gifts: Vec<Refund>) {
        let Some(first) = gifts.first() else { return };
        if self.is_beyond(&first.base) {
            self.debts.keep(gifts);
            return;
        }
        let began = self.clock.instant();
        match self.store.give(&gifts).await {
            Ok(returned) => {
                self.meter.returned(returned);
                self.meter.call_completed(StoreOutcome::GivenBack, self.clock.instant().duration_since(began));
            }
            Err(error) => self.failed(self.store.server_of(&first.base), &error),
        }
    }

    /// Returns what was fetched and is not used, or all.
    pub(super) async fn return_idle(self: &Rc<Self>, all: bool) {
        let now_ms = self.clock.now().unix_ms;
        let left = |counter| self.table.leased_tokens(counter, now_ms);
        // What can not be returned now may still be spent.
        let withdraw = |counter, origin: &RefundTarget| match self.is_beyond(&origin.base) {
            true => None,
            false => Some(self.table.withdraw(counter, origin.end_ms, u32::MAX)),
        };
        let idle = self.leases.idle(all, self.clock.instant(), left, withdraw);
        self.meter.outstanding(self.leases.outstanding(left));
        // A window that has ended takes nothing back, unless what it leaves belongs to the next.
        let (live, over): (Vec<_>, Vec<_>) =
            idle.into_iter().partition(|(origin, _)| origin.end_ms > now_ms || origin.kind != Kind::Plain);
        self.meter.expired(over.iter().map(|(_, tokens)| u64::from(*tokens)).sum());
        self.give(live.iter().map(|(origin, tokens)| origin.gift(u64::from(*tokens))).collect()).await;
    }

    /// Whether the gateway's time is the store's, now that the store has told it.
    pub(super) fn follows(&self, time_ms: u64) -> bool {
        self.clock.now().unix_ms.abs_diff(time_ms) < CLOCKS_APART_MS
    }

    pub(super) fn met(&self, began: Instant) {
        let generation = self.store.generation();
        if generation != self.generation.get() {
            let is_first = self.generation.replace(generation) == 0;
            if is_first {
                return;
            }
            let ago = self.clock.instant().duration_since(began);
            self.doubtful_ms.set(self.clock.now().unix_ms.saturating_sub(ago.as_millis() as u64));
        }
    }

    fn answered(&self, server: Server, outcome: StoreOutcome, time_ms: u64, began: Instant) {
        self.clock.follow(time_ms);
        self.breaker.answered(server);
        self.meter.call_completed(outcome, self.clock.instant().duration_since(began));
    }
}

/// A store whose time is further away than this is not followed.
const CLOCKS_APART_MS: u64 = 5000;
/// How many counters are given back to in one call, and how many calls are under way at once.
const GIFTS_MAX: usize = 256;
const GIVES_TOGETHER: usize = 32;
