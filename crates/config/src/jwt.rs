//! `[jwt]`: the keys that verify tokens, and the claims that a token must have.
//!
//! Keys are parsed here, so that an unusable key is reported at the start rather than at the first request. Messages
//! contain no secrets.

use std::net::IpAddr;
use std::time::Duration;

use toml::de::DeValue;

use http::uri::PathAndQuery;

use super::certificate::PEM_FILE;
use super::client_tls::{ClientTls, ClientTlsSettings, SystemRoots, suggest_ca};
use super::diagnostics::{Parsed, Report, Span, quoted};
use super::settings::{
    Choice, Custom, DAY_MS, Kind, Optional, Required, Section, Shape, Text, Time, TimeOrZero, Word, Words,
    section_table,
};
use super::toml_reader::{Item, SpannedStr, SpannedString, Table};
use super::upstream::{Scheme, Server, parse_url};
use super::values::{is_pattern, strip_line_end, without_byte_order_mark};
use transom_jwt::jwks::{self, JwksError, KEYS_MAX, ambiguous_algorithm};
use transom_jwt::token::{KEYS_TRIED_MAX, TokenVerifier};
use transom_jwt::verification_key::{Algorithm, VerificationKey};

const ALGORITHMS: [(&str, Algorithm); 4] = [
    ("HS256", Algorithm::Hs256),
    ("RS256", Algorithm::Rs256),
    ("ES256", Algorithm::Es256),
    ("EdDSA", Algorithm::EdDsa),
];
const NO_KEYS: &str = "write `keys = [{ algorithm = \"RS256\", public_key_file = \"FILE\" }]`, `jwks_file = \"FILE\"`, or \
                       `jwks_url = \"URL\"`";
const URL_EXAMPLE: &str = "\"https://issuer.example/.well-known/jwks.json\"";
const KEY_FIX: &str = "write `{ algorithm = \"RS256\", public_key_file = \"FILE\" }`";

const KEY_SOURCES: [&str; 4] = ["secret", "secret_file", "public_key", "public_key_file"];
const KEY_FILE: Text = Text("path of a file", "\"FILE\"");
const INLINE_KEY: Custom<Option<SpannedString>> =
    Custom { default: None, default_text: None, shape: || Shape::Text("text"), read: read_inline_key };

settings! {
    /// Verification of bearer tokens.
    pub struct JwtSettings checked by check_keys {
        /// Verification keys, see below. At most 32, with those of `jwks_file`.
        keys: Vec<(VerificationKey, Span)> = Custom::or_empty(
            || Shape::List(Box::new(Shape::Table(JwtKeySettings::settings()))),
            read_keys,
        );
        /// JSON Web Key Set, as issuers publish it. Keys for other uses are ignored.
        jwks_file: Vec<(VerificationKey, Span)> = Custom::or_empty(|| Shape::Text("path of a file"), read_jwks);
        /// URL of the key set that the issuer [publishes](#key-sets-by-url): `https`, or `http` to loopback. Its public keys,
        /// at most 32, are used beside the others.
        jwks_url: Option<SpannedString> = Text("URL", URL_EXAMPLE);
        /// Authorities of the server of `jwks_url`. Without it: the system's authorities.
        jwks_ca: Option<SpannedString> = PEM_FILE;
        /// How often `jwks_url` is fetched. Sooner if the response has a shorter `max-age`, but not sooner than
        /// `jwks_cooldown`.
        jwks_refresh: Duration = Time(Duration::from_secs(300), 1000..=DAY_MS);
        /// A token with an unknown key causes a fetch, but not sooner than this after the last one.
        jwks_cooldown: Duration = Time(Duration::from_secs(30), 1000..=DAY_MS);
        /// Limit for one fetch.
        jwks_timeout: Duration = Time(Duration::from_secs(5), 100..=60_000);
        /// How long the last key set stays in use while fetches fail. At least `jwks_refresh`.
        jwks_keep: Duration = Time(Duration::from_secs(24 * 60 * 60), 1000..=366 * DAY_MS);
        /// Accepted values of `iss`. Without it: any.
        issuer: Vec<String> = Words {
            shape: "text",
            example: "\"https://issuer.example\"",
            or: ANY_VALUE,
            read: |word, report| read_claim(word, "issuer", report),
        };
        /// Accepted values of `aud`. Without it, tokens issued for other services are accepted too.
        audience: Vec<String> = Words {
            shape: "text",
            example: "\"api\"",
            or: ANY_VALUE,
            read: |word, report| read_claim(word, "audience", report),
        };
        /// Allowed difference between the issuer's clock and this machine's.
        leeway: Duration = TimeOrZero(Duration::ZERO);
    }
}

