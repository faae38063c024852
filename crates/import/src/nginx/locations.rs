//! `location` blocks as routes: what they match, and what they do.

use super::keys::mark_all;
use super::limits::RuleUse;
use super::redirects::Redirect;
use super::servers::Server;
use super::syntax::{Directive, Fate};
use super::upstreams::Target;
use super::{Importer, Scope, directives, duration, heading, note_unread_at, size, size_text, template};
use crate::gateway::{Route, Section, Value, one_or_list, table};
use crate::network::{Network, difference, intersection};
use crate::path::{
    Common, common, covers, literal, of_regex, precedes, prefix, segments, widened, with_any_characters, within_segment,
};
use crate::rate::duration_text;
use crate::source::Effect;

/// What all routes of a server have in common.
pub struct ServerRoutes {
    /// Empty: any host.
    pub hosts: Vec<String>,
    pub scheme: Option<&'static str>,
    /// Whether routes of other servers would match what this server does not serve.
    pub needs_fallback: bool,
}

/// A location with the patterns of its routes.
struct Location<'d> {
    block: &'d Directive,
    scope: Scope<'d>,
    patterns: Vec<String>,
    kind: Kind,
    /// The regular expression, if the patterns match more paths than it.
    wider_than: Option<&'d str>,
    /// What is noted at its first route.
    section: Section,
}

/// In the order in which nginx takes them. Of prefixes, it first takes the longest one, of both kinds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Exact,
    /// `^~`: regular expressions do not precede it.
    Preferred,
    Regex,
    Prefix,
}

impl Location<'_> {
    fn path(&self) -> &str {
        self.block.arguments.last().map_or("", String::as_str)
    }
}

/// Which addresses are admitted.
enum Access {
    All,
    Closed,
    Only(Vec<String>),
    /// All but these.
    Except(Vec<String>),
}

/// Directives of locations for files and for other protocols than HTTP.
const FILE_HANDLERS: [&str; 4] = ["root", "alias", "try_files", "index"];
const OTHER_HANDLERS: [&str; 7] = [
    "fastcgi_pass",
    "uwsgi_pass",
    "scgi_pass",
    "memcached_pass",
    "content_by_lua_block",
    "content_by_lua_file",
    "js_content",
];
/// Longer lists are written as the denied networks, if these are fewer.
const LISTED_NETWORKS: usize = 16;
/// Most patterns of a location.
const PATTERNS_MAX: usize = 256;
/// Longest list of networks.
const NETWORKS_MAX: usize = 10_000;

impl<'d> Importer<'d> {
    pub(super) fn add_locations(&mut self, server: &Server<'d>, routes: &ServerRoutes) {
        let scope = &server.scope;
        let rewrites = server.redirects(scope);
        rewrites.iter().for_each(|rewrite| self.add_redirect(routes, rewrite, scope, server));
        if let Some(answer) = scope.own("return") {
            let mut section = Section::default();
            self.set_return(&mut section, answer, server);
            for location in server.block.children().iter().filter(|child| child.name == "location") {
                self.note_at(&mut section, Effect::LeftOut, location, "the `return` of the server precedes it");
            }
            return self.add_routes(routes, &["/{*rest}".to_owned()], &[], section, answer);
        }
        let mut redirect = self.https_redirect(server);
        let mut locations = Vec::new();
        self.collect(server.block.children(), scope, &routes.hosts, &mut locations);
        self.leave_out_wider(server, &routes.hosts, &mut locations);
        for location in &mut locations {
            location.patterns.retain(|pattern| !rewrites.iter().any(|rewrite| rewrite.covers(pattern)));
            let is_in_part = |rewrite: &&Redirect| {
                location.patterns.iter().any(|pattern| common(pattern, &rewrite.pattern) == Common::Unknown)
            };
            if let Some(rewrite) = rewrites.iter().find(is_in_part) {
                let (location_text, rewrite) = (location.block.text(), rewrite.directive.text());
                let text = format!("`{location_text}`: some of the paths that `{rewrite}` redirects have this route");
                let comment = self.gateway.placed_note(Effect::Differs, &location.block.position, text);
                location.section.comment(comment);
            }
        }
        remove_unreachable(&mut locations, &mut self.gateway);
        // The more specific location has a pattern that two have, such as `/api/{*rest}`.
        remove_repeated(&mut locations, |location| match location.kind {
            Kind::Exact | Kind::Regex => None,
            Kind::Preferred | Kind::Prefix => Some(usize::MAX - location.path().len()),
        });
        add_common_patterns(&mut locations, &mut self.gateway);
        remove_repeated(&mut locations, |location| Some(location.kind as usize));
        let all: Vec<String> = locations.iter().flat_map(|location| location.patterns.clone()).collect();
        for location in locations {
            self.add_location(server, routes, location, redirect.take(), &all);
        }
        if routes.needs_fallback
            && !all.iter().chain(rewrites.iter().map(|rewrite| &rewrite.pattern)).any(|pattern| pattern == "/{*rest}")
        {
            let mut section = Section::default();
            section.comment("nginx serves files here. Without this route, those of other servers would match.");
            section.set("respond", table([("status", 404.into())]));
            self.add_routes(routes, &["/{*rest}".to_owned()], &[], section, server.block);
        }
    }

