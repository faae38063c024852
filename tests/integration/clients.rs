//! Plans, overrides, exemptions, and the clients file.

use serde_json::json;
use transom_limiter::secret_digest::Digest;

use crate::support::client::HttpResponse;
use crate::support::gateway::Gateway;
use crate::support::jwt_issuer::Issuer;
use crate::support::process::Process;
use crate::support::ratelimit_parser::{items, remaining};
use crate::support::{TempDir, eventually, one_rule};

const SECTION: &str =
    "[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\nsubject = \"header:x-user\"\n";

/// A rule that counts by API key, with the plans `gold` and `silver` and additional settings.
fn api_key_config(more: &str) -> String {
    let rule = format!(
        "key = \"header:x-api-key\"\non_missing_key = \"ip\"\nwindows = [\"10/366d\"]\n{more}\n\
         [rules.r.plans.gold]\nwindows = [\"100/366d\"]\n\
         [rules.r.plans.silver]\nwindows = [\"50/366d\", \"5/day\"]\n"
    );
    format!("{SECTION}{}", one_rule(&rule))
}

fn client_toml(name: &str, plan: &str, what: &str) -> String {
    format!("[clients.{name}]\nplan = \"{plan}\"\n{what}\n")
}

fn key_toml(key: &str) -> String {
    format!("api_keys = [\"{}\"]", Digest::of(key.as_bytes()))
}

fn get_with_key(gateway: &Gateway, key: &str) -> HttpResponse {
    gateway.get_with("/a", &[("X-API-Key", key)])
}

/// The limits in the fields of a response.
fn limits(response: &HttpResponse) -> Vec<u64> {
    items(response, "ratelimit-policy").iter().map(|item| item.get("q")).collect()
}

#[test]
fn a_plan_is_found_by_the_digest_of_an_api_key() {
    let clients = client_toml("acme", "gold", &key_toml("abc")) + &client_toml("beta", "silver", &key_toml("def"));
    let gateway = Gateway::start_with(&api_key_config(""), &clients);
    assert_eq!(limits(&get_with_key(&gateway, "abc").expect(200)), [100]);
    assert_eq!(limits(&get_with_key(&gateway, "def").expect(200)), [50, 5]);
    // Neither another key nor a digest identifies a client.
    let digest = Digest::of(b"abc").to_string();
    for unknown in ["abd", "ABC", &digest, &digest[7..]] {
        assert_eq!(limits(&get_with_key(&gateway, unknown).expect(200)), [10], "{unknown}");
    }
    assert_eq!(limits(&gateway.get("/a").expect(200)), [10]);
    // The windows of the plan apply.
    for _ in 0..4 {
        get_with_key(&gateway, "def").expect(200);
    }
    let refused = get_with_key(&gateway, "def").expect(429);
    assert_eq!(refused.problem()["violated-policies"], json!(["r-day"]));
    get_with_key(&gateway, "abc").expect(200);
}

#[test]
fn a_plan_is_found_by_the_most_specific_network() {
    let clients = client_toml("wide", "gold", "networks = [\"127.0.0.0/8\"]")
        + &client_toml("narrow", "silver", "networks = [\"127.0.1.0/24\", \"127.0.2.2\"]");
    let gateway = Gateway::start_with(&api_key_config(""), &clients);
    for (address, found) in
        [("127.0.0.1", vec![100]), ("127.0.1.200", vec![50, 5]), ("127.0.2.2", vec![50, 5]), ("127.0.2.3", vec![100])]
    {
        assert_eq!(limits(&gateway.get_from(address, &[])), found, "{address}");
    }
}

#[test]
fn keys_precede_subjects_and_subjects_precede_networks() {
    let clients = client_toml("a", "gold", &key_toml("abc"))
        + &client_toml("b", "silver", "subjects = [\"bob\"]")
        + &client_toml("c", "none", "networks = [\"127.0.0.0/8\"]");
    let rule = api_key_config("") + "[rules.r.plans.none]\nwindows = [\"1000/366d\"]\n";
    let gateway = Gateway::start_with(&rule, &clients);
    let request = |fields: &[(&str, &str)]| limits(&gateway.get_with("/a", fields).expect(200));
    assert_eq!(request(&[("X-API-Key", "abc"), ("X-User", "bob")]), [100]);
    assert_eq!(request(&[("X-API-Key", "unknown"), ("X-User", "bob")]), [50, 5]);
    assert_eq!(request(&[("X-User", "bob")]), [50, 5]);
    assert_eq!(request(&[("X-User", "eve")]), [1000]);
    assert_eq!(request(&[]), [1000]);
    // It is unknown which of two keys the upstream would use.
    for name in ["X-API-Key", "X-User"] {
        let twice = gateway.get_with("/a", &[(name, "abc"), (name, "bob")]).expect(400);
        assert!(twice.text().contains(&name.to_lowercase()) && !twice.text().contains("abc"), "{}", twice.text());
    }
}

