//! Clients behind proxies: only configured proxies are trusted, up to the first hop that is not configured.

use std::net::SocketAddr;
use std::process::Command;

use crate::support::client::{Client, HttpResponse};
use crate::support::gateway::Gateway;
use crate::support::process::{BINARY, Process};
use crate::support::ratelimit_parser::remaining;
use crate::support::upstream::Upstream;
use crate::support::{TempDir, eventually};

/// The peer of every connection is on loopback, so loopback is the proxy.
fn listen(settings: &str) -> String {
    format!("[listen]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n{settings}\n")
}

fn counted_by_ip(settings: &str, upstream: &str) -> String {
    format!(
        "{}{upstream}[rules.r]\nkey = \"ip\"\nwindows = [\"100/minute\"]\nexemptions = [\"198.51.100.0/24\"]\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n",
        listen(settings)
    )
}

const TRUSTED: &str = "trusted_proxies = [\"127.0.0.0/8\", \"10.0.0.0/8\", \"fd00::/8\"]";

fn echo() -> &'static str {
    "[upstreams.u]\nbuiltin = \"echo\"\n"
}

fn get_with_forwarded_for(gateway: &Gateway, lines: &[&str]) -> HttpResponse {
    let fields: Vec<_> = lines.iter().map(|line| ("X-Forwarded-For", *line)).collect();
    gateway.get_with("/a", &fields).expect(200)
}

#[test]
fn the_last_untrusted_hop_is_counted() {
    let gateway = Gateway::start(&counted_by_ip(TRUSTED, echo()));
    // All of these name the same client.
    let equivalent_lists: [&[&str]; 7] = [
        &["192.0.2.7"],
        &["6.6.6.6, 192.0.2.7"],
        &["192.0.2.7, 10.0.0.1, fd00::1"],
        &["garbage, 192.0.2.7:4711 ,10.0.0.1"],
        &["6.6.6.6", "192.0.2.7", "10.0.0.9"],
        &["::ffff:192.0.2.7"],
        &["64:ff9b::192.0.2.7"],
    ];
    for (n, lines) in equivalent_lists.into_iter().enumerate() {
        assert_eq!(remaining(&get_with_forwarded_for(&gateway, lines), "r"), 99 - n as u64, "{lines:?}");
    }
    assert_eq!(remaining(&get_with_forwarded_for(&gateway, &["192.0.2.8"]), "r"), 99);
    // Without a valid address, the proxy itself is counted.
    assert_eq!(remaining(&get_with_forwarded_for(&gateway, &[]), "r"), 99);
    assert_eq!(remaining(&get_with_forwarded_for(&gateway, &["192.0.2.9, unknown"]), "r"), 98);
    // The client address applies to exemptions as well.
    assert_eq!(get_with_forwarded_for(&gateway, &["198.51.100.3"]).field("ratelimit"), None);
    assert!(get_with_forwarded_for(&gateway, &["198.51.100.3, 192.0.2.77"]).field("ratelimit").is_some());
    // The other field is not used.
    assert_eq!(remaining(&gateway.get_with("/a", &[("Forwarded", "for=192.0.2.50")]).expect(200), "r"), 97);
}

/// Each proxy appends its scheme. The scheme of the last one would redirect for ever.
#[test]
fn the_scheme_is_that_of_the_client_behind_two_proxies() {
    let to_https = "[[routes]]\nscheme = \"http\"\npath = \"/{*rest}\"\nredirect = { to = \"https://{host}{uri}\" }\n";
    let gateway = Gateway::start(&(counted_by_ip(TRUSTED, echo()) + to_https));
    let status = |addresses, schemes| {
        gateway.get_with("/a", &[("X-Forwarded-For", addresses), ("X-Forwarded-Proto", schemes)]).status
    };
    assert_eq!(status("192.0.2.7, 10.0.0.1", "https,http"), 200);
    assert_eq!(status("192.0.2.7, 10.0.0.1", "https"), 200);
    assert_eq!(status("192.0.2.7, 10.0.0.1", "http, https"), 308);
    assert_eq!(status("192.0.2.7", "https, http"), 308);
    // The target may name the scheme of the client too.
    let mut client = gateway.client();
    let absolute = "GET https://a/a HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 192.0.2.7\r\n";
    client.send(format!("{absolute}X-Forwarded-Proto: https\r\n\r\n")).read_response().expect(200);
    client.send(format!("{absolute}\r\n")).read_response().expect(400).problem();
}

