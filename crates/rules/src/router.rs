//! Matches requests to routes: a tree of path segments for each host, built at load.
//!
//! Routes that name a scheme are a router of their own, which comes first. The most specific match wins: an exact host
//! over a wildcard over any host; segment by segment, a literal over a segment with wildcards (the longer literal text in
//! all, at the beginning, at the end, at last the first in the alphabet) over a parameter over a catch-all; a route with
//! methods over one without; one with networks over one without, and the narrower networks; more required fields and query
//! parameters over fewer; at last, the order of the file. If no route of a branch
//! matches method and fields, the search continues in less specific branches. The time grows with the segments of the path
//! and the lengths of literal text that segments with wildcards have, not with the number of routes; except that routes whose
//! paths differ only between two wildcards of a segment, or that have one path and different conditions, are tried one after
//! the other.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;

use compact_str::CompactString;
use foldhash::HashMap;
use foldhash::fast::RandomState;
use http::header::{HeaderMap, HeaderName};
use http::{HeaderValue, Method};

use transom_config::RouteId;
use transom_config::path::{PathPattern, Segment};
use transom_config::route::Route;
use transom_http::client_address::ClientAddress;
use transom_http::path_normalize::TrailingSlash;
use transom_http::request_values::{InvalidEscape, Occurrence, has_query_parameter, query_parameter_or_empty};
use transom_limiter::handles;
use transom_limiter::handles::{Handle as _, IdVec};
use transom_limiter::ip_prefix::Networks;

/// Segments of a path that are matched one by one; deeper paths match catch-alls only.
const DEPTH_MAX: usize = 64;

/// All routes of a configuration. Trees are flattened, a node before its children and texts inside the nodes, so that a
/// lookup touches few cache lines.
#[derive(Debug)]
pub struct Router {
    /// The routes that name a scheme: `http`, `https`.
    by_scheme: [Option<Box<Router>>; 2],
    hosts: HashMap<String, usize>,
    /// By the part after the `*`, with the dot.
    wildcards: HashMap<String, usize>,
    any_host: usize,
    nodes: Vec<Node>,
    wildcard_groups: Vec<WildcardGroup>,
    candidates: Vec<Candidate>,
    /// If ignored, a catch-all also matches the path before its slash.
    trailing_slash: TrailingSlash,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Node {
    literals: Literals,
    /// Groups of children for segments with wildcards, the most specific first.
    wildcard_groups: (u32, u32),
    param: Option<NonZeroU32>,
    /// Candidates whose path ends here, the most specific first.
    exact: (u32, u32),
    /// Candidates with a catch-all here, the most specific first.
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

/// The children of a node for segments with wildcards that have equally much literal text: in all, at the beginning, and at
/// the end.
#[derive(Debug)]
struct WildcardGroup {
    text: usize,
    prefix: usize,
    suffix: usize,
    /// In the order of the texts, for each beginning and end.
    children: Vec<WildcardChild>,
    /// The children by the hash of the texts at the beginning and the end of the segment; empty if all have the same.
    by_ends: HashMap<u64, Range<usize>>,
    hasher: RandomState,
}

#[derive(Debug)]
struct WildcardChild {
    /// The literal texts around the wildcards.
    texts: Box<[CompactString]>,
    node: u32,
}

/// A tree under construction.
#[derive(Debug, Default)]
struct Tree {
    literals: BTreeMap<String, Tree>,
    /// By the literal texts of the segment, with their specificity.
    wildcards: BTreeMap<Vec<String>, ([usize; 3], Tree)>,
    param: Option<Box<Tree>>,
    exact: Vec<Candidate>,
    catch_alls: Vec<Candidate>,
}

#[derive(Clone, Debug)]
struct Candidate {
    route: RouteId,
    /// `None`: matches every request.
    conditions: Option<Box<Conditions>>,
}

/// What a route requires beside scheme, host and path.
#[derive(Clone, Debug)]
struct Conditions {
    methods: Vec<Method>,
    /// A field has to be present, with the value if there is one.
    headers: Vec<(HeaderName, Option<HeaderValue>)>,
    query: Vec<ParameterCondition>,
    networks: Option<RouteNetworks>,
}

/// A query parameter that has to be present, with the value if there is one, decoded.
#[derive(Clone, Debug)]
struct ParameterCondition {
    name: String,
    /// The same for all conditions of the name.
    id: ParameterId,
    value: Option<String>,
}

handles! {
    /// The name of a query parameter in the conditions of routes.
    ParameterId,
}

/// The parameters of one query that were read: each name once, however many routes have it.
#[derive(Default)]
struct ParameterValues<'q>(Vec<Option<Result<Occurrence<'q>, InvalidEscape>>>);

/// The networks to which the address of the client must belong.
#[derive(Clone, Debug)]
struct RouteNetworks {
    networks: Arc<Networks<()>>,
    /// See [`Route::widest_network`].
    widest: u8,
}

/// The attributes of a request that routes match.
pub struct RouteQuery<'a> {
    /// Lower case, without port.
    pub host: &'a str,
    pub method: &'a Method,
    pub headers: &'a HeaderMap,
    /// Of the client.
    pub address: ClientAddress,
    /// Normalized.
    pub path: &'a str,
    /// As received, without `?`.
    pub query: &'a str,
    /// Whether the client used https.
    pub secure: bool,
}

/// Why the upstream might read a request differently from the router.
#[derive(PartialEq, Eq, Debug)]
pub enum Ambiguity<'r> {
    /// A field that routes match by value is given more than once.
    Header(&'r HeaderName),
    /// So is a query parameter, or some servers take another one for it, or it cannot be decoded.
    Parameter(&'r str),
}

type Match<'r> = Result<Option<RouteId>, Ambiguity<'r>>;

/// The condition of a route that a request of its host and path does not meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UnmetCondition {
    Method,
    Network,
    Header,
    Query,
}

/// Whether a request meets the conditions of a candidate.
trait Accepts: for<'c> FnMut(&'c Candidate, &RouteQuery<'_>) -> Result<bool, Ambiguity<'c>> {}

impl<F: for<'c> FnMut(&'c Candidate, &RouteQuery<'_>) -> Result<bool, Ambiguity<'c>>> Accepts for F {}

