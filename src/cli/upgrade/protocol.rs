//! The hand-over protocol of an upgrade, both sides. This file starts no process.
//!
//! The channel is a Unix socket that the new process finds as its standard input. Descriptors are sent over it
//! explicitly, so none is inherited by accident. The messages in turn:
//!
//! - old: the items handed over, a line of text for each descriptor, and the descriptors in the same order;
//! - new: `ready`. It has read its configuration, has all it needs, and does not accept yet;
//! - old: `yours`. From here on the new process accepts;
//! - new: `serving`. Now the old process drains.
//!
//! If either process ends, the channel closes and the other one notices. Until `ready` the new process can be given up
//! without loss. From `yours` on it may have accepted connections, which would end with it; then only a closed channel
//! counts as failure.

use std::env;
use std::fs::File;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::time::Duration;

use rustix::cmsg_space;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg, sockopt,
};
use rustix::stdio::dup2_stdin;
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::downstream::listener::{InheritedSockets, OpenSocket};
use crate::downstream::socket_file::{FileId, SocketFile};
use crate::server::{Former, HISTORY_FORMAT, KnownKeySet};
use transom_config::listen_address::ListenAddress;

/// Environment variable of the new process: the PID of the process that it replaces.
pub const PREDECESSOR_VARIABLE: &str = "TRANSOM_HANDOVER";

/// Beginning of the first line. The number is the version of the protocol.
const HEADER: &str = "transom 1 ";
const LISTEN: &str = "listen ";
/// Followed by what identifies the file of a Unix socket, or `-`, and its path.
const UNIX: &str = "unix ";
const COUNTERS: &str = "counters";
/// Followed by the time of the fetch in Unix milliseconds, and the URL of the key set whose text the descriptor has.
const KEY_SET: &str = "key-set ";
/// Followed by the version of the dashboard's history, whose samples the descriptor has.
const HISTORY: &str = "history ";
const READY: &[u8] = b"ready\n";
const GO: &[u8] = b"yours\n";
const SERVING: &[u8] = b"serving\n";

/// Descriptors in one message; the kernel accepts 253.
const DESCRIPTORS_PER_MESSAGE: usize = 250;
/// How long the new process waits for the items.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// The items to hand over: a line of text for each descriptor.
pub struct HandoverSet(Vec<(String, OwnedFd)>);

impl HandoverSet {
    pub fn new(
        sockets: &[OpenSocket],
        counters: BorrowedFd,
        key_set: Option<KnownKeySet>,
        history: &str,
    ) -> io::Result<HandoverSet> {
        let mut items = Vec::new();
        for OpenSocket { address, socket, file } in sockets {
            let name = match address {
                ListenAddress::Tcp(address) => format!("{LISTEN}{address}\n"),
                ListenAddress::Unix(path) => {
                    let id = file.as_ref().and_then(|file| file.id);
                    let id = id.map_or("-".to_owned(), |FileId { device, inode }| format!("{device}:{inode}"));
                    format!("{UNIX}{id} {}\n", path.display())
                }
            };
            items.push((name, socket.as_fd().try_clone_to_owned()?));
        }
        items.push((format!("{COUNTERS}\n"), counters.try_clone_to_owned()?));
        if let Some(KnownKeySet { url, text, fetched_at_ms }) = key_set {
            items.push((format!("{KEY_SET}{fetched_at_ms} {url}\n"), file_with(&text)?));
        }
        if !history.is_empty() {
            items.push((format!("{HISTORY}{}\n", HISTORY_FORMAT), file_with(history.as_bytes())?));
        }
        Ok(HandoverSet(items))
    }

    /// Sends the items and waits until the new process is ready. It does not accept yet.
    pub async fn hand_over(self, channel: StdUnixStream) -> io::Result<ReadyChild> {
        channel.set_nonblocking(true)?;
        let channel = UnixStream::from_std(channel)?;
        let mut text = format!("{HEADER}{}\n", self.0.len());
        for batch in self.0.chunks(DESCRIPTORS_PER_MESSAGE) {
            batch.iter().for_each(|(channel, _)| text.push_str(channel));
            let descriptors: Vec<BorrowedFd> = batch.iter().map(|(_, descriptor)| descriptor.as_fd()).collect();
            channel.async_io(Interest::WRITABLE, || send(&channel, text.as_bytes(), &descriptors)).await?;
            text.clear();
        }
        expect_message(&channel, READY).await?;
        Ok(ReadyChild(channel))
    }
}

/// A file in memory with this text.
fn file_with(text: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create("handover", MemfdFlags::CLOEXEC)?);
    file.write_all(text)?;
    Ok(file.into())
}

fn read_file(descriptor: OwnedFd) -> io::Result<Vec<u8>> {
    let (mut file, mut text) = (File::from(descriptor), Vec::new());
    file.rewind()?;
    file.read_to_end(&mut text)?;
    Ok(text)
}

/// The channel to a new process that is ready.
pub struct ReadyChild(UnixStream);

