//! `transom simulate` on the same hour of traffic in each format: the decisions are the same.
//!
//! Each writer follows the documentation of its product, whose page `formats.rs` of the crate names beside the format.

use std::collections::HashMap;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::support::TempDir;
use crate::support::process::BINARY;

const CONFIGURATION: &str = r#"
listen = { http = "127.0.0.1:0", trusted_proxies = ["10.0.0.0/8"] }

[upstreams.u]
builtin = "echo"

[rules.per-client]
key     = "ip"
windows = ["3/minute", "25/hour"]
[rules.per-agent]
key            = "header:user-agent"
windows        = ["9/minute"]
on_missing_key = "skip"
[rules.per-host]
key     = "host"
windows = ["11/minute"]
[rules.per-path]
key     = ["path", "method"]
windows = ["8/minute"]
[rules.per-query]
key            = "query:q"
windows        = ["4/minute"]
on_missing_key = "skip"
[rules.failures]
key        = "ip"
windows    = ["2/minute"]
count_when = { status = [404] }
[rules.in-flight]
key        = "ip"
concurrent = 1

[[routes]]
path     = "/{*rest}"
upstream = "u"
rules    = ["per-client", "per-agent", "per-host", "per-path", "per-query", "failures", "in-flight"]
"#;

/// The start of the hour, 2023-10-10T20:00:00Z, in seconds.
const START: u64 = 1_696_968_000;
const PROXY: &str = "10.0.0.9";

/// A request, in whole seconds, because some formats have no smaller unit.
struct Request {
    start: u64,
    seconds: u64,
    client: String,
    method: &'static str,
    path: String,
    query: Option<String>,
    status: u16,
    agent: &'static str,
    host: &'static str,
}

/// What a format logs, beside time, client, method, path, query and status.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Has {
    durations: bool,
    agents: bool,
    hosts: bool,
}

const ALL: Has = Has { durations: true, agents: true, hosts: true };
const NO_HOSTS: Has = Has { hosts: false, ..ALL };
const COMBINED: Has = Has { durations: false, agents: true, hosts: false };

/// A way to write a log.
struct Writer {
    /// For `--format`.
    format: &'static str,
    /// Whether `auto` finds it.
    is_found: bool,
    has: Has,
    head: &'static str,
    line: fn(&Request) -> String,
}

const fn writer(format: &'static str, has: Has, line: fn(&Request) -> String) -> Writer {
    Writer { format, is_found: true, has, head: "", line }
}

const CLOUDFRONT_HEAD: &str = "#Version: 1.0\n#Fields: date time x-edge-location sc-bytes c-ip cs-method cs(Host) \
    cs-uri-stem sc-status cs(Referer) cs(User-Agent) cs-uri-query cs(Cookie) x-edge-result-type x-edge-request-id \
    x-host-header cs-protocol cs-bytes time-taken x-forwarded-for ssl-protocol ssl-cipher x-edge-response-result-type \
    cs-protocol-version fle-status fle-encrypted-fields c-port time-to-first-byte x-edge-detailed-result-type \
    sc-content-type sc-content-len sc-range-start sc-range-end\n";
const IIS_HEAD: &str = "#Software: Microsoft Internet Information Services 10.0\n#Version: 1.0\n\
    #Date: 2023-10-10 20:00:00\n#Fields: date time s-ip cs-method cs-uri-stem cs-uri-query s-port cs-username c-ip \
    cs(User-Agent) cs(Referer) cs-host sc-status sc-substatus sc-win32-status time-taken X-Forwarded-For\n";

/// `log_format`s that `--format nginx.conf:NAME` names.
const NGINX_CONF: &str = r#"
http {
    log_format timed '$remote_addr [$time_iso8601] $http_host "$request_method $scheme $request_uri" $status '
                     '$request_time $upstream_addr "$http_user_agent" $http_x_forwarded_for';
    log_format object escape=json '{"at":$msec,"peer":"$remote_addr","line":"$request","code":$status,'
        '"for":"$http_x_forwarded_for","agent":"$http_user_agent","site":"$host","taken":$request_time}';
}
"#;

