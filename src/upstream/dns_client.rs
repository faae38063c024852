//! Asks DNS servers for records: those that the configuration names, or those of `/etc/resolv.conf`.
//!
//! The system's resolver (`dns.rs`) knows addresses only, and no other servers than the system's. There is no cache: the
//! callers keep what they have found for as long as its time to live says.

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use super::dns_message::{FORMAT_ERROR, Record, RecordType, Response, parse_response, query, without_opt};
use transom_config::upstream::parse_dns_server;

const RESOLV_CONF: &str = "/etc/resolv.conf";
const DNS_PORT: u16 = 53;
/// As of the resolver of glibc.
const TIMEOUT: Duration = Duration::from_secs(5);
const TIMEOUT_MAX: u64 = 30;
const ATTEMPTS: usize = 2;
const ATTEMPTS_MAX: usize = 5;
const NDOTS_MAX: usize = 15;
const SERVERS_MAX: usize = 3;
/// Of configured servers, which are usually near.
const CONFIGURED_TIMEOUT: Duration = Duration::from_secs(2);
/// Responses over UDP are shorter, as the query asks.
const UDP_BUFFER_BYTES: usize = 4096;
const NO_ERROR: u16 = 0;
const NAME_ERROR: u16 = 3;

/// The records of a name.
#[derive(Debug)]
pub struct Found {
    pub records: Vec<Record>,
    /// The shortest time to live.
    pub ttl: Duration,
}

/// Why there are no records.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LookUpError {
    InvalidName,
    /// The name does not exist, or has no records of this type.
    NotFound,
    /// No server gave a usable answer.
    Failed(String),
}

impl fmt::Display for LookUpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LookUpError::InvalidName => f.write_str("the name is not valid"),
            LookUpError::NotFound => f.write_str("there is no such record"),
            LookUpError::Failed(why) => f.write_str(why),
        }
    }
}

/// The records of a name, from these servers, or from those of the system where the list is empty.
pub async fn look_up(servers: &[SocketAddr], name: &str, record_type: RecordType) -> Result<Found, LookUpError> {
    let settings = match servers {
        [] => ResolverSettings::of_system(),
        _ => ResolverSettings { servers: servers.to_vec(), timeout: CONFIGURED_TIMEOUT, ..ResolverSettings::default() },
    };
    let mut result = Err(LookUpError::InvalidName);
    for name in settings.candidates(name) {
        result = settings.ask(&name, record_type).await;
        // A server that gives no answer gives none about other names.
        if !matches!(result, Err(LookUpError::NotFound | LookUpError::InvalidName)) {
            break;
        }
    }
    result
}

/// Which servers are asked, and how.
#[derive(PartialEq, Eq, Debug)]
struct ResolverSettings {
    servers: Vec<SocketAddr>,
    /// Domains that names are completed with.
    search: Vec<String>,
    /// Dots with which a name is first asked for as it is.
    ndots: usize,
    timeout: Duration,
    attempts: usize,
}

impl Default for ResolverSettings {
    fn default() -> ResolverSettings {
        ResolverSettings { servers: Vec::new(), search: Vec::new(), ndots: 1, timeout: TIMEOUT, attempts: ATTEMPTS }
    }
}

impl ResolverSettings {
    fn of_system() -> ResolverSettings {
        ResolverSettings::parse(&std::fs::read_to_string(RESOLV_CONF).unwrap_or_default())
    }

    /// Reads `resolv.conf(5)`. What is not known is ignored.
    fn parse(text: &str) -> ResolverSettings {
        let mut settings = ResolverSettings::default();
        for line in text.lines().filter(|line| !line.starts_with(['#', ';'])) {
            let mut words = line.split_ascii_whitespace();
            match words.next() {
                Some("nameserver") if settings.servers.len() < SERVERS_MAX => {
                    settings.servers.extend(words.next().and_then(|word| parse_dns_server(word).ok()));
                }
                // The last one applies.
                Some("search" | "domain") => {
                    settings.search = words.map(|domain| domain.trim_end_matches('.').to_owned()).collect();
                }
                Some("options") => words.for_each(|option| settings.set_option(option)),
                _ => {}
            }
        }
        if settings.servers.is_empty() {
            settings.servers.push((Ipv4Addr::LOCALHOST, DNS_PORT).into());
        }
        settings
    }

    fn set_option(&mut self, option: &str) {
        let Some((name, Ok(value))) = option.split_once(':').map(|(name, value)| (name, value.parse::<usize>())) else {
            return;
        };
        match name {
            "ndots" => self.ndots = value.min(NDOTS_MAX),
            "timeout" => self.timeout = Duration::from_secs((value as u64).clamp(1, TIMEOUT_MAX)),
            "attempts" => self.attempts = value.clamp(1, ATTEMPTS_MAX),
            _ => {}
        }
    }

