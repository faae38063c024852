//! Imports the declarative configuration of Kong: services, routes, upstreams, consumers, and the plugins that limit, identify, allow,
//! and change fields.
//!
//! A plugin counts for what it is attached to, so each one is a rule of its own. Limits of a consumer are a plan.

use std::collections::BTreeMap;
use std::path::PathBuf;

use transom_limiter::secret_digest::Digest;

use crate::gateway::{Gateway, Named, NamedFile, Route, Section, Value, one_or_list, table, table_name, unused_name};
use crate::kong_plugins::{RESPONDING, treatment};
use crate::network::{Network, difference};
use crate::path::{literal, of_regex, prefix, segments, widened, within_segment};
use crate::rate::{Window, duration_text, period_text};
use crate::route_order::{keep_order, note_dropped};
use crate::source::{Effect, ImportError};
use crate::tree::{Entry, Node, nothing_in, read_all, translated};
use crate::{Files, Translated};

/// Where Kong listens unless kong.conf says otherwise.
const ADDRESS: &str = "0.0.0.0:8000";
const LIMITING: [&str; 2] = ["rate-limiting", "rate-limiting-advanced"];
const PERIODS: [(&str, u64); 6] = [
    ("second", 1000),
    ("minute", 60_000),
    ("hour", 3_600_000),
    ("day", 86_400_000),
    ("month", 0),
    ("year", 31_536_000_000),
];
/// Plugins by which Kong refuses requests of a consumer.
const REFUSING: [&str; 3] = ["request-termination", "ip-restriction", "acl"];
/// The plan of consumers without limits of their own.
const STANDARD: &str = "standard";

pub fn import(files: &Files, paths: &[PathBuf]) -> Result<Translated, ImportError> {
    let documents = read_all(files, paths)?;
    let lists = |name: &str| -> Vec<&Node> { documents.iter().flat_map(|document| document.list_of(name)).collect() };
    let (services, routes) = (lists("services"), lists("routes"));
    if services.is_empty() && routes.is_empty() {
        return Err(nothing_in(
            &documents,
            "there are no `services`",
            "name a declarative configuration, such as kong.yml",
        ));
    }
    for document in &documents {
        document.ignore(&["_format_version", "_transform", "_info"]);
    }
    let mut importer = Importer {
        gateway: Gateway::default(),
        plugins: lists("plugins"),
        upstreams: lists("upstreams"),
        consumers: lists("consumers"),
        groups: lists("consumer_groups"),
        acls: lists("acls"),
        credentials: lists("keyauth_credentials"),
        upstream_names: BTreeMap::new(),
        key_fields: Vec::new(),
        rules: BTreeMap::new(),
        plugin_of_rule: BTreeMap::new(),
        has_plain_regexes: documents
            .iter()
            .any(|document| document.text_of("_format_version").is_some_and(|version| version.starts_with(['1', '2']))),
    };
    importer.gateway.listen.comment("The default of Kong, whose own configuration is kong.conf.");
    importer.gateway.listen.set("http", ADDRESS);
    for service in &services {
        for route in service.list_of("routes") {
            importer.route(route, Some(service));
        }
    }
    for &route in &routes {
        let reference = route.get("service");
        let service = services.iter().find(|service| reference.is_some_and(|reference| refers(reference, service)));
        importer.route(route, service.copied());
    }
    let nested = services.iter().flat_map(|service| service.list_of("routes"));
    let owners: Vec<&Node> = nested.chain(routes).chain(services.iter().copied()).collect();
    importer.note_plugins_of_consumers(&owners);
    note_dropped(&mut importer.gateway);
    importer.gateway.write_refusals();
    keep_order(&mut importer.gateway, "Kong");
    importer.add_clients();
    for (kind, list, user) in [
        ("upstream", &importer.upstreams, "service"),
        ("plugin", &importer.plugins, "route"),
        ("consumer", &importer.consumers, "route"),
        ("consumer group", &importer.groups, "consumer"),
    ] {
        for node in list.iter().filter(|node| node.is_unread()) {
            node.leave_out();
            let name = node.text_of("name").or_else(|| node.text_of("username")).unwrap_or_default();
            let text = format!("{kind} `{name}`: no {user} that is translated uses it");
            importer.gateway.note(Effect::LeftOut, &node.position, text);
        }
    }
    Ok(translated(&documents, importer.gateway))
}

struct Importer<'d> {
    gateway: Gateway,
    /// Those of the top level.
    plugins: Vec<&'d Node>,
    upstreams: Vec<&'d Node>,
    consumers: Vec<&'d Node>,
    groups: Vec<&'d Node>,
    acls: Vec<&'d Node>,
    credentials: Vec<&'d Node>,
    /// By the address of the service, and whether the client's Host is sent.
    upstream_names: BTreeMap<(*const Node, bool), String>,
    /// Where clients send their keys.
    key_fields: Vec<String>,
    /// The rule of each plugin, by its address.
    rules: BTreeMap<*const Node, Option<String>>,
    plugin_of_rule: BTreeMap<String, &'d str>,
    /// Before Kong 3.0, regular expressions have no `~` in front.
    has_plain_regexes: bool,
}

/// A plugin that limits the requests of a route.
struct LimitingPlugin<'d, 'c> {
    name: &'d str,
    node: &'d Node,
    config: &'c Node,
    /// Whether the route lets only known clients pass.
    is_known: bool,
}

/// Who is admitted to a route.
#[derive(Default)]
struct Admission {
    networks: Option<Vec<String>>,
    /// Networks that are not admitted, where all others are.
    denied: Vec<String>,
    clients: Option<Vec<String>>,
}

/// Whether a reference, by name or by id, names an object.
fn refers(reference: &Node, object: &Node) -> bool {
    let keys = ["id", "name", "username", "custom_id"];
    let texts = reference.text().into_iter().chain(keys.iter().filter_map(|key| reference.text_of(key)));
    { texts }.any(|text| keys.iter().any(|key| object.text_of(key) == Some(text)))
}

/// Whether a plugin names an object; `None` if it names none of this kind.
fn plugin_refers(plugin: &Node, key: &str, object: Option<&Node>) -> Option<bool> {
    plugin.get(key).map(|reference| object.is_some_and(|object| refers(reference, object)))
}

fn is_enabled(node: &Node) -> bool {
    node.bool_of("enabled") != Some(false)
}

