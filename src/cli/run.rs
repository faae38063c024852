//! `transom run`: serves until stopped or replaced; reloads on SIGHUP and on changes of the configuration files,
//! upgrades on SIGUSR2.

use std::error::Error;
use std::io;
use std::path::Path;
use std::pin::pin;
use std::time::{Duration, Instant};

use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::{JoinError, JoinHandle, spawn_blocking};
use tokio::time::MissedTickBehavior;

use super::clients::file_edit::change_client;
use super::pid_file::PidFile;
use super::{Exit, InvalidConfig, read_config, resolve_path, start_report, systemd};
use crate::admin::AccessEdit;
use crate::admin::client_store::FileChange;
use crate::cli::upgrade::child::Program;
use crate::cli::upgrade::protocol::{Handover, SuccessorChannel};
use crate::cli::upgrade::state;
use crate::cli::upgrade::state::Upgrade;
use crate::file_watch::FileWatch;
use crate::server::client_limits::CompiledLimits;
use crate::server::error::{ReloadError, StartError};
use crate::server::{Applied, Former, Gateway};
use transom_config::{Config, lint};
use transom_http::error::ApiError;
use transom_runtime::clock::Clock;
use transom_runtime::metrics::events::ReloadMetrics;

/// How often the configuration files are checked for changes.
const WATCH_PERIOD: Duration = Duration::from_secs(1);
/// The least time between two compilations of limits that clients of the store have got.
const LIMITS_PERIOD: Duration = Duration::from_millis(250);
/// Most of the time goes into other things than compiling limits.
const LIMITS_PERIOD_FACTOR: u32 = 10;
const LIMITS_PAUSE_AFTER_FAILURE: Duration = Duration::from_secs(5);

pub fn run(path: &Path) -> Exit {
    match serve(path) {
        Ok(()) => {
            tracing::info!("stopped");
            Exit::Fine
        }
        Err(Failure::Config(invalid)) => {
            print_err!("{}", invalid.to_string().trim_end());
            Exit::BadConfig
        }
        Err(Failure::Start(error)) => {
            print_error(error.as_ref());
            Exit::Failed
        }
    }
}

/// Why the gateway cannot serve.
enum Failure {
    Config(InvalidConfig),
    Start(Box<dyn Error>),
}

impl<E: Error + 'static> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Start(Box::new(error))
    }
}

fn serve(path: &Path) -> Result<(), Failure> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    // First, because unhandled signals would end the process.
    let signals = runtime.block_on(async { Signals::new() })?;
    // Early, before the program file can be replaced.
    let program = Program::of_this_process()?;
    let handover =
        Handover::receive().map_err(|error| with_context("cannot take over from the former process", &error))?;
    let mut watch = FileWatch::default();
    let config = read_config(path, &mut watch).map_err(Failure::Config)?;
    let clock = Clock::system();
    warn_of_certificates(&config, &clock);
    if let Some(note) = lint::exposed_admin_address(&config) {
        tracing::warn!("{note}");
    }
    let (sockets, former, predecessor) = match handover {
        Some(Handover { from, sockets, former, channel }) => (sockets, former, Some((from, channel))),
        None => {
            let sockets = systemd::sockets();
            (
                sockets.map_err(|error| with_context("cannot use the inherited sockets", &error))?,
                Former::default(),
                None,
            )
        }
    };
    let pid_file = config.general.pid_file.as_ref().map(|file| resolve_path(path, file));
    let gateway = Gateway::start_with(config, clock.clone(), sockets, former)?;
    let pid_file = PidFile::prepare(pid_file).map_err(|error| with_context("cannot write `pid_file`", &error))?;
    let supervisor = Supervisor { upgrade: Upgrade::new(program, &gateway), gateway, clock, path, watch, pid_file };
    let ended = runtime.block_on(supervisor.supervise(predecessor, signals));
    // An interrupted drain is not waited for.
    runtime.shutdown_background();
    Ok(ended?)
}

