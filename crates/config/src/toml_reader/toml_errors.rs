//! Reports TOML syntax errors in plain words, and skips them so that the rest of the file can be read.
//!
//! One mistake causes many errors of the parser. So only the first error is reported; its statement is replaced with
//! spaces, which keeps all positions, and the text is parsed again until there are no errors. This file does not know
//! keys.

use std::borrow::Cow;

use toml::Spanned;
use toml::de::{DeTable, DeValue, Error};

use super::yaml;
use crate::diagnostics::{Report, Span, quoted};
use crate::redaction::Secrets;

/// A text with more errors is probably not a configuration; the rest of it is not read.
const MAX_ERRORS: usize = 50;

/// Quotes of word processors and Markdown, which TOML does not support.
const FOREIGN_QUOTES: [char; 13] = ['“', '”', '„', '‟', '″', '«', '»', '‘', '’', '‚', '‛', '´', '`'];

/// Beginnings of parser messages about a line that is not a setting.
const NOT_A_SETTING: [&str; 3] = ["key with no value", "invalid key-value pair", "invalid unquoted key"];

/// Parts of parser messages about a value that begins like a number but is not one.
const NUMBER_ERRORS: [&str; 6] = ["integer", "float", "fraction", "leading zero", "between digits", "date"];

/// Reports the syntax errors of a text and returns the text without them.
pub fn skip_syntax_errors<'t>(text: &'t str, report: &mut Report) -> Cow<'t, str> {
    let mut valid = Cow::Borrowed(text);
    for _ in 0..MAX_ERRORS {
        let (document, errors) = DeTable::parse_recoverable(&valid);
        let Some(first) = errors.iter().min_by_key(|error| error_span(error).start) else {
            return valid;
        };
        let error = SyntaxError::find(&valid, document.get_ref(), first, &errors);
        report.has_syntax_errors = true;
        let (message, fix) = error.explain(&valid, first.message(), text, report);
        report.problem(error.display_span(&valid, first.message()), message, fix);
        if valid[error.statement.clone()].trim().is_empty() {
            break;
        }
        valid = Cow::Owned(blank_out(&valid, error.statement));
    }
    Cow::Owned(String::new())
}

fn error_span(error: &Error) -> Span {
    error.span().unwrap_or(0..0)
}

/// Replaces each byte with a space, except line ends.
pub fn blank_out(text: &str, part: Span) -> String {
    let blank = |c: char| if c == '\n' { "\n".to_owned() } else { " ".repeat(c.len_utf8()) };
    let middle: String = text[part.clone()].chars().map(blank).collect();
    format!("{}{middle}{}", &text[..part.start], &text[part.end..])
}

/// The first syntax error of a text.
struct SyntaxError {
    /// Where the parser stopped.
    at: Span,
    /// The lines to skip.
    statement: Span,
    /// A list, table or multi-line string has no end, so that it extends to the end of the file.
    is_unclosed: bool,
}

impl SyntaxError {
    fn find(text: &str, document: &DeTable, error: &Error, errors: &[Error]) -> SyntaxError {
        let at = error_span(error);
        let start = line_start(text, at.start);
        if let Some((key, value)) = setting_at(document, at.start) {
            let statement = line_start(text, key.start);
            let whole = &text[value.clone()];
            let is_multi_line = whole.starts_with("\"\"\"") || whole.starts_with("'''");
            let is_open_string = is_multi_line
                && errors.iter().any(|error| {
                    error.message().starts_with("invalid multi-line") && error_span(error).start == value.end
                });
            if let Some(open) = unmatched_bracket(whole).or(is_open_string.then_some(0)) {
                let end = next_line_start(text, key.start, |line| is_header(line) || is_setting(line));
                let at = value.start + unmatched_bracket(&text[value.start..end.max(value.start)]).unwrap_or(open);
                return SyntaxError { at: at..at + 1, statement: statement..end, is_unclosed: true };
            }
            let statement = statement..line_end(text, value.end.max(at.start));
            return SyntaxError { at, statement, is_unclosed: false };
        }
        let end = match is_header(&text[start..]) || lacks_opening_bracket(&text[start..]) {
            // Settings below an invalid header belong to no table.
            true => next_line_start(text, start, is_header),
            false => line_end(text, at.start),
        };
        SyntaxError { at, statement: start..end, is_unclosed: false }
    }

