//! Grants: tokens added once to the current window of a client.

use std::thread;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use crate::client_limits::count_admitted;
use crate::support::client::{Client, HttpResponse};
use crate::support::process::{Process, run};
use crate::support::ratelimit_parser::remaining;
use crate::support::redis::RedisServer;
use crate::support::{TempDir, eventually_eq};

const CLIENT: &str = "[clients.acme]\nplan = \"gold\"\nnetworks = [\"127.0.0.0/8\"]\n";

fn rule(name: &str, gold: &str, more: &str) -> String {
    format!(
        "[rules.{name}]\nkey = \"client\"\non_missing_key = \"refuse\"\nwindows = [\"1/366d\"]\n{more}\
         [rules.{name}.plans.gold]\nwindows = [{gold}]\n"
    )
}

fn grant(gateway: &Process, key: &str, body: &Value) -> HttpResponse {
    grant_to(gateway, "acme", &[("Idempotency-Key", key)], body)
}

fn grant_to(gateway: &Process, client: &str, fields: &[(&str, &str)], body: &Value) -> HttpResponse {
    let host = gateway.admin.to_string();
    let fields = [&[("Host", host.as_str())][..], fields].concat();
    let target = format!("/v1/clients/{client}/grants");
    Client::connect(gateway.admin).request("POST", &target, &fields, body.to_string().as_bytes())
}

/// Tokens used and left of the first window of a rule.
fn usage(gateway: &Process, rule: &str) -> (u64, u64) {
    let shown = gateway.admin_get("/v1/clients/acme").expect(200).json();
    let rules = shown["rules"].as_array().unwrap();
    let window = &rules.iter().find(|known| known["rule"] == rule).unwrap()["windows"][0];
    (window["count"].as_u64().unwrap(), window["remaining"].as_u64().unwrap())
}

#[test]
fn a_grant_adds_tokens_once_to_the_current_window() {
    let scratch = TempDir::new();
    let audit = scratch.path().join("audit.log");
    let toml = format!(
        "workers = 4\n[admin]\naudit_log = \"{}\"\n[clients]\nfile = \"clients.toml\"\napi_key = \"header:x-api-key\"\n\
         [upstreams.u]\nbuiltin = \"echo\"\n{}{}{}{}{}[rules.by-ip]\nkey = \"ip\"\nwindows = [\"9/day\"]\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n",
        audit.display(),
        rule("r", "\"4/366d\", \"9000/300d\"", ""),
        rule("slides", "{ limit = 5, period = \"day\", sliding = true }", ""),
        rule("punishes", "\"9/day\"", "penalty = \"1h\"\n"),
        rule("waits", "\"9/day\"", "on_limit = \"delay\"\nmax_delay = \"1h\"\n"),
        rule("opens", "{ limit = 5, period = \"day\", start = \"first-request\" }", ""),
    );
    let gateway = Process::spawn_with(&toml, CLIENT);
    let body = |rule: &str, window: &str, tokens: u64| json!({ "rule": rule, "window": window, "tokens": tokens });
    let file = || std::fs::read_to_string(gateway.scratch.path().join("clients.toml")).unwrap();
    let of_r = body("r", "366d", 300);
    for (client, key, body, status) in [
        ("acme", "", of_r.clone(), 400),
        ("acme", "\"a", of_r.clone(), 400),
        ("acme", "a", body("r", "366d", 0), 400),
        ("acme", "a", body("r", "366d", 1 << 32), 400),
        ("acme", "a", body("r", "366d", (1 << 32) - 4), 400),
        ("acme", "a", json!({ "rule": "r", "window": "366d", "tokens": 5, "until": null }), 400),
        ("acme", "a", body("slides", "day", 5), 400),
        ("acme", "a", body("punishes", "day", 5), 400),
        ("acme", "a", body("waits", "day", 5), 400),
        ("acme", "a", body("by-ip", "day", 5), 400),
        ("acme", "a", body("opens", "day", 5), 409),
        ("acme", "a", body("r", "hour", 5), 404),
        ("acme", "a", body("nowhere", "hour", 5), 404),
        ("unknown", "a", of_r.clone(), 404),
    ] {
        let response = grant_to(&gateway, client, &[("Idempotency-Key", key)], &body);
        assert_eq!(response.status, status, "{key} {body} {}", response.text());
        response.problem();
    }
    grant_to(&gateway, "acme", &[], &of_r).expect(400).problem();
    assert_eq!(file(), CLIENT);

    // While requests are on their way, and several times at once.
    let repeat = || {
        thread::scope(|scope| {
            let threads: Vec<_> = (0..6).map(|_| scope.spawn(|| grant(&gateway, "\"first\"", &of_r).status)).collect();
            threads.into_iter().for_each(|thread| assert_eq!(thread.join().unwrap(), 200));
        });
    };
    assert_eq!((count_admitted(&[&gateway], repeat), usage(&gateway, "r")), (304, (304, 0)));
    // The window as it is named in responses; the same key without quotes.
    let again = grant(&gateway, "first", &body("r", "r-366d", 300)).expect(200).json();
    assert_eq!(again["grants"].as_array().unwrap().len(), 1);
    assert!(again["grants"][0].get("idempotency_key").is_none());
    grant(&gateway, "first", &body("r", "366d", 301)).expect(422).problem();
    grant(&gateway, "first", &body("r", "300d", 300)).expect(422).problem();
    assert_eq!(usage(&gateway, "r"), (304, 0));
    let admin = gateway.admin.to_string();
    let given = ["--rule", "r", "--window", "366d", "--tokens", "2"];
    let command = [&["clients", "grant", "acme", "--admin", &admin][..], &given].concat();
    let (code, _, stderr) = run(&command);
    assert!(code == Some(0) && stderr.contains("client `acme` has 2 more until 20"), "{stderr}");
    assert_eq!(usage(&gateway, "r"), (304, 2));
    let (_, shown, _) = run(&["clients", "show", "acme", "--admin", &admin]);
    assert!(shown.contains("granted:  300 per 366d in rule `r`, until 20"), "{shown}");
    assert_eq!(remaining(&gateway.get("/a").expect(200), "r-366d"), 1);
    gateway.get("/a").expect(200);
    gateway.get("/a").expect(429);

    // A reload keeps it, and so do limits of the client that come after it, and a restart.
    let reloads = gateway.metrics().sum("transom_config_reloads_total", &[]);
    gateway.write_config(&format!("{toml}# changed\n"));
    gateway.signal("HUP");
    gateway.wait_for_applied_reloads(reloads + 1);
    assert_eq!(usage(&gateway, "r"), (306, 0));
    let host = [("Host", &*gateway.admin.to_string())];
    let limits = json!({ "windows": ["6/366d"] }).to_string();
    Client::connect(gateway.admin).request("PUT", "/v1/clients/acme/limits/r", &host, limits.as_bytes()).expect(200);
    assert_eq!(usage(&gateway, "r"), (306, 2));
    let audit = std::fs::read_to_string(&audit).unwrap();
    assert!(audit.contains("\"operation\":\"grant\",\"rule\":\"r\"}"), "{audit}");
    let again = Process::spawn_with(&toml, &file());
    assert_eq!(usage(&again, "r"), (0, 308));
}

