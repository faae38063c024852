//! The rate limit service for Envoy: descriptors and rules, hits, statuses, and what gRPC says about calls.

use std::net::{SocketAddr, TcpStream};
use std::thread;

use prost::Message;
use serde_json::json;
use transom::ratelimit_service::messages::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use transom::ratelimit_service::messages::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use transom::ratelimit_service::messages::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use transom::ratelimit_service::messages::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus,
};
use transom::ratelimit_service::messages::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use transom::ratelimit_service::messages::envoy::r#type::v3::RateLimitUnit;
use transom::ratelimit_service::messages::grpc::health::v1::HealthCheckResponse;
use transom_limiter::secret_digest::Digest;

use crate::support::client::Client;
use crate::support::external_scripts;
use crate::support::gateway::Gateway;
use crate::support::http2_client::{
    DATA, END_HEADERS, END_STREAM, HEADERS, PING, RawHttp2, SETTINGS, WINDOW_UPDATE, frame, header_block,
};
use crate::support::process::Process;
use crate::support::ratelimit_client::{
    RatelimitClient, SHOULD_RATE_LIMIT, descriptor, framed, grpc_status, is_ok, request,
};
use crate::support::redis::{RedisServer, free_port};
use crate::support::test_ca::ServerFiles;
use crate::support::upgrade_chain::{UpgradeChain, is_alive};
use crate::support::{eventually, seeded_rng};

const LISTEN: &str =
    "listen = { http = \"127.0.0.1:0\", admin = \"127.0.0.1:0\", ratelimit_service = \"127.0.0.1:0\" }\n";
const PER_USER: &str =
    "[rules.per-user]\ndescriptor = { domain = \"api\", entries = [\"user\"] }\nwindows = [\"3/minute\"]\n";
const PER_ADDRESS: &str = "[rules.per-address]\ndescriptor = { domain = \"api\", entries = [\"remote_address\"] }\n\
    windows = [\"5/minute\", \"8/hour\"]\n";

fn start(rules: &str) -> (Gateway, RatelimitClient) {
    let gateway = Gateway::start(&format!("{LISTEN}{rules}"));
    let client = RatelimitClient::connect(gateway.ratelimit_service_addresses()[0]);
    (gateway, client)
}

fn user(name: &str) -> RateLimitDescriptor {
    descriptor(&[("user", name)])
}

fn address(address: &str) -> RateLimitDescriptor {
    descriptor(&[("remote_address", address)])
}

fn codes(response: &RateLimitResponse) -> Vec<Code> {
    response.statuses.iter().map(DescriptorStatus::code).collect()
}

fn remaining(response: &RateLimitResponse) -> Vec<u32> {
    response.statuses.iter().map(|status| status.limit_remaining).collect()
}

#[test]
fn the_grpc_library_is_served_in_the_clear() {
    let (gateway, _client) = start(PER_USER);
    external_scripts::run_checks("ratelimit_client.py", &[gateway.ratelimit_service_addresses()[0].to_string()]);
}

#[test]
fn the_grpc_library_is_served_over_tls() {
    let files = ServerFiles::new();
    let gateway = Gateway::start(&format!(
        "[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n\
         [listen.ratelimit_service]\naddress = \"127.0.0.1:0\"\ncertificate = {:?}\nprivate_key = {:?}\n{PER_USER}",
        files.certificate, files.private_key
    ));
    let address = gateway.ratelimit_service_addresses()[0].to_string();
    external_scripts::run_checks("ratelimit_client.py", &[address, "--ca".to_owned(), files.ca.display().to_string()]);
}

#[test]
fn the_descriptors_of_a_request_are_one_decision() {
    let (gateway, mut client) = start(&format!("{PER_USER}{PER_ADDRESS}"));
    let both = [user("alice"), address("192.0.2.1")];
    for left in [2, 1, 0] {
        let response = client.ask(&both);
        assert_eq!((is_ok(&response), remaining(&response)), (true, vec![left, left + 2]));
    }
    let refused = client.ask(&both);
    assert_eq!((is_ok(&refused), codes(&refused)), (false, vec![Code::OverLimit, Code::Ok]));
    assert_eq!(remaining(&refused), [0, 2], "nothing is charged");
    assert_eq!(client.count_ok(&[("remote_address", "192.0.2.1")], 5), 2);
    gateway.advance_s(60);
    // The second layer.
    assert_eq!(client.count_ok(&[("remote_address", "192.0.2.1")], 9), 3);
    let metrics = gateway.metrics();
    let decisions = |rule: &str, outcome: &str| {
        let labels = [("route", "ratelimit_service"), ("rule", rule), ("outcome", outcome)];
        metrics.sum("transom_decisions_total", &labels)
    };
    assert_eq!((decisions("per-user", "admitted"), decisions("per-user", "refused")), (3, 1));
    assert_eq!((decisions("per-address", "admitted"), decisions("per-address", "refused")), (8, 9));
    let calls = |result: &str| metrics.sum("transom_ratelimit_service_calls_total", &[("result", result)]);
    assert_eq!((calls("ok"), calls("over_limit")), (8, 10));
}

