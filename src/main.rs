//! Arguments, command, exit code.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;
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
    Check(File),
}

#[derive(clap::Args)]
struct File {
    /// The configuration
    #[arg(long, value_name = "FILE", default_value = "gateway.toml")]
    config: PathBuf,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let filter = EnvFilter::try_from_env("TRANSOM_LOG").unwrap_or_else(|_unset| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    let exit = match arguments.command.unwrap_or(Command::Run(arguments.file)) {
        Command::Run(file) => cli::run::run(&file.config),
        Command::Check(file) => cli::check::check(&file.config),
    };
    match exit {
        Exit::Fine => ExitCode::SUCCESS,
        Exit::Failed => ExitCode::from(1),
        Exit::BadConfig => ExitCode::from(2),
    }
}