impl Router {
    pub fn new(routes: &IdVec<RouteId, Route>, trailing_slash: TrailingSlash) -> Router {
        let with_scheme = |secure: Option<bool>| move |(_, route): &(RouteId, &Route)| route.secure == secure;
        let mut names = BTreeMap::new();
        let by_scheme = [false, true].map(|secure| {
            let mut routes = routes.enumerate().filter(with_scheme(Some(secure))).peekable();
            routes.peek().is_some().then_some(())?;
            Some(Box::new(Router::build(routes, trailing_slash, &mut names)))
        });
        let routes = routes.enumerate().filter(with_scheme(None));
        Router { by_scheme, ..Router::build(routes, trailing_slash, &mut names) }
    }

    /// `names`: of the query parameters in conditions.
    fn build<'r>(
        routes: impl Iterator<Item = (RouteId, &'r Route)>,
        trailing_slash: TrailingSlash,
        names: &mut BTreeMap<&'r str, ParameterId>,
    ) -> Router {
        let (mut hosts, mut wildcards) = (BTreeMap::<&str, Tree>::new(), BTreeMap::<&str, Tree>::new());
        let mut any = Tree::default();
        for (id, route) in routes {
            let candidate = Candidate::new(id, route, names);
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
            wildcard_groups: Vec::new(),
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

    /// Appends a tree, and returns the position of its root.
    fn flatten(&mut self, tree: Tree) -> usize {
        let at = self.nodes.len();
        self.nodes.push(Node::default());
        let exact = self.append_candidates(tree.exact);
        let catch_alls = self.append_candidates(tree.catch_alls);
        // A child follows its parent, so its position is never 0.
        let param = tree.param.and_then(|child| NonZeroU32::new(self.flatten(*child) as u32));
        let wildcard_groups = self.flatten_wildcards(tree.wildcards);
        let several = tree.literals.len() > 1;
        let children = tree.literals.into_iter();
        let mut children = children.map(|(text, child)| (CompactString::from(text), self.flatten(child) as u32));
        let literals = if several {
            Literals::Many(Box::new(children.collect()))
        } else {
            children.next().map_or(Literals::None, |(text, child)| Literals::One(text, child))
        };
        self.nodes[at] = Node { literals, wildcard_groups, param, exact, catch_alls };
        at
    }

    fn flatten_wildcards(&mut self, trees: BTreeMap<Vec<String>, ([usize; 3], Tree)>) -> (u32, u32) {
        let mut groups: BTreeMap<Reverse<[usize; 3]>, Vec<WildcardChild>> = BTreeMap::new();
        for (texts, (specificity, tree)) in trees {
            let node = self.flatten(tree) as u32;
            let texts = texts.into_iter().map(CompactString::from).collect();
            groups.entry(Reverse(specificity)).or_default().push(WildcardChild { texts, node });
        }
        let start = self.wildcard_groups.len() as u32;
        let groups =
            groups.into_iter().map(|(Reverse(specificity), children)| WildcardGroup::new(specificity, children));
        self.wildcard_groups.extend(groups);
        (start, self.wildcard_groups.len() as u32)
    }

    fn append_candidates(&mut self, mut candidates: Vec<Candidate>) -> (u32, u32) {
        let start = self.candidates.len() as u32;
        candidates.sort_by_key(Candidate::specificity_order);
        self.candidates.append(&mut candidates);
        (start, self.candidates.len() as u32)
    }

    /// The route that matches a request. `params` receives the values of its parameters as ranges of the
    /// path, in path order.
    pub fn find(&self, query: &RouteQuery<'_>, params: &mut Vec<Range<usize>>) -> Match<'_> {
        let mut values = ParameterValues::default();
        self.search(query, params, &mut |candidate, _| candidate.matches(query, &mut values))
    }

    /// The routes whose scheme, host and path match a request, the most specific first, each with the condition that the
    /// request does not meet. The first route without such a condition is the one that [`Router::find`] returns.
    pub fn candidates(&self, query: &RouteQuery<'_>) -> Vec<(RouteId, Option<UnmetCondition>)> {
        let mut tried: Vec<(RouteId, Option<UnmetCondition>)> = Vec::new();
        // Nothing is accepted, so the search tries every candidate, and never fails.
        let _ = self.search(query, &mut Vec::new(), &mut |candidate, query| {
            let route = candidate.route;
            if tried.iter().all(|(known, _)| *known != route) {
                tried.push((route, candidate.unmet_condition(query)));
            }
            Ok(false)
        });
        tried
    }

    /// Searches for the most specific route that `accepts` accepts among those whose scheme, host and path match.
    fn search(&self, query: &RouteQuery<'_>, params: &mut Vec<Range<usize>>, accepts: &mut impl Accepts) -> Match<'_> {
        if let Some(router) = &self.by_scheme[usize::from(query.secure)]
            && let Some(route) = router.search(query, params, accepts)?
        {
            return Ok(Some(route));
        }
        params.clear();
        if !self.hosts.is_empty()
            && let Some(root) = self.hosts.get(query.host)
            && let Some(route) = self.find_in_tree(*root, query, params, accepts)?
        {
            return Ok(Some(route));
        }
        if !self.wildcards.is_empty() {
            // The longest suffix is the most specific; `*` matches at least one character.
            for (dot, _) in query.host.match_indices('.').filter(|(dot, _)| *dot > 0) {
                if let Some(root) = self.wildcards.get(&query.host[dot..])
                    && let Some(route) = self.find_in_tree(*root, query, params, accepts)?
                {
                    return Ok(Some(route));
                }
            }
        }
        self.find_in_tree(self.any_host, query, params, accepts)
    }

    fn find_in_tree(
        &self,
        root: usize,
        query: &RouteQuery<'_>,
        params: &mut Vec<Range<usize>>,
        accepts: &mut impl Accepts,
    ) -> Match<'_> {
        let start = query.path.starts_with('/').then_some(1);
        self.match_segments(root, query, start, DEPTH_MAX, params, accepts)
    }

    /// `start` is the start of the next segment; `None` at the end of the path.
    fn match_segments(
        &self,
        node: usize,
        query: &RouteQuery<'_>,
        start: Option<usize>,
        depth: usize,
        params: &mut Vec<Range<usize>>,
        accepts: &mut impl Accepts,
    ) -> Match<'_> {
        let node = &self.nodes[node];
        let Some(start) = start else {
            return match self.first_match(node.exact, query, accepts)? {
                // The path may have had a trailing slash, after which the catch-all matches the empty rest.
                None if self.trailing_slash == TrailingSlash::Ignore => {
                    self.match_catch_all(node, query, query.path.len(), params, accepts)
                }
                found => Ok(found),
            };
        };
        if depth > 0 {
            let (end, next) = end_of_segment(query.path, start);
            if let Some(child) = node.literals.get(&query.path[start..end])
                && let Some(route) = self.match_segments(child, query, next, depth - 1, params, accepts)?
            {
                return Ok(Some(route));
            }
            if node.wildcard_groups.0 < node.wildcard_groups.1
                && let Some(route) = self.match_wildcards(node, query, start, depth, params, accepts)?
            {
                return Ok(Some(route));
            }
            if let Some(child) = node.param.filter(|_| end > start) {
                let params_before = params.len();
                params.push(start..end);
                let child = child.get() as usize;
                if let Some(route) = self.match_segments(child, query, next, depth - 1, params, accepts)? {
                    return Ok(Some(route));
                }
                params.truncate(params_before);
            }
        }
        self.match_catch_all(node, query, start, params, accepts)
    }

    /// Searches in the children of a node for segments with wildcards.
    fn match_wildcards(
        &self,
        node: &Node,
        query: &RouteQuery<'_>,
        start: usize,
        depth: usize,
        params: &mut Vec<Range<usize>>,
        accepts: &mut impl Accepts,
    ) -> Match<'_> {
        let (end, next) = end_of_segment(query.path, start);
        let (first_group, end_of_groups) = node.wildcard_groups;
        for group in &self.wildcard_groups[first_group as usize..end_of_groups as usize] {
            for child in group.children_for(&query.path[start..end]) {
                let params_before = params.len();
                if capture_wildcards(&child.texts, &query.path[start..end], start, params)
                    && let Some(route) =
                        self.match_segments(child.node as usize, query, next, depth - 1, params, accepts)?
                {
                    return Ok(Some(route));
                }
                params.truncate(params_before);
            }
        }
        Ok(None)
    }

    /// A catch-all that matches the rest of the path.
    fn match_catch_all(
        &self,
        node: &Node,
        query: &RouteQuery<'_>,
        start: usize,
        params: &mut Vec<Range<usize>>,
        accepts: &mut impl Accepts,
    ) -> Match<'_> {
        let route = self.first_match(node.catch_alls, query, accepts)?;
        if route.is_some() {
            params.push(start..query.path.len());
        }
        Ok(route)
    }

