//! The intermediate form, which every importer fills, and `toml_writer` writes: the sections of a gateway.toml with their comments.

use std::collections::BTreeSet;

use transom_config::diagnostics::Problem;

use crate::network::{Network, networks_of_both};
use crate::source::{Effect, Note, Position};

/// Settings of a route that have no effect on a response of the gateway.
const OF_FORWARDED_REQUESTS: [&str; 8] = [
    "upstream",
    "strip_prefix",
    "replace_prefix",
    "rewrite",
    "rewrite_location",
    "request_headers",
    "timeouts",
    "max_body",
];

/// Most networks that are repeated for several routes.
const COPIED_NETWORKS: usize = 32;

/// A value of a setting.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Value {
    Text(String),
    Number(u64),
    Bool(bool),
    List(Vec<Value>),
    Table(Vec<(String, Value)>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::Text(text)
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Value {
        Value::Number(number)
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Value {
        Value::Bool(value)
    }
}

impl<V: Into<Value>> From<Vec<V>> for Value {
    fn from(list: Vec<V>) -> Value {
        Value::List(list.into_iter().map(Into::into).collect())
    }
}

/// An inline table.
pub fn table<const N: usize>(settings: [(&str, Value); N]) -> Value {
    Value::Table(settings.map(|(name, value)| (name.to_owned(), value)).into())
}

/// A single value, or a list of several.
pub fn one_or_list(mut values: Vec<String>) -> Value {
    if values.len() == 1 { values.remove(0).into() } else { values.into() }
}

/// The settings of a table, below its comments.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Section {
    pub comments: Vec<String>,
    pub settings: Vec<(String, Value)>,
    /// Networks that a route refuses, until [`Gateway::write_refusals`].
    pub denied: Vec<String>,
}

impl Section {
    pub fn set(&mut self, name: &str, value: impl Into<Value>) {
        let value = value.into();
        match self.settings.iter_mut().find(|(set, _)| set == name) {
            Some((_, old)) => *old = value,
            None => self.settings.push((name.to_owned(), value)),
        }
    }

    pub fn get(&self, name: &str) -> Option<&Value> {
        self.settings.iter().find(|(set, _)| set == name).map(|(_, value)| value)
    }

    /// Adds to a list.
    pub fn push(&mut self, name: &str, value: impl Into<Value>) {
        let value = value.into();
        match self.settings.iter_mut().find(|(set, _)| set == name) {
            Some((_, Value::List(list))) if list.contains(&value) => {}
            Some((_, Value::List(list))) => list.push(value),
            _ => self.set(name, Value::List(vec![value])),
        }
    }

    /// Whether a route limits requests, or refuses some.
    pub fn restricts(&self) -> bool {
        !self.denied.is_empty() || ["rules", "allow", "respond"].iter().any(|name| self.get(name).is_some())
    }

    /// Whether it forwards no request of these networks, also without refusing them.
    fn excludes(&self, networks: &[String]) -> bool {
        let allowed: Vec<&Value> = match self.get("allow") {
            Some(Value::List(list)) => list.iter().collect(),
            allow => allow.into_iter().collect(),
        };
        // Clients are in any network.
        let is_other = |value: &&Value| {
            matches!(value, Value::Text(text)
                if Network::parse(text).is_some() && networks_of_both(std::slice::from_ref(text), networks).is_none())
        };
        self.is_closed() || self.get("redirect").is_some() || !allowed.is_empty() && allowed.iter().all(is_other)
    }

    /// Whether a route refuses all requests.
    pub fn is_closed(&self) -> bool {
        match self.get("respond") {
            Some(Value::Table(respond)) => respond.iter().any(|(_, value)| matches!(value, Value::Number(400..))),
            _ => false,
        }
    }

    /// Whether it refuses requests that another route admits.
    pub fn restricts_more(&self, other: &Section) -> bool {
        let lacks_rule = |rules: &Value| match (rules, other.get("rules")) {
            (Value::List(rules), Some(Value::List(known))) => rules.iter().any(|rule| !known.contains(rule)),
            _ => true,
        };
        let differs = |name: &str| self.get(name).is_some_and(|value| other.get(name) != Some(value));
        let denies = !self.denied.is_empty() && self.denied != other.denied;
        !other.is_closed()
            && (denies
                || self.is_closed()
                || self.get("rules").is_some_and(lacks_rule)
                || differs("allow")
                || differs("max_body"))
    }

    /// The effect of what is missing: on a closed route, no request is admitted by it.
    pub fn effect(&self, effect: Effect) -> Effect {
        if self.is_closed() && effect == Effect::NotEnforced { Effect::LeftOut } else { effect }
    }

