//! When the configuration is read again: a file of it changed, or the process was told to.
//!
//! The files are looked at once a second. That sees every way of changing it, also a directory that is
//! swapped under a symbolic link, and works on every file system.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The files that a configuration was read from, and what they looked like then.
#[derive(Debug, Default)]
pub struct Watch {
    seen: Vec<(PathBuf, Option<Look>)>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Look {
    modified: Option<SystemTime>,
    bytes: u64,
    inode: u64,
}

impl Watch {
    /// Notes what a file looks like, from now on to be watched. It is to be read after that: what
    /// changes in between is then noticed.
    pub fn note(&mut self, path: &Path) {
        let now = look(path);
        match self.seen.iter_mut().find(|(known, _)| known == path) {
            Some((_, seen)) => *seen = now,
            None => self.seen.push((path.to_owned(), now)),
        }
    }

    /// Whether a file has changed since it was last noted or asked about. A file that is gone for a
    /// moment, while an editor replaces it, has not.
    pub fn changed(&mut self) -> bool {
        let mut changed = false;
        for (path, seen) in &mut self.seen {
            let now = look(path);
            if now.is_some() && now != *seen {
                *seen = now;
                changed = true;
            }
        }
        changed
    }
}

fn look(path: &Path) -> Option<Look> {
    use std::os::unix::fs::MetadataExt;
    let meta = fs::metadata(path).ok()?;
    Some(Look { modified: meta.modified().ok(), bytes: meta.len(), inode: meta.ino() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_seen_once_and_a_gap_is_not_one() {
        let path = std::env::temp_dir().join(format!("transom-watch-{}", std::process::id()));
        fs::write(&path, "a").unwrap();
        let mut watch = Watch::default();
        watch.note(&path);
        assert!(!watch.changed());
        fs::write(&path, "ab").unwrap();
        assert!(watch.changed());
        assert!(!watch.changed());
        fs::remove_file(&path).unwrap();
        assert!(!watch.changed());
        fs::write(&path, "abc").unwrap();
        assert!(watch.changed());
        fs::write(&path, "abcd").unwrap();
        watch.note(&path);
        assert!(!watch.changed());
        fs::remove_file(&path).unwrap();
    }
}
