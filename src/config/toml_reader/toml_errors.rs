//! What is no TOML at all: said in the operator's words, then cut out so that the rest can be read.
//!
//! One slip of the pen makes the parser stumble over much that follows. So only the first stumble
//! counts: it is reported, its statement is blanked out (blanks keep every place as it was), and the
//! text is parsed again, until nothing is left to stumble over. This file does not know any key.

use std::borrow::Cow;

use toml::Spanned;
use toml::de::{DeTable, DeValue, Error};

use super::yaml;
use crate::config::diagnostics::{Report, Span, quoted};
use crate::config::redaction::Secrets;

/// A text that stumbles more often is no gateway.toml; the rest of it is not read.
const MAX_ERRORS: usize = 50;

/// Quotes of word processors and of Markdown, which TOML does not know.
const FOREIGN_QUOTES: [char; 13] = ['“', '”', '„', '‟', '″', '«', '»', '‘', '’', '‚', '‛', '´', '`'];

/// How the parser begins to say that a line is no setting.
const NOT_A_SETTING: [&str; 3] = ["key with no value", "invalid key-value pair", "invalid unquoted key"];

/// What it says, among other things, about a value that begins like a number and is none.
const NUMBER_ERRORS: [&str; 6] = ["integer", "float", "fraction", "leading zero", "between digits", "date"];

/// Reports what is no TOML and returns the text without it.
pub fn skip_syntax_errors<'t>(text: &'t str, report: &mut Report) -> Cow<'t, str> {
    let mut sound = Cow::Borrowed(text);
    for _ in 0..MAX_ERRORS {
        let (document, errors) = DeTable::parse_recoverable(&sound);
        let Some(first) = errors.iter().min_by_key(|error| error_span(error).start) else {
            return sound;
        };
        let flaw = SyntaxError::find(&sound, document.get_ref(), first, &errors);
        report.has_syntax_errors = true;
        let (message, fix) = flaw.explain(&sound, first.message(), text);
        report.problem(flaw.display_span(&sound, first.message()), message, fix);
        if sound[flaw.statement.clone()].trim().is_empty() {
            break;
        }
        sound = Cow::Owned(blank_out(&sound, flaw.statement));
    }
    Cow::Owned(String::new())
}

fn error_span(error: &Error) -> Span {
    error.span().unwrap_or(0..0)
}

/// Replaces all but line ends with as many blanks as there were bytes.
fn blank_out(text: &str, part: Span) -> String {
    let blank = |c: char| if c == '\n' { "\n".to_owned() } else { " ".repeat(c.len_utf8()) };
    let middle: String = text[part.clone()].chars().map(blank).collect();
    format!("{}{middle}{}", &text[..part.start], &text[part.end..])
}

/// Where the parser stumbled.
struct SyntaxError {
    at: Span,
    /// Whole lines that belong to it.
    statement: Span,
    /// A list, table or text that runs on to the end of the file for want of its end.
    is_unclosed: bool,
}

impl SyntaxError {
    fn find(text: &str, document: &DeTable, error: &Error, errors: &[Error]) -> SyntaxError {
        let at = error_span(error);
        let start = line_start(text, at.start);
        if let Some((key, value)) = setting_at(document, at.start) {
            let statement = line_start(text, key.start);
            let whole = &text[value.clone()];
            let cut = whole.starts_with("\"\"\"") || whole.starts_with("'''");
            let cut = cut
                && errors.iter().any(|error| {
                    error.message().starts_with("invalid multi-line") && error_span(error).start == value.end
                });
            if let Some(open) = unmatched_bracket(whole).or(cut.then_some(0)) {
                let end = next_line_start(text, key.start, |line| is_header(line) || is_setting(line));
                let at = value.start + unmatched_bracket(&text[value.start..end.max(value.start)]).unwrap_or(open);
                return SyntaxError { at: at..at + 1, statement: statement..end, is_unclosed: true };
            }
            let statement = statement..line_end(text, value.end.max(at.start));
            return SyntaxError { at, statement, is_unclosed: false };
        }
        let end = match is_header(&text[start..]) || lacks_opening_bracket(&text[start..]) {
            // What follows a header that cannot be read belongs to nothing.
            true => next_line_start(text, start, is_header),
            false => line_end(text, at.start),
        };
        SyntaxError { at, statement: start..end, is_unclosed: false }
    }

    /// The place to show: the parser stops where it is lost, and the mistake may begin before.
    fn display_span(&self, text: &str, parser: &str) -> Span {
        let line = line_start(text, self.at.start)..line_end(text, self.at.start);
        if NOT_A_SETTING.iter().any(|what| parser.starts_with(what)) {
            let indent = text[line.clone()].len() - text[line.clone()].trim_start().len();
            return line.start + indent..line.start + text[line.clone()].trim_end().len();
        }
        if NUMBER_ERRORS.iter().any(|what| parser.contains(what)) {
            return self.value_span(text);
        }
        self.foreign_quotes(text).map_or(self.at.clone(), |(span, _)| span)
    }

