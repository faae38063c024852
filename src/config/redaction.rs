//! Removes secrets from messages about a configuration, which quote its lines and end up in logs.
//!
//! Masked are values of keys that resemble `secret`, `password` or `digest_key`, private keys, and passwords in URLs.
//! They are found by pattern, because the file may not be valid TOML. Values of references are known, and hidden with their
//! parts: [`Hidden`].

use std::ops::Range;

use memchr::memmem;

/// The length of a prefix that reveals a secret when a message contains it.
const REVEALING_CHARS: usize = 4;
/// The length of a part of a value that reveals it, quoted or not.
const REVEALING_PART_BYTES: usize = 8;
/// A longer value has many short parts by chance.
const LONG_VALUE_BYTES: usize = 256;

/// The secret values of a text. The spans, in bytes, may include quotes.
pub struct Secrets<'t> {
    text: &'t str,
    spans: Vec<Range<usize>>,
}

impl<'t> Secrets<'t> {
    pub fn find(text: &'t str) -> Secrets<'t> {
        Secrets { text, spans: secret_spans(text) }
    }

    /// The text with each character of a secret replaced by `*`, so that line and column numbers stay the same.
    pub fn masked_text(&self) -> String {
        let mut out = String::with_capacity(self.text.len());
        let mut at = 0;
        for span in &self.spans {
            out.push_str(&self.text[at..span.start]);
            let mask = |c: char| if c == '\n' || c == '\r' || c == '"' || c == '\'' { c } else { '*' };
            out.extend(self.text[span.clone()].chars().map(mask));
            at = span.end;
        }
        out.push_str(&self.text[at..]);
        out
    }

    /// Replaces the secrets of the text, and beginnings of them, in a message by `***`.
    pub fn remove_from(&self, message: &mut String) {
        for span in &self.spans {
            let value = self.text[span.clone()].trim_matches(['"', '\'', ' ', '\t', '\r', '\n']);
            replace(message, value, "***");
        }
    }
}

/// Replaces a value, and beginnings of it, in a message.
fn replace(message: &mut String, value: &str, replacement: &str) {
    let Some((last, c)) = value.char_indices().nth(REVEALING_CHARS - 1) else { return };
    let beginning = &value[..last + c.len_utf8()];
    let mut at = 0;
    while let Some(offset) = message[at..].find(beginning) {
        let start = at + offset;
        let same = message[start..].chars().zip(value.chars()).take_while(|(a, b)| a == b);
        let length: usize = same.map(|(c, _)| c.len_utf8()).sum();
        message.replace_range(start..start + length, replacement);
        at = start + replacement.len();
    }
}

/// A value that came from a reference. Messages show the reference instead.
pub struct Hidden {
    /// The position of the string with the reference.
    span: Range<usize>,
    /// The value as it is, and as messages escape it. Both in lower case, because messages also show normalized values.
    forms: [String; 2],
    /// The reference as it is written.
    shown: String,
    /// The value is a whole string with references in it, of which other parts are not secret.
    is_composed: bool,
}

impl Hidden {
    pub fn value(span: Range<usize>, value: &str, shown: String) -> Hidden {
        let forms = [value.to_ascii_lowercase(), value.escape_debug().to_string().to_ascii_lowercase()];
        Hidden { span, forms, shown, is_composed: false }
    }

    pub fn composed(span: Range<usize>, value: &str, shown: String) -> Hidden {
        Hidden { is_composed: true, ..Hidden::value(span, value, shown) }
    }

    /// Removes the value from a message about the text at `span`. `is_public` recognizes words that do not come from the value.
    pub fn remove_from(&self, message: &mut String, span: &Range<usize>, is_public: impl Fn(&str) -> bool) {
        let is_about_value = self.span.start <= span.start && span.end <= self.span.end;
        if is_about_value {
            // The quoted values are the odd parts.
            let parts = message.split('`').enumerate().map(|(i, part)| match i % 2 {
                1 if self.reveals(part) && !is_public(part) => self.shown.as_str(),
                _ => part,
            });
            *message = parts.collect::<Vec<&str>>().join("`");
        }
        if !self.is_composed {
            // Elsewhere, a common part such as `http://127.0.0.1` is more likely one of the message.
            let whole = self.forms[0].len();
            self.remove_parts(message, if is_about_value { whole.min(REVEALING_PART_BYTES) } else { whole });
        }
    }

