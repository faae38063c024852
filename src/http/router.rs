//! Which route a request takes: a tree of path segments under every host, built when the
//! configuration is loaded.
//!
//! Routes that name a scheme come before those that do not: they are a router of their own, asked first. There,
//! the most specific match wins: an exact host over a wildcard over any; in the path, segment by
//! segment, a literal over a parameter over a catch-all; then a route that names the method over
//! one that takes all, and more required fields over fewer; at last, the order of the file. A
//! branch in which no route takes the method or the fields is left again for a less specific one.
//! The work grows with the segments of the path, not with the number of routes.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Range;

use compact_str::CompactString;
use foldhash::HashMap;
use http::header::{HeaderMap, HeaderName};
use http::{HeaderValue, Method};

use crate::config::route::{PathPattern, Route, Segment, TrailingSlash};

/// Segments that a path may have and still be matched; deeper ones meet catch-alls only.
const DEPTH_MAX: usize = 64;

/// All routes of a configuration. Trees are laid out flat, a node before its children and texts
/// within the nodes, so that a route that was not used for a while is found in few cache lines.
#[derive(Debug)]
pub struct Router {
    /// Those that name a scheme: `http`, `https`.
    by_scheme: [Option<Box<Router>>; 2],
    hosts: HashMap<String, usize>,
    /// By the part behind the `*`, with its dot.
    wildcards: HashMap<String, usize>,
    any_host: usize,
    nodes: Vec<Node>,
    candidates: Vec<Candidate>,
    /// Where it is ignored, a catch-all takes the path before its slash as well.
    trailing_slash: TrailingSlash,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Node {
    literals: Literals,
    param: Option<NonZeroU32>,
    /// Candidates whose path ends here, the most specific first.
    exact: (u32, u32),
    /// Candidates whose path goes on with a catch-all here.
    catch_alls: (u32, u32),
}

/// The children of a node by their text.
#[derive(Debug, Default)]
enum Literals {
    #[default]
    None,
    One(CompactString, u32),
    Many(Box<HashMap<CompactString, u32>>),
}

/// A tree as it grows.
#[derive(Debug, Default)]
struct Tree {
    literals: BTreeMap<String, Tree>,
    param: Option<Box<Tree>>,
    exact: Vec<Candidate>,
    catch_alls: Vec<Candidate>,
}

#[derive(Clone, Debug)]
struct Candidate {
    route: u32,
    /// `None`: takes every request that comes this way.
    conditions: Option<Box<Conditions>>,
}

/// What a route wants beside its path.
#[derive(Clone, Debug)]
struct Conditions {
    methods: Vec<Method>,
    headers: Vec<(HeaderName, Option<HeaderValue>)>,
}

/// What of a request routes are chosen by.
pub struct RouteQuery<'a> {
    /// Lower case, without port.
    pub host: &'a str,
    pub method: &'a Method,
    pub headers: &'a HeaderMap,
    /// In normal form.
    pub path: &'a str,
    /// Whether it came by https.
    pub secure: bool,
}

/// A field by whose value routes are chosen is given more than once: the upstream may go by another of its values.
#[derive(PartialEq, Eq, Debug)]
pub struct AmbiguousHeader<'r>(pub &'r HeaderName);

type Match<'r> = Result<Option<usize>, AmbiguousHeader<'r>>;

impl Router {
    pub fn new(routes: &[Route], trailing_slash: TrailingSlash) -> Router {
        let naming = |secure: Option<bool>| move |(_, route): &(usize, &Route)| route.secure == secure;
        let of_scheme = [false, true].map(|secure| {
            let mut routes = routes.iter().enumerate().filter(naming(Some(secure))).peekable();
            routes.peek().is_some().then_some(())?;
            Some(Box::new(Router::build(routes, trailing_slash)))
        });
        Router { by_scheme: of_scheme, ..Router::build(routes.iter().enumerate().filter(naming(None)), trailing_slash) }
    }

