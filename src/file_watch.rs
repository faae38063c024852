//! Detects changes of the configuration files by polling.
//!
//! The files are examined once a second. Polling detects every kind of change, also a directory swapped under a
//! symbolic link, and works on every file system.
//!
//! A file may be missing for a moment while an editor replaces it. One that stays missing has changed: the reload then says so.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Examinations without the file after which it counts as removed.
const MISSING_CHECKS: u32 = 3;

/// The watched files.
#[derive(Debug, Default)]
pub struct FileWatch {
    files: Vec<WatchedFile>,
}

#[derive(Debug)]
struct WatchedFile {
    path: PathBuf,
    /// The state that was reported last; `None` without a file.
    seen: Option<FileState>,
    /// Examinations in a row without the file.
    missing: u32,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct FileState {
    modified: Option<SystemTime>,
    bytes: u64,
    inode: u64,
}

impl FileWatch {
    /// Records a file's state and watches it. Call before reading the file, so that a change in between is detected.
    pub fn watch(&mut self, path: &Path) {
        self.add(WatchedFile { path: path.to_owned(), seen: file_state(path), missing: 0 });
    }

    /// Watches the files of another watch too, with their states there.
    pub fn extend(&mut self, other: FileWatch) {
        other.files.into_iter().for_each(|file| self.add(file));
    }

    fn add(&mut self, file: WatchedFile) {
        match self.files.iter_mut().find(|known| known.path == file.path) {
            Some(known) => *known = file,
            None => self.files.push(file),
        }
    }

    /// Whether a file has changed since the last call, or was missing in so many calls that it counts as removed.
    pub fn has_changed(&mut self) -> bool {
        // All are examined: one reload covers all changes.
        self.files.iter_mut().fold(false, |has_changed, file| file.examine() | has_changed)
    }
}

impl WatchedFile {
    fn examine(&mut self) -> bool {
        let now = file_state(&self.path);
        self.missing = if now.is_none() { self.missing.saturating_add(1) } else { 0 };
        let has_changed = now != self.seen && (now.is_some() || self.missing >= MISSING_CHECKS);
        if has_changed {
            self.seen = now;
        }
        has_changed
    }
}

fn file_state(path: &Path) -> Option<FileState> {
    use std::os::unix::fs::MetadataExt;
    // A pipe is read once, and reading changes its time.
    let meta = fs::metadata(path).ok().filter(|meta| meta.is_file() || meta.is_dir())?;
    Some(FileState { modified: meta.modified().ok(), bytes: meta.len(), inode: meta.ino() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_reported_once_and_a_removal_after_some_time() {
        let path = std::env::temp_dir().join(format!("transom-watch-{}", std::process::id()));
        fs::write(&path, "a").unwrap();
        let mut watch = FileWatch::default();
        watch.watch(&path);
        assert!(!watch.has_changed());
        fs::write(&path, "ab").unwrap();
        assert!(watch.has_changed());
        assert!(!watch.has_changed());
        fs::remove_file(&path).unwrap();
        assert!(!watch.has_changed());
        fs::write(&path, "abc").unwrap();
        assert!(watch.has_changed());
        fs::remove_file(&path).unwrap();
        let reported: Vec<bool> = (0..5).map(|_| watch.has_changed()).collect();
        assert_eq!(reported, [false, false, true, false, false]);
        fs::write(&path, "abc").unwrap();
        assert!(watch.has_changed());
        fs::write(&path, "abcd").unwrap();
        watch.watch(&path);
        assert!(!watch.has_changed());
        fs::remove_file(&path).unwrap();
    }
}
