//! Texts with variables, such as `https://{host}{uri}`. A variable in braces is replaced by a value of the request.

use super::diagnostics::{Parsed, Report, quoted, quoted_list};
use super::path::PathPattern;
use super::toml_reader::{SpannedString, nearest};

/// A text with variables.
#[derive(Clone, PartialEq, Debug)]
pub struct Template(pub Vec<TemplatePart>);

#[derive(Clone, PartialEq, Debug)]
pub enum TemplatePart {
    Literal(String),
    Variable(Variable),
}

#[derive(Clone, PartialEq, Debug)]
pub enum Variable {
    /// The client's IP address.
    ClientIp,
    /// `http` or `https`.
    Scheme,
    /// Lower case, without port.
    Host,
    /// As `Host`, with the port that the request names.
    Authority,
    Method,
    /// Normalized.
    Path,
    /// As received, without the question mark; empty if there is none.
    Query,
    /// The path, with `?` and the query if there is one.
    Uri,
    /// The name of the route.
    Route,
    /// The name of the client; empty without one.
    Client,
    /// The plan of the client, or of the token; empty without one.
    Plan,
    /// The route's parameter at this position.
    Param(usize),
}

const VARIABLES: [(&str, Variable); 11] = [
    ("client_ip", Variable::ClientIp),
    ("scheme", Variable::Scheme),
    ("host", Variable::Host),
    ("authority", Variable::Authority),
    ("method", Variable::Method),
    ("path", Variable::Path),
    ("query", Variable::Query),
    ("uri", Variable::Uri),
    ("route", Variable::Route),
    ("client", Variable::Client),
    ("plan", Variable::Plan),
];

/// The prefix of a variable that is a parameter of the route's path.
const PARAM: &str = "param.";

/// Variables here, and variables of nginx with the same value.
const NGINX: [(&str, &[&str]); 8] = [
    ("{client_ip}", &["remote_addr", "binary_remote_addr"]),
    ("{host}", &["host", "server_name"]),
    ("{authority}", &["http_host"]),
    ("{method}", &["request_method"]),
    ("{scheme}", &["scheme"]),
    ("{path}", &["uri", "document_uri"]),
    ("{uri}", &["request_uri"]),
    ("{query}", &["args", "query_string"]),
];

/// Variables here, and parts of variables of HAProxy and Envoy with the same value.
const FORMAT_VARIABLES: [(&str, &[&str]); 7] = [
    ("{client_ip}", &["[src]", "DOWNSTREAM_REMOTE_ADDRESS", "DOWNSTREAM_DIRECT_REMOTE_ADDRESS"]),
    ("{authority}", &["hdr(host)", "(:AUTHORITY)"]),
    ("{method}", &["[method]", "(:METHOD)"]),
    ("{path}", &["[path]"]),
    ("{query}", &["[query]"]),
    ("{uri}", &["[pathq]", "[url]", "(:PATH)"]),
    ("{scheme}", &["(:SCHEME)"]),
];

/// Variables here, and placeholders of Caddy with the same value.
const CADDY: [(&str, &[&str]); 7] = [
    ("client_ip", &["remote_host", "http.request.remote.host", "http.request.remote", "http.vars.client_ip"]),
    ("host", &["http.request.host"]),
    ("authority", &["hostport", "http.request.hostport"]),
    ("method", &["http.request.method"]),
    ("path", &["http.request.uri.path"]),
    ("query", &["http.request.uri.query"]),
    ("uri", &["http.request.uri"]),
];

/// Other variables of nginx.
const NGINX_NAMES: [&str; 9] = [
    "hostname",
    "https",
    "request",
    "request_body",
    "request_completion",
    "request_filename",
    "request_id",
    "request_length",
    "request_time",
];

/// Variables of nginx whose names may as well be literal words.
const NGINX_WORDS: [&str; 17] = [
    "body_bytes_sent",
    "bytes_sent",
    "connection",
    "content_length",
    "content_type",
    "date_gmt",
    "date_local",
    "document_root",
    "is_args",
    "limit_conn_status",
    "limit_rate",
    "limit_req_status",
    "msec",
    "nginx_version",
    "pid",
    "realpath_root",
    "status",
];

/// How the names of further variables of nginx begin.
const NGINX_PREFIXES: [&str; 17] = [
    "arg_",
    "connection_",
    "cookie_",
    "geoip_",
    "geoip2_",
    "http_",
    "jwt_",
    "proxy_",
    "realip_",
    "remote_",
    "request_body_",
    "sent_http_",
    "server_",
    "ssl_",
    "tcpinfo_",
    "time_",
    "upstream_",
];