#[test]
fn a_status_describes_the_nearest_window() {
    let (gateway, mut client) = start(PER_ADDRESS);
    gateway.advance_s(20);
    let status = |response: RateLimitResponse| {
        let status = response.statuses[0].clone();
        let limit = status.current_limit.clone().unwrap();
        let duration = status.duration_until_reset.unwrap();
        (limit.name.clone(), limit.requests_per_unit, limit.unit(), status.limit_remaining, duration.seconds)
    };
    let ask = || [address("192.0.2.1")];
    let minute = |remaining: u32, left_s: i64| ("per-address-minute".to_owned(), 5, Unit::Minute, remaining, left_s);
    assert_eq!(status(client.ask(&ask())), minute(4, 40));
    (0..5).for_each(|_| drop(client.ask(&ask())));
    assert_eq!(status(client.ask(&ask())), minute(0, 40));
    gateway.advance_s(40);
    let (name, limit, unit, remaining, _) = status(client.ask(&ask()));
    assert_eq!((name.as_str(), limit, unit, remaining), ("per-address-hour", 8, Unit::Hour, 2));
}

#[test]
fn the_fields_for_the_client_are_those_of_requests() {
    let rules = "[upstreams.u]\nbuiltin = \"echo\"\n\
        [rules.r]\nkey = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = [\"2/minute\"]\n\
        descriptor = { domain = \"api\", entries = [\"user\"] }\n\
        [[routes]]\npath = \"/{*rest}\"\nupstream = \"u\"\nrules = [\"r\"]\n";
    let (gateway, mut client) = start(rules);
    let fields = |response: &RateLimitResponse| {
        let mut fields: Vec<(String, String)> =
            response.response_headers_to_add.iter().map(|field| (field.key.clone(), field.value.clone())).collect();
        fields.sort();
        fields
    };
    // One counter of descriptors and requests.
    assert!(is_ok(&client.ask(&[user("alice")])));
    let admitted = gateway.get_with("/a", &[("x-user", "alice")]).expect(200);
    assert_eq!(admitted.field("ratelimit"), Some("\"r\";r=0;t=60"));
    for response in [client.ask(&[user("alice")]), client.ask(&[user("alice")])] {
        let refused = gateway.get_with("/a", &[("x-user", "alice")]).expect(429);
        let names = ["content-type", "ratelimit", "ratelimit-policy", "retry-after"];
        let expected = names.map(|name| (name.to_owned(), refused.field(name).unwrap().to_owned()));
        assert_eq!(fields(&response), expected);
        assert_eq!(response.raw_body, refused.body);
    }
    assert_eq!(fields(&client.ask(&[user("bob")]))[0], ("ratelimit".to_owned(), "\"r\";r=1;t=60".to_owned()));
}

#[test]
fn hits_are_tokens() {
    let rule =
        "[rules.r]\ndescriptor = { domain = \"api\", entries = [\"user\"] }\nwindows = [\"10/minute\"]\ncost = 2\n";
    let (_gateway, mut client) = start(rule);
    let send = |client: &mut RatelimitClient, request_hits: u32, hits: Option<u64>| {
        let descriptors = vec![RateLimitDescriptor { hits_addend: hits, ..user("alice") }];
        let request = RateLimitRequest { hits_addend: request_hits, ..request(&descriptors) };
        let response = client.send(&request);
        (is_ok(&response), response.statuses[0].limit_remaining)
    };
    assert_eq!(send(&mut client, 0, None), (true, 8), "the cost of the rule");
    assert_eq!(send(&mut client, 3, None), (true, 5));
    assert_eq!(send(&mut client, 3, Some(1)), (true, 4), "the descriptor precedes the request");
    assert_eq!(send(&mut client, 3, Some(0)), (true, 4));
    assert_eq!(send(&mut client, 0, Some(5)), (false, 4));
    assert_eq!(send(&mut client, 0, Some(u64::MAX)), (false, 4));
    assert_eq!(send(&mut client, 4, None), (true, 0));
    assert_eq!(send(&mut client, 0, Some(0)), (false, 0), "no token is left");
}

