//! A certificate authority of a test, and a server certificate for this machine.
//!
//! Keys are new for every test, and in files, because the gateway and external programs read files.

use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData};
use sha2::{Digest as _, Sha256};

use super::TempDir;

/// The names of the certificate in addition to 127.0.0.1.
pub const NAMES: [&str; 2] = ["localhost", "gateway.test"];

pub struct TestCa {
    /// The certificate of the authority, which clients trust.
    pub ca: PathBuf,
    pub certificate: PathBuf,
    pub private_key: PathBuf,
    /// The digest of the public key, as expected by Chromium's option for accepted keys.
    pub pin: String,
    _scratch: TempDir,
}

impl TestCa {
    pub fn new() -> TestCa {
        let scratch = TempDir::new();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, "authority of the tests");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let own = params.self_signed(&key).unwrap();
        let issuer = Issuer::new(params, key);

        let key = KeyPair::generate().unwrap();
        let names: Vec<String> = NAMES.iter().chain(&["127.0.0.1"]).map(|&name| name.to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        // A subject equal to the issuer would make the certificate look self-signed.
        params.distinguished_name.push(DnType::CommonName, NAMES[0]);
        // OpenSSL in strict mode rejects a certificate without it.
        params.use_authority_key_identifier_extension = true;
        let certificate = params.signed_by(&key, &issuer).unwrap();
        TestCa {
            ca: scratch.write("ca.pem", own.pem()),
            certificate: scratch.write("certificate.pem", certificate.pem()),
            private_key: scratch.write("private.pem", key.serialize_pem()),
            pin: STANDARD.encode(Sha256::digest(key.subject_public_key_info())),
            _scratch: scratch,
        }
    }

    /// The option `--tls CERTIFICATE KEY` of the server scripts.
    pub fn tls_arguments(&self) -> [String; 3] {
        ["--tls".to_owned(), self.certificate.display().to_string(), self.private_key.display().to_string()]
    }
}
