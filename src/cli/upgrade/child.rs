//! The new process of an upgrade: starting it, handing over to it, and ending it if it fails.
//!
//! It runs the same path and arguments as this process. This process keeps serving until the new one does.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Stdio};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::cli::upgrade::protocol::{HandoverSet, PREDECESSOR_VARIABLE};

/// The file of the running program, wherever it was moved.
const RUNNING_PROGRAM: &str = "/proc/self/exe";

/// Limit for the last message of the new process, `serving`, which it sends at once. It is not ended earlier, because
/// it may have accepted connections.
pub const SERVING_TIMEOUT: Duration = Duration::from_secs(60);

/// How often an ending process is polled, and how many times before it is killed.
const POLL_PERIOD: Duration = Duration::from_millis(10);
const POLLS_MAX: u32 = 100;

/// How to start the program again.
pub struct Program {
    file: PathBuf,
    name: OsString,
    arguments: Vec<OsString>,
}

impl Program {
    /// Call at start: an upgrade replaces the file.
    pub fn of_this_process() -> io::Result<Program> {
        let mut words = env::args_os();
        let name = words.next().unwrap_or_default();
        // The name may be a link that leads to another version by then. Only a name of the running file is used.
        let file = match find_program(&name).filter(|file| is_running_program(file)) {
            Some(file) => file,
            None => fs::read_link(RUNNING_PROGRAM)?,
        };
        Ok(Program { file, name, arguments: words.collect() })
    }

    /// Starts the new process and the hand-over to it.
    pub fn start(&self, handover: HandoverSet, limit: Duration) -> io::Result<Successor> {
        let (own_end, child_end) = UnixStream::pair()?;
        let mut command = Command::new(&self.file);
        command.arg0(&self.name).args(&self.arguments).env(PREDECESSOR_VARIABLE, process::id().to_string());
        let child = command
            .stdin(Stdio::from(OwnedFd::from(child_end)))
            .spawn()
            .map_err(|error| io::Error::new(error.kind(), format!("cannot start {}: {error}", self.file.display())))?;
        // Drops this process's copy of the other end, so that the channel closes when the new process ends.
        drop(command);
        let pid = child.id();
        let (cancel, cancelled) = oneshot::channel();
        let outcome = tokio::spawn(supervise(child, own_end, handover, limit, cancelled));
        Ok(Successor { pid, outcome, cancel })
    }
}

/// The path of a program with this name.
fn find_program(name: &OsString) -> Option<PathBuf> {
    let path = Path::new(name);
    if path.components().count() > 1 {
        return env::current_dir().ok().map(|folder| folder.join(path));
    }
    env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(path)).find(|file| is_running_program(file))
}

/// Whether a file is the running program.
fn is_running_program(file: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).ok();
    identity(file).is_some_and(|file| identity(Path::new(RUNNING_PROGRAM)) == Some(file))
}

/// A new process that does not serve yet.
pub struct Successor {
    pub pid: u32,
    outcome: JoinHandle<Result<(), String>>,
    cancel: oneshot::Sender<()>,
}

impl Successor {
    /// Waits until the new process serves, or has failed and ended. Cancel-safe.
    pub async fn wait_until_serving(&mut self) -> Result<(), String> {
        (&mut self.outcome).await.unwrap_or_else(|error| Err(error.to_string()))
    }

    /// Ends the new process, unless it was already allowed to serve. Returns whether it serves.
    pub async fn cancel(self) -> bool {
        // If the receiver is gone, the process serves or has ended.
        let _ = self.cancel.send(());
        matches!(self.outcome.await, Ok(Ok(())))
    }
}

/// Hands over, until the process serves or is gone. Can be cancelled until the process is ready.
async fn supervise(
    mut child: Child,
    channel: UnixStream,
    handover: HandoverSet,
    limit: Duration,
    cancelled: oneshot::Receiver<()>,
) -> Result<(), String> {
    let handed_over = tokio::select! {
        biased;
        // Cancelling wins over a simultaneous message: nothing is lost yet.
        _ = cancelled => {
            reap(&mut child, 0).await;
            return Err(String::from("this process received a signal to stop"));
        }
        handed_over = tokio::time::timeout(limit, handover.hand_over(channel)) => handed_over,
    };
    let child_channel = match handed_over {
        Ok(Ok(ready)) => ready,
        // The process has closed the channel, or is ending; its exit status may say why.
        Ok(Err(error)) => return Err(describe_exit(&mut child, "ready", &error).await),
        Err(_elapsed) => {
            reap(&mut child, 0).await;
            return Err(format!("the new process was not ready within {limit:?} (`timeouts.upgrade`)"));
        }
    };
    // From here on it may have accepted connections, so it is not cancelled.
    match tokio::time::timeout(SERVING_TIMEOUT, child_channel.let_serve()).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(describe_exit(&mut child, "serving", &error).await),
        Err(_elapsed) => {
            reap(&mut child, 0).await;
            Err(format!("the new process was ready but did not serve within {SERVING_TIMEOUT:?}"))
        }
    }
}

/// Describes how a process failed before it was `what`.
async fn describe_exit(child: &mut Child, what: &str, error: &io::Error) -> String {
    match reap(child, POLLS_MAX).await {
        Some(status) => format!("the new process ended before it was {what} ({status})"),
        None => format!("the new process did not report that it is {what} ({error})"),
    }
}

/// Waits for a process to end, and kills it if that takes too long. Returns its status if it ended by itself.
async fn reap(child: &mut Child, looks: u32) -> Option<process::ExitStatus> {
    for _ in 0..looks {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        tokio::time::sleep(POLL_PERIOD).await;
    }
    // Killing an ended process fails; waiting for it does not.
    let _ = child.kill();
    let _ = child.wait();
    None
}
