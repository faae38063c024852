//! The order of routes: products that try them in an order of their own, and the gateway, which takes the most specific one.

use std::borrow::Cow;
use std::cmp::Ordering;

use crate::gateway::{DroppedRoute, Gateway, Route, Section, Value};
use crate::network::networks_of_both;
use crate::path::{Common, common, covers, precedes};
use crate::source::Effect;

/// Most routes that are added.
const ADDED_MAX: usize = 500;

/// Where the gateway takes a route that the product tries later, and that restricts less, adds a route for the requests that match
/// both, with the actions of the one that the product takes. Other differences are noted. Of routes with the same rank, the order
/// is that of the gateway, unless the product takes any of them: then the one that restricts more is taken.
pub fn keep_order(gateway: &mut Gateway, product: &str) {
    let mut order: Vec<usize> = (0..gateway.routes.len()).collect();
    order.sort_by(|one, other| gateway.routes[*one].rank.cmp(&gateway.routes[*other].rank));
    let (end, mut noted) = (order.len() + ADDED_MAX, Vec::new());
    // From the last one on, so that routes that are added are compared as well.
    for first in order {
        for second in 0..gateway.routes.len() {
            let (one, other) = (&gateway.routes[first], &gateway.routes[second]);
            let takes_any = gateway.takes_any && one.rank == other.rank && one.position != other.position;
            if one.rank <= other.rank && !takes_any || one.actions().eq(other.actions()) {
                continue;
            }
            let Some(hosts) = hosts_of_other(one, other, second < first) else { continue };
            let Some(both) = conditions_of_both(one, other) else { continue };
            let path = match common(&one.path, &other.path) {
                Common::Nothing => continue,
                Common::Pattern(path) => Some(path),
                Common::Unknown => None,
            };
            let [mut is_weaker, mut is_stricter] =
                [(one, other), (other, one)].map(|(one, other)| one.section.restricts_more(&other.section));
            if takes_any && is_weaker && is_stricter {
                (is_weaker, is_stricter) = (false, false);
            }
            let (position, other_position) = (one.position.clone(), other.position.clone());
            let Some(at) = position.clone() else { continue };
            if !is_weaker || path.is_none() || gateway.routes.len() >= end {
                let effect = match (is_weaker, is_stricter) {
                    (true, _) => Effect::NotEnforced,
                    (false, true) => Effect::Stricter,
                    (false, false) => Effect::Differs,
                };
                let taken = if takes_any { "any of them" } else { "this one" };
                let text = format!(
                    "`{}`: requests that also match `{}` have the route of the latter; {product} takes {taken}",
                    one.shown(),
                    other.shown()
                );
                // Once for all paths of two routes.
                if !noted.contains(&(effect, position.clone(), other_position.clone())) {
                    noted.push((effect, position, other_position));
                    gateway.note(effect, &at, text);
                }
                continue;
            }
            let path = path.unwrap_or_default();
            let mut section = Section { settings: one.actions().cloned().collect(), ..Section::default() };
            let taken = if takes_any { "any of them" } else { "the former" };
            section.comment(format!(
                "Requests that match `{}` and `{}`: {product} takes {taken}.",
                one.shown(),
                other.shown()
            ));
            let is_named = |(name, value): &(String, Value)| {
                name == "rewrite" && matches!(value, Value::Text(to) if to.contains('{')) && path != one.path
            };
            if section.settings.iter().any(is_named) {
                let text = format!("`{path}`: the path cannot be changed as for `{}`: the route is closed", one.path);
                section.close(403);
                let comment = gateway.placed_note(Effect::Stricter, &at, text);
                section.comment(comment);
            }
            let rank = gateway.routes[first].rank.clone();
            gateway.add_route(Route { hosts, path, rank, section, ..both }, &at);
        }
    }
}

/// Notes routes that cannot be expressed, by whether other routes admit requests that they restrict.
pub fn note_dropped(gateway: &mut Gateway) {
    for DroppedRoute { at_most, position, why } in std::mem::take(&mut gateway.dropped) {
        let mut others: Vec<(&Route, &Route)> = Vec::new();
        for dropped in &at_most {
            others.extend(
                gateway.routes.iter().filter(|other| may_match_both(dropped, other)).map(|other| (dropped, other)),
            );
        }
        // One that has all of its requests is shown.
        others
            .sort_by_key(|(dropped, other)| !covers(&dropped.compared(&other.path), &dropped.compared(&dropped.path)));
        let weaker = others.iter().find(|(dropped, other)| dropped.section.restricts_more(&other.section));
        let effect = if weaker.is_some() { Effect::NotEnforced } else { Effect::LeftOut };
        let outcome = match weaker.or(others.first()) {
            Some((_, other)) => format!("its requests may have the route of `{}`", other.shown()),
            None => "its requests get 404".to_owned(),
        };
        gateway.note(effect, &position, format!("{why}: {outcome}"));
    }
}