/// A descriptor that only checks makes the whole request fail, and nothing is charged.
#[test]
fn a_check_is_part_of_the_decision() {
    let (_gateway, mut client) = start(&format!("{PER_USER}{PER_ADDRESS}"));
    let check = || RateLimitDescriptor { hits_addend: Some(0), ..user("alice") };
    assert_eq!(remaining(&client.ask(&[check(), address("192.0.2.1")])), [3, 4]);
    assert_eq!(client.count_ok(&[("user", "alice")], 3), 3);
    let refused = client.ask(&[check(), address("192.0.2.1")]);
    assert_eq!((codes(&refused), remaining(&refused)), (vec![Code::OverLimit, Code::Ok], vec![0, 4]));
    assert_eq!(remaining(&client.ask(&[address("192.0.2.1")])), [3]);
}

#[test]
fn equal_descriptors_add_up() {
    let (_gateway, mut client) = start(&format!("{PER_USER}{PER_ADDRESS}"));
    assert_eq!(remaining(&client.ask(&[user("alice"), user("bob"), user("alice")])), [1, 2, 1]);
    assert!(!is_ok(&client.ask(&[user("alice"), user("alice")])));
    // One address, and one network.
    let same = ["2001:db8::1", "2001:db8::2", "192.0.2.1", "::ffff:192.0.2.1"].map(address);
    assert_eq!(remaining(&client.ask(&same)), [3, 3, 3, 3]);
}

#[test]
fn the_most_specific_rule_answers() {
    let rule = |name: &str, entries: &str, limit: u32| {
        format!(
            "[rules.{name}]\ndescriptor = {{ domain = \"api\", entries = [{entries}] }}\nwindows = [\"{limit}/minute\"]\n"
        )
    };
    let rules = rule("any", "\"path\", \"user\"", 1)
        + &rule("slow", "\"path=/slow\", \"user\"", 2)
        + &rule("slow-again", "\"path=/slow\", \"user\"", 20)
        + &rule("alice", "\"path=/slow\", \"user=alice\"", 3)
        + &rule("path", "\"path\"", 4);
    let (gateway, mut client) = start(&rules);
    let mut admitted = |path: &str, user: &str| client.count_ok(&[("path", path), ("user", user)], 6);
    assert_eq!((admitted("/", "bob"), admitted("/slow", "bob"), admitted("/slow", "alice")), (1, 2, 3));
    assert_eq!((admitted("/", "alice"), admitted("/a", "alice"), admitted("/slow", "carol")), (1, 1, 2));
    assert_eq!((client.count_ok(&[("path", "/")], 6), client.count_ok(&[("path", "/slow")], 6)), (4, 4));
    // Other domains, keys, orders and lengths have no rule.
    assert_eq!(client.count_ok(&[("user", "bob"), ("path", "/")], 6), 6);
    assert_eq!(client.count_ok(&[("path", "/"), ("user", "bob"), ("user", "bob")], 6), 6);
    let other = RateLimitRequest { domain: "other".to_owned(), ..request(&[descriptor(&[("path", "/")])]) };
    let response = client.send(&other);
    assert_eq!((is_ok(&response), codes(&response)), (true, vec![Code::Ok]));
    assert!(response.statuses[0].current_limit.is_none() && response.response_headers_to_add.is_empty());
    let unmatched = [("outcome", "unmatched")];
    assert_eq!(gateway.metrics().sum("transom_ratelimit_service_descriptors_total", &unmatched), 13);
}

