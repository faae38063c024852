//! Certificate chains with private keys, certificate authorities and revocation lists, read from PEM.
//!
//! Keys and lists are parsed here, so that an unusable file is a configuration problem rather than a failed handshake.
//! This file does not check validity periods, and does not verify signatures of revocation lists: handshakes do.
//! Messages and `Debug` never show private keys.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use memchr::memmem;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::sign::CertifiedKey;
use rustls::{Error, InconsistentKeys, RootCertStore, SignatureAlgorithm};
use rustls_pki_types::pem::{PemObject, SectionKind};
use rustls_pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use webpki::{EndEntityCert, OwnedCertRevocationList};
use x509_parser::prelude::{CertificateRevocationList as ParsedList, FromDer, GeneralName, X509Certificate};

use super::diagnostics::{Report, Span, quoted};
use super::settings::{Required, Text};
use super::toml_reader::SpannedString;
use super::values::without_byte_order_mark;

/// A setting that names a file.
pub const PEM_FILE: Text = Text("PEM file", "\"FILE\"");

settings! {
    /// A certificate and its private key.
    pub struct CertificateFiles {
        /// Certificate with its chain. Used for clients that send no server name, or an unknown one.
        certificate: Option<SpannedString> =
            Required(PEM_FILE, "write `certificate = \"FILE\"`: PEM, with the full chain");
        /// Its private key (PKCS #8, PKCS #1 or SEC 1, not encrypted). Both may be in one file.
        private_key: Option<SpannedString> = Required(PEM_FILE, "write `private_key = \"FILE\"`: PEM");
    }
}

impl CertificateFiles {
    /// Reads both files. A missing setting is reported elsewhere.
    pub fn certificate(&self, report: &mut Report) -> Option<Certificate> {
        Certificate::read(self.certificate.as_ref()?, self.private_key.as_ref()?, report)
    }
}

/// A certificate with its chain and private key.
#[derive(Clone)]
pub struct Certificate {
    /// The file of the chain, as configured.
    pub file: String,
    /// The position of its name in the configuration. Equal certificates may have different positions.
    pub span: Span,
    pub key: Arc<CertifiedKey>,
    /// In lower case; `*.example.com` for all names directly below one.
    pub dns_names: Vec<String>,
    /// Unix seconds.
    pub not_before_s: i64,
    pub not_after_s: i64,
}

/// Why a file cannot be used, without its name, and the fix.
type Unusable = (&'static str, &'static str);

const INVALID_PEM: Unusable = ("{} is not valid PEM", "copy the complete file again");
const INVALID_CERTIFICATE: Unusable = (
    "{} contains a certificate that is not X.509 version 3",
    "issue it again; `openssl x509 -in FILE -noout -text` shows its contents",
);
const NO_CERTIFICATE: Unusable = (
    "there is no certificate in {}",
    "name a PEM file with certificates; each begins with `-----BEGIN CERTIFICATE-----`",
);
const NO_KEY: Unusable = (
    "there is no private key in {}",
    "name the file of the key; a key begins with `-----BEGIN PRIVATE KEY-----`, or with `RSA` or `EC` before `PRIVATE`",
);
const ENCRYPTED_KEY: Unusable = (
    "the private key in {} is encrypted",
    "decrypt it with `openssl pkey -in FILE -out NEW`, and let only the gateway read the new file",
);
const UNUSABLE_KEY: Unusable = (
    "the private key in {} cannot be used",
    "use RSA of 2048 to 8192 bits, ECDSA on P-256, P-384 or P-521, or Ed25519",
);
const KEY_MISMATCH: Unusable =
    ("the private key in {} belongs to another certificate", "name the key of the first certificate in the chain");
const NO_LIST: Unusable = (
    "there is no revocation list in {}",
    "a list begins with `-----BEGIN X509 CRL-----`; `openssl crl -inform DER -in FILE -out NEW` converts DER",
);
const INVALID_LIST: Unusable = (
    "{} contains a revocation list that is not X.509 version 2 with a date of the next update",
    "issue it again, complete (not a delta) and with a CRL number; `openssl crl -in FILE -noout -text` shows its contents",
);

/// Reads a file with `parse`. The message of an error contains `{}` for the name of the file.
fn read_pem<T>(
    file: &SpannedString,
    parse: impl FnOnce(&[u8]) -> Result<T, Unusable>,
    report: &mut Report,
) -> Option<T> {
    let text = file.read_file(report)?;
    let parsed = parse(without_byte_order_mark(&text));
    parsed.map_err(|error| report_unusable(error, file, report)).ok()
}

fn report_unusable((message, fix): Unusable, file: &SpannedString, report: &mut Report) {
    report.problem(file.span.clone(), message.replace("{}", &quoted(&file.text)), fix);
}

