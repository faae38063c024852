//! Removes secrets from messages about a configuration, which quote its lines and end up in logs.
//!
//! Masked are values of keys that resemble `secret`, `password` or `digest_key`, private keys, and passwords in URLs.
//! They are found by pattern, because the file may not be valid TOML. Values of references are known, and hidden with their
//! parts: [`HiddenValues`].

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

use memchr::memmem;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::diagnostics::quoted_list;
use super::schema;
use super::toml_reader::toml_errors;

/// The length of a prefix that reveals a secret when a message contains it.
const REVEALING_CHARS: usize = 4;
/// The length of a part of a value that reveals it, quoted or not.
const REVEALING_PART_BYTES: usize = 8;
/// A longer value has many short parts by chance.
const LONG_VALUE_BYTES: usize = 256;
/// The first of the characters that stand for values in a message. Private use, and no part of a word.
const MARKS: u32 = 0xf0000;

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

/// The text of a valid configuration for the dashboard, with its secrets replaced by `***`: also keys of exemptions and
/// overrides, fields with credentials, queries of URLs, and the path of the receiver of notifications.
pub fn shown_text(text: &str) -> String {
    let (document, _) = DeTable::parse_recoverable(text);
    let mut spans = secret_spans(text);
    for (name, value) in document.get_ref() {
        add_hidden_values(&[name.get_ref()], value, text, &mut spans);
    }
    spans.sort_by_key(|span| span.start);
    let (mut out, mut at) = (String::with_capacity(text.len()), 0);
    for span in spans {
        let value = &text[span.start.max(at)..span.end.max(at)];
        let inner = value.trim_matches(['"', '\'', ' ', '\t', '\r', '\n']);
        if !inner.is_empty() {
            let start = span.start.max(at) + value.find(inner).unwrap_or(0);
            out.extend([&text[at..start], "***"]);
            at = start + inner.len();
        }
    }
    out + &text[at..]
}

/// Adds the spans of strings that are secrets by their place. `path`: the names of the tables around the value, and its own.
fn add_hidden_values(path: &[&str], value: &Spanned<DeValue<'_>>, text: &str, spans: &mut Vec<Range<usize>>) {
    match value.get_ref() {
        DeValue::Table(table) => {
            for (name, value) in table {
                add_hidden_values(&[path, &[name.get_ref()]].concat(), value, text, spans);
            }
        }
        DeValue::Array(items) => items.iter().for_each(|item| add_hidden_values(path, item, text, spans)),
        DeValue::String(string) => {
            let (name, span) = (path.last().copied().unwrap_or_default(), value.span());
            let is_in = |table: &str| path.contains(&table);
            let is_field = is_in("request_headers") || is_in("response_headers");
            if (is_in("overrides") && name == "key")
                || (is_in("exemptions") && (name == "key" || string.starts_with("key:")))
                || (is_field && is_credential_field(name))
            {
                spans.push(span);
            } else if is_in("notify") && name == "url" {
                // The paths of many receivers are secrets.
                let host = text[span.clone()].find("://").map_or(span.start, |at| span.start + at + 3);
                if let Some(path) = text[host..span.end].find('/') {
                    spans.push(host + path + 1..span.end);
                }
            } else if string.contains("://")
                && let Some(query) = text[span.clone()].find('?')
            {
                spans.push(span.start + query + 1..span.end);
            }
        }
        _ => {}
    }
}

