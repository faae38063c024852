//! Messages of `transom check` about a valid configuration: how much each rule admits at worst around the end of a
//! window, notes on what an operator may not expect, and warnings about settings that are probably mistakes or will soon cause
//! failures.
//!
//! `transom_limiter::burst_bound` computes the bounds; this file only words them.

use std::collections::{BTreeSet, HashSet};
use std::fmt;

use super::Config;
use super::access::{AccessSource, DenyEntry, DenyTarget, rfc3339};
use super::certificate::RevocationList;
use super::clients::ClientsSource;
use super::diagnostics::{quoted, quoted_list};
use super::key::OnUnknownKey;
use super::key_kind::{BEARER, HEADER, KeyKind, Variety, is_secret_part};
use super::listen_address::ListenSocket;
use super::path::{Segment, WildcardSegment, is_param_name};
use super::response_body;
use super::route::Route;
use super::route_actions::LocalResponse;
use super::rule::{GatewayRule, QuotaUnit};
use super::window::layers_are_comparable;
use transom_http::path_normalize::{PathParameters, TrailingSlash};
use transom_limiter::burst_bound;
use transom_limiter::handles::RuleId;
use transom_limiter::ip_prefix::Network;
use transom_limiter::key::{KeyPart, OnMissing};
use transom_limiter::limit::Limit;
use transom_limiter::rule::{Cost, OnLimit, Plan, Rule};

const SHORT_SPAN_MS: u64 = 2000;
const DAY_S: i64 = 24 * 60 * 60;
/// Most certificates are renewed a month before they expire, so one with fewer days left was probably not renewed.
const EXPIRY_NOTICE_DAYS: i64 = 14;
/// Of a token of the admin address with fewer characters, a message warns.
const TOKEN_CHARS: usize = 16;

/// One sentence about a configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LintMessage {
    pub text: String,
    pub kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// How much a rule admits.
    Bound,
    /// For information: the configuration may be as it is meant.
    Note,
    /// Probably a mistake. With `--strict`, warnings are errors.
    Warning,
}

impl LintMessage {
    /// `subject` is a rule, with the plan if the message is about a plan.
    fn statement(subject: &str, text: &str) -> LintMessage {
        LintMessage { text: format!("{subject}: {text}"), kind: Kind::Bound }
    }

    fn note_on(subject: &str, text: &str) -> LintMessage {
        LintMessage { text: format!("{subject}: note: {text}"), kind: Kind::Note }
    }

    fn warning_on(subject: &str, text: &str) -> LintMessage {
        LintMessage { text: format!("{subject}: warning: {text}"), kind: Kind::Warning }
    }

    pub fn note(text: String) -> LintMessage {
        LintMessage { text: format!("note: {text}"), kind: Kind::Note }
    }

    pub fn warning(text: String) -> LintMessage {
        LintMessage { text: format!("warning: {text}"), kind: Kind::Warning }
    }
}

impl fmt::Display for LintMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// All messages that depend on the configuration alone, not on the time or the machine.
pub fn messages(config: &Config) -> Vec<LintMessage> {
    let mut messages = rule_messages(config);
    messages.extend(invented_keys(config));
    messages.extend(keys_counted_apart(config));
    messages.extend(literals_in_refusals(config));
    let routes = config.routes.iter().filter_map(|route| path_without_subpaths(config, route));
    let warnings = routes
        .chain(config.routes.iter().filter_map(end_like_a_parameter))
        .chain(exposed_admin_address(config))
        .chain(short_token(config))
        .chain(exposed_forward_auth(config))
        .chain(variables_without_clients(config))
        .chain(guessable_digests(config))
        .chain(denials_of_everyone(config))
        .chain(repeated_denials(config))
        .chain(config.routes.iter().filter_map(|route| usage_without_upstream(config, route)));
    messages.extend(warnings.map(LintMessage::warning));
    let notes =
        rules_of_responses(config).into_iter().chain(rules_of_bodies(config)).chain(paths_with_variants(config));
    let notes = notes.chain(credentials_with_scheme(config)).chain(subjects_in_clear(config)).chain(in_store(config));
    let notes = notes.chain(config.routes.iter().filter_map(literal_in_response));
    let notes = notes.chain(config.routes.iter().flat_map(literals_in_texts));
    messages.extend(notes.map(LintMessage::note));
    let shown = |LintMessage { text, kind }| LintMessage { text: config.hidden.removed_from(text), kind };
    messages.into_iter().map(shown).collect()
}

/// One summary for each rule and plan; a note on layers that never refuse, and warnings about rules and plans that are not used.
fn rule_messages(config: &Config) -> Vec<LintMessage> {
    let mut messages = Vec::new();
    // The same layers are often those of several rules and plans: one note is enough.
    let mut explained: BTreeSet<String> = BTreeSet::new();
    for (id, rule) in config.rules.enumerate() {
        let routes = || config.routes.iter().filter(move |route| route.rules.contains(&id));
        let delays = routes().flat_map(|route| &route.rules).any(|other| config.rules[*other].delays());
        let has_cost_1 = rule.cost == Cost::Fixed(1) && routes().all(|route| route.cost.is_none_or(|cost| cost == 1));
        let counts_all = rule.count_when.is_none();
        // A response or a delayed request may refund the charge that opened a window.
        let opener_stays = !delays && counts_all && !matches!(rule.cost, Cost::Response { .. });
        let unit = match &rule.bytes {
            Some(bytes) => format!("units of {} bytes", bytes.unit),
            None if has_cost_1 => String::from("requests"),
            None if rule.quota_unit() == QuotaUnit::WeightedTokens => String::from("weighted tokens"),
            None => String::from("tokens"),
        };
        let name = &rule.name;
        let plan = |plan: &Plan| (format!("{name}, plan {}", plan.name), plan.layers.clone(), plan.concurrent);
        let default = (name.clone(), rule.layers.clone(), rule.concurrent);
        for (subject, layers, concurrent) in std::iter::once(default).chain(rule.plans.iter().map(plan)) {
            let windows = (!layers.is_empty()).then(|| worst_case(rule, &layers, opener_stays, &unit));
            let concurrent = concurrent.map(|limit| format!("at most {limit} requests of a key in flight"));
            let bounds: Vec<String> = windows.into_iter().chain(concurrent).collect();
            messages.push(LintMessage::statement(&subject, &(bounds.join("; ") + &caveats(rule, counts_all))));
            if layers_are_comparable(rule) && !delays && rule.cost != Cost::Fixed(0) {
                let texts = layers_that_never_refuse(&layers).filter(|text| explained.insert(text.clone()));
                messages.extend(texts.map(|text| LintMessage::note_on(&subject, &text)));
            }
        }
        if routes().next().is_none() {
            messages.push(match &config.listen.admin {
                _ if rule.descriptor.is_some() => {
                    LintMessage::statement(name, "used by no route: it answers to descriptors")
                }
                Some(_) => LintMessage::statement(name, "used by no route: only the decision API counts by it"),
                None => LintMessage::warning_on(name, "used by no route: nothing is counted by it"),
            });
        }
        if config.clients.is_none() && !rule.plans.is_empty() {
            let plans = quoted_list(rule.plans.iter().map(|plan| plan.name.as_str()), "or");
            let text = format!("no client can have the plan {plans}: there is no `[clients]`");
            messages.push(LintMessage::warning_on(name, &text));
        }
    }
    messages
}

