//! `acme` of `[listen.https]`: certificates that an authority issues over ACME (RFC 8555), and the route of its challenges.

use std::net::IpAddr;
use std::path::PathBuf;

use base64::Engine as _;
use base64::alphabet::URL_SAFE;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

use super::RouteId;
use super::certificate::PEM_FILE;
use super::client_tls::{ClientTls, ClientTlsSettings, SystemRoots, suggest_ca};
use super::counters::read_absolute_path;
use super::diagnostics::{Parsed, Report, Span, quoted};
use super::host::{is_name, read_distinct};
use super::listen::Listen;
use super::path::{PathPattern, PatternKind};
use super::redis::read_secret;
use super::route::Route;
use super::route_actions::{Actions, LocalResponse};
use super::settings::{Custom, Inline, Kind, Optional, Required, Shape, Text};
use super::toml_reader::{Item, SpannedStr, SpannedString, Table};
use super::upstream::{Scheme, Server, parse_url};
use super::values::Secret;
use transom_http::path_normalize::PathReading;
use transom_limiter::handles::IdVec;

/// Authorities show keys with and without padding.
const BASE64URL: GeneralPurpose = GeneralPurpose::new(
    &URL_SAFE,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);
const LETS_ENCRYPT: &str = "https://acme-v02.api.letsencrypt.org/directory";
const DIRECTORY_EXAMPLE: &str = "\"https://acme-v02.api.letsencrypt.org/directory\"";
const STORAGE_FIX: &str = "write `storage = \"/var/lib/transom/acme\"`, or `storage = \"shared\"` for several gateways";
const DIRECTORY_PATH_EXAMPLE: &str = "\"/var/lib/transom/acme\"";
/// Most names of a certificate, as at Let's Encrypt.
const DOMAINS_MAX: usize = 100;
const FIX: &str = "write `acme = { domains = [\"api.example.com\"], storage = \"/var/lib/transom/acme\" }`";
/// The name of the route that answers challenges, a label of metrics.
const ROUTE: &str = "acme-challenge";
/// The path of HTTP-01 challenges (RFC 8555, section 8.3).
const CHALLENGE_PATH: &str = "/.well-known/acme-challenge/{token}";

settings! {
    /// A certificate that an authority issues over ACME (RFC 8555), and renews.
    pub struct AcmeSettings checked by check_acme {
        /// DNS names of the certificate. Names with `*` need a challenge in DNS, which is not supported.
        domains: Vec<String> = Required(
            Custom::or_empty(|| Shape::List(Box::new(Shape::Text("name"))), read_domains),
            "write `domains = [\"api.example.com\"]`: the names of the certificate",
        );
        /// Address to which the authority may write about the certificate.
        email: Option<SpannedString> = Text("e-mail address", "\"admin@example.com\"");
        /// URL of the authority's directory; without it, that of Let's Encrypt. Its terms of service are accepted.
        directory: Option<SpannedString> = Text("URL", DIRECTORY_EXAMPLE);
        /// Authorities of the server of `directory`. Without it: the system's authorities.
        ca: Option<SpannedString> = PEM_FILE;
        /// Key identifier of the customer account at authorities that need one (external account binding, RFC 8555, section 7.3.4).
        eab_kid: Option<SpannedString> = Text("text", "\"KID\"");
        /// File with the HMAC key of `eab_kid`, in base64url as the authority shows it.
        eab_hmac_key_file: Option<SpannedString> = Text("path of a file", "\"FILE\"");
        /// Profile of the certificate that the authority offers, such as `"shortlived"` for 6 days.
        profile: Option<SpannedString> = Text("name", "\"shortlived\"");
        /// Directory for the account, the certificate and its key, which only the gateway may read; or `"shared"`: the store of
        /// `[counters.shared]`, where one gateway orders the certificate, all use it, and any of them answers the authority.
        storage: Option<AcmeStorage> = Required(
            Custom::or_empty(|| Shape::Text("absolute path, or \"shared\""), read_storage),
            STORAGE_FIX,
        );
        /// With `storage = "shared"`: directory for a copy of the certificate and its key, which only the gateway may read. A gateway
        /// that starts while the store is away uses the copy.
        copy: Option<PathBuf> = Optional(Custom::or_empty(|| Shape::Text("absolute path"), |item, report| {
            read_absolute_path(item, DIRECTORY_PATH_EXAMPLE, report)
        }));
    }
}

/// Where account and certificate are kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AcmeStorage {
    Directory(PathBuf),
    Shared,
}

/// The customer account that a new ACME account is bound to (RFC 8555, section 7.3.4).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExternalAccount {
    pub key_id: String,
    pub hmac_key: Secret<Vec<u8>>,
}

