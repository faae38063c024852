//! Why a route serves a request: what makes it more specific than the next candidates, or why none matches.

use std::cmp::{Ordering, Reverse};
use std::time::Duration;

use serde_json::{Value, json};

use crate::proxy::served_config::ServedConfig;
use transom_config::path::Segment;
use transom_config::route::Route;
use transom_config::{Config, UpstreamId};
use transom_limiter::ip_prefix::Network;
use transom_rules::router::{RouteQuery, UnmetCondition};

/// Most other candidates that are explained.
const OTHERS_MAX: usize = 10;

/// What the routes make of a request.
#[derive(Debug)]
pub struct RouteChoice {
    pub chosen: Option<ExplainedRoute>,
    pub reason: String,
    /// Other routes of the same scheme, host and path, the most specific first.
    pub others: Vec<ExplainedRoute>,
}

#[derive(Debug)]
pub struct ExplainedRoute {
    pub name: String,
    pub path: String,
    /// `None`: the route responds itself.
    pub upstream: Option<String>,
    /// `None`: requests do not wait for a reachable server.
    pub hold: Option<Hold>,
    /// Why the route does not serve the request; empty for the chosen one.
    pub reason: String,
}

/// How requests wait while no server of the upstream is reachable.
#[derive(Debug)]
pub struct Hold {
    pub limit: Duration,
    pub max: u32,
    /// Requests that wait now.
    pub held: u32,
}

impl Hold {
    fn of(served: &ServedConfig, upstream: UpstreamId) -> Option<Hold> {
        let policy = &served.config.upstreams[upstream].policy;
        // Without a gateway, no request waits.
        let health = served.upstream_health.get(upstream);
        let held = || health.map_or(0, |health| health.request_limit.held());
        policy.hold.map(|limit| Hold { limit, max: policy.max_held, held: held() })
    }

    fn to_json(&self) -> Value {
        json!({ "limit_ms": self.limit.as_millis() as u64, "max_held": self.max, "held": self.held })
    }
}

impl ExplainedRoute {
    fn new(served: &ServedConfig, route: &Route, reason: String) -> ExplainedRoute {
        let config = &served.config;
        let upstream = route.upstream.map(|upstream| config.upstreams[upstream].name.clone());
        let hold = route.upstream.and_then(|upstream| Hold::of(served, upstream));
        ExplainedRoute { name: route.name.clone(), path: route.path.text.clone(), upstream, hold, reason }
    }
}

impl RouteChoice {
    pub fn new(served: &ServedConfig, query: &RouteQuery<'_>) -> RouteChoice {
        let config = &served.config;
        let candidates = served.router.candidates(query);
        let chosen = candidates.iter().find(|(_, unmet)| unmet.is_none()).map(|(route, _)| &config.routes[*route]);
        let others = candidates.iter().map(|(route, unmet)| (&config.routes[*route], *unmet));
        let others = others.filter(|(route, _)| chosen.is_none_or(|chosen| chosen.name != route.name));
        let explained = others.map(|(route, unmet)| {
            let reason = match (unmet, chosen) {
                (Some(UnmetCondition::Method), _) => format!("it takes {} only", route.methods.join(", ")),
                (Some(UnmetCondition::Network), _) => {
                    let networks: Vec<String> = route.networks.iter().map(Network::to_string).collect();
                    format!("it takes clients of `{}` only", networks.join("`, `"))
                }
                (Some(UnmetCondition::Header), _) => {
                    format!("the request does not have the required header: `{}`", names_of(&route.headers))
                }
                (Some(UnmetCondition::Query), _) => {
                    format!("the request does not have the required query parameter: `{}`", names_of(&route.query))
                }
                (None, Some(chosen)) => less_specific(route, chosen, query.host),
                (None, None) => String::new(),
            };
            ExplainedRoute::new(served, route, reason)
        });
        let others: Vec<ExplainedRoute> = explained.take(OTHERS_MAX).collect();
        let reason = match (chosen, others.iter().find(|other| !other.reason.is_empty())) {
            (Some(_), None) => String::from("it is the only route that matches host and path"),
            (Some(_), Some(_)) => String::from("it is the most specific route that matches"),
            (None, Some(_)) => String::from("no route matches: the routes of this path do not take the request"),
            (None, None) => no_candidate(config, query),
        };
        RouteChoice { chosen: chosen.map(|route| ExplainedRoute::new(served, route, String::new())), reason, others }
    }

    /// The chosen route in JSON.
    pub fn chosen_json(&self) -> Option<Value> {
        let route = self.chosen.as_ref()?;
        let mut chosen = json!({
            "name": route.name, "path": route.path, "upstream": route.upstream, "reason": self.reason,
        });
        if let Some(hold) = &route.hold {
            chosen["hold"] = hold.to_json();
        }
        Some(chosen)
    }

