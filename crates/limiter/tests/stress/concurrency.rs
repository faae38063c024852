//! Threads that take, await and release slots of few keys, in tables with and without room for all keys.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;

use transom_limiter::concurrency::{ConcurrencyTable, Slot};
use transom_limiter::key::KeyHash;

use crate::{THREADS, mix};

const KEYS: u64 = 8;
const LIMIT: u32 = 3;
const REQUESTS: u64 = 20_000;

fn key(number: u64) -> KeyHash {
    KeyHash { bucket_hash: mix(number), tag: mix(!number) }
}

/// A request under way, counted apart from the table.
struct Request<'a> {
    under_way: &'a AtomicU64,
    slot: Option<Slot>,
}

impl<'a> Request<'a> {
    fn new(under_way: &'a AtomicU64, slot: Slot) -> Request<'a> {
        let before = under_way.fetch_add(1, Ordering::SeqCst);
        assert!(before < u64::from(LIMIT), "{before} were under way already");
        Request { under_way, slot: Some(slot) }
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        // Before the slot is released, and another request takes it.
        self.under_way.fetch_sub(1, Ordering::SeqCst);
        drop(self.slot.take());
    }
}

fn send_requests(table: &Arc<ConcurrencyTable>, under_way: &[AtomicU64], thread: u64) -> u64 {
    let (mut requests, mut queue, mut admitted) = (Vec::new(), Vec::new(), 0);
    for nth in 0..REQUESTS {
        let random = mix(thread << 32 | nth);
        let number = random >> 8 & (KEYS - 1);
        match random % 8 {
            0..4 => {
                let slot = table.try_acquire(key(number), LIMIT).0;
                requests.extend(slot.map(|slot| Request::new(&under_way[number as usize], slot)));
            }
            4 => queue.push((number, table.queue(key(number), LIMIT))),
            5 if !queue.is_empty() => drop(queue.swap_remove(random as usize >> 16 & (queue.len() - 1))),
            _ => drop(requests.pop()),
        }
        queue.retain_mut(|(number, queued)| match Pin::new(queued).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(slot) => {
                requests.push(Request::new(&under_way[*number as usize], slot));
                false
            }
            Poll::Pending => true,
        });
        admitted += requests.len() as u64;
    }
    admitted
}

fn race(table: ConcurrencyTable) {
    let table = Arc::new(table);
    let under_way: Vec<AtomicU64> = (0..KEYS).map(|_| AtomicU64::new(0)).collect();
    let admitted: u64 = thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (table, under_way) = (&table, &under_way);
                scope.spawn(move || send_requests(table, under_way, thread))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no thread panicked")).sum()
    });
    assert!(admitted > 0);
    assert!((0..KEYS).all(|number| table.in_use(key(number)) == 0));
}

#[test]
fn requests_under_way_never_exceed_the_limit() {
    race(ConcurrencyTable::default());
}

#[test]
fn keys_that_share_counts_never_exceed_the_limit() {
    race(ConcurrencyTable::with_capacity(1, 3));
}
