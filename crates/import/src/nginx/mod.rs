//! Imports nginx.conf: servers, locations, `limit_req`, `limit_conn`, `allow` and `deny`, upstreams, TLS, addresses of proxies.
//!
//! `syntax` reads the directives, `keys` what a zone counts by, `limits` makes rules of zones, `servers` selects the servers and their
//! addresses, `locations` and `redirects` make routes. Unread directives are noted as left out in the end.

mod directives;
pub mod keys;
mod limits;
mod locations;
mod redirects;
mod servers;
mod syntax;
mod upstreams;

use std::path::PathBuf;

use crate::gateway::{Gateway, Section};
use crate::network::Network;
use crate::source::{Effect, ImportError, Position};
use crate::{Files, Translated};
use limits::Limits;
use syntax::{Directive, Fate, Reader};
use upstreams::Upstreams;

/// The directives of a block and those around it, innermost last.
#[derive(Clone)]
struct Scope<'d> {
    levels: Vec<Vec<&'d Directive>>,
}

impl<'d> Scope<'d> {
    fn inner(&self, block: &'d [Directive]) -> Scope<'d> {
        let mut levels = self.levels.clone();
        levels.push(block.iter().collect());
        Scope { levels }
    }

    /// The directives of a name at the innermost level that has any.
    fn all(&self, names: &[&str]) -> Vec<&'d Directive> {
        let of_level = |level: &Vec<&'d Directive>| -> Vec<&'d Directive> {
            level.iter().filter(|directive| names.contains(&&*directive.name)).copied().collect()
        };
        self.levels.iter().rev().map(of_level).find(|found| !found.is_empty()).unwrap_or_default()
    }

    fn one(&self, name: &str) -> Option<&'d Directive> {
        self.all(&[name]).pop()
    }

    /// The directive at the innermost level, which other levels do not inherit.
    fn own(&self, name: &str) -> Option<&'d Directive> {
        self.levels.last()?.iter().find(|directive| directive.name == name).copied()
    }
}

struct Importer<'d> {
    gateway: Gateway,
    files: &'d Files<'d>,
    /// The folder of the main file.
    folder: PathBuf,
    http: Scope<'d>,
    /// Of a single server, its block: its settings hold for the gateway.
    outer: Scope<'d>,
    limits: Limits<'d>,
    upstreams: Upstreams<'d>,
    /// What was said once, and concerns all rules.
    said: Vec<String>,
}

pub fn import(files: &Files, paths: &[PathBuf]) -> Result<Translated, ImportError> {
    let mut reader = Reader::new(files);
    let mut all = Vec::new();
    for path in paths {
        all.extend(reader.read(path)?);
    }
    let inner = all.iter().filter(|directive| directive.name == "http").flat_map(Directive::children);
    let http: Vec<&Directive> = all.iter().filter(|directive| directive.name != "http").chain(inner).collect();
    all.iter().filter(|directive| directive.name == "http").for_each(|directive| directive.mark(Fate::Translated));
    let folder = paths.first().and_then(|path| path.parent()).map(PathBuf::from).unwrap_or_default();
    let http = Scope { levels: vec![http] };
    let (limits, upstreams) = (Limits::new(&http), Upstreams::new(&http));
    let servers: Vec<&Directive> = http.levels[0].iter().copied().filter(|block| block.name == "server").collect();
    let outer = if let [server] = servers[..] { http.inner(server.children()) } else { http.clone() };
    let gateway = Gateway::default();
    let mut importer = Importer { gateway, files, folder, http, outer, limits, upstreams, said: Vec::new() };
    importer.import_servers()?;
    importer.import_global_settings();
    importer.add_rules();
    let mut gateway = importer.gateway;
    crate::route_order::note_dropped(&mut gateway);
    gateway.write_refusals();
    note_unread(&all, &mut gateway);
    let (mut total, mut translated) = (0, 0);
    count(&all, &mut total, &mut translated);
    Ok(Translated { gateway, total, translated })
}

impl<'d> Importer<'d> {
    fn note(&mut self, effect: Effect, directive: &Directive, why: &str) {
        let text = format!("`{}`: {why}", directive.text());
        if effect <= Effect::LeftOut {
            directive.mark(Fate::LeftOut);
        } else {
            directive.mark(Fate::Translated);
        }
        self.gateway.note(effect, &directive.position, text);
    }

    /// Notes once what concerns all rules.
    fn note_once(&mut self, effect: Effect, directive: &Directive, why: &str) {
        if !self.said.iter().any(|said| said == why) {
            self.said.push(why.to_owned());
            self.note(effect, directive, why);
        }
    }

