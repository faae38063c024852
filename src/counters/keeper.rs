//! What is done for the counters beside counting, by a thread of its own: the processes that count together agree on
//! the time, and snapshots are written. No request ever waits for it.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::Counters;
use super::snapshot::{self, Written};
use crate::clock::Clock;
use crate::config;
use crate::metrics::meter::SnapshotMeter;

/// How often the time is told.
const TICK: Duration = Duration::from_secs(1);

/// The thread, for as long as somebody holds this.
pub struct Keeper {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

/// What the thread works with.
struct Work {
    counters: Arc<Counters>,
    clock: Clock,
    /// Where a snapshot goes, and how often.
    snapshot: Option<(PathBuf, Duration)>,
    meter: SnapshotMeter,
    failing: bool,
}

impl Keeper {
    pub fn start(
        counters: Arc<Counters>,
        clock: Clock,
        config: &config::Counters,
        meter: SnapshotMeter,
    ) -> io::Result<Keeper> {
        let snapshot = config.snapshot.clone().map(|path| (path, config.snapshot_every));
        let (stop, stopped) = mpsc::channel();
        let work = Work { counters, clock, snapshot, meter, failing: false };
        let thread = thread::Builder::new().name("counters".to_owned()).spawn(move || work.go_on(&stopped))?;
        Ok(Keeper { stop, thread })
    }

    /// Writes the last snapshot, and returns when it is written.
    pub fn finish(self) {
        drop(self.stop);
        if self.thread.join().is_err() {
            tracing::error!("the thread that keeps the counters panicked");
        }
    }
}

impl Work {
    fn go_on(mut self, stopped: &Receiver<()>) {
        let mut written = self.clock.instant();
        while stopped.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
            self.counters.keep_time(&self.clock);
            let every = self.snapshot.as_ref().map(|(_, every)| *every);
            if every.is_some_and(|every| self.clock.instant() - written >= every) {
                written = self.clock.instant();
                self.write();
            }
        }
        self.counters.keep_time(&self.clock);
        self.write();
    }

    fn write(&mut self) {
        let Some((path, _)) = &self.snapshot else { return };
        let now_ms = self.clock.now().unix_ms;
        match snapshot::write(&self.counters, path, now_ms) {
            Ok(Written::Counters(_)) => self.meter.written(now_ms),
            Ok(Written::ByAnother) => {}
            Err(error) => {
                self.meter.failed();
                // Said once per trouble, not once per snapshot.
                if !self.failing {
                    tracing::error!("the snapshot `{}` can not be written: {error}", path.display());
                }
                self.failing = true;
                return;
            }
        }
        self.failing = false;
    }
}