    /// The prefix of the path that is replaced, and by what.
    pub fn prefix_change(&self) -> Option<(&str, &str)> {
        match (self.get("strip_prefix"), self.get("replace_prefix")) {
            (Some(Value::Text(from)), _) => Some((from, "/")),
            (_, Some(Value::Table(change))) => match &change[..] {
                [(_, Value::Text(from)), (_, Value::Text(to))] => Some((from, to)),
                _ => None,
            },
            _ => None,
        }
    }

    /// `request_headers` or `response_headers`, unless nothing is changed.
    pub fn change_fields(&mut self, setting: &str, remove: Vec<Value>, set: Vec<(String, Value)>) {
        let changes = [("remove", Value::List(remove)), ("set", Value::Table(set))];
        let is_any = |(_, value): &(&str, Value)| match value {
            Value::List(list) => !list.is_empty(),
            Value::Table(settings) => !settings.is_empty(),
            _ => true,
        };
        let changes: Vec<(String, Value)> =
            changes.into_iter().filter(is_any).map(|(name, value)| (name.to_owned(), value)).collect();
        if !changes.is_empty() {
            self.set(setting, Value::Table(changes));
        }
    }

    /// Responds instead of forwarding.
    pub fn close(&mut self, status: u64) {
        self.settings.retain(|(name, _)| ["name", "rules"].contains(&name.as_str()));
        self.denied.clear();
        self.set("respond", table([("status", status.into())]));
    }

    pub fn comment(&mut self, text: impl Into<String>) {
        let text = text.into();
        if !self.comments.contains(&text) {
            self.comments.push(text);
        }
    }
}

/// `[upstreams.NAME]` or `[rules.NAME]`.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Named {
    pub name: String,
    pub section: Section,
    /// `[rules.NAME.TABLE]`, such as `plans.gold`.
    pub tables: Vec<(String, Section)>,
    /// `[[rules.NAME.overrides]]`.
    pub overrides: Vec<Section>,
}

/// `[[routes]]`. The settings by which requests are matched are the first ones of `section`.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Route {
    pub hosts: Vec<String>,
    pub path: String,
    pub methods: Vec<String>,
    pub headers: Vec<(String, Value)>,
    pub query: Vec<(String, Value)>,
    pub networks: Vec<String>,
    pub scheme: Option<&'static str>,
    pub section: Section,
    /// The product takes the greatest one of the routes that match. Empty if the order is that of the gateway.
    pub rank: Vec<i64>,
    /// Whether capital letters of the path count as small ones. Only of routes that cannot be expressed.
    pub ignores_case: bool,
    /// Where the imported configuration has it.
    pub position: Option<Position>,
}

impl Route {
    /// Whether it redirects, other than to its own path with a slash.
    fn leads_elsewhere(&self) -> bool {
        let with_slash = format!("{{scheme}}://{{authority}}{}/", self.path);
        match self.section.get("redirect") {
            Some(Value::Table(redirect)) => redirect.iter().all(|(_, value)| *value != Value::Text(with_slash.clone())),
            redirect => redirect.is_some(),
        }
    }

    /// Whether another route matches the same requests, and neither precedes the other.
    fn matches_as(&self, other: &Route) -> bool {
        (&self.path, &self.methods, &self.headers, &self.query, &self.networks, self.scheme)
            == (&other.path, &other.methods, &other.headers, &other.query, &other.networks, other.scheme)
            && (self.hosts == other.hosts || self.hosts.iter().any(|host| other.hosts.contains(host)))
    }
}

/// A part of the text, by its index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// The first ones, such as `[listen]`.
    General,
    Upstream(usize),
    Rule(usize),
    Route(usize),
}

/// A file that the configuration names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamedFile {
    pub name: &'static str,
    pub text: String,
}

/// A route of the product that cannot be expressed.
#[derive(Debug)]
pub struct DroppedRoute {
    /// Routes that match all that it matches, and have its restrictions.
    pub at_most: Vec<Route>,
    pub position: Position,
    pub why: String,
}

/// An imported configuration.
#[derive(Default, Debug)]
pub struct Gateway {
    pub listen: Section,
    pub https: Vec<Section>,
    pub limits: Section,
    pub timeouts: Section,
    pub clients: Section,
    pub access: Section,
    pub upstreams: Vec<Named>,
    pub rules: Vec<Named>,
    pub routes: Vec<Route>,
    pub files: Vec<NamedFile>,
    pub notes: Vec<Note>,
    /// Routes that cannot be expressed.
    pub dropped: Vec<DroppedRoute>,
    /// Whether the product takes any of the routes that match and have the same rank.
    pub takes_any: bool,
    /// The notes that stand at a section, by their index.
    placed: BTreeSet<usize>,
}

impl Gateway {
    /// Notes a difference that concerns no section.
    pub fn note(&mut self, effect: Effect, position: &Position, text: impl Into<String>) {
        self.add(Note { effect, position: position.clone(), text: text.into() });
    }

