//! The commands `run`, `check`, `explain`, `health`, `top`, `simulate`, `import`, `schema`, `upgrade`, `clients` and `deny`, and
//! how they read configuration files.

/// Prints a line to standard output; write errors are ignored.
macro_rules! print_out {
    ($($text:tt)*) => {{
        let _ = std::io::Write::write_fmt(&mut std::io::stdout(), format_args!("{}\n", format_args!($($text)*)));
    }};
}

/// Prints a line to standard error; write errors are ignored.
macro_rules! print_err {
    ($($text:tt)*) => {{
        let _ = std::io::Write::write_fmt(&mut std::io::stderr(), format_args!("{}\n", format_args!($($text)*)));
    }};
}

mod admin_client;
pub mod check;
pub mod clients;
pub mod deny;
pub mod explain;
pub mod health;
pub mod import;
mod pid_file;
pub mod run;
pub mod simulate;
mod start_report;
pub mod systemd;
pub mod top;
pub mod upgrade;

use std::cell::RefCell;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, ErrorKind, IsTerminal, Read};
use std::os::unix::fs::OpenOptionsExt as _;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use serde_json::{Value, json};

use crate::file_watch::FileWatch;
use crate::shared_data;
use transom_config::clients::{Client, ClientsSource};
use transom_config::diagnostics::{self, Inputs, ListFolder, Problem, ReadFile};
use transom_config::{Config, schema};
use transom_store::map_follower::Entry;

/// The result of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    Fine,
    /// Could not start, or failed.
    Failed,
    /// Bad usage or a bad configuration.
    BadConfig,
}

/// The configuration that commands read if none is named.
pub const DEFAULT_FILE: &str = "gateway.toml";
/// How long the writer of a pipe may pause.
const PIPE_TIMEOUT_S: i64 = 10;
/// Largest file that a configuration may name.
const FILE_MAX_BYTES: u64 = 16 * 1024 * 1024;

/// Why a command failed: its exit code and message.
struct Failure(Exit, String);

impl Failure {
    fn usage(message: impl std::fmt::Display, fix: impl std::fmt::Display) -> Failure {
        Failure(Exit::BadConfig, format!("transom: {message}\n  fix: {fix}\n"))
    }

    fn io(path: &Path, error: &io::Error) -> Failure {
        Failure(Exit::Failed, format!("transom: cannot write {}: {error}\n", path.display()))
    }
}

/// The exit code of a command, whose failure is printed.
fn exit_of(done: Result<(), Failure>) -> Exit {
    match done {
        Ok(()) => Exit::Fine,
        Err(Failure(exit, text)) => {
            print_err!("{}", text.trim_end());
            exit
        }
    }
}

/// Prints rows in columns, the first of which is a heading.
fn print_table<const N: usize>(rows: &[[String; N]]) {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    for row in rows {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        print_out!("{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
}

/// A configuration that cannot be used.
#[derive(Debug)]
pub struct InvalidConfig {
    name: String,
    problems: Vec<Problem>,
    /// Whether the file was read, so that problems have a position.
    is_read: bool,
}

impl InvalidConfig {
    /// A file that cannot be read.
    fn unreadable(path: &Path, error: &io::Error) -> InvalidConfig {
        let full = std::path::absolute(path);
        let full = full.as_deref().unwrap_or(path).display();
        let message = match error.kind() {
            ErrorKind::NotFound => format!("there is no file `{full}`"),
            ErrorKind::IsADirectory => format!("`{full}` is a directory, not a file"),
            _ => format!("cannot read `{full}`: {error}"),
        };
        let is_default = path == Path::new(DEFAULT_FILE) && error.kind() == ErrorKind::NotFound;
        let fix = if is_default { "name the configuration, such as `--config FILE`" } else { "" };
        InvalidConfig { is_read: false, ..InvalidConfig::at(path.display().to_string(), 1, 1, message, fix) }
    }

    /// A file that is not text.
    fn at(name: String, line: usize, column: usize, message: String, fix: &str) -> InvalidConfig {
        let (fix, line_text) = (fix.to_owned(), String::new());
        let problem = Problem { file: None, span: 0..0, line, column, message, fix, line_text };
        InvalidConfig { name, problems: vec![problem], is_read: true }
    }

    /// The problems, as `transom check --json` prints them.
    fn to_json(&self) -> Value {
        let problem = |problem: &Problem| {
            let file =
                problem.file.as_ref().map(|file| resolve_path(Path::new(&self.name), file).display().to_string());
            let position = |number: usize| self.is_read.then_some(number);
            json!({
                "file": file.as_ref().unwrap_or(&self.name),
                "line": position(problem.line), "column": position(problem.column),
                "message": problem.message, "fix": problem.fix,
            })
        };
        json!({ "file": self.name, "valid": false, "problems": self.problems.iter().map(problem).collect::<Vec<_>>() })
    }
}

impl fmt::Display for InvalidConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_read {
            return f.write_str(&diagnostics::render(&self.problems, &self.name));
        }
        for Problem { message, fix, .. } in &self.problems {
            writeln!(f, "transom: {message}")?;
            if !fix.is_empty() {
                writeln!(f, "  fix: {fix}")?;
            }
        }
        Ok(())
    }
}

