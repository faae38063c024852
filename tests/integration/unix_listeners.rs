//! Unix sockets to listen on: their files, their callers, and what happens to them at a reload, an upgrade and the end.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use rustix::process::{getgid, getuid};

use crate::support::client::{Client, HttpResponse, request};
use crate::support::external_servers::program;
use crate::support::gateway::Gateway;
use crate::support::process::{BINARY, Process, run, signal};
use crate::support::test_ca::ServerFiles;
use crate::support::upgrade_chain::{UpgradeChain, is_alive};
use crate::support::{DEADLINE, TempDir, eventually, guide_blocks, one_rule};

fn connect(path: &Path) -> Client<UnixStream> {
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    Client::from_stream(stream)
}

/// One request on a new connection.
fn get(path: &Path, fields: &[(&str, &str)]) -> HttpResponse {
    connect(path).get_with("/a", fields)
}

/// A socket in a folder of its own.
fn socket() -> (TempDir, PathBuf) {
    let scratch = TempDir::new();
    let path = scratch.path().join("http.sock");
    (scratch, path)
}

/// Two workers that listen on a Unix socket, and on TCP.
fn toml(path: &Path, settings: &str) -> String {
    let rule = one_rule("key = \"ip\"\nwindows = [\"3/hour\"]\nexemptions = [\"10.0.0.0/8\"]");
    let path = path.display();
    let tcp = "127.0.0.1:0";
    format!(
        "workers = 2\nadmin = {{ hosts = [\"gateway.test\"] }}\n[listen]\nadmin = \"{tcp}\"\nhttp = [\"{tcp}\", \"unix:{path}\"]\n{settings}\n{rule}"
    )
}

/// The response's status, and what the gateway has sent upstream as `X-Forwarded-For`.
fn seen(response: &HttpResponse) -> (u16, String) {
    (response.status, response.json()["fields"]["x-forwarded-for"].as_str().unwrap_or_default().to_owned())
}

#[test]
fn all_callers_are_one_client() {
    let (scratch, path) = socket();
    let log = scratch.path().join("log");
    let gateway = Gateway::start(&format!("access_log = {{ file = {log:?} }}\n{}", toml(&path, "")));
    let forged = [("X-Forwarded-For", "10.0.0.1")];
    assert_eq!(seen(&get(&path, &forged)), (200, "unix:".to_owned()));
    assert_eq!(seen(&get(&path, &[])), (200, "unix:".to_owned()));
    // On one connection with the next.
    let mut client = connect(&path);
    assert_eq!((client.get("/a").status, client.get("/a").status), (200, 429));
    // Callers of TCP have addresses.
    gateway.get("/a").expect(200);
    let question = serde_json::json!({ "url": "http://a/a", "client": "unix:" });
    let explained = Client::connect(gateway.admin).post("/v1/explain", question.to_string()).expect(200).json();
    assert_eq!(explained["status"], 429, "{explained}");
    assert_eq!(explained["request"]["client"], "unix:", "{explained}");
    let key = serde_json::json!({ "rule": "r", "key": "unix:" });
    assert_eq!(gateway.decision("check", &key).expect(200).json()["remaining"], 0);
    gateway.stop();
    let logged = fs::read_to_string(log).unwrap();
    assert_eq!(logged.matches("\"client\":\"unix:\"").count(), 4, "{logged}");
}

#[test]
fn a_trusted_caller_names_the_client() {
    let (_scratch, path) = socket();
    let _gateway = Gateway::start(&toml(&path, "trusted_proxies = [\"unix:\"]"));
    for (list, sent, statuses) in [
        ("192.0.2.7", "192.0.2.7, unix:", [200, 200, 200, 429]),
        ("192.0.2.8", "192.0.2.8, unix:", [200, 200, 200, 429]),
        ("10.0.0.1", "10.0.0.1, unix:", [200; 4]),
    ] {
        for status in statuses {
            let response = get(&path, &[("X-Forwarded-For", list)]);
            assert_eq!(response.status, status, "{list}");
            assert!(status != 200 || seen(&response).1 == sent, "{}", response.text());
        }
    }
    assert_eq!(seen(&get(&path, &[])), (200, "unix:".to_owned()));
}

