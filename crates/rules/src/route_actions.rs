//! Actions of a route, compiled at load: changes of path and fields, or a response instead of the upstream's.
//!
//! The actions are evaluated while the request head is unchanged, and applied after the rules have admitted the request.
//! Values of variables are normalized or validated, so that a value cannot end a line, a path or a host.

use std::sync::Arc;

use http::header::{HeaderMap, HeaderName, HeaderValue};

use super::acme_challenges::PendingChallenges;
use super::client_plans::ClientLookup;
use super::key_source::RequestAttributes;
use super::public_location::{PathInverse, PublicLocation};
use super::ratelimit_headers::is_rate_limit_field;
use super::responses::{self, LocalResponse};
use transom_config::limits::Timeouts;
use transom_config::path::{PathPattern, Segment};
use transom_config::route::Route;
use transom_config::route_actions::{self, Actions, ChangedResponses, FieldChanges, PathChange};
use transom_config::template::{Template, TemplatePart, Variable};
use transom_http::error::RequestError;
use transom_http::percent_encoding::find_ambiguity;
use transom_http::request_validation::host_port;

/// The compiled actions of one route.
#[derive(Debug)]
pub struct RouteActions {
    direct_response: Option<DirectResponse>,
    path: Option<PathRewrite>,
    request_changes: Vec<HeaderChange>,
    /// Fields of requests that are set or removed. The upstream reads them from the gateway only, so no trailer has them.
    pub replaced_fields: Option<Arc<[HeaderName]>>,
    response_changes: Vec<HeaderChange>,
    changed_responses: ChangedResponses,
    /// Replaces the timeouts for all routes.
    pub timeouts: Option<Timeouts>,
    pub max_body: Option<Option<u64>>,
    /// Replaces the limit of the configuration.
    pub body_key_limit: Option<usize>,
    pub min_request_rate: Option<u64>,
    /// How the path is undone in responses, if what names the servers in them is replaced.
    pub path_inverse: Option<PathInverse>,
}

#[derive(Debug)]
enum DirectResponse {
    Redirect {
        to: Template,
        status: u16,
    },
    Respond(LocalResponse),
    /// The key authorization of the token that the path ends with.
    AcmeChallenge(Arc<PendingChallenges>),
}

#[derive(Debug)]
enum PathRewrite {
    Prefix {
        from: String,
        to: String,
    },
    /// Literals and path parameters.
    Template {
        pieces: Vec<PathPiece>,
        /// Whether a segment has parts of segments, or several parameters. It may become a dot segment.
        may_make_dot_segments: bool,
    },
}

#[derive(Debug)]
enum PathPiece {
    Literal(String),
    /// The position of a parameter in the path of the route.
    Param(usize),
}

#[derive(Debug)]
enum HeaderChange {
    Remove(HeaderName),
    Set(HeaderName, Template),
    Add(HeaderName, Template),
}

/// The values of template variables.
pub struct TemplateVariables<'r, 'a> {
    pub request: &'r RequestAttributes<'a>,
    pub clients: &'r ClientLookup<'a>,
    pub is_secure: bool,
}

/// The actions evaluated for one request.
#[derive(Debug, Default)]
pub struct AppliedActions {
    /// Sent instead of forwarding the request.
    pub direct_response: Option<LocalResponse>,
    /// Replaces the path of the forwarded request.
    pub path: Option<String>,
    /// What replaces the names of the servers in the response.
    pub public_location: Option<Box<PublicLocation>>,
    request_changes: RenderedChanges,
}

/// The changes to the fields of the response to one request.
#[derive(Debug)]
pub struct ResponseChanges {
    changes: RenderedChanges,
    changed_responses: ChangedResponses,
}

type RenderedChanges = Vec<(HeaderName, RenderedChange)>;

#[derive(Debug)]
enum RenderedChange {
    Remove,
    Set(HeaderValue),
    Add(HeaderValue),
}

impl RouteActions {
    pub fn new(actions: &Actions, route: &Route, challenges: &Arc<PendingChallenges>) -> RouteActions {
        let request_changes = header_changes(&actions.request_fields);
        RouteActions {
            replaced_fields: replaced_fields(&request_changes),
            direct_response: actions.response.as_ref().map(|response| match response {
                route_actions::LocalResponse::Redirect { to, status } => {
                    DirectResponse::Redirect { to: to.clone(), status: *status }
                }
                route_actions::LocalResponse::Respond { status, body } => {
                    DirectResponse::Respond(responses::direct_response(*status, body.as_ref()))
                }
                route_actions::LocalResponse::AcmeChallenge => DirectResponse::AcmeChallenge(Arc::clone(challenges)),
            }),
            path: actions.path.as_ref().map(|change| match change {
                PathChange::Prefix { from, to } => PathRewrite::Prefix { from: from.clone(), to: to.clone() },
                PathChange::Rewrite(pattern) => PathRewrite::Template {
                    pieces: path_pieces(pattern, &route.path.param_names()),
                    may_make_dot_segments: pattern.has_wildcards() || route.path.has_wildcards(),
                },
            }),
            request_changes,
            response_changes: header_changes(&actions.response_fields),
            changed_responses: actions.changed_responses,
            timeouts: actions.timeouts.clone(),
            max_body: actions.max_body,
            body_key_limit: actions.body_key_limit,
            min_request_rate: actions.min_request_rate,
            path_inverse: actions.rewrite_location.then(|| PathInverse::new(&route.path, actions.path.as_ref())),
        }
    }

