//! The counters of this process, in memory that outlives it: mapped from a file, or nameless and handed from one
//! process to the next.
//!
//! `header` says what lies where, `place` finds or makes the file, `snapshot` writes down what is counted and reads it
//! again, `keeper` does so now and then. What a file says is believed only after it was checked; what is not as it
//! should be is set aside, and counting begins anew. This room does not know what a rule is, nor a request.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::iter;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags, SeekFrom, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;

use crate::clock::Clock;
use crate::config;
use transom_limiter::atomics::{AtomicU128, Ordering};
use transom_limiter::format_registry::FormatRegistry;
use transom_limiter::key::Seed;
use transom_limiter::memory::{AtomicSlice, Memory};
use transom_limiter::table::{Table, TableStats};
use transom_limiter::window::END_MAX_MS;

pub mod background;
pub mod file;
pub mod file_header;
pub mod snapshot;

use file::{ExclusiveUse, Existing, FileLock};
use file_header::{Boot, Header, Unfit};
use snapshot::Saved;

/// So far what is written may be ahead of this process's clock without being wrong: threads and processes
/// do not read the clock at the same moment.
const AHEAD_MAX_MS: u64 = 60_000;
/// Layers that a ledger has room for, beside those of the configuration it is made for.
const SPARE_LAYERS: usize = 2048;
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// What all event loops count in.
pub struct Counters {
    pub table: Arc<Table>,
    /// How the counters of each layer are written.
    pub ledger: FormatRegistry,
    pub seed: Seed,
    /// Others count in the same memory.
    pub shared: bool,
    header: Header,
    /// Where the file is, if it has a name.
    path: Option<PathBuf>,
    /// The latest time that a process told, Unix milliseconds, and beside it all its bits turned over.
    time: AtomicSlice<AtomicU128>,
    /// What they lie in, with a shared lock on it.
    file: File,
}

/// Why there are no counters.
#[derive(Debug)]
pub enum OpenError {
    File {
        path: String,
        source: io::Error,
    },
    /// There is something else.
    Foreign {
        path: String,
    },
    /// The snapshot can not be what it is to be.
    Snapshot {
        path: String,
        source: io::Error,
    },
    /// There is no room for so many bytes where the file is to be.
    Full {
        path: String,
        bytes: usize,
        source: io::Error,
    },
    /// The file is in use by a process that reads it otherwise.
    InUse {
        path: String,
        why: Unfit,
    },
    /// It has no instruction that changes a counter at once, and what stands in for it holds within a process only.
    Machine,
    /// What was handed over by the process before is not readable.
    Handed(Unfit),
    Memory {
        capacity: usize,
        source: io::Error,
    },
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenError::File { path, .. } => write!(f, "the counters can not lie in `{path}`, which is `counters.file`"),
            OpenError::Foreign { path } => {
                write!(f, "`{path}` is no file of counters: name another as `counters.file`, or remove it")
            }
            OpenError::Snapshot { path, .. } => {
                write!(f, "the snapshot of the counters can not be `{path}`: name another file as `counters.snapshot`")
            }
            OpenError::Full { path, bytes, .. } => {
                let mib = bytes.div_ceil(1 << 20);
                write!(
                    f,
                    "there is no room for `{path}`, {mib} MiB: enlarge that file system, or lower `counters.capacity`"
                )
            }
            OpenError::InUse { path, why } => {
                write!(
                    f,
                    "the counters in `{path}` are in use by another process, and {why}: stop that one first, or name another `counters.file`"
                )
            }
            OpenError::Machine => {
                f.write_str("processes of this machine can not share counters: it can not change 16 bytes at once")
            }
            OpenError::Handed(why) => {
                write!(
                    f,
                    "the counters that the process before hands over can not be used: {why}: stop that one, then start this"
                )
            }
            OpenError::Memory { capacity, .. } => {
                write!(f, "there is no memory for a table of {capacity} counters: lower `counters.capacity`")
            }
        }
    }
}

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            OpenError::File { source, .. }
            | OpenError::Full { source, .. }
            | OpenError::Snapshot { source, .. }
            | OpenError::Memory { source, .. } => Some(source),
            OpenError::Foreign { .. } | OpenError::InUse { .. } | OpenError::Machine | OpenError::Handed(_) => None,
        }
    }
}

