//! One process takes the place of another, or does not: then nothing has changed.

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
use crate::support::process::{BINARY, Owned, Process, run, signal};
use crate::support::upgrade_chain::{Dynasty, is_alive};
use crate::support::upstream::Upstream;
use crate::support::{DEADLINE, Scratch, eventually, one_rule, pass_all};

fn echo() -> String {
    one_rule("key = \"ip\"\nwindows = [\"100000/hour\"]")
}

/// An address without a listener.
fn free() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn the_new_process_continues_counting() {
    let rule = one_rule("key = \"global\"\nwindows = [{ limit = 5, period = \"1d\", start = \"first-request\" }]");
    let scratch = Scratch::new();
    let file = format!("file = \"{}\"", scratch.path().join("counters").display());
    for settings in ["", file.as_str()] {
        let toml = |capacity: usize| format!("[counters]\ncapacity = {capacity}\n{settings}\n{rule}");
        let dynasty = Dynasty::found(&toml(64));
        let admitted = |requests: usize| (0..requests).filter(|_| dynasty.first.get("/a").status == 200).count();
        assert_eq!(admitted(2), 2);
        dynasty.succeed();
        assert_eq!(admitted(2), 2);
        // A table that is in use can not have another size.
        dynasty.rewrite(&toml(1000));
        dynasty.succeed();
        dynasty.logged("for another capacity, which is kept");
        assert_eq!(admitted(9), 1);
    }
}

#[test]
fn the_old_process_finishes_requests_and_the_new_one_accepts() {
    // A connection that has sent nothing yet may use either protocol.
    ["true", "false"].iter().for_each(|h2c| one_after_the_other(&format!("[http2]\nh2c = {h2c}\n")));
}

fn one_after_the_other(settings: &str) {
    let (saw, seen) = mpsc::channel();
    let (go, gone) = mpsc::channel::<()>();
    let gone = std::sync::Arc::new(std::sync::Mutex::new(gone));
    let upstream = Upstream::with(move |talk| {
        while let Some(received) = talk.request() {
            if received.target == "/slow" {
                saw.send(()).unwrap();
                if gone.lock().unwrap().recv().is_err() {
                    return;
                }
            }
            talk.reply(200, &[], b"at last");
        }
    });
    // Dropped before the upstream, which waits for it.
    let go = go;
    let mut dynasty = Dynasty::found(&format!("workers = 1\n{}{settings}", pass_all(&upstream)));
    let mut slow = dynasty.first.client();
    slow.send(request("GET", "/slow", &[], b""));
    seen.recv().unwrap();
    let (mut idle, fresh, mut probe) = (dynasty.first.client(), dynasty.first.client(), dynasty.first.client());
    idle.get("/a").expect(200);
    probe.get("/a").expect(200);
    eventually("all are inside", || dynasty.first.metrics().sum("transom_connections", &[]) == 4);
    let mut scraper = Client::connect(dynasty.first.admin);
    scraper.get("/readyz").expect(200);

    let new = dynasty.succeed();
    dynasty.logged(&format!("process {new} took over, draining"));
    eventually("the old one drains", || probe.get("/p").expect(200).field("connection") == Some("close"));
    // A connection is kept until its next request, or its first; then the client is told to reconnect.
    for mut client in [idle, fresh, scraper] {
        let target = if client.stream.peer_addr().unwrap() == dynasty.first.admin { "/readyz" } else { "/b" };
        assert_eq!(client.get(target).expect(200).field("connection"), Some("close"));
        client.expect_closed();
    }
    assert_eq!(dynasty.first.get("/c").expect(200).field("connection"), None);
    dynasty.first.admin_get("/readyz").expect(200);
    assert_eq!(dynasty.first.metrics().sum("transom_upgrades_total", &[("outcome", "taken_over")]), 1);
    assert!(is_alive(dynasty.first.id()));
    go.send(()).unwrap();
    assert_eq!(slow.answer().expect(200).text(), "at last");
    assert_eq!(dynasty.first.wait().code(), Some(0));
    // The address is the new one's now, and the file that says so as well.
    dynasty.first.get("/d").expect(200);
    assert_eq!(dynasty.pid(), Some(new));
    dynasty.signal("TERM");
    eventually("the new one ends", || !is_alive(new));
    assert_eq!(dynasty.pid(), None);
}

