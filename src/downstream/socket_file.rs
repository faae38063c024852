//! The file of a Unix socket that the gateway listens on: bound in place of a stale one, with its permissions, and removed at the
//! end.

use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use socket2::{Domain, SockAddr, Socket, Type};

use transom_config::listen_address::Permissions;

/// The bits of a mode that are permissions.
const PERMISSION_BITS: u32 = 0o7777;
/// Connections that wait until the configured number applies.
const FIRST_BACKLOG: i32 = 128;
/// Attempts to lock a folder, and the pause between them.
const LOCK_ATTEMPTS: usize = 100;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

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
    fn of(found: &Metadata) -> FileId {
        FileId { device: found.dev(), inode: found.ino() }
    }
}

impl SocketFile {
    /// Makes the file, with a socket that listens.
    ///
    /// # Errors
    ///
    /// `AddrInUse`: a process accepts connections there. `AlreadyExists`: the file is no socket.
    pub fn bind(path: &Path, permissions: Permissions) -> io::Result<(Socket, SocketFile)> {
        // Another gateway that starts must not take this socket, which does not listen yet, for a stale one.
        let _lock = lock_folder(path);
        remove_stale(path)?;
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.bind(&SockAddr::unix(path)?)?;
        let id = FileId::of(&fs::symlink_metadata(path)?);
        let file = SocketFile { path: path.to_owned(), id: Some(id), is_owned: true };
        // Before the socket listens: until then, connections are refused.
        file.set_permissions(permissions)?;
        socket.listen(FIRST_BACKLOG)?;
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
        // The file that is checked is the one that is changed, even if another one or a link replaces it meanwhile.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(&self.path, flags, Mode::empty())?);
        let found = file.metadata()?;
        if !found.file_type().is_socket() || self.id.is_some_and(|id| FileId::of(&found) != id) {
            return Err(io::Error::new(ErrorKind::AlreadyExists, "another file has replaced the socket"));
        }
        let file_path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let Permissions { mode, owner, group } = permissions;
        // The mode first: only the owner may change it.
        if let Some(mode) = mode.filter(|mode| *mode != found.mode() & PERMISSION_BITS) {
            fs::set_permissions(&file_path, fs::Permissions::from_mode(mode))?;
        }
        let owner = owner.filter(|owner| *owner != found.uid());
        let group = group.filter(|group| *group != found.gid());
        if owner.is_some() || group.is_some() { chown(&file_path, owner, group) } else { Ok(()) }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_same = || fs::symlink_metadata(&self.path).is_ok_and(|found| Some(FileId::of(&found)) == self.id);
        if self.is_owned && is_same() {
            // It may be gone meanwhile.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Locks the folder of a path, as other gateways do. Not for long if another program keeps its lock.
fn lock_folder(path: &Path) -> Option<File> {
    let folder = File::open(path.parent()?).ok()?;
    for _ in 0..LOCK_ATTEMPTS {
        if folder.try_lock().is_ok() {
            return Some(folder);
        }
        sleep(LOCK_PAUSE);
    }
    None
}

/// Whether a socket is at this path, which the gateway may replace if it is stale. Changes nothing.
///
/// # Errors
///
/// `AlreadyExists`: the file there is no socket. `NotFound`: there is no folder for it.
pub fn is_socket(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => Ok(true),
        Ok(_) => Err(io::Error::new(ErrorKind::AlreadyExists, "the file there is not a socket")),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            path.parent().map_or(Ok(()), |folder| fs::metadata(folder).map(drop)).map(|()| false)
        }
        Err(error) => Err(error),
    }
}

/// Removes a socket on which no process accepts: the file outlives a process that was killed.
fn remove_stale(path: &Path) -> io::Result<()> {
    if !is_socket(path)? {
        return Ok(());
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
    use std::os::unix::fs::symlink;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::Barrier;
    use std::thread;

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
        let (_socket, file) = SocketFile::bind(&path, mode(0o640)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & PERMISSION_BITS, 0o640);
        assert_eq!(kind(&path), ErrorKind::AddrInUse);
        file.set_permissions(mode(0o606)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & PERMISSION_BITS, 0o606);
        // A process that has handed the socket over leaves the file.
        drop(SocketFile::inherited(path.clone(), file.id));
        assert!(path.exists());
        // Another file at the path is neither changed nor removed.
        fs::rename(&path, folder.join("b.sock")).unwrap();
        symlink("b.sock", &path).unwrap();
        assert!(file.set_permissions(mode(0o600)).is_err());
        assert_eq!(kind(&path), ErrorKind::AlreadyExists);
        fs::remove_file(&path).unwrap();
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

    #[test]
    fn one_of_several_gateways_takes_a_stale_socket() {
        let folder = std::env::temp_dir().join(format!("transom-stale-socket-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("a.sock");
        for _ in 0..20 {
            drop(UnixListener::bind(&path).unwrap());
            let begin = Barrier::new(4);
            let bind = || {
                begin.wait();
                SocketFile::bind(&path, Permissions::default())
            };
            let bound: Vec<_> = thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(bind)).collect();
                threads.into_iter().filter_map(|thread| thread.join().unwrap().ok()).collect()
            });
            assert_eq!(bound.len(), 1);
            UnixStream::connect(&path).unwrap();
        }
        fs::remove_dir_all(folder).unwrap();
    }
}
