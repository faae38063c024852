//! What the rules of a configuration amount to, in plain sentences: how much they let through at
//! worst around the end of a window. And remarks on what is hardly meant: layers that never refuse anything, rules and plans that
//! apply to nothing, routes for one path only, an admin address that others reach, certificates that clients refuse, or soon will,
//! because of which revocation lists clients are, which secrets others can find out, and which paths of the upstream other rules
//! hold for than it seems.
//!
//! The arithmetic is `rule::bound`'s. This file only knows how to put it.

use std::fmt;

use super::Config;
use super::certificate::RevocationList;
use super::check::rule_windows::layers_are_comparable;
use super::diagnostics::{quoted, quoted_list};
use super::redis::is_secret_part;
use super::route::{PathParameters, Route, Segment, TrailingSlash};
use transom_limiter::burst_bound;
use transom_limiter::key::{KeyPart, OnMissing};
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Cost, OnLimit, Rule, Sharing};

const SHORT_SPAN_MS: u64 = 2000;
const DAY_S: i64 = 24 * 60 * 60;
/// A certificate that ends in so many days has not been renewed in time: most are a month before.
const EXPIRY_NOTICE_DAYS: i64 = 14;

/// One sentence about a configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LintMessage {
    /// The rule, and the plan.
    subject: Option<String>,
    text: String,
    /// Something that is hardly meant.
    pub is_note: bool,
}

impl LintMessage {
    fn statement(about: &str, text: String) -> LintMessage {
        LintMessage { subject: Some(about.to_owned()), text, is_note: false }
    }

    fn note_on(about: &str, text: String) -> LintMessage {
        LintMessage { subject: Some(about.to_owned()), text, is_note: true }
    }

    pub fn note(text: String) -> LintMessage {
        LintMessage { subject: None, text, is_note: true }
    }
}

impl fmt::Display for LintMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(about) = &self.subject {
            write!(f, "{about}: ")?;
        }
        write!(f, "{}{}", if self.is_note { "note: " } else { "" }, self.text)
    }
}

/// What there is to say, without a look at the time or the machine.
pub fn messages(config: &Config) -> Vec<LintMessage> {
    let mut messages = rule_messages(config);
    let routes = config.routes.iter().filter_map(|route| path_without_subpaths(config, route));
    messages.extend(
        routes
            .chain(exposed_admin_address(config))
            .chain(guessable_digests(config))
            .chain(paths_with_variants(config))
            .map(LintMessage::note),
    );
    messages
}

/// A line for each rule, and one for each layer that never refuses, and what applies to nothing.
fn rule_messages(config: &Config) -> Vec<LintMessage> {
    let mut messages = Vec::new();
    for (position, rule) in config.rules.iter().enumerate() {
        let routes = || config.routes.iter().filter(move |route| route.rules.contains(&position));
        let delays = routes().flat_map(|route| &route.rules).any(|other| config.rules[*other].delays());
        let same_cost = routes().all(|route| route.cost.is_none_or(|cost| cost == 1));
        let plain = rule.cost == Cost::Fixed(1) && same_cost;
        // A charge that opens a window may be given back where it is settled later, or waits.
        let opener_stays = !delays && !matches!(rule.cost, Cost::Response { .. });
        let told = RuleSummary { unit: if plain { "requests" } else { "tokens" }, opener_stays };
        let name = &rule.name;
        let plans = rule.plans.iter().map(|plan| (format!("{name}, plan {}", plan.name), &plan.layers));
        for (title, layers) in std::iter::once((name.clone(), &rule.layers)).chain(plans) {
            messages.push(LintMessage::statement(&title, told.worst_case(rule, layers) + &caveats(rule)));
            if layers_are_comparable(rule) && !delays && rule.cost != Cost::Fixed(0) {
                messages.extend(layers_that_never_refuse(layers).map(|text| LintMessage::note_on(&title, text)));
            }
        }
        if routes().next().is_none() {
            messages.push(match config.listen.admin {
                Some(_) => {
                    LintMessage::statement(name, String::from("on no route, so only the decision API counts by it"))
                }
                None => LintMessage::note_on(name, String::from("on no route, so nothing is counted by it")),
            });
        }
        if config.clients.is_none() && !rule.plans.is_empty() {
            let plans = quoted_list(rule.plans.iter().map(|plan| plan.name.as_str()), "and");
            let text = format!("no client is on {plans}, because there is no `[clients]`");
            messages.push(LintMessage::note_on(name, text));
        }
    }
    messages
}

