//! Where the counters file lies: it is found, made whole, or set aside, by one process at a time.
//!
//! Whoever decides holds a lock on `FILE.lock`; whoever uses the file holds a shared lock on it for as long as it
//! lives, which the kernel takes back from the dead. Nothing here reads what is in the file.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::{FallocateFlags, OFlags, fallocate, fstat, fstatfs};
use rustix::io::{Errno, retry_on_intr};

/// How the kernel calls file systems that lie in memory: statfs(2).
const TMPFS: u32 = 0x0102_1994;
const RAMFS: u32 = 0x8584_58f6;
/// Only its owner may read it: it holds the seed, with which keys could be chosen that collide.
pub const MODE: u32 = 0o600;
const OTHERS_MAY_WRITE: u32 = 0o022;

/// How often the lock is tried, and how long it is waited for in between: a minute in all. On a slow disk, making
/// a large file takes its time.
const PATIENCE: usize = 3000;
const PAUSE: Duration = Duration::from_millis(20);

/// The place, for as long as nobody else decides about it.
pub struct FileLock<'p> {
    path: &'p Path,
    lock: File,
}

/// That nobody else opens the counters.
pub struct ExclusiveUse {
    _lock: File,
}

/// A file that was found.
pub struct Existing {
    pub file: File,
    pub bytes: u64,
    /// Another process uses it.
    pub in_use: bool,
    /// Its mode, if others may write to it.
    pub open_to_others: Option<u32>,
}

impl<'p> FileLock<'p> {
    /// Waits for whoever decides at the moment, which takes no longer than making a file does.
    pub fn enter(path: &'p Path) -> io::Result<FileLock<'p>> {
        let lock = options().create(true).open(path.with_added_extension("lock"))?;
        for _ in 0..PATIENCE {
            match lock.try_lock() {
                Ok(()) => return Ok(FileLock { path, lock }),
                Err(TryLockError::WouldBlock) => thread::sleep(PAUSE),
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, "another process holds its `.lock`, and does not come to an end"))
    }

    /// `None` if somebody else decides, or it can not be said.
    pub fn enter_at_once(path: &'p Path) -> Option<FileLock<'p>> {
        let lock = options().create(true).open(path.with_added_extension("lock")).ok()?;
        lock.try_lock().is_ok().then_some(FileLock { path, lock })
    }

    /// Nobody else comes in before this is dropped.
    pub fn stay(self) -> ExclusiveUse {
        ExclusiveUse { _lock: self.lock }
    }

    /// The file, if there is one; an error if there is something else. This process uses it from now on.
    pub fn existing(&self) -> io::Result<Option<Existing>> {
        match fs::symlink_metadata(self.path) {
            // What is no file is not opened: opening may do something.
            Ok(meta) if !meta.is_file() => return Err(io::Error::other(what_it_is(&meta))),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        }
        let file = options().open(self.path)?;
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::other(what_it_is(&meta)));
        }
        let own = rustix::process::geteuid().as_raw();
        if meta.uid() != own {
            return Err(io::Error::other(format!(
                "it belongs to user {}, and this process to user {own}: remove it, or name another",
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

    /// Moves the file out of the way, and tells where it is then.
    pub fn set_aside(&self) -> io::Result<PathBuf> {
        let aside = self.path.with_added_extension("old");
        fs::rename(self.path, &aside)?;
        Ok(aside)
    }

    /// Makes a file of zeros that begins with `first`, and lets `fill` write to it; whatever can be missing later is
    /// missing now. It stands in its place when all that is done: who is killed before leaves none there.
    pub fn create<T>(&self, first: &[u8], bytes: usize, fill: impl FnOnce(File) -> io::Result<T>) -> io::Result<T> {
        let path = self.path.with_added_extension("new");
        // Of a process that was killed while it made one.
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let made = make(&path, first, bytes).and_then(fill);
        let placed = made.and_then(|made| fs::rename(&path, self.path).map(|()| made));
        if placed.is_err() {
            let _ = fs::remove_file(&path);
        }
        placed
    }
}

/// Makes a file, which this process uses from then on.
fn make(path: &Path, first: &[u8], bytes: usize) -> io::Result<File> {
    let mut file = options().create_new(true).open(path)?;
    // Whatever the process's mask is.
    file.set_permissions(fs::Permissions::from_mode(MODE))?;
    file.lock_shared()?;
    reserve(&mut file, bytes as u64)?;
    file.write_all_at(first, 0)?;
    Ok(file)
}

/// Takes all of the room at once: a page for which there is none when it is first written to would end the process.
fn reserve(file: &mut File, bytes: u64) -> io::Result<()> {
    // A signal may come in between.
    match retry_on_intr(|| fallocate(&*file, FallocateFlags::empty(), 0, bytes)) {
        // A file system that has no such call.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            io::copy(&mut io::Read::take(io::repeat(0), bytes), file)?;
            file.flush()
        }
        reserved => Ok(reserved?),
    }
}

/// Takes the room that a file has not taken yet: one that was copied or lengthened may have holes.
pub fn reserve_holes(file: BorrowedFd<'_>) -> io::Result<()> {
    let stat = fstat(file)?;
    // `st_blocks` is in units of 512 bytes, whatever the file system's own are.
    if stat.st_blocks.saturating_mul(512) >= stat.st_size {
        return Ok(());
    }
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, stat.st_size as u64)) {
        // One that compresses what is written has no such call, and makes no holes of its own.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
        reserved => Ok(reserved?),
    }
}

/// Whether nothing of a file is ever written to a disk, which whoever writes to its memory may have to wait for.
pub fn lies_in_memory(file: BorrowedFd<'_>) -> bool {
    fstatfs(file).is_ok_and(|system| [TMPFS, RAMFS].contains(&(system.f_type as u32)))
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(MODE).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    options
}

fn what_it_is(meta: &fs::Metadata) -> &'static str {
    let kind = meta.file_type();
    if kind.is_dir() {
        "it is a directory: name a file"
    } else if kind.is_symlink() {
        "it is a symbolic link, and whoever can change it could have any file written to: name the file itself"
    } else if kind.is_fifo() || kind.is_socket() || kind.is_char_device() || kind.is_block_device() {
        "it is a device, a pipe or a socket: name a regular file"
    } else {
        "it is no regular file"
    }
}
