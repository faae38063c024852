//! Reads log files, compressed or not, in bounded memory, and puts their lines in order of time.
//!
//! Gateways log a request when it ends, so lines are out of order by the durations of requests. Each file is sorted within
//! a buffer of some megabytes; files are merged, so that rotated files and those of several gateways can be named in any
//! order. A thread for each file reads and parses the next block while lines of the present one are played.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, JoinHandle};

use indicatif::ProgressBar;
use memchr::{memchr, memrchr};

use super::decompression::decompressed;
use super::log_format::{LineReader, LogFormat};
use super::log_line::{HeaderSpan, LogLine, NoRequest};
use transom_limiter::handles;
use transom_limiter::handles::Handle;

/// Bytes read from a file at a time. About twice as much is sorted.
const BLOCK_BYTES: usize = 4 << 20;
/// Bytes of a block that are read and then parsed, while they are in the cache of the processor.
const PART_BYTES: usize = 128 << 10;
/// A longer line is a bad line.
const LINE_MAX_BYTES: usize = 1 << 20;
/// Lines that are played together.
pub const BATCH: usize = 32;
/// Bytes in which the first time of a file is searched for.
const PEEK_BYTES: u64 = 256 << 10;
/// Bad lines that are shown.
const EXAMPLES: usize = 10;
/// Bytes of a bad line that are shown.
const EXCERPT_BYTES: usize = 160;

/// The logs of a simulation.
pub struct LogFiles {
    sources: Vec<Source>,
    pub counts: ReadCounts,
}

handles! {
    /// A line of a [`Batch`].
    LineId,
}

/// Lines to be played, in order of time.
pub struct Batch<'a> {
    entries: &'a [Entry],
    buffer: &'a [u8],
    headers: &'a [HeaderSpan],
}

/// What was read.
#[derive(Default, Debug)]
pub struct ReadCounts {
    pub lines: u64,
    pub bad: u64,
    /// The first bad lines.
    pub bad_lines: Vec<BadLine>,
    /// Lines about requests that were answered before any rule decided.
    pub rejected: u64,
    /// Lines with an earlier time than a line before them in the file.
    pub out_of_order: u64,
    /// Lines whose time has no zone.
    pub without_zone: u64,
}

/// A line that cannot be read.
#[derive(Debug)]
pub struct BadLine {
    pub file: String,
    /// From 1 on.
    pub number: u64,
    pub reason: &'static str,
    pub excerpt: String,
}

/// A file that cannot be read.
#[derive(Debug)]
pub struct ReadError {
    pub file: String,
    pub error: io::Error,
}

impl ReadError {
    fn new(file: &str, error: io::Error) -> ReadError {
        let error = match error.kind() {
            io::ErrorKind::UnexpectedEof => io::Error::new(error.kind(), "its compressed data ends early"),
            _ => error,
        };
        ReadError { file: file.to_owned(), error }
    }
}

/// A parsed line, at a position of the buffer.
struct Entry {
    line: LogLine,
    at: u32,
    len: u32,
}

enum Input {
    /// A regular file whose first lines were looked at.
    Closed(PathBuf),
    Open(Box<dyn io::Read + Send>),
    AtEnd,
}

/// One file.
struct Source {
    name: String,
    /// The time of the first line that has one; 0 if none was found.
    first_ms: u64,
    state: SourceState,
    block: Block,
    /// The next entry of the block to play.
    next: usize,
}

enum SourceState {
    NotStarted(Box<BlockReader>),
    Started(ReaderThread),
    AtEnd,
}

/// The thread that reads a file ahead.
struct ReaderThread {
    blocks: Receiver<io::Result<Block>>,
    /// Takes blocks whose lines were played.
    used: Sender<Block>,
    thread: JoinHandle<()>,
}

/// Lines in order of time.
#[derive(Default)]
struct Block {
    buffer: Vec<u8>,
    headers: Vec<HeaderSpan>,
    entries: Vec<Entry>,
    /// Of the lines that were read for this block.
    counts: ReadCounts,
}

/// Reads the blocks of a file.
struct BlockReader {
    name: String,
    input: Input,
    format: Arc<LogFormat>,
    /// In the format that the first lines are in.
    reader: Option<LineReader>,
    progress: ProgressBar,
    /// The lines that were read, and the incomplete one behind them.
    block: Block,
    tail_at: usize,
    line_number: u64,
    latest_ms: u64,
    /// Whether the rest of an overlong line is to be skipped.
    skips_line: bool,
}

