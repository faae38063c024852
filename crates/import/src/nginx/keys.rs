//! What a zone counts by: variables, also those of `map` and `geo`.

use super::syntax::{Directive, Fate};
use crate::network::Network;

pub const IPV6_NETWORKS: &str = "rules by address count IPv6 by /64 network; `ipv6_prefix = 128` counts each address";

const PLANS: &str = "; limits of some keys are plans, see docs/guides/plans.md";

/// A key of a zone.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct KeyPlan {
    /// Empty: one counter for all requests.
    pub parts: Vec<String>,
    /// As the setting has it: `skip`, or the parts that are always present.
    pub on_missing: Option<Vec<String>>,
    /// Requests that are not counted.
    pub exemptions: Vec<String>,
    /// If not empty, only requests with these methods are counted.
    pub methods: Vec<String>,
    /// Each server has counters of its own.
    pub per_server: bool,
    /// In what the key is stricter.
    pub stricter: Vec<String>,
}

/// The `map` and `geo` blocks.
#[derive(Default)]
pub struct Variables<'d> {
    pub maps: Vec<&'d Directive>,
    pub geos: Vec<&'d Directive>,
}

/// A text in which variables stand, as parts.
#[derive(PartialEq, Eq, Debug)]
pub enum Part<'t> {
    Text(&'t str),
    Variable(&'t str),
}

pub fn parts(text: &str) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        let after = &rest[at + 1..];
        let (name, end) = match after.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            Some((name, end)) => (name, end),
            None => {
                let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
                after.split_at(after.find(|c| !is_name(c)).unwrap_or(after.len()))
            }
        };
        if at > 0 {
            parts.push(Part::Text(&rest[..at]));
        }
        parts.push(Part::Variable(name));
        rest = end;
    }
    if !rest.is_empty() {
        parts.push(Part::Text(rest));
    }
    parts
}

/// A key part for a variable of nginx, and whether requests may lack it.
fn key_part(variable: &str) -> Option<(String, bool)> {
    let name = |prefix: &str| variable.strip_prefix(prefix).filter(|name| !name.is_empty());
    Some(match variable {
        "binary_remote_addr" | "remote_addr" | "http_x_forwarded_for" | "http_x_real_ip" | "proxy_protocol_addr" => {
            ("ip".to_owned(), false)
        }
        "host" | "http_host" => ("host".to_owned(), false),
        "uri" | "document_uri" | "request_uri" => ("path".to_owned(), false),
        "request_method" => ("method".to_owned(), false),
        "remote_user" => ("basic-user".to_owned(), true),
        "ssl_client_fingerprint" | "ssl_client_s_dn" | "ssl_client_serial" => ("client-cert".to_owned(), true),
        _ => match (name("http_"), name("cookie_"), name("arg_")) {
            (Some(field), ..) => (format!("header:{}", field.replace('_', "-")), true),
            (_, Some(cookie), _) => (format!("cookie:{cookie}"), true),
            (_, _, Some(parameter)) => (format!("query:{parameter}"), true),
            _ => return None,
        },
    })
}

/// What `balance = { hash = "…" }` has for a variable, such as `$remote_addr`.
pub fn hash_key(variable: &str) -> Option<String> {
    let (part, _) = key_part(variable.strip_prefix('$')?)?;
    let is_possible = ["ip", "path", "host"].contains(&&*part)
        || ["header:", "cookie:", "query:"].iter().any(|kind| part.starts_with(kind));
    is_possible.then_some(part)
}

/// Variables with one value for all requests to a server.
const CONSTANTS: [&str; 6] = ["server_name", "server_addr", "server_port", "hostname", "server_protocol", "scheme"];

