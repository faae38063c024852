//! TLS clients of the gateway. A [`TlsClient`] holds the trusted authorities and the certificate of a client; its
//! connections are used through a [`Client`].

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use rustls::client::Resumption;
use rustls::crypto::aws_lc_rs::default_provider;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned, SupportedProtocolVersion, version};

use super::client::{Client, HOST};
use super::test_ca::{Issued, TestCa};
use super::{DEADLINE, TempDir};

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
    pub fn trusting(authority: &TestCa) -> TlsClient {
        TlsClient::new(authority, None, &[&version::TLS13, &version::TLS12])
    }

    /// A client with its own certificate.
    pub fn with_certificate(authority: &TestCa, own: &Issued) -> TlsClient {
        TlsClient::new(authority, Some(own), &[&version::TLS13, &version::TLS12])
    }

    pub fn new(authority: &TestCa, own: Option<&Issued>, versions: &[&'static SupportedProtocolVersion]) -> TlsClient {
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()));
        let builder = builder.with_protocol_versions(versions).unwrap().with_root_certificates(authority.roots());
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