const WRITERS: [Writer; 25] = [
    writer("transom", ALL, |r| transom(r, ALL)),
    writer("caddy", ALL, |r| {
        let headers = json!({ "User-Agent": [r.agent] });
        json!({
            "level": "info", "ts": r.end() as f64, "logger": "http.log.access", "msg": "handled request",
            "request": { "remote_ip": PROXY, "client_ip": r.client, "proto": "HTTP/1.1", "method": r.method,
                         "host": r.host, "uri": r.target(), "headers": headers },
            "bytes_read": 0, "duration": r.seconds as f64, "size": 12, "status": r.status, "resp_headers": {}
        })
        .to_string()
    }),
    writer("cloudflare", ALL, |r| {
        json!({
            "ClientIP": r.client, "ClientRequestHost": r.host, "ClientRequestMethod": r.method,
            "ClientRequestURI": r.target(), "ClientRequestUserAgent": r.agent, "EdgeResponseStatus": r.status,
            "EdgeStartTimestamp": r.start * 1_000_000_000, "EdgeEndTimestamp": r.end() * 1_000_000_000,
            "EdgeResponseBytes": 12, "RayID": "814b3d1a2f0c0f1e"
        })
        .to_string()
    }),
    writer("traefik", ALL, |r| {
        json!({
            "ClientAddr": format!("{}:41000", bracketed(&r.client)), "ClientHost": r.client, "DownstreamStatus": r.status,
            "Duration": r.seconds * 1_000_000_000, "RequestHost": r.host, "RequestMethod": r.method,
            "RequestPath": r.target(), "RequestProtocol": "HTTP/1.1", "StartUTC": rfc3339(r.start),
            "request_User-Agent": r.agent, "level": "info", "msg": "", "time": rfc3339(r.end())
        })
        .to_string()
    }),
    writer("traefik", NO_HOSTS, |r| {
        format!(
            "{} - - [{}] \"{} {} HTTP/1.1\" {} 12 \"-\" \"{}\" 7 \"web@docker\" \"http://10.1.0.1:80\" {}ms",
            r.client,
            common(r.start),
            r.method,
            r.target(),
            r.status,
            r.agent,
            r.seconds * 1000
        )
    }),
    writer("envoy", ALL, |r| {
        format!(
            "[{}] \"{} {} HTTP/1.1\" {} - 0 12 {} 1 \"{}, {PROXY}\" \"{}\" \"c3-id\" \"{}\" \"10.1.0.1:80\"",
            rfc3339(r.start),
            r.method,
            r.target(),
            r.status,
            r.seconds * 1000,
            r.client,
            r.agent,
            r.host
        )
    }),
    writer("envoy", ALL, |r| {
        format!(
            "[{}] \"{} {} HTTP/1.1\" {} - via_upstream - \"-\" 0 12 {} 1 \"{}\" \"{}\" \"c3-id\" \"{}\" \"10.1.0.1:80\" \
             inbound|80|| 127.0.0.6:1 10.1.0.1:80 {PROXY}:41000 - default",
            rfc3339(r.start),
            r.method,
            r.target(),
            r.status,
            r.seconds * 1000,
            r.client,
            r.agent,
            r.host
        )
    }),
    writer("envoy", ALL, |r| {
        json!({
            "authority": r.host, "bytes_sent": 12, "downstream_remote_address": format!("{PROXY}:41000"),
            "duration": r.seconds * 1000, "method": r.method, "path": r.target(), "response_code": r.status,
            "start_time": rfc3339(r.start), "user_agent": r.agent, "x_forwarded_for": r.client
        })
        .to_string()
    }),
    // Envoy Gateway, whose text is an object of JSON with strings.
    writer("envoy", ALL, |r| {
        format!(
            "{{\"start_time\":\"{}\",\"method\":\"{}\",\"x-envoy-origin-path\":\"{}\",\"protocol\":\"HTTP/1.1\",\
             \"response_code\":\"{}\",\"response_flags\":\"-\",\"bytes_received\":\"0\",\"bytes_sent\":\"12\",\
             \"duration\":\"{}\",\"x-forwarded-for\":\"{}\",\"user-agent\":\"{}\",\":authority\":\"{}\",\
             \"downstream_remote_address\":\"{PROXY}:41000\",\"route_name\":\"r\"}}",
            rfc3339(r.start),
            r.method,
            r.target(),
            r.status,
            r.seconds * 1000,
            r.client,
            r.agent,
            r.host
        )
    }),
    writer("combined", COMBINED, |r| combined(r, &r.client, "")),
    writer("nginx", COMBINED, |r| combined(r, PROXY, &format!(" \"{}\"", r.client))),
    writer("common", Has { agents: false, ..COMBINED }, |r| {
        let line = combined(r, &r.client, "");
        line[..line.find(" \"-\" ").unwrap()].to_owned()
    }),
    writer("apache", Has { hosts: true, ..COMBINED }, |r| format!("{}:80 {}", r.host, combined(r, &r.client, ""))),
    writer("ingress-nginx", NO_HOSTS, |r| {
        format!(
            "{} {} {}.000 [default-web-80] [] 10.1.0.1:80, 10.1.0.2:80 0, 12 0.000, 1.000 502, {} 5f0c",
            nginx(r, &format!("{} - -", r.client)),
            r.target().len() + 90,
            r.seconds,
            r.status
        )
    }),
    writer("ingress-nginx", NO_HOSTS, |r| {
        format!(
            "{} {} {}.000 [default-web-80] 10.1.0.1:80 12 1.000 {}",
            nginx(r, &format!("{PROXY} - [{}, {PROXY}] - -", r.client)),
            90,
            r.seconds,
            r.status
        )
    }),
    writer("apisix", ALL, |r| {
        let line = nginx(r, &format!("{} - -", r.client));
        let (before, after) = line.split_once("] \"").unwrap();
        let (request, rest) = after.split_once(" 12 ").unwrap();
        format!(
            "{before}] {} \"{request} 12 {}.000 {rest} 10.1.0.1:80 {} 0.100 \"http://{}\"",
            r.host, r.seconds, r.status, r.host
        )
    }),
    writer("haproxy", Has { agents: false, ..NO_HOSTS }, |r| {
        format!(
            "{}:41000 [{}.000] http-in static/srv1 10/0/30/69/{} {} 2750 - - ---- 1/1/1/1/0 0/0 {{a b|1wt.eu}} {{}} \
             \"{} {} HTTP/1.1\"",
            r.client,
            &common(r.start)[..20],
            r.seconds * 1000,
            r.status,
            r.method,
            r.target()
        )
    }),
    writer("haproxy", Has { agents: false, ..NO_HOSTS }, |r| {
        format!(
            "{} - - [{}] \"{} {} HTTP/1.1\" {} 2750 \"\" \"\" 41000 0 \"http-in\" \"static\" \"srv1\" 10 0 30 69 {} \"----\" 1 1 \
             1 1 0 0 0 \"\" \"\"",
            r.client,
            common(r.start),
            r.method,
            r.target(),
            r.status,
            r.seconds * 1000
        )
    }),
    writer("alb", ALL, |r| {
        format!(
            "http {}.000000Z app/lb/50dc6c495c0c9188 {}:41000 10.1.0.1:80 0.000 {}.000 0.000 {} {} 34 366 \"{} \
             http://{}:80{} HTTP/1.1\" \"{}\" - - arn:aws:e:targetgroup/t/73e2d6bc24d8a067 \"Root=1-58337262\" \"-\" \"-\" 0 \
             {}.000000Z \"forward\" \"-\" \"-\" \"10.1.0.1:80\" \"200\" \"-\" \"-\" TID_1234",
            day_and_time(r.end(), "T"),
            r.client,
            r.seconds,
            r.status,
            r.status,
            r.method,
            r.host,
            r.target(),
            r.agent,
            day_and_time(r.start, "T")
        )
    }),
    writer("elb", Has { durations: false, ..ALL }, |r| {
        format!(
            "{}.000000Z lb {}:41000 10.1.0.1:80 0.000073 0.001048 0.000057 {} {} 0 29 \"{} http://{}:80{} HTTP/1.1\" \"{}\" - -",
            day_and_time(r.start, "T"),
            r.client,
            r.status,
            r.status,
            r.method,
            r.host,
            r.target(),
            r.agent
        )
    }),
    writer("s3", NO_HOSTS, |r| {
        format!(
            "79a59df900b949e55d96a1e698fbaced bucket [{}] {} - 3E57427F3EXAMPLE REST.GET.OBJECT a%2520b \"{} {} HTTP/1.1\" {} \
             - 113 - {} 6 \"-\" \"{}\" - s9lzHYrFp76ZVxRcpX9+5c= SigV4 ECDHE-RSA AuthHeader b.s3.amazonaws.com TLSv1.2 - -",
            common(r.start),
            r.client,
            r.method,
            r.target(),
            r.status,
            r.seconds * 1000,
            r.agent
        )
    }),
    Writer {
        head: CLOUDFRONT_HEAD,
        ..writer("cloudfront", ALL, |r| {
            let query = r.query.as_ref().map_or("-".to_owned(), |query| query.replace('%', "%25"));
            format!(
                "{}\tLHR62-C5\t12\t{PROXY}\t{}\td1.cloudfront.net\t{}\t{}\t-\t{}\t{query}\t-\tMiss\tid==\t{}\thttp\t90\t{}.000\t{}\t-\t\
                 -\tMiss\tHTTP/1.1\t-\t-\t41000\t0.001\tMiss\ttext/html\t12\t-\t-",
                day_and_time(r.end(), "\t"),
                r.method,
                r.path,
                r.status,
                r.agent.replace('%', "%25").replace(' ', "%20"),
                r.host,
                r.seconds,
                r.client
            )
        })
    },
    Writer {
        head: IIS_HEAD,
        ..writer("iis", ALL, |r| {
            format!(
                "{} 10.1.0.1 {} {} {} 80 - {PROXY} {} - {} {} 0 0 {} {}",
                day_and_time(r.end(), " "),
                r.method,
                r.path,
                r.query.as_deref().unwrap_or("-"),
                r.agent.replace(' ', "+"),
                r.host,
                r.status,
                r.seconds * 1000,
                r.client
            )
        })
    },
    Writer {
        is_found: false,
        ..writer("nginx.conf:timed", ALL, |r| {
            format!(
                "{PROXY} [{}] {} \"{} http {}\" {} {}.000 10.1.0.1:80, 10.1.0.2:80 : 10.1.0.3:80 \"{}\" 8.8.8.8, {}",
                rfc3339(r.end()).replace('Z', "+00:00"),
                r.host,
                r.method,
                r.target(),
                r.status,
                r.seconds,
                r.agent,
                r.client
            )
        })
    },
    Writer {
        is_found: false,
        ..writer("nginx.conf:object", ALL, |r| {
            let agent = r.agent.replace('"', "\\\"");
            format!(
                "{{\"at\":{}.000,\"peer\":\"{PROXY}\",\"line\":\"{} {} HTTP/1.1\",\"code\":{},\"for\":\"{}\",\
                 \"agent\":\"{agent}\",\"site\":\"{}\",\"taken\":{}.000}}",
                r.end(),
                r.method,
                r.target(),
                r.status,
                r.client,
                r.host,
                r.seconds
            )
        })
    },
];

