//! Every possible next step: request, call, reply, loss, kill, failover, and end of a window.

use crate::gateway::{Told, World};
use crate::scenario::Mistake;
use crate::state::{
    Answer, COUNTERS, Call, Each, GATEWAYS, Gateway, NARROW, Request, Sent, Stage, State, WIDE, What, Windows,
};

/// What a step is called in a trace: what happens, to which gateway or call, and to which counter.
pub type Label = (&'static str, usize, usize);

/// One in so many of what is left is handed out beyond what is needed. The gateway's is the first; with the other the few
/// tokens there are lie in purses more often.
const PARTS: [u8; 2] = [8, 1];
/// More than any limit; beyond that it makes no difference.
const SINCE_MAX: u8 = 4;

struct Next<'a> {
    state: &'a State,
    all: Vec<(Label, State)>,
}

impl Next<'_> {
    fn step(&mut self, label: Label, change: impl FnOnce(&mut State)) {
        let mut next = self.state.clone();
        change(&mut next);
        next.normalize();
        self.all.push((label, next));
    }
}

impl World {
    pub fn steps(&mut self, state: &State) -> Vec<(Label, State)> {
        let mut next = Next { state, all: Vec::new() };
        for at in 0..GATEWAYS {
            self.requests(&mut next, at);
            self.background(&mut next, at);
        }
        for i in 0..state.calls.len() {
            self.calls(&mut next, i);
        }
        self.disasters(&mut next);
        next.all
    }

    fn requests(&mut self, next: &mut Next<'_>, at: usize) {
        let state = next.state;
        if state.budget.requests > 0 {
            for kind in self.scene.kinds.iter().copied() {
                next.step(("a request comes", at, usize::from(kind[WIDE]) * 2 + usize::from(kind[NARROW])), |state| {
                    state.budget.requests -= 1;
                    let id = state.gateways[at].free_id();
                    let request = Request { id, kind, stage: Stage::Ready, hand: [None; 2], paid: [None; 2] };
                    self.advance(state, at, request);
                });
            }
        }
        for request in &state.gateways[at].requests {
            let id = request.id;
            if request.stage == Stage::Ready {
                next.step(("a request goes on", at, usize::from(id)), |state| {
                    let request = state.take_request(at, id);
                    self.advance(state, at, request);
                });
            } else if state.budget.impatient > 0 {
                next.step(("a request has waited too long", at, usize::from(id)), |state| {
                    state.budget.impatient -= 1;
                    let request = state.take_request(at, id);
                    self.drop_all(state, at, &request);
                    state.calls.iter_mut().for_each(|call| call.leave(at, id));
                });
            }
        }
        if state.budget.refunds > 0 && state.gateways[at].paid != [None; 2] {
            next.step(("what was paid is given back", at, 0), |state| self.refund(state, at));
        }
    }

    fn refund(&mut self, state: &mut State, at: usize) {
        state.budget.refunds -= 1;
        for counter in COUNTERS {
            let Some((window, is_from_purse)) = state.gateways[at].paid[counter] else { continue };
            let is_back = !is_from_purse || self.house.refund(&mut state.gateways[at], counter, window);
            state.ghost.admitted[usize::from(window)][counter] -= u8::from(is_back);
            if !is_from_purse {
                state.give(at, counter, window, 1, None);
            }
        }
        state.gateways.iter_mut().for_each(|gateway| gateway.paid = [None; 2]);
    }

    fn background(&mut self, next: &mut Next<'_>, at: usize) {
        let state = next.state;
        for counter in COUNTERS {
            if self.is_exact(counter) || state.calls.iter().any(|call| call.flies_for(at, counter)) {
                continue;
            }
            if state.budget.background > 0 {
                next.step(("more is fetched in the background", at, counter), |state| {
                    state.budget.background -= 1;
                    self.fetch(state, at, COUNTERS.map(|other| other == counter), 0);
                });
            }
            let (_, tokens) = state.gateways[at].purse[counter];
            if tokens > 0 {
                next.step(("what lies idle goes back", at, counter), |state| self.return_idle(state, at, counter));
            }
        }
    }

    pub fn return_idle(&mut self, state: &mut State, at: usize, counter: usize) {
        let (window, left) = state.gateways[at].purse[counter];
        let tokens = match self.scene.makes(Mistake::GivesWhatItKeeps) {
            true => left,
            false => self.house.withdraw(&mut state.gateways[at], counter, window),
        };
        let to = if self.scene.makes(Mistake::GivesToTheNextWindow) { state.store.window } else { window };
        if tokens > 0 {
            state.give(at, counter, to, tokens, None);
        }
    }

