//! Detects panics in the threads of a gateway that runs in this process.
//!
//! A gateway survives a panic by design and responds 500, so a test could pass despite one. Each gateway checks at its end
//! that none of its threads has panicked, and fails its test otherwise. Threads are identified by name: a gateway names
//! all of its threads, the test runner names its threads after the tests (`module::test`), and threads started by a test
//! have no name.

use std::panic;
use std::sync::{Mutex, Once, PoisonError};
use std::thread;

static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Installs the panic hook, once for the whole process.
pub fn install_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let thread = thread::current();
            let name = thread.name().unwrap_or("");
            if !name.is_empty() && name != "main" && !name.contains("::") {
                PANICS.lock().unwrap_or_else(PoisonError::into_inner).push(format!("{name}: {info}"));
            }
            before(info);
        }));
    });
}

/// Fails if a thread of any gateway of this process has panicked so far.
pub fn assert_no_panic() {
    let panics = PANICS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    assert!(panics.is_empty() || thread::panicking(), "a gateway panicked: {panics:?}");
}
