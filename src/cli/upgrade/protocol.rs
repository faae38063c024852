//! What a process hands over to the one that takes its place, and how they come to terms: both sides of the line
//! between them.
//!
//! The line is a Unix socket, and the new process finds it as its standard input: so descriptors are sent and
//! received, nothing is inherited by accident, and no number of a descriptor has to be believed. They say, in turn:
//!
//! - old: what is handed over, a line of text for each descriptor, and the descriptors in the same order;
//! - new: `ready`. It has read its configuration, has all it needs, and accepts nothing yet;
//! - old: `yours`. From here on the new one accepts;
//! - new: `serving`. Now the old one drains.
//!
//! Whichever of them ends before closes the line, and the other one knows. Until `ready` the new one may be given up
//! at any time, and nobody misses it. From `yours` on it is not: it may have accepted connections, which would end with
//! it. So only the end of the line says that it has failed then. This file starts no process.

use std::env;
use std::fs::File;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::time::Duration;

use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg, sockopt,
};
use rustix::stdio::dup2_stdin;
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::downstream::listener::InheritedSockets;

/// Tells a new process whose place it takes: the id of that process.
pub const VARIABLE: &str = "TRANSOM_HANDOVER";

/// The first line begins so. The number changes with what the lines mean.
const GREETING: &str = "transom 1 ";
const LISTEN: &str = "listen ";
const COUNTERS: &str = "counters";
const READY: &[u8] = b"ready\n";
const YOURS: &[u8] = b"yours\n";
const SERVING: &[u8] = b"serving\n";

/// Descriptors in one message; the kernel takes 253.
const BATCH: usize = 250;
/// How long the new process waits for what it is handed.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is handed over: a line of text for each descriptor.
pub struct HandoverSet(Vec<(String, OwnedFd)>);

impl HandoverSet {
    pub fn new(sockets: &[(SocketAddr, TcpListener)], counters: BorrowedFd) -> io::Result<HandoverSet> {
        let mut items = Vec::new();
        for (address, socket) in sockets {
            items.push((format!("{LISTEN}{address}\n"), socket.as_fd().try_clone_to_owned()?));
        }
        items.push((format!("{COUNTERS}\n"), counters.try_clone_to_owned()?));
        Ok(HandoverSet(items))
    }

    /// Hands it over. The new process is ready when this returns, and accepts nothing yet.
    pub async fn hand_over(self, line: StdUnixStream) -> io::Result<Heir> {
        line.set_nonblocking(true)?;
        let line = UnixStream::from_std(line)?;
        let mut text = format!("{GREETING}{}\n", self.0.len());
        for batch in self.0.chunks(BATCH) {
            batch.iter().for_each(|(line, _)| text.push_str(line));
            let descriptors: Vec<BorrowedFd> = batch.iter().map(|(_, descriptor)| descriptor.as_fd()).collect();
            line.async_io(Interest::WRITABLE, || send(&line, text.as_bytes(), &descriptors)).await?;
            text.clear();
        }
        hear(&line, READY).await?;
        Ok(Heir(line))
    }
}

/// The line to a process that is ready.
pub struct Heir(UnixStream);

impl Heir {
    /// Gives it the place. It serves when this returns; an error says that it has left the line.
    pub async fn enter(self) -> io::Result<()> {
        self.0.async_io(Interest::WRITABLE, || send(&self.0, YOURS, &[])).await?;
        hear(&self.0, SERVING).await
    }
}

/// Sends a message and its descriptors, or neither.
fn send(line: &UnixStream, text: &[u8], descriptors: &[BorrowedFd]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(BATCH))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("too many descriptors at once"));
    }
    let sent = sendmsg(line, &[IoSlice::new(text)], &mut control, SendFlags::NOSIGNAL)?;
    if sent < text.len() {
        // The line has room for more than is ever sent before it is read.
        return Err(io::Error::other("the line takes no more"));
    }
    Ok(())
}

