//! `transom run`: serves until it is told to stop, or another process serves in its place; reads the configuration
//! again when told to, or when a file of it changes.

use std::error::Error;
use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::MissedTickBehavior;

use super::pid_file::PidFile;
use super::{Exit, located, read, systemd};
use crate::cli::upgrade::child::Program;
use crate::cli::upgrade::protocol::{Handover, SuccessorChannel};
use crate::cli::upgrade::state;
use crate::cli::upgrade::state::Succession;
use crate::clock::Clock;
use crate::config::{Config, lint};
use crate::file_watch::Watch;
use crate::metrics::events::ReloadMetrics;
use crate::server::Gateway;

/// How often the files of the configuration are looked at.
const LOOK: Duration = Duration::from_secs(1);

pub fn run(path: &Path) -> Exit {
    match serve(path) {
        Ok(()) => Exit::Fine,
        Err(Failure::Config(problems)) => {
            tell!("{}", problems.trim_end());
            Exit::BadConfig
        }
        Err(Failure::Start(error)) => {
            say(error.as_ref());
            Exit::Failed
        }
    }
}

/// Why it does not serve, or not any more.
enum Failure {
    /// Text for the operator.
    Config(String),
    Start(Box<dyn Error>),
}

impl<E: Error + 'static> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Start(Box::new(error))
    }
}

fn serve(path: &Path) -> Result<(), Failure> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    // First of all: without somebody who listens they would end the process.
    let orders = runtime.block_on(async { Orders::new() })?;
    // Before anything can change that it depends on.
    let program = Program::of_this_process()?;
    let handover = Handover::receive().map_err(|error| told("can not take over from the process before", &error))?;
    let mut watch = Watch::default();
    let config = read(path, &mut watch).map_err(Failure::Config)?;
    let clock = Clock::system();
    warn_of_certificates(&config, &clock);
    if let Some(line) = lint::open_admin(&config) {
        tracing::warn!("{line}");
    }
    let (sockets, counters, place) = match handover {
        Some(Handover { from, sockets, counters, line }) => (sockets, counters, Some((from, line))),
        None => {
            let sockets = systemd::sockets();
            (sockets.map_err(|error| told("can not use the sockets that were handed over", &error))?, None, None)
        }
    };
    let pid_file = config.pid_file.as_ref().map(|file| located(path, file));
    let gateway = Gateway::start_with(config, clock.clone(), sockets, counters)?;
    let pid_file = PidFile::prepare(pid_file).map_err(|error| told("can not write `pid_file`", &error))?;
    let attendant = Attendant { succession: Succession::new(program, &gateway), gateway, clock, path, watch, pid_file };
    let ended = runtime.block_on(attendant.attend(place, orders));
    // A drain that was cut short is not waited for.
    runtime.shutdown_background();
    Ok(ended?)
}

fn told(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
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

/// Whoever looks after a running gateway.
struct Attendant<'a> {
    gateway: Gateway,
    clock: Clock,
    path: &'a Path,
    watch: Watch,
    pid_file: PidFile,
    succession: Succession,
}

/// The signals that a gateway changes by.
struct Orders {
    hangup: Signal,
    upgrade: Signal,
}

/// Those that it stops by.
struct Stop {
    terminate: Signal,
    interrupt: Signal,
}

impl Orders {
    fn new() -> io::Result<Orders> {
        Ok(Orders { hangup: signal(SignalKind::hangup())?, upgrade: signal(SignalKind::user_defined2())? })
    }
}

