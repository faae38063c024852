//! The file that says which process serves. It is replaced as a whole, so that nobody reads half a number, and
//! removed by the process that it names.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process;

/// The place of the file, if there is to be one.
#[derive(Debug, Default)]
pub struct PidFile {
    path: Option<PathBuf>,
}

impl PidFile {
    /// Writes what is to become the file, so that it is known whether it can be written before anybody relies on it.
    pub fn prepare(path: Option<PathBuf>) -> io::Result<PidFile> {
        let file = PidFile { path };
        file.write()?;
        Ok(file)
    }

    fn write(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let draft = draft(path);
        // One that is there was left behind by a process that had this number before.
        let _ = fs::remove_file(&draft);
        let mut text = OpenOptions::new().write(true).create_new(true).open(draft).map_err(|error| of(path, &error))?;
        writeln!(text, "{}", process::id()).map_err(|error| of(path, &error))
    }

    /// Says that this process serves.
    pub fn publish(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        fs::rename(draft(path), path).map_err(|error| of(path, &error))
    }

    /// Says so again, if another process has said that it does, and has failed.
    pub fn renew(&self) {
        if self.path.as_ref().is_none_or(|path| named(path) == Some(process::id())) {
            return;
        }
        if let Err(error) = self.write().and_then(|()| self.publish()) {
            tracing::warn!(%error, "`pid_file` can not be written");
        }
    }

    /// Takes over the place that a new configuration gives it.
    pub fn adopt(&mut self, path: Option<PathBuf>) {
        if path == self.path {
            return;
        }
        match PidFile::prepare(path).and_then(|file| file.publish().map(|()| file)) {
            Ok(file) => *self = file,
            Err(error) => tracing::error!(%error, "`pid_file` can not be written, and stays where it was"),
        }
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        let Some(path) = &self.path else { return };
        let _ = fs::remove_file(draft(path));
        if named(path) == Some(process::id()) {
            let _ = fs::remove_file(path);
        }
    }
}

/// The process that a file names.
pub fn named(path: &Path) -> Option<u32> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn of(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Beside the file, because only there it can be put in its place in one step.
fn draft(path: &Path) -> PathBuf {
    path.with_added_extension(process::id().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_names_this_process_until_another_one_is_named() {
        let path = std::env::temp_dir().join(format!("transom-pid-file-{}", process::id()));
        let file = PidFile::prepare(Some(path.clone())).unwrap();
        assert_eq!(named(&path), None);
        file.publish().unwrap();
        assert_eq!(named(&path), Some(process::id()));
        fs::write(&path, "1\n").unwrap();
        file.renew();
        assert_eq!(named(&path), Some(process::id()));
        drop(file);
        assert!(!path.exists() && !draft(&path).exists());
        let file = PidFile::prepare(Some(path.clone())).unwrap();
        file.publish().unwrap();
        fs::write(&path, "1\n").unwrap();
        drop(file);
        assert_eq!(named(&path), Some(1));
        fs::remove_file(&path).unwrap();
        assert!(PidFile::prepare(Some(path.join("nowhere"))).is_err());
        assert!(PidFile::prepare(None).and_then(|file| file.publish()).is_ok());
    }
}
