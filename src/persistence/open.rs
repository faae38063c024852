//! Opens the counters at start: from the file, from the process that this one replaces, or new; with those of a snapshot.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::counters::Counters;
use super::file::{self, Existing, FileLock};
use super::file_header::{BootId, Header, UnusableFile};
use super::snapshot::{self, SavedSnapshot};
use transom_runtime::clock::Clock;

use transom_limiter::atomics::AtomicU128;
use transom_limiter::key::Seed;
use transom_limiter::table::Table;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Why the counters cannot be opened.
#[derive(Debug)]
pub enum OpenError {
    File {
        path: String,
        source: io::Error,
    },
    /// It is not a counters file.
    Foreign {
        path: String,
    },
    /// The snapshot cannot be written or replaced.
    Snapshot {
        path: String,
        source: io::Error,
    },
    /// The file system has too little space for the file.
    Full {
        path: String,
        bytes: usize,
        source: io::Error,
    },
    /// Another process uses the file, which this process cannot read.
    InUse {
        path: String,
        why: UnusableFile,
    },
    /// The machine has no 16-byte atomic instruction, and the substitute works only within a process.
    UnsupportedMachine,
    /// The counters that the previous process passed on are unusable.
    Inherited(UnusableFile),
    Memory {
        capacity: usize,
        source: io::Error,
    },
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenError::File { path, source } if source.kind() == io::ErrorKind::NotFound => {
                write!(f, "cannot use `{path}` as `counters.file`: make its folder first")
            }
            OpenError::File { path, .. } => write!(f, "cannot use `{path}` as `counters.file`"),
            OpenError::Foreign { path } => {
                write!(f, "`{path}` is not a counters file: set `counters.file` to another path, or remove the file")
            }
            OpenError::Snapshot { path, .. } => {
                write!(f, "cannot use `{path}` as the snapshot: set `counters.snapshot` to another path")
            }
            OpenError::Full { path, bytes, .. } => {
                let mib = bytes.div_ceil(1 << 20);
                write!(
                    f,
                    "not enough space for `{path}`, {mib} MiB: enlarge the file system, or lower `counters.capacity`"
                )
            }
            OpenError::InUse { path, why } => {
                write!(
                    f,
                    "the counters in `{path}` are in use by another process, and {why}: stop that process first, or set `counters.file` to another path"
                )
            }
            OpenError::UnsupportedMachine => {
                f.write_str("processes on this machine cannot share counters: it has no 16-byte atomic instruction")
            }
            OpenError::Inherited(why) => {
                write!(
                    f,
                    "the counters passed on by the previous process cannot be used: {why}: stop that process, then start this one"
                )
            }
            OpenError::Memory { capacity, .. } => {
                write!(f, "not enough memory for a table of {capacity} counters: lower `counters.capacity`")
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
            OpenError::Foreign { .. }
            | OpenError::InUse { .. }
            | OpenError::UnsupportedMachine
            | OpenError::Inherited(_) => None,
        }
    }
}

impl Counters {
    /// Opens the counters as configured. `inherited`: the counters of the process that this one replaces. The clock
    /// continues from the latest time that the file or snapshot has.
    pub fn open(
        config: &transom_config::counters::Counters,
        inherited: Option<OwnedFd>,
        clock: &Clock,
    ) -> Result<Counters, OpenError> {
        if (config.file.is_some() || inherited.is_some()) && !AtomicU128::is_lock_free() {
            return Err(OpenError::UnsupportedMachine);
        }
        if let Some(path) = &config.snapshot {
            let failed = |source| OpenError::Snapshot { path: path.display().to_string(), source };
            snapshot::check_writable(path).map_err(failed)?;
        }
        let fresh = Header { layout: Table::layout(config.capacity), seed: random_seed(), boot: boot_id() };
        let counters = match (&config.file, inherited) {
            (Some(path), inherited) => {
                let counters = FileOpener { path, config, fresh, clock }.open()?;
                if !file::is_in_memory(counters.descriptor()) {
                    tracing::info!(
                        "`{}` is on a disk, whose writes can delay requests: move it to a tmpfs, such as /run",
                        path.display()
                    );
                }
                if inherited.is_some_and(|inherited| !counters.is_same_file(&inherited)) {
                    tracing::warn!("`counters.file` has changed: earlier counts are not used");
                }
                counters
            }
            (None, Some(inherited)) => inherit(inherited, fresh, clock)?,
            (None, None) => {
                let saved = config.snapshot.as_deref().and_then(|path| snapshot::load(path, fresh.layout));
                let fresh = saved.as_ref().map_or(fresh, |saved| Header { seed: saved.seed, ..fresh });
                let counters = anonymous(fresh, config.capacity)?;
                counters.restore(saved, clock);
                counters
            }
        };
        counters.sync_time(clock);
        Ok(counters)
    }