    /// The span to show: the mistake may begin before the position where the parser stopped.
    fn display_span(&self, text: &str, parser_message: &str) -> Span {
        let line = line_start(text, self.at.start)..line_end(text, self.at.start);
        if NOT_A_SETTING.iter().any(|part| parser_message.starts_with(part)) {
            let indent = text[line.clone()].len() - text[line.clone()].trim_start().len();
            return line.start + indent..line.start + text[line.clone()].trim_end().len();
        }
        if NUMBER_ERRORS.iter().any(|part| parser_message.contains(part)) {
            return self.value_span(text);
        }
        let quotes = self.foreign_quotes(text).map(|(span, _)| span);
        quotes.or_else(|| self.reference(text)).unwrap_or_else(|| self.at.clone())
    }

    /// A reference without quotes. The parser stops behind its `$`.
    fn reference(&self, text: &str) -> Option<Span> {
        let rest = &text[self.at.start..line_end(text, self.at.start)];
        let end = rest.find('}').filter(|_| rest.starts_with("${"))?;
        Some(self.at.start..self.at.start + end + 1)
    }

    /// A string in quotes that TOML does not support: its span with the quotes, and its contents.
    fn foreign_quotes<'t>(&self, text: &'t str) -> Option<(Span, &'t str)> {
        let line = &text[self.at.start..line_end(text, self.at.start)];
        let inner = line.strip_prefix(FOREIGN_QUOTES)?;
        let begin = line.len() - inner.len();
        let quote = |c: char| c == '"' || c == '\'' || FOREIGN_QUOTES.contains(&c);
        let length = inner.find(quote).or(inner.find([',', ']', '#'])).unwrap_or(inner.len());
        let closing = inner[length..].chars().next().filter(|c| quote(*c)).map_or(0, char::len_utf8);
        Some((self.at.start..self.at.start + begin + length + closing, inner[..length].trim()))
    }

    /// The whole value in which the parser stopped.
    fn value_span(&self, text: &str) -> Span {
        let line = line_start(text, self.at.start);
        let from = text[line..self.at.start].rfind(['=', '[', ',', ' ']).map_or(self.at.start, |at| line + at + 1);
        let length = text[from..].find([',', ']', '#', '\n', '\r', ' ']).unwrap_or(text.len() - from);
        from..from + length
    }

    /// Message and fix. `text` is `original` without the statements with earlier errors.
    fn explain(&self, text: &str, parser_message: &str, original: &str, report: &Report) -> (String, String) {
        let line = text[line_start(text, self.at.start)..line_end(text, self.at.start)].trim();
        let value = &text[self.at.clone()];
        let is_about = |start: &str| parser_message.starts_with(start);
        let pair = |message: &str, fix: &str| (message.to_owned(), fix.to_owned());
        if self.is_unclosed {
            match text[self.at.start..].chars().next() {
                Some('[') => pair("this list is never closed", "write `]` after its last item"),
                Some('{') => pair("this table is never closed", "write `}` after its last value"),
                _ => pair("this string is never closed", "close it with the same three quotes"),
            }
        } else if is_about("string values must be quoted") && value.is_empty() {
            pair("there is no value after `=`", "write a value, or remove the line")
        } else if let (true, Some((span, inner))) =
            (is_about("string values must be quoted"), self.foreign_quotes(text))
        {
            let fix = format!("write straight quotes: `\"{}\"`", without_quotes(inner));
            (format!("{} has quotes that TOML does not support", quoted(&text[span])), fix)
        } else if is_about("string values must be quoted") || is_about("invalid boolean") {
            explain_unquoted_word(self.reference(text).map_or(value, |span| &text[span]))
        } else if lacks_opening_bracket(line) {
            explain_header(line, "this header does not begin with `[`")
        } else if NOT_A_SETTING.iter().any(|start| is_about(start)) {
            let number = text[..self.at.start].matches('\n').count();
            // The fix quotes the text, so secrets are masked.
            let fix = match yaml::toml_fix(&Secrets::find(original).masked_text(), number) {
                Some(fix) => format!("this is TOML, not YAML: {fix}"),
                None if line.starts_with('{') => {
                    String::from("this is TOML, not JSON: write `[table]`, then `key = value`")
                }
                None => String::from("write `key = value`; a key has letters, digits, `_` and `-`"),
            };
            (format!("{} is not a setting", quoted(line)), fix)
        } else if is_about("unclosed table") || is_about("unclosed array table") {
            explain_header(line, "this header has no closing bracket after its name")
        } else if is_about("missing comma") {
            pair("a comma is missing between two values", "write `,` before this one")
        } else if is_about("extra comma") {
            pair("there is an extra comma", "remove it")
        } else if is_about("invalid basic string") || is_about("invalid literal string") {
            match line.chars().rfind(|c| FOREIGN_QUOTES.contains(c)).filter(|_| value.is_empty()) {
                Some(quote) => {
                    let fix = format!(
                        "close it with the quote that it began with, instead of {}",
                        quoted(&quote.to_string())
                    );
                    (String::from("a string is not closed on its line"), fix)
                }
                None if value.is_empty() => pair("a string is not closed on its line", "add the closing quote"),
                None => {
                    pair("a string contains a character that is not allowed", "remove it, or escape it as `\\uXXXX`")
                }
            }
        } else if is_about("missing escaped value") || is_about("too few unicode value digits") {
            pair(
                "a backslash in a string must begin an escape such as `\\n`",
                "write `\\\\` for a backslash, or put the string in single quotes",
            )
        } else if is_about("unexpected key or value") && line.starts_with('[') && value.is_empty() {
            explain_header(line, "the brackets of this header do not match")
        } else if is_about("unexpected key or value") {
            pair("there is more text after the value", "move it to a new line, or remove it")
        } else if is_about("duplicate key") {
            explain_duplicate_key(text, self.at.clone(), report)
        } else if is_about("cannot extend value") {
            let message = format!("{} already has a value and cannot also be a table", quoted(value));
            (message, String::from("remove the value or the table"))
        } else if is_about("carriage return") {
            pair("a carriage return is not followed by a line feed", "save the file with line ends `\\n` or `\\r\\n`")
        } else {
            self.explain_number(text, parser_message)
        }
    }

    /// Message and fix for values that begin like a number, and for all rare errors.
    fn explain_number(&self, text: &str, parser_message: &str) -> (String, String) {
        let value = text[self.value_span(text)].trim();
        let is_numeric = value.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
        if is_numeric && value.contains(|c: char| c.is_alphabetic() || c == ':' || c == '.') {
            let fix = format!("put a string in quotes: `\"{}\"`; a number has digits only", without_quotes(value));
            (format!("{} is not a value", quoted(value)), fix)
        } else if is_numeric {
            let fix = "write digits only, without a leading zero, with `_` only between digits";
            (format!("{} is not a number", quoted(value)), fix.to_owned())
        } else if NUMBER_ERRORS.iter().any(|part| parser_message.contains(part)) {
            // The value begins like `inf` or `nan`.
            explain_unquoted_word(value)
        } else {
            let fix = "a line is `key = value` or `[table]`; strings need quotes";
            (format!("this is not TOML: {parser_message}"), fix.to_owned())
        }
    }
}

