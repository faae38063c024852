//! The keys that an issuer publishes at a URL, as last fetched: written by the thread that fetches them, read by all workers.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::verification_key::VerificationKey;

/// The key set of one URL.
pub struct PublishedKeys {
    /// Number of changes of the keys.
    version: AtomicU64,
    set: Mutex<Option<KeySet>>,
    /// Whether a token was signed with an unknown key since the last fetch.
    is_refresh_wanted: AtomicBool,
    /// Whether the first fetch has ended, successfully or not.
    was_tried: AtomicBool,
    /// Wakes the thread that fetches.
    wake: Box<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for PublishedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PublishedKeys").field("version", &self.version()).finish_non_exhaustive()
    }
}

/// A key set, with the text that it was read from.
#[derive(Clone)]
pub struct KeySet {
    /// Never empty.
    pub keys: Arc<[VerificationKey]>,
    pub text: Arc<[u8]>,
    /// Unix milliseconds of the wall clock, which an upgrade passes on.
    pub fetched_at_ms: u64,
}

impl PublishedKeys {
    /// `wake` is called when a fetch is wanted early.
    pub fn new(wake: impl Fn() + Send + Sync + 'static) -> PublishedKeys {
        PublishedKeys {
            version: AtomicU64::new(0),
            set: Mutex::new(None),
            is_refresh_wanted: AtomicBool::new(false),
            was_tried: AtomicBool::new(false),
            wake: Box::new(wake),
        }
    }

    /// Changes whenever the keys do. 0 before the first ones.
    pub fn version(&self) -> u64 {
        // Ordering: acquire; pairs with `replace` and `remove`, although the keys are read under the lock.
        self.version.load(Ordering::Acquire)
    }

    /// The keys with their version; none if there is no key set.
    pub fn keys(&self) -> (u64, Arc<[VerificationKey]>) {
        let set = self.lock();
        (self.version(), set.as_ref().map_or_else(|| Arc::new([]) as Arc<[_]>, |set| Arc::clone(&set.keys)))
    }

    /// The last key set, unless there was none or it became too old.
    pub fn key_set(&self) -> Option<KeySet> {
        self.lock().clone()
    }

    /// Replaces the key set. Returns whether the keys have changed.
    pub fn replace(&self, set: KeySet) -> bool {
        let mut current = self.lock();
        let has_changed = current.as_ref().is_none_or(|former| *former.keys != *set.keys);
        *current = Some(set);
        if has_changed {
            self.version.fetch_add(1, Ordering::Release);
        }
        has_changed
    }

    /// Removes a key set that is too old.
    pub fn remove(&self) {
        let mut current = self.lock();
        *current = None;
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Asks for an early fetch. Only the first call since the last fetch wakes the thread.
    pub fn want_refresh(&self) {
        // Ordering: relaxed; the waking synchronizes, and a fetch reads nothing that was written before.
        if !self.is_refresh_wanted.load(Ordering::Relaxed) && !self.is_refresh_wanted.swap(true, Ordering::Relaxed) {
            (self.wake)();
        }
    }

    /// Whether an early fetch was asked for since the last call.
    pub fn take_wanted_refresh(&self) -> bool {
        self.is_refresh_wanted.swap(false, Ordering::Relaxed)
    }

    /// Whether the first fetch has ended. A start waits for it, so that valid tokens are not refused meanwhile.
    pub fn was_tried(&self) -> bool {
        // Ordering: relaxed, because nothing else depends on it.
        self.was_tried.load(Ordering::Relaxed)
    }

    pub fn set_tried(&self) {
        self.was_tried.store(true, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Option<KeySet>> {
        // A panic leaves one of two complete sets.
        self.set.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
