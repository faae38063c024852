//! A copy of the counters in a file on disk, which survives a restart of the machine; the counters' own memory does
//! not.
//!
//! | bytes | content, little-endian |
//! | --- | --- |
//! | 0..16 | magic |
//! | 16..24 | versions of the layout and of the identities of counters, as in the counters file |
//! | 24..48 | counter buckets, overflow buckets, slots of a bucket |
//! | 48..64 | hash seed |
//! | 64..72 | time of writing, Unix milliseconds |
//! | 72..96 | watermarks of the table |
//! | 96..104 | number of counters that follow |
//! | 24 each | counters whose windows were open: position, word |
//! | last 32 | SHA-256 of all before |
//!
//! A snapshot fits only a table of the same layout, in which the positions are the same. It is written beside its path and
//! then renamed, so that the path always has a complete file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use rustix::fs::OFlags;
use sha2::{Digest, Sha256};

use super::counters::{AHEAD_MAX_MS, Counters};
use super::file::MODE;
use super::file_header::{VERSION, describe_version};
use crate::atomic_file;
use transom_limiter::counter::CounterWord;
use transom_limiter::key::Seed;
use transom_limiter::table::{TableLayout, Watermarks};
use transom_limiter::window::END_MAX_MS;
use transom_runtime::clock::Clock;

const MAGIC: [u8; 16] = *b"transom\0snapshot";
const HEAD_NUMBERS: usize = 11;
const HEAD_BYTES: u64 = 16 + 8 * HEAD_NUMBERS as u64;
const COUNTER_BYTES: u64 = 24;
const CHECKSUM_BYTES: u64 = 32;

/// A complete snapshot.
pub struct SavedSnapshot {
    pub seed: Seed,
    pub time_ms: u64,
    watermarks: Watermarks,
    counters: u64,
    file: File,
}

/// The result of writing a snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Written {
    /// The number of counters written.
    Counters(u64),
    /// Nothing: another process was writing for the whole wait. Its snapshot may lack counts of positions that it had
    /// already written.
    OtherWriter,
}

/// Hashes what is read or written.
struct HashingStream<T> {
    inner: T,
    hasher: Sha256,
}

impl<T> HashingStream<T> {
    fn new(inner: T) -> HashingStream<T> {
        HashingStream { inner, hasher: Sha256::new() }
    }
}

impl<T: Write> Write for HashingStream<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<T: Read> Read for HashingStream<T> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(bytes)?;
        self.hasher.update(&bytes[..read]);
        Ok(read)
    }
}

/// Writes a snapshot as of now. `patience`: how long to wait for another process that is writing one.
pub fn write(counters: &Counters, path: &Path, clock: &Clock, patience: Duration) -> io::Result<Written> {
    // It contains the hash seed: only the owner may read it.
    let Some(file) = atomic_file::lock_draft(path, patience)? else { return Ok(Written::OtherWriter) };
    // The number of counters is known only at the end, so the head is written last.
    (&file).write_all(&[0; HEAD_BYTES as usize])?;
    let mut target = BufWriter::new(HashingStream::new(&file));
    let mut written = 0;
    for (position, word) in counters.table.live_counters(clock.now().unix_ms) {
        let bits = word.bits();
        write_numbers(&mut target, &[position as u64, bits as u64, (bits >> 64) as u64])?;
        written += 1;
    }
    let head = encode_head(counters, clock, written);
    let mut sum = target.into_inner().map_err(io::IntoInnerError::into_error)?.hasher;
    sum.update(&head);
    (&file).write_all(&sum.finalize())?;
    file.write_all_at(&head, 0)?;
    atomic_file::publish_draft(&file, path)?;
    Ok(Written::Counters(written))
}

fn encode_head(counters: &Counters, clock: &Clock, written: u64) -> Vec<u8> {
    let (layout, seed, watermarks) = (counters.header.layout, counters.seed, counters.table.watermarks());
    // Read after the watermarks, which can rise while the snapshot is written: none is later than this time.
    let now_ms = clock.now().unix_ms;
    let mut head = MAGIC.to_vec();
    let numbers: [u64; HEAD_NUMBERS] = [
        VERSION,
        layout.counter_buckets as u64,
        layout.overflow_buckets as u64,
        layout.bucket_slots as u64,
        seed.0,
        seed.1,
        now_ms,
        watermarks.horizon_ms,
        watermarks.overflow_horizon_ms,
        watermarks.overflow_end_ms,
        written,
    ];
    head.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    head
}

