//! What of a file nobody is shown: the values of `secret`, and passwords, even where the file is no TOML.
//!
//! Messages show the line that they are about, and end up in logs. So whatever stands behind a key
//! that is called `secret`, `password` or `digest_key`, or nearly so, is found by the look of it, and covered; so is what
//! stands as a password in a URL.

use std::ops::Range;

/// How much of a value gives it away.
const REVEALING_CHARS: usize = 4;

/// Where a text has values that are secret, with their quotes, in bytes.
pub struct Secrets<'t> {
    text: &'t str,
    spans: Vec<Range<usize>>,
}

impl<'t> Secrets<'t> {
    pub fn find(text: &'t str) -> Secrets<'t> {
        Secrets { text, spans: secret_spans(text) }
    }

    /// The text with its secrets covered, character by character, so that every place stays.
    pub fn masked_text(&self) -> String {
        let mut out = String::with_capacity(self.text.len());
        let mut at = 0;
        for span in &self.spans {
            out.push_str(&self.text[at..span.start]);
            let cover = |c: char| if c == '\n' || c == '\r' || c == '"' || c == '\'' { c } else { '*' };
            out.extend(self.text[span.clone()].chars().map(cover));
            at = span.end;
        }
        out.push_str(&self.text[at..]);
        out
    }

    /// A message about the text, without what is secret in it.
    pub fn remove_from(&self, message: &mut String) {
        for span in &self.spans {
            let value = self.text[span.clone()].trim_matches(['"', '\'', ' ', '\t', '\r', '\n']);
            let telling: String = value.chars().take(REVEALING_CHARS).collect();
            if telling.chars().count() == REVEALING_CHARS && message.contains(&telling) {
                *message = remove_value(message, value, &telling);
            }
        }
    }
}

fn secret_spans(text: &str) -> Vec<Range<usize>> {
    let mut spans: Vec<Range<usize>> = Vec::new();
    let is_name = |c: char| c.is_alphanumeric() || "_-".contains(c);
    let mut at = 0;
    while let Some(offset) = text[at..].find(is_name) {
        let start = at + offset;
        let end = text[start..].find(|c| !is_name(c)).map_or(text.len(), |length| start + length);
        at = end;
        // `=` as in TOML, or `:` where that was mixed up.
        let rest = text[end..].trim_start_matches(['"', '\'', ' ', '\t']);
        let Some(value) = rest.strip_prefix(['=', ':']) else { continue };
        let value = value.trim_start_matches([' ', '\t']);
        let label = pem_label_length(value);
        if !is_secret_key(&text[start..end]) && label == 0 {
            continue;
        }
        let from = text.len() - value.len();
        at = from + value_length(value).max(label);
        spans.push(from + label..at);
    }
    let apart = |url: &Range<usize>| spans.iter().all(|span| url.end <= span.start || span.end <= url.start);
    let urls: Vec<Range<usize>> = url_passwords(text).into_iter().filter(apart).collect();
    spans.extend(urls);
    spans.sort_by_key(|span| span.start);
    spans
}

fn is_secret_key(name: &str) -> bool {
    let name = name.to_lowercase();
    // Nobody misspells a key at such length.
    let is_near = |word: &str| name.len() < 16 && strsim::damerau_levenshtein(&name, word) <= 2;
    let is = |word: &str| is_near(word) || name.starts_with(word);
    (is("secret") || is("password") || name.starts_with("pass") || is("digest_key"))
        && !name.ends_with("file")
        && !name.ends_with("env")
}

/// Where URLs have a password, from behind its colon to its `@`: that of the same quotes, or of the same line before
/// another URL, should a quote be in it.
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

/// Where a private key stands instead of the name of its file: how long it is up to the key itself, else 0.
fn pem_label_length(value: &str) -> usize {
    const END: &str = "PRIVATE KEY-----";
    let label = value.trim_start_matches(['"', '\'', '\n', '\r']).strip_prefix("-----BEGIN ");
    let end = label.and_then(|label| label.lines().next()?.find(END).map(|at| value.len() - label.len() + at));
    end.map_or(0, |end| end + END.len())
}

/// How long a value is: to its closing quotes, or to the end of the line.
fn value_length(value: &str) -> usize {
    for (quote, may_go_on) in [("\"\"\"", true), ("'''", true), ("\"", false), ("'", false)] {
        let Some(inner) = value.strip_prefix(quote) else { continue };
        let line = if may_go_on { inner.len() } else { inner.find('\n').unwrap_or(inner.len()) };
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

/// Leaves out all of a value that a message repeats, wherever it begins as the value does.
fn remove_value(message: &str, value: &str, beginning: &str) -> String {
    let mut out = String::new();
    let mut rest = message;
    while let Some(at) = rest.find(beginning) {
        let same = rest[at..].chars().zip(value.chars()).take_while(|(a, b)| a == b);
        let length: usize = same.map(|(c, _)| c.len_utf8()).sum();
        out.push_str(&rest[..at]);
        out.push_str("***");
        rest = &rest[at + length..];
    }
    out + rest
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
            "secret = \"hunter2-hunter2",
            "secret = \"\\\"hunter2-hunter2\"",
            "secret = \"\"\"\nhunter2-hunter2\n\"\"\"",
            "secret = '''\nhunter2-hunter2",
            "private_key = \"-----BEGIN EC PRIVATE KEY-----\\nhunter2-hunter2\"",
            "private_key = \"\"\"\n-----BEGIN PRIVATE KEY-----\nhunter2-hunter2\n\"\"\"",
        ] {
            let covered = Secrets::find(line).masked_text();
            assert!(!covered.contains("hunter"), "{covered}");
            assert_eq!(covered.chars().count(), line.chars().count());
        }
    }

    #[test]
    fn passwords_of_urls_are_masked() {
        for (line, covered) in [
            ("redis = \"redis://:hunter2@a\"", "redis = \"redis://:*******@a\""),
            ("redis = \"redis://me:h@nt:r/2@a:1/2\" # @", "redis = \"redis://me:********@a:1/2\" # @"),
            ("redis = [\"redis://u:pw@a\", \"redis://b\"]", "redis = [\"redis://u:**@a\", \"redis://b\"]"),
            ("redis = redis://:hunter2@a", "redis = redis://:*******@a"),
            ("redis = \"redis://:hunt\"er2@a\"", "redis = \"redis://:****\"***@a\""),
            ("redis = \"redis://me@a:6379\"", "redis = \"redis://me@a:6379\""),
            ("servers = [\"http://a:1\", \"http://b:2\"]", "servers = [\"http://a:1\", \"http://b:2\"]"),
            ("password = \"redis://:pw@a\"", "password = \"*************\""),
        ] {
            assert_eq!(Secrets::find(line).masked_text(), covered);
        }
    }

    #[test]
    fn values_that_are_not_secret_are_not_masked() {
        for line in [
            "secret_file = \"hs.key\"",
            "password_file = \"redis.password\"",
            "password_env = \"REDIS_PASSWORD\"",
            "digest_key_file = \"digest.key\"",
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
        let untold = |message: &str, text: &str| {
            let mut message = message.to_owned();
            Secrets::find(text).remove_from(&mut message);
            message
        };
        let text = format!("secret = {VALUE}\n");
        let message = "`hunter2-hunter2` is no value: write `\"hunter2-hu…\"`";
        assert_eq!(untold(message, &text), "`***` is no value: write `\"***…\"`");
        assert_eq!(untold("there is no value", &text), "there is no value");
        assert_eq!(untold("a", "secret = a"), "a");
    }
}
