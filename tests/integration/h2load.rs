//! h2load: many concurrent streams on few connections, in cleartext and over TLS.

use std::process::{Command, Stdio};

use crate::support::TempDir;
use crate::support::external_servers::{self, program};
use crate::support::tls_gateway::{TlsGateway, limited_route_to};

const REQUESTS: usize = 4000;

/// The number of responses of each class, 2xx to 5xx. Every request must have been answered.
#[track_caller]
fn run_h2load(options: &[&str], url: &str) -> [usize; 4] {
    let output = Command::new(program("timeout"))
        .args([
            "120",
            "h2load",
            "--requests",
            &REQUESTS.to_string(),
            "--clients",
            "8",
            "--max-concurrent-streams",
            "32",
        ])
        .args(options)
        .arg(url)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{options:?}: {stdout}{}", String::from_utf8_lossy(&output.stderr));
    // `requests: 4000 total, 4000 started, 4000 done, 4000 succeeded, 0 failed, 0 errored, 0 timeout`
    let requests = numbers(&stdout, "requests: ");
    assert_eq!((requests[2], requests[5], requests[6]), (REQUESTS, 0, 0), "{options:?}: {stdout}");
    // `status codes: 4000 2xx, 0 3xx, 0 4xx, 0 5xx`
    let classes = numbers(&stdout, "status codes: ");
    [classes[0], classes[1], classes[2], classes[3]]
}

/// The numbers of the line with this beginning.
fn numbers(stdout: &str, beginning: &str) -> Vec<usize> {
    let line = stdout.lines().find_map(|line| line.strip_prefix(beginning)).unwrap_or_else(|| panic!("{stdout}"));
    line.split(", ").map(|part| part.split(' ').next().unwrap().parse().unwrap()).collect()
}

/// Options and URLs: HTTP/2 by prior knowledge and by ALPN, and HTTP/1.1.
fn targets(tls_gateway: &TlsGateway) -> [(Vec<&'static str>, String); 4] {
    let (plain, tls) = (format!("http://{}/a.txt", tls_gateway.plain), format!("https://{}/a.txt", tls_gateway.tls));
    [(vec![], plain.clone()), (vec![], tls.clone()), (vec!["--h1"], plain), (vec!["--h1"], tls)]
}

#[test]
fn every_request_is_forwarded() {
    let nginx = external_servers::nginx(|root| std::fs::write(root.join("a.txt"), "small\n").unwrap());
    let tls_gateway = TlsGateway::start(&limited_route_to(&nginx.toml("u"), false));
    for (options, url) in targets(&tls_gateway) {
        assert_eq!(run_h2load(&options, &url), [REQUESTS, 0, 0, 0], "{options:?} {url}");
    }
}

#[test]
fn every_request_with_a_body_is_forwarded() {
    let scratch = TempDir::new();
    let data = scratch.write("data", vec![b'x'; 30_000]).display().to_string();
    let tls_gateway = TlsGateway::start(&limited_route_to("[upstreams.u]\nbuiltin = \"echo\"\n", false));
    for (mut options, url) in targets(&tls_gateway) {
        options.push("--data");
        let options = [options.as_slice(), &[data.as_str()]].concat();
        assert_eq!(run_h2load(&options, &url), [REQUESTS, 0, 0, 0], "{options:?} {url}");
    }
}

#[test]
fn every_request_beyond_the_limit_is_refused() {
    let tls_gateway = TlsGateway::start(&limited_route_to("[upstreams.u]\nbuiltin = \"echo\"\n", true));
    for (index, (options, url)) in targets(&tls_gateway).into_iter().enumerate() {
        let admitted = usize::from(index == 0);
        assert_eq!(run_h2load(&options, &url), [admitted, 0, REQUESTS - admitted, 0], "{options:?} {url}");
    }
}
