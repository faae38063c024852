//! The access log: one line per request, written by its own thread.
//!
//! Workers send lines over a bounded queue and never wait for the disk: when the queue is full, a line is dropped and counted.

pub mod entry;

use std::fs::OpenOptions;
use std::io::{self, BufWriter, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use entry::LogEntry;

use transom_config::{AccessLog, LogFormat, LogTarget};
use transom_runtime::metrics::events::AccessLogMetrics;

/// Capacity of the queue.
const QUEUE_LINES: usize = 16 * 1024;
/// After a small batch, the writer lets lines gather for this long. Otherwise each line would wake the writer, which costs as
/// much as the request.
const GATHER_INTERVAL: Duration = Duration::from_millis(10);
/// A batch with fewer lines is small.
const SMALL_BATCH_LINES: u64 = QUEUE_LINES as u64 / 16;
/// How often `finish` checks whether the writer has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A worker's end of the queue. The writer ends when the last sender is dropped.
#[derive(Clone, Debug)]
pub struct LogSender {
    lines: SyncSender<Vec<u8>>,
    format: LogFormat,
    /// Set after log rotation: the next line goes to a new file.
    reopen: Arc<AtomicBool>,
}

/// A thread that writes what workers queue, until all senders are dropped.
#[derive(Debug)]
pub struct WriterThread(pub thread::JoinHandle<()>);

impl WriterThread {
    /// Waits until everything is written, at most for `within`.
    pub fn finish(self, within: Duration) {
        let tries = within.as_millis() / POLL_INTERVAL.as_millis();
        for _ in 0..tries {
            if self.0.is_finished() {
                return;
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

impl LogSender {
    /// Opens the log and starts its writer. `lost` counts the lines that cannot be written.
    pub fn open(log: &AccessLog, lost: AccessLogMetrics) -> io::Result<(LogSender, WriterThread)> {
        let output = open(&log.target)?;
        let (lines, queue) = sync_channel(QUEUE_LINES);
        let reopen = Arc::new(AtomicBool::new(false));
        let (target, reopen_requested) = (log.target.clone(), Arc::clone(&reopen));
        let run = move || write_all(&target, output, &queue, &reopen_requested, &lost);
        let writer = thread::Builder::new().name("access-log".to_owned()).spawn(run)?;
        Ok((LogSender { lines, format: log.format, reopen }, WriterThread(writer)))
    }

    /// Queues an entry. Returns `false` if the queue is full.
    pub fn write(&self, entry: &LogEntry) -> bool {
        self.lines.try_send(entry.to_line(self.format)).is_ok()
    }

    /// Reopens the file by its name.
    pub fn reopen(&self) {
        self.reopen.store(true, Ordering::Release);
        // The empty line wakes the writer. A full queue means that the writer is awake.
        let _ = self.lines.try_send(Vec::new());
    }
}

type Output = BufWriter<Box<dyn Write + Send>>;

fn open(target: &LogTarget) -> io::Result<Output> {
    Ok(BufWriter::new(match target {
        LogTarget::Stdout => Box::new(io::stdout()),
        LogTarget::File(path) => {
            let file = OpenOptions::new().append(true).create(true).open(path);
            Box::new(file.map_err(|error| io::Error::new(error.kind(), format!("`{}`: {error}", path.display())))?)
        }
    }))
}

/// Writes lines until all senders are dropped; flushes after each batch.
fn write_all(
    target: &LogTarget,
    mut output: Output,
    queue: &Receiver<Vec<u8>>,
    reopen: &AtomicBool,
    lost: &AccessLogMetrics,
) {
    let mut failing = false;
    while let Ok(first) = queue.recv() {
        if reopen.swap(false, Ordering::AcqRel) {
            match open(target) {
                Ok(reopened) => output = reopened,
                Err(error) => tracing::error!(%error, "the access log cannot be reopened"),
            }
        }
        let mut next = Some(first);
        let mut result = Ok(());
        let mut lines = 0;
        while let Some(line) = next {
            lines += 1;
            result = result.and_then(|()| output.write_all(&line));
            next = queue.try_recv().ok();
        }
        let result = result.and_then(|()| output.flush());
        if let Err(error) = &result {
            lost.lost(lines);
            // Logged once per outage, not per line.
            if !failing {
                tracing::error!(%error, "the access log cannot be written");
            }
            // A new buffer: the unwritten bytes would be retried with the next lines, and fail them.
            if let Ok(fresh) = open(target) {
                let (_, _unwritten) = std::mem::replace(&mut output, fresh).into_parts();
            }
        }
        failing = result.is_err();
        if lines < SMALL_BATCH_LINES {
            thread::sleep(GATHER_INTERVAL);
        }
    }
}
