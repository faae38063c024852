//! Arguments, command, exit code.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use transom::cli::{self, Exit};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A reverse-proxy gateway that holds every client to layered fixed-window limits, exactly.
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
    /// Serve (the default)
    Run(File),
    /// Say whether a configuration is good, or everything that is wrong with it
    Check(Check),
    /// Have the running gateway replaced by this version, without a gap
    Upgrade(cli::upgrade::Arguments),
    /// Say who is known by name, and on which plan
    Clients(cli::clients::Arguments),
}

#[derive(clap::Args)]
struct Check {
    #[command(flatten)]
    file: File,
    /// Reach out to the servers that counters are shared through, and say whether they are fit for it
    #[arg(long)]
    connect: bool,
    /// Take notes for errors: exit 2 if there is one
    #[arg(long)]
    strict: bool,
}

#[derive(clap::Args)]
struct File {
    /// The configuration
    #[arg(long, value_name = "FILE", default_value = "gateway.toml")]
    config: PathBuf,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let level = std::env::var("TRANSOM_LOG").unwrap_or_else(|_unset| "info".to_owned());
    let Ok(level) = level.parse::<LevelFilter>() else {
        let _ = writeln!(
            std::io::stderr(),
            "transom: TRANSOM_LOG is `{level}`\n  fix: write `error`, `warn`, `info`, `debug`, `trace` or `off`"
        );
        return ExitCode::from(2);
    };
    // An event loop never waits for whoever reads the messages: those that do not fit are lost.
    let (writer, _flushed_at_the_end) = tracing_appender::non_blocking(std::io::stderr());
    // What clients do wrong on HTTP/2 is counted; its library would warn of each, as often as they like.
    let targets = Targets::new().with_default(level).with_target("h2", level.min(LevelFilter::ERROR));
    tracing_subscriber::fmt().with_max_level(level).with_writer(writer).with_ansi(false).finish().with(targets).init();
    let exit = match arguments.command.unwrap_or(Command::Run(arguments.file)) {
        Command::Run(file) => cli::run::run(&file.config),
        Command::Check(check) => cli::check::check(&check.file.config, check.connect, check.strict),
        Command::Upgrade(arguments) => cli::upgrade::upgrade(&arguments),
        Command::Clients(arguments) => cli::clients::clients(&arguments),
    };
    match exit {
        Exit::Fine => ExitCode::SUCCESS,
        Exit::Failed => ExitCode::from(1),
        Exit::BadConfig => ExitCode::from(2),
    }
}
