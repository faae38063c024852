//! The rules of Traefik's routers: matchers with `&&`, `||` and parentheses, as alternatives that routes can express.

use crate::gateway::Value;
use crate::network::{Network, networks_of_both};
use crate::path::{covers, literal, of_regex, prefix, widened};

/// Most alternatives of one rule.
const ALTERNATIVES_MAX: usize = 64;
const DEPTH_MAX: usize = 32;

/// What one route matches.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Alternative {
    pub hosts: Vec<String>,
    /// Empty: any path.
    pub paths: Vec<String>,
    pub methods: Vec<String>,
    pub headers: Vec<(String, Value)>,
    pub query: Vec<(String, Value)>,
    pub networks: Vec<String>,
    /// Those of `paths` that match how a prefix goes on within a segment.
    pub within: Vec<String>,
    /// Why routes cannot express it. Then the conditions above match further requests.
    pub unknown: Option<String>,
}

/// The alternatives of a rule, without those that match nothing, or what is wrong with it.
pub fn parse(text: &str) -> Result<Vec<Alternative>, String> {
    let mut parser = RuleParser { rest: text.trim(), depth: 0 };
    let alternatives = parser.any()?;
    match parser.rest {
        "" => Ok(alternatives),
        rest => Err(format!("`{}` is not understood", rest.chars().take(20).collect::<String>())),
    }
}

struct RuleParser<'t> {
    rest: &'t str,
    depth: usize,
}

impl<'t> RuleParser<'t> {
    fn take(&mut self, sign: &str) -> bool {
        self.rest = self.rest.trim_start();
        let rest = self.rest.strip_prefix(sign);
        self.rest = rest.unwrap_or(self.rest).trim_start();
        rest.is_some()
    }

    fn any(&mut self) -> Result<Vec<Alternative>, String> {
        let mut alternatives = self.all()?;
        while self.take("||") {
            alternatives.extend(self.all()?);
        }
        match alternatives.len() <= ALTERNATIVES_MAX {
            true => Ok(alternatives),
            false => Err("it has too many alternatives".to_owned()),
        }
    }

    fn all(&mut self) -> Result<Vec<Alternative>, String> {
        let mut alternatives = self.one()?;
        while self.take("&&") {
            let others = self.one()?;
            let both = |one: &Alternative| others.iter().filter_map(|other| one.and(other)).collect::<Vec<_>>();
            alternatives = alternatives.iter().flat_map(both).collect();
            if alternatives.len() > ALTERNATIVES_MAX {
                return Err("it has too many alternatives".to_owned());
            }
        }
        Ok(alternatives)
    }

    fn one(&mut self) -> Result<Vec<Alternative>, String> {
        if self.take("!") {
            self.depth += 1;
            if self.depth > DEPTH_MAX {
                return Err("it has too many negations".to_owned());
            }
            self.one()?;
            self.depth -= 1;
            return Ok(vec![Alternative::unknown("routes have no negation".to_owned())]);
        }
        if self.take("(") {
            self.depth += 1;
            if self.depth > DEPTH_MAX {
                return Err("it has too many parentheses".to_owned());
            }
            let alternatives = self.any()?;
            self.depth -= 1;
            return if self.take(")") { Ok(alternatives) } else { Err("a parenthesis is not closed".to_owned()) };
        }
        let end = self.rest.find('(').ok_or("a matcher without arguments")?;
        let name = self.rest[..end].trim();
        self.rest = &self.rest[end + 1..];
        let arguments = self.arguments()?;
        Ok(vec![matcher(name, &arguments)])
    }

    fn arguments(&mut self) -> Result<Vec<&'t str>, String> {
        let mut arguments = Vec::new();
        loop {
            let quote = self.rest.trim_start().chars().next().filter(|c| ['`', '"', '\''].contains(c));
            let quote = quote.ok_or("an argument without quotes")?;
            let (argument, rest) = self.rest.trim_start()[1..].split_once(quote).ok_or("a quote is not closed")?;
            arguments.push(argument);
            self.rest = rest;
            if self.take(")") {
                return Ok(arguments);
            }
            if !self.take(",") {
                return Err("a parenthesis is not closed".to_owned());
            }
        }
    }
}

fn matcher(name: &str, arguments: &[&str]) -> Alternative {
    let owned = || arguments.iter().map(|argument| (*argument).to_owned()).collect::<Vec<_>>();
    let mut found = Alternative::default();
    match (name, arguments) {
        ("Host" | "HostHeader", _) => found.hosts = owned().iter().map(|host| host.to_lowercase()).collect(),
        ("Method", _) => found.methods = owned().iter().map(|method| method.to_uppercase()).collect(),
        ("Path", _) if arguments.iter().all(|path| !path.contains(['{', '*'])) => {
            found.paths = arguments.iter().map(|path| literal(path)).collect();
        }
        ("PathPrefix", _) if arguments.iter().all(|path| !path.contains(['{', '*'])) => {
            found.paths = arguments.iter().flat_map(|path| prefix(path)).collect();
            found.within = found.paths.iter().filter(|path| is_within(path)).cloned().collect();
        }
        ("PathRegexp", [regex]) => {
            let Some((paths, further)) = of_regex(regex) else {
                let why = format!("routes cannot express `{regex}`");
                return Alternative { paths: vec![widened(regex)], ..Alternative::unknown(why) };
            };
            found.paths = [paths, further.clone()].concat();
            found.within = further;
        }
        ("Header" | "Headers", [field, value]) => found.headers.push((field.to_lowercase(), (*value).into())),
        ("Query", [parameter, value]) => found.query.push(((*parameter).to_owned(), (*value).into())),
        ("Query", [parameter]) if !parameter.contains('=') => found.query.push(((*parameter).to_owned(), true.into())),
        ("ClientIP", _) if arguments.iter().all(|network| Network::parse(network).is_some()) => {
            found.networks = owned()
        }
        _ => return Alternative::unknown(format!("routes have no `{name}({})`", arguments.join(", "))),
    }
    found
}

