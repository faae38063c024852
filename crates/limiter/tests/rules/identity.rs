//! The identities of counters: literals of this version, which later versions must keep.

use std::sync::Arc;

use transom_limiter::identity;
use transom_limiter::key::{KeyPart, OnMissing, PartArgument, PartKind, Prefixes, Seed};
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Cost, KeyValue, OnLimit, Override, Plan, Rule, Sharing};
use transom_limiter::window::{Calendar, Windows};

use crate::support::{delay, limit, plain};

const SEED: Seed = Seed(1, 2);
const HOUR_MS: u64 = 3_600_000;

/// The kinds of the gateway. A test of its table compares their names in identities with the texts below.
const IP: PartKind = PartKind { name: "ip", identity: "Ip", number: 1 };
const HEADER: PartKind = PartKind { name: "header", identity: "Header", number: 3 };
const COOKIE: PartKind = PartKind { name: "cookie", identity: "Cookie", number: 10 };
const QUERY: PartKind = PartKind { name: "query", identity: "Query", number: 11 };
const JWT: PartKind = PartKind { name: "jwt", identity: "Jwt", number: 12 };
const PARAM: PartKind = PartKind { name: "param", identity: "Param", number: 4 };
const BASIC_USER: PartKind = PartKind { name: "basic-user", identity: "BasicUser", number: 14 };
const CLIENT_CERT: PartKind = PartKind { name: "client-cert", identity: "ClientCert", number: 13 };
const HOST: PartKind = PartKind { name: "host", identity: "Host", number: 5 };
const METHOD: PartKind = PartKind { name: "method", identity: "Method", number: 6 };
const PATH: PartKind = PartKind { name: "path", identity: "Path", number: 7 };
const ROUTE: PartKind = PartKind { name: "route", identity: "Route", number: 8 };
const ENTRY: PartKind = PartKind { name: "entry", identity: "Entry", number: 15 };
const CLIENT: PartKind = PartKind { name: "client", identity: "Client", number: 16 };
const BEARER: PartKind = PartKind { name: "bearer", identity: "Bearer", number: 17 };
const JSON: PartKind = PartKind { name: "json", identity: "Json", number: 18 };
const CLIENT_CERT_SAN: PartKind = PartKind { name: "client-cert:san", identity: "ClientCertSan", number: 20 };
const CLIENT_CERT_CN: PartKind = PartKind { name: "client-cert:cn", identity: "ClientCertCn", number: 21 };

fn one(kind: &'static PartKind) -> KeyPart {
    KeyPart { kind, argument: PartArgument::None }
}

fn named(kind: &'static PartKind, name: &str) -> KeyPart {
    KeyPart { kind, argument: PartArgument::Name(name.to_owned()) }
}

fn address(v4: u8, v6: u8) -> KeyPart {
    KeyPart { kind: &IP, argument: PartArgument::Prefixes(Prefixes { v4, v6 }) }
}