impl Stop {
    fn new() -> io::Result<Stop> {
        Ok(Stop { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn recv(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

impl Attendant<'_> {
    /// Lets connections in, waits for signals and for changes of the files, and drains. `place`: that of the process
    /// before, which is to be taken.
    async fn attend(mut self, place: Option<(u32, SuccessorChannel)>, mut orders: Orders) -> io::Result<()> {
        let mut stop = Stop::new()?;
        self.open(place, &mut stop).await?;
        let meter = ReloadMetrics::new(&self.gateway.registry);
        // However often signals come, it looks in between.
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first look would be at once, and the files were just read.
        look.reset();
        let successor = loop {
            tokio::select! {
                () = stop.recv() => break None,
                _ = orders.hangup.recv() => {
                    // What is read now need not be read again for having changed.
                    self.watch.changed();
                    self.gateway.reopen_access_log();
                    self.reload(&meter);
                }
                _ = orders.upgrade.recv() => self.succession.begin(&self.gateway),
                outcome = self.succession.outcome() => match outcome {
                    Some(pid) => break Some(pid),
                    None => self.pid_file.renew(),
                },
                _ = look.tick() => {
                    if self.watch.changed() {
                        self.reload(&meter);
                    }
                    self.gateway.catch_up();
                }
            }
        };
        match successor {
            Some(pid) => self.make_way(pid, stop, orders).await,
            None => self.stop(stop, orders).await,
        }
    }

    /// From here on it serves. It can be told to stop while it waits for its place.
    async fn open(&mut self, place: Option<(u32, SuccessorChannel)>, stop: &mut Stop) -> io::Result<()> {
        let Some((from, line)) = place else {
            self.gateway.open();
            self.pid_file.publish().map_err(|error| told("can not write `pid_file`", &error))?;
            self.greet();
            return Ok(());
        };
        let place = tokio::select! {
            place = line.ready() => place.map_err(|error| told("the process before has not given up its place", &error))?,
            () = stop.recv() => return Err(io::Error::other("told to stop before the place was given to it")),
        };
        self.gateway.open();
        if let Err(error) = self.pid_file.publish() {
            tracing::error!(%error, "`pid_file` can not be written");
        }
        self.succession.begun_with();
        place.serving().await;
        tracing::info!("took over from process {from}");
        self.greet();
        Ok(())
    }

    /// Says what it listens on: only once whoever reads it may send a signal at once.
    fn greet(&self) {
        for address in self.gateway.http() {
            show!("listening on http://{address}");
        }
        for address in self.gateway.https() {
            show!("listening on https://{address}");
        }
        if let Some(address) = self.gateway.admin() {
            show!("admin on http://{address}");
        }
        if let Some(shared) = &self.gateway.config().counters.shared {
            tracing::info!("counters are shared through {}, under `{}:`", shared.nodes, shared.prefix);
        }
        systemd::notify(systemd::READY);
    }

    /// Takes over the files as they are now; a bad one leaves everything as it was.
    fn reload(&mut self, meter: &ReloadMetrics) {
        systemd::notify(systemd::RELOADING);
        // Logged before it is counted: the message is there when the metric changes.
        match read(self.path, &mut self.watch) {
            Ok(config) => match self.gateway.reload(config) {
                Ok(()) => {
                    let config = self.gateway.config();
                    warn_of_certificates(config, &self.clock);
                    self.pid_file.adopt(config.pid_file.as_ref().map(|file| located(self.path, file)));
                    tracing::info!("the configuration was taken over");
                    meter.applied();
                }
                Err(error) => {
                    tracing::error!("the running configuration goes on: {error}");
                    meter.refused();
                }
            },
            Err(problems) => {
                tracing::error!("the running configuration goes on, because the new one is bad:\n{problems}");
                meter.refused();
            }
        }
        systemd::notify(systemd::READY);
    }

    async fn stop(mut self, mut stop: Stop, mut orders: Orders) -> io::Result<()> {
        let breaks_off = self.succession.is_under_way();
        let successor = tokio::select! {
            successor = self.succession.end() => successor,
            () = stop.recv() => return Err(stopped_twice()),
        };
        if let Some(pid) = successor {
            return self.make_way(pid, stop, orders).await;
        }
        if breaks_off {
            self.pid_file.renew();
        }
        tracing::info!("draining");
        systemd::notify(systemd::STOPPING);
        let gateway = self.gateway;
        let mut draining = tokio::task::spawn_blocking(move || gateway.drain());
        loop {
            tokio::select! {
                drained = &mut draining => return drained.map_err(io::Error::other),
                () = stop.recv() => return Err(stopped_twice()),
                _ = orders.upgrade.recv() => state::decline("it is stopping"),
            }
        }
    }

    /// Drains while another process serves. To be told to stop concerns that one as well, so it only means that this
    /// one should be quick about it.
    async fn make_way(self, pid: u32, mut stop: Stop, mut orders: Orders) -> io::Result<()> {
        tracing::info!("process {pid} took over, draining");
        systemd::notify(&systemd::main_pid(pid));
        state::report(pid);
        let gateway = self.gateway;
        let release = gateway.release();
        let mut draining = tokio::task::spawn_blocking(move || gateway.drain_for_successor());
        let mut told = false;
        loop {
            tokio::select! {
                drained = &mut draining => return drained.map_err(io::Error::other),
                () = stop.recv() => {
                    if std::mem::replace(&mut told, true) {
                        return Err(stopped_twice());
                    }
                    release();
                }
                _ = orders.upgrade.recv() => state::decline("another process has taken its place"),
            }
        }
    }
}

fn stopped_twice() -> io::Error {
    io::Error::other("told a second time to stop, and did")
}

/// Certificates that clients refuse, or soon will, are served all the same: it may be the clock that is wrong.
fn warn_of_certificates(config: &Config, clock: &Clock) {
    for line in lint::certificates(config, clock.wall_ms()) {
        tracing::warn!("{line}");
    }
}
