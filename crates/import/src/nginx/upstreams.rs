//! Servers that `proxy_pass` and `grpc_pass` name, and `upstream` blocks.

use std::collections::BTreeMap;

use super::keys::hash_key;
use super::syntax::{Directive, Fate};
use super::{Importer, Scope, duration, heading, template};
use crate::gateway::{Named, Section, Value, table, table_name, unused_name};
use crate::rate::duration_text;
use crate::source::Effect;

/// The `upstream` blocks, and the upstreams that were made.
#[derive(Default)]
pub struct Upstreams<'d> {
    blocks: BTreeMap<String, &'d Directive>,
    /// By target and `host`.
    made: BTreeMap<(String, String), String>,
}

/// The parts of a URL of `proxy_pass`.
pub struct Target<'t> {
    pub scheme: &'t str,
    pub authority: &'t str,
    /// From the `/` on; `None` without one.
    pub path: Option<&'t str>,
}

impl<'t> Target<'t> {
    pub fn parse(url: &'t str) -> Option<Target<'t>> {
        if url.contains('$') {
            return None;
        }
        let (scheme, rest) = url.split_once("://").unwrap_or(("grpc", url));
        if let Some(socket) = rest.strip_prefix("unix:") {
            let end = socket.find(':').unwrap_or(socket.len());
            let path = socket[end..].strip_prefix(':').filter(|path| !path.is_empty());
            return Some(Target { scheme, authority: &rest[..end + 5], path });
        }
        let end = rest.find('/').unwrap_or(rest.len());
        let path = Some(&rest[end..]).filter(|path| !path.is_empty());
        (end > 0).then_some(Target { scheme, authority: &rest[..end], path })
    }
}

impl<'d> Upstreams<'d> {
    pub fn new(http: &Scope<'d>) -> Upstreams<'d> {
        let blocks = http.levels[0].iter().filter(|directive| directive.name == "upstream");
        Upstreams { blocks: blocks.map(|block| (block.argument().to_owned(), *block)).collect(), made: BTreeMap::new() }
    }
}

impl<'d> Importer<'d> {
    /// The name of the upstream of a location.
    pub(super) fn upstream(
        &mut self,
        target: &Target,
        pass: &'d Directive,
        scope: &Scope<'d>,
        section: &mut Section,
    ) -> String {
        let host = self.host_field(target, scope, section);
        let id = (format!("{}://{}", target.scheme, target.authority), host.clone());
        if let Some(name) = self.upstreams.made.get(&id) {
            return name.clone();
        }
        let block = self.upstreams.blocks.get(target.authority).copied();
        let name = match (block, target.authority.split_once(':')) {
            (Some(_), _) => table_name(target.authority),
            (None, Some(("unix", socket))) => table_name(socket.rsplit('/').next().unwrap_or("socket")),
            (None, Some((host, port))) if host.starts_with(|c: char| c.is_ascii_digit() || c == '[') => {
                format!("port-{}", table_name(port.rsplit(':').next().unwrap_or(port)))
            }
            (None, Some((host, _))) => table_name(host),
            (None, None) => table_name(target.authority),
        };
        let name = unused_name(&name, &self.gateway.upstreams);
        let mut upstream = Section::default();
        match block {
            Some(block) => self.fill_from_block(&mut upstream, block, target.scheme),
            None => upstream.set("servers", vec![server_url(target.scheme, target.authority)]),
        }
        if target.scheme.starts_with("grpc") {
            upstream.set("protocol", "http2");
        }
        if host != "keep" {
            upstream.set("host", host.as_str());
        }
        self.set_tls(&mut upstream, target, scope, host.as_str(), pass);
        self.upstreams.made.insert(id, name.clone());
        self.gateway.upstreams.push(Named { name: name.clone(), section: upstream, ..Named::default() });
        name
    }

    /// The value of `host`: `keep` if the location sends the client's Host.
    fn host_field(&mut self, target: &Target, scope: &Scope<'d>, section: &mut Section) -> String {
        let default = match self.upstreams.blocks.contains_key(target.authority) {
            true => target.authority.to_owned(),
            false => "server".to_owned(),
        };
        let fields = scope.all(&["proxy_set_header", "grpc_set_header"]);
        let Some(field) = fields.into_iter().find(|field| field.argument().eq_ignore_ascii_case("host")) else {
            return default;
        };
        field.mark(Fate::Translated);
        let value = field.arguments.get(1).map_or("", String::as_str);
        match value {
            "$host" | "$http_host" | "$host:$server_port" | "$http_host:$server_port" => "keep".to_owned(),
            "$proxy_host" => default,
            name if !name.contains('$') && !name.is_empty() => name.to_owned(),
            _ => {
                let why = "the client's Host is sent";
                self.note_at(section, Effect::Differs, field, why);
                "keep".to_owned()
            }
        }
    }