settings! {
    /// One key for tokens. Its source is one of the last four settings.
    pub struct JwtKeySettings checked by check_key_source {
        /// The only algorithm of the key. `"EdDSA"`: Ed25519.
        algorithm: Option<Algorithm> = Required(
            Optional(Choice(Algorithm::Rs256, &ALGORITHMS)),
            "write `algorithm = \"HS256\"`, `\"RS256\"`, `\"ES256\"` or `\"EdDSA\"`",
        );
        /// Key id. A key with a `kid` verifies no token that names another `kid`.
        kid: Option<String> = Word { shape: "text", example: "\"2024\"", read: read_kid };
        /// Secret for HS256, at least 32 bytes. Prefer `secret_file`: anyone who can read the configuration can sign tokens.
        secret: Option<SpannedString> = INLINE_KEY;
        /// File with the secret. The line end of a text file is not part of it. Put a binary secret into a `jwks_file`, in
        /// base64url.
        secret_file: Option<SpannedString> = KEY_FILE;
        /// Public key for the other algorithms, in PEM (`-----BEGIN PUBLIC KEY-----`).
        public_key: Option<SpannedString> = INLINE_KEY;
        /// File with the public key.
        public_key_file: Option<SpannedString> = KEY_FILE;
    }
}

const ANY_VALUE: &str = ", or remove it: any value is then accepted";

fn read_claim(word: &SpannedStr, key: &str, report: &mut Report) -> Option<String> {
    if word.text.is_empty() {
        let fix = format!("write the value, or remove it; without `{key}`, any value is accepted");
        report.problem(word.span.clone(), format!("a value of `{key}` is empty"), fix);
    }
    if word.text == "*" || is_pattern(word.text) {
        let message = format!("{} is a pattern, and values of `{key}` are compared as a whole", quoted(word.text));
        report.problem(word.span.clone(), message, format!("write each value{ANY_VALUE}"));
    }
    Some(word.text.to_owned())
}

fn read_kid(word: &SpannedStr, report: &mut Report) -> Option<String> {
    if word.text.is_empty() {
        report.problem(word.span.clone(), "`kid` is empty", "write `kid = \"2024\"`");
    }
    Some(word.text.to_owned())
}

/// Reads a key that is written in the configuration. A message must not show a value of another type.
fn read_inline_key(item: &Item, report: &mut Report) -> Option<Option<SpannedString>> {
    if let DeValue::String(_) = item.value {
        return Text("text", "").read(item, report);
    }
    let fix = format!("write it in quotes, or name a file: `{}_file`", item.key);
    report.reject(item.span.clone(), format!("`{}`: expected a string", item.key), fix)
}

/// A key set that is fetched.
#[derive(Clone, PartialEq, Debug)]
pub struct KeySetSource {
    pub url: String,
    pub server: Server,
    /// Path and query of the URL.
    pub target: PathAndQuery,
    /// Present for `https`.
    pub tls: Option<ClientTls>,
    pub refresh: Duration,
    pub cooldown: Duration,
    pub timeout: Duration,
    pub keep: Duration,
}

impl KeySetSource {
    /// The URL without its query, which may contain a secret.
    pub fn shown(&self) -> &str {
        self.url.split('?').next().unwrap_or(&self.url)
    }
}

pub fn read_jwt(item: Option<Item>, report: &mut Report) -> Option<(TokenVerifier, Option<KeySetSource>)> {
    let table = section_table(item, report)?;
    let settings = JwtSettings::read_all(table, report);
    let source = settings.jwks_url.as_ref().and_then(|url| read_source(url, &settings, report));
    let JwtSettings { keys, jwks_file, issuer, audience, leeway, .. } = settings;
    let keys = keys.into_iter().chain(jwks_file).map(|(key, _)| key).collect();
    let leeway_ms = leeway.as_millis() as u64;
    Some((TokenVerifier { keys, issuers: issuer, audiences: audience, leeway_ms }, source))
}

fn read_source(url: &SpannedString, settings: &JwtSettings, report: &mut Report) -> Option<KeySetSource> {
    let (server, target) = report.accept(url.span.clone(), parse_key_set_url(&url.text))?;
    let tls = match server.scheme {
        Scheme::Https => {
            let tls = ClientTlsSettings { ca: settings.jwks_ca.clone(), ..ClientTlsSettings::default() };
            Some(ClientTls::new(&tls, url.span.clone(), &mut SystemRoots::default(), report)?)
        }
        Scheme::Http | Scheme::Unix => None,
    };
    Some(KeySetSource {
        url: url.text.clone(),
        server,
        target,
        tls,
        refresh: settings.jwks_refresh,
        cooldown: settings.jwks_cooldown,
        timeout: settings.jwks_timeout,
        keep: settings.jwks_keep,
    })
}

