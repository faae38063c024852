//! `transom check`: prints what a configuration amounts to, or all its problems. `--connect` also checks the Redis
//! servers; `--strict` treats notes as errors.

use std::fs;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use super::check_redis::check_redis;
use super::{Exit, read_config, resolve_path};
use crate::clock::Clock;
use crate::config::lint::{self, LintMessage};
use crate::config::{AccessLog, Config};
use crate::downstream::tls;
use crate::file_watch::FileWatch;

pub fn check(path: &Path, reach_out: bool, is_strict: bool) -> Exit {
    let config = match read_config(path, &mut FileWatch::default()) {
        Ok(config) => config,
        Err(problems) => {
            print_err!("{}", problems.trim_end());
            return Exit::BadConfig;
        }
    };
    let certificates = lint::certificate_dates(&config, Clock::system().wall_ms());
    let start_notes = certificates.into_iter().chain(start_failures(path, &config)).map(LintMessage::note);
    let lines: Vec<LintMessage> = lint::messages(&config).into_iter().chain(start_notes).collect();
    let refused = lines.iter().filter(|line| is_strict && line.is_note).count();
    let fine = if refused == 0 { "fine: " } else { "" };
    let (routes, rules) = (counted(config.routes.len(), "route"), counted(config.rules.len(), "rule"));
    print_out!("{}: {fine}{routes}, {rules}, {}", path.display(), counted(config.upstreams.len(), "upstream"));
    for line in lines {
        print_out!("  {line}");
    }
    let connected = if reach_out { check_redis(config.counters.shared.as_ref()) } else { Exit::Fine };
    if refused > 0 {
        print_err!("{}: {} with `--strict`", path.display(), counted(refused, "note"));
        return Exit::BadConfig;
    }
    connected
}

/// Problems that a start on this machine would have. They are notes: folders and addresses may be created by what
/// starts the gateway.
fn start_failures(path: &Path, config: &Config) -> Vec<String> {
    let log = match &config.access_log {
        Some(AccessLog::File(log)) => Some(log.clone()),
        Some(AccessLog::Stdout) | None => None,
    };
    let counters = &config.counters;
    let files: [(&str, Option<PathBuf>); 4] = [
        ("`access_log.file`", log),
        ("`pid_file`", config.general.pid_file.as_ref().map(|file| resolve_path(path, file))),
        ("`counters.file`", counters.file.clone()),
        ("`counters.snapshot`", counters.snapshot.clone()),
    ];
    let files = files.iter().filter_map(|(name, file)| Some(format!("{name} {}", unwritable_file(file.as_deref()?)?)));
    let listen = &config.listen;
    let https = listen.https.iter().flat_map(|https| &https.address);
    let addresses =
        listen.http.iter().chain(https).chain(&listen.admin).filter_map(|address| unusable_address(*address));
    let tls = listen.https.iter().filter_map(|https| tls::server_config(https).err());
    let tls = tls.map(|error| format!("TLS cannot be set up: {error}"));
    files.chain(addresses).chain(tls).map(|text| format!("the gateway would not start here: {text}")).collect()
}

/// Why a file cannot be written, as far as can be found out without writing.
fn unwritable_file(file: &Path) -> Option<String> {
    let shown = file.display();
    if file.is_dir() {
        return Some(format!("is `{shown}`, which is a folder: name a file"));
    }
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let is_folder = match fs::metadata(folder) {
        Ok(found) => found.is_dir(),
        // The gateway's user may have access to a folder that this user cannot examine.
        Err(error) => !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory),
    };
    (!is_folder).then(|| format!("is `{shown}`, and there is no folder `{}`: make it", folder.display()))
}

/// Why an address cannot be bound, whatever the port.
fn unusable_address(address: SocketAddr) -> Option<String> {
    let mut probe = address;
    // The port may be in use by the running gateway.
    probe.set_port(0);
    let error = TcpListener::bind(probe).err()?;
    Some(format!("nothing can listen on `{address}`, an address that this machine may not have: {error}"))
}

/// A number with its noun.
fn counted(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}