/// How the names of variables of nginx begin whose values are not available here, and why.
const NGINX_UNAVAILABLE: [(&str, &str); 5] = [
    ("geoip_", "the gateway does not know where addresses are"),
    ("geoip2_", "the gateway does not know where addresses are"),
    ("jwt_", "claims can be parts of keys, such as `jwt:sub`; the upstream gets the whole token"),
    ("sent_http_", "a field cannot be set to the value of another field of the response"),
    ("tcpinfo_", "the gateway does not read statistics of TCP connections"),
];

impl Template {
    /// Whether the text tells whose request it is.
    pub fn names_client(&self) -> bool {
        self.0.iter().any(|part| matches!(part, TemplatePart::Variable(Variable::Client | Variable::Plan)))
    }

    /// What looks like a variable of another product and is sent literally, and what to write instead.
    pub fn foreign_variable(&self) -> Option<(&str, String)> {
        self.0.iter().find_map(|part| match part {
            TemplatePart::Literal(text) => foreign_variable(text),
            TemplatePart::Variable(_) => None,
        })
    }

    /// Reads a template; `{{` and `}}` stand for literal braces. `path` is the path of the route, unless it is invalid.
    pub fn read(written: &SpannedString, path: Option<&PathPattern>, report: &mut Report) -> Option<Template> {
        report.accept(written.span.clone(), parse(&written.text, path)).map(Template)
    }
}

fn parse(text: &str, path: Option<&PathPattern>) -> Parsed<Vec<TemplatePart>> {
    if let Some(c) = text.chars().find(|c| c.is_control() && *c != '\t') {
        let message = format!("a header field cannot contain {}", quoted(&c.to_string()));
        return Err((message, "write it on one line, without control characters".to_owned()));
    }
    if let Some((written, name)) = nginx_variables(text).find(|(_, name)| !NGINX_WORDS.contains(name)) {
        let meant = NGINX.iter().find(|(_, names)| names.contains(&name));
        let fix = match (meant, name) {
            (Some((meant, _)), _) => format!("write `{meant}`"),
            (None, "request_id") => String::from("remove it: the gateway sends the id in `X-Request-Id`"),
            (None, "proxy_add_x_forwarded_for") => {
                String::from("remove it: the gateway sends the client's address in `X-Forwarded-For`")
            }
            (None, name) => match NGINX_UNAVAILABLE.iter().find(|(prefix, _)| name.starts_with(prefix)) {
                Some((_, why)) => format!("remove it: {why}"),
                None => format!("remove it; the variables are {}", known_variables()),
            },
        };
        return Err((format!("{} is a variable of nginx, which would be sent literally", quoted(written)), fix));
    }
    let pieces = split_variables(text, "{host}", |name| parse_variable(name, path))?;
    let parts = pieces.into_iter().flat_map(|(literal, variable)| {
        let literal = Some(literal).filter(|literal| !literal.is_empty()).map(TemplatePart::Literal);
        literal.into_iter().chain(variable.map(TemplatePart::Variable))
    });
    Ok(parts.collect())
}

fn known_variables() -> String {
    quoted_list(VARIABLES.map(|(name, _)| format!("{{{name}}}")).iter().map(String::as_str), "and")
}

/// Splits a text into literals, each with the variable that follows it. `{{` and `}}` stand for literal braces; `example` is a
/// variable for messages.
pub fn split_variables<V>(
    text: &str,
    example: &str,
    variable: impl Fn(&str) -> Parsed<V>,
) -> Parsed<Vec<(String, Option<V>)>> {
    let mut pieces = Vec::new();
    let mut literal = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['{', '}']) {
        literal.push_str(&rest[..at]);
        let (brace, behind) = rest[at..].split_at(1);
        if let Some(behind) = behind.strip_prefix(brace) {
            literal.push_str(brace);
            rest = behind;
            continue;
        }
        let Some((name, behind)) = behind.split_once('}').filter(|_| brace == "{") else {
            let message = format!("{} has a brace that is not part of a variable", quoted(text));
            return Err((message, format!("write `{{{{` or `}}}}` for a brace, and `{example}` for a variable")));
        };
        pieces.push((std::mem::take(&mut literal), Some(variable(name)?)));
        rest = behind;
    }
    literal.push_str(rest);
    pieces.push((literal, None));
    Ok(pieces)
}