/// Warns of rules that count by a value that any client can invent. With a new value in each request, such a rule limits
/// nothing; a rule by address on the same route limits how many values a client can try.
fn invented_keys(config: &Config) -> Vec<LintMessage> {
    let is_invented = |part: &&KeyPart| KeyKind::of(part).variety == Variety::Any;
    // A path can be invented too, where a route matches many.
    let is_fixed = |part: &KeyPart| KeyKind::of(part).variety == Variety::Few;
    let limits_addresses = |rule: &Rule| {
        let has_address = rule.key.iter().any(|part| part.prefixes().is_some());
        has_address && rule.key.iter().all(is_fixed) && !rule.layers.is_empty() && !rule.is_shadow()
    };
    let is_read = |part: &KeyPart| config.clients.iter().flat_map(|clients| clients.sources()).any(|read| read == part);
    let mut messages = Vec::new();
    for (id, rule) in config.rules.enumerate() {
        // `"missing"` with `on_missing_key = "skip"` leaves keys of no client without a limit.
        let must_be_known = match rule.on_unknown_key {
            OnUnknownKey::Count => false,
            OnUnknownKey::Missing => !matches!(rule.on_missing, OnMissing::Skip),
            OnUnknownKey::Refuse => true,
        };
        let mut invented = rule.key.iter().filter(is_invented).filter(|part| !(must_be_known && is_read(part)));
        let Some(part) = invented.next() else { continue };
        let is_read = is_read(part);
        let mut routes = config.routes.iter().filter(|route| route.rules.contains(&id));
        let unprotected = routes.find(|route| !route.rules.iter().any(|other| limits_addresses(&config.rules[*other])));
        let sources = config.clients.iter().flat_map(|clients| clients.sources()).map(KeyPart::to_string);
        let sources: Vec<String> = sources.collect();
        let text = match unprotected {
            Some(route) if is_read => format!(
                "counts by `{part}`, which a client can choose freely, so a new value is a new quota: count \
                 by `client`, set `on_unknown_key = \"refuse\"`, or add a rule by `ip` to the route {}",
                quoted(&route.name)
            ),
            // The plan of one client, and a count for each value that the client invents.
            _ if !is_read && !sources.is_empty() && (unprotected.is_some() || !rule.plans.is_empty()) => format!(
                "`[clients]` reads {}, and the rule counts by `{part}`, which a client can choose freely: count by `client`, \
                 or read `{part}` there",
                quoted_list(sources.iter().map(String::as_str), "and")
            ),
            Some(route) => format!(
                "counts by `{part}`, which a client can choose freely, so a new value is a new quota: add a rule by `ip` to \
                 the route {}, or let `[clients]` read `{part}` and set `on_unknown_key`",
                quoted(&route.name)
            ),
            None => continue,
        };
        messages.push(LintMessage::warning_on(&rule.name, &text));
    }
    messages
}

/// Notes rules that count by an API key of clients, so that a client with several keys has its limits several times.
fn keys_counted_apart(config: &Config) -> Vec<LintMessage> {
    let is_api_key = |part: &&KeyPart| config.clients.iter().any(|clients| clients.api_key.contains(part));
    let note = |rule: &GatewayRule| {
        let part = rule.key.iter().find(is_api_key).filter(|_| !rule.counts_clients())?;
        let text = format!(
            "counts each API key in `{part}` for itself, and `[clients]` reads it: a client with several keys has its limits \
             several times. With `key = \"client\"`, all keys of a client share one counter"
        );
        Some(LintMessage::note_on(&rule.name, &text))
    };
    config.rules.iter().filter_map(note).collect()
}

/// Warns of variables that are always empty.
fn variables_without_clients(config: &Config) -> Option<String> {
    let names_client = |route: &&Route| route.actions.as_ref().is_some_and(|actions| actions.name_client());
    let route = config.routes.iter().find(names_client).filter(|_| config.clients.is_none())?;
    Some(format!(
        "`{{client}}` and `{{plan}}` in the route {} are always empty: there is no `[clients]`",
        quoted(&route.name)
    ))
}

/// Notes variables of nginx or of other texts that the body of a refusal does not have. They are sent as they are written.
fn literals_in_refusals(config: &Config) -> impl Iterator<Item = LintMessage> {
    config.rules.iter().filter_map(|rule| {
        let text = response_body::literal_in_refusal(&rule.refusal.body.as_ref()?.text)?;
        Some(LintMessage::note_on(&rule.name, &text))
    })
}

/// Notes what looks like a variable in the body of a route's own response.
fn literal_in_response(route: &Route) -> Option<String> {
    let Some(LocalResponse::Respond { body: Some(body), .. }) = &route.actions.as_ref()?.response else { return None };
    let written = response_body::literal_in_response(&body.text)?;
    Some(format!(
        "{} in `respond` of the route {} is sent literally: this body has no variables, unlike `body` of a rule and the texts \
         of `response_headers`",
        quoted(written),
        quoted(&route.name)
    ))
}

/// Notes what looks like a variable of another product in texts of a route.
fn literals_in_texts(route: &Route) -> impl Iterator<Item = String> {
    route.actions.iter().flat_map(|actions| actions.texts()).filter_map(move |(place, text)| {
        let (written, fix) = text.foreign_variable()?;
        Some(format!("{} in `{place}` of the route {} is sent literally: {fix}", quoted(written), quoted(&route.name)))
    })
}

/// Notes an API key that begins with the scheme of `Authorization`: every spelling of the scheme is another key.
fn credentials_with_scheme(config: &Config) -> Option<String> {
    let is_whole_field = |part: &KeyPart| HEADER.has(part) && part.name() == Some("authorization");
    config.clients.as_ref().filter(|clients| clients.api_key.iter().any(is_whole_field))?;
    Some(String::from(
        "`[clients]` reads API keys from `header:authorization`, with the scheme, such as `Bearer KEY`: write \
         `api_key = \"bearer\"` to read the key alone, whatever the case of the scheme",
    ))
}