    /// A text in quotes that TOML does not know, with the quotes, and what stands between them.
    fn foreign_quotes<'t>(&self, text: &'t str) -> Option<(Span, &'t str)> {
        let line = &text[self.at.start..line_end(text, self.at.start)];
        let inner = line.strip_prefix(FOREIGN_QUOTES)?;
        let begin = line.len() - inner.len();
        let quote = |c: char| c == '"' || c == '\'' || FOREIGN_QUOTES.contains(&c);
        let length = inner.find(quote).or(inner.find([',', ']', '#'])).unwrap_or(inner.len());
        let closing = inner[length..].chars().next().filter(|c| quote(*c)).map_or(0, char::len_utf8);
        Some((self.at.start..self.at.start + begin + length + closing, inner[..length].trim()))
    }

    /// All that was written for the value that the parser stopped in.
    fn value_span(&self, text: &str) -> Span {
        let line = line_start(text, self.at.start);
        let from = text[line..self.at.start].rfind(['=', '[', ',', ' ']).map_or(self.at.start, |at| line + at + 1);
        let length = text[from..].find([',', ']', '#', '\n', '\r', ' ']).unwrap_or(text.len() - from);
        from..from + length
    }

    /// Message and fix. `original` is the whole text, of which `text` lacks what was explained before.
    fn explain(&self, text: &str, parser: &str, original: &str) -> (String, String) {
        let line = text[line_start(text, self.at.start)..line_end(text, self.at.start)].trim();
        let value = &text[self.at.clone()];
        let has = |what: &str| parser.starts_with(what);
        let said = |message: &str, fix: &str| (message.to_owned(), fix.to_owned());
        if self.is_unclosed {
            match text[self.at.start..].chars().next() {
                Some('[') => said("this list is never closed", "write `]` after its last item"),
                Some('{') => said("this table is never closed", "write `}` after its last value"),
                _ => said("this text is never closed", "end it with the three quotes that it began with"),
            }
        } else if has("string values must be quoted") && value.is_empty() {
            said("there is no value after `=`", "write a value, or remove the line")
        } else if let (true, Some((span, inner))) = (has("string values must be quoted"), self.foreign_quotes(text)) {
            let fix = format!("write straight quotes: `\"{}\"`", without_quotes(inner));
            (format!("{} has quotes that TOML does not know", quoted(&text[span])), fix)
        } else if has("string values must be quoted") || has("invalid boolean") {
            explain_unquoted_word(value)
        } else if lacks_opening_bracket(line) {
            explain_header(line, "this header does not begin with `[`")
        } else if NOT_A_SETTING.iter().any(|what| has(what)) {
            let number = text[..self.at.start].matches('\n').count();
            // A fix never repeats a secret.
            let fix = match yaml::toml_fix(&Secrets::find(original).masked_text(), number) {
                Some(fix) => format!("this is TOML, not YAML: {fix}"),
                None if line.starts_with('{') => {
                    String::from("this is TOML, not JSON: write `[table]`, then `key = value`")
                }
                None => String::from("write `key = value`; a key has letters, digits, `_` and `-`"),
            };
            (format!("{} is no setting", quoted(line)), fix)
        } else if has("unclosed table") || has("unclosed array table") {
            explain_header(line, "this header is not closed where its name ends")
        } else if has("missing comma") {
            said("a comma is missing between two values", "write `,` before this one")
        } else if has("extra comma") {
            said("there is a comma too many", "remove it")
        } else if has("invalid basic string") || has("invalid literal string") {
            match line.chars().rfind(|c| FOREIGN_QUOTES.contains(c)).filter(|_| value.is_empty()) {
                Some(quote) => {
                    let fix =
                        format!("end it with the quote that it began with, instead of {}", quoted(&quote.to_string()));
                    (String::from("a text is not closed on its line"), fix)
                }
                None if value.is_empty() => said("a text is not closed on its line", "write the quote at its end"),
                None => said("a text has a character that must not be in it", "remove it, or write it as `\\u….`"),
            }
        } else if has("missing escaped value") || has("too few unicode value digits") {
            said(
                "a backslash in a text must begin an escape such as `\\n`",
                "write `\\\\` for a backslash, or put the text in single quotes",
            )
        } else if has("unexpected key or value") && line.starts_with('[') && value.is_empty() {
            explain_header(line, "the brackets of this header do not match")
        } else if has("unexpected key or value") {
            said("there is more on the line than one value", "begin a new line, or remove it")
        } else if has("duplicate key") {
            explain_duplicate_key(text, self.at.clone())
        } else if has("cannot extend value") {
            let message = format!("{} has a value already and cannot be a table as well", quoted(value));
            (message, String::from("remove the value or the table"))
        } else if has("carriage return") {
            said("a carriage return stands alone", "save the file with line ends `\\n` or `\\r\\n`")
        } else {
            self.explain_number(text, parser)
        }
    }

    /// Things that begin like a number and end like something else, and all that is rare.
    fn explain_number(&self, text: &str, parser: &str) -> (String, String) {
        let written = text[self.value_span(text)].trim();
        let digits = written.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
        if digits && written.contains(|c: char| c.is_alphabetic() || c == ':' || c == '.') {
            let fix =
                format!("a number is digits alone; anything else goes in quotes: `\"{}\"`", without_quotes(written));
            (format!("{} is no value", quoted(written)), fix)
        } else if digits {
            let fix = "write a number with digits alone, without a leading zero, with `_` only between digits";
            (format!("{} is no number", quoted(written)), fix.to_owned())
        } else if NUMBER_ERRORS.iter().any(|what| parser.contains(what)) {
            // It begins like `inf` or `nan`.
            explain_unquoted_word(written)
        } else {
            let fix = "a line is `key = value` or `[table]`; texts go in quotes";
            (format!("this is no TOML: {parser}"), fix.to_owned())
        }
    }
}

