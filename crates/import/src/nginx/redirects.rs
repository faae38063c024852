//! `rewrite` that redirects.

use super::syntax::{Directive, Fate};
use super::template;
use crate::gateway::{Section, table};
use crate::path::{Common, common, literal_regex};

/// Stands for `$1` while other variables are replaced.
const GROUP: &str = "\u{1}";

/// A path that is redirected, and where to.
pub struct Redirect<'d> {
    pub pattern: String,
    pub to: String,
    pub status: u64,
    pub directive: &'d Directive,
}

/// What follows the literal beginning of an expression.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Below,
    /// At least one character below it.
    Some,
    Anything,
    Nothing,
    /// Nothing or a slash.
    Slash,
}

const ENDS: [(&str, End); 10] = [
    ("/(.*)$", End::Below),
    ("/(.+)$", End::Some),
    ("/(.*)", End::Below),
    ("/(.+)", End::Some),
    ("(.*)$", End::Anything),
    ("(.*)", End::Anything),
    (".*$", End::Anything),
    (".*", End::Anything),
    ("/?$", End::Slash),
    ("$", End::Nothing),
];

/// The redirects of a block, up to what routes cannot express. For paths of several, the first one.
pub fn redirects<'d>(block: &[&'d Directive], server_name: Option<&str>) -> Vec<Redirect<'d>> {
    let deciding = block.iter().filter(|directive| ["rewrite", "return"].contains(&directive.name.as_str()));
    let mut all: Vec<Redirect<'d>> = Vec::new();
    for mut redirects in deciding.map_while(|directive| of_rewrite(directive, server_name)) {
        let directive = redirects.first().map(|redirect| redirect.directive);
        redirects.retain(|one| !all.iter().any(|earlier| earlier.covers(&one.pattern)));
        if redirects.is_empty() {
            // It is never used.
            directive.iter().for_each(|directive| directive.mark(Fate::Translated));
        }
        all.append(&mut redirects);
    }
    all
}

/// Those of `rewrite ^/old/(.*)$ /new/$1 permanent`; `None` if it does not redirect, or if routes cannot express it.
fn of_rewrite<'d>(directive: &'d Directive, server_name: Option<&str>) -> Option<Vec<Redirect<'d>>> {
    let [regex, to, flags @ ..] = &directive.arguments[..] else { return None };
    let is_url = ["http://", "https://", "$scheme://"].iter().any(|scheme| to.starts_with(scheme));
    let status = match flags.first().map_or("", String::as_str) {
        "permanent" => 301,
        "redirect" => 302,
        _ if is_url => 302,
        _ => return None,
    };
    let (to, keeps_query) = to.strip_suffix('?').map_or((to.as_str(), true), |to| (to, false));
    if directive.name != "rewrite" || to.contains('?') || !is_url && !to.starts_with('/') {
        return None;
    }
    let mut to = template(&to.replace("$1", GROUP), server_name)?;
    if !is_url {
        to.insert_str(0, "{scheme}://{authority}");
    }
    if keeps_query && !["{uri}", "{query}"].iter().any(|variable| to.contains(variable)) {
        to.push_str("?{query}");
    }
    let one = |(pattern, group): (String, &str)| Redirect { pattern, to: to.replace(GROUP, group), status, directive };
    Some(patterns(regex)?.into_iter().map(one).collect())
}

