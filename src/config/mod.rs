//! The configuration as the gateway runs it: complete, checked, with every default filled in.
//!
//! A [`Config`] can only come out of [`read`], so whoever holds one need not check again. The way there is `document`
//! (TOML with the place of everything), `check` (what it says becomes a value, or a problem), `problem` (what is wrong,
//! where, and the fix) and `secret` (what of it nobody is shown). `clients` is what a second file says, `listen`,
//! `certificate` and `revocation` what the sockets need to know, `client_tls` how the gateway is a client of TLS;
//! `balance` what an upstream says about its servers as a group; `action` what routes change on the way; `shared` where
//! gateways count together; `outlook` what the rules amount to. This room opens no file but what belongs to the system,
//! the time-zone database and the roots that it trusts, and knows no socket: what other files hold is handed in.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::jwt::Trust;
use transom_limiter::ip_prefix::Network;
use transom_limiter::rule::Rule;

pub mod certificate;
pub mod check;
pub mod client_tls;
pub mod clients;
pub mod crl;
pub mod diagnostics;
pub mod lint;
pub mod listen;
pub mod redaction;
pub mod redis;
pub mod route_actions;
pub mod toml_reader;
pub mod upstream_policy;

use client_tls::ClientTls;
use clients::Clients;
use diagnostics::Problem;
use listen::Listen;
use redis::StoreConfig;
use route_actions::Actions;
use upstream_policy::UpstreamPolicy;

/// Everything that `gateway.toml` says.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    pub listen: Listen,
    pub admin: Admin,
    /// Event loops; `None`: one per core that the process may run on.
    pub workers: Option<usize>,
    /// Where the id of the process that serves is written.
    pub pid_file: Option<PathBuf>,
    pub counters: Counters,
    pub timeouts: Timeouts,
    pub http2: Http2,
    pub limits: Limits,
    /// Whom to believe about whom they were asked by.
    pub trusted_proxies: Option<TrustedProxies>,
    pub access_log: Option<AccessLog>,
    /// Who is on which plan.
    pub clients: Option<Clients>,
    /// Whose tokens are believed, where a rule counts by a claim.
    pub jwt: Option<Trust>,
    /// How the path of a request is read.
    pub path_reading: PathReading,
    /// Which path goes upstream.
    pub forward_path: ForwardPath,
    pub upstreams: Vec<Upstream>,
    pub rules: Vec<Rule>,
    /// Which fields tell a client about a rule, per rule, in the order of `rules`.
    pub rate_limit_styles: Vec<RateLimitStyle>,
    /// What refusals by a rule look like, per rule, in the order of `rules`.
    pub refusal_responses: Vec<RefusalResponse>,
    pub routes: Vec<Route>,
}

/// What holds at the admin address.
#[derive(Clone, PartialEq, Debug)]
pub struct Admin {
    /// Names by which it may be asked beside `localhost` and IP addresses, in lower case; `*.` stands for any labels.
    pub hosts: Vec<String>,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Counters {
    /// Open windows that the table can hold.
    pub capacity: usize,
    /// What memory the counters lie in, so that they outlive the process.
    pub file: Option<PathBuf>,
    /// Where they are written down, so that they outlive the machine.
    pub snapshot: Option<PathBuf>,
    pub snapshot_every: Duration,
    /// Where gateways count together.
    pub shared: Option<StoreConfig>,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Timeouts {
    /// From the connection until the PROXY header is there, where one is due.
    pub proxy_protocol: Duration,
    /// Until a TLS handshake is complete.
    pub tls_handshake: Duration,
    /// From the connection, or from the answer before, until the head of a request is complete.
    pub request_head: Duration,
    /// Until a connection to an upstream server stands.
    pub connect: Duration,
    /// From the end of the request until the head of the upstream's answer.
    pub response_head: Duration,
    /// How long a body may stand still on its way, in either direction.
    pub body: Duration,
    /// How long an idle upstream connection is kept.
    pub upstream_idle: Duration,
    /// How long a tunnel may be silent in both directions.
    pub tunnel: Duration,
    /// How long requests may take to finish once the gateway is told to stop.
    pub drain: Duration,
    /// How long a new process may take until it can take the place of this one.
    pub upgrade: Duration,
    /// From sending a request on to the last byte of its answer, whatever is tried; `None`: as long as it moves.
    pub request: Option<Duration>,
}

/// What clients may do on one HTTP/2 connection.
#[derive(Clone, PartialEq, Debug)]
pub struct Http2 {
    /// Whether it is spoken in the clear, to clients that begin with it.
    pub h2c: bool,
    /// Requests at the same time.
    pub max_concurrent_streams: u32,
    /// How long a connection without a request is kept.
    pub idle: Duration,
    /// How often a client is asked whether it is still there; `None`: never.
    pub ping: Option<Duration>,
    /// Requests that a client may give up in a second.
    pub max_resets: u32,
    /// Frames that are neither request nor body, in a second.
    pub max_control_frames: u32,
}

/// How much a request may be, and how little of it may move.
#[derive(Clone, PartialEq, Debug)]
pub struct Limits {
    /// Of a request's head, in bytes.
    pub request_head: usize,
    /// Fields of a request's head.
    pub request_fields: usize,
    /// Bytes of a request's body; `None`: any number.
    pub max_body: Option<u64>,
    /// Bytes of a request's body that a client has to send each second; 0: any number.
    pub min_request_rate: u64,
    /// Over how long that is looked at.
    pub rate_grace: Duration,
    /// Bytes of an answer that a client has to take each second, over `Timeouts::body`; 0: any number.
    pub min_response_rate: u64,
}

/// Proxies in front of the gateway, and how they tell whom they were asked by.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TrustedProxies {
    pub networks: Vec<Network>,
    pub field: ForwardedField,
}

/// The field that a proxy tells it in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ForwardedField {
    XForwardedFor,
    /// RFC 7239.
    Forwarded,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AccessLog {
    Stdout,
    File(PathBuf),
}

/// How the path of a request is read, for routes and rules alike. What goes upstream is [`ForwardPath`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathReading {
    pub encoded_slash: EncodedSlash,
    pub parameters: PathParameters,
    pub trailing_slash: TrailingSlash,
}

