//! What a gateway does with a request and with a reply: the logic of `crates/store` (decisions, token fetches, exact
//! mode), without waiting.

use transom_limiter::rule::Sharing;

use crate::gateway_counters::{LocalCounters, LocalOutcome};
use crate::scenario::{Mistake, Scenario};
use crate::state::{
    AcquireArgs, AfterRefund, COUNTERS, Call, CallKind, CallStage, Each, Reply, Request, Stage, State, Window,
};

pub struct Model {
    pub scenario: Scenario,
    pub local: LocalCounters,
}

impl Model {
    pub fn new(scenario: Scenario) -> Model {
        Model { scenario, local: LocalCounters::new(&scenario) }
    }

    pub fn is_exact(&self, counter: usize) -> bool {
        self.scenario.sharing[counter] == Sharing::Exact
    }

    /// Decides a request, as far as that is possible without waiting.
    pub fn advance(&mut self, state: &mut State, at: usize, mut request: Request) {
        let gateway = &mut state.gateways[at];
        if self.scenario.has_mistake(Mistake::CarryTokensOver) {
            gateway.lease.iter_mut().for_each(|(window, _)| *window = gateway.window);
        }
        let window = gateway.window;
        match self.local.decide(gateway, request.counters, request.in_hand.map(|in_hand| in_hand.is_some())) {
            LocalOutcome::Refused => self.refuse(state, at, &request, window),
            LocalOutcome::MissingTokens(missing) => {
                let in_flight = COUNTERS
                    .into_iter()
                    .find(|counter| missing[*counter] && state.calls.iter().any(|call| call.fetches_for(at, *counter)));
                let first = COUNTERS.into_iter().find(|counter| missing[*counter]);
                request.stage = Stage::WaitsForTokens(in_flight.or(first).expect("at least one counter lacks tokens"));
                state.gateways[at].requests.push(request);
                if in_flight.is_none() {
                    self.fetch(state, at, missing, 1);
                }
            }
            LocalOutcome::Charged => {
                for counter in COUNTERS {
                    let is_from_lease = request.counters[counter] && !self.is_exact(counter);
                    if is_from_lease && request.in_hand[counter].is_none() {
                        request.charged[counter] = Some(window);
                    }
                }
                let requested = COUNTERS.map(|counter| request.counters[counter] && self.is_exact(counter));
                if requested == [false; 2] {
                    self.admit(state, &request, at, [None; 2]);
                } else {
                    request.stage = Stage::WaitsForStore;
                    let id = request.id;
                    state.gateways[at].requests.push(request);
                    self.charge(state, at, id, requested, [None; 2], window);
                }
            }
        }
    }

    /// Fetches tokens. If the counters are in separate slots, one call follows the other.
    pub fn fetch(&self, state: &mut State, at: usize, missing: Each<bool>, need: u8) {
        let (counters, later) = self.split_call(missing);
        let args = self.acquire_args(state, at, counters, state.gateways[at].window, (need, 2));
        let kind = CallKind::Fetch { args, later, need };
        state.calls.push(Call { by: Some(at), kind, stage: CallStage::Sent });
    }

    fn charge(
        &self,
        state: &mut State,
        at: usize,
        request: u8,
        requested: Each<bool>,
        done: Each<Option<Window>>,
        window: Window,
    ) {
        let (counters, later) = self.split_call(requested);
        let args = self.acquire_args(state, at, counters, window, (1, 1));
        let kind = CallKind::Charge { request: Some(request), args, later, done };
        state.calls.push(Call { by: Some(at), kind, stage: CallStage::Sent });
    }

    /// The counters of the first call, narrow before wide, and those of a second one.
    fn split_call(&self, counters: Each<bool>) -> (Each<bool>, Each<bool>) {
        match counters {
            [true, true] if !self.scenario.same_slot => ([true, false], [false, true]),
            counters => (counters, [false, false]),
        }
    }

    fn acquire_args(
        &self,
        state: &State,
        at: usize,
        counters: Each<bool>,
        window: Window,
        (need, want): (u8, u8),
    ) -> AcquireArgs {
        let gateway = &state.gateways[at];
        let is_of = |known: Window| known == window || self.scenario.is_sliding;
        let reports_usage = !self.scenario.has_mistake(Mistake::ForgetKnownUsage);
        let used_min = COUNTERS.map(|counter| match gateway.known_usage[counter] {
            Some((of, used)) if is_of(of) && counters[counter] && gateway.stale[counter] && reports_usage => used,
            _ => 0,
        });
        let known = COUNTERS.map(|counter| match gateway.known_usage[counter] {
            Some((of, used)) if is_of(of) && counters[counter] && self.scenario.budget.forgets() => {
                used.saturating_sub(gateway.refunded_since[counter])
            }
            _ => 0,
        });
        AcquireArgs { counters, window, need, want, used_min, known }
    }

