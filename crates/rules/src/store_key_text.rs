//! The text of a key, `RULE|PART|PART`: its name in the shared store and in the admin API.
//!
//! The parts are those of the hash, in the same order, escaped so that a value cannot contain a separator. A secret or
//! long part is replaced by a keyed digest, equal on all gateways that have the same key. Different keys of a rule have
//! different texts, up to collisions of HMAC-SHA256. With a `key_format`, the text is the name of the counters.

use std::fmt::{self, Write};
use std::net::{Ipv4Addr, Ipv6Addr};

use aws_lc_rs::hmac;

use super::PartPosition;
use super::client_plans::ClientPlans;
use super::key_source::feed_address;
use transom_config::key_kind::{is_secret_part, number as kind};
use transom_limiter::handles::IdVec;
use transom_limiter::key::KeyPart;
use transom_limiter::rule::Rule;
use transom_limiter::store_key::{encode_formatted_key, percent_encode};

/// The prefix of a digest.
pub const DIGEST: &str = "hmac-";
/// Bytes of the digest that are written, as 32 hex digits.
const DIGEST_BYTES: usize = 16;
/// A part whose encoding is longer is replaced by its digest.
const PART_MAX_BYTES: usize = 256;

/// The text format of the keys of a rule.
#[derive(Debug)]
pub struct KeyTextFormat {
    /// The start of every key.
    prefix: Box<str>,
    /// The end of every key; empty without a `key_format`.
    suffix: Box<str>,
    is_formatted: bool,
    parts: IdVec<PartPosition, TextPart>,
}

#[derive(Debug)]
struct TextPart {
    part: KeyPart,
    /// Whether the part is a secret, judged by its name.
    is_secret: bool,
}

impl KeyTextFormat {
    /// Keys of a fallback start with a part that names the fallback. The part has a `=`, which other parts escape.
    pub fn new(rule: &Rule, parts: &[KeyPart], is_fallback: bool) -> KeyTextFormat {
        let mut prefix = String::new();
        match &rule.key_format {
            Some(format) => prefix.push_str(&format.before_key),
            None => percent_encode(rule.name.as_bytes(), &mut prefix),
        }
        if is_fallback {
            prefix.push_str("|else=");
            let names: Vec<String> = parts.iter().map(KeyPart::to_string).collect();
            percent_encode(names.join(",").as_bytes(), &mut prefix);
        }
        KeyTextFormat {
            prefix: prefix.into(),
            suffix: rule.key_format.as_ref().map(|format| format.after_key.as_str()).unwrap_or_default().into(),
            is_formatted: rule.key_format.is_some(),
            parts: parts.iter().map(|part| TextPart { part: part.clone(), is_secret: is_secret_part(part) }).collect(),
        }
    }

    /// The name of a part.
    pub fn part_name(&self, position: PartPosition) -> String {
        self.parts[position].part.to_string()
    }

    /// The parts of the key, in order.
    pub fn parts(&self) -> impl Iterator<Item = (PartPosition, &KeyPart)> {
        self.parts.enumerate().map(|(position, TextPart { part, .. })| (position, part))
    }

    /// Appends the start of a key.
    pub fn write_prefix(&self, out: &mut String) {
        out.push_str(&self.prefix);
    }

    /// Appends the end of a key.
    pub fn write_suffix(&self, out: &mut String) {
        out.push_str(&self.suffix);
    }

    /// Appends the part at a position, with its kind and bytes as in [`super::key_source::KeySource::feed`].
    pub fn write_part(
        &self,
        position: PartPosition,
        part_kind: u8,
        bytes: &[u8],
        digester: &KeyDigester,
        out: &mut String,
    ) {
        let TextPart { part, is_secret } = &self.parts[position];
        let encode = if self.is_formatted { encode_formatted_key } else { percent_encode };
        if !self.is_formatted {
            out.push('|');
        }
        if *is_secret || digester.is_api_key(part) {
            return digester.write_digest(bytes, out);
        }
        let start = out.len();
        match (part_kind, <[u8; 4]>::try_from(bytes), <[u8; 16]>::try_from(bytes)) {
            (kind::GLOBAL, ..) => {}
            (kind::IPV4, Ok(v4), _) => encode(Ipv4Addr::from(v4).to_string().as_bytes(), out),
            (kind::IPV6, _, Ok(v6)) => encode(Ipv6Addr::from(v6).to_string().as_bytes(), out),
            // Escaped, so that a value from a client never equals a digest.
            _ if bytes.starts_with(DIGEST.as_bytes()) => {
                out.push_str("%68");
                encode(bytes.get(1..).unwrap_or_default(), out);
            }
            _ => encode(bytes, out),
        }
        if out.len() - start > PART_MAX_BYTES {
            out.truncate(start);
            digester.write_digest(bytes, out);
        }
    }

