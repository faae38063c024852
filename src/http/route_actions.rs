//! What a route changes on the way, made ready when the configuration is loaded: path, fields, or an answer
//! instead of an upstream's.
//!
//! A request's part of it is worked out while its head is still as it came, and put into effect when the
//! rules have let it pass. What variables stand for is in normal form or was checked by the gate, so
//! nothing of it can end a line, a path or a host.

use std::net::IpAddr;
use std::ops::Range;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, Uri};

use super::error::RequestError;
use super::rate_limit_key::Caller;
use super::responses::{self, Reply};
use crate::config::limits::Timeouts;
use crate::config::route::{
    Actions, FieldChanges, LocalResponse, PathChange, PathPattern, Route, Segment, Template, TemplatePart, Variable,
};

/// The actions of one route.
#[derive(Debug)]
pub struct Action {
    answer: Option<Own>,
    path: Option<Path>,
    request: Vec<Change>,
    response: Vec<Change>,
    /// Instead of those of all routes.
    pub timeouts: Option<Timeouts>,
    pub max_body: Option<Option<u64>>,
    pub min_request_rate: Option<u64>,
}

#[derive(Debug)]
enum Own {
    Redirect { to: Template, status: u16 },
    Respond(Reply),
}

#[derive(Debug)]
enum Path {
    Prefix {
        from: String,
        to: String,
    },
    /// Made of literals and parameters, by their position in the route's path.
    Rewrite(Vec<Step>),
}

#[derive(Debug)]
enum Step {
    Literal(String),
    Param(usize),
}

#[derive(Debug)]
enum Change {
    Remove(HeaderName),
    Set(HeaderName, Template),
    Add(HeaderName, Template),
}

/// What variables stand for.
pub struct Seen<'a> {
    pub client: IpAddr,
    pub is_secure: bool,
    /// Lower case, without port; empty where HTTP/1.0 named none.
    pub host: &'a str,
    pub method: &'a Method,
    /// In normal form.
    pub path: &'a str,
    /// The target as it came, for its query.
    pub uri: &'a Uri,
    pub route: &'a str,
    /// Where in `path` the route's parameters stand.
    pub params: &'a [Range<usize>],
}

/// What is done to one request.
#[derive(Debug, Default)]
pub struct AppliedActions {
    /// Instead of asking an upstream.
    pub reply: Option<Reply>,
    /// Goes upstream instead of the one that was matched.
    pub path: Option<String>,
    request: Vec<(HeaderName, Touch)>,
    response: Vec<(HeaderName, Touch)>,
}

#[derive(Debug)]
enum Touch {
    Remove,
    Set(HeaderValue),
    Add(HeaderValue),
}

impl Action {
    pub fn new(actions: &Actions, route: &Route) -> Action {
        Action {
            answer: actions.response.as_ref().map(|answer| match answer {
                LocalResponse::Redirect { to, status } => Own::Redirect { to: to.clone(), status: *status },
                LocalResponse::Respond { status, body } => Own::Respond(responses::own(*status, body.as_ref())),
            }),
            path: actions.path.as_ref().map(|change| match change {
                PathChange::Prefix { from, to } => Path::Prefix { from: from.clone(), to: to.clone() },
                PathChange::Rewrite(pattern) => Path::Rewrite(steps(pattern, &route.path.param_names())),
            }),
            request: changes(&actions.request_fields),
            response: changes(&actions.response_fields),
            timeouts: actions.timeouts.clone(),
            max_body: actions.max_body,
            min_request_rate: actions.min_request_rate,
        }
    }

    /// What is to be done to a request.
    pub fn of(&self, seen: &Seen<'_>) -> Result<Box<AppliedActions>, RequestError> {
        let reply = match &self.answer {
            None => None,
            Some(Own::Respond(reply)) => Some(reply.clone()),
            Some(Own::Redirect { to, status }) => {
                if seen.host.is_empty() && to.0.contains(&TemplatePart::Variable(Variable::Host)) {
                    return Err(RequestError::Host("the Host field is missing"));
                }
                let to = seen.render(to).ok_or(RequestError::Target("the request target is malformed"))?;
                Some(responses::redirect(*status, to))
            }
        };
        let touches = |changes: &[Change]| changes.iter().filter_map(|change| touch(change, seen)).collect();
        let path = self.path.as_ref().map(|path| path.of(seen));
        Ok(Box::new(AppliedActions { reply, path, request: touches(&self.request), response: touches(&self.response) }))
    }
}