#[test]
fn an_idle_connection_of_the_old_process_is_closed() {
    let mut dynasty = Dynasty::found(&format!("{}[timeouts]\ndrain = \"2500ms\"\n", echo()));
    let mut idle = dynasty.first.client();
    idle.get("/a").expect(200);
    dynasty.succeed();
    idle.expect_closed();
    assert_eq!(dynasty.first.wait().code(), Some(0));
    assert!(!dynasty.first.stderr().contains("aborted"), "{}", dynasty.first.stderr());
}

#[test]
fn a_short_drain_serves_requests_already_sent() {
    let dynasty = Dynasty::found(&format!("{}[timeouts]\ndrain = \"2s\"\n", echo()));
    let mut idle = dynasty.first.client();
    idle.get("/a").expect(200);
    let begun = Instant::now();
    dynasty.succeed();
    idle.expect_closed();
    assert!(begun.elapsed() >= Duration::from_secs(1));
}

#[test]
fn a_bad_configuration_leaves_the_old_process_serving() {
    let dynasty = Dynasty::found(&echo());
    let old = dynasty.first.id();
    dynasty.rewrite("nonsense = 1\n");
    dynasty.first.reloaded("refused", 1);
    let (code, _, err) = dynasty.command();
    assert_eq!(code, Some(2), "{err}");
    assert!(err.contains("gateway.toml:") && err.contains("`nonsense`"), "{err}");
    dynasty.signal("USR2");
    dynasty.logged(
        "the upgrade failed, this process keeps serving: the new process ended before it was ready (exit status: 2)",
    );
    assert_eq!(dynasty.first.metrics().sum("transom_upgrades_total", &[("outcome", "failed")]), 1);
    dynasty.first.get("/a").expect(200);
    dynasty.first.admin_get("/readyz").expect(200);
    assert_eq!(dynasty.pid(), Some(old));
    // It is as good as before.
    dynasty.rewrite(&echo());
    dynasty.succeed();
    dynasty.first.get("/b").expect(200);
}

#[test]
fn an_address_in_use_leaves_the_old_process_serving() {
    let dynasty = Dynasty::found(&echo());
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = format!("[\"127.0.0.1:0\", \"{}\"]", taken.local_addr().unwrap());
    let file = fs::read_to_string(dynasty.first.config()).unwrap();
    dynasty.first.rewrite(&file.replacen("\"127.0.0.1:0\"", &listen, 1));
    let (code, out, err) = dynasty.command();
    assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
    assert!(
        err.contains(&format!(
            "the upgrade failed, process {} keeps serving: the new process ended",
            dynasty.first.id()
        )),
        "{err}"
    );
    dynasty.logged("cannot listen on");
    dynasty.first.get("/a").expect(200);
}

/// An upgrade to such a program fails, and says why.
fn expect_failure(dynasty: &Dynasty, script: &str, why: &str) {
    let child = dynasty.first.scratch.path().join("child");
    let _ = fs::remove_file(&child);
    dynasty.usurp(&format!("echo $$ > {}; {script}", child.display()));
    let (code, out, err) = dynasty.command();
    assert_eq!((code, out.as_str()), (Some(1), ""), "{script}: {err}");
    assert!(err.contains("the upgrade failed, ") && err.contains(why), "{script}: {err}");
    // It may have been ended before it could write its number.
    let child = fs::read_to_string(&child).ok().and_then(|text| text.trim().parse().ok());
    assert!(child.is_none_or(|pid| !is_alive(pid)), "{script}");
    dynasty.first.get("/a").expect(200);
}

#[test]
fn a_foreign_program_leaves_the_old_process_serving() {
    let dynasty = Dynasty::found(&echo());
    expect_failure(&dynasty, "exit 7", "exit status: 7");
    expect_failure(&dynasty, "kill -KILL $$", "signal: 9");
    expect_failure(&dynasty, "exec <&-; exec sleep 600", "did not report that it is ready");
    expect_failure(&dynasty, "echo nonsense >&0; exec sleep 600", "did not report that it is ready");
    fs::remove_file(dynasty.program()).unwrap();
    let (code, _, err) = dynasty.command();
    assert!(code == Some(1) && err.contains("cannot start"), "{err}");
    dynasty.restore();
    let (code, out, err) = dynasty.command();
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert_eq!(out, format!("process {} took over from {}\n", dynasty.pid().unwrap(), dynasty.first.id()));
}

