//! `transom check`: prints what a configuration amounts to, or all its problems. `--connect` also checks the Redis
//! servers and fetches the key set; `--strict` treats warnings as errors; `--json` prints JSON.

use std::fs;
use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tokio::runtime::{Builder, LocalOptions};

use super::{Exit, read_config, resolve_path};
use crate::downstream::{socket_file, tls};
use crate::file_watch::FileWatch;
use crate::key_set_fetcher;
use crate::server::error::StartError;
use transom_config::lint::{self, Kind, LintMessage};
use transom_config::listen_address::ListenAddress;
use transom_config::redis::StoreConfig;
use transom_config::{Config, LogTarget};
use transom_limiter::rule::Rule;
use transom_runtime::clock::Clock;
use transom_store::diagnose::{Finding, ServerReport, Severity, diagnose};

/// Options of `transom check`.
#[derive(Clone, Copy, clap::Args)]
pub struct Options {
    /// Also check the Redis servers that hold shared counters, and fetch the key set of `[jwt]`
    #[arg(long)]
    connect: bool,
    /// Treat warnings as errors, also those of `--connect`: exit 2 if there are any
    #[arg(long)]
    strict: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub fn check(path: &Path, options: Options) -> Exit {
    let config = match read_config(path, &mut FileWatch::default()) {
        Ok(config) => config,
        Err(invalid) => {
            match options.json {
                true => print_out!("{:#}", invalid.to_json()),
                false => print_err!("{}", invalid.to_string().trim_end()),
            }
            return Exit::BadConfig;
        }
    };
    let now_ms = Clock::system().wall_ms();
    let certificates = lint::certificate_dates(&config, now_ms);
    let certificates = certificates.into_iter().map(LintMessage::warning);
    let start_notes = start_failures(path, &config).into_iter().chain(lint::ended_denials(&config, now_ms));
    let start_notes = start_notes.map(LintMessage::note);
    let messages: Vec<LintMessage> =
        lint::messages(&config).into_iter().chain(certificates).chain(start_notes).collect();
    let warnings = messages.iter().filter(|message| message.kind == Kind::Warning).count();
    // Printed before the servers are asked, because they may take seconds.
    if !options.json {
        let asks_servers = options.connect && (config.counters.shared.is_some() || config.key_set.is_some());
        let fine = if options.strict && (warnings > 0 || asks_servers) { "" } else { "fine: " };
        print_messages(path, &config, &messages, fine);
        if let Some(source) = config.key_set.as_ref().filter(|_| !options.connect) {
            let text = format!("  not checked: the key set at {}; `--connect` fetches it", source.shown());
            print_out!("{}", config.hidden.removed_from(text));
        }
    }
    let servers = match options.connect.then(|| check_servers(&config)).transpose() {
        Ok(servers) => servers,
        Err(error) => {
            print_err!("cannot check the servers: {error}");
            return Exit::Failed;
        }
    };
    match options.json {
        true => print_out!("{:#}", to_json(path, &config, &messages, servers.as_deref())),
        false => servers.iter().for_each(|servers| print_servers(&config, servers)),
    }
    let findings = || servers.iter().flatten().flat_map(|server| &server.findings);
    let warnings = warnings + findings().filter(|finding| finding.severity == Severity::Warning).count();
    if options.strict && warnings > 0 {
        if !options.json {
            print_err!("{}: {} with `--strict`", path.display(), counted(warnings, "warning"));
        }
        return Exit::BadConfig;
    }
    if findings().any(is_problem) { Exit::Failed } else { Exit::Fine }
}

fn print_messages(path: &Path, config: &Config, messages: &[LintMessage], fine: &str) {
    let (routes, rules) = (counted(config.configured_routes(), "route"), counted(config.rules.len(), "rule"));
    print_out!("{}: {fine}{routes}, {rules}, {}", path.display(), counted(config.upstreams.len(), "upstream"));
    for message in messages {
        print_out!("  {message}");
    }
}

/// `servers`: the result of `--connect`.
fn to_json(path: &Path, config: &Config, messages: &[LintMessage], servers: Option<&[ServerReport]>) -> Value {
    let message = |message: &LintMessage| {
        let kind = match message.kind {
            Kind::Bound => "bound",
            Kind::Note => "note",
            Kind::Warning => "warning",
        };
        json!({ "kind": kind, "text": message.text })
    };
    let finding = |Finding { severity, text, fix }: &Finding| json!({ "severity": severity_word(*severity), "text": text, "fix": fix });
    let server = |ServerReport { subject, findings }: &ServerReport| json!({ "server": subject, "findings": findings.iter().map(finding).collect::<Vec<_>>() });
    let mut result = json!({
        "file": path.display().to_string(), "valid": true,
        "routes": config.configured_routes(), "rules": config.rules.len(), "upstreams": config.upstreams.len(),
        "messages": messages.iter().map(message).collect::<Vec<_>>(),
    });
    if let Some(servers) = servers {
        result["servers"] = servers.iter().map(server).collect();
    }
    result
}

/// Checks all servers that the gateway would ask.
fn check_servers(config: &Config) -> io::Result<Vec<ServerReport>> {
    let shared = config.counters.shared.as_ref();
    let mut servers =
        shared.map(|shared| diagnose_servers(shared, config.limiter_rules())).transpose()?.unwrap_or_default();
    if let Some(source) = &config.key_set {
        let (severity, text, fix) = match key_set_fetcher::check(source)? {
            Ok(keys) => (Severity::Note, format!("the key set has {}", counted(keys, "key")), String::new()),
            Err(why) => (
                Severity::Problem,
                format!("the key set cannot be fetched: {why}"),
                String::from("correct `jwks_url`, or see why the server does not respond with a key set"),
            ),
        };
        servers.push(ServerReport {
            subject: format!("key set {}", source.shown()),
            findings: vec![Finding { severity, text, fix }],
        });
    }
    let shown = |text| config.hidden.removed_from(text);
    let finding = |Finding { severity, text, fix }| Finding { severity, text: shown(text), fix: shown(fix) };
    let server = |ServerReport { subject, findings }| ServerReport {
        subject: shown(subject),
        findings: findings.into_iter().map(finding).collect(),
    };
    Ok(servers.into_iter().map(server).collect())
}

fn diagnose_servers<'r>(shared: &StoreConfig, rules: impl Iterator<Item = &'r Rule>) -> io::Result<Vec<ServerReport>> {
    let shared_rules = rules.filter(|rule| rule.is_shared());
    let formats: Vec<_> =
        shared_rules.filter_map(|rule| Some((rule.name.as_str(), rule.key_format.as_ref()?))).collect();
    let clock = Clock::system();
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default())?;
    Ok(runtime.block_on(diagnose(shared, &formats, &|| clock.now().unix_ms)))
}

