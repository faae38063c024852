//! Properties of requests under way: random requests that begin, wait, give up and end, compared with queues in a map.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use proptest::prelude::*;
use transom_limiter::concurrency::{ConcurrencyTable, QueuedSlot, Slot};
use transom_limiter::key::KeyHash;

use crate::config;
use crate::support::mix;

#[derive(Clone, Debug)]
enum Action {
    /// A request that is refused if no slot is free.
    Try {
        key: u64,
        limit: u32,
    },
    /// A request that waits.
    Queue {
        key: u64,
        limit: u32,
    },
    /// The end of a request under way: a position among all.
    End(prop::sample::Index),
    /// A waiting request gives up, or takes the slot that it was given.
    Leave(prop::sample::Index),
    Poll(prop::sample::Index),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let index = any::<prop::sample::Index>;
    let action = prop_oneof![
        4 => (0..6u64, 1..4u32).prop_map(|(key, limit)| Action::Try { key, limit }),
        3 => (0..6u64, 1..4u32).prop_map(|(key, limit)| Action::Queue { key, limit }),
        4 => index().prop_map(Action::End),
        1 => index().prop_map(Action::Leave),
        3 => index().prop_map(Action::Poll),
    ];
    prop::collection::vec(action, 1..150)
}

fn key_hash(key: u64) -> KeyHash {
    KeyHash { bucket_hash: mix(key), tag: mix(!key) }
}

/// The requests of one key in the reference.
#[derive(Default)]
struct Reference {
    under_way: u32,
    limit: u32,
    waiting: VecDeque<u64>,
    /// Waiting requests that have a slot, and have not noticed.
    granted: Vec<u64>,
}

impl Reference {
    fn grant(&mut self) {
        while self.under_way < self.limit
            && let Some(first) = self.waiting.pop_front()
        {
            self.under_way += 1;
            self.granted.push(first);
        }
    }

    fn end(&mut self) {
        self.under_way -= 1;
        self.grant();
    }
}

/// Runs the actions. `is_large`: every key has a count of its own, so that decisions equal those of the reference.
fn run(actions: &[Action], table: ConcurrencyTable, is_large: bool) -> Result<(), TestCaseError> {
    let table = Arc::new(table);
    let mut reference: HashMap<u64, Reference> = HashMap::new();
    let mut under_way: Vec<(u64, Slot)> = Vec::new();
    let mut queue: Vec<(u64, u64, QueuedSlot)> = Vec::new();
    let poll = |queued: &mut QueuedSlot| Pin::new(queued).poll(&mut Context::from_waker(Waker::noop()));
    for (id, action) in (0..).zip(actions) {
        match action {
            Action::Try { key, limit } => {
                let slot = table.try_acquire(key_hash(*key), *limit).0;
                let known = reference.entry(*key).or_default();
                if !known.waiting.is_empty() {
                    known.limit = *limit;
                    known.grant();
                }
                let fits = known.under_way < *limit && known.waiting.is_empty();
                prop_assert!(fits || slot.is_none(), "never over");
                prop_assert!(!is_large || fits == slot.is_some());
                if let Some(slot) = slot {
                    known.under_way += 1;
                    under_way.push((*key, slot));
                }
            }
            Action::Queue { key, limit } => {
                queue.push((*key, id, table.queue(key_hash(*key), *limit)));
                let known = reference.entry(*key).or_default();
                known.limit = *limit;
                known.waiting.push_back(id);
                known.grant();
            }
            Action::End(index) if !under_way.is_empty() => {
                let (key, slot) = under_way.swap_remove(index.index(under_way.len()));
                drop(slot);
                reference.entry(key).or_default().end();
            }
            Action::Leave(index) if !queue.is_empty() => {
                let (key, id, queued) = queue.swap_remove(index.index(queue.len()));
                drop(queued);
                let known = reference.entry(key).or_default();
                known.waiting.retain(|other| *other != id);
                if let Some(position) = known.granted.iter().position(|other| *other == id) {
                    known.granted.swap_remove(position);
                    known.end();
                }
            }
            Action::Poll(index) if !queue.is_empty() => {
                let position = index.index(queue.len());
                let (key, id, queued) = &mut queue[position];
                let known = reference.entry(*key).or_default();
                let granted = known.granted.iter().position(|other| other == id);
                match poll(queued) {
                    Poll::Ready(slot) => {
                        prop_assert!(granted.is_some(), "in order of arrival, and never over");
                        known.granted.swap_remove(granted.unwrap_or(0));
                        under_way.push((*key, slot));
                        drop(queue.swap_remove(position));
                    }
                    Poll::Pending => prop_assert!(!is_large || granted.is_none()),
                }
            }
            Action::End(_) | Action::Leave(_) | Action::Poll(_) => {}
        }
        if is_large {
            for (key, known) in &reference {
                prop_assert_eq!(table.in_use(key_hash(*key)), u64::from(known.under_way));
            }
        }
    }
    drop((under_way, queue));
    for key in 0..6 {
        prop_assert_eq!(table.in_use(key_hash(key)), 0);
        prop_assert!(table.try_acquire(key_hash(key), 1).0.is_some(), "no request waits");
    }
    Ok(())
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn slots_are_given_in_order_of_arrival(actions in actions()) {
        run(&actions, ConcurrencyTable::default(), true)?;
    }

    /// Keys that share counts may be refused too early.
    #[test]
    fn requests_under_way_never_exceed_the_limit(actions in actions(), keys in 0..4usize) {
        run(&actions, ConcurrencyTable::with_capacity(1, keys), false)?;
    }
}