/// Client, proxy, and two gateways that trust those before them. The proxy appends to the lists that the client has begun.
#[test]
fn a_forged_scheme_or_host_has_no_effect_at_the_second_of_two_gateways() {
    let upstream = Upstream::always(200);
    let second = Gateway::start(&format!(
        "{}forward_auth = \"127.0.0.1:0\"\n{}\
         [[routes]]\nhost = \"forged.test\"\npath = \"/{{*rest}}\"\nrespond = {{ status = 403 }}\n\
         [[routes]]\nscheme = \"http\"\npath = \"/{{*rest}}\"\nredirect = {{ to = \"https://{{host}}{{uri}}\" }}\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
        listen(TRUSTED),
        upstream.toml("u")
    ));
    let first_before = |address: SocketAddr| {
        Gateway::start(&format!(
            "{}[upstreams.u]\nservers = [\"http://{address}\"]\n[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n",
            listen(TRUSTED)
        ))
    };
    let get = |first: &Gateway, scheme: &str, more: &[(&str, &str)]| {
        let schemes = format!("https, {scheme}");
        let fields = [
            ("X-Forwarded-For", "6.6.6.6, 192.0.2.7"),
            ("X-Forwarded-Proto", schemes.as_str()),
            ("X-Forwarded-Host", "forged.test, shop.test"),
        ];
        first.get_with("/a", &[&fields, more].concat())
    };
    let first = first_before(second.http_addresses()[0]);
    get(&first, "http", &[]).expect(308);
    get(&first, "https", &[]).expect(200);
    let received = upstream.only_request();
    assert_eq!(received.values("x-forwarded-for"), ["6.6.6.6, 192.0.2.7, 127.0.0.1, 127.0.0.1"]);
    assert_eq!(
        (received.values("x-forwarded-proto"), received.values("x-forwarded-host")),
        (vec!["https"], vec!["shop.test"])
    );
    // As the authorization requests of a proxy.
    let first = first_before(second.forward_auth_addresses()[0]);
    let about = [("X-Forwarded-Method", "GET"), ("X-Forwarded-Uri", "/a")];
    get(&first, "https", &about).expect(200);
}

#[test]
fn forwarded_is_used_if_configured() {
    let gateway = Gateway::start(&counted_by_ip(&format!("{TRUSTED}\nforwarded = \"forwarded\""), echo()));
    let get_with_forwarded = |value: &str| gateway.get_with("/a", &[("Forwarded", value)]).expect(200);
    for (n, value) in [
        "for=192.0.2.7",
        "for=6.6.6.6, For=\"192.0.2.7:80\";proto=https",
        "for=_hidden, for=192.0.2.7, for=10.0.0.1;by=10.0.0.2",
        "for=192.0.2.7, for=\"[fd00::1]:80\"",
    ]
    .into_iter()
    .enumerate()
    {
        assert_eq!(remaining(&get_with_forwarded(value), "r"), 99 - n as u64, "{value}");
    }
    // For an obfuscated client, the proxy is counted.
    assert_eq!(remaining(&get_with_forwarded("for=_hidden"), "r"), 99);
    assert_eq!(remaining(&get_with_forwarded("for=\"192.0.2.7"), "r"), 98);
    assert_eq!(remaining(&get_with_forwarded_for(&gateway, &["192.0.2.7"]), "r"), 97);
}

#[test]
fn forwarding_fields_of_untrusted_peers_are_ignored() {
    for settings in ["", "trusted_proxies = \"10.0.0.0/8\""] {
        let gateway = Gateway::start(&counted_by_ip(settings, echo()));
        for (n, client) in ["192.0.2.1", "192.0.2.2", "198.51.100.3"].into_iter().enumerate() {
            let fields = [("X-Forwarded-For", client), ("Forwarded", "for=6.6.6.6"), ("X-Real-IP", client)];
            assert_eq!(remaining(&gateway.get_with("/a", &fields).expect(200), "r"), 99 - n as u64);
        }
    }
}