/// Whether a header field usually has credentials.
fn is_credential_field(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    ["auth", "cookie", "key", "token", "secret", "password"].iter().any(|word| name.contains(word))
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

/// The values of references. Messages show the references instead, and no part of a value.
#[derive(Clone, Default)]
pub struct HiddenValues {
    strings: Vec<HiddenString>,
    /// The file outside of its references, and the words of all settings: what messages show anyway. In lower case.
    public_text: String,
    public_words: HashSet<String>,
    /// Words of defaults, which messages about other settings show.
    default_words: HashSet<String>,
}

/// A string of the configuration with references in it.
#[derive(Clone)]
pub struct HiddenString {
    pub span: Range<usize>,
    /// Where the value of the first reference begins in the string.
    literal_bytes: usize,
    /// The whole string, then the value of each reference; each with what is shown instead.
    values: Vec<HiddenValue>,
}

#[derive(Clone)]
struct HiddenValue {
    /// As it is, and as messages escape it. Both in lower case, because messages also show normalized values.
    forms: [String; 2],
    shown: String,
}

impl HiddenValue {
    fn new(value: &str, shown: String) -> HiddenValue {
        HiddenValue {
            forms: [value.to_ascii_lowercase(), value.escape_debug().to_string().to_ascii_lowercase()],
            shown,
        }
    }

    fn chars(&self) -> usize {
        self.forms[0].chars().count()
    }
}

impl HiddenString {
    /// `text` has the values, and `written` the references.
    pub fn new(span: Range<usize>, text: &str, written: &str, literal_bytes: usize) -> HiddenString {
        HiddenString { span, literal_bytes, values: vec![HiddenValue::new(text, written.to_owned())] }
    }

    pub fn add_value(&mut self, value: &str, reference: String) {
        self.values.push(HiddenValue::new(value, reference));
    }

    /// Stands for a value while a message is searched for others.
    fn mark(position: usize) -> char {
        u32::try_from(position).ok().and_then(|position| char::from_u32(MARKS + position)).unwrap_or('\u{fffd}')
    }

    fn is_mark(c: char) -> bool {
        u32::from(c) >= MARKS
    }

    fn fix(&self) -> String {
        let references: Vec<&str> = self.values[1..].iter().map(|value| value.shown.as_str()).collect();
        format!(
            "correct the value of {}; what to write is not shown, because it would contain a part of the value",
            quoted_list(references, "or")
        )
    }
}

impl HiddenValues {
    pub fn add(&mut self, string: HiddenString) {
        self.strings.push(string);
    }

    /// Makes the words known that may be shown. `file` has the references.
    pub fn set_public_text(&mut self, file: &str) {
        if self.strings.is_empty() {
            return;
        }
        let (settings, defaults) = &*schema::VOCABULARY;
        let mut text = settings.clone();
        for (i, part) in file.split("${").enumerate() {
            // A part behind a reference begins with the reference.
            let outside = if i == 0 { part } else { part.find(['}', '\n']).map_or("", |end| &part[end..]) };
            text.extend(["\n", outside]);
        }
        self.public_text = text.to_ascii_lowercase();
        self.public_words = words(&self.public_text).map(str::to_owned).collect();
        self.default_words = words(&defaults.to_ascii_lowercase()).map(str::to_owned).collect();
    }

    /// Removes the values from a problem at `span`; `None`: in another file. A fix that shows a part of a value is replaced.
    pub fn remove_from_problem(&self, span: Option<&Range<usize>>, message: &mut String, fix: &mut String) {
        for string in &self.strings {
            let is_about = span.is_some_and(|span| string.span.start <= span.start && span.end <= string.span.end);
            *message = self.without(string, message, is_about).0;
            *fix = match self.without(string, fix, is_about) {
                (fix, true) => fix,
                _ => string.fix(),
            };
        }
    }

    /// A message about the whole configuration without the values.
    pub fn removed_from(&self, message: String) -> String {
        self.strings.iter().fold(message, |message, string| self.without(string, &message, false).0)
    }

    /// What is shown instead of the name of a file.
    pub fn shown_name(&self, name: &str) -> Option<&str> {
        let name = name.to_ascii_lowercase();
        let whole = self.strings.iter().map(|string| &string.values[0]);
        whole.filter(|value| value.forms[0] == name).map(|value| value.shown.as_str()).next()
    }

    /// The message with references instead of the values, and whether it can still be followed as a fix: it may say to write
    /// a reference within a string, and nothing that derives from a part of a value.
    fn without(&self, string: &HiddenString, message: &str, is_about: bool) -> (String, bool) {
        let mut text = message.to_owned();
        let values = || string.values.iter().enumerate().map(|(i, value)| (HiddenString::mark(i), value));
        for (mark, value) in values().filter(|(_, value)| value.chars() >= REVEALING_CHARS) {
            self.replace_whole(&mut text, value, mark, is_about);
        }
        let mut is_fix = true;
        let mut parts: Vec<String> = text.split('`').map(str::to_owned).collect();
        for (position, part) in parts.iter_mut().enumerate() {
            if position % 2 == 0 {
                for (mark, value) in values().skip(1) {
                    is_fix &= !self.replace_parts(part, value, mark, is_about);
                }
                continue;
            }
            for (mark, value) in values().filter(|(_, value)| (2..REVEALING_CHARS).contains(&value.chars())) {
                self.replace_whole(part, value, mark, is_about);
            }
            is_fix &= !part.contains(HiddenString::is_mark) || is_within_string(part);
            if let Some((mark, _)) = values().skip(1).find(|(_, value)| self.reveals(part, value, is_about)) {
                let beginning = part.trim_end_matches('…').to_ascii_lowercase();
                let is_beginning = string.values[0].forms.iter().any(|form| form.starts_with(&beginning));
                let has_more = string.literal_bytes > 0 || part.ends_with('…');
                let is_whole = is_beginning && has_more && beginning.len() > string.literal_bytes;
                *part = if is_whole { HiddenString::mark(0) } else { mark }.to_string();
                is_fix = false;
            }
        }
        let mut text = parts.join("`");
        for (mark, value) in values() {
            text = text.replace(mark, &value.shown);
        }
        (text, is_fix)
    }

    /// Replaces a whole value. One that the file has outside of references too is not replaced in messages about that.
    fn replace_whole(&self, text: &mut String, value: &HiddenValue, mark: char, is_about: bool) {
        for form in &value.forms {
            if !is_about && find_word(&self.public_text, form, 0).is_some() {
                continue;
            }
            let mut at = 0;
            while let Some(found) = find_word(&text.to_ascii_lowercase(), form, at) {
                text.replace_range(found..found + form.len(), mark.encode_utf8(&mut [0; 4]));
                at = found + mark.len_utf8();
            }
        }
    }

    /// Replaces long parts of a value. Returns whether there are any.
    fn replace_parts(&self, text: &mut String, value: &HiddenValue, mark: char, is_about: bool) -> bool {
        let lower = text.to_ascii_lowercase();
        let mut out = String::with_capacity(text.len());
        let mut rest = text.as_str();
        let mut is_changed = false;
        while let Some(c) = rest.chars().next() {
            let at = text.len() - rest.len();
            let length = common_length(&lower[at..], value, REVEALING_PART_BYTES);
            let part = &lower[at..at + length];
            // A plain word is one of the message.
            let is_part = part.contains(|c: char| !c.is_ascii_lowercase())
                && !words(part).all(|word| self.is_public(word, is_about));
            out.push(if is_part { mark } else { c });
            rest = &rest[if is_part { length } else { c.len_utf8() }..];
            is_changed |= is_part;
        }
        *text = out;
        is_changed
    }

    /// Whether a quoted text contains a part of the value that is not public.
    fn reveals(&self, quoted: &str, value: &HiddenValue, is_about: bool) -> bool {
        let quoted = quoted.trim_matches(['"', '\'', ' ']).trim_end_matches('…').to_ascii_lowercase();
        let least_word = if is_about { 2 } else { REVEALING_CHARS };
        if value.chars() < 2 || quoted.chars().count() < 2 {
            return false;
        }
        let [plain, escaped] = &value.forms;
        if is_about && [plain, escaped].contains(&&quoted) {
            return true;
        }
        let least_part = if plain.len() > LONG_VALUE_BYTES { REVEALING_PART_BYTES } else { REVEALING_CHARS };
        let hidden = || words(&quoted).filter(|word| !self.is_public(word, is_about));
        let is_part = |word: &str| {
            word.len() >= least_word && words(plain).any(|other| other == word)
                || word.char_indices().any(|(at, _)| common_length(&word[at..], value, least_part) > 0)
        };
        // A value that a fix corrects usually keeps its beginning: `1.0.0.0/8` is derived from `1.2.3.4/8`.
        let has_beginning = is_about
            && words(&quoted).next().is_none_or(|first| first.len() < 2 || !self.is_public(first, true))
            && common_prefix(&quoted, plain) >= 2;
        has_beginning || hidden().any(is_part)
    }

    fn is_public(&self, word: &str, is_about: bool) -> bool {
        self.public_words.contains(word) || !is_about && self.default_words.contains(word)
    }
}

impl PartialEq for HiddenValues {
    /// Always true: other settings have the values.
    fn eq(&self, _other: &HiddenValues) -> bool {
        true
    }
}

impl fmt::Debug for HiddenValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// The words of a text: letters and digits of any alphabet, with `_` and `-` between them.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !is_word_char(c)).filter(|word| !word.is_empty())
}

