//! Imports Ingress objects of Kubernetes, with the annotations of ingress-nginx for limits, addresses, paths and bodies.

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::gateway::{Gateway, Named, Route, Section, Value, one_or_list, table, table_name, unused_name};
use crate::network::{Network, difference};
use crate::nginx::keys::hash_key;
use crate::path::{literal, of_regex, prefix, segments, widened};
use crate::rate::{Rate, duration_text, windows};
use crate::route_order::{keep_order, note_dropped};
use crate::source::{Effect, ImportError};
use crate::tree::{Entry, Node, nothing_in, read_all, translated};
use crate::{Files, Translated};

const PREFIX: &str = "nginx.ingress.kubernetes.io/";
/// How much larger a burst is than the rate, unless an annotation says otherwise.
const BURST_MULTIPLIER: u64 = 5;
/// Annotations that require credentials which the gateway does not check.
const AUTHENTICATION: [&str; 5] = ["auth-url", "auth-type", "auth-tls-secret", "auth-secret", "auth-tls-verify-client"];
/// Annotations by which ingress-nginx may refuse requests.
const RESTRICTIONS: [&str; 7] = [
    "global-rate-limit",
    "server-snippet",
    "configuration-snippet",
    "enable-modsecurity",
    "modsecurity-snippet",
    "enable-owasp-core-rules",
    "limit-rate",
];

/// The beginnings of annotations by which other controllers may limit requests.
const OTHER_CONTROLLERS: [&str; 11] = [
    "alb.ingress.kubernetes.io/",
    "appgw.ingress.kubernetes.io/",
    "haproxy-ingress.github.io/",
    "haproxy.org/",
    "ingress.cilium.io/",
    "ingress.kubernetes.io/",
    "konghq.com/",
    "nginx.com/",
    "nginx.org/",
    "projectcontour.io/",
    "traefik.ingress.kubernetes.io/",
];

pub fn import(files: &Files, paths: &[PathBuf]) -> Result<Translated, ImportError> {
    let documents = read_all(files, paths)?;
    let mut objects = Vec::new();
    for document in &documents {
        match document.text_of("kind") {
            Some(kind) if kind.ends_with("List") => objects.extend(document.list_of("items")),
            _ => objects.push(document),
        }
    }
    let (ingresses, others): (Vec<&Node>, Vec<&Node>) =
        objects.iter().copied().partition(|object| object.text_of("kind") == Some("Ingress"));
    if ingresses.is_empty() {
        return Err(nothing_in(&documents, "there is no Ingress", "name files with objects of `kind: Ingress`"));
    }
    let mut importer = Importer {
        gateway: Gateway::default(),
        others,
        regex_hosts: BTreeSet::new(),
        exact_paths: BTreeSet::new(),
        class: None,
    };
    importer.gateway.listen.set("http", "0.0.0.0:80");
    importer.gateway.limits.comment("The default of `proxy-body-size`.");
    importer.gateway.limits.set("max_body", "1MiB");
    let refusals = "refusals have status 429; `status = 503` is the default of ingress-nginx";
    importer.gateway.note(Effect::Differs, &ingresses[0].position, refusals);
    ingresses.iter().for_each(|ingress| importer.note_regex_hosts(ingress));
    for ingress in &ingresses {
        importer.ingress(ingress);
    }
    note_dropped(&mut importer.gateway);
    importer.gateway.write_refusals();
    keep_order(&mut importer.gateway, "ingress-nginx");
    Ok(translated(ingresses, importer.gateway))
}

struct Importer<'d> {
    gateway: Gateway,
    /// Other objects, such as Services, which name their ports.
    others: Vec<&'d Node>,
    /// All paths of these hosts are regular expressions, because one of them has such an annotation. Empty: any host.
    regex_hosts: BTreeSet<String>,
    /// Hosts with paths of the type `Exact`.
    exact_paths: BTreeSet<(String, String)>,
    /// The class of the first Ingress.
    class: Option<&'d str>,
}

/// The annotations of ingress-nginx on one object.
struct Annotations<'d>(Option<&'d Node>);

/// A path of an Ingress.
#[derive(Clone, Copy)]
struct IngressPath<'a> {
    text: &'a str,
    /// Its `pathType`.
    kind: Option<&'a str>,
    annotations: &'a Annotations<'a>,
    node: &'a Node,
}