/// Parses the URL of a key set. Without TLS, anyone on the way could replace the keys: only loopback is accepted then.
fn parse_key_set_url(url: &str) -> Parsed<(Server, PathAndQuery)> {
    let (server, target) = parse_url(url, "a key set", URL_EXAMPLE)?;
    let is_loopback = server.host == "localhost" || server.host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    if server.scheme == Scheme::Http && !is_loopback {
        let message = format!("{} has no TLS: anyone on the way could replace the keys", quoted(url));
        let rest = url.trim_start_matches("http://");
        return Err((message, format!("write `\"https://{rest}\"`; `http` is for loopback addresses")));
    }
    Ok((server, target))
}

/// Checks the keys together: each is listed once, and few enough may match one token.
fn check_keys(settings: &mut JwtSettings, table: &mut Table, report: &mut Report) {
    suggest_ca(table, "jwks_ca", "jwks_ca = \"FILE\"");
    if ["keys", "jwks_file", "jwks_url"].iter().all(|key| table.lacks(key)) {
        report.missing(table.span.clone(), "`[jwt]` has no keys", NO_KEYS);
    }
    let (keys, jwks) = (table.given("keys"), table.given("jwks_file"));
    if let (Some(Item { value: DeValue::Array(array), span, .. }), None) = (&keys, &jwks)
        && array.is_empty()
        && table.lacks("jwks_url")
    {
        report.problem(span.clone(), "`keys` is an empty list", NO_KEYS);
    }
    for key in ["jwks_ca", "jwks_refresh", "jwks_cooldown", "jwks_timeout", "jwks_keep"] {
        if let (Some(item), true) = (table.given(key), table.lacks("jwks_url")) {
            let message = format!("`{key}` has no effect without `jwks_url`");
            report.missing(item.key_span, message, format!("remove it, or write `jwks_url = {URL_EXAMPLE}`"));
        }
    }
    let is_cleartext = settings.jwks_url.as_ref().is_some_and(|url| url.text.starts_with("http://"));
    if let (Some(item), true) = (table.given("jwks_ca"), is_cleartext) {
        let fix = "remove it, or write `https://` in `jwks_url`";
        report.missing(item.key_span, "`jwks_ca` has no effect: the key set is fetched without TLS", fix);
    }
    if let (Some(item), true) = (table.given("jwks_keep"), settings.jwks_keep < settings.jwks_refresh) {
        let fix = "write a longer one, so that a single failed fetch does not disable the keys";
        report.problem(item.span, "`jwks_keep` is shorter than `jwks_refresh`", fix);
    }
    let mut found: Vec<&VerificationKey> = Vec::new();
    for (key, span) in settings.keys.iter().chain(&settings.jwks_file) {
        if found.contains(&key) {
            report.problem(span.clone(), "a key is listed twice", "remove one of the two");
        } else if found.len() == KEYS_MAX {
            let message = format!("there are more than {KEYS_MAX} keys");
            report.problem(span.clone(), message, "remove keys that sign no valid tokens any more");
        } else {
            found.push(key);
        }
    }
    if let (Some(algorithm), Some(item)) = (ambiguous_algorithm(&found), jwks.or(keys)) {
        let message = format!(
            "more than {KEYS_TRIED_MAX} keys for `{}` may match one token, and the gateway tries at most {KEYS_TRIED_MAX}",
            algorithm.name()
        );
        report.problem(item.span, message, "give each key a different `kid`, and have the issuer set it in tokens");
    }
}

fn read_keys(item: &Item, report: &mut Report) -> Option<Vec<(VerificationKey, Span)>> {
    let items = item.list("[{ … }]", report)?;
    let read_key = |item: &Item| {
        let table = item.table("a key of `[jwt]`", KEY_FIX, report)?;
        Some((read_key(JwtKeySettings::read_all(table, report), report)?, item.span.clone()))
    };
    Some(items.iter().filter_map(read_key).collect())
}

/// The keys of a secret or public key, and of the file with it.
fn source_keys(algorithm: Algorithm) -> (&'static str, &'static str) {
    match algorithm {
        Algorithm::Hs256 => ("secret", "secret_file"),
        Algorithm::Rs256 | Algorithm::Es256 | Algorithm::EdDsa => ("public_key", "public_key_file"),
    }
}

fn check_key_source(key: &mut JwtKeySettings, table: &Table, report: &mut Report) {
    if let (Some(algorithm), true) = (key.algorithm, KEY_SOURCES.iter().all(|source| table.lacks(source))) {
        let (inline, file) = source_keys(algorithm);
        let message = format!("this key for `{}` has no `{file}`", algorithm.name());
        report.missing(table.span.clone(), message, format!("write `{file} = \"FILE\"`, or `{inline}`"));
    }
}

