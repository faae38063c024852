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
pub struct VerificationKey {
    pub algorithm: Algorithm,
    /// A token that names another id is not of this key.
    pub kid: Option<String>,
    material: KeyMaterial,
    /// Tells keys apart without showing them.
    digest: [u8; 32],
}

#[derive(Clone)]
enum KeyMaterial {
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
    WrongKind(Algorithm),
    /// An RSA key that is too short to be safe, or longer than is verified with.
    RsaSize,
}

impl VerificationKey {
    /// A key for HS256.
    pub fn from_secret(secret: &[u8], kid: Option<String>) -> Result<VerificationKey, InvalidKey> {
        if secret.trim_ascii_start().starts_with(b"-----BEGIN ") {
            return Err(InvalidKey::PemAsSecret);
        }
        if secret.len() < SECRET_MIN_BYTES {
            return Err(InvalidKey::ShortSecret(secret.len()));
        }
        let lock = KeyMaterial::Secret(Arc::new(hmac::Key::new(hmac::HMAC_SHA256, secret)));
        Ok(VerificationKey { algorithm: Algorithm::Hs256, kid, material: lock, digest: sha256(secret) })
    }

    /// A key for one of the other algorithms, in PEM.
    pub fn from_public_pem(
        algorithm: Algorithm,
        text: &[u8],
        kid: Option<String>,
    ) -> Result<VerificationKey, InvalidKey> {
        match PemSection::from_pem_slice(text) {
            Ok(PemSection(SectionKind::PublicKey, der)) => VerificationKey::from_public_bytes(algorithm, &der, kid),
            Ok(PemSection(SectionKind::Certificate, _)) => Err(InvalidKey::Certificate),
            Ok(PemSection(SectionKind::PrivateKey | SectionKind::RsaPrivateKey | SectionKind::EcPrivateKey, _)) => {
                Err(InvalidKey::PrivateKey)
            }
            Ok(_) | Err(_) => Err(InvalidKey::NoPublicKey),
        }
    }

    /// A public key as a SubjectPublicKeyInfo (RFC 5280, section 4.1); also a point of P-256, or the
    /// bytes of an Ed25519 key.
    pub fn from_public_bytes(
        algorithm: Algorithm,
        der: &[u8],
        kid: Option<String>,
    ) -> Result<VerificationKey, InvalidKey> {
        let parsed = match algorithm {
            Algorithm::Hs256 => return Err(InvalidKey::NoPublicKey),
            Algorithm::Rs256 => ParsedPublicKey::new(&signature::RSA_PKCS1_2048_8192_SHA256, der),
            Algorithm::Es256 => ParsedPublicKey::new(&signature::ECDSA_P256_SHA256_FIXED, der),
            Algorithm::EdDsa => ParsedPublicKey::new(&signature::ED25519, der),
        };
        VerificationKey::from_parsed(algorithm, parsed.map_err(|_rejected| InvalidKey::WrongKind(algorithm))?, kid)
    }

    /// An RSA key by modulus and exponent, big-endian.
    pub fn from_rsa(n: &[u8], e: &[u8], kid: Option<String>) -> Result<VerificationKey, InvalidKey> {
        let plain = |bytes: &[u8]| bytes.iter().copied().skip_while(|byte| *byte == 0).collect::<Vec<u8>>();
        let parts = RsaPublicKeyComponents { n: plain(n), e: plain(e) };
        let parsed = parts.to_parsed_public_key(&signature::RSA_PKCS1_2048_8192_SHA256);
        VerificationKey::from_parsed(
            Algorithm::Rs256,
            parsed.map_err(|_rejected| InvalidKey::WrongKind(Algorithm::Rs256))?,
            kid,
        )
    }