    /// Notes a difference, and returns the comment for the section that it concerns.
    #[must_use]
    pub fn placed_note(&mut self, effect: Effect, position: &Position, text: impl Into<String>) -> String {
        let note = Note { effect, position: position.clone(), text: text.into() };
        let comment = format!("{}: {} ({position})", capitalized(effect.name()), note.text);
        let index = self.add(note);
        self.placed.insert(index);
        comment
    }

    fn add(&mut self, note: Note) -> usize {
        if let Some(index) = self.notes.iter().position(|known| *known == note) {
            return index;
        }
        self.notes.push(note);
        self.notes.len() - 1
    }

    /// Leaves out a route that cannot be expressed. What other routes do with its requests is noted when all are known.
    pub fn drop_route(&mut self, at_most: Vec<Route>, position: &Position, why: String) {
        self.dropped.push(DroppedRoute { at_most, position: position.clone(), why });
    }

    /// Keeps one of equal servers of an upstream: their shares of the requests cannot differ.
    pub fn remove_repeated_servers(&mut self) {
        let url = |server: &Value| match server {
            Value::Table(settings) => settings.first().map(|(_, url)| url.clone()),
            url => Some(url.clone()),
        };
        for upstream in &mut self.upstreams {
            let servers = upstream.section.settings.iter_mut().find(|(name, _)| name == "servers");
            if let Some((_, Value::List(servers))) = servers {
                let mut seen = Vec::new();
                servers.retain(|server| {
                    let url = url(server);
                    let is_new = !seen.contains(&url);
                    seen.push(url);
                    is_new
                });
            }
        }
    }

    /// Removes what the gateway does not accept, and closes the routes that depend on it: an importer knows fewer restrictions than
    /// the gateway. `section`: the line with its name. `position`: of the imported file. Whether there was anything to remove.
    pub fn repair(&mut self, part: Part, section: &str, position: &Position, problem: &Problem) -> bool {
        let line: Vec<&str> = problem.line_text.split_whitespace().collect();
        let text = format!("`{}`: {}", line.join(" "), problem.message);
        let uses = |section: &Section, setting: &str, name: &str| match section.get(setting) {
            Some(Value::Text(used)) => used == name,
            Some(Value::List(used)) => used.contains(&name.into()),
            _ => false,
        };
        let of_name = |routes: &[Route], setting: &str, name: &str| -> Vec<usize> {
            (0..routes.len()).filter(|at| uses(&routes[*at].section, setting, name)).collect()
        };
        let closed = match part {
            Part::General => {
                let sections = [
                    ("listen", &mut self.listen),
                    ("limits", &mut self.limits),
                    ("timeouts", &mut self.timeouts),
                    ("clients", &mut self.clients),
                    ("access", &mut self.access),
                ];
                let removed = match section.trim_matches(['[', ']']) {
                    "listen.https" => std::mem::take(&mut self.https),
                    name => sections
                        .into_iter()
                        .filter(|(known, _)| *known == name)
                        .map(|(_, section)| std::mem::take(section))
                        .collect(),
                };
                if removed.iter().all(|section| section.settings.is_empty()) {
                    return false;
                }
                self.note(Effect::NotEnforced, position, text);
                return true;
            }
            Part::Route(index) => vec![index],
            Part::Rule(index) => of_name(&self.routes, "rules", &self.rules.remove(index).name),
            Part::Upstream(index) => of_name(&self.routes, "upstream", &self.upstreams.remove(index).name),
        };
        if closed.is_empty() {
            self.note(Effect::NotEnforced, position, text.as_str());
        }
        for index in closed {
            let mut route = std::mem::take(&mut self.routes[index]);
            let position = route.position.clone().unwrap_or_else(|| position.clone());
            let refusal: Value = table([("status", 403.into())]);
            if matches!(&route.section.settings[..], [(name, value)] if name == "respond" && *value == refusal) {
                self.routes.remove(index);
                self.note(
                    Effect::NotEnforced,
                    &position,
                    format!("the route for `{}` is left out: {text}", route.path),
                );
                continue;
            }
            route.section.settings = vec![("respond".to_owned(), refusal)];
            let text = format!("the route for `{}` is closed: {text}", route.path);
            let comment = self.placed_note(Effect::Stricter, &position, text);
            route.section.comment(comment);
            self.routes[index] = route;
        }
        true
    }

    /// Denies networks in an access file.
    pub fn deny(&mut self, networks: &[String]) {
        self.access.set("file", "access.toml");
        let entries: Vec<String> =
            networks.iter().map(|network| format!("[[deny]]\nnetwork = \"{network}\"\n")).collect();
        self.files.push(NamedFile { name: "access.toml", text: entries.join("\n") });
    }

