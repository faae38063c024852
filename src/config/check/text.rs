//! Texts with variables, such as `https://{host}{uri}`: what stands in braces is taken from the request.

use crate::config::PathPattern;
use crate::config::action::{Piece, Text, Variable};
use crate::config::document::{Word, nearest};
use crate::config::problem::{Report, listed, shown};

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

/// What stands before the name of one of the path's parameters.
const PARAM: &str = "param.";

/// Reads a text; `{{` and `}}` stand for braces.
pub fn text(word: &Word, path: Option<&PathPattern>, report: &mut Report) -> Option<Text> {
    if let Some(c) = word.text.chars().find(|c| c.is_control() && *c != '\t') {
        let message = format!("a header field can not have {} in it", shown(&c.to_string()));
        report.problem(word.span.clone(), message, "write it on one line, without characters that can not be seen");
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
            let message = format!("{} has a brace that belongs to no variable", shown(word.text));
            report.problem(word.span.clone(), message, "write `{{` or `}}` for a brace, and `{host}` for a variable");
            return None;
        };
        if !literal.is_empty() {
            pieces.push(Piece::Literal(std::mem::take(&mut literal)));
        }
        pieces.push(Piece::Variable(variable(name, path, word, report)?));
        rest = behind;
    }
    literal.push_str(rest);
    if !literal.is_empty() {
        pieces.push(Piece::Literal(literal));
    }
    Some(Text(pieces))
}

fn variable(name: &str, path: Option<&PathPattern>, word: &Word, report: &mut Report) -> Option<Variable> {
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
    // A path that could not be read may well have the parameter.
    if param.is_none() || path.is_some() {
        let braced = |name: &str| format!("{{{name}}}");
        let fix = match nearest(name, known()) {
            Some(guess) => format!("did you mean {}?", shown(&braced(guess))),
            None => {
                let known: Vec<String> = known().map(braced).collect();
                format!("there is {}", listed(known.iter().map(String::as_str), "and"))
            }
        };
        report.problem(word.span.clone(), format!("{} is no variable", shown(&braced(name))), fix);
    }
    None
}