    /// As [`Importer::note`], with a comment in a section.
    fn note_at(&mut self, section: &mut Section, effect: Effect, directive: &Directive, why: &str) {
        let effect = section.effect(effect);
        let text = format!("`{}`: {why}", directive.text());
        if effect <= Effect::LeftOut {
            directive.mark(Fate::LeftOut);
        } else {
            directive.mark(Fate::Translated);
        }
        section.comment(self.gateway.placed_note(effect, &directive.position, text));
    }

    /// Settings of `[limits]`, `[timeouts]` and the top level.
    fn import_global_settings(&mut self) {
        let outer = self.outer.clone();
        let body = outer.one("client_max_body_size");
        match body.map_or(Some(1 << 20), |body| size(body.argument())) {
            Some(0) => {}
            Some(bytes) => {
                if body.is_none() {
                    self.gateway.limits.comment("The default of `client_max_body_size` in nginx.");
                }
                self.gateway.limits.set("max_body", size_text(bytes));
            }
            None => {}
        }
        if let Some(body) = body {
            body.mark(Fate::Translated);
        }
        for (directive, setting) in TIMEOUTS {
            let Some(directive) = outer.one(directive) else { continue };
            if let Some(value) = duration(directive.argument()).filter(|ms| *ms > 0) {
                self.gateway.timeouts.set(setting, crate::rate::duration_text(value));
                directive.mark(Fate::Translated);
            }
        }
        self.import_trusted_proxies(&self.http.clone());
    }

    /// `set_real_ip_from` of all servers: the gateway has one list for all routes, so it trusts what all of them trust.
    fn import_trusted_proxies(&mut self, http: &Scope<'d>) {
        // Those that only respond compare no addresses.
        let counts = |server: &&'d Directive| {
            server.name == "server"
                && server.fate.get() == Fate::Translated
                && !server.children().iter().any(|child| child.name == "return")
        };
        let mut scopes: Vec<Scope<'d>> =
            http.levels[0].iter().copied().filter(counts).map(|server| http.inner(server.children())).collect();
        if scopes.is_empty() {
            scopes.push(http.clone());
        }
        let lists: Vec<(String, Vec<&'d Directive>)> = scopes
            .iter()
            .map(|scope| {
                let field = scope.one("real_ip_header").map_or("x-real-ip", |header| header.argument());
                (field.to_lowercase(), scope.all(&["set_real_ip_from"]))
            })
            .collect();
        let is_recursive = scopes
            .iter()
            .all(|scope| scope.one("real_ip_recursive").is_some_and(|directive| directive.argument() == "on"));
        let network = |proxy: &Directive| Network::parse(proxy.argument());
        // The peers of Unix sockets.
        let is_unix = |proxy: &Directive| proxy.argument() == "unix:";
        let contains = |other: &Directive, proxy: &Directive| match (network(other), network(proxy)) {
            (Some(other), Some(proxy)) => other.contains(&proxy),
            _ => is_unix(other) && is_unix(proxy),
        };
        for (scope, (field, proxies)) in scopes.iter().zip(&lists) {
            for proxy in proxies.iter().filter(|proxy| proxy.fate.get() == Fate::Unread) {
                if network(proxy).is_none() && !is_unix(proxy) {
                    self.note(Effect::Stricter, proxy, "only networks can be trusted here");
                    continue;
                }
                let trusts = |(other, proxies): &(String, Vec<&'d Directive>)| {
                    other == field && proxies.iter().any(|other| contains(other, proxy))
                };
                if !lists.iter().all(trusts) {
                    let why = "not all servers trust it, or not by the same field: it is not trusted";
                    self.note(Effect::Stricter, proxy, why);
                    continue;
                }
                proxy.mark(Fate::Translated);
                let setting = if field == "proxy_protocol" { "proxy_protocol" } else { "trusted_proxies" };
                self.gateway.listen.push(setting, proxy.argument());
                match field.as_str() {
                    "proxy_protocol" => {}
                    // Only the last address of the field is read.
                    "x-forwarded-for" if !is_recursive => self.gateway.listen.set("trusted_hops", 1),
                    "x-forwarded-for" => {}
                    field => self.gateway.listen.set("client_ip", field),
                }
            }
            for name in &PROXY_DIRECTIVES[1..] {
                scope.one(name).iter().for_each(|directive| directive.mark(Fate::Translated));
            }
        }
    }
}