impl Request {
    fn end(&self) -> u64 {
        self.start + self.seconds
    }

    fn target(&self) -> String {
        self.query.as_ref().map_or_else(|| self.path.clone(), |query| format!("{}?{query}", self.path))
    }
}

fn bracketed(address: &str) -> String {
    if address.contains(':') { format!("[{address}]") } else { address.to_owned() }
}

/// `2023-10-10 20:00:00`.
fn day_and_time(seconds: u64, between: &str) -> String {
    let second = seconds - START;
    format!("2023-10-10{between}{:02}:{:02}:{:02}", 20 + second / 3600, second / 60 % 60, second % 60)
}

fn rfc3339(seconds: u64) -> String {
    format!("{}.000Z", day_and_time(seconds, "T"))
}

/// `10/Oct/2023:20:00:00 +0000`.
fn common(seconds: u64) -> String {
    format!("10/Oct/2023:{} +0000", &day_and_time(seconds, "T")[11..])
}

/// The log of this gateway, with what another format has.
fn transom(r: &Request, has: Has) -> String {
    let mut line = json!({
        "time": rfc3339(r.start), "method": r.method, "path": r.path, "client": r.client, "status": r.status
    });
    let fields = [
        ("query", r.query.clone().map(Value::from)),
        ("duration_ms", has.durations.then(|| json!(r.seconds as f64 * 1000.0))),
        ("user_agent", has.agents.then(|| json!(r.agent))),
        ("host", has.hosts.then(|| json!(r.host))),
    ];
    for (name, value) in fields.into_iter().filter_map(|(name, value)| Some((name, value?))) {
        line[name] = value;
    }
    line.to_string()
}