impl LogFiles {
    /// Opens the files; `-` is standard input. `progress` counts their bytes.
    pub fn open(paths: &[PathBuf], format: LogFormat, progress: ProgressBar) -> Result<LogFiles, ReadError> {
        let format = Arc::new(format);
        let mut sources = Vec::new();
        let mut total_bytes = Some(0);
        for path in paths {
            let name = path.display().to_string();
            let open = || -> io::Result<(Input, u64, Option<u64>)> {
                if name == "-" {
                    return Ok((Input::Open(decompressed(progress.wrap_read(io::stdin()))?), 0, None));
                }
                let metadata = fs::metadata(path)?;
                if metadata.is_dir() {
                    return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory"));
                }
                if !metadata.is_file() {
                    return Ok((Input::Open(decompressed(progress.wrap_read(File::open(path)?))?), 0, None));
                }
                let first_ms = first_time(path, &format)?;
                Ok((Input::Closed(path.clone()), first_ms, Some(metadata.len())))
            };
            let (input, first_ms, bytes) = open().map_err(|error| ReadError::new(&name, error))?;
            total_bytes = total_bytes.zip(bytes).map(|(total, bytes)| total + bytes);
            let reader = BlockReader::new(name.clone(), input, Arc::clone(&format), progress.clone());
            let state = SourceState::NotStarted(Box::new(reader));
            sources.push(Source { name, first_ms, state, block: Block::default(), next: 0 });
        }
        if let Some(total_bytes) = total_bytes {
            progress.set_length(total_bytes);
        }
        Ok(LogFiles { sources, counts: ReadCounts::default() })
    }

    /// Calls `play` with all lines, in order of time as far as they can be sorted.
    pub fn for_each(&mut self, mut play: impl FnMut(&Batch<'_>)) -> Result<(), ReadError> {
        loop {
            let (mut first, mut limit_ms) = (None, u64::MAX);
            for (position, source) in self.sources.iter().enumerate() {
                match (source.next_ms(), first) {
                    (None, _) => {}
                    (Some(time_ms), Some((earliest_ms, _))) if time_ms >= earliest_ms => {
                        limit_ms = limit_ms.min(time_ms)
                    }
                    (Some(time_ms), former) => {
                        limit_ms = former.map_or(limit_ms, |(earliest_ms, _)| limit_ms.min(earliest_ms));
                        first = Some((time_ms, position));
                    }
                }
            }
            let Some((_, position)) = first else { return Ok(()) };
            let source = &mut self.sources[position];
            loop {
                let Source { block, next, .. } = source;
                let entries = block.entries[*next..].iter().take(BATCH);
                let count = entries.take_while(|entry| entry.line.time_ms <= limit_ms).count();
                if count == 0 {
                    break;
                }
                let entries = &block.entries[*next..*next + count];
                play(&Batch { entries, buffer: &block.buffer, headers: &block.headers });
                *next += count;
            }
            if source.next == source.block.entries.len() {
                let received = source.receive(&mut self.counts);
                received.map_err(|error| ReadError::new(&source.name, error))?;
            }
        }
    }
}

impl<'a> Batch<'a> {
    /// The lines, in order.
    pub fn ids(&self) -> impl Iterator<Item = LineId> + use<> {
        (0..self.entries.len()).map(LineId::at)
    }

    /// A line, its bytes, and its fields.
    pub fn get(&self, line: LineId) -> (&'a LogLine, &'a [u8], &'a [HeaderSpan]) {
        let Entry { line, at, len } = &self.entries[line.index()];
        let (at, headers) = (*at as usize, line.headers);
        (line, &self.buffer[at..at + *len as usize], &self.headers[headers.0 as usize..headers.1 as usize])
    }
}

impl Source {
    /// The time of the next line, Unix milliseconds; before the first block is received, that of the first line of the file.
    /// `None` at the end of the file.
    fn next_ms(&self) -> Option<u64> {
        match (self.block.entries.get(self.next), &self.state) {
            (Some(entry), _) => Some(entry.line.time_ms),
            (None, SourceState::NotStarted(_) | SourceState::Started(_)) => Some(self.first_ms),
            (None, SourceState::AtEnd) => None,
        }
    }

