//! `transom upgrade`: makes a running gateway replace itself with the installed version, and prints the outcome.
//!
//! The command signals the gateway and waits for its message on a datagram socket in the abstract namespace, which
//! needs no configuration and leaves no file behind. Any local user can send to such a socket and bind such names. The
//! kernel therefore names the sender of each message (SCM_CREDENTIALS, unix(7)), and only messages of the signalled
//! process count; the name ends in random digits, so that no other process can bind it first. The gateway finds the
//! name in `/proc/net/unix`.

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

use super::{Exit, pid_file, read_config, resolve_path};
use crate::file_watch::FileWatch;
use transom_runtime::clock::Clock;

/// How much longer than the gateway's own limits the command waits.
const EXTRA_WAIT: Duration = Duration::from_secs(10);
/// How often the command checks that the gateway is alive.
const RECEIVE_TIMEOUT: Duration = Duration::from_millis(100);

/// Attempts to send to a receiver whose queue is full, and the pause between them.
const SEND_TRIES: u32 = 10;
const SEND_PAUSE: Duration = Duration::from_millis(10);

const TAKEN_OVER: &str = "taken over by ";
const FAILED: &str = "failed: ";

#[derive(clap::Args)]
pub struct Arguments {
    /// Configuration file
    #[arg(short, long, value_name = "FILE", default_value = "gateway.toml")]
    config: PathBuf,
    /// PID of the serving process, if the configuration has no `pid_file`
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
}

pub fn upgrade(arguments: &Arguments) -> Exit {
    // The new process will read the file with this version.
    let config = match read_config(&arguments.config, &mut FileWatch::default()) {
        Ok(config) => config,
        Err(invalid) => {
            print_err!("{}", invalid.to_string().trim_end());
            return Exit::BadConfig;
        }
    };
    let found = match (arguments.pid, &config.general.pid_file) {
        (Some(pid), _) => Ok(pid),
        (None, Some(file)) => {
            let file = resolve_path(&arguments.config, file);
            pid_file::read_pid(&file)
                .ok_or_else(|| format!("{} names no process: is the gateway running?", file.display()))
        }
        (None, None) => {
            print_err!("transom: the process is unknown: set `pid_file` in the configuration, or pass `--pid PID`");
            return Exit::BadConfig;
        }
    };
    match found.and_then(|pid| request_upgrade(pid, config.timeouts.upgrade + child::SERVING_TIMEOUT + EXTRA_WAIT)) {
        Ok(line) => {
            print_out!("{line}");
            Exit::Fine
        }
        Err(line) => {
            print_err!("transom: {line}");
            Exit::Failed
        }
    }
}

/// Signals a process to upgrade, and waits for the outcome.
fn request_upgrade(old: u32, limit: Duration) -> Result<String, String> {
    let no_process = || format!("there is no process {old}");
    let pid = i32::try_from(old).ok().and_then(Pid::from_raw).ok_or_else(no_process)?;
    // The signal would end a process that does not handle it.
    if !handles_signal(old, Signal::USR2).ok_or_else(no_process)? {
        return Err(format!("process {old} is not a serving gateway: it does not handle SIGUSR2"));
    }
    let (called, own) = (process_name(old), process_name(process::id()));
    if let Some(called) = called.filter(|called| !called.contains("transom") && Some(called) != own.as_ref()) {
        return Err(format!("process {old} is `{}`, not a gateway", printable(&called)));
    }
    let not_received = |error| format!("cannot receive messages of process {old}: {error}");
    let socket = receiver(old).map_err(not_received)?;
    kill_process(pid, Signal::USR2).map_err(|error| format!("cannot signal process {old}: {error}"))?;
    let clock = Clock::system();
    let begun = clock.instant();
    while clock.instant().duration_since(begun) < limit {
        match receive(&socket, pid) {
            Ok(Some(message)) => return outcome_text(old, &message),
            // Another process sent it.
            Ok(None) => continue,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
            Err(error) => return Err(not_received(error)),
        }
        if test_kill_process(pid) == Err(rustix::io::Errno::SRCH) {
            return Err(format!("process {old} ended without reporting the outcome: see its log"));
        }
    }
    Err(format!("process {old} did not report the outcome in time: see its log"))
}

fn outcome_text(old: u32, message: &str) -> Result<String, String> {
    if let Some(new) = message.strip_prefix(TAKEN_OVER).and_then(|pid| pid.parse::<u32>().ok()) {
        return Ok(format!("process {new} took over from {old}"));
    }
    let why = message.strip_prefix(FAILED).unwrap_or(message);
    Err(format!("the upgrade failed, process {old} keeps serving: {}; see its log", printable(why)))
}

/// The socket that receives the outcome.
fn receiver(from: u32) -> io::Result<UnixDatagram> {
    let name = format!("{}{:016x}", prefix(from), fastrand::u64(..));
    let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    sockopt::set_socket_passcred(&socket, true)?;
    socket.set_read_timeout(Some(RECEIVE_TIMEOUT))?;
    Ok(socket)
}

/// The next message; `None` if another process sent it.
fn receive(socket: &UnixDatagram, from: Pid) -> io::Result<Option<String>> {
    let mut text = [0; 1024];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut text)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let is_sender = |message| matches!(message, RecvAncillaryMessage::ScmCredentials(sender) if sender.pid == from);
    let is_from = control.drain().any(is_sender);
    Ok(is_from.then(|| String::from_utf8_lossy(&text[..received.bytes]).into_owned()))
}

/// The name of a process (proc_pid_comm(5)).
fn process_name(pid: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/comm")).ok().map(|name| name.trim_end().to_owned())
}

/// Text without control characters.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// Whether a process handles a signal (proc_pid_status(5)); `None`: there is no such process.
fn handles_signal(pid: u32, signal: Signal) -> Option<bool> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"))?;
    let caught = u64::from_str_radix(caught.trim(), 16).ok()?;
    Some(caught >> (signal.as_raw() - 1) & 1 == 1)
}

/// The outcome of an upgrade.
pub enum UpgradeOutcome<'a> {
    TakenOver(u32),
    Failed(&'a str),
}

/// Sends the outcome to all waiting commands; usually there is one or none.
pub fn send_outcome(word: &UpgradeOutcome) {
    let text = match word {
        UpgradeOutcome::TakenOver(pid) => format!("{TAKEN_OVER}{pid}"),
        UpgradeOutcome::Failed(why) => format!("{FAILED}{why}"),
    };
    if let Err(error) = send_to_all(text.as_bytes()) {
        tracing::debug!(%error, "cannot send the outcome of the upgrade");
    }
}

fn send_to_all(message: &[u8]) -> io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    // Any process can bind such a name: a receiver that does not read must not block the gateway.
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

/// The socket names of commands that wait for process `pid`, from `/proc/net/unix` (proc(5)).
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
    fn receivers_are_found_by_the_pid_in_their_names() {
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
