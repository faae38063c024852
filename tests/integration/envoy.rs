//! Envoy in front of an upstream, with the gateway as its rate limit service, as docs/guides/envoy.md configures both.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use crate::support::client::{Client, HttpResponse};
use crate::support::envoy::Envoy;
use crate::support::gateway::Gateway;
use crate::support::gateway_group::{LONG_TIMEOUT, is_admitted};
use crate::support::process::Process;
use crate::support::ratelimit_parser::remaining;
use crate::support::redis::{RedisServer, free_port};
use crate::support::upstream::{Upstream, reply};

const THREADS: usize = 8;

/// The gateway of the guide.
fn gateway() -> Gateway {
    let guide = std::fs::read_to_string(format!("{}/docs/guides/envoy.md", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let toml = guide.split("```toml\n").nth(1).unwrap().split("```").next().unwrap();
    assert!(toml.contains("\"127.0.0.1:8081\"") && toml.contains("\"127.0.0.1:9900\""));
    Gateway::start(&toml.replace("127.0.0.1:8081", "127.0.0.1:0").replace("127.0.0.1:9900", "127.0.0.1:0"))
}

fn upstream() -> Upstream {
    Upstream::responding(|_| reply(200, &[], b"hello"))
}

/// A timeout for a busy machine. A call that fails is refused, which the tests would notice.
fn patient(config: &str) -> String {
    assert!(config.contains("timeout: 0.25s"));
    config.replace("timeout: 0.25s", "timeout: 20s")
}

fn get(address: SocketAddr, fields: &[(&str, &str)]) -> HttpResponse {
    Client::connect(address).get_with("/", fields)
}

/// Clients in several threads send `times` requests each, to these servers in turn. Returns the number of admitted ones.
fn count_admitted(servers: &[SocketAddr], times: usize, fields: &[(&str, &str)]) -> usize {
    thread::scope(|scope| {
        let clients: Vec<_> = (0..THREADS)
            .map(|number| {
                scope.spawn(move || {
                    let mut client = Client::connect(servers[number % servers.len()]);
                    (0..times).filter(|_| is_admitted(&client.get_with("/", fields))).count()
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    })
}

/// 33 in any minute and 60 an hour, as the guide configures them.
#[test]
fn two_layers_hold_exactly() {
    let (gateway, upstream) = (gateway(), upstream());
    let envoy = Envoy::start(upstream.address, gateway.ratelimit_service_addresses(), patient);
    assert_eq!(count_admitted(&[envoy.address], 12, &[]), 33);
    gateway.advance(Duration::from_secs(60));
    assert_eq!(count_admitted(&[envoy.address], 12, &[]), 60 - 33);
    gateway.advance(Duration::from_secs(60));
    assert_eq!(count_admitted(&[envoy.address], 12, &[]), 0);
    gateway.advance(Duration::from_secs(3600));
    assert_eq!(count_admitted(&[envoy.address], 12, &[]), 33);
    assert_eq!(upstream.received().len(), 60 + 33);
}

#[test]
fn three_envoys_hold_one_limit() {
    let (gateway, upstream) = (gateway(), upstream());
    let envoy = |_| Envoy::start(upstream.address, gateway.ratelimit_service_addresses(), patient);
    let envoys: Vec<Envoy> = (0..3).map(envoy).collect();
    let addresses: Vec<SocketAddr> = envoys.iter().map(|envoy| envoy.address).collect();
    assert_eq!(count_admitted(&addresses, 12, &[]), 33);
    gateway.advance(Duration::from_secs(60));
    assert_eq!(count_admitted(&addresses, 12, &[]), 60 - 33);
}

#[test]
fn three_envoys_and_two_gateways_hold_one_limit() {
    let redis = RedisServer::start();
    let upstream = upstream();
    let start = |_| {
        let service = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let process = Process::spawn(&format!(
            "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\nratelimit_service = \"{service}\"\n\
             [counters.shared]\nredis = \"{}\"\n{LONG_TIMEOUT}\n\
             [rules.r]\nwindows = [\"100/30d\", \"150/180d\"]\nshared = \"exact\"\n\
             descriptor = {{ domain = \"api\", entries = [\"remote_address\"] }}\n\
             [rules.u]\nwindows = [\"1000/30d\"]\n\
             descriptor = {{ domain = \"api\", entries = [\"user\"] }}\n",
            redis.url()
        ));
        (process, service)
    };
    let gateways: Vec<(Process, SocketAddr)> = (0..2).map(start).collect();
    let services: Vec<SocketAddr> = gateways.iter().map(|(_, service)| *service).collect();
    let envoys: Vec<Envoy> = (0..3).map(|_| Envoy::start(upstream.address, &services, patient)).collect();
    let addresses: Vec<SocketAddr> = envoys.iter().map(|envoy| envoy.address).collect();
    assert_eq!(count_admitted(&addresses, 20, &[]), 100);
    let decided = |process: &Process| process.metrics().sum("transom_decisions_total", &[("rule", "r")]);
    assert!(gateways.iter().all(|(process, _)| decided(process) > 0), "Envoy asks both");
}

#[test]
fn the_fields_of_a_decision_reach_the_client() {
    let (gateway, upstream) = (gateway(), upstream());
    let envoy = Envoy::start(upstream.address, gateway.ratelimit_service_addresses(), patient);
    let admitted = get(envoy.address, &[]).expect(200);
    assert_eq!(
        admitted.field("ratelimit-policy"),
        Some("\"per-address-minute\";q=33;w=60, \"per-address-hour\";q=60;w=3600")
    );
    assert_eq!((remaining(&admitted, "per-address-minute"), admitted.text()), (32, "hello".to_owned()));
    (1..33).for_each(|_| drop(get(envoy.address, &[]).expect(200)));
    let refused = get(envoy.address, &[]).expect(429);
    assert_eq!((refused.field("retry-after"), remaining(&refused, "per-address-minute")), (Some("60"), 0));
    assert_eq!(refused.problem()["violated-policies"][0], "per-address-minute");
}

/// A field that is not UTF-8 is counted like any other: the check of the request must not fail.
#[test]
fn any_bytes_of_a_field_are_a_key() {
    let (gateway, upstream) = (gateway(), upstream());
    let envoy = Envoy::start(upstream.address, gateway.ratelimit_service_addresses(), patient);
    let send = |value: &[u8]| {
        let head = [b"GET / HTTP/1.1\r\nHost: a\r\nX-User: ", value, b"\r\n\r\n"].concat();
        let mut client = Client::connect(envoy.address);
        client.send(head);
        client.read_response().status
    };
    let statuses: Vec<u16> = (0..12).map(|_| send(b"caf\xe9")).collect();
    assert_eq!(statuses, [[200; 10].as_slice(), &[429; 2]].concat());
    assert_eq!(send(b"caf\xe8"), 200);
}

/// A path of its own has a rule of its own.
#[test]
fn a_fixed_value_has_its_rule() {
    let (gateway, upstream) = (gateway(), upstream());
    let envoy = Envoy::start(upstream.address, gateway.ratelimit_service_addresses(), patient);
    let mut client = Client::connect(envoy.address);
    let login = [200, 200, 200, 200, 200, 429].map(|status| client.get("/login").expect(status));
    assert_eq!(login[5].problem()["violated-policies"][0], "logins");
    client.get("/other").expect(200);
}
