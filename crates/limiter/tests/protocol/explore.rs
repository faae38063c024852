//! Goes through all states that can be reached, breadth first, so that what leads to a broken property is as short as it can be.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::Write as _;
use std::hash::{BuildHasherDefault, Hasher};

use crate::gateway::World;
use crate::scenario::{Mistake, Scene};
use crate::state::{COUNTERS, Gateway, Request, Sent, Stage, State, Windows};
use crate::{ALL_ACCOUNTED_FOR, EXECUTED_ONCE, HANDED_OUT_ONCE, NEVER_OVER, NOT_FOR_EVER};

/// More would not be seconds any more.
const STATES_MAX: usize = 1_000_000;

pub struct Found {
    pub states: usize,
    pub broken: Option<&'static str>,
    /// How it came to that.
    pub trace: String,
}

/// Until a property is broken; or this one, if there is one.
pub fn explore(scene: Scene, only: Option<&str>) -> Found {
    let mut world = World::new(scene);
    let first = State { budget: scene.budget, ..State::default() };
    let mut known: HashMap<State, (), BuildHasherDefault<Mixer>> = HashMap::default();
    known.insert(first.clone(), ());
    let mut states = vec![(first, 0)];
    let mut at = 0;
    while at < states.len() {
        let state = states[at].0.clone();
        let broken = judge(&mut world, &state).into_iter().find(|broken| only.is_none_or(|only| only == *broken));
        if let Some(broken) = broken {
            return Found { states: states.len(), broken: Some(broken), trace: trace(&mut world, &states, at) };
        }
        for (_, next) in world.steps(&state) {
            if let Entry::Vacant(place) = known.entry(next) {
                states.push((place.key().clone(), at));
                place.insert(());
            }
        }
        assert!(states.len() < STATES_MAX, "too many states");
        at += 1;
    }
    Found { states: states.len(), broken: None, trace: String::new() }
}

/// Quick, for there are many states and nobody chooses them with ill intent.
#[derive(Default)]
struct Mixer(u64);

impl Hasher for Mixer {
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

/// Which properties a state breaks.
fn judge(world: &mut World, state: &State) -> Vec<&'static str> {
    let mut broken: Vec<&'static str> = state.broken.into_iter().collect();
    for window in 0..2 {
        for counter in COUNTERS {
            let of = |windows: &Windows| windows[usize::from(window)][counter];
            let (admitted, forgotten) = (of(&state.ghost.admitted), of(&state.ghost.forgotten));
            let held = admitted + state.outstanding(window, counter);
            let (used, lost) = (of(&state.store.used), of(&state.ghost.lost));
            // What is held of a window that is over is worth nothing.
            let is_open = window >= state.store.window;
            for (is_broken, name) in [
                (admitted > world.scene.limits[counter] + forgotten, NEVER_OVER),
                (is_open && held > used + forgotten, HANDED_OUT_ONCE),
                (is_open && used > held + lost, ALL_ACCOUNTED_FOR),
            ] {
                if is_broken {
                    broken.push(name);
                }
            }
        }
    }
    if state.ghost.counted_twice > 0 {
        broken.push(EXECUTED_ONCE);
    }
    if broken.is_empty() && state.calls.is_empty() && !settles(world, state) {
        broken.push(NOT_FOR_EVER);
    }
    broken
}

/// Gives back all that lies at gateways, asks again whether there is room, and lets a request come.
fn settles(world: &mut World, state: &State) -> bool {
    let mut state = state.clone();
    for at in 0..state.gateways.len() {
        while let Some(request) = state.gateways[at].requests.first().cloned() {
            let request = state.take_request(at, request.id);
            world.advance(&mut state, at, request);
            quiet(world, &mut state);
        }
        COUNTERS.into_iter().for_each(|counter| world.return_idle(&mut state, at, counter));
        quiet(world, &mut state);
    }
    let window = state.store.window.max(state.gateways[0].window);
    state.gateways[0].window = window;
    if !world.scene.makes(Mistake::NeverAsksAgain) {
        for counter in COUNTERS.into_iter().filter(|counter| !world.is_exact(*counter)).collect::<Vec<_>>() {
            world.fetch(&mut state, 0, COUNTERS.map(|other| other == counter), 0);
            quiet(world, &mut state);
        }
    }
    let of = |windows: Windows, counter: usize| windows[usize::from(window)][counter];
    let room = |counter: usize| {
        let gateway = &state.gateways[0];
        let taken = of(state.ghost.admitted, counter) + of(state.ghost.lost, counter);
        // Whoever was told something by a server that is gone holds to it until the window ends.
        let told = gateway.tally[counter].filter(|_| gateway.stale[counter]).map_or(0, |(_, used)| used);
        let taken = (taken + state.outstanding(window, counter) - gateway.purse[counter].1).max(told);
        taken < world.scene.limits[counter]
    };
    if !COUNTERS.into_iter().all(room) {
        return true;
    }
    let before = of(state.ghost.admitted, 0);
    let request = Request { id: 99, kind: [true; 2], stage: Stage::Ready, hand: [None; 2], paid: [None; 2] };
    world.advance(&mut state, 0, request);
    quiet(world, &mut state);
    of(state.ghost.admitted, 0) > before
}

/// Until nothing is under way.
fn quiet(world: &mut World, state: &mut State) {
    loop {
        if let Some(call) = state.calls.first() {
            match call.stage {
                Sent::Sent => world.execute(state, 0, 8),
                Sent::Executed { .. } => world.answer(state, 0),
            }
            continue;
        }
        let is_ready = |gateway: &Gateway| gateway.requests.iter().any(|request| request.stage == Stage::Ready);
        let Some(at) = state.gateways.iter().position(is_ready) else { return };
        let id = state.gateways[at].requests.iter().find(|request| request.stage == Stage::Ready).map(|it| it.id);
        let request = state.take_request(at, id.expect("it is ready"));
        world.advance(state, at, request);
    }
}

fn trace(world: &mut World, states: &[(State, usize)], mut at: usize) -> String {
    let mut steps = vec![];
    while at != 0 {
        let (state, from) = &states[at];
        let label = world.steps(&states[*from].0).into_iter().find(|(_, next)| next == state).map(|(label, _)| label);
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