    /// The complete names that a name may stand for, in the order in which they are asked for.
    fn candidates(&self, name: &str) -> Vec<String> {
        if name.ends_with('.') {
            return vec![name.to_owned()];
        }
        let mut names: Vec<String> = self.search.iter().map(|domain| format!("{name}.{domain}")).collect();
        let is_first = name.matches('.').count() >= self.ndots;
        names.insert(if is_first { 0 } else { names.len() }, name.to_owned());
        names
    }

    /// Asks the servers, one after the other.
    async fn ask(&self, name: &str, record_type: RecordType) -> Result<Found, LookUpError> {
        let mut problem = String::from("there is no name server");
        for _ in 0..self.attempts {
            for server in &self.servers {
                let id = getrandom::u32().map_err(|error| LookUpError::Failed(error.to_string()))? as u16;
                let query = query(id, name, record_type).ok_or(LookUpError::InvalidName)?;
                match timeout(self.timeout, exchange(*server, &query)).await {
                    Err(_elapsed) => problem = format!("{server} does not respond"),
                    Ok(Err(error)) => problem = format!("{server}: {error}"),
                    Ok(Ok(Response { code: NO_ERROR, records, .. })) if !records.is_empty() => {
                        let ttl_s = records.iter().map(|(_, ttl_s)| *ttl_s).min().unwrap_or(0);
                        let records = records.into_iter().map(|(record, _)| record).collect();
                        return Ok(Found { records, ttl: Duration::from_secs(ttl_s.into()) });
                    }
                    Ok(Ok(Response { code: NO_ERROR | NAME_ERROR, .. })) => return Err(LookUpError::NotFound),
                    Ok(Ok(Response { code, .. })) => problem = format!("{server} responded with error {code}"),
                }
            }
        }
        Err(LookUpError::Failed(problem))
    }
}

/// Asks over UDP, and over TCP if the response is too long for UDP.
async fn exchange(server: SocketAddr, query: &[u8]) -> io::Result<Response> {
    let local: IpAddr = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((local, 0)).await?;
    // Packets of other senders are dropped.
    socket.connect(server).await?;
    socket.send(query).await?;
    let (mut query, mut has_opt) = (Cow::Borrowed(query), true);
    let mut buffer = vec![0; UDP_BUFFER_BYTES];
    loop {
        let length = socket.recv(&mut buffer).await?;
        match parse_response(&buffer[..length], &query) {
            Some(Response { code: FORMAT_ERROR, .. }) if has_opt => {
                (query, has_opt) = (Cow::Owned(without_opt(&query)), false);
                socket.send(&query).await?;
            }
            Some(response) if response.is_truncated => return exchange_over_tcp(server, &query).await,
            Some(response) => return Ok(response),
            // Not the response to this query, which may still arrive.
            None => {}
        }
    }
}

async fn exchange_over_tcp(server: SocketAddr, query: &[u8]) -> io::Result<Response> {
    let mut stream = TcpStream::connect(server).await?;
    let message = [&(query.len() as u16).to_be_bytes(), query].concat();
    stream.write_all(&message).await?;
    let mut response = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut response).await?;
    match parse_response(&response, query) {
        Some(response) if response.is_truncated => Err(io::Error::other("the response over TCP is truncated")),
        Some(response) => Ok(response),
        None => Err(io::Error::other("the response is malformed")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolv_conf_is_read() {
        let text = "# A comment\nnameserver 10.0.0.53\nnameserver fd00::53\nnameserver x\nsearch ignored\n\
                    search default.svc.cluster.local svc.cluster.local.\noptions ndots:5 timeout:1 attempts:9 rotate\n";
        let settings = ResolverSettings::parse(text);
        let servers = ["10.0.0.53:53", "[fd00::53]:53"].map(|server| server.parse().unwrap());
        assert_eq!(settings.servers, servers);
        assert_eq!((settings.ndots, settings.timeout.as_secs(), settings.attempts), (5, 1, ATTEMPTS_MAX));
        assert_eq!(
            settings.candidates("_http._tcp.api"),
            ["_http._tcp.api.default.svc.cluster.local", "_http._tcp.api.svc.cluster.local", "_http._tcp.api"]
        );
        assert_eq!(settings.candidates("api."), ["api."]);
        let settings = ResolverSettings::parse("search example.internal");
        assert_eq!(settings.servers, ["127.0.0.1:53".parse().unwrap()]);
        assert_eq!(settings.candidates("a.b"), ["a.b", "a.b.example.internal"]);
        assert_eq!(settings.candidates("a"), ["a.example.internal", "a"]);
    }
}