/// Rules with every part of a key, then lists of parts, kinds of windows, variants and penalties.
fn rules() -> Vec<Rule> {
    let text = |text: &str| text.to_owned();
    let hourly = || vec![plain(5, HOUR_MS)];
    let keys = [
        vec![address(32, 64)],
        vec![address(24, 128)],
        vec![named(&HEADER, "x-api-key")],
        vec![named(&COOKIE, "session")],
        vec![named(&QUERY, "api_key")],
        vec![named(&QUERY, "a\"b\\c\td\ne\rf\0g\u{7f}h é 鍵 'i'")],
        vec![named(&JWT, "sub")],
        vec![named(&JWT, "https://example.com/plan")],
        vec![named(&PARAM, "id")],
        vec![one(&BASIC_USER)],
        vec![one(&CLIENT_CERT)],
        vec![one(&HOST)],
        vec![one(&METHOD)],
        vec![one(&PATH)],
        vec![one(&ROUTE)],
        vec![named(&ENTRY, "remote_address")],
        vec![one(&CLIENT)],
        vec![one(&BEARER)],
        vec![named(&JSON, "/model")],
        vec![one(&CLIENT_CERT_SAN)],
        vec![one(&CLIENT_CERT_CN)],
        vec![KeyPart::GLOBAL],
        vec![],
        vec![address(32, 56), named(&HEADER, "x-user"), one(&PATH)],
        vec![one(&PATH), named(&HEADER, "x-user")],
    ];
    let header = || vec![named(&HEADER, "x-user")];
    let rule = |name: &str, layers| Rule::new(name, header(), OnMissing::Skip, layers);
    let even = |offset_ms| limit(5, Windows::Even { period_ms: HOUR_MS, offset_ms });
    let of = |windows| vec![limit(5, windows)];
    let calendar =
        |name: &str| Windows::Calendar(Calendar { name: text(name), ends: Arc::from([HOUR_MS, 2 * HOUR_MS]) });
    let plan = |layers| vec![Plan { name: text("gold"), layers, concurrent: None }];
    let own = |layers| vec![Override { key: vec![KeyValue::Clear(text("a"))], layers, concurrent: None }];
    let with_capacity = |limit: Limit| Limit { capacity: Some(9), ..limit };
    let sharded = |limit: Limit| Limit { shards: 4, ..limit };
    let response = || Cost::Response { source: Some(text("x-cost")), reserve: 1, max: 9 };
    let mut rules: Vec<Rule> = keys.into_iter().map(|key| Rule::new("r", key, OnMissing::Skip, hourly())).collect();
    rules.extend([
        // The name of the rule belongs to the identity; what is done without a key does not.
        rule("per-user", hourly()),
        Rule { on_missing: OnMissing::Fallback(vec![one(&HOST)]), ..rule("r", hourly()) },
        rule("r", vec![]),
        rule("r", vec![plain(9, HOUR_MS), plain(2, 60_000), plain(1, 10)]),
        rule("r", vec![even(1)]),
        rule("r", of(Windows::Random { period_ms: HOUR_MS })),
        rule("r", of(Windows::FirstRequest { period_ms: HOUR_MS })),
        rule("r", of(Windows::Sliding { period_ms: HOUR_MS })),
        rule("r", of(Windows::Calendar(Calendar::utc_months()))),
        rule("r", of(calendar("day Europe/Berlin"))),
        // Tokens that roll over, are reserved, waited for, or charged after the response.
        rule("r", vec![with_capacity(plain(5, HOUR_MS))]),
        rule("r", vec![Limit { reserve: 2, ..plain(5, HOUR_MS) }, limit(9, Windows::FirstRequest { period_ms: 10 })]),
        Rule { on_limit: delay(50), ..rule("r", hourly()) },
        Rule { cost: response(), ..rule("r", hourly()) },
        Rule { cost: response(), ..rule("r", of(Windows::Sliding { period_ms: HOUR_MS })) },
        // Shards, and settings that prevent them.
        rule("r", vec![sharded(plain(5, HOUR_MS))]),
        rule("r", vec![sharded(with_capacity(plain(5, HOUR_MS)))]),
        rule("r", vec![sharded(with_capacity(plain(3, HOUR_MS)))]),
        Rule { count_refused: true, ..rule("r", vec![sharded(with_capacity(plain(5, HOUR_MS)))]) },
        Rule { sharing: Sharing::Lease, ..rule("r", vec![sharded(with_capacity(plain(5, HOUR_MS)))]) },
        rule("r", vec![sharded(limit(5, Windows::FirstRequest { period_ms: HOUR_MS }))]),
        // Variants: layers with equal windows share counters.
        Rule { plans: plan(vec![plain(50, HOUR_MS), plain(9, 60_000)]), ..rule("r", hourly()) },
        Rule { plans: plan(vec![with_capacity(plain(50, HOUR_MS))]), ..rule("r", hourly()) },
        Rule { overrides: own(vec![sharded(plain(50, HOUR_MS))]), ..rule("r", hourly()) },
        Rule { plans: plan(vec![]), overrides: own(of(calendar("month"))), ..rule("r", vec![]) },
        // Settings that do not belong to the identity, and penalties.
        Rule { concurrent: Some(3), on_limit: OnLimit::Shadow, cost: Cost::Fixed(7), ..rule("r", hourly()) },
        Rule { sharing: Sharing::Exact, count_refused: true, ..rule("r", hourly()) },
        Rule { penalty_ms: Some(1000), ..rule("r", hourly()) },
        Rule { penalty_ms: Some(HOUR_MS), plans: plan(vec![plain(50, 60_000)]), ..rule("r", hourly()) },
    ]);
    rules
}