/// The spans of key and value of the setting that contains a position, or ends there.
fn setting_at(table: &DeTable, at: usize) -> Option<(Span, Span)> {
    table.iter().find_map(|(key, value)| {
        let (key_span, span) = (key.span(), value.span());
        if span.start >= key_span.end && (key_span.start..=span.end).contains(&at) {
            return Some((key_span, span));
        }
        match value.get_ref() {
            DeValue::Table(table) => setting_at(table, at),
            DeValue::Array(items) => items.iter().find_map(|item: &Spanned<DeValue>| match item.get_ref() {
                DeValue::Table(table) => setting_at(table, at),
                _ => None,
            }),
            _ => None,
        }
    })
}

/// The position of the first bracket without a counterpart in the text of a list or table.
fn unmatched_bracket(value: &str) -> Option<usize> {
    if !value.starts_with(['[', '{']) {
        return None;
    }
    let mut open = Vec::new();
    let mut quote = None;
    let mut comment = false;
    for (at, c) in value.char_indices() {
        match (c, quote) {
            ('\n', _) => (quote, comment) = (None, false),
            _ if comment => {}
            (c, Some(end)) if c == end => quote = None,
            (_, Some(_)) => {}
            ('"' | '\'', None) => quote = Some(c),
            ('#', None) => comment = true,
            ('[' | '{', None) => open.push((at, c)),
            (']' | '}', None) => match open.pop() {
                Some((_, '[')) if c == ']' => {}
                Some((_, '{')) if c == '}' => {}
                Some((at, _)) => return Some(at),
                None => return None,
            },
            _ => {}
        }
    }
    open.last().map(|(at, _)| *at)
}

pub fn line_start(text: &str, at: usize) -> usize {
    text[..at].rfind('\n').map_or(0, |newline| newline + 1)
}

fn line_end(text: &str, at: usize) -> usize {
    text[at..].find('\n').map_or(text.len(), |newline| at + newline)
}

