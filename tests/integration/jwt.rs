//! Keys of verified tokens: requests are counted by the claims of a valid token, and an invalid token gets 401, whatever the
//! rule does without one.

use std::fs;

use serde_json::{Value, json};

use crate::support::client::{Client, HttpResponse};
use crate::support::gateway::{Gateway, START_S};
use crate::support::gateway_group::{LONG_TIMEOUT, shared_config};
use crate::support::jwt_issuer::{ALGORITHMS, Issuer, encode, hmac_sha256};
use crate::support::load_checker::now_ms;
use crate::support::process::{Process, run};
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::redis::RedisServer;
use crate::support::{TempDir, eventually, one_rule};

/// A configuration with one rule of two requests a minute, and the trusted keys.
fn rule(key: &str, jwt: &str) -> String {
    format!("{}{jwt}", one_rule(&format!("{key}\nwindows = [\"2/minute\"]")))
}

const BY_SUBJECT: &str = "key = \"jwt:sub\"\non_missing_key = \"ip\"";

fn get_with_token(gateway: &Gateway, token: &str) -> HttpResponse {
    gateway.get_with("/a", &[("Authorization", &format!("Bearer {token}"))])
}

#[track_caller]
fn assert_two_admitted(mut request: impl FnMut() -> u16) {
    assert_eq!([request(), request(), request()], [200, 200, 429]);
}

/// Expects the gateway to refuse a token, without a RateLimit field.
#[track_caller]
fn assert_refused(gateway: &Gateway, token: &str, why: &str) {
    let response = get_with_token(gateway, token).expect(401);
    assert_eq!(response.field("www-authenticate"), Some("Bearer error=\"invalid_token\""));
    assert_eq!(response.problem()["detail"], why);
    assert_eq!(response.field("ratelimit"), None);
}

const UNKNOWN_KEY: &str = "the token is not signed with a key and an algorithm that are trusted here";
const SIGNATURE: &str = "the token's signature is not valid";
const MALFORMED: &str = "the token is malformed";

#[test]
fn tokens_of_all_algorithms_count_by_their_claim() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let gateway = Gateway::start(&rule(BY_SUBJECT, &issuer.keys(&scratch)));
    for algorithm in ALGORITHMS {
        let token = issuer.token(algorithm, &json!({ "sub": algorithm, "exp": START_S + 60 }));
        assert_two_admitted(|| get_with_token(&gateway, &token).status);
        // Another token of the same subject, with another algorithm and another case of the scheme.
        let another = issuer.token("HS256", &json!({ "sub": algorithm, "jti": "other" }));
        let response = gateway.get_with("/a", &[("authorization", &format!("bEARER  {another}"))]);
        response.expect(429);
    }
    // No request was counted by address meanwhile.
    assert_two_admitted(|| gateway.get("/a").status);
}

#[test]
fn an_unverifiable_token_is_refused() {
    let (issuer, other, scratch) = (Issuer::new(), Issuer::new(), TempDir::new());
    let gateway = Gateway::start(&rule(BY_SUBJECT, &issuer.keys(&scratch)));
    let claims = json!({ "sub": "alice", "exp": START_S + 60 });
    for algorithm in ALGORITHMS {
        assert_refused(&gateway, &other.token(algorithm, &claims), SIGNATURE);

        let token = issuer.token(algorithm, &claims);
        let parts: Vec<&str> = token.split('.').collect();
        let payload = encode(json!({ "sub": "eve", "exp": START_S + 60 }).to_string());
        assert_refused(&gateway, &format!("{}.{payload}.{}", parts[0], parts[2]), SIGNATURE);
        assert_refused(&gateway, &format!("{}.{}.", parts[0], parts[1]), SIGNATURE);
        let header = encode(json!({ "alg": algorithm, "x": 1 }).to_string());
        assert_refused(&gateway, &format!("{header}.{}.{}", parts[1], parts[2]), SIGNATURE);
        for malformed in [parts[..2].join("."), format!("{token}.x"), format!("{token}="), format!("{token} x")] {
            assert_refused(&gateway, &malformed, MALFORMED);
        }
        // Signed with a trusted key of another algorithm.
        for named in ALGORITHMS.iter().filter(|named| **named != algorithm) {
            assert_refused(&gateway, &issuer.sign(algorithm, &json!({ "alg": named }), &claims), SIGNATURE);
        }
        get_with_token(&gateway, &token).expect(if algorithm == "HS256" || algorithm == "RS256" { 200 } else { 429 });
    }
    assert_refused(&gateway, "", MALFORMED);
    assert_refused(&gateway, "alice", MALFORMED);
}

