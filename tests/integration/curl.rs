//! curl in every version of HTTP that it supports, in cleartext and over TLS.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::TempDir;
use crate::support::external_servers::{self, ExternalServer, program};
use crate::support::tls_gateway::{TlsGateway, limited_route_to};

const MIB: usize = 1024 * 1024;

/// An option of curl, and the HTTP version that results.
struct Transport {
    name: &'static str,
    is_tls: bool,
    option: &'static str,
    version: &'static str,
}

const TRANSPORTS: [Transport; 7] = [
    Transport { name: "1.0", is_tls: false, option: "--http1.0", version: "1.0" },
    Transport { name: "1.1", is_tls: false, option: "--http1.1", version: "1.1" },
    // The gateway does not accept an h2c upgrade from HTTP/1.1, because later streams could bypass the rules.
    Transport { name: "2, offered", is_tls: false, option: "--http2", version: "1.1" },
    Transport { name: "2, prior knowledge", is_tls: false, option: "--http2-prior-knowledge", version: "2" },
    Transport { name: "TLS, 1.0", is_tls: true, option: "--http1.0", version: "1.0" },
    Transport { name: "TLS, 1.1", is_tls: true, option: "--http1.1", version: "1.1" },
    Transport { name: "TLS, 2", is_tls: true, option: "--http2", version: "2" },
];

impl Transport {
    /// Fetches one target after the other, on one connection if curl can.
    #[track_caller]
    fn curl(&self, tls_gateway: &TlsGateway, options: &[&str], targets: &[&str]) -> Vec<CurlResponse> {
        // The curl of Debian 12 aborts the second request on such a connection, with any server.
        if self.option == "--http2-prior-knowledge" {
            return targets.iter().flat_map(|target| self.run(tls_gateway, options, &[target])).collect();
        }
        self.run(tls_gateway, options, targets)
    }

    /// Runs curl; fails if curl reports an error.
    #[track_caller]
    fn run(&self, tls_gateway: &TlsGateway, options: &[&str], targets: &[&str]) -> Vec<CurlResponse> {
        let scratch = TempDir::new();
        let base =
            if self.is_tls { format!("https://{}", tls_gateway.tls) } else { format!("http://{}", tls_gateway.plain) };
        let mut command = Command::new(program("curl"));
        command.args(["--silent", "--show-error", "--max-time", "60", "--noproxy", "*", self.option]);
        command.arg("--cacert").arg(&tls_gateway.authority.ca).args(["--write-out", "%{http_version} %{http_code}\\n"]);
        command.args(options);
        let body = |number: usize| scratch.path().join(number.to_string());
        for (number, target) in targets.iter().enumerate() {
            command.arg("--output").arg(body(number)).arg(format!("{base}{target}"));
        }
        let output = command.stdin(Stdio::null()).output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {}: {stdout}{stderr}", self.name, output.status);
        let responses: Vec<CurlResponse> =
            stdout.lines().enumerate().map(|(n, line)| CurlResponse::read(line, &body(n))).collect();
        assert_eq!(responses.len(), targets.len(), "{}: {stdout}", self.name);
        responses.iter().for_each(|response| assert_eq!(response.version, self.version, "{}", self.name));
        responses
    }
}

struct CurlResponse {
    version: String,
    status: u16,
    body: Vec<u8>,
}

impl CurlResponse {
    fn read(line: &str, body: &Path) -> CurlResponse {
        let (version, status) = line.split_once(' ').unwrap();
        // Some releases of curl print HTTP/1.0 as `1`.
        let version = if version == "1" { "1.0" } else { version };
        // curl writes no file for an empty body.
        let body = std::fs::read(body).unwrap_or_default();
        CurlResponse { version: version.to_owned(), status: status.parse().unwrap(), body }
    }

    #[track_caller]
    fn expect(&self, status: u16) -> &CurlResponse {
        assert_eq!(self.status, status, "{}", String::from_utf8_lossy(&self.body));
        self
    }
}

/// Bytes in which a lost or repeated part shows.
fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|position| (position % 251) as u8 ^ (position / 65_521) as u8).collect()
}

