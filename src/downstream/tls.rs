//! TLS settings of a listener: server certificates by name, client certificates, protocols and sessions. rustls performs
//! the handshake.

use std::collections::HashMap;
use std::sync::Arc;

use rustls::crypto::aws_lc_rs::{Ticketer, default_provider};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::{TLS12, TLS13};
use rustls::{Error, RootCertStore, ServerConfig};

use crate::acme::live_certificate::{ACME_TLS, LiveCertificate};
use transom_config::certificate::Certificate;
use transom_config::listen::{ClientAuth, Https, TlsVersion};

/// ALPN name of HTTP/2 (RFC 9113, section 3.2).
pub const HTTP2: &[u8] = b"h2";
/// Protocols offered to clients (RFC 7301), preferred first.
const ALPN: [&[u8]; 3] = [HTTP2, b"http/1.1", b"http/1.0"];

/// Session tickets sent per connection. Browsers open several connections, and use each ticket once.
const TICKETS: usize = 2;

/// The rustls configuration of a listener. `ordered`: the certificate that an authority issues.
pub fn server_config(https: &Https, ordered: Option<Arc<LiveCertificate>>) -> Result<Arc<ServerConfig>, Error> {
    let provider = Arc::new(default_provider());
    let versions = match https.min_version {
        TlsVersion::V1_2 => &[&TLS13, &TLS12][..],
        TlsVersion::V1_3 => &[&TLS13],
    };
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_protocol_versions(versions)?;
    let builder = match &https.client_ca {
        None => builder.with_no_client_auth(),
        Some(authorities) => {
            let mut roots = RootCertStore::empty();
            for authority in authorities {
                roots.add(authority.clone())?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            // With revocation lists, a certificate is rejected if its issuer has no list, or only expired ones, as nginx and
            // Envoy do. Without any list, revocation is not checked.
            let lists = https.client_crl.iter().flatten().map(|list| list.der.clone());
            let verifier = verifier.with_crls(lists).enforce_revocation_expiration();
            let verifier = match https.client_auth {
                ClientAuth::Required => verifier,
                ClientAuth::Optional => verifier.allow_unauthenticated(),
            };
            builder.with_client_cert_verifier(verifier.build().map_err(|error| Error::General(error.to_string()))?)
        }
    };
    let answers_challenges = ordered.is_some();
    let resolver = CertificateResolver::new(&https.certificates, ordered);
    let mut server_config = builder.with_cert_resolver(Arc::new(resolver));
    let protocols = ALPN.into_iter().chain(answers_challenges.then_some(ACME_TLS));
    server_config.alpn_protocols = protocols.map(<[u8]>::to_vec).collect();
    // No early data: it can be replayed (RFC 8446, section 8).
    server_config.max_early_data_size = 0;
    // Sessions are stateless: the client keeps them in a ticket that only this process can decrypt. Each configuration has
    // its own ticket keys, so that a session cannot be resumed under another configuration's client authentication.
    server_config.ticketer = Ticketer::new()?;
    server_config.send_tls13_tickets = TICKETS;
    server_config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(Arc::new(server_config))
}

/// Certificates of a listener, by the server name (SNI) that clients send.
#[derive(Debug)]
struct CertificateResolver {
    exact: HashMap<String, Vec<Arc<CertifiedKey>>>,
    /// Names without their `*.`, which stands for exactly one label.
    wildcard: HashMap<String, Vec<Arc<CertifiedKey>>>,
    /// For clients that send no server name, or one without a certificate.
    default: Vec<Arc<CertifiedKey>>,
    /// The certificate that an authority issues; for its names, and in place of a missing default.
    ordered: Option<Arc<LiveCertificate>>,
}

impl CertificateResolver {
    fn new(certificates: &[Certificate], ordered: Option<Arc<LiveCertificate>>) -> CertificateResolver {
        let mut resolver =
            CertificateResolver { exact: HashMap::new(), wildcard: HashMap::new(), default: Vec::new(), ordered };
        for certificate in certificates {
            for name in &certificate.dns_names {
                let (names, name) = match name.strip_prefix("*.") {
                    Some(parent) => (&mut resolver.wildcard, parent),
                    None => (&mut resolver.exact, name.as_str()),
                };
                names.entry(name.to_owned()).or_default().push(Arc::clone(&certificate.key));
            }
        }
        if let Some(main) = certificates.first() {
            // Further certificates for the same names have another type of key.
            let same_names = certificates.iter().skip(1).filter(|other| other.dns_names == main.dns_names);
            resolver.default =
                std::iter::once(main).chain(same_names).map(|certificate| Arc::clone(&certificate.key)).collect();
        }
        resolver
    }

    fn find_by_name(&self, name: &str) -> Option<&[Arc<CertifiedKey>]> {
        let name = name.to_ascii_lowercase();
        let parent = || name.split_once('.').and_then(|(_, parent)| self.wildcard.get(parent));
        self.exact.get(&name).or_else(parent).map(Vec::as_slice)
    }
}

impl ResolvesServerCert for CertificateResolver {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        if let Some(ordered) = &self.ordered {
            let name = hello.server_name().unwrap_or_default();
            if hello.alpn().is_some_and(|mut protocols| protocols.any(|protocol| protocol == ACME_TLS)) {
                return ordered.challenge_certificate(name);
            }
            if self.default.is_empty() || ordered.domains.iter().any(|domain| domain.eq_ignore_ascii_case(name)) {
                let named = || self.find_by_name(name)?.first().cloned();
                return ordered.current().or_else(named).or_else(|| self.default.first().cloned());
            }
        }
        let keys = hello.server_name().and_then(|name| self.find_by_name(name)).unwrap_or(&self.default);
        let is_usable = |key: &&Arc<CertifiedKey>| key.key.choose_scheme(hello.signature_schemes()).is_some();
        // If no key type is usable, rustls fails the handshake with the first.
        keys.iter().find(is_usable).or(keys.first()).cloned()
    }
}