#[test]
fn no_token_chooses_its_own_algorithm() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let gateway = Gateway::start(&rule(BY_SUBJECT, &issuer.keys(&scratch)));
    let payload = encode(json!({ "sub": "alice" }).to_string());
    for none in ["none", "None", "NONE", "nOnE", "", "HS384", "RS512", "PS256"] {
        let header = encode(json!({ "alg": none }).to_string());
        assert_refused(&gateway, &format!("{header}.{payload}."), UNKNOWN_KEY);
        assert_refused(&gateway, &format!("{header}.{payload}.c2ln"), UNKNOWN_KEY);
    }
    // A public key is no secret for HS256, neither in PEM nor without its last line end.
    let header = encode(json!({ "alg": "HS256" }).to_string());
    let signed = format!("{header}.{payload}");
    for algorithm in ["RS256", "ES256", "EdDSA"] {
        let pem = issuer.pem(algorithm);
        for secret in [pem.as_str(), pem.trim_end(), ""] {
            let signature = encode(hmac_sha256(secret.as_bytes(), signed.as_bytes()));
            assert_refused(&gateway, &format!("{signed}.{signature}"), SIGNATURE);
        }
    }
    // Without a configured secret, HS256 is as unknown as `none`.
    let file = scratch.write("only.pem", issuer.pem("RS256"));
    let jwt = format!("[jwt]\nkeys = [{{ algorithm = \"RS256\", public_key_file = \"{}\" }}]\n", file.display());
    let gateway = Gateway::start(&rule(BY_SUBJECT, &jwt));
    let signature = encode(hmac_sha256(issuer.pem("RS256").as_bytes(), signed.as_bytes()));
    assert_refused(&gateway, &format!("{signed}.{signature}"), UNKNOWN_KEY);
    assert_refused(
        &gateway,
        &issuer.sign("HS256", &json!({ "alg": "HS256", "crit": ["exp"] }), &json!({})),
        "the token needs an extension that is not known here",
    );
}

#[test]
fn token_times_are_checked() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let expired = "the token has expired";
    let gateway = Gateway::start(&rule(BY_SUBJECT, &issuer.keys(&scratch)));
    assert_refused(&gateway, &issuer.token("ES256", &json!({ "sub": "a", "exp": START_S })), expired);
    assert_refused(&gateway, &issuer.token("ES256", &json!({ "sub": "a", "exp": "never" })), MALFORMED);
    let later = issuer.token("ES256", &json!({ "sub": "b", "nbf": START_S + 30, "exp": START_S + 90 }));
    assert_refused(&gateway, &later, "the token is not valid yet");
    gateway.advance_s(30);
    assert_two_admitted(|| get_with_token(&gateway, &later).status);
    gateway.advance_s(59);
    get_with_token(&gateway, &later).expect(200);
    // The cached verification does not outlive the expiry.
    gateway.advance_s(1);
    assert_refused(&gateway, &later, expired);

    let gateway = Gateway::start(&rule(BY_SUBJECT, &format!("{}leeway = \"10s\"\n", issuer.keys(&scratch))));
    let token = issuer.token("EdDSA", &json!({ "sub": "a", "nbf": START_S + 10, "exp": START_S + 20 }));
    get_with_token(&gateway, &token).expect(200);
    assert_refused(
        &gateway,
        &issuer.token("EdDSA", &json!({ "sub": "a", "nbf": START_S + 11 })),
        "the token is not valid yet",
    );
    gateway.advance_s(29);
    get_with_token(&gateway, &token).expect(200);
    gateway.advance_s(1);
    assert_refused(&gateway, &token, expired);
}