/// The shape of envoyproxy/ratelimit's example, in rules: a value with its limit, nested values, a limit at each level, a more
/// specific value, and one without a limit.
#[test]
fn a_tree_of_descriptors_is_rules() {
    let rule = |name: &str, entries: &str, limit: &str| {
        format!("[rules.{name}]\ndescriptor = {{ domain = \"api\", entries = [{entries}] }}\nwindows = [\"{limit}\"]\n")
    };
    let rules = rule("accounts", "\"kind=account\"", "4/minute")
        + &rule("to-billing", "\"from=edge\", \"to=billing\"", "2/minute")
        + &rule("to-search", "\"from=edge\", \"to=search\"", "1/minute")
        + &rule("tenants", "\"tenant\"", "2/minute")
        + &rule("plans", "\"tenant\", \"plan\"", "3/minute")
        + &rule("trials", "\"tenant\", \"plan=trial\"", "1/minute")
        + &rule("tasks", "\"tenant\", \"task\"", "1/second")
        + &rule("reports", "\"tenant\", \"task=report\"", "3/minute")
        + "[rules.free]\ndescriptor = { domain = \"api\", entries = [\"tenant\", \"task=status\"] }\nwindows = [\"1/minute\"]\n\
           on_limit = \"shadow\"\n";
    let (gateway, mut client) = start(&rules);
    for (entries, limit) in [
        (&[("kind", "account")][..], 4),
        (&[("kind", "other")], 9),
        (&[("from", "edge"), ("to", "billing")], 2),
        (&[("from", "edge"), ("to", "search")], 1),
        (&[("from", "edge"), ("to", "elsewhere")], 9),
        (&[("from", "edge")], 9),
        (&[("tenant", "pelican")], 2),
        (&[("tenant", "heron")], 2),
        (&[("tenant", "pelican"), ("plan", "gold")], 3),
        (&[("tenant", "pelican"), ("plan", "trial")], 1),
        (&[("tenant", "pelican"), ("task", "import")], 1),
        (&[("tenant", "pelican"), ("task", "report")], 3),
        (&[("tenant", "pelican"), ("task", "status")], 9),
    ] {
        assert_eq!(client.count_ok(entries, 9), limit, "{entries:?}");
    }
    // Each level has its own period.
    gateway.advance_s(1);
    assert_eq!(client.count_ok(&[("tenant", "pelican"), ("task", "import")], 9), 1);
    assert_eq!(client.count_ok(&[("tenant", "pelican"), ("task", "report")], 9), 0);
}

#[test]
fn plans_overrides_and_exemptions_apply() {
    let rules = "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\n\
        [rules.r]\nkey = \"header:x-api-key\"\non_missing_key = \"skip\"\non_unknown_key = \"refuse\"\n\
        windows = [\"1/minute\"]\ndescriptor = { domain = \"api\", entries = [\"api_key\"] }\n\
        [rules.r.plans.gold]\nwindows = [\"4/minute\"]\n[rules.r.plans.silver]\nwindows = [\"2/minute\"]\n\
        [rules.s]\nkey = \"header:x-api-key\"\non_missing_key = \"skip\"\non_unknown_key = \"refuse\"\n\
        on_limit = \"shadow\"\nwindows = [\"1/minute\"]\ndescriptor = { domain = \"api\", entries = [\"watched_key\"] }\n\
        [rules.u]\nwindows = [\"2/minute\"]\ndescriptor = { domain = \"api\", entries = [\"user\"] }\n\
        exemptions = [\"key:monitor\"]\n[[rules.u.overrides]]\nkey = \"alice\"\nwindows = [\"3/minute\"]\n";
    let digest = |key: &str| Digest::of(key.as_bytes());
    let clients = format!(
        "[clients.acme]\nplan = \"gold\"\napi_keys = [\"{}\"]\n[clients.beta]\nplan = \"silver\"\napi_keys = [\"{}\"]\n",
        digest("key-of-acme"),
        digest("key-of-beta")
    );
    let gateway = Gateway::start_with(&format!("{LISTEN}{rules}"), &clients);
    let mut client = RatelimitClient::connect(gateway.ratelimit_service_addresses()[0]);
    let mut admitted = |key: &str, value: &str| client.count_ok(&[(key, value)], 6);
    assert_eq!((admitted("api_key", "key-of-acme"), admitted("api_key", "key-of-beta")), (4, 2));
    assert_eq!((admitted("api_key", "invented"), admitted("watched_key", "invented")), (0, 6));
    assert_eq!((admitted("user", "alice"), admitted("user", "bob"), admitted("user", "monitor")), (3, 2, 6));
    let shadowed = [("route", "ratelimit_service"), ("rule", "s"), ("outcome", "shadowed")];
    assert_eq!(gateway.metrics().sum("transom_decisions_total", &shadowed), 6);
}

#[test]
fn a_shadow_rule_refuses_nothing() {
    let shadow = PER_USER.replace("windows", "on_limit = \"shadow\"\nwindows");
    let (gateway, mut client) = start(&format!("{shadow}{PER_ADDRESS}"));
    let both = [user("alice"), address("192.0.2.1")];
    let responses: Vec<bool> = (0..6).map(|_| is_ok(&client.ask(&both))).collect();
    assert_eq!(responses, [true, true, true, true, true, false]);
    let status = client.ask(&[user("alice")]).statuses[0].clone();
    assert_eq!((status.code(), status.current_limit), (Code::Ok, None));
    let shadowed = [("route", "ratelimit_service"), ("rule", "per-user"), ("outcome", "shadowed")];
    assert_eq!(gateway.metrics().sum("transom_decisions_total", &shadowed), 3);
}