    /// Writes the networks that routes refuse: in an access file if it is one long list of all routes, otherwise as a route for them
    /// beside each.
    pub fn write_refusals(&mut self) {
        let of_routes = || self.routes.iter().map(|route| &route.section.denied).filter(|denied| !denied.is_empty());
        let Some(denied) = of_routes().next().cloned() else { return };
        let is_of_all = self.routes.iter().all(|Route { section, .. }| match section.denied.is_empty() {
            true => section.excludes(&denied),
            false => section.denied == denied,
        });
        let copies = of_routes().count();
        if is_of_all && copies > 1 && copies * denied.len() > COPIED_NETWORKS && self.access.settings.is_empty() {
            let redirect = self.routes.iter().find(|route| route.section.denied.is_empty() && route.leads_elsewhere());
            if let Some(position) = redirect.and_then(|route| route.position.clone()) {
                let text = "the networks of access.toml are denied on all routes, also instead of being redirected";
                self.note(Effect::Stricter, &position, text);
            }
            self.deny(&denied);
            self.routes.iter_mut().for_each(|route| route.section.denied.clear());
            return;
        }
        for mut route in std::mem::take(&mut self.routes) {
            let denied = std::mem::take(&mut route.section.denied);
            let mut section = Section::default();
            section.close(403);
            // A client that follows the redirect is refused there.
            let admits =
                route.section.get("redirect").is_none() && section.get("respond") != route.section.get("respond");
            let refusal = (admits && !denied.is_empty()).then(|| Route { networks: denied, section, ..route.clone() });
            self.routes.extend([Some(route), refusal].into_iter().flatten());
        }
    }

    /// The notes without a section.
    pub fn unplaced_notes(&self) -> impl Iterator<Item = &Note> {
        self.notes.iter().enumerate().filter(|(index, _)| !self.placed.contains(index)).map(|(_, note)| note)
    }

    /// Adds a route unless another one matches the same requests already.
    pub fn add_route(&mut self, mut route: Route, position: &Position) {
        if ["respond", "redirect"].iter().any(|response| route.section.get(response).is_some()) {
            route.section.settings.retain(|(name, _)| !OF_FORWARDED_REQUESTS.contains(&name.as_str()));
        }
        // Names are unique: further routes of the same origin have none.
        let name = route.section.get("name");
        if name.is_some() && self.routes.iter().any(|known| known.section.get("name") == name) {
            route.section.settings.retain(|(name, _)| name != "name");
        }
        route.position = Some(position.clone());
        let Some(index) = self.routes.iter().position(|known| known.matches_as(&route)) else {
            return self.routes.push(route);
        };
        let rank = route.rank.cmp(&self.routes[index].rank);
        let (known, section) = (&self.routes[index].section, &route.section);
        let differs = (&known.settings, &known.denied) != (&section.settings, &section.denied);
        let (is_looser, is_stricter) = (known.restricts_more(section), section.restricts_more(known));
        let takes_second = self.takes_any && rank.is_eq() && is_stricter && !is_looser;
        if rank.is_gt() || takes_second {
            std::mem::swap(&mut self.routes[index], &mut route);
        }
        let hosts = self.routes[index].hosts.clone();
        if differs && rank.is_eq() {
            let (effect, kind) = match (takes_second, is_stricter, is_looser) {
                (true, ..) => (Effect::Stricter, "stricter"),
                (_, true, _) => (Effect::NotEnforced, "first"),
                (.., true) => (Effect::Stricter, "first"),
                _ => (Effect::Differs, "first"),
            };
            let text = format!("a second route for `{}`: the {kind} one applies", route.path);
            let comment = self.placed_note(effect, position, text);
            self.routes[index].section.comment(comment);
        } else if hosts == route.hosts {
            let comments = std::mem::take(&mut route.section.comments);
            comments.into_iter().for_each(|comment| self.routes[index].section.comment(comment));
        }
        route.hosts.retain(|host| !hosts.contains(host));
        if !route.hosts.is_empty() {
            self.add_route(route, position);
        }
    }
}

fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}

/// A name for a table: letters, digits, `-` and `_`.
pub fn table_name(text: &str) -> String {
    let name: String = text.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' }).collect();
    match name.trim_matches('-') {
        "" => "unnamed".to_owned(),
        name => name.to_owned(),
    }
}

/// The name, or the name with a number if it is taken.
pub fn unused_name(name: &str, taken: &[Named]) -> String {
    let is_free = |name: &String| taken.iter().all(|named| named.name != *name);
    let numbered = (2..).map(|number| format!("{name}-{number}"));
    std::iter::once(name.to_owned()).chain(numbered).find(is_free).unwrap_or_default()
}