    /// `if ($scheme = http) { return 301 https://…; }` of a server with both schemes.
    fn https_redirect(&mut self, server: &Server<'d>) -> Option<(&'d Directive, Section)> {
        let is_plain = |condition: &Directive| {
            let words = condition.arguments.join(" ");
            ["($scheme = http)", "($scheme != https)", "($scheme = \"http\")", "($https = \"\")", "($https = )"]
                .contains(&words.trim())
        };
        let condition = server.block.children().iter().find(|child| child.name == "if" && is_plain(child))?;
        let answer = condition.children().iter().find(|child| child.name == "return")?;
        let mut section = Section::default();
        self.set_return(&mut section, answer, server);
        section.get("redirect")?;
        condition.mark(Fate::Translated);
        Some((condition, section))
    }

    fn add_redirect(&mut self, routes: &ServerRoutes, redirect: &Redirect<'d>, scope: &Scope<'d>, server: &Server<'d>) {
        let directive = redirect.directive;
        let mut section = redirect.section();
        section.comment(heading(&directive.text(), &directive.position));
        self.set_response_fields(&mut section, scope, server.names.first().map(String::as_str));
        directive.mark(Fate::Translated);
        self.add_routes(routes, std::slice::from_ref(&redirect.pattern), &[], section, directive);
    }

    fn collect(
        &mut self,
        block: &'d [Directive],
        scope: &Scope<'d>,
        hosts: &[String],
        locations: &mut Vec<Location<'d>>,
    ) {
        for block in block.iter().filter(|child| child.name == "location") {
            let (modifier, path) = match block.arguments.as_slice() {
                [modifier, path] => (modifier.as_str(), path.as_str()),
                [path] => {
                    match ["=", "^~", "~*", "~"].iter().find_map(|sign| Some((*sign, path.strip_prefix(sign)?))) {
                        Some(split) => split,
                        None => ("", path.as_str()),
                    }
                }
                _ => continue,
            };
            if path.starts_with('@') {
                continue;
            }
            let mut section = Section::default();
            section.comment(heading(&block.text().replace(" { … }", ""), &block.position));
            let mut wider_than = None;
            let (kind, patterns) = match modifier {
                "=" => (Kind::Exact, vec![literal(path)]),
                "^~" => (Kind::Preferred, self.prefix(&mut section, block, path)),
                "~" | "~*" => {
                    let (exact, ignores_case) = (of_regex(path), modifier == "~*");
                    let is_leaf = block.children().iter().all(|child| child.name != "location");
                    let may_be_wider = is_leaf && !ignores_case;
                    let wider = || of_regex(&with_any_characters(path)?).filter(|(_, further)| further.is_empty());
                    wider_than = exact.is_none().then_some(path);
                    let Some((mut patterns, further)) = exact.or_else(|| wider().filter(|_| may_be_wider)) else {
                        self.leave_out_regex(hosts, block, path, ignores_case);
                        continue;
                    };
                    let restricts = restricts(block);
                    let has_letters = path.bytes().any(|byte| byte.is_ascii_alphabetic());
                    if ignores_case && has_letters {
                        let why = "the route does not match other capital letters";
                        let effect = if restricts { Effect::NotEnforced } else { Effect::Differs };
                        let text = format!("`{}`: {why}", block.text());
                        section.comment(self.gateway.placed_note(effect, &block.position, text));
                    }
                    if restricts {
                        patterns.extend(further);
                    } else if !further.is_empty() {
                        self.note_more_paths(&mut section, block, path.trim_start_matches('^'));
                    }
                    (Kind::Regex, patterns)
                }
                _ => (Kind::Prefix, self.prefix(&mut section, block, path)),
            };
            block.mark(Fate::Translated);
            let inner = scope.inner(block.children());
            locations.push(Location { block, scope: inner.clone(), patterns, kind, wider_than, section });
            self.collect(block.children(), &inner, hosts, locations);
        }
    }

    fn leave_out_regex(&mut self, hosts: &[String], block: &Directive, regex: &str, ignores_case: bool) {
        block.mark(Fate::LeftOut);
        let mut section = Section::default();
        if restricts(block) {
            section.set("rules", vec![block.text()]);
        }
        let (hosts, path) = (hosts.to_vec(), widened(regex));
        let route = Route { hosts, path, section, ignores_case, ..Route::default() };
        let text = format!("`{}`: routes cannot express this regular expression", block.text());
        self.gateway.drop_route(vec![route], &block.position, text);
    }

