//! `transom upgrade`: has a running gateway replaced by this version of it, and says what became of that.
//!
//! The command signals the gateway and waits for its message on a datagram socket in the abstract namespace, which needs
//! no configuration and leaves nothing behind. Any local user can send to such a socket and bind such names. So the
//! kernel names the sender of each message (SCM_CREDENTIALS, unix(7)), and only the signalled process is believed; and the
//! name ends in random digits, so that no other process can bind it first. The gateway finds it in `/proc/net/unix`.

pub(super) mod child;
pub(super) mod protocol;
pub(super) mod state;

use std::fs;
use std::io::{self, ErrorKind, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::PathBuf;
use std::process;
use std::thread;
use std::time::Duration;

use rustix::cmsg_space;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg, sockopt};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::{Exit, located, pid_file, read};
use crate::clock::Clock;
use crate::file_watch::Watch;

/// How much longer than the gateway itself the command waits.
const GRACE: Duration = Duration::from_secs(10);
/// How often it looks whether the gateway is still there.
const LOOK: Duration = Duration::from_millis(100);

/// How often a message is sent to a receiver whose queue is full, and how long apart.
const SEND_TRIES: u32 = 10;
const SEND_PAUSE: Duration = Duration::from_millis(10);

const TAKEN_OVER: &str = "taken over by ";
const FAILED: &str = "failed: ";

#[derive(clap::Args)]
pub struct Arguments {
    /// The configuration
    #[arg(long, value_name = "FILE", default_value = "gateway.toml")]
    config: PathBuf,
    /// The process that serves, where the configuration has no `pid_file`
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

pub fn upgrade(arguments: &Arguments) -> Exit {
    // What this version makes of the file is what counts: it is going to read it.
    let config = match read(&arguments.config, &mut Watch::default()) {
        Ok(config) => config,
        Err(problems) => {
            tell!("{}", problems.trim_end());
            return Exit::BadConfig;
        }
    };
    let found = match (arguments.pid, &config.pid_file) {
        (Some(pid), _) => Ok(pid),
        (None, Some(file)) => {
            let file = located(&arguments.config, file);
            pid_file::named(&file)
                .ok_or_else(|| format!("{} names no process: is the gateway running?", file.display()))
        }
        (None, None) => {
            tell!("transom: which process? Give it a `pid_file` in the configuration, or say `--pid PID`");
            return Exit::BadConfig;
        }
    };
    match found.and_then(|pid| order(pid, config.timeouts.upgrade + child::GRACE + GRACE)) {
        Ok(line) => {
            show!("{line}");
            Exit::Fine
        }
        Err(line) => {
            tell!("transom: {line}");
            Exit::Failed
        }
    }
}

/// Tells a process to hand over, and waits until it has or says that it does not.
fn order(old: u32, limit: Duration) -> Result<String, String> {
    let nobody = || format!("there is no process {old}");
    let pid = i32::try_from(old).ok().and_then(Pid::from_raw).ok_or_else(nobody)?;
    // The signal ends whoever does not expect it.
    if !expects_signal(old, Signal::USR2).ok_or_else(nobody)? {
        return Err(format!("process {old} is no gateway that serves: it does not wait for SIGUSR2"));
    }
    let (called, own) = (called(old), called(process::id()));
    if let Some(called) = called.filter(|called| !called.contains("transom") && Some(called) != own.as_ref()) {
        return Err(format!("process {old} is `{}`, and no gateway", printable(&called)));
    }
    let not_received = |error| format!("no message of process {old} can be received: {error}");
    let socket = receiver(old).map_err(not_received)?;
    kill_process(pid, Signal::USR2).map_err(|error| format!("process {old} can not be told: {error}"))?;
    let clock = Clock::system();
    let begun = clock.instant();
    while clock.instant().duration_since(begun) < limit {
        match receive(&socket, pid) {
            Ok(Some(message)) => return outcome(old, &message),
            // Another process sent it.
            Ok(None) => continue,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
            Err(error) => return Err(not_received(error)),
        }
        if test_kill_process(pid) == Err(rustix::io::Errno::SRCH) {
            return Err(format!("process {old} ended without a word: its log may say why"));
        }
    }
    Err(format!("process {old} did not say in time what became of the upgrade: its log may"))
}

fn outcome(old: u32, said: &str) -> Result<String, String> {
    if let Some(new) = said.strip_prefix(TAKEN_OVER).and_then(|pid| pid.parse::<u32>().ok()) {
        return Ok(format!("process {new} took over from {old}"));
    }
    let why = said.strip_prefix(FAILED).unwrap_or(said);
    Err(format!("process {old} goes on, the upgrade failed: {}; its log says more", printable(why)))
}

/// The socket on which the command waits for the message of a process.
fn receiver(from: u32) -> io::Result<UnixDatagram> {
    let name = format!("{}{:016x}", prefix(from), fastrand::u64(..));
    let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    sockopt::set_socket_passcred(&socket, true)?;
    socket.set_read_timeout(Some(LOOK))?;
    Ok(socket)
}

/// The next message; `None` if it is not from that process.
fn receive(socket: &UnixDatagram, from: Pid) -> io::Result<Option<String>> {
    let mut text = [0; 1024];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut text)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let is_sender = |message| matches!(message, RecvAncillaryMessage::ScmCredentials(sender) if sender.pid == from);
    let is_from = control.drain().any(is_sender);
    Ok(is_from.then(|| String::from_utf8_lossy(&text[..received.bytes]).into_owned()))
}