impl KeyPlan {
    /// The key of a text with variables. Parts that requests may lack count as empty in nginx; a key that is empty as a whole is not
    /// counted.
    fn of_text(text: &str) -> Result<KeyPlan, String> {
        let mut plan = KeyPlan::default();
        let (mut present, mut optional) = (Vec::new(), Vec::new());
        let mut has_text = false;
        for part in parts(text) {
            match part {
                Part::Text(_) => has_text = true,
                Part::Variable("server_name") => plan.per_server = true,
                Part::Variable(name) if CONSTANTS.contains(&name) => has_text = true,
                Part::Variable(name) => {
                    let Some((part, may_lack)) = key_part(name) else {
                        return Err(format!("the gateway has no key part for `${name}`"));
                    };
                    match name {
                        "http_x_forwarded_for" | "http_x_real_ip" => plan.stricter.push(format!(
                            "`${name}` can be written by any client: here it is the address of the client, which \
                             `trusted_proxies` of [listen] lets proxies state"
                        )),
                        "request_uri" => plan.stricter.push("the query is no part of the key".to_owned()),
                        "binary_remote_addr" | "remote_addr" => plan.stricter.push(IPV6_NETWORKS.to_owned()),
                        _ => {}
                    }
                    let list = if may_lack { &mut optional } else { &mut present };
                    if !list.contains(&part) {
                        list.push(part);
                    }
                }
            }
        }
        if optional.is_empty() {
            plan.parts = present;
        } else if !present.is_empty() {
            plan.on_missing = Some(present.clone());
            plan.parts = present.into_iter().chain(optional).collect();
        } else if optional.len() == 1 && !has_text && !plan.per_server {
            plan.on_missing = Some(Vec::new());
            plan.parts = optional;
        } else {
            return Err("each part of this key may be missing".to_owned());
        }
        Ok(plan)
    }
}

/// The entries of a `map` or `geo` block, as pairs, without its parameters.
fn entries(block: &Directive) -> impl Iterator<Item = (&str, &str)> {
    let is_entry = |entry: &&Directive| !["hostnames", "volatile", "ranges", "proxy", "delete"].contains(&&*entry.name);
    block.children().iter().filter(is_entry).map(|entry| (entry.name.as_str(), entry.argument()))
}