    fn from_parsed(
        algorithm: Algorithm,
        parsed: ParsedPublicKey,
        kid: Option<String>,
    ) -> Result<VerificationKey, InvalidKey> {
        if algorithm == Algorithm::Rs256 {
            // A key of a size that is not verified with is otherwise noticed only when it refuses all
            // tokens. One to encrypt with has the same bounds, and says so at once.
            let der: PublicKeyX509Der = parsed.as_der().map_err(|_failed| InvalidKey::WrongKind(algorithm))?;
            PublicEncryptingKey::from_der(der.as_ref()).map_err(|_rejected| InvalidKey::RsaSize)?;
        }
        let digest = sha256(parsed.as_ref());
        Ok(VerificationKey { algorithm, kid, material: KeyMaterial::Public(Arc::new(parsed)), digest })
    }

    /// Whether a signature is this key's.
    pub fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        match &self.material {
            // In constant time.
            KeyMaterial::Secret(key) => hmac::verify(key, message, signature).is_ok(),
            KeyMaterial::Public(key) => key.verify_sig(message, signature).is_ok(),
        }
    }
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut all = [0; 32];
    let digest = digest::digest(&digest::SHA256, bytes);
    all.iter_mut().zip(digest.as_ref()).for_each(|(to, from)| *to = *from);
    all
}

/// Keys that verify the same tokens are equal.
impl PartialEq for VerificationKey {
    fn eq(&self, other: &VerificationKey) -> bool {
        (self.algorithm, &self.kid, self.digest) == (other.algorithm, &other.kid, other.digest)
    }
}

impl fmt::Debug for VerificationKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").field("algorithm", &self.algorithm).field("kid", &self.kid).finish_non_exhaustive()
    }
}

/// The first thing in a PEM file that is known.
struct PemSection(SectionKind, Vec<u8>);

impl PemObject for PemSection {
    fn from_pem(kind: SectionKind, der: Vec<u8>) -> Option<PemSection> {
        Some(PemSection(kind, der))
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
            InvalidKey::WrongKind(algorithm) => (
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
        assert_eq!(VerificationKey::from_secret(&[7; 31], None), Err(InvalidKey::ShortSecret(31)));
        assert!(VerificationKey::from_secret(&[7; 32], None).is_ok());
        // The public key of an issuer as a secret would let everybody sign.
        let pem = b"\n-----BEGIN PUBLIC KEY-----\nAAAAAAAAAAAAAAAAAAAAAAAA\n-----END PUBLIC KEY-----\n";
        assert_eq!(VerificationKey::from_secret(pem, None), Err(InvalidKey::PemAsSecret));
    }

    #[test]
    fn what_a_pem_file_holds_is_told_apart() {
        let pem = |kind: &str| format!("-----BEGIN {kind}-----\nAAAA\n-----END {kind}-----\n");
        for (text, flaw) in [
            (pem("PRIVATE KEY"), InvalidKey::PrivateKey),
            (pem("EC PRIVATE KEY"), InvalidKey::PrivateKey),
            (pem("CERTIFICATE"), InvalidKey::Certificate),
            (pem("RSA PUBLIC KEY"), InvalidKey::NoPublicKey),
            (pem("PUBLIC KEY"), InvalidKey::WrongKind(Algorithm::Rs256)),
            (String::new(), InvalidKey::NoPublicKey),
            ("secret".to_owned(), InvalidKey::NoPublicKey),
            (pem("PUBLIC KEY").replace("AAAA", "????"), InvalidKey::NoPublicKey),
        ] {
            assert_eq!(VerificationKey::from_public_pem(Algorithm::Rs256, text.as_bytes(), None), Err(flaw), "{text}");
        }
    }

    #[test]
    fn equal_keys_are_known_as_such() {
        let key = |byte, kid: &str| VerificationKey::from_secret(&[byte; 32], Some(kid.to_owned())).unwrap();
        assert_eq!(key(1, "a"), key(1, "a"));
        assert_ne!(key(1, "a"), key(2, "a"));
        assert_ne!(key(1, "a"), key(1, "b"));
    }
}
