//! The checked configuration: every setting with its default filled in.
//!
//! A [`Config`] is made by [`read`] only, so its users need not check it again. `toml_reader` parses TOML with
//! positions, `settings` declares settings, the file of each section turns its table into values or reports problems,
//! and `check` does so for the whole file. `diagnostics` renders problems, `redaction` masks secrets, `lint` reports
//! valid settings that are probably mistakes, and `schema` prints the JSON schema. The crate opens no files except the
//! system's time-zone database and root certificates: callers pass in the contents of all others.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use transom_jwt::token::TokenVerifier;
use transom_limiter::handles;
use transom_limiter::handles::{IdVec, RuleId};
use transom_limiter::rule::Rule;

#[macro_use]
pub mod settings;

pub mod access;
pub mod acme;
pub mod body_condition;
pub mod byte_cost;
pub mod calendar;
pub mod certificate;
pub mod check;
pub mod client_grants;
pub mod client_limits;
pub mod client_tls;
pub mod clients;
pub mod count_when;
pub mod counters;
pub mod descriptor;
pub mod diagnostics;
mod foreign;
pub mod host;
pub mod jwt;
pub mod key;
pub mod key_format;
pub mod key_kind;
pub mod limits;
pub mod lint;
pub mod listen;
pub mod listen_address;
pub mod named_file;
pub mod notify;
pub mod overrides;
pub mod path;
pub mod redaction;
pub mod redis;
mod references;
pub mod response_body;
pub mod route;
pub mod route_actions;
pub mod rule;
pub mod schema;
mod sources;
pub mod span_export;
pub mod template;
pub mod toml_reader;
pub mod trusted_proxies;
pub mod upstream;
pub mod usage_cost;
pub mod values;
pub mod window;

use access::Access;
use body_condition::BODY_KEY_LIMIT;
use clients::Clients;
use counters::Counters;
use diagnostics::{Inputs, Problem, ReadFile, Report, quoted};
use jwt::KeySetSource;
use limits::{DrainSettings, Http2, Limits, Timeouts};
use listen::{Admin, Listen};
use notify::Notify;
use path::ForwardPath;
use redaction::HiddenValues;
use route::Route;
use route_actions::LocalResponse;
use rule::{GatewayRule, RATE_LIMIT_STYLES, RateLimitStyle};
use settings::{
    Boolean, Choice, Custom, DAY_MS, Integer, Kind, OFF_FIX, Optional, Required, Restart, Section, Shape, Texts, Time,
    Word,
};
use sources::Sources;
use span_export::Tracing;
use toml::de::DeValue;
use toml_reader::{Item, SpannedStr, SpannedString};
use transom_http::path_normalize::PathReading;
use upstream::Upstream;

handles! {
    /// A route of a [`Config`].
    RouteId,
    /// An upstream of a [`Config`].
    UpstreamId,
    /// A deny entry.
    DenyId,
    /// A server of an upstream.
    ServerId,
}

impl ServerId {
    /// The first server of an upstream.
    pub const FIRST: ServerId = ServerId(0);
}

/// All settings of `gateway.toml`, of the clients file and of the access file.
#[derive(Clone, PartialEq, Debug)]
pub struct Config {
    pub general: General,
    pub listen: Listen,
    pub admin: Admin,
    pub counters: Counters,
    pub timeouts: Timeouts,
    pub drain: DrainSettings,
    pub http2: Http2,
    pub limits: Limits,
    pub access_log: Option<AccessLog>,
    pub metrics: MetricsSettings,
    /// Present if requests are traced.
    pub tracing: Option<Tracing>,
    /// Present if keys near their limits are notified of.
    pub notify: Option<Notify>,
    /// Clients of the clients file.
    pub clients: Option<Clients>,
    /// Who is denied.
    pub access: Option<Access>,
    /// Keys and conditions for valid tokens. Present if a rule or the clients use a claim.
    pub jwt: Option<TokenVerifier>,
    /// More keys for tokens, which are fetched.
    pub key_set: Option<KeySetSource>,
    /// How request paths are normalized for routes and rules.
    pub path_reading: PathReading,
    pub upstreams: IdVec<UpstreamId, Upstream>,
    pub rules: IdVec<RuleId, GatewayRule>,
    pub routes: IdVec<RouteId, Route>,
    /// The values of references, for messages.
    pub hidden: HiddenValues,
    /// The text of the file, and of those that it includes, without secrets.
    pub text: String,
}