const PERIOD_MS: u64 = 4000;

fn now_ms() -> u64 {
    u64::try_from(SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap()
}

/// Requests admitted within a window, and all that were admitted until the next one is full.
fn admitted_until_full(gateway: &Process, target: &str, end_ms: u64) -> (usize, usize) {
    let (mut client, mut refused_after, mut within, mut all) = (gateway.client(), 0, 0, 0);
    while refused_after < 20 {
        let sent_ms = now_ms();
        match client.get(target).status {
            200 => (within, all) = (within + usize::from(now_ms() < end_ms), all + 1),
            _ => {
                refused_after += usize::from(sent_ms >= end_ms);
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
    (within, all)
}

/// Two gateways, one of which gets the grant; rules that the store decides, and rules with leased tokens.
#[test]
fn a_grant_in_the_store_holds_on_every_gateway_until_its_window_ends() {
    let (mut redis, scratch) = (RedisServer::start(), TempDir::new());
    let rules = ["exact", "lease"];
    let start = |copy: &str| {
        let of_rule = |mode: &&str| {
            let rule = rule(mode, &format!("\"20/{PERIOD_MS}ms\""), &format!("shared = \"{mode}\"\n"));
            format!("{rule}[[routes]]\npath = \"/{mode}\"\nupstream = \"u\"\nrules = [\"{mode}\"]\n")
        };
        Process::spawn(&format!(
            "workers = 2\n[counters.shared]\nredis = \"{}\"\ntimeout = \"10s\"\n[upstreams.u]\nbuiltin = \"echo\"\n\
             [clients]\nsource = \"shared\"\nfile = \"{}\"\n{}",
            redis.url(),
            scratch.path().join(copy).display(),
            rules.iter().map(of_rule).collect::<String>(),
        ))
    };
    let gateways = [start("a.copy"), start("b.copy")];
    let [a, b] = &gateways;
    let put = json!({ "plan": "gold", "networks": ["127.0.0.0/8"] }).to_string();
    let host = [("Host", &*a.admin.to_string())];
    Client::connect(a.admin).request("PUT", "/v1/clients/acme", &host, put.as_bytes()).expect(201);
    eventually_eq(|| b.admin_get("/v1/clients/acme").status, 200);
    let body = |rule: &str, tokens: u64| json!({ "rule": rule, "window": format!("{PERIOD_MS}ms"), "tokens": tokens });
    // A window that lasts for long enough; a grant of one that has ended meanwhile says nothing.
    let end_ms = loop {
        let end_ms = now_ms() / PERIOD_MS * PERIOD_MS + PERIOD_MS;
        let made = rules.map(|rule| {
            let status = grant(a, rule, &body(rule, 30)).status;
            while usage(b, rule) != (0, 50) && now_ms() < end_ms {
                thread::sleep(Duration::from_millis(5));
            }
            // Repeated requests that another gateway gets.
            [status, grant(b, rule, &body(rule, 30)).status, grant(b, rule, &body(rule, 31)).status]
        });
        if now_ms() + PERIOD_MS / 2 < end_ms {
            assert_eq!(made, [[200, 200, 422]; 2]);
            break end_ms;
        }
        thread::sleep(Duration::from_millis(end_ms.saturating_sub(now_ms())));
    };
    let admitted = thread::scope(|scope| {
        let send = |rule| {
            let threads = gateways
                .each_ref()
                .map(|gateway| scope.spawn(move || admitted_until_full(gateway, &format!("/{rule}"), end_ms)));
            move || {
                threads
                    .map(|thread| thread.join().unwrap())
                    .into_iter()
                    .fold((0, 0), |(within, all), (more, of_all)| (within + more, all + of_all))
            }
        };
        rules.map(send).map(|join| join())
    });
    for (rule, (within, all)) in rules.into_iter().zip(admitted) {
        assert!(within <= 50, "{rule}: {within}");
        assert_eq!(all, 50 + 20, "{rule}: {within} within the window");
    }
    redis.kill();
    grant(a, "late", &body("exact", 5)).expect(503).problem();
}
