//! `[jwt]`: the keys that verify tokens, and the claims that a token must have.
//!
//! Keys are parsed here, so that an unusable key is reported at the start rather than at the first request. Messages
//! contain no secrets.

use std::time::Duration;

use toml::de::DeValue;

use super::values::{read_duration_ms, strip_line_end};
use crate::config::diagnostics::{Report, quoted};
use crate::config::settings::{DAY_MS, section_table};
use crate::config::toml_reader::{Item, SpannedStr, Table};
use crate::jwt::jwks::{self, JwksError};
use crate::jwt::token::{KEYS_TRIED_MAX, TokenVerifier};
use crate::jwt::verification_key::{Algorithm, InvalidKey, VerificationKey};

const ALGORITHMS: [(&str, Algorithm); 4] = [
    ("HS256", Algorithm::Hs256),
    ("RS256", Algorithm::Rs256),
    ("ES256", Algorithm::Es256),
    ("EdDSA", Algorithm::EdDsa),
];

const NO_KEYS: &str =
    "write `keys = [{ algorithm = \"RS256\", public_key_file = \"FILE\" }]`, or `jwks_file = \"FILE\"`";

/// Enough for the old and new keys of a few issuers.
const KEYS_MAX: usize = 32;

pub fn read_jwt(item: Option<Item>, report: &mut Report) -> Option<TokenVerifier> {
    let mut table = section_table(item, report)?;
    let span = table.span.clone();
    let (keys, jwks) = (table.get("keys"), table.get("jwks_file"));
    let last = jwks.as_ref().or(keys.as_ref()).map(|item| item.span.clone());
    let (issuer, audience, leeway) = (table.get("issuer"), table.get("audience"), table.get("leeway"));
    let misspelled = table.finish(report);
    let named = keys.is_some() || jwks.is_some() || misspelled.iter().any(|key| ["keys", "jwks_file"].contains(key));
    if !named {
        report.missing(span, "`[jwt]` has no keys", NO_KEYS);
    }
    let mut trust = TokenVerifier::default();
    for item in keys.as_ref().and_then(|item| item.list("[{ … }]", report)).unwrap_or_default() {
        let fix = "write `{ algorithm = \"RS256\", public_key_file = \"FILE\" }`";
        let Some(table) = item.table("a key of `[jwt]`", fix, report) else { continue };
        if let Some(key) = read_key(table, report) {
            add_key(key, &item, &mut trust, report);
        }
    }
    if let (Some(Item { span, value: DeValue::Array(array), .. }), None) = (&keys, &jwks)
        && array.is_empty()
    {
        report.problem(span.clone(), "`keys` is an empty list", NO_KEYS);
    }
    if let Some(item) = jwks {
        for key in read_jwks(&item, report).unwrap_or_default() {
            add_key(key, &item, &mut trust, report);
        }
    }
    if let (Some(algorithm), Some(span)) = (ambiguous_algorithm(&trust.keys), last) {
        let message = format!(
            "more than {KEYS_TRIED_MAX} keys for `{}` may match one token, and the gateway tries at most {KEYS_TRIED_MAX}",
            algorithm.name()
        );
        report.problem(span, message, "give each key a different `kid`, and have the issuer set it in tokens");
    }
    trust.issuers = read_names(issuer, "\"https://issuer.example\"", report);
    trust.audiences = read_names(audience, "\"api\"", report);
    let leeway = leeway.and_then(|item| read_duration_ms(&item, 0..=DAY_MS, Duration::from_secs(0), report));
    trust.leeway_ms = leeway.unwrap_or(0);
    Some(trust)
}

/// The algorithm of a key that more than `KEYS_TRIED_MAX` keys cannot be distinguished from, because they have the same
/// `kid` or one of the two has none.
fn ambiguous_algorithm(keys: &[VerificationKey]) -> Option<Algorithm> {
    let alike = |key: &VerificationKey, other: &VerificationKey| {
        key.algorithm == other.algorithm && (key.kid.is_none() || other.kid.is_none() || key.kid == other.kid)
    };
    let is_crowded = |key: &&VerificationKey| keys.iter().filter(|other| alike(key, other)).count() > KEYS_TRIED_MAX;
    keys.iter().find(is_crowded).map(|key| key.algorithm)
}