#[test]
fn issuer_and_audience_are_checked_if_configured() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let jwt = format!("{}issuer = \"https://i.test\"\naudience = [\"api\", \"admin\"]\n", issuer.keys(&scratch));
    let gateway = Gateway::start(&rule(BY_SUBJECT, &jwt));
    let token = |claims: Value| issuer.token("HS256", &claims);
    let wrong_issuer = "the token's issuer is not trusted here";
    assert_refused(&gateway, &token(json!({ "sub": "a", "aud": "api" })), wrong_issuer);
    assert_refused(&gateway, &token(json!({ "sub": "a", "aud": "api", "iss": "https://i.test/" })), wrong_issuer);
    let wrong_audience = "the token is meant for another audience";
    assert_refused(&gateway, &token(json!({ "sub": "a", "iss": "https://i.test" })), wrong_audience);
    assert_refused(&gateway, &token(json!({ "sub": "a", "iss": "https://i.test", "aud": ["API"] })), wrong_audience);
    get_with_token(&gateway, &token(json!({ "sub": "a", "iss": "https://i.test", "aud": "api" }))).expect(200);
    get_with_token(&gateway, &token(json!({ "sub": "b", "iss": "https://i.test", "aud": ["x", "admin"] }))).expect(200);
}

#[test]
fn a_jwks_file_selects_keys_by_id() {
    let (issuer, other, scratch) = (Issuer::new(), Issuer::new(), TempDir::new());
    let file = scratch.write("jwks.json", issuer.jwks().to_string());
    let gateway = Gateway::start(&rule(BY_SUBJECT, &format!("[jwt]\njwks_file = \"{}\"\n", file.display())));
    for algorithm in ALGORITHMS {
        let claims = json!({ "sub": algorithm });
        let sign = |kid: &str| issuer.sign(algorithm, &json!({ "alg": algorithm, "kid": kid }), &claims);
        get_with_token(&gateway, &sign(algorithm)).expect(200);
        get_with_token(&gateway, &issuer.token(algorithm, &claims)).expect(200);
        assert_refused(&gateway, &sign("2023"), UNKNOWN_KEY);
        assert_refused(&gateway, &sign(&algorithm.to_lowercase()), UNKNOWN_KEY);
        let forged = other.sign(algorithm, &json!({ "alg": algorithm, "kid": algorithm }), &claims);
        assert_refused(&gateway, &forged, SIGNATURE);
    }
}

#[test]
fn a_missing_token_or_claim_is_a_missing_key() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let keys = issuer.keys(&scratch);
    let without = issuer.token("HS256", &json!({ "exp": START_S + 600 }));
    let invalid = issuer.token("HS256", &json!({ "sub": "a", "exp": 1 }));
    for (on_missing, status) in [("refuse", 400), ("skip", 200)] {
        let key = format!("key = \"jwt:sub\"\non_missing_key = \"{on_missing}\"");
        let gateway = Gateway::start(&rule(&key, &keys));
        for _ in 0..3 {
            for fields in [&[][..], &[("Authorization", "Basic YWxpY2U6cHc=")], &[("Authorization", "")]] {
                let response = gateway.get_with("/a", fields).expect(status);
                assert_eq!(response.field("ratelimit"), None);
            }
            get_with_token(&gateway, &without).expect(status);
        }
        get_with_token(&gateway, &invalid).expect(401);
        for second in ["Bearer x", "Basic x"] {
            let token = format!("Bearer {}", issuer.token("HS256", &json!({ "sub": "a" })));
            let response = gateway.get_with("/a", &[("Authorization", &token), ("authorization", second)]).expect(400);
            assert_eq!(
                response.problem()["detail"],
                "the request gives `authorization` more than once, or in a form that servers read differently"
            );
        }
    }
    // Counted by address instead, except for invalid tokens, whatever other key part is missing.
    let key = "key = [\"header:x-tenant\", \"jwt:sub\"]\non_missing_key = \"ip\"";
    let gateway = Gateway::start(&rule(key, &keys));
    get_with_token(&gateway, &invalid).expect(401);
    assert_two_admitted(|| get_with_token(&gateway, &without).status);
}