    fn build<'r>(routes: impl Iterator<Item = (usize, &'r Route)>, trailing_slash: TrailingSlash) -> Router {
        let (mut hosts, mut wildcards) = (BTreeMap::<&str, Tree>::new(), BTreeMap::<&str, Tree>::new());
        let mut any = Tree::default();
        for (index, route) in routes {
            let candidate = Candidate::new(index, route);
            if route.hosts.is_empty() {
                any.insert(&route.path, candidate.clone());
            }
            for host in &route.hosts {
                let tree = match host.strip_prefix('*') {
                    Some(suffix) => wildcards.entry(suffix).or_default(),
                    None => hosts.entry(host).or_default(),
                };
                tree.insert(&route.path, candidate.clone());
            }
        }
        let mut router = Router {
            by_scheme: [None, None],
            hosts: HashMap::default(),
            wildcards: HashMap::default(),
            any_host: 0,
            nodes: Vec::new(),
            candidates: Vec::new(),
            trailing_slash,
        };
        router.any_host = router.flatten(any);
        for (host, tree) in hosts {
            let root = router.flatten(tree);
            router.hosts.insert(host.to_owned(), root);
        }
        for (suffix, tree) in wildcards {
            let root = router.flatten(tree);
            router.wildcards.insert(suffix.to_owned(), root);
        }
        router
    }

    /// Appends a tree, and returns where its root is.
    fn flatten(&mut self, tree: Tree) -> usize {
        let at = self.nodes.len();
        self.nodes.push(Node::default());
        let ends = self.append_candidates(tree.exact);
        let rests = self.append_candidates(tree.catch_alls);
        // A child comes after its parent, so it is never the node number 0.
        let param = tree.param.and_then(|child| NonZeroU32::new(self.flatten(*child) as u32));
        let several = tree.literals.len() > 1;
        let children = tree.literals.into_iter();
        let mut children = children.map(|(text, child)| (CompactString::from(text), self.flatten(child) as u32));
        let literals = if several {
            Literals::Many(Box::new(children.collect()))
        } else {
            children.next().map_or(Literals::None, |(text, child)| Literals::One(text, child))
        };
        self.nodes[at] = Node { literals, param, exact: ends, catch_alls: rests };
        at
    }

    fn append_candidates(&mut self, mut candidates: Vec<Candidate>) -> (u32, u32) {
        let start = self.candidates.len() as u32;
        candidates.sort_by_key(Candidate::specificity_order);
        self.candidates.append(&mut candidates);
        (start, self.candidates.len() as u32)
    }

    /// The position of the route a request takes. `params` receives where in the path the values
    /// of its parameters stand, in the order of the pattern.
    pub fn find(&self, asked: &RouteQuery<'_>, params: &mut Vec<Range<usize>>) -> Match<'_> {
        if let Some(router) = &self.by_scheme[usize::from(asked.secure)]
            && let Some(route) = router.find(asked, params)?
        {
            return Ok(Some(route));
        }
        params.clear();
        if !self.hosts.is_empty()
            && let Some(root) = self.hosts.get(asked.host)
            && let Some(route) = self.find_in_tree(*root, asked, params)?
        {
            return Ok(Some(route));
        }
        if !self.wildcards.is_empty() {
            // The longest suffix is the most specific; `*` stands for at least one character.
            for (dot, _) in asked.host.match_indices('.').filter(|(dot, _)| *dot > 0) {
                if let Some(root) = self.wildcards.get(&asked.host[dot..])
                    && let Some(route) = self.find_in_tree(*root, asked, params)?
                {
                    return Ok(Some(route));
                }
            }
        }
        self.find_in_tree(self.any_host, asked, params)
    }

    fn find_in_tree(&self, root: usize, asked: &RouteQuery<'_>, params: &mut Vec<Range<usize>>) -> Match<'_> {
        let start = asked.path.starts_with('/').then_some(1);
        self.match_segments(root, asked, start, DEPTH_MAX, params)
    }

    /// `start` is where the next segment begins; `None` when there is none.
    fn match_segments(
        &self,
        node: usize,
        asked: &RouteQuery<'_>,
        start: Option<usize>,
        depth: usize,
        params: &mut Vec<Range<usize>>,
    ) -> Match<'_> {
        let node = &self.nodes[node];
        let Some(start) = start else {
            return match self.first_match(node.exact, asked)? {
                // The path may have had a slash at its end, with nothing behind it.
                None if self.trailing_slash == TrailingSlash::Ignore => {
                    self.match_catch_all(node, asked, asked.path.len(), params)
                }
                found => Ok(found),
            };
        };
        if depth > 0 {
            let slash = asked.path.as_bytes()[start..].iter().position(|byte| *byte == b'/');
            let end = slash.map_or(asked.path.len(), |at| start + at);
            let next = (end < asked.path.len()).then_some(end + 1);
            if let Some(child) = node.literals.get(&asked.path[start..end])
                && let Some(route) = self.match_segments(child, asked, next, depth - 1, params)?
            {
                return Ok(Some(route));
            }
            if let Some(child) = node.param.filter(|_| end > start) {
                let known = params.len();
                params.push(start..end);
                if let Some(route) = self.match_segments(child.get() as usize, asked, next, depth - 1, params)? {
                    return Ok(Some(route));
                }
                params.truncate(known);
            }
        }
        self.match_catch_all(node, asked, start, params)
    }

    /// A catch-all that takes what is left of the path.
    fn match_catch_all(
        &self,
        node: &Node,
        asked: &RouteQuery<'_>,
        start: usize,
        params: &mut Vec<Range<usize>>,
    ) -> Match<'_> {
        let route = self.first_match(node.catch_alls, asked)?;
        if route.is_some() {
            params.push(start..asked.path.len());
        }
        Ok(route)
    }

    fn first_match(&self, (start, end): (u32, u32), asked: &RouteQuery<'_>) -> Match<'_> {
        for candidate in &self.candidates[start as usize..end as usize] {
            if candidate.matches(asked)? {
                return Ok(Some(candidate.route as usize));
            }
        }
        Ok(None)
    }
}

