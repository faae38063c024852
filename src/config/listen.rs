//! Where the gateway listens, and what holds for connections before their first request.

use std::net::SocketAddr;

use rustls_pki_types::CertificateDer;

use super::certificate::Certificate;
use super::crl::RevocationList;
use transom_limiter::ip_prefix::Network;

#[derive(Clone, PartialEq, Debug)]
pub struct Listen {
    /// Addresses that speak HTTP in the clear.
    pub http: Vec<SocketAddr>,
    /// Listeners that speak HTTP over TLS.
    pub https: Vec<Https>,
    pub admin: Option<SocketAddr>,
    /// Connections from here begin with a PROXY header, which says who is behind them.
    pub proxy_protocol: Vec<Network>,
    /// Client connections at a time; `None`: as many as there are descriptors for.
    pub max_connections: Option<usize>,
    /// Of them, those of one IPv4 address or of one IPv6 network of 64 bits; `None`: any number.
    pub max_connections_per_client: Option<u32>,
}

/// Addresses with the same certificates.
#[derive(Clone, PartialEq, Debug)]
pub struct Https {
    pub addresses: Vec<SocketAddr>,
    pub tls: Tls,
}

/// What is needed to speak TLS.
#[derive(Clone, PartialEq, Debug)]
pub struct Tls {
    /// The first is shown to clients who ask for no name, or for one that none is for.
    pub certificates: Vec<Certificate>,
    pub client_auth: Option<ClientAuth>,
    pub min_version: TlsVersion,
}

/// Whose certificates clients show.
#[derive(Clone, PartialEq, Debug)]
pub struct ClientAuth {
    /// Who issues them.
    pub authorities: Vec<CertificateDer<'static>>,
    /// Whether a client without one is turned away.
    pub required: bool,
    /// Which certificates are not believed any more. Where there is one, each issuer has to have one.
    pub revocation_lists: Vec<RevocationList>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TlsVersion {
    V1_2,
    V1_3,
}

/// Whether requests come with a verified certificate of their client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClientCerts {
    Never,
    Sometimes,
    Always,
}

impl Listen {
    /// Whether another listens on the same addresses, in the same order.
    pub fn has_same_addresses(&self, other: &Listen) -> bool {
        let https = |listen: &Listen| listen.https.iter().map(|https| https.addresses.clone()).collect::<Vec<_>>();
        (&self.http, https(self), self.admin) == (&other.http, https(other), other.admin)
    }

    pub fn client_certs(&self) -> ClientCerts {
        let of = |https: &Https| https.tls.client_auth.as_ref().map(|auth| auth.required);
        if !self.https.iter().any(|https| of(https).is_some()) {
            ClientCerts::Never
        } else if self.http.is_empty() && self.https.iter().all(|https| of(https) == Some(true)) {
            ClientCerts::Always
        } else {
            ClientCerts::Sometimes
        }
    }
}
