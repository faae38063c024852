//! TLS clients, and a certificate authority that can revoke. Other authorities: `test_ca`, `client_certificates`.
//!
//! A [`RevokingCa`] issues and revokes certificates. A [`TlsClient`] holds the trusted authorities and the certificate of a
//! client; its connections are used through a [`Client`].

use std::fmt::Write as _;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use aws_lc_rs::digest;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer, KeyIdMethod, KeyPair,
    PublicKeyData, RevokedCertParams, SerialNumber, date_time_ymd,
};
use rustls::client::Resumption;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedProtocolVersion, version};

use super::client::{Client, HOST};
use super::{DEADLINE, TempDir};

/// A certificate authority.
pub struct RevokingCa {
    issuer: Issuer<'static, KeyPair>,
    der: CertificateDer<'static>,
    pub pem: String,
}

/// A certificate and its key.
pub struct Issued {
    pub pem: String,
    pub key_pem: String,
    pub der: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
    serial: SerialNumber,
}

impl RevokingCa {
    /// A new authority with its own key.
    pub fn new() -> RevokingCa {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "an authority of the tests");
        let certificate = params.self_signed(&key).unwrap();
        RevokingCa { der: certificate.der().clone(), pem: certificate.pem(), issuer: Issuer::new(params, key) }
    }

    /// A certificate for names, with its own key (ECDSA on P-256).
    pub fn issue(&self, names: &[&str]) -> Issued {
        self.issue_with(names, KeyPair::generate().unwrap(), |_| {})
    }

    pub fn issue_with(&self, names: &[&str], key: KeyPair, change: impl FnOnce(&mut CertificateParams)) -> Issued {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        // A subject equal to the issuer would make the certificate look self-signed.
        params.distinguished_name.push(DnType::CommonName, "issued in a test");
        // Serial numbers of an issuer are unique.
        let print = digest::digest(&digest::SHA256, key.der_bytes());
        let serial = SerialNumber::from_slice(&[&[1], &print.as_ref()[..15]].concat());
        params.serial_number = Some(serial.clone());
        change(&mut params);
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        Issued {
            pem: certificate.pem(),
            key_pem: key.serialize_pem(),
            der: certificate.der().clone(),
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            serial,
        }
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
}

impl Issued {
    /// `certificate` and `private_key`, with both in files.
    pub fn toml(&self, scratch: &TempDir, name: &str) -> String {
        let certificate = scratch.write(&format!("{name}.pem"), &self.pem);
        let key = scratch.write(&format!("{name}.key"), &self.key_pem);
        format!("certificate = \"{}\"\nprivate_key = \"{}\"\n", certificate.display(), key.display())
    }

    /// The fingerprint by which the gateway counts: SHA-256 in lower-case hex.
    pub fn fingerprint(&self) -> String {
        let mut text = String::new();
        let digest = digest::digest(&digest::SHA256, &self.der);
        digest.as_ref().iter().for_each(|byte| write!(text, "{byte:02x}").unwrap());
        text
    }
}

/// `[listen]` with a cleartext and a TLS address, and additional settings of `[listen.https]`.
pub fn listen(scratch: &TempDir, certificate: &Issued, more: &str) -> String {
    let pair = certificate.toml(scratch, "server");
    format!(
        "[admin]\nhosts = [\"{HOST}\"]\n[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n\
         [listen.https]\naddress = \"127.0.0.1:0\"\n{pair}{more}\n"
    )
}

pub type TlsStream = StreamOwned<ClientConnection, TcpStream>;

/// The trusted authorities, the certificate and the sessions of a client.
#[derive(Clone)]
pub struct TlsClient {
    pub config: Arc<ClientConfig>,
}

impl TlsClient {
    pub fn trusting(authority: &RevokingCa) -> TlsClient {
        TlsClient::new(authority, None, &[&version::TLS13, &version::TLS12])
    }

    /// A client with its own certificate.
    pub fn with_certificate(authority: &RevokingCa, own: &Issued) -> TlsClient {
        TlsClient::new(authority, Some(own), &[&version::TLS13, &version::TLS12])
    }

    pub fn new(
        authority: &RevokingCa,
        own: Option<&Issued>,
        versions: &[&'static SupportedProtocolVersion],
    ) -> TlsClient {
        let mut roots = RootCertStore::empty();
        roots.add(authority.der.clone()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_protocol_versions(versions).unwrap().with_root_certificates(roots);
        let mut config = match own {
            None => builder.with_no_client_auth(),
            Some(own) => builder.with_client_auth_cert(vec![own.der.clone()], own.key.clone_key()).unwrap(),
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        config.resumption = Resumption::in_memory_sessions(8);
        TlsClient { config: Arc::new(config) }
    }

    /// Connects, and completes the handshake.
    pub fn connect(&self, address: SocketAddr, name: &str) -> Client<TlsStream> {
        self.try_connect(address, name).unwrap()
    }

    pub fn try_connect(&self, address: SocketAddr, name: &str) -> io::Result<Client<TlsStream>> {
        self.try_connect_over(TcpStream::connect(address)?, name)
    }

    /// Performs the handshake on an open connection, for example after a PROXY header.
    pub fn try_connect_over(&self, mut stream: TcpStream, name: &str) -> io::Result<Client<TlsStream>> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(DEADLINE))?;
        stream.set_write_timeout(Some(DEADLINE))?;
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let mut session = ClientConnection::new(Arc::clone(&self.config), name).unwrap();
        while session.is_handshaking() {
            session.complete_io(&mut stream)?;
        }
        Ok(Client::from_stream(StreamOwned::new(session, stream)))
    }
}