/// Notes secrets that the clients have in clear text.
fn subjects_in_clear(config: &Config) -> Option<String> {
    let clients = config.clients.as_ref()?;
    let is_secret = |part: &&KeyPart| is_secret_part(part) || clients.api_key.contains(part);
    let subject = clients.subject.as_ref().filter(is_secret)?;
    let secrets = if BEARER.has(subject) { "tokens" } else { "secrets" };
    Some(format!(
        "`[clients]` has `subject = \"{subject}\"`, so that the clients file has {secrets} in clear text: with \
         `api_key = \"{subject}\"` it has digests"
    ))
}

/// Notes what is in the store, and so unknown here.
fn in_store(config: &Config) -> Option<String> {
    let has_clients = config.clients.as_ref().is_some_and(|clients| clients.source == ClientsSource::Shared);
    let has_denials = config.access.as_ref().is_some_and(|access| access.source == AccessSource::Shared);
    let (what, command) = match (has_clients, has_denials) {
        (true, true) => ("the clients and the deny entries", "transom clients list` and `transom deny list"),
        (true, false) => ("the clients", "transom clients list"),
        (false, true) => ("the deny entries", "transom deny list"),
        (false, false) => return None,
    };
    Some(format!("{what} are in the store, and not checked: `{command}` asks a gateway for them"))
}

/// Warns of a route that matches one path only, if no route matches the paths below it. A route with `methods` is taken to
/// mean exactly its path.
fn path_without_subpaths(config: &Config, route: &Route) -> Option<String> {
    let is_forwarded = route.actions.as_ref().is_none_or(|actions| actions.response.is_none());
    if !is_forwarded || !route.methods.is_empty() {
        return None;
    }
    let path = route.path.text.as_str();
    if let [init @ .., Segment::Wildcards(WildcardSegment { texts, names })] = &*route.path.segments
        && let ([text, end], [None], true) =
            (&**texts, &**names, init.iter().all(|segment| segment.literal().is_some()))
        && end.is_empty()
    {
        let below = [init, &[Segment::Literal(text.clone()), Segment::Rest(String::new())]].concat();
        let prefix = path.trim_end_matches('*');
        return (!config.routes.iter().any(|other| overlap(&below, &other.path.segments))).then(|| {
            format!(
                "the route {} matches one segment that begins with {}, and {} gets 404: write {} to match all paths below it, or \
                 {} if only one segment is meant",
                quoted(&route.name),
                quoted(text),
                quoted(&format!("{prefix}/x")),
                quoted(&format!("{prefix}/{{*rest}}")),
                quoted(&format!("{prefix}{{name}}"))
            )
        });
    }
    let literals: Option<Vec<&str>> = route.path.segments.iter().map(Segment::literal).collect();
    let prefix = match literals?.as_slice() {
        [file] if file.contains('.') => return None,
        // A path of several segments without a trailing slash is more often an endpoint than a prefix.
        [init @ .., ""] => route.path.segments[..init.len()].to_vec(),
        [_] => route.path.segments.clone(),
        _ => return None,
    };
    // For the path `/`, a route such as `/api` matches only a part of the paths below.
    let below = if prefix.is_empty() { Segment::Literal(String::from("%00")) } else { Segment::Rest(String::new()) };
    let below = [prefix, vec![below]].concat();
    let may_match_same_requests = |other: &&Route| {
        let is_host = |host| other.hosts.contains(host);
        other.path != route.path
            && (other.hosts.is_empty() || route.hosts.is_empty() || route.hosts.iter().any(is_host))
            && (other.secure.is_none() || route.secure.is_none() || other.secure == route.secure)
    };
    if config.routes.iter().filter(may_match_same_requests).any(|other| overlap(&below, &other.path.segments)) {
        return None;
    }
    let prefix = path.trim_end_matches('/');
    Some(format!(
        "the route {} matches {} only, and {} gets 404: write {} to match all paths below it, or set `methods` if only \
         this path is meant",
        quoted(&route.name),
        quoted(path),
        quoted(&format!("{prefix}/x")),
        quoted(&format!("{prefix}/{{*rest}}"))
    ))
}

/// Warns of a path that ends with a segment such as `*path`, with which gin, Express and Rails match the rest of the path.
fn end_like_a_parameter(route: &Route) -> Option<String> {
    let Segment::Wildcards(WildcardSegment { texts, names }) = route.path.segments.last()? else { return None };
    let ([start, name], [None]) = (&**texts, &**names) else { return None };
    (start.is_empty() && is_param_name(name)).then(|| {
        format!(
            "the route {} matches one segment that ends with {}: write {} to match the rest of the path, or {} if only one \
             segment is meant",
            quoted(&route.name),
            quoted(name),
            quoted(&format!("{{*{name}}}")),
            quoted(&format!("{{start}}{name}"))
        )
    })
}

/// Warns of a route whose responses the gateway makes, if a rule reads their usage.
fn usage_without_upstream(config: &Config, route: &Route) -> Option<String> {
    let rule = route.rules.iter().map(|rule| &config.rules[*rule]).find(|rule| rule.usage.is_some())?;
    let message = |route: &Route| {
        format!(
            "the route {} has a response of its own, which states no usage, so each request costs the reserve of the rule {}: \
             remove the rule from the route",
            quoted(&route.name),
            quoted(&rule.name)
        )
    };
    route.upstream.is_none().then(|| message(route))
}

/// Whether other machines can connect.
fn is_exposed(socket: &ListenSocket) -> bool {
    socket.address.tcp().is_some_and(|address| !address.ip().to_canonical().is_loopback())
}

/// Warns of an admin address that other machines can reach, unless it asks for a token.
pub fn exposed_admin_address(config: &Config) -> Option<String> {
    let address = config.listen.admin.as_ref().filter(|socket| is_exposed(socket)).map(|socket| &socket.address)?;
    config.admin.known_tokens().next().is_none().then(|| {
        config.hidden.removed_from(format!(
            "`admin` listens on `{address}`: anyone who can connect can read the metrics, and use up and reset every limit; set \
             `token_file` in `[admin]`"
        ))
    })
}

/// Warns of an address for the questions of proxies that other machines can reach.
fn exposed_forward_auth(config: &Config) -> Option<String> {
    let address = config.listen.forward_auth.iter().find(|socket| is_exposed(socket)).map(|socket| &socket.address)?;
    Some(format!(
        "`forward_auth` listens on `{address}`: anyone who can connect can use up the limits of any client; let only your \
         proxies connect"
    ))
}

