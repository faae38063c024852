//! `transom run`: serves until it is told to stop; reads the configuration again when told to, or
//! when a file of it changes.

use std::error::Error;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

use super::{Exit, read, systemd};
use crate::clock::Clock;
use crate::config::{Config, outlook};
use crate::metrics::meter::ReloadMeter;
use crate::reload::Watch;
use crate::run::Gateway;

/// How often the files of the configuration are looked at.
const LOOK: Duration = Duration::from_secs(1);

pub fn run(path: &Path) -> Exit {
    let mut watch = Watch::default();
    let config = match read(path, &mut watch) {
        Ok(config) => config,
        Err(problems) => {
            tell!("{}", problems.trim_end());
            return Exit::BadConfig;
        }
    };
    let clock = Clock::system();
    warn_of_certificates(&config, &clock);
    let sockets = match systemd::sockets() {
        Ok(sockets) => sockets,
        Err(error) => {
            tell!("transom: can not use the sockets that were handed over: {error}");
            return Exit::Failed;
        }
    };
    let gateway = match Gateway::start_with(config, clock.clone(), sockets) {
        Ok(gateway) => gateway,
        Err(error) => {
            say(&error);
            return Exit::Failed;
        }
    };
    let runtime = match Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            say(&error);
            return Exit::Failed;
        }
    };
    let ended = runtime.block_on(attend(gateway, &clock, path, &mut watch));
    // A drain that was cut short is not waited for.
    runtime.shutdown_background();
    match ended {
        Ok(()) => Exit::Fine,
        Err(error) => {
            say(&error);
            Exit::Failed
        }
    }
}

/// An error and what it came from, in one line.
fn say(error: &dyn Error) {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    tell!("transom: {text}");
}

/// Waits for signals and for changes of the files.
async fn attend(mut gateway: Gateway, clock: &Clock, path: &Path, watch: &mut Watch) -> io::Result<()> {
    let meter = ReloadMeter::new(&gateway.registry);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    // Said only now: whoever reads it may send a signal at once.
    for address in gateway.http() {
        tell(&format!("listening on http://{address}"));
    }
    for address in gateway.https() {
        tell(&format!("listening on https://{address}"));
    }
    if let Some(address) = gateway.admin() {
        tell(&format!("admin on http://{address}"));
    }
    systemd::notify(systemd::READY);
    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            _ = hangup.recv() => {
                // What is read now need not be read again for having changed.
                watch.changed();
                gateway.reopen_access_log();
                reload(&mut gateway, clock, path, watch, &meter);
            }
            () = tokio::time::sleep(LOOK) => {
                if watch.changed() {
                    reload(&mut gateway, clock, path, watch, &meter);
                }
                gateway.heed_others();
            }
        }
    }
    tracing::info!("draining");
    systemd::notify(systemd::STOPPING);
    let draining = tokio::task::spawn_blocking(move || gateway.drain());
    tokio::select! {
        drained = draining => drained.map_err(io::Error::other),
        _ = terminate.recv() => Err(io::Error::other("told a second time to stop, and did")),
        _ = interrupt.recv() => Err(io::Error::other("told a second time to stop, and did")),
    }
}

/// One line for whoever started the gateway; nobody may be listening.
fn tell(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// Takes over the files as they are now; a bad one leaves everything as it was.
fn reload(gateway: &mut Gateway, clock: &Clock, path: &Path, watch: &mut Watch, meter: &ReloadMeter) {
    systemd::notify(systemd::RELOADING);
    match read(path, watch) {
        Ok(config) => match gateway.reload(config) {
            Ok(()) => {
                warn_of_certificates(gateway.config(), clock);
                meter.applied();
                tracing::info!("the configuration was taken over");
            }
            Err(error) => {
                meter.refused();
                tracing::error!("the running configuration goes on: {error}");
            }
        },
        Err(problems) => {
            meter.refused();
            tracing::error!("the running configuration goes on, because the new one is bad:\n{problems}");
        }
    }
    systemd::notify(systemd::READY);
}

/// Certificates that clients refuse, or soon will, are served all the same: it may be the clock that is wrong.
fn warn_of_certificates(config: &Config, clock: &Clock) {
    for line in outlook::certificates(config, clock.now().unix_ms) {
        tracing::warn!("{line}");
    }
}
