//! Upgrades: a new process replaces the old one, or the old one keeps serving.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::client::{Client, request};
use crate::support::process::{BINARY, Process, ProcessGroup, run, signal};
use crate::support::redis::free_port;
use crate::support::upgrade_chain::{UpgradeChain, is_alive};
use crate::support::upstream::Upstream;
use crate::support::{DEADLINE, TempDir, eventually, forward_all, one_rule};

fn echo() -> String {
    one_rule("key = \"ip\"\nwindows = [\"100000/hour\"]")
}

/// An address without a listener.
fn free_address() -> String {
    format!("127.0.0.1:{}", free_port())
}

#[test]
fn the_new_process_continues_counting() {
    let rule = one_rule("key = \"global\"\nwindows = [{ limit = 5, period = \"1d\", start = \"first-request\" }]");
    let scratch = TempDir::new();
    let file = format!("file = \"{}\"", scratch.path().join("counters").display());
    for settings in ["", file.as_str()] {
        let toml = |capacity: usize| format!("[counters]\ncapacity = {capacity}\n{settings}\n{rule}");
        let chain = UpgradeChain::start(&toml(64));
        let admitted = |requests: usize| (0..requests).filter(|_| chain.first.get("/a").status == 200).count();
        assert_eq!(admitted(2), 2);
        chain.upgrade();
        assert_eq!(admitted(2), 2);
        // The size of a table in use cannot change.
        chain.write_config(&toml(1000));
        chain.upgrade();
        chain.wait_for_log("for another capacity, which is kept");
        assert_eq!(admitted(9), 1);
    }
}

#[test]
fn the_old_process_finishes_requests_and_the_new_one_accepts() {
    // A connection that has sent nothing yet may use either protocol.
    ["true", "false"].iter().for_each(|h2c| assert_old_finishes_and_new_accepts(&format!("[http2]\nh2c = {h2c}\n")));
}

#[test]
fn the_metrics_address_is_handed_over() {
    let listen = "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\nmetrics = \"127.0.0.1:0\"\n";
    let chain = UpgradeChain::start(&format!("{listen}{}", one_rule("key = \"ip\"\nwindows = [\"9/hour\"]")));
    eventually("the address is printed", || !chain.first.stdout_lines().is_empty());
    let address = chain.first.stdout_lines()[0].strip_prefix("metrics on http://").unwrap().to_owned();
    let scrape = |client: &mut Client| client.get_with("/metrics", &[("Host", &address)]).expect(200);
    let mut open = Client::connect(address.parse().unwrap());
    assert_eq!(scrape(&mut open).field("connection"), None);
    chain.upgrade();
    // The old process may still accept one connection.
    eventually("the new process answers", || {
        let mut new = Client::connect(address.parse().unwrap());
        scrape(&mut new).text().contains("transom_upgrades_total{outcome=\"taken_over\"} 1")
    });
}

/// A proxy that asks on `forward_auth` finds the same counters in the new process.
#[test]
fn the_forward_auth_address_is_handed_over() {
    let listen = "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\nforward_auth = \"127.0.0.1:0\"\n";
    let chain = UpgradeChain::start(&format!("{listen}{}", one_rule("key = \"ip\"\nwindows = [\"9/hour\"]")));
    eventually("the address is printed", || !chain.first.stdout_lines().is_empty());
    let address = chain.first.stdout_lines()[0].strip_prefix("forward auth on http://").unwrap().parse().unwrap();
    let ask = || Client::connect(address).get_with("/", &[("X-Forwarded-Method", "GET"), ("X-Forwarded-Uri", "/")]);
    (0..9).for_each(|_| drop(ask().expect(200)));
    let new = chain.upgrade();
    chain.wait_for_log(&format!("process {new} took over, draining"));
    (0..9).for_each(|_| drop(ask().expect(429)));
}