impl Certificate {
    /// `chain` begins with the end-entity certificate, like `fullchain.pem` of most tools.
    pub fn read(chain: &SpannedString, key: &SpannedString, report: &mut Report) -> Option<Certificate> {
        let parsed = read_pem(chain, parse_chain, report);
        let key_der = read_pem(key, parse_private_key, report);
        let (certificates, dns_names, (not_before_s, not_after_s)) = parsed?;
        let certified = CertifiedKey::from_der(certificates, key_der?, &default_provider()).map_err(|error| {
            let is_mismatch = matches!(error, Error::InconsistentKeys(InconsistentKeys::KeyMismatch));
            report_unusable(if is_mismatch { KEY_MISMATCH } else { UNUSABLE_KEY }, key, report);
        });
        let (file, span, key) = (chain.text.clone(), chain.span.clone(), Arc::new(certified.ok()?));
        Some(Certificate { file, span, key, dns_names, not_before_s, not_after_s })
    }

    /// A certificate whose chain and key are in one text. An error says what is wrong with it.
    pub fn parse(name: &str, text: &[u8]) -> Result<Certificate, String> {
        let shown = |(message, _fix): Unusable| message.replace("{}", "it");
        let (certificates, dns_names, (not_before_s, not_after_s)) = parse_chain(text).map_err(shown)?;
        let key = parse_private_key(text).map_err(shown)?;
        let key = CertifiedKey::from_der(certificates, key, &default_provider()).map_err(|error| error.to_string())?;
        Ok(Certificate { file: name.to_owned(), span: 0..0, key: Arc::new(key), dns_names, not_before_s, not_after_s })
    }

    /// The signature algorithm of the key, by which a certificate is chosen that the client supports.
    pub fn algorithm(&self) -> SignatureAlgorithm {
        self.key.key.algorithm()
    }
}

/// The certificates of a chain, and the DNS names and the validity of the first.
type Chain = (Vec<CertificateDer<'static>>, Vec<String>, (i64, i64));

fn parse_chain(text: &[u8]) -> Result<Chain, Unusable> {
    let chain = parse_certificates(text)?;
    let leaf = chain.first().ok_or(NO_CERTIFICATE)?;
    let end_entity = EndEntityCert::try_from(leaf).map_err(|_error| INVALID_CERTIFICATE)?;
    let dns_names = end_entity.valid_dns_names().map(str::to_ascii_lowercase).collect();
    let (_, parsed) = X509Certificate::from_der(leaf).map_err(|_error| INVALID_CERTIFICATE)?;
    let validity = (parsed.validity().not_before.timestamp(), parsed.validity().not_after.timestamp());
    Ok((chain, dns_names, validity))
}

/// The first DNS name, URI, e-mail address or IP address in the subjectAltName of a certificate, and its common name.
pub fn names_of(certificate: &CertificateDer<'_>) -> (Option<String>, Option<String>) {
    let Ok((_, parsed)) = X509Certificate::from_der(certificate) else { return (None, None) };
    let text = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) => Some(name.to_ascii_lowercase()),
        GeneralName::URI(name) | GeneralName::RFC822Name(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match *bytes {
            [a, b, c, d] => Some(Ipv4Addr::new(*a, *b, *c, *d).to_string()),
            bytes => <[u8; 16]>::try_from(bytes).ok().map(|bytes| Ipv6Addr::from(bytes).to_string()),
        },
        _ => None,
    };
    let alternative = parsed.subject_alternative_name().ok().flatten();
    let san = alternative.and_then(|names| names.value.general_names.iter().find_map(text));
    let cn = parsed.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
    let given = |text: String| Some(text).filter(|text| !text.is_empty());
    (san.and_then(given), cn.map(str::to_owned).and_then(given))
}

/// Reads the certificates of trusted issuers.
pub fn read_authorities(file: &SpannedString, report: &mut Report) -> Option<Vec<CertificateDer<'static>>> {
    let parse = |text: &[u8]| {
        let found = parse_certificates(text)?;
        let mut store = RootCertStore::empty();
        for certificate in &found {
            store.add(certificate.clone()).map_err(|_error| INVALID_CERTIFICATE)?;
        }
        if found.is_empty() { Err(NO_CERTIFICATE) } else { Ok(found) }
    };
    read_pem(file, parse, report)
}

fn parse_certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, Unusable> {
    CertificateDer::pem_slice_iter(text).collect::<Result<_, _>>().map_err(|_error| INVALID_PEM)
}

fn parse_private_key(text: &[u8]) -> Result<PrivateKeyDer<'static>, Unusable> {
    let contains = |mark: &[u8]| memmem::find(text, mark).is_some();
    // The traditional form of OpenSSL (RFC 1421, section 4.6.1.1).
    if contains(b"Proc-Type: 4,ENCRYPTED") {
        return Err(ENCRYPTED_KEY);
    }
    for section in <(SectionKind, Vec<u8>)>::pem_slice_iter(text) {
        let (kind, der) = section.map_err(|_error| INVALID_PEM)?;
        if let Some(key) = PrivateKeyDer::from_pem(kind, der) {
            return Ok(key);
        }
    }
    // The loop skips sections of unknown kinds, among them encrypted keys.
    Err(if contains(b"-----BEGIN ENCRYPTED PRIVATE KEY-----") { ENCRYPTED_KEY } else { NO_KEY })
}