    pub fn admit(&self, state: &mut State, request: &Request, at: usize, charged: Each<Option<Window>>) {
        let mut all = [None; 2];
        for counter in COUNTERS.into_iter().filter(|counter| request.counters[*counter]) {
            let from = request.charged[counter].map(|window| (window, true));
            let from = from.or(charged[counter].or(request.in_hand[counter]).map(|window| (window, false)));
            // With the mistake `AdmitWithoutReply`, a request is admitted that was not charged.
            let window = from.map_or(state.gateways[at].window, |(window, _)| window);
            state.ghost.admitted[usize::from(window)][counter] += 1;
            all[counter] = from;
        }
        state.gateways[at].last_charges = if state.budget.refunds > 0 { all } else { [None; 2] };
    }

    /// Refuses a request, and checks that the refusal was necessary.
    pub fn refuse(&mut self, state: &mut State, at: usize, request: &Request, window: Window) {
        let limits = self.scenario.limits;
        let requested = || COUNTERS.into_iter().filter(|counter| request.counters[*counter]);
        let admitted = |counter| state.store.counted(&state.ghost.admitted, window, counter);
        let is_bounded = |counter: usize| {
            let lost = state.store.counted(&state.ghost.lost, window, counter);
            let refunded = state.gateways[at].refunded_since[counter];
            admitted(counter) + state.counted_outstanding(window, counter) + lost + refunded >= limits[counter]
        };
        // A request may be refused although all counters have tokens left only if the missing tokens are outstanding,
        // or were refunded since the gateway learned the usage. In a window that has ended, a gateway whose clock is
        // behind may refuse any request.
        let is_open = state.store.counts(window);
        if is_open && requested().all(|counter| admitted(counter) < limits[counter]) && !requested().any(is_bounded) {
            state.broken.get_or_insert(crate::REFUSALS_BOUNDED);
        }
        self.refund_all(state, at, request);
    }

    /// Refunds all charges of a request that is not admitted.
    pub fn refund_all(&mut self, state: &mut State, at: usize, request: &Request) {
        for counter in COUNTERS {
            if let Some(window) = request.charged[counter]
                && !self.local.refund(&mut state.gateways[at], counter, window)
            {
                state.count_lost(window, counter, 1);
            }
            if let Some(window) = request.in_hand[counter] {
                state.send_refund(at, counter, window, 1, None);
            }
        }
    }

    /// Deposits fetched tokens. Then the next call of the fetch is sent, or the fetch is complete.
    pub fn on_fetched(
        &mut self,
        state: &mut State,
        at: usize,
        args: AcquireArgs,
        later: Each<bool>,
        need: u8,
        result: CallResult,
    ) {
        let (mut not_stored, mut continues) = (Vec::new(), true);
        self.follow_store(state, at, args, result.reply);
        match result.reply {
            Some(Reply::Granted(granted, used)) => {
                for counter in COUNTERS.into_iter().filter(|counter| args.counters[*counter]) {
                    self.record_usage(state, at, counter, args, used[counter], result);
                    let tokens =
                        granted[counter] * if self.scenario.has_mistake(Mistake::DepositTwice) { 2 } else { 1 };
                    if tokens > 0 && !self.deposit(state, at, counter, args.window, tokens) {
                        not_stored.push((counter, tokens));
                    }
                }
            }
            Some(Reply::Refused(used)) => {
                for counter in COUNTERS.into_iter().filter(|counter| args.counters[*counter]) {
                    self.record_usage(state, at, counter, args, used[counter], result);
                }
            }
            Some(Reply::OtherWindow(window)) => {
                state.gateways[at].window = state.gateways[at].window.max(window);
                continues = false;
            }
            Some(Reply::Refunded) | None => continues = false,
        }
        if continues && later != [false; 2] {
            // Waiting requests get the tokens that were not stored when the fetch is complete.
            not_stored
                .drain(..)
                .for_each(|(counter, tokens)| state.send_refund(at, counter, args.window, tokens, None));
            let args = self.acquire_args(state, at, later, args.window, (need, 2));
            let kind = CallKind::Fetch { args, later: [false; 2], need };
            state.calls.push(Call { by: Some(at), kind, stage: CallStage::Sent });
            return;
        }
        self.complete_fetch(state, at, args, result.reply, not_stored);
    }

