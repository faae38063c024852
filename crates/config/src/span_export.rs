//! `[tracing]`: which requests are traced, and the receiver of their spans.

use super::certificate::{self, PEM_FILE};
use super::client_tls::suggest_ca;
use super::diagnostics::{Parsed, Report, quoted};
use super::host::parse_authority;
use super::settings::{Custom, Section, Shape, Share, section_table};
use super::toml_reader::{Item, SpannedString, Table};

const ENDPOINT: &str = "http://127.0.0.1:4317";
const ENDPOINT_TOML: &str = "\"http://127.0.0.1:4317\"";

settings! {
    /// Export of spans over OTLP.
    pub struct TracingSettings checked by check_authorities {
        /// URL of a receiver of OTLP over gRPC, with `http` or `https`.
        endpoint: String = Custom {
            default: ENDPOINT.to_owned(),
            default_text: Some(ENDPOINT_TOML),
            shape: || Shape::Text("URL"),
            read: read_endpoint,
        };
        /// With `https`: authorities of the receiver. Without it: the system's authorities.
        ca: Option<SpannedString> = PEM_FILE;
        /// Share of the requests to trace. A `traceparent` from a [trusted proxy](#trusted-proxies) decides instead: its
        /// request is traced if it has the flag `sampled`.
        sample: f64 = Share(0.01);
        /// The resource attribute `service.name` of all spans.
        service_name: String = Custom {
            default: "transom".to_owned(),
            default_text: Some("\"transom\""),
            shape: || Shape::Text("text"),
            read: read_service_name,
        };
    }
}

/// Which requests are traced, and where their spans go.
#[derive(Clone, PartialEq, Debug)]
pub struct Tracing {
    /// Share of the requests, from 0 to 1.
    pub sample: f64,
    pub receiver: SpanReceiver,
}

/// A receiver of spans. A reload keeps the connection to an equal one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SpanReceiver {
    /// URL without a path.
    pub endpoint: String,
    /// Authorities to verify it with, as PEM; `None`: the system's.
    pub authorities: Option<Vec<u8>>,
    pub service_name: String,
}

impl SpanReceiver {
    pub fn is_https(&self) -> bool {
        self.endpoint.starts_with("https://")
    }
}

/// Reads `[tracing]`; `None` without it.
pub fn read_tracing(item: Option<Item>, report: &mut Report) -> Option<Tracing> {
    if let (Some(item), false) = (&item, cfg!(feature = "otlp")) {
        let message = "`[tracing]` cannot be used: this gateway was built without the feature `otlp`";
        report.problem(item.key_span.clone(), message, "remove the section, or build with the default features");
    }
    let table = section_table(item, report)?;
    let TracingSettings { endpoint, ca, sample, service_name } = TracingSettings::read_all(table, report);
    let authorities = ca.filter(|_| endpoint.starts_with("https://")).and_then(|file| {
        certificate::read_authorities(&file, report)?;
        file.read_file(report)
    });
    Some(Tracing { sample, receiver: SpanReceiver { endpoint, authorities, service_name } })
}

fn check_authorities(settings: &mut TracingSettings, table: &mut Table, report: &mut Report) {
    for (key, meant) in
        [("url", "endpoint"), ("ratio", "sample"), ("sample_rate", "sample"), ("service", "service_name")]
    {
        table.suggest_for(key, meant, format!("write `{meant}`"));
    }
    suggest_ca(table, "ca", "ca = \"FILE\"");
    if let (Some(item), true) = (table.given("ca"), settings.endpoint.starts_with("http://")) {
        let fix = "remove it, or write `https://` in `endpoint`";
        report.missing(item.key_span, "`ca` has no effect: the receiver does not use TLS", fix);
    }
}

fn read_endpoint(item: &Item, report: &mut Report) -> Option<String> {
    let word = item.string(ENDPOINT_TOML, report)?;
    report.accept(word.span.clone(), parse_endpoint(word.text))
}

fn parse_endpoint(url: &str) -> Parsed<String> {
    let (scheme, default_port) = match url.split_once("://") {
        Some(("http", _)) => ("http", 80),
        Some(("https", _)) => ("https", 443),
        _ => {
            let message = format!("{} is not the URL of a receiver", quoted(url));
            return Err((message, "write `http://HOST:PORT`, or `https://HOST:PORT` for TLS".to_owned()));
        }
    };
    let url = url.strip_suffix('/').unwrap_or(url);
    let authority = &url[scheme.len() + 3..];
    if let Some((authority, path)) = authority.split_once('/') {
        let message = format!("{} has the path {}", quoted(url), quoted(&format!("/{path}")));
        let fix = format!(
            "write `{scheme}://{authority}`, with the port of OTLP over gRPC, usually 4317; OTLP over HTTP is not supported"
        );
        return Err((message, fix));
    }
    parse_authority(url, authority, (scheme, default_port))?;
    Ok(url.to_owned())
}

fn read_service_name(item: &Item, report: &mut Report) -> Option<String> {
    let word = item.string("\"transom\"", report)?;
    match word.text {
        "" => report.reject(word.span, "`service_name` is empty", "write a name, or remove the setting"),
        name => Some(name.to_owned()),
    }
}
