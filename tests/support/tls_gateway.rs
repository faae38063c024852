//! A gateway with one cleartext and one TLS listener, for external client programs.

use std::net::SocketAddr;

use super::gateway::Gateway;
use super::test_ca::ServerFiles;

pub struct TlsGateway {
    pub gateway: Gateway,
    pub authority: ServerFiles,
    pub plain: SocketAddr,
    pub tls: SocketAddr,
}

impl TlsGateway {
    /// `toml` is the configuration without `[listen]`.
    pub fn start(toml: &str) -> TlsGateway {
        let authority = ServerFiles::new();
        let gateway = Gateway::start(&format!(
            "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n\
             [listen.https]\naddress = \"127.0.0.1:0\"\ncertificate = {:?}\nprivate_key = {:?}\n{toml}",
            authority.certificate, authority.private_key
        ));
        let (clear, tls) = (gateway.http, gateway.https_addresses()[0]);
        TlsGateway { gateway, authority, plain: clear, tls }
    }

    /// The arguments of a client script for cleartext and for TLS.
    pub fn client_arguments(&self) -> [Vec<String>; 2] {
        let ca = self.authority.ca.display().to_string();
        [vec![self.plain.to_string()], vec![self.tls.to_string(), "--ca".to_owned(), ca]]
    }
}

/// A configuration of one route for everything, with a rule that refuses no request or, with `refusing`, every request
/// after the first.
pub fn limited_route_to(upstream: &str, refusing: bool) -> String {
    let window = if refusing { "1/366d" } else { "1000000/hour" };
    format!(
        "{upstream}\n[rules.r]\nkey = \"ip\"\nwindows = [\"{window}\"]\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n"
    )
}
