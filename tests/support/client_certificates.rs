//! Certificates and TLS settings of upstreams, and the authority that signs the certificates; new for every test.

use std::path::PathBuf;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

use super::TempDir;

pub struct ClientCa {
    issuer: CertifiedIssuer<'static, KeyPair>,
    pub scratch: TempDir,
}

/// A certificate and its key, in PEM.
pub struct Identity {
    pub certificate: String,
    pub private_key: String,
}

impl ClientCa {
    pub fn new() -> ClientCa {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        // Every authority has a different name.
        let name = key.public_key_raw().iter().map(|byte| format!("{byte:02x}")).take(16).collect::<String>();
        params.distinguished_name.push(DnType::CommonName, name);
        let issuer = CertifiedIssuer::self_signed(params, key).unwrap();
        ClientCa { issuer, scratch: TempDir::new() }
    }

    /// A certificate for these names and addresses.
    pub fn sign(&self, names: &[&str]) -> Identity {
        self.sign_with(names, |_| {})
    }

    pub fn sign_with(&self, names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Identity {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap();
        change(&mut params);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Identity { certificate: certificate.pem(), private_key: key.serialize_pem() }
    }

    /// A self-signed certificate, as made by `openssl req -x509`.
    pub fn self_signed(names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Identity {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        change(&mut params);
        Identity { certificate: params.self_signed(&key).unwrap().pem(), private_key: key.serialize_pem() }
    }

    /// The authority's own certificate, in a file.
    pub fn ca(&self) -> PathBuf {
        self.scratch.write("ca.pem", self.issuer.pem())
    }

    /// The TLS settings of a server with these names. With `requires_client_certificate`, the server requires a client certificate of this authority.
    pub fn server(
        &self,
        identity: &Identity,
        protocols: &[&str],
        requires_client_certificate: bool,
    ) -> Arc<ServerConfig> {
        let chain: Vec<_> =
            CertificateDer::pem_slice_iter(identity.certificate.as_bytes()).map(Result::unwrap).collect();
        let key = PrivateKeyDer::from_pem_slice(identity.private_key.as_bytes()).unwrap();
        let provider = Arc::new(default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let builder = if requires_client_certificate {
            let mut roots = RootCertStore::empty();
            roots.add(CertificateDer::from_pem_slice(self.issuer.pem().as_bytes()).unwrap()).unwrap();
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build().unwrap();
            builder.with_client_cert_verifier(verifier)
        } else {
            builder.with_no_client_auth()
        };
        let mut config = builder.with_single_cert(chain, key).unwrap();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        Arc::new(config)
    }
}