    /// Whether a quoted value is, or contains, a part of the hidden value.
    fn reveals(&self, quoted: &str) -> bool {
        let quoted = quoted.trim_matches(['"', '\'', ' ']).trim_end_matches('…').to_ascii_lowercase();
        if self.forms.contains(&quoted) {
            return true;
        }
        // A fix may show a short value with what is missing around it.
        let is_apart = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric());
        let contains = |form: &String| {
            quoted.match_indices(form.as_str()).any(|(at, _)| {
                let (before, behind) = (&quoted[..at], &quoted[at + form.len()..]);
                is_apart(before.chars().next_back()) && is_apart(behind.chars().next())
            })
        };
        if !self.is_composed && (2..REVEALING_CHARS).contains(&self.forms[0].chars().count()) {
            return self.forms.iter().any(contains);
        }
        if quoted.chars().count() < REVEALING_CHARS {
            return false;
        }
        if self.is_composed {
            return self.forms.iter().any(|form| form.starts_with(&quoted));
        }
        let least = if self.forms[0].len() > LONG_VALUE_BYTES { REVEALING_PART_BYTES } else { REVEALING_CHARS };
        quoted.char_indices().any(|(at, _)| self.common_length(&quoted[at..], least) > 0)
    }

    /// Replaces parts of the value of at least so many bytes, wherever they are.
    fn remove_parts(&self, message: &mut String, least: usize) {
        if least < REVEALING_CHARS {
            return;
        }
        let lower = message.to_ascii_lowercase();
        let mut out = String::with_capacity(message.len());
        let mut rest = message.as_str();
        while let Some(c) = rest.chars().next() {
            let length = self.common_length(&lower[message.len() - rest.len()..], least);
            if length > 0 {
                out += &self.shown;
            } else {
                out.push(c);
            }
            rest = &rest[length.max(c.len_utf8())..];
        }
        *message = out;
    }

    /// The length in bytes of the longest beginning of `text` that is a part of the value; 0 if that is less than `least`.
    fn common_length(&self, text: &str, least: usize) -> usize {
        if text.len() < least {
            return 0;
        }
        let beginning = &text[..text.ceil_char_boundary(least)];
        let length = |form: &String| {
            let starts = memmem::find_iter(form.as_bytes(), beginning);
            starts.map(|start| common_prefix(text, &form[start..])).max().unwrap_or(0)
        };
        self.forms.iter().map(length).max().unwrap_or(0)
    }
}

