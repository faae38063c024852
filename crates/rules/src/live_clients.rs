//! The clients as of now: replaced as a whole when one has changed, while requests go on with those that they began with.

use std::cell::{Ref, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::client_plans::ClientPlans;

/// The current clients, for all threads.
#[derive(Debug)]
pub struct LiveClients {
    /// Number of replacements.
    version: AtomicU64,
    current: Mutex<Arc<ClientPlans>>,
    /// Held by the thread that makes a change.
    changing: Mutex<()>,
}

impl LiveClients {
    pub fn new(plans: ClientPlans) -> Arc<LiveClients> {
        let (version, current, changing) = (AtomicU64::new(0), Mutex::new(Arc::new(plans)), Mutex::default());
        Arc::new(LiveClients { version, current, changing })
    }

    /// The current clients. Takes a lock: requests use a [`ClientsReader`].
    pub fn current(&self) -> Arc<ClientPlans> {
        Arc::clone(&self.lock())
    }

    /// Replaces the clients by a changed copy.
    pub fn change(&self, change: impl FnOnce(&mut ClientPlans)) {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut plans = ClientPlans::clone(&self.current());
        change(&mut plans);
        let former = std::mem::replace(&mut *self.lock(), Arc::new(plans));
        // Ordering: release; a reader that sees the number takes the lock and finds these clients, or later ones.
        self.version.fetch_add(1, Ordering::Release);
        // Not dropped under the lock.
        drop(former);
    }

    fn lock(&self) -> MutexGuard<'_, Arc<ClientPlans>> {
        // A panic leaves whole clients.
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The current clients, as one thread reads them: without a lock, unless they were replaced.
pub struct ClientsReader {
    live: Arc<LiveClients>,
    seen: RefCell<(u64, Arc<ClientPlans>)>,
}

impl ClientsReader {
    pub fn new(live: &Arc<LiveClients>) -> ClientsReader {
        // Read before the clients, so that a replacement in between is noticed.
        let version = live.version.load(Ordering::Acquire);
        ClientsReader { seen: RefCell::new((version, live.current())), live: Arc::clone(live) }
    }

    /// The current clients. The borrow must end before the next call.
    #[inline]
    pub fn current(&self) -> Ref<'_, ClientPlans> {
        // Ordering: acquire; pairs with `LiveClients::change`.
        let version = self.live.version.load(Ordering::Acquire);
        if self.seen.borrow().0 != version {
            self.refresh(version);
        }
        Ref::map(self.seen.borrow(), |(_, plans)| &**plans)
    }

    #[cold]
    fn refresh(&self, version: u64) {
        self.seen.replace((version, self.live.current()));
    }
}
