//! The client's side of a request: its connection, and what the handler exchanges with the code that owns the connection.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::fmt::Write;
use std::rc::Rc;
use std::time::Duration;

use http::HeaderValue;
use rustls::ServerConnection;
use rustls_pki_types::CertificateDer;
use sha2::{Digest, Sha256};

use super::websocket::TunnelSession;
use crate::informational::InformationalQueue;
use crate::timer::Timer;
use crate::upstream::request_body::BodyDrain;
use transom_config::certificate;
use transom_http::client_address::ClientAddress;
use transom_http::headers;
use transom_rules::key_source::{ClientCertificate, ConnectionValues};

/// Where a connection comes from; shared by all its requests.
#[derive(Debug)]
pub struct ConnectionInfo {
    /// Address of the client, or of the proxy that opened the connection.
    pub address: ClientAddress,
    /// The address as a field value.
    pub address_field: HeaderValue,
    /// Whether the connection uses TLS.
    pub is_secure: bool,
    /// The client's verified certificate, if it has one.
    pub client_cert: Option<Box<ClientCertificate>>,
    /// Whether the peer is a proxy that asks about requests which it forwards itself.
    pub is_forward_auth: bool,
}

impl ConnectionInfo {
    pub fn new(address: ClientAddress, is_secure: bool) -> ConnectionInfo {
        ConnectionInfo {
            address,
            address_field: headers::address_value(address),
            is_secure,
            client_cert: None,
            is_forward_auth: false,
        }
    }

    /// After the handshake.
    pub fn of_tls(address: ClientAddress, session: &ServerConnection) -> ConnectionInfo {
        let certificate = session.peer_certificates().and_then(<[_]>::first);
        ConnectionInfo { client_cert: certificate.map(client_certificate), ..ConnectionInfo::new(address, true) }
    }

    /// What keys can be made of.
    pub fn key_values(&self) -> ConnectionValues<'_> {
        ConnectionValues { client_cert: self.client_cert.as_deref() }
    }

    pub fn with_forward_auth(self, is_forward_auth: bool) -> ConnectionInfo {
        ConnectionInfo { is_forward_auth, ..self }
    }
}

/// What keys can be made of in a certificate.
fn client_certificate(certificate: &CertificateDer) -> Box<ClientCertificate> {
    let mut fingerprint = String::with_capacity(64);
    for byte in Sha256::digest(certificate) {
        // Writing to a string cannot fail.
        let _ = write!(fingerprint, "{byte:02x}");
    }
    let (san, cn) = certificate::names_of(certificate);
    Box::new(ClientCertificate { fingerprint: fingerprint.into(), san: san.map(Cow::Owned), cn: cn.map(Cow::Owned) })
}

/// The other end of a connection or of an HTTP/2 stream; serves one request at a time.
pub struct Peer {
    pub connection: Rc<ConnectionInfo>,
    /// Timer for what a request waits for until its response begins; over HTTP/2 also for the response.
    pub timer: Rc<Timer>,
    /// Relays an upstream's 1xx responses to the client.
    pub informational: Rc<InformationalQueue>,
    /// Receives the unread rest of a request body. `None`: the connection discards it, or is closed.
    pub body_drain: Option<Rc<BodyDrain>>,
    /// How long a body may make no progress: the configuration's or the route's timeout.
    pub body_timeout: Cell<Duration>,
    /// The tunnel that the response opens.
    pub tunnel: RefCell<Option<Box<TunnelSession>>>,
}

impl Peer {
    pub fn new(connection: Rc<ConnectionInfo>, timer: Rc<Timer>) -> Peer {
        Peer {
            connection,
            timer,
            informational: Rc::default(),
            body_drain: None,
            body_timeout: Cell::default(),
            tunnel: RefCell::default(),
        }
    }

    /// The peer of one HTTP/2 stream.
    pub fn for_stream(connection: Rc<ConnectionInfo>, timer: Rc<Timer>) -> Peer {
        Peer { body_drain: Some(Rc::default()), ..Peer::new(connection, timer) }
    }
}
