//! What a route changes on the way: path, fields, limits; or what it answers by itself.
//!
//! Texts with variables are kept in pieces, and names of fields as they are sent. What each variable
//! is, and that nothing here can break a head apart, has been checked.

use super::{Body, PathPattern, Timeouts};

/// All that a route changes.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Actions {
    /// Instead of asking an upstream.
    pub response: Option<LocalResponse>,
    pub path: Option<PathChange>,
    pub request_fields: FieldChanges,
    pub response_fields: FieldChanges,
    /// Instead of [`super::Config::timeouts`].
    pub timeouts: Option<Timeouts>,
    /// Instead of [`super::Limits::max_body`]; of `Some(None)`, any number.
    pub max_body: Option<Option<u64>>,
    /// Instead of [`super::Limits::min_request_rate`].
    pub min_request_rate: Option<u64>,
}

/// What a route answers by itself.
#[derive(Clone, PartialEq, Debug)]
pub enum LocalResponse {
    Redirect { to: Template, status: u16 },
    Respond { status: u16, body: Option<Body> },
}

/// Which path goes upstream instead of the one that was matched.
#[derive(Clone, PartialEq, Debug)]
pub enum PathChange {
    /// The path begins with `from`, always: `to` stands there instead.
    Prefix { from: String, to: String },
    /// Made of the route's parameters.
    Rewrite(PathPattern),
}

/// In this order: what is removed, set, added.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct FieldChanges {
    pub remove: Vec<String>,
    /// Instead of all fields of that name.
    pub set: Vec<(String, Template)>,
    /// Beside others of that name.
    pub add: Vec<(String, Template)>,
}

impl FieldChanges {
    pub fn is_empty(&self) -> bool {
        self.remove.is_empty() && self.set.is_empty() && self.add.is_empty()
    }
}

/// A text with variables.
#[derive(Clone, PartialEq, Debug)]
pub struct Template(pub Vec<TemplatePart>);

#[derive(Clone, PartialEq, Debug)]
pub enum TemplatePart {
    Literal(String),
    Variable(Variable),
}

#[derive(Clone, PartialEq, Debug)]
pub enum Variable {
    /// The address of whoever asks.
    ClientIp,
    /// `http` or `https`.
    Scheme,
    /// Lower case, without port.
    Host,
    Method,
    /// In normal form.
    Path,
    /// As it came, without the question mark; empty where there is none.
    Query,
    /// Path and, behind a question mark, the query, if there is one.
    Uri,
    /// The name of the route.
    Route,
    /// A parameter of the route, by its position.
    Param(usize),
}