impl AppliedActions {
    /// Changes a request's fields, behind all that is done to every request.
    pub fn to_request(&mut self, headers: &mut HeaderMap) {
        apply(std::mem::take(&mut self.request), headers);
    }

    /// Changes an answer's fields.
    pub fn to_response(self, headers: &mut HeaderMap) {
        apply(self.response, headers);
    }
}

fn apply(touches: Vec<(HeaderName, Touch)>, headers: &mut HeaderMap) {
    for (name, touch) in touches {
        match touch {
            Touch::Remove => {
                headers.remove(name);
            }
            Touch::Set(value) => {
                headers.insert(name, value);
            }
            Touch::Add(value) => {
                headers.append(name, value);
            }
        }
    }
}

fn touch(change: &Change, seen: &Seen<'_>) -> Option<(HeaderName, Touch)> {
    match change {
        Change::Remove(name) => Some((name.clone(), Touch::Remove)),
        Change::Set(name, text) => Some((name.clone(), Touch::Set(seen.render(text)?))),
        Change::Add(name, text) => Some((name.clone(), Touch::Add(seen.render(text)?))),
    }
}

fn changes(fields: &FieldChanges) -> Vec<Change> {
    // The configuration has been checked: what is no name never gets here.
    let named = |name: &String| HeaderName::from_bytes(name.as_bytes()).ok();
    let remove = fields.remove.iter().filter_map(named).map(Change::Remove);
    let set = fields.set.iter().filter_map(|(name, text)| Some(Change::Set(named(name)?, text.clone())));
    let add = fields.add.iter().filter_map(|(name, text)| Some(Change::Add(named(name)?, text.clone())));
    remove.chain(set).chain(add).collect()
}

fn steps(pattern: &PathPattern, params: &[&str]) -> Vec<Step> {
    let mut steps = Vec::new();
    for segment in &pattern.segments {
        steps.push(Step::Literal(String::from("/")));
        steps.push(match segment {
            Segment::Literal(text) => Step::Literal(text.clone()),
            Segment::Param(name) | Segment::Rest(name) => {
                // The configuration has been checked: the route has all of them.
                let position = params.iter().position(|known| known == name);
                position.map_or(Step::Literal(String::new()), Step::Param)
            }
        });
    }
    steps
}

impl Path {
    /// Pieces of a path in normal form make one in normal form.
    fn of(&self, seen: &Seen<'_>) -> String {
        let path = match self {
            Path::Prefix { from, to } => {
                let rest = seen.path.strip_prefix(from.as_str()).unwrap_or(seen.path);
                format!("{to}{rest}")
            }
            Path::Rewrite(steps) => {
                let piece = |step: &'_ Step| match step {
                    Step::Literal(text) => text.clone(),
                    Step::Param(position) => seen.param(*position).to_owned(),
                };
                steps.iter().map(piece).collect()
            }
        };
        if path.is_empty() { String::from("/") } else { path }
    }
}

impl<'a> Seen<'a> {
    pub fn of(caller: &Caller<'a>, is_secure: bool) -> Seen<'a> {
        let Caller { address: client, host, method, path, params, uri, route, .. } = *caller;
        Seen { client, is_secure, host, method, path, uri, route, params }
    }

    fn param(&self, position: usize) -> &str {
        self.params.get(position).and_then(|range| self.path.get(range.clone())).unwrap_or_default()
    }

    /// A text with what its variables stand for; `None` if that can be no field's value.
    fn render(&self, text: &Template) -> Option<HeaderValue> {
        let mut out = String::new();
        for piece in &text.0 {
            let variable = match piece {
                TemplatePart::Literal(text) => {
                    out.push_str(text);
                    continue;
                }
                TemplatePart::Variable(variable) => variable,
            };
            match variable {
                Variable::ClientIp => out.push_str(&self.client.to_canonical().to_string()),
                Variable::Scheme => out.push_str(if self.is_secure { "https" } else { "http" }),
                Variable::Host => out.push_str(self.host),
                Variable::Method => out.push_str(self.method.as_str()),
                Variable::Path => out.push_str(self.path),
                Variable::Query => out.push_str(self.uri.query().unwrap_or_default()),
                Variable::Uri => {
                    out.push_str(self.path);
                    if let Some(query) = self.uri.query() {
                        out.push('?');
                        out.push_str(query);
                    }
                }
                Variable::Route => out.push_str(self.route),
                Variable::Param(position) => out.push_str(self.param(*position)),
            }
        }
        HeaderValue::from_bytes(out.as_bytes()).ok()
    }
}