    /// The reply names the segment in which the store counts, and the time.
    fn follow_store(&self, state: &mut State, at: usize, args: AcquireArgs, reply: Option<Reply>) {
        if self.scenario.is_sliding && reply.is_some() {
            state.gateways[at].window = state.gateways[at].window.max(args.window);
        }
    }

    /// Continues the requests that wait for a fetch, with tokens that were not stored. Without a reply they are
    /// refused, and also by a refusal of the store that the known usage does not tell, because windows slide.
    fn complete_fetch(
        &mut self,
        state: &mut State,
        at: usize,
        args: AcquireArgs,
        reply: Option<Reply>,
        not_stored: Vec<(usize, u8)>,
    ) {
        let succeeded = reply.is_some();
        let Scenario { limits, is_sliding, .. } = self.scenario;
        let is_full = |request: &Request| {
            let is_missing = |counter: usize| request.counters[counter] && request.in_hand[counter].is_none();
            let fetched = || COUNTERS.into_iter().filter(|counter| args.counters[*counter] && is_missing(*counter));
            is_sliding
                && matches!(reply, Some(Reply::Refused(used)) if fetched().any(|counter| used[counter] >= limits[counter]))
        };
        let waits = |request: &Request| match request.stage {
            Stage::WaitsForTokens(counter) => !state.calls.iter().any(|call| call.fetches_for(at, counter)),
            Stage::Ready | Stage::WaitsForStore => false,
        };
        let requests = std::mem::take(&mut state.gateways[at].requests);
        let (mut waiting, rest): (Vec<Request>, Vec<Request>) = requests.into_iter().partition(waits);
        state.gateways[at].requests = rest;
        for (counter, mut tokens) in not_stored {
            if let Some(first) = waiting.first_mut()
                && succeeded
                && first.counters[counter]
                && first.in_hand[counter].is_none()
            {
                first.in_hand[counter] = Some(args.window);
                tokens -= 1;
            }
            if tokens > 0 {
                state.send_refund(at, counter, args.window, tokens, None);
            }
        }
        let (refused, waiting): (Vec<Request>, Vec<Request>) = waiting.into_iter().partition(is_full);
        for mut request in waiting {
            request.stage = Stage::Ready;
            match succeeded {
                true => state.gateways[at].requests.push(request),
                false if self.scenario.has_mistake(Mistake::AdmitWithoutReply) => {
                    self.admit(state, &request, at, [None; 2])
                }
                false => self.refund_all(state, at, &request),
            }
        }
        state.gateways[at].requests.sort_by_key(|request| request.id);
        refused.iter().for_each(|request| self.refuse(state, at, request, args.window));
    }

    fn deposit(&mut self, state: &mut State, at: usize, counter: usize, window: Window, tokens: u8) -> bool {
        let (of, left) = state.gateways[at].lease[counter];
        // Tokens that are left of a segment still count, and are refunded.
        if self.scenario.is_sliding && of < window {
            self.return_idle(state, at, counter);
        }
        let is_stored = self.local.deposit(&mut state.gateways[at], counter, window, tokens);
        if is_stored && of != window && !self.scenario.is_sliding {
            state.count_lost(of, counter, left);
        }
        is_stored
    }

    /// Records the usage reported by the store. A refusal may report less than the gateway knows.
    fn record_usage(
        &mut self,
        state: &mut State,
        at: usize,
        counter: usize,
        args: AcquireArgs,
        used: u8,
        result: CallResult,
    ) {
        let gateway = &mut state.gateways[at];
        let has_forgotten = used < args.used_min[counter];
        let is_noted = self.local.set_known_usage(gateway, counter, args.window, used.max(args.used_min[counter]));
        if is_noted && !has_forgotten {
            gateway.refunded_since[counter] = result.refunded_since[counter];
            gateway.stale[counter] = result.stale;
        }
    }

