//! The counters and the time in mapped memory, shared by workers and processes.

use std::fs::File;
use std::io;
use std::iter;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use super::file_header::{Header, UnusableFile};
use transom_limiter::atomics::{AtomicU128, Ordering};
use transom_limiter::key::Seed;
use transom_limiter::memory::{AtomicSlice, Memory};
use transom_limiter::table::{Table, TableStats};
use transom_limiter::window::END_MAX_MS;
use transom_runtime::clock::Clock;

/// How far times in a file may be ahead of this process's clock: threads and processes do not read the clock at the
/// same moment.
pub(super) const AHEAD_MAX_MS: u64 = 60_000;

/// The counters that all workers use.
pub struct Counters {
    pub table: Arc<Table>,
    pub seed: Seed,
    pub(super) header: Header,
    /// Path of the file, if it has one.
    pub(super) path: Option<PathBuf>,
    /// The latest time that a process has written, Unix milliseconds, and its bitwise complement as the upper half.
    time: AtomicSlice<AtomicU128>,
    /// The mapped file, with a shared lock.
    file: File,
}

impl Counters {
    /// Maps the counters of a file that this process holds a shared lock on.
    pub(super) fn from_file(file: File, header: Header) -> io::Result<Counters> {
        let memory = Memory::mapped(file.as_fd(), header.file_bytes())?;
        let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let table = Arc::new(Table::in_memory(header.layout, &memory, Header::TABLE_AT).ok_or_else(short)?);
        let time = memory.words(Header::TIME_AT, 1).ok_or_else(short)?;
        Ok(Counters { table, seed: header.seed, header, path: None, time, file })
    }

    /// The descriptor that is passed to the next process at a hot upgrade.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Counts the open windows. Skips memory that was never written: a read would allocate it.
    pub fn stats(&self, now_ms: u64) -> TableStats {
        let position = |byte: usize| byte.saturating_sub(Header::TABLE_AT);
        let within = |bytes: Range<usize>| position(bytes.start)..position(bytes.end);
        self.table.stats_of(written_ranges(&self.file, self.header.file_bytes()).map(within), now_ms)
    }

    /// Whether the file still has its path.
    pub fn is_in_place(&self) -> bool {
        let at_path = self.path.as_ref().map(std::fs::symlink_metadata);
        match (at_path, self.file.metadata()) {
            (None, _) => true,
            (Some(Ok(at_path)), Ok(own)) => (at_path.dev(), at_path.ino()) == (own.dev(), own.ino()),
            (Some(_), _) => false,
        }
    }

    /// Whether both are the same file.
    pub(super) fn is_same_file(&self, other: &OwnedFd) -> bool {
        match (rustix::fs::fstat(&self.file), rustix::fs::fstat(other)) {
            (Ok(own), Ok(other)) => (own.st_dev, own.st_ino) == (other.st_dev, other.st_ino),
            _ => false,
        }
    }

    /// The latest time that was written, Unix milliseconds; `None` if the value is not a time.
    fn time_ms(&self) -> Option<u64> {
        // Ordering: relaxed; a number that only grows and depends on no other.
        let bits = self.time.first().map_or(0, |time| time.load(Ordering::Relaxed));
        match (bits as u64, (bits >> 64) as u64) {
            (0, 0) => Some(0),
            (time_ms, turned) => (turned == !time_ms).then_some(time_ms),
        }
    }

    /// Synchronizes the time with the other processes that use the counters.
    pub fn sync_time(&self, clock: &Clock) {
        let known_ms = self.time_ms().unwrap_or(0).max(self.table.horizon_ms());
        clock.ensure_at_least(known_ms);
        let now_ms = clock.now().unix_ms;
        let bits = u128::from(!now_ms) << 64 | u128::from(now_ms);
        if let Some(time) = self.time.first() {
            // Ordering: as in `time_ms`.
            let _ = time
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |known| (known as u64 <= now_ms).then_some(bits));
        }
    }

    /// Returns these counters, unless they contain an impossible time. Other damage to a table cannot be detected: any
    /// bits are a valid count.
    pub(super) fn validate(self, clock: &Clock) -> Result<Counters, UnusableFile> {
        let time_ms = self.time_ms().filter(|time_ms| *time_ms <= END_MAX_MS).ok_or(UnusableFile::Damaged)?;
        let now_ms = clock.now().unix_ms;
        if self.table.horizon_ms() > time_ms.max(now_ms).saturating_add(AHEAD_MAX_MS) {
            return Err(UnusableFile::Damaged);
        }
        if time_ms > now_ms.saturating_add(AHEAD_MAX_MS) {
            let ahead_s = (time_ms - now_ms) / 1000;
            tracing::warn!("the clock was set back since counting began: windows end {ahead_s} s later by it");
        }
        Ok(self)
    }
}

/// The ranges of a file that were written to, in pages (lseek(2), SEEK_DATA and SEEK_HOLE); the whole file, where the
/// file system does not report them.
fn written_ranges(file: &File, bytes: usize) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut at = 0;
    iter::from_fn(move || {
        let seek = |from: SeekFrom| rustix::fs::seek(file, from).map(|at| usize::try_from(at).unwrap_or(bytes));
        let start = match seek(SeekFrom::Data(at as u64)) {
            Ok(start) => start,
            Err(Errno::NXIO) => return None,
            Err(_) => at,
        };
        at = seek(SeekFrom::Hole(start as u64)).unwrap_or(bytes);
        (start < at).then_some(start..at)
    })
}
