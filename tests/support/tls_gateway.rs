//! A gateway with one cleartext and one TLS listener, for external client programs.

use std::net::SocketAddr;

use super::gateway::Gateway;
use super::test_ca::Authority;

pub struct Edge {
    pub gateway: Gateway,
    pub authority: Authority,
    pub clear: SocketAddr,
    pub tls: SocketAddr,
}

impl Edge {
    /// `toml` is everything but `[listen]`.
    pub fn start(toml: &str) -> Edge {
        let authority = Authority::new();
        let gateway = Gateway::start(&format!(
            "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n\
             [listen.https]\naddress = \"127.0.0.1:0\"\ncertificate = {:?}\nprivate_key = {:?}\n{toml}",
            authority.certificate, authority.private_key
        ));
        let (clear, tls) = (gateway.http, gateway.https()[0]);
        Edge { gateway, authority, clear, tls }
    }

    /// How a script gets here, in the clear and with TLS.
    pub fn ways(&self) -> [Vec<String>; 2] {
        let ca = self.authority.ca.display().to_string();
        [vec![self.clear.to_string()], vec![self.tls.to_string(), "--ca".to_owned(), ca]]
    }
}

/// A configuration of one route for everything, with a rule that refuses no request or, with `refusing`, every request
/// after the first.
pub fn all_to(upstream: &str, refusing: bool) -> String {
    let window = if refusing { "1/366d" } else { "1000000/hour" };
    format!(
        "{upstream}\n[rules.r]\nkey = \"ip\"\nwindows = [\"{window}\"]\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n"
    )
}