impl ReadyChild {
    /// Lets the new process serve, and waits until it does. An error means that it closed the channel.
    pub async fn let_serve(self) -> io::Result<()> {
        self.0.async_io(Interest::WRITABLE, || send(&self.0, GO, &[])).await?;
        expect_message(&self.0, SERVING).await
    }
}

/// Sends a message with its descriptors, or neither.
fn send(channel: &UnixStream, text: &[u8], descriptors: &[BorrowedFd]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_PER_MESSAGE))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("too many descriptors in one message"));
    }
    let sent = sendmsg(channel, &[IoSlice::new(text)], &mut control, SendFlags::NOSIGNAL)?;
    if sent < text.len() {
        // The socket buffer holds more than is ever sent before it is read.
        return Err(io::Error::other("the channel is full"));
    }
    Ok(())
}

/// Waits for the expected message.
async fn expect_message(channel: &UnixStream, word: &[u8]) -> io::Result<()> {
    let mut received = Vec::new();
    while received.len() < word.len() {
        channel.readable().await?;
        let mut bytes = [0; 16];
        match channel.try_read(&mut bytes[..(word.len() - received.len()).min(16)]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => received.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    if received == word { Ok(()) } else { Err(protocol_error()) }
}

/// What this process received.
pub struct Handover {
    /// PID of the process that this one replaces.
    pub from: u32,
    pub sockets: InheritedSockets,
    /// What the former process had.
    pub former: Former,
    pub channel: SuccessorChannel,
}

impl Handover {
    /// Receives the items, if this process was started for an upgrade. Call once, before anything reads standard input.
    pub fn receive() -> io::Result<Option<Handover>> {
        let Some(from) = env::var(PREDECESSOR_VARIABLE).ok().and_then(|id| id.parse().ok()) else { return Ok(None) };
        let channel = io::stdin().as_fd().try_clone_to_owned()?;
        // The variable may be inherited by other processes: only a socket created by that very process is used.
        if sockopt::socket_peercred(&channel)
            .map_or(true, |peer| peer.pid.as_raw_nonzero().get().unsigned_abs() != from)
        {
            return Ok(None);
        }
        dup2_stdin(File::open("/dev/null")?)?;
        let channel = StdUnixStream::from(channel);
        channel.set_nonblocking(false)?;
        channel.set_read_timeout(Some(RECEIVE_TIMEOUT))?;
        let (names, descriptors) = receive_all(&channel)?;
        let (mut sockets, mut former) = (Vec::new(), Former::default());
        let history_name = format!("{HISTORY}{}", HISTORY_FORMAT);
        for (name, descriptor) in names.iter().zip(descriptors) {
            if let Some(address) = name.strip_prefix(LISTEN) {
                let address = address.parse().map(ListenAddress::Tcp).map_err(|_no_address| protocol_error())?;
                sockets.push(OpenSocket { address, socket: descriptor.into(), file: None });
            } else if let Some(rest) = name.strip_prefix(UNIX) {
                let (id, path) = rest.split_once(' ').ok_or_else(protocol_error)?;
                let file = SocketFile::inherited(path.into(), parse_file_id(id)?);
                let address = ListenAddress::Unix(path.into());
                sockets.push(OpenSocket { address, socket: descriptor.into(), file: Some(file) });
            } else if name == COUNTERS {
                former.counters = Some(descriptor);
            } else if let Some(rest) = name.strip_prefix(KEY_SET) {
                let (fetched_at_ms, url) = rest.split_once(' ').ok_or_else(protocol_error)?;
                let fetched_at_ms = fetched_at_ms.parse().map_err(|_no_number| protocol_error())?;
                let text = read_file(descriptor)?.into();
                former.key_set = Some(KnownKeySet { url: url.to_owned(), text, fetched_at_ms });
            } else if *name == history_name {
                former.history = String::from_utf8(read_file(descriptor)?).map_err(|_no_text| protocol_error())?;
            }
            // Unknown items of other versions are ignored.
        }
        Ok(Some(Handover {
            from,
            sockets: InheritedSockets::from_predecessor(sockets)?,
            former,
            channel: SuccessorChannel(channel),
        }))
    }
}

/// The new process's end of the channel.
pub struct SuccessorChannel(StdUnixStream);

impl SuccessorChannel {
    /// Reports that this process is ready, and waits until it may serve. Nothing may have been accepted. The former
    /// process decides how long that takes. Dropping this closes the channel.
    pub async fn ready(self) -> io::Result<ServingChannel> {
        self.0.set_nonblocking(true)?;
        let channel = UnixStream::from_std(self.0)?;
        channel.async_io(Interest::WRITABLE, || send(&channel, READY, &[])).await?;
        expect_message(&channel, GO).await?;
        Ok(ServingChannel(channel))
    }
}

/// The channel of a new process that may serve.
pub struct ServingChannel(UnixStream);

impl ServingChannel {
    /// Reports that connections are accepted. An old process that has ended meanwhile need not know.
    pub async fn serving(self) {
        let _ = self.0.async_io(Interest::WRITABLE, || send(&self.0, SERVING, &[])).await;
    }
}

/// The file of a Unix socket; `-` if the process does not know it.
fn parse_file_id(text: &str) -> io::Result<Option<FileId>> {
    if text == "-" {
        return Ok(None);
    }
    let id = text
        .split_once(':')
        .and_then(|(device, inode)| Some(FileId { device: device.parse().ok()?, inode: inode.parse().ok()? }));
    id.map(Some).ok_or_else(protocol_error)
}

/// Reads all announced lines and descriptors.
fn receive_all(channel: &StdUnixStream) -> io::Result<(Vec<String>, Vec<OwnedFd>)> {
    let mut text = Vec::new();
    let mut descriptors = Vec::new();
    loop {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_PER_MESSAGE))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(channel, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        if received.bytes == 0 {
            return Err(io::Error::new(ErrorKind::UnexpectedEof, "the former process has ended"));
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(io::Error::other("the limit of open files is reached"));
        }
        text.extend_from_slice(&bytes[..received.bytes]);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                descriptors.extend(received);
            }
        }
        if let Some(names) = item_names(&text)? {
            // A message arrives with its descriptors, so all of them are there.
            return if names.len() == descriptors.len() { Ok((names, descriptors)) } else { Err(protocol_error()) };
        }
    }
}