impl<'d> Annotations<'d> {
    fn entry(&self, name: &str) -> Option<&'d Entry> {
        self.0?.setting(&format!("{PREFIX}{name}"))
    }

    fn text(&self, name: &str) -> Option<&'d str> {
        self.entry(name)?.node.text()
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.trim().parse().ok().filter(|number| *number > 0)
    }

    fn is_on(&self, name: &str) -> bool {
        self.text(name) == Some("true")
    }

    /// Whether a path is a regular expression by itself.
    fn make_regex(&self, path: &str) -> bool {
        self.is_on("use-regex") || self.text("rewrite-target").is_some_and(|to| !to.is_empty() && to != path)
    }

    /// The networks of a list; `None` for entries that are none.
    fn networks(&self, names: [&str; 2]) -> Option<(&'d Entry, Vec<Option<Network>>)> {
        let entry = names.iter().find_map(|name| self.entry(name))?;
        Some((entry, entry.node.text()?.split(',').map(|network| Network::parse(network.trim())).collect()))
    }
}

/// The host of a rule; empty if it has none.
fn host_of(rule: &Node) -> String {
    rule.text_of("host").unwrap_or_default().to_lowercase()
}

impl<'d> Importer<'d> {
    fn note_regex_hosts(&mut self, ingress: &'d Node) {
        let annotations = Annotations(ingress.get("metadata").and_then(|metadata| metadata.get("annotations")));
        let rules = ingress.get("spec").map_or(&[][..], |spec| spec.list_of("rules"));
        for rule in rules.iter().filter(|_| !annotations.is_on("canary")) {
            for path in rule.get("http").map_or(&[][..], |http| http.list_of("paths")) {
                let text = path.text_of("path").unwrap_or("/");
                if annotations.make_regex(text) {
                    self.regex_hosts.insert(host_of(rule));
                }
                if path.text_of("pathType") == Some("Exact") {
                    self.exact_paths.insert((host_of(rule), text.to_owned()));
                }
            }
        }
    }

    fn ingress(&mut self, ingress: &'d Node) {
        ingress.ignore(&["apiVersion", "kind", "status"]);
        let metadata = ingress.get("metadata");
        let text = |key: &str| metadata.and_then(|metadata| metadata.text_of(key));
        let (name, namespace) = (text("name").unwrap_or("ingress"), text("namespace").unwrap_or("default"));
        if let Some(metadata) = metadata {
            metadata.ignore(&["labels", "creationTimestamp", "generation", "resourceVersion", "uid", "finalizers"]);
        }
        let annotations = Annotations(metadata.and_then(|metadata| metadata.get("annotations")));
        let spec = ingress.get("spec");
        if let Some(canary) = annotations.entry("canary").filter(|_| annotations.is_on("canary")) {
            spec.into_iter().for_each(Node::mark_read);
            canary.note(
                &mut self.gateway,
                Effect::LeftOut,
                "the gateway has no canaries: the other Ingress gets all requests",
            );
            return;
        }
        if let Some(node) = annotations.0 {
            node.ignore(&["kubernetes.io/ingress.class", "kubernetes.io/tls-acme", "cert-manager.io/cluster-issuer"]);
        }
        let mut section = Section::default();
        section.comment(format!("Ingress {namespace}/{name} ({})", ingress.position));
        let Some(spec) = spec else { return };
        let class = spec.setting("ingressClassName").or_else(|| annotations.0?.setting("kubernetes.io/ingress.class"));
        self.note_class(class, &annotations, &mut section);
        if let Some(tls) = spec.setting("tls") {
            let why = "certificates are in Secrets: mount them, and write [listen.https]; requests without TLS are not redirected";
            tls.note_at(&mut self.gateway, &mut section, Effect::LeftOut, why);
        }
        let redirect = annotations.entry("force-ssl-redirect").filter(|_| annotations.is_on("force-ssl-redirect"));
        if let (Some(redirect), None) = (redirect, spec.get("tls")) {
            let why = "requests without TLS are not redirected: name the proxy that ends TLS in `trusted_proxies`, and write a \
                       route with `scheme = \"http\"` and `redirect`";
            redirect.note_at(&mut self.gateway, &mut section, Effect::LeftOut, why);
        }
        let rules = self.limits(&annotations, name);
        let mut routes = Vec::new();
        for rule in spec.list_of("rules") {
            let aliases = annotations.text("server-alias").unwrap_or_default().split(',').map(str::trim);
            let mut hosts: Vec<String> =
                rule.text_of("host").into_iter().chain(aliases).map(str::to_lowercase).collect();
            hosts.retain(|host| !host.is_empty());
            if rule.text_of("host").is_none() {
                hosts.clear();
            }
            for path in rule.get("http").map_or(&[][..], |http| http.list_of("paths")) {
                routes.push((hosts.clone(), path.get("path"), path.text_of("pathType"), path.get("backend"), path));
            }
        }
        if let Some(backend) = spec.get("defaultBackend").or_else(|| spec.get("backend")) {
            routes.push((Vec::new(), None, Some("Prefix"), Some(backend), backend));
        }
        for (hosts, path, kind, backend, node) in routes {
            let mut section = std::mem::take(&mut section);
            let Some(upstream) =
                backend.and_then(|backend| self.upstream(backend, namespace, &annotations, &mut section))
            else {
                let text = "a backend that is no Service cannot be translated".to_owned();
                self.gateway.note(Effect::LeftOut, &node.position, text);
                continue;
            };
            section.set("upstream", upstream);
            if !rules.is_empty() {
                section.set("rules", rules.clone());
            }
            self.set_actions(&annotations, &mut section);
            let text = path.and_then(Node::text).unwrap_or("/");
            self.add_routes(&IngressPath { text, kind, annotations: &annotations, node }, hosts, section);
        }
    }

