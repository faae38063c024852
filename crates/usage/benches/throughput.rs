//! How fast bodies are read for their usage, in GB/s of one core, beside copying them and parsing them as a whole; and the memory of
//! bodies that are being read.
//!
//! `cargo bench -p transom-usage`

#![allow(clippy::disallowed_methods, reason = "measures real time")]

use std::hint::black_box;
use std::io::Write as _;
use std::sync::Arc;
use std::time::Instant;

use flate2::Compression;
use flate2::write::GzEncoder;
use transom_usage::usage_reader::{ReadingPlan, UsageReader, UsageSource};

const ROUNDS: usize = 9;
const BODY_BYTES: usize = 4 << 20;
/// As much as a read of a socket returns.
const PIECE_BYTES: usize = 16 << 10;
/// Bodies that are read at the same time.
const READERS: usize = 2000;
/// As much of each has passed, without its content coding.
const PASSED_BYTES: usize = 64 << 10;

/// The median of some rounds, in GB/s.
fn measure(bytes: usize, mut work: impl FnMut()) -> f64 {
    let mut rates: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            work();
            bytes as f64 / start.elapsed().as_secs_f64() / 1e9
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    rates[ROUNDS / 2]
}

/// `VmRSS` of this process.
fn resident_kib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// The KiB that a stream takes while it is read, after a part of it.
fn memory(plan: &Arc<ReadingPlan>, coding: &str, encoded: &[u8]) -> f64 {
    let mut readers: Vec<UsageReader> = Vec::with_capacity(READERS);
    let before = resident_kib();
    for _ in 0..READERS {
        let mut reader = UsageReader::new(plan, Some(b"text/event-stream"), Some(coding.as_bytes()));
        reader.push(encoded);
        readers.push(reader);
    }
    (resident_kib() - before) / black_box(readers).len() as f64
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text).expect("memory");
    encoder.flush().expect("memory");
    encoder.get_ref().clone()
}

fn main() {
    let usage = "\"usage\":{\"prompt_tokens\":19,\"completion_tokens\":10,\"total_tokens\":29}";
    let text = "The quick brown fox jumps over the lazy dog, and \\\"speaks\\\" of it.\\n";
    let chunk = "data: {\"id\":\"chatcmpl-9\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"gpt-5-mini\",\"choices\":[{\"index\":0,\
        \"delta\":{\"content\":\" fox\"},\"finish_reason\":null}],\"usage\":null}\n\n";
    let bodies = [
        ("a text", "application/json", format!("{{\"content\":\"{}\",{usage}}}", text.repeat(BODY_BYTES / text.len()))),
        (
            "embeddings",
            "application/json",
            format!("{{\"data\":[{}0],{usage}}}", "-0.0069292834,0.0053363,".repeat(BODY_BYTES / 24)),
        ),
        ("a stream", "text/event-stream", format!("{}data: {{{usage}}}\n\n", chunk.repeat(BODY_BYTES / chunk.len()))),
    ];
    let mut plan = ReadingPlan::of_responses();
    let source = plan.add(&UsageSource::Known);
    let plan = Arc::new(plan);
    // First, while no freed memory is at hand.
    let passed = &chunk.repeat(PASSED_BYTES / chunk.len()).into_bytes();
    for (coding, encoded) in [("identity", passed.clone()), ("gzip", gzip(passed))] {
        println!("memory of a stream, {coding}: {:.1} KiB", memory(&plan, coding, &encoded));
    }
    println!("GB/s          usage  memcpy  serde_json");
    for (name, kind, body) in &bodies {
        let body = body.as_bytes();
        let read = || {
            let mut reader = UsageReader::new(&plan, Some(kind.as_bytes()), None);
            body.chunks(PIECE_BYTES).for_each(|piece| reader.push(piece));
            assert!(reader.finish(false).usage(source).is_ok());
        };
        let mut copied = vec![0; body.len()];
        let documents = || {
            for event in body.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
                let document = event.strip_prefix(b"data: ").unwrap_or(event);
                black_box(serde_json::from_slice::<serde_json::Value>(document).ok());
            }
        };
        let read = measure(body.len(), read);
        let copy = measure(body.len(), || black_box(&mut copied).copy_from_slice(black_box(body)));
        let parsed = measure(body.len(), documents);
        println!("{name:12} {read:6.2} {copy:7.2} {parsed:11.2}");
    }
}