#[test]
fn a_plan_is_found_by_a_claim_of_a_verified_token() {
    let (issuer, scratch) = (Issuer::new(), TempDir::new());
    let section = format!("{}{}", issuer.keys(&scratch), SECTION.replace("header:x-user", "jwt:sub"));
    let gateway = Gateway::start_with(
        &api_key_config("").replace(SECTION, &section),
        &(client_toml("acme", "gold", "subjects = [\"user-17\"]") + &client_toml("beta", "silver", &key_toml("def"))),
    );
    let request = |sub: &str, key: &str| {
        let token = issuer.token("HS256", &json!({ "sub": sub }));
        let fields = [("Authorization", format!("Bearer {token}")), ("X-API-Key", key.to_owned())];
        gateway.get_with("/a", &fields.each_ref().map(|(name, value)| (*name, value.as_str())))
    };
    assert_eq!(limits(&request("user-17", "unknown").expect(200)), [100]);
    assert_eq!(limits(&request("user-18", "unknown").expect(200)), [10]);
    assert_eq!(limits(&request("user-17", "def").expect(200)), [50, 5], "the key precedes the subject");
    assert_eq!(limits(&gateway.get("/a").expect(200)), [10]);
    let forged = Issuer::new().token("HS256", &json!({ "sub": "user-17" }));
    gateway.get_with("/a", &[("Authorization", &format!("Bearer {forged}"))]).expect(401);
}

#[test]
fn a_rule_without_the_plan_uses_its_default_windows() {
    let toml = api_key_config("").replace("rules = [\"r\"]", "rules = [\"r\", \"all\"]")
        + "[rules.all]\nkey = \"global\"\nwindows = [\"7/minute\"]\nplans.silver.windows = [\"8/minute\"]\n";
    let clients = client_toml("acme", "gold", &key_toml("abc")) + &client_toml("beta", "silver", &key_toml("def"));
    let gateway = Gateway::start_with(&toml, &clients);
    assert_eq!(limits(&get_with_key(&gateway, "abc").expect(200)), [100, 7]);
    assert_eq!(limits(&get_with_key(&gateway, "def").expect(200)), [50, 5, 8]);
    // All clients share the counter of the global rule; the plan only changes the limit.
    assert_eq!(items(&gateway.get("/a").expect(200), "ratelimit")[1].get("r"), 4);
}

#[test]
fn an_override_precedes_the_plan() {
    let secret = Digest::of(b"s3cret");
    let overrides = format!(
        "overrides = [\n{{ key = \"abc\", windows = [\"3/366d\"] }},\n{{ key = \"{secret}\", windows = [\"4/366d\"] }}]"
    );
    for overrides in [overrides.as_str(), &overrides.replace(&secret.to_string(), "s3cret")] {
        let clients = client_toml("acme", "gold", &key_toml("abc"));
        let gateway = Gateway::start_with(&api_key_config(overrides), &clients);
        assert_eq!(limits(&get_with_key(&gateway, "abc").expect(200)), [3]);
        assert_eq!(limits(&get_with_key(&gateway, "s3cret").expect(200)), [4]);
        assert_eq!(limits(&get_with_key(&gateway, "abcd").expect(200)), [10]);
        get_with_key(&gateway, "abc").expect(200);
        get_with_key(&gateway, "abc").expect(200);
        get_with_key(&gateway, "abc").expect(429);
    }
}

#[test]
fn exempt_clients_are_not_counted_and_get_no_ratelimit_fields() {
    let exempt = "exemptions = [\"127.0.9.0/24\", \"key:monitor\"]";
    let toml = api_key_config(exempt).replace("rules = [\"r\"]", "rules = [\"r\", \"all\"]")
        + "[rules.all]\nkey = \"global\"\nwindows = [\"100/minute\"]\n";
    let gateway = Gateway::start_with(&toml, "");
    for n in 1..=20 {
        let by_key = get_with_key(&gateway, "monitor").expect(200);
        let by_network = gateway.get_from("127.0.9.1", &[("X-API-Key", "abc")]).expect(200);
        assert_eq!(items(&by_key, "ratelimit").len(), 1, "only the other rule adds an item");
        assert_eq!(remaining(&by_key, "all"), 100 - 2 * n + 1);
        assert_eq!(limits(&by_network), [100]);
    }
    // Requests of the exempt network were not counted for their key.
    assert_eq!(items(&get_with_key(&gateway, "abc").expect(200), "ratelimit")[0].get("r"), 9);
    let counted = gateway.metrics().sum("transom_decisions_total", &[("rule", "r"), ("outcome", "admitted")]);
    assert_eq!(counted, 1);
}

#[test]
fn a_client_exempt_from_the_only_rule_gets_no_ratelimit_fields() {
    let gateway = Gateway::start(&one_rule("key = \"ip\"\nwindows = [\"1/minute\"]\nexemptions = [\"127.0.0.0/8\"]"));
    for _ in 0..3 {
        let response = gateway.get("/a").expect(200);
        assert!(response.field("ratelimit").is_none() && response.field("ratelimit-policy").is_none(), "{response:?}");
    }
}

