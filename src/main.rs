//! Command line arguments, logging setup, exit codes.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory as _, Parser, Subcommand};
use clap_mangen::Man;
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use transom::cli::{self, Exit};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Lines that wait for standard error. The buffer takes 40 bytes for each, from the start.
const LOG_BUFFER_LINES: usize = 10_000;

/// A reverse-proxy gateway with exact, layered rate limits
#[derive(Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    file: File,
}

#[derive(Subcommand)]
enum Command {
    /// Serve (default command)
    Run(NamedFile),
    /// Check a configuration file and list all problems
    Check(Check),
    /// Explain what a request, given as to curl, would get, and why
    Explain(Explain),
    /// Tell by the exit code whether the running gateway is ready, for probes of containers
    Health(Health),
    /// Show which keys each rule refuses most often, live
    Top(Top),
    /// Play access logs against a configuration, and show whom its limits would have refused
    Simulate(Simulate),
    /// Translate the configuration of another product into a gateway.toml, and report what was not translated
    Import(cli::import::Options),
    /// Print the JSON schema of the configuration file, for editors
    Schema,
    /// Print the completions for a shell
    Completions { shell: clap_complete::Shell },
    /// Print the manual page
    Man,
    /// Replace the running gateway with this version, without a gap
    Upgrade(cli::upgrade::Arguments),
    /// Add, change, remove and list the clients of the clients file
    Clients(cli::clients::Arguments),
    /// Deny networks, clients and values, and list and remove such entries
    Deny(cli::deny::Arguments),
}

#[derive(clap::Args)]
struct Check {
    #[command(flatten)]
    file: NamedFile,
    #[command(flatten)]
    options: cli::check::Options,
}

#[derive(clap::Args)]
struct Explain {
    #[command(flatten)]
    file: File,
    #[command(flatten)]
    options: cli::explain::Options,
}

#[derive(clap::Args)]
struct Health {
    #[command(flatten)]
    file: NamedFile,
    #[command(flatten)]
    options: cli::health::Options,
}

#[derive(clap::Args)]
struct Top {
    #[command(flatten)]
    file: NamedFile,
    #[command(flatten)]
    options: cli::top::Options,
}

#[derive(clap::Args)]
struct Simulate {
    #[command(flatten)]
    file: File,
    #[command(flatten)]
    options: cli::simulate::Options,
}

#[derive(clap::Args)]
struct File {
    /// Configuration file
    #[arg(short, long, value_name = "FILE", default_value = cli::DEFAULT_FILE)]
    config: PathBuf,
}

/// A configuration file that may be named without an option.
#[derive(clap::Args)]
struct NamedFile {
    /// Configuration file [default: gateway.toml]
    #[arg(value_name = "FILE", conflicts_with = "config")]
    file: Option<PathBuf>,
    /// Configuration file, as an option
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl NamedFile {
    fn path(self) -> PathBuf {
        self.file.or(self.config).unwrap_or_else(|| PathBuf::from(cli::DEFAULT_FILE))
    }
}

/// Options and commands of other programs, and the command here.
const OTHER_COMMANDS: [(&[&str], &str); 5] = [
    (
        &[
            "-t",
            "-T",
            "--test",
            "--validate",
            "--check",
            "--mode",
            "test",
            "validate",
            "configtest",
            "config-test",
            "lint",
            "verify",
        ],
        "`transom check FILE` checks a configuration file",
    ),
    (&["serve", "start", "server", "-f", "--file"], "`transom run FILE` serves a configuration file"),
    (&["-s", "reload", "restart"], "the gateway reloads a changed file by itself, and at the signal SIGHUP"),
    (&["stop", "quit"], "the signal SIGTERM stops the gateway when its requests have ended"),
    (&["-v", "version"], "`transom --version` prints the version"),
];

/// Reads the command line. A mistake gets the command that is probably meant.
fn read_arguments() -> Arguments {
    Arguments::try_parse().unwrap_or_else(|mut error| {
        let written =
            [ContextKind::InvalidArg, ContextKind::InvalidSubcommand].into_iter().find_map(|kind| {
                match error.get(kind) {
                    Some(ContextValue::String(written)) => Some(written.clone()),
                    _ => None,
                }
            });
        let hint =
            written.and_then(|written| match OTHER_COMMANDS.iter().find(|(words, _)| words.contains(&&*written)) {
                Some((_, hint)) => Some((*hint).to_owned()),
                None if Path::new(&written).extension().is_some() && !written.starts_with('-') => Some(format!(
                    "`transom run {written}` serves this configuration file, `transom check {written}` checks it"
                )),
                None => None,
            });
        if let Some(hint) = hint {
            error.remove(ContextKind::SuggestedSubcommand);
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint.into()]));
        }
        error.exit()
    })
}