/// Whether a pattern of a prefix has a segment such as `api*`.
fn is_within(pattern: &str) -> bool {
    pattern.split('/').any(|segment| segment.ends_with('*'))
}

impl Alternative {
    fn unknown(why: String) -> Alternative {
        Alternative { unknown: Some(why), ..Alternative::default() }
    }

    /// What both match; `None` if nothing does, such as for two hosts.
    fn and(&self, other: &Alternative) -> Option<Alternative> {
        let mut unknown = self.unknown.clone().or(other.unknown.clone());
        let common = |one: &[String], other: &[String]| match (one, other) {
            ([], list) | (list, []) => Some(list.to_vec()),
            (one, other) => {
                let common: Vec<String> = one.iter().filter(|item| other.contains(item)).cloned().collect();
                (!common.is_empty()).then_some(common)
            }
        };
        let hosts = common(&self.hosts, &other.hosts)?;
        let methods = common(&self.methods, &other.methods)?;
        let networks = networks_of_both(&self.networks, &other.networks)?;
        let paths = match (&self.paths[..], &other.paths[..]) {
            ([], list) | (list, []) => list.to_vec(),
            (one, other) => {
                let within = |list: &[String], path: &String| list.iter().any(|outer| covers(outer, path));
                let narrow =
                    one.iter().filter(|path| within(other, path)).chain(other.iter().filter(|path| within(one, path)));
                let mut paths: Vec<String> = narrow.cloned().collect();
                paths.dedup();
                if paths.is_empty() {
                    unknown.get_or_insert_with(|| "two paths at once".to_owned());
                }
                paths
            }
        };
        Some(Alternative {
            hosts,
            paths,
            methods,
            headers: [self.headers.clone(), other.headers.clone()].concat(),
            query: [self.query.clone(), other.query.clone()].concat(),
            networks,
            within: [self.within.clone(), other.within.clone()].concat(),
            unknown,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(rule: &str) -> String {
        let one = |found: &Alternative| match &found.unknown {
            Some(why) => why.clone(),
            None => format!(
                "{}|{}|{}|{}",
                found.hosts.join(","),
                found.paths.join(","),
                found.methods.join(","),
                found.headers.len()
            ),
        };
        match parse(rule) {
            Ok(all) => all.iter().map(one).collect::<Vec<_>>().join(" or "),
            Err(why) => why,
        }
    }

    #[test]
    fn rules_are_alternatives() {
        assert_eq!(shown("Host(`a.b`) && PathPrefix(`/x/`)"), "a.b|/x/{*rest}||0");
        assert_eq!(
            shown("(Host(`a`) || Host(`B`, `c`)) && (Path(`/x`) && Method(`get`) || Header(`X-A`, \"1\"))"),
            "a|/x|GET|0 or a|||1 or b,c|/x|GET|0 or b,c|||1"
        );
        assert_eq!(shown("PathPrefix(`/a`) && Path(`/a/b`)"), "|/a/b||0");
        for (rule, why) in [
            ("!Host(`a`)", "routes have no negation"),
            ("ClientIP(`10.0.0.0/33`)", "routes have no `ClientIP(10.0.0.0/33)`"),
            ("ClientIP(`10.0.0.0/8`) && ClientIP(`192.0.2.1`)", ""),
            ("Host(`a`) && (Host(`b`) || !Path(`/`) && Host(`A`))", "routes have no negation"),
            ("Method(`GET`) && Method(`POST`)", ""),
            ("ClientIP(`10.0.0.0/8`) && Query(`v`, `2`) && Query(`debug`)", "|||0"),
            ("Host(`a`) Path(`/`)", "`Path(`/`)` is not understood"),
            ("Host(`a", "a quote is not closed"),
            ("(Host(`a`)", "a parenthesis is not closed"),
            ("", "a matcher without arguments"),
            ("Path(`/{id}`)", "routes have no `Path(/{id})`"),
            (
                "PathRegexp(`^/a/\\d`) || !Method(`GET`) || Path(`/b`)",
                "routes cannot express `^/a/\\d` or routes have no negation or |/b||0",
            ),
            ("Host(`a`) && (!Path(`/`) || Path(`/c`))", "routes have no negation or a|/c||0"),
        ] {
            assert_eq!(shown(rule), why);
        }
    }
}