fn files() -> (ExternalServer, TlsGateway) {
    let nginx = external_servers::nginx(|root| {
        std::fs::write(root.join("a.txt"), "small\n").unwrap();
        std::fs::write(root.join("large.bin"), pattern(10 * MIB)).unwrap();
    });
    let tls_gateway = TlsGateway::start(&limited_route_to(&nginx.toml("u"), false));
    (nginx, tls_gateway)
}

#[test]
fn files_of_every_size_arrive_in_every_http_version() {
    let (_nginx, tls_gateway) = files();
    for transport in TRANSPORTS {
        let responses = transport.curl(&tls_gateway, &[], &["/a.txt", "/large.bin", "/empty", "/nowhere", "/a.txt"]);
        let [small, large, empty, nowhere, again] = responses.as_slice() else { panic!() };
        assert_eq!(small.expect(200).body, b"small\n", "{}", transport.name);
        assert!(large.expect(200).body == pattern(10 * MIB), "{}", transport.name);
        assert_eq!(empty.expect(204).body, b"", "{}", transport.name);
        nowhere.expect(404);
        assert_eq!(again.expect(200).body, b"small\n", "{}", transport.name);
    }
}

#[test]
fn head_and_range_requests_work_in_every_http_version() {
    let (_nginx, tls_gateway) = files();
    for transport in TRANSPORTS {
        let head = transport.curl(&tls_gateway, &["--head"], &["/large.bin"]);
        let fields = String::from_utf8_lossy(&head[0].expect(200).body).to_lowercase();
        assert!(fields.contains(&format!("content-length: {}", 10 * MIB)), "{}: {fields}", transport.name);
        let range = transport.curl(&tls_gateway, &["--range", "1000-1999"], &["/large.bin"]);
        assert!(range[0].expect(206).body == pattern(2000)[1000..], "{}", transport.name);
    }
}

#[test]
fn uploads_arrive_whole_in_every_http_version() {
    let httpbin = external_servers::httpbin();
    let tls_gateway = TlsGateway::start(&limited_route_to(&httpbin.toml("u"), false));
    let scratch = TempDir::new();
    let text: String = (0..MIB / 2).map(|position| char::from(b'a' + (position % 23) as u8)).collect();
    let file = scratch.write("upload.txt", &text);
    let file = file.display().to_string();
    let data = format!("@{file}");
    for transport in TRANSPORTS {
        let kind = "Content-Type: text/plain";
        let mut uploads = vec![vec!["--header", kind, "--data-binary", data.as_str()]];
        if transport.option != "--http1.0" {
            // Without a length, which HTTP/1.0 cannot express.
            let chunked = ["--header", kind, "--header", "Transfer-Encoding: chunked", "--upload-file", file.as_str()];
            uploads.push(chunked.to_vec());
        }
        for options in uploads {
            let response = transport.curl(&tls_gateway, &options, &["/anything"]);
            let echoed: serde_json::Value = serde_json::from_slice(&response[0].expect(200).body).unwrap();
            assert!(echoed["data"] == text.as_str(), "{}: {options:?}", transport.name);
        }
    }
}

/// A client that is refused during its upload must receive the response, and not a connection error.
#[test]
fn a_refused_upload_always_receives_the_response() {
    let tls_gateway = TlsGateway::start(&limited_route_to("[upstreams.u]\nbuiltin = \"echo\"\n", true));
    let scratch = TempDir::new();
    tls_gateway.gateway.get("/").expect(200);
    for length in [200_000, 20_000_000] {
        let file = scratch.write("upload.bin", pattern(length));
        let data = format!("@{}", file.display());
        for transport in TRANSPORTS {
            for expect in ["Expect:", "Expect: 100-continue"] {
                for attempt in 0..if expect == "Expect:" { 8 } else { 2 } {
                    let options = ["--data-binary", data.as_str(), "--header", expect];
                    let response = transport.curl(&tls_gateway, &options, &["/a"]);
                    assert_eq!(response[0].status, 429, "{}, {length} bytes, turn {attempt}", transport.name);
                }
            }
        }
    }
}
