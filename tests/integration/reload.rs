//! Reloads of the real binary, by a signal or a changed file: no connection is lost, no request fails, and no count is lost.

use std::fs;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread;

use crate::support::client::{Client, request};
use crate::support::process::{BINARY, Process};
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, eventually, forward_all, one_rule};

/// A window that does not end while the test runs.
fn rule(limit: u32) -> String {
    one_rule(&format!("key = \"ip\"\nwindows = [\"{limit}/366d\"]"))
}

#[test]
fn a_reload_under_load_fails_no_request_and_loses_no_count() {
    // More than the clients can send, however long the reloads take.
    const LIMIT: u32 = 4_000_000_000;
    let process = Process::spawn(&rule(LIMIT));
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                // One connection for all requests.
                let mut client = process.client();
                while !stop.load(Ordering::Relaxed) {
                    client.get("/a").expect(200);
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for n in 1..=20 {
            process.write_config(&rule(LIMIT + n));
            process.signal("HUP");
            // The gateway may notice the change before the signal, and then reloads twice.
            process.wait_for_applied_reloads(n.into());
        }
        stop.store(true, Ordering::Relaxed);
    });
    let mut sent = sent.into_inner();
    assert!(sent > 100, "only {sent} requests met twenty reloads");
    let mut left = 0;
    eventually("the last configuration applies", || {
        sent += 1;
        let last = process.get("/a").expect(200);
        left = remaining(&last, "r");
        items(&last, "ratelimit-policy")[0].get("q") == u64::from(LIMIT) + 20
    });
    assert_eq!(left, u64::from(LIMIT) + 20 - sent);
}

#[test]
fn a_changed_file_is_reloaded() {
    let process = Process::spawn(&rule(10));
    let mut client = process.client();
    assert_eq!(remaining(&client.get("/a").expect(200), "r"), 9);
    process.write_config(&rule(20));
    process.wait_for_reloads("applied", 1);
    eventually("the new limit applies to the connection", || {
        let response = client.get_with("/a", &[("Connection", "keep-alive")]).expect(200);
        items(&response, "ratelimit-policy")[0].get("q") == 20
    });
    assert_eq!(process.metrics().sum("transom_config_reloads_total", &[]), 1);
}

#[test]
fn changed_rules_are_logged() {
    let process = Process::spawn(&rule(10));
    process.write_config(&rule(20));
    process.wait_for_applied_reloads(1);
    assert!(!process.stderr().contains("counters"), "{}", process.stderr());
    process.write_config(&rule(20).replace("rules.r", "rules.s").replace("\"r\"", "\"s\""));
    process.wait_for_stderr(
        "rules added: `s`; removed: `r`; counts are not carried over to another name, key or window\n",
    );
    process.write_config(&rule(20).replace("rules.r", "rules.s").replace("\"r\"", "\"s\"").replace("366d", "365d"));
    process.wait_for_stderr(
        "rules with another key or window: `s`; counts are not carried over to another name, key or window\n",
    );
    process.write_config("[[routes]]\npath = \"/\"\nrespond = { status = 204 }\n");
    process.wait_for_stderr("rules removed: `s`\n");
}

#[test]
fn included_files_can_be_added_changed_and_removed() {
    let process = Process::spawn(&rule(1_000_000));
    let folder = process.scratch.path().join("conf.d");
    fs::create_dir(&folder).unwrap();
    let route = |path: &str| format!("[[routes]]\npath = \"{path}\"\nrespond = {{ status = 204 }}\n");
    fs::write(folder.join("a.toml"), route("/a/included")).unwrap();
    process.write_config(&format!("include = [\"conf.d/*.toml\"]\n{}", rule(1_000_000)));
    let answers = |path: &str, status: u16| {
        eventually(&format!("{path}: {status}"), || process.get(path).status == status);
    };
    answers("/a/included", 204);
    fs::write(folder.join("b.toml"), route("/b/included")).unwrap();
    answers("/b/included", 204);
    fs::write(folder.join("a.toml"), route("/a/changed")).unwrap();
    answers("/a/changed", 204);
    fs::write(folder.join("b.toml"), "\n[[routes]]\npaht = \"/\"\n").unwrap();
    let log = process.wait_for_stderr("unknown key `paht`");
    assert!(log.contains("conf.d/b.toml:3:1: "), "{log}");
    answers("/b/included", 204);
    fs::remove_file(folder.join("b.toml")).unwrap();
    answers("/b/included", 200);
}

/// `${env:NAME}` and `${file:PATH}`.
#[test]
fn references_are_read_and_read_again() {
    let scratch = TempDir::new();
    scratch.write("limit", "10\n");
    let toml = one_rule("key = \"ip\"\nwindows = [\"${file:limit}/${env:PERIOD}\"]");
    let mut command = Command::new(BINARY);
    command.env("PERIOD", "366d");
    let process = Process::spawn_command(command, &toml, scratch);
    assert_eq!(remaining(&process.get("/a").expect(200), "r"), 9);
    process.replace_file("limit", "20\n");
    process.wait_for_reloads("applied", 1);
    eventually("the new limit applies", || items(&process.get("/a").expect(200), "ratelimit-policy")[0].get("q") == 20);
    // The running configuration stays in use without the file; a start is refused.
    fs::remove_file(process.scratch.path().join("limit")).unwrap();
    process.signal("HUP");
    let log = process.wait_for_stderr("cannot read `limit`: ");
    let path = process.config_path();
    let text = fs::read_to_string(&path).unwrap();
    let line = 1 + text.lines().position(|line| line.contains("${file:limit}")).unwrap();
    let place = format!("{}:{line}:12: ", path.display());
    assert!(log.contains(&format!("{place}cannot read `limit`: ")), "{log}");
    process.get("/a").expect(200);
    process.replace_file("limit", "20\n");
    let output = Command::new(BINARY).args(["run", "--config"]).arg(&path).env_remove("PERIOD").output().unwrap();
    let messages = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{messages}");
    assert!(messages.contains(&format!("{place}the environment variable `PERIOD` is not set")), "{messages}");
}