impl<'d> Variables<'d> {
    fn block(blocks: &[&'d Directive], name: &str) -> Option<&'d Directive> {
        let is_named =
            |block: &&&Directive| block.arguments.last().and_then(|last| last.strip_prefix('$')) == Some(name);
        blocks.iter().find(is_named).copied()
    }

    /// The key of a zone.
    pub fn key(&self, text: &str) -> Result<KeyPlan, String> {
        let map = match parts(text).as_slice() {
            [Part::Variable(name)] => Variables::block(&self.maps, name).map(|map| (*name, map)),
            _ => None,
        };
        let Some((name, map)) = map else { return self.plain_key(text) };
        let source = map.argument();
        let [Part::Variable(source_name)] = parts(source)[..] else {
            return Err(format!("the map of `${name}` reads more than one variable"));
        };
        if map.children().iter().any(|entry| entry.name == "include") {
            return Err(format!("the map of `${name}` includes a file that was not found"));
        }
        let plan = if let Some(geo) = Variables::block(&self.geos, source_name) {
            let plan = self.key_by_network(name, geo, map)?;
            mark_all(geo);
            plan
        } else if let Some(groups) = Variables::block(&self.maps, source_name) {
            let plan = self.key_by_group(name, source, groups, map)?;
            mark_all(groups);
            plan
        } else {
            match source_name {
                "remote_addr" | "binary_remote_addr" => self.key_by_network(name, map, map)?,
                "request_method" => self.key_by_method(name, map)?,
                _ => self.key_by_value(name, source, map)?,
            }
        };
        mark_all(map);
        Ok(plan)
    }

    fn plain_key(&self, text: &str) -> Result<KeyPlan, String> {
        let computed = |part: &Part| match part {
            Part::Variable(name) => {
                Variables::block(&self.maps, name).or_else(|| Variables::block(&self.geos, name)).is_some()
            }
            Part::Text(_) => false,
        };
        match parts(text).iter().any(computed) {
            true => Err("a variable of `map` or `geo` is only a part of the key".to_owned()),
            false => KeyPlan::of_text(text),
        }
    }

    /// A map of the values of `geo`, or of addresses: networks with an empty key are exempt.
    fn key_by_network(&self, name: &str, networks: &Directive, map: &Directive) -> Result<KeyPlan, String> {
        let is_same = std::ptr::eq(networks, map);
        if networks.children().iter().any(|entry| ["ranges", "delete", "include"].contains(&&*entry.name)) {
            return Err(format!("`ranges`, `delete` and missing files in the block for `${name}` have no equivalent"));
        }
        let default = entries(map).find(|(value, _)| *value == "default").map_or("", |(_, key)| key);
        let key_of = |value: &str| -> String {
            if is_same {
                return value.to_owned();
            }
            entries(map).find(|(entry, _)| *entry == value).map_or(default, |(_, key)| key).to_owned()
        };
        let of_default = entries(networks).find(|(network, _)| *network == "default").map_or("", |(_, value)| value);
        let key = key_of(of_default);
        if key.is_empty() {
            return Err(format!("`${name}` counts only some networks"));
        }
        let mut plan = self.plain_key(&key)?;
        let mut exempt = Vec::new();
        let mut counted = Vec::new();
        for (network, value) in entries(networks).filter(|(network, _)| *network != "default") {
            let parsed = Network::parse(network);
            // A map compares texts, or the bytes of addresses.
            let is_text = |parsed: &Network| parsed.to_string() == network.to_lowercase() && !network.contains('/');
            let is_matched = |parsed: &Network| !is_same || is_text(parsed) && !networks.argument().contains("binary");
            let Some(parsed) = parsed.filter(is_matched) else {
                let what = if is_same { "the text of an address" } else { "a network" };
                plan.stricter.push(format!("`{network}` is not {what}, and not exempt"));
                continue;
            };
            match key_of(value) {
                empty if empty.is_empty() => exempt.push(parsed),
                same if same == key => counted.push(parsed),
                other => return Err(format!("`${name}` has another key, `{other}`, for `{network}`")),
            }
        }
        for network in exempt {
            match counted.iter().any(|inner| network.contains(inner) && *inner != network) {
                true => plan.stricter.push(format!("`{network}` is not exempt, because a part of it is counted")),
                false => plan.exemptions.push(network.to_string()),
            }
        }
        Ok(plan)
    }

    fn key_by_method(&self, name: &str, map: &Directive) -> Result<KeyPlan, String> {
        let default = entries(map).find(|(value, _)| *value == "default").map_or("", |(_, key)| key);
        let mut keys = entries(map).map(|(_, key)| key).filter(|key| !key.is_empty());
        let Some(key) = keys.next() else { return Err(format!("`${name}` is always empty")) };
        if keys.any(|other| other != key) {
            return Err(format!("`${name}` has several keys"));
        }
        if !default.is_empty() {
            let mut plan = self.plain_key(key)?;
            plan.stricter.push("all methods are counted".to_owned());
            return Ok(plan);
        }
        let mut plan = self.plain_key(key)?;
        for (method, key) in entries(map).filter(|(method, _)| *method != "default") {
            if method.starts_with(['~', '!']) || method.contains(['|', '*']) {
                return Err(format!("the pattern `{method}` in the map of `${name}` has no equivalent"));
            }
            if !key.is_empty() {
                plan.methods.push(method.to_uppercase());
            }
        }
        Ok(plan)
    }

    /// A map of what another map says, such as a plan. The key of its default counts all requests.
    fn key_by_group(&self, name: &str, source: &str, groups: &Directive, map: &Directive) -> Result<KeyPlan, String> {
        fn value<'b>(block: &'b Directive, of: &str) -> Option<&'b str> {
            entries(block).find(|(value, _)| *value == of).map(|(_, key)| key)
        }
        let group = value(groups, "default").unwrap_or_default();
        let is_any = |key: &&str| !key.is_empty();
        let key = value(map, group).filter(is_any).or_else(|| value(map, "default")).unwrap_or_default();
        if key.is_empty() {
            return Err(format!("`${name}` counts only some values of `{source}`{PLANS}"));
        }
        if entries(map).any(|(_, other)| !other.is_empty() && other != key) {
            return Err(format!("`${name}` has several keys{PLANS}"));
        }
        let mut plan = self.plain_key(key)?;
        plan.stricter.push(format!("requests are counted whatever `{source}` is{PLANS}"));
        Ok(plan)
    }