fn may_match_both(dropped: &Route, other: &Route) -> bool {
    hosts_of_both(dropped, other)
        && conditions_of_both(dropped, other).is_some()
        && common(&dropped.compared(&dropped.path), &dropped.compared(&other.path)) != Common::Nothing
}

/// Whether a request may have a host of both.
fn hosts_of_both(one: &Route, other: &Route) -> bool {
    let matches =
        |wide: &str, narrow: &str| wide == narrow || wide.strip_prefix('*').is_some_and(|end| narrow.ends_with(end));
    let meets = |one: &String| other.hosts.iter().any(|other| matches(one, other) || matches(other, one));
    one.hosts.is_empty() || other.hosts.is_empty() || one.hosts.iter().any(meets)
}

impl Route {
    /// What it matches, such as `POST a.example/login`.
    fn shown(&self) -> String {
        let fields: String = self.headers.iter().chain(&self.query).map(|(name, _)| format!(" with {name}")).collect();
        let methods = self.methods.join(",");
        format!("{methods} {}{}{fields}", self.hosts.join(","), self.path).trim_start().to_owned()
    }

    /// A path as one that is compared with its own.
    fn compared<'p>(&self, path: &'p str) -> Cow<'p, str> {
        if self.ignores_case { path.to_lowercase().into() } else { path.into() }
    }

    /// What is done with requests.
    fn actions(&self) -> impl Iterator<Item = &(String, Value)> {
        self.section.settings.iter().filter(|(name, _)| name != "name")
    }
}

/// The hosts of both for which the gateway takes the other route where both match. Empty: all. `is_before`: in the file.
fn hosts_of_other(one: &Route, other: &Route, is_before: bool) -> Option<Vec<String>> {
    let any = [String::new()];
    let hosts = |route: &Route| if route.hosts.is_empty() { any.to_vec() } else { route.hosts.clone() };
    let fields = |route: &Route| route.headers.len() + route.query.len();
    let conditions = |route: &Route| (!route.methods.is_empty(), !route.networks.is_empty(), fields(route));
    let by_path = match (precedes(&one.path, &other.path), precedes(&other.path, &one.path)) {
        (true, _) => Ordering::Greater,
        (_, true) => Ordering::Less,
        _ => conditions(one).cmp(&conditions(other)).then((!is_before).cmp(&true)),
    };
    let mut common = Vec::new();
    for host in hosts(one) {
        for other in hosts(other) {
            let (narrow, wide) = if precision(&host) >= precision(&other) { (&host, &other) } else { (&other, &host) };
            let is_pattern = wide.is_empty() || wide.starts_with('*');
            let is_common = narrow == wide || is_pattern && narrow.ends_with(wide.trim_start_matches('*'));
            if is_common && precision(&host).cmp(&precision(&other)).then(by_path).is_lt() && !common.contains(narrow) {
                common.push(narrow.clone());
            }
        }
    }
    let is_any = common.contains(&String::new());
    (!common.is_empty()).then(|| if is_any { Vec::new() } else { common })
}

/// An exact host is tried before a wildcard, and a longer wildcard before a shorter one. Empty: any host.
fn precision(host: &str) -> (bool, usize) {
    (!host.is_empty() && !host.starts_with('*'), host.len())
}

/// The methods and header fields that both require; `None` if no request has them.
fn conditions_of_both(one: &Route, other: &Route) -> Option<Route> {
    let methods: Vec<String> = match (&one.methods[..], &other.methods[..]) {
        ([], methods) | (methods, []) => methods.to_vec(),
        (methods, others) => methods.iter().filter(|method| others.contains(method)).cloned().collect(),
    };
    let is_any = one.methods.is_empty() && other.methods.is_empty();
    let fields_of_both = |one: &[(String, Value)], other: &[(String, Value)]| {
        let mut fields = one.to_vec();
        for field in other {
            match fields.iter().find(|(name, _)| *name == field.0) {
                Some(known) if known != field => return None,
                Some(_) => {}
                None => fields.push(field.clone()),
            }
        }
        Some(fields)
    };
    let headers = fields_of_both(&one.headers, &other.headers)?;
    let query = fields_of_both(&one.query, &other.query)?;
    let networks = networks_of_both(&one.networks, &other.networks)?;
    (is_any || !methods.is_empty()).then(|| Route { methods, headers, query, networks, ..Route::default() })
}
