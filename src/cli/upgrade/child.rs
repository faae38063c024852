//! The process that is to take the place of this one: how it is started, and what becomes of it.
//!
//! It is the same program with the same arguments, from the file that lies where this one was started from. Until it
//! serves, nothing changes here; where it fails, it is gone without a trace but for what it said.

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

use crate::cli::upgrade::protocol::{HandoverSet, VARIABLE};

/// The running program, as the kernel knows it, wherever its file is by now.
const THIS: &str = "/proc/self/exe";

/// How long a process whose place it is already may take until it says that it serves, which it does at once. It is
/// not ended before, because it may have accepted connections.
pub const GRACE: Duration = Duration::from_secs(60);

/// How often a process that ends is looked at, and how many times before it is killed.
const LOOK: Duration = Duration::from_millis(10);
const LOOKS: u32 = 100;

/// What started this process, to be started once more.
pub struct Program {
    file: PathBuf,
    name: OsString,
    arguments: Vec<OsString>,
}

impl Program {
    /// To be asked at the start: later another file may lie in its place, which is what an upgrade is about.
    pub fn of_this_process() -> io::Result<Program> {
        let mut words = env::args_os();
        let name = words.next().unwrap_or_default();
        // What it was called by may be a link, which leads to another version by the time of the upgrade.
        let file = match called(&name).filter(|file| is_this(file)) {
            Some(file) => file,
            None => fs::read_link(THIS)?,
        };
        Ok(Program { file, name, arguments: words.collect() })
    }

    /// Starts it, and what it is told on its way to serving.
    pub fn start(&self, estate: HandoverSet, limit: Duration) -> io::Result<Successor> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = Command::new(&self.file);
        command.arg0(&self.name).args(&self.arguments).env(VARIABLE, process::id().to_string());
        let child = command.stdin(Stdio::from(OwnedFd::from(theirs))).spawn().map_err(|error| {
            io::Error::new(error.kind(), format!("{} can not be started: {error}", self.file.display()))
        })?;
        // This process has no descriptor of the other end any more: where that ends, the line does.
        drop(command);
        let pid = child.id();
        let (give_up, given_up) = oneshot::channel();
        let outcome = tokio::spawn(accompany(child, ours, estate, limit, given_up));
        Ok(Successor { pid, outcome, give_up })
    }
}

/// Where a program was found that was called so.
fn called(name: &OsString) -> Option<PathBuf> {
    let path = Path::new(name);
    if path.components().count() > 1 {
        return env::current_dir().ok().map(|folder| folder.join(path));
    }
    env::split_paths(&env::var_os("PATH")?).map(|folder| folder.join(path)).find(|file| is_this(file))
}

/// Whether a file is the running program.
fn is_this(file: &Path) -> bool {
    let identity = |path: &Path| fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).ok();
    identity(file).is_some_and(|file| identity(Path::new(THIS)) == Some(file))
}

/// A process that does not serve yet.
pub struct Successor {
    pub pid: u32,
    outcome: JoinHandle<Result<(), String>>,
    give_up: oneshot::Sender<()>,
}

impl Successor {
    /// Waits until it serves, or has failed and is gone: then it says why. Nothing is lost if this is dropped in between.
    pub async fn serves(&mut self) -> Result<(), String> {
        (&mut self.outcome).await.unwrap_or_else(|error| Err(error.to_string()))
    }

    /// Ends it, unless the place was given to it already. Whether it serves is told, once that is certain.
    pub async fn end(self) -> bool {
        // If nobody hears that, it serves, or has ended by itself.
        let _ = self.give_up.send(());
        matches!(self.outcome.await, Ok(Ok(())))
    }
}

/// Hands everything over, and sees to it that the process serves or is gone. Until it is ready it can be given up.
async fn accompany(
    mut child: Child,
    line: UnixStream,
    estate: HandoverSet,
    limit: Duration,
    given_up: oneshot::Receiver<()>,
) -> Result<(), String> {
    let handed_over = tokio::select! {
        biased;
        // Nothing is lost yet, whatever it has said at the same time.
        _ = given_up => {
            bury(&mut child, 0).await;
            return Err(String::from("this process was told to stop"));
        }
        handed_over = tokio::time::timeout(limit, estate.hand_over(line)) => handed_over,
    };
    let heir = match handed_over {
        Ok(Ok(heir)) => heir,
        // It has closed the line, or ends: it may say how.
        Ok(Err(error)) => return Err(left(&mut child, "ready", &error).await),
        Err(_elapsed) => {
            bury(&mut child, 0).await;
            return Err(format!("the new process was not ready within {limit:?} (`timeouts.upgrade`)"));
        }
    };
    // From here on it may have accepted connections: nobody gives it up.
    match tokio::time::timeout(GRACE, heir.enter()).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(left(&mut child, "serving", &error).await),
        Err(_elapsed) => {
            bury(&mut child, 0).await;
            Err(format!("the new process was ready, and did not serve within {GRACE:?}"))
        }
    }
}

/// What became of a process that has left the line before it was so far.
async fn left(child: &mut Child, what: &str, error: &io::Error) -> String {
    match bury(child, LOOKS).await {
        Some(status) => format!("the new process ended before it was {what} ({status})"),
        None => format!("the new process does not say that it is {what} ({error})"),
    }
}

/// Waits for the end of a process, and brings it about where that takes too long. How it ended, if by itself.
async fn bury(child: &mut Child, looks: u32) -> Option<process::ExitStatus> {
    for _ in 0..looks {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        tokio::time::sleep(LOOK).await;
    }
    // One that has ended meanwhile can not be killed, and is waited for all the same.
    let _ = child.kill();
    let _ = child.wait();
    None
}