#[test]
fn claims_of_all_types_are_counted_separately() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let key = "key = [\"jwt:uid\", \"jwt:realm.id\", \"jwt:https://example.com/admin\"]\non_missing_key = \"refuse\"";
    let gateway = Gateway::start(&rule(key, &issuer.keys(&scratch)));
    let token = |uid: Value, realm: &str, admin: bool| {
        let claims = json!({ "uid": uid, "realm": { "id": realm }, "https://example.com/admin": admin });
        issuer.token("EdDSA", &claims)
    };
    for token in [
        token(json!(42), "r", true),
        token(json!(43), "r", true),
        token(json!(42), "s", true),
        token(json!(42), "r", false),
        token(json!("forty-two"), "r", true),
    ] {
        assert_two_admitted(|| get_with_token(&gateway, &token).status);
    }
    for missing in [json!(null), json!(""), json!([42]), json!({})] {
        get_with_token(&gateway, &token(missing, "r", true)).expect(400);
    }
}

#[test]
fn a_shadow_rule_refuses_no_token() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let gateway = Gateway::start(&rule(&format!("{BY_SUBJECT}\non_limit = \"shadow\""), &issuer.keys(&scratch)));
    get_with_token(&gateway, "nonsense").expect(200);
}

#[test]
fn a_reload_forgets_tokens_verified_by_removed_keys() {
    let (old, new) = (Issuer::new(), Issuer::new());
    let scratch = TempDir::new();
    let file = scratch.write("jwks.json", old.jwks().to_string());
    let toml = one_rule("key = \"jwt:sub\"\non_missing_key = \"refuse\"\nwindows = [\"100000/366d\"]")
        + &format!("[jwt]\njwks_file = \"{}\"\n", file.display());
    let process = Process::spawn(&format!("workers = 1\n{toml}"));
    let mut client = process.client();
    let mut get = |token: &str| client.get_with("/a", &[("Authorization", &format!("Bearer {token}"))]);
    let (from_old, from_new) = (old.token("RS256", &json!({ "sub": "a" })), new.token("RS256", &json!({ "sub": "a" })));
    assert_eq!(remaining(&get(&from_old).expect(200), "r"), 99_999);
    get(&from_old).expect(200);
    get(&from_new).expect(401);

    // Atomically, so that the gateway reads no partial file. The change is noticed without a signal.
    let replace = |text: String| fs::rename(scratch.write("jwks.new", text), scratch.path().join("jwks.json")).unwrap();
    replace(new.jwks().to_string());
    process.wait_for_reloads("applied", 1);
    eventually("the new keys apply", || get(&from_new).status == 200);
    get(&from_old).expect(401);

    // An invalid key set changes nothing, and is reported without its contents.
    let broken = new.jwks().to_string().replace("\"RSA\"", "\"RSA").replace("sig", "marked");
    replace(broken);
    process.wait_for_reloads("refused", 1);
    get(&from_new).expect(200);
    let log = process.wait_for_stderr("jwks.json` is not JSON");
    assert!(log.contains("fix: ") && !log.contains("marked"), "{log}");
}