#[test]
fn a_proxy_header_names_the_client() {
    let (_scratch, path) = socket();
    let gateway = Gateway::start(&toml(&path, "proxy_protocol = [\"unix:\"]"));
    let mut client = connect(&path);
    client.send("PROXY TCP4 192.0.2.9 192.0.2.1 1 2\r\n");
    assert_eq!(seen(&client.get("/a")), (200, "192.0.2.9".to_owned()));
    client.get("/a").expect(200);
    // A header of which the peer alone is the client.
    let mut client = connect(&path);
    client.send(b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0");
    assert_eq!(seen(&client.get("/a")), (200, "unix:".to_owned()));
    let mut client = connect(&path);
    client.send_if_open(request("GET", "/a", &[], b""));
    client.expect_closed();
    gateway.get("/a").expect(200);
}

#[test]
fn a_client_that_leaves_is_noticed() {
    let (_scratch, path) = socket();
    let toml = toml(&path, "")
        .replace("windows = [\"3/hour\"]", "windows = [\"1/hour\"]\non_limit = \"delay\"\nmax_delay = \"1d\"");
    let gateway = Gateway::start(&toml);
    get(&path, &[]).expect(200);
    let mut waiting = connect(&path);
    waiting.send(request("GET", "/a", &[], b""));
    let active = || gateway.metrics().sum("transom_requests_active", &[]);
    eventually("the request waits", || active() == 1);
    drop(waiting);
    eventually("the request ends", || active() == 0);
}

#[test]
fn http2_and_tls_are_served() {
    let (scratch, path) = socket();
    let tls = scratch.path().join("https.sock");
    let files = ServerFiles::new();
    let https = format!(
        "[listen.https]\naddress = {{ address = \"unix:{}\", mode = \"0600\" }}\ncertificate = {:?}\nprivate_key = {:?}\n",
        tls.display(),
        files.certificate,
        files.private_key
    );
    let _gateway = Gateway::start(&toml(&path, &https));
    let curl = |socket: &Path, arguments: &[&str]| {
        let mut command = Command::new(program("curl"));
        command.args(["-sk", "-w", "%{http_version} %{http_code}", "-o", "/dev/null", "--unix-socket"]).arg(socket);
        String::from_utf8(command.args(arguments).output().unwrap().stdout).unwrap()
    };
    assert_eq!(curl(&path, &["--http2-prior-knowledge", "http://localhost/a"]), "2 200");
    assert_eq!(curl(&tls, &["--http2", "https://localhost/a"]), "2 200");
    assert_eq!(curl(&tls, &["--http1.1", "https://localhost/a"]), "1.1 200");
    assert_eq!(curl(&tls, &["http://localhost/a"]), "1.1 400");
}

#[test]
fn a_reload_applies_changed_permissions() {
    let (_scratch, path) = socket();
    let with_mode = |mode: &str| {
        let (owner, group) = (getuid().as_raw(), getgid().as_raw());
        let path = path.display();
        toml(Path::new(""), "").replace(
            "\"unix:\"",
            &format!("{{ address = \"unix:{path}\", mode = \"{mode}\", owner = {owner}, group = \"{group}\" }}"),
        )
    };
    let mode = || fs::metadata(&path).unwrap().mode() & 0o777;
    let mut gateway = Gateway::start(&with_mode("0660"));
    let (inode, found) = (fs::metadata(&path).unwrap().ino(), mode());
    assert_eq!(found, 0o660);
    let mut client = connect(&path);
    client.get("/a").expect(200);
    gateway.reload(&with_mode("0602"));
    assert_eq!((fs::metadata(&path).unwrap().ino(), mode()), (inode, 0o602));
    client.get("/a").expect(200);
    get(&path, &[]).expect(200);
    let moved = with_mode("0602").replace("http.sock", "other.sock");
    assert!(gateway.refused_reload(&moved).contains("`listen.http`"));
    gateway.stop();
    assert!(!path.exists());
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_refused() {
    let (scratch, path) = socket();
    let toml = toml(&path, "");
    let first = Process::spawn(&toml);
    get(&path, &[]).expect(200);
    let file = scratch.write("second.toml", &toml);
    let second = || run(&["run", "--config", &file.display().to_string()]);
    let (code, _, message) = second();
    assert_eq!(code, Some(1), "{message}");
    assert!(message.contains(&format!("cannot listen on `unix:{}`", path.display())), "{message}");
    assert!(message.contains("a process accepts connections there"), "{message}");
    get(&path, &[]).expect(200);
    signal(first.pid(), "KILL");
    eventually("the process ends", || !is_alive(first.pid()));
    assert!(path.exists());
    let mut third = Process::spawn(&toml);
    get(&path, &[]).expect(200);
    // A file that another program has put there stays.
    fs::remove_file(&path).unwrap();
    fs::write(&path, "text").unwrap();
    third.signal("TERM");
    assert!(third.wait().success());
    assert_eq!(fs::read_to_string(&path).unwrap(), "text");
    let (code, _, message) = second();
    assert!(code == Some(1) && message.contains("the file there is not a socket"), "{message}");
    fs::remove_file(&path).unwrap();
    let mut fourth = Process::spawn(&toml);
    get(&path, &[]).expect(200);
    fourth.signal("TERM");
    assert!(fourth.wait().success());
    assert!(!path.exists());
}

#[test]
fn an_upgrade_loses_no_request() {
    let (_scratch, path) = socket();
    let dropped = path.with_file_name("dropped.sock");
    let toml = |settings: &str| toml(&path, settings).replace("3/hour", "1000000/hour");
    let chain = UpgradeChain::start(&toml(&format!("metrics = \"unix:{}\"", dropped.display())));
    chain.write_config(&toml(""));
    assert!(dropped.exists());
    let inode = fs::metadata(&path).unwrap().ino();
    let (is_stopped, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_stopped.load(Ordering::Relaxed) {
                    let mut client = connect(&path);
                    // The gateway closes idle connections only while nothing is sent.
                    while client.get("/a").expect(200).field("connection").is_none() {
                        answered.fetch_add(1, Ordering::Relaxed);
                        if answered.load(Ordering::Relaxed).is_multiple_of(50) {
                            break;
                        }
                    }
                }
            });
        }
        for _ in 0..2 {
            let old = chain.serving_pid().unwrap();
            let new = chain.upgrade();
            chain.wait_for_log(&format!("process {new} took over, draining"));
            eventually("the old process ends", || !is_alive(old));
            let before = answered.load(Ordering::Relaxed);
            eventually("the new process answers", || answered.load(Ordering::Relaxed) > before + 20);
        }
        is_stopped.store(true, Ordering::Relaxed);
    });
    assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
    assert!(!dropped.exists(), "its address is no longer configured");
    let last = chain.serving_pid().unwrap();
    chain.signal("TERM");
    eventually("the last process ends", || !is_alive(last));
    assert!(!path.exists());
}

