//! `[listen]`: addresses, TLS for clients, limits on connections, PROXY protocol and trusted proxies.

use std::net::SocketAddr;

use rustls_pki_types::CertificateDer;

use super::certificate::{Certificate, RevocationList};
use transom_limiter::ip_prefix::Network;

#[derive(Clone, PartialEq, Debug)]
pub struct Listen {
    /// Addresses for HTTP without TLS.
    pub http: Vec<SocketAddr>,
    /// Addresses for HTTP over TLS, by certificates.
    pub https: Vec<Https>,
    pub admin: Option<SocketAddr>,
    /// Networks whose connections begin with a PROXY header, which names the client.
    pub proxy_protocol: Vec<Network>,
    /// Concurrent client connections; `None`: derived from the limit on file descriptors.
    pub max_connections: Option<usize>,
    /// Concurrent connections of one IPv4 address or one IPv6 /64; `None`: no limit.
    pub max_connections_per_client: Option<u32>,
}

/// Addresses with the same TLS settings.
#[derive(Clone, PartialEq, Debug)]
pub struct Https {
    pub addresses: Vec<SocketAddr>,
    pub tls: Tls,
}

/// TLS settings of a listener.
#[derive(Clone, PartialEq, Debug)]
pub struct Tls {
    /// The first is the default: for clients that send no server name, or one that no certificate has.
    pub certificates: Vec<Certificate>,
    pub client_auth: Option<ClientAuth>,
    pub min_version: TlsVersion,
}

/// Verification of client certificates.
#[derive(Clone, PartialEq, Debug)]
pub struct ClientAuth {
    /// Issuers that are trusted.
    pub authorities: Vec<CertificateDer<'static>>,
    /// Whether connections without a certificate are rejected.
    pub required: bool,
    /// If there are any, each issuer must have one.
    pub revocation_lists: Vec<RevocationList>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TlsVersion {
    V1_2,
    V1_3,
}

/// Whether requests have a verified client certificate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClientCerts {
    Never,
    Sometimes,
    Always,
}

impl Listen {
    /// Whether both have the same addresses in the same order.
    pub fn has_same_addresses(&self, other: &Listen) -> bool {
        let https = |listen: &Listen| listen.https.iter().map(|https| https.addresses.clone()).collect::<Vec<_>>();
        (&self.http, https(self), self.admin) == (&other.http, https(other), other.admin)
    }

    pub fn client_certs(&self) -> ClientCerts {
        let is_required = |https: &Https| https.tls.client_auth.as_ref().map(|auth| auth.required);
        if !self.https.iter().any(|https| is_required(https).is_some()) {
            ClientCerts::Never
        } else if self.http.is_empty() && self.https.iter().all(|https| is_required(https) == Some(true)) {
            ClientCerts::Always
        } else {
            ClientCerts::Sometimes
        }
    }
}

/// Proxies in front of the gateway, and the header field in which they name the client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TrustedProxies {
    pub networks: Vec<Network>,
    pub field: ForwardedField,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ForwardedField {
    XForwardedFor,
    /// RFC 7239.
    Forwarded,
}
