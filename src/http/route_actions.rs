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
use super::key_source::RequestAttributes;
use super::responses::{self, LocalResponse};
use crate::config::limits::Timeouts;
use crate::config::route::{
    self, Actions, FieldChanges, PathChange, PathPattern, Route, Segment, Template, TemplatePart, Variable,
};

/// The actions of one route.
#[derive(Debug)]
pub struct RouteActions {
    direct_response: Option<DirectResponse>,
    path: Option<PathRewrite>,
    request_changes: Vec<HeaderChange>,
    response_changes: Vec<HeaderChange>,
    /// Instead of those of all routes.
    pub timeouts: Option<Timeouts>,
    pub max_body: Option<Option<u64>>,
    pub min_request_rate: Option<u64>,
}

#[derive(Debug)]
enum DirectResponse {
    Redirect { to: Template, status: u16 },
    Respond(LocalResponse),
}

#[derive(Debug)]
enum PathRewrite {
    Prefix {
        from: String,
        to: String,
    },
    /// Made of literals and parameters, by their position in the route's path.
    Template(Vec<PathPiece>),
}

#[derive(Debug)]
enum PathPiece {
    Literal(String),
    Param(usize),
}

#[derive(Debug)]
enum HeaderChange {
    Remove(HeaderName),
    Set(HeaderName, Template),
    Add(HeaderName, Template),
}

/// What variables stand for.
pub struct TemplateVariables<'a> {
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
    pub direct_response: Option<LocalResponse>,
    /// Goes upstream instead of the one that was matched.
    pub path: Option<String>,
    request_changes: Vec<(HeaderName, RenderedChange)>,
    response_changes: Vec<(HeaderName, RenderedChange)>,
}

#[derive(Debug)]
enum RenderedChange {
    Remove,
    Set(HeaderValue),
    Add(HeaderValue),
}

impl RouteActions {
    pub fn new(actions: &Actions, route: &Route) -> RouteActions {
        RouteActions {
            direct_response: actions.response.as_ref().map(|answer| match answer {
                route::LocalResponse::Redirect { to, status } => {
                    DirectResponse::Redirect { to: to.clone(), status: *status }
                }
                route::LocalResponse::Respond { status, body } => {
                    DirectResponse::Respond(responses::direct_response(*status, body.as_ref()))
                }
            }),
            path: actions.path.as_ref().map(|change| match change {
                PathChange::Prefix { from, to } => PathRewrite::Prefix { from: from.clone(), to: to.clone() },
                PathChange::Rewrite(pattern) => PathRewrite::Template(path_pieces(pattern, &route.path.param_names())),
            }),
            request_changes: header_changes(&actions.request_fields),
            response_changes: header_changes(&actions.response_fields),
            timeouts: actions.timeouts.clone(),
            max_body: actions.max_body,
            min_request_rate: actions.min_request_rate,
        }
    }

    /// What is to be done to a request.
    pub fn evaluate(&self, seen: &TemplateVariables<'_>) -> Result<Box<AppliedActions>, RequestError> {
        let reply = match &self.direct_response {
            None => None,
            Some(DirectResponse::Respond(reply)) => Some(reply.clone()),
            Some(DirectResponse::Redirect { to, status }) => {
                if seen.host.is_empty() && to.0.contains(&TemplatePart::Variable(Variable::Host)) {
                    return Err(RequestError::Host("the Host field is missing"));
                }
                let to = seen.render(to).ok_or(RequestError::Target("the request target is malformed"))?;
                Some(responses::redirect_response(*status, to))
            }
        };
        let touches =
            |changes: &[HeaderChange]| changes.iter().filter_map(|change| render_change(change, seen)).collect();
        let path = self.path.as_ref().map(|path| path.render(seen));
        Ok(Box::new(AppliedActions {
            direct_response: reply,
            path,
            request_changes: touches(&self.request_changes),
            response_changes: touches(&self.response_changes),
        }))
    }
}

impl AppliedActions {
    /// Changes a request's fields, behind all that is done to every request.
    pub fn apply_to_request(&mut self, headers: &mut HeaderMap) {
        apply(std::mem::take(&mut self.request_changes), headers);
    }

    /// Changes an answer's fields.
    pub fn apply_to_response(self, headers: &mut HeaderMap) {
        apply(self.response_changes, headers);
    }
}

fn apply(touches: Vec<(HeaderName, RenderedChange)>, headers: &mut HeaderMap) {
    for (name, touch) in touches {
        match touch {
            RenderedChange::Remove => {
                headers.remove(name);
            }
            RenderedChange::Set(value) => {
                headers.insert(name, value);
            }
            RenderedChange::Add(value) => {
                headers.append(name, value);
            }
        }
    }
}

fn render_change(change: &HeaderChange, seen: &TemplateVariables<'_>) -> Option<(HeaderName, RenderedChange)> {
    match change {
        HeaderChange::Remove(name) => Some((name.clone(), RenderedChange::Remove)),
        HeaderChange::Set(name, text) => Some((name.clone(), RenderedChange::Set(seen.render(text)?))),
        HeaderChange::Add(name, text) => Some((name.clone(), RenderedChange::Add(seen.render(text)?))),
    }
}

fn header_changes(fields: &FieldChanges) -> Vec<HeaderChange> {
    // The configuration has been checked: what is no name never gets here.
    let named = |name: &String| HeaderName::from_bytes(name.as_bytes()).ok();
    let remove = fields.remove.iter().filter_map(named).map(HeaderChange::Remove);
    let set = fields.set.iter().filter_map(|(name, text)| Some(HeaderChange::Set(named(name)?, text.clone())));
    let add = fields.add.iter().filter_map(|(name, text)| Some(HeaderChange::Add(named(name)?, text.clone())));
    remove.chain(set).chain(add).collect()
}

fn path_pieces(pattern: &PathPattern, params: &[&str]) -> Vec<PathPiece> {
    let mut steps = Vec::new();
    for segment in &pattern.segments {
        steps.push(PathPiece::Literal(String::from("/")));
        steps.push(match segment {
            Segment::Literal(text) => PathPiece::Literal(text.clone()),
            Segment::Param(name) | Segment::Rest(name) => {
                // The configuration has been checked: the route has all of them.
                let position = params.iter().position(|known| known == name);
                position.map_or(PathPiece::Literal(String::new()), PathPiece::Param)
            }
        });
    }
    steps
}

impl PathRewrite {
    /// Pieces of a path in normal form make one in normal form.
    fn render(&self, seen: &TemplateVariables<'_>) -> String {
        let path = match self {
            PathRewrite::Prefix { from, to } => {
                let rest = seen.path.strip_prefix(from.as_str()).unwrap_or(seen.path);
                format!("{to}{rest}")
            }
            PathRewrite::Template(steps) => {
                let piece = |step: &'_ PathPiece| match step {
                    PathPiece::Literal(text) => text.clone(),
                    PathPiece::Param(position) => seen.param(*position).to_owned(),
                };
                steps.iter().map(piece).collect()
            }
        };
        if path.is_empty() { String::from("/") } else { path }
    }
}

impl<'a> TemplateVariables<'a> {
    pub fn of(caller: &RequestAttributes<'a>, is_secure: bool) -> TemplateVariables<'a> {
        let RequestAttributes { address: client, host, method, path, params, uri, route, .. } = *caller;
        TemplateVariables { client, is_secure, host, method, path, uri, route, params }
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
