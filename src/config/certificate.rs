//! A certificate with its chain and its private key, as read from PEM.
//!
//! It is made ready here, so that a key that does not fit is a problem of the file and not of the
//! first handshake. Whether a certificate is still valid is not decided here: this file knows no time.
//! What a private key is made of is shown to nobody.

use std::fmt;
use std::sync::Arc;

use jiff::civil::{Date, DateTime, Time};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::sign::CertifiedKey;
use rustls::{Error, InconsistentKeys, RootCertStore, SignatureAlgorithm};
use rustls_pki_types::pem::{PemObject, SectionKind};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use webpki::EndEntityCert;

#[derive(Clone)]
pub struct Certificate {
    /// The file of the chain, as configured.
    pub file: String,
    pub key: Arc<CertifiedKey>,
    /// The DNS names that it is for, in lower case; `*.example.com` for all right under a name.
    pub dns_names: Vec<String>,
    /// Unix seconds.
    pub not_before_s: i64,
    pub not_after_s: i64,
}

/// Why files are no certificate that can be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CertificateFileError {
    /// The text breaks off within a section, or is no base64.
    InvalidPem,
    NoCertificate,
    /// What is in the section is none.
    InvalidCertificate,
    NoKey,
    EncryptedKey,
    /// Of a kind that TLS has no use for, or broken.
    UnusableKey,
    /// It belongs to another certificate.
    KeyMismatch,
}

impl Certificate {
    /// `chain` begins with the certificate itself, as `fullchain.pem` of most tools does.
    pub fn read(file: &str, chain: &[u8], key: &[u8]) -> Result<Certificate, CertificateFileError> {
        let chain = read_certificates(chain)?;
        let own = chain.first().ok_or(CertificateFileError::NoCertificate)?;
        let end_entity = EndEntityCert::try_from(own).map_err(|_broken| CertificateFileError::InvalidCertificate)?;
        let names = end_entity.valid_dns_names().map(str::to_ascii_lowercase).collect();
        let (not_before_s, not_after_s) = validity(own).ok_or(CertificateFileError::InvalidCertificate)?;
        let key = read_private_key(key)?;
        let key = CertifiedKey::from_der(chain, key, &default_provider()).map_err(|error| match error {
            Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => CertificateFileError::KeyMismatch,
            _ => CertificateFileError::UnusableKey,
        })?;
        Ok(Certificate { file: file.to_owned(), key: Arc::new(key), dns_names: names, not_before_s, not_after_s })
    }

    /// What its key signs with: a client that does not know RSA may know another.
    pub fn algorithm(&self) -> SignatureAlgorithm {
        self.key.key.algorithm()
    }
}

/// Those who issue certificates.
pub fn read_authorities(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, CertificateFileError> {
    let found = read_certificates(text)?;
    let mut store = RootCertStore::empty();
    for certificate in &found {
        store.add(certificate.clone()).map_err(|_broken| CertificateFileError::InvalidCertificate)?;
    }
    if found.is_empty() { Err(CertificateFileError::NoCertificate) } else { Ok(found) }
}

fn read_certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, CertificateFileError> {
    CertificateDer::pem_slice_iter(text).collect::<Result<_, _>>().map_err(|_broken| CertificateFileError::InvalidPem)
}

fn read_private_key(text: &[u8]) -> Result<PrivateKeyDer<'static>, CertificateFileError> {
    for section in <(SectionKind, Vec<u8>)>::pem_slice_iter(text) {
        let (kind, der) = section.map_err(|_broken| CertificateFileError::InvalidPem)?;
        if let Some(key) = PrivateKeyDer::from_pem(kind, der) {
            return Ok(key);
        }
    }
    // A kind of section that is not known is passed over above.
    let is_encrypted = text.windows(ENCRYPTED.len()).any(|part| part == ENCRYPTED);
    Err(if is_encrypted { CertificateFileError::EncryptedKey } else { CertificateFileError::NoKey })
}

const ENCRYPTED: &[u8] = b"-----BEGIN ENCRYPTED PRIVATE KEY-----";
const EPOCH: DateTime = DateTime::constant(1970, 1, 1, 0, 0, 0, 0);

/// Keys fit their certificates, so those of equal ones are equal.
impl PartialEq for Certificate {
    fn eq(&self, other: &Certificate) -> bool {
        (&self.file, &self.key.cert) == (&other.file, &other.key.cert)
    }
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate").field("file", &self.file).field("names", &self.dns_names).finish_non_exhaustive()
    }
}