impl Literals {
    fn get(&self, text: &str) -> Option<usize> {
        match self {
            Literals::None => None,
            Literals::One(known, child) => (known == text).then_some(*child as usize),
            Literals::Many(children) => children.get(text).map(|child| *child as usize),
        }
    }
}

impl Tree {
    fn insert(&mut self, path: &PathPattern, candidate: Candidate) {
        let mut tree = self;
        for segment in &path.segments {
            tree = match segment {
                Segment::Literal(text) => tree.literals.entry(text.clone()).or_default(),
                Segment::Param(_) => tree.param.get_or_insert_default(),
                Segment::Rest(_) => return tree.catch_alls.push(candidate),
            };
        }
        tree.exact.push(candidate);
    }
}

impl Candidate {
    fn new(index: usize, route: &Route) -> Candidate {
        // The configuration has been checked: names, values and methods are valid.
        let methods: Vec<Method> = route.methods.iter().filter_map(|m| Method::from_bytes(m.as_bytes()).ok()).collect();
        let header = |(name, value): &(String, Option<String>)| {
            let value = value.as_ref().and_then(|value| HeaderValue::from_str(value).ok());
            HeaderName::from_bytes(name.as_bytes()).ok().map(|name| (name, value))
        };
        let headers: Vec<_> = route.headers.iter().filter_map(header).collect();
        let demands = (!methods.is_empty() || !headers.is_empty()).then(|| Box::new(Conditions { methods, headers }));
        Candidate { route: index as u32, conditions: demands }
    }

    /// Sorts the specific before the general.
    fn specificity_order(&self) -> (bool, Reverse<usize>, Reverse<usize>, bool, u32) {
        let Some(demands) = &self.conditions else { return (true, Reverse(0), Reverse(0), false, self.route) };
        let values = demands.headers.iter().filter(|(_, value)| value.is_some()).count();
        // HEAD by its own name comes before HEAD as a kind of GET.
        let by_get = demands.methods.contains(&Method::GET) && !demands.methods.contains(&Method::HEAD);
        (demands.methods.is_empty(), Reverse(demands.headers.len()), Reverse(values), by_get, self.route)
    }