fn read_key(key: JwtKeySettings, report: &mut Report) -> Option<VerificationKey> {
    let algorithm = key.algorithm?;
    let (inline, file) = source_keys(algorithm);
    let sources = [key.secret, key.secret_file, key.public_key, key.public_key_file].into_iter().flatten();
    let source = match sources.collect::<Vec<_>>().as_slice() {
        [] => return None,
        [source] if [inline, file].contains(&source.key.as_str()) => source.clone(),
        [source] => {
            let message = format!("`{}` is not for `{}`", source.key, algorithm.name());
            let fix = format!("write `{file}`, or another `algorithm`");
            return report.reject(source.key_span.clone(), message, fix);
        }
        [first, second, ..] => {
            let message = format!("`{}` and `{}` are both given", first.key, second.key);
            return report.reject(second.key_span.clone(), message, "keep one of the two");
        }
    };
    // In messages, a key has the name of its setting or of its file.
    let (name, bytes) = match source.key == file {
        true => (quoted(&source.text), source.read_file(report)?),
        false => (format!("`{inline}`"), source.text.into_bytes()),
    };
    let read = match algorithm {
        Algorithm::Hs256 => VerificationKey::from_secret(strip_line_end(&bytes), key.kid),
        Algorithm::Rs256 | Algorithm::Es256 | Algorithm::EdDsa => {
            VerificationKey::from_public_pem(algorithm, without_byte_order_mark(&bytes), key.kid)
        }
    };
    report.accept(source.span, read.map_err(|error| error.explain(&name)))
}

fn read_jwks(item: &Item, report: &mut Report) -> Option<Vec<(VerificationKey, Span)>> {
    let file = Text("path of a file", "\"jwks.json\"").read(item, report)??;
    let bytes = file.read_file(report)?;
    let name = quoted(&file.text);
    let (message, fix) = match jwks::parse(&bytes) {
        Ok(keys) => return Some(keys.into_iter().map(|key| (key, file.span.clone())).collect()),
        Err(JwksError::Json(line, column)) => (
            format!("{name} is not JSON: line {line}, column {column}"),
            String::from("name a JSON Web Key Set, as issuers publish it"),
        ),
        Err(JwksError::NoKeys) => (
            format!("{name} has no list `keys`"),
            String::from("name a JSON Web Key Set: `{\"keys\": […]}`, as issuers publish it"),
        ),
        Err(JwksError::NoUsableKey) => (
            format!("{name} has no key for HS256, RS256, ES256 or EdDSA"),
            String::from("have the issuer sign with one of these algorithms, and name its key set"),
        ),
        Err(JwksError::BadKey(position, error)) => error.explain(&format!("key {position} of {name}")),
        // Only of published key sets: the keys of all settings are checked together.
        Err(error @ (JwksError::TooManyKeys | JwksError::Ambiguous(_))) => (error.to_string(), String::new()),
    };
    report.reject(file.span, message, fix)
}

/// Reports a `[jwt]` that nothing uses, and a claim in a rule or in `[clients]` without `[jwt]`. `misspelled` has the
/// sections that unknown keys of the file were probably meant to be.
pub fn report_missing_or_unused_jwt(
    jwt: Option<&Item>,
    claim: Option<SpannedStr>,
    may_have_other_use: bool,
    misspelled: &[&str],
    report: &mut Report,
) {
    match (jwt, claim) {
        (None, Some(word)) if !misspelled.contains(&"jwt") => {
            let message =
                format!("{} needs verified tokens, and there is no `[jwt]` with their keys", quoted(word.text));
            let fix = "write `[jwt]`, then `keys = [{ algorithm = \"RS256\", public_key_file = \"FILE\" }]`";
            report.missing(word.span, message, fix);
        }
        (Some(item), None) if !misspelled.contains(&"rules") && !may_have_other_use => {
            let message = "`[jwt]` has no effect: no rule counts by a claim";
            report.missing(item.key_span.clone(), message, "remove it, or write a rule with `key = \"jwt:sub\"`");
        }
        _ => {}
    }
}

/// The first claim in the key of a rule, or in `[clients]`.
pub fn first_claim<'d>(rules: Option<&Item<'d>>, clients: Option<&Item<'d>>) -> Option<SpannedStr<'d>> {
    let rules = rules.into_iter().flat_map(Item::tables).flat_map(|rules| rules.items());
    let keys = rules.flat_map(|rule| rule.tables()).filter_map(|rule| rule.given("key"));
    let clients = clients.into_iter().flat_map(Item::tables);
    let sources = clients.flat_map(|clients| ["api_key", "subject", "plan"].map(|key| clients.given(key))).flatten();
    let words = keys.chain(sources).flat_map(|item| item.words());
    let is_claim = |word: &SpannedStr| word.text.strip_prefix("jwt:").is_some_and(|claim| !claim.is_empty());
    words.filter(is_claim).min_by_key(|word| word.span.start)
}