    /// An Ingress of another controller, or of one with other addresses.
    fn note_class(&mut self, class: Option<&'d Entry>, annotations: &Annotations<'d>, section: &mut Section) {
        if let Some(class) = class {
            let name = class.node.text().unwrap_or_default();
            let first = *self.class.get_or_insert(name);
            if !name.contains("nginx") {
                let why = "it is for another controller; its paths are read as those of ingress-nginx";
                class.note_at(&mut self.gateway, section, Effect::Differs, why);
            }
            if first != name {
                let why = format!(
                    "the class of the first Ingress is `{first}`, and routes apply to all addresses: import those of other \
                     addresses alone, for another gateway"
                );
                class.note_at(&mut self.gateway, section, Effect::Differs, &why);
            }
        }
        for entry in annotations.0.map_or(&[][..], Node::entries) {
            if OTHER_CONTROLLERS.iter().any(|prefix| entry.key.starts_with(prefix)) {
                // The controllers of F5 and of the community may have the same class.
                let is_ignored = !entry.key.starts_with("nginx.")
                    && class.and_then(|class| class.node.text()).is_some_and(|class| class.contains("nginx"));
                let (effect, why) = match is_ignored {
                    true => (Effect::LeftOut, "an annotation of another controller, which ingress-nginx ignores"),
                    false => (Effect::NotEnforced, "an annotation of another controller, which may limit requests"),
                };
                entry.note_at(&mut self.gateway, section, effect, why);
            }
        }
    }

    fn add_routes(&mut self, ingress_path: &IngressPath<'_>, hosts: Vec<String>, mut section: Section) {
        let IngressPath { text: path, kind, annotations, node } = *ingress_path;
        let host = hosts.first().cloned().unwrap_or_default();
        let is_regex_host = self.regex_hosts.contains(&host);
        let is_regex = is_regex_host
            || annotations.make_regex(path)
            || kind == Some("ImplementationSpecific") && path.contains(['(', '[', '^', '$', '\\']);
        // The server of the host decides, then the length of the regular expression, then the end of the alphabet.
        let is_wildcard = host.starts_with('*');
        let mut rank = vec![if host.is_empty() { 0 } else { 2 - i64::from(is_wildcard) }, host.len() as i64];
        if is_regex_host {
            rank.extend([path.len() as i64].into_iter().chain(path.bytes().map(i64::from)));
        }
        let patterns = match kind {
            Some("Exact") if !is_regex => vec![literal(path)],
            _ if is_regex => match self.regex_patterns(ingress_path, &host, &mut section) {
                Some(patterns) => patterns,
                None => {
                    node.setting("path").into_iter().for_each(Entry::leave_out);
                    let text = format!("`path: {path}`: routes cannot express this regular expression");
                    let path = widened(&format!("^{}", path.trim_start_matches('^')));
                    let dropped = Route { hosts, path, section, ignores_case: true, ..Route::default() };
                    return self.gateway.drop_route(vec![dropped], &node.position, text);
                }
            },
            Some("Prefix") => segments(if path == "/" { path } else { path.trim_end_matches('/') }),
            // As a location of nginx.
            _ => prefix(path),
        };
        if section.get("upstream").is_some() {
            self.set_rewrite(annotations, path, &mut section);
        }
        for (index, path) in patterns.into_iter().enumerate() {
            let mut section = section.clone();
            if index > 0 {
                section.comments.clear();
            }
            let hosts = hosts.clone();
            let route = Route { hosts, path, section, rank: rank.clone(), ..Route::default() };
            self.gateway.add_route(route, &node.position);
        }
    }