fn main() -> ExitCode {
    let arguments = read_arguments();
    let _flushed_at_the_end = match start_log() {
        Ok(writer) => writer,
        Err(message) => {
            let _ = writeln!(std::io::stderr(), "transom: {message}");
            return ExitCode::from(2);
        }
    };
    let run = NamedFile { file: Some(arguments.file.config), config: None };
    let exit = match arguments.command.unwrap_or(Command::Run(run)) {
        Command::Run(file) => cli::run::run(&file.path()),
        Command::Check(check) => cli::check::check(&check.file.path(), check.options),
        Command::Explain(explain) => cli::explain::explain(&explain.file.config, &explain.options),
        Command::Health(health) => cli::health::health(&health.file.path(), &health.options),
        Command::Top(top) => cli::top::top(&top.file.path(), &top.options),
        Command::Simulate(simulate) => cli::simulate::simulate(&simulate.file.config, &simulate.options),
        Command::Import(options) => cli::import::run(&options),
        Command::Schema => cli::print_schema(),
        Command::Completions { shell } => print_completions(shell),
        Command::Man => print_manual_page(),
        Command::Upgrade(arguments) => cli::upgrade::upgrade(&arguments),
        Command::Clients(arguments) => cli::clients::clients(&arguments),
        Command::Deny(arguments) => cli::deny::deny(&arguments),
    };
    match exit {
        Exit::Fine => ExitCode::SUCCESS,
        Exit::Failed => ExitCode::from(1),
        Exit::BadConfig => ExitCode::from(2),
    }
}

fn print_completions(shell: clap_complete::Shell) -> Exit {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "transom", &mut script);
    print(&script)
}

fn print_manual_page() -> Exit {
    let mut page = Vec::new();
    // Writing to a vector cannot fail.
    let _ = write_manual_page(&mut page);
    print(&page)
}

/// One page for all commands: a section for each, with the synopsis and the options below.
fn write_manual_page(page: &mut Vec<u8>) -> io::Result<()> {
    let mut command = Arguments::command().disable_help_subcommand(true);
    command.build();
    let top = Man::new(command.clone());
    top.render_title(page)?;
    top.render_name_section(page)?;
    top.render_synopsis_section(page)?;
    top.render_description_section(page)?;
    top.render_options_section(page)?;
    command.get_subcommands().try_for_each(|command| write_command_section(command, page))?;
    page.write_all(MANUAL_SECTIONS.as_bytes())
}

