//! A gateway in this process, with a clock that only the test moves.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use transom::server;
use transom_config::Config;
use transom_config::listen_address::ListenAddress;
use transom_runtime::clock::Clock;

use super::client::{Client, HOST, HttpResponse};
use super::metrics_parser::Exposition;
use super::{eventually, panic_watch};

/// The time at which gateways start by default, in Unix seconds: the first second of a minute.
pub const START_S: u64 = 1_700_000_100;

pub struct Gateway {
    inner: Option<server::Gateway>,
    pub clock: Clock,
    /// The first address; port 0 if there is none.
    pub http: SocketAddr,
    pub admin: SocketAddr,
    http_addresses: Vec<SocketAddr>,
    https_addresses: Vec<SocketAddr>,
    ratelimit_service_addresses: Vec<SocketAddr>,
    forward_auth_addresses: Vec<SocketAddr>,
    metrics_addresses: Vec<SocketAddr>,
}

impl Gateway {
    pub fn start(toml: &str) -> Gateway {
        Gateway::start_at(toml, START_S)
    }

    /// Starts with the clock at a time in Unix seconds.
    pub fn start_at(toml: &str, unix_s: u64) -> Gateway {
        Gateway::start_config(parse_config(toml, &[]), unix_s)
    }

    /// Starts with these contents of the file `clients.toml`.
    pub fn start_with(toml: &str, clients: &str) -> Gateway {
        Gateway::start_with_files(toml, &[("clients.toml", clients)])
    }

    /// Starts with these files, each a name and its contents.
    pub fn start_with_files(toml: &str, files: &[(&str, &str)]) -> Gateway {
        Gateway::start_config(parse_config(toml, files), START_S)
    }

    /// As [`Gateway::start_with`], with the clock at a time in Unix seconds.
    pub fn start_with_at(toml: &str, clients: &str, unix_s: u64) -> Gateway {
        Gateway::start_config(parse_config(toml, &[("clients.toml", clients)]), unix_s)
    }

    fn start_config(config: Config, unix_s: u64) -> Gateway {
        panic_watch::install_hook();
        let clock = Clock::manual(unix_s * 1000);
        let inner = server::Gateway::start(config, clock.clone()).unwrap();
        let none = SocketAddr::from(([127, 0, 0, 1], 0));
        let tcp = |addresses: &[ListenAddress]| addresses.iter().filter_map(ListenAddress::tcp).collect::<Vec<_>>();
        let http_addresses = tcp(inner.http());
        Gateway {
            clock,
            http: http_addresses.first().copied().unwrap_or(none),
            admin: inner.admin().and_then(ListenAddress::tcp).unwrap_or(none),
            http_addresses,
            https_addresses: tcp(inner.https()),
            ratelimit_service_addresses: tcp(inner.ratelimit_service()),
            forward_auth_addresses: tcp(inner.forward_auth()),
            metrics_addresses: tcp(inner.metrics()),
            inner: Some(inner),
        }
    }

    /// All addresses of TCP, in the order of the configuration.
    pub fn http_addresses(&self) -> &[SocketAddr] {
        &self.http_addresses
    }

    /// The addresses with TLS, in the order of the configuration.
    pub fn https_addresses(&self) -> &[SocketAddr] {
        &self.https_addresses
    }

    pub fn ratelimit_service_addresses(&self) -> &[SocketAddr] {
        &self.ratelimit_service_addresses
    }

    /// The addresses on which proxies ask.
    pub fn forward_auth_addresses(&self) -> &[SocketAddr] {
        &self.forward_auth_addresses
    }

    /// The addresses that serve only metrics.
    pub fn metrics_addresses(&self) -> &[SocketAddr] {
        &self.metrics_addresses
    }

    pub fn client(&self) -> Client {
        Client::connect(self.http)
    }

    /// One request on a new connection.
    pub fn get(&self, target: &str) -> HttpResponse {
        self.client().get(target)
    }

