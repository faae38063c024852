//! What a gateway does when a request comes, and when an answer does: shared/{inquiry,flight,place}.rs, without their waiting.

use transom_limiter::rule::Sharing;

use crate::gateway_counters::{House, Said};
use crate::scenario::{Mistake, Scene};
use crate::state::{Answer, Ask, COUNTERS, Call, Each, Request, Sent, Stage, State, Then, What, Window};

pub struct World {
    pub scene: Scene,
    pub house: House,
}

impl World {
    pub fn new(scene: Scene) -> World {
        World { scene, house: House::new(scene.limits, scene.sharing) }
    }

    pub fn is_exact(&self, counter: usize) -> bool {
        self.scene.sharing[counter] == Sharing::Exact
    }

    /// Decides a request as far as that goes without waiting.
    pub fn advance(&mut self, state: &mut State, at: usize, mut request: Request) {
        let gateway = &mut state.gateways[at];
        if self.scene.makes(Mistake::CarriesOver) {
            gateway.purse.iter_mut().for_each(|(window, _)| *window = gateway.window);
        }
        let window = gateway.window;
        match self.house.decide(gateway, request.kind, request.hand.map(|hand| hand.is_some())) {
            Said::Refused => self.refuse(state, at, &request, window),
            Said::Lacks(lacks) => {
                let under_way = COUNTERS
                    .into_iter()
                    .find(|counter| lacks[*counter] && state.calls.iter().any(|call| call.flies_for(at, *counter)));
                let first = COUNTERS.into_iter().find(|counter| lacks[*counter]);
                request.stage = Stage::Waits(under_way.or(first).expect("something lacks"));
                state.gateways[at].requests.push(request);
                if under_way.is_none() {
                    self.fetch(state, at, lacks, 1);
                }
            }
            Said::Paid => {
                for counter in COUNTERS {
                    let is_from_purse = request.kind[counter] && !self.is_exact(counter);
                    if is_from_purse && request.hand[counter].is_none() {
                        request.paid[counter] = Some(window);
                    }
                }
                let asked = COUNTERS.map(|counter| request.kind[counter] && self.is_exact(counter));
                if asked == [false; 2] {
                    self.admit(state, &request, at, [None; 2]);
                } else {
                    request.stage = Stage::Asks;
                    let id = request.id;
                    state.gateways[at].requests.push(request);
                    self.charge(state, at, id, asked, [false; 2], window);
                }
            }
        }
    }

    /// Sets out for tokens; where counters lie apart, one call after the other.
    pub fn fetch(&self, state: &mut State, at: usize, lacks: Each<bool>, need: u8) {
        let (counters, later) = self.split(lacks);
        let ask = self.ask(state, at, counters, state.gateways[at].window, (need, 2));
        let what = What::Fetch { ask, later, need };
        state.calls.push(Call { by: Some(at), what, stage: Sent::Sent });
    }

    fn charge(&self, state: &mut State, at: usize, request: u8, asked: Each<bool>, done: Each<bool>, window: Window) {
        let (counters, later) = self.split(asked);
        let ask = self.ask(state, at, counters, window, (1, 1));
        let what = What::Charge { request: Some(request), ask, later, done };
        state.calls.push(Call { by: Some(at), what, stage: Sent::Sent });
    }

    /// What one call can ask for, narrow before wide, and what comes in another.
    fn split(&self, counters: Each<bool>) -> (Each<bool>, Each<bool>) {
        match counters {
            [true, true] if !self.scene.together => ([true, false], [false, true]),
            counters => (counters, [false, false]),
        }
    }

    fn ask(&self, state: &State, at: usize, counters: Each<bool>, window: Window, (need, want): (u8, u8)) -> Ask {
        let gateway = &state.gateways[at];
        let is_told = !self.scene.makes(Mistake::ForgetsWithTheStore);
        let least = COUNTERS.map(|counter| match gateway.tally[counter] {
            Some((of, used)) if of == window && counters[counter] && gateway.stale[counter] && is_told => used,
            _ => 0,
        });
        let told = COUNTERS.map(|counter| match gateway.tally[counter] {
            Some((of, used)) if of == window && counters[counter] && self.scene.budget.forgets() => {
                used.saturating_sub(gateway.since[counter])
            }
            _ => 0,
        });
        Ask { counters, window, need, want, least, told }
    }

    pub fn admit(&self, state: &mut State, request: &Request, at: usize, charged: Each<Option<Window>>) {
        let mut all = [None; 2];
        for counter in COUNTERS.into_iter().filter(|counter| request.kind[*counter]) {
            let from = request.paid[counter].map(|window| (window, true));
            let from = from.or(charged[counter].or(request.hand[counter]).map(|window| (window, false)));
            // Who takes silence for a yes has paid nothing.
            let window = from.map_or(state.gateways[at].window, |(window, _)| window);
            state.ghost.admitted[usize::from(window)][counter] += 1;
            all[counter] = from;
        }
        state.gateways[at].paid = if state.budget.refunds > 0 { all } else { [None; 2] };
    }

