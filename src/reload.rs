//! When the configuration is read again: the file changed, or the process was told to.
//!
//! The file is looked at once a second. That sees every way of changing it, also a directory that is
//! swapped under a symbolic link, and works on every file system.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// What a file looked like when it was last read.
#[derive(Debug)]
pub struct Watch {
    path: PathBuf,
    seen: Option<Look>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Look {
    modified: Option<SystemTime>,
    bytes: u64,
    inode: u64,
}

impl Watch {
    pub fn new(path: &Path) -> Watch {
        Watch { path: path.to_owned(), seen: look(path) }
    }

    /// Whether the file has changed since it was last asked about. A file that is gone for a moment,
    /// while an editor replaces it, has not.
    pub fn changed(&mut self) -> bool {
        let now = look(&self.path);
        let changed = now.is_some() && now != self.seen;
        if changed {
            self.seen = now;
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
        let mut watch = Watch::new(&path);
        assert!(!watch.changed());
        fs::write(&path, "ab").unwrap();
        assert!(watch.changed());
        assert!(!watch.changed());
        fs::remove_file(&path).unwrap();
        assert!(!watch.changed());
        fs::write(&path, "abc").unwrap();
        assert!(watch.changed());
        fs::remove_file(&path).unwrap();
    }
}
