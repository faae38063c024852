//! TLS settings of connections to upstream servers and the store: trusted authorities and the client certificate.
//!
//! Created when the configuration is read and shared by all workers, with the cache of resumable sessions. Settings
//! from the same files and values are equal, so that a reload keeps connections.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, SignatureScheme};

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
    /// `digest` covers everything that the other arguments are made of.
    pub fn new(client: ClientConfig, server_name: Option<ServerName<'static>>, digest: [u8; 32]) -> ClientTls {
        ClientTls { client: Arc::new(client), server_name, digest }
    }

    /// The settings with these ALPN protocols.
    pub fn with_alpn(&self, protocols: &[&[u8]]) -> Arc<ClientConfig> {
        let mut client = ClientConfig::clone(&self.client);
        client.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        Arc::new(client)
    }
}

/// Accepts certificates that an authority issued, and certificates that the operator named themselves. The second kind
/// is for self-signed certificates, as `openssl req -x509` makes them: they are not valid as end-entity certificates
/// by the rules of X.509. Their names and dates are verified all the same.
#[derive(Debug)]
pub struct PinningVerifier {
    pub webpki: Arc<WebPkiServerVerifier>,
    pub pinned: Vec<CertificateDer<'static>>,
}

impl ServerCertVerifier for PinningVerifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match self.webpki.verify_server_cert(certificate, intermediates, name, ocsp, now) {
            Err(error) if self.pinned.contains(certificate) && !is_date_error(&error) => {
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