    pub fn get_with(&self, target: &str, fields: &[(&str, &str)]) -> HttpResponse {
        self.client().get_with(target, fields)
    }

    /// One request from a loopback address.
    pub fn get_from(&self, address: &str, fields: &[(&str, &str)]) -> HttpResponse {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&format!("{address}:0").parse::<SocketAddr>().unwrap().into()).unwrap();
        socket.connect(&self.http.into()).unwrap();
        Client::from_tcp(socket.into()).get_with("/a", fields)
    }

    /// A query of the decision API.
    pub fn decision(&self, operation: &str, query: &serde_json::Value) -> HttpResponse {
        Client::connect(self.admin).post(&format!("/v1/{operation}"), query.to_string())
    }

    pub fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    pub fn advance_s(&self, seconds: u64) {
        self.advance(Duration::from_secs(seconds));
    }

    /// Reloads the configuration. Workers apply it a little later, one after the other.
    pub fn reload(&mut self, toml: &str) {
        self.reload_with(toml, "");
    }

    /// As [`Gateway::reload`], and waits until the workers have applied the configuration: until many connections in a row get
    /// the response of an additional route.
    pub fn reload_and_wait(&mut self, toml: &str) {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let probe = format!("/reload-probe-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        self.reload(&format!("{toml}\n[[routes]]\npath = \"{probe}\"\nrespond = {{ status = 204 }}\n"));
        eventually("the workers have applied the configuration", || (0..16).all(|_| self.get(&probe).status == 204));
    }

    pub fn reload_with(&mut self, toml: &str, clients: &str) {
        self.inner.as_mut().unwrap().reload(parse_config(toml, &[("clients.toml", clients)])).unwrap();
    }

    /// Reloads a configuration that has to be refused, and returns the reason.
    pub fn refused_reload(&mut self, toml: &str) -> String {
        self.inner.as_mut().unwrap().reload(parse_config(toml, &[])).unwrap_err().to_string()
    }

    /// Compiles the limits that clients of the store have got, which `cli::run` does when they change. Whether there were some.
    pub fn compile_limits(&mut self) -> bool {
        let gateway = self.inner.as_mut().unwrap();
        let compiler = gateway.limits_compiler();
        compiler.map(|compile| gateway.use_limits(compile())).is_some()
    }

    /// Ends the limits of clients whose time has come, which `cli::run` does at that time.
    pub fn end_limits(&self) {
        self.inner.as_ref().unwrap().end_limits();
    }

    /// Drains the gateway, and returns when all of its threads have ended.
    pub fn stop(mut self) {
        self.inner.take().unwrap().drain();
    }

    /// A scrape, checked to be valid.
    pub fn metrics(&self) -> Exposition {
        let response =
            Client::connect(self.admin).get_with("/metrics", &[("Host", &self.admin.to_string())]).expect(200);
        Exposition::parse(&response.text())
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        drop(self.inner.take());
        panic_watch::assert_no_panic();
    }
}

/// Parses a configuration, with ports chosen by the system unless it sets `listen`.
fn parse_config(toml: &str, named: &[(&str, &str)]) -> Config {
    let toml = with_listen(toml);
    let files = |path: &Path| match named.iter().find(|(name, _)| path == Path::new(name)) {
        Some((_, text)) => Ok(text.as_bytes().to_vec()),
        None => std::fs::read(path),
    };
    transom_config::read_with_files(&toml, &files).unwrap_or_else(|problems| panic!("{problems:?}\n{toml}"))
}

pub fn with_listen(toml: &str) -> String {
    if toml.contains("[listen]") || toml.contains("listen =") {
        toml.to_owned()
    } else {
        // The clients of the tests send the same Host to the admin address as to the others.
        let admin =
            if toml.contains("[admin]") { String::new() } else { format!("admin = {{ hosts = [\"{HOST}\"] }}\n") };
        format!("listen = {{ http = \"127.0.0.1:0\", admin = \"127.0.0.1:0\" }}\n{admin}{toml}")
    }
}
