//! Reads lines by a pattern of texts and variables, which is written as in nginx: `$remote_addr [$time_local] "$request"`.

use memchr::{memchr, memchr_iter};

use super::field_names::{Field, KeyTree};
use super::json_scanner::{Escape, Span};
use super::log_line::{HeaderSpan, LineFields, LogLine, NoRequest, escaped, quoted, span, split_request};
use super::timestamp;

/// A pattern, compiled.
#[derive(Debug)]
pub struct Pattern {
    /// The text before the first variable.
    start: Box<[u8]>,
    parts: Vec<Part>,
    escape: Escape,
    /// The quotes of a line whose values are not escaped: with another number, a value has a quote, and what is behind it
    /// cannot be trusted.
    quotes: Option<usize>,
}

/// A variable, and the text behind it.
#[derive(Debug)]
struct Part {
    field: Option<(Field, u8)>,
    is_quoted: bool,
    /// Whether the value can have blanks.
    has_blanks: bool,
    end: Box<[u8]>,
}

/// Variables whose values have blanks, commas and semicolons.
const FREE_TEXTS: [&str; 6] =
    ["http_user_agent", "http_referer", "http_cookie", "http_authorization", "http_accept", "http_accept_language"];

impl Pattern {
    /// Compiles a pattern. With `escape`, values are escaped in this way; without one, a quote ends a value.
    ///
    /// # Errors
    ///
    /// A message for the user: what the pattern lacks.
    pub fn parse(text: &str, escape: Escape, names: &KeyTree) -> Result<Pattern, String> {
        let mut pattern = Pattern { start: Box::default(), parts: Vec::new(), escape, quotes: None };
        let mut variables = text.split('$');
        let start = variables.next().unwrap_or_default();
        pattern.start = start.as_bytes().into();
        let mut is_quoted = start.ends_with('"');
        let mut unclear = None;
        for variable in variables {
            let is_sign = |sign: char| sign.is_ascii_alphanumeric() || sign == '_';
            let (name, end) = match variable.strip_prefix('{').and_then(|braced| braced.split_once('}')) {
                Some(parts) => parts,
                None => variable.split_at(variable.find(|sign| !is_sign(sign)).unwrap_or(variable.len())),
            };
            let field = names.of_variable(name);
            if let Some(last) = pattern.parts.last()
                && last.end.is_empty()
                && !matches!(field, Some((Field::Target | Field::Url, _)))
            {
                return Err(format!("nothing is between `${name}` and the variable before it"));
            }
            let has_blanks = FREE_TEXTS.contains(&name) || matches!(field, Some((Field::RequestLine, _)));
            let part =
                Part { field, is_quoted: is_quoted && end.starts_with('"'), has_blanks, end: end.as_bytes().into() };
            if let Some((name, end)) = unclear.filter(|_| !part.is_time()) {
                return Err(format!(
                    "a value of `${name}` can contain `{end}`, the text behind it, so that its end is unknown: let nginx \
                     write it in quotes"
                ));
            }
            let is_in_values = !end.is_empty() && end.bytes().all(|sign| b" ,;()/".contains(&sign));
            let is_unclear = FREE_TEXTS.contains(&name) && is_in_values;
            unclear = is_unclear.then_some((name, end));
            pattern.parts.push(part);
            is_quoted = end.ends_with('"');
        }
        if escape == Escape::None {
            pattern.quotes = Some(text.matches('"').count());
        }
        let has =
            |wanted: &[Field]| pattern.parts.iter().any(|part| part.field.is_some_and(|of| wanted.contains(&of.0)));
        let required = [
            ("time", &[Field::Time, Field::EnvoyTime, Field::EndTime][..]),
            ("client", &[Field::Client, Field::ClientAndPort, Field::ProxyHeader, Field::Connection]),
            ("method", &[Field::RequestLine, Field::Method]),
            ("path", &[Field::RequestLine, Field::Target, Field::Url]),
        ];
        match required.iter().find(|(_, fields)| !has(fields)) {
            Some((name, _)) => Err(format!("it has no variable for the {name} of a request")),
            None => Ok(pattern),
        }
    }