    /// The other candidates in JSON.
    pub fn others_json(&self) -> Vec<Value> {
        let route = |route: &ExplainedRoute| json!({ "name": route.name, "path": route.path, "reason": route.reason });
        self.others.iter().map(route).collect()
    }
}

/// The names of required fields or parameters, to be written between backquotes.
fn names_of(conditions: &[(String, Option<String>)]) -> String {
    conditions.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join("`, `")
}

/// Why no route has the scheme, host and path of a request.
fn no_candidate(config: &Config, query: &RouteQuery<'_>) -> String {
    let hosts: Vec<&str> = config.routes.iter().flat_map(|route| &route.hosts).map(String::as_str).collect();
    let serves_host = |route: &Route| route.hosts.is_empty() || host_rank(route, query.host) > 0;
    match config.routes.iter().any(serves_host) {
        true => format!("no route matches the path `{}` on the host `{}`", query.path, query.host),
        false => format!("no route serves the host `{}`; routes name `{}`", query.host, hosts.join("`, `")),
    }
}

/// How specific the host of a route is that matches `host`: the length of the matching part; 0: any.
fn host_rank(route: &Route, host: &str) -> usize {
    let rank = |named: &String| match named.strip_prefix('*') {
        Some(suffix) if host.len() > suffix.len() && host.ends_with(suffix) => suffix.len(),
        None if named == host => usize::MAX,
        _ => 0,
    };
    route.hosts.iter().map(rank).max().unwrap_or(0)
}

/// Why `chosen` precedes a route that matches as well, in the order of the router.
fn less_specific(route: &Route, chosen: &Route, host: &str) -> String {
    if chosen.secure.is_some() && route.secure.is_none() {
        return format!("`{}` names the scheme", chosen.name);
    }
    if host_rank(chosen, host) > host_rank(route, host) {
        return match host_rank(chosen, host) {
            usize::MAX => format!("`{}` names the host", chosen.name),
            _ => format!("`{}` names the host more exactly", chosen.name),
        };
    }
    let segments = chosen.path.segments.iter().zip(&route.path.segments);
    for (number, (ours, theirs)) in segments.enumerate() {
        let number = number + 1;
        if path_rank(ours) != path_rank(theirs) {
            let kind = |segment: &Segment| match segment {
                Segment::Literal(text) => format!("literal `{text}`"),
                Segment::Wildcards(segment) => format!("literal text of `{}`", segment.written()),
                Segment::Param(name) => format!("parameter `{{{name}}}`"),
                Segment::Rest(name) => format!("catch-all `{{*{name}}}`"),
            };
            return format!(
                "in segment {number} of the path, the {} of `{}` precedes its {}",
                kind(ours),
                chosen.name,
                kind(theirs)
            );
        }
    }
    let conditions = |route: &Route| route.headers.len() + route.query.len();
    let values = |route: &Route| route.headers.iter().chain(&route.query).filter(|(_, value)| value.is_some()).count();
    match (chosen.path.segments.len().cmp(&route.path.segments.len()), chosen.methods.is_empty()) {
        (Ordering::Less | Ordering::Greater, _) => format!("`{}` ends where the path ends", chosen.name),
        (Ordering::Equal, false) if route.methods.is_empty() => format!("`{}` names the method", chosen.name),
        _ if chosen.widest_network() > route.widest_network() => match route.widest_network() {
            None => format!("`{}` names networks", chosen.name),
            Some(_) => format!("`{}` names narrower networks", chosen.name),
        },
        _ if conditions(chosen) > conditions(route) => match chosen.query.len() > route.query.len() {
            true => format!("`{}` requires more query parameters", chosen.name),
            false => format!("`{}` requires more headers", chosen.name),
        },
        _ if values(chosen) > values(route) => match chosen.query.is_empty() {
            true => format!("`{}` requires more values of headers", chosen.name),
            false => format!("`{}` requires more values of headers and query parameters", chosen.name),
        },
        _ if chosen.methods.contains(&String::from("HEAD")) && !route.methods.contains(&String::from("HEAD")) => {
            format!("`{}` names HEAD", chosen.name)
        }
        _ => format!("`{}` comes first in the file", chosen.name),
    }
}

/// The more specific kind of a segment is greater, and so is the more specific of two segments with wildcards.
fn path_rank(segment: &Segment) -> (u8, [usize; 3], Reverse<&[String]>) {
    match segment {
        Segment::Literal(_) => (3, [0; 3], Reverse(&[])),
        Segment::Wildcards(segment) => (2, segment.specificity(), Reverse(&segment.texts)),
        Segment::Param(_) => (1, [0; 3], Reverse(&[])),
        Segment::Rest(_) => (0, [0; 3], Reverse(&[])),
    }
}