    /// Restores a snapshot, before anything is counted.
    fn restore(&self, saved: Option<SavedSnapshot>, clock: &Clock) {
        let Some(saved) = saved else { return };
        clock.ensure_at_least(saved.time_ms);
        match saved.restore(self, clock.now().unix_ms) {
            Ok(counters) => tracing::info!(counters, "restored the counters from the snapshot"),
            Err(error) => tracing::warn!("the snapshot cannot be read completely: {error}"),
        }
    }
}

/// Opens the file of a configuration.
struct FileOpener<'o> {
    path: &'o Path,
    config: &'o transom_config::counters::Counters,
    /// The header of a new file.
    fresh: Header,
    clock: &'o Clock,
}

impl FileOpener<'_> {
    fn open(&self) -> Result<Counters, OpenError> {
        let lock = FileLock::acquire(self.path).map_err(|source| self.file_error(source))?;
        let mut counters = self.open_at(&lock)?;
        counters.path = Some(self.path.to_owned());
        Ok(counters)
    }

    fn open_at(&self, lock: &FileLock) -> Result<Counters, OpenError> {
        let Some(existing) = lock.existing().map_err(|source| self.file_error(source))? else {
            return self.create(lock).map_err(|source| self.file_error(source));
        };
        let in_use = existing.in_use;
        let why = match self.open_existing(existing) {
            Ok(counters) => {
                file::reserve_holes(counters.descriptor()).map_err(|source| self.file_error(source))?;
                return Ok(counters);
            }
            Err(why) if in_use => return Err(OpenError::InUse { path: self.path.display().to_string(), why }),
            Err(UnusableFile::Foreign) => return Err(OpenError::Foreign { path: self.path.display().to_string() }),
            Err(why) => why,
        };
        let quarantined = lock.quarantine().map_err(|source| self.file_error(source))?;
        let (path, old) = (self.path.display(), quarantined.display());
        let source = match self.create(lock) {
            Ok(counters) => {
                tracing::warn!("`{path}` is now `{old}`, because {why}; counting starts from zero");
                return Ok(counters);
            }
            Err(source) => source,
        };
        // There is no space for two files. A file that is usable under another setting is not given up.
        if source.kind() != io::ErrorKind::StorageFull || why == UnusableFile::OtherCapacity {
            // The file system is left as it was. If that fails, the first error matters more.
            let _ = std::fs::rename(&quarantined, self.path);
            return Err(self.file_error(source));
        }
        let counters = std::fs::remove_file(&quarantined).and_then(|()| self.create(lock));
        let counters = counters.map_err(|source| self.file_error(source))?;
        tracing::warn!(
            "`{path}` was removed, because {why}, and there is not enough space for both; counting starts from zero"
        );
        Ok(counters)
    }

    /// The counters of an existing file, if it can be used.
    fn open_existing(
        &self,
        Existing { file, bytes, in_use, open_to_others }: Existing,
    ) -> Result<Counters, UnusableFile> {
        if let Some(mode) = open_to_others {
            return Err(UnusableFile::WritableByOthers(mode));
        }
        let header = read_header(&file, bytes)?;
        // A file in use is of this boot, whatever the boot ids are.
        if !in_use && header.boot != self.fresh.boot {
            return Err(UnusableFile::OtherBoot);
        }
        if header.layout != self.fresh.layout {
            if !in_use {
                return Err(UnusableFile::OtherCapacity);
            }
            tracing::warn!("another process uses `{}` for another capacity, which is kept", self.path.display());
        }
        let counters = Counters::from_file(file, header).map_err(|_short| UnusableFile::Damaged)?;
        counters.validate(self.clock)
    }

    fn create(&self, lock: &FileLock) -> io::Result<Counters> {
        let saved = self.config.snapshot.as_deref().and_then(|path| snapshot::load(path, self.fresh.layout));
        let header = saved.as_ref().map_or(self.fresh, |saved| Header { seed: saved.seed, ..self.fresh });
        // The file gets its name after the restore, so that a partial restore is never used.
        lock.create(&header.encode(), header.file_bytes(), |file| {
            let counters = Counters::from_file(file, header)?;
            counters.restore(saved, self.clock);
            Ok(counters)
        })
    }

    fn file_error(&self, source: io::Error) -> OpenError {
        let path = self.path.display().to_string();
        match source.kind() {
            io::ErrorKind::StorageFull => OpenError::Full { path, bytes: self.fresh.file_bytes(), source },
            _ => OpenError::File { path, source },
        }
    }
}

