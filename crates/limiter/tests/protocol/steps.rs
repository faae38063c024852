//! Every possible next step: request, call, reply, loss, kill, failover, and end of a window.

use crate::gateway::{CallResult, Model};
use crate::scenario::Mistake;
use crate::state::{
    COUNTERS, Call, CallKind, CallStage, Each, GATEWAYS, Gateway, NARROW, Reply, Request, Stage, State, WIDE, Windows,
};

/// The name of a step in a trace: the event, the gateway or call, and the counter.
pub type Label = (&'static str, usize, usize);

/// The part of the remaining tokens that the store grants beyond the need: one in this many. The gateway uses the first
/// value. With the second, more of the few tokens are in leases.
const PARTS: [u8; 2] = [8, 1];
/// Greater than any limit. Larger numbers would make no difference.
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

impl Model {
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
            for counters in self.scenario.request_kinds.iter().copied() {
                next.step(
                    ("a request arrives", at, usize::from(counters[WIDE]) * 2 + usize::from(counters[NARROW])),
                    |state| {
                        state.budget.requests -= 1;
                        let id = state.gateways[at].free_id();
                        let request =
                            Request { id, counters, stage: Stage::Ready, in_hand: [None; 2], charged: [None; 2] };
                        self.advance(state, at, request);
                    },
                );
            }
        }
        for request in &state.gateways[at].requests {
            let id = request.id;
            if request.stage == Stage::Ready {
                next.step(("a request continues", at, usize::from(id)), |state| {
                    let request = state.take_request(at, id);
                    self.advance(state, at, request);
                });
            } else if state.budget.impatient > 0 {
                next.step(("a request times out", at, usize::from(id)), |state| {
                    state.budget.impatient -= 1;
                    let request = state.take_request(at, id);
                    self.refund_all(state, at, &request);
                    state.calls.iter_mut().for_each(|call| call.cancel_request(at, id));
                });
            }
        }
        if state.budget.refunds > 0 && state.gateways[at].last_charges != [None; 2] {
            next.step(("the last charges are refunded", at, 0), |state| self.refund_last_request(state, at));
        }
    }

    fn refund_last_request(&mut self, state: &mut State, at: usize) {
        state.budget.refunds -= 1;
        for counter in COUNTERS {
            let Some((window, is_from_lease)) = state.gateways[at].last_charges[counter] else { continue };
            let is_refunded = !is_from_lease || self.local.refund(&mut state.gateways[at], counter, window);
            state.ghost.admitted[usize::from(window)][counter] -= u8::from(is_refunded);
            if !is_from_lease {
                state.send_refund(at, counter, window, 1, None);
            }
        }
        state.gateways.iter_mut().for_each(|gateway| gateway.last_charges = [None; 2]);
    }

    fn background(&mut self, next: &mut Next<'_>, at: usize) {
        let state = next.state;
        for counter in COUNTERS {
            if self.is_exact(counter) || state.calls.iter().any(|call| call.fetches_for(at, counter)) {
                continue;
            }
            if state.budget.background > 0 {
                next.step(("tokens are fetched in the background", at, counter), |state| {
                    state.budget.background -= 1;
                    self.fetch(state, at, COUNTERS.map(|other| other == counter), 0);
                });
            }
            let (_, tokens) = state.gateways[at].lease[counter];
            // While windows slide, tokens could be returned and fetched without end.
            let uses_budget = self.scenario.is_sliding;
            if tokens > 0 && (!uses_budget || state.budget.background > 0) {
                next.step(("idle tokens are returned", at, counter), |state| {
                    state.budget.background -= u8::from(uses_budget);
                    self.return_idle(state, at, counter);
                });
            }
        }
    }

    pub fn return_idle(&mut self, state: &mut State, at: usize, counter: usize) {
        let (window, left) = state.gateways[at].lease[counter];
        let tokens = match self.scenario.has_mistake(Mistake::ReturnWithoutWithdrawing) {
            true => left,
            false => self.local.withdraw(&mut state.gateways[at], counter, window),
        };
        let to = if self.scenario.has_mistake(Mistake::RefundToNextWindow) { state.store.window } else { window };
        if tokens > 0 {
            state.send_refund(at, counter, to, tokens, None);
        }
    }

    fn calls(&mut self, next: &mut Next<'_>, i: usize) {
        let state = next.state;
        let call = &state.calls[i];
        match &call.stage {
            CallStage::Sent => {
                let parts = if matches!(call.kind, CallKind::Fetch { .. }) { &PARTS[..] } else { &PARTS[..1] };
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
            CallStage::Executed { .. } => {
                next.step(("a reply arrives", i, 0), |state| self.deliver_reply(state, i));
                if state.budget.losses > 0 {
                    next.step(("a reply is lost", i, 0), |state| {
                        state.budget.losses -= 1;
                        self.fail(state, i);
                    });
                }
            }
        }
    }

    pub fn execute(&mut self, state: &mut State, i: usize, part: u8) {
        let same_slot = self.scenario.same_slot;
        let mut call = state.calls[i].clone();
        let reply = match &mut call.kind {
            CallKind::Fetch { args, .. } | CallKind::Charge { args, .. } => {
                let before = state.store.used;
                let reply = state.store.acquire(args, self.scenario.limits, part, same_slot);
                let window = args.window;
                state.note_raise(before, &reply, window);
                state.check_remembered(&call, window, before);
                reply
            }
            CallKind::Refund { counter, window, tokens, .. } => {
                let refunded = state.store.refund(*window, *counter, *tokens, same_slot);
                if state.store.counts(*window) {
                    let forgotten = &mut state.ghost.forgotten[usize::from(*window)][*counter];
                    *forgotten = forgotten.saturating_sub(*tokens - refunded);
                }
                // Includes tokens that the store cannot refund, because it has lost them or their window has ended.
                state.note_refund(*counter, *tokens);
                Reply::Refunded
            }
        };
        let is_heard = match call.kind {
            CallKind::Refund { after, .. } => after.is_some() || self.scenario.has_mistake(Mistake::ResendRefund),
            CallKind::Fetch { .. } | CallKind::Charge { .. } => call.by.is_some(),
        };
        call.stage = CallStage::Executed { reply, refunded_since: [0; 2], stale: false };
        state.calls[i] = call;
        if !is_heard {
            self.fail(state, i);
        }
    }

    /// Removes a call whose result no gateway receives. The gateway learns only that the result is unknown.
    fn fail(&mut self, state: &mut State, i: usize) {
        let Call { by, kind, stage } = state.calls.remove(i);
        if let (CallKind::Fetch { args, .. } | CallKind::Charge { args, .. }, CallStage::Executed { reply, .. }) =
            (&kind, &stage)
            && let Reply::Granted(granted, _) = reply
        {
            COUNTERS.into_iter().for_each(|counter| state.count_lost(args.window, counter, granted[counter]));
        }
        let is_unknown = matches!(stage, CallStage::Executed { .. });
        if let CallKind::Refund { counter, window, tokens, .. } = &kind
            && !is_unknown
        {
            state.count_lost(*window, *counter, *tokens);
        }
        let resend = match kind {
            CallKind::Fetch { .. } | CallKind::Charge { .. } => self.scenario.has_mistake(Mistake::ResendCall),
            CallKind::Refund { .. } => self.scenario.has_mistake(Mistake::ResendRefund),
        };
        if resend {
            state.ghost.counted_twice += u8::from(is_unknown);
            state.calls.push(Call { by, kind, stage: CallStage::Sent });
            return;
        }
        let Some(at) = by else {
            // Charges of earlier calls are lost as well.
            if let CallKind::Charge { done, .. } = &kind {
                state.count_all_lost(*done);
            }
            return;
        };
        self.handle_result(state, at, kind, CallResult::UNKNOWN);
    }

    pub fn deliver_reply(&mut self, state: &mut State, i: usize) {
        let Call { by, kind, stage } = state.calls.remove(i);
        let (Some(at), CallStage::Executed { reply, refunded_since, stale }) = (by, stage) else { return };
        self.handle_result(state, at, kind, CallResult { reply: Some(reply), refunded_since, stale });
    }

    fn handle_result(&mut self, state: &mut State, at: usize, kind: CallKind, result: CallResult) {
        match kind {
            CallKind::Fetch { args, later, need } => self.on_fetched(state, at, args, later, need, result),
            CallKind::Charge { request, args, later, done } => {
                self.on_charged(state, at, (request, args, later, done), result)
            }
            CallKind::Refund { after, .. } => self.continue_request(state, at, after),
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
        let servers = if self.scenario.same_slot { &[[true, true]][..] } else { &[[true, false], [false, true]][..] };
        for of in servers {
            let (narrow, wide) = (usize::from(of[NARROW]), usize::from(of[WIDE]));
            if budget.failovers > 0 {
                next.step(("a replica takes over", narrow, wide), |state| {
                    state.budget.failovers -= 1;
                    self.fail_over(state, *of);
                });
            }
            if budget.restarts > 0 {
                next.step(("a server restarts without its data", narrow, wide), |state| {
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
                next.step(("a window ends by the store's clock", 0, 0), |state| {
                    state.store.end_window();
                    if !state.store.is_sliding {
                        state.ghost.lost[0] = [0; 2];
                    }
                });
            }
            for at in 0..GATEWAYS {
                if next.state.gateways[at].window == 0 {
                    next.step(("a window ends by a gateway's clock", at, 0), |state| state.gateways[at].window = 1);
                }
            }
        }
    }

    /// Another server takes over with its own data. Calls that were sent and not executed never will be.
    fn fail_over(&mut self, state: &mut State, of: Each<bool>) {
        for counter in COUNTERS.into_iter().filter(|counter| of[*counter]) {
            for window in 0..2 {
                let (used, before) = (state.store.used[window][counter], state.store.before[window][counter]);
                state.ghost.forgotten[window][counter] += used.saturating_sub(before);
                state.ghost.lost[window][counter] += before.saturating_sub(used);
                state.store.used[window][counter] = before;
            }
            state
                .gateways
                .iter_mut()
                .for_each(|gateway| gateway.stale[counter] = gateway.known_usage[counter].is_some());
        }
        for call in &mut state.calls {
            if let CallStage::Executed { stale, .. } = &mut call.stage {
                *stale |= call.kind.counters().into_iter().zip(of).any(|(is, of)| is && of);
            }
        }
        let is_unexecuted = |call: &Call| {
            call.stage == CallStage::Sent && call.kind.counters().into_iter().zip(of).any(|(is, of)| is && of)
        };
        let unexecuted: Vec<Call> = state.calls.iter().filter(|call| is_unexecuted(call)).cloned().collect();
        for call in unexecuted {
            if let Some(i) = state.calls.iter().position(|other| *other == call) {
                self.fail(state, i);
            }
        }
    }

    /// The key is deleted in the store, and at the gateway that executes the reset.
    fn reset(&mut self, state: &mut State, at: usize, counter: usize) {
        let window = state.gateways[at].window;
        self.local.withdraw(&mut state.gateways[at], counter, window);
        self.local.set_known_usage(&mut state.gateways[at], counter, window, 0);
        state.gateways[at].refunded_since[counter] = 0;
        let used = state.store.used[usize::from(window)][counter];
        state.store.used[usize::from(window)][counter] = 0;
        state.store.before[usize::from(window)][counter] = 0;
        state.note_refund(counter, used);
        let ghost = &state.ghost;
        let counted = ghost.admitted[usize::from(window)][counter] + ghost.lost[usize::from(window)][counter];
        let forgotten = counted + state.outstanding(window, counter);
        state.ghost.forgotten[usize::from(window)][counter] = forgotten;
    }
}

impl State {
    /// Makes equivalent states equal: sorts calls and gateways, and clears values that are never read again.
    fn normalize(&mut self) {
        let is_sliding = self.store.is_sliding;
        for gateway in &mut self.gateways {
            for counter in COUNTERS {
                let is_over = |window: u8| window < gateway.window && !is_sliding;
                if is_over(gateway.lease[counter].0) && gateway.lease[counter].0 < self.store.window {
                    gateway.lease[counter] = (0, 0);
                }
                if gateway.known_usage[counter].is_none_or(|(window, _)| is_over(window)) {
                    (gateway.known_usage[counter], gateway.refunded_since[counter], gateway.stale[counter]) =
                        (None, 0, false);
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

    /// Gateways that learned the usage before do not know of these refunds.
    fn note_refund(&mut self, counter: usize, tokens: u8) {
        let more = |refunded_since: &mut u8| *refunded_since = (*refunded_since + tokens).min(SINCE_MAX);
        self.gateways.iter_mut().for_each(|gateway| more(&mut gateway.refunded_since[counter]));
        for call in &mut self.calls {
            let is_about = call.kind.counters()[counter];
            match (&mut call.stage, &mut call.kind) {
                (CallStage::Executed { refunded_since, .. }, _) if is_about => more(&mut refunded_since[counter]),
                (CallStage::Sent, CallKind::Fetch { args, .. } | CallKind::Charge { args, .. }) => {
                    args.known[counter] = args.known[counter].saturating_sub(tokens);
                }
                _ => {}
            }
        }
    }

    /// The store adopts usage that it had lost and that a gateway reports.
    fn note_raise(&mut self, before: Windows, reply: &Reply, window: u8) {
        if let Reply::Granted(granted, _) = reply {
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

    /// Checks that usage known to a gateway is not granted to it again, except for tokens refunded since.
    fn check_remembered(&mut self, call: &Call, window: u8, before: Windows) {
        let (Some(_), CallKind::Fetch { args, .. } | CallKind::Charge { args, .. }) = (call.by, &call.kind) else {
            return;
        };
        for counter in COUNTERS.into_iter().filter(|counter| args.counters[*counter]) {
            let known = before[usize::from(window)][counter].max(args.used_min[counter]);
            if args.window >= self.store.window && known < args.known[counter] {
                self.broken.get_or_insert(crate::REMEMBERED);
            }
        }
    }

    /// Leases and waiting requests of the gateway are lost. Calls in flight may still be executed.
    fn kill(&mut self, at: usize) {
        let next = Gateway { window: self.gateways[at].window, ..Gateway::default() };
        let gateway = std::mem::replace(&mut self.gateways[at], next);
        for counter in COUNTERS {
            self.count_lost(gateway.lease[counter].0, counter, gateway.lease[counter].1);
            for request in &gateway.requests {
                for window in [request.in_hand[counter], request.charged[counter]].into_iter().flatten() {
                    self.count_lost(window, counter, 1);
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
            if let (CallStage::Executed { reply, .. }, CallKind::Fetch { args, .. } | CallKind::Charge { args, .. }) =
                (&call.stage, &call.kind)
                && let Reply::Granted(granted, _) = reply
            {
                COUNTERS.into_iter().for_each(|counter| self.count_lost(args.window, counter, granted[counter]));
            }
            if let CallKind::Charge { done, .. } = &mut call.kind {
                let done = std::mem::take(done);
                self.count_all_lost(done);
            }
            if call.stage == CallStage::Sent {
                self.calls.push(call);
            }
        }
    }
}

impl CallKind {
    fn counters(&self) -> Each<bool> {
        match self {
            CallKind::Fetch { args, .. } | CallKind::Charge { args, .. } => args.counters,
            CallKind::Refund { counter, .. } => [*counter == NARROW, *counter == WIDE],
        }
    }
}

impl Call {
    /// No request waits for the call any more.
    fn cancel_request(&mut self, at: usize, id: u8) {
        if self.by != Some(at) {
            return;
        }
        match &mut self.kind {
            CallKind::Charge { request, .. } if *request == Some(id) => *request = None,
            CallKind::Refund { after, .. } if after.is_some_and(|(of, _)| of == id) => *after = None,
            _ => {}
        }
    }
}