    /// The patterns of a path that is a regular expression for ingress-nginx, also without being meant as one.
    fn regex_patterns(
        &mut self,
        ingress_path: &IngressPath<'_>,
        host: &str,
        section: &mut Section,
    ) -> Option<Vec<String>> {
        let IngressPath { text: path, kind, annotations, node } = *ingress_path;
        let effect = if section.restricts() { Effect::NotEnforced } else { Effect::Differs };
        let mut note = |text: String| section.comment(self.gateway.placed_note(effect, &node.position, text));
        // The paths below an exact one have a location of their own, and otherwise one more.
        let is_below = kind == Some("Prefix")
            && !annotations.make_regex(path)
            && self.exact_paths.contains(&(host.to_owned(), path.to_owned()));
        let slash = if is_below && !path.ends_with('/') { "/" } else { "" };
        let anchored = format!("^{}{slash}", path.trim_start_matches('^'));
        let (mut patterns, further) = of_regex(&anchored).or_else(|| {
            let found = of_regex(&anchored.replace('.', "\\."))?;
            note(format!("`{path}`: for ingress-nginx, `.` is any character; the route matches the dot alone"));
            Some(found)
        })?;
        if path.bytes().any(|byte| byte.is_ascii_alphabetic()) {
            note(format!("`{path}`: ingress-nginx ignores the case of paths; the route does not"));
        }
        match effect == Effect::NotEnforced {
            true => patterns.extend(further),
            false if further.is_empty() => {}
            false => note(format!("`{path}`: ingress-nginx also matches `{path}x`; the route does not")),
        }
        Some(patterns)
    }

    fn set_rewrite(&mut self, annotations: &Annotations, path: &str, section: &mut Section) {
        let Some(entry) = annotations.entry("rewrite-target") else { return };
        let target = entry.node.text().unwrap_or("/");
        // ingress-nginx does not replace a path by itself, also where it is a prefix.
        if target == path {
            return;
        }
        // `/api(/|$)(.*)` and `/$2`, or `/api/(.*)` and `/$1`.
        let replaced =
            [("(/|$)(.*)", "$2"), ("/(.*)", "$1"), ("(/|$)(.+)", "$2")].iter().find_map(|(end, variable)| {
                let from = path.strip_suffix(end).filter(|from| !from.contains(['(', '[']))?;
                Some((from, target.strip_suffix(variable)?.trim_end_matches('/')))
            });
        match replaced {
            Some(("", "")) => {}
            Some((from, "")) => section.set("strip_prefix", literal(from)),
            Some((from, to)) if !from.is_empty() => {
                section.set("replace_prefix", table([("from", literal(from).into()), ("to", literal(to).into())]));
            }
            _ if !target.contains('$') => section.set("rewrite", literal(target)),
            _ => {
                let why = "only prefixes are replaced: requests are not forwarded";
                entry.note_at(&mut self.gateway, section, Effect::Stricter, why);
                section.close(503);
            }
        }
    }