fn assert_old_finishes_and_new_accepts(settings: &str) {
    let (report, reported) = mpsc::channel();
    let (go, released) = mpsc::channel::<()>();
    let released = std::sync::Arc::new(std::sync::Mutex::new(released));
    let upstream = Upstream::with_script(move |connection| {
        while let Some(received) = connection.read_request() {
            if received.target == "/slow" {
                report.send(()).unwrap();
                if released.lock().unwrap().recv().is_err() {
                    return;
                }
            }
            connection.reply(200, &[], b"at last");
        }
    });
    // Dropped before the upstream, whose script waits for it.
    let go = go;
    let mut chain = UpgradeChain::start(&format!("workers = 1\n{}{settings}", forward_all(&upstream)));
    let mut slow = chain.first.client();
    slow.send(request("GET", "/slow", &[], b""));
    reported.recv().unwrap();
    let (mut idle, fresh, mut probe) = (chain.first.client(), chain.first.client(), chain.first.client());
    idle.get("/a").expect(200);
    probe.get("/a").expect(200);
    eventually("all connections are open", || chain.first.metrics().sum("transom_connections", &[]) == 4);
    let mut scraper = Client::connect(chain.first.admin);
    scraper.get("/readyz").expect(200);

    let new = chain.upgrade();
    chain.wait_for_log(&format!("process {new} took over, draining"));
    eventually("the old process drains", || probe.get("/p").expect(200).field("connection") == Some("close"));
    // A connection stays open until its next or first request, whose response announces the close.
    for mut client in [idle, fresh, scraper] {
        let target = if client.stream.peer_addr().unwrap() == chain.first.admin { "/readyz" } else { "/b" };
        assert_eq!(client.get(target).expect(200).field("connection"), Some("close"));
        client.expect_closed();
    }
    assert_eq!(chain.first.get("/c").expect(200).field("connection"), None);
    chain.first.admin_get("/readyz").expect(200);
    assert_eq!(chain.first.metrics().sum("transom_upgrades_total", &[("outcome", "taken_over")]), 1);
    assert!(is_alive(chain.first.pid()));
    go.send(()).unwrap();
    assert_eq!(slow.read_response().expect(200).text(), "at last");
    assert_eq!(chain.first.wait().code(), Some(0));
    // The address and the PID file belong to the new process.
    chain.first.get("/d").expect(200);
    assert_eq!(chain.serving_pid(), Some(new));
    chain.signal("TERM");
    eventually("the new process ends", || !is_alive(new));
    assert_eq!(chain.serving_pid(), None);
}

#[test]
fn an_idle_connection_of_the_old_process_is_closed() {
    let mut chain = UpgradeChain::start(&format!("{}[timeouts]\ndrain = \"2500ms\"\n", echo()));
    let mut idle = chain.first.client();
    idle.get("/a").expect(200);
    chain.upgrade();
    idle.expect_closed();
    assert_eq!(chain.first.wait().code(), Some(0));
    assert!(!chain.first.stderr().contains("aborted"), "{}", chain.first.stderr());
}

#[test]
fn a_short_drain_serves_requests_already_sent() {
    let chain = UpgradeChain::start(&format!("{}[timeouts]\ndrain = \"2s\"\n", echo()));
    let mut idle = chain.first.client();
    idle.get("/a").expect(200);
    let begun = Instant::now();
    chain.upgrade();
    idle.expect_closed();
    assert!(begun.elapsed() >= Duration::from_secs(1));
}

#[test]
fn a_bad_configuration_leaves_the_old_process_serving() {
    let chain = UpgradeChain::start(&echo());
    let old = chain.first.pid();
    chain.write_config("nonsense = 1\n");
    chain.first.wait_for_reloads("refused", 1);
    let (code, _, err) = chain.run_upgrade_command();
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("gateway.toml:") && err.contains("`nonsense`"), "{err}");
    chain.signal("USR2");
    chain.wait_for_log(
        "the upgrade failed, this process keeps serving: the new process ended before it was ready (exit status: 2)",
    );
    assert_eq!(chain.first.metrics().sum("transom_upgrades_total", &[("outcome", "failed")]), 1);
    chain.first.get("/a").expect(200);
    chain.first.admin_get("/readyz").expect(200);
    assert_eq!(chain.serving_pid(), Some(old));
    // A later upgrade succeeds.
    chain.write_config(&echo());
    chain.upgrade();
    chain.first.get("/b").expect(200);
}