    pub fn read(&self, line: &[u8], headers: &mut Vec<HeaderSpan>) -> Result<LogLine, NoRequest> {
        const OTHER: NoRequest = NoRequest::Bad("it is not in the format of the log");
        let mut fields = LineFields::new(headers);
        let mut at = self.start.len();
        if !line.starts_with(&self.start) {
            return Err(OTHER);
        }
        if self.quotes.is_some_and(|quotes| memchr_iter(b'"', line).count() != quotes) {
            return Err(NoRequest::Bad("it has more or fewer quotes than the format"));
        }
        for (position, part) in self.parts.iter().enumerate() {
            let text = part.text(line, at, self.escape, &self.parts[position + 1..]).ok_or(OTHER)?;
            // A request line `-` says that there was no request.
            let is_cut_off = !part.is_quoted && !part.is_time() && !part.accepts(text, line);
            if is_cut_off && text.of(line) != b"-" {
                return Err(NoRequest::Bad("its request is not `GET / HTTP/1.1`, and has no quotes around it"));
            }
            let is_set =
                |(field, _): &(Field, u8)| *field == Field::RequestLine || !matches!(text.of(line), b"" | b"-");
            if let Some(field) = part.field.filter(is_set) {
                fields.set(field, escaped(text, self.escape, line), line, headers);
            }
            at = (text.at + text.len) as usize + part.end.len();
        }
        fields.finish(line, headers)
    }
}

impl Part {
    fn is_time(&self) -> bool {
        matches!(self.field, Some((Field::Time | Field::EnvoyTime | Field::EndTime, _)))
    }

    /// Whether the value can be at this place: of values whose form is known, those that are not cut off.
    fn accepts(&self, value: Span, line: &[u8]) -> bool {
        match self.field {
            Some((Field::RequestLine, _)) => split_request(value, line).is_some(),
            _ if self.is_time() => {
                let behind = &line[(value.at + value.len) as usize..];
                let has_zone_behind = matches!(behind, [b' ', b'+' | b'-', b'0'..=b'9', ..]);
                timestamp::parse(value.of(line)).is_some_and(|time| time.has_zone || !has_zone_behind)
            }
            _ => true,
        }
    }

    /// The value at a position, before the text behind it.
    fn text(&self, line: &[u8], at: usize, escape: Escape, next: &[Part]) -> Option<Span> {
        let rest = line.get(at..)?;
        match (&*self.end, next.first()) {
            ([], None) => return Some(span(at, rest.len())),
            // `$host$request_uri`.
            ([], Some(_)) => return Some(span(at, memchr(b'/', rest)?)),
            _ if self.is_quoted => {
                let text = match escape {
                    Escape::Backslash => quoted(line, at.checked_sub(1)?)?,
                    _ => span(at, memchr(b'"', rest)?),
                };
                return line[(text.at + text.len) as usize..].starts_with(&self.end).then_some(text);
            }
            _ => {}
        }
        let ends = memchr_iter(self.end[0], rest).filter(|length| rest[*length..].starts_with(&self.end));
        let ends = ends.filter(|length| {
            let goes_on = self.end[0] == b' ' && is_in_list(rest, *length);
            // The name of a user, before the time, can have any sign.
            !goes_on && is_possible(next, line, at + length + self.end.len())
        });
        let mut values = ends.map(|length| span(at, length)).peekable();
        let first = values.peek().copied();
        values.find(|value| self.accepts(*value, line)).or(first)
    }

    /// The length of the value at a position, if it is not in quotes.
    fn plain_length(&self, line: &[u8], at: usize) -> Option<usize> {
        let (first, text) = (*self.end.first()?, line.get(at..)?);
        memchr_iter(first, text)
            .filter(|length| text[*length..].starts_with(&self.end))
            // A time has a blank before its zone.
            .take(2)
            .find(|length| self.accepts(span(at, *length), line))
    }
}

/// Whether the values of `parts` can be at a position: a time, and behind it a value without a blank. The name of a user,
/// which clients choose, could deceive otherwise.
fn is_possible(parts: &[Part], line: &[u8], at: usize) -> bool {
    let Some((time, parts)) = parts.split_first() else { return true };
    if !time.is_time() || time.end.is_empty() {
        return true;
    }
    let Some(length) = time.plain_length(line, at) else { return false };
    let at = at + length + time.end.len();
    let next = parts.first().filter(|part| !part.is_quoted && !part.has_blanks);
    let next = next.and_then(|part| part.plain_length(line, at));
    next.is_none_or(|length| memchr_iter(b' ', &line[at..at + length]).all(|blank| is_in_list(&line[at..], blank)))
}

/// Whether a blank is in a list: `203.0.113.7, 10.0.0.9`, or groups of upstream servers, `10.0.0.9:80 : 10.0.0.10:80`.
fn is_in_list(text: &[u8], blank: usize) -> bool {
    text[..blank].ends_with(b",") || text[..blank].ends_with(b" :") || text[blank..].starts_with(b" : ")
}
