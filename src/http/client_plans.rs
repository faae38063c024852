//! Who a client is, among those that are known, and which plan it is on.
//!
//! A request is looked up by its API key, then by its subject, then by the most specific network that
//! its address is in; the first that is known decides. Everything is looked up in maps that were made
//! at load, so it costs the same for one client and for a hundred thousand, and allocates nothing. Keys
//! are known by their digests alone: see `rule::digest`.

use std::collections::{BTreeSet, HashMap};

use super::key_source::{KeyError, KeySource};
use super::rate_limit_key::RequestAttributes;
use crate::config::{Client, Clients as Configured};
use transom_limiter::ip_prefix::Networks;
use transom_limiter::key::KeyPart;
use transom_limiter::secret_digest::Digest;

/// No API key is longer, so what is longer need not be digested.
pub const SECRET_MAX_BYTES: usize = 4096;

/// The position of a plan in [`Clients::plans`].
pub type PlanId = u32;

/// The clients file made ready.
#[derive(Debug)]
pub struct ClientPlans {
    /// The plans that some client is on, by name.
    pub plans: Vec<String>,
    api_key: Option<ClientSource>,
    by_api_key: HashMap<Digest, PlanId>,
    subject: Option<ClientSource>,
    by_subject: HashMap<Box<[u8]>, PlanId>,
    by_network: Networks<PlanId>,
}

/// Where a client is named in a request.
#[derive(Debug)]
struct ClientSource {
    source: KeySource,
    /// Only needed where something is wrong with it.
    name: String,
}

impl ClientPlans {
    pub fn new(configured: &Configured) -> ClientPlans {
        let plans: BTreeSet<&str> = configured.list.iter().map(|client| client.plan.as_str()).collect();
        let plans: Vec<String> = plans.into_iter().map(str::to_owned).collect();
        // Every plan is there: it was put there above.
        let id = |client: &Client| plans.binary_search(&client.plan).unwrap_or_default() as PlanId;
        let all = || configured.list.iter().map(|client| (client, id(client)));
        // A part that only some route has names no client.
        let place = |part: &Option<KeyPart>| {
            part.as_ref().map(|part| ClientSource { source: KeySource::new(part, &[]), name: part.to_string() })
        };
        ClientPlans {
            api_key: place(&configured.api_key),
            by_api_key: all().flat_map(|(client, plan)| client.api_keys.iter().map(move |key| (*key, plan))).collect(),
            subject: place(&configured.subject),
            by_subject: all()
                .flat_map(|(client, plan)| client.subjects.iter().map(move |subject| (subject.as_bytes().into(), plan)))
                .collect(),
            by_network: Networks::new(
                all().flat_map(|(client, plan)| client.networks.iter().map(move |network| (*network, plan))),
            ),
            plans,
        }
    }

    /// The plan of whoever sent a request; `None`: it is nobody who is known. What is wrong with the
    /// request comes with the name of the part that it is about.
    pub fn plan_of(&self, caller: &RequestAttributes<'_>) -> Result<Option<PlanId>, (&str, KeyError)> {
        let by_key = |key: &[u8]| match key.len() {
            0..=SECRET_MAX_BYTES => self.by_api_key.get(&Digest::of(key)),
            _ => None,
        };
        if let Some(plan) = lookup(self.api_key.as_ref(), caller, by_key)? {
            return Ok(Some(plan));
        }
        if let Some(plan) = lookup(self.subject.as_ref(), caller, |subject| self.by_subject.get(subject))? {
            return Ok(Some(plan));
        }
        Ok(self.by_network.of(caller.address))
    }
}

/// What is known of the value that a request has in a place, if it has one there.
fn lookup<'s>(
    place: Option<&'s ClientSource>,
    caller: &RequestAttributes<'_>,
    known: impl Fn(&[u8]) -> Option<&'s PlanId>,
) -> Result<Option<PlanId>, (&'s str, KeyError)> {
    let Some(place) = place else { return Ok(None) };
    let mut plan = None;
    match place.source.feed(caller, &mut |_kind, value| plan = known(value).copied()) {
        Ok(()) | Err(KeyError::Missing) => Ok(plan),
        Err(lack) => Err((&place.name, lack)),
    }
}