#[test]
fn an_address_in_use_leaves_the_old_process_serving() {
    let chain = UpgradeChain::start(&echo());
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = format!("[\"127.0.0.1:0\", \"{}\"]", taken.local_addr().unwrap());
    let file = fs::read_to_string(chain.first.config_path()).unwrap();
    chain.first.write_config(&file.replacen("\"127.0.0.1:0\"", &listen, 1));
    let (code, out, err) = chain.run_upgrade_command();
    assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
    assert!(
        err.contains(&format!(
            "the upgrade failed, process {} keeps serving: the new process ended",
            chain.first.pid()
        )),
        "{err}"
    );
    chain.wait_for_log("cannot listen on");
    chain.first.get("/a").expect(200);
}

/// Expects an upgrade to this script to fail for this reason, and the old process to keep serving.
fn expect_failure(chain: &UpgradeChain, script: &str, why: &str) {
    let child = chain.first.scratch.path().join("child");
    let _ = fs::remove_file(&child);
    chain.replace_program(&format!("echo $$ > {}; {script}", child.display()));
    let (code, out, err) = chain.run_upgrade_command();
    assert_eq!((code, out.as_str()), (Some(1), ""), "{script}: {err}");
    assert!(err.contains("the upgrade failed, ") && err.contains(why), "{script}: {err}");
    // The script may have ended before it wrote its process ID.
    let child = fs::read_to_string(&child).ok().and_then(|text| text.trim().parse().ok());
    assert!(child.is_none_or(|pid| !is_alive(pid)), "{script}");
    chain.first.get("/a").expect(200);
}

#[test]
fn a_foreign_program_leaves_the_old_process_serving() {
    let chain = UpgradeChain::start(&echo());
    expect_failure(&chain, "exit 7", "exit status: 7");
    expect_failure(&chain, "kill -KILL $$", "signal: 9");
    expect_failure(&chain, "exec <&-; exec sleep 600", "did not report that it is ready");
    expect_failure(&chain, "echo nonsense >&0; exec sleep 600", "did not report that it is ready");
    fs::remove_file(chain.program()).unwrap();
    let (code, _, err) = chain.run_upgrade_command();
    assert!(code == Some(1) && err.contains("cannot start"), "{err}");
    chain.restore_program();
    let (code, out, err) = chain.run_upgrade_command();
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert_eq!(out, format!("process {} took over from {}\n", chain.serving_pid().unwrap(), chain.first.pid()));
}

/// Any local process can bind names in the abstract namespace, and send to those of others.
#[test]
fn the_command_accepts_messages_of_the_gateway_only() {
    let chain = UpgradeChain::start(&echo());
    chain.replace_program("exit 7");
    let name = format!("transom-upgrade-{}", chain.first.pid());
    let _taken = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    // The gateway is stopped, so that the only messages are the forged ones, until one of them has been sent.
    chain.signal("STOP");
    let (code, out, err) = thread::scope(|scope| {
        let command = scope.spawn(|| chain.run_upgrade_command());
        let socket = UnixDatagram::unbound().unwrap();
        eventually("a forged message is sent", || {
            let sockets = fs::read_to_string("/proc/net/unix").unwrap();
            let names = sockets.lines().filter_map(|line| line.rsplit(' ').next()?.strip_prefix('@'));
            let mut sent = false;
            for name in names.filter(|other| other.starts_with(&format!("{name}-"))) {
                let address = SocketAddr::from_abstract_name(name).unwrap();
                sent |= socket.send_to_addr(b"taken over by 1", &address).is_ok();
            }
            sent || command.is_finished()
        });
        chain.signal("CONT");
        command.join().unwrap()
    });
    assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
    assert!(err.contains("keeps serving: the new process ended"), "{err}");
}

#[test]
fn a_hanging_program_leaves_the_old_process_serving() {
    let chain = UpgradeChain::start(&format!("{}[timeouts]\nupgrade = \"300ms\"\n", echo()));
    expect_failure(&chain, "exec sleep 600", "was not ready within 300ms");
}