/// Whether a plugin applies to single consumers only.
fn is_of_consumer(plugin: &Node) -> bool {
    plugin.get("consumer").is_some() || plugin.get("consumer_group").is_some()
}

/// Whether a value is stored elsewhere.
fn is_stored_elsewhere(value: &str) -> bool {
    value.starts_with("{vault") || value.contains("${{")
}

impl<'d> Importer<'d> {
    fn route(&mut self, route: &'d Node, service: Option<&'d Node>) {
        if let Some(service) = service.filter(|service| !is_enabled(service)) {
            if let Some(entry) = service.setting("enabled") {
                entry.note(&mut self.gateway, Effect::LeftOut, "the service has no routes");
            }
            service.mark_read();
            return route.mark_read();
        }
        if let Some(expression) = route.setting("expression") {
            route.mark_read();
            let why = "routes have no expressions: other routes match these requests";
            return expression.note(&mut self.gateway, Effect::NotEnforced, why);
        }
        let protocols = route.texts_of("protocols");
        let is_http = |protocol: &&str| ["http", "https", "grpc", "grpcs", "ws", "wss"].contains(protocol);
        if let Some(entry) = route.setting("protocols").filter(|_| !protocols.iter().any(is_http)) {
            route.mark_read();
            return entry.note(&mut self.gateway, Effect::LeftOut, "the gateway forwards HTTP only");
        }
        let name = route.text_of("name").unwrap_or("");
        let mut section = Section::default();
        section.comment(format!("Route {name} ({})", route.position).replace("  ", " "));
        let plugins = self.plugins_of(route, service);
        match service {
            Some(service) => {
                let upstream = self.upstream(service, route.bool_of("preserve_host") == Some(true));
                section.set("upstream", upstream);
            }
            None => section.set("respond", table([("status", 503.into())])),
        }
        if !name.is_empty() {
            section.set("name", name);
        }
        self.apply_plugins(&plugins, route, service, &mut section);
        if let Some(service) = service.filter(|_| section.get("upstream").is_some()) {
            set_timeouts(&mut section, service);
        }
        self.add_routes(route, service, section);
    }

    /// The plugins of a route: of each name, the one that is attached most closely.
    fn plugins_of(&self, route: &'d Node, service: Option<&'d Node>) -> Vec<(&'d str, &'d Node)> {
        let own = route.list_of("plugins").iter();
        let of_service = service.map_or(&[][..], |service| service.list_of("plugins")).iter();
        let top = |rank: usize| {
            self.plugins.iter().copied().filter(move |plugin| {
                let refs = (plugin_refers(plugin, "route", Some(route)), plugin_refers(plugin, "service", service));
                let found = match refs {
                    (Some(true), None | Some(true)) => 0,
                    (None, Some(true)) => 1,
                    (None, None) => 2,
                    _ => usize::MAX,
                };
                found == rank
            })
        };
        let all = own.chain(top(0)).chain(of_service).chain(top(1)).chain(top(2));
        let mut plugins: Vec<(&str, &Node)> = Vec::new();
        for plugin in all.filter(|plugin| !is_of_consumer(plugin)) {
            if !is_enabled(plugin) {
                plugin.mark_read();
                continue;
            }
            let Some(name) = plugin.text_of("name") else { continue };
            if plugins.iter().all(|(known, _)| *known != name) {
                plugins.push((name, plugin));
            }
        }
        // What closes a route precedes other responses, and what is missing then is not needed.
        plugins.sort_by_key(|(name, _)| (treatment(name).0 != Effect::Stricter, !RESPONDING.contains(name)));
        plugins
    }

    fn apply_plugins(
        &mut self,
        plugins: &[(&'d str, &'d Node)],
        route: &'d Node,
        service: Option<&'d Node>,
        section: &mut Section,
    ) {
        let empty = Node { content: crate::tree::Content::Map(Vec::new()), position: route.position.clone() };
        let authentication = plugins.iter().find(|(name, _)| *name == "key-auth" || *name == "key-auth-enc");
        let is_known = authentication.is_some();
        if let Some(&(_, plugin)) = authentication {
            self.add_key_fields(plugin, section);
        }
        let (mut rules, mut admission) = (Vec::new(), Admission::default());
        for &(name, plugin) in plugins {
            let config = plugin.get("config").unwrap_or(&empty);
            match name {
                "key-auth" | "key-auth-enc" => {}
                name if LIMITING.contains(&name) => {
                    let plugin = LimitingPlugin { name, node: plugin, config, is_known };
                    rules.extend(self.limit(plugin, route, service));
                }
                "acl" => self.set_acl(config, is_known, &mut admission, plugin, section),
                "ip-restriction" => set_networks(config, &mut admission, section, &mut self.gateway),
                "request-size-limiting" => {
                    let size = config.number_of("allowed_payload_size").unwrap_or(128);
                    let unit = match config.text_of("size_unit") {
                        Some("kilobytes") => "kB",
                        Some("bytes") => "",
                        _ => "MB",
                    };
                    section.set(
                        "max_body",
                        if unit.is_empty() { size.into() } else { Value::from(format!("{size}{unit}")) },
                    );
                    config.bool_of("require_content_length");
                }
                "request-transformer" => set_fields(section, config, "request_headers", &mut self.gateway),
                "response-transformer" => set_fields(section, config, "response_headers", &mut self.gateway),
                "request-termination" if section.is_closed() => config.mark_read(),
                "request-termination" => {
                    let status = config.number_of("status_code").unwrap_or(503);
                    let mut respond = vec![("status".to_owned(), Value::Number(status.clamp(200, 599)))];
                    if let Some(body) = config.text_of("body").or_else(|| config.text_of("message")) {
                        respond.push(("body".to_owned(), body.into()));
                        respond.extend(
                            config.text_of("content_type").map(|kind| ("content_type".to_owned(), kind.into())),
                        );
                    }
                    section.settings.retain(|(name, _)| name != "upstream");
                    section.set("respond", Value::Table(respond));
                }
                "correlation-id" => config.mark_read(),
                name => {
                    let (effect, why) = treatment(name);
                    if let Some(entry) = plugin.setting("name") {
                        entry.note_at(&mut self.gateway, section, effect, why);
                    }
                    plugin.setting("config").into_iter().for_each(Entry::leave_out);
                    match effect {
                        Effect::Stricter => section.close(403),
                        _ if RESPONDING.contains(&name) && !section.is_closed() => section.close(503),
                        _ => {}
                    }
                }
            }
        }
        if is_known && !rules.iter().any(|rule| self.is_by_client(rule)) {
            rules.push(self.rule_for_known_clients());
        }
        self.set_admission(admission, route, section);
        if !rules.is_empty() && (section.get("upstream").is_some() || section.get("respond").is_some()) {
            let place = section.settings.iter().position(|(name, _)| name == "upstream").map_or(0, |place| place + 1);
            section.settings.insert(place, ("rules".to_owned(), rules.into()));
        }
    }