/// The steps of the guide, in a folder with its configuration.
#[test]
fn the_guide_to_sidecars_is_right() {
    let scratch = TempDir::new();
    let local = |text: &str| text.replace("/run/transom", &scratch.path().display().to_string());
    let toml =
        local(&guide_blocks("sidecar", "toml").remove(0).replace("\"www-data\"", &getgid().as_raw().to_string()));
    scratch.write("gateway.toml", &toml);
    let gateway = Gateway::start(&toml);
    let guide = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/guides/sidecar.md")).unwrap();
    let steps = guide.lines().filter_map(|line| line.strip_prefix("       ")).map(local);
    let path = format!("{}:{}", Path::new(BINARY).parent().unwrap().display(), std::env::var("PATH").unwrap());
    let outputs: Vec<String> = steps
        .map(|step| {
            let mut command = Command::new("bash");
            let output = command.args(["-ec", &step]).env("PATH", &path).current_dir(scratch.path()).output().unwrap();
            assert!(output.status.success(), "{step}: {}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        })
        .collect();
    let [sent, decided, health, explained, top] = <[String; 5]>::try_from(outputs).unwrap();
    assert!(sent.contains("\"/hello\"") && sent.contains("\"x-forwarded-for\": \"unix:\""), "{sent}");
    assert!(decided.contains("\"remaining\":1"), "{decided}");
    assert!(health.contains("is ready"), "{health}");
    assert!(explained.contains("per-user") && !explained.contains("all windows are shown empty"), "{explained}");
    assert!(top.contains("per-user"), "{top}");
    drop(gateway);
}

/// Commands that change or list find the socket in the configuration, and say that no gateway runs there.
#[test]
fn commands_find_the_admin_socket() {
    let scratch = TempDir::new();
    let path = scratch.path().join("admin.sock");
    let (access, clients) = (
        scratch.write("access.toml", ""),
        scratch.write("clients.toml", "[clients.acme]\nplan = \"gold\"\nsubjects = [\"k1\"]\n"),
    );
    let rule = one_rule("key = \"ip\"\nwindows = [\"3/hour\"]\nplans.gold.windows = [\"9/hour\"]");
    let toml = format!(
        "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"unix:{}\"\n[access]\nfile = {access:?}\n\
         [clients]\nfile = {clients:?}\nsubject = \"header:x-key\"\n{rule}",
        path.display()
    );
    let file = scratch.write("gateway.toml", &toml).display().to_string();
    let (code, _, message) = run(&["health", "--config", &file]);
    assert!(
        code == Some(1) && message.contains(&format!("no gateway listens at http://unix:{}", path.display())),
        "{message}"
    );
    let admin = format!("unix:{}", path.display());
    // With `--admin`, the command does not explain by a configuration file instead.
    let (code, _, message) = run(&["explain", "--config", &file, "--admin", &admin, "http://127.0.0.1/a"]);
    assert_eq!((code, message), (Some(1), format!("transom: no gateway runs at the admin address {admin}\n")));
    let _gateway = Gateway::start(&toml);
    for arguments in [
        &["health", "--config", &file][..],
        &["health", "--admin", &admin],
        &["top", "--config", &file, "--once"],
        &["deny", "list", "--admin", &admin],
        &["clients", "list", "--admin", &admin],
        &["clients", "show", "acme", "--admin", &admin],
        &["explain", "--admin", &admin, "http://127.0.0.1/a"],
    ] {
        let (code, _, message) = run(arguments);
        assert_eq!(code, Some(0), "{arguments:?}: {message}");
    }
    let mut metrics = connect(&path);
    write!(metrics.stream, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    assert!(metrics.read_response().expect(200).text().contains("transom_requests_active"));
}
