//! Servers that a service record lists (`srv://`), and DNS servers that an upstream names.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::thread;

use crate::support::dns_server::DnsServer;
use crate::support::moving_load::{Load, changes, numbered};
use crate::support::process::Process;
use crate::support::redis::free_port;
use crate::support::upstream::Upstream;
use crate::support::{eventually, guide_blocks};

/// Changes of the record, each of which takes a second. `make moves` makes more.
const RECORD_CHANGES: usize = 4;
const ADDRESS_CHANGES: usize = 20;
const SERVICE: &str = "_http._tcp.api.test";
const HOST: &str = "a.api.test";
const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const ROUTE: &str = "[[routes]]\npath = \"/{*rest}\"\nupstream = \"api\"\n";

/// A free port of the local host.
fn anywhere() -> SocketAddr {
    SocketAddr::new(LOCAL, 0)
}

fn gateway(dns: &DnsServer, servers: &str, settings: &str) -> Process {
    let toml = format!("workers = 2\n[upstreams.api]\nservers = \"{servers}\"\n{settings}{}{ROUTE}", dns.toml());
    Process::spawn(&toml)
}

#[test]
fn the_servers_of_a_record_are_followed() {
    let dns = DnsServer::start();
    let (first, second, third) = (numbered(anywhere(), 1), numbered(anywhere(), 2), numbered(anywhere(), 3));
    let port = |server: &Upstream| server.address.port();
    dns.set_addresses(HOST, &[LOCAL]);
    let filler: Vec<String> = (0..40).map(|number| format!("backup-{number}.api.test")).collect();
    let backups = |count| filler[..count].iter().map(|host| (99, 0, 80, host.as_str()));
    // Too long for UDP without EDNS.
    let mut records = vec![(10, 1, port(&first), HOST), (20, 1, port(&second), HOST)];
    records.extend(backups(15));
    dns.set_service(SERVICE, &records);
    let gateway = gateway(&dns, &format!("srv://{SERVICE}"), "");
    let servers = |count: usize| (0..count).map(|_| gateway.get("/a").expect(200).text()).collect::<String>();
    // The priority decides.
    assert_eq!(servers(6), "111111");
    drop(first);
    assert_eq!((servers(6).as_str(), dns.tcp_queries()), ("222222", 0));

    // Weights decide among servers of one priority. The response is too long for UDP, also to a server that knows EDNS.
    dns.refuse_opt();
    records = vec![(0, 1, port(&second), HOST), (0, 1000, port(&third), HOST)];
    records.extend(backups(40));
    dns.set_service(SERVICE, &records);
    eventually("the next record is used", || gateway.get("/a").expect(200).text() == "3");
    assert!(dns.tcp_queries() > 0);
    let json = gateway.admin_get("/upstreams").expect(200).json();
    assert_eq!(json["upstreams"][0]["servers"].as_array().unwrap().len(), 42);
    let requests = |server: u16| {
        let url = format!("http://{HOST}:{server}");
        gateway.metrics().sum("transom_upstream_server_up", &[("server", url.as_str())])
    };
    assert_eq!((requests(port(&third)), requests(81)), (1, 0));

    // Without an answer, the last servers stay in use.
    dns.clear();
    gateway.wait_for_stderr(
        "the service record cannot be looked up, the last servers stay in use: there is no such record",
    );
    gateway.get("/a").expect(200);
    dns.set_silent(true);
    dns.set_addresses(HOST, &[LOCAL]);
    dns.set_service(SERVICE, &[(0, 0, port(&second), HOST)]);
    let lookups = |outcome| {
        gateway.metrics().sum("transom_upstream_service_lookups_total", &[("service", SERVICE), ("outcome", outcome)])
    };
    assert!(lookups("failed") > 0);
    dns.set_silent(false);
    let log = gateway.wait_for_stderr("the service record is found again");
    assert_eq!(log.matches("cannot be looked up").count(), 1, "{log}");
    eventually("the next record is used", || servers(4) == "2222");
    // A record without a target: the service is not available.
    dns.set_service(SERVICE, &[(0, 0, 0, "")]);
    eventually("there is no server", || gateway.get("/a").status == 503);
}