/// Reads a configuration and the files it names, and watches them and the folders of included files. If it is valid, no other files
/// are watched any more.
pub fn read_config(path: &Path, watch: &mut FileWatch) -> Result<Config, InvalidConfig> {
    // In a thread of its own: the allocator gives the memory back that large files took while they were read.
    thread::scope(|scope| {
        scope.spawn(|| read_watched_config(path, watch)).join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

fn read_watched_config(path: &Path, watch: &mut FileWatch) -> Result<Config, InvalidConfig> {
    let read = RefCell::new(FileWatch::default());
    let files = |path: &Path| {
        read.borrow_mut().watch(path);
        read_file(path)
    };
    let folders = |path: &Path| {
        read.borrow_mut().watch(path);
        list_folder(path)
    };
    let config = read_config_with(path, &files, &folders, None);
    match config {
        Ok(_) => *watch = read.into_inner(),
        // The files that were not read may be the ones to correct.
        Err(_) => watch.extend(read.into_inner()),
    }
    config
}

/// Reads a configuration through `files` and `folders`. `new_client` may be named before it exists.
fn read_config_with(
    path: &Path,
    files: ReadFile,
    folders: ListFolder,
    new_client: Option<&str>,
) -> Result<Config, InvalidConfig> {
    let name = path.display().to_string();
    let bytes = match files(path) {
        Ok(bytes) => bytes,
        Err(error) => return Err(InvalidConfig::unreadable(path, &error)),
    };
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
            let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
            let start = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
            let column = String::from_utf8_lossy(&before[start..]).chars().count() + 1;
            let message = "the file is not UTF-8 text".to_owned();
            return Err(InvalidConfig::at(name, line, column, message, "save it as UTF-8"));
        }
    };
    let variables = |name: &str| std::env::var_os(name).map(|value| value.into_encoded_bytes());
    let files = |file: &Path| files(&resolve_path(path, file));
    let folders = |folder: &Path| folders(&resolve_path(path, folder));
    let inputs = Inputs { files: &files, folders: &folders, variables: &variables, new_client };
    let mut config = transom_config::read_with_inputs(&text, inputs).map_err(|problems| InvalidConfig {
        name,
        problems,
        is_read: true,
    })?;
    // The gateway writes these files, and does not know the folder of the configuration.
    config.access.iter_mut().for_each(|access| access.file = resolve_path(path, &access.file));
    config.clients.iter_mut().filter(|clients| clients.source == ClientsSource::Shared).for_each(|clients| {
        clients.file = resolve_path(path, &clients.file);
    });
    Ok(config)
}

/// Reads the configuration; a missing file that it names counts as empty, and a client to be added may be named already.
fn read_current_config(path: &Path, new_client: Option<&str>) -> Result<Config, Failure> {
    let files = |file: &Path| match read_file(file) {
        Err(error) if error.kind() == ErrorKind::NotFound && file != path => Ok(Vec::new()),
        read => read,
    };
    read_config_with(path, &files, &list_folder, new_client)
        .map_err(|invalid| Failure(Exit::BadConfig, invalid.to_string()))
}

/// The first line of standard input, which is `what`.
fn first_line(what: &str, max_bytes: u64) -> Result<String, Failure> {
    let stdin = io::stdin().lock();
    if stdin.is_terminal() {
        eprint!("{what}: ");
    }
    let mut line = String::new();
    let read = io::Read::take(stdin, max_bytes + 2).read_line(&mut line);
    read.map_err(|error| Failure::usage(format!("cannot read the {what}: {error}"), "write it as a line of text"))?;
    Ok(line.trim_end_matches(['\r', '\n']).to_owned())
}

/// Adds the clients in the store, as the copy on disk has them, for commands that do without the store.
fn add_copied_clients(config: &mut Config) {
    let Some(clients) = config.clients.as_mut().filter(|clients| clients.source == ClientsSource::Shared) else {
        return;
    };
    let entries = match shared_data::load(&clients.file, "clients") {
        Ok(Some((copy, _))) => copy.entries,
        Ok(None) => return print_err!("transom: there is no copy of the shared clients: no client is known"),
        Err(error) => return print_err!("transom: no client is known: `{}`: {error}", clients.file.display()),
    };
    let of_defined_plan = |client: &Client| clients.defined_plans.contains(&client.plan);
    let client = |(name, entry): (&Arc<str>, &Entry)| Client::from_json(name, &entry.text).ok();
    clients.list = entries.iter().filter_map(client).filter(of_defined_plan).collect();
    config.set_limits_of_listed_clients();
}

/// Resolves a path in a configuration relative to the configuration file.
fn resolve_path(config: &Path, file: &Path) -> PathBuf {
    config.parent().unwrap_or(Path::new("")).join(file)
}

/// The names of the files in a folder. Names that are not UTF-8 are left out.
fn list_folder(path: &Path) -> io::Result<Vec<String>> {
    // The folder of a file without a folder is the working directory.
    let folder = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let names = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().into_string().ok()));
    Ok(names.collect::<io::Result<Vec<Option<String>>>>()?.into_iter().flatten().collect())
}

fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if std::fs::metadata(path)?.is_file() {
        File::open(path)?.take(FILE_MAX_BYTES + 1).read_to_end(&mut bytes)?;
    } else {
        read_pipe(path, &mut bytes)?;
    }
    if bytes.len() as u64 > FILE_MAX_BYTES {
        return Err(io::Error::new(ErrorKind::FileTooLarge, "it has more than 16 MiB"));
    }
    Ok(bytes)
}

/// Reads a pipe, such as `<(…)` of a shell. Does not wait forever for a program that never writes.
fn read_pipe(path: &Path, bytes: &mut Vec<u8>) -> io::Result<()> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let mut file = File::options().read(true).custom_flags(flags).open(path)?;
    let timeout = Timespec { tv_sec: PIPE_TIMEOUT_S, tv_nsec: 0 };
    let mut chunk = [0; 8192];
    while bytes.len() as u64 <= FILE_MAX_BYTES {
        if poll(&mut [PollFd::new(&file, PollFlags::IN)], Some(&timeout))? == 0 {
            let message = format!("nothing was written to the pipe for {PIPE_TIMEOUT_S} s");
            return Err(io::Error::new(ErrorKind::TimedOut, message));
        }
        match file.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) => bytes.extend_from_slice(&chunk[..read]),
            Err(error) if [ErrorKind::WouldBlock, ErrorKind::Interrupted].contains(&error.kind()) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// `transom schema`: prints the JSON schema of the configuration file.
pub fn print_schema() -> Exit {
    print_out!("{:#}", schema::schema());
    Exit::Fine
}