    /// Appends a key's text in the shared store, equal to the text for requests with that key. Returns `false`, and appends
    /// nothing, if `key` does not fit the rule.
    pub fn write_values<K: AsRef<str>>(&self, key: &[K], digester: &KeyDigester, out: &mut String) -> bool {
        let start = out.len();
        self.write_prefix(out);
        let mut values = key.iter();
        for (position, part) in self.parts() {
            let value = match values.next() {
                Some(value) => value.as_ref(),
                None if *part == KeyPart::GLOBAL => "",
                None => {
                    out.truncate(start);
                    return false;
                }
            };
            let mut take = |kind: u8, bytes: &[u8]| self.write_part(position, kind, bytes, digester, out);
            match part.prefixes().map(|prefixes| (prefixes, value.parse())) {
                Some((prefixes, Ok(parsed))) => feed_address(parsed, prefixes, &mut take),
                Some((_, Err(_))) => {
                    out.truncate(start);
                    return false;
                }
                None => take(part.kind.number, value.as_bytes()),
            }
        }
        self.write_suffix(out);
        true
    }

    /// The part at a position as people read it: as in [`KeyTextFormat::write_part`], but not escaped, and a network with
    /// its prefix.
    pub fn readable_part(&self, position: PartPosition, part_kind: u8, bytes: &[u8], digester: &KeyDigester) -> String {
        let TextPart { part, is_secret } = &self.parts[position];
        let network = |address: String, prefix: u8, bits: u8| match prefix < bits {
            true => format!("{address}/{prefix}"),
            false => address,
        };
        match (part.prefixes(), <[u8; 4]>::try_from(bytes), <[u8; 16]>::try_from(bytes)) {
            (Some(prefixes), Ok(v4), _) if part_kind == kind::IPV4 => {
                network(Ipv4Addr::from(v4).to_string(), prefixes.v4, 32)
            }
            (Some(prefixes), _, Ok(v6)) if part_kind == kind::IPV6 => {
                network(Ipv6Addr::from(v6).to_string(), prefixes.v6, 128)
            }
            _ if *is_secret || digester.is_api_key(part) || bytes.len() > PART_MAX_BYTES => {
                let mut out = String::new();
                digester.write_digest(bytes, &mut out);
                out
            }
            _ => String::from_utf8_lossy(bytes).into_owned(),
        }
    }

    /// The name of the client that the part at a position names.
    pub fn client_of_part(&self, position: PartPosition, bytes: &[u8], plans: Option<&ClientPlans>) -> Option<String> {
        plans?.client_of_part(&self.parts[position].part, bytes).map(str::to_owned)
    }
}

/// Computes the digests that replace secret and long parts.
pub struct KeyDigester {
    key: hmac::Key,
    /// The parts with API keys of clients, by the configuration.
    api_keys: Vec<KeyPart>,
}

impl KeyDigester {
    /// `key` is common to all gateways that share counters; `api_keys` are the parts with API keys of clients.
    pub fn new(key: &[u8], api_keys: &[KeyPart]) -> KeyDigester {
        KeyDigester { key: hmac::Key::new(hmac::HMAC_SHA256, key), api_keys: api_keys.to_vec() }
    }

    fn is_api_key(&self, part: &KeyPart) -> bool {
        self.api_keys.contains(part)
    }

    fn write_digest(&self, bytes: &[u8], out: &mut String) {
        out.push_str(DIGEST);
        for byte in hmac::sign(&self.key, bytes).as_ref().iter().take(DIGEST_BYTES) {
            // Writing to a string cannot fail.
            let _ = write!(out, "{byte:02x}");
        }
    }
}

/// The key is not shown.
impl fmt::Debug for KeyDigester {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyDigester").field("api_keys", &self.api_keys).finish_non_exhaustive()
    }
}

