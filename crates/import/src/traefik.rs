//! Imports the dynamic configuration of Traefik, in YAML or TOML: routers, services and middlewares of HTTP. Entry points and their
//! trusted addresses are taken from the static configuration, if it is among the files.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use crate::gateway::{Gateway, Named, Route, Section, Value, one_or_list, table, table_name, unused_name};
use crate::path::{covers, literal, within_segment};
use crate::rate::{Rate, Window, windows};
use crate::route_order::{keep_order, note_dropped};
use crate::source::{Effect, ImportError, Position};
use crate::traefik_rule::{Alternative, parse};
use crate::tree::{Entry, Node, nothing_in, read_all, translated};
use crate::{Files, Translated};

/// Middlewares that are not translated: in what a route without them differs, and why. A router with another middleware, such as a
/// `plugin`, or one that is `Stricter`, is closed.
const MIDDLEWARES: &[(Effect, &str, &[&str])] = &[
    (
        Effect::Stricter,
        "the route is closed: to admit tokens, write their keys to [jwt], and a rule with a key such as `jwt:sub`, see \
         docs/guides/tokens.md",
        &["jwt", "oidc"],
    ),
    (
        Effect::Stricter,
        "the gateway checks no such credentials: the route is closed",
        &[
            "apiKey",
            "basicAuth",
            "digestAuth",
            "forwardAuth",
            "hmac",
            "ldap",
            "oAuthClientCredentials",
            "oAuthIntrospection",
            "opa",
        ],
    ),
    (Effect::NotEnforced, "servers get no field about the certificate", &["passTLSClientCert"]),
    (Effect::NotEnforced, "the gateway has no such middleware", &["encodedCharacters"]),
    (Effect::LeftOut, "the gateway repeats requests as `retries` of the upstream says", &["retry"]),
    (Effect::LeftOut, "servers that fail are ejected as `ejection` of the upstream says", &["circuitBreaker"]),
    (Effect::LeftOut, "responses of servers pass unchanged", &["compress", "contentType", "errors"]),
    (
        Effect::LeftOut,
        "the gateway has no such middleware",
        &["grpcWeb", "redirectRegex", "replacePathRegex", "stripPrefixRegex"],
    ),
];

pub fn import(files: &Files, paths: &[PathBuf]) -> Result<Translated, ImportError> {
    let documents = read_all(files, paths)?;
    let settings = |name: &str| -> Vec<&Entry> {
        documents.iter().filter_map(|document| document.at(&["http", name])).flat_map(Node::settings).collect()
    };
    let routers = settings("routers");
    if routers.is_empty() {
        return Err(nothing_in(
            &documents,
            "there are no `http.routers`",
            "name the files of the dynamic configuration",
        ));
    }
    let mut importer = Importer {
        gateway: Gateway::default(),
        services: settings("services"),
        middlewares: settings("middlewares"),
        rules: Vec::new(),
        upstream_names: BTreeMap::new(),
        point_middlewares: Vec::new(),
        strategy: None,
    };
    // Routers of equal priority are tried in no order: they come out of a map.
    importer.gateway.takes_any = true;
    let points: Vec<&Entry> =
        documents.iter().filter_map(|document| document.get("entryPoints")).flat_map(Node::settings).collect();
    let main = main_point(&points, &routers);
    let (served, others): (Vec<&Entry>, Vec<&Entry>) =
        routers.into_iter().partition(|router| main.is_none_or(|main| serves(router, &points, main)));
    importer.entry_points(&points, main, &served);
    for router in others {
        let names = points_of(router, &points).join(", ");
        router.node.mark_read();
        let why = format!(
            "routes apply to all addresses, and those of `{0}` are imported: for those of `{names}`, import the files again \
             without the entry point `{0}`, for another gateway",
            main.unwrap_or_default()
        );
        router.note(&mut importer.gateway, Effect::LeftOut, &why);
    }
    for router in served {
        importer.router(router);
    }
    for unused in importer.middlewares.iter().chain(&importer.services).filter(|entry| entry.node.is_unread()) {
        unused.note(&mut importer.gateway, Effect::LeftOut, "no router that is translated uses it");
    }
    for entry in documents.iter().filter_map(|document| document.setting("certificatesResolvers")) {
        entry.note(&mut importer.gateway, Effect::LeftOut, "`acme` of [listen.https] orders certificates");
    }
    for other in ["tcp", "udp"] {
        for entry in documents.iter().filter_map(|document| document.setting(other)) {
            entry.note(&mut importer.gateway, Effect::LeftOut, "the gateway forwards HTTP only");
        }
    }
    note_dropped(&mut importer.gateway);
    keep_order(&mut importer.gateway, "Traefik");
    Ok(translated(&documents, importer.gateway))
}

