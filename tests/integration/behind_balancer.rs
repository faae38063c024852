//! The gateway behind real load balancers, with the configurations of docs/guides/load-balancer.md: clients are distinguished by
//! their own addresses, and cannot claim others.

use std::net::SocketAddr;
use std::process::Command;

use crate::support::client::Client;
use crate::support::external_servers::{ExternalServer, on_free_port, program};
use crate::support::gateway::Gateway;
use crate::support::upstream::{Upstream, reply};
use crate::support::{TempDir, guide_blocks};

/// A gateway with one of the configurations of the guide, in front of a server that responds 200.
fn gateway(toml: &str, upstream: &Upstream) -> Gateway {
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
    let gateway = gateway(&guide_blocks("load-balancer", "toml")[0], &upstream);
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
    let toml = guide_blocks("load-balancer", "toml").pop().unwrap();
    assert!(toml.contains("proxy_protocol"), "{toml}");
    assert_addresses_have_limits_of_their_own(haproxy(1, &gateway(&toml, &upstream)).address);
}

#[test]
fn haproxy_names_the_client_in_x_forwarded_for() {
    let upstream = Upstream::responding(|_| reply(200, &[], b""));
    let gateway = gateway(&guide_blocks("load-balancer", "toml")[0], &upstream);
    assert_addresses_have_limits_of_their_own(haproxy(0, &gateway).address);
}

/// HAProxy with one of the configurations of the guide, in front of a gateway.
fn haproxy(position: usize, gateway: &Gateway) -> ExternalServer {
    let text = guide_blocks("load-balancer", "haproxy").remove(position);
    let text = text.replace("127.0.0.1:8080", &gateway.http.to_string());
    on_free_port("haproxy", TempDir::new(), |scratch, address| {
        let config = scratch.write("haproxy.cfg", text.replace("127.0.0.1:8000", &address.to_string()));
        let mut command = Command::new(program("haproxy"));
        command.args(["-db", "-f"]).arg(config);
        command
    })
}

/// The client of the fields in the guide.
const CLIENT: &str = "198.51.100.7";

/// The `[listen]` of each provider in the guide, the fields that the provider sends for a request from [`CLIENT`], and a peer
/// that is one of its addresses.
#[test]
fn the_settings_for_each_provider_find_the_client_in_its_fields() {
    let page = guide_blocks("load-balancer", "toml").len();
    let sections = provider_sections();
    let peers = [
        ("Cloudflare", "173.245.48.5"),
        ("AWS", "10.0.16.9"),
        ("AWS", "10.0.3.4"),
        ("Google Cloud", "35.191.4.4"),
        ("Azure", "147.243.0.9"),
        ("Azure", "10.1.0.4"),
        ("Fastly", "23.235.32.9"),
    ];
    let names: Vec<&str> = sections.iter().map(|section| section.name.as_str()).collect();
    assert_eq!(names, peers.map(|(name, _)| name));
    // The others are the whole configurations for X-Forwarded-For and for the PROXY protocol.
    assert_eq!(page, sections.len() + 2);
    for (section, (_, peer)) in sections.iter().zip(peers) {
        let Section { name, toml, fields } = section;
        let toml = toml.replace("0.0.0.0:8080", "127.0.0.1:0").replace("0.0.0.0:80", "127.0.0.1:0");
        let gateway = Gateway::start_with_files(
            &format!(
                "{toml}admin = \"127.0.0.1:0\"\nproxy_protocol = [\"127.0.0.1\"]\n[upstreams.u]\nbuiltin = \"echo\"\n\
                 [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n\
                 request_headers = {{ set = {{ x-client = \"{{client_ip}} {{scheme}}\" }} }}\n"
            ),
            &[
                ("cloudflare-v4.txt", "173.245.48.0/20\n103.21.244.0/22"),
                ("cloudflare-v6.txt", "2400:cb00::/32\n2606:4700::/32"),
                ("front-door.txt", "147.243.0.0/16\r\n2a01:111:2050::/44\r\n"),
                ("fastly.txt", "# Fastly\n23.235.32.0/20\n\n2a04:4e40::/32  # IPv6\n"),
            ],
        );
        let seen = |peer: &str, forged: &[(&str, &str)]| {
            // The provider appends to `X-Forwarded-For`.
            let list = |value: &str| forged.iter().map(|(_, list)| *list).chain([value]).collect::<Vec<_>>().join(", ");
            let sent = fields.iter().map(|(name, value)| match name.as_str() {
                "X-Forwarded-For" => (name.as_str(), list(value)),
                _ => (name.as_str(), value.clone()),
            });
            let sent: Vec<(&str, String)> = sent.collect();
            let sent: Vec<(&str, &str)> = sent.iter().map(|(name, value)| (*name, value.as_str())).collect();
            let mut client = gateway.client();
            client.send(format!("PROXY TCP4 {peer} 198.51.100.1 4711 80\r\n"));
            client.get_with("/a", &sent).expect(200).json()["fields"]["x-client"].as_str().unwrap().to_owned()
        };
        let scheme = if fields.iter().any(|(name, _)| name == "X-Forwarded-Proto") { "https" } else { "http" };
        let expected = format!("{CLIENT} {scheme}");
        assert_eq!(seen(peer, &[]), expected, "{name}: {toml}");
        assert_eq!(seen(peer, &[("X-Forwarded-For", "192.0.2.66, 10.0.0.1")]), expected, "{name}: {toml}");
        assert_eq!(seen("192.0.2.99", &[]), "192.0.2.99 http", "{name}: {toml}");
    }
}

/// A configuration of the guide, and the fields behind it.
struct Section {
    name: String,
    toml: String,
    fields: Vec<(String, String)>,
}

fn provider_sections() -> Vec<Section> {
    let page = std::fs::read_to_string(format!("{}/docs/guides/load-balancer.md", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let providers = page.split_once("## By provider\n").unwrap().1.split("\n## ").next().unwrap();
    let mut sections = Vec::new();
    for section in providers.split("\n### ").skip(1) {
        let name = section.lines().next().unwrap();
        for block in section.split("```toml\n").skip(1) {
            let (toml, rest) = block.split_once("```").unwrap();
            let fields = rest.split("```http\n").nth(1).unwrap().split("```").next().unwrap();
            let fields = fields.lines().map(|line| line.split_once(": ").unwrap());
            let fields = fields.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
            sections.push(Section { name: name.to_owned(), toml: toml.to_owned(), fields });
        }
    }
    sections
}
