//! `GET /v1/top`: reads the query, collects the counts of all workers, and writes the lists as JSON.

use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::mpsc::unbounded_channel;

use super::AdminState;
use crate::http::error::DecisionError;
use crate::http::request_values::{Occurrence, query_parameter};
use crate::proxy::compiled_config::CompiledConfig;
use crate::proxy::worker_state::TopKeysQuery;
use crate::top_keys::{self, KeyOutcome, ListedKey, Snapshot, TopKey, TopList};
use transom_limiter::rule_set::CompiledRule;

/// Keys of each rule that are listed by default.
const LIMIT: usize = 100;

/// What a list is of.
#[derive(PartialEq, Eq, Debug)]
pub struct TopQuery {
    outcome: KeyOutcome,
    /// `None`: all rules.
    rule: Option<String>,
    /// Keys of each rule.
    limit: usize,
}

impl TopQuery {
    pub fn parse(query: &str) -> Result<TopQuery, DecisionError> {
        let malformed = |reason: String| DecisionError::Malformed(reason);
        let parameter = |name: &str| match query_parameter(query, name) {
            Ok(Occurrence::Absent) => Ok(None),
            Ok(Occurrence::Single(value)) => Ok(Some(String::from_utf8_lossy(&value).into_owned())),
            Ok(Occurrence::Repeated) => Err(malformed(format!("`{name}` is given more than once"))),
            Err(_) => Err(malformed(String::from("the query contains a `%` without two hex digits"))),
        };
        let outcome = match parameter("by")? {
            None => KeyOutcome::Refused,
            Some(name) => KeyOutcome::ALL
                .into_iter()
                .find(|outcome| outcome.name() == name)
                .ok_or_else(|| malformed(String::from("`by` is \"refused\" or \"admitted\"")))?,
        };
        let limit = parameter("limit")?.map(|limit| limit.parse().map_err(|_| limit)).transpose();
        let limit = limit.map_err(|_| malformed(String::from("`limit` is the number of keys of each rule")))?;
        Ok(TopQuery { outcome, rule: parameter("rule")?, limit: limit.unwrap_or(LIMIT) })
    }

    /// The busiest keys of all rules.
    pub fn of_all_rules(outcome: KeyOutcome, limit: usize) -> TopQuery {
        TopQuery { outcome, rule: None, limit }
    }

    /// The lists of all workers and of the decision API, merged, as JSON.
    pub async fn list(&self, state: &AdminState, compiled: &Arc<CompiledConfig>) -> Result<Value, DecisionError> {
        if compiled.config.admin.top_keys == 0 {
            return Err(DecisionError::TopKeysOff);
        }
        let is_listed = |rule: &&CompiledRule| self.rule.as_ref().is_none_or(|name| rule.rule.name == *name);
        let rules: Vec<&CompiledRule> = compiled.rule_set.rules.iter().filter(is_listed).collect();
        if let (Some(name), []) = (&self.rule, &rules[..]) {
            return Err(DecisionError::UnknownRule(name.chars().take(64).collect()));
        }
        let snapshots = snapshots(self.outcome, state, compiled, &rules).await;
        let now_ms = state.clock.now().unix_ms;
        let lists = rules.iter().zip(snapshots).map(|(rule, snapshots)| {
            let list = TopList::merge(&snapshots, now_ms, self.limit);
            let since = jiff::Timestamp::from_millisecond(list.since_ms as i64).map(|time| format!("{time:.0}"));
            json!({
                "rule": rule.rule.name, "shadow": rule.rule.is_shadow(), "since": since.ok(), "total": list.total,
                "keys": list.keys.iter().map(TopKey::to_json).collect::<Vec<_>>(),
            })
        });
        Ok(json!({ "by": self.outcome.name(), "rules": lists.collect::<Vec<_>>() }))
    }
}

/// A key that the lists have under this id, with the plan that it has in this configuration.
pub async fn find_key(
    state: &AdminState,
    compiled: &Arc<CompiledConfig>,
    rule: usize,
    id: u64,
) -> Option<Arc<ListedKey>> {
    let rules = [&compiled.rule_set.rules[rule]];
    for outcome in KeyOutcome::ALL {
        let snapshots = snapshots(outcome, state, compiled, &rules).await.into_iter().flatten().collect::<Vec<_>>();
        let found = top_keys::find_key(&snapshots, id, &compiled.rule_set);
        if found.is_some() {
            return found;
        }
    }
    None
}

/// The counts of all workers and of the decision API, by rule.
async fn snapshots(
    outcome: KeyOutcome,
    state: &AdminState,
    compiled: &Arc<CompiledConfig>,
    rules: &[&CompiledRule],
) -> Vec<Vec<Snapshot>> {
    let (reply, mut replies) = unbounded_channel();
    let prefixes = rules.iter().map(|rule| rule.hash_prefix).collect();
    let query = TopKeysQuery { outcome, rules: prefixes, reply };
    for worker in &state.workers {
        // A worker that has ended has no counts.
        let _ = worker.send(query.clone());
    }
    let (top_keys, now_ms) = (state.top_keys(compiled), state.clock.now().unix_ms);
    let own = |rule: &&CompiledRule| top_keys.snapshot(rule.hash_prefix, outcome, now_ms).into_iter().collect();
    let mut snapshots: Vec<Vec<Snapshot>> = rules.iter().map(own).collect();
    drop(query);
    // Ends when every worker has dropped its query.
    while let Some((position, snapshot)) = replies.recv().await {
        snapshots[position].push(snapshot);
    }
    snapshots
}
