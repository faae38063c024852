//! Gateways that count together: several processes of one configuration, on one store.

use std::thread;

use serde_json::Value;

use super::client::{Client, HttpResponse};
use super::process::Process;

/// `[counters.shared]` for tests of counting: timeouts are long, so that a busy machine causes no outage.
pub const LONG_TIMEOUT: &str = "timeout = \"10s\"\non_outage = \"refuse\"\n";

/// A configuration with a store (a URL in quotes, or a list), settings of it, and rules that hold on every route.
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

    /// Two clients of each gateway send this number of requests with a key, all at once. Returns the number of admitted
    /// requests; all others were refused.
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

/// Sends this number of requests with a key; returns the number of admitted ones. All others are refused.
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

/// A question to the decision API.
pub fn query_decision(process: &Process, verb: &str, question: &Value) -> Value {
    Client::connect(process.admin).post(&format!("/v1/{verb}"), question.to_string()).expect(200).json()
}
