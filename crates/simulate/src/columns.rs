//! Reads lines of the extended log file format of the W3C: columns, which a line `#Fields:` names.

use memchr::memchr;

use super::field_names::{Field, LoggedFields, of_column};
use super::json_scanner::Escape;
use super::log_line::{HeaderSpan, LineFields, LogLine, NoRequest, escaped, span};

/// How a product writes the format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Dialect {
    pub separator: u8,
    /// A column that only this product has.
    pub own_column: Option<&'static str>,
    /// The unit of `time-taken`.
    pub taken: (&'static str, Field),
    /// How a path and a query are escaped, and how other texts are.
    pub target_escape: Escape,
    pub escape: Escape,
    /// The columns of a log without `#Fields:`.
    pub default_columns: &'static str,
}

/// What the columns of a file are about.
#[derive(Clone, Debug)]
pub struct Columns {
    fields: Vec<Option<(Field, u8)>>,
    dialect: &'static Dialect,
}

impl Columns {
    pub fn new(names: &str, dialect: &'static Dialect, logged: &LoggedFields) -> Columns {
        let of = |name: &str| match name == dialect.taken.0 {
            true => Some((dialect.taken.1, 1)),
            false => of_column(name, logged),
        };
        Columns { fields: names.split_ascii_whitespace().map(of).collect(), dialect }
    }

    /// The names in a line `#Fields:`, if it is one of a dialect.
    pub fn names(directive: &[u8], dialect: &Dialect, others: &[&'static Dialect]) -> Option<String> {
        let names = std::str::from_utf8(directive.strip_prefix(b"#Fields:")?).ok()?;
        let has = |column: &str| names.split_ascii_whitespace().any(|name| name == column);
        let is_own =
            dialect.own_column.map_or_else(|| !others.iter().any(|other| other.own_column.is_some_and(has)), has);
        is_own.then(|| names.to_owned())
    }

    pub fn read(&self, line: &[u8], headers: &mut Vec<HeaderSpan>) -> Result<LogLine, NoRequest> {
        let mut fields = LineFields::new(headers);
        let mut at = 0;
        for (position, field) in self.fields.iter().enumerate() {
            let is_last = position + 1 == self.fields.len();
            let length = match memchr(self.dialect.separator, &line[at.min(line.len())..]) {
                Some(_) if is_last => return Err(NoRequest::Bad("it has more columns than `#Fields:`")),
                Some(length) => length,
                None if is_last && at <= line.len() => line.len() - at,
                None => return Err(NoRequest::Bad("it has fewer columns than `#Fields:`")),
            };
            let mut text = span(at, length);
            at += length + 1;
            let Some(field) = field.filter(|_| !matches!(text.of(line), b"" | b"-")) else { continue };
            let escape = match field.0 {
                // The next column is the time of day.
                Field::EndTime => {
                    let rest = line.get(at..).unwrap_or_default();
                    let time = memchr(self.dialect.separator, rest).unwrap_or(rest.len());
                    text = span(text.at as usize, (at + time).min(line.len()) - text.at as usize);
                    Escape::None
                }
                Field::Target | Field::Query => self.dialect.target_escape,
                _ => self.dialect.escape,
            };
            fields.set(field, escaped(text, escape, line), line, headers);
        }
        // Times are in UTC.
        fields.finish(line, headers).map(|line| LogLine { lacks_zone: false, ..line })
    }
}