/// The patterns of an expression, with the text of its group.
fn patterns(regex: &str) -> Option<Vec<(String, &'static str)>> {
    let is_open = |regex: &&str| regex.starts_with(".*") || regex.starts_with("(.*)");
    let regex = regex.strip_prefix('^').or(Some(regex).filter(is_open))?;
    let end = ENDS.iter().find_map(|(end, kind)| Some((regex.strip_suffix(end)?, *kind, end.starts_with('('))));
    let (from, end, has_group) = end.unwrap_or((regex, End::Anything, false));
    let from = literal_regex(from)?;
    let is_path = from.starts_with('/') || from.is_empty() && (end != End::Nothing);
    let with = |end: &str| format!("{from}{end}");
    let found = is_path.then(|| match end {
        End::Below => vec![(with("/{*rest}"), "{param.rest}")],
        End::Some => {
            vec![(with("/{first}"), "{param.first}"), (with("/{first}/{*rest}"), "{param.first}/{param.rest}")]
        }
        End::Nothing => vec![(with(""), "")],
        End::Slash => {
            [("", !from.is_empty()), ("/", true)].iter().filter(|(_, is)| *is).map(|(end, _)| (with(end), "")).collect()
        }
        End::Anything if from.is_empty() => vec![(with("/{*rest}"), "/{param.rest}")],
        End::Anything if from.ends_with('/') => vec![(with("{*rest}"), "{param.rest}")],
        End::Anything => vec![
            (with("/{*rest}"), "/{param.rest}"),
            (with("{more}"), "{param.more}"),
            (with("{more}/{*rest}"), "{param.more}/{param.rest}"),
            (with(""), ""),
        ],
    })?;
    let without_group = |(pattern, group)| (pattern, if end == End::Anything && !has_group { "" } else { group });
    Some(found.into_iter().map(without_group).collect())
}

impl<'d> Redirect<'d> {
    /// The redirect of the paths that another pattern matches, too; `None` if there are none, or if no pattern is exactly for them.
    pub fn of_both(&self, other: &str) -> Option<Redirect<'d>> {
        let Common::Pattern(pattern) = common(&self.pattern, other) else { return None };
        let mut to = self.to.clone();
        let mut segments = pattern.split('/');
        for own in self.pattern.split('/') {
            let (segment, parameter) = match own {
                "{*rest}" => (segments.by_ref().collect::<Vec<_>>().join("/"), "{param.rest}"),
                _ => (segments.next()?.to_owned(), "{param.first}"),
            };
            if segment == own {
                continue;
            }
            let text = segment.replace("{*rest}", "{rest}").replace('{', "{param.");
            if text.contains('*') || !["{*rest}", "{first}"].contains(&own) {
                return None;
            }
            to = to.replace(parameter, &text);
        }
        Some(Redirect { pattern, to, ..*self })
    }

    /// Whether it redirects all paths of a pattern.
    pub fn covers(&self, pattern: &str) -> bool {
        common(pattern, &self.pattern) == Common::Pattern(pattern.to_owned())
    }

    pub fn section(&self) -> Section {
        let mut section = Section::default();
        section.set("redirect", table([("to", self.to.as_str().into()), ("status", self.status.into())]));
        section
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(regex: &str) -> String {
        let all = patterns(regex).unwrap_or_default();
        all.iter().map(|(pattern, group)| format!("{pattern}={group}")).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn expressions_with_one_group() {
        assert_eq!(shown("^/old/(.*)$"), "/old/{*rest}={param.rest}");
        assert_eq!(shown("^/old/(.+)$"), "/old/{first}={param.first} /old/{first}/{*rest}={param.first}/{param.rest}");
        assert_eq!([shown("^"), shown("^/.*$")], ["/{*rest}="; 2]);
        assert_eq!(shown("^(.*)$"), "/{*rest}=/{param.rest}");
        assert_eq!(shown("^/(.*)$"), "/{*rest}={param.rest}");
        assert_eq!(shown("^/a\\.html$"), "/a.html=");
        assert_eq!(shown("^/a/?$"), "/a= /a/=");
        assert_eq!(
            shown("^/a(.*)$"),
            "/a/{*rest}=/{param.rest} /a{more}={param.more} /a{more}/{*rest}={param.more}/{param.rest} /a="
        );
        assert_eq!([shown("/a$"), shown("^/a/(b|c)$"), shown("^/a/(.*)/b$"), shown("^$")], [""; 4]);
    }
}