impl CertificateFileError {
    /// Message and fix; `what` is the file.
    pub fn explain(&self, what: &str) -> (String, &'static str) {
        match self {
            CertificateFileError::InvalidPem => (format!("{what} is no sound PEM"), "copy the file again, whole"),
            CertificateFileError::NoCertificate => (
                format!("there is no certificate in {what}"),
                "it begins with `-----BEGIN CERTIFICATE-----`; name the file with the full chain",
            ),
            CertificateFileError::InvalidCertificate => (
                format!("what {what} calls a certificate is none of X.509, version 3"),
                "have it issued again; `openssl x509 -in FILE -noout -text` shows what it is",
            ),
            CertificateFileError::NoKey => (
                format!("there is no private key in {what}"),
                "it begins with `-----BEGIN PRIVATE KEY-----`, or `RSA` or `EC` before `PRIVATE`",
            ),
            CertificateFileError::EncryptedKey => (
                format!("the private key in {what} is encrypted"),
                "decrypt it, `openssl pkey -in FILE -out NEW`, and let only the gateway read it",
            ),
            CertificateFileError::UnusableKey => (
                format!("the private key in {what} can not be used"),
                "use RSA of 2048 to 8192 bits, ECDSA on P-256, P-384 or P-521, or Ed25519",
            ),
            CertificateFileError::KeyMismatch => (
                format!("the private key in {what} belongs to another certificate"),
                "name the key that the certificate was issued for; the chain begins with that certificate",
            ),
        }
    }
}

/// From when and until when a certificate is valid (RFC 5280, section 4.1.2.5), Unix seconds.
fn validity(certificate: &[u8]) -> Option<(i64, i64)> {
    let (_, outer, _) = der_element(certificate)?;
    let (_, mut rest, _) = der_element(outer)?;
    // The version may be left out; then follow serial number, algorithm and issuer.
    if rest.first() == Some(&0xa0) {
        rest = der_element(rest)?.2;
    }
    for _ in 0..3 {
        rest = der_element(rest)?.2;
    }
    let (_, times, _) = der_element(rest)?;
    let (before_tag, before, rest) = der_element(times)?;
    let (after_tag, after, _) = der_element(rest)?;
    Some((der_time(before_tag, before)?, der_time(after_tag, after)?))
}

/// The first element of DER: its tag, what is in it, and what follows.
pub(super) fn der_element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = der.split_first()?;
    let (&first, mut rest) = rest.split_first()?;
    let mut length = usize::from(first);
    if first >= 0x80 {
        let bytes = usize::from(first & 0x7f);
        if !(1..=4).contains(&bytes) {
            return None;
        }
        let (digits, behind) = rest.split_at_checked(bytes)?;
        length = digits.iter().fold(0, |length, digit| length << 8 | usize::from(*digit));
        rest = behind;
    }
    let (inside, behind) = rest.split_at_checked(length)?;
    Some((tag, inside, behind))
}

/// UTCTime, whose years have two digits, or GeneralizedTime; always in UTC and without fractions.
pub(super) fn der_time(tag: u8, text: &[u8]) -> Option<i64> {
    let digits = text.strip_suffix(b"Z")?;
    let number =
        |range: std::ops::Range<usize>| -> Option<i16> { std::str::from_utf8(digits.get(range)?).ok()?.parse().ok() };
    let (year, at) = match (tag, digits.len()) {
        (0x17, 12) => (number(0..2).map(|year| if year < 50 { 2000 + year } else { 1900 + year })?, 2),
        (0x18, 14) => (number(0..4)?, 4),
        _ => return None,
    };
    let small = |from: usize| number(from..from + 2).and_then(|n| i8::try_from(n).ok());
    let date = Date::new(year, small(at)?, small(at + 2)?).ok()?;
    let time = Time::new(small(at + 4)?, small(at + 6)?, small(at + 8)?, 0).ok()?;
    // The last second of 9999 stands for no end, and is no time of the clock.
    Some(DateTime::from_parts(date, time).duration_since(EPOCH).as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_both_kinds_are_read() {
        for (tag, text, seconds) in [
            (0x17, "700101000000Z", Some(0)),
            (0x17, "491231235959Z", Some(2_524_607_999)),
            (0x17, "500101000000Z", Some(-631_152_000)),
            (0x18, "20240229120000Z", Some(1_709_208_000)),
            (0x18, "99991231235959Z", Some(253_402_300_799)),
            (0x18, "20230229120000Z", None),
            (0x18, "20240229120000", None),
            (0x17, "20240229120000Z", None),
            (0x17, "7001010000é", None),
        ] {
            assert_eq!(der_time(tag, text.as_bytes()), seconds, "{text}");
        }
    }

    #[test]
    fn truncated_der_is_rejected() {
        assert_eq!(der_element(&[0x30, 0x02, 1, 2, 3]), Some((0x30, &[1, 2][..], &[3][..])));
        assert_eq!(der_element(&[0x30, 0x81, 0x01, 9]), Some((0x30, &[9][..], &[][..])));
        for der in [&[][..], &[0x30], &[0x30, 2, 1], &[0x30, 0x80], &[0x30, 0x85, 1, 1, 1, 1, 1], &[0x30, 0x82, 1]] {
            assert_eq!(der_element(der), None, "{der:?}");
        }
        assert_eq!(validity(b"no certificate"), None);
    }
}