/// Notes rules that depend on the response or its end, of which the gateway sees nothing where a proxy forwards the request.
fn rules_of_responses(config: &Config) -> Option<String> {
    let depends = |rule: &&GatewayRule| {
        let is_refunded = rule.count_when.is_some() || matches!(rule.cost, Cost::Response { .. });
        is_refunded || rule.concurrent_name().is_some()
    };
    let used: BTreeSet<RuleId> = config.routes.iter().flat_map(|route| route.rules.iter().copied()).collect();
    let rules = used.iter().map(|rule| &config.rules[*rule]);
    let names: Vec<&str> = rules.filter(depends).map(|rule| rule.name.as_str()).collect();
    (!config.listen.forward_auth.is_empty() && !names.is_empty()).then(|| {
        format!(
            "the gateway does not see the responses to requests about which proxies ask on `forward_auth`: they always count by \
             {}, with the cost that is reserved, and hold no slot of `concurrent`",
            quoted_list(names.into_iter(), "and")
        )
    })
}

/// Notes rules that depend on the body, which a proxy that asks does not send.
fn rules_of_bodies(config: &Config) -> Option<String> {
    let used: BTreeSet<RuleId> = config.routes.iter().flat_map(|route| route.rules.iter().copied()).collect();
    let rules = used.iter().map(|rule| &config.rules[*rule]);
    let names: Vec<&str> = rules.filter(|rule| rule.reads_bodies()).map(|rule| rule.name.as_str()).collect();
    (!config.listen.forward_auth.is_empty() && !names.is_empty()).then(|| {
        format!(
            "requests about which proxies ask on `forward_auth` have no body: to {}, they lack every value of it",
            quoted_list(names.into_iter(), "and")
        )
    })
}

/// Warns of a token of the admin address that can be guessed.
fn short_token(config: &Config) -> Option<String> {
    let token = config.admin.known_tokens().find(|token| token.secret.0.len() < TOKEN_CHARS)?;
    let of = match &config.admin.token {
        Some(unnamed) if std::ptr::eq(unnamed, token.secret) => String::from("the token of `token_file`"),
        _ => format!("the token {} of `[admin]`", quoted(token.name)),
    };
    Some(format!("{of} has {} characters: create a longer one, such as `openssl rand -hex 32`", token.secret.0.len()))
}

/// Warns of shared rules with secret keys whose digests have no secret of their own: anyone can compute digests of
/// guesses.
fn guessable_digests(config: &Config) -> Option<String> {
    config.counters.shared.as_ref().filter(|shared| shared.digest_key.is_none())?;
    let is_api_key = |part: &KeyPart| config.clients.iter().any(|clients| clients.api_key.contains(part));
    let is_digested = |part: &KeyPart| is_secret_part(part) || is_api_key(part);
    let rules = config.rules.iter().filter(|rule| {
        let fallback = if let OnMissing::Fallback(parts) = &rule.on_missing { parts.as_slice() } else { &[] };
        rule.is_shared() && rule.key.iter().chain(fallback).any(is_digested)
    });
    let names: Vec<&str> = rules.map(|rule| rule.name.as_str()).collect();
    (!names.is_empty()).then(|| {
        format!(
            "keys of {} are secrets, and Redis stores digests of them that anyone who knows `prefix` can compute: short \
             keys can be guessed unless `[counters.shared]` has a `digest_key_file`",
            quoted_list(names, "and")
        )
    })
}

/// Warns of deny entries that deny every address.
fn denials_of_everyone(config: &Config) -> Vec<String> {
    let text = |entry: &DenyEntry| {
        let DenyTarget::Network(Network { address, prefix: 0 }) = &entry.target else { return None };
        let version = if address.is_ipv4() { "IPv4" } else { "IPv6" };
        let routes = entry.routes.iter().map(|route| config.routes[*route].name.as_str());
        let routes = match entry.routes.len() {
            0 => String::new(),
            1 => format!(" on the route {}", quoted_list(routes, "and")),
            _ => format!(" on the routes {}", quoted_list(routes, "and")),
        };
        Some(format!("the deny entry {} denies every {version} address{routes}", entry.id))
    };
    deny_entries(config).filter_map(text).collect()
}

/// Warns of deny entries that are listed more than once.
fn repeated_denials(config: &Config) -> Option<String> {
    let mut seen = HashSet::new();
    let mut repeated = deny_entries(config).filter(|entry| !seen.insert(entry.id));
    let first = repeated.next()?;
    let (id, target) = (first.id, quoted(&first.target.to_string()));
    let others = likewise(repeated.count(), "entry", "entries");
    Some(format!("the deny entry {id} for {target} is listed more than once{others}: the one that ends last applies"))
}

/// Notes deny entries that have ended.
pub fn ended_denials(config: &Config, now_ms: u64) -> Option<String> {
    let mut ended = deny_entries(config).filter(|entry| entry.has_ended(now_ms));
    let first = ended.next()?;
    let (id, target) = (first.id, quoted(&first.target.to_string()));
    let until = rfc3339(first.until_ms.unwrap_or_default());
    let others = likewise(ended.count(), "entry", "entries");
    Some(config.hidden.removed_from(format!("the deny entry {id} for {target} ended at {until}{others}")))
}

fn deny_entries(config: &Config) -> impl Iterator<Item = &DenyEntry> {
    config.access.iter().flat_map(|access| access.deny.iter())
}

/// What is said of others beside the first one.
fn likewise(others: usize, one: &str, many: &str) -> String {
    match others {
        0 => String::new(),
        1 => format!(" (likewise 1 other {one})"),
        more => format!(" (likewise {more} other {many})"),
    }
}

/// Notes paths to which other rules apply with a trailing slash or with parameters than without. Many servers treat
/// these variants as the same path, so that a client can avoid the rules.
fn paths_with_variants(config: &Config) -> Vec<String> {
    let keeps_slash = config.path_reading.trailing_slash == TrailingSlash::Keep;
    let keeps_parameters = config.path_reading.path_parameters == PathParameters::Keep;
    let mut messages = Vec::new();
    for (is_kept, suffix, setting) in [
        (keeps_slash, "/", "`trailing_slash = \"ignore\"`"),
        (keeps_parameters, ";x", "`path_parameters` to `\"strip\"` or `\"refuse\"`"),
    ] {
        let is_avoidable = |route: &&Route| {
            let variant = path_variant(&route.path.segments, suffix);
            variant.is_some_and(|variant| config.routes.iter().any(|other| avoids_rules(&variant, route, other)))
        };
        let mut paths = config.routes.iter().filter(|_| is_kept).filter(is_avoidable).map(|route| &route.path.text);
        let Some(path) = paths.next() else { continue };
        let others = likewise(paths.count(), "path", "paths");
        messages.push(format!(
            "other rules apply to `{path}{suffix}` than to `{path}`{others}: if the upstream treats both as the same \
             path, set {setting}"
        ));
    }
    messages
}

