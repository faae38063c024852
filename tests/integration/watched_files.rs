//! Watched files that are reached through a link, as Kubernetes publishes ConfigMaps and secrets, and confd and `ln -sfn` replace
//! a folder: a version is used as a whole, and none is missed.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::support::client::Client;
use crate::support::moving_load::numbered;
use crate::support::process::{BINARY, Process};
use crate::support::test_ca::{Issued, TestCa};
use crate::support::tls::TlsClient;
use crate::support::upstream::Upstream;
use crate::support::{TempDir, eventually};

/// How a version becomes the current one.
const VERSIONS: [&str; 6] = ["start", "rename", "ln", "missing", "rename", "ln"];
const CONFIG: &str = r#"
[listen]
http = "127.0.0.1:0"
admin = "127.0.0.1:0"
trusted_proxies_file = "data/proxies"
[listen.https]
address = "127.0.0.1:0"
certificate = "data/server.pem"
private_key = "data/server.key"
[access]
file = "data/access.toml"
[clients]
file = "data/clients.toml"
api_key = "header:x-api-key"
[upstreams.u]
servers_file = "data/servers.toml"
[rules.r]
key = "header:x-api-key"
on_missing_key = "ip"
windows = ["100000/366d"]
plans.gold = { windows = ["200000/366d"] }
[[routes]]
path = "/{*rest}"
upstream = "u"
rules = ["r"]
"#;

/// Whether the peer is trusted in this version.
fn is_trusted(number: usize) -> bool {
    number.is_multiple_of(2)
}

/// Writes a version of all files, which does not differ in length from the others.
fn write_version(folder: &Path, number: usize, server: &Upstream, certificate: &Issued) {
    let version = folder.join(format!("version-{number}"));
    fs::create_dir(&version).unwrap();
    let write = |name: &str, text: &str| fs::write(version.join(name), text).unwrap();
    write("servers.toml", &format!("servers = [\"http://{}\"]\n", server.address));
    write("proxies", if is_trusted(number) { "127.0.0.0/8\n" } else { "172.0.0.0/8\n" });
    write("access.toml", &format!("[[deny]]\nnetwork = \"203.0.113.{number}\"\n"));
    write("clients.toml", &format!("[clients.client-{number}]\nplan = \"gold\"\nnetworks = [\"192.0.2.{number}\"]\n"));
    write("server.pem", &certificate.pem);
    write("server.key", &certificate.key_pem);
}

/// The version that each file in use is of.
fn expect_version(gateway: &Process, number: usize, authority: &TestCa, certificate: &Issued) {
    let admin = |target: &str, text: String| {
        eventually("the admin address lists it", || gateway.admin_get(target).expect(200).text().contains(&text));
    };
    eventually("the server is used", || gateway.get("/a").text() == number.to_string());
    admin("/v1/deny", format!("203.0.113.{number}"));
    admin("/v1/clients", format!("client-{number}"));
    eventually("the certificate is shown", || {
        let client = TlsClient::trusting(authority).connect(gateway.https.unwrap(), "a.test");
        client.stream.conn.peer_certificates().unwrap()[0] == certificate.der
    });
    // Only a trusted peer names a client, here a denied one.
    let denied = format!("203.0.113.{number}");
    let status = || Client::connect(gateway.http).get_with("/a", &[("X-Forwarded-For", &denied)]).status;
    eventually("the proxies are trusted", || status() == if is_trusted(number) { 403 } else { 200 });
}

#[test]
fn no_version_of_files_behind_a_link_is_missed() {
    let (authority, scratch) = (TestCa::new(), TempDir::new());
    let folder = scratch.path().to_owned();
    let servers: Vec<Upstream> =
        (0..VERSIONS.len()).map(|number| numbered(SocketAddr::from(([127, 0, 0, 1], 0)), number)).collect();
    let certificates: Vec<Issued> = VERSIONS.iter().map(|_| authority.issue(&["a.test"])).collect();
    let link = folder.join("data");
    let mut gateway = None;
    for (number, replaced_by) in VERSIONS.iter().enumerate() {
        write_version(&folder, number, &servers[number], &certificates[number]);
        let version = format!("version-{number}");
        match *replaced_by {
            "start" => symlink(&version, &link).unwrap(),
            "rename" => {
                symlink(&version, folder.join("data-new")).unwrap();
                fs::rename(folder.join("data-new"), &link).unwrap();
            }
            "ln" => {
                let status = Command::new("ln").arg("-sfn").arg(&version).arg(&link).status().unwrap();
                assert!(status.success());
            }
            _ => {
                // A reload while there are no files changes nothing, and the next version is seen without a signal.
                fs::remove_file(&link).unwrap();
                let gateway: &Process = gateway.as_ref().unwrap();
                gateway.signal("HUP");
                gateway.wait_for_reloads("refused", 1);
                expect_version(gateway, number - 1, &authority, &certificates[number - 1]);
                symlink(&version, &link).unwrap();
            }
        }
        let gateway = gateway.get_or_insert_with(|| {
            let config = TempDir::new();
            symlink(&link, config.path().join("data")).unwrap();
            Process::spawn_command(Command::new(BINARY), CONFIG, config)
        });
        expect_version(gateway, number, &authority, &certificates[number]);
    }
}
