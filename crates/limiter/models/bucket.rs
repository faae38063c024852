//! Models of one slot array: a key has one counter, however many threads insert it at the same time.

use std::sync::Arc;

use transom_limiter::bucket::{InsertResult, Key, OpenWindow, SlotArray, WATERMARKS};
use transom_limiter::counter::CounterWord;
use transom_limiter::memory::Memory;
use transom_limiter::window::Time;
use transom_limiter::window_kind::{AcquireRequest, acquired, usage};

use crate::support::{explore, race};

const KEY_A: Key = Key { bucket_hash: 0, tag: 1 };
const KEY_B: Key = Key { bucket_hash: 0, tag: 2 };
/// A key of the same two buckets, searched in the opposite order.
const KEY_C: Key = Key { bucket_hash: u64::MAX, tag: 3 };

/// An array of two buckets with one slot each.
fn slot_array() -> SlotArray<1> {
    let cells = Memory::zeroed(0).and_then(|memory| Some((memory.words(0, 2)?, memory.numbers(0, WATERMARKS)?)));
    let (words, marks) = cells.expect("there is memory");
    SlotArray::new(words, marks)
}

/// An array of one slot.
fn one_slot() -> SlotArray<1> {
    let cells = Memory::zeroed(0).and_then(|memory| Some((memory.words(0, 1)?, memory.numbers(0, WATERMARKS)?)));
    let (words, marks) = cells.expect("there is memory");
    SlotArray::new(words, marks)
}

/// Inserts `key` and adds one token to its counter, as a table does, without overflow counters. Returns the end of the
/// window that was charged; 0 if the array is full, 1 if the window has ended.
fn add<const W: usize>(slot_array: &SlotArray<W>, key: Key, end_ms: u64, now_ms: u64) -> u64 {
    acquire(slot_array, key, 9, end_ms, now_ms).expect("below the limit")
}

/// As [`add`]; `None` if `limit` tokens of the window are used.
fn acquire<const W: usize>(slot_array: &SlotArray<W>, key: Key, limit: u32, end_ms: u64, now_ms: u64) -> Option<u64> {
    let (request, time) = (AcquireRequest::plain(end_ms, limit, 1), Time::plain(now_ms));
    loop {
        match slot_array.insert(key, OpenWindow { end_ms, closes_ms: end_ms }, now_ms, || false) {
            InsertResult::At(index, mut word) => {
                while word.tag() == key.tag && !word.is_claim() {
                    let before = usage(word, request, time);
                    let (next, _) = acquired(key.tag, before, request, time)?;
                    match slot_array.swap(index, word, next) {
                        Ok(()) => return Some(next.end_ms()),
                        Err(changed) => word = changed,
                    }
                }
            }
            InsertResult::Full => return Some(0),
            InsertResult::Late => return Some(1),
        }
    }
}

/// The counters of `key`, in slot order. Asserts that no claim is left after all threads have finished.
fn counters<const W: usize>(slot_array: &SlotArray<W>, key: Key) -> Vec<(u64, u32)> {
    let words: Vec<CounterWord> = slot_array.words().collect();
    assert!(words.iter().all(|word| !word.is_claim()), "a claim was left behind: {words:?}");
    words.iter().filter(|word| word.tag() == key.tag).map(|word| (word.end_ms(), word.count())).collect()
}

#[test]
fn two_threads_that_insert_one_key_share_one_counter() {
    explore(4, || {
        let slot_array = Arc::new(slot_array());
        let ends = race(&slot_array, [|array| add(array, KEY_A, 100, 50), |array| add(array, KEY_A, 100, 50)]);
        assert_eq!((ends, counters(&slot_array, KEY_A)), ([100, 100], vec![(100, 2)]));
    });
}

#[test]
fn three_threads_that_insert_one_key_share_one_counter() {
    explore(2, || {
        let slot_array = Arc::new(slot_array());
        let job: fn(&SlotArray<1>) -> u64 = |array| add(array, KEY_A, 100, 50);
        let ends = race(&slot_array, [job; 3]);
        assert_eq!((ends, counters(&slot_array, KEY_A)), ([100; 3], vec![(100, 3)]));
    });
}