/// A route that takes one path, where everything below the path has no route at all. Who names the methods means just this path.
fn path_without_subpaths(config: &Config, route: &Route) -> Option<String> {
    let asks_upstream = route.actions.as_ref().is_none_or(|actions| actions.response.is_none());
    if !asks_upstream || !route.methods.is_empty() {
        return None;
    }
    let path = route.path.text.as_str();
    let own: Option<Vec<&str>> = route.path.segments.iter().map(literal).collect();
    let own = match own?.as_slice() {
        [""] => Vec::new(),
        [one] if one.contains('.') => return None,
        [one] | [one, ""] => vec![*one],
        // A path of several segments is an endpoint more often than a prefix, unless it ends in a slash.
        [above @ .., ""] => above.to_vec(),
        _ => return None,
    };
    let below = |other: &Route| {
        let mut others = other.path.segments.iter();
        for own in &own {
            match others.next() {
                Some(Segment::Rest(_)) => return true,
                Some(segment) if literal(segment).is_none_or(|text| text == *own) => {}
                _ => return false,
            }
        }
        // Beside a route for `/`, one for `/api` takes only a part of what is below.
        others.next().is_some_and(|segment| !own.is_empty() || literal(segment).is_none())
    };
    let meets = |other: &&Route| {
        let is_host = |host| other.hosts.contains(host);
        other.path != route.path
            && (other.hosts.is_empty() || route.hosts.is_empty() || route.hosts.iter().any(is_host))
            && (other.secure.is_none() || route.secure.is_none() || other.secure == route.secure)
    };
    if config.routes.iter().filter(meets).any(below) {
        return None;
    }
    let prefix = path.trim_end_matches('/');
    Some(format!(
        "the route {} takes {} alone, and {} gets 404: write {} if all below it is meant, or give the route its `methods` if not",
        quoted(&route.name),
        quoted(path),
        quoted(&format!("{prefix}/x")),
        quoted(&format!("{prefix}/{{*rest}}"))
    ))
}

fn literal(segment: &Segment) -> Option<&str> {
    match segment {
        Segment::Literal(text) => Some(text),
        Segment::Param(_) | Segment::Rest(_) => None,
    }
}

/// An admin address that other machines reach.
pub fn exposed_admin_address(config: &Config) -> Option<String> {
    let address = config.listen.admin.filter(|address| !address.ip().to_canonical().is_loopback())?;
    Some(format!(
        "`admin` listens on `{address}`: whoever reaches it can read the metrics, and use up and reset every limit"
    ))
}

/// The rules, shared with other gateways, whose keys can be found out by trying, because anybody can make their digests.
fn guessable_digests(config: &Config) -> Option<String> {
    config.counters.shared.as_ref().filter(|shared| shared.digest_key.is_none())?;
    let api_key = config.clients.as_ref().and_then(|clients| clients.api_key.as_ref());
    let is_digested = |part: &KeyPart| is_secret_part(part) || Some(part) == api_key;
    let rules = config.rules.iter().filter(|rule| {
        let fallback = if let OnMissing::Fallback(parts) = &rule.on_missing { parts.as_slice() } else { &[] };
        rule.sharing != Sharing::Local && rule.key.iter().chain(fallback).any(is_digested)
    });
    let names: Vec<&str> = rules.map(|rule| rule.name.as_str()).collect();
    (!names.is_empty()).then(|| {
        format!(
            "keys of {} are secrets, told to Redis by digests that anybody can make who knows `prefix`: short ones can be \
             found by trying, unless `[counters.shared]` has a `digest_key_file`",
            quoted_list(names, "and")
        )
    })
}