    fn is_by_client(&self, rule: &str) -> bool {
        let rule = self.gateway.rules.iter().find(|known| known.name == rule);
        rule.is_some_and(|rule| rule.section.get("key") == Some(&"client".into()))
    }

    fn add_key_fields(&mut self, plugin: &'d Node, section: &mut Section) {
        let config = plugin.get("config");
        let names = config.map_or_else(Vec::new, |config| config.texts_of("key_names"));
        let names = if names.is_empty() { vec!["apikey"] } else { names };
        let is_on = |key: &str| config.and_then(|config| config.bool_of(key)).unwrap_or(true);
        for (place, kind) in [("key_in_header", "header"), ("key_in_query", "query")] {
            if !is_on(place) {
                continue;
            }
            for name in &names {
                let field =
                    format!("{kind}:{}", if kind == "header" { name.to_lowercase() } else { (*name).to_owned() });
                if !self.key_fields.contains(&field) {
                    self.key_fields.push(field);
                }
            }
        }
        let Some(config) = config else { return };
        config.ignore(&["key_in_body", "run_on_preflight"]);
        if let Some(anonymous) = config.setting("anonymous") {
            let why = "requests without a key are refused";
            anonymous.note_at(&mut self.gateway, section, Effect::Stricter, why);
        }
        if config.bool_of("hide_credentials") == Some(true) {
            let names: Vec<String> = names.iter().map(|name| name.to_lowercase()).collect();
            section.set("request_headers", table([("remove", names.into())]));
            if let (true, Some(hidden)) = (is_on("key_in_query"), config.setting("hide_credentials")) {
                let why = "the server receives keys of the query; `key_in_query: false` refuses them";
                hidden.note_at(&mut self.gateway, section, Effect::Differs, why);
            }
        }
    }

    /// The rule of a plugin that limits.
    fn limit(
        &mut self,
        LimitingPlugin { name: plugin_name, node: plugin, config, is_known }: LimitingPlugin<'d, '_>,
        route: &'d Node,
        service: Option<&'d Node>,
    ) -> Option<String> {
        if let Some(rule) = self.rules.get(&std::ptr::from_ref(plugin)) {
            return rule.clone();
        }
        let windows = self.windows(config, plugin_name, plugin);
        let is_of = |node: &Node| node.list_of("plugins").iter().any(|own| std::ptr::eq(own, plugin));
        let owner = match service {
            _ if is_of(route) || plugin.get("route").is_some() => route.text_of("name"),
            Some(service) if is_of(service) || plugin.get("service").is_some() => service.text_of("name"),
            _ => Some("all"),
        };
        let rule = windows.map(|windows| {
            let mut section = Section::default();
            section.comment(format!("Plugin {plugin_name} ({})", plugin.position));
            self.set_key(&mut section, config, is_known);
            section.set("windows", Value::List(windows));
            self.set_refusal(&mut section, config);
            let name = unused_name(&table_name(owner.unwrap_or("limit")), &self.gateway.rules);
            self.gateway.rules.push(Named { name: name.clone(), section, ..Named::default() });
            self.plugin_of_rule.insert(name.clone(), plugin_name);
            name
        });
        self.rules.insert(std::ptr::from_ref(plugin), rule.clone());
        rule
    }

    /// The windows of a plugin; `None` if it has none.
    fn windows(&mut self, config: &Node, name: &str, plugin: &Node) -> Option<Vec<Value>> {
        let mut windows = Vec::new();
        if name == "rate-limiting" {
            for (period, ms) in PERIODS {
                let Some(entry) = config.setting(period) else { continue };
                let Some(limit) = entry.node.text().and_then(|text| text.parse().ok()).filter(|limit| *limit > 0)
                else {
                    entry.note(&mut self.gateway, Effect::NotEnforced, "it is no number above 0");
                    continue;
                };
                // A month of the calendar.
                windows.push(match ms {
                    0 => format!("{limit}/month").into(),
                    ms => Window::plain(limit, ms).value(),
                });
            }
        } else {
            let is_sliding = config.text_of("window_type") != Some("fixed");
            let (limits, sizes) = (config.texts_of("limit"), config.texts_of("window_size"));
            if limits.len() != sizes.len() {
                let text = format!("`{name}` has {} limits and {} windows", limits.len(), sizes.len());
                self.gateway.note(Effect::NotEnforced, &plugin.position, text);
            }
            for (limit, size) in limits.iter().zip(sizes) {
                let (Ok(limit), Ok(seconds)) = (limit.parse::<u64>(), size.parse::<u64>()) else {
                    let text = format!("`{name}`: the limit `{limit}` for `{size}` seconds is no pair of numbers");
                    self.gateway.note(Effect::NotEnforced, &plugin.position, text);
                    continue;
                };
                let period = period_text(seconds.max(1) * 1000);
                windows.push(match is_sliding {
                    true => table([("limit", limit.into()), ("period", period.into()), ("sliding", true.into())]),
                    false => format!("{limit}/{period}").into(),
                });
            }
        }
        if windows.is_empty() {
            let text = format!("`{name}` has no limit that can be read");
            self.gateway.note(Effect::NotEnforced, &plugin.position, text);
            return None;
        }
        // The order of the documentation: the longest window first.
        windows.reverse();
        Some(windows)
    }

    fn set_key(&mut self, section: &mut Section, config: &Node, is_known: bool) {
        let by = config.setting("limit_by").or_else(|| config.setting("identifier"));
        let field = config.text_of("header_name");
        let path = config.setting("path");
        match by.and_then(|by| by.node.text()).unwrap_or("consumer") {
            "consumer" | "credential" | "consumer-group" if is_known => {
                section.set("key", "client");
                section.set("on_missing_key", "refuse");
                if let Some(by) = by.filter(|by| by.node.text() != Some("consumer")) {
                    let why = "all credentials of a consumer are counted together, and each consumer for itself";
                    by.note_at(&mut self.gateway, section, Effect::Differs, why);
                }
            }
            "header" if field.is_some() => {
                section.set("key", format!("header:{}", field.unwrap_or_default().to_lowercase()));
                section.set("on_missing_key", "ip");
            }
            "path" => {
                section.set("key", "ip");
                if let Some(path) = path {
                    let why = "Kong counts the requests of all clients to this path together";
                    path.note_at(&mut self.gateway, section, Effect::NotEnforced, why);
                }
            }
            "service" => section.set("key", "global"),
            // Without a consumer, Kong counts by address.
            _ => section.set("key", "ip"),
        }
    }