/// Any local process can bind names in the abstract namespace, and send to those of others.
#[test]
fn the_command_accepts_messages_of_the_gateway_only() {
    let dynasty = Dynasty::found(&echo());
    dynasty.usurp("exit 7");
    let name = format!("transom-upgrade-{}", dynasty.first.id());
    let _taken = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    // The gateway is stopped, so that the only messages are the forged ones, until one of them has been sent.
    dynasty.signal("STOP");
    let (code, out, err) = thread::scope(|scope| {
        let command = scope.spawn(|| dynasty.command());
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
        dynasty.signal("CONT");
        command.join().unwrap()
    });
    assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
    assert!(err.contains("keeps serving: the new process ended"), "{err}");
}

#[test]
fn a_hanging_program_leaves_the_old_process_serving() {
    let dynasty = Dynasty::found(&format!("{}[timeouts]\nupgrade = \"300ms\"\n", echo()));
    expect_failure(&dynasty, "exec sleep 600", "was not ready within 300ms");
}

/// A program that says it is ready, and does this once the place was given to it. Its id is in `child` then.
fn usurp_when_given(dynasty: &Dynasty, script: &str) -> PathBuf {
    let child = dynasty.first.scratch.path().join("child");
    dynasty.usurp(&format!(
        "echo ready >&0; while read word; do [ \"$word\" = yours ] && break; done
        echo $$ > {0}.new; mv {0}.new {0}; {script}",
        child.display()
    ));
    child
}

#[test]
fn a_process_that_took_over_is_not_killed() {
    let limit = Duration::from_secs(4);
    let mut dynasty = Dynasty::found(&format!("{}[timeouts]\nupgrade = \"{}s\"\n", echo(), limit.as_secs()));
    let go = dynasty.first.scratch.path().join("go");
    let script = format!("until [ -e {} ]; do sleep 0.05; done; echo serving >&0; exec sleep 600", go.display());
    let child = usurp_when_given(&dynasty, &script);
    dynasty.signal("USR2");
    eventually("the place is given to it", || child.exists());
    let pid: u32 = fs::read_to_string(&child).unwrap().trim().parse().unwrap();
    // Neither the end of its time nor a signal concerns it any more.
    thread::sleep(limit);
    dynasty.first.get("/a").expect(200);
    dynasty.first.signal("TERM");
    thread::sleep(Duration::from_millis(300));
    assert!(is_alive(pid));
    fs::write(&go, "").unwrap();
    assert_eq!(dynasty.first.wait().code(), Some(0));
    dynasty.logged(&format!("process {pid} took over, draining"));
    assert!(is_alive(pid));
    signal(pid, "KILL");
}

#[test]
fn a_process_that_dies_while_taking_over_leaves_the_old_one_serving() {
    let dynasty = Dynasty::found(&echo());
    for script in ["exit 7", "echo nonsense >&0; exit 7"] {
        usurp_when_given(&dynasty, script);
        let (code, out, err) = dynasty.command();
        assert_eq!((code, out.as_str()), (Some(1), ""), "{script}: {err}");
        assert!(err.contains("the new process ended before it was serving (exit status: 7)"), "{script}: {err}");
        dynasty.first.get("/a").expect(200);
    }
    dynasty.restore();
    dynasty.succeed();
}

#[test]
fn a_starting_process_can_be_stopped() {
    let dynasty = Dynasty::found(&echo());
    let (child, go) = (dynasty.first.scratch.path().join("child"), dynasty.first.scratch.path().join("go"));
    dynasty.usurp(&format!(
        "echo $$ > {0}.new; mv {0}.new {0}; until [ -e {1} ]; do sleep 0.05; done; exec {BINARY} \"$@\"",
        child.display(),
        go.display()
    ));
    dynasty.signal("USR2");
    eventually("it is started", || child.exists());
    let pid: u32 = fs::read_to_string(&child).unwrap().trim().parse().unwrap();
    // When it has heard that twice, it has handed everything over long before.
    for times in 1..=2 {
        dynasty.first.signal("USR2");
        eventually("it is ignored", || dynasty.first.stderr().matches("upgrade ignored").count() == times);
    }
    dynasty.first.signal("STOP");
    fs::write(&go, "").unwrap();
    eventually("it can be told to stop", || catches(pid, 15));
    signal(pid, "TERM");
    eventually("it stops", || !is_alive(pid));
    dynasty.first.signal("CONT");
    // It may have said before that it is ready.
    dynasty.logged("this process keeps serving: the new process ended before it was ");
    dynasty.logged("stopped before the former process handed over");
    dynasty.first.get("/a").expect(200);
}