/// The sections after those of the commands, as `man-pages(7)` names them.
const MANUAL_SECTIONS: &str = r#".SH EXAMPLES
.TP
.B transom check \-\-strict gateway.toml
Check a configuration in a pipeline: errors and warnings fail.
.TP
.B transom explain \-H 'X\-API\-Key: KEY' http://127.0.0.1:8080/api/hello
Explain what a request would get, and why.
.TP
.B transom simulate \-\-try 'per\-client=60/minute' access.log
Play an access log against the configuration, and compare with another limit.
.TP
.B transom import nginx \-\-output gateway.toml /etc/nginx/nginx.conf
Translate the configuration of nginx, and report what differs.
.TP
.B transom top
Show which keys each rule refuses most often. The arrow keys scroll, and q ends.
.TP
.B kill \-HUP PID
Reload the configuration of a running gateway.
.SH FILES
.TP
.I gateway.toml
The configuration, in the working directory unless another file is named. Paths in it are relative to its folder.
.TP
.I /etc/transom/gateway.toml
The configuration of the packaged service and of the container image.
.SH SIGNALS
.TP
.B SIGTERM, SIGINT
Drain and end: /readyz turns 503, work in flight may finish within timeouts.drain. A second signal ends the process at once.
.TP
.B SIGHUP
Reopen the access log and reload the configuration.
.TP
.B SIGUSR2
Replace the process by the installed program, as transom upgrade does.
.SH ENVIRONMENT
.TP
.B TRANSOM_LOG
Level of messages: error, warn, info (default), debug or off. With debug, each request has a line. Without this variable, a level in
.B RUST_LOG
applies.
.TP
.B TRANSOM_LOG_FORMAT
text (default) or json.
.TP
.B NO_COLOR
Help and errors of usage have no colors.
.TP
.B LISTEN_FDS, LISTEN_PID, NOTIFY_SOCKET
Sockets that systemd passes, and its socket for notifications of readiness.
.SH EXIT STATUS
.TP
.B 0
Success; for transom run: the gateway was stopped, or replaced.
.TP
.B 1
It could not start, or failed.
.TP
.B 2
Wrong usage or configuration.
.SH SEE ALSO
The documentation, in the folder docs of the source, or /usr/share/doc/transom of the package.
"#;

fn write_command_section(command: &clap::Command, page: &mut Vec<u8>) -> io::Result<()> {
    let mut sections = Vec::new();
    let man = Man::new(command.clone());
    man.render_synopsis_section(&mut sections)?;
    man.render_description_section(&mut sections)?;
    if command.get_arguments().next().is_some() {
        man.render_options_section(&mut sections)?;
    }
    let sections = String::from_utf8_lossy(&sections).replace(".SH ", ".SS ");
    writeln!(page, ".SH \"{}\"\n{sections}", command.get_bin_name().unwrap_or_default().to_uppercase())?;
    command.get_subcommands().try_for_each(|command| write_command_section(command, page))
}

fn print(text: &[u8]) -> Exit {
    // A reader may close the pipe early.
    let _ = std::io::stdout().write_all(text);
    Exit::Fine
}

/// Sends messages to standard error, as `TRANSOM_LOG`, or `RUST_LOG`, and `TRANSOM_LOG_FORMAT` say. Messages are written until the
/// result is dropped.
fn start_log() -> Result<WorkerGuard, String> {
    let variable = |name: &str, default: &str| std::env::var(name).unwrap_or_else(|_unset| default.to_owned());
    // `RUST_LOG` is often set for other programs, also to more than a level.
    let rust_log = std::env::var("RUST_LOG").ok().filter(|level| level.parse::<LevelFilter>().is_ok());
    let level = variable("TRANSOM_LOG", rust_log.as_deref().unwrap_or("info"));
    let Ok(level) = level.parse::<LevelFilter>() else {
        return Err(format!(
            "TRANSOM_LOG is `{level}`\n  fix: write `error`, `warn`, `info`, `debug`, `trace` or `off`"
        ));
    };
    // Workers never wait for the log: lines that do not fit into the buffer are dropped.
    let buffer = NonBlockingBuilder::default().buffered_lines_limit(LOG_BUFFER_LINES);
    let (writer, guard) = buffer.finish(std::io::stderr());
    // Protocol errors of clients are counted. The h2 library would log a warning for each, which clients could flood.
    let targets = Targets::new().with_default(level).with_target("h2", level.min(LevelFilter::ERROR));
    let log = tracing_subscriber::fmt().with_max_level(level).with_writer(writer).with_ansi(false);
    match variable("TRANSOM_LOG_FORMAT", "text").as_str() {
        "text" => log.finish().with(targets).init(),
        "json" => log.json().flatten_event(true).finish().with(targets).init(),
        format => return Err(format!("TRANSOM_LOG_FORMAT is `{format}`\n  fix: write `text` or `json`")),
    }
    Ok(guard)
}