#[test]
fn a_bad_file_changes_nothing() {
    let process = Process::spawn(&rule(10));
    let mut client = process.client();
    client.get("/a").expect(200);
    process.write_config(&rule(10).replace("366d", "366x"));
    process.wait_for_reloads("refused", 1);
    assert_eq!(remaining(&client.get("/a").expect(200), "r"), 8);
    let log = process.wait_for_stderr("fix: ");
    assert!(log.contains(&format!("{}:", process.config_path().display())), "{log}");
    assert_eq!(process.metrics().sum("transom_config_reloads_total", &[("outcome", "applied")]), 0);
    // A corrected file is applied.
    process.write_config(&rule(5));
    process.wait_for_reloads("applied", 1);
    eventually("the new limit applies", || {
        let response = client.get("/a");
        items(&response, "ratelimit-policy")[0].get("q") == 5
    });
}

#[test]
fn a_briefly_missing_file_is_not_a_change() {
    let process = Process::spawn(&rule(10));
    std::fs::remove_file(process.config_path()).unwrap();
    process.signal("HUP");
    process.wait_for_reloads("refused", 1);
    process.get("/a").expect(200);
    process.write_config(&rule(11));
    process.wait_for_reloads("applied", 1);
}

/// Otherwise the next start would be the first to notice.
#[test]
fn a_removed_file_is_reported() {
    let scratch = TempDir::new();
    scratch.write("servers.toml", "servers = [\"http://127.0.0.1:9\"]\n");
    scratch.write("access.toml", "");
    let toml = "[access]\nfile = \"access.toml\"\n[upstreams.u]\nservers_file = \"servers.toml\"\n\
                [[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\n";
    let process = Process::spawn_command(Command::new(BINARY), toml, scratch);
    for (number, file) in ["access.toml", "servers.toml"].into_iter().enumerate() {
        let path = process.scratch.path().join(file);
        let text = fs::read_to_string(&path).unwrap();
        fs::remove_file(&path).unwrap();
        process.wait_for_stderr(&format!("cannot read `{file}`: "));
        process.wait_for_reloads("refused", number as u64 + 1);
        fs::write(&path, text).unwrap();
        process.wait_for_reloads("applied", number as u64 + 1);
    }
}

#[test]
fn a_change_that_needs_a_restart_is_refused_and_reported() {
    let process = Process::spawn(&rule(10));
    for (n, change) in ["workers = 7\n", "counters = { capacity = 77 }\n"].into_iter().enumerate() {
        // Without a signal: the change and the signal could each cause a reload.
        process.write_config(&format!("{change}{}", rule(20)));
        process.wait_for_reloads("refused", n as u64 + 1);
    }
    let log = process.wait_for_stderr("`counters.capacity` needs a restart: an upgrade keeps");
    assert!(log.contains("`workers`") && log.contains("restart"), "{log}");
    assert_eq!(items(&process.get("/a").expect(200), "ratelimit-policy")[0].get("q"), 10);
}

#[test]
fn a_request_in_flight_keeps_its_configuration() {
    let (proceed, released) = mpsc::channel::<()>();
    let (report, reported) = mpsc::channel();
    let released = Arc::new(Mutex::new(released));
    let old = Upstream::with_script(move |connection| {
        if connection.read_request().is_some() {
            report.send(()).unwrap();
            released.lock().unwrap().recv().unwrap();
            connection.send(reply(200, &[], b"old"));
        }
    });
    // Dropped before the upstream, whose script waits for it.
    let proceed = proceed;
    let new = Upstream::responding(|_| reply(200, &[], b"new"));
    let process = Process::spawn(&forward_all(&old));
    let mut client = process.client();
    client.send(request("GET", "/a", &[], b""));
    reported.recv().unwrap();
    process.write_config(&forward_all(&new));
    process.wait_for_reloads("applied", 1);
    eventually("new requests go to the new upstream", || {
        let mut second = Client::connect(process.http);
        second.send(request("GET", "/b", &[], b""));
        second.read_response().text() == "new"
    });
    proceed.send(()).unwrap();
    assert_eq!(client.read_response().expect(200).text(), "old");
    // The connection stays open, with the new configuration.
    assert_eq!(client.get("/c").expect(200).text(), "new");
}

#[test]
fn routes_and_rules_can_be_added_and_removed() {
    let process = Process::spawn(&rule(10).replace("/{*rest}", "/a"));
    let mut client = process.client();
    client.get("/a").expect(200);
    client.get("/b").expect(404);
    process.write_config(&rule(10).replace("/{*rest}", "/b"));
    process.wait_for_reloads("applied", 1);
    eventually("the new route applies", || client.get("/b").status == 200);
    client.get("/a").expect(404);
}

#[test]
fn idle_connections_to_unchanged_servers_are_kept() {
    let upstream = Upstream::always(200);
    let process = Process::spawn(&format!("workers = 1\n{}", forward_all(&upstream)));
    let mut client = process.client();
    client.get("/a").expect(200);
    for n in 1..=3 {
        process.signal("HUP");
        process.wait_for_reloads("applied", n);
        client.get("/a").expect(200);
    }
    assert_eq!(upstream.connections(), 1);
}