    /// Leaves out locations whose patterns match more paths than their expressions, unless nginx forwards these paths too, by the
    /// location `/` alone, and no location of the server has limits or access rules.
    fn leave_out_wider(&mut self, server: &Server, hosts: &[String], locations: &mut Vec<Location<'d>>) {
        let forwards = |location: &Location| location.block.children().iter().any(|child| child.name == "proxy_pass");
        let is_root = |location: &Location| location.kind == Kind::Prefix && location.path() == "/";
        let is_simple =
            !any_restricts(server.block.children()) && locations.iter().any(|one| is_root(one) && forwards(one));
        let has_common = |one: &Location, other: &Location| {
            let mut patterns = one.patterns.iter();
            patterns.any(|one| other.patterns.iter().any(|other| common(one, other) != Common::Nothing))
        };
        let is_kept = |location: &Location| {
            let mut others = locations.iter().filter(|other| !std::ptr::eq(*other, location) && !is_root(other));
            is_simple && forwards(location) && !others.any(|other| has_common(location, other))
        };
        let wider = locations.iter().filter_map(|location| Some((location, location.wider_than?)));
        let left_out: Vec<(&Directive, &str)> =
            wider.filter(|(location, _)| !is_kept(location)).map(|(location, regex)| (location.block, regex)).collect();
        locations.retain(|location| !left_out.iter().any(|(block, _)| std::ptr::eq(*block, location.block)));
        left_out.into_iter().for_each(|(block, regex)| self.leave_out_regex(hosts, block, regex, false));
        for location in locations.iter_mut().filter(|location| location.wider_than.is_some()) {
            let why = "the route also matches other characters in place of `[…]`, `\\d` or `\\w`";
            let text = format!("`{}`: {why}", location.block.text());
            let comment = self.gateway.placed_note(Effect::Differs, &location.block.position, text);
            location.section.comment(comment);
        }
    }

    /// Where limits depend on it, also the paths that begin so within a segment.
    fn prefix(&mut self, section: &mut Section, block: &'d Directive, path: &str) -> Vec<String> {
        if path.ends_with('/') {
            return segments(path);
        }
        if restricts(block) {
            return prefix(path);
        }
        self.note_more_paths(section, block, path);
        segments(path)
    }

    fn note_more_paths(&mut self, section: &mut Section, block: &'d Directive, path: &str) {
        let why =
            format!("nginx matches all paths that begin so, such as `{path}x`, for which there are other routes here");
        section.comment(self.gateway.placed_note(
            Effect::Differs,
            &block.position,
            format!("`{}`: {why}", block.text()),
        ));
    }

