//! A key that signatures are verified with, and the one algorithm that it is for.
//!
//! RFC 8725, section 3.1: a key is bound to its algorithm when it is read, so that no token can have
//! an RSA key taken for a secret, or ask for no signature at all. What a key is made of is shown to
//! nobody.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::encoding::{AsDer, PublicKeyX509Der};
use aws_lc_rs::rsa::PublicEncryptingKey;
use aws_lc_rs::signature::{self, ParsedPublicKey, RsaPublicKeyComponents};
use aws_lc_rs::{digest, hmac};
use rustls_pki_types::pem::{PemObject, SectionKind};

/// RFC 7518, section 3.2: a secret is at least as long as the hash.
const SECRET_MIN_BYTES: usize = 32;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Algorithm {
    Hs256,
    Rs256,
    Es256,
    EdDsa,
}

impl Algorithm {
    /// As RFC 7518, section 3.1, and RFC 8037 call it.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Hs256 => "HS256",
            Algorithm::Rs256 => "RS256",
            Algorithm::Es256 => "ES256",
            Algorithm::EdDsa => "EdDSA",
        }
    }
}

#[derive(Clone)]
pub struct Key {
    pub algorithm: Algorithm,
    /// A token that names another id is not of this key.
    pub kid: Option<String>,
    lock: Lock,
    /// Tells keys apart without showing them.
    digest: [u8; 32],
}

#[derive(Clone)]
enum Lock {
    Secret(Arc<hmac::Key>),
    Public(Arc<ParsedPublicKey>),
}

/// Why bytes are no key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InvalidKey {
    /// A secret of so many bytes, which are too few.
    ShortSecret(usize),
    /// Something in PEM where a secret is expected.
    PemAsSecret,
    PrivateKey,
    Certificate,
    /// No PEM, or something else in it.
    NoPublicKey,
    /// A public key, but none for this algorithm.
    OtherKind(Algorithm),
    /// An RSA key that is too short to be safe, or longer than is verified with.
    RsaSize,
}

impl Key {
    /// A key for HS256.
    pub fn secret(secret: &[u8], kid: Option<String>) -> Result<Key, InvalidKey> {
        if secret.trim_ascii_start().starts_with(b"-----BEGIN ") {
            return Err(InvalidKey::PemAsSecret);
        }
        if secret.len() < SECRET_MIN_BYTES {
            return Err(InvalidKey::ShortSecret(secret.len()));
        }
        let lock = Lock::Secret(Arc::new(hmac::Key::new(hmac::HMAC_SHA256, secret)));
        Ok(Key { algorithm: Algorithm::Hs256, kid, lock, digest: digest_of(secret) })
    }

    /// A key for one of the other algorithms, in PEM.
    pub fn public_pem(algorithm: Algorithm, text: &[u8], kid: Option<String>) -> Result<Key, InvalidKey> {
        match Section::from_pem_slice(text) {
            Ok(Section(SectionKind::PublicKey, der)) => Key::public(algorithm, &der, kid),
            Ok(Section(SectionKind::Certificate, _)) => Err(InvalidKey::Certificate),
            Ok(Section(SectionKind::PrivateKey | SectionKind::RsaPrivateKey | SectionKind::EcPrivateKey, _)) => {
                Err(InvalidKey::PrivateKey)
            }
            Ok(_) | Err(_) => Err(InvalidKey::NoPublicKey),
        }
    }

    /// A public key as a SubjectPublicKeyInfo (RFC 5280, section 4.1); also a point of P-256, or the
    /// bytes of an Ed25519 key.
    pub fn public(algorithm: Algorithm, der: &[u8], kid: Option<String>) -> Result<Key, InvalidKey> {
        let parsed = match algorithm {
            Algorithm::Hs256 => return Err(InvalidKey::NoPublicKey),
            Algorithm::Rs256 => ParsedPublicKey::new(&signature::RSA_PKCS1_2048_8192_SHA256, der),
            Algorithm::Es256 => ParsedPublicKey::new(&signature::ECDSA_P256_SHA256_FIXED, der),
            Algorithm::EdDsa => ParsedPublicKey::new(&signature::ED25519, der),
        };
        Key::parsed(algorithm, parsed.map_err(|_rejected| InvalidKey::OtherKind(algorithm))?, kid)
    }

    /// An RSA key by modulus and exponent, big-endian.
    pub fn rsa(n: &[u8], e: &[u8], kid: Option<String>) -> Result<Key, InvalidKey> {
        let plain = |bytes: &[u8]| bytes.iter().copied().skip_while(|byte| *byte == 0).collect::<Vec<u8>>();
        let parts = RsaPublicKeyComponents { n: plain(n), e: plain(e) };
        let parsed = parts.to_parsed_public_key(&signature::RSA_PKCS1_2048_8192_SHA256);
        Key::parsed(Algorithm::Rs256, parsed.map_err(|_rejected| InvalidKey::OtherKind(Algorithm::Rs256))?, kid)
    }

    fn parsed(algorithm: Algorithm, parsed: ParsedPublicKey, kid: Option<String>) -> Result<Key, InvalidKey> {
        if algorithm == Algorithm::Rs256 {
            // A key of a size that is not verified with is otherwise noticed only when it refuses all
            // tokens. One to encrypt with has the same bounds, and says so at once.
            let der: PublicKeyX509Der = parsed.as_der().map_err(|_failed| InvalidKey::OtherKind(algorithm))?;
            PublicEncryptingKey::from_der(der.as_ref()).map_err(|_rejected| InvalidKey::RsaSize)?;
        }
        let digest = digest_of(parsed.as_ref());
        Ok(Key { algorithm, kid, lock: Lock::Public(Arc::new(parsed)), digest })
    }