    fn first_match(&self, (start, end): (u32, u32), query: &RouteQuery<'_>, accepts: &mut impl Accepts) -> Match<'_> {
        for candidate in &self.candidates[start as usize..end as usize] {
            if accepts(candidate, query)? {
                return Ok(Some(candidate.route));
            }
        }
        Ok(None)
    }
}

/// The end of the segment that starts at `start`, and the start of the next one.
pub fn end_of_segment(path: &str, start: usize) -> (usize, Option<usize>) {
    let slash = path.as_bytes()[start..].iter().position(|byte| *byte == b'/');
    let end = slash.map_or(path.len(), |at| start + at);
    (end, (end < path.len()).then_some(end + 1))
}

impl WildcardGroup {
    fn new([text, prefix, suffix]: [usize; 3], mut children: Vec<WildcardChild>) -> WildcardGroup {
        let hasher = RandomState::default();
        let hash = |child: &WildcardChild| hasher.hash_one((child.texts.first(), child.texts.last()));
        children.sort_by_key(hash);
        let mut by_ends: HashMap<u64, Range<usize>> = HashMap::default();
        for (position, child) in children.iter().enumerate() {
            by_ends.entry(hash(child)).or_insert(position..position).end = position + 1;
        }
        if by_ends.len() == 1 {
            by_ends.clear();
        }
        WildcardGroup { text, prefix, suffix, children, by_ends, hasher }
    }

    /// The children that may match a segment.
    #[inline]
    fn children_for(&self, segment: &str) -> &[WildcardChild] {
        // A wildcard matches at least one character.
        if segment.len() <= self.text {
            return &[];
        }
        if self.by_ends.is_empty() {
            return &self.children;
        }
        let ends = segment.get(..self.prefix).zip(segment.get(segment.len() - self.suffix..));
        let Some((prefix, suffix)) = ends else { return &[] };
        let children = self.by_ends.get(&self.hasher.hash_one((Some(prefix), Some(suffix))));
        children.map_or(&[], |children| &self.children[children.clone()])
    }
}

/// Whether a normalized segment matches literal texts with wildcards between them. The wildcards are appended to `params` then, as
/// ranges of the path, in which the segment starts at `start`. The first of several wildcards is as long as possible, then the
/// second, and so on.
pub fn capture_wildcards<T: AsRef<str>>(
    texts: &[T],
    segment: &str,
    start: usize,
    params: &mut Vec<Range<usize>>,
) -> bool {
    let [prefix, between @ .., suffix] = texts else { return false };
    if !segment.starts_with(prefix.as_ref()) || !segment.ends_with(suffix.as_ref()) {
        return false;
    }
    let params_before = params.len();
    let begin = prefix.as_ref().len();
    // The end of the wildcard that is read: they are read from the last to the first.
    let mut end = segment.len() - suffix.as_ref().len();
    if is_within_escape(segment, end) {
        return false;
    }
    // At least one character is left for the wildcards before and behind a text. Paths in responses may not be encoded.
    let search_begin = segment.ceil_char_boundary(begin + 1);
    for text in between.iter().rev() {
        let mut search_end = end.saturating_sub(1);
        let at = loop {
            let part = segment.get(search_begin..segment.floor_char_boundary(search_end));
            let Some(at) = part.and_then(|part| part.rfind(text.as_ref())) else { return false };
            let at = search_begin + at;
            if !is_within_escape(segment, at) {
                break at;
            }
            search_end = at + text.as_ref().len() - 1;
        };
        params.push(start + at + text.as_ref().len()..start + end);
        end = at;
    }
    if end <= begin {
        return false;
    }
    params.push(start + begin..start + end);
    params[params_before..].reverse();
    true
}

/// Whether a position of a normalized segment is behind the `%` or the first digit of an escape: a text that begins there is
/// a part of an encoded character.
fn is_within_escape(segment: &str, at: usize) -> bool {
    segment.as_bytes()[at.saturating_sub(2)..at].contains(&b'%')
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
                Segment::Wildcards(segment) => {
                    &mut tree
                        .wildcards
                        .entry(segment.texts.clone())
                        .or_insert((segment.specificity(), Tree::default()))
                        .1
                }
                Segment::Param(_) => tree.param.get_or_insert_default(),
                Segment::Rest(_) => return tree.catch_alls.push(candidate),
            };
        }
        tree.exact.push(candidate);
    }
}