impl Counters {
    /// Opens the counters as configured, for a configuration of so many layers. `handed` are those of the process that
    /// this one takes over from. The clock goes on from the latest time that was told by whoever counted before.
    ///
    /// Nobody else opens a file before the second value is dropped: after it was said how its counters are written, so
    /// that whoever comes next finds that.
    pub fn open(
        config: &config::Counters,
        handed: Option<OwnedFd>,
        layers: usize,
        clock: &Clock,
    ) -> Result<(Counters, Option<ExclusiveUse>), OpenError> {
        if (config.file.is_some() || handed.is_some()) && !AtomicU128::is_lock_free() {
            return Err(OpenError::Machine);
        }
        if let Some(path) = &config.snapshot {
            let failed = |source| OpenError::Snapshot { path: path.display().to_string(), source };
            snapshot::prepare(path).map_err(failed)?;
        }
        let boot = boot();
        let layers = layers.saturating_mul(2).max(SPARE_LAYERS).next_power_of_two();
        let fresh = Header { plan: Table::layout(config.capacity), layers, seed: fresh_seed(), boot };
        let (counters, alone) = match (&config.file, handed) {
            (Some(path), handed) => {
                let (counters, alone) = FileOpener { path, config, fresh, clock }.open()?;
                if !file::lies_in_memory(counters.descriptor()) {
                    tracing::info!(
                        "`{}` is on a disk, which whoever counts may have to wait for; it belongs on tmpfs, as /run is",
                        path.display()
                    );
                }
                if handed.is_some_and(|handed| !counters.is(&handed)) {
                    tracing::warn!("`counters.file` is another than before, so what was counted before is not known");
                }
                (counters, Some(alone))
            }
            (None, Some(handed)) => (handed_over(handed, fresh, clock)?, None),
            (None, None) => {
                let saved = config.snapshot.as_deref().and_then(|path| snapshot::find(path, fresh.plan));
                let fresh = saved.as_ref().map_or(fresh, |saved| Header { seed: saved.seed, ..fresh });
                let counters = nameless(fresh, config.capacity)?;
                counters.restore(saved, clock);
                (counters, None)
            }
        };
        counters.keep_time(clock);
        Ok((counters, alone))
    }

    /// Reads the counters of a file that this process has a shared lock on.
    fn within(file: File, header: Header, shared: bool) -> io::Result<Counters> {
        let memory = Memory::mapped(file.as_fd(), header.file_bytes())?;
        let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let numbers = memory.numbers(Header::LEDGER_AT, FormatRegistry::numbers(header.layers)).ok_or_else(short)?;
        let table = Table::in_memory(header.plan, &memory, header.table_at()).ok_or_else(short)?;
        let time = memory.words(Header::TIME_AT, 1).ok_or_else(short)?;
        let (table, ledger) = (Arc::new(table), FormatRegistry::new(numbers));
        Ok(Counters { table, ledger, seed: header.seed, shared, header, path: None, time, file })
    }

    /// What the counters lie in, to be handed to the process that takes over.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Counts the open windows. Memory that was never written to is left out: reading it would take memory for it.
    pub fn census(&self, now_ms: u64) -> TableStats {
        let table_at = self.header.table_at();
        let within = |bytes: Range<usize>| bytes.start.saturating_sub(table_at)..bytes.end.saturating_sub(table_at);
        self.table.stats_of(written(&self.file, self.header.file_bytes()).map(within), now_ms)
    }

    /// Whether the file is still where others look for it.
    pub fn is_in_place(&self) -> bool {
        let there = self.path.as_ref().map(std::fs::symlink_metadata);
        match (there, self.file.metadata()) {
            (None, _) => true,
            (Some(Ok(there)), Ok(own)) => (there.dev(), there.ino()) == (own.dev(), own.ino()),
            (Some(_), _) => false,
        }
    }

    /// Does something while no other process counts here, nor begins to; `None` if one does.
    pub fn while_alone<T>(&self, action: impl FnOnce() -> T) -> Option<T> {
        // Who changes a lock has none for a moment, in which nobody may take the file for one that is not in use.
        let _place = match &self.path {
            Some(path) => Some(FileLock::enter_at_once(path)?),
            None => None,
        };
        let done = self.file.try_lock().is_ok().then(action);
        if let Err(error) = self.file.lock_shared() {
            tracing::error!("the lock on the counters is lost: {error}");
        }
        done
    }