    fn set_refusal(&mut self, section: &mut Section, config: &Node) {
        if let Some(status) = config.number_of("error_code").filter(|status| *status != 429) {
            section.set("status", status.clamp(400, 599));
        }
        if let Some(message) = config.text_of("error_message").filter(|message| *message != "API rate limit exceeded") {
            section.set("body", format!("{{\"message\":\"{}\"}}", message.replace('"', "'")));
            section.set("content_type", "application/json");
        }
        if config.bool_of("hide_client_headers") == Some(true) {
            section.set("headers", "off");
        }
        for store in ["policy", "strategy"] {
            let Some(entry) = config.setting(store) else { continue };
            if entry.node.text() != Some("local") {
                let why = "counters are local: for gateways that count together, see [counters.shared]";
                entry.note_at(&mut self.gateway, section, Effect::NotEnforced, why);
            }
        }
        config.ignore(&[
            "redis",
            "redis_host",
            "redis_port",
            "redis_password",
            "redis_database",
            "redis_timeout",
            "redis_username",
            "redis_ssl",
            "fault_tolerant",
            "sync_rate",
            "namespace",
            "dictionary_name",
        ]);
    }

    /// A rule without limits, which refuses requests without a known key.
    fn rule_for_known_clients(&mut self) -> String {
        let name = "known-clients";
        if self.gateway.rules.iter().all(|rule| rule.name != name) {
            let mut section = Section::default();
            section.comment(
                "Plugin key-auth: requests without a known key get 401. The limit is not meant to be reached.",
            );
            section.set("key", "client");
            section.set("on_missing_key", "refuse");
            section.set("windows", vec!["1000000/second"]);
            self.gateway.rules.push(Named { name: name.to_owned(), section, ..Named::default() });
        }
        name.to_owned()
    }