impl Config {
    /// The rules as the limiter knows them.
    pub fn limiter_rules(&self) -> impl Iterator<Item = &Rule> {
        self.rules.iter().map(|rule| &rule.rule)
    }

    /// The number of routes in the file, without that of [ACME challenges](acme::add_challenge_route).
    pub fn configured_routes(&self) -> usize {
        let answers_challenges = |route: &Route| {
            route.actions.as_ref().is_some_and(|actions| actions.response == Some(LocalResponse::AcmeChallenge))
        };
        self.routes.iter().filter(|route| !answers_challenges(route)).count()
    }
}

settings! {
    /// Settings without a section.
    pub struct General {
        /// More files of the configuration: paths, whose last part may have `*`. See [Included files](#included-files).
        include: Vec<SpannedString> = Texts("path", "[\"conf.d/*.toml\"]");
        /// Number of workers (event loops). Without it: one per core that the process may use.
        workers: Option<usize> = Restart(Optional(Integer(4, 1..=1024)));
        /// File with the id of the serving process. It is replaced atomically once the gateway serves, and removed at exit.
        /// `transom upgrade` reads it.
        pid_file: Option<PathBuf> =
            Word { shape: "path of a file", example: "\"/run/transom/pid\"", read: read_pid_file };
        /// Rate limit fields in responses, for rules without their own `headers`. `"ietf"`: `RateLimit` and
        /// `RateLimit-Policy`, joined with fields of these names from the upstream; those that are no lists of items, as in older
        /// drafts, are replaced. `"legacy"`: `X-RateLimit-Limit`, `-Remaining`, `-Reset` (seconds from now) of the layer nearest
        /// its limit. `"openai"`, `"anthropic"`: those of [these APIs](#fields-and-errors-of-model-apis), for their SDKs.
        headers: RateLimitStyle = Choice(RateLimitStyle::Ietf, &RATE_LIMIT_STYLES);
        /// Path sent to the upstream: the bytes of the client, or the path as it was matched.
        forward_path: ForwardPath = Choice(
            ForwardPath::Original,
            &[("original", ForwardPath::Original), ("normalized", ForwardPath::Normalized)],
        );
        /// How much of a request body is read for [`json:` keys and `when`](#values-of-the-body). A longer body gets 413. Routes
        /// can override it.
        body_key_limit: usize = BODY_KEY_LIMIT;
    }
}

fn read_pid_file(word: &SpannedStr, report: &mut Report) -> Option<PathBuf> {
    if word.text.is_empty() {
        let fix = "write `pid_file = \"/run/transom/pid\"`, or remove it";
        return report.reject(word.span.clone(), "`pid_file` is empty", fix);
    }
    Some(PathBuf::from(word.text))
}

/// The access log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AccessLog {
    pub target: LogTarget,
    pub format: LogFormat,
}

/// Where the access log is written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LogTarget {
    Stdout,
    File(PathBuf),
}

/// Targets of other products that would be taken for the name of a file.
const OTHER_LOG_TARGETS: [&str; 5] = ["stderr", "-", "console", "syslog", "journald"];

impl LogTarget {
    /// Reads the target that the string `item` names; `fix`: what to write instead of an unusable one.
    fn read(item: &Item, text: &str, fix: &str, report: &mut Report) -> Option<LogTarget> {
        let problem = match text {
            "stdout" => return Some(LogTarget::Stdout),
            "" => format!("`{}` is empty", item.key),
            _ if OTHER_LOG_TARGETS.contains(&text) || text.starts_with("syslog:") => {
                format!("`{}` cannot be {}: lines are written to standard output or a file", item.key, quoted(text))
            }
            path => return Some(LogTarget::File(PathBuf::from(path))),
        };
        report.reject(item.span.clone(), problem, fix)
    }
}

/// The form of the lines of the access log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogFormat {
    Json,
    Combined,
}

settings! {
    /// The access log.
    pub struct AccessLogSettings {
        /// File of the access log. A relative path starts at the working directory of the process.
        file: Option<LogTarget> = Required(
            Custom::or_empty(|| Shape::Text("path, `\"stdout\"`"), |item, report| {
                let word = item.string("\"stdout\"", report)?;
                LogTarget::read(item, word.text, ACCESS_LOG_FIX, report).map(Some)
            }),
            ACCESS_LOG_FIX,
        );
        /// Form of the lines: JSON objects, or the combined format of Apache and nginx, which says nothing of rules.
        format: LogFormat = Choice(
            LogFormat::Json,
            &[("json", LogFormat::Json), ("combined", LogFormat::Combined)],
        );
    }
}