    /// Whether this is the file that lies there.
    fn is(&self, other: &OwnedFd) -> bool {
        match (rustix::fs::fstat(&self.file), rustix::fs::fstat(other)) {
            (Ok(own), Ok(other)) => (own.st_dev, own.st_ino) == (other.st_dev, other.st_ino),
            _ => false,
        }
    }

    /// The latest time that was told, Unix milliseconds; `None` if what stands there is no time.
    fn time_ms(&self) -> Option<u64> {
        // Ordering: relaxed; a number that only grows and means something by itself.
        let bits = self.time.first().map_or(0, |time| time.load(Ordering::Relaxed));
        match (bits as u64, (bits >> 64) as u64) {
            (0, 0) => Some(0),
            (time_ms, turned) => (turned == !time_ms).then_some(time_ms),
        }
    }

    /// Agrees on the time with the other processes that count here.
    pub fn keep_time(&self, clock: &Clock) {
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

    /// These, unless a time stands in them that nobody can have told. Other damage to a table can not be told from
    /// counts: any bits are some.
    fn sound(self, clock: &Clock) -> Result<Counters, Unfit> {
        let time_ms = self.time_ms().filter(|time_ms| *time_ms <= END_MAX_MS).ok_or(Unfit::Damaged)?;
        let now_ms = clock.now().unix_ms;
        if self.table.horizon_ms() > time_ms.max(now_ms).saturating_add(AHEAD_MAX_MS) {
            return Err(Unfit::Damaged);
        }
        if time_ms > now_ms.saturating_add(AHEAD_MAX_MS) {
            let ahead_s = (time_ms - now_ms) / 1000;
            tracing::warn!("the clock was set back since counting began: windows end {ahead_s} s later by it");
        }
        Ok(self)
    }

    /// Puts back what a snapshot tells, before anything is counted.
    fn restore(&self, saved: Option<Saved>, clock: &Clock) {
        let Some(saved) = saved else { return };
        clock.ensure_at_least(saved.time_ms);
        match saved.restore(self, clock.now().unix_ms) {
            Ok(counters) => tracing::info!(counters, "counting goes on from the snapshot"),
            Err(error) => tracing::warn!("the snapshot can not be read to its end: {error}"),
        }
    }
}

/// The file of a configuration, about to be opened.
struct FileOpener<'o> {
    path: &'o Path,
    config: &'o config::Counters,
    /// What it is like if it is made anew.
    fresh: Header,
    clock: &'o Clock,
}

impl FileOpener<'_> {
    fn open(&self) -> Result<(Counters, ExclusiveUse), OpenError> {
        let place = FileLock::enter(self.path).map_err(|source| self.failed(source))?;
        let counters = Counters { path: Some(self.path.to_owned()), ..self.open_at(&place)? };
        Ok((counters, place.stay()))
    }

    fn open_at(&self, place: &FileLock) -> Result<Counters, OpenError> {
        let Some(existing) = place.existing().map_err(|source| self.failed(source))? else {
            return self.make(place).map_err(|source| self.failed(source));
        };
        let in_use = existing.in_use;
        let why = match self.fitting(existing) {
            Ok(counters) => {
                file::reserve_holes(counters.descriptor()).map_err(|source| self.failed(source))?;
                return Ok(counters);
            }
            Err(why) if in_use => return Err(OpenError::InUse { path: self.path.display().to_string(), why }),
            Err(Unfit::Foreign) => return Err(OpenError::Foreign { path: self.path.display().to_string() }),
            Err(why) => why,
        };
        let aside = place.set_aside().map_err(|source| self.failed(source))?;
        let (path, old) = (self.path.display(), aside.display());
        let source = match self.make(place) {
            Ok(counters) => {
                tracing::warn!("`{path}` is now `{old}`, because {why}; counting begins anew");
                return Ok(counters);
            }
            Err(source) => source,
        };
        // Two do not fit. One that can still be used, with another setting, is not given up for that.
        if source.kind() != io::ErrorKind::StorageFull || why == Unfit::Capacity {
            // Who does not start leaves things as they were. If that fails, the error that matters is the other.
            let _ = std::fs::rename(&aside, self.path);
            return Err(self.failed(source));
        }
        let counters = std::fs::remove_file(&aside).and_then(|()| self.make(place));
        let counters = counters.map_err(|source| self.failed(source))?;
        tracing::warn!("`{path}` was removed, because {why}, and there is no room for both; counting begins anew");
        Ok(counters)
    }

    /// The counters of a file that can be used as it is.
    fn fitting(&self, Existing { file, bytes, in_use, open_to_others }: Existing) -> Result<Counters, Unfit> {
        if let Some(mode) = open_to_others {
            return Err(Unfit::Mode(mode));
        }
        let header = first_page(&file, bytes)?;
        // What is in use is of this boot, whatever the system says about it.
        if !in_use && header.boot != self.fresh.boot {
            return Err(Unfit::Boot);
        }
        if header.plan != self.fresh.plan {
            if !in_use {
                return Err(Unfit::Capacity);
            }
            tracing::warn!("another process uses `{}` for another capacity, which is kept", self.path.display());
        }
        let counters = Counters::within(file, header, in_use).map_err(|_short| Unfit::Damaged)?;
        counters.sound(self.clock)
    }

    fn make(&self, place: &FileLock) -> io::Result<Counters> {
        let saved = self.config.snapshot.as_deref().and_then(|path| snapshot::find(path, self.fresh.plan));
        let header = saved.as_ref().map_or(self.fresh, |saved| Header { seed: saved.seed, ..self.fresh });
        // What is not restored to its end must not look as if it were.
        place.create(&header.encode(), header.file_bytes(), |file| {
            let counters = Counters::within(file, header, false)?;
            counters.restore(saved, self.clock);
            Ok(counters)
        })
    }

    fn failed(&self, source: io::Error) -> OpenError {
        let path = self.path.display().to_string();
        match source.kind() {
            io::ErrorKind::StorageFull => OpenError::Full { path, bytes: self.fresh.file_bytes(), source },
            _ => OpenError::File { path, source },
        }
    }
}

