//! A revocation list: which certificates their issuer has taken back, as read from PEM.
//!
//! It is made ready here as certificates are. Whether it is still the latest is not decided here: this file
//! knows no time. Nor is its signature verified: by whom, a handshake knows.

use std::fmt;

use rustls_pki_types::CertificateRevocationListDer;
use rustls_pki_types::pem::PemObject;
use webpki::OwnedCertRevocationList;

use super::certificate::{der_element, der_time};

#[derive(Clone, PartialEq)]
pub struct RevocationList {
    /// The file, as configured; it may hold several.
    pub file: String,
    pub der: CertificateRevocationListDer<'static>,
    /// When its issuer will have issued the next one, Unix seconds.
    pub next_update_s: i64,
}

/// Why a file holds no lists that can be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CrlFileError {
    /// The text breaks off within a section, or is no base64.
    InvalidPem,
    NoList,
    /// What is in the section is none, or less than a whole one.
    InvalidList,
}

impl RevocationList {
    /// All that a file holds, one at least.
    pub fn read(file: &str, text: &[u8]) -> Result<Vec<RevocationList>, CrlFileError> {
        let mut lists = Vec::new();
        for der in CertificateRevocationListDer::pem_slice_iter(text) {
            let der = der.map_err(|_broken| CrlFileError::InvalidPem)?;
            OwnedCertRevocationList::from_der(&der).map_err(|_broken| CrlFileError::InvalidList)?;
            let next_update_s = next_update(&der).ok_or(CrlFileError::InvalidList)?;
            lists.push(RevocationList { file: file.to_owned(), der, next_update_s });
        }
        if lists.is_empty() { Err(CrlFileError::NoList) } else { Ok(lists) }
    }
}

impl fmt::Debug for RevocationList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RevocationList").field("file", &self.file).finish_non_exhaustive()
    }
}

impl CrlFileError {
    /// Message and fix; `what` is the file.
    pub fn explain(self, what: &str) -> (String, &'static str) {
        match self {
            CrlFileError::InvalidPem => (format!("{what} is no sound PEM"), "copy the file again, whole"),
            CrlFileError::NoList => (
                format!("there is no revocation list in {what}"),
                "it begins with `-----BEGIN X509 CRL-----`; from DER it is made by `openssl crl -inform DER -in FILE -out NEW`",
            ),
            CrlFileError::InvalidList => (
                format!(
                    "what {what} calls a revocation list is none of X.509, version 2, that says when the next one comes"
                ),
                "have it issued again, whole (no delta), with a number; `openssl crl -in FILE -noout -text` shows what it is",
            ),
        }
    }
}

/// The date by which there will be another list (RFC 5280, section 5.1.2.5), Unix seconds.
fn next_update(list: &[u8]) -> Option<i64> {
    let (_, outer, _) = der_element(list)?;
    let (_, mut rest, _) = der_element(outer)?;
    // Version, algorithm, issuer, and when this one was issued.
    for _ in 0..4 {
        rest = der_element(rest)?.2;
    }
    let (tag, text, _) = der_element(rest)?;
    der_time(tag, text)
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, CertificateRevocationListParams, IsCa, Issuer, KeyIdMethod, KeyPair,
        SerialNumber, date_time_ymd,
    };

    use super::*;

    fn pem() -> String {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2026, 1, 1),
            next_update: date_time_ymd(2026, 2, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: Vec::new(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&Issuer::new(params, KeyPair::generate().unwrap())).unwrap().pem().unwrap()
    }

    #[test]
    fn every_list_of_a_file_is_read() {
        let lists = RevocationList::read("lists.pem", (pem() + &pem()).as_bytes()).unwrap();
        assert_eq!(lists.iter().map(|list| list.next_update_s).collect::<Vec<_>>(), [1_769_904_000; 2]);
        assert!(lists[0] != lists[1]);
    }

    #[test]
    fn each_kind_of_invalid_list_is_distinguished() {
        let pem = pem();
        for (text, flaw) in [
            ("", CrlFileError::NoList),
            ("no PEM at all", CrlFileError::NoList),
            (&pem[..pem.len() / 2], CrlFileError::InvalidPem),
            (&pem.replace("-----\nM", "-----\n*M"), CrlFileError::InvalidPem),
            ("-----BEGIN X509 CRL-----\naGVsbG8=\n-----END X509 CRL-----\n", CrlFileError::InvalidList),
        ] {
            assert_eq!(RevocationList::read("list.pem", text.as_bytes()), Err(flaw), "{text}");
        }
    }
}
