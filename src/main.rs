//! Command line arguments, logging setup, exit codes.

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
    Run(File),
    /// Check a configuration file and list all problems
    Check(Check),
    /// Print the JSON schema of the configuration file, for editors
    Schema,
    /// Replace the running gateway with this version, without a gap
    Upgrade(cli::upgrade::Arguments),
    /// Add, change, remove and list the clients of the clients file
    Clients(cli::clients::Arguments),
}

#[derive(clap::Args)]
struct Check {
    #[command(flatten)]
    file: File,
    #[command(flatten)]
    options: cli::check::Options,
}

#[derive(clap::Args)]
struct File {
    /// Configuration file
    #[arg(short, long, value_name = "FILE", default_value = "gateway.toml")]
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
    // Workers never wait for the log: lines that do not fit into the buffer are dropped.
    let (writer, _flushed_at_the_end) = tracing_appender::non_blocking(std::io::stderr());
    // Protocol errors of clients are counted. The h2 library would log a warning for each, which clients could flood.
    let targets = Targets::new().with_default(level).with_target("h2", level.min(LevelFilter::ERROR));
    tracing_subscriber::fmt().with_max_level(level).with_writer(writer).with_ansi(false).finish().with(targets).init();
    let exit = match arguments.command.unwrap_or(Command::Run(arguments.file)) {
        Command::Run(file) => cli::run::run(&file.config),
        Command::Check(check) => cli::check::check(&check.file.config, check.options),
        Command::Schema => cli::print_schema(),
        Command::Upgrade(arguments) => cli::upgrade::upgrade(&arguments),
        Command::Clients(arguments) => cli::clients::clients(&arguments),
    };
    match exit {
        Exit::Fine => ExitCode::SUCCESS,
        Exit::Failed => ExitCode::from(1),
        Exit::BadConfig => ExitCode::from(2),
    }
}
