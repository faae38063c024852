//! The access log: one JSON line per request, written by its own thread.
//!
//! Workers send lines over a bounded queue and never wait for the disk: when the queue is full, a line is dropped and counted.

use std::fs::OpenOptions;
use std::io::{self, BufWriter, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::config::AccessLog;
use crate::metrics::events::AccessLogMetrics;

/// Capacity of the queue.
const QUEUE_LINES: usize = 16 * 1024;
/// How often `finish` checks whether the writer has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A worker's end of the queue. The writer ends when the last sender is dropped.
#[derive(Clone, Debug)]
pub struct LogSender {
    lines: SyncSender<Vec<u8>>,
    /// Set after log rotation: the next line goes to a new file.
    reopen: Arc<AtomicBool>,
}

/// The thread that writes the lines.
#[derive(Debug)]
pub struct WriterThread(thread::JoinHandle<()>);

impl WriterThread {
    /// Waits until all lines are written, at most for `within`.
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
        let target = open(log)?;
        let (lines, queue) = sync_channel(QUEUE_LINES);
        let reopen = Arc::new(AtomicBool::new(false));
        let (log, reopen_requested) = (log.clone(), Arc::clone(&reopen));
        let run = move || write_all(&log, target, &queue, &reopen_requested, &lost);
        let writer = thread::Builder::new().name("access-log".to_owned()).spawn(run)?;
        Ok((LogSender { lines, reopen }, WriterThread(writer)))
    }

    /// Queues a line. Returns `false` if the queue is full.
    pub fn write(&self, line: &Value) -> bool {
        let mut text = line.to_string().into_bytes();
        text.push(b'\n');
        self.lines.try_send(text).is_ok()
    }

    /// Reopens the file by its name.
    pub fn reopen(&self) {
        self.reopen.store(true, Ordering::Release);
        // The empty line wakes the writer. A full queue means that the writer is awake.
        let _ = self.lines.try_send(Vec::new());
    }
}

type Target = BufWriter<Box<dyn Write + Send>>;

fn open(log: &AccessLog) -> io::Result<Target> {
    Ok(BufWriter::new(match log {
        AccessLog::Stdout => Box::new(io::stdout()),
        AccessLog::File(path) => {
            let file = OpenOptions::new().append(true).create(true).open(path);
            Box::new(file.map_err(|error| io::Error::new(error.kind(), format!("`{}`: {error}", path.display())))?)
        }
    }))
}

/// Writes lines until all senders are dropped; flushes whenever the queue is empty.
fn write_all(
    log: &AccessLog,
    mut target: Target,
    queue: &Receiver<Vec<u8>>,
    reopen: &AtomicBool,
    lost: &AccessLogMetrics,
) {
    let mut failing = false;
    while let Ok(first) = queue.recv() {
        if reopen.swap(false, Ordering::AcqRel) {
            match open(log) {
                Ok(reopened) => target = reopened,
                Err(error) => tracing::error!(%error, "the access log cannot be reopened"),
            }
        }
        let mut next = Some(first);
        let mut result = Ok(());
        let mut lines = 0;
        while let Some(line) = next {
            lines += 1;
            result = result.and_then(|()| target.write_all(&line));
            next = queue.try_recv().ok();
        }
        let result = result.and_then(|()| target.flush());
        if let Err(error) = &result {
            lost.lost(lines);
            // Logged once per outage, not per line.
            if !failing {
                tracing::error!(%error, "the access log cannot be written");
            }
            // A new buffer: the unwritten bytes would be retried with the next lines, and fail them.
            if let Ok(fresh) = open(log) {
                let (_, _unwritten) = std::mem::replace(&mut target, fresh).into_parts();
            }
        }
        failing = result.is_err();
    }
}
