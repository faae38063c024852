//! `transom check`: says whether a configuration is good and what its rules amount to, or everything
//! that is wrong with it. With `--connect`, the servers that counters are shared through are asked as well; with `--strict`,
//! remarks are errors.

use std::fs;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use super::check_redis::connect;
use super::{Exit, located, read};
use crate::clock::Clock;
use crate::config::lint::{self, LintMessage};
use crate::config::{AccessLog, Config};
use crate::downstream::tls;
use crate::file_watch::Watch;

pub fn check(path: &Path, reach_out: bool, is_strict: bool) -> Exit {
    let config = match read(path, &mut Watch::default()) {
        Ok(config) => config,
        Err(problems) => {
            tell!("{}", problems.trim_end());
            return Exit::BadConfig;
        }
    };
    let certificates = lint::certificates(&config, Clock::system().wall_ms());
    let remarks = certificates.into_iter().chain(start_failures(path, &config)).map(LintMessage::remark);
    let lines: Vec<LintMessage> = lint::lines(&config).into_iter().chain(remarks).collect();
    let refused = lines.iter().filter(|line| is_strict && line.is_remark).count();
    let (routes, rules, upstreams) = (config.routes.len(), config.rules.len(), config.upstreams.len());
    let fine = if refused == 0 { "fine: " } else { "" };
    show!("{}: {fine}{routes} routes, {rules} rules, {upstreams} upstreams", path.display());
    for line in lines {
        show!("  {line}");
    }
    let connected = if reach_out { connect(config.counters.shared.as_ref()) } else { Exit::Fine };
    if refused > 0 {
        let notes = if refused == 1 { "note" } else { "notes" };
        tell!("{}: {refused} {notes}, and `--strict` is given", path.display());
        return Exit::BadConfig;
    }
    connected
}

/// Why a start on this machine would fail. A folder may be made, and an address given, by whatever starts the gateway, so
/// these are no errors of the configuration.
fn start_failures(path: &Path, config: &Config) -> Vec<String> {
    let log = match &config.access_log {
        Some(AccessLog::File(log)) => Some(log.clone()),
        Some(AccessLog::Stdout) | None => None,
    };
    let counters = &config.counters;
    let files: [(&str, Option<PathBuf>); 4] = [
        ("`access_log.file`", log),
        ("`pid_file`", config.pid_file.as_ref().map(|file| located(path, file))),
        ("`counters.file`", counters.file.clone()),
        ("`counters.snapshot`", counters.snapshot.clone()),
    ];
    let files = files.iter().filter_map(|(name, file)| Some(format!("{name} {}", unwritable(file.as_deref()?)?)));
    let listen = &config.listen;
    let https = listen.https.iter().flat_map(|https| &https.addresses);
    let addresses = listen.http.iter().chain(https).chain(&listen.admin).filter_map(|address| unbound(*address));
    let tls = listen.https.iter().filter_map(|https| tls::server_config(&https.tls).err());
    let tls = tls.map(|error| format!("TLS can not be set up: {error}"));
    files.chain(addresses).chain(tls).map(|text| format!("a start fails here: {text}")).collect()
}

/// Why a file can not be written where it should be, as far as that can be told without writing to it.
fn unwritable(file: &Path) -> Option<String> {
    let shown = file.display();
    if file.is_dir() {
        return Some(format!("is `{shown}`, which is a folder: name a file"));
    }
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let is_folder = match fs::metadata(folder) {
        Ok(found) => found.is_dir(),
        // What can not be looked at may be there for the user that the gateway runs as.
        Err(error) => !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory),
    };
    (!is_folder).then(|| format!("is `{shown}`, and there is no folder `{}`: make it", folder.display()))
}

/// Why nothing can listen on an address, whatever the port.
fn unbound(address: SocketAddr) -> Option<String> {
    let mut probe = address;
    // The port may be taken, by the gateway that is checked for.
    probe.set_port(0);
    let error = TcpListener::bind(probe).err()?;
    Some(format!("nothing can listen on `{address}`, an address that this machine may not have: {error}"))
}