#[test]
fn a_penalty_begins_with_a_refusal() {
    let (gateway, mut client) = start(&PER_USER.replace("windows", "penalty = \"10m\"\nwindows"));
    assert_eq!(client.count_ok(&[("user", "alice")], 5), 3);
    gateway.advance_s(120);
    let refused = client.ask(&[user("alice")]);
    assert!(!is_ok(&refused));
    let status = &refused.statuses[0];
    assert_eq!((status.limit_remaining, status.duration_until_reset.unwrap().seconds), (0, 480));
    gateway.advance_s(480);
    assert_eq!(client.count_ok(&[("user", "alice")], 5), 3);
}

#[test]
fn a_rule_that_delays_requests_refuses_descriptors() {
    let delaying = PER_USER.replace("windows", "on_limit = \"delay\"\nmax_delay = \"1h\"\nwindows");
    let (_gateway, mut client) = start(&delaying);
    assert_eq!(client.count_ok(&[("user", "alice")], 5), 3);
}

/// Envoy lets a request pass whose check fails, so values that clients choose must not make it fail.
#[test]
fn no_value_makes_a_call_fail() {
    let rules = "[rules.h]\nkey = \"header:x-user\"\non_missing_key = \"skip\"\nwindows = [\"1/minute\"]\n\
        descriptor = { domain = \"api\", entries = [\"header\"] }\n";
    let (_gateway, mut client) = start(&format!("{PER_USER}{PER_ADDRESS}{rules}"));
    let mut is_ok = |key: &str, value: &[u8]| is_ok(&client.ask(&[descriptor(&[(key, value)])]));
    for value in [&b""[..], b"\xff", b"caf\xe9", &[b'a'; 200_000], b"\0\r\n"] {
        assert_eq!([0; 5].map(|_| is_ok("user", value)), [true, true, true, false, false], "{value:?}");
    }
    for value in [&b""[..], b"\xff", b"unix", b"192.0.2.256"] {
        assert!(!is_ok("remote_address", value), "{value:?}");
    }
    // Requests with such a field get 400.
    assert_eq!((is_ok("header", "caf\u{e9}".as_bytes()), is_ok("header", b"cafe")), (false, true));
}

fn with_limit(name: &str, tokens: u32, unit: RateLimitUnit, multiplier: Option<u32>) -> RateLimitDescriptor {
    let limit = RateLimitOverride { requests_per_unit: tokens, unit: unit.into(), unit_multiplier: multiplier };
    RateLimitDescriptor { limit: Some(limit), ..user(name) }
}

/// How many of ten requests with a descriptor are within the limit.
fn count_ten(client: &mut RatelimitClient, descriptor: &RateLimitDescriptor) -> usize {
    (0..10).filter(|_| is_ok(&client.ask(std::slice::from_ref(descriptor)))).count()
}

#[test]
fn a_stated_limit_replaces_the_windows() {
    let (gateway, mut client) = start(&format!("{PER_USER}{PER_ADDRESS}"));
    // The usage goes on in windows of the same length.
    assert_eq!(client.count_ok(&[("user", "alice")], 2), 2);
    assert_eq!(count_ten(&mut client, &with_limit("alice", 7, RateLimitUnit::Minute, None)), 5);
    assert_eq!(client.count_ok(&[("user", "alice")], 1), 0);
    // Other windows count apart.
    let hourly = with_limit("alice", 4, RateLimitUnit::Hour, None);
    let response = client.ask(std::slice::from_ref(&hourly));
    let limit = response.statuses[0].current_limit.clone().unwrap();
    assert_eq!((limit.name.as_str(), limit.requests_per_unit, limit.unit()), ("per-user", 4, Unit::Hour));
    let fields = response.response_headers_to_add.iter();
    assert_eq!(fields.filter(|field| field.value == "\"per-user\";q=4;w=3600").count(), 1, "{response:?}");
    gateway.advance_s(120);
    assert_eq!(count_ten(&mut client, &hourly), 3);
    let refused = client.ask(std::slice::from_ref(&hourly));
    assert!(refused.response_headers_to_add.iter().any(|field| field.key == "retry-after"));
    for (unit, multiplier, left) in [
        (RateLimitUnit::Second, None, (Unit::Second, None)),
        (RateLimitUnit::Minute, Some(5), (Unit::Minute, Some(5))),
        (RateLimitUnit::Day, Some(7), (Unit::Week, None)),
        (RateLimitUnit::Month, None, (Unit::Month, None)),
        (RateLimitUnit::Year, Some(1), (Unit::Year, None)),
    ] {
        let stated = with_limit("bob", 2, unit, multiplier);
        let response = client.ask(std::slice::from_ref(&stated));
        let limit = response.statuses[0].current_limit.clone().unwrap();
        assert_eq!(((limit.unit(), limit.unit_multiplier), response.statuses[0].limit_remaining), (left, 1));
        assert_eq!(count_ten(&mut client, &stated), 1);
    }
    // Decided together with other rules, which are not charged by a refusal.
    let stated = with_limit("carol", 1, RateLimitUnit::Hour, None);
    let both = [stated, address("192.0.2.1")];
    assert_eq!((is_ok(&client.ask(&both)), is_ok(&client.ask(&both))), (true, false));
    assert_eq!(remaining(&client.ask(&both[1..])), [3]);
    let metrics = gateway.metrics();
    let refused = [("route", "ratelimit_service"), ("rule", "per-user"), ("outcome", "refused")];
    assert_eq!(metrics.sum("transom_decisions_total", &refused), 5 + 1 + 7 + 1 + 5 * 9 + 1);
    assert_eq!(metrics.sum("transom_refused_total", &[("rule", "per-user")]), 1, "of the configured windows");
    // Keys that only stated limits have refused are listed, but their ids do not lead to the windows of the rule.
    let (mut admin, host) = (Client::connect(gateway.admin), [("Host", "127.0.0.1")]);
    let listed = admin.get_with("/v1/top?rule=per-user", &host).expect(200).json();
    let keys = listed["rules"][0]["keys"].as_array().unwrap();
    let id = &keys.iter().find(|key| key["label"] == "carol").unwrap()["id"];
    let query = json!({"rule": "per-user", "id": id}).to_string();
    admin.request("POST", "/v1/value", &host, query.as_bytes()).expect(404);
}