/// What looks like a variable of another product in a literal, and what to write instead.
fn foreign_variable(text: &str) -> Option<(&str, String)> {
    let (written, meant) = find_format_variable(text).or_else(|| Some((find_nginx_variable(text)?.0, None)))?;
    let fix = match meant {
        Some(meant) => format!("write `{meant}`"),
        None => format!("the variables are {}", known_variables()),
    };
    Some((written, fix))
}

/// The first variable of nginx in a text, and its name.
pub fn find_nginx_variable(text: &str) -> Option<(&str, &str)> {
    nginx_variables(text).next()
}

/// The variables of nginx in a text, such as `$remote_addr` or `${host}`, each with its name.
fn nginx_variables(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.match_indices('$').filter_map(move |(at, _)| {
        let (start, close) = if text[at + 1..].starts_with('{') { (at + 2, 1) } else { (at + 1, 0) };
        let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let end = text[start..].find(|c| !is_name(c)).map_or(text.len(), |length| start + length);
        let name = &text[start..end];
        let is_known = NGINX_NAMES.contains(&name)
            || NGINX_WORDS.contains(&name)
            || NGINX.iter().any(|(_, names)| names.contains(&name))
            || NGINX_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        is_known.then(|| (text.get(at..end + close).unwrap_or(&text[at..]), name))
    })
}

/// The first variable of HAProxy, such as `%[src]`, or of Envoy, such as `%REQ(:PATH)%`, in a text, and the variable here of the
/// same value.
pub fn find_format_variable(text: &str) -> Option<(&str, Option<&'static str>)> {
    text.match_indices('%').find_map(|(at, _)| {
        let rest = &text[at + 1..];
        let length = match rest.strip_prefix('[') {
            Some(inner) => inner.find(']')? + 2,
            None => {
                let name = rest.find(|c: char| !c.is_ascii_uppercase() && c != '_')?;
                // Not the percent-encoding of a byte, as in `%BD_%`.
                let is_name = name > 2 && !rest[..2].bytes().all(|byte| byte.is_ascii_hexdigit());
                let end = if rest[name..].starts_with('(') { name + rest[name..].find(')')? + 1 } else { name };
                end + (is_name && rest[end..].starts_with('%')).then_some(1)?
            }
        };
        let written = &text[at..=at + length];
        let meant = FORMAT_VARIABLES.iter().find(|(_, names)| names.iter().any(|name| written.contains(name)));
        Some((written, meant.map(|(meant, _)| *meant)))
    })
}

/// The first variable of header texts that stands in a text, with its braces.
pub fn find_variable(text: &str) -> Option<&str> {
    text.match_indices('{').find_map(|(at, _)| {
        let (name, _) = text[at + 1..].split_once('}')?;
        let is_known = name.starts_with(PARAM) || VARIABLES.iter().any(|(known, _)| *known == name);
        is_known.then(|| &text[at..at + name.len() + 2])
    })
}

fn parse_variable(name: &str, path: Option<&PathPattern>) -> Parsed<Variable> {
    if let (None, Some(_)) = (path, name.strip_prefix(PARAM)) {
        // The parameters of an invalid path are unknown, and the path is a problem already.
        return Ok(Variable::Param(0));
    }
    let params = path.map(PathPattern::param_names).unwrap_or_default();
    let params = params
        .iter()
        .enumerate()
        .filter(|(_at, name)| !name.is_empty())
        .map(|(at, name)| (format!("{PARAM}{name}"), Variable::Param(at)));
    let variables = VARIABLES.iter().map(|(name, variable)| ((*name).to_owned(), variable.clone()));
    let known: Vec<(String, Variable)> = variables.chain(params).collect();
    if let Some((_, variable)) = known.iter().find(|(known, _)| known == name) {
        return Ok(variable.clone());
    }
    let braced = |name: &str| format!("{{{name}}}");
    let of_caddy = CADDY.iter().find(|(_, names)| names.contains(&name)).map(|(meant, _)| *meant);
    let fix = match of_caddy.or_else(|| nearest(name, known.iter().map(|(name, _)| name.as_str()))) {
        Some(guess) => format!("did you mean {}?", quoted(&braced(guess))),
        None => {
            let known: Vec<String> = known.iter().map(|(name, _)| braced(name)).collect();
            format!("the variables are {}", quoted_list(known.iter().map(String::as_str), "and"))
        }
    };
    Err((format!("{} is not a variable", quoted(&braced(name))), fix))
}