settings! {
    /// Metrics on the admin address.
    pub struct MetricsSettings {
        /// Count the requests of each client of `[clients]`, and the usage of their responses, by its name and plan:
        /// `transom_client_requests_total`, `transom_client_usage_total`. At most 10,000 clients have series of their own.
        clients: bool = Boolean(false);
        /// Upper bounds of the buckets of `transom_request_duration_seconds`, ascending. An SLO of 300 ms needs the bucket
        /// `"300ms"`.
        request_buckets: Vec<Duration> = Restart(Custom {
            default: REQUEST_BUCKETS_MS.map(Duration::from_millis).to_vec(),
            default_text: Some(REQUEST_BUCKETS_EXAMPLE),
            shape: || Shape::OneOrList(Box::new(Shape::Duration(REQUEST_BUCKET))),
            read: read_request_buckets,
        });
    }
}

/// Most buckets of `request_buckets`.
pub const REQUEST_BUCKETS_MAX: usize = 20;
const REQUEST_BUCKETS_MS: [u64; 11] = [5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000];
const REQUEST_BUCKETS_EXAMPLE: &str =
    "[\"5ms\", \"10ms\", \"25ms\", \"50ms\", \"100ms\", \"250ms\", \"500ms\", \"1s\", \"2500ms\", \"5s\", \"10s\"]";
/// In milliseconds.
const REQUEST_BUCKET: RangeInclusive<u64> = 1..=DAY_MS;

fn read_request_buckets(item: &Item, report: &mut Report) -> Option<Vec<Duration>> {
    let items = item.one_or_all();
    if !(1..=REQUEST_BUCKETS_MAX).contains(&items.len()) {
        let message = match items.len() {
            0 => format!("`{}` is an empty list", item.key),
            number => format!("`{}` has {number} buckets", item.key),
        };
        let fix = format!("write 1 to {REQUEST_BUCKETS_MAX} buckets, or remove it: there is a default");
        return report.reject(item.span.clone(), message, fix);
    }
    let mut buckets: Vec<Duration> = Vec::new();
    for item in &items {
        let Some(bucket) = Time(Duration::from_millis(300), REQUEST_BUCKET).read(item, report) else { continue };
        if buckets.last().is_some_and(|former| *former >= bucket) {
            let message = format!("`{}` is not above the bound before it", report.source(item.span.clone()));
            report.problem(item.span.clone(), message, "write the bounds in ascending order, each once");
        }
        buckets.push(bucket);
    }
    Some(buckets)
}

const ACCESS_LOG_FIX: &str = "write `file = \"stdout\"`, or the path of a file";
const SHORT_ACCESS_LOG_FIX: &str = "write `access_log = \"stdout\"`, or the path of a file";

/// Reads `[access_log]`, or a string, which is its `file`.
fn read_access_log(item: Item, report: &mut Report) -> Option<AccessLog> {
    match item.value {
        DeValue::Table(_) => {
            let AccessLogSettings { file, format } = AccessLogSettings::read_section(Some(item), report);
            file.map(|target| AccessLog { target, format })
        }
        _ if item.is_off() => {
            let written = quoted(report.source(item.span.clone()).trim_matches('"'));
            report.reject(item.span, format!("`access_log` cannot be {written}"), OFF_FIX)
        }
        DeValue::String(text) => {
            let target = LogTarget::read(&item, text, SHORT_ACCESS_LOG_FIX, report)?;
            Some(AccessLog { target, format: LogFormat::Json })
        }
        _ => item.wrong_type("a string or a table", SHORT_ACCESS_LOG_FIX, report),
    }
}

/// Reads a configuration that names no other files, or returns all its problems.
pub fn read(text: &str) -> Result<Config, Vec<Problem>> {
    read_with_inputs(text, Inputs::NONE)
}

/// Reads a configuration that names files but no folders and variables.
pub fn read_with_files(text: &str, files: ReadFile) -> Result<Config, Vec<Problem>> {
    read_with_inputs(text, Inputs { files, ..Inputs::NONE })
}

/// Reads a configuration and what it names, or returns all problems.
pub fn read_with_inputs(text: &str, inputs: Inputs) -> Result<Config, Vec<Problem>> {
    let sources = Sources::read(text, inputs);
    let mut report = Report::with_inputs(&sources.text, &sources.included, inputs);
    let text = sources.report_problems(&mut report);
    check::read_config(&text, report)
}