#[test]
fn the_upstream_receives_the_whole_chain() {
    let fields = [
        ("Host", "inner.test"),
        ("X-Forwarded-For", "6.6.6.6, 192.0.2.7"),
        ("X-Forwarded-Proto", "https"),
        ("X-Forwarded-Host", "shop.test"),
        ("X-Forwarded-Port", "443"),
        ("X-Real-IP", "192.0.2.7"),
        ("Forwarded", "for=9.9.9.9;proto=https"),
    ];
    let forwarded_fields = |settings: &str| {
        let upstream = Upstream::always(200);
        let gateway = Gateway::start(&counted_by_ip(settings, &upstream.toml("u")));
        gateway.get_with("/a", &fields).expect(200);
        let received = upstream.only_request();
        move |name: &str| received.values(name).join(" | ")
    };
    let trusted = forwarded_fields(TRUSTED);
    assert_eq!(trusted("x-forwarded-for"), "6.6.6.6, 192.0.2.7, 127.0.0.1");
    assert_eq!((trusted("x-forwarded-proto"), trusted("x-forwarded-host")), ("https".into(), "shop.test".into()));
    assert_eq!((trusted("x-forwarded-port"), trusted("x-real-ip")), ("443".into(), "192.0.2.7".into()));
    assert_eq!(trusted("forwarded"), "");

    let trusted = forwarded_fields(&format!("{TRUSTED}\nforwarded = \"forwarded\""));
    assert_eq!(trusted("forwarded"), "for=9.9.9.9;proto=https, for=127.0.0.1;proto=https");
    assert_eq!((trusted("x-forwarded-for"), trusted("x-forwarded-proto")), ("9.9.9.9".into(), "https".into()));
    assert_eq!((trusted("x-forwarded-host"), trusted("x-real-ip")), ("inner.test".into(), String::new()));

    let untrusted = forwarded_fields("");
    assert_eq!((untrusted("x-forwarded-for"), untrusted("x-forwarded-proto")), ("127.0.0.1".into(), "http".into()));
    assert_eq!((untrusted("x-forwarded-host"), untrusted("x-forwarded-port")), ("inner.test".into(), String::new()));
    assert_eq!((untrusted("x-real-ip"), untrusted("forwarded")), (String::new(), String::new()));
}

/// As behind the load balancer of Google Cloud, which appends its own address behind that of the client.
#[test]
fn the_client_is_at_the_place_of_trusted_hops() {
    let upstream = Upstream::always(200);
    let toml = counted_by_ip("trusted_hops = 2\nforward_auth = \"127.0.0.1:0\"", &upstream.toml("u"));
    let listed = toml.replace("trusted_hops", "trusted_proxies = \"127.0.0.1\"\ntrusted_hops");
    let gateway = Gateway::start(&listed);
    let fields = |list: &'static str| {
        [
            ("X-Forwarded-For", list),
            ("X-Forwarded-Proto", "http, https, http"),
            ("X-Forwarded-Host", "forged.test, shop.test, inner.test"),
        ]
    };
    let left = |list: &'static str| remaining(&gateway.get_with("/a", &fields(list)).expect(200), "r");
    assert_eq!(left("6.6.6.6, 192.0.2.7, 203.0.113.1"), 99);
    assert_eq!(left("6.6.6.7, 192.0.2.7, 203.0.113.2"), 98);
    assert_eq!(left("192.0.2.7, 127.0.0.1"), 97);
    let received = upstream.received().pop().unwrap();
    assert_eq!(received.values("x-forwarded-proto"), ["https"]);
    assert_eq!(received.values("x-forwarded-host"), ["shop.test"]);
    assert_eq!(received.values("x-forwarded-for"), ["192.0.2.7, 127.0.0.1, 127.0.0.1"]);
    // The list is too short: the peer.
    assert_eq!((left("192.0.2.7"), left("192.0.2.8"), left("")), (99, 98, 97));
    // On `forward_auth`, the proxy that asks is trusted without being listed.
    for (toml, client) in [(&listed, "203.0.113.9"), (&toml, "203.0.113.10")] {
        let gateway = Gateway::start(toml);
        let mut proxy = Client::connect(gateway.forward_auth_addresses()[0]);
        let mut left = |list: &str| {
            let about = [("X-Forwarded-Method", "GET"), ("X-Forwarded-Uri", "/a"), ("X-Forwarded-For", list)];
            remaining(&proxy.get_with("/", &about).expect(200), "r")
        };
        assert_eq!(left(&format!("6.6.6.6, {client}, 192.0.2.1")), 99);
        assert_eq!(left(&format!("{client}, 192.0.2.2")), 98);
        // Other peers are not trusted.
        let direct = gateway.get_with("/a", &fields("6.6.6.6, 192.0.2.7, 203.0.113.1")).expect(200);
        assert_eq!(remaining(&direct, "r"), 99);
    }
}