/// Waits for a word, which is the only one that can come.
async fn hear(line: &UnixStream, word: &[u8]) -> io::Result<()> {
    let mut heard = Vec::new();
    while heard.len() < word.len() {
        line.readable().await?;
        let mut bytes = [0; 16];
        match line.try_read(&mut bytes[..(word.len() - heard.len()).min(16)]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => heard.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    if heard == word { Ok(()) } else { Err(not_understood()) }
}

/// What this process was handed over.
pub struct Handover {
    /// Whose place it takes.
    pub from: u32,
    pub sockets: InheritedSockets,
    /// The memory that the counters lie in, if the process before had it to give.
    pub counters: Option<OwnedFd>,
    pub line: SuccessorChannel,
}

impl Handover {
    /// Receives what is handed over, if this process was started for that. To be asked once, before anything else
    /// reads standard input.
    pub fn receive() -> io::Result<Option<Handover>> {
        let Some(from) = env::var(VARIABLE).ok().and_then(|id| id.parse().ok()) else { return Ok(None) };
        let line = io::stdin().as_fd().try_clone_to_owned()?;
        // The variable can outlive what it told of: only a socket that this very process has made is meant.
        if sockopt::socket_peercred(&line).map_or(true, |peer| peer.pid.as_raw_nonzero().get().unsigned_abs() != from) {
            return Ok(None);
        }
        dup2_stdin(File::open("/dev/null")?)?;
        let line = StdUnixStream::from(line);
        line.set_nonblocking(false)?;
        line.set_read_timeout(Some(PATIENCE))?;
        let (names, descriptors) = receive_all(&line)?;
        let (mut sockets, mut counters) = (Vec::new(), None);
        for (name, descriptor) in names.iter().zip(descriptors) {
            if let Some(address) = name.strip_prefix(LISTEN) {
                let address: SocketAddr = address.parse().map_err(|_no_address| not_understood())?;
                sockets.push((address, TcpListener::from(descriptor)));
            } else if name == COUNTERS {
                counters = Some(descriptor);
            }
            // Whatever else another version has to give is not missed here.
        }
        Ok(Some(Handover {
            from,
            sockets: InheritedSockets::from_predecessor(sockets)?,
            counters,
            line: SuccessorChannel(line),
        }))
    }
}

/// The new process's end of the line.
pub struct SuccessorChannel(StdUnixStream);

impl SuccessorChannel {
    /// Says that everything is there, and waits until the place is this process's. Nothing may have been accepted.
    /// The process before decides how long that takes. If this is dropped, the line ends.
    pub async fn ready(self) -> io::Result<ServingChannel> {
        self.0.set_nonblocking(true)?;
        let line = UnixStream::from_std(self.0)?;
        line.async_io(Interest::WRITABLE, || send(&line, READY, &[])).await?;
        hear(&line, YOURS).await?;
        Ok(ServingChannel(line))
    }
}

/// The line of a process whose place it is now.
pub struct ServingChannel(UnixStream);

impl ServingChannel {
    /// Says that connections are accepted. An old process that has gone meanwhile need not know.
    pub async fn serving(self) {
        let _ = self.0.async_io(Interest::WRITABLE, || send(&self.0, SERVING, &[])).await;
    }
}

/// Reads up to the last line and the last descriptor that were announced.
fn receive_all(line: &StdUnixStream) -> io::Result<(Vec<String>, Vec<OwnedFd>)> {
    let mut text = Vec::new();
    let mut descriptors = Vec::new();
    loop {
        let mut bytes = [0; 4096];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(BATCH))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(line, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        if received.bytes == 0 {
            return Err(io::Error::new(ErrorKind::UnexpectedEof, "the process before has ended"));
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(io::Error::other("there is no room for more open files"));
        }
        text.extend_from_slice(&bytes[..received.bytes]);
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                descriptors.extend(received);
            }
        }
        if let Some(names) = names(&text)? {
            // A message comes with its descriptors, so that all of them are there as well.
            return if names.len() == descriptors.len() { Ok((names, descriptors)) } else { Err(not_understood()) };
        }
    }
}