    fn calls(&mut self, next: &mut Next<'_>, i: usize) {
        let state = next.state;
        let call = &state.calls[i];
        match &call.stage {
            Sent::Sent => {
                let parts = if matches!(call.what, What::Fetch { .. }) { &PARTS[..] } else { &PARTS[..1] };
                for part in parts {
                    next.step(("the store executes a call", i, usize::from(*part)), |state| {
                        self.execute(state, i, *part);
                    });
                }
                if state.budget.losses > 0 {
                    next.step(("a call is lost", i, 0), |state| {
                        state.budget.losses -= 1;
                        self.fail(state, i);
                    });
                }
            }
            Sent::Executed { .. } => {
                next.step(("an answer arrives", i, 0), |state| self.answer(state, i));
                if state.budget.losses > 0 {
                    next.step(("an answer is lost", i, 0), |state| {
                        state.budget.losses -= 1;
                        self.fail(state, i);
                    });
                }
            }
        }
    }

    pub fn execute(&mut self, state: &mut State, i: usize, part: u8) {
        let together = self.scene.together;
        let mut call = state.calls[i].clone();
        let answer = match &call.what {
            What::Fetch { ask, .. } | What::Charge { ask, .. } => {
                let before = state.store.used;
                let answer = state.store.take(ask, self.scene.limits, part, together);
                state.raised(before, &answer, ask.window);
                state.knows_what_was_told(&call, ask.window, before);
                answer
            }
            What::Give { counter, window, tokens, .. } => {
                let back = state.store.give(*window, *counter, *tokens, together);
                if *window >= state.store.window {
                    let forgotten = &mut state.ghost.forgotten[usize::from(*window)][*counter];
                    *forgotten = forgotten.saturating_sub(tokens - back);
                }
                // Also what the store can not take, because it has forgotten them or their window is over.
                state.came_back(*counter, *tokens);
                Answer::GivenBack
            }
        };
        let is_heard = match call.what {
            What::Give { then, .. } => then.is_some() || self.scene.makes(Mistake::GivesAgain),
            What::Fetch { .. } | What::Charge { .. } => call.by.is_some(),
        };
        call.stage = Sent::Executed { answer, since: [0; 2], stale: false };
        state.calls[i] = call;
        if !is_heard {
            self.fail(state, i);
        }
    }

    /// Nobody will ever hear what came of it; the gateway, if there is one, hears that.
    fn fail(&mut self, state: &mut State, i: usize) {
        let Call { by, what, stage } = state.calls.remove(i);
        if let (What::Fetch { ask, .. } | What::Charge { ask, .. }, Sent::Executed { answer, .. }) = (&what, &stage)
            && let Answer::Granted(granted, _) = answer
        {
            COUNTERS.into_iter().for_each(|counter| state.lose(ask.window, counter, granted[counter]));
        }
        let is_unknown = matches!(stage, Sent::Executed { .. });
        if let What::Give { counter, window, tokens, .. } = &what
            && !is_unknown
        {
            state.lose(*window, *counter, *tokens);
        }
        let again = match what {
            What::Fetch { .. } | What::Charge { .. } => self.scene.makes(Mistake::FetchesAgain),
            What::Give { .. } => self.scene.makes(Mistake::GivesAgain),
        };
        if again {
            state.ghost.counted_twice += u8::from(is_unknown);
            state.calls.push(Call { by, what, stage: Sent::Sent });
            return;
        }
        let Some(at) = by else {
            // What was charged by calls before is nobody's, too.
            if let What::Charge { ask, done, .. } = &what {
                COUNTERS.into_iter().for_each(|counter| state.lose(ask.window, counter, u8::from(done[counter])));
            }
            return;
        };
        self.told(state, at, what, Told::NOTHING);
    }

    pub fn answer(&mut self, state: &mut State, i: usize) {
        let Call { by, what, stage } = state.calls.remove(i);
        let (Some(at), Sent::Executed { answer, since, stale }) = (by, stage) else { return };
        self.told(state, at, what, Told { answer: Some(answer), since, stale });
    }

    fn told(&mut self, state: &mut State, at: usize, what: What, told: Told) {
        match what {
            What::Fetch { ask, later, need } => self.fetched(state, at, ask, later, need, told),
            What::Charge { request, ask, later, done } => self.charged(state, at, (request, ask, later, done), told),
            What::Give { then, .. } => self.go_on(state, at, then),
        }
    }

