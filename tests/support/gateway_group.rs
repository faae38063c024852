//! Gateways that count together: several processes of one configuration, on one store.

use std::thread;

use serde_json::Value;

use super::client::{Answer, Client};
use super::process::Process;

/// `[counters.shared]` for tests of counting: timeouts are long, so that a busy machine causes no outage.
pub const PATIENT: &str = "timeout = \"10s\"\non_outage = \"refuse\"\n";

/// A configuration with a store (a URL in quotes, or a list), settings of it, and rules that hold on every route.
pub fn shared(redis: &str, settings: &str, rules: &str) -> String {
    let names: Vec<String> = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("[rules.")?.strip_suffix(']'))
        .filter(|name| !name.contains('.'))
        .map(|name| format!("\"{name}\""))
        .collect();
    format!(
        "[counters.shared]\nredis = {redis}\n{settings}\n[upstreams.u]\nbuiltin = \"echo\"\n{rules}\n\
         [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [{}]\n",
        names.join(", ")
    )
}

/// A rule by the header `x-key` with these windows (a TOML list), and other settings.
pub fn rule(windows: &str, more: &str) -> String {
    format!("[rules.r]\nkey = \"header:x-key\"\non_missing_key = \"skip\"\nwindows = {windows}\n{more}\n")
}

pub struct Siblings(pub Vec<Process>);

impl Siblings {
    pub fn start(number: usize, toml: &str) -> Siblings {
        Siblings((0..number).map(|_| Process::spawn(toml)).collect())
    }

    /// Two clients of each gateway send this number of requests with a key, all at once. Returns the number of admitted
    /// requests; all others were refused.
    pub fn admitted(&self, key: &str, times: usize) -> usize {
        thread::scope(|scope| {
            let twice = self.0.iter().chain(&self.0);
            let clients: Vec<_> = twice.map(|process| scope.spawn(|| admitted(process, key, times))).collect();
            clients.into_iter().map(|client| client.join().unwrap()).sum()
        })
    }

    pub fn rewrite(&self, toml: &str) {
        for process in &self.0 {
            process.rewrite(toml);
            process.signal("HUP");
            process.reloaded_at_least(1);
        }
    }
}

/// Sends this number of requests with a key; returns the number of admitted ones. All others are refused.
pub fn admitted(process: &Process, key: &str, times: usize) -> usize {
    let mut client = process.client();
    (0..times).filter(|_| is_admitted(&client.get_with("/a", &[("X-Key", key)]))).count()
}

pub fn is_admitted(answer: &Answer) -> bool {
    match answer.status {
        200 => true,
        429 => false,
        _ => panic!("{answer:?}"),
    }
}

/// A question to the decision API.
pub fn decide(process: &Process, verb: &str, question: &Value) -> Value {
    Client::connect(process.admin).post(&format!("/v1/{verb}"), question.to_string()).expect(200).json()
}