    /// Waits for the next block, and adds its counts. The first call starts the thread.
    fn receive(&mut self, counts: &mut ReadCounts) -> io::Result<()> {
        let thread = match std::mem::replace(&mut self.state, SourceState::AtEnd) {
            SourceState::NotStarted(reader) => ReaderThread::start(*reader)?,
            SourceState::Started(thread) => thread,
            SourceState::AtEnd => return Ok(()),
        };
        let used = std::mem::take(&mut self.block);
        self.next = 0;
        // At the end of the file, the thread has ended.
        let _ = thread.used.send(used);
        match thread.blocks.recv() {
            Ok(block) => {
                self.block = block?;
                counts.add(std::mem::take(&mut self.block.counts));
                self.state = SourceState::Started(thread);
            }
            Err(_ended) => thread.thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
        }
        Ok(())
    }
}

impl ReaderThread {
    fn start(reader: BlockReader) -> io::Result<ReaderThread> {
        // Without a queue: the thread works on one block, while another one is played.
        let (sender, blocks) = sync_channel(0);
        let (used, spare) = channel();
        let thread = thread::Builder::new().name("log reader".to_owned());
        let thread = thread.spawn(move || reader.run(&sender, &spare))?;
        Ok(ReaderThread { blocks, used, thread })
    }
}

impl BlockReader {
    fn new(name: String, input: Input, format: Arc<LogFormat>, progress: ProgressBar) -> BlockReader {
        BlockReader {
            name,
            input,
            format,
            reader: None,
            progress,
            block: Block::default(),
            tail_at: 0,
            line_number: 0,
            latest_ms: 0,
            skips_line: false,
        }
    }

    /// Sends all blocks, until an error.
    fn run(mut self, blocks: &SyncSender<io::Result<Block>>, spare: &Receiver<Block>) {
        loop {
            let block = self.read_block(spare);
            let is_last = block.is_err() || matches!(self.input, Input::AtEnd);
            if blocks.send(block).is_err() || is_last {
                return;
            }
        }
    }

    /// Reads and sorts more lines, until some can be played or the file ends.
    fn read_block(&mut self, spare: &Receiver<Block>) -> io::Result<Block> {
        loop {
            if let Input::Closed(path) = &self.input {
                self.input = Input::Open(decompressed(self.progress.wrap_read(File::open(path)?))?);
            }
            for _ in 0..BLOCK_BYTES / PART_BYTES {
                let Input::Open(reader) = &mut self.input else { break };
                let read = reader.take(PART_BYTES as u64).read_to_end(&mut self.block.buffer)?;
                if read < PART_BYTES {
                    self.input = Input::AtEnd;
                }
                self.parse();
            }
            let entries = &mut self.block.entries;
            if !entries.is_sorted_by_key(|entry| entry.line.time_ms) {
                entries.sort_by_key(|entry| entry.line.time_ms);
            }
            match self.input {
                Input::AtEnd => return Ok(std::mem::take(&mut self.block)),
                // Later lines may belong before the second half.
                Input::Open(_) | Input::Closed(_) if entries.len() > 1 => {
                    let ready = entries.len() / 2;
                    return Ok(self.split(ready, spare.try_recv().unwrap_or_default()));
                }
                Input::Open(_) | Input::Closed(_) => {
                    // Lines that cannot be played make room.
                    let mut read = self.split(0, Block::default());
                    self.block.counts = std::mem::take(&mut read.counts);
                }
            }
        }
    }

    /// Returns the first `ready` lines. Moves the others, and the incomplete one, to the memory of a used block.
    fn split(&mut self, ready: usize, mut rest: Block) -> Block {
        rest.buffer.clear();
        rest.headers.clear();
        rest.entries.clear();
        rest.entries.extend(self.block.entries.drain(ready..));
        for entry in &mut rest.entries {
            let at = entry.at as usize;
            entry.at = rest.buffer.len() as u32;
            rest.buffer.extend_from_slice(&self.block.buffer[at..at + entry.len as usize]);
            let first = rest.headers.len() as u32;
            let (from, to) = entry.line.headers;
            rest.headers.extend_from_slice(&self.block.headers[from as usize..to as usize]);
            entry.line.headers = (first, rest.headers.len() as u32);
        }
        let tail_at = rest.buffer.len();
        rest.buffer.extend_from_slice(&self.block.buffer[self.tail_at..]);
        self.tail_at = tail_at;
        std::mem::replace(&mut self.block, rest)
    }