    /// The consumers of groups.
    fn set_acl(
        &mut self,
        config: &Node,
        is_known: bool,
        admission: &mut Admission,
        plugin: &Node,
        section: &mut Section,
    ) {
        let texts = |names: [&str; 2]| names.iter().flat_map(|name| config.texts_of(name)).collect::<Vec<_>>();
        let (allowed, denied) = (texts(["allow", "whitelist"]), texts(["deny", "blacklist"]));
        config.setting("hide_groups_header");
        if !is_known {
            if let Some(entry) = plugin.setting("name") {
                let why = "no plugin identifies consumers: the route is closed";
                entry.note_at(&mut self.gateway, section, Effect::Stricter, why);
            }
            admission.clients = Some(Vec::new());
            return;
        }
        let is_unknown = denied.iter().any(|group| is_stored_elsewhere(group));
        if let Some(entry) = config.setting("deny").or_else(|| config.setting("blacklist")).filter(|_| is_unknown) {
            let why = "a group is stored elsewhere: the route is closed";
            entry.note_at(&mut self.gateway, section, Effect::Stricter, why);
            admission.clients = Some(Vec::new());
            return;
        }
        let in_group = |consumer: &&'d Node, groups: &[&str]| {
            let acls = of_consumer(consumer, "acls", &self.acls);
            { acls }.any(|acl| acl.text_of("group").is_some_and(|group| groups.contains(&group)))
        };
        let is_admitted = |consumer: &&&'d Node| {
            !self.refuses(consumer)
                && match allowed.is_empty() {
                    true => !in_group(consumer, &denied),
                    false => in_group(consumer, &allowed),
                }
        };
        let clients = self.consumers.iter().filter(is_admitted).filter_map(|consumer| client_name(consumer));
        admission.clients = Some(clients.map(|name| format!("client:{name}")).collect());
    }

    fn set_admission(&mut self, admission: Admission, route: &Node, section: &mut Section) {
        if section.get("upstream").is_some() || section.get("respond").is_some() {
            section.denied = admission.denied;
        }
        let allow = match (admission.networks, admission.clients) {
            (None, None) => return,
            (Some(_), Some(_)) => {
                let text = "`allow` cannot require a network and a client: the route is closed";
                section.comment(self.gateway.placed_note(Effect::Stricter, &route.position, text));
                Vec::new()
            }
            (Some(list), None) | (None, Some(list)) => list,
        };
        if allow.is_empty() {
            return section.close(403);
        }
        if section.get("upstream").is_some() || section.get("respond").is_some() {
            section.set("allow", one_or_list(allow));
        }
    }

    fn upstream(&mut self, service: &'d Node, preserve_host: bool) -> String {
        let id = (std::ptr::from_ref(service), preserve_host);
        if let Some(name) = self.upstream_names.get(&id) {
            return name.clone();
        }
        let url = service.text_of("url").map(str::to_owned).unwrap_or_else(|| {
            let text = |key: &str, default: &str| service.text_of(key).unwrap_or(default).to_owned();
            let port = service.text_of("port").map_or_else(String::new, |port| format!(":{port}"));
            format!("{}://{}{port}{}", text("protocol", "http"), text("host", ""), text("path", ""))
        });
        let (scheme, rest) = url.split_once("://").unwrap_or(("http", &url));
        let authority = rest.split('/').next().unwrap_or(rest);
        let host = authority.split(':').next().unwrap_or(authority);
        let name = table_name(service.text_of("name").unwrap_or(host));
        let wanted = if preserve_host { None } else { Some(Value::from("server")) };
        let mut upstream = Section::default();
        upstream.comment(format!("Service {name} ({})", service.position));
        let server_scheme = if ["https", "grpcs", "tls"].contains(&scheme) { "https" } else { "http" };
        let pool = self.upstreams.iter().copied().find(|pool| pool.text_of("name") == Some(host));
        let servers: Vec<Value> = match pool {
            Some(pool) => pool
                .list_of("targets")
                .iter()
                .filter_map(|target| {
                    let address = target.text_of("target")?;
                    let address = if address.contains(':') { address.to_owned() } else { format!("{address}:8000") };
                    let url = format!("{server_scheme}://{address}");
                    match target.number_of("weight").unwrap_or(100) {
                        0 => None,
                        100 => Some(url.into()),
                        weight => Some(table([("url", url.into()), ("weight", weight.min(1000).into())])),
                    }
                })
                .collect(),
            None => vec![format!("{server_scheme}://{authority}").into()],
        };
        let several = servers.len() > 1;
        upstream.set("servers", Value::List(servers));
        if scheme.starts_with("grpc") {
            upstream.set("protocol", "http2");
        }
        if let Some(host) = &wanted {
            upstream.set("host", host.clone());
        }
        if let Some(pool) = pool {
            match pool.text_of("algorithm").unwrap_or("round-robin") {
                "round-robin" if several => upstream.set("balance", "round-robin"),
                "consistent-hashing" => {
                    let by =
                        match (pool.text_of("hash_on"), pool.text_of("hash_on_header"), pool.text_of("hash_on_cookie"))
                        {
                            (Some("header"), Some(name), _) => format!("header:{}", name.to_lowercase()),
                            (Some("cookie"), _, Some(name)) => format!("cookie:{name}"),
                            (Some("path"), ..) => "path".to_owned(),
                            _ => "ip".to_owned(),
                        };
                    upstream.set("balance", table([("hash", by.into())]));
                }
                _ => {}
            }
            self.set_health(&mut upstream, pool);
        }
        if server_scheme == "https" && service.bool_of("tls_verify") != Some(true) {
            let text = "the gateway verifies the certificates of these servers. For servers with certificates of their own, \
                        name them as `tls.ca`";
            upstream.comment(self.gateway.placed_note(Effect::Stricter, &service.position, text));
        }
        if let Some(retries) = service.number_of("retries").filter(|retries| *retries < 2) {
            upstream.set("retries", if retries == 0 { false.into() } else { table([("attempts", retries.into())]) });
        }
        let name = unused_name(&name, &self.gateway.upstreams);
        self.upstream_names.insert(id, name.clone());
        self.gateway.upstreams.push(Named { name: name.clone(), section: upstream, ..Named::default() });
        name
    }

    /// Active health checks, which Kong runs if they have an interval.
    fn set_health(&mut self, upstream: &mut Section, pool: &Node) {
        let Some(checks) = pool.get("healthchecks") else { return };
        checks.setting("threshold");
        let passive = checks.setting("passive");
        if let Some(passive) = passive.filter(|passive| passive.node.get("unhealthy").is_some()) {
            let why = "servers that fail are ejected as `ejection` of the upstream says";
            passive.note_at(&mut self.gateway, upstream, Effect::Differs, why);
            passive.node.mark_read();
        }
        let Some(active) = checks.setting("active") else { return };
        let number = |part: &str, name: &str| active.node.get(part).and_then(|part| part.number_of(name)).unwrap_or(0);
        let least =
            |all: &[(&str, &str)]| all.iter().map(|(part, name)| number(part, name)).filter(|number| *number > 0).min();
        let intervals =
            ["healthy", "unhealthy"].map(|part| active.node.get(part)?.get("interval").and_then(milliseconds));
        let Some(interval) = intervals.into_iter().flatten().min() else {
            return active.node.mark_read();
        };
        if let Some(kind) =
            active.node.setting("type").filter(|kind| !["http", "https"].contains(&kind.node.text().unwrap_or("")))
        {
            active.node.mark_read();
            return kind.note_at(
                &mut self.gateway,
                upstream,
                Effect::LeftOut,
                "servers are checked by HTTP only, see `health`",
            );
        }
        let timeout = active.node.get("timeout").and_then(milliseconds);
        let mut health = vec![
            ("path".to_owned(), active.node.text_of("http_path").unwrap_or("/").into()),
            ("interval".to_owned(), duration_text(interval).into()),
            ("timeout".to_owned(), duration_text(timeout.unwrap_or(1000)).into()),
        ];
        let statuses: Vec<u64> = active
            .node
            .get("healthy")
            .map_or(Vec::new(), |healthy| healthy.texts_of("http_statuses"))
            .iter()
            .filter_map(|status| status.parse().ok())
            .collect();
        health.push(("status".to_owned(), if statuses.is_empty() { vec![200, 302] } else { statuses }.into()));
        let failures = ["http_failures", "tcp_failures", "timeouts"].map(|name| ("unhealthy", name));
        for (setting, number) in
            [("unhealthy_after", least(&failures)), ("healthy_after", least(&[("healthy", "successes")]))]
        {
            health.extend(number.map(|number| (setting.to_owned(), Value::Number(number.min(1000)))));
        }
        upstream.set("health", Value::Table(health));
        active.node.ignore(&["concurrency", "healthy", "unhealthy"]);
    }

    /// Conditions that routes do not have.
    fn note_conditions(&mut self, route: &'d Node, section: &mut Section) {
        let is_plain = route.texts_of("protocols").iter().any(|protocol| ["http", "grpc"].contains(protocol));
        if let Some(protocols) = route.setting("protocols").filter(|_| !is_plain) {
            let why = "the gateway has no certificate: with [listen.https], write `scheme = \"https\"`";
            protocols.note_at(&mut self.gateway, section, Effect::NotEnforced, why);
        }
        for condition in ["snis", "sources", "destinations"] {
            if let Some(entry) = route.setting(condition) {
                let why = "routes have no such condition: other requests match, too";
                entry.note_at(&mut self.gateway, section, Effect::NotEnforced, why);
            }
        }
    }

    fn add_routes(&mut self, route: &'d Node, service: Option<&'d Node>, mut section: Section) {
        self.note_conditions(route, &mut section);
        let mut hosts = Vec::new();
        for host in route.texts_of("hosts") {
            let host = host.split(':').next().unwrap_or(host).to_lowercase();
            match host.strip_prefix("*.").unwrap_or(&host).contains('*') {
                true => self.gateway.note(
                    Effect::LeftOut,
                    &route.position,
                    format!("the host `{host}` cannot be expressed"),
                ),
                false => hosts.push(host),
            }
        }
        if hosts.is_empty() && !route.texts_of("hosts").is_empty() {
            return;
        }
        let mut headers: Vec<Vec<(String, Value)>> = vec![Vec::new()];
        for header in route.get("headers").map_or(&[][..], Node::settings) {
            let values: Vec<&str> = header.node.items().iter().filter_map(Node::text).collect();
            let with = |known: &Vec<(String, Value)>| {
                let one = |value: &&str| [known.clone(), vec![(header.key.to_lowercase(), (*value).into())]].concat();
                values.iter().map(one).collect::<Vec<_>>()
            };
            headers = headers.iter().flat_map(with).collect();
        }
        let strips = route.bool_of("strip_path").unwrap_or(true);
        route.ignore(&[
            "request_buffering",
            "response_buffering",
            "path_handling",
            "tags",
            "id",
            "https_redirect_status_code",
        ]);
        let target_path = service.and_then(target_path);
        let paths = route.texts_of("paths");
        let paths = if paths.is_empty() { vec!["/"] } else { paths };
        for path in paths {
            let mut section = section.clone();
            let regex =
                path.strip_prefix('~').or_else(|| (self.has_plain_regexes && !is_literal(path)).then_some(path));
            let rank = rank(route, path, regex.is_some());
            let methods: Vec<String> = route.texts_of("methods").iter().map(|method| method.to_uppercase()).collect();
            let patterns = match regex {
                Some(regex) => {
                    let anchored = format!("^{}", regex.trim_start_matches('^'));
                    let Some((mut patterns, further)) = of_regex(&anchored) else {
                        let text = format!("the path `{path}`: routes cannot express this regular expression");
                        let (hosts, path) = (hosts.clone(), widened(&anchored));
                        let dropped = Route { hosts, path, methods, section, ..Route::default() };
                        self.gateway.drop_route(vec![dropped], &route.position, text);
                        continue;
                    };
                    if strips && section.get("upstream").is_some() {
                        let text = format!("`{path}`: the matched part of the path is not removed");
                        section.comment(self.gateway.placed_note(Effect::Differs, &route.position, text));
                    }
                    if section.restricts() {
                        patterns.extend(further);
                    }
                    patterns
                }
                None if section.restricts() => prefix(path),
                None => {
                    if !path.ends_with('/') {
                        let text = format!(
                            "`{path}`: Kong matches all paths that begin so, such as `{path}x`; the route does not"
                        );
                        section.comment(self.gateway.placed_note(Effect::Differs, &route.position, text));
                    }
                    segments(path)
                }
            };
            for (index, headers) in headers.iter().enumerate() {
                for (at, pattern) in patterns.iter().enumerate() {
                    let (mut section, mut pattern) = (section.clone(), pattern.clone());
                    if section.get("upstream").is_some() && regex.is_none() {
                        set_path(&mut section, &mut pattern, path, strips, target_path.as_deref());
                    }
                    if index + at > 0 {
                        section.comments.clear();
                    }
                    let (hosts, path, headers, methods) = (hosts.clone(), pattern, headers.clone(), methods.clone());
                    self.gateway.add_route(
                        Route { hosts, path, methods, headers, rank: rank.clone(), section, ..Route::default() },
                        &route.position,
                    );
                }
            }
        }
    }

    /// A plan applies to all routes.
    fn note_plugins_of_consumers(&mut self, routes: &[&'d Node]) {
        let nested = routes.iter().flat_map(|node| node.list_of("plugins"));
        let top = self.plugins.iter().copied();
        let top = top.filter(|plugin| plugin.get("route").is_some() || plugin.get("service").is_some());
        let plugins: Vec<&Node> =
            nested.chain(top).filter(|plugin| is_enabled(plugin) && is_of_consumer(plugin)).collect();
        for plugin in plugins {
            if let Some(entry) = plugin.setting("name") {
                let why = "the gateway has no plugins of a consumer on single routes";
                entry.note(&mut self.gateway, Effect::NotEnforced, why);
            }
            plugin.mark_read();
        }
    }

    /// The consumers, with their plans, in the clients file.
    fn add_clients(&mut self) {
        let by_client: Vec<usize> = (0..self.gateway.rules.len())
            .filter(|index| self.gateway.rules[*index].section.get("key") == Some(&"client".into()))
            .collect();
        if by_client.is_empty() {
            return;
        }
        self.gateway.clients.set("file", "clients.toml");
        self.gateway.clients.set("api_key", one_or_list(std::mem::take(&mut self.key_fields)));
        let mut plans: Vec<(String, PlanWindows)> = Vec::new();
        let mut text = String::from("# The consumers of Kong. Only digests of their keys are stored.\n");
        for consumer in self.consumers.clone() {
            let Some(name) = client_name(consumer) else { continue };
            if text.contains(&format!("\n[clients.{name}]\n")) {
                let why = format!("there are two consumers `{name}`: the first one is known");
                self.gateway.note(Effect::Stricter, &consumer.position, why);
                continue;
            }
            let windows = self.windows_of_consumer(consumer);
            if self.refuses(consumer) {
                consumer.mark_read();
                continue;
            }
            let plan = match windows {
                windows if windows.is_empty() => STANDARD.to_owned(),
                windows => match plans.iter().find(|(_, known)| *known == windows) {
                    Some((plan, _)) => plan.clone(),
                    None => {
                        plans.push((name.clone(), windows));
                        name.clone()
                    }
                },
            };
            text.push_str(&format!("\n[clients.{name}]\nplan     = \"{plan}\"\napi_keys = ["));
            let mut keys = Vec::new();
            for credential in of_consumer(consumer, "keyauth_credentials", &self.credentials) {
                let Some(key) = credential.setting("key") else {
                    self.gateway.note(
                        Effect::Stricter,
                        &credential.position,
                        "a credential without a key is not known",
                    );
                    continue;
                };
                let value = key.node.text().unwrap_or_default();
                if is_stored_elsewhere(value) {
                    let why = "the key is stored elsewhere: add it with `transom clients add`";
                    self.gateway.note(Effect::Stricter, &credential.position, format!("a key of `{name}`: {why}"));
                    continue;
                }
                keys.push(format!("\"{}\"", Digest::of(value.as_bytes())));
            }
            text.push_str(&format!("{}]\n", keys.join(", ")));
            consumer.ignore(&["custom_id", "tags", "id", "acls"]);
        }
        let is_several = by_client.len() > 1 && !plans.is_empty();
        for index in by_client {
            let rule = &mut self.gateway.rules[index];
            let plugin = self.plugin_of_rule.get(&rule.name).copied();
            let standard = match rule.section.get("windows") {
                Some(Value::List(windows)) => windows.clone(),
                _ => Vec::new(),
            };
            for (plan, of_plan) in [(STANDARD.to_owned(), Vec::new())].iter().chain(&plans) {
                // The limits of a consumer replace those of the same plugin, and are added to those of another one.
                let is_replaced = |(name, _): &(&str, Vec<Value>)| plugin.is_none_or(|plugin| plugin == *name);
                let mut windows = if of_plan.iter().any(is_replaced) { Vec::new() } else { standard.clone() };
                of_plan.iter().for_each(|(_, more)| add_windows(&mut windows, more));
                let mut section = Section::default();
                section.set("windows", Value::List(windows));
                rule.tables.push((format!("plans.{plan}"), section));
            }
        }
        if is_several {
            let position = self.consumers[0].position.clone();
            let text =
                "limits of consumers count in each rule by client for itself; in Kong they count together".to_owned();
            self.gateway.note(Effect::NotEnforced, &position, text);
        }
        self.gateway.files.push(NamedFile { name: "clients.toml", text });
    }

    /// The plugins of a consumer for all routes: its own, then those of its groups.
    fn plugins_of_consumer(&self, consumer: &'d Node) -> Vec<&'d Node> {
        // Those on a single route or service are noted with these.
        let top = |key: &'static str, object: &'d Node| {
            self.plugins.iter().copied().filter(move |plugin| {
                plugin_refers(plugin, key, Some(object)) == Some(true)
                    && plugin.get("route").is_none()
                    && plugin.get("service").is_none()
            })
        };
        let is_member = |group: &&&'d Node| {
            consumer.list_of("groups").iter().any(|reference| refers(reference, group))
                || group.list_of("consumers").iter().any(|member| refers(member, consumer))
        };
        let of_groups = self.groups.iter().filter(is_member);
        let of_groups = of_groups.flat_map(|group| group.list_of("plugins").iter().chain(top("consumer_group", group)));
        consumer.list_of("plugins").iter().chain(top("consumer", consumer)).chain(of_groups).collect()
    }

    /// Whether Kong refuses requests of a consumer by a plugin of its own.
    fn refuses(&self, consumer: &'d Node) -> bool {
        let is_refusing = |plugin: &Node| {
            let name = plugin.text_of("name");
            name.is_some_and(|name| REFUSING.contains(&name) || treatment(name).0 == Effect::Stricter)
        };
        self.plugins_of_consumer(consumer).into_iter().any(|plugin| is_enabled(plugin) && is_refusing(plugin))
    }

    /// The limits of plugins on the consumer or on its groups, with the name of each plugin.
    fn windows_of_consumer(&mut self, consumer: &'d Node) -> PlanWindows<'d> {
        let mut found = PlanWindows::new();
        for plugin in self.plugins_of_consumer(consumer) {
            let Some(entry) = plugin.setting("name").filter(|_| is_enabled(plugin)) else {
                plugin.mark_read();
                continue;
            };
            let name = entry.node.text().unwrap_or_default();
            if !LIMITING.contains(&name) {
                let (effect, why) = match name {
                    name if REFUSING.contains(&name) => (Effect::Stricter, "a consumer with this plugin is not known"),
                    "request-size-limiting" => (Effect::NotEnforced, "the gateway has no such limits of a consumer"),
                    name => match treatment(name).0 {
                        Effect::Stricter => (Effect::Stricter, "a consumer with this plugin is not known"),
                        effect => (effect.min(Effect::LeftOut), "the gateway has no such plugin of a consumer"),
                    },
                };
                plugin.mark_read();
                entry.note(&mut self.gateway, effect, why);
                continue;
            }
            let Some(config) = plugin.get("config").filter(|_| found.iter().all(|(known, _)| *known != name)) else {
                plugin.mark_read();
                continue;
            };
            if let Some(windows) = self.windows(config, name, plugin) {
                found.push((name, windows));
            }
            for setting in [
                "policy",
                "limit_by",
                "identifier",
                "fault_tolerant",
                "hide_client_headers",
                "sync_rate",
                "namespace",
                "strategy",
            ] {
                config.setting(setting);
            }
        }
        found
    }
}

/// The windows of each plugin of a consumer.
type PlanWindows<'d> = Vec<(&'d str, Vec<Value>)>;