#[cfg(test)]
pub mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use http::{HeaderMap, HeaderValue};
    use proptest::prelude::*;

    use super::*;
    use crate::client_plans::ClientLookup;
    use crate::rate_limit_key::RuleKey;
    use crate::rate_limit_key::tests::{SEED, route, rule, with_request};
    use transom_config::key_kind::{CLIENT_CERT, COOKIE, HEADER, HOST, IP, JWT, METHOD, PARAM, PATH, QUERY, ROUTE};
    use transom_jwt::cache::TokenCache;
    use transom_jwt::token::TokenVerifier;
    use transom_jwt::verification_key::VerificationKey;
    use transom_limiter::handles::{Handle, RuleId};
    use transom_limiter::key::{KeyHasher, OnMissing};
    use transom_limiter::rule_set::RuleSet;

    const SECRET: &[u8] = b"an example of a secret, long enough";
    const V4: KeyPart = IP.of_prefixes(32, 64);

    fn digester() -> KeyDigester {
        KeyDigester::new(b"a key", &[])
    }

    pub fn tokens() -> TokenCache {
        let verifier = TokenVerifier {
            keys: vec![VerificationKey::from_secret(SECRET, None).unwrap()],
            ..TokenVerifier::default()
        };
        TokenCache::new(verifier, vec!["sub".to_owned()], KeyHasher::new(SEED, 0))
    }

    pub fn token(claims: &str) -> String {
        let encode = |text: &str| URL_SAFE_NO_PAD.encode(text);
        let signed = format!("{}.{}", encode(r#"{"alg":"HS256"}"#), encode(claims));
        let signature = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, SECRET), signed.as_bytes());
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
    }

    pub fn headers(fields: &[(&'static str, &[u8])]) -> HeaderMap {
        fields.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_bytes(value).unwrap())).collect()
    }

    /// The text of the key of a request.
    fn text_by(
        digester: &KeyDigester,
        key: &[KeyPart],
        on_missing: OnMissing,
        address: &str,
        headers: &HeaderMap,
    ) -> String {
        let rule_set = RuleSet::new(&[rule(key, on_missing)], SEED, None);
        let rule_key = RuleKey::new(&rule_set.rules[RuleId::at(0)], &route(), SEED);
        let mut text = String::from("transom:");
        let clients = ClientLookup::new(None);
        let found = with_request(address, headers, &tokens(), |request| {
            assert_eq!(
                matches!(rule_key.keyed_request(request, &clients), Ok(Ok(_))),
                rule_key.write_store_key(request, &clients, digester, &mut String::new())
            );
            rule_key.write_store_key(request, &clients, digester, &mut text)
        });
        assert!(found || text == "transom:");
        text.split_off("transom:".len())
    }

    fn text(key: &[KeyPart], address: &str, headers: &HeaderMap) -> String {
        text_by(&digester(), key, OnMissing::Refuse, address, headers)
    }

    /// The text of a key in the decision API.
    fn decision_api_text(key: &[KeyPart], values: &[&str]) -> Option<String> {
        let format = KeyTextFormat::new(&rule(key, OnMissing::Refuse), key, false);
        let mut text = String::new();
        format.write_values(values, &digester(), &mut text).then_some(text)
    }

    #[test]
    fn requests_and_the_decision_api_have_equal_texts_for_every_part() {
        let bearer = format!("Bearer {}", token(r#"{"sub":"al ice"}"#));
        let headers =
            headers(&[("x-user", b"bob|{1}"), ("cookie", b"id=c00kie"), ("authorization", bearer.as_bytes())]);
        let all = [
            (IP.of_prefixes(24, 64), "10.0.0.7", "10.0.0.0"),
            (HEADER.of_name("x-user"), "bob|{1}", "bob%7C%7B1%7D"),
            (COOKIE.of_name("id"), "c00kie", "hmac-f7e5ea46dcf22b0c2e8dd9bb4bf7dc5a"),
            (QUERY.of_name("token"), "a b", "hmac-"),
            (JWT.of_name("sub"), "al ice", "al%20ice"),
            (PARAM.of_name("id"), "77", "77"),
            (CLIENT_CERT.part(), "f00d", "f00d"),
            (HOST.part(), "example.com", "example.com"),
            (METHOD.part(), "GET", "GET"),
            (PATH.part(), "/u/77", "%2Fu%2F77"),
            (ROUTE.part(), "route", "route"),
            (KeyPart::GLOBAL, "", ""),
        ];
        for (part, value, written) in &all {
            let of_request = text(std::slice::from_ref(part), "10.0.0.7", &headers);
            assert_eq!(decision_api_text(std::slice::from_ref(part), &[value]), Some(of_request.clone()), "{part}");
            match written.strip_prefix(DIGEST) {
                None => assert_eq!(of_request, format!("r|{written}"), "{part}"),
                Some(_) => assert!(of_request.starts_with("r|hmac-") && of_request.len() == 39, "{part}"),
            }
        }
        let parts: Vec<KeyPart> = all.iter().map(|(part, ..)| part.clone()).collect();
        let values: Vec<&str> = all.iter().map(|(_, value, _)| *value).collect();
        assert_eq!(decision_api_text(&parts, &values), Some(text(&parts, "10.0.0.7", &headers)));
        assert_eq!(decision_api_text(&[KeyPart::GLOBAL], &[]), Some("r|".to_owned()));
        assert_eq!(decision_api_text(&[KeyPart::GLOBAL], &["any"]), Some("r|".to_owned()));
        assert_eq!(decision_api_text(&[V4], &["10.0.0"]), None);
        assert_eq!(decision_api_text(&[V4, HOST.part()], &["10.0.0.1"]), None);
    }

    #[test]
    fn addresses_are_written_as_networks() {
        let none = HeaderMap::new();
        for (address, written) in [
            ("10.0.0.1", "r|10.0.0.1"),
            ("::ffff:10.0.0.1", "r|10.0.0.1"),
            ("2001:db8:0:1:2:3:4:5", "r|2001%3Adb8%3A0%3A1%3A%3A"),
            ("2001:DB8::1", "r|2001%3Adb8%3A%3A"),
        ] {
            assert_eq!(text(&[V4], address, &none), written);
        }
    }

    #[test]
    fn a_digest_is_hmac_sha_256() {
        // RFC 4231, test case 2.
        let mut out = String::new();
        KeyDigester::new(b"Jefe", &[]).write_digest(b"what do ya want for nothing?", &mut out);
        assert_eq!(out, "hmac-5bdcc146bf60754e6a042426089575c7");
    }

    #[test]
    fn credentials_are_replaced_by_digests() {
        let header = |name: &str| HEADER.of_name(name);
        for name in ["authorization", "proxy-authorization", "x-api-key", "x-auth-token", "my-session-id"] {
            assert!(is_secret_part(&header(name)), "{name}");
        }
        assert!(is_secret_part(&QUERY.of_name("API_KEY")) && is_secret_part(&COOKIE.of_name("theme")));
        assert!(!is_secret_part(&header("x-user")) && !is_secret_part(&JWT.of_name("sub")));
        let user = headers(&[("x-user", b"bob")]);
        let configured = KeyDigester::new(b"a key", &[header("x-user")]);
        let known =
            |digester: &KeyDigester| text_by(digester, &[header("x-user")], OnMissing::Refuse, "10.0.0.1", &user);
        assert_eq!(known(&digester()), "r|bob");
        assert!(known(&configured).starts_with("r|hmac-"));
        assert_ne!(known(&configured), known(&KeyDigester::new(b"another key", &[header("x-user")])));
        assert!(!format!("{configured:?}").contains("a key"));
    }

    #[test]
    fn keys_are_bounded_and_no_value_equals_a_digest() {
        let user = |value: &[u8]| text(&[HEADER.of_name("x-user")], "10.0.0.1", &headers(&[("x-user", value)]));
        assert_eq!(user(&[b'a'; 256]).len(), 2 + 256);
        let long = user(&[b'a'; 257]);
        assert!(long.starts_with("r|hmac-") && long.len() == 39);
        assert!(user(&[b'|'; 86]).starts_with("r|hmac-"));
        assert_eq!(user(&long.as_bytes()[2..]), format!("r|%68{}", &long[3..]));
        assert!(user(&[long.as_bytes(), &[b'a'; 300]].concat()).len() <= 2 + 256);
    }

    #[test]
    fn keys_of_a_fallback_differ_from_other_keys() {
        let key = [HEADER.of_name("x-user"), METHOD.part()];
        let fallback = |parts: &[KeyPart]| OnMissing::Fallback(parts.to_vec());
        let written =
            |parts: &[KeyPart], headers: &HeaderMap| text_by(&digester(), &key, fallback(parts), "10.0.0.1", headers);
        let none = HeaderMap::new();
        assert_eq!(written(&[V4], &none), "r|else=ip|10.0.0.1");
        assert_eq!(written(&[V4, HOST.part()], &none), "r|else=ip%2Chost|10.0.0.1|example.com");
        assert_eq!(written(&[KeyPart::GLOBAL], &none), "r|else=global|");
        assert_eq!(written(&[V4], &headers(&[("x-user", b"else=ip")])), "r|else%3Dip|GET");
        assert_eq!(text_by(&digester(), &key, OnMissing::Skip, "10.0.0.1", &none), "");
    }

    proptest! {
        #[test]
        fn different_keys_have_different_texts(
            a in proptest::collection::vec(any::<u8>(), 0..40), b in proptest::collection::vec(any::<u8>(), 0..40),
            at in 0..40_usize,
        ) {
            let key = [PATH.part(), PATH.part()];
            let format = KeyTextFormat::new(&rule(&key, OnMissing::Refuse), &key, false);
            let written = |key: [&[u8]; 2]| {
                let mut text = String::new();
                format.write_prefix(&mut text);
                format.parts().zip(key).for_each(|((i, _), bytes)| format.write_part(i, 7, bytes, &digester(), &mut text));
                prop_assert!(text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".~-%|".contains(&byte)));
                prop_assert_eq!(text.matches('|').count(), 2);
                Ok(text)
            };
            // The same bytes, split at another position, and in another order.
            let both = [a.as_slice(), b.as_slice()].concat();
            let (left, right) = both.split_at(at.min(both.len()));
            prop_assert_eq!(written([&a, &b])? == written([left, right])?, a == left);
            prop_assert_eq!(written([&a, &b])? == written([&b, &a])?, a == b);
        }
    }
}