/// Replaces the program by a script that reports ready, and runs `script` after the hand-over. The returned file then has its
/// process ID.
fn replace_program_after_hand_over(chain: &UpgradeChain, script: &str) -> PathBuf {
    let child = chain.first.scratch.path().join("child");
    chain.replace_program(&format!(
        "echo ready >&0; while read word; do [ \"$word\" = yours ] && break; done
        echo $$ > {0}.new; mv {0}.new {0}; {script}",
        child.display()
    ));
    child
}

#[test]
fn a_process_that_took_over_is_not_killed() {
    let limit = Duration::from_secs(4);
    let mut chain = UpgradeChain::start(&format!("{}[timeouts]\nupgrade = \"{}s\"\n", echo(), limit.as_secs()));
    let go = chain.first.scratch.path().join("go");
    let script = format!("until [ -e {} ]; do sleep 0.05; done; echo serving >&0; exec sleep 600", go.display());
    let child = replace_program_after_hand_over(&chain, &script);
    chain.signal("USR2");
    eventually("the hand-over is done", || child.exists());
    let pid: u32 = fs::read_to_string(&child).unwrap().trim().parse().unwrap();
    // Neither the timeout nor a signal to the old process ends the new one.
    thread::sleep(limit);
    chain.first.get("/a").expect(200);
    chain.first.signal("TERM");
    thread::sleep(Duration::from_millis(300));
    assert!(is_alive(pid));
    fs::write(&go, "").unwrap();
    assert_eq!(chain.first.wait().code(), Some(0));
    chain.wait_for_log(&format!("process {pid} took over, draining"));
    assert!(is_alive(pid));
    signal(pid, "KILL");
}

#[test]
fn a_process_that_dies_while_taking_over_leaves_the_old_one_serving() {
    let chain = UpgradeChain::start(&echo());
    for script in ["exit 7", "echo nonsense >&0; exit 7"] {
        replace_program_after_hand_over(&chain, script);
        let (code, out, err) = chain.run_upgrade_command();
        assert_eq!((code, out.as_str()), (Some(1), ""), "{script}: {err}");
        assert!(err.contains("the new process ended before it was serving (exit status: 7)"), "{script}: {err}");
        chain.first.get("/a").expect(200);
    }
    chain.restore_program();
    chain.upgrade();
}

#[test]
fn a_starting_process_can_be_stopped() {
    let chain = UpgradeChain::start(&echo());
    let (child, go) = (chain.first.scratch.path().join("child"), chain.first.scratch.path().join("go"));
    chain.replace_program(&format!(
        "echo $$ > {0}.new; mv {0}.new {0}; until [ -e {1} ]; do sleep 0.05; done; exec {BINARY} \"$@\"",
        child.display(),
        go.display()
    ));
    chain.signal("USR2");
    eventually("the new process is started", || child.exists());
    let pid: u32 = fs::read_to_string(&child).unwrap().trim().parse().unwrap();
    // After two ignored signals, the old process has handed over all descriptors.
    for times in 1..=2 {
        chain.first.signal("USR2");
        eventually("the signal is ignored", || chain.first.stderr().matches("upgrade ignored").count() == times);
    }
    chain.first.signal("STOP");
    fs::write(&go, "").unwrap();
    eventually("the new process handles TERM", || has_handler(pid, 15));
    signal(pid, "TERM");
    eventually("the new process ends", || !is_alive(pid));
    chain.first.signal("CONT");
    // The new process may have reported ready before.
    chain.wait_for_log("this process keeps serving: the new process ended before it was ");
    chain.wait_for_log("stopped before the former process handed over");
    chain.first.get("/a").expect(200);
}

/// Whether a process has a handler for a signal.
fn has_handler(pid: u32, signal: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    caught.is_some_and(|caught| u64::from_str_radix(caught.trim(), 16).unwrap() >> (signal - 1) & 1 == 1)
}