/// The order of a certificate.
#[derive(Clone, Debug)]
pub struct Acme {
    /// In lower case; the first names the certificate.
    pub domains: Vec<String>,
    pub email: Option<String>,
    /// The URL of the directory, and its server.
    pub directory: String,
    pub server: Server,
    /// For `https`; the authority may have other resources on other servers.
    pub tls: Option<ClientTls>,
    pub external_account: Option<ExternalAccount>,
    pub profile: Option<String>,
    pub storage: AcmeStorage,
    /// The directory of the copy of a shared certificate.
    pub copy: Option<PathBuf>,
    /// The position of the setting. Equal orders may have different positions.
    span: Span,
}

impl PartialEq for Acme {
    fn eq(&self, other: &Acme) -> bool {
        let Acme { domains, email, directory, server: _, tls, external_account, profile, storage, copy, span: _ } =
            self;
        (domains, email, directory) == (&other.domains, &other.email, &other.directory)
            && (tls, external_account) == (&other.tls, &other.external_account)
            && (profile, storage, copy) == (&other.profile, &other.storage, &other.copy)
    }
}

pub fn kind() -> Custom<Option<Acme>> {
    Custom::or_empty(|| Inline::<AcmeSettings>::or(FIX).shape(), read_acme)
}

fn read_acme(item: &Item, report: &mut Report) -> Option<Option<Acme>> {
    let settings = Inline::<AcmeSettings>::or(FIX).read(item, report)?;
    let text = |setting: &Option<SpannedString>| setting.as_ref().map(|text| text.text.clone());
    let external_account = read_external_account(&settings, report);
    let directory = settings.directory.clone().unwrap_or_else(|| SpannedString {
        key: String::from("directory"),
        key_span: item.key_span.clone(),
        text: LETS_ENCRYPT.to_owned(),
        span: item.key_span.clone(),
    });
    let server = report.accept(directory.span.clone(), parse_directory(&directory.text))?;
    let tls = match server.scheme {
        Scheme::Https => {
            let tls = ClientTlsSettings { ca: settings.ca.clone(), ..ClientTlsSettings::default() };
            Some(ClientTls::new(&tls, directory.span, &mut SystemRoots::default(), report)?)
        }
        Scheme::Http | Scheme::Unix => None,
    };
    Some(Some(Acme {
        email: text(&settings.email),
        external_account,
        profile: text(&settings.profile),
        domains: Some(settings.domains).filter(|domains| !domains.is_empty())?,
        directory: directory.text,
        server,
        tls,
        storage: settings.storage?,
        copy: settings.copy,
        span: item.key_span.clone(),
    }))
}

fn read_external_account(settings: &AcmeSettings, report: &mut Report) -> Option<ExternalAccount> {
    let (key_id, file) = (settings.eab_kid.as_ref()?, settings.eab_hmac_key_file.as_ref()?);
    let (key, _) = read_secret(Some(file), None, report)?;
    match BASE64URL.decode(key.trim_ascii()) {
        Ok(key) => Some(ExternalAccount { key_id: key_id.text.clone(), hmac_key: Secret(key) }),
        Err(_) => {
            let message = format!("the key in {} is not base64url", quoted(&file.text));
            report.reject(file.span.clone(), message, "write the HMAC key there as the authority shows it")
        }
    }
}

/// Parses the URL of a directory. Without TLS, anyone on the way could exchange the certificate.
fn parse_directory(url: &str) -> Parsed<Server> {
    let (server, _target) = parse_url(url, "a directory", DIRECTORY_EXAMPLE)?;
    let is_loopback = server.host == "localhost" || server.host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    if server.scheme == Scheme::Http && !is_loopback {
        let message = format!("{} has no TLS: anyone on the way could replace the certificate", quoted(url));
        let rest = url.trim_start_matches("http://");
        return Err((message, format!("write `\"https://{rest}\"`; `http` is for loopback addresses")));
    }
    Ok(server)
}

fn read_domains(item: &Item, report: &mut Report) -> Option<Vec<String>> {
    let domains = read_distinct(item, "[\"api.example.com\"]", "no certificate is ordered", parse_domain, report)?;
    if domains.len() > DOMAINS_MAX {
        let message = format!("`domains` has {} names, and a certificate has at most {DOMAINS_MAX}", domains.len());
        report.problem(item.span.clone(), message, "write several `[[listen.https]]`, each with its own names");
    }
    Some(domains)
}

