//! Visits all states of a scenario, depth first; each path runs from the beginning, because the code of a gateway cannot be
//! copied. A state that was reached before is not visited again. Larger scenarios run at random.

use std::collections::HashSet;

use fastrand::Rng;
use tokio::runtime::Builder;

use super::world::{Event, Scenario, World};
use crate::simulated_store::network::Network;

/// With more states the tests would take minutes.
const STATES_MAX: usize = 200_000;

pub struct Exploration {
    pub states: usize,
    /// Paths that end with a check of what the store counts.
    pub ends: usize,
    pub runs: usize,
    /// The violated property, and the events that lead to it.
    pub broken: Option<(String, Vec<Event>)>,
}

/// Runs on a runtime whose time moves by events only.
fn run<T>(test: impl Future<Output = T>) -> T {
    let result =
        Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime").block_on(test);
    Network::uninstall();
    result
}

/// Explores until a property is violated.
pub fn explore(scenario: &Scenario) -> Exploration {
    let mut known = HashSet::new();
    let mut path: Vec<(Vec<Event>, usize, u64)> = Vec::new();
    let mut found = Exploration { states: 0, ends: 0, runs: 0, broken: None };
    loop {
        found.runs += 1;
        let broken = run(async {
            let mut world = World::new(scenario).await;
            for (nth, (events, chosen, hash)) in path.iter().enumerate() {
                if nth + 1 == path.len() {
                    assert_eq!(world.hash(), *hash, "the same events lead to the same state");
                }
                world.apply(events[*chosen]).await;
            }
            while world.broken().is_none() && known.insert(world.hash()) {
                let hash = world.hash();
                let events = world.enabled();
                let Some(first) = events.first().copied() else {
                    found.ends += 1;
                    world.drain().await;
                    break;
                };
                path.push((events, 0, hash));
                world.apply(first).await;
            }
            world.broken().map(str::to_owned)
        });
        found.states = known.len();
        if let Some(broken) = broken {
            found.broken = Some((broken, path.iter().map(|(events, chosen, _)| events[*chosen]).collect()));
            return found;
        }
        assert!(found.states < STATES_MAX, "too many states");
        while let Some((events, chosen, _)) = path.last_mut() {
            *chosen += 1;
            if *chosen < events.len() {
                break;
            }
            path.pop();
        }
        if path.is_empty() {
            return found;
        }
    }
}

/// Lets `events` random events happen, and checks what the store counts afterwards. Returns how many have happened, or if a
/// property is violated, which, and the events.
pub fn run_at_random(scenario: &Scenario, seed: u64, events: usize) -> Result<usize, (String, Vec<Event>)> {
    run(async {
        let mut rng = Rng::with_seed(seed);
        let mut world = World::new(scenario).await;
        let mut happened = Vec::new();
        while happened.len() < events && world.broken().is_none() {
            let enabled = world.enabled();
            let weights: Vec<u32> = enabled.iter().map(weight).collect();
            let mut left = rng.u32(..weights.iter().sum::<u32>().max(1));
            let chosen = weights.iter().position(|weight| {
                let is_chosen = left < *weight;
                left = left.saturating_sub(*weight);
                is_chosen
            });
            let Some(event) = chosen.map(|chosen| enabled[chosen]) else { break };
            happened.push(event);
            world.apply(event).await;
        }
        if world.broken().is_none() {
            world.drain().await;
        }
        match world.broken() {
            None => Ok(happened.len()),
            Some(broken) => Err((broken.to_owned(), happened)),
        }
    })
}

/// How often an event happens, in relation to others.
fn weight(event: &Event) -> u32 {
    match event {
        Event::Send { .. } | Event::Execute { .. } | Event::Deliver { .. } => 100,
        Event::Begin { .. } | Event::Respond { .. } => 20,
        Event::Advance { .. } | Event::EndOutage => 4,
        Event::Cancel { .. } | Event::Cut { .. } | Event::Reset { .. } => 2,
        Event::BeginOutage | Event::RestartEmpty | Event::FailOver | Event::Kill { .. } => 1,
    }
}

/// What happens on the way of the events that violate a property. Of random events, those are left out that need not happen.
pub fn trace(scenario: &Scenario, events: &[Event]) -> String {
    let (property, _) = replay(scenario, events, false);
    let kind = property.split(':').next().unwrap_or_default();
    let mut events = events.to_vec();
    // First many at once: thousands of events would take hours one by one.
    let mut count = if kind.is_empty() { 0 } else { events.len() / 2 };
    while count > 0 {
        let length = events.len();
        for position in (0..length).step_by(count).rev() {
            let fewer = [&events[..position], &events[(position + count).min(events.len())..]].concat();
            if replay(scenario, &fewer, false).0.starts_with(kind) {
                events = fewer;
            }
        }
        count = if count == 1 && events.len() < length { 1 } else { count / 2 };
    }
    replay(scenario, &events, true).1
}

/// Lets those of the events happen that are possible. Returns the property that is violated, and what happens if it is logged.
fn replay(scenario: &Scenario, events: &[Event], is_logged: bool) -> (String, String) {
    run(async {
        let mut world = World::new(scenario).await;
        world.log = is_logged.then(String::new);
        for event in events {
            if world.broken().is_none() && world.enabled().contains(event) {
                world.apply(*event).await;
            }
        }
        if world.broken().is_none() {
            world.drain().await;
        }
        (world.broken().unwrap_or_default().to_owned(), world.log.unwrap_or_default())
    })
}