#[test]
fn what_cannot_be_applied_is_counted() {
    let (gateway, mut client) = start(PER_USER);
    for limit in [
        with_limit("alice", 100, RateLimitUnit::Unknown, None),
        with_limit("carol", 100, RateLimitUnit::Year, Some(2)),
        with_limit("dave", 100, RateLimitUnit::Day, Some(0)),
    ] {
        assert_eq!(count_ten(&mut client, &limit), 3);
    }
    assert_eq!(count_ten(&mut client, &with_limit("bob", 0, RateLimitUnit::Minute, None)), 0);
    let negative = RateLimitDescriptor { is_negative_hits: true, ..user("alice") };
    assert!(is_ok(&client.ask(&[negative])));
    let ignored = [("outcome", "ignored")];
    assert_eq!(gateway.metrics().sum("transom_ratelimit_service_descriptors_total", &ignored), 31);
    assert_eq!(client.count_ok(&[("user", "alice")], 1), 0);
}

#[test]
fn errors_of_calls_have_their_status() {
    let (gateway, mut client) = start(PER_USER);
    let valid = framed(&request(&[user("alice")]));
    let prefixed = |flag: u8, length: u32, rest: &[u8]| [&[flag][..], &length.to_be_bytes(), rest].concat();
    for (body, fields, status) in [
        (valid.clone(), &[][..], 0),
        (Vec::new(), &[], 12),
        ([valid.clone(), valid.clone()].concat(), &[], 12),
        (prefixed(1, 3, b"abc"), &[], 13),
        (prefixed(1, 3, b"abc"), &[("grpc-encoding", "gzip")], 12),
        (valid.clone(), &[("grpc-encoding", "gzip")], 0),
        (prefixed(2, 0, b""), &[], 13),
        (prefixed(0, 1, b""), &[], 13),
        (valid[..valid.len() - 1].to_vec(), &[], 13),
        (prefixed(0, 3, b"\xff\xff\xff"), &[], 13),
        (prefixed(0, 1_048_577, b""), &[], 8),
        (framed(&RateLimitRequest { domain: String::new(), ..request(&[user("alice")]) }), &[], 3),
        (framed(&request(&[])), &[], 3),
        (framed(&request(&vec![user("alice"); 257])), &[], 3),
    ] {
        let response = client.call(SHOULD_RATE_LIMIT, fields, &body);
        assert_eq!(grpc_status(&response), status, "{body:?} {fields:?}: {response:?}");
    }
    for path in ["/", "/envoy.service.ratelimit.v3.RateLimitService/Other", "/v1/limit"] {
        assert_eq!(grpc_status(&client.call(path, &[], &valid)), 12, "{path}");
    }
    for (method, content_type) in
        [("POST", "application/json"), ("POST", "application/grpc-web"), ("GET", "application/grpc")]
    {
        let fields = [("content-type", content_type)];
        client.http().request_path(method, SHOULD_RATE_LIMIT, &fields, &valid).expect(415);
    }
    for content_type in ["application/grpc+proto", "application/grpc;x=1"] {
        let response = client.http().request_path("POST", SHOULD_RATE_LIMIT, &[("content-type", content_type)], &valid);
        assert_eq!(grpc_status(&response.expect(200)), 0, "{content_type}");
    }
    let metrics = gateway.metrics();
    let calls = |result: &str| metrics.sum("transom_ratelimit_service_calls_total", &[("result", result)]);
    assert_eq!((calls("internal"), calls("invalid_argument"), calls("resource_exhausted")), (5, 3, 1));
    assert_eq!((calls("unimplemented"), calls("over_limit"), calls("not_grpc")), (6, 1, 3));
}