#[test]
fn the_executable_may_be_replaced() {
    let scratch = TempDir::new();
    let program = scratch.path().join("transom");
    fs::copy(BINARY, &program).unwrap();
    let chain = UpgradeChain::start_in(scratch, &echo(), &[]);
    fs::remove_file(&program).unwrap();
    chain.restore_program();
    let new = chain.upgrade();
    assert_eq!(fs::canonicalize(format!("/proc/{new}/exe")).unwrap(), fs::canonicalize(BINARY).unwrap());
    let newest = chain.upgrade();
    assert_ne!(new, newest);
    chain.first.get("/a").expect(200);
}

#[test]
fn the_number_of_workers_may_change_without_losing_connections() {
    let chain = UpgradeChain::start(&format!("workers = 3\n{}", echo()));
    for workers in [1, 5, 2] {
        chain.write_config(&format!("workers = {workers}\n{}", echo()));
        let old = chain.serving_pid().unwrap();
        chain.upgrade();
        eventually("the old process has ended", || !is_alive(old));
        // The kernel distributes connections to all accept queues.
        let mut clients: Vec<_> = (0..30).map(|_| chain.first.client()).collect();
        clients.iter_mut().for_each(|client| drop(client.get("/a").expect(200)));
        let page = chain.first.metrics();
        assert_eq!(page.sum("transom_connections", &[]), 30, "{workers}");
    }
}

#[test]
fn addresses_can_be_added_and_removed() {
    let (kept, removed, added) = (free_address(), free_address(), free_address());
    let listen = |addresses: &[&String]| {
        format!(
            "[listen]\nhttp = {addresses:?}\nadmin = \"127.0.0.1:0\"\n[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/\"\nupstream = \"u\"\n"
        )
    };
    let scratch = TempDir::new();
    let file = scratch.write("gateway.toml", format!("pid_file = \"pid\"\n{}", listen(&[&kept, &removed])));
    let log = fs::File::create(scratch.path().join("stderr")).unwrap();
    let mut child =
        ProcessGroup::spawn(Command::new(BINARY).arg("--config").arg(&file).stdout(Stdio::piped()).stderr(log));
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (0..3).for_each(|_| drop(lines.next().unwrap().unwrap()));
    fs::write(&file, format!("pid_file = \"pid\"\n{}", listen(&[&added, &kept]))).unwrap();
    let (code, out, err) = run(&["upgrade", "--config", &file.display().to_string()]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    let new: u32 = out.split(' ').nth(1).unwrap().parse().unwrap();
    for address in [&added, &kept] {
        Client::connect(address.parse().unwrap()).get("/").expect(200);
    }
    eventually("the removed address is closed", || TcpStream::connect(&removed).is_err());
    assert!(child.wait().unwrap().success());
    assert!(is_alive(new));
}

#[test]
fn a_second_upgrade_signal_is_ignored() {
    let mut chain = UpgradeChain::start(&echo());
    let child = chain.first.scratch.path().join("child");
    chain.replace_program(&format!("echo $$ > {0}.new; mv {0}.new {0}; exec sleep 600", child.display()));
    chain.signal("USR2");
    eventually("the new process is started", || child.exists());
    let pid: u32 = fs::read_to_string(&child).unwrap().trim().parse().unwrap();
    chain.signal("USR2");
    chain.wait_for_log(&format!("upgrade ignored: one is in progress, to process {pid}"));
    assert!(is_alive(pid));
    chain.first.get("/a").expect(200);
    chain.first.signal("TERM");
    assert_eq!(chain.first.wait().code(), Some(0));
    assert!(!is_alive(pid));
    assert_eq!(chain.serving_pid(), None);
}

#[test]
fn a_replaced_process_stops_quickly() {
    let mut chain = UpgradeChain::start(&format!("{}[timeouts]\ndrain = \"1h\"\n", echo()));
    let mut idle = chain.first.client();
    idle.get("/a").expect(200);
    let new = chain.upgrade();
    chain.wait_for_log("took over, draining");
    // A replaced process cannot be upgraded.
    let (code, _, err) = run(&[
        "upgrade",
        "--config",
        &chain.first.config_path().display().to_string(),
        "--pid",
        &chain.first.pid().to_string(),
    ]);
    assert!(code == Some(1) && err.contains("another process has taken its place"), "{err}");
    chain.first.signal("TERM");
    idle.expect_closed();
    assert_eq!(chain.first.wait().code(), Some(0));
    assert!(is_alive(new));
    chain.first.get("/b").expect(200);
}

#[test]
fn the_command_reports_an_unreachable_gateway() {
    let scratch = TempDir::new();
    let without = scratch.write("without.toml", echo()).display().to_string();
    let file = scratch.write("with.toml", format!("pid_file = \"pid\"\n{}", echo())).display().to_string();
    let (code, _, err) = run(&["upgrade", "--config", &without]);
    assert!(code == Some(2) && err.contains("`pid_file`") && err.contains("`--pid PID`"), "{err}");
    let (code, _, err) = run(&["upgrade", "--config", &file]);
    assert!(code == Some(1) && err.contains("pid names no process"), "{err}");
    let mut sleeper = ProcessGroup::spawn(Command::new("sleep").arg("600"));
    let pid = sleeper.id().to_string();
    let (code, _, err) = run(&["upgrade", "--config", &file, "--pid", &pid]);
    assert!(code == Some(1) && err.contains("does not handle SIGUSR2"), "{err}");
    assert!(sleeper.try_wait().unwrap().is_none());
    sleeper.kill().unwrap();
    sleeper.wait().unwrap();
    let (code, _, err) = run(&["upgrade", "--config", &file, "--pid", &pid]);
    assert!(code == Some(1) && err.contains(&format!("there is no process {pid}")), "{err}");
}

#[test]
fn the_service_manager_is_notified_of_the_main_process() {
    let scratch = TempDir::new();
    std::os::unix::fs::symlink(BINARY, scratch.path().join("transom")).unwrap();
    let path = scratch.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(DEADLINE)).unwrap();
    let next_notification = || {
        let mut buffer = [0; 256];
        let length = manager.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    };
    let mut chain = UpgradeChain::start_in(scratch, &echo(), &[("NOTIFY_SOCKET", &path)]);
    assert_eq!(next_notification(), "READY=1");
    let new = chain.upgrade();
    let mut both = [next_notification(), next_notification()];
    both.sort();
    assert_eq!(both, [format!("MAINPID={new}"), "READY=1".to_owned()]);
    assert!(chain.first.wait().success());
    // The old process did not report the end of the service; the new process reports it when stopped.
    chain.signal("TERM");
    assert_eq!(next_notification(), "STOPPING=1");
    eventually("the process ends", || !is_alive(new));
}