    fn add_location(
        &mut self,
        server: &Server<'d>,
        routes: &ServerRoutes,
        location: Location<'d>,
        redirect: Option<(&'d Directive, Section)>,
        all: &[String],
    ) {
        let Location { block, scope, mut patterns, kind, mut section, .. } = location;
        if let Some((condition, redirect)) = redirect {
            let routes = ServerRoutes { scheme: Some("http"), hosts: routes.hosts.clone(), ..*routes };
            self.add_routes(&routes, &["/{*rest}".to_owned()], &[], redirect, condition);
        }
        if patterns.is_empty() {
            if block.fate.get() == Fate::Translated {
                self.note(Effect::LeftOut, block, "other locations or redirects precede it");
            }
            return;
        }
        if scope.own("internal").is_some() {
            // Clients get this response. What the location does otherwise, only other directives use.
            block.children().iter().filter(|child| child.name != "location").for_each(mark_all);
            section.set("respond", table([("status", 404.into())]));
            return self.add_routes(routes, &patterns, &[], section, block);
        }
        let own = patterns.clone();
        for (redirect, pattern) in server.redirects(&scope).iter().flat_map(|one| own.iter().map(move |own| (one, own)))
        {
            let Some(both) = redirect.of_both(pattern) else {
                if common(&redirect.pattern, pattern) != Common::Nothing {
                    let why = "some of the paths that it redirects have this route";
                    self.note_at(&mut section, Effect::Differs, redirect.directive, why);
                }
                continue;
            };
            let is_others =
                |other: &String| !own.contains(other) && precedes(other, pattern) && covers(other, &both.pattern);
            if !all.iter().any(is_others) {
                patterns.retain(|own| own != pattern || !redirect.covers(own));
                self.add_redirect(routes, &both, &scope, server);
            }
        }
        if patterns.is_empty() {
            return block.children().iter().filter(|child| child.name != "location").for_each(mark_all);
        }
        if let Some(answer) = scope.own("return") {
            // nginx responds before it counts and before it checks addresses.
            let unneeded = |child: &&Directive| directives::limits_access(&child.name) && child.block.is_none();
            block.children().iter().filter(unneeded).for_each(mark_all);
            self.set_return(&mut section, answer, server);
            self.set_response_fields(&mut section, &scope, server.names.first().map(String::as_str));
            note_unread_at(block.children(), &mut self.gateway, &mut section);
            return self.add_routes(routes, &patterns, &[], section, block);
        }
        let named = self.named_location(server, &scope);
        let handler = named.as_ref().map_or(&scope, |(_, inner)| inner);
        let is_forwarded = self.set_handler(&mut section, block, handler, kind);
        self.set_access(&mut section, &scope);
        let mut rules = self.rules_of(&scope, &server.label(), &mut section);
        if let Some((named_block, inner)) = &named {
            for rule in self.rules_of(inner, &server.label(), &mut section) {
                if rules.iter().all(|known| known.name != rule.name) {
                    rules.push(rule);
                }
            }
            named_block.mark(Fate::Translated);
        }
        let is_closed = section.get("respond").is_some();
        let name = server.names.first().map(String::as_str);
        if !is_closed {
            self.set_request_fields(&mut section, handler, name);
        }
        if is_forwarded {
            self.set_limits(&mut section, handler);
        }
        self.set_response_fields(&mut section, handler, name);
        if let Some((named_block, _)) = &named {
            note_unread_at(named_block.children(), &mut self.gateway, &mut section);
        }
        for except in block.children().iter().filter(|child| child.name == "limit_except") {
            except.mark(Fate::Translated);
        }
        note_unread_at(block.children(), &mut self.gateway, &mut section);
        let slash = patterns.iter().find_map(|pattern| pattern.strip_suffix("/{*rest}"));
        let without_slash = slash.filter(|path| !path.is_empty() && is_forwarded && !is_closed && kind != Kind::Regex);
        let without_slash = without_slash.filter(|path| !all.iter().any(|pattern| pattern == path)).map(str::to_owned);
        let denied = section.denied.clone();
        self.add_variants(routes, &patterns, &rules, section, block);
        if let Some(path) = without_slash {
            let mut section = Section { denied, ..Section::default() };
            section.set(
                "redirect",
                table([
                    ("to", format!("{{scheme}}://{{authority}}{}/", path.replace('{', "{{").replace('}', "}}")).into()),
                    ("status", 301.into()),
                ]),
            );
            self.add_routes(routes, &[path], &[], section, block);
        }
    }

    /// Adds routes by method where rules count only some methods, and where `limit_except` restricts the others.
    fn add_variants(
        &mut self,
        routes: &ServerRoutes,
        patterns: &[String],
        rules: &[RuleUse],
        section: Section,
        block: &'d Directive,
    ) {
        let except = block.children().iter().find(|child| child.name == "limit_except");
        let mut methods: Vec<String> = Vec::new();
        let excepted = except.map_or(&[][..], |except| &except.arguments);
        for method in rules.iter().flat_map(|rule| &rule.methods).chain(excepted) {
            if !methods.contains(method) {
                methods.push(method.clone());
            }
        }
        let rules_for = |method: Option<&String>| -> Vec<String> {
            let applies =
                |rule: &&RuleUse| rule.methods.is_empty() || method.is_some_and(|method| rule.methods.contains(method));
            rules.iter().filter(applies).map(|rule| rule.name.clone()).collect()
        };
        let others = match except {
            None => section.clone(),
            Some(except) => {
                let mut others = Section::default();
                others.settings.clone_from(&section.settings);
                // Without addresses of its own, it inherits those of the location.
                match except.children().iter().any(|child| ["allow", "deny"].contains(&child.name.as_str())) {
                    true => others.settings.retain(|(name, _)| name != "allow"),
                    false => others.denied.clone_from(&section.denied),
                }
                let inner = Scope { levels: vec![except.children().iter().collect()] };
                self.set_access(&mut others, &inner);
                except.mark(Fate::Translated);
                others
            }
        };
        let mut variants: Vec<(Vec<String>, Vec<String>, bool)> = Vec::new();
        for method in &methods {
            let (rules, is_excepted) = (rules_for(Some(method)), except.is_none() || excepted.contains(method));
            match variants.iter_mut().find(|(_, known, excepted)| *known == rules && *excepted == is_excepted) {
                Some((methods, ..)) => methods.push(method.clone()),
                None => variants.push((vec![method.clone()], rules, is_excepted)),
            }
        }
        for (methods, rules, is_excepted) in variants {
            let mut variant = if is_excepted { section.clone() } else { others.clone() };
            set_rules(&mut variant, rules);
            self.add_routes(routes, patterns, &methods, variant, block);
        }
        let mut others = others;
        set_rules(&mut others, rules_for(None));
        self.add_routes(routes, patterns, &[], others, block);
    }

    fn add_routes(
        &mut self,
        routes: &ServerRoutes,
        patterns: &[String],
        methods: &[String],
        section: Section,
        directive: &Directive,
    ) {
        for (index, pattern) in patterns.iter().enumerate() {
            let mut section = section.clone();
            if index > 0 {
                section.comments.clear();
            }
            let mut path = pattern.clone();
            if let Some((named, to)) = section.prefix_change().and_then(|(from, to)| within_segment(pattern, from, to))
            {
                section.settings.retain(|(name, _)| !["strip_prefix", "replace_prefix"].contains(&name.as_str()));
                section.set("rewrite", to);
                path = named;
            }
            let route = Route {
                hosts: routes.hosts.clone(),
                path,
                methods: methods.to_vec(),
                headers: Vec::new(),
                scheme: routes.scheme,
                section,
                ..Route::default()
            };
            self.gateway.add_route(route, &directive.position);
        }
    }

    /// The location that `try_files` names at its end, such as `@app`, which serves what is no file.
    fn named_location(&mut self, server: &Server<'d>, scope: &Scope<'d>) -> Option<(&'d Directive, Scope<'d>)> {
        let name = scope.own("try_files")?.arguments.last().filter(|last| last.starts_with('@'))?;
        let is_named = |child: &&'d Directive| child.name == "location" && child.argument() == name;
        let named = server.block.children().iter().find(is_named)?;
        named.mark(Fate::Translated);
        Some((named, server.scope.inner(named.children())))
    }

    /// The upstream, or a response for what the gateway does not do. Whether requests are forwarded.
    fn set_handler(&mut self, section: &mut Section, block: &'d Directive, scope: &Scope<'d>, kind: Kind) -> bool {
        if let Some(pass) = scope.own("proxy_pass").or_else(|| scope.own("grpc_pass")) {
            let Some(target) = Target::parse(pass.argument()) else {
                self.note_at(section, Effect::LeftOut, pass, "the gateway has no variables in addresses of servers");
                section.set("respond", table([("status", 503.into())]));
                return false;
            };
            pass.mark(Fate::Translated);
            let upstream = self.upstream(&target, pass, scope, section);
            section.set("upstream", upstream);
            self.set_path(section, block, scope, &target, kind);
            self.set_locations(section, pass, scope);
            return true;
        }
        let other = OTHER_HANDLERS.iter().find_map(|name| scope.own(name));
        if let Some(other) = other {
            self.note_at(section, Effect::LeftOut, other, "the gateway speaks HTTP to servers");
            section.set("respond", table([("status", 503.into())]));
            return false;
        }
        if let Some(status) = scope.own("stub_status") {
            self.note_at(section, Effect::LeftOut, status, "the metrics are at the `admin` address");
        }
        FILE_HANDLERS.iter().filter_map(|name| scope.own(name)).for_each(|directive| {
            self.note_at(section, Effect::LeftOut, directive, "the gateway serves no files");
        });
        section.set("respond", table([("status", 404.into())]));
        false
    }

    /// `proxy_redirect`, by default of absolute URLs of the server, and changes of cookies.
    fn set_locations(&mut self, section: &mut Section, pass: &'d Directive, scope: &Scope<'d>) {
        let changes = scope.all(&["proxy_redirect", "proxy_cookie_domain", "proxy_cookie_path"]);
        changes.iter().for_each(|change| change.mark(Fate::Translated));
        let is_explicit = changes.iter().any(|change| !["off", "default"].contains(&change.argument()));
        let is_off = changes.iter().any(|change| change.name == "proxy_redirect" && change.argument() == "off");
        let upstream =
            self.gateway.upstreams.iter().find(|known| section.get("upstream") == Some(&known.name.as_str().into()));
        let sends_host = upstream.is_none_or(|upstream| upstream.section.get("host").is_none());
        if is_explicit {
            section.set("rewrite_location", true);
        } else if !is_off && !sends_host && pass.name == "proxy_pass" {
            match ["strip_prefix", "replace_prefix", "rewrite"].iter().any(|change| section.get(change).is_some()) {
                // As the server sees them, and nginx does not change.
                true => self.note_once(Effect::Differs, pass, "the host in `Location` is not replaced, because `rewrite_location` of the route would change paths, too"),
                false => section.set("rewrite_location", true),
            }
        }
    }

    /// The path that is sent to the server.
    fn set_path(
        &mut self,
        section: &mut Section,
        block: &'d Directive,
        scope: &Scope<'d>,
        target: &Target,
        kind: Kind,
    ) {
        let rewrites: Vec<&'d Directive> = scope.levels.last().map_or_else(Vec::new, |level| {
            let is_left = |directive: &&&Directive| directive.name == "rewrite" && directive.fate.get() == Fate::Unread;
            level.iter().filter(is_left).copied().collect()
        });
        if let [rewrite] = rewrites[..] {
            let flag = rewrite.arguments.get(2).map_or("", String::as_str);
            let to = rewrite.arguments.get(1).map_or("", String::as_str);
            let is_redirect = matches!(flag, "permanent" | "redirect");
            if let Some((from, to)) = prefix_rewrite(rewrite.argument(), to).filter(|_| !is_redirect) {
                rewrite.mark(Fate::Translated);
                return set_prefix(section, &from, &to);
            }
        }
        let path = block.arguments.last().map_or("", String::as_str);
        let Some(to) = target.path else { return };
        match kind {
            Kind::Exact => {
                if to != path {
                    section.set("rewrite", literal(to.split('?').next().unwrap_or(to)));
                }
            }
            Kind::Prefix | Kind::Preferred => set_prefix(section, path, to),
            Kind::Regex => {}
        }
    }

    /// `return`, also of a server.
    fn set_return(&mut self, section: &mut Section, answer: &'d Directive, server: &Server<'d>) {
        let (first, second) = (answer.argument(), answer.arguments.get(1).map(String::as_str));
        let status = first.parse::<u64>().unwrap_or(302);
        let is_redirect = [301, 302, 303, 307, 308].contains(&status);
        let text = if first.parse::<u64>().is_ok() { second } else { Some(first) };
        if is_redirect {
            let to = text.and_then(|to| template(to, server.names.first().map(String::as_str)));
            let Some(to) = to else {
                self.note_at(section, Effect::LeftOut, answer, "the gateway has no such variable");
                section.set("respond", table([("status", 503.into())]));
                return;
            };
            answer.mark(Fate::Translated);
            let to = if to.starts_with('/') { format!("{{scheme}}://{{authority}}{to}") } else { to };
            let mut redirect = vec![("to".to_owned(), Value::from(to))];
            redirect.push(("status".to_owned(), status.into()));
            section.set("redirect", Value::Table(redirect));
            return;
        }
        answer.mark(Fate::Translated);
        let status = if status == 444 {
            self.note_at(section, Effect::Differs, answer, "the client gets a response before its connection ends");
            403
        } else {
            status.clamp(200, 599)
        };
        let mut respond = vec![("status".to_owned(), Value::Number(status))];
        if let Some(body) = text.filter(|text| !text.is_empty()) {
            if body.contains('$') {
                self.note_at(section, Effect::Differs, answer, "variables of the text are not replaced");
            }
            respond.push(("body".to_owned(), body.into()));
            let content_type = server.scope.one("default_type").map(|directive| directive.argument().to_owned());
            if let Some(content_type) = content_type.filter(|name| name != "application/octet-stream") {
                respond.push(("content_type".to_owned(), content_type.into()));
            }
        }
        section.set("respond", Value::Table(respond));
    }

    /// `allow`, `deny`, and what requires credentials: such locations are closed.
    fn set_access(&mut self, section: &mut Section, scope: &Scope<'d>) {
        let satisfy_any = scope.one("satisfy").is_some_and(|satisfy| satisfy.argument() == "any");
        let is_on = |directive: &&Directive| directive.argument() != "off";
        let authentication = directives::AUTHENTICATION.iter().find_map(|name| scope.one(name).filter(is_on));
        // With `satisfy any`, credentials decide about addresses that no directive names.
        let access = self.access(section, scope, !(satisfy_any && authentication.is_some()));
        if let Some(authentication) = authentication {
            let is_network_enough = satisfy_any && matches!(access, Access::Only(_) | Access::Except(_));
            let why = match is_network_enough {
                true => "the gateway checks no such credentials: only the networks are admitted",
                false => "the gateway checks no such credentials: the route is closed",
            };
            self.note_at(section, Effect::Stricter, authentication, why);
            if let Some(file) = scope.one("auth_basic_user_file") {
                file.mark(Fate::Translated);
            }
            if !is_network_enough {
                return section.close(403);
            }
        }
        match access {
            Access::All => {}
            Access::Closed => section.close(403),
            Access::Only(networks) => section.set("allow", one_or_list(networks)),
            Access::Except(networks) => section.denied = networks,
        }
    }

    /// The first directive that matches decides. `admits_others`: addresses that none matches are admitted.
    fn access(&mut self, section: &mut Section, scope: &Scope<'d>, admits_others: bool) -> Access {
        let (mut admitted, mut denied, mut left) = (Vec::new(), Vec::new(), Network::ALL.to_vec());
        let directives = scope.all(&["allow", "deny"]);
        // All but some networks, of which there may be thousands.
        let is_all = |directive: &&Directive| directive.argument() == "all";
        let but_last = directives.split_last().filter(|(last, _)| last.name == "allow" && is_all(last));
        let is_exclusion = (admits_others || but_last.is_some())
            && but_last
                .map_or(&directives[..], |(_, others)| others)
                .iter()
                .all(|directive| directive.name == "deny" && !is_all(directive));
        for directive in &directives {
            let networks = match directive.argument() {
                "all" => Network::ALL.to_vec(),
                "unix:" if directive.name == "allow" => {
                    self.note_at(section, Effect::Stricter, directive, "callers of Unix sockets are in no list");
                    continue;
                }
                "unix:" => continue,
                text => match Network::parse(text) {
                    Some(network) => vec![network],
                    None if directive.name == "allow" => {
                        self.note_at(section, Effect::Stricter, directive, "it is no network");
                        continue;
                    }
                    None => {
                        self.note_at(section, Effect::NotEnforced, directive, "it is no network");
                        continue;
                    }
                },
            };
            directive.mark(Fate::Translated);
            if is_exclusion {
                denied.extend(networks.into_iter().filter(|_| directive.name == "deny"));
                continue;
            }
            for network in networks {
                let decided = if directive.name == "allow" { &mut admitted } else { &mut denied };
                decided.extend(intersection(&left, &network));
                left = difference(&left, &network);
            }
        }
        if admits_others {
            admitted.extend(left);
        }
        let is_shorter =
            is_exclusion || admits_others && admitted.len() > LISTED_NETWORKS && denied.len() < admitted.len();
        let listed = if is_shorter { &mut denied } else { &mut admitted };
        listed.sort();
        listed.dedup();
        if listed.len() > NETWORKS_MAX {
            let why = "the lists of the location have more than 10,000 networks: the route is closed";
            directives.last().into_iter().for_each(|last| self.note_at(section, Effect::Stricter, last, why));
            return Access::Closed;
        }
        let texts = || listed.iter().map(ToString::to_string).collect();
        match is_shorter {
            true if listed.is_empty() => Access::All,
            true => Access::Except(texts()),
            false if listed.is_empty() => Access::Closed,
            false if listed[..] == Network::ALL => Access::All,
            false => Access::Only(texts()),
        }
    }

    /// Sizes and times of a location that differ from those of all.
    fn set_limits(&mut self, section: &mut Section, scope: &Scope<'d>) {
        let own = |name: &str| {
            let outer = self.outer.one(name);
            scope.one(name).filter(|directive| !outer.is_some_and(|outer| std::ptr::eq(outer, *directive)))
        };
        if let Some((body, bytes)) = own("client_max_body_size").and_then(|body| Some((body, size(body.argument())?))) {
            body.mark(Fate::Translated);
            section.set("max_body", if bytes == 0 { "unlimited".into() } else { size_text(bytes) });
        }
        let mut timeouts = Vec::new();
        for (name, setting) in [
            ("proxy_connect_timeout", "connect"),
            ("proxy_read_timeout", "response_head"),
            ("proxy_read_timeout", "body"),
        ] {
            if let Some((directive, ms)) = own(name).and_then(|own| Some((own, duration(own.argument())?)))
                && ms > 0
            {
                directive.mark(Fate::Translated);
                timeouts.push((setting.to_owned(), Value::from(duration_text(ms.min(86_400_000)))));
            }
        }
        if let Some(send) = scope.one("proxy_send_timeout") {
            send.mark(Fate::Translated);
        }
        if !timeouts.is_empty() {
            section.set("timeouts", Value::Table(timeouts));
        }
    }
}

