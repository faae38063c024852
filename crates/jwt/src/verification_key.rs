//! A key that verifies signatures, and its algorithm.
//!
//! A key is bound to one algorithm when it is read (RFC 8725, section 3.1): otherwise a token could have an RSA key used as
//! an HMAC secret, or select the algorithm `none`. The debug output does not contain the key.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::encoding::{AsDer, PublicKeyX509Der};
use aws_lc_rs::rsa::PublicEncryptingKey;
use aws_lc_rs::signature::{self, ParsedPublicKey, RsaPublicKeyComponents};
use aws_lc_rs::{digest, hmac};
use rustls_pki_types::pem::{PemObject, SectionKind};

/// A secret must be at least as long as the hash (RFC 7518, section 3.2).
const SECRET_MIN_BYTES: usize = 32;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Algorithm {
    Hs256,
    Rs256,
    Es256,
    EdDsa,
}

impl Algorithm {
    /// The name in RFC 7518, section 3.1, or RFC 8037.
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
    /// Key id. A token with another key id is not signed with this key.
    pub kid: Option<String>,
    material: KeyMaterial,
    /// SHA-256 of the key, for comparisons.
    digest: [u8; 32],
}

#[derive(Clone)]
enum KeyMaterial {
    Secret(Arc<hmac::Key>),
    Public(Arc<ParsedPublicKey>),
}

/// Why bytes are not a usable key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InvalidKey {
    /// The secret is too short; with its length in bytes.
    ShortSecret(usize),
    /// PEM instead of a secret.
    PemAsSecret,
    PrivateKey,
    Certificate,
    /// Not PEM, or PEM without a public key.
    NoPublicKey,
    /// A public key of another algorithm.
    WrongKind(Algorithm),
    /// The RSA key is shorter or longer than the supported sizes.
    RsaSize,
}

impl VerificationKey {
    /// An HS256 key.
    pub fn from_secret(secret: &[u8], kid: Option<String>) -> Result<VerificationKey, InvalidKey> {
        if secret.trim_ascii_start().starts_with(b"-----BEGIN ") {
            return Err(InvalidKey::PemAsSecret);
        }
        if secret.len() < SECRET_MIN_BYTES {
            return Err(InvalidKey::ShortSecret(secret.len()));
        }
        let material = KeyMaterial::Secret(Arc::new(hmac::Key::new(hmac::HMAC_SHA256, secret)));
        Ok(VerificationKey { algorithm: Algorithm::Hs256, kid, material, digest: sha256(secret) })
    }

    /// A key of another algorithm, in PEM.
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

    /// A public key as a SubjectPublicKeyInfo (RFC 5280, section 4.1); also a point of P-256, or the bytes of an Ed25519
    /// key.
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
            // `ParsedPublicKey` accepts any size, and then rejects every signature. `PublicEncryptingKey` has the same bounds
            // and checks them when it is created.
            let der: PublicKeyX509Der = parsed.as_der().map_err(|_failed| InvalidKey::WrongKind(algorithm))?;
            PublicEncryptingKey::from_der(der.as_ref()).map_err(|_rejected| InvalidKey::RsaSize)?;
        }
        let digest = sha256(parsed.as_ref());
        Ok(VerificationKey { algorithm, kid, material: KeyMaterial::Public(Arc::new(parsed)), digest })
    }

    /// Whether `signature` is a valid signature of `message` by this key.
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

/// The first section of a known kind in a PEM file.
struct PemSection(SectionKind, Vec<u8>);

impl PemObject for PemSection {
    fn from_pem(kind: SectionKind, der: Vec<u8>) -> Option<PemSection> {
        Some(PemSection(kind, der))
    }
}

impl InvalidKey {
    /// Message and fix; `what` names the source of the key, such as a file.
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
                format!("{what} is a private key, which the gateway does not need"),
                String::from("name the public one, as `openssl pkey -in KEY -pubout` writes it"),
            ),
            InvalidKey::Certificate => (
                format!("{what} is a certificate"),
                String::from("name its public key, as `openssl x509 -in CERTIFICATE -pubkey -noout` writes it"),
            ),
            InvalidKey::NoPublicKey => (
                format!("{what} is not a public key in PEM"),
                String::from(
                    "name a file with `-----BEGIN PUBLIC KEY-----`; `openssl pkey -in KEY -pubout` writes one",
                ),
            ),
            InvalidKey::WrongKind(algorithm) => (
                format!("{what} is not a key for `{}`", algorithm.name()),
                String::from(match algorithm {
                    Algorithm::Rs256 => "name an RSA key, or write the `algorithm` that the key is for",
                    Algorithm::Es256 => "name a key on the curve P-256, or write the `algorithm` that the key is for",
                    Algorithm::EdDsa => "name an Ed25519 key, or write the `algorithm` that the key is for",
                    Algorithm::Hs256 => "name a secret, or write the `algorithm` that the key is for",
                }),
            ),
            InvalidKey::RsaSize => (
                format!("{what} is not an RSA key of 2048 to 8192 bits (RFC 7518, section 3.3)"),
                String::from("let the issuer sign with a longer one"),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_secrets_and_pem_are_rejected() {
        assert_eq!(VerificationKey::from_secret(&[7; 31], None), Err(InvalidKey::ShortSecret(31)));
        assert!(VerificationKey::from_secret(&[7; 32], None).is_ok());
        // With the public key of an issuer as the secret, anyone could sign tokens.
        let pem = b"\n-----BEGIN PUBLIC KEY-----\nAAAAAAAAAAAAAAAAAAAAAAAA\n-----END PUBLIC KEY-----\n";
        assert_eq!(VerificationKey::from_secret(pem, None), Err(InvalidKey::PemAsSecret));
    }

    #[test]
    fn the_kind_of_a_pem_file_is_detected() {
        let pem = |kind: &str| format!("-----BEGIN {kind}-----\nAAAA\n-----END {kind}-----\n");
        for (text, error) in [
            (pem("PRIVATE KEY"), InvalidKey::PrivateKey),
            (pem("EC PRIVATE KEY"), InvalidKey::PrivateKey),
            (pem("CERTIFICATE"), InvalidKey::Certificate),
            (pem("RSA PUBLIC KEY"), InvalidKey::NoPublicKey),
            (pem("PUBLIC KEY"), InvalidKey::WrongKind(Algorithm::Rs256)),
            (String::new(), InvalidKey::NoPublicKey),
            ("secret".to_owned(), InvalidKey::NoPublicKey),
            (pem("PUBLIC KEY").replace("AAAA", "????"), InvalidKey::NoPublicKey),
        ] {
            assert_eq!(VerificationKey::from_public_pem(Algorithm::Rs256, text.as_bytes(), None), Err(error), "{text}");
        }
    }

    #[test]
    fn keys_are_equal_if_secret_and_id_are_equal() {
        let key = |byte, kid: &str| VerificationKey::from_secret(&[byte; 32], Some(kid.to_owned())).unwrap();
        assert_eq!(key(1, "a"), key(1, "a"));
        assert_ne!(key(1, "a"), key(2, "a"));
        assert_ne!(key(1, "a"), key(1, "b"));
    }
}
