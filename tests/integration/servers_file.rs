//! `servers_file`: the gateway follows the list, and a change loses no request.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::support::process::{BINARY, Process};
use crate::support::upstream::Upstream;
use crate::support::{TempDir, eventually};

/// Changes of the list under load. `make moves` makes more.
const CHANGES: usize = 20;

/// Between two requests of a client.
const PAUSE: Duration = Duration::from_millis(2);

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

/// A server that responds with its name.
fn named(name: usize) -> Upstream {
    Upstream::with_script(move |connection| {
        while connection.read_request().is_some() && connection.reply(200, &[], name.to_string().as_bytes()) {}
    })
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
    let second = named(2);
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
    let (connections, third) = (second.connections(), named(3));
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

/// Every change replaces the only server, which ends when each client has got a response from the next.
#[test]
fn moves_of_a_server_in_a_file_lose_no_request() {
    let changes = std::env::var("TRANSOM_MOVES").map_or(CHANGES, |changes| changes.parse().unwrap());
    let mut current = named(0);
    let gateway = spawn("workers = 2\n", &list(&[&current]));
    let stop = Arc::new(AtomicBool::new(false));
    let last: Vec<Arc<AtomicUsize>> = (0..4).map(|_| Arc::default()).collect();
    let clients: Vec<_> = (last.iter().cloned().enumerate())
        .map(|(number, last)| {
            let (mut client, stop) = (gateway.client(), Arc::clone(&stop));
            thread::spawn(move || {
                let (mut sent, mut lost) = (0, 0);
                while !stop.load(Ordering::SeqCst) {
                    let response = if number % 2 == 0 { client.get("/a") } else { client.post("/a", "body") };
                    sent += 1;
                    thread::sleep(PAUSE);
                    match response.status {
                        200 => last.store(response.text().parse().unwrap(), Ordering::SeqCst),
                        _ => lost += 1,
                    }
                }
                (sent, lost)
            })
        })
        .collect();
    for change in 1..=changes {
        let next = named(change);
        gateway.replace_file(FILE, &list(&[&next]));
        // The gateway looks once a second.
        gateway.signal("HUP");
        eventually("all clients get responses of the next server", || {
            last.iter().all(|last| last.load(Ordering::SeqCst) == change)
        });
        drop(std::mem::replace(&mut current, next));
    }
    stop.store(true, Ordering::SeqCst);
    let results: Vec<(usize, usize)> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    let (sent, lost) = results.iter().fold((0, 0), |sums, result| (sums.0 + result.0, sums.1 + result.1));
    println!("{changes} changes of the file, {sent} requests, {lost} lost");
    assert_eq!(lost, 0, "of {sent} requests");
}