/// A line for each layer, or for the rule if it has none: the hash, the name of the rule, the key, the windows.
fn describe(rule: &Rule) -> Vec<String> {
    let layers = identity::layers(rule);
    let describe = |layer: &identity::LayerIdentity<'_>| {
        let windows = layer.windows.as_deref().unwrap_or("penalty");
        format!("{:016x} {} {} {windows}", layer.hash(SEED), layer.rule, layer.key)
    };
    match layers.is_empty() {
        true => {
            vec![format!("{:016x} {} {}", identity::key_prefix(rule, SEED), rule.name, identity::key_text(&rule.key))]
        }
        false => layers.iter().map(describe).collect(),
    }
}

/// If this fails, counters of the version before are no longer found, or are read as others. Either restore the texts, or raise
/// `identity::VERSION`, so that files of the other version are not read.
#[test]
fn identities_are_those_of_the_version_before() {
    let described: Vec<String> = rules().iter().flat_map(describe).collect();
    assert_eq!(identity::VERSION, 0);
    assert!(rules().len() >= 40);
    for (described, expected) in described.iter().zip(EXPECTED) {
        assert_eq!(described, expected);
    }
    assert_eq!(described.len(), EXPECTED.len(), "{}", described.join("\n"));
}

/// As [`describe`] writes them.
const EXPECTED: &[&str] = &[
    "9d3cf9aab9f8e02b r [Ip { v4_prefix: 32, v6_prefix: 64 }] 3600000ms",
    "f331b71db0ec6e8f r [Ip { v4_prefix: 24, v6_prefix: 128 }] 3600000ms",
    r#"34f88311fd486d23 r [Header("x-api-key")] 3600000ms"#,
    r#"e6ea224554898b20 r [Cookie("session")] 3600000ms"#,
    r#"1810bcdce986b74c r [Query("api_key")] 3600000ms"#,
    r#"cf66ecab679fc051 r [Query("a\"b\\c\td\ne\rf\0g\u{7f}h é 鍵 'i'")] 3600000ms"#,
    r#"e9584b3eaa2a7f9d r [Jwt("sub")] 3600000ms"#,
    r#"648727e569983ede r [Jwt("https://example.com/plan")] 3600000ms"#,
    r#"4ea4aed333907359 r [Param("id")] 3600000ms"#,
    "c12eb878a54beced r [BasicUser] 3600000ms",
    "739320b522350f2a r [ClientCert] 3600000ms",
    "c817db276f9bac35 r [Host] 3600000ms",
    "aafad92f0950ca3a r [Method] 3600000ms",
    "343e6338c6d61f7f r [Path] 3600000ms",
    "e80876c8501aab33 r [Route] 3600000ms",
    r#"7bdce09ff39345bc r [Entry("remote_address")] 3600000ms"#,
    "3e959a163bf5ac4b r [Client] 3600000ms",
    "6f73cb58281ea05e r [Bearer] 3600000ms",
    r#"c95d7f8181dd617c r [Json("/model")] 3600000ms"#,
    "108a76d2d9e840e8 r [ClientCertSan] 3600000ms",
    "6d34f50b8dd72c77 r [ClientCertCn] 3600000ms",
    "00514d6bb95cc2fe r [Global] 3600000ms",
    "79363091af0b0d83 r [] 3600000ms",
    r#"5eb67f554d88438b r [Ip { v4_prefix: 32, v6_prefix: 56 }, Header("x-user"), Path] 3600000ms"#,
    r#"12371afa23d2374a r [Path, Header("x-user")] 3600000ms"#,
    r#"48ea55d687863047 per-user [Header("x-user")] 3600000ms"#,
    r#"9554195bb30a8fc8 r [Header("x-user")] 3600000ms"#,
    r#"63c871f96420a635 r [Header("x-user")]"#,
    r#"9554195bb30a8fc8 r [Header("x-user")] 3600000ms"#,
    r#"23c13b762d3a8dc3 r [Header("x-user")] 60000ms"#,
    r#"4602e156a33e1aeb r [Header("x-user")] 10ms"#,
    r#"42b4ce06a0424fd9 r [Header("x-user")] 3600000ms from 1ms"#,
    r#"79f5fc80407e1c51 r [Header("x-user")] 3600000ms at random"#,
    r#"b820c36c9b86542c r [Header("x-user")] 3600000ms from the first request"#,
    r#"5c5ce863aef1cd0c r [Header("x-user")] 3600000ms sliding"#,
    r#"270b119d3571c371 r [Header("x-user")] month"#,
    r#"0d9ddc8384e8ac8d r [Header("x-user")] day Europe/Berlin"#,
    r#"5685df10e0f9e3e3 r [Header("x-user")] 3600000ms accumulating"#,
    r#"5685df10e0f9e3e3 r [Header("x-user")] 3600000ms accumulating"#,
    r#"3dbe0b24c8c350b2 r [Header("x-user")] 10ms from the first request"#,
    r#"5685df10e0f9e3e3 r [Header("x-user")] 3600000ms accumulating"#,
    r#"5685df10e0f9e3e3 r [Header("x-user")] 3600000ms accumulating"#,
    r#"5c5ce863aef1cd0c r [Header("x-user")] 3600000ms sliding"#,
    r#"dc7fc4d3fe834c9d r [Header("x-user")] 3600000ms in 4 shards"#,
    r#"2cf075fcc98a56fc r [Header("x-user")] 3600000ms accumulating in 4 shards"#,
    r#"53f636ab112637c7 r [Header("x-user")] 3600000ms accumulating in 3 shards"#,
    r#"5685df10e0f9e3e3 r [Header("x-user")] 3600000ms accumulating"#,
    r#"5685df10e0f9e3e3 r [Header("x-user")] 3600000ms accumulating"#,
    r#"b820c36c9b86542c r [Header("x-user")] 3600000ms from the first request"#,
    r#"9554195bb30a8fc8 r [Header("x-user")] 3600000ms"#,
    r#"9554195bb30a8fc8 r [Header("x-user")] 3600000ms"#,
    r#"23c13b762d3a8dc3 r [Header("x-user")] 60000ms"#,
    r#"5685df10e0f9e3e3 r [Header("x-user")] 3600000ms accumulating"#,
    r#"5685df10e0f9e3e3 r [Header("x-user")] 3600000ms accumulating"#,
    r#"dc7fc4d3fe834c9d r [Header("x-user")] 3600000ms in 4 shards"#,
    r#"dc7fc4d3fe834c9d r [Header("x-user")] 3600000ms in 4 shards"#,
    r#"270b119d3571c371 r [Header("x-user")] month"#,
    r#"9554195bb30a8fc8 r [Header("x-user")] 3600000ms"#,
    r#"9554195bb30a8fc8 r [Header("x-user")] 3600000ms"#,
    r#"9554195bb30a8fc8 r [Header("x-user")] 3600000ms"#,
    r#"8c1e1d1f5f707666 r [Header("x-user")] penalty"#,
    r#"9554195bb30a8fc8 r [Header("x-user")] 3600000ms"#,
    r#"23c13b762d3a8dc3 r [Header("x-user")] 60000ms"#,
    r#"8c1e1d1f5f707666 r [Header("x-user")] penalty"#,
];