fn with_context(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Prints an error and its sources in one line.
fn print_error(error: &(dyn Error + 'static)) {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(&format!(": {error}"));
        source = error.source();
    }
    print_err!("transom: {text}");
    if let Some(fix) = error.downcast_ref::<StartError>().and_then(StartError::fix) {
        print_err!("  fix: {fix}");
    }
}

/// Supervises a running gateway.
struct Supervisor<'a> {
    gateway: Gateway,
    clock: Clock,
    path: &'a Path,
    watch: FileWatch,
    pid_file: PidFile,
    upgrade: Upgrade,
}

/// The signals for reload and upgrade.
struct Signals {
    hangup: Signal,
    upgrade: Signal,
}

/// The signals that stop the gateway.
struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Signals> {
        Ok(Signals { hangup: signal(SignalKind::hangup())?, upgrade: signal(SignalKind::user_defined2())? })
    }
}

impl StopSignals {
    fn new() -> io::Result<StopSignals> {
        Ok(StopSignals { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn recv(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

impl Supervisor<'_> {
    /// Accepts connections, handles signals and file changes, and drains. `former`: the process that this one
    /// replaces, and the channel to it.
    async fn supervise(mut self, former: Option<(u32, SuccessorChannel)>, mut signals: Signals) -> io::Result<()> {
        let mut stop = StopSignals::new()?;
        // Before the first scrape.
        let meter = ReloadMetrics::new(&self.gateway.registry, self.clock.wall_ms());
        self.open(former, &mut stop).await?;
        // The interval survives the loop, so that frequent signals do not postpone the checks.
        let mut watch_timer = tokio::time::interval(WATCH_PERIOD);
        watch_timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick would be immediate, and the files were just read.
        watch_timer.reset();
        // Dropped with this loop: a gateway that ends changes no clients.
        let (mut changes, mut edits) = (self.gateway.take_file_changes(), self.gateway.take_access_edits());
        let (limits_changed, services_changed) = (self.gateway.limits_changed(), self.gateway.services_changed());
        let (mut next_compilation, mut compiling) = (self.clock.instant(), None);
        let successor = loop {
            let pause = next_compilation.saturating_duration_since(self.clock.instant());
            let limits_due = async {
                tokio::time::sleep(pause).await;
                limits_changed.notified().await;
            };
            let next_end = self.gateway.next_limit_end_ms();
            tokio::select! {
                () = stop.recv() => break None,
                Some(change) = next(&mut changes) => self.change_client(change, &meter),
                Some(edit) = next(&mut edits) => {
                    // One reload for all.
                    let others = std::iter::from_fn(|| edits.as_mut()?.try_recv().ok());
                    self.apply_edits(std::iter::once(edit).chain(others).collect(), &meter);
                }
                () = limits_due, if compiling.is_none() => {
                    let compiler = self.gateway.limits_compiler();
                    compiling = compiler.map(|compile| (self.clock.instant(), spawn_blocking(compile)));
                }
                (began, compiled) = compiled(&mut compiling) => {
                    let now = self.clock.instant();
                    let took = now.duration_since(began);
                    next_compilation = now + LIMITS_PERIOD.max(took * LIMITS_PERIOD_FACTOR);
                    match compiled {
                        Ok(compiled) => self.gateway.use_limits(compiled),
                        Err(error) => {
                            tracing::error!(%error, "limits of clients are not compiled, and are tried again");
                            next_compilation = now + LIMITS_PAUSE_AFTER_FAILURE;
                            limits_changed.notify_one();
                        }
                    }
                }
                () = services_changed.notified() => self.gateway.use_services(),
                () = sleep_until(next_end, &self.clock) => self.gateway.end_limits(),
                _ = signals.hangup.recv() => {
                    // The reload covers earlier changes.
                    self.watch.has_changed();
                    self.gateway.reopen_access_log();
                    let _ = self.reload(&meter);
                }
                _ = signals.upgrade.recv() => self.upgrade.start(&self.gateway),
                outcome = self.upgrade.outcome() => match outcome {
                    Some(pid) => break Some(pid),
                    None => self.pid_file.renew(),
                },
                _ = watch_timer.tick() => {
                    if self.watch.has_changed() {
                        let _ = self.reload(&meter);
                    }
                    self.gateway.compare_clocks();
                }
            }
        };
        drop((changes, edits));
        match successor {
            Some(pid) => self.drain_for_successor(pid, stop, signals).await,
            None => self.stop(stop, signals).await,
        }
    }

    /// Begins to accept. Can be stopped while waiting for the former process.
    async fn open(&mut self, former: Option<(u32, SuccessorChannel)>, stop: &mut StopSignals) -> io::Result<()> {
        let Some((from, channel)) = former else {
            self.gateway.start_accepting();
            self.pid_file.publish().map_err(|error| with_context("cannot write `pid_file`", &error))?;
            self.report_listening();
            return Ok(());
        };
        let former = tokio::select! {
            former = channel.ready() => former.map_err(|error| with_context("the former process did not hand over", &error))?,
            () = stop.recv() => return Err(io::Error::other("stopped before the former process handed over")),
        };
        self.gateway.start_accepting();
        if let Err(error) = self.pid_file.publish() {
            tracing::error!(%error, "cannot write `pid_file`");
        }
        self.upgrade.record_takeover();
        former.serving().await;
        tracing::info!("took over from process {from}");
        self.report_listening();
        Ok(())
    }

    /// Reports that the gateway serves, once signals are handled.
    fn report_listening(&self) {
        start_report::report(&self.gateway, self.path);
        if let Some(shared) = &self.gateway.config().counters.shared {
            tracing::info!("counters are shared through {}, under `{}:`", shared.nodes, shared.prefix);
        }
        systemd::notify(systemd::READY);
    }

    /// Reloads the configuration; a bad one changes nothing. Workers apply it in their own time.
    fn reload(&mut self, meter: &ReloadMetrics) -> Option<Applied> {
        systemd::notify(systemd::RELOADING);
        let applied = match read_config(self.path, &mut self.watch) {
            Ok(config) => self.apply(config, meter).ok(),
            Err(invalid) => {
                tracing::error!("reload failed, nothing was applied:\n{invalid}");
                meter.refused(self.clock.wall_ms(), invalid.to_string().trim_end());
                None
            }
        };
        systemd::notify(systemd::READY);
        applied
    }

    /// Applies edits of the access file, and replies once all workers use it.
    fn apply_edits(&mut self, edits: Vec<AccessEdit>, meter: &ReloadMetrics) {
        // The reload covers earlier changes.
        self.watch.has_changed();
        let applied = self.reload(meter);
        tokio::spawn(async move {
            let is_applied = applied.is_some();
            if let Some(applied) = applied {
                applied.wait().await;
            }
            // An error means that the caller has gone.
            edits.into_iter().for_each(|edit| _ = edit.send(is_applied));
        });
    }

    /// Applies a configuration, and reports it.
    fn apply(&mut self, config: Config, meter: &ReloadMetrics) -> Result<Applied, ReloadError> {
        let applied = self.gateway.reload(config).inspect_err(|error| {
            tracing::error!("reload failed, nothing was applied: {error}");
            meter.refused(self.clock.wall_ms(), &error.to_string());
        })?;
        let config = self.gateway.config();
        warn_of_certificates(config, &self.clock);
        self.pid_file.move_to(config.general.pid_file.as_ref().map(|file| resolve_path(self.path, file)));
        // Logged before it is counted: the message is there when the metric changes.
        tracing::info!("configuration reloaded");
        meter.applied(self.clock.wall_ms());
        Ok(applied)
    }

    /// Changes a client in the clients file, as a request to the admin address asks. Replies once all workers know the change.
    fn change_client(&mut self, change: FileChange, meter: &ReloadMetrics) {
        let FileChange { name, mut edit, reply } = change;
        let Some(clients) = self.gateway.config().clients.clone() else {
            // An error means that the caller has gone.
            let _ = reply.send(Err(ApiError::NoClients));
            return;
        };
        let path = self.path;
        let changed = change_client((path, &clients), &name, &mut edit, &mut |config| self.apply(config, meter));
        if changed.is_ok() {
            // The change is applied already.
            self.watch.watch(&resolve_path(path, &clients.file));
            tracing::info!("client `{name}` changed by a request to the admin address");
        }
        tokio::spawn(async move {
            let replied = match changed {
                Ok((changed, applied)) => {
                    applied.wait().await;
                    Ok(changed)
                }
                Err(error) => Err(error),
            };
            let _ = reply.send(replied);
        });
    }

    async fn stop(mut self, mut stop: StopSignals, mut signals: Signals) -> io::Result<()> {
        let cancels_upgrade = self.upgrade.is_running();
        let successor = tokio::select! {
            successor = self.upgrade.cancel() => successor,
            () = stop.recv() => return Err(stopped_twice()),
        };
        if let Some(pid) = successor {
            return self.drain_for_successor(pid, stop, signals).await;
        }
        if cancels_upgrade {
            self.pid_file.renew();
        }
        systemd::notify(systemd::STOPPING);
        self.gateway.begin_drain();
        self.delay_drain(&mut stop, &mut signals).await;
        tracing::info!("draining");
        let gateway = self.gateway;
        let mut draining = tokio::task::spawn_blocking(move || gateway.drain());
        loop {
            tokio::select! {
                drained = &mut draining => return drained.map_err(io::Error::other),
                () = stop.recv() => return Err(stopped_twice()),
                _ = signals.upgrade.recv() => state::report_failure("it is stopping"),
            }
        }
    }

    /// Accepts connections until load balancers have noticed that the gateway is not ready, or a stop signal arrives.
    async fn delay_drain(&self, stop: &mut StopSignals, signals: &mut Signals) {
        let delay = self.gateway.config().drain.delay;
        if delay.is_zero() {
            return;
        }
        tracing::info!("not ready; draining begins in {delay:?}");
        let mut delay = pin!(tokio::time::sleep(delay));
        loop {
            tokio::select! {
                () = &mut delay => return,
                () = stop.recv() => return,
                _ = signals.hangup.recv() => self.gateway.reopen_access_log(),
                _ = signals.upgrade.recv() => state::report_failure("it is stopping"),
            }
        }
    }

    /// Drains after another process took over. The first stop signal only closes idle connections, because it concerns
    /// both processes; the second one stops at once.
    async fn drain_for_successor(self, pid: u32, mut stop: StopSignals, mut signals: Signals) -> io::Result<()> {
        tracing::info!("process {pid} took over, draining");
        systemd::notify(&systemd::main_pid(pid));
        state::report_success(pid);
        let gateway = self.gateway;
        let release = gateway.idle_closer();
        let mut draining = tokio::task::spawn_blocking(move || gateway.drain_for_successor());
        let mut is_stopping = false;
        loop {
            tokio::select! {
                drained = &mut draining => return drained.map_err(io::Error::other),
                () = stop.recv() => {
                    if std::mem::replace(&mut is_stopping, true) {
                        return Err(stopped_twice());
                    }
                    release();
                }
                _ = signals.upgrade.recv() => state::report_failure("another process has taken its place"),
            }
        }
    }
}

/// The limits that a thread compiles, and when it began.
async fn compiled(
    compiling: &mut Option<(Instant, JoinHandle<CompiledLimits>)>,
) -> (Instant, Result<CompiledLimits, JoinError>) {
    match compiling {
        Some((began, thread)) => {
            let (began, compiled) = (*began, thread.await);
            *compiling = None;
            (began, compiled)
        }
        None => std::future::pending().await,
    }
}

/// The next message, if there can be one.
async fn next<T>(messages: &mut Option<UnboundedReceiver<T>>) -> Option<T> {
    match messages {
        Some(messages) => messages.recv().await,
        None => std::future::pending().await,
    }
}

/// Waits until a time, Unix milliseconds. Call again about once a second: the clock may be set meanwhile.
async fn sleep_until(time_ms: Option<u64>, clock: &Clock) {
    match time_ms {
        Some(time_ms) => tokio::time::sleep(Duration::from_millis(time_ms.saturating_sub(clock.wall_ms()))).await,
        None => std::future::pending().await,
    }
}

fn stopped_twice() -> io::Error {
    io::Error::other("stopped at once by a second signal")
}

/// Expired or expiring certificates are served with a warning: the clock may be wrong.
fn warn_of_certificates(config: &Config, clock: &Clock) {
    for note in lint::certificate_dates(config, clock.wall_ms()) {
        tracing::warn!("{note}");
    }
}