/// A pattern with a slash or a path parameter appended; `None` if the pattern matches this as well.
fn path_variant(pattern: &[Segment], suffix: &str) -> Option<Vec<Segment>> {
    let (last, init) = pattern.split_last()?;
    let mut last = last.clone();
    if suffix == "/" {
        let has_slash = matches!(&last, Segment::Rest(_)) || matches!(&last, Segment::Literal(text) if text.is_empty());
        return (!has_slash).then(|| [init, &[last, Segment::Literal(String::new())]].concat());
    }
    let text = match &mut last {
        Segment::Literal(text) => Some(text),
        Segment::Wildcards(segment) => segment.texts.last_mut(),
        Segment::Param(_) | Segment::Rest(_) => None,
    };
    text.filter(|text| !text.is_empty())?.push_str(suffix);
    Some([init, &[last]].concat())
}

/// Whether requests for a variant of the route's path avoid some of its rules, because the other route matches the
/// variant and forwards it as well.
fn avoids_rules(variant: &[Segment], route: &Route, other: &Route) -> bool {
    let meet = |a: &[String], b: &[String]| a.is_empty() || b.is_empty() || a.iter().any(|one| b.contains(one));
    let responds = |route: &Route| route.actions.as_ref().is_some_and(|actions| actions.response.is_some());
    route.rules.iter().any(|rule| !other.rules.contains(rule))
        && !responds(route)
        && !responds(other)
        && meet(&route.hosts, &other.hosts)
        && meet(&route.methods, &other.methods)
        && route.secure.zip(other.secure).is_none_or(|(a, b)| a == b)
        && overlap(variant, &other.path.segments)
}

/// Whether some path matches both patterns.
fn overlap(a: &[Segment], b: &[Segment]) -> bool {
    match (a, b) {
        ([], []) | ([Segment::Rest(_)], [_, ..]) | ([_, ..], [Segment::Rest(_)]) => true,
        ([Segment::Literal(own), a @ ..], [Segment::Literal(other), b @ ..]) => own == other && overlap(a, b),
        // A parameter is not empty.
        ([Segment::Literal(text), a @ ..], [other, b @ ..]) | ([other, a @ ..], [Segment::Literal(text), b @ ..]) => {
            let matches = match other {
                Segment::Wildcards(other) => may_match(other, text),
                _ => !text.is_empty(),
            };
            matches && overlap(a, b)
        }
        ([Segment::Wildcards(own), a @ ..], [Segment::Wildcards(other), b @ ..]) => {
            let is_prefix = |own: &str, other: &str| own.starts_with(other) || other.starts_with(own);
            let is_suffix = |own: &str, other: &str| own.ends_with(other) || other.ends_with(own);
            let first = own.texts.first().zip(other.texts.first());
            let last = own.texts.last().zip(other.texts.last());
            first.is_none_or(|(own, other)| is_prefix(own, other))
                && last.is_none_or(|(own, other)| is_suffix(own, other))
                && overlap(a, b)
        }
        ([_, a @ ..], [_, b @ ..]) => overlap(a, b),
        _ => false,
    }
}

/// Whether the ends of a segment are those of a text that is long enough.
fn may_match(segment: &WildcardSegment, text: &str) -> bool {
    let [literal, ..] = segment.specificity();
    text.len() > literal
        && segment.texts.first().is_none_or(|first| text.starts_with(first))
        && segment.texts.last().is_none_or(|last| text.ends_with(last))
}

/// Warnings about certificates that are not valid now or expire soon, and revocation lists that have expired.
pub fn certificate_dates(config: &Config, now_ms: u64) -> Vec<String> {
    let now_s = i64::try_from(now_ms / 1000).unwrap_or(i64::MAX);
    let certificates = config.listen.tls_listeners().flat_map(|https| &https.certificates);
    let notes = certificates.filter_map(|certificate| {
        let state = match (certificate.not_before_s - now_s, certificate.not_after_s - now_s) {
            (_, ..0) => format!("expired on {}", date(certificate.not_after_s)),
            (1.., _) => format!("is not valid before {}", date(certificate.not_before_s)),
            (_, left_s) if left_s < EXPIRY_NOTICE_DAYS * DAY_S => {
                format!("expires on {}", date(certificate.not_after_s))
            }
            _ => return None,
        };
        Some(format!("the certificate in `{}` {state}", certificate.file))
    });
    // Lists that expire soon are not noted: issuers replace lists every few days or hours.
    let expired = revocation_lists(config).filter(|list| list.next_update_s < now_s).map(|list| {
        format!(
            "the revocation list in `{}` expired on {}: certificates of its issuer are rejected unless another list is \
             valid",
            list.file,
            date(list.next_update_s)
        )
    });
    notes.chain(expired).map(|text| config.hidden.removed_from(text)).collect()
}

pub fn revocation_lists(config: &Config) -> impl Iterator<Item = &RevocationList> {
    config.listen.tls_listeners().flat_map(|https| https.client_crl.iter().flatten())
}

fn date(unix_s: i64) -> String {
    jiff::Timestamp::from_second(unix_s).map_or_else(|_| unix_s.to_string(), |time| time.to_string())
}

/// The layers, and how many tokens they admit around the end of a window and in each longer period. `opener_stays` is as
/// in [`burst_bound::max_within`]; `unit` names the tokens.
fn worst_case(rule: &Rule, layers: &[Limit], opener_stays: bool, unit: &str) -> String {
    let limits: Vec<String> = layers.iter().map(|limit| format!("{}/{}", limit.tokens, limit.period_text)).collect();
    let limits = limits.join(" + ");
    if rule.cost == Cost::Fixed(0) {
        return format!("{limits}: counts nothing, because the cost is 0");
    }
    let max_in = |span_ms: u64| burst_bound::max_within(layers, span_ms, opener_stays);
    let shortest_ms = |limit: &&Limit| limit.windows.lengths_ms().map_or(u64::MAX, |(shortest, _)| shortest);
    // The end of a window matters most for the layer that admits least around it.
    let max_of_layer = |limit: &&Limit| burst_bound::max_within(std::slice::from_ref(*limit), 2, opener_stays);
    let narrowest = layers.iter().min_by_key(|limit| (max_of_layer(limit), shortest_ms(limit)));
    let Some((narrowest, burst)) = narrowest.zip(max_in(2)) else { return limits };
    let moment = if max_in(SHORT_SPAN_MS) == Some(burst) { "2 seconds" } else { "a moment" };
    let window = window_text(narrowest);
    let mut text = format!("{limits}: at most {burst} {unit} in {moment} around the end of {window}");
    let mut longer: Vec<&Limit> = layers.iter().filter(|limit| shortest_ms(limit) > shortest_ms(&narrowest)).collect();
    longer.sort_by_key(shortest_ms);
    longer.dedup_by_key(|limit| shortest_ms(&&**limit));
    for limit in longer {
        if let Some(most) = max_in(shortest_ms(&limit)) {
            text += &format!(", {most} in any {}", length_text(limit));
        }
    }
    text
}