#[test]
fn the_pid_file_exists_while_the_gateway_serves() {
    let scratch = TempDir::new();
    let pid_file = scratch.path().join("elsewhere");
    let mut chain = UpgradeChain::start(&echo());
    let id = chain.first.pid();
    let named = fs::read_to_string(chain.first.scratch.path().join("pid")).unwrap();
    assert_eq!(named, format!("{id}\n"));
    // A reload can change it.
    chain.first.write_config(&format!("pid_file = \"{}\"\n{}", pid_file.display(), echo()));
    eventually("the PID file has moved", || pid_file.exists() && chain.serving_pid().is_none());
    assert_eq!(fs::read_to_string(&pid_file).unwrap(), format!("{id}\n"));
    chain.first.signal("TERM");
    chain.first.wait();
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
    // A PID file that cannot be written fails the start.
    let file = scratch.write(
        "gateway.toml",
        format!("pid_file = \"nowhere/pid\"\n{}", crate::support::gateway::with_listen(&echo())),
    );
    let (code, _, err) = run(&["--config", &file.display().to_string()]);
    assert!(code == Some(1) && err.contains("cannot write `pid_file`") && err.contains("nowhere/pid"), "{err}");
}

#[test]
fn a_stale_environment_variable_is_ignored() {
    let scratch = TempDir::new();
    let mut command = Command::new(BINARY);
    command.env("TRANSOM_HANDOVER", "1");
    let process = Process::spawn_command(command, &echo(), scratch);
    process.get("/a").expect(200);
}