    fn matches(&self, asked: &RouteQuery<'_>) -> Result<bool, AmbiguousHeader<'_>> {
        self.conditions.as_ref().map_or(Ok(true), |demands| demands.are_met_by(asked))
    }
}

impl Conditions {
    fn are_met_by(&self, asked: &RouteQuery<'_>) -> Result<bool, AmbiguousHeader<'_>> {
        if !self.methods.is_empty() && !self.methods.iter().any(|method| method_matches(method, asked.method)) {
            return Ok(false);
        }
        let mut are_met = true;
        for (name, value) in &self.headers {
            let mut given = asked.headers.get_all(name).iter();
            are_met &= match (value, given.next(), given.next()) {
                (Some(_), _, Some(_)) => return Err(AmbiguousHeader(name)),
                (Some(value), first, None) => first == Some(value),
                (None, first, _) => first.is_some(),
            };
        }
        Ok(are_met)
    }
}

/// A route for GET takes HEAD as well: the same resource is asked for (RFC 9110, section 9.3.2), and
/// a rule on it must not be escaped by asking for less.
fn method_matches(method: &Method, asked: &Method) -> bool {
    method == asked || (method == Method::GET && asked == Method::HEAD)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> PathPattern {
        let segment = |segment: &str| match segment.strip_prefix('{').and_then(|s| s.strip_suffix('}')) {
            Some(name) => match name.strip_prefix('*') {
                Some(rest) => Segment::Rest(rest.to_owned()),
                None => Segment::Param(name.to_owned()),
            },
            None => Segment::Literal(segment.to_owned()),
        };
        PathPattern { text: text.to_owned(), segments: text[1..].split('/').map(segment).collect() }
    }

    /// A route from `METHODS HOSTS PATH`, where `-` stands for any.
    fn route(text: &str) -> Route {
        let words: Vec<&str> = text.split(' ').collect();
        let list = |word: &str| if word == "-" { Vec::new() } else { word.split(',').map(str::to_owned).collect() };
        Route {
            name: text.to_owned(),
            hosts: list(words[1]),
            methods: list(words[0]),
            headers: words
                .get(3)
                .map(|word| list(word))
                .unwrap_or_default()
                .into_iter()
                .map(|name| (name, None))
                .collect(),
            path: pattern(words[2]),
            secure: None,
            actions: None,
            upstream: 0,
            rules: Vec::new(),
            cost: None,
            websocket: true,
        }
    }

    fn found<'a>(routes: &'a [Route], method: &str, host: &str, path: &str) -> Option<(&'a str, Vec<String>)> {
        let mut params = Vec::new();
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let asked = RouteQuery { host, method: &method, headers: &HeaderMap::new(), path, secure: false };
        let route = Router::new(routes, TrailingSlash::Keep).find(&asked, &mut params).unwrap()?;
        Some((routes[route].name.as_str(), params.into_iter().map(|range| path[range].to_owned()).collect()))
    }