/// Bytes in any order and in frames of any length have a status, and the service goes on.
#[test]
fn damaged_messages_have_a_status() {
    let (_gateway, mut client) = start(PER_USER);
    let mut rng = seeded_rng();
    let limited = RateLimitDescriptor { hits_addend: Some(7), ..descriptor(&[("a", "b"), ("c", "d")]) };
    let seeds = [framed(&request(&[user("alice"), limited])), framed(&request(&[user("bob")]))];
    let paths = [
        SHOULD_RATE_LIMIT,
        "/grpc.health.v1.Health/Check",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ];
    for _ in 0..2000 {
        let mut body = seeds[rng.usize(..seeds.len())].clone();
        for _ in 0..rng.usize(0..4) {
            let at = rng.usize(..body.len());
            match rng.u8(..3) {
                0 => body[at] = rng.u8(..),
                1 => body.truncate(at.max(1)),
                _ => body.insert(at, rng.u8(..)),
            }
        }
        if rng.bool() {
            // The length is right, so that the message itself is decoded.
            let length = body.len().saturating_sub(5) as u32;
            body.resize(body.len().max(5), 0);
            body[0] = 0;
            body[1..5].copy_from_slice(&length.to_be_bytes());
        }
        let response = client.call(paths[rng.usize(..paths.len())], &[], &body);
        assert!([0, 3, 5, 8, 12, 13].contains(&grpc_status(&response)), "{body:?}: {response:?}");
    }
    assert!(is_ok(&client.ask(&[user("carol")])));
}

#[test]
fn a_reload_changes_the_rules() {
    let (mut gateway, mut client) = start(PER_USER);
    assert_eq!(client.count_ok(&[("user", "alice")], 2), 2);
    gateway.reload_and_wait(&format!("{LISTEN}{}", PER_USER.replace("3/minute", "4/minute")));
    // Calls of an open connection, too.
    assert_eq!(client.count_ok(&[("user", "alice")], 5), 2);
    let other_address = LISTEN.replace("ratelimit_service = \"127.0.0.1:0\"", "ratelimit_service = \"127.0.0.2:0\"");
    let reason = gateway.refused_reload(&format!("{other_address}{PER_USER}"));
    assert!(reason.contains("listen.ratelimit_service"), "{reason}");
}

/// Clients that watch the health learn of the drain at once, and their streams do not hold it up.
#[test]
fn the_health_ends_with_the_drain() {
    let (gateway, _client) = start(PER_USER);
    let mut watcher = watch_health(client_address(&gateway));
    let status = |data: Vec<u8>| HealthCheckResponse::decode(&data[5..]).unwrap().status;
    assert_eq!(status(watcher.read_until(DATA).payload), 1);
    let stopping = thread::spawn(|| gateway.stop());
    assert_eq!(status(watcher.read_until(DATA).payload), 2);
    watcher.read_until(HEADERS);
    stopping.join().unwrap();
}

#[test]
fn an_upgrade_passes_the_address_and_the_counters_on() {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let listen = LISTEN.replace("ratelimit_service = \"127.0.0.1:0\"", &format!("ratelimit_service = \"{address}\""));
    let chain = UpgradeChain::start(&format!("{listen}{}", PER_USER.replace("3/minute", "3/30d")));
    assert_eq!(RatelimitClient::connect(address).count_ok(&[("user", "alice")], 2), 2);
    chain.upgrade();
    // The former process may accept one more connection, and closes it after one response.
    eventually("the former process has ended", || !is_alive(chain.first.pid()));
    assert_eq!(RatelimitClient::connect(address).count_ok(&[("user", "alice")], 2), 1);
}

