//! `transom simulate`: plays access logs against a configuration, and prints what its limits would have done.

use std::fs;
use std::io::{self, IsTerminal as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use super::{Exit, add_copied_clients, read_config};
use crate::file_watch::FileWatch;
use transom_config::access::AccessSource;
use transom_simulate::log_files::LogFiles;
use transom_simulate::log_format::LogFormat;
use transom_simulate::replay::Replay;
use transom_simulate::report::Report;
use transom_simulate::report_html::HtmlReport;

const PROGRESS: &str = "{elapsed} {wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}";
const PROGRESS_WITHOUT_LENGTH: &str = "{elapsed} {spinner} {bytes} {binary_bytes_per_sec}";

/// Options of `transom simulate`.
#[derive(clap::Args)]
pub struct Options {
    /// Format of the logs: `auto`, by their first lines; `json`, `transom`, `caddy`, `cloudflare`, `traefik`, `envoy`,
    /// `ingress-nginx`, `apisix`, `haproxy`, `alb`, `elb`, `s3`, `cloudfront`, `iis`, `combined`, `common`, `nginx`,
    /// `apache`; `json:FIELD=KEY,…` to name the keys of JSON; or `nginx.conf:NAME`, a `log_format` of that file
    #[arg(long, value_name = "FORMAT", default_value = "auto")]
    format: String,
    /// Compare with other windows of a rule, or `RULE:PLAN=…` of a plan; can be repeated
    #[arg(long = "try", value_name = "RULE=WINDOW,WINDOW")]
    candidates: Vec<String>,
    /// Also write the report as one HTML page with charts
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    /// Access logs, also compressed with gzip, Zstandard, bzip2 or xz; `-` is standard input
    #[arg(required = true, value_name = "LOG")]
    logs: Vec<PathBuf>,
}

pub fn simulate(path: &Path, options: &Options) -> Exit {
    let mut config = match read_config(path, &mut FileWatch::default()) {
        Ok(config) => config,
        Err(invalid) => {
            print_err!("{}", invalid.to_string().trim_end());
            return Exit::BadConfig;
        }
    };
    add_copied_clients(&mut config);
    if config.access.as_ref().is_some_and(|access| access.source == AccessSource::Shared) {
        print_err!("transom: the deny entries of the store are not known: no request is denied by them");
    }
    let prepared = Replay::new(config, &options.candidates).and_then(|replay| {
        let format = LogFormat::parse(&options.format, replay.fields().clone());
        Ok((replay, format.map_err(|message| format!("`--format`: {message}"))?))
    });
    let (mut replay, format) = match prepared {
        Ok(prepared) => prepared,
        Err(message) => {
            print_err!("transom: {message}");
            return Exit::BadConfig;
        }
    };
    let progress = progress_bar();
    let played = LogFiles::open(&options.logs, format, progress.clone()).and_then(|mut files| {
        if progress.length().is_some() {
            progress.set_style(ProgressStyle::with_template(PROGRESS).unwrap_or(ProgressStyle::default_bar()));
        }
        files.for_each(|batch| replay.play(batch))?;
        Ok(files)
    });
    progress.finish_and_clear();
    let files = match played {
        Ok(files) => files,
        Err(failed) => {
            print_err!("transom: cannot read `{}`: {}", failed.file, failed.error);
            return Exit::Failed;
        }
    };
    replay.finish();
    let logs = options.logs.iter().map(|log| log.display().to_string()).collect();
    let report = Report::new(path.display().to_string(), logs, &files.counts, &replay);
    match options.json {
        true => print_out!("{:#}", report.to_json()),
        false => print_out!("{}", report.to_string().trim_end()),
    }
    if let Some(file) = &options.html
        && let Err(error) = fs::write(file, HtmlReport(&report).to_string())
    {
        print_err!("transom: cannot write `{}`: {error}", file.display());
        return Exit::Failed;
    }
    if report.lines.decided == 0 {
        print_err!("transom: no line of the logs was decided by a rule");
        return Exit::Failed;
    }
    Exit::Fine
}

/// Hidden unless standard error is a terminal.
fn progress_bar() -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(PROGRESS_WITHOUT_LENGTH).unwrap_or(ProgressStyle::default_spinner());
    let progress = ProgressBar::no_length().with_style(style);
    progress.enable_steady_tick(Duration::from_millis(200));
    progress
}