/// The combined format, at the start of the request, because there is no duration.
fn combined(r: &Request, client: &str, end: &str) -> String {
    format!(
        "{client} - - [{}] \"{} {} HTTP/1.1\" {} 12 \"-\" \"{}\"{end}",
        common(r.start),
        r.method,
        r.target(),
        r.status,
        r.agent
    )
}

/// The beginning of most formats of nginx, which logs a request at its end.
fn nginx(r: &Request, client: &str) -> String {
    format!(
        "{client} [{}] \"{} {} HTTP/1.1\" {} 12 \"-\" \"{}\"",
        common(r.end()),
        r.method,
        r.target(),
        r.status,
        r.agent
    )
}

fn traffic() -> Vec<Request> {
    let mut random = fastrand::Rng::with_seed(37);
    let agents = ["curl/8.5.0", "Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101", "100% of it", "-x-"];
    let mut requests: Vec<Request> = (0..300)
        .map(|_| {
            let client = random.u8(1..9);
            Request {
                start: START + random.u64(..3590) / 4 * 4 % 900 + random.u64(..2) * 1800,
                seconds: random.u64(..4),
                client: if client == 8 { "2001:db8::7".to_owned() } else { format!("198.51.100.{client}") },
                method: ["GET", "POST"][random.usize(..2)],
                path: format!("/items/{}", random.u8(..5)),
                query: random.bool().then(|| format!("q={}&r=a%20b", random.u8(..3))),
                status: [200, 404][random.usize(..2)],
                agent: agents[random.usize(..agents.len())],
                host: ["api.example.com", "www.example.com"][random.usize(..2)],
            }
        })
        .collect();
    requests.sort_by_key(|request| request.start);
    requests
}