impl Candidate {
    fn new<'r>(id: RouteId, route: &'r Route, names: &mut BTreeMap<&'r str, ParameterId>) -> Candidate {
        // The configuration check rejects invalid names, values and methods.
        let methods: Vec<Method> = route.methods.iter().filter_map(|m| Method::from_bytes(m.as_bytes()).ok()).collect();
        let header = |(name, value): &(String, Option<String>)| {
            let value = value.as_ref().and_then(|value| HeaderValue::from_str(value).ok());
            HeaderName::from_bytes(name.as_bytes()).ok().map(|name| (name, value))
        };
        let headers: Vec<_> = route.headers.iter().filter_map(header).collect();
        let networks = route.widest_network().map(|widest| RouteNetworks {
            networks: Arc::new(Networks::new(route.networks.iter().map(|network| (*network, ())))),
            widest,
        });
        let query = route.query.iter().map(|(name, value)| {
            let next = ParameterId::at(names.len());
            let id = *names.entry(name).or_insert(next);
            ParameterCondition { name: name.clone(), id, value: value.clone() }
        });
        let conditions = Conditions { methods, headers, query: query.collect(), networks };
        Candidate { route: id, conditions: conditions.exist().then(|| Box::new(conditions)) }
    }

    /// Sort key: the most specific candidate first.
    fn specificity_order(&self) -> (bool, Reverse<Option<u8>>, Reverse<[usize; 2]>, bool, RouteId) {
        let Some(conditions) = &self.conditions else {
            return (true, Reverse(None), Reverse([0; 2]), false, self.route);
        };
        // A route for HEAD precedes one for GET, which also matches HEAD.
        let by_get = conditions.methods.contains(&Method::GET) && !conditions.methods.contains(&Method::HEAD);
        let values = conditions.headers.iter().filter(|(_, value)| value.is_some()).count()
            + conditions.query.iter().filter(|condition| condition.value.is_some()).count();
        let widest = conditions.networks.as_ref().map(|networks| networks.widest);
        let names = conditions.headers.len() + conditions.query.len();
        (conditions.methods.is_empty(), Reverse(widest), Reverse([names, values]), by_get, self.route)
    }

    fn matches<'q>(&self, query: &RouteQuery<'q>, values: &mut ParameterValues<'q>) -> Result<bool, Ambiguity<'_>> {
        self.conditions.as_ref().map_or(Ok(true), |conditions| conditions.are_met_by(query, values))
    }

    fn unmet_condition(&self, query: &RouteQuery<'_>) -> Option<UnmetCondition> {
        let conditions = self.conditions.as_ref()?;
        [
            (conditions.include_method(query.method), UnmetCondition::Method),
            (conditions.include_address(query.address), UnmetCondition::Network),
            (conditions.match_headers(query.headers) == Ok(true), UnmetCondition::Header),
            (conditions.match_query(query.query, &mut ParameterValues::default()) == Ok(true), UnmetCondition::Query),
        ]
        .into_iter()
        .find_map(|(is_met, condition)| (!is_met).then_some(condition))
    }
}

impl Conditions {
    fn exist(&self) -> bool {
        let Conditions { methods, headers, query, networks } = self;
        !methods.is_empty() || !headers.is_empty() || !query.is_empty() || networks.is_some()
    }

    fn are_met_by<'q>(&self, query: &RouteQuery<'q>, values: &mut ParameterValues<'q>) -> Result<bool, Ambiguity<'_>> {
        if !self.include_method(query.method) || !self.include_address(query.address) {
            return Ok(false);
        }
        Ok(self.match_headers(query.headers)? && self.match_query(query.query, values)?)
    }

    /// No network contains the callers of Unix sockets.
    fn include_address(&self, address: ClientAddress) -> bool {
        let contains = |own: &RouteNetworks| address.ip().is_some_and(|ip| own.networks.most_specific(ip).is_some());
        self.networks.as_ref().is_none_or(contains)
    }

    fn match_headers(&self, headers: &HeaderMap) -> Result<bool, Ambiguity<'_>> {
        let mut are_met = true;
        for (name, value) in &self.headers {
            let mut values = headers.get_all(name).iter();
            are_met &= match (value, values.next(), values.next()) {
                (Some(_), _, Some(_)) => return Err(Ambiguity::Header(name)),
                (Some(value), first, None) => first == Some(value),
                (None, first, _) => first.is_some(),
            };
        }
        Ok(are_met)
    }

    fn match_query<'q>(&self, query: &'q str, values: &mut ParameterValues<'q>) -> Result<bool, Ambiguity<'_>> {
        let mut are_met = true;
        for ParameterCondition { name, id, value } in &self.query {
            are_met &= match (values.get(query, *id, name), value) {
                (Ok(Occurrence::Absent), _) => false,
                (Ok(Occurrence::Single(found)), Some(value)) => **found == *value.as_bytes(),
                (Ok(Occurrence::Single(_)), None) => true,
                (Ok(Occurrence::Repeated), None) if has_query_parameter(query, name) => true,
                (Ok(Occurrence::Repeated) | Err(InvalidEscape), _) => return Err(Ambiguity::Parameter(name)),
            };
        }
        Ok(are_met)
    }

    fn include_method(&self, requested: &Method) -> bool {
        self.methods.is_empty() || self.methods.iter().any(|method| method_matches(method, requested))
    }
}

