//! Replaces a file as a whole: readers find the old content or the new one.
//!
//! The new content is written to `FILE.new` and renamed once it is on disk. An edit depends on the old content: no other edit can
//! begin while `FILE.new` exists, so that no edit undoes another. What a process writes again and again is whole each time: it
//! locks `FILE.new`, and continues with one that a process left behind.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::fs::OFlags;

/// How often a wait for another writer looks again.
const LOCK_RETRY_DELAY: Duration = Duration::from_millis(20);

/// An edit in progress. Without [`Draft::publish`] it leaves no trace.
pub struct Draft {
    /// The file itself, if the path is a symbolic link.
    target: PathBuf,
    path: PathBuf,
    file: File,
    is_published: bool,
}

impl Draft {
    /// The path of the draft of a file.
    pub fn path_of(file: &Path) -> PathBuf {
        target(file).with_added_extension("new")
    }

    pub fn begin(file: &Path) -> io::Result<Draft> {
        let path = Draft::path_of(file);
        let draft = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        Ok(Draft { target: target(file), path, file: draft, is_published: false })
    }

    /// The current content; `None` if there is no file.
    pub fn current_text(&self) -> io::Result<Option<String>> {
        match fs::read_to_string(&self.target) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            read => read.map(Some),
        }
    }

    /// Replaces the old text, keeping its owner and permissions.
    pub fn publish(mut self, text: &str) -> io::Result<()> {
        self.file.write_all(text.as_bytes())?;
        if let Ok(old) = fs::metadata(&self.target) {
            let new = self.file.metadata()?;
            if (old.uid(), old.gid()) != (new.uid(), new.gid()) {
                fchown(&self.file, Some(old.uid()), Some(old.gid()))?;
            }
            self.file.set_permissions(fs::Permissions::from_mode(old.mode() & 0o7777))?;
        }
        self.file.sync_all()?;
        fs::rename(&self.path, &self.target)?;
        self.is_published = true;
        sync_directory_of(&self.target)
    }
}

/// Opens and locks `FILE.new`, which only the owner may read, for new content; `None` if another process keeps the lock for longer
/// than `patience`.
pub fn lock_draft(file: &Path, patience: Duration) -> io::Result<Option<File>> {
    let new = file.with_added_extension("new");
    let mut waited = Duration::ZERO;
    loop {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).mode(0o600).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
        let draft = options.open(&new)?;
        match draft.try_lock() {
            // The previous holder of the lock may have renamed its draft: then it must not be written.
            Ok(()) if is_file_at(&draft, &new)? => {
                // Whatever its mode was before.
                draft.set_permissions(fs::Permissions::from_mode(0o600))?;
                draft.set_len(0)?;
                return Ok(Some(draft));
            }
            Ok(()) | Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
        if waited >= patience {
            return Ok(None);
        }
        thread::sleep(LOCK_RETRY_DELAY);
        waited += LOCK_RETRY_DELAY;
    }
}

/// Replaces a file by its draft of [`lock_draft`].
pub fn publish_draft(draft: &File, file: &Path) -> io::Result<()> {
    draft.sync_all()?;
    fs::rename(file.with_added_extension("new"), file)?;
    sync_directory_of(file)
}

/// Makes a rename durable. Otherwise a power failure could bring back the former file long after.
fn sync_directory_of(file: &Path) -> io::Result<()> {
    let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
}

fn is_file_at(file: &File, path: &Path) -> io::Result<bool> {
    let (opened, current) = (file.metadata()?, fs::symlink_metadata(path));
    Ok(current.is_ok_and(|current| (current.dev(), current.ino()) == (opened.dev(), opened.ino())))
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.is_published {
            // If this fails, the next edit reports the draft that is left.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn target(file: &Path) -> PathBuf {
    fs::canonicalize(file).unwrap_or_else(|_not_there| file.to_owned())
}