    /// The key of what a zone counts, if it counts only some requests.
    pub fn counted_key(&self, text: &str) -> Option<KeyPlan> {
        let [Part::Variable(name)] = parts(text)[..] else { return None };
        let map = Variables::block(&self.maps, name)?;
        let mut keys = entries(map).map(|(_, key)| key).filter(|key| !key.is_empty());
        let key = keys.next()?;
        keys.all(|other| other == key).then(|| self.plain_key(key).ok())?
    }

    /// A map of a field, cookie or parameter.
    fn key_by_value(&self, name: &str, source: &str, map: &Directive) -> Result<KeyPlan, String> {
        let of_source = KeyPlan::of_text(source);
        let default = entries(map).find(|(value, _)| *value == "default").map_or("", |(_, key)| key);
        if default.is_empty() {
            return Err(format!("`${name}` counts only some values of `{source}`{PLANS}"));
        }
        if default != source {
            let mut plan = self.plain_key(default)?;
            if entries(map).any(|(_, key)| !key.is_empty() && key != default) {
                return Err(format!("`${name}` has several keys"));
            }
            plan.stricter.push(format!("requests are counted whatever `{source}` is"));
            return Ok(plan);
        }
        let mut plan = of_source?;
        let [part] = plan.parts.as_slice() else { return Err(format!("`${name}` has several parts")) };
        let is_secret = part.starts_with("header:") || part.starts_with("cookie:");
        for (value, key) in entries(map).filter(|(value, _)| *value != "default") {
            match (value, key) {
                ("", "") => {}
                ("", key) => {
                    let fallback = self.plain_key(key)?;
                    if fallback.on_missing.is_some() || fallback.parts.is_empty() {
                        return Err(format!("`${name}` has a key that may be missing"));
                    }
                    plan.on_missing = Some(fallback.parts);
                }
                (_, key) if key == source => {}
                (value, "") if !value.starts_with(['~', '\\']) && !is_secret => {
                    plan.exemptions.push(format!("key:{value}"));
                }
                (value, "") => plan.stricter.push(match value.starts_with('~') {
                    true => format!("the values `{value}` of `{source}` are not exempt"),
                    false => format!(
                        "a value of `{source}` is not exempt, because it may be a secret: add it to `exemptions` as \
                         `key:sha256:DIGEST`"
                    ),
                }),
                (value, _) => return Err(format!("`${name}` has another key for `{value}`")),
            }
        }
        Ok(plan)
    }
}

pub fn mark_all(block: &Directive) {
    block.mark(Fate::Translated);
    block.children().iter().for_each(|entry| entry.mark(Fate::Translated));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_have_variables() {
        assert_eq!(
            parts("a$b-${c}d"),
            [Part::Text("a"), Part::Variable("b"), Part::Text("-"), Part::Variable("c"), Part::Text("d")]
        );
    }

    #[test]
    fn keys_of_variables() {
        let key = |text| KeyPlan::of_text(text).map(|plan| (plan.parts.join(" "), plan.on_missing));
        assert_eq!(key("$binary_remote_addr"), Ok(("ip".to_owned(), None)));
        assert_eq!(key("$http_x_api_key"), Ok(("header:x-api-key".to_owned(), Some(Vec::new()))));
        assert_eq!(key("$binary_remote_addr$arg_user"), Ok(("ip query:user".to_owned(), Some(vec!["ip".to_owned()]))));
        assert!(key("$http_a$cookie_b").is_err() && key("$geoip_country_code").is_err());
        assert_eq!(key("all"), Ok((String::new(), None)));
    }
}
