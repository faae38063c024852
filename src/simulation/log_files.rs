//! Reads log files, compressed or not, in bounded memory, and puts their lines in order of time.
//!
//! Gateways log a request when it ends, so lines are out of order by the durations of requests. Each file is sorted within
//! a buffer of some megabytes; files are merged, so that rotated files and those of several gateways can be named in any
//! order.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use indicatif::ProgressBar;
use memchr::{memchr, memchr_iter, memrchr};
use ruzstd::decoding::errors::FrameDecoderError;
use ruzstd::decoding::{FrameDecoder, StreamingDecoder};

use super::log_line::{HeaderSpan, LogFormat, LogLine, NoRequest};

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
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// The logs of a simulation.
pub struct LogFiles {
    sources: Vec<Source>,
    format: LogFormat,
    progress: ProgressBar,
    pub counts: ReadCounts,
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

/// A parsed line, at a position of the buffer.
struct Entry {
    line: LogLine,
    at: u32,
    len: u32,
}

enum Input {
    /// A regular file whose first lines were looked at.
    Closed(PathBuf),
    Open(Box<dyn Read>),
    AtEnd,
}

/// One file.
struct Source {
    name: String,
    input: Input,
    /// The time of the first line that has one; 0 if none was found.
    first_ms: u64,
    buffer: Vec<u8>,
    /// Where the last, incomplete line begins.
    tail_at: usize,
    /// In order of time.
    entries: Vec<Entry>,
    headers: Vec<HeaderSpan>,
    /// The next entry to play, and the first one that must wait for more lines.
    next: usize,
    ready: usize,
    /// The memory of the last block, to be used again.
    spare: (Vec<u8>, Vec<HeaderSpan>),
    line_number: u64,
    latest_ms: u64,
    /// Whether the rest of an overlong line is to be skipped.
    skips_line: bool,
}

impl LogFiles {
    /// Opens the files; `-` is standard input. `progress` counts their bytes.
    pub fn open(paths: &[PathBuf], format: LogFormat, progress: ProgressBar) -> Result<LogFiles, ReadError> {
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
            let (input, first_ms, bytes) = open().map_err(|error| ReadError { file: name.clone(), error })?;
            total_bytes = total_bytes.zip(bytes).map(|(total, bytes)| total + bytes);
            sources.push(Source::new(name, input, first_ms));
        }
        if let Some(total_bytes) = total_bytes {
            progress.set_length(total_bytes);
        }
        Ok(LogFiles { sources, format, progress, counts: ReadCounts::default() })
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
                let entries = source.entries[source.next..source.ready].iter().take(BATCH);
                let count = entries.take_while(|entry| entry.line.time_ms <= limit_ms).count();
                if count == 0 {
                    break;
                }
                let entries = &source.entries[source.next..source.next + count];
                play(&Batch { entries, buffer: &source.buffer, headers: &source.headers });
                source.next += count;
            }
            if source.next == source.ready {
                let refilled = source.refill(&self.format, &self.progress, &mut self.counts);
                refilled.map_err(|error| ReadError { file: source.name.clone(), error })?;
            }
        }
    }
}

impl<'a> Batch<'a> {
    /// The numbers of the lines.
    pub fn numbers(&self) -> Range<usize> {
        0..self.entries.len()
    }

    /// A line, its bytes, and its fields.
    pub fn get(&self, number: usize) -> (&'a LogLine, &'a [u8], &'a [HeaderSpan]) {
        let Entry { line, at, len } = &self.entries[number];
        let (at, headers) = (*at as usize, line.headers);
        (line, &self.buffer[at..at + *len as usize], &self.headers[headers.0 as usize..headers.1 as usize])
    }
}

impl Source {
    fn new(name: String, input: Input, first_ms: u64) -> Source {
        Source {
            name,
            input,
            first_ms,
            buffer: Vec::new(),
            tail_at: 0,
            entries: Vec::new(),
            headers: Vec::new(),
            next: 0,
            ready: 0,
            spare: Default::default(),
            line_number: 0,
            latest_ms: 0,
            skips_line: false,
        }
    }

    /// A time before which no line comes any more; `None` at the end of the file.
    fn next_ms(&self) -> Option<u64> {
        match (self.entries.get(self.next), &self.input) {
            (Some(entry), _) => Some(entry.line.time_ms),
            (None, Input::Closed(_) | Input::Open(_)) => Some(self.first_ms),
            (None, Input::AtEnd) => None,
        }
    }

    /// Reads and sorts more lines, until some can be played or the file ends.
    fn refill(&mut self, format: &LogFormat, progress: &ProgressBar, counts: &mut ReadCounts) -> io::Result<()> {
        while self.next == self.ready {
            if let Input::Closed(path) = &self.input {
                self.input = Input::Open(decompressed(progress.wrap_read(File::open(path)?))?);
            }
            self.compact();
            for _ in 0..BLOCK_BYTES / PART_BYTES {
                let Input::Open(reader) = &mut self.input else { break };
                let read = reader.take(PART_BYTES as u64).read_to_end(&mut self.buffer)?;
                if read < PART_BYTES {
                    self.input = Input::AtEnd;
                }
                self.parse(format, counts);
            }
            if !self.entries.is_sorted_by_key(|entry| entry.line.time_ms) {
                self.entries.sort_by_key(|entry| entry.line.time_ms);
            }
            match self.input {
                // Later lines may belong before the second half.
                Input::Open(_) | Input::Closed(_) => self.ready = self.entries.len() / 2,
                Input::AtEnd => {
                    self.ready = self.entries.len();
                    break;
                }
            }
        }
        if self.entries.is_empty() {
            (self.buffer, self.spare) = Default::default();
        }
        Ok(())
    }