    /// The store has decided a part of a request, or the result is unknown.
    pub fn on_charged(
        &mut self,
        state: &mut State,
        at: usize,
        (request, args, later, mut done): (Option<u8>, AcquireArgs, Each<bool>, Each<Option<Window>>),
        result: CallResult,
    ) {
        self.follow_store(state, at, args, result.reply);
        let after = match result.reply {
            Some(Reply::Granted(_, used)) => {
                for counter in COUNTERS.into_iter().filter(|counter| args.counters[*counter]) {
                    done[counter] = Some(args.window);
                    self.record_usage(state, at, counter, args, used[counter], result);
                }
                None
            }
            Some(Reply::Refused(used)) => {
                for counter in COUNTERS.into_iter().filter(|counter| args.counters[*counter]) {
                    self.record_usage(state, at, counter, args, used[counter], result);
                }
                Some(AfterRefund::Refuse(args.window))
            }
            Some(Reply::OtherWindow(window)) => {
                state.gateways[at].window = state.gateways[at].window.max(window);
                Some(AfterRefund::Retry)
            }
            Some(Reply::Refunded) | None => Some(AfterRefund::Unavailable),
        };
        match (after, request) {
            (None, _) if later != [false; 2] => {
                let next = self.acquire_args(state, at, later, args.window, (1, 1));
                let kind = CallKind::Charge { request, args: next, later: [false; 2], done };
                state.calls.push(Call { by: Some(at), kind, stage: CallStage::Sent });
            }
            (None, Some(id)) => {
                let request = state.take_request(at, id);
                self.admit(state, &request, at, done);
            }
            (None, None) if self.scenario.has_mistake(Mistake::KeepChargesOfCancelled) => {}
            (None, None) => {
                for (counter, window) in COUNTERS.into_iter().zip(done) {
                    window.into_iter().for_each(|window| state.send_refund(at, counter, window, 1, None));
                }
            }
            (Some(after), request) => {
                let after = request.map(|id| (id, after));
                let charged = COUNTERS.into_iter().find_map(|counter| Some((counter, done[counter]?)));
                match charged.filter(|_| !self.scenario.has_mistake(Mistake::KeepChargesOfRefused)) {
                    Some((counter, window)) => state.send_refund(at, counter, window, 1, after),
                    None => self.continue_request(state, at, after),
                }
            }
        }
    }

    /// Continues a request after its charges were refunded.
    pub fn continue_request(&mut self, state: &mut State, at: usize, after: Option<(u8, AfterRefund)>) {
        let Some((id, after)) = after else { return };
        let mut request = state.take_request(at, id);
        match after {
            AfterRefund::Refuse(window) => self.refuse(state, at, &request, window),
            AfterRefund::Unavailable if self.scenario.has_mistake(Mistake::AdmitWithoutReply) => {
                self.admit(state, &request, at, [None; 2]);
            }
            AfterRefund::Unavailable => self.refund_all(state, at, &request),
            AfterRefund::Retry => {
                let in_hand = std::mem::take(&mut request.in_hand);
                self.refund_all(state, at, &request);
                request = Request { in_hand, charged: [None; 2], stage: Stage::Ready, ..request };
                state.gateways[at].requests.push(request);
                state.gateways[at].requests.sort_by_key(|request| request.id);
            }
        }
    }
}

/// The result of a call.
#[derive(Clone, Copy)]
pub struct CallResult {
    pub reply: Option<Reply>,
    pub refunded_since: Each<u8>,
    pub stale: bool,
}

impl CallResult {
    pub const UNKNOWN: CallResult = CallResult { reply: None, refunded_since: [0; 2], stale: false };
}

impl State {
    pub fn take_request(&mut self, at: usize, id: u8) -> Request {
        let requests = &mut self.gateways[at].requests;
        let position = requests.iter().position(|request| request.id == id).expect("the request waits");
        requests.remove(position)
    }

    pub fn send_refund(
        &mut self,
        at: usize,
        counter: usize,
        window: Window,
        tokens: u8,
        after: Option<(u8, AfterRefund)>,
    ) {
        let kind = CallKind::Refund { counter, window, tokens, after };
        self.calls.push(Call { by: after.map(|_| at), kind, stage: CallStage::Sent });
    }

    /// Records that one token of each window is lost.
    pub fn count_all_lost(&mut self, charged: Each<Option<Window>>) {
        for (counter, window) in COUNTERS.into_iter().zip(charged) {
            window.into_iter().for_each(|window| self.count_lost(window, counter, 1));
        }
    }

    /// Records lost tokens: the store counts them until their window ends, and no gateway can spend them.
    pub fn count_lost(&mut self, window: Window, counter: usize, tokens: u8) {
        if self.store.counts(window) {
            self.ghost.lost[usize::from(window)][counter] += tokens;
        }
    }
}