/// Counters in anonymous memory, which ends with the last process that holds it.
fn anonymous(header: Header, capacity: usize) -> Result<Counters, OpenError> {
    let make = || {
        let memory = memfd_create("transom-counters", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&memory, header.file_bytes() as u64)?;
        // A process with a copy of the descriptor cannot shrink the memory while it is in use.
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let memory = File::from(memory);
        memory.lock_shared()?;
        memory.write_all_at(&header.encode(), 0)?;
        Counters::from_file(memory, header)
    };
    make().map_err(|source| OpenError::Memory { capacity, source })
}

/// The counters of the process that this one replaces, which goes on using them for a while.
fn inherit(inherited: OwnedFd, fresh: Header, clock: &Clock) -> Result<Counters, OpenError> {
    let read = || {
        // Opened again, because a lock belongs to an open file description: that of the other process is its own.
        let path = format!("/proc/self/fd/{}", inherited.as_raw_fd());
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|_unreadable| UnusableFile::Foreign)?;
        file.lock_shared().map_err(|_unlockable| UnusableFile::Foreign)?;
        let bytes = file.metadata().map_err(|_unreadable| UnusableFile::Foreign)?.len();
        let header = read_header(&file, bytes)?;
        if header.layout != fresh.layout {
            tracing::warn!(
                "the previous process uses a table for another capacity, which is kept: a change of `counters.capacity` needs a restart"
            );
        }
        Counters::from_file(file, header).map_err(|_short| UnusableFile::Damaged)?.validate(clock)
    };
    read().map_err(OpenError::Inherited)
}

fn read_header(file: &File, bytes: u64) -> Result<Header, UnusableFile> {
    let mut page = [0; Header::BYTES];
    let at_path = &mut page[..bytes.min(Header::BYTES as u64) as usize];
    file.read_exact_at(at_path, 0).map_err(|_unreadable| UnusableFile::Damaged)?;
    Header::decode(at_path, bytes)
}

/// The id of this boot; zeros where the kernel does not provide one.
fn boot_id() -> BootId {
    let mut boot = [0; 36];
    if let Ok(id) = std::fs::read(BOOT_ID) {
        boot.iter_mut().zip(id).for_each(|(to, from)| *to = from);
    }
    boot
}

/// Unpredictable bits: the standard library seeds its hash maps from the system.
fn random_seed() -> Seed {
    use std::hash::{BuildHasher, RandomState};
    let bits = || RandomState::new().hash_one(0);
    Seed(bits(), bits())
}
