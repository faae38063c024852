//! The PID file of the serving process. It is replaced atomically, and removed only by the process that it names.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process;

/// The path of the file, if configured.
#[derive(Debug, Default)]
pub struct PidFile {
    path: Option<PathBuf>,
}

impl PidFile {
    /// Writes the temporary file, so that a write error is found before the gateway serves.
    pub fn prepare(path: Option<PathBuf>) -> io::Result<PidFile> {
        let file = PidFile { path };
        file.write()?;
        Ok(file)
    }

    fn write(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let draft = temporary_path(path);
        // An existing one is left over from a process with the same PID.
        let _ = fs::remove_file(&draft);
        let mut text =
            OpenOptions::new().write(true).create_new(true).open(draft).map_err(|error| with_path(path, &error))?;
        writeln!(text, "{}", process::id()).map_err(|error| with_path(path, &error))
    }

    /// Puts the file in place: this process serves.
    pub fn publish(&self) -> io::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        fs::rename(temporary_path(path), path).map_err(|error| with_path(path, &error))
    }

    /// Writes the file again, if a failed successor has replaced it.
    pub fn renew(&self) {
        if self.path.as_ref().is_none_or(|path| read_pid(path) == Some(process::id())) {
            return;
        }
        if let Err(error) = self.write().and_then(|()| self.publish()) {
            tracing::warn!(%error, "cannot write `pid_file`");
        }
    }

    /// Moves the file to the path of a new configuration.
    pub fn move_to(&mut self, path: Option<PathBuf>) {
        if path == self.path {
            return;
        }
        match PidFile::prepare(path).and_then(|file| file.publish().map(|()| file)) {
            Ok(file) => *self = file,
            Err(error) => tracing::error!(%error, "cannot write the new `pid_file`; the old one is kept"),
        }
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        let Some(path) = &self.path else { return };
        let _ = fs::remove_file(temporary_path(path));
        if read_pid(path) == Some(process::id()) {
            let _ = fs::remove_file(path);
        }
    }
}

/// Reads the PID in a file.
pub fn read_pid(path: &Path) -> Option<u32> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// In the same folder, so that a rename is atomic.
fn temporary_path(path: &Path) -> PathBuf {
    path.with_added_extension(process::id().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_names_this_process_until_another_process_replaces_it() {
        let path = std::env::temp_dir().join(format!("transom-pid-file-{}", process::id()));
        let file = PidFile::prepare(Some(path.clone())).unwrap();
        assert_eq!(read_pid(&path), None);
        file.publish().unwrap();
        assert_eq!(read_pid(&path), Some(process::id()));
        fs::write(&path, "1\n").unwrap();
        file.renew();
        assert_eq!(read_pid(&path), Some(process::id()));
        drop(file);
        assert!(!path.exists() && !temporary_path(&path).exists());
        let file = PidFile::prepare(Some(path.clone())).unwrap();
        file.publish().unwrap();
        fs::write(&path, "1\n").unwrap();
        drop(file);
        assert_eq!(read_pid(&path), Some(1));
        fs::remove_file(&path).unwrap();
        assert!(PidFile::prepare(Some(path.join("nowhere"))).is_err());
        assert!(PidFile::prepare(None).and_then(|file| file.publish()).is_ok());
    }
}