impl PathReading {
    /// Parameters and a slash at the end stay what they are, as in a path that is made for the upstream.
    pub fn verbatim(encoded_slash: EncodedSlash) -> PathReading {
        PathReading { encoded_slash, parameters: PathParameters::Keep, trailing_slash: TrailingSlash::Keep }
    }
}

/// What a `;` in a segment of a path means, and what stands behind it (RFC 3986, section 3.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PathParameters {
    /// They are ordinary bytes of the segment.
    Keep,
    /// The segment ends before them.
    Strip,
    /// The request is answered with 400.
    Refuse,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TrailingSlash {
    /// A path with one is another path than the one without.
    Keep,
    /// The path is the one without.
    Ignore,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EncodedSlash {
    /// `%2F` and `%5C` in a path are answered with 400: servers differ in what they mean.
    Refuse,
    /// They are ordinary bytes of a segment.
    Keep,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ForwardPath {
    /// The client's own bytes.
    Original,
    /// The path as it was matched.
    Normalized,
}

/// The fields with which answers tell a client about a rule.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RateLimitStyle {
    /// `RateLimit` and `RateLimit-Policy` (draft-ietf-httpapi-ratelimit-headers-11).
    Ietf,
    /// `X-RateLimit-Limit`, `-Remaining` and `-Reset`.
    Legacy,
    Both,
    Off,
}

/// What a refusal by a rule looks like, where the rule says so.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RefusalResponse {
    /// From 400 to 599.
    pub status: Option<u16>,
    /// Instead of the problem document.
    pub body: Option<Body>,
    /// Up to so many seconds are added to Retry-After, at random.
    pub retry_jitter_s: u64,
}

/// A body and its media type, which is sound as a field's value.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Body {
    pub text: String,
    pub content_type: String,
}

#[derive(Clone, PartialEq, Debug)]
pub struct Upstream {
    pub name: String,
    pub target: Target,
    /// How its servers are chosen; without a meaning for one that is built in.
    pub policy: UpstreamPolicy,
    pub transport: TransportSettings,
}

/// How the servers of an upstream are spoken to.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct TransportSettings {
    pub protocol: Protocol,
    pub host: HostField,
    /// For those reached by `https`; always there if one is.
    pub tls: Option<ClientTls>,
    /// How long the addresses of a name are believed.
    pub resolve: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Protocol {
    Http1,
    /// Without TLS: with prior knowledge.
    Http2,
    /// What the server chooses by ALPN; without TLS, HTTP/1.1.
    Auto,
}

/// What Host, or `:authority`, says to a server.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum HostField {
    /// What the client said.
    Keep,
    /// The host of the server's URL.
    Server,
    /// Always this, which is sound as a field's value.
    Fixed(String),
}

#[derive(Clone, PartialEq, Debug)]
pub enum Target {
    /// Answers by itself with what it received.
    Echo,
    Servers(Vec<Server>),
}

/// One server of an upstream.
#[derive(Clone, PartialEq, Debug)]
pub struct Server {
    /// As configured, such as `http://127.0.0.1:9001`; the metrics' label.
    pub url: String,
    pub scheme: Scheme,
    /// Host name or address, without brackets; of a Unix socket the path.
    pub host: String,
    /// 0 for a Unix socket.
    pub port: u16,
    /// Its share of the requests, relative to the others'; at least 1.
    pub weight: u32,
}

