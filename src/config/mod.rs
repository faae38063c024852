//! The checked configuration: every setting with its default filled in.
//!
//! A [`Config`] is made by [`read`] only, so its users need not check it again. `toml_reader` parses TOML with
//! positions, `settings` declares settings, the file of each section turns its table into values or reports problems,
//! and `check` does so for the whole file. `diagnostics` renders problems, `redaction` masks secrets, `lint` reports
//! valid settings that are probably mistakes, and `schema` prints the JSON schema. The module opens no files except the
//! system's time-zone database and root certificates: callers pass in the contents of all others.

use std::path::PathBuf;

use crate::jwt::token::TokenVerifier;
use transom_limiter::rule::Rule;

#[macro_use]
pub mod settings;

pub mod calendar;
pub mod certificate;
pub mod check;
pub mod client_tls;
pub mod clients;
pub mod count_when;
pub mod counters;
pub mod diagnostics;
pub mod host;
pub mod jwt;
pub mod key;
pub mod limits;
pub mod lint;
pub mod listen;
pub mod overrides;
pub mod path;
pub mod redaction;
pub mod redis;
pub mod response_body;
pub mod route;
pub mod route_actions;
pub mod rule;
pub mod schema;
pub mod template;
pub mod toml_reader;
pub mod upstream;
pub mod values;
pub mod window;

use clients::Clients;
use count_when::CountWhen;
use counters::Counters;
use diagnostics::{Problem, ReadFile, ReadVariable, Report};
use limits::{Http2, Limits, Timeouts};
use listen::{Admin, Listen};
use path::{ForwardPath, PathReading};
use route::Route;
use rule::{RATE_LIMIT_STYLES, RateLimitStyle, RefusalResponse};
use settings::{Choice, Integer, Optional, Required, Restart, Word};
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
    /// The responses whose requests each rule counts, in the order of `rules`; `None`: all.
    pub count_when: Vec<Option<CountWhen>>,
    pub routes: Vec<Route>,
}

settings! {
    /// Settings without a section.
    pub struct General {
        /// Number of workers (event loops). Without it: one per core that the process may use.
        workers: Option<usize> = Restart(Optional(Integer(4, 1..=1024)));
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