    /// Refuses, and judges whether that was needless.
    pub fn refuse(&mut self, state: &mut State, at: usize, request: &Request, window: Window) {
        let limits = self.scene.limits;
        let asked = || COUNTERS.into_iter().filter(|counter| request.kind[*counter]);
        let admitted = |counter| state.ghost.admitted[usize::from(window)][counter];
        let is_bounded = |counter: usize| {
            let lost = state.ghost.lost[usize::from(window)][counter];
            let back = state.gateways[at].since[counter];
            admitted(counter) + state.outstanding(window, counter) + lost + back >= limits[counter]
        };
        // Refused although every counter has room: only if what it lacks lies somewhere, or came back since it was told.
        // A gateway that is behind may refuse in a window that is over; then there is no such window any more.
        let is_open = window >= state.store.window;
        if is_open && asked().all(|counter| admitted(counter) < limits[counter]) && !asked().any(is_bounded) {
            state.broken.get_or_insert(crate::NEEDLESS);
        }
        self.drop_all(state, at, request);
    }

    /// Gives back what a request has, that is not let through.
    pub fn drop_all(&mut self, state: &mut State, at: usize, request: &Request) {
        for counter in COUNTERS {
            if let Some(window) = request.paid[counter]
                && !self.house.refund(&mut state.gateways[at], counter, window)
            {
                state.lose(window, counter, 1);
            }
            if let Some(window) = request.hand[counter] {
                state.give(at, counter, window, 1, None);
            }
        }
    }

    /// What a fetch has brought is put by, and the next call of the flight sets out, or it has landed.
    pub fn fetched(&mut self, state: &mut State, at: usize, ask: Ask, later: Each<bool>, need: u8, told: Told) {
        let (mut unkept, mut goes_on) = (Vec::new(), true);
        match told.answer {
            Some(Answer::Granted(granted, used)) => {
                for counter in COUNTERS.into_iter().filter(|counter| ask.counters[*counter]) {
                    self.note(state, at, counter, ask, used[counter], told);
                    let tokens = granted[counter] * if self.scene.makes(Mistake::DepositsTwice) { 2 } else { 1 };
                    if tokens > 0 && !self.deposit(state, at, counter, ask.window, tokens) {
                        unkept.push((counter, tokens));
                    }
                }
            }
            Some(Answer::Refused(used)) => {
                for counter in COUNTERS.into_iter().filter(|counter| ask.counters[*counter]) {
                    self.note(state, at, counter, ask, used[counter], told);
                }
            }
            Some(Answer::OtherWindow(window)) => {
                state.gateways[at].window = state.gateways[at].window.max(window);
                goes_on = false;
            }
            Some(Answer::GivenBack) | None => goes_on = false,
        }
        if goes_on && later != [false; 2] {
            // What found no place is in nobody's hand yet.
            unkept.drain(..).for_each(|(counter, tokens)| state.give(at, counter, ask.window, tokens, None));
            let ask = self.ask(state, at, later, ask.window, (need, 2));
            let what = What::Fetch { ask, later: [false; 2], need };
            state.calls.push(Call { by: Some(at), what, stage: Sent::Sent });
            return;
        }
        self.land(state, at, ask, told.answer.is_some(), unkept);
    }

    /// Whoever waits for a flight goes on, with tokens in hand that found no place; without an answer he is let through by
    /// nobody.
    fn land(&mut self, state: &mut State, at: usize, ask: Ask, answered: bool, unkept: Vec<(usize, u8)>) {
        let waits = |request: &Request| match request.stage {
            Stage::Waits(counter) => !state.calls.iter().any(|call| call.flies_for(at, counter)),
            Stage::Ready | Stage::Asks => false,
        };
        let requests = std::mem::take(&mut state.gateways[at].requests);
        let (mut woken, rest): (Vec<Request>, Vec<Request>) = requests.into_iter().partition(waits);
        state.gateways[at].requests = rest;
        for (counter, mut tokens) in unkept {
            if let Some(first) = woken.first_mut()
                && answered
                && first.kind[counter]
                && first.hand[counter].is_none()
            {
                first.hand[counter] = Some(ask.window);
                tokens -= 1;
            }
            if tokens > 0 {
                state.give(at, counter, ask.window, tokens, None);
            }
        }
        for mut request in woken {
            request.stage = Stage::Ready;
            match answered {
                true => state.gateways[at].requests.push(request),
                false if self.scene.makes(Mistake::TakesSilenceForYes) => self.admit(state, &request, at, [None; 2]),
                false => self.drop_all(state, at, &request),
            }
        }
        state.gateways[at].requests.sort_by_key(|request| request.id);
    }