/// What a process is called (proc_pid_comm(5)).
fn called(pid: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/comm")).ok().map(|name| name.trim_end().to_owned())
}

/// Text without what would control a terminal.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// Whether a process has a handler for a signal (proc_pid_status(5)); `None`: there is no such process.
fn expects_signal(pid: u32, signal: Signal) -> Option<bool> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"))?;
    let caught = u64::from_str_radix(caught.trim(), 16).ok()?;
    Some(caught >> (signal.as_raw() - 1) & 1 == 1)
}

/// What a process says to whoever waits for it to be replaced.
pub enum Word<'a> {
    TakenOver(u32),
    Failed(&'a str),
}

/// Sends it to all commands that wait, from the process that is to be replaced. Mostly none does.
pub fn say(word: &Word) {
    let text = match word {
        Word::TakenOver(pid) => format!("{TAKEN_OVER}{pid}"),
        Word::Failed(why) => format!("{FAILED}{why}"),
    };
    if let Err(error) = send_to_all(text.as_bytes()) {
        tracing::debug!(%error, "the outcome of the upgrade is not sent");
    }
}

fn send_to_all(message: &[u8]) -> io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    // Anybody can bind such a name: a receiver that does not read must not stop the gateway.
    socket.set_nonblocking(true)?;
    let mut waiting = receivers(&fs::read_to_string("/proc/net/unix")?, process::id());
    for _ in 0..SEND_TRIES {
        waiting.retain(|name| {
            let sent = SocketAddr::from_abstract_name(name).and_then(|name| socket.send_to_addr(message, &name));
            sent.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
        });
        if waiting.is_empty() {
            return Ok(());
        }
        thread::sleep(SEND_PAUSE);
    }
    Err(io::Error::other("a receiver does not read"))
}

/// The names on which commands wait for a process, of all sockets that the kernel lists (proc(5), `/proc/net/unix`).
fn receivers(sockets: &str, pid: u32) -> Vec<String> {
    let prefix = prefix(pid);
    let names = sockets.lines().filter_map(|line| line.rsplit(' ').next()?.strip_prefix('@'));
    names.filter(|name| name.starts_with(&prefix)).map(str::to_owned).collect()
}

fn prefix(pid: u32) -> String {
    format!("transom-upgrade-{pid}-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receivers_are_found_by_the_process_they_wait_for() {
        let sockets = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            0000000000000000: 00000002 00000000 00000000 0002 01 40 @transom-upgrade-7-00ff\n\
            0000000000000000: 00000002 00000000 00000000 0002 01 41 @transom-upgrade-77-00ff\n\
            0000000000000000: 00000002 00000000 00000000 0002 01 42 /tmp/@transom-upgrade-7-1\n\
            0000000000000000: 00000002 00000000 00000000 0002 01 43\n";
        assert_eq!(receivers(sockets, 7), ["transom-upgrade-7-00ff"]);
    }

    #[test]
    fn only_messages_of_the_expected_process_are_received() {
        let socket = receiver(process::id()).unwrap();
        let own = Pid::from_raw(i32::try_from(process::id()).unwrap()).unwrap();
        send_to_all(b"taken over by 1").unwrap();
        assert_eq!(receive(&socket, Pid::INIT).unwrap(), None);
        send_to_all(b"taken over by 2").unwrap();
        assert_eq!(receive(&socket, own).unwrap().as_deref(), Some("taken over by 2"));
    }
}
