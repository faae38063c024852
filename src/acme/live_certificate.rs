//! The ordered certificate in use, and the certificates that answer TLS-ALPN-01 challenges. Read by handshakes.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use aws_lc_rs::digest;
use rcgen::{CertificateParams, CustomExtension, KeyPair};
use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::PrivateKeyDer;
use rustls::sign::CertifiedKey;

use transom_config::certificate::Certificate;
use transom_rules::acme_challenges::PendingChallenges;

/// The ALPN name of handshakes that validate a challenge (RFC 8737, section 6.2).
pub const ACME_TLS: &[u8] = b"acme-tls/1";

/// The certificate of one order.
pub struct LiveCertificate {
    /// The names for which it is used.
    pub domains: Vec<String>,
    challenges: Arc<PendingChallenges>,
    current: RwLock<Option<Arc<CertifiedKey>>>,
}

impl fmt::Debug for LiveCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LiveCertificate").field("domains", &self.domains).finish_non_exhaustive()
    }
}

impl LiveCertificate {
    /// `current`: the certificate of a former order with names in common.
    pub fn new(
        domains: &[String],
        challenges: &Arc<PendingChallenges>,
        current: Option<Arc<CertifiedKey>>,
    ) -> Arc<LiveCertificate> {
        let challenges = Arc::clone(challenges);
        Arc::new(LiveCertificate { domains: domains.to_vec(), challenges, current: RwLock::new(current) })
    }

    /// The certificate in use; `None` until the first is issued.
    pub fn current(&self) -> Option<Arc<CertifiedKey>> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn replace(&self, certificate: &Certificate) {
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&certificate.key));
    }

    /// The certificate that answers the challenge for a name (RFC 8737, section 3): signed by itself, with the digest of the key
    /// authorization. `None`: no challenge for the name is pending.
    pub fn challenge_certificate(&self, name: &str) -> Option<Arc<CertifiedKey>> {
        let authorization = self.challenges.of_domain(name)?;
        let digest = digest::digest(&digest::SHA256, authorization.as_bytes());
        let mut params = CertificateParams::new([name.to_owned()]).ok()?;
        params.custom_extensions = vec![CustomExtension::new_acme_identifier(digest.as_ref())];
        let key = KeyPair::generate().ok()?;
        let certificate = params.self_signed(&key).ok()?;
        let key = any_supported_type(&PrivateKeyDer::try_from(key.serialize_der()).ok()?).ok()?;
        Some(Arc::new(CertifiedKey::new(vec![certificate.der().clone()], key)))
    }
}