/// Whether one of these locations has limits or access rules of its own.
fn any_restricts(blocks: &[Directive]) -> bool {
    let mut locations = blocks.iter().filter(|block| block.name == "location");
    locations.any(|block| restricts(block) || any_restricts(block.children()))
}

/// Whether a location has limits or access rules of its own.
fn restricts(block: &Directive) -> bool {
    const OTHERS: [&str; 4] = ["return", "internal", "limit_except", "client_max_body_size"];
    let is_restriction = |name: &str| directives::limits_access(name) || OTHERS.contains(&name);
    block.children().iter().any(|child| is_restriction(&child.name))
}

fn set_rules(section: &mut Section, rules: Vec<String>) {
    if rules.is_empty() {
        return;
    }
    // Behind the upstream, as in the documentation.
    let place = section.settings.iter().position(|(name, _)| name == "upstream").map_or(0, |place| place + 1);
    section.settings.insert(place, ("rules".to_owned(), rules.into()));
}

/// Replaces a prefix of the path. `from` and `to` may end with a `/`.
fn set_prefix(section: &mut Section, from: &str, to: &str) {
    if from == to {
        return;
    }
    let (from, to) = match (from.strip_suffix('/'), to.strip_suffix('/')) {
        (Some(from), Some(to)) => (from, to),
        _ => (from, to),
    };
    match (from, to) {
        ("", to) => section.set("replace_prefix", table([("from", "/".into()), ("to", format!("{to}/").into())])),
        (from, "" | "/") => section.set("strip_prefix", literal(from)),
        (from, to) => {
            section.set("replace_prefix", table([("from", literal(from).into()), ("to", literal(to).into())]))
        }
    }
}

