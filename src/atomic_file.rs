//! A file that is replaced as a whole: whoever reads it finds the old one or the new one.
//!
//! The new text is written beside the file and takes its place when all of it is on the disk. As long
//! as the draft is there nobody else can begin one, so no edit undoes another.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

/// An edit that has begun. It leaves no trace if it is not published.
pub struct Draft {
    /// The file itself, where a symbolic link leads to it.
    target: PathBuf,
    path: PathBuf,
    file: File,
    published: bool,
}

impl Draft {
    /// Where the draft of a file lies.
    pub fn path_of(file: &Path) -> PathBuf {
        target(file).with_added_extension("new")
    }

    pub fn begin(file: &Path) -> io::Result<Draft> {
        let path = Draft::path_of(file);
        let draft = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
        Ok(Draft { target: target(file), path, file: draft, published: false })
    }

    /// What the file holds now; `None`: there is none.
    pub fn before(&self) -> io::Result<Option<String>> {
        match fs::read_to_string(&self.target) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            read => read.map(Some),
        }
    }

    /// Puts the new text in the place of the old, with its owner and permissions.
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
        self.published = true;
        // The new name is on the disk when the directory is.
        let directory = self.target.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.published {
            // A draft that stays behind is found by the next edit, which says so.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn target(file: &Path) -> PathBuf {
    fs::canonicalize(file).unwrap_or_else(|_not_there| file.to_owned())
}
