//! The configuration made ready for requests: everything that can be worked out before one comes.
//!
//! A snapshot never changes. A reload makes a new one; requests that are under way keep the one they
//! started with.

use std::collections::HashSet;
use std::sync::Arc;

use http::HeaderName;

use crate::config::{Config, EncodedSlash, Route};
use crate::http::caller::Identity;
use crate::http::path::Slashes;
use crate::http::quota::Sheet;
use crate::http::route::Router;
use crate::rule::book::{Book, Plan};
use crate::rule::key::{OnMissing, Part, Seed};

#[derive(Debug)]
pub struct Snapshot {
    pub config: Config,
    pub router: Router,
    pub book: Book,
    /// One for each route, in the order of the configuration.
    pub lanes: Vec<Lane>,
    /// Fields that some rule counts by: no Connection field can strip them.
    pub key_fields: Vec<HeaderName>,
    pub slashes: Slashes,
}

/// A route made ready.
#[derive(Debug)]
pub struct Lane {
    pub name: String,
    pub plan: Plan,
    /// One for each rule of the plan.
    pub identities: Vec<Identity>,
    pub sheet: Sheet,
    /// Position in the configuration.
    pub upstream: usize,
}

impl Snapshot {
    pub fn new(config: Config, seed: Seed) -> Arc<Snapshot> {
        let book = Book::new(&config.rules, seed);
        let lane = |route: &Route| {
            let plan = book.plan(&route.rules);
            Lane {
                name: route.name.clone(),
                identities: route.rules.iter().map(|rule| Identity::new(&book.entries[*rule], route, seed)).collect(),
                sheet: Sheet::new(&book, &plan, &config.fields),
                upstream: route.upstream,
                plan,
            }
        };
        let lanes = config.routes.iter().map(lane).collect();
        let slashes = match config.encoded_slash {
            EncodedSlash::Refuse => Slashes::Refuse,
            EncodedSlash::Keep => Slashes::Keep,
        };
        let key_fields = key_fields(&config);
        Arc::new(Snapshot { router: Router::new(&config.routes), lanes, key_fields, slashes, book, config })
    }
}

fn key_fields(config: &Config) -> Vec<HeaderName> {
    let mut names = HashSet::new();
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