    fn deposit(&mut self, state: &mut State, at: usize, counter: usize, window: Window, tokens: u8) -> bool {
        let (of, left) = state.gateways[at].purse[counter];
        let kept = self.house.deposit(&mut state.gateways[at], counter, window, tokens);
        if kept && of != window {
            state.lose(of, counter, left);
        }
        kept
    }

    /// Remembers what the store says; where nothing was taken, it says what it knows, which may be less than it was told.
    fn note(&mut self, state: &mut State, at: usize, counter: usize, ask: Ask, used: u8, told: Told) {
        let gateway = &mut state.gateways[at];
        let has_forgotten = used < ask.least[counter];
        let is_noted = self.house.note(gateway, counter, ask.window, used.max(ask.least[counter]));
        if is_noted && !has_forgotten {
            gateway.since[counter] = told.since[counter];
            gateway.stale[counter] = told.stale;
        }
    }

    /// The store has decided a part of a request, or nobody knows.
    pub fn charged(
        &mut self,
        state: &mut State,
        at: usize,
        (request, ask, later, mut done): (Option<u8>, Ask, Each<bool>, Each<bool>),
        told: Told,
    ) {
        let then = match told.answer {
            Some(Answer::Granted(_, used)) => {
                for counter in COUNTERS.into_iter().filter(|counter| ask.counters[*counter]) {
                    done[counter] = true;
                    self.note(state, at, counter, ask, used[counter], told);
                }
                None
            }
            Some(Answer::Refused(used)) => {
                for counter in COUNTERS.into_iter().filter(|counter| ask.counters[*counter]) {
                    self.note(state, at, counter, ask, used[counter], told);
                }
                Some(Then::Refuse(ask.window))
            }
            Some(Answer::OtherWindow(window)) => {
                state.gateways[at].window = state.gateways[at].window.max(window);
                Some(Then::Again)
            }
            Some(Answer::GivenBack) | None => Some(Then::Unavailable),
        };
        match (then, request) {
            (None, _) if later != [false; 2] => {
                let next = self.ask(state, at, later, ask.window, (1, 1));
                let what = What::Charge { request, ask: next, later: [false; 2], done };
                state.calls.push(Call { by: Some(at), what, stage: Sent::Sent });
            }
            (None, Some(id)) => {
                let request = state.take_request(at, id);
                self.admit(state, &request, at, done.map(|done| done.then_some(ask.window)));
            }
            (None, None) if self.scene.makes(Mistake::LeavesCharges) => {}
            (None, None) => {
                for counter in COUNTERS.into_iter().filter(|counter| done[*counter]) {
                    state.give(at, counter, ask.window, 1, None);
                }
            }
            (Some(then), request) => {
                let then = request.map(|id| (id, then));
                let back = COUNTERS.into_iter().find(|counter| done[*counter]);
                match back.filter(|_| !self.scene.makes(Mistake::LeavesDoomedCharges)) {
                    Some(counter) => state.give(at, counter, ask.window, 1, then),
                    None => self.go_on(state, at, then),
                }
            }
        }
    }

    /// What comes of a request after what was charged for it is given back.
    pub fn go_on(&mut self, state: &mut State, at: usize, then: Option<(u8, Then)>) {
        let Some((id, then)) = then else { return };
        let mut request = state.take_request(at, id);
        match then {
            Then::Refuse(window) => self.refuse(state, at, &request, window),
            Then::Unavailable if self.scene.makes(Mistake::TakesSilenceForYes) => {
                self.admit(state, &request, at, [None; 2]);
            }
            Then::Unavailable => self.drop_all(state, at, &request),
            Then::Again => {
                let hand = std::mem::take(&mut request.hand);
                self.drop_all(state, at, &request);
                request = Request { hand, paid: [None; 2], stage: Stage::Ready, ..request };
                state.gateways[at].requests.push(request);
                state.gateways[at].requests.sort_by_key(|request| request.id);
            }
        }
    }
}

/// What an answer says, if there is one.
#[derive(Clone, Copy)]
pub struct Told {
    pub answer: Option<Answer>,
    pub since: Each<u8>,
    pub stale: bool,
}

impl Told {
    pub const NOTHING: Told = Told { answer: None, since: [0; 2], stale: false };
}

impl State {
    pub fn take_request(&mut self, at: usize, id: u8) -> Request {
        let requests = &mut self.gateways[at].requests;
        let position = requests.iter().position(|request| request.id == id).expect("it waits");
        requests.remove(position)
    }

    pub fn give(&mut self, at: usize, counter: usize, window: Window, tokens: u8, then: Option<(u8, Then)>) {
        let what = What::Give { counter, window, tokens, then };
        self.calls.push(Call { by: then.map(|_| at), what, stage: Sent::Sent });
    }

    /// Tokens that the store counts until their window ends, and nobody has.
    pub fn lose(&mut self, window: Window, counter: usize, tokens: u8) {
        if window >= self.store.window {
            self.ghost.lost[usize::from(window)][counter] += tokens;
        }
    }
}
