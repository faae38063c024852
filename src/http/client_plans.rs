//! Finds the plan of a client: the clients file compiled into maps.
//!
//! A request is looked up by its API key, then by its subject, then by the most specific network that contains its
//! address; the first match decides. A lookup allocates nothing and takes the same time for any number of clients. API
//! keys are stored as digests only (`transom_limiter::secret_digest`).

use std::cell::OnceCell;
use std::collections::{BTreeSet, HashMap};

use super::key_source::{KeyError, KeySource, RequestAttributes};
use crate::config::clients::{Client, Clients};
use transom_limiter::ip_prefix::Networks;
use transom_limiter::key::KeyPart;
use transom_limiter::secret_digest::Digest;

/// Upper bound of API keys. A longer value is unknown, and is not digested.
pub const SECRET_MAX_BYTES: usize = 4096;

/// Position in [`ClientPlans::plans`].
pub type PlanId = u32;

/// The compiled clients file.
#[derive(Debug)]
pub struct ClientPlans {
    /// Names of the plans that have a client, sorted.
    pub plans: Vec<String>,
    api_key: Option<ClientSource>,
    by_api_key: HashMap<Digest, PlanId>,
    subject: Option<ClientSource>,
    by_subject: HashMap<Box<[u8]>, PlanId>,
    by_network: Networks<PlanId>,
}

/// Where requests name their client.
#[derive(Debug)]
struct ClientSource {
    source: KeySource,
    /// For error messages.
    name: String,
}

impl ClientPlans {
    pub fn new(configured: &Clients) -> ClientPlans {
        let plans: BTreeSet<&str> = configured.list.iter().map(|client| client.plan.as_str()).collect();
        let plans: Vec<String> = plans.into_iter().map(str::to_owned).collect();
        // The search always succeeds: `plans` was collected from these clients.
        let id = |client: &Client| plans.binary_search(&client.plan).unwrap_or_default() as PlanId;
        let all = || configured.list.iter().map(|client| (client, id(client)));
        // Path parameters belong to one route and cannot name a client.
        let source = |part: &Option<KeyPart>| {
            part.as_ref().map(|part| ClientSource { source: KeySource::new(part, &[]), name: part.to_string() })
        };
        ClientPlans {
            api_key: source(&configured.api_key),
            by_api_key: all().flat_map(|(client, plan)| client.api_keys.iter().map(move |key| (*key, plan))).collect(),
            subject: source(&configured.subject),
            by_subject: all()
                .flat_map(|(client, plan)| client.subjects.iter().map(move |subject| (subject.as_bytes().into(), plan)))
                .collect(),
            by_network: Networks::new(
                all().flat_map(|(client, plan)| client.networks.iter().map(move |network| (*network, plan))),
            ),
            plans,
        }
    }

    /// The plan of the client; `None` for an unknown client. An error comes with the name of the part that caused it.
    pub fn plan_of(&self, request: &RequestAttributes<'_>) -> Result<Option<PlanId>, (&str, KeyError)> {
        let by_api_key = |key: &[u8]| match key.len() {
            0..=SECRET_MAX_BYTES => self.by_api_key.get(&Digest::of(key)),
            _ => None,
        };
        if let Some(plan) = lookup(self.api_key.as_ref(), request, by_api_key)? {
            return Ok(Some(plan));
        }
        if let Some(plan) = lookup(self.subject.as_ref(), request, |subject| self.by_subject.get(subject))? {
            return Ok(Some(plan));
        }
        Ok(self.by_network.most_specific(request.address))
    }
}

/// Looks up the value that a request has at a source. A request without a value has no plan by this source.
fn lookup<'s>(
    source: Option<&'s ClientSource>,
    request: &RequestAttributes<'_>,
    find: impl Fn(&[u8]) -> Option<&'s PlanId>,
) -> Result<Option<PlanId>, (&'s str, KeyError)> {
    let Some(source) = source else { return Ok(None) };
    let mut plan = None;
    match source.source.feed(request, &mut |_kind, value| plan = find(value).copied()) {
        Ok(()) | Err(KeyError::Missing) => Ok(plan),
        Err(error) => Err((&source.name, error)),
    }
}

/// The plan of the client of one request. It is looked up when the first rule asks for it, and once for all rules.
pub struct PlanLookup<'a> {
    clients: Option<&'a ClientPlans>,
    plan: OnceCell<Option<PlanId>>,
}

impl<'a> PlanLookup<'a> {
    /// `None` without a clients file.
    pub fn new(clients: Option<&'a ClientPlans>) -> PlanLookup<'a> {
        PlanLookup { clients, plan: OnceCell::new() }
    }

    /// As [`ClientPlans::plan_of`]. An error is not remembered.
    pub fn plan_of(&self, request: &RequestAttributes<'_>) -> Result<Option<PlanId>, (&'a str, KeyError)> {
        let Some(clients) = self.clients else { return Ok(None) };
        if let Some(plan) = self.plan.get() {
            return Ok(*plan);
        }
        let plan = clients.plan_of(request)?;
        Ok(*self.plan.get_or_init(|| plan))
    }
}