    /// Parses the complete lines behind `tail_at`.
    fn parse(&mut self) {
        let Block { buffer, headers, entries, counts } = &mut self.block;
        if self.skips_line {
            let end = memchr(b'\n', &buffer[self.tail_at..]).map(|at| self.tail_at + at + 1);
            self.skips_line = end.is_none();
            self.tail_at = end.unwrap_or(buffer.len());
        }
        let end = match self.input {
            Input::AtEnd => buffer.len(),
            _ => memrchr(b'\n', &buffer[self.tail_at..]).map_or(self.tail_at, |at| self.tail_at + at + 1),
        };
        let mut start = self.tail_at;
        self.tail_at = end;
        let (format, text) = (&self.format, &buffer[start..end]);
        let reader = self.reader.get_or_insert_with(|| LineReader::new(Arc::clone(format), text));
        while start < end {
            let line_end = memchr(b'\n', &buffer[start..end]).map_or(end, |at| start + at);
            let file_line = start..line_end;
            start = line_end + 1;
            self.line_number += 1;
            let first_header = headers.len();
            // Blank lines appear where logs are joined.
            let Some((inner, parsed)) = reader.read(&mut buffer[file_line.clone()], headers) else { continue };
            let inner = file_line.start + inner.start..file_line.start + inner.end;
            counts.lines += 1;
            match parsed {
                Ok(line) => {
                    counts.without_zone += u64::from(line.lacks_zone);
                    counts.out_of_order += u64::from(line.time_ms < self.latest_ms);
                    self.latest_ms = self.latest_ms.max(line.time_ms);
                    entries.push(Entry { line, at: inner.start as u32, len: inner.len() as u32 });
                }
                Err(NoRequest::Rejected) => {
                    headers.truncate(first_header);
                    counts.rejected += 1;
                }
                Err(NoRequest::Bad(reason)) => {
                    headers.truncate(first_header);
                    counts.add_bad(&self.name, self.line_number, reason, &buffer[inner]);
                }
            }
        }
        if buffer.len() - self.tail_at > LINE_MAX_BYTES {
            self.line_number += 1;
            counts.lines += 1;
            counts.add_bad(&self.name, self.line_number, "it is longer than 1 MiB", &buffer[self.tail_at..]);
            buffer.truncate(self.tail_at);
            self.skips_line = true;
        }
    }
}

impl ReadCounts {
    fn add(&mut self, other: ReadCounts) {
        let ReadCounts { lines, bad, bad_lines, rejected, out_of_order, without_zone } = other;
        self.lines += lines;
        self.bad += bad;
        self.bad_lines.extend(bad_lines);
        self.bad_lines.truncate(EXAMPLES);
        self.rejected += rejected;
        self.out_of_order += out_of_order;
        self.without_zone += without_zone;
    }

    fn add_bad(&mut self, file: &str, number: u64, reason: &'static str, line: &[u8]) {
        self.bad += 1;
        if self.bad_lines.len() < EXAMPLES {
            let text = String::from_utf8_lossy(&line[..line.len().min(EXCERPT_BYTES)]);
            let excerpt = text.chars().map(|sign| if sign.is_control() { '\u{fffd}' } else { sign }).collect();
            self.bad_lines.push(BadLine { file: file.to_owned(), number, reason, excerpt });
        }
    }
}

/// The time of the first line that can be read; 0 if there is none near the start.
fn first_time(path: &Path, format: &Arc<LogFormat>) -> io::Result<u64> {
    let mut start = Vec::new();
    decompressed(File::open(path)?)?.take(PEEK_BYTES).read_to_end(&mut start)?;
    let mut reader = LineReader::new(Arc::clone(format), &start);
    let mut lines = start.split_mut(|byte| *byte == b'\n');
    let time = lines.find_map(|line| Some(reader.read(line, &mut Vec::new())?.1.ok()?.time_ms));
    Ok(time.unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::field_names::LoggedFields;

    /// One overlong line, and lines without a request.
    #[test]
    fn lines_that_cannot_be_read_take_no_memory() {
        for line in ["", "no line of a log, however long it may be, since it goes on and on\n"] {
            let bytes = match line {
                "" => Box::new(io::repeat(b'x').take(40 << 20)) as Box<dyn io::Read + Send>,
                _ => Box::new(io::Cursor::new(line.repeat((40 << 20) / line.len()))),
            };
            let format = Arc::new(LogFormat::parse("combined", LoggedFields::default()).unwrap());
            let mut reader = BlockReader::new("log".to_owned(), Input::Open(bytes), format, ProgressBar::hidden());
            let block = reader.read_block(&channel().1).unwrap();
            assert!(block.buffer.capacity() <= 2 * BLOCK_BYTES + LINE_MAX_BYTES, "{}", block.buffer.capacity());
            assert_eq!((block.counts.bad, block.counts.lines), (block.counts.lines, block.counts.bad));
            assert!(block.counts.bad > 0);
        }
    }
}