    /// The changes to the response to a request; `None` without changes.
    pub fn response_changes(&self, variables: &TemplateVariables<'_, '_>) -> Option<Box<ResponseChanges>> {
        let changes = || render_changes(&self.response_changes, variables);
        let changed_responses = self.changed_responses;
        (!self.response_changes.is_empty()).then(|| Box::new(ResponseChanges { changes: changes(), changed_responses }))
    }

    /// Evaluates the other actions for a request.
    pub fn evaluate(&self, variables: &TemplateVariables<'_, '_>) -> Result<Box<AppliedActions>, RequestError> {
        let direct_response = match &self.direct_response {
            None => None,
            Some(DirectResponse::Respond(response)) => Some(response.clone()),
            Some(DirectResponse::AcmeChallenge(pending)) => {
                let answer = pending.of_token(variables.param(0)).ok_or(RequestError::NoRoute)?;
                Some(responses::text_response(answer))
            }
            Some(DirectResponse::Redirect { to, status }) => {
                if variables.request.host.is_empty() && names_host(to) {
                    return Err(RequestError::Host("the Host field is missing"));
                }
                let location = variables.render(to).ok_or(RequestError::Target("the request target is malformed"))?;
                Some(responses::redirect_response(*status, location))
            }
        };
        let path = self.path.as_ref().map(|path| path.render(variables)).transpose()?;
        Ok(Box::new(AppliedActions {
            direct_response,
            path,
            public_location: self.path_inverse.as_ref().map(|_| Box::new(variables.public_location())),
            request_changes: render_changes(&self.request_changes, variables),
        }))
    }
}

impl AppliedActions {
    /// Changes the fields of a request, after the changes made to every request.
    pub fn apply_to_request(&mut self, headers: &mut HeaderMap) {
        apply(std::mem::take(&mut self.request_changes), headers);
    }
}

impl ResponseChanges {
    /// Changes the response of the upstream, or of the route's redirect or fixed response.
    pub fn apply(self, headers: &mut HeaderMap) {
        apply(self.changes, headers);
    }

    /// Changes a refusal or an error, if the route does. The fields of a refusal already include the gateway's
    /// RateLimit fields, to which changes never apply.
    pub fn apply_to_local_response(self, headers: &mut HeaderMap) {
        if self.changed_responses == ChangedResponses::All {
            apply(self.changes.into_iter().filter(|(name, _)| !is_rate_limit_field(name)), headers);
        }
    }
}