fn parse_domain(word: &SpannedStr) -> Parsed<String> {
    let lower = word.text.to_ascii_lowercase();
    let fix = match lower.strip_prefix("*.") {
        Some(parent) => format!(
            "write the names below {}, each by itself, or name a `certificate` file: a `*` needs a challenge in DNS",
            quoted(parent)
        ),
        None if lower.parse::<IpAddr>().is_ok() => {
            String::from("write a DNS name: certificates for addresses are not ordered")
        }
        None if is_name(&lower) => return Ok(lower),
        None if !lower.is_ascii() => String::from("write the name in punycode: `xn--…`"),
        None => String::from("write a name such as `\"api.example.com\"`, without scheme, port or path"),
    };
    Err((format!("{} cannot be a name of an ordered certificate", quoted(word.text)), fix))
}

fn read_storage(item: &Item, report: &mut Report) -> Option<Option<AcmeStorage>> {
    let word = item.string(DIRECTORY_PATH_EXAMPLE, report)?;
    if word.text == "shared" {
        return Some(Some(AcmeStorage::Shared));
    }
    read_absolute_path(item, DIRECTORY_PATH_EXAMPLE, report).map(|path| Some(AcmeStorage::Directory(path)))
}

fn check_acme(settings: &mut AcmeSettings, table: &mut Table, report: &mut Report) {
    suggest_ca(table, "ca", "ca = \"FILE\"");
    for (key, meant) in
        [("domain", "domains"), ("cache", "storage"), ("storage_dir", "storage"), ("staging", "directory")]
    {
        let fix = match meant {
            "domains" => "write `domains = [\"api.example.com\"]`",
            "storage" => STORAGE_FIX,
            _ => "write `directory = \"https://acme-staging-v02.api.letsencrypt.org/directory\"`",
        };
        table.suggest_for(key, meant, fix);
    }
    for (given, other) in [("eab_kid", "eab_hmac_key_file"), ("eab_hmac_key_file", "eab_kid")] {
        if let (Some(item), true) = (table.given(given), table.lacks(other)) {
            let fix = format!("add `{other}`: the authority shows both, or remove it");
            report.missing(item.key_span, format!("`{given}` is given without `{other}`"), fix);
        }
    }
    if let (Some(item), Some(AcmeStorage::Directory(_))) = (table.given("copy"), &settings.storage) {
        let message = "`copy` is for `storage = \"shared\"`: a directory needs no copy";
        report.problem(item.key_span, message, "remove it");
    }
    if let Some(email) = settings.email.as_ref().filter(|email| !is_address(&email.text)) {
        let message = format!("{} is not an e-mail address", quoted(&email.text));
        report.problem(email.span.clone(), message, "write an address such as `\"admin@example.com\"`");
    }
}

fn is_address(text: &str) -> bool {
    let address = text.split_once('@');
    address.is_some_and(|(name, host)| !name.is_empty() && is_name(host)) && !text.contains([' ', ',', ':', '?'])
}

/// Adds the route that answers HTTP-01 challenges for the names of all certificates, if any are ordered. Its path is more specific
/// than those of other routes, and costs their requests nothing. Reports orders in a store that is not configured.
pub fn add_challenge_route(
    listen: &Listen,
    (reading, has_store): (PathReading, bool),
    routes: &mut IdVec<RouteId, Route>,
    report: &mut Report,
) {
    let orders = || listen.tls_listeners().filter_map(|https| https.acme.as_ref());
    for acme in orders().filter(|acme| acme.storage == AcmeStorage::Shared && !has_store) {
        let fix = "write `[counters.shared]`, then its `redis`, or `storage = \"/var/lib/transom/acme\"`";
        report.problem(acme.span.clone(), "`storage = \"shared\"` needs the store of `[counters.shared]`", fix);
    }
    let mut hosts: Vec<String> = Vec::new();
    for domain in orders().flat_map(|acme| &acme.domains) {
        if !hosts.contains(domain) {
            hosts.push(domain.clone());
        }
    }
    let path = SpannedStr { text: CHALLENGE_PATH, span: 0..0 };
    let path = PathPattern::read(&SpannedString::new("path", &path), PatternKind::Route, reading, report);
    let Some(path) = path.filter(|_| !hosts.is_empty()) else { return };
    let is_taken = routes.iter().any(|route| route.name == ROUTE);
    let name = if is_taken { "acme-challenge-of-the-gateway" } else { ROUTE };
    let actions = Actions { response: Some(LocalResponse::AcmeChallenge), ..Actions::default() };
    routes.push(Route {
        name: name.to_owned(),
        hosts,
        methods: vec![String::from("GET")],
        headers: Vec::new(),
        query: Vec::new(),
        networks: Vec::new(),
        path,
        // Routes that name a scheme come first, such as a redirect of all requests to https.
        secure: Some(false),
        actions: Some(Box::new(actions)),
        upstream: None,
        websocket: false,
        rules: Vec::new(),
        allow: Vec::new(),
        cost: None,
    });
}