/// The prefixes of `rewrite ^/api/(.*)$ /v1/$1`.
fn prefix_rewrite(from: &str, to: &str) -> Option<(String, String)> {
    let from = from.strip_prefix('^')?;
    let from = ["(.*)$", "(.*)", "(.+)$", "(.+)"].iter().find_map(|end| from.strip_suffix(end))?;
    let to = to.strip_suffix("$1")?;
    let is_plain = |text: &str| !text.contains(['(', '[', '$', '*', '+', '?', '\\', '|']) && text.starts_with('/');
    (is_plain(from) && is_plain(to) && from.ends_with('/') == to.ends_with('/'))
        .then(|| (from.to_owned(), to.to_owned()))
}

/// Removes patterns that nginx never uses, because a regular expression precedes them.
fn remove_unreachable(locations: &mut [Location], gateway: &mut crate::gateway::Gateway) {
    let regexes: Vec<(usize, Vec<String>)> = locations
        .iter()
        .enumerate()
        .filter(|(_, location)| location.kind == Kind::Regex)
        .map(|(index, location)| (index, location.patterns.clone()))
        .collect();
    for (index, location) in locations.iter_mut().enumerate() {
        let precedes = |regex: usize| match location.kind {
            Kind::Exact | Kind::Preferred => false,
            Kind::Prefix => true,
            Kind::Regex => regex < index,
        };
        let before = location.patterns.len();
        location.patterns.retain(|pattern| {
            !regexes
                .iter()
                .any(|(regex, patterns)| precedes(*regex) && patterns.iter().any(|outer| covers(outer, pattern)))
        });
        if location.patterns.len() < before {
            let text = format!("`{}`: a regular expression precedes it", location.block.text());
            if location.patterns.is_empty() {
                location.block.mark(Fate::LeftOut);
            }
            gateway.note(Effect::LeftOut, &location.block.position, text);
        }
    }
}