/// With two empty slots in a bucket, all threads claim the same slot. Here the first slot is free for one thread and
/// still taken for the other, so two claims of one key exist at the same time.
#[test]
fn two_threads_that_reuse_a_slot_at_different_times_share_one_counter() {
    let outcomes = explore(4, || {
        let slot_array = Arc::new(slot_array());
        assert_eq!(add(&slot_array, KEY_B, 100, 50), 100);
        let ends = race(&slot_array, [|array| add(array, KEY_A, 200, 90), |array| add(array, KEY_A, 200, 150)]);
        assert_eq!((ends, counters(&slot_array, KEY_A)), ([200, 200], vec![(200, 2)]));
        counters(&slot_array, KEY_B).len()
    });
    assert_eq!(
        outcomes.len(),
        2,
        "KEY_A takes the slot of KEY_B in some interleavings, the empty one in others: {outcomes:?}"
    );
}

/// As above, with a third thread, and with clocks that are in different windows.
#[test]
fn three_threads_that_reuse_a_slot_at_different_times_share_one_counter() {
    explore(1, || {
        let slot_array = Arc::new(slot_array());
        assert_eq!(add(&slot_array, KEY_B, 100, 50), 100);
        let ends = race(
            &slot_array,
            [
                |array| add(array, KEY_A, 150, 90),
                |array| add(array, KEY_A, 300, 150),
                |array| add(array, KEY_A, 300, 160),
            ],
        );
        let in_last = ends.iter().filter(|&&end| end == 300).count() as u32;
        // The first thread may also find that its window has ended, if it inserts after the others.
        assert!(ends[1..] == [300, 300] && [1, 150, 300].contains(&ends[0]), "{ends:?}");
        assert_eq!(counters(&slot_array, KEY_A), [(300, in_last)], "{ends:?}");
    });
}

/// Two keys search the same slots in opposite order. Both find a slot.
#[test]
fn keys_that_compete_for_slots_have_one_counter_each() {
    explore(2, || {
        let slot_array = Arc::new(slot_array());
        let ends = race(
            &slot_array,
            [
                |array| add(array, KEY_A, 100, 50),
                |array| add(array, KEY_C, 100, 50),
                |array| add(array, KEY_A, 100, 50),
            ],
        );
        assert_eq!(ends, [100; 3], "two slots are enough for two keys");
        assert_eq!((counters(&slot_array, KEY_A), counters(&slot_array, KEY_C)), (vec![(100, 2)], vec![(100, 1)]));
    });
}

/// A slot is reused after its window has ended, while a slow thread still charges that window. The slow thread must not
/// open the window again.
#[test]
fn a_reused_slot_is_not_opened_for_its_ended_window() {
    let outcomes = explore(3, || {
        let slot_array = Arc::new(slot_array());
        assert_eq!(add(&slot_array, KEY_A, 100, 50), 100);
        let [late, other] =
            race(&slot_array, [|array| add(array, KEY_A, 100, 60), |array| add(array, KEY_B, 200, 150)]);
        assert_eq!(other, 200);
        match late {
            // Charged next to the first token before the slot was reused, or early enough to keep the slot.
            100 => assert!(matches!(counters(&slot_array, KEY_A)[..], [] | [(100, 2)])),
            1 => assert_eq!(counters(&slot_array, KEY_A), []),
            end => panic!("counted in the window ending at {end}"),
        }
        late
    });
    assert_eq!(outcomes.into_iter().collect::<Vec<_>>(), [1, 100]);
}

/// A claim is removed, and the slot is claimed again for the same key, while a slow thread confirms the first claim. Meanwhile
/// the only token of the slow thread's window was used, and the slot reused: the window must not be opened again in place of
/// the second claim.
#[test]
fn a_removed_claim_is_not_confirmed_in_place_of_a_later_one() {
    let outcomes = explore(2, || {
        let slot_array = Arc::new(one_slot());
        let results = race(
            &slot_array,
            [
                |array| vec![acquire(array, KEY_A, 1, 100, 40)],
                |array| {
                    // With one slot, another key takes the claim.
                    let other = acquire(array, KEY_B, 1, 60, 50);
                    let first = acquire(array, KEY_A, 1, 100, 65);
                    vec![other, first, acquire(array, KEY_B, 1, 200, 150), acquire(array, KEY_A, 1, 300, 250)]
                },
            ],
        );
        let in_first = results.iter().flatten().filter(|end| **end == Some(100)).count();
        assert!(in_first <= 1, "{results:?}");
        results
    });
    assert!(outcomes.iter().any(|[late, _]| *late == [Some(1)]), "the slow thread finds a reused slot: {outcomes:?}");
}
