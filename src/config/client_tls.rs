//! How the gateway is a client of TLS: whom it trusts, and who it is itself.
//!
//! Made once, when the configuration is read, and shared by all event loops: so is the memory of sessions
//! that can be resumed. Two are alike if they were made of the same files and settings; connections
//! outlive a reload by that.

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
    /// Offers no protocol yet: see [`ClientTls::offering`].
    client: Arc<ClientConfig>,
    /// Who the server must be, where it is not the host of its URL.
    pub server_name: Option<ServerName<'static>>,
    /// A digest of all that it was made of.
    digest: [u8; 32],
}

impl ClientTls {
    /// `print` is a digest of all that the others are made of.
    pub fn new(client: ClientConfig, server_name: Option<ServerName<'static>>, print: [u8; 32]) -> ClientTls {
        ClientTls { client: Arc::new(client), server_name, digest: print }
    }

    /// The same with the protocols that are offered by ALPN.
    pub fn with_alpn(&self, protocols: &[&[u8]]) -> Arc<ClientConfig> {
        let mut client = ClientConfig::clone(&self.client);
        client.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        Arc::new(client)
    }
}

/// Believes whom the authorities vouch for, and a server that shows a certificate which the operator has named
/// itself: one that is its own authority, as `openssl req -x509` makes them, can not vouch for a server by
/// the rules. Its name and its dates have to be right all the same.
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

/// webpki looks at dates before it looks at who may vouch for whom.
fn is_date_error(error: &Error) -> bool {
    use CertificateError::{Expired, ExpiredContext, NotValidYet, NotValidYetContext};
    let Error::InvalidCertificate(why) = error else { return false };
    matches!(why, Expired | ExpiredContext { .. } | NotValidYet | NotValidYetContext { .. })
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