fn is_word_char(c: char) -> bool {
    c.is_alphanumeric() || c == '_' || c == '-'
}

/// The position from `start` on of a part that neither continues a word before it nor is continued by one.
fn find_word(text: &str, part: &str, start: usize) -> Option<usize> {
    let is_apart = |inner: Option<char>, outer: Option<char>| {
        !(inner.is_some_and(char::is_alphanumeric) && outer.is_some_and(char::is_alphanumeric))
    };
    text[start..].match_indices(part).map(|(at, _)| start + at).find(|at| {
        is_apart(part.chars().next(), text[..*at].chars().next_back())
            && is_apart(part.chars().next_back(), text[at + part.len()..].chars().next())
    })
}

/// Whether the marks in the text of a fix stand within strings, where references are possible.
fn is_within_string(text: &str) -> bool {
    let mut before = text.split(HiddenString::is_mark);
    before.next_back();
    let mut quotes = 0;
    !toml_errors::is_header(text)
        && before.all(|piece| {
            quotes += piece.matches('"').count();
            quotes % 2 == 1
        })
}

/// The length in bytes of the longest beginning of `text` that is a part of the value; 0 if that is less than `least`.
fn common_length(text: &str, value: &HiddenValue, least: usize) -> usize {
    if text.len() < least {
        return 0;
    }
    let beginning = &text[..text.ceil_char_boundary(least)];
    let length = |form: &String| {
        let starts = memmem::find_iter(form.as_bytes(), beginning);
        starts.map(|start| common_prefix(text, &form[start..])).max().unwrap_or(0)
    };
    value.forms.iter().map(length).max().unwrap_or(0)
}