/// A line for a slash at the end of a path, and one for parameters of a path, where other rules hold for the path with it than
/// without it: many servers take both for one.
fn paths_with_variants(config: &Config) -> Vec<String> {
    let reading = config.path_reading;
    let mut messages = Vec::new();
    let mut tell = |variant: PathVariant, suffix: &str, setting: &str| {
        let escapes = |route: &&Route| config.routes.iter().any(|other| avoids_rules(variant, route, other));
        let mut routes = config.routes.iter().filter(escapes).map(|route| &route.path.text);
        let Some(path) = routes.next() else { return };
        let others = match routes.count() {
            0 => String::new(),
            more => format!(", and {more} other paths are alike"),
        };
        messages.push(format!(
            "`{path}{suffix}` is held to other rules than `{path}`{others}: where the upstream takes both for one, set {setting}"
        ));
    };
    if reading.trailing_slash == TrailingSlash::Keep {
        tell(PathVariant::TrailingSlash, "/", "`trailing_slash = \"ignore\"`");
    }
    if reading.parameters == PathParameters::Keep {
        tell(PathVariant::Parameter, ";x", "`path_parameters` to `\"strip\"` or `\"refuse\"`");
    }
    messages
}

/// Another spelling of a path that ends in a literal.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PathVariant {
    TrailingSlash,
    Parameter,
}

/// Whether a request of a route escapes some of its rules, and is sent to an upstream all the same, because another route takes
/// that spelling of the path.
fn avoids_rules(variant: PathVariant, route: &Route, other: &Route) -> bool {
    let overlap = |a: &[String], b: &[String]| a.is_empty() || b.is_empty() || a.iter().any(|one| b.contains(one));
    let answers = |route: &Route| route.actions.as_ref().is_some_and(|actions| actions.response.is_some());
    let (own, others) = (&route.path.segments, &other.path.segments);
    matches!(own.last(), Some(Segment::Literal(text)) if !text.is_empty())
        && route.rules.iter().any(|rule| !other.rules.contains(rule))
        && !answers(route)
        && !answers(other)
        && overlap(&route.hosts, &other.hosts)
        && overlap(&route.methods, &other.methods)
        && route.secure.zip(other.secure).is_none_or(|(a, b)| a == b)
        && matches_variant(variant, own, others)
}

/// Whether a pattern takes a path of another pattern in a variant.
fn matches_variant(variant: PathVariant, own: &[Segment], others: &[Segment]) -> bool {
    let fit = |(a, b): (&Segment, &Segment)| !matches!((a, b), (Segment::Literal(a), Segment::Literal(b)) if a != b);
    let begins = |length: usize| own.iter().zip(&others[..length]).all(fit);
    let (length, last) = (own.len(), others.len() - 1);
    match (&others[last], variant) {
        (Segment::Rest(_), PathVariant::TrailingSlash) => last <= length && begins(last),
        (Segment::Rest(_), PathVariant::Parameter) => last < length && begins(last),
        (Segment::Param(_), PathVariant::Parameter) => others.len() == length && begins(last),
        (Segment::Literal(text), PathVariant::TrailingSlash) => text.is_empty() && last == length && begins(last),
        (Segment::Param(_), PathVariant::TrailingSlash) | (Segment::Literal(_), PathVariant::Parameter) => false,
    }
}

/// A line for each certificate that is not valid now, or not for long, and for each revocation list that is not.
pub fn certificate_dates(config: &Config, now_ms: u64) -> Vec<String> {
    let now_s = i64::try_from(now_ms / 1000).unwrap_or(i64::MAX);
    let all = config.listen.https.iter().flat_map(|https| &https.tls.certificates);
    let told = all.filter_map(|certificate| {
        let what = match (certificate.not_before_s - now_s, certificate.not_after_s - now_s) {
            (_, ..0) => format!("ended {}", on_date(certificate.not_after_s)),
            (1.., _) => format!("begins {}", on_date(certificate.not_before_s)),
            (_, left_s) if left_s < EXPIRY_NOTICE_DAYS * DAY_S => format!("ends {}", on_date(certificate.not_after_s)),
            _ => return None,
        };
        Some(format!("the certificate in `{}` {what}", certificate.file))
    });
    told.chain(expired_revocation_lists(config, now_s)).collect()
}

