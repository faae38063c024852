//! Visits all reachable states, breadth first, so that the trace to a violated property is as short as possible.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::Write as _;
use std::hash::{BuildHasherDefault, Hasher};

use crate::gateway::Model;
use crate::scenario::{Mistake, Scenario};
use crate::state::{COUNTERS, CallStage, Gateway, Request, Stage, State, Store, Windows};
use crate::{ALL_ACCOUNTED_FOR, GRANTED_ONCE, NEVER_OVER, NOT_REFUSED_FOREVER, NOT_RESENT};

/// With more states the tests would take minutes.
const STATES_MAX: usize = 1_000_000;

pub struct Exploration {
    pub states: usize,
    pub broken: Option<&'static str>,
    /// The steps from the first state to the violation.
    pub trace: String,
}

/// Explores until a property is violated; if `only` is set, until that property is violated.
pub fn explore(scenario: Scenario, only: Option<&str>) -> Exploration {
    let mut model = Model::new(scenario);
    let store = Store { is_sliding: scenario.is_sliding, ..Store::default() };
    let first = State { store, budget: scenario.budget, ..State::default() };
    let mut known: HashMap<State, (), BuildHasherDefault<FastHasher>> = HashMap::default();
    known.insert(first.clone(), ());
    let mut states = vec![(first, 0)];
    let mut at = 0;
    while at < states.len() {
        let state = states[at].0.clone();
        let broken =
            broken_properties(&mut model, &state).into_iter().find(|broken| only.is_none_or(|only| only == *broken));
        if let Some(broken) = broken {
            return Exploration { states: states.len(), broken: Some(broken), trace: trace(&mut model, &states, at) };
        }
        for (_, next) in model.steps(&state) {
            if let Entry::Vacant(entry) = known.entry(next) {
                states.push((entry.key().clone(), at));
                entry.insert(());
            }
        }
        assert!(states.len() < STATES_MAX, "too many states");
        at += 1;
    }
    Exploration { states: states.len(), broken: None, trace: String::new() }
}

/// A fast hash for many states, none of which an attacker chooses.
#[derive(Default)]
struct FastHasher(u64);

impl Hasher for FastHasher {
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let word = part.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
            self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }

    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 29
    }
}

/// The properties that a state violates.
fn broken_properties(model: &mut Model, state: &State) -> Vec<&'static str> {
    let mut broken: Vec<&'static str> = state.broken.into_iter().collect();
    for window in 0..2 {
        for counter in COUNTERS {
            let of = |windows: &Windows| windows[usize::from(window)][counter];
            let (admitted, forgotten) = (of(&state.ghost.admitted), of(&state.ghost.forgotten));
            let granted = admitted + state.outstanding(window, counter);
            let (used, lost) = (of(&state.store.used), of(&state.ghost.lost));
            // Tokens of a window that has ended do not count.
            let is_open = state.store.counts(window);
            let limited = |windows: &Windows| state.store.counted(windows, window, counter);
            let most = model.scenario.limits[counter] + limited(&state.ghost.forgotten);
            for (is_broken, name) in [
                (limited(&state.ghost.admitted) > most, NEVER_OVER),
                (is_open && granted > used + forgotten, GRANTED_ONCE),
                (is_open && used > granted + lost, ALL_ACCOUNTED_FOR),
            ] {
                if is_broken {
                    broken.push(name);
                }
            }
        }
    }
    if state.ghost.counted_twice > 0 {
        broken.push(NOT_RESENT);
    }
    if broken.is_empty() && state.calls.is_empty() && !admits_after_refunds(model, state) {
        broken.push(NOT_REFUSED_FOREVER);
    }
    broken
}

/// Refunds all tokens held by gateways, fetches again, and checks that a request is admitted if any tokens remain.
fn admits_after_refunds(model: &mut Model, state: &State) -> bool {
    let mut state = state.clone();
    for at in 0..state.gateways.len() {
        while let Some(request) = state.gateways[at].requests.first().cloned() {
            let request = state.take_request(at, request.id);
            model.advance(&mut state, at, request);
            run_until_idle(model, &mut state);
        }
        COUNTERS.into_iter().for_each(|counter| model.return_idle(&mut state, at, counter));
        run_until_idle(model, &mut state);
    }
    let window = state.store.window.max(state.gateways[0].window);
    state.gateways[0].window = window;
    if !model.scenario.has_mistake(Mistake::NeverRecheck) {
        for counter in COUNTERS.into_iter().filter(|counter| !model.is_exact(*counter)).collect::<Vec<_>>() {
            model.fetch(&mut state, 0, COUNTERS.map(|other| other == counter), 0);
            run_until_idle(model, &mut state);
        }
    }
    let is_sliding = state.store.is_sliding;
    let of =
        |windows: Windows, counter: usize| Store { is_sliding, ..Store::default() }.counted(&windows, window, counter);
    let has_tokens = |counter: usize| {
        let gateway = &state.gateways[0];
        let taken = of(state.ghost.admitted, counter) + of(state.ghost.lost, counter);
        // A gateway keeps usage reported by a former server until the window ends.
        let reported = gateway.known_usage[counter].filter(|_| gateway.stale[counter]).map_or(0, |(_, used)| used);
        let taken = (taken + state.counted_outstanding(window, counter) - gateway.lease[counter].1).max(reported);
        taken < model.scenario.limits[counter]
    };
    if !COUNTERS.into_iter().all(has_tokens) {
        return true;
    }
    let before = of(state.ghost.admitted, 0);
    let request = Request { id: 99, counters: [true; 2], stage: Stage::Ready, in_hand: [None; 2], charged: [None; 2] };
    model.advance(&mut state, 0, request);
    run_until_idle(model, &mut state);
    of(state.ghost.admitted, 0) > before
}

/// Runs until no call is in flight and no request is ready.
fn run_until_idle(model: &mut Model, state: &mut State) {
    loop {
        if let Some(call) = state.calls.first() {
            match call.stage {
                CallStage::Sent => model.execute(state, 0, 8),
                CallStage::Executed { .. } => model.deliver_reply(state, 0),
            }
            continue;
        }
        let is_ready = |gateway: &Gateway| gateway.requests.iter().any(|request| request.stage == Stage::Ready);
        let Some(at) = state.gateways.iter().position(is_ready) else { return };
        let id = state.gateways[at].requests.iter().find(|request| request.stage == Stage::Ready).map(|it| it.id);
        let request = state.take_request(at, id.expect("a request is ready"));
        model.advance(state, at, request);
    }
}

fn trace(model: &mut Model, states: &[(State, usize)], mut at: usize) -> String {
    let mut steps = vec![];
    while at != 0 {
        let (state, from) = &states[at];
        let label = model.steps(&states[*from].0).into_iter().find(|(_, next)| next == state).map(|(label, _)| label);
        steps.push((label, state));
        at = *from;
    }
    let mut text = String::new();
    for (label, state) in steps.into_iter().rev() {
        let _ = writeln!(
            text,
            "{label:?}\n    {:?}\n    {:?}\n    {:?}\n    {:?}",
            state.store, state.gateways, state.calls, state.ghost
        );
    }
    text
}
