//! `GET /v1/top`: reads the query, collects the counts of all workers, and writes the lists as JSON. Finds listed keys by their
//! ids, for the decision API.

use std::sync::Arc;
use std::time::Duration;

use http::Response;
use serde_json::{Value, json};
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::timeout;

use super::endpoints::{Call, json_response, query_text, with_body};
use super::{AdminBody, AdminState};
use crate::proxy::served_config::ServedConfig;
use crate::proxy::worker_state::TopKeysQuery;
use transom_http::error::ApiError;
use transom_limiter::rule_set::CompiledRule;
use transom_rules::top_keys::{KeyOutcome, ListedKey, Snapshot, TopKey, TopList};

/// Keys of each rule that are listed by default.
const LIMIT: usize = 100;
/// How long to wait for workers that look for a key.
const FIND_TIMEOUT: Duration = Duration::from_secs(5);

/// `GET /v1/top`: the busiest keys of one rule or of all.
pub async fn busiest_keys(call: Call) -> Result<Response<AdminBody>, ApiError> {
    let lists = TopQuery::parse(call.query())?.list(&call.state, &call.decision_api()?.served).await?;
    Ok(with_body(json_response(&lists)))
}

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
    pub fn parse(query: &str) -> Result<TopQuery, ApiError> {
        let malformed = |reason: String| ApiError::Malformed(reason);
        let parameter = |name: &str| query_text(query, name);
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
    pub async fn list(&self, state: &AdminState, served: &Arc<ServedConfig>) -> Result<Value, ApiError> {
        if served.config.admin.top_keys == 0 {
            return Err(ApiError::TopKeysOff);
        }
        let is_listed = |rule: &&CompiledRule| self.rule.as_ref().is_none_or(|name| rule.rule.name == *name);
        let rules: Vec<&CompiledRule> = served.rule_set.rules.iter().filter(is_listed).collect();
        if let (Some(name), []) = (&self.rule, &rules[..]) {
            return Err(ApiError::UnknownRule(name.chars().take(64).collect()));
        }
        let snapshots = snapshots(self.outcome, state, served, &rules).await;
        let now_ms = state.clock.now().unix_ms;
        let lists = rules.iter().zip(snapshots).map(|(rule, snapshots)| {
            let list = TopList::merge(&snapshots, now_ms, self.limit);
            json!({
                "rule": rule.rule.name, "shadow": rule.rule.is_shadow(), "since": since(&list), "total": list.total,
                "keys": list.keys.iter().map(TopKey::to_json).collect::<Vec<_>>(),
            })
        });
        Ok(json!({ "by": self.outcome.name(), "rules": lists.collect::<Vec<_>>() }))
    }
}

/// The key that a list of the rule has under this id. If requests with the key have different plans, one of these applies, the
/// same each time.
pub async fn find(
    state: &AdminState,
    served: &Arc<ServedConfig>,
    rule: &str,
    id: u64,
) -> Result<Arc<ListedKey>, ApiError> {
    if served.config.admin.top_keys == 0 {
        return Err(ApiError::TopKeysOff);
    }
    let compiled_rule = &served.rule_set.rules[served.decision_service.rule(rule)?];
    let (rule, config_number) = (compiled_rule.hash_prefix, served.number);
    let (reply, mut replies) = unbounded_channel();
    state.ask_workers(TopKeysQuery::Find { rule, id, config_number, reply });
    let own = state.top_keys(served).find(rule, id, config_number, state.clock.now().unix_ms);
    let mut found = Vec::from_iter(own);
    // Ends when every worker has dropped its query; a worker that is busy for long is not waited for.
    let receive = async {
        while let Some(key) = replies.recv().await {
            found.push(key);
        }
    };
    let _ = timeout(FIND_TIMEOUT, receive).await;
    let found = found.into_iter().min_by_key(|key| key.keyed_request.map(|request| request.variant));
    found.ok_or_else(|| ApiError::UnlistedKey { rule: compiled_rule.rule.name.clone(), id })
}

/// How often each rule has refused a client, as far as the keys of the client are among the busiest ones.
pub async fn refusals_of(state: &AdminState, served: &Arc<ServedConfig>, client: &str) -> Value {
    let rules: Vec<&CompiledRule> = served.rule_set.rules.iter().collect();
    let snapshots = snapshots(KeyOutcome::Refused, state, served, &rules).await;
    let now_ms = state.clock.now().unix_ms;
    let refusals = rules.iter().zip(snapshots).filter_map(|(rule, snapshots)| {
        let list = TopList::merge(&snapshots, now_ms, usize::MAX);
        let of_client = list.keys.iter().filter(|key| key.client() == Some(client));
        let (count, error) = of_client.fold((0, 0), |(count, error), key| (count + key.count, error + key.error));
        let since = since(&list);
        let (name, is_shadow) = (&rule.rule.name, rule.rule.is_shadow());
        (count > 0)
            .then(|| json!({ "rule": name, "shadow": is_shadow, "since": since, "count": count, "error": error }))
    });
    refusals.collect()
}

fn since(list: &TopList) -> Option<String> {
    jiff::Timestamp::from_millisecond(list.since_ms as i64).map(|time| format!("{time:.0}")).ok()
}

/// The counts of all workers and of the decision API, by rule.
async fn snapshots(
    outcome: KeyOutcome,
    state: &AdminState,
    served: &Arc<ServedConfig>,
    rules: &[&CompiledRule],
) -> Vec<Vec<Snapshot>> {
    let (reply, mut replies) = unbounded_channel();
    let prefixes = rules.iter().map(|rule| rule.hash_prefix).collect();
    state.ask_workers(TopKeysQuery::List { outcome, rules: prefixes, reply });
    let (top_keys, now_ms) = (state.top_keys(served), state.clock.now().unix_ms);
    let own = |rule: &&CompiledRule| top_keys.snapshot(rule.hash_prefix, outcome, now_ms).into_iter().collect();
    let mut snapshots: Vec<Vec<Snapshot>> = rules.iter().map(own).collect();
    // Ends when every worker has dropped its query.
    while let Some((position, snapshot)) = replies.recv().await {
        snapshots[position].push(snapshot);
    }
    snapshots
}