/// As in docs/guides/moving-servers.md: the pods of a headless service, as the DNS server of a cluster lists them.
#[test]
fn the_pods_of_a_headless_service_are_followed() {
    let blocks = guide_blocks("moving-servers", "toml");
    let block = blocks.iter().find(|block| block.contains("srv://")).unwrap();
    let (service, _) = block.split_once("srv://").unwrap().1.split_once('"').unwrap();
    let domain = service.split_once("_tcp.").unwrap().1;
    let dns = DnsServer::start();
    let pods: Vec<Upstream> =
        (2..5).map(|pod| numbered(SocketAddr::from(([127, 0, 0, pod], 0)), usize::from(pod))).collect();
    let publish = |pods: &[Upstream]| {
        let names: Vec<String> =
            (pods.iter()).map(|pod| format!("{}.{domain}", pod.address.ip().to_string().replace('.', "-"))).collect();
        names.iter().zip(pods).for_each(|(name, pod)| dns.set_addresses(name, &[pod.address.ip()]));
        let record = |(name, pod): (&String, &Upstream)| (0, 33, pod.address.port(), name.clone());
        let records: Vec<_> = names.iter().zip(pods).map(record).collect();
        let records: Vec<_> = records.iter().map(|(a, b, port, name)| (*a, *b, *port, name.as_str())).collect();
        dns.set_service(service, &records);
    };
    publish(&pods[..2]);
    let gateway = Process::spawn(&format!("workers = 1\n{block}balance = \"round-robin\"\n{}{ROUTE}", dns.toml()));
    let mut client = gateway.client();
    let mut served = |count: usize| {
        let mut served: Vec<String> = (0..count).map(|_| client.get("/a").expect(200).text()).collect();
        served.sort();
        served.dedup();
        served.concat()
    };
    assert_eq!(served(4), "23");
    // A pod ends, and another one starts.
    publish(&pods[1..]);
    eventually("the other pods are used", || served(6) == "34");
}

#[test]
fn moves_of_a_server_in_a_service_record_lose_no_request() {
    let (changes, dns) = (changes(RECORD_CHANGES), DnsServer::start());
    dns.set_addresses(HOST, &[LOCAL]);
    let publish = |server: &Upstream| dns.set_service(SERVICE, &[(0, 1, server.address.port(), HOST)]);
    let mut current = numbered(anywhere(), 0);
    publish(&current);
    let gateway = gateway(&dns, &format!("srv://{SERVICE}"), "retries = false\n");
    let load = Load::start(&gateway, true);
    for change in 1..=changes {
        let next = numbered(anywhere(), change);
        publish(&next);
        load.wait_for(change);
        drop(std::mem::replace(&mut current, next));
    }
    load.finish(changes, "service record");
}

/// The server ends at once when its name has another address. Then nothing listens at the old address, or another server, which
/// closes connections.
#[test]
fn moves_of_a_server_behind_a_name_lose_no_request() {
    let (changes, dns, port) = (changes(ADDRESS_CHANGES), DnsServer::start(), free_port());
    let address = |change: usize| SocketAddr::from(([127, 0, 1, u8::try_from(1 + change % 250).unwrap()], port));
    let mut current = numbered(address(0), 0);
    dns.set_addresses(HOST, &[address(0).ip()]);
    let gateway = gateway(&dns, &format!("http://{HOST}:{port}"), "retries = false\nresolve = \"1h\"\n");
    let load = Load::start(&gateway, false);
    let mut other = None;
    for change in 1..=changes {
        let next = numbered(address(change), change);
        dns.set_addresses(HOST, &[address(change).ip()]);
        drop(std::mem::replace(&mut current, next));
        other = (change % 2 == 0).then(|| Upstream::at_address(address(change - 1), |_| {}));
        load.wait_for(change);
    }
    drop(other);
    load.finish(changes, "name");
}

/// The answers are to be used for an hour. A failure to connect to the server requests a new look-up.
#[test]
fn a_server_that_fails_is_looked_up_again_before_its_time_to_live_ends() {
    let dns = DnsServer::start();
    dns.set_ttl(3600);
    dns.set_addresses(HOST, &[LOCAL]);
    let server = numbered(anywhere(), 1);
    dns.set_service(SERVICE, &[(0, 1, server.address.port(), HOST)]);
    let gateway = gateway(&dns, &format!("srv://{SERVICE}"), "resolve = \"1h\"\nhold = \"10s\"\n");
    assert_eq!(gateway.get("/a").expect(200).text(), "1");
    let moved = numbered(anywhere(), 2);
    dns.set_service(SERVICE, &[(0, 1, moved.address.port(), HOST)]);
    drop(server);
    let requests: Vec<_> = (0..4)
        .map(|_| {
            let mut client = gateway.client();
            thread::spawn(move || client.get("/a").expect(200).text())
        })
        .collect();
    requests.into_iter().for_each(|request| assert_eq!(request.join().unwrap(), "2"));
}