/// The numbers of a report. Digests of secret keys differ from run to run.
fn numbers(directory: &TempDir, arguments: &[&str]) -> String {
    let output = Command::new(BINARY)
        .args(["simulate", "--json"])
        .args(arguments)
        .current_dir(directory.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let mut report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["scenarios"][0]["refused"].as_u64() > Some(20), "{arguments:?}");
    for rule in report["scenarios"][0]["rules"].as_array_mut().unwrap() {
        if ["per-agent", "per-query"].contains(&rule["rule"].as_str().unwrap()) {
            rule["busiest"] = Value::Null;
            rule["most_refused"] = Value::Null;
        }
    }
    format!("{}\n{:#}\n{}", report["lines"], report["scenarios"], report["bad_lines"])
}

fn directory() -> TempDir {
    let directory = TempDir::new();
    directory.write("gateway.toml", CONFIGURATION);
    directory.write("nginx.conf", NGINX_CONF);
    directory
}

/// The log of one writer, by lines.
fn lines(writer: &Writer, requests: &[Request]) -> Vec<String> {
    writer.head.lines().map(str::to_owned).chain(requests.iter().map(writer.line)).collect()
}

#[test]
fn the_same_traffic_in_each_format_gives_the_same_simulation() {
    let (directory, requests) = (directory(), traffic());
    let mut references = HashMap::new();
    let mut failed = Vec::new();
    for (position, writer) in WRITERS.iter().enumerate() {
        let reference = references.entry(writer.has).or_insert_with(|| {
            let text: Vec<String> = requests.iter().map(|request| transom(request, writer.has)).collect();
            directory.write("reference.log", text.join("\n"));
            numbers(&directory, &["reference.log"])
        });
        directory.write("access.log", lines(writer, &requests).join("\n") + "\n");
        let mut runs = vec![vec!["--format", writer.format, "access.log"]];
        if writer.is_found {
            runs.push(vec!["access.log"]);
        }
        for arguments in runs {
            let found = numbers(&directory, &arguments);
            if found != *reference {
                failed.push(format!("{position} {arguments:?}: {}", first_difference(&found, reference)));
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn the_same_traffic_in_each_wrapper_gives_the_same_simulation() {
    let (directory, requests) = (directory(), traffic());
    type Wrapper = fn(&str) -> String;
    let wrappers: [Wrapper; 5] = [
        |line| json!({ "log": format!("{line}\n"), "stream": "stdout", "time": "2024-01-01T00:00:00Z" }).to_string(),
        |line| format!("2024-01-01T00:00:00.669794202Z stdout F {line}"),
        |line| format!("<134>Jan  1 00:00:00 host app[14389]: {line}"),
        |line| format!("<134>1 2024-01-01T00:00:00.003Z host app 1 ID47 [a@1 b=\"c\\\"]\"] {line}"),
        |line| format!("2024-01-01T00:00:00.669794202Z stdout F Jan  1 00:00:00 host app[14389]: {line}"),
    ];
    // Each with most formats, and the first format with each.
    for (position, writer) in WRITERS.iter().enumerate().filter(|(_, writer)| writer.is_found) {
        let lines = lines(writer, &requests);
        directory.write("plain.log", lines.join("\n"));
        let expected = numbers(&directory, &["plain.log"]);
        let chosen = if position == 0 { 0..wrappers.len() } else { position % 5..position % 5 + 1 };
        for wrapper in &wrappers[chosen] {
            // Docker keeps the key `log` first.
            let text: Vec<String> = lines.iter().map(|line| wrapper(line)).collect();
            directory.write("wrapped.log", text.join("\n"));
            let found = numbers(&directory, &["wrapped.log"]);
            assert!(found == expected, "{} in {}: {}", writer.format, text[0], first_difference(&found, &expected));
        }
    }
}

#[test]
fn malformed_and_mixed_lines_are_counted_and_shown() {
    let (directory, requests) = (directory(), traffic());
    for writer in WRITERS.iter().filter(|writer| writer.is_found) {
        let mut lines = lines(writer, &requests[..40]);
        let last = lines.last().unwrap().clone();
        let count = lines.len() - writer.head.lines().count();
        // Cut off within the first half, without a client, and of no format.
        lines.extend([
            last[..last.len() / 3].to_owned(),
            last.replace(&requests[39].client, "x"),
            "starting".to_owned(),
        ]);
        directory.write("access.log", lines.join("\n"));
        let output = Command::new(BINARY)
            .args(["simulate", "--json", "access.log"])
            .current_dir(directory.path())
            .output()
            .unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let bad = report["bad_lines"].as_array().unwrap();
        assert_eq!(report["lines"]["total"], count + 3, "{}", writer.format);
        assert!(bad.len() >= 2, "{}: {bad:?}", writer.format);
        assert!(report["first"].as_str().unwrap().starts_with("2023-10-10T20:0"), "{}: {report}", writer.format);
        assert!(report["last"].as_str().unwrap().starts_with("2023-10-10T2"), "{}: {report}", writer.format);
    }
}

#[test]
fn each_format_is_in_the_documentation() {
    let reference = include_str!("../../docs/reference/cli.md");
    for format in &transom_simulate::formats::FORMATS {
        assert!(reference.contains(&format!("`{}`", format.name)), "{}", format.name);
        let is_written = WRITERS.iter().any(|writer| writer.format == format.name);
        assert!(is_written || format.name == "json", "{}", format.name);
    }
}

fn first_difference(found: &str, expected: &str) -> String {
    let mut pairs = found.lines().zip(expected.lines());
    let pair = pairs.find(|(found, expected)| found != expected);
    pair.map_or(String::new(), |(found, expected)| format!("{found}, and not {expected}"))
}
