//! What is counted, written down: it outlives the machine, where the memory that counters lie in does not.
//!
//! | bytes | what, little-endian |
//! | --- | --- |
//! | 0..16 | magic |
//! | 16..24 | version of the layout |
//! | 24..48 | buckets of counters, buckets of spill counters, slots of a bucket |
//! | 48..64 | seed of the hashes |
//! | 64..72 | the time it was written, Unix milliseconds |
//! | 72..96 | marks of the table |
//! | 96..112 | how many ways of layers follow, and then how many counters |
//! | 48 each | ways: layer, whether it rolls, shards, most ahead, grants, whether they differ |
//! | 24 each | counters whose windows were open: place, word |
//! | last 32 | SHA-256 of all before |
//!
//! It fits a table of the same plan only, in which the places are the same. The file is written whole beside its name
//! and then moved there, so that there is always a whole one.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::fs::OFlags;
use sha2::{Digest, Sha256};

use super::file::MODE;
use super::{AHEAD_MAX_MS, Counters};
use crate::clock::Clock;
use transom_limiter::counter::CounterWord;
use transom_limiter::format_registry::{CounterFormat, CounterFormats};
use transom_limiter::key::Seed;
use transom_limiter::table::{TableLayout, Watermarks};
use transom_limiter::window::END_MAX_MS;

const MAGIC: [u8; 16] = *b"transom\0snapshot";
/// As that of the counters file, of which it holds the words.
const VERSION: u64 = 1;
const HEAD_NUMBERS: usize = 12;
const HEAD_BYTES: u64 = 16 + 8 * HEAD_NUMBERS as u64;
const WAY_NUMBERS: usize = 6;
const WAY_BYTES: u64 = 8 * WAY_NUMBERS as u64;
const COUNTER_BYTES: u64 = 24;
const CHECKSUM_BYTES: u64 = 32;
/// How often somebody who waits for another one to have written looks.
const PAUSE: Duration = Duration::from_millis(20);

/// A snapshot that was found whole.
pub struct Saved {
    pub seed: Seed,
    pub time_ms: u64,
    marks: Watermarks,
    ways: u64,
    counters: u64,
    file: File,
}

/// What was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Written {
    /// So many counters.
    Counters(u64),
    /// None: another process was writing for as long as that was waited for. What is counted behind the place where
    /// that one is by now is in nobody's snapshot yet.
    ByAnother,
}

/// Hashes what passes through.
struct Summed<T> {
    inner: T,
    sum: Sha256,
}

impl<T> Summed<T> {
    fn new(inner: T) -> Summed<T> {
        Summed { inner, sum: Sha256::new() }
    }
}

impl<T: Write> Write for Summed<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.sum.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<T: Read> Read for Summed<T> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(bytes)?;
        self.sum.update(&bytes[..read]);
        Ok(read)
    }
}

/// Writes down what is counted at this time, once no other process does; that is waited for so long.
pub fn write(counters: &Counters, path: &Path, clock: &Clock, patience: Duration) -> io::Result<Written> {
    let new = path.with_added_extension("new");
    let Some(file) = draft(&new, patience)? else { return Ok(Written::ByAnother) };
    // It holds the seed of the hashes: whatever it was made with, nobody else may read it.
    file.set_permissions(fs::Permissions::from_mode(MODE))?;
    file.set_len(0)?;
    // How many there are is known only at the end, so the head is written last.
    (&file).write_all(&[0; HEAD_BYTES as usize])?;
    let mut target = BufWriter::new(Summed::new(&file));
    let ways: Vec<(u64, CounterFormat)> = counters.ledger.formats().non_plain().collect();
    for (bits, way) in &ways {
        let grants = u64::from(way.grants.0) << 32 | u64::from(way.grants.1);
        let (rolls, shards) = (u64::from(way.accumulates), u64::from(way.shards));
        put(&mut target, &[*bits, rolls, shards, way.max_ahead, grants, u64::from(way.limits_differ)])?;
    }
    let mut written = 0;
    for (place, word) in counters.table.live_counters(clock.now().unix_ms) {
        let bits = word.bits();
        put(&mut target, &[place as u64, bits as u64, (bits >> 64) as u64])?;
        written += 1;
    }
    let head = head(counters, clock, ways.len() as u64, written);
    let mut sum = target.into_inner().map_err(io::IntoInnerError::into_error)?.sum;
    sum.update(&head);
    (&file).write_all(&sum.finalize())?;
    file.write_all_at(&head, 0)?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    // Otherwise a power cut may bring back the former one long after.
    if let Some(folder) = path.parent() {
        File::open(folder)?.sync_all()?;
    }
    Ok(Written::Counters(written))
}

