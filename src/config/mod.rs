//! The checked configuration: every setting with its default filled in.
//!
//! A [`Config`] is made by [`read`] only, so its users need not check it again. `toml_reader` parses TOML with
//! positions, `check` turns tables into values or reports problems, `diagnostics` renders problems, `redaction` masks
//! secrets, and `lint` reports valid settings that are probably mistakes. The module opens no files except the system's
//! time-zone database and root certificates: callers pass in the contents of all others.

use std::path::PathBuf;

use crate::jwt::token::TokenVerifier;
use transom_limiter::ip_prefix::Network;
use transom_limiter::key::KeyPart;
use transom_limiter::rule::Rule;
use transom_limiter::secret_digest::Digest;

#[macro_use]
pub mod settings;

pub mod certificate;
pub mod check;
pub mod client_tls;
pub mod counters;
pub mod diagnostics;
pub mod host;
pub mod limits;
pub mod lint;
pub mod listen;
pub mod path;
pub mod redaction;
pub mod redis;
pub mod response_body;
pub mod route;
pub mod route_actions;
pub mod template;
pub mod toml_reader;
pub mod upstream;

use counters::Counters;
use diagnostics::{Problem, ReadFile, ReadVariable, Report};
use limits::{Http2, Limits, Timeouts};
use listen::{Admin, Listen};
use path::{ForwardPath, PathReading};
use response_body::Body;
use route::Route;
use settings::{Choice, Integer, Optional, Required, Word};
use toml_reader::SpannedStr;
use upstream::Upstream;

/// All settings of `gateway.toml` and of the clients file.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    pub general: General,
    pub listen: Listen,
    pub admin: Admin,
    pub counters: Counters,
    pub timeouts: Timeouts,
    pub http2: Http2,
    pub limits: Limits,
    pub access_log: Option<AccessLog>,
    /// Clients of the clients file.
    pub clients: Option<Clients>,
    /// Keys and conditions for valid tokens. Present if a rule or the clients use a claim.
    pub jwt: Option<TokenVerifier>,
    /// How request paths are normalized for routes and rules.
    pub path_reading: PathReading,
    pub upstreams: Vec<Upstream>,
    pub rules: Vec<Rule>,
    /// The rate-limit header fields for each rule, in the order of `rules`.
    pub rate_limit_styles: Vec<RateLimitStyle>,
    /// The refusal responses of each rule, in the order of `rules`.
    pub refusal_responses: Vec<RefusalResponse>,
    pub routes: Vec<Route>,
}

settings! {
    /// Settings without a section.
    pub struct General {
        /// Number of workers (event loops). Without it: one per core that the process may use.
        workers: Option<usize> = Optional(Integer(4, 1..=1024));
        /// File with the id of the serving process. It is replaced atomically once the gateway serves, and removed at exit.
        /// `transom upgrade` reads it.
        pid_file: Option<PathBuf> =
            Word { shape: "path of a file", example: "\"/run/transom/pid\"", read: read_pid_file };
        /// Rate limit fields in responses, for rules without their own `headers`. `"ietf"`: `RateLimit` and
        /// `RateLimit-Policy`, joined with fields of these names from the upstream. `"legacy"`: `X-RateLimit-Limit`,
        /// `-Remaining`, `-Reset` (seconds from now) of the layer nearest its limit.
        headers: RateLimitStyle = Choice(RateLimitStyle::Ietf, &RATE_LIMIT_STYLES);
        /// Path sent to the upstream: the bytes of the client, or the path as it was matched.
        forward_path: ForwardPath = Choice(
            ForwardPath::Original,
            &[("original", ForwardPath::Original), ("normalized", ForwardPath::Normalized)],
        );
    }
}

fn read_pid_file(word: &SpannedStr, report: &mut Report) -> Option<PathBuf> {
    if word.text.is_empty() {
        let fix = "write `pid_file = \"/run/transom/pid\"`, or remove it";
        return report.reject(word.span.clone(), "`pid_file` is empty", fix);
    }
    Some(PathBuf::from(word.text))
}

/// `headers` of the configuration and of rules.
pub const RATE_LIMIT_STYLES: [(&str, RateLimitStyle); 4] = [
    ("ietf", RateLimitStyle::Ietf),
    ("legacy", RateLimitStyle::Legacy),
    ("both", RateLimitStyle::Both),
    ("off", RateLimitStyle::Off),
];

/// Where the access log is written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AccessLog {
    Stdout,
    File(PathBuf),
}

settings! {
    /// The access log.
    pub struct AccessLogSettings {
        /// File of the access log. A relative path starts at the working directory of the process.
        file: Option<AccessLog> = Required(
            Word { shape: "path, `\"stdout\"`", example: "\"stdout\"", read: read_access_log },
            ACCESS_LOG_FIX,
        );
    }
}

const ACCESS_LOG_FIX: &str = "write `file = \"stdout\"`, or the path of a file";

fn read_access_log(word: &SpannedStr, report: &mut Report) -> Option<AccessLog> {
    match word.text {
        "" => report.reject(word.span.clone(), "`file` is empty", ACCESS_LOG_FIX),
        "stdout" => Some(AccessLog::Stdout),
        path => Some(AccessLog::File(PathBuf::from(path))),
    }
}

/// `[clients]` and the clients file: named clients, their plans, and how requests are assigned to them.
#[derive(Clone, PartialEq, Debug)]
pub struct Clients {
    /// As configured.
    pub file: PathBuf,
    /// The part of a request that holds the API key.
    pub api_key: Option<KeyPart>,
    /// The part of a request that names the subject on whose behalf it is made.
    pub subject: Option<KeyPart>,
    /// In the order of the file.
    pub list: Vec<Client>,
}

/// One client: requests with one of its API keys or subjects, or from one of its networks.
#[derive(Clone, PartialEq, Debug)]
pub struct Client {
    pub name: String,
    pub plan: String,
    pub api_keys: Vec<Digest>,
    pub subjects: Vec<String>,
    pub networks: Vec<Network>,
}

/// The rate-limit header fields of responses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RateLimitStyle {
    /// `RateLimit` and `RateLimit-Policy` (draft-ietf-httpapi-ratelimit-headers-11).
    Ietf,
    /// `X-RateLimit-Limit`, `-Remaining` and `-Reset`.
    Legacy,
    Both,
    Off,
}

/// The response to requests that a rule refuses, as far as the rule configures it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RefusalResponse {
    /// From 400 to 599.
    pub status: Option<u16>,
    /// Replaces the problem document.
    pub body: Option<Body>,
    /// Upper bound in seconds of the random time that is added to Retry-After.
    pub retry_jitter_s: u64,
}

/// Reads a configuration that names no other files, or returns all its problems.
pub fn read(text: &str) -> Result<Config, Vec<Problem>> {
    check::read_config(Report::new(text))
}

/// Reads a configuration and the files that it names, or returns all problems.
pub fn read_with_files(text: &str, files: ReadFile) -> Result<Config, Vec<Problem>> {
    read_with_files_and_variables(text, files, &|_name| None)
}

/// Like [`read_with_files`], for a configuration that may also name environment variables.
pub fn read_with_files_and_variables(
    text: &str,
    files: ReadFile,
    variables: ReadVariable,
) -> Result<Config, Vec<Problem>> {
    check::read_config(Report::with_inputs(text, files, variables))
}
