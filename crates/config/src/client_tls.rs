//! TLS to upstream and Redis servers: the settings, and the client configuration of rustls that they yield.
//!
//! The configuration is built here, so that an unusable certificate is reported at the start rather than at the first
//! request. Verification cannot be disabled: a self-signed certificate is trusted by naming it in `ca`, or its public key in
//! `verify`.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_name;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::sign::SingleCertAndKey;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use sha2::{Digest, Sha256};

use super::certificate::{self, Certificate, PEM_FILE};
use super::diagnostics::{Report, Span, quoted};
use super::settings::{Custom, Required, Section as _, Shape, Word, Words};
use super::toml_reader::{Item, SpannedStr, SpannedString, Table};

settings! {
    /// The gateway as a TLS client.
    pub struct ClientTlsSettings checked by check_client_tls {
        /// Authorities of the servers; a server's own certificate is accepted here too. Without it: the system's
        /// authorities.
        ca: Option<SpannedString> = PEM_FILE;
        /// Name that is sent (SNI) and verified. Without it: the host of the URL.
        server_name: Option<ServerName<'static>> =
            Word { shape: "name", example: "\"api.internal\"", read: read_server_name };
        /// Client certificate of the gateway, with its chain.
        certificate: Option<SpannedString> = PEM_FILE;
        /// Its private key.
        private_key: Option<SpannedString> = PEM_FILE;
        /// `{ spki_sha256 = ["DIGEST"] }`: [pinned public keys](#pinned-public-keys), instead of authorities, name and dates.
        verify: Option<PinnedKeys> =
            Custom::or_empty(|| Shape::Table(PinnedKeys::settings()), |item, report| read_verify(item, report).map(Some));
    }
}

fn check_client_tls(settings: &mut ClientTlsSettings, table: &mut Table, report: &mut Report) {
    suggest_ca(table, "ca", "ca = \"FILE\"");
    check_pair(table, report);
    if let (Some(ca), Some(_)) = (table.given("ca"), &settings.verify) {
        let message = "`ca` has no effect with `verify`: the pinned keys decide alone";
        report.missing(ca.key_span, message, "remove one of the two");
    }
}

settings! {
    /// Public keys of servers.
    pub struct PinnedKeys {
        /// SHA-256 digests of the servers' public keys (SubjectPublicKeyInfo), in Base64, as in RFC 7469. One of them must match.
        spki_sha256: Vec<[u8; 32]> = Required(
            Words { shape: "digest", example: DIGEST_EXAMPLE, or: "", read: read_digest },
            "write `spki_sha256 = [\"DIGEST\"]`; the log names the digest of a server whose key is not listed",
        );
    }
}

const DIGEST_EXAMPLE: &str = "[\"47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=\"]";

fn read_verify(item: &Item, report: &mut Report) -> Option<PinnedKeys> {
    let fix = "verification cannot be disabled: write `ca = \"FILE\"` with the server's own certificate or its authority, or pin \
               its public key by `spki_sha256` in a table `verify`";
    item.table("`verify`", fix, report).map(|table| PinnedKeys::read_all(table, report))
}

/// Reads a digest in Base64.
fn read_digest(word: &SpannedStr, report: &mut Report) -> Option<[u8; 32]> {
    let digest = STANDARD.decode(word.text).ok().and_then(|bytes| bytes.try_into().ok());
    if digest.is_none() {
        let message = format!("{} is not a SHA-256 digest in Base64", quoted(word.text));
        let fix = "write its 44 characters, as `openssl x509 -in FILE -noout -pubkey | openssl pkey -pubin -outform der | \
                   openssl dgst -sha256 -binary | base64` shows them";
        report.problem(word.span.clone(), message, fix);
    }
    digest
}

/// Settings of other products that disable verification.
const VERIFICATION: [&str; 9] = [
    "insecure_skip_verify",
    "skip_verify",
    "tls_insecure_skip_verify",
    "tls_skip_verify",
    "tls_verify",
    "ssl_verify",
    "proxy_ssl_verify",
    "verify",
    "insecure",
];

/// Explains settings of other products that disable verification. `key` is the setting with the authorities here.
pub fn suggest_ca(table: &mut Table, key: &'static str, written: &str) {
    for foreign in VERIFICATION {
        let fix = format!(
            "verification cannot be disabled: write `{written}` with the server's own certificate or its authority"
        );
        table.suggest_for(foreign, key, fix);
    }
}

/// Reports a certificate without a private key, and the reverse.
pub fn check_pair(table: &Table, report: &mut Report) {
    for (one, other) in [("certificate", "private_key"), ("private_key", "certificate")] {
        if let (Some(item), true) = (table.given(one), table.lacks(other)) {
            let message = format!("`{one}` is given without `{other}`");
            report.missing(item.key_span, message, format!("write `{other} = \"FILE\"` as well"));
        }
    }
}

/// The root certificates of the system, loaded once per configuration, and only if an upstream needs them.
#[derive(Default)]
pub struct SystemRoots(Option<Arc<RootCertStore>>);

impl SystemRoots {
    /// `span` is the position of the setting that needs the certificates.
    fn get(&mut self, span: Span, report: &mut Report) -> Arc<RootCertStore> {
        if report.count() > 0 {
            // The configuration is already rejected, so hundreds of files need not be read.
            return Arc::new(RootCertStore::empty());
        }
        let roots = self.0.get_or_insert_with(|| {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            Arc::new(roots)
        });
        if roots.is_empty() {
            let fix =
                "install the package `ca-certificates`, or add `ca = \"FILE\"` with the certificate of the authority";
            report.problem(span, "the system has no root certificates to verify a server with", fix);
        }
        Arc::clone(roots)
    }
}