fn add_key(key: VerificationKey, item: &Item, trust: &mut TokenVerifier, report: &mut Report) {
    if trust.keys.contains(&key) {
        report.problem(item.span.clone(), "a key is listed twice", "remove one of the two");
    } else if trust.keys.len() == KEYS_MAX {
        let message = format!("there are more than {KEYS_MAX} keys");
        report.problem(item.span.clone(), message, "remove keys that sign no valid tokens any more");
    } else {
        trust.keys.push(key);
    }
}

/// Reads one item of `keys`.
fn read_key(mut table: Table, report: &mut Report) -> Option<VerificationKey> {
    let span = table.span.clone();
    let algorithm =
        table.require("algorithm", "write `algorithm = \"HS256\"`, `\"RS256\"`, `\"ES256\"` or `\"EdDSA\"`");
    let algorithm = algorithm.and_then(|item| item.choice(&ALGORITHMS, report));
    let kid = table.get("kid").map(|item| Some(read_non_empty(&item, "\"2024\"", report)?.text.to_owned()));
    let mut sources = Vec::new();
    for name in ["secret", "secret_file", "public_key", "public_key_file"] {
        sources.extend(table.get(name));
    }
    let misspelled = table.finish(report);
    let algorithm = algorithm?;
    let (inline, file) = match algorithm {
        Algorithm::Hs256 => ("secret", "secret_file"),
        Algorithm::Rs256 | Algorithm::Es256 | Algorithm::EdDsa => ("public_key", "public_key_file"),
    };
    let source = match sources.as_slice() {
        [] if misspelled.iter().any(|key| *key != "algorithm" && *key != "kid") => return None,
        [] => {
            let message = format!("this key for `{}` has no `{file}`", algorithm.name());
            report.missing(span, message, format!("write `{file} = \"FILE\"`, or `{inline}`"));
            return None;
        }
        [source] => source,
        [first, second, ..] => {
            let message = format!("`{}` and `{}` are both given", first.key, second.key);
            report.problem(second.key_span.clone(), message, "keep one of the two");
            return None;
        }
    };
    if ![inline, file].contains(&source.key) {
        let message = format!("`{}` is not for `{}`", source.key, algorithm.name());
        report.problem(source.key_span.clone(), message, format!("write `{file}`, or another `algorithm`"));
        return None;
    }
    let (what, bytes) = read_key_material(source, source.key == file, report)?;
    let kid = match kid {
        None => None,
        Some(kid) => Some(kid?),
    };
    let key = match algorithm {
        Algorithm::Hs256 => VerificationKey::from_secret(strip_line_end(&bytes), kid),
        Algorithm::Rs256 | Algorithm::Es256 | Algorithm::EdDsa => {
            VerificationKey::from_public_pem(algorithm, &bytes, kid)
        }
    };
    key.map_err(|error| report_invalid_key(error, &what, source, report)).ok()
}

/// Reads the bytes of a key, and its name in messages: the setting or the file, never the content.
fn read_key_material(source: &Item, is_file: bool, report: &mut Report) -> Option<(String, Vec<u8>)> {
    if is_file {
        let path = read_non_empty(source, "\"FILE\"", report)?;
        return Some((quoted(path.text), report.read_file(path.text, &path.span)?));
    }
    match source.value {
        DeValue::String(text) => Some((format!("`{}`", source.key), text.as_bytes().to_vec())),
        _ => {
            let message = format!("`{}`: expected a string", source.key);
            report.problem(
                source.span.clone(),
                message,
                format!("write it in quotes, or name a file: `{}_file`", source.key),
            );
            None
        }
    }
}

