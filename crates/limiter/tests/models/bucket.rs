//! Models of one region: a key has one counter, however many threads make it at once.

use std::sync::Arc;

use transom_limiter::bucket::{InsertResult, Key, OpenWindow, SlotArray, WATERMARKS};
use transom_limiter::counter::{AcquireRequest, CounterWord, acquired, usage};
use transom_limiter::memory::Memory;
use transom_limiter::window::Time;

use crate::support::{explore, race};

const K: Key = Key { bucket_hash: 0, tag: 1 };
const L: Key = Key { bucket_hash: 0, tag: 2 };
/// A key of the same two buckets that looks into the other one first.
const M: Key = Key { bucket_hash: u64::MAX, tag: 3 };

/// A region of two buckets with one slot each.
fn region() -> SlotArray<1> {
    let cells = Memory::heap(0).and_then(|memory| Some((memory.words(0, 2)?, memory.numbers(0, WATERMARKS)?)));
    let (words, marks) = cells.expect("there is memory");
    SlotArray::new(words, marks)
}

/// Seats `key` and adds one token to its counter: what a table does, without what it adds.
/// Returns the end of the window counted in; 0 if the region was full, 1 if it was too late.
fn add<const W: usize>(region: &SlotArray<W>, key: Key, end_ms: u64, now_ms: u64) -> u64 {
    let (ask, time) = (AcquireRequest::plain(end_ms, 9, 1), Time::plain(now_ms));
    loop {
        match region.insert(key, OpenWindow { end_ms, closes_ms: end_ms }, now_ms, || false) {
            InsertResult::At(index, mut word) => {
                while word.tag() == key.tag && !word.is_claim() {
                    let before = usage(word, ask, time);
                    let (next, _) = acquired(key.tag, before, ask, time).expect("the limit is never reached");
                    match region.swap(index, word, next) {
                        Ok(()) => return next.end_ms(),
                        Err(changed) => word = changed,
                    }
                }
            }
            InsertResult::Full => return 0,
            InsertResult::Late => return 1,
        }
    }
}

/// The counters of `key`, in slot order. There are never claims left when nobody is at work.
fn counters<const W: usize>(region: &SlotArray<W>, key: Key) -> Vec<(u64, u32)> {
    let words: Vec<CounterWord> = region.words().collect();
    assert!(words.iter().all(|word| !word.is_claim()), "a claim was left behind: {words:?}");
    words.iter().filter(|word| word.tag() == key.tag).map(|word| (word.end_ms(), word.count())).collect()
}

#[test]
fn two_threads_that_insert_one_key_share_one_counter() {
    explore(4, || {
        let region = Arc::new(region());
        let ends = race(&region, [|r| add(r, K, 100, 50), |r| add(r, K, 100, 50)]);
        assert_eq!((ends, counters(&region, K)), ([100, 100], vec![(100, 2)]));
    });
}

#[test]
fn three_threads_that_insert_one_key_share_one_counter() {
    explore(2, || {
        let region = Arc::new(region());
        let job: fn(&SlotArray<1>) -> u64 = |r| add(r, K, 100, 50);
        let ends = race(&region, [job; 3]);
        assert_eq!((ends, counters(&region, K)), ([100; 3], vec![(100, 3)]));
    });
}

/// With two empty slots in one bucket all threads claim the same one. Here the first slot is free
/// for one thread and still taken for the other, so that two claims of one key do stand at once.
#[test]
fn two_threads_that_reuse_a_slot_at_different_times_share_one_counter() {
    let outcomes = explore(4, || {
        let region = Arc::new(region());
        assert_eq!(add(&region, L, 100, 50), 100);
        let ends = race(&region, [|r| add(r, K, 200, 90), |r| add(r, K, 200, 150)]);
        assert_eq!((ends, counters(&region, K)), ([200, 200], vec![(200, 2)]));
        counters(&region, L).len()
    });
    assert_eq!(outcomes.len(), 2, "K took now L's slot, now the empty one: {outcomes:?}");
}

/// As above, with a third thread, and with windows that differ as the clocks do.
#[test]
fn three_threads_that_reuse_a_slot_at_different_times_share_one_counter() {
    explore(1, || {
        let region = Arc::new(region());
        assert_eq!(add(&region, L, 100, 50), 100);
        let ends = race(&region, [|r| add(r, K, 150, 90), |r| add(r, K, 300, 150), |r| add(r, K, 300, 160)]);
        let in_last = ends.iter().filter(|&&end| end == 300).count() as u32;
        // The first may also hear that its window is over, if it comes to make the counter after the others' time.
        assert!(ends[1..] == [300, 300] && [1, 150, 300].contains(&ends[0]), "{ends:?}");
        assert_eq!(counters(&region, K), [(300, in_last)], "{ends:?}");
    });
}

/// Two keys that search the same slots in opposite order both find a seat, or one of them hears
/// that there is none; neither loses its own.
#[test]
fn keys_that_compete_for_slots_have_one_counter_each() {
    explore(2, || {
        let region = Arc::new(region());
        let ends = race(&region, [|r| add(r, K, 100, 50), |r| add(r, M, 100, 50), |r| add(r, K, 100, 50)]);
        assert_eq!(ends, [100; 3], "two slots are enough for two keys");
        assert_eq!((counters(&region, K), counters(&region, M)), (vec![(100, 2)], vec![(100, 1)]));
    });
}

/// The slot of a window that ended goes to another key while a slow thread still asks for that
/// window: it must never find it open and empty.
#[test]
fn a_reused_slot_is_not_opened_for_its_ended_window() {
    let outcomes = explore(3, || {
        let region = Arc::new(region());
        assert_eq!(add(&region, K, 100, 50), 100);
        let [late, other] = race(&region, [|r| add(r, K, 100, 60), |r| add(r, L, 200, 150)]);
        assert_eq!(other, 200);
        match late {
            // Counted beside the first one before the slot went, or in time to stay in it.
            100 => assert!(matches!(counters(&region, K)[..], [] | [(100, 2)])),
            1 => assert_eq!(counters(&region, K), []),
            end => panic!("counted in the window ending at {end}"),
        }
        late
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [1, 100]);
}