/// TLS settings of connections to servers, shared by all workers, with the cache of resumable sessions. Settings from
/// the same files and values are equal, so that a reload keeps connections.
#[derive(Clone)]
pub struct ClientTls {
    /// Without ALPN protocols: see [`ClientTls::with_alpn`].
    client: Arc<ClientConfig>,
    /// The name that the certificate must have; `None`: the host of the URL.
    pub server_name: Option<ServerName<'static>>,
    /// A digest of all files and settings; decides equality.
    digest: [u8; 32],
}

impl ClientTls {
    /// `span` is the position of the setting that requires TLS.
    pub fn new(
        settings: &ClientTlsSettings,
        span: Span,
        roots: &mut SystemRoots,
        report: &mut Report,
    ) -> Option<ClientTls> {
        let named = settings.ca.as_ref().and_then(|file| certificate::read_authorities(file, report));
        let pins = settings.verify.as_ref().map(|verify| verify.spki_sha256.clone());
        let server_name = settings.server_name.clone();
        let identity = match (&settings.certificate, &settings.private_key) {
            (Some(certificate), Some(private_key)) => Certificate::read(certificate, private_key, report),
            _ => None,
        };
        let digest = Sha256::digest(format!(
            "{named:?} {pins:?} {server_name:?} {:?}",
            identity.as_ref().map(|own| &own.key.cert)
        ));
        let provider = Arc::new(default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider));
        // Building cannot fail for a valid configuration: the provider supports both TLS versions, and there are no
        // authorities only after a problem.
        let builder = builder.with_safe_default_protocol_versions().ok()?.dangerous();
        let verifier: Arc<dyn ServerCertVerifier> = match pins {
            Some(pins) => Arc::new(PinnedKeyVerifier { pins, algorithms: provider.signature_verification_algorithms }),
            None => {
                let authorities = match &named {
                    None => roots.get(span, report),
                    Some(named) => {
                        let mut authorities = RootCertStore::empty();
                        authorities.add_parsable_certificates(named.clone());
                        Arc::new(authorities)
                    }
                };
                let webpki = WebPkiServerVerifier::builder_with_provider(authorities, provider).build().ok()?;
                Arc::new(NamedCertificateVerifier { webpki, named: named.unwrap_or_default() })
            }
        };
        let builder = builder.with_custom_certificate_verifier(verifier);
        let client = match identity {
            Some(own) => builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(own.key))),
            None => builder.with_no_client_auth(),
        };
        Some(ClientTls::with_digest(client, server_name, digest.into()))
    }

    /// `digest` covers everything that the other arguments are made of.
    pub fn with_digest(client: ClientConfig, server_name: Option<ServerName<'static>>, digest: [u8; 32]) -> ClientTls {
        ClientTls { client: Arc::new(client), server_name, digest }
    }

    /// The settings with these ALPN protocols.
    pub fn with_alpn(&self, protocols: &[&[u8]]) -> Arc<ClientConfig> {
        let mut client = ClientConfig::clone(&self.client);
        client.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        Arc::new(client)
    }
}

pub fn read_server_name(word: &SpannedStr, report: &mut Report) -> Option<ServerName<'static>> {
    let Ok(name) = ServerName::try_from(word.text.to_owned()) else {
        let message = format!("{} is not a valid server name", quoted(word.text));
        return report.reject(word.span.clone(), message, "write a host name or an IP address, without a port");
    };
    Some(name)
}

/// Accepts certificates that an authority issued, and certificates that the operator named themselves. The second kind
/// is for self-signed certificates, as `openssl req -x509` makes them: they are not valid as end-entity certificates
/// by the rules of X.509. Their names and dates are verified all the same.
#[derive(Debug)]
struct NamedCertificateVerifier {
    webpki: Arc<WebPkiServerVerifier>,
    named: Vec<CertificateDer<'static>>,
}

impl ServerCertVerifier for NamedCertificateVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match self.webpki.verify_server_cert(certificate, intermediates, name, ocsp, now) {
            Err(error) if self.named.contains(certificate) && !is_date_error(&error) => {
                verify_server_name(&ParsedCertificate::try_from(certificate)?, name)?;
                Ok(ServerCertVerified::assertion())
            }
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.webpki.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.webpki.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.webpki.supported_verify_schemes()
    }
}

/// Accepts certificates with a public key that the operator named, whatever else they state. The handshake proves that the
/// server has the private key.
#[derive(Debug)]
struct PinnedKeyVerifier {
    pins: Vec<[u8; 32]>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for PinnedKeyVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let digest = Sha256::digest(ParsedCertificate::try_from(certificate)?.subject_public_key_info());
        if self.pins.iter().any(|pin| *pin == *digest) {
            return Ok(ServerCertVerified::assertion());
        }
        let digest = STANDARD.encode(digest);
        Err(Error::General(format!(
            "`spki_sha256` does not list the server's public key, whose digest is \"{digest}\""
        )))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// webpki checks dates before the issuer, so any other error means that the dates are valid.
fn is_date_error(error: &Error) -> bool {
    use CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};
    let Error::InvalidCertificate(error) = error else { return false };
    matches!(error, Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. })
}

impl PartialEq for ClientTls {
    fn eq(&self, other: &ClientTls) -> bool {
        self.digest == other.digest
    }
}

impl Eq for ClientTls {}

impl Hash for ClientTls {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.digest.hash(state);
    }
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientTls").field("server_name", &self.server_name).finish_non_exhaustive()
    }
}