/// The length in bytes of the characters with which both texts begin.
fn common_prefix(one: &str, other: &str) -> usize {
    one.chars().zip(other.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum()
}

fn secret_spans(text: &str) -> Vec<Range<usize>> {
    let mut spans: Vec<Range<usize>> = Vec::new();
    // `=` as in TOML, or `:` as in YAML.
    for (at, _) in text.match_indices(['=', ':']) {
        let is_in_secret = spans.last().is_some_and(|last| at < last.end);
        let before = text[..at].trim_end_matches(['"', '\'', ' ', '\t']);
        let name = before.rsplit(|c: char| !c.is_alphanumeric() && c != '_' && c != '-').next().unwrap_or_default();
        let value = text[at + 1..].trim_start_matches([' ', '\t']);
        let label = pem_label_length(value);
        if !is_in_secret && (is_secret_key(name) || label > 0) {
            let start = text.len() - value.len();
            spans.push(start + label..start + value_length(value).max(label));
        }
    }
    let is_separate = |url: &Range<usize>| spans.iter().all(|span| url.end <= span.start || span.end <= url.start);
    let urls: Vec<Range<usize>> = url_passwords(text).into_iter().filter(is_separate).collect();
    spans.extend(urls);
    spans.sort_by_key(|span| span.start);
    spans
}

fn is_secret_key(name: &str) -> bool {
    let name = name.to_lowercase();
    // Bounds the work for long names, which are no misspelled keys.
    let is_near = |word: &str| name.len() < 16 && strsim::damerau_levenshtein(&name, word) <= 2;
    let is = |word: &str| is_near(word) || name.starts_with(word);
    (is("secret") || is("password") || name.starts_with("pass") || name.starts_with("token") || is("digest_key"))
        && !name.ends_with("file")
        && !name.ends_with("env")
}

/// The passwords of URLs, between `:` and `@`. The `@` is searched within the quotes; if the password contains a quote,
/// up to the next URL of the line.
fn url_passwords(text: &str) -> Vec<Range<usize>> {
    let mut spans = Vec::new();
    for (at, mark) in text.match_indices("://") {
        let start = at + mark.len();
        let rest = &text[start..];
        let line = &rest[..rest.find(['\n', '\r']).unwrap_or(rest.len())];
        let quoted = &line[..line.find(['"', '\'']).unwrap_or(line.len())];
        let open = &line[..line.find("://").unwrap_or(line.len())];
        let Some(end) = quoted.rfind('@').or_else(|| open.find('@')) else { continue };
        if let Some(colon) = line[..end].find(':') {
            spans.push(start + colon + 1..start + end);
        }
    }
    spans
}

/// If the value is a PEM private key instead of a file name: the length of its first line, which is not secret.
/// Otherwise 0.
fn pem_label_length(value: &str) -> usize {
    const END: &str = "PRIVATE KEY-----";
    let label = value.trim_start_matches(['"', '\'', '\n', '\r']).strip_prefix("-----BEGIN ");
    let end = label.and_then(|label| label.lines().next()?.find(END).map(|at| value.len() - label.len() + at));
    end.map_or(0, |end| end + END.len())
}

/// The length of a value: up to its closing quotes, or to the end of the line.
fn value_length(value: &str) -> usize {
    for (quote, is_multi_line) in [("\"\"\"", true), ("'''", true), ("\"", false), ("'", false)] {
        let Some(inner) = value.strip_prefix(quote) else { continue };
        let line = if is_multi_line { inner.len() } else { inner.find('\n').unwrap_or(inner.len()) };
        let mut escaped = false;
        for (at, c) in inner[..line].char_indices() {
            if !escaped && inner[at..].starts_with(quote) {
                return quote.len() + at + quote.len();
            }
            escaped = !escaped && c == '\\' && quote.starts_with('"');
        }
        return quote.len() + line;
    }
    value.find(['\n', '\r']).unwrap_or(value.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUE: &str = "hunter2-hunter2";

    #[test]
    fn a_secret_is_masked_in_every_notation() {
        for line in [
            "secret = \"hunter2-hunter2\"",
            "secret='hunter2-hunter2'",
            "\"secret\" = \"hunter2-hunter2\"",
            "{ algorithm = \"HS256\", secret = \"hunter2-hunter2\" }",
            "jwt.keys.secret = \"hunter2-hunter2\"",
            "secert = \"hunter2-hunter2\"",
            "Secrets = \"hunter2-hunter2\"",
            "secret = hunter2-hunter2",
            "secret: hunter2-hunter2",
            "secret = [\"hunter2-hunter2\"]",
            "token = \"hunter2-hunter2\"",
            "secret = \"hunter2-hunter2",
            "secret = \"\\\"hunter2-hunter2\"",
            "secret = \"\"\"\nhunter2-hunter2\n\"\"\"",
            "secret = '''\nhunter2-hunter2",
            "private_key = \"-----BEGIN EC PRIVATE KEY-----\\nhunter2-hunter2\"",
            "private_key = \"\"\"\n-----BEGIN PRIVATE KEY-----\nhunter2-hunter2\n\"\"\"",
        ] {
            let masked = Secrets::find(line).masked_text();
            assert!(!masked.contains("hunter"), "{masked}");
            assert_eq!(masked.chars().count(), line.chars().count());
        }
    }

    #[test]
    fn passwords_of_urls_are_masked() {
        for (line, masked) in [
            ("redis = \"redis://:hunter2@a\"", "redis = \"redis://:*******@a\""),
            ("redis = \"redis://me:h@nt:r/2@a:1/2\" # @", "redis = \"redis://me:********@a:1/2\" # @"),
            ("redis = [\"redis://u:pw@a\", \"redis://b\"]", "redis = [\"redis://u:**@a\", \"redis://b\"]"),
            ("redis = redis://:hunter2@a", "redis = redis://:*******@a"),
            ("redis = \"redis://:hunt\"er2@a\"", "redis = \"redis://:****\"***@a\""),
            ("redis = \"redis://me@a:6379\"", "redis = \"redis://me@a:6379\""),
            ("servers = [\"http://a:1\", \"http://b:2\"]", "servers = [\"http://a:1\", \"http://b:2\"]"),
            ("password = \"redis://:pw@a\"", "password = \"*************\""),
        ] {
            assert_eq!(Secrets::find(line).masked_text(), masked);
        }
    }

    #[test]
    fn values_that_are_not_secret_are_not_masked() {
        for line in [
            "secret_file = \"hs.key\"",
            "password_file = \"redis.password\"",
            "password_env = \"REDIS_PASSWORD\"",
            "digest_key_file = \"digest.key\"",
            "token_file = \"admin.token\"",
            "servers = \"http://a\"",
            "period = \"second\" # a secret",
            "key = \"cookie:session\"",
            "select = \"hs.key\"",
        ] {
            assert_eq!(Secrets::find(line).masked_text(), line);
        }
        let two = "secret = \"abc\", kid = \"k\"\nkid = \"l\"";
        assert_eq!(Secrets::find(two).masked_text(), "secret = \"***\", kid = \"k\"\nkid = \"l\"");
    }

    #[test]
    fn messages_do_not_repeat_a_secret() {
        let redacted = |message: &str, text: &str| {
            let mut message = message.to_owned();
            Secrets::find(text).remove_from(&mut message);
            message
        };
        let text = format!("secret = {VALUE}\n");
        let message = "`hunter2-hunter2` is not a value: write `\"hunter2-hu…\"`";
        assert_eq!(redacted(message, &text), "`***` is not a value: write `\"***…\"`");
        assert_eq!(redacted("there is no value", &text), "there is no value");
        assert_eq!(redacted("a", "secret = a"), "a");
    }
}