/// The setting, as the spans of its key and value, whose value goes through a place or ends there.
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

/// The place of the first bracket that lacks its counterpart, in the text of a list or table.
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

fn line_start(text: &str, at: usize) -> usize {
    text[..at].rfind('\n').map_or(0, |newline| newline + 1)
}

fn line_end(text: &str, at: usize) -> usize {
    text[at..].find('\n').map_or(text.len(), |newline| at + newline)
}

/// The start of the first line after a place that looks as wanted, or the end of the text.
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

fn is_header(text: &str) -> bool {
    let line = text.trim_start_matches([' ', '\t']);
    line.starts_with('[') && !line.starts_with("[\"") && !line.starts_with("['")
}

/// Whether a line is a header but for the bracket at its start.
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

/// A word without quotes.
fn explain_unquoted_word(word: &str) -> (String, String) {
    let fix = match word.to_ascii_lowercase().as_str() {
        word @ ("true" | "false") => format!("write `{word}`, in lower case"),
        "yes" | "on" => "write `true`".to_owned(),
        "no" => "write `false`".to_owned(),
        // Some settings have it as a word.
        "off" => "write `false`, or `\"off\"` where one of several words is meant".to_owned(),
        _ => format!("in quotes it is one: write `\"{}\"`", without_quotes(word)),
    };
    (format!("{} is no value", quoted(word)), fix)
}

/// What can be put in quotes as it is, and short enough to be read.
fn without_quotes(value: &str) -> String {
    value.trim().chars().filter(|c| *c != '"' && *c != '\\' && !c.is_control()).take(60).collect()
}

fn explain_header(line: &str, message: &str) -> (String, String) {
    let line = line.split('#').next().unwrap_or(line).trim();
    let name = line.trim_matches(['[', ']']).trim();
    let (open, close) = if line.starts_with("[[") || line.ends_with("]]") { ("[[", "]]") } else { ("[", "]") };
    let joined: Vec<&str> = name.split_whitespace().collect();
    let (name, reason) = match joined.as_slice() {
        [_, _, ..] => (joined.join("-"), "a name has no blanks; "),
        _ => (name.to_owned(), ""),
    };
    let known = is_name(&name);
    let fix = if known { format!("{reason}write `{open}{name}{close}`") } else { format!("write `{open}NAME{close}`") };
    (message.to_owned(), fix)
}

/// The parser does not say where a key was first; the text does, if it is spelt alike.
fn explain_duplicate_key(text: &str, at: Span) -> (String, String) {
    let start = line_start(text, at.start);
    let line = text[start..line_end(text, at.start)].trim();
    let name = quoted(&text[at]);
    let key = |line: &str| line.split('=').next().unwrap_or("").trim().to_owned();
    let earlier: Vec<(usize, &str)> = text[..start].lines().map(str::trim).enumerate().collect();
    let found = match is_header(line) {
        true => earlier.iter().rev().find(|(_, other)| key(other) == key(line)),
        false => {
            earlier.iter().rev().take_while(|(_, other)| !is_header(other)).find(|(_, other)| key(other) == key(line))
        }
    };
    let message = match found {
        Some((number, _)) => format!("{name} is already defined on line {}", number + 1),
        None => format!("{name} is already defined"),
    };
    let fix = match is_header(line) {
        true => "give it another name, or put both under one header",
        false => "keep one of the two",
    };
    (message, fix.to_owned())
}