fn read_jwks(item: &Item, report: &mut Report) -> Option<Vec<VerificationKey>> {
    let path = read_non_empty(item, "\"jwks.json\"", report)?;
    let bytes = report.read_file(path.text, &path.span)?;
    let what = quoted(path.text);
    let (message, fix) = match jwks::parse(&bytes) {
        Ok(keys) => return Some(keys),
        Err(JwksError::Json(line, column)) => (
            format!("{what} is not JSON: line {line}, column {column}"),
            String::from("name a JSON Web Key Set, as issuers publish it"),
        ),
        Err(JwksError::NoKeys) => (
            format!("{what} has no list `keys`"),
            String::from("name a JSON Web Key Set: `{\"keys\": […]}`, as issuers publish it"),
        ),
        Err(JwksError::NoUsableKey) => (
            format!("{what} has no key for HS256, RS256, ES256 or EdDSA"),
            String::from("have the issuer sign with one of these algorithms, and name its key set"),
        ),
        Err(JwksError::BadKey(position, error)) => error.explain(&format!("key {position} of {what}")),
    };
    report.problem(item.span.clone(), message, fix);
    None
}

fn report_invalid_key(error: InvalidKey, what: &str, source: &Item, report: &mut Report) {
    let (message, fix) = error.explain(what);
    report.problem(source.span.clone(), message, fix);
}

/// Reads a string that is not empty.
fn read_non_empty<'d>(item: &Item<'d>, example: &str, report: &mut Report) -> Option<SpannedStr<'d>> {
    let word = item.string(example, report)?;
    if word.text.is_empty() {
        report.problem(word.span, format!("`{}` is empty", item.key), item.fix_with(example));
        return None;
    }
    Some(word)
}

/// Reads one accepted value of a claim, or several.
fn read_names(item: Option<Item>, example: &str, report: &mut Report) -> Vec<String> {
    let Some(item) = item else { return Vec::new() };
    let words = item.strings(example, report).unwrap_or_default();
    let empty = matches!(item.value, DeValue::Array(array) if array.is_empty());
    if empty || words.iter().any(|word| word.text.is_empty()) {
        let fix = format!("{}, or remove it: any value is then accepted", item.fix_with(example));
        report.problem(item.span.clone(), format!("`{}` is empty", item.key), fix);
    }
    words.into_iter().map(|word| word.text.to_owned()).collect()
}

/// Reports a `[jwt]` that nothing uses, and a claim in a rule or in `[clients]` without `[jwt]`. `misspelled` has the
/// sections that unknown keys of the file were probably meant to be.
pub fn report_missing_or_unused_jwt(
    jwt: Option<&Item>,
    rules: Option<&Item>,
    clients: Option<&Item>,
    misspelled: &[&str],
    report: &mut Report,
) {
    match (jwt, first_claim(rules, clients)) {
        (None, Some(word)) if !misspelled.contains(&"jwt") => {
            let message =
                format!("{} needs verified tokens, and there is no `[jwt]` with their keys", quoted(word.text));
            let fix = "write `[jwt]`, then `keys = [{ algorithm = \"RS256\", public_key_file = \"FILE\" }]`";
            report.missing(word.span, message, fix);
        }
        (Some(item), None) if !misspelled.contains(&"rules") => {
            let message = "`[jwt]` has no effect: no rule counts by a claim";
            report.missing(item.key_span.clone(), message, "remove it, or write a rule with `key = \"jwt:sub\"`");
        }
        _ => {}
    }
}

/// The first claim in the key of a rule, or in `[clients]`.
fn first_claim<'d>(rules: Option<&Item<'d>>, clients: Option<&Item<'d>>) -> Option<SpannedStr<'d>> {
    let table = |item: &Item<'d>| if let DeValue::Table(table) = item.value { Some(table) } else { None };
    let rules = rules.and_then(table).into_iter().flat_map(|rules| rules.values());
    let keys = rules.filter_map(|rule| rule.get_ref().as_table()?.get("key"));
    let clients = clients.and_then(table);
    let named = ["api_key", "subject"].into_iter().filter_map(|key| clients?.get(key));
    let words = keys.chain(named).flat_map(|key| match key.get_ref() {
        DeValue::String(text) => vec![SpannedStr { text, span: key.span() }],
        DeValue::Array(items) => {
            let texts =
                items.iter().filter_map(|item| Some(SpannedStr { text: item.get_ref().as_str()?, span: item.span() }));
            texts.collect()
        }
        _ => Vec::new(),
    });
    words
        .filter(|word| word.text.strip_prefix("jwt:").is_some_and(|claim| !claim.is_empty()))
        .min_by_key(|word| word.span.start)
}