    fn disasters(&mut self, next: &mut Next<'_>) {
        let budget = next.state.budget;
        if budget.kills > 0 {
            for at in 0..GATEWAYS {
                next.step(("a gateway is killed", at, 0), |state| {
                    state.budget.kills -= 1;
                    state.kill(at);
                });
            }
        }
        let servers = if self.scene.together { &[[true, true]][..] } else { &[[true, false], [false, true]][..] };
        for of in servers {
            let (narrow, wide) = (usize::from(of[NARROW]), usize::from(of[WIDE]));
            if budget.failovers > 0 {
                next.step(("a replica takes over", narrow, wide), |state| {
                    state.budget.failovers -= 1;
                    self.fail_over(state, *of);
                });
            }
            if budget.restarts > 0 {
                next.step(("a server starts again, empty", narrow, wide), |state| {
                    state.budget.restarts -= 1;
                    for counter in COUNTERS.into_iter().filter(|counter| of[*counter]) {
                        state.store.before.iter_mut().for_each(|window| window[counter] = 0);
                    }
                    self.fail_over(state, *of);
                });
            }
        }
        if budget.resets > 0 {
            for (at, counter) in [(0, NARROW), (0, WIDE), (1, NARROW), (1, WIDE)] {
                next.step(("a key is reset", at, counter), |state| {
                    state.budget.resets -= 1;
                    self.reset(state, at, counter);
                });
            }
        }
        if budget.windows > 0 {
            if next.state.store.window == 0 {
                next.step(("a window ends, by the store's clock", 0, 0), |state| {
                    state.store.turn();
                    state.ghost.lost[0] = [0; 2];
                });
            }
            for at in 0..GATEWAYS {
                if next.state.gateways[at].window == 0 {
                    next.step(("a window ends, by a gateway's clock", at, 0), |state| state.gateways[at].window = 1);
                }
            }
        }
    }

    /// Another server goes on with what it knows. What was sent to the first and not executed never will be.
    fn fail_over(&mut self, state: &mut State, of: Each<bool>) {
        for counter in COUNTERS.into_iter().filter(|counter| of[*counter]) {
            for window in 0..2 {
                let (used, before) = (state.store.used[window][counter], state.store.before[window][counter]);
                state.ghost.forgotten[window][counter] += used.saturating_sub(before);
                state.ghost.lost[window][counter] += before.saturating_sub(used);
                state.store.used[window][counter] = before;
            }
            state.gateways.iter_mut().for_each(|gateway| gateway.stale[counter] = gateway.tally[counter].is_some());
        }
        for call in &mut state.calls {
            if let Sent::Executed { stale, .. } = &mut call.stage {
                *stale |= call.what.counters().into_iter().zip(of).any(|(is, of)| is && of);
            }
        }
        let is_on_its_way =
            |call: &Call| call.stage == Sent::Sent && call.what.counters().into_iter().zip(of).any(|(is, of)| is && of);
        let doomed: Vec<Call> = state.calls.iter().filter(|call| is_on_its_way(call)).cloned().collect();
        for call in doomed {
            if let Some(i) = state.calls.iter().position(|other| *other == call) {
                self.fail(state, i);
            }
        }
    }

    /// The key is forgotten in the store, and at the gateway that was told to.
    fn reset(&mut self, state: &mut State, at: usize, counter: usize) {
        let window = state.gateways[at].window;
        self.house.withdraw(&mut state.gateways[at], counter, window);
        self.house.note(&mut state.gateways[at], counter, window, 0);
        state.gateways[at].since[counter] = 0;
        let used = state.store.used[usize::from(window)][counter];
        state.store.used[usize::from(window)][counter] = 0;
        state.store.before[usize::from(window)][counter] = 0;
        state.came_back(counter, used);
        let ghost = &state.ghost;
        let counted = ghost.admitted[usize::from(window)][counter] + ghost.lost[usize::from(window)][counter];
        let forgotten = counted + state.outstanding(window, counter);
        state.ghost.forgotten[usize::from(window)][counter] = forgotten;
    }
}

impl State {
    /// Makes states alike that differ in nothing that matters: equal calls are as good as one another, whatever their order, and
    /// so are gateways; and some things are never looked at again.
    fn normalize(&mut self) {
        for gateway in &mut self.gateways {
            for counter in COUNTERS {
                let is_over = |window: u8| window < gateway.window;
                if is_over(gateway.purse[counter].0) && gateway.purse[counter].0 < self.store.window {
                    gateway.purse[counter] = (0, 0);
                }
                if gateway.tally[counter].is_none_or(|(window, _)| is_over(window)) {
                    (gateway.tally[counter], gateway.since[counter], gateway.stale[counter]) = (None, 0, false);
                }
            }
        }
        if self.budget.failovers == 0 {
            self.store.before = self.store.used;
        }
        if self.gateways[1] < self.gateways[0] {
            self.gateways.swap(0, 1);
            self.calls.iter_mut().for_each(|call| call.by = call.by.map(|at| 1 - at));
        }
        self.calls.sort_unstable();
    }