/// Whether a process has a handler for a signal.
fn catches(pid: u32, signal: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    caught.is_some_and(|caught| u64::from_str_radix(caught.trim(), 16).unwrap() >> (signal - 1) & 1 == 1)
}

#[test]
fn the_executable_may_be_replaced() {
    let scratch = Scratch::new();
    let program = scratch.path().join("transom");
    fs::copy(BINARY, &program).unwrap();
    let dynasty = Dynasty::found_in(scratch, &echo(), &[]);
    fs::remove_file(&program).unwrap();
    dynasty.restore();
    let new = dynasty.succeed();
    assert_eq!(fs::canonicalize(format!("/proc/{new}/exe")).unwrap(), fs::canonicalize(BINARY).unwrap());
    let newest = dynasty.succeed();
    assert_ne!(new, newest);
    dynasty.first.get("/a").expect(200);
}

#[test]
fn the_number_of_workers_may_change_without_losing_connections() {
    let dynasty = Dynasty::found(&format!("workers = 3\n{}", echo()));
    for workers in [1, 5, 2] {
        dynasty.rewrite(&format!("workers = {workers}\n{}", echo()));
        let old = dynasty.pid().unwrap();
        dynasty.succeed();
        eventually("the old one accepts nobody any more", || !is_alive(old));
        // The kernel spreads them over all queues that there are.
        let mut clients: Vec<_> = (0..30).map(|_| dynasty.first.client()).collect();
        clients.iter_mut().for_each(|client| drop(client.get("/a").expect(200)));
        let page = dynasty.first.metrics();
        assert_eq!(page.sum("transom_connections", &[]), 30, "{workers}");
    }
}