fn apply(changes: impl IntoIterator<Item = (HeaderName, RenderedChange)>, headers: &mut HeaderMap) {
    for (name, change) in changes {
        match change {
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

fn render_changes(changes: &[HeaderChange], variables: &TemplateVariables<'_, '_>) -> RenderedChanges {
    changes.iter().filter_map(|change| render_change(change, variables)).collect()
}

fn render_change(change: &HeaderChange, variables: &TemplateVariables<'_, '_>) -> Option<(HeaderName, RenderedChange)> {
    match change {
        HeaderChange::Remove(name) => Some((name.clone(), RenderedChange::Remove)),
        HeaderChange::Set(name, text) => Some((name.clone(), RenderedChange::Set(variables.render(text)?))),
        HeaderChange::Add(name, text) => Some((name.clone(), RenderedChange::Add(variables.render(text)?))),
    }
}

fn header_changes(fields: &FieldChanges) -> Vec<HeaderChange> {
    // The configuration check rejects invalid names.
    let named = |name: &String| HeaderName::from_bytes(name.as_bytes()).ok();
    let remove = fields.remove.iter().filter_map(named).map(HeaderChange::Remove);
    let set = fields.set.iter().filter_map(|(name, text)| Some(HeaderChange::Set(named(name)?, text.clone())));
    let add = fields.add.iter().filter_map(|(name, text)| Some(HeaderChange::Add(named(name)?, text.clone())));
    // The caller's field is removed, so that the upstream reads the client from the gateway only.
    let about_client = fields.add.iter().filter(|(_name, text)| text.names_client());
    let replaced = about_client.filter_map(|(name, _text)| named(name)).map(HeaderChange::Remove);
    remove.chain(replaced).chain(set).chain(add).collect()
}

/// The fields that changes set or remove; `None` if there are none.
fn replaced_fields(changes: &[HeaderChange]) -> Option<Arc<[HeaderName]>> {
    let replaced = changes.iter().filter_map(|change| match change {
        HeaderChange::Remove(name) | HeaderChange::Set(name, _) => Some(name.clone()),
        HeaderChange::Add(..) => None,
    });
    Some(replaced.collect::<Arc<[HeaderName]>>()).filter(|names| !names.is_empty())
}

fn path_pieces(pattern: &PathPattern, params: &[&str]) -> Vec<PathPiece> {
    // The configuration check rejects unknown parameters, and those without a name.
    let param = |name: &str| {
        let position = params.iter().position(|known| *known == name);
        position.map_or(PathPiece::Literal(String::new()), PathPiece::Param)
    };
    let mut pieces = Vec::new();
    for segment in &pattern.segments {
        pieces.push(PathPiece::Literal(String::from("/")));
        match segment {
            Segment::Literal(text) => pieces.push(PathPiece::Literal(text.clone())),
            Segment::Wildcards(segment) => {
                let names = segment.names.iter().map(|name| param(name.as_deref().unwrap_or_default()));
                let mut texts = segment.texts.iter().cloned().map(PathPiece::Literal);
                pieces.extend(texts.next());
                pieces.extend(names.zip(texts).flat_map(|(name, text)| [name, text]));
            }
            Segment::Param(name) | Segment::Rest(name) => pieces.push(param(name)),
        }
    }
    pieces
}

impl PathRewrite {
    /// The new path. Normalized segments make a normalized path; an error if parts of segments do not.
    fn render(&self, variables: &TemplateVariables<'_, '_>) -> Result<String, RequestError> {
        let path = match self {
            PathRewrite::Prefix { from, to } => {
                let rest = variables.request.path.strip_prefix(from.as_str()).unwrap_or(variables.request.path);
                format!("{to}{rest}")
            }
            PathRewrite::Template { pieces, may_make_dot_segments } => {
                let text = |piece: &'_ PathPiece| match piece {
                    PathPiece::Literal(text) => text.clone(),
                    PathPiece::Param(position) => variables.param(*position).to_owned(),
                };
                let path: String = pieces.iter().map(text).collect();
                let is_dots = |segment| matches!(segment, "." | "..") || find_ambiguity(segment).is_some();
                if *may_make_dot_segments && path.split('/').any(is_dots) {
                    return Err(RequestError::Path("the rewritten path contains a dot segment"));
                }
                path
            }
        };
        Ok(if path.is_empty() { String::from("/") } else { path })
    }
}

/// Whether a template has the host of the request.
fn names_host(Template(parts): &Template) -> bool {
    parts.iter().any(|part| matches!(part, TemplatePart::Variable(Variable::Host | Variable::Authority)))
}

impl TemplateVariables<'_, '_> {
    fn public_location(&self) -> PublicLocation {
        let RequestAttributes { host, path, params, headers, .. } = *self.request;
        let port = host_port(headers).map_or(String::new(), |port| format!(":{port}"));
        let authority = format!("{host}{port}");
        let scheme = if self.is_secure { "https" } else { "http" };
        PublicLocation {
            origin: if host.is_empty() { String::new() } else { format!("{scheme}://{authority}") },
            authority,
            params: params.iter().map(|range| path.get(range.clone()).unwrap_or_default().to_owned()).collect(),
        }
    }

    fn param(&self, position: usize) -> &str {
        let RequestAttributes { path, params, .. } = self.request;
        params.get(position).and_then(|range| path.get(range.clone())).unwrap_or_default()
    }

    /// The text of a template; `None` if it is no valid field value.
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
                Variable::ClientIp => out.push_str(&self.request.address.to_canonical().to_string()),
                Variable::Scheme => out.push_str(if self.is_secure { "https" } else { "http" }),
                Variable::Host => out.push_str(self.request.host),
                Variable::Authority => {
                    out.push_str(self.request.host);
                    if let Some(port) = host_port(self.request.headers) {
                        out.push(':');
                        out.push_str(port);
                    }
                }
                Variable::Method => out.push_str(self.request.method.as_str()),
                Variable::Path => out.push_str(self.request.path),
                Variable::Query => out.push_str(self.request.uri.query().unwrap_or_default()),
                Variable::Uri => {
                    out.push_str(self.request.path);
                    if let Some(query) = self.request.uri.query() {
                        out.push('?');
                        out.push_str(query);
                    }
                }
                Variable::Route => out.push_str(self.request.route),
                Variable::Client => out.push_str(self.clients.variables(self.request).0),
                Variable::Plan => out.push_str(self.clients.variables(self.request).1),
                Variable::Param(position) => out.push_str(self.param(*position)),
            }
        }
        // `?{query}` without a query.
        if let [.., TemplatePart::Variable(Variable::Query)] = text.0[..]
            && self.request.uri.query().is_none_or(str::is_empty)
            && out.ends_with('?')
        {
            out.pop();
        }
        HeaderValue::try_from(out).ok()
    }
}
