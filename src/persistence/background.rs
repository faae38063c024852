//! Background thread of the counters: synchronizes the time among processes that share counters, and writes snapshots.
//! No request waits for it.
//!
//! The last snapshot is written only by [`BackgroundWriter::finish`]: a process that fails to start has counted
//! nothing.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::counters::Counters;
use super::snapshot::{self, Written};
use transom_runtime::clock::Clock;

use transom_runtime::metrics::events::SnapshotMetrics;

/// Interval of time synchronization.
const TICK: Duration = Duration::from_secs(1);
/// How long the last snapshot waits for a snapshot that another process is writing, which may lack what was counted
/// since it began; no later snapshot follows this one.
const LAST_SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(30);

/// The thread, which ends when this is dropped.
pub struct BackgroundWriter {
    finish: Sender<Finish>,
    thread: JoinHandle<()>,
}

/// Asks for the last snapshot.
struct Finish;

/// The state of the thread.
struct Work {
    counters: Arc<Counters>,
    clock: Clock,
    /// Where snapshots go, and how often.
    snapshot: Option<(PathBuf, Duration)>,
    metrics: SnapshotMetrics,
    is_failing: bool,
    /// Whether the warning that the file was removed or replaced is logged.
    is_displaced: bool,
}

impl BackgroundWriter {
    pub fn start(
        counters: Arc<Counters>,
        clock: Clock,
        config: &transom_config::counters::Counters,
        meter: SnapshotMetrics,
    ) -> io::Result<BackgroundWriter> {
        let snapshot = config.snapshot.clone().map(|path| (path, config.snapshot_every));
        let (finish, finish_requests) = mpsc::channel();
        let work = Work { counters, clock, snapshot, metrics: meter, is_failing: false, is_displaced: false };
        let thread = thread::Builder::new().name("counters".to_owned()).spawn(move || work.run(&finish_requests))?;
        Ok(BackgroundWriter { finish, thread })
    }

    /// Writes the last snapshot, and returns when it is written.
    pub fn finish(self) {
        // The send fails only if the thread has panicked, which is logged below.
        let _ = self.finish.send(Finish);
        if self.thread.join().is_err() {
            tracing::error!("the counters thread panicked");
        }
    }
}

impl Work {
    fn run(mut self, finish_requests: &Receiver<Finish>) {
        let mut written = self.clock.instant();
        loop {
            let finish = match finish_requests.recv_timeout(TICK) {
                Ok(Finish) => true,
                Err(RecvTimeoutError::Timeout) => false,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            self.counters.sync_time(&self.clock);
            if !self.is_displaced && !self.counters.is_in_place() {
                self.is_displaced = true;
                tracing::warn!(
                    "`counters.file` was removed or replaced: this process keeps using the old file, new \
                     processes start with empty counters"
                );
            }
            if finish {
                return self.write(LAST_SNAPSHOT_TIMEOUT);
            }
            let every = self.snapshot.as_ref().map(|(_, every)| *every);
            if every.is_some_and(|every| self.clock.instant() - written >= every) {
                written = self.clock.instant();
                self.write(Duration::ZERO);
            }
        }
    }

    /// Writes a snapshot. `patience`: how long to wait for another process that is writing one; 0 leaves it to the next
    /// interval.
    fn write(&mut self, patience: Duration) {
        let Some((path, _)) = &self.snapshot else { return };
        let written = match snapshot::write(&self.counters, path, &self.clock, patience) {
            Ok(Written::OtherWriter) if !patience.is_zero() => {
                Err(io::Error::new(io::ErrorKind::TimedOut, "another process is still writing it"))
            }
            written => written,
        };
        match written {
            Ok(Written::Counters(_)) => self.metrics.written(self.clock.now().unix_ms),
            Ok(Written::OtherWriter) => {}
            Err(error) => {
                self.metrics.failed();
                // Logged for the first failure in a row.
                if !self.is_failing {
                    tracing::error!("the snapshot `{}` cannot be written: {error}", path.display());
                }
                self.is_failing = true;
                return;
            }
        }
        self.is_failing = false;
    }
}