impl<'q> ParameterValues<'q> {
    /// What the query has under a name, which is read at the first call.
    fn get(&mut self, query: &'q str, id: ParameterId, name: &str) -> &Result<Occurrence<'q>, InvalidEscape> {
        if self.0.len() <= id.index() {
            self.0.resize_with(id.index() + 1, || None);
        }
        self.0[id.index()].get_or_insert_with(|| query_parameter_or_empty(query, name))
    }
}

/// A route for GET also matches HEAD: both request the same resource (RFC 9110, section 9.3.2), and HEAD must not bypass
/// the rules of the route.
fn method_matches(method: &Method, requested: &Method) -> bool {
    method == requested || (method == Method::GET && requested == Method::HEAD)
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;
    use proptest::prelude::*;
    use transom_config::path::WildcardSegment;
    use transom_limiter::handles::Handle;

    const CLIENT: ClientAddress = ClientAddress::Ip(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)));

    fn pattern(text: &str) -> PathPattern {
        let segment = |segment: &str| match segment.strip_prefix('{').and_then(|s| s.strip_suffix('}')) {
            Some(name) if !name.contains('{') => match name.strip_prefix('*') {
                Some(rest) => Segment::Rest(rest.to_owned()),
                None => Segment::Param(name.to_owned()),
            },
            _ if segment.contains(['{', '*']) => {
                let pieces = || segment.split(['{', '}']).flat_map(|piece| piece.split('*'));
                let texts = pieces().step_by(2).map(str::to_owned).collect();
                // With `*`, there are no names between the texts; the tests use one kind in a segment.
                match segment.contains('{') {
                    true => {
                        let names = pieces().skip(1).step_by(2).map(|name| Some(name.to_owned())).collect();
                        Segment::Wildcards(WildcardSegment { texts, names })
                    }
                    false => {
                        let texts: Vec<String> = pieces().map(str::to_owned).collect();
                        let names = vec![None; texts.len() - 1];
                        Segment::Wildcards(WildcardSegment { texts, names })
                    }
                }
            }
            _ => Segment::Literal(segment.to_owned()),
        };
        PathPattern { text: text.to_owned(), segments: text[1..].split('/').map(segment).collect() }
    }

    /// A route from `METHODS HOSTS PATH [FIELDS]`, where `-` means any.
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
            query: vec![],
            networks: vec![],
            path: pattern(words[2]),
            secure: None,
            actions: None,
            upstream: None,
            rules: Vec::new(),
            cost: None,
            websocket: true,
            allow: vec![],
        }
    }

    fn routes<const N: usize>(texts: [&str; N]) -> IdVec<RouteId, Route> {
        texts.map(route).into()
    }

    fn found<'a>(
        routes: &'a IdVec<RouteId, Route>,
        method: &str,
        host: &str,
        path: &str,
    ) -> Option<(&'a str, Vec<String>)> {
        let mut params = Vec::new();
        let method = Method::from_bytes(method.as_bytes()).unwrap();
        let query = RouteQuery {
            host,
            method: &method,
            headers: &HeaderMap::new(),
            path,
            address: CLIENT,
            query: "",
            secure: false,
        };
        let route = Router::new(routes, TrailingSlash::Keep).find(&query, &mut params).unwrap()?;
        Some((routes[route].name.as_str(), params.into_iter().map(|range| path[range].to_owned()).collect()))
    }

    fn name<'a>(routes: &'a IdVec<RouteId, Route>, method: &str, host: &str, path: &str) -> Option<&'a str> {
        found(routes, method, host, path).map(|(name, _)| name)
    }

    #[test]
    fn the_most_specific_path_wins_in_any_order() {
        let mut texts = ["- - /{*all}", "- - /a/{x}", "- - /a/b", "- - /a/{x}/c", "- - /a/b/{*rest}", "- - /"];
        for _ in 0..2 {
            let routes = routes(texts);
            assert_eq!(name(&routes, "GET", "", "/a/b"), Some("- - /a/b"));
            assert_eq!(name(&routes, "GET", "", "/a/z"), Some("- - /a/{x}"));
            assert_eq!(name(&routes, "GET", "", "/a/z/c"), Some("- - /a/{x}/c"));
            assert_eq!(name(&routes, "GET", "", "/a/b/c"), Some("- - /a/b/{*rest}"));
            assert_eq!(name(&routes, "GET", "", "/a/z/d"), Some("- - /{*all}"));
            assert_eq!(name(&routes, "GET", "", "/"), Some("- - /"));
            assert_eq!(name(&routes, "GET", "", "/a/"), Some("- - /{*all}"));
            texts.reverse();
        }
    }

    /// However many routes have conditions on it.
    #[test]
    fn a_query_parameter_is_read_once() {
        let mut values = ParameterValues::default();
        for _ in 0..2 {
            let found = |value: &'static [u8]| Ok(Occurrence::Single(value.into()));
            // The second query is not read.
            assert_eq!(values.get("a=1&b=2", ParameterId::at(1), "b"), &found(b"2"));
            assert_eq!(values.get("b=3", ParameterId::at(1), "b"), &found(b"2"));
        }
    }

    #[test]
    fn parameters_are_ranges_of_the_path() {
        let routes = routes(["- - /u/{id}/p/{post}", "- - /f/{*rest}"]);
        assert_eq!(found(&routes, "GET", "", "/u/7/p/x").unwrap().1, ["7", "x"]);
        assert_eq!(found(&routes, "GET", "", "/f/a/b").unwrap().1, ["a/b"]);
        assert_eq!(found(&routes, "GET", "", "/f/").unwrap().1, [""]);
        assert_eq!(found(&routes, "GET", "", "/f"), None);
        assert_eq!(found(&routes, "GET", "", "/u//p/x"), None);
    }

    #[test]
    fn a_catch_all_matches_an_empty_rest_if_trailing_slashes_are_ignored() {
        let routes = routes(["- - /f/{*rest}", "- - /{*all}", "- - /g", "- - /g/{*rest}"]);
        let router = Router::new(&routes, TrailingSlash::Ignore);
        for (path, index, params) in
            [("/f", 0, Some(2..2)), ("/f/a", 0, Some(3..4)), ("/", 1, Some(1..1)), ("/g", 2, None)]
        {
            let query = RouteQuery {
                host: "",
                method: &Method::GET,
                headers: &HeaderMap::new(),
                path,
                address: CLIENT,
                query: "",
                secure: false,
            };
            let mut found = Vec::new();
            assert_eq!(router.find(&query, &mut found), Ok(Some(RouteId::at(index))), "{path}");
            assert_eq!(found, Vec::from_iter(params), "{path}");
        }
    }

    #[test]
    fn wildcards_match_a_part_of_a_segment() {
        let routes = routes([
            "- - /s/*.css",
            "- - /v{n}/u/{id}.json",
            "- - /f/{name}.{ext}",
            "- - /e/{a}2{b}",
            "- - /q/{id}%C3%A9",
            "- - /m/{a}-{b}--{c}",
        ]);
        for (path, params) in [
            ("/s/a.css", Some(vec!["a"])),
            ("/s/a.css.css", Some(vec!["a.css"])),
            ("/s/.css", None),
            ("/s/a.cs", None),
            ("/s/b/a.css", None),
            ("/v1/u/7.json", Some(vec!["1", "7"])),
            ("/v/u/7.json", None),
            ("/f/archive.tar.gz", Some(vec!["archive.tar", "gz"])),
            ("/f/..x", Some(vec![".", "x"])),
            ("/f/...", Some(vec![".", "."])),
            ("/f/..", None),
            ("/f/x.", None),
            ("/f/.x", None),
            // An encoded character is one character.
            ("/e/%20x", None),
            ("/e/%252x", Some(vec!["%25", "x"])),
            ("/e/%20x2%20", Some(vec!["%20x", "%20"])),
            ("/e/%20x%22", None),
            ("/q/%C3%A9", None),
            ("/q/%C3%A9%C3%A9", Some(vec!["%C3%A9"])),
            ("/m/a-b--c--d", Some(vec!["a-b-", "c", "d"])),
            ("/m/a---c", None),
            ("/m/a-b--", None),
        ] {
            let params = params.map(|params| params.into_iter().map(str::to_owned).collect());
            assert_eq!(found(&routes, "GET", "", path).map(|(_, params)| params), params, "{path}");
        }
    }

    #[test]
    fn longer_literal_text_precedes_and_a_parameter_follows() {
        let mut texts = [
            "- - /a.css",
            "- - /{n}.min.css",
            "- - /a{n}.css",
            "- - /a*.css",
            "- - /{n}.css",
            "- - /a{n}",
            "- - /{n}a",
            "- - /{n}",
            "- - /{*rest}",
            "- - /a{x}b{y}c",
            "- - /a{x}x{y}c",
            "GET - /p{n}",
            "- - /{n}q",
        ];
        for _ in 0..2 {
            let routes = routes(texts);
            let name = |method, path| name(&routes, method, "", path).unwrap();
            assert_eq!(name("GET", "/a.css"), "- - /a.css");
            assert_eq!(name("GET", "/ab.min.css"), "- - /{n}.min.css");
            assert!(["- - /a{n}.css", "- - /a*.css"].contains(&name("GET", "/ab.css")));
            assert_eq!(name("GET", "/b.css"), "- - /{n}.css");
            assert_eq!(name("GET", "/aba"), "- - /a{n}", "the longer beginning");
            assert_eq!(name("GET", "/b"), "- - /{n}");
            assert_eq!(name("GET", "/b/c"), "- - /{*rest}");
            assert_eq!(name("GET", "/aabbxxc"), "- - /a{x}b{y}c", "the first in the alphabet");
            assert_eq!((name("GET", "/p1q"), name("PUT", "/p1q")), ("GET - /p{n}", "- - /{n}q"));
            texts.reverse();
        }
    }

    /// The captures of a segment with wildcards, the first as long as possible, by trying all of them.
    fn captures(texts: &[String], segment: &str) -> Option<Vec<String>> {
        let rest = segment.strip_prefix(texts[0].as_str())?;
        if texts.len() == 1 {
            return rest.is_empty().then(Vec::new);
        }
        let units: Vec<usize> = (1..=rest.len()).filter(|at| !rest[at.saturating_sub(2)..*at].contains('%')).collect();
        units.into_iter().rev().find_map(|end| {
            let others = captures(&texts[1..], &rest[end..])?;
            Some([vec![rest[..end].to_owned()], others].concat())
        })
    }

    /// The values of the parameters of a path that matches.
    fn naive_match(pattern: &[Segment], path: &[&str]) -> Option<Vec<String>> {
        let (values, ours, theirs) = match (pattern, path) {
            ([], []) => return Some(Vec::new()),
            ([Segment::Rest(_)], [_, ..]) => return Some(vec![path.join("/")]),
            ([Segment::Literal(text), ours @ ..], [segment, theirs @ ..]) if text == segment => (vec![], ours, theirs),
            ([Segment::Param(_), ours @ ..], [segment, theirs @ ..]) if !segment.is_empty() => {
                (vec![(*segment).to_owned()], ours, theirs)
            }
            ([Segment::Wildcards(own), ours @ ..], [segment, theirs @ ..]) => {
                (captures(&own.texts, segment)?, ours, theirs)
            }
            _ => return None,
        };
        Some([values, naive_match(ours, theirs)?].concat())
    }

    /// The order of precedence of a segment: the smallest comes first.
    fn naive_order(segment: &Segment) -> (u8, Reverse<[usize; 3]>, Vec<String>) {
        match segment {
            Segment::Literal(_) => (0, Reverse([0; 3]), vec![]),
            Segment::Wildcards(own) => (1, Reverse(own.specificity()), own.texts.clone()),
            Segment::Param(_) => (2, Reverse([0; 3]), vec![]),
            Segment::Rest(_) => (3, Reverse([0; 3]), vec![]),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(150))]

        /// The router finds the route that comes first if all routes are tried in the order of precedence.
        #[test]
        fn the_router_agrees_with_trying_all_routes(
            paths in proptest::collection::vec(
                (
                    prop_oneof![3 => Just("-"), 1 => Just("GET"), 1 => Just("PUT")],
                    prop_oneof![3 => Just("-"), 1 => Just("a.b")],
                    proptest::collection::vec("(a|ab|b|\\{p\\}|a\\{p\\}|\\{p\\}b|\\{p\\}b\\{q\\}|a\\{p\\}b|a\\*b|\\*2|ab\\*|\\{p\\}a\\{q\\}b\\{r\\})", 1..4),
                    prop_oneof![2 => Just(""), 1 => Just("/{*rest}")],
                ),
                1..24,
            ),
            requests in proptest::collection::vec(("[ab]{0,5}|[ab2]{0,2}%2[02][ab]{0,2}", "(/[ab2]{1,5}|/%20[ab]?){0,3}/?"), 20),
        ) {
            let texts: Vec<String> =
                paths.iter().map(|(method, host, path, rest)| format!("{method} {host} /{}{rest}", path.join("/"))).collect();
            let routes: IdVec<RouteId, Route> = texts.iter().map(|text| route(text)).collect::<Vec<_>>().into();
            let router = Router::new(&routes, TrailingSlash::Keep);
            for (first, rest) in &requests {
                let path = format!("/{first}{rest}");
                let segments: Vec<&str> = path[1..].split('/').collect();
                for (method, host) in [("GET", "a.b"), ("PUT", "")] {
                    let order = |route: &Route| {
                        (route.hosts.is_empty(), route.path.segments.iter().map(naive_order).collect::<Vec<_>>(), route.methods.is_empty())
                    };
                    let expected = routes
                        .enumerate()
                        .filter(|(_, route)| route.methods.is_empty() || route.methods[0] == method)
                        .filter(|(_, route)| route.hosts.is_empty() || route.hosts[0] == host)
                        .filter_map(|(id, route)| Some((order(route), id, naive_match(&route.path.segments, &segments)?)))
                        .min_by_key(|(order, id, _)| (order.clone(), *id));
                    let method = Method::from_bytes(method.as_bytes()).unwrap();
                    let query = RouteQuery { host, method: &method, headers: &HeaderMap::new(), path: &path, address: CLIENT, query: "", secure: false };
                    let mut params = Vec::new();
                    let found = router.find(&query, &mut params).unwrap();
                    let found = found.map(|id| (id, params.into_iter().map(|range| path[range].to_owned()).collect::<Vec<_>>()));
                    prop_assert_eq!(found, expected.map(|(_, id, params)| (id, params)), "{} {} {:?}", method, path, texts);
                }
            }
        }
    }

    #[test]
    fn a_less_specific_branch_is_tried_if_the_method_does_not_match() {
        let routes = routes(["GET - /a/b", "POST - /a/{x}", "- - /{*all}"]);
        assert_eq!(found(&routes, "GET", "", "/a/b"), Some(("GET - /a/b", vec![])));
        assert_eq!(found(&routes, "HEAD", "", "/a/b"), Some(("GET - /a/b", vec![])));
        assert_eq!(found(&routes, "POST", "", "/a/b"), Some(("POST - /a/{x}", vec!["b".to_owned()])));
        assert_eq!(found(&routes, "PUT", "", "/a/b"), Some(("- - /{*all}", vec!["a/b".to_owned()])));
    }

    #[test]
    fn candidates_are_the_routes_of_host_and_path_in_order_of_preference() {
        let routes =
            routes(["GET - /a/b", "POST - /a/{x}", "- - /{*all}", "- - /c", "- a.example.com,*.example.com /{*all}"]);
        let candidates = |method: Method, host| {
            let query = RouteQuery {
                host,
                method: &method,
                headers: &HeaderMap::new(),
                path: "/a/b",
                address: CLIENT,
                query: "",
                secure: false,
            };
            let found = Router::new(&routes, TrailingSlash::Keep).candidates(&query);
            found.into_iter().map(|(route, unmet)| (route.index(), unmet)).collect::<Vec<_>>()
        };
        let other_method = Some(UnmetCondition::Method);
        assert_eq!(candidates(Method::POST, "x"), [(0, other_method), (1, None), (2, None)]);
        assert_eq!(candidates(Method::HEAD, "a.example.com"), [(4, None), (0, None), (1, other_method), (2, None)]);
    }

    #[test]
    fn an_exact_host_precedes_a_wildcard_and_a_wildcard_any_host() {
        let routes = routes(["- a.example.com /x", "- *.example.com /{*r}", "- *.com /{*r}", "- - /{*r}"]);
        assert_eq!(name(&routes, "GET", "a.example.com", "/x"), Some("- a.example.com /x"));
        assert_eq!(name(&routes, "GET", "a.example.com", "/y"), Some("- *.example.com /{*r}"));
        assert_eq!(name(&routes, "GET", "b.c.example.com", "/x"), Some("- *.example.com /{*r}"));
        assert_eq!(name(&routes, "GET", "example.com", "/x"), Some("- *.com /{*r}"));
        assert_eq!(name(&routes, "GET", ".example.com", "/x"), Some("- *.com /{*r}"));
        assert_eq!(name(&routes, "GET", "localhost", "/x"), Some("- - /{*r}"));
    }

    #[test]
    fn a_route_with_a_scheme_comes_first() {
        let mut routes = routes(["- - /{*all}", "- a /x/y", "- - /ok"]);
        routes[RouteId::at(0)].secure = Some(false);
        routes[RouteId::at(2)].secure = Some(true);
        let name = |host, path, secure| {
            let query = RouteQuery {
                host,
                method: &Method::GET,
                headers: &HeaderMap::new(),
                path,
                address: CLIENT,
                query: "",
                secure,
            };
            Router::new(&routes, TrailingSlash::Keep)
                .find(&query, &mut Vec::new())
                .unwrap()
                .map(|route| routes[route].name.as_str())
        };
        assert_eq!(name("a", "/x/y", false), Some("- - /{*all}"));
        assert_eq!(name("a", "/x/y", true), Some("- a /x/y"));
        assert_eq!(name("a", "/ok", true), Some("- - /ok"));
        assert_eq!(name("a", "/other", true), None);
    }

    #[test]
    fn a_route_for_head_precedes_one_for_get() {
        let routes = routes(["GET - /x", "HEAD - /x"]);
        assert_eq!(name(&routes, "HEAD", "", "/x"), Some("HEAD - /x"));
        assert_eq!(name(&routes, "GET", "", "/x"), Some("GET - /x"));
    }

    #[test]
    fn methods_and_fields_are_more_specific_than_none() {
        let routes = routes(["- - /x", "- - /x x-beta", "GET - /x"]);
        assert_eq!(name(&routes, "GET", "", "/x"), Some("GET - /x"));
        assert_eq!(name(&routes, "PUT", "", "/x"), Some("- - /x"));
        let mut headers = HeaderMap::new();
        headers.insert("x-beta", HeaderValue::from_static("1"));
        let query = RouteQuery {
            host: "",
            method: &Method::PUT,
            headers: &headers,
            path: "/x",
            address: CLIENT,
            query: "",
            secure: false,
        };
        assert_eq!(Router::new(&routes, TrailingSlash::Keep).find(&query, &mut Vec::new()), Ok(Some(RouteId::at(1))));
    }

    #[test]
    fn a_field_matched_by_value_must_not_repeat() {
        let mut routes = routes(["- - /{*rest}", "- - /x", "POST - /x", "- - /y"]);
        let versions = [None, Some("2"), Some("3"), None];
        for (route, version) in routes.iter_mut().zip(versions) {
            route.headers.extend(version.map(|version| ("x-version".to_owned(), Some(version.to_owned()))));
        }
        routes[RouteId::at(3)].headers.push(("x-version".to_owned(), None));
        let router = Router::new(&routes, TrailingSlash::Keep);
        let name = HeaderName::from_static("x-version");
        let mut twice = HeaderMap::new();
        twice.append(&name, HeaderValue::from_static("2"));
        let once = twice.clone();
        twice.append(&name, HeaderValue::from_static("2"));
        for (path, headers, found) in [
            ("/x", &once, Ok(Some(RouteId::at(1)))),
            ("/x", &twice, Err(Ambiguity::Header(&name))),
            ("/y", &twice, Ok(Some(RouteId::at(3)))),
            ("/z", &twice, Ok(Some(RouteId::at(0)))),
        ] {
            let query =
                RouteQuery { host: "", method: &Method::GET, headers, path, address: CLIENT, query: "", secure: false };
            assert_eq!(router.find(&query, &mut Vec::new()), found, "{path}");
        }
    }

    /// A request for `/x` with a query and an address.
    fn found_by(routes: &IdVec<RouteId, Route>, query: &str, address: &str) -> Result<Option<usize>, String> {
        let query = RouteQuery {
            host: "",
            method: &Method::GET,
            headers: &HeaderMap::new(),
            path: "/x",
            address: address.parse().unwrap(),
            query,
            secure: false,
        };
        let router = Router::new(routes, TrailingSlash::Keep);
        let found = router.find(&query, &mut Vec::new()).map_err(|error| format!("{error:?}"));
        let first_met =
            router.candidates(&query).into_iter().find(|(_, unmet)| unmet.is_none()).map(|(route, _)| route);
        assert!(found.as_ref().is_ok_and(|found| *found == first_met) || found.is_err());
        found.map(|found| found.map(|route| route.index()))
    }

    #[test]
    fn query_parameters_are_compared_decoded_and_must_be_clear() {
        let mut routes = routes(["- - /x", "- - /x", "- - /x", "- - /x"]);
        let conditions = [vec![], vec![("v", Some("a b"))], vec![("v", None)], vec![("v", None), ("w", Some(""))]];
        for (route, conditions) in routes.iter_mut().zip(conditions) {
            let owned = |(name, value): (&str, Option<&str>)| (name.to_owned(), value.map(str::to_owned));
            route.query = conditions.into_iter().map(owned).collect();
        }
        let repeated = || Err(String::from("Parameter(\"v\")"));
        for (query, expected) in [
            ("", Ok(Some(0))),
            ("w=a+b", Ok(Some(0))),
            ("v=a+b", Ok(Some(1))),
            ("x=1&%76=a%20b", Ok(Some(1))),
            ("v", Ok(Some(2))),
            ("v=c", Ok(Some(2))),
            ("v=c&w", Ok(Some(3))),
            ("v=a+b&w=", Ok(Some(3))),
            ("w=1&v=c", Ok(Some(2))),
            // Another server may use the other value, or take `V` for `v`.
            ("v=a+b&v=c", repeated()),
            ("v=c&v=c", repeated()),
            ("V=c", repeated()),
            ("v=%zz", repeated()),
            ("x=%zz", Ok(Some(0))),
        ] {
            assert_eq!(found_by(&routes, query, "192.0.2.1"), expected, "{query}");
        }
        // Presence of a repeated parameter is clear.
        routes[RouteId::at(1)].query[0].1 = None;
        assert_eq!(found_by(&routes, "v=1&v=2", "192.0.2.1"), Ok(Some(1)));
    }

    #[test]
    fn narrower_networks_precede_wider_ones_and_those_precede_none() {
        let mut routes = routes(["- - /x", "- - /x", "- - /x", "- - /x h", "GET - /x"]);
        let networks = [&["10.0.0.0/8", "2001:db8::/32"][..], &["10.1.0.0/16", "10.2.0.0/24"], &["::/0"], &[], &[]];
        for (route, networks) in routes.iter_mut().zip(networks) {
            route.networks = networks.iter().map(|network| network.parse().unwrap()).collect();
        }
        routes[RouteId::at(4)].networks = vec!["10.9.0.0/16".parse().unwrap()];
        for (address, expected) in [
            ("10.1.2.3", Some(1)),
            ("::ffff:10.2.0.9", Some(1)),
            ("10.2.1.1", Some(0)),
            ("10.9.0.1", Some(4)),
            ("2001:db8::1", Some(0)),
            ("2001:db9::1", Some(2)),
            ("192.0.2.1", None),
            ("unix:", None),
        ] {
            assert_eq!(found_by(&routes, "", address), Ok(expected), "{address}");
        }
    }
}