/// The start of the first line after a position that meets the condition, or the end of the text.
fn next_line_start(text: &str, at: usize, wanted: fn(&str) -> bool) -> usize {
    let mut start = line_end(text, at);
    while start < text.len() {
        start += 1;
        if wanted(&text[start..]) {
            return start;
        }
        start = line_end(text, start);
    }
    text.len()
}

pub fn is_header(text: &str) -> bool {
    let line = text.trim_start_matches([' ', '\t']);
    line.starts_with('[') && !line.starts_with("[\"") && !line.starts_with("['")
}

/// Whether a line is a header without the bracket at its start.
fn lacks_opening_bracket(text: &str) -> bool {
    let line = text.lines().next().unwrap_or("").split('#').next().unwrap_or("").trim();
    line.strip_suffix(']').is_some_and(|name| is_name(name.trim_end_matches(']')))
}

fn is_setting(text: &str) -> bool {
    let line = text.lines().next().unwrap_or("");
    line.split_once('=').is_some_and(|(key, _)| is_name(key))
}

fn is_name(key: &str) -> bool {
    let key = key.trim();
    !key.is_empty() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b))
}

/// Message and fix for a word without quotes.
fn explain_unquoted_word(word: &str) -> (String, String) {
    let fix = match word.to_ascii_lowercase().as_str() {
        word @ ("true" | "false") => format!("write `{word}`, in lower case"),
        "yes" | "on" => "write `true`".to_owned(),
        "no" => "write `false`".to_owned(),
        reference if reference.starts_with('$') => {
            format!("write a reference in quotes: `\"{}\"`", without_quotes(word))
        }
        // Some settings accept it as a string.
        "off" => "write `false`, or `\"off\"` for a setting with several choices".to_owned(),
        _ => format!("put it in quotes: `\"{}\"`", without_quotes(word)),
    };
    (format!("{} is not a value", quoted(word)), fix)
}

/// The value without characters that quotes cannot hold, truncated. Variables of a shell become references.
fn without_quotes(value: &str) -> String {
    let plain: String = value.trim().chars().filter(|c| *c != '"' && *c != '\\' && !c.is_control()).take(60).collect();
    let is_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    let mut parts = plain.split('$');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let inner = part.strip_prefix('{').unwrap_or(part);
        let (name, rest) = inner.split_at(inner.find(|c| !is_name(c)).unwrap_or(inner.len()));
        // Behind a name in braces may be a default value, which references do not have.
        let rest = if inner.len() == part.len() { Some(rest) } else { rest.split_once('}').map(|(_, rest)| rest) };
        match rest.filter(|_| name.starts_with(|c: char| c.is_ascii_uppercase() || c == '_')) {
            Some(rest) => out.extend(["${env:", name, "}", rest]),
            None => out.extend(["$", part]),
        }
    }
    out
}

fn explain_header(line: &str, message: &str) -> (String, String) {
    let line = line.split('#').next().unwrap_or(line).trim();
    let name = line.trim_matches(['[', ']']).trim();
    let (open, close) = if line.starts_with("[[") || line.ends_with("]]") { ("[[", "]]") } else { ("[", "]") };
    let joined: Vec<&str> = name.split_whitespace().collect();
    let (name, reason) = match joined.as_slice() {
        [_, _, ..] => (joined.join("-"), "a name has no spaces; "),
        _ => (name.to_owned(), ""),
    };
    let known = is_name(&name);
    let fix = if known { format!("{reason}write `{open}{name}{close}`") } else { format!("write `{open}NAME{close}`") };
    (message.to_owned(), fix)
}

/// Message and fix for a key that is defined twice. The parser does not report the first definition, so it is searched
/// in the text.
fn explain_duplicate_key(text: &str, at: Span, report: &Report) -> (String, String) {
    let start = line_start(text, at.start);
    let line = text[start..line_end(text, at.start)].trim();
    let name = quoted(&text[at]);
    let key = |line: &str| line.split('=').next().unwrap_or("").trim().to_owned();
    let earlier: Vec<&str> = text[..start].split_inclusive('\n').collect();
    let found = earlier.iter().rev().take_while(|other| is_header(line) || !is_header(other));
    let found = found.scan(start, |end, other| {
        *end -= other.len();
        Some((*end, other))
    });
    let message = match found.into_iter().find(|(_, other)| key(other) == key(line)) {
        Some((other, _)) => format!("{name} is already defined on line {}", report.line_seen_from(other, start)),
        None => format!("{name} is already defined"),
    };
    let fix = match is_header(line) {
        true => "give it another name, or put both under one header",
        false => "keep one of the two",
    };
    (message, fix.to_owned())
}