/// The lines after the first, once as many have arrived as the first announces.
fn item_names(text: &[u8]) -> io::Result<Option<Vec<String>>> {
    let text = std::str::from_utf8(text).map_err(|_no_text| protocol_error())?;
    let Some((first, rest)) = text.split_once('\n') else { return Ok(None) };
    let count = first.strip_prefix(HEADER).and_then(|count| count.parse::<usize>().ok()).ok_or_else(protocol_error)?;
    let is_complete = rest.matches('\n').count() == count;
    Ok(is_complete.then(|| rest.lines().map(str::to_owned).collect()))
}

fn protocol_error() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "the other process sent an unknown message")
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener};
    use std::thread;

    use tokio::runtime::{Builder, Runtime};

    use super::*;

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn all_announced_lines_are_awaited() {
        assert!(item_names(b"transom 1 ").unwrap().is_none());
        assert!(item_names(b"transom 1 2\nlisten 127.0.0.1:80\ncou").unwrap().is_none());
        assert_eq!(item_names(b"transom 1 2\na\nb\n").unwrap().unwrap(), ["a", "b"]);
        assert_eq!(item_names(b"transom 1 0\n").unwrap().unwrap(), [""; 0]);
        assert!(
            item_names(b"transom 2 1\na\n").is_err()
                && item_names(b"GET / HTTP/1.1\r\n").is_err()
                && item_names(b"\xff").is_err()
        );
    }

    #[test]
    fn any_number_of_descriptors_arrives_in_order() {
        let sockets: Vec<_> = (0..600)
            .map(|_| {
                let socket = TcpListener::bind("127.0.0.1:0").unwrap();
                let address = ListenAddress::Tcp(socket.local_addr().unwrap());
                OpenSocket { address, socket: socket.into(), file: None }
            })
            .collect();
        let memory = File::open("/dev/null").unwrap();
        let (old, new) = StdUnixStream::pair().unwrap();
        let handover = HandoverSet::new(&sockets, memory.as_fd(), None, "").unwrap();
        let sender = thread::spawn(move || {
            runtime().block_on(async { handover.hand_over(old).await.unwrap().let_serve().await.unwrap() });
        });
        let (names, descriptors) = receive_all(&new).unwrap();
        runtime().block_on(async { SuccessorChannel(new).ready().await.unwrap().serving().await });
        sender.join().unwrap();
        assert_eq!((names.len(), names[600].as_str()), (601, "counters"));
        for (name, descriptor) in names.iter().zip(descriptors).take(600) {
            let address = TcpListener::from(descriptor).local_addr().unwrap();
            assert_eq!(name, &format!("listen {address}"));
        }
    }

    #[test]
    fn a_closed_channel_is_an_error() {
        let memory = File::open("/dev/null").unwrap();
        let hand_over = |channel| {
            let handover = HandoverSet::new(&[], memory.as_fd(), None, "").unwrap();
            runtime().block_on(async { handover.hand_over(channel).await?.let_serve().await })
        };
        let (old, new) = StdUnixStream::pair().unwrap();
        drop(new);
        assert!(hand_over(old).is_err());
        let (old, mut new) = StdUnixStream::pair().unwrap();
        new.write_all(b"what?!").unwrap();
        assert_eq!(hand_over(old).unwrap_err().kind(), ErrorKind::InvalidData);
        // Also after the new process was allowed to serve.
        let (old, mut new) = StdUnixStream::pair().unwrap();
        new.write_all(READY).unwrap();
        new.shutdown(Shutdown::Write).unwrap();
        assert_eq!(hand_over(old).unwrap_err().kind(), ErrorKind::UnexpectedEof);
        let mut received = String::new();
        new.read_to_string(&mut received).unwrap();
        assert_eq!(received, "transom 1 1\ncounters\nyours\n");
    }
}