    fn fill_from_block(&mut self, section: &mut Section, block: &'d Directive, scheme: &str) {
        block.mark(Fate::Translated);
        section.comment(heading(&format!("upstream {}", block.argument()), &block.position));
        let mut servers: Vec<Value> = Vec::new();
        let mut failures = Vec::new();
        for server in block.children().iter().filter(|child| child.name == "server") {
            if server.has("down") {
                self.note_at(section, Effect::LeftOut, server, "the server is down");
                continue;
            }
            server.mark(Fate::Translated);
            let url = server_url(scheme, server.argument());
            let weight = server.option("weight").and_then(|weight| weight.parse::<u64>().ok());
            let mut settings = vec![("url".to_owned(), Value::from(url.as_str()))];
            settings.extend(
                weight.filter(|weight| *weight != 1).map(|weight| ("weight".to_owned(), weight.min(1000).into())),
            );
            settings.extend(server.has("backup").then(|| ("backup".to_owned(), true.into())));
            servers.push(if settings.len() == 1 { url.into() } else { Value::Table(settings) });
            failures.push((server.option("max_fails"), server.option("fail_timeout")));
            if let Some(most) =
                server.option("max_conns").and_then(|most| most.parse::<u64>().ok()).filter(|most| *most > 0)
            {
                let known = match section.get("max_connections") {
                    Some(Value::Number(known)) => *known,
                    _ => most,
                };
                section.set("max_connections", most.min(known));
            }
        }
        let count = servers.len();
        section.settings.insert(0, ("servers".to_owned(), Value::List(servers)));
        self.set_balance(section, block, count);
        if count > 1 && failures.windows(2).all(|pair| pair[0] == pair[1]) {
            set_ejection(section, failures[0]);
        }
        let servers_of_block = block.children().iter().filter(|child| child.name == "server" && !child.has("down"));
        for (options, effect) in [
            (&["max_conns"][..], Effect::Stricter),
            (&["max_fails", "fail_timeout"], Effect::Differs),
            (&["slow_start"], Effect::Differs),
        ] {
            let values =
                |server: &Directive| options.iter().map(|name| server.option(name).map(str::to_owned)).collect();
            let all: Vec<(&'d Directive, Vec<Option<String>>)> =
                servers_of_block.clone().map(|server| (server, values(server))).collect();
            let is_other = |(_, values): &&(_, Vec<Option<String>>)| *values != all[0].1;
            if let Some((server, _)) = all.iter().find(is_other) {
                let why = match effect {
                    Effect::Stricter => "all servers have the smallest limit",
                    _ if options == ["slow_start"] => "all servers have the same time",
                    _ => "all servers have the default ejection, because they differ",
                };
                self.note_at(section, effect, server, &format!("{}: {why}", options.join(", ")));
            }
        }
        let slow_start = servers_of_block.filter_map(|server| server.option("slow_start").and_then(duration)).max();
        if let Some(ms) = slow_start.filter(|ms| *ms > 0 && count > 1) {
            section.set("slow_start", duration_text(ms.min(86_400_000)));
        }
    }

    fn set_balance(&mut self, section: &mut Section, block: &'d Directive, servers: usize) {
        let methods = ["least_conn", "ip_hash", "hash", "random", "least_time"];
        let Some(method) = block.children().iter().find(|child| methods.contains(&&*child.name)) else {
            if servers > 1 {
                section.set("balance", "round-robin");
            }
            return;
        };
        let hash = match (method.name.as_str(), method.argument()) {
            ("ip_hash", _) => "ip".to_owned(),
            ("hash", key) => match hash_key(key) {
                Some(part) => part,
                None => return self.note_at(section, Effect::Differs, method, "servers are chosen by their load"),
            },
            // The default of the gateway.
            _ => return method.mark(Fate::Translated),
        };
        method.mark(Fate::Translated);
        section.set("balance", table([("hash", hash.into())]));
    }

    fn set_tls(&mut self, section: &mut Section, target: &Target, scope: &Scope<'d>, host: &str, pass: &'d Directive) {
        if !matches!(target.scheme, "https" | "grpcs") {
            return;
        }
        let mut tls = Vec::new();
        for (name, setting) in [
            ("proxy_ssl_trusted_certificate", "ca"),
            ("proxy_ssl_certificate", "certificate"),
            ("proxy_ssl_certificate_key", "private_key"),
        ] {
            let Some(directive) = scope.one(name) else { continue };
            match self.readable_file(directive.argument()) {
                Some(path) => {
                    directive.mark(Fate::Translated);
                    tls.push((setting.to_owned(), Value::from(path)));
                }
                None => self.note_at(section, Effect::LeftOut, directive, "the file cannot be read here"),
            }
        }
        let name = scope.one("proxy_ssl_name").map(|directive| {
            directive.mark(Fate::Translated);
            directive.argument().to_owned()
        });
        let is_block = self.upstreams.blocks.contains_key(target.authority);
        let name = name.filter(|name| !name.contains('$')).or_else(|| is_block.then(|| host.to_owned()));
        if let Some(name) = name.filter(|name| !["keep", "server"].contains(&name.as_str())) {
            tls.push(("server_name".to_owned(), name.into()));
        }
        if !tls.is_empty() {
            section.set("tls", Value::Table(tls));
        }
        match scope.one("proxy_ssl_verify") {
            Some(verify) if verify.argument() == "on" => verify.mark(Fate::Translated),
            verify => {
                let why = "nginx does not verify the certificates of these servers; the gateway does. For servers with \
                           certificates of their own, name them as `tls.ca`";
                match verify {
                    Some(verify) => self.note_at(section, Effect::Stricter, verify, why),
                    None => self.note_at(section, Effect::Stricter, pass, why),
                }
            }
        }
    }

    /// `proxy_set_header` as changes of the request.
    pub(super) fn set_request_fields(&mut self, section: &mut Section, scope: &Scope<'d>, server: Option<&str>) {
        let (mut set, mut remove) = (Vec::new(), Vec::<Value>::new());
        for field in scope.all(&["proxy_set_header", "grpc_set_header"]) {
            let name = field.argument().to_lowercase();
            let value = field.arguments.get(1).map_or("", String::as_str);
            let is_made_anyway = matches!(
                name.as_str(),
                "host"
                    | "connection"
                    | "upgrade"
                    | "x-forwarded-for"
                    | "x-forwarded-proto"
                    | "x-forwarded-host"
                    | "x-request-id"
                    | "te"
                    | "content-length"
                    | "keep-alive"
            );
            if is_made_anyway {
                field.mark(Fate::Translated);
            } else if value.is_empty() {
                field.mark(Fate::Translated);
                remove.push(name.into());
            } else if let Some(value) = template(value, server) {
                field.mark(Fate::Translated);
                set.push((name, value.into()));
            } else {
                self.note_at(section, Effect::LeftOut, field, "the gateway has no such variable");
            }
        }
        section.change_fields("request_headers", remove, set);
    }

    /// `add_header` and `proxy_hide_header` as changes of the response.
    pub(super) fn set_response_fields(&mut self, section: &mut Section, scope: &Scope<'d>, server: Option<&str>) {
        let (mut add, mut remove) = (Vec::<(String, Value)>::new(), Vec::<Value>::new());
        let mut is_always = false;
        for field in scope.all(&["add_header"]) {
            let name = field.argument().to_lowercase();
            match template(field.arguments.get(1).map_or("", String::as_str), server) {
                Some(value) if !add.iter().any(|(known, _)| *known == name) && !value.is_empty() => {
                    field.mark(Fate::Translated);
                    is_always |= field.has("always");
                    add.push((name, value.into()));
                }
                _ => self.note_at(
                    section,
                    Effect::LeftOut,
                    field,
                    "the gateway has no such variable, or the field is given twice",
                ),
            }
        }
        for field in scope.all(&["proxy_hide_header"]) {
            field.mark(Fate::Translated);
            remove.push(field.argument().to_lowercase().into());
        }
        let mut changes = Vec::new();
        if !remove.is_empty() {
            changes.push(("remove".to_owned(), Value::List(remove)));
        }
        if !add.is_empty() {
            changes.push(("add".to_owned(), Value::Table(add)));
            if is_always {
                changes.push(("on".to_owned(), "all".into()));
            }
        }
        if !changes.is_empty() {
            section.set("response_headers", Value::Table(changes));
        }
    }
}

/// `max_fails` failures within `fail_timeout` exclude a server for as long. `max_fails=1` is the default of nginx.
fn set_ejection(section: &mut Section, (fails, timeout): (Option<&str>, Option<&str>)) {
    match fails.and_then(|fails| fails.parse::<u64>().ok()) {
        Some(0) => section.set("ejection", false),
        Some(fails) => {
            let mut ejection = vec![("failures".to_owned(), Value::Number(fails.min(1000)))];
            if let Some(ms) = timeout.and_then(duration).filter(|ms| *ms > 0 && *ms != 10_000) {
                ejection.push(("time".to_owned(), duration_text(ms).into()));
                if ms > 300_000 {
                    ejection.push(("max_time".to_owned(), duration_text(ms).into()));
                }
            }
            section.set("ejection", Value::Table(ejection));
        }
        None => {}
    }
}

fn server_url(scheme: &str, authority: &str) -> String {
    if authority.starts_with("unix:") {
        return authority.to_owned();
    }
    let scheme = if scheme.ends_with('s') { "https" } else { "http" };
    format!("{scheme}://{authority}")
}