/// Of each pattern that several locations have, keeps that of the lowest rank. Locations without a rank keep theirs.
fn remove_repeated(locations: &mut [Location], rank: impl Fn(&Location) -> Option<usize>) {
    let mut order: Vec<(usize, usize)> =
        locations.iter().enumerate().filter_map(|(index, location)| Some((rank(location)?, index))).collect();
    order.sort_unstable();
    let mut taken: Vec<String> = Vec::new();
    for (_, index) in order {
        locations[index].patterns.retain(|pattern| !taken.contains(pattern));
        taken.extend(locations[index].patterns.iter().cloned());
    }
}

/// nginx takes regular expressions before prefixes, and the first of several; the gateway takes the more specific route. Where these
/// differ, the location that nginx takes gets a pattern for the paths that both match.
fn add_common_patterns(locations: &mut [Location], gateway: &mut crate::gateway::Gateway) {
    let of_kind =
        |kind: Kind| -> Vec<usize> { (0..locations.len()).filter(|at| locations[*at].kind == kind).collect() };
    let (regexes, prefixes) = (of_kind(Kind::Regex), of_kind(Kind::Prefix));
    // From the last one on, so that its common patterns with others are compared as well.
    let of_regex = regexes.iter().rev().map(|at| {
        let later = regexes.iter().filter(|other| *other > at);
        (*at, prefixes.iter().chain(later).copied().collect::<Vec<_>>())
    });
    let of_preferred = of_kind(Kind::Preferred).into_iter().map(|at| (at, regexes.clone()));
    let pairs: Vec<(usize, Vec<usize>)> = of_regex.chain(of_preferred).collect();
    for (at, others) in pairs {
        let (mut added, mut unknown) = (Vec::new(), None);
        let location = &locations[at];
        // The longest prefix decides whether regular expressions count.
        let longer = prefixes.iter().filter(|_| location.kind == Kind::Preferred).map(|at| &locations[*at]);
        let longer: Vec<&String> = longer
            .filter(|prefix| prefix.path().len() > location.path().len())
            .flat_map(|prefix| &prefix.patterns)
            .collect();
        for other in others.into_iter().map(|other| &locations[other]) {
            for (pattern, theirs) in
                location.patterns.iter().flat_map(|one| other.patterns.iter().map(move |two| (one, two)))
            {
                match common(pattern, theirs) {
                    Common::Pattern(both) => {
                        let is_new = precedes(theirs, pattern) && both != *pattern && !added.contains(&both);
                        if is_new && !longer.iter().any(|longer| covers(longer, &both)) {
                            added.push(both);
                        }
                    }
                    Common::Unknown => unknown = Some(other.block.text()),
                    Common::Nothing => {}
                }
            }
        }
        if location.patterns.len() + added.len() > PATTERNS_MAX {
            added.clear();
            unknown = Some("other locations".to_owned());
        }
        let location = &mut locations[at];
        if let Some(other) = unknown.filter(|_| restricts(location.block)) {
            let text = format!("`{}`: some of its paths have the route of `{other}`", location.block.text());
            let note = gateway.placed_note(Effect::NotEnforced, &location.block.position, text);
            location.section.comment(note);
        }
        location.patterns.extend(added);
    }
}
