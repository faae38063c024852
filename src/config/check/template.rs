//! Parses texts with variables, such as `https://{host}{uri}`. A variable in braces is replaced by a value of the
//! request.

use crate::config::diagnostics::{Report, quoted, quoted_list};
use crate::config::route::{PathPattern, Template, TemplatePart, Variable};
use crate::config::toml_reader::{SpannedStr, nearest};

const VARIABLES: [(&str, Variable); 8] = [
    ("client_ip", Variable::ClientIp),
    ("scheme", Variable::Scheme),
    ("host", Variable::Host),
    ("method", Variable::Method),
    ("path", Variable::Path),
    ("query", Variable::Query),
    ("uri", Variable::Uri),
    ("route", Variable::Route),
];

/// Variables of nginx, and their equivalents here; `None` if there is no equivalent.
const NGINX: [(&str, Option<&str>); 23] = [
    ("remote_addr", Some("{client_ip}")),
    ("binary_remote_addr", Some("{client_ip}")),
    ("realip_remote_addr", None),
    ("remote_port", None),
    ("remote_user", None),
    ("host", Some("{host}")),
    ("http_host", Some("{host}")),
    ("server_name", Some("{host}")),
    ("hostname", None),
    ("server_addr", None),
    ("server_port", None),
    ("server_protocol", None),
    ("proxy_add_x_forwarded_for", None),
    ("request", None),
    ("request_id", None),
    ("request_method", Some("{method}")),
    ("scheme", Some("{scheme}")),
    ("https", None),
    ("uri", Some("{path}")),
    ("document_uri", Some("{path}")),
    ("request_uri", Some("{uri}")),
    ("args", Some("{query}")),
    ("query_string", Some("{query}")),
];

/// Prefixes of nginx variables that end with the name of a field, parameter or similar.
const NGINX_PREFIXES: [&str; 8] = ["arg_", "connection_", "cookie_", "geoip_", "http_", "ssl_", "time_", "upstream_"];

/// The prefix of a variable that is a parameter of the route's path.
const PARAM: &str = "param.";

/// Reads a template; `{{` and `}}` stand for literal braces.
pub fn read_template(word: &SpannedStr, path: Option<&PathPattern>, report: &mut Report) -> Option<Template> {
    if let Some(c) = word.text.chars().find(|c| c.is_control() && *c != '\t') {
        let message = format!("a header field cannot contain {}", quoted(&c.to_string()));
        report.problem(word.span.clone(), message, "write it on one line, without control characters");
        return None;
    }
    if let Some((written, meant)) = find_nginx_variable(word.text) {
        let fix = match meant {
            Some(meant) => format!("write `{meant}`"),
            None => {
                let known: Vec<String> = VARIABLES.iter().map(|(known, _)| format!("{{{known}}}")).collect();
                format!("remove it; the variables are {}", quoted_list(known.iter().map(String::as_str), "and"))
            }
        };
        let message = format!("{} is a variable of nginx, which would be sent literally", quoted(written));
        report.problem(word.span.clone(), message, fix);
        return None;
    }
    let mut pieces = Vec::new();
    let mut literal = String::new();
    let mut rest = word.text;
    while let Some(at) = rest.find(['{', '}']) {
        literal.push_str(&rest[..at]);
        let brace = &rest[at..=at];
        let behind = &rest[at + 1..];
        if let Some(behind) = behind.strip_prefix(brace) {
            literal.push_str(brace);
            rest = behind;
            continue;
        }
        let Some((name, behind)) = behind.split_once('}').filter(|_| brace == "{") else {
            let message = format!("{} has a brace that is not part of a variable", quoted(word.text));
            report.problem(word.span.clone(), message, "write `{{` or `}}` for a brace, and `{host}` for a variable");
            return None;
        };
        if !literal.is_empty() {
            pieces.push(TemplatePart::Literal(std::mem::take(&mut literal)));
        }
        pieces.push(TemplatePart::Variable(read_variable(name, path, word, report)?));
        rest = behind;
    }
    literal.push_str(rest);
    if !literal.is_empty() {
        pieces.push(TemplatePart::Literal(literal));
    }
    Some(Template(pieces))
}

/// The first variable of nginx in a text, such as `$remote_addr` or `${host}`, and its equivalent here.
fn find_nginx_variable(text: &str) -> Option<(&str, Option<&'static str>)> {
    text.match_indices('$').find_map(|(at, _)| {
        let (start, close) = if text[at + 1..].starts_with('{') { (at + 2, 1) } else { (at + 1, 0) };
        let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let end = text[start..].find(|c| !is_name(c)).map_or(text.len(), |length| start + length);
        let name = &text[start..end];
        let meant = match NGINX.iter().find(|(known, _)| *known == name) {
            Some((_, meant)) => *meant,
            None => NGINX_PREFIXES.iter().any(|prefix| name.starts_with(prefix)).then_some(None)?,
        };
        Some((text.get(at..end + close).unwrap_or(&text[at..]), meant))
    })
}

fn read_variable(name: &str, path: Option<&PathPattern>, word: &SpannedStr, report: &mut Report) -> Option<Variable> {
    if let Some((_, variable)) = VARIABLES.iter().find(|(known, _)| *known == name) {
        return Some(variable.clone());
    }
    let params = path.map(PathPattern::param_names);
    let param = name.strip_prefix(PARAM);
    if let (Some(param), Some(params)) = (param, &params)
        && let Some(position) = params.iter().position(|known| *known == param)
    {
        return Some(Variable::Param(position));
    }
    let params: Vec<String> = params.unwrap_or_default().iter().map(|param| format!("{PARAM}{param}")).collect();
    let known = || VARIABLES.iter().map(|(known, _)| *known).chain(params.iter().map(String::as_str));
    // If the path of the route is invalid, its parameters are unknown, and no problem is reported.
    if param.is_none() || path.is_some() {
        let braced = |name: &str| format!("{{{name}}}");
        let fix = match nearest(name, known()) {
            Some(guess) => format!("did you mean {}?", quoted(&braced(guess))),
            None => {
                let known: Vec<String> = known().map(braced).collect();
                format!("the variables are {}", quoted_list(known.iter().map(String::as_str), "and"))
            }
        };
        report.problem(word.span.clone(), format!("{} is not a variable", quoted(&braced(name))), fix);
    }
    None
}