#[test]
fn key_files_are_relative_to_the_configuration_and_checked() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    scratch.write("rsa.pem", issuer.pem("RS256"));
    let jwt = "[jwt]\nkeys = [{ algorithm = \"RS256\", public_key_file = \"rsa.pem\" }]\n";
    let file = scratch.write("gateway.toml", format!("{jwt}{}", rule(BY_SUBJECT, ""))).display().to_string();
    let (code, _, err) = run(&["check", "--config", &file]);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    for (text, message) in [
        (issuer.pem("ES256"), "`rsa.pem` is not a key for `RS256`"),
        ("secret secret".to_owned(), "`rsa.pem` is not a public key in PEM"),
        ("x".repeat(17 * 1024 * 1024), "cannot read `rsa.pem`: it has more than 16 MiB"),
    ] {
        scratch.write("rsa.pem", text);
        for command in ["check", "run"] {
            let (code, out, err) = run(&[command, "--config", &file]);
            assert_eq!((code, out.as_str()), (Some(2), ""));
            assert!(err.starts_with(&format!("{file}:2:50: {message}")) && err.contains("fix: "), "{err}");
            assert!(!err.contains("secret secret"), "{err}");
        }
    }
}

#[test]
fn tokens_appear_neither_in_logs_nor_in_metrics() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let log = scratch.path().join("access.log");
    let keys = format!("{}[access_log]\nfile = \"{}\"\n", issuer.keys(&scratch), log.display());
    let key =
        "key = [\"jwt:sub\", \"cookie:session\", \"query:token\", \"header:x-api-key\"]\non_missing_key = \"refuse\"";
    let process = Process::spawn(&rule(key, &keys));
    let mut responses = String::new();
    for (subject, expires) in [("marked-subject", 4_000_000_000_u64), ("marked-subject", 1)] {
        let token = issuer.token("HS256", &json!({ "sub": subject, "exp": expires }));
        for target in ["/a?token=marked-query", "/a?token=%zz-marked-query", "/a?token=marked-query&token=b", "/a"] {
            let fields = [
                ("Authorization", format!("Bearer {token}")),
                ("Cookie", "session=marked-cookie".to_owned()),
                ("X-API-Key", "marked-key".to_owned()),
            ];
            let fields: Vec<(&str, &str)> = fields.iter().map(|(name, value)| (*name, value.as_str())).collect();
            let response = process.client().get_with(target, &fields);
            if response.status != 200 {
                responses += &response.text();
            }
        }
    }
    eventually("the lines are logged", || std::fs::read_to_string(&log).unwrap_or_default().lines().count() == 8);
    let written = std::fs::read_to_string(&log).unwrap();
    let metrics = process.admin_get("/metrics").expect(200).text();
    for text in [&written, &metrics, &process.stderr(), &responses] {
        assert!(!text.contains("marked") && !text.contains("eyJ") && !text.contains(&issuer.secret), "{text}");
    }
    assert!(written.contains("\"status\":401") && written.contains("\"status\":400"), "{written}");
}

/// Rules by the address and by the subject of a token, in this order.
fn by_address_and_subject(settings: &str, jwt: &str) -> String {
    format!(
        "[upstreams.u]\nbuiltin = \"echo\"\n[rules.address]\nkey = \"ip\"\nwindows = [\"3/minute\"]\n{settings}\n\
         [rules.subject]\nkey = \"jwt:sub\"\non_missing_key = \"refuse\"\nwindows = [\"100/minute\"]\n\
         [[routes]]\nname = \"all\"\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"subject\", \"address\"]\n{jwt}"
    )
}

#[test]
fn a_bad_token_is_charged_to_rules_with_known_keys() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let gateway = Gateway::start(&by_address_and_subject("", &issuer.keys(&scratch)));
    for left in [2, 1, 0] {
        let response = get_with_token(&gateway, "nonsense").expect(401);
        assert_eq!(remaining(&response, "address"), left);
        assert_eq!(items(&response, "ratelimit").len(), 1);
        assert_eq!(items(&response, "ratelimit-policy").len(), 1);
        assert_eq!(response.problem()["detail"], MALFORMED);
    }
    // The address is over its limit, whether the token is valid or not.
    let genuine = issuer.token("ES256", &json!({ "sub": "alice" }));
    for token in ["nonsense", "", &genuine] {
        let response = get_with_token(&gateway, token).expect(429);
        assert_eq!(response.problem()["violated-policies"], json!(["address"]));
        assert_eq!(response.field("www-authenticate"), None);
    }
    let page = gateway.metrics();
    let decided = |rule, outcome| page.sum("transom_decisions_total", &[("rule", rule), ("outcome", outcome)]);
    assert_eq!((decided("address", "admitted"), decided("address", "refused")), (3, 3));
    assert_eq!((decided("subject", "admitted"), decided("subject", "refused")), (0, 0));
    assert_eq!(page.sum("transom_request_errors_total", &[("error", "token")]), 3);
    // A valid token that was refused by the address rule is not charged to its subject.
    gateway.advance_s(60);
    assert_eq!(remaining(&get_with_token(&gateway, &genuine).expect(200), "subject"), 99);
}

