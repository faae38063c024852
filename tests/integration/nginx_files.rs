//! Files that nginx serves are identical through the gateway.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;

use crate::support::client::{Client, request};
use crate::support::compare_direct::DirectComparison;
use crate::support::external_servers::{self, ExternalServer, program};
use crate::support::gateway::Gateway;
use crate::support::{DEADLINE, TempDir};

const LARGE_BYTES: usize = 10_000_000;

/// Random bytes, in which a lost or repeated part shows.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let next = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    });
    next.take(length).collect()
}

fn fill(root: &Path) {
    fs::write(root.join("a.txt"), "a file\n").unwrap();
    fs::write(root.join("empty.txt"), "").unwrap();
    fs::write(root.join("index.html"), "<h1>front</h1>\n").unwrap();
    fs::write(root.join("with space & ü.txt"), "named oddly\n").unwrap();
    fs::write(root.join("large.bin"), noise(LARGE_BYTES)).unwrap();
    fs::create_dir(root.join("compressed")).unwrap();
    fs::write(root.join("compressed/b.txt"), "again and again ".repeat(5000)).unwrap();
    fs::create_dir(root.join("list")).unwrap();
    fs::write(root.join("list/one.txt"), "1").unwrap();
}

fn comparison() -> (ExternalServer, Gateway, DirectComparison) {
    let server = external_servers::nginx(fill);
    let toml = format!(
        "{}[rules.r]\nkey = \"ip\"\nwindows = [\"1000000/hour\", \"100000/minute\"]\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [\"r\"]\n",
        server.toml("u")
    );
    let gateway = Gateway::start(&toml);
    let comparison = DirectComparison { direct: server.address, gateway: gateway.http };
    (server, gateway, comparison)
}

#[test]
fn files_listings_and_errors_are_identical() {
    let (_server, _gateway, comparison) = comparison();
    for target in [
        "/",
        "/a.txt",
        "/a.txt?query=ignored",
        "/empty.txt",
        "/with%20space%20&%20%C3%BC.txt",
        "/large.bin",
        "/list/",
        "/list",
        "/list/../a.txt",
        "/list//one.txt",
        "/%61.txt",
        "/compressed/b.txt",
        "/nowhere",
        "/moved",
        "/empty",
        "/teapot",
    ] {
        for method in ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"] {
            comparison.assert_same_response(method, target, &[], b"");
        }
        comparison.assert_same_response("GET", target, &[("Accept-Encoding", "gzip")], b"");
    }
    let zipped = comparison.assert_same_response("GET", "/compressed/b.txt", &[("Accept-Encoding", "gzip")], b"");
    assert_eq!(zipped.field("content-encoding"), Some("gzip"));
    assert!(zipped.chunked);
}

#[test]
fn ranges_are_identical() {
    let (_server, _gateway, comparison) = comparison();
    for range in
        ["bytes=0-0", "bytes=100-199", "bytes=9999990-", "bytes=-10", "bytes=10000000-", "bytes=abc", "bytes=0-9999999"]
    {
        comparison.assert_same_response("HEAD", "/large.bin", &[("Range", range)], b"");
        comparison.assert_same_response("GET", "/large.bin", &[("Range", range)], b"");
    }
    assert_multipart_same(&comparison);
    let whole = comparison.assert_same_response("GET", "/large.bin", &[], b"").expect(200);
    assert!(whole.body == noise(LARGE_BYTES));
    let (etag, modified) = (whole.field("etag").unwrap(), whole.field("last-modified").unwrap());
    comparison.assert_same_response("GET", "/large.bin", &[("If-None-Match", etag)], b"").expect(304);
    comparison.assert_same_response("GET", "/large.bin", &[("If-Modified-Since", modified)], b"").expect(304);
    comparison.assert_same_response("GET", "/large.bin", &[("If-Match", "\"other\"")], b"").expect(412);
    comparison
        .assert_same_response("GET", "/large.bin", &[("If-Range", etag), ("Range", "bytes=5-9")], b"")
        .expect(206);
    comparison
        .assert_same_response("GET", "/large.bin", &[("If-Range", "\"other\""), ("Range", "bytes=5-9")], b"")
        .expect(200);
}

/// nginx increments the boundary between parts for each response, so the comparison replaces it.
fn assert_multipart_same(comparison: &DirectComparison) {
    let (mut direct, mut through) =
        comparison.send_to_both("GET", &request("GET", "/large.bin", &[("Range", "bytes=0-9,100-109,-5")], b""));
    for response in [&mut direct, &mut through] {
        let content_type = response.field("content-type").unwrap().to_owned();
        let boundary = content_type.strip_prefix("multipart/byteranges; boundary=").unwrap();
        assert_eq!(response.status, 206);
        assert_eq!(response.field("content-length"), Some(response.body.len().to_string().as_str()));
        response.body = response.text().replace(boundary, "BOUNDARY").into_bytes();
    }
    assert_eq!(direct.body, through.body);
}

#[test]
fn a_slowly_read_file_arrives_whole() {
    let (_server, gateway, _comparison) = comparison();
    let mut client = Client::connect(gateway.http);
    client.send(request("GET", "/large.bin", &[], b""));
    let head = client.read_head().unwrap().expect(200);
    assert_eq!(head.field("content-length"), Some("10000000"));
    // A few bytes at a time at first, so that all buffers fill up.
    let mut body = Vec::new();
    for _ in 0..2000 {
        body.extend(client.read_exactly(37));
    }
    body.extend(client.read_exactly(LARGE_BYTES - body.len()));
    assert!(body == noise(LARGE_BYTES));
}

#[test]
fn curl_receives_the_identical_file() {
    let (server, gateway, _comparison) = comparison();
    let scratch = TempDir::new();
    for (name, address) in [("direct", server.address), ("through", gateway.http)] {
        let status = Command::new(program("curl"))
            .args(["--silent", "--show-error", "--fail", "--max-time"])
            .arg(DEADLINE.as_secs().to_string())
            .arg("--output")
            .arg(scratch.path().join(name))
            .arg(format!("http://{address}/large.bin"))
            .status()
            .unwrap();
        assert!(status.success());
    }
    let read = |name| fs::read(scratch.path().join(name)).unwrap();
    assert!(read("direct") == read("through"));
    assert_eq!(read("through").len(), LARGE_BYTES);
}

#[test]
fn many_requests_on_one_connection_stay_synchronized() {
    let (_server, gateway, _comparison) = comparison();
    let mut client = gateway.client();
    let mut requests = Vec::new();
    let targets = ["/a.txt", "/empty.txt", "/nowhere", "/list/one.txt", "/compressed/b.txt", "/empty"];
    for round in 0..50 {
        requests.extend(request("GET", targets[round % targets.len()], &[], b""));
    }
    client.stream.write_all(&requests).unwrap();
    for round in 0..50 {
        let response = client.read_response();
        let (status, bytes) = [(200, 7), (200, 0), (404, 0), (200, 1), (200, 80_000), (204, 0)][round % 6];
        assert_eq!(response.status, status, "response {round}");
        assert!(status == 404 || response.body.len() == bytes, "{}", response.body.len());
    }
    client.shutdown_write();
    let mut rest = Vec::new();
    client.stream.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
}