fn expired_revocation_lists(config: &Config, now_s: i64) -> impl Iterator<Item = String> {
    // They are issued anew every few days, or hours: that one will end soon says nothing.
    revocation_lists(config).filter(move |list| list.next_update_s < now_s).map(|list| {
        let ended = on_date(list.next_update_s);
        format!("the revocation list in `{}` ended {ended}: nobody is let in whose certificate it is about", list.file)
    })
}

pub fn revocation_lists(config: &Config) -> impl Iterator<Item = &RevocationList> {
    config
        .listen
        .https
        .iter()
        .filter_map(|https| https.tls.client_auth.as_ref())
        .flat_map(|auth| &auth.revocation_lists)
}

fn on_date(unix_s: i64) -> String {
    jiff::Timestamp::from_second(unix_s).map_or_else(|_| unix_s.to_string(), |time| format!("on {time}"))
}

struct RuleSummary {
    unit: &'static str,
    opener_stays: bool,
}

impl RuleSummary {
    fn worst_case(&self, rule: &Rule, layers: &[Limit]) -> String {
        let limits: Vec<String> =
            layers.iter().map(|limit| format!("{}/{}", limit.tokens, limit.period_text)).collect();
        let limits = limits.join(" + ");
        if rule.cost == Cost::Fixed(0) {
            return format!("{limits}: counts nothing, at a cost of 0");
        }
        let most = |span_ms: u64| burst_bound::max_within(layers, span_ms, self.opener_stays);
        let lengths =
            |limit: &&Limit| burst_bound::lengths_ms(&limit.windows).map_or(u64::MAX, |(shortest_ms, _)| shortest_ms);
        // The layer whose end matters is the one that then lets through least.
        let alone = |limit: &&Limit| burst_bound::max_within(std::slice::from_ref(*limit), 2, self.opener_stays);
        let Some((narrow, burst)) = layers.iter().min_by_key(|limit| (alone(limit), lengths(limit))).zip(most(2))
        else {
            return limits;
        };
        let moment = if most(SHORT_SPAN_MS) == Some(burst) { "2 seconds" } else { "a moment" };
        let unit = self.unit;
        let mut text =
            format!("{limits}: at most {burst} {unit} in {moment} around the end of {}", window_text(narrow));
        let mut others: Vec<&Limit> = layers.iter().filter(|limit| lengths(limit) > lengths(&narrow)).collect();
        others.sort_by_key(lengths);
        others.dedup_by_key(|limit| lengths(&&**limit));
        for limit in others {
            if let Some(most) = most(lengths(&limit)) {
                text += &format!(", {most} in any {}", length_text(limit));
            }
        }
        text
    }
}

/// What else has to be said for that to be true.
fn caveats(rule: &Rule) -> String {
    let mut text = String::new();
    if let Cost::Response { .. } = rule.cost {
        text += "; what answers cost beyond their reserve comes on top, and the windows after grant that much less";
    }
    if rule.on_limit == OnLimit::Shadow {
        text += "; in shadow, so nothing is refused";
    }
    text
}

/// The layers that never refuse, and why.
fn layers_that_never_refuse(layers: &[Limit]) -> impl Iterator<Item = String> {
    layers.iter().filter_map(|limit| {
        let others = layers.iter().filter(|other| other.windows != limit.windows);
        let other = others.into_iter().find(|other| burst_bound::never_binds(limit, other))?;
        let most = burst_bound::max_in_window(other, limit)?;
        Some(format!(
            "{}/{} never refuses: {}/{} lets at most {most} through in that time",
            limit.tokens, limit.period_text, other.tokens, other.period_text
        ))
    })
}

fn is_word(period: &str) -> bool {
    period.starts_with(|c: char| c.is_ascii_alphabetic())
}