#[test]
fn the_charge_of_a_bad_token_depends_on_the_rules() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let keys = issuer.keys(&scratch);
    // With `count_refused`, refusals count.
    let gateway = Gateway::start(&by_address_and_subject("count_refused = true", &keys));
    (0..3).for_each(|_| drop(get_with_token(&gateway, "nonsense").expect(401)));
    let refused = get_with_token(&gateway, "nonsense").expect(429);
    assert_eq!(remaining(&refused, "address"), 0);
    // A shadow rule counts such requests, and refuses none.
    let gateway = Gateway::start(&by_address_and_subject("on_limit = \"shadow\"", &keys));
    (0..5).for_each(|_| drop(get_with_token(&gateway, "nonsense").expect(401)));
    let shadowed = gateway.metrics().sum("transom_decisions_total", &[("rule", "address"), ("outcome", "shadowed")]);
    assert_eq!(shadowed, 2);
    // A request without a token is counted as well.
    let gateway = Gateway::start(&by_address_and_subject("", &keys));
    (0..3).for_each(|_| drop(gateway.get("/a").expect(400)));
    gateway.get("/a").expect(429);
}

#[test]
fn a_bad_token_is_charged_to_shared_counters() {
    let (issuer, scratch, redis) = (Issuer::new(), TempDir::new(), RedisServer::start());
    let toml = by_address_and_subject("shared = \"exact\"", &issuer.keys(&scratch));
    let store = format!("[counters.shared]\nredis = \"{}\"\n{LONG_TIMEOUT}", redis.url());
    let process = Process::spawn(&format!("{store}{}", toml.replace("3/minute", "3/366d")));
    let send_token = |token: &str| process.client().get_with("/a", &[("Authorization", &format!("Bearer {token}"))]);
    for left in [2, 1, 0] {
        assert_eq!(remaining(&send_token("nonsense").expect(401), "address"), left);
    }
    send_token("nonsense").expect(429);
    send_token(&issuer.token("ES256", &json!({ "sub": "alice" }))).expect(429);
}

#[test]
fn a_bad_token_selects_no_plan() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let toml = format!(
        "[upstreams.u]\nbuiltin = \"echo\"\n[clients]\nfile = \"clients.toml\"\nsubject = \"jwt:sub\"\n\
         [rules.address]\nkey = \"ip\"\nwindows = [\"2/minute\"]\nplans.gold.windows = [\"50/minute\"]\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"address\"]\n{}",
        issuer.keys(&scratch)
    );
    let gateway = Gateway::start_with(&toml, "[clients.a]\nplan = \"gold\"\nsubjects = [\"alice\"]\n");
    let genuine = issuer.token("ES256", &json!({ "sub": "alice" }));
    assert_eq!(remaining(&get_with_token(&gateway, &genuine).expect(200), "address"), 49);
    // A client with a bad token is identified by its address, and has the default windows.
    assert_eq!(remaining(&get_with_token(&gateway, "nonsense").expect(401), "address"), 0);
    get_with_token(&gateway, "nonsense").expect(429);
    assert_eq!(remaining(&get_with_token(&gateway, &genuine).expect(200), "address"), 47);
}

