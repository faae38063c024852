//! An authority of the test's own, and a certificate for everything that listens on this machine.
//!
//! Fresh keys for every test, in files, because the gateway and the clients beside it read files.

use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData};
use sha2::{Digest as _, Sha256};

use super::Scratch;

/// The names of the certificate beside 127.0.0.1.
pub const NAMES: [&str; 2] = ["localhost", "gateway.test"];

pub struct TestCa {
    /// The certificate of the authority, which clients trust.
    pub ca: PathBuf,
    pub certificate: PathBuf,
    pub private_key: PathBuf,
    /// The digest of the public key, as Chromium takes it for a key that it is to accept.
    pub pin: String,
    _scratch: Scratch,
}

impl TestCa {
    pub fn new() -> TestCa {
        let scratch = Scratch::new();
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
        // With the name of its issuer it would pass for one that issued itself.
        params.distinguished_name.push(DnType::CommonName, NAMES[0]);
        // OpenSSL refuses a certificate without, where it is strict.
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

    /// `--tls CERTIFICATE KEY`, as servers among the scripts take it.
    pub fn tls_arguments(&self) -> [String; 3] {
        ["--tls".to_owned(), self.certificate.display().to_string(), self.private_key.display().to_string()]
    }
}