#[test]
fn addresses_can_be_added_and_removed() {
    let (stays, goes, comes) = (free(), free(), free());
    let listen = |addresses: &[&String]| {
        format!(
            "[listen]\nhttp = {addresses:?}\nadmin = \"127.0.0.1:0\"\n[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/\"\nupstream = \"u\"\n"
        )
    };
    let scratch = Scratch::new();
    let file = scratch.write("gateway.toml", format!("pid_file = \"pid\"\n{}", listen(&[&stays, &goes])));
    let log = fs::File::create(scratch.path().join("stderr")).unwrap();
    let mut child = Owned::spawn(Command::new(BINARY).arg("--config").arg(&file).stdout(Stdio::piped()).stderr(log));
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (0..3).for_each(|_| drop(lines.next().unwrap().unwrap()));
    fs::write(&file, format!("pid_file = \"pid\"\n{}", listen(&[&comes, &stays]))).unwrap();
    let (code, out, err) = run(&["upgrade", "--config", &file.display().to_string()]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    let new: u32 = out.split(' ').nth(1).unwrap().parse().unwrap();
    for address in [&comes, &stays] {
        Client::connect(address.parse().unwrap()).get("/").expect(200);
    }
    eventually("nobody listens where nobody should", || TcpStream::connect(&goes).is_err());
    assert!(child.wait().unwrap().success());
    assert!(is_alive(new));
}

#[test]
fn a_second_upgrade_signal_is_ignored() {
    let mut dynasty = Dynasty::found(&echo());
    let child = dynasty.first.scratch.path().join("child");
    dynasty.usurp(&format!("echo $$ > {0}.new; mv {0}.new {0}; exec sleep 600", child.display()));
    dynasty.signal("USR2");
    eventually("it is started", || child.exists());
    let pid: u32 = fs::read_to_string(&child).unwrap().trim().parse().unwrap();
    dynasty.signal("USR2");
    dynasty.logged(&format!("upgrade ignored: one is in progress, to process {pid}"));
    assert!(is_alive(pid));
    dynasty.first.get("/a").expect(200);
    dynasty.first.signal("TERM");
    assert_eq!(dynasty.first.wait().code(), Some(0));
    assert!(!is_alive(pid));
    assert_eq!(dynasty.pid(), None);
}

#[test]
fn a_replaced_process_stops_quickly() {
    let mut dynasty = Dynasty::found(&format!("{}[timeouts]\ndrain = \"1h\"\n", echo()));
    let mut idle = dynasty.first.client();
    idle.get("/a").expect(200);
    let new = dynasty.succeed();
    dynasty.logged("took over, draining");
    // It has been replaced, so there is nothing to hand over.
    let (code, _, err) = run(&[
        "upgrade",
        "--config",
        &dynasty.first.config().display().to_string(),
        "--pid",
        &dynasty.first.id().to_string(),
    ]);
    assert!(code == Some(1) && err.contains("another process has taken its place"), "{err}");
    dynasty.first.signal("TERM");
    idle.expect_closed();
    assert_eq!(dynasty.first.wait().code(), Some(0));
    assert!(is_alive(new));
    dynasty.first.get("/b").expect(200);
}

#[test]
fn the_command_reports_an_unreachable_gateway() {
    let scratch = Scratch::new();
    let without = scratch.write("without.toml", echo()).display().to_string();
    let file = scratch.write("with.toml", format!("pid_file = \"pid\"\n{}", echo())).display().to_string();
    let (code, _, err) = run(&["upgrade", "--config", &without]);
    assert!(code == Some(2) && err.contains("`pid_file`") && err.contains("`--pid PID`"), "{err}");
    let (code, _, err) = run(&["upgrade", "--config", &file]);
    assert!(code == Some(1) && err.contains("pid names no process"), "{err}");
    let mut sleeper = Owned::spawn(Command::new("sleep").arg("600"));
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
    let scratch = Scratch::new();
    std::os::unix::fs::symlink(BINARY, scratch.path().join("transom")).unwrap();
    let path = scratch.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(DEADLINE)).unwrap();
    let told = || {
        let mut buffer = [0; 256];
        let length = manager.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    };
    let mut dynasty = Dynasty::found_in(scratch, &echo(), &[("NOTIFY_SOCKET", &path)]);
    assert_eq!(told(), "READY=1");
    let new = dynasty.succeed();
    let mut both = [told(), told()];
    both.sort();
    assert_eq!(both, [format!("MAINPID={new}"), "READY=1".to_owned()]);
    assert!(dynasty.first.wait().success());
    // The old process has not reported the end of the service; the new one does when it is stopped.
    dynasty.signal("TERM");
    assert_eq!(told(), "STOPPING=1");
    eventually("it ends", || !is_alive(new));
}

#[test]
fn the_pid_file_exists_while_the_gateway_serves() {
    let scratch = Scratch::new();
    let place = scratch.path().join("elsewhere");
    let mut dynasty = Dynasty::found(&echo());
    let id = dynasty.first.id();
    let named = fs::read_to_string(dynasty.first.scratch.path().join("pid")).unwrap();
    assert_eq!(named, format!("{id}\n"));
    // A reload can change it.
    dynasty.first.rewrite(&format!("pid_file = \"{}\"\n{}", place.display(), echo()));
    eventually("it has moved", || place.exists() && dynasty.pid().is_none());
    assert_eq!(fs::read_to_string(&place).unwrap(), format!("{id}\n"));
    dynasty.first.signal("TERM");
    dynasty.first.wait();
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
    // One that cannot be written is a failure to start.
    let file = scratch.write(
        "gateway.toml",
        format!("pid_file = \"nowhere/pid\"\n{}", crate::support::gateway::with_listen(&echo())),
    );
    let (code, _, err) = run(&["--config", &file.display().to_string()]);
    assert!(code == Some(1) && err.contains("cannot write `pid_file`") && err.contains("nowhere/pid"), "{err}");
}

#[test]
fn a_stale_environment_variable_is_ignored() {
    let scratch = Scratch::new();
    let mut command = Command::new(BINARY);
    command.env("TRANSOM_HANDOVER", "1");
    let process = Process::spawn_by(command, &echo(), scratch);
    process.get("/a").expect(200);
}