    /// Those who were told before have not heard of it.
    fn came_back(&mut self, counter: usize, tokens: u8) {
        let more = |since: &mut u8| *since = (*since + tokens).min(SINCE_MAX);
        self.gateways.iter_mut().for_each(|gateway| more(&mut gateway.since[counter]));
        for call in &mut self.calls {
            let is_about = call.what.counters()[counter];
            match (&mut call.stage, &mut call.what) {
                (Sent::Executed { since, .. }, _) if is_about => more(&mut since[counter]),
                (Sent::Sent, What::Fetch { ask, .. } | What::Charge { ask, .. }) => {
                    ask.told[counter] = ask.told[counter].saturating_sub(tokens);
                }
                _ => {}
            }
        }
    }

    /// What the store counts from now on because it was told so, and did not know.
    fn raised(&mut self, before: Windows, answer: &Answer, window: u8) {
        if let Answer::Granted(granted, _) = answer {
            for counter in COUNTERS.into_iter().filter(|counter| granted[*counter] > 0) {
                let used = self.store.used[usize::from(window)][counter];
                let raised = used - granted[counter] - before[usize::from(window)][counter];
                let forgotten = &mut self.ghost.forgotten[usize::from(window)][counter];
                let remembered = raised.min(*forgotten);
                *forgotten -= remembered;
                self.ghost.lost[usize::from(window)][counter] += raised - remembered;
            }
        }
    }

    /// What a gateway was told is not handed out to it once more, but for what came back since.
    fn knows_what_was_told(&mut self, call: &Call, window: u8, before: Windows) {
        let (Some(_), What::Fetch { ask, .. } | What::Charge { ask, .. }) = (call.by, &call.what) else { return };
        for counter in COUNTERS.into_iter().filter(|counter| ask.counters[*counter]) {
            let known = before[usize::from(window)][counter].max(ask.least[counter]);
            if ask.window >= self.store.window && known < ask.told[counter] {
                self.broken.get_or_insert(crate::REMEMBERED);
            }
        }
    }

    /// Its purses, and all that waits there, are gone. What is on its way may still be executed.
    fn kill(&mut self, at: usize) {
        let next = Gateway { window: self.gateways[at].window, ..Gateway::default() };
        let gateway = std::mem::replace(&mut self.gateways[at], next);
        for counter in COUNTERS {
            self.lose(gateway.purse[counter].0, counter, gateway.purse[counter].1);
            for request in &gateway.requests {
                for window in [request.hand[counter], request.paid[counter]].into_iter().flatten() {
                    self.lose(window, counter, 1);
                }
            }
        }
        let calls = std::mem::take(&mut self.calls);
        for mut call in calls {
            if call.by != Some(at) {
                self.calls.push(call);
                continue;
            }
            call.by = None;
            if let (Sent::Executed { answer, .. }, What::Fetch { ask, .. } | What::Charge { ask, .. }) =
                (&call.stage, &call.what)
                && let Answer::Granted(granted, _) = answer
            {
                COUNTERS.into_iter().for_each(|counter| self.lose(ask.window, counter, granted[counter]));
            }
            if let What::Charge { ask, done, .. } = &mut call.what {
                let done = std::mem::take(done);
                COUNTERS.into_iter().for_each(|counter| self.lose(ask.window, counter, u8::from(done[counter])));
            }
            if call.stage == Sent::Sent {
                self.calls.push(call);
            }
        }
    }
}

impl What {
    fn counters(&self) -> Each<bool> {
        match self {
            What::Fetch { ask, .. } | What::Charge { ask, .. } => ask.counters,
            What::Give { counter, .. } => [*counter == NARROW, *counter == WIDE],
        }
    }
}

impl Call {
    /// Nobody waits for it any more.
    fn leave(&mut self, at: usize, id: u8) {
        if self.by != Some(at) {
            return;
        }
        match &mut self.what {
            What::Charge { request, .. } if *request == Some(id) => *request = None,
            What::Give { then, .. } if then.is_some_and(|(of, _)| of == id) => *then = None,
            _ => {}
        }
    }
}
