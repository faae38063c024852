//! How an upstream's servers are chosen, watched and spared: what the configuration says about it,
//! complete and checked.

use std::ops::RangeInclusive;
use std::time::Duration;

use transom_limiter::key::KeyPart;

/// All that an upstream says about its servers as a group.
#[derive(Clone, PartialEq, Debug)]
pub struct UpstreamPolicy {
    pub balance: LoadBalancing,
    /// How long a server's share grows after it was away; zero: it is there at once.
    pub slow_start: Duration,
    /// `None`: nobody asks the servers how they are.
    pub health: Option<HealthChecks>,
    /// `None`: failures of requests keep nobody away.
    pub ejection: Option<Ejection>,
    pub retries: Retries,
    pub limits: UpstreamLimits,
}

#[derive(Clone, PartialEq, Debug)]
pub enum LoadBalancing {
    /// Of two servers at random, the one with fewer requests under way.
    LeastRequests,
    RoundRobin,
    /// One server for each value of these parts of the request, as long as it is there.
    Hash(Vec<KeyPart>),
}

/// Requests that the gateway makes by itself, to learn which servers work.
#[derive(Clone, PartialEq, Debug)]
pub struct HealthChecks {
    /// With its query; sound as a request target.
    pub path: String,
    /// Upper-case.
    pub method: String,
    /// `None`: the server's own address.
    pub host: Option<String>,
    pub interval: Duration,
    pub timeout: Duration,
    /// So many good answers in a row make a server healthy.
    pub healthy_after: u32,
    /// So many bad ones in a row make it unhealthy.
    pub unhealthy_after: u32,
    /// Which status codes are good.
    pub statuses: Vec<RangeInclusive<u16>>,
}

/// Keeping away from servers that fail requests.
#[derive(Clone, PartialEq, Debug)]
pub struct Ejection {
    /// So many failures in a row eject a server.
    pub failures: u32,
    /// Answers that are failures.
    pub statuses: Vec<u16>,
    /// How long the first time; twice as long each time after.
    pub time: Duration,
    pub max_time: Duration,
    /// Of the servers, in percent; one may always be ejected.
    pub max_ejected: u8,
}

/// Trying again, where that is safe.
#[derive(Clone, PartialEq, Debug)]
pub struct Retries {
    /// Tries after the first. `None`: one for each other server, and two at most.
    pub attempts: Option<u32>,
    pub on_connect_failure: bool,
    pub on_reset: bool,
    /// After `try_timeout`.
    pub on_timeout: bool,
    pub on_statuses: Vec<u16>,
    /// How long one try of a request that can be repeated may take until the head of its answer.
    pub try_timeout: Option<Duration>,
    /// Further tries, in percent of the requests.
    pub budget: u32,
    /// Further tries in a second that are allowed beside the budget, in the whole process.
    pub budget_min: u32,
}

/// What is too much for an upstream.
#[derive(Clone, PartialEq, Debug)]
pub struct UpstreamLimits {
    /// To each server, in the whole process.
    pub max_connections: Option<u32>,
    /// Connections without a request that are kept to each server, in the whole process.
    pub max_idle_connections: u32,
    /// Requests that wait for a connection, in the whole process.
    pub max_pending: u32,
    /// Requests under way, in the whole process.
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
    /// Never.
    pub fn none() -> Retries {
        Retries { attempts: Some(0), ..Retries::default() }
    }
}

impl Default for UpstreamLimits {
    fn default() -> UpstreamLimits {
        UpstreamLimits { max_connections: None, max_idle_connections: 10_000, max_pending: 1024, max_requests: None }
    }
}
