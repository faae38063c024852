//! The access log: one JSON line a request.
//!
//! Lines are handed to a thread of their own over a bounded queue. A loop never waits for the disk:
//! when the queue is full, the line is lost, and counted.

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

/// Lines that may wait for the writer.
const QUEUE_LINES: usize = 16 * 1024;
/// How often the end looks whether the writer has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Where a loop puts its lines. The log is closed when the last sink is dropped.
#[derive(Clone, Debug)]
pub struct LogSender {
    lines: SyncSender<Vec<u8>>,
    /// Set when the file was moved away: the next line goes to a new one.
    reopen: Arc<AtomicBool>,
}

/// The other end of the sinks.
#[derive(Debug)]
pub struct WriterThread(thread::JoinHandle<()>);

impl WriterThread {
    /// Waits until all lines are written, but not for a disk that takes none.
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
    /// Opens the log and starts its writer, which counts the lines it can not write.
    pub fn open(log: &AccessLog, lost: AccessLogMetrics) -> io::Result<(LogSender, WriterThread)> {
        let target = open(log)?;
        let (lines, queue) = sync_channel(QUEUE_LINES);
        let reopen = Arc::new(AtomicBool::new(false));
        let (log, asked) = (log.clone(), Arc::clone(&reopen));
        let run = move || write_all(&log, target, &queue, &asked, &lost);
        let writer = thread::Builder::new().name("access-log".to_owned()).spawn(run)?;
        Ok((LogSender { lines, reopen }, WriterThread(writer)))
    }

    /// Queues a line; `false` if it was lost.
    pub fn write(&self, line: &Value) -> bool {
        let mut text = line.to_string().into_bytes();
        text.push(b'\n');
        self.lines.try_send(text).is_ok()
    }

    /// Has the file opened again, under its name.
    pub fn reopen(&self) {
        self.reopen.store(true, Ordering::Release);
        // Wakes the writer; where the queue is full it is awake.
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

/// Writes what comes until all sinks are gone; flushes whenever the queue is empty.
fn write_all(
    log: &AccessLog,
    mut target: Target,
    queue: &Receiver<Vec<u8>>,
    asked: &AtomicBool,
    lost: &AccessLogMetrics,
) {
    let mut failing = false;
    while let Ok(first) = queue.recv() {
        if asked.swap(false, Ordering::AcqRel) {
            match open(log) {
                Ok(reopened) => target = reopened,
                Err(error) => tracing::error!(%error, "the access log can not be opened again"),
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
            // Said once per trouble, not once per line.
            if !failing {
                tracing::error!(%error, "the access log can not be written");
            }
            // What could not be written would be tried again with the next lines, and fail them.
            if let Ok(fresh) = open(log) {
                let (_, _unwritten) = std::mem::replace(&mut target, fresh).into_parts();
            }
        }
        failing = result.is_err();
    }
}