/// The file that becomes the snapshot, if this process comes to write it.
fn draft(new: &Path, patience: Duration) -> io::Result<Option<File>> {
    let mut waited = Duration::ZERO;
    loop {
        let file = options().write(true).create(true).mode(MODE).open(new)?;
        match file.try_lock() {
            // The one who had the lock may have moved it to its place meanwhile: then it is no longer ours to write.
            Ok(()) if lies_at(&file, new)? => return Ok(Some(file)),
            Ok(()) | Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
        if waited >= patience {
            return Ok(None);
        }
        thread::sleep(PAUSE);
        waited += PAUSE;
    }
}

fn lies_at(file: &File, path: &Path) -> io::Result<bool> {
    let (own, there) = (file.metadata()?, fs::symlink_metadata(path));
    Ok(there.is_ok_and(|there| (there.dev(), there.ino()) == (own.dev(), own.ino())))
}

fn head(counters: &Counters, clock: &Clock, ways: u64, written: u64) -> Vec<u8> {
    let (plan, seed, marks) = (counters.header.plan, counters.seed, counters.table.watermarks());
    // Read behind the marks, which may have been raised while the rest was written: none of them is later.
    let now_ms = clock.now().unix_ms;
    let mut head = MAGIC.to_vec();
    let numbers: [u64; HEAD_NUMBERS] = [
        VERSION,
        plan.counter_buckets as u64,
        plan.overflow_buckets as u64,
        plan.bucket_slots as u64,
        seed.0,
        seed.1,
        now_ms,
        marks.horizon_ms,
        marks.overflow_horizon_ms,
        marks.overflow_end_ms,
        ways,
        written,
    ];
    head.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
    head
}

/// Makes sure, before anything is counted, that a snapshot can be written, and that nothing else is lost by that.
pub fn prepare(path: &Path) -> io::Result<()> {
    let new = path.with_added_extension("new");
    let draft = options().write(true).create(true).truncate(false).mode(MODE).open(&new)?;
    // Unless another process is writing there, it goes again: nothing is written yet.
    if draft.try_lock().is_ok() {
        fs::remove_file(&new)?;
    }
    let file = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(meta) if !meta.is_file() => return Err(io::Error::other("it is no regular file")),
        Ok(_) => options().open(path)?,
    };
    // It may have lost its beginning, or its end: it is set aside then.
    let body = file.metadata()?.len().checked_sub(HEAD_BYTES + CHECKSUM_BYTES);
    let could_be = body.is_some_and(|body| body.is_multiple_of(COUNTER_BYTES));
    let mut begins = Vec::new();
    file.take(MAGIC.len() as u64).read_to_end(&mut begins)?;
    match could_be || MAGIC.starts_with(&begins) {
        true => Ok(()),
        false => Err(io::Error::other("it is no snapshot of counters")),
    }
}

/// The snapshot that lies there, if it is whole and fits a table of this plan. What does not is set aside, and reported.
pub fn find(path: &Path, plan: TableLayout) -> Option<Saved> {
    match read(path, plan) {
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

fn read(path: &Path, plan: TableLayout) -> io::Result<Saved> {
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
    let [version, own, spill, slots, place, tag, time_ms, horizon_ms, spill_horizon_ms, spill_end_ms, ways, counters] =
        fields;
    if version != VERSION {
        return Err(io::Error::other(format!("its layout is version {version}, and this is version {VERSION}")));
    }
    if (own, spill, slots) != (plan.counter_buckets as u64, plan.overflow_buckets as u64, plan.bucket_slots as u64) {
        return Err(io::Error::other("it is for another `counters.capacity`"));
    }
    let body = ways.checked_mul(WAY_BYTES).zip(counters.checked_mul(COUNTER_BYTES));
    let body = body.and_then(|(ways, counters)| ways.checked_add(counters)).ok_or_else(damaged)?;
    if body.checked_add(HEAD_BYTES + CHECKSUM_BYTES) != Some(bytes) {
        return Err(damaged());
    }
    let mut source = Summed::new((&file).take(body));
    io::copy(&mut source, &mut io::sink())?;
    source.sum.update(head);
    let mut sum = [0; CHECKSUM_BYTES as usize];
    (&file).read_exact(&mut sum)?;
    let marks = Watermarks { horizon_ms, overflow_horizon_ms: spill_horizon_ms, overflow_end_ms: spill_end_ms };
    // Horizons are times that have passed. With later ones, windows that are open would be taken for ended.
    let passed_ms = horizon_ms.max(spill_horizon_ms);
    let has_passed = passed_ms <= time_ms.saturating_add(AHEAD_MAX_MS);
    if sum != *source.sum.finalize() || time_ms > END_MAX_MS || !has_passed {
        return Err(damaged());
    }
    Ok(Saved { seed: Seed(place, tag), time_ms, marks, ways, counters, file })
}

impl Saved {
    /// Puts back all of it whose window is still open, and tells how many counters that are.
    pub fn restore(mut self, counters: &Counters, now_ms: u64) -> io::Result<u64> {
        self.file.seek(SeekFrom::Start(HEAD_BYTES))?;
        let mut source = BufReader::new(&self.file);
        let mut ways = CounterFormats::default();
        for _ in 0..self.ways {
            let [bits, rolls, shards, ahead_most, grants, differ] = get(&mut source)?;
            let grants = ((grants >> 32) as u32, grants as u32);
            ways.join(
                bits,
                CounterFormat {
                    accumulates: rolls != 0,
                    shards: shards as u32,
                    max_ahead: ahead_most,
                    grants,
                    limits_differ: differ != 0,
                },
            );
        }
        counters.ledger.join(&ways).map_err(|_full| io::Error::other("it is of more layers than there is room for"))?;
        counters.table.restore_watermarks(self.marks);
        let mut restored = 0;
        for _ in 0..self.counters {
            let [place, low, high] = get(&mut source)?;
            let word = CounterWord::from_bits(u128::from(high) << 64 | u128::from(low));
            if word.is_live(now_ms) && counters.table.restore(place as usize, word) {
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

fn put(target: &mut impl Write, numbers: &[u64]) -> io::Result<()> {
    numbers.iter().try_for_each(|number| target.write_all(&number.to_le_bytes()))
}

fn get<const N: usize>(source: &mut impl Read) -> io::Result<[u64; N]> {
    let mut numbers = [0; N];
    for number in &mut numbers {
        let mut bytes = [0; 8];
        source.read_exact(&mut bytes)?;
        *number = u64::from_le_bytes(bytes);
    }
    Ok(numbers)
}