/// Checks, before anything is counted, that a snapshot can be written, and that it replaces no file but a snapshot.
pub fn check_writable(path: &Path) -> io::Result<()> {
    let new = path.with_added_extension("new");
    let draft = options().write(true).create(true).truncate(false).mode(MODE).open(&new)?;
    // Removed again, unless another process is writing it: it is empty.
    if draft.try_lock().is_ok() {
        fs::remove_file(&new)?;
    }
    let file = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(meta) if !meta.is_file() => return Err(io::Error::other("it is not a regular file")),
        Ok(_) => options().open(path)?,
    };
    // A snapshot that lost its beginning or its end is set aside later.
    let body = file.metadata()?.len().checked_sub(HEAD_BYTES + CHECKSUM_BYTES);
    let could_be = body.is_some_and(|body| body.is_multiple_of(COUNTER_BYTES));
    let mut begins = Vec::new();
    file.take(MAGIC.len() as u64).read_to_end(&mut begins)?;
    match could_be || MAGIC.starts_with(&begins) {
        true => Ok(()),
        false => Err(io::Error::other("it is not a snapshot of counters")),
    }
}

/// The snapshot at `path`, if it is complete and fits a table of this layout. An unusable one is set aside, and a
/// warning logged.
pub fn load(path: &Path, layout: TableLayout) -> Option<SavedSnapshot> {
    match read(path, layout) {
        Ok(saved) => Some(saved),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            let old = path.with_added_extension("old");
            let (shown, aside) = (path.display(), old.display());
            match fs::rename(path, &old) {
                Ok(()) => tracing::warn!("the snapshot `{shown}` is now `{aside}` and not used, because {error}"),
                Err(_) => tracing::warn!("the snapshot `{shown}` is not used, because {error}"),
            }
            None
        }
    }
}

fn read(path: &Path, layout: TableLayout) -> io::Result<SavedSnapshot> {
    let damaged = || io::Error::other("it is damaged");
    let file = options().open(path)?;
    let bytes = file.metadata()?.len();
    let mut head = [0; HEAD_BYTES as usize];
    (&file).read_exact(&mut head).map_err(|_short| damaged())?;
    let (magic, numbers) = head.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(damaged());
    }
    let mut fields = [0; HEAD_NUMBERS];
    for (field, bytes) in fields.iter_mut().zip(numbers.as_chunks().0) {
        *field = u64::from_le_bytes(*bytes);
    }
    let [version, own, overflow, slots, seed_0, seed_1, time_ms, horizon_ms, spill_horizon_ms, spill_end_ms, counters] =
        fields;
    if version != VERSION {
        return Err(io::Error::other(describe_version(version)));
    }
    if (own, overflow, slots)
        != (layout.counter_buckets as u64, layout.overflow_buckets as u64, layout.bucket_slots as u64)
    {
        return Err(io::Error::other("it is for another `counters.capacity`"));
    }
    let body = counters.checked_mul(COUNTER_BYTES).ok_or_else(damaged)?;
    if body.checked_add(HEAD_BYTES + CHECKSUM_BYTES) != Some(bytes) {
        return Err(damaged());
    }
    let mut source = HashingStream::new((&file).take(body));
    io::copy(&mut source, &mut io::sink())?;
    source.hasher.update(head);
    let mut sum = [0; CHECKSUM_BYTES as usize];
    (&file).read_exact(&mut sum)?;
    let watermarks = Watermarks { horizon_ms, overflow_horizon_ms: spill_horizon_ms, overflow_end_ms: spill_end_ms };
    // Horizons are times that have passed. With later ones, open windows would be taken for ended.
    let passed_ms = horizon_ms.max(spill_horizon_ms);
    let has_passed = passed_ms <= time_ms.saturating_add(AHEAD_MAX_MS);
    if sum != *source.hasher.finalize() || time_ms > END_MAX_MS || !has_passed {
        return Err(damaged());
    }
    Ok(SavedSnapshot { seed: Seed(seed_0, seed_1), time_ms, watermarks, counters, file })
}

impl SavedSnapshot {
    /// Restores the counters whose windows are still open, and returns their number.
    pub fn restore(mut self, counters: &Counters, now_ms: u64) -> io::Result<u64> {
        self.file.seek(SeekFrom::Start(HEAD_BYTES))?;
        let mut source = BufReader::new(&self.file);
        counters.table.restore_watermarks(self.watermarks);
        let mut restored = 0;
        for _ in 0..self.counters {
            let [position, low, high] = read_numbers(&mut source)?;
            let word = CounterWord::from_bits(u128::from(high) << 64 | u128::from(low));
            if word.is_live(now_ms) && counters.table.restore(position as usize, word) {
                restored += 1;
            }
        }
        Ok(restored)
    }
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    options
}

fn write_numbers(target: &mut impl Write, numbers: &[u64]) -> io::Result<()> {
    numbers.iter().try_for_each(|number| target.write_all(&number.to_le_bytes()))
}

fn read_numbers<const N: usize>(source: &mut impl Read) -> io::Result<[u64; N]> {
    let mut numbers = [0; N];
    for number in &mut numbers {
        let mut bytes = [0; 8];
        source.read_exact(&mut bytes)?;
        *number = u64::from_le_bytes(bytes);
    }
    Ok(numbers)
}
