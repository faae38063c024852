//! What is done for the counters beside counting, by a thread of its own: the processes that count together agree on
//! the time, and snapshots are written. No request ever waits for it.
//!
//! The last snapshot is written only where somebody asks for it: a process that does not come to serve has counted
//! nothing.

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
use crate::metrics::events::SnapshotMetrics;

/// How often the time is told.
const TICK: Duration = Duration::from_secs(1);
/// How long the last snapshot waits for another process that is writing one: that one may have passed by what was
/// counted since, and nobody comes after this.
const PATIENCE: Duration = Duration::from_secs(30);

/// The thread, for as long as somebody holds this.
pub struct BackgroundWriter {
    finish: Sender<Finish>,
    thread: JoinHandle<()>,
}

/// That the last snapshot is to be written.
struct Finish;

/// What the thread works with.
struct Work {
    counters: Arc<Counters>,
    clock: Clock,
    /// Where a snapshot goes, and how often.
    snapshot: Option<(PathBuf, Duration)>,
    meter: SnapshotMetrics,
    failing: bool,
    /// The file is not where it was, and that was told.
    displaced: bool,
}

impl BackgroundWriter {
    pub fn start(
        counters: Arc<Counters>,
        clock: Clock,
        config: &config::Counters,
        meter: SnapshotMetrics,
    ) -> io::Result<BackgroundWriter> {
        let snapshot = config.snapshot.clone().map(|path| (path, config.snapshot_every));
        let (finish, told) = mpsc::channel();
        let work = Work { counters, clock, snapshot, meter, failing: false, displaced: false };
        let thread = thread::Builder::new().name("counters".to_owned()).spawn(move || work.go_on(&told))?;
        Ok(BackgroundWriter { finish, thread })
    }

    /// Writes the last snapshot, and returns when it is written.
    pub fn finish(self) {
        // If nobody hears that, the thread has panicked, which is told below.
        let _ = self.finish.send(Finish);
        if self.thread.join().is_err() {
            tracing::error!("the thread that keeps the counters panicked");
        }
    }
}

impl Work {
    fn go_on(mut self, told: &Receiver<Finish>) {
        let mut written = self.clock.instant();
        loop {
            let finish = match told.recv_timeout(TICK) {
                Ok(Finish) => true,
                Err(RecvTimeoutError::Timeout) => false,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            self.counters.keep_time(&self.clock);
            if !self.displaced && !self.counters.is_in_place() {
                self.displaced = true;
                tracing::warn!(
                    "`counters.file` was removed or replaced: this process counts on in the one that is gone, and whoever \
                     starts now begins anew"
                );
            }
            if finish {
                return self.write(PATIENCE);
            }
            let every = self.snapshot.as_ref().map(|(_, every)| *every);
            if every.is_some_and(|every| self.clock.instant() - written >= every) {
                written = self.clock.instant();
                self.write(Duration::ZERO);
            }
        }
    }

    /// Waits so long for another process that is writing; where it may not wait, the next time will do.
    fn write(&mut self, patience: Duration) {
        let Some((path, _)) = &self.snapshot else { return };
        let written = match snapshot::write(&self.counters, path, &self.clock, patience) {
            Ok(Written::ByAnother) if !patience.is_zero() => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "another process is writing it, and does not come to an end",
            )),
            written => written,
        };
        match written {
            Ok(Written::Counters(_)) => self.meter.written(self.clock.now().unix_ms),
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