/// Counters in memory that has no name, which ends with the last process that holds it.
fn nameless(header: Header, capacity: usize) -> Result<Counters, OpenError> {
    let make = || {
        let memory = memfd_create("transom-counters", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&memory, header.file_bytes() as u64)?;
        // So that nobody who gets hold of it can take memory away that is in use.
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let memory = File::from(memory);
        memory.lock_shared()?;
        memory.write_all_at(&header.encode(), 0)?;
        Counters::within(memory, header, false)
    };
    make().map_err(|source| OpenError::Memory { capacity, source })
}

/// The counters of the process that this one takes over from. That one uses them for a while yet.
fn handed_over(handed: OwnedFd, fresh: Header, clock: &Clock) -> Result<Counters, OpenError> {
    let read = || {
        // Opened anew, because a lock belongs to what was opened: that of the other process is its own.
        let path = format!("/proc/self/fd/{}", handed.as_raw_fd());
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|_unreadable| Unfit::Foreign)?;
        file.lock_shared().map_err(|_unlockable| Unfit::Foreign)?;
        let bytes = file.metadata().map_err(|_unreadable| Unfit::Foreign)?.len();
        let header = first_page(&file, bytes)?;
        if header.plan != fresh.plan {
            tracing::warn!("the process before counts in a table for another capacity, which is kept");
        }
        Counters::within(file, header, true).map_err(|_short| Unfit::Damaged)?.sound(clock)
    };
    read().map_err(OpenError::Handed)
}

/// The ranges of a file that were written to, in pages (lseek(2), SEEK_DATA and SEEK_HOLE); all of it, where the file
/// system does not tell.
fn written(file: &File, bytes: usize) -> impl Iterator<Item = Range<usize>> + '_ {
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

fn first_page(file: &File, bytes: u64) -> Result<Header, Unfit> {
    let mut page = [0; Header::BYTES];
    let there = &mut page[..bytes.min(Header::BYTES as u64) as usize];
    file.read_exact_at(there, 0).map_err(|_unreadable| Unfit::Damaged)?;
    Header::decode(there, bytes)
}

/// Which boot this is; where the kernel does not tell, all are one.
fn boot() -> Boot {
    let mut boot = [0; 36];
    if let Ok(id) = std::fs::read(BOOT_ID) {
        boot.iter_mut().zip(id).for_each(|(to, from)| *to = from);
    }
    boot
}

/// Bits that nobody outside can guess: the standard library seeds its hash maps from the system.
fn fresh_seed() -> Seed {
    use std::hash::{BuildHasher, RandomState};
    let bits = || RandomState::new().hash_one(0);
    Seed(bits(), bits())
}
