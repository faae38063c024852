//! The certificate authority of a test: it issues and revokes certificates. Keys are new for every test.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use aws_lc_rs::digest;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer, KeyIdMethod, KeyPair,
    KeyUsagePurpose, PublicKeyData, RevokedCertParams, SerialNumber, date_time_ymd,
};
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};

use super::TempDir;

/// The names of [`ServerFiles::certificate`] in addition to 127.0.0.1.
pub const NAMES: [&str; 2] = ["localhost", "gateway.test"];

pub struct TestCa {
    issuer: Issuer<'static, KeyPair>,
    pub der: CertificateDer<'static>,
    pub pem: String,
}

/// A certificate and its key.
pub struct Issued {
    pub pem: String,
    pub key_pem: String,
    pub der: CertificateDer<'static>,
    pub key: PrivateKeyDer<'static>,
    serial: SerialNumber,
}

impl TestCa {
    /// A new authority with its own key.
    pub fn new() -> TestCa {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        // Every authority has a different name.
        let name = key.public_key_raw().iter().map(|byte| format!("{byte:02x}")).take(16).collect::<String>();
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.self_signed(&key).unwrap();
        TestCa { der: certificate.der().clone(), pem: certificate.pem(), issuer: Issuer::new(params, key) }
    }

    /// A certificate for names and addresses, with its own key (ECDSA on P-256).
    pub fn issue(&self, names: &[&str]) -> Issued {
        self.issue_with(names, KeyPair::generate().unwrap(), |_| {})
    }

    pub fn issue_with(&self, names: &[&str], key: KeyPair, change: impl FnOnce(&mut CertificateParams)) -> Issued {
        let mut params = params_of(names, &key);
        // A subject equal to the issuer would make the certificate look self-signed.
        params.distinguished_name.push(DnType::CommonName, "issued in a test");
        // OpenSSL in strict mode rejects a certificate without it.
        params.use_authority_key_identifier_extension = true;
        change(&mut params);
        let serial = params.serial_number.clone().unwrap();
        Issued::new(&params.signed_by(&key, &self.issuer).unwrap(), &key, serial)
    }

    /// A self-signed certificate, as made by `openssl req -x509`.
    pub fn self_signed(names: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Issued {
        let key = KeyPair::generate().unwrap();
        let mut params = params_of(names, &key);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        change(&mut params);
        let serial = params.serial_number.clone().unwrap();
        Issued::new(&params.self_signed(&key).unwrap(), &key, serial)
    }

    /// A certificate revocation list in PEM, valid until the beginning of a year.
    pub fn revoke(&self, revoked: &[&Issued], until_year: i32) -> String {
        let revoked_certs = revoked.iter().map(|issued| RevokedCertParams {
            serial_number: issued.serial.clone(),
            revocation_time: date_time_ymd(2020, 1, 1),
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2020, 1, 1),
            next_update: date_time_ymd(until_year, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked_certs.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        list.signed_by(&self.issuer).unwrap().pem().unwrap()
    }

    /// The trust anchors with this authority alone.
    pub fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(self.der.clone()).unwrap();
        roots
    }
}

fn params_of(names: &[&str], key: &KeyPair) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    // Serial numbers of an issuer are unique.
    let print = digest::digest(&digest::SHA256, key.der_bytes());
    params.serial_number = Some(SerialNumber::from_slice(&[&[1], &print.as_ref()[..15]].concat()));
    params
}

impl Issued {
    fn new(certificate: &rcgen::Certificate, key: &KeyPair, serial: SerialNumber) -> Issued {
        Issued {
            pem: certificate.pem(),
            key_pem: key.serialize_pem(),
            der: certificate.der().clone(),
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            serial,
        }
    }

    /// Writes the certificate to `NAME.pem` and the key to `NAME.key`.
    pub fn write(&self, scratch: &TempDir, name: &str) -> (PathBuf, PathBuf) {
        (scratch.write(&format!("{name}.pem"), &self.pem), scratch.write(&format!("{name}.key"), &self.key_pem))
    }

    /// `certificate` and `private_key`, with both in files.
    pub fn toml(&self, scratch: &TempDir, name: &str) -> String {
        let (certificate, key) = self.write(scratch, name);
        format!("certificate = \"{}\"\nprivate_key = \"{}\"\n", certificate.display(), key.display())
    }

    /// The fingerprint by which the gateway counts: SHA-256 in lower-case hex.
    pub fn fingerprint(&self) -> String {
        let mut text = String::new();
        let digest = digest::digest(&digest::SHA256, &self.der);
        digest.as_ref().iter().for_each(|byte| write!(text, "{byte:02x}").unwrap());
        text
    }

    /// The TLS settings of a server with this certificate. With `client_ca`, the server requires a client certificate of
    /// that authority.
    pub fn server_config(&self, protocols: &[&str], client_ca: Option<&TestCa>) -> Arc<ServerConfig> {
        let provider = Arc::new(default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let builder = match client_ca {
            Some(ca) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(ca.roots()), provider).build();
                builder.with_client_cert_verifier(verifier.unwrap())
            }
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_single_cert(vec![self.der.clone()], self.key.clone_key()).unwrap();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        Arc::new(config)
    }
}

/// A server certificate for this machine and its authority, in files that external programs read.
pub struct ServerFiles {
    /// The certificate of the authority, which clients trust.
    pub ca: PathBuf,
    pub certificate: PathBuf,
    pub private_key: PathBuf,
    /// The digest of the public key, as expected by Chromium's option for accepted keys.
    pub pin: String,
    _scratch: TempDir,
}

impl ServerFiles {
    pub fn new() -> ServerFiles {
        let (ca, scratch) = (TestCa::new(), TempDir::new());
        let key = KeyPair::generate().unwrap();
        let pin = STANDARD.encode(digest::digest(&digest::SHA256, &key.subject_public_key_info()));
        let issued = ca.issue_with(&[NAMES[0], NAMES[1], "127.0.0.1"], key, |_| {});
        let (certificate, private_key) = issued.write(&scratch, "server");
        ServerFiles { ca: scratch.write("ca.pem", &ca.pem), certificate, private_key, pin, _scratch: scratch }
    }

    /// The option `--tls CERTIFICATE KEY` of the server scripts.
    pub fn tls_arguments(&self) -> [String; 3] {
        ["--tls".to_owned(), self.certificate.display().to_string(), self.private_key.display().to_string()]
    }
}