impl Server {
    /// Whether connections to the other are as good as connections to this one.
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

#[derive(Clone, PartialEq, Debug)]
pub struct Route {
    /// Unique; the metrics' label.
    pub name: String,
    /// Lower-case host names without port; `*.example.com` for all under a name; empty: any.
    pub hosts: Vec<String>,
    /// Upper-case; empty: any.
    pub methods: Vec<String>,
    /// Request fields that must be there, by lower-case name, and their value; `None`: any value.
    pub headers: Vec<(String, Option<String>)>,
    pub path: PathPattern,
    /// Whether it takes requests that came by https, or those that did not; `None`: both.
    pub secure: Option<bool>,
    /// What is changed on the way, if anything is.
    pub actions: Option<Box<Actions>>,
    /// Position in [`Config::upstreams`]; of no meaning where `actions` have an answer.
    pub upstream: usize,
    /// Whether clients may change over to WebSocket here.
    pub websocket: bool,
    /// Positions in [`Config::rules`].
    pub rules: Vec<usize>,
    /// What a request costs here under rules with a fixed cost, instead of what they say.
    pub cost: Option<u32>,
}

/// A path pattern, segment by segment.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct PathPattern {
    /// As configured.
    pub text: String,
    pub segments: Vec<Segment>,
}

/// Whether a character may stand in a segment of a path as it is: `pchar` of RFC 3986, section 3.3,
/// but for escapes. Patterns and paths are compared in the spelling that has it so.
pub fn is_pchar(byte: u8) -> bool {
    PCHAR[usize::from(byte)]
}

/// Why a segment in normal form still names no endpoint for certain, if it does not. What is written so is read by
/// some servers as something that it is not here:
/// - `..;x` as `..`, by those that take what is behind a semicolon off before they resolve dots;
/// - `login%0A` as `login`, where `$` of a pattern matches before a line end; other control characters end
///   texts, or are left out;
/// - `%C0%AF`, which is no UTF-8, as the `/` that it would be if more bytes than needed were allowed.
pub fn find_ambiguity(segment: &str) -> Option<&'static str> {
    let dots = segment.split(';').next().unwrap_or_default();
    if (dots == "." || dots == "..") && dots != segment {
        return Some("the path has dots before a semicolon");
    }
    let mut before = 0;
    for code in segment.split('%').skip(1) {
        let digits = code.get(..2).unwrap_or_default();
        let byte = u8::from_str_radix(digits, 16).unwrap_or_default();
        if byte.is_ascii_control() {
            return Some("the path contains an encoded control character");
        }
        if let (0xC0 | 0xC1, 0x80..=0xBF) | (0xE0, 0x80..=0x9F) | (0xF0, 0x80..=0x8F) = (before, byte) {
            return Some("the path contains an overlong encoding of a character");
        }
        // Only codes that follow each other are one character.
        before = if code.len() == 2 { byte } else { 0 };
    }
    None
}

const PCHAR: [bool; 256] = byte_set(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!$&'()*+,;=:@");

/// Which bytes are among these, to be looked up.
pub const fn byte_set(bytes: &[u8]) -> [bool; 256] {
    let mut set = [false; 256];
    let mut i = 0;
    while i < bytes.len() {
        set[bytes[i] as usize] = true;
        i += 1;
    }
    set
}

impl PathPattern {
    /// The names of the parameters, in their order.
    pub fn param_names(&self) -> Vec<&str> {
        let names = self.segments.iter().filter_map(|segment| match segment {
            Segment::Param(name) | Segment::Rest(name) => Some(name.as_str()),
            Segment::Literal(_) => None,
        });
        names.collect()
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Segment {
    Literal(String),
    /// `{name}`: one segment that is not empty.
    Param(String),
    /// `{*name}`: what is left of the path, down to nothing; always last.
    Rest(String),
}

/// What a file holds that the configuration names.
pub type ReadFile<'f> = &'f dyn Fn(&Path) -> io::Result<Vec<u8>>;

/// Reads a configuration that names no other files to read, or returns everything that is wrong
/// with it.
pub fn read(text: &str) -> Result<Config, Vec<Problem>> {
    read_with_files(text, &|_path| Err(io::Error::from(io::ErrorKind::Unsupported)))
}

/// Reads a configuration and the files that it names, or returns everything that is wrong.
pub fn read_with_files(text: &str, files: ReadFile) -> Result<Config, Vec<Problem>> {
    check::read_config(text, files, &|_name| None)
}

/// What a variable of the environment holds, if it is set.
pub type ReadVariable<'v> = &'v dyn Fn(&str) -> Option<Vec<u8>>;

/// As [`read_with`], for a configuration that may name variables of the environment as well.
pub fn read_with_files_and_variables(
    text: &str,
    files: ReadFile,
    variables: ReadVariable,
) -> Result<Config, Vec<Problem>> {
    check::read_config(text, files, variables)
}