    /// Whether a signature is this key's.
    pub fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        match &self.lock {
            // In constant time.
            Lock::Secret(key) => hmac::verify(key, message, signature).is_ok(),
            Lock::Public(key) => key.verify_sig(message, signature).is_ok(),
        }
    }
}

fn digest_of(bytes: &[u8]) -> [u8; 32] {
    let mut all = [0; 32];
    let digest = digest::digest(&digest::SHA256, bytes);
    all.iter_mut().zip(digest.as_ref()).for_each(|(to, from)| *to = *from);
    all
}

/// Keys that verify the same tokens are equal.
impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        (self.algorithm, &self.kid, self.digest) == (other.algorithm, &other.kid, other.digest)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").field("algorithm", &self.algorithm).field("kid", &self.kid).finish_non_exhaustive()
    }
}

/// The first thing in a PEM file that is known.
struct Section(SectionKind, Vec<u8>);

impl PemObject for Section {
    fn from_pem(kind: SectionKind, der: Vec<u8>) -> Option<Section> {
        Some(Section(kind, der))
    }
}

impl InvalidKey {
    /// Message and fix; `what` is what was read, such as a file.
    pub fn explain(self, what: &str) -> (String, String) {
        match self {
            InvalidKey::ShortSecret(bytes) => (
                format!(
                    "{what} has {bytes} bytes, and a secret for HS256 at least {SECRET_MIN_BYTES} (RFC 7518, section 3.2)"
                ),
                String::from("let both sides use a longer one, such as from `openssl rand -base64 48`"),
            ),
            InvalidKey::PemAsSecret => (
                format!("{what} is a key in PEM, and HS256 takes a secret"),
                String::from("write the `algorithm` of the key, and name it with `public_key_file`"),
            ),
            InvalidKey::PrivateKey => (
                format!("{what} is a private key, which the gateway has no use for"),
                String::from("name the public one, as `openssl pkey -in KEY -pubout` writes it"),
            ),
            InvalidKey::Certificate => (
                format!("{what} is a certificate"),
                String::from("name its public key, as `openssl x509 -in CERTIFICATE -pubkey -noout` writes it"),
            ),
            InvalidKey::NoPublicKey => (
                format!("{what} is no public key in PEM"),
                String::from(
                    "it begins with `-----BEGIN PUBLIC KEY-----`; `openssl pkey -in KEY -pubout` writes it so",
                ),
            ),
            InvalidKey::OtherKind(algorithm) => (
                format!("{what} is no key for `{}`", algorithm.name()),
                String::from(match algorithm {
                    Algorithm::Rs256 => "name an RSA key, or write the `algorithm` that the key is for",
                    Algorithm::Es256 => "name a key on the curve P-256, or write the `algorithm` that the key is for",
                    Algorithm::EdDsa => "name an Ed25519 key, or write the `algorithm` that the key is for",
                    Algorithm::Hs256 => "name a secret, or write the `algorithm` that the key is for",
                }),
            ),
            InvalidKey::RsaSize => (
                format!("{what} is no RSA key of 2048 to 8192 bits (RFC 7518, section 3.3)"),
                String::from("let the issuer sign with a longer one"),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_long_enough_and_no_pem() {
        assert_eq!(Key::secret(&[7; 31], None), Err(InvalidKey::ShortSecret(31)));
        assert!(Key::secret(&[7; 32], None).is_ok());
        // The public key of an issuer as a secret would let everybody sign.
        let pem = b"\n-----BEGIN PUBLIC KEY-----\nAAAAAAAAAAAAAAAAAAAAAAAA\n-----END PUBLIC KEY-----\n";
        assert_eq!(Key::secret(pem, None), Err(InvalidKey::PemAsSecret));
    }

    #[test]
    fn what_a_pem_file_holds_is_told_apart() {
        let pem = |kind: &str| format!("-----BEGIN {kind}-----\nAAAA\n-----END {kind}-----\n");
        for (text, flaw) in [
            (pem("PRIVATE KEY"), InvalidKey::PrivateKey),
            (pem("EC PRIVATE KEY"), InvalidKey::PrivateKey),
            (pem("CERTIFICATE"), InvalidKey::Certificate),
            (pem("RSA PUBLIC KEY"), InvalidKey::NoPublicKey),
            (pem("PUBLIC KEY"), InvalidKey::OtherKind(Algorithm::Rs256)),
            (String::new(), InvalidKey::NoPublicKey),
            ("secret".to_owned(), InvalidKey::NoPublicKey),
            (pem("PUBLIC KEY").replace("AAAA", "????"), InvalidKey::NoPublicKey),
        ] {
            assert_eq!(Key::public_pem(Algorithm::Rs256, text.as_bytes(), None), Err(flaw), "{text}");
        }
    }

    #[test]
    fn equal_keys_are_known_as_such() {
        let key = |byte, kid: &str| Key::secret(&[byte; 32], Some(kid.to_owned())).unwrap();
        assert_eq!(key(1, "a"), key(1, "a"));
        assert_ne!(key(1, "a"), key(2, "a"));
        assert_ne!(key(1, "a"), key(1, "b"));
    }
}