/// Adds windows. Of two with the same period, the one with the smaller limit is left.
fn add_windows(windows: &mut Vec<Value>, more: &[Value]) {
    let parts = |window: &Value| match window {
        Value::Text(text) => {
            text.split_once('/').and_then(|(limit, period)| Some((limit.parse().ok()?, period.to_owned(), false)))
        }
        Value::Table(settings) => match &settings[..] {
            [(_, Value::Number(limit)), (_, Value::Text(period)), ..] => Some((*limit, period.clone(), true)),
            _ => None,
        },
        _ => None,
    };
    for window in more {
        let Some((limit, period, is_sliding)): Option<(u64, String, bool)> = parts(window) else { continue };
        let known = windows.iter_mut().find_map(|known| Some((parts(known).filter(|parts| parts.1 == period)?, known)));
        match known {
            None => windows.push(window.clone()),
            Some(((known_limit, _, was_sliding), known)) => {
                let limit = limit.min(known_limit);
                *known = match is_sliding || was_sliding {
                    true => table([("limit", limit.into()), ("period", period.into()), ("sliding", true.into())]),
                    false => format!("{limit}/{period}").into(),
                };
            }
        }
    }
}

/// What belongs to a consumer: below it, or at the top level with a reference to it.
fn of_consumer<'d>(consumer: &'d Node, key: &str, top: &[&'d Node]) -> impl Iterator<Item = &'d Node> {
    let is_its = |node: &&'d Node| plugin_refers(node, "consumer", Some(consumer)) == Some(true);
    let top: Vec<&Node> = top.iter().copied().filter(is_its).collect();
    consumer.list_of(key).iter().chain(top)
}

fn client_name(consumer: &Node) -> Option<String> {
    consumer.text_of("username").or_else(|| consumer.text_of("custom_id")).map(table_name)
}

/// The place of a route in the order of Kong: kinds of conditions, exact hosts, fields, regular expressions, the length of the path.
fn rank(route: &Node, path: &str, is_regex: bool) -> Vec<i64> {
    let is_set = |name: &&&str| route.get(name).is_some();
    let kinds = ["hosts", "headers", "methods", "paths", "snis"].iter().filter(is_set).count();
    let hosts = route.texts_of("hosts");
    let is_exact = !hosts.is_empty() && !hosts.iter().any(|host| host.contains('*'));
    let fields = route.get("headers").map_or(0, |headers| headers.settings().len());
    let regex_priority = route.number_of("regex_priority").filter(|_| is_regex).unwrap_or(0);
    let length = if is_regex { 0 } else { path.len() };
    let parts = [kinds, is_exact.into(), fields, is_regex.into(), usize::try_from(regex_priority).unwrap_or(0), length];
    parts.iter().map(|part| i64::try_from(*part).unwrap_or(i64::MAX)).collect()
}

/// Whether Kong before 3.0 takes a path for a prefix.
fn is_literal(path: &str) -> bool {
    path.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_~/%".contains(&byte))
}

/// The path of a service, which is put before that of requests.
fn target_path(service: &Node) -> Option<String> {
    let path = match service.text_of("url") {
        Some(url) => url.split_once("://").and_then(|(_, rest)| Some(format!("/{}", rest.split_once('/')?.1))),
        None => service.text_of("path").map(str::to_owned),
    };
    path.map(|path| path.trim_end_matches('/').to_owned()).filter(|path| !path.is_empty())
}

fn set_path(section: &mut Section, pattern: &mut String, path: &str, strips: bool, target: Option<&str>) {
    let from = path.trim_end_matches('/');
    if strips && let Some((named, to)) = within_segment(pattern, from, &format!("{}/", target.unwrap_or(""))) {
        *pattern = named;
        return section.set("rewrite", to);
    }
    match (strips && !from.is_empty(), target) {
        (false, None) => {}
        (true, None) => section.set("strip_prefix", literal(from)),
        (true, Some(to)) => {
            section.set("replace_prefix", table([("from", literal(from).into()), ("to", literal(to).into())]))
        }
        (false, Some(to)) => {
            section.set("replace_prefix", table([("from", "/".into()), ("to", format!("{}/", literal(to)).into())]));
        }
    }
}

/// A number of seconds above 0, which may have a fraction, as the gateway accepts it.
fn milliseconds(seconds: &Node) -> Option<u64> {
    let seconds: f64 = seconds.text()?.parse().ok().filter(|seconds| *seconds > 0.0)?;
    Some(((seconds * 1000.0).round() as u64).clamp(10, 86_400_000))
}

fn set_timeouts(section: &mut Section, service: &Node) {
    let times = [("connect_timeout", "connect"), ("read_timeout", "response_head"), ("write_timeout", "")];
    let mut timeouts = Vec::new();
    for (name, setting) in times {
        if let Some(ms) = service.number_of(name).filter(|ms| *ms > 0 && !setting.is_empty()) {
            timeouts.push((setting.to_owned(), Value::from(duration_text(ms.min(86_400_000)))));
        }
    }
    if !timeouts.is_empty() {
        section.set("timeouts", Value::Table(timeouts));
    }
}

fn set_networks(config: &Node, admission: &mut Admission, section: &mut Section, gateway: &mut Gateway) {
    let lists = |names: [&'static str; 2]| names.iter().filter_map(|name| config.setting(name)).collect::<Vec<_>>();
    let (allow, deny) = (lists(["allow", "whitelist"]), lists(["deny", "blacklist"]));
    config.settings();
    let networks = |list: &[&Entry]| -> Vec<Option<Network>> {
        list.iter().flat_map(|entry| entry.node.items()).map(|item| Network::parse(item.text()?)).collect()
    };
    let (allowed, denied) = (networks(&allow), networks(&deny));
    for (list, networks, why) in [
        (&allow, &allowed, "an entry is no network, and is not admitted"),
        (&deny, &denied, "an entry is no network: the route is closed"),
    ] {
        if let Some(entry) = list.first().filter(|_| networks.contains(&None)) {
            entry.note_at(gateway, section, Effect::Stricter, why);
        }
    }
    // A list whose entries cannot be read, such as references to secrets, admits no one.
    let is_unknown = denied.contains(&None);
    if allowed.is_empty() && !is_unknown {
        admission.denied.extend(denied.iter().flatten().map(ToString::to_string));
        return;
    }
    let mut left: Vec<Network> = if is_unknown { Vec::new() } else { allowed.into_iter().flatten().collect() };
    denied.iter().flatten().for_each(|network| left = difference(&left, network));
    left.sort();
    admission.networks = Some(left.iter().map(ToString::to_string).collect());
}

/// `add`, `replace` and `remove` of fields.
fn set_fields(section: &mut Section, config: &Node, setting: &str, gateway: &mut Gateway) {
    let (mut set, mut add, mut remove) = (Vec::new(), Vec::new(), Vec::<Value>::new());
    for action in config.settings() {
        let headers: Vec<&Entry> = action.node.settings().iter().collect();
        for entry in headers {
            if entry.key != "headers" {
                if !entry.node.items().is_empty() {
                    entry.note_at(gateway, section, Effect::LeftOut, "only fields of heads are changed");
                }
                continue;
            }
            for text in entry.node.items().iter().filter_map(Node::text) {
                let (name, value) = text.split_once(':').unwrap_or((text, ""));
                let (name, value) = (name.trim().to_lowercase(), value.trim());
                match action.key.as_str() {
                    "remove" => remove.push(name.into()),
                    _ if value.contains("$(") => {
                        entry.note_at(gateway, section, Effect::LeftOut, "the gateway has no templates")
                    }
                    "append" => add.push((name, Value::from(value.replace('{', "{{").replace('}', "}}")))),
                    _ => set.push((name, Value::from(value.replace('{', "{{").replace('}', "}}")))),
                }
            }
        }
    }
    let mut changes = match section.get(setting) {
        Some(Value::Table(known)) => known.clone(),
        _ => Vec::new(),
    };
    for (name, value) in [("remove", Value::List(remove)), ("set", Value::Table(set)), ("add", Value::Table(add))] {
        let is_empty = matches!(&value, Value::List(list) if list.is_empty())
            || matches!(&value, Value::Table(list) if list.is_empty());
        if is_empty {
            continue;
        }
        match (changes.iter_mut().find(|(known, _)| known == name), value) {
            (Some((_, Value::List(known))), Value::List(more)) => known.extend(more),
            (Some((_, Value::Table(known))), Value::Table(more)) => known.extend(more),
            (_, value) => changes.push((name.to_owned(), value)),
        }
    }
    if !changes.is_empty() {
        section.set(setting, Value::Table(changes));
    }
}
