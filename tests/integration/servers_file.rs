//! `servers_file`: the gateway follows the list, and a change loses no request.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;

use crate::support::moving_load::{Load, changes, numbered};
use crate::support::process::{BINARY, Process};
use crate::support::upstream::Upstream;
use crate::support::{TempDir, eventually};

/// Changes of the list under load. `make moves` makes more.
const CHANGES: usize = 20;

const FILE: &str = "servers.toml";
const CONFIG: &str = "[upstreams.u]\nservers_file = \"servers.toml\"\nretries = false\n\
                      [[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\n";

fn list(servers: &[&Upstream]) -> String {
    let servers: String = servers.iter().map(|server| format!("    \"http://{}\",\n", server.address)).collect();
    format!("servers = [\n{servers}]\n")
}

fn spawn(settings: &str, servers: &str) -> Process {
    let scratch = TempDir::new();
    scratch.write(FILE, servers);
    Process::spawn_command(Command::new(BINARY), &format!("{settings}{CONFIG}"), scratch)
}

#[test]
fn the_list_of_a_file_is_followed() {
    let (release, released) = channel::<()>();
    let (released, is_closed) = (Mutex::new(released), Arc::new(AtomicBool::new(false)));
    let first = Upstream::with_script({
        let is_closed = Arc::clone(&is_closed);
        move |connection| {
            while let Some(request) = connection.read_request() {
                if request.target == "/slow" {
                    released.lock().unwrap().recv().unwrap();
                }
                connection.reply(200, &[], b"first");
            }
            is_closed.store(true, Ordering::SeqCst);
        }
    });
    let second = numbered(SocketAddr::from(([127, 0, 0, 1], 0)), 2);
    let gateway = spawn("workers = 1\n", &list(&[&first]));
    assert_eq!(gateway.get("/a").expect(200).text(), "first");
    // A second connection, which is idle at the change.
    let slow = {
        let mut client = gateway.client();
        thread::spawn(move || client.get("/slow").expect(200).text())
    };
    eventually("the request arrives", || first.received().len() == 2);
    assert_eq!(gateway.get("/a").expect(200).text(), "first");
    assert_eq!((first.connections(), is_closed.load(Ordering::SeqCst)), (2, false));
    gateway.replace_file(FILE, &list(&[&second]));
    gateway.wait_for_reloads("applied", 1);
    eventually("the other server responds", || gateway.get("/a").expect(200).text() == "2");
    eventually("the idle connection is closed", || is_closed.load(Ordering::SeqCst));
    release.send(()).unwrap();
    assert_eq!(slow.join().unwrap(), "first", "requests in flight end");

    // An invalid file changes nothing.
    gateway.replace_file(FILE, &list(&[&first]).replace("http://", "http:"));
    gateway.wait_for_reloads("refused", 1);
    let log = gateway.wait_for_stderr("reload failed, nothing was applied");
    assert!(log.contains("servers.toml:2:"), "{log}");
    assert_eq!(gateway.get("/a").expect(200).text(), "2");

    // Without servers.
    gateway.replace_file(FILE, "servers = []\n");
    gateway.wait_for_reloads("applied", 2);
    eventually("there is no server", || gateway.get("/a").status == 503);
    assert_eq!(gateway.get("/a").expect(503).problem()["detail"], "the upstream has no server at the moment");
    assert_eq!(gateway.metrics().sum("transom_request_errors_total", &[("error", "no_server")]), 2);

    // As Kubernetes replaces the files of a ConfigMap: `..data` leads to another folder.
    let folder = gateway.scratch.path();
    let publish = |version: &str, servers: &str| {
        fs::create_dir(folder.join(version)).unwrap();
        fs::write(folder.join(version).join(FILE), servers).unwrap();
        symlink(version, folder.join("..data_tmp")).unwrap();
        fs::rename(folder.join("..data_tmp"), folder.join("..data")).unwrap();
    };
    publish("..version1", &list(&[&second]));
    symlink(Path::new("..data").join(FILE), folder.join("link")).unwrap();
    fs::rename(folder.join("link"), folder.join(FILE)).unwrap();
    gateway.wait_for_reloads("applied", 3);
    eventually("the server is back", || gateway.get("/a").status == 200);
    let (connections, third) = (second.connections(), numbered(SocketAddr::from(([127, 0, 0, 1], 0)), 3));
    publish("..version2", &list(&[&second, &third]));
    gateway.wait_for_reloads("applied", 4);
    let mut client = gateway.client();
    eventually("the added server responds", || client.get("/a").expect(200).text() == "3");
    assert_eq!(second.connections(), connections, "a server that stays keeps its connection");
    // The servers before the last change have no series any more.
    let metrics = gateway.metrics();
    let requests = |server: &Upstream| {
        let url = format!("http://{}", server.address);
        metrics.sum("transom_upstream_requests_total", &[("server", url.as_str())])
    };
    assert_eq!(requests(&first), 0);
    assert!(requests(&second) > 0 && requests(&third) > 0);
}

/// While its weight is a tenth, it gets one of eleven requests.
#[test]
fn an_added_server_starts_slowly() {
    let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
    let (first, second) = (numbered(anywhere, 1), numbered(anywhere, 2));
    let scratch = TempDir::new();
    scratch.write(FILE, list(&[&first]));
    let slowly = CONFIG.replace("retries = false", "slow_start = \"1d\"\nbalance = \"round-robin\"");
    let gateway = Process::spawn_command(Command::new(BINARY), &format!("workers = 1\n{slowly}"), scratch);
    gateway.get("/a").expect(200);
    gateway.replace_file(FILE, &list(&[&first, &second]));
    gateway.wait_for_reloads("applied", 1);
    let mut client = gateway.client();
    eventually("the added server responds", || client.get("/a").expect(200).text() == "2");
    let added = (0..105).filter(|_| client.get("/a").expect(200).text() == "2").count();
    assert_eq!(added, 9);
}

/// Every change replaces the only server, which ends when each client has got a response of the next.
#[test]
fn moves_of_a_server_in_a_file_lose_no_request() {
    let (changes, anywhere) = (changes(CHANGES), SocketAddr::from(([127, 0, 0, 1], 0)));
    let mut current = numbered(anywhere, 0);
    let gateway = spawn("workers = 2\n", &list(&[&current]));
    let load = Load::start(&gateway, true);
    for change in 1..=changes {
        let next = numbered(anywhere, change);
        gateway.replace_file(FILE, &list(&[&next]));
        // The gateway looks once a second.
        gateway.signal("HUP");
        load.wait_for(change);
        drop(std::mem::replace(&mut current, next));
    }
    load.finish(changes, "servers file");
}
