//! Upstreams: their servers, how connections to them are made, and how the servers are chosen, checked and protected.
//!
//! Plain data, already checked.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::client_tls::ClientTls;
use transom_limiter::key::KeyPart;

#[derive(Clone, PartialEq, Debug)]
pub struct Upstream {
    pub name: String,
    pub target: Target,
    /// Meaningless for a built-in target.
    pub policy: UpstreamPolicy,
    pub transport: TransportSettings,
}

#[derive(Clone, PartialEq, Debug)]
pub enum Target {
    /// Built in: responds with the request that it received.
    Echo,
    Servers(Vec<Server>),
}

/// One server of an upstream.
#[derive(Clone, PartialEq, Debug)]
pub struct Server {
    /// As configured, such as `http://127.0.0.1:9001`; used as a metrics label.
    pub url: String,
    pub scheme: Scheme,
    /// Host name or address, without brackets; the path of a Unix socket.
    pub host: String,
    /// 0 for a Unix socket.
    pub port: u16,
    /// Share of the requests, relative to the other servers; at least 1.
    pub weight: u32,
}

impl Server {
    /// Whether connections to one can be used for the other.
    pub fn equals_except_weight(&self, other: &Server) -> bool {
        *self == Server { weight: self.weight, ..other.clone() }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scheme {
    Http,
    Https,
    Unix,
}

/// How connections to the servers are made and used.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TransportSettings {
    pub protocol: Protocol,
    pub host: HostField,
    /// Present if a server has an `https` URL.
    pub tls: Option<ClientTls>,
    /// How long resolved addresses are used before the name is resolved again.
    pub resolve: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Protocol {
    Http1,
    /// Without TLS: with prior knowledge.
    Http2,
    /// Chosen by the server through ALPN; HTTP/1.1 without TLS.
    Auto,
}

/// The value of Host or `:authority` in forwarded requests.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum HostField {
    /// As the client sent it.
    Keep,
    /// The host of the server's URL.
    Server,
    /// This text, which is valid as a field value.
    Fixed(String),
}

/// Load balancing, health and limits of an upstream's servers.
#[derive(Clone, PartialEq, Debug)]
pub struct UpstreamPolicy {
    pub balance: LoadBalancing,
    /// How long the share of a recovered server takes to grow to its full size; zero: no slow start.
    pub slow_start: Duration,
    /// `None`: no active health checks.
    pub health: Option<HealthChecks>,
    /// `None`: failed requests do not eject servers.
    pub ejection: Option<Ejection>,
    pub retries: Retries,
    pub limits: UpstreamLimits,
}

#[derive(Clone, PartialEq, Debug)]
pub enum LoadBalancing {
    /// Of two random servers, the one with fewer requests in flight.
    LeastRequests,
    RoundRobin,
    /// The same server for the same values of these parts of the request, while the server is available.
    Hash(Vec<KeyPart>),
}

/// Active health checks.
#[derive(Clone, PartialEq, Debug)]
pub struct HealthChecks {
    /// With query; valid as a request target.
    pub path: String,
    /// Upper-case.
    pub method: String,
    /// `None`: the server's address.
    pub host: Option<String>,
    pub interval: Duration,
    pub timeout: Duration,
    /// Successful checks in a row that make a server healthy.
    pub healthy_after: u32,
    /// Failed checks in a row that make a server unhealthy.
    pub unhealthy_after: u32,
    /// Status codes of a successful check.
    pub statuses: Vec<RangeInclusive<u16>>,
}

/// Passive health checks: ejection of servers that fail requests.
#[derive(Clone, PartialEq, Debug)]
pub struct Ejection {
    /// Failures in a row that eject a server.
    pub failures: u32,
    /// Status codes that count as failures.
    pub statuses: Vec<u16>,
    /// Length of the first ejection; each further one is twice as long.
    pub time: Duration,
    pub max_time: Duration,
    /// Maximum share of ejected servers, in percent; one may always be ejected.
    pub max_ejected: u8,
}

/// Repeated attempts to forward a request, where a repetition is safe.
#[derive(Clone, PartialEq, Debug)]
pub struct Retries {
    /// Attempts after the first. `None`: one for each other server, at most two.
    pub attempts: Option<u32>,
    pub on_connect_failure: bool,
    pub on_reset: bool,
    /// After `try_timeout`.
    pub on_timeout: bool,
    pub on_statuses: Vec<u16>,
    /// From the start of an attempt to the head of its response, for requests that can be repeated.
    pub try_timeout: Option<Duration>,
    /// Retries, in percent of the requests.
    pub budget: u32,
    /// Retries per second that are allowed in addition to the budget, in the whole process.
    pub budget_min: u32,
}

/// Limits on connections and requests; all count in the whole process.
#[derive(Clone, PartialEq, Debug)]
pub struct UpstreamLimits {
    /// Connections to each server.
    pub max_connections: Option<u32>,
    /// Idle connections to each server that stay open.
    pub max_idle_connections: u32,
    /// Requests that wait for a connection.
    pub max_pending: u32,
    /// Requests in flight.
    pub max_requests: Option<u32>,
}

impl Default for UpstreamPolicy {
    fn default() -> UpstreamPolicy {
        UpstreamPolicy {
            balance: LoadBalancing::LeastRequests,
            slow_start: Duration::ZERO,
            health: None,
            ejection: Some(Ejection::default()),
            retries: Retries::default(),
            limits: UpstreamLimits::default(),
        }
    }
}

impl Default for HealthChecks {
    fn default() -> HealthChecks {
        HealthChecks {
            path: String::from("/"),
            method: String::from("GET"),
            host: None,
            interval: Duration::from_secs(10),
            timeout: Duration::from_secs(5),
            healthy_after: 2,
            unhealthy_after: 3,
            statuses: vec![200..=299],
        }
    }
}

impl Default for Ejection {
    fn default() -> Ejection {
        Ejection {
            failures: 5,
            statuses: Vec::new(),
            time: Duration::from_secs(10),
            max_time: Duration::from_secs(300),
            max_ejected: 50,
        }
    }
}

impl Default for Retries {
    fn default() -> Retries {
        Retries {
            attempts: None,
            on_connect_failure: true,
            on_reset: true,
            on_timeout: true,
            on_statuses: Vec::new(),
            try_timeout: None,
            budget: 20,
            budget_min: 10,
        }
    }
}

impl Retries {
    pub fn none() -> Retries {
        Retries { attempts: Some(0), ..Retries::default() }
    }
}

impl Default for UpstreamLimits {
    fn default() -> UpstreamLimits {
        UpstreamLimits { max_connections: None, max_idle_connections: 10_000, max_pending: 1024, max_requests: None }
    }
}