#[test]
fn the_field_of_client_ip_names_the_client_of_trusted_proxies() {
    let upstream = Upstream::always(200);
    let proxied = |proxies: &str| {
        let settings = format!("trusted_proxies = \"{proxies}\"\nclient_ip = \"X-Real-IP\"");
        Gateway::start(&counted_by_ip(&settings, &upstream.toml("u")))
    };
    // The number of tokens left to the client, and the field that the upstream receives.
    let request = |gateway: &Gateway, values: &[&str]| {
        let fields: Vec<_> = values.iter().map(|value| ("X-Real-IP", *value)).collect();
        let forged = [("X-Forwarded-For", "6.6.6.6"), ("Connection", "X-Real-IP")];
        let left = remaining(&gateway.get_with("/a", &[&fields[..], &forged].concat()).expect(200), "r");
        (left, upstream.received().pop().unwrap().values("x-real-ip").join(" | "))
    };
    let gateway = proxied("127.0.0.1");
    assert_eq!(request(&gateway, &["192.0.2.7"]), (99, "192.0.2.7".to_owned()));
    assert_eq!(request(&gateway, &["192.0.2.7:4711"]), (98, "192.0.2.7:4711".to_owned()));
    assert_eq!(request(&gateway, &["2001:db8::7"]), (99, "2001:db8::7".to_owned()));
    // Without exactly one address: the peer.
    let others: [&[&str]; 5] = [&[], &["192.0.2.7", "192.0.2.7"], &["192.0.2.7, 192.0.2.8"], &["unknown"], &[""]];
    for (n, values) in others.into_iter().enumerate() {
        assert_eq!(request(&gateway, values), (99 - n as u64, String::new()), "{values:?}");
    }
    let untrusting = proxied("10.0.0.0/8");
    for (n, address) in ["192.0.2.7", "192.0.2.8"].into_iter().enumerate() {
        assert_eq!(request(&untrusting, &[address]), (99 - n as u64, String::new()));
    }
}

/// The file is replaced under load: first with other networks, then with a page that is no list and with nothing, then with the old
/// networks, after it was gone.
#[test]
fn a_change_of_the_file_of_networks_is_applied_unless_it_is_broken() {
    let scratch = TempDir::new();
    scratch.write("proxies.txt", "# of the provider\n127.0.0.0/8\n2001:db8::/32\n");
    let toml = format!(
        "{}[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\n\
         request_headers = {{ set = {{ x-client = \"{{client_ip}}\" }} }}\n",
        listen("trusted_proxies_file = \"proxies.txt\"")
    );
    let process = Process::spawn_command(Command::new(BINARY), &toml, scratch);
    let mut client = process.client();
    let mut seen = || {
        let response = client.get_with("/a", &[("X-Forwarded-For", "192.0.2.7")]).expect(200);
        response.json()["fields"]["x-client"].as_str().unwrap().to_owned()
    };
    assert_eq!(seen(), "192.0.2.7");
    process.replace_file("proxies.txt", "10.0.0.0/8\n");
    eventually("the peer is no trusted proxy", || seen() == "127.0.0.1");
    process.replace_file("proxies.txt", "127.0.0.0/8\n<html>503 Service Unavailable</html>\n");
    let log = process.wait_for_stderr("is not a network");
    assert!(log.contains("proxies.txt:2:1: `<html>503 Service Unavailable</html>` is not a network"), "{log}");
    process.wait_for_reloads("refused", 1);
    assert_eq!(seen(), "127.0.0.1");
    process.replace_file("proxies.txt", "");
    process.wait_for_stderr("`proxies.txt` contains no network");
    std::fs::remove_file(process.scratch.path().join("proxies.txt")).unwrap();
    // A missing file is no change; a reload by a signal needs it.
    process.signal("HUP");
    process.wait_for_stderr("cannot read `proxies.txt`");
    process.wait_for_reloads("refused", 3);
    assert_eq!(seen(), "127.0.0.1");
    process.replace_file("proxies.txt", "127.0.0.1");
    eventually("the peer is a trusted proxy", || seen() == "192.0.2.7");
}

#[test]
fn a_reload_changes_the_trusted_proxies() {
    let mut gateway = Gateway::start(&counted_by_ip("", echo()));
    assert_eq!(remaining(&get_with_forwarded_for(&gateway, &["192.0.2.1"]), "r"), 99);
    gateway.reload_and_wait(&counted_by_ip(TRUSTED, echo()));
    assert_eq!(remaining(&get_with_forwarded_for(&gateway, &["192.0.2.1"]), "r"), 99);
    assert_eq!(remaining(&get_with_forwarded_for(&gateway, &["192.0.2.1"]), "r"), 98);
}

#[test]
fn the_access_log_has_the_client_address() {
    let scratch = TempDir::new();
    let file = scratch.path().join("access.log");
    let log = format!("[access_log]\nfile = \"{}\"\n", file.display());
    let gateway = Gateway::start(&counted_by_ip(TRUSTED, &format!("{}{log}", echo())));
    get_with_forwarded_for(&gateway, &["6.6.6.6, 192.0.2.7, 10.0.0.1"]);
    let written = || std::fs::read_to_string(&file).unwrap_or_default();
    eventually("the line is logged", || written().ends_with('\n'));
    assert!(written().contains("\"client\":\"192.0.2.7\""), "{}", written());
}