/// A client that watches the health for longer than bodies may stall.
#[test]
fn watching_the_health_has_no_timeout() {
    let (gateway, mut client) = start(&format!("{PER_USER}[timeouts]\nbody = \"100ms\"\n"));
    let mut watcher = watch_health(client_address(&gateway));
    watcher.read_until(DATA);
    // Another stalled call is ended by the timeout.
    let mut stalled = RawHttp2::connect(client_address(&gateway));
    stalled.send(frame(HEADERS, END_HEADERS, 1, &call_head(SHOULD_RATE_LIMIT)));
    stalled.read_until(HEADERS);
    assert!(is_ok(&client.ask(&[user("alice")])));
    watcher.send(frame(PING, 0, 0, &[7; 8]));
    let next =
        std::iter::from_fn(|| watcher.next_frame()).find(|next| next.kind != SETTINGS && next.kind != WINDOW_UPDATE);
    assert_eq!(next.map(|next| (next.kind, next.payload)), Some((PING, vec![7; 8])));
}

fn client_address(gateway: &Gateway) -> SocketAddr {
    gateway.ratelimit_service_addresses()[0]
}

/// The head of a call.
fn call_head(path: &str) -> Vec<u8> {
    header_block(&[
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "a"),
        (":path", path),
        ("content-type", "application/grpc"),
    ])
}

fn watch_health(address: SocketAddr) -> RawHttp2 {
    let mut watcher = RawHttp2::connect(address);
    watcher.send(frame(HEADERS, END_HEADERS, 1, &call_head("/grpc.health.v1.Health/Watch")));
    watcher.send(frame(DATA, END_STREAM, 1, &[0; 5]));
    watcher
}

/// A gateway with shared counters, and the address of its rate limit service.
fn shared(redis: &RedisServer, rule: &str) -> (Process, SocketAddr) {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let listen = LISTEN.replace("ratelimit_service = \"127.0.0.1:0\"", &format!("ratelimit_service = \"{address}\""));
    let settings = "timeout = \"10s\"";
    let toml = format!("{listen}[counters.shared]\nredis = \"{}\"\n{settings}\n{rule}", redis.url());
    let process = Process::spawn(&toml);
    eventually("the service listens", || TcpStream::connect(address).is_ok());
    (process, address)
}

#[test]
fn gateways_with_one_store_hold_one_limit() {
    let redis = RedisServer::start();
    for mode in ["exact", "lease"] {
        let rule = format!(
            "[rules.{mode}]\nshared = \"{mode}\"\nwindows = [\"40/30d\"]\n\
             descriptor = {{ domain = \"api\", entries = [\"user\"] }}\n"
        );
        let gateways = [0; 2].map(|_| shared(&redis, &rule));
        let admitted: usize = thread::scope(|scope| {
            let clients: Vec<_> = gateways
                .iter()
                .chain(&gateways)
                .map(|(_, address)| {
                    scope.spawn(|| RatelimitClient::connect(*address).count_ok(&[("user", "alice")], 30))
                })
                .collect();
            clients.into_iter().map(|client| client.join().unwrap()).sum()
        });
        assert!(if mode == "exact" { admitted == 40 } else { (36..=40).contains(&admitted) }, "{mode}: {admitted}");
        // A limit that a descriptor states is shared as well.
        let stated = with_limit("carol", 6, RateLimitUnit::Day, Some(30));
        let admitted: usize =
            gateways.iter().map(|(_, address)| count_ten(&mut RatelimitClient::connect(*address), &stated)).sum();
        assert!(if mode == "exact" { admitted == 6 } else { (1..=6).contains(&admitted) }, "{mode}: {admitted}");
        // A check asks the store as well.
        let mut client = RatelimitClient::connect(gateways[0].1);
        let check = |name: &str| RateLimitDescriptor { hits_addend: Some(0), ..user(name) };
        let bob = client.ask(&[check("bob")]);
        assert!(is_ok(&bob), "{mode}");
        if mode == "exact" {
            assert_eq!(remaining(&bob), [40]);
            assert!(!is_ok(&client.ask(&[check("alice")])));
        }
    }
}

#[test]
fn an_outage_of_the_store_refuses_if_the_rule_says_so() {
    let mut redis = RedisServer::start();
    redis.kill();
    let refusing = PER_USER.replace("windows", "on_outage = \"refuse\"\nwindows");
    let local = PER_ADDRESS.replace("5/minute", "2/30d").replace("8/hour", "8/60d");
    let (_process, address) = shared(&redis, &format!("{refusing}{local}"));
    let mut client = RatelimitClient::connect(address);
    let response = client.ask(&[user("alice"), descriptor(&[("other", "a")])]);
    assert_eq!((is_ok(&response), codes(&response)), (false, vec![Code::OverLimit, Code::Ok]));
    assert_eq!(response.response_headers_to_add[0].key, "retry-after");
    assert_eq!(client.count_ok(&[("remote_address", "192.0.2.1")], 4), 2);
}
