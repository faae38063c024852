//! Checks the properties of the fuzz targets for a fixed set of inputs: the seeds of `fuzz/seeds`, mutated by a generator with a
//! fixed seed. `make fuzz` searches further, from the same seeds.

#[path = "../fuzz/properties/client_request.rs"]
mod client_request;
#[path = "../fuzz/properties/configuration.rs"]
mod configuration;
#[path = "../fuzz/properties/counters_file.rs"]
mod counters_file;
#[path = "../fuzz/properties/forwarded.rs"]
mod forwarded;
#[path = "../fuzz/properties/path.rs"]
mod path;
#[path = "../fuzz/properties/proxy_protocol.rs"]
mod proxy_protocol;
#[path = "../fuzz/properties/upstream_response.rs"]
mod upstream_response;
#[path = "../fuzz/properties/usage.rs"]
mod usage;

use std::fs;
use std::path::Path;

use fastrand::Rng;
use transom::persistence::file_header::Header;
use transom_limiter::counter::CounterWord;
use transom_limiter::key::Seed;
use transom_limiter::table::Table;
use transom_limiter::window::END_MAX_MS;
use transom_usage::json_scanner::DEPTH_MAX;

/// The committed seeds of a fuzz target, in the order of their names.
fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(target);
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.into_iter().map(|file| fs::read(file).unwrap()).collect()
}

/// Checks a property for every seed and `rounds` mutations: bytes replaced, removed, repeated, or taken from another seed or
/// from `pieces`.
fn check_property<T: AsRef<[u8]>>(property: fn(&[u8]), seeds: &[T], pieces: &[&str], rounds: usize) {
    let mut rng = Rng::with_seed(1711);
    for seed in seeds {
        property(seed.as_ref());
    }
    for _ in 0..rounds {
        let mut bytes = seeds[rng.usize(..seeds.len())].as_ref().to_vec();
        for _ in 0..rng.usize(1..6) {
            let at = rng.usize(..=bytes.len());
            let end = (at + rng.usize(..8)).min(bytes.len());
            match rng.u8(..5) {
                0 if at < bytes.len() => bytes[at] = rng.u8(..),
                1 => drop(bytes.drain(at..end)),
                2 => {
                    let again = bytes[at..end].to_vec();
                    bytes.splice(at..at, again);
                }
                3 => {
                    let other = seeds[rng.usize(..seeds.len())].as_ref();
                    bytes.splice(at..end, other[rng.usize(..=other.len())..].iter().copied());
                }
                _ => drop(bytes.splice(at..end, pieces[rng.usize(..pieces.len())].bytes())),
            }
        }
        property(&bytes);
    }
}

#[test]
fn path_properties_hold() {
    let pieces = ["/", "..", ".", "%2e", "%2F", "%c0%af", "%0a", ";", "\\", "%", "%25", "?", "\u{e9}"];
    check_property(path::holds, &seeds("path"), &pieces, 100_000);
}

#[test]
fn forwarded_address_properties_hold() {
    let pieces =
        [",", ";", "\"", "\\", "for=", "[", "]", ":", "%eth0", "10.2.2.2", "fd00::2", "\n", "=", "unknown", " "];
    check_property(forwarded::holds, &seeds("forwarded"), &pieces, 30_000);
}

#[test]
fn client_request_properties_hold() {
    let pieces = [
        "Host: b\r\n",
        "host:",
        "\r\n",
        "Transfer-Encoding: chunked\r\n",
        "@",
        "*",
        " ",
        "http://b",
        "CONNECT ",
        "Content-Length: 2\r\n",
        "0\r\n\r\n",
        "1\r\n",
        "#",
        ":",
        "\n",
    ];
    check_property(client_request::holds, &seeds("client_request"), &pieces, 100_000);
}

#[test]
fn proxy_header_properties_hold() {
    let pieces = ["\r", "\n", "\0", " ", "PROXY ", "TCP4", "65536", "::", "!\x11", "\0\x10", "x12345678901234567890"];
    check_property(proxy_protocol::holds, &seeds("proxy_protocol"), &pieces, 30_000);
}

#[test]
fn configuration_properties_hold() {
    let seeds = [
        include_str!("config/good/everything.toml"),
        include_str!("config/good/behind-load-balancer.toml"),
        include_str!("config/good/rule-settings.toml"),
        include_str!("config/bad/actions.toml"),
    ];
    let pieces = ["[", "]", "\"", "=", "\n", "{", "}", "'", ",", "[[routes]]\n", "path = ", "#", "\u{e9}", "1_0", "\\"];
    check_property(configuration::holds, &seeds, &pieces, 400);
}

#[test]
fn counters_file_properties_hold() {
    let header = Header { layout: Table::layout(64), seed: Seed(1, 2), boot: [b'0'; 36] };
    // Counters of unknown keys, some with open windows; 24 bytes each, as in a snapshot.
    let words = |end_ms: u64| -> Vec<u8> {
        let word = |n: u64| CounterWord::new(1 << 50 | n, end_ms + n, n as u32).bits();
        (0u64..9).flat_map(|n| [n.to_le_bytes().to_vec(), word(n).to_le_bytes().to_vec()].concat()).collect()
    };
    let seeds =
        [header.encode().to_vec(), words(1_700_000_100_000), words(END_MAX_MS - 9), vec![0xff; 99], vec![0; 64]];
    // A change of the file's layout changes the committed seeds, too.
    assert_eq!(self::seeds("counters_file"), seeds[..2]);
    let pieces = ["transom\0cnts", "transom\0snapshot", "\x01\0\0\0\0\0\0\0", "\0\0\0\0", "\x7f\x7f\x7f\x7f\x7f\x7f"];
    check_property(counters_file::holds, &seeds, &pieces, 300);
}

#[test]
fn upstream_response_properties_hold() {
    let pieces = ["\r\n", "\n", "\r", "0", "5\r\n", ";", ":", " ", "0\r\n\r\n", "Content-Length: 1\r\n", "\0", "f"];
    check_property(upstream_response::holds, &seeds("upstream_response"), &pieces, 100_000);
}

/// `TRANSOM_MUTATIONS`: how many (default 20,000).
#[test]
fn usage_properties_hold() {
    let pieces = [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"",
        "\\",
        "\\u0",
        "\\ud83d",
        "\\/",
        "null",
        "true",
        "-",
        "0",
        "1",
        ".5",
        "e2",
        "E-1",
        "00",
        "data: ",
        "data:",
        "\n",
        "\r",
        "\n\n",
        "\r\n\r\n",
        ":",
        "[DONE]",
        "\"usage\":",
        "\"total_tokens\":",
        "\"a/b\":",
        "\"~\":",
        "\"\":",
        "\u{e9}",
        "18446744073709551615",
        "\"cached_tokens\":7",
    ];
    let mut seeds = seeds("usage");
    // One level more than those whose grammar is checked.
    let levels = DEPTH_MAX as usize;
    let deep = ["{\"usage\":{\"total_tokens\":5},\"deep\":", &"[".repeat(levels), &"]".repeat(levels), "}"].concat();
    seeds.push(deep.into_bytes());
    let rounds = std::env::var("TRANSOM_MUTATIONS").map_or(20_000, |text| text.parse().unwrap());
    check_property(usage::holds, &seeds, &pieces, rounds);
}