    /// A rule for each annotation that limits, as ingress-nginx has a zone for each.
    fn limits(&mut self, annotations: &Annotations, name: &str) -> Vec<String> {
        let multiplier = annotations.number("limit-burst-multiplier").unwrap_or(BURST_MULTIPLIER);
        let exempt =
            annotations.networks(["limit-allowlist", "limit-whitelist"]).map_or(Vec::new(), |(_, networks)| networks);
        let exempt: Vec<Network> = exempt.into_iter().flatten().collect();
        let mut rules = Vec::new();
        for (annotation, period_ms, suffix) in [
            ("limit-rps", 1000, "per-second"),
            ("limit-rpm", 60_000, "per-minute"),
            ("limit-connections", 0, "concurrent"),
        ] {
            let Some(entry) = annotations.entry(annotation) else { continue };
            let Some(limit) = annotations.number(annotation) else {
                entry.note(&mut self.gateway, Effect::NotEnforced, "it is no number above 0");
                continue;
            };
            let mut section = Section::default();
            section.comment(format!("{annotation} ({})", entry.node.position));
            section.set("key", "ip");
            // nginx counts in thousandths of a request each second, rounded down.
            match limit.saturating_mul(1_000_000).checked_div(period_ms) {
                None => section.set("concurrent", limit),
                Some(requests) => {
                    let (requests, burst) = (requests.max(1), limit.saturating_mul(multiplier).min(1_000_000));
                    let rate = Rate { requests, period_ms: 1_000_000, burst };
                    section.comment(format!(
                        "ingress-nginx admits {} requests at once, and one each {}. In any interval, this window admits at most \
                         as many.",
                        burst + 1,
                        duration_text(1_000_000_u64.div_ceil(requests))
                    ));
                    let window = rate.window();
                    if let Some(why) = rate.slower(&window) {
                        entry.note_at(&mut self.gateway, &mut section, Effect::Stricter, &why);
                    }
                    section.set("windows", windows(window));
                }
            }
            if !exempt.is_empty() {
                section.set("exemptions", exempt.iter().map(ToString::to_string).collect::<Vec<_>>());
            }
            let rule = unused_name(&table_name(&format!("{name}-{suffix}")), &self.gateway.rules);
            self.gateway.rules.push(Named { name: rule.clone(), section, ..Named::default() });
            rules.push(rule);
        }
        rules
    }

    /// Annotations about addresses, credentials, sizes and times.
    fn set_actions(&mut self, annotations: &Annotations, section: &mut Section) {
        let allowed = annotations.networks(["whitelist-source-range", "allowlist-source-range"]);
        let denied = annotations.networks(["denylist-source-range", "blacklist-source-range"]);
        if let Some((entry, _)) = denied.as_ref().filter(|(_, networks)| networks.contains(&None)) {
            entry.note_at(&mut self.gateway, section, Effect::Stricter, "an entry is no network: the route is closed");
            section.close(403);
        } else if let Some((entry, networks)) = allowed {
            if networks.contains(&None) {
                let why = "an entry is no network, and is not admitted";
                entry.note_at(&mut self.gateway, section, Effect::Stricter, why);
            }
            let mut left: Vec<Network> = networks.into_iter().flatten().collect();
            let denied = denied.iter().flat_map(|(_, networks)| networks).flatten();
            denied.for_each(|network| left = difference(&left, network));
            left.sort();
            match left.is_empty() {
                true => section.close(403),
                false => section.set("allow", one_or_list(left.iter().map(ToString::to_string).collect())),
            }
        } else if let Some((_, networks)) = denied {
            section.denied = networks.iter().flatten().map(ToString::to_string).collect();
        }
        if let Some(size) = annotations.text("proxy-body-size").and_then(size) {
            match size.as_str() {
                "0" => section.set("max_body", "unlimited"),
                "1MiB" => {}
                size => section.set("max_body", size),
            }
        }
        let mut timeouts = Vec::new();
        for (annotation, setting) in [
            ("proxy-connect-timeout", "connect"),
            ("proxy-read-timeout", "response_head"),
            ("proxy-send-timeout", "body"),
        ] {
            if let Some(seconds) = annotations.number(annotation) {
                timeouts.push((setting.to_owned(), Value::from(duration_text(seconds.min(86_400) * 1000))));
            }
        }
        if !timeouts.is_empty() && section.get("upstream").is_some() {
            section.set("timeouts", Value::Table(timeouts));
        }
        if let Some(to) = ["permanent-redirect", "temporal-redirect"].iter().find_map(|name| annotations.entry(name)) {
            let url = to.node.text().unwrap_or_default();
            if url.contains('$') {
                to.note_at(&mut self.gateway, section, Effect::LeftOut, "the gateway has no such variables");
            } else {
                let status: u64 = if to.key.ends_with("permanent-redirect") { 301 } else { 302 };
                section.settings.clear();
                section.denied.clear();
                let url = url.replace('{', "{{").replace('}', "}}");
                section.set("redirect", table([("to", url.into()), ("status", status.into())]));
            }
        }
        for name in AUTHENTICATION {
            if let Some(entry) = annotations.entry(name) {
                let why = "the gateway checks no such credentials: the route is closed";
                entry.note_at(&mut self.gateway, section, Effect::Stricter, why);
                section.close(403);
            }
        }
        for name in RESTRICTIONS {
            if let Some(entry) = annotations.entry(name) {
                entry.note_at(&mut self.gateway, section, Effect::NotEnforced, "it has no equivalent");
            }
        }
        for unneeded in [
            "ssl-redirect",
            "force-ssl-redirect",
            "proxy-buffering",
            "proxy-buffer-size",
            "proxy-request-buffering",
            "proxy-http-version",
            "use-regex",
            "backend-protocol",
            "upstream-vhost",
            "service-upstream",
            "websocket-services",
            "limit-burst-multiplier",
            "global-rate-limit-window",
            "global-rate-limit-key",
            "limit-whitelist",
            "limit-allowlist",
        ] {
            annotations.entry(unneeded);
        }
    }

