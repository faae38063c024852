//! Replaces a file as a whole: readers find the old content or the new one.
//!
//! The new content is written to `FILE.new` and renamed once it is on disk. No other edit can begin while `FILE.new`
//! exists, so that no edit undoes another.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

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
        // The rename is durable once the directory is synced.
        let directory = self.target.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
    }
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
