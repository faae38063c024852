//! Detects changes of the configuration files by polling.
//!
//! The files are examined once a second. Polling detects every kind of change, also a directory swapped under a
//! symbolic link, and works on every file system.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The watched files, and their state when last examined.
#[derive(Debug, Default)]
pub struct FileWatch {
    seen: Vec<(PathBuf, Option<FileState>)>,
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
        let now = file_state(path);
        match self.seen.iter_mut().find(|(known, _)| known == path) {
            Some((_, seen)) => *seen = now,
            None => self.seen.push((path.to_owned(), now)),
        }
    }

    /// Whether a file has changed since the last call. A file that is missing, for example while an editor replaces it,
    /// has not.
    pub fn has_changed(&mut self) -> bool {
        let mut changed = false;
        for (path, seen) in &mut self.seen {
            let now = file_state(path);
            if now.is_some() && now != *seen {
                *seen = now;
                changed = true;
            }
        }
        changed
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
    fn a_change_is_reported_once_and_a_missing_file_is_no_change() {
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
        fs::write(&path, "abcd").unwrap();
        watch.watch(&path);
        assert!(!watch.has_changed());
        fs::remove_file(&path).unwrap();
    }
}
