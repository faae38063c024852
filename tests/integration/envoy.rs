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
use crate::support::try_guide;
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
    gateway.advance(Duration::from_secs(3600));
    try_guide("envoy", "127.0.0.1:10000", envoy.address);
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

/// Two gateways with one Redis, and three Envoys that ask both: a rule by address, and a smaller one by user. Returns how many
/// requests of two users are admitted, and then of a third.
fn count_admitted_by_two_gateways(mode: &str, by_address: usize, by_user: usize) -> [usize; 3] {
    let redis = RedisServer::start();
    let upstream = upstream();
    let start = |_| {
        let service = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let process = Process::spawn(&format!(
            "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\nratelimit_service = \"{service}\"\n\
             [counters.shared]\nredis = \"{}\"\n{mode}{LONG_TIMEOUT}\n\
             [rules.by-address]\nwindows = [\"{by_address}/30d\"]\n\
             descriptor = {{ domain = \"api\", entries = [\"remote_address\"] }}\n\
             [rules.by-user]\nwindows = [\"{by_user}/180d\"]\n\
             descriptor = {{ domain = \"api\", entries = [\"user\"] }}\n",
            redis.url()
        ));
        (process, service)
    };
    let gateways: Vec<(Process, SocketAddr)> = (0..2).map(start).collect();
    let services: Vec<SocketAddr> = gateways.iter().map(|(_, service)| *service).collect();
    let envoys: Vec<Envoy> = (0..3).map(|_| Envoy::start(upstream.address, &services, patient)).collect();
    let addresses: Vec<SocketAddr> = envoys.iter().map(|envoy| envoy.address).collect();
    let times = by_address / THREADS + 10;
    let admitted = ["alice", "bob", "carol"].map(|user| count_admitted(&addresses, times, &[("X-User", user)]));
    assert_eq!(upstream.received().len(), admitted.iter().sum::<usize>());
    let decided = |process: &Process| process.metrics().sum("transom_decisions_total", &[("rule", "by-address")]);
    assert!(gateways.iter().all(|(process, _)| decided(process) > 0), "Envoy asks both");
    admitted
}

/// The first user is refused by the layer of users, the second one by the layer of addresses, which both users have filled.
#[test]
fn three_envoys_and_two_gateways_hold_two_layers_exactly() {
    assert_eq!(count_admitted_by_two_gateways("mode = \"exact\"\n", 100, 60), [60, 40, 0]);
}

/// The default. Leases never exceed a limit; tokens that a gateway holds when another one refuses may remain unused.
#[test]
fn three_envoys_and_two_gateways_never_exceed_two_layers_with_leases() {
    let [alice, bob, carol] = count_admitted_by_two_gateways("", 1000, 600);
    assert!((590..=600).contains(&alice), "{alice}");
    assert!((980..=1000).contains(&(alice + bob + carol)), "{alice}, {bob}, {carol}");
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

/// The scenarios of envoyproxy/ratelimit's integration tests that concern limits: a request within its limit, a limit that is
/// reached, and one that only counts. Its nested descriptors are entries of rules here, and Envoy sends two descriptors.
#[test]
fn the_scenarios_of_envoyproxy_ratelimit_hold() {
    let rule = |name: &str, entries: &str, more: &str| {
        format!("[rules.{name}]\ndescriptor = {{ domain = \"api\", entries = [{entries}] }}\n{more}\n")
    };
    let rules = rule("tenants", r#""tenant", "plan""#, "windows = [\"3/minute\"]")
        + &rule("tasks", r#""tenant", "task""#, "windows = [\"1/second\"]")
        + &rule("reports", r#""tenant", "task=report""#, "windows = [\"3/minute\"]")
        + &rule("exports", r#""tenant", "task=export""#, "windows = [\"3/minute\"]\non_limit = \"shadow\"");
    let listen = "[listen]\nratelimit_service = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n";
    let (gateway, upstream) = (Gateway::start(&format!("{listen}{rules}")), upstream());
    let envoy = Envoy::start(upstream.address, gateway.ratelimit_service_addresses(), |config| {
        let (before, rest) = config.split_once("rate_limits:\n").unwrap();
        let (_, after) = rest.split_once("                http_filters:").unwrap();
        let field = |name: &str| format!("{{ request_headers: {{ header_name: {name}, descriptor_key: {name} }} }}");
        let actions = ["plan", "task"].map(|second| {
            format!("                              - actions: [{}, {}]\n", field("tenant"), field(second))
        });
        patient(&format!("{before}rate_limits:\n{}                http_filters:{after}", actions.concat()))
    });
    let statuses = |task: &str, times: usize| -> Vec<u16> {
        (0..times).map(|_| get(envoy.address, &[("tenant", "pelican"), ("task", task)]).status).collect()
    };
    assert_eq!(statuses("report", 5), [200, 200, 200, 429, 429]);
    assert_eq!(statuses("export", 6), [200; 6]);
    assert_eq!(statuses("import", 2), [200, 429]);
    // The other descriptor, and another value of the first entry.
    let plan = [("tenant", "pelican"), ("plan", "gold")];
    assert_eq!([(); 4].map(|()| get(envoy.address, &plan).status), [200, 200, 200, 429]);
    get(envoy.address, &[("tenant", "heron"), ("task", "report")]).expect(200);
    get(envoy.address, &[]).expect(200);
    gateway.advance(Duration::from_secs(60));
    assert_eq!(statuses("report", 4), [200, 200, 200, 429]);
    let shadowed = [("rule", "exports"), ("outcome", "shadowed")];
    assert_eq!(gateway.metrics().sum("transom_decisions_total", &shadowed), 3);
}