/// Directives about proxies, which are read when all servers are known.
const PROXY_DIRECTIVES: [&str; 3] = ["set_real_ip_from", "real_ip_header", "real_ip_recursive"];
/// Timeouts with a setting of the same meaning.
const TIMEOUTS: [(&str, &str); 4] = [
    ("proxy_connect_timeout", "connect"),
    ("proxy_read_timeout", "response_head"),
    ("client_header_timeout", "request_head"),
    ("client_body_timeout", "body"),
];

/// Notes unread directives. Within a block that is left out, only the block.
fn note_unread(directives: &[Directive], gateway: &mut Gateway) {
    for directive in directives {
        if directives::needs_nothing(directive) {
            directive.mark(Fate::Translated);
            directive.children().iter().for_each(|child| child.mark(Fate::Translated));
        }
        if directive.fate.get() == Fate::Unread {
            directive.mark(Fate::LeftOut);
            let effect = if directives::limits_access(&directive.name) { Effect::NotEnforced } else { Effect::LeftOut };
            let text = format!("`{}`: {}", directive.text(), directives::reason(&directive.name));
            gateway.note(effect, &directive.position, text);
        } else if directive.fate.get() == Fate::Translated {
            note_unread(directive.children(), gateway);
        }
    }
}

fn count(directives: &[Directive], total: &mut usize, translated: &mut usize) {
    for directive in directives {
        *total += 1;
        *translated += usize::from(directive.fate.get() == Fate::Translated);
        count(directive.children(), total, translated);
    }
}

/// Notes unread directives of a block at the section of a route, as [`note_unread`] does for all.
fn note_unread_at(block: &[Directive], gateway: &mut Gateway, section: &mut Section) {
    let is_later = |name: &str| name == "location" || PROXY_DIRECTIVES.contains(&name);
    for directive in block.iter().filter(|directive| directive.fate.get() == Fate::Unread && !is_later(&directive.name))
    {
        if directives::needs_nothing(directive) {
            directive.mark(Fate::Translated);
            continue;
        }
        directive.mark(Fate::LeftOut);
        let effect = if directives::limits_access(&directive.name) { Effect::NotEnforced } else { Effect::LeftOut };
        let effect = section.effect(effect);
        let text = format!("`{}`: {}", directive.text(), directives::reason(&directive.name));
        section.comment(gateway.placed_note(effect, &directive.position, text));
    }
}

/// A size, such as `10m`, in bytes.
fn size(text: &str) -> Option<u64> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let factor = match unit.to_ascii_lowercase().as_str() {
        "" => 1,
        "k" => 1 << 10,
        "m" => 1 << 20,
        "g" => 1 << 30,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor)
}

fn size_text(bytes: u64) -> crate::gateway::Value {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.iter().find(|(_, shift)| bytes != 0 && bytes.is_multiple_of(1 << shift)) {
        Some((unit, shift)) => format!("{}{unit}", bytes >> shift).into(),
        None => bytes.into(),
    }
}

/// A time, such as `60`, `60s`, `1m30s` or `500ms`, in milliseconds.
fn duration(text: &str) -> Option<u64> {
    let mut ms = 0_u64;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let number: u64 = rest[..digits].parse().ok()?;
        let unit = rest[digits..].find(|c: char| c.is_ascii_digit()).map_or(rest.len(), |end| digits + end);
        let factor = match rest[digits..unit].trim() {
            "ms" => 1,
            "" | "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return None,
        };
        ms = ms.checked_add(number.checked_mul(factor)?)?;
        rest = &rest[unit..];
    }
    (!text.is_empty()).then_some(ms)
}

/// A text with variables of nginx as one with variables of the gateway; `None` if a variable has no equivalent.
fn template(text: &str, server_name: Option<&str>) -> Option<String> {
    let mut result = String::new();
    for part in keys::parts(text) {
        let variable = match part {
            keys::Part::Text(text) => {
                result.push_str(&text.replace('{', "{{").replace('}', "}}"));
                continue;
            }
            keys::Part::Variable(variable) => variable,
        };
        result.push_str(match variable {
            "remote_addr" => "{client_ip}",
            "host" => "{host}",
            "http_host" => "{authority}",
            "scheme" => "{scheme}",
            "request_uri" => "{uri}",
            "uri" | "document_uri" => "{path}",
            "request_method" => "{method}",
            "args" | "query_string" => "{query}",
            "server_name" => server_name?,
            _ => return None,
        });
    }
    Some(result)
}

/// The position of a block, as part of a comment.
fn heading(what: &str, position: &Position) -> String {
    format!("{what} ({position})")
}