    fn name<'a>(routes: &'a [Route], method: &str, host: &str, path: &str) -> Option<&'a str> {
        found(routes, method, host, path).map(|(name, _)| name)
    }

    #[test]
    fn the_most_specific_path_wins_whatever_the_order() {
        let mut routes =
            ["- - /{*all}", "- - /a/{x}", "- - /a/b", "- - /a/{x}/c", "- - /a/b/{*rest}", "- - /"].map(route);
        for _ in 0..2 {
            assert_eq!(name(&routes, "GET", "", "/a/b"), Some("- - /a/b"));
            assert_eq!(name(&routes, "GET", "", "/a/z"), Some("- - /a/{x}"));
            assert_eq!(name(&routes, "GET", "", "/a/z/c"), Some("- - /a/{x}/c"));
            assert_eq!(name(&routes, "GET", "", "/a/b/c"), Some("- - /a/b/{*rest}"));
            assert_eq!(name(&routes, "GET", "", "/a/z/d"), Some("- - /{*all}"));
            assert_eq!(name(&routes, "GET", "", "/"), Some("- - /"));
            assert_eq!(name(&routes, "GET", "", "/a/"), Some("- - /{*all}"));
            routes.reverse();
        }
    }

    #[test]
    fn parameters_are_found_where_they_stand() {
        let routes = ["- - /u/{id}/p/{post}", "- - /f/{*rest}"].map(route);
        assert_eq!(found(&routes, "GET", "", "/u/7/p/x").unwrap().1, ["7", "x"]);
        assert_eq!(found(&routes, "GET", "", "/f/a/b").unwrap().1, ["a/b"]);
        assert_eq!(found(&routes, "GET", "", "/f/").unwrap().1, [""]);
        assert_eq!(found(&routes, "GET", "", "/f"), None);
        assert_eq!(found(&routes, "GET", "", "/u//p/x"), None);
    }

    #[test]
    fn where_a_trailing_slash_is_ignored_a_catch_all_takes_nothing_as_well() {
        let routes = ["- - /f/{*rest}", "- - /{*all}", "- - /g", "- - /g/{*rest}"].map(route);
        let router = Router::new(&routes, TrailingSlash::Ignore);
        for (path, index, params) in
            [("/f", 0, Some(2..2)), ("/f/a", 0, Some(3..4)), ("/", 1, Some(1..1)), ("/g", 2, None)]
        {
            let asked = RouteQuery { host: "", method: &Method::GET, headers: &HeaderMap::new(), path, secure: false };
            let mut found = Vec::new();
            assert_eq!(router.find(&asked, &mut found), Ok(Some(index)), "{path}");
            assert_eq!(found, Vec::from_iter(params), "{path}");
        }
    }

    #[test]
    fn a_branch_that_does_not_take_the_method_is_left_again() {
        let routes = ["GET - /a/b", "POST - /a/{x}", "- - /{*all}"].map(route);
        assert_eq!(found(&routes, "GET", "", "/a/b"), Some(("GET - /a/b", vec![])));
        assert_eq!(found(&routes, "HEAD", "", "/a/b"), Some(("GET - /a/b", vec![])));
        assert_eq!(found(&routes, "POST", "", "/a/b"), Some(("POST - /a/{x}", vec!["b".to_owned()])));
        assert_eq!(found(&routes, "PUT", "", "/a/b"), Some(("- - /{*all}", vec!["a/b".to_owned()])));
    }

    #[test]
    fn an_exact_host_comes_before_a_wildcard_before_any() {
        let routes = ["- a.example.com /x", "- *.example.com /{*r}", "- *.com /{*r}", "- - /{*r}"].map(route);
        assert_eq!(name(&routes, "GET", "a.example.com", "/x"), Some("- a.example.com /x"));
        assert_eq!(name(&routes, "GET", "a.example.com", "/y"), Some("- *.example.com /{*r}"));
        assert_eq!(name(&routes, "GET", "b.c.example.com", "/x"), Some("- *.example.com /{*r}"));
        assert_eq!(name(&routes, "GET", "example.com", "/x"), Some("- *.com /{*r}"));
        assert_eq!(name(&routes, "GET", ".example.com", "/x"), Some("- *.com /{*r}"));
        assert_eq!(name(&routes, "GET", "localhost", "/x"), Some("- - /{*r}"));
    }

    #[test]
    fn a_route_that_names_a_scheme_comes_first() {
        let mut routes = ["- - /{*all}", "- a /x/y", "- - /ok"].map(route);
        routes[0].secure = Some(false);
        routes[2].secure = Some(true);
        let name = |host, path, secure| {
            let asked = RouteQuery { host, method: &Method::GET, headers: &HeaderMap::new(), path, secure };
            Router::new(&routes, TrailingSlash::Keep)
                .find(&asked, &mut Vec::new())
                .unwrap()
                .map(|route| routes[route].name.as_str())
        };
        assert_eq!(name("a", "/x/y", false), Some("- - /{*all}"));
        assert_eq!(name("a", "/x/y", true), Some("- a /x/y"));
        assert_eq!(name("a", "/ok", true), Some("- - /ok"));
        assert_eq!(name("a", "/other", true), None);
    }

    #[test]
    fn head_by_its_own_name_comes_before_get() {
        let routes = ["GET - /x", "HEAD - /x"].map(route);
        assert_eq!(name(&routes, "HEAD", "", "/x"), Some("HEAD - /x"));
        assert_eq!(name(&routes, "GET", "", "/x"), Some("GET - /x"));
    }

    #[test]
    fn methods_and_fields_are_more_specific_than_none() {
        let routes = ["- - /x", "- - /x x-beta", "GET - /x"].map(route);
        assert_eq!(name(&routes, "GET", "", "/x"), Some("GET - /x"));
        assert_eq!(name(&routes, "PUT", "", "/x"), Some("- - /x"));
        let mut headers = HeaderMap::new();
        headers.insert("x-beta", HeaderValue::from_static("1"));
        let asked = RouteQuery { host: "", method: &Method::PUT, headers: &headers, path: "/x", secure: false };
        assert_eq!(Router::new(&routes, TrailingSlash::Keep).find(&asked, &mut Vec::new()), Ok(Some(1)));
    }

    #[test]
    fn a_field_that_routes_compare_is_given_once() {
        let mut routes = ["- - /{*rest}", "- - /x", "POST - /x", "- - /y"].map(route);
        let versions = [None, Some("2"), Some("3"), None];
        for (route, version) in routes.iter_mut().zip(versions) {
            route.headers.extend(version.map(|version| ("x-version".to_owned(), Some(version.to_owned()))));
        }
        routes[3].headers.push(("x-version".to_owned(), None));
        let router = Router::new(&routes, TrailingSlash::Keep);
        let name = HeaderName::from_static("x-version");
        let mut twice = HeaderMap::new();
        twice.append(&name, HeaderValue::from_static("2"));
        let once = twice.clone();
        twice.append(&name, HeaderValue::from_static("2"));
        for (path, headers, found) in [
            ("/x", &once, Ok(Some(1))),
            ("/x", &twice, Err(AmbiguousHeader(&name))),
            ("/y", &twice, Ok(Some(3))),
            ("/z", &twice, Ok(Some(0))),
        ] {
            let asked = RouteQuery { host: "", method: &Method::GET, headers, path, secure: false };
            assert_eq!(router.find(&asked, &mut Vec::new()), found, "{path}");
        }
    }
}
