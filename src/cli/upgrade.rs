//! `transom upgrade`: has a running gateway replaced by this version of it, and says what became of that.
//!
//! The gateway is told by a signal, as anybody may do. What it says goes to a socket that is named after the process,
//! in no file system: it is there as long as somebody waits, and takes no configuration.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::PathBuf;
use std::process;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use super::{Exit, located, pid_file, read, successor};
use crate::clock::Clock;
use crate::reload::Watch;

/// How much longer than the gateway itself the command waits.
const GRACE: Duration = Duration::from_secs(10);
/// How often it looks whether the gateway is still there.
const LOOK: Duration = Duration::from_millis(100);

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
    match found.and_then(|pid| order(pid, config.timeouts.upgrade + successor::GRACE + GRACE)) {
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
    let word = name(old).and_then(|name| UnixDatagram::bind_addr(&name)).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => format!("another command waits for an upgrade of process {old} already"),
        _ => format!("no word of process {old} can be received: {error}"),
    })?;
    word.set_read_timeout(Some(LOOK)).map_err(|error| error.to_string())?;
    kill_process(pid, Signal::USR2).map_err(|error| format!("process {old} can not be told: {error}"))?;
    let clock = Clock::system();
    let begun = clock.instant();
    let mut said = [0; 1024];
    while clock.instant().duration_since(begun) < limit {
        match word.recv(&mut said) {
            Ok(length) => return outcome(old, &String::from_utf8_lossy(&said[..length])),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
            Err(error) => return Err(format!("no word of process {old} can be received: {error}")),
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

/// What a process is called (proc_pid_comm(5)).
fn called(pid: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/comm")).ok().map(|name| name.trim_end().to_owned())
}

/// Anybody may say anything.
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

/// Says it, from the process that is to be replaced. Mostly nobody waits.
pub fn say(word: &Word) {
    let text = match word {
        Word::TakenOver(pid) => format!("{TAKEN_OVER}{pid}"),
        Word::Failed(why) => format!("{FAILED}{why}"),
    };
    let said = name(process::id()).and_then(|name| {
        let socket = UnixDatagram::unbound()?;
        // The name is anybody's to take: who does not listen is not waited for.
        socket.set_nonblocking(true)?;
        socket.send_to_addr(text.as_bytes(), &name)
    });
    if let Err(error) = said {
        tracing::debug!(%error, "nobody waits for the outcome of the upgrade");
    }
}

fn name(pid: u32) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("transom-upgrade-{pid}"))
}