/// Conditions on the worst case of a rule.
fn caveats(rule: &Rule, counts_all: bool) -> String {
    let mut text = String::new();
    if !counts_all {
        text += "; requests whose response does not match `count_when` come in addition";
    }
    if let Cost::Response { .. } = rule.cost {
        text += "; the costs of requests in flight beyond their reserves come in addition, and the next windows grant that much less";
    }
    if rule.on_limit == OnLimit::Shadow {
        text += "; a shadow rule refuses nothing";
    }
    text
}

/// The layers that never refuse, and why.
fn layers_that_never_refuse(layers: &[Limit]) -> impl Iterator<Item = String> {
    layers.iter().filter_map(|limit| {
        let others = layers.iter().filter(|other| other.windows != limit.windows);
        let other = others.into_iter().find(|other| burst_bound::never_binds(limit, other))?;
        let most = burst_bound::max_in_window(other, limit)?;
        let (limit, other) = [limit, other].map(|one| format!("{}/{}", one.tokens, one.period_text)).into();
        Some(format!(
            "{limit} cannot be reached, because {other} admits at most {most} in that time; it takes effect once {other} is \
             raised"
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

/// The length of a layer's windows; of the shortest if they differ.
fn length_text(limit: &Limit) -> String {
    const HOUR_MS: u64 = 3_600_000;
    match (limit.windows.lengths_ms(), limit.windows.period_ms()) {
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
    use crate::read;

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

    /// The messages of a configuration with this rule only.
    fn messages_of_rule(rule: &str) -> Vec<String> {
        messages_of_rules(&format!("[rules.r]\nkey = \"ip\"\n{rule}"), "\"r\"")
    }

    #[test]
    fn variables_that_bodies_do_not_have_are_noted() {
        const KNOWN: &str =
            "the variables of a body are `{retry_after}`, `{limit}`, `{window}`, `{rule}` and `{request_id}`";
        for (body, expected) in [
            ("id $request_id", Some("`$request_id` in `body` is sent literally: write `{request_id}`".to_owned())),
            ("${status}", Some(format!("`${{status}}` in `body` is sent literally: {KNOWN}"))),
            ("{limit} of $http_x_a", Some(format!("`$http_x_a` in `body` is sent literally: {KNOWN}"))),
            ("{client_ip}", Some(format!("`{{client_ip}}` in `body` is sent literally: {KNOWN}"))),
            ("%[src]", Some(format!("`%[src]` in `body` is sent literally: {KNOWN}"))),
            ("$5, $price, $http, {a: {host: 1}}, {request_id} {, 100 %", None),
            ("%D0%BD_%D0%BE, %C3%BC_%C3%A4", None),
        ] {
            let found = messages_of_rule(&format!("windows = [\"5/minute\"]\nbody = '{body}'"));
            let notes: Vec<&str> = found.iter().filter_map(|message| message.strip_prefix("r: note: ")).collect();
            assert_eq!(notes, Vec::from_iter(expected.as_deref()), "{body}");
        }
        for (body, written) in
            [("$request_id", Some("$request_id")), ("{retry_after}", Some("{retry_after}")), ("{", None)]
        {
            let route =
                format!("[[routes]]\nname = \"r\"\npath = \"/\"\nrespond = {{ status = 200, body = '{body}' }}\n");
            let note = |written| {
                format!(
                    "note: `{written}` in `respond` of the route `r` is sent literally: this body has no variables, unlike \
                     `body` of a rule and the texts of `response_headers`"
                )
            };
            assert_eq!(messages_of(&route), Vec::from_iter(written.map(note)), "{body}");
        }
    }

    #[test]
    fn what_looks_like_a_variable_in_texts_of_routes_is_noted() {
        const KNOWN: &str = "the variables are `{client_ip}`, `{scheme}`, `{host}`, `{authority}`, `{method}`, `{path}`, \
                             `{query}`, `{uri}`, `{route}`, `{client}` and `{plan}`";
        for (text, expected) in [
            ("%[src]", Some("`%[src]` in `x-a` of the route `r` is sent literally: write `{client_ip}`".to_owned())),
            (
                "%REQ(:PATH)%",
                Some("`%REQ(:PATH)%` in `x-a` of the route `r` is sent literally: write `{uri}`".to_owned()),
            ),
            ("by %NAME% of {host}", Some(format!("`%NAME%` in `x-a` of the route `r` is sent literally: {KNOWN}"))),
            ("{host} $status", Some(format!("`$status` in `x-a` of the route `r` is sent literally: {KNOWN}"))),
            ("$5, $price, 100 %, %, %[, %ABC, %D0%BD_%D0%BE, %C3%BC_%C3%A4", None),
        ] {
            let route = format!(
                "[[routes]]\nname = \"r\"\npath = \"/\"\nrespond = {{ status = 200 }}\n\
                 response_headers = {{ set = {{ x-a = '{text}' }} }}\n"
            );
            assert_eq!(messages_of(&route), Vec::from_iter(expected.map(|text| format!("note: {text}"))), "{text}");
        }
        let route = "[[routes]]\nname = \"r\"\npath = \"/\"\nredirect = { to = \"https://a.example/$pid\" }\n";
        assert_eq!(messages_of(route), [format!("note: `$pid` in `to` of the route `r` is sent literally: {KNOWN}")]);
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
            ("windows = [\"5/minute\"]\ncost = 0", "r: 5/minute: counts nothing, because the cost is 0"),
            ("concurrent = 3", "r: at most 3 requests of a key in flight"),
            (
                "windows = [\"5/minute\"]\nconcurrent = 3",
                "r: 5/minute: at most 10 requests in 2 seconds around the end of a minute; at most 3 requests of a key in \
                 flight",
            ),
            (
                "windows = [\"5/minute\"]\non_limit = \"shadow\"",
                "r: 5/minute: at most 10 requests in 2 seconds around the end of a minute; a shadow rule refuses nothing",
            ),
            (
                "windows = [\"50/minute\"]\ncost = { usage = \"auto\", reserve = 20 }",
                "r: 50/minute: at most 100 tokens in 2 seconds around the end of a minute; the costs of requests in flight \
                 beyond their reserves come in addition, and the next windows grant that much less",
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
        let note = "r: note: 2000/hour cannot be reached, because 33/minute admits at most 1980 in that time; it takes effect once \
                    33/minute is raised";
        assert_eq!(messages_of_rule(windows), [first, note]);
        let plans = format!("{windows}\n[rules.r.plans.gold]\n{windows}\n[rules.s]\nkey = \"ip\"\n{windows}");
        let notes = messages_of_rule(&plans).into_iter().filter(|text| text.contains(": note: ")).count();
        assert_eq!(notes, 1, "the same layers are explained once");
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
        assert_eq!(messages_of_rules(rules, "\"r\"")[2], "d: warning: used by no route: nothing is counted by it");
        let admin = format!("[listen]\nadmin = \"127.0.0.1:9900\"\n{rules}");
        assert_eq!(messages_of_rules(&admin, "\"r\"")[2], "d: used by no route: only the decision API counts by it");
        // A request delayed by the other rule may be cancelled, and refund the charge that opened the window.
        assert!(messages_of_rules(rules, "\"r\", \"d\"")[0].contains("at most 10 requests"));
    }

    #[test]
    fn paths_whose_variants_have_other_rules_are_reported() {
        let notes = |settings: &str, routes: &[(&str, &str)]| {
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
            notes(settings, routes).iter().map(|line| line.contains("trailing_slash")).collect::<Vec<_>>()
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
            (&[("/api/{id}", A), ("/api/{*rest}", NONE)], &[true]),
            (&[("/api/{id}", A), ("/api/{id}/{part}", NONE)], &[]),
            (&[("/api/v{n}", A), ("/{*rest}", NONE)], &[true]),
            (&[("/api/", A), ("/{*rest}", NONE)], &[]),
            (&[("/", A), ("/{*rest}", NONE)], &[]),
        ] {
            assert_eq!(kinds("", routes), found, "{routes:?}");
            let without_parameters = kinds("trailing_slash = \"keep\"\npath_parameters = \"refuse\"", routes);
            assert!(!without_parameters.contains(&false), "{routes:?}");
        }
        let routes = [("/login", A), ("/signup", A), ("/{*rest}", NONE)];
        let (slash, parameters) = ("trailing_slash = \"ignore\"", "path_parameters = \"strip\"");
        assert_eq!(kinds(slash, &routes), [false]);
        assert_eq!(kinds(parameters, &routes), [true]);
        assert_eq!(
            notes("", &routes)[0],
            "other rules apply to `/login/` than to `/login` (likewise 1 other path): if the upstream treats both as the \
             same path, set `trailing_slash = \"ignore\"`"
        );
    }

    #[test]
    fn a_path_is_reported_where_a_prefix_was_probably_meant() {
        // Paths, and those of them that get a note; `GET` before a path is the method of its route.
        for (paths, noted) in [
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
            let expected: Vec<String> = noted.iter().map(|path| format!("matches `{path}` only, and `")).collect();
            let found = messages_of(&text);
            assert_eq!(found.len(), expected.len(), "{paths:?}: {found:?}");
            assert!(found.iter().zip(&expected).all(|(one, expected)| one.contains(expected)), "{paths:?}: {found:?}");
        }
        // The route of another host, and one with a response of its own.
        let text = "[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\nhost = \"a.example\"\npath = \"/api\"\nupstream = \"u\"\n\
                    [[routes]]\nhost = \"b.example\"\npath = \"/{*rest}\"\nupstream = \"u\"\n\
                    [[routes]]\npath = \"/ok\"\nrespond = { status = 200 }\n";
        assert_eq!(
            messages_of(text),
            [
                "warning: the route `/api` matches `/api` only, and `/api/x` gets 404: write `/api/{*rest}` to match all paths \
                 below it, or set `methods` if only this path is meant"
            ]
        );
    }

    #[test]
    fn a_route_for_the_beginning_of_one_segment_is_reported_unless_it_is_meant() {
        for (paths, is_reported) in [
            (&["/api*"][..], true),
            (&["/v1/api*", "/v1/a/{*rest}"], true),
            (&["/api*", "/api/{*rest}"], false),
            (&["/api*", "/{*rest}"], false),
            (&["/api{name}"], false),
            (&["/*.css"], false),
            (&["/{tenant}/api*"], false),
        ] {
            let routes = paths.iter().map(|path| format!("[[routes]]\npath = \"{path}\"\nupstream = \"u\"\n"));
            let found = messages_of(&format!("[upstreams.u]\nbuiltin = \"echo\"\n{}", routes.collect::<String>()));
            assert_eq!(found.len(), usize::from(is_reported), "{paths:?}: {found:?}");
            assert!(
                found.iter().all(|text| text.contains("api/{*rest}` to match all paths below it, or `")),
                "{found:?}"
            );
        }
    }

    #[test]
    fn an_end_like_a_parameter_of_other_routers_is_reported() {
        for (path, is_reported) in [
            ("/static/*filepath", true),
            ("/{tenant}/*path", true),
            ("/static/{start}filepath", false),
            ("/static/*.css", false),
            ("/static/*-path", false),
            ("/static/v*path", false),
            ("/*path/x", false),
        ] {
            let text = format!(
                "[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"{path}\"\nupstream = \"u\"\nname = \"r\"\n"
            );
            let found = messages_of(&text);
            assert_eq!(found.len(), usize::from(is_reported), "{path}: {found:?}");
            let start = "warning: the route `r` matches one segment that ends with `";
            assert!(found.iter().all(|text| text.starts_with(start)), "{path}: {found:?}");
        }
    }

    #[test]
    fn paths_overlap_if_their_ends_do() {
        let segments = |text: &str| {
            let text = format!("[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"{text}\"\nupstream = \"u\"\n");
            let config = crate::read_with_files(&text, &|_| Ok(Vec::new())).unwrap();
            config.routes.iter().next().unwrap().path.segments.clone()
        };
        for (a, b, expected) in [
            ("/a.css", "/*.css", true),
            ("/.css", "/*.css", false),
            ("/a*", "/{id}", true),
            ("/a*b", "/ab*", true),
            ("/a*", "/b*", false),
            ("/*.css", "/*.js", false),
            ("/a*/x", "/a1/y", false),
            ("/a*", "/{*rest}", true),
        ] {
            assert_eq!(
                (overlap(&segments(a), &segments(b)), overlap(&segments(b), &segments(a))),
                (expected, expected)
            );
        }
    }

    #[test]
    fn usage_of_responses_of_the_gateway_is_reported() {
        let rule = "[rules.r]\nkey = \"ip\"\nwindows = [\"9/day\"]\ncost = { usage = \"auto\" }\n";
        let route =
            |to: &str| format!("{rule}[[routes]]\nname = \"n\"\npath = \"/{{*rest}}\"\n{to}\nrules = [\"r\"]\n");
        let warnings = |to| messages_of(&route(to)).iter().filter(|text| text.contains("states no usage")).count();
        assert_eq!(warnings("respond = { status = 200 }"), 1);
        assert_eq!(
            warnings(
                "upstream = \"u\"\n[upstreams.u]\nbuiltin = \"echo\"\n[[routes]]\npath = \"/a\"\nupstream = \"u\""
            ),
            0
        );
    }

    #[test]
    fn keys_that_clients_can_invent_are_reported() {
        let rules = |key: &str, more: &str| {
            format!(
                "[rules.r]\nkey = {key}\non_missing_key = \"skip\"\nwindows = [\"5/minute\"]\n{more}\n\
                 [rules.address]\nkey = \"ip\"\nwindows = [\"5/minute\"]\n\
                 [rules.pair]\nkey = [\"ip\", \"cookie:id\"]\non_missing_key = \"skip\"\nwindows = [\"5/minute\"]\n\
                 [rules.in-flight]\nkey = \"ip\"\nconcurrent = 5\n\
                 [rules.paths]\nkey = [\"ip\", \"path\"]\nwindows = [\"5/minute\"]\n\
                 [rules.shadow]\nkey = \"ip\"\nwindows = [\"5/minute\"]\non_limit = \"shadow\""
            )
        };
        let notes = |clients: &str, key: &str, more: &str, names: &str| -> Vec<String> {
            let text = format!(
                "{clients}\n[upstreams.u]\nbuiltin = \"echo\"\n{}\n\
                 [[routes]]\npath = \"/{{*rest}}\"\nupstream = \"u\"\nrules = [{names}]\n",
                rules(key, more)
            );
            let config = crate::read_with_files(&text, &|_| Ok(Vec::new()));
            let messages = invented_keys(&config.unwrap_or_else(|problems| panic!("{problems:?}")));
            messages.iter().map(LintMessage::to_string).filter(|text| text.starts_with("r:")).collect()
        };
        for key in ["\"header:x-user\"", "\"cookie:id\"", "\"query:key\"", "[\"header:x-user\", \"path\"]"] {
            assert_eq!(notes("", key, "", "\"r\"").len(), 1, "{key}");
            assert!(notes("", key, "", "\"r\", \"address\"").is_empty(), "{key}");
            for no_help in ["pair", "shadow", "in-flight", "paths"] {
                assert_eq!(notes("", key, "", &format!("\"r\", \"{no_help}\"")).len(), 1, "{key}, {no_help}");
            }
        }
        let alone = "r: warning: counts by `header:x-user`, which a client can choose freely, so a new value is a new quota: add a \
                     rule by `ip` to the route `/{*rest}`, or let `[clients]` read `header:x-user` and set `on_unknown_key`";
        assert_eq!(notes("", "\"header:x-user\"", "", "\"r\""), [alone]);
        let clients = "[clients]\nfile = \"c.toml\"\napi_key = \"header:x-api-key\"";
        let other = "r: warning: `[clients]` reads `header:x-api-key`, and the rule counts by `header:x-user`, which a client \
                     can choose freely: count by `client`, or read `header:x-user` there";
        let counted = "r: warning: counts by `header:x-api-key`, which a client can choose freely, so a new value is a new quota: \
                       count by `client`, set `on_unknown_key = \"refuse\"`, or add a rule by `ip` to the route `/{*rest}`";
        let key = "\"header:x-api-key\"";
        assert_eq!(notes(clients, key, "", "\"r\""), [counted]);
        assert!(notes(clients, key, "", "\"r\", \"address\"").is_empty());
        assert_eq!(
            notes(clients, key, "on_unknown_key = \"missing\"", "\"r\""),
            [counted],
            "missing keys are not counted"
        );
        assert!(notes(clients, key, "on_unknown_key = \"refuse\"", "\"r\"").is_empty());
        let two = "[\"header:x-api-key\", \"header:x-user\"]";
        assert_eq!(notes(clients, two, "on_unknown_key = \"refuse\"", "\"r\""), [other]);
        assert_eq!(notes(clients, "\"header:x-user\"", "", "\"r\""), [other]);
        assert!(notes(clients, "\"header:x-user\"", "", "\"r\", \"address\"").is_empty());
        let plan = "[rules.r.plans.gold]\nwindows = [\"9/minute\"]";
        assert_eq!(notes(clients, "\"header:x-user\"", plan, "\"r\", \"address\""), [other]);
        assert!(notes("", "\"basic-user\"", "", "\"r\"").is_empty(), "the upstream verifies the password");
    }

    #[test]
    fn unused_plans_and_an_exposed_admin_address_are_reported() {
        let plan = "[rules.r]\nkey = \"ip\"\nwindows = [\"5/minute\"]\n[rules.r.plans.gold]\nwindows = [\"9/minute\"]";
        assert_eq!(
            messages_of_rules(plan, "\"r\"")[2],
            "r: warning: no client can have the plan `gold`: there is no `[clients]`"
        );
        let admin = |address: &str| messages_of_rules(&format!("[listen]\nadmin = \"{address}\""), "");
        let note = "warning: `admin` listens on `0.0.0.0:9900`: anyone who can connect can read the metrics, and use up and \
                    reset every limit; set `token_file` in `[admin]`";
        assert_eq!(admin("0.0.0.0:9900"), [note]);
        for address in ["192.0.2.1:9900", "[::]:9900", "[2001:db8::1]:9900"] {
            assert_eq!(admin(address).len(), 1, "{address}");
        }
        for address in ["127.0.0.1:9900", "127.8.9.1:0", "[::1]:9900"] {
            assert!(admin(address).is_empty(), "{address}");
        }
        let with_token = |token: &str| {
            let text = "[listen]\nadmin = \"0.0.0.0:9900\"\n[admin]\ntoken_file = \"token\"\n\
                        [[routes]]\npath = \"/{*rest}\"\nrespond = { status = 200 }\n";
            let config = crate::read_with_files(text, &|_| Ok(token.as_bytes().to_vec()));
            messages(&config.unwrap_or_else(|problems| panic!("{problems:?}")))
                .iter()
                .map(LintMessage::to_string)
                .collect::<Vec<_>>()
        };
        let short =
            "warning: the token of `token_file` has 6 characters: create a longer one, such as `openssl rand -hex 32`";
        assert_eq!(with_token("secret\n"), [short]);
        assert!(with_token("0123456789abcdef").is_empty());
    }
}