fn is_problem(finding: &Finding) -> bool {
    finding.severity == Severity::Problem
}

fn severity_word(severity: Severity) -> &'static str {
    match severity {
        Severity::Problem => "problem",
        Severity::Warning => "warning",
        Severity::Note => "note",
    }
}

fn print_servers(config: &Config, servers: &[ServerReport]) {
    if servers.is_empty() {
        print_out!("  nothing to connect to: there is neither `[counters.shared]` nor `jwks_url`");
    }
    for ServerReport { subject, findings } in servers {
        print_out!("{subject}{}", if findings.is_empty() { ": fine" } else { "" });
        for finding in findings {
            print_out!("  {}: {}", severity_word(finding.severity), finding.text);
            if !finding.fix.is_empty() {
                print_out!("    fix: {}", finding.fix);
            }
        }
    }
    if let (Some(shared), false) =
        (&config.counters.shared, servers.iter().flat_map(|server| &server.findings).any(is_problem))
    {
        let text = format!("counters can be shared there, under keys that begin with `{}:`", shared.prefix);
        print_out!("{}", config.hidden.removed_from(text));
    }
}

/// Problems that a start on this machine would have. They are notes: folders and addresses may be created by what
/// starts the gateway.
fn start_failures(path: &Path, config: &Config) -> Vec<String> {
    let log = match config.access_log.as_ref().map(|log| &log.target) {
        Some(LogTarget::File(log)) => Some(log.clone()),
        Some(LogTarget::Stdout) | None => None,
    };
    let counters = &config.counters;
    let files: [(&str, Option<PathBuf>); 4] = [
        ("`access_log.file`", log),
        ("`pid_file`", config.general.pid_file.as_ref().map(|file| resolve_path(path, file))),
        ("`counters.file`", counters.file.clone()),
        ("`counters.snapshot`", counters.snapshot.clone()),
    ];
    let files = files.iter().filter_map(|(name, file)| Some(format!("{name} {}", unwritable_file(file.as_deref()?)?)));
    let addresses = config.listen.sockets().filter_map(|socket| unusable_address(&socket.address));
    let tls = config.listen.tls_listeners().filter_map(|https| tls::server_config(https, None).err());
    let tls = tls.map(|error| format!("TLS cannot be set up: {error}"));
    let texts = files.chain(addresses).chain(tls);
    texts.map(|text| config.hidden.removed_from(format!("the gateway would not start here: {text}"))).collect()
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
fn unusable_address(address: &ListenAddress) -> Option<String> {
    let mut probe = match address {
        ListenAddress::Tcp(address) => *address,
        ListenAddress::Unix(path) => return unusable_socket(address, path),
    };
    // The port may be in use by the running gateway.
    probe.set_port(0);
    let error = TcpListener::bind(probe).err()?;
    Some(format!("nothing can listen on `{address}`, an address that this machine may not have: {error}"))
}

/// Why a socket cannot be at a path, as a start says it. The gateway's user may have access to a folder that this user cannot
/// examine.
fn unusable_socket(address: &ListenAddress, path: &Path) -> Option<String> {
    let source = socket_file::is_socket(path).err().filter(|error| error.kind() != ErrorKind::PermissionDenied)?;
    let why = source.to_string();
    let error = StartError::Listen { address: address.clone(), source };
    let fix = error.fix().map_or_else(String::new, |fix| format!(": {fix}"));
    Some(format!("{error}: {why}{fix}"))
}

/// A number with its noun.
fn counted(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}
