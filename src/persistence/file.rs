//! Finds, creates or quarantines the counters file. Does not read its content.
//!
//! The process that decides about the file holds a lock on `FILE.lock`. Every process that uses the file holds a shared
//! lock on it, which the kernel releases when the process ends.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::{FallocateFlags, OFlags, fallocate, fstat, fstatfs};
use rustix::io::{Errno, retry_on_intr};

/// Types of file systems in memory (statfs(2)).
const TMPFS: u32 = 0x0102_1994;
const RAMFS: u32 = 0x8584_58f6;
/// Only the owner may read the file: it contains the hash seed, with which colliding keys could be chosen.
pub const MODE: u32 = 0o600;
const OTHERS_MAY_WRITE: u32 = 0o022;

/// Attempts to take the lock, and the delay between them: one minute in all, because creating a large file on a slow
/// disk takes time.
const LOCK_ATTEMPTS: usize = 3000;
const LOCK_RETRY_DELAY: Duration = Duration::from_millis(20);

/// The lock on `FILE.lock`: no other process decides about the counters file meanwhile.
pub struct FileLock<'p> {
    path: &'p Path,
    _lock: File,
}

/// The counters file, if there is one.
pub struct Existing {
    pub file: File,
    pub bytes: u64,
    /// Whether another process uses it.
    pub in_use: bool,
    /// Its mode, if users other than the owner may write to it.
    pub open_to_others: Option<u32>,
}

impl<'p> FileLock<'p> {
    /// Waits for the process that holds the lock, at most until it has created a file.
    pub fn acquire(path: &'p Path) -> io::Result<FileLock<'p>> {
        let lock = options().create(true).open(path.with_added_extension("lock"))?;
        for _ in 0..LOCK_ATTEMPTS {
            match lock.try_lock() {
                Ok(()) => return Ok(FileLock { path, _lock: lock }),
                Err(TryLockError::WouldBlock) => thread::sleep(LOCK_RETRY_DELAY),
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, "another process still holds its `.lock`"))
    }

    /// The file, if it exists; an error if the path is not a regular file. This process uses the file from now on.
    pub fn existing(&self) -> io::Result<Option<Existing>> {
        match fs::symlink_metadata(self.path) {
            // Only regular files are opened: opening others can have side effects.
            Ok(meta) if !meta.is_file() => return Err(io::Error::other(describe_file_type(&meta))),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        }
        let file = options().open(self.path)?;
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::other(describe_file_type(&meta)));
        }
        let own = rustix::process::geteuid().as_raw();
        if meta.uid() != own {
            return Err(io::Error::other(format!(
                "it belongs to user {}, and this process runs as user {own}: remove it, or use another path",
                meta.uid()
            )));
        }
        let in_use = match file.try_lock() {
            Ok(()) => false,
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Error(error)) => return Err(error),
        };
        file.lock_shared()?;
        let open_to_others = Some(meta.mode() & 0o7777).filter(|mode| mode & OTHERS_MAY_WRITE != 0);
        Ok(Some(Existing { file, bytes: meta.len(), in_use, open_to_others }))
    }

    /// Moves the file away, and returns its new path.
    pub fn quarantine(&self) -> io::Result<PathBuf> {
        let aside = self.path.with_added_extension("old");
        fs::rename(self.path, &aside)?;
        Ok(aside)
    }

    /// Creates a file of zeros that begins with `first`, and lets `fill` write to it. All that can fail, fails here.
    /// The file gets its name at the end: a process that is killed earlier leaves no file of that name.
    pub fn create<T>(&self, first: &[u8], bytes: usize, fill: impl FnOnce(File) -> io::Result<T>) -> io::Result<T> {
        let path = self.path.with_added_extension("new");
        // Left by a process that was killed.
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let made = create_at(&path, first, bytes).and_then(fill);
        let placed = made.and_then(|made| fs::rename(&path, self.path).map(|()| made));
        if placed.is_err() {
            let _ = fs::remove_file(&path);
        }
        placed
    }
}

/// Creates a file, which this process uses from then on.
fn create_at(path: &Path, first: &[u8], bytes: usize) -> io::Result<File> {
    let mut file = options().create_new(true).open(path)?;
    // The umask does not apply.
    file.set_permissions(fs::Permissions::from_mode(MODE))?;
    file.lock_shared()?;
    reserve(&mut file, bytes as u64)?;
    file.write_all_at(first, 0)?;
    Ok(file)
}

/// Allocates the whole file at once: if a page could not be allocated at its first write, the process would be killed.
fn reserve(file: &mut File, bytes: u64) -> io::Result<()> {
    // A signal can interrupt the call.
    match retry_on_intr(|| fallocate(&*file, FallocateFlags::empty(), 0, bytes)) {
        // The file system does not support the call.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            io::copy(&mut io::Read::take(io::repeat(0), bytes), file)?;
            file.flush()
        }
        reserved => Ok(reserved?),
    }
}

/// Allocates the holes of a file, which a copy or an extension can leave.
pub fn reserve_holes(file: BorrowedFd<'_>) -> io::Result<()> {
    let stat = fstat(file)?;
    // `st_blocks` counts units of 512 bytes, whatever the block size of the file system.
    if stat.st_blocks.saturating_mul(512) >= stat.st_size {
        return Ok(());
    }
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, stat.st_size as u64)) {
        // A compressing file system does not support the call, and leaves no holes of its own.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        reserved => Ok(reserved?),
    }
}

/// Whether a file is never written to a disk, which a write to its memory could otherwise have to wait for.
pub fn is_in_memory(file: BorrowedFd<'_>) -> bool {
    fstatfs(file).is_ok_and(|system| [TMPFS, RAMFS].contains(&(system.f_type as u32)))
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(MODE).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    options
}

fn describe_file_type(meta: &fs::Metadata) -> &'static str {
    let kind = meta.file_type();
    if kind.is_dir() {
        "it is a directory: use the path of a file"
    } else if kind.is_symlink() {
        "it is a symbolic link, which could be changed to lead to any file: use the path of the file itself"
    } else if kind.is_fifo() || kind.is_socket() || kind.is_char_device() || kind.is_block_device() {
        "it is a device, a pipe or a socket: use the path of a regular file"
    } else {
        "it is not a regular file"
    }
}