/// A key matches its certificate, so equal certificates have equal keys.
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

/// A certificate revocation list.
#[derive(Clone, PartialEq)]
pub struct RevocationList {
    /// The file, as configured; it may hold several.
    pub file: String,
    pub der: CertificateRevocationListDer<'static>,
    /// When the issuer publishes the next list at the latest, in Unix seconds.
    pub next_update_s: i64,
}

impl RevocationList {
    /// Reads all lists of a file, at least one.
    pub fn read(file: &SpannedString, report: &mut Report) -> Option<Vec<RevocationList>> {
        read_pem(file, |text| RevocationList::parse(&file.text, text), report)
    }

    fn parse(file: &str, text: &[u8]) -> Result<Vec<RevocationList>, Unusable> {
        let mut lists = Vec::new();
        for der in CertificateRevocationListDer::pem_slice_iter(text) {
            let der = der.map_err(|_error| INVALID_PEM)?;
            OwnedCertRevocationList::from_der(&der).map_err(|_error| INVALID_LIST)?;
            let (_, parsed) = ParsedList::from_der(&der).map_err(|_error| INVALID_LIST)?;
            let next_update_s = parsed.next_update().ok_or(INVALID_LIST)?.timestamp();
            lists.push(RevocationList { file: file.to_owned(), der, next_update_s });
        }
        if lists.is_empty() { Err(NO_LIST) } else { Ok(lists) }
    }
}

impl fmt::Debug for RevocationList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RevocationList").field("file", &self.file).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, CertificateRevocationListParams, IsCa, Issuer, KeyIdMethod, KeyPair,
        SerialNumber, date_time_ymd,
    };

    use std::path::Path;

    use super::super::diagnostics::Inputs;
    use super::super::toml_reader::SpannedStr;
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
    fn the_first_and_the_last_date_are_read() {
        let mut params = CertificateParams::new(["a.Example.com".to_owned()]).unwrap();
        params.not_before = date_time_ymd(1970, 1, 1);
        params.not_after = date_time_ymd(9999, 12, 31);
        let pem = params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem();
        let (_, names, validity) = parse_chain(pem.as_bytes()).unwrap();
        assert_eq!((names, validity), (vec!["a.example.com".to_owned()], (0, 253_402_214_400)));
    }

    #[test]
    fn a_key_that_is_encrypted_is_recognized_in_both_forms() {
        for (kind, header) in [("ENCRYPTED ", ""), ("RSA ", "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\n")] {
            let text = format!("-----BEGIN {kind}PRIVATE KEY-----\n{header}AAAA\n-----END {kind}PRIVATE KEY-----\n");
            assert_eq!(parse_private_key(text.as_bytes()).unwrap_err(), ENCRYPTED_KEY, "{text}");
        }
    }

    #[test]
    fn a_file_may_begin_with_a_byte_order_mark() {
        let pair = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(["a.test".to_owned()]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let text = format!("\u{feff}{}{}", params.self_signed(&pair).unwrap().pem(), pair.serialize_pem());
        let files = |_: &Path| Ok(text.as_bytes().to_vec());
        let mut report = Report::with_inputs("", &[], Inputs { files: &files, ..Inputs::NONE });
        let file = SpannedString::new("ca", &SpannedStr { text: "a.pem", span: 0..0 });
        assert!(Certificate::read(&file, &file, &mut report).is_some());
        assert!(read_authorities(&file, &mut report).is_some());
        assert_eq!(report.count(), 0);
    }

    #[test]
    fn every_list_of_a_file_is_read() {
        let lists = RevocationList::parse("lists.pem", (pem() + &pem()).as_bytes()).unwrap();
        assert_eq!(lists.iter().map(|list| list.next_update_s).collect::<Vec<_>>(), [1_769_904_000; 2]);
        assert!(lists[0] != lists[1]);
    }

    #[test]
    fn each_kind_of_invalid_list_is_distinguished() {
        let pem = pem();
        for (text, error) in [
            ("", NO_LIST),
            ("no PEM at all", NO_LIST),
            (&pem[..pem.len() / 2], INVALID_PEM),
            (&pem.replace("-----\nM", "-----\n*M"), INVALID_PEM),
            ("-----BEGIN X509 CRL-----\naGVsbG8=\n-----END X509 CRL-----\n", INVALID_LIST),
        ] {
            assert_eq!(RevocationList::parse("list.pem", text.as_bytes()), Err(error), "{text}");
        }
    }
}
