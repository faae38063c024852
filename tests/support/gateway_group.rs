//! Several gateway processes with one configuration that share counters through one store.

use std::thread;

use serde_json::Value;

use super::client::{Client, HttpResponse};
use super::process::Process;

/// Settings of `[counters.shared]` for tests of counting: a long timeout, so that a busy machine causes no outage.
pub const LONG_TIMEOUT: &str = "timeout = \"10s\"\non_outage = \"refuse\"\n";

/// A configuration with a store (a URL in quotes, or a list), its settings, and rules on its only route.
pub fn shared_config(redis: &str, settings: &str, rules: &str) -> String {
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
pub fn rule_by_key(windows: &str, more: &str) -> String {
    format!("[rules.r]\nkey = \"header:x-key\"\non_missing_key = \"skip\"\nwindows = {windows}\n{more}\n")
}

pub struct GatewayGroup(pub Vec<Process>);

impl GatewayGroup {
    pub fn start(number: usize, toml: &str) -> GatewayGroup {
        GatewayGroup((0..number).map(|_| Process::spawn(toml)).collect())
    }

    /// Two clients of each gateway concurrently send `times` requests each with a key. Returns the number of admitted requests;
    /// all others must be refused.
    pub fn count_admitted(&self, key: &str, times: usize) -> usize {
        thread::scope(|scope| {
            let twice = self.0.iter().chain(&self.0);
            let clients: Vec<_> = twice.map(|process| scope.spawn(|| count_admitted_by(process, key, times))).collect();
            clients.into_iter().map(|client| client.join().unwrap()).sum()
        })
    }

    pub fn reload(&self, toml: &str) {
        for process in &self.0 {
            process.write_config(toml);
            process.signal("HUP");
            process.wait_for_applied_reloads(1);
        }
    }
}

/// Sends `times` requests with a key; returns the number of admitted ones. All others must be refused.
pub fn count_admitted_by(process: &Process, key: &str, times: usize) -> usize {
    let mut client = process.client();
    (0..times).filter(|_| is_admitted(&client.get_with("/a", &[("X-Key", key)]))).count()
}

pub fn is_admitted(response: &HttpResponse) -> bool {
    match response.status {
        200 => true,
        429 => false,
        _ => panic!("{response:?}"),
    }
}

/// A query of the decision API.
pub fn query_decision(process: &Process, verb: &str, query: &Value) -> Value {
    Client::connect(process.admin).post(&format!("/v1/{verb}"), query.to_string()).expect(200).json()
}