fn window_text(limit: &Limit) -> String {
    match limit.period_text.as_str() {
        "hour" => String::from("an hour"),
        word if is_word(word) => format!("a {word}"),
        other => format!("a window of {other}"),
    }
}

/// The length of a layer's windows; of the shortest, where they differ.
fn length_text(limit: &Limit) -> String {
    const HOUR_MS: u64 = 3_600_000;
    match (burst_bound::lengths_ms(&limit.windows), limit.windows.period_ms()) {
        (Some((shortest_ms, _)), None) if shortest_ms % (24 * HOUR_MS) == 0 => {
            format!("{} days", shortest_ms / (24 * HOUR_MS))
        }
        (Some((shortest_ms, _)), None) if shortest_ms % HOUR_MS == 0 => format!("{} hours", shortest_ms / HOUR_MS),
        (Some((shortest_ms, _)), None) => format!("{} minutes", shortest_ms / 60_000),
        _ => limit.period_text.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::read;

    fn messages_of_rules(rules: &str, names: &str) -> Vec<String> {
        let text = format!(
            "[upstreams.u]\nbuiltin = \"echo\"\n{rules}\n[[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [{names}]\n"
        );
        messages_of(&text)
    }

    fn messages_of(text: &str) -> Vec<String> {
        let config = read(text).unwrap_or_else(|problems| panic!("{problems:?}"));
        messages(&config).iter().map(LintMessage::to_string).collect()
    }

    /// What is told of a rule for itself.
    fn messages_of_rule(rule: &str) -> Vec<String> {
        messages_of_rules(&format!("[rules.r]\nkey = \"ip\"\n{rule}"), "\"r\"")
    }

    #[test]
    fn the_worst_case_around_the_end_of_a_window_is_reported() {
        for (rule, expected) in [
            ("windows = [\"5/minute\"]", "r: 5/minute: at most 10 requests in 2 seconds around the end of a minute"),
            ("windows = [\"5/second\"]", "r: 5/second: at most 10 requests in a moment around the end of a second"),
            (
                "windows = [\"100/5m\"]\ncost = 4",
                "r: 100/5m: at most 200 tokens in 2 seconds around the end of a window of 5m",
            ),
            (
                "windows = [{ limit = 100, period = \"hour\", capacity = 150 }]",
                "r: 100/hour: at most 250 requests in 2 seconds around the end of an hour",
            ),
            (
                "windows = [{ limit = 5, period = \"minute\", start = \"first-request\" }]",
                "r: 5/minute: at most 9 requests in 2 seconds around the end of a minute",
            ),
            (
                "windows = [{ limit = 5, period = \"minute\", start = \"random\" }]",
                "r: 5/minute: at most 10 requests in 2 seconds around the end of a minute",
            ),
            (
                "windows = [{ limit = 5, period = \"month\", timezone = \"Europe/Paris\" }, \
                 { limit = 2, period = \"day\", timezone = \"Europe/Paris\" }]",
                "r: 5/month + 2/day: at most 4 requests in 2 seconds around the end of a day, 10 in any 28 days",
            ),
            ("windows = [\"5/minute\"]\ncost = 0", "r: 5/minute: counts nothing, at a cost of 0"),
            (
                "windows = [\"5/minute\"]\non_limit = \"shadow\"",
                "r: 5/minute: at most 10 requests in 2 seconds around the end of a minute; in shadow, so nothing is refused",
            ),
        ] {
            assert_eq!(messages_of_rule(rule), [expected], "{rule}");
        }
    }

    #[test]
    fn a_layer_that_never_refuses_is_reported_only_where_that_is_certain() {
        let windows = "windows = [\"2000/hour\", \"33/minute\"]";
        let first =
            "r: 2000/hour + 33/minute: at most 66 requests in 2 seconds around the end of a minute, 2013 in any hour";
        let note = "r: note: 2000/hour never refuses: 33/minute lets at most 1980 through in that time";
        assert_eq!(messages_of_rule(windows), [first, note]);
        assert_eq!(messages_of_rule(&format!("{windows}\ncount_refused = true")), [first]);
        assert_eq!(messages_of_rule(&format!("{windows}\non_limit = \"delay\"\nmax_delay = \"1s\"")), [first]);
        assert_eq!(messages_of_rule(&format!("{windows}\ncost = {{ response-header = \"x-cost\" }}")).len(), 1);
        assert_eq!(messages_of_rule("windows = [\"1980/hour\", \"33/minute\"]").len(), 2);
        assert_eq!(messages_of_rule("windows = [\"1979/hour\", \"33/minute\"]").len(), 1);
        let floating = "windows = [{ limit = 1980, period = \"hour\", start = \"first-request\" }, \"33/minute\"]";
        assert_eq!(messages_of_rule(floating).len(), 1);
    }

    #[test]
    fn effects_of_other_rules_and_routes_are_considered() {
        let rules = "[rules.r]\nkey = \"ip\"\nwindows = [{ limit = 5, period = \"minute\", start = \"first-request\" }]\n\
                     [rules.d]\nkey = \"ip\"\nwindows = [\"1/hour\"]\non_limit = \"delay\"\nmax_delay = \"1s\"";
        assert!(messages_of_rules(rules, "\"r\"")[0].contains("at most 9 requests"));
        assert_eq!(messages_of_rules(rules, "\"r\"")[2], "d: note: on no route, so nothing is counted by it");
        let admin = format!("[listen]\nadmin = \"127.0.0.1:9900\"\n{rules}");
        assert_eq!(messages_of_rules(&admin, "\"r\"")[2], "d: on no route, so only the decision API counts by it");
        // Who waits for the other rule may go away, and gives back what opened the window.
        assert!(messages_of_rules(rules, "\"r\", \"d\"")[0].contains("at most 10 requests"));
    }

    #[test]
    fn paths_whose_variants_have_other_rules_are_reported() {
        let told = |settings: &str, routes: &[(&str, &str)]| {
            let rule = |name| format!("[rules.{name}]\nkey = \"ip\"\nwindows = [\"5/minute\"]\n");
            let mut text = format!("{settings}\n[upstreams.u]\nbuiltin = \"echo\"\n{}{}", rule("a"), rule("b"));
            for (path, more) in routes {
                text += &format!("[[routes]]\npath = \"{path}\"\n{more}\n");
            }
            paths_with_variants(&read(&text).unwrap_or_else(|problems| panic!("{problems:?}")))
        };
        const A: &str = "upstream = \"u\"\nrules = [\"a\"]";
        const AB: &str = "upstream = \"u\"\nrules = [\"a\", \"b\"]";
        const NONE: &str = "upstream = \"u\"";
        const REDIRECT: &str = "redirect = { to = \"https://{host}{uri}\" }";
        let kinds = |settings: &str, routes: &[(&str, &str)]| {
            told(settings, routes).iter().map(|line| line.contains("trailing_slash")).collect::<Vec<_>>()
        };
        for (routes, found) in [
            (&[("/login", AB), ("/{*rest}", A)][..], &[true, false][..]),
            (&[("/login", A), ("/{*rest}", AB)], &[]),
            (&[("/login", NONE), ("/{*rest}", A)], &[]),
            (&[("/login", A)], &[]),
            (&[("/login", A), ("/{name}", NONE)], &[false]),
            (&[("/login", A), ("/login/", NONE)], &[true]),
            (&[("/login", A), ("/login/{*rest}", NONE)], &[true]),
            (&[("/login", A), ("/{*rest}", REDIRECT)], &[]),
            (&[("/api/login", A), ("/web/{*rest}", NONE)], &[]),
            (&[("/api/{id}/login", A), ("/api/x/{*rest}", NONE)], &[true, false]),
            (&[("/api/{id}", A), ("/api/{*rest}", NONE)], &[]),
            (&[("/", A), ("/{*rest}", NONE)], &[]),
        ] {
            assert_eq!(kinds("", routes), found, "{routes:?}");
            let refused = kinds("trailing_slash = \"keep\"\npath_parameters = \"refuse\"", routes);
            assert!(!refused.contains(&false), "{routes:?}");
        }
        let routes = [("/login", A), ("/signup", A), ("/{*rest}", NONE)];
        let (slash, parameters) = ("trailing_slash = \"ignore\"", "path_parameters = \"strip\"");
        assert_eq!(kinds(slash, &routes), [false]);
        assert_eq!(kinds(parameters, &routes), [true]);
        assert_eq!(
            told("", &routes)[0],
            "`/login/` is held to other rules than `/login`, and 1 other paths are alike: where the upstream takes both for \
             one, set `trailing_slash = \"ignore\"`"
        );
    }

    #[test]
    fn a_path_is_reported_where_a_prefix_was_probably_meant() {
        // Paths, and those of them that are remarked on; `GET` before one is the method of its route.
        for (paths, remarked) in [
            (&["/"][..], &["/"][..]),
            (&["/", "/api/{*rest}"], &["/"]),
            (&["/", "/{*rest}"], &[]),
            (&["/", "/{page}"], &[]),
            (&["GET /"], &[]),
            (&["/api"], &["/api"]),
            (&["/api/"], &["/api/"]),
            (&["/v1/users/"], &["/v1/users/"]),
            (&["/v1/users"], &[]),
            (&["/api", "/api/{*rest}"], &[]),
            (&["/api", "/api/users"], &[]),
            (&["/api", "/{*rest}"], &[]),
            (&["/api", "/{tenant}/{*rest}"], &[]),
            (&["/api", "/apis/{*rest}"], &["/api"]),
            (&["/api/{id}"], &[]),
            (&["GET /api"], &[]),
            (&["/robots.txt"], &[]),
        ] {
            let mut text = String::from("[upstreams.u]\nbuiltin = \"echo\"\n");
            for path in paths {
                let (methods, path) =
                    path.split_once(' ').map_or(("", *path), |(_, path)| ("methods = \"GET\"\n", path));
                text += &format!("[[routes]]\n{methods}path = \"{path}\"\nupstream = \"u\"\n");
            }
            let expected: Vec<String> = remarked.iter().map(|path| format!("takes `{path}` alone, and `")).collect();
            let said = messages_of(&text);
            assert_eq!(said.len(), expected.len(), "{paths:?}: {said:?}");
            assert!(said.iter().zip(&expected).all(|(said, expected)| said.contains(expected)), "{paths:?}: {said:?}");
        }
        // Another host's route, and one that answers by itself.
        let text = "[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\nhost = \"a.example\"\npath = \"/api\"\nupstream = \"u\"\n\
                    [[routes]]\nhost = \"b.example\"\npath = \"/{*rest}\"\nupstream = \"u\"\n\
                    [[routes]]\npath = \"/ok\"\nrespond = { status = 200 }\n";
        assert_eq!(
            messages_of(text),
            [
                "note: the route `/api` takes `/api` alone, and `/api/x` gets 404: write `/api/{*rest}` if all below it is meant, \
              or give the route its `methods` if not"
            ]
        );
    }

    #[test]
    fn unused_plans_and_an_exposed_admin_address_are_reported() {
        let plan = "[rules.r]\nkey = \"ip\"\nwindows = [\"5/minute\"]\n[rules.r.plans.gold]\nwindows = [\"9/minute\"]";
        assert_eq!(
            messages_of_rules(plan, "\"r\"")[2],
            "r: note: no client is on `gold`, because there is no `[clients]`"
        );
        let admin = |address: &str| messages_of_rules(&format!("[listen]\nadmin = \"{address}\""), "");
        let remark = "note: `admin` listens on `0.0.0.0:9900`: whoever reaches it can read the metrics, and use up and reset every limit";
        assert_eq!(admin("0.0.0.0:9900"), [remark]);
        for address in ["192.0.2.1:9900", "[::]:9900", "[2001:db8::1]:9900"] {
            assert_eq!(admin(address).len(), 1, "{address}");
        }
        for address in ["127.0.0.1:9900", "127.8.9.1:0", "[::1]:9900"] {
            assert!(admin(address).is_empty(), "{address}");
        }
    }
}
