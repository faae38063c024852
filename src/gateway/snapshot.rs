//! The configuration made ready for requests: everything that can be worked out before one comes.
//!
//! A snapshot never changes. A reload makes a new one; requests that are under way keep the one they
//! started with.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use http::HeaderName;

use super::settlement::Term;
use crate::config::{Config, Route};
use crate::http::caller::Identity;
use crate::http::clients::Clients;
use crate::http::exceptions::Exceptions;
use crate::http::quota::Sheet;
use crate::http::route::Router;
use crate::rule::book::{Book, Roster};
use crate::rule::key::{OnMissing, Part, Seed};

#[derive(Debug)]
pub struct Snapshot {
    pub config: Config,
    pub router: Router,
    pub book: Book,
    /// Who is known by name.
    pub clients: Option<Clients>,
    /// One for each route, in the order of the configuration.
    pub lanes: Vec<Lane>,
    /// What routes with the same rules have in common.
    pub slates: Vec<Slate>,
    /// Fields that some rule counts by, or that name a client: no Connection field can strip them.
    pub key_fields: Vec<HeaderName>,
}

/// A route made ready: where to go on from it. Small, so that thousands of them stay in the cache.
#[derive(Debug)]
pub struct Lane {
    /// Position in the snapshot.
    pub slate: u32,
    /// Position in the configuration.
    pub upstream: u32,
}

/// A list of rules made ready; many routes share few of them, so those stay in the cache.
#[derive(Debug)]
pub struct Slate {
    pub roster: Roster,
    /// One for each rule of the roster.
    pub identities: Vec<Identity>,
    pub sheet: Sheet,
    /// The rules whose cost the answer tells.
    pub terms: Vec<Term>,
}

impl Snapshot {
    pub fn new(config: Config, seed: Seed) -> Arc<Snapshot> {
        let book = Book::new(&config.rules, config.routes.iter().map(|route| route.rules.as_slice()), seed);
        let clients = config.clients.as_ref().map(Clients::new);
        let exceptions = |entry| Identity::exceptions(entry, clients.as_ref(), seed).map(Arc::new);
        let exceptions: Vec<_> = book.entries.iter().map(exceptions).collect();
        let mut slates = Vec::new();
        let mut known: BTreeMap<_, usize> = BTreeMap::new();
        let mut lanes = Vec::with_capacity(config.routes.len());
        for route in &config.routes {
            // Where a parameter stands in the path is part of how a key is found.
            let slate = *known.entry((&route.rules, route.path.param_names())).or_insert_with(|| {
                slates.push(Slate::new(&book, &config, route, &exceptions, seed));
                slates.len() - 1
            });
            lanes.push(Lane { slate: slate as u32, upstream: route.upstream as u32 });
        }
        let key_fields = key_fields(&config);
        let router = Router::new(&config.routes);
        Arc::new(Snapshot { router, lanes, slates, key_fields, clients, book, config })
    }
}

impl Snapshot {
    pub fn slate_of(&self, lane: &Lane) -> &Slate {
        &self.slates[lane.slate as usize]
    }

    /// The name of a route; a lane has its route's position.
    pub fn name_of(&self, lane: usize) -> &str {
        &self.config.routes[lane].name
    }
}

impl Slate {
    fn new(book: &Book, config: &Config, route: &Route, exceptions: &[Option<Arc<Exceptions>>], seed: Seed) -> Slate {
        let roster = book.roster(&route.rules);
        let identity = |rule: &usize| Identity::new(&book.entries[*rule], route, seed).with(exceptions[*rule].clone());
        let identities = route.rules.iter().map(identity).collect();
        let terms = Term::of(config, &route.rules);
        Slate { identities, sheet: Sheet::new(book, &roster, &config.fields), roster, terms }
    }
}

fn key_fields(config: &Config) -> Vec<HeaderName> {
    let mut names = HashSet::new();
    let clients = config.clients.as_ref();
    for part in clients.into_iter().flat_map(|clients| [&clients.api_key, &clients.subject]).flatten() {
        if let Part::Header(name) = part {
            names.extend(HeaderName::from_bytes(name.as_bytes()));
        }
    }
    for rule in &config.rules {
        let fallback: &[Part] = if let OnMissing::Fallback(parts) = &rule.on_missing { parts } else { &[] };
        for part in rule.key.iter().chain(fallback) {
            if let Part::Header(name) = part {
                names.extend(HeaderName::from_bytes(name.as_bytes()));
            }
        }
    }
    names.into_iter().collect()
}