    /// Moves the lines that were not played, and the incomplete one, to the start of the buffer.
    fn compact(&mut self) {
        let (mut buffer, mut headers) = std::mem::take(&mut self.spare);
        buffer.clear();
        headers.clear();
        self.entries.drain(..self.next);
        for entry in &mut self.entries {
            let at = entry.at as usize;
            entry.at = buffer.len() as u32;
            buffer.extend_from_slice(&self.buffer[at..at + entry.len as usize]);
            let first = headers.len() as u32;
            headers.extend_from_slice(&self.headers[entry.line.headers.0 as usize..entry.line.headers.1 as usize]);
            entry.line.headers = (first, headers.len() as u32);
        }
        let tail_at = buffer.len();
        buffer.extend_from_slice(&self.buffer[self.tail_at..]);
        self.tail_at = tail_at;
        self.spare = (std::mem::replace(&mut self.buffer, buffer), std::mem::replace(&mut self.headers, headers));
        (self.next, self.ready) = (0, 0);
    }

    /// Parses the complete lines behind `tail_at`.
    fn parse(&mut self, format: &LogFormat, counts: &mut ReadCounts) {
        if self.skips_line {
            let end = memchr(b'\n', &self.buffer[self.tail_at..]).map(|at| self.tail_at + at + 1);
            self.skips_line = end.is_none();
            self.tail_at = end.unwrap_or(self.buffer.len());
        }
        let end = match self.input {
            Input::AtEnd => self.buffer.len(),
            _ => memrchr(b'\n', &self.buffer[self.tail_at..]).map_or(self.tail_at, |at| self.tail_at + at + 1),
        };
        let mut start = self.tail_at;
        self.tail_at = end;
        let base = start;
        let ends = memchr_iter(b'\n', &self.buffer[base..end]).map(|at| base + at);
        let last = (end > start && self.buffer[end - 1] != b'\n').then_some(end);
        for line_end in ends.chain(last) {
            let line = self.buffer[start..line_end].strip_suffix(b"\r").unwrap_or(&self.buffer[start..line_end]);
            let at = start;
            start = line_end + 1;
            self.line_number += 1;
            // Blank lines appear where logs are joined.
            if line.is_empty() {
                continue;
            }
            counts.lines += 1;
            let first_header = self.headers.len();
            match format.parse_line(line, &mut self.headers) {
                Ok(parsed) => {
                    counts.without_zone += u64::from(parsed.lacks_zone);
                    counts.out_of_order += u64::from(parsed.time_ms < self.latest_ms);
                    self.latest_ms = self.latest_ms.max(parsed.time_ms);
                    self.entries.push(Entry { line: parsed, at: at as u32, len: line.len() as u32 });
                }
                Err(NoRequest::Rejected) => {
                    self.headers.truncate(first_header);
                    counts.rejected += 1;
                }
                Err(NoRequest::Bad(reason)) => {
                    self.headers.truncate(first_header);
                    counts.add_bad(&self.name, self.line_number, reason, line);
                }
            }
        }
        if self.buffer.len() - self.tail_at > LINE_MAX_BYTES {
            self.line_number += 1;
            counts.lines += 1;
            counts.add_bad(&self.name, self.line_number, "it is longer than 1 MiB", &self.buffer[self.tail_at..]);
            self.buffer.truncate(self.tail_at);
            self.skips_line = true;
        }
    }
}

impl ReadCounts {
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
fn first_time(path: &Path, format: &LogFormat) -> io::Result<u64> {
    let mut start = Vec::new();
    decompressed(File::open(path)?)?.take(PEEK_BYTES).read_to_end(&mut start)?;
    let mut lines = start.split(|byte| *byte == b'\n');
    Ok(lines.find_map(|line| Some(format.parse_line(line, &mut Vec::new()).ok()?.time_ms)).unwrap_or(0))
}

/// The text of a file, which may be compressed with gzip or Zstandard.
fn decompressed(file: impl Read + 'static) -> io::Result<Box<dyn Read>> {
    let mut reader = BufReader::with_capacity(128 << 10, file);
    let start = reader.fill_buf()?;
    Ok(match () {
        () if start.starts_with(&GZIP_MAGIC) => Box::new(MultiGzDecoder::new(reader)),
        () if start.starts_with(&ZSTD_MAGIC) => Box::new(ZstdReader::Between(reader)),
        () => Box::new(reader),
    })
}

/// Decompresses a sequence of Zstandard frames.
enum ZstdReader<R: Read> {
    /// Before a frame.
    Between(BufReader<R>),
    Frame(Box<StreamingDecoder<BufReader<R>, FrameDecoder>>),
    AtEnd,
}

impl<R: Read> Read for ZstdReader<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        loop {
            *self = match std::mem::replace(self, ZstdReader::AtEnd) {
                ZstdReader::AtEnd => return Ok(0),
                ZstdReader::Between(mut reader) => match reader.fill_buf()? {
                    [] => return Ok(0),
                    // A skippable frame, with its length.
                    [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
                        let mut head = [0; 8];
                        reader.read_exact(&mut head)?;
                        let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
                        io::copy(&mut (&mut reader).take(length.into()), &mut io::sink())?;
                        ZstdReader::Between(reader)
                    }
                    _ => {
                        let invalid = |error: FrameDecoderError| io::Error::new(io::ErrorKind::InvalidData, error);
                        ZstdReader::Frame(Box::new(StreamingDecoder::new(reader).map_err(invalid)?))
                    }
                },
                ZstdReader::Frame(mut frame) => match frame.read(out)? {
                    0 if !out.is_empty() => ZstdReader::Between(frame.into_inner()),
                    read => {
                        *self = ZstdReader::Frame(frame);
                        return Ok(read);
                    }
                },
            };
        }
    }
}