#[test]
fn a_client_keeps_its_usage_when_its_plan_changes() {
    let (toml, gold) = (api_key_config(""), client_toml("acme", "gold", &key_toml("abc")));
    let mut gateway = Gateway::start_with(&toml, &client_toml("other", "gold", &key_toml("xyz")));
    for _ in 0..7 {
        get_with_key(&gateway, "abc").expect(200);
    }
    gateway.reload_with(&toml, &gold);
    eventually("the plan is known", || limits(&get_with_key(&gateway, "abc").expect(200)) == [100]);
    let used = 100 - items(&get_with_key(&gateway, "abc").expect(200), "ratelimit")[0].get("r");
    assert!(used >= 9, "{used}");
    // Back on the first plan: the same windows with their usage.
    gateway.reload_with(&toml, &gold.replace("gold", "silver"));
    eventually("the plan is known", || limits(&get_with_key(&gateway, "abc")) == [50, 5]);
    let now = 50 - items(&get_with_key(&gateway, "abc").expect(200), "ratelimit")[0].get("r");
    assert!(now > used, "{now} after {used}");
}

#[test]
fn many_clients_are_counted_separately() {
    let plan = |n: usize| if n.is_multiple_of(2) { "gold" } else { "silver" };
    let one = |n: usize| {
        let network = format!("networks = [\"10.{}.{}.0/24\"]", n / 256, n % 256);
        client_toml(&format!("c{n}"), plan(n), &format!("{}\n{network}", key_toml(&format!("key-{n}"))))
    };
    let clients: String = (0..3000).map(one).collect();
    let gateway = Gateway::start_with(&api_key_config(""), &clients);
    for n in [0, 1, 1500, 2999] {
        let found = limits(&get_with_key(&gateway, &format!("key-{n}")).expect(200));
        assert_eq!(found, if plan(n) == "gold" { vec![100] } else { vec![50, 5] });
    }
    assert_eq!(limits(&get_with_key(&gateway, "key-3000").expect(200)), [10]);
}

#[test]
fn connection_cannot_remove_the_api_key_from_the_forwarded_request() {
    let toml = format!("{SECTION}{}", one_rule("key = \"ip\"\nwindows = [\"10/minute\"]"));
    let gateway = Gateway::start_with(&toml, "");
    let response =
        gateway.get_with("/a", &[("X-API-Key", "abc"), ("Connection", "X-API-Key, X-User"), ("X-User", "b")]);
    let text = response.expect(200).text();
    assert!(text.contains("abc") && text.to_lowercase().contains("x-user"), "{text}");
}

#[test]
fn a_changed_clients_file_is_reloaded() {
    let process = Process::spawn_with(&api_key_config(""), &client_toml("acme", "silver", &key_toml("abc")));
    let mut connection = process.client();
    let mut request = || connection.get_with("/a", &[("X-API-Key", "abc")]).expect(200);
    assert_eq!(limits(&request()), [50, 5]);
    process.replace_file("clients.toml", &client_toml("acme", "gold", &key_toml("abc")));
    process.wait_for_reloads("applied", 1);
    let mut last = 0;
    eventually("the plan is known", || {
        let response = request();
        last = items(&response, "ratelimit")[0].get("r");
        limits(&response) == [100]
    });
    assert!(last <= 98, "the usage is kept: {last}");
    // An invalid file changes nothing and is reported.
    process.replace_file("clients.toml", "[clients.acme]\nplan = \"gold\"\napi_keys = [\"hunter2hunter2\"]\n");
    process.wait_for_reloads("refused", 1);
    assert_eq!(limits(&request()), [100]);
    let position =
        format!("{}:3:13: this is an API key in plain text", process.scratch.path().join("clients.toml").display());
    let log = process.wait_for_stderr(&position);
    assert!(!log.contains("hunter2"), "{log}");
    // A removed file is an error as well; the signal makes the gateway read both files.
    std::fs::remove_file(process.scratch.path().join("clients.toml")).unwrap();
    process.signal("HUP");
    process.wait_for_reloads("refused", 2);
    assert_eq!(limits(&request()), [100]);
    process.replace_file("clients.toml", "");
    process.wait_for_reloads("applied", 2);
    eventually("the client is unknown", || limits(&request()) == [10]);
}

#[test]
fn api_keys_appear_neither_in_logs_nor_in_metrics() {
    let toml = api_key_config("overrides = [{ key = \"alice-alice\", windows = [\"1/366d\"] }]");
    let toml = format!("access_log = {{ file = \"stdout\" }}\n{toml}");
    let process = Process::spawn_with(&toml, &client_toml("acme", "gold", &key_toml("hunter2hunter2")));
    for key in ["hunter2hunter2", "unknown-unknown", "alice-alice", "alice-alice"] {
        let response = process.client().get_with("/a", &[("X-API-Key", key)]);
        assert!(response.status == 200 || !response.text().contains(key), "{}", response.text());
    }
    eventually("all are logged", || process.stdout_lines().len() == 4);
    let metrics = process.admin_get("/metrics").expect(200).text();
    let all = format!("{}{}{metrics}", process.stdout_lines().join("\n"), process.stderr());
    for key in ["hunter2hunter2", "unknown-unknown", "alice-alice"] {
        assert!(!all.contains(key), "{all}");
    }
}