#[test]
fn a_token_without_key_id_is_tried_with_a_bounded_number_of_keys() {
    let issuers: Vec<Issuer> = (0..5).map(|_| Issuer::new()).collect();
    let (scratch, token) = (TempDir::new(), json!({ "sub": "a" }));
    let gateway = |named: &[Issuer]| {
        let keys = named.iter().enumerate().map(|(i, issuer)| {
            let file = scratch.write(&format!("{i}.pem"), issuer.pem("ES256"));
            format!("{{ algorithm = \"ES256\", kid = \"{i}\", public_key_file = \"{}\" }}", file.display())
        });
        let keys: Vec<String> = keys.collect();
        Gateway::start(&rule(BY_SUBJECT, &format!("[jwt]\nkeys = [{}]\n", keys.join(", "))))
    };
    let few = gateway(&issuers[..4]);
    get_with_token(&few, &issuers[3].token("ES256", &token)).expect(200);
    let many = gateway(&issuers);
    let why = "the token does not say by `kid` which of many keys it is signed with";
    for issuer in [&issuers[0], &issuers[4]] {
        assert_refused(&many, &issuer.token("ES256", &token), why);
    }
    let header = json!({ "alg": "ES256", "kid": "4" });
    get_with_token(&many, &issuers[4].sign("ES256", &header, &token)).expect(200);
    assert_refused(&many, &issuers[3].sign("ES256", &header, &token), SIGNATURE);
}

#[test]
fn token_times_follow_the_wall_clock_and_not_the_window_clock() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let jwt = issuer.keys(&scratch);
    let gateway = Gateway::start(&rule(&BY_SUBJECT.replace("sub", "jti"), &jwt).replace("2/minute", "100/day"));
    let token = |from_s: u64, until_s: u64| {
        issuer.token("ES256", &json!({ "jti": "a", "nbf": START_S + from_s, "exp": START_S + until_s }))
    };
    let (now, tomorrow) = (token(0, 60), token(86_400, 86_460));
    get_with_token(&gateway, &now).expect(200);
    // The wall clock is a day ahead for a moment; the window clock stays there.
    gateway.clock.set_wall_clock((START_S + 86_400) * 1000);
    gateway.clock.ensure_at_least((START_S + 86_400) * 1000);
    assert_refused(&gateway, &now, "the token has expired");
    get_with_token(&gateway, &tomorrow).expect(200);
    gateway.clock.set_wall_clock(START_S * 1000);
    get_with_token(&gateway, &now).expect(200);
    // The wrong clock made the token valid a moment ago.
    assert_refused(&gateway, &tomorrow, "the token is not valid yet");
    let page = Client::connect(gateway.admin).get("/metrics").expect(200).text();
    assert!(page.contains("\ntransom_clock_offset_seconds 86400\n"), "{page}");
}

#[test]
fn a_store_whose_clock_is_a_day_behind_does_not_make_expired_tokens_valid() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let redis = RedisServer::with_clock_offset(-86_400, "");
    let rule = "[rules.r]\nkey = \"jwt:sub\"\non_missing_key = \"refuse\"\nwindows = [\"1000/day\"]\n";
    let toml = shared_config(&format!("\"{}\"", redis.url()), &format!("mode = \"exact\"\n{LONG_TIMEOUT}"), rule);
    let process = Process::spawn(&format!("{toml}{}", issuer.keys(&scratch)));
    let now_s = now_ms() / 1000;
    let status = |from_s: u64, until_s: u64| {
        let token = issuer.token("ES256", &json!({ "sub": "alice", "nbf": from_s, "exp": until_s }));
        process.client().get_with("/a", &[("Authorization", &format!("Bearer {token}"))]).status
    };
    // The store states its time in seconds.
    for _ in 0..2 {
        assert_eq!(status(now_s - 60, now_s + 1800), 200);
        assert_eq!(status(now_s - 7200, now_s - 1800), 401);
        assert_eq!(status(now_s + 1800, now_s + 7200), 401);
    }
    process.wait_for_stderr("windows follow a clock that is 86400 s behind this machine's");
    let page = process.admin_get("/metrics").expect(200).text();
    assert!(page.contains("\ntransom_clock_offset_seconds -86400\n"), "{page}");
}
