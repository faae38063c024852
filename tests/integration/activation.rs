//! Socket activation, and notifications to the service manager.

use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::Command;

use crate::support::client::Client;
use crate::support::external_servers::program;
use crate::support::process::{BINARY, Process};
use crate::support::{DEADLINE, TempDir, eventually, one_rule};

/// A Python program that opens sockets, writes their ports into the configuration, and executes the gateway, which inherits
/// the sockets as descriptors 3, 4 and so on.
const SOCKET_OPENER: &str = r#"
import os, socket, sys
sockets = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(int(os.environ.get("SOCKETS", "2")))]
config = sys.argv[-1]
text = open(config).read()
for n, s in enumerate(sockets):
    text = text.replace("PORT%d" % n, str(s.getsockname()[1]))
open(config, "w").write(text)
if "UNIX_SOCKET" in os.environ:
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(os.environ["UNIX_SOCKET"])
    unix.listen()
    sockets.append(unix)
held = [os.dup(s.fileno()) for s in sockets]
for n, fd in enumerate(held):
    high = os.dup2(fd, 100 + n)
for n in range(len(held)):
    os.dup2(100 + n, 3 + n, inheritable=True)
os.environ["LISTEN_FDS"] = str(len(held))
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[1], sys.argv[1:])
"#;

/// Starts the gateway with sockets that another process opened.
fn spawn_with_inherited_sockets(listen: &str, scratch: TempDir, environment: &[(&str, &Path)]) -> Process {
    let mut command = Command::new(program("python3"));
    command.arg("-c").arg(SOCKET_OPENER).arg(BINARY).arg("run").envs(environment.iter().copied());
    let toml = format!("workers = 2\n[listen]\n{listen}\n{}", one_rule("key = \"ip\"\nwindows = [\"1000/hour\"]"));
    Process::spawn_command(command, &toml, scratch)
}

const LISTEN_BOTH: &str = "http = \"127.0.0.1:PORT0\"\nadmin = \"127.0.0.1:PORT1\"";

#[test]
fn inherited_sockets_are_served_by_every_worker() {
    let process = spawn_with_inherited_sockets(LISTEN_BOTH, TempDir::new(), &[]);
    let text = std::fs::read_to_string(process.config_path()).unwrap();
    assert!(text.contains(&process.http.to_string()) && text.contains(&process.admin.to_string()), "{text}");
    let mut clients: Vec<_> = (0..20).map(|_| process.client()).collect();
    clients.iter_mut().for_each(|client| drop(client.get("/a").expect(200)));
    let label = process.http.to_string();
    assert_eq!(process.metrics().sum("transom_connections", &[("listener", &label)]), 20);
    process.admin_get("/readyz").expect(200);
}

/// The service manager has made the file of the socket, and removes it.
#[test]
fn a_unix_socket_is_inherited_and_its_file_stays() {
    let scratch = TempDir::new();
    let path = scratch.path().join("http.sock");
    let listen = format!("http = [\"127.0.0.1:PORT0\", \"unix:{}\"]\nadmin = \"127.0.0.1:PORT1\"", path.display());
    let mut process = spawn_with_inherited_sockets(&listen, scratch, &[("UNIX_SOCKET", &path)]);
    let mut clients: Vec<_> = (0..4).map(|_| Client::from_stream(UnixStream::connect(&path).unwrap())).collect();
    clients.iter_mut().for_each(|client| drop(client.get("/a").expect(200)));
    process.get("/a").expect(200);
    process.signal("TERM");
    assert!(process.wait().success());
    assert!(path.exists());
}

#[test]
fn the_socket_of_a_metrics_address_is_inherited() {
    let listen = format!("{LISTEN_BOTH}\nmetrics = \"127.0.0.1:PORT2\"");
    let process = spawn_with_inherited_sockets(&listen, TempDir::new(), &[("SOCKETS", Path::new("3"))]);
    eventually("the address is printed", || !process.stdout_lines().is_empty());
    let address = process.stdout_lines()[0].strip_prefix("metrics on http://").unwrap().to_owned();
    let text = std::fs::read_to_string(process.config_path()).unwrap();
    assert!(text.contains(&format!("metrics = \"{address}\"")), "{text}");
    Client::connect(address.parse().unwrap()).get_with("/readyz", &[("Host", &address)]).expect(200);
}

#[test]
fn the_service_manager_is_notified_of_the_gateways_state() {
    let scratch = TempDir::new();
    let path = scratch.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(DEADLINE)).unwrap();
    let next_notification = || {
        let mut buffer = [0; 256];
        let length = manager.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..length]).into_owned()
    };
    let mut process = spawn_with_inherited_sockets(LISTEN_BOTH, scratch, &[("NOTIFY_SOCKET", &path)]);
    assert_eq!(next_notification(), "READY=1");
    process.signal("HUP");
    assert_eq!((next_notification(), next_notification()), ("RELOADING=1".to_owned(), "READY=1".to_owned()));
    process.signal("TERM");
    assert_eq!(next_notification(), "STOPPING=1");
    assert!(process.wait().success());
}

#[test]
fn an_unexpected_inherited_socket_fails_the_start() {
    let scratch = TempDir::new();
    let toml = format!("[listen]\nhttp = \"127.0.0.1:PORT0\"\n{}", one_rule("key = \"ip\"\nwindows = [\"1000/hour\"]"));
    let file = scratch.write("gateway.toml", toml);
    let output = Command::new(program("python3"))
        .args(["-c", SOCKET_OPENER, BINARY, "run", "--config"])
        .arg(file)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let err = String::from_utf8(output.stderr).unwrap();
    assert!(err.contains("a socket was handed over for `127.0.0.1:"), "{err}");
}