    /// The upstream of a Service, by its name in the cluster.
    fn upstream(
        &mut self,
        backend: &Node,
        namespace: &str,
        annotations: &Annotations,
        section: &mut Section,
    ) -> Option<String> {
        let service = backend.get("service");
        let name = service.and_then(|service| service.text_of("name")).or_else(|| backend.text_of("serviceName"))?;
        let port = service.and_then(|service| service.get("port")).or_else(|| backend.get("servicePort"));
        let port_text =
            port.and_then(|port| port.text().or_else(|| port.text_of("number")).or_else(|| port.text_of("name")));
        let port = match port_text {
            Some(number) if number.parse::<u16>().is_ok() => number.to_owned(),
            Some(port_name) => self.port_of(name, port_name).unwrap_or_else(|| {
                let text = format!("the port `{port_name}` of the Service `{name}` is not in the files: 80 is assumed");
                section.comment(self.gateway.placed_note(Effect::Differs, &backend.position, text));
                "80".to_owned()
            }),
            None => "80".to_owned(),
        };
        let protocol = annotations.text("backend-protocol").unwrap_or("HTTP").to_uppercase();
        let scheme = if protocol.ends_with('S') { "https" } else { "http" };
        let url = format!("{scheme}://{name}.{namespace}.svc.cluster.local:{port}");
        let host = annotations.text("upstream-vhost").filter(|host| !host.contains('$'));
        let balance = annotations.entry("upstream-hash-by").and_then(|entry| {
            let key = entry.node.text().and_then(hash_key);
            if key.is_none() {
                entry.note_at(&mut self.gateway, section, Effect::Differs, "servers are chosen by their load");
            }
            Some(table([("hash", key?.into())]))
        });
        let (servers, host_value) = (Value::from(vec![url.as_str()]), host.map(Value::from));
        let known = |upstream: &&Named| {
            upstream.section.get("servers") == Some(&servers)
                && upstream.section.get("host") == host_value.as_ref()
                && upstream.section.get("balance") == balance.as_ref()
        };
        if let Some(known) = self.gateway.upstreams.iter().find(known) {
            return Some(known.name.clone());
        }
        let mut upstream = Section::default();
        upstream.set("servers", vec![url.as_str()]);
        if protocol.starts_with("GRPC") {
            upstream.set("protocol", "http2");
        }
        if let Some(host) = host {
            upstream.set("host", host);
        }
        if let Some(balance) = &balance {
            upstream.set("balance", balance.clone());
        }
        if scheme == "https" {
            let text = "the gateway verifies the certificates of these servers; `tls.ca` names their authority";
            upstream.comment(self.gateway.placed_note(Effect::Stricter, &backend.position, text));
        }
        let name = unused_name(&table_name(name), &self.gateway.upstreams);
        self.gateway.upstreams.push(Named { name: name.clone(), section: upstream, ..Named::default() });
        Some(name)
    }

    /// The number of a port that has a name.
    fn port_of(&self, service: &str, port: &str) -> Option<String> {
        let is_it = |object: &&&Node| {
            object.text_of("kind") == Some("Service")
                && object.at(&["metadata"]).and_then(|data| data.text_of("name")) == Some(service)
        };
        let ports = self.others.iter().find(is_it)?.get("spec")?.list_of("ports");
        ports.iter().find(|known| known.text_of("name") == Some(port))?.text_of("port").map(str::to_owned)
    }
}

/// A size of nginx, such as `8m`, as one of the gateway.
fn size(text: &str) -> Option<String> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    number.parse::<u64>().ok()?;
    match unit.to_lowercase().as_str() {
        "" => Some(number.to_owned()),
        "k" => Some(format!("{number}KiB")),
        "m" => Some(format!("{number}MiB")),
        "g" => Some(format!("{number}GiB")),
        _ => None,
    }
}
