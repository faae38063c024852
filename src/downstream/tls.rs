//! TLS as a listener speaks it: which certificate a client is shown, whose certificate it has to show,
//! and what may be spoken inside. The handshake itself is rustls's.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;

use rustls::crypto::aws_lc_rs::{Ticketer, default_provider};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::{TLS12, TLS13};
use rustls::{Error, RootCertStore, ServerConfig};
use rustls_pki_types::CertificateDer;
use sha2::{Digest as _, Sha256};

use crate::config::certificate::Certificate;
use crate::config::listen::{ClientAuth, Tls, TlsVersion};

/// HTTP/2 where it is negotiated (RFC 9113, section 3.2).
pub const HTTP2: &[u8] = b"h2";
/// What can be spoken inside TLS (RFC 7301), the most welcome first. `arrival` does as is agreed.
const ALPN: [&[u8]; 3] = [HTTP2, b"http/1.1", b"http/1.0"];

/// Session tickets that a client gets. Browsers open several connections, and use each ticket once.
const TICKETS: usize = 2;

pub fn server_config(tls: &Tls) -> Result<Arc<ServerConfig>, Error> {
    let provider = Arc::new(default_provider());
    let versions = match tls.min_version {
        TlsVersion::V1_2 => &[&TLS13, &TLS12][..],
        TlsVersion::V1_3 => &[&TLS13],
    };
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_protocol_versions(versions)?;
    let builder = match &tls.client_auth {
        None => builder.with_no_client_auth(),
        Some(ClientAuth { authorities, required, revoked }) => {
            let mut roots = RootCertStore::empty();
            for authority in authorities {
                roots.add(authority.clone())?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            // As with other gateways: whose issuer has no list, or none that is still valid, is not let in. Without
            // any list nothing of this is asked.
            let lists = revoked.iter().map(|list| list.der.clone());
            let verifier = verifier.with_crls(lists).enforce_revocation_expiration();
            let verifier = if *required { verifier } else { verifier.allow_unauthenticated() };
            builder.with_client_cert_verifier(verifier.build().map_err(|error| Error::General(error.to_string()))?)
        }
    };
    let mut server_config = builder.with_cert_resolver(Arc::new(CertificateResolver::new(&tls.certificates)));
    server_config.alpn_protocols = ALPN.iter().map(|name| name.to_vec()).collect();
    // What comes before the handshake is over can be sent again by anybody (RFC 8446, section 8).
    server_config.max_early_data_size = 0;
    // A session is kept by the client, in a ticket that only this process can read: nothing is kept here. Each set of
    // settings has keys of its own: who was let in by some is not let in by others.
    server_config.ticketer = Ticketer::new()?;
    server_config.send_tls13_tickets = TICKETS;
    server_config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(Arc::new(server_config))
}

/// The fingerprint of a certificate: SHA-256, in lower-case hex.
pub fn fingerprint(certificate: &CertificateDer) -> Box<str> {
    let mut text = String::with_capacity(64);
    for byte in Sha256::digest(certificate) {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text.into_boxed_str()
}

/// The certificates of a listener, by the names that clients ask for.
#[derive(Debug)]
struct CertificateResolver {
    /// Without the `*.` of those that are for all right under a name.
    exact: HashMap<String, Vec<Arc<CertifiedKey>>>,
    wildcard: HashMap<String, Vec<Arc<CertifiedKey>>>,
    /// For who asks for no name, or for one that none is for.
    default: Vec<Arc<CertifiedKey>>,
}

impl CertificateResolver {
    fn new(certificates: &[Certificate]) -> CertificateResolver {
        let mut shown = CertificateResolver { exact: HashMap::new(), wildcard: HashMap::new(), default: Vec::new() };
        for certificate in certificates {
            for name in &certificate.names {
                let (names, name) = match name.strip_prefix("*.") {
                    Some(parent) => (&mut shown.wildcard, parent),
                    None => (&mut shown.exact, name.as_str()),
                };
                names.entry(name.to_owned()).or_default().push(Arc::clone(&certificate.key));
            }
        }
        if let Some(main) = certificates.first() {
            // With it another for the same names, that has another kind of key.
            let alike = certificates.iter().skip(1).filter(|other| other.names == main.names);
            shown.default = std::iter::once(main).chain(alike).map(|one| Arc::clone(&one.key)).collect();
        }
        shown
    }

    fn find_by_name(&self, name: &str) -> Option<&[Arc<CertifiedKey>]> {
        let name = name.to_ascii_lowercase();
        let parent = || name.split_once('.').and_then(|(_, parent)| self.wildcard.get(parent));
        self.exact.get(&name).or_else(parent).map(Vec::as_slice)
    }
}

impl ResolvesServerCert for CertificateResolver {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let keys = hello.server_name().and_then(|name| self.find_by_name(name)).unwrap_or(&self.default);
        let fits = |key: &&Arc<CertifiedKey>| key.key.choose_scheme(hello.signature_schemes()).is_some();
        // Where none fits, the handshake says so itself.
        keys.iter().find(fits).or(keys.first()).cloned()
    }
}