/// The length in bytes of the characters with which both texts begin.
fn common_prefix(one: &str, other: &str) -> usize {
    one.chars().zip(other.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8()).sum()
}

fn secret_spans(text: &str) -> Vec<Range<usize>> {
    let mut spans: Vec<Range<usize>> = Vec::new();
    // `=` as in TOML, or `:` as in YAML.
    for at in memchr::memchr2_iter(b'=', b':', text.as_bytes()) {
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
    let chars = name.chars().count();
    let is_near = |word: &str| chars.abs_diff(word.len()) <= 2 && strsim::damerau_levenshtein(&name, word) <= 2;
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
    fn the_text_that_is_shown_has_no_secrets() {
        let text = r#"
[counters.shared]
redis = "rediss://gateway:hidden-1@redis.internal"
[notify]
url = "https://hooks.example/hidden-0/hidden-9?hidden-10"
[jwt]
jwks_url = "https://issuer.example/keys?code=hidden-2"
keys = [{ algorithm = "HS256", secret = "hidden-3" }]
[rules.r]
key = "header:x-api-key"
exemptions = ["10.0.0.0/8", "key:hidden-4", { key = ["hidden-5"] }]
overrides = [{ key = "hidden-6", windows = ["1/minute"] }]
[[rules.s.overrides]]
key = ["hidden-7"]
[[routes]]
path = "/a?b"
request_headers = { set = { Authorization = "Bearer hidden-8", x-name = "shown" } }
"#;
        let shown = shown_text(text);
        assert!(!shown.contains("hidden"), "{shown}");
        for part in [
            "rediss://gateway:***@redis.internal",
            "keys?***\"",
            "https://hooks.example/***\"",
            "{ key = \"***\", windows",
            "x-name = \"shown\"",
            "\"/a?b\"",
            "10.0.0.0/8",
        ] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        assert_eq!(shown.lines().count(), text.lines().count());
    }

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
