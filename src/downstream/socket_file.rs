//! The file of a Unix socket that the gateway listens on: bound in place of a stale one, with its permissions, and removed at the
//! end.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use socket2::{Domain, SockAddr, Socket, Type};

use transom_config::listen_address::Permissions;

/// The bits of a mode that are permissions.
const PERMISSION_BITS: u32 = 0o7777;

/// The file of a Unix socket.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// `None`: a service manager has made the file, and removes it.
    pub id: Option<FileId>,
    /// Whether the file is removed when this is dropped. Of a process and its successor, only one may remove it.
    pub is_owned: bool,
}

/// What identifies a file on this machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FileId {
    pub device: u64,
    pub inode: u64,
}

impl FileId {
    fn of(path: &Path) -> io::Result<FileId> {
        let found = fs::symlink_metadata(path)?;
        Ok(FileId { device: found.dev(), inode: found.ino() })
    }
}

impl SocketFile {
    /// Makes the file, with a socket that does not listen yet.
    ///
    /// # Errors
    ///
    /// `AddrInUse`: a process accepts connections there. `AlreadyExists`: the file is no socket.
    pub fn bind(path: &Path, permissions: Permissions) -> io::Result<(Socket, SocketFile)> {
        remove_stale(path)?;
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.bind(&SockAddr::unix(path)?)?;
        let file = SocketFile { path: path.to_owned(), id: Some(FileId::of(path)?), is_owned: true };
        // Before the socket listens: until then, connections are refused.
        file.set_permissions(permissions)?;
        Ok((socket, file))
    }

    /// The file of a socket that another process has bound.
    pub fn inherited(path: PathBuf, id: Option<FileId>) -> SocketFile {
        SocketFile { path, id, is_owned: false }
    }

    /// Changes what differs. A process needs no right for what the file has already.
    pub fn set_permissions(&self, permissions: Permissions) -> io::Result<()> {
        if permissions == Permissions::default() {
            return Ok(());
        }
        let found = fs::symlink_metadata(&self.path)?;
        if !found.file_type().is_socket() || self.id.is_some_and(|id| FileId::of(&self.path).ok() != Some(id)) {
            return Err(io::Error::new(ErrorKind::AlreadyExists, "another file has replaced the socket"));
        }
        let Permissions { mode, owner, group } = permissions;
        // The mode first: only the owner may change it.
        if let Some(mode) = mode.filter(|mode| *mode != found.mode() & PERMISSION_BITS) {
            fs::set_permissions(&self.path, fs::Permissions::from_mode(mode))?;
        }
        let owner = owner.filter(|owner| *owner != found.uid());
        let group = group.filter(|group| *group != found.gid());
        if owner.is_some() || group.is_some() { chown(&self.path, owner, group) } else { Ok(()) }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.is_owned && self.id.is_some() && FileId::of(&self.path).ok() == self.id {
            // It may be gone meanwhile.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket on which no process accepts: the file outlives a process that was killed.
fn remove_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => {}
        Ok(_) => return Err(io::Error::new(ErrorKind::AlreadyExists, "the file there is not a socket")),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    }
    let probe = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // A full queue must not block the start.
    probe.set_nonblocking(true)?;
    match probe.connect(&SockAddr::unix(path)?) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path),
        Ok(()) => Err(ErrorKind::AddrInUse.into()),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Err(ErrorKind::AddrInUse.into()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn kind(path: &Path) -> ErrorKind {
        SocketFile::bind(path, Permissions::default()).unwrap_err().kind()
    }

    #[test]
    fn only_a_stale_socket_is_replaced_and_only_an_own_file_is_removed() {
        let folder = std::env::temp_dir().join(format!("transom-socket-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("a.sock");
        let live = UnixListener::bind(&path).unwrap();
        assert_eq!(kind(&path), ErrorKind::AddrInUse);
        drop(live);
        let mode = |mode| Permissions { mode: Some(mode), ..Permissions::default() };
        let (socket, file) = SocketFile::bind(&path, mode(0o640)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & PERMISSION_BITS, 0o640);
        socket.listen(1).unwrap();
        assert_eq!(kind(&path), ErrorKind::AddrInUse);
        file.set_permissions(mode(0o606)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & PERMISSION_BITS, 0o606);
        // A process that has handed the socket over leaves the file.
        drop(SocketFile::inherited(path.clone(), file.id));
        assert!(path.exists());
        // Another file at the path is neither changed nor removed.
        fs::rename(&path, folder.join("b.sock")).unwrap();
        fs::write(&path, "text").unwrap();
        assert_eq!(kind(&path), ErrorKind::AlreadyExists);
        assert_eq!(file.set_permissions(mode(0o600)).unwrap_err().kind(), ErrorKind::AlreadyExists);
        drop(file);
        assert_eq!(fs::read_to_string(&path).unwrap(), "text");
        // Its own file is removed.
        let own = folder.join("c.sock");
        drop(SocketFile::bind(&own, Permissions::default()).unwrap());
        assert!(!own.exists());
        fs::remove_dir_all(folder).unwrap();
    }
}