/// The lines behind the first one, once as many have come as that announces.
fn names(text: &[u8]) -> io::Result<Option<Vec<String>>> {
    let text = std::str::from_utf8(text).map_err(|_no_text| not_understood())?;
    let Some((first, rest)) = text.split_once('\n') else { return Ok(None) };
    let count =
        first.strip_prefix(GREETING).and_then(|count| count.parse::<usize>().ok()).ok_or_else(not_understood)?;
    let is_complete = rest.matches('\n').count() == count;
    Ok(is_complete.then(|| rest.lines().map(str::to_owned).collect()))
}

fn not_understood() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "the other process speaks of what this one does not know")
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::Shutdown;
    use std::thread;

    use tokio::runtime::{Builder, Runtime};

    use super::*;

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn what_is_announced_is_waited_for() {
        assert!(names(b"transom 1 ").unwrap().is_none());
        assert!(names(b"transom 1 2\nlisten 127.0.0.1:80\ncou").unwrap().is_none());
        assert_eq!(names(b"transom 1 2\na\nb\n").unwrap().unwrap(), ["a", "b"]);
        assert_eq!(names(b"transom 1 0\n").unwrap().unwrap(), [""; 0]);
        assert!(
            names(b"transom 2 1\na\n").is_err() && names(b"GET / HTTP/1.1\r\n").is_err() && names(b"\xff").is_err()
        );
    }

    #[test]
    fn any_number_of_descriptors_arrives_in_order() {
        let sockets: Vec<_> = (0..600)
            .map(|_| {
                let socket = TcpListener::bind("127.0.0.1:0").unwrap();
                (socket.local_addr().unwrap(), socket)
            })
            .collect();
        let memory = File::open("/dev/null").unwrap();
        let (old, new) = StdUnixStream::pair().unwrap();
        let estate = HandoverSet::new(&sockets, memory.as_fd()).unwrap();
        let giver = thread::spawn(move || {
            runtime().block_on(async { estate.hand_over(old).await.unwrap().enter().await.unwrap() });
        });
        let (names, descriptors) = receive_all(&new).unwrap();
        runtime().block_on(async { SuccessorChannel(new).ready().await.unwrap().serving().await });
        giver.join().unwrap();
        assert_eq!((names.len(), names[600].as_str()), (601, "counters"));
        for (name, descriptor) in names.iter().zip(descriptors).take(600) {
            let address = TcpListener::from(descriptor).local_addr().unwrap();
            assert_eq!(name, &format!("listen {address}"));
        }
    }

    #[test]
    fn a_successor_that_leaves_is_noticed() {
        let memory = File::open("/dev/null").unwrap();
        let hand_over = |line| {
            let estate = HandoverSet::new(&[], memory.as_fd()).unwrap();
            runtime().block_on(async { estate.hand_over(line).await?.enter().await })
        };
        let (old, new) = StdUnixStream::pair().unwrap();
        drop(new);
        assert!(hand_over(old).is_err());
        let (old, mut new) = StdUnixStream::pair().unwrap();
        new.write_all(b"what?!").unwrap();
        assert_eq!(hand_over(old).unwrap_err().kind(), ErrorKind::InvalidData);
        // Also when the place was given to it.
        let (old, mut new) = StdUnixStream::pair().unwrap();
        new.write_all(READY).unwrap();
        new.shutdown(Shutdown::Write).unwrap();
        assert_eq!(hand_over(old).unwrap_err().kind(), ErrorKind::UnexpectedEof);
        let mut heard = String::new();
        new.read_to_string(&mut heard).unwrap();
        assert_eq!(heard, "transom 1 1\ncounters\nyours\n");
    }
}
