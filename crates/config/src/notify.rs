//! `[notify]`: at which shares of a limit notifications are sent, and their receiver.

use http::uri::PathAndQuery;

use super::certificate::PEM_FILE;
use super::client_tls::{ClientTls, ClientTlsSettings, SystemRoots, suggest_ca};
use super::diagnostics::{Report, quoted};
use super::rule::CheckedRule;
use super::settings::{Custom, Required, Section, Shape, Text, Texts, section_table};
use super::toml_reader::{Item, SpannedStr, SpannedString, Table};
use super::upstream::{Scheme, Server, parse_url};
use super::values::{Definitions, Secret, strip_line_end};
use transom_limiter::handles::RuleId;

const MARKS_EXAMPLE: &str = "[\"80%\", \"100%\"]";
const MARK_FIX: &str = "write shares of the limit, from `\"1%\"` to `\"100%\"`, each once";
const URL_EXAMPLE: &str = "\"https://hooks.example/quota\"";

settings! {
    /// Notifications about keys near their limits.
    pub struct NotifySettings checked by check_receiver {
        /// Marks: shares of a limit, such as `["80%", "100%"]`. When the usage of a key reaches a mark in a window, there is one
        /// event for this key, rule, window and mark: a message `quota_mark`, and a request to `url`.
        at: Vec<u8> = Required(
            Custom::or_empty(|| Shape::OneOrList(Box::new(Shape::Text("`\"1%\"` to `\"100%\"`"))), read_marks),
            "write `at = [\"80%\", \"100%\"]`",
        );
        /// Rules whose keys are watched. Without it: all rules.
        rules: Vec<SpannedString> = Texts("name", "[\"per-client\"]");
        /// URL that gets a `POST` with each event, `https` or `http`. Without it, events are messages only.
        url: Option<SpannedString> = Text("URL", URL_EXAMPLE);
        /// Authorities of the server of `url`. Without it: the system's authorities.
        ca: Option<SpannedString> = PEM_FILE;
        /// File with a secret. The requests to `url` then have `X-Transom-Signature`: the HMAC-SHA256 of the body with this
        /// secret, in hex. The line end of a text file is not part of it.
        secret_file: Option<SpannedString> = Text("path of a file", "\"notify.secret\"");
    }
}

/// Which marks cause events, and where the events go.
#[derive(Clone, PartialEq, Debug)]
pub struct Notify {
    /// Percentages in ascending order.
    pub at: Vec<u8>,
    /// The watched rules; `None`: all.
    pub rules: Option<Vec<RuleId>>,
    pub receiver: Option<NotifyReceiver>,
}

/// The server that gets events.
#[derive(Clone, PartialEq, Debug)]
pub struct NotifyReceiver {
    pub server: Server,
    /// Path and query of the URL.
    pub target: PathAndQuery,
    /// Present for `https`.
    pub tls: Option<ClientTls>,
    /// Signs events.
    pub secret: Option<Secret<Vec<u8>>>,
}

/// Reads `[notify]`; `None` without it.
pub fn read_notify(
    item: Option<Item>,
    rules: &Definitions<RuleId, CheckedRule>,
    report: &mut Report,
) -> Option<Notify> {
    let table = section_table(item, report)?;
    let settings = NotifySettings::read_all(table, report);
    let receiver = settings.url.as_ref().and_then(|url| read_receiver(url, &settings, report));
    let find = |name: &SpannedString| rules.find("rule", &name.text, name.span.clone(), report);
    let watched: Vec<RuleId> = settings.rules.iter().filter_map(find).collect();
    Some(Notify { at: settings.at, rules: (!settings.rules.is_empty()).then_some(watched), receiver })
}

fn read_receiver(url: &SpannedString, settings: &NotifySettings, report: &mut Report) -> Option<NotifyReceiver> {
    let (server, target) = report.accept(url.span.clone(), parse_url(&url.text, "a receiver", URL_EXAMPLE))?;
    let tls = match server.scheme {
        Scheme::Https => {
            let tls = ClientTlsSettings { ca: settings.ca.clone(), ..ClientTlsSettings::default() };
            Some(ClientTls::new(&tls, url.span.clone(), &mut SystemRoots::default(), report)?)
        }
        Scheme::Http | Scheme::Unix => None,
    };
    let secret = match &settings.secret_file {
        Some(file) => Some(read_secret(file, report)?),
        None => None,
    };
    Some(NotifyReceiver { server, target, tls, secret })
}

fn read_secret(file: &SpannedString, report: &mut Report) -> Option<Secret<Vec<u8>>> {
    let content = file.read_file(report)?;
    match strip_line_end(&content) {
        [] => {
            let fix = "create a random secret: `openssl rand -hex 32`";
            report.reject(file.span.clone(), format!("{} contains no secret", quoted(&file.text)), fix)
        }
        secret => Some(Secret(secret.to_vec())),
    }
}

fn read_marks(item: &Item, report: &mut Report) -> Option<Vec<u8>> {
    let words = item.strings(MARKS_EXAMPLE, report)?;
    if words.is_empty() {
        return report.reject(item.span.clone(), format!("`{}` is an empty list", item.key), MARK_FIX);
    }
    let mut marks = Vec::new();
    for SpannedStr { text, span, .. } in &words {
        let digits = text.strip_suffix('%').filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
        match digits.and_then(|digits| digits.parse().ok()).filter(|mark| (1..=100).contains(mark)) {
            Some(mark) if marks.contains(&mark) => {
                report.problem(span.clone(), format!("{} is listed twice", quoted(text)), MARK_FIX);
            }
            Some(mark) => marks.push(mark),
            None => report.problem(span.clone(), format!("{} is not a share of a limit", quoted(text)), MARK_FIX),
        }
    }
    marks.sort_unstable();
    Some(marks)
}

fn check_receiver(settings: &mut NotifySettings, table: &mut Table, report: &mut Report) {
    suggest_ca(table, "ca", "ca = \"FILE\"");
    table.suggest_for("secret", "secret_file", "write the secret into a file, and `secret_file = \"FILE\"`".to_owned());
    for key in ["ca", "secret_file"] {
        if let (Some(item), true) = (table.given(key), table.lacks("url")) {
            let message = format!("`{key}` has no effect without `url`");
            report.missing(item.key_span, message, format!("remove it, or write `url = {URL_EXAMPLE}`"));
        }
    }
    let is_cleartext = settings.url.as_ref().is_some_and(|url| url.text.starts_with("http://"));
    if let (Some(item), true) = (table.given("ca"), is_cleartext) {
        let fix = "remove it, or write `https://` in `url`";
        report.missing(item.key_span, "`ca` has no effect: the receiver does not use TLS", fix);
    }
}
