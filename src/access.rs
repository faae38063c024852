//! The access log: one JSON line a request.
//!
//! Lines are handed to a thread of their own over a bounded queue. A loop never waits for the disk:
//! when the queue is full, the line is lost, and counted.

use std::fs::OpenOptions;
use std::io::{self, BufWriter, Write};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use serde_json::Value;

use crate::config::AccessLog;

/// Lines that may wait for the writer.
const QUEUE_LINES: usize = 16 * 1024;

enum Message {
    Line(Vec<u8>),
    /// The file was moved away: go on in a new one.
    Reopen,
}

/// Where a loop puts its lines. The log is closed when the last sink is dropped.
#[derive(Clone, Debug)]
pub struct Sink(SyncSender<Message>);

impl Sink {
    /// Opens the log and starts its writer.
    pub fn open(log: &AccessLog) -> io::Result<(Sink, thread::JoinHandle<()>)> {
        let target = open(log)?;
        let (sender, receiver) = sync_channel(QUEUE_LINES);
        let log = log.clone();
        let writer =
            thread::Builder::new().name("access-log".to_owned()).spawn(move || write_all(&log, target, &receiver))?;
        Ok((Sink(sender), writer))
    }

    /// Queues a line; `false` if it was lost.
    pub fn write(&self, line: &Value) -> bool {
        let mut text = line.to_string().into_bytes();
        text.push(b'\n');
        self.0.try_send(Message::Line(text)).is_ok()
    }

    /// Opens the file again, under its name. Waits for a place in the queue.
    pub fn reopen(&self) {
        // The writer is gone only if it panicked, which was reported then.
        let _ = self.0.send(Message::Reopen);
    }
}

type Target = BufWriter<Box<dyn Write + Send>>;

fn open(log: &AccessLog) -> io::Result<Target> {
    Ok(BufWriter::new(match log {
        AccessLog::Stdout => Box::new(io::stdout()),
        AccessLog::File(path) => Box::new(OpenOptions::new().append(true).create(true).open(path)?),
    }))
}

/// Writes what comes until all sinks are gone; flushes whenever the queue is empty.
fn write_all(log: &AccessLog, mut target: Target, queue: &Receiver<Message>) {
    let mut failing = false;
    while let Ok(first) = queue.recv() {
        let mut next = Some(first);
        let mut result = Ok(());
        while let Some(message) = next {
            match message {
                Message::Line(line) => result = result.and_then(|()| target.write_all(&line)),
                Message::Reopen => {
                    result = result.and_then(|()| target.flush());
                    match open(log) {
                        Ok(reopened) => target = reopened,
                        Err(error) => tracing::error!(%error, "the access log can not be opened again"),
                    }
                }
            }
            next = queue.try_recv().ok();
        }
        let result = result.and_then(|()| target.flush());
        // Said once per trouble, not once per line.
        if let (Err(error), false) = (&result, failing) {
            tracing::error!(%error, "the access log can not be written");
        }
        failing = result.is_err();
    }
}
