//! The gateway behind real load balancers, with the configurations of docs/guides/load-balancer.md: clients are told apart by
//! their own addresses, and cannot claim others.

use std::net::SocketAddr;
use std::process::Command;

use crate::support::client::Client;
use crate::support::external_servers::{on_free_port, program};
use crate::support::gateway::Gateway;
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, guide_blocks};

/// A gateway with one of the configurations of the guide, in front of a server that responds 200.
fn gateway(position: usize, upstream: &Upstream) -> Gateway {
    let toml = guide_blocks("load-balancer", "toml").remove(position);
    let toml = toml.replace("127.0.0.1:9001", &upstream.address.to_string());
    Gateway::start(&toml.replace("127.0.0.1:8080", "127.0.0.1:0").replace("127.0.0.1:9900", "127.0.0.1:0"))
}

/// Each address gets the 33 requests of a minute, whatever the fields of its requests claim.
fn assert_addresses_have_limits_of_their_own(balancer: SocketAddr) {
    for address in ["127.0.0.2", "127.0.0.3"] {
        let mut client = Client::connect_from(address, balancer);
        let mut request = |n: usize| {
            let claimed = format!("192.0.2.{n}");
            let forwarded = format!("for={claimed}");
            let fields = [("X-Forwarded-For", &*claimed), ("X-Real-IP", &claimed), ("Forwarded", &forwarded)];
            client.get_with("/a", &fields).status
        };
        let statuses: Vec<u16> = (0..40).map(&mut request).collect();
        assert_eq!(statuses.iter().position(|status| *status == 429), Some(33), "{address}: {statuses:?}");
        assert!(statuses[33..].iter().all(|status| *status == 429), "{address}: {statuses:?}");
    }
}

#[test]
fn nginx_names_the_client_in_x_forwarded_for() {
    let upstream = Upstream::responding(|_| reply(200, &[], b""));
    let gateway = gateway(0, &upstream);
    let text = guide_blocks("load-balancer", "nginx").remove(0).replace("127.0.0.1:8080", &gateway.http.to_string());
    let balancer = on_free_port("nginx", TempDir::new(), |scratch, address| {
        let folder = scratch.path().display();
        let paths = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {folder}/{name};"))
            .concat();
        let text = text.replace("127.0.0.1:8000", &address.to_string());
        let config = scratch.write(
            "nginx.conf",
            format!(
                "daemon off; master_process off; pid {folder}/pid; error_log stderr; events {{}}
                 http {{ access_log off; {paths} {text} }}"
            ),
        );
        let mut command = Command::new(program("nginx"));
        command.args(["-e", "stderr", "-p"]).arg(scratch.path()).arg("-c").arg(config);
        command
    });
    assert_addresses_have_limits_of_their_own(balancer.address);
}

#[test]
fn haproxy_names_the_client_in_a_proxy_header() {
    let upstream = Upstream::responding(|_| reply(200, &[], b""));
    let gateway = gateway(2, &upstream);
    let text = guide_blocks("load-balancer", "haproxy").remove(0).replace("127.0.0.1:8080", &gateway.http.to_string());
    let balancer = on_free_port("haproxy", TempDir::new(), |scratch, address| {
        let config = scratch.write("haproxy.cfg", text.replace("127.0.0.1:8000", &address.to_string()));
        let mut command = Command::new(program("haproxy"));
        command.args(["-db", "-f"]).arg(config);
        command
    });
    assert_addresses_have_limits_of_their_own(balancer.address);
}

/// The balancer of Google Cloud appends its own address behind that of the client.
#[test]
fn clients_behind_google_cloud_have_limits_of_their_own() {
    let upstream = Upstream::responding(|_| reply(200, &[], b""));
    let toml = guide_blocks("load-balancer", "toml").remove(1);
    assert!(toml.contains("\"35.191.0.0/16\""), "{toml}");
    let toml = toml.replace("35.191.0.0/16", "127.0.0.0/8").replace("127.0.0.1:9001", &upstream.address.to_string());
    let gateway = Gateway::start(&toml.replace("0.0.0.0:8080", "127.0.0.1:0").replace("127.0.0.1:9900", "127.0.0.1:0"));
    let mut client = gateway.client();
    for address in ["198.51.100.7", "198.51.100.8"] {
        let list = format!("192.0.2.1, {address}, 203.0.113.10");
        let mut request = |_| client.get_with("/a", &[("X-Forwarded-For", &list)]).status;
        let statuses: Vec<u16> = (0..40).map(&mut request).collect();
        assert_eq!(statuses.iter().position(|status| *status == 429), Some(33), "{address}: {statuses:?}");
    }
}