struct Importer<'d> {
    gateway: Gateway,
    services: Vec<&'d Entry>,
    middlewares: Vec<&'d Entry>,
    /// The rule of each middleware, and how many routers use it.
    rules: Vec<(String, String, usize)>,
    /// By the name of the service.
    upstream_names: BTreeMap<String, String>,
    /// The middlewares of the entry point.
    point_middlewares: Vec<&'d str>,
    /// How middlewares find the client: by the place in `X-Forwarded-For`, or without trusted addresses.
    strategy: Option<Option<u64>>,
}

const UNKNOWN: &str = "it may refuse requests, and the gateway does not have it: the route is closed; if it refuses none, import the \
                       files without it";
/// Why requests are not redirected to https.
const NO_REDIRECT: &str =
    "without TLS here, it would have no end; with [listen.https], write a route with `scheme = \"http\"`";
/// Where the gateway listens while the certificates or the address of the entry point are elsewhere.
const LOOPBACK: &str = "127.0.0.1:8080";
/// Chains of middlewares in one another.
const CHAINS_MAX: usize = 8;

/// The names of the entry points whose requests reach a router. One that names none has the default ones.
fn points_of<'d>(router: &'d Entry, points: &[&'d Entry]) -> Vec<&'d str> {
    let named = router.node.texts_of("entryPoints");
    let is_default = |point: &&&Entry| point.node.bool_of("asDefault") == Some(true);
    let has_defaults = points.iter().any(|point| is_default(&point));
    let defaults = points.iter().filter(|point| !has_defaults || is_default(point)).map(|point| point.key.as_str());
    if named.is_empty() { defaults.collect() } else { named }
}

/// Whether requests at an entry point reach a router. One that names none is at all of them if none is known.
fn serves(router: &Entry, points: &[&Entry], name: &str) -> bool {
    let points_of_router = points_of(router, points);
    points_of_router.contains(&name) || points.is_empty() && points_of_router.is_empty()
}

/// The entry point whose routers are imported: one that has some, a public one, if possible, of most routers, with most middlewares.
/// `None` if neither entry points nor routers name any.
fn main_point<'d>(points: &[&'d Entry], routers: &[&'d Entry]) -> Option<&'d str> {
    let names_of_points = points.iter().map(|point| point.key.as_str());
    let mut counts: Vec<(&str, usize)> = names_of_points.map(|name| (name, 0)).collect();
    let mut places: BTreeMap<&str, usize> =
        counts.iter().enumerate().map(|(place, (name, _))| (*name, place)).collect();
    for router in routers {
        // The dashboard of Traefik, for example, is not imported.
        let is_of_files = router.node.text_of("service").is_none_or(|service| in_files(service).is_some());
        for name in points_of(router, points) {
            let place = *places.entry(name).or_insert(counts.len());
            if place == counts.len() {
                counts.push((name, 0));
            }
            counts[place].1 += usize::from(is_of_files);
        }
    }
    let rank = |(name, count): (&str, usize)| {
        let point = points.iter().find(|point| point.key == name).map(|point| &point.node);
        let is_loopback = point.and_then(|point| point.text_of("address")).is_some_and(is_loopback);
        let middlewares = point.map_or(0, |point| settings_of(point)[0].len());
        (count > 0, point.is_some(), !is_loopback, point.and_then(redirections).is_none(), count, middlewares)
    };
    // The first of several.
    counts.into_iter().rev().max_by_key(|found| rank(*found)).map(|(name, _)| name)
}

fn is_loopback(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// That all requests to an entry point are redirected.
fn redirections(point: &Node) -> Option<&Entry> {
    point.get("http")?.setting("redirections")
}

/// Settings of an entry point that apply to all requests there.
fn settings_of(point: &Node) -> [Vec<&str>; 3] {
    let texts = |section: &str, name: &str| point.get(section).map_or(Vec::new(), |section| section.texts_of(name));
    [texts("http", "middlewares"), texts("forwardedHeaders", "trustedIPs"), texts("proxyProtocol", "trustedIPs")]
}

/// The name of a service or middleware of the files; `None` if it is of another provider, such as `api@internal`.
fn in_files(name: &str) -> Option<&str> {
    match name.split_once('@') {
        Some((name, "file")) => Some(name),
        Some(_) => None,
        None => Some(name),
    }
}

impl<'d> Importer<'d> {
    /// Listens at the entry point, and at others that have the same settings and routers.
    fn entry_points(&mut self, points: &[&'d Entry], main: Option<&str>, routers: &[&'d Entry]) {
        let mut addresses = Vec::new();
        let main = points.iter().find(|point| Some(point.key.as_str()) == main);
        let settings = main.map_or(<[Vec<&str>; 3]>::default(), |main| settings_of(&main.node));
        let of_main = main.map(|main| main.key.as_str());
        for point in points {
            let node = &point.node;
            let is_main = Some(point.key.as_str()) == of_main;
            let is_served = |router: &&'d Entry| serves(router, points, &point.key);
            let own = settings_of(node);
            let redirects = redirections(node);
            if !is_main && (redirects.is_some() || own != settings || !routers.iter().all(is_served)) {
                let is_lost = |name: &&str| !settings[0].contains(name);
                let (effect, why) = match own[0].iter().any(is_lost) && routers.iter().any(is_served) {
                    true => (
                        Effect::NotEnforced,
                        "and those of another entry point are imported: its middlewares are not applied",
                    ),
                    false => (Effect::LeftOut, "and not all routers and settings are those of this one"),
                };
                node.mark_read();
                point.note(&mut self.gateway, effect, &format!("routes apply to all addresses, {why}"));
                continue;
            }
            node.setting("asDefault");
            if let Some(redirects) = redirects {
                redirects.note(&mut self.gateway, Effect::LeftOut, NO_REDIRECT);
            }
            if let Some(tls) = node.get("http").and_then(|http| http.setting("tls")) {
                tls.note(&mut self.gateway, Effect::LeftOut, "write the certificates to [listen.https]");
                if is_main {
                    self.gateway.listen.comment("Without the certificates, the gateway listens here without TLS.");
                    addresses.push(LOOPBACK.to_owned());
                }
                continue;
            }
            if let Some(address) = node.text_of("address") {
                let address = address.split('/').next().unwrap_or(address);
                addresses.push(if address.starts_with(':') { format!("0.0.0.0{address}") } else { address.to_owned() });
            }
        }
        let [middlewares, proxies, balancers] = settings;
        self.point_middlewares = middlewares;
        proxies.into_iter().for_each(|proxy| self.gateway.listen.push("trusted_proxies", proxy));
        balancers.into_iter().for_each(|balancer| self.gateway.listen.push("proxy_protocol", balancer));
        if addresses.is_empty() {
            // An entry point may be internal: without its address, nothing is published.
            self.gateway.listen.comment(
                "The entry points are in the static configuration of Traefik: import its file too, or write where to listen.",
            );
            if let Some(router) = routers.first() {
                let why = format!(
                    "the entry points are not known: the gateway listens on {LOOPBACK} only; name the file of the static \
                     configuration too"
                );
                router.note(&mut self.gateway, Effect::Stricter, &why);
            }
            addresses.push(LOOPBACK.to_owned());
        }
        self.gateway.listen.settings.insert(0, ("http".to_owned(), one_or_list(addresses)));
    }

    /// Whether the gateway finds the client as an `ipStrategy` does. The first one decides for all.
    fn fits(&mut self, strategy: &Node) -> bool {
        let excluded = strategy.texts_of("excludedIPs");
        let depth = strategy.number_of("depth").filter(|depth| *depth > 0);
        if depth.is_none() && excluded.is_empty() {
            return true;
        }
        let trusted = match self.gateway.listen.get("trusted_proxies") {
            Some(Value::List(trusted)) => trusted,
            _ => return false,
        };
        let is_excluded = |proxy: &Value| excluded.iter().any(|excluded| *proxy == (*excluded).into());
        let is_possible = match depth {
            Some(depth) => depth <= 32,
            None => trusted.len() == excluded.len() && trusted.iter().all(is_excluded),
        };
        if !is_possible || self.strategy.is_some_and(|known| known != depth) {
            return false;
        }
        self.strategy = Some(depth);
        if let Some(depth) = depth {
            self.gateway.listen.set("trusted_hops", depth);
        }
        true
    }

    fn router(&mut self, router: &'d Entry) {
        let node = &router.node;
        let mut section = Section::default();
        section.comment(format!("Router {} ({})", router.key, node.position));
        section.set("name", router.key.as_str());
        let Some(rule) = node.setting("rule") else {
            router.note(&mut self.gateway, Effect::NotEnforced, "it has no `rule`");
            return;
        };
        let alternatives = match parse(rule.node.text().unwrap_or_default()) {
            Ok(alternatives) => alternatives,
            Err(why) => {
                node.mark_read();
                rule.note(&mut self.gateway, Effect::NotEnforced, &why);
                return;
            }
        };
        if alternatives.is_empty() {
            node.mark_read();
            return rule.note(&mut self.gateway, Effect::LeftOut, "no request matches it");
        }
        node.ignore(&["ruleSyntax", "observability"]);
        let has_networks = alternatives.iter().any(|alternative| !alternative.networks.is_empty());
        if has_networks && self.gateway.listen.get("trusted_proxies").is_some() {
            let why = "Traefik compares the address of the peer, the gateway that of the client behind trusted proxies";
            rule.note_at(&mut self.gateway, &mut section, Effect::Differs, why);
        }
        // By default, the longest rule is tried first.
        let priority =
            node.text_of("priority").and_then(|priority| priority.parse().ok()).filter(|number| *number != 0);
        let rank = vec![priority.unwrap_or(rule.node.text().map_or(0, str::len) as i64)];
        if let Some(tls) = node.setting("tls") {
            tls.node.mark_read();
            let why = "the gateway has no certificate: with [listen.https], write `scheme = \"https\"`";
            tls.note_at(&mut self.gateway, &mut section, Effect::NotEnforced, why);
        }
        let service = node.setting("service");
        match service.and_then(|service| self.upstream(service.node.text()?)) {
            Some(upstream) => section.set("upstream", upstream),
            None => {
                if let Some(service) = service {
                    let why = match service.node.text().and_then(|name| name.split_once('@')) {
                        Some((_, "internal")) => {
                            "it is a part of Traefik; metrics, health and the dashboard of the gateway are at the `admin` address"
                        }
                        Some((_, provider)) if provider != "file" => "it is of another provider, and not in the files",
                        _ => "it cannot be translated",
                    };
                    service.note_at(&mut self.gateway, &mut section, Effect::LeftOut, why);
                }
                section.set("respond", table([("status", 503.into())]));
            }
        }
        let mut applied = Applied::default();
        let middlewares = [self.point_middlewares.clone(), node.texts_of("middlewares")].concat();
        self.apply(&middlewares, router, &mut section, &mut applied);
        if !applied.rules.is_empty() {
            let place = section.settings.iter().position(|(name, _)| name == "upstream").map_or(0, |place| place + 1);
            section.settings.insert(place, ("rules".to_owned(), applied.rules.clone().into()));
        }
        for alternative in alternatives {
            match alternative.unknown.clone() {
                None => self.add_routes(router, alternative, &section, &applied, &rank),
                Some(why) => {
                    rule.leave_out();
                    let why = format!("router `{}`: {why}", router.key);
                    drop_alternative(&mut self.gateway, &rule.node.position, why, alternative, &section);
                }
            }
        }
    }

    fn add_routes(
        &mut self,
        router: &Entry,
        alternative: Alternative,
        section: &Section,
        applied: &Applied,
        rank: &[i64],
    ) {
        let Alternative { hosts, mut paths, methods, headers, query, networks, within, .. } = alternative;
        let mut section = section.clone();
        if !section.restricts() {
            for path in paths.extract_if(.., |path| within.contains(path)).filter(|path| path.ends_with('*')) {
                let text = format!("Traefik also matches `{path}`; the route does not");
                section.comment(self.gateway.placed_note(Effect::Differs, &router.node.position, text));
            }
        }
        if paths.is_empty() {
            paths.push("/{*rest}".to_owned());
        }
        for (index, mut path) in paths.into_iter().enumerate() {
            let mut section = section.clone();
            if index > 0 {
                section.comments.clear();
            }
            if section.get("upstream").is_some() {
                applied.set_path(&mut section, &mut path);
            }
            let (hosts, methods, headers) = (hosts.clone(), methods.clone(), headers.clone());
            let (query, networks) = (query.clone(), networks.clone());
            let route = Route {
                hosts,
                path,
                methods,
                headers,
                query,
                networks,
                rank: rank.to_vec(),
                section,
                ..Route::default()
            };
            self.gateway.add_route(route, &router.node.position);
        }
    }

    fn apply(&mut self, names: &[&'d str], router: &'d Entry, section: &mut Section, applied: &mut Applied) {
        for name in names {
            let found = self.middlewares.iter().find(|middleware| Some(&*middleware.key) == in_files(name)).copied();
            let Some(middleware) = found.filter(|_| applied.depth < CHAINS_MAX) else {
                let text = format!("the middleware `{name}` is not in the files: the route is closed");
                section.comment(self.gateway.placed_note(Effect::Stricter, &router.node.position, text));
                section.close(403);
                continue;
            };
            for kind in middleware.node.settings() {
                self.apply_one(middleware, kind, router, section, applied);
            }
        }
    }

    fn apply_one(
        &mut self,
        middleware: &'d Entry,
        kind: &'d Entry,
        router: &'d Entry,
        section: &mut Section,
        applied: &mut Applied,
    ) {
        let node = &kind.node;
        match kind.key.as_str() {
            "chain" => {
                applied.depth += 1;
                self.apply(&node.texts_of("middlewares"), router, section, applied);
                applied.depth -= 1;
            }
            "rateLimit" | "inFlightReq" => applied.rules.extend(self.limit(middleware, kind)),
            "ipAllowList" | "ipWhiteList" => {
                let ranges: Vec<String> =
                    node.texts_of("sourceRange").iter().map(|range| (*range).to_owned()).collect();
                let strategy = node.get("ipStrategy");
                let fits = strategy.is_none_or(|strategy| self.fits(strategy));
                node.mark_read();
                if !fits {
                    let why = "the gateway finds the client in another way than `ipStrategy`: the route is closed";
                    kind.note_at(&mut self.gateway, section, Effect::Stricter, why);
                } else if self.gateway.listen.get("trusted_proxies").is_some() {
                    let why = match strategy {
                        None => {
                            "Traefik compares the address of the peer, the gateway that of the client behind trusted proxies"
                        }
                        Some(_) => "if `X-Forwarded-For` is shorter, the gateway compares the address of the peer",
                    };
                    kind.note_at(&mut self.gateway, section, Effect::Differs, why);
                }
                match ranges.is_empty() || !fits {
                    true => section.close(403),
                    false if section.get("allow").is_some() => {
                        let why = "two lists of addresses cannot be combined: the route is closed";
                        kind.note_at(&mut self.gateway, section, Effect::Stricter, why);
                        section.close(403);
                    }
                    false => section.set("allow", one_or_list(ranges)),
                }
            }
            "stripPrefix" => {
                applied.strip.extend(node.texts_of("prefixes").iter().map(|prefix| (*prefix).to_owned()));
                node.setting("forceSlash");
            }
            "addPrefix" => applied.add = node.text_of("prefix").map(str::to_owned),
            "replacePath" => applied.replace = node.text_of("path").map(str::to_owned),
            "redirectScheme" => {
                let scheme = node.text_of("scheme").unwrap_or("https");
                let port = node.text_of("port").map_or_else(String::new, |port| format!(":{port}"));
                if scheme != "https" || !port.is_empty() && port != ":443" {
                    kind.note_at(&mut self.gateway, section, Effect::LeftOut, "only redirects to https are translated");
                    return;
                }
                node.mark_read();
                kind.note_at(&mut self.gateway, section, Effect::LeftOut, NO_REDIRECT);
            }
            "headers" => self.set_fields(node, section),
            "buffering" => {
                if let Some(bytes) = node.number_of("maxRequestBodyBytes").filter(|bytes| *bytes > 0) {
                    section.set("max_body", bytes);
                }
            }
            name => {
                let known = MIDDLEWARES.iter().find(|(.., names)| names.contains(&name));
                let (effect, why) = known.map_or((Effect::Stricter, UNKNOWN), |(effect, why, _)| (*effect, why));
                kind.note_at(&mut self.gateway, section, effect, why);
                kind.leave_out();
                if effect == Effect::Stricter {
                    section.close(403);
                }
            }
        }
    }

    /// The rule of a middleware that limits.
    fn limit(&mut self, middleware: &'d Entry, kind: &'d Entry) -> Option<String> {
        if let Some((_, rule, uses)) = self.rules.iter_mut().find(|(known, ..)| *known == middleware.key) {
            *uses += 1;
            let (rule, is_second) = (rule.clone(), *uses == 2);
            let section = self.gateway.rules.iter().position(|named| named.name == rule);
            if let Some(index) = section.filter(|_| is_second) {
                let mut section = std::mem::take(&mut self.gateway.rules[index].section);
                let why = "its routes share the counters; in Traefik, each router has its own";
                kind.note_at(&mut self.gateway, &mut section, Effect::Stricter, why);
                self.gateway.rules[index].section = section;
            }
            return Some(rule);
        }
        let node = &kind.node;
        let mut section = Section::default();
        section.comment(format!("Middleware {} ({})", middleware.key, middleware.node.position));
        self.set_key(kind, &mut section);
        if kind.key == "inFlightReq" {
            let Some(amount) = node.number_of("amount").filter(|amount| *amount > 0) else {
                kind.note(&mut self.gateway, Effect::NotEnforced, "it has no `amount` above 0");
                return None;
            };
            section.set("concurrent", amount);
        } else {
            // 0: not limited.
            let average = node.number_of("average").filter(|average| *average > 0)?;
            let period_ms = node.text_of("period").map_or(Some(1000), go_duration).filter(|ms| *ms > 0);
            let Some(period_ms) = period_ms else {
                kind.note(&mut self.gateway, Effect::NotEnforced, "its period cannot be read");
                return None;
            };
            let burst = node.number_of("burst").unwrap_or(1).max(1);
            let rate = Rate { requests: average, period_ms, burst: burst - 1 };
            let window: Window = rate.window();
            if let Some(why) = rate.slower(&window) {
                kind.note_at(&mut self.gateway, &mut section, Effect::Stricter, &why);
            }
            section.comment(format!(
                "Traefik admits {burst} requests at once, and {average} each {}. In any interval, this window admits at most as many.",
                crate::rate::duration_text(period_ms)
            ));
            section.set("windows", windows(window));
        }
        if let Some(redis) = node.setting("redis") {
            let why = "counters are local: for gateways that count together, see [counters.shared]";
            redis.note_at(&mut self.gateway, &mut section, Effect::NotEnforced, why);
        }
        let name = unused_name(&table_name(&middleware.key), &self.gateway.rules);
        self.rules.push((middleware.key.clone(), name.clone(), 1));
        self.gateway.rules.push(Named { name: name.clone(), section, ..Named::default() });
        Some(name)
    }

    /// Requests in flight are counted by host unless the middleware says otherwise.
    fn set_key(&mut self, kind: &Entry, section: &mut Section) {
        let criterion = kind.node.get("sourceCriterion");
        let strategy = criterion.and_then(|criterion| criterion.setting("ipStrategy"));
        let header = criterion.and_then(|criterion| criterion.text_of("requestHeaderName"));
        let by_host = criterion.and_then(|criterion| criterion.bool_of("requestHost"));
        if let Some(header) = header {
            section.set("key", format!("header:{}", header.to_lowercase()));
            // As one client, whose name is empty.
            section.set("on_missing_key", "global");
        } else if by_host == Some(true) || criterion.is_none() && kind.key == "inFlightReq" {
            section.set("key", "host");
        } else {
            section.set("key", "ip");
        }
        let Some(strategy) = strategy else { return };
        if let Some(bits) = strategy.node.number_of("ipv6Subnet").filter(|bits| *bits != 64 && (1..=128).contains(bits))
        {
            section.set("ipv6_prefix", bits);
        }
        if !self.fits(&strategy.node) {
            let (effect, why) = match self.gateway.listen.get("trusted_proxies") {
                None => (
                    Effect::Stricter,
                    "until `trusted_proxies` of [listen] names the proxies in front, with `trusted_hops` for `depth`, all clients behind them count as one",
                ),
                Some(_) => (Effect::NotEnforced, "clients count by the address that the gateway finds in another way"),
            };
            strategy.note_at(&mut self.gateway, section, effect, why);
        }
    }

    fn upstream(&mut self, name: &str) -> Option<String> {
        let name = in_files(name)?;
        if let Some(known) = self.upstream_names.get(name) {
            return Some(known.clone());
        }
        let service = self.services.iter().find(|service| service.key == name).copied()?;
        let mut section = Section::default();
        section.comment(format!("Service {name} ({})", service.node.position));
        let balancer = service.node.get("loadBalancer");
        let servers = match (balancer, service.node.get("weighted")) {
            (Some(balancer), _) => weighted_servers(&[(1, balancer)]),
            (None, Some(weighted)) => {
                let mut parts = Vec::new();
                for part in weighted.list_of("services") {
                    let weight = part.number_of("weight").unwrap_or(1);
                    let named = part.text_of("name").and_then(in_files)?;
                    let service = self.services.iter().find(|service| service.key == named)?;
                    parts.push((weight, service.node.get("loadBalancer")?));
                }
                weighted_servers(&parts)
            }
            (None, None) => {
                service.note(&mut self.gateway, Effect::LeftOut, "only `loadBalancer` and `weighted` are translated");
                service.node.leave_out();
                return None;
            }
        };
        if servers.is_empty() {
            return None;
        }
        let is_several = servers.len() > 1;
        section.set("servers", Value::List(servers));
        if is_several {
            section.set("balance", "round-robin");
        }
        if let Some(balancer) = balancer {
            if balancer.bool_of("passHostHeader") == Some(false) {
                section.set("host", "server");
            }
            if let Some(check) = balancer.get("healthCheck") {
                let mut health = vec![("path".to_owned(), Value::from(check.text_of("path")?))];
                for name in ["interval", "timeout"] {
                    if let Some(ms) = check.text_of(name).and_then(go_duration).filter(|ms| *ms >= 10) {
                        health.push((name.to_owned(), crate::rate::duration_text(ms).into()));
                    }
                }
                section.set("health", Value::Table(health));
            }
            if let Some(sticky) = balancer.setting("sticky") {
                let why =
                    "the gateway sets no cookies; `balance = { hash = \"cookie:NAME\" }` uses one of the application";
                sticky.note_at(&mut self.gateway, &mut section, Effect::LeftOut, why);
            }
        }
        let table = unused_name(&table_name(name), &self.gateway.upstreams);
        self.upstream_names.insert(name.to_owned(), table.clone());
        self.gateway.upstreams.push(Named { name: table.clone(), section, ..Named::default() });
        Some(table)
    }

    fn set_fields(&mut self, node: &'d Node, section: &mut Section) {
        for (name, setting) in
            [("customRequestHeaders", "request_headers"), ("customResponseHeaders", "response_headers")]
        {
            let (mut set, mut remove) = (Vec::new(), Vec::<Value>::new());
            for field in node.get(name).map_or(&[][..], Node::settings) {
                let value = field.node.text().unwrap_or_default();
                match value.is_empty() {
                    true => remove.push(field.key.to_lowercase().into()),
                    false => {
                        set.push((field.key.to_lowercase(), Value::from(value.replace('{', "{{").replace('}', "}}"))))
                    }
                }
            }
            section.change_fields(setting, remove, set);
        }
    }
}

/// An alternative of a rule that routes cannot express.
fn drop_alternative(
    gateway: &mut Gateway,
    position: &Position,
    why: String,
    alternative: Alternative,
    section: &Section,
) {
    let Alternative { hosts, paths, methods, headers, query, networks, .. } = alternative;
    let paths = if paths.is_empty() { vec!["/{*rest}".to_owned()] } else { paths };
    let section = section.clone();
    let route = Route { hosts, methods, headers, query, networks, section, ..Route::default() };
    let routes = paths.into_iter().map(|path| Route { path, ..route.clone() }).collect();
    gateway.drop_route(routes, position, why);
}

/// What middlewares do with the path, and the rules of a router.
#[derive(Default)]
struct Applied {
    /// Chains in which the middleware being applied is, one in another.
    depth: usize,
    rules: Vec<String>,
    strip: Vec<String>,
    add: Option<String>,
    replace: Option<String>,
}

impl Applied {
    fn set_path(&self, section: &mut Section, pattern: &mut String) {
        let matches = |prefix: &&String| {
            let prefix = prefix.trim_end_matches('/');
            let text = literal(prefix);
            *pattern == text
                || covers(&format!("{text}/{{*rest}}"), pattern)
                || within_segment(pattern, prefix, "").is_some()
        };
        let strip = self
            .strip
            .iter()
            .find(matches)
            .map(|prefix| prefix.trim_end_matches('/'))
            .filter(|prefix| !prefix.is_empty());
        let add = self.add.as_deref().map(|prefix| prefix.trim_end_matches('/')).filter(|prefix| !prefix.is_empty());
        let within = strip.and_then(|from| within_segment(pattern, from, &format!("{}/", add.unwrap_or(""))));
        match (&self.replace, strip, add) {
            (None, ..) if let Some((named, to)) = within => {
                *pattern = named;
                section.set("rewrite", to);
            }
            (Some(path), ..) => section.set("rewrite", literal(path)),
            (None, Some(from), Some(to)) => {
                section.set("replace_prefix", table([("from", literal(from).into()), ("to", literal(to).into())]));
            }
            (None, Some(from), None) => section.set("strip_prefix", literal(from)),
            (None, None, Some(to)) => {
                section
                    .set("replace_prefix", table([("from", "/".into()), ("to", format!("{}/", literal(to)).into())]));
            }
            (None, None, None) => {}
        }
    }
}

/// The servers of several services, whose weights are those of all of their servers together.
fn weighted_servers(parts: &[(u64, &Node)]) -> Vec<Value> {
    let mut servers = Vec::new();
    for (weight, balancer) in parts {
        let of_server = |server: &Node| server.number_of("weight").unwrap_or(1).min(1000);
        let all: u64 = balancer.list_of("servers").iter().map(of_server).sum();
        for server in balancer.list_of("servers") {
            let Some(url) = server.text_of("url") else { continue };
            let scheme_end = url.find("://").map_or(0, |at| at + 3);
            let end = url[scheme_end..].find('/').map_or(url.len(), |at| scheme_end + at);
            servers.push((url[..end].replace("h2c://", "http://"), (*weight).min(1000) * of_server(server), all));
        }
    }
    servers.retain(|(_, weight, _)| *weight > 0);
    let shares = |factor: u64| servers.iter().map(move |(_, weight, all)| (weight * factor, *all));
    // The smallest factor with which all weights are whole numbers.
    let is_whole =
        |factor: &u64| shares(*factor).all(|(weight, all)| weight.is_multiple_of(all) && weight / all <= 1000);
    let factor = (1..=1000).find(is_whole);
    let weights: Vec<u64> = match factor {
        Some(factor) => shares(factor).map(|(weight, all)| weight / all).collect(),
        None => {
            let largest = shares(1000).map(|(weight, all)| weight / all).max().unwrap_or(1).max(1);
            shares(1000).map(|(weight, all)| (weight / all * 1000 / largest).max(1)).collect()
        }
    };
    let value = |((url, ..), weight): (&(String, u64, u64), u64)| match weight {
        1 => url.as_str().into(),
        weight => table([("url", url.as_str().into()), ("weight", weight.into())]),
    };
    servers.iter().zip(weights).map(value).collect()
}

/// A duration of Go, such as `1m30s`, or a number of seconds, in milliseconds.
fn go_duration(text: &str) -> Option<u64> {
    if let Ok(seconds) = text.parse::<u64>() {
        return seconds.checked_mul(1000);
    }
    let mut ms = 0_u64;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let number: u64 = rest[..digits].parse().ok()?;
        let unit = rest[digits..].find(|c: char| c.is_ascii_digit()).map_or(rest.len(), |end| digits + end);
        let factor = match &rest[digits..unit] {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return None,
        };
        ms = ms.checked_add(number.checked_mul(factor)?)?;
        rest = &rest[unit..];
    }
    Some(ms)
}
